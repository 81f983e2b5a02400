use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Agent, Config, Exporter, NixlError, Remote};
use crate::conformance::{nixl, skipped};
use crate::shm::{Access, Mapping};

/// How long a test waits for something that should come at once.
const SOON: Duration = Duration::from_secs(20);
const BYTES: usize = 32 << 20;

fn config() -> Option<Config> {
    nixl(&[("engine_config", "TLS=tcp")]).map_err(|what| skipped(&what)).ok()
}

/// A file on tmpfs whose bytes are known.
fn file(bytes: usize) -> File {
    let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
    let pattern: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
    file.write_all(&pattern).unwrap();
    file
}

fn is_pattern(bytes: &[u8]) -> bool {
    bytes.iter().enumerate().all(|(i, b)| *b == (i % 251) as u8)
}

fn destination(agent: &Arc<Agent>, bytes: usize) -> Mapping {
    let mapping = Mapping::map(&file(bytes), bytes as u64, Access::Write).unwrap();
    mapping.copy_in(0, &vec![0xff; bytes]);
    agent.register(&mapping).unwrap();
    mapping
}

/// Reads everything from an address.
fn read_all(remote: &Remote, into: &Mapping, address: u64) -> Result<(), NixlError> {
    let mut read = remote.read(vec![(into.lend(0..into.len()).unwrap(), address)])?;
    let begun = Instant::now();
    while !read.poll()? {
        assert!(begun.elapsed() < SOON, "a read that does not end");
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn memory_is_on_loan_until_its_read_has_ended() {
    let Some(config) = config() else { return };
    let (exporter, agent) = (Exporter::start(&config).unwrap(), Agent::start(&config).unwrap());
    let exported = file(BYTES);
    exporter.export(&exported).unwrap();
    assert!(exporter.find(&file(10), 0).unwrap().is_none(), "of what was not exported nothing is told");
    let (metadata, memory) = exporter.find(&exported, 0).unwrap().unwrap();
    assert_eq!(memory.bytes, BYTES as u64);
    let into = destination(&agent, BYTES);
    let remote = agent.meet(&metadata).unwrap();
    let mut read = remote.read(vec![(into.lend(0..BYTES as u64).unwrap(), memory.address)]).unwrap();
    let begun = Instant::now();
    while !read.poll().unwrap() {
        assert!(begun.elapsed() < SOON && into.lend(100..101).is_err());
    }
    assert!(into.lend(100..101).is_err(), "until the read is dropped");
    drop(read);
    assert!(is_pattern(&into.lend(0..BYTES as u64).unwrap()));
    // One that is given up halfway takes its agent with it, or has ended by then: either way the memory is free.
    drop(remote.read(vec![(into.lend(0..BYTES as u64).unwrap(), memory.address)]).unwrap());
    assert!(into.lend(0..BYTES as u64).is_ok());
}

#[test]
fn withdrawn_memory_reads_as_zeros() {
    let Some(config) = config() else { return };
    let (exporter, agent) = (Exporter::start(&config).unwrap(), Agent::start(&config).unwrap());
    let exported = file(1 << 20);
    exporter.export(&exported).unwrap();
    let (metadata, memory) = exporter.find(&exported, 0).unwrap().unwrap();
    let remote = agent.meet(&metadata).unwrap();
    exporter.withdraw(&exported);
    assert!(exporter.find(&exported, 0).unwrap().is_none());
    // A peer that was stalled meanwhile still has the address.
    let into = destination(&agent, 1 << 20);
    match read_all(&remote, &into, memory.address) {
        Ok(()) => assert!(into.lend(0..1 << 20).unwrap().iter().all(|b| *b == 0)),
        Err(error) => assert!(matches!(error, NixlError::Read { .. }), "{error}"),
    }
    assert!(exporter.agent_is_open(), "the exporter's process serves on");
}

const CHILD: &str = "WINDLASS_TEST_NIXL_EXPORTER";

/// Not a test by itself: a process that exports a file until it is killed.
#[test]
fn exporting_process() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let exporter = Exporter::start(&config().unwrap()).unwrap();
    let exported = file(BYTES);
    exporter.export(&exported).unwrap();
    let (metadata, memory) = exporter.find(&exported, 0).unwrap().unwrap();
    let hex: String = metadata.iter().map(|b| format!("{b:02x}")).collect();
    println!("@{} {hex}", memory.address);
    // Ends with the parent at the latest.
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

#[test]
fn a_read_from_a_killed_process_ends() {
    let Some(config) = config() else { return };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "nixl::tests::exporting_process", "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let told = lines.find_map(|line| line.unwrap().split_once('@').map(|(_, t)| t.to_owned())).unwrap();
    let (address, metadata) = told.split_once(' ').unwrap();
    let (address, metadata) = (address.parse().unwrap(), unhex(metadata));
    let agent = Agent::start(&config).unwrap();
    let into = destination(&agent, BYTES);
    let remote = agent.meet(&metadata).unwrap();
    read_all(&remote, &into, address).unwrap();
    assert!(is_pattern(&into.lend(0..BYTES as u64).unwrap()), "of a process that lives");

    // Stopped first, so that the read is under way for certain when the process dies.
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let mut read = remote.read(vec![(into.lend(0..BYTES as u64).unwrap(), address)]).unwrap();
    assert!(!read.poll().unwrap(), "a stopped process does not answer");
    child.kill().unwrap();
    child.wait().unwrap();
    let killed = Instant::now();
    let error = loop {
        match read.poll() {
            Ok(done) => assert!(!done && killed.elapsed() < SOON, "{done} after {:?}", killed.elapsed()),
            Err(error) => break error,
        }
        std::thread::yield_now();
    };
    assert!(matches!(error, NixlError::Read { .. }), "{error}");
    assert!(!agent.is_open() && into.lend(0..1).is_err(), "the loan is that of the read");
    drop(read);
    assert!(into.lend(0..BYTES as u64).is_ok());
    assert!(matches!(agent.metadata(), Err(NixlError::Closed)));
}

fn descriptors_and_threads() -> (usize, usize) {
    let count = |dir| std::fs::read_dir(dir).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

#[test]
#[ignore = "run by agents_leave_no_thread_and_no_descriptor"]
fn many_agents_in_a_process_of_their_own() {
    let Some(config) = config() else { return };
    let once = || {
        let (exporter, agent) = (Exporter::start(&config).unwrap(), Agent::start(&config).unwrap());
        let exported = file(1 << 20);
        exporter.export(&exported).unwrap();
        let (metadata, memory) = exporter.find(&exported, 0).unwrap().unwrap();
        let into = destination(&agent, 1 << 20);
        read_all(&agent.meet(&metadata).unwrap(), &into, memory.address).unwrap();
        agent.destroy();
    };
    // What the libraries open for the life of the process.
    once();
    let before = descriptors_and_threads();
    (0..3).for_each(|_| once());
    assert_eq!(descriptors_and_threads(), before);
}

#[test]
fn agents_leave_no_thread_and_no_descriptor() {
    let run = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "nixl::tests::many_agents_in_a_process_of_their_own",
            "--ignored",
            "--test-threads=1",
        ])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && text.contains("1 passed"), "{text}");
}
