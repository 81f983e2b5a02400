//! The deltas of a publisher, on disk.
//!
//! | module | what it owns |
//! |---|---|
//! | `reader` | a delta file read record by record |
//! | `join` | consecutive deltas made one |
//!
//! Owns: the directory `deltas/` of a region: which deltas are kept, which are thrown away, and the composed ones
//! that lead a receiver from where it is to where it wants to be. Called by the agent. Must not: decide whether a
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
//! [`History::segment`] answers one file for any two versions of the chain. If there is none yet, the way is
//! divided into aligned runs of 1, 2, 4, 8 … links, as few as possible; each run of more than one is composed and
//! kept, since receivers that lag differently share it, and then they are composed into the one asked for, which is
//! kept too. Callers that ask for the same one at the same time wait for the first.
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
//! - H-1 A segment applied to its base gives its target.
//! - H-2 The newest link is never thrown away for want of room.
//! - H-3 A segment is composed once for all who ask for it at a time.
//! - H-4 A killed agent leaves nothing that the next one takes for a delta and is not.

mod join;
mod reader;

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use windlass_core::delta::{DeltaError, DeltaHeader};
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, ModelId, Version};
use windlass_core::manifest::Manifest;

use self::join::JoinFault;
use self::reader::Fault;
use crate::file::io_kind;
use crate::seal::DeltaFile;
use crate::seal::draft::{self, Draft};
use crate::stop::{Stop, Stopped};

/// Why a delta cannot be kept or had.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The base is older than the oldest delta.
    #[error("version {base} is too old for a delta: the history begins at {oldest}; pull the full image")]
    TooOld {
        /// The base asked for.
        base: Version,
        /// The oldest base there is.
        oldest: Version,
    },
    /// A version that the chain does not have.
    #[error(
        "version {version} is not one of the history, which leads from {oldest} to {newest}; pull the full image"
    )]
    Unknown {
        /// The version asked for.
        version: Version,
        /// The oldest base there is.
        oldest: Version,
        /// The newest target there is.
        newest: Version,
    },
    /// There is no delta at all.
    #[error(
        "the history is empty, so that nothing leads from version {base} to {target}; pull the full image"
    )]
    Empty {
        /// The base asked for.
        base: Version,
        /// The target asked for.
        target: Version,
    },
    /// The target is not newer than the base.
    #[error("no delta leads from version {base} to {target}: deltas lead to newer versions only")]
    Backwards {
        /// The base asked for.
        base: Version,
        /// The target asked for.
        target: Version,
    },
    /// A file is not the delta that it should be. It has been thrown away.
    #[error("the delta {} is broken and was removed; pull the full image", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: DeltaError,
    },
    /// A delta of another model, incarnation, place or length.
    #[error("{} does not belong in this history: its {what} is {found} instead of {expected}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// What it has.
        found: String,
        /// What it should have.
        expected: String,
    },
    /// A delta that does not compose.
    #[error(
        "the delta {} has context records, which do not compose without the image; seal a plain delta for the \
         history, or pull the full image", path.display()
    )]
    Context {
        /// The file.
        path: PathBuf,
    },
    /// A composed record that no reader would take.
    #[error(
        "block {block} changed so much from version {base} to {target} that its changes are longer than the block; \
         pull the full image"
    )]
    TooDense {
        /// The base asked for.
        base: Version,
        /// The target asked for.
        target: Version,
        /// The block.
        block: u32,
    },
    /// A link that leads to an older version than the chain has.
    #[error("version {target} cannot be added to a history that leads to {newest}: versions only grow")]
    NotNewer {
        /// Where the new link leads.
        target: Version,
        /// Where the chain leads.
        newest: Version,
    },
    /// The caller gave up.
    #[error("waiting for the delta from version {base} to {target} was given up")]
    Stopped {
        /// The base asked for.
        base: Version,
        /// The target asked for.
        target: Version,
        /// Why.
        source: Stopped,
    },
}

