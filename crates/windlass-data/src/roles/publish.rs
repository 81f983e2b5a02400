//! A sender that writes a region and serves it from this process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use windlass_core::address::Host;
use windlass_core::identity::{Identity, ModelId, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;
use windlass_core::request::{PullMode, PullWeightUpdateRequest, WeightUpdateRequest};
use windlass_core::sync_info::{EmptyWeightSyncInfo, WeightSyncInfo};

use super::WeightTransferSender;
use super::error::RoleError;
use super::extract::{Piece, WeightExtractor, plan};
use super::plane::{ControlPlane, Reachable};
use crate::image::Known;
use crate::local::LocalServer;
use crate::publish::{PublishError, Publisher, wait_sealed};
use crate::region::{Attempt, Memfd, Region, RegionSpec};
use crate::serve::{Server, ServerConfig};
use crate::stop::Stop;
use crate::work;

/// How a trainer's side is run.
#[derive(Clone)]
pub struct PublisherConfig {
    /// The region's own directory, seen by all ranks of this host.
    pub region_dir: PathBuf,
    pub model_id: ModelId,
    pub manifest: Arc<Manifest>,
    /// Which rank this process is. Rank 0 makes the region and serves it; the others are made after it.
    pub rank: u16,
    /// How many ranks write.
    pub ranks: u16,
    /// The blocks that are held on this host; `None` for all.
    pub part: Option<BlockRanges>,
    /// Whether the owner's group may read.
    pub group: bool,
    /// What to do where the filesystem is too small.
    pub memfd: Memfd,
    pub threads: usize,
    /// How it is served.
    pub server: ServerConfig,
}

impl PublisherConfig {
    /// The defaults: one rank, served on the loopback interface.
    pub fn new(
        region_dir: impl Into<PathBuf>,
        model_id: ModelId,
        manifest: Arc<Manifest>,
    ) -> Result<PublisherConfig, RoleError> {
        let loopback = Host::new("127.0.0.1").map_err(windlass_core::sync_info::SyncInfoError::from)?;
        let server = ServerConfig::new(loopback);
        Ok(PublisherConfig {
            region_dir: region_dir.into(),
            model_id,
            manifest,
            rank: 0,
            ranks: 1,
            part: None,
            group: false,
            memfd: Memfd::Auto,
            threads: server.threads,
            server,
        })
    }
}

/// A committed version, and what this rank did for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Published {
    pub identity: Identity,
    /// Bytes that this rank wrote.
    pub bytes: u64,
    /// Waiting for the slot and for the other ranks to begin.
    pub wait_ms: f64,
    pub extract_ms: f64,
    /// Waiting for the other ranks to end.
    pub commit_ms: f64,
}

impl Published {
    /// The request that announces it to engines that pull; `None` if the sync info names no agent.
    pub fn request(&self, info: &WeightSyncInfo, mode: PullMode) -> Option<WeightUpdateRequest> {
        match info {
            WeightSyncInfo::Agent(agent) => agent.endpoints().first().map(|endpoint| {
                WeightUpdateRequest::Pull(PullWeightUpdateRequest {
                    identity: self.identity.clone(),
                    sender_endpoint: endpoint.clone(),
                    mode,
                })
            }),
            WeightSyncInfo::TorchDistributed(_) | WeightSyncInfo::Empty(_) | WeightSyncInfo::Store(_) => None,
        }
    }
}

/// One rank of a publisher. The first one also serves the region. Dropping that one ends all transfers and removes
/// the region.
pub struct RegionSender {
    // Dropped in this order: first no engine can ask, then nothing is served, then this rank leaves.
    reachable: Option<Reachable>,
    local: Option<LocalServer>,
    server: Option<Arc<Server>>,
    publisher: Publisher,
    threads: usize,
}

impl std::fmt::Debug for RegionSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegionSender").field("region", &self.region().dir()).finish_non_exhaustive()
    }
}

impl RegionSender {
    /// Makes the region (rank 0) or joins it (the others, after rank 0), and begins to serve it. With a control plane
    /// other hosts can reach it.
    pub fn start(
        config: PublisherConfig,
        plane: Option<&dyn ControlPlane>,
    ) -> Result<RegionSender, RoleError> {
        let PublisherConfig { rank, threads, server, .. } = config;
        if rank > 0 {
            let publisher = Publisher::new(Region::open(&config.region_dir)?, rank)?;
            return Ok(RegionSender { reachable: None, local: None, server: None, publisher, threads });
        }
        let spec = RegionSpec {
            ranks: config.ranks,
            part: config.part,
            group: config.group,
            memfd: config.memfd,
            extra_bytes: server.history.bytes,
            ..RegionSpec::new(config.region_dir, config.model_id, config.manifest)
        };
        let publisher = Publisher::create(&spec, &Stop::after(LET_GO))?;
        let server = Arc::new(Server::start(Arc::clone(publisher.region()), server)?);
        // From here on, dropping it takes everything back.
        let server = Some(server);
        let mut sender = RegionSender { reachable: None, local: None, server, publisher, threads };
        sender.local = match LocalServer::start(Arc::clone(sender.region())) {
            Ok(local) => Some(local),
            // Where a control plane was asked for, engines can still copy.
            Err(error) if plane.is_some() => {
                tracing::warn!(%error, "engines on this host will copy instead of mapping the slots");
                None
            }
            Err(error) => return Err(error.into()),
        };
        if let (Some(plane), Some(server)) = (plane, &sender.server) {
            sender.reachable = Some(plane.serve(server)?);
        }
        Ok(sender)
    }

