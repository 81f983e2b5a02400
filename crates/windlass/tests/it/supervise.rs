//! A supervised agent: killed, stopped, misled and orphaned.

use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::process::{Agent, PATIENCE, Process, Trainer, processes_about};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use windlass::service::agent_address::AgentAddress;
use windlass::service::supervise::{Spec, Status, SuperviseError, Supervisor};
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

const REGION: &str = "WINDLASS_TEST_SUPERVISED";

fn home() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn spec(region: &Path, options: &[&str]) -> Spec {
    Spec {
        program: vec![env!("CARGO_BIN_EXE_windlass").into()],
        options: options.iter().map(OsString::from).collect(),
        environment: vec![("WINDLASS_TOKEN".into(), None)],
        log: Some(region.with_extension("log")),
        ..Spec::new(region)
    }
}

fn shell(region: &Path, script: &str) -> Spec {
    Spec { program: ["sh", "-c", script].map(Into::into).to_vec(), ..spec(region, &[]) }
}

fn found(supervisor: &Supervisor) -> AgentAddress {
    supervisor.address(&Stop::after(PATIENCE)).unwrap()
}

/// Waits until something is so.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn status_when(supervisor: &Supervisor, what: &str, so: impl Fn(&Status) -> bool) -> Status {
    until(what, || supervisor.status().ok().filter(&so))
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

fn is_alive(pid: u32) -> bool {
    test_kill_process(Pid::from_raw(pid.cast_signed()).unwrap()).is_ok()
}

fn agents_of(region: &Path) -> Vec<u32> {
    processes_about(region)
        .into_iter()
        .filter(|(_, line)| line.contains(" agent "))
        .map(|(pid, _)| pid)
        .collect()
}

/// Requests to a supervised agent.
fn client(here: &AgentAddress) -> Agent {
    Agent {
        process: Process::spawn(Command::new("cat")),
        endpoint: here.endpoint.clone(),
        data_port: here.data_port,
        token: fs::read_to_string(here.token_file.as_ref().unwrap()).unwrap(),
    }
}

#[test]
fn a_killed_agent_comes_back_on_its_ports_and_receivers_go_on() {
    let home = home();
    let mut trainer = Trainer::start(&home.path().join("region"));
    let supervisor = Supervisor::start(spec(&trainer.region, &[])).unwrap();
    let first = found(&supervisor);
    trainer.publish(0);
    let receiver = Process::start([
        "receive".into(),
        format!("--from={}", first.endpoint),
        format!("--token-file={}", first.token_file.as_ref().unwrap().display()),
        format!("--dir={}", home.path().join("images").display()),
    ]);
    assert_eq!(receiver.event("synced")["image"]["identity"]["version"], 0);
    for life in 1..=2 {
        let pid = supervisor.status().unwrap().pid.unwrap();
        signal(pid, Signal::KILL);
        let status = status_when(&supervisor, "another agent", |s| s.pid.is_some_and(|p| p != pid));
        assert_eq!(status.restarts, life);
        assert!(status.last_error.unwrap().contains("was ended by signal 9"));
        let again = found(&supervisor);
        assert_eq!((&again.endpoint, again.data_port), (&first.endpoint, first.data_port));
        trainer.publish(life as u32);
        assert_eq!(receiver.event("synced")["image"]["identity"]["version"], life);
    }
}

#[test]
fn an_agent_whose_ports_were_taken_meanwhile_finds_others_of_its_range() {
    let home = home();
    let trainer = Trainer::start(&home.path().join("region"));
    // The agent waits for a second one to be killed, so that its ports can be taken in between.
    let gate = home.path().join("gate");
    let script = format!(
        "while [ -e {} ]; do sleep 0.01; done; exec {} \"$0\" \"$@\"",
        gate.display(),
        env!("CARGO_BIN_EXE_windlass")
    );
    let supervisor = Supervisor::start(shell(&trainer.region, &script)).unwrap();
    let first = found(&supervisor);
    let port = |here: &AgentAddress| here.endpoint.rsplit(':').next().unwrap().parse::<u16>().unwrap();
    fs::write(&gate, "").unwrap();
    signal(first.pid, Signal::KILL);
    let taken = until("the ports are free", || {
        let control = TcpListener::bind(("127.0.0.1", port(&first))).ok()?;
        Some((control, TcpListener::bind(("127.0.0.1", first.data_port)).ok()?))
    });
    fs::remove_file(&gate).unwrap();
    status_when(&supervisor, "another agent", |s| s.restarts == 1);
    let second = found(&supervisor);
    assert_ne!(port(&second), port(&first));
    assert_ne!(second.data_port, first.data_port);
    drop(taken);
}

