//! The way back: a delta from a version to an older one.
//!
//! Owns: [`History::back`], and what is kept so that there is one. The links of the chain lead forward. Sparse and bitmap
//! records can be taken back over the bytes that they led to, so the blocks of the newest version in its slot, with the
//! records of the links taken back one after another, give those of any older version of the chain. A dense record does
//! not say what it replaced: while its base is still in a slot, [`History::keep_back`] puts the old units of such blocks
//! beside the link, as `<base>-<target>.wback`, a container of the other direction. A link without that file has no dense
//! records, or cannot be taken back.
//!
//! The delta is composed in one pass over what changed, kept among the composed ones, and thrown away before links are.
//! A later agent does not take it over.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use windlass_core::delta::{Applier, DeltaError, DeltaHeader, Encoded, Encoder, Mode, Record, Tile};
use windlass_core::digest::{BlockSum, SumTable};
use windlass_core::identity::Version;
use windlass_core::manifest::Manifest;

use super::chain::{Key, back_path, open_file, open_segment, remove};
use super::reader::{Fault, Records};
use super::writer::Writer;
use super::{History, HistoryError, Segment, broken};
use crate::seal::DeltaFile;
use crate::simd::kernels;
use crate::stop::Stop;

/// A version of the chain as it is in a slot.
#[derive(Clone, Copy)]
pub struct Whole<'a> {
    pub version: Version,
    pub data: &'a [u8],
    pub sums: &'a SumTable,
    /// Whether the slot is wanted for something else. Then the work is given up.
    pub wanted: &'a dyn Fn() -> bool,
}

impl std::fmt::Debug for Whole<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Whole").field("version", &self.version).finish_non_exhaustive()
    }
}

/// A link, and the old units of its dense blocks.
struct Turn {
    link: Arc<Segment>,
    old: Option<(PathBuf, File, u64)>,
}

impl History {
    /// The delta that leads from `base` back to `target`, both of the chain, as one file. `whole` is a version of the chain
    /// that is not older than `base`. Composes it if it is not there, and waits, with `stop`, for the thread that composes it
    /// already.
    pub fn back(
        &self,
        base: Version,
        target: Version,
        whole: &Whole<'_>,
        stop: &Stop,
    ) -> Result<Arc<Segment>, HistoryError> {
        let key = (base, target);
        let links = |state: &super::State| {
            // All are of the chain, and in this order.
            state.span(target, base)?;
            if whole.version != base {
                state.span(base, whole.version)?;
            }
            Ok(state.links_between(state.span(target, whole.version)?))
        };
        self.shared(key, stop, links, |links| self.compose_back(key, &links, whole, stop))
    }

    /// Keeps what it takes to lead back over the link from `base` to `target`: the old units of its dense blocks, given
    /// the bytes of `base` and their sums. Nothing is done if there is no such link.
    pub fn keep_back(
        &self,
        (base, target): Key,
        data: &[u8],
        sums: &SumTable,
        stop: &Stop,
    ) -> Result<(), HistoryError> {
        if !self.lock().has_link((base, target)) {
            return Ok(());
        }
        let link = self.segment(base, target, stop)?;
        let path = back_path(&link.path);
        let fault = |fault| broken(&link.path, fault);
        let mut records = Records::open(&link.file, link.bytes).map_err(fault)?;
        let mut out: Option<Writer> = None;
        while let Some(record) = records.record().map_err(fault)? {
            stop.check().map_err(|source| HistoryError::Stopped { base, target, source })?;
            if record.mode == Mode::Dense {
                let tile = tile(&self.manifest, record.block).map_err(fault)?;
                let mut old = Vec::with_capacity(tile.bytes());
                gather(&self.manifest, &tile, data, &mut old).map_err(fault)?;
                let encoded =
                    Encoded { mode: Mode::Dense, changes: tile.units() as u32, sum: sums.get(record.block) };
                let writer = match &mut out {
                    Some(writer) => writer,
                    None => out.insert(Writer::create(&path, &turned(&link.header))?),
                };
                writer.push(record.block, &encoded, &old)?;
            }
            records.advance().map_err(fault)?;
        }
        match out {
            Some(writer) => {
                let (bytes, _) = writer.place()?;
                let mut state = self.lock();
                if !state.note_back((base, target), bytes) {
                    remove(&path, "its link is gone");
                }
                state.evict(self.limits);
            }
            // One that was left by a version of the same number that was sealed again.
            None => remove(&path, "the link has no dense records"),
        }
        Ok(())
    }

