//! The compiled programs, and the structures that their kernels take.
//!
//! Owns: the PTX of the `.cu` files beside this one (`scripts/ptx.py` makes it), its loading, and the host's form of
//! every table and argument; their documentation is in the sources. The driver translates PTX for the device at hand,
//! and keeps the result in its cache of compiled code, so that the first use on a machine takes a second or two
//! and later ones a few milliseconds. Called by the modules beside it. Must not: be given unchecked tables.

#![allow(unsafe_code)]

use std::collections::HashMap;

use cudarc::driver::sys;
use cudarc::driver::sys::CUresult;
use parking_lot::Mutex;

/// Types that are nothing but their bytes, without padding, on the host as on the device.
///
/// # Safety
/// `repr(C)` or an integer, no padding, valid for any bits.
pub(super) unsafe trait Plain: Copy {}

// SAFETY: integers.
unsafe impl Plain for u8 {}
// SAFETY: integers.
unsafe impl Plain for u32 {}
// SAFETY: integers.
unsafe impl Plain for u64 {}
// SAFETY: integers.
unsafe impl Plain for [u64; 2] {}

/// A table as bytes.
pub(super) fn bytes_of<T: Plain>(table: &[T]) -> &[u8] {
    // SAFETY: plain types have no padding.
    unsafe { std::slice::from_raw_parts(table.as_ptr().cast(), size_of_val(table)) }
}

/// Threads of a CTA, in every kernel.
pub(super) const THREADS: u32 = 256;
/// Where a payload is that found no room.
pub(super) const LOST: u64 = u64::MAX;

macro_rules! plain {
    ($(#[doc = $doc:literal] $name:ident { $($field:ident : $kind:ty),* $(,)? })*) => {
        $(
            #[doc = $doc]
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            pub(super) struct $name { $(pub(super) $field: $kind),* }
            // SAFETY: integers, and as many bytes as all fields together, which a test counts.
            unsafe impl Plain for $name {}
            #[cfg(test)]
            impl $name {
                const BYTES: usize = 0 $(+ size_of::<$kind>())*;
            }
        )*
        #[cfg(test)]
        const SIZES: &[(&str, usize, usize)] =
            &[$((stringify!($name), size_of::<$name>(), $name::BYTES)),*];
    };
}

plain! {
    /// Counters of launches (unit.cu).
    Tally { cursor: u64, changes: u64, entries: u32, lost: u32, outcome: [u32; 4], next: [u32; 8] }
    /// A block in the new state and in the baseline (delta.cu).
    Block {
        fresh: u64, fresh_pitch: u64, base: u64, start: u64, pitch: u64, run: u32, count: u32, number: u32,
        is_float: u32,
    }
    /// A record (delta.cu).
    Entry { offset: u64, sum: [u64; 2], number: u32, mode: u32, length: u32, changes: u32 }
    /// What encoding takes (delta.cu).
    EncodeArgs {
        blocks: u64, sums: u64, out: u64, entries: u64, tally: u64, capacity: u64, count: u32,
        entry_capacity: u32, work: u32, unused: u32,
    }
    /// What is summed (sum.cu).
    Span { at: u64, pitch: u64, start: u64, stride: u64, run: u32, count: u32, sum: u32, unused: u32 }
    /// What summing takes (sum.cu).
    SumArgs { spans: u64, sums: u64, tally: u64, count: u32, work: u32 }
    /// What is copied (copy.cu).
    CopyBox { from: u64, to: u64, from_pitch: u64, to_pitch: u64, run: u64, count: u64 }
    /// What copying takes (copy.cu).
    CopyArgs { copies: u64, from: u64, to: u64, tally: u64, count: u32, work: u32 }
    /// A block at an engine (record.cu).
    Place {
        start: u64, pitch: u64, run: u32, count: u32, first: u32, pieces: u32, is_float: u16, is_apart: u16,
        mantissa: u32,
    }
    /// Bytes of a tensor at an engine (record.cu).
    Piece { begin: u64, run: u64, pitch: u64, count: u64, target: u64, target_pitch: u64 }
    /// A record to apply (record.cu).
    Patch { offset: u64, sum: [u64; 2], length: u32, mode: u32, place: u32, unused: u32 }
    /// What applying takes (record.cu).
    ApplyArgs {
        places: u64, pieces: u64, patches: u64, payload: u64, sums: u64, outcomes: u64, tally: u64, count: u32,
        work: u32,
    }
}

/// Bytes of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Unit {
    One,
    Two,
    Four,
    Eight,
}

