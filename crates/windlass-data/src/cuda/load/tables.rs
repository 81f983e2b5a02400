//! What the kernels are told: a load plan and the records of a delta as tables.
//!
//! Owns: where copies read and write ([`replays`], [`chunks`]), where blocks are ([`Places`]), what is summed ([`spans`],
//! [`block_spans`]) and which records go to which kernel ([`Sorted`]). Called by [`super::DevicePlan`]. Must not: touch a device.

use std::cmp::Reverse;
use std::ops::Range;

use windlass_core::delta::{Delta, Mode, Tile};
use windlass_core::dtype::Line;
use windlass_core::manifest::Manifest;

use crate::copies::{Copy, Dim};
use crate::cuda::boxes::{Box2, Limits, boxes, cut};
use crate::cuda::error::CudaError;
use crate::cuda::kernels::{CopyBox, Kernel, Patch, Piece, Place, Span, Unit};
use crate::load::{HeldBox, LoadPlan};

/// Bytes that a CTA copies or sums at a time.
const PIECE: u64 = 256 << 10;
/// How far a box reaches in the image at the most.
const REACH: u64 = 16 << 20;
/// Kinds of records: four units, with a sum to check or without.
const KINDS: usize = 8;
/// Of a record that does not reach this worker.
const ELSEWHERE: u8 = u8::MAX;
/// The most pieces of a plan; more would be a plan of single elements.
const MAX_PIECES: usize = 1 << 24;

/// A box of an image and where it goes: offset in the image, address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Replay {
    pub(super) tensor: u32,
    pub(super) shape: Box2,
}

/// The boxes of a plan, by where they read.
pub(super) fn replays(plan: &LoadPlan, addresses: &[u64]) -> Result<Vec<Replay>, CudaError> {
    let mut all = Vec::new();
    let limits = Limits { bytes: PIECE, span: REACH, scale: 1 };
    for p in plan.pieces() {
        let (to, from) = (addresses[p.target], p.base + p.reads.at);
        boxes(&p.writes, 1, |b| {
            cut(&Box2 { to: to + b.to, from: from + b.from, ..b }, limits, |shape| {
                all.push(Replay { tensor: p.tensor, shape });
            });
        });
        check_count(all.len())?;
    }
    all.sort_by_key(|r| (r.shape.from, r.shape.to));
    Ok(all)
}

pub(super) fn check_count(pieces: usize) -> Result<(), CudaError> {
    if pieces <= MAX_PIECES {
        return Ok(());
    }
    Err(CudaError::Count { what: "pieces of a plan at the most", expected: MAX_PIECES, found: pieces })
}

pub(super) fn table(replays: &[Replay]) -> Vec<CopyBox> {
    let row = |r: &Replay| {
        let Box2 { to, from, to_pitch, from_pitch, run, count } = r.shape;
        CopyBox { from, to, from_pitch, to_pitch, run, count }
    };
    replays.iter().map(row).collect()
}

/// Boxes that come with one piece of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) boxes: Range<usize>,
    pub(super) bytes: Range<u64>,
}

/// Divides boxes, which are sorted, into pieces of the image of at most `size` bytes.
pub(super) fn chunks(replays: &[Replay], size: u64) -> Vec<Chunk> {
    let mut all: Vec<Chunk> = Vec::new();
    for (i, r) in replays.iter().enumerate() {
        let span = r.shape.source_span(1);
        match all.last_mut().filter(|c| span.end.max(c.bytes.end) - c.bytes.start <= size) {
            Some(chunk) => {
                chunk.boxes.end = i + 1;
                chunk.bytes.end = chunk.bytes.end.max(span.end);
            }
            None => all.push(Chunk { boxes: i..i + 1, bytes: span }),
        }
    }
    all
}

/// Where the blocks of a layout are in an engine's memory.
#[derive(Debug, Default)]
pub(super) struct Places {
    pub(super) pieces: Vec<Piece>,
    /// For each block of the layout.
    pub(super) blocks: Vec<Place>,
    /// For each block, whether all of it is held, once or more.
    pub(super) whole: Vec<bool>,
}

impl Places {
    pub(super) fn new(plan: &LoadPlan, addresses: &[u64]) -> Result<Places, CudaError> {
        let manifest = plan.manifest();
        let mut by_tensor: Vec<Vec<Piece>> = vec![Vec::new(); manifest.tensors().len()];
        let mut count = 0;
        for p in plan.pieces() {
            let target = addresses[p.target] + p.writes.at;
            let list = &mut by_tensor[p.tensor as usize];
            let before = list.len();
            scatter(&p.reads, target, list);
            count += list.len() - before;
            check_count(count)?;
        }
        let mut all = Places::default();
        for (t, mut pieces) in by_tensor.into_iter().enumerate() {
            pieces.sort_by_key(|p| p.begin);
            let (_, read, numel) = &plan.coverage().sources[t];
            all.add(manifest, t, &pieces, read == numel)?;
            all.pieces.append(&mut pieces);
        }
        Ok(all)
    }

