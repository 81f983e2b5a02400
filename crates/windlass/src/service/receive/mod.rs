//! `windlass receive`: keeps local images of models up to date with their publishers.
//!
//! A publisher is an agent, a store ([`crate::service::store`]), or an agent with a store for the time that it is away
//! ([`crate::service::store::fallback`]); the receiver's algorithm is the same.
//!
//! Owns: one thread per publisher, its loop of waiting and syncing, and its output. Engines read the image in place under
//! map leases. Must not: end because a publisher is unreachable; the receiver retries with a growing backoff and reports
//! it. If a publisher cannot be followed at the start (a wrong token, no space for its image), the receiver gives it up and
//! reports it, and follows the others. After the first success no failure ends that (`retry`).
//!
//! In JSON mode every version is one line: `{"event":"synced", …}` with the fields of
//! [`windlass_data::receiver::Synced`].
//!
//! With engines, each engine loads complete versions as it becomes free ([`crate::service::engines`]) while the receiver
//! fetches the next one; these events are lines too. With `--versions` or `--until`, the receiver ends when its engines have
//! loaded the versions.
//!
//! With a controller (`member`), orders say which version to stage from which agent and when to load it, for several
//! models.
//!
//! | module | what it owns |
//! |---|---|
//! | `member` | sessions with a controller |
//! | `model` | one model's image and engines, and the threads that work for them |
//! | `rendezvous` | the models of one load order wait for each other |
//! | `order_queue` | a controller's orders about one model, and the next step |
//! | `figures` | what a model's steps took |
//! | `no_agent` | the publisher of a model before its first order |
//! | `retry` | backoff after transient failures |
//!
//! A receiver without an end exits with code 0 when it is interrupted. With `--versions` or `--until`, an interrupt before the
//! last version is a failure.

mod figures;
mod member;
mod model;
mod no_agent;
mod order_queue;
mod rendezvous;
mod retry;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use windlass_core::address::{StoreUrl, Token};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, Version};
use windlass_core::slice::Selection;
use windlass_core::wire::control::RequestMode;
use windlass_data::history::Limits;
use windlass_data::image::{ImageSpec, Known};
use windlass_data::local;
use windlass_data::private;
use windlass_data::receiver::{
    Control, Event, Listener, Receiver, ReceiverConfig, ReceiverError, RelayConfig, Relaying, Share, Start,
    Synced,
};
use windlass_data::region::{LeaseKind, Memfd};
use windlass_data::shm::in_memory;
use windlass_data::stop::Stop;
use windlass_data::tcp::PullConfig;
use windlass_data::tls::Trust;

use crate::console::{Session, bytes};
use crate::error::{Error, advised, chain};
use crate::service::control::HttpControl;
use crate::service::disk::as_dir::{AsDir, Placed};
use crate::service::engines::{EngineOptions, EngineSpec, Engines, ModelEngine, Place, Teller};
use crate::service::nixl::Nixl;
use crate::service::spans::{self, Spans};
use crate::service::store;
use crate::service::store::fallback::{Fallback, FallbackStore, Turn};

pub(crate) use self::member::Controlled;
use self::retry::{Attempts, Standing, retry_transient};

/// Who is followed.
#[derive(Clone, Debug)]
pub(crate) enum Publisher {
    /// The agent at an endpoint, and its token.
    Endpoint(String, Token),
    /// Whatever agent serves a region on this host, and the token if that is in no file.
    Region(PathBuf, Option<Token>),
    /// A store, and the version that is wanted unless the newest is.
    Store(StoreUrl, Option<Version>),
}

impl Publisher {
    /// The conversation with it. A store is looked at until a model is there.
    fn control(&self, receive: &Receive, session: &Session, stop: &Stop) -> Result<Arc<dyn Control>, Error> {
        let (timeout, trust) = (receive.timeout, receive.trust.as_ref());
        let control = match self {
            Publisher::Store(url, version) => {
                let follow = || -> Result<_, ReceiverError> {
                    Ok(store::follow(url, *version, trust, &receive.dir, stop)?)
                };
                return retry_transient(Standing::New, session, stop, follow);
            }
            Publisher::Endpoint(url, token) => HttpControl::new(url, token.clone())?,
            Publisher::Region(dir, token) => HttpControl::of_region(dir, token.clone()),
        };
        let agent = Arc::new(control.with_trust(trust.cloned()).with_timeout(timeout));
        let Some(store) = &receive.fallback else { return Ok(agent) };
        let session = session.clone();
        let tell = move |turn: &Turn| {
            let Turn { to_store, publisher, reason } = turn;
            let source = if *to_store { "store" } else { "agent" };
            let event =
                json!({ "event": "source", "source": source, "publisher": publisher, "reason": reason });
            session.event(&event, || format!("versions come from {publisher} now: {reason}"));
        };
        Ok(Arc::new(Fallback::new(agent, store.clone(), Box::new(tell))))
    }
}

