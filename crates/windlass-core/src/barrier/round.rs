//! Rounds: how a group takes one version from announced to served.

use crate::barrier::config::{Mode, Required};
use crate::barrier::group::Group;
use crate::barrier::member::{Counted, Ctx, Lineage, Member, View, view};
use crate::barrier::types::{Action, Blocked, FenceReason, Millis, Phase};
use crate::identity::Version;

/// One version on its way from announced to served.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) version: Version,
    pub(super) phase: Phase,
    /// From then on the round may give way to a newer version even if some receivers are done.
    pub(super) deadline: Millis,
    /// How often it has given way to a newer version since the last deadline.
    moves: usize,
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

impl Group {
    /// Moves the round as far as it goes.
    pub(super) fn advance(&mut self, ctx: &mut Ctx<'_>) {
        loop {
            self.mark_begun();
            let next = self.newest_common.filter(|v| self.service.is_none_or(|s| s < *v));
            match (&self.round, next) {
                (None, None) => break,
                (None, Some(version)) => self.open_round(version, 0, ctx),
                (Some(round), next) => {
                    let overdue = round.deadline <= ctx.now;
                    let (version, phase, moves) = (round.version, round.phase, round.moves);
                    let newer = next.filter(|v| *v > version);
                    // Nobody has what the agent does not show, so no load of it is open, and a lower one is no way back.
                    if self.is_absent(version) && self.tally.loading == 0 {
                        self.give_up(version, ctx);
                    } else if self.missing().is_none() {
                        match phase {
                            Phase::Staging => self.begin_load(version, ctx),
                            Phase::Loading => self.serve(version, ctx),
                        }
                    } else if let Some(newer) = newer
                        && self.tally.loading == 0
                        && (overdue
                            || self.is_hopeless()
                            || (self.tally.done == 0 && moves < ctx.limits.max_ahead))
                    {
                        self.open_round(newer, if overdue { 0 } else { moves + 1 }, ctx);
                    } else {
                        break;
                    }
                }
            }
        }
        self.report_stall(ctx);
        if std::mem::take(&mut self.release_due) {
            self.release(ctx);
        }
    }

    /// Whether nobody who is there can still be made ready: there are too few of those who are, and nobody to wait for.
    fn is_hopeless(&self) -> bool {
        self.tally.waiting == 0 && self.round.as_ref().is_some_and(|r| r.phase == Phase::Staging)
    }

    /// Starts on `version`; an unfinished older round gives way.
    fn open_round(&mut self, version: Version, moves: usize, ctx: &mut Ctx<'_>) {
        let (phase, span) = match self.mode {
            Mode::Strict => (Phase::Staging, ctx.limits.stage_ms),
            Mode::Relaxed => (Phase::Loading, ctx.limits.stage_ms.saturating_add(ctx.limits.load_ms)),
        };
        self.round = Some(Round { version, phase, deadline: ctx.deadline(span), moves });
        let view = view!(self);
        for member in self.members.values_mut() {
            member.excused = member.beyond(version, &view);
            member.forget_below(version, self.service, &view, ctx);
            member.pursue(&view, ctx);
        }
        self.retally();
    }

    fn begin_load(&mut self, version: Version, ctx: &mut Ctx<'_>) {
        let deadline = ctx.deadline(ctx.limits.load_ms);
        if let Some(round) = &mut self.round {
            round.phase = Phase::Loading;
            round.deadline = deadline;
        }
        self.raise_low(version);
        let view = view!(self);
        for member in self.members.values_mut() {
            member.pursue(&view, ctx);
        }
        self.retally();
    }

    fn raise_low(&mut self, version: Version) {
        self.lineages.iter_mut().flatten().for_each(|lineage| lineage.raise_low(version));
    }

    /// In a relaxed set a load begins as soon as somebody has staged it.
    fn mark_begun(&mut self) {
        let round = self.round.as_ref().filter(|r| r.phase == Phase::Loading);
        if let Some(version) = round.map(|r| r.version).filter(|_| self.tally.loading + self.tally.done > 0) {
            self.raise_low(version);
        }
    }

    /// Whether an agent does not show `version`.
    pub(super) fn is_absent(&self, version: Version) -> bool {
        self.lineages.iter().flatten().any(|l| l.absent.contains(&version))
    }

    /// Ends the round of a version that an agent does not show.
    fn give_up(&mut self, version: Version, ctx: &mut Ctx<'_>) {
        self.round = None;
        let view = view!(self);
        for member in self.members.values_mut() {
            member.forget_version(version, &view, ctx);
            member.pursue(&view, ctx);
        }
        self.retally();
    }

