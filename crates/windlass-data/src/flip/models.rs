//! Every interleaving of the protocol's steps, by loom: `make loom`.
//!
//! A slot's bytes are two relaxed cells that hold the id of who wrote them, so loom also shows a reader that is not
//! ordered after the writer. A participant that dies is one whose stores have no effect from a certain one on; each
//! model of death is run for every such point. Where a model must reach something in some interleaving to be worth
//! anything, it is asserted that it did.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize as Count, Ordering as O};
use std::time::Duration;

use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

use super::*;

/// One order of all accesses; see the module's section on memory order.
impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        fence(Ordering::SeqCst);
        AtomicU64::load(self, Ordering::Acquire)
    }

    fn store(&self, value: u64) {
        AtomicU64::store(self, value, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    fn swap(&self, old: u64, new: u64) -> bool {
        fence(Ordering::SeqCst);
        let done = self.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok();
        fence(Ordering::SeqCst);
        done
    }
}

const LEAD: u64 = 1;
const RANK: u64 = 2;
const READER: u64 = 3;
const AGENT: u64 = 4;
/// Who takes the places of the dead when all threads have ended.
const HEIR: u64 = 9;

struct World {
    words: Vec<AtomicU64>,
    /// Two cells for each slot.
    bytes: [[AtomicU64; 2]; 2],
    /// A bit for each owner.
    dead: AtomicU64,
    shape: Shape,
}

impl World {
    fn new(slots: usize, ranks: usize, leases: usize) -> World {
        let shape = Shape { slots, ranks, leases };
        let zero = || AtomicU64::new(0);
        World {
            words: (0..shape.words()).map(|_| zero()).collect(),
            bytes: [[zero(), zero()], [zero(), zero()]],
            dead: zero(),
            shape,
        }
    }

    /// Two committed versions: slot 0 is active and holds id 2, slot 1 is next to be written and holds id 1.
    fn with_two_versions(ranks: usize, leases: usize) -> World {
        let world = World::new(2, ranks, leases);
        world.write_versions(2);
        world
    }

    fn write_versions(&self, count: usize) {
        for (rank, owner) in [LEAD, RANK].into_iter().take(self.shape.ranks).enumerate() {
            assert_eq!(self.flip().claim_rank(rank, owner, |o| self.alive(o)), Ok(0));
        }
        for _ in 0..count {
            let n = self.flip().begin();
            assert!(self.publish(n), "nobody is in the way");
        }
    }

    fn flip(&self) -> Flip<'_, AtomicU64> {
        Flip::new(&self.words, self.shape)
    }

    /// All steps after begin, by all ranks at once.
    fn publish(&self, n: u64) -> bool {
        let (flip, ranks) = (self.flip(), self.shape.ranks);
        let slot = flip.target(flip.control());
        if !flip.open(n, n * 10) {
            return false;
        }
        (0..ranks).for_each(|r| assert!(flip.join(r, n)));
        self.bytes[slot].iter().for_each(|b| b.store(n, Ordering::Relaxed));
        (0..ranks).for_each(|r| flip.done(r, n));
        assert!(flip.all_said(n, Said::Done));
        flip.commit(n, n * 10)
    }

    fn alive(&self, owner: u64) -> bool {
        Word::load(&self.dead) >> owner & 1 == 0
    }

    fn die(&self, owner: u64) {
        self.dead.fetch_or(1 << owner, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    /// What a reader sees of a slot that it may read.
    fn assert_holds(&self, slot: usize, id: u64) {
        for cell in &self.bytes[slot] {
            assert_eq!(cell.load(Ordering::Relaxed), id, "bytes of another version under a lease");
        }
    }

    /// After all threads have ended: what is active is whole, and an heir can go on.
    fn assert_heir_can_publish(&self) {
        let flip = self.flip();
        let seen = flip.snapshot();
        let active = seen.active().unwrap();
        self.assert_holds(seen.control.active(), active.id);
        assert_eq!(active.version, active.id * 10);
        for rank in 0..self.shape.ranks {
            flip.claim_rank(rank, HEIR + rank as u64, |o| o >= HEIR).unwrap();
        }
        let n = flip.begin();
        assert!(n > active.id);
        assert_eq!(flip.blockers(n, 0, |o| o >= HEIR), vec![]);
        assert!(self.publish(n));
        let held = flip.acquire(HEIR, n, LeaseKind::Map, 1, 0, |o| o >= HEIR).unwrap();
        self.assert_holds(held.slot, n);
        assert!(flip.release(&held));
    }
}

/// How many more stores a participant lives for.
struct Life<'a> {
    left: Cell<usize>,
    owner: u64,
    world: &'a World,
}

impl<'a> Life<'a> {
    fn new(world: &'a World, owner: u64, stores: usize) -> Life<'a> {
        Life { left: Cell::new(stores), owner, world }
    }

    /// Whether the next store still happens.
    fn beat(&self) -> bool {
        match self.left.get() {
            0 => {
                self.world.die(self.owner);
                false
            }
            n => {
                self.left.set(n - 1);
                true
            }
        }
    }

    fn is_over(&self) -> bool {
        self.left.get() == 0
    }

    fn words(&'a self) -> Vec<Mortal<'a>> {
        self.world.words.iter().map(|word| Mortal { word, life: self }).collect()
    }

    fn write(&self, slot: usize, id: u64) {
        for cell in &self.world.bytes[slot] {
            if self.beat() {
                cell.store(id, Ordering::Relaxed);
            }
        }
    }
}

impl Drop for Life<'_> {
    fn drop(&mut self) {
        self.world.die(self.owner);
    }
}

/// A word in the hands of somebody who may die.
struct Mortal<'a> {
    word: &'a AtomicU64,
    life: &'a Life<'a>,
}

impl Word for Mortal<'_> {
    fn load(&self) -> u64 {
        Word::load(self.word)
    }

    fn store(&self, value: u64) {
        if self.life.beat() {
            Word::store(self.word, value);
        }
    }

    /// The dead are told what ends their loops.
    fn swap(&self, old: u64, new: u64) -> bool {
        if self.life.beat() { Word::swap(self.word, old, new) } else { true }
    }
}

