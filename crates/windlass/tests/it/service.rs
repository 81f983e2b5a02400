//! The agent, the receiver and `gc` as processes: what they answer, whom they let in, how they live and end.

use crate::command;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::process::{Agent, PATIENCE, Process, Trainer, answer};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Within what time a service that was told to end must be gone: a second, and what a busy machine takes.
const END: Duration = Duration::from_millis(1500);

fn home() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// A trainer with one version and its agent.
fn publisher(dir: &Path) -> (Trainer, Agent) {
    let mut trainer = Trainer::start(&dir.join("region"));
    let agent = Agent::start(&trainer.region, &[]);
    trainer.publish(0);
    agent.sealed(0);
    (trainer, agent)
}

fn register(agent: &Agent) -> String {
    let answer = agent.post("/register_receiver", &json!({ "name": "r" }));
    assert_eq!(answer.status, 200);
    answer.json()["instance_id"].as_str().unwrap().to_owned()
}

fn receiver(dir: &Path, region: &Path, more: &[&str]) -> Process {
    let args =
        ["receive".into(), format!("--region={}", region.display()), format!("--dir={}", dir.display())];
    Process::start(args.into_iter().chain(more.iter().map(ToString::to_string)))
}

#[test]
fn endpoints_answer_with_the_documented_fields() {
    let home = home();
    let mut trainer = Trainer::start(&home.path().join("region"));
    let agent = Agent::start(&trainer.region, &[]);
    assert_eq!(agent.get("/get_version").json()["version"], Value::Null);
    let early = agent.get("/get_buffer_info").error(503, "not_found");
    assert!(early.contains("no version of demo"), "{early}");
    trainer.publish(0);
    agent.sealed(0);
    trainer.publish(1);
    let served = agent.sealed(1);
    assert_eq!((served["version"].as_u64(), served["model_id"].as_str()), (Some(1), Some("demo")));

    let layout = agent.get("/get_buffer_info").json();
    let tensors = layout["tensors_meta"].as_array().unwrap();
    let bytes = |t: &Value| {
        assert_eq!((t[0].is_string(), t[1][1].as_str()), (true, Some("bfloat16")), "{t}");
        t[1][0].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).product::<u64>() * 2
    };
    let total: u64 = tensors.iter().map(bytes).sum();
    assert_eq!(layout["single_buffer_length"].as_u64(), Some(total));

    let can = agent.get("/get_capabilities").json();
    assert_eq!(can["strategies"], json!(["full", "delta", "auto"]));
    let delta = (&can["version"], &can["delta_ready"], &can["delta_base_version"], &can["delta_version"]);
    assert_eq!(delta, (&json!(1), &json!(true), &json!(0), &json!(1)));
    let changed = can["delta_num_nonzero"].as_u64().unwrap() as f64 / (total as f64 / 2.0);
    assert!((can["delta_sparsity"].as_f64().unwrap() - (1.0 - changed)).abs() < 1e-9, "{can}");
    assert!(can["delta_size_bytes"].as_u64().unwrap() > 0);

    let foreign = json!({
        "sglang_http_host": "10.0.0.9", "sglang_http_port": 30000, "session_ids": ["s"], "buffer_ptr": 7,
        "buffer_length": 9, "zmq_endpoint": "tcp://x", "zmq_port": 1, "handshake_ports": [1], "sender_group_index": 0,
    });
    let registered = agent.post("/register_sglang_instance", &foreign).json();
    let fields = registered.as_object().unwrap();
    for name in [
        "instance_id",
        "trainer_global_rank",
        "trainer_world_size",
        "trainer_session_ids",
        "trainer_buffer_ptr",
        "trainer_buffer_length",
        "trainer_hostname",
        "trainer_rpc_port",
    ] {
        assert!(fields.contains_key(name), "{name} in {registered}");
    }
    assert_eq!(registered["trainer_rpc_port"].as_u64(), Some(agent.port().into()));
    let status = agent.get("/status").json();
    assert_eq!(status["instances"][0]["name"], "10.0.0.9:30000", "{status}");

    let manifest = agent.get("/get_manifest").body;
    let manifest = windlass_core::manifest::Manifest::from_json(&manifest).unwrap();
    assert_eq!(served["layout_hash"], manifest.layout_hash().to_string());
    let sums = agent.get("/get_sums?version=1");
    assert_eq!(sums.body.len(), manifest.cuts().blocks() as usize * 16);
    let gone = agent.get("/get_sums?version=77").error(404, "not_found");
    assert!(gone.contains("version 77") && gone.contains("newest is 1"), "{gone}");
}

#[test]
fn metrics_are_well_formed_and_count_transfers() {
    let home = home();
    let (_trainer, agent) = publisher(home.path());
    let mut receiver = receiver(&home.path().join("images"), &home.path().join("region"), &["--versions=1"]);
    assert_eq!(receiver.ends_within(PATIENCE), 0);
    // What was acknowledged is added up when the transfer is cleared away, soon after its end.
    let until = Instant::now() + PATIENCE;
    let answer = loop {
        let answer = agent.get("/metrics");
        let text = String::from_utf8_lossy(&answer.body);
        if !text.contains("windlass_sent_bytes_total{model_id=\"demo\"} 0\n") {
            break answer;
        }
        assert!(Instant::now() < until, "{text}");
    };
    assert!(
        answer.head.to_lowercase().contains("content-type: text/plain; version=0.0.4"),
        "{}",
        answer.head
    );
    let text = String::from_utf8(answer.body).unwrap();
    let mut values = std::collections::BTreeMap::new();
    let lines: Vec<&str> = text.lines().collect();
    for three in lines.chunks(3) {
        let [help, kind, sample] = three else { panic!("{text}") };
        let name = sample.split('{').next().unwrap();
        assert!(help.starts_with(&format!("# HELP {name} ")), "{help}");
        let kind = kind.strip_prefix(&format!("# TYPE {name} ")).unwrap();
        assert_eq!(kind, if name.ends_with("_total") { "counter" } else { "gauge" }, "{name}");
        let (labels, value) = sample.rsplit_once(' ').unwrap();
        assert_eq!(labels, format!("{name}{{model_id=\"demo\"}}"));
        assert!(values.insert(name.to_owned(), value.parse::<f64>().unwrap()).is_none(), "{name} twice");
    }
    assert!(values.len() > 10 && text.ends_with('\n'));
    let of = |name: &str| values[&format!("windlass_{name}")] as u64;
    assert_eq!((of("version"), of("sealed_total"), of("receivers")), (0, 1, 1));
    assert_eq!((of("tickets_full_total"), of("completed_total")), (1, 1));
    assert_eq!(of("sent_bytes_total"), of("image_bytes"));
}