    /// Adds the blocks of a tensor, whose pieces are about to follow those that are there.
    pub(super) fn add(
        &mut self,
        manifest: &Manifest,
        t: usize,
        pieces: &[Piece],
        is_whole: bool,
    ) -> Result<(), CudaError> {
        let end = |p: &Piece| p.begin + (p.count - 1) * p.pitch + p.run;
        // Up to each piece, how far those before it and itself reach.
        let reach: Vec<u64> = pieces
            .iter()
            .scan(0, |far, p| {
                *far = end(p).max(*far);
                Some(*far)
            })
            .collect();
        for number in manifest.cuts().of_tensor(t) {
            let tile = Tile::of(manifest, number)?;
            let (block, unit) = (tile.block, tile.unit as u64);
            let start = block.start * unit;
            let after = start + ((block.count - 1) * block.stride + block.run) * unit;
            let first = reach.partition_point(|far| *far <= start);
            let last = pieces.partition_point(|p| p.begin < after).max(first);
            let is_apart = last > first && pieces[first..last].is_sorted_by(|a, b| end(a) <= b.begin);
            let is_within = |p: &Piece| p.count == 1 && p.begin <= start && after <= p.begin + p.run;
            let mantissa = match tile.line {
                Line::Float(mantissa) => Some(mantissa),
                Line::Integer => None,
            };
            self.blocks.push(Place {
                start,
                pitch: block.stride * unit,
                run: block.run as u32,
                count: block.count as u32,
                first: (self.pieces.len() + first) as u32,
                pieces: (last - first) as u32,
                is_float: mantissa.is_some().into(),
                is_apart: is_apart.into(),
                mantissa: mantissa.unwrap_or(0).into(),
            });
            self.whole.push(is_whole || pieces[first..last].iter().any(is_within));
        }
        Ok(())
    }
}

/// The pieces of a copy that is seen from the tensor; `target` is where `from` counts from. A unit has at most one place
/// in each of them.
pub(super) fn scatter(reads: &Copy, target: u64, into: &mut Vec<Piece>) {
    let mut dims: Vec<Dim> = reads.dims.clone();
    // The pitch of a piece steps over its run, or it would hold units twice. Of those that do, the shortest is its own, so
    // that pieces are short in the tensor and apart.
    dims.sort_by_key(|d| (d.to >= reads.run, Reverse(d.to)));
    let last = dims.pop_if(|d| d.to >= reads.run);
    let outer = Copy { at: reads.at, run: reads.run, dims };
    crate::cuda::each_run(&outer, |begin, from| {
        let (pitch, count, target_pitch) =
            last.map_or((reads.run, 1, reads.run), |d| (d.to, d.count, d.from));
        into.push(Piece { begin, run: reads.run, pitch, count, target: target + from, target_pitch });
    });
}

/// The spans of a digest; sums are by the number of the box.
pub(super) fn spans(held: &[(u32, usize, HeldBox)], addresses: &[u64]) -> Result<Vec<Span>, CudaError> {
    let mut all = Vec::new();
    let limits = Limits { bytes: PIECE, span: u64::MAX / 4, scale: 1 };
    for (sum, (_, target, b)) in held.iter().enumerate() {
        boxes(&b.reads, 1, |shape| {
            cut(&shape, limits, |s| {
                all.push(Span {
                    at: addresses[*target] + b.place + s.from,
                    pitch: s.from_pitch,
                    start: s.to,
                    stride: s.to_pitch,
                    run: s.run as u32,
                    count: s.count as u32,
                    sum: sum as u32,
                    unused: 0,
                });
            });
        });
        check_count(all.len())?;
    }
    Ok(all)
}

/// The spans of the blocks that are held whole, each unit in one place; sums are by the number of the block.
pub(super) fn block_spans(manifest: &Manifest, places: &Places) -> Result<Vec<Span>, CudaError> {
    let mut all: Vec<Span> = Vec::new();
    for (number, (place, _)) in places.blocks.iter().zip(&places.whole).enumerate().filter(|(_, (_, w))| **w)
    {
        let run = u64::from(place.run) * Tile::of(manifest, number as u32)?.unit as u64;
        let pieces = &places.pieces[place.first as usize..(place.first + place.pieces) as usize];
        for row in 0..u64::from(place.count) {
            let start = place.start + row * place.pitch;
            each_overlap(start..start + run, pieces, |start, at, run| {
                let number = number as u32;
                let span = Span {
                    at,
                    pitch: 0,
                    start,
                    stride: 0,
                    run: run as u32,
                    count: 1,
                    sum: number,
                    unused: 0,
                };
                if !all.last_mut().is_some_and(|last| extend(last, &span)) {
                    all.push(span);
                }
            });
        }
        check_count(all.len())?;
    }
    Ok(all)
}