    /// Takes away what [`History::keep_back`] kept: it is not what it was thought to be.
    pub fn drop_back(&self, (base, target): Key) {
        let mut state = self.lock();
        state.note_back((base, target), 0);
        remove(&back_path(&self.path(base, target)), "it was read from a slot that was taken back");
    }

    fn compose_back(
        &self,
        key: Key,
        links: &[Key],
        whole: &Whole<'_>,
        stop: &Stop,
    ) -> Result<Arc<Segment>, HistoryError> {
        let (base, target) = key;
        let turns: Vec<Turn> = links.iter().map(|link| self.turn(*link, stop)).collect::<Result<_, _>>()?;
        let ends = (turns.first(), turns.iter().find(|t| t.link.header.target.1 == base));
        let (Some(first), Some(last)) = ends else {
            return Err(HistoryError::Empty { base, target });
        };
        let header = DeltaHeader {
            base: last.link.header.target,
            base_digest: last.link.header.target_digest,
            target: first.link.header.base,
            target_digest: first.link.header.base_digest,
            ..first.link.header.clone()
        };
        let path = self.path(base, target);
        let mut out = Writer::create(&path, &header)?;
        let mut walk = Walk::new(&self.manifest, &turns, base)?;
        while let Some(block) = walk.block() {
            stop.check().map_err(|source| HistoryError::Stopped { base, target, source })?;
            if (whole.wanted)() {
                return Err(HistoryError::Overtaken { version: whole.version });
            }
            walk.step(block, whole, &mut out)?;
        }
        let (bytes, changes) = out.place()?;
        let file = DeltaFile { path, header, bytes, changes, context_records: 0 };
        let segment = open_segment(&file)?;
        self.lock().keep(file, &segment, self.limits);
        Ok(segment)
    }

    fn turn(&self, (base, target): Key, stop: &Stop) -> Result<Turn, HistoryError> {
        let link = self.segment(base, target, stop)?;
        let path = back_path(&link.path);
        let io = |source| HistoryError::Io { action: "open", path: path.clone(), source };
        let old = match open_file(&path) {
            Ok(file) => {
                let bytes = file.metadata().map_err(io)?.len();
                Some((path, file, bytes))
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(io(e)),
        };
        Ok(Turn { link, old })
    }
}

/// The links of a way back, read together block by block.
struct Walk<'t> {
    manifest: &'t Manifest,
    base: Version,
    turns: &'t [Turn],
    /// The oldest first, as the links are.
    forward: Vec<Records<'t>>,
    old: Vec<Option<Records<'t>>>,
    applier: Applier,
    encoder: Encoder,
    /// The block as it was at the version where the walk is, and at `base`.
    bytes: Vec<u8>,
    from: Vec<u8>,
    payload: Vec<u8>,
}

