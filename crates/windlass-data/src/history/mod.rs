//! The deltas of a publisher, on disk.
//!
//! | module | what it owns |
//! |---|---|
//! | `chain` | which deltas there are, and which go when there are too many |
//! | `reader` | a delta file read record by record |
//! | `join` | consecutive deltas made one |
//! | `back` | the way back to an older version |
//! | `writer` | a delta on its way to its place |
//! | `trail` | what a reader of an image finds in it |
//!
//! Owns: the directory `deltas/` of a region: which deltas are kept, which are thrown away, and the composed ones
//! that lead a receiver from where it is to where it wants to be. Called by the agent, and by receivers that
//! keep what they applied. Must not: decide whether a
//! delta is worth sending; the caller compares [`Segment::bytes`] with the image.
//!
//! # Files
//!
//! `deltas/<incarnation>/<base>-<target>.wdelta`, the incarnation in 16 hexadecimal digits, the versions in 20
//! decimal ones. Every file is a whole delta container (see [`windlass_core::delta`]) with its blocks in ascending
//! order; it is written as a draft and renamed. The files survive the agent: [`History::open`] reads headers and
//! ends, keeps the chain that leads to the newest version and the composed deltas between versions of that chain,
//! and removes drafts, broken and foreign files, and other incarnations. What lies between header and end is
//! checked when it is composed or received.
//!
//! # The chain
//!
//! Links follow one another: the base of each, version and digest, is the target of the one before. A link that
//! does not follow the newest begins a new chain and the old one is thrown away, because nothing leads on from it.
//! Only plain deltas are links: a record of context mode needs the old image, so that a chain with one could not be
//! composed.
//!
//! # Segments
//!
//! [`History::segment`] answers one file for any two versions of the chain. If there is none yet, it is composed from the
//! longest files on the way that are there, links and composed ones, in one pass, and kept: a receiver that lags further
//! shares the end of the way with it, and the next version begins with it. Callers that ask for the same one at the same
//! time wait for the first.
//!
//! # Limits
//!
//! At most [`Limits::count`] links and as many composed deltas, and [`Limits::bytes`] for all of them. Over the
//! limit, composed deltas go first, the one that was not used for longest before the others, then the oldest link
//! with the composed deltas that begin before the next. The newest link stays whatever the limits are. A file that
//! is thrown away stays readable for those who hold its [`Segment`].
//!
//! # Invariants
//!
//! | | must hold | test |
//! |---|---|---|
//! | HISTORY-1 | A segment applied to its base gives its target. | `any_segment_of_a_history_leads_to_its_target` |
//! | HISTORY-2 | The newest link is never thrown away for want of room. | `composed_deltas_go_before_links_and_the_oldest_link_first` |
//! | HISTORY-3 | A segment is composed once for all who ask for it at a time. | `callers_of_one_segment_share_one_composition` |
//! | HISTORY-5 | A delta back, applied to its base, gives its target bit for bit. | `any_version_of_a_history_can_be_gone_back_to` |
//! | HISTORY-4 | A killed agent leaves nothing that the next one takes for a delta and is not. | `a_sealer_that_is_killed_leaves_nothing_that_counts`, `opening_a_history_removes_what_is_broken_foreign_or_unfinished` |

mod back;
mod chain;
mod error;
mod join;
mod reader;
#[cfg(test)]
mod tests;
mod trail;
mod writer;

pub use self::back::Whole;
pub use self::error::HistoryError;
pub use self::trail::{Trail, TrailError};

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};
use windlass_core::delta::{DeltaError, DeltaHeader};
use windlass_core::identity::{Incarnation, ModelId, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;

use self::chain::{Held, Key, State, follows, open_file, open_segment, remove};
use self::join::JoinFault;
use self::reader::Fault;
use self::writer::Writer;
use crate::seal::DeltaFile;
use crate::seal::draft;
use crate::stop::{Stop, Stopped};

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most links; as many composed deltas are kept beside them.
    pub count: usize,
    /// The most bytes of all files.
    pub bytes: u64,
}

