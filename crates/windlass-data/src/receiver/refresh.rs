//! Brings an image from the versions that its blocks are of to one version.
//!
//! Owns: the algorithm of [`Receiver::sync`] and [`Receiver::sync_to`] once the publisher's newest version is known, and
//! all changes of an image's blocks. Called by [`Receiver`]. Must not: commit or show a version whose digest was not
//! checked; [`Refresh::finish`] does both.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use windlass_core::delta::{Applier, Delta, Outcome, Tile};
use windlass_core::digest::{BlockSum, SumTable};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::{RequestMode, VersionInfo};
use windlass_core::wire::{self, BlockVersions, Fault, Mode, Ticket};

use super::error::ReceiverError;
use super::fetch::Fetched;
use super::relay::Shared;
use super::status::{Event, Stage};
use super::{Receiver, Synced, millis};
use crate::container;
use crate::image::{Image, ImageError, Known, Refresh, locked};
use crate::stop::Stop;
use crate::tcp::{Body, ImageLanding, TcpError};
use crate::work;

/// How often a sync goes back to an older version.
const TURNS: u32 = 3;

/// The state of one sync.
pub(super) struct Progress {
    pub(super) synced: Synced,
    /// A full ticket that the publisher granted instead of a delta.
    first: Option<Ticket>,
    tried_sums: bool,
    /// The version that the caller asked for, unless the newest will do.
    to: Option<Version>,
    /// How often the sync tried to go back to it.
    turns: u32,
    /// Whether the version stays hidden.
    hide: bool,
}

impl Progress {
    pub(super) fn new(synced: Synced) -> Progress {
        Progress { synced, first: None, tried_sums: false, to: None, turns: 0, hide: false }
    }
}

impl Receiver {
    /// Brings the image to the newest version, or to the one that is named if a delta leads there.
    pub(super) fn sync_once(
        &mut self,
        to: Option<(Incarnation, Version)>,
        hide: bool,
        stop: &Stop,
    ) -> Result<Synced, ReceiverError> {
        let mut synced = Synced { mode: "none", ..Synced::default() };
        let asked = Instant::now();
        let info = self.ask_version(to, stop)?;
        self.prepare(&info, stop)?;
        if let Some(image) = &self.image {
            self.kept.follow(image, &self.config.image.model_id, info.incarnation);
        }
        synced.ask_ms += millis(asked);
        let there = |k: &Known| match to {
            Some((_, version)) => k.identity.version >= version,
            // What is announced is the digest of the whole.
            None => {
                let same = self.keeps.is_some() || Some(k.digest) == info.digest;
                same && Some(&k.identity) == info.identity().as_ref()
                    || !self.control.goes_back()
                        && k.identity.incarnation == info.incarnation
                        && info.version.is_some_and(|announced| announced < k.identity.version)
            }
        };
        let has = if hide { self.held() } else { self.current() };
        if has.is_some_and(there) {
            return Ok(synced);
        }
        let to = to.map(|(_, version)| version);
        let mut progress = Progress { to, hide, ..Progress::new(synced) };
        let fetched = self.first_ticket(&info, &mut progress, stop)?;
        self.bring(fetched.into_iter().collect(), progress, &info, stop)
    }

    /// Asks for what a whole image needs, and fetches it if it is a delta. A full ticket is kept for later.
    fn first_ticket(
        &mut self,
        info: &VersionInfo,
        progress: &mut Progress,
        stop: &Stop,
    ) -> Result<Option<Fetched>, ReceiverError> {
        let blocks = self.layout.as_ref().map_or(0, |m| m.cuts().blocks());
        // There is nothing to ask for in an image without blocks.
        let Some(known) = self.held().cloned().filter(|_| blocks > 0) else { return Ok(None) };
        let ticket =
            self.ask(self.config.mode, Some(&known.identity), progress.to, None, &mut progress.synced, stop)?;
        match &ticket.mode {
            Mode::Full => {
                progress.first = Some(ticket);
                Ok(None)
            }
            Mode::Delta { .. } => {
                self.puller().stage(ticket, info.clone(), &mut progress.synced, stop).map(Some)
            }
        }
    }

