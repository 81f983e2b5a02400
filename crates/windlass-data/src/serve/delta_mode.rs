//! Delta mode, the agent's half: serves a version by the deltas of its ranks before its slot is whole
//! ([`crate::publish`] is the ranks' half).
//!
//! The **joiner** looks whenever the region's bell rings whether all ranks have brought their delta to a version that
//! follows the one that is served. If all of it together is one delta (see [`windlass_core::delta_mode`]), it becomes
//! the newest link of the history and the version is served. One rank's delta is linked into the history as it is; those
//! of several are put together in the order of their blocks. The sealer asks the joiner first, so that a version whose
//! deltas are there is never compared.
//!
//! The **checker** sums the bytes of a slot that was sealed without looking at them, every so many of them. It holds the
//! slot while it does, which the writer wants back two versions later. A slot that is not what was served is withdrawn and
//! put in doubt, upon which ranks copy the next version.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use windlass_core::delta::{Delta, DeltaError, DeltaHeader};
use windlass_core::delta_mode::{self, DeltaModeError, Origin, Roster};
use windlass_core::digest::SumTable;
use windlass_core::error::Kind;
use windlass_core::identity::Version;

use super::{DeltaStats, Inner, NO_SLOT, SealedSlot, State, count};
use crate::container;
use crate::file::io_kind;
use crate::history::HistoryError;
use crate::publish::{Part, open};
use crate::region::{LeaseKind, step};
use crate::seal::draft::{Draft, remove_if_there};
use crate::seal::{self, DeltaFile, Names};
use crate::shm::{Access, Mapping};
use crate::stop::lap;

