//! `windlass publish --follow`: publishes the checkpoints that another program writes, each as a version.
//!
//! Owns: the region, its agent, and the loop that looks for finished checkpoints. Must not: change what it follows, except
//! for its answer ([`ANSWER`]), read a checkpoint that is not finished, or end because one is bad: it says so once and waits
//! for the next.
//!
//! A checkpoint is finished when its marker is there. Its version is the number in its name. At the start only the one that was
//! finished last is published, later each in turn. A number that is not above the last one, or a checkpoint with other tensors,
//! begins a new incarnation, as a restarted trainer does; the same files again are the same version. Files are read by
//! position and not mapped, because their owner may shorten or remove them at any time; a checkpoint that changes meanwhile
//! is not published.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, ModelId, Version};
use windlass_data::file::{Layout, Shard};
use windlass_data::publish::{PublishError, Publisher};
use windlass_data::receiver::{Control as _, ReceiverError};
use windlass_data::region::{Attempt, RegionSpec};
use windlass_data::seal::draft::Draft;
use windlass_data::stop::Stop;
use windlass_data::tls::Trust;
use windlass_data::work;

use super::Pattern;
use crate::console::{Session, bytes};
use crate::error::{Error, advised};
use crate::service::agent_address::AgentAddress;
use crate::service::control::HttpControl;
use crate::service::controller::client::ControllerClient;
use crate::service::controller::wire::{NotifyVersion, TrainerLeft};
use crate::service::supervise::{Spec, SuperviseError, Supervisor};

/// How often the directory is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often the last version is announced again: a restarted controller knows nothing.
const REMIND_EVERY: Duration = Duration::from_secs(5);
/// How long the controller may take to answer.
const TELL_WITHIN: Duration = Duration::from_secs(5);
/// The file in a checkpoint that says what became of it: its identity, an error, or why it is tried again. `windlass.disk`
/// waits for it.
const ANSWER: &str = ".windlass-published";
/// How much a thread reads at a time.
const PIECE: u64 = 4 << 20;

/// The checked arguments of `publish`.
#[derive(Clone, Debug)]
pub(crate) struct Publish {
    pub(crate) follow: Pattern,
    /// The file in a checkpoint that says that it is finished.
    pub(crate) marker: String,
    pub(crate) model_id: ModelId,
    pub(crate) region: PathBuf,
    /// Further arguments of `windlass agent`.
    pub(crate) agent: Vec<OsString>,
    /// The agent's token, if it is in the environment.
    pub(crate) token: Option<Token>,
    pub(crate) controller: Option<ControllerClient>,
    /// Authorities to trust for the agent; by default the system's.
    pub(crate) trust: Option<Trust>,
    /// How long one version may take.
    pub(crate) timeout: Duration,
    pub(crate) threads: usize,
    pub(crate) with_parent: bool,
}

/// One state of a file: it is another one after every change.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    modified: (i64, i64),
    inode: u64,
    bytes: u64,
}

impl Stamp {
    fn of(path: &Path) -> Option<Stamp> {
        let found = fs::metadata(path).ok()?;
        let modified = (found.mtime(), found.mtime_nsec());
        Some(Stamp { modified, inode: found.ino(), bytes: found.len() })
    }
}

/// What is published, and the last version.
struct Live {
    publisher: Publisher,
    /// The last version, and its files.
    last: Option<(Version, Vec<Option<Stamp>>)>,
}

