//! Steps as Rice codes with an escape.

use super::bits::{BitWriter, UnaryWriter, bits_at, take_ones, take_section, wide_bits_at};
use super::line::Unit;

/// The high part from which on a code is written in full.
pub const ESCAPE: u64 = 16;

/// A run of codes that share a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    pub count: usize,
    /// Their parameter: low bits of fixed width.
    pub k: u32,
}

/// The parameter for these codes.
///
/// Counts codes by bit length and takes the smallest `k` with the least estimated length, where a high part
/// of 0, 1, 2, 3 or 4 bits is counted as 0, 1, 2.5, 5.5 or 11.5 and a longer one as an escape, which it is.
/// All in halves, so that every encoder finds the same one.
pub fn parameter<T: Unit>(codes: &[T]) -> u32 {
    // The number of codes of at least n bits, by n; differences of neighbours count codes of exactly n bits.
    let mut at_least = [0u64; 66];
    at_least[0] = codes.len() as u64;
    let mut longest = 0;
    while longest < T::BITS {
        let longer = T::count_longer(codes, longest);
        if longer == 0 {
            break;
        }
        longest += 1;
        at_least[longest as usize] = longer as u64;
    }
    let cost = |k: u32| -> u64 {
        let of = |length: u32| -> u64 {
            match length.saturating_sub(k) {
                0 => 0,
                1 => 2,
                2 => 5,
                3 => 11,
                4 => 23,
                _ => 2 * (ESCAPE + u64::from(T::BITS - k)),
            }
        };
        let exactly = |l: u32| at_least[l as usize] - at_least[l as usize + 1];
        let high: u64 = (k + 1..=longest).map(|l| exactly(l) * of(l)).sum();
        high + 2 * u64::from(k) * codes.len() as u64
    };
    (0..T::BITS.min(longest + 1)).min_by_key(|&k| cost(k)).unwrap_or(0)
}

/// Bytes of the sections of these codes with one parameter.
pub fn size<T: Unit>(codes: &[T], k: u32) -> usize {
    let high: u64 = codes.iter().map(|c| (c.wide() >> k).min(ESCAPE)).sum();
    let escapes = codes.iter().filter(|c| c.wide() >> k >= ESCAPE).count();
    (codes.len() * k as usize).div_ceil(8)
        + (high as usize + codes.len()).div_ceil(8)
        + (escapes * (T::BITS - k) as usize).div_ceil(8)
}

/// Appends the three sections of these codes, group after group.
pub fn put<T: Unit>(out: &mut Vec<u8>, codes: &[T], groups: &[Group]) {
    let each = || {
        let mut rest = codes;
        groups.iter().map(move |g| (rest.split_off(..g.count).unwrap_or(&[]), g.k))
    };
    let low = BitWriter::new(out);
    each().fold(low, |writer, (codes, k)| if k == 0 { writer } else { put_low(writer, codes, k) }).finish();
    each().fold(UnaryWriter::new(out), |writer, (codes, k)| put_high(writer, codes, k)).finish();
    each().fold(BitWriter::new(out), |writer, (codes, k)| put_escapes(writer, codes, k)).finish();
}

fn put_low<'a, T: Unit>(mut writer: BitWriter<'a>, codes: &[T], k: u32) -> BitWriter<'a> {
    let mask = (1 << k) - 1;
    codes.iter().for_each(|c| writer.put(c.wide() & mask, k));
    writer
}

fn put_high<'a, T: Unit>(mut writer: UnaryWriter<'a>, codes: &[T], k: u32) -> UnaryWriter<'a> {
    codes.iter().for_each(|c| writer.put((c.wide() >> k).min(ESCAPE)));
    writer
}

fn put_escapes<'a, T: Unit>(mut writer: BitWriter<'a>, codes: &[T], k: u32) -> BitWriter<'a> {
    let escapes = codes.iter().map(|c| c.wide() >> k).filter(|&high| high >= ESCAPE);
    escapes.for_each(|high| writer.put(high, T::BITS - k));
    writer
}

