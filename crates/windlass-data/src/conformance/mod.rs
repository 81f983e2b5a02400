//! What every link and every loader must do, as a suite that is generic over the [roles](crate::roles).
//!
//! Owns: the cases. Called by tests only, of this crate and of others; behind the feature `conformance`. Must not:
//! know any link or loader.
//!
//! # A new link
//!
//! Implement [`LinkUnderTest`] and instantiate the suite once; every case becomes a test of its own:
//!
//! ```text
//! struct Mine;
//! impl LinkUnderTest for Mine {
//!     fn strategy(&self, home: &Path) -> Arc<dyn WeightTransferStrategy> { … }
//! }
//! windlass_data::link_conformance!(mine, super::Mine);
//! ```
//!
//! # A new loader
//!
//! Implement [`LoaderUnderTest`], which can also tell what the engine holds, and instantiate the suite with any link:
//!
//! ```text
//! windlass_data::loader_conformance!(my_engine, super::Mine, super::MyEngine::new());
//! ```
//!
//! A case fails by a panic that says what differs.

pub mod links;
pub mod loaders;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;
use windlass_core::digest::SumTable;
use windlass_core::dtype::Dtype;
use windlass_core::identity::{ModelId, StateDigest, Version};
use windlass_core::manifest::{DimCut, Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::RequestMode;

use crate::image::Known;
use crate::nixl;
use crate::region::Memfd;
use crate::roles::{
    Arrived, BoxError, EngineConfig, Patience, PublisherConfig, Tensors, WeightLoader,
    WeightTransferReceiver, WeightTransferSender, WeightTransferStrategy, Weights,
};
use crate::seal;
use crate::stop::Stop;

/// A link, as the suite sees it.
pub trait LinkUnderTest {
    /// A strategy for one case, which has `home` for itself. The region is at [`region_dir`].
    fn strategy(&self, home: &Path) -> Arc<dyn WeightTransferStrategy>;

    /// Whether bytes are moved, so that small changes must cost few of them.
    fn moves_bytes(&self) -> bool {
        true
    }

    /// What the link needs and this machine does not have. Its cases are then skipped, and say so.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Whether the receiver keeps an image, which a restarted one goes on from.
    fn keeps_image(&self) -> bool {
        true
    }

    /// Whether the damaging wire has flipped its bit by now, for a link that counts no damaged bytes as received.
    fn damaged(&self) -> Option<bool> {
        None
    }

    /// The same with a wire that flips one bit, once, if there is a wire.
    fn damaging(&self, _home: &Path) -> Option<Arc<dyn WeightTransferStrategy>> {
        None
    }
}

/// Says loudly that a test was skipped. Where `CI` is set, nothing may be.
///
/// # Panics
/// Where `CI` is set.
pub fn skipped(what: &str) {
    assert!(std::env::var_os("CI").is_none(), "a test cannot run: {what}");
    eprintln!("*** SKIPPED: {what}");
}

/// The NIXL that tests use, with these parameters: that of `WINDLASS_NIXL_LIBRARY`, or of `make .venv-nixl/ready`.
pub fn nixl(params: &[(&str, &str)]) -> Result<nixl::Config, String> {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv-nixl/lib");
    let packages = std::fs::read_dir(&ours).into_iter().flatten().flatten();
    let named = std::env::var_os("WINDLASS_NIXL_LIBRARY").map(PathBuf::from);
    let library = named.or_else(|| packages.map(|e| e.path().join("site-packages")).find(|p| p.exists()));
    let library = library.ok_or("there is no NIXL: run `make .venv-nixl/ready`")?;
    let params = params.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    Ok(nixl::Config { library: Some(library), params })
}

/// A loader, as the suite sees it.
pub trait LoaderUnderTest {
    /// A loader of a new engine, which holds nothing.
    fn loader(&self) -> Box<dyn WeightLoader>;

    /// The bytes that the engine of the newest loader holds under a name, aliases included.
    fn holds(&self, name: &str) -> Option<Vec<u8>>;
}

/// An engine that keeps its weights in memory and loads only what changed.
#[derive(Clone, Debug, Default)]
pub struct MemoryEngine(Arc<Mutex<BTreeMap<String, Vec<u8>>>>);

impl LoaderUnderTest for MemoryEngine {
    fn loader(&self) -> Box<dyn WeightLoader> {
        let held = Arc::clone(&self.0);
        held.lock().clear();
        Box::new(move |weights: &Weights<'_>| -> Result<(), BoxError> {
            let mut held = held.lock();
            for tensor in weights.to_load() {
                held.insert(tensor.name.to_owned(), tensor.bytes.to_vec());
            }
            for (alias, target) in weights.manifest().aliases() {
                let bytes = held.get(target).cloned().ok_or("the tensor of an alias is missing")?;
                held.insert(alias.clone(), bytes);
            }
            Ok(())
        })
    }

    fn holds(&self, name: &str) -> Option<Vec<u8>> {
        self.0.lock().get(name).cloned()
    }
}

