//! Agents: what is registered, who is reached, which reads are under way.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use windlass_core::wire::{MAX_METADATA, Memory};

use super::error::NixlError;
use super::library::{Nixl, Raw, Request};
use super::{Config, REST};
use crate::shm::{Access, Loan, Mapping};

/// How long a read that its caller gave up may take to end before its agent is destroyed.
const GRACE: Duration = Duration::from_millis(500);
/// How often it is looked at meanwhile.
const NAP: Duration = Duration::from_micros(200);

/// One agent of NIXL. It can be destroyed while others hold it; whatever they ask of it is then [`NixlError::Closed`].
pub struct Agent {
    name: String,
    release: String,
    raw: RwLock<Option<Raw>>,
    /// How often each peer is in use.
    peers: Mutex<BTreeMap<String, usize>>,
    /// By address and length.
    registered: Mutex<BTreeMap<(usize, usize), Weak<Registration>>>,
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("name", &self.name)
            .field("release", &self.release)
            .finish_non_exhaustive()
    }
}

impl Agent {
    /// Opens the library and starts UCX. Takes about half a second.
    pub fn start(config: &Config) -> Result<Arc<Agent>, NixlError> {
        let mut random = [0; 8];
        // A name that two agents share would make one of them unreachable, no more.
        let _ = getrandom::fill(&mut random);
        let name = format!("windlass-{}-{:016x}", std::process::id(), u64::from_le_bytes(random));
        let nixl = Nixl::open(config.library.as_deref())?;
        let raw = Raw::create(nixl, &name, &config.params)?;
        let release = raw.release().to_owned();
        tracing::info!(library = %raw.path().display(), release, "NIXL is ready");
        Ok(Arc::new(Agent {
            name,
            release,
            raw: RwLock::new(Some(raw)),
            peers: Mutex::default(),
            registered: Mutex::default(),
        }))
    }

    /// The package and release of its library.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Whether it was not destroyed.
    pub fn is_open(&self) -> bool {
        self.guard().is_some()
    }

    fn guard(&self) -> RwLockReadGuard<'_, Option<Raw>> {
        self.raw.read()
    }

    fn with<T>(&self, call: impl FnOnce(&Raw) -> Result<T, NixlError>) -> Result<T, NixlError> {
        call(self.guard().as_ref().ok_or(NixlError::Closed)?)
    }

    /// Ends its threads, its connections and every read. Returns when none of them can touch memory any more.
    pub fn destroy(&self) {
        drop(self.raw.write().take());
    }

    /// Registers a mapping until it is unmapped, unless it is registered.
    pub fn register(self: &Arc<Self>, mapping: &Mapping) -> Result<(), NixlError> {
        let key = (mapping.address().expose_provenance(), mapping.len() as usize);
        let mut registered = self.registered.lock();
        registered.retain(|_, r| r.strong_count() > 0);
        if key.1 == 0 || registered.contains_key(&key) {
            return Ok(());
        }
        self.with(|raw| raw.register(key.0, key.1))?;
        let registration = Arc::new(Registration { agent: Arc::downgrade(self), key });
        registered.insert(key, Arc::downgrade(&registration));
        mapping.pin(registration as Arc<dyn Any + Send + Sync>);
        Ok(())
    }

    /// What others need to reach it.
    pub fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        let metadata = self.with(Raw::metadata)?;
        let (len, max) = (metadata.len(), MAX_METADATA as usize);
        if len > max {
            return Err(NixlError::Metadata { metadata: len, max });
        }
        Ok(metadata)
    }

    /// Takes a peer's metadata. The peer is forgotten when the last [`Remote`] of it is dropped.
    pub fn meet(self: &Arc<Self>, metadata: &[u8]) -> Result<Remote, NixlError> {
        let mut peers = self.peers.lock();
        let name = self.with(|raw| raw.meet(metadata))?;
        *peers.entry(name.clone()).or_default() += 1;
        Ok(Remote { agent: Arc::clone(self), name })
    }
}

/// Memory that is registered.
struct Registration {
    agent: Weak<Agent>,
    key: (usize, usize),
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(agent) = self.agent.upgrade() else { return };
        match agent.with(|raw| raw.deregister(self.key.0, self.key.1)) {
            Ok(()) | Err(NixlError::Closed) => {}
            Err(error) => tracing::warn!(%error, "memory stays registered"),
        }
    }
}

/// A peer that can be read from.
#[derive(Debug)]
pub struct Remote {
    agent: Arc<Agent>,
    name: String,
}

impl Remote {
    /// Begins to read into memory that is on loan. Each piece comes with its address at the peer. The mapping that they are of
    /// must be [registered](Agent::register).
    pub fn read<'m>(&self, pieces: Vec<(Loan<'m>, u64)>) -> Result<Read<'m>, NixlError> {
        let places: Vec<_> = pieces
            .iter()
            .map(|(here, there)| (here.as_ptr().expose_provenance(), *there as usize, here.len()))
            .collect();
        let loans = pieces.into_iter().map(|(loan, _)| loan).collect();
        let (agent, peer) = (Arc::clone(&self.agent), self.name.clone());
        let mut read = Read { agent, peer, state: State::Failed, _loans: loans };
        // On an error `read` is dropped, which destroys the agent: a part of it may be under way.
        let request = self.agent.with(|raw| raw.read_into_loans(&self.name, &places))?;
        read.state = State::Pending(request);
        Ok(read)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let mut peers = self.agent.peers.lock();
        let uses = peers.entry(self.name.clone()).or_default();
        *uses = uses.saturating_sub(1);
        if *uses == 0 {
            peers.remove(&self.name);
            match self.agent.with(|raw| raw.part(&self.name)) {
                Ok(()) | Err(NixlError::Closed) => {}
                Err(error) => tracing::debug!(peer = self.name, %error, "the peer was gone already"),
            }
        }
    }
}

