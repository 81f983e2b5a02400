//! `bench codec`: encoding and applying, against reading two images, copying one, and simpler encodings.
//!
//! *Encode* is what the agent does at seal time when it knows the sums of the base: diff and encode, the new sums
//! included. *Seal* sums the base too. *Apply* changes an image in memory with the sums of its blocks at hand,
//! checks each block, and writes it.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};
use windlass_core::delta::{Delta, Encoder};
use windlass_core::digest::{SumTable, sum_block};
use windlass_core::identity::{Incarnation, ModelId};
use windlass_core::kernel::Kernels;
use windlass_data::seal::Names;
use windlass_data::seal::pass::{self, Pair, Run, Scratch, Visit};
use windlass_data::work;

use super::{BenchConfig, Figure, Images, Probe, Timing, machine};
use crate::console::round;
use crate::console::{Session, Table, bytes, count, percent};
use crate::error::Error;
use crate::lab::image;
use crate::tools::delta::bits_per_change;
use crate::tools::limits;

type Mode = (&'static str, fn() -> Encoder);

const MODES: [Mode; 2] = [("plain", Encoder::plain), ("context", Encoder::with_context)];

/// Change rates (in percent) and the bits for each change that both modes should not exceed there.
const SIZE_BARS: [(f64, [f64; 2]); 3] = [(0.57, [12.4, 9.0]), (1.5, [10.7, 7.9]), (3.6, [9.4, 7.2])];

/// Runs the bench and prints what came out.
pub(crate) fn run(config: &BenchConfig, session: &Session) -> Result<(), Error> {
    let images = Images::make(config, session)?;
    let bench = Bench { config, kernels: windlass_data::simd::kernels(), images: &images, session };
    let deltas = bench.deltas()?;
    let table = bench.table()?;
    let mut scratch = image::copy(&images.base)?;
    let figures = bench.measure(&deltas, &table, &mut scratch)?;
    figures.finish(session)
}

struct Bench<'a> {
    config: &'a BenchConfig,
    kernels: &'static dyn Kernels,
    images: &'a Images,
    session: &'a Session,
}

