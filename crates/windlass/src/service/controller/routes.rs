//! The controller's endpoints: requests become events of the barrier, and its outcomes become answers.
//!
//! Owns: the checks of what comes in that the types do not make, and the statuses. Every length and number from outside is
//! bounded here or by its type before it goes further. Must not: keep anything.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::extract::{FromRequest, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::oneshot;
use windlass_core::address::Endpoint;
use windlass_core::barrier::{BarrierError, Event, GateFailure, NotifyOutcome, Peer, SetName, WaitId};
use windlass_core::error::Kind;
use windlass_core::identity::Incarnation;
use windlass_data::receiver::{Control as _, ControlError};
use windlass_data::stop::Stop;

use super::hub::{Answer, Hub, PollError};
use super::wire::{
    Done, EvalDone, EvalTask, Gate, Join, Joined, MAX_SPANS, Notified, NotifyVersion, Orders, Poll, Report,
    ServedVersion, Service, Span, TakeEval, TrainerLeft,
};
use super::{events, metrics, openapi, page};
use crate::service::control::HttpControl;
use crate::service::http::{Failure, Params};

/// How long a request's body may take to arrive.
const BODY: Duration = Duration::from_secs(5);
/// Longer than the barrier's longest wait.
const NEVER: Duration = Duration::from_hours(24 * 30);
/// How long a gate waits that does not say.
const GATE: u64 = 30_000;
/// Timeout of an agent's answer about its incarnation.
const ASK: Duration = Duration::from_secs(10);
/// Timeout of an agent's answer about its versions; the trainer waits meanwhile.
const RECALL: Duration = Duration::from_secs(3);
/// The most bytes of what a trainer says about an eval.
const MAX_WORDS: usize = 64 << 10;
/// The longest name of a waiter.
const MAX_WHO: usize = 200;
/// The longest ago that something in a message may be: ten days.
const MAX_AGO: f64 = 864_000_000.0;

/// Paths that need no token: they say nothing about the run.
pub(super) const OPEN: &[&str] = &["/", "/openapi.json"];

type Shared = State<Arc<Hub>>;

pub(super) fn routes(hub: Arc<Hub>) -> Router {
    Router::new()
        .route("/notify_version", post(notify_version))
        .route("/trainer_left", post(trainer_left))
        .route("/service_version", get(service_version))
        .route("/register_receiver", post(register_receiver))
        .route("/poll_orders", post(poll_orders))
        .route("/report", post(report))
        .route("/leave", post(leave))
        .route("/take_eval", post(take_eval))
        .route("/eval_done", post(eval_done))
        .route("/status", get(status))
        .route("/events", get(async |State(hub): Shared| events::listen(&hub)))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi::document))
        .route("/", get(page::page))
        .with_state(hub)
}

/// Counts answers by status. The outermost layer.
pub(super) async fn count(State(hub): Shared, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    hub.with(|state, _| state.counters.answered(response.status().as_u16()));
    response
}

/// A body as JSON, which must arrive in time.
struct Body<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, Failure> {
        let read = Json::<Value>::from_request(request, state);
        let Ok(read) = tokio::time::timeout(BODY, read).await else {
            let message = format!("the body did not arrive within {} s", BODY.as_secs());
            return Err(Failure {
                status: Some(StatusCode::REQUEST_TIMEOUT),
                ..Failure::new(Kind::Timeout, message)
            });
        };
        let Json(mut value) = read?;
        whole_numbers(&mut value);
        serde_json::from_value(value).map(Body).map_err(|e| Failure {
            status: Some(StatusCode::UNPROCESSABLE_ENTITY),
            ..Failure::new(Kind::Invalid, format!("the body is not what this route takes: {e}"))
        })
    }
}