#[test]
fn a_long_poll_is_answered_by_the_seal_or_with_what_there_is() {
    let home = home();
    let (mut trainer, agent) = publisher(home.path());
    let begun = Instant::now();
    let old = agent.get("/get_version?newer_than=0&timeout_ms=150").json();
    assert_eq!(old["version"], 0);
    assert!(begun.elapsed() >= Duration::from_millis(150), "it waited");
    let poll = agent.send("GET /get_version?newer_than=0&timeout_ms=20000", &agent.bearer(), b"");
    let begun = Instant::now();
    trainer.publish(1);
    assert_eq!(answer(poll).json()["version"], 1);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    // Something newer is there already; and another life is not one's own.
    assert_eq!(agent.get("/get_version?newer_than=0&timeout_ms=20000").json()["version"], 1);
    assert_eq!(agent.get("/get_version?newer_than=99&incarnation=1&timeout_ms=20000").json()["version"], 1);
    let named = agent.get("/get_version?newer_then=0").error(400, "invalid");
    assert!(named.contains("newer_then"), "{named}");
}

#[test]
fn requests_are_granted_full_or_delta_or_refused_with_a_fallback() {
    let home = home();
    let (mut trainer, agent) = publisher(home.path());
    let first = agent.sealed(0);
    trainer.publish(1);
    agent.sealed(1);
    let id = register(&agent);
    let have = |digest: &Value, version: u64| json!({ "incarnation": first["incarnation"], "version": version, "digest": digest });
    let ask = |mode: &str, have: Option<Value>| {
        let answer =
            agent.post("/request_transfer", &json!({ "instance_id": id, "mode": mode, "have": have }));
        assert_eq!(answer.status, 200);
        answer.json()
    };
    let full = ask("full", None);
    assert_eq!((&full["ok"], &full["mode"], &full["version"]), (&json!(true), &json!("full"), &json!(1)));
    let delta = ask("delta", Some(have(&first["digest"], 0)));
    assert_eq!((&delta["ok"], &delta["mode"], &delta["version"]), (&json!(true), &json!("delta"), &json!(1)));
    assert_eq!(delta["delta_base_version"], 0);
    for name in ["delta_size", "sparsity", "num_nonzero", "compute_time"] {
        assert!(delta[name].is_number(), "{name} in {delta}");
    }
    assert_eq!(ask("auto", Some(have(&first["digest"], 0)))["mode"], "delta");
    assert_eq!(ask("auto", None)["mode"], "full");
    // No base, a base that was never here, and a version that has other bytes: all say what would serve, and why.
    for bad in [None, Some(have(&first["digest"], 55)), Some(have(&json!("0".repeat(32)), 0))] {
        let refused = ask("delta", bad.clone());
        assert_eq!(
            (&refused["ok"], &refused["fallback"]),
            (&json!(false), &json!("full")),
            "{bad:?}: {refused}"
        );
        assert!(!refused["reason"].as_str().unwrap().is_empty());
    }
    // A transfer is over when who got it says so, by its id and version.
    let ticket = &full["ticket"]["id"];
    assert!(ticket.is_string(), "{full}");
    let stranger = json!({ "instance_id": "nobody", "mode": "full" });
    let unknown = agent.post("/request_transfer", &stranger).error(404, "not_found");
    assert!(unknown.contains("nobody") && unknown.contains("register"), "{unknown}");
    let identity = json!({ "model_id": "demo", "incarnation": first["incarnation"], "version": 1 });
    let digest = agent.sealed(1)["digest"].clone();
    let done = |id: &str| {
        let completion = json!({ "ticket": ticket, "identity": identity, "digest": digest });
        agent.post("/transfer_done", &json!({ "instance_id": id, "completion": completion }))
    };
    assert_eq!(done(&id).status, 200);
    assert_eq!(agent.get("/status").json()["instances"][0]["version"], 1);
    done("nobody").error(404, "not_found");
}

#[test]
fn only_the_token_opens_anything_but_healthz() {
    let home = home();
    let (_trainer, agent) = publisher(home.path());
    assert!(agent.endpoint.starts_with("http://127.0.0.1:"), "loopback unless asked: {}", agent.endpoint);
    let file = home.path().join("region/token");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(agent.token.len() >= 32);
    assert_eq!(agent.request("GET /healthz", "", b"").json(), json!({ "ok": true }));
    let wrong = [
        String::new(),
        format!("authorization: Bearer {}x\r\n", agent.token),
        format!("authorization: Bearer {}\r\n", &agent.token[1..]),
        format!("authorization: {}\r\n", agent.token),
        "authorization: Bearer \r\n".into(),
        format!("cookie: token={}\r\n", agent.token),
    ];
    for headers in &wrong {
        for line in [
            "GET /get_version",
            "GET /get_manifest",
            "GET /metrics",
            "GET /status",
            "POST /request_transfer",
            "GET /x",
        ] {
            let refused = agent.request(line, headers, b"");
            refused.error(401, "denied");
            assert!(!String::from_utf8_lossy(&refused.body).contains("demo"), "nothing but the refusal");
            assert!(refused.head.to_lowercase().contains("www-authenticate: bearer"), "{}", refused.head);
        }
    }
    assert_eq!(agent.get("/get_version").status, 200);
}

