//! `windlass diff`: how two versions differ, and what a delta between them would cost.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};
use windlass_core::delta::line::Unit;
use windlass_core::delta::{Encoder, Mode, Tile};
use windlass_core::identity::{Incarnation, ModelId};
use windlass_core::kernel::Kernels;
use windlass_core::manifest::{Manifest, Tensor};
use windlass_data::file::Checkpoint;
use windlass_data::seal::Names;
use windlass_data::seal::pass::{self, LaneTotals, Pair, Run, Totals, Visit, mode_slot};

use crate::console::{Session, Table, bytes, count, percent};
use crate::error::Error;
use crate::tools::delta::{bits_per_change, same_layout};

/// The checked arguments of `diff`.
#[derive(Debug)]
pub(crate) struct Diff {
    pub(crate) a: PathBuf,
    pub(crate) b: PathBuf,
    /// How many threads to use.
    pub(crate) threads: usize,
    /// Rows of the table of tensors; 0 shows all.
    pub(crate) top: usize,
}

/// What a thread has seen.
#[derive(Default)]
struct Seen {
    positions: Vec<u16>,
    /// Changed units and changed elements by tensor.
    changed: Vec<(u64, u64)>,
    /// Changes by the binary logarithm of their distance.
    distances: Vec<u64>,
}

impl Seen {
    fn look(&mut self, kernels: &dyn Kernels, bits: u64, tile: &Tile, old: &[u8], new: &[u8]) {
        self.positions.clear();
        kernels.changed(old, new, tile.unit, &mut self.positions);
        if self.positions.is_empty() {
            return;
        }
        let t = tile.block.tensor as usize;
        self.changed.resize(self.changed.len().max(t + 1), (0, 0));
        let units = self.positions.len() as u64;
        let elements = if bits == 8 * tile.unit as u64 { units } else { self.elements(bits, tile, old, new) };
        self.changed[t].0 += units;
        self.changed[t].1 += elements;
        self.distances.resize(64, 0);
        match tile.unit {
            1 => self.measure::<u8>(tile, old, new),
            2 => self.measure::<u16>(tile, old, new),
            4 => self.measure::<u32>(tile, old, new),
            _ => self.measure::<u64>(tile, old, new),
        }
    }

    /// Changed elements of `bits` bits, which do not coincide with units. An element in two blocks, which only
    /// those of six bits can be, counts in both.
    fn elements(&self, bits: u64, tile: &Tile, old: &[u8], new: &[u8]) -> u64 {
        let (mut last, mut count) = (None, 0);
        for &p in &self.positions {
            let range = usize::from(p) * tile.unit..(usize::from(p) + 1) * tile.unit;
            for i in range {
                let first = (tile.block.start * tile.unit as u64 + i as u64) * 8;
                let differ = old[i] ^ new[i];
                for element in (0..8).filter(|bit| differ >> bit & 1 == 1).map(|bit| (first + bit) / bits) {
                    count += u64::from(last != Some(element));
                    last = Some(element);
                }
            }
        }
        count
    }

    fn measure<T: Unit>(&mut self, tile: &Tile, old: &[u8], new: &[u8]) {
        let mask = T::mask(tile.line);
        for &p in &self.positions {
            // Codes of ±1, ±2, … are 0 and 1, 2 and 3, …
            let code = T::code(mask, T::read(old, p.into()), T::read(new, p.into())).wide();
            self.distances[(code / 2 + 1).ilog2() as usize] += 1;
        }
    }
}

struct Found<'a> {
    manifest: &'a Manifest,
    elements: u64,
    units: u64,
    /// Changed units by tensor.
    changed: Vec<u64>,
    /// Changed elements by tensor.
    changed_elements: Vec<u64>,
    distances: Vec<u64>,
    modes: [(&'static str, LaneTotals, u64); 2],
}

impl Diff {
    /// Compares and prints.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        [&self.a, &self.b]
            .into_iter()
            .try_for_each(|p| crate::tools::delta::journal::refuse_unfinished(p))?;
        let (a, b) = (Checkpoint::open(&self.a)?, Checkpoint::open(&self.b)?);
        same_layout((&self.a, a.manifest()), (&self.b, b.manifest()))?;
        let manifest = a.manifest();
        let kernels = windlass_data::simd::kernels();
        let progress = session.progress("comparing", manifest.data_bytes());
        let watch = |bytes| progress.add(bytes);
        let run = Run { kernels, threads: self.threads, stop: session.cancel(), progress: &watch };
        let (old, new) = (|t| a.tensor(t), |t| b.tensor(t));
        let pair = Pair { manifest, old: &old, new: &new, old_sums: None };
        let observe = |seen: &mut Seen, Visit { tile, old, new, .. }: &Visit<'_>| {
            let bits = manifest.tensors()[tile.block.tensor as usize].dtype.bits();
            seen.look(kernels, bits, tile, old, new);
        };
        let encoders: [fn() -> Encoder; 2] = [Encoder::plain, Encoder::with_context];
        let all = (0..manifest.cuts().blocks()).into();
        let totals = pass::run(run, pair, &all, &encoders, observe, |_, _| Ok::<(), Error>(()))?;
        drop(progress);

        let layout = manifest.layout_hash();
        let digests = (totals.base.digest(layout), totals.target.digest(layout));
        let found = Found::new(manifest, totals, digests)?;
        let mut object = found.json();
        object["a"] = json!({ "path": self.a, "state_digest": digests.0 });
        object["b"] = json!({ "path": self.b, "state_digest": digests.1 });
        session.finish(object, |out| {
            let _ = writeln!(
                out,
                "a  {}  {}\nb  {}  {}\n",
                digests.0,
                self.a.display(),
                digests.1,
                self.b.display()
            );
            found.human(self.top, out);
        })
    }
}

