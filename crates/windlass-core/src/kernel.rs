//! The inner loops of the codec and the digest.
//!
//! Owns: the definition of the loops, and a portable implementation in safe Rust. `windlass-data` implements
//! [`Kernels`] again with the vector instructions of the machine; every implementation must give
//! the same results as [`Portable`], which the tests of that crate check. Must not: allocate per call beyond
//! the output.

use crate::dtype::Line;

/// The most classes of old values that context mode tells apart.
pub const MAX_CLASSES: usize = 16;

/// The inner loops. All slices of bytes hold little-endian units and have lengths that fit together;
/// implementations may panic where they do not.
pub trait Kernels: Sync {
    /// Two dot products of little-endian 32-bit words with two rows of keys, mod 2^64.
    ///
    /// `bytes` has four bytes for each key; both rows have the same length.
    fn dot(&self, bytes: &[u8], keys: [&[u32]; 2]) -> [u64; 2];

    /// Appends the positions of the units in which `old` and `new` differ, in ascending order.
    ///
    /// Both slices have the same length: at most 65,536 units of `unit` bytes.
    fn changed(&self, old: &[u8], new: &[u8], unit: usize, out: &mut Vec<u16>);

    /// For each class, a bitmap of the units of `old` that belong to it (see [`classify`]).
    ///
    /// `out` has a row of `stride` words for each class, at least enough for the units; bits past the last
    /// unit are zero, words past it are left alone. There are at most [`MAX_CLASSES`] classes.
    fn classes(&self, old: &[u8], unit: usize, by: Classes, stride: usize, out: &mut [u64]);

    /// Fills in how many ones of `row` come before each of its words, and returns how many there are.
    ///
    /// Both slices have the same length. Only behind the last word can 65,536 ones have come, which wraps.
    fn ones_before(&self, row: &[u64], before: &mut [u16]) -> usize;

    /// Replaces positions of ones in `row` by their ranks: how many ones come before them.
    fn ranks(&self, row: &[u64], before: &[u16], positions: &mut [u16]);

    /// The inverse: appends the positions of the ones of these ascending ranks. Each rank is below the number of ones in `row`.
    fn select(&self, row: &[u64], before: &[u16], ranks: &[u16], positions: &mut Vec<u16>);

    /// Asks the cache for the units at these positions, which will be read and written soon.
    ///
    /// Changes nothing and may do nothing. Positions beyond `bytes` are ignored.
    fn prefetch(&self, bytes: &[u8], unit: usize, positions: &[u16]) {
        let _ = (bytes, unit, positions);
    }
}

/// How units are put into classes by the exponent of their value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classes {
    /// Explicit mantissa bits below the exponent.
    pub mantissa: u8,
    /// Exponents of this size and above are class 0.
    pub top: u16,
    /// How many classes; the last one holds every lower exponent.
    pub count: u8,
}

impl Classes {
    /// The class of a unit of `width` bits.
    #[inline(always)]
    pub fn class(self, bits: u64, width: u32) -> usize {
        let exponent = (bits & !(1 << (width - 1))) >> self.mantissa;
        usize::from(self.top).saturating_sub(exponent as usize).min(usize::from(self.count) - 1)
    }
}

/// The kernels in safe, portable Rust.
///
/// Loops that `windlass-data` compiles again for the instructions of the machine, as they are, are inlined for that.
#[derive(Clone, Copy, Debug, Default)]
pub struct Portable;

impl Kernels for Portable {
    fn dot(&self, bytes: &[u8], keys: [&[u32]; 2]) -> [u64; 2] {
        let (words, _) = bytes.as_chunks::<4>();
        let n = words.len();
        let (a, b) = (&keys[0][..n], &keys[1][..n]);
        let mut sum = [0u64; 2];
        for i in 0..n {
            let w = u64::from(u32::from_le_bytes(words[i]));
            sum[0] = sum[0].wrapping_add(w * u64::from(a[i]));
            sum[1] = sum[1].wrapping_add(w * u64::from(b[i]));
        }
        sum
    }

    fn changed(&self, old: &[u8], new: &[u8], unit: usize, out: &mut Vec<u16>) {
        match unit {
            1 => changed::<1>(old, new, out),
            2 => changed::<2>(old, new, out),
            4 => changed::<4>(old, new, out),
            8 => changed::<8>(old, new, out),
            other => unreachable!("a unit has 1, 2, 4 or 8 bytes, not {other}"),
        }
    }

