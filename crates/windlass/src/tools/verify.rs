//! `windlass verify`: the state digest of a checkpoint.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::json;
use windlass_core::StateDigest;
use windlass_data::file::Checkpoint;
use windlass_data::seal::pass::{self, Run};
use windlass_data::stop::Stop;

use crate::console::{Progress, Session, bytes, count};
use crate::error::Error;

/// The checked arguments of `verify`.
#[derive(Debug)]
pub(crate) struct Verify {
    /// A safetensors file or a directory of shards.
    pub(crate) path: PathBuf,
    /// What the digest must be, if given.
    pub(crate) expect: Option<StateDigest>,
    /// How many threads to use.
    pub(crate) threads: usize,
}

impl Verify {
    /// Hashes the whole image and prints its digest.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        crate::tools::delta::journal::refuse_unfinished(&self.path)?;
        let image = Checkpoint::open(&self.path)?;
        let manifest = image.manifest();
        let progress = session.progress("hashing", manifest.data_bytes());
        let digest = digest(&image, self.threads, session.cancel(), &progress)?;
        drop(progress);
        if let Some(expected) = self.expect.filter(|&e| e != digest) {
            return Err(Error::Digest { path: self.path.clone(), found: digest, expected });
        }
        let object = json!({
            "path": self.path,
            "tensors": manifest.tensors().len(),
            "bytes": manifest.data_bytes(),
            "blocks": manifest.cuts().blocks(),
            "layout_hash": manifest.layout_hash(),
            "state_digest": digest,
            "expected": self.expect,
        });
        session.finish(object, |out| {
            let _ = writeln!(out, "{digest}  {}", self.path.display());
            let (tensors, size) = (count(manifest.tensors().len() as u64), bytes(manifest.data_bytes()));
            let _ = writeln!(out, "  {tensors} tensors, {size}, layout {}", manifest.layout_hash());
            if self.expect.is_some() {
                let _ = writeln!(out, "  as expected");
            }
        })
    }
}

/// The state digest of a checkpoint, from its bytes.
pub(crate) fn digest(
    image: &Checkpoint,
    threads: usize,
    stop: &Stop,
    progress: &Progress,
) -> Result<StateDigest, Error> {
    let manifest = image.manifest();
    let watch = |bytes| progress.add(bytes);
    let run = Run { kernels: windlass_data::simd::kernels(), threads, stop, progress: &watch };
    let all = (0..manifest.cuts().blocks()).into();
    Ok(pass::sum::<Error>(run, manifest, &all, |t| image.tensor(t))?.digest(manifest))
}