#[test]
fn a_killed_agent_does_not_hold_up_its_trainer_and_neither_does_a_stopped_one() {
    let home = home();
    let mut trainer = Trainer::start(&home.path().join("region"));
    let mut agent = Agent::start(&trainer.region, &[]);
    trainer.publish(0);
    agent.sealed(0);
    agent.process.signal(Signal::STOP);
    let begun = Instant::now();
    // 1 is committed beside 0 and never sealed; 2 and 3 take slots that the agent was to read.
    (1..=3).for_each(|version| trainer.publish(version));
    let took = begun.elapsed();
    assert!(took > Duration::from_secs(3) && took < PATIENCE, "{took:?}: a silent agent is waited for once");
    agent.process.signal(Signal::CONT);
    trainer.publish(4);
    assert_eq!(agent.sealed(4)["version"], 4, "it goes on by itself");
    agent.process.kill();
    let begun = Instant::now();
    (5..=8).for_each(|version| trainer.publish(version));
    assert!(begun.elapsed() < PATIENCE, "a dead agent is not waited for");
    let agent = Agent::start(&trainer.region, &[]);
    assert_eq!(agent.sealed(8)["version"], 8);
}

#[test]
fn a_stopped_agent_is_replaced_and_publishing_goes_on() {
    let home = home();
    let mut trainer = Trainer::start(&home.path().join("region"));
    let stalled_after = Duration::from_millis(300);
    let supervisor = Supervisor::start(Spec { stalled_after, ..spec(&trainer.region, &[]) }).unwrap();
    let first = found(&supervisor);
    trainer.publish(0);
    client(&first).sealed(0);
    signal(first.pid, Signal::STOP);
    (1..=3).for_each(|version| trainer.publish(version));
    let status = status_when(&supervisor, "another agent", |s| s.restarts == 1);
    assert!(status.last_error.unwrap().contains("was stopped for 300ms"));
    let second = found(&supervisor);
    assert_eq!(second.endpoint, first.endpoint);
    assert_eq!(client(&second).sealed(3)["version"], 3);
}

#[test]
fn an_agent_that_cannot_start_says_why_and_is_tried_again() {
    let home = home();
    let region = home.path().join("region");
    let error = |spec: Spec, timeout: u64| {
        let supervisor = Supervisor::start(spec).unwrap();
        let e = supervisor.address(&Stop::after(Duration::from_millis(timeout))).unwrap_err();
        let restarts = supervisor.status().unwrap().restarts;
        supervisor.stop(PATIENCE, &Stop::never()).unwrap();
        (e.kind(), e.to_string(), restarts)
    };
    // What it refuses is said long before the deadline.
    let (kind, text, _) = error(spec(&region, &["--prots", "7000"]), 60_000);
    assert_eq!(kind, Kind::Invalid);
    assert!(text.contains("--prots") && text.contains("does not start"), "{text}");
    let (kind, text, restarts) = error(shell(&region, "echo first >&2; echo it is broken >&2; exit 3"), 700);
    assert_eq!(kind, Kind::Timeout);
    assert!(text.contains("exit code 3 (first\nit is broken)") && text.contains("region.log"), "{text}");
    assert!((2..12).contains(&restarts), "it is tried again, with pauses that grow: {restarts}");
    assert!(fs::read_to_string(home.path().join("region.log")).unwrap().contains("it is broken"));
    let absent = Spec { program: vec!["/no/such/program".into()], ..spec(&region, &[]) };
    let (kind, text, _) = error(absent, 300);
    assert_eq!(kind, Kind::NotFound);
    assert!(text.contains("cannot start /no/such/program"), "{text}");
    // An address of another host does not become ours.
    let trainer = Trainer::start(&region);
    let (kind, text, _) = error(spec(&region, &["--bind", "192.0.2.1"]), 120_000);
    assert_eq!(kind, Kind::Invalid);
    assert!(text.contains("does not start") && text.contains("cannot listen on 192.0.2.1"), "{text}");
    // No port is free, which is said long before the deadline, and then one is.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let supervisor = Supervisor::start(spec(&trainer.region, &["--ports", &port.to_string()])).unwrap();
    status_when(&supervisor, "a failure", |s| s.last_error.is_some());
    let e = supervisor.address(&Stop::after(Duration::from_millis(50))).unwrap_err();
    assert_eq!(e.kind(), Kind::Exhausted);
    assert!(e.to_string().contains(&format!("cannot listen on 127.0.0.1, ports {port}")), "{e}");
    let e = supervisor.address(&Stop::after(Duration::from_mins(2))).unwrap_err();
    assert!(matches!(&e, SuperviseError::Refuses { kind: Kind::Exhausted, .. }), "{e}");
    drop(taken);
    status_when(&supervisor, "an agent", |s| s.address.is_some());
    assert_eq!(found(&supervisor).endpoint, format!("http://127.0.0.1:{port}"));
}

#[test]
fn an_agent_that_never_listens_is_killed() {
    let home = home();
    let region = home.path().join("region");
    let spec =
        Spec { listen_within: Duration::from_millis(100), ..shell(&region, "echo hello; exec sleep 1000") };
    let supervisor = Supervisor::start(spec).unwrap();
    let first = status_when(&supervisor, "a process", |s| s.pid.is_some()).pid.unwrap();
    let status = status_when(&supervisor, "another", |s| s.restarts > 0);
    assert!(status.last_error.unwrap().contains("did not listen within 100ms"));
    assert!(!is_alive(first));
    supervisor.stop(Duration::ZERO, &Stop::never()).unwrap();
    let after = supervisor.status().unwrap();
    assert_eq!((after.running, after.pid, after.address), (false, None, None));
    let e = supervisor.address(&Stop::after(PATIENCE)).unwrap_err();
    assert!(matches!(e, SuperviseError::Ended { .. }), "{e}");
}