    #[inline(always)]
    fn classes(&self, old: &[u8], unit: usize, by: Classes, stride: usize, out: &mut [u64]) {
        let words = (old.len() / unit).div_ceil(64);
        out.chunks_exact_mut(stride).for_each(|row| row[..words].fill(0));
        let width = unit as u32 * 8;
        for (i, bytes) in old.chunks_exact(unit).enumerate() {
            let class = by.class(read_unit(bytes), width);
            out[class * stride + i / 64] |= 1 << (i % 64);
        }
    }

    #[inline(always)]
    fn ones_before(&self, row: &[u64], before: &mut [u16]) -> usize {
        let mut sum = 0;
        for (word, before) in row.iter().zip(before) {
            *before = sum as u16;
            sum += word.count_ones() as usize;
        }
        sum
    }

    #[inline(always)]
    fn ranks(&self, row: &[u64], before: &[u16], positions: &mut [u16]) {
        for p in positions {
            let word = usize::from(*p) / 64;
            let below = row[word] & ((1 << (*p % 64)) - 1);
            *p = before[word] + below.count_ones() as u16;
        }
    }

    #[inline(always)]
    fn select(&self, row: &[u64], before: &[u16], ranks: &[u16], positions: &mut Vec<u16>) {
        let mut word = 0;
        for &rank in ranks {
            // The last word that has no more ones before it than the rank. A few steps get there where changes
            // are dense; where they are not, halving does.
            let ahead = &before[word..];
            word += match ahead.iter().take(8).position(|&b| b > rank) {
                Some(past) => past,
                None => ahead.partition_point(|&b| b <= rank),
            } - 1;
            positions.push((word * 64) as u16 + nth_one(row[word], u32::from(rank - before[word])) as u16);
        }
    }
}

/// The number of the `n`-th bit that is one, counting from zero; the word has more than `n`.
#[inline(always)]
fn nth_one(mut word: u64, mut n: u32) -> u32 {
    let mut at = 0;
    for half in [32, 16, 8, 4, 2, 1] {
        let low = (word & ((1 << half) - 1)).count_ones();
        let above = u32::from(n >= low);
        n -= low * above;
        word >>= half * above;
        at += half * above;
    }
    at
}

/// Most runs of units are equal: compare 64 bytes at a time, then look closer.
fn changed<const U: usize>(old: &[u8], new: &[u8], out: &mut Vec<u16>) {
    const STEP: usize = 64;
    let mut base = 0;
    for (o, n) in old.chunks(STEP).zip(new.chunks(STEP)) {
        if o != n {
            let (o, n) = (o.as_chunks::<U>().0, n.as_chunks::<U>().0);
            out.extend(
                o.iter().zip(n).enumerate().filter(|(_, (o, n))| o != n).map(|(i, _)| (base + i) as u16),
            );
        }
        base += STEP / U;
    }
}

/// A little-endian unit of 1, 2, 4 or 8 bytes.
#[inline(always)]
pub fn read_unit(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Whether units of this line have an exponent to be put into classes by.
pub fn classify(line: Line) -> Option<u8> {
    match line {
        Line::Float(mantissa) => Some(mantissa),
        Line::Integer => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_one_is_found_in_every_word() {
        for word in [1, 1 << 63, u64::MAX, 0xf0f0_0000_0001_8001, 0x8000_0001_0000_0000] {
            let ones: Vec<u32> = (0..64).filter(|i| word >> i & 1 == 1).collect();
            for (n, &bit) in ones.iter().enumerate() {
                assert_eq!(nth_one(word, n as u32), bit, "{word:x} {n}");
            }
        }
    }

    #[test]
    fn empty_words_are_stepped_over() {
        let row = [0, 0b101, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1 << 63, 0];
        let mut before = [0; 14];
        assert_eq!(Portable.ones_before(&row, &mut before), 3);
        let mut positions = Vec::new();
        Portable.select(&row, &before, &[0, 1, 2], &mut positions);
        assert_eq!(positions, [64, 66, 12 * 64 + 63]);
    }
}