/// Takes `next` in as one more run of `span`, whose pitches are those of its first two. False if it is none.
pub(super) fn extend(span: &mut Span, next: &Span) -> bool {
    if (span.sum, span.run) != (next.sum, next.run) || next.start <= span.start || next.at <= span.at {
        return false;
    }
    let (stride, pitch) = (next.start - span.start, next.at - span.at);
    if span.count == 1 {
        (span.stride, span.pitch) = (stride, pitch);
    }
    let count = u64::from(span.count);
    let is_next = (stride, pitch) == (count * span.stride, count * span.pitch);
    span.count += u32::from(is_next);
    is_next
}

/// Gives the parts of some bytes of a tensor that pieces hold, each byte once: the first, its address, how many.
pub(super) fn each_overlap(bytes: Range<u64>, pieces: &[Piece], mut found: impl FnMut(u64, u64, u64)) {
    let mut parts = Vec::new();
    for p in pieces.iter().filter(|p| p.begin < bytes.end) {
        // The first run that ends after the bytes begin.
        let first = (bytes.start + 1).saturating_sub(p.begin + p.run).div_ceil(p.pitch.max(1));
        for run in first..p.count {
            let begin = p.begin + run * p.pitch;
            let (from, to) = (begin.max(bytes.start), (begin + p.run).min(bytes.end));
            if from >= to {
                break;
            }
            parts.push((from, to, p.target + run * p.target_pitch + (from - begin)));
        }
    }
    // Several places may hold the same.
    parts.sort_unstable();
    let mut done = bytes.start;
    for (from, to, at) in parts {
        let skip = done.max(from) - from;
        if from + skip < to {
            found(from + skip, at + skip, to - from - skip);
            done = to;
        }
    }
}

/// Records of one kind, of a staged delta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) kernel: Kernel,
    pub(super) is_checked: bool,
    pub(super) first: usize,
    pub(super) count: usize,
}

/// The records of a delta by their kinds.
pub(super) struct Sorted {
    pub(super) kinds: Vec<u8>,
    /// Where those of each kind begin.
    pub(super) firsts: [usize; KINDS],
    /// Kinds of which there are some. Each launch has a counter of work, of which there are eight.
    pub(super) groups: Vec<Group>,
}

impl Sorted {
    pub(super) fn new(
        delta: &Delta<'_>,
        manifest: &Manifest,
        places: &Places,
        has_sums: bool,
        chosen: &[bool],
    ) -> Result<Sorted, CudaError> {
        let (mut kinds, mut counts) = (Vec::with_capacity(delta.entries().len()), [0; KINDS]);
        // Blocks are in the order of tensors.
        let (mut tensor, mut blocks, mut by_unit) = (0, 0..0, 0);
        for e in delta.entries() {
            while !blocks.contains(&e.block) && tensor < chosen.len() {
                blocks = manifest.cuts().of_tensor(tensor);
                let unit = Unit::of(manifest.tensors()[tensor].dtype.unit());
                by_unit = Unit::ALL.iter().position(|u| *u == unit).unwrap_or(0);
                tensor += 1;
            }
            let place = places.blocks.get(e.block as usize);
            if tensor == 0 || !chosen[tensor - 1] || place.is_none_or(|p| p.pieces == 0) {
                kinds.push(ELSEWHERE);
                continue;
            }
            if e.mode == Mode::Context {
                let tensor = manifest.tensors()[tensor - 1].name.clone();
                return Err(CudaError::Context { block: e.block, tensor });
            }
            let kind = by_unit * 2 + usize::from(has_sums && places.whole[e.block as usize]);
            counts[kind] += 1;
            kinds.push(kind as u8);
        }
        let (mut groups, mut first, mut firsts) = (Vec::new(), 0, [0; KINDS]);
        for (kind, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            let (kernel, is_checked) = (Kernel::Apply(Unit::ALL[kind / 2]), kind % 2 == 1);
            groups.push(Group { kernel, is_checked, first, count });
            firsts[kind] = first;
            first += count;
        }
        Ok(Sorted { kinds, firsts, groups })
    }

    /// How many records reach this worker.
    pub(super) fn count(&self) -> usize {
        self.groups.iter().map(|g| g.count).sum()
    }

    /// What the kernels are told of these records, those of one kind together.
    pub(super) fn fill(&self, delta: &Delta<'_>, into: &mut [Patch]) {
        let mut next = self.firsts;
        for (e, kind) in delta.entries().iter().zip(&self.kinds).filter(|(_, kind)| **kind != ELSEWHERE) {
            let at = &mut next[usize::from(*kind)];
            into[*at] = Patch {
                offset: e.offset as u64,
                sum: e.sum.0,
                length: e.len,
                mode: e.mode.code().into(),
                place: e.block,
                unused: 0,
            };
            *at += 1;
        }
    }
}
