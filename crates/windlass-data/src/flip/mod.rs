//! How the users of a region take turns: the protocol of the words in its header.
//!
//! Owns: the meaning of every changing word in `header`, and the steps by which ranks, readers and the agent
//! change them. Called by [`crate::region`], which maps the words, rings the bell after a step and sleeps between
//! looks. Must not: wait, know the time, or touch an image; each step here ends after a bounded number of its own
//! stores, and whoever must wait looks again.
//!
//! # Participants
//!
//! *Ranks* fill one slot together, in numbered *attempts*. Rank 0 *leads*: it opens and commits. *Readers* hold
//! *leases* on a slot's contents. The *agent* has a seat of its own and *seals* what was committed. Each is named by
//! an *owner* word, from which others can tell whether its process still lives. A process may die or be stopped
//! between any two instructions.
//!
//! # Words
//!
//! ```text
//! control     attempt << 5 | whole(1) << 4 | whole(0) << 3 | phase << 1 | active
//! committed   the last committed attempt that is no longer the current one
//! pending     the version that the current attempt writes
//! agent       owner of the agent's seat
//! due         until when the agent counts as at work; 0 for ever
//! slot        id (the attempt that filled it) · version · sealed (= id once sealed) · digest (2 words)
//! rank        attempt << 2 | absent 0, joined 1, done 2 · owner
//! lease       owner · id << 24 | serial << 8 | slot << 4 | kind · deadline
//! ```
//!
//! `control` alone decides. `whole(s)` says that slot `s` holds all of a committed version; `active` is the slot of
//! the newest one; the *target* of an attempt is the other slot, or the only one. Every change of `control` is a
//! compare-and-swap, and within an attempt no value comes back:
//!
//! ```text
//! begin    Quiet | Aborted (n)  → Guard (n + 1)
//! open     Guard (n)            → Open (n), whole(target) = 0
//! commit   Open (n)             → Quiet (n), whole(target) = 1, active = target
//! abort    Guard | Open (n)     → Aborted (n)
//! ```
//!
//! Only the living owner of rank 0 begins, opens and commits; anybody aborts.
//!
//! # An attempt
//!
//! 1. *Guard.* The lead takes back the target slot: it goes on when no live lease is on it, and when the active
//!    version is sealed or no agent is at work (the sealer compares both slots). Leases of dead owners do not count. A
//!    lease past its deadline is broken, unless it is a sealer's.
//!
//!    An agent that has said how long it counts as at work, and is silent beyond that, is stopped or hangs: it is not
//!    waited for, and what it leases to seal or to send is broken. It keeps its seat as long as its process lives, so
//!    that there is never a second sealer whose digest its late stores could spoil.
//! 2. *Open.* Each rank joins by its rank word, and writes only after **all** ranks have joined this attempt. It
//!    joins only after all its earlier writes have ended.
//! 3. Each rank says *done*. When all have, the lead fills in the slot's words and commits. Whoever loses patience
//!    aborts, and exactly one of the two happens.
//!
//! # A lease
//!
//! Claim an entry (owner 0 → me), store what is leased, then look at `control`: if the slot still holds the id and
//! is not being taken back, the lease stands; otherwise it is given back. Ending a lease is a compare-and-swap of
//! its state, and so is breaking one. So a holder that ends its lease learns whether it stood all the time.
//!
//! # Memory order
//!
//! Every access to every word is `SeqCst`, so all of them happen in one order that everybody agrees on, and the
//! arguments below need only speak of before and after. (The models use release stores, acquire loads and a
//! sequentially consistent fence at each access, which forbids the same outcomes; loom treats `SeqCst` accesses
//! alone as weaker than they are.) The bytes of images are not atomic. They are ordered by the words: a rank's
//! bytes before its *done*, that before the commit, that before a reader's look at `control`; and a reader's loads
//! before the end of its lease, that before the guard's look at the table, that before *open*, the *joins*, and the
//! next bytes. A word that is stored, or looked at before bytes are touched, is enough for that on processors that
//! reorder as freely as aarch64. A look that comes after bytes were read is not: [`Flip::stands`] has the fence that the
//! models have at every access.
//!
//! # Invariants, why they hold, and the tests that show it
//!
//! Models are in `flip/models.rs` and run by `make loom`; the other names are those of tests with real processes, in
//! `region/tests`.
//!
//! - **FLIP-1 No live lease is on a slot that is being written** (W-1, W-4). The reader stores its lease, then looks at
//!   `control`; the lead stores *guard*, then looks at the leases. In the one order, either the reader's look comes
//!   after *guard*, and it gives the lease back, or its store comes before the lead's look, and the lead waits.
//!   `loom_lease_against_guard`, `loom_lease_on_the_only_slot`, `loom_reader_dies_anywhere`,
//!   `loom_expired_lease_is_broken_or_kept`.
//! - **FLIP-2 Exactly one of commit and abort happens.** Both swap the same value of `control`, which never comes
//!   back. `loom_commit_against_abort`.
//! - **FLIP-3 A rank of attempt n never writes while another writes attempt m > n** (W-9). To write in m, a rank must
//!   see every rank word at m, and a rank sets its word to m only after its writes of n have ended. A dead rank writes
//!   nothing, so its successor may join in its place. `loom_join_barrier_against_a_late_writer`,
//!   `a_stopped_writer_is_named_and_its_late_bytes_are_never_committed`.
//! - **FLIP-4 What is whole is whole.** `whole(s)` is cleared before the first byte changes (a rank writes after *open*) and
//!   set when all ranks have drained. Late bytes of an aborted attempt go to its target, which stays the target and
//!   not whole until an attempt commits that the late rank has joined, so it has drained. Each rank writes all of its
//!   part in each attempt, so late bytes are overwritten. Nothing else is true of a slot that is not whole: its words
//!   are not read. `loom_lead_dies_anywhere`, `a_killed_writer_leaves_the_old_version_whole_at_every_step`.
//! - **FLIP-5 A slot's words belong to the `control` they are read under.** `id` and `version` change only while their
//!   slot is not whole, and readers look at `control` before and after. The digest counts when `sealed` equals `id`; it
//!   is stored first, by a sealer whose lease keeps the slot. If that lease was broken, the slot's id is another one
//!   or about to be, so that `sealed` equals nothing; and the stores of the next seal come after, because one process
//!   makes them both. `loom_snapshot_is_of_one_moment`, `loom_seal_against_guard`, `loom_agent_dies_anywhere`,
//!   `loom_silent_agent_is_not_waited_for`.
//! - **FLIP-6 A rank learns the true fate of its attempt.** While `control` speaks of n, its phase says it. To move on from
//!   *Quiet (n)*, the lead first stores `committed = n`; and no later attempt commits without this rank. So later,
//!   `committed ≥ n` says it. `loom_outcome_is_the_same_for_all`.
//! - **FLIP-7 Death anywhere leaves nothing that cannot be taken up.** A dead rank's word is overtaken by its successor,
//!   which aborts the attempt that its predecessor left unfinished; a dead lead's attempt is aborted by its successor or
//!   by the patience of another rank; between the stores of a commit the slot is not whole; a dead owner's lease or
//!   seat is taken by a swap of its owner word, which cannot come back (process id and start time).
//!   `loom_lead_dies_anywhere`, `loom_rank_dies_anywhere`, `loom_reader_dies_anywhere`, `loom_agent_dies_anywhere`.