impl Publish {
    /// Publishes until it is told to end.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let stop = session.cancel();
        if self.with_parent {
            let stop = stop.clone();
            Session::with_parent(move || stop.set())?;
        }
        let lock = self.region.with_added_extension("publish");
        let _alone = super::claim(&lock, || {
            let region = self.region.display();
            format!("another publisher uses the region {region}: end it, or give another --region")
        })?;
        let control = HttpControl::of_region(&self.region, self.token.clone()).with_trust(self.trust.clone());
        let (dir, marker) = (self.follow.dir(), &self.marker);
        let event = json!({ "event": "following", "dir": dir, "marker": marker, "region": self.region });
        session
            .event(&event, || format!("following {}: waiting for a checkpoint with {marker}", dir.display()));
        let (mut live, mut agent) = (None, None);
        // A directory that cannot be listed at the start is a mistake, later it may pass.
        let mut done = self.finished(&BTreeMap::new())?;
        let newest = done.iter().max_by_key(|(_, stamp)| stamp.modified).map(|(version, _)| *version);
        if let Some(newest) = newest {
            done.remove(&newest);
            for version in done.keys() {
                let path = self.follow.path(*version);
                if !path.join(ANSWER).exists() {
                    let why = format!(
                        "version {newest} was finished later, and the publisher was started after both"
                    );
                    answer(&path, &json!({ "error": why, "kind": Kind::Stale }));
                }
            }
        }
        let mut told: Option<(Identity, Instant)> = None;
        while stop.check().is_ok() {
            let mut finished = self.finished(&done).unwrap_or_else(|error| {
                tracing::warn!(error = %error.chain(), "the checkpoints cannot be listed");
                BTreeMap::new()
            });
            let Some((version, stamp)) = finished.pop_first() else {
                if let Some((identity, at)) = told.as_mut().filter(|(_, at)| at.elapsed() > REMIND_EVERY) {
                    self.tell(identity, session, stop);
                    *at = Instant::now();
                }
                std::thread::sleep(stop.nap().min(LOOK_EVERY));
                continue;
            };
            match self.publish(version, &stamp, &mut live, (&mut agent, &control), stop) {
                Ok((identity, size, ms)) => {
                    let path = self.follow.path(version);
                    let event = json!({
                        "event": "published", "identity": identity, "path": path, "bytes": size, "ms": ms,
                    });
                    session.event(&event, || format!("{identity}: {} in {ms:.1} ms", bytes(size)));
                    self.tell(&identity, session, stop);
                    answer(&path, &json!({ "identity": identity }));
                    told = Some((identity, Instant::now()));
                }
                Err(Error::Cancelled) => break,
                Err(e) => {
                    let (path, text) = (self.follow.path(version), e.chain());
                    let advice = match &e {
                        Error::File(_) => format!("write {} last, when all files are whole", self.marker),
                        _ => e.advice(),
                    };
                    let event = json!({
                        "event": "refused", "path": path, "kind": e.kind(), "error": text, "advice": advice,
                    });
                    let text = advised(&text, &advice);
                    session.event(&event, || format!("{} is not published: {text}", path.display()));
                    if matches!(e.kind(), Kind::Timeout | Kind::PeerLost | Kind::Exhausted) {
                        // This may pass.
                        answer(&path, &json!({ "waiting": text }));
                        let again = stop.with_timeout(REMIND_EVERY);
                        while again.check().is_ok() {
                            std::thread::sleep(again.nap());
                        }
                        continue;
                    }
                    answer(&path, &json!({ "error": text, "kind": e.kind() }));
                }
            }
            done.insert(version, stamp);
        }
        if let (Some(controller), Some((identity, _))) = (&self.controller, told) {
            let left = TrainerLeft { model_id: identity.model_id, incarnation: identity.incarnation };
            if let Err(error) = controller.trainer_left(&left, &Stop::after(TELL_WITHIN)) {
                tracing::info!(%error, "the controller was not told of the end");
            }
        }
        Ok(())
    }

    /// The finished checkpoints that were not dealt with yet.
    fn finished(&self, done: &BTreeMap<Version, Stamp>) -> Result<BTreeMap<Version, Stamp>, Error> {
        let dir = self.follow.dir();
        let entries = match fs::read_dir(dir) {
            // The program may make it when it writes its first checkpoint.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            entries => entries.map_err(Error::io("list", dir))?,
        };
        let found = entries.flatten().filter_map(|entry| {
            let version = self.follow.version(&entry.file_name())?;
            let stamp = Stamp::of(&entry.path().join(&self.marker))?;
            (done.get(&version) != Some(&stamp)).then_some((version, stamp))
        });
        Ok(found.collect())
    }

    /// Publishes one checkpoint, and waits until the agent serves it. Answers its bytes and the time that it took.
    fn publish(
        &self,
        version: Version,
        stamp: &Stamp,
        live: &mut Option<Live>,
        (agent, control): (&mut Option<Supervisor>, &HttpControl),
        stop: &Stop,
    ) -> Result<(Identity, u64, f64), Error> {
        let (began, deadline) = (Instant::now(), stop.with_timeout(self.timeout));
        let path = self.follow.path(version);
        let layout = Layout::read(&path)?;
        let size = layout.manifest().data_bytes();
        let files: Vec<Option<Stamp>> = layout.shards().iter().map(|s| Stamp::of(&s.path)).collect();
        let this = (version, files);
        let is_here = live.as_ref().is_some_and(|l| l.last.as_ref() == Some(&this));
        let goes_on = live.as_ref().is_some_and(|l| {
            let same = l.publisher.region().manifest().layout_hash() == layout.manifest().layout_hash();
            same && l.last.as_ref().is_none_or(|(last, _)| version > *last)
        });
        if !goes_on && !is_here {
            // The place must be free before it is taken again.
            *live = None;
        }
        let Live { publisher, last } = match live {
            Some(live) => live,
            None => {
                let manifest = Arc::new(layout.manifest().clone());
                let spec = RegionSpec::new(&self.region, self.model_id.clone(), manifest);
                let spec = RegionSpec { extra_bytes: size / 2, ..spec };
                live.insert(Live { publisher: Publisher::create(&spec, &deadline)?, last: None })
            }
        };
        if !is_here {
            let copied = publisher.copy(version, &deadline, |slot| {
                self.copy(&layout, &this.1, slot, &deadline)?;
                let is_as_before = Stamp::of(&path.join(&self.marker)).as_ref() == Some(stamp);
                is_as_before.then_some(()).ok_or_else(|| changed(&path).into())
            });
            copied.map_err(|Failed(e)| *e)?;
            *last = Some(this);
        }
        let incarnation = publisher.region().incarnation();
        // Not before there is a region: an agent waits for one only so long.
        let agent = match agent {
            Some(agent) => agent,
            None => {
                let spec = Spec { options: self.agent.clone(), ..Spec::new(&self.region) };
                agent.insert(Supervisor::start(spec).map_err(supervised)?)
            }
        };
        agent.address(&deadline).map_err(supervised)?;
        loop {
            let before = version.checked_sub(1).map(|v| (incarnation, v));
            match control.version(before, &deadline) {
                Ok(shown)
                    if shown.incarnation == incarnation && shown.version.is_some_and(|v| v >= version) =>
                {
                    break;
                }
                Ok(_) => {}
                // It is being started again.
                Err(e) if e.kind() == Kind::PeerLost && !deadline.is_set() => {}
                Err(e) => return Err(ReceiverError::from(e).into()),
            }
            deadline.check()?;
            std::thread::sleep(deadline.nap().min(LOOK_EVERY));
        }
        let identity = Identity { model_id: self.model_id.clone(), incarnation, version };
        Ok((identity, size, began.elapsed().as_secs_f64() * 1e3))
    }

    /// Reads all tensors into the slot, with several threads.
    fn copy(
        &self,
        layout: &Layout,
        stamps: &[Option<Stamp>],
        slot: &Attempt<'_>,
        stop: &Stop,
    ) -> Result<(), Failed> {
        let open = |shard: &Shard| File::open(&shard.path).map_err(Error::io("open", &shard.path));
        let files: Vec<File> = layout.shards().iter().map(open).collect::<Result<_, Error>>()?;
        let mut pieces = Vec::new();
        for (i, tensor) in layout.manifest().tensors().iter().enumerate() {
            let (place, range) = (layout.place(i), tensor.range());
            let len = range.end - range.start;
            let starts = (0..len.div_ceil(PIECE)).map(|n| n * PIECE);
            pieces.extend(
                starts.map(|at| {
                    (place.shard, place.offset + at, range.start + at, PIECE.min(len - at) as usize)
                }),
            );
        }
        let read = |buffer: &mut Vec<u8>, i: u64| {
            let (shard, from, to, len) = pieces[i as usize];
            buffer.resize(len, 0);
            let path = &layout.shards()[shard].path;
            files[shard].read_exact_at(buffer, from).map_err(Error::io("read", path))?;
            Ok(slot.write(to, buffer).map_err(Error::from)?)
        };
        work::each::<_, Failed>(self.threads, pieces.len() as u64, stop, Vec::new, read)?;
        let is_as_before =
            |(shard, stamp): (&Shard, &Option<Stamp>)| stamp.is_some() && Stamp::of(&shard.path) == *stamp;
        if layout.shards().iter().zip(stamps).all(is_as_before) {
            return Ok(());
        }
        Err(changed(layout.path()).into())
    }

    /// Tells the controller of a version. It is told again if it does not hear it.
    fn tell(&self, identity: &Identity, session: &Session, stop: &Stop) {
        let Some(controller) = &self.controller else { return };
        let notify = AgentAddress::read(&self.region).map(|agent| NotifyVersion {
            model_id: identity.model_id.clone(),
            incarnation: identity.incarnation,
            version: identity.version,
            sender_endpoint: agent.endpoint,
            sync: false,
            eval: None,
            timeout_ms: None,
            spans: Vec::new(),
            delta_sparsity: None,
            delta_ratio: None,
        });
        let told = notify.and_then(|n| Ok(controller.notify(&n, &stop.with_timeout(TELL_WITHIN))?));
        if let Err(e) = told {
            let (text, advice) = (e.chain(), e.advice());
            let event =
                json!({ "event": "not_announced", "identity": identity, "kind": e.kind(), "error": text });
            session.event(&event, || format!("{identity} is not announced yet: {}", advised(&text, &advice)));
        }
    }
}

/// Any failure while a version is written.
struct Failed(Box<Error>);

impl From<PublishError> for Failed {
    fn from(e: PublishError) -> Failed {
        Error::Plane { doing: "publish a version", kind: e.kind(), source: Box::new(e) }.into()
    }
}

impl<E> From<E> for Failed
where
    Error: From<E>,
{
    fn from(e: E) -> Failed {
        Failed(Box::new(e.into()))
    }
}

/// Says in a checkpoint what became of it.
fn answer(checkpoint: &Path, what: &serde_json::Value) {
    let path = checkpoint.join(ANSWER);
    if let Err(error) = Draft::write(&path, what.to_string().as_bytes()) {
        // Its owner may have removed the checkpoint, or the directory is not ours to write to.
        tracing::info!(path = %path.display(), %error, "the answer cannot be written");
    }
}

fn changed(path: &Path) -> Error {
    Error::Plane {
        doing: "publish a checkpoint",
        kind: Kind::Stale,
        source: format!("{} changed while it was read; its marker must be written last", path.display())
            .into(),
    }
}

fn supervised(e: SuperviseError) -> Error {
    Error::Plane { doing: "keep an agent running", kind: e.kind(), source: Box::new(e) }
}
