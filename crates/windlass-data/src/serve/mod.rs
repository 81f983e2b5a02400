//! Serves the versions of a region: what an agent does, without HTTP.
//!
//! Owns: the sealing of committed versions, the history of deltas, the tables of sums, the tickets and the data
//! connections. `windlass agent` puts endpoints in front of it; programs that publish from Rust may run it in their
//! own process. Must not: write into a slot, or keep a writer waiting longer than its grace.
//!
//! # Threads
//!
//! - The **sealer** waits for a commit, makes sums and delta in one pass over both slots, writes the table and the
//!   delta file, and marks the version sealed. Only then can it be asked for. If the delta cannot be made (no room,
//!   base gone), the version is sealed without one, and receivers get image bytes.
//! - The **warden** watches for a writer that wants its slot back, ends the offers on that slot after a grace, and
//!   thereby gives up their leases (W-4).
//! - The **gatherer**, where there are other holders of parts, asks them for their share of what was sealed here, again
//!   and again, so that a holder that was restarted is found. Neither sealing nor the writer waits for it.
//! - The **joiner** serves a version by delta before its slot is whole, where the ranks brought what changed in it
//!   ([`crate::publish`]), and the **checker** sums the bytes of slots that were sealed without looking, now and then.
//! - The [link](crate::tcp) has its own.
//!
//! All offers of a slot share one lease: a region has only so many entries for them.
//!
//! # After a crash
//!
//! Everything that matters is in the region: slots, `a.sums`/`b.sums`, deltas. A new server takes the agent's seat,
//! reads what fits the slots as they are, and seals what was committed meanwhile. Tickets and registrations are
//! gone; receivers ask again.
//!
//! # Several nodes
//!
//! Where each node's region holds a part, one server leads and has [`Peer`]s. A version can be asked for when all
//! have sealed it; the state sums of the parts add up to its digest. A ticket lists every holder as a source, and
//! each is told of it before the receiver is.

mod delta_mode;
mod error;
mod part;
mod sealing;
mod slices;
mod swarm;
mod tickets;

