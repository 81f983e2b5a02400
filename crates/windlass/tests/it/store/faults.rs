//! A publisher and followers whose requests to a real S3 server fail in every way, by one seed.
//!
//! A proxy for each side refuses requests as a busy store does, answers that credentials have expired or that the clock is
//! wrong, loses requests and answers, answers too late or never, cuts and flips bodies, answers with old lists, and kills the
//! process that asks. Processes begin with wrong clocks, and now and then another publisher takes the store over. Every version
//! that a follower shows must have the digest that the trainer's agent has sealed; a publisher that lost the store must say
//! so; nothing else may end a process; and at the end the store must be whole. `WINDLASS_SEED` repeats the draws of a run,
//! `WINDLASS_STORE_FAULTS` says how many faults. Only a run that names their number has requests without any answer, which
//! take the client's two minutes. With an odd seed the follower keeps a slice, which must be that of a receiver of the agent.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, kill_process};

use super::server::{Kind, Store};
use super::{home, shown, slice, trainer};
use crate::process::{Agent, PATIENCE, Process};
use crate::soak::dice::Dice;
use crate::soak::world::shim;

/// How long a version may take to a follower while much fails and pauses grow.
const ARRIVAL: Duration = Duration::from_mins(10);
/// The most requests of a side that get no answer.
const SILENCES: u64 = 1;
/// Seconds by which a process's clock may be off: an hour, and ten years.
const CLOCKS: [i64; 4] = [3600, -3600, 315_360_000, -315_360_000];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// 503, as for a client that asks too often.
    Busy,
    /// 500.
    Internal,
    /// 403, as for credentials that have expired.
    Expired,
    /// 403, as for a request by a clock that is far off.
    Skewed,
    /// 408, as for a request that came too slowly.
    TimedOut,
    /// No answer until the client gives up.
    Silent,
    /// The connection ends before the store has the request.
    LostRequest,
    /// The store has done what was asked, and its answer is lost.
    LostAnswer,
    /// Half of the body.
    Cut,
    /// A bit of the body of an object.
    Flipped,
    /// The list of some time ago.
    OldList,
    /// The process that asks is killed.
    Killed,
    /// A process begins with a clock that is off.
    Clock,
    /// Another publisher takes the store over.
    Rival,
}

use Fault::{
    Busy, Clock, Cut, Expired, Flipped, Internal, Killed, LostAnswer, LostRequest, OldList, Rival, Silent,
    Skewed, TimedOut,
};

const FAULTS: [Fault; 11] =
    [Busy, Internal, Expired, Skewed, TimedOut, Silent, LostRequest, LostAnswer, Cut, Flipped, OldList];

struct State {
    dice: Dice,
    /// How many requests of a thousand fail.
    rate: u64,
    counts: BTreeMap<Fault, u64>,
    /// How many more requests may stay without an answer.
    silences: u64,
    /// At which requests processes were killed.
    kills: BTreeMap<String, u64>,
    /// After how many requests which process is killed.
    kill: Option<(u64, u32)>,
    /// The processes that were.
    killed: BTreeSet<u32>,
    /// Requests wait.
    held: bool,
    /// The last answer to each request for a list.
    lists: BTreeMap<String, Vec<u8>>,
}

/// Between one side and the server.
struct Bad {
    port: u16,
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl Bad {
    fn start(to: u16, seed: u64, side: u64, silences: u64) -> Bad {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (dice, rate, counts) = (Dice::new(seed, side), 0, BTreeMap::new());
        let state = State {
            dice,
            rate,
            counts,
            silences,
            kills: BTreeMap::new(),
            kill: None,
            killed: BTreeSet::new(),
            held: false,
            lists: BTreeMap::new(),
        };
        let shared = Arc::new((Mutex::new(state), Condvar::new()));
        let all = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&all);
                std::thread::spawn(move || pass(stream, to, &shared));
            }
        });
        Bad { port, shared }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.0.lock());
        self.shared.1.notify_all();
    }

    fn hit(&self, fault: Fault) {
        *self.shared.0.lock().counts.entry(fault).or_insert(0) += 1;
    }

    fn counts(&self) -> BTreeMap<Fault, u64> {
        self.shared.0.lock().counts.clone()
    }

    /// Whether it has killed a process.
    fn has_killed(&self, pid: u32) -> bool {
        self.shared.0.lock().killed.contains(&pid)
    }
}

