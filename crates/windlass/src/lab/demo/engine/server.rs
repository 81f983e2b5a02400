//! The real server of the demo: how it is started on this machine, and what it is asked.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, SocketAddrAny, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt,
};
use serde::Deserialize;
use serde_json::json;
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_core::identity::Version;
use windlass_data::stop::{Stop, Stopped};

use super::{MODEL, Ready};
use crate::console::Session;
use crate::error::Error;
use crate::lab::demo::child::Child;
use crate::service::client::{Client, Request};
use crate::service::engines::error::Stage;
use crate::service::engines::http::Http;
use crate::service::engines::sglang::Sglang;
use crate::service::engines::vllm::Plugin;
use crate::service::engines::{Dialect, Label};

/// Ends the server with the demo.
const SERVE: &str = include_str!("serve.py");
/// How long a server may take to start, imports and kernels included.
const START: Duration = Duration::from_secs(600);
/// How long it may take to end: longer than `serve.py` waits for it.
const END: Duration = Duration::from_secs(15);
/// Timeout of one answer.
const ANSWER: Duration = Duration::from_secs(60);
/// How often it is asked whether it is ready.
const GLANCE: Duration = Duration::from_millis(200);

/// What is asked of the server, and what the trainer's own model says.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Question {
    pub(super) prompt: String,
    pub(super) max_tokens: u32,
    pub(super) own: String,
    pub(super) loss: f64,
}

#[derive(Deserialize)]
struct Completions {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    text: String,
}

/// A server of an engine, and the processes that it starts.
pub(super) struct Server {
    pub(super) process: Child,
    dialect: Dialect,
    http: Http,
    /// Keeps the port.
    _port: OwnedFd,
}

impl Server {
    /// Starts a server on the checkpoint that the trainer has written.
    pub(super) fn start(
        dialect: Dialect,
        python: &Path,
        home: &Path,
        (token_file, token): (&Path, &Token),
        ready: &Ready,
    ) -> Result<Server, Error> {
        let wrapper = home.join("serve.py");
        std::fs::write(&wrapper, SERVE).map_err(Error::io("write", &wrapper))?;
        let (held, port) = free_port().map_err(|e| Error::Io {
            action: "bind",
            path: "a port of 127.0.0.1".into(),
            source: e.into(),
        })?;
        let mut command = Command::new(python);
        command.arg(&wrapper).arg(python).args(program(dialect)).arg(home.join(MODEL));
        command.args(["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--dtype", &ready.dtype]).args(options(dialect, ready.gpu));
        for (name, value) in variables(dialect, ready.gpu) {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        command.env("WINDLASS_TOKEN_FILE", token_file).env("VLLM_PLUGINS", plugins());
        // Secrets of other servers.
        command.env_remove("WINDLASS_TOKEN").env_remove("VLLM_API_KEY");
        command.env("PATH", path_with(python));
        let url = format!("http://127.0.0.1:{port}");
        let http = Http::new(format!("{}={url}", dialect.as_str()), &url, Some(token.clone()));
        let process = Child::group("server", home, command, END)?;
        Ok(Server { process, dialect, http, _port: held })
    }

    /// As `windlass receive --engine` takes it.
    pub(super) fn name(&self) -> &str {
        &self.http.engine
    }

    /// Where it listens.
    pub(super) fn url(&self) -> &str {
        &self.http.url
    }

    /// Waits until it serves.
    pub(super) fn wait_ready(&mut self, session: &Session) -> Result<(), Error> {
        let (stop, client) = (session.cancel().with_timeout(START), Client::default());
        let (bar, begun) = (session.steps(1), Instant::now());
        let url = format!("{}/health", self.http.url);
        loop {
            self.process.check()?;
            let request = Request::<()> {
                url: &url,
                bearer: None,
                body: None,
                timeout: Duration::from_secs(5),
                most: 1 << 16,
            };
            if matches!(client.send(request, &stop), Ok((200, _))) {
                return Ok(());
            }
            bar.say(&format!("{} starts: {} s", self.dialect.as_str(), begun.elapsed().as_secs()));
            match stop.check() {
                Ok(()) => std::thread::sleep(GLANCE),
                Err(Stopped::Cancelled) => return Err(Error::Cancelled),
                Err(Stopped::Deadline) => {
                    let what = format!("did not start within {} s", START.as_secs());
                    return Err(self.process.failed(Kind::Timeout, what));
                }
            }
        }
    }

    /// Its greedy answer.
    pub(super) fn ask(&self, question: &Question, cancel: &Stop) -> Result<String, Error> {
        let body = json!({
            "model": MODEL, "prompt": question.prompt, "max_tokens": question.max_tokens, "temperature": 0,
            "ignore_eos": true,
        });
        let stop = cancel.with_timeout(ANSWER);
        let answer: Completions = self
            .http
            .post(Stage::Ask, "/v1/completions", &body, ANSWER, &stop)
            .map_err(|e| self.process.failed(e.kind(), e.to_string()))?;
        Ok(answer.choices.into_iter().map(|choice| choice.text).collect())
    }

    /// The version that it says it has.
    pub(super) fn version(&self, cancel: &Stop) -> Result<Option<Version>, Error> {
        let stop = cancel.with_timeout(ANSWER);
        let label = match self.dialect {
            Dialect::Vllm => {
                let plugin = Plugin::new(self.http.clone());
                plugin.status(&stop).map(|status| status.and_then(|s| s.weight_version))
            }
            Dialect::Sglang => Sglang::info(&self.http.with_key(None), &stop).map(|info| info.weight_version),
        };
        let label = label.map_err(|e| self.process.failed(e.kind(), e.to_string()))?;
        Ok(label.and_then(|text| text.parse().ok()).map(|label: Label| label.version))
    }
}

/// What the interpreter runs, up to the checkpoint.
fn program(dialect: Dialect) -> &'static [&'static str] {
    match dialect {
        Dialect::Vllm => &["-m", "vllm.entrypoints.cli.main", "serve"],
        Dialect::Sglang => &["-m", "sglang.launch_server", "--model-path"],
    }
}