use std::collections::BTreeMap;
use std::fs::File;
use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use serde::Serialize;
use windlass_core::address::{Host, HostPort};
use windlass_core::digest::{BlockSum, SumTable, first_wrong};
use windlass_core::identity::{Identity, Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::control::{
    Age, Capabilities, Registered, Registration, Relays, RequestMode, TransferAnswer, TransferDone,
    TransferRequest, VersionInfo,
};
use windlass_core::wire::{DEFAULT_STREAMS, DEFAULT_STRIPE_BYTES, TicketId};

pub use self::error::ServeError;
pub use self::part::Peer;
pub use self::swarm::{Edge, Passed};
use self::swarm::{SliceKey, Swarms};
use crate::history::{History, Limits, Segment};
use crate::publish::Folder;
use crate::receiver::{Control, ControlError};
use crate::region::{Lease, LeaseKind, Region, RegionError};
use crate::seal::SealError;
use crate::stop::Stop;
use crate::tcp::{OfferHandle, Sender, SenderConfig};
use crate::tls::Certificate;

/// How long the other holders may take to answer for a ticket.
const PEER_PATIENCE: Duration = Duration::from_secs(5);
/// How long the gatherer waits for a holder to seal a version before it looks whether there is a newer one.
const GATHER_PATIENCE: Duration = Duration::from_secs(1);
/// How long a request waits for the version that replaces one whose slot was taken back.
const REPLACED_PATIENCE: Duration = Duration::from_secs(1);
/// A receiver that was last heard of before that does not count towards those that relay.
const HEARD_LATELY: Duration = Duration::from_mins(10);
/// How long the way back to an older version may take, and how long is waited for a slot to begin at.
const BACK_PATIENCE: Duration = Duration::from_secs(60);

/// How a server is run.
#[derive(Clone)]
pub struct ServerConfig {
    /// What receivers are told to connect to.
    pub advertise_host: Host,
    pub tcp: SenderConfig,
    /// How many deltas are kept.
    pub history: Limits,
    /// Threads of the sealer.
    pub threads: usize,
    /// Streams of a transfer unless the receiver asks for another number.
    pub streams: u16,
    /// Bytes of a stripe.
    pub stripe_bytes: u32,
    /// How long a transfer may take unless the receiver asks for another time.
    pub transfer_timeout: Duration,
    /// How long open stripes may take to be acknowledged once a writer wants the slot.
    pub revoke_grace: Duration,
    /// A delta larger than this share of the image is not worth it.
    pub dense_share: f64,
    /// Of the versions that were served before their slot was whole, the bytes of the first and of every so-manieth are
    /// summed; 0 for none.
    pub check_every: u64,
    /// The most receivers that are known at a time; the one longest unheard is forgotten.
    pub max_instances: usize,
    /// From so many receivers on that can relay, they pass deltas on to each other, and images always; 0 for never.
    pub relay_from: usize,
    /// Holders of the other parts, if this server leads.
    pub peers: Vec<Arc<dyn Peer>>,
    /// Told of every version that was sealed, by the thread that did it.
    pub on_sealed: Option<OnSealed>,
}

/// See [`ServerConfig::on_sealed`].
pub type OnSealed = Arc<dyn Fn(&Sealed) + Send + Sync>;

/// A version that was sealed.
#[derive(Clone, Debug)]
pub struct Sealed {
    pub identity: Identity,
    /// How long it took.
    pub seconds: f64,
    /// The delta that leads to it, if there is one.
    pub delta: Option<DeltaStats>,
}

impl ServerConfig {
    /// The defaults, for a server that is reached at `advertise_host`.
    pub fn new(advertise_host: Host) -> ServerConfig {
        ServerConfig {
            advertise_host,
            tcp: SenderConfig::default(),
            history: Limits { count: 16, bytes: 4 << 30 },
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            streams: DEFAULT_STREAMS,
            stripe_bytes: DEFAULT_STRIPE_BYTES,
            transfer_timeout: Duration::from_mins(10),
            revoke_grace: Duration::from_millis(200),
            dense_share: 0.8,
            check_every: 16,
            max_instances: 4096,
            relay_from: 3,
            peers: Vec::new(),
            on_sealed: None,
        }
    }
}

/// The id of a version that is in no slot, or not yet.
const NO_SLOT: u64 = 0;

/// What is known of a sealed slot, or of a version that will be in one.
#[derive(Clone, Debug)]
struct SealedSlot {
    id: u64,
    version: Version,
    sums: Arc<SumTable>,
    /// Of the whole image: with the parts of the peers, where there are any.
    digest: StateDigest,
}

/// A version in a slot, with the hashes of its blocks. It holds nothing: the slot may be taken back at any time.
#[derive(Clone, Debug)]
pub struct SlotView {
    region: Arc<Region>,
    id: u64,
    pub version: Version,
    pub digest: StateDigest,
    pub sums: Arc<SumTable>,
}

impl SlotView {
    /// Replaces `bytes` by these blocks, one after the other, as the version has them. False if the trainer has taken the slot
    /// back meanwhile. The lease ends before the copy is compared with the hashes.
    pub fn copy(&self, blocks: Range<u32>, given: Duration, bytes: &mut Vec<u8>) -> Result<bool, ServeError> {
        let manifest = self.region.manifest();
        let lease = match self.region.lease(self.id, LeaseKind::Stream, given) {
            Ok(lease) => lease,
            Err(RegionError::LeaseGone { .. }) => return Ok(false),
            Err(e) => return Err(e.into()),
        };
        let data = lease.data();
        bytes.clear();
        bytes.reserve_exact(manifest.bytes_of(&blocks.clone().into()) as usize);
        for block in blocks.clone() {
            let block = manifest.cuts().block(block).map_err(SealError::from)?;
            for run in manifest.byte_runs(&block) {
                bytes.extend_from_slice(data.get(run.start as usize..run.end as usize).unwrap_or_default());
            }
        }
        if lease.finish().is_err() {
            return Ok(false);
        }
        let wrong = first_wrong(crate::simd::kernels(), manifest, blocks, bytes, &self.sums);
        if let Some(block) = wrong.map_err(SealError::from)? {
            return Err(ServeError::Differs { version: self.version, block });
        }
        Ok(true)
    }
}

/// The newest delta, for `/get_capabilities`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DeltaStats {
    /// What it starts from.
    pub base: Version,
    /// What it leads to.
    pub version: Version,
    pub bytes: u64,
    /// How many elements it changes.
    pub changes: u64,
    /// How long sealing took.
    pub seconds: f64,
}