#[test]
fn bad_requests_are_named_and_kill_nothing() {
    let home = home();
    let (_trainer, mut agent) = publisher(home.path());
    let id = register(&agent);
    agent.get("/nowhere").error(404, "not_found");
    let wrong = agent.request("POST /get_version", &agent.bearer(), b"");
    wrong.error(405, "invalid");
    assert!(wrong.head.to_lowercase().contains("allow: get"), "{}", wrong.head);
    let unknown = agent.post("/request_transfer", &json!({ "instance_id": id, "mode": "auto", "havve": 1 }));
    assert!(unknown.error(422, "invalid").contains("havve"));
    let missing = agent.post("/request_transfer", &json!({ "instance_id": id }));
    assert!(missing.error(422, "invalid").contains("mode"));
    let odd = agent.post("/request_transfer", &json!({ "instance_id": id, "mode": "fulll" }));
    assert!(odd.error(422, "invalid").contains("fulll"));
    let done = agent.post("/transfer_done", &json!({ "instance_id": id, "completion": {} }));
    assert!(done.error(422, "invalid").contains("ticket"));
    let json_headers = format!("{}content-type: application/json\r\n", agent.bearer());
    agent.request("POST /request_transfer", &json_headers, b"{\"mode\": ").error(400, "invalid");
    agent.request("POST /request_transfer", &agent.bearer(), b"{}").error(415, "invalid");
    for path in ["/get_sums?version=x", "/get_sums?vers=1", "/get_part", "/get_version?timeout_ms=-1"] {
        let message = agent.get(path).error(400, "invalid");
        assert!(["version", "vers", "timeout_ms"].iter().any(|f| message.contains(f)), "{path}: {message}");
    }
    let long = vec![b' '; (16 << 20) + 1];
    agent.request("POST /request_transfer", &json_headers, &long).error(413, "invalid");
    for garbage in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"GET\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
        &[0xff; 9000],
    ] {
        let mut stream = agent.connect();
        let _ = stream.write_all(garbage);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut back = Vec::new();
        let _ = stream.read_to_end(&mut back);
        assert!(back.is_empty() || back.starts_with(b"HTTP/1.1 4"), "{}", String::from_utf8_lossy(&back));
    }
    // Nor does a flood of pipelined nonsense on the data port matter.
    let mut data = std::net::TcpStream::connect(("127.0.0.1", agent.data_port)).unwrap();
    let _ = data.write_all(&[0x5a; 4096]);
    drop(data);
    assert_eq!(agent.get("/get_version").json()["version"], 0);
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ends_within(PATIENCE), 0);
}

#[test]
fn an_agent_that_is_told_to_end_answers_who_waits_and_cleans_up() {
    let home = home();
    let (trainer, mut agent) = publisher(home.path());
    for name in ["agent.json", "agent.sock"] {
        assert!(fs::symlink_metadata(trainer.region.join(name)).is_ok(), "{name}");
    }
    let poll = agent.send("GET /get_version?newer_than=0&timeout_ms=60000", &agent.bearer(), b"");
    // It is being waited on when the agent has answered somebody who came later.
    assert_eq!(agent.request("GET /healthz", "", b"").status, 200);
    agent.process.signal(Signal::TERM);
    assert_eq!(agent.process.ends_within(END), 0, "a supervisor takes this for a regular end");
    assert_eq!(answer(poll).json()["version"], 0);
    for name in ["agent.json", "agent.sock"] {
        assert!(fs::symlink_metadata(trainer.region.join(name)).is_err(), "{name} is left");
    }
    let mut child = Agent::start(&trainer.region, &["--with-parent"]);
    child.process.say("what is said is ignored");
    assert_eq!(child.sealed(0)["version"], 0);
    drop(child.process.stdin.take());
    assert_eq!(child.process.ends_within(END), 0, "it ends with its parent");
    assert!(fs::symlink_metadata(trainer.region.join("agent.json")).is_err());
}

#[test]
fn a_restarted_agent_serves_the_versions_and_deltas_of_the_killed_one() {
    let home = home();
    let (mut trainer, mut agent) = publisher(home.path());
    let first = agent.sealed(0);
    trainer.publish(1);
    let second = agent.sealed(1);
    let refused = run!("agent", "--json", "--region", &trainer.region);
    assert_eq!(refused.code, 2);
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains(&format!("pid {}", agent.process.pid())), "{message}");
    assert_eq!(agent.get("/get_version").json(), second, "the first was not disturbed");
    agent.process.kill();
    let next = Agent::start(&trainer.region, &[]);
    assert_eq!(next.get("/get_version").json(), second);
    assert_eq!(next.token, agent.token);
    let have = json!({ "incarnation": first["incarnation"], "version": 0, "digest": first["digest"] });
    let request = json!({ "instance_id": register(&next), "mode": "delta", "have": have });
    let delta = next.post("/request_transfer", &request).json();
    assert_eq!((&delta["ok"], &delta["version"]), (&json!(true), &json!(1)), "{delta}");
}

#[test]
fn an_agent_lets_go_of_a_dead_trainers_region_and_serves_the_next_one() {
    let home = home();
    let (mut trainer, agent) = publisher(home.path());
    let receiver = receiver(&home.path().join("images"), &trainer.region, &[]);
    let first = receiver.event("synced")["image"]["identity"].clone();
    trainer.process.kill();
    assert_eq!(
        agent.get("/get_version").json()["version"],
        0,
        "what is left is served as long as nobody wants the place"
    );

    let mut next = Trainer::start(&trainer.region);
    assert_eq!(agent.process.event("let_go")["region"], json!(next.region));
    let listening = agent.process.event("listening");
    assert_eq!(listening["endpoint"], agent.endpoint, "receivers know the port");
    assert!(listening["incarnation"] != first["incarnation"], "{listening}");
    next.publish(0);
    assert_eq!(agent.sealed(0)["incarnation"], listening["incarnation"]);
    let then = receiver.event("synced")["image"]["identity"].clone();
    assert_eq!((&then["incarnation"], &then["version"]), (&listening["incarnation"], &json!(0)));
    agent.process.signal(Signal::TERM);
    let mut process = agent.process;
    assert_eq!(process.ends_within(PATIENCE), 0);
}

