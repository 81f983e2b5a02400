//! Benchmarks: each measures a component of Windlass against the machine's limit, in the same run.
//!
//! Owns: what is measured and how, and the bars. Figures are ratios to a limit measured with the same threads
//! on the same memory, because machines differ; rates are GB (10⁹ bytes) of one image a second. All memory is
//! touched before it is timed, every figure is the median of several rounds, and the spread is given with it.

pub(crate) mod codec;
pub(crate) mod controller;
pub(crate) mod digest;
pub(crate) mod fanout;
pub(crate) mod load;
pub(crate) mod nixl;
pub(crate) mod offload;
pub(crate) mod rig;
pub(crate) mod scale;
pub(crate) mod seal;
pub(crate) mod sync;
pub(crate) mod tcp;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};

use crate::console::round;
use crate::console::{Session, Table, bytes, count, percent};
use crate::error::Error;
use crate::lab::image;
use windlass_core::manifest::Manifest;
use windlass_synth::{Synth, SynthConfig};

/// What to measure on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BenchConfig {
    pub(crate) model: SynthConfig,
    /// How many threads everything uses.
    pub(crate) threads: usize,
    /// Rounds of each measurement.
    pub(crate) repeats: usize,
}

/// What to measure the data plane on.
#[derive(Clone, Debug)]
pub(crate) struct PlaneConfig {
    /// The model, the threads and the rounds.
    pub(crate) bench: BenchConfig,
    /// Streams of a transfer.
    pub(crate) streams: u16,
    /// Where regions and images are made.
    pub(crate) region_dir: PathBuf,
}

impl PlaneConfig {
    /// What every result says about how it came about.
    fn json(&self, name: &str, images: &Images) -> Value {
        let BenchConfig { model, threads, repeats } = self.bench;
        json!({
            "bench": name,
            "elements": images.elements(),
            "bytes": images.base.len(),
            "change": model.change,
            "threads": threads,
            "streams": self.streams,
            "repeats": repeats,
            "seed": model.seed,
            "kernels": windlass_data::simd::kernels_name(),
            "machine": machine(),
        })
    }

    /// The same for people.
    fn title(&self, name: &str, images: &Images, out: &mut String) {
        let _ = writeln!(
            out,
            "{name}: {} bf16 elements ({}), {} changed, {} threads, {} streams, median of {}\n",
            count(images.elements()),
            bytes(images.base.len() as u64),
            percent(self.bench.model.change),
            self.bench.threads,
            self.streams,
            self.bench.repeats
        );
    }
}

/// Adds the figures of a bench to what every result says.
fn merge(mut object: Value, figures: Value) -> Value {
    if let (Some(object), Value::Object(figures)) = (object.as_object_mut(), figures) {
        object.extend(figures);
    }
    object
}

/// Two versions of a synthetic model, in memory.
pub(crate) struct Images {
    pub(crate) manifest: Manifest,
    pub(crate) base: Vec<u8>,
    pub(crate) next: Vec<u8>,
}

impl Images {
    /// Makes both with several threads.
    pub(crate) fn make(config: &BenchConfig, session: &Session) -> Result<Images, Error> {
        let synth = Synth::new(config.model)?;
        let manifest = image::manifest_of(&synth)?;
        let len = manifest.data_bytes() as usize;
        let (mut base, mut next) = (image::blank(&manifest)?, image::blank(&manifest)?);
        let progress = session.progress("making", 2 * len as u64);
        for (step, image) in [&mut base, &mut next].into_iter().enumerate() {
            let watch = (session.cancel(), &progress);
            image::fill(&synth, &manifest, step as u32, image, config.threads, watch)?;
        }
        Ok(Images { manifest, base, next })
    }

    /// Elements of one image.
    pub(crate) fn elements(&self) -> u64 {
        self.base.len() as u64 / 2
    }
}

/// How long something took, over several rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// The middle one, in seconds.
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// Something to be timed.
pub(crate) struct Probe<'a> {
    setup: Box<dyn FnMut() -> Result<(), Error> + 'a>,
    round: Box<dyn FnMut() -> Result<(), Error> + 'a>,
}

impl<'a> Probe<'a> {
    /// Times `round`.
    pub(crate) fn new(round: impl FnMut() -> Result<(), Error> + 'a) -> Probe<'a> {
        Probe::after(|| Ok(()), round)
    }

    /// Times `round`, each after a `setup` that is not timed.
    pub(crate) fn after(
        setup: impl FnMut() -> Result<(), Error> + 'a,
        round: impl FnMut() -> Result<(), Error> + 'a,
    ) -> Probe<'a> {
        Probe { setup: Box::new(setup), round: Box::new(round) }
    }
}

