//! Which deltas there are, and which go when there are too many.
//!
//! Owns: the list behind a history's lock: links, composed deltas, and what is being composed.

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use windlass_core::delta::{DeltaError, DeltaHeader};
use windlass_core::identity::Version;

use super::{HistoryError, Job, Limits, Segment};
use crate::seal::DeltaFile;
use crate::seal::draft;

pub(super) type Key = (Version, Version);

/// Where the old units of a link's dense blocks are.
pub(super) fn back_path(link: &Path) -> PathBuf {
    link.with_extension("wback")
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) links: VecDeque<Held>,
    /// The number of the first link; the others follow.
    first: u64,
    pub(super) composed: HashMap<Key, Held>,
    /// Composed deltas that were thrown away and may still be open.
    gone: HashMap<Key, Weak<Segment>>,
    pub(super) jobs: HashMap<Key, Arc<Job>>,
    clock: u64,
}

#[derive(Debug)]
pub(super) struct Held {
    pub(super) file: DeltaFile,
    /// How long the file with the old units of its dense blocks is.
    back: u64,
    open: Weak<Segment>,
    used: u64,
}

impl Held {
    pub(super) fn new(file: DeltaFile) -> Held {
        let back = fs::symlink_metadata(back_path(&file.path)).map_or(0, |m| m.len());
        Held { file, back, open: Weak::new(), used: 0 }
    }

    pub(super) fn key(&self) -> Key {
        (self.file.header.base.1, self.file.header.target.1)
    }
}

/// Links by their numbers: from the first to before the last.
pub(super) type Span = (u64, u64);

impl State {
    pub(super) fn oldest(&self) -> Option<Version> {
        self.links.front().map(|h| h.key().0)
    }

    pub(super) fn newest(&self) -> Option<Version> {
        self.links.back().map(|h| h.key().1)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.links.iter().chain(self.composed.values()).map(|h| h.file.bytes + h.back).sum()
    }

    /// The single links of a span.
    pub(super) fn links_between(&self, (from, to): Span) -> Vec<Key> {
        (from..to).filter_map(|n| self.key((n, n + 1))).collect()
    }

    /// Whether one link leads from a version to another.
    pub(super) fn has_link(&self, key: Key) -> bool {
        self.links.iter().any(|h| h.key() == key)
    }

    /// Notes that the old units of a link's dense blocks were put beside it. False if the link is gone.
    pub(super) fn note_back(&mut self, key: Key, bytes: u64) -> bool {
        let link = self.links.iter_mut().find(|h| h.key() == key);
        link.map(|h| h.back = bytes).is_some()
    }

