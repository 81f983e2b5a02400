//! Golden containers in `testdata/delta`, which `testdata/delta.py` reads too.
//!
//! Should the format ever change on purpose, this prints the files anew, each after its name:
//! `cargo test -p windlass-core --lib print_golden_deltas -- --ignored --nocapture`

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::tests::{Bits, apply_all, make_parts, table};
use super::*;
use crate::dtype::Dtype;
use crate::hex::{Hex, unhex};
use crate::manifest::{DimCut, TensorSpec};
use crate::ranges::BlockRanges;

macro_rules! files {
    ($($name:literal)*) => {
        /// The files by name, in the order of [`cases`].
        const FILES: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../../../testdata/delta/", $name, ".json")))),*];
    };
}
files!("sparse" "bitmap" "dense" "context" "escapes" "strided" "parts" "wide" "nothing");

/// What a file holds.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Vector {
    about: String,
    manifest: Value,
    /// The base image in hexadecimal; what is missing at its end is zeros.
    base: String,
    /// Where the target differs from the base: (offset in the image, bytes in hexadecimal).
    target: Vec<(usize, String)>,
    /// Whether the encoder tries context records.
    context: bool,
    /// The blocks that each part was encoded from.
    parts: Vec<BlockRanges>,
    /// The blocks that have records, and their modes.
    records: Vec<(u32, Mode)>,
    /// The container in hexadecimal.
    container: String,
}

impl Vector {
    fn manifest(&self) -> Manifest {
        Manifest::from_json(self.manifest.to_string().as_bytes()).unwrap()
    }

    fn images(&self) -> (Vec<u8>, Vec<u8>) {
        let mut base = unhex(&self.base);
        base.resize(self.manifest().data_bytes() as usize, 0);
        let mut target = base.clone();
        for (offset, hex) in &self.target {
            let bytes = unhex(hex);
            target[*offset..][..bytes.len()].copy_from_slice(&bytes);
        }
        (base, target)
    }

    fn encode(&self) -> Vec<u8> {
        let encoder = if self.context { Encoder::with_context() } else { Encoder::plain() };
        let (base, target) = self.images();
        make_parts(&self.manifest(), (41, 42), &base, &target, encoder, &self.parts)
    }
}

/// How a test case comes about.
struct Case {
    about: &'static str,
    manifest: Manifest,
    base: Vec<u8>,
    target: Vec<u8>,
    context: bool,
    parts: Vec<BlockRanges>,
}

impl Case {
    /// A case of one part, in plain mode, in which nothing changes yet.
    fn new(about: &'static str, specs: &[(&str, Dtype, &[u64])], base: Vec<u8>) -> Case {
        let specs = specs.iter().map(|&(name, dtype, shape)| TensorSpec::new(name, dtype, shape));
        let manifest = Manifest::new(specs, BTreeMap::new()).unwrap();
        let parts = vec![(0..manifest.cuts().blocks()).into()];
        Case { about, manifest, target: base.clone(), base, context: false, parts }
    }

    /// Changes units of a tensor: gives each unit's index and old bits, takes the new ones.
    fn change(mut self, tensor: &str, mut new: impl FnMut(usize, u64) -> u64) -> Case {
        let t = &self.manifest.tensors()[self.manifest.find(tensor).unwrap()];
        let bytes = &mut self.target[t.offset as usize..][..t.bytes as usize];
        for (i, slot) in bytes.chunks_exact_mut(t.dtype.unit()).enumerate() {
            let value = new(i, crate::kernel::read_unit(slot));
            slot.copy_from_slice(&value.to_le_bytes()[..slot.len()]);
        }
        self
    }