#[test]
fn an_agent_says_why_it_cannot_serve() {
    let home = home();
    let trainer = Trainer::start(&home.path().join("region"));
    let said = |ran: command::Ran, code: i32| {
        assert_eq!(ran.code, code, "{} {}", ran.stdout, ran.stderr);
        ran.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    let absent = home.path().join("absent");
    let message = said(run!("agent", "--json", "--wait", "0", "--region", &absent), 3);
    assert!(message.contains(absent.to_str().unwrap()), "{message}");
    let every = said(run!("agent", "--json", "--region", &trainer.region, "--bind", "0.0.0.0"), 2);
    assert!(every.contains("--advertise-host") && every.contains("0.0.0.0"), "{every}");
    let token = home.path().join("token");
    fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o644)).unwrap();
    let open = said(run!("agent", "--json", "--region", &trainer.region, "--token-file", &token), 10);
    assert!(open.contains("chmod 600"), "{open}");
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = held.local_addr().unwrap().port();
    let taken = said(run!("agent", "--json", "--region", &trainer.region, "--ports", &port.to_string()), 8);
    assert!(taken.contains(&format!("127.0.0.1, ports {port} to {port}")), "{taken}");
    let taken =
        said(run!("agent", "--json", "--region", &trainer.region, "--data-ports", &port.to_string()), 8);
    assert!(taken.contains(&format!("ports {port} to {port}")), "{taken}");
    assert!(fs::symlink_metadata(trainer.region.join("agent.json")).is_err(), "none of them was ever there");
    // A range is used from its first free port on, for both.
    let range = format!("--ports={port}-{}", port + 40);
    let agent = Agent::start(&trainer.region, &[&range, "--advertise-host=localhost"]);
    assert!(agent.endpoint.starts_with("http://localhost:"), "{}", agent.endpoint);
    for got in [agent.port(), agent.data_port] {
        assert!((port + 1..=port + 40).contains(&got), "{got} of {range}");
    }
    assert_ne!(agent.port(), agent.data_port);
}

#[test]
fn a_receiver_of_the_wrong_place_is_told_what_is_there() {
    let home = home();
    let (_trainer, agent) = publisher(home.path());
    let token = home.path().join("region").join("token");
    let dir = format!("--dir={}", home.path().join("images").display());
    let controller =
        Process::start(["controller", "--set=main=demo", "--token-file", token.to_str().unwrap()]);
    let controller = controller.event("listening")["endpoint"].as_str().unwrap().to_owned();
    let foreign = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let other = format!("http://{}", foreign.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in foreign.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\n<html>");
        }
    });
    for (from, says) in [
        (format!("http://127.0.0.1:{}", agent.data_port), "this is the data port of an agent"),
        (
            controller,
            "this is not an agent (there is no GET /get_version): a controller is given with --controller",
        ),
        (other, "what listens there is not a Windlass service (status 404)"),
    ] {
        let told = run!("receive", "--from", &from, "--token-file", &token, &dir, "--json");
        let error = &told.json()["error"];
        assert_eq!((told.code, error["kind"].as_str()), (9, Some("unsupported")), "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{says} in {error}");
    }
    // A directory is made beside others, and not a whole path that may be misspelt.
    for dir in ["/windlass-images", "/dev/shm/windlass-absent/images"] {
        let told =
            run!("receive", "--from", "http://127.0.0.1:1", "--token-file", &token, "--dir", dir, "--json");
        let error = &told.json()["error"];
        assert!(told.code == 2 && error["message"].as_str().unwrap().contains("mkdir -p -m 700"), "{error}");
        assert!(!Path::new(dir).exists());
    }
    // A region that is not there yet is waited for; what is there instead is named.
    for (region, says) in [
        (home.path().join("regoin"), format!("regions here: {}", home.path().join("region").display())),
        (home.path().to_owned(), format!("those in it: {}", home.path().join("region").display())),
    ] {
        let waits = receiver(&home.path().join("images"), &region, &[]);
        let waiting = waits.event("waiting");
        assert!(waiting["error"].as_str().unwrap().contains(&says), "{says} in {waiting}");
    }
}

#[test]
fn a_receiver_waits_for_its_agent_and_follows_it_to_another_port() {
    let home = home();
    let mut trainer = Trainer::start(&home.path().join("region"));
    let images = home.path().join("images");
    let mut receiver = receiver(&images, &trainer.region, &[]);
    let waiting = receiver.event("waiting");
    assert_eq!((&waiting["kind"], &waiting["failures"]), (&json!("peer_lost"), &json!(1)), "{waiting}");
    let again = receiver.event("waiting");
    let rest = |event: &Value| event["retry_ms"].as_u64().unwrap();
    assert!(rest(&waiting) <= 100 && rest(&again) > rest(&waiting), "{waiting} {again}");
    let mut agent = Agent::start(&trainer.region, &[]);
    trainer.publish(0);
    let first = receiver.event("synced");
    assert_eq!(first["mode"], "full", "{first}");
    assert_eq!(first["image"]["digest"], agent.sealed(0)["digest"]);
    agent.process.kill();
    assert_eq!(receiver.line()["event"], "waiting");
    let taken = std::net::TcpListener::bind(("127.0.0.1", agent.port()));
    let next = Agent::start(&trainer.region, &[]);
    assert!(taken.is_err() || next.port() != agent.port());
    trainer.publish(1);
    let second = receiver.event("synced");
    assert_eq!(second["mode"], "delta", "{second}");
    assert_eq!(second["image"]["digest"], next.sealed(1)["digest"]);
    // It waits in a long-poll now, at an agent that answers nothing any more.
    next.process.signal(Signal::STOP);
    receiver.signal(Signal::TERM);
    assert_eq!(receiver.ends_within(END), 0, "the regular end of a receiver that runs for ever");
    next.process.signal(Signal::CONT);
    let image = images.join("demo/a.safetensors");
    let digest = run!("verify", "--json", &image).ok().json();
    assert!(digest.to_string().contains(second["image"]["digest"].as_str().unwrap()), "{digest}");
}

