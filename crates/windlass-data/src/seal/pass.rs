//! The pass over two images that gives a delta, and the pass over one that gives its sums, block by block.
//!
//! Called by [`super::seal`], by the agent and by the commands that compare checkpoints: there is one
//! implementation. Threads encode handfuls of blocks and put them down in the order of the blocks, so that the
//! bytes do not depend on the number of threads. Memory: each thread holds what its encoder needs, two blocks
//! where they are not contiguous, and the records it has not put down yet, at most a block's worth; the sink
//! holds one part.

use std::ops::Range;

use windlass_core::delta::{Encoded, Encoder, Mode, PartBuilder, Tile};
use windlass_core::digest::{BlockSum, StateSum, SumTable, sum_block};
use windlass_core::kernel::Kernels;
use windlass_core::manifest::{BLOCK_UNITS, Manifest};
use windlass_core::ranges::BlockRanges;

use super::SealError;
use crate::stop::{Stop, Stopped};
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
    pub old: &'a Tensors<'a>,
    pub new: &'a Tensors<'a>,
    /// The sums of the older one, where they are known; they are believed, and its blocks are not summed again.
    pub old_sums: Option<&'a SumTable>,
}

/// Room for blocks whose runs are gathered from all over their tensor.
#[derive(Debug, Default)]
pub struct Scratch {
    old: Vec<u8>,
    new: Vec<u8>,
}

impl<'a> Pair<'a> {
    /// A block and its bytes in both images, run after run.
    pub fn block<'s>(
        &self,
        number: u32,
        scratch: &'s mut Scratch,
    ) -> Result<(Tile, &'s [u8], &'s [u8]), SealError>
    where
        'a: 's,
    {
        let tile = Tile::of(self.manifest, number)?;
        let t = tile.block.tensor as usize;
        let old = gather((self.old)(t), &tile, &mut scratch.old)?;
        let new = gather((self.new)(t), &tile, &mut scratch.new)?;
        Ok((tile, old, new))
    }
}

/// The bytes of a block within those of its tensor, run after run: themselves where they are contiguous, copied
/// into `scratch` where they are not.
pub fn gather<'s>(tensor: &'s [u8], tile: &Tile, scratch: &'s mut Vec<u8>) -> Result<&'s [u8], SealError> {
    let run = tile.block.run as usize * tile.unit;
    let range = |start: u64| -> Result<Range<usize>, SealError> {
        let start = start as usize * tile.unit;
        let end = start + run;
        let short =
            SealError::ShortTensor { tensor: tile.block.tensor, need: end as u64, have: tensor.len() as u64 };
        if end <= tensor.len() { Ok(start..end) } else { Err(short) }
    };
    if tile.block.is_contiguous() {
        return Ok(&tensor[range(tile.block.start)?]);
    }
    scratch.clear();
    for start in tile.block.runs() {
        scratch.extend_from_slice(&tensor[range(start)?]);
    }
    Ok(scratch)
}

/// What a pass found out about one way of encoding.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneTotals {
    /// Bytes of parts and end, without the header.
    pub bytes: u64,
    pub records: u64,
    /// Records by mode (see [`mode_slot`]).
    pub by_mode: [u64; 4],
    pub changes: u64,
}

/// The place of a mode in a table by mode.
pub const fn mode_slot(mode: Mode) -> usize {
    match mode {
        Mode::Sparse => 0,
        Mode::Context => 1,
        Mode::Bitmap => 2,
        Mode::Dense => 3,
    }
}

/// What a pass found out.
#[derive(Debug)]
pub struct Totals<S> {
    /// The sum of the older image's blocks.
    pub base: StateSum,
    /// The sum of the newer image's blocks.
    pub target: StateSum,
    pub lanes: Vec<LaneTotals>,
    /// What the observers collected, one for each thread.
    pub observed: Vec<S>,
}

/// How a pass is run.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    pub kernels: &'a dyn Kernels,
    pub threads: usize,
    pub stop: &'a Stop,
    /// Told of every block how many bytes of image it has.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

/// A block as an observer sees it.
#[derive(Clone, Copy, Debug)]
pub struct Visit<'a> {
    pub tile: Tile,
    /// Its bytes in the older image, run after run.
    pub old: &'a [u8],
    /// Its bytes in the newer image.
    pub new: &'a [u8],
    /// Its sum in the older image.
    pub old_sum: BlockSum,
    /// Its sum in the newer image.
    pub new_sum: BlockSum,
}

struct Lane {
    encoder: Encoder,
    payload: Vec<u8>,
    records: Vec<(u32, Encoded, usize)>,
}