/// Runs a model through all interleavings with at most three forced switches.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    builder.max_duration = Some(Duration::from_secs(50));
    builder.check(model);
}

/// Counts over all interleavings of a model.
fn counter() -> &'static Count {
    Box::leak(Box::new(Count::new(0)))
}

/// A lead that gives up after two looks. Answers the attempt if it was committed.
fn lead<W: Word>(flip: Flip<'_, W>, now: u64, world: &World, write: impl Fn(usize, u64)) -> Option<u64> {
    let n = flip.begin();
    let slot = flip.target(flip.control());
    let mut looks = 0;
    while !flip.blockers(n, now, |o| world.alive(o)).is_empty() {
        looks += 1;
        if looks == 2 {
            flip.abort(n);
            return None;
        }
        thread::yield_now();
    }
    if !flip.open(n, n * 10) || !flip.join(0, n) || !flip.all_said(n, Said::Joined) {
        flip.abort(n);
        return None;
    }
    write(slot, n);
    flip.done(0, n);
    flip.commit(n, n * 10).then_some(n)
}

fn plain_write(world: &World) -> impl Fn(usize, u64) {
    |slot, id| world.bytes[slot].iter().for_each(|b| b.store(id, Ordering::Relaxed))
}

/// Takes a lease on `id`, or on what is active, and looks. Answers whether it got one.
fn read(world: &World, id: Option<u64>, owner: u64) -> bool {
    let flip = world.flip();
    let Some(id) = id.or_else(|| flip.snapshot().active().map(|w| w.id)) else { return false };
    let Ok(held) = flip.acquire(owner, id, LeaseKind::Map, 100, 7, |o| world.alive(o)) else { return false };
    world.assert_holds(held.slot, id);
    assert!(flip.release(&held), "nobody breaks a lease before its deadline");
    true
}

#[test]
fn loom_lease_against_guard() {
    let (leases, commits) = (counter(), counter());
    check(move || {
        let world = Arc::new(World::with_two_versions(1, 1));
        let w = Arc::clone(&world);
        let reader = thread::spawn(move || {
            leases.fetch_add(read(&w, Some(1), READER).into(), O::Relaxed);
            read(&w, None, READER);
        });
        let committed = lead(world.flip(), 0, &world, plain_write(&world));
        commits.fetch_add(committed.is_some().into(), O::Relaxed);
        reader.join().unwrap();
    });
    assert!(leases.load(O::Relaxed) > 0 && commits.load(O::Relaxed) > 0);
}

#[test]
fn loom_lease_on_the_only_slot() {
    let leases = counter();
    check(move || {
        let world = Arc::new(World::new(1, 1, 1));
        world.write_versions(1);
        let w = Arc::clone(&world);
        let reader = thread::spawn(move || {
            leases.fetch_add(read(&w, None, READER).into(), O::Relaxed);
        });
        lead(world.flip(), 0, &world, plain_write(&world));
        reader.join().unwrap();
    });
    assert!(leases.load(O::Relaxed) > 0);
}