impl Unit {
    pub(super) const ALL: [Unit; 4] = [Unit::One, Unit::Two, Unit::Four, Unit::Eight];

    /// The unit of so many bytes.
    pub(super) fn of(bytes: usize) -> Unit {
        match bytes {
            1 => Unit::One,
            2 => Unit::Two,
            4 => Unit::Four,
            _ => Unit::Eight,
        }
    }

    pub(super) fn bytes(self) -> u64 {
        match self {
            Unit::One => 1,
            Unit::Two => 2,
            Unit::Four => 4,
            Unit::Eight => 8,
        }
    }
}

/// What an encoder reads: units as they are, or fp32 that becomes bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Elements {
    Plain(Unit),
    Cast,
}

/// A file of PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Program {
    Sum,
    Copy,
    Encode(Elements),
    Apply(Unit),
}

impl Program {
    pub(super) fn text(self) -> &'static str {
        match self {
            Program::Sum => include_str!("sum.ptx"),
            Program::Copy => include_str!("copy.ptx"),
            Program::Encode(Elements::Plain(Unit::One)) => include_str!("encode_1.ptx"),
            Program::Encode(Elements::Plain(Unit::Two)) => include_str!("encode_2.ptx"),
            Program::Encode(Elements::Plain(Unit::Four)) => include_str!("encode_4.ptx"),
            Program::Encode(Elements::Plain(Unit::Eight)) => include_str!("encode_8.ptx"),
            Program::Encode(Elements::Cast) => include_str!("encode_cast.ptx"),
            Program::Apply(Unit::One) => include_str!("apply_1.ptx"),
            Program::Apply(Unit::Two) => include_str!("apply_2.ptx"),
            Program::Apply(Unit::Four) => include_str!("apply_4.ptx"),
            Program::Apply(Unit::Eight) => include_str!("apply_8.ptx"),
        }
    }
}

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    /// Sums of spans; takes [`SumArgs`].
    Sum,
    Copy,
    /// Copies of fp32 as bf16; takes [`CopyArgs`].
    Cast,
    /// Diff and encode; takes [`EncodeArgs`].
    Encode(Elements),
    /// The new state as the baseline; takes [`EncodeArgs`].
    Fill(Elements),
    /// Plain records into weights; takes [`ApplyArgs`].
    Apply(Unit),
}

impl Kernel {
    pub(super) fn program(self) -> Program {
        match self {
            Kernel::Sum => Program::Sum,
            Kernel::Copy | Kernel::Cast => Program::Copy,
            Kernel::Encode(elements) | Kernel::Fill(elements) => Program::Encode(elements),
            Kernel::Apply(unit) => Program::Apply(unit),
        }
    }

    /// The name in its program.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kernel::Sum => "windlass_sum",
            Kernel::Copy => "windlass_copy",
            Kernel::Cast => "windlass_cast",
            Kernel::Encode(_) => "windlass_encode",
            Kernel::Fill(_) => "windlass_fill",
            Kernel::Apply(_) => "windlass_apply",
        }
    }
}

/// What a kernel takes by value.
pub(super) trait Arguments: Plain {}
impl Arguments for SumArgs {}
impl Arguments for CopyArgs {}
impl Arguments for EncodeArgs {}
impl Arguments for ApplyArgs {}

/// A kernel that is ready.
#[derive(Clone, Copy)]
pub(super) struct Ready {
    pub(super) function: sys::CUfunction,
    pub(super) shared: u32,
    /// CTAs that fill the device.
    pub(super) fill: u32,
}

