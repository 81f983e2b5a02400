//! SGLang: by an order to our loader in its workers, or from a directory that is the image, with the model's configuration
//! beside it.
//!
//! Owns: what is asked of an SGLang server, and in which order. A server that was started with our loader
//! (`--custom-weight-loader windlass.sglang.custom.load`) is given orders, so that a worker writes what changed and nothing
//! else:
//!
//! ```text
//! POST /pause_generation {"mode": …}                 as `pause` says
//! POST /begin_weight_update {"selector": "target"}    from 0.5.21 on
//! POST /update_weights_from_tensor {"load_format": "windlass.sglang.custom.load", "serialized_named_tensors": [ORDER, …]}
//!                                                    each worker writes <reports>/<rank>.json
//! POST /end_weight_update
//! POST /update_weight_version {"new_version": "windlass:…"}
//! POST /flush_cache                                  if the cache is to be reset
//! POST /continue_generation
//! GET  /model_info (before: /get_model_info)          must be the version that was given
//! ```
//!
//! Any other server loads the whole image from a path:
//!
//! ```text
//! POST /pause_generation {"mode": …}
//! POST /update_weights_from_disk {"model_path": DIR, "weight_version": "windlass:…", "flush_cache": …}
//! POST /continue_generation
//! GET  /model_info
//! ```
//!
//! SGLang ends when a tensor does not fit, and what it calls a rollback reads the bad files once more, so everything is
//! compared before it is paused ([`super::check`]). An update that it says failed has written in part: it is repeated
//! once, and if that fails too the engine stays paused. Our loader checks an order once more, on all ranks, before it
//! writes; an order that is refused there leaves the weights that were.
//!
//! A server that loads from a path reports the directory as the name of its model from the first load on.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use windlass_data::stop::Stop;

use super::error::{EngineError, Stage};
use super::http::{Http, UNTIL_STOP};
use super::order::{How, Order, Report, check_reports, clear_reports, how, read_reports, slow};
use super::pause::{CachePolicy, Halt, PauseMode};
use super::transaction::{ANSWER, Plain, Written};

/// Our loader, as a server knows it.
const LOADER: &str = "windlass.sglang.custom.load";
/// The name under which an order travels among tensors.
const ORDER: &str = "__windlass_order__";
/// How long requests that were told to end may take to do so, before the cache can be flushed.
const ENDING: Duration = Duration::from_secs(10);
const FLUSH_PAUSE: Duration = Duration::from_millis(100);
/// Refusals of `/update_weights_from_disk` that come before the first write.
const UNTOUCHED: [&str; 3] =
    ["Failed to get weights iterator", "Failed to get model loader", "Online weight updates are not"];
/// What `/update_weights_from_disk` says if it wrote everything and requests kept the cache in use.
const UNFLUSHED: &str = "the cache was not flushed";

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

/// What a server was started with.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ServerInfo {
    custom_weight_loader: Option<Vec<String>>,
    tp_size: Option<u64>,
    pp_size: Option<u64>,
    dp_size: Option<u64>,
    nnodes: Option<u64>,
}

/// How a server is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loading {
    /// Its workers carry out orders.
    Workers {
        /// How many there are.
        count: u64,
    },
    /// The whole image, from a directory.
    Disk {
        /// Why not by orders.
        why: String,
    },
}

impl Loading {
    fn of(info: &ServerInfo, mode: PauseMode) -> Loading {
        let disk = |why: String| Loading::Disk { why };
        let many = |n: Option<u64>| n.filter(|n| *n > 1);
        if !info.custom_weight_loader.iter().flatten().any(|l| l == LOADER) {
            return disk(format!("it was started without --custom-weight-loader {LOADER}"));
        }
        if let Some(n) = many(info.dp_size) {
            return disk(format!("it has {n} data-parallel replicas, which SGLang loads from disk only"));
        }
        if let Some(n) = many(info.pp_size) {
            return disk(format!("it has {n} pipeline stages"));
        }
        if let Some(n) = many(info.nnodes) {
            return disk(format!("its workers are on {n} hosts, and report on one"));
        }
        match mode {
            // Between the calls of an order the engine would serve.
            PauseMode::Wait => disk("--pause wait is one call of SGLang, which loads from disk".into()),
            PauseMode::Keep | PauseMode::Abort => Loading::Workers { count: info.tp_size.unwrap_or(1) },
        }
    }
}