impl<'a> Found<'a> {
    fn new(
        manifest: &'a Manifest,
        totals: Totals<Seen>,
        digests: (windlass_core::StateDigest, windlass_core::StateDigest),
    ) -> Result<Found<'a>, Error> {
        let mut changed = vec![0; manifest.tensors().len()];
        let mut changed_elements = changed.clone();
        let mut distances = vec![0; 64];
        for seen in &totals.observed {
            changed.iter_mut().zip(&seen.changed).for_each(|(all, n)| *all += n.0);
            changed_elements.iter_mut().zip(&seen.changed).for_each(|(all, n)| *all += n.1);
            distances.iter_mut().zip(&seen.distances).for_each(|(all, n)| *all += n);
        }
        let model_id = ModelId::new("model").map_err(|e| Error::Bug(e.to_string()))?;
        let names = Names { model_id, incarnation: Incarnation(0), base: 0, target: 1 };
        let header = names.header(manifest, digests.0, digests.1).to_bytes().len() as u64;
        let lane = |i: usize| totals.lanes.get(i).copied().unwrap_or_default();
        let size = |i| lane(i).bytes + header;
        Ok(Found {
            manifest,
            elements: manifest.tensors().iter().map(elements).sum(),
            units: manifest.tensors().iter().map(windlass_core::manifest::Tensor::units).sum(),
            changed,
            changed_elements,
            distances,
            modes: [("plain", lane(0), size(0)), ("context", lane(1), size(1))],
        })
    }

    fn total(&self) -> u64 {
        self.changed.iter().sum()
    }

    /// Distances as (from, to, changes), up to the largest that occurs.
    fn buckets(&self) -> Vec<(u64, u64, u64)> {
        let used = self.distances.iter().rposition(|&n| n > 0).map_or(0, |i| i + 1);
        let bucket = |(i, &n): (usize, &u64)| (1 << i, u64::MAX >> (63 - i), n);
        self.distances.iter().take(used).enumerate().map(bucket).collect()
    }

    fn json(&self) -> Value {
        let changed = self.total();
        let mut modes = serde_json::Map::new();
        for (name, lane, size) in &self.modes {
            let records: serde_json::Map<_, _> =
                Mode::ALL.iter().map(|m| (m.to_string(), lane.by_mode[mode_slot(*m)].into())).collect();
            let bits = bits_per_change(*size, changed);
            modes.insert(
                (*name).into(),
                json!({ "bytes": size, "bits_per_change": bits, "records": records }),
            );
        }
        let tensors: Vec<Value> = self
            .manifest
            .tensors()
            .iter()
            .zip(self.changed.iter().zip(&self.changed_elements))
            .map(|(t, (&n, e))| {
                json!({
                    "name": t.name,
                    "dtype": t.dtype,
                    "elements": elements(t),
                    "changed_elements": e,
                    "units": t.units(),
                    "changed": n,
                    "rate": rate(n, t.units()),
                })
            })
            .collect();
        let bucket = |&(from, to, n): &(u64, u64, u64)| json!({ "from": from, "to": to, "changed": n });
        json!({
            "elements": self.elements,
            "changed_elements": self.changed_elements.iter().sum::<u64>(),
            "units": self.units,
            "changed": changed,
            "change_rate": rate(changed, self.units),
            "bytes": self.manifest.data_bytes(),
            "blocks": self.manifest.cuts().blocks(),
            "tensors_changed": self.changed.iter().filter(|&&n| n > 0).count(),
            "modes": modes,
            "distances": self.buckets().iter().map(bucket).collect::<Vec<_>>(),
            "tensors": tensors,
        })
    }

    fn human(&self, top: usize, out: &mut String) {
        let changed = self.total();
        let changed_elements = self.changed_elements.iter().sum();
        let touched = self.changed.iter().filter(|&&n| n > 0).count();
        let _ = writeln!(
            out,
            "{} of {} elements changed ({}), in {touched} of {} tensors\n",
            count(changed_elements),
            count(self.elements),
            percent(rate(changed_elements, self.elements)),
            self.changed.len()
        );
        if changed == 0 {
            return;
        }
        let mut t = Table::new(["delta", "size", "of image", "bits per change"]);
        for (name, _, size) in &self.modes {
            let share = percent(rate(*size, self.manifest.data_bytes()));
            t.row([(*name).into(), bytes(*size), share, format!("{:.2}", bits_per_change(*size, changed))]);
        }
        t.write(out);
        out.push('\n');
        let mut t = Table::new(["distance", "changes", "share"]);
        for (from, to, n) in self.buckets().into_iter().filter(|b| b.2 > 0) {
            let range = if from == to { format!("±{from} ulp") } else { format!("±{from}–{to} ulp") };
            t.row([range, count(n), percent(rate(n, changed))]);
        }
        t.write(out);
        out.push('\n');
        let mut order: Vec<usize> = (0..self.changed.len()).filter(|&i| self.changed[i] > 0).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(self.changed[i]));
        let shown = if top == 0 { order.len() } else { top.min(order.len()) };
        let mut t = Table::new(["tensor", "dtype", "elements", "changed", "rate"]);
        for &i in &order[..shown] {
            let tensor = &self.manifest.tensors()[i];
            let (all, n) = (elements(tensor), self.changed_elements[i]);
            let (name, dtype) = (tensor.name.clone(), tensor.dtype.name().into());
            t.row([name, dtype, count(all), count(n), percent(rate(n, all))]);
        }
        t.write(out);
        if shown < order.len() {
            let _ = writeln!(out, "  … {} more that changed; --top 0 shows all", order.len() - shown);
        }
    }
}

fn elements(t: &Tensor) -> u64 {
    t.shape.iter().product()
}

fn rate(n: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { n as f64 / of as f64 }
}