#[test]
fn an_agent_that_does_not_end_by_itself_is_ended() {
    let home = home();
    let deaf = "trap '' TERM INT; echo; while :; do sleep 0.01; done";
    for (script, patience, stop) in [
        (deaf, Duration::ZERO, Stop::never()),
        // Called off, it does not wait for the hour to pass.
        (deaf, Duration::from_hours(1), Stop::after(Duration::ZERO)),
        ("exec sleep 1000", Duration::ZERO, Stop::never()),
    ] {
        let supervisor = Supervisor::start(shell(&home.path().join("region"), script)).unwrap();
        let pid = status_when(&supervisor, "a process", |s| s.pid.is_some()).pid.unwrap();
        let begun = Instant::now();
        supervisor.stop(patience, &stop).unwrap();
        assert!(begun.elapsed() < PATIENCE / 2 && !is_alive(pid), "{script}");
        supervisor.stop(patience, &stop).unwrap();
    }
}

#[test]
fn an_agent_keeps_the_directory_and_environment_of_its_start() {
    let home = home();
    let script = "echo \"$KEPT ${LEFT_OUT-none} $PWD\" >&2";
    let kept = ("KEPT".into(), Some("kept".into()));
    // Cargo sets it for tests.
    let left_out = ("CARGO_MANIFEST_DIR".into(), None);
    let environment = vec![kept, left_out];
    let script = script.replace("LEFT_OUT", "CARGO_MANIFEST_DIR");
    let spec = Spec { environment, ..shell(&home.path().join("region"), &script) };
    let supervisor = Supervisor::start(spec).unwrap();
    let status = status_when(&supervisor, "an end", |s| s.last_error.is_some());
    let expected = format!("kept none {}", std::env::current_dir().unwrap().display());
    assert!(status.last_error.as_ref().unwrap().contains(&expected), "{status:?}");
}

/// Not a test by itself: a process that supervises, for tests that look at it or kill it.
#[test]
fn supervising_process() {
    let Ok(region) = std::env::var(REGION) else { return };
    let say = |value: Value| {
        println!("\n{value}");
        std::io::stdout().flush().unwrap();
    };
    let count = |what: &str| fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let (threads, descriptors) = (count("task"), count("fd"));
    let supervisor = Supervisor::start(spec(Path::new(&region), &[])).unwrap();
    let here = found(&supervisor);
    say(json!({ "event": "listening", "pid": here.pid, "endpoint": here.endpoint }));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    assert_eq!(line, "stop\n");
    supervisor.stop(PATIENCE, &Stop::never()).unwrap();
    // The thread is joined; the kernel may take a moment to forget it.
    until("no more threads", || (count("task") == threads).then_some(()));
    let left = count("fd") - descriptors;
    drop(supervisor);
    say(json!({ "event": "ended", "left": left, "left_at_last": count("fd") - descriptors }));
}

fn supervising(region: &Path) -> (Process, u32) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "supervise::supervising_process", "--nocapture", "--test-threads=1"]);
    command.env(REGION, region);
    let process = Process::spawn(command);
    let pid = u32::try_from(json_line(&process, "listening")["pid"].as_u64().unwrap()).unwrap();
    (process, pid)
}

/// The test harness says things in between.
fn json_line(process: &Process, event: &str) -> Value {
    until(event, || Some(process.any_line()).filter(|line| line["event"] == event))
}

#[test]
fn a_killed_supervisor_leaves_no_agent() {
    let home = home();
    let mut trainer = Trainer::start(&home.path().join("region"));
    trainer.publish(0);
    let (mut process, agent) = supervising(&trainer.region);
    assert_eq!(agents_of(&trainer.region), [agent]);
    let region = trainer.region.clone();
    // A trainer that is killed with everything it started, and comes back.
    process.kill();
    trainer.process.kill();
    let begun = Instant::now();
    let mut trainer = Trainer::start(&region);
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    until("no agent", || agents_of(&region).is_empty().then_some(()));
    assert!(!region.join("agent.json").exists());
    let (_process, _) = supervising(&region);
    trainer.publish(0);
}

#[test]
fn a_stopped_supervisor_leaves_nothing() {
    let home = home();
    let trainer = Trainer::start(&home.path().join("region"));
    let (mut process, agent) = supervising(&trainer.region);
    process.say("stop");
    let ended = json_line(&process, "ended");
    assert!(!is_alive(agent));
    assert!(!trainer.region.join("agent.json").exists(), "the agent ended in good order");
    // The descriptor that wakes the thread stays until the supervisor is dropped.
    assert_eq!((&ended["left"], &ended["left_at_last"]), (&json!(1), &json!(0)));
}
