//! The controller's state behind one lock, and the execution of the barrier's actions.
//!
//! Owns: the barrier with its clock, the pending orders, the waiters, and the record. Called by the routes with their
//! requests, and by the ticker when a deadline has passed. No code awaits while it holds the lock; a waiter gets a channel.
//! Must not: decide what the barrier decides.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use windlass_core::address::Token;
use windlass_core::barrier::{
    Action, Barrier, BarrierError, Blocked, Config, Event, EvictReason, FenceReason, GateFailure, LagReason,
    Limits, Millis, ModelSnapshot, NotifyOutcome, Peer, Phase, ReceiverId, Served, SetConfig, SetName,
    SyncNotify, WaitId,
};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, Version};

use super::metrics::Counters;
use super::outbox::Outbox;
use super::record::{Record, wire_bytes};
use super::status::{About, Status, Unix, status};
use super::wire::{Doing, Join, NotifyVersion, Numbered, Outcome, Report, Task, TrainerLeft};
use crate::service::http::Failure;

/// Configuration of the service.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model sets. If there are none, each model becomes its own set when it is first announced.
    pub sets: Vec<SetConfig>,
    /// Template of sets created at run time; its name and models are ignored.
    pub template: SetConfig,
    pub limits: Limits,
}

/// Maximum number of open evals: each holds its trainer's text.
pub(super) const MAX_EVALS: usize = 256;
/// Maximum number of concurrent page views.
pub(super) const MAX_LISTENERS: usize = 32;

/// How a wait ended.
#[derive(Debug)]
pub(super) enum Answer {
    Gate(Result<Served, GateFailure>),
    Notify(NotifyOutcome),
}

/// An eval that waits for a runner.
#[derive(Debug)]
pub(super) struct Eval {
    pub(super) id: WaitId,
    pub(super) set: SetName,
    pub(super) served: Served,
    pub(super) words: Value,
}

/// The controller, shared by all that answer requests.
#[derive(Debug)]
pub(super) struct Hub {
    state: Mutex<State>,
    clock: Clock,
    /// Rings when the next deadline is sooner than the ticker knows.
    pub(super) sooner: Notify,
    /// Counts what is worth showing at once.
    pub(super) changed: watch::Sender<u64>,
    /// Counts polls, which change nothing but when a receiver was last seen.
    pub(super) heard: AtomicU64,
    /// The newest document for page views, made by [`super::events`].
    pub(super) document: watch::Sender<Arc<str>>,
    /// Room for page views.
    pub(super) listeners: Arc<Semaphore>,
    ended: watch::Receiver<bool>,
    /// Agents are asked with the controller's own token.
    pub(super) token: Token,
}

#[derive(Debug)]
struct Clock {
    start: Instant,
    unix: Unix,
}

/// A client that waits for an answer.
#[derive(Debug)]
struct Waiter {
    tell: oneshot::Sender<Answer>,
    /// Name the waiter gave itself.
    who: String,
}

/// What is behind the lock.
#[derive(Debug)]
pub(super) struct State {
    pub(super) barrier: Barrier,
    pub(super) limits: Limits,
    pub(super) record: Record,
    pub(super) counters: Counters,
    template: Option<SetConfig>,
    /// Incarnations whose agents have reported their versions.
    asked: HashMap<ModelId, Incarnation>,
    outboxes: HashMap<ReceiverId, Outbox>,
    waiters: HashMap<WaitId, Waiter>,
    next_wait: u64,
    /// What trainers said about evals that have not begun.
    words: HashMap<WaitId, (SetName, Value)>,
    evals: VecDeque<Eval>,
    /// Rings when there is an eval to run, and when there is a new set.
    news: watch::Sender<u64>,
    /// When the ticker will look next.
    planned: Option<Millis>,
    /// The kind of the failure that is being reported.
    reported: Option<Kind>,
}

