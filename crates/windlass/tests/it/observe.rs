//! What people and machines see of a controller: `windlass top`, and documents about metrics that name what is there.

use crate::command;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::process::{Agent, PATIENCE, Process, Trainer};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A controller with one set, and how to talk to it. Requests are the same as to an agent.
fn controller(home: &Path) -> (Agent, PathBuf) {
    let token_file = home.join("token");
    let token_arg = format!("--token-file={}", token_file.display());
    let process = Process::start(["controller", "--set=policy=actor,verifier", &token_arg, "--with-parent"]);
    let listening = process.event("listening");
    let endpoint = listening["endpoint"].as_str().unwrap().to_owned();
    let token = std::fs::read_to_string(&token_file).unwrap();
    (Agent { process, endpoint, data_port: 0, token }, token_file)
}

fn notify(controller: &Agent, model: &str, version: u64) {
    let body = json!({
        "model_id": model, "incarnation": 1, "version": version, "sender_endpoint": "http://10.0.0.5:7000",
        "delta_ratio": 0.0123,
    });
    assert_eq!(controller.post("/notify_version", &body).status, 200);
}

fn join(controller: &Agent, name: &str) {
    let body =
        json!({ "peer": { "receiver": name, "session": 1 }, "models": ["actor", "verifier"], "host": "h" });
    assert_eq!(controller.post("/register_receiver", &body).status, 200);
}

/// The names that a page of metrics says there are.
fn metrics(service: &Agent) -> BTreeSet<String> {
    let text = String::from_utf8(service.get("/metrics").body).unwrap();
    let types = text.lines().filter_map(|l| l.strip_prefix("# TYPE "));
    types.map(|l| l.split(' ').next().unwrap().to_owned()).collect()
}

/// All words of a text that look like the name of a metric.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|w| w.starts_with("windlass_")).map(str::to_owned).collect()
}

#[test]
fn the_dashboard_and_the_glossary_name_the_metrics_that_there_are() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (controller, _) = controller(home.path());
    let mut trainer = Trainer::start(&home.path().join("region"));
    let agent = Agent::start(&trainer.region, &[]);
    trainer.publish(0);
    agent.sealed(0);
    let there: BTreeSet<String> = metrics(&controller).union(&metrics(&agent)).cloned().collect();
    assert!(there.len() > 30, "{there:?}");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");

    let glossary = names(&std::fs::read_to_string(docs.join("metrics.md")).unwrap());
    let missing: Vec<_> = there.difference(&glossary).collect();
    let invented: Vec<_> = glossary.difference(&there).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "not in the glossary: {missing:?}; only there: {invented:?}"
    );

    let text = std::fs::read_to_string(docs.join("grafana.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            queries.push(target["expr"].as_str().unwrap().to_owned());
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        queries.extend(variable["definition"].as_str().map(str::to_owned));
    }
    assert!(queries.len() > 25);
    for query in &queries {
        let used = names(query);
        assert!(!used.is_empty(), "{query}");
        for name in used {
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let histogram = base.is_some_and(|b| b.ends_with("_seconds") && there.contains(b));
            assert!(there.contains(&name) || histogram, "{name} in {query}");
        }
    }
}