impl<'t> Walk<'t> {
    fn new(manifest: &'t Manifest, turns: &'t [Turn], base: Version) -> Result<Walk<'t>, HistoryError> {
        let (mut forward, mut old) = (Vec::new(), Vec::new());
        for turn in turns {
            let Turn { link, old: beside } = turn;
            forward.push(Records::open(&link.file, link.bytes).map_err(|f| broken(&link.path, f))?);
            let open = |(path, file, bytes): &'t (PathBuf, File, u64)| {
                Records::open(file, *bytes).map_err(|f| broken(path, f))
            };
            old.push(beside.as_ref().map(open).transpose()?);
        }
        Ok(Walk {
            manifest,
            base,
            turns,
            forward,
            old,
            applier: Applier::new(),
            encoder: Encoder::plain(),
            bytes: Vec::new(),
            from: Vec::new(),
            payload: Vec::new(),
        })
    }

    /// The next block that changed on the way.
    fn block(&self) -> Option<u32> {
        self.forward.iter().filter_map(Records::block).min()
    }

    /// Takes a block back, writes what leads there, and goes on.
    fn step(&mut self, block: u32, whole: &Whole<'_>, out: &mut Writer) -> Result<(), HistoryError> {
        let fault = |i: usize, f: Fault| broken(&self.turns[i].link.path, f);
        let tile = tile(self.manifest, block).map_err(|f| fault(0, f))?;
        self.bytes.clear();
        gather(self.manifest, &tile, whole.data, &mut self.bytes).map_err(|f| fault(0, f))?;
        let mut sum = whole.sums.get(block);
        let mut from_sum = None;
        for i in (0..self.turns.len()).rev() {
            let link = &self.turns[i].link.header;
            if link.target.1 == self.base {
                self.from.clone_from(&self.bytes);
                from_sum = Some(sum);
            }
            if self.forward[i].block() != Some(block) {
                continue;
            }
            let Some(record) = self.forward[i].record().map_err(|f| fault(i, f))? else { continue };
            if record.sum != sum {
                return Err(fault(i, mismatch("what it leads to is not what follows")));
            }
            sum = match self.applier.revert(&tile, &record, &mut self.bytes) {
                Ok(sum) => sum,
                Err(DeltaError::OneWay { .. }) => {
                    let old =
                        self.old[i].as_mut().map(Records::record).transpose().map_err(|f| fault(i, f))?;
                    let old = old.flatten().filter(|r| r.block == block && r.payload.len() == tile.bytes());
                    let Some(Record { payload, sum, .. }) = old else {
                        return Err(HistoryError::OneWay { base: link.base.1, target: link.target.1, block });
                    };
                    self.bytes.copy_from_slice(payload);
                    sum
                }
                Err(e) => return Err(fault(i, e.into())),
            };
        }
        let from_sum: BlockSum = from_sum.unwrap_or_else(|| whole.sums.get(block));
        self.payload.clear();
        let from = (self.from.as_slice(), from_sum);
        if let Some(encoded) = self.encoder.encode(kernels(), &tile, from, &self.bytes, &mut self.payload) {
            if encoded.sum != sum {
                return Err(fault(0, mismatch("the block before it has another sum")));
            }
            out.push(block, &encoded, &self.payload)?;
        }
        for i in 0..self.turns.len() {
            if self.forward[i].block() == Some(block) {
                self.forward[i].advance().map_err(|f| broken(&self.turns[i].link.path, f))?;
            }
            if let Some(old) = self.old[i].as_mut().filter(|o| o.block() == Some(block)) {
                old.advance().map_err(|f| broken(&back_path(&self.turns[i].link.path), f))?;
            }
        }
        Ok(())
    }
}

fn turned(header: &DeltaHeader) -> DeltaHeader {
    DeltaHeader {
        base: header.target,
        base_digest: header.target_digest,
        target: header.base,
        target_digest: header.base_digest,
        ..header.clone()
    }
}

fn mismatch(why: &'static str) -> Fault {
    Fault::Delta(DeltaError::Malformed { what: "sum", why })
}

fn tile(manifest: &Manifest, block: u32) -> Result<Tile, Fault> {
    Tile::of(manifest, block).map_err(|e| Fault::Delta(e.into()))
}

/// Appends the bytes of a block, run after run.
fn gather(manifest: &Manifest, tile: &Tile, data: &[u8], out: &mut Vec<u8>) -> Result<(), Fault> {
    for run in manifest.byte_runs(&tile.block) {
        let short = || DeltaError::Truncated { what: "image", need: run.end, have: data.len() as u64 };
        out.extend_from_slice(data.get(run.start as usize..run.end as usize).ok_or_else(short)?);
    }
    Ok(())
}

/// Whether a file holds old units of a link that is there.
pub(super) fn belongs(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "wback")
        && fs::symlink_metadata(path.with_extension("wdelta")).is_ok_and(|m| m.is_file())
}