#[derive(Debug)]
struct Instance {
    name: Option<String>,
    heard: Instant,
    version: Option<Version>,
    relays: bool,
    /// Which blocks it asked for last.
    slice: Option<SliceKey>,
}

struct Active {
    handle: OfferHandle,
    /// The link holds the lease; this only asks it.
    lease: Option<Weak<Lease>>,
    instance: String,
    expires: Instant,
}

#[derive(Default)]
struct State {
    slots: [Option<SealedSlot>; 2],
    /// The newest version that all holders have sealed, or that ranks brought by delta. Its slot may have been taken back
    /// since, or may not be whole yet.
    served: Option<SealedSlot>,
    /// The sums of versions that ranks brought by delta and whose slots are not sealed yet.
    by_delta: BTreeMap<Version, Arc<SumTable>>,
    /// The slot to be summed next, and whether one could not be.
    check: Option<delta_mode::Check>,
    check_missed: bool,
    contradiction: Option<String>,
    /// The lease that the offers of a slot share, and until when it was given.
    lease: Option<(Weak<Lease>, Instant)>,
    /// Digests of versions that deltas start from or lead to.
    digests: BTreeMap<Version, StateDigest>,
    delta: Option<DeltaStats>,
    instances: BTreeMap<String, Instance>,
    offers: Vec<Active>,
    swarms: Swarms,
    /// How often a receiver joined one of them.
    joined: u64,
    /// The sums of the stripes of deltas that are passed on, by target, base, slice and bytes of a stripe.
    stripe_sums: BTreeMap<(Version, Version, Option<SliceKey>, u32), Vec<u64>>,
    /// The digests of versions of slices, for those that ask for them.
    slices: BTreeMap<SliceKey, BTreeMap<Version, StateDigest>>,
    /// The table of a version with the parts of all holders.
    whole_sums: Option<(Version, Arc<SumTable>)>,
    failure: Option<String>,
}

impl State {
    /// Receivers of these blocks that can relay and were heard of lately.
    fn heard_lately(&self, slice: Option<SliceKey>) -> usize {
        let counts = |i: &&Instance| i.relays && i.slice == slice && i.heard.elapsed() < HEARD_LATELY;
        self.instances.values().filter(counts).count()
    }
}

/// What a server has done. Only grows.
#[derive(Debug, Default, Serialize)]
pub struct Counters {
    pub sealed: AtomicU64,
    /// Versions sealed without a delta although there was an older one.
    pub sealed_without_delta: AtomicU64,
    /// Versions that could not be sealed.
    pub seal_failures: AtomicU64,
    pub seal_ms: AtomicU64,
    /// Versions served by delta before their slot was whole.
    pub joined: AtomicU64,
    /// Versions whose ranks brought deltas that were not used.
    pub parts_refused: AtomicU64,
    /// Versions sealed by the sums that ranks brought, without looking at the bytes.
    pub sealed_by_delta: AtomicU64,
    /// Slots among those that were summed afterwards.
    pub checked: AtomicU64,
    /// Times that something handed out was not what it should be.
    pub contradictions: AtomicU64,
    pub tickets_full: AtomicU64,
    pub tickets_delta: AtomicU64,
    pub refused: AtomicU64,
    /// Transfers that receivers reported complete.
    pub completed: AtomicU64,
    /// Offers ended because a writer wanted the slot.
    pub revoked: AtomicU64,
    /// Bytes sent and acknowledged, of offers that are over.
    pub bytes_acked: AtomicU64,
    /// Bytes that receivers read from memory instead, of offers that are over.
    pub bytes_read: AtomicU64,
    /// Bytes that receivers got from other receivers.
    pub bytes_relayed: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What a receiver looks like from here.
#[derive(Clone, Debug, Serialize)]
pub struct InstanceInfo {
    pub instance_id: String,
    /// What people call it.
    pub name: Option<String>,
    /// The version of its last completed transfer.
    pub version: Option<Version>,
    /// Seconds since it was heard of.
    pub heard_seconds: f64,
    pub transfers: usize,
}

struct Inner {
    config: ServerConfig,
    region: Arc<Region>,
    /// The slots, for `sendfile`.
    files: Vec<Arc<File>>,
    history: History,
    parts: Folder,
    /// What slices need of deltas, by target, base and slice. Held while one is made.
    sliced: Mutex<BTreeMap<(Version, Version, SliceKey), Arc<Segment>>>,
    /// Held while deltas of ranks are joined: the newest version whose deltas were refused.
    joining: Mutex<Option<Version>>,
    sender: Sender,
    data: HostPort,
    state: Mutex<State>,
    changed: Condvar,
    stop: Stop,
    counters: Counters,
}

/// A region being served. Dropping it ends all transfers and leaves the region as it is.
pub struct Server {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("region", &self.inner.region.dir()).finish_non_exhaustive()
    }
}