/// Makes integers of numbers such as `7.0`, which JSON does not tell from `7`: languages without integers write both.
fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(n) => {
            // Exact: a whole float of this size is an integer, if perhaps not the one that was meant.
            if let Some(f) = n.as_f64().filter(|f| n.is_f64() && f.fract() == 0.0) {
                if (0.0..u64::MAX as f64).contains(&f) {
                    *value = Value::from(f as u64);
                } else if (i64::MIN as f64..0.0).contains(&f) {
                    *value = Value::from(f as i64);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(whole_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

impl From<BarrierError> for Failure {
    fn from(e: BarrierError) -> Failure {
        Failure::new(e.kind(), e.to_string())
    }
}

impl From<PollError> for Failure {
    fn from(e: PollError) -> Failure {
        Failure::new(e.kind(), e.to_string())
    }
}

fn invalid(message: impl Into<String>) -> Failure {
    Failure::new(Kind::Invalid, message)
}

/// The answer to a waiting request when the controller ends.
fn ending() -> Failure {
    let failure = Failure::new(Kind::PeerLost, "the controller is shutting down: retry when it is back");
    Failure { status: Some(StatusCode::SERVICE_UNAVAILABLE), ..failure }
}

fn check_spans(spans: &[Span]) -> Result<(), Failure> {
    if spans.len() > MAX_SPANS {
        return Err(invalid(format!("{} spans in one message: expected at most {MAX_SPANS}", spans.len())));
    }
    for span in spans {
        let (began, ended) = (span.began_ms_ago, span.ended_ms_ago);
        if !(0.0..=MAX_AGO).contains(&ended) || !(ended..=MAX_AGO).contains(&began) {
            let what = super::record::cut(&span.what, 64);
            return Err(invalid(format!(
                "span {what:?} began {began} ms ago and ended {ended} ms ago: expected {MAX_AGO} ≥ began ≥ ended ≥ 0"
            )));
        }
    }
    Ok(())
}

fn check_share(name: &str, value: Option<f64>, most: f64) -> Result<(), Failure> {
    match value {
        Some(v) if !(0.0..=most).contains(&v) => Err(invalid(format!("{name} is {v}: expected 0 to {most}"))),
        Some(_) | None => Ok(()),
    }
}

/// A pending answer. Dropping it cancels the wait.
struct Waiting {
    hub: Arc<Hub>,
    id: WaitId,
    answer: oneshot::Receiver<Answer>,
}

impl Waiting {
    async fn answer(&mut self) -> Result<Answer, Failure> {
        tokio::select! {
            answer = &mut self.answer => answer.map_err(|_| ending()),
            () = self.hub.ended() => Err(ending()),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let id = self.id;
        self.hub.with(|state, now| state.cancel(now, id));
    }
}

/// Waits for something with a deadline, or for the end of the service.
async fn within<T>(
    hub: &Hub,
    until: Instant,
    something: impl Future<Output = T>,
) -> Result<Option<T>, Failure> {
    tokio::select! {
        done = tokio::time::timeout_at(until.into(), something) => Ok(done.ok()),
        () = hub.ended() => Err(ending()),
    }
}

// ---- trainers -------------------------------------------------------------------------------------

async fn notify_version(
    State(hub): Shared,
    Body(mut notify): Body<NotifyVersion>,
) -> Result<Json<Notified>, Failure> {
    check_spans(&notify.spans)?;
    check_share("delta_ratio", notify.delta_ratio, 1e6)?;
    check_share("delta_sparsity", notify.delta_sparsity, 1.0)?;
    if let Err(e) = notify.sender_endpoint.parse::<Endpoint>() {
        return Err(invalid(format!("sender_endpoint: {e}")));
    }
    if let Some(words) = &notify.eval
        && words.to_string().len() > MAX_WORDS
    {
        return Err(invalid(format!(
            "eval: more than {MAX_WORDS} bytes: put the details where the eval runs"
        )));
    }
    let sync = notify.sync || notify.eval.is_some();
    let begun = Instant::now();
    if notify.incarnation == NotifyVersion::SHOWN {
        notify.incarnation = shown_by_agent(&hub, &notify).await?;
    }
    if hub.with(|state, _| state.wants_history(&notify)) {
        recall(&hub, &notify).await;
    }
    let wait = hub.change(|state, now| {
        if notify.eval.is_some() && !state.has_room_for_an_eval() {
            return Err(Failure::new(Kind::Exhausted, "too many evals are open: wait for some to end"));
        }
        let timeout = notify.timeout_ms.unwrap_or(state.limits.max_wait_ms);
        let wait = state.notify(now, &notify, sync.then_some(timeout))?;
        state.counters.notified();
        Ok(wait)
    })?;
    let mut answer = hub.with(|state, _| -> Result<Notified, Failure> {
        let set = state.barrier.set_of(&notify.model_id)?.clone();
        let (ahead, wait) = state.barrier.ahead(&notify.model_id)?;
        let served = state.barrier.service_version(&set)?.cloned().map(ServedVersion::from);
        Ok(Notified { ok: true, wait, ahead, set, served, eval: None, eval_error: None })
    })?;
    let Some((id, channel)) = wait else { return Ok(Json(answer)) };
    let mut waiting = Waiting { hub: Arc::clone(&hub), id, answer: channel };
    // The barrier has a timeout each for load and eval; the request has one for both.
    let most = notify.timeout_ms.map_or(NEVER, Duration::from_millis);
    let outcome = match within(&hub, begun + most.min(NEVER), waiting.answer()).await? {
        Some(Ok(Answer::Notify(outcome))) => outcome,
        Some(Ok(Answer::Gate(_))) => return Err(Failure::new(Kind::Bug, "a gate's answer to a notify")),
        Some(Err(failure)) => return Err(failure),
        None => return Err(hub.with(|state, _| state.late(id, &notify))),
    };
    let name = format!("{}@{}.{}", notify.model_id, notify.incarnation, notify.version);
    let (served, eval) = match outcome {
        NotifyOutcome::Loaded { served } => (served, None),
        NotifyOutcome::Evaluated { served, result } => (served, Some(result)),
        NotifyOutcome::LoadTimeout { blocked } => {
            return Err(Failure::new(Kind::Timeout, format!("{name} is not served in time: {blocked}")));
        }
        NotifyOutcome::EvalTimeout { served } => {
            let message = format!("version {} is served, but its eval did not end in time", served.version);
            return Err(Failure::new(Kind::Timeout, message));
        }
        NotifyOutcome::Superseded { by } => {
            return Err(Failure::new(Kind::Stale, format!("{name} is superseded by incarnation {by}")));
        }
    };
    match eval {
        // What came in was JSON.
        Some(Ok(text)) => answer.eval = Some(serde_json::from_str(&text).unwrap_or(Value::String(text))),
        Some(Err(why)) => answer.eval_error = Some(why),
        None => {}
    }
    (answer.ahead, answer.wait) = hub.with(|state, _| state.barrier.ahead(&notify.model_id))?;
    answer.served = Some(served.into());
    Ok(Json(answer))
}

/// Asks the agent of a notify what else it can give. Where it does not say, the next notify asks again.
async fn recall(hub: &Hub, notify: &NotifyVersion) {
    let Ok(agent) = HttpControl::new(&notify.sender_endpoint, hub.token.clone()) else { return };
    let asked = tokio::task::spawn_blocking(move || agent.capabilities(&Stop::after(RECALL)));
    let model_id = &notify.model_id;
    match asked.await {
        Ok(Ok(can)) if can.age.is_some_and(|age| age.incarnation == notify.incarnation) => {
            hub.change(|state, now| state.recall(now, notify, &can.versions));
        }
        // Another incarnation, whose own notify asks, or an earlier release.
        Ok(Ok(_)) => {}
        Ok(Err(error)) => {
            tracing::info!(%model_id, %error, "the agent did not report its versions; the next notify asks again");
        }
        Err(error) => tracing::error!(%model_id, %error, "the agent could not be asked"),
    }
}

/// The incarnation that the agent of a notify shows.
async fn shown_by_agent(hub: &Hub, notify: &NotifyVersion) -> Result<Incarnation, Failure> {
    let agent = HttpControl::new(&notify.sender_endpoint, hub.token.clone());
    let agent = agent.map_err(|e| invalid(format!("sender_endpoint: {e}")))?;
    let asked = tokio::task::spawn_blocking(move || agent.version(None, &Stop::after(ASK)));
    let answer = asked.await.map_err(|e| Failure::new(Kind::Bug, format!("the agent was not asked: {e}")))?;
    let info = answer.map_err(|e| {
        let kind = if matches!(e, ControlError::Lost { .. }) { Kind::Timeout } else { Kind::Invalid };
        let how = "name the incarnation, or give the agent and the controller one token";
        Failure::new(kind, format!("no incarnation is named, and the agent does not show one: {e}; {how}"))
    })?;
    if info.model_id != notify.model_id {
        let (endpoint, theirs) = (&notify.sender_endpoint, &info.model_id);
        return Err(invalid(format!("the agent at {endpoint} publishes {theirs}, not {}", notify.model_id)));
    }
    Ok(info.incarnation)
}

async fn trainer_left(State(hub): Shared, Body(left): Body<TrainerLeft>) -> Result<Json<Done>, Failure> {
    hub.change(|state, now| state.trainer_left(now, &left))?;
    Ok(Json(Done { ok: true }))
}

async fn service_version(State(hub): Shared, Params(gate): Params<Gate>) -> Result<Json<Service>, Failure> {
    let lineage = match (&gate.model_id, gate.incarnation) {
        (Some(model), Some(incarnation)) => Some((model.clone(), incarnation)),
        (None, Some(_)) => return Err(invalid("incarnation without model_id: name the model it belongs to")),
        (_, None) => None,
    };
    let begun = Instant::now();
    let longest = hub.with(|state, _| state.limits.max_wait_ms);
    let timeout = Duration::from_millis(gate.timeout_ms.unwrap_or(GATE).min(longest));
    let set = known_set(&hub, &gate, begun + timeout).await?;
    if let Some(at_least) = gate.at_least {
        let left = timeout.saturating_sub(begun.elapsed()).as_millis() as u64;
        let who = super::record::cut(gate.who.as_deref().unwrap_or("unnamed"), MAX_WHO);
        let (id, channel) = hub.change(|state, now| {
            state.wait(now, who, |id| Event::GateWait {
                id,
                set: set.clone(),
                at_least,
                lineage,
                timeout: left,
            })
        })?;
        let mut waiting = Waiting { hub: Arc::clone(&hub), id, answer: channel };
        let answer = waiting.answer().await;
        hub.change(|state, _| state.counters.gate(begun.elapsed().as_secs_f64()));
        match answer? {
            Answer::Gate(Ok(served)) => {
                let blocked = hub.with(|state, _| state.barrier.blocked(&set))?.to_string();
                return Ok(Json(Service { set, served: Some(served.into()), blocked }));
            }
            Answer::Gate(Err(GateFailure::Timeout { service, blocked })) => {
                let serves = service.map_or("nothing yet".into(), |v| format!("version {v}"));
                let message = format!("set {set} serves {serves}, not {at_least}: {blocked}");
                return Err(Failure::new(Kind::Timeout, message));
            }
            Answer::Gate(Err(GateFailure::Superseded { by })) => {
                let message = format!("incarnation {by} has superseded who asked: stop");
                return Err(Failure::new(Kind::Stale, message));
            }
            Answer::Notify(_) => return Err(Failure::new(Kind::Bug, "a notify's answer to a gate")),
        }
    }
    let (served, blocked) = hub.with(|state, _| -> Result<_, BarrierError> {
        Ok((state.barrier.service_version(&set)?.cloned(), state.barrier.blocked(&set)?.to_string()))
    })?;
    Ok(Json(Service { set, served: served.map(ServedVersion::from), blocked }))
}

/// The set that a gate is about. Where sets are made as models turn up, it is waited for.
async fn known_set(hub: &Hub, gate: &Gate, until: Instant) -> Result<SetName, Failure> {
    loop {
        let (found, zero_config, mut news) = hub.with(|state, _| {
            let found = match (&gate.set, &gate.model_id) {
                (Some(set), _) => state.barrier.service_version(set).map(|_| Some(set.clone())),
                (None, Some(model)) => state.barrier.set_of(model).cloned().map(Some),
                (None, None) => {
                    let mut sets = state.barrier.sets();
                    Ok(sets.next().filter(|_| sets.next().is_none()).cloned())
                }
            };
            (found, state.zero_config(), state.news())
        });
        let refused = match found {
            Ok(Some(set)) => return Ok(set),
            Ok(None) => {
                let known =
                    hub.with(|state, _| state.barrier.sets().map(ToString::to_string).collect::<Vec<_>>());
                if !known.is_empty() {
                    return Err(invalid(format!(
                        "there are several sets: add set=, one of {}",
                        known.join(", ")
                    )));
                }
                Failure::new(Kind::NotFound, "no model has been announced yet")
            }
            Err(e) => e.into(),
        };
        if !zero_config {
            return Err(refused);
        }
        if gate.at_least.is_none() || within(hub, until, news.changed()).await?.is_none() {
            return Err(match gate.at_least {
                Some(_) => Failure::new(
                    Kind::Timeout,
                    format!("{}; no trainer or receiver of it has been heard of in time", refused.message),
                ),
                None => refused,
            });
        }
    }
}

async fn take_eval(State(hub): Shared, Body(take): Body<TakeEval>) -> Result<Json<EvalTask>, Failure> {
    let longest = hub.with(|state, _| match &take.set {
        // Where sets are made as models turn up, this one may be about to.
        Some(set) if !state.zero_config() => {
            state.barrier.service_version(set).map(|_| state.limits.max_wait_ms)
        }
        Some(_) | None => Ok(state.limits.max_wait_ms),
    })?;
    let until = Instant::now() + Duration::from_millis(take.timeout_ms.min(longest));
    loop {
        let (eval, mut news) = hub.with(|state, _| (state.take_eval(take.set.as_ref()), state.news()));
        if let Some(eval) = eval {
            let (id, served) = (Some(eval.id.0), Some(eval.served.into()));
            return Ok(Json(EvalTask { id, served, eval: Some(eval.words) }));
        }
        if within(&hub, until, news.changed()).await?.is_none() {
            return Ok(Json(EvalTask { id: None, served: None, eval: None }));
        }
    }
}

async fn eval_done(State(hub): Shared, Body(done): Body<EvalDone>) -> Result<Json<Done>, Failure> {
    let result = match (done.result, done.error) {
        (Some(_), Some(_)) => return Err(invalid("an eval has a result or an error, not both")),
        (result, None) => Ok(result.unwrap_or(Value::Null).to_string()),
        (None, Some(error)) => Err(super::record::cut(&error, 2000)),
    };
    hub.change(|state, now| state.step(now, Event::EvalDone { id: WaitId(done.id), result }))?;
    Ok(Json(Done { ok: true }))
}

// ---- receivers ------------------------------------------------------------------------------------

async fn register_receiver(State(hub): Shared, Body(join): Body<Join>) -> Result<Json<Joined>, Failure> {
    let limits = hub.change(|state, now| -> Result<_, BarrierError> {
        state.join(now, &join)?;
        Ok(state.limits.clone())
    })?;
    Ok(Json(Joined {
        ok: true,
        heartbeat_ms: limits.heartbeat_ms,
        poll_ms: poll_ms(limits.heartbeat_ms),
        rejoin_ms: limits.rejoin_ms(),
        max_ahead: limits.max_ahead,
    }))
}

/// How long a poll should wait: several of them fit into a heartbeat.
fn poll_ms(heartbeat_ms: u64) -> u64 {
    (heartbeat_ms / 3).clamp(1, 20_000)
}

async fn poll_orders(State(hub): Shared, Body(poll): Body<Poll>) -> Result<Json<Orders>, Failure> {
    for doing in &poll.doing {
        if !(0.0..=1e15).contains(&doing.rate) {
            return Err(invalid(format!("rate of {}: expected 0 to 1e15 bytes a second", doing.rate)));
        }
    }
    hub.heard.fetch_add(1, Ordering::Relaxed);
    let longest = hub.with(|state, _| state.limits.heartbeat_ms / 2);
    let until = Instant::now() + Duration::from_millis(poll.timeout_ms.min(longest));
    let Poll { peer, after, doing, .. } = poll;
    if hub.with(|state, now| state.hear(now, &peer, doing))? {
        hub.changed.send_modify(|n| *n += 1);
    }
    loop {
        let mut bell = match hub.with(|state, now| state.poll(now, &peer, after))? {
            Ok(orders) => return Ok(Json(Orders { orders })),
            Err(bell) => bell,
        };
        if within(&hub, until, bell.changed()).await?.is_none() {
            return Ok(Json(Orders { orders: Vec::new() }));
        }
    }
}

async fn report(State(hub): Shared, Body(report): Body<Report>) -> Result<Json<Done>, Failure> {
    check_spans(&report.spans)?;
    check_share("pause_ms", report.pause_ms, MAX_AGO)?;
    hub.change(|state, now| state.report(now, &report))?;
    Ok(Json(Done { ok: true }))
}

async fn leave(State(hub): Shared, Body(peer): Body<Peer>) -> Result<Json<Done>, Failure> {
    hub.change(|state, now| state.step(now, Event::Leave { peer }))?;
    Ok(Json(Done { ok: true }))
}

// ---- those who look -------------------------------------------------------------------------------

async fn status(State(hub): Shared) -> Response {
    Json(hub.status()).into_response()
}

async fn metrics(State(hub): Shared) -> Response {
    let status = hub.status();
    let text = hub.with(|state, _| metrics::text(&status, &state.counters, state.orders()));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}
