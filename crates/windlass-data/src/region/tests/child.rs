//! A second process: this test binary again, run by commands on its standard input.
//!
//! It answers each command by a line `@done ok …` or `@done error: …`. At the steps it was told to stop at it prints
//! `@name` and reads a line before it goes on, so the parent knows exactly where it is when it is killed or stopped.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child as Process, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};

use super::{Shape, expected, write_share};
use crate::region::{AgentSeat, Lease, LeaseKind, Region, RegionError, Seal, Writer};
use crate::stop::Stop;
use windlass_core::identity::StateDigest;

const DIR: &str = "WINDLASS_TEST_REGION";
/// Longer than anything takes that does not hang.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// Steps to stop at: a name, or a name and the how-manieth time.
static STOPS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
/// Whether the running command has lost its patience.
static GIVE_UP: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
static COUNTS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// The hook in the code under test.
pub(crate) fn step(name: &'static str) {
    if STOPS.lock().is_empty() {
        return;
    }
    let count = {
        let mut counts = COUNTS.lock();
        counts.push(name);
        counts.iter().filter(|n| **n == name).count()
    };
    let mut stops = STOPS.lock();
    if stops.remove(name) || stops.remove(&format!("{name}:{count}")) {
        drop(stops);
        say(name);
        GIVE_UP.store(read_line() == "give up", Ordering::Relaxed);
    }
}

fn say(text: &str) {
    println!("@{text}");
    std::io::stdout().flush().unwrap();
}

fn read_line() -> String {
    let mut line = String::new();
    if std::io::stdin().lock().read_line(&mut line).unwrap() == 0 {
        // The parent is gone or has had enough.
        std::process::exit(0);
    }
    line.trim().to_owned()
}

#[derive(Default)]
struct Held {
    writer: Option<Writer>,
    lease: Option<Lease>,
    seat: Option<AgentSeat>,
    seal: Option<Seal>,
}

/// Not a test by itself: the second process runs it.
#[test]
fn child_process() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let region = match Region::open(Path::new(&dir)) {
        Ok(region) => region,
        Err(e) => return say(&format!("done error: {e}")),
    };
    say("open");
    let mut held = Held::default();
    let mut publishing = crate::publish::tests::Held::default();
    loop {
        let line = read_line();
        if let Some(answer) = crate::publish::tests::obey(&region, &mut publishing, &line) {
            match answer {
                Ok(answer) => say(&format!("done ok {answer}")),
                Err(e) => say(&format!("done error: {e}")),
            }
            continue;
        }
        match obey(&region, &mut held, &line) {
            Ok(answer) => say(&format!("done ok {answer}")),
            Err(e) => say(&format!("done error: {e}")),
        }
    }
}

fn obey(region: &Arc<Region>, held: &mut Held, line: &str) -> Result<String, RegionError> {
    let words: Vec<&str> = line.split(' ').collect();
    let number = |i: usize| words[i].parse::<u64>().unwrap();
    match words[0] {
        "stop-at" => {
            COUNTS.lock().clear();
            STOPS.lock().insert(words[1].to_owned());
        }
        "rank" => held.writer = Some(region.writer(number(1) as u16)?),
        "write" => {
            GIVE_UP.store(false, Ordering::Relaxed);
            let shape = Shape { seed: number(2), ranks: region.ranks() };
            let stop = Stop::from_flag(Arc::clone(&GIVE_UP)).with_timeout(PATIENCE);
            write_share(held.writer.as_mut().unwrap(), number(1), shape, &stop)?;
        }
        "lease" => {
            let kind = if words[2] == "map" { LeaseKind::Map } else { LeaseKind::Stream };
            held.lease = Some(region.lease(number(1), kind, Duration::from_millis(number(3)))?);
        }
        "compare" => {
            let lease = held.lease.as_ref().unwrap();
            assert!(lease.data() == expected(region, lease.version()), "other bytes under a lease");
        }
        "finish" => held.lease.take().unwrap().finish()?,
        "drop-lease" => drop(held.lease.take()),
        "agent" => held.seat = Some(region.agent()?),
        "attend" => {
            held.seat.as_ref().unwrap().attend(Duration::from_millis(number(1)));
        }
        "seal" => held.seal = held.seat.as_ref().unwrap().seal()?,
        "sealed" => {
            let seal = held.seal.take().unwrap();
            let base = seal.base.as_ref().map(Lease::version);
            seal.finish(StateDigest([number(1) as u8; 16]))?;
            return Ok(format!("{base:?}"));
        }
        "leave" => *held = Held::default(),
        other => panic!("unknown command {other:?}"),
    }
    Ok(String::new())
}

/// The parent's side of a second process.
pub(crate) struct Child {
    process: Process,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    reader: Option<JoinHandle<()>>,
}

impl Child {
    pub(crate) fn spawn(dir: &Path) -> Child {
        Child::spawn_by(Command::new(std::env::current_exe().unwrap()), dir)
    }

    /// Runs this test binary by `command`, which may be another that takes its path last.
    pub(crate) fn spawn_by(mut command: Command, dir: &Path) -> Child {
        command.args(["--exact", "region::tests::child::child_process", "--nocapture", "--test-threads=1"]);
        let mut process = command.env(DIR, dir).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let (send, lines) = channel();
        let reader = std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test harness may have begun the line.
                if let Some((_, text)) = line.split_once('@') {
                    let _ = send.send(text.to_owned());
                }
            }
        });
        let stdin = process.stdin.take();
        Child { process, stdin, lines, reader: Some(reader) }
    }

    /// A process that has the region open.
    pub(crate) fn open(dir: &Path) -> Child {
        let child = Child::spawn(dir);
        assert_eq!(child.line(), "open");
        child
    }

    /// A process that is this rank.
    pub(crate) fn rank(dir: &Path, rank: u16) -> Child {
        let mut child = Child::open(dir);
        child.ask(&format!("rank {rank}")).unwrap();
        child
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn send(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub(crate) fn line(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("the child answers")
    }

    /// What came of the last command.
    pub(crate) fn done(&self) -> Result<String, String> {
        let line = self.line();
        match line.strip_prefix("done ok ") {
            Some(answer) => Ok(answer.to_owned()),
            None => Err(line.strip_prefix("done error: ").unwrap_or_else(|| panic!("{line:?}")).to_owned()),
        }
    }

    pub(crate) fn ask(&mut self, line: &str) -> Result<String, String> {
        self.send(line);
        self.done()
    }

    /// Sends a command that stops at a step, and returns when it is there.
    pub(crate) fn run_to(&mut self, step: &str, command: &str) {
        self.ask(&format!("stop-at {step}")).unwrap();
        self.send(command);
        self.arrive(step);
    }

    pub(crate) fn arrive(&self, step: &str) {
        assert_eq!(Some(self.line().as_str()), step.split(':').next());
    }

    /// Goes on from the step.
    pub(crate) fn go_on(&mut self) {
        self.send("");
    }

    /// Goes on from the step, and waits for nothing any more.
    pub(crate) fn give_up(&mut self) {
        self.send("give up");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid() as i32).unwrap(), signal).unwrap();
    }

    /// Stops it, and returns when it is stopped.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", self.pid());
        let begun = std::time::Instant::now();
        while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
            assert!(begun.elapsed() < PATIENCE);
            std::thread::yield_now();
        }
    }

    pub(crate) fn cont(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it, and returns when it is dead.
    pub(crate) fn kill(mut self) -> u32 {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.pid()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.stdin.take();
        // Dead already in half of the tests.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
    }
}
