//! A receiver that follows a controller: `windlass receive --controller`.
//!
//! Owns: consecutive sessions with the controller ([`run`]): joining, polling for orders, reporting and leaving; a stager
//! and a loader per model ([`super::model`]), and the thread that delivers reports. Must not: end, or stop serving, because
//! the controller is unreachable: the served version stays, fetches continue, and the receiver retries with a growing
//! backoff, which it reports once. After the first join, only one thing ends the receiver: another receiver with the same
//! name.
//!
//! # Sessions
//!
//! A session begins with a join. Its number is greater than that of every earlier session, and the join names the served
//! version: the version that all engines of a model report, or, without engines, the version that the image may show. The
//! session ends when the controller does not know it (after a restart, or a missed heartbeat), and when the served version
//! changes without an order, for example because an engine restarted. Then the next session begins. Reports of an earlier
//! session are not delivered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver as Inbox, RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;
use windlass_core::address::Token;
use windlass_core::barrier::{Peer, ReceiverId};
use windlass_core::error::Kind;
use windlass_core::identity::ModelId;
use windlass_data::stop::Stop;

use super::Receive;
use super::figures::Interval;
use super::model::{EngineLoad, EngineLoads, Model, Opening, Sending};
use super::rendezvous::Rendezvous;
use super::retry::CONFIRM;
use crate::console::Session;
use crate::error::Error;
use crate::service::controller::client::{ControllerClient, ControllerError};
use crate::service::controller::wire::{Gate, Join, Joined, MAX_SPANS, Outcome, Poll, Report, Task};
use crate::service::disk::as_dir::AsDir;
use crate::service::engines::{EngineEvent, EngineSpec, Engines, Place, Teller};
use crate::service::spans;

/// The controller that a receiver follows.
#[derive(Clone, Debug)]
pub(crate) struct Controlled {
    pub(crate) url: String,
    pub(crate) token: Token,
    /// The token of the agents that its orders name.
    pub(crate) agents: Token,
    /// Name of this receiver; stable across restarts.
    pub(crate) id: ReceiverId,
    /// The models that this receiver serves.
    pub(crate) models: Vec<ModelId>,
}

/// First and maximum backoff before the controller is asked again, until a controller has set the maximum
/// ([`Joined::rejoin_ms`]). A restarted controller waits for its receivers, but not for long.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(500));
/// Upper bounds for the backoff, the poll and the heartbeat timeout that a controller sets.
const REJOIN: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_secs(20);
const SILENCE: Duration = Duration::from_mins(10);
/// How long a poll waits while something is going on that people want to see, and where engines must be looked at.
const BUSY: Duration = Duration::from_millis(400);
const LOOK: Duration = Duration::from_secs(2);
/// How long engines may take to say what they have before the first join.
const ENGINES: Duration = Duration::from_secs(3);
/// How long a wait at the gate may be: the end of the receiver waits for it.
const GATE: Duration = Duration::from_secs(1);
/// How long taking leave may take, and delivering what was not delivered yet.
const FAREWELL: Duration = Duration::from_millis(500);