    /// Brings the image to one version: applies what was fetched, and fetches what is missing.
    pub(super) fn bring(
        &mut self,
        fetched: Vec<Fetched>,
        mut progress: Progress,
        info: &VersionInfo,
        stop: &Stop,
    ) -> Result<Synced, ReceiverError> {
        // Taken out for the time of the refresh, which borrows it, and put back whatever happens.
        let Some(mut image) = self.image.take() else {
            return Err(ReceiverError::NothingYet { peer: self.control.peer() });
        };
        let deltas = fetched.len();
        self.staged = None;
        let result = Run::start(self, &mut image, &mut progress, info, stop)
            .and_then(|run| run.into_one_version(fetched));
        if let Err(ReceiverError::Image(ImageError::Digest { .. })) = &result {
            // Something is not what it was thought to be. The sums will tell what.
            image.forget();
        }
        // Only these can be lifted by a delta any more.
        let held = image.versions();
        self.digests.retain(|version, _| held.contains(version));
        self.image = Some(image);
        progress.synced.image = Some(result?);
        progress.synced.mode = match (progress.synced.transfers, progress.synced.mode) {
            (0 | 1, mode) => mode,
            (n, mode) if n as usize == deltas => mode,
            (_, _) => "fuzzy",
        };
        Ok(progress.synced)
    }
}

/// A sync whose image is open for changes.
struct Run<'a> {
    receiver: &'a mut Receiver,
    refresh: Refresh<'a>,
    progress: &'a mut Progress,
    info: &'a VersionInfo,
    stop: &'a Stop,
}

