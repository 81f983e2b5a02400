//! Copy mode: tensors on a device into the slot that is being written.
//!
//! Owns: [`Offload`], made once for a [`CopyPlan`] and run for each version. Called by a trainer's rank between the
//! beginning of an attempt and its commit. Must not: decide what is copied, or leave a DMA under way.
//!
//! # How bytes go
//!
//! | tensors | way |
//! |---|---|
//! | as they are in the image | one asynchronous DMA for each range, or for each box of rows, straight into the slot |
//! | fp32 of which the image has bf16 | a kernel rounds them into a staging buffer on the device, DMA from there |
//! | elements far apart (a transposed view) | a kernel packs them into the staging buffer, DMA from there |
//!
//! The staging buffer has two halves: while one is copied out, the other is filled. It is the only device memory
//! that copy mode takes, [`STAGE`] bytes, and only where something goes that way.
//!
//! The slot is registered with the driver when it is first written, only those ranges that this rank writes, and stays so. Where the
//! system refuses (locked memory is limited, or another plan has registered a part of it), DMA goes to pinned memory
//! of our own and the processor copies from there into the slot, which is slower and said once.
//!
//! The host waits for the trainer's stream once, before the first copy, and once for the copies (see [`super`]).

#![allow(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::boxes::{Box2, Limits, boxes, cut};
use super::driver::{Event, Gpu, Stream, StreamHandle};
use super::error::CudaError;
use super::kernels::{CopyArgs, CopyBox, Kernel};
use super::launch::tally;
use super::memory::{DeviceBuffer, HostBuffer, Registration};
use super::nvtx::Named;
use crate::copies::CopyPlan;
use crate::region::{Attempt, Region};
use crate::stop::Stop;

/// Bytes of the staging buffer, both halves.
pub const STAGE: u64 = 128 << 20;
/// Bytes of pinned memory where a slot cannot be registered, both halves.
const BOUNCE: u64 = 64 << 20;
/// Bytes that a CTA moves at a time.
const PIECE: u64 = 256 << 10;
/// Runs shorter than this are packed by a kernel if that makes them whole.
const SHORT: u64 = 2048;
/// Ranges of the slot that are nearer than this are registered as one.
const NEAR: u64 = 2 << 20;

/// A box of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Move {
    source: usize,
    shape: Box2,
}

/// What goes through one half of the staging buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Batch {
    is_cast: bool,
    /// Of the table: into the half.
    fills: Range<usize>,
    /// Out of the half.
    moves: Vec<Box2>,
    bytes: u64,
}

/// The plan's copies, sorted by the way they go.
#[derive(Debug, Default)]
struct Ways {
    direct: Vec<Move>,
    fills: Vec<Move>,
    batches: Vec<Batch>,
}

impl Ways {
    fn new(plan: &CopyPlan, casts: &[bool], half: u64) -> Result<Ways, CudaError> {
        let mut ways = Ways::default();
        for (source, copy) in plan.copies().iter().enumerate() {
            let is_cast = casts.get(source).copied().unwrap_or(false);
            if is_cast && copy.run % 2 != 0 {
                return Err(CudaError::Cast { index: source, bytes: copy.run });
            }
            let scale = if is_cast { 2 } else { 1 };
            boxes(copy, scale, |shape| {
                // A DMA engine takes its time over short runs, and cannot read one twice.
                let is_short = shape.run < SHORT && shape.to_pitch == shape.run;
                let is_packed = shape.count > 1 && (is_short || shape.from_pitch < shape.run);
                if is_cast || is_packed {
                    let limits = Limits { bytes: PIECE, span: u64::MAX / 4, scale };
                    cut(&shape, limits, |shape| ways.stage(source, shape, is_cast, half));
                } else {
                    ways.direct.push(Move { source, shape });
                }
            });
        }
        Ok(ways)
    }

