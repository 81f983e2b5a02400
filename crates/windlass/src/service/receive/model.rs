//! One model of a receiver that follows a controller: its image, its engines, and the two threads that work for them.
//!
//! Owns: the [`OrderQueue`] of the model and the threads that carry out its steps: the stager fetches; the loader applies
//! and has the engines load, concurrently. Called by [`super::member`], which passes orders in and reports out. Must not:
//! talk to the controller.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use serde_json::json;
use windlass_core::address::Token;
use windlass_core::barrier::{Order, Phase, SetName};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, Version};
use windlass_core::wire::control::{Brought, VersionInfo};
use windlass_data::image::Known;
use windlass_data::receiver::{
    Control, Fetched, Receiver, ReceiverConfig, ReceiverError, Stage as Doings, Start, StatusHandle, Synced,
};
use windlass_data::stop::Stop;
use windlass_data::tls::Trust;

use super::figures::{Interval, Rate};
use super::no_agent::NoAgent;
use super::order_queue::{Answer, Loading, OrderQueue, StageOrder, Staging};
use super::rendezvous::Rendezvous;
use super::tell_placed;
use crate::console::Session;
use crate::error::Error;
use crate::service::control::HttpControl;
use crate::service::controller::wire::{Doing, EngineDoing, Lane, Outcome, Task};
use crate::service::disk::as_dir::AsDir;
use crate::service::engines::{Engines, Label};
use crate::service::spans;

/// How long an agent may take to show a version that was announced, which is when it is sealed. An agent that was restarted
/// meanwhile reads what is in its region first.
const SHOWN_WITHIN: Duration = Duration::from_secs(5);
/// How often in a row no agent of the model must answer where a version was announced before the version counts as absent: an
/// agent that is restarted is back by then.
const UNREACHED: u32 = 3;

/// An answer on its way to the controller.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) model: usize,
    /// The session of the order.
    pub(super) session: u64,
    pub(super) answer: Answer,
    pub(super) mode: Option<&'static str>,
    pub(super) intervals: Vec<Interval>,
    pub(super) pause_ms: Option<f64>,
}

/// A load of one engine.
#[derive(Clone, Debug)]
pub(super) struct EngineLoad {
    pub(super) label: Label,
    pub(super) pause_ms: Option<f64>,
    pub(super) load_ms: f64,
    pub(super) ended: Instant,
}

/// What happened in the engines, as their events tell it.
pub(super) type EngineLoads = Arc<Mutex<Vec<EngineLoad>>>;

/// What threads share about a model.
struct State {
    orders: OrderQueue<Fetched>,
    session: u64,
    /// How far the pull under way is.
    progress: Option<StatusHandle>,
    /// Ends the pull under way.
    pulling: Option<Stop>,
    /// Ends the wait for engines, and for the other models of the order.
    settling: Option<Stop>,
    /// Where the models of the last load order meet.
    rendezvous: Option<(Order, Arc<Rendezvous>)>,
    /// What the controller takes for served here.
    claimed: Option<Identity>,
    /// What was found to be served when that was last looked at.
    seen: Option<Identity>,
    /// Loads that were not reported yet.
    unsent: usize,
    loads: u64,
    /// The last failure, until something succeeds.
    error: Option<String>,
    /// The version for which no agent answered, and how often.
    unreached: Option<(Identity, u32)>,
    rate: Rate,
    /// Who brought the last version that other receivers took part in.
    brought: Vec<Brought>,
    /// The version that was put up as a directory last.
    placed: Option<Identity>,
}

/// See the module's documentation.
pub(super) struct Model {
    pub(super) id: ModelId,
    index: usize,
    timeout: Duration,
    token: Token,
    trust: Option<Trust>,
    state: Mutex<State>,
    changed: Condvar,
    receiver: Mutex<Receiver>,
    engines: Option<(Engines, EngineLoads)>,
    /// Where versions are put up as directories.
    as_dir: Option<AsDir>,
    ending: AtomicBool,
    name: String,
    session: Session,
}