impl<'a> Run<'a> {
    /// Opens the image.
    fn start(
        receiver: &'a mut Receiver,
        image: &'a mut Image,
        progress: &'a mut Progress,
        info: &'a VersionInfo,
        stop: &'a Stop,
    ) -> Result<Run<'a>, ReceiverError> {
        receiver.status.set(|s| s.stage = Stage::Opening);
        receiver.withdraw("a newer version takes its place");
        let start = Instant::now();
        let refresh = image.refresh(&stop.with_timeout(receiver.config.open_timeout))?;
        progress.synced.open_ms += millis(start);
        Ok(Run { receiver, refresh, progress, info, stop })
    }

    /// Applies `fetched`, then repeats until every block is of one version.
    fn into_one_version(mut self, fetched: Vec<Fetched>) -> Result<Known, ReceiverError> {
        let (mut placed, alone) = (None, fetched.len() == 1);
        if self.receiver.control.carrier().is_some() {
            // Blocks of a version that the store does not have yet: their sums tell which are the same there.
            let newest = self.info.version.unwrap_or(Version::MAX);
            self.refresh.versions().range(newest.saturating_add(1)..).for_each(|v| self.refresh.forget(*v));
        }
        for fetched in fetched {
            let parts = fetched.parts(self.receiver.config.image.threads)?;
            // The delta is kept before the version can be seen, so that a reader of the version finds it. It is written
            // while the image is, and removed again if it does not count.
            let (kept, manifest, ticket) = (&self.receiver.kept, self.refresh.manifest(), fetched.ticket());
            let (written, applied) = std::thread::scope(|scope| {
                let writing = alone.then(|| scope.spawn(|| kept.place(manifest, ticket, &parts)));
                let applied = self.refresh_by(&fetched, &parts);
                applied.map(|applied| (writing.and_then(|w| w.join().ok().flatten()), applied))
            })?;
            self.note(applied);
            placed = written.filter(|_| self.progress.synced.refetched == 0);
        }
        if self.progress.first.is_some() {
            self.fill(BlockRanges::new())?;
        }
        loop {
            let stop = self.stop.check();
            stop.map_err(|source| self.receiver.stopped(Stage::Asking, source))?;
            let (versions, unknown) = (self.refresh.versions(), self.refresh.unknown());
            match (versions.first().copied(), versions.last().copied()) {
                (Some(old), Some(new)) if old < new => self.lift(old, new)?,
                _ if !unknown.is_empty() => self.fill(unknown)?,
                (_, Some(new)) if self.progress.to.is_some_and(|to| to < new) => self.go_back(new)?,
                (_, Some(new)) if self.goal().is_some_and(|goal| new < goal) => self.go_on(new)?,
                (_, newest) => {
                    // An image without blocks is of any version.
                    let version = newest.or(self.info.version).unwrap_or_default();
                    let known = self.known(version)?;
                    self.receiver.status.set(|s| s.stage = Stage::Finishing);
                    // One delta, from one whole version to the next, and nothing else: only that was proved.
                    let synced = &self.progress.synced;
                    let straight = synced.transfers == 1 && synced.laps == 0 && !self.progress.hide;
                    let proved = placed.filter(|p| straight && p.target() == Some(version));
                    if self.progress.hide {
                        self.refresh.check(&known)?;
                        self.receiver.staged = Some(known.clone());
                    } else {
                        self.refresh.finish(&known, self.stop)?;
                    }
                    match proved {
                        Some(placed) => self.receiver.kept.add(placed),
                        None => self.receiver.kept.end("the version did not come as one plain delta"),
                    }
                    return Ok(known);
                }
            }
        }
    }

    fn known(&self, version: Version) -> Result<Known, ReceiverError> {
        let (receiver, info) = (&self.receiver, self.info);
        let announced = info.digest.filter(|_| info.version == Some(version) && receiver.keeps.is_none());
        let digest = receiver.digests.get(&version).copied().or(announced);
        let digest = digest.ok_or_else(|| ReceiverError::NothingYet { peer: receiver.control.peer() })?;
        let identity = Identity { model_id: info.model_id.clone(), incarnation: info.incarnation, version };
        Ok(Known { identity, digest })
    }

    /// Lifts blocks of `old` to `new` by a delta. If the publisher has none, forgets which version they are of.
    fn lift(&mut self, old: Version, new: Version) -> Result<(), ReceiverError> {
        if let Some(reason) = self.apply_delta(old, new)? {
            tracing::info!(old, new, reason, "no delta for the blocks behind; they are fetched again");
            self.refresh.forget(old);
        }
        Ok(())
    }

    /// Brings the image from `new`, which all of it is, back to the version that was asked for, or makes do with `new`.
    fn go_back(&mut self, new: Version) -> Result<(), ReceiverError> {
        // Blocks that the delta found to be wrong are fetched at the newest version, and the sync tries again.
        let Some(to) = self.progress.to.filter(|_| self.progress.turns < TURNS) else {
            self.progress.to = None;
            return Ok(());
        };
        self.progress.turns += 1;
        if let Some(reason) = self.apply_delta(new, to)? {
            tracing::warn!(new, to, reason, "nothing leads back to the version; the newest is taken");
            self.progress.to = None;
        }
        Ok(())
    }

    /// The version that deltas lead on to where the image bytes that come are older than what was announced.
    fn goal(&self) -> Option<Version> {
        let carried = self.receiver.control.carrier().is_some() && self.progress.turns < TURNS;
        self.progress.to.or(self.info.version).filter(|_| carried)
    }

    /// Brings the image from `new`, which all of it is, on to the version that was announced, or makes do with `new`.
    fn go_on(&mut self, new: Version) -> Result<(), ReceiverError> {
        let Some(goal) = self.goal() else { return Ok(()) };
        self.progress.turns += 1;
        if let Some(reason) = self.apply_delta(new, goal)? {
            tracing::warn!(new, goal, reason, "nothing leads on to the version; an older one is taken");
            self.progress.turns = TURNS;
        }
        Ok(())
    }

    /// Fetches and applies the delta between two versions. Returns the publisher's reason if it has none.
    fn apply_delta(&mut self, from: Version, to: Version) -> Result<Option<String>, ReceiverError> {
        let model_id = self.receiver.config.image.model_id.clone();
        let have = self.receiver.incarnation;
        let have = have.map(|incarnation| Identity { model_id, incarnation, version: from });
        let synced = &mut self.progress.synced;
        let ticket = self.receiver.ask(RequestMode::Delta, have.as_ref(), Some(to), None, synced, self.stop);
        match ticket {
            Ok(ticket) => {
                let puller = self.receiver.puller();
                let fetched = puller.stage(ticket, self.info.clone(), synced, self.stop)?;
                let parts = fetched.parts(self.receiver.config.image.threads)?;
                let applied = self.refresh_by(&fetched, &parts)?;
                self.note(applied);
                Ok(None)
            }
            Err(ReceiverError::Refused { reason, .. }) => Ok(Some(reason)),
            Err(e) => Err(e),
        }
    }

    /// Applies a delta. Returns how many blocks it found to be wrong, and the milliseconds that it took.
    fn refresh_by(&self, fetched: &Fetched, parts: &[Delta<'_>]) -> Result<(u32, f64), ReceiverError> {
        self.receiver.status.set(|s| s.stage = Stage::Applying);
        self.receiver.withdraw("a newer version takes its place");
        let start = Instant::now();
        let versions = (fetched.base().version, fetched.ticket().identity.version);
        let applied = self.refresh.apply(versions, parts, self.stop)?;
        Ok((applied.refetch.len(), millis(start)))
    }

    fn note(&mut self, (refetched, ms): (u32, f64)) {
        self.progress.synced.refetched += refetched;
        self.progress.synced.apply_ms += ms;
    }

    /// Fetches blocks of no version, or finds out by their hashes that it need not.
    fn fill(&mut self, unknown: BlockRanges) -> Result<(), ReceiverError> {
        let control = Arc::clone(&self.receiver.control);
        if let Some(carrier) = control.carrier() {
            let keeps = self.receiver.keeps.clone();
            if !std::mem::replace(&mut self.progress.tried_sums, true) && self.refresh.has_sums(&unknown) {
                let mut adopted = 0;
                let mut adopt = |versions: &BlockVersions, sums: &[BlockSum]| {
                    adopted += self.refresh.adopt_each(|block| versions.version_of(block), sums);
                };
                carrier.tables(keeps.as_ref(), &mut adopt, self.stop)?;
                if adopted > 0 {
                    carrier.digests(keeps.as_ref(), &mut self.receiver.digests);
                    return Ok(());
                }
            }
            carrier.digests(keeps.as_ref(), &mut self.receiver.digests);
        }
        if !self.progress.tried_sums && self.refresh.has_sums(&unknown) {
            self.progress.tried_sums = true;
            if let (Some(identity), Some(digest)) = (self.info.identity(), self.info.digest)
                && let Ok(sums) = self.receiver.control.sums(&identity, self.stop)
                && let Some(digest) = self.digest_of_slice(&sums, digest)
            {
                let adopted = self.refresh.adopt(identity.version, &sums);
                self.receiver.digests.insert(identity.version, digest);
                if adopted > 0 {
                    return Ok(());
                }
            }
        }
        let ticket = match self.progress.first.take() {
            Some(ticket) => ticket,
            None => {
                let synced = &mut self.progress.synced;
                self.receiver.ask(RequestMode::Full, None, None, Some(unknown), synced, self.stop)?
            }
        };
        let shared = self.pass_on(&ticket);
        let ticket = if shared.is_some() { ticket } else { ticket.alone() };
        let (board, proof) = shared.map(|s| (s.board, s.proof)).unzip();
        let bytes = self.refresh.manifest().bytes_of(&ticket.wanted);
        let (puller, synced) = (self.receiver.puller(), &mut self.progress.synced);
        let board = board.as_deref();
        let pull =
            |landing: &ImageLanding<'_>| puller.pull(&ticket, landing, bytes, board, synced, self.stop);
        let image = puller.image_bytes;
        let pulled = std::thread::scope(|scope| {
            if bytes > image / 2 {
                // While most of an image comes, which takes far longer.
                scope.spawn(|| puller.shelf.reserve(image / container::LIKELY));
            }
            self.refresh.land(&ticket, proof.as_deref(), pull)
        });
        if pulled.is_err() {
            self.receiver.withdraw("its transfer failed");
        }
        match pulled {
            Ok(brought) => {
                puller.report_done(&ticket, brought, self.stop);
                Ok(())
            }
            Err(e) if e.kind() == Kind::Stale => {
                self.progress.synced.laps += 1;
                let missing = self.refresh.unknown().len();
                self.receiver.tell(&Event::Lapped { identity: ticket.identity.clone(), missing });
                Ok(())
            }
            Err(e) => Err(e.into()),
        }
    }
}

