//! Child processes of tests: the test's own executable in another role, told what to do by lines on its input.
//!
//! A test file that uses them has an ignored test that calls [`run`] and names it when it spawns one.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver as Lines, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use windlass_core::manifest::Manifest;
use windlass_core::wire::MIN_STRIPE_BYTES;
use windlass_core::wire::control::RequestMode;
use windlass_data::history::Limits;
use windlass_data::image::ImageView;
use windlass_data::local::LocalServer;
use windlass_data::receiver::Receiver;
use windlass_data::region::Region;
use windlass_data::serve::{Server, ServerConfig};
use windlass_data::stop::Stop;
use windlass_data::tcp::{PullConfig, SenderConfig};

use super::remote::{Desk, Remote};
use super::{Noise, config, digest, receiver_config};

/// What marks our lines among those of the test runner.
const MARK: &str = "@";

/// A child process; killed when dropped.
pub(crate) struct Child {
    pub(crate) process: std::process::Child,
    input: Option<ChildStdin>,
    lines: Lines<String>,
    reader: Option<JoinHandle<()>>,
}

impl Child {
    /// Starts this executable as `role`, and waits until it says that it is ready.
    pub(crate) fn spawn(role: &str, args: &[&str]) -> Child {
        let child = Child::start(role, args);
        let line = child.hear(Duration::from_secs(20));
        assert!(line.as_deref().is_some_and(|l| l.starts_with("ready")), "{role} said {line:?}");
        child
    }

    pub(crate) fn start(role: &str, args: &[&str]) -> Child {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "plane::child::child", "--ignored", "--nocapture", "--test-threads=1"])
            .env("WINDLASS_TEST_ROLE", role)
            .env("WINDLASS_TEST_ARGS", args.join("\n"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if std::env::var_os("WINDLASS_TEST_LOUD").is_some() {
                Stdio::inherit()
            } else {
                Stdio::null()
            })
            .spawn()
            .unwrap();
        let (send, lines) = channel();
        let output = BufReader::new(process.stdout.take().unwrap());
        let reader = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The runner's own words may stand before the first of ours.
                if let Some((_, line)) = line.split_once(MARK) {
                    let _ = send.send(line.to_owned());
                }
            }
        });
        let input = process.stdin.take();
        Child { process, input, lines, reader: Some(reader) }
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn say(&mut self, line: &str) {
        if let Some(input) = &mut self.input {
            // It may have been killed.
            let _ = writeln!(input, "{line}").and_then(|()| input.flush());
        }
    }

    /// The next line; nothing if there is none in time or the child is gone.
    pub(crate) fn hear(&self, patience: Duration) -> Option<String> {
        self.lines.recv_timeout(patience).ok()
    }

    /// What it answers to `line`.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.hear(Duration::from_secs(20)).unwrap_or_else(|| panic!("no answer to {line}"))
    }

    /// Kills it and waits until it is dead.
    pub(crate) fn kill(&mut self) {
        self.input = None;
        let _ = self.process.kill();
        let _ = self.process.wait();
        drop(self.reader.take().map(JoinHandle::join));
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

fn tell(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{line}").and_then(|()| out.flush()).unwrap();
}

/// The bytes of a version: those of the one before it with some changes.
pub(crate) struct Weights {
    pub(crate) data: Vec<u8>,
    pub(crate) version: u64,
    seed: u64,
}

impl Weights {
    pub(crate) fn new(manifest: &Manifest, seed: u64) -> Weights {
        let mut data = vec![0; manifest.data_bytes() as usize];
        Noise(seed | 1).fill_fast(&mut data);
        Weights { data, version: 0, seed }
    }

    pub(crate) fn go_to(&mut self, version: u64) {
        while self.version < version {
            self.version += 1;
            let mut noise = Noise((self.seed ^ self.version.wrapping_mul(0x9E37_79B9_7F4A_7C15)) | 1);
            for _ in 0..=self.data.len() / 1000 {
                let at = noise.below(self.data.len() as u64) as usize;
                self.data[at] = self.data[at].wrapping_add(1 + noise.below(3) as u8);
            }
        }
    }
}

/// Impatient, so that tests need not be patient.
pub(crate) fn quick_server() -> ServerConfig {
    ServerConfig {
        tcp: SenderConfig {
            ping_after: Duration::from_millis(200),
            lost_after: Duration::from_millis(600),
            handshake_timeout: Duration::from_millis(600),
            abandoned_after: Duration::from_secs(1),
            ..SenderConfig::default()
        },
        history: Limits { count: 8, bytes: 16 << 20 },
        stripe_bytes: MIN_STRIPE_BYTES,
        revoke_grace: Duration::from_millis(50),
        ..config()
    }
}

pub(crate) fn quick_pull() -> PullConfig<'static> {
    PullConfig {
        connect_timeout: Duration::from_millis(500),
        handshake_timeout: Duration::from_millis(500),
        ping_after: Duration::from_millis(100),
        lost_after: Duration::from_millis(400),
        stripe_timeout: Duration::from_secs(1),
        reconnects: 5,
        backoff: Duration::from_millis(5),
        max_backoff: Duration::from_millis(100),
        ..PullConfig::default()
    }
}

