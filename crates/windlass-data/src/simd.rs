//! The kernels of `windlass-core` with the vector instructions of this machine.
//!
//! Owns: [`kernels`], which picks the fastest implementation once, and the implementations. Called by
//! everything that encodes, applies or sums. Must not: give other results than
//! [`windlass_core::kernel::Portable`], which the tests here check on every length and alignment.
//!
//! Unsafe code is of four kinds only, each with its proof beside it: calling a function whose instructions the
//! CPU has, loading a vector from a slice whose length was checked, storing a vector into memory that
//! is there (and telling a vector its new length), and prefetching, which touches nothing.
#![allow(unsafe_code)]

#[cfg(target_arch = "aarch64")]
mod neon;

use std::sync::Once;

use windlass_core::kernel::Kernels;

/// The name of the kernels that need no vector instructions.
pub const PORTABLE: &str = "portable";

/// What [`PORTABLE`] kernels mean.
pub const SLOWER: &str =
    "this CPU has no supported vector instructions; encoding and applying are several times slower";

/// The fastest kernels that this CPU runs. Logs one warning in a process if it has no faster ones than the portable.
pub fn kernels() -> &'static dyn Kernels {
    static WARNED: Once = Once::new();
    let (name, kernels) = pick();
    if name == PORTABLE {
        WARNED.call_once(|| tracing::warn!("{SLOWER}"));
    }
    kernels
}

/// The name of what [`kernels`] picked, for `windlass doctor` and benchmarks.
pub fn kernels_name() -> &'static str {
    pick().0
}

fn pick() -> (&'static str, &'static dyn Kernels) {
    #[cfg(target_arch = "x86_64")]
    {
        if x86::Avx512::available() {
            return ("avx512", &x86::AVX512);
        }
        if x86::Avx2::available() {
            return ("avx2", &x86::AVX2);
        }
    }
    #[cfg(target_arch = "aarch64")]
    return ("neon", &neon::NEON);
    #[cfg(not(target_arch = "aarch64"))]
    (PORTABLE, &windlass_core::kernel::Portable)
}

