//! Ascending positions as Rice-coded gaps.

use super::bits::{BitWriter, Ones, bits_at};

/// The largest Rice parameter: gaps are below 2^16.
pub const MAX_K: u32 = 15;

/// The gaps of ascending positions, each with the position before it.
#[inline(always)]
fn gaps(positions: &[u16]) -> impl Iterator<Item = u64> {
    let first = positions.first().map(|&p| u64::from(p));
    first.into_iter().chain(positions.windows(2).map(|w| u64::from(w[1]) - u64::from(w[0]) - 1))
}

/// Bits of all unary parts, without their closing ones.
fn high_bits(positions: &[u16], k: u32) -> u64 {
    let first = positions.first().map_or(0, |&p| u64::from(p >> k));
    // In 16 bits the loop is a handful of vector instructions; a partial sum of 1024 gaps fits in 32 bits.
    first
        + positions.windows(1025).step_by(1024).map(|w| sum_high(w, k)).sum::<u64>()
        + sum_high(&positions[positions.len().saturating_sub(1) / 1024 * 1024..], k)
}

#[inline(always)]
fn sum_high(positions: &[u16], k: u32) -> u64 {
    let Some(before) = positions.get(..positions.len().saturating_sub(1)) else { return 0 };
    let behind = positions.get(1..).unwrap_or(&[]);
    before
        .iter()
        .zip(behind)
        .map(|(&a, &b)| u32::from(b.wrapping_sub(a).wrapping_sub(1) >> k))
        .sum::<u32>()
        .into()
}

/// The smallest `k` of the shortest code for these positions among `units`, and the code's bits.
///
/// The length is a convex function of `k`, so walking downhill from a guess finds its minimum.
pub fn parameter(positions: &[u16], units: usize) -> (u32, u64) {
    let n = positions.len() as u64;
    let cost = |k: u32| n * u64::from(k + 1) + high_bits(positions, k);
    let mut k = (units as u64 / n.max(1)).max(1).ilog2().min(MAX_K);
    let mut best = cost(k);
    let start = k;
    while k > 0 {
        let lower = cost(k - 1);
        if lower > best {
            break;
        }
        (k, best) = (k - 1, lower);
    }
    while k >= start && k < MAX_K {
        let higher = cost(k + 1);
        if higher >= best {
            break;
        }
        (k, best) = (k + 1, higher);
    }
    (k, best)
}

/// Appends the low bits of every gap.
pub fn put_low(writer: &mut BitWriter<'_>, positions: &[u16], k: u32) {
    if k > 0 {
        let mask = (1 << k) - 1;
        gaps(positions).for_each(|g| writer.put(g & mask, k));
    }
}

/// Appends the unary part of every gap.
pub fn put_high(writer: &mut BitWriter<'_>, positions: &[u16], k: u32) {
    gaps(positions).for_each(|g| writer.unary(g >> k));
}

/// Where a decoder of unary parts is.
#[derive(Debug)]
pub struct Unary<'a> {
    pub(super) ones: Ones<'a>,
    /// The bit after the last one read.
    pub(super) at: usize,
}

impl<'a> Unary<'a> {
    /// Begins to read the unary parts at the front of these bytes.
    pub fn new(bytes: &'a [u8]) -> Unary<'a> {
        Unary { ones: Ones::new(bytes), at: 0 }
    }
}

/// Appends `count` positions, all below `limit`, whose low bits stand at bit `low_at` of `low`.
pub fn take(
    out: &mut Vec<u16>,
    count: usize,
    k: u32,
    (low, low_at): (&[u8], usize),
    unary: &mut Unary<'_>,
    limit: usize,
) -> Result<(), &'static str> {
    let start = out.len();
    out.resize(start + count, 0);
    // The i-th one stands behind the zeros of all gaps so far and i ones: position = high parts + low parts.
    let base = unary.at;
    let (mut low_sum, mut position, mut at) = (0usize, 0usize, low_at);
    let mut last = base;
    for (i, slot) in out[start..].iter_mut().enumerate() {
        let Some(one) = unary.ones.next() else { return Err("it has fewer positions than it says") };
        last = one + 1;
        low_sum += bits_at(low, at, k) as usize + 1;
        at += k as usize;
        position = ((one - base - i) << k) + low_sum - 1;
        *slot = position as u16;
    }
    unary.at = last;
    // Positions grow, so the last one speaks for all.
    if count > 0 && position >= limit { Err("a position is beyond the block") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn gaps_round_trip_at_every_parameter(set in prop::collection::btree_set(any::<u16>(), 1..3000), k in 0..=MAX_K) {
            let positions: Vec<u16> = set.into_iter().collect();
            let (mut low, mut high) = (Vec::new(), Vec::new());
            let mut writer = BitWriter::new(&mut low);
            put_low(&mut writer, &positions, k);
            writer.finish();
            let mut writer = BitWriter::new(&mut high);
            put_high(&mut writer, &positions, k);
            writer.finish();
            let mut back = vec![9];
            let mut unary = Unary::new(&high);
            take(&mut back, positions.len(), k, (&low, 0), &mut unary, 65536).unwrap();
            prop_assert_eq!(&back[1..], &positions);
            prop_assert_eq!(unary.at as u64, high_bits(&positions, k) + positions.len() as u64);
            let last = *positions.last().unwrap() as usize;
            prop_assert!(take(&mut Vec::new(), positions.len(), k, (&low, 0), &mut Unary::new(&high), last).is_err());
            let (best, bits) = parameter(&positions, 65536);
            let cost = |k| positions.len() as u64 * u64::from(k + 1) + high_bits(&positions, k);
            prop_assert_eq!(bits, cost(best));
            let shortest = (0..=MAX_K).min_by_key(|&k| cost(k)).unwrap();
            prop_assert_eq!(best, shortest);
        }
    }
}
