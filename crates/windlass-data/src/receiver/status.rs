//! What is known about a receiver: where it stands, and what happened.

use std::fmt;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use windlass_core::identity::{Identity, Incarnation};
use windlass_core::wire::control::Brought;

use crate::image::Known;
use crate::tcp::Watch;

/// What a receiver is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    #[default]
    Idle,
    /// Talking to the publisher.
    Asking,
    Pulling,
    /// Waiting for engines to leave the image.
    Opening,
    /// A delta is being applied.
    Applying,
    /// The digest is compared and the version made visible.
    Finishing,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Idle => "idle",
            Stage::Asking => "asking",
            Stage::Pulling => "pulling",
            Stage::Opening => "opening the image",
            Stage::Applying => "applying",
            Stage::Finishing => "finishing",
        })
    }
}

/// Where a receiver stands. Can be read at any time, from any thread.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TransferStatus {
    /// What it is doing.
    pub stage: Stage,
    /// Who was asked last: an agent, or a store.
    pub publisher: Option<String>,
    /// The version that is being fetched.
    pub target: Option<Identity>,
    /// The whole version in the image.
    pub image: Option<Known>,
    pub mode: Option<&'static str>,
    /// Bytes of the transfer.
    pub bytes: u64,
    /// Bytes of it that arrived and were acknowledged.
    pub bytes_done: u64,
    /// Who brought how much of them, where other receivers take part.
    pub brought: Vec<Brought>,
    /// Syncs that ended with a new version.
    pub synced: u64,
    pub error: Option<String>,
}

/// Something that happened in a receiver.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// An image was found, made or replaced.
    Opened {
        /// The whole version in it.
        image: Option<Known>,
    },
    /// The publisher began a new life.
    Incarnation { incarnation: Incarnation },
    Transfer {
        mode: &'static str,
        why: String,
        /// The version it leads to.
        identity: Identity,
        /// Bytes on the wire.
        bytes: u64,
    },
    /// The publisher reused its memory during a pull; what landed was kept.
    Lapped {
        /// The version of the pull.
        identity: Identity,
        /// Blocks that are still missing.
        missing: u32,
    },
    /// A whole version is visible.
    Whole { image: Known },
}

/// Who is told about events. Called on the receiver's thread: be quick.
pub type Listener = Arc<dyn Fn(&Event) + Send + Sync>;

/// Shared view of a receiver's status.
#[derive(Clone, Default)]
pub struct StatusHandle(Arc<Mutex<Shown>>);

#[derive(Default)]
pub(super) struct Shown {
    pub(super) status: TransferStatus,
    pub(super) watch: Arc<Watch>,
}

impl StatusHandle {
    /// Where the receiver stands now.
    pub fn get(&self) -> TransferStatus {
        let shown = self.shown();
        let (bytes_done, brought) = (shown.watch.see().bytes_done, shown.watch.brought());
        let brought = if brought.iter().any(|b| b.by.is_some()) { brought } else { Vec::new() };
        TransferStatus { bytes_done, brought, ..shown.status.clone() }
    }

    pub(super) fn shown(&self) -> MutexGuard<'_, Shown> {
        self.0.lock()
    }

    pub(super) fn set(&self, change: impl FnOnce(&mut TransferStatus)) {
        change(&mut self.shown().status);
    }
}
