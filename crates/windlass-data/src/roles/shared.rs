//! A receiver on the publisher's own host: it maps the slots and copies nothing.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use windlass_core::digest::BlockSum;
use windlass_core::identity::Identity;
use windlass_core::ranges::BlockRanges;

use super::error::RoleError;
use super::patience::Waiting;
use super::{Arrived, EngineConfig, WeightTransferReceiver, moved_on};
use crate::image::Known;
use crate::local::{self, LocalError};
use crate::publish::PublishError;
use crate::receiver::{Stage, Synced, TransferStatus};
use crate::region::{Lease, LeaseKind, Region, SlotState};
use crate::seal::{self, table};
use crate::stop::Stop;

/// How long nothing may happen before it is looked whether the agent still lives.
const PROBE: Duration = Duration::from_secs(1);

/// Hands out the sealed slots of a region on this host, in place.
///
/// While it waits it has the region open, and an open region is not replaced. So that a publisher which died can come
/// back, this receiver releases the region as soon as no process listens at its socket.
#[derive(Debug)]
pub struct SharedReceiver {
    dir: PathBuf,
    config: Settings,
    region: Option<(Arc<Region>, Option<FileId>)>,
    waiting: Waiting,
    status: TransferStatus,
}

/// Device and inode.
type FileId = (u64, u64);

#[derive(Debug)]
struct Settings {
    load_timeout: Duration,
    verify: bool,
    threads: usize,
}

impl SharedReceiver {
    /// Follows the region in `dir`, which may come later.
    pub fn new(dir: PathBuf, config: &EngineConfig) -> SharedReceiver {
        SharedReceiver {
            dir,
            config: Settings {
                load_timeout: config.load_timeout,
                verify: config.verify_mapped,
                threads: config.threads,
            },
            region: None,
            waiting: Waiting::new(config.patience),
            status: TransferStatus { mode: Some("mapped"), ..TransferStatus::default() },
        }
    }

    fn attached(&mut self) -> Result<Arc<Region>, RoleError> {
        if let Some((region, header)) = &self.region
            && *header == self.header()
        {
            return Ok(Arc::clone(region));
        }
        self.region = None;
        // Before attaching: if the region is replaced in between, the next look finds another one.
        let header = self.header();
        let region = local::attach(&self.dir).map_err(|e| match e {
            LocalError::Io { source, .. } if is_away(&source) => {
                RoleError::Away { dir: self.dir.clone(), source }
            }
            other => other.into(),
        })?;
        if region.part().is_some() {
            let model = region.model_id().to_string();
            return Err(RoleError::Partial { dir: self.dir.clone(), model });
        }
        self.region = Some((Arc::clone(&region), header));
        Ok(region)
    }

    /// The header that is at the path now. Each region has its own.
    fn header(&self) -> Option<FileId> {
        let about = std::fs::metadata(self.dir.join("header")).ok()?;
        Some((about.dev(), about.ino()))
    }

    /// Whether the region that is attached is still the one at the path, and is being served.
    fn alive(&self) -> bool {
        self.region.as_ref().is_some_and(|(_, header)| *header == self.header())
            && UnixStream::connect(self.dir.join(local::SOCKET)).is_ok()
    }

