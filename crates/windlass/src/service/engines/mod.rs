//! Engines that load what a receiver has: pause, load, resume, for any number of engines on a host.
//!
//! Owns: [`Engines`], one thread for each engine, which brings it to the newest whole version of an image and keeps it
//! there. Called by `windlass receive --engine`, and by whoever stages and loads in two steps: [`Engines::want`] is the
//! second one, and says nothing about how the image came to be. Must not: pull, or write to an image.
//!
//! | module | what it owns |
//! |---|---|
//! | [`order`] | orders, reports and labels: what crosses to an engine |
//! | [`check`] | what an engine can take, compared before it is touched |
//! | [`pause`] | pause modes and cache policies: the table of exact calls |
//! | [`vllm`], [`sglang`] | their routes |
//! | [`transaction`] | one load, step by step, and what is done when a step fails |
//! | [`guard`] | the process that runs it and outlives the receiver |
//! | [`hold`] | the same process around weights that another program writes |
//! | [`driver`] | one engine, for programs that decide by themselves when |
//! | [`follow`](mod@follow) | one engine's thread |
//! | [`prove`] | `windlass verify --engine` |
//! | [`http`] | requests to an engine |
//! | [`event`] | what is told |
//!
//! # What an engine has is asked of the engine
//!
//! Every load gives the version a name that the engine keeps ([`order::Label`]). The thread asks for it every two
//! seconds, and before each load. A restarted engine has none, and is loaded again, dense; an engine that is away is
//! waited for. No engine waits for another, and none holds up the pull: while an engine reads the image under its map
//! lease later versions queue, and when it is free it goes to the newest.
//!
//! # Directories
//!
//! Beside the image, `<model_id>.engines/` holds for each engine its lock, its journal, the reports of its workers and
//! the layout that it took, and `model/`, the directory that engines load from by path. They are removed when the
//! receiver ends and every engine serves.

pub mod check;
pub mod driver;
pub mod error;
pub mod event;
pub mod follow;
pub mod guard;
pub mod hold;
pub mod http;
pub mod order;
pub mod pause;
pub mod prove;
pub mod sglang;
pub mod transaction;
pub mod vllm;

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use serde::Serialize;
use windlass_core::address::{Endpoint, Token};
use windlass_core::error::Kind;
use windlass_core::identity::ModelId;
use windlass_data::image::Known;
use windlass_data::private;
use windlass_data::receiver::{Fetched, INCOMING};
use windlass_data::stop::Stop;

use self::check::Baseline;
pub use self::error::EngineError;
pub use self::event::EngineEvent;
use self::follow::Follower;
pub use self::order::Label;
use self::order::{DeltaFiles, How, Order};
pub use self::pause::{CachePolicy, Halt, PauseMode};
use crate::error::Error;

/// Which engine it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Dialect {
    /// vLLM
    Vllm,
    /// SGLang
    Sglang,
}

impl Dialect {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Dialect::Vllm => "vllm",
            Dialect::Sglang => "sglang",
        }
    }

    /// The name of the directory of an engine at this address.
    fn dir_name(self, address: &str) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
        format!("{}-{}", self.as_str(), address.chars().map(plain).collect::<String>())
    }
}

/// An engine: `vllm=URL` or `sglang=URL`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSpec {
    /// Which.
    pub dialect: Dialect,
    /// Where.
    pub endpoint: Endpoint,
}

impl EngineSpec {
    /// What it is called in messages.
    pub fn name(&self) -> String {
        format!("{}={}", self.dialect.as_str(), self.url())
    }

    fn url(&self) -> String {
        let text = self.endpoint.as_str().trim_end_matches('/');
        if text.starts_with("http://") { text.to_owned() } else { format!("http://{text}") }
    }

    /// The name of its directory.
    fn dir_name(&self) -> String {
        self.dialect.dir_name(&self.endpoint.address().to_string())
    }
}

impl FromStr for EngineSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<EngineSpec, String> {
        let expected = || {
            format!("{text:?} is not an engine: expected vllm=http://HOST:PORT or sglang=http://HOST:PORT")
        };
        let (dialect, url) = text.split_once('=').ok_or_else(expected)?;
        let dialect = match dialect {
            "vllm" => Dialect::Vllm,
            "sglang" => Dialect::Sglang,
            _ => return Err(expected()),
        };
        if url.starts_with("https://") {
            return Err(format!("{url}: a sidecar speaks plain http to the engines of its host"));
        }
        let endpoint = url.trim_end_matches('/').parse().map_err(|e| format!("{e}"))?;
        Ok(EngineSpec { dialect, endpoint })
    }
}