#[test]
fn a_receiver_goes_on_with_a_delta_after_it_was_restarted() {
    let home = home();
    let (mut trainer, agent) = publisher(home.path());
    let token = trainer.region.join("token");
    let images = home.path().join("images");
    let args = |more: &str| {
        let token = format!("--token-file={}", token.display());
        let from = format!("--from={}", agent.endpoint);
        Process::start(["receive".into(), from, token, format!("--dir={}", images.display()), more.into()])
    };
    let mut first = args("--until=0");
    let lines = first.rest();
    assert_eq!(first.ends_within(PATIENCE), 0);
    assert_eq!((lines.len(), &lines[0]["mode"]), (1, &json!("full")), "{lines:?}");
    trainer.publish(1);
    agent.sealed(1);
    trainer.publish(2);
    agent.sealed(2);
    let mut second = args("--versions=1");
    let lines = second.rest();
    assert_eq!(second.ends_within(PATIENCE), 0);
    assert_eq!(lines[0]["event"], "found", "{lines:?}");
    assert_eq!(lines[0]["image"]["identity"]["version"], 0);
    assert_eq!((&lines[1]["event"], &lines[1]["mode"]), (&json!("synced"), &json!("delta")), "{lines:?}");
    assert_eq!(lines[1]["image"]["digest"], agent.sealed(2)["digest"]);
    // Interrupted before it got what it was to get.
    let mut third = args("--versions=1");
    third.event("found");
    third.signal(Signal::INT);
    assert_eq!(third.ends_within(END), 130);
}

#[test]
fn a_receiver_follows_a_new_life_whose_clock_has_gone_back() {
    let home = home();
    let dir = home.path().join("region");
    // A region that was made when the clock was ahead: the trainer's is beyond it.
    let ahead = std::time::SystemTime::now() + Duration::from_hours(1);
    let ahead = ahead.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    region_of(&dir, ahead);
    let (mut trainer, mut agent) = publisher(home.path());
    let port = format!("--ports={0}-{0}", agent.port());
    let token = home.path().join("token");
    fs::write(&token, &agent.token).unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let from = format!("--from={}", agent.endpoint);
    let (images, token) = (home.path().join("images"), format!("--token-file={}", token.display()));
    let receiver = Process::start(["receive", &from, &token, &format!("--dir={}", images.display())]);
    let first = receiver.event("synced")["image"].clone();
    let incarnation = |i: &Value| i["identity"]["incarnation"].as_u64().unwrap();
    assert!(incarnation(&first) > ahead, "{first}");
    // What is known of the old life is older than the new one by more than clocks may differ.
    let synced = Instant::now();
    agent.process.kill();
    trainer.process.kill();
    drop(trainer);
    fs::remove_dir_all(&dir).unwrap();
    while synced.elapsed() < Duration::from_millis(50) {
        std::thread::yield_now();
    }
    let mut trainer = Trainer::start(&dir);
    let agent = Agent::start(&dir, &[&port, &token]);
    trainer.publish(0);
    let served = agent.sealed(0);
    assert!(served["incarnation"].as_u64().unwrap() < ahead);
    let then = receiver.event("synced")["image"].clone();
    assert_eq!(incarnation(&then), served["incarnation"].as_u64().unwrap(), "{then}");
    assert_eq!(then["digest"], served["digest"]);
    trainer.publish(1);
    assert_eq!(receiver.event("synced")["image"]["digest"], agent.sealed(1)["digest"]);
}

/// Leaves a small region of a dead publisher.
fn region_of(dir: &Path, incarnation: u64) {
    use windlass_core::dtype::Dtype;
    use windlass_core::manifest::{Manifest, TensorSpec};
    use windlass_data::region::{Memfd, Region, RegionSpec};
    let manifest = Manifest::new([TensorSpec::new("w", Dtype::U8, [8])], std::collections::BTreeMap::new());
    let spec = RegionSpec {
        memfd: Memfd::Never,
        incarnation: Some(windlass_core::identity::Incarnation(incarnation)),
        ..RegionSpec::new(
            dir.to_owned(),
            windlass_core::identity::ModelId::new("demo").unwrap(),
            std::sync::Arc::new(manifest.unwrap()),
        )
    };
    drop(Region::create(&spec).unwrap());
}