/// One delta that leads from a version to another. Stays readable when its file is thrown away.
#[derive(Debug)]
pub struct Segment {
    /// Open for reading; several readers share it and name their offsets.
    pub file: Arc<File>,
    /// Where it is, or was.
    pub path: PathBuf,
    /// From where to where it leads.
    pub header: DeltaHeader,
    /// How long it is.
    pub bytes: u64,
    pub changes: u64,
}

/// A delta as [`History::list`] tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub base: Version,
    pub target: Version,
    /// How long it is.
    pub bytes: u64,
    /// Whether it was composed from links.
    pub composed: bool,
}

/// The deltas of one incarnation of a model.
#[derive(Debug)]
pub struct History {
    dir: PathBuf,
    model_id: ModelId,
    incarnation: Incarnation,
    manifest: Arc<Manifest>,
    limits: Limits,
    threads: usize,
    state: Mutex<State>,
}

/// A composition under way.
#[derive(Debug, Default)]
struct Job {
    outcome: Mutex<Outcome>,
    over: Condvar,
}

#[derive(Clone, Debug, Default)]
enum Outcome {
    #[default]
    Pending,
    Failed,
    Made(Arc<Segment>),
}

impl History {
    /// Opens the history in `dir`, the region's `deltas`, which is made if it is not there, and takes over what an
    /// earlier agent of the same incarnation left. Deltas are composed by so many `threads`.
    pub fn open(
        dir: &Path,
        model_id: ModelId,
        incarnation: Incarnation,
        manifest: Arc<Manifest>,
        limits: Limits,
        threads: usize,
    ) -> Result<History, HistoryError> {
        let name = format!("{:016x}", incarnation.0);
        let own = dir.join(&name);
        for dir in [dir, &own] {
            draft::make_dir(dir).map_err(io_error("create", dir))?;
        }
        sweep_others(dir, OsStr::new(&name))?;
        let history =
            History { dir: own, model_id, incarnation, manifest, limits, threads, state: Mutex::default() };
        let found = history.read_dir()?;
        history.lock().take_over(found);
        history.lock().evict(limits);
        Ok(history)
    }

    /// Where the delta between two versions belongs; the place to seal it to.
    pub fn path(&self, base: Version, target: Version) -> PathBuf {
        self.dir.join(file_name(base, target))
    }

    /// Throws all deltas away: nothing leads on from what they lead to.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// Throws a composed delta away that is not what it was thought to be.
    pub fn forget(&self, base: Version, target: Version) {
        self.lock().forget(|key| *key == (base, target));
    }

    /// Adds the delta that leads to a new version, which must be in its place already.
    pub fn add(&self, file: DeltaFile) -> Result<(), HistoryError> {
        if file.context_records > 0 {
            remove(&file.path, "it does not compose");
            return Err(HistoryError::Context { path: file.path });
        }
        let (base, target) = (file.header.base.1, file.header.target.1);
        let place = self.path(base, target);
        if file.path != place {
            let (found, expected) = (file.path.display().to_string(), place.display().to_string());
            return Err(HistoryError::Foreign { path: file.path, what: "place", found, expected });
        }
        let file = self.examine(&place)?;
        let mut state = self.lock();
        state.append(file)?;
        state.evict(self.limits);
        Ok(())
    }

    /// The delta that leads from `base` to `target`, as one file. Composes it if it is not there, and waits, with
    /// `stop`, for the thread that composes it already.
    pub fn segment(&self, base: Version, target: Version, stop: &Stop) -> Result<Arc<Segment>, HistoryError> {
        let key = (base, target);
        let pieces = |state: &State| Ok(state.pieces(state.span(base, target)?));
        self.shared(key, stop, pieces, |pieces| self.compose(key, &pieces, stop))
    }