/// Replaces `out` by the codes of these groups, taken off the front of `bytes`; `ones` is scratch.
pub fn take<T: Unit>(
    out: &mut Vec<T>,
    ones: &mut Vec<u32>,
    bytes: &mut &[u8],
    groups: &[Group],
) -> Result<(), &'static str> {
    let count = groups.iter().map(|g| g.count).sum();
    let low_bits = groups.iter().map(|g| g.count * g.k as usize).sum();
    let low = take_section(bytes, low_bits)?;
    take_ones(bytes, count, ones)?;
    out.clear();
    out.resize(count, T::default());
    let (mut slots, mut ends, mut start, mut low_at) = (out.as_mut_slice(), ones.as_slice(), 0, 0);
    let mut escape_bits = 0;
    for g in groups {
        let (these, others) = slots.split_at_mut(g.count);
        let (ones, other_ones) = ends.split_at(g.count);
        let escapes = match g.k {
            0 => take_group(these, start, ones, 0, |_| 0)?,
            k @ 1..=57 => take_group(these, start, ones, k, |i| bits_at(low, low_at + i * k as usize, k))?,
            k => take_group(these, start, ones, k, |i| wide_bits_at(low, low_at + i * k as usize, k))?,
        };
        escape_bits += escapes * (T::BITS - g.k) as usize;
        low_at += g.count * g.k as usize;
        start = ones.last().map_or(start, |&one| one + 1);
        (slots, ends) = (others, other_ones);
    }
    let escapes = take_section(bytes, escape_bits)?;
    if escape_bits > 0 { fill_escapes(out, groups, low, escapes) } else { Ok(()) }
}

/// Fills the slots of one group and counts its escapes, which keep [`ESCAPE`] as their high part until the
/// third section is read.
#[inline(always)]
fn take_group<T: Unit>(
    slots: &mut [T],
    start: u32,
    ones: &[u32],
    k: u32,
    low: impl Fn(usize) -> u64,
) -> Result<usize, &'static str> {
    let (mut largest, mut escapes, mut before) = (0, 0, start);
    for (i, (slot, &one)) in slots.iter_mut().zip(ones).enumerate() {
        let high = one - before;
        before = one + 1;
        largest = high.max(largest);
        escapes += usize::from(high == ESCAPE as u32);
        *slot = T::narrow(u64::from(high) << k | low(i));
    }
    // With five high bits or more, every part up to the escape is a code of the unit. With fewer, none is
    // escaped, and the last code would be a step of zero.
    let high_bits = T::BITS - k;
    let last = T::narrow(u64::MAX);
    let fits = if high_bits >= 5 {
        u64::from(largest) <= ESCAPE
    } else {
        largest < 1 << high_bits && slots.iter().all(|&code| code != last)
    };
    if fits { Ok(escapes) } else { Err("a value is beyond its unit") }
}

/// Second pass over the codes, only where a block has escapes.
fn fill_escapes<T: Unit>(
    out: &mut [T],
    groups: &[Group],
    low: &[u8],
    escapes: &[u8],
) -> Result<(), &'static str> {
    let (mut rest, mut low_at, mut at) = (out, 0, 0);
    for g in groups {
        let (these, others) = rest.split_at_mut(g.count);
        for slot in these {
            if slot.wide() >> g.k == ESCAPE {
                let width = T::BITS - g.k;
                let high = wide_bits_at(escapes, at, width);
                at += width as usize;
                if high < ESCAPE {
                    return Err("a value is escaped without need");
                }
                *slot = T::narrow(high << g.k | wide_bits_at(low, low_at, g.k));
                if slot.wide() == T::narrow(u64::MAX).wide() {
                    return Err("a step leads nowhere");
                }
            }
            low_at += g.k as usize;
        }
        rest = others;
    }
    Ok(())
}
