//! A trainer with one rank: this executable in another role. It publishes the versions that it is told to, and ends with
//! its input.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use windlass_core::dtype::Dtype;
use windlass_core::identity::{Incarnation, ModelId, StateDigest};
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_data::region::{Memfd, Region, RegionSpec};
use windlass_data::seal;
use windlass_data::stop::Stop;

use crate::soak::dice::Dice;

/// What marks our lines among those of the test runner.
pub(crate) const MARK: &str = "@";
/// Where a trainer finds its region, model, seed, first version and the newest life that others know.
pub(crate) const ARGS: &str = "SOAK_TRAINER";
/// How long a version may take to be published.
pub(crate) const PUBLISH: Duration = Duration::from_secs(15);

/// Odd on purpose: several dtypes, a tensor of one byte, an empty one, one of several blocks.
pub(crate) fn manifest() -> Manifest {
    let spec = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name, dtype, shape);
    let tensors = vec![
        spec("embed", Dtype::BF16, &[149, 499]),
        spec("norm", Dtype::F32, &[997]),
        spec("flag", Dtype::U8, &[1]),
        spec("empty", Dtype::F32, &[0, 7]),
        spec("mask", Dtype::U8, &[50_003]),
        spec("head", Dtype::F16, &[30_001]),
    ];
    Manifest::new(tensors, BTreeMap::new()).unwrap()
}

pub(crate) fn digest(manifest: &Manifest, data: &[u8]) -> StateDigest {
    let all = BlockRanges::from(0..manifest.cuts().blocks());
    let kernels = windlass_data::simd::kernels();
    seal::sums(kernels, manifest, &all, data, 1, &Stop::never()).unwrap().digest(manifest)
}

/// The weights of one life: those of each version are those of the one before with some changes.
#[derive(Clone)]
pub(crate) struct Weights {
    pub(crate) data: Vec<u8>,
    version: u64,
    seed: u64,
}

impl Weights {
    pub(crate) fn new(seed: u64, version: u64) -> Weights {
        let mut data = vec![0; manifest().data_bytes() as usize];
        let mut dice = Dice::new(seed, 1);
        data.chunks_mut(8).for_each(|c| c.copy_from_slice(&dice.roll().to_le_bytes()[..c.len()]));
        Weights { data, version, seed }
    }

    pub(crate) fn go_to(&mut self, version: u64) {
        while self.version < version {
            self.version += 1;
            let mut dice = Dice::new(self.seed, 2 + self.version);
            for _ in 0..self.data.len() / 500 {
                let at = dice.below(self.data.len() as u64) as usize;
                self.data[at] = self.data[at].wrapping_add(1 + dice.below(3) as u8);
            }
        }
    }
}

fn tell(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{line}").and_then(|()| out.flush()).unwrap();
}

/// The life of a trainer.
pub(crate) fn run() {
    let Ok(args) = std::env::var(ARGS) else { return };
    let args: Vec<&str> = args.lines().collect();
    let [region, model, seed, version, known] = args[..] else { panic!("{args:?}") };
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let known: u64 = known.parse().unwrap();
    let spec = RegionSpec {
        memfd: Memfd::Never,
        // As a trainer does whose clock is behind what the controller knows.
        incarnation: (known >= clock).then_some(Incarnation(known + 1)),
        ..RegionSpec::new(Path::new(region).to_owned(), ModelId::new(model).unwrap(), Arc::new(manifest()))
    };
    let region = Region::create_when_free(&spec, &Stop::after(PUBLISH)).unwrap();
    let mut writer = region.writer(0).unwrap();
    let mut weights = Weights::new(seed.parse().unwrap(), version.parse().unwrap());
    tell(&format!("ready {} {clock}", region.incarnation().0));
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let version = line.parse().unwrap();
        weights.go_to(version);
        let stop = Stop::after(PUBLISH);
        let done = writer.begin(version, &stop).and_then(|attempt| {
            attempt.write(0, &weights.data)?;
            attempt.done(&stop)
        });
        match done {
            Ok(_) => tell(&format!("published {version}")),
            Err(e) => tell(&format!("failed {version} {e}")),
        }
    }
}
