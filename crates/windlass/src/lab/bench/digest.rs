//! `bench digest`: block sums and state digest of an image, against reading it once.

use std::fmt::Write as _;

use serde_json::json;

use super::{BenchConfig, Figure, Images, Probe, Timing, machine};
use crate::console::round;
use crate::console::{Session, Table, bytes, count};
use crate::error::Error;
use crate::tools::limits;

/// Runs the bench and prints what came out.
pub(crate) fn run(config: &BenchConfig, session: &Session) -> Result<(), Error> {
    let images = Images::make(config, session)?;
    let (image, manifest) = (&images.base, &images.manifest);
    let mut digest = None;
    let [read, time] = Timing::of(
        config.repeats,
        [
            Probe::new(|| {
                limits::read1(image, config.threads);
                Ok(())
            }),
            Probe::new(|| {
                let with = (config.threads, session.cancel());
                let table =
                    windlass_data::seal::sums_of_all(windlass_data::simd::kernels(), manifest, image, with)?;
                digest = Some(table.digest(manifest));
                Ok(())
            }),
        ],
    )?;
    let Some(digest) = digest else { return Err(Error::Bug("no round was run".into())) };
    let (read_gbps, digest_gbps) = (read.gbps(image.len()), time.gbps(image.len()));
    let ratio = digest_gbps / read_gbps;
    let bar = Figure { name: "digest / read1".into(), value: ratio, bar: 0.5, at_least: true };
    let object = json!({
        "bench": "digest",
        "elements": images.elements(),
        "bytes": image.len(),
        "threads": config.threads,
        "repeats": config.repeats,
        "machine": machine(),
        "digest": digest.to_string(),
        "digest_gbps": round(digest_gbps),
        "read1_gbps": round(read_gbps),
        "ratio": round(ratio),
        "spread": { "digest": round(time.spread()), "read1": round(read.spread()) },
        "bars": [bar.json()],
    });
    session.finish(object, |out| {
        let _ = writeln!(
            out,
            "digest of {} bf16 elements ({}), {} threads, median of {}\n",
            count(images.elements()),
            bytes(image.len() as u64),
            config.threads,
            config.repeats
        );
        let mut t = Table::new(["", "GB/s of image", "spread"]);
        for (name, timing, rate) in [("read once", read, read_gbps), ("digest", time, digest_gbps)] {
            t.row([name.into(), format!("{rate:.2}"), format!("{:.0} %", timing.spread() * 100.0)]);
        }
        t.write(out);
        out.push('\n');
        let mut t = Table::new(["bar", "value", "wanted", ""]);
        t.row(bar.cells());
        t.write(out);
    })
}
