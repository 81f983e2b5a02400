//! `bench offload`: tensors in host memory into a slot, until it is committed, against copying the same bytes.
//!
//! Each thread is a rank with its own [`Writer`] and holds a share of every large tensor, cut on no particular
//! boundary, and every so-manieth of the small ones. A round is the whole attempt: guard, join, write, done, commit.
//! It is run on the layout of the model and again on as many bytes in small tensors of odd size. The limit copies the
//! image with the same threads into memory that was touched before; so were both slots, because the first write to
//! a page costs several times as much and happens once per region.
//!
//! Small tensors have a figure and no bar. Copies of a few KiB go through the cache, so that each line of the slot is
//! read before it is written, and they end before the processor's prefetch has begun to pay: about half of the limit,
//! however it is done one tensor at a time. Models have few bytes in such tensors.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use windlass_core::Dtype;
use windlass_core::identity::Version;
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_data::publish::Publisher;
use windlass_data::region::{Attempt, LeaseKind, Region};
use windlass_data::stop::Stop;

use super::rig::{self, BenchDir, failed};
use super::{
    Figure, Images, PlaneConfig, Probe, Timing, merge, reached, reached_cpu, rounds, timing_row, write_bars,
};
use crate::console::round;
use crate::console::{Session, Table, count};
use crate::error::Error;
use crate::lab::image;
use crate::tools::limits;

/// A tensor of this many bytes or more is shared by all ranks.
const LARGE: u64 = 1 << 20;
/// Elements of a small tensor: its size is no multiple of anything useful.
const SMALL: u64 = 2561;
/// Small tensors at most.
const MAX_SMALL: u64 = 50_000;

/// Runs the bench and prints what came out.
pub(crate) fn run(config: &PlaneConfig, session: &Session) -> Result<(), Error> {
    let images = Images::make(&config.bench, session)?;
    let threads = config.bench.threads;
    let mut copy = image::copy(&images.next)?;
    let mut model = Ranks::new(config, Arc::new(images.manifest.clone()), session.cancel())?;
    let mut small = Ranks::new(config, Arc::new(small(images.base.len() as u64)?), session.cancel())?;
    for source in [&images.base, &images.next] {
        // Both slots of both regions are written once before anything is timed.
        model.round(source)?;
        small.round(source)?;
    }
    let small_len = small.region.manifest().data_bytes() as usize;
    let [limit, time, small_time] = rounds(
        config.bench.repeats,
        [
            Probe::new(|| {
                limits::copy(&images.base, &mut copy, threads);
                Ok(())
            }),
            Probe::new(|| model.round(&images.base)),
            Probe::new(|| small.round(&images.base)),
        ],
    )?;
    model.check(&images.base)?;
    small.check(&images.base)?;
    let len = images.base.len();
    let (ratio, cpu_ratio) = (reached(&time, &limit), reached_cpu(&time, &limit));
    let cpu_small = reached_cpu(&small_time, &limit) * small_len as f64 / len as f64;
    let ratio_small = reached(&small_time, &limit) * small_len as f64 / len as f64;
    let [limit, time, small_time] = [&limit, &time, &small_time].map(|t| Timing::from_rounds(t));
    let bars = [Figure { name: "offload / copy".into(), value: ratio, bar: 0.85, at_least: true }];
    let tensors = [model.region.manifest().tensors().len(), small.region.manifest().tensors().len()];
    let object = json!({
        "gbps": round(time.gbps(len)),
        "limit_gbps": round(limit.gbps(len)),
        "ratio": round(ratio),
        "cpu_ratio": round(cpu_ratio),
        "tensors": tensors[0],
        "small": {
            "tensors": tensors[1],
            "gbps": round(small_time.gbps(small_len)),
            "ratio": round(ratio_small),
            "cpu_ratio": round(cpu_small),
        },
        "prepared": model.region.report().to_string(),
        "best_ms": {
            "offload": round(time.min * 1e3),
            "small": round(small_time.min * 1e3),
            "limit": round(limit.min * 1e3),
        },
        "spread": {
            "offload": round(time.spread()),
            "small": round(small_time.spread()),
            "limit": round(limit.spread()),
        },
        "bars": bars.iter().map(Figure::json).collect::<Vec<_>>(),
    });
    session.finish(merge(config.json("offload", &images), object), |out| {
        config.title("offload", &images, out);
        let mut t = Table::new(["", "GB/s of image", "ms", "best", "spread"]);
        t.row(timing_row("copy", len, &limit));
        t.row(timing_row(&format!("offload of {} tensors", count(tensors[0] as u64)), len, &time));
        t.row(timing_row(
            &format!("offload of {} tensors", count(tensors[1] as u64)),
            small_len,
            &small_time,
        ));
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}

/// Many small tensors with as many bytes as an image, or fewer.
fn small(bytes: u64) -> Result<Manifest, Error> {
    let tensors = (bytes / (2 * SMALL)).clamp(1, MAX_SMALL);
    let specs = (0..tensors).map(|i| TensorSpec::new(format!("small.{i}"), Dtype::BF16, [SMALL]));
    Manifest::new(specs, BTreeMap::new()).map_err(|e| Error::Bug(e.to_string()))
}

/// A region and its ranks.
struct Ranks<'a> {
    region: Arc<Region>,
    publishers: Vec<Publisher>,
    /// What each rank writes, in the data area.
    shares: Vec<Vec<Range<u64>>>,
    version: Version,
    cancel: &'a Stop,
    _place: BenchDir,
}

impl<'a> Ranks<'a> {
    fn new(config: &PlaneConfig, manifest: Arc<Manifest>, cancel: &'a Stop) -> Result<Ranks<'a>, Error> {
        let place = BenchDir::new(&config.region_dir)?;
        let ranks = config.bench.threads as u16;
        let region = rig::region(&place, &manifest, ranks)?;
        let publishers = (0..ranks).map(|r| Publisher::new(Arc::clone(&region), r)).collect::<Result<_, _>>();
        let publishers = publishers.map_err(failed!("write the region"))?;
        region.report();
        Ok(Ranks { region, publishers, shares: shares(&manifest, ranks), version: 0, cancel, _place: place })
    }

    /// One version, from the first word to the commit.
    fn round(&mut self, source: &[u8]) -> Result<(), Error> {
        self.version += 1;
        let stop = &self.cancel.with_timeout(Duration::from_mins(1));
        let version = self.version;
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .publishers
                .iter_mut()
                .zip(&self.shares)
                .map(|(publisher, share)| scope.spawn(move || write(publisher, share, source, version, stop)))
                .collect();
            threads.into_iter().try_for_each(|t| {
                t.join().unwrap_or_else(|_| Err(Error::Bug("a rank's thread panicked".into())))
            })
        })
    }

    /// Whether the committed slot has the bytes of `source`.
    fn check(&self, source: &[u8]) -> Result<(), Error> {
        let active = self.region.state().active.ok_or_else(|| Error::Bug("nothing was committed".into()))?;
        let lease = self.region.lease(active.id, LeaseKind::Map, Duration::from_mins(1));
        let lease = lease.map_err(failed!("read the slot"))?;
        if lease.data() == &source[..lease.data().len()] {
            Ok(())
        } else {
            Err(Error::Bug("the slot does not hold what was written".into()))
        }
    }
}