/// Follows the controller until it is told to end, or has what it should get.
pub(super) fn run(
    receive: &Receive,
    place: &Controlled,
    session: &Session,
    stop: &Stop,
) -> Result<(), Error> {
    receive.make_dir(session)?;
    let link = ControllerClient::new(&place.url, place.token.clone())?.with_trust(receive.trust.clone());
    let models = place.models.iter().enumerate();
    let models = models.map(|(index, id)| {
        let engines = engines_of(receive, id, place.models.len(), session)?;
        let (id, name) = (id.clone(), place.id.as_str());
        let config = receive.config(id.clone())?;
        let (token, trust) = (&place.agents, receive.trust.as_ref());
        let as_dir = receive.as_dir.as_ref();
        Model::open(Opening { id, index, config, token, trust, name, as_dir, session, stop }, engines)
    });
    let models: Vec<Model> = models.collect::<Result<_, Error>>()?;
    let (life, doubt) = (AtomicU64::new(0), AtomicBool::new(false));
    let doubt = &doubt;
    let (out, inbox) = channel::<Sending>();
    std::thread::scope(|scope| {
        for model in &models {
            let (staged, loaded) = (out.clone(), out.clone());
            scope.spawn(move || model.stage_all(&staged));
            scope.spawn(move || model.load_all(&loaded));
        }
        drop(out);
        if let (Some(as_dir), Some(model)) = (&receive.as_dir, models.first()) {
            let link = &link;
            scope.spawn(move || mark_all(as_dir, model, link, stop));
        }
        let reporter = Reporter { link: &link, id: &place.id, models: &models, life: &life, doubt, stop };
        scope.spawn(move || reporter.run(&inbox));
        let mut member = Member {
            receive,
            link: &link,
            id: &place.id,
            models: &models,
            life: &life,
            doubt,
            session,
            stop,
            last_session: 0,
            away: Away::default(),
            longest: PAUSE.1,
        };
        let result = member.follow();
        for model in &models {
            model.end();
        }
        member.leave();
        result
    })
}

/// Writes the marker of each version that was put up once every receiver has it, until the end.
fn mark_all(as_dir: &AsDir, model: &Model, link: &ControllerClient, stop: &Stop) {
    let mut marked = None;
    while as_dir.marker.is_some() && !model.ended() && !stop.is_set() {
        let placed = model.placed();
        let Some(identity) = placed.as_ref().filter(|_| placed != marked) else {
            std::thread::sleep(Stop::GLANCE);
            continue;
        };
        let gate = Gate {
            at_least: Some(identity.version),
            model_id: Some(identity.model_id.clone()),
            incarnation: Some(identity.incarnation),
            timeout_ms: Some(GATE.as_millis() as u64),
            ..Gate::default()
        };
        // One that could not load the version is out of what is served, and lacks it all the same.
        let opened = link.gate(&gate, &stop.with_timeout(GATE * 2));
        let status = opened.and_then(|_| link.status(&stop.with_timeout(GATE * 2)));
        if !status.is_ok_and(|status| status.without(identity).is_empty()) {
            std::thread::sleep(stop.nap());
            continue;
        }
        if let Err(error) = as_dir.mark(identity.version) {
            tracing::warn!(error = %error.chain(), %identity, "the marker cannot be written");
        }
        marked = placed;
    }
}

/// Whether a retry may succeed: the controller did not answer, is too busy, or is about to end. A certificate that is not
/// trusted stays so.
fn passes(e: &ControllerError) -> bool {
    match e.status() {
        None => !matches!(e.kind(), Kind::Denied | Kind::Invalid),
        Some(status) => status == 429 || status >= 500,
    }
}

/// Starts to look after the engines of a model.
fn engines_of(
    receive: &Receive,
    id: &ModelId,
    models: usize,
    session: &Session,
) -> Result<Option<(Engines, EngineLoads)>, Error> {
    let Some((engines, options)) = &receive.engines else { return Ok(None) };
    let serves = |of: &Option<ModelId>| of.as_ref().map_or(models == 1, |of| of == id);
    let specs: Vec<EngineSpec> =
        engines.iter().filter(|e| serves(&e.model_id)).map(|e| e.spec.clone()).collect();
    if specs.is_empty() {
        return Ok(None);
    }
    let loads = EngineLoads::default();
    let (noted, session, model_id) = (Arc::clone(&loads), session.clone(), id.clone());
    let teller: Teller = Arc::new(move |event| {
        if let EngineEvent::Loaded { label, pause_ms, load_ms, .. } = event {
            let ended = Instant::now();
            let load = EngineLoad { label: *label, pause_ms: *pause_ms, load_ms: *load_ms, ended };
            noted.lock().push(load);
        }
        spans::of_engine(&model_id, event);
        session.event(&event.json(), || event.line());
    });
    let mut options = options.clone();
    options.exact = true;
    let place = Place::of(receive.dir.join(id.as_str()));
    Engines::start(&specs, &options, place, &teller).map(|engines| Some((engines, loads)))
}

