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
    pub fn class(self, bits: u64, width: u32) -> usize {
        let exponent = (bits & !(1 << (width - 1))) >> self.mantissa;
        usize::from(self.top).saturating_sub(exponent as usize).min(usize::from(self.count) - 1)
    }
}

/// The kernels in safe, portable Rust.
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

    fn classes(&self, old: &[u8], unit: usize, by: Classes, stride: usize, out: &mut [u64]) {
        let words = (old.len() / unit).div_ceil(64);
        out.chunks_exact_mut(stride).for_each(|row| row[..words].fill(0));
        let width = unit as u32 * 8;
        for (i, bytes) in old.chunks_exact(unit).enumerate() {
            let class = by.class(read_unit(bytes), width);
            out[class * stride + i / 64] |= 1 << (i % 64);
        }
    }
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