impl Server {
    /// Takes the agent's seat of the region and begins to serve.
    pub fn start(region: Arc<Region>, config: ServerConfig) -> Result<Server, ServeError> {
        let seat = region.agent()?;
        let history = History::open(
            &region.deltas_dir(),
            region.model_id().clone(),
            region.incarnation(),
            Arc::clone(region.manifest()),
            config.history,
            config.threads,
        )?;
        let sender = Sender::start(config.tcp.clone())?;
        let open = |slot| {
            let path = region.slot_path(slot);
            File::open(&path).map(Arc::new).map_err(|source| ServeError::Slot { path, source })
        };
        let files: Vec<_> = (0..region.slot_count()).map(open).collect::<Result<_, _>>()?;
        if let Some(exporter) = &config.tcp.nixl {
            for file in &files {
                exporter.export(file).map_err(|source| ServeError::Export { source })?;
            }
        }
        let port = NonZeroU16::new(sender.local_addr().port()).unwrap_or(NonZeroU16::MIN);
        let data = HostPort::new(config.advertise_host.clone(), port);
        let parts = Folder::new(region.parts_dir());
        let inner = Arc::new(Inner {
            config,
            region,
            files,
            history,
            parts,
            sliced: Mutex::default(),
            joining: Mutex::default(),
            sender,
            data,
            state: Mutex::default(),
            changed: Condvar::new(),
            stop: Stop::never(),
            counters: Counters::default(),
        });
        inner.recover()?;
        let mut server = Server { inner, threads: Vec::new() };
        // Before the first seal: a server that is stopped before its warden's first word would be waited for as long as
        // its process lives.
        seat.attend(sealing::SILENCE);
        let seat = Arc::new(seat);
        let sealers = Arc::clone(&seat);
        server.spawn("sealer", move |inner| inner.seal_loop(&sealers))?;
        server.spawn("warden", move |inner| inner.watch_loop(&seat))?;
        if !server.inner.config.peers.is_empty() {
            server.spawn("gatherer", Inner::gather_loop)?;
        }
        if server.inner.joins() {
            server.spawn("joiner", Inner::join_loop)?;
            server.spawn("checker", Inner::check_loop)?;
        }
        Ok(server)
    }

    fn spawn(
        &mut self,
        name: &'static str,
        body: impl FnOnce(&Inner) + Send + 'static,
    ) -> Result<(), ServeError> {
        let inner = Arc::clone(&self.inner);
        let thread = std::thread::Builder::new().name(format!("windlass-{name}")).spawn(move || body(&inner));
        self.threads.push(thread.map_err(|source| ServeError::Thread { name, source })?);
        Ok(())
    }

    /// Ends all transfers, giving open stripes `grace`, and joins the threads.
    pub fn shutdown(mut self, grace: Duration) {
        self.end(grace);
    }