    /// Gives a box a place in the staging buffer.
    fn stage(&mut self, source: usize, shape: Box2, is_cast: bool, half: u64) {
        let at = self.fills.len();
        let fits = |b: &Batch| b.is_cast == is_cast && b.bytes + shape.bytes() <= half;
        if !self.batches.last().is_some_and(fits) {
            self.batches.push(Batch { is_cast, fills: at..at, ..Batch::default() });
        }
        let Some(batch) = self.batches.last_mut() else { return };
        // Rows are packed; those that are whole in the slot too join what was staged before them.
        let mut out = Box2 { from: batch.bytes, from_pitch: shape.run, ..shape };
        if out.to_pitch == out.run || out.count == 1 {
            out = Box2::line(out.to, out.from, out.bytes(), 1);
        }
        match batch.moves.last_mut() {
            Some(last)
                if (last.count, out.count) == (1, 1)
                    && last.to + last.run == out.to
                    && last.from + last.run == out.from =>
            {
                *last = Box2::line(last.to, last.from, last.run + out.run, 1);
            }
            Some(_) | None => batch.moves.push(out),
        }
        let into = Box2 { to: batch.bytes, to_pitch: shape.run, ..shape };
        self.fills.push(Move { source, shape: into });
        batch.fills.end = at + 1;
        // So that rows of whole chunks are written as such.
        batch.bytes += shape.bytes().next_multiple_of(16);
    }

