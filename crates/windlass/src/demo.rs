//! `windlass demo`: the main job in small, in one process.
//!
//! A made-up model is trained for some steps. After each, the publisher encodes what changed, and every receiver
//! applies it to an image of its own and proves that it has the publisher's state: its table of sums, its bytes
//! summed anew, and the bytes themselves. One receiver misses every other step and catches up with two deltas
//! made one. Any difference ends the demo with exit code 1.

use std::fmt::Write as _;
use std::time::Instant;

use serde_json::{Value, json};
use windlass_core::StateDigest;
use windlass_core::delta::{Delta, Encoder, compose};
use windlass_core::digest::SumTable;
use windlass_core::identity::{Incarnation, ModelId};
use windlass_core::manifest::Manifest;
use windlass_data::seal::Names;
use windlass_data::seal::pass::{self, Pair, Run, Visit};

use crate::delta::bits_per_change;
use crate::error::Error;
use crate::image;
use crate::session::{Session, Table, bytes, count, percent};
use crate::synth::{Synth, SynthConfig};

/// The checked arguments of `demo`.
#[derive(Debug)]
pub struct Demo {
    /// The made-up model.
    pub model: SynthConfig,
    /// Training steps.
    pub steps: u32,
    /// Receivers kept in sync.
    pub receivers: usize,
    /// How many threads to use.
    pub threads: usize,
}

struct Receiver {
    image: Vec<u8>,
    table: SumTable,
    /// The version it has.
    version: u32,
}

struct Step {
    changed: u64,
    size: usize,
    encode: f64,
    apply: f64,
    digest: StateDigest,
    /// Receivers that have the state, of those that should.
    equal: usize,
    expected: usize,
    /// Receivers that caught up with two deltas made one.
    composed: usize,
}

struct Stage<'a> {
    demo: &'a Demo,
    session: &'a Session,
    manifest: Manifest,
    synth: Synth,
}

impl Demo {
    /// Runs the demo and gives the exit code.
    pub fn run(&self, session: &Session) -> Result<u8, Error> {
        let synth = Synth::new(self.model)?;
        let manifest = image::manifest_of(&synth)?;
        let stage = Stage { demo: self, session, manifest, synth };
        let start = Instant::now();
        let steps = stage.play()?;
        let fine = steps.iter().all(|s| s.equal == s.expected);
        stage.finish(&steps, fine, start.elapsed().as_secs_f64())?;
        Ok(u8::from(!fine))
    }
}

