//! Rest between storms, and the end.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use windlass_data::stop::Stop;

use super::{MEMBERS, MODELS, Model, SET, START, World};
use crate::soak::judge::{Life, SLACK, Shown};
use crate::soak::network::Relay;
use crate::soak::service::Taken;

/// How long everything may take to come to rest at a new version once nothing fails any more.
const REST: Duration = Duration::from_secs(120);

impl World {
    /// Ticks until something is so.
    pub(super) fn until(&mut self, what: &str, mut so: impl FnMut(&mut World) -> bool) {
        let (end, mut shown) = (Instant::now() + REST, Instant::now());
        while !so(self) {
            if Instant::now() > end {
                let status = self.client.status(&Stop::after(SLACK));
                self.fail(&format!("PAST ITS DEADLINE: {what} did not happen within {REST:?}\n{status:#?}"));
            }
            if shown.elapsed() > Duration::from_secs(8) {
                shown = Instant::now();

                eprintln!("still waiting: {what}: {}", self.why());
            }
            self.tick(false);
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Why what is served is not newer, and who is not live, in the controller's words.
    pub(super) fn why(&self) -> String {
        let Ok(status) = self.client.status(&Stop::after(SLACK)) else {
            return "no controller answers".into();
        };
        let sets =
            status.sets.iter().map(|s| format!("{:?}: {}", s.served.as_ref().map(|s| s.version), s.blocked));
        let places = status.receivers.iter().flat_map(|r| {
            r.places.iter().filter(|p| !p.live).map(move |p| format!("{}: {:?}", r.receiver, p.why))
        });
        sets.chain(places).collect::<Vec<_>>().join("; ")
    }

    /// Nothing fails any more: everybody has the newest version of both models.
    pub(crate) fn calm_down(&mut self, what: &str) {
        self.relays.iter().for_each(|r| r.calm(true));
        let now = Instant::now();
        for service in self.services() {
            service.go_on();
            service.down = service.down.map(|_| now);
        }
        self.until("trainers are ready", |w| w.models.iter().all(Model::is_idle));
        let top = self.models.iter().map(|m| m.version).max().unwrap_or(0) + 1;
        for index in 0..self.models.len() {
            self.publish(index, top);
        }
        self.until("the last version is published", |w| w.models.iter().all(|m| m.version == top));
        let mut told = Instant::now();
        self.until(&format!("version {top} is served"), |w| {
            // A controller that was restarted meanwhile is told again.
            if told.elapsed() > Duration::from_secs(2) {
                told = Instant::now();
                (0..MODELS.len()).for_each(|index| w.announce(index));
            }
            let lives: Vec<Life> = w.models.iter().filter_map(|m| m.life.clone()).collect();
            w.client.status(&Stop::after(SLACK)).is_ok_and(|status| {
                let set = status.sets.iter().find(|s| s.set.as_str() == SET);
                let served = set.and_then(|s| s.served.as_ref()).is_some_and(|s| {
                    let of =
                        |i: &windlass_core::identity::Identity| (i.model_id.to_string(), i.incarnation.0);
                    s.version == top && s.identities.iter().map(of).eq(lives.iter().cloned())
                });
                served && set.is_some_and(|s| s.live == MEMBERS.len())
            })
        });
        let names: Vec<String> = self.receivers.iter().map(|r| r.name.clone()).collect();
        for name in names {
            for index in 0..MODELS.len() {
                let life = self.models[index].life.clone().unwrap();
                self.until(
                    &format!("{name} has version {top} of {}", life.0),
                    |w| matches!(w.shown(&name, &life.0), Shown::Version(l, v) if (l, v) == (life.1, top)),
                );
            }
        }
        self.doubt = false;
        self.check_waits(true);
        self.judge.count("times at rest");
        eprintln!(
            "{:7.1} s: {} faults, at rest with version {top} after {what}",
            self.began.elapsed().as_secs_f64(),
            self.faults()
        );
    }

    /// What everybody takes at first.
    pub(crate) fn measure(&mut self) {
        let taken =
            self.services().iter().filter_map(|s| Some((s.name.clone(), Taken::of(s.pid()?)))).collect();
        self.first = taken;
    }

    /// After all of it nobody takes much more than at first.
    pub(crate) fn check_leaks(&mut self) {
        let first = self.first.clone();
        let over = |w: &mut World| -> Vec<String> {
            let services = w.services();
            let now = services.iter().filter_map(|s| Some((s.name.clone(), Taken::of(s.pid()?))));
            now.filter_map(|(name, now)| {
                let first = first[&name];
                // An agent keeps files of its history open; a process that works takes what its allocator keeps.
                let much = now.descriptors > first.descriptors + 24
                    || now.threads > first.threads + 4
                    || now.kib > first.kib + (48 << 10);
                much.then(|| format!("LEAK: {name} takes {now:?}, at first {first:?}"))
            })
            .collect()
        };
        let end = Instant::now() + REST / 2;
        loop {
            let found = over(self);
            if found.is_empty() {
                return;
            }
            if Instant::now() > end {
                self.fail(&found.join("; "));
            }
            self.tick(false);
            thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn table(&mut self, took: Duration, storms: u64) -> String {
        let (seed, kinds) = (self.seed, self.kinds());
        let mut text =
            format!("\nseed {seed}: {} faults in {storms} storms, {:.0?}\n\n", self.faults(), took);
        for (kind, count) in &kinds {
            let _ = writeln!(text, "{count:>8}  {kind}");
        }
        let _ = writeln!(text, "\nlooked at:");
        for (what, count) in &self.judge.counts {
            let _ = writeln!(text, "{count:>8}  {what}");
        }
        let bytes: u64 = self.relays.iter().map(Relay::passed).sum();
        let _ = writeln!(text, "{:>8}  MiB through the relays", bytes >> 20);
        let lives: u64 = self.models.iter().map(|m| m.lives).sum();
        let _ = writeln!(text, "{lives:>8}  lives of trainers");
        let late = self.judge.late;
        let _ = writeln!(
            text,
            "\n0 wrong, 0 services ended by a peer, 0 waits past a deadline (the latest was {late:.1?} late, {SLACK:?} \
             are allowed), 0 leaks:\n"
        );
        let _ = writeln!(
            text,
            "{:<18} {:>5}  {:>14}  {:>14}  {:>20}",
            "", "lives", "descriptors", "threads", "own memory, KiB"
        );
        let first = self.first.clone();
        for service in self.services() {
            let Some(now) = service.pid().map(Taken::of) else { continue };
            let was = first[&service.name];
            let _ = writeln!(
                text,
                "{:<18} {:>5}  {:>5} -> {:>5}  {:>5} -> {:>5}  {:>8} -> {:>8}",
                service.name,
                service.lives,
                was.descriptors,
                now.descriptors,
                was.threads,
                now.threads,
                was.kib,
                now.kib
            );
        }
        text
    }

    /// Everybody ends as told, and leaves nothing. Answers where everything was.
    pub(crate) fn end(mut self) -> PathBuf {
        let mut wrong = Vec::new();
        for receiver in &mut self.receivers {
            wrong.extend(receiver.end(false, START).err().map(|e| format!("{}: {e}", receiver.name)));
        }
        for model in &mut self.models {
            wrong
                .extend(model.trainer.end(true, START).err().map(|e| format!("{}: {e}", model.trainer.name)));
            wrong.extend(model.agent.end(true, START).err().map(|e| format!("{}: {e}", model.agent.name)));
        }
        wrong.extend(self.controller.end(false, START).err().map(|e| format!("controller: {e}")));
        if !wrong.is_empty() {
            self.fail(&format!("told to end: {}", wrong.join("; ")));
        }
        let home = self.home().to_owned();
        let left = self.files();
        if !left.is_empty() {
            self.fail(&format!("LEAK: files are left: {left:?}"));
        }
        drop(self.home.take());
        home
    }

    /// Files that should not be there when everybody has ended.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        let known = [
            "header",
            "manifest.json",
            "a.safetensors",
            "b.safetensors",
            "a.sums",
            "b.sums",
            "token",
            "state.json",
        ];
        let (mut left, mut open) = (Vec::new(), vec![self.home().to_owned()]);
        while let Some(dir) = open.pop() {
            for entry in fs::read_dir(&dir).unwrap().map(Result::unwrap) {
                let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
                let delta = dir.components().any(|c| c.as_os_str() == "deltas")
                    && !name.contains("draft")
                    && !name.contains("tmp");
                if entry.file_type().unwrap().is_dir() {
                    open.push(path);
                } else if !known.contains(&name.as_str()) && !name.starts_with("clock-") && !delta {
                    left.push(path);
                }
            }
        }
        left
    }
}