    fn end(&mut self, grace: Duration) {
        self.inner.stop.set();
        self.inner.changed.notify_all();
        let offers = std::mem::take(&mut self.inner.state().offers);
        revoke_all(offers, "the agent is shutting down", grace);
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so already.
            let _ = thread.join();
        }
        if let Some(exporter) = &self.inner.config.tcp.nixl {
            self.inner.files.iter().for_each(|file| exporter.withdraw(file));
        }
    }

    /// The region that is served.
    pub fn region(&self) -> &Arc<Region> {
        &self.inner.region
    }

    /// What it shows on data connections, if they are inside TLS. Its requests must be then, too.
    pub fn certificate(&self) -> Option<&Certificate> {
        self.inner.config.tcp.tls.as_ref()
    }

    /// Where data connections go.
    pub fn data_endpoint(&self) -> HostPort {
        self.inner.data.clone()
    }

    /// What is served now.
    pub fn version(&self) -> VersionInfo {
        self.inner.version_info(&self.inner.state())
    }

    /// What is served, once it is newer than `seen` or `stop` ends the wait.
    pub fn wait_version(&self, seen: Option<(Incarnation, Version)>, stop: &Stop) -> VersionInfo {
        let mut state = self.inner.state();
        loop {
            let info = self.inner.version_info(&state);
            if info.is_newer_than(seen) || stop.is_set() || self.inner.stop.is_set() {
                return info;
            }
            self.inner.changed.wait_for(&mut state, stop.nap());
        }
    }

    /// What can be asked for.
    pub fn capabilities(&self) -> Capabilities {
        let state = self.inner.state();
        let version = self.inner.version_info(&state).version;
        let delta = state.delta.filter(|d| Some(d.version) == version);
        let units: u64 =
            self.inner.region.manifest().tensors().iter().map(windlass_core::manifest::Tensor::units).sum();
        Capabilities {
            strategies: vec![RequestMode::Full, RequestMode::Delta, RequestMode::Auto],
            version,
            delta_ready: delta.is_some(),
            delta_base_version: delta.map(|d| d.base),
            delta_version: delta.map(|d| d.version),
            delta_sparsity: delta.map(|d| sparsity(d.changes, units)),
            delta_num_nonzero: delta.map(|d| d.changes),
            delta_size_bytes: delta.map(|d| d.bytes),
            delta_oldest_base: self.inner.history.ends().map(|(oldest, _)| oldest),
            versions: self.inner.history.versions(),
            release: env!("CARGO_PKG_VERSION").into(),
            age: self.age(),
        }
    }

    /// How long ago the publisher's life began.
    fn age(&self) -> Option<Age> {
        let region = &self.inner.region;
        let ms = u64::try_from(region.age()?.as_millis()).ok()?;
        Some(Age { incarnation: region.incarnation(), ms })
    }

    /// The table of a sealed version, as [`Server::part_sums`] gives it, with the parts of all holders.
    pub fn sums(&self, version: Option<Version>, stop: &Stop) -> Result<Arc<SumTable>, ServeError> {
        self.inner.sums(version, stop)
    }

    /// The table of a sealed version that is still in a slot, or of one that will be. Blocks that are not held here have a
    /// sum of zero, which no bytes have.
    pub fn part_sums(&self, version: Option<Version>) -> Result<(Version, Arc<SumTable>), ServeError> {
        self.inner.part_sums(version)
    }

    /// The delta that leads from one version to another, as one file.
    pub fn segment(&self, base: Version, target: Version, stop: &Stop) -> Result<Arc<Segment>, ServeError> {
        self.inner.segment(base, target, stop)
    }

    /// The newest version whose bytes are in a slot, for copying a part of them under a lease of its own.
    pub fn newest_slot(&self) -> Option<SlotView> {
        let state = self.inner.state();
        let slot = state.slots.iter().flatten().filter(|s| s.id != NO_SLOT).max_by_key(|s| s.version)?;
        let region = Arc::clone(&self.inner.region);
        let (id, version, sums) = (slot.id, slot.version, Arc::clone(&slot.sums));
        Some(SlotView { region, id, version, digest: slot.digest, sums })
    }

    /// Makes a receiver known.
    pub fn register(&self, registration: &Registration, control_port: u16) -> Result<Registered, ServeError> {
        let id = hex(&random::<8>()?);
        let inner = &self.inner;
        let mut state = inner.state();
        if state.instances.len() >= inner.config.max_instances {
            let oldest = state.instances.iter().min_by_key(|(_, i)| i.heard).map(|(id, _)| id.clone());
            oldest.and_then(|id| state.instances.remove(&id));
        }
        let name = registration.name.clone().or_else(|| {
            let (host, port) = (registration.sglang_http_host.as_ref()?, registration.sglang_http_port?);
            Some(format!("{host}:{port}"))
        });
        let (heard, relays) = (Instant::now(), registration.relays);
        state.instances.insert(id.clone(), Instance { name, heard, version: None, relays, slice: None });
        Ok(Registered {
            instance_id: id,
            model_id: inner.region.model_id().clone(),
            incarnation: inner.region.incarnation(),
            trainer_global_rank: 0,
            trainer_world_size: inner.region.ranks().into(),
            trainer_buffer_length: inner.region.manifest().data_bytes(),
            trainer_hostname: inner.config.advertise_host.to_string(),
            trainer_rpc_port: control_port,
            data_port: inner.data.port(),
            relays: inner.config.relay_from > 0,
        })
    }

    /// The receivers that are known.
    pub fn instances(&self) -> Vec<InstanceInfo> {
        let state = self.inner.state();
        let info = |(id, i): (&String, &Instance)| InstanceInfo {
            instance_id: id.clone(),
            name: i.name.clone(),
            version: i.version,
            heard_seconds: i.heard.elapsed().as_secs_f64(),
            transfers: state.offers.iter().filter(|o| o.instance == *id && !o.handle.progress().free).count(),
        };
        state.instances.iter().map(info).collect()
    }

    /// What has been done so far.
    pub fn counters(&self) -> &Counters {
        &self.inner.counters
    }

    /// The newest delta.
    pub fn delta(&self) -> Option<DeltaStats> {
        self.inner.state().delta
    }

    /// Transfers that are not over.
    pub fn open_transfers(&self) -> usize {
        self.inner.state().offers.iter().filter(|o| !o.handle.progress().free).count()
    }

    /// Why the newest committed version could not be sealed, if it could not.
    pub fn failure(&self) -> Option<String> {
        self.inner.state().failure.clone()
    }

    /// The last time that something handed out was not what it should be, if ever.
    pub fn contradiction(&self) -> Option<String> {
        self.inner.state().contradiction.clone()
    }

    /// Answers a request for a transfer.
    pub fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ServeError> {
        let answer = self.inner.request(request, stop);
        if let Ok(TransferAnswer::Refused(_)) = &answer {
            count(&self.inner.counters.refused);
        }
        answer
    }

    /// A receiver says that a transfer is complete.
    pub fn completed(&self, done: &TransferDone) -> Result<(), ServeError> {
        let mut state = self.inner.state();
        let instance = state.instances.get_mut(&done.instance_id);
        let unknown = || ServeError::UnknownInstance { instance: done.instance_id.clone() };
        let instance = instance.ok_or_else(unknown)?;
        instance.heard = Instant::now();
        instance.version = Some(done.completion.identity.version);
        count(&self.inner.counters.completed);
        let relayed = state.swarms.done(done.completion.ticket, done.brought.clone());
        self.inner.counters.bytes_relayed.fetch_add(relayed, Ordering::Relaxed);
        Ok(())
    }

    /// Who passed on what of the newest versions.
    pub fn passed(&self) -> Vec<Passed> {
        self.inner.state().swarms.passed()
    }

    /// How often receivers have joined those that pass on what they get, once that is more than `seen`, or `stop`.
    pub fn wait_joined(&self, seen: u64, stop: &Stop) -> u64 {
        let mut state = self.inner.state();
        while state.joined <= seen && !stop.is_set() && !self.inner.stop.is_set() {
            self.inner.changed.wait_for(&mut state, stop.nap());
        }
        state.joined
    }

    /// Whom the holder of a ticket may ask beyond its sources, if there are clearly more receivers than it knows of, or any
    /// more where there is no hurry. None if there are not.
    pub fn more_relays(
        &self,
        ticket: TicketId,
        known: u32,
        hurry: bool,
    ) -> Result<Option<Relays>, ServeError> {
        self.inner.state().swarms.relays(ticket, known, hurry)
    }

    /// Whom the holder of a ticket may ask beyond its sources, once there are more receivers than it knows of, or `stop`.
    pub fn relays(&self, ticket: TicketId, known: u32, stop: &Stop) -> Result<Relays, ServeError> {
        let mut seen = 0;
        loop {
            let over = stop.is_set() || self.inner.stop.is_set();
            match self.more_relays(ticket, known, !over)? {
                Some(relays) => return Ok(relays),
                None if over => return Ok(Relays { receivers: known, relays: Vec::new() }),
                None => seen = self.wait_joined(seen, stop),
            }
        }
    }

    fn refusal(&self, what: &'static str, error: ServeError) -> ControlError {
        let (kind, message) = (error.kind(), error.to_string());
        ControlError::Refused { peer: self.peer(), what, kind, message }
    }
}

