//! What a plan must satisfy, and what it covers.
//!
//! Bounds are arithmetic. That no element is written twice follows from strides and spans wherever copies do not
//! interleave, which is nearly always; where they do, elements are marked one by one.

use std::collections::BTreeMap;
use std::ops::Range;

use windlass_core::dtype::Dtype;
use windlass_core::manifest::Manifest;

use super::piece::{Piece, each, is_nested, span};
use super::{LoadError, PlanCopy, Target};
use crate::copies::{Copy, Dim, MAX_DIMS};

/// How far copies may interleave: a bitmap of one GiB.
const MAX_MARKS: u64 = 1 << 33;

/// Bytes of an element as torch counts them; `None` for those that cross bytes.
pub(super) fn item(dtype: Dtype) -> Option<u64> {
    match dtype.bits() {
        // Two to a byte, which torch takes for one.
        4 => Some(1),
        bits if bits % 8 == 0 => Some(bits / 8),
        _ => None,
    }
}

/// Bytes of a target's elements, if memory can hold them.
pub(super) fn target_item(target: &Target) -> Result<u64, LoadError> {
    let Target { name, numel, dtype } = target;
    let item = item(*dtype).ok_or_else(|| LoadError::Packed { target: name.clone(), dtype: *dtype })?;
    match numel.checked_mul(item) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(item),
        Some(_) | None => Err(LoadError::HugeTarget { target: name.clone(), numel: *numel, dtype: *dtype }),
    }
}

/// How many elements are written and read, of how many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// For each target: its name, elements that are written, all of them.
    pub targets: Vec<(String, u64, u64)>,
    /// For each tensor of the image: its name, elements that are read, all of them.
    pub sources: Vec<(String, u64, u64)>,
}

/// The piece that a copy is; `None` if it moves nothing.
pub(super) fn piece(
    manifest: &Manifest,
    targets: &[Target],
    given: usize,
    copy: &PlanCopy,
) -> Result<Option<Piece>, LoadError> {
    let name = || copy.source.clone();
    let found = manifest.find(&copy.source).and_then(|t| Some((t, manifest.tensors().get(t)?)));
    let (index, tensor) = found.ok_or_else(|| LoadError::NoSource { copy: given, name: name() })?;
    let target = targets.get(copy.target).ok_or(LoadError::NoTarget {
        copy: given,
        target: copy.target,
        targets: targets.len(),
    })?;
    if tensor.dtype != target.dtype {
        let (from, to) = (tensor.dtype, target.dtype);
        return Err(LoadError::Cast { copy: given, name: name(), from, target: target.name.clone(), to });
    }
    let item = target_item(target)?;
    let dims = dims(given, copy)?;
    let overflow = || LoadError::Overflow { copy: given, name: name() };
    // In elements first: what fits in its tensor and its target fits in bytes.
    let all = Copy { at: 0, run: 1, dims };
    let (Some(read), Some(written), Some(elements)) = (all.span(|d| d.from), all.span(|d| d.to), all.bytes())
    else {
        return Err(overflow());
    };
    if elements == 0 {
        // Slices of nothing may begin anywhere.
        return Ok(None);
    }
    let numel = tensor.bytes / item;
    let end = copy.source_offset.checked_add(read).ok_or_else(overflow)?;
    if end > numel {
        return Err(LoadError::BeyondSource { copy: given, name: name(), end, numel });
    }
    let end = copy.target_offset.checked_add(written).ok_or_else(overflow)?;
    if end > target.numel {
        let (target, numel) = (target.name.clone(), target.numel);
        return Err(LoadError::BeyondTarget { copy: given, target, end, numel });
    }
    elements.checked_mul(item).ok_or_else(overflow)?;
    // Strides of dimensions of one element may be anything; they are dropped.
    let scale = |d: &Dim| Some(Dim { to: d.to.checked_mul(item)?, from: d.from.checked_mul(item)?, ..*d });
    let dims: Option<Vec<Dim>> = all.dims.iter().filter(|d| d.count != 1).map(scale).collect();
    let dims =
        if all.is_empty() { vec![Dim { count: 0, to: 0, from: 0 }] } else { dims.ok_or_else(overflow)? };
    let at = (copy.source_offset * item, copy.target_offset * item);
    Ok(Some(Piece::new((given, index as u32, copy.target), (item, tensor.offset), at, &dims)))
}

