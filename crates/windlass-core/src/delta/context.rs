//! Records whose positions are counted within classes of old values.

use super::bits::{BitWriter, UnaryWriter, bits_at, take_ones, take_section};
use super::line::Unit;
use super::values::{self, Group};
use super::{Tile, gaps};
use crate::kernel::{Classes, Kernels, MAX_CLASSES, classify};
use crate::varint::{VarintFault, put_varint, take_varint};

/// Classes that the encoder makes.
const CLASSES: u8 = 14;
/// The encoder tries where at most one unit in this many changed. Beyond that classes gain little, and the memory
/// for their changes would grow past that of the block.
pub(super) const MOST_CHANGED: usize = 8;
/// Bits of the head that hold the top exponent; the others hold the number of classes.
const TOP_BITS: u32 = 12;
/// The encoder samples one unit in this many to find the top class.
const SAMPLE: usize = 64;

/// Memory for one block's classes.
#[derive(Debug, Default)]
pub struct ContextScratch {
    /// A bitmap of the block for each class.
    rows: Vec<u64>,
    /// For each word of each row, how many members of the class come before it.
    before: Vec<u16>,
    /// For each change its class, and, once sorted by class, its rank and its index among all changes.
    class: Vec<u8>,
    ranks: Vec<u16>,
    order: Vec<u16>,
    groups: Vec<Group>,
    payload: Vec<u8>,
}

impl ContextScratch {
    pub(super) fn payload(&self) -> &[u8] {
        &self.payload
    }
}

/// The Rice parameter for `count` gaps among `size` units: the largest `k` with `count · 2^k ≤ 0.7 · size`.
pub fn gap_parameter(size: usize, count: usize) -> u32 {
    let ratio = size as u64 * 7 / (count as u64 * 10).max(1);
    ratio.max(1).ilog2().min(gaps::MAX_K)
}

/// Words between the rows of two classes: a bitmap of the block, and a little more, since rows exactly a
/// multiple of 4 KiB apart compete for the same lines of the cache.
fn stride(tile: &Tile) -> usize {
    tile.units().div_ceil(64) + 8
}

/// The top class: the largest exponent that, with all above it, has a thirty-second of the sampled units.
fn top<T: Unit>(mantissa: u8, old: &[u8]) -> u16 {
    let units = old.len() / T::BYTES;
    let mut tally = vec![0u32; 1 << (T::BITS - 1 - u32::from(mantissa))];
    for i in (0..units).step_by(SAMPLE) {
        let bits = T::read(old, i).wide() & !(1 << (T::BITS - 1));
        tally[(bits >> mantissa) as usize] += 1;
    }
    let enough = units.div_ceil(SAMPLE).div_ceil(32) as u32;
    let mut seen = 0;
    let exponent = (0..tally.len()).rev().find(|&e| {
        seen += tally[e];
        seen >= enough
    });
    exponent.unwrap_or(0) as u16
}

/// Makes the payload of a context record in `scratch` and returns whether it is shorter than `limit`.
pub(super) fn put<T: Unit, K: Kernels + ?Sized>(
    kernels: &K,
    scratch: &mut ContextScratch,
    tile: &Tile,
    old: &[u8],
    (positions, codes): (&[u16], &[T]),
    limit: usize,
) -> bool {
    let Some(mantissa) = classify(tile.line) else { return false };
    // The class table alone is longer than most other records of a few changes.
    if limit < 24 {
        return false;
    }
    let by = Classes { mantissa, top: top::<T>(mantissa, old), count: CLASSES };
    let stride = stride(tile);
    let ContextScratch { rows, before, class, ranks, order, groups, payload } = scratch;
    rows.resize(usize::from(CLASSES) * stride, 0);
    kernels.classes(old, T::BYTES, by, stride, rows);
    let sizes = count_before(kernels, rows, stride, tile.units().div_ceil(64), before);

    // Sort the changes by class, keeping their order within each.
    let mut counts = [0usize; MAX_CLASSES];
    class.clear();
    class.extend(positions.iter().map(|&p| by.class(T::read(old, p.into()).wide(), T::BITS) as u8));
    class.iter().for_each(|&c| counts[usize::from(c)] += 1);
    let mut next = [0usize; MAX_CLASSES];
    for c in 1..MAX_CLASSES {
        next[c] = next[c - 1] + counts[c - 1];
    }
    ranks.resize(positions.len(), 0);
    order.resize(positions.len(), 0);
    for (i, (&p, &c)) in positions.iter().zip(class.iter()).enumerate() {
        let next = &mut next[usize::from(c)];
        ranks[*next] = p;
        order[*next] = i as u16;
        *next += 1;
    }
    let ordered: Vec<T> = order.iter().map(|&i| codes[usize::from(i)]).collect();

    groups.clear();
    payload.clear();
    payload.extend_from_slice(&((positions.len() - 1) as u16).to_le_bytes());
    payload.extend_from_slice(&(by.top | u16::from(CLASSES - 1) << TOP_BITS).to_le_bytes());
    let mut gap_ks = [0; MAX_CLASSES];
    let mut first = 0;
    for c in 0..usize::from(CLASSES) {
        let count = counts[c];
        put_varint(payload, count as u32);
        gap_ks[c] = gap_parameter(sizes[c], count);
        let row = c * stride..(c + 1) * stride;
        kernels.ranks(&rows[row.clone()], &before[row], &mut ranks[first..first + count]);
        groups.push(Group { count, k: values::parameter(&ordered[first..first + count]) });
        first += count;
    }
    let mut writer = BitWriter::new(payload);
    groups.iter().filter(|g| g.count > 0).for_each(|g| writer.put(g.k.into(), T::BITS.ilog2()));
    writer.finish();
    let classes = || {
        let mut rest = ranks.as_slice();
        groups.iter().zip(&gap_ks).map(move |(g, &k)| (rest.split_off(..g.count).unwrap_or(&[]), k))
    };
    classes().fold(BitWriter::new(payload), |writer, (ranks, k)| gaps::put_low(writer, ranks, k)).finish();
    classes().fold(UnaryWriter::new(payload), |writer, (ranks, k)| gaps::put_high(writer, ranks, k)).finish();
    values::put(payload, &ordered, groups);
    payload.len() < limit
}

