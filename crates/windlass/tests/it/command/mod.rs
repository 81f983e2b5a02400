//! Runs the built command and makes checkpoints for it.
#![allow(dead_code, unreachable_pub)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use windlass_core::Dtype;

pub fn windlass() -> Command {
    Command::new(env!("CARGO_BIN_EXE_windlass"))
}

/// What a run gave.
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// The last line of standard output as JSON.
    pub fn json(&self) -> Value {
        let line = self.stdout.lines().last().unwrap_or_default();
        serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {:?} {:?}", self.stdout, self.stderr))
    }

    pub fn ok(self) -> Ran {
        assert_eq!(self.code, 0, "{} {}", self.stdout, self.stderr);
        self
    }
}

pub fn run<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Ran {
    let Output { status, stdout, stderr } = windlass().args(args).output().unwrap();
    let text = |b| String::from_utf8(b).unwrap();
    Ran { code: status.code().unwrap_or(-1), stdout: text(stdout), stderr: text(stderr) }
}

/// Runs with arguments that are words and paths.
macro_rules! run {
    ($($arg:expr),* $(,)?) => {
        $crate::command::run(&[$(std::ffi::OsStr::new($arg)),*])
    };
}

/// A little random number generator.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 13
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.roll() as u8).collect()
    }
}

/// A tensor for a file.
#[derive(Clone, Debug)]
pub struct Made {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Made {
    pub fn new(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Made {
        let need = dtype.bytes(shape.iter().product::<usize>() as u64).unwrap() as usize;
        assert_eq!(bytes.len(), need, "{name}");
        Made { name: name.into(), dtype, shape: shape.into(), bytes }
    }

    pub fn random(name: &str, dtype: Dtype, shape: &[usize], dice: &mut Dice) -> Made {
        let need = dtype.bytes(shape.iter().product::<usize>() as u64).unwrap() as usize;
        Made::new(name, dtype, shape, dice.bytes(need))
    }
}

/// Saves a file the way the safetensors library does.
pub fn save(path: &Path, tensors: &[Made]) {
    let views = tensors.iter().map(|t| {
        let dtype = serde_json::from_str(&format!("{:?}", t.dtype.safetensors_name())).unwrap();
        let view = safetensors::tensor::TensorView::new(dtype, t.shape.clone(), &t.bytes).unwrap();
        (t.name.clone(), view)
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// One tensor of every dtype, longer than a block where `long`, an empty one and a scalar.
pub fn zoo(dice: &mut Dice, long: bool) -> Vec<Made> {
    let n = if long { 70_000 } else { 48 };
    let mut all: Vec<Made> =
        Dtype::ALL.iter().map(|&d| Made::random(&format!("zoo.{d}"), d, &[4, n / 4], dice)).collect();
    all.push(Made::random("zoo.empty", Dtype::BF16, &[0, 7], dice));
    all.push(Made::random("zoo.scalar", Dtype::F32, &[], dice));
    all.push(Made::random("zoo.counter", Dtype::I64, &[], dice));
    all
}

/// The same tensors with about `share` of the bytes changed.
pub fn changed(tensors: &[Made], share: f64, dice: &mut Dice) -> Vec<Made> {
    let mut out = tensors.to_vec();
    for t in &mut out {
        for b in &mut t.bytes {
            if (dice.roll() % 1_000_000) as f64 <= share * 1_000_000.0 && share > 0.0 {
                *b = b.wrapping_add(1 + (dice.roll() % 255) as u8);
            }
        }
    }
    out
}

/// Saves two versions of a bf16 model. Small weights change more often than large ones, mostly by one step.
pub fn save_synthetic(dir: &Path, elements: u64, change: f64) -> (PathBuf, PathBuf) {
    const TENSORS: usize = 8;
    let mut dice = Dice(3);
    let (mut old, mut new) = (Vec::new(), Vec::new());
    for i in 0..TENSORS {
        let count = elements as usize / TENSORS;
        let (mut before, mut after) = (Vec::with_capacity(2 * count), Vec::with_capacity(2 * count));
        for _ in 0..count {
            let roll = dice.roll();
            let smallness = (roll >> 32 | 1 << 12).trailing_zeros() as u16;
            let bits = (roll as u16 & 0x807f) | (121 - smallness) << 7;
            let chance = change * (0.5 + 0.5 * f64::from(smallness));
            let changes = (dice.roll() & 0xff_ffff) as f64 <= chance * f64::from(0xff_ffff);
            let steps = if roll >> 16 & 7 == 0 { 2 + (roll >> 20 & 3) as u16 } else { 1 };
            let step = if changes { steps } else { 0 };
            before.extend(bits.to_le_bytes());
            after.extend(if roll >> 24 & 1 == 0 { bits + step } else { bits - step }.to_le_bytes());
        }
        let name = format!("model.layers.{i}.weight");
        old.push(Made::new(&name, Dtype::BF16, &[count], before));
        new.push(Made::new(&name, Dtype::BF16, &[count], after));
    }
    let (base, target) = (dir.join("base.safetensors"), dir.join("new.safetensors"));
    save(&base, &old);
    save(&target, &new);
    (base, target)
}

/// Names of all files in a directory, hidden ones too.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Interrupts a command as Ctrl-C does, if it is still running: the number of one that has been waited for may
/// belong to another process by now.
pub fn interrupt(child: &mut std::process::Child) -> bool {
    child.try_wait().unwrap().is_none()
        && std::process::Command::new("kill")
            .args(["-INT", &child.id().to_string()])
            .status()
            .unwrap()
            .success()
}