/// The checked arguments of `receive`.
#[derive(Clone, Debug)]
pub(crate) struct Receive {
    pub(crate) publishers: Vec<Publisher>,
    /// Where versions come from while an agent is away.
    pub(crate) fallback: Option<FallbackStore>,
    /// Regions on this host whose slots are read in place.
    pub(crate) in_place: Vec<PathBuf>,
    /// Where images are kept: a directory for each model below it.
    pub(crate) dir: PathBuf,
    /// The part of the model that is kept; all of it if not given.
    pub(crate) slice: Option<Arc<Selection>>,
    /// What people call this receiver.
    pub(crate) name: String,
    /// How to be served.
    pub(crate) mode: RequestMode,
    /// Streams of a transfer.
    pub(crate) streams: Option<u16>,
    /// Threads for sums and deltas.
    pub(crate) threads: usize,
    /// How long one transfer may take.
    pub(crate) timeout: Duration,
    /// End after this many new versions of each model.
    pub(crate) versions: Option<u64>,
    /// End once this version is there.
    pub(crate) until: Option<u64>,
    /// The image is readable by the group.
    pub(crate) group: bool,
    /// End when standard input ends: the parent is gone.
    pub(crate) with_parent: bool,
    /// The engines that load what is received, and how.
    pub(crate) engines: Option<(Vec<ModelEngine>, EngineOptions)>,
    /// Where versions are put up as directories.
    pub(crate) as_dir: Option<AsDir>,
    /// Authorities to trust for agents and controllers; by default the system's.
    pub(crate) trust: Option<Trust>,
    /// The controller that says what to do; then there are no publishers.
    pub(crate) controller: Option<Controlled>,
    /// Whether images are read from publishers' memory.
    pub(crate) nixl: Nixl,
    /// How versions are passed on to other receivers, if they are.
    pub(crate) relay: Option<RelayConfig>,
}

/// How long a region that is read in place may be silent before it is asked whether it is still the one.
const SILENCE: Duration = Duration::from_secs(1);

/// Deltas kept with the image for engines that are some versions behind it.
const KEEP: Limits = Limits { count: 16, bytes: 1 << 30 };

