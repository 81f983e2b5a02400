//! Records whose positions are counted within classes of old values.

use super::bits::{BitWriter, put_varint, take_section, take_varint};
use super::line::Unit;
use super::values::{self, Group};
use super::{Tile, gaps};
use crate::kernel::{Classes, Kernels, MAX_CLASSES, classify};

/// Classes that the encoder makes.
const CLASSES: u8 = 14;
/// The encoder looks at one unit of so many to find the top class.
const SAMPLE: usize = 16;

/// Memory for one block's classes.
#[derive(Debug, Default)]
pub struct ContextScratch {
    /// A bitmap of the block for each class.
    rows: Vec<u64>,
    changed: Vec<u64>,
    /// Changes in the order of classes: rank within the class, and index among all changes.
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

/// Makes the payload of a context record in `scratch` and answers whether it is shorter than `limit`.
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
    let ContextScratch { rows, changed, ranks, order, groups, payload } = scratch;
    rows.resize(usize::from(CLASSES) * stride, 0);
    kernels.classes(old, T::BYTES, by, stride, rows);
    changed.clear();
    changed.resize(tile.units().div_ceil(64), 0);
    positions.iter().for_each(|&p| changed[usize::from(p) / 64] |= 1 << (p % 64));

    ranks.clear();
    order.clear();
    groups.clear();
    payload.clear();
    payload.extend_from_slice(&((positions.len() - 1) as u16).to_le_bytes());
    payload.extend_from_slice(&by.top.to_le_bytes());
    payload.push(CLASSES);
    let mut ordered: Vec<T> = Vec::with_capacity(codes.len());
    let mut gap_ks = [0; MAX_CLASSES];
    for (class, row) in rows.chunks_exact(stride).enumerate() {
        let first = ranks.len();
        let size = rank_changes(row, changed, positions, ranks, order);
        let count = ranks.len() - first;
        ordered.extend(order[first..].iter().map(|&i| codes[usize::from(i)]));
        put_varint(payload, count as u32);
        gap_ks[class] = gap_parameter(size, count);
        let k = values::parameter(&ordered[first..]);
        if count > 0 {
            payload.push(k as u8);
        }
        groups.push(Group { count, k });
    }
    for put in [gaps::put_low, gaps::put_high] {
        let mut writer = BitWriter::new(payload);
        let mut rest = ranks.as_slice();
        for (g, &k) in groups.iter().zip(&gap_ks) {
            let (these, others) = rest.split_at(g.count);
            put(&mut writer, these, k);
            rest = others;
        }
        writer.finish();
    }
    values::put(payload, &ordered, groups);
    payload.len() < limit
}

/// Appends the rank within its class of each change of the class, and its index; answers the class's size.
fn rank_changes(
    row: &[u64],
    changed: &[u64],
    positions: &[u16],
    ranks: &mut Vec<u16>,
    order: &mut Vec<u16>,
) -> usize {
    let (mut before, mut index) = (0u32, 0u32);
    for (&members, &changes) in row.iter().zip(changed) {
        let mut both = members & changes;
        while both != 0 {
            let bit = both.trailing_zeros();
            both &= both - 1;
            let below = (1u64 << bit) - 1;
            ranks.push((before + (members & below).count_ones()) as u16);
            order.push((index + (changes & below).count_ones()) as u16);
        }
        before += members.count_ones();
        index += changes.count_ones();
    }
    debug_assert_eq!(index as usize, positions.len());
    before as usize
}

/// Replaces `positions` and `codes` by the changes of a context record over this old state, class by class.
///
/// A fault may lie with the record or with the base; the caller cannot tell and need not.
pub(super) fn take<T: Unit, K: Kernels + ?Sized>(
    kernels: &K,
    scratch: &mut ContextScratch,
    tile: &Tile,
    old: &[u8],
    mut payload: &[u8],
    positions: &mut Vec<u16>,
    codes: &mut Vec<T>,
) -> Result<(), &'static str> {
    let mantissa = classify(tile.line).ok_or("integers have no context records")?;
    let Some((&[a, b, c, d, count], rest)) = payload.split_first_chunk::<5>() else {
        return Err("it ends within its head");
    };
    payload = rest;
    let changes = usize::from(u16::from_le_bytes([a, b])) + 1;
    if count == 0 || usize::from(count) > MAX_CLASSES || changes > tile.units() {
        return Err("its head is out of range");
    }
    let by = Classes { mantissa, top: u16::from_le_bytes([c, d]), count };
    let stride = stride(tile);
    let ContextScratch { rows, ranks, groups, .. } = scratch;
    rows.resize(usize::from(count) * stride, 0);
    kernels.classes(old, T::BYTES, by, stride, rows);

    groups.clear();
    for _ in 0..count {
        let count = take_varint(&mut payload)? as usize;
        let mut k = 0;
        if count > 0 {
            let (&first, rest) = payload.split_first().ok_or("it ends within its class table")?;
            (k, payload) = (u32::from(first), rest);
        }
        if count > changes || k >= T::BITS {
            return Err("its class table is out of range");
        }
        groups.push(Group { count, k });
    }
    if groups.iter().map(|g| g.count).sum::<usize>() != changes {
        return Err("its class table does not add up");
    }
    let words = tile.units().div_ceil(64);
    let mut sizes = [(0usize, 0u32); MAX_CLASSES];
    for ((size, g), row) in sizes.iter_mut().zip(groups.iter()).zip(rows.chunks_exact(stride)) {
        let members = row[..words].iter().map(|w| w.count_ones() as usize).sum();
        *size = (members, gap_parameter(members, g.count));
    }
    let low_bits = groups.iter().zip(&sizes).map(|(g, s)| g.count * s.1 as usize).sum();
    let low = take_section(&mut payload, low_bits)?;
    let mut unary = gaps::Unary::new(payload);
    let mut low_at = 0;
    positions.clear();
    for ((g, &(size, k)), row) in groups.iter().zip(&sizes).zip(rows.chunks_exact(stride)) {
        ranks.clear();
        gaps::take(ranks, g.count, k, (low, low_at), &mut unary, size)?;
        low_at += g.count * k as usize;
        select(&row[..words], ranks, positions);
    }
    let used = unary.at;
    take_section(&mut payload, used)?;
    values::take(codes, &mut payload, groups)?;
    if payload.is_empty() { Ok(()) } else { Err("it goes on after its end") }
}

/// Appends the positions of the members of these ascending ranks; each rank is below the class's size.
fn select(row: &[u64], ranks: &[u16], positions: &mut Vec<u16>) {
    let mut ranks = ranks.iter().map(|&r| u32::from(r)).peekable();
    let mut before = 0;
    for (w, &members) in row.iter().enumerate() {
        let here = members.count_ones();
        while let Some(&rank) = ranks.peek()
            && rank < before + here
        {
            ranks.next();
            positions.push((w * 64) as u16 + nth_one(members, rank - before) as u16);
        }
        before += here;
    }
}

/// The number of the `n`-th bit that is one, counting from zero.
fn nth_one(mut word: u64, n: u32) -> u32 {
    for _ in 0..n {
        word &= word - 1;
    }
    word.trailing_zeros()
}
