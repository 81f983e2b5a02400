//! The deltas that were applied, kept beside the image.
//!
//! Owns: a [`History`] in the image's `deltas/`, for workers that load only what changed
//! ([`crate::history::Trail`]). Off unless it is asked for. Called by the receiver, whose syncs never fail because of
//! it: what cannot be kept is told in the log, and the chain ends.
//!
//! A delta is kept only if it was proved: the image was whole at its base, every record of it was applied to the block
//! it is for, and the digest of the result was that of its target. Everything else that changes the image ends the
//! chain: a full pull, a pull of some blocks, a block that had to be fetched again, another incarnation, and a delta
//! with context records, whose positions need the old image. The file is put in its place before the version becomes
//! visible, so that a reader of the version finds it, and is removed again if it does not.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use windlass_core::delta::{Delta, DeltaHeader, Encoded, Mode, PartBuilder, Tile, positions};
use windlass_core::identity::{Incarnation, LayoutHash, ModelId, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::Ticket;

use crate::history::{History, Limits};
use crate::image::Image;
use crate::seal::DeltaFile;
use crate::seal::draft::{Draft, remove_if_there};

/// Bytes that are written at a time.
const WRITE: usize = 256 << 10;

/// What a receiver keeps.
#[derive(Debug)]
pub(super) struct Kept {
    limits: Option<Limits>,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    key: (Incarnation, LayoutHash),
    history: History,
}

/// A delta in its place that does not count yet. Taken away again unless it is [added](Kept::add).
#[derive(Debug)]
pub(super) struct Placed(Option<DeltaFile>);

impl Placed {
    /// Where it leads.
    pub(super) fn target(&self) -> Option<Version> {
        self.0.as_ref().map(|f| f.header.target.1)
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if let Some(file) = &self.0
            && let Err(error) = remove_if_there(&file.path)
        {
            tracing::warn!(path = %file.path.display(), %error, "cannot remove a delta that was not kept");
        }
    }
}

impl Kept {
    pub(super) fn new(limits: Option<Limits>) -> Kept {
        Kept { limits: limits.filter(|l| l.count > 0), open: None }
    }

    /// Goes on where an earlier receiver of the same incarnation left off, or begins anew.
    pub(super) fn follow(&mut self, image: &Image, model_id: &ModelId, incarnation: Incarnation) {
        let manifest = image.manifest();
        let key = (incarnation, manifest.layout_hash());
        if self.open.as_ref().is_some_and(|o| o.key == key) {
            return;
        }
        self.open = None;
        let dir = image.region().deltas_dir();
        let Some(limits) = self.limits else { return clear_dir(&dir) };
        // Engines read the links; hardly anything is composed here.
        match History::open(&dir, model_id.clone(), incarnation, Arc::clone(manifest), limits, 1) {
            Ok(history) => self.open = Some(Open { key, history }),
            Err(error) => {
                tracing::warn!(%error, "no deltas are kept; engines load whole images");
            }
        }
    }

    /// Puts the delta of a ticket, which was applied to a whole image, in its place.
    pub(super) fn place(&self, manifest: &Manifest, ticket: &Ticket, parts: &[Delta<'_>]) -> Option<Placed> {
        let history = &self.open.as_ref()?.history;
        let windlass_core::wire::Mode::Delta { base, .. } = &ticket.mode else { return None };
        let header = DeltaHeader {
            model_id: ticket.identity.model_id.clone(),
            base: (base.identity.incarnation, base.identity.version),
            target: (ticket.identity.incarnation, ticket.identity.version),
            layout_hash: manifest.layout_hash(),
            cuts_hash: manifest.cuts_hash(),
            base_digest: base.digest,
            target_digest: ticket.digest,
            blocks: manifest.cuts().blocks(),
        };
        let path = history.path(header.base.1, header.target.1);
        match write(manifest, &path, header, parts) {
            Ok(file) => file.map(|f| Placed(Some(f))),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the delta cannot be kept");
                None
            }
        }
    }

    /// The version that a placed delta leads to is visible: it counts.
    pub(super) fn add(&self, mut placed: Placed) {
        let (Some(open), Some(file)) = (&self.open, placed.0.take()) else { return };
        if let Err(error) = open.history.add(file) {
            self.end(&error.to_string());
        }
    }

    /// Nothing leads on from what was kept.
    pub(super) fn end(&self, why: &str) {
        if let Some(open) = &self.open
            && open.history.ends().is_some()
        {
            tracing::info!(why, "the deltas that were kept end here");
            open.history.clear();
        }
    }
}

/// Writes the parts of a delta as one file, its blocks ascending. `None` if a record needs the old image.
fn write(
    manifest: &Manifest,
    path: &Path,
    header: DeltaHeader,
    parts: &[Delta<'_>],
) -> io::Result<Option<DeltaFile>> {
    let mut records: Vec<_> = parts.iter().flat_map(Delta::records).collect();
    if records.iter().any(|r| r.mode == Mode::Context) {
        tracing::info!(path = %path.display(), "a delta with context records is not kept");
        return Ok(None);
    }
    let draft = Draft::create(path)?;
    if let [delta] = parts
        && delta.header == header
        && delta.entries().is_sorted_by_key(|e| e.offset)
    {
        // It came as it would be written, and is not decoded to be counted.
        draft.file().write_all(delta.bytes())?;
        draft.place()?;
        let (bytes, changes) = (delta.bytes().len() as u64, delta.changes);
        return Ok(Some(DeltaFile { path: path.to_owned(), header, bytes, changes, context_records: 0 }));
    }
    records.sort_unstable_by_key(|r| r.block);
    let (mut out, mut builder, mut bytes) = (header.to_bytes(), PartBuilder::new(), 0);
    let mut flush = |out: &mut Vec<u8>, at_least: usize| {
        if out.len() >= at_least {
            draft.file().write_all(out)?;
            bytes += out.len() as u64;
            out.clear();
        }
        Ok::<u64, io::Error>(bytes)
    };
    for record in records {
        let tile = Tile::of(manifest, record.block).map_err(io::Error::other)?;
        let changes = positions::count(&tile, &record).map_err(io::Error::other)? as u32;
        let encoded = Encoded { mode: record.mode, changes, sum: record.sum };
        builder.push(record.block, &encoded, record.payload, &mut out);
        flush(&mut out, WRITE)?;
    }
    let changes = builder.changes();
    builder.finish(&mut out);
    let bytes = flush(&mut out, 0)?;
    draft.place()?;
    Ok(Some(DeltaFile { path: path.to_owned(), header, bytes, changes, context_records: 0 }))
}

/// Removes what an earlier receiver kept; this one will not go on with it.
fn clear_dir(dir: &PathBuf) {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(dir = %dir.display(), %error, "cannot remove deltas that are no longer kept");
        }
        Ok(()) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use windlass_core::Dtype;
    use windlass_core::manifest::TensorSpec;

    use super::*;
    use crate::seal::testing::{INCARNATION, all, model, table};
    use crate::seal::{Base, SealJob, seal};
    use crate::simd::kernels;
    use crate::stop::Stop;

    #[test]
    fn a_delta_with_context_records_is_not_kept() {
        let m = Manifest::new([TensorSpec::new("w", Dtype::BF16, [60_000])], [].into()).unwrap();
        // Small weights change more: what context records are for.
        let old: Vec<u8> = (0..60_000u32).flat_map(|i| (0x3c00 + (i % 997) as u16).to_le_bytes()).collect();
        let mut new = old.clone();
        new.chunks_exact_mut(2).step_by(31).filter(|c| c[1] < 0x3d).for_each(|c| c[0] ^= 1);
        let home = tempfile::tempdir().unwrap();
        let (plain, context) = (home.path().join("plain"), home.path().join("context"));
        let sealed = seal(SealJob {
            kernels: kernels(),
            manifest: &m,
            blocks: &all(&m),
            model_id: &model(),
            incarnation: INCARNATION,
            version: 2,
            new: &new,
            base: Some(Base { data: &old, sums: &table(&m, &old), version: 1 }),
            out: Some(&plain),
            context_out: Some(&context),
            threads: 1,
            stop: &Stop::never(),
            progress: &|_| (),
        })
        .unwrap();
        let header = sealed.delta.unwrap().header;
        let kept = home.path().join("kept");
        for (file, is_kept) in [(&plain, true), (&context, false)] {
            let bytes = fs::read(file).unwrap();
            let delta = Delta::parse(&bytes).unwrap();
            assert_eq!(delta.records().any(|r| r.mode == Mode::Context), !is_kept);
            let written = write(&m, &kept, header.clone(), &[delta]).unwrap();
            assert_eq!(written.is_some(), is_kept);
            // What is kept is what came, to the byte, and an unfinished file is not left.
            assert_eq!(kept.exists(), is_kept);
            if let Some(file) = written {
                assert_eq!(fs::read(&kept).unwrap(), bytes);
                let changes = file.changes;
                drop(Placed(Some(file)));
                assert!(!kept.exists());
                // One that did not come so is put together anew.
                let delta = Delta::parse(&bytes).unwrap();
                let other = DeltaHeader { base_digest: header.target_digest, ..header.clone() };
                let file = write(&m, &kept, other.clone(), std::slice::from_ref(&delta)).unwrap().unwrap();
                assert_eq!(file.changes, changes);
                let (again, same) = (fs::read(&kept).unwrap(), |d: &Delta<'_>| d.records().count());
                let again = Delta::parse(&again).unwrap();
                assert_eq!((&again.header, again.changes, same(&again)), (&other, changes, same(&delta)));
                drop(Placed(Some(file)));
            }
        }
    }
}