#[test]
fn a_wrong_token_is_said_at_once() {
    let home = home();
    let (_trainer, agent) = publisher(home.path());
    let token = home.path().join("token");
    fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let images = home.path().join("images");
    let ran = run!("receive", "--json", "--from", &agent.endpoint, "--token-file", &token, "--dir", &images);
    assert_eq!(ran.code, 10);
    let error = ran.json()["error"].clone();
    assert_eq!(error["kind"], "denied");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("token") && message.contains(&agent.endpoint), "{message}");
    // Which one was sent, and where the right one is.
    assert!(message.contains(&format!("that of the file {}", token.display())), "{message}");
    assert!(message.contains("`token` in the directory of its region"), "{message}");
    assert_eq!(ran.stdout.lines().count(), 1, "no waiting: {}", ran.stdout);
    assert!(!images.exists(), "nothing was made");
    let none = command::windlass()
        .args(["receive", "--json", "--from", &agent.endpoint])
        .env_remove("WINDLASS_TOKEN")
        .output()
        .unwrap();
    assert_eq!(none.status.code(), Some(2));
    let told = String::from_utf8(none.stdout).unwrap();
    assert!(told.contains("--token-file") && told.contains("WINDLASS_TOKEN"), "{told}");
    let by_variable = command::windlass()
        .args(["receive", "--json", "--from", &agent.endpoint])
        .env("WINDLASS_TOKEN", "wrong")
        .output()
        .unwrap();
    let told = String::from_utf8(by_variable.stdout).unwrap();
    assert!(told.contains("that of WINDLASS_TOKEN;"), "{told}");
    // A folder that is not there, at either side.
    let nowhere = home.path().join("absent/token");
    let images = home.path().join("images");
    let ran =
        run!("receive", "--json", "--from", &agent.endpoint, "--token-file", &nowhere, "--dir", &images);
    let served = run!("controller", "--json", "--token-file", &nowhere);
    for ran in [ran, served] {
        let error = ran.json()["error"].clone();
        assert_eq!((ran.code, &error["kind"]), (3, &json!("not_found")), "{error}");
        assert!(error["message"].as_str().unwrap().contains("does not exist"), "{error}");
        let advice = error["advice"].as_str().unwrap();
        assert!(advice.contains("mkdir -p") && advice.contains("absent`"), "{advice}");
    }
}

#[test]
fn of_two_receivers_with_one_image_the_later_says_who_has_it_and_what_to_do() {
    let home = home();
    let (trainer, _agent) = publisher(home.path());
    let images = home.path().join("images");
    let first = receiver(&images, &trainer.region, &[]);
    first.event("synced");
    let second = run!("receive", "--json", "--region", &trainer.region, "--dir", &images);
    let error = second.json()["error"].clone();
    assert_eq!((second.code, &error["kind"]), (10, &json!("denied")), "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(&format!("pid {}", first.pid())), "{message}");
    assert!(message.contains(&images.join("demo").display().to_string()), "{message}");
    let advice = error["advice"].as_str().unwrap();
    assert!(advice.contains(&format!("kill {}", first.pid())) && advice.contains("--dir"), "{advice}");
}

#[test]
fn several_models_are_followed_and_one_that_fails_does_not_end_the_others() {
    let home = home();
    let (mut first, agent) = publisher(home.path());
    let mut second = Trainer::named(&home.path().join("second"), "critic");
    let other = Agent::start(&second.region, &[]);
    second.publish(0);
    let images = home.path().join("images");
    let dir = format!("--dir={}", images.display());
    let mut both = Process::start(
        ["receive".into(), dir.clone(), "--versions=1".into()]
            .into_iter()
            .chain([&first.region, &second.region].map(|r| format!("--region={}", r.display()))),
    );
    let mut models: Vec<Value> =
        both.rest().iter().map(|l| l["image"]["identity"]["model_id"].clone()).collect();
    models.sort_by_key(ToString::to_string);
    assert_eq!(models, [json!("critic"), json!("demo")]);
    assert_eq!(both.ends_within(PATIENCE), 0);
    assert_eq!(command::names(&images), ["critic", "demo"]);
    // The token of the first does not open the second.
    let mut one = Process::start([
        "receive".into(),
        dir,
        format!("--from={}", agent.endpoint),
        format!("--from={}", other.endpoint),
        format!("--token-file={}", first.region.join("token").display()),
    ]);
    let failed = one.event("failed");
    assert_eq!(failed["kind"], "denied");
    assert!(failed["error"].as_str().unwrap().contains(&other.endpoint), "{failed}");
    first.publish(1);
    assert_eq!(one.event("synced")["image"]["identity"]["version"], 1);
    one.signal(Signal::TERM);
    assert_eq!(one.ends_within(END), 10, "what failed is not forgotten");
}

#[test]
fn a_region_on_this_host_is_followed_in_place_into_its_next_life() {
    let home = home();
    let (mut trainer, mut agent) = publisher(home.path());
    let images = home.path().join("images");
    let region = trainer.region.clone();
    let mut receiver = Process::start([
        "receive".into(),
        format!("--in-place={}", region.display()),
        format!("--dir={}", images.display()),
        "--versions=3".into(),
    ]);
    let first = receiver.line();
    assert_eq!((&first["mode"], &first["wire_bytes"]), (&json!("mapped"), &json!(0)), "{first}");
    assert_eq!(first["image"]["digest"], agent.sealed(0)["digest"]);
    trainer.publish(1);
    let second = receiver.line();
    assert_eq!(second["image"]["digest"], agent.sealed(1)["digest"]);
    trainer.process.kill();
    agent.process.kill();
    assert_eq!(receiver.line()["event"], "waiting");
    drop(trainer);
    let (_trainer, agent) = publisher(home.path());
    let third = receiver.event("synced");
    assert_eq!(third["image"]["digest"], agent.sealed(0)["digest"]);
    assert_ne!(third["image"]["identity"]["incarnation"], first["image"]["identity"]["incarnation"]);
    assert_eq!(receiver.ends_within(PATIENCE), 0);
    assert!(!images.exists(), "no copy was made");
}

#[test]
fn gc_removes_what_the_dead_left_and_nothing_that_is_held() {
    let home = home();
    let dir = home.path().join("shm");
    fs::create_dir(&dir).unwrap();
    let empty = run!("gc", "--json", &dir).ok().json();
    assert_eq!((&empty["freed_bytes"], &empty["removed"]), (&json!(0), &json!([])));
    assert!(run!("gc", &dir).ok().stdout.contains("nothing was removed"));
    let absent = run!("gc", "--json", &home.path().join("absent"));
    assert_eq!((absent.code, absent.json()["error"]["kind"].as_str()), (3, Some("not_found")));
    fs::write(home.path().join("file"), "kept").unwrap();
    let file = run!("gc", "--json", &home.path().join("file"));
    assert!(file.code != 0 && file.stdout.contains("file"), "{}", file.stdout);

    let mut dead = Trainer::named(&dir.join("dead"), "dead");
    dead.process.kill();
    let mut orphan = Trainer::named(&dir.join("orphan"), "orphan");
    let agent = Agent::start(&orphan.region, &[]);
    orphan.process.kill();
    let mut alive = Trainer::named(&dir.join("alive"), "policy");
    let its = Agent::start(&alive.region, &[]);
    alive.publish(0);
    its.sealed(0);
    let mut receiver = receiver(&dir, &alive.region, &[]);
    receiver.event("synced");
    fs::create_dir(dir.join("foreign")).unwrap();
    fs::write(dir.join("foreign/header"), "not ours").unwrap();
    let removed = |told: &Value| -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> =
            told["removed"].as_array().unwrap().iter().map(|r| r["dir"].as_str().unwrap().into()).collect();
        all.sort();
        all
    };
    let dry = run!("gc", "--json", "--dry-run", &dir).ok().json();
    assert_eq!((removed(&dry), &dry["dry_run"]), (vec![dir.join("dead")], &json!(true)));
    assert!(run!("gc", "--dry-run", &dir).ok().stdout.contains("1 would be removed"));
    // Nothing goes that nobody has agreed to; what would go is listed.
    for args in [&["gc"][..], &["gc", "--json"]] {
        let all: Vec<&std::ffi::OsStr> =
            args.iter().map(std::ffi::OsStr::new).chain([dir.as_os_str()]).collect();
        let unasked = command::run(&all);
        let said = format!("{}{}", unasked.stdout, unasked.stderr);
        assert!(unasked.code == 2 && said.contains("--yes"), "{said}");
        assert!(args.len() > 1 || said.contains(dir.join("dead").to_str().unwrap()), "{said}");
    }
    assert!(dir.join("dead").exists());
    let told = run!("gc", "--json", "--yes", &dir).ok().json();
    assert_eq!((removed(&told), &told["freed_bytes"]), (vec![dir.join("dead")], &dry["freed_bytes"]));
    assert_eq!(told["removed"][0]["model_id"], "dead");
    assert!(told["freed_bytes"].as_u64().unwrap() > 4 << 20, "{told}");
    assert_eq!(command::names(&dir), ["alive", "foreign", "orphan", "policy"]);
    // All that was alive works on.
    alive.publish(1);
    assert_eq!(receiver.event("synced")["image"]["identity"]["version"], 1);
    assert_eq!(agent.get("/get_version").status, 200);
    receiver.kill();
    drop((agent, orphan, its, alive));
    let told = run!("gc", "--yes", &dir).ok().stdout;
    assert!(told.contains("2 removed") && told.contains("orphan") && told.contains("--images"), "{told}");
    assert_eq!(command::names(&dir), ["foreign", "policy"], "the next receiver goes on with the image");
    let told = run!("gc", "--json", "--yes", &dir).ok().json();
    assert_eq!((removed(&told).len(), &told["kept"][0]["what"]), (0, &json!("image")), "{told}");
    // The image itself, or all images.
    let named = run!("gc", "--json", "--dry-run", &dir.join("policy")).ok().json();
    assert_eq!(removed(&named), [dir.join("policy")]);
    run!("gc", "--yes", "--images", &dir).ok();
    assert_eq!(command::names(&dir), ["foreign"]);
}

