//! The four roles: who extracts, sends, receives and loads weights, as traits.
//!
//! Owns: the traits by which a trainer or an engine written in Rust uses Windlass without any Python, our
//! implementations of them, and the factory that pairs a sender with a receiver. Called by such programs (see
//! `examples/`) and by tests. Must not: know HTTP (a [`ControlPlane`] is handed in), or decide which strategy suits
//! (that is [`windlass_core::choose`]).
//!
//! ```text
//! trainer                                                              engine
//! WeightExtractor ─► WeightTransferSender ═══ a link ═══► WeightTransferReceiver ─► WeightLoader
//!   bytes of this      writes the slot,                     whole versions whose      gets a version
//!   rank's tensors     commits, serves                      digest is right           under a lease
//! ```
//!
//! # The order of things
//!
//! 1. The trainer builds a [`WeightTransferStrategy`] from its configuration and has it make a sender. The sender is
//!    ready when it is there: the region exists and is served.
//! 2. The sender's [`sync_info`](WeightTransferSender::sync_info) is plain data. It exists only now, because ports
//!    are known when they are bound, and the orchestrator carries it to every engine.
//! 3. Each engine builds the same strategy and has it make a receiver from the sync info, at any time, before or
//!    after the first version.
//! 4. The trainer [publishes](WeightTransferSender::publish) once before training and once for each step. Engines
//!    [feed](Feed) their loader. Neither waits for the other.
//!
//! # What each side can rely on
//!
//! - An extractor is asked for every byte of its ranges once for each version, in pieces, straight into the slot.
//!   Several threads ask at a time.
//! - A version exists when all ranks have written their ranges. If one rank fails, all of them fail, and the old
//!   version goes on being served.
//! - A loader gets whole versions whose digest was right, one at a time, never an older one than before (unless the
//!   publisher began a new life), and each name of the manifest in them, aliases included.
//! - What the *engine* holds is recorded apart from what the receiver's *image* holds. A loader that fails leaves the
//!   engine's version as it was, and is given the newest version again; then nothing is said about which tensors
//!   changed, because it is unknown what it wrote.
//!
//! | | invariant | test |
//! |---|---|---|
//! | ROLE-1 | a loader sees only whole versions | `a_loader_gets_whole_versions_only` |
//! | ROLE-2 | never two loads at once, never an older version | `versions_are_loaded_in_order_and_one_at_a_time` |
//! | ROLE-3 | every name is there, aliases included | `a_loader_sees_every_tensor_and_alias` |
//! | ROLE-4 | a failed load leaves the engine's version, and is tried again | `a_failed_load_leaves_the_old_version_and_is_tried_again` |
//! | ROLE-5 | a rank that leaves bytes unwritten cannot publish | `bytes_that_no_rank_extracts_are_an_error_before_anything_is_written` |
//!
//! # Another transport
//!
//! Implement [`WeightTransferSender`] (or use [`RegionSender`]), [`WeightTransferReceiver`] and
//! [`WeightTransferStrategy`], add the strategy to a [`Strategies`], and instantiate the suite in `conformance` (a feature
//! of this crate) for it: one line.

mod error;
mod extract;
mod image;
mod load;
mod patience;
mod plane;
mod publish;
mod shared;
mod strategy;

pub use error::{BoxError, RoleError};
pub use extract::{Tensors, WeightExtractor};
pub use image::ImageReceiver;
pub use load::{Feed, Loaded, TensorView, WeightLoader, Weights};
pub use patience::Patience;
pub use plane::{ControlPlane, Reachable};
pub use publish::{Published, PublisherConfig, RegionSender};
pub use shared::SharedReceiver;
pub use strategy::{
    NixlTransferStrategy, ShmTransferStrategy, Strategies, TcpTransferStrategy, WeightTransferStrategy,
};

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use windlass_core::address::Host;
use windlass_core::digest::BlockSum;
use windlass_core::identity::{Identity, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::sync_info::WeightSyncInfo;
use windlass_core::wire::control::RequestMode;

use crate::image::Known;
use crate::nixl::Reader;
use crate::receiver::{Synced, TransferStatus};
use crate::region::{Lease, Memfd, RegionError};
use crate::stop::Stop;
use crate::tcp::PullConfig;

/// The trainer's end of a link.
pub trait WeightTransferSender: Send {
    /// Writes this rank's bytes of `version`, and returns when all ranks have and the version is committed. The old
    /// version is served until then, and goes on being so if this fails.
    fn publish(
        &mut self,
        extractor: &dyn WeightExtractor,
        version: Version,
        stop: &Stop,
    ) -> Result<Published, RoleError>;

    /// Waits until `version` is sealed: its digest is fixed and receivers can have it.
    fn wait_sealed(&self, version: Version, stop: &Stop) -> Result<Known, RoleError>;

    /// What engines need to join. May contain a token: treat it like one.
    fn sync_info(&self) -> WeightSyncInfo;
}

/// The engine's end of a link.
pub trait WeightTransferReceiver: Send {
    /// The newest version there is, if it is not `loaded`; waits for one otherwise. It is whole, its digest was found
    /// right, and its bytes stand still until it is dropped.
    ///
    /// What a receiver found when it started counts: an engine that has nothing loads it although the publisher is
    /// away.
    fn next(&mut self, loaded: Option<&Identity>, stop: &Stop) -> Result<Arrived, RoleError>;

    /// Where it stands.
    fn status(&self) -> TransferStatus;
}

/// Memory that does not change while this is alive.
pub trait Held: Send {
    /// The data of an image, by its manifest.
    fn data(&self) -> &[u8];
    /// Lets go. An error if the memory was taken back before: what was read may be of two versions.
    fn finish(self: Box<Self>) -> Result<(), RoleError>;
}

impl Held for Lease {
    fn data(&self) -> &[u8] {
        Lease::data(self)
    }

    fn finish(self: Box<Self>) -> Result<(), RoleError> {
        Ok(Lease::finish(*self)?)
    }
}

/// A whole version at the engine's side, held in place.
pub struct Arrived {
    known: Known,
    manifest: Arc<Manifest>,
    held: Box<dyn Held>,
    sums: Option<Vec<BlockSum>>,
    path: Option<PathBuf>,
    how: Synced,
}

impl std::fmt::Debug for Arrived {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrived").field("known", &self.known).field("how", &self.how).finish_non_exhaustive()
    }
}