/// The way that a driver takes.
#[derive(Debug)]
enum By {
    Workers { count: u64, reports: PathBuf },
    Disk { model: PathBuf },
}

/// An SGLang server.
#[derive(Debug)]
pub struct Sglang {
    http: Http,
    /// `None` if the load itself waits for requests to end.
    halt: Option<Halt>,
    cache: CachePolicy,
    by: By,
    /// The last write has flushed the cache.
    flushed: AtomicBool,
}

impl Sglang {
    /// Drives the server behind `http`, which loads from the directory `model`: the image, the configuration and the
    /// tokenizer.
    pub fn from_disk(http: Http, halt: Option<Halt>, cache: CachePolicy, model: PathBuf) -> Sglang {
        Sglang { http, halt, cache, by: By::Disk { model }, flushed: AtomicBool::new(false) }
    }

    /// Drives the server behind `http`, whose `count` workers carry out orders and report in `reports`.
    pub fn by_order(
        http: Http,
        halt: Option<Halt>,
        cache: CachePolicy,
        (count, reports): (u64, PathBuf),
    ) -> Sglang {
        Sglang { http, halt, cache, by: By::Workers { count, reports }, flushed: AtomicBool::new(false) }
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

    /// How the server can be loaded, by what it was started with.
    pub fn loading(http: &Http, mode: PauseMode, stop: &Stop) -> Result<Loading, EngineError> {
        let info = match http.get::<ServerInfo>(Stage::Ask, "/server_info", ANSWER, stop) {
            Err(EngineError::Refused { status: 404, .. }) => {
                http.get(Stage::Ask, "/get_server_info", ANSWER, stop)
            }
            other => other,
        };
        match info {
            Ok(info) => Ok(Loading::of(&info, mode)),
            // It can do without.
            Err(EngineError::Refused { path, status, .. }) => {
                Ok(Loading::Disk { why: format!("it answered {path} with status {status}") })
            }
            Err(e) => Err(e),
        }
    }

    /// Opens the session that SGLang has from 0.5.21 on; whether there is one.
    fn begin(&self, stop: &Stop) -> Result<bool, EngineError> {
        let body = json!({ "selector": "target" });
        match self.http.tell(Stage::Load, "/begin_weight_update", body, UNTIL_STOP, stop) {
            Ok(()) => Ok(true),
            Err(EngineError::Refused { status: 404 | 405, .. }) => Ok(false),
            // Left by a guard that died in between, or by an order that failed: what follows closes it.
            Err(EngineError::Refused { body, .. }) if body.contains("already open") => Ok(true),
            Err(e) => Err(e),
        }
    }

    fn end(&self, session: bool, stop: &Stop) -> Result<(), EngineError> {
        if !session {
            return Ok(());
        }
        self.http.tell(Stage::Load, "/end_weight_update", Value::Null, UNTIL_STOP, stop)
    }

    fn order(&self, order: &Order, count: u64, reports: &Path, stop: &Stop) -> Result<Written, EngineError> {
        clear_reports(reports)?;
        let session = self.begin(stop)?;
        // Names, shapes and, where they are known, dtypes were compared before; an engine may be told to cast.
        let told = json!({ "order": order, "served": { "cast": true }, "ends": session });
        let payload = BASE64_STANDARD.encode(pickled(told.to_string().as_bytes()));
        let tensors: Vec<&str> = (0..count).map(|_| payload.as_str()).collect();
        let body = json!({
            "serialized_named_tensors": tensors, "load_format": LOADER, "flush_cache": false, "selector": "target",
        });
        let updated = self.http.tell(Stage::Load, "/update_weights_from_tensor", body, UNTIL_STOP, stop);
        // A worker that has something to say says it better than the status.
        let said = read_reports(&self.http.engine, reports, count, &format!("was it started with {LOADER}?"));
        match self.judge(order, updated, said, reports) {
            Err(e @ EngineError::Declined { .. }) => {
                // Nothing was written; the session is closed, and the version stays what it was.
                self.end(session, stop)?;
                Err(e)
            }
            Err(e) => Err(e),
            Ok(said) => {
                self.end(session, stop)?;
                self.label(&order.label().to_string(), stop)?;
                let extras = said.first().map_or_else(Vec::new, |r| r.extras.clone());
                Ok(Written { how: how(&said), extras, slow: slow(&said) })
            }
        }
    }

    /// What came of an order, by what the server and its workers say.
    fn judge(
        &self,
        order: &Order,
        updated: Result<(), EngineError>,
        said: Result<Vec<Report>, EngineError>,
        reports: &Path,
    ) -> Result<Vec<Report>, EngineError> {
        if let Ok(said) = &said {
            check_reports(&self.http.engine, order, said)?;
        }
        match updated {
            // It refused before it called our loader in any worker, whose weights are known to be whole.
            Err(EngineError::Refused { engine, status: 400, body: text, kind, .. })
                if order.how == How::Auto
                    && fs::read_dir(reports).is_ok_and(|mut dir| dir.next().is_none()) =>
            {
                Err(EngineError::Declined { engine, rank: 0, text, kind })
            }
            Err(e) => Err(e),
            Ok(()) => said,
        }
    }
}

impl Plain for Sglang {
    fn prepare(&self, _: &Order, _: &Stop) -> Result<(), EngineError> {
        Ok(())
    }