/// Where the region of a case is.
pub fn region_dir(home: &Path) -> PathBuf {
    home.join("region")
}

/// The longest that anything in a case may take.
const LONG: Duration = Duration::from_secs(30);

fn soon() -> Stop {
    Stop::after(LONG)
}

/// Cheap, repeatable bytes.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Layouts that are unlike each other: many dtypes, one byte, nothing, strided tiles, many tensors, none.
fn layouts() -> Vec<(&'static str, Manifest)> {
    let spec = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name, dtype, shape);
    let made = |specs: Vec<TensorSpec>| Manifest::new(specs, BTreeMap::new()).unwrap();
    let cuts = BTreeMap::from([
        ("short".to_owned(), vec![DimCut { dim: 1, bounds: vec![64, 200] }]),
        ("long".to_owned(), vec![DimCut { dim: 1, bounds: vec![10_000, 20_001] }]),
    ]);
    let tiles = made(vec![spec("short", Dtype::BF16, &[300, 257]), spec("long", Dtype::F32, &[5, 30_011])]);
    vec![
        ("ordinary", ordinary()),
        ("one byte", made(vec![spec("b", Dtype::U8, &[1])])),
        ("only empty tensors", made(vec![spec("e", Dtype::F32, &[0, 7])])),
        ("strided tiles", tiles.with_cuts(&cuts).unwrap()),
        (
            "many tensors",
            made((0..2000).map(|i| spec(&format!("t.{i}"), Dtype::BF16, &[3, i % 5])).collect()),
        ),
    ]
}

/// About a megabyte, with an alias, a tensor of one byte and an empty one.
fn ordinary() -> Manifest {
    let spec = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name, dtype, shape);
    let tensors = vec![
        spec("model.embed.weight", Dtype::BF16, &[301, 997]),
        spec("model.norm.weight", Dtype::F32, &[997]),
        spec("flag", Dtype::U8, &[1]),
        spec("empty", Dtype::F32, &[0, 7]),
        spec("mask", Dtype::U8, &[200_003]),
        spec("model.gate.weight", Dtype::F16, &[70_001]),
    ];
    let aliases = BTreeMap::from([("lm_head.weight".to_owned(), "model.embed.weight".to_owned())]);
    Manifest::new(tensors, aliases).unwrap()
}

fn digest_of(manifest: &Manifest, data: &[u8]) -> StateDigest {
    let all = BlockRanges::from(0..manifest.cuts().blocks());
    let sums: SumTable = seal::sums(crate::simd::kernels(), manifest, &all, data, 1, &Stop::never()).unwrap();
    sums.digest(manifest)
}

/// A publisher with weights that change.
struct World {
    strategy: Arc<dyn WeightTransferStrategy>,
    sender: Option<Box<dyn WeightTransferSender>>,
    weights: Tensors,
    version: Version,
    noise: Noise,
    // Last: the others have files in it.
    home: TempDir,
}

impl World {
    fn new<L: LinkUnderTest + ?Sized>(link: &L, manifest: Manifest) -> World {
        let home = tempfile::Builder::new().prefix("windlass-link-").tempdir_in("/dev/shm").unwrap();
        let strategy = link.strategy(home.path());
        World::with(home, strategy, manifest)
    }

    fn with(home: TempDir, strategy: Arc<dyn WeightTransferStrategy>, manifest: Manifest) -> World {
        let mut weights = Tensors::zeroed(Arc::new(manifest));
        let mut noise = Noise(0x9E37_79B9_7F4A_7C15);
        weights.iter_mut().flatten().for_each(|b| *b = noise.next() as u8);
        let mut world = World { strategy, sender: None, weights, version: 0, noise, home };
        world.start();
        world
    }

    /// A new life of the publisher.
    fn start(&mut self) {
        self.sender = None;
        let model = ModelId::new("actor").unwrap();
        let manifest = Arc::clone(crate::roles::WeightExtractor::manifest(&self.weights));
        let mut config = PublisherConfig::new(region_dir(self.home.path()), model, manifest).unwrap();
        (config.threads, config.server.threads, config.memfd) = (2, 2, Memfd::Never);
        config.server.history.bytes = 16 << 20;
        self.sender = Some(self.strategy.create_sender(config).unwrap());
    }

