//! `bench seal`: a delta file and a hash table from two images, against reading both.
//!
//! What the agent does at every commit: one pass with the sums of the base at hand ([`windlass_data::seal`]), the
//! file included, which is made in the region's directory and replaced every round.

use serde_json::json;
use windlass_core::delta::Encoder;
use windlass_core::identity::{Incarnation, ModelId};
use windlass_data::seal::{self, Base, SealJob};

use super::rig::BenchDir;
use super::{
    Figure, Images, PlaneConfig, Probe, Timing, merge, reached, reached_cpu, rounds, timing_row, write_bars,
};
use crate::console::round;
use crate::console::{Session, Table, bytes};
use crate::error::Error;
use crate::tools::limits;

/// Runs the bench and prints what came out.
pub(crate) fn run(config: &PlaneConfig, session: &Session) -> Result<(), Error> {
    let images = Images::make(&config.bench, session)?;
    let (threads, cancel) = (config.bench.threads, session.cancel());
    let place = BenchDir::new(&config.region_dir)?;
    let kernels = windlass_data::simd::kernels();
    let sums = windlass_data::seal::sums_of_all(kernels, &images.manifest, &images.base, (threads, cancel))?;
    let wanted =
        windlass_data::seal::sums_of_all(kernels, &images.manifest, &images.next, (threads, cancel))?;
    let model_id = ModelId::new("bench").map_err(|e| Error::Bug(e.to_string()))?;
    let (all, path) = ((0..images.manifest.cuts().blocks()).into(), place.join("delta"));
    let mut sealed = None;
    let [limit, time] = rounds(
        config.bench.repeats,
        [
            Probe::new(|| {
                limits::read2(&images.base, &images.next, threads);
                Ok(())
            }),
            Probe::new(|| {
                let job = SealJob {
                    kernels,
                    manifest: &images.manifest,
                    blocks: &all,
                    model_id: &model_id,
                    incarnation: Incarnation(1),
                    version: 1,
                    new: &images.next,
                    base: Some(Base { data: &images.base, sums: &sums, version: 0 }),
                    out: Some(&path),
                    encoder: Encoder::plain,
                    threads,
                    stop: cancel,
                    progress: &|_| {},
                };
                sealed = Some(seal::seal(job)?);
                Ok(())
            }),
        ],
    )?;
    let sealed = sealed.filter(|s| s.digest == wanted.digest(&images.manifest));
    let Some(delta) = sealed.and_then(|s| s.delta) else {
        return Err(Error::Bug("the sealed version is not the newer one".into()));
    };
    let (ratio, cpu_ratio) = (reached(&time, &limit), reached_cpu(&time, &limit));
    let len = images.base.len();
    let (limit, time) = (Timing::from_rounds(&limit), Timing::from_rounds(&time));
    let bars = [Figure { name: "seal / reading two images".into(), value: ratio, bar: 0.4, at_least: true }];
    let object = json!({
        "gbps": round(time.gbps(len)),
        "limit_gbps": round(limit.gbps(len)),
        "ratio": round(ratio),
        "cpu_ratio": round(cpu_ratio),
        "delta_bytes": delta.bytes,
        "changed": delta.changes,
        "spread": { "seal": round(time.spread()), "limit": round(limit.spread()) },
        "bars": bars.iter().map(Figure::json).collect::<Vec<_>>(),
    });
    session.finish(merge(config.json("seal", &images), object), |out| {
        config.title("seal", &images, out);
        let mut t = Table::new(["", "GB/s of image", "ms", "best", "spread"]);
        t.row(timing_row("reading two images", len, &limit));
        t.row(timing_row(&format!("seal, a delta of {}", bytes(delta.bytes)), len, &time));
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}