    /// A delta that is there, or is made by the first of those who ask for it at a time. `way` says from what, with the
    /// list locked.
    fn shared(
        &self,
        (base, target): Key,
        stop: &Stop,
        way: impl Fn(&State) -> Result<Vec<Key>, HistoryError>,
        make: impl FnOnce(Vec<Key>) -> Result<Arc<Segment>, HistoryError>,
    ) -> Result<Arc<Segment>, HistoryError> {
        let stopped = |source| HistoryError::Stopped { base, target, source };
        loop {
            stop.check().map_err(stopped)?;
            let mut state = self.lock();
            let pieces = way(&state)?;
            if let Some(found) = state.get((base, target))? {
                return Ok(found);
            }
            let Some(job) = state.jobs.get(&(base, target)).cloned() else {
                let task = Task { history: self, key: (base, target), job: Arc::default() };
                state.jobs.insert(task.key, Arc::clone(&task.job));
                drop(state);
                let made = make(pieces);
                task.over(made.as_ref().ok());
                return made;
            };
            drop(state);
            // The thread that composes it may fail or give up; this caller then tries itself.
            if let Some(made) = job.wait(stop).map_err(stopped)? {
                return Ok(made);
            }
        }
    }

    /// Whether something leads from `base` to the newest version.
    pub fn reach(&self, base: Version) -> bool {
        let state = self.lock();
        state.newest().is_some_and(|newest| state.span(base, newest).is_ok())
    }

    /// The oldest version that something leads on from, and the newest version.
    pub fn ends(&self) -> Option<(Version, Version)> {
        let state = self.lock();
        Some((state.oldest()?, state.newest()?))
    }

    /// The versions of the chain, oldest first.
    pub fn versions(&self) -> Vec<Version> {
        let state = self.lock();
        let targets = state.links.iter().map(|link| link.key().1);
        state.oldest().into_iter().chain(targets).collect()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes()
    }

