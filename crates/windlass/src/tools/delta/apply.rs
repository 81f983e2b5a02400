//! `windlass delta apply`.
//!
//! Every block is read, hashed, changed in a buffer, and compared with the delta's hash for it before it is written. The
//! result is compared with the delta's target digest before it becomes visible. The base must have the delta's base
//! digest, or its target digest: then there is nothing to change. Block hashes alone do not suffice, because a dense record
//! fits any block.
//!
//! *To a new path*: one pass into a temporary file (or directory), which is renamed at the end.
//!
//! *In place*: first a read-only pass. It verifies the base, or that the [`Journal`] belongs to this update and every block
//! is old, new or in the journal. Only then are blocks written, each after its new bytes are in the journal. So a wrong
//! base stays untouched, an updated one is left alone, and the next run finishes an interrupted update.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use windlass_core::delta::{Applier, Delta, Outcome, Record, Tile};
use windlass_core::digest::{BlockSum, StateSum, sum_block};
use windlass_core::kernel::Kernels;
use windlass_data::file::{INDEX, Layout, MappedFile};
use windlass_data::work;

use super::journal::{Journal, refuse_unfinished};
use crate::console::{Session, bytes, count};
use crate::error::Error;
use crate::tools::outfile::{OutDir, OutFile};

/// The checked arguments of `delta apply`.
#[derive(Debug)]
pub(crate) struct Apply {
    pub(crate) base: PathBuf,
    pub(crate) delta: PathBuf,
    /// Where the newer version goes; in place if not given.
    pub(crate) output: Option<PathBuf>,
    /// How many threads to use.
    pub(crate) threads: usize,
}

/// Blocks by what became of them.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    applied: u64,
    skipped: u64,
    /// The image as it is.
    current: StateSum,
    /// The image as it becomes.
    state: StateSum,
}

impl Tally {
    fn of(states: impl IntoIterator<Item = Tally>) -> Tally {
        states.into_iter().fold(Tally::default(), |a, b| Tally {
            applied: a.applied + b.applied,
            skipped: a.skipped + b.skipped,
            current: a.current.plus(b.current),
            state: a.state.plus(b.state),
        })
    }
}

impl Apply {
    /// Makes the newer version and prints what was done.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let layout = Layout::read(&self.base)?;
        let file = MappedFile::open(&self.delta)?;
        let delta = Delta::parse(file.bytes()).map_err(Error::content(&self.delta))?;
        delta.header.check(layout.manifest()).map_err(Error::content(&self.delta))?;
        let job = Job {
            args: self,
            layout: &layout,
            delta: &delta,
            kernels: windlass_data::simd::kernels(),
            session,
        };
        let (tally, output) = match &self.output {
            Some(output) => (job.to_new_place(output)?, output),
            None => (job.in_place()?, &self.base),
        };
        let header = &delta.header;
        let object = json!({
            "output": output,
            "in_place": self.output.is_none(),
            "bytes": layout.manifest().data_bytes(),
            "blocks": header.blocks,
            "records": delta.entries().len(),
            "applied": tally.applied,
            "skipped": tally.skipped,
            "target": header.target_identity(),
            "target_digest": header.target_digest,
        });
        session.finish(object, |out| {
            let _ = writeln!(out, "{}: {}", output.display(), bytes(layout.manifest().data_bytes()));
            let (applied, blocks) = (count(tally.applied), count(header.blocks.into()));
            let _ = writeln!(out, "  {applied} of {blocks} blocks changed");
            if tally.skipped > 0 {
                let _ = writeln!(out, "  {} had been changed already", count(tally.skipped));
            }
            let _ = writeln!(out, "  proved to be {}  {}", header.target_digest, header.target_identity());
        })
    }
}

/// What an update in place starts from.
#[derive(Clone, Copy, Debug)]
enum Found {
    Base,
    /// The delta's target: nothing is left to do.
    Target,
    /// What an interrupted run of this update left.
    Mix,
}

struct Job<'a> {
    args: &'a Apply,
    layout: &'a Layout,
    delta: &'a Delta<'a>,
    kernels: &'a dyn Kernels,
    session: &'a Session,
}

