//! Units of 1, 2, 4 and 8 bytes, and the line on which their values are in order.

use crate::digest::{BlockSum, sum_of_changes};
use crate::dtype::Line;

/// An unsigned integer of the size of a unit.
pub trait Unit: Copy + Eq + Ord + Default + std::fmt::Debug + Send + Sync + 'static {
    /// Bytes of a unit.
    const BYTES: usize;
    /// Bits of a unit.
    const BITS: u32;
    /// A unit of a little-endian byte string.
    fn read(bytes: &[u8], index: usize) -> Self;
    /// The change of a tensor's sum (see [`sum_of_changes`]).
    fn sum_of_changes(
        changes: usize,
        offset: impl Fn(usize) -> u64,
        change: impl FnMut(usize) -> (Self, Self),
    ) -> BlockSum;
    /// Puts a unit in its place.
    fn write(self, bytes: &mut [u8], index: usize);
    /// Its value, widened.
    fn wide(self) -> u64;
    /// The low bits of a wider value.
    fn narrow(wide: u64) -> Self;
    /// The step from `old` to `new` on the line, as a code: -1, +1, -2, … are 0, 1, 2, …. They must differ.
    fn code(line: LineMask<Self>, old: Self, new: Self) -> Self;
    /// The unit that the step of this code makes of `old`.
    fn step(line: LineMask<Self>, old: Self, code: Self) -> Self;
    /// The code of the two steps together, or `None` if they cancel.
    fn add_codes(a: Self, b: Self) -> Option<Self>;
    /// The code of the step that leads back.
    fn turned(code: Self) -> Self;
    /// How many of these have more than this many bits; fewer than the unit has.
    fn count_longer(codes: &[Self], bits: u32) -> usize;
    /// The mask for a line.
    fn mask(line: Line) -> LineMask<Self>;
}

/// All ones for floats, zero for integers: selects the map to the line without a branch.
#[derive(Clone, Copy, Debug)]
pub struct LineMask<T>(T);

macro_rules! unit {
    ($module:ident, $t:ty, $signed:ty) => {
        mod $module {
            use super::{BlockSum, Line, LineMask, Unit, sum_of_changes};

            const TOP: $t = 1 << (<$t>::BITS - 1);

            #[inline(always)]
            fn to_line(line: LineMask<$t>, bits: $t) -> $t {
                bits ^ (((bits as $signed >> (<$t>::BITS - 1)) as $t | TOP) & line.0)
            }

            #[inline(always)]
            fn zigzag_less_one(step: $t) -> $t {
                ((step << 1) ^ (step as $signed >> (<$t>::BITS - 1)) as $t).wrapping_sub(1)
            }

            #[inline(always)]
            fn step_of(code: $t) -> $t {
                let z = code.wrapping_add(1);
                (z >> 1) ^ (z & 1).wrapping_neg()
            }

            impl Unit for $t {
                const BYTES: usize = size_of::<$t>();
                const BITS: u32 = <$t>::BITS;

                #[inline(always)]
                fn read(bytes: &[u8], index: usize) -> Self {
                    <$t>::from_le_bytes(bytes.as_chunks::<{ size_of::<$t>() }>().0[index])
                }

                #[inline(always)]
                fn sum_of_changes(
                    changes: usize,
                    offset: impl Fn(usize) -> u64,
                    mut change: impl FnMut(usize) -> (Self, Self),
                ) -> BlockSum {
                    sum_of_changes::<{ size_of::<$t>() }>(changes, offset, |i| {
                        let (old, new) = change(i);
                        (old.wide(), new.wide())
                    })
                }

                #[inline(always)]
                fn write(self, bytes: &mut [u8], index: usize) {
                    bytes.as_chunks_mut::<{ size_of::<$t>() }>().0[index] = self.to_le_bytes();
                }

                #[inline(always)]
                fn wide(self) -> u64 {
                    self.into()
                }

                #[inline(always)]
                fn narrow(wide: u64) -> Self {
                    wide as $t
                }

                #[inline(always)]
                fn code(line: LineMask<Self>, old: Self, new: Self) -> Self {
                    zigzag_less_one(to_line(line, new).wrapping_sub(to_line(line, old)))
                }

                #[inline(always)]
                fn step(line: LineMask<Self>, old: Self, code: Self) -> Self {
                    let place = to_line(line, old).wrapping_add(step_of(code));
                    place ^ ((!((place as $signed >> (<$t>::BITS - 1)) as $t) | TOP) & line.0)
                }

                fn add_codes(a: Self, b: Self) -> Option<Self> {
                    match step_of(a).wrapping_add(step_of(b)) {
                        0 => None,
                        step => Some(zigzag_less_one(step)),
                    }
                }

                #[inline(always)]
                fn turned(code: Self) -> Self {
                    // The codes of a step and of its negative are neighbours; only half a turn of the line is its own.
                    match code ^ 1 {
                        <$t>::MAX => code,
                        other => other,
                    }
                }

                fn count_longer(codes: &[Self], bits: u32) -> usize {
                    // Counted in lanes of the unit's own width, as often as those can hold.
                    let longer = |chunk: &[$t]| chunk.iter().map(|&c| <$t>::from(c >> bits != 0)).sum::<$t>();
                    codes.chunks(255).map(|chunk| longer(chunk) as usize).sum()
                }

                fn mask(line: Line) -> LineMask<Self> {
                    LineMask(match line {
                        Line::Float(_) => <$t>::MAX,
                        Line::Integer => 0,
                    })
                }
            }
        }
    };
}