impl Hub {
    pub(super) fn new(
        settings: Settings,
        token: Token,
        ended: watch::Receiver<bool>,
    ) -> Result<Hub, BarrierError> {
        let Settings { sets, template, limits } = settings;
        let (barrier, template) = if sets.is_empty() {
            (Barrier::without_sets(limits.clone())?, Some(template))
        } else {
            (Barrier::new(Config { sets, limits: limits.clone() })?, None)
        };
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let state = State {
            barrier,
            limits,
            record: Record::default(),
            counters: Counters::default(),
            template,
            asked: HashMap::new(),
            outboxes: HashMap::new(),
            waiters: HashMap::new(),
            next_wait: first_wait(unix),
            words: HashMap::new(),
            evals: VecDeque::new(),
            news: watch::Sender::new(0),
            planned: None,
            reported: None,
        };
        Ok(Hub {
            state: Mutex::new(state),
            clock: Clock { start: Instant::now(), unix: unix.as_millis() as u64 },
            sooner: Notify::new(),
            changed: watch::Sender::new(0),
            heard: AtomicU64::new(0),
            document: watch::Sender::new("".into()),
            listeners: Arc::new(Semaphore::new(MAX_LISTENERS)),
            ended,
            token,
        })
    }

    pub(super) fn now(&self) -> Millis {
        self.clock.start.elapsed().as_millis() as Millis
    }

    /// Returns when the service ends.
    pub(super) async fn ended(&self) {
        let _ = self.ended.clone().wait_for(|e| *e).await;
    }

    /// Does something with the state. The ticker and the page are told if they should look.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut State, Millis) -> T) -> T {
        let mut state = self.lock();
        // The time is taken under the lock, so that it never steps back between two calls.
        let done = work(&mut state, self.now());
        let next = state.barrier.next_deadline();
        if next.is_some_and(|n| state.planned.is_none_or(|p| n < p)) {
            self.sooner.notify_one();
        }
        done
    }

    /// The same for what changes what people see.
    pub(super) fn change<T>(&self, work: impl FnOnce(&mut State, Millis) -> T) -> T {
        let done = self.with(work);
        self.changed.send_modify(|n| *n += 1);
        done
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Everything there is to see.
    pub(super) fn status(&self) -> Status {
        self.with(|state, now| {
            state.tick(now);
            state.status(self.clock.unix)
        })
    }

    /// Deals with deadlines as they pass, until it is dropped.
    pub(super) async fn tick(&self) {
        loop {
            let (acted, next) = {
                let mut state = self.lock();
                let acted = state.tick(self.now());
                state.planned = state.barrier.next_deadline();
                (acted, state.planned)
            };
            if acted {
                self.changed.send_modify(|n| *n += 1);
            }
            // A day if nothing is due: `sooner` ends the sleep when that changes.
            let until = next.map_or(86_400_000, |at| at.saturating_sub(self.now()).max(1));
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(until)) => {}
                () = self.sooner.notified() => {}
            }
        }
    }
}

/// The first number of a wait: different after each restart of the controller, so that the result of an eval that an earlier
/// one asked for is not taken for that of another. Fits into what JavaScript can count to.
fn first_wait(unix: Duration) -> u64 {
    (unix.as_millis() as u64 & 0xffff_ffff) << 20
}

impl State {
    /// Tells the barrier what happened, and does what it says.
    pub(super) fn step(&mut self, now: Millis, event: Event) -> Result<(), BarrierError> {
        let actions = self.barrier.step(now, event)?;
        self.carry_out(now, actions);
        Ok(())
    }

    /// Returns whether anything was due.
    pub(super) fn tick(&mut self, now: Millis) -> bool {
        let actions = self.barrier.tick(now);
        let any = !actions.is_empty();
        self.carry_out(now, actions);
        any
    }

    /// The same as [`State::step`] for events that may name unknown models: without configured sets, each
    /// becomes a set of its own, if there is nothing else to be said against the event.
    fn step_new(
        &mut self,
        now: Millis,
        event: Event,
        models: &[ModelId],
    ) -> Result<Vec<Action>, BarrierError> {
        let new: Vec<_> = models.iter().filter(|m| self.barrier.set_of(m).is_err()).collect();
        let Some(template) = self.template.clone().filter(|_| !new.is_empty()) else {
            return self.barrier.step(now, event);
        };
        match self.barrier.step(now, event.clone()) {
            Err(BarrierError::UnknownModel { .. }) => {}
            other => return other,
        }
        for model in new {
            let set = SetName::new(model.as_str())?;
            self.barrier.add_set(SetConfig { name: set, models: vec![model.clone()], ..template.clone() })?;
            tracing::info!(model_id = %model, "new set");
        }
        self.ring();
        self.barrier.step(now, event)
    }