#[cfg(all(loom, test))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A word of the header. All accesses are sequentially consistent.
pub trait Word {
    /// Its value.
    fn load(&self) -> u64;
    /// Sets it.
    fn store(&self, value: u64);
    /// Sets it to `new` if it is `old`, and says whether it was.
    fn swap(&self, old: u64, new: u64) -> bool;
}

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        AtomicU64::load(self, Ordering::SeqCst)
    }

    fn store(&self, value: u64) {
        AtomicU64::store(self, value, Ordering::SeqCst);
    }

    fn swap(&self, old: u64, new: u64) -> bool {
        self.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

/// How far the current attempt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It is committed, or there was none yet.
    Quiet,
    /// The lead takes back the target slot.
    Guard,
    /// Ranks join and write.
    Open,
    /// It was given up.
    Aborted,
}

impl Phase {
    const fn bits(self) -> u64 {
        match self {
            Phase::Quiet => 0,
            Phase::Guard => 1,
            Phase::Open => 2,
            Phase::Aborted => 3,
        }
    }

    const fn from_bits(bits: u64) -> Phase {
        match bits & 3 {
            0 => Phase::Quiet,
            1 => Phase::Guard,
            2 => Phase::Open,
            _ => Phase::Aborted,
        }
    }
}

/// A value of the control word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control(u64);

