//! One engine's thread: asks what the engine has, and loads it when that is not what the image has.
//!
//! Owns: the loop, how often a version is tried, and what is told. Whatever happens to one engine, only its own thread
//! waits.
//!
//! A load that fails is tried again after a pause that doubles, `TRIES` times for a version; then the engine is left
//! as it is until there is another version or it is restarted. An image that does not fit is not tried again at all. A server
//! that lacks our routes, or refuses our token, is asked again after 1 s, 2 s, 4 s and so on, at most every 30 s.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use windlass_core::error::Kind;
use windlass_core::identity::LayoutHash;
use windlass_data::image::{ImageError, ImageView};
use windlass_data::region::{Region, RegionError};
use windlass_data::stop::Stop;

use super::check::{self, Baseline};
use super::error::{EngineError, Stage};
use super::event::{EngineEvent, Failure};
use super::guard::{self, Guard, Job, Lock, Routes, Target};
use super::http::Http;
use super::order::{How, Label, Order, can_lead, how, slow};
use super::sglang::{Loading, Sglang};
use super::transaction::{self, ANSWER, Journal, Outcome};
use super::vllm::{Native, Plugin, Status, is_denied};
use super::{Condition, Dialect, EngineOptions, EngineSpec, Extras, Place, Shared, Teller};

/// How often an idle engine is asked what it has.
const POLL: Duration = Duration::from_secs(2);
/// How often a version is tried, and the first and the longest pause between two tries.
const TRIES: u32 = 6;
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// How long an image that is being changed is waited for before the engine is looked at again.
const WHOLE: Duration = Duration::from_secs(1);
/// What is beyond the deadlines that an engine keeps itself.
const GRACE: Duration = Duration::from_secs(15);
/// Names of tensors that are told.
const NAMES: usize = 100;

/// How an engine is reached.
enum Way {
    Plugin(Plugin, Box<Status>),
    Native,
    Sglang(Loading),
}

/// What an engine says.
struct Found {
    way: Way,
    label: Option<Label>,
    /// It must be loaded before it serves.
    fenced: bool,
    /// The checkpoint that it was started from, on this host.
    model: Option<PathBuf>,
}

/// How often the present version was tried.
#[derive(Default)]
struct Tries {
    label: Option<Label>,
    count: u32,
    not_before: Option<Instant>,
}

/// What happens next.
enum Next {
    Now,
    /// After this time, or when something new is wanted.
    After(Duration),
}

pub(super) struct Follower {
    spec: EngineSpec,
    name: String,
    options: EngineOptions,
    place: Place,
    dir: PathBuf,
    baseline: Option<Baseline>,
    shared: Arc<Shared>,
    teller: Teller,
    stop: Stop,
    http: Http,
    /// The engine was prepared in this life.
    prepared: bool,
    /// The life of an engine that says so.
    life: Option<String>,
    /// How an SGLang server is loaded, in this life.
    loading: Option<Loading>,
    /// A vLLM server has no plugin, in this life.
    native: bool,
    /// How often in a row the server lacked our routes or refused our token.
    refusals: u32,
    tries: Tries,
    /// What was told last, so that it is told once.
    told: Option<Failure>,
    told_extras: Option<Vec<String>>,
    away: bool,
    /// The version that was told last.
    announced: Option<Label>,
}

impl Follower {
    pub(super) fn new(
        spec: &EngineSpec,
        options: EngineOptions,
        place: Place,
        dir: PathBuf,
        baseline: Option<Baseline>,
        (shared, teller, stop): (Arc<Shared>, Teller, Stop),
    ) -> Follower {
        let http = Http::new(spec.name(), &spec.url(), options.key.clone());
        Follower {
            spec: spec.clone(),
            name: spec.name(),
            options,
            place,
            dir,
            baseline,
            shared,
            teller,
            stop,
            http,
            prepared: false,
            life: None,
            loading: None,
            native: false,
            refusals: 0,
            tries: Tries::default(),
            told: None,
            told_extras: None,
            away: false,
            announced: None,
        }
    }

