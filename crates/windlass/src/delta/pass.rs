//! The pass over two images that gives a delta: diff, encode and sum, block by block.
//!
//! Called by `delta make`, `diff` and `demo`. Threads encode handfuls of blocks and put them down in the order of
//! the blocks, so that the bytes do not depend on the number of threads. Memory: each thread holds what its
//! encoder needs and the records it has not put down yet, at most a block's worth; the sink holds one part.

use windlass_core::delta::{Encoded, Encoder, Mode, PartBuilder, Tile};
use windlass_core::digest::{BlockSum, StateSum, sum_block};
use windlass_core::kernel::Kernels;
use windlass_core::manifest::{BLOCK_UNITS, Manifest};

use super::mode_slot;
use crate::error::Error;
use crate::session::{Cancel, Progress};
use crate::sums;
use crate::work::{self, Batch};

/// Records that wait for their turn are put down when they have so many bytes.
const PUT_DOWN: usize = 32 << 10;

/// The bytes of a tensor by its index in the manifest.
pub type Tensors<'a> = dyn Fn(usize) -> &'a [u8] + Sync + 'a;

/// Two images of one layout.
#[derive(Clone, Copy)]
pub struct Pair<'a> {
    /// The layout of both.
    pub manifest: &'a Manifest,
    /// The older one.
    pub old: &'a Tensors<'a>,
    /// The newer one.
    pub new: &'a Tensors<'a>,
}

impl<'a> Pair<'a> {
    /// A block and its bytes in both images.
    pub fn block(&self, number: u32) -> Result<(Tile, &'a [u8], &'a [u8]), Error> {
        let tile = Tile::of(self.manifest, number).map_err(|e| Error::Bug(e.to_string()))?;
        let t = tile.block.tensor as usize;
        let old = sums::slice((self.old)(t), &tile.block, tile.unit)?;
        let new = sums::slice((self.new)(t), &tile.block, tile.unit)?;
        Ok((tile, old, new))
    }
}

/// What a pass found out about one way of encoding.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneTotals {
    /// Bytes of parts and end, without the header.
    pub bytes: u64,
    /// Blocks that changed.
    pub records: u64,
    /// Records by mode (see [`mode_slot`]).
    pub by_mode: [u64; 4],
    /// Units that changed.
    pub changes: u64,
}

/// What a pass found out.
#[derive(Debug)]
pub struct Totals<S> {
    /// The sum of the older image.
    pub base: StateSum,
    /// The sum of the newer image.
    pub target: StateSum,
    /// For each encoder.
    pub lanes: Vec<LaneTotals>,
    /// What the observers collected, one for each thread.
    pub observed: Vec<S>,
}

/// How a pass is run.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    /// The inner loops.
    pub kernels: &'a dyn Kernels,
    /// How many threads.
    pub threads: usize,
    /// When to stop.
    pub cancel: &'a Cancel,
    /// Whom to tell.
    pub progress: &'a Progress,
}

struct Lane {
    encoder: Encoder,
    payload: Vec<u8>,
    records: Vec<(u32, Encoded, usize)>,
}

struct Worker<S> {
    lanes: Vec<Lane>,
    base: StateSum,
    target: StateSum,
    observed: S,
}

impl<S: Send> Batch for Worker<S> {
    fn full(&self) -> bool {
        self.lanes.iter().any(|l| l.payload.len() >= PUT_DOWN)
    }
}

#[derive(Default)]
struct Sink {
    builder: PartBuilder,
    parts: Vec<u8>,
    totals: LaneTotals,
}