/// Fills in how many members of each class come before each word, and returns the sizes of the classes.
fn count_before<K: Kernels + ?Sized>(
    kernels: &K,
    rows: &[u64],
    stride: usize,
    words: usize,
    before: &mut Vec<u16>,
) -> [usize; MAX_CLASSES] {
    before.resize(rows.len(), 0);
    let mut sizes = [0; MAX_CLASSES];
    for ((row, before), size) in
        rows.chunks_exact(stride).zip(before.chunks_exact_mut(stride)).zip(&mut sizes)
    {
        *size = kernels.ones_before(&row[..words], &mut before[..words]);
    }
    sizes
}

/// Replaces `positions` and `codes` by the changes of a context record over this old state, class by class.
///
/// A fault may lie with the record or with the base; the caller cannot tell, and does not need to.
pub(super) fn take<T: Unit, K: Kernels + ?Sized>(
    kernels: &K,
    scratch: &mut ContextScratch,
    tile: &Tile,
    old: &[u8],
    mut payload: &[u8],
    (ones, positions): (&mut Vec<u32>, &mut Vec<u16>),
    codes: &mut Vec<T>,
) -> Result<(), &'static str> {
    let mantissa = classify(tile.line).ok_or("integers have no context records")?;
    let Some((&[a, b, c, d], rest)) = payload.split_first_chunk::<4>() else {
        return Err("it ends within its head");
    };
    payload = rest;
    let changes = usize::from(u16::from_le_bytes([a, b])) + 1;
    if changes > tile.units() {
        return Err("it has more changes than its block has units");
    }
    let head = u16::from_le_bytes([c, d]);
    let by = Classes { mantissa, top: head & ((1 << TOP_BITS) - 1), count: (head >> TOP_BITS) as u8 + 1 };
    let stride = stride(tile);
    let ContextScratch { rows, before, ranks, groups, .. } = scratch;
    rows.resize(usize::from(by.count) * stride, 0);
    kernels.classes(old, T::BYTES, by, stride, rows);

    groups.clear();
    for _ in 0..by.count {
        let count = take_varint(&mut payload).map_err(VarintFault::why)? as usize;
        if count > changes {
            return Err("its class table is out of range");
        }
        groups.push(Group { count, k: 0 });
    }
    let width = T::BITS.ilog2();
    let named = groups.iter().filter(|g| g.count > 0).count();
    let ks = take_section(&mut payload, named * width as usize)?;
    for (i, g) in groups.iter_mut().filter(|g| g.count > 0).enumerate() {
        g.k = bits_at(ks, i * width as usize, width) as u32;
    }
    if groups.iter().map(|g| g.count).sum::<usize>() != changes {
        return Err("its class table does not add up");
    }
    let words = tile.units().div_ceil(64);
    let members = count_before(kernels, rows, stride, words, before);
    let sizes: [_; MAX_CLASSES] = std::array::from_fn(|c| {
        (members[c], gap_parameter(members[c], groups.get(c).map_or(0, |g| g.count)))
    });
    let low_bits = groups.iter().zip(&sizes).map(|(g, s)| g.count * s.1 as usize).sum();
    let low = take_section(&mut payload, low_bits)?;
    take_ones(&mut payload, changes, ones)?;
    let (mut rest, mut base, mut low_at) = (ones.as_slice(), 0, 0);
    positions.clear();
    let rows = rows.chunks_exact(stride).zip(before.chunks_exact(stride));
    for ((g, &(size, k)), (row, before)) in groups.iter().zip(&sizes).zip(rows) {
        let (these, others) = rest.split_at(g.count);
        ranks.resize(g.count, 0);
        gaps::take(ranks, k, (low, low_at), these, base, size)?;
        low_at += g.count * k as usize;
        base = these.last().map_or(base, |&one| one + 1);
        rest = others;
        kernels.select(&row[..words], &before[..words], ranks, positions);
    }
    values::take(codes, ones, &mut payload, groups)?;
    if payload.is_empty() { Ok(()) } else { Err("it goes on after its end") }
}
