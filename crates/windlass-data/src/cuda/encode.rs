//! Delta mode: what changed since the last version, found and encoded where the weights are.
//!
//! Owns: [`Baseline`], the last published state of this rank's blocks where the device reads it, the sums of these blocks, and
//! [`Records`], what a pass brings to the host. Called by a trainer's rank. Must not: publish, or know parts of other
//! ranks.
//!
//! # Memory
//!
//! The baseline takes as many bytes as the rank's share of the image, and beside it room for the records of a pass, a
//! sixteenth of that unless told otherwise ([`Baseline::bytes`] tells both). Records that find no room are read from the
//! baseline as dense ones, so that a pass never fails for that. What finds no room on the device is kept in page-locked memory of the
//! host, which a pass reads over the bus ([`Keeping`], [`windlass_core::choose::baseline`]).
//!
//! # Order
//!
//! A baseline is nothing until [`Baseline::reset`] fills it, together with a copy of the same weights into a slot. From
//! then on [`Baseline::compare`] leads from the version that it holds to the next, after which the weights may change again;
//! [`Baseline::collect`] brings the records to the host, and it holds that version afterwards. A pass that failed, or whose
//! records were lost, leaves it at no version or at one that nobody else has: the next is a reset.
//!
//! # Blocks
//!
//! A block of the cut table is encoded where it is: its runs must lie in one tensor of the rank at one pitch. Whole
//! tensors and shards of rows are so with default cuts if shards begin at block boundaries, and any shard is if the cut table
//! follows it. Where it does not, [`CudaError::Cuts`] names the block, and the rank publishes by copy.
//!
//! | | must hold | test |
//! |---|---|---|
//! | GPU-ENCODE-1 | Records are those of the CPU encoder, byte by byte. | `tests/gpu/device.py` |
//! | GPU-ENCODE-2 | Every block of the rank is found, at the right place and pitch, or refused. | `blocks_are_found_where_copies_say_they_are` |

#![allow(unsafe_code)]

mod kept;
mod records;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use windlass_core::Dtype;
use windlass_core::choose::baseline::Placed;
use windlass_core::delta::Tile;
use windlass_core::digest::{BlockSum, StateSum, SumTable};
use windlass_core::dtype::Line;
use windlass_core::identity::{Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;

pub use self::kept::Keeping;
use self::kept::Kept;
use self::records::{Pool, entries_of, mode_of};
pub use self::records::{Records, Spent, Uncollected};
use super::driver::{Gpu, Stream, StreamHandle};
use super::error::CudaError;
use super::kernels::{self, Block, Elements, EncodeArgs, Kernel, LOST, Span, SumArgs, Tally, Unit};
use super::launch::tally;
use super::memory::{DeviceBuffer, HostBuffer, SMALL};
use crate::copies::{Copy, CopyPlan};
use crate::stop::Stop;

/// The first buffers on the host are for this share, as a divisor.
const GUESS: u64 = 64;

/// Which state a baseline holds.
pub type Which = (Incarnation, Version);

/// Where a block is in a rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owned {
    tile: Tile,
    elements: Elements,
    source: usize,
    /// Of its first unit, from the address of the source on.
    offset: u64,
    /// From one run to the next in the source.
    pitch: u64,
}