    fn vector(&self) -> Vector {
        let differs = |i: &usize| self.base[*i] != self.target[*i];
        let mut target: Vec<(usize, Vec<u8>)> = Vec::new();
        for i in (0..self.base.len()).filter(differs) {
            match target.last_mut() {
                Some((offset, bytes)) if *offset + bytes.len() == i => bytes.push(self.target[i]),
                Some(_) | None => target.push((i, vec![self.target[i]])),
            }
        }
        let zeros = self.base.iter().rev().take_while(|&&b| b == 0).count();
        let mut vector = Vector {
            about: self.about.to_owned(),
            manifest: serde_json::from_str(&self.manifest.to_json()).unwrap(),
            base: Hex(&self.base[..self.base.len() - zeros]).to_string(),
            target: target.into_iter().map(|(offset, bytes)| (offset, Hex(&bytes).to_string())).collect(),
            context: self.context,
            parts: self.parts.clone(),
            records: Vec::new(),
            container: String::new(),
        };
        let container = vector.encode();
        vector.records = Delta::parse(&container).unwrap().records().map(|r| (r.block, r.mode)).collect();
        vector.container = Hex(&container).to_string();
        vector
    }
}

/// Values of a float dtype of which each octave is half as full as the one above it.
fn octaves(bits: &mut Bits, dtype: Dtype, top: u64, count: usize) -> Vec<u8> {
    let Line::Float(mantissa) = dtype.line() else { panic!("{dtype} is not a float") };
    let one = |_| {
        let exponent = top - u64::from(bits.next().trailing_zeros()).min(top);
        let sign = bits.next() << (8 * dtype.unit() - 1);
        let value = sign | exponent << mantissa | bits.next() & ((1 << mantissa) - 1);
        value.to_le_bytes()[..dtype.unit()].to_vec()
    };
    (0..count).flat_map(one).collect()
}

/// One step up or down the bit patterns, seldom two.
fn nudge(bits: &mut Bits, old: u64) -> u64 {
    let step = if bits.next().is_multiple_of(8) { 2 } else { 1 };
    if bits.next().is_multiple_of(2) { old.wrapping_add(step) } else { old.wrapping_sub(step) }
}

fn cases() -> Vec<Case> {
    let bits = &mut Bits(2);
    vec![
        sparse(bits),
        bitmap(bits),
        dense(bits),
        context(bits),
        escapes(bits),
        strided(bits),
        parts(bits),
        wide(),
        { Case::new("nothing changes: no parts", &[("w", Dtype::BF16, &[4])], vec![1, 2, 3, 4, 5, 6, 7, 8]) },
    ]
}

fn sparse(bits: &mut Bits) -> Case {
    let specs: [(&str, Dtype, &[u64]); 4] = [
        ("eight", Dtype::I64, &[24]),
        ("four", Dtype::F32, &[32]),
        ("two", Dtype::BF16, &[96]),
        ("one", Dtype::F8E4M3, &[80]),
    ];
    let about = "a few steps in units of every size; in \"two\" also zeros of both signs, infinity and NaNs";
    let mut base = bits.bytes(24 * 8 + 32 * 4 + 96 * 2 + 80);
    let two = 24 * 8 + 32 * 4;
    // -0, +0, the largest finite number, a NaN.
    base[two..two + 8].copy_from_slice(&[0x00, 0x80, 0x00, 0x00, 0x7f, 0x7f, 0xc1, 0x7f]);
    let mut some = |every: usize| {
        let mut bits = Bits(bits.next());
        move |i: usize, old: u64| if i % every == 2 { nudge(&mut bits, old) } else { old }
    };
    let (eight, four, one) = (some(7), some(9), some(13));
    Case::new(about, &specs, base).change("eight", eight).change("four", four).change("one", one).change(
        "two",
        |i, old| match i {
            // To +0, to -0, to infinity, to the next payload.
            0 => 0x0000,
            1 => 0x8000,
            2 => 0x7f80,
            3 => 0x7fc2,
            40 | 41 | 93 => old ^ 1,
            _ => old,
        },
    )
}

fn bitmap(bits: &mut Bits) -> Case {
    let specs: [(&str, Dtype, &[u64]); 4] = [
        ("eight", Dtype::F64, &[24]),
        ("four", Dtype::U32, &[40]),
        ("two", Dtype::F16, &[90]),
        ("one", Dtype::U8, &[120]),
    ];
    let base = bits.bytes(24 * 8 + 40 * 4 + 90 * 2 + 120);
    let mut case = Case::new("most units change, up to the last, by a step or two", &specs, base);
    for (name, _, shape) in specs {
        let last = shape[0] as usize - 1;
        case = case.change(name, |i, old| {
            if i == last || !bits.next().is_multiple_of(3) { nudge(bits, old) } else { old }
        });
    }
    case
}