/// What a request is for: its method, and what kind of object it names.
fn step(line: &str) -> String {
    let kinds =
        ["/deltas/", "/versions/", "/anchor-", "/sums-", "/anchors/", "/manifest-", "head.json", "probe"];
    let kind = kinds.into_iter().find(|kind| line.contains(kind)).unwrap_or("list or batch");
    format!("{} {kind}", line.split(' ').next().unwrap_or_default())
}

/// One request and its answer.
fn pass(mut from: TcpStream, port: u16, shared: &(Mutex<State>, Condvar)) -> Option<()> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        from.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&head).into_owned();
    let line = text.lines().next().unwrap_or_default().to_owned();
    let length =
        text.lines().find_map(|l| l.to_lowercase().strip_prefix("content-length: ")?.trim().parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    from.read_exact(&mut body).ok()?;
    let is_list = line.starts_with("GET") && (line.contains("list-type") || line.contains("comp=list"));
    let (state, turned) = shared;
    let fault = {
        let mut state = state.lock();
        while state.held {
            turned.wait(&mut state);
        }
        if let Some((left, pid)) = &mut state.kill {
            *left = left.saturating_sub(1);
            if *left == 0 {
                let pid = *pid;
                state.killed.insert(pid);
                // It may have ended by itself, which the test finds out.
                let _ = kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL);
                state.kill = None;
                *state.counts.entry(Killed).or_insert(0) += 1;
                *state.kills.entry(step(&line)).or_insert(0) += 1;
                return None;
            }
        }
        let rate = state.rate;
        let fault = (state.dice.below(1000) < rate).then(|| *state.dice.pick(&FAULTS));
        // What has no body cannot be cut.
        let fault = fault
            .filter(|f| line.starts_with("GET") || !matches!(f, Cut | Flipped | OldList))
            .filter(|f| *f != OldList || is_list)
            .filter(|f| *f != Silent || state.silences > 0);
        state.silences -= u64::from(fault == Some(Silent));
        fault
    };
    let hit = |fault: Fault| *state.lock().counts.entry(fault).or_insert(0) += 1;
    let refuse = |status: &str, code: &str| {
        let body = format!("<Error><Code>{code}</Code><Message>{code}</Message></Error>");
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
    };
    let refusal = match fault {
        Some(Busy) => Some(refuse("503 Slow Down", "SlowDown")),
        Some(Internal) => Some(refuse("500 Internal Server Error", "InternalError")),
        Some(Expired) => Some(refuse("403 Forbidden", "ExpiredToken")),
        Some(Skewed) => Some(refuse("403 Forbidden", "RequestTimeTooSkewed")),
        Some(TimedOut) => Some(refuse("408 Request Timeout", "RequestTimeout")),
        Some(LostRequest) => Some(String::new()),
        _ => None,
    };
    if let (Some(answer), Some(fault)) = (refusal, fault) {
        hit(fault);
        return from.write_all(answer.as_bytes()).ok();
    }
    if fault == Some(Silent) {
        hit(Silent);
        // Until the client closes the connection.
        return from.read_exact(&mut byte).ok();
    }
    let mut to = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let kept = text.lines().filter(|l| !l.to_lowercase().starts_with("connection:") && !l.is_empty());
    let head: String = kept.flat_map(|l| [l, "\r\n"]).collect();
    to.write_all(format!("{head}connection: close\r\n\r\n").as_bytes()).ok()?;
    to.write_all(&body).ok()?;
    let mut answer = Vec::new();
    to.read_to_end(&mut answer).ok()?;
    let old = if is_list { state.lock().lists.insert(line, answer.clone()) } else { None };
    let start = answer.windows(4).position(|w| w == b"\r\n\r\n").map_or(answer.len(), |at| at + 4);
    let is_object = answer.starts_with(b"HTTP/1.1 20") && start < answer.len();
    match fault {
        Some(LostAnswer) => {
            hit(LostAnswer);
            let _ = from.shutdown(Shutdown::Both);
            return None;
        }
        Some(Cut) if is_object => {
            hit(Cut);
            answer.truncate(start + (answer.len() - start) / 2);
        }
        Some(Flipped) if is_object => {
            hit(Flipped);
            let mut state = state.lock();
            let at = start + state.dice.below((answer.len() - start) as u64) as usize;
            answer[at] ^= 1 << state.dice.below(8);
        }
        Some(OldList) => {
            if let Some(old) = old.filter(|old| *old != answer) {
                hit(OldList);
                answer = old;
            }
        }
        _ => {}
    }
    from.write_all(&answer).ok()
}