    fn pause(&self, stop: &Stop) -> Result<(), EngineError> {
        let Some(mode) = self.halt else { return Ok(()) };
        self.http.tell_again(Stage::Pause, "/pause_generation", &json!({ "mode": mode }), UNTIL_STOP, stop)
    }

    fn write(&self, order: &Order, stop: &Stop) -> Result<Written, EngineError> {
        let model = match &self.by {
            By::Workers { count, reports } => return self.order(order, *count, reports, stop),
            By::Disk { model } => model,
        };
        let flush = self.cache == CachePolicy::Reset;
        let body = json!({
            "model_path": model,
            "load_format": "safetensors",
            "weight_version": order.label().to_string(),
            "flush_cache": flush,
            "abort_all_requests": false,
        });
        self.flushed.store(false, Ordering::Relaxed);
        match self.http.tell(Stage::Load, "/update_weights_from_disk", body, UNTIL_STOP, stop) {
            Ok(()) => self.flushed.store(flush, Ordering::Relaxed),
            // Requests that were ended are still on their way out: `clear` waits for them. It has not taken the name.
            Err(EngineError::Refused { status: 400, body, .. }) if body.contains(UNFLUSHED) => {
                self.label(&order.label().to_string(), stop)?;
            }
            // Only an engine that is known to be whole can go on with what it has.
            Err(EngineError::Refused { engine, status: 400, body: text, kind, .. })
                if order.how == How::Auto && UNTOUCHED.iter().any(|start| text.contains(start)) =>
            {
                return Err(EngineError::Declined { engine, rank: 0, text, kind });
            }
            Err(e) => return Err(e),
        }
        Ok(Written { how: "disk".into(), extras: Vec::new(), slow: None })
    }

    fn clear(&self, stop: &Stop) -> Result<(), EngineError> {
        if self.cache == CachePolicy::Keep || self.flushed.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Before the deadline of the load, so that the error says what is wrong.
        let until = Instant::now() + stop.left().map_or(ENDING, |left| ENDING.min(left / 2));
        loop {
            match self.http.tell_again(Stage::Cache, "/flush_cache", &Value::Null, ANSWER, stop) {
                // Requests that were ended are still on their way out.
                Err(EngineError::Refused { status: 400, body, .. }) if Instant::now() >= until => {
                    return Err(EngineError::Cache { engine: self.http.engine.clone(), why: body });
                }
                Err(EngineError::Refused { status: 400, .. }) => std::thread::sleep(FLUSH_PAUSE),
                other => return other,
            }
        }
    }