/// Reports an unreachable controller, once.
#[derive(Debug, Default)]
struct Away {
    told: bool,
    failures: u64,
    pause: Option<Duration>,
}

struct Member<'a> {
    receive: &'a Receive,
    link: &'a ControllerClient,
    id: &'a ReceiverId,
    models: &'a [Model],
    /// The current session; 0 between two sessions.
    life: &'a AtomicU64,
    /// The controller did not want a report of a load: it and this receiver may mean different orders.
    doubt: &'a AtomicBool,
    session: &'a Session,
    stop: &'a Stop,
    last_session: u64,
    away: Away,
    /// The longest rest before the controller is asked again.
    longest: Duration,
}

/// Why a session ended.
enum End {
    /// It was told to end, or has what it should get.
    Enough,
    /// Another one must begin.
    Again(String),
    /// Another receiver has joined under this name.
    Taken(ControllerError),
}

impl Member<'_> {
    fn follow(&mut self) -> Result<(), Error> {
        let until = Instant::now() + ENGINES;
        while !self.models.iter().all(Model::asked) && Instant::now() < until && !self.stop.is_set() {
            std::thread::sleep(Stop::GLANCE);
        }
        let mut joined_before = false;
        loop {
            let Some(joined) = self.join(joined_before)? else { return self.ended() };
            joined_before = true;
            match self.live(&joined) {
                End::Enough => return self.ended(),
                End::Again(why) => {
                    let event = json!({ "event": "rejoining", "receiver": self.id, "why": why });
                    self.session.event(&event, || format!("joining the controller again: {why}"));
                }
                // The later one stays: it may be this one's successor. If both came back, neither would ever serve.
                End::Taken(e) => {
                    let why = format!(
                        "another receiver has joined as {}: give one of the two another --name ({e})",
                        self.id
                    );
                    return Err(Error::Plane {
                        doing: "follow the controller any longer",
                        kind: Kind::Denied,
                        source: why.into(),
                    });
                }
            }
        }
    }

    fn ended(&self) -> Result<(), Error> {
        if self.enough() { Ok(()) } else { Err(Error::Cancelled) }
    }

    fn enough(&self) -> bool {
        let (versions, until) = (self.receive.versions, self.receive.until);
        if versions.is_none() && until.is_none() {
            return false;
        }
        self.models.iter().all(|model| {
            let (loads, version) = model.loads();
            versions.is_some_and(|n| loads >= n) || until.is_some_and(|v| version.is_some_and(|has| has >= v))
        })
    }

    /// Begins a session. `None` if the receiver was stopped before that.
    fn join(&mut self, before: bool) -> Result<Option<Joined>, Error> {
        let (mut refused, mut step) = (0, Duration::from_hours(1).as_nanos() as u64);
        loop {
            if self.stop.is_set() {
                return Ok(None);
            }
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
            let session = now.max(self.last_session.saturating_add(1));
            self.last_session = session;
            let has = self.models.iter().filter_map(|m| m.begin(session)).collect();
            self.life.store(session, Ordering::Release);
            let join = Join {
                peer: self.peer(),
                models: self.models.iter().map(|m| m.id.clone()).collect(),
                has,
                host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
                release: env!("CARGO_PKG_VERSION").to_owned(),
            };
            match self.link.join(&join, self.stop) {
                Ok(joined) => {
                    self.away = Away::default();
                    self.longest = Duration::from_millis(joined.rejoin_ms).clamp(Stop::GLANCE, REJOIN);
                    let event = json!({
                        "event": "joined", "receiver": self.id, "session": session, "controller": self.link.peer(),
                        "has": join.has,
                    });
                    self.session.event(&event, || format!("joined {} as {}", self.link.peer(), self.id));
                    return Ok(Some(joined));
                }
                Err(ControllerError::Refused { kind: Kind::Stale, .. }) => {
                    // The clock was ahead in an earlier session, perhaps by years: about twenty attempts get past any offset.
                    self.last_session = self.last_session.saturating_add(step);
                    step = step.saturating_mul(2);
                    self.rest(PAUSE.0);
                }
                // No order has succeeded yet: the user is told what is wrong. A flipped bit is not
                // said several times.
                Err(e) if !before && !passes(&e) && !self.stop.is_set() => {
                    refused += 1;
                    if refused == CONFIRM {
                        return Err(Error::Plane {
                            doing: "follow the controller",
                            kind: e.kind(),
                            source: Box::new(e),
                        });
                    }
                    self.wait_a_while();
                }
                Err(e) => {
                    refused = 0;
                    self.unanswered(&e);
                }
            }
        }
    }

    fn peer(&self) -> Peer {
        Peer { receiver: self.id.clone(), session: self.last_session }
    }

    /// One session: polls for orders until it ends.
    fn live(&mut self, joined: &Joined) -> End {
        let (mut after, mut taken) = (0, None);
        self.doubt.store(false, Ordering::Release);
        loop {
            if self.stop.is_set() || self.enough() {
                return End::Enough;
            }
            if self.doubt.load(Ordering::Acquire) {
                return End::Again("the controller did not want the report of a load".into());
            }
            if let Some(why) = self.models.iter().find_map(Model::differs) {
                return End::Again(why);
            }
            let (doing, busy): (Vec<_>, Vec<_>) = self.models.iter().map(Model::doing).unzip();
            let mut most = Duration::from_millis(joined.poll_ms).min(POLL);
            if busy.contains(&true) || self.receive.versions.is_some() || self.receive.until.is_some() {
                most = most.min(BUSY);
            }
            if self.models.iter().any(Model::has_engines) {
                most = most.min(LOOK);
            }
            let poll = Poll { peer: self.peer(), after, timeout_ms: most.as_millis() as u64, doing };
            match self.link.poll(&poll, self.stop) {
                Ok(orders) => {
                    self.back();
                    taken = None;
                    for numbered in orders.orders {
                        if numbered.seq <= after {
                            continue;
                        }
                        after = numbered.seq;
                        self.take(&numbered.task);
                    }
                }
                Err(_) if self.stop.is_set() => return End::Enough,
                Err(e @ ControllerError::Refused { kind: Kind::Stale, .. }) => {
                    // A flipped bit makes the controller say so, too, and one in another receiver's join makes a receiver of
                    // this name that is silent. Both have passed by then.
                    let silence = Duration::from_millis(joined.heartbeat_ms).min(SILENCE);
                    if taken.get_or_insert_with(Instant::now).elapsed() > silence * 2 {
                        return End::Taken(e);
                    }
                    self.unanswered(&e);
                }
                Err(e @ ControllerError::Refused { kind: Kind::NotFound | Kind::Invalid, .. }) => {
                    return End::Again(e.to_string());
                }
                Err(e) => self.unanswered(&e),
            }
        }
    }

    /// Gives an order to the models that it is about.
    fn take(&self, task: &Task) {
        let model = |id: &ModelId| self.models.iter().find(|m| m.id == *id);
        match task {
            Task::Stage { identity, .. } | Task::Abandon { identity, .. } | Task::Drop { identity, .. } => {
                if let Some(model) = model(&identity.model_id) {
                    model.take(task);
                }
            }
            Task::Load { order, set, identities } => {
                let ours: Vec<_> = identities.iter().filter_map(|i| Some((model(&i.model_id)?, i))).collect();
                let rendezvous = Arc::new(Rendezvous::new(ours.len()));
                for (model, identity) in ours {
                    let identities = vec![identity.clone()];
                    let load = Task::Load { order: *order, set: set.clone(), identities };
                    model.take_load(&load, *order, &rendezvous);
                }
            }
            Task::Live { set, live, why, .. } => {
                let event =
                    json!({ "event": "live", "receiver": self.id, "set": set, "live": live, "why": why });
                self.session.event(&event, || match why {
                    _ if *live => format!("set {set}: live"),
                    Some(why) => format!("set {set}: not live: {why}"),
                    None => format!("set {set}: not live"),
                });
            }
        }
    }

    /// The controller answers again.
    fn back(&mut self) {
        let Away { told, failures, .. } = std::mem::take(&mut self.away);
        if told {
            let event = json!({ "event": "controller_back", "receiver": self.id, "failures": failures });
            self.session.event(&event, || "the controller answers again".into());
        }
    }

    fn unanswered(&mut self, e: &ControllerError) {
        if self.stop.is_set() {
            return;
        }
        self.away.failures += 1;
        if !std::mem::replace(&mut self.away.told, true) {
            let event = json!({
                "event": "controller_away", "receiver": self.id, "kind": e.kind(), "error": e.to_string(),
            });
            self.session.event(&event, || format!("{e}; what is served stays, trying again"));
        }
        self.wait_a_while();
    }

    fn wait_a_while(&mut self) {
        let pause = self.away.pause.map_or(PAUSE.0, |p| p * 2).min(self.longest);
        self.away.pause = Some(pause);
        self.rest(pause);
    }

    fn rest(&self, pause: Duration) {
        let until = Instant::now() + pause;
        while Instant::now() < until && !self.stop.is_set() {
            std::thread::sleep(Duration::from_millis(20).min(pause));
        }
    }

    fn leave(&self) {
        if self.life.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        // The flag that ended everything else must not end this.
        let left = self.link.leave(&self.peer(), &Stop::after(FAREWELL));
        if let Err(error) = left {
            tracing::debug!(%error, "could not tell the controller that this receiver ends");
        }
    }
}