impl Arrived {
    /// A version whose digest was found right. For receivers of any kind.
    pub fn new(known: Known, manifest: Arc<Manifest>, held: Box<dyn Held>) -> Result<Arrived, RoleError> {
        let (have, need) = (held.data().len() as u64, manifest.data_bytes());
        if have != need {
            return Err(RoleError::Truncated { identity: Box::new(known.identity), have, need });
        }
        Ok(Arrived { known, manifest, held, sums: None, path: None, how: Synced::default() })
    }

    /// With the sum of each tensor, by which it is known what changed.
    #[must_use]
    pub fn with_sums(mut self, sums: Vec<BlockSum>) -> Arrived {
        self.sums = Some(sums).filter(|s| s.len() == self.manifest.tensors().len());
        self
    }

    /// With the safetensors file that the memory is.
    #[must_use]
    pub fn with_path(mut self, path: PathBuf) -> Arrived {
        self.path = Some(path);
        self
    }

    /// With how it came.
    #[must_use]
    pub fn with_how(mut self, how: Synced) -> Arrived {
        self.how = how;
        self
    }

    /// Which version, with its digest.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// Which version.
    pub fn identity(&self) -> &Identity {
        &self.known.identity
    }

    /// Its state digest.
    pub fn digest(&self) -> StateDigest {
        self.known.digest
    }

    /// Its tensors.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Its bytes, by the manifest.
    pub fn data(&self) -> &[u8] {
        self.held.data()
    }

    /// The safetensors file, for loaders that want a path. Valid while this is alive.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// How it came, and how long that took.
    pub fn how(&self) -> &Synced {
        &self.how
    }

    /// Lets go of the memory. An error if it was taken back before, and what was read must be thrown away.
    pub fn finish(self) -> Result<(), RoleError> {
        self.held.finish()
    }
}

/// How an engine's side is run.
#[derive(Clone)]
pub struct EngineConfig {
    /// What people call it.
    pub name: String,
    /// Where the image is kept, if the link needs one.
    pub image_dir: PathBuf,
    /// Whether the owner's group may read the image.
    pub group: bool,
    /// What to do where the filesystem is too small for the image.
    pub memfd: Memfd,
    /// Threads for sums and deltas.
    pub threads: usize,
    /// How it wants to be served.
    pub mode: RequestMode,
    /// Streams of a transfer; the publisher's default if not given.
    pub streams: Option<u16>,
    /// How long one transfer may take.
    pub transfer_timeout: Duration,
    /// How long to wait for other engines to leave the image.
    pub open_timeout: Duration,
    /// How long a load may take before the memory may be taken back.
    pub load_timeout: Duration,
    /// Whether memory that is mapped and not copied is summed before each load. It was summed when it was sealed.
    pub verify_mapped: bool,
    /// What to do while the publisher is away.
    pub patience: Patience,
    pub pull: PullConfig<'static>,
    /// The hosts whose data connections are accepted; those in the tickets if none are given.
    pub allow: Option<Vec<Host>>,
    /// Reads images from the publisher's memory, where it lets it.
    pub nixl: Option<Arc<Reader>>,
}

impl EngineConfig {
    /// The defaults, with an image in `image_dir`.
    pub fn new(name: impl Into<String>, image_dir: impl Into<PathBuf>) -> EngineConfig {
        EngineConfig {
            name: name.into(),
            image_dir: image_dir.into(),
            group: false,
            memfd: Memfd::Auto,
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            mode: RequestMode::Auto,
            streams: None,
            transfer_timeout: Duration::from_mins(10),
            open_timeout: Duration::from_mins(2),
            load_timeout: Duration::from_mins(5),
            verify_mapped: true,
            patience: Patience::default(),
            pull: PullConfig::default(),
            allow: None,
            nixl: None,
        }
    }
}

/// Whether a lease was refused because the slot moved on, which the next look shows.
fn moved_on(error: &RegionError) -> bool {
    matches!(error, RegionError::LeaseGone { .. })
}