#[test]
fn loom_expired_lease_is_broken_or_kept() {
    let (stood, broken) = (counter(), counter());
    check(move || {
        let world = Arc::new(World::with_two_versions(1, 1));
        let w = Arc::clone(&world);
        let reader = thread::spawn(move || {
            let flip = w.flip();
            let Ok(held) = flip.acquire(READER, 1, LeaseKind::Stream, 5, 7, |o| w.alive(o)) else { return };
            let seen = [0, 1].map(|c| w.bytes[held.slot][c].load(Ordering::Relaxed));
            if flip.release(&held) {
                assert_eq!(seen, [1, 1], "a lease that stood until its end shows one version");
                stood.fetch_add(1, O::Relaxed);
            } else {
                broken.fetch_add(1, O::Relaxed);
            }
        });
        assert!(
            lead(world.flip(), 10, &world, plain_write(&world)).is_some(),
            "an expired lease is in nobody's way"
        );
        reader.join().unwrap();
        assert_eq!(Word::load(world.flip().lease(0).0), 0, "the entry is free again");
    });
    assert!(stood.load(O::Relaxed) > 0 && broken.load(O::Relaxed) > 0);
}

#[test]
fn loom_commit_against_abort() {
    let (commits, aborts) = (counter(), counter());
    check(move || {
        let world = Arc::new(World::with_two_versions(2, 1));
        let flip = world.flip();
        let n = flip.begin();
        assert!(flip.open(n, n * 10) && flip.join(0, n) && flip.join(1, n));
        plain_write(&world)(1, n);
        flip.done(0, n);
        flip.done(1, n);
        let aborters: Vec<_> = (0..2)
            .map(|_| {
                let w = Arc::clone(&world);
                thread::spawn(move || w.flip().abort(n))
            })
            .collect();
        let committed = flip.commit(n, n * 10);
        for aborter in aborters {
            assert_eq!(aborter.join().unwrap(), committed, "all agree");
        }
        let seen = flip.snapshot();
        assert_eq!(seen.active().unwrap().id, if committed { n } else { 2 });
        world.assert_holds(seen.control.active(), seen.active().unwrap().id);
        if committed { commits } else { aborts }.fetch_add(1, O::Relaxed);
    });
    assert!(commits.load(O::Relaxed) > 0 && aborts.load(O::Relaxed) > 0);
}

#[test]
fn loom_snapshot_is_of_one_moment() {
    check(|| {
        let world = Arc::new(World::with_two_versions(1, 1));
        let w = Arc::clone(&world);
        let writer = thread::spawn(move || {
            lead(w.flip(), 0, &w, plain_write(&w)).unwrap();
        });
        let seen = world.flip().snapshot();
        // Slot 1 holds id 1, then nothing, then id 3.
        let holds = if seen.control.attempt() == 3 && seen.control.phase() == Phase::Quiet { 3 } else { 1 };
        let one = seen.slots[1].map(|w| (w.id, w.version));
        assert!(one.is_none_or(|o| o == (holds, holds * 10)), "{seen:?}");
        assert_eq!(seen.slots[0].map(|w| (w.id, w.version)), Some((2, 20)));
        writer.join().unwrap();
    });
}

#[test]
fn loom_outcome_is_the_same_for_all() {
    check(|| {
        let world = Arc::new(World::new(1, 2, 1));
        let flip = world.flip();
        let n = flip.begin();
        assert!(flip.open(n, n * 10) && flip.join(0, n) && flip.join(1, n));
        flip.done(0, n);
        flip.done(1, n);
        let w = Arc::clone(&world);
        let lead = thread::spawn(move || {
            let flip = w.flip();
            let committed = flip.commit(n, n * 10);
            // The lead goes on while the other rank has not looked yet.
            let next = flip.begin();
            assert!(flip.open(next, 0));
            flip.abort(next);
            flip.begin();
            committed
        });
        let seen = flip.outcome(n).unwrap_or_else(|| flip.abort(n));
        assert_eq!(seen, lead.join().unwrap());
        assert_eq!(flip.outcome(n), Some(seen), "and it stays so");
    });
}