    fn ring(&self) {
        self.news.send_modify(|n| *n += 1);
    }

    /// Rings at the next eval and the next new set.
    pub(super) fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// Whether sets are made as models turn up.
    pub(super) fn zero_config(&self) -> bool {
        self.template.is_some()
    }

    fn status(&self, base: Unix) -> Status {
        let orders = |id: &ReceiverId| self.outboxes.get(id).map_or(0, Outbox::len);
        let blocked = |set: &SetName| self.barrier.blocked(set).unwrap_or(Blocked::UpToDate);
        let waiter = |id: WaitId| self.waiters.get(&id).map_or("?", |w| w.who.as_str()).to_owned();
        let about = About { record: &self.record, heartbeat: self.limits.heartbeat_ms, base };
        let made = status(self.barrier.snapshot(), &about, orders, blocked, waiter);
        Status { zero_config: self.zero_config(), ..made }
    }

    // ---- those who wait ---------------------------------------------------------------------------

    /// Opens a wait. The answer comes on the channel, perhaps before `event` returns.
    pub(super) fn wait(
        &mut self,
        now: Millis,
        who: String,
        event: impl FnOnce(WaitId) -> Event,
    ) -> Result<(WaitId, oneshot::Receiver<Answer>), BarrierError> {
        let (id, answer) = self.new_wait(who);
        match self.step(now, event(id)) {
            Ok(()) => Ok((id, answer)),
            Err(refused) => {
                self.waiters.remove(&id);
                Err(refused)
            }
        }
    }

    fn new_wait(&mut self, who: String) -> (WaitId, oneshot::Receiver<Answer>) {
        self.next_wait += 1;
        let id = WaitId(self.next_wait);
        let (tell, answer) = oneshot::channel();
        self.waiters.insert(id, Waiter { tell, who });
        (id, answer)
    }

    /// The waiter has disconnected.
    pub(super) fn cancel(&mut self, now: Millis, id: WaitId) {
        self.words.remove(&id);
        self.evals.retain(|e| e.id != id);
        if self.waiters.remove(&id).is_some() {
            // One that was answered at this very moment is not open any more, which is as good.
            let _ = self.step(now, Event::Cancel { id });
        }
    }

    fn answer(&mut self, id: WaitId, answer: Answer) {
        self.words.remove(&id);
        self.evals.retain(|e| e.id != id);
        if let Some(waiter) = self.waiters.remove(&id) {
            // The waiter may just have disconnected.
            let _ = waiter.tell.send(answer);
        }
    }

    // ---- trainers ---------------------------------------------------------------------------------

    /// A trainer has published a version. With `sync`, how long it waits for the load, the answer comes on the channel.
    pub(super) fn notify(
        &mut self,
        now: Millis,
        notify: &NotifyVersion,
        sync: Option<Millis>,
    ) -> Result<Option<(WaitId, oneshot::Receiver<Answer>)>, BarrierError> {
        let who = format!("the trainer of {}", notify.model_id);
        let wait = sync.map(|timeout| (timeout, self.new_wait(who)));
        let identity = Identity {
            model_id: notify.model_id.clone(),
            incarnation: notify.incarnation,
            version: notify.version,
        };
        let passed = self.is_served(&identity);
        let event = Event::Notify {
            sender_endpoint: notify.sender_endpoint.clone(),
            sync: wait.as_ref().map(|(timeout, (id, _))| SyncNotify {
                id: *id,
                eval: notify.eval.is_some(),
                timeout: *timeout,
            }),
            identity,
        };
        let told = self.step_new(now, event, std::slice::from_ref(&notify.model_id));
        let told = told.and_then(|actions| Ok((actions, self.barrier.set_of(&notify.model_id)?.clone())));
        match told {
            Ok((actions, set)) => {
                self.record.announced(now, &set, notify, passed);
                if let (Some((_, (id, _))), Some(words)) = (&wait, &notify.eval) {
                    self.words.insert(*id, (set, words.clone()));
                }
                self.carry_out(now, actions);
                Ok(wait.map(|(_, wait)| wait))
            }
            Err(refused) => {
                if let Some((_, (id, _))) = wait {
                    self.waiters.remove(&id);
                }
                let who = format!("trainer of {}", notify.model_id);
                if refused.kind() == Kind::Stale {
                    self.record.error(now, who, Kind::Stale, refused.to_string());
                }
                Err(refused)
            }
        }
    }