#[test]
fn gc_finds_what_is_deep_below_and_refuses_to_search_the_whole_system() {
    let home = home();
    let deep = home.path().join("runs/7/regions");
    fs::create_dir_all(&deep).unwrap();
    let mut dead = Trainer::named(&deep.join("dead"), "dead");
    dead.process.kill();
    let _alive = Trainer::named(&deep.join("alive"), "alive");
    let told = run!("gc", "--json", "--dry-run", home.path()).ok().json();
    assert_eq!(told["removed"][0]["dir"], json!(deep.join("dead")));
    assert_eq!((told["removed"].as_array().unwrap().len(), command::names(&deep).len()), (1, 2));
    run!("gc", "--yes", &deep.join("alive")).ok();
    assert_eq!(command::names(&deep), ["alive", "dead"], "it is in use");
    run!("gc", "--yes", &deep.join("dead")).ok();
    assert_eq!(command::names(&deep), ["alive"], "a region that is named itself");
    for wide in ["/", "/usr", "/dev/../etc", "/proc"] {
        let refused = run!("gc", "--json", "--dry-run", wide);
        let error = &refused.json()["error"];
        assert_eq!((refused.code, error["kind"].as_str()), (2, Some("invalid")), "{wide}");
        assert!(error["message"].as_str().unwrap().contains("holds much more than"), "{error}");
    }
}

/// The command, started by a shell that does something first.
fn after(shell: &str, args: &[&std::ffi::OsStr]) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{shell} && exec \"$@\"")).arg("sh").arg(env!("CARGO_BIN_EXE_windlass"));
    command.args(args).arg("--json").env_remove("WINDLASS_TOKEN");
    command
}

/// Every file and directory below one, with its mode.
fn modes(dir: &Path) -> Vec<(PathBuf, u32)> {
    let about = fs::symlink_metadata(dir).unwrap();
    let mut all = vec![(dir.to_owned(), about.permissions().mode() & 0o7777)];
    if about.is_dir() {
        all.extend(fs::read_dir(dir).unwrap().flat_map(|e| modes(&e.unwrap().path())));
    }
    all
}