/// What to do with tensors of an image that an engine does not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Extras {
    /// Log them once and load the version
    Ignore,
    /// Refuse the version
    Error,
}

/// How engines are loaded.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The token of our plugin in an engine.
    pub token: Option<Token>,
    /// What engines want in the `Authorization` header of their own routes.
    pub key: Option<Token>,
    /// Requests in flight.
    pub mode: PauseMode,
    /// Cached prefixes.
    pub cache: CachePolicy,
    /// From the pause to the first write.
    pub lease: Duration,
    /// From the first write to the end.
    pub timeout: Duration,
    /// The model's configuration, tokenizer and, if they are there, weights to compare with.
    pub config: Option<PathBuf>,
    /// Tensors that an engine does not take.
    pub extras: Extras,
    /// The group may read the image, and write reports.
    pub group: bool,
    /// Only the version that is wanted is loaded, never a newer one that the image happens to hold: somebody else says
    /// when.
    pub exact: bool,
}

/// An engine, and the model that it serves where there are several: `[MODEL:]vllm=URL`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelEngine {
    /// Which model; the only one if it is not said.
    pub model_id: Option<ModelId>,
    /// The engine.
    pub spec: EngineSpec,
}

impl FromStr for ModelEngine {
    type Err = String;

    fn from_str(text: &str) -> Result<ModelEngine, String> {
        // The kind is before the first `=`, and neither it nor a model's name contains a colon.
        let kind = text.split('=').next().unwrap_or_default();
        let Some((model, _)) = kind.split_once(':') else {
            return Ok(ModelEngine { model_id: None, spec: text.parse()? });
        };
        let model_id = ModelId::new(model).map_err(|e| e.to_string())?;
        let spec = text.get(model.len() + 1..).unwrap_or_default().parse()?;
        Ok(ModelEngine { model_id: Some(model_id), spec })
    }
}

/// How an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// It has not answered yet, or not any more.
    Away,
    /// It serves.
    Serving,
    /// It is being loaded.
    Loading,
    /// It is paused and must be loaded.
    Fenced,
}

/// An engine as it is known.
#[derive(Clone, Debug, Serialize)]
pub struct EngineStatus {
    /// Its name.
    pub engine: String,
    /// How it is.
    pub condition: Condition,
    /// The name of the version that it says it has.
    pub live: Option<String>,
    /// The last failure, until a load succeeds.
    pub error: Option<String>,
    /// The name of the version that is not tried again.
    pub given_up: Option<String>,
    /// Loads by the engine's own loader where a plan was expected.
    pub unplanned: u64,
    /// Why the last of them was, until a load goes by plan again.
    pub slow: Option<String>,
}

/// What an engine's thread and everybody else share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    status: EngineStatus,
    live: Option<Label>,
    given_up: Option<Label>,
    error_kind: Option<Kind>,
    wanted: Option<Label>,
    /// A version to load before the image holds it, until that is done or refused.
    ahead: Option<Order>,
    /// Whether the engine loads such versions: it did its last load by plan, on a GPU.
    leads: bool,
    ending: bool,
}

impl State {
    /// Whether a delta from this version can be loaded before the image holds what it leads to.
    fn leads_from(&self, base: Label) -> bool {
        self.leads && self.live == Some(base) && self.status.condition == Condition::Serving
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        state.status.live = state.live.map(|l| l.to_string());
        state.status.given_up = state.given_up.map(|l| l.to_string());
        drop(state);
        self.changed.notify_all();
    }
}

/// Where the image is that engines load.
#[derive(Clone, Debug)]
pub struct Place {
    /// The directory of the image.
    pub image: PathBuf,
    /// The directory for what engines need beside it.
    pub engines: PathBuf,
}

impl Place {
    /// The place of the image in `image`; what engines need is kept beside it.
    pub fn of(image: PathBuf) -> Place {
        let mut name = image.file_name().unwrap_or_default().to_owned();
        name.push(".engines");
        Place { engines: image.with_file_name(name), image }
    }

