//! The faults.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use super::{ALONE, START, World};
use crate::soak::network::Trouble;
use crate::soak::service::Service;

/// These are never killed: what they would leak adds up.
const SPARED: [&str; 2] = ["r2", ALONE];
/// The time between two faults of processes and of the network, on average.
const PROCESS: Duration = Duration::from_millis(350);
const NETWORK: Duration = Duration::from_millis(120);
/// Stops of processes end after these milliseconds at most: most of them before the heartbeat is missed, some after.
const STOPS: [u64; 5] = [100, 400, 1000, 1500, 4500];
/// How far clocks jump, in seconds.
const JUMPS: [i64; 8] = [1, 60, 3600, 86_400, 40 * 86_400, 365 * 86_400, 3650 * 86_400, 0];

impl World {
    /// How many faults have hit so far.
    pub(crate) fn faults(&self) -> u64 {
        self.kinds().values().sum()
    }

    pub(super) fn kinds(&self) -> BTreeMap<String, u64> {
        let mut kinds = self.faults.clone();
        for relay in &self.relays {
            let data = relay.name().ends_with("data");
            for (trouble, count) in relay.done() {
                let kind = match trouble {
                    Trouble::Flip if data => "bit flipped in a data connection".into(),
                    Trouble::Flip if relay.name() == "controller" => {
                        "bit flipped in a connection to the controller".into()
                    }
                    Trouble::Flip => "bit flipped in a connection to an agent".into(),
                    other => format!("network: {}", format!("{other:?}").to_lowercase()),
                };
                *kinds.entry(kind).or_default() += count;
            }
        }
        kinds
    }

    pub(super) fn hit(&mut self, kind: &str) {
        *self.faults.entry(kind.to_owned()).or_default() += 1;
    }

    /// Faults until so many have hit in all.
    pub(crate) fn storm(&mut self, until: u64, flips: bool) {
        self.doubt |= flips;
        self.relays.iter().for_each(|r| r.calm(false));
        let (mut process, mut network) = (Instant::now(), Instant::now());
        // With fewer at once, more versions come through.
        let rest = if flips { 1.0 } else { 1.5 };
        let (before, most) = (self.faults(), Duration::from_secs(120 + (until - self.faults()) * 2));
        let start = Instant::now();
        while self.faults() < until {
            self.tick(true);
            let now = Instant::now();
            if now >= process {
                self.process_fault();
                process = now + PROCESS.mul_f64(rest * self.dice.below(2000) as f64 / 1e3);
            }
            if now >= network {
                let relay = self.dice.below(self.relays.len() as u64) as usize;
                let honest = relay == 0 && !flips;
                let trouble = if honest {
                    *self.dice.pick(&Trouble::HONEST)
                } else if self.dice.below(3) == 0 {
                    Trouble::Flip
                } else {
                    *self.dice.pick(&Trouble::ALL)
                };
                self.relays[relay].order(trouble);
                network = now + NETWORK.mul_f64(rest * self.dice.below(2000) as f64 / 1e3);
            }
            if start.elapsed() > most {
                self.fail(&format!("only {} faults hit in {most:?}", self.faults() - before));
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(super) fn services(&mut self) -> Vec<&mut Service> {
        let models = self.models.iter_mut().flat_map(|m| [&mut m.trainer, &mut m.agent]);
        models.chain(self.receivers.iter_mut()).chain([&mut self.controller]).collect()
    }

    /// Something befalls a process.
    pub(super) fn process_fault(&mut self) {
        match self.dice.below(200) {
            0..96 => self.stop_one(),
            96..146 => self.jump_one(),
            146..168 => self.kill_agent(),
            168..184 => self.kill_receiver(),
            184..188 => self.end_life(false),
            188..194 => self.end_life(true),
            194..197 => self.kill_controller(),
            _ => self.restart_controller(),
        }
    }

    pub(super) fn stop_one(&mut self) {
        let (which, most) = (self.dice.roll() as usize, *self.dice.pick(&STOPS));
        let span = Duration::from_millis(20 + self.dice.below(most));
        let mut services = self.services();
        let index = which % services.len();
        let stopped = services.iter().filter(|s| s.stopped.is_some()).count();
        let service = &mut *services[index];
        if service.is_up() && service.stopped.is_none() && stopped < 3 {
            service.stop(span);
            let kind = format!("SIGSTOP of {}", service.role());
            self.hit(&kind);
        }
    }

    pub(super) fn offset(&mut self) -> i64 {
        let jump = *self.dice.pick(&JUMPS);
        if self.dice.below(2) == 0 { jump } else { -jump }
    }

    pub(super) fn jump_one(&mut self) {
        let (which, offset) = (self.dice.roll() as usize, self.offset());
        let mut services = self.services();
        let index = which % services.len();
        let service = &mut *services[index];
        if service.is_up() && service.offset != offset {
            service.jump(offset);
            self.hit("clock jump of a running process");
        }
    }

    /// When something that was killed is started again.
    pub(super) fn again(&mut self) -> Instant {
        Instant::now() + Duration::from_millis(self.dice.below(1200))
    }

    pub(super) fn kill_agent(&mut self) {
        let (index, again) = (self.dice.below(2) as usize, self.again());
        let model = &mut self.models[index];
        if model.agent.is_up() && model.leaving.is_none() {
            model.agent.kill(again);
            self.hit("SIGKILL of an agent");
        }
    }

    pub(super) fn kill_receiver(&mut self) {
        let (which, again) = (self.dice.roll() as usize, self.again());
        let mut open: Vec<&mut Service> =
            self.receivers.iter_mut().filter(|r| r.is_up() && !SPARED.contains(&r.name.as_str())).collect();
        if let Some(receiver) = which.checked_rem(open.len()).and_then(|index| open.get_mut(index)) {
            receiver.kill(again);
            self.hit("SIGKILL of a receiver");
        }
    }

    pub(super) fn kill_controller(&mut self) {
        let again = self.again();
        if self.controller.is_up() {
            self.controller.kill(again);
            self.hit("SIGKILL of the controller");
        }
    }

    pub(super) fn restart_controller(&mut self) {
        if self.controller.is_up() {
            let ended = self.controller.end(false, START);
            self.ask(ended.map_err(|e| format!("the controller was told to end: {e}")));
            self.controller.start();
            self.hit("restart of the controller");
        }
    }

    /// A trainer dies. Its agent ends by itself, as one does that was started by it, or dies with it. The next life may begin
    /// under another clock, and without the region of this one.
    pub(super) fn end_life(&mut self, clock: bool) {
        let (index, with_agent) = (self.dice.below(2) as usize, self.dice.below(3) == 0);
        let offset = clock.then(|| self.offset());
        let model = &mut self.models[index];
        if !model.trainer.is_up() || model.starting.is_some() || model.leaving.is_some() {
            return;
        }
        model.trainer.kill(Instant::now());
        (model.life, model.publishing) = (None, None);
        model.leaving = Some(Instant::now());
        model.agent.go_on();
        if with_agent || !model.agent.is_up() {
            model.agent.kill(Instant::now());
        } else {
            model.agent.leave();
        }
        model.agent.down = None;
        if let Some(offset) = offset {
            model.trainer.jump(offset);
        }
        self.hit(if clock {
            "SIGKILL of a trainer, clock jump for its next life"
        } else {
            "SIGKILL of a trainer"
        });
    }
}