impl Control {
    /// The number of the current attempt; 0 before the first.
    pub const fn attempt(self) -> u64 {
        self.0 >> 5
    }

    /// How far it is.
    pub const fn phase(self) -> Phase {
        Phase::from_bits(self.0 >> 1)
    }

    /// The slot of the newest committed version, if there is any.
    pub const fn active(self) -> usize {
        (self.0 & 1) as usize
    }

    /// Whether a slot holds all of a committed version.
    pub const fn whole(self, slot: usize) -> bool {
        self.0 >> (3 + slot) & 1 == 1
    }

    /// Whether attempt `n` is open for writing.
    pub fn is_open(self, n: u64) -> bool {
        self.attempt() == n && self.phase() == Phase::Open
    }

    const fn with_phase(self, phase: Phase) -> Control {
        Control(self.0 & !(3 << 1) | phase.bits() << 1)
    }

    const fn with_whole(self, slot: usize, whole: bool) -> Control {
        Control(self.0 & !(1 << (3 + slot)) | (whole as u64) << (3 + slot))
    }

    const fn with_active(self, slot: usize) -> Control {
        Control(self.0 & !1 | slot as u64)
    }

    const fn next(self) -> Control {
        Control(self.0 & 0x1f | (self.attempt() + 1) << 5).with_phase(Phase::Guard)
    }
}

/// What a rank has said of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Said {
    Absent,
    /// Its earlier writes have ended; it is ready to write.
    Joined,
    /// It has written its part.
    Done,
}

/// What a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseKind {
    /// Bytes are being sent; the holder ends it soon after it is wanted back.
    Stream,
    /// A process reads in place; it cannot be hurried.
    Map,
    /// The agent seals. Not broken by its deadline, but when the agent is silent for too long.
    Seal,
}

const BROKEN: u64 = 15;

/// A decoded lease state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leased {
    id: u64,
    serial: u16,
    slot: usize,
    kind: LeaseKind,
}

impl Leased {
    const fn pack(self) -> u64 {
        let kind = match self.kind {
            LeaseKind::Stream => 1,
            LeaseKind::Map => 2,
            LeaseKind::Seal => 3,
        };
        self.id << 24 | (self.serial as u64) << 8 | (self.slot as u64) << 4 | kind
    }

    /// `None` if nothing is leased (any more).
    const fn unpack(state: u64) -> Option<Leased> {
        let kind = match state & 15 {
            1 => LeaseKind::Stream,
            2 => LeaseKind::Map,
            3 => LeaseKind::Seal,
            _ => return None,
        };
        Some(Leased { id: state >> 24, serial: (state >> 8) as u16, slot: (state >> 4 & 15) as usize, kind })
    }
}

/// A lease that stands: where it is entered, and as what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    entry: usize,
    state: u64,
    /// The slot that it is on.
    pub slot: usize,
}

/// Why a lease was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// No slot holds this id.
    Gone,
    /// Its slot is being taken back for the next attempt.
    Closing,
    /// All entries are held by the living.
    Full,
}