    pub(super) fn run(mut self) {
        while !self.stop.is_set() {
            match self.step() {
                Next::Now => {}
                Next::After(most) => self.rest(most),
            }
        }
    }

    /// Waits for something new to be wanted.
    fn rest(&self, most: Duration) {
        let until = Instant::now() + most;
        let mut state = self.shared.state();
        let wanted = state.wanted;
        while state.wanted == wanted && state.ahead.is_none() && !state.ending {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.shared.changed.wait_for(&mut state, left);
        }
    }

    fn step(&mut self) -> Next {
        let ahead = self.shared.state().ahead.clone();
        if let Some(order) = ahead {
            self.lead(&order);
            self.shared.update(|s| s.ahead = None);
        }
        if self.away {
            // Whatever it was, it may be another process now.
            (self.prepared, self.loading, self.native) = (false, None, false);
        }
        let mut found = match self.ask() {
            Ok(found) => found,
            Err(e) => return self.unanswered(&e),
        };
        if std::mem::take(&mut self.away) {
            (self.told, self.tries) = (None, Tries::default());
        }
        self.refusals = 0;
        match self.left_behind(&found) {
            Ok(Some(dirty)) => found.fenced |= dirty,
            // A guard of an earlier receiver is at work.
            Ok(None) => return Next::After(Stop::GLANCE),
            Err(e) => return self.failed(None, &e, false),
        }
        let condition = if found.fenced { Condition::Fenced } else { Condition::Serving };
        let live = found.label.filter(|_| !found.fenced);
        self.shared.update(|s| (s.live, s.status.condition) = (live, condition));
        if let Way::Plugin(_, status) = &found.way
            && status.transaction.is_some()
        {
            // Ordered by an earlier receiver; the engine carries it out, whoever is gone.
            return Next::After(Stop::GLANCE);
        }
        let wanted = self.shared.state().wanted;
        let Some(wanted) = wanted else { return Next::After(POLL) };
        if let Some(live) = live.filter(|live| *live >= wanted) {
            if self.announced.replace(live) != Some(live) {
                // Loaded by an earlier receiver, its guard, or a load whose end was not heard of.
                let (engine, how) = (self.name.clone(), "found".into());
                let (pause_ms, load_ms, retried, slow, ahead) = (None, 0.0, None, None, false);
                let before_ms = (None, None);
                self.tell(&EngineEvent::Loaded {
                    engine,
                    label: live,
                    how,
                    pause_ms,
                    load_ms,
                    before_ms,
                    retried,
                    slow,
                    ahead,
                });
            }
            self.shared.update(|s| (s.status.error, s.error_kind, s.given_up) = (None, None, None));
            return Next::After(POLL);
        }
        if self.tries.label != Some(wanted) {
            self.tries = Tries { label: Some(wanted), ..Tries::default() };
        }
        let not_before = self.tries.not_before.map(|t| t.saturating_duration_since(Instant::now()));
        match not_before {
            _ if self.tries.count >= TRIES => return Next::After(POLL),
            Some(left) if !left.is_zero() => return Next::After(left.min(POLL)),
            _ => {}
        }
        self.shared.update(|s| s.status.condition = Condition::Loading);
        self.load(wanted, &found)
    }