/// A service in all its lives.
struct Lives {
    process: Process,
    /// Whether this life has shown a version.
    proven: bool,
}

#[test]
fn no_fault_of_a_store_shows_a_wrong_version_or_ends_a_service() {
    for kind in Kind::SERVERS {
        no_fault_shows_a_wrong_version_or_ends_a_service(kind);
    }
}

fn no_fault_shows_a_wrong_version_or_ends_a_service(kind: Kind) {
    let number = |name: &str| std::env::var(name).ok().map(|n| n.parse::<u64>().unwrap());
    let seed = number("WINDLASS_SEED").unwrap_or_else(|| std::process::id().into());
    let asked = number("WINDLASS_STORE_FAULTS");
    let faults = asked.unwrap_or(40);
    let silences = asked.map_or(0, |_| SILENCES);
    println!("{kind:?}, seed {seed}");
    let home = home();
    let store = Store::start(kind, home.path());
    let url = &store.url("run");
    let (up, down) = (Bad::start(store.port, seed, 1, silences), Bad::start(store.port, seed, 2, silences));
    let mut trainer = trainer(&home.path().join("region"));
    let (_shim, shim) = shim();
    let clocks = Mutex::new((Dice::new(seed, 4), 0));
    // One life of three begins with a clock that is off.
    let skew = |command: &mut Command, side: &Bad| {
        let (dice, lives) = &mut *clocks.lock();
        *lives += 1;
        if dice.below(3) == 0 {
            let file = home.path().join(format!("clock-{lives}"));
            fs::write(&file, dice.pick(&CLOCKS).to_ne_bytes()).unwrap();
            command.env("LD_PRELOAD", &shim).env("SOAK_CLOCK", &file);
            side.hit(Clock);
        }
    };
    let start_agent = |region: &Path| -> Agent {
        let own = [format!("--region={}", region.display()), format!("--store={url}")];
        let flags =
            ["--store-part-bytes=5Mi", "--store-anchor-every=5", "--store-keep=12", "--store-keep-hours=1"];
        let args = ["agent"].into_iter().chain(own.iter().map(String::as_str)).chain(flags);
        let mut command = store.prepared(up.port, args);
        skew(&mut command, &up);
        Agent::of(Process::spawn(command))
    };
    let dir = home.path().join("image");
    std::fs::create_dir(&dir).unwrap();
    let slice = (seed % 2 == 1).then(|| slice::selection(home.path()));
    let follow = || {
        let args = ["receive".into(), format!("--from={url}"), format!("--dir={}", dir.display())];
        let args = args.into_iter().chain(slice.clone());
        let mut command = store.prepared(down.port, args);
        skew(&mut command, &down);
        Lives { process: Process::spawn(command), proven: false }
    };
    let mut agent = start_agent(&trainer.region);
    let mut rivals = 0;
    let (mut version, mut digests) = (0_u32, BTreeMap::new());
    let mut follower: Option<Lives> = None;
    let mut dice = Dice::new(seed, 3);
    let total = || up.counts().values().chain(down.counts().values()).sum::<u64>();
    loop {
        let last = total() >= faults;
        version += 1;
        up.change(|s| (s.held, s.kill) = (true, None));
        if up.has_killed(agent.process.pid()) {
            agent.process.ends_within(PATIENCE);
            agent = start_agent(&trainer.region);
        }
        // A trainer's later run, while the one before goes on.
        let rival = !last && version > 1 && dice.below(8) == 0;
        let loser = rival.then(|| {
            rivals += 1;
            up.hit(Rival);
            let next = super::trainer(&home.path().join(format!("region-{rivals}")));
            let next_agent = start_agent(&next.region);
            (std::mem::replace(&mut trainer, next), std::mem::replace(&mut agent, next_agent))
        });
        // The synthetic model has so many steps.
        trainer.process.say(&format!("train {}", (version - 1) % 64 + 1));
        trainer.process.say(&format!("offload {version}"));
        trainer.process.event("committed");
        let sealed = agent.sealed(version.into())["digest"].clone();
        let own = home.path().join("own");
        let of_slice = |slice: &String| {
            slice::of_agent(&trainer.region, &own, slice, version.into())["image"]["digest"].clone()
        };
        digests.insert(u64::from(version), slice.as_ref().map_or(sealed, of_slice));
        let rate = if last { 0 } else { 250 };
        down.change(|s| s.rate = rate);
        let (when, pid) = (1 + dice.below(12), agent.process.pid());
        let kill = (!last && version > 1 && dice.below(3) == 0).then_some((when, pid));
        up.change(|s| (s.rate, s.kill, s.held) = (rate, kill, false));
        if let Some(lives) = follower.as_ref().filter(|_| !last && dice.below(4) == 0) {
            let kill = Some((1 + dice.below(8), lives.process.pid()));
            down.change(|s| s.kill = kill);
        }
        let (until, mut said) = (Instant::now() + ARRIVAL, Vec::new());
        loop {
            assert!(
                Instant::now() < until,
                "seed {seed}: version {version} has not come; the follower said {:?}, the agent {:?}",
                &said[said.len().saturating_sub(4)..],
                agent.get("/status").json()
            );
            if agent.process.has_ended() {
                assert!(up.has_killed(agent.process.pid()), "seed {seed}: the agent ended by itself");
                agent = start_agent(&trainer.region);
            }
            let lives = follower.get_or_insert_with(follow);
            let Some(line) = lives.process.line_within(Duration::from_millis(20)) else {
                if lives.process.has_ended() {
                    // One that has never got through may say so and end.
                    let killed = down.has_killed(lives.process.pid());
                    assert!(killed || !lives.proven, "seed {seed}: the follower ended by itself");
                    follower = None;
                }
                continue;
            };
            // One that was killed after a version was whole finds it.
            let there = line["event"] == "synced" || line["event"] == "found";
            said.push(line.to_string());
            if there {
                lives.proven = true;
                let image = &line["image"];
                let shown = image["identity"]["version"].as_u64().unwrap();
                assert_eq!(Some(&image["digest"]), digests.get(&shown), "seed {seed}: {line}");
                if shown == u64::from(version) {
                    break;
                }
            }
        }
        down.change(|s| s.kill = None);
        if let Some((mut trainer, mut agent)) = loser {
            trainer.process.say("train 1");
            trainer.process.say(&format!("offload {version}"));
            trainer.process.event("committed");
            let until = Instant::now() + ARRIVAL;
            while agent.process.line_within(Duration::from_millis(20)).is_none_or(|l| l["event"] != "fenced")
            {
                assert!(!agent.process.has_ended(), "seed {seed}: the publisher before ended by itself");
                assert!(Instant::now() < until, "seed {seed}: the publisher before was not fenced");
            }
            let region = trainer.region.clone();
            drop((agent, trainer));
            fs::remove_dir_all(region).unwrap();
        }
        if last {
            break;
        }
    }
    let counts = (up.counts(), down.counts());
    println!("{} faults over {version} versions: publisher {:?}, follower {:?}", total(), counts.0, counts.1);
    let kills = |side: &Bad| side.shared.0.lock().kills.clone();
    println!("killed at: publisher {:?}, follower {:?}", kills(&up), kills(&down));
    // What is left is whole for a reader that no fault disturbs.
    let mut verify = store.command(["store", "verify", url]);
    let line = verify.rest().pop().unwrap();
    assert_eq!(
        (verify.ends_within(PATIENCE), line["damaged"].as_array().map(Vec::len)),
        (0, Some(0)),
        "{line}"
    );
    let flags: Vec<&str> = slice.iter().map(String::as_str).collect();
    let late = store.receive(url, &home.path().join("late"), &flags);
    assert_eq!(Some(&shown(&late, version.into())["image"]["digest"]), digests.get(&u64::from(version)));
}
