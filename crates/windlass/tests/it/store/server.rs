//! The stores that the tests run against: a directory, real servers, and a proxy in front of one that kills a process when it
//! sends a certain request.

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
/// The account that Azurite has, with the key that its documentation gives.
pub(super) const ACCOUNT: &str = "devstoreaccount1";
pub(super) const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
/// Everything is allowed until 2100: signed with that key.
pub(super) const SAS: &str = "sv=2019-12-12&ss=b&srt=sco&sp=rwdlac&se=2100-01-01T00:00:00Z\
                              &sig=6Px4DBl9EbhM9UYKYthc2apX3i0oLhrUr2ObbvoSsGs%3D";

/// What keeps the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Directory,
    /// The S3 server of the package moto.
    S3,
    /// Azurite.
    Azure,
}

impl Kind {
    pub(super) const ALL: [Kind; 3] = [Kind::Directory, Kind::S3, Kind::Azure];
    pub(super) const SERVERS: [Kind; 2] = [Kind::S3, Kind::Azure];
}

/// A store, with the process that serves it.
pub(super) struct Store {
    pub(super) kind: Kind,
    /// Its directory, and that of a server's log and objects.
    home: PathBuf,
    pub(super) port: u16,
    server: Option<Child>,
}

impl Store {
    /// Starts it in a directory of its own.
    pub(super) fn start(kind: Kind, home: &Path) -> Store {
        let home = home.join(format!("store-{kind:?}"));
        fs::create_dir(&home).unwrap();
        // Free now, and hardly taken by another process before the server has it.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut store = Store { kind, home, port, server: None };
        let (variable, program, make, mut args) = match kind {
            Kind::Directory => return store,
            Kind::S3 => ("WINDLASS_MOTO", ".venv/bin/moto_server", "venv", vec!["-H", "127.0.0.1", "-p"]),
            Kind::Azure => {
                let args = vec!["--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort"];
                ("WINDLASS_AZURITE", "scripts/azurite.sh", ".tools/azurite/ready", args)
            }
        };
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(program);
        let program = std::env::var_os(variable).map_or(own, PathBuf::from);
        let number = port.to_string();
        args.push(&number);
        let log = store.home.join("log");
        let server = Command::new(&program)
            .args(args)
            // Where Azurite keeps its objects.
            .current_dir(&store.home)
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap_or_else(|e| {
                panic!("{}: {e}; run `make {make}`, or name one by {variable}", program.display())
            });
        store.server = Some(server);
        let until = Instant::now() + PATIENCE * 3;
        while !store.makes_bucket() {
            let ended = store.server.as_mut().unwrap().try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < until,
                "{}: {ended:?} {}",
                program.display(),
                fs::read_to_string(&log).unwrap()
            );
            std::thread::yield_now();
        }
        store
    }

    /// The URL of something in the store.
    pub(super) fn url(&self, path: &str) -> String {
        match self.kind {
            Kind::Directory => format!("file://{}/{path}", self.home.display()),
            Kind::S3 => format!("s3://bucket/{path}"),
            Kind::Azure => format!("az://bucket/{path}"),
        }
    }

    fn makes_bucket(&self) -> bool {
        let query = if self.kind == Kind::Azure { "restype=container" } else { "" };
        matches!(self.ask("PUT", "bucket", query, b""), Some(200 | 201))
    }

    /// Sends a request that is not Windlass's. The status of the answer.
    fn ask(&self, method: &str, path: &str, query: &str, body: &[u8]) -> Option<u16> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let (path, host) = match self.kind {
            Kind::Directory => return None,
            Kind::S3 => (format!("/{path}?{query}"), "s3.amazonaws.com"),
            Kind::Azure => (format!("/{ACCOUNT}/{path}?{query}&{SAS}"), "127.0.0.1"),
        };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\nx-ms-blob-type: BlockBlob\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        let mut answer = Vec::new();
        stream.write_all(&[head.as_bytes(), body].concat()).ok()?;
        stream.read_to_end(&mut answer).ok()?;
        String::from_utf8_lossy(&answer).split(' ').nth(1)?.parse().ok()
    }

    /// Writes an object as no publisher does.
    pub(super) fn put(&self, path: &str, body: &[u8]) {
        if self.kind == Kind::Directory {
            fs::write(self.home.join(path), body).unwrap();
        } else {
            let status = self.ask("PUT", &format!("bucket/{path}"), "", body);
            assert!(matches!(status, Some(200 | 201)), "{status:?}");
        }
    }

    /// A command with the credentials and the address of the store in its environment.
    pub(super) fn prepared<S: AsRef<std::ffi::OsStr>>(
        &self,
        port: u16,
        args: impl IntoIterator<Item = S>,
    ) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
        command.args(args).arg("--json").env_remove("WINDLASS_TOKEN");
        match self.kind {
            Kind::Directory => {}
            Kind::S3 => {
                command.env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}"));
                command.env("AWS_ACCESS_KEY_ID", KEY).env("AWS_SECRET_ACCESS_KEY", SECRET);
                command.env("AWS_REGION", "us-east-1");
            }
            Kind::Azure => {
                command.env("AZURE_STORAGE_ENDPOINT", format!("http://127.0.0.1:{port}/{ACCOUNT}"));
                command.env("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT);
                command.env("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY);
            }
        }
        command
    }

    pub(super) fn command<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Process {
        Process::spawn(self.prepared(self.port, args))
    }

    /// A command whose requests go to another port.
    pub(super) fn command_by<S: AsRef<std::ffi::OsStr>>(
        &self,
        port: u16,
        args: impl IntoIterator<Item = S>,
    ) -> Process {
        Process::spawn(self.prepared(port, args))
    }

    pub(super) fn receive(&self, url: &str, dir: &Path, more: &[&str]) -> Process {
        fs::create_dir_all(dir).unwrap();
        let args = ["receive".into(), format!("--from={url}"), format!("--dir={}", dir.display())];
        self.command(args.into_iter().chain(more.iter().map(ToString::to_string)))
    }

    pub(super) fn agent(&self, region: &Path, url: &str, more: &[&str]) -> Agent {
        self.agent_by(self.port, region, url, more)
    }

    /// An agent whose requests go to another port.
    pub(super) fn agent_by(&self, port: u16, region: &Path, url: &str, more: &[&str]) -> Agent {
        let own = ["agent".into(), format!("--region={}", region.display()), format!("--store={url}")];
        let more = ["--store-part-bytes=5Mi"].iter().chain(more).map(ToString::to_string);
        Agent::of(self.command_by(port, own.into_iter().chain(more)))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
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
        Proxy::with(to, false)
    }

    /// Compares etags without their quotes, as some gateways of Ceph do.
    pub(super) fn without_quotes(to: u16) -> Proxy {
        Proxy::with(to, true)
    }

    fn with(to: u16, bare: bool) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, trap) = (listener.local_addr().unwrap().port(), Trap::default());
        let shared = Arc::clone(&trap);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let trap = Arc::clone(&shared);
                std::thread::spawn(move || pass(stream, to, bare, &trap));
            }
        });
        Proxy { port, trap }
    }

    pub(super) fn kill_at(&self, path: &str, pid: u32) {
        *self.trap.lock() = Some((path.to_owned(), pid));
    }
}

/// Passes one connection on, request by request.
fn pass(mut from: TcpStream, port: u16, bare: bool, trap: &Trap) -> Option<()> {
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
        if bare && let Some(tag) = text.lines().find_map(|l| l.strip_prefix("if-match: ")) {
            let known = if tag.starts_with('"') { "\"another\"" } else { &format!("\"{tag}\"") };
            head = String::from_utf8_lossy(&head).replace(tag, known).into_bytes();
        }
        to.write_all(&head).ok()?;
        let length =
            text.lines().find_map(|l| l.strip_prefix("content-length: ")?.trim().parse::<u64>().ok());
        std::io::copy(&mut (&from).take(length.unwrap_or(0)), &mut to).ok()?;
    }
}