impl HistoryError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            HistoryError::Io { source, .. } => io_kind(source),
            HistoryError::TooOld { .. } | HistoryError::NotNewer { .. } => Kind::Stale,
            HistoryError::Unknown { .. } | HistoryError::Empty { .. } => Kind::NotFound,
            HistoryError::Backwards { .. } | HistoryError::Foreign { .. } => Kind::Invalid,
            HistoryError::Broken { source, .. } => source.kind(),
            HistoryError::Context { .. } | HistoryError::TooDense { .. } => Kind::Unsupported,
            HistoryError::Stopped { source, .. } => source.kind(),
        }
    }
}

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
    /// Units that change.
    pub changes: u64,
}

/// A delta as [`History::list`] tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Where it begins.
    pub base: Version,
    /// Where it leads.
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
    state: Mutex<State>,
}

type Key = (Version, Version);

#[derive(Debug, Default)]
struct State {
    links: VecDeque<Held>,
    /// The number of the first link; the others follow. Only runs of links are aligned by it.
    first: u64,
    composed: HashMap<Key, Held>,
    jobs: HashMap<Key, Arc<Job>>,
    clock: u64,
}

#[derive(Debug)]
struct Held {
    file: DeltaFile,
    open: Weak<Segment>,
    used: u64,
}

impl Held {
    fn new(file: DeltaFile) -> Held {
        Held { file, open: Weak::new(), used: 0 }
    }

    fn key(&self) -> Key {
        (self.file.header.base.1, self.file.header.target.1)
    }
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
    /// earlier agent of the same incarnation left.
    pub fn open(
        dir: &Path,
        model_id: ModelId,
        incarnation: Incarnation,
        manifest: Arc<Manifest>,
        limits: Limits,
    ) -> Result<History, HistoryError> {
        let name = format!("{:016x}", incarnation.0);
        let own = dir.join(&name);
        for dir in [dir, &own] {
            draft::make_dir(dir).map_err(io_error("create", dir))?;
        }
        sweep_others(dir, OsStr::new(&name))?;
        let history = History { dir: own, model_id, incarnation, manifest, limits, state: Mutex::default() };
        let found = history.read_dir()?;
        history.lock().take_over(found);
        history.lock().evict(limits);
        Ok(history)
    }

    /// Where the delta between two versions belongs; the place to seal it to.
    pub fn path(&self, base: Version, target: Version) -> PathBuf {
        self.dir.join(format!("{base:020}-{target:020}.wdelta"))
    }