    /// Ranges of the data area that are written, far ones apart.
    fn ranges(&self) -> Vec<Range<u64>> {
        let staged = self.batches.iter().flat_map(|b| b.moves.iter().map(Box2::span));
        let mut all: Vec<_> = self.direct.iter().map(|m| m.shape.span()).chain(staged).collect();
        all.sort_unstable_by_key(|r| r.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in all {
            match merged.last_mut() {
                Some(last) if range.start <= last.end + NEAR => last.end = last.end.max(range.end),
                Some(_) | None => merged.push(range),
            }
        }
        merged
    }
}

/// Whether DMA reaches a slot.
#[derive(Debug)]
enum Pinned {
    Unknown,
    Yes(#[expect(dead_code, reason = "given back when dropped")] Vec<Registration>),
    Refused,
}

/// Two halves, and when each is free again.
struct Halves {
    memory: DeviceBuffer,
    filled: [Event; 2],
    emptied: [Event; 2],
}

/// What an offload did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offloaded {
    /// Bytes in the slot.
    pub bytes: u64,
    /// Whether DMA went straight into the slot.
    pub is_direct: bool,
}

/// Copies of one plan from one device, ready to run.
pub struct Offload {
    // In the order in which they must go: streams finish before memory is given back.
    dma: Stream,
    work: Stream,
    gpu: Gpu,
    region: Arc<Region>,
    ways: Ways,
    ranges: Vec<Range<u64>>,
    slots: Vec<Pinned>,
    halves: Option<Halves>,
    tally: DeviceBuffer,
    table: Option<DeviceBuffer>,
    /// What the table was made of.
    addresses: Vec<u64>,
    sources: usize,
    bytes: u64,
    bounce: Option<Bounce>,
}

impl std::fmt::Debug for Offload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offload").field("gpu", &self.gpu).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Offload {
    /// Gets ready to copy by `plan`, made for `region`. Where `casts` is true, the source is fp32 (and the copy's strides
    /// in it are of fp32 elements) and the slot gets bf16.
    pub fn new(
        gpu: &Gpu,
        region: &Arc<Region>,
        plan: &CopyPlan,
        casts: &[bool],
    ) -> Result<Offload, CudaError> {
        let sources = plan.spans().len();
        if !casts.is_empty() && casts.len() != sources {
            return Err(CudaError::Count { what: "casts", expected: sources, found: casts.len() });
        }
        let ways = Ways::new(plan, casts, STAGE / 2)?;
        let (dma, work) = (Stream::new(gpu)?, Stream::new(gpu)?);
        let halves = if ways.batches.is_empty() {
            None
        } else {
            gpu.kernels().prepare(gpu, &[Kernel::Copy, Kernel::Cast])?;
            let remedy = "free some, or publish tensors in the dtype of the image";
            Some(Halves {
                memory: DeviceBuffer::new(gpu, STAGE, "staging for casts", remedy)?,
                filled: [Event::new(gpu)?, Event::new(gpu)?],
                emptied: [Event::new(gpu)?, Event::new(gpu)?],
            })
        };
        Ok(Offload {
            ranges: ways.ranges(),
            slots: (0..region.slot_count()).map(|_| Pinned::Unknown).collect(),
            tally: tally(gpu)?,
            table: None,
            addresses: Vec::new(),
            sources,
            bytes: plan.bytes(),
            bounce: None,
            dma,
            work,
            gpu: gpu.clone(),
            region: Arc::clone(region),
            ways,
            halves,
        })
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Copies the tensors at `addresses`, one for each copy of the plan, into the slot of `attempt`, once `after` has come
    /// to where it is now. Nothing is under way on return, whatever the answer.
    pub fn run(
        &mut self,
        attempt: &Attempt<'_>,
        addresses: &[u64],
        after: StreamHandle,
        stop: &Stop,
    ) -> Result<Offloaded, CudaError> {
        let _named = Named::new("offload");
        self.follow(addresses)?;
        let is_direct = self.register(attempt)?;
        if let Some(bounce) = &mut self.bounce {
            bounce.forget();
        }
        self.gpu.wait_for(after, stop)?;
        attempt.check()?;
        let started = self.start(attempt, addresses, is_direct, stop);
        let finished =
            self.dma.finish("copying weights into the slot").and(self.work.finish("casting weights"));
        started.and(finished)?;
        if let Some(bounce) = self.bounce.as_mut().filter(|_| !is_direct) {
            bounce.settle(0, attempt)?;
            bounce.settle(1, attempt)?;
        }
        Ok(Offloaded { bytes: self.bytes, is_direct })
    }

    /// Makes the table anew if tensors have moved.
    fn follow(&mut self, addresses: &[u64]) -> Result<(), CudaError> {
        if addresses.len() != self.sources {
            let (expected, found) = (self.sources, addresses.len());
            return Err(CudaError::Count { what: "addresses", expected, found });
        }
        if addresses == self.addresses {
            return Ok(());
        }
        self.gpu.check_addresses("tensor", addresses)?;
        if !self.ways.fills.is_empty() {
            let table: Vec<CopyBox> = self
                .ways
                .fills
                .iter()
                .map(|Move { source, shape }| CopyBox {
                    from: addresses[*source] + shape.from,
                    to: shape.to,
                    from_pitch: shape.from_pitch,
                    to_pitch: shape.to_pitch,
                    run: shape.run,
                    count: shape.count,
                })
                .collect();
            match &self.table {
                Some(buffer) => self.work.upload_table(&table, buffer)?,
                None => self.table = Some(DeviceBuffer::of(&self.work, &table, "the table of copies")?),
            }
        }
        self.addresses = addresses.to_vec();
        Ok(())
    }

    /// Lets DMA reach the slot, once; answers whether it does.
    fn register(&mut self, attempt: &Attempt<'_>) -> Result<bool, CudaError> {
        let slot = &mut self.slots[attempt.slot()];
        if matches!(slot, Pinned::Unknown) {
            let (mapping, start) = (attempt.mapping(), self.region.data_start());
            let page = rustix::param::page_size() as u64;
            let pages = |r: &Range<u64>| {
                let first = (start + r.start) / page * page;
                (first, (start + r.end).next_multiple_of(page) - first)
            };
            let register = |r: &Range<u64>| {
                let (at, bytes) = pages(r);
                let owner: Arc<dyn Any + Send + Sync> = Arc::<Region>::clone(&self.region);
                let memory = (mapping.address().wrapping_add(at as usize), bytes);
                Registration::new(&self.gpu, memory, false, owner)
            };
            *slot = match self.ranges.iter().map(register).collect() {
                Ok(registered) => Pinned::Yes(registered),
                Err(error) => {
                    tracing::warn!(%error, "weights go into the slot through a buffer, which is slower");
                    Pinned::Refused
                }
            };
        }
        let is_direct = !matches!(slot, Pinned::Refused);
        if !is_direct && self.bounce.is_none() {
            self.bounce = Some(Bounce::new(&self.gpu)?);
        }
        Ok(is_direct)
    }

    fn start(
        &mut self,
        attempt: &Attempt<'_>,
        addresses: &[u64],
        is_direct: bool,
        stop: &Stop,
    ) -> Result<(), CudaError> {
        let base = attempt.mapping().address().wrapping_add(self.region.data_start() as usize);
        let mut sink = match self.bounce.as_mut().filter(|_| !is_direct) {
            Some(bounce) => Sink::Bounce(bounce, attempt),
            None => Sink::Slot(base),
        };
        let stopped = |stopped| CudaError::Stopped { stage: "copying weights into the slot", stopped };
        self.work.zero(&self.tally, self.tally.bytes())?;
        for (n, m) in self.ways.direct.iter().enumerate() {
            if n % 64 == 0 {
                stop.check().map_err(stopped)?;
            }
            let shape = Box2 { from: addresses[m.source] + m.shape.from, ..m.shape };
            // SAFETY: the plan was checked against the region, so that every run lies in the slot, which this attempt
            // writes; sources are of this device and as long as the caller promised. `run` finishes the stream.
            unsafe { sink.put(&self.dma, shape) }?;
        }
        let (Some(halves), Some(table)) = (&self.halves, &self.table) else { return Ok(()) };
        for (n, batch) in self.ways.batches.iter().enumerate() {
            stop.check().map_err(stopped)?;
            let half = n % 2;
            let memory = halves.memory.address() + half as u64 * (STAGE / 2);
            if n >= 2 {
                self.work.follow(&halves.emptied[half])?;
            }
            // A counter of the tally for every launch: as many as it has are started between two clearings.
            if n % 8 == 0 && n > 0 {
                self.work.zero(&self.tally, self.tally.bytes())?;
            }
            let args = CopyArgs {
                copies: table.address() + (batch.fills.start * size_of::<CopyBox>()) as u64,
                from: 0,
                to: memory,
                tally: self.tally.address(),
                count: batch.fills.len() as u32,
                work: (n % 8) as u32,
            };
            let kernel = if batch.is_cast { Kernel::Cast } else { Kernel::Copy };
            // SAFETY: the table is of boxes that fit into a half and read what the caller promised to be there.
            unsafe { self.gpu.kernels().launch(&self.work, kernel, &args, batch.fills.len() as u64) }?;
            self.work.mark(&halves.filled[half])?;
            self.dma.follow(&halves.filled[half])?;
            for shape in &batch.moves {
                // SAFETY: as above, out of the half.
                unsafe { sink.put(&self.dma, Box2 { from: memory + shape.from, ..*shape }) }?;
            }
            self.dma.mark(&halves.emptied[half])?;
        }
        Ok(())
    }
}

/// Where DMA goes.
enum Sink<'a, 'w> {
    Slot(*mut u8),
    Bounce(&'a mut Bounce, &'a Attempt<'w>),
}

impl Sink<'_, '_> {
    /// # Safety
    /// `shape.from` is memory of the device, `shape.to` counts from the data area of the slot and lies in it, and the
    /// stream is finished before either goes.
    unsafe fn put(&mut self, stream: &Stream, shape: Box2) -> Result<(), CudaError> {
        match self {
            Sink::Slot(base) => {
                let to = base.wrapping_add(shape.to as usize);
                // SAFETY: the caller's promise.
                unsafe {
                    if shape.count == 1 {
                        stream.download(shape.from, to, shape.run)
                    } else {
                        let pitches = ((shape.from, shape.from_pitch), (to, shape.to_pitch));
                        stream.download_runs(pitches.0, pitches.1, (shape.run, shape.count))
                    }
                }
            }
            // SAFETY: the caller's promise.
            Sink::Bounce(bounce, attempt) => unsafe { bounce.put(stream, &shape, attempt) },
        }
    }
}

/// Pinned memory on the way to a slot that cannot be registered.
struct Bounce {
    halves: [HostBuffer; 2],
    filled: [Event; 2],
    /// What lies in each half: where its rows go, packed from `from` on.
    pending: [Vec<Box2>; 2],
    half: usize,
    used: u64,
}

impl Bounce {
    fn new(gpu: &Gpu) -> Result<Bounce, CudaError> {
        let buffer = || HostBuffer::new(gpu, BOUNCE / 2, "a buffer for weights on their way to the slot");
        Ok(Bounce {
            halves: [buffer()?, buffer()?],
            filled: [Event::new(gpu)?, Event::new(gpu)?],
            pending: [Vec::new(), Vec::new()],
            half: 0,
            used: 0,
        })
    }