fn dims(given: usize, copy: &PlanCopy) -> Result<Vec<Dim>, LoadError> {
    let (sizes, from, to) = (&copy.sizes, &copy.source_strides, &copy.target_strides);
    if sizes.len() != from.len() || sizes.len() != to.len() || sizes.len() > MAX_DIMS {
        return Err(LoadError::Dims {
            copy: given,
            name: copy.source.clone(),
            sizes: sizes.len(),
            from: from.len(),
            to: to.len(),
            max: MAX_DIMS,
        });
    }
    let dim = |((&count, &from), &to): ((&u64, &u64), &u64)| Dim { count, to, from };
    Ok(sizes.iter().zip(from).zip(to).map(dim).collect())
}

/// How the bytes of a group may be divided among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    Bytes,
    /// Between rows, of which there are `count`, `stride` bytes apart.
    Rows {
        stride: u64,
        count: u64,
    },
    Not,
}

/// Neighbouring pieces of one target whose spans overlap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) target: usize,
    pub(super) pieces: Range<usize>,
    /// Its bytes of the target.
    pub(super) span: Range<u64>,
    pub(super) cut: Cut,
}

/// Divides pieces, which are sorted by target and by where they begin, into groups, and makes sure that no element is
/// written twice.
pub(super) fn groups(pieces: &[Piece], targets: &[Target]) -> Result<Vec<Group>, LoadError> {
    let mut groups: Vec<Group> = Vec::new();
    for (i, p) in pieces.iter().enumerate() {
        let span = p.span();
        match groups.last_mut() {
            Some(g) if g.target == p.target && span.start < g.span.end => {
                g.pieces.end = i + 1;
                g.span.end = g.span.end.max(span.end);
            }
            Some(_) | None => {
                groups.push(Group { target: p.target, pieces: i..i + 1, span, cut: Cut::Not });
            }
        }
    }
    for g in &mut groups {
        let these = &pieces[g.pieces.clone()];
        if let Some(first) = these.first().filter(|p| these.len() > 1 || !is_nested(&p.writes)) {
            let name = &targets[g.target].name;
            let mut marks = Marks::new(name, &g.span, first.item)?;
            for p in these {
                marks.mark(&p.writes).map_err(|byte| LoadError::Overlap {
                    copy: p.given,
                    target: name.clone(),
                    element: byte / p.item,
                })?;
            }
        }
        g.cut = cut(these, &g.span);
    }
    Ok(groups)
}

fn cut(pieces: &[Piece], span: &Range<u64>) -> Cut {
    if let [one] = pieces
        && one.writes.dims.is_empty()
    {
        return Cut::Bytes;
    }
    let mut rows = None;
    for p in pieces {
        let Some((outer, inner)) = p.writes.dims.split_first() else { return Cut::Not };
        let row = Copy { at: p.writes.at, run: p.writes.run, dims: inner.to_vec() };
        let ends_within = self::span(&row).end <= span.start.saturating_add(outer.to);
        if !ends_within || *rows.get_or_insert((outer.to, outer.count)) != (outer.to, outer.count) {
            return Cut::Not;
        }
    }
    rows.map_or(Cut::Not, |(stride, count)| Cut::Rows { stride, count })
}

/// Elements of a range, each marked or not.
struct Marks {
    start: u64,
    item: u64,
    words: Vec<u64>,
    marked: u64,
}

impl Marks {
    fn new(name: &str, span: &Range<u64>, item: u64) -> Result<Marks, LoadError> {
        let elements = (span.end - span.start) / item.max(1);
        if elements > MAX_MARKS {
            return Err(LoadError::TooWide { target: name.to_owned(), elements, max: MAX_MARKS });
        }
        let words = vec![0; elements.div_ceil(64) as usize];
        Ok(Marks { start: span.start, item, words, marked: 0 })
    }