    /// Adds the delta that leads to a new version, which must be in its place already.
    pub fn add(&self, file: DeltaFile) -> Result<(), HistoryError> {
        if file.context_records > 0 {
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
    /// `stop`, for whoever composes it already.
    pub fn segment(&self, base: Version, target: Version, stop: &Stop) -> Result<Arc<Segment>, HistoryError> {
        let stopped = |source| HistoryError::Stopped { base, target, source };
        loop {
            stop.check().map_err(stopped)?;
            let mut state = self.lock();
            let span = state.span(base, target)?;
            if let Some(found) = state.get((base, target))? {
                return Ok(found);
            }
            let Some(job) = state.jobs.get(&(base, target)).cloned() else {
                let task = Task { history: self, key: (base, target), job: Arc::default() };
                state.jobs.insert(task.key, Arc::clone(&task.job));
                drop(state);
                let made = self.compose((base, target), span, stop);
                task.over(made.as_ref().ok());
                return made;
            };
            drop(state);
            match job.wait(stop).map_err(stopped)? {
                Some(made) => return Ok(made),
                // Whoever composed it failed or gave up; that is not the end of it for this caller.
                None => continue,
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
                Err(_) if path.file_name().is_some_and(draft::is_draft) => {
                    remove(&path, "an unfinished draft")
                }
                Err(why) => remove(&path, &chain(&why)),
            }
        }
        Ok(found)
    }

    /// Composes the delta between two versions from what is there, and keeps it.
    fn compose(&self, key: Key, span: Span, stop: &Stop) -> Result<Arc<Segment>, HistoryError> {
        let keys = self.lock().pieces(span);
        let inputs: Vec<_> =
            keys.into_iter().map(|(b, t)| self.segment(b, t, stop)).collect::<Result<_, _>>()?;
        let (Some(first), Some(last)) = (inputs.first(), inputs.last()) else {
            return Err(HistoryError::Empty { base: key.0, target: key.1 });
        };
        let (a, b) = (&first.header, &last.header);
        let header = DeltaHeader { base: a.base, base_digest: a.base_digest, ..b.clone() };
        let path = self.path(key.0, key.1);
        let write = |action| io_error(action, &path);
        let draft = Draft::create(&path).map_err(write("create"))?;
        let joined = join::join(&self.manifest, &inputs, &header, &draft, stop);
        let (bytes, changes) = joined.map_err(|fault| self.judge(key, &inputs, &path, fault))?;
        draft.place().map_err(write("place"))?;
        let file = DeltaFile { path, header, bytes, changes, context_records: 0 };
        let segment = open_segment(&file)?;
        self.lock().keep(file, &segment, self.limits);
        Ok(segment)
    }

    /// Says what a failure to join means, and throws a broken input away.
    fn judge(
        &self,
        (base, target): Key,
        inputs: &[Arc<Segment>],
        out: &Path,
        fault: JoinFault,
    ) -> HistoryError {
        match fault {
            JoinFault::Stopped(source) => HistoryError::Stopped { base, target, source },
            JoinFault::Write(source) => HistoryError::Io { action: "write", path: out.to_owned(), source },
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

/// Links by their numbers: from the first to before the last.
type Span = (u64, u64);

impl State {
    fn oldest(&self) -> Option<Version> {
        self.links.front().map(|h| h.key().0)
    }

    fn newest(&self) -> Option<Version> {
        self.links.back().map(|h| h.key().1)
    }

    fn bytes(&self) -> u64 {
        self.links.iter().chain(self.composed.values()).map(|h| h.file.bytes).sum()
    }

    /// The links between two versions.
    fn span(&self, base: Version, target: Version) -> Result<Span, HistoryError> {
        let (Some(oldest), Some(newest)) = (self.oldest(), self.newest()) else {
            return Err(HistoryError::Empty { base, target });
        };
        if base >= target {
            return Err(HistoryError::Backwards { base, target });
        }
        if base < oldest {
            return Err(HistoryError::TooOld { base, oldest });
        }
        let unknown = |version| HistoryError::Unknown { version, oldest, newest };
        let from = self.links.binary_search_by_key(&base, |h| h.key().0).map_err(|_| unknown(base))?;
        let to = self.links.binary_search_by_key(&target, |h| h.key().1).map_err(|_| unknown(target))?;
        Ok((self.first + from as u64, self.first + to as u64 + 1))
    }

    /// The versions that a span leads from and to.
    fn key(&self, (from, to): Span) -> Option<Key> {
        let link = |n: u64| self.links.get(n.checked_sub(self.first)? as usize);
        Some((link(from)?.key().0, link(to.checked_sub(1)?)?.key().1))
    }

    /// What to compose a span from.
    fn pieces(&self, span: Span) -> Vec<Key> {
        let spans = if is_aligned(span) { self.available(span) } else { runs(span) };
        // A link that was thrown away meanwhile is missed when its segment is asked for.
        spans.into_iter().filter_map(|s| self.key(s)).collect()
    }

    /// The fewest files that are there and make up a span of several links.
    fn available(&self, (from, to): Span) -> Vec<Span> {
        let mut spans = Vec::new();
        let mut at = from;
        while at < to {
            let longest = (at + 2..=to).rev().find(|&end| {
                (at, end) != (from, to) && self.key((at, end)).is_some_and(|k| self.composed.contains_key(&k))
            });
            let end = longest.unwrap_or(at + 1);
            spans.push((at, end));
            at = end;
        }
        spans
    }

    /// An existing file, opened.
    fn get(&mut self, key: Key) -> Result<Option<Arc<Segment>>, HistoryError> {
        self.clock += 1;
        let clock = self.clock;
        let link = self.links.binary_search_by_key(&key.0, |h| h.key().0).ok();
        let link = link.and_then(|i| self.links.get_mut(i)).filter(|h| h.key() == key);
        let Some(held) = link.or(self.composed.get_mut(&key)) else { return Ok(None) };
        held.used = clock;
        if let Some(open) = held.open.upgrade() {
            return Ok(Some(open));
        }
        match open_segment(&held.file) {
            Ok(segment) => {
                held.open = Arc::downgrade(&segment);
                Ok(Some(segment))
            }
            Err(e) => {
                self.discard(key);
                Err(e)
            }
        }
    }

    fn append(&mut self, file: DeltaFile) -> Result<(), HistoryError> {
        let (base, target) = (file.header.base.1, file.header.target.1);
        // A version that was sealed again after its agent was killed replaces itself.
        if self.links.back().is_some_and(|h| h.key() == (base, target)) {
            let same = self.links.pop_back().is_some_and(|h| h.file.header == file.header);
            if !same {
                self.forget(|key| key.1 >= target);
            }
        }
        if let Some(newest) = self.newest().filter(|&newest| newest >= target) {
            return Err(HistoryError::NotNewer { target, newest });
        }
        let follows = |h: &Held| follows(&h.file.header, &file.header);
        if self.links.back().is_some_and(|h| !follows(h)) {
            tracing::info!(base, target, "the delta does not follow the history, which begins anew");
            while let Some(link) = self.links.pop_front() {
                remove(&link.file.path, "nothing leads on from it");
            }
            self.forget(|_| true);
        }
        if self.links.is_empty() {
            self.first = base;
        }
        self.links.push_back(Held::new(file));
        Ok(())
    }

    /// Adds a composed delta, unless the chain has moved past it.
    fn keep(&mut self, file: DeltaFile, segment: &Arc<Segment>, limits: Limits) {
        self.clock += 1;
        let held = Held { open: Arc::downgrade(segment), used: self.clock, ..Held::new(file) };
        if self.span(held.key().0, held.key().1).is_err() {
            return remove(&held.file.path, "its links are gone");
        }
        self.composed.insert(held.key(), held);
        self.evict(limits);
    }

    fn evict(&mut self, limits: Limits) {
        loop {
            let (many, big) = (self.links.len() > limits.count.max(1), self.bytes() > limits.bytes);
            if many || (big && self.composed.is_empty() && self.links.len() > 1) {
                self.drop_oldest("the history is full");
            } else if self.composed.len() > limits.count || (big && !self.composed.is_empty()) {
                let unused = self.composed.values().min_by_key(|h| h.used).map(Held::key);
                self.forget(|key| Some(*key) == unused);
            } else {
                return;
            }
        }
    }

    fn drop_oldest(&mut self, why: &str) {
        let Some(link) = self.links.pop_front() else { return };
        self.first += 1;
        remove(&link.file.path, why);
        let oldest = self.oldest();
        self.forget(|key| oldest.is_none_or(|oldest| key.0 < oldest));
    }

    /// Throws composed deltas away.
    fn forget(&mut self, which: impl Fn(&Key) -> bool) {
        for (_, held) in self.composed.extract_if(|key, _| which(key)) {
            remove(&held.file.path, "the history is full");
        }
    }

    /// Throws a broken delta away, and with a link all that would lead over it.
    fn discard(&mut self, key: Key) {
        if self.composed.contains_key(&key) {
            return self.forget(|k| *k == key);
        }
        let Some(at) = self.links.iter().position(|h| h.key() == key) else { return };
        for _ in 0..=at {
            self.drop_oldest("a delta on the way is broken");
        }
    }

    /// Finds the chain that leads to the newest version among files that are right by themselves.
    fn take_over(&mut self, files: Vec<DeltaFile>) {
        let mut by_key: HashMap<Key, DeltaFile> =
            files.into_iter().map(|f| ((f.header.base.1, f.header.target.1), f)).collect();
        let mut end = by_key.keys().map(|k| k.1).max();
        while let Some(target) = end {
            // The shortest step is the link; longer ones were composed from it.
            let Some(key) = by_key.keys().filter(|k| k.1 == target).max().copied() else { break };
            let Some(file) = by_key.remove(&key) else { break };
            if self.links.front().is_some_and(|next| !follows(&file.header, &next.file.header)) {
                remove(&file.path, "it does not lead to the history");
                break;
            }
            self.links.push_front(Held::new(file));
            end = Some(key.0);
        }
        self.first = self.oldest().unwrap_or(0);
        for (key, file) in by_key {
            if self.spans(&file.header) {
                self.composed.insert(key, Held::new(file));
            } else {
                remove(&file.path, "it does not lead to the history");
            }
        }
    }

    /// Whether a delta leads from one version of the chain to another, by number and by digest.
    fn spans(&self, header: &DeltaHeader) -> bool {
        let base = self.links.iter().any(|h| same(&h.file.header, header, Side::Base));
        base && self.links.iter().any(|h| same(&h.file.header, header, Side::Target))
    }
}

enum Side {
    Base,
    Target,
}

fn same(a: &DeltaHeader, b: &DeltaHeader, side: Side) -> bool {
    match side {
        Side::Base => (a.base, a.base_digest) == (b.base, b.base_digest),
        Side::Target => (a.target, a.target_digest) == (b.target, b.target_digest),
    }
}

fn follows(first: &DeltaHeader, second: &DeltaHeader) -> bool {
    (first.target, first.target_digest) == (second.base, second.base_digest)
}

/// Whether a span is a power of two long and begins at a multiple of its length.
fn is_aligned((from, to): Span) -> bool {
    (to - from).is_power_of_two() && from.is_multiple_of(to - from)
}

/// The fewest aligned spans that make up a span.
fn runs((mut from, to): Span) -> Vec<Span> {
    let mut spans = Vec::new();
    while from < to {
        let room = 1 << (to - from).ilog2();
        let aligned = if from == 0 { room } else { 1 << from.trailing_zeros() };
        let len = room.min(aligned);
        spans.push((from, from + len));
        from += len;
    }
    spans
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
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
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
            let waited = self.over.wait_timeout(outcome, stop.nap());
            outcome = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn open_file(path: &Path) -> io::Result<File> {
    // A link that somebody else put here, or a pipe that would never end, is not followed or waited for.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidData.into()) }
}

fn open_segment(held: &DeltaFile) -> Result<Arc<Segment>, HistoryError> {
    let io = |source| HistoryError::Io { action: "open", path: held.path.clone(), source };
    let file = open_file(&held.path).map_err(io)?;
    let have = file.metadata().map_err(io)?.len();
    if have != held.bytes {
        let source = DeltaError::Truncated { what: "parts", need: held.bytes, have };
        return Err(HistoryError::Broken { path: held.path.clone(), source });
    }
    Ok(Arc::new(Segment {
        file: Arc::new(file),
        path: held.path.clone(),
        header: held.header.clone(),
        bytes: held.bytes,
        changes: held.changes,
    }))
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
            remove(&path, "it belongs to no incarnation");
        }
    }
    Ok(())
}

/// Removes a file of the history. That it cannot be is told and no reason to fail: it is no longer counted on.
fn remove(path: &Path, why: &str) {
    match draft::remove_if_there(path) {
        Ok(()) => tracing::info!(path = %path.display(), why, "removed a delta"),
        Err(e) => tracing::warn!(path = %path.display(), why, error = %e, "cannot remove a delta"),
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
fn chain(e: &HistoryError) -> String {
    let cause = std::error::Error::source(e).map(|c| format!(": {c}")).unwrap_or_default();
    format!("{e}{cause}")
}