/// What keeps the lead from opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocker {
    /// A lease on the target slot.
    Lease {
        owner: u64,
        /// What it is for.
        kind: LeaseKind,
        /// The id that is leased.
        id: u64,
    },
    /// The agent has not sealed the active version.
    Agent {
        owner: u64,
        /// The id that is not sealed.
        id: u64,
    },
}

/// The words of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotWords {
    /// The attempt that filled it.
    pub id: u64,
    pub version: u64,
    /// Its digest, once sealed.
    pub digest: Option<[u64; 2]>,
}

/// Slots, read under one value of the control word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub control: Control,
    /// The words of each slot that is whole.
    pub slots: [Option<SlotWords>; 2],
}

impl Snapshot {
    /// The newest committed version.
    pub fn active(&self) -> Option<SlotWords> {
        self.slots[self.control.active()]
    }
}

/// How many of each there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Slots: 1 or 2.
    pub slots: usize,
    /// Ranks, at least 1.
    pub ranks: usize,
    /// Entries of the lease table.
    pub leases: usize,
}

const CONTROL: usize = 0;
const COMMITTED: usize = 1;
const PENDING: usize = 2;
const AGENT: usize = 3;
const DUE: usize = 5;
/// The word whose first half is the bell. The protocol does not use it.
pub const BELL: usize = 4;
const SLOTS: usize = 8;
const SLOT_WORDS: usize = 8;
const RANKS: usize = SLOTS + 2 * SLOT_WORDS;
const RANK_WORDS: usize = 2;
const LEASE_WORDS: usize = 4;

impl Shape {
    /// How many words the protocol needs.
    pub const fn words(self) -> usize {
        RANKS + RANK_WORDS * self.ranks + LEASE_WORDS * self.leases
    }
}

/// The protocol over some words; all zero is a valid beginning.
#[derive(Debug)]
pub struct Flip<'a, W> {
    words: &'a [W],
    shape: Shape,
}

impl<W> Clone for Flip<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for Flip<'_, W> {}

impl<'a, W: Word> Flip<'a, W> {
    /// # Panics
    /// If there are fewer words than [`Shape::words`], or the shape has other than one or two slots.
    pub fn new(words: &'a [W], shape: Shape) -> Flip<'a, W> {
        assert!(words.len() >= shape.words() && matches!(shape.slots, 1 | 2), "{shape:?}");
        Flip { words, shape }
    }

    fn slot(&self, slot: usize) -> &'a [W] {
        &self.words[SLOTS + slot * SLOT_WORDS..][..SLOT_WORDS]
    }

    fn rank(&self, rank: usize) -> (&'a W, &'a W) {
        assert!(rank < self.shape.ranks, "rank {rank} of {}", self.shape.ranks);
        let at = RANKS + rank * RANK_WORDS;
        (&self.words[at], &self.words[at + 1])
    }

    /// Owner, state and deadline of an entry.
    fn lease(&self, entry: usize) -> (&'a W, &'a W, &'a W) {
        let at = RANKS + RANK_WORDS * self.shape.ranks + entry * LEASE_WORDS;
        (&self.words[at], &self.words[at + 1], &self.words[at + 2])
    }

    fn swap_control(&self, old: Control, new: Control) -> bool {
        self.words[CONTROL].swap(old.0, new.0)
    }

    /// The control word.
    pub fn control(&self) -> Control {
        Control(self.words[CONTROL].load())
    }

    /// The slot that the current attempt writes, or that the next one will.
    pub fn target(&self, control: Control) -> usize {
        if self.shape.slots == 2 { 1 - control.active() } else { 0 }
    }

    /// Control and slots, as they were together at one moment.
    pub fn snapshot(&self) -> Snapshot {
        let mut control = self.control();
        loop {
            let slots = [0, 1].map(|s| control.whole(s).then(|| self.slot_words(s)));
            let after = self.control();
            if after == control {
                return Snapshot { control, slots };
            }
            control = after;
        }
    }

    fn slot_words(&self, slot: usize) -> SlotWords {
        let words = self.slot(slot);
        let (id, version) = (words[0].load(), words[1].load());
        // The digest is stored before `sealed`, so it is looked at after.
        let sealed = words[2].load() == id;
        SlotWords { id, version, digest: sealed.then(|| [words[3].load(), words[4].load()]) }
    }