struct Worker<S> {
    lanes: Vec<Lane>,
    scratch: Scratch,
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

/// Runs the pass over these blocks. For each `encoder`, of which there is at least one, the parts and the end of
/// a container go to `write(lane, bytes)`; `observe` sees every block.
pub fn run<S: Send + Default, E: From<SealError> + From<Stopped> + Send>(
    run: Run<'_>,
    pair: Pair<'_>,
    blocks: &BlockRanges,
    encoders: &[fn() -> Encoder],
    observe: impl Fn(&mut S, &Visit<'_>) + Sync,
    write: impl FnMut(usize, &[u8]) -> Result<(), E> + Send,
) -> Result<Totals<S>, E> {
    assert!(!encoders.is_empty(), "the new sums follow from what an encoder finds");
    let numbers = Numbers::of(pair.manifest, blocks)?;
    // Reserved once, because growing would leave the allocator with pieces of every size it had.
    let widest =
        pair.manifest.tensors().iter().map(|t| t.bytes.min(BLOCK_UNITS * t.dtype.unit() as u64)).max();
    let room = PUT_DOWN + widest.unwrap_or(0) as usize;
    let lane =
        |e: &fn() -> Encoder| Lane { encoder: e(), payload: Vec::with_capacity(room), records: Vec::new() };
    let worker = || Worker {
        lanes: encoders.iter().map(lane).collect(),
        scratch: Scratch::default(),
        base: StateSum::default(),
        target: StateSum::default(),
        observed: S::default(),
    };
    let make = |w: &mut Worker<S>, i: u64| {
        let (tile, old, new) = pair.block(numbers.nth(i), &mut w.scratch)?;
        let old_sum = match pair.old_sums {
            Some(table) => table.get(tile.number),
            None => sum_block(run.kernels, &tile.block, tile.unit, old),
        };
        let mut new_sum = old_sum;
        for lane in &mut w.lanes {
            let start = lane.payload.len();
            if let Some(e) = lane.encoder.encode(run.kernels, &tile, (old, old_sum), new, &mut lane.payload) {
                new_sum = e.sum;
                lane.records.push((tile.number, e, lane.payload.len() - start));
            }
        }
        // A table is a belief about the base. Summed from its own bytes, the new block shows whether it is right, and
        // a mistake of the encoder too; otherwise both would be handed on with every delta.
        if pair.old_sums.is_some() && sum_block(run.kernels, &tile.block, tile.unit, new) != new_sum {
            return Err(SealError::BaseChanged { block: tile.number }.into());
        }
        w.base.add(tile.block.tensor, old_sum);
        w.target.add(tile.block.tensor, new_sum);
        observe(&mut w.observed, &Visit { tile, old, new, old_sum, new_sum });
        (run.progress)(old.len() as u64);
        Ok::<(), E>(())
    };
    let sinks: Vec<Sink> = encoders.iter().map(|_| Sink::default()).collect();
    let put = |(sinks, write): &mut (Vec<Sink>, _), w: &mut Worker<S>| {
        for (i, (lane, sink)) in w.lanes.iter_mut().zip(sinks).enumerate() {
            sink.put(i, lane, write)?;
        }
        Ok(())
    };
    let ((sinks, mut write), workers) =
        work::in_order(run.threads, numbers.count, run.stop, (sinks, write), worker, make, put)?;
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
    fn put<E>(
        &mut self,
        i: usize,
        lane: &mut Lane,
        write: &mut impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
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

/// Sums these blocks of the tensors that `tensor` gives by index. Blocks that are not among them have the sum of
/// nothing, so that the table's state is that of the blocks alone.
pub fn sum<'a, E: From<SealError> + From<Stopped> + Send>(
    run: Run<'_>,
    manifest: &Manifest,
    blocks: &BlockRanges,
    tensor: impl Fn(usize) -> &'a [u8] + Sync,
) -> Result<SumTable, E> {
    let numbers = Numbers::of(manifest, blocks)?;
    let state = || (Vec::new(), Vec::new());
    let found = work::each(run.threads, numbers.count, run.stop, state, |(sums, scratch), i| {
        let tile = Tile::of(manifest, numbers.nth(i)).map_err(SealError::from)?;
        let bytes = gather(tensor(tile.block.tensor as usize), &tile, scratch)?;
        sums.push((tile.number, sum_block(run.kernels, &tile.block, tile.unit, bytes)));
        (run.progress)(bytes.len() as u64);
        Ok::<(), E>(())
    })?;
    let mut all = vec![BlockSum::default(); manifest.cuts().blocks() as usize];
    for (number, sum) in found.into_iter().flat_map(|(sums, _)| sums) {
        all[number as usize] = sum;
    }
    Ok(SumTable::new(manifest, all))
}

/// Whether context records are worth having: whether they save a tenth on blocks from all over the image.
/// Where they do not, plain ones are better, because they decode faster and compose.
pub fn context_pays(kernels: &dyn Kernels, pair: Pair<'_>) -> Result<bool, SealError> {
    const SAMPLE: u32 = 64;
    let blocks = pair.manifest.cuts().blocks();
    let mut encoders = [Encoder::plain(), Encoder::with_context()];
    let mut sizes = [0usize; 2];
    let (mut payload, mut scratch) = (Vec::new(), Scratch::default());
    for i in 0..SAMPLE.min(blocks) {
        let number = u64::from(i) * u64::from(blocks) / u64::from(SAMPLE.min(blocks));
        let (tile, old, new) = pair.block(number as u32, &mut scratch)?;
        for (encoder, size) in encoders.iter_mut().zip(&mut sizes) {
            payload.clear();
            // Sums are not looked at here.
            let encoded = encoder.encode(kernels, &tile, (old, BlockSum::default()), new, &mut payload);
            *size += encoded.map_or(0, |e: Encoded| if e.mode == Mode::Dense { 0 } else { payload.len() });
        }
    }
    Ok(sizes[1] * 10 < sizes[0] * 9)
}

/// The blocks of a set, by their place in it.
struct Numbers {
    /// Each range with how many blocks stand before it.
    runs: Vec<(u64, u32)>,
    count: u64,
}

impl Numbers {
    fn of(manifest: &Manifest, blocks: &BlockRanges) -> Result<Numbers, SealError> {
        let (end, have) = (blocks.end(), manifest.cuts().blocks());
        if end > have {
            return Err(SealError::BeyondBlocks { end, have });
        }
        let mut count = 0;
        let mut runs = Vec::with_capacity(blocks.ranges().len());
        for range in blocks.ranges() {
            runs.push((count, range.start));
            count += u64::from(range.end - range.start);
        }
        Ok(Numbers { runs, count })
    }

    fn nth(&self, i: u64) -> u32 {
        debug_assert!(i < self.count, "a place in the set");
        let at = self.runs.partition_point(|&(before, _)| before <= i);
        let (before, start) = self.runs[at - 1];
        start + (i - before) as u32
    }
}
