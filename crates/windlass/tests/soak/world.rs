//! All processes, the faults that befall them, and what is published meanwhile.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;
use windlass::controller::client::ControllerClient;
use windlass::controller::wire::{Gate, NotifyVersion};
use windlass_core::address::Token;
use windlass_core::barrier::SetName;
use windlass_core::identity::{Incarnation, ModelId};
use windlass_data::stop::Stop;

use crate::dice::Dice;
use crate::judge::{Judge, Life, Look, Outcome, SLACK, Shown, Wait};
use crate::network::{HOST, Relay, Trouble};
use crate::service::{Service, Taken};
use crate::trainer::{ARGS, PUBLISH, Weights, digest, manifest};

const SECRET: &str = "a-secret-of-this-test-0123456789";
const MODELS: [&str; 2] = ["actor", "verifier"];
const SET: &str = "main";
/// Receivers of the controller, and one that follows the agents by itself.
const MEMBERS: [&str; 3] = ["r0", "r1", "r2"];
const ALONE: &str = "alone";
/// These are never killed: what they would leak adds up.
const SPARED: [&str; 2] = ["r2", ALONE];
/// How long a process may take to start, and to end when it is told to.
const START: Duration = Duration::from_secs(60);
/// How long everything may take to come to rest at a new version once nothing fails any more.
const REST: Duration = Duration::from_secs(120);
/// The time between two faults of processes and of the network, on average.
const PROCESS: Duration = Duration::from_millis(350);
const NETWORK: Duration = Duration::from_millis(120);
/// The time between two versions of a model.
const PACE: Duration = Duration::from_millis(300);
/// Stops of processes end after these milliseconds at most: most of them before the heartbeat is missed, some after.
const STOPS: [u64; 5] = [100, 400, 1000, 1500, 4500];
/// How far clocks jump, in seconds.
const JUMPS: [i64; 8] = [1, 60, 3600, 86_400, 40 * 86_400, 365 * 86_400, 3650 * 86_400, 0];

/// A trainer with its agent.
struct Model {
    name: &'static str,
    region: PathBuf,
    trainer: Service,
    agent: Service,
    /// What the next life of the trainer is told.
    args: Arc<Mutex<String>>,
    endpoint: String,
    /// The life that runs; none until the trainer says so.
    life: Option<Life>,
    /// The trainer is dead, and its agent is to end by itself since then.
    leaving: Option<Instant>,
    /// The trainer was started then and has not said that it is ready.
    starting: Option<Instant>,
    /// The newest life that was ever seen.
    known: u64,
    lives: u64,
    weights: Weights,
    version: u64,
    publishing: Option<(u64, Instant)>,
    published: Instant,
}

impl Model {
    fn is_idle(&self) -> bool {
        self.life.is_some() && self.publishing.is_none() && self.trainer.is_up()
    }
}

pub(crate) struct World {
    seed: u64,
    dice: Dice,
    home: Option<TempDir>,
    _shim: TempDir,
    controller: Service,
    models: Vec<Model>,
    receivers: Vec<Service>,
    relays: Vec<Relay>,
    client: ControllerClient,
    faults: BTreeMap<String, u64>,
    judge: Judge,
    waits: Vec<Wait>,
    /// Whether the controller may have been told something that is not so.
    doubt: bool,
    asked: Instant,
    first: BTreeMap<String, Taken>,
    began: Instant,
}

/// Ports that nobody is given by chance, free on both addresses.
fn ports(dice: &mut Dice, count: usize) -> Vec<u16> {
    let mut found = Vec::new();
    while found.len() < count {
        let port = 20_000 + dice.below(12_000) as u16;
        let free = ["127.0.0.1", HOST].iter().all(|host| TcpListener::bind((*host, port)).is_ok());
        if free && !found.contains(&port) {
            found.push(port);
        }
    }
    found
}

/// Compiles what is between a process and its clock.
fn shim() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let made = dir.path().join("clock.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/soak/clock.c");
    let done = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&made).arg(source).status();
    assert!(done.expect("the soak needs a C compiler, cc").success());
    (dir, made)
}

fn windlass(args: &[String]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
    command.args(args).args(["--json", "--with-parent"]);
    command
}