impl Receive {
    /// Receives until it is told to end, or has what it should get.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let stop = session.cancel();
        let _spans = Spans::start("windlass-receive");
        if self.with_parent {
            let stop = stop.clone();
            Session::with_parent(move || stop.set())?;
        }
        self.check_dir()?;
        let _as_dir = self.as_dir.as_ref().map(AsDir::claim).transpose()?;
        let endless = self.versions.is_none() && self.until.is_none();
        let regular = |r: &Result<(), Error>| matches!(r, Err(e) if endless && e.kind() == Kind::Cancelled);
        if let Some(controller) = &self.controller {
            let result = member::run(self, controller, session, stop);
            return if regular(&result) { Ok(()) } else { result };
        }
        let alone = self.publishers.len() + self.in_place.len() == 1;
        // With several, the end of one must not wait for that of the others to be told.
        let told = |result: Result<(), Error>| match result {
            Err(e) if !alone && e.kind() != Kind::Cancelled => {
                let (kind, text, advice) = (e.kind(), e.chain(), e.advice());
                let event = json!({ "event": "failed", "kind": kind, "error": text, "advice": advice });
                session.event(&event, || format!("given up: {}", advised(&text, &advice)));
                Err(e)
            }
            result => result,
        };
        let told = &told;
        let results: Vec<Result<(), Error>> = std::thread::scope(|scope| {
            let remote = self.publishers.iter();
            let remote = remote.map(|p| scope.spawn(move || told(self.remote(p, session, stop))));
            let local = self.in_place.iter();
            let local = local.map(|dir| scope.spawn(move || told(self.mapped(dir, session, stop))));
            let all: Vec<_> = remote.chain(local).collect();
            all.into_iter()
                .map(|t| t.join().unwrap_or_else(|_| Err(Error::Bug("a receiver's thread panicked".into()))))
                .collect()
        });
        results.into_iter().filter(|r| !regular(r)).collect()
    }

    fn config(&self, model_id: ModelId) -> Result<ReceiverConfig, Error> {
        let place = Place::of(self.dir.join(model_id.as_str()));
        Ok(ReceiverConfig {
            image: ImageSpec {
                dir: self.dir.join(model_id.as_str()),
                model_id,
                group: self.group,
                memfd: Memfd::Auto,
                threads: self.threads,
            },
            slice: self.slice.clone(),
            name: self.name.clone(),
            mode: self.mode,
            streams: self.streams,
            transfer_timeout: self.timeout,
            open_timeout: self.timeout,
            pull: PullConfig::default(),
            allow: None,
            keep: self.engines.as_ref().map(|_| KEEP),
            share: self.engines.as_ref().map(|_| Share { dir: place.incoming() }),
            relaying: self.relay.clone().map(|relay| Arc::new(Relaying::new(relay))),
            nixl: self.nixl.reader()?,
        })
    }

    /// A directory of images whose name was misspelt is not to be made, and to fill a disk.
    fn check_dir(&self) -> Result<(), Error> {
        let parent = self.dir.parent().map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p });
        if self.dir.exists() || parent.is_some_and(|p| p != Path::new("/") && p.is_dir()) {
            return Ok(());
        }
        let dir = self.dir.display();
        Err(Error::Usage(format!(
            "the directory {dir} for images does not exist: make it (mkdir -p -m 700 {dir}), or name one on tmpfs with \
             --dir, such as /dev/shm/images"
        )))
    }

    /// Makes the directory of images where it is not there.
    fn make_dir(&self, session: &Session) -> Result<(), Error> {
        let is_new = !self.dir.exists();
        private::make_place(&self.dir, if self.group { 0o750 } else { 0o700 })?;
        if is_new && !in_memory(&self.dir).map_err(Error::io("look at", &self.dir))? {
            session.note(&format!(
                "made the directory {} for images, which is not on tmpfs: they are written back to a disk; /dev/shm is the \
                 usual place",
                self.dir.display()
            ));
        }
        Ok(())
    }

    /// Keeps one model's image up to date.
    fn remote(&self, publisher: &Publisher, session: &Session, stop: &Stop) -> Result<(), Error> {
        let control = publisher.control(self, session, stop)?;
        let name = || -> Result<_, ReceiverError> { Ok(control.version(None, stop)?.model_id) };
        let mut model_id = retry_transient(Standing::New, session, stop, name)?;
        // Everything else is checked against the name, and one flipped bit makes another name.
        loop {
            let again = retry_transient(Standing::Proven, session, stop, name)?;
            if std::mem::replace(&mut model_id, again) == model_id {
                break;
            }
        }
        let listener: Listener = Arc::new(|event: &Event| {
            // A whole version is told with its figures, below.
            if !matches!(event, Event::Whole { .. }) {
                tracing::info!(event = %serde_json::to_value(event).unwrap_or_default(), "receiver");
            }
        });
        self.make_dir(session)?;
        let config = self.config(model_id.clone())?;
        let asked = Arc::clone(&control);
        let mut receiver = Receiver::open(config, control, Some(listener), stop)?;
        if let Some(image) = receiver.current() {
            session.event(&json!({ "event": "found", "image": image }), || {
                format!("{}: found version {} in {}", model_id, image.identity.version, self.dir.display())
            });
        }
        let engines = self.engines(&model_id, session)?;
        if let (Some(engines), Some(image)) = (&engines, receiver.current()) {
            engines.want(image);
        }
        if let Some(image) = receiver.current() {
            self.put_up(image, session, stop);
        }
        let (mut got, mut attempts) = (0, Attempts::default());
        let mut standing = if receiver.current().is_some() { Standing::Proven } else { Standing::New };
        while !self.enough(got, receiver.current()) {
            let news = retry_transient(Standing::Proven, session, stop, || receiver.wait_newer(stop))?;
            stop.check().map_err(|_| Error::Cancelled)?;
            // Nothing yet is no failure: there is just nothing to do but wait on.
            let Some(version) = news.version else { continue };
            attempts.at((news.incarnation, version));
            let began = Instant::now();
            let synced = match bring(&mut receiver, engines.as_ref(), (news.incarnation, version), stop) {
                Ok(synced) => synced,
                Err(e) => {
                    let identity =
                        Identity { model_id: model_id.clone(), incarnation: news.incarnation, version };
                    spans::record(
                        "windlass.receive",
                        &identity,
                        began.elapsed().as_secs_f64() * 1e3,
                        Vec::new(),
                        Some(&chain(&e)),
                    );
                    attempts.failed(e, standing, &*asked, session, stop)?;
                    continue;
                }
            };
            attempts.succeeded();
            standing = Standing::Proven;
            stop.check().map_err(|_| Error::Cancelled)?;
            if let Some(image) = &synced.image {
                got += 1;
                spans::of_sync(&image.identity, &synced);
                session.event(&report(&synced), || line(image, &synced));
                if let Some(engines) = &engines {
                    engines.want(image);
                }
                self.put_up(image, session, stop);
            }
        }
        match (&engines, receiver.current()) {
            (Some(engines), Some(image)) => engines.settle(image, stop),
            (Some(_) | None, _) => Ok(()),
        }
    }

    /// Puts a version up as a directory, and says how that went: the next one may succeed.
    fn put_up(&self, image: &Known, session: &Session, stop: &Stop) {
        let Some(as_dir) = &self.as_dir else { return };
        let dir = self.dir.join(image.identity.model_id.as_str());
        let placed = as_dir.put(&dir, image, stop).and_then(|placed| {
            as_dir.mark(image.identity.version)?;
            Ok(placed)
        });
        tell_placed(placed, &image.identity, session);
    }

    /// Starts to look after the engines; they load what they are told to want.
    fn engines(&self, model_id: &ModelId, session: &Session) -> Result<Option<Engines>, Error> {
        let Some((engines, options)) = &self.engines else { return Ok(None) };
        let specs: Vec<EngineSpec> = engines.iter().map(|e| e.spec.clone()).collect();
        let session = session.clone();
        let id = model_id.clone();
        let teller: Teller = Arc::new(move |event| {
            spans::of_engine(&id, event);
            session.event(&event.json(), || event.line());
        });
        let place = Place::of(self.dir.join(model_id.as_str()));
        Engines::start(&specs, options, place, &teller).map(Some)
    }

    /// Follows a region on this host without copying: takes each new version under a map lease, and verifies it.
    fn mapped(&self, dir: &Path, session: &Session, stop: &Stop) -> Result<(), Error> {
        let mut region = retry_transient(Standing::New, session, stop, || local::attach(dir))?;
        let (mut seen, mut got) = (0, 0);
        let mut known: Option<Known> = None;
        let mut heard = Instant::now();
        while !self.enough(got, known.as_ref()) {
            stop.check().map_err(|_| Error::Cancelled)?;
            if heard.elapsed() > SILENCE {
                // No message tells that a publisher died; its successor creates another region in the same place, once
                // this one has been released.
                let was = region.incarnation();
                drop(region);
                region = retry_transient(Standing::Proven, session, stop, || local::attach(dir))?;
                heard = Instant::now();
                seen = if region.incarnation() == was { seen } else { 0 };
            }
            let bell = region.bell();
            let fresh = region.state().active.filter(|s| s.id != seen && s.sealed.is_some());
            let Some(slot) = fresh else {
                region.wait(bell, stop.nap());
                continue;
            };
            let start = Instant::now();
            let lease = match region.lease(slot.id, LeaseKind::Map, self.timeout) {
                Ok(lease) => lease,
                Err(e) if e.kind() == Kind::Stale => continue,
                Err(e) => {
                    tracing::warn!(error = %e, "cannot lease the slot");
                    region.wait(bell, stop.nap());
                    continue;
                }
            };
            let found = windlass_data::seal::sums_of_all(
                windlass_data::simd::kernels(),
                region.manifest(),
                lease.data(),
                (self.threads, stop),
            )?
            .digest(region.manifest());
            let identity = windlass_core::identity::Identity {
                model_id: region.model_id().clone(),
                incarnation: region.incarnation(),
                version: slot.version,
            };
            // If the publisher took the slot back meanwhile, what was summed may be of two versions.
            if lease.finish().is_err() {
                continue;
            }
            (seen, heard) = (slot.id, Instant::now());
            if let Some(expected) = slot.sealed.filter(|d| *d != found) {
                let error = Error::Digest { path: dir.to_owned(), found, expected };
                if known.is_none() {
                    return Err(error);
                }
                // The publisher's fault, and the next version may be without it.
                let (kind, text) = (error.kind(), error.chain());
                let event = json!({ "event": "waiting", "kind": kind, "error": text, "failures": 1 });
                session.event(&event, || format!("{text}; waiting for the next version"));
                continue;
            }
            got += 1;
            let image = Known { identity, digest: found };
            let ms = start.elapsed().as_secs_f64() * 1e3;
            let attributes = vec![("windlass.mode", "mapped".into()), ("windlass.bytes", 0.into())];
            spans::record("windlass.receive", &image.identity, ms, attributes, None);
            session.event(
                &json!({ "event": "synced", "mode": "mapped", "image": image, "wire_bytes": 0, "total_ms": ms }),
                || format!("{}: mapped in place, {ms:.1} ms to verify, digest {found}", image.identity),
            );
            known = Some(image);
        }
        Ok(())
    }

    fn enough(&self, got: u64, image: Option<&Known>) -> bool {
        self.versions.is_some_and(|n| got >= n)
            || self.until.is_some_and(|v| image.is_some_and(|k| k.identity.version >= v))
    }
}

