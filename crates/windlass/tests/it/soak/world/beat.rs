//! What is due and what is looked at, many times a second.

use std::time::{Duration, Instant};

use super::{MODELS, SET, START, World};
use crate::soak::judge::{Look, Outcome, SLACK, Shown, Wait};
use crate::soak::trainer::PUBLISH;

/// The time between two versions of a model.
const PACE: Duration = Duration::from_millis(300);

impl World {
    /// Everything that is due.
    pub(super) fn tick(&mut self, busy: bool) {
        let now = Instant::now();
        for service in self.services() {
            if service.stopped.is_some_and(|until| now >= until) {
                service.go_on();
            }
            if service.down.is_some_and(|at| now >= at) && !service.name.starts_with("trainer") {
                service.start();
            }
        }
        for index in 0..self.models.len() {
            self.tend(index);
            self.hear_trainer(index);
            let behind = self.models.iter().map(|m| m.version).min().unwrap_or(0);
            let model = &self.models[index];
            if busy && model.is_idle() && model.published.elapsed() > PACE && model.version < behind + 3 {
                self.publish(index, model.version + 1);
            }
        }
        self.check_alive();
        self.check_waits(false);
        if now.duration_since(self.asked) > Duration::from_millis(250) {
            self.asked = now;
            self.look();
            if self.dice.below(3) == 0 {
                self.gate();
            }
            let names: Vec<String> = self.receivers.iter().map(|r| r.name.clone()).collect();
            for (name, model) in names.iter().flat_map(|name| MODELS.map(|model| (name, model))) {
                self.shown(name, model);
            }
        }
    }

    /// A model between two lives.
    pub(super) fn tend(&mut self, index: usize) {
        let model = &mut self.models[index];
        if let Some(since) = model.leaving {
            if model.agent.is_up() {
                match model.agent.ended() {
                    Some(status) if status.contains("exit status: 0") => {}
                    Some(status) => {
                        let name = model.agent.name.clone();
                        self.fail(&format!("{name}, whose trainer is dead, ended with {status}"));
                    }
                    None if since.elapsed() > START => {
                        self.fail("an agent does not end with its trainer");
                    }
                    None => return,
                }
            }
            self.models[index].leaving = None;
            self.models[index].trainer.down = None;
            return self.begin_life(index);
        }
        let late = model.publishing.filter(|(_, began)| began.elapsed() > PUBLISH + SLACK);
        let slow = model.starting.is_some_and(|began| began.elapsed() > START);
        if late.is_some() || slow {
            let name = model.name;
            self.fail(&format!("PAST ITS DEADLINE: {name}'s trainer: publishing {late:?}, starting {slow}"));
        }
    }

    pub(super) fn check_alive(&mut self) {
        let (mut ended, mut early) = (Vec::new(), 0);
        for model in &mut self.models {
            if model.leaving.is_none() {
                let both = [&mut model.trainer, &mut model.agent];
                ended.extend(both.into_iter().filter_map(|s| Some((s.ended()?, s.name.clone()))));
            }
        }
        ended.extend(self.controller.ended().map(|e| (e, "controller".to_owned())));
        for receiver in &mut self.receivers {
            let succeeded = receiver.succeeded();
            match receiver.ended() {
                // It never got so far that it is a service: whoever started it starts it again.
                Some(_) if !succeeded => {
                    eprintln!("{} ended before its first success:\n{}", receiver.name, receiver.tail());
                    early += 1;
                    receiver.down = Some(Instant::now());
                }
                Some(status) => ended.push((status, receiver.name.clone())),
                None => {}
            }
        }
        (0..early).for_each(|_| self.judge.count("receivers that ended before their first success"));
        if let Some((status, name)) = ended.first() {
            self.fail(&format!("ENDED BY A PEER: {name}: {status}"));
        }
    }

    pub(super) fn check_waits(&mut self, all: bool) {
        for wait in std::mem::take(&mut self.waits) {
            if !wait.thread.is_finished() && !all {
                if wait.begun.elapsed() > wait.most + SLACK * 2 {
                    self.fail(&format!("PAST ITS DEADLINE: {} of {:?} goes on", wait.what, wait.most));
                }
                self.waits.push(wait);
                continue;
            }
            let Wait { what, most, life, thread, .. } = wait;
            let (outcome, took) = thread.join().unwrap();
            let late = self.judge.waited(&what, took, most);
            self.ask(late);
            match outcome {
                Outcome::Announced => self.judge.count("announcements"),
                Outcome::Looked(look) => self.check_status(&look),
                Outcome::Opened(at_least, served, look) => {
                    if served.version < at_least {
                        self.fail(&format!("{what} opened at {served:?}"));
                    }
                    self.judge.count("gates that opened");
                    if let Some(look) = look {
                        self.check_status(&look);
                    }
                }
                Outcome::Refused(refused) => match refused.status() {
                    None | Some(503 | 504) => {
                        self.judge.count("waits that ended with their time, or a controller");
                    }
                    // A life that is over.
                    Some(409) if life.is_some() && !self.models.iter().any(|m| m.life == life) => {
                        self.judge.count("announcements of a life that was over");
                    }
                    _ => self.fail(&format!("{what} for {life:?} was refused: {refused}")),
                },
            }
        }
    }

    /// Who is live has what is served.
    pub(super) fn check_status(&mut self, look: &Look) {
        let status = &look.status;
        let Some(served) = status.sets.iter().find(|s| s.set.as_str() == SET).and_then(|s| s.served.clone())
        else {
            return;
        };
        if self.doubt {
            return;
        }
        let held = self.judge.served(&served, look);
        self.ask(held);
        for receiver in &status.receivers {
            if !receiver.places.iter().any(|p| p.set.as_str() == SET && p.live) {
                continue;
            }
            let name = receiver.receiver.as_str();
            for identity in &served.identities {
                let Shown::Version(incarnation, version) = self.shown(name, identity.model_id.as_str())
                else {
                    continue;
                };
                self.judge.count("live receivers held against what is served");
                if (incarnation, version) < (identity.incarnation.0, identity.version) {
                    self.fail(&format!(
                        "WRONG: {name} is live with {incarnation}/{version}, served is {identity}\n{status:#?}"
                    ));
                }
            }
        }
    }

    pub(super) fn shown(&mut self, receiver: &str, model: &str) -> Shown {
        let dir = self.home().join(receiver).join(model);
        let shown = self.judge.image(&dir);
        self.ask(shown)
    }
}