fn model_of(name: &'static str, home: &Path, shim: &Path, ports: &[u16], token: &str) -> Model {
    let region = home.join(format!("region-{name}"));
    let args = Arc::new(Mutex::new(String::new()));
    let told = Arc::clone(&args);
    let trainer = Service::new(&format!("trainer-{name}"), home, shim, move || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "soak_trainer", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(ARGS, &*told.lock().unwrap());
        command
    });
    let agent: Vec<String> = vec![
        "agent".into(),
        format!("--region={}", region.display()),
        token.into(),
        format!("--advertise-host={HOST}"),
        format!("--ports={}", ports[0]),
        format!("--data-ports={}", ports[1]),
        "--timeout=5".into(),
        "--streams=3".into(),
        "--threads=1".into(),
    ];
    let agent = Service::new(&format!("agent-{name}"), home, shim, move || windlass(&agent));
    Model {
        name,
        region,
        trainer,
        agent,
        args,
        endpoint: format!("http://{HOST}:{}", ports[0]),
        life: None,
        leaving: None,
        starting: None,
        known: 0,
        lives: 0,
        weights: Weights::new(0, 0),
        version: 0,
        publishing: None,
        published: Instant::now(),
    }
}

impl World {
    pub(crate) fn new(seed: u64) -> World {
        eprintln!("seed {seed}");
        let home = tempfile::Builder::new().prefix("windlass-soak-").tempdir_in("/dev/shm").unwrap();
        let (shim_dir, shim) = shim();
        let path = home.path().join("token");
        let mut file = File::options().create_new(true).write(true).mode(0o600).open(&path).unwrap();
        std::io::Write::write_all(&mut file, SECRET.as_bytes()).unwrap();
        let token = format!("--token-file={}", path.display());
        // Which ports are free is not up to the seed.
        let ports = ports(&mut Dice::new(std::process::id().into(), 1), 5);
        let [port, rest @ ..] = &ports[..] else { unreachable!() };
        let limits = [
            "--heartbeat=3",
            "--settle=1",
            "--stage-timeout=6",
            "--load-timeout=6",
            "--retry=0.1",
            "--retry-cap=1",
        ];
        let mut args = vec!["controller".into(), format!("--set={SET}={}", MODELS.join(",")), token.clone()];
        args.push(format!("--ports={port}"));
        args.extend(limits.map(String::from));
        let controller = Service::new("controller", home.path(), &shim, move || windlass(&args));
        let models: Vec<Model> = MODELS
            .iter()
            .zip(rest.chunks(2))
            .map(|(name, ports)| model_of(name, home.path(), &shim, ports, &token))
            .collect();
        let receiver = |name: &str, more: Vec<String>| {
            let dir = home.path().join(name);
            let mut args = vec!["receive".into(), token.clone(), format!("--dir={}", dir.display())];
            args.extend([format!("--name={name}"), "--timeout=5".into(), "--threads=1".into()]);
            args.extend(more);
            Service::new(name, home.path(), &shim, move || windlass(&args))
        };
        let mut receivers: Vec<Service> = MEMBERS
            .iter()
            .map(|name| {
                let mut more = vec![format!("--controller=http://{HOST}:{port}")];
                more.extend(MODELS.map(|m| format!("--model={m}")));
                receiver(name, more)
            })
            .collect();
        let from = models.iter().map(|m| format!("--from={}", m.endpoint));
        // Images go over the wire as well as deltas.
        receivers.push(receiver(ALONE, from.chain(["--mode=full".into()]).collect()));
        let names =
            ["controller", "actor's requests", "actor's data", "verifier's requests", "verifier's data"];
        let relays =
            names.iter().zip(&ports).zip(2..).map(|((n, p), i)| Relay::start(n, *p, Dice::new(seed, i)));
        let client =
            ControllerClient::new(&format!("http://127.0.0.1:{port}"), Token::new(SECRET).unwrap()).unwrap();
        let mut world = World {
            seed,
            dice: Dice::new(seed, 0),
            home: None,
            _shim: shim_dir,
            controller,
            models,
            receivers,
            relays: relays.collect(),
            client,
            faults: BTreeMap::new(),
            judge: Judge::default(),
            waits: Vec::new(),
            doubt: false,
            asked: Instant::now(),
            first: BTreeMap::new(),
            began: Instant::now(),
        };
        world.home = Some(home);
        world.controller.start();
        for index in 0..MODELS.len() {
            world.begin_life(index);
        }
        world.receivers.iter_mut().for_each(Service::start);
        world
    }

    fn home(&self) -> &Path {
        self.home.as_ref().unwrap().path()
    }

    fn fail(&self, why: &str) -> ! {
        panic!("after {} faults: {why}", self.faults());
    }

    fn ask<T>(&self, held: Result<T, String>) -> T {
        held.unwrap_or_else(|why| self.fail(&why))
    }

    // ---- faults -----------------------------------------------------------------------------------

    /// How many faults have hit so far.
    pub(crate) fn faults(&self) -> u64 {
        self.kinds().values().sum()
    }

