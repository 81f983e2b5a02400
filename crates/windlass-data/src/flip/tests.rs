//! The protocol by one thread, with more participants than the models can have: any order of whole steps.

use proptest::prelude::*;

use super::*;

const RANKS: usize = 3;
const READERS: usize = 4;
const LEASES: usize = 3;

/// A step that somebody may take.
#[derive(Clone, Copy, Debug)]
enum Step {
    Begin,
    Open,
    Join(usize),
    Done(usize),
    Commit,
    Abort,
    Lease { reader: usize, newest: bool, deadline: u64 },
    End(usize),
    Kill(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let reader = 0..READERS;
    prop_oneof![
        3 => Just(Step::Begin),
        4 => Just(Step::Open),
        6 => (0..RANKS).prop_map(Step::Join),
        6 => (0..RANKS).prop_map(Step::Done),
        4 => Just(Step::Commit),
        1 => Just(Step::Abort),
        4 => (reader.clone(), any::<bool>(), 0u64..20)
            .prop_map(|(reader, newest, deadline)| Step::Lease { reader, newest, deadline }),
        4 => reader.clone().prop_map(Step::End),
        1 => reader.prop_map(Step::Kill),
    ]
}

/// What is known of the words from the steps alone.
#[derive(Default)]
struct World {
    /// Leases by reader, with their deadlines.
    held: [Option<(Held, u64, u64)>; READERS],
    dead: [bool; READERS],
    committed: Vec<u64>,
    /// What each slot's bytes are, by the attempt that began to write them.
    bytes: [u64; 2],
    now: u64,
}

/// Owners are readers counted from 100.
fn owner(reader: usize) -> u64 {
    100 + reader as u64
}

impl World {
    fn alive(&self, owner: u64) -> bool {
        !self.dead[(owner - 100) as usize]
    }

    fn take(&mut self, flip: Flip<'_, AtomicU64>, step: Step) -> Result<(), TestCaseError> {
        let n = flip.control().attempt();
        let target = flip.target(flip.control());
        match step {
            Step::Begin => {
                if matches!(flip.control().phase(), Phase::Quiet | Phase::Aborted) {
                    prop_assert_eq!(flip.begin(), n + 1);
                }
            }
            Step::Open => {
                let in_guard = flip.control().phase() == Phase::Guard;
                let blocked = flip.blockers(n, self.now, |o| self.alive(o));
                let living = self.held.iter().enumerate().any(|(r, h)| {
                    h.is_some_and(|(h, _, deadline)| {
                        h.slot == target && deadline >= self.now && !self.dead[r]
                    })
                });
                prop_assert_eq!(in_guard && living, !blocked.is_empty());
                if blocked.is_empty() {
                    prop_assert_eq!(flip.open(n, n * 10), in_guard);
                }
            }
            Step::Join(rank) if flip.said(rank, n).0 == Said::Absent => {
                let open = flip.control().is_open(n);
                prop_assert_eq!(flip.join(rank, n), open);
            }
            Step::Done(rank) => {
                if flip.control().is_open(n) && flip.all_said(n, Said::Joined) {
                    self.bytes[target] = n;
                    flip.done(rank, n);
                }
            }
            Step::Commit => {
                if flip.all_said(n, Said::Done) && flip.commit(n, n * 10) {
                    self.committed.push(n);
                }
            }
            Step::Abort => {
                let over = flip.outcome(n);
                prop_assert_eq!(flip.abort(n), over.unwrap_or(false));
            }
            Step::Lease { reader, newest, deadline } => {
                self.lease(flip, reader, newest, self.now + deadline)?;
            }
            Step::End(reader) => self.end(flip, reader)?,
            Step::Kill(reader) => self.dead[reader] = true,
            Step::Join(_) => {}
        }
        self.now += 1;
        Ok(())
    }

