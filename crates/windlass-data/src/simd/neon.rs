//! The kernels for aarch64, whose processors all have NEON.
//!
//! Own loops where the portable ones are not what a compiler makes NEON of: comparing, dot products and prefetching. Counting
//! bits is NEON without our help, and classes are portable as on AVX2.

use std::arch::aarch64::{
    uint8x16_t, uint32x4_t, uint64x2_t, vaddq_u64, vaddvq_u64, vandq_u8, vceqq_u8, vceqq_u16, vceqq_u32,
    vceqq_u64, vdupq_n_u64, vget_low_u32, vgetq_lane_u64, vld1q_u8, vld1q_u32, vmlal_high_u32, vmlal_u32,
    vmvnq_u8, vpaddq_u8, vreinterpretq_u8_u16, vreinterpretq_u8_u32, vreinterpretq_u8_u64,
    vreinterpretq_u16_u8, vreinterpretq_u32_u8, vreinterpretq_u64_u8, vuzp1q_u8,
};

use windlass_core::kernel::{Classes, Kernels, Portable};

use super::changed_tail;

/// Units that one step of [`Kernels::changed`] looks at.
const LANES: usize = 64;

/// Bytes of a vector.
const VECTOR: usize = 16;

/// NEON, which is part of aarch64.
#[derive(Debug)]
pub(super) struct Neon;
pub(super) static NEON: Neon = Neon;

impl Kernels for Neon {
    fn dot(&self, bytes: &[u8], keys: [&[u32]; 2]) -> [u64; 2] {
        // SAFETY: every processor that this is compiled for has NEON.
        unsafe { dot(bytes, keys) }
    }

    fn changed(&self, old: &[u8], new: &[u8], unit: usize, out: &mut Vec<u16>) {
        // SAFETY: as above.
        unsafe { changed(old, new, unit, out) }
    }

    fn classes(&self, old: &[u8], unit: usize, by: Classes, stride: usize, out: &mut [u64]) {
        Portable.classes(old, unit, by, stride, out);
    }

    fn ones_before(&self, row: &[u64], before: &mut [u16]) -> usize {
        Portable.ones_before(row, before)
    }

    fn ranks(&self, row: &[u64], before: &[u16], positions: &mut [u16]) {
        Portable.ranks(row, before, positions);
    }

    fn select(&self, row: &[u64], before: &[u16], ranks: &[u16], positions: &mut Vec<u16>) {
        Portable.select(row, before, ranks, positions);
    }

    fn prefetch(&self, bytes: &[u8], unit: usize, positions: &[u16]) {
        for &p in positions {
            if let Some(byte) = bytes.get(usize::from(p) * unit) {
                prefetch(byte);
            }
        }
    }
}

#[target_feature(enable = "neon")]
fn dot(bytes: &[u8], [a, b]: [&[u32]; 2]) -> [u64; 2] {
    let words = bytes.len() / 4;
    let whole = words / 16 * 16;
    // Lower and upper words are added up apart: four independent chains hide the latency of the additions.
    let mut sums = [vdupq_n_u64(0); 4];
    for line in (0..whole).step_by(16) {
        prefetch_ahead(bytes, line * 4);
        for i in (line..line + 16).step_by(4) {
            let (w, ka, kb) = (vreinterpretq_u32_u8(load(bytes, i * 4)), load_keys(a, i), load_keys(b, i));
            sums[0] = vmlal_u32(sums[0], vget_low_u32(w), vget_low_u32(ka));
            sums[1] = vmlal_u32(sums[1], vget_low_u32(w), vget_low_u32(kb));
            sums[2] = vmlal_high_u32(sums[2], w, ka);
            sums[3] = vmlal_high_u32(sums[3], w, kb);
        }
    }
    let rest = Portable.dot(&bytes[whole * 4..], [&a[whole..], &b[whole..]]);
    let lane = |low: uint64x2_t, high| vaddvq_u64(vaddq_u64(low, high));
    [lane(sums[0], sums[2]).wrapping_add(rest[0]), lane(sums[1], sums[3]).wrapping_add(rest[1])]
}