    fn sender(&mut self) -> &mut dyn WeightTransferSender {
        &mut **self.sender.as_mut().unwrap()
    }

    fn config(&self, name: &str) -> EngineConfig {
        EngineConfig {
            memfd: Memfd::Never,
            threads: 2,
            mode: RequestMode::Auto,
            streams: Some(3),
            transfer_timeout: LONG,
            open_timeout: LONG,
            load_timeout: LONG,
            patience: Patience { limit: LONG, ..Patience::default() },
            ..EngineConfig::new(name, self.home.path().join(name))
        }
    }

    fn receiver(&mut self, name: &str) -> Box<dyn WeightTransferReceiver> {
        let (info, config) = (self.sender().sync_info(), self.config(name));
        self.strategy.create_receiver(&info, config, &soon()).unwrap()
    }

    /// Publishes the weights as they are as the next version.
    fn publish(&mut self) -> Known {
        self.version += 1;
        let World { sender, weights, version, .. } = self;
        let sender = sender.as_mut().unwrap();
        let published = sender.publish(weights, *version, &soon()).unwrap();
        let known = sender.wait_sealed(*version, &soon()).unwrap();
        assert_eq!(published.identity, known.identity);
        assert_eq!(known.digest, digest_of(published_manifest(&self.weights), &self.data()));
        known
    }

    /// Changes about one byte in `one_in`, at least one of the whole.
    fn change(&mut self, one_in: u64) {
        let World { weights, noise, .. } = self;
        for bytes in weights.iter_mut().filter(|b| !b.is_empty()) {
            for _ in 0..(bytes.len() as u64).div_ceil(one_in) {
                let at = noise.next() as usize % bytes.len();
                bytes[at] = bytes[at].wrapping_add(1 + noise.next() as u8 % 3);
            }
        }
    }

    fn data(&self) -> Vec<u8> {
        self.weights.iter().flatten().copied().collect()
    }

    /// What arrived must be what was published last.
    fn check(&self, arrived: &Arrived, known: &Known, what: &str) {
        assert_eq!(arrived.known(), known, "{what}");
        assert!(arrived.data() == self.data(), "{what}: other bytes than were published");
    }
}

fn published_manifest(weights: &Tensors) -> &Manifest {
    crate::roles::WeightExtractor::manifest(weights)
}

/// Every so many bytes of each tensor one says which version it is, so that a mixture shows and deltas stay small.
const STAMP: usize = 97;
/// Between two versions of a publisher that never rests: much less than it takes to fetch one.
const PACE: Duration = Duration::from_millis(10);

/// Ends the publisher's thread even if the case panics: its scope waits for it.
struct Ender(Stop);

impl Drop for Ender {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// Publishes again and again on a thread while `body` runs, each version [stamped](is_pure).
fn while_publishing<T>(world: &mut World, body: impl FnOnce(&Stop) -> T) -> T {
    let over = Stop::never();
    let World { sender, weights, version, .. } = world;
    let sender = sender.as_mut().unwrap();
    std::thread::scope(|scope| {
        let ending = over.clone();
        scope.spawn(move || {
            while !ending.is_set() {
                let next = *version + 1;
                weights.iter_mut().for_each(|t| t.iter_mut().step_by(STAMP).for_each(|b| *b = stamp(next)));
                // A map lease may keep a slot for longer than this; then the same version is tried again.
                let tried = sender.publish(weights, next, &ending.with_timeout(Duration::from_millis(500)));
                if tried.is_ok() {
                    *version = next;
                }
                std::thread::sleep(PACE);
            }
        });
        let ender = Ender(over);
        body(&ender.0)
    })
}

fn stamp(version: Version) -> u8 {
    (version % 251) as u8
}

/// Whether the bytes of a tensor are stamped with this version and no other.
fn is_pure_tensor(version: Version, bytes: &[u8]) -> bool {
    bytes.iter().step_by(STAMP).all(|b| *b == stamp(version))
}

/// Whether all tensors are stamped with this version and no other.
fn is_pure(version: Version, manifest: &Manifest, data: &[u8]) -> bool {
    let bytes = |t: &windlass_core::manifest::Tensor| &data[t.offset as usize..t.range().end as usize];
    manifest.tensors().iter().all(|t| is_pure_tensor(version, bytes(t)))
}
