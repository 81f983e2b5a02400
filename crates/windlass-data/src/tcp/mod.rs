//! The TCP link: offers served by `sendfile`, stripes landed in place.
//!
//! Owns: the sockets and threads behind the transfer protocol. What goes over them, in which order and within
//! which limits is specified in [`windlass_core::wire`], whose pure parts this module drives. Called by whoever
//! publishes ([`Sender`], one per process) and by whoever receives ([`pull`], one call per ticket). Must not:
//! choose what to transfer, make or apply deltas, or know regions: it serves files and lands in mappings.
//!
//! # Sending
//!
//! [`Sender::start`] listens; one thread accepts, one serves each connection. [`Sender::offer`] puts a ticket and
//! its bytes up. A connection proves the ticket within a deadline that counts from its first byte, whatever it
//! sends meanwhile, and then gets the stripes that it claims: image and payload bytes by `sendfile`, runs that
//! follow each other in the file merged, short runs of strided blocks gathered and written. Sums are those of the
//! sealed table, or made from the bytes before any of them is sent.
//!
//! A connection never blocks on its peer in one direction only: while there is no room to send, it reads. That a
//! peer takes bytes counts as a sign of life, since nothing can be asked in the middle of a frame.
//!
//! An offer ends when the receiver says `Done` or gives up, when it is revoked, when its ticket expires, when no
//! stream of it is connected for a while, and when the sender shuts down. After that nothing more is begun. A
//! stream that comes late proves its ticket and is then told why it is of no more use.
//!
//! What strangers can have: connections that have proved nothing are bounded in number, over all and for one
//! address; beyond the bound the oldest is put out. Each costs a thread of small stack and one page of buffer.
//!
//! # Receiving
//!
//! [`pull`] opens the ticket's streams as threads. Payload goes from the socket into its place ([`ImageLanding`],
//! [`PayloadLanding`]), some hundred kilobytes at a time, and is summed there while it is in the cache. A stripe
//! with wrong sums is fetched again; a stream that is lost, silent or overdue dials again under a higher epoch; a
//! source that refuses twice, or whose streams have all run out of attempts, is given up. All of it ends by the
//! ticket's deadline, the caller's, or its stop.
//!
//! # TLS
//!
//! With a certificate ([`SenderConfig::tls`]) every connection begins with a TLS handshake, within the time that the
//! handshake of the protocol has; both happen, the ticket is proved as without. `sendfile` cannot encrypt: bytes are read
//! into a buffer and encrypted there, and at the other end decrypted and then copied into their place. Which sources are
//! inside TLS is said by the ticket, what must be by whoever pulls ([`PullConfig::privacy`]): the two never differ silently.
//!
//! `sendfile` to a closed connection raises `SIGPIPE`, which cannot be suppressed per call: the process must
//! ignore that signal, as Rust and Python programs do.
//!
//! # Invariants
//!
//! | | invariant | test |
//! |---|---|---|
//! | TCP-1 | an offer's hold is dropped when nothing is unacknowledged, or after the reset, and not before (W-4) | `the_hold_outlives_sendfile_and_ends_with_the_acknowledgement`, `a_revoked_offer_is_reset_after_its_grace_and_says_why_to_whoever_comes_back` |
//! | TCP-2 | bytes that changed after they were sealed are never accepted | `bytes_rewritten_in_flight_fail_their_sums`, `a_slot_rewritten_behind_a_slow_reader_is_never_accepted_and_ends_as_stale` |
//! | TCP-3 | a transfer ends with equal bytes or a named error before its deadline, whatever the network does | `every_transfer_through_a_harmful_network_ends_with_equal_bytes_or_a_named_error` |
//! | TCP-4 | a lost stream costs what was under way on it | `a_lost_stream_reconnects_and_costs_only_what_was_under_way` |
//! | TCP-5 | nobody gets a byte without proof of the ticket's key | `a_wrong_key_and_an_unknown_ticket_are_refused_in_the_same_words`, `a_replayed_hello_proves_nothing` |
//! | TCP-6 | peers that are strange, slow, silent or too many delay nobody and end | `garbage_on_the_port_is_closed_and_harms_nobody`, `a_handshake_byte_by_byte_ends_at_its_deadline`, `half_open_peers_crowd_out_each_other_and_not_the_work`, `a_slow_receiver_delays_nobody` |
//! | TCP-7 | a receiver that is gone gives the memory back | `a_dead_receiver_frees_its_offer`, `a_receiver_that_stops_reading_is_lost_and_frees_its_offer` |
//! | TCP-8 | only allowed endpoints are contacted | `endpoints_outside_the_allow_list_are_not_contacted` |
//! | TCP-9 | no thread and no descriptor is left behind | `nothing_is_left_after_many_pulls` |
//! | TCP-10 | with a certificate nothing but TLS is spoken, and nobody is trusted who should not be | `nobody_on_the_wire_can_read_weights_or_tickets_inside_tls`, `certificates_that_are_not_right_end_the_transfer_at_once_and_say_why`, `tls_is_neither_given_up_nor_taken_up_by_what_a_ticket_says`, `strangers_at_the_tls_port_are_closed_in_time_and_harm_nobody` |

mod board;
mod conn;
mod error;
mod landing;
mod lane;
mod offer;
mod pull;
mod reading;
mod secret;
mod sender;
mod serve;
mod watch;

pub use board::Board;
pub use error::TcpError;
pub use landing::{Fill, ImageLanding, Lander, Landing, PayloadLanding};
pub use offer::{Body, Crowd, Offer, OfferHandle, OfferProgress};
pub use pull::{PullConfig, Pulled, Relays, pull};
pub use sender::{Sender, SenderConfig};
pub use watch::{Seen, Watch};

#[cfg(test)]
mod tests;
