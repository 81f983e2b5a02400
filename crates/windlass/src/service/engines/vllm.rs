//! vLLM: through our endpoint plugin, or through its own routes for weight transfer.
//!
//! Owns: what is asked of a vLLM server, and in which order. With the plugin ([`Plugin`]) the server does the whole load
//! as a task of its own, under a pause lease of its own. Without it ([`Native`]) our transfer backend in the workers is
//! driven step by step, by the guard.
//!
//! The routes, in the order of a load by native ones:
//!
//! ```text
//! POST /init_weight_transfer_engine {"init_info": {"image": DIR}}         once for each life of the engine
//! POST /pause?mode=…&clear_cache=…
//! POST /start_weight_update
//! POST /update_weights {"update_info": {"order": {…}}}                    each worker writes <reports>/<rank>.json
//! POST /finish_weight_update {"weight_version": "windlass:…"}
//! POST /reset_prefix_cache?reset_running_requests=…                       must answer {"success": true}
//! POST /resume
//! GET  /weight_info                                                       must be the version that was given
//! ```
//!
//! Workers check an order before they write. If all decline it, the session is finished without a name and the old
//! weights go on. Otherwise vLLM has no way back: after a failed update the next token it generates ends it, and a whole update that succeeds
//! repairs it. A worker that is inside an update refuses to start another; the update that follows closes it.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

use super::error::{EngineError, Stage};
use super::http::{Http, UNTIL_STOP};
use super::order::{Order, Report, check_reports, clear_reports, how, read_reports, slow};
use super::pause::{CachePolicy, PauseMode, vllm_pause, vllm_reset};
use super::transaction::{ANSWER, Plain, Written};

/// What a server must be started with for its own routes.
const FLAGS: &str = "start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{\"backend\":\"windlass\"}', \
                     or with the endpoint plugin of Windlass: VLLM_PLUGINS=windlass and a token in WINDLASS_TOKEN or \
                     WINDLASS_TOKEN_FILE";

/// How often a cache is told to be cleared, and how long is waited in between: blocks may still be on their way out.
const CLEARS: u32 = 5;
const CLEAR_PAUSE: Duration = Duration::from_millis(200);

#[derive(Deserialize)]
struct WeightInfo {
    weight_version: Option<String>,
}

/// A server that is driven by its own routes.
#[derive(Debug)]
pub struct Native {
    http: Http,
    mode: PauseMode,
    cache: CachePolicy,
    reports: PathBuf,
}

impl Native {
    /// Drives the server behind `http`; its workers report in `reports`.
    pub fn new(http: Http, mode: PauseMode, cache: CachePolicy, reports: PathBuf) -> Native {
        Native { http, mode, cache, reports }
    }

    /// The version that the server says it has. An error with what to start it with if it lacks the routes.
    pub fn version(http: &Http, stop: &Stop) -> Result<Option<String>, EngineError> {
        match http.get::<WeightInfo>(Stage::Ask, "/weight_info", ANSWER, stop) {
            Ok(info) => Ok(info.weight_version),
            Err(EngineError::Refused { engine, status: 404 | 405, .. }) => {
                let why = format!("it has neither /windlass/v1/status nor /weight_info: {FLAGS}");
                Err(EngineError::NoRoute { engine, why })
            }
            Err(e) => Err(e),
        }
    }

    fn workers(&self, stop: &Stop) -> Result<u64, EngineError> {
        #[derive(Deserialize)]
        struct WorldSize {
            world_size: u64,
        }
        let path = "/get_world_size?include_dp=true";
        Ok(self.http.get::<WorldSize>(Stage::Ask, path, ANSWER, stop)?.world_size)
    }
}

impl Plain for Native {
    fn prepare(&self, order: &Order, stop: &Stop) -> Result<(), EngineError> {
        let body = json!({ "init_info": { "image": order.image } });
        let path = "/init_weight_transfer_engine";
        self.http.tell(Stage::Prepare, path, body, UNTIL_STOP, stop).map_err(|e| match e {
            EngineError::Refused { engine, status: 404 | 405, .. } => {
                EngineError::NoRoute { engine, why: format!("it has no {path}: {FLAGS}") }
            }
            e => e,
        })
    }

    fn pause(&self, stop: &Stop) -> Result<(), EngineError> {
        let path = vllm_pause(self.mode, self.cache);
        self.http.tell_again(Stage::Pause, &path, &Value::Null, UNTIL_STOP, stop)
    }

    fn write(&self, order: &Order, stop: &Stop) -> Result<Written, EngineError> {
        let workers = self.workers(stop)?;
        clear_reports(&self.reports)?;
        match self.http.tell(Stage::Load, "/start_weight_update", Value::Null, UNTIL_STOP, stop) {
            // Left by a guard that died in between: the update that follows is whole, and closes it.
            Err(EngineError::Refused { body, .. }) if body.contains("already active") => {}
            other => other?,
        }
        let body = json!({ "update_info": { "order": order } });
        let updated = self.http.tell(Stage::Load, "/update_weights", body, UNTIL_STOP, stop);
        // A worker that has something to say says it better than the status.
        let hint = "is the engine's backend \"windlass\"?";
        let reports = read_reports(&self.http.engine, &self.reports, workers, hint);
        let told = reports.as_ref().map_or(Ok(()), |r| check_reports(&self.http.engine, order, r));
        if let Err(e @ EngineError::Declined { .. }) = told {
            // Nothing was written; the session is closed, and the version stays what it was.
            self.http.tell(Stage::Load, "/finish_weight_update", Value::Null, UNTIL_STOP, stop)?;
            return Err(e);
        }
        told?;
        updated?;
        let reports = reports?;
        let body = json!({ "weight_version": order.label().to_string() });
        self.http.tell(Stage::Load, "/finish_weight_update", body, UNTIL_STOP, stop)?;
        Ok(Written {
            how: how(&reports),
            extras: reports.first().map_or_else(Vec::new, |r| r.extras.clone()),
            slow: slow(&reports),
        })
    }