    // --- the lead ---

    /// Begins the next attempt; ends the one that a dead predecessor left. Only the owner of rank 0.
    pub fn begin(&self) -> u64 {
        loop {
            let control = self.control();
            match control.phase() {
                Phase::Guard | Phase::Open => {
                    self.abort(control.attempt());
                    continue;
                }
                // Before the control word forgets that this attempt was committed (FLIP-6).
                Phase::Quiet => self.words[COMMITTED].store(control.attempt()),
                Phase::Aborted => {}
            }
            if self.swap_control(control, control.next()) {
                return control.next().attempt();
            }
        }
    }

    /// The committed version that a living agent has not sealed yet. Whoever begins an attempt meanwhile takes the slot
    /// away that the version would be compared with.
    pub fn unsealed(&self, now: u64, alive: impl Fn(u64) -> bool) -> Option<Blocker> {
        let control = self.control();
        let owner = self.words[AGENT].load();
        if owner == 0 || self.is_silent(now) || !control.whole(control.active()) {
            return None;
        }
        let active = self.slot_words(control.active());
        (active.digest.is_none() && alive(owner)).then_some(Blocker::Agent { owner, id: active.id })
    }

    /// What keeps the target slot of attempt `n` from being written. Takes back entries of dead owners and breaks
    /// leases whose deadline is before `now`, or that a silent agent holds. Nothing, if the attempt is no longer in its
    /// guard.
    pub fn blockers(&self, n: u64, now: u64, alive: impl Fn(u64) -> bool) -> Vec<Blocker> {
        let control = self.control();
        if control.attempt() != n || control.phase() != Phase::Guard {
            return Vec::new();
        }
        let mut found = Vec::new();
        let agent = self.words[AGENT].load();
        let silent = self.is_silent(now);
        found.extend(self.unsealed(now, &alive));
        let target = self.target(control);
        for entry in 0..self.shape.leases {
            let (owner_word, state_word, deadline) = self.lease(entry);
            let owner = owner_word.load();
            if owner == 0 {
                continue;
            }
            let state = state_word.load();
            // An entry without a state is being acquired: its holder will see the guard and give it back.
            let Some(leased) = Leased::unpack(state).filter(|l| l.slot == target) else { continue };
            if !alive(owner) {
                owner_word.swap(owner, 0);
                continue;
            }
            let over = match leased.kind {
                LeaseKind::Stream => deadline.load() < now || silent && owner == agent,
                LeaseKind::Map => deadline.load() < now,
                LeaseKind::Seal => silent && owner == agent,
            };
            if over && state_word.swap(state, state | BROKEN) {
                continue;
            }
            found.push(Blocker::Lease { owner, kind: leased.kind, id: leased.id });
        }
        found
    }

    /// Opens attempt `n` for `version`. False if it was aborted.
    pub fn open(&self, n: u64, version: u64) -> bool {
        let control = self.control();
        if control.attempt() != n || control.phase() != Phase::Guard {
            return false;
        }
        self.words[PENDING].store(version);
        self.swap_control(control, control.with_phase(Phase::Open).with_whole(self.target(control), false))
    }

    /// Commits attempt `n`, all of whose ranks are done. False if it was aborted.
    pub fn commit(&self, n: u64, version: u64) -> bool {
        let control = self.control();
        if !control.is_open(n) {
            return false;
        }
        let target = self.target(control);
        self.slot(target)[1].store(version);
        self.slot(target)[0].store(n);
        let new = control.with_phase(Phase::Quiet).with_whole(target, true).with_active(target);
        self.swap_control(control, new)
    }

    // --- every rank ---

    /// The open attempt and its version, if there is one beyond `last`.
    pub fn open_attempt(&self, last: u64) -> Option<(u64, u64)> {
        let control = self.control();
        if control.phase() != Phase::Open || control.attempt() <= last {
            return None;
        }
        let version = self.words[PENDING].load();
        (self.control() == control).then_some((control.attempt(), version))
    }