    /// Marks what a copy touches on the side of `to`. An error names the first byte of an element that is marked
    /// already, after which the rest is as it was.
    fn mark(&mut self, copy: &Copy) -> Result<(), u64> {
        copy.runs(0..copy.outer(), |to, _| {
            for at in (to..to + copy.run).step_by(self.item as usize) {
                if !self.set(at) {
                    return Err(at);
                }
            }
            Ok(())
        })
    }

    /// Marks an element; false if it was.
    fn set(&mut self, byte: u64) -> bool {
        let n = (byte - self.start) / self.item;
        let (word, bit) = (&mut self.words[(n / 64) as usize], 1 << (n % 64));
        let new = *word & bit == 0;
        *word |= bit;
        self.marked += u64::from(new);
        new
    }

    /// Marks what a copy touches, whether or not it is marked.
    fn cover(&mut self, copy: &Copy) {
        each(copy, 0..copy.outer(), |to, _| {
            for at in (to..to + copy.run).step_by(self.item as usize) {
                self.set(at);
            }
        });
    }
}

/// Counts what is written and what is read.
pub(super) fn coverage(
    manifest: &Manifest,
    targets: &[Target],
    pieces: &[Piece],
) -> Result<Coverage, LoadError> {
    let mut written = vec![0; targets.len()];
    let mut reads: BTreeMap<u32, Vec<&Piece>> = BTreeMap::new();
    for p in pieces {
        written[p.target] += p.bytes() / p.item;
        reads.entry(p.tensor).or_default().push(p);
    }
    let mut sources = Vec::with_capacity(manifest.tensors().len());
    for (t, tensor) in manifest.tensors().iter().enumerate() {
        let read = reads.get(&(t as u32)).map_or(Ok(0), |all| elements_read(&tensor.name, all))?;
        // Elements that cross bytes are in no plan; their bytes are what there is to count.
        let numel = tensor.bytes / item(tensor.dtype).unwrap_or(1);
        sources.push((tensor.name.clone(), read, numel));
    }
    let targets = targets.iter().zip(written).map(|(t, w)| (t.name.clone(), w, t.numel)).collect();
    Ok(Coverage { targets, sources })
}

/// How many elements of a tensor these pieces read; one that is read twice counts once.
fn elements_read(name: &str, pieces: &[&Piece]) -> Result<u64, LoadError> {
    let mut boxes: Vec<(Copy, u64)> = pieces.iter().map(|p| (boxed(&p.reads), p.item)).collect();
    let key = |c: &Copy| (c.at, c.run, c.dims.iter().map(|d| (d.to, d.count)).collect::<Vec<_>>());
    boxes.sort_by_cached_key(|(c, _)| key(c));
    boxes.dedup_by_key(|(c, _)| key(c));
    let mut read = 0;
    let mut rest = boxes.as_slice();
    while let Some((first, item)) = rest.first() {
        let mut all = span(first);
        let mut n = 1;
        while let Some((next, _)) = rest.get(n).filter(|(c, _)| c.at < all.end) {
            all.end = all.end.max(span(next).end);
            n += 1;
        }
        let (these, others) = rest.split_at(n);
        if n == 1 && is_nested(first) {
            read += first.bytes().unwrap_or(0) / item;
        } else {
            let mut marks = Marks::new(name, &all, *item)?;
            these.iter().for_each(|(c, _)| marks.cover(c));
            read += marks.marked;
        }
        rest = others;
    }
    Ok(read)
}

/// The side of `to` alone: dimensions that do not move on it are dropped, and those that continue each other merged.
pub(super) fn boxed(copy: &Copy) -> Copy {
    let mut run = copy.run;
    let mut dims: Vec<Dim> = Vec::new();
    for d in copy.dims.iter().rev().filter(|d| d.to != 0) {
        match dims.last_mut() {
            None if d.to == run => run *= d.count,
            Some(inner) if inner.to.checked_mul(inner.count) == Some(d.to) => inner.count *= d.count,
            None | Some(_) => dims.push(Dim { from: 0, ..*d }),
        }
    }
    dims.reverse();
    Copy { at: copy.at, run, dims }
}