enum State {
    Pending(Request),
    Succeeded,
    /// Or never begun.
    Failed,
}

/// A read under way. Dropping it waits a little for its end; if it does not end well, its agent is destroyed.
pub struct Read<'m> {
    agent: Arc<Agent>,
    peer: String,
    state: State,
    _loans: Vec<Loan<'m>>,
}

impl fmt::Debug for Read<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Read").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Read<'_> {
    /// Whether everything is here. After an error, its agent is destroyed and nothing more comes.
    pub fn poll(&mut self) -> Result<bool, NixlError> {
        let State::Pending(request) = self.state else { return Ok(matches!(self.state, State::Succeeded)) };
        match self.agent.with(|raw| raw.poll(request)) {
            Ok(true) => {
                self.state = State::Succeeded;
                Ok(true)
            }
            Ok(false) => Ok(false),
            Err(error) => {
                self.state = State::Failed;
                self.agent.destroy();
                Err(match error {
                    NixlError::Call { .. } => NixlError::Read { peer: self.peer.clone() },
                    other => other,
                })
            }
        }
    }
}

impl Drop for Read<'_> {
    fn drop(&mut self) {
        let until = Instant::now() + GRACE;
        while let State::Pending(_) = self.state {
            if self.poll().is_ok_and(|done| !done) {
                if Instant::now() >= until {
                    self.state = State::Failed;
                } else {
                    std::thread::sleep(NAP);
                }
            }
        }
        if matches!(self.state, State::Failed) {
            self.agent.destroy();
        }
    }
}

/// A sender's agent, and the files that it exports.
pub struct Exporter {
    agent: Arc<Agent>,
    exports: Mutex<Vec<Export>>,
}

struct Export {
    /// Device and number of the file.
    file: (u64, u64),
    mapping: Mapping,
}

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.agent.fmt(f)
    }
}

fn identity(file: &File) -> Result<((u64, u64), u64), NixlError> {
    let facts = file.metadata().map_err(|source| NixlError::Map { source })?;
    Ok(((facts.dev(), facts.ino()), facts.len()))
}

impl Exporter {
    /// Starts an agent that exports nothing yet.
    pub fn start(config: &Config) -> Result<Exporter, NixlError> {
        Ok(Exporter { agent: Agent::start(config)?, exports: Mutex::default() })
    }

    /// The package and release of its library.
    pub fn release(&self) -> &str {
        self.agent.release()
    }

    /// Whether its agent was not destroyed.
    pub fn agent_is_open(&self) -> bool {
        self.agent.is_open()
    }

    /// Shuts its agent down: reads under way fail, and peers are told that nothing can be read here.
    pub fn close(&self) {
        self.agent.destroy();
    }

    /// Maps and registers a whole file, which must not shrink.
    pub fn export(&self, file: &File) -> Result<(), NixlError> {
        let (id, len) = identity(file)?;
        let mapping = Mapping::map(file, len, Access::Read).map_err(|source| NixlError::Map { source })?;
        self.agent.register(&mapping)?;
        self.exports.lock().push(Export { file: id, mapping });
        Ok(())
    }

    /// Where a file is, from `offset` on, and how its memory is reached; none if it is not exported.
    pub fn find(&self, file: &File, offset: u64) -> Result<Option<(Vec<u8>, Memory)>, NixlError> {
        let (id, _) = identity(file)?;
        let memory = self.exports.lock().iter().find(|e| e.file == id).map(|e| Memory {
            address: (e.mapping.address().expose_provenance() as u64).saturating_add(offset),
            bytes: e.mapping.len().saturating_sub(offset),
        });
        memory.map(|memory| Ok((self.agent.metadata()?, memory))).transpose()
    }

    /// Stops exporting a file. Its addresses read as zeros from then on.
    pub fn withdraw(&self, file: &File) {
        let Ok((id, _)) = identity(file) else { return };
        let mut exports = self.exports.lock();
        while let Some(at) = exports.iter().position(|e| e.file == id) {
            if let Err(error) = exports.swap_remove(at).mapping.retire() {
                tracing::warn!(%error, "memory that was exported is gone: peers that read late may harm this process");
            }
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // Before the memory goes.
        self.close();
    }
}

/// A receiver's way to an agent: there is one while reads succeed, and a new one some time after a failure.
pub struct Reader {
    config: Config,
    state: Mutex<Standing>,
}

struct Standing {
    agent: Arc<Agent>,
    failed: Option<(Instant, String)>,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reader").field(&self.config).finish()
    }
}

impl Reader {
    /// Starts its first agent.
    pub fn start(config: Config) -> Result<Reader, NixlError> {
        let agent = Agent::start(&config)?;
        Ok(Reader { config, state: Mutex::new(Standing { agent, failed: None }) })
    }

    /// An agent that works as far as is known.
    pub fn agent(&self) -> Result<Arc<Agent>, NixlError> {
        let mut state = self.state.lock();
        if let Some((at, why)) = &state.failed
            && at.elapsed() < REST
        {
            return Err(NixlError::Resting { left: REST.saturating_sub(at.elapsed()), why: why.clone() });
        }
        if !state.agent.is_open() {
            state.agent = Agent::start(&self.config)?;
        }
        state.failed = None;
        Ok(Arc::clone(&state.agent))
    }

    /// Notes that a read failed.
    pub fn failed(&self, why: &str) {
        self.state.lock().failed.get_or_insert_with(|| (Instant::now(), why.to_owned()));
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.state.lock().agent.destroy();
    }
}