impl Bench<'_> {
    /// The container of each mode, as it would be sent.
    fn deltas(&self) -> Result<[Vec<u8>; 2], Error> {
        let manifest = &self.images.manifest;
        let images = self.images;
        let (old, new) =
            (|t| image::tensor(manifest, &images.base, t), |t| image::tensor(manifest, &images.next, t));
        let pair = Pair { manifest, old: &old, new: &new, old_sums: None };
        let progress = self.session.progress("encoding", manifest.data_bytes());
        let (threads, cancel) = (self.config.threads, self.session.cancel());
        let watch = |bytes| progress.add(bytes);
        let run = Run { kernels: self.kernels, threads, stop: cancel, progress: &watch };
        let mut parts = [Vec::new(), Vec::new()];
        let totals = pass::run(
            run,
            pair,
            &(0..manifest.cuts().blocks()).into(),
            &MODES.map(|m| m.1),
            |(): &mut (), _: &Visit<'_>| {},
            |i, bytes| {
                parts[i].extend_from_slice(bytes);
                Ok::<(), Error>(())
            },
        )?;
        let layout = manifest.layout_hash();
        let model_id = ModelId::new("bench").map_err(|e| Error::Bug(e.to_string()))?;
        let names = Names { model_id, incarnation: Incarnation(0), base: 0, target: 1 };
        let header =
            names.header(manifest, totals.base.digest(layout), totals.target.digest(layout)).to_bytes();
        Ok(parts.map(|p| [header.as_slice(), p.as_slice()].concat()))
    }

    fn table(&self) -> Result<SumTable, Error> {
        let with = (self.config.threads, self.session.cancel());
        Ok(windlass_data::seal::sums_of_all(self.kernels, &self.images.manifest, &self.images.base, with)?)
    }

    /// Encodes every block into each thread's own memory.
    fn encode(&self, encoder: fn() -> Encoder, table: Option<&SumTable>) -> Result<(), Error> {
        let manifest = &self.images.manifest;
        let images = self.images;
        let (old, new) =
            (|t| image::tensor(manifest, &images.base, t), |t| image::tensor(manifest, &images.next, t));
        let pair = Pair { manifest, old: &old, new: &new, old_sums: None };
        let state = || (encoder(), Vec::with_capacity(1 << 20), Scratch::default());
        let (threads, cancel) = (self.config.threads, self.session.cancel());
        work::each(
            threads,
            u64::from(manifest.cuts().blocks()),
            cancel,
            state,
            |(encoder, out, scratch), i| {
                let (tile, old, new) = pair.block(i as u32, scratch)?;
                let sum = match table {
                    Some(table) => table.get(tile.number),
                    None => sum_block(self.kernels, &tile.block, tile.unit, old),
                };
                if out.len() > 1 << 19 {
                    out.clear();
                }
                std::hint::black_box(encoder.encode(self.kernels, &tile, (old, sum), new, out));
                Ok::<(), Error>(())
            },
        )?;
        Ok(())
    }

    fn measure(
        &self,
        deltas: &[Vec<u8>; 2],
        table: &SumTable,
        scratch: &mut Vec<u8>,
    ) -> Result<Figures, Error> {
        let (base, next) = (&self.images.base, &self.images.next);
        let threads = self.config.threads;
        let parse = |bytes| Delta::parse(bytes).map_err(|e| Error::Bug(e.to_string()));
        let parsed = [parse(&deltas[0])?, parse(&deltas[1])?];
        let scratch = std::cell::RefCell::new(scratch);
        let reset = || {
            limits::copy(base, &mut scratch.borrow_mut(), threads);
            Ok(())
        };
        let apply = |mode: usize| {
            let (manifest, with) = (&self.images.manifest, (threads, self.session.cancel()));
            image::apply(self.kernels, manifest, &parsed[mode], table, &mut scratch.borrow_mut(), with)?;
            Ok(())
        };
        let mut index_bytes = 0;
        let timings = Timing::of(
            self.config.repeats,
            [
                Probe::new(|| {
                    limits::read2(base, next, threads);
                    Ok(())
                }),
                Probe::new(reset),
                Probe::new(|| self.encode(MODES[0].1, Some(table))),
                Probe::new(|| self.encode(MODES[1].1, Some(table))),
                Probe::new(|| self.encode(MODES[0].1, None)),
                Probe::new(|| self.encode(MODES[1].1, None)),
                Probe::after(reset, || apply(0)),
                Probe::after(reset, || apply(1)),
                Probe::new(|| {
                    index_bytes = limits::index32(base, next, threads);
                    Ok(())
                }),
            ],
        )?;
        // What was timed last was the right thing to time only if it gives the right image.
        if scratch.borrow().as_slice() != next.as_slice() {
            return Err(Error::Bug("the applied image is not the newer one".into()));
        }
        #[cfg(feature = "zstd")]
        let zstd = {
            let mut bytes = 0;
            let probe = Probe::new(|| {
                bytes = limits::xor_zstd(base, next, threads);
                Ok(())
            });
            let [time] = Timing::of(self.config.repeats.min(2), [probe])?;
            Some((bytes, time))
        };
        #[cfg(not(feature = "zstd"))]
        let zstd = None;
        Ok(Figures {
            config: *self.config,
            elements: self.images.elements(),
            image: base.len(),
            changed: parsed[0].changes,
            sizes: [deltas[0].len() as u64, deltas[1].len() as u64],
            timings,
            zstd,
            index_bytes,
        })
    }
}

struct Figures {
    config: BenchConfig,
    elements: u64,
    image: usize,
    changed: u64,
    sizes: [u64; 2],
    /// read2, copy, encode × 2, seal × 2, apply × 2, index32.
    timings: [Timing; 9],
    /// Bytes and time of XOR and zstd, in a build that has it.
    zstd: Option<(u64, Timing)>,
    index_bytes: u64,
}

impl Figures {
    fn gbps(&self, probe: usize) -> f64 {
        self.timings[probe].gbps(self.image)
    }

    fn rate(&self) -> f64 {
        self.changed as f64 / self.elements as f64
    }

    fn bits(&self, bytes: u64) -> f64 {
        bits_per_change(bytes, self.changed)
    }

    fn bars(&self) -> Vec<Figure> {
        let at_least = |name: String, value, bar| Figure { name, value, bar, at_least: true };
        let mut bars = Vec::new();
        let percent = self.rate() * 100.0;
        // Steps of training change up to a few percent; the bars are for those.
        if percent <= 4.0 {
            for (m, (mode, _)) in MODES.iter().enumerate() {
                bars.push(at_least(format!("{mode} encode / read2"), self.gbps(2 + m) / self.gbps(0), 0.6));
                bars.push(at_least(format!("{mode} seal / read2"), self.gbps(4 + m) / self.gbps(0), 0.4));
            }
        }
        // The time of applying grows with the changes; its bar is set at 1 %.
        if percent <= 1.1 {
            bars.push(at_least("plain apply / copy".into(), self.gbps(6) / self.gbps(1), 2.0));
        }
        // Bars of size are given at three rates; near one of them it applies.
        if let Some((_, bits)) = SIZE_BARS.iter().find(|(at, _)| (percent / at - 1.0).abs() < 0.12) {
            for (m, (mode, _)) in MODES.iter().enumerate() {
                let (name, value) = (format!("{mode} bits per change"), self.bits(self.sizes[m]));
                bars.push(Figure { name, value, bar: bits[m], at_least: false });
            }
        }
        bars
    }