    /// Joins attempt `n`: all earlier writes of this rank have ended. False if the attempt is over.
    pub fn join(&self, rank: usize, n: u64) -> bool {
        self.rank(rank).0.store(n << 2 | 1);
        self.control().is_open(n)
    }

    /// Says that this rank has written its part of attempt `n`.
    pub fn done(&self, rank: usize, n: u64) {
        self.rank(rank).0.store(n << 2 | 2);
    }

    /// What a rank has said of attempt `n`, and its owner.
    pub fn said(&self, rank: usize, n: u64) -> (Said, u64) {
        let (word, owner) = self.rank(rank);
        let word = word.load();
        let said = match word & 3 {
            1 if word >> 2 == n => Said::Joined,
            2 if word >> 2 == n => Said::Done,
            _ => Said::Absent,
        };
        (said, owner.load())
    }

    /// Whether every rank has said at least this of attempt `n`.
    pub fn all_said(&self, n: u64, at_least: Said) -> bool {
        (0..self.shape.ranks).all(|r| self.said(r, n).0 >= at_least)
    }

    /// Gives attempt `n` up unless it is over, and answers whether it was committed.
    pub fn abort(&self, n: u64) -> bool {
        loop {
            let control = self.control();
            match self.fate(control, n) {
                Some(committed) => return committed,
                None if self.swap_control(control, control.with_phase(Phase::Aborted)) => return false,
                None => {}
            }
        }
    }

    /// Whether attempt `n` was committed; `None` while it runs.
    pub fn outcome(&self, n: u64) -> Option<bool> {
        self.fate(self.control(), n)
    }

    fn fate(&self, control: Control, n: u64) -> Option<bool> {
        if control.attempt() != n {
            return Some(self.words[COMMITTED].load() >= n);
        }
        match control.phase() {
            Phase::Quiet => Some(true),
            Phase::Aborted => Some(false),
            Phase::Guard | Phase::Open => None,
        }
    }

    /// Takes a rank for `me`, and ends the attempt that a dead predecessor can no longer finish. Answers the last
    /// attempt that the rank joined, or the owner that lives.
    pub fn claim_rank(&self, rank: usize, me: u64, alive: impl Fn(u64) -> bool) -> Result<u64, u64> {
        let (word, owner) = self.rank(rank);
        claim(owner, me, alive)?;
        let word = word.load();
        let control = self.control();
        let left_open = control.is_open(word >> 2) && word & 3 == 1;
        if left_open || rank == 0 && matches!(control.phase(), Phase::Guard | Phase::Open) {
            self.abort(control.attempt());
        }
        Ok(word >> 2)
    }

    /// Whether a rank has an owner that lives.
    pub fn has_writers(&self, alive: impl Fn(u64) -> bool) -> bool {
        (0..self.shape.ranks).any(|rank| alive(self.rank(rank).1.load()))
    }

    /// Gives a rank back.
    pub fn leave_rank(&self, rank: usize, me: u64) {
        self.rank(rank).1.swap(me, 0);
    }

    // --- readers ---

    /// Leases the slot that holds `id`, until `deadline`. `serial` tells the leases of one process apart.
    pub fn acquire(
        &self,
        me: u64,
        id: u64,
        kind: LeaseKind,
        deadline: u64,
        serial: u16,
        alive: impl Fn(u64) -> bool,
    ) -> Result<Held, Refused> {
        let slot = self.slot_of(id)?;
        let entry = self.claim_entry(me, alive).ok_or(Refused::Full)?;
        let (owner, state_word, deadline_word) = self.lease(entry);
        let state = Leased { id, serial, slot, kind }.pack();
        deadline_word.store(deadline);
        state_word.store(state);
        // The other half of FLIP-1: only a look that comes after the store counts.
        match self.slot_of(id) {
            Ok(now) if now == slot => Ok(Held { entry, state, slot }),
            other => {
                state_word.store(0);
                owner.store(0);
                Err(other.err().unwrap_or(Refused::Gone))
            }
        }
    }

