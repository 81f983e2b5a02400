//! Real processes: a trainer's rank, agents and receivers, and requests to them as bytes on a socket.
#![allow(dead_code, unreachable_pub)]

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// How long anything may take on a machine that does a lot else.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// A running command whose standard output is lines of JSON.
pub struct Process {
    child: Child,
    pub stdin: Option<ChildStdin>,
    lines: Receiver<Value>,
}

impl Process {
    pub fn start<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
        command.args(args).arg("--json").env_remove("WINDLASS_TOKEN");
        Process::spawn(command)
    }

    pub fn spawn(mut command: Command) -> Process {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (tell, lines) = channel();
        let out = child.stdout.take().unwrap();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                // Every line is an object, or the next wait shows the one that is not.
                let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
                if tell.send(value).is_err() {
                    break;
                }
            }
        });
        let stdin = child.stdin.take();
        Process { child, stdin, lines }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line.
    pub fn line(&self) -> Value {
        let line = self.lines.recv_timeout(PATIENCE).expect("another line");
        assert!(line.is_object(), "not JSON: {line}");
        line
    }

    /// The next line, if one comes within this time.
    pub fn line_within(&self, most: Duration) -> Option<Value> {
        self.lines.recv_timeout(most).ok()
    }

    /// The next line, of whatever form.
    pub fn any_line(&self) -> Value {
        self.lines.recv_timeout(PATIENCE).expect("another line")
    }

    /// The next line with this event; none in between may be an error.
    pub fn event(&self, name: &str) -> Value {
        loop {
            let line = self.line();
            if line["event"] == name {
                return line;
            }
            assert!(line.get("error").is_none() || line["event"] == "waiting", "{line}");
        }
    }

    /// All lines until the process ends.
    pub fn rest(&self) -> Vec<Value> {
        let mut all = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            assert!(line.is_object(), "not JSON: {line}");
            all.push(line);
        }
        all
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// The exit code; fails if it takes longer.
    pub fn ends_within(&mut self, most: Duration) -> i32 {
        let until = Instant::now() + most;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(Instant::now() < until, "still running after {most:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A trainer with one rank.
pub struct Trainer {
    pub process: Process,
    pub region: PathBuf,
}

impl Trainer {
    pub fn start(region: &Path) -> Trainer {
        Trainer::named(region, "demo")
    }

    pub fn named(region: &Path, model_id: &str) -> Trainer {
        let args = ["demo-rank", "--rank=0", "--ranks=1", "--model-bytes=4Mi"].map(String::from);
        let more = [format!("--region={}", region.display()), format!("--model-id={model_id}")];
        let process = Process::start(args.into_iter().chain(more));
        process.event("ready");
        Trainer { process, region: region.to_owned() }
    }

    pub fn publish(&mut self, version: u32) {
        self.process.say(&format!("train {version}"));
        self.process.say(&format!("offload {version}"));
        self.process.event("committed");
    }
}

/// What came back for a request.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The message of an error in the form that all errors have.
    pub fn error(&self, status: u16, kind: &str) -> String {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        let json = self.json();
        assert_eq!(json["ok"], false, "{json}");
        assert_eq!(json["error"]["kind"], kind, "{json}");
        assert!(json["error"]["advice"].is_string(), "{json}");
        json["error"]["message"].as_str().unwrap().to_owned()
    }
}

/// An agent and how to talk to it.
pub struct Agent {
    pub process: Process,
    pub endpoint: String,
    pub data_port: u16,
    pub token: String,
}

impl Agent {
    pub fn start(region: &Path, more: &[&str]) -> Agent {
        let region_arg = format!("--region={}", region.display());
        Agent::of(Process::start(["agent", &region_arg].iter().chain(more)))
    }

    /// The agent that a process is, once it listens.
    pub fn of(process: Process) -> Agent {
        let listening = process.event("listening");
        let endpoint = listening["endpoint"].as_str().unwrap().to_owned();
        let data_port = listening["data_port"].as_u64().unwrap() as u16;
        let token = std::fs::read_to_string(listening["token_file"].as_str().unwrap()).unwrap();
        assert!(!listening.to_string().contains(&token), "the token is told to nobody");
        Agent { process, endpoint, data_port, token }
    }

    pub fn port(&self) -> u16 {
        self.endpoint.rsplit(':').next().unwrap().parse().unwrap()
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port())).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A request with these lines in its head, and the connection it went out on.
    pub fn send(&self, line: &str, headers: &str, body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        let head = format!("{line} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n");
        stream.write_all(format!("{head}{headers}\r\n").as_bytes()).unwrap();
        // Who refuses a request need not read all of it.
        let _ = stream.write_all(body);
        stream
    }

    pub fn request(&self, line: &str, headers: &str, body: &[u8]) -> Answer {
        answer(self.send(line, headers, body))
    }

    pub fn bearer(&self) -> String {
        format!("authorization: Bearer {}\r\n", self.token)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request(&format!("GET {path}"), &self.bearer(), b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        let headers = format!("{}content-type: application/json\r\n", self.bearer());
        self.request(&format!("POST {path}"), &headers, body.to_string().as_bytes())
    }

    /// Waits until a version is sealed; what is then served.
    pub fn sealed(&self, version: u64) -> Value {
        let until = Instant::now() + PATIENCE;
        loop {
            let served = self.get("/get_version").json();
            if served["version"].as_u64() >= Some(version) {
                return served;
            }
            assert!(Instant::now() < until, "{served}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Reads an answer to the end of its connection.
pub fn answer(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    let read = stream.read_to_end(&mut bytes);
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no answer: {read:?} {}", String::from_utf8_lossy(&bytes)));
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head, body: bytes[end + 4..].to_vec() }
}

/// The processes whose command line mentions a path.
pub fn processes_about(path: &Path) -> Vec<(u32, String)> {
    let wanted = path.to_str().unwrap();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let Ok(line) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains(wanted) && pid != std::process::id() {
            found.push((pid, line));
        }
    }
    found
}

/// Runs an ignored test of this file in a process of its own, which a test needs that counts what its process has open. Passes its
/// output on line by line.
pub fn in_a_process_of_its_own(test: &str) {
    let (output, input) = std::io::pipe().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).stdin(Stdio::null());
    command.stdout(input.try_clone().unwrap()).stderr(input);
    let mut child = command.spawn().unwrap();
    // It holds the ends for writing, and would be waited for.
    drop(command);
    let mut passed = false;
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        passed |= line.starts_with("test result: ok. 1 passed");
        println!("{line}");
    }
    assert!(child.wait().unwrap().success() && passed, "{test} failed; its output is above");
}