fn write(
    publisher: &mut Publisher,
    share: &[Range<u64>],
    source: &[u8],
    version: Version,
    stop: &Stop,
) -> Result<(), Error> {
    let mut ranges = share.iter();
    let write = |attempt: &Attempt<'_>| {
        ranges.try_for_each(|range| {
            Ok(attempt.write(range.start, &source[range.start as usize..range.end as usize])?)
        })
    };
    publisher.copy(version, stop, write).map_err(rig::publish_failed)
}

/// What each rank holds.
fn shares(manifest: &Manifest, ranks: u16) -> Vec<Vec<Range<u64>>> {
    let mut shares = vec![Vec::new(); ranks.into()];
    for (i, tensor) in manifest.tensors().iter().enumerate() {
        let range = tensor.range();
        if tensor.bytes < LARGE {
            shares[i % usize::from(ranks)].push(range);
            continue;
        }
        let cut = |rank: u64| range.start + tensor.bytes * rank / u64::from(ranks);
        for (rank, share) in (0u64..).zip(&mut shares) {
            share.push(cut(rank)..cut(rank + 1));
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_the_offload_bench_hold_every_byte_once() {
        let specs = [("a", 3_000_001), ("b", 5), ("c", 700_000), ("d", 1), ("e", 600_001)];
        let specs = specs.map(|(name, n)| TensorSpec::new(name, Dtype::BF16, [n]));
        let manifest = Manifest::new(specs, BTreeMap::new()).unwrap();
        for ranks in [1, 2, 7] {
            let mut held: Vec<_> = shares(&manifest, ranks).into_iter().flatten().collect();
            held.sort_by_key(|r| r.start);
            let end = held.iter().filter(|r| !r.is_empty()).fold(0, |at, r| {
                assert_eq!(r.start, at, "{ranks} ranks");
                r.end
            });
            assert_eq!(end, manifest.data_bytes());
        }
    }
}