    /// Whether it is worth asking a trainer's agent what was announced before this controller was there: the models of a
    /// strict set need a version in common, and perhaps only an earlier controller was told of it.
    pub(super) fn wants_history(&self, notify: &NotifyVersion) -> bool {
        let asked = self.asked.get(&notify.model_id) == Some(&notify.incarnation);
        !asked && self.group_of(&notify.model_id).len() > 1
    }

    /// The models that must have a version in common with this one, itself among them.
    fn group_of(&self, model: &ModelId) -> Vec<ModelSnapshot> {
        let groups = self.barrier.snapshot().sets.into_iter().flat_map(|s| s.groups);
        let found = groups.map(|g| g.models).find(|models| models.iter().any(|m| m.model == *model));
        found.unwrap_or_default()
    }

    /// What an agent can still give counts as announced, as far back as another model of the set is. It comes before the
    /// notify itself, oldest first: a receiver with the newest image does not go back.
    pub(super) fn recall(&mut self, now: Millis, notify: &NotifyVersion, versions: &[Version]) {
        self.asked.insert(notify.model_id.clone(), notify.incarnation);
        let group = self.group_of(&notify.model_id);
        let others = group.iter().filter(|m| m.model != notify.model_id);
        let low = others.filter_map(|m| m.newest).min().unwrap_or(0);
        for version in versions.iter().copied().filter(|v| (low..notify.version).contains(v)) {
            let (model_id, incarnation) = (notify.model_id.clone(), notify.incarnation);
            let (identity, sender_endpoint) =
                (Identity { model_id, incarnation, version }, notify.sender_endpoint.clone());
            // What is refused here the notify is refused for.
            let _ = self.step(now, Event::Notify { identity, sender_endpoint, sync: None });
        }
    }

    /// A trainer says that it has ended, as it should.
    pub(super) fn trainer_left(&mut self, now: Millis, left: &TrainerLeft) -> Result<(), BarrierError> {
        self.barrier.set_of(&left.model_id)?;
        let identity =
            Identity { model_id: left.model_id.clone(), incarnation: left.incarnation, version: 0 };
        self.record.left(now, &identity).map_err(|current| {
            tracing::debug!(%identity, %current, "an earlier incarnation of a trainer has left");
            BarrierError::StaleIncarnation { identity, current }
        })?;
        tracing::info!(model_id = %left.model_id, incarnation = %left.incarnation, "the trainer has left");
        Ok(())
    }

    /// Whether a set serves this version, or a newer one of the same incarnation.
    fn is_served(&self, identity: &Identity) -> bool {
        let set = self.barrier.set_of(&identity.model_id);
        let served = set.and_then(|set| self.barrier.service_version(set)).ok().flatten();
        served.is_some_and(|served| {
            served.identities.iter().any(|i| {
                i.model_id == identity.model_id
                    && i.incarnation == identity.incarnation
                    && i.version >= identity.version
            })
        })
    }

    /// Why a synchronous notify has no answer by its deadline.
    pub(super) fn late(&self, id: WaitId, notify: &NotifyVersion) -> Failure {
        let name = format!("{}@{}.{}", notify.model_id, notify.incarnation, notify.version);
        let message = if self.words.contains_key(&id) || notify.eval.is_none() {
            let set = self.barrier.set_of(&notify.model_id);
            let why = set
                .and_then(|set| self.barrier.blocked(set))
                .map_or_else(|e| e.to_string(), |b| b.to_string());
            format!("{name} is not served in time: {why}")
        } else if self.evals.iter().any(|e| e.id == id) {
            format!("{name} is served, but no runner has taken its eval: start one (windlass.serve_evals)")
        } else {
            format!("{name} is served, but its eval did not end in time")
        };
        Failure::new(Kind::Timeout, message)
    }