/// Not a test by itself: a process in the role that the environment names, until its input ends.
#[test]
#[ignore = "a child process of the other tests"]
fn child() {
    let Ok(role) = std::env::var("WINDLASS_TEST_ROLE") else { return };
    let args = std::env::var("WINDLASS_TEST_ARGS").unwrap_or_default();
    let args: Vec<&str> = args.lines().collect();
    match role.as_str() {
        "agent" => agent(Path::new(args[0])),
        "rank" => rank(Path::new(args[0]), args[1].parse().unwrap()),
        "receiver" => receiver(args[0].into(), args[1].into(), args.get(2) == Some(&"full")),
        "engine" => engine(Path::new(args[0])),
        "attach" => attach(Path::new(args[0])),
        other => panic!("no role {other}"),
    }
}

fn orders() -> impl Iterator<Item = String> {
    std::io::stdin().lines().map_while(Result::ok)
}

/// Serves the region in a directory, with a desk and the way in for local processes.
fn agent(dir: &Path) {
    let region = Region::open(dir).unwrap();
    let server = Arc::new(Server::start(Arc::clone(&region), quick_server()).unwrap());
    let local = LocalServer::start(region).unwrap();
    let desk = Desk::open(&dir.join("desk.sock"), server);
    tell("ready");
    orders().for_each(drop);
    drop((desk, local));
}

/// Publishes the versions that it is told to.
fn rank(dir: &Path, seed: u64) {
    let region = Region::open(dir).unwrap();
    let mut writer = region.writer(0).unwrap();
    let mut weights = Weights::new(region.manifest(), seed);
    let newest = region.state().active.map_or(0, |s| s.version);
    tell(&format!("ready {newest}"));
    for line in orders() {
        let version = line.parse().unwrap();
        weights.go_to(version);
        let stop = Stop::after(Duration::from_secs(10));
        let done = writer.begin(version, &stop).and_then(|attempt| {
            attempt.write(0, &weights.data)?;
            attempt.done(&stop)
        });
        match done {
            Ok(_) => tell(&format!("published {version}")),
            Err(e) => tell(&format!("failed {:?} {e}", e.kind())),
        }
    }
}

/// Syncs when told to, with so many milliseconds.
fn receiver(image: PathBuf, desk: PathBuf, full: bool) {
    let mut config = receiver_config(image, if full { RequestMode::Full } else { RequestMode::Auto });
    config.pull = quick_pull();
    let control = Arc::new(Remote(desk));
    let mut receiver = Receiver::open(config, control, None, &Stop::after(Duration::from_secs(10))).unwrap();
    tell("ready");
    for line in orders() {
        let stop = Stop::after(Duration::from_millis(line.parse().unwrap()));
        match receiver.sync(&stop) {
            Ok(synced) => {
                let region = receiver.image().unwrap().region();
                let load = Duration::from_secs(5);
                let view = ImageView::take(region, load, &Stop::after(load)).unwrap();
                let (known, found) = (view.known().clone(), digest(view.manifest(), view.data()));
                view.finish().unwrap();
                let version = known.identity.version;
                tell(&format!("synced {version} {} {found} {}", known.digest, synced.mode));
            }
            Err(e) => tell(&format!("error {:?} {e}", e.kind()).replace('\n', " ")),
        }
    }
}

/// Holds the image under a map lease from one line to the next.
fn engine(image: &Path) {
    let region = Region::open(image).unwrap();
    tell("ready");
    let mut view = None;
    for line in orders() {
        drop(view.take());
        if line == "take" {
            let load = Duration::from_mins(1);
            let taken = ImageView::take(&region, load, &Stop::after(Duration::from_secs(10))).unwrap();
            tell(&format!("has {}", digest(taken.manifest(), taken.data())));
            view = Some(taken);
        } else {
            tell("left");
        }
    }
}

/// Attaches by descriptors, as another user if told to, and reads in place.
fn attach(dir: &Path) {
    match windlass_data::local::attach(dir) {
        Err(e) => tell(&format!("ready no {:?} {e}", e.kind())),
        Ok(region) => {
            tell("ready");
            for _ in orders() {
                let active = region.state().active.unwrap();
                let kind = windlass_data::region::LeaseKind::Map;
                let lease = region.lease(active.id, kind, Duration::from_mins(1)).unwrap();
                let found = digest(region.manifest(), lease.data());
                let writes = region.writer(0).map(drop).map_err(|e| e.to_string());
                tell(&format!("has {found} {} {}", lease.version(), writes.is_ok()));
            }
        }
    }
}

/// Runs an ignored test of this file in a process of its own, which a test needs that counts what its process has open. Passes its
/// output on line by line.
pub(crate) fn in_a_process_of_its_own(test: &str) {
    let (output, input) = std::io::pipe().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).stdin(Stdio::null());
    command.stdout(input.try_clone().unwrap()).stderr(input);
    let mut child = command.spawn().unwrap();
    // It holds the ends for writing, and would be waited for.
    drop(command);
    let mut passed = false;
    for line in std::io::BufReader::new(output).lines().map_while(Result::ok) {
        passed |= line.starts_with("test result: ok. 1 passed");
        println!("{line}");
    }
    assert!(child.wait().unwrap().success() && passed, "{test} failed; its output is above");
}
