//! A publisher and receivers in one process, with real regions and real sockets.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod child;
pub(crate) mod proxy;
pub(crate) mod remote;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use windlass_core::address::Host;
use windlass_core::digest::SumTable;
use windlass_core::dtype::Dtype;
use windlass_core::identity::{Incarnation, ModelId, StateDigest, Version};
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::RequestMode;
use windlass_data::image::ImageSpec;
use windlass_data::receiver::{Control, Receiver, ReceiverConfig};
use windlass_data::region::{Memfd, Region, RegionSpec, Writer};
use windlass_data::seal;
use windlass_data::serve::{Peer, Server, ServerConfig};
use windlass_data::stop::Stop;
use windlass_data::tcp::PullConfig;

pub(crate) fn stop() -> Stop {
    Stop::after(Duration::from_secs(30))
}

/// A cheap, repeatable source of bytes.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub(crate) fn fill_fast(&mut self, bytes: &mut [u8]) {
        bytes.chunks_mut(8).for_each(|c| c.copy_from_slice(&self.next().to_le_bytes()[..c.len()]));
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        bytes.iter_mut().for_each(|b| *b = self.next() as u8);
    }
}

/// Odd on purpose: several dtypes, a tensor of one byte, an empty one, one of several blocks.
pub(crate) fn odd_manifest() -> Manifest {
    let spec = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name, dtype, shape);
    let tensors = vec![
        spec("embed", Dtype::BF16, &[301, 997]),
        spec("norm", Dtype::F32, &[997]),
        spec("flag", Dtype::U8, &[1]),
        spec("empty", Dtype::F32, &[0, 7]),
        spec("mask", Dtype::U8, &[200_003]),
        spec("head", Dtype::F16, &[70_001]),
    ];
    Manifest::new(tensors, BTreeMap::new()).unwrap()
}

pub(crate) fn digest(manifest: &Manifest, data: &[u8]) -> StateDigest {
    let all = BlockRanges::from(0..manifest.cuts().blocks());
    let sums: SumTable =
        seal::sums(windlass_data::simd::kernels(), manifest, &all, data, 1, &Stop::never()).unwrap();
    sums.digest(manifest)
}

/// A publisher with one rank and an agent in this process.
pub(crate) struct Publisher {
    pub(crate) dir: TempDir,
    pub(crate) region: Arc<Region>,
    pub(crate) writer: Writer,
    pub(crate) server: Option<Arc<Server>>,
    pub(crate) data: Vec<u8>,
    pub(crate) noise: Noise,
}

pub(crate) fn shm() -> TempDir {
    tempfile::Builder::new().prefix("windlass-test-").tempdir_in("/dev/shm").unwrap()
}

pub(crate) fn config() -> ServerConfig {
    ServerConfig { threads: 2, streams: 3, ..ServerConfig::new(Host::new("127.0.0.1").unwrap()) }
}

impl Publisher {
    pub(crate) fn new(manifest: Manifest) -> Publisher {
        Publisher::with(manifest, None, config())
    }

    pub(crate) fn with(manifest: Manifest, part: Option<BlockRanges>, config: ServerConfig) -> Publisher {
        let dir = shm();
        Publisher::at(dir, manifest, part, config)
    }

    pub(crate) fn at(
        dir: TempDir,
        manifest: Manifest,
        part: Option<BlockRanges>,
        config: ServerConfig,
    ) -> Publisher {
        Publisher::of(dir, manifest, part, None, config)
    }

    pub(crate) fn of(
        dir: TempDir,
        manifest: Manifest,
        part: Option<BlockRanges>,
        incarnation: Option<Incarnation>,
        config: ServerConfig,
    ) -> Publisher {
        let spec = RegionSpec {
            part,
            memfd: Memfd::Never,
            incarnation,
            ..RegionSpec::new(dir.path().join("region"), ModelId::new("actor").unwrap(), Arc::new(manifest))
        };
        let region = Region::create(&spec).unwrap();
        let writer = region.writer(0).unwrap();
        let server = Some(Arc::new(Server::start(Arc::clone(&region), config).unwrap()));
        let data = vec![0; spec.manifest.data_bytes() as usize];
        Publisher { dir, region, writer, server, data, noise: Noise(0x9E37_79B9_7F4A_7C15) }
    }