/// Compares the units behind the last full step and appends their positions.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn changed_tail(old: &[u8], new: &[u8], unit: usize, from: usize, out: &mut Vec<u16>) {
    let (old, new) = (&old[from * unit..], &new[from * unit..]);
    let pairs = old.chunks_exact(unit).zip(new.chunks_exact(unit)).enumerate();
    out.extend(pairs.filter(|(_, (o, n))| o != n).map(|(i, _)| (from + i) as u16));
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _MM_HINT_T0, _mm_cvtsi32_si128, _mm_prefetch, _mm256_add_epi64,
        _mm256_castsi256_pd, _mm256_castsi256_ps, _mm256_cmpeq_epi8, _mm256_cmpeq_epi16, _mm256_cmpeq_epi32,
        _mm256_cmpeq_epi64, _mm256_cmpneq_epi8_mask, _mm256_loadu_si256, _mm256_movemask_epi8,
        _mm256_movemask_pd, _mm256_movemask_ps, _mm256_mul_epu32, _mm256_packs_epi16,
        _mm256_permute4x64_epi64, _mm256_setzero_si256, _mm256_srli_epi64, _mm256_storeu_si256,
        _mm512_add_epi16, _mm512_add_epi64, _mm512_and_si512, _mm512_cmpneq_epi16_mask,
        _mm512_cmpneq_epi32_mask, _mm512_cmpneq_epi64_mask, _mm512_loadu_si512, _mm512_maskz_compress_epi16,
        _mm512_min_epu16, _mm512_mul_epu32, _mm512_reduce_add_epi64, _mm512_set1_epi16, _mm512_set1_epi64,
        _mm512_setzero_si512, _mm512_srl_epi16, _mm512_srli_epi64, _mm512_storeu_si512, _mm512_subs_epu16,
        _mm512_test_epi16_mask, _mm512_xor_si512,
    };

    use windlass_core::kernel::{Classes, Kernels, Portable};

    use super::changed_tail;

    /// Words of a bit plane that are held at a time.
    const PLANE: usize = 64;

    /// Units that one step of [`Kernels::changed`] looks at.
    const LANES: usize = 32;

    /// AVX-512 with byte, word and compress instructions: Ice Lake, Zen 4 and later.
    #[derive(Debug)]
    pub(super) struct Avx512(());
    pub(super) static AVX512: Avx512 = Avx512(());

    impl Avx512 {
        pub(super) fn available() -> bool {
            Avx2::available()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi2")
        }
    }

    /// AVX2: Haswell, Zen and later.
    #[derive(Debug)]
    pub(super) struct Avx2(());
    pub(super) static AVX2: Avx2 = Avx2(());

    impl Avx2 {
        pub(super) fn available() -> bool {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("popcnt")
        }
    }

    impl Kernels for Avx512 {
        fn dot(&self, bytes: &[u8], keys: [&[u32]; 2]) -> [u64; 2] {
            // SAFETY: the only value of this type is handed out after `available` said yes.
            unsafe { dot_512(bytes, keys) }
        }

        fn changed(&self, old: &[u8], new: &[u8], unit: usize, out: &mut Vec<u16>) {
            // SAFETY: as above.
            unsafe { changed_512(old, new, unit, out) }
        }

        fn classes(&self, old: &[u8], unit: usize, by: Classes, stride: usize, out: &mut [u64]) {
            if unit == 2 {
                // SAFETY: as above.
                unsafe { classes_512(old, by, stride, out) }
            } else {
                // SAFETY: as above.
                unsafe { classes_bits(old, unit, by, stride, out) }
            }
        }

        fn ones_before(&self, row: &[u64], before: &mut [u16]) -> usize {
            // SAFETY: as above.
            unsafe { ones_before_bits(row, before) }
        }

        fn ranks(&self, row: &[u64], before: &[u16], positions: &mut [u16]) {
            // SAFETY: as above.
            unsafe { ranks_bits(row, before, positions) }
        }

        fn select(&self, row: &[u64], before: &[u16], ranks: &[u16], positions: &mut Vec<u16>) {
            // SAFETY: as above.
            unsafe { select_bits(row, before, ranks, positions) }
        }

        fn prefetch(&self, bytes: &[u8], unit: usize, positions: &[u16]) {
            prefetch_all(bytes, unit, positions);
        }
    }

    impl Kernels for Avx2 {
        fn dot(&self, bytes: &[u8], keys: [&[u32]; 2]) -> [u64; 2] {
            // SAFETY: the only value of this type is handed out after `available` said yes.
            unsafe { dot_256(bytes, keys) }
        }

        fn changed(&self, old: &[u8], new: &[u8], unit: usize, out: &mut Vec<u16>) {
            // SAFETY: as above.
            unsafe { changed_256(old, new, unit, out) }
        }

        fn classes(&self, old: &[u8], unit: usize, by: Classes, stride: usize, out: &mut [u64]) {
            // SAFETY: as above.
            unsafe { classes_bits(old, unit, by, stride, out) }
        }

        fn ones_before(&self, row: &[u64], before: &mut [u16]) -> usize {
            // SAFETY: as above.
            unsafe { ones_before_bits(row, before) }
        }

        fn ranks(&self, row: &[u64], before: &[u16], positions: &mut [u16]) {
            // SAFETY: as above.
            unsafe { ranks_bits(row, before, positions) }
        }

        fn select(&self, row: &[u64], before: &[u16], ranks: &[u16], positions: &mut Vec<u16>) {
            // SAFETY: as above.
            unsafe { select_bits(row, before, ranks, positions) }
        }

        fn prefetch(&self, bytes: &[u8], unit: usize, positions: &[u16]) {
            prefetch_all(bytes, unit, positions);
        }
    }

    // The portable loops, compiled for processors that count bits and shift by a variable in one instruction.

    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    fn classes_bits(old: &[u8], unit: usize, by: Classes, stride: usize, out: &mut [u64]) {
        Portable.classes(old, unit, by, stride, out);
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    fn ones_before_bits(row: &[u64], before: &mut [u16]) -> usize {
        Portable.ones_before(row, before)
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    fn ranks_bits(row: &[u64], before: &[u16], positions: &mut [u16]) {
        Portable.ranks(row, before, positions);
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
    fn select_bits(row: &[u64], before: &[u16], ranks: &[u16], positions: &mut Vec<u16>) {
        Portable.select(row, before, ranks, positions);
    }

    /// Asks for the line this far ahead of `at`. The hardware does so too, but stops at every page.
    #[inline(always)]
    fn prefetch_ahead(bytes: &[u8], at: usize) {
        const AHEAD: usize = 8192;
        let address = bytes.as_ptr().wrapping_add(at + AHEAD);
        // SAFETY: a prefetch has no effect on memory and faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }

    fn prefetch_all(bytes: &[u8], unit: usize, positions: &[u16]) {
        for &p in positions {
            if let Some(byte) = bytes.get(usize::from(p) * unit) {
                // SAFETY: a prefetch has no effect on memory, and the address is that of a living byte.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast()) };
            }
        }
    }

    /// Types of which any bytes are a value and that have no padding.
    trait Word {}
    impl Word for u8 {}
    impl Word for u16 {}
    impl Word for u32 {}
    impl Word for u64 {}

    #[target_feature(enable = "avx512f")]
    fn load_512<T: Word>(from: &[T], at: usize) -> __m512i {
        let from = &from[at..at + 64 / size_of::<T>()];
        // SAFETY: the slice just taken has 64 bytes of integers, and the load needs no alignment.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx2")]
    fn load_256<T: Word>(from: &[T], at: usize) -> __m256i {
        let from = &from[at..at + 32 / size_of::<T>()];
        // SAFETY: the slice just taken has 32 bytes of integers, and the load needs no alignment.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    fn dot_512(bytes: &[u8], [a, b]: [&[u32]; 2]) -> [u64; 2] {
        let words = bytes.len() / 4;
        let whole = words / 16 * 16;
        // Even and odd words are added up apart: four independent chains hide the latency of the additions.
        let mut sums = [_mm512_setzero_si512(); 4];
        for i in (0..whole).step_by(16) {
            prefetch_ahead(bytes, i * 4);
            let (w, ka, kb) = (load_512(bytes, i * 4), load_512(a, i), load_512(b, i));
            let (w1, ka1, kb1) =
                (_mm512_srli_epi64::<32>(w), _mm512_srli_epi64::<32>(ka), _mm512_srli_epi64::<32>(kb));
            sums[0] = _mm512_add_epi64(sums[0], _mm512_mul_epu32(w, ka));
            sums[1] = _mm512_add_epi64(sums[1], _mm512_mul_epu32(w, kb));
            sums[2] = _mm512_add_epi64(sums[2], _mm512_mul_epu32(w1, ka1));
            sums[3] = _mm512_add_epi64(sums[3], _mm512_mul_epu32(w1, kb1));
        }
        let rest = Portable.dot(&bytes[whole * 4..], [&a[whole..], &b[whole..]]);
        let lane = |even, odd| _mm512_reduce_add_epi64(_mm512_add_epi64(even, odd)) as u64;
        [lane(sums[0], sums[2]).wrapping_add(rest[0]), lane(sums[1], sums[3]).wrapping_add(rest[1])]
    }

    #[target_feature(enable = "avx2")]
    fn dot_256(bytes: &[u8], [a, b]: [&[u32]; 2]) -> [u64; 2] {
        let words = bytes.len() / 4;
        let whole = words / 8 * 8;
        let mut sums = [_mm256_setzero_si256(); 4];
        for i in (0..whole).step_by(8) {
            prefetch_ahead(bytes, i * 4);
            let (w, ka, kb) = (load_256(bytes, i * 4), load_256(a, i), load_256(b, i));
            let (w1, ka1, kb1) =
                (_mm256_srli_epi64::<32>(w), _mm256_srli_epi64::<32>(ka), _mm256_srli_epi64::<32>(kb));
            sums[0] = _mm256_add_epi64(sums[0], _mm256_mul_epu32(w, ka));
            sums[1] = _mm256_add_epi64(sums[1], _mm256_mul_epu32(w, kb));
            sums[2] = _mm256_add_epi64(sums[2], _mm256_mul_epu32(w1, ka1));
            sums[3] = _mm256_add_epi64(sums[3], _mm256_mul_epu32(w1, kb1));
        }
        let rest = Portable.dot(&bytes[whole * 4..], [&a[whole..], &b[whole..]]);
        let lane = |even, odd| {
            let mut four = [0u64; 4];
            // SAFETY: the array has the 32 bytes that are stored, and the store needs no alignment.
            unsafe { _mm256_storeu_si256(four.as_mut_ptr().cast(), _mm256_add_epi64(even, odd)) };
            four.iter().fold(0u64, |s, &x| s.wrapping_add(x))
        };
        [lane(sums[0], sums[2]).wrapping_add(rest[0]), lane(sums[1], sums[3]).wrapping_add(rest[1])]
    }

    /// Which of the `LANES` units at unit `at` differ, one bit each.
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
    fn differ_512(old: &[u8], new: &[u8], unit: usize, at: usize) -> u32 {
        let pair = |byte: usize| (load_512(old, byte), load_512(new, byte));
        match unit {
            1 => _mm256_cmpneq_epi8_mask(load_256(old, at), load_256(new, at)),
            2 => {
                let (o, n) = pair(at * 2);
                _mm512_cmpneq_epi16_mask(o, n)
            }
            4 => (0..2).fold(0, |mask, i| {
                let (o, n) = pair(at * 4 + i * 64);
                mask | u32::from(_mm512_cmpneq_epi32_mask(o, n)) << (16 * i)
            }),
            _ => (0..4).fold(0, |mask, i| {
                let (o, n) = pair(at * 8 + i * 64);
                mask | u32::from(_mm512_cmpneq_epi64_mask(o, n)) << (8 * i)
            }),
        }
    }

    #[target_feature(enable = "avx2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2")]
    fn changed_512(old: &[u8], new: &[u8], unit: usize, out: &mut Vec<u16>) {
        match unit {
            1 => changed_512_of::<1>(old, new, out),
            2 => changed_512_of::<2>(old, new, out),
            4 => changed_512_of::<4>(old, new, out),
            8 => changed_512_of::<8>(old, new, out),
            other => unreachable!("a unit has 1, 2, 4 or 8 bytes, not {other}"),
        }
    }

    #[target_feature(enable = "avx2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2")]
    fn changed_512_of<const U: usize>(old: &[u8], new: &[u8], out: &mut Vec<u16>) {
        assert_eq!(old.len(), new.len(), "two states of one block");
        let units = old.len() / U;
        let whole = units / LANES * LANES;
        // Every step stores a full vector and keeps as many of its lanes as there were differences.
        out.reserve(units + LANES);
        let mut len = out.len();
        let lanes: [u16; LANES] = std::array::from_fn(|i| i as u16);
        let mut index = load_512(&lanes, 0);
        let step = _mm512_set1_epi16(LANES as i16);
        for at in (0..whole).step_by(LANES) {
            prefetch_ahead(old, at * U);
            prefetch_ahead(new, at * U);
            let mask = differ_512(old, new, U, at);
            let packed = _mm512_maskz_compress_epi16(mask, index);
            // SAFETY: `len` grows by at most LANES a step, so before each of the units/LANES steps it is at
            // most the original length plus `at`, and `units + LANES` elements beyond that are reserved.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(len).cast(), packed) };
            len += mask.count_ones() as usize;
            index = _mm512_add_epi16(index, step);
        }
        // SAFETY: elements below `len` were stored above, and `len` is within the reserved capacity.
        unsafe { out.set_len(len) };
        changed_tail(old, new, U, whole, out);
    }

    /// Which of the `LANES` units at unit `at` differ, one bit each.
    #[target_feature(enable = "avx2")]
    fn differ_256<const U: usize>(old: &[u8], new: &[u8], at: usize) -> u32 {
        let pair = |i: usize| (load_256(old, at * U + i * 32), load_256(new, at * U + i * 32));
        let equal = match U {
            1 => {
                let (o, n) = pair(0);
                _mm256_movemask_epi8(_mm256_cmpeq_epi8(o, n)) as u32
            }
            2 => {
                let ((o0, n0), (o1, n1)) = (pair(0), pair(1));
                // Packing works within 128-bit halves; the permutation puts the quarters back in order.
                let packed = _mm256_packs_epi16(_mm256_cmpeq_epi16(o0, n0), _mm256_cmpeq_epi16(o1, n1));
                _mm256_movemask_epi8(_mm256_permute4x64_epi64::<0b11_01_10_00>(packed)) as u32
            }
            4 => (0..4).fold(0, |mask, i| {
                let (o, n) = pair(i);
                let equal = _mm256_castsi256_ps(_mm256_cmpeq_epi32(o, n));
                mask | (_mm256_movemask_ps(equal) as u32) << (8 * i)
            }),
            _ => (0..8).fold(0, |mask, i| {
                let (o, n) = pair(i);
                let equal = _mm256_castsi256_pd(_mm256_cmpeq_epi64(o, n));
                mask | (_mm256_movemask_pd(equal) as u32) << (4 * i)
            }),
        };
        !equal
    }

    #[target_feature(enable = "avx2,bmi1")]
    fn changed_256(old: &[u8], new: &[u8], unit: usize, out: &mut Vec<u16>) {
        match unit {
            1 => changed_256_of::<1>(old, new, out),
            2 => changed_256_of::<2>(old, new, out),
            4 => changed_256_of::<4>(old, new, out),
            8 => changed_256_of::<8>(old, new, out),
            other => unreachable!("a unit has 1, 2, 4 or 8 bytes, not {other}"),
        }
    }

    #[target_feature(enable = "avx2,bmi1")]
    fn changed_256_of<const U: usize>(old: &[u8], new: &[u8], out: &mut Vec<u16>) {
        assert_eq!(old.len(), new.len(), "two states of one block");
        let whole = old.len() / U / LANES * LANES;
        for at in (0..whole).step_by(LANES) {
            prefetch_ahead(old, at * U);
            prefetch_ahead(new, at * U);
            let mut mask = differ_256::<U>(old, new, at);
            while mask != 0 {
                out.push((at + mask.trailing_zeros() as usize) as u16);
                mask &= mask - 1;
            }
        }
        changed_tail(old, new, U, whole, out);
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    fn classes_512(old: &[u8], by: Classes, stride: usize, out: &mut [u64]) {
        let units = old.len() / 2;
        let whole = units / 64;
        let shift = _mm_cvtsi32_si128(by.mantissa.into());
        let magnitude = _mm512_set1_epi16(0x7fff);
        let top = _mm512_set1_epi16(by.top as i16);
        let last = _mm512_set1_epi16(i16::from(by.count) - 1);
        let class = |byte: usize| {
            let exponent = _mm512_srl_epi16(_mm512_and_si512(load_512(old, byte), magnitude), shift);
            _mm512_min_epu16(_mm512_subs_epu16(top, exponent), last)
        };
        // Four bit planes of the class numbers first: a test for each bit is a third of a comparison for each
        // class. Then each class's bitmap from the planes, eight words at a time.
        let bit = |n: u32| _mm512_set1_epi16(1 << n);
        let bits = [bit(0), bit(1), bit(2), bit(3)];
        let mut planes = [[0u64; PLANE]; 4];
        for first in (0..whole).step_by(PLANE) {
            let here = PLANE.min(whole - first);
            for word in 0..here {
                let byte = (first + word) * 128;
                let (low, high) = (class(byte), class(byte + 64));
                for (plane, &bit) in planes.iter_mut().zip(&bits) {
                    plane[word] = u64::from(_mm512_test_epi16_mask(low, bit))
                        | u64::from(_mm512_test_epi16_mask(high, bit)) << 32;
                }
            }
            for c in 0..usize::from(by.count) {
                let inverted: [__m512i; 4] =
                    std::array::from_fn(|n| _mm512_set1_epi64((c as i64 >> n & 1) - 1));
                let mut members = [0u64; PLANE];
                for word in (0..PLANE).step_by(8) {
                    let plane = |n: usize| _mm512_xor_si512(load_512(&planes[n], word), inverted[n]);
                    let low = _mm512_and_si512(plane(0), plane(1));
                    let all = _mm512_and_si512(low, _mm512_and_si512(plane(2), plane(3)));
                    let eight = &mut members[word..word + 8];
                    // SAFETY: the slice just taken has the 64 bytes that are stored, aligned or not.
                    unsafe { _mm512_storeu_si512(eight.as_mut_ptr().cast(), all) };
                }
                out[c * stride + first..][..here].copy_from_slice(&members[..here]);
            }
        }
        if whole * 64 < units {
            (0..usize::from(by.count)).for_each(|c| out[c * stride + whole] = 0);
            for (i, bytes) in old[whole * 128..].chunks_exact(2).enumerate() {
                let class = by.class(windlass_core::kernel::read_unit(bytes), 16);
                out[class * stride + whole] |= 1 << i;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use windlass_core::Dtype;
    use windlass_core::delta::{Applier, Encoder, Outcome, Record, Tile};
    use windlass_core::digest::sum_block;
    use windlass_core::kernel::{Classes, Portable};
    use windlass_core::manifest::{Manifest, TensorSpec};

    use super::*;

    /// Every implementation that this machine can run. What it cannot run is named, not passed over.
    fn implementations() -> Vec<(&'static str, &'static dyn Kernels)> {
        let mut all: Vec<(&'static str, &'static dyn Kernels)> = vec![(PORTABLE, &Portable)];
        #[cfg(target_arch = "aarch64")]
        all.push(("neon", &neon::NEON));
        #[cfg(target_arch = "x86_64")]
        {
            let mut skipped = vec!["avx2", "avx512"];
            if x86::Avx2::available() {
                all.push(("avx2", &x86::AVX2));
            }
            if x86::Avx512::available() {
                all.push(("avx512", &x86::AVX512));
            }
            skipped.retain(|name| all.iter().all(|(have, _)| have != name));
            if !skipped.is_empty() {
                eprintln!("SKIPPED: this CPU has no {}", skipped.join(" and no "));
            }
        }
        all
    }

    #[test]
    fn the_picked_kernels_are_the_last_available() {
        assert_eq!(implementations().last().unwrap().0, kernels_name());
    }

    /// The same bytes on whatever hardware, for whole blocks of the floats that engines use.
    #[test]
    fn all_kernels_encode_the_same_records() {
        let mut x = 1u64;
        let mut next = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            x >> 33
        };
        for (dtype, unit) in [(Dtype::BF16, 2), (Dtype::F16, 2), (Dtype::F32, 4), (Dtype::F8E4M3, 1)] {
            let manifest = Manifest::new([TensorSpec::new("w", dtype, [65_536])], BTreeMap::new()).unwrap();
            let tile = Tile::of(&manifest, 0).unwrap();
            let mut old = Vec::new();
            let mut new = Vec::new();
            for _ in 0..65_536 {
                // Octaves halve in size and change twice as often, as in real weights.
                let octave = next().trailing_zeros().min(10);
                let top = (1u64 << (8 * unit - 2)) - 1;
                let value = (top >> octave.min(8 * unit as u32 - 3)) ^ (next() & 3);
                let moved = next() % 4096 < 8 << octave;
                old.extend_from_slice(&value.to_le_bytes()[..unit]);
                new.extend_from_slice(&(value ^ u64::from(moved)).to_le_bytes()[..unit]);
            }
            let sum = sum_block(&Portable, &tile.block, unit, &old);
            for encoder in [Encoder::plain, Encoder::with_context] {
                let mut records = Vec::new();
                for (name, k) in implementations() {
                    let mut payload = Vec::new();
                    let encoded = encoder().encode(k, &tile, (&old, sum), &new, &mut payload).unwrap();
                    let record = Record { block: 0, mode: encoded.mode, sum: encoded.sum, payload: &payload };
                    let mut image = old.clone();
                    let outcome = Applier::new().apply(k, &tile, &record, sum, &mut image).unwrap();
                    assert_eq!(outcome, Outcome::Applied, "{name}");
                    assert!(image == new, "{name}");
                    records.push((encoded, payload));
                }
                assert!(records.windows(2).all(|w| w[0] == w[1]), "{dtype}");
            }
        }
    }

    proptest! {
        #[test]
        fn all_kernels_find_the_same_changes(
            unit in prop::sample::select(vec![1usize, 2, 4, 8]), units in 0usize..400, shift in 0usize..8,
            density in 0u32..40, seed: u64,
        ) {
            let mut x = seed;
            let mut next = || { x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1); (x >> 33) as u32 };
            let old: Vec<u8> = (0..shift + units * unit).map(|_| next() as u8).collect();
            let mut new = old.clone();
            let mut expected = vec![7];
            for i in 0..units {
                if next() % 40 < density {
                    new[shift + i * unit + next() as usize % unit] ^= 1 << (next() % 8);
                    expected.push(i as u16);
                }
            }
            for (name, k) in implementations() {
                let mut out = vec![7];
                k.changed(&old[shift..], &new[shift..], unit, &mut out);
                prop_assert_eq!(&out, &expected, "{}", name);
            }
        }

        #[test]
        fn all_kernels_rank_and_select_the_same_ones(
            row in prop::collection::vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 0..=1024),
            nth in 1usize..200,
        ) {
            let ones: Vec<u16> =
                (0..=u16::MAX).take(row.len() * 64).filter(|&p| row[usize::from(p) / 64] >> (p % 64) & 1 == 1).collect();
            let ranks: Vec<u16> = (0..ones.len()).step_by(nth).map(|rank| rank as u16).collect();
            let some: Vec<u16> = ones.iter().copied().step_by(nth).collect();
            for (name, k) in implementations() {
                let mut before = vec![7; row.len()];
                prop_assert_eq!(k.ones_before(&row, &mut before), ones.len(), "{}", name);
                let mut ranked = some.clone();
                k.ranks(&row, &before, &mut ranked);
                prop_assert_eq!(&ranked, &ranks, "{}", name);
                let mut selected = Vec::new();
                k.select(&row, &before, &ranks, &mut selected);
                prop_assert_eq!(&selected, &some, "{}", name);
            }
        }

        #[test]
        fn all_kernels_have_the_same_dot_products(words in 0usize..300, shift in 0usize..5, bytes in prop::collection::vec(any::<u8>(), 1210), keys in prop::collection::vec(any::<u32>(), 600)) {
            let bytes = &bytes[shift..shift + words * 4];
            let keys = [&keys[..words], &keys[300..300 + words]];
            let expected = Portable.dot(bytes, keys);
            for (name, k) in implementations() {
                prop_assert_eq!(k.dot(bytes, keys), expected, "{}", name);
            }
        }

        #[test]
        fn all_kernels_put_units_into_the_same_classes(
            unit in prop::sample::select(vec![1usize, 2, 4, 8]), units in prop_oneof![1usize..300, 4000usize..9000], top in 0u16..300,
            count in 1u8..=16, mantissa in 2u8..7, wide: bool, seed: u64,
        ) {
            // Halves have 7 or 10 bits of mantissa.
            let mantissa = if unit == 1 { mantissa } else if wide { 10 } else { 7 };
            let mut x = seed;
            let bytes: Vec<u8> = (0..units * unit).map(|_| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (x >> 40) as u8
            }).collect();
            let old = bytes.as_slice();
            let words = units.div_ceil(64);
            let stride = words + 3;
            let by = Classes { mantissa, top, count };
            let mut expected = vec![u64::MAX; stride * usize::from(count)];
            Portable.classes(old, unit, by, stride, &mut expected);
            let members: u32 = expected.chunks(stride).flat_map(|row| &row[..words]).map(|w| w.count_ones()).sum();
            prop_assert_eq!(members as usize, units);
            for (name, k) in implementations() {
                let mut out = vec![u64::MAX; stride * usize::from(count)];
                k.classes(old, unit, by, stride, &mut out);
                prop_assert_eq!(&out, &expected, "{}", name);
            }
        }
    }

    #[test]
    fn a_block_of_the_largest_size_has_all_its_positions() {
        for (name, k) in implementations() {
            for unit in [1, 2, 4, 8] {
                let mut out = Vec::new();
                k.changed(&vec![0; 65536 * unit], &vec![1; 65536 * unit], unit, &mut out);
                assert!(out.iter().copied().eq(0..=65535), "{name} {unit}");
            }
        }
    }
}
