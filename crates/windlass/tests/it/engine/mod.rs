//! An engine that is no engine: speaks the routes of vLLM, of our plugin in it, or of SGLang, as strictly as those that
//! end when they are called in the wrong order. It really reads the image, and keeps the digest of what it read.
#![allow(dead_code, unreachable_pub)]

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use serde_json::{Value, json};
use windlass_data::file::Checkpoint;
use windlass_data::image::ImageView;
use windlass_data::region::Region;
use windlass_data::seal::pass::{self, Run};
use windlass_data::stop::Stop;

use crate::process::PATIENCE;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// vLLM with its own routes.
    Native,
    /// vLLM with our plugin.
    Plugin,
    Bare,
    Sglang,
    /// SGLang with our loader in its workers.
    Workers,
}

impl Kind {
    pub fn dialect(self) -> &'static str {
        match self {
            Kind::Native | Kind::Plugin | Kind::Bare => "vllm",
            Kind::Sglang | Kind::Workers => "sglang",
        }
    }
}

pub const TOKEN: &str = "the-plugin-token";

/// What happens to a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// It is refused so many times.
    Fail(u32),
    /// It is done, and answered when it is let go.
    HoldAnswer,
    /// It is begun when it is let go.
    HoldRequest,
}

#[derive(Debug, Default)]
#[allow(clippy::struct_excessive_bools)]
pub struct State {
    pub calls: Vec<String>,
    /// Paths that were read.
    reads: Vec<String>,
    pub orders: Vec<Value>,
    pub paused: bool,
    active: bool,
    pub dirty: bool,
    /// A dirty engine was let go on: it would have answered with weights of two versions.
    pub served_dirty: bool,
    pub running: u32,
    pub label: String,
    pub digest: Option<String>,
    pub reset_answers: Option<bool>,
    pub caches: u32,
    /// The workers refuse the next order.
    pub declines: bool,
    /// Requests keep the next update from disk from flushing the cache.
    pub unflushed: bool,
    faults: HashMap<String, Fault>,
    life: u64,
    kind: Option<Kind>,
}

type Shared = Arc<(Mutex<State>, Condvar)>;