impl Run<'_> {
    /// The digest of what is kept, given that of the whole version and its table, which must have it if only a slice is kept.
    fn digest_of_slice(&self, sums: &[BlockSum], whole: StateDigest) -> Option<StateDigest> {
        let Some(keeps) = &self.receiver.keeps else { return Some(whole) };
        let manifest = self.refresh.manifest();
        let fits = sums.len() == manifest.cuts().blocks() as usize;
        let table = fits.then(|| SumTable::new(manifest, sums.to_vec()));
        let table = table.filter(|table| table.digest(manifest) == whole)?;
        Some(table.state_of(manifest, keeps).digest(manifest.layout_hash()))
    }

    /// Puts up the image for others while it comes, and learns what its blocks must be. Without either, it comes from the
    /// ticket's sources alone.
    fn pass_on(&self, ticket: &Ticket) -> Option<Shared> {
        let relaying = self.receiver.config.relaying.as_ref().filter(|_| ticket.swarm.is_some())?;
        let sums = self.receiver.control.sums(&ticket.identity, self.stop);
        let sums = sums.inspect_err(|error| tracing::warn!(%error, "this version is not passed on")).ok()?;
        let manifest = self.refresh.manifest();
        let proof = (sums.len() == manifest.cuts().blocks() as usize).then(|| SumTable::new(manifest, sums));
        let kept = |table: &SumTable| match &self.receiver.keeps {
            Some(keeps) => table.state_of(manifest, keeps).digest(manifest.layout_hash()),
            None => table.digest(manifest),
        };
        let Some(proof) = proof.filter(|table| kept(table) == ticket.digest) else {
            let (peer, version) = (self.receiver.control.peer(), ticket.identity.version);
            tracing::warn!(%peer, version, "the table of sums does not add up to the digest: this version is not passed on");
            return None;
        };
        let proof = Arc::new(proof);
        let body = self.refresh.body(Arc::clone(&proof));
        match body.and_then(|body| relaying.put_up_image(ticket, body)) {
            Ok(board) => board.map(|board| Shared { board, proof }),
            Err(error) => {
                tracing::warn!(%error, "this version is not passed on to other receivers");
                None
            }
        }
    }
}

