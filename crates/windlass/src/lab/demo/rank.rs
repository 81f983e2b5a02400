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
use windlass_data::region::{Memfd, Region, RegionError, RegionSpec, Slots, Writer};
use windlass_data::stop::Stop;

use super::Model;
use crate::console::Session;
use crate::error::Error;
use crate::lab::image;
use crate::lab::synth::Synth;

/// The checked arguments of `demo-rank`.
#[derive(Clone, Debug)]
pub struct Rank {
    pub region: PathBuf,
    /// What the policy is called.
    pub model_id: ModelId,
    pub rank: u16,
    pub ranks: u16,
    pub model: Model,
}

/// How long a rank waits for the others.
const PATIENCE: Duration = Duration::from_secs(60);

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

impl Rank {
    /// Does what it is told until its input ends.
    pub fn run(&self, session: &Session) -> Result<(), Error> {
        let synth = self.model.synth()?;
        let manifest = Arc::new(image::manifest_of(&synth)?);
        let mut trainer = Trainer::new(synth, Arc::clone(&manifest), self)?;
        let region = self.region(&manifest, session)?;
        let mut writer = region.writer(self.rank)?;
        let bytes = trainer.weights.len();
        session
            .event(&json!({ "event": "ready", "bytes": bytes }), || format!("rank {} is ready", self.rank));
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(Error::io("read", "standard input".as_ref()))?;
            let stop = session.cancel().with_timeout(PATIENCE);
            let told = match line.split_once(' ').map(|(verb, step)| (verb, step.parse::<u32>())) {
                Some(("train", Ok(step))) if step <= super::MAX_STEPS => trainer.train(step)?,
                Some(("offload", Ok(step))) => trainer.offload(&mut writer, step, &stop)?,
                Some(_) | None => return Err(Error::Usage(format!("{line:?} is not a command of a rank"))),
            };
            session.event(&told, || told.to_string());
        }
        Ok(())
    }

    /// The first rank makes the region, the others wait for it.
    fn region(&self, manifest: &Arc<Manifest>, session: &Session) -> Result<Arc<Region>, Error> {
        if self.rank == 0 {
            let spec = RegionSpec {
                dir: self.region.clone(),
                model_id: self.model_id.clone(),
                manifest: Arc::clone(manifest),
                slots: Slots::Two,
                ranks: self.ranks,
                part: None,
                group: false,
                memfd: Memfd::Auto,
                extra_bytes: manifest.data_bytes() / 2,
                incarnation: None,
            };
            // The agent of one that was killed notices soon.
            let stop = session.cancel().with_timeout(Duration::from_secs(10));
            return Ok(Region::create_when_free(&spec, &stop)?);
        }
        let stop = session.cancel().with_timeout(PATIENCE);
        loop {
            match Region::open(&self.region) {
                Err(RegionError::Absent { .. }) if !stop.is_set() => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                other => return Ok(other?),
            }
        }
    }
}

impl Trainer {
    fn new(synth: Synth, manifest: Arc<Manifest>, rank: &Rank) -> Result<Trainer, Error> {
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
            sum.add(tile.block.tensor, sum_block(crate::kernels(), &tile.block, tile.unit, bytes));
        }
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        Ok(json!({ "event": "trained", "step": step, "train_ms": ms, "sum": PartSum(sum.to_bytes()) }))
    }

    fn offload(&self, writer: &mut Writer, step: u32, stop: &Stop) -> Result<serde_json::Value, Error> {
        let begun = Instant::now();
        let attempt = writer.begin(step.into(), stop)?;
        attempt.write(self.start, &self.weights)?;
        attempt.done(stop)?;
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        Ok(json!({ "event": "committed", "version": step, "offload_ms": ms, "bytes": self.weights.len() }))
    }
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
