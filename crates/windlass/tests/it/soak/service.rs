//! The processes of the soak: started, stopped, killed and looked at, with what they last said.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};

use crate::soak::trainer::MARK;

/// The lines of a process that are kept to be shown.
const TAIL: usize = 40;
/// What a receiver says when it has succeeded for the first time. Until then a failure may end it: whoever started it is
/// there to read it.
const SUCCESS: [&str; 3] = [r#""event":"joined""#, r#""event":"synced""#, r#""event":"found""#];

/// What a process takes of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    pub(crate) descriptors: usize,
    pub(crate) threads: usize,
    /// Memory of its own; what it maps of regions and images is theirs.
    pub(crate) kib: u64,
}

impl Taken {
    pub(crate) fn of(pid: u32) -> Taken {
        let count = |what| fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count);
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
        let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
        Taken { descriptors: count("fd"), threads: count("task"), kib }
    }
}

type Tail = Arc<Mutex<VecDeque<String>>>;

fn note(tail: &Tail, line: String) {
    let mut tail = tail.lock();
    tail.push_back(line);
    if tail.len() > TAIL {
        tail.pop_front();
    }
}

/// A process that is there in one life after the other.
pub(crate) struct Service {
    pub(crate) name: String,
    command: Box<dyn Fn() -> Command>,
    child: Option<Child>,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    tail: Tail,
    succeeded: Arc<AtomicBool>,
    clock: File,
    clock_path: PathBuf,
    shim: PathBuf,
    /// Seconds that its clock is off.
    pub(crate) offset: i64,
    pub(crate) stopped: Option<Instant>,
    /// Killed; to be started again then.
    pub(crate) down: Option<Instant>,
    pub(crate) lives: u64,
}

impl Service {
    /// Not started yet. Its clock is in a file below `home`.
    pub(crate) fn new(
        name: &str,
        home: &Path,
        shim: &Path,
        command: impl Fn() -> Command + 'static,
    ) -> Service {
        let clock_path = home.join(format!("clock-{name}"));
        let clock = File::create_new(&clock_path).unwrap();
        clock.write_all_at(&0i64.to_ne_bytes(), 0).unwrap();
        Service {
            name: name.to_owned(),
            command: Box::new(command),
            child: None,
            stdin: None,
            lines: channel().1,
            tail: Tail::default(),
            succeeded: Arc::default(),
            clock,
            clock_path,
            shim: shim.to_owned(),
            offset: 0,
            stopped: None,
            down: None,
            lives: 0,
        }
    }

    pub(crate) fn start(&mut self) {
        assert!(self.child.is_none(), "{} is running", self.name);
        self.lives += 1;
        note(&self.tail, format!("-- life {}", self.lives));
        let mut command = (self.command)();
        command
            .env_remove("WINDLASS_TOKEN")
            .env("LD_PRELOAD", &self.shim)
            .env("SOAK_CLOCK", &self.clock_path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (tell, lines) = channel();
        self.succeeded = Arc::default();
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (tail, succeeded) = (Arc::clone(&self.tail), Arc::clone(&self.succeeded));
        thread::spawn(move || listen(BufReader::new(out), &tail, Some((&tell, &succeeded))));
        let tail = Arc::clone(&self.tail);
        thread::spawn(move || listen(BufReader::new(err), &tail, None));
        (self.stdin, self.lines, self.child, self.down) = (child.stdin.take(), lines, Some(child), None);
    }

    /// What it is, with its article.
    pub(crate) fn role(&self) -> &'static str {
        match self.name.split('-').next() {
            Some("trainer") => "a trainer",
            Some("agent") => "an agent",
            Some("controller") => "the controller",
            _ => "a receiver",
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.child.is_some()
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    pub(crate) fn say(&mut self, line: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _ = writeln!(stdin, "{line}");
        }
    }

    /// The next of the lines that are meant for the soak.
    pub(crate) fn hear(&self, most: Duration) -> Option<String> {
        self.lines.recv_timeout(most).ok()
    }

    /// Whether it has done what it is for.
    pub(crate) fn succeeded(&self) -> bool {
        self.succeeded.load(Ordering::SeqCst)
    }

    fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            kill_process(Pid::from_child(child), signal).unwrap();
        }
    }

    pub(crate) fn stop(&mut self, span: Duration) {
        note(&self.tail, format!("-- stopped for {span:?}"));
        self.signal(Signal::STOP);
        self.stopped = Some(Instant::now() + span);
    }

    pub(crate) fn go_on(&mut self) {
        if self.stopped.take().is_some() {
            note(&self.tail, "-- goes on".into());
            self.signal(Signal::CONT);
        }
    }

    /// Killed; `again` says when it is to be started again.
    pub(crate) fn kill(&mut self, again: Instant) {
        note(&self.tail, "-- killed".into());
        self.stopped = None;
        self.stdin = None;
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // What it said last is of no consequence any more.
        self.lines = channel().1;
        self.down = Some(again);
    }

    /// Its exit status, if it has ended by itself.
    pub(crate) fn ended(&mut self) -> Option<String> {
        let status = self.child.as_mut()?.try_wait().unwrap()?;
        self.child = None;
        self.stopped = None;
        note(&self.tail, format!("-- ended: {status}"));
        Some(status.to_string())
    }

    /// Whoever started it is gone: it is to end by itself.
    pub(crate) fn leave(&mut self) {
        note(&self.tail, "-- its parent is gone".into());
        self.stdin = None;
    }

    /// Told to end, by a signal or by the end of its input; how it ended within this time.
    pub(crate) fn end(&mut self, by_input: bool, most: Duration) -> Result<(), String> {
        self.go_on();
        note(&self.tail, "-- told to end".into());
        self.stdin = if by_input { None } else { self.stdin.take() };
        if !by_input {
            self.signal(Signal::TERM);
        }
        let Some(child) = &mut self.child else { return Ok(()) };
        let until = Instant::now() + most;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                self.child = None;
                return if status.success() { Ok(()) } else { Err(format!("it ended with {status}")) };
            }
            if Instant::now() > until {
                return Err(format!("it is still there after {most:?}"));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sets its clock.
    pub(crate) fn jump(&mut self, offset: i64) {
        note(&self.tail, format!("-- its clock is off by {offset} s"));
        self.clock.write_all_at(&offset.to_ne_bytes(), 0).unwrap();
        self.offset = offset;
    }

    pub(crate) fn tail(&self) -> String {
        let lines = self.tail.lock();
        lines.iter().map(|l| format!("    {}\n", l.chars().take(400).collect::<String>())).collect()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill(Instant::now());
        }
    }
}

fn listen(from: impl BufRead, tail: &Tail, to: Option<(&Sender<String>, &AtomicBool)>) {
    for line in from.lines().map_while(Result::ok) {
        if let Some((tell, succeeded)) = to {
            if SUCCESS.iter().any(|s| line.contains(s)) {
                succeeded.store(true, Ordering::SeqCst);
            }
            let meant = line.split_once(MARK).map(|(_, rest)| rest.to_owned());
            let meant = meant.or_else(|| line.contains(r#""event":"listening""#).then(|| line.clone()));
            if let Some(meant) = meant {
                let _ = tell.send(meant);
            }
        }
        note(tail, line);
    }
}