    fn clear(&self, stop: &Stop) -> Result<(), EngineError> {
        #[derive(Deserialize)]
        struct Reset {
            success: Option<bool>,
        }
        let Some(path) = vllm_reset(self.mode, self.cache) else { return Ok(()) };
        for again in 0..CLEARS {
            if again > 0 {
                std::thread::sleep(CLEAR_PAUSE);
            }
            // Versions before the answer said so answered with nothing.
            let reset: Option<Reset> = self.http.post(Stage::Cache, path, &json!({}), ANSWER, stop)?;
            if reset.is_none_or(|r| r.success != Some(false)) {
                return Ok(());
            }
        }
        let why = format!("POST {path} answered false {CLEARS} times");
        Err(EngineError::Cache { engine: self.http.engine.clone(), why })
    }

    fn resume(&self, stop: &Stop) -> Result<(), EngineError> {
        self.http.tell_again(Stage::Resume, "/resume", &Value::Null, ANSWER, stop)
    }

    fn label(&self, label: &str, _: &Stop) -> Result<(), EngineError> {
        let why = format!("it takes a name ({label}) only at the end of an update, by /finish_weight_update");
        Err(EngineError::Unsupported { engine: self.http.engine.clone(), why })
    }

    fn fence(&self, stop: &Stop) -> Result<(), EngineError> {
        self.pause(stop)
    }

    fn pauses(&self) -> bool {
        true
    }

    fn live(&self, stop: &Stop) -> Result<Option<String>, EngineError> {
        Native::version(&self.http, stop)
    }

    fn holds_requests(&self) -> bool {
        self.mode == PauseMode::Wait
    }
}

/// What a server with our plugin says of itself.
#[derive(Clone, Debug, Deserialize)]
pub struct Status {
    /// One life of the server.
    pub incarnation: String,
    /// It must not be let go on before a whole load.
    #[serde(default)]
    pub fenced: bool,
    /// The version that it has.
    #[serde(default)]
    pub weight_version: Option<String>,
    #[serde(default)]
    pub workers: Vec<Report>,
    /// A load under way.
    #[serde(default)]
    pub transaction: Option<Value>,
}

/// A server with our endpoint plugin.
#[derive(Clone, Debug)]
pub struct Plugin {
    http: Http,
}

/// What came of a load.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Loaded {
    /// How long the engine was paused.
    pub pause_ms: Option<f64>,
    /// How long all of it took.
    pub ms: Option<f64>,
    /// How long it took before the pause.
    pub stage_ms: Option<f64>,
    /// How long the steps took that were under way.
    pub drain_ms: Option<f64>,
    pub workers: Vec<Report>,
}

impl Plugin {
    /// Talks to the plugin of the server behind `http`, whose key is the plugin's token.
    pub fn new(http: Http) -> Plugin {
        Plugin { http }
    }

    /// What the server says of itself; `None` if it has no plugin.
    pub fn status(&self, stop: &Stop) -> Result<Option<Status>, EngineError> {
        match self.http.get(Stage::Ask, "/windlass/v1/status", ANSWER, stop) {
            Ok(status) => Ok(Some(status)),
            Err(EngineError::Refused { status: 404, .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Makes the workers ready for loads from an image, while they serve.
    pub fn prepare(&self, image: &std::path::Path, stop: &Stop) -> Result<(), EngineError> {
        let body = json!({ "image": image });
        self.http.tell(Stage::Prepare, "/windlass/v1/prepare", body, UNTIL_STOP, stop)
    }

    /// Pauses, loads, clears caches and resumes, as one task of the server that goes on if this call is broken off; a
    /// second call for the same order joins it.
    pub fn load(
        &self,
        order: &Order,
        (mode, cache, lease): (PauseMode, CachePolicy, Duration),
        stop: &Stop,
    ) -> Result<Loaded, EngineError> {
        let pause = json!({ "mode": mode, "cache": cache, "lease": lease.as_secs_f64() });
        let body = json!({ "order": order, "pause": pause });
        let path = "/windlass/v1/load";
        let loaded: Loaded =
            self.http.post(Stage::Load, path, &body, UNTIL_STOP, stop).map_err(|e| self.said(e))?;
        check_reports(&self.http.engine, order, &loaded.workers)?;
        Ok(loaded)
    }

    /// The sums of what the workers hold, as they give them.
    pub fn verify(&self, stop: &Stop) -> Result<Value, EngineError> {
        self.http.post(Stage::Verify, "/windlass/v1/verify", &json!({}), UNTIL_STOP, stop)
    }

    /// What our plugin says went wrong, with its own kind.
    fn said(&self, e: EngineError) -> EngineError {
        #[derive(Deserialize)]
        struct Outer {
            error: super::order::Said,
        }
        let EngineError::Refused { body, stage, .. } = &e else { return e };
        match serde_json::from_str::<Outer>(body) {
            Ok(Outer { error }) => EngineError::Guard {
                stage: Some(*stage),
                kind: error.kind,
                text: format!("cannot {stage} {}: {}", self.http.engine, error.text),
                advice: String::new(),
            },
            Err(_) => e,
        }
    }
}

/// A key that the plugin refuses is a wrong token, not a missing plugin.
pub(super) fn is_denied(e: &EngineError) -> bool {
    e.kind() == Kind::Denied
}