    /// The required receivers have loaded `version`: it is served, and who has not loaded it is out.
    fn serve(&mut self, version: Version, ctx: &mut Ctx<'_>) {
        self.service = Some(version);
        self.revision += 1;
        self.round = None;
        self.live = 0;
        let view = view!(self);
        for (id, member) in &mut self.members {
            let was_live = std::mem::take(&mut member.live);
            let models = member.models(&view);
            let (receiver, set) = (id.clone(), self.set.clone());
            if let Some(at) = member.uniform(&view).filter(|at| *at >= version) {
                member.live = true;
                self.live += 1;
                if !was_live {
                    ctx.out.push(Action::GoLive { receiver, set, models, version: at });
                }
            } else if was_live {
                member.out_since = ctx.now;
                let why = FenceReason::Lagging { version };
                ctx.out.push(Action::Fence { receiver, set, models, why });
            }
            member.forget_below(version, None, &view, ctx);
            member.pursue(&view, ctx);
        }
        self.retally();
        self.release_due = true;
        (0..self.models.len()).for_each(|model| self.press(model, ctx));
    }

    /// How many must be done, whatever else.
    fn need(&self) -> usize {
        let quorum = match self.required {
            Required::All => 1,
            Required::AtLeast(n) => n,
            Required::Percent(p) => (self.members.len() * usize::from(p)).div_ceil(100),
        };
        quorum.max(self.floor).max(1)
    }

    /// What the round's phase is still waiting for.
    fn missing(&self) -> Option<Blocked> {
        let round = self.round.as_ref()?;
        let Tally { waiting, done, ref cover, .. } = self.tally;
        let need = self.need();
        if self.settling {
            Some(Blocked::Settling)
        } else if self.members.is_empty() {
            Some(Blocked::NoReceivers)
        } else if waiting > 0 && (self.required == Required::All || done < need) {
            Some(Blocked::Waiting { version: round.version, phase: round.phase, receivers: waiting })
        } else if done < need {
            Some(Blocked::TooFew { have: done, need })
        } else {
            let bare = cover.iter().position(|n| *n == 0);
            bare.and_then(|i| self.models.get(i)).map(|m| Blocked::Uncovered { model: m.clone() })
        }
    }

    /// Why nothing newer is served.
    pub(super) fn blocked(&self) -> Blocked {
        let silent = self.models.iter().zip(&self.lineages).find(|(_, l)| l.is_none());
        if let Some((model, _)) = silent {
            return Blocked::NothingAnnounced { model: model.clone() };
        }
        if let Some(missing) = self.missing() {
            return missing;
        }
        if let Some(common) = self.newest_common {
            let lineages = self.lineages.iter().flatten();
            let newest = lineages.filter_map(Lineage::newest).max().filter(|v| *v > common);
            let Some(version) = newest else {
                return self.absent_above(Some(common)).unwrap_or(Blocked::UpToDate);
            };
            let models = self.models.iter().zip(self.lineages.iter().flatten());
            let missing = models.filter(|(_, l)| !l.announced.contains(&version));
            return Blocked::Unmatched { version, missing: missing.map(|(m, _)| m.clone()).collect() };
        }
        if let Some(absent) = self.absent_above(None) {
            return absent;
        }
        let newest = self.models.iter().zip(self.lineages.iter().flatten());
        let newest = newest.map(|(m, l)| (m.clone(), l.announced.last().copied().unwrap_or(l.low))).collect();
        Blocked::NoCommonVersion { newest }
    }

    /// What was announced beyond `than` and is not there.
    fn absent_above(&self, than: Option<Version>) -> Option<Blocked> {
        let mut all = self.models.iter().zip(self.lineages.iter().flatten());
        all.find_map(|(model, l)| {
            let version = l.absent.last().copied().filter(|v| Some(*v) > than)?;
            Some(Blocked::Absent { model: model.clone(), version })
        })
    }

    fn report_stall(&mut self, ctx: &mut Ctx<'_>) {
        let why = self.missing().filter(|b| !matches!(b, Blocked::Waiting { .. } | Blocked::Settling));
        if why != self.stalled {
            if let Some(why) = &why {
                ctx.out.push(Action::Stalled { set: self.set.clone(), why: why.clone() });
            }
            self.stalled = why;
        }
    }

    /// Lets go of history that no member has a claim on.
    fn release(&mut self, ctx: &mut Ctx<'_>) {
        let Some(service) = self.service else { return };
        let view = view!(self);
        let mut oldest = vec![service; self.models.len()];
        for member in self.members.values() {
            if !member.live && member.out_since.saturating_add(ctx.limits.history_ms) <= ctx.now {
                continue;
            }
            for slot in &member.slots {
                let asked = slot.asked.iter().map(|a| a.version).min();
                let claim = slot.at(&view).into_iter().chain(asked).min();
                if let (Some(claim), Some(oldest)) = (claim, oldest.get_mut(slot.model)) {
                    *oldest = claim.min(*oldest);
                }
            }
        }
        for (model, oldest) in oldest.into_iter().enumerate() {
            let identity = view!(self).identity(model, oldest);
            if let (Some(lineage), Some(identity)) = (self.lineage_mut(model), identity)
                && lineage.released.is_none_or(|r| r < oldest)
            {
                lineage.released = Some(oldest);
                ctx.out.push(Action::Release { identity });
            }
        }
    }
}

impl Tally {
    /// Replaces what `member` contributes by `counted`.
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