    fn finish(&self, session: &Session) -> Result<(), Error> {
        let bars = self.bars();
        let mut modes = Map::new();
        for (m, (mode, _)) in MODES.iter().enumerate() {
            let object = json!({
                "bytes": self.sizes[m],
                "bits_per_change": round(self.bits(self.sizes[m])),
                "encode_gbps": round(self.gbps(2 + m)),
                "seal_gbps": round(self.gbps(4 + m)),
                "apply_gbps": round(self.gbps(6 + m)),
                "ratio_encode": round(self.gbps(2 + m) / self.gbps(0)),
                "ratio_seal": round(self.gbps(4 + m) / self.gbps(0)),
                "ratio_apply": round(self.gbps(6 + m) / self.gbps(1)),
                "spread": {
                    "encode": round(self.timings[2 + m].spread()),
                    "seal": round(self.timings[4 + m].spread()),
                    "apply": round(self.timings[6 + m].spread()),
                },
            });
            modes.insert((*mode).into(), object);
        }
        let object = json!({
            "bench": "codec",
            "elements": self.elements,
            "bytes": self.image,
            "changed": self.changed,
            "change_rate": round(self.rate()),
            "threads": self.config.threads,
            "repeats": self.config.repeats,
            "seed": self.config.model.seed,
            "kernels": windlass_data::simd::kernels_name(),
            "machine": machine(),
            "modes": modes,
            "read2_gbps": round(self.gbps(0)),
            "copy_gbps": round(self.gbps(1)),
            "xor_zstd_bits": self.zstd.as_ref().map(|(bytes, _)| round(self.bits(*bytes))),
            "xor_zstd_gbps": self.zstd.as_ref().map(|(_, time)| round(time.gbps(self.image))),
            "idx32_bits": round(self.bits(self.index_bytes)),
            "idx32_gbps": round(self.gbps(8)),
            "spread": { "read2": round(self.timings[0].spread()), "copy": round(self.timings[1].spread()) },
            "bars": bars.iter().map(Figure::json).collect::<Vec<Value>>(),
        });
        session.finish(object, |out| self.human(&bars, out))
    }

    fn human(&self, bars: &[Figure], out: &mut String) {
        let _ = writeln!(
            out,
            "codec on {} bf16 elements ({}), {} changed, {} threads, {} kernels, median of {}\n",
            count(self.elements),
            bytes(self.image as u64),
            percent(self.rate()),
            self.config.threads,
            windlass_data::simd::kernels_name(),
            self.config.repeats
        );
        let mut t = Table::new(["", "bits per change", "GB/s of image", "spread"]);
        let mut row = |name: &str, bits: Option<u64>, timing: &Timing| {
            let bits = bits.map_or(String::new(), |b| format!("{:.2}", self.bits(b)));
            let (rate, spread) =
                (format!("{:.2}", timing.gbps(self.image)), format!("{:.0} %", timing.spread() * 100.0));
            t.row([name.into(), bits, rate, spread]);
        };
        row("reading two images", None, &self.timings[0]);
        row("copying an image", None, &self.timings[1]);
        for (m, (mode, _)) in MODES.iter().enumerate() {
            row(&format!("{mode} encode"), Some(self.sizes[m]), &self.timings[2 + m]);
            row(&format!("{mode} seal"), None, &self.timings[4 + m]);
            row(&format!("{mode} apply"), None, &self.timings[6 + m]);
        }
        if let Some((bytes, time)) = &self.zstd {
            row("XOR + zstd 1", Some(*bytes), time);
        }
        row("index32 + value", Some(self.index_bytes), &self.timings[8]);
        t.write(out);
        out.push('\n');
        if bars.is_empty() {
            let _ = writeln!(out, "  no bars are set at this change rate");
            return;
        }
        let mut t = Table::new(["bar", "value", "wanted", ""]);
        for bar in bars {
            t.row(bar.cells());
        }
        t.write(out);
    }
}