    /// All deltas: the links from the oldest to the newest, then the composed ones in the order of their versions.
    pub fn list(&self) -> Vec<Listed> {
        let state = self.lock();
        let tell = |h: &Held, composed| {
            let (base, target) = h.key();
            Listed { base, target, bytes: h.file.bytes, composed }
        };
        let mut composed: Vec<Listed> = state.composed.values().map(|h| tell(h, true)).collect();
        composed.sort_unstable_by_key(|l| (l.base, l.target));
        state.links.iter().map(|h| tell(h, false)).chain(composed).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Checks a file of this history from the outside: name, header and end.
    fn examine(&self, path: &Path) -> Result<DeltaFile, HistoryError> {
        let io = |source| HistoryError::Io { action: "read", path: path.to_owned(), source };
        let file = open_file(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let (header, changes) = reader::ends(&file, bytes).map_err(|fault| broken(path, fault))?;
        let foreign = |what, found: String, expected: String| {
            Err(HistoryError::Foreign { path: path.to_owned(), what, found, expected })
        };
        let delta = |source| HistoryError::Broken { path: path.to_owned(), source };
        header.check(&self.manifest).map_err(delta)?;
        if header.model_id != self.model_id {
            return foreign("model", header.model_id.to_string(), self.model_id.to_string());
        }
        for incarnation in [header.base.0, header.target.0] {
            if incarnation != self.incarnation {
                return foreign("incarnation", incarnation.to_string(), self.incarnation.to_string());
            }
        }
        let place = self.path(header.base.1, header.target.1);
        if path != place {
            return foreign("place", path.display().to_string(), place.display().to_string());
        }
        if header.base.1 >= header.target.1 {
            return foreign("target", header.target.1.to_string(), format!("more than {}", header.base.1));
        }
        Ok(DeltaFile { path: place, header, bytes, changes, context_records: 0 })
    }

    /// The deltas in the directory; everything else is removed.
    fn read_dir(&self) -> Result<Vec<DeltaFile>, HistoryError> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(io_error("read", &self.dir))? {
            let path = entry.map_err(io_error("read", &self.dir))?.path();
            match self.examine(&path) {
                Ok(file) => found.push(file),
                // Old units of a link; they go when it does.
                Err(_) if back::belongs(&path) => {}
                Err(_) if path.file_name().is_some_and(draft::is_draft) => {
                    tracing::info!(path = %path.display(), "removing a draft that a killed agent left");
                    remove(&path, "an unfinished draft");
                }
                Err(why) => {
                    let why = with_cause(&why);
                    tracing::warn!(path = %path.display(), why, "removing what is no delta of this history");
                    remove(&path, &why);
                }
            }
        }
        Ok(found)
    }

    /// Composes the delta between two versions from what is there, and keeps it.
    fn compose(&self, key: Key, pieces: &[Key], stop: &Stop) -> Result<Arc<Segment>, HistoryError> {
        let input = |&(b, t): &Key| self.segment(b, t, stop).map_err(|e| for_key(e, key));
        let inputs: Vec<Arc<Segment>> = pieces.iter().map(input).collect::<Result<_, _>>()?;
        let (Some(first), Some(last)) = (inputs.first(), inputs.last()) else {
            return Err(HistoryError::Empty { base: key.0, target: key.1 });
        };
        let (a, b) = (&first.header, &last.header);
        if let Some(gap) = inputs.windows(2).find(|w| !follows(&w[0].header, &w[1].header)) {
            let (first, second) = (gap[0].header.target_identity(), gap[1].header.base_identity());
            let source = DeltaError::NotConsecutive { first: first.to_string(), second: second.to_string() };
            return Err(HistoryError::Broken { path: gap[1].path.clone(), source });
        }
        let header = DeltaHeader { base: a.base, base_digest: a.base_digest, ..b.clone() };
        let path = self.path(key.0, key.1);
        let inputs: Vec<&Segment> = inputs.iter().map(|s| &**s).collect();
        let (bytes, changes) = self.write(&path, &header, &inputs, None, stop)?;
        let file = DeltaFile { path, header, bytes, changes, context_records: 0 };
        let segment = open_segment(&file)?;
        self.lock().keep(file, &segment, self.limits);
        Ok(segment)
    }

    /// What `segment` has of these blocks, as a delta between the states of these blocks alone, whose digests are given.
    /// It is in no list and its file has no name: it goes with the last who holds it. Made by one thread at a time.
    pub fn only(
        &self,
        segment: &Segment,
        blocks: &BlockRanges,
        (base_digest, target_digest): (StateDigest, StateDigest),
        stop: &Stop,
    ) -> Result<Arc<Segment>, HistoryError> {
        let header = DeltaHeader { base_digest, target_digest, ..segment.header.clone() };
        let path = self.dir.join("slice.wdelta");
        let (bytes, changes) = self.write(&path, &header, &[segment], Some(blocks), stop)?;
        let file = DeltaFile { path: path.clone(), header, bytes, changes, context_records: 0 };
        let made = open_segment(&file);
        draft::remove_if_there(&path).map_err(io_error("remove", &path))?;
        made
    }

    /// Writes one delta of several; answers its length and its changes.
    fn write(
        &self,
        path: &Path,
        header: &DeltaHeader,
        inputs: &[&Segment],
        only: Option<&BlockRanges>,
        stop: &Stop,
    ) -> Result<(u64, u64), HistoryError> {
        let writer = Writer::create(path, header)?;
        let joined = join::join(&self.manifest, inputs, only, writer, self.threads, stop);
        joined.map_err(|fault| self.judge((header.base.1, header.target.1), inputs, fault))?.place()
    }

    /// Says what a failure to join means, and throws a broken input away.
    fn judge(&self, (base, target): Key, inputs: &[&Segment], fault: JoinFault) -> HistoryError {
        match fault {
            JoinFault::Stopped(source) => HistoryError::Stopped { base, target, source },
            JoinFault::Write(error) => error,
            JoinFault::TooDense(block) => HistoryError::TooDense { base, target, block },
            JoinFault::Input(i, fault) => {
                let Some(input) = inputs.get(i) else { return HistoryError::Empty { base, target } };
                let path = input.path.clone();
                match fault {
                    Fault::Delta(DeltaError::ContextNeedsImage { .. }) => HistoryError::Context { path },
                    Fault::Delta(_) => {
                        self.lock().discard((input.header.base.1, input.header.target.1));
                        broken(&path, fault)
                    }
                    Fault::Io(_) => broken(&path, fault),
                }
            }
        }
    }
}

/// The duty to say how a composition ended, also when it panics.
struct Task<'h> {
    history: &'h History,
    key: Key,
    job: Arc<Job>,
}

