//! Where a round stands, and how many members are how far in it.

use crate::barrier::config::Mode;
use crate::barrier::member::{Counted, Member, View};
use crate::barrier::types::{Millis, Phase};
use crate::identity::Version;

/// One version on its way from announced to served.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) version: Version,
    pub(super) phase: Phase,
    /// From then on the round may give way to a newer version even if some receivers are done.
    pub(super) deadline: Millis,
    /// How often it has given way to a newer version since the last deadline.
    pub(super) moves: usize,
}

/// How many members are where in the round, kept up to date one member at a time.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) waiting: usize,
    pub(super) done: usize,
    pub(super) loading: usize,
    /// Per model, how many of the done serve it.
    pub(super) cover: Vec<usize>,
}

impl Tally {
    /// Replaces the share of `member` by `counted`.
    pub(super) fn change(&mut self, member: &Member, counted: Counted) {
        let old = member.counted;
        let apply = |n: &mut usize, old: bool, new: bool| *n = *n + usize::from(new) - usize::from(old);
        apply(&mut self.waiting, old.waiting, counted.waiting);
        apply(&mut self.done, old.done, counted.done);
        apply(&mut self.loading, old.loading, counted.loading);
        for slot in &member.slots {
            if let Some(n) = self.cover.get_mut(slot.model) {
                apply(n, old.done, counted.done);
            }
        }
    }
}

/// Where `member` stands in the round.
pub(super) fn count(member: &Member, view: &View<'_>, mode: Mode, none_live: bool) -> Counted {
    let Some((version, phase)) = view.round else { return Counted::default() };
    let pool = member.live || none_live;
    match phase {
        Phase::Staging => {
            let done = member.ready(version, view);
            Counted { waiting: pool && !member.excused && !done, done, loading: false }
        }
        Phase::Loading => {
            let done = member.uniform(view).is_some_and(|at| at >= version);
            let loading = member.load.as_ref().is_some_and(|l| l.version == version);
            let waiting = match mode {
                Mode::Strict => pool && loading,
                Mode::Relaxed => pool && !member.excused && !done,
            };
            Counted { waiting, done, loading }
        }
    }
}