    /// Whether another eval may be asked for.
    pub(super) fn has_room_for_an_eval(&self) -> bool {
        self.words.len() + self.evals.len() < MAX_EVALS
    }

    /// The next eval of a set, or of any.
    pub(super) fn take_eval(&mut self, set: Option<&SetName>) -> Option<Eval> {
        let at = self.evals.iter().position(|e| set.is_none_or(|s| e.set == *s))?;
        self.evals.remove(at)
    }

    // ---- receivers --------------------------------------------------------------------------------

    /// A receiver joins.
    pub(super) fn join(&mut self, now: Millis, join: &Join) -> Result<(), BarrierError> {
        let event =
            Event::Join { peer: join.peer.clone(), models: join.models.clone(), has: join.has.clone() };
        let actions = self.step_new(now, event, &join.models)?;
        // The actions include the eviction of its earlier session, which concerns the state before.
        let (evicted, rest): (Vec<_>, Vec<_>) =
            actions.into_iter().partition(|a| matches!(a, Action::Evict { .. }));
        self.carry_out(now, evicted);
        self.record.joined(now, join);
        let known = self.outboxes.get(&join.peer.receiver).is_some_and(|o| o.is_of(&join.peer));
        if !known {
            let outbox = Outbox::new(join.peer.session, join.models.len());
            self.outboxes.insert(join.peer.receiver.clone(), outbox);
            tracing::info!(receiver = %join.peer.receiver, host = join.host, "joined");
        }
        self.carry_out(now, rest);
        Ok(())
    }

    /// A receiver is alive and says what it does. Returns whether that is news.
    pub(super) fn hear(&mut self, now: Millis, peer: &Peer, doing: Vec<Doing>) -> Result<bool, BarrierError> {
        self.step(now, Event::Heartbeat { peer: peer.clone() })?;
        Ok(self.record.doing(&peer.receiver, doing))
    }

    /// A receiver asks for orders after those it took: those there are, or what rings at the next one.
    pub(super) fn poll(&mut self, now: Millis, peer: &Peer, after: u64) -> Result<Polled, PollError> {
        self.step(now, Event::Heartbeat { peer: peer.clone() })?;
        let outbox = self.outboxes.get_mut(&peer.receiver).filter(|o| o.is_of(peer));
        let outbox = outbox.ok_or_else(|| BarrierError::UnknownReceiver(peer.receiver.clone()))?;
        if !outbox.taken(after) {
            return Err(PollError::NeverGiven { receiver: peer.receiver.clone(), after });
        }
        Ok(if outbox.is_empty() { Err(outbox.bell()) } else { Ok(outbox.give()) })
    }

    /// How an order went.
    pub(super) fn report(&mut self, now: Millis, report: &Report) -> Result<(), BarrierError> {
        let Report { peer, order, identity, outcome, .. } = report.clone();
        self.reported = None;
        let event = match outcome {
            Outcome::Staged => Event::Staged { peer, order, identity },
            Outcome::Loaded => Event::Loaded { peer, order, identity },
            Outcome::Absent { reason } => {
                tracing::debug!(receiver = %peer.receiver, %identity, "{reason}");
                Event::Absent { peer, order, identity }
            }
            Outcome::Failed { phase, kind, reason } => {
                self.reported = Some(kind);
                Event::Failed { peer, order, identity, phase, reason }
            }
        };
        let actions = self.barrier.step(now, event)?;
        if let Ok(set) = self.barrier.set_of(&report.identity.model_id).cloned() {
            self.counters.reported(&report.outcome, wire_bytes(&report.spans), report.pause_ms, &set);
            self.record.reported(now, &set, report);
        }
        self.carry_out(now, actions);
        self.reported = None;
        Ok(())
    }

    // ---- what the barrier wants done --------------------------------------------------------------