/// What a model is made with.
pub(super) struct Opening<'a> {
    pub(super) id: ModelId,
    pub(super) index: usize,
    pub(super) config: ReceiverConfig,
    pub(super) token: &'a Token,
    /// Authorities to trust for them.
    pub(super) trust: Option<&'a Trust>,
    /// What this receiver is called by the controller.
    pub(super) name: &'a str,
    pub(super) as_dir: Option<&'a AsDir>,
    pub(super) session: &'a Session,
    pub(super) stop: &'a Stop,
}

impl Model {
    /// Opens the image that an earlier receiver left.
    pub(super) fn open(
        opening: Opening<'_>,
        engines: Option<(Engines, EngineLoads)>,
    ) -> Result<Model, Error> {
        let Opening { id, index, config, token, trust, name, as_dir, session, stop } = opening;
        let timeout = config.transfer_timeout;
        let receiver = Receiver::open(config, Arc::new(NoAgent), None, stop)?;
        let known = receiver.current().map(|k| k.identity.clone());
        if let Some(image) = receiver.current() {
            let event = json!({ "event": "found", "receiver": name, "image": image });
            session.event(&event, || format!("{id}: found version {}", image.identity.version));
        }
        let state = State {
            orders: OrderQueue::new(known, room(&receiver)),
            session: 0,
            progress: None,
            pulling: None,
            settling: None,
            rendezvous: None,
            claimed: None,
            seen: None,
            unsent: 0,
            loads: 0,
            error: None,
            unreached: None,
            rate: Rate::default(),
            brought: Vec::new(),
            placed: None,
        };
        let found = receiver.current().cloned();
        let model = Model {
            id,
            index,
            timeout,
            token: token.clone(),
            trust: trust.cloned(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            receiver: Mutex::new(receiver),
            engines,
            as_dir: as_dir.cloned(),
            ending: AtomicBool::new(false),
            name: name.to_owned(),
            session: session.clone(),
        };
        if let Some(found) = found {
            // What cannot be put up now may be when it is loaded again.
            let _ = model.put_up(&found, stop).map_err(|e| tell_placed(Err(e), &found.identity, session));
        }
        Ok(model)
    }

    /// Puts up a version as a directory, if that was asked for.
    fn put_up(&self, known: &Known, stop: &Stop) -> Result<(), Error> {
        let Some(as_dir) = &self.as_dir else { return Ok(()) };
        let image = self.receiver().image().map(|image| image.region().dir().to_owned());
        let image = image.ok_or_else(|| Error::Bug("a version without an image was to be put up".into()))?;
        let placed = as_dir.put(&image, known, stop)?;
        tell_placed(Ok(placed), &known.identity, &self.session);
        self.state().placed = Some(known.identity.clone());
        Ok(())
    }

    /// The version that was put up last.
    pub(super) fn placed(&self) -> Option<Identity> {
        self.state().placed.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn receiver(&self) -> MutexGuard<'_, Receiver> {
        self.receiver.lock()
    }

    /// Whether its engines have said what they have, if it has any.
    pub(super) fn asked(&self) -> bool {
        self.engines.as_ref().is_none_or(|(engines, _)| engines.asked())
    }

    /// Whether it has engines, which may be restarted at any time.
    pub(super) fn has_engines(&self) -> bool {
        self.engines.is_some()
    }

    /// What is really served.
    fn truth(&self, state: &State) -> Option<Identity> {
        match &self.engines {
            Some((engines, _)) => engines.serving().map(|label| Identity {
                model_id: self.id.clone(),
                incarnation: label.incarnation,
                version: label.version,
            }),
            None => state.orders.serves().cloned(),
        }
    }

    /// A new session begins: no order of the last one counts. Answers what is served.
    pub(super) fn begin(&self, session: u64) -> Option<Identity> {
        let mut state = self.state();
        state.orders.rejoined();
        if let Some((_, rendezvous)) = state.rendezvous.take() {
            rendezvous.fail(self.id.as_str());
        }
        state.session = session;
        let truth = self.truth(&state);
        state.claimed.clone_from(&truth);
        state.seen.clone_from(&truth);
        truth
    }

    /// Whether the controller does not know the served version and no report about it is pending.
    pub(super) fn differs(&self) -> Option<String> {
        let mut state = self.state();
        if state.orders.is_loading() || state.unsent > 0 {
            return None;
        }
        let truth = self.truth(&state);
        if truth == state.seen {
            return None;
        }
        state.seen.clone_from(&truth);
        if truth == state.claimed {
            return None;
        }
        let name = |i: &Option<Identity>| i.as_ref().map_or_else(|| "nothing".into(), ToString::to_string);
        Some(format!("{} serves {}, not {} any more", self.id, name(&truth), name(&state.claimed)))
    }

    /// Takes in an order.
    pub(super) fn take(&self, task: &Task) {
        let mut state = self.state();
        match task {
            Task::Stage { identity, .. } => {
                // The controller does not count on a dead lineage.
                let claimed = state.claimed.take();
                state.claimed = claimed.filter(|c| c.incarnation >= identity.incarnation);
            }
            Task::Abandon { order, .. } => {
                if let Some((_, rendezvous)) = state.rendezvous.as_ref().filter(|(o, _)| o == order) {
                    rendezvous.fail(self.id.as_str());
                }
            }
            Task::Load { .. } | Task::Drop { .. } | Task::Live { .. } => {}
        }
        if state.orders.take(task)
            && let Some(stop) = &state.pulling
        {
            stop.set();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Takes in a load order, whose models meet before their engines are told. One that is at it gives up.
    pub(super) fn take_load(&self, task: &Task, order: Order, rendezvous: &Arc<Rendezvous>) {
        let mut state = self.state();
        if let Some(stop) = &state.settling {
            stop.set();
        }
        if let Some((_, before)) = state.rendezvous.replace((order, Arc::clone(rendezvous))) {
            before.fail(self.id.as_str());
        }
        drop(state);
        self.take(task);
    }

    /// A report was delivered, or is of no use any more.
    pub(super) fn told(&self, sending: &Sending, delivered: bool) {
        let mut state = self.state();
        match &sending.answer.outcome {
            Outcome::Loaded | Outcome::Failed { phase: Phase::Loading, .. } => {
                state.unsent = state.unsent.saturating_sub(1);
            }
            Outcome::Staged | Outcome::Absent { .. } | Outcome::Failed { .. } => return,
        }
        if delivered && sending.session == state.session {
            let loaded = matches!(sending.answer.outcome, Outcome::Loaded);
            state.claimed = loaded.then(|| sending.answer.identity.clone());
            // After a failure nothing is claimed, and only a change is worth another join.
            state.seen = if loaded { state.claimed.clone() } else { self.truth(&state) };
        }
    }

    /// How many loads succeeded, and the version of the last one.
    pub(super) fn loads(&self) -> (u64, Option<Version>) {
        let state = self.state();
        (state.loads, state.orders.loaded().map(|i| i.version))
    }

    /// What it is doing, for people, and whether that will have changed soon.
    pub(super) fn doing(&self) -> (Doing, bool) {
        let mut state = self.state();
        let (mut stage, about) = state.orders.about();
        let version = about.map(|i| i.version);
        let status = state.progress.as_ref().map(StatusHandle::get);
        let (mut bytes, mut of_bytes, mut rate) = (0, 0, 0.0);
        if let Some(status) = status.filter(|_| stage == "pulling") {
            stage = match status.stage {
                Doings::Idle | Doings::Asking => "waiting",
                Doings::Pulling => "pulling",
                Doings::Opening | Doings::Applying | Doings::Finishing => "applying",
            };
            (bytes, of_bytes) = (status.bytes_done, status.bytes);
            if !status.brought.is_empty() {
                state.brought = status.brought;
            }
            rate = state.rate.at(bytes, Instant::now());
        }
        if stage == "idle" && state.error.is_some() {
            stage = "failed";
        }
        let busy = !matches!(stage, "idle" | "staged" | "failed");
        let brought = state.brought.clone();
        drop(state);
        let engines = self.engines.as_ref().map_or_else(Vec::new, |(engines, _)| {
            let told = engines.status().into_iter().map(|s| EngineDoing {
                condition: serde_json::to_value(s.condition)
                    .ok()
                    .and_then(|v| v.as_str().map(str::to_owned))
                    .unwrap_or_default(),
                version: s.live.and_then(|l| l.parse::<Label>().ok()).map(|l| l.version),
                engine: s.engine,
                error: s.error,
                unplanned: s.unplanned,
                slow: s.slow,
            });
            told.collect()
        });
        let stage = stage.to_owned();
        (Doing { model_id: self.id.clone(), stage, version, bytes, of_bytes, rate, brought, engines }, busy)
    }

    /// Ends both threads, soon.
    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::Release);
        let state = self.state();
        for stop in state.pulling.iter().chain(&state.settling) {
            stop.set();
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn ended(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    fn rest(&self, state: &mut MutexGuard<'_, State>, most: Duration) {
        self.changed.wait_for(state, most);
    }

    // ---- staging -----------------------------------------------------------------------------------

    /// Carries out stage orders until the end.
    pub(super) fn stage_all(&self, out: &Sender<Sending>) {
        let mut control: Option<(String, Arc<HttpControl>)> = None;
        loop {
            let mut state = self.state();
            let step = loop {
                if self.ended() {
                    return;
                }
                let now = Instant::now();
                if let Some(step) = state.orders.next_stage(now) {
                    break step;
                }
                let ripe =
                    state.orders.ripe().map_or(Stop::GLANCE * 20, |at| at.saturating_duration_since(now));
                self.rest(&mut state, ripe.max(Stop::GLANCE));
            };
            let stop = Stop::after(self.timeout);
            let session = state.session;
            match step {
                Staging::Held(answer) => {
                    drop(state);
                    self.send(out, session, answer, Some("held"), Vec::new(), None);
                }
                Staging::Fetch(stage) => {
                    state.pulling = Some(stop.clone());
                    drop(state);
                    let result =
                        self.reach(&stage, &mut control, &stop).and_then(|()| self.fetch(&stage, &stop));
                    self.fetched(&stage, result, out);
                }
                Staging::Whole(stage) => {
                    state.pulling = Some(stop.clone());
                    drop(state);
                    let result =
                        self.reach(&stage, &mut control, &stop).and_then(|()| self.whole(&stage, &stop));
                    self.replaced(&stage, result, out);
                }
            }
        }
    }

    /// The agent of an order.
    fn control(
        &self,
        stage: &StageOrder,
        last: &mut Option<(String, Arc<HttpControl>)>,
    ) -> Result<Arc<HttpControl>, Error> {
        if let Some((_, control)) = last.as_ref().filter(|(url, _)| *url == stage.endpoint) {
            return Ok(Arc::clone(control));
        }
        let control = HttpControl::new(&stage.endpoint, self.token.clone())?;
        let control = Arc::new(control.with_trust(self.trust.clone()).with_timeout(self.timeout));
        self.receiver().turn_to(Arc::clone(&control) as Arc<dyn Control>);
        *last = Some((stage.endpoint.clone(), Arc::clone(&control)));
        Ok(control)
    }

    /// Finds the agent of an order, and waits a while for it to have the version, without holding anything.
    fn reach(
        &self,
        stage: &StageOrder,
        last: &mut Option<(String, Arc<HttpControl>)>,
        stop: &Stop,
    ) -> Result<(), Error> {
        let asked = self.control(stage, last).and_then(|control| {
            let info = control.version(None, stop).map_err(ReceiverError::from)?;
            if info.model_id == stage.identity.model_id {
                return Ok((control, info));
            }
            Err(Error::Plane {
                doing: "stage a version where it was announced",
                kind: Kind::Unsupported,
                source: format!("the agent at {} serves {}", stage.endpoint, info.model_id).into(),
            })
        });
        let mut state = self.state();
        let before = state.unreached.take_if(|(of, _)| *of == stage.identity).map_or(0, |(_, times)| times);
        match asked {
            Ok((control, info)) => {
                drop(state);
                Self::await_version(stage, &control, info, stop)
            }
            Err(e) if e.kind() == Kind::Cancelled => Err(e),
            Err(e) => {
                state.unreached = Some((stage.identity.clone(), before + 1));
                if before + 1 < UNREACHED {
                    return Err(e);
                }
                let (identity, endpoint) = (stage.identity.clone(), stage.endpoint.clone());
                Err(Error::NotReached { identity, endpoint, source: Box::new(e) })
            }
        }
    }

    fn await_version(
        stage: &StageOrder,
        control: &HttpControl,
        mut info: VersionInfo,
        stop: &Stop,
    ) -> Result<(), Error> {
        let Identity { incarnation, version, .. } = &stage.identity;
        let deadline = stop.with_timeout(SHOWN_WITHIN);
        while info.incarnation == *incarnation && info.version.is_none_or(|v| v < *version) {
            stop.check()?;
            if deadline.is_set() {
                let (endpoint, newest) = (stage.endpoint.clone(), info.version);
                return Err(Error::NotShown { identity: stage.identity.clone(), endpoint, newest });
            }
            let before = version.checked_sub(1).map(|v| (*incarnation, v));
            let before = before.unwrap_or((Incarnation(incarnation.0.saturating_sub(1)), Version::MAX));
            match control.version(Some(before), &deadline) {
                Ok(shown) => info = shown,
                // The last word counts.
                Err(e) if deadline.is_set() && e.kind() == Kind::Timeout => {}
                Err(e) => return Err(ReceiverError::from(e).into()),
            }
        }
        Ok(())
    }

    fn fetch(&self, stage: &StageOrder, stop: &Stop) -> Result<Option<Fetched>, Error> {
        let to = (stage.identity.incarnation, stage.identity.version);
        let last = self.state().orders.last().map(Fetched::known);
        let start = self.receiver().fetch(last.as_ref(), to, stop)?;
        match start {
            Start::Delta(fetch) => {
                self.state().progress = Some(fetch.status());
                Ok(Some(fetch.run(stop)?))
            }
            // Image bytes are the newest. A receiver that serves a version does not give it up for one that it was not told
            // to bring here: it would be out of the pool until all the others are there.
            Start::Whole { why, newest } if newest > stage.identity.version && self.serves_life(stage) => {
                Err(Error::Plane {
                    doing: "stage a version that the publisher is past",
                    kind: Kind::Stale,
                    source: format!("{why}, and image bytes are of version {newest}").into(),
                })
            }
            Start::Whole { why, .. } => {
                tracing::info!(identity = %stage.identity, why, "no usable delta; fetching the full image");
                Ok(None)
            }
        }
    }

    /// Whether something of the same incarnation is served here.
    fn serves_life(&self, stage: &StageOrder) -> bool {
        let state = self.state();
        self.truth(&state).is_some_and(|i| i.incarnation == stage.identity.incarnation)
    }

    fn fetched(&self, stage: &StageOrder, result: Result<Option<Fetched>, Error>, out: &Sender<Sending>) {
        let now = Instant::now();
        let mut state = self.state();
        (state.progress, state.pulling) = (None, None);
        let session = state.session;
        match result {
            Ok(Some(fetched)) => {
                let (base, known) = (fetched.base(), fetched.known());
                let synced = fetched.synced().clone();
                spans::of_sync(&known.identity, &synced);
                state.brought.clone_from(&synced.brought);
                let delta = (&known.identity, fetched, synced.wire_bytes);
                let answer = state.orders.fetched(stage.order, &base, delta, now);
                state.error = None;
                drop(state);
                let interval =
                    Interval::of(Lane::Wire, "pull delta", now, synced.wire_ms, Some(synced.wire_bytes));
                self.answer(out, session, answer, Some("delta"), vec![interval]);
            }
            Ok(None) => {
                state.orders.needs_whole(stage.order);
                drop(state);
            }
            Err(e) => self.stage_failed(state, stage, &e, out),
        }
        self.changed.notify_all();
    }

    fn whole(&self, stage: &StageOrder, stop: &Stop) -> Result<(Synced, Identity), Error> {
        let mut receiver = self.receiver();
        self.state().progress = Some(receiver.status());
        let synced = receiver.stage_to((stage.identity.incarnation, stage.identity.version), stop)?;
        let known = receiver.held().map(|k| k.identity.clone());
        let known = known.ok_or_else(|| Error::Bug("a sync ended without a whole image".into()))?;
        Ok((synced, known))
    }

    fn replaced(&self, stage: &StageOrder, result: Result<(Synced, Identity), Error>, out: &Sender<Sending>) {
        let now = Instant::now();
        let room = room(&self.receiver());
        let mut state = self.state();
        state.orders.set_room(room);
        (state.progress, state.pulling) = (None, None);
        let session = state.session;
        match result {
            Ok((synced, got)) => {
                spans::of_sync(&got, &synced);
                state.brought.clone_from(&synced.brought);
                let answer = state.orders.replaced(stage.order, &got, now);
                state.error = None;
                drop(state);
                let (what, mode) = match synced.mode {
                    "delta" => ("pull delta", "delta"),
                    "none" => ("compare", "held"),
                    _ => ("pull image", "full"),
                };
                let applied = Interval::of(Lane::Wire, "apply", now, synced.apply_ms, None);
                let pulled =
                    Interval::of(Lane::Wire, what, applied.began, synced.wire_ms, Some(synced.wire_bytes));
                let intervals = if synced.apply_ms > 0.0 { vec![pulled, applied] } else { vec![pulled] };
                self.answer(out, session, answer, Some(mode), intervals);
            }
            Err(e) => self.stage_failed(state, stage, &e, out),
        }
        self.changed.notify_all();
    }

    fn stage_failed(
        &self,
        state: MutexGuard<'_, State>,
        stage: &StageOrder,
        e: &Error,
        out: &Sender<Sending>,
    ) {
        drop(state);
        let image = self.receiver().held().map(|k| k.identity.clone());
        let mut state = self.state();
        let (session, text) = (state.session, e.chain());
        let (phase, kind, reason) = (Phase::Staging, e.kind(), text.clone());
        let outcome = match e {
            Error::NotShown { .. } | Error::NotReached { .. } => Outcome::Absent { reason },
            _ => Outcome::Failed { phase, kind, reason },
        };
        let answer = state.orders.stage_failed(stage.order, image, outcome);
        if answer.is_some() {
            state.error = Some(text);
        }
        drop(state);
        self.answer(out, session, answer, None, Vec::new());
    }

    // ---- loading -----------------------------------------------------------------------------------

    /// Carries out load orders until the end.
    pub(super) fn load_all(&self, out: &Sender<Sending>) {
        loop {
            let mut state = self.state();
            let step = loop {
                if self.ended() {
                    return;
                }
                if let Some(step) = state.orders.next_load() {
                    break step;
                }
                self.rest(&mut state, Stop::GLANCE * 20);
            };
            state.unsent += 1;
            match step {
                Loading::Missing(answer) => {
                    let session = state.session;
                    if let Some((_, rendezvous)) = &state.rendezvous {
                        rendezvous.fail(self.id.as_str());
                    }
                    drop(state);
                    self.send(out, session, answer, None, Vec::new(), None);
                }
                Loading::Load { order, set, identity, apply } => {
                    let (session, deltas) = (state.session, state.orders.take_deltas(apply));
                    let rendezvous = state.rendezvous.as_ref().filter(|(o, _)| *o == order);
                    let rendezvous = rendezvous.map(|(_, t)| Arc::clone(t));
                    drop(state);
                    let event = json!({
                        "event": "loading", "receiver": self.name, "order": order, "set": set, "identity": identity,
                    });
                    self.session.event(&event, || format!("{identity}: loading"));
                    self.load((session, set), deltas, rendezvous.as_deref(), out);
                }
            }
            self.changed.notify_all();
        }
    }

    fn load(
        &self,
        (session, set): (u64, SetName),
        deltas: Vec<Fetched>,
        rendezvous: Option<&Rendezvous>,
        out: &Sender<Sending>,
    ) {
        let began = Instant::now();
        let (mut intervals, mut pause_ms) = (Vec::new(), None);
        let stop = Stop::after(self.timeout);
        self.state().settling = Some(stop.clone());
        let meet = || {
            rendezvous.map_or(Ok(()), |t| t.meet(&stop)).map_err(|why| Error::Plane {
                doing: "load the models of one order together",
                kind: Kind::Stale,
                source: why.into(),
            })
        };
        let result = if self.may_lead(&deltas) {
            // The engines first, and the image while they serve.
            meet().and_then(|()| {
                let ahead = self.lead(&deltas, &stop);
                self.apply(deltas, &mut intervals).map(|known| (known, ahead))
            })
        } else {
            let applied = self.apply(deltas, &mut intervals);
            if let (Err(_), Some(rendezvous)) = (&applied, rendezvous) {
                rendezvous.fail(self.id.as_str());
            }
            applied.and_then(|known| meet().map(|()| (known, Vec::new())))
        };
        let result = result.and_then(|(known, ahead)| {
            self.settle(&known, ahead, &stop, &mut intervals, &mut pause_ms)?;
            self.put_up(&known, &stop)
        });
        let mut state = self.state();
        state.settling = None;
        let text = result.as_ref().err().map(Error::chain);
        state.loads += u64::from(result.is_ok());
        state.error.clone_from(&text);
        let answer = state.orders.load_ended(result.map_err(|e| (e.kind(), e.chain())));
        // The order of a session that is over is not answered; the next join says what is served.
        let answer = answer.filter(|_| state.session == session);
        if answer.is_none() {
            state.unsent = state.unsent.saturating_sub(1);
        }
        drop(state);
        let ms = began.elapsed().as_secs_f64() * 1e3;
        if let Some(answer) = answer {
            if let Outcome::Loaded = answer.outcome {
                let identity = &answer.identity;
                let event = json!({
                    "event": "loaded", "receiver": self.name, "order": answer.order, "set": set,
                    "identity": identity, "ms": ms, "pause_ms": pause_ms,
                });
                self.session.event(&event, || format!("{identity}: loaded in {ms:.1} ms"));
            }
            self.send(out, session, answer, None, intervals, pause_ms);
        }
    }

    /// Whether engines would load the one delta of a load before the image holds what it leads to.
    fn may_lead(&self, deltas: &[Fetched]) -> bool {
        let Some((engines, _)) = &self.engines else { return false };
        deltas.len() == 1 && engines.may_lead(self.receiver().current())
    }

    /// Has engines load it so; what they said of it.
    fn lead(&self, deltas: &[Fetched], stop: &Stop) -> Vec<EngineLoad> {
        let Some((engines, loads)) = &self.engines else { return Vec::new() };
        loads.lock().clear();
        deltas.iter().for_each(|delta| engines.lead(delta, stop));
        std::mem::take(&mut *loads.lock())
    }

    /// Lets the engines load what the image holds, and waits for them; `ahead` is what they loaded before it did. Without
    /// engines there is nothing to do.
    fn settle(
        &self,
        known: &Known,
        ahead: Vec<EngineLoad>,
        stop: &Stop,
        intervals: &mut Vec<Interval>,
        pause_ms: &mut Option<f64>,
    ) -> Result<(), Error> {
        let Some((engines, loads)) = &self.engines else { return Ok(()) };
        // What was told before belongs to earlier loads.
        loads.lock().clear();
        engines.want(known);
        let settled = engines.settle(known, stop);
        let done = std::mem::take(&mut *loads.lock());
        for load in ahead.iter().chain(&done).filter(|l| l.label == Label::from(known)) {
            if let Some(ms) = load.pause_ms {
                intervals.push(Interval::of(Lane::Engine, "pause", load.ended, ms, None));
                *pause_ms = Some(pause_ms.map_or(ms, |p| p.max(ms)));
            }
            intervals.push(Interval::of(Lane::Engine, "load", load.ended, load.load_ms, None));
        }
        settled
    }

    /// Brings the image to the version of a load.
    fn apply(&self, deltas: Vec<Fetched>, intervals: &mut Vec<Interval>) -> Result<Known, Error> {
        let count = deltas.len();
        let (mut receiver, stop) = (self.receiver(), Stop::after(self.timeout));
        if count == 0 {
            receiver.reveal(&stop)?;
        } else {
            let serves = |e: &Engines| deltas.last().is_some_and(|last| e.serves(&last.known()));
            let shown = if self.engines.as_ref().is_some_and(|(engines, _)| serves(engines)) {
                receiver.show_aside(deltas, &stop)
            } else {
                receiver.show(deltas, &stop)
            };
            let ended = Instant::now();
            let image = receiver.held().map(|k| k.identity.clone());
            self.state().orders.applied(count, image);
            let synced = shown?;
            intervals.push(Interval::of(Lane::Wire, "apply", ended, synced.open_ms + synced.apply_ms, None));
        }
        let known = receiver.current().cloned();
        known.ok_or_else(|| Error::Bug("a version was to be loaded from an image that is not whole".into()))
    }

    // ---- telling -----------------------------------------------------------------------------------

    fn answer(
        &self,
        out: &Sender<Sending>,
        session: u64,
        answer: Option<Answer>,
        mode: Option<&'static str>,
        intervals: Vec<Interval>,
    ) {
        if let Some(answer) = answer {
            self.send(out, session, answer, mode, intervals, None);
        }
    }

    fn send(
        &self,
        out: &Sender<Sending>,
        session: u64,
        answer: Answer,
        mode: Option<&'static str>,
        intervals: Vec<Interval>,
        pause_ms: Option<f64>,
    ) {
        let (order, identity) = (answer.order, &answer.identity);
        match &answer.outcome {
            Outcome::Staged => {
                let event = json!({
                    "event": "staged", "receiver": self.name, "order": order, "identity": identity, "mode": mode,
                });
                self.session.event(&event, || format!("{identity}: staged ({})", mode.unwrap_or("held")));
            }
            Outcome::Loaded => {}
            Outcome::Absent { reason } => {
                let event = json!({
                    "event": "order_failed", "receiver": self.name, "order": order, "identity": identity,
                    "phase": Phase::Staging, "kind": Kind::NotFound, "reason": reason,
                });
                self.session.event(&event, || format!("{identity}: {reason}"));
            }
            Outcome::Failed { phase, kind, reason } => {
                let event = json!({
                    "event": "order_failed", "receiver": self.name, "order": order, "identity": identity,
                    "phase": phase, "kind": kind, "reason": reason,
                });
                self.session.event(&event, || format!("{identity}: {reason}"));
            }
        }
        // The channel is closed when the receiver ends.
        let _ = out.send(Sending { model: self.index, session, answer, mode, intervals, pause_ms });
    }
}

/// How much memory deltas may take that wait: no more than the image.
fn room(receiver: &Receiver) -> u64 {
    receiver.image().map_or(0, |image| image.manifest().data_bytes())
}