    /// What the engine is and has.
    fn ask(&mut self) -> Result<Found, EngineError> {
        let parse = |label: Option<String>| label.and_then(|l| l.parse().ok());
        match self.spec.dialect {
            Dialect::Sglang => {
                let info = Sglang::info(&self.http, &self.stop)?;
                let label: Option<Label> = parse(info.weight_version);
                // From the first load on it names the directory of links.
                let model = info.model_path.filter(|p| label.is_none() && p.is_dir());
                // One without a version of ours may have been restarted unseen, with other flags.
                let loading = match self.loading.take().filter(|_| label.is_some()) {
                    Some(known) => known,
                    None => Sglang::loading(&self.http, self.options.mode, &self.stop)?,
                };
                self.loading = Some(loading.clone());
                Ok(Found { way: Way::Sglang(loading), label, fenced: false, model })
            }
            Dialect::Vllm => {
                let plugin = Plugin::new(self.http.with_key(self.options.token.clone()));
                let status = if self.native { None } else { self.status(&plugin)? };
                let Some(status) = status else {
                    let was_native = std::mem::replace(&mut self.native, false);
                    let label = parse(Native::version(&self.http, &self.stop)?);
                    if was_native && label.is_none() && self.shared.state().live.is_some() {
                        // It lost its version: it may be another process, with the plugin.
                        return self.ask();
                    }
                    self.native = true;
                    return Ok(Found { way: Way::Native, label, fenced: false, model: self.served() });
                };
                if self.life.as_ref() != Some(&status.incarnation) {
                    (self.prepared, self.tries) = (false, Tries::default());
                    self.life = Some(status.incarnation.clone());
                }
                let (label, fenced) = (parse(status.weight_version.clone()), status.fenced);
                Ok(Found { way: Way::Plugin(plugin, Box::new(status)), label, fenced, model: self.served() })
            }
        }
    }

    /// What the plugin of a vLLM server says; `None` if the server has no plugin.
    fn status(&self, plugin: &Plugin) -> Result<Option<Status>, EngineError> {
        let engine = || self.name.clone();
        plugin.status(&self.stop).map_err(|e| match (is_denied(&e), &self.options.token) {
            (false, _) => e,
            (true, None) => {
                let why = "its plugin wants a token: give it with --engine-token-file".into();
                EngineError::NoRoute { engine: engine(), why }
            }
            (true, Some(_)) => {
                let why = "its plugin wants another token: give it with --engine-token-file".into();
                EngineError::Lost { engine: engine(), stage: Stage::Ask, why, kind: Kind::Denied }
            }
        })
    }

    /// The checkpoint that vLLM serves, if it is on this host. Nobody must know that to load it.
    fn served(&self) -> Option<PathBuf> {
        if self.prepared || self.baseline.is_some() {
            return None;
        }
        let models: Value = self.http.get(Stage::Ask, "/v1/models", ANSWER, &self.stop).ok()?;
        let root = PathBuf::from(models.pointer("/data/0/root")?.as_str()?);
        root.is_dir().then_some(root)
    }

    /// Makes good what a guard left that was killed ([`guard::left_behind`]). Answers whether the engine must be loaded
    /// before it is resumed; `None` if a guard is at work.
    fn left_behind(&self, found: &Found) -> Result<Option<bool>, EngineError> {
        match found.way {
            Way::Plugin(..) => return Ok(Some(false)),
            Way::Native | Way::Sglang(_) => {}
        }
        if Journal::of(&self.dir).read()?.is_none() {
            return Ok(Some(false));
        }
        let Some(_lock) = Lock::take(&self.dir)? else { return Ok(None) };
        guard::left_behind(&self.target(found)).map(Some)
    }

    fn unanswered(&mut self, e: &EngineError) -> Next {
        if self.stop.is_set() {
            return Next::Now;
        }
        if e.is_away() {
            self.away = true;
            let engine = self.name.clone();
            self.shared.update(|s| (s.live, s.status.condition) = (None, Condition::Away));
            self.tell_once(e, |failure| EngineEvent::Waiting { engine, failure });
            self.refusals = 0;
            return Next::After(POLL);
        }
        let next = self.failed(None, e, false);
        if !is_denied(e) && !matches!(e, EngineError::NoRoute { .. }) {
            return next;
        }
        // Only a restart changes that, so the server is asked less and less often.
        self.refusals += 1;
        Next::After(PAUSE.0.saturating_mul(1 << self.refusals.min(10)).min(PAUSE.1))
    }

    fn tell(&self, event: &EngineEvent) {
        (self.teller)(event);
    }