#[test]
fn loom_join_barrier_against_a_late_writer() {
    let both = counter();
    check(move || {
        let world = Arc::new(World::with_two_versions(2, 1));
        let busy = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let flip = world.flip();
        let n = flip.begin();
        assert!(flip.open(n, n * 10) && flip.join(0, n) && flip.join(1, n));
        // Rank 1 passed the barrier and is writing when the attempt is given up.
        Word::store(&busy[1], n);
        let (w, b) = (Arc::clone(&world), Arc::clone(&busy));
        let late = thread::spawn(move || {
            let flip = w.flip();
            w.bytes[1][0].store(n, Ordering::Relaxed);
            Word::store(&b[1], 0);
            let Some((m, _)) = flip.open_attempt(n) else { return false };
            if !flip.join(1, m) || !flip.all_said(m, Said::Joined) || !flip.control().is_open(m) {
                return false;
            }
            Word::store(&b[1], m);
            let other = Word::load(&b[0]);
            assert!(other == 0 || other == m, "rank 0 writes attempt {other} while rank 1 writes {m}");
            Word::store(&b[1], 0);
            true
        });
        assert!(!flip.abort(n));
        let m = flip.begin();
        assert!(flip.blockers(m, 0, |o| world.alive(o)).is_empty());
        assert!(flip.open(m, m * 10) && flip.join(0, m));
        let mut wrote = false;
        for _ in 0..2 {
            if flip.all_said(m, Said::Joined) {
                Word::store(&busy[0], m);
                let other = Word::load(&busy[1]);
                assert!(
                    other == 0 || other == m,
                    "rank 1 still writes attempt {other} while rank 0 writes {m}"
                );
                Word::store(&busy[0], 0);
                wrote = true;
                break;
            }
            thread::yield_now();
        }
        let late_wrote = late.join().unwrap();
        both.fetch_add((wrote && late_wrote).into(), O::Relaxed);
    });
    assert!(both.load(O::Relaxed) > 0, "both ranks get to write the later attempt in some order");
}

/// The agent seals what is active, comparing with the other slot if it can have it.
fn seal<W: Word>(flip: Flip<'_, W>, world: &World, over: &dyn Fn() -> bool) -> Option<bool> {
    let active = flip.snapshot().active().filter(|w| w.digest.is_none())?;
    let alive = |o| world.alive(o);
    let new = flip.acquire(AGENT, active.id, LeaseKind::Seal, 0, 1, alive).ok()?;
    let base = flip.acquire(AGENT, active.id - 1, LeaseKind::Seal, 0, 2, alive).ok();
    if !over() {
        world.assert_holds(new.slot, active.id);
    }
    if let Some(base) = base.filter(|_| !over()) {
        world.assert_holds(base.slot, active.id - 1);
    }
    assert!(flip.seal(&new, [active.id, active.id]) || over());
    if let Some(base) = &base {
        assert!(flip.release(base) || over(), "a sealer's lease is never broken");
    }
    assert!(flip.release(&new) || over());
    Some(base.is_some())
}

fn assert_digests_are_whole(world: &World) {
    for slot in world.flip().snapshot().slots.into_iter().flatten() {
        assert!(slot.digest.is_none_or(|d| d == [slot.id, slot.id]), "{slot:?}");
    }
}

#[test]
fn loom_seal_against_guard() {
    let (with_base, commits) = (counter(), counter());
    check(move || {
        let world = Arc::new(World::with_two_versions(1, 2));
        world.flip().claim_agent(AGENT, |o| world.alive(o)).unwrap();
        let w = Arc::clone(&world);
        let agent = thread::spawn(move || {
            let sealed = seal(w.flip(), &w, &|| false);
            with_base.fetch_add((sealed == Some(true)).into(), O::Relaxed);
        });
        let committed = lead(world.flip(), 50, &world, plain_write(&world));
        assert_digests_are_whole(&world);
        if committed.is_some() {
            commits.fetch_add(1, O::Relaxed);
            let inactive = world.flip().snapshot().slots[0].unwrap();
            assert_eq!(inactive.digest, Some([2, 2]), "the guard waited for the seal");
        }
        agent.join().unwrap();
    });
    assert!(with_base.load(O::Relaxed) > 0 && commits.load(O::Relaxed) > 0);
}

