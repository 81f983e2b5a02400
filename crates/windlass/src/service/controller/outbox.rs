//! Orders on their way to one receiver.
//!
//! Owns: the queue of one session of a receiver. Orders are numbered from 1 and given by every poll until one says that they
//! were taken, so an answer that is lost on the way loses no order. What is called off before it was ever given is not
//! given at all. The queue is bounded: a receiver that never says what it took is told to leave.

use std::collections::VecDeque;

use tokio::sync::watch;
use windlass_core::barrier::{Order, Peer};

use super::wire::{Numbered, Task};

/// The orders of one session of a receiver.
#[derive(Debug)]
pub(super) struct Outbox {
    session: u64,
    queue: VecDeque<Numbered>,
    last: u64,
    /// The last order that any poll was answered with.
    given: u64,
    most: usize,
    bell: watch::Sender<u64>,
}

impl Outbox {
    /// For a session that serves `models` models.
    pub(super) fn new(session: u64, models: usize) -> Outbox {
        let bell = watch::Sender::new(0);
        Outbox { session, queue: VecDeque::new(), last: 0, given: 0, most: 64 + 16 * models, bell }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether there are more orders than any receiver that takes them ever has.
    pub(super) fn overfull(&self) -> bool {
        self.queue.len() > self.most
    }

    pub(super) fn push(&mut self, task: Task) {
        if let Task::Abandon { order, identity } = &task {
            let waiting = self.queue.iter().position(|n| n.seq > self.given && concerns(&n.task, *order));
            if let Some(task) = waiting.and_then(|at| Some((at, &mut self.queue.get_mut(at)?.task))) {
                // A load is called off model by model.
                let (at, task) = task;
                let empty = match task {
                    Task::Load { identities, .. } => {
                        identities.retain(|i| i != identity);
                        identities.is_empty()
                    }
                    Task::Stage { .. } | Task::Abandon { .. } | Task::Drop { .. } | Task::Live { .. } => true,
                };
                if empty {
                    self.queue.remove(at);
                }
                return;
            }
        }
        self.last += 1;
        self.queue.push_back(Numbered { seq: self.last, task });
        self.bell.send_replace(self.last);
    }

    /// Drops what was taken. False if some of it was never given.
    pub(super) fn taken(&mut self, after: u64) -> bool {
        if after > self.given {
            return false;
        }
        while self.queue.front().is_some_and(|n| n.seq <= after) {
            self.queue.pop_front();
        }
        true
    }

    /// Everything that was not taken yet.
    pub(super) fn give(&mut self) -> Vec<Numbered> {
        self.given = self.given.max(self.last);
        self.queue.iter().cloned().collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Notified at the next order, and at the end of this session.
    pub(super) fn bell(&self) -> watch::Receiver<u64> {
        self.bell.subscribe()
    }

    /// Whether it belongs to this session.
    pub(super) fn is_of(&self, peer: &Peer) -> bool {
        self.session == peer.session
    }
}

fn concerns(task: &Task, number: Order) -> bool {
    match task {
        Task::Stage { order, .. } | Task::Load { order, .. } => *order == number,
        Task::Abandon { .. } | Task::Drop { .. } | Task::Live { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use windlass_core::barrier::SetName;
    use windlass_core::identity::{Identity, Incarnation, ModelId};

    use super::*;

    fn identity(model: &str, version: u64) -> Identity {
        Identity { model_id: ModelId::new(model).unwrap(), incarnation: Incarnation(1), version }
    }

    fn stage(order: u64) -> Task {
        Task::Stage { order: Order(order), identity: identity("m", order), sender_endpoint: "h:1".into() }
    }

    fn numbers(orders: &[Numbered]) -> Vec<u64> {
        orders.iter().map(|n| n.seq).collect()
    }

    #[test]
    fn orders_are_given_until_they_are_taken() {
        let mut outbox = Outbox::new(1, 1);
        outbox.push(stage(1));
        outbox.push(stage(2));
        assert_eq!(numbers(&outbox.give()), [1, 2]);
        assert_eq!(numbers(&outbox.give()), [1, 2], "nobody said that they were taken");
        assert!(outbox.taken(1));
        outbox.push(stage(3));
        assert!(!outbox.taken(3), "never given, so never taken");
        assert_eq!(numbers(&outbox.give()), [2, 3]);
        assert!(outbox.taken(3) && outbox.is_empty());
        assert!(outbox.taken(1), "an older word says nothing new");
    }

    #[test]
    fn what_is_called_off_before_it_was_given_is_never_given() {
        let abandon = |order, i| Task::Abandon { order: Order(order), identity: i };
        let mut outbox = Outbox::new(1, 2);
        outbox.push(stage(1));
        outbox.push(abandon(1, identity("m", 1)));
        assert!(outbox.is_empty());
        outbox.push(stage(2));
        outbox.give();
        outbox.push(abandon(2, identity("m", 2)));
        assert_eq!(outbox.give().len(), 2, "the receiver may be at it");
        let set = SetName::new("s").unwrap();
        let both = vec![identity("m", 3), identity("n", 3)];
        outbox.push(Task::Load { order: Order(3), set, identities: both });
        outbox.push(abandon(3, identity("m", 3)));
        let Task::Load { identities, .. } = &outbox.queue.back().unwrap().task else { panic!() };
        assert_eq!(identities, &[identity("n", 3)]);
        outbox.push(abandon(3, identity("n", 3)));
        assert_eq!(outbox.len(), 2);
    }

    #[test]
    fn a_queue_that_nobody_takes_from_is_noticed() {
        let mut outbox = Outbox::new(1, 1);
        (0..80).for_each(|n| outbox.push(stage(n)));
        assert!(!outbox.overfull());
        outbox.push(stage(80));
        assert!(outbox.overfull());
    }
}