    /// Tells of a failure unless it was the last thing told.
    fn tell_once(&mut self, e: &EngineError, event: impl FnOnce(Failure) -> EngineEvent) {
        let failure = Failure::from(e);
        let (text, kind) = (failure.text.clone(), failure.kind);
        self.shared.update(|s| (s.status.error, s.error_kind) = (Some(text), Some(kind)));
        if self.told.as_ref() != Some(&failure) {
            self.told = Some(failure.clone());
            self.tell(&event(failure));
        }
    }

    /// A load, or what comes before it, failed.
    fn failed(&mut self, label: Option<Label>, e: &EngineError, fenced: bool) -> Next {
        if self.stop.is_set() {
            return Next::Now;
        }
        // Not being understood is no try of a version.
        self.tries.count += u32::from(label.is_some());
        if matches!(e, EngineError::Layout { .. } | EngineError::Extras { .. }) {
            self.tries.count = TRIES;
        }
        let given_up = label.is_some() && self.tries.count >= TRIES;
        let pause = PAUSE.0.saturating_mul(1 << self.tries.count.min(10)).min(PAUSE.1);
        self.tries.not_before = Some(Instant::now() + pause);
        let engine = self.name.clone();
        self.tell_once(e, |failure| {
            if fenced {
                EngineEvent::Fenced { engine, label, failure, given_up }
            } else {
                EngineEvent::Failed { engine, label, failure, given_up }
            }
        });
        self.shared.update(|s| {
            s.given_up = label.filter(|_| given_up);
            s.status.condition = if fenced { Condition::Fenced } else { Condition::Serving };
        });
        Next::After(pause.min(POLL))
    }

    fn load(&mut self, wanted: Label, found: &Found) -> Next {
        let image = match self.image(found) {
            Ok(Some((view, extras))) => (view, extras),
            // The receiver is changing it; another version is on its way.
            Ok(None) => return Next::Now,
            Err(e) => return self.failed(Some(wanted), &e, found.fenced),
        };
        let (view, extras) = image;
        let label = Label::from(view.known());
        if label < wanted {
            return Next::After(Stop::GLANCE);
        }
        if self.options.exact && label > wanted {
            // It is staged, and may be loaded when that is wanted.
            let condition = if found.fenced { Condition::Fenced } else { Condition::Serving };
            self.shared.update(|s| s.status.condition = condition);
            return Next::After(POLL);
        }
        self.list(extras);
        let manifest = Arc::clone(view.manifest());
        let (outcome, engine) = match &found.way {
            Way::Plugin(plugin, status) => (self.by_plugin(plugin, status, found, view), "plugin"),
            Way::Native | Way::Sglang(_) => {
                let job = self.job(found, label, manifest.layout_hash());
                drop(view);
                (self.by_guard(&job), "guard")
            }
        };
        tracing::debug!(engine = self.name, by = engine, ?outcome, "load");
        match outcome {
            Outcome::Loaded(done) => {
                let _ = Baseline::note(&self.taken(), &manifest);
                let done = transaction::Done {
                    slow: match &found.way {
                        Way::Sglang(Loading::Disk { why }) => Some(why.clone()),
                        Way::Plugin(..) | Way::Native | Way::Sglang(Loading::Workers { .. }) => done.slow,
                    },
                    ..done
                };
                self.loaded(done.version.parse().unwrap_or(label), done, false);
                Next::Now
            }
            // The image went on meanwhile, or could not be had; the engine was not touched.
            Outcome::Kept(e) if e.kind() == Kind::Stale && e.stage() == Stage::Check => {
                Next::After(Stop::GLANCE)
            }
            Outcome::Fenced(e) => self.failed(Some(label), &e, true),
            Outcome::Lost(e @ EngineError::Guard { kind: Kind::PeerLost, .. }) => {
                let next = self.failed(Some(label), &e, false);
                self.away = true;
                next
            }
            Outcome::Kept(e) | Outcome::Lost(e) => self.failed(Some(label), &e, false),
        }
    }

