//! The agent: what it answers, whom it lets in, how it lives and ends.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::{END, home, publisher, receiver, register};
use crate::command;
use crate::process::{Agent, PATIENCE, Trainer, answer};

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