/// The rank's blocks, those of the same elements together, each group by number.
fn owned(manifest: &Manifest, copies: &[Copy], casts: &[bool]) -> Result<Vec<Owned>, CudaError> {
    let tensors = manifest.tensors();
    let scale_of = |s: usize| if casts.get(s).copied().unwrap_or(false) { 2 } else { 1 };
    let copies: Vec<Copy> = copies.iter().enumerate().map(|(s, c)| normal(c, scale_of(s))).collect();
    let mut by_tensor: Vec<Vec<usize>> = vec![Vec::new(); tensors.len()];
    for (source, copy) in copies.iter().enumerate().filter(|(_, c)| !c.is_empty()) {
        let tensor = tensors.partition_point(|t| t.range().end <= copy.at);
        if let Some(list) = by_tensor.get_mut(tensor) {
            list.push(source);
        }
    }
    let mut all = Vec::new();
    for (t, sources) in by_tensor.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
        let tensor = &tensors[t];
        let (mut covered, mut last) = (0, None);
        for number in manifest.cuts().of_tensor(t) {
            let tile = Tile::of(manifest, number)?;
            let wrong = |why| CudaError::Cuts { block: number, tensor: tensor.name.clone(), why };
            let first = tensor.offset + tile.block.start * tile.unit as u64;
            let found = sources.iter().find_map(|&s| Some((s, locate(&copies[s], first, scale_of(s))?)));
            let Some((source, (offset, _))) = found else { continue };
            let scale = scale_of(source);
            if scale == 2 && tensor.dtype != Dtype::BF16 {
                return Err(wrong("it is cast, and not to bf16"));
            }
            let pitch = pitch(&copies[source], &tile, first, offset, scale).map_err(wrong)?;
            let elements = if scale == 2 { Elements::Cast } else { Elements::Plain(Unit::of(tile.unit)) };
            all.push(Owned { tile, elements, source, offset, pitch });
            covered += tile.bytes() as u64;
            last = Some(number);
        }
        let held: u64 = sources.iter().map(|&s| copies[s].bytes().unwrap_or(0)).sum();
        if covered != held {
            let block = last.unwrap_or(manifest.cuts().of_tensor(t).start);
            let why = "this rank's share does not end where blocks do";
            return Err(CudaError::Cuts { block, tensor: tensor.name.clone(), why });
        }
    }
    all.sort_by_key(|o| (o.elements, o.tile.number));
    Ok(all)
}

/// A copy by descending strides in the image, its runs as long as they are whole on both sides.
fn normal(copy: &Copy, scale: u64) -> Copy {
    let mut dims: Vec<_> = copy.dims.iter().copied().filter(|d| d.count != 1).collect();
    dims.sort_by_key(|d| std::cmp::Reverse(d.to));
    let mut run = copy.run;
    while let Some(d) = dims.pop_if(|d| (d.to, d.from) == (run, run * scale)) {
        run *= d.count;
    }
    Copy { at: copy.at, run, dims }
}

/// Where a byte of the image is in a normal copy's source, and how many bytes of the image go on from there without a
/// step.
fn locate(copy: &Copy, byte: u64, scale: u64) -> Option<(u64, u64)> {
    let mut rest = byte.checked_sub(copy.at)?;
    let mut from = 0;
    for d in &copy.dims {
        let i = rest.checked_div(d.to)?;
        if i >= d.count {
            return None;
        }
        rest -= i * d.to;
        from += i * d.from;
    }
    (rest < copy.run).then(|| (from + rest * scale, copy.run - rest))
}

/// The pitch of a block's runs in the source, the first of which is at `offset`.
fn pitch(copy: &Copy, tile: &Tile, first: u64, offset: u64, scale: u64) -> Result<u64, &'static str> {
    let unit = tile.unit as u64;
    let (run, stride) = (tile.block.run * unit, tile.block.stride * unit);
    let at = |n: u64| match locate(copy, first + n * stride, scale) {
        Some((from, left)) if left >= run => Ok(from),
        Some(_) => Err("a run of it is not contiguous"),
        None => Err("a part of it is elsewhere"),
    };
    at(0)?;
    if tile.block.count == 1 {
        return Ok(run * scale);
    }
    let pitch = at(1)?.checked_sub(offset).ok_or("its runs go backwards")?;
    for n in 2..tile.block.count {
        if at(n)? != offset + n * pitch {
            return Err("its runs are not equally far apart");
        }
    }
    Ok(pitch)
}

/// Blocks of the same elements.
#[derive(Clone, Copy, Debug)]
struct Group {
    elements: Elements,
    first: usize,
    count: usize,
}