    /// The links between two versions.
    pub(super) fn span(&self, base: Version, target: Version) -> Result<Span, HistoryError> {
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

    /// What to compose a span of several links from: the longest file from its beginning on, then from there.
    pub(super) fn pieces(&self, (from, to): Span) -> Vec<Key> {
        let mut pieces = Vec::new();
        let mut at = from;
        while at < to {
            let longest = (at + 2..=to).rev().find(|&end| {
                (at, end) != (from, to) && self.key((at, end)).is_some_and(|k| self.composed.contains_key(&k))
            });
            let end = longest.unwrap_or(at + 1);
            // All of them are of this chain: a span is made and taken apart under one lock.
            pieces.extend(self.key((at, end)));
            at = end;
        }
        pieces
    }

    /// An existing file, opened. Composed ones that are still open count though they were thrown away.
    pub(super) fn get(&mut self, key: Key) -> Result<Option<Arc<Segment>>, HistoryError> {
        if let Some(segment) = self.gone.get(&key).and_then(Weak::upgrade) {
            return Ok(Some(segment));
        }
        self.clock += 1;
        let clock = self.clock;
        let link = self.links.binary_search_by_key(&key.0, |h| h.key().0).ok();
        let link = link.and_then(|i| self.links.get_mut(i)).filter(|h| h.key() == key);
        let is_link = link.is_some();
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
                // What was composed can be composed again.
                if is_link { Err(e) } else { Ok(None) }
            }
        }
    }

    pub(super) fn append(&mut self, file: DeltaFile) -> Result<(), HistoryError> {
        let (base, target) = (file.header.base.1, file.header.target.1);
        // A version that was sealed again after its agent was killed replaces itself.
        if self.links.back().is_some_and(|h| h.key() == (base, target)) {
            let same = self.links.pop_back().is_some_and(|h| h.file.header == file.header);
            if !same {
                self.forget(|key| key.0.max(key.1) >= target);
            }
        }
        if let Some(newest) = self.newest().filter(|&newest| newest >= target) {
            return Err(HistoryError::NotNewer { target, newest });
        }
        let follows = |h: &Held| follows(&h.file.header, &file.header);
        if self.links.back().is_some_and(|h| !follows(h)) {
            tracing::info!(base, target, "the delta does not follow the history, which begins anew");
            self.clear();
        }
        if self.links.is_empty() {
            self.first = base;
        }
        self.links.push_back(Held::new(file));
        Ok(())
    }

    pub(super) fn clear(&mut self) {
        while let Some(link) = self.links.pop_front() {
            remove_link(&link, "nothing leads on from it");
        }
        self.forget(|_| true);
    }

    /// Adds a composed delta, unless the chain has moved past it.
    pub(super) fn keep(&mut self, file: DeltaFile, segment: &Arc<Segment>, limits: Limits) {
        self.clock += 1;
        let held = Held { open: Arc::downgrade(segment), used: self.clock, ..Held::new(file) };
        // One that leads back has the newer version first.
        let (a, b) = held.key();
        if self.span(a.min(b), a.max(b)).is_err() {
            return remove(&held.file.path, "its links are gone");
        }
        self.composed.insert(held.key(), held);
        self.evict(limits);
    }

    pub(super) fn evict(&mut self, limits: Limits) {
        loop {
            let (many, big) = (self.links.len() > limits.count.max(1), self.bytes() > limits.bytes);
            if many || (big && self.composed.is_empty() && self.links.len() > 1) {
                self.drop_oldest("the history is full");
            } else if self.composed.len() > limits.count || (big && !self.composed.is_empty()) {
                self.make_room();
            } else {
                return;
            }
        }
    }

    /// Throws the composed delta away that was not used for longest.
    fn make_room(&mut self) {
        let unused = self.composed.values().min_by_key(|h| h.used).map(Held::key);
        if let Some((key, held)) = unused.and_then(|key| self.composed.remove_entry(&key)) {
            remove(&held.file.path, "the history is full");
            self.gone.retain(|_, segment| segment.strong_count() > 0);
            self.gone.insert(key, held.open);
        }
    }

    fn drop_oldest(&mut self, why: &str) {
        let Some(link) = self.links.pop_front() else { return };
        self.first += 1;
        remove_link(&link, why);
        let oldest = self.oldest();
        self.forget(|key| oldest.is_none_or(|oldest| key.0.min(key.1) < oldest));
    }

    /// Throws composed deltas away for good.
    pub(super) fn forget(&mut self, which: impl Fn(&Key) -> bool) {
        self.gone.retain(|key, _| !which(key));
        for (_, held) in self.composed.extract_if(|key, _| which(key)) {
            remove(&held.file.path, "it leads over links that are gone");
        }
    }

    /// Throws a broken delta away, and with a link all that would lead over it.
    pub(super) fn discard(&mut self, key: Key) {
        if self.composed.contains_key(&key) {
            return self.forget(|k| *k == key);
        }
        let Some(at) = self.links.iter().position(|h| h.key() == key) else { return };
        tracing::warn!(
            base = key.0,
            target = key.1,
            "a delta of the history is broken; what leads over it is removed"
        );
        for _ in 0..=at {
            self.drop_oldest("a delta on the way is broken");
        }
    }

    /// Finds the chain that leads to the newest version among files that are right by themselves.
    pub(super) fn take_over(&mut self, files: Vec<DeltaFile>) {
        let mut by_key: HashMap<Key, DeltaFile> =
            files.into_iter().map(|f| ((f.header.base.1, f.header.target.1), f)).collect();
        let mut end = by_key.keys().map(|k| k.1).max();
        while let Some(target) = end {
            // The shortest step is the link; longer ones were composed from it.
            let Some(key) = by_key.keys().filter(|k| k.1 == target).max().copied() else { break };
            let Some(file) = by_key.remove(&key) else { break };
            if self.links.front().is_some_and(|next| !follows(&file.header, &next.file.header)) {
                remove_link(&Held::new(file), "it does not lead to the history");
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
                remove_link(&Held::new(file), "it does not lead to the history");
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

pub(super) fn follows(first: &DeltaHeader, second: &DeltaHeader) -> bool {
    (first.target, first.target_digest) == (second.base, second.base_digest)
}

pub(super) fn open_file(path: &Path) -> io::Result<File> {
    // A symbolic link that another user put here, or a pipe that would never end, is not followed or waited for.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidData.into()) }
}

pub(super) fn open_segment(held: &DeltaFile) -> Result<Arc<Segment>, HistoryError> {
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

/// Removes a link, with the old units beside it.
fn remove_link(link: &Held, why: &str) {
    remove(&link.file.path, why);
    if link.back > 0 {
        remove(&back_path(&link.file.path), why);
    }
}

/// Removes a file of the history. That it cannot be is told and no reason to fail: it is no longer counted on.
pub(super) fn remove(path: &Path, why: &str) {
    match draft::remove_if_there(path) {
        Ok(()) => tracing::debug!(path = %path.display(), why, "removed a delta"),
        Err(e) => tracing::warn!(path = %path.display(), why, error = %e, "cannot remove a delta"),
    }
}