/// Runs the pass. For each `encoder` the parts and the end of a container go to `write(lane, bytes)`;
/// `observe` sees every block.
pub fn run<S: Send + Default>(
    run: Run<'_>,
    pair: Pair<'_>,
    encoders: &[fn() -> Encoder],
    observe: impl Fn(&mut S, &Tile, &[u8], &[u8]) + Sync,
    write: impl FnMut(usize, &[u8]) -> Result<(), Error> + Send,
) -> Result<Totals<S>, Error> {
    // Reserved once, because growing would leave the allocator with pieces of every size it had.
    let widest =
        pair.manifest.tensors().iter().map(|t| t.bytes.min(BLOCK_UNITS * t.dtype.unit() as u64)).max();
    let room = PUT_DOWN + widest.unwrap_or(0) as usize;
    let lane =
        |e: &fn() -> Encoder| Lane { encoder: e(), payload: Vec::with_capacity(room), records: Vec::new() };
    let worker = || Worker {
        lanes: encoders.iter().map(lane).collect(),
        base: StateSum::default(),
        target: StateSum::default(),
        observed: S::default(),
    };
    let make = |w: &mut Worker<S>, number: u64| {
        let (tile, old, new) = pair.block(number as u32)?;
        let old_sum = sum_block(run.kernels, &tile.block, tile.unit, old);
        let mut new_sum = old_sum;
        for lane in &mut w.lanes {
            let start = lane.payload.len();
            if let Some(e) = lane.encoder.encode(run.kernels, &tile, (old, old_sum), new, &mut lane.payload) {
                new_sum = e.sum;
                lane.records.push((tile.number, e, lane.payload.len() - start));
            }
        }
        w.base.add(tile.block.tensor, old_sum);
        w.target.add(tile.block.tensor, new_sum);
        observe(&mut w.observed, &tile, old, new);
        run.progress.add(old.len() as u64);
        Ok(())
    };
    let sinks: Vec<Sink> = encoders.iter().map(|_| Sink::default()).collect();
    let put = |(sinks, write): &mut (Vec<Sink>, _), w: &mut Worker<S>| {
        for (i, (lane, sink)) in w.lanes.iter_mut().zip(sinks).enumerate() {
            sink.put(i, lane, write)?;
        }
        Ok(())
    };
    let blocks = u64::from(pair.manifest.cuts().blocks());
    let ((sinks, mut write), workers) =
        work::in_order(run.threads, blocks, run.cancel, (sinks, write), worker, make, put)?;
    let mut totals = Totals {
        base: StateSum::default(),
        target: StateSum::default(),
        lanes: Vec::new(),
        observed: Vec::new(),
    };
    for w in workers {
        totals.base = totals.base.plus(w.base);
        totals.target = totals.target.plus(w.target);
        totals.observed.push(w.observed);
    }
    for (i, mut sink) in sinks.into_iter().enumerate() {
        sink.totals.changes = sink.builder.changes();
        sink.builder.finish(&mut sink.parts);
        write(i, &sink.parts)?;
        sink.totals.bytes += sink.parts.len() as u64;
        totals.lanes.push(sink.totals);
    }
    Ok(totals)
}

impl Sink {
    fn put(
        &mut self,
        i: usize,
        lane: &mut Lane,
        write: &mut impl FnMut(usize, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut rest = lane.payload.as_slice();
        for &(block, encoded, len) in &lane.records {
            let (payload, after) = rest.split_at(len);
            rest = after;
            self.builder.push(block, &encoded, payload, &mut self.parts);
            self.totals.records += 1;
            self.totals.by_mode[mode_slot(encoded.mode)] += 1;
        }
        lane.records.clear();
        lane.payload.clear();
        if !self.parts.is_empty() {
            write(i, &self.parts)?;
            self.totals.bytes += self.parts.len() as u64;
            self.parts.clear();
        }
        Ok(())
    }
}

/// Whether context records are worth having: whether they save a tenth on blocks from all over the image.
/// Where they do not, plain ones are better, because they decode faster and compose.
pub fn context_pays(kernels: &dyn Kernels, pair: Pair<'_>) -> Result<bool, Error> {
    const SAMPLE: u32 = 64;
    let blocks = pair.manifest.cuts().blocks();
    let mut encoders = [Encoder::plain(), Encoder::with_context()];
    let mut sizes = [0usize; 2];
    let mut payload = Vec::new();
    for i in 0..SAMPLE.min(blocks) {
        let number = u64::from(i) * u64::from(blocks) / u64::from(SAMPLE.min(blocks));
        let (tile, old, new) = pair.block(number as u32)?;
        for (encoder, size) in encoders.iter_mut().zip(&mut sizes) {
            payload.clear();
            // Sums are not looked at here.
            let encoded = encoder.encode(kernels, &tile, (old, BlockSum::default()), new, &mut payload);
            *size += encoded.map_or(0, |e: Encoded| if e.mode == Mode::Dense { 0 } else { payload.len() });
        }
    }
    Ok(sizes[1] * 10 < sizes[0] * 9)
}