/// Brings the image to the newest version. Engines that can load it from a delta before the image holds it do so first.
fn bring(
    receiver: &mut Receiver,
    engines: Option<&Engines>,
    to: (Incarnation, Version),
    stop: &Stop,
) -> Result<Synced, ReceiverError> {
    let Some(engines) = engines.filter(|e| e.may_lead(receiver.current())) else {
        return receiver.sync(stop);
    };
    let fetched = match receiver.fetch(None, to, stop) {
        Ok(Start::Delta(fetch)) => fetch.run(stop),
        Ok(Start::Whole { why, .. }) => {
            tracing::info!(version = to.1, why, "engines load this version from the image");
            return receiver.sync(stop);
        }
        Err(e) => Err(e),
    };
    match fetched {
        Ok(fetched) => {
            engines.lead(&fetched, stop);
            if engines.serves(&fetched.known()) {
                return receiver.show_aside(vec![fetched], stop);
            }
            receiver.show(vec![fetched], stop)
        }
        Err(error) => {
            tracing::info!(version = to.1, %error, "could not fetch the delta separately");
            receiver.sync(stop)
        }
    }
}

/// Says how it went to put up a version.
fn tell_placed(placed: Result<Placed, Error>, identity: &Identity, session: &Session) {
    match placed {
        Ok(placed) if placed.found => {}
        Ok(Placed { path, ms, .. }) => {
            let event = json!({ "event": "placed", "identity": identity, "path": path, "ms": ms });
            session.event(&event, || format!("{identity}: put up as {} in {ms:.1} ms", path.display()));
        }
        Err(e) => {
            let (text, advice) = (e.chain(), e.advice());
            let event = json!({
                "event": "not_placed", "identity": identity, "kind": e.kind(), "error": text, "advice": advice,
            });
            session.event(&event, || format!("{identity} is not put up: {}", advised(&text, &advice)));
        }
    }
}

fn report(synced: &Synced) -> Value {
    let mut value = serde_json::to_value(synced).unwrap_or_default();
    if let Some(object) = value.as_object_mut() {
        object.insert("event".into(), "synced".into());
    }
    value
}

fn line(image: &Known, s: &Synced) -> String {
    let read = match (s.read_bytes, &s.unread) {
        (0, None) => String::new(),
        (0, Some(why)) => format!(" (over TCP instead of NIXL: {why})"),
        (read, _) => format!(" ({} of them by NIXL)", bytes(read)),
    };
    let relayed = match s.relayed_bytes {
        0 => String::new(),
        relayed => format!(" ({} of them from other receivers)", bytes(relayed)),
    };
    format!(
        "{}: {} {}{relayed}{read}, {:.1} ms (wire {:.1}, apply {:.1}), digest {}",
        image.identity,
        s.mode,
        bytes(s.wire_bytes),
        s.total_ms,
        s.wire_ms,
        s.apply_ms,
        image.digest
    )
}
