//! Rounds: how a group takes one version from announced to served.

use crate::barrier::config::{Mode, Required};
use crate::barrier::group::Group;
use crate::barrier::member::{Ctx, Lineage, view};
use crate::barrier::tally::{Round, Tally};
use crate::barrier::types::{Action, Blocked, FenceReason, Phase};
use crate::identity::Version;

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
                    // No member has a version that the agent does not show, so no load of it is open and a lower version may follow.
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

    /// Whether no further member can become ready, while those that are ready are too few.
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
            member.give_up_passed(&view, ctx);
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
        self.pursue_all(ctx);
    }

    fn raise_low(&mut self, version: Version) {
        self.lineages.iter_mut().flatten().for_each(|lineage| lineage.raise_low(version));
    }

    /// In a relaxed set a load begins as soon as one member has staged the version.
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

    /// The required receivers have loaded `version`: the set serves it, and members without it are fenced.
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

    /// The least number of members that must be done.
    fn need(&self) -> usize {
        let quorum = match self.required {
            Required::All => 1,
            Required::AtLeast(n) => n,
            Required::Percent(p) => (self.members.len() * usize::from(p)).div_ceil(100),
        };
        quorum.max(self.floor).max(1)
    }

    /// What the round's phase still waits for.
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

    /// A version above `than` that was announced and is absent.
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

    /// Releases history that no member has a claim on.
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