    /// Where deltas land that engines load before the image holds them.
    pub fn incoming(&self) -> PathBuf {
        self.engines.join(INCOMING)
    }
}

/// How long an image waits for engines that load a version before it.
const LEAD: Duration = Duration::from_secs(5);

/// Told of what happens.
pub type Teller = Arc<dyn Fn(&EngineEvent) + Send + Sync>;

/// The engines of a host. Dropping it ends its threads; loads under way are finished by their guards or engines.
pub struct Engines {
    shared: Vec<Arc<Shared>>,
    threads: Vec<JoinHandle<()>>,
    stop: Stop,
    place: Place,
    timeout: Duration,
}

impl std::fmt::Debug for Engines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engines").field("status", &self.status()).finish_non_exhaustive()
    }
}

impl Engines {
    /// Starts a thread for each engine. None loads anything before [`Engines::want`].
    pub fn start(
        specs: &[EngineSpec],
        options: &EngineOptions,
        place: Place,
        teller: &Teller,
    ) -> Result<Engines, Error> {
        // Found wrong now rather than with the first version.
        let baseline = options.config.as_deref().map(Baseline::of_checkpoint).transpose()?.flatten();
        // The group's engines read orders and deltas, and write nothing but reports.
        let (mode, reports) = if options.group { (0o750, 0o770) } else { (0o700, 0o700) };
        private::own_with(&place.engines, mode)?;
        let stop = Stop::never();
        let timeout = options.timeout;
        let mut engines = Engines { shared: Vec::new(), threads: Vec::new(), stop, place, timeout };
        for spec in specs {
            let dir = engines.place.engines.join(spec.dir_name());
            private::own_with(&dir, mode)?;
            private::own_with(&guard::reports(&dir), reports)?;
            let status = EngineStatus {
                engine: spec.name(),
                condition: Condition::Away,
                live: None,
                error: None,
                given_up: None,
                unplanned: 0,
                slow: None,
            };
            let state = State {
                status,
                live: None,
                given_up: None,
                error_kind: None,
                wanted: None,
                ahead: None,
                leads: false,
                ending: false,
            };
            let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
            let follower = Follower::new(
                spec,
                options.clone(),
                engines.place.clone(),
                dir,
                baseline.clone(),
                (Arc::clone(&shared), Arc::clone(teller), engines.stop.clone()),
            );
            let thread = std::thread::Builder::new().name("windlass-engine".into());
            let thread = thread.spawn(move || follower.run());
            engines.threads.push(thread.map_err(|e| Error::Bug(format!("no thread: {e}")))?);
            engines.shared.push(shared);
        }
        Ok(engines)
    }

    /// The image holds this version: each engine loads it, or what is newer by then, when it is free.
    pub fn want(&self, known: &Known) {
        let label = Label::from(known);
        for shared in &self.shared {
            shared.update(|s| s.wanted = s.wanted.max(Some(label)));
        }
    }

    /// Whether some engine would load what follows on the version that the image holds before the image has it.
    pub fn may_lead(&self, image: Option<&Known>) -> bool {
        let Some(base) = image.map(Label::from) else { return false };
        self.shared.iter().any(|s| s.state().leads_from(base))
    }

    /// Has the engines that can load a version from the delta that leads to it, before the image holds it. Answers when they
    /// have, or have said no, or after a while; those that have not load it from the image, as ever.
    pub fn lead(&self, fetched: &Fetched, stop: &Stop) {
        let Some(files) = fetched.files() else { return };
        let (base, known) = (fetched.base(), fetched.known());
        let mut order = Order::new(&self.place.image, &known, How::Auto, None, self.timeout.as_secs_f64());
        order.delta = Some(DeltaFiles { base: base.version, files });
        let base = Label { incarnation: base.incarnation, version: base.version };
        for shared in &self.shared {
            shared.update(|s| s.ahead = s.leads_from(base).then(|| order.clone()));
        }
        // The files stay as they are while workers read them, also beyond this.
        let stop = stop.with_timeout(LEAD);
        for shared in &self.shared {
            let mut state = shared.state();
            while state.ahead.is_some() && !stop.is_set() {
                shared.changed.wait_for(&mut state, stop.nap());
            }
            // Too late for an engine that has not begun: the image comes next.
            state.ahead = None;
        }
    }