    fn resume(&self, stop: &Stop) -> Result<(), EngineError> {
        self.http.tell_again(Stage::Resume, "/continue_generation", &json!({}), ANSWER, stop)
    }

    fn label(&self, label: &str, stop: &Stop) -> Result<(), EngineError> {
        let body = json!({ "new_version": label, "abort_all_requests": false });
        match self.http.tell_again(Stage::Load, "/update_weight_version", &body, ANSWER, stop) {
            // An older server keeps no name of a version.
            Err(EngineError::Refused { status: 404 | 405, .. }) => Ok(()),
            other => other,
        }
    }

    fn fence(&self, stop: &Stop) -> Result<(), EngineError> {
        let body = json!({ "mode": self.halt.unwrap_or(Halt::Retract) });
        self.http.tell_again(Stage::Pause, "/pause_generation", &body, UNTIL_STOP, stop)
    }

    fn pauses(&self) -> bool {
        self.halt.is_some()
    }

    fn live(&self, stop: &Stop) -> Result<Option<String>, EngineError> {
        Ok(Sglang::info(&self.http, stop)?.weight_version)
    }

    fn holds_requests(&self) -> bool {
        false
    }
}

/// `[(ORDER, torch.ByteTensor(list(text)))]` as a pickle, which is how SGLang takes tensors. It asks its reader for nothing
/// but the class of a tensor.
fn pickled(text: &[u8]) -> Vec<u8> {
    let mut out = vec![0x80, 2]; // PROTO 2
    out.extend_from_slice(b"](X"); // EMPTY_LIST MARK BINUNICODE
    out.extend_from_slice(&(ORDER.len() as u32).to_le_bytes());
    out.extend_from_slice(ORDER.as_bytes());
    out.extend_from_slice(b"ctorch\nByteTensor\n]("); // GLOBAL EMPTY_LIST MARK
    out.extend(text.iter().flat_map(|byte| [b'K', *byte])); // BININT1
    out.extend_from_slice(b"e\x85R\x86e."); // APPENDS TUPLE1 REDUCE TUPLE2 APPENDS STOP
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_go_to_servers_that_have_our_loader_and_can_take_them() {
        let loader = Some(vec!["other.loader".into(), LOADER.into()]);
        let able = ServerInfo { custom_weight_loader: loader, tp_size: Some(2), ..ServerInfo::default() };
        assert_eq!(Loading::of(&able, PauseMode::Keep), Loading::Workers { count: 2 });
        assert_eq!(Loading::of(&able, PauseMode::Abort), Loading::Workers { count: 2 });
        let refused = |info: ServerInfo, mode| match Loading::of(&info, mode) {
            Loading::Disk { why } => why,
            Loading::Workers { .. } => panic!("{info:?}"),
        };
        for (info, mode, says) in [
            (ServerInfo::default(), PauseMode::Keep, "without --custom-weight-loader windlass"),
            (ServerInfo { dp_size: Some(2), ..able.clone() }, PauseMode::Keep, "2 data-parallel"),
            (ServerInfo { pp_size: Some(4), ..able.clone() }, PauseMode::Keep, "4 pipeline stages"),
            (ServerInfo { nnodes: Some(2), ..able.clone() }, PauseMode::Keep, "on 2 hosts"),
            (able, PauseMode::Wait, "--pause wait"),
        ] {
            let why = refused(info, mode);
            assert!(why.contains(says), "{why}");
        }
    }

    #[test]
    fn an_order_is_pickled_as_a_tensor_of_bytes() {
        let mut expected = b"\x80\x02](X\x12\0\0\0__windlass_order__ctorch\nByteTensor\n](".to_vec();
        expected.extend_from_slice(b"K{K}e\x85R\x86e.");
        assert_eq!(pickled(b"{}"), expected);
    }
}