/// What goes up for a block, with addresses from those of the sources.
fn table(blocks: &[Owned], bases: &[u64], addresses: &[u64]) -> Vec<Block> {
    let row = |(o, base): (&Owned, &u64)| {
        let (block, unit) = (o.tile.block, o.tile.unit as u64);
        Block {
            fresh: addresses[o.source] + o.offset,
            fresh_pitch: o.pitch,
            base: *base,
            start: block.start * unit,
            pitch: block.stride * unit,
            run: block.run as u32,
            count: block.count as u32,
            number: o.tile.number,
            is_float: u32::from(matches!(o.tile.line, Line::Float(_))),
        }
    };
    blocks.iter().zip(bases).map(row).collect()
}

/// The last published state of a rank's blocks, where the device reads it.
pub struct Baseline {
    // Finished before memory is given back.
    stream: Stream,
    gpu: Gpu,
    manifest: Arc<Manifest>,
    blocks: Vec<Owned>,
    groups: Vec<Group>,
    kept: Kept,
    table: DeviceBuffer,
    device_sums: DeviceBuffer,
    entries: DeviceBuffer,
    tally: DeviceBuffer,
    /// What the table was made of.
    addresses: Vec<u64>,
    sources: usize,
    holds: Option<Which>,
    /// In the order of `blocks`.
    sums: Vec<BlockSum>,
    /// The same: whose block it is. A trainer waits for the digest, and `blocks` are far apart.
    tensors: Vec<u32>,
    /// For each block number of the layout, its place in `blocks`.
    places: Vec<u32>,
    /// Which entry of an index each block of the layout has.
    by_block: Vec<u32>,
    /// The digest of what it holds, once asked for.
    state: Option<StateDigest>,
    /// The pass whose records are on the device.
    pending: Option<Pending>,
    pool: Arc<Pool>,
}

/// A pass whose records are still on the device.
#[derive(Clone, Copy, Debug)]
struct Pending {
    told: Tally,
    target: Which,
    took: Duration,
}

impl std::fmt::Debug for Baseline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Baseline")
            .field("blocks", &self.blocks.len())
            .field("holds", &self.holds)
            .finish_non_exhaustive()
    }
}

impl Baseline {
    /// Room for the blocks that `plan` copies, and for records, where `how` says. `casts` as in
    /// [`super::offload::Offload::new`].
    pub fn new(
        gpu: &Gpu,
        manifest: &Arc<Manifest>,
        plan: &CopyPlan,
        casts: &[bool],
        how: &Keeping,
    ) -> Result<Baseline, CudaError> {
        let sources = plan.spans().len();
        if !casts.is_empty() && casts.len() != sources {
            return Err(CudaError::Count { what: "casts", expected: sources, found: casts.len() });
        }
        let blocks = owned(manifest, plan.copies(), casts)?;
        let mut groups: Vec<Group> = Vec::new();
        let mut places = vec![u32::MAX; manifest.cuts().blocks() as usize];
        for (i, o) in blocks.iter().enumerate() {
            places[o.tile.number as usize] = i as u32;
            match groups.last_mut().filter(|g| g.elements == o.elements) {
                Some(group) => group.count += 1,
                None => groups.push(Group { elements: o.elements, first: i, count: 1 }),
            }
        }
        let kernels: Vec<_> =
            groups.iter().flat_map(|g| [Kernel::Encode(g.elements), Kernel::Fill(g.elements)]).collect();
        gpu.kernels().prepare(gpu, &[&[Kernel::Sum], &kernels[..]].concat())?;
        let sizes: Vec<u64> = blocks.iter().map(|o| o.tile.bytes() as u64).collect();
        let kept = Kept::new(gpu, &sizes, how)?;
        let bytes: u64 = sizes.iter().sum();
        let count = blocks.len() as u64;
        let small = |bytes: u64, what| DeviceBuffer::new(gpu, bytes, what, SMALL);
        let pool = Arc::new(Pool { gpu: gpu.clone(), free: Mutex::default() });
        for _ in 0..2 {
            let buffer = HostBuffer::new(gpu, bytes / GUESS + count * 8, "the records of delta mode")?;
            pool.put(buffer);
        }
        Ok(Baseline {
            stream: Stream::new(gpu)?,
            gpu: gpu.clone(),
            manifest: Arc::clone(manifest),
            groups,
            kept,
            table: small(count * size_of::<Block>() as u64, "the table of blocks")?,
            device_sums: small(count * 16, "the sums of blocks")?,
            entries: small(count * size_of::<kernels::Entry>() as u64, "the index of records")?,
            tally: tally(gpu)?,
            addresses: Vec::new(),
            sources,
            holds: None,
            sums: vec![BlockSum::default(); blocks.len()],
            tensors: blocks.iter().map(|o| o.tile.block.tensor).collect(),
            by_block: vec![u32::MAX; places.len()],
            state: None,
            pending: None,
            blocks,
            places,
            pool,
        })
    }