impl Timing {
    /// Times all probes in turn, so many times, after one turn that is not counted. Taking turns lets whatever
    /// else the machine is doing fall on all of them alike.
    pub(crate) fn of<const N: usize>(repeats: usize, probes: [Probe<'_>; N]) -> Result<[Timing; N], Error> {
        Ok(rounds(repeats, probes)?.map(|times| Timing::from_rounds(&times)))
    }

    /// What these rounds come to by the clock. There is at least one.
    pub(crate) fn from_rounds(times: &[Spent]) -> Timing {
        let mut t: Vec<f64> = times.iter().map(|t| t.wall).collect();
        t.sort_by(f64::total_cmp);
        Timing { median: t[t.len() / 2], min: t[0], max: t[t.len() - 1] }
    }

    /// GB a second for so many bytes.
    pub(crate) fn gbps(&self, bytes: usize) -> f64 {
        bytes as f64 / self.median / 1e9
    }

    /// How far the rounds lie apart, relative to the median.
    pub(crate) fn spread(&self) -> f64 {
        (self.max - self.min) / self.median
    }
}

/// What a round took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spent {
    /// Seconds by the clock.
    pub(crate) wall: f64,
    /// Seconds of processor time, of all threads of this process. Where others use the machine as well this says
    /// more about the code than the clock does.
    pub(crate) cpu: f64,
}

impl Spent {
    /// Measures `work`.
    pub(crate) fn on<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<(T, Spent), Error> {
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let result = work()?;
        Ok((result, Spent { wall: start.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu }))
    }
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// What each probe took, round by round: all of them in turn, so many times, after one turn that is not counted.
pub(crate) fn rounds<const N: usize>(
    repeats: usize,
    mut probes: [Probe<'_>; N],
) -> Result<[Vec<Spent>; N], Error> {
    let mut times = [const { Vec::new() }; N];
    for turn in 0..=repeats.max(1) {
        for (probe, times) in probes.iter_mut().zip(&mut times) {
            (probe.setup)()?;
            let ((), spent) = Spent::on(&mut probe.round)?;
            if turn > 0 {
                times.push(spent);
            }
        }
    }
    Ok(times)
}

/// How much of the limit was reached: the middle of `limit ÷ time` over the rounds. Taken round by round, because
/// what slows the machine for a while then falls on both.
pub(crate) fn reached(times: &[Spent], limits: &[Spent]) -> f64 {
    middle(times, limits, |limit, time| limit.wall / time.wall)
}

/// The same for processor time: how much of it the limit needed, relative to what was spent.
pub(crate) fn reached_cpu(times: &[Spent], limits: &[Spent]) -> f64 {
    middle(times, limits, |limit, time| limit.cpu / time.cpu)
}

fn middle(times: &[Spent], limits: &[Spent], ratio: impl Fn(&Spent, &Spent) -> f64) -> f64 {
    let mut ratios: Vec<f64> = limits.iter().zip(times).map(|(limit, time)| ratio(limit, time)).collect();
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

/// A figure, its bar, and whether it is met.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) value: f64,
    /// What it should be.
    pub(crate) bar: f64,
    /// Whether larger is better.
    pub(crate) at_least: bool,
}

impl Figure {
    /// Whether it is met.
    pub(crate) fn met(&self) -> bool {
        if self.at_least { self.value >= self.bar } else { self.value <= self.bar }
    }

    fn cells(&self) -> [String; 4] {
        let sign = if self.at_least { "≥" } else { "≤" };
        let verdict = if self.met() { "met" } else { "MISSED" };
        [self.name.clone(), format!("{:.2}", self.value), format!("{sign} {}", self.bar), verdict.into()]
    }

    fn json(&self) -> Value {
        json!({ "name": self.name, "value": round(self.value), "bar": self.bar, "met": self.met() })
    }
}

/// The bars as a table.
fn write_bars(bars: &[Figure], out: &mut String) {
    let mut t = Table::new(["bar", "value", "wanted", ""]);
    for bar in bars {
        t.row(bar.cells());
    }
    t.write(out);
}

/// One line of a table of timings: name, rate, milliseconds, those of the quickest round, spread.
fn timing_row(name: &str, bytes: usize, timing: &Timing) -> [String; 5] {
    [
        name.to_owned(),
        format!("{:.2}", timing.gbps(bytes)),
        format!("{:.2}", timing.median * 1e3),
        format!("{:.2}", timing.min * 1e3),
        format!("{:.0} %", timing.spread() * 100.0),
    ]
}

/// The processor and its cores, as the system names them.
pub(crate) fn machine() -> Value {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':').map(|(_, m)| m.trim()));
    json!({
        "cpu": model.unwrap_or(std::env::consts::ARCH),
        "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
    })
}