pub struct Engine {
    pub kind: Kind,
    pub port: u16,
    shared: Shared,
    /// Of the present life.
    ended: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Engine {
    pub fn start(kind: Kind) -> Engine {
        let mut engine =
            Engine { kind, port: 0, shared: Shared::default(), ended: Arc::default(), thread: None };
        engine.live(1);
        engine
    }

    fn live(&mut self, life: u64) {
        let until = Instant::now() + PATIENCE;
        let listener = loop {
            match TcpListener::bind(("127.0.0.1", self.port)) {
                Ok(listener) => break listener,
                Err(e) => assert!(Instant::now() < until, "{e}"),
            }
        };
        listener.set_nonblocking(true).unwrap();
        self.port = listener.local_addr().unwrap().port();
        self.ended = Arc::default();
        *self.state() = State { label: "default".into(), life, kind: Some(self.kind), ..State::default() };
        let (shared, ended) = (Arc::clone(&self.shared), Arc::clone(&self.ended));
        self.thread = Some(std::thread::spawn(move || {
            while !ended.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let (shared, ended) = (Arc::clone(&shared), Arc::clone(&ended));
                        std::thread::spawn(move || serve(stream, &shared, &ended, life));
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        }));
    }

    pub fn arg(&self) -> String {
        format!("--engine={}=http://127.0.0.1:{}", self.kind.dialect(), self.port)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock()
    }

    pub fn fault(&self, path: &str, fault: Fault) {
        self.state().faults.insert(path.into(), fault);
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.state().faults.clear();
        self.shared.1.notify_all();
    }

    /// Nobody answers any more.
    pub fn kill(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        self.shared.1.notify_all();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    /// Another process in the same place, with the weights it was started with.
    pub fn restart(&mut self) {
        let life = self.state().life + 1;
        self.live(life);
    }

    pub fn wait(&self, what: &str, mut until: impl FnMut(&State) -> bool) {
        let most = Instant::now() + PATIENCE;
        while !until(&self.state()) {
            assert!(Instant::now() < most, "{what}: {:?}", self.state());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn called(&self, path: &str) -> usize {
        self.state().calls.iter().filter(|c| c.starts_with(path)).count()
    }

    /// Waits until a path was read so often.
    pub fn wait_for_reads(&self, path: &str, count: usize) {
        self.wait(path, |s| s.reads.iter().filter(|read| *read == path).count() >= count);
    }

    /// How often a path was read.
    pub fn read(&self, path: &str) -> usize {
        self.state().reads.iter().filter(|read| *read == path).count()
    }

    pub fn version(&self) -> Option<u64> {
        self.state().label.strip_prefix("windlass:")?.rsplit(':').next()?.parse().ok()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.kill();
    }
}

fn serve(mut stream: TcpStream, shared: &Shared, ended: &AtomicBool, life: u64) {
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        match reader.read_line(&mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if line == "\r\n" => break,
            Ok(_) => head.push(line.trim().to_owned()),
        }
    }
    let header = |name: &str| {
        head.iter()
            .find_map(|l| l.to_lowercase().starts_with(name).then(|| l[name.len() + 1..].trim().to_owned()))
    };
    let mut body = Vec::new();
    if let Some(length) = header("content-length") {
        body = vec![0; length.parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
    } else if header("transfer-encoding").is_some() {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).unwrap();
            let size = usize::from_str_radix(size.trim(), 16).unwrap();
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).unwrap();
            body.extend_from_slice(&chunk[..size]);
            if size == 0 {
                break;
            }
        }
    }
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let words: Vec<&str> = head[0].split(' ').collect();
    let (method, target) = (words[0], words[1]);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let authorized = header("authorization").is_some_and(|h| h == format!("Bearer {TOKEN}"));

    let held = |wanted: fn(&Fault) -> bool| {
        let mut state = shared.0.lock();
        while !ended.load(Ordering::SeqCst)
            && state.life == life
            && state.faults.get(path).is_some_and(wanted)
        {
            shared.1.wait_for(&mut state, Duration::from_millis(20));
        }
    };
    {
        let mut state = shared.0.lock();
        let list = if method == "POST" { &mut state.calls } else { &mut state.reads };
        list.push(target.to_owned());
    }
    held(|f| matches!(f, Fault::HoldRequest));
    let failing = {
        let mut state = shared.0.lock();
        match state.faults.get_mut(path) {
            Some(Fault::Fail(left)) if *left > 0 => {
                *left -= 1;
                true
            }
            _ => false,
        }
    };
    if ended.load(Ordering::SeqCst) {
        return;
    }
    let (status, answer) = if failing {
        let mut state = shared.0.lock();
        // A failed update leaves the session closed and the weights of two versions.
        if matches!(path, "/update_weights" | "/update_weights_from_disk" | "/update_weights_from_tensor") {
            (state.active, state.dirty) = (false, true);
        }
        (500, json!({ "error": "told to fail" }))
    } else {
        route(shared, (method, path, query), &body, authorized)
    };
    held(|f| matches!(f, Fault::HoldAnswer));
    if ended.load(Ordering::SeqCst) {
        return;
    }
    let text = answer.to_string();
    let head = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        text.len()
    );
    // Whoever asked may be dead by now.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(text.as_bytes()));
}

const NOT_FOUND: (u16, Value) = (404, Value::Null);

fn route(
    shared: &Shared,
    (method, path, query): (&str, &str, &str),
    body: &Value,
    authorized: bool,
) -> (u16, Value) {
    let kind = shared.0.lock().kind.unwrap();
    match (kind, method, path) {
        (Kind::Native, ..) => native(shared, (method, path, query), body),
        (Kind::Plugin, _, p) if p.starts_with("/windlass/v1/") && !authorized => (401, json!({})),
        (Kind::Plugin, ..) => plugin(shared, (method, path), body),
        (Kind::Sglang, ..) => sglang(shared, (method, path), body),
        (Kind::Workers, ..) => workers(shared, (method, path), body),
        (Kind::Bare, ..) => NOT_FOUND,
    }
}

fn resume(state: &mut State) {
    state.served_dirty |= state.paused && state.dirty;
    state.paused = false;
}