    /// Memory that it takes: the baseline, and the room for records.
    pub fn bytes(&self) -> (u64, u64) {
        let Placed { device, host, records } = self.kept.place();
        (device + host, records)
    }

    /// Where that is.
    pub fn place(&self) -> Placed {
        self.kept.place()
    }

    /// How many blocks are this rank's.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Which state it holds.
    pub fn holds(&self) -> Option<Which> {
        self.holds
    }

    /// The sums of this rank's blocks, by their numbers, in the state that it holds.
    pub fn sums(&self) -> impl Iterator<Item = (u32, BlockSum)> + '_ {
        self.blocks.iter().zip(&self.sums).map(|(o, sum)| (o.tile.number, *sum))
    }

    /// The sums of a state as a rank takes them over with a copy ([`crate::publish::Publisher::commit`]): those of other ranks'
    /// blocks are zero.
    pub fn table(&self) -> SumTable {
        let mut all = vec![BlockSum::default(); self.places.len()];
        for (o, sum) in self.blocks.iter().zip(&self.sums) {
            all[o.tile.number as usize] = *sum;
        }
        SumTable::new(&self.manifest, all)
    }

    /// The digest of the state that it holds, if all of the model is this rank's.
    pub fn digest(&mut self) -> Option<StateDigest> {
        if self.state.is_some() || self.blocks.len() != self.manifest.cuts().blocks() as usize {
            return self.state;
        }
        let mut tensors = vec![BlockSum::default(); self.manifest.tensors().len()];
        for (tensor, sum) in self.tensors.iter().zip(&self.sums) {
            let tensor = &mut tensors[*tensor as usize];
            *tensor = tensor.plus(*sum);
        }
        let mut state = StateSum::default();
        tensors.iter().enumerate().for_each(|(t, sum)| state.add(t as u32, *sum));
        self.state = Some(state.digest(self.manifest.layout_hash()));
        self.state
    }

    /// Takes the tensors at `addresses` as the state `which`, whatever it held, and sums their blocks.
    pub fn reset(
        &mut self,
        addresses: &[u64],
        after: StreamHandle,
        which: Which,
        stop: &Stop,
    ) -> Result<(), CudaError> {
        (self.holds, self.state, self.pending) = (None, None, None);
        self.follow(addresses)?;
        self.gpu.wait_for(after, stop)?;
        let result = self.fill().and_then(|()| self.sum());
        self.stream.finish("filling the baseline")?;
        result?;
        self.holds = Some(which);
        Ok(())
    }

    /// The records that lead from `base`, which it must hold, to the tensors at `addresses`; it holds `target`
    /// afterwards.
    pub fn encode(
        &mut self,
        addresses: &[u64],
        after: StreamHandle,
        base: Which,
        target: Which,
        stop: &Stop,
    ) -> Result<Records, CudaError> {
        self.compare(addresses, after, base, target, stop)?;
        self.collect(target)
    }

    /// The first half of [`Baseline::encode`], all of it that needs the tensors: they may change when this returns. Tells how
    /// many bytes of records there are; they wait on the device for [`Baseline::collect`], until when nothing is held.
    pub fn compare(
        &mut self,
        addresses: &[u64],
        after: StreamHandle,
        base: Which,
        target: Which,
        stop: &Stop,
    ) -> Result<u64, CudaError> {
        if self.holds != Some(base) {
            return Err(self.is_not(base));
        }
        self.follow(addresses)?;
        self.gpu.wait_for(after, stop)?;
        // From here on it is neither, until all is well.
        (self.holds, self.state, self.pending) = (None, None, None);
        let began = Instant::now();
        let told = self.pass();
        self.stream.finish("encoding")?;
        let told = told?;
        self.pending = Some(Pending { told, target, took: began.elapsed() });
        Ok(told.cursor.min(self.kept.out.bytes()) + self.room_for_lost(&told))
    }

    /// The second half: brings the records to `target` to the host, and holds that from now on.
    pub fn collect(&mut self, target: Which) -> Result<Records, CudaError> {
        let Some(pending) = self.pending.take_if(|p| p.target == target) else {
            return Err(self.is_not(target));
        };
        let records = self.bring(&pending);
        self.stream.finish("copying records to the host")?;
        let records = records?;
        self.holds = Some(target);
        Ok(records)
    }

    fn is_not(&self, base: Which) -> CudaError {
        let name = |(i, v): Which| format!("version {v} of incarnation {i}");
        CudaError::Baseline { is: self.holds.map_or("empty".to_owned(), name), base: name(base) }
    }

    /// Bytes that suffice for the blocks of lost records.
    fn room_for_lost(&self, told: &Tally) -> u64 {
        match u64::from(told.lost) {
            0 => 0,
            lost => lost * self.blocks.iter().map(|o| o.tile.bytes() as u64).max().unwrap_or(0),
        }
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
        for o in &self.blocks {
            let align = match o.elements {
                Elements::Plain(unit) => unit.bytes(),
                Elements::Cast => 4,
            };
            let address = addresses[o.source] + o.offset;
            if !address.is_multiple_of(align) || !o.pitch.is_multiple_of(align) {
                return Err(CudaError::Unaligned { what: "tensor", index: o.source, address, align });
            }
        }
        self.stream.upload_table(&table(&self.blocks, &self.kept.bases, addresses), &self.table)?;
        self.addresses = addresses.to_vec();
        Ok(())
    }

    fn args(&self, group: &Group, work: usize) -> EncodeArgs {
        EncodeArgs {
            blocks: self.table.address() + (group.first * size_of::<Block>()) as u64,
            sums: self.device_sums.address() + group.first as u64 * 16,
            out: self.kept.out.address(),
            entries: self.entries.address(),
            tally: self.tally.address(),
            capacity: self.kept.out.bytes() / 4 * 4,
            count: group.count as u32,
            entry_capacity: self.blocks.len() as u32,
            work: work as u32,
            unused: 0,
        }
    }

    fn fill(&self) -> Result<(), CudaError> {
        for (work, group) in self.groups.iter().enumerate() {
            let args = self.args(group, work);
            let kernel = Kernel::Fill(group.elements);
            // SAFETY: the table is of blocks that were found in tensors of this device, and of places in the baseline.
            unsafe { self.gpu.kernels().launch(&self.stream, kernel, &args, group.count as u64) }?;
        }
        Ok(())
    }

    /// Sums all blocks of the baseline.
    fn sum(&mut self) -> Result<(), CudaError> {
        let span = |((i, o), base): ((usize, &Owned), &u64)| {
            let (block, unit) = (o.tile.block, o.tile.unit as u64);
            Span {
                at: *base,
                pitch: block.run * unit,
                start: block.start * unit,
                stride: block.stride * unit,
                run: (block.run * unit) as u32,
                count: block.count as u32,
                sum: i as u32,
                unused: 0,
            }
        };
        let spans: Vec<Span> = self.blocks.iter().enumerate().zip(&self.kept.bases).map(span).collect();
        let table = DeviceBuffer::of(&self.stream, &spans, "the table of sums")?;
        self.stream.zero(&self.device_sums, self.device_sums.bytes())?;
        self.stream.zero(&self.tally, self.tally.bytes())?;
        let args = SumArgs {
            spans: table.address(),
            sums: self.device_sums.address(),
            tally: self.tally.address(),
            count: spans.len() as u32,
            work: 0,
        };
        // SAFETY: spans of the baseline, and a sum for each.
        unsafe { self.gpu.kernels().launch(&self.stream, Kernel::Sum, &args, spans.len() as u64) }?;
        let sums = self.stream.download_table::<[u64; 2]>(&self.device_sums, self.blocks.len())?;
        self.sums = sums.into_iter().map(BlockSum).collect();
        Ok(())
    }

    /// One pass, and what it says of itself.
    fn pass(&self) -> Result<Tally, CudaError> {
        self.stream.zero(&self.tally, self.tally.bytes())?;
        for (work, group) in self.groups.iter().enumerate() {
            let args = self.args(group, work);
            let kernel = Kernel::Encode(group.elements);
            // SAFETY: as in `fill`; nothing is written beyond `capacity`, nor more entries than there are blocks.
            unsafe { self.gpu.kernels().launch(&self.stream, kernel, &args, group.count as u64) }?;
        }
        Ok(self.stream.download_table::<Tally>(&self.tally, 1)?.first().copied().unwrap_or_default())
    }

    /// What a pass found, on the host.
    fn bring(&mut self, &Pending { told, took, .. }: &Pending) -> Result<Records, CudaError> {
        let began = Instant::now();
        let count = (told.entries as usize).min(self.blocks.len());
        let index = count as u64 * size_of::<kernels::Entry>() as u64;
        let payload = told.cursor.min(self.kept.out.bytes());
        // Behind the index and the payloads come the blocks of lost records.
        let lost = self.room_for_lost(&told);
        let mut buffer = self.pool.take(index + payload + lost)?;
        let at = buffer.bytes_mut().as_mut_ptr();
        // SAFETY: the buffer has room for both, and is nobody else's until the stream is finished.
        unsafe {
            self.stream.download(self.entries.address(), at, index)?;
            self.stream.download(self.kept.out.address(), at.wrapping_add(index as usize), payload)?;
        }
        self.stream.finish("copying records to the host")?;
        let copied = Instant::now();
        let (order, bytes) = self.read_index(&buffer, count)?;
        let mut records = Records {
            order,
            lost: Vec::new(),
            payload: index as usize,
            bytes,
            changes: told.changes,
            spent: Spent::default(),
            buffer: Some(buffer),
            pool: Arc::clone(&self.pool),
        };
        if told.lost > 0 {
            self.bring_lost(&mut records, at, index + payload)?;
        }
        records.spent = Spent { pass: took, copy: copied - began, index: copied.elapsed() };
        Ok(records)
    }

    /// Reads the index that has come, and takes over the new sums: the entries by their blocks, and the bytes of all
    /// payloads.
    fn read_index(&mut self, buffer: &HostBuffer, count: usize) -> Result<(Vec<u32>, u64), CudaError> {
        let bad =
            |why| CudaError::Kernel { kernel: "windlass_encode", stage: why, code: 0, text: String::new() };
        self.by_block.fill(u32::MAX);
        let mut bytes = 0;
        for (i, e) in entries_of(buffer, count).iter().enumerate() {
            let place = self.places.get(e.number as usize).copied().unwrap_or(u32::MAX);
            let (Some(slot), Some(sum)) =
                (self.by_block.get_mut(e.number as usize), self.sums.get_mut(place as usize))
            else {
                return Err(bad("giving a record to a block that is not there"));
            };
            if std::mem::replace(slot, i as u32) != u32::MAX {
                return Err(bad("giving a block two records"));
            }
            let end = e.offset.checked_add(e.length.into());
            if e.offset != LOST && end.is_none_or(|end| end > self.kept.out.bytes())
                || mode_of(e.mode).is_none()
            {
                return Err(bad("writing a record"));
            }
            *sum = BlockSum(e.sum);
            bytes += if e.offset == LOST { 0 } else { u64::from(e.length) };
        }
        let mut order = Vec::with_capacity(count);
        order.extend(self.by_block.iter().filter(|i| **i != u32::MAX));
        Ok((order, bytes))
    }

    /// Reads the blocks of records that found no room, to `at` in the buffer of the records, which begins at `start`.
    fn bring_lost(&self, records: &mut Records, start: *mut u8, mut at: u64) -> Result<(), CudaError> {
        let Some(buffer) = &records.buffer else { return Ok(()) };
        let raw = entries_of(buffer, records.order.len());
        for e in records.order.iter().filter_map(|&i| raw.get(i as usize)).filter(|e| e.offset == LOST) {
            let place = self.places[e.number as usize] as usize;
            let bytes = self.blocks[place].tile.bytes() as u64;
            // SAFETY: a block of the baseline; the buffer has room for it, and nobody reads it before the stream is
            // finished.
            unsafe { self.stream.collect(self.kept.bases[place], start.wrapping_add(at as usize), bytes) }?;
            records.lost.push((e.number, at as usize, bytes as usize));
            records.bytes += bytes;
            at += bytes;
        }
        self.stream.finish("copying lost records to the host")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use windlass_core::manifest::{DimCut, TensorSpec};

    use super::*;
    use crate::copies::Dim;

    /// Reads a tensor's block through the table, out of the sources, and compares with the image.
    fn check(manifest: &Manifest, copies: &[Copy], casts: &[bool]) -> Result<usize, CudaError> {
        let found = owned(manifest, copies, casts)?;
        // What byte of the image each byte of each source is.
        let mut sources: Vec<BTreeMap<u64, u64>> = vec![BTreeMap::new(); copies.len()];
        for (s, copy) in copies.iter().enumerate() {
            let scale = if casts.get(s) == Some(&true) { 2 } else { 1 };
            super::super::each_run(copy, |to, from| {
                sources[s].extend((0..copy.run).map(|i| (from + i * scale, to + i)));
            });
        }
        for o in &found {
            let (block, unit) = (o.tile.block, o.tile.unit as u64);
            let tensor = manifest.tensors()[block.tensor as usize].offset;
            let scale = if o.elements == Elements::Cast { 2 } else { 1 };
            for run in 0..block.count {
                for i in 0..block.run * unit {
                    let from = o.offset + run * o.pitch + i * scale;
                    let to = tensor + (block.start + run * block.stride) * unit + i;
                    assert_eq!(sources[o.source].get(&from), Some(&to), "{o:?}");
                }
            }
        }
        Ok(found.len())
    }

    fn manifest(rows: u64, columns: u64, dtype: Dtype, cuts: Option<DimCut>) -> Manifest {
        let specs = [
            TensorSpec::new("a", Dtype::F32, [5]),
            TensorSpec::new("w", dtype, [rows, columns]),
            TensorSpec::new("z", Dtype::U8, [3]),
        ];
        let manifest = Manifest::new(specs, BTreeMap::new()).unwrap();
        let cuts = cuts.map(|c| ("w".to_owned(), vec![c]));
        manifest.with_cuts(&cuts.into_iter().collect()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        #[test]
        fn blocks_are_found_where_copies_say_they_are(
            rows in 1u64..40,
            columns in 1u64..40,
            parts in 1u64..5,
            gap in 0u64..3,
            along_rows: bool,
            cast: bool,
        ) {
            let (dim, size) = if along_rows { (0, rows) } else { (1, columns) };
            let m = manifest(rows, columns, Dtype::BF16, Some(DimCut::chunked(dim, size, parts)));
            let w = m.tensors()[m.find("w").unwrap()].offset;
            let scale = if cast { 2 } else { 1 };
            let each = size.div_ceil(parts);
            let mut blocks = 0;
            for first in (0..size).step_by(each as usize) {
                let n = each.min(size - first);
                let copy = if along_rows {
                    Copy { at: w + first * columns * 2, run: n * columns * 2, dims: Vec::new() }
                } else {
                    // Rows with gaps are in no block of whole rows.
                    let from = (n + if n == columns { 0 } else { gap }) * 2 * scale;
                    let dims = vec![Dim { count: rows, to: columns * 2, from }];
                    Copy { at: w + first * 2, run: n * 2, dims }
                };
                blocks += check(&m, &[copy], &[cast]).unwrap();
            }
            prop_assert_eq!(blocks, m.cuts().of_tensor(m.find("w").unwrap()).len());
        }
    }

    #[test]
    fn shards_that_the_cut_table_does_not_follow_are_refused_by_name() {
        let m = manifest(1 << 10, 1 << 8, Dtype::BF16, None);
        let w = m.tensors()[m.find("w").unwrap()].offset;
        let whole = 1 << 19;
        assert_eq!(check(&m, &[Copy { at: w, run: whole, dims: Vec::new() }], &[]).unwrap(), 4);
        // Three rows less than a block; a half of the columns; a row in the middle; transposed.
        let half = vec![Dim { count: 1 << 10, to: 512, from: 256 }];
        let turned = vec![Dim { count: 256, to: 2, from: 2048 }, Dim { count: 1024, to: 512, from: 2 }];
        for copy in [
            Copy { at: w, run: whole - 3 * 512, dims: Vec::new() },
            Copy { at: w, run: 256, dims: half },
            Copy { at: w + 512, run: 512, dims: Vec::new() },
            Copy { at: w, run: 2, dims: turned },
        ] {
            let e = owned(&m, &[copy], &[]).unwrap_err();
            let CudaError::Cuts { tensor, .. } = &e else { panic!("{e}") };
            assert_eq!(tensor, "w");
        }
        // Only bf16 comes of a cast.
        let m = manifest(4, 4, Dtype::F16, None);
        let w = m.tensors()[m.find("w").unwrap()].offset;
        let e = owned(&m, &[Copy { at: w, run: 32, dims: Vec::new() }], &[true]).unwrap_err();
        assert!(e.to_string().contains("not to bf16"), "{e}");
    }

    #[test]
    fn blocks_of_the_same_elements_are_one_launch() {
        let specs = [
            TensorSpec::new("a", Dtype::F32, [70_000]),
            TensorSpec::new("b", Dtype::BF16, [70_000]),
            TensorSpec::new("c", Dtype::BF16, [10]),
            TensorSpec::new("d", Dtype::U8, [10]),
        ];
        let m = Manifest::new(specs, BTreeMap::new()).unwrap();
        let whole = |name: &str| {
            let t = &m.tensors()[m.find(name).unwrap()];
            Copy { at: t.offset, run: t.bytes, dims: Vec::new() }
        };
        let copies = [whole("d"), whole("c"), whole("b"), whole("a")];
        let found = owned(&m, &copies, &[false, true, false, false]).unwrap();
        let kinds: Vec<_> = found.iter().map(|o| (o.elements, o.tile.number)).collect();
        let mut sorted = kinds.clone();
        sorted.sort_unstable();
        assert_eq!(kinds, sorted);
        assert_eq!(found.len(), m.cuts().blocks() as usize);
        let rows = table(&found, &vec![1 << 40; found.len()], &[0x1000, 0x2000, 0x3000, 0x4000]);
        let bytes = kinds.iter().position(|k| k.0 == Elements::Plain(Unit::One)).unwrap();
        assert_eq!((rows[bytes].fresh, rows[bytes].is_float, rows[bytes].run), (0x1000, 0, 10));
        let cast = kinds.iter().position(|k| k.0 == Elements::Cast).unwrap();
        assert_eq!((rows[cast].fresh, rows[cast].fresh_pitch, rows[cast].pitch), (0x2000, 40, 20));
    }
}