/// Why the deltas of ranks were not joined.
#[derive(Debug, thiserror::Error)]
pub(super) enum JoinError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// A rank that brings a delta and has not said for which blocks.
    #[error("rank {rank} has not said which blocks it answers for")]
    NoRoster { rank: u16 },
    #[error("what rank {rank} brought cannot be read: {source}")]
    Torn { rank: u16, source: DeltaError },
    #[error("rank {rank} brings a delta from version {base}, and {served} is served")]
    Late { rank: u16, base: Version, served: Version },
    #[error("the delta has {bytes} bytes, too many for an image of {image}")]
    TooDense { bytes: u64, image: u64 },
    #[error(transparent)]
    DeltaMode(#[from] DeltaModeError),
    #[error(transparent)]
    History(#[from] HistoryError),
}

impl JoinError {
    pub(super) fn kind(&self) -> Kind {
        match self {
            JoinError::Io { source, .. } => io_kind(source),
            JoinError::NoRoster { .. } => Kind::NotFound,
            JoinError::Torn { source, .. } => source.kind(),
            JoinError::Late { .. } => Kind::Stale,
            JoinError::TooDense { .. } => Kind::Unsupported,
            JoinError::DeltaMode(e) => e.kind(),
            JoinError::History(e) => e.kind(),
        }
    }

    fn is_contradiction(&self) -> bool {
        match self {
            JoinError::DeltaMode(e) => e.is_contradiction(),
            JoinError::Io { .. }
            | JoinError::NoRoster { .. }
            | JoinError::Torn { .. }
            | JoinError::Late { .. }
            | JoinError::TooDense { .. }
            | JoinError::History(_) => false,
        }
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JoinError + use<> {
    let path = path.to_owned();
    move |source| JoinError::Io { action, path, source }
}

/// A slot to be summed.
#[derive(Clone, Debug)]
pub(super) struct Check {
    slot: usize,
    sealed: SealedSlot,
}

/// A rank's delta, mapped.
struct Brought {
    path: PathBuf,
    mapping: Mapping,
}

impl Brought {
    fn parse(&self, rank: u16, threads: usize) -> Result<Delta<'_>, JoinError> {
        container::parse(self.mapping.bytes(0..self.mapping.len()), threads)
            .map_err(|source| JoinError::Torn { rank, source })
    }
}

impl Inner {
    /// Whether this server has the whole image and so may join.
    pub(super) fn joins(&self) -> bool {
        self.config.peers.is_empty() && self.region.part().is_none() && self.region.slot_count() == 2
    }

    pub(super) fn join_loop(&self) {
        while !self.stop.is_set() {
            let seen = self.region.bell();
            self.join_ready();
            self.region.wait(seen, crate::stop::Stop::GLANCE);
        }
    }

    /// Joins and serves all that can be.
    pub(super) fn join_ready(&self) {
        let mut tried = self.joining.lock();
        loop {
            let Some(base) = self.state().served.clone() else { return };
            let ready = self.parts.complete(self.region.ranks(), base.version);
            let Some(version) = ready.into_iter().find(|v| tried.is_none_or(|t| *v > t)) else { return };
            match self.join(&base, version) {
                Ok(true) => {}
                // Its base is still being sealed.
                Ok(false) => return,
                Err(error) => {
                    // Looked at once: files in their places do not change.
                    *tried = Some(version);
                    count(&self.counters.parts_refused);
                    if error.is_contradiction() {
                        self.contradiction(version, &error.to_string());
                    } else {
                        let kind = error.kind().as_str();
                        tracing::warn!(version, kind, %error, "the deltas of ranks are not used; the slot is waited for");
                    }
                }
            }
        }
    }

    /// Serves `version` by what the ranks brought. False if that begins at a version that is not served yet.
    fn join(&self, base: &SealedSlot, version: Version) -> Result<bool, JoinError> {
        let start = Instant::now();
        let mut begun = start;
        let (manifest, held) = (self.region.manifest(), self.region.blocks());
        let mut brought = Vec::new();
        for rank in 0..self.region.ranks() {
            let path = self.parts.path(Part::Delta { version, rank });
            let io = |action| io_error(action, &path);
            let file = open(&path).map_err(io("open"))?;
            let bytes = file.metadata().map_err(io("read"))?.len();
            let mapping = Mapping::map(&file, bytes, Access::Read).map_err(io("map"))?;
            let header = DeltaHeader::parse(mapping.bytes(0..bytes));
            let (header, _) = header.map_err(|source| JoinError::Torn { rank, source })?;
            match header.base.1.cmp(&base.version) {
                std::cmp::Ordering::Greater => return Ok(false),
                std::cmp::Ordering::Less => {
                    return Err(JoinError::Late { rank, base: header.base.1, served: base.version });
                }
                std::cmp::Ordering::Equal => brought.push(Brought { path, mapping }),
            }
        }
        let bytes = brought.iter().map(|b| b.mapping.len()).sum();
        let image = manifest.data_bytes();
        if bytes as f64 > self.config.dense_share * image as f64 {
            return Err(JoinError::TooDense { bytes, image });
        }
        let rosters = self.rosters()?;
        delta_mode::cover(manifest, self.region.incarnation(), &held, &rosters)?;
        let deltas: Vec<Delta<'_>> = (0..)
            .zip(&brought)
            .map(|(rank, b)| b.parse(rank, self.config.threads))
            .collect::<Result<_, _>>()?;
        let origin = Origin {
            manifest,
            model_id: self.region.model_id(),
            incarnation: self.region.incarnation(),
            held: &held,
            version: base.version,
            sums: &base.sums,
        };
        let read_ms = lap(&mut begun);
        step("join");
        let sums = Arc::new(delta_mode::join(origin, version, &rosters, &deltas)?);
        let join_ms = lap(&mut begun);
        let file = self.link(base, version, &sums, &brought, &deltas)?;
        let (bytes, changes) = (file.bytes, file.changes);
        step("linked");
        if let Err(error) = self.history.add(file) {
            let _ = remove_if_there(&self.history.path(base.version, version));
            return Err(error.into());
        }
        let seconds = start.elapsed().as_secs_f64();
        let digest = self.part_digest(sums.state());
        let mut state = self.state();
        state.delta = Some(DeltaStats { base: base.version, version, bytes, changes, seconds });
        state.by_delta.insert(version, Arc::clone(&sums));
        self.serve(&mut state, SealedSlot { id: NO_SLOT, version, sums, digest });
        drop(state);
        count(&self.counters.joined);
        step("served");
        self.changed.notify_all();
        let link_ms = lap(&mut begun);
        tracing::debug!(
            version,
            bytes,
            read_ms,
            join_ms,
            link_ms,
            "served by delta before its slot is whole"
        );
        Ok(true)
    }

    fn rosters(&self) -> Result<Vec<Roster>, JoinError> {
        let roster = |rank| {
            let path = self.parts.path(Part::Roster { rank });
            let read = self.parts.roster(rank);
            let read = read.map_err(|source| JoinError::Io { action: "read", path, source })?;
            Ok(read.ok_or(JoinError::NoRoster { rank })??)
        };
        (0..self.region.ranks()).map(roster).collect()
    }

    /// Puts what the ranks brought into the history's place, as one delta.
    fn link(
        &self,
        base: &SealedSlot,
        version: Version,
        sums: &SumTable,
        brought: &[Brought],
        deltas: &[Delta<'_>],
    ) -> Result<DeltaFile, JoinError> {
        let path = self.history.path(base.version, version);
        let io = |action| io_error(action, &path);
        let changes = deltas.iter().map(|d| d.changes).sum();
        if let ([one], [delta]) = (brought, deltas) {
            // The very same file: its blocks are all blocks, so its digests are those of the versions. Records of a
            // rank ascend, and so do those of the history.
            remove_if_there(&path).map_err(io("replace"))?;
            if fs::hard_link(&one.path, &path).is_ok() {
                let (header, bytes) = (delta.header.clone(), one.mapping.len());
                return Ok(DeltaFile { path, header, bytes, changes, context_records: 0 });
            }
        }
        let names = Names {
            model_id: self.region.model_id().clone(),
            incarnation: self.region.incarnation(),
            base: base.version,
            target: version,
        };
        let header = names.header(self.region.manifest(), base.digest, self.part_digest(sums.state()));
        let mut order: Vec<(u32, usize, usize)> = Vec::new();
        for (d, delta) in deltas.iter().enumerate() {
            order.extend(delta.entries().iter().enumerate().map(|(e, entry)| (entry.block, d, e)));
        }
        order.sort_unstable();
        let record = |i: usize| {
            let (_, d, e) = order[i];
            deltas[d].record(&deltas[d].entries()[e])
        };
        let draft = Draft::create(&path).map_err(io("create"))?;
        let file: &File = draft.file();
        let bytes = container::write(
            file,
            &header,
            (order.len(), changes),
            record,
            self.config.threads,
            None,
            &self.stop,
        )
        .map_err(|fault| io("write")(fault.into_io()))?;
        draft.place().map_err(io("place"))?;
        Ok(DeltaFile { path, header, bytes, changes, context_records: 0 })
    }

    /// The sums of a version that was served by delta, if every rank's delta to it is still there.
    pub(super) fn delta_sums(&self, version: Version) -> Option<Arc<SumTable>> {
        let sums = self.state().by_delta.get(&version).cloned()?;
        let there = (0..self.region.ranks()).all(|rank| self.parts.has(Part::Delta { version, rank }));
        there.then_some(sums)
    }

    /// Forgets what ranks brought to versions that are sealed, and removes it.
    pub(super) fn sweep(&self, sealed: Version) {
        self.state().by_delta.retain(|v, _| *v > sealed);
        self.parts.remove(|part, _| match part {
            // That of the sealed one stays until the next, so that a process that has just listed it finds it.
            Part::Delta { version, .. } => version < sealed,
            Part::Doubt { version } => version < sealed.saturating_sub(1),
            Part::Roster { .. } => false,
        });
    }

    /// Says that something that was handed out is not what it should be.
    pub(super) fn contradiction(&self, version: Version, why: &str) {
        tracing::error!(
            version,
            kind = Kind::Corrupt.as_str(),
            why,
            "a version contradicts what was handed out of it"
        );
        self.state().contradiction = Some(format!("version {version}: {why}"));
        if let Err(error) = self.parts.put_doubt(version, why) {
            tracing::error!(version, %error, "ranks could not be told to copy the next version");
        }
        // A reader that sees it counted finds the rest.
        count(&self.counters.contradictions);
    }

    /// Notes a slot that was sealed unseen, and has it summed if it is its turn.
    pub(super) fn sealed_unseen(&self, slot: usize, sealed: SealedSlot) {
        let before = self.counters.sealed_by_delta.fetch_add(1, Ordering::Relaxed);
        let every = self.config.check_every;
        let mut state = self.state();
        if every > 0 && (before.is_multiple_of(every) || state.check_missed) {
            state.check_missed = false;
            state.check = Some(Check { slot, sealed });
            drop(state);
            self.changed.notify_all();
        }
    }

    pub(super) fn check_loop(&self) {
        while !self.stop.is_set() {
            let mut state = self.state();
            let Some(check) = state.check.take() else {
                self.changed.wait_for(&mut state, crate::stop::Stop::GLANCE);
                continue;
            };
            drop(state);
            if !self.check(&check) && !self.stop.is_set() {
                self.state().check_missed = true;
            }
        }
    }

    /// Sums the bytes of a slot and compares. False if the slot was taken back before.
    fn check(&self, Check { slot, sealed }: &Check) -> bool {
        let Ok(lease) = self.region.lease(sealed.id, LeaseKind::Seal, Duration::MAX) else { return false };
        let (kernels, manifest) = (crate::simd::kernels(), self.region.manifest());
        let blocks = self.region.blocks();
        let found = seal::sums(kernels, manifest, &blocks, lease.data(), self.config.threads, &self.stop);
        let stood = lease.finish().is_ok();
        let Some(found) = found.ok().filter(|_| stood) else { return false };
        count(&self.counters.checked);
        let mut pairs = found.sums().iter().zip(sealed.sums.sums()).enumerate();
        let Some((block, _)) = pairs.find(|(_, (a, b))| a != b) else { return true };
        {
            let mut state = self.state();
            state.withdraw(*slot, sealed.id);
        }
        // A later server sums the bytes again, and does not serve them.
        let _ = remove_if_there(&self.region.sums_path(*slot));
        self.contradiction(sealed.version, &format!("block {block} of its slot has other bytes"));
        true
    }
}

impl State {
    /// Full images are not served from this slot any more.
    fn withdraw(&mut self, slot: usize, id: u64) {
        if let Some(held) = self.slots.get_mut(slot)
            && held.as_ref().is_some_and(|s| s.id == id)
        {
            *held = None;
        }
        if let Some(served) = self.served.as_mut().filter(|s| s.id == id) {
            served.id = NO_SLOT;
        }
    }
}