    fn slot_of(&self, id: u64) -> Result<usize, Refused> {
        let seen = self.snapshot();
        let holds = |s: &usize| seen.slots[*s].is_some_and(|w| w.id == id);
        let slot = (0..self.shape.slots).find(holds).ok_or(Refused::Gone)?;
        let closing = seen.control.phase() == Phase::Guard && self.target(seen.control) == slot;
        if closing { Err(Refused::Closing) } else { Ok(slot) }
    }

    /// A free entry, or else one whose owner is dead.
    fn claim_entry(&self, me: u64, alive: impl Fn(u64) -> bool) -> Option<usize> {
        let entries = 0..self.shape.leases;
        let free = entries.clone().find(|&e| self.lease(e).0.swap(0, me));
        free.or_else(|| {
            entries.clone().find(|&e| {
                let owner = self.lease(e).0.load();
                (owner == 0 || !alive(owner)) && self.lease(e).0.swap(owner, me)
            })
        })
    }

    /// Whether a lease still stands: it was not broken. If it stands, so it did when the bytes were read before this call.
    pub fn stands(&self, held: &Held) -> bool {
        // A load holds back what comes after it only. Weakly ordered processors could still read bytes behind it.
        fence(Ordering::Acquire);
        self.lease(held.entry).1.load() == held.state
    }

    /// Moves a lease's deadline. False if it was broken before.
    pub fn renew(&self, held: &Held, deadline: u64) -> bool {
        self.lease(held.entry).2.store(deadline);
        self.stands(held)
    }

    /// Ends a lease, and answers whether it stood until now.
    pub fn release(&self, held: &Held) -> bool {
        let (owner, state, _) = self.lease(held.entry);
        let stood = state.swap(held.state, 0);
        if !stood {
            state.store(0);
        }
        owner.store(0);
        stood
    }

    /// Whether the next attempt waits for a lease to end, or has stopped waiting.
    pub fn wanted_back(&self, held: &Held) -> bool {
        let control = self.control();
        let guarded = matches!(control.phase(), Phase::Guard | Phase::Open);
        guarded && self.target(control) == held.slot || !self.stands(held)
    }

    // --- the agent ---

    /// Takes the agent's seat, or answers the owner that lives.
    pub fn claim_agent(&self, me: u64, alive: impl Fn(u64) -> bool) -> Result<(), u64> {
        claim(&self.words[AGENT], me, alive)?;
        // Until this store a predecessor's silence may count as ours, which holds no lease yet.
        self.words[DUE].store(0);
        Ok(())
    }

    /// Says, as the agent, that it is at work until `due`.
    pub fn attend(&self, due: u64) {
        self.words[DUE].store(due);
    }

    /// Whether the agent should have said that it is at work before `now`, and has not.
    pub fn is_silent(&self, now: u64) -> bool {
        let due = self.words[DUE].load();
        due != 0 && due < now
    }

    /// Gives the seat back.
    pub fn leave_agent(&self, me: u64) {
        self.words[AGENT].swap(me, 0);
    }

    /// Who sits there; 0 for nobody.
    pub fn agent(&self) -> u64 {
        self.words[AGENT].load()
    }

    /// Fixes the digest of what `held`, a sealer's lease, is on. False if the lease was broken.
    pub fn seal(&self, held: &Held, digest: [u64; 2]) -> bool {
        if !self.stands(held) {
            return false;
        }
        let words = self.slot(held.slot);
        words[3].store(digest[0]);
        words[4].store(digest[1]);
        words[2].store(held.state >> 24);
        true
    }
}

fn claim(word: &impl Word, me: u64, alive: impl Fn(u64) -> bool) -> Result<(), u64> {
    loop {
        let owner = word.load();
        if owner != 0 && alive(owner) {
            return Err(owner);
        }
        if word.swap(owner, me) {
            return Ok(());
        }
    }
}
