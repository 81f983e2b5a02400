//! All processes, and how they are started.

mod beat;
mod lives;
mod rest;
mod storm;

use std::collections::BTreeMap;
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tempfile::TempDir;
use windlass::service::controller::client::ControllerClient;
use windlass_core::address::Token;

use crate::soak::dice::Dice;
use crate::soak::judge::{Judge, Life, Wait};
use crate::soak::network::{HOST, Relay};
use crate::soak::service::{Service, Taken};
use crate::soak::trainer::{ARGS, Weights};

const SECRET: &str = "a-secret-of-this-test-0123456789";
const MODELS: [&str; 2] = ["actor", "verifier"];
const SET: &str = "main";
/// Receivers of the controller, and one that follows the agents by itself.
const MEMBERS: [&str; 3] = ["r0", "r1", "r2"];
const ALONE: &str = "alone";
/// How long a process may take to start, and to end when it is told to.
const START: Duration = Duration::from_secs(60);

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
pub(crate) fn shim() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let made = dir.path().join("clock.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/soak/clock.c");
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
        command.args(["--exact", "soak::soak_trainer", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(ARGS, &*told.lock());
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
