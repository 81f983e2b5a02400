//! Steps as Rice codes with an escape.

use super::bits::{BitWriter, Ones, bits_at, take_section, wide_bits_at};
use super::line::Unit;

/// The high part from which on a code is written in full.
pub const ESCAPE: u64 = 16;

/// A run of codes that share a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// How many codes.
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
    // Two interleaved tallies: neighbours are often alike, and a counter takes a few cycles to settle.
    let mut lengths = [[0u32; 65]; 2];
    for pair in codes.chunks(2) {
        for (tally, code) in lengths.iter_mut().zip(pair) {
            tally[64 - code.wide().leading_zeros() as usize] += 1;
        }
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
        let high: u64 = (0..=T::BITS)
            .map(|l| (u64::from(lengths[0][l as usize]) + u64::from(lengths[1][l as usize])) * of(l))
            .sum();
        high + 2 * u64::from(k) * codes.len() as u64
    };
    let longest = (0..=64).rev().find(|&l| lengths[0][l] + lengths[1][l] > 0).unwrap_or(0) as u32;
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
    let each = |out: &mut Vec<u8>, f: &mut dyn FnMut(&mut BitWriter<'_>, &[T], u32)| {
        let mut writer = BitWriter::new(out);
        let mut rest = codes;
        for g in groups {
            let (these, others) = rest.split_at(g.count);
            f(&mut writer, these, g.k);
            rest = others;
        }
        writer.finish();
    };
    each(out, &mut |w, codes, k| {
        if k > 0 {
            codes.iter().for_each(|c| w.put(c.wide() & ((1 << k) - 1), k));
        }
    });
    each(out, &mut |w, codes, k| codes.iter().for_each(|c| w.unary((c.wide() >> k).min(ESCAPE))));
    each(out, &mut |w, codes, k| {
        codes.iter().map(|c| c.wide() >> k).filter(|&h| h >= ESCAPE).for_each(|h| w.put(h, T::BITS - k));
    });
}

/// Replaces `out` by the codes of these groups, taken off the front of `bytes`.
pub fn take<T: Unit>(out: &mut Vec<T>, bytes: &mut &[u8], groups: &[Group]) -> Result<(), &'static str> {
    let count = groups.iter().map(|g| g.count).sum();
    let low_bits = groups.iter().map(|g| g.count * g.k as usize).sum();
    let low = take_section(bytes, low_bits)?;
    out.clear();
    out.resize(count, T::default());
    let mut rest = out.as_mut_slice();
    let mut from = Source { low, low_at: 0, ones: Ones::new(bytes), next: 0 };
    let mut escape_bits = 0;
    for g in groups {
        let (these, others) = rest.split_at_mut(g.count);
        let escapes = match g.k {
            0 => from.take(these, 0, |_, _| 0)?,
            k @ 1..=57 => from.take(these, k, |low, at| bits_at(low, at, k))?,
            k => from.take(these, k, |low, at| wide_bits_at(low, at, k))?,
        };
        escape_bits += escapes * (T::BITS - g.k) as usize;
        rest = others;
    }
    let unary_bits = from.next;
    take_section(bytes, unary_bits)?;
    let escapes = take_section(bytes, escape_bits)?;
    if escape_bits > 0 { fill_escapes(out, groups, low, escapes) } else { Ok(()) }
}

/// Where a decoder of codes is.
struct Source<'a> {
    low: &'a [u8],
    low_at: usize,
    ones: Ones<'a>,
    next: usize,
}

impl Source<'_> {
    /// Fills the slots of one group and counts its escapes, which keep [`ESCAPE`] as their high part until
    /// the third section is read.
    #[inline(always)]
    fn take<T: Unit>(
        &mut self,
        slots: &mut [T],
        k: u32,
        low: impl Fn(&[u8], usize) -> u64,
    ) -> Result<usize, &'static str> {
        let (mut largest, mut escapes) = (0, 0);
        for slot in slots.iter_mut() {
            let Some(one) = self.ones.next() else { return Err("it has fewer values than it says") };
            let high = (one - self.next) as u64;
            self.next = one + 1;
            largest = high.max(largest);
            escapes += usize::from(high == ESCAPE);
            *slot = T::narrow(high << k | low(self.low, self.low_at));
            self.low_at += k as usize;
        }
        // With five high bits or more, every part up to the escape is a code of the unit. With fewer, none is
        // escaped, and the last code would be a step of zero.
        let high_bits = T::BITS - k;
        let last = T::narrow(u64::MAX);
        let fits = if high_bits >= 5 {
            largest <= ESCAPE
        } else {
            largest < 1 << high_bits && slots.iter().all(|&code| code != last)
        };
        if fits { Ok(escapes) } else { Err("a value is beyond its unit") }
    }
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