    fn loaded(&mut self, label: Label, done: transaction::Done, ahead: bool) {
        self.prepared = true;
        (self.told, self.tries) = (None, Tries::default());
        self.list(done.extras);
        self.announced = Some(label);
        let slow = done.slow.clone();
        self.tell(&EngineEvent::Loaded {
            engine: self.name.clone(),
            label,
            how: done.how,
            pause_ms: Some(done.pause_ms).filter(|ms| !ms.is_nan()),
            load_ms: done.load_ms,
            before_ms: (done.stage_ms, done.drain_ms),
            retried: done.retried,
            slow: done.slow,
            ahead,
        });
        // After that, so that waiters for the load have heard what it took.
        self.shared.update(|s| {
            (s.live, s.given_up, s.error_kind) = (Some(label), None, None);
            (s.status.error, s.status.condition) = (None, Condition::Serving);
            s.status.unplanned += u64::from(slow.is_some());
            s.status.slow = slow;
        });
    }

    /// A version from the delta that leads to it, before the image holds it. What is refused is loaded from the image.
    fn lead(&mut self, order: &Order) {
        let plugin = Plugin::new(self.http.with_key(self.options.token.clone()));
        self.shared.update(|s| s.status.condition = Condition::Loading);
        match self.ask_to_load(&plugin, order) {
            Ok(done) => self.loaded(order.label(), done, true),
            Err(error) => {
                let (engine, version) = (&self.name, order.version);
                tracing::warn!(engine, version, %error, "the version is loaded from the image, which takes longer");
                // What the engine has, and whether it serves, is asked next.
                self.shared.update(|s| s.leads = false);
            }
        }
    }

    /// The whole load, as a task of the engine.
    fn ask_to_load(&self, plugin: &Plugin, order: &Order) -> Result<transaction::Done, EngineError> {
        let stop = self.stop.with_timeout(self.options.lease + self.options.timeout + GRACE);
        let pause = (self.options.mode, self.options.cache, self.options.lease);
        let begun = Instant::now();
        let loaded = plugin.load(order, pause, &stop)?;
        let leads = can_lead(&loaded.workers);
        self.shared.update(|s| s.leads = leads);
        Ok(transaction::Done {
            version: order.label().to_string(),
            how: how(&loaded.workers),
            pause_ms: loaded.pause_ms.unwrap_or(f64::NAN),
            load_ms: loaded.ms.unwrap_or(begun.elapsed().as_secs_f64() * 1e3),
            stage_ms: loaded.stage_ms,
            drain_ms: loaded.drain_ms,
            extras: loaded.workers.first().map_or_else(Vec::new, |w| w.extras.clone()),
            retried: None,
            slow: slow(&loaded.workers),
        })
    }

    /// Tells of tensors that the engine does not take, once.
    fn list(&mut self, mut names: Vec<String>) {
        names.truncate(NAMES);
        if !names.is_empty() && self.told_extras.as_ref() != Some(&names) {
            self.tell(&EngineEvent::Extras { engine: self.name.clone(), names: names.clone() });
            self.told_extras = Some(names);
        }
    }

    fn taken(&self) -> PathBuf {
        self.dir.join("taken.json")
    }

    /// The whole version that is there, held, and found to fit; with the names that the engine does not take. `None` if
    /// there is none just now.
    fn image(&self, found: &Found) -> Result<Option<(ImageView, Vec<String>)>, EngineError> {
        let region = match Region::open(&self.place.image) {
            Err(RegionError::Absent { .. }) => {
                std::thread::sleep(self.stop.nap());
                return Ok(None);
            }
            other => other?,
        };
        let time = self.options.lease + self.options.timeout + GRACE;
        let view = match ImageView::take(&region, time, &self.stop.with_timeout(WHOLE)) {
            Err(ImageError::NotWhole { .. }) => return Ok(None),
            other => other?,
        };
        let by_name = matches!(found.way, Way::Sglang(Loading::Disk { .. }));
        let (known, manifest) = (view.known().clone(), Arc::clone(view.manifest()));
        // What it took before it was restarted says nothing about what it is now.
        let taken = if found.label.is_some() { Baseline::taken(&self.taken())? } else { None };
        if let Some(taken) = &taken {
            taken.compare(&self.name, &known, &manifest, by_name)?;
        }
        let started = match (&self.baseline, &found.model) {
            (None, Some(model)) => Baseline::of_checkpoint(model).ok().flatten().map(Baseline::of_any_dtype),
            (None, None) | (Some(_), _) => None,
        };
        let extras = match self.baseline.as_ref().or(started.as_ref()) {
            Some(baseline) => baseline.compare(&self.name, &known, &manifest, by_name)?,
            None => Vec::new(),
        };
        if !extras.is_empty() && self.options.extras == Extras::Error {
            let names = extras.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
            let (engine, image) = (self.name.clone(), known.identity.to_string());
            return Err(EngineError::Extras { engine, image, names });
        }
        match found.way {
            Way::Sglang(Loading::Disk { .. }) => {
                let config = self.options.config.as_deref().or(found.model.as_deref());
                check::link(&self.model(), &view.path(), config)?;
            }
            Way::Plugin(..) | Way::Native | Way::Sglang(Loading::Workers { .. }) => {}
        }
        Ok(Some((view, extras)))
    }