unit!(bytes1, u8, i8);
unit!(bytes2, u16, i16);
unit!(bytes4, u32, i32);
unit!(bytes8, u64, i64);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_pair_of_bytes_has_its_step() {
        for line in [Line::Float(3), Line::Integer] {
            let mask = u8::mask(line);
            for old in 0..=255u8 {
                for new in (0..=255u8).filter(|&n| n != old) {
                    let code = u8::code(mask, old, new);
                    assert_eq!(u8::step(mask, old, code), new);
                    assert_eq!(u8::turned(code), u8::code(mask, new, old));
                }
            }
        }
    }

    #[test]
    fn neighbours_in_value_are_neighbours_on_the_line() {
        let mask = u16::mask(Line::Float(7));
        // bf16: 1.0 and its neighbours, the two zeros, the smallest negative and -0.
        assert_eq!(u16::code(mask, 0x3f80, 0x3f81), 1);
        assert_eq!(u16::code(mask, 0x3f80, 0x3f7f), 0);
        assert_eq!(u16::code(mask, 0xbf80, 0xbf7f), 1);
        assert_eq!(u16::code(mask, 0x8000, 0x0000), 1);
        assert_eq!(u16::code(mask, 0x8000, 0x8001), 0);
        assert_eq!(u16::code(mask, 0x0000, 0x0002), 3);
    }

    proptest! {
        #[test]
        fn steps_lead_to_their_target(old: u64, new: u64, mid: u64) {
            fn check<T: Unit>(old: u64, mid: u64, new: u64) -> Result<(), TestCaseError> {
                let (old, mid, new) = (T::narrow(old), T::narrow(mid), T::narrow(new));
                prop_assume!(old != mid && mid != new);
                for line in [Line::Float(7), Line::Integer] {
                    let m = T::mask(line);
                    let (a, b) = (T::code(m, old, mid), T::code(m, mid, new));
                    prop_assert_eq!(T::step(m, old, a), mid);
                    prop_assert_eq!(T::turned(a), T::code(m, mid, old));
                    let whole = (old != new).then(|| T::code(m, old, new));
                    prop_assert_eq!(T::add_codes(a, b), whole);
                }
                Ok(())
            }
            check::<u8>(old, mid, new)?;
            check::<u16>(old, mid, new)?;
            check::<u32>(old, mid, new)?;
            check::<u64>(old, mid, new)?;
        }
    }
}