fn native(shared: &Shared, (method, path, query): (&str, &str, &str), body: &Value) -> (u16, Value) {
    let mut state = shared.0.lock();
    let refuse = |why: &str| (500, json!({ "error": why }));
    let done = (200, json!({ "message": "done" }));
    match (method, path) {
        ("GET", "/weight_info") => (200, json!({ "weight_version": state.label })),
        ("GET", "/get_world_size") => (200, json!({ "world_size": 2 })),
        ("POST", "/init_weight_transfer_engine") => match body["init_info"]["image"].as_str() {
            Some(_) => done,
            None => refuse("no image"),
        },
        ("POST", "/pause") => {
            state.paused = true;
            done
        }
        ("POST", "/start_weight_update") => {
            if state.active {
                return refuse("start_weight_update called while a weight update is already active.");
            }
            if !state.paused {
                return refuse("not paused");
            }
            state.active = true;
            done
        }
        ("POST", "/update_weights") => {
            if !state.active {
                return refuse("start_weight_update must be called before update_weights.");
            }
            let order = body["update_info"]["order"].clone();
            state.orders.push(order.clone());
            state.dirty = true;
            drop(state);
            let digest = read_image(&order);
            let mut state = shared.0.lock();
            for rank in 0..2 {
                let report = worker(&order, rank);
                let path = Path::new(order["reports"].as_str().unwrap()).join(format!("{rank}.json"));
                std::fs::write(path, report.to_string()).unwrap();
            }
            state.digest = Some(digest);
            done
        }
        ("POST", "/finish_weight_update") => {
            if !state.active {
                return refuse("finish_weight_update called without a matching start_weight_update.");
            }
            (state.active, state.dirty) = (false, false);
            state.label = body["weight_version"].as_str().unwrap().into();
            done
        }
        ("POST", "/reset_prefix_cache") => {
            let success = state.running == 0 || query.contains("reset_running_requests=true");
            let success = state.reset_answers.unwrap_or(success);
            state.caches += u32::from(success);
            (200, json!({ "success": success }))
        }
        ("POST", "/resume") => {
            resume(&mut state);
            done
        }
        _ => NOT_FOUND,
    }
}

fn worker(order: &Value, rank: u32) -> Value {
    json!({
        "rank": rank, "worker": "0123456789abcdef", "engine": "fake 1", "state": "clean",
        "live": { "model_id": order["model_id"], "incarnation": order["incarnation"], "version": order["version"] },
        "plan": null, "last": { "how": "dense", "ms": 1.0, "bytes": 1, "elements": 1 }, "extras": [], "error": null,
    })
}

fn plugin(shared: &Shared, (method, path): (&str, &str), body: &Value) -> (u16, Value) {
    let mut state = shared.0.lock();
    match (method, path) {
        ("GET", "/windlass/v1/status") => (
            200,
            json!({
                "engine": "fake", "engine_version": "1", "incarnation": format!("{:016x}", state.life),
                "paused": state.paused, "fenced": false, "weight_version": state.label, "workers": [],
                "transaction": null,
            }),
        ),
        ("POST", "/windlass/v1/prepare") => (200, json!({})),
        ("POST", "/windlass/v1/load") => {
            let order = body["order"].clone();
            assert!(body["pause"]["lease"].is_number() && body["pause"]["cache"] == "reset", "{body}");
            state.orders.push(order.clone());
            drop(state);
            let digest = read_image(&order);
            let mut state = shared.0.lock();
            state.digest = Some(digest);
            let version = order["version"].as_u64().unwrap();
            state.label = format!("windlass:{:016x}:{version}", order["incarnation"].as_u64().unwrap());
            (200, json!({ "workers": [worker(&order, 0), worker(&order, 1)], "pause_ms": 3.5, "ms": 2.5 }))
        }
        _ => NOT_FOUND,
    }
}

fn sglang(shared: &Shared, (method, path): (&str, &str), body: &Value) -> (u16, Value) {
    let mut state = shared.0.lock();
    match (method, path) {
        ("GET", "/model_info") => (200, json!({ "model_path": "/nowhere", "weight_version": state.label })),
        ("POST", "/pause_generation") => {
            assert!(["retract", "in_place", "abort"].contains(&body["mode"].as_str().unwrap()), "{body}");
            state.paused = true;
            (200, json!({ "status": "ok" }))
        }
        ("POST", "/update_weights_from_disk") => {
            state.dirty = true;
            state.orders.push(body.clone());
            drop(state);
            let dir = Path::new(body["model_path"].as_str().unwrap());
            let digest = sum(&Checkpoint::open(dir).unwrap());
            let mut state = shared.0.lock();
            state.digest = Some(digest);
            state.dirty = false;
            if std::mem::take(&mut state.unflushed) {
                let why = "Weights were updated, but the cache was not flushed because of requests";
                return (400, json!({ "success": false, "message": why }));
            }
            state.caches += u32::from(body["flush_cache"] == true);
            state.label = body["weight_version"].as_str().unwrap().into();
            (200, json!({ "success": true, "message": "Succeeded", "num_paused_requests": 0 }))
        }
        ("POST", "/continue_generation") => {
            resume(&mut state);
            (200, json!({ "status": "ok" }))
        }
        ("POST", "/update_weight_version") => {
            assert!(!state.active && body["abort_all_requests"] == false, "{body}");
            state.label = body["new_version"].as_str().unwrap().into();
            (200, json!({ "success": true }))
        }
        ("POST", "/flush_cache") => {
            state.caches += 1;
            (200, json!({ "success": true }))
        }
        _ => NOT_FOUND,
    }
}