    fn model(&self) -> PathBuf {
        self.place.engines.join("model")
    }

    fn target(&self, found: &Found) -> Target {
        Target {
            engine: self.name.clone(),
            routes: match found.way {
                Way::Plugin(..) | Way::Native => Routes::Vllm,
                Way::Sglang(Loading::Disk { .. }) => Routes::Sglang,
                Way::Sglang(Loading::Workers { count }) => Routes::SglangWorkers(count),
            },
            url: self.spec.url(),
            key: self.options.key.as_ref().map(|k| k.expose().to_owned()),
            dir: self.dir.clone(),
            model: self.model(),
            mode: self.options.mode,
            cache: self.options.cache,
            halt: None,
        }
    }

    fn job(&self, found: &Found, label: Label, layout_hash: LayoutHash) -> Job {
        Job {
            target: self.target(found),
            image: self.place.image.clone(),
            layout_hash,
            incarnation: label.incarnation.0,
            version: label.version,
            lease: self.options.lease.as_secs_f64(),
            timeout: self.options.timeout.as_secs_f64(),
            prepare: !self.prepared || found.label.is_none(),
            exact: self.options.exact,
            // An engine that does not know what it has is not asked to find out what changed.
            how: if found.label.is_none() || found.fenced { How::Dense } else { How::Auto },
        }
    }

    fn by_guard(&self, job: &Job) -> Outcome {
        let phase = |phase| tracing::debug!(engine = self.name, ?phase, "guard");
        match Guard::start(job).and_then(|guard| guard.wait(&self.stop, phase)) {
            Ok(outcome) => outcome,
            Err(e) => Outcome::Lost(e),
        }
    }

    /// The whole load is a task of the engine; the image is held for all of its workers meanwhile.
    fn by_plugin(&mut self, plugin: &Plugin, status: &Status, found: &Found, view: ImageView) -> Outcome {
        let stop = self.stop.with_timeout(self.options.lease + self.options.timeout + GRACE);
        if !self.prepared {
            match plugin.prepare(&self.place.image, &stop) {
                Ok(()) => self.prepared = true,
                Err(e) => return Outcome::Kept(e),
            }
        }
        let how_to = if found.label.is_none() || status.fenced { How::Dense } else { How::Auto };
        let timeout = self.options.timeout.as_secs_f64();
        let order = Order::new(&self.place.image, view.known(), how_to, None, timeout);
        let done = self.ask_to_load(plugin, &order);
        let held = view.finish();
        let done = match done {
            Ok(done) => done,
            // Whether it serves, only it knows.
            Err(e) => match plugin.status(&self.stop) {
                Ok(Some(status)) if status.fenced => return Outcome::Fenced(e),
                Ok(Some(_)) => return Outcome::Kept(e),
                Ok(None) | Err(_) => return Outcome::Lost(e),
            },
        };
        if let Err(e) = held {
            // What was read may be of two versions; the engine is told again, dense, with the next look.
            return Outcome::Kept(e.into());
        }
        Outcome::Loaded(done)
    }
}