#[test]
fn loom_silent_agent_is_not_waited_for() {
    let (stood, broken, late) = (counter(), counter(), counter());
    check(move || {
        let world = Arc::new(World::with_two_versions(1, 2));
        world.flip().claim_agent(AGENT, |o| world.alive(o)).unwrap();
        world.flip().attend(5);
        let w = Arc::clone(&world);
        let agent = thread::spawn(move || {
            let (flip, alive) = (w.flip(), |o| w.alive(o));
            let Ok(new) = flip.acquire(AGENT, 2, LeaseKind::Seal, 0, 1, alive) else { return };
            if let Ok(base) = flip.acquire(AGENT, 1, LeaseKind::Seal, 0, 2, alive) {
                let seen = [0, 1].map(|c| w.bytes[base.slot][c].load(Ordering::Relaxed));
                if flip.release(&base) {
                    assert_eq!(seen, [1, 1], "a base that stood until its end is one version");
                    stood.fetch_add(1, O::Relaxed);
                } else {
                    broken.fetch_add(1, O::Relaxed);
                }
            }
            let sealed = flip.seal(&new, [2, 2]);
            // Broken between the look and the stores: they are late.
            let kept = flip.release(&new);
            late.fetch_add((sealed && !kept).into(), O::Relaxed);
        });
        for _ in 0..2 {
            let committed = lead(world.flip(), 10, &world, plain_write(&world));
            assert!(committed.is_some(), "a silent agent is in nobody's way");
            assert_digests_are_whole(&world);
        }
        assert!(world.flip().claim_agent(HEIR, |o| world.alive(o)).is_err(), "it keeps its seat");
        agent.join().unwrap();
        assert_digests_are_whole(&world);
        let slots = world.flip().snapshot().slots;
        assert_eq!(slots.map(|s| s.unwrap().digest), [None, None], "nothing of it is on what came later");
    });
    assert!([stood, broken, late].iter().all(|c| c.load(O::Relaxed) > 0));
}

#[test]
fn loom_lead_dies_anywhere() {
    // Begin, open, join, two bytes, done, commit: twelve stores and one that is never reached.
    for stores in 0..=12 {
        check(move || {
            let world = Arc::new(World::with_two_versions(1, 1));
            let w = Arc::clone(&world);
            let lead = thread::spawn(move || {
                let life = Life::new(&w, LEAD, stores);
                let words = life.words();
                lead(Flip::new(&words, w.shape), 0, &w, |slot, id| life.write(slot, id));
            });
            read(&world, None, READER);
            lead.join().unwrap();
            world.assert_heir_can_publish();
        });
    }
}

#[test]
fn loom_rank_dies_anywhere() {
    for stores in 0..=5 {
        check(move || {
            let world = Arc::new(World::with_two_versions(2, 1));
            let flip = world.flip();
            let n = flip.begin();
            assert!(flip.open(n, n * 10));
            let w = Arc::clone(&world);
            let rank = thread::spawn(move || {
                let life = Life::new(&w, RANK, stores);
                let words = life.words();
                let flip = Flip::new(&words, w.shape);
                if flip.join(1, n) && flip.all_said(n, Said::Joined) {
                    life.write(1, n);
                    flip.done(1, n);
                }
            });
            let joined = flip.join(0, n) && flip.all_said(n, Said::Joined);
            flip.done(0, n);
            if joined && flip.all_said(n, Said::Done) {
                assert!(flip.commit(n, n * 10));
                world.assert_holds(1, n);
            } else {
                assert!(!flip.abort(n));
            }
            rank.join().unwrap();
            world.die(LEAD);
            world.assert_heir_can_publish();
        });
    }
}

#[test]
fn loom_reader_dies_anywhere() {
    for stores in 0..=5 {
        check(move || {
            let world = Arc::new(World::with_two_versions(1, 1));
            let w = Arc::clone(&world);
            let reader = thread::spawn(move || {
                let life = Life::new(&w, READER, stores);
                let words = life.words();
                let flip = Flip::new(&words, w.shape);
                if let Ok(held) = flip.acquire(READER, 1, LeaseKind::Map, 100, 7, |o| w.alive(o)) {
                    if !life.is_over() {
                        w.assert_holds(held.slot, 1);
                    }
                    flip.release(&held);
                }
            });
            lead(world.flip(), 0, &world, plain_write(&world));
            reader.join().unwrap();
            world.die(LEAD);
            world.assert_heir_can_publish();
        });
    }
}

#[test]
fn loom_agent_dies_anywhere() {
    // Two leases of three stores, three of sealing, four of ending.
    for stores in 0..=13 {
        check(move || {
            let world = Arc::new(World::with_two_versions(1, 2));
            world.flip().claim_agent(AGENT, |o| world.alive(o)).unwrap();
            let w = Arc::clone(&world);
            let agent = thread::spawn(move || {
                let life = Life::new(&w, AGENT, stores);
                let words = life.words();
                seal(Flip::new(&words, w.shape), &w, &|| life.is_over());
            });
            let committed = lead(world.flip(), 50, &world, plain_write(&world));
            assert_digests_are_whole(&world);
            agent.join().unwrap();
            assert_digests_are_whole(&world);
            world.flip().claim_agent(HEIR, |o| world.alive(o)).unwrap();
            if committed.is_none() {
                let active = world.flip().snapshot().active().unwrap();
                assert!(active.digest.is_none_or(|d| d == [2, 2]));
            }
            world.flip().leave_agent(HEIR);
            world.die(LEAD);
            world.assert_heir_can_publish();
        });
    }
}