    fn carry_out(&mut self, now: Millis, actions: Vec<Action>) {
        let mut overfull = Vec::new();
        for action in actions {
            match action {
                Action::Stage { to, order, identity, sender_endpoint } => {
                    self.order(&to, Task::Stage { order, identity, sender_endpoint }, &mut overfull);
                }
                Action::Load { to, order, set, identities } => {
                    self.record.loading(now, &set, &identities);
                    self.order(&to, Task::Load { order, set, identities }, &mut overfull);
                }
                Action::Abandon { to, order, identity } => {
                    self.order(&to, Task::Abandon { order, identity }, &mut overfull);
                }
                Action::Drop { to, order, identity } => {
                    self.order(&to, Task::Drop { order, identity }, &mut overfull);
                }
                Action::GoLive { receiver, set, models, version } => {
                    tracing::info!(%receiver, %set, version, "live");
                    self.record.fenced(&receiver, &models, None);
                    self.tell(&receiver, Task::Live { set, models, live: true, why: None });
                }
                Action::Fence { receiver, set, models, why } => {
                    let text = self.fenced(now, &receiver, &set, &why);
                    self.record.fenced(&receiver, &models, Some(&text));
                    self.tell(&receiver, Task::Live { set, models, live: false, why: Some(text) });
                }
                Action::Evict { receiver, why } => self.evicted(now, &receiver, why),
                Action::Lagging { receiver, identity, why } => self.lagging(now, &receiver, &identity, &why),
                Action::Absent { identity, endpoint, receiver } => {
                    let text = format!(
                        "{identity} was announced, but no agent at {endpoint} shows it (receiver {receiver} asked); versions \
                         that are there are served: publish it, or announce what was published and where"
                    );
                    tracing::warn!("{text}");
                    self.counters.absent += 1;
                    self.counters.failed(Kind::NotFound);
                    self.record.error(now, format!("trainer of {}", identity.model_id), Kind::NotFound, text);
                }
                Action::BackingOff { receiver, set, failures, delay_ms } => {
                    let delay = delay_ms as f64 / 1e3;
                    tracing::warn!(%receiver, %set, "failed {failures} times in a row: retry in {delay:.1} s");
                }
                Action::Superseded { model, old, new } => {
                    tracing::warn!(model_id = %model, %old, %new, "superseded by a newer incarnation");
                    self.counters.superseded += 1;
                    if let Ok(set) = self.barrier.set_of(&model).cloned() {
                        self.record.superseded(&set, &model, new);
                    }
                }
                Action::ServiceVersion { set, served } => {
                    let version = served.as_ref().map(|s| s.version);
                    tracing::info!(%set, ?version, "service version");
                    for latency in served.iter().flat_map(|s| self.record.served(now, &set, s)) {
                        self.counters.served(&latency);
                    }
                }
                Action::Stalled { set, why } => tracing::warn!(%set, "{why}"),
                Action::OpenGate { id, served } => self.answer(id, Answer::Gate(Ok(served))),
                Action::FailGate { id, why } => self.answer(id, Answer::Gate(Err(why))),
                Action::RunEval { id, served } => {
                    if let Some((set, words)) = self.words.remove(&id) {
                        self.evals.push_back(Eval { id, set, served, words });
                        self.ring();
                    }
                }
                Action::NotifyReply { id, outcome } => {
                    if let NotifyOutcome::Evaluated { served, result } = &outcome {
                        self.evaluated(served, result.as_deref().map_err(String::as_str));
                    }
                    self.answer(id, Answer::Notify(outcome));
                }
                Action::BackPressure { model, ahead, wait, .. } => {
                    tracing::info!(model_id = %model, ahead, wait, "back-pressure");
                }
                Action::Release { identity } => self.record.released(&identity),
            }
        }
        for peer in overfull {
            let message = "it asks for orders and never says that it took any: restart it".to_owned();
            self.record.error(now, format!("receiver {}", peer.receiver), Kind::Exhausted, message);
            let _ = self.step(now, Event::Leave { peer });
        }
    }

    fn evaluated(&mut self, served: &Served, result: Result<&str, &str>) {
        let Some(identity) = served.identities.first() else { return };
        if let Ok(set) = self.barrier.set_of(&identity.model_id) {
            self.record.evaluated(set, identity, result);
        }
    }