    pub fn region(&self) -> &Arc<Region> {
        self.publisher.region()
    }

    /// What serves it, if this is the rank that does.
    pub fn server(&self) -> Option<&Arc<Server>> {
        self.server.as_ref()
    }

    /// Whether the server knows by now that the version is sealed, which it learns a moment later than the region.
    fn is_served(&self, version: Version, stop: &Stop) -> bool {
        let Some(server) = &self.server else { return true };
        let seen = version.checked_sub(1).map(|v| (self.region().incarnation(), v));
        server.wait_version(seen, &stop.with_timeout(Stop::GLANCE)).version >= Some(version)
    }

    fn identity(&self, version: Version) -> Identity {
        let (model_id, incarnation) = (self.region().model_id().clone(), self.region().incarnation());
        Identity { model_id, incarnation, version }
    }
}

/// How long agents, engines and forked children may take to let go of the region of a publisher that was killed.
const LET_GO: Duration = Duration::from_secs(10);

impl WeightTransferSender for RegionSender {
    fn publish(
        &mut self,
        extractor: &dyn WeightExtractor,
        version: Version,
        stop: &Stop,
    ) -> Result<Published, RoleError> {
        let rank = self.publisher.rank();
        // Everything that can be wrong with the extractor is said before the other ranks are kept waiting.
        let pieces = plan(extractor, self.region(), rank)?;
        let identity = self.identity(version);
        let (manifest, start) = (Arc::clone(self.region().manifest()), self.region().data_start());
        let count = pieces.len() as u64;
        let threads = self.threads.min(extractor.max_threads());
        let begun = Instant::now();
        let extract = |attempt: &Attempt<'_>| {
            let extracting = Instant::now();
            let copied = work::each(
                threads,
                count,
                stop,
                || 0u64,
                |bytes, i| {
                    let Some(Piece { tensor, range }) = pieces.get(i as usize) else { return Ok(()) };
                    let Some(t) = manifest.tensors().get(*tensor) else { return Ok(()) };
                    attempt.check()?;
                    let at = start + t.offset;
                    let mut out = attempt.mapping().lend(at + range.start..at + range.end)?;
                    extractor.extract(*tensor, range.clone(), &mut out).map_err(|source| {
                        let (tensor, range) = (t.name.clone(), range.clone());
                        RoleError::Extract { rank, tensor, range, version, source }
                    })?;
                    *bytes += range.end - range.start;
                    Ok(())
                },
            );
            let copied = copied.map_err(|e| match e {
                RoleError::Stopped { source, .. } => {
                    RoleError::stopped(format!("writing {identity} as rank {rank}"))(source)
                }
                other => other,
            })?;
            Ok::<_, RoleError>((copied.into_iter().sum(), extracting, Instant::now()))
        };
        let (bytes, extracting, committing) = self.publisher.copy(version, stop, extract)?;
        let ms = |a: Instant, b: Instant| (b - a).as_secs_f64() * 1e3;
        Ok(Published {
            identity,
            bytes,
            wait_ms: ms(begun, extracting),
            extract_ms: ms(extracting, committing),
            commit_ms: ms(committing, Instant::now()),
        })
    }

    fn wait_sealed(&self, version: Version, stop: &Stop) -> Result<Known, RoleError> {
        let identity = self.identity(version);
        let unsealed = |source| {
            let why = self.server.as_ref().and_then(|s| s.failure());
            let why = why.map_or(String::new(), |w| format!(" (sealing failed: {w})"));
            RoleError::stopped(format!("waiting for {identity} to be sealed{why}"))(source)
        };
        let digest = wait_sealed(self.region(), version, stop).map_err(|e| match e {
            PublishError::Unsealed { source, .. } => unsealed(source),
            other => other.into(),
        })?;
        while !self.is_served(version, stop) {
            stop.check().map_err(unsealed)?;
        }
        Ok(Known { identity, digest })
    }

    fn sync_info(&self) -> WeightSyncInfo {
        match &self.reachable {
            Some(reachable) => WeightSyncInfo::Agent(reachable.info.clone()),
            None => WeightSyncInfo::Empty(EmptyWeightSyncInfo),
        }
    }
}

impl Drop for RegionSender {
    fn drop(&mut self) {
        (self.reachable, self.local) = (None, None);
        let Some(server) = self.server.take() else { return };
        // Others may have kept it; then they serve on, and the region stays.
        let Some(server) = Arc::into_inner(server) else { return };
        server.shutdown(Duration::from_millis(200));
        match self.region().discard() {
            Ok(true) => {}
            Ok(false) => {
                tracing::debug!(dir = %self.region().dir().display(), "the region is still open elsewhere");
            }
            Err(error) => tracing::warn!(%error, "the region was not removed; `windlass gc` will"),
        }
    }
}
