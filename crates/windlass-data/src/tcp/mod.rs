//! The TCP link.

mod conn;
mod error;
mod landing;
mod offer;
mod pull;
mod sender;
mod serve;
mod watch;

pub use error::TcpError;
pub use landing::{Fill, ImageLanding, Lander, Landing, PayloadLanding};
pub use offer::{Body, Offer, OfferHandle, OfferProgress};
pub use pull::{PullConfig, Pulled, pull};
pub use sender::{Sender, SenderConfig};
pub use watch::{Seen, Watch};

#[cfg(test)]
mod tests;