    /// How the engines are.
    pub fn status(&self) -> Vec<EngineStatus> {
        self.shared.iter().map(|s| s.state().status.clone()).collect()
    }

    /// What every engine serves, if that is one and the same version of ours.
    pub fn serving(&self) -> Option<Label> {
        let mut labels = self.shared.iter().map(|s| {
            let state = s.state();
            state.live.filter(|_| state.status.condition == Condition::Serving)
        });
        let first = labels.next()??;
        labels.all(|l| l == Some(first)).then_some(first)
    }

    /// Whether every engine serves a version.
    pub fn serves(&self, known: &Known) -> bool {
        self.serving() == Some(Label::from(known))
    }

    /// Whether every engine has been asked what it has.
    pub fn asked(&self) -> bool {
        self.shared.iter().all(|s| {
            let state = s.state();
            state.status.condition != Condition::Away || state.status.error.is_some()
        })
    }

    /// Waits until every engine has this version or a newer one. An error with the engines that have not, once nobody
    /// tries any more or the time for a load is over.
    pub fn settle(&self, known: &Known, stop: &Stop) -> Result<(), Error> {
        let label = Label::from(known);
        let until = Instant::now() + self.timeout;
        let mut failed = Vec::new();
        for shared in &self.shared {
            let mut state = shared.state();
            let why = loop {
                if state.live >= Some(label) && state.status.condition == Condition::Serving {
                    break None;
                }
                if state.given_up >= Some(label) || Instant::now() > until {
                    let why =
                        state.status.error.clone().unwrap_or_else(|| "it was not loaded in time".into());
                    break Some((
                        state.status.engine.clone(),
                        why,
                        state.error_kind.unwrap_or(Kind::Timeout),
                    ));
                }
                stop.check()?;
                let nap = stop.nap();
                shared.changed.wait_for(&mut state, nap);
            };
            failed.extend(why);
        }
        let Some((_, _, kind)) = failed.first() else { return Ok(()) };
        let (kind, total) = (*kind, self.shared.len());
        let failed = failed.into_iter().map(|(engine, why, _)| (engine, why)).collect();
        Err(Error::Engines { version: label.version, failed, total, kind })
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        self.stop.set();
        for shared in &self.shared {
            shared.update(|s| s.ending = true);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        tidy(&self.place.engines);
    }
}

/// Removes the directories of engines that serve.
fn tidy(engines: &Path) {
    let Ok(entries) = fs::read_dir(engines) else { return };
    let mut left = false;
    for entry in entries.flatten() {
        let dir = entry.path();
        if entry.file_name() == "model" || entry.file_name() == INCOMING {
            continue;
        }
        left |= !guard::remove_idle(&dir);
    }
    if !left {
        let _ = fs::remove_dir_all(engines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_named_by_their_dialect_and_address() {
        let spec: EngineSpec = "vllm=http://127.0.0.1:8000/".parse().unwrap();
        assert_eq!((spec.dialect, spec.name().as_str()), (Dialect::Vllm, "vllm=http://127.0.0.1:8000"));
        assert_eq!(spec.dir_name(), "vllm-127.0.0.1-8000");
        let spec: EngineSpec = "sglang=node-3:30000".parse().unwrap();
        assert_eq!(spec.name(), "sglang=http://node-3:30000");
        for bad in ["", "vllm", "vllm=", "tgi=http://a:1", "vllm=https://a:1", "vllm=http://a", "http://a:1"]
        {
            assert!(bad.parse::<EngineSpec>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_engine_may_name_the_model_that_it_serves() {
        let engine: ModelEngine = "actor-7b:vllm=http://127.0.0.1:8000".parse().unwrap();
        assert_eq!(engine.model_id.unwrap().as_str(), "actor-7b");
        assert_eq!(engine.spec.name(), "vllm=http://127.0.0.1:8000");
        let engine: ModelEngine = "sglang=node-3:30000".parse().unwrap();
        assert_eq!((engine.model_id, engine.spec.dialect), (None, Dialect::Sglang));
        for bad in ["actor:", "actor:http://a:1", ":vllm=http://a:1", "a/b:vllm=http://a:1", "actor:vllm"] {
            assert!(bad.parse::<ModelEngine>().is_err(), "{bad:?}");
        }
    }
}
