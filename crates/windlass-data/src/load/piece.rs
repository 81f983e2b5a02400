//! One copy of a plan, as the loops want it.
//!
//! Owns: the normal form. Dimensions of one element are dropped, dimensions that continue each other on both sides are
//! merged, and the innermost one that is contiguous on both becomes the run. There are two forms of every piece,
//! because the two sides are walked in different orders: [`Piece::writes`] goes through the target from its front to
//! its back, [`Piece::reads`] through the source tensor.

use std::convert::Infallible;
use std::ops::Range;

use crate::copies::{Copy, Dim};
use crate::shm::copy_slice;

/// A copy between one tensor of the image and one target. All in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// Which copy it was among those given.
    pub(crate) given: usize,
    /// The index of its tensor.
    pub(crate) tensor: u32,
    /// The index of its target.
    pub(crate) target: usize,
    /// Bytes of an element.
    pub(crate) item: u64,
    /// Where the tensor begins in the image.
    pub(crate) base: u64,
    /// The target's side first: `at` and `to` are within the target, `from` within the tensor from `reads.at` on.
    pub(crate) writes: Copy,
    /// The tensor's side first: `at` and `to` are within the tensor, `from` within the target from `writes.at` on.
    pub(crate) reads: Copy,
}

impl Piece {
    /// A piece of elements of `item` bytes along `dims`, none of them empty, of which `Dim::to` is the target's side.
    pub(super) fn new(
        (given, tensor, target): (usize, u32, usize),
        (item, base): (u64, u64),
        (source_at, target_at): (u64, u64),
        dims: &[Dim],
    ) -> Piece {
        let writes = normal(target_at, item, dims.to_vec());
        let flipped = dims.iter().map(|d| Dim { count: d.count, to: d.from, from: d.to }).collect();
        let reads = normal(source_at, item, flipped);
        Piece { given, tensor, target, item, base, writes, reads }
    }

    /// Bytes that it moves. They were counted when the plan was made.
    pub(crate) fn bytes(&self) -> u64 {
        self.writes.bytes().unwrap_or(0)
    }

    /// The bytes of the target from the first that it writes to after the last.
    pub(super) fn span(&self) -> Range<u64> {
        span(&self.writes)
    }

    /// Whether an element of the tensor has at most one place in the target, which [`Piece::locate`] finds.
    pub(super) fn is_invertible(&self) -> bool {
        is_nested(&self.reads)
    }

    /// Where the byte of the tensor goes in the target, and how far the run that it is in goes on, both of the
    /// tensor's bytes and of the target's. `None` if it is not read.
    #[inline]
    pub(super) fn locate(&self, byte: u64) -> Option<(u64, u64)> {
        let mut rest = byte.checked_sub(self.reads.at)?;
        let mut to = self.writes.at;
        for d in &self.reads.dims {
            let i = rest / d.to;
            if i >= d.count {
                return None;
            }
            rest -= i * d.to;
            to += i * d.from;
        }
        (rest < self.reads.run).then(|| (to + rest, self.reads.run - rest))
    }

    /// Copies the rows of `outer`, outermost indices of `writes`, from the image into `window`, which begins at byte
    /// `start` of the target.
    pub(super) fn copy(&self, outer: Range<u64>, image: &[u8], window: &mut [u8], start: u64) {
        let source = &image[(self.base + self.reads.at) as usize..];
        let at = |to: u64| (to - start) as usize;
        // A last dimension of single elements is a loop of its own.
        if self.writes.run == self.item
            && let Some((last, others)) = self.writes.dims.split_last()
        {
            if others.is_empty() {
                let n = outer.end - outer.start;
                let (to, from) = (self.writes.at + outer.start * last.to, outer.start * last.from);
                return strided(self.item, n, (window, at(to), last.to), (source, from as usize, last.from));
            }
            let rows = Copy { at: self.writes.at, run: self.item, dims: others.to_vec() };
            each(&rows, outer, |to, from| {
                strided(self.item, last.count, (window, at(to), last.to), (source, from as usize, last.from));
            });
            return;
        }
        let run = self.writes.run as usize;
        each(&self.writes, outer, |to, from| {
            let from = from as usize;
            copy_slice(&source[from..from + run], &mut window[at(to)..at(to) + run]);
        });
    }
}

/// From the first byte to after the last on the side of `to`.
pub(super) fn span(copy: &Copy) -> Range<u64> {
    copy.at..copy.at + copy.span(|d| d.to).unwrap_or(0)
}

/// Whether no two indices give the same byte on the side of `to`, as far as strides alone can tell: every step of a
/// dimension is over all of the dimensions within.
pub(super) fn is_nested(copy: &Copy) -> bool {
    let mut inner = copy.run;
    copy.dims.iter().rev().all(|d| {
        let fits = d.to >= inner;
        inner = inner.saturating_add((d.count - 1).saturating_mul(d.to));
        fits
    })
}

/// Calls `work` for every run of a copy.
#[inline]
pub(super) fn each(copy: &Copy, outer: Range<u64>, mut work: impl FnMut(u64, u64)) {
    let Ok(()) = copy.runs(outer, |to, from| {
        work(to, from);
        Ok::<(), Infallible>(())
    });
}

/// The normal form of dimensions whose order is that of `to`.
fn normal(at: u64, item: u64, mut dims: Vec<Dim>) -> Copy {
    dims.retain(|d| d.count > 1);
    // Stable, so that dimensions of equal strides stay as they were given.
    dims.sort_by_key(|d| std::cmp::Reverse((d.to, d.from)));
    let mut merged: Vec<Dim> = Vec::with_capacity(dims.len());
    for d in dims {
        match merged.last_mut() {
            Some(outer)
                if Some(outer.to) == d.to.checked_mul(d.count)
                    && Some(outer.from) == d.from.checked_mul(d.count) =>
            {
                *outer = Dim { count: outer.count * d.count, ..d };
            }
            Some(_) | None => merged.push(d),
        }
    }
    let mut run = item;
    if let Some(last) = merged.pop_if(|d| (d.to, d.from) == (item, item)) {
        run *= last.count;
    }
    Copy { at, run, dims: merged }
}

/// Copies `n` elements of `item` bytes from one stride to another.
fn strided(
    item: u64,
    n: u64,
    (to, at, to_step): (&mut [u8], usize, u64),
    (from, first, from_step): (&[u8], usize, u64),
) {
    let steps = (to_step as usize, from_step as usize);
    match item {
        1 => strided_by::<1>(n, (to, at), (from, first), steps),
        2 => strided_by::<2>(n, (to, at), (from, first), steps),
        4 => strided_by::<4>(n, (to, at), (from, first), steps),
        _ => strided_by::<8>(n, (to, at), (from, first), steps),
    }
}

#[inline(always)]
fn strided_by<const N: usize>(
    n: u64,
    (to, mut at): (&mut [u8], usize),
    (from, mut first): (&[u8], usize),
    (to_step, from_step): (usize, usize),
) {
    for _ in 0..n {
        put::<N>(to, at, from, first);
        (at, first) = (at + to_step, first + from_step);
    }
}

/// Copies one element.
#[inline(always)]
pub(super) fn put<const N: usize>(to: &mut [u8], at: usize, from: &[u8], first: usize) {
    if let (Some(to), Some(from)) = (
        to.get_mut(at..).and_then(|t| t.first_chunk_mut::<N>()),
        from.get(first..).and_then(|f| f.first_chunk::<N>()),
    ) {
        *to = *from;
    } else {
        // The plan's bounds were checked against these very lengths.
        unreachable!("element at byte {at} from byte {first}");
    }
}