    /// What an offload that failed has left.
    fn forget(&mut self) {
        self.pending = [Vec::new(), Vec::new()];
        self.used = 0;
    }

    /// # Safety
    /// As for [`Sink::put`].
    unsafe fn put(&mut self, stream: &Stream, shape: &Box2, attempt: &Attempt<'_>) -> Result<(), CudaError> {
        let mut parts = Vec::new();
        cut(shape, Limits { bytes: BOUNCE / 4, span: u64::MAX / 4, scale: 1 }, |part| parts.push(part));
        for part in parts {
            if self.used + part.bytes() > BOUNCE / 2 {
                stream.mark(&self.filled[self.half])?;
                self.half ^= 1;
                self.used = 0;
                self.settle(self.half, attempt)?;
            }
            let to = self.halves[self.half].address().wrapping_add(self.used as usize);
            // SAFETY: the source is the caller's promise; the half has room, and is not read before `filled`.
            unsafe {
                stream.download_runs((part.from, part.from_pitch), (to, part.run), (part.run, part.count))
            }?;
            self.pending[self.half].push(Box2 { from: self.used, from_pitch: part.run, ..part });
            self.used += part.bytes();
        }
        Ok(())
    }

    /// Copies what lies in a half into the slot, once it is all there.
    fn settle(&mut self, half: usize, attempt: &Attempt<'_>) -> Result<(), CudaError> {
        if self.pending[half].is_empty() {
            return Ok(());
        }
        self.filled[half].wait("copying weights to the host", &Stop::never())?;
        for rows in std::mem::take(&mut self.pending[half]) {
            let bytes = self.halves[half].bytes();
            for row in 0..rows.count {
                let from = (rows.from + row * rows.run) as usize;
                attempt.write(rows.to + row * rows.to_pitch, &bytes[from..from + rows.run as usize])?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use windlass_core::Dtype;
    use windlass_core::identity::ModelId;
    use windlass_core::manifest::{Manifest, TensorSpec};

    use super::*;
    use crate::copies::{Copy, Dim};
    use crate::region::{Memfd, RegionSpec};

    fn region(dir: &std::path::Path, bytes: u64) -> Arc<Region> {
        let specs = [TensorSpec::new("t", Dtype::U8, [bytes])];
        Region::create(&RegionSpec {
            memfd: Memfd::Never,
            ..RegionSpec::new(
                dir.join("r"),
                ModelId::new("m").unwrap(),
                Arc::new(Manifest::new(specs, BTreeMap::new()).unwrap()),
            )
        })
        .unwrap()
    }

    fn bytes(b: &Box2) -> impl Iterator<Item = (u64, u64)> + use<> {
        let b = *b;
        let rows = (0..b.count).flat_map(move |r| (0..b.run).map(move |i| (r, i)));
        rows.map(move |(r, i)| (b.to + r * b.to_pitch + i, b.from + r * b.from_pitch + i))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

        /// Runs the ways on the host: what goes through a half is put there first.
        #[test]
        fn every_byte_of_a_plan_goes_one_way(
            shapes in prop::collection::vec((1u64..3000, 1u64..6, 1u64..4, 0u64..9, 0u64..2), 1..8),
            half in 256u64..9000,
        ) {
            // Rows of a matrix, apart in the source by a gap, some of them transposed or repeated.
            let (mut at, mut copies) = (0, Vec::new());
            for (run, rows, planes, gap, whole) in shapes {
                let (to, from) = (run + whole * gap, if gap == 8 { 0 } else { run + gap });
                let dims = vec![
                    Dim { count: planes, to: rows * to, from: rows * from },
                    Dim { count: rows, to, from },
                ];
                copies.push(Copy { at, run, dims });
                at += planes * rows * to;
            }
            let home = tempfile::tempdir_in("/dev/shm").unwrap();
            let region = region(home.path(), at + 1);
            let plan = CopyPlan::new(copies.clone(), &region).unwrap();
            let half = half.max(PIECE);
            let ways = Ways::new(&plan, &[], half).unwrap();
            let mut found = Vec::new();
            for m in &ways.direct {
                assert!(m.shape.count == 1 || m.shape.from_pitch >= m.shape.run, "no engine does {m:?}");
                found.extend(bytes(&m.shape).map(|(to, from)| (to, m.source, from)));
            }
            for batch in &ways.batches {
                let mut memory = BTreeMap::new();
                for fill in &ways.fills[batch.fills.clone()] {
                    for (to, from) in bytes(&fill.shape) {
                        assert!(to < half, "beyond the half");
                        assert!(memory.insert(to, (fill.source, from)).is_none(), "over another box");
                    }
                }
                for (to, from) in batch.moves.iter().flat_map(bytes) {
                    let (source, from) = memory[&from];
                    found.push((to, source, from));
                }
            }
            let mut expected = Vec::new();
            for (source, copy) in copies.iter().enumerate() {
                super::super::each_run(copy, |to, from| {
                    expected.extend((0..copy.run).map(|i| (to + i, source, from + i)));
                });
            }
            found.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(found, expected);
            let ranges = ways.ranges();
            prop_assert!(plan.copies().iter().all(|c| {
                let span = c.at..c.at + c.span(|d| d.to).unwrap();
                ranges.iter().any(|r| r.start <= span.start && span.end <= r.end)
            }), "a DMA must not cross two registrations");
        }
    }

    #[test]
    fn fp32_elements_are_staged_at_half_their_bytes() {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let region = region(home.path(), 1 << 20);
        // 1000 bf16 elements a row, 500 rows, from fp32 rows with a gap.
        let dims = vec![Dim { count: 500, to: 2000, from: 4096 }];
        let plan = CopyPlan::new(vec![Copy { at: 0, run: 2000, dims }], &region).unwrap();
        let ways = Ways::new(&plan, &[true], STAGE / 2).unwrap();
        assert!(ways.direct.is_empty());
        assert_eq!(ways.batches.len(), 1);
        assert_eq!(ways.batches[0].moves, [Box2::line(0, 0, 1_000_000, 1)], "one DMA for all of it");
        assert!(ways.fills.iter().all(|f| f.shape.from_pitch == 4096 && f.shape.to_pitch == 2000));
        let odd = CopyPlan::new(vec![Copy { at: 0, run: 3, dims: Vec::new() }], &region).unwrap();
        assert!(matches!(Ways::new(&odd, &[true], STAGE / 2), Err(CudaError::Cast { index: 0, bytes: 3 })));
    }
}
