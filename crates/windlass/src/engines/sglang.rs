//! SGLang: loaded from a directory that is the image, with the model's configuration beside it.
//!
//! Owns: what is asked of an SGLang server, and in which order:
//!
//! ```text
//! POST /pause_generation {"mode": …}                 as `pause` says
//! POST /update_weights_from_disk {"model_path": DIR, "weight_version": "windlass:…", "flush_cache": …}
//! POST /continue_generation
//! GET  /model_info (before: /get_model_info)          must be the version that was given
//! ```
//!
//! SGLang ends when a tensor does not fit, and what it calls a rollback reads the bad files once more, so everything is
//! compared before it is paused ([`super::check`]). An update that it says failed has written in part: it is repeated
//! once, and if that fails too the engine stays paused.
//!
//! The server reports the directory as the name of its model from the first load on.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::json;
use windlass_data::stop::Stop;

use super::error::{EngineError, Stage};
use super::http::{Http, UNTIL_STOP};
use super::order::Order;
use super::pause::{CachePolicy, PauseMode, sglang_pause};
use super::transaction::{ANSWER, Plain, Written};

/// What a server says of itself.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ModelInfo {
    /// Where it read its weights.
    #[serde(default)]
    pub model_path: Option<PathBuf>,
    /// The version that it has.
    #[serde(default)]
    pub weight_version: Option<String>,
}

/// An SGLang server.
#[derive(Debug)]
pub struct Sglang {
    http: Http,
    mode: PauseMode,
    cache: CachePolicy,
    /// The directory with the image, the configuration and the tokenizer.
    model: PathBuf,
}

impl Sglang {
    /// Drives the server behind `http`, which loads from the directory `model`.
    pub fn new(http: Http, mode: PauseMode, cache: CachePolicy, model: PathBuf) -> Sglang {
        Sglang { http, mode, cache, model }
    }

    /// What the server says of itself.
    pub fn info(http: &Http, stop: &Stop) -> Result<ModelInfo, EngineError> {
        match http.get(Stage::Ask, "/model_info", ANSWER, stop) {
            Err(EngineError::Refused { status: 404, .. }) => {
                match http.get(Stage::Ask, "/get_model_info", ANSWER, stop) {
                    Err(EngineError::Refused { engine, status: 404, .. }) => {
                        let why = "it has neither /model_info nor /get_model_info: is it an SGLang server?";
                        Err(EngineError::NoRoute { engine, why: why.into() })
                    }
                    other => other,
                }
            }
            other => other,
        }
    }
}

impl Plain for Sglang {
    fn prepare(&self, _: &Order, _: &Stop) -> Result<(), EngineError> {
        Ok(())
    }

    fn pause(&self, stop: &Stop) -> Result<(), EngineError> {
        let Some(mode) = sglang_pause(self.mode, self.cache) else { return Ok(()) };
        self.http.tell(Stage::Pause, "/pause_generation", json!({ "mode": mode }), UNTIL_STOP, stop)
    }

    fn write(&self, order: &Order, stop: &Stop) -> Result<Written, EngineError> {
        let body = json!({
            "model_path": self.model,
            "weight_version": order.label().to_string(),
            "flush_cache": self.cache == CachePolicy::Reset,
            "abort_all_requests": false,
        });
        self.http.tell(Stage::Load, "/update_weights_from_disk", body, UNTIL_STOP, stop)?;
        Ok(Written { how: "disk".into(), extras: Vec::new(), slow: None })
    }

    fn clear(&self, _: &Stop) -> Result<(), EngineError> {
        // Done by the update, which fails if it cannot.
        Ok(())
    }

    fn resume(&self, stop: &Stop) -> Result<(), EngineError> {
        // Also where nothing was paused: an earlier guard may have.
        self.http.tell(Stage::Resume, "/continue_generation", json!({}), ANSWER, stop)
    }

    fn live(&self, stop: &Stop) -> Result<Option<String>, EngineError> {
        Ok(Sglang::info(&self.http, stop)?.weight_version)
    }

    fn holds_requests(&self) -> bool {
        false
    }
}
