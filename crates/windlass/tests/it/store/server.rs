//! A real S3 server, and a proxy in front of it that kills a process when it sends a certain request.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};

use crate::process::{Agent, PATIENCE, Process};

pub(super) const KEY: &str = "AKIAWINDLASSTESTS";
pub(super) const SECRET: &str = "not-a-real-secret";

/// The S3 server of the package moto, in a process of its own.
pub(super) struct Moto {
    child: Child,
    pub(super) port: u16,
}

impl Moto {
    pub(super) fn start(home: &Path) -> Moto {
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/moto_server");
        let program = std::env::var_os("WINDLASS_MOTO").map_or(own, PathBuf::from);
        // Free now, and hardly taken by another process before the server has it.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = fs::File::create(home.join("moto.log")).unwrap();
        let child = Command::new(&program)
            .args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|e| {
                panic!("{}: {e}; run `make venv`, or name one by WINDLASS_MOTO", program.display())
            });
        let moto = Moto { child, port };
        let until = Instant::now() + PATIENCE * 3;
        while !moto.makes_bucket() {
            assert!(Instant::now() < until, "{}", fs::read_to_string(home.join("moto.log")).unwrap());
            std::thread::yield_now();
        }
        moto
    }

    fn makes_bucket(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let head = "PUT /bucket HTTP/1.1\r\nhost: s3.amazonaws.com\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        let mut answer = String::new();
        stream.write_all(head.as_bytes()).is_ok()
            && stream.read_to_string(&mut answer).is_ok()
            && answer.split(' ').nth(1) == Some("200")
    }

    pub(super) fn command<S: AsRef<std::ffi::OsStr>>(
        port: u16,
        args: impl IntoIterator<Item = S>,
    ) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
        command.args(args).arg("--json").env_remove("WINDLASS_TOKEN");
        command.env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}"));
        command
            .env("AWS_ACCESS_KEY_ID", KEY)
            .env("AWS_SECRET_ACCESS_KEY", SECRET)
            .env("AWS_REGION", "us-east-1");
        Process::spawn(command)
    }

    pub(super) fn receive(&self, url: &str, dir: &Path) -> Process {
        fs::create_dir_all(dir).unwrap();
        Moto::command(
            self.port,
            ["receive".into(), format!("--from={url}"), format!("--dir={}", dir.display())],
        )
    }

    pub(super) fn agent(&self, region: &Path, url: &str) -> Agent {
        Moto::agent_by(self.port, region, url)
    }

    /// An agent whose requests go to another port.
    pub(super) fn agent_by(port: u16, region: &Path, url: &str) -> Agent {
        let args = ["agent".into(), format!("--region={}", region.display()), format!("--store={url}")];
        let process = Moto::command(port, args.into_iter().chain(["--store-part-bytes=5Mi".into()]));
        Agent::of(process)
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What is to be killed when a request comes: a part of its path, and the process.
type Trap = Arc<Mutex<Option<(String, u32)>>>;

/// Passes requests on, and kills their sender before one of them arrives.
pub(super) struct Proxy {
    pub(super) port: u16,
    trap: Trap,
}

impl Proxy {
    pub(super) fn start(to: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, trap) = (listener.local_addr().unwrap().port(), Trap::default());
        let shared = Arc::clone(&trap);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let trap = Arc::clone(&shared);
                std::thread::spawn(move || pass(stream, to, &trap));
            }
        });
        Proxy { port, trap }
    }

    pub(super) fn kill_at(&self, path: &str, pid: u32) {
        *self.trap.lock() = Some((path.to_owned(), pid));
    }
}

/// Passes one connection on, request by request.
fn pass(mut from: TcpStream, port: u16, trap: &Trap) -> Option<()> {
    let mut to = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let mut back = to.try_clone().ok()?;
    let mut out = from.try_clone().ok()?;
    std::thread::spawn(move || std::io::copy(&mut back, &mut out));
    loop {
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") {
            from.read_exact(&mut byte).ok()?;
            head.push(byte[0]);
        }
        let text = String::from_utf8_lossy(&head).to_lowercase();
        let line = text.lines().next().unwrap_or_default();
        let mut set = trap.lock();
        if let Some((_, pid)) =
            set.take_if(|(path, _)| line.starts_with("put") && line.contains(path.as_str()))
        {
            kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
            return None;
        }
        drop(set);
        to.write_all(&head).ok()?;
        let length =
            text.lines().find_map(|l| l.strip_prefix("content-length: ")?.trim().parse::<u64>().ok());
        std::io::copy(&mut (&from).take(length.unwrap_or(0)), &mut to).ok()?;
    }
}