/// Within one process the control connection is a call.
impl Control for Server {
    fn peer(&self) -> String {
        format!("{} in this process", self.inner.region.model_id())
    }

    fn version(
        &self,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        Ok(match newer_than {
            Some(seen) => self.wait_version(Some(seen), &stop.with_timeout(Duration::from_secs(20))),
            None => Server::version(self),
        })
    }

    fn age(&self, _: &Stop) -> Result<Option<Age>, ControlError> {
        Ok(Server::age(self))
    }

    fn manifest(&self, _: &Stop) -> Result<Manifest, ControlError> {
        Ok(Manifest::clone(self.inner.region.manifest()))
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        let sums = Server::sums(self, Some(identity.version), stop);
        Ok(sums.map_err(|e| self.refusal("get the sums", e))?.sums().to_vec())
    }

    fn register(&self, registration: &Registration, _: &Stop) -> Result<Registered, ControlError> {
        Server::register(self, registration, 0).map_err(|e| self.refusal("register", e))
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        Server::request(self, request, stop).map_err(|e| self.refusal("request a transfer", e))
    }

    fn relays(&self, ticket: TicketId, known: u32, stop: &Stop) -> Result<Relays, ControlError> {
        Server::relays(self, ticket, known, stop).map_err(|e| self.refusal("find relays", e))
    }

