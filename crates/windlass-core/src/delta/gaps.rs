//! Ascending positions as Rice-coded gaps.

use super::bits::{BitWriter, UnaryWriter, each_field};

/// The largest Rice parameter: gaps are below 2^16.
pub const MAX_K: u32 = 15;

/// The gaps of ascending positions.
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
pub fn put_low<'a>(mut writer: BitWriter<'a>, positions: &[u16], k: u32) -> BitWriter<'a> {
    if k > 0 {
        let mask = (1 << k) - 1;
        gaps(positions).for_each(|g| writer.put(g & mask, k));
    }
    writer
}

/// Appends the unary part of every gap.
pub fn put_high<'a>(mut writer: UnaryWriter<'a>, positions: &[u16], k: u32) -> UnaryWriter<'a> {
    gaps(positions).for_each(|g| writer.put(g >> k));
    writer
}

/// Fills in positions, all below `limit`, whose low bits stand at bit `low_at` of `low` and whose unary parts
/// end at the bits `ones`, counted from bit `base`.
pub fn take(
    out: &mut [u16],
    k: u32,
    (low, low_at): (&[u8], usize),
    ones: &[u32],
    base: u32,
    limit: usize,
) -> Result<(), &'static str> {
    // The i-th one stands behind the zeros of all gaps so far and i ones: a position is the sum of all high
    // parts, which is where the one stands, and of all low parts.
    let count = out.len();
    let ones = &ones[..count];
    let (mut sum, mut position) = (0, 0);
    each_field(low, low_at, k, count, |i, field| {
        sum += field;
        position = ((u64::from(ones[i] - base) - i as u64) << k) + sum;
        sum += 1;
        out[i] = position as u16;
    });
    // Positions grow, so the last one speaks for all.
    if position >= limit as u64 && count > 0 { Err("a position is beyond the block") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::super::bits::take_ones;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn gaps_round_trip_at_every_parameter(set in prop::collection::btree_set(any::<u16>(), 1..3000), k in 0..=MAX_K) {
            let positions: Vec<u16> = set.into_iter().collect();
            let (mut low, mut high) = (Vec::new(), Vec::new());
            put_low(BitWriter::new(&mut low), &positions, k).finish();
            put_high(UnaryWriter::new(&mut high), &positions, k).finish();
            let mut back = vec![0; positions.len()];
            let mut ones = Vec::new();
            take_ones(&mut high.as_slice(), positions.len(), &mut ones).unwrap();
            take(&mut back, k, (&low, 0), &ones, 0, 65536).unwrap();
            prop_assert_eq!(&back, &positions);
            prop_assert_eq!(u64::from(ones.last().unwrap() + 1), high_bits(&positions, k) + positions.len() as u64);
            let last = *positions.last().unwrap() as usize;
            prop_assert!(take(&mut back, k, (&low, 0), &ones, 0, last).is_err());
            let (best, bits) = parameter(&positions, 65536);
            let cost = |k| positions.len() as u64 * u64::from(k + 1) + high_bits(&positions, k);
            prop_assert_eq!(bits, cost(best));
            let shortest = (0..=MAX_K).min_by_key(|&k| cost(k)).unwrap();
            prop_assert_eq!(best, shortest);
        }
    }
}