    fn order(&mut self, to: &Peer, task: Task, overfull: &mut Vec<Peer>) {
        self.counters.ordered(&task);
        let Some(outbox) = self.outboxes.get_mut(&to.receiver).filter(|o| o.is_of(to)) else { return };
        outbox.push(task);
        if outbox.overfull() && !overfull.contains(to) {
            overfull.push(to.clone());
        }
    }

    fn tell(&mut self, receiver: &ReceiverId, task: Task) {
        self.counters.ordered(&task);
        if let Some(outbox) = self.outboxes.get_mut(receiver) {
            outbox.push(task);
        }
    }

    /// Why a receiver has left the pool, as text.
    fn fenced(&mut self, now: Millis, receiver: &ReceiverId, set: &SetName, why: &FenceReason) -> String {
        let (kind, text) = match why {
            FenceReason::LoadFailed { identity, reason } => {
                let kind = self.reported.unwrap_or(Kind::Invalid);
                (Some(kind), format!("{identity} could not be loaded: {reason}"))
            }
            FenceReason::LoadTimeout { version } => {
                (Some(Kind::Timeout), format!("version {version} was not loaded in time"))
            }
            FenceReason::Lagging { version } => (None, format!("it lags: version {version} is served")),
            FenceReason::Superseded { model, incarnation } => {
                (None, format!("incarnation {incarnation} of {model} has taken over"))
            }
        };
        tracing::warn!(%receiver, %set, stage = "load", "not live: {text}");
        self.counters.fenced += 1;
        if let Some(kind) = kind {
            self.failed(now, receiver, kind, text.clone());
        }
        text
    }

    fn lagging(&mut self, now: Millis, receiver: &ReceiverId, identity: &Identity, why: &LagReason) {
        let (kind, text) = match why {
            LagReason::Failed(reason) => {
                let kind = self.reported.unwrap_or(Kind::PeerLost);
                (kind, format!("{identity} could not be staged: {reason}"))
            }
            LagReason::Timeout => (Kind::Timeout, format!("{identity} was not staged in time")),
            LagReason::Ahead { got } => {
                tracing::info!(%receiver, %identity, got, "received a newer version than was ordered");
                return;
            }
        };
        tracing::warn!(%receiver, stage = "stage", "{text}");
        self.failed(now, receiver, kind, text);
    }

    fn failed(&mut self, now: Millis, receiver: &ReceiverId, kind: Kind, text: String) {
        self.counters.failed(kind);
        self.record.error(now, format!("receiver {receiver}"), kind, text);
    }

    fn evicted(&mut self, now: Millis, receiver: &ReceiverId, why: EvictReason) {
        self.counters.evicted(why);
        self.outboxes.remove(receiver);
        self.record.gone(receiver);
        match why {
            EvictReason::Silent => {
                let silence = self.limits.heartbeat_ms as f64 / 1e3;
                let text = format!("no word from it for {silence} s: it is out, and may join again");
                tracing::warn!(%receiver, "{text}");
                self.failed(now, receiver, Kind::PeerLost, text);
            }
            EvictReason::Left | EvictReason::Rejoined => tracing::info!(%receiver, ?why, "gone"),
        }
    }

    /// How many orders wait to be taken.
    pub(super) fn orders(&self) -> usize {
        self.outboxes.values().map(Outbox::len).sum()
    }
}

/// Orders, or what rings at the next one.
type Polled = Result<Vec<Numbered>, watch::Receiver<u64>>;

/// A poll that is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum PollError {
    #[error(transparent)]
    Barrier(#[from] BarrierError),
    #[error(
        "receiver {receiver} says that it took order {after} of its queue, which it was never given: join again"
    )]
    NeverGiven { receiver: ReceiverId, after: u64 },
}

impl PollError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub(super) fn kind(&self) -> Kind {
        match self {
            PollError::Barrier(e) => e.kind(),
            PollError::NeverGiven { .. } => Kind::Invalid,
        }
    }
}

/// Whether a phase is that of a report's outcome, for the metrics.
pub(super) fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Staging => "staging",
        Phase::Loading => "loading",
    }
}
