//! `windlass delta make`.

use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use clap::ValueEnum;
use serde_json::json;
use windlass_core::StateDigest;
use windlass_core::delta::Encoder;
use windlass_data::file::Checkpoint;
use windlass_data::seal::Names;
use windlass_data::seal::pass::{self, Pair, Run, Visit};

use super::journal::refuse_unfinished;
use super::{bits_per_change, same_layout};
use crate::console::{Session, bytes, count, percent};
use crate::error::Error;
use crate::tools::outfile::OutFile;

/// How changes are coded; see [`windlass_core::delta`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// Can be decoded without reading the old weights, and composed
    Plain,
    /// Smaller; decoding reads the old weights
    Context,
    /// Context for blocks where it saves at least a tenth, else plain
    Auto,
}

/// The checked arguments of `delta make`.
#[derive(Debug)]
pub(crate) struct Make {
    /// The older version.
    pub(crate) base: PathBuf,
    /// The newer version.
    pub(crate) new: PathBuf,
    /// The delta to write.
    pub(crate) output: PathBuf,
    /// How changes are coded.
    pub(crate) mode: Mode,
    /// What the versions are called.
    pub(crate) names: Names,
    /// How many threads to use.
    pub(crate) threads: usize,
}

impl Make {
    /// Writes the delta and prints what it is.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        [&self.base, &self.new].into_iter().try_for_each(|p| refuse_unfinished(p))?;
        let (base, new) = (Checkpoint::open(&self.base)?, Checkpoint::open(&self.new)?);
        same_layout((&self.base, base.manifest()), (&self.new, new.manifest()))?;
        let out = OutFile::create(&self.output, &[&self.base, &self.new])?;
        let manifest = base.manifest();
        let (old, new) = (|t| base.tensor(t), |t| new.tensor(t));
        let pair = Pair { manifest, old: &old, new: &new, old_sums: None };
        let kernels = windlass_data::simd::kernels();
        let context = match self.mode {
            Mode::Plain => false,
            Mode::Context => true,
            Mode::Auto => pass::context_pays(kernels, pair)?,
        };
        let encoder = if context { Encoder::with_context } else { Encoder::plain };

        let write = |bytes: &[u8]| out.file().write_all(bytes).map_err(Error::io("write", &self.output));
        // The digests are known at the end; the header has the same length whatever they are.
        let unknown = StateDigest([0; 16]);
        let header = self.names.header(manifest, unknown, unknown).to_bytes();
        write(&header)?;
        let start = Instant::now();
        let progress = session.progress("encoding", manifest.data_bytes());
        let watch = |bytes| progress.add(bytes);
        let run = Run { kernels, threads: self.threads, stop: session.cancel(), progress: &watch };
        let all = (0..manifest.cuts().blocks()).into();
        let totals =
            pass::run(run, pair, &all, &[encoder], |(): &mut (), _: &Visit<'_>| {}, |_, bytes| write(bytes))?;
        drop(progress);
        let layout = manifest.layout_hash();
        let header = self.names.header(manifest, totals.base.digest(layout), totals.target.digest(layout));
        let header_bytes = header.to_bytes();
        out.file().write_all_at(&header_bytes, 0).map_err(Error::io("write", &self.output))?;
        out.commit()?;
        let seconds = start.elapsed().as_secs_f64();

        let lane = totals.lanes.first().copied().unwrap_or_default();
        let (size, image) = (lane.bytes + header_bytes.len() as u64, manifest.data_bytes());
        let mode = if context { "context" } else { "plain" };
        let object = json!({
            "output": self.output,
            "mode": mode,
            "bytes": size,
            "image_bytes": image,
            "changed": lane.changes,
            "bits_per_change": bits_per_change(size, lane.changes),
            "blocks": header.blocks,
            "records": lane.records,
            "layout_hash": layout,
            "base": header.base_identity(),
            "base_digest": header.base_digest,
            "target": header.target_identity(),
            "target_digest": header.target_digest,
            "seconds": seconds,
        });
        session.finish(object, |out| {
            let _ = writeln!(out, "{}: {} ({mode})", self.output.display(), bytes(size));
            let share = if image == 0 { 0.0 } else { size as f64 / image as f64 };
            let _ = writeln!(
                out,
                "  {} changes, {:.2} bits each, {} of the image of {}, {:.1} s",
                count(lane.changes),
                bits_per_change(size, lane.changes),
                percent(share),
                bytes(image),
                seconds
            );
            let _ = writeln!(out, "  from {}  {}", header.base_digest, header.base_identity());
            let _ = writeln!(out, "  to   {}  {}", header.target_digest, header.target_identity());
        })
    }
}