impl Task<'_> {
    fn over(self, made: Option<&Arc<Segment>>) {
        if let Some(made) = made {
            *self.job.lock() = Outcome::Made(Arc::clone(made));
        }
    }
}

impl Drop for Task<'_> {
    fn drop(&mut self) {
        self.history.lock().jobs.remove(&self.key);
        let mut outcome = self.job.lock();
        if let Outcome::Pending = *outcome {
            *outcome = Outcome::Failed;
        }
        drop(outcome);
        self.job.over.notify_all();
    }
}

impl Job {
    fn lock(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock()
    }

    /// Waits until it is over; `None` if it failed.
    fn wait(&self, stop: &Stop) -> Result<Option<Arc<Segment>>, Stopped> {
        let mut outcome = self.lock();
        loop {
            match &*outcome {
                Outcome::Made(segment) => return Ok(Some(Arc::clone(segment))),
                Outcome::Failed => return Ok(None),
                Outcome::Pending => stop.check()?,
            }
            self.over.wait_for(&mut outcome, stop.nap());
        }
    }
}

fn file_name(base: Version, target: Version) -> String {
    format!("{base:020}-{target:020}.wdelta")
}

/// Removes what other incarnations left.
fn sweep_others(dir: &Path, own: &OsStr) -> Result<(), HistoryError> {
    for entry in fs::read_dir(dir).map_err(io_error("read", dir))? {
        let entry = entry.map_err(io_error("read", dir))?;
        let (name, path) = (entry.file_name(), entry.path());
        if name == own {
            continue;
        }
        let incarnation =
            name.len() == 16 && name.to_str().is_some_and(|n| u64::from_str_radix(n, 16).is_ok());
        let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
        if incarnation && is_dir {
            tracing::info!(path = %path.display(), "removing the deltas of another incarnation");
            fs::remove_dir_all(&path).map_err(io_error("remove", &path))?;
        } else if is_dir {
            tracing::warn!(path = %path.display(), "a directory that is none of the history's is left alone");
        } else {
            tracing::warn!(path = %path.display(), "removing a file that belongs to no incarnation");
            remove(&path, "it belongs to no incarnation");
        }
    }
    Ok(())
}

/// A wait for a part of the way is a wait for all of it.
fn for_key(e: HistoryError, (base, target): Key) -> HistoryError {
    match e {
        HistoryError::Stopped { source, .. } => HistoryError::Stopped { base, target, source },
        other => other,
    }
}

fn broken(path: &Path, fault: Fault) -> HistoryError {
    let path = path.to_owned();
    match fault {
        Fault::Io(source) => HistoryError::Io { action: "read", path, source },
        Fault::Delta(source) => HistoryError::Broken { path, source },
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HistoryError {
    let path = path.to_owned();
    move |source| HistoryError::Io { action, path, source }
}

/// An error with its causes, for the log.
fn with_cause(e: &HistoryError) -> String {
    let cause = std::error::Error::source(e).map(|c| format!(": {c}")).unwrap_or_default();
    format!("{e}{cause}")
}