fn workers(shared: &Shared, (method, path): (&str, &str), body: &Value) -> (u16, Value) {
    let mut state = shared.0.lock();
    let refuse = |why: &str| (400, json!({ "success": false, "message": why }));
    let done = (200, json!({ "success": true, "message": "Success" }));
    match (method, path) {
        ("GET", "/server_info") => {
            (200, json!({ "custom_weight_loader": [LOADER], "tp_size": 2, "pp_size": 1, "dp_size": 1 }))
        }
        ("POST", "/begin_weight_update") if state.active => {
            refuse("a weight-update session is already open; call end_weight_update() first")
        }
        ("POST", "/begin_weight_update") => {
            assert!(state.paused && body["selector"] == "target", "{body}");
            state.active = true;
            done
        }
        ("POST", "/update_weights_from_tensor") => {
            if !state.active {
                return refuse("update_weights_from_tensor must run between begin and end");
            }
            assert!(body["load_format"] == LOADER && body["flush_cache"] == false, "{body}");
            let payloads = body["serialized_named_tensors"].as_array().unwrap();
            assert!(payloads.len() == 2 && payloads[0] == payloads[1], "one for each worker");
            let told = unpickled(payloads[0].as_str().unwrap());
            assert_eq!(told["ends"], true);
            let order = told["order"].clone();
            state.orders.push(order.clone());
            let declined = std::mem::take(&mut state.declines);
            state.dirty |= !declined;
            let had = state.label.strip_prefix("windlass:").and_then(|l| l.split_once(':'));
            let live = had.map(|(i, v)| {
                let incarnation = u64::from_str_radix(i, 16).unwrap();
                json!({ "model_id": "demo", "incarnation": incarnation, "version": v.parse::<u64>().unwrap() })
            });
            drop(state);
            let digest = read_image(&order);
            for rank in 0..2 {
                let mut report = worker(&order, rank);
                if declined {
                    report["live"] = json!(live);
                    report["error"] = json!({ "kind": "invalid", "text": "told to refuse" });
                }
                let path = Path::new(order["reports"].as_str().unwrap()).join(format!("{rank}.json"));
                std::fs::write(path, report.to_string()).unwrap();
            }
            if !declined {
                shared.0.lock().digest = Some(digest);
            }
            done
        }
        ("POST", "/end_weight_update") => {
            if !state.active {
                return refuse("no weight-update session is open");
            }
            (state.active, state.dirty) = (false, false);
            done
        }
        ("POST", "/update_weights_from_disk") => refuse("it has our loader"),
        _ => {
            drop(state);
            sglang(shared, (method, path), body)
        }
    }
}

const LOADER: &str = "windlass.sglang.custom.load";

/// The JSON of a payload: what `BININT1` puts on the pickle's list.
fn unpickled(text: &str) -> Value {
    let digit = |c: u8| {
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/".iter().position(|d| *d == c)
    };
    let bits: Vec<usize> = text.bytes().filter_map(digit).collect();
    let bytes: Vec<u8> = bits
        .chunks(4)
        .flat_map(|c| {
            let word = c.iter().fold(0, |n, d| n << 6 | d) << (6 * (4 - c.len()));
            [(word >> 16) as u8, (word >> 8) as u8, word as u8].into_iter().take(c.len() - 1)
        })
        .collect();
    let list = b"ByteTensor\n](";
    let start = bytes.windows(list.len()).position(|w| w == list).unwrap() + list.len();
    let json: Vec<u8> = bytes[start..].chunks(2).take_while(|c| c[0] == b'K').map(|c| c[1]).collect();
    serde_json::from_slice(&json).unwrap()
}

/// What a worker reads: the version that it was told, or the test fails.
fn read_image(order: &Value) -> String {
    let region = Region::open(Path::new(order["image"].as_str().unwrap())).unwrap();
    let view = ImageView::take(&region, PATIENCE, &Stop::after(PATIENCE)).unwrap();
    assert_eq!(order["version"], view.known().identity.version, "{order}");
    assert_eq!(order["digest"], view.known().digest.to_string());
    drop(view);
    sum(&Checkpoint::open(&region.slot_path(0)).unwrap())
}

fn sum(image: &Checkpoint) -> String {
    let manifest = image.manifest();
    let stop = Stop::never();
    let run = Run { kernels: windlass_data::simd::kernels(), threads: 1, stop: &stop, progress: &|_| {} };
    let all = (0..manifest.cuts().blocks()).into();
    let sums = pass::sum::<windlass::Error>(run, manifest, &all, |t| image.tensor(t)).unwrap();
    sums.digest(manifest).to_string()
}