/// Delivers reports, one after the other.
struct Reporter<'a> {
    link: &'a ControllerClient,
    id: &'a ReceiverId,
    models: &'a [Model],
    life: &'a AtomicU64,
    doubt: &'a AtomicBool,
    stop: &'a Stop,
}

impl Reporter<'_> {
    /// Until all senders of reports are gone.
    fn run(&self, inbox: &Inbox<Sending>) {
        loop {
            match inbox.recv_timeout(Stop::GLANCE * 10) {
                Ok(sending) => {
                    let delivered = self.deliver(&sending);
                    if let Some(model) = self.models.get(sending.model) {
                        model.told(&sending, delivered);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Repeats until the controller has taken it, or does not want it.
    fn deliver(&self, sending: &Sending) -> bool {
        let (mut pause, mut refused) = (PAUSE.0, 0);
        while self.life.load(Ordering::Acquire) == sending.session {
            let spans = sending.intervals.iter().take(MAX_SPANS).map(Interval::span).collect();
            let report = Report {
                peer: Peer { receiver: self.id.clone(), session: sending.session },
                order: sending.answer.order,
                identity: sending.answer.identity.clone(),
                outcome: sending.answer.outcome.clone(),
                spans,
                mode: sending.mode.map(str::to_owned),
                pause_ms: sending.pause_ms,
            };
            match self.link.report(&report, self.stop) {
                Ok(_) => return true,
                Err(e) if !self.stop.is_set() && (passes(&e) || refused + 1 < CONFIRM) => {
                    refused += u32::from(!passes(&e));
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE.1);
                }
                // The order is not open any more, or not ours: the controller knows better.
                Err(error @ ControllerError::Refused { kind: Kind::Stale | Kind::NotFound, .. }) => {
                    tracing::info!(%error, order = %report.order, "the controller rejected a report as outdated");
                    if matches!(report.outcome, Outcome::Loaded) {
                        self.doubt.store(true, Ordering::Release);
                    }
                    return false;
                }
                Err(error) => {
                    if !self.stop.is_set() {
                        tracing::warn!(%error, order = %report.order, "the controller did not accept a report; the order will time out");
                    }
                    return false;
                }
            }
        }
        false
    }
}
