//! The lives of trainers, what they publish, and those who wait for it.

use std::fs;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use windlass::service::controller::wire::{Gate, NotifyVersion};
use windlass_core::barrier::SetName;
use windlass_core::identity::{Incarnation, ModelId};
use windlass_data::stop::Stop;

use super::{MODELS, SET, START, World};
use crate::soak::judge::{Life, Look, Outcome, SLACK, Wait};
use crate::soak::trainer::{PUBLISH, Weights, digest, manifest};

impl World {
    pub(super) fn begin_life(&mut self, index: usize) {
        let seed = self.dice.roll();
        // From a checkpoint that may be some versions old.
        let back = self.dice.below(4);
        let without = self.dice.below(3) == 0;
        let model = &mut self.models[index];
        model.lives += 1;
        model.version = model.version.saturating_sub(back);
        model.weights = Weights::new(seed, model.version);
        if without {
            let _ = fs::remove_dir_all(&model.region);
        }
        let (region, name, version, known) = (model.region.display(), model.name, model.version, model.known);
        *model.args.lock() = format!("{region}\n{name}\n{seed}\n{version}\n{known}");
        model.trainer.start();
        model.starting = Some(Instant::now());
    }

    /// What a trainer said.
    pub(super) fn hear_trainer(&mut self, index: usize) {
        let model = &mut self.models[index];
        let Some(line) = model.trainer.hear(Duration::ZERO) else { return };
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["ready", incarnation, clock] => {
                let incarnation: u64 = incarnation.parse().unwrap();
                let real = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
                let off = clock.parse::<i64>().unwrap() / 1_000_000_000 - real;
                let (began, was) = (model.starting.take().unwrap(), model.known);
                let wrong = (off - model.trainer.offset).abs() > 120;
                model.known = was.max(incarnation);
                model.life = Some((model.name.to_owned(), incarnation));
                if !model.agent.is_up() {
                    model.agent.start();
                }
                let late = self.judge.waited("a trainer's start", began.elapsed(), START);
                self.ask(late);
                if wrong {
                    self.fail(&format!("a clock was to be off otherwise than by {off} s"));
                }
                if incarnation <= was {
                    self.fail(&format!("life {incarnation} follows {was}"));
                }
            }
            ["published", version] => {
                let version: u64 = version.parse().unwrap();
                let Some((wanted, began)) = model.publishing.take() else { unreachable!("{line}") };
                assert_eq!(wanted, version);
                (model.version, model.published) = (version, Instant::now());
                let late = self.judge.waited("publishing", began.elapsed(), PUBLISH);
                self.ask(late);
                self.judge.count("versions published");
                self.announce(index);
            }
            _ => self.fail(&format!("the trainer of {} said {line:?}", MODELS[index])),
        }
    }

    pub(super) fn publish(&mut self, index: usize, version: u64) {
        let model = &mut self.models[index];
        model.weights.go_to(version);
        let life = model.life.clone().unwrap();
        self.judge.publishes(&life, version, digest(&manifest(), &model.weights.data));
        model.trainer.say(&version.to_string());
        model.publishing = Some((version, Instant::now()));
    }

    pub(super) fn announce(&mut self, index: usize) {
        let most = Duration::from_millis(500 + self.dice.below(2500));
        let (sync, model) = (self.dice.below(8) == 0, &self.models[index]);
        let life = model.life.clone().unwrap();
        let notify = NotifyVersion {
            model_id: ModelId::new(model.name).unwrap(),
            incarnation: Incarnation(life.1),
            version: model.version,
            sender_endpoint: model.endpoint.clone(),
            sync,
            eval: None,
            timeout_ms: sync.then_some(most.as_millis() as u64),
            spans: Vec::new(),
            delta_sparsity: None,
            delta_ratio: None,
        };
        let client = self.client.clone();
        let what = format!("the notify of {} {}", model.name, model.version);
        self.wait(&what, most, Some(life), move || {
            match client.notify(&notify, &Stop::after(most + SLACK * 2)) {
                Ok(_) => Outcome::Announced,
                Err(refused) => Outcome::Refused(refused),
            }
        });
    }

    pub(super) fn gate(&mut self) {
        let newest = self.models.iter().map(|m| m.version).max().unwrap_or(0);
        let at_least = (newest + 1).saturating_sub(self.dice.below(4));
        let most = Duration::from_millis(self.dice.below(3000));
        let set = Some(SetName::new(SET).unwrap());
        let (at, ms) = (Some(at_least), Some(most.as_millis() as u64));
        let gate = Gate { set, at_least: at, timeout_ms: ms, ..Gate::default() };
        let client = self.client.clone();
        self.wait(&format!("the gate for {at_least}"), most, None, move || {
            match client.gate(&gate, &Stop::after(most + SLACK * 2)) {
                Ok(service) => {
                    let look = Look::at(&client, &Stop::after(SLACK / 4)).ok();
                    service.served.map_or_else(
                        || panic!("a gate opened for nothing"),
                        |served| Outcome::Opened(at_least, served, look),
                    )
                }
                Err(refused) => Outcome::Refused(refused),
            }
        });
    }

    pub(super) fn look(&mut self) {
        let (client, most) = (self.client.clone(), Duration::from_secs(2));
        self.wait("the status", most, None, move || match Look::at(&client, &Stop::after(most)) {
            Ok(look) => Outcome::Looked(look),
            Err(refused) => Outcome::Refused(refused),
        });
    }

    pub(super) fn wait(
        &mut self,
        what: &str,
        most: Duration,
        life: Option<Life>,
        ask: impl FnOnce() -> Outcome + Send + 'static,
    ) {
        let begun = Instant::now();
        let thread = thread::spawn(move || {
            let outcome = ask();
            (outcome, begun.elapsed())
        });
        self.waits.push(Wait { what: what.to_owned(), begun, most, life, thread });
    }
}