/// The loaded programs of a context.
#[derive(Default)]
pub(super) struct Kernels {
    pub(super) modules: Mutex<HashMap<Program, sys::CUmodule>>,
    pub(super) ready: Mutex<HashMap<Kernel, Ready>>,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; the tables are behind mutexes.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Gives the programs back, before their context goes.
    pub(super) fn unload(&mut self, context: sys::CUcontext) {
        let modules = self.modules.get_mut();
        // SAFETY: a context that is still retained; modules of it, which no caller can launch any more.
        unsafe {
            if modules.is_empty() || sys::cuCtxPushCurrent_v2(context) != CUresult::CUDA_SUCCESS {
                return;
            }
            for (_, module) in modules.drain() {
                let _ = sys::cuModuleUnload(module);
            }
            let _ = sys::cuCtxPopCurrent_v2(&mut std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_of_kernels_have_no_padding() {
        for (name, size, fields) in SIZES {
            assert_eq!(size, fields, "{name}");
            assert_eq!(size % 8, 0, "{name}");
        }
    }

    /// The fields of a structure in a source, by their bytes.
    fn fields(source: &str, name: &str) -> Vec<(String, usize)> {
        let body = source.split(&format!("struct {name} {{\n")).nth(1).unwrap_or_else(|| panic!("no {name}"));
        let body = body.split("\n};").next().unwrap();
        let mut found = Vec::new();
        for line in body.lines() {
            let code = line.split("//").next().unwrap().trim();
            let Some((kind, names)) = code.trim_end_matches(';').split_once(' ') else { continue };
            let size = match kind {
                "u64" => 8,
                "u32" => 4,
                "u16" => 2,
                other => panic!("{name} has a {other}"),
            };
            for field in names.split(',') {
                let (field, count) = field.trim().split_once('[').map_or((field.trim(), 1), |(f, n)| {
                    (f, n.trim_end_matches(']').parse::<usize>().unwrap())
                });
                found.push((field.to_owned(), size * count));
            }
        }
        found
    }

    #[test]
    fn structures_of_the_host_are_those_of_the_sources() {
        let (unit, delta) = (include_str!("unit.cu"), include_str!("delta.cu"));
        let (sum, copy, record) =
            (include_str!("sum.cu"), include_str!("copy.cu"), include_str!("record.cu"));
        // Field by field, as they stand here.
        let host = include_str!("kernels.rs");
        for (source, theirs, ours) in [
            (unit, "Tally", "Tally"),
            (delta, "Block", "Block"),
            (delta, "Entry", "Entry"),
            (delta, "EncodeArgs", "EncodeArgs"),
            (sum, "Span", "Span"),
            (sum, "SumArgs", "SumArgs"),
            (copy, "Copy", "CopyBox"),
            (copy, "CopyArgs", "CopyArgs"),
            (record, "Place", "Place"),
            (record, "Piece", "Piece"),
            (record, "Patch", "Patch"),
            (record, "ApplyArgs", "ApplyArgs"),
        ] {
            let body = host.split(&format!("\n    {ours} {{")).nth(1).unwrap_or_else(|| panic!("no {ours}"));
            let body = body.split('}').next().unwrap();
            let size = |kind: &str| match kind.trim() {
                "u64" => 8,
                "u32" => 4,
                "u16" => 2,
                "[u64; 2]" | "[u32; 4]" => 16,
                "[u32; 8]" => 32,
                other => panic!("{ours} has a {other}"),
            };
            let here: Vec<(String, usize)> = body
                .split(',')
                .filter_map(|f| f.trim().split_once(':'))
                .map(|(name, kind)| (name.trim().to_owned(), size(kind)))
                .collect();
            assert_eq!(here, fields(source, theirs), "{ours}");
        }
    }

    #[test]
    fn every_kernel_is_in_the_ptx_of_its_program() {
        let mut kernels = vec![Kernel::Sum, Kernel::Copy, Kernel::Cast];
        let all = Unit::ALL.map(Elements::Plain).into_iter().chain([Elements::Cast]);
        kernels.extend(all.flat_map(|e| [Kernel::Encode(e), Kernel::Fill(e)]));
        kernels.extend(Unit::ALL.map(Kernel::Apply));
        for kernel in kernels {
            let text = kernel.program().text();
            assert!(text.starts_with("// "), "{kernel:?}");
            assert!(text.contains(&format!(".visible .entry {}(", kernel.name())), "{kernel:?}");
            assert!(
                text.contains("\n.version 8.0\n.target sm_80\n"),
                "{kernel:?} asks for a newer driver or device"
            );
            assert!(text.contains("windlass_shared_bytes"), "{kernel:?}");
        }
    }

    #[test]
    fn the_ptx_was_made_of_the_sources() {
        // What the argument's size in PTX is follows from the structure.
        for (kernel, bytes) in [
            (Kernel::Sum, size_of::<SumArgs>()),
            (Kernel::Copy, size_of::<CopyArgs>()),
            (Kernel::Cast, size_of::<CopyArgs>()),
            (Kernel::Encode(Elements::Cast), size_of::<EncodeArgs>()),
            (Kernel::Apply(Unit::Eight), size_of::<ApplyArgs>()),
        ] {
            let param = format!(".param .align 8 .b8 {}_param_0[{bytes}]", kernel.name());
            assert!(kernel.program().text().contains(&param), "{param}");
        }
    }
}