fn dense(bits: &mut Bits) -> Case {
    let specs: [(&str, Dtype, &[u64]); 4] = [
        ("eight", Dtype::U64, &[10]),
        ("four", Dtype::C64, &[8]),
        ("two", Dtype::I16, &[30]),
        ("one", Dtype::F8E5M2, &[50]),
    ];
    let base = bits.bytes(10 * 8 + 16 * 4 + 30 * 2 + 50);
    let mut case = Case::new("every unit becomes anything", &specs, base);
    for (name, ..) in specs {
        case = case.change(name, |_, _| bits.next());
    }
    case
}

fn context(bits: &mut Bits) -> Case {
    let specs: [(&str, Dtype, &[u64]); 4] = [
        ("eight", Dtype::F64, &[1024]),
        ("four", Dtype::F32, &[1024]),
        ("two", Dtype::BF16, &[1024]),
        ("one", Dtype::F8E4M3, &[1024]),
    ];
    let tops = [1016, 120, 123, 12];
    let mut base = Vec::new();
    for ((_, dtype, shape), top) in specs.iter().zip(tops) {
        base.extend(octaves(bits, *dtype, top, shape[0] as usize));
    }
    let about = "the smaller the weight, the likelier it changes; the encoder tries context records";
    let mut case = Case { context: true, ..Case::new(about, &specs, base) };
    for ((name, dtype, _), top) in specs.into_iter().zip(tops) {
        let Line::Float(mantissa) = dtype.line() else { panic!("{dtype} is not a float") };
        case = case.change(name, |_, old| {
            let octave = top - (old << (65 - 8 * dtype.unit()) >> (65 - 8 * dtype.unit()) >> mantissa);
            let small = octave >= 4 && bits.next() % 16 < 15 || bits.next().is_multiple_of(60);
            if small { nudge(bits, old) } else { old }
        });
    }
    case
}

fn escapes(bits: &mut Bits) -> Case {
    let specs: [(&str, Dtype, &[u64]); 4] = [
        ("eight", Dtype::F64, &[40]),
        ("eight.wide", Dtype::U64, &[64]),
        ("two", Dtype::BF16, &[100]),
        ("one", Dtype::U8, &[90]),
    ];
    let base = bits.bytes(40 * 8 + 64 * 8 + 100 * 2 + 90);
    let about = "steps beyond 16 · 2^k are escaped, the longest among them; low parts of 58 bits and more";
    Case::new(about, &specs, base)
        .change("eight", |i, old| match i {
            3 => old ^ 1 << 63,
            5 => old ^ 1,
            // Half of the line away: the one step that has no opposite.
            20 => !old,
            21 | 22 | 30 => old.wrapping_add(2),
            _ => old,
        })
        .change(
            "eight.wide",
            |i, old| if i % 11 == 1 { old.wrapping_add(1 << 58 | bits.next() >> 6) } else { old },
        )
        .change("two", |i, old| match i % 10 {
            1 | 4 => old ^ 1,
            7 if i > 50 => old ^ 0x4000,
            _ => old,
        })
        .change("one", |i, old| match i % 9 {
            0 => old.wrapping_add(1),
            1 if i < 20 => old.wrapping_add(128),
            _ => old,
        })
}

fn strided(bits: &mut Bits) -> Case {
    let specs: [(&str, Dtype, &[u64]); 3] = [
        ("cube", Dtype::F32, &[3, 4, 5]),
        ("matrix", Dtype::BF16, &[9, 24]),
        ("packed", Dtype::F4, &[4, 12]),
    ];
    let about = "cuts through rows and columns, through the middle of three dimensions, between packed bytes";
    let base = bits.bytes(60 * 4 + 216 * 2 + 24);
    let mut case = Case::new(about, &specs, base);
    let cut = |dim, bounds: &[u64]| DimCut { dim, bounds: bounds.to_vec() };
    let cuts = BTreeMap::from([
        ("cube".to_owned(), vec![cut(1, &[1])]),
        ("matrix".to_owned(), vec![cut(0, &[4]), cut(1, &[10, 16])]),
        ("packed".to_owned(), vec![cut(1, &[4])]),
    ]);
    case.manifest = case.manifest.with_cuts(&cuts).unwrap();
    case.parts = vec![(0..case.manifest.cuts().blocks()).into()];
    for (name, ..) in specs {
        case = case.change(name, |_, old| if bits.next().is_multiple_of(8) { nudge(bits, old) } else { old });
    }
    case
}