    fn done(&self, done: &TransferDone, _: &Stop) -> Result<(), ControlError> {
        self.completed(done).map_err(|e| self.refusal("report a transfer", e))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn identity(&self, version: Version) -> Identity {
        let (model_id, incarnation) = (self.region.model_id().clone(), self.region.incarnation());
        Identity { model_id, incarnation, version }
    }

    fn nothing_yet(&self) -> ServeError {
        ServeError::NothingYet { model: self.region.model_id().to_string() }
    }

    /// See [`Server::sums`].
    fn sums(&self, version: Option<Version>, stop: &Stop) -> Result<Arc<SumTable>, ServeError> {
        let (version, own) = self.part_sums(version)?;
        if self.config.peers.is_empty() {
            return Ok(own);
        }
        if let Some((_, known)) = self.state().whole_sums.as_ref().filter(|(v, _)| *v == version) {
            return Ok(Arc::clone(known));
        }
        let stop = &stop.with_timeout(PEER_PATIENCE);
        let mut sums = own.sums().to_vec();
        for peer in &self.config.peers {
            let theirs = peer.part_sums(version, stop)?;
            let missing = sums.iter_mut().zip(theirs).filter(|(sum, _)| **sum == BlockSum::default());
            missing.for_each(|(sum, theirs)| *sum = theirs);
        }
        let whole = Arc::new(SumTable::new(self.region.manifest(), sums));
        self.state().whole_sums = Some((version, Arc::clone(&whole)));
        Ok(whole)
    }

    /// See [`Server::part_sums`].
    fn part_sums(&self, version: Option<Version>) -> Result<(Version, Arc<SumTable>), ServeError> {
        let state = self.state();
        let newest = self.version_info(&state).version;
        let wanted = version.or(newest).ok_or_else(|| self.nothing_yet())?;
        let slot = state.slots.iter().flatten().find(|s| s.version == wanted).map(|s| &s.sums);
        let sums = slot.or_else(|| state.by_delta.get(&wanted)).map(Arc::clone);
        let sums = sums.ok_or(ServeError::NoVersion { version: wanted, newest })?;
        Ok((wanted, sums))
    }

    fn version_info(&self, state: &State) -> VersionInfo {
        let slot = state.served.as_ref();
        let manifest = self.region.manifest();
        VersionInfo {
            version: slot.map(|s| s.version),
            model_id: self.region.model_id().clone(),
            incarnation: self.region.incarnation(),
            digest: slot.map(|s| s.digest),
            layout_hash: manifest.layout_hash(),
            cuts_hash: manifest.cuts_hash(),
        }
    }
}

fn sparsity(changes: u64, units: u64) -> f64 {
    1.0 - changes as f64 / units.max(1) as f64
}

/// Ends offers in parallel: each may take the whole grace.
fn revoke_all(offers: Vec<Active>, why: &str, grace: Duration) {
    std::thread::scope(|scope| {
        for offer in &offers {
            scope.spawn(move || offer.handle.revoke(why, grace));
        }
    });
}

fn random<const N: usize>() -> Result<[u8; N], ServeError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| ServeError::Random(e.to_string()))?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, b| text + &format!("{b:02x}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use windlass_core::dtype::Dtype;
    use windlass_core::identity::ModelId;
    use windlass_core::manifest::TensorSpec;

    use super::*;
    use crate::region::{Memfd, RegionSpec};

    fn served(history: Limits) -> (tempfile::TempDir, Arc<Region>, Server) {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let manifest = Manifest::new([TensorSpec::new("w", Dtype::U8, [300_000])], BTreeMap::new()).unwrap();
        let region = Region::create(&RegionSpec {
            memfd: Memfd::Never,
            ..RegionSpec::new(home.path().join("region"), ModelId::new("actor").unwrap(), Arc::new(manifest))
        })
        .unwrap();
        let config = ServerConfig { history, ..ServerConfig::new(Host::new("127.0.0.1").unwrap()) };
        let server = Server::start(Arc::clone(&region), config).unwrap();
        (home, region, server)
    }

    fn publish(region: &Arc<Region>, server: &Server, versions: std::ops::Range<Version>) {
        let stop = Stop::after(Duration::from_secs(30));
        let mut writer = region.writer(0).unwrap();
        for version in versions {
            let attempt = writer.begin(version, &stop).unwrap();
            attempt.write(version * 7, &version.to_le_bytes()).unwrap();
            attempt.done(&stop).unwrap();
            server.wait_version(Some((region.incarnation(), version - 1)), &stop);
        }
    }

    #[test]
    fn digests_are_kept_for_as_long_as_deltas_are() {
        for count in [0, 4] {
            let (_home, region, server) = served(Limits { count, bytes: 1 << 20 });
            publish(&region, &server, 1..40);
            let state = server.inner.state();
            assert!(state.digests.len() <= count + 2, "{} for {count} deltas", state.digests.len());
            assert!(state.digests.contains_key(&39));
        }
    }

    #[test]
    fn offers_of_one_slot_share_one_lease_until_it_is_wanted_back() {
        let (_home, region, server) = served(Limits { count: 4, bytes: 1 << 20 });
        publish(&region, &server, 1..2);
        let id = region.state().active.unwrap().id;
        let inner = &server.inner;
        let first = inner.slot_lease(id, Duration::from_mins(1)).unwrap();
        let second = inner.slot_lease(id, Duration::from_mins(10)).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        publish(&region, &server, 2..3);
        let stop = Stop::after(Duration::from_secs(30));
        std::thread::scope(|scope| {
            // The next version but one wants this slot.
            let writer = scope.spawn(|| publish(&region, &server, 3..4));
            while !first.wanted_back() {
                assert!(!stop.is_set());
                std::thread::yield_now();
            }
            let error = inner.slot_lease(id, Duration::from_mins(1)).unwrap_err();
            assert!(matches!(error, crate::region::RegionError::LeaseGone { .. }), "{error}");
            drop((first, second));
            writer.join().unwrap();
        });
    }
}