    fn kinds(&self) -> BTreeMap<String, u64> {
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

    fn hit(&mut self, kind: &str) {
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

    fn services(&mut self) -> Vec<&mut Service> {
        let models = self.models.iter_mut().flat_map(|m| [&mut m.trainer, &mut m.agent]);
        models.chain(self.receivers.iter_mut()).chain([&mut self.controller]).collect()
    }

    /// Something befalls a process.
    fn process_fault(&mut self) {
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

    fn stop_one(&mut self) {
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

    fn offset(&mut self) -> i64 {
        let jump = *self.dice.pick(&JUMPS);
        if self.dice.below(2) == 0 { jump } else { -jump }
    }

    fn jump_one(&mut self) {
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
    fn again(&mut self) -> Instant {
        Instant::now() + Duration::from_millis(self.dice.below(1200))
    }

    fn kill_agent(&mut self) {
        let (index, again) = (self.dice.below(2) as usize, self.again());
        let model = &mut self.models[index];
        if model.agent.is_up() && model.leaving.is_none() {
            model.agent.kill(again);
            self.hit("SIGKILL of an agent");
        }
    }

    fn kill_receiver(&mut self) {
        let (which, again) = (self.dice.roll() as usize, self.again());
        let mut open: Vec<&mut Service> =
            self.receivers.iter_mut().filter(|r| r.is_up() && !SPARED.contains(&r.name.as_str())).collect();
        if let Some(receiver) = which.checked_rem(open.len()).and_then(|index| open.get_mut(index)) {
            receiver.kill(again);
            self.hit("SIGKILL of a receiver");
        }
    }

    fn kill_controller(&mut self) {
        let again = self.again();
        if self.controller.is_up() {
            self.controller.kill(again);
            self.hit("SIGKILL of the controller");
        }
    }

    fn restart_controller(&mut self) {
        if self.controller.is_up() {
            let ended = self.controller.end(false, START);
            self.ask(ended.map_err(|e| format!("the controller was told to end: {e}")));
            self.controller.start();
            self.hit("restart of the controller");
        }
    }

    /// A trainer dies. Its agent ends by itself, as one does that was started by it, or dies with it. The next life may begin
    /// under another clock, and without the region of this one.
    fn end_life(&mut self, clock: bool) {
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

    // ---- lives ------------------------------------------------------------------------------------

    fn begin_life(&mut self, index: usize) {
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
        *model.args.lock().unwrap() = format!("{region}\n{name}\n{seed}\n{version}\n{known}");
        model.trainer.start();
        model.starting = Some(Instant::now());
    }

    /// What a trainer said.
    fn hear_trainer(&mut self, index: usize) {
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

    fn publish(&mut self, index: usize, version: u64) {
        let model = &mut self.models[index];
        model.weights.go_to(version);
        let life = model.life.clone().unwrap();
        self.judge.publishes(&life, version, digest(&manifest(), &model.weights.data));
        model.trainer.say(&version.to_string());
        model.publishing = Some((version, Instant::now()));
    }

    fn announce(&mut self, index: usize) {
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

    fn gate(&mut self) {
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

    fn look(&mut self) {
        let (client, most) = (self.client.clone(), Duration::from_secs(2));
        self.wait("the status", most, None, move || match Look::at(&client, &Stop::after(most)) {
            Ok(look) => Outcome::Looked(look),
            Err(refused) => Outcome::Refused(refused),
        });
    }

    fn wait(
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

    // ---- the beat ---------------------------------------------------------------------------------

    /// Everything that is due.
    fn tick(&mut self, busy: bool) {
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
            let receiver = self.dice.below(self.receivers.len() as u64) as usize;
            let model = *self.dice.pick(&MODELS);
            let name = self.receivers[receiver].name.clone();
            self.shown(&name, model);
        }
    }

    /// A model between two lives.
    fn tend(&mut self, index: usize) {
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

    fn check_alive(&mut self) {
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

    fn check_waits(&mut self, all: bool) {
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
    fn check_status(&mut self, look: &Look) {
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

    fn shown(&mut self, receiver: &str, model: &str) -> Shown {
        let dir = self.home().join(receiver).join(model);
        let shown = self.judge.image(&dir);
        self.ask(shown)
    }

    // ---- rest -------------------------------------------------------------------------------------

    /// Ticks until something is so.
    fn until(&mut self, what: &str, mut so: impl FnMut(&mut World) -> bool) {
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
    fn why(&self) -> String {
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

    // ---- the end ----------------------------------------------------------------------------------

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
    fn files(&self) -> Vec<PathBuf> {
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

impl Drop for World {
    fn drop(&mut self) {
        if thread::panicking() {
            for service in self.services() {
                eprintln!("== {}\n{}", service.name, service.tail());
            }
            eprintln!("repeat with WINDLASS_SEED={} (faults so far: {:?})", self.seed, self.kinds());
        }
    }
}