fn parts(bits: &mut Bits) -> Case {
    let specs: [(&str, Dtype, &[u64]); 6] = [
        ("a", Dtype::F32, &[20]),
        ("b", Dtype::F32, &[20]),
        ("c", Dtype::BF16, &[40]),
        ("d", Dtype::BF16, &[0, 7]),
        ("e", Dtype::BF16, &[]),
        ("f", Dtype::I8, &[50]),
    ];
    let about = "three parts out of order; \"b\" and all of the third part do not change, \"d\" is empty";
    let base = bits.bytes(20 * 4 * 2 + 40 * 2 + 2 + 50);
    let mut case = Case::new(about, &specs, base);
    for name in ["a", "c", "e", "f"] {
        case = case.change(name, |i, old| if i % 6 == 0 { nudge(bits, old) } else { old });
    }
    case.parts = vec![[2..3, 4..5].into_iter().collect(), [0..1, 3..4].into_iter().collect(), (1..2).into()];
    case
}

fn wide() -> Case {
    let specs: [(&str, Dtype, &[u64]); 2] = [("two", Dtype::BF16, &[65_536]), ("one", Dtype::U8, &[70_000])];
    let about = "whole blocks of 65,536 units, the last of which changes; a tensor of two blocks";
    Case::new(about, &specs, vec![0; 65_536 * 2 + 70_000])
        .change("two", |i, old| if i == 65_535 { 0x8000 } else { old })
        .change("one", |i, old| match i {
            0 | 65_534 | 65_535 => 0xff,
            65_536 | 69_999 => 1,
            _ => old,
        })
}

#[test]
fn golden_deltas_encode_to_the_same_bytes_and_apply_to_their_targets() {
    let mut seen = BTreeSet::new();
    for (name, file) in FILES {
        let vector: Vector = serde_json::from_str(file).unwrap();
        let container = unhex(&vector.container);
        assert!(container.len() < 4096, "{name} has {} bytes", container.len());
        assert!(vector.encode() == container, "{name}: the encoder makes other bytes");
        let (m, (base, target)) = (vector.manifest(), vector.images());
        let delta = Delta::parse(&container).unwrap();
        let (mut image, mut sums) = (base.clone(), table(&m, &base));
        let outcomes = apply_all(&m, &mut image, &mut sums, &delta);
        assert!(outcomes.iter().all(|&o| o == Outcome::Applied), "{name}: {outcomes:?}");
        assert!(image == target, "{name}: not the target");
        assert_eq!(sums.digest(&m), delta.header.target_digest, "{name}");
        assert!(delta.records().map(|r| (r.block, r.mode)).eq(vector.records), "{name}");
        seen.extend(delta.records().map(|r| (r.mode, Tile::of(&m, r.block).unwrap().unit)));
    }
    let all = Mode::ALL.into_iter().flat_map(|mode| [1, 2, 4, 8].map(|unit| (mode, unit)));
    assert_eq!(seen, all.collect(), "every mode with every unit");
}

#[test]
fn golden_deltas_are_those_of_their_generator() {
    assert_eq!(cases().len(), FILES.len());
    for (case, (name, file)) in cases().iter().zip(FILES) {
        assert_eq!(case.vector(), serde_json::from_str(file).unwrap(), "{name}");
    }
}

#[test]
#[ignore = "prints the golden files; it checks nothing"]
#[allow(clippy::print_stdout)]
fn print_golden_deltas() {
    for (case, (name, _)) in cases().iter().zip(FILES) {
        let vector = serde_json::to_value(case.vector()).unwrap();
        let fields = vector.as_object().unwrap().iter().map(|(key, value)| format!(" \"{key}\": {value}"));
        println!("{name}.json\n{{\n{}\n}}", fields.collect::<Vec<_>>().join(",\n"));
    }
}