#[test]
fn modes_do_not_depend_on_the_umask() {
    for umask in ["umask 000", "umask 077"] {
        let home = home();
        let mut trainer = Trainer::start(&home.path().join("region"));
        // As one that was made for the group.
        for (path, mode) in modes(&trainer.region) {
            let mode = mode | if path.is_dir() { 0o050 } else { 0o040 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let region = format!("--region={}", trainer.region.display());
        let process = Process::spawn(after(umask, &["agent".as_ref(), region.as_ref()]));
        let endpoint = process.event("listening")["endpoint"].as_str().unwrap().to_owned();
        let token = fs::read_to_string(trainer.region.join("token")).unwrap();
        let agent = Agent { process, endpoint, data_port: 0, token };
        for version in 0..2 {
            trainer.publish(version);
            agent.sealed(version.into());
        }
        let images = home.path().join("images");
        let dir = format!("--dir={}", images.display());
        let receiver = after(umask, &["receive".as_ref(), region.as_ref(), dir.as_ref(), "--group".as_ref()]);
        let receiver = Process::spawn(receiver);
        receiver.event("synced");
        let all: Vec<_> = [modes(&trainer.region), modes(&images)].concat();
        let names = |name: &str| all.iter().filter(|(path, _)| path.ends_with(name)).count();
        assert!(names("agent.json") == 1 && names("state.json") == 1 && names("deltas") > 0, "{all:?}");
        for (path, mode) in &all {
            // To read is to take a lease, and to be let in by the socket is to write to it.
            let is_open = ["header", "agent.sock"].iter().any(|name| path.ends_with(name));
            let expected = match path.file_name().unwrap().to_str().unwrap() {
                "token" => 0o600,
                _ if path.is_dir() => 0o750,
                _ if is_open && !path.starts_with(&trainer.region) => 0o660,
                "header" | "agent.sock" => *mode & 0o660,
                _ => 0o640,
            };
            assert_eq!(*mode, expected, "{umask}: {}: {mode:o}", path.display());
        }
    }
}

#[test]
fn a_file_beyond_the_limit_on_sizes_is_a_full_disk_and_not_the_end() {
    let home = home();
    let (_trainer, _agent) = publisher(home.path());
    let region = format!("--region={}", home.path().join("region").display());
    let dir = format!("--dir={}", home.path().join("images").display());
    // In units of 512 bytes.
    let limit = "ulimit -f 1024";
    let mut receiver = Process::spawn(after(limit, &["receive".as_ref(), region.as_ref(), dir.as_ref()]));
    let told = receiver.rest();
    let error = told.iter().find_map(|line| line.get("error").filter(|e| e.is_object()));
    let error = error.unwrap_or_else(|| panic!("{told:?}"));
    assert_eq!((error["kind"].as_str(), receiver.ends_within(PATIENCE)), (Some("exhausted"), 8), "{error}");
    assert!(error["message"].as_str().unwrap().contains("ulimit -f"), "{error}");
    // Found only while it is written.
    let (base, new, out) = (home.path().join("base"), home.path().join("new"), home.path().join("delta"));
    let mut dice = command::Dice(7);
    for path in [&base, &new] {
        let made = command::Made::new("w", windlass_core::Dtype::U8, &[4 << 20], dice.bytes(4 << 20));
        command::save(path, &[made]);
    }
    let args = [
        "delta".as_ref(),
        "make".as_ref(),
        base.as_os_str(),
        new.as_os_str(),
        "-o".as_ref(),
        out.as_os_str(),
    ];
    let done = after(limit, &args).output().unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    assert_eq!(done.status.code(), Some(8), "{said}");
    assert!(said.contains("ulimit -f") && !out.exists(), "{said}");
}

/// A user that this process is not, and to which root can give things.
const OTHER: u32 = 65_534;

#[test]
fn tokens_and_images_that_others_can_read_or_own_are_refused() {
    let home = home();
    let (_trainer, agent) = publisher(home.path());
    let (images, token) = (home.path().join("images"), home.path().join("secret"));
    fs::write(&token, &agent.token).unwrap();
    let receive = |more: &[&str]| -> (i32, Value) {
        let from = [format!("--from={}", agent.endpoint), format!("--token-file={}", token.display())];
        let args = ["receive".to_owned(), format!("--dir={}", images.display()), "--until=0".into()];
        let more = more.iter().map(ToString::to_string);
        let mut process = Process::start(args.into_iter().chain(from).chain(more));
        let last = process.rest().pop().unwrap();
        (process.ends_within(PATIENCE), last)
    };
    let mode = |mode| fs::set_permissions(&token, fs::Permissions::from_mode(mode)).unwrap();
    let refused = |(code, told): (i32, Value), what: &str| {
        let message = told["error"]["message"].as_str().unwrap_or_else(|| panic!("{told}"));
        assert!(code == 10 && message.contains(what), "{code} {told}");
    };
    for open in [0o644, 0o640, 0o606] {
        mode(open);
        refused(receive(&[]), "chmod 600");
    }
    mode(0o640);
    assert_eq!(receive(&["--group"]).0, 0, "the group is asked for");
    mode(0o600);
    if std::os::unix::fs::chown(&token, Some(OTHER), Some(OTHER)).is_err() {
        eprintln!("SKIPPED what belongs to another user: this test must run as root to give files away");
        return;
    }
    refused(receive(&[]), "belongs to the user with id 65534");
    std::os::unix::fs::chown(&token, Some(0), Some(0)).unwrap();
    assert_eq!(receive(&[]).0, 0);
    fs::remove_dir_all(&images).unwrap();
    // Somebody was first: with the image, and with the directory of all images.
    for first in [images.join("demo"), images.clone()] {
        fs::create_dir_all(&first).unwrap();
        std::os::unix::fs::chown(&first, Some(OTHER), Some(OTHER)).unwrap();
        refused(receive(&[]), "belongs to the user with id 65534");
        assert!(!first.join("header").exists());
    }
    // Root reads no token and follows no agent that another user's region names.
    let region = home.path().join("region");
    std::os::unix::fs::chown(&region, Some(OTHER), Some(OTHER)).unwrap();
    let other = home.path().join("other");
    let mut process = receiver(&other, &region, &["--until=0"]);
    let last = process.rest().pop().unwrap();
    refused((process.ends_within(PATIENCE), last), "belongs to the user with id 65534");
}