    fn lease(
        &mut self,
        flip: Flip<'_, AtomicU64>,
        reader: usize,
        newest: bool,
        until: u64,
    ) -> Result<(), TestCaseError> {
        if self.dead[reader] || self.held[reader].is_some() {
            return Ok(());
        }
        let seen = flip.snapshot();
        let slot = if newest { seen.control.active() } else { 1 - seen.control.active() };
        let Some(words) = seen.slots[slot] else { return Ok(()) };
        let closing = seen.control.phase() == Phase::Guard && flip.target(seen.control) == slot;
        let living = self.held.iter().zip(self.dead).filter(|(h, dead)| h.is_some() && !dead).count();
        match flip.acquire(owner(reader), words.id, LeaseKind::Map, until, self.now as u16, |o| self.alive(o))
        {
            Ok(held) => {
                prop_assert!(!closing && held.slot == slot);
                self.held[reader] = Some((held, words.id, until));
            }
            Err(Refused::Closing) => prop_assert!(closing),
            Err(Refused::Full) => prop_assert_eq!(living, LEASES),
            Err(Refused::Gone) => prop_assert!(false, "it was there"),
        }
        Ok(())
    }

    fn end(&mut self, flip: Flip<'_, AtomicU64>, reader: usize) -> Result<(), TestCaseError> {
        if let Some((held, id, deadline)) = self.held[reader].take_if(|_| !self.dead[reader]) {
            let stood = flip.release(&held);
            prop_assert!(stood || deadline < self.now, "nothing is broken before its deadline");
            if stood {
                prop_assert_eq!(self.bytes[held.slot], id, "the bytes of the id that was leased");
            }
        }
        Ok(())
    }

    fn check(&self, flip: Flip<'_, AtomicU64>) -> Result<(), TestCaseError> {
        let seen = flip.snapshot();
        prop_assert_eq!(seen.active().map(|w| w.id), self.committed.last().copied());
        for (slot, words) in seen.slots.iter().enumerate() {
            if let Some(words) = words {
                prop_assert_eq!((words.id, words.version), (self.bytes[slot], self.bytes[slot] * 10));
            }
        }
        let n = seen.control.attempt();
        if seen.control.is_open(n) {
            let target = flip.target(seen.control);
            for (held, _, _) in self.held.iter().zip(self.dead).filter_map(|(h, dead)| h.filter(|_| !dead)) {
                prop_assert!(held.slot != target || !flip.stands(&held), "a lease on what is being written");
            }
        }
        // Of the attempts since the last commit: a rank asks only of one after which none can be committed without it.
        for id in self.committed.last().copied().unwrap_or(1).max(1)..n {
            prop_assert_eq!(flip.outcome(id), Some(self.committed.contains(&id)));
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn any_order_of_steps_keeps_leases_and_versions_apart(steps in proptest::collection::vec(step(), 1..200)) {
        let shape = Shape { slots: 2, ranks: RANKS, leases: LEASES };
        let words: Vec<AtomicU64> = (0..shape.words()).map(|_| AtomicU64::new(0)).collect();
        let flip = Flip::new(&words, shape);
        let mut world = World::default();
        for step in steps {
            world.take(flip, step)?;
            world.check(flip)?;
        }
    }
}

#[test]
fn a_control_word_keeps_its_fields_apart() {
    let control = Control(0).next().with_whole(1, true).with_active(1).with_phase(Phase::Aborted).next();
    assert_eq!((control.attempt(), control.phase(), control.active()), (2, Phase::Guard, 1));
    assert_eq!((control.whole(0), control.whole(1)), (false, true));
    for kind in [LeaseKind::Stream, LeaseKind::Map, LeaseKind::Seal] {
        let leased = Leased { id: (1 << 40) - 1, serial: u16::MAX, slot: 1, kind };
        assert_eq!(Leased::unpack(leased.pack()), Some(leased));
        assert_eq!(Leased::unpack(leased.pack() | BROKEN), None);
    }
}