    pub(crate) fn server(&self) -> Arc<Server> {
        Arc::clone(self.server.as_ref().unwrap())
    }

    /// Changes a share of the bytes: `per_mille` of them, each by a little.
    pub(crate) fn change(&mut self, per_mille: u64) {
        let n = self.data.len() as u64 * per_mille / 1000;
        for _ in 0..n.max(1) {
            let at = self.noise.below(self.data.len() as u64) as usize;
            self.data[at] = self.data[at].wrapping_add(1 + self.noise.below(3) as u8);
        }
    }

    /// Writes all bytes and commits.
    pub(crate) fn commit(&mut self, version: Version) {
        let attempt = self.writer.begin(version, &stop()).unwrap();
        match self.region.part() {
            None => attempt.write(0, &self.data).unwrap(),
            Some(part) => {
                let manifest = self.region.manifest();
                for block in part.iter() {
                    let block = manifest.cuts().block(block).unwrap();
                    for run in manifest.byte_runs(&block) {
                        let bytes = &self.data[run.start as usize..run.end as usize];
                        attempt.write(run.start, bytes).unwrap();
                    }
                }
            }
        }
        attempt.done(&stop()).unwrap();
    }

    /// Commits and waits until it is sealed and served.
    pub(crate) fn publish(&mut self, version: Version) -> StateDigest {
        self.commit(version);
        self.wait(version);
        digest(self.region.manifest(), &self.data)
    }

    pub(crate) fn wait(&self, version: Version) {
        let stop = stop();
        let server = self.server();
        let seen = version.checked_sub(1).map(|v| (self.region.incarnation(), v));
        let info = server.wait_version(seen, &stop);
        assert!(info.version >= Some(version), "{info:?} {:?}", server.failure());
    }
}

/// A receiver with its own image directory.
pub(crate) fn receiver(dir: &TempDir, control: Arc<dyn Control>) -> Receiver {
    receiver_at(dir.path().join("image"), control, RequestMode::Auto)
}

pub(crate) fn receiver_at(dir: PathBuf, control: Arc<dyn Control>, mode: RequestMode) -> Receiver {
    Receiver::open(receiver_config(dir, mode), control, None, &stop()).unwrap()
}

pub(crate) fn receiver_config(dir: PathBuf, mode: RequestMode) -> ReceiverConfig {
    ReceiverConfig {
        slice: None,
        image: ImageSpec {
            dir,
            model_id: ModelId::new("actor").unwrap(),
            group: false,
            memfd: Memfd::Never,
            threads: 2,
        },
        name: "test".into(),
        mode,
        streams: Some(3),
        transfer_timeout: Duration::from_secs(20),
        open_timeout: Duration::from_secs(5),
        pull: PullConfig::default(),
        allow: None,
        keep: None,
        share: None,
        nixl: None,
        relaying: None,
    }
}

/// What an engine would read: the whole version in the image.
pub(crate) fn image_bytes(receiver: &Receiver) -> Vec<u8> {
    let region = receiver.image().unwrap().region();
    let view = windlass_data::image::ImageView::take(region, Duration::from_secs(5), &stop()).unwrap();
    view.data().to_vec()
}

pub(crate) fn peers(servers: &[Arc<Server>]) -> Vec<Arc<dyn Peer>> {
    servers.iter().map(|s| Arc::clone(s) as Arc<dyn Peer>).collect()
}

/// Looks until `done`, and fails with what `what` says if that takes too long.
pub(crate) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let stop = stop();
    while !done() {
        assert!(!stop.is_set(), "waited in vain until {what}");
        std::thread::yield_now();
    }
}