#[target_feature(enable = "neon")]
fn changed(old: &[u8], new: &[u8], unit: usize, out: &mut Vec<u16>) {
    match unit {
        1 => changed_of::<1>(old, new, out),
        2 => changed_of::<2>(old, new, out),
        4 => changed_of::<4>(old, new, out),
        8 => changed_of::<8>(old, new, out),
        other => unreachable!("a unit has 1, 2, 4 or 8 bytes, not {other}"),
    }
}

#[target_feature(enable = "neon")]
fn changed_of<const U: usize>(old: &[u8], new: &[u8], out: &mut Vec<u16>) {
    assert_eq!(old.len(), new.len(), "two states of one block");
    let whole = old.len() / U / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        // A step reads as many lines of 64 bytes.
        for line in 0..U {
            prefetch_ahead(old, at * U + line * 64);
            prefetch_ahead(new, at * U + line * 64);
        }
        let mut mask = differ::<U>(old, new, at);
        while mask != 0 {
            out.push((at + mask.trailing_zeros() as usize) as u16);
            mask &= mask - 1;
        }
    }
    changed_tail(old, new, U, whole, out);
}

/// Which of the `LANES` units at unit `at` differ, one bit each.
#[inline]
#[target_feature(enable = "neon")]
fn differ<const U: usize>(old: &[u8], new: &[u8], at: usize) -> u64 {
    // Each lane of eight bits keeps a bit of its own, and adding neighbours three times joins eight of them.
    const BITS: [u8; VECTOR] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
    let bits = load(&BITS, 0);
    let [a, b, c, d] = std::array::from_fn(|i| {
        let equal = equal::<U>(old, new, (at + i * VECTOR) * U);
        vandq_u8(vmvnq_u8(equal), bits)
    });
    let joined = vpaddq_u8(vpaddq_u8(a, b), vpaddq_u8(c, d));
    vgetq_lane_u64::<0>(vreinterpretq_u64_u8(vpaddq_u8(joined, joined)))
}

/// All bits of a lane for each of 16 units from `byte` on that are equal.
#[inline]
#[target_feature(enable = "neon")]
fn equal<const U: usize>(old: &[u8], new: &[u8], byte: usize) -> uint8x16_t {
    let one = |i: usize| {
        let (o, n) = (load(old, byte + i * VECTOR), load(new, byte + i * VECTOR));
        match U {
            1 => vceqq_u8(o, n),
            2 => vreinterpretq_u8_u16(vceqq_u16(vreinterpretq_u16_u8(o), vreinterpretq_u16_u8(n))),
            4 => vreinterpretq_u8_u32(vceqq_u32(vreinterpretq_u32_u8(o), vreinterpretq_u32_u8(n))),
            _ => vreinterpretq_u8_u64(vceqq_u64(vreinterpretq_u64_u8(o), vreinterpretq_u64_u8(n))),
        }
    };
    // All bytes of a unit say the same, so every other byte of two vectors is one that says it in half the room.
    let two = |i: usize| vuzp1q_u8(one(i), one(i + 1));
    let four = |i: usize| vuzp1q_u8(two(i), two(i + 2));
    match U {
        1 => one(0),
        2 => two(0),
        4 => four(0),
        _ => vuzp1q_u8(four(0), four(4)),
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn load(from: &[u8], at: usize) -> uint8x16_t {
    let from = &from[at..at + VECTOR];
    // SAFETY: the slice just taken has 16 bytes, and the load needs no alignment.
    unsafe { vld1q_u8(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_keys(from: &[u32], at: usize) -> uint32x4_t {
    let from = &from[at..at + 4];
    // SAFETY: the slice just taken has four words.
    unsafe { vld1q_u32(from.as_ptr()) }
}

/// Asks for the line this far ahead of `at`. The hardware does so too, but stops at every page.
#[inline(always)]
fn prefetch_ahead(bytes: &[u8], at: usize) {
    const AHEAD: usize = 8192;
    prefetch(bytes.as_ptr().wrapping_add(at + AHEAD));
}

#[inline(always)]
fn prefetch(address: *const u8) {
    // SAFETY: a prefetch has no effect on memory and faults at no address.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
}