/// A small server, which starts quickly and leaves room to others.
fn options(dialect: Dialect, gpu: bool) -> Vec<&'static str> {
    match (dialect, gpu) {
        (Dialect::Vllm, gpu) => {
            let mut words = vec!["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"];
            // On a CPU no worker in a process of its own: two processes that wait for each other spin.
            let device = ["--distributed-executor-backend", "uni"];
            words.extend(if gpu { ["--gpu-memory-utilization", "0.2"] } else { device });
            words
        }
        (Dialect::Sglang, gpu) => {
            let mut words = vec!["--custom-weight-loader", "windlass.sglang.custom.load"];
            words.extend(["--max-total-tokens", "4096"]);
            if gpu {
                words.extend(["--mem-fraction-static", "0.2"]);
            } else {
                words.extend(["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]);
                words.extend(["--disable-overlap-schedule", "--mem-fraction-static", "0.4"]);
            }
            words
        }
    }
}

/// Variables that are set unless the user has set them.
fn variables(dialect: Dialect, gpu: bool) -> Vec<(&'static str, &'static str)> {
    let mut all = vec![("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")];
    if !gpu {
        // Threads that wait for each other at every operation are slow on busy cores, and nothing is worth compiling.
        all.extend([("OMP_NUM_THREADS", "1"), ("TORCHDYNAMO_DISABLE", "1")]);
    }
    match (dialect, gpu) {
        (Dialect::Vllm, false) => {
            all.extend([("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")]);
        }
        (Dialect::Sglang, false) => {
            all.extend([("SGLANG_USE_CPU_ENGINE", "1"), ("SGLANG_CPU_OMP_THREADS_BIND", "0")]);
            // There is no NCCL to load.
            all.push(("SGLANG_NCCL_SO_PATH", "/nonexistent"));
        }
        (Dialect::Vllm | Dialect::Sglang, true) => {}
    }
    all
}

/// vLLM's allow-list of plugins, with ours.
fn plugins() -> OsString {
    let mut list = std::env::var_os("VLLM_PLUGINS").filter(|l| !l.is_empty()).unwrap_or_default();
    list.push(if list.is_empty() { "windlass" } else { ",windlass" });
    list
}

/// The search path as in the interpreter's activated environment.
fn path_with(python: &Path) -> OsString {
    let mut path = python.parent().unwrap_or(Path::new("")).as_os_str().to_owned();
    if !path.is_empty() {
        path.push(":");
    }
    path.push(std::env::var_os("PATH").unwrap_or_default());
    path
}

/// A port that no process listens on. The system gives it to no other process while the socket lives; a server that asks for it can
/// bind it, because both reuse addresses.
fn free_port() -> rustix::io::Result<(OwnedFd, u16)> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    let address: SocketAddrAny = getsockname(&socket)?;
    let address = SocketAddrV4::try_from(address)?;
    Ok((socket, address.port()))
}