#[test]
fn top_prints_the_document_of_the_controller_once_or_as_json() {
    let home = tempfile::tempdir().unwrap();
    let (controller, token) = controller(home.path());
    join(&controller, "gpu-0");
    notify(&controller, "actor", 7);
    let url = &controller.endpoint;
    let top = run!("top", "--controller", url, "--token-file", &token, "--once").ok().stdout;
    for part in [
        url.as_str(),
        "policy  strict  serving nothing yet  0 of 1 live",
        "v7",
        "1.23 %",
        "10.0.0.5:7000",
        "gpu-0",
    ] {
        assert!(top.contains(part), "{part} in {top}");
    }
    assert!(!top.contains('\x1b'), "plain where there is no terminal: {top:?}");
    let told = run!("top", "--controller", url, "--token-file", &token, "--json").ok().json();
    let status = controller.get("/status").json();
    for part in ["release", "started", "sets", "trainers", "errors"] {
        assert_eq!(told[part], status[part], "{part}");
    }
    let trace = home.path().join("trace.json");
    let wrote = run!("top", "--controller", url, "--token-file", &token, "--trace", &trace).ok().stdout;
    assert!(wrote.contains("trace.json") && wrote.contains("perfetto"), "{wrote}");
    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    assert!(events.iter().any(|e| e["args"]["name"] == "set policy"), "{trace}");
    // Without the token, without a controller, and without either.
    let wrong = home.path().join("wrong");
    std::fs::write(&wrong, "wrong").unwrap();
    std::fs::set_permissions(&wrong, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let denied = run!("top", "--controller", url, "--token-file", &wrong, "--once", "--json");
    assert_eq!(denied.json()["error"]["kind"], "denied", "{}", denied.stdout);
    let lost = run!("top", "--controller", "http://127.0.0.1:1", "--token-file", &token, "--once", "--json");
    assert_eq!(lost.json()["error"]["kind"], "peer_lost", "{}", lost.stdout);
    assert!(
        lost.json()["error"]["advice"].as_str().unwrap().contains("windlass controller"),
        "{}",
        lost.stdout
    );
}

#[test]
fn commands_find_the_controller_and_its_token_in_the_environment() {
    let home = tempfile::tempdir().unwrap();
    let (controller, token) = controller(home.path());
    let told = |command: &mut std::process::Command| {
        let output = command.env("WINDLASS_CONTROLLER", &controller.endpoint).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, top) = told(command::windlass().args(["top", "--once", "--token-file"]).arg(&token));
    assert!(code == Some(0) && top.contains("policy"), "{top}");
    let (code, top) =
        told(command::windlass().args(["top", "--json"]).env("WINDLASS_TOKEN", &controller.token));
    assert!(code == Some(0) && top.contains("\"policy\""), "{top}");
    // Its own variable, and what is said on the command line, win.
    let elsewhere = ["top", "--json", "--controller", "http://127.0.0.1:1", "--token-file"];
    let (code, top) = told(command::windlass().args(elsewhere).arg(&token));
    assert!(code == Some(7) && top.contains("127.0.0.1:1"), "{code:?} {top}");
    let (code, shown) = told(command::windlass().args(["config", "receive", "--json"]));
    assert_eq!(code, Some(0));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["commands"]["receive"]["controller"]["from"], "WINDLASS_CONTROLLER", "{shown}");
    assert_eq!(told(command::windlass().args(["top", "--json"]).env("WINDLASS_CONFIG", "none")).0, Some(2));
}