    /// Waits for a sealed version other than `loaded`. `None` if the publisher went away meanwhile.
    fn wait(
        &mut self,
        region: &Arc<Region>,
        loaded: Option<&Identity>,
        stop: &Stop,
    ) -> Result<Option<(SlotState, Lease)>, RoleError> {
        let mut probed = Instant::now();
        loop {
            let bell = region.bell();
            let fresh = region.state().active.filter(|s| s.sealed.is_some());
            if let Some(slot) = fresh.filter(|s| Some(&identity(region, s)) != loaded) {
                match region.lease(slot.id, LeaseKind::Map, self.config.load_timeout) {
                    Ok(lease) => return Ok(Some((slot, lease))),
                    // The next look shows what is there instead.
                    Err(e) if moved_on(&e) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            stop.check().map_err(RoleError::stopped(format!(
                "waiting for a new version in {}",
                self.dir.display()
            )))?;
            region.wait(bell, stop.nap());
            if probed.elapsed() >= PROBE {
                if !self.alive() {
                    tracing::info!(dir = %self.dir.display(), "the publisher is away");
                    return Ok(None);
                }
                probed = Instant::now();
            }
        }
    }

    /// The sum of each tensor, from the bytes themselves or from the publisher's table.
    fn sums(
        &self,
        region: &Region,
        known: &Known,
        lease: &Lease,
        stop: &Stop,
    ) -> Result<Vec<BlockSum>, RoleError> {
        let manifest = region.manifest();
        if !self.config.verify {
            let stored = table::read(&region.sums_path(lease.slot()), manifest)?;
            return Ok(stored.sums.tensors(manifest));
        }
        let all = BlockRanges::from(0..manifest.cuts().blocks());
        let kernels = crate::simd::kernels();
        let sums = seal::sums(kernels, manifest, &all, lease.data(), self.config.threads, stop)?;
        let found = sums.digest(manifest);
        if found == known.digest {
            return Ok(sums.tensors(manifest));
        }
        let (place, identity) = (region.slot_path(lease.slot()), Box::new(known.identity.clone()));
        Err(RoleError::Digest { place, identity, found, expected: known.digest })
    }

    fn hold(
        &mut self,
        region: &Arc<Region>,
        slot: SlotState,
        lease: Lease,
        stop: &Stop,
    ) -> Result<Arrived, RoleError> {
        let start = Instant::now();
        self.status.stage = Stage::Finishing;
        let Some(digest) = slot.sealed else {
            return Err(PublishError::Replaced { version: slot.version, newest: slot.version }.into());
        };
        let known = Known { identity: identity(region, &slot), digest };
        self.status.target = Some(known.identity.clone());
        let sums = self.sums(region, &known, &lease, stop)?;
        let path = region.slot_path(slot.slot);
        self.status.image = Some(known.clone());
        let how = Synced {
            image: Some(known.clone()),
            mode: "mapped",
            total_ms: start.elapsed().as_secs_f64() * 1e3,
            ..Synced::default()
        };
        let arrived = Arrived::new(known, Arc::clone(region.manifest()), Box::new(lease))?;
        Ok(arrived.with_sums(sums).with_path(path).with_how(how))
    }
}

/// Whether no process listens there, or no longer.
fn is_away(error: &io::Error) -> bool {
    use io::ErrorKind as K;
    matches!(
        error.kind(),
        K::NotFound
            | K::ConnectionRefused
            | K::ConnectionReset
            | K::BrokenPipe
            | K::UnexpectedEof
            | K::WouldBlock
            | K::TimedOut
    )
}

fn identity(region: &Region, slot: &SlotState) -> Identity {
    let (model_id, incarnation) = (region.model_id().clone(), region.incarnation());
    Identity { model_id, incarnation, version: slot.version }
}

impl WeightTransferReceiver for SharedReceiver {
    fn next(&mut self, loaded: Option<&Identity>, stop: &Stop) -> Result<Arrived, RoleError> {
        self.waiting.heard();
        self.status.stage = Stage::Asking;
        let result = loop {
            let tried = match self.attached() {
                Ok(region) => {
                    self.waiting.heard();
                    match self.wait(&region, loaded, stop) {
                        Ok(Some((slot, lease))) => self.hold(&region, slot, lease, stop).map(Some),
                        Ok(None) => {
                            self.region = None;
                            Ok(None)
                        }
                        Err(e) => Err(e),
                    }
                }
                Err(e) => self.waiting.again(e, stop).map(|()| None),
            };
            match tried {
                Ok(Some(arrived)) => break Ok(arrived),
                Ok(None) => {}
                Err(e) => break Err(e),
            }
            if let Err(source) = stop.check() {
                break Err(RoleError::stopped(format!("attaching to {}", self.dir.display()))(source));
            }
        };
        self.status.stage = Stage::Idle;
        self.status.error = result.as_ref().err().map(ToString::to_string);
        self.status.synced += u64::from(result.is_ok());
        result
    }

    fn status(&self) -> TransferStatus {
        self.status.clone()
    }
}