/// The state of one worker thread.
#[derive(Default)]
struct Worker {
    applier: Applier,
    bytes: Vec<u8>,
    tally: Tally,
}

impl Job<'_> {
    fn to_new_place(&self, output: &Path) -> Result<Tally, Error> {
        refuse_unfinished(&self.args.base)?;
        let inputs = [self.args.base.as_path(), self.args.delta.as_path()];
        let sources = self.open_shards(false)?;
        let (dir, files) = if self.layout.is_directory() {
            let dir = OutDir::create(output, Some(&self.args.base), &inputs)?;
            let files = self.create_shards(dir.path(), &sources)?;
            (Some(dir), files)
        } else {
            (None, vec![OutFile::create(output, &inputs)?.with_mode_of(&sources[0])?])
        };
        for ((source, out), shard) in sources.iter().zip(&files).zip(self.layout.shards()) {
            let write = |e| Error::io("write", out.target())(e);
            out.file().set_len(shard.bytes).map_err(write)?;
            copy_range(source, out.file(), 0..shard.header.data_start).map_err(write)?;
            // Tensors that the index finds in another shard are no part of the checkpoint; they stay as they are.
            for t in shard.unused.iter().filter_map(|&i| shard.header.tensors.get(i)) {
                let start = shard.header.data_start;
                copy_range(source, out.file(), start + t.begin..start + t.end).map_err(write)?;
            }
        }
        let progress = self.session.progress("applying", self.layout.manifest().data_bytes());
        let blocks = u64::from(self.delta.header.blocks);
        let workers =
            work::each(self.args.threads, blocks, self.session.cancel(), Worker::default, |worker, i| {
                let (tile, sum) = self.read(&sources, i as u32, &mut worker.bytes)?;
                worker.tally.current.add(tile.block.tensor, sum);
                let record = self.delta.find(tile.number);
                let new_sum = match &record {
                    None => sum,
                    Some(record) => {
                        match self.change(worker, &tile, record, sum)? {
                            Outcome::Applied => worker.tally.applied += 1,
                            Outcome::Skipped => worker.tally.skipped += 1,
                            Outcome::Refetch => return Err(self.wrong_block(&tile)),
                        }
                        record.sum
                    }
                };
                worker.tally.state.add(tile.block.tensor, new_sum);
                let (shard, offset) = self.place(&tile);
                let out = &files[shard];
                out.file().write_all_at(&worker.bytes, offset).map_err(Error::io("write", out.target()))?;
                progress.add(worker.bytes.len() as u64);
                Ok(())
            })?;
        let tally = Tally::of(workers.into_iter().map(|h| h.tally));
        self.check_target(tally.state)?;
        if self.whole(tally.current).is_none() {
            return Err(self.wrong_state(tally.current));
        }
        for file in files {
            file.commit()?;
        }
        if let Some(dir) = dir {
            self.copy_index(dir.path())?;
            dir.commit()?;
        }
        Ok(tally)
    }

    fn in_place(&self) -> Result<Tally, Error> {
        let (base, header) = (&self.args.base, &self.delta.header);
        let mut journal = Journal::open(base)?;
        let checked = self.open_shards(true).and_then(|f| Ok((self.check_in_place(&f, &journal)?, f)));
        let (found, files) = match checked {
            Ok(checked) => checked,
            // Nothing was begun by this run; what an earlier one left may still be needed.
            Err(e) if journal.is_fresh() => return journal.remove().and(Err(e)),
            Err(Error::WrongBase { .. }) if !journal.is_of(header) => {
                return Err(Error::Unfinished { base: base.clone(), journal: journal.path().into() });
            }
            Err(Error::Cancelled) => return Err(self.partly(Error::Cancelled)),
            Err(e) => return Err(e),
        };
        let tally = match found {
            Found::Target => Tally { skipped: self.delta.entries().len() as u64, ..Tally::default() },
            Found::Base | Found::Mix => {
                journal.begin(header)?;
                match self.write_records(&files, &journal) {
                    Ok(tally) => tally,
                    Err(e) if journal.has_notes() => return Err(self.partly(e)),
                    Err(e) => return journal.remove().and(Err(e)),
                }
            }
        };
        for (file, shard) in files.iter().zip(self.layout.shards()) {
            file.sync_all().map_err(Error::io("write", &shard.path)).map_err(|e| self.partly(e))?;
        }
        journal.remove()?;
        Ok(tally)
    }

    /// Writes all blocks that have a record and are not new already.
    fn write_records(&self, files: &[File], journal: &Journal) -> Result<Tally, Error> {
        let entries = self.delta.entries();
        let tile = |number| Tile::of(self.layout.manifest(), number).map_or(0, |t| t.bytes() as u64);
        let progress = self.session.progress("writing", entries.iter().map(|e| tile(e.block)).sum());
        let worker = || (Worker::default(), journal.slot());
        let workers = work::each(
            self.args.threads,
            entries.len() as u64,
            self.session.cancel(),
            worker,
            |state, i| {
                let (worker, slot) = state;
                let record = self.delta.record(&entries[i as usize]);
                let (tile, sum) = self.read(files, record.block, &mut worker.bytes)?;
                progress.add(worker.bytes.len() as u64);
                match self.change(worker, &tile, &record, sum)? {
                    Outcome::Skipped => {
                        worker.tally.skipped += 1;
                        return Ok(());
                    }
                    Outcome::Applied => {}
                    Outcome::Refetch if self.recall(journal, &tile, &record, &mut worker.bytes)? => {}
                    Outcome::Refetch => return Err(self.wrong_block(&tile)),
                }
                journal.note(*slot, tile.number, &worker.bytes)?;
                let (shard, offset) = self.place(&tile);
                let path = &self.layout.shards()[shard].path;
                files[shard].write_all_at(&worker.bytes, offset).map_err(Error::io("write", path))?;
                worker.tally.applied += 1;
                Ok(())
            },
        )?;
        Ok(Tally::of(workers.into_iter().map(|(h, _)| h.tally)))
    }

    /// The pass that only reads: whether writing all records now would give the target.
    fn check_in_place(&self, files: &[File], journal: &Journal) -> Result<Found, Error> {
        let progress = self.session.progress("checking", self.layout.manifest().data_bytes());
        let blocks = u64::from(self.delta.header.blocks);
        let workers =
            work::each(self.args.threads, blocks, self.session.cancel(), Worker::default, |worker, i| {
                let (tile, sum) = self.read(files, i as u32, &mut worker.bytes)?;
                progress.add(worker.bytes.len() as u64);
                worker.tally.current.add(tile.block.tensor, sum);
                let Some(record) = self.delta.find(tile.number) else {
                    worker.tally.state.add(tile.block.tensor, sum);
                    return Ok(());
                };
                worker.tally.state.add(tile.block.tensor, record.sum);
                match self.change(worker, &tile, &record, sum)? {
                    Outcome::Applied | Outcome::Skipped => Ok(()),
                    Outcome::Refetch if self.recall(journal, &tile, &record, &mut worker.bytes)? => Ok(()),
                    Outcome::Refetch => Err(self.wrong_block(&tile)),
                }
            })?;
        let tally = Tally::of(workers.into_iter().map(|h| h.tally));
        self.check_target(tally.state)?;
        match self.whole(tally.current) {
            Some(found) => Ok(found),
            None if journal.is_of(&self.delta.header) => Ok(Found::Mix),
            None => Err(self.wrong_state(tally.current)),
        }
    }

    /// Which version of the delta a state is, if it is one.
    fn whole(&self, current: StateSum) -> Option<Found> {
        let header = &self.delta.header;
        let digest = current.digest(header.layout_hash);
        if digest == header.target_digest {
            return Some(Found::Target);
        }
        (digest == header.base_digest).then_some(Found::Base)
    }

    /// Reads a block into `bytes` and sums it.
    fn read(&self, files: &[File], number: u32, bytes: &mut Vec<u8>) -> Result<(Tile, BlockSum), Error> {
        let tile = Tile::of(self.layout.manifest(), number).map_err(|e| Error::Bug(e.to_string()))?;
        if !tile.block.is_contiguous() {
            return Err(Error::Bug("a strided block in a default cut".into()));
        }
        bytes.resize(tile.bytes(), 0);
        let (shard, offset) = self.place(&tile);
        let path = &self.layout.shards()[shard].path;
        files[shard].read_exact_at(bytes, offset).map_err(Error::io("read", path))?;
        Ok((tile, sum_block(self.kernels, &tile.block, tile.unit, bytes)))
    }

    fn change(
        &self,
        worker: &mut Worker,
        tile: &Tile,
        record: &Record<'_>,
        sum: BlockSum,
    ) -> Result<Outcome, Error> {
        let outcome = worker.applier.apply(self.kernels, tile, record, sum, &mut worker.bytes);
        outcome.map_err(Error::content(&self.args.delta))
    }

    fn recall(
        &self,
        journal: &Journal,
        tile: &Tile,
        record: &Record<'_>,
        bytes: &mut [u8],
    ) -> Result<bool, Error> {
        let right = |b: &[u8]| sum_block(self.kernels, &tile.block, tile.unit, b) == record.sum;
        journal.recall(tile.number, bytes, right)
    }

    /// The shard of a block and its place there.
    fn place(&self, tile: &Tile) -> (usize, u64) {
        let place = self.layout.place(tile.block.tensor as usize);
        (place.shard, place.offset + tile.block.start * tile.unit as u64)
    }

    fn check_target(&self, state: StateSum) -> Result<(), Error> {
        let header = &self.delta.header;
        let got = state.digest(header.layout_hash);
        if got == header.target_digest {
            return Ok(());
        }
        let why = format!(
            "a block that the delta does not change differs from its base {} (the result would be {got} instead of {})",
            header.base_digest, header.target_digest
        );
        Err(self.wrong(why))
    }

    fn wrong_state(&self, current: StateSum) -> Error {
        let header = &self.delta.header;
        let digest = current.digest(header.layout_hash);
        let (base, target) = (header.base_digest, header.target_digest);
        self.wrong(format!("its state digest is {digest}, and the delta leads from {base} to {target}"))
    }

    fn partly(&self, source: Error) -> Error {
        Error::PartlyUpdated { base: self.args.base.clone(), source: Box::new(source) }
    }

    fn wrong_block(&self, tile: &Tile) -> Error {
        let tensor = &self.layout.manifest().tensors()[tile.block.tensor as usize];
        let (from, to) = (tile.block.start, tile.block.start + tile.block.units());
        self.wrong(format!(
            "elements {from}..{to} of tensor {:?} are neither those of {} nor those of {}",
            tensor.name, self.delta.header.base_digest, self.delta.header.target_digest
        ))
    }

    fn wrong(&self, why: String) -> Error {
        Error::WrongBase { base: self.args.base.clone(), delta: self.args.delta.clone(), why }
    }

    fn open_shards(&self, write: bool) -> Result<Vec<File>, Error> {
        let open = |path: &Path| {
            OpenOptions::new().read(true).write(write).open(path).map_err(Error::io("open", path))
        };
        self.layout.shards().iter().map(|s| open(&s.path)).collect()
    }

    fn create_shards(&self, dir: &Path, sources: &[File]) -> Result<Vec<OutFile>, Error> {
        let create = |path: &Path, source| match path.file_name() {
            Some(name) => OutFile::create(&dir.join(name), &[])?.with_mode_of(source),
            None => Err(Error::Bug(format!("shard {} has no name", path.display()))),
        };
        self.layout.shards().iter().zip(sources).map(|(s, source)| create(&s.path, source)).collect()
    }

    fn copy_index(&self, dir: &Path) -> Result<(), Error> {
        let from = self.args.base.join(INDEX);
        let mut source = match File::open(&from) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            opened => opened.map_err(Error::io("open", &from))?,
        };
        let out = OutFile::create(&dir.join(INDEX), &[])?.with_mode_of(&source)?;
        io::copy(&mut source, &mut out.file()).map_err(Error::io("write", out.target()))?;
        out.commit()
    }
}

/// Copies a range of bytes through a small buffer.
fn copy_range(from: &File, to: &File, range: std::ops::Range<u64>) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    let mut at = range.start;
    while at < range.end {
        let n = (range.end - at).min(buffer.len() as u64) as usize;
        from.read_exact_at(&mut buffer[..n], at)?;
        to.write_all_at(&buffer[..n], at)?;
        at += n as u64;
    }
    Ok(())
}