#[test]
fn a_shell_waits_at_the_gate_until_the_version_is_served() {
    let home = tempfile::tempdir().unwrap();
    let (controller, token) = controller(home.path());
    let body = json!({ "peer": { "receiver": "gpu-0", "session": 1 }, "models": ["actor", "verifier"] });
    assert_eq!(controller.post("/register_receiver", &body).status, 200);
    let gate = |args: &[&str]| {
        let mut windlass = command::windlass();
        windlass.args(["gate", "--json", "--controller", &controller.endpoint]).args(args);
        windlass.arg("--token-file").arg(&token);
        windlass
    };
    // Shut: the exit codes are those of the kinds of errors.
    let ran = |mut windlass: std::process::Command| {
        let output = windlass.output().unwrap();
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code().unwrap(), told["error"].clone())
    };
    let (code, error) = ran(gate(&["7", "--timeout=0.1"]));
    assert_eq!((code, &error["kind"]), (6, &json!("timeout")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("serves nothing yet, not 7"), "{error}");
    let (code, error) = ran(gate(&["7", "--set=other"]));
    assert_eq!((code, &error["kind"]), (3, &json!("not_found")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("there are policy"), "{error}");
    let (code, error) = ran(gate(&["seven"]));
    assert_eq!((code, &error["kind"]), (2, &json!("invalid")), "{error}");

    // It opens when the receiver has loaded the version.
    let mut waiting = Process::spawn(gate(&["7", "--model=actor", "--timeout=60"]));
    let until = std::time::Instant::now() + PATIENCE;
    let who = loop {
        let status = controller.get("/status").json();
        if let Some(wait) = status["waiting"].get(0) {
            assert_eq!(
                (&wait["what"], &wait["set"], &wait["at_least"]),
                (&json!("gate"), &json!("policy"), &json!(7))
            );
            break wait["who"].as_str().unwrap().to_owned();
        }
        assert!(std::time::Instant::now() < until, "nobody waits: {status}");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(who.ends_with(&format!(":{}", waiting.pid())), "{who}");
    notify(&controller, "actor", 7);
    notify(&controller, "verifier", 7);
    let peer = json!({ "receiver": "gpu-0", "session": 1 });
    let mut after = 0;
    for (phase, count) in [("staged", 2), ("loaded", 1)] {
        let mut done = 0;
        while done < count {
            let poll = json!({ "peer": peer, "after": after, "timeout_ms": 5000 });
            for order in controller.post("/poll_orders", &poll).json()["orders"].as_array().unwrap() {
                after = order["seq"].as_u64().unwrap();
                done += obey(&controller, &peer, &order["task"], phase);
            }
        }
    }
    let told = waiting.line();
    assert_eq!((&told["set"], &told["version"]), (&json!("policy"), &json!(7)), "{told}");
    assert_eq!(waiting.ends_within(PATIENCE), 0);
}

/// Answers an order as a receiver that can do everything; how many orders of this phase that was.
fn obey(controller: &Agent, peer: &Value, task: &Value, phase: &str) -> usize {
    let say = |identity: &Value| {
        let body = json!({
            "peer": peer, "order": task["order"], "identity": identity, "outcome": phase,
        });
        let answer = controller.post("/report", &body);
        assert_eq!(answer.status, 200, "{body}: {}", String::from_utf8_lossy(&answer.body));
    };
    match (task["do"].as_str(), phase) {
        (Some("stage"), "staged") => say(&task["identity"]),
        (Some("load"), "loaded") => task["identities"].as_array().unwrap().iter().for_each(say),
        _ => return 0,
    }
    1
}

#[test]
fn the_address_of_the_page_can_be_pasted_and_the_token_is_not_printed() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("it's a token");
    let token_arg = format!("--token-file={}", file.display());
    let mut windlass = command::windlass();
    windlass.args(["controller", &token_arg, "--with-parent"]);
    let process = Process::spawn(windlass);
    let lines: Vec<String> = (0..3).map(|_| process.any_line().as_str().unwrap().to_owned()).collect();
    let token = std::fs::read_to_string(&file).unwrap();
    assert!(lines.iter().all(|l| !l.contains(&token)), "{lines:?}");
    let page = lines[1].strip_prefix("live page: ").unwrap();
    assert!(page.starts_with("http://127.0.0.1:") && page.ends_with('/'), "{page}");
    let command = lines[2].strip_prefix("its address with the token: ").unwrap();
    let printed = std::process::Command::new("sh").args(["-c", command]).output().unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap().trim(), format!("{page}#token={token}"));
}

#[test]
fn top_goes_on_until_it_is_told_to_end_and_waits_for_a_controller_that_is_away() {
    let home = tempfile::tempdir().unwrap();
    let (mut controller, token) = controller(home.path());
    let mut windlass = command::windlass();
    let args = ["top", "--interval=0.05", "--controller", &controller.endpoint, "--token-file"];
    windlass.args(args).arg(&token).stderr(std::process::Stdio::null());
    let mut top = Process::spawn(windlass);
    let shows = |text: &str| {
        for _ in 0..10_000 {
            let line = top.any_line();
            if line.as_str().is_some_and(|l| l.contains(text)) {
                return;
            }
        }
        panic!("never: {text}");
    };
    shows("No receivers");
    join(&controller, "late");
    shows("late");
    controller.process.kill();
    top.signal(Signal::INT);
    assert_eq!(top.ends_within(PATIENCE.min(Duration::from_secs(10))), 0);
}
