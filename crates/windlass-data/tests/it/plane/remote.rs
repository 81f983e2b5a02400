//! A control connection between processes for tests: one line of JSON each way, over a unix socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use windlass_core::digest::BlockSum;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::control::{
    Registered, Registration, TransferAnswer, TransferDone, TransferRequest, VersionInfo,
};
use windlass_data::receiver::{Control, ControlError};
use windlass_data::stop::Stop;

#[derive(Serialize, Deserialize)]
enum Ask {
    Version(Option<(Incarnation, Version)>),
    Manifest,
    Sums(Identity),
    Register(Registration),
    Request(TransferRequest),
    Done(TransferDone),
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Version(VersionInfo),
    Manifest(String),
    Sums(Vec<BlockSum>),
    Registered(Box<Registered>),
    Transfer(TransferAnswer),
    Done,
    No { kind: Kind, message: String },
}

/// Answers for a control connection until dropped.
pub(crate) struct Desk {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Desk {
    pub(crate) fn open(path: &PathBuf, control: Arc<dyn Control>) -> Desk {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut calls: Vec<JoinHandle<()>> = Vec::new();
            while !ended.load(Ordering::SeqCst) {
                let Ok((peer, _)) = listener.accept() else {
                    std::thread::park_timeout(Duration::from_millis(1));
                    calls.retain(|c| !c.is_finished());
                    continue;
                };
                let control = Arc::clone(&control);
                calls.push(std::thread::spawn(move || drop(answer(&peer, &*control))));
            }
            calls.into_iter().for_each(|c| drop(c.join()));
        });
        Desk { stop, thread: Some(thread) }
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

fn answer(mut peer: &UnixStream, control: &dyn Control) -> std::io::Result<()> {
    peer.set_nonblocking(false)?;
    peer.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut line = String::new();
    BufReader::new(peer).read_line(&mut line)?;
    let stop = Stop::after(Duration::from_secs(2));
    let asked = serde_json::from_str(&line)?;
    let answer = match asked {
        Ask::Version(seen) => control.version(seen, &stop).map(Answer::Version),
        Ask::Manifest => control.manifest(&stop).map(|m| Answer::Manifest(m.to_json())),
        Ask::Sums(identity) => control.sums(&identity, &stop).map(Answer::Sums),
        Ask::Register(registration) => {
            control.register(&registration, &stop).map(|r| Answer::Registered(Box::new(r)))
        }
        Ask::Request(request) => control.request(&request, &stop).map(Answer::Transfer),
        Ask::Done(done) => control.done(&done, &stop).map(|()| Answer::Done),
    };
    let answer = answer.unwrap_or_else(|e| Answer::No { kind: e.kind(), message: e.to_string() });
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    peer.write_all(&line)
}

/// Asks at a [`Desk`].
pub(crate) struct Remote(pub(crate) PathBuf);

impl Remote {
    fn ask(&self, what: &'static str, ask: &Ask) -> Result<Answer, ControlError> {
        let lost = |e: std::io::Error| ControlError::Lost {
            peer: self.peer(),
            what,
            why: e.to_string(),
            kind: Kind::PeerLost,
        };
        let call = || {
            let mut peer = UnixStream::connect(&self.0)?;
            peer.set_read_timeout(Some(Duration::from_secs(3)))?;
            let mut line = serde_json::to_vec(ask)?;
            line.push(b'\n');
            peer.write_all(&line)?;
            let mut line = String::new();
            BufReader::new(peer).read_line(&mut line)?;
            Ok(serde_json::from_str(&line)?)
        };
        match call().map_err(lost)? {
            Answer::No { kind, message } => {
                Err(ControlError::Refused { peer: self.peer(), what, kind, message })
            }
            other => Ok(other),
        }
    }

    fn odd<T>(&self, what: &'static str) -> Result<T, ControlError> {
        Err(ControlError::Answer { peer: self.peer(), what, why: "another answer".into() })
    }
}

impl Control for Remote {
    fn peer(&self) -> String {
        self.0.display().to_string()
    }

    fn version(&self, seen: Option<(Incarnation, Version)>, _: &Stop) -> Result<VersionInfo, ControlError> {
        match self.ask("get the version", &Ask::Version(seen))? {
            Answer::Version(info) => Ok(info),
            _ => self.odd("get the version"),
        }
    }

    fn manifest(&self, _: &Stop) -> Result<Manifest, ControlError> {
        match self.ask("get the manifest", &Ask::Manifest)? {
            Answer::Manifest(json) => Manifest::from_json(json.as_bytes()).or_else(|_| self.odd("parse")),
            _ => self.odd("get the manifest"),
        }
    }

    fn sums(&self, identity: &Identity, _: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        match self.ask("get the sums", &Ask::Sums(identity.clone()))? {
            Answer::Sums(sums) => Ok(sums),
            _ => self.odd("get the sums"),
        }
    }

    fn register(&self, registration: &Registration, _: &Stop) -> Result<Registered, ControlError> {
        match self.ask("register", &Ask::Register(registration.clone()))? {
            Answer::Registered(registered) => Ok(*registered),
            _ => self.odd("register"),
        }
    }

    fn request(&self, request: &TransferRequest, _: &Stop) -> Result<TransferAnswer, ControlError> {
        match self.ask("request a transfer", &Ask::Request(request.clone()))? {
            Answer::Transfer(answer) => Ok(answer),
            _ => self.odd("request a transfer"),
        }
    }

    fn done(&self, done: &TransferDone, _: &Stop) -> Result<(), ControlError> {
        self.ask("report a transfer", &Ask::Done(done.clone())).map(drop)
    }
}