/// What came of a delta.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks that were changed.
    pub changed: u32,
    /// Blocks that had the change already.
    pub skipped: u32,
    /// Blocks that were not what they were thought to be, and must be fetched.
    pub refetch: BlockRanges,
}

impl Refresh<'_> {
    /// Blocks whose sums are those of `version` are of that version. Answers how many there are.
    pub fn adopt(&self, version: Version, sums: &[BlockSum]) -> u32 {
        self.adopt_each(|_| Some(version), sums)
    }

    /// The same where blocks are of several versions.
    pub(crate) fn adopt_each(&self, version: impl Fn(u32) -> Option<Version>, sums: &[BlockSum]) -> u32 {
        let mut book = locked(self.book);
        let mut adopted = 0;
        for (block, sum) in sums.iter().enumerate().take(book.versions.len()) {
            let same = book.summed[block] && book.sums.get(block as u32) == *sum;
            if book.versions[block].is_none() && same {
                book.versions[block] = version(block as u32);
                adopted += u32::from(book.versions[block].is_some());
            }
        }
        adopted
    }

    /// The layout.
    pub fn manifest(&self) -> &Arc<Manifest> {
        self.region.manifest()
    }

    /// Whether any of these blocks has a sum that could be compared.
    pub fn has_sums(&self, blocks: &BlockRanges) -> bool {
        let book = locked(self.book);
        blocks.iter().any(|b| book.summed.get(b as usize).copied().unwrap_or(false))
    }

    /// The blocks of no known version.
    pub fn unknown(&self) -> BlockRanges {
        locked(self.book).at(|v| v.is_none())
    }

    /// The versions that blocks are of, oldest first.
    pub fn versions(&self) -> BTreeSet<Version> {
        locked(self.book).versions.iter().flatten().copied().collect()
    }

    /// Blocks of `version` are of no version any more.
    pub fn forget(&self, version: Version) {
        for v in &mut locked(self.book).versions {
            if *v == Some(version) {
                *v = None;
            }
        }
    }

    /// Runs `pull` with the place where the wanted blocks of a ticket land. Blocks of which it is told that
    /// they landed are of the version in the ticket afterwards, whether or not it succeeds; the others of none.
    pub fn land<T>(
        &self,
        ticket: &Ticket,
        proof: Option<&SumTable>,
        pull: impl FnOnce(&ImageLanding<'_>) -> T,
    ) -> T {
        let manifest = self.region.manifest();
        {
            let mut book = locked(self.book);
            let blocks = book.versions.len() as u32;
            for block in ticket.wanted.iter().take_while(|b| *b < blocks) {
                book.summed[block as usize] = false;
                book.versions[block as usize] = None;
            }
        }
        let landed = |block: u32, sum: BlockSum| {
            if let (Ok(b), Some(version)) =
                (manifest.cuts().block(block), ticket.block_versions.version_of(block))
            {
                locked(self.book).put(block, b.tensor, sum, version);
            }
        };
        pull(&ImageLanding {
            manifest,
            mapping: self.attempt.mapping(),
            data_start: self.region.data_start(),
            kernels: crate::simd::kernels(),
            proof,
            landed: &landed,
            finish: &|| self.check_digest(ticket),
        })
    }

    /// The image as it is being written, with the sums that it will have.
    fn body(&self, sums: Arc<SumTable>) -> Result<Body, TcpError> {
        let path = self.region.slot_path(self.attempt.slot());
        let setup = |source| TcpError::Setup { what: "the image for other receivers", source };
        Ok(Body::Image {
            manifest: Arc::clone(self.region.manifest()),
            file: Arc::new(File::open(path).map_err(setup)?),
            data_start: self.region.data_start(),
            sums,
            hold: Arc::new(()),
        })
    }

    /// Whether the image has the ticket's digest, if all of it is of the ticket's version by now.
    fn check_digest(&self, ticket: &Ticket) -> Result<(), Fault> {
        let book = locked(self.book);
        let found = book.sums.digest(self.region.manifest());
        let whole = book.at(|v| v != Some(ticket.identity.version)).is_empty();
        if !whole || found == ticket.digest {
            return Ok(());
        }
        let message = format!("the image has digest {found}, {} has {}", ticket.identity, ticket.digest);
        Err(Fault { kind: Kind::Corrupt, stage: wire::Stage::Complete, stripe: None, message })
    }

    /// Lifts the blocks of version `base` to `target` by a delta that came in `parts`.
    pub fn apply(
        &self,
        (base, target): (Version, Version),
        parts: &[Delta<'_>],
        stop: &Stop,
    ) -> Result<Applied, ImageError> {
        let mut total = Applied::default();
        for part in parts {
            let applied = self.apply_part((base, target), part, stop)?;
            total.changed += applied.changed;
            total.skipped += applied.skipped;
            total.refetch = total.refetch.union(&applied.refetch);
        }
        // Blocks without a record did not change.
        for v in &mut locked(self.book).versions {
            if *v == Some(base) {
                *v = Some(target);
            }
        }
        Ok(total)
    }

    fn apply_part(
        &self,
        (base, target): (Version, Version),
        delta: &Delta<'_>,
        stop: &Stop,
    ) -> Result<Applied, ImageError> {
        let manifest = self.region.manifest();
        let misfit = |source| ImageError::Delta { model: self.spec.model_id.clone(), source };
        delta.header.check(manifest).map_err(misfit)?;
        let entries = delta.entries();
        let state = || (Applier::new(), Vec::new(), Applied::default());
        let done = work::each(self.spec.threads, entries.len() as u64, stop, state, |s, i| {
            let (applier, scratch, applied) = s;
            let record = delta.record(&entries[i as usize]);
            let block = record.block as usize;
            let tile = Tile::of(manifest, record.block)?;
            let (sum, version) = {
                let book = locked(self.book);
                (book.sums.get(record.block), book.versions[block])
            };
            if version != Some(base) {
                return Ok(());
            }
            let outcome = self
                .change_block(applier, scratch, &tile, |a, bytes| {
                    a.apply(crate::simd::kernels(), &tile, &record, sum, bytes)
                })?
                .map_err(misfit)?;
            // Noted at once: if a later block fails, this one is still known for what it is.
            let mut book = locked(self.book);
            match outcome {
                Outcome::Applied => {
                    applied.changed += 1;
                    book.put(record.block, tile.block.tensor, record.sum, target);
                }
                Outcome::Skipped => {
                    applied.skipped += 1;
                    book.versions[block] = Some(target);
                }
                Outcome::Refetch => {
                    applied.refetch = applied.refetch.union(&(record.block..record.block + 1).into());
                    (book.summed[block], book.versions[block]) = (false, None);
                }
            }
            Ok::<(), ImageError>(())
        })?;
        let mut total = Applied::default();
        for (.., applied) in done {
            total.changed += applied.changed;
            total.skipped += applied.skipped;
            total.refetch = total.refetch.union(&applied.refetch);
        }
        Ok(total)
    }

    /// Gives the bytes of a block to `change`: in place where they lie together, else gathered and put back.
    fn change_block<T>(
        &self,
        applier: &mut Applier,
        scratch: &mut Vec<u8>,
        tile: &Tile,
        change: impl FnOnce(&mut Applier, &mut [u8]) -> T,
    ) -> Result<T, ImageError> {
        let start = self.region.data_start();
        let mapping = self.attempt.mapping();
        let mut runs = self.region.manifest().byte_runs(&tile.block);
        if tile.block.is_contiguous() {
            let Some(run) = runs.next() else { return Ok(change(applier, &mut [])) };
            let mut loan = mapping.lend(start + run.start..start + run.end)?;
            return Ok(change(applier, &mut loan));
        }
        scratch.clear();
        for run in runs {
            let at = scratch.len();
            scratch.resize(at + (run.end - run.start) as usize, 0);
            mapping.copy_out(start + run.start, &mut scratch[at..]);
        }
        let result = change(applier, scratch);
        let mut rest = scratch.as_slice();
        for run in self.region.manifest().byte_runs(&tile.block) {
            let (bytes, after) = rest.split_at((run.end - run.start) as usize);
            mapping.copy_in(start + run.start, bytes);
            rest = after;
        }
        Ok(result)
    }
}
