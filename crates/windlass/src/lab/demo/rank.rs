//! One rank of the demo's trainer: owns a part of the model, changes it, publishes it.
//!
//! Started by `windlass demo` as `windlass demo-rank`. It takes one command a line on standard input and answers
//! each with a line of JSON: `train K` makes its weights those after step `K`; `offload K` writes them into the region
//! as version `K`. It ends with its input. Ranks own consecutive blocks, deliberately not equally many.

use std::collections::HashMap;
use std::io::BufRead as _;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use windlass_core::delta::Tile;
use windlass_core::digest::{StateSum, sum_block};
use windlass_core::identity::ModelId;
use windlass_core::manifest::Manifest;
use windlass_core::wire::control::PartSum;
use windlass_data::publish::{PublishError, Publisher};
use windlass_data::region::RegionSpec;
use windlass_data::stop::Stop;

use crate::console::Session;
use crate::error::Error;
use crate::lab::image;
use windlass_synth::{Synth, SynthConfig};

/// The checked arguments of `demo-rank`.
#[derive(Clone, Debug)]
pub(crate) struct DemoRank {
    pub(crate) region: PathBuf,
    /// What the policy is called.
    pub(crate) model_id: ModelId,
    pub(crate) rank: u16,
    pub(crate) ranks: u16,
    pub(crate) model: SynthConfig,
}

/// How long a rank waits for the others.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The blocks of a rank: every other rank has half as many again.
fn share(blocks: u32, rank: u16, ranks: u16) -> Range<u32> {
    let weight = |r: u16| 2 + u64::from(r % 2);
    let total: u64 = (0..ranks).map(weight).sum();
    let before = |r: u16| (0..r).map(weight).sum::<u64>() * u64::from(blocks) / total;
    before(rank) as u32..before(rank + 1) as u32
}

struct Trainer {
    synth: Synth,
    manifest: Arc<Manifest>,
    /// For each tensor of the manifest, its index in the made-up model.
    sources: Vec<usize>,
    blocks: Range<u32>,
    /// The weights that this rank owns.
    weights: Vec<u8>,
    /// Where they begin in the image.
    start: u64,
}

impl DemoRank {
    /// Does what it is told until its input ends.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let synth = Synth::new(self.model)?;
        let manifest = Arc::new(image::manifest_of(&synth)?);
        let mut trainer = Trainer::new(synth, Arc::clone(&manifest), self)?;
        let mut publisher = self.publisher(&manifest, session)?;
        let bytes = trainer.weights.len();
        session
            .event(&json!({ "event": "ready", "bytes": bytes }), || format!("rank {} is ready", self.rank));
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(Error::io("read", "standard input".as_ref()))?;
            let stop = session.cancel().with_timeout(TIMEOUT);
            let told = match line.split_once(' ').map(|(verb, step)| (verb, step.parse::<u32>())) {
                Some(("train", Ok(step))) if step <= super::MAX_STEPS => trainer.train(step)?,
                Some(("offload", Ok(step))) => trainer.offload(&mut publisher, step, &stop)?,
                Some(_) | None => return Err(Error::Usage(format!("{line:?} is not a command of a rank"))),
            };
            session.event(&told, || told.to_string());
        }
        Ok(())
    }

    /// The first rank makes the region, the others wait for it.
    fn publisher(&self, manifest: &Arc<Manifest>, session: &Session) -> Result<Publisher, Error> {
        if self.rank == 0 {
            let spec = RegionSpec {
                ranks: self.ranks,
                extra_bytes: manifest.data_bytes() / 2,
                ..RegionSpec::new(self.region.clone(), self.model_id.clone(), Arc::clone(manifest))
            };
            // The agent of one that was killed notices soon.
            let stop = session.cancel().with_timeout(Duration::from_secs(10));
            return Ok(Publisher::create(&spec, &stop)?);
        }
        let stop = session.cancel().with_timeout(TIMEOUT);
        Publisher::join(&self.region, manifest.layout_hash(), self.rank, None, &stop).map_err(failed)
    }
}

impl Trainer {
    fn new(synth: Synth, manifest: Arc<Manifest>, rank: &DemoRank) -> Result<Trainer, Error> {
        let by_name: HashMap<&str, usize> =
            synth.tensors().iter().enumerate().map(|(i, t)| (&*t.name, i)).collect();
        let source = |name: &str| {
            by_name.get(name).copied().ok_or_else(|| Error::Bug(format!("no source for {name}")))
        };
        let sources = manifest.tensors().iter().map(|t| source(&t.name)).collect::<Result<_, _>>()?;
        let blocks = share(manifest.cuts().blocks(), rank.rank, rank.ranks);
        let owned = windlass_core::ranges::BlockRanges::from(blocks.clone());
        let first = manifest.cuts().block(blocks.start).ok();
        // Default cuts are contiguous and in the order of the image.
        let start = first.and_then(|b| manifest.byte_runs(&b).next()).map_or(0, |run| run.start);
        let weights = image::zeros(manifest.bytes_of(&owned))?;
        Ok(Trainer { synth, manifest, sources, blocks, weights, start })
    }

    /// The weights after `step` steps.
    fn train(&mut self, step: u32) -> Result<serde_json::Value, Error> {
        let begun = Instant::now();
        let mut rest = self.weights.as_mut_slice();
        let mut sum = StateSum::default();
        for number in self.blocks.clone() {
            let tile = Tile::of(&self.manifest, number).map_err(|e| Error::Bug(e.to_string()))?;
            let (bytes, after) = rest.split_at_mut(tile.bytes());
            rest = after;
            self.synth.fill(self.sources[tile.block.tensor as usize], tile.block.start, step, bytes);
            // From the trainer's own memory: what every receiver must have in the end.
            sum.add(
                tile.block.tensor,
                sum_block(windlass_data::simd::kernels(), &tile.block, tile.unit, bytes),
            );
        }
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        Ok(json!({ "event": "trained", "step": step, "train_ms": ms, "sum": PartSum(sum.to_bytes()) }))
    }

    fn offload(&self, publisher: &mut Publisher, step: u32, stop: &Stop) -> Result<serde_json::Value, Error> {
        let begun = Instant::now();
        publisher
            .copy(step.into(), stop, |slot| Ok(slot.write(self.start, &self.weights)?))
            .map_err(failed)?;
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        Ok(json!({ "event": "committed", "version": step, "offload_ms": ms, "bytes": self.weights.len() }))
    }
}

fn failed(e: PublishError) -> Error {
    Error::Plane { doing: "publish a version", kind: e.kind(), source: Box::new(e) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_all_blocks_without_overlap() {
        for (blocks, ranks) in [(0, 1), (1, 3), (7, 2), (1000, 5), (3, 8)] {
            let mut next = 0;
            for rank in 0..ranks {
                let share = share(blocks, rank, ranks);
                assert_eq!(share.start, next);
                next = share.end;
            }
            assert_eq!(next, blocks);
        }
    }
}
