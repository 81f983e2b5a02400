//! Placeholder.

use crate::error::Kind;

/// What can go wrong here.
#[derive(Debug, thiserror::Error)]
pub enum SyncInfoError {}

impl SyncInfoError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match *self {}
    }
}