impl Stage<'_> {
    fn play(&self) -> Result<Vec<Step>, Error> {
        let mut published = image::blank(&self.manifest)?;
        self.train(0, &mut published)?;
        let first = Receiver { table: self.sum(&published)?, image: image::copy(&published)?, version: 0 };
        let mut receivers = vec![first];
        while receivers.len() < self.demo.receivers {
            let Receiver { image, table, .. } = &receivers[0];
            receivers.push(Receiver { image: image::copy(image)?, table: table.clone(), version: 0 });
        }
        let mut steps = Vec::new();
        let mut last: Option<Vec<u8>> = None;
        for version in 1..=self.demo.steps {
            let mut next = image::blank(&self.manifest)?;
            self.train(version, &mut next)?;
            let start = Instant::now();
            let container = self.encode(version, &published, &next)?;
            let encode = start.elapsed().as_secs_f64();
            published = next;
            steps.push(self.sync(
                version,
                &container,
                last.as_deref(),
                &published,
                &mut receivers,
                encode,
            )?);
            last = Some(container);
        }
        Ok(steps)
    }

    fn train(&self, step: u32, image: &mut [u8]) -> Result<(), Error> {
        let progress = self.session.progress("training", image.len() as u64);
        let watch = (self.session.cancel(), &progress);
        image::fill(&self.synth, &self.manifest, step, image, self.demo.threads, watch)
    }

    fn sum(&self, image: &[u8]) -> Result<SumTable, Error> {
        image::sum(crate::kernels(), &self.manifest, image, (self.demo.threads, self.session.cancel()))
    }

    /// The publisher's part: what changed, as it would be sent.
    fn encode(&self, version: u32, old: &[u8], new: &[u8]) -> Result<Vec<u8>, Error> {
        let manifest = &self.manifest;
        let progress = self.session.progress("encoding", manifest.data_bytes());
        let (threads, cancel) = (self.demo.threads, self.session.cancel());
        let watch = |bytes| progress.add(bytes);
        let run = Run { kernels: crate::kernels(), threads, stop: cancel, progress: &watch };
        let (old, new) = (|t| image::tensor(manifest, old, t), |t| image::tensor(manifest, new, t));
        let pair = Pair { manifest, old: &old, new: &new, old_sums: None };
        let mut parts = Vec::new();
        // Plain, because the receiver that lags needs two deltas made one.
        let totals = pass::run(
            run,
            pair,
            &(0..manifest.cuts().blocks()).into(),
            &[Encoder::plain],
            |(): &mut (), _: &Visit<'_>| {},
            |_, bytes| {
                parts.extend_from_slice(bytes);
                Ok::<(), Error>(())
            },
        )?;
        let model_id = ModelId::new("demo").map_err(|e| Error::Bug(e.to_string()))?;
        let target = u64::from(version);
        let names = Names { model_id, incarnation: Incarnation(1), base: target - 1, target };
        let layout = manifest.layout_hash();
        let header = names.header(manifest, totals.base.digest(layout), totals.target.digest(layout));
        Ok([header.to_bytes(), parts].concat())
    }

    /// The receivers' part. The last of several receivers takes part in every other step only.
    fn sync(
        &self,
        version: u32,
        container: &[u8],
        before: Option<&[u8]>,
        published: &[u8],
        receivers: &mut [Receiver],
        encode: f64,
    ) -> Result<Step, Error> {
        let bug = |e: windlass_core::delta::DeltaError| Error::Bug(format!("a delta made here: {e}"));
        let delta = Delta::parse(container).map_err(bug)?;
        delta.header.check(&self.manifest).map_err(bug)?;
        let digest = delta.header.target_digest;
        let mut step = Step {
            changed: delta.changes,
            size: container.len(),
            encode,
            apply: 0.0,
            digest,
            equal: 0,
            expected: 0,
            composed: 0,
        };
        let lagging = receivers.len() - 1;
        for (i, r) in receivers.iter_mut().enumerate() {
            if i > 0 && i == lagging && version % 2 == 1 && version < self.demo.steps {
                continue;
            }
            step.expected += 1;
            let composed = match before {
                Some(before) if r.version + 2 == version => {
                    let first = Delta::parse(before).map_err(bug)?;
                    Some(compose(&self.manifest, &first, &delta).map_err(bug)?)
                }
                _ => None,
            };
            step.composed += usize::from(composed.is_some());
            let composed = composed.as_deref().map(Delta::parse).transpose().map_err(bug)?;
            let start = Instant::now();
            let same = self.receive(r, composed.as_ref().unwrap_or(&delta))?;
            if i == 0 {
                step.apply = start.elapsed().as_secs_f64();
            }
            r.version = version;
            // The table says so; the bytes must agree.
            let bytes_agree = self.sum(&r.image)?.digest(&self.manifest) == digest && r.image == published;
            step.equal += usize::from(same && bytes_agree);
        }
        Ok(step)
    }

    /// Applies a delta to a receiver's image and brings its table up to date. Answers whether the table now
    /// has the target's digest.
    fn receive(&self, r: &mut Receiver, delta: &Delta<'_>) -> Result<bool, Error> {
        let with = (self.demo.threads, self.session.cancel());
        let outcomes = image::apply(crate::kernels(), &self.manifest, delta, &r.table, &mut r.image, with)?;
        if outcomes.refetch > 0 {
            return Ok(false);
        }
        for e in delta.entries() {
            let tile = image::tile(&self.manifest, e.block)?;
            r.table.set(e.block, tile.block.tensor, e.sum);
        }
        Ok(r.table.digest(&self.manifest) == delta.header.target_digest)
    }

    fn finish(&self, steps: &[Step], fine: bool, seconds: f64) -> Result<(), Error> {
        let image = self.manifest.data_bytes();
        let elements = self.synth.elements();
        let list: Vec<Value> = steps
            .iter()
            .enumerate()
            .map(|(i, s)| {
                json!({
                    "version": i + 1,
                    "changed": s.changed,
                    "delta_bytes": s.size,
                    "bits_per_change": bits_per_change(s.size as u64, s.changed),
                    "encode_seconds": s.encode,
                    "apply_seconds": s.apply,
                    "state_digest": s.digest,
                    "receivers_equal": s.equal,
                    "receivers_expected": s.expected,
                    "receivers_composed": s.composed,
                })
            })
            .collect();
        let object = json!({
            "ok": fine,
            "elements": elements,
            "image_bytes": image,
            "receivers": self.demo.receivers,
            "steps": list,
            "seconds": seconds,
        });
        self.session.finish(object, |out| {
            let receivers = self.demo.receivers;
            let _ = writeln!(
                out,
                "{} bf16 elements ({}), {} steps, {receivers} receivers, {} threads, one process",
                count(elements),
                bytes(image),
                steps.len(),
                self.demo.threads
            );
            if receivers > 1 {
                let _ = writeln!(
                    out,
                    "The last receiver waits at every second version and catches up with two deltas\ncomposed into one."
                );
            }
            out.push('\n');
            let head =
                ["version", "changed", "delta", "of image", "bits", "encode", "apply", "equal", "last"];
            let mut t = Table::new(head);
            for (i, s) in steps.iter().enumerate() {
                t.row([
                    (i + 1).to_string(),
                    percent(s.changed as f64 / elements as f64),
                    bytes(s.size as u64),
                    percent(s.size as f64 / image as f64),
                    format!("{:.2}", bits_per_change(s.size as u64, s.changed)),
                    format!("{:.1} ms", s.encode * 1e3),
                    format!("{:.1} ms", s.apply * 1e3),
                    format!("{} of {}", s.equal, s.expected),
                    last_receiver(s, receivers).into(),
                ]);
            }
            t.write(out);
            let verdict = if fine {
                "Every receiver had the publisher's bytes at every version it took part in."
            } else {
                "DIFFERENCES were found: see the column \"equal\"."
            };
            let _ = writeln!(out, "\n{verdict} {seconds:.1} s in all.");
        })
    }
}

/// What the receiver that takes only every second version did in a step.
fn last_receiver(step: &Step, receivers: usize) -> &'static str {
    if step.composed > 0 {
        "composed"
    } else if step.expected < receivers {
        "waits"
    } else {
        "in step"
    }
}
