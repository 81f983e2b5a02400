//! What the demo says in the end.

use std::fmt::Write as _;

use serde_json::{Value, json};
use windlass_core::StateDigest;
use windlass_core::manifest::Manifest;

use super::{Arrival, Demo, Step};
use crate::console::{Session, Table, bytes, percent};
use crate::error::Error;

/// A finished demo.
pub(super) struct Summary<'a> {
    pub(super) demo: &'a Demo,
    pub(super) manifest: &'a Manifest,
    pub(super) steps: &'a [Step],
    /// The digest of every image, from its bytes.
    pub(super) images: &'a [StateDigest],
    pub(super) fine: bool,
}

/// The slowest of the receivers.
fn most(step: &Step, of: impl Fn(&Arrival) -> f64) -> f64 {
    step.arrivals.iter().flatten().map(of).fold(0.0, f64::max)
}

/// Bytes of the transfer to a receiver that was there all along.
fn size(step: &Step) -> u64 {
    step.arrivals.iter().flatten().map(|a| a.wire_bytes).min().unwrap_or(0)
}

fn modes(step: &Step) -> String {
    let mut modes: Vec<&str> = step.arrivals.iter().flatten().map(|a| &*a.mode).collect();
    modes.sort_unstable();
    modes.dedup();
    modes.join("+")
}

impl Summary<'_> {
    pub(super) fn print(&self, session: &Session, seconds: f64) -> Result<(), Error> {
        session.finish(self.object(seconds), |out| self.human(out, seconds))
    }

    fn object(&self, seconds: f64) -> Value {
        let image = self.manifest.data_bytes();
        let steps: Vec<Value> = self
            .steps
            .iter()
            .map(|s| {
                json!({
                    "version": s.version,
                    "offload_ms": s.offload_ms,
                    "mode": modes(s),
                    "bytes": size(s),
                    "ratio": size(s) as f64 / image.max(1) as f64,
                    "pull_ms": most(s, |a| a.wire_ms),
                    "apply_ms": most(s, |a| a.apply_ms),
                    "sync_ms": most(s, |a| a.total_ms),
                    "end_to_end_ms": s.end_to_end_ms,
                    "wire_bytes": s.arrivals.iter().flatten().map(|a| a.wire_bytes).sum::<u64>(),
                    "digest": s.expected,
                    "receivers": s.arrivals.iter().flatten().count(),
                    "equal": s.equal(),
                    "incident": s.incident,
                })
            })
            .collect();
        json!({
            "ok": self.fine,
            "model_bytes": image,
            "tensors": self.manifest.tensors().len(),
            "layout_hash": self.manifest.layout_hash(),
            "ranks": self.demo.ranks,
            "receivers": self.demo.receivers,
            "streams": self.demo.streams,
            "change": self.demo.model.change,
            "steps": steps,
            "image_digests": self.images,
            "seconds": seconds,
        })
    }

    fn human(&self, out: &mut String, seconds: f64) {
        let image = self.manifest.data_bytes();
        let _ = writeln!(
            out,
            "{} in {} tensors; {} ranks -> agent -> {} receivers over {} TCP streams each\n",
            bytes(image),
            self.manifest.tensors().len(),
            self.demo.ranks,
            self.demo.receivers,
            self.demo.streams
        );
        let mut table = Table::new([
            "version",
            "sent as",
            "size",
            "of image",
            "offload",
            "pull",
            "apply",
            "end to end",
            "on the wire",
            "equal",
            "",
        ]);
        for s in self.steps {
            let ms = |ms: f64| format!("{ms:.0} ms");
            let there = s.arrivals.iter().flatten().count();
            let same = s.arrivals.iter().flatten().filter(|a| a.digest == s.expected).count();
            table.row([
                s.version.to_string(),
                modes(s),
                bytes(size(s)),
                percent(size(s) as f64 / image.max(1) as f64),
                ms(s.offload_ms),
                ms(most(s, |a| a.wire_ms)),
                ms(most(s, |a| a.apply_ms)),
                ms(s.end_to_end_ms),
                bytes(s.arrivals.iter().flatten().map(|a| a.wire_bytes).sum()),
                format!("{same}/{there}"),
                s.incident.clone().unwrap_or_default(),
            ]);
        }
        table.write(out);
        let last = self.steps.last().map(|s| s.expected);
        let wrong = self.images.iter().filter(|d| Some(**d) != last).count();
        let _ = match last {
            Some(digest) if self.fine => writeln!(
                out,
                "\nEvery image was summed anew and equals the ranks' own memory: digest {digest}, {seconds:.1} s."
            ),
            _ => writeln!(out, "\nDIFFERENT: {wrong} images are not what the ranks have."),
        };
    }
}
