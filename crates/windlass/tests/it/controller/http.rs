//! What the controller's routes answer to whom: refusals, floods, events, the page, metrics, the description.

use super::*;
use windlass_core::wire::control::Brought;

#[test]
fn requests_that_are_refused_leave_nothing_behind() {
    let controller = Controller::start(&[PAIR]);
    let mut light = controller.light("a", 1, &MODELS);
    serve_pair(&controller, &mut [&mut light], 1);
    light.poll(&controller.client);
    let before = lasting(controller.status());
    let http = &controller.http;
    let posts = [
        "/notify_version",
        "/register_receiver",
        "/poll_orders",
        "/report",
        "/leave",
        "/trainer_left",
        "/take_eval",
        "/eval_done",
    ];
    let gets = ["/service_version", "/status", "/events", "/metrics"];
    let json = "content-type: application/json\r\n";
    let notify = json!({
        "model_id": "actor", "incarnation": 9, "version": 9, "sender_endpoint": "http://h:1",
    });
    let wrong = format!("authorization: Bearer {}\r\n", "f".repeat(64));
    for headers in ["", &wrong] {
        for path in posts {
            let answer = http.request(
                &format!("POST {path}"),
                &format!("{headers}{json}"),
                notify.to_string().as_bytes(),
            );
            answer.error(401, "denied");
            assert!(answer.head.to_lowercase().contains("www-authenticate: bearer"), "{}", answer.head);
        }
        for path in gets {
            http.request(&format!("GET {path}"), headers, b"").error(401, "denied");
        }
    }
    let bearer = http.bearer();
    for path in posts {
        http.request(&format!("POST {path}"), &format!("{bearer}{json}"), b"{").error(400, "invalid");
        http.request(&format!("POST {path}"), &bearer, b"{}").error(415, "invalid");
        http.post(path, &json!({ "surprise": 1 })).error(422, "invalid");
        http.post(path, &json!([[]])).error(422, "invalid");
        let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
        assert!(matches!(
            http.request(&format!("POST {path}"), &format!("{bearer}{json}"), deep.as_bytes()).status,
            400 | 422
        ));
        let long = vec![b' '; (1 << 20) + 1];
        http.request(&format!("POST {path}"), &format!("{bearer}{json}"), &long).error(413, "invalid");
        http.get(path).error(405, "invalid");
    }
    let with = |field: &str, value: Value| {
        let mut body = notify.clone();
        body[field] = value;
        http.post("/notify_version", &body)
    };
    with("model_id", json!("../actor")).error(422, "invalid");
    with("version", json!(-1)).error(422, "invalid");
    with("version", json!(-1.0)).error(422, "invalid");
    with("version", json!(7.5)).error(422, "invalid");
    with("version", json!("18446744073709551616")).error(422, "invalid");
    with("sender_endpoint", json!("")).error(400, "invalid");
    with("sender_endpoint", json!("http://0.0.0.0:1")).error(400, "invalid");
    with("delta_ratio", json!(-0.5)).error(400, "invalid");
    let span = json!({ "lane": "wire", "what": "x", "began_ms_ago": 1.0, "ended_ms_ago": 2.0 });
    let message = with("spans", json!([span])).error(400, "invalid");
    assert!(message.contains("began 1 ms ago"), "{message}");
    with("spans", json!(vec![span; 17])).error(400, "invalid");
    with("eval", json!("x".repeat(65 << 10))).error(400, "invalid");
    with("model_id", json!("ghost")).error(404, "not_found");
    for query in [
        "at_least=-1",
        "at_least=x",
        "set=",
        "set=a/b",
        "surprise=1",
        "incarnation=1",
        "at_least=1&at_least=2",
    ] {
        http.get(&format!("/service_version?{query}")).error(400, "invalid");
    }
    http.get("/service_version?set=ghost").error(404, "not_found");
    http.get("/nothing").error(404, "not_found");
    assert_eq!(lasting(controller.status()), before);
}

#[test]
fn a_flood_of_refused_and_repeated_requests_does_not_grow_the_controller() {
    let controller = Controller::start(&["--set=solo=m"]);
    let light = controller.light("a", 1, &["m"]);
    controller.notify(id("m", 5, 1));
    let flood = |rounds: u64| {
        for n in 0..rounds {
            let _ = controller.try_notify(id("m", 1, n)).unwrap_err();
            controller.notify(id("m", 5, 1));
            light.clone().join(&controller.client).unwrap();
            let stranger = Light::new(&format!("x{n}"), 1, &["m"]);
            let _ = stranger.say(&controller.client, Order(n), &id("m", 5, n), Outcome::Staged).unwrap_err();
            let doing = vec![Doing {
                model_id: model(&format!("m{n}")),
                stage: "x".repeat(1000),
                version: None,
                bytes: 0,
                of_bytes: 0,
                rate: 1.0,
                brought: vec![Brought { by: Some("x".repeat(300)), bytes: 1, rate: 1.0 }; 100],
                engines: vec![EngineDoing {
                    engine: "e".repeat(1000),
                    condition: "c".into(),
                    version: None,
                    error: None,
                    unplanned: 0,
                    slow: None,
                }],
            }];
            let poll = Poll { peer: light.peer.clone(), after: 0, timeout_ms: 0, doing };
            controller.client.poll(&poll, &stop()).unwrap();
        }
    };
    flood(50);
    let (before, memory) = (lasting(controller.status()), controller.memory());
    flood(400);
    let mut after = lasting(controller.status());
    assert!(after.errors.len() <= 50);
    let grown = controller.memory().saturating_sub(memory);
    assert!(grown < 4 << 20, "grew by {grown} bytes");
    // The errors of the dead trainer are what people should see; nothing else is new.
    after.errors.clone_from(&before.errors);
    after.trainers[0].last_heard = before.trainers[0].last_heard;
    assert_eq!(after, before);
}

#[test]
fn a_body_that_trickles_in_is_given_up() {
    let controller = Controller::start(&["--set=solo=m"]);
    let http = &controller.http;
    let mut slow = http.connect();
    let head =
        format!("POST /leave HTTP/1.1\r\nhost: c\r\n{}content-type: application/json\r\n", http.bearer());
    slow.write_all(format!("{head}content-length: 100000\r\n\r\n{{").as_bytes()).unwrap();
    let begun = Instant::now();
    let mut first = [0; 12];
    slow.set_read_timeout(Some(PATIENCE)).unwrap();
    slow.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"HTTP/1.1 408");
    assert!(begun.elapsed() < PATIENCE);
}

// ---- those who look -------------------------------------------------------------------------------

/// Reads a stream of events until one satisfies `wanted`.
pub(crate) fn next_event(stream: &mut impl std::io::Read, wanted: impl Fn(&Status) -> bool) -> Status {
    let (mut text, mut buffer) = (String::new(), [0; 4096]);
    let end = Instant::now() + PATIENCE;
    loop {
        let n = stream.read(&mut buffer).unwrap();
        assert!(n > 0 && Instant::now() < end, "the stream ended: {text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..n]));
        for line in text.lines().filter_map(|l| l.strip_prefix("data: ")) {
            if let Ok(status) = serde_json::from_str::<Status>(line)
                && wanted(&status)
            {
                return status;
            }
        }
    }
}

#[test]
fn events_send_the_status_when_it_changes_to_a_bounded_number_of_listeners() {
    let controller = Controller::start(&["--set=solo=m"]);
    let http = &controller.http;
    let bearer = http.bearer();
    let mut listeners: Vec<_> = (0..32).map(|_| http.send("GET /events", &bearer, b"")).collect();
    for listener in &mut listeners {
        let first = next_event(listener, |_| true);
        assert_eq!(first.sets[0].served, None);
    }
    let message = http.get("/events").error(507, "exhausted");
    assert!(message.contains("32"), "{message}");
    let mut light = controller.light("a", 1, &["m"]);
    controller.notify(id("m", 1, 1));
    light.obey(&controller.client);
    light.obey(&controller.client);
    for listener in &mut listeners {
        let served = |s: &Status| s.sets[0].served.as_ref().is_some_and(|v| v.version == 1);
        let shown = next_event(listener, served);
        assert_eq!(shown.receivers.len(), 1);
    }
    listeners.clear();
    until("room", || {
        let mut stream = http.send("GET /events", &bearer, b"");
        let mut first = [0; 12];
        stream.read_exact(&mut first).unwrap();
        (&first == b"HTTP/1.1 200").then_some(())
    });
}

#[test]
fn the_page_runs_only_its_own_scripts_and_needs_no_token() {
    let controller = Controller::start(&["--set=solo=m"]);
    let page = controller.http.request("GET /", "", b"");
    assert_eq!(page.status, 200);
    let text = String::from_utf8(page.body).unwrap();
    let header = |name: &str| {
        let lines = page
            .head
            .lines()
            .find_map(|l| l.to_lowercase().starts_with(&format!("{name}: ")).then(|| l.to_owned()));
        lines.unwrap_or_else(|| panic!("{name} in {}", page.head))
    };
    let policy = header("content-security-policy");
    let nonce = policy.split("script-src 'nonce-").nth(1).unwrap().split('\'').next().unwrap();
    assert!(text.contains(&format!("<script nonce=\"{nonce}\">")) && !text.contains("<script>"));
    for rule in ["default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"] {
        assert!(policy.contains(rule), "{rule} in {policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    assert!(header("content-type").contains("text/html"));
    assert!(header("x-content-type-options").contains("nosniff"));
    let again = controller.http.request("GET /", "", b"");
    assert!(!again.head.contains(nonce), "no two answers share a nonce");
}

#[test]
fn the_metrics_of_the_controller_are_well_formed_and_count() {
    let controller = Controller::start(&[PAIR]);
    let mut light = controller.light("a", 1, &MODELS);
    serve_pair(&controller, &mut [&mut light], 4);
    controller.gate("main", 4, 1000).unwrap();
    let answer = controller.http.get("/metrics");
    let text = String::from_utf8(answer.body).unwrap();
    let mut typed = BTreeSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            assert!(typed.insert(rest.split(' ').next().unwrap().to_owned()), "twice: {line}");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let name = name.split('{').next().unwrap();
            let family =
                ["_bucket", "_sum", "_count"].iter().find_map(|s| name.strip_suffix(s)).unwrap_or(name);
            assert!(typed.contains(family) || typed.contains(name), "no TYPE for {line}");
            assert!(name.starts_with("windlass_controller_") && value.parse::<f64>().is_ok(), "{line}");
        }
    }
    for line in [
        "windlass_controller_service_version{set=\"main\"} 4",
        "windlass_controller_announced_version{model_id=\"actor\"} 4",
        "windlass_controller_set_receivers_live{set=\"main\"} 1",
        "windlass_controller_notifies_total 2",
        "windlass_controller_orders_total{task=\"stage\"} 2",
        "windlass_controller_reports_total{phase=\"loading\",outcome=\"done\"} 2",
        "windlass_controller_sync_seconds_count{set=\"main\"} 1",
        "windlass_controller_gate_wait_seconds_bucket{le=\"+Inf\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} in {text}");
    }
}

/// Holds a value against a schema: no field that is not described, none missing that must be there.
pub(crate) fn conforms(schema: &Value, value: &Value, at: &str) {
    let description: Value = serde_json::from_str(DESCRIPTION).unwrap();
    if let Some(name) = schema["$ref"].as_str().and_then(|r| r.strip_prefix("#/components/schemas/")) {
        return conforms(&description["components"]["schemas"][name], value, &format!("{at}:{name}"));
    }
    if value.is_null() {
        return;
    }
    let first = |of: &Value| of.as_array().and_then(|a| a.first().cloned());
    if let Some(one) = first(&schema["anyOf"]) {
        return conforms(&one, value, at);
    }
    if let Some(items) = value.as_array() {
        items.iter().for_each(|item| conforms(&schema["items"], item, at));
    }
    let Some(properties) = schema["properties"].as_object() else { return };
    let fields = value.as_object().unwrap_or_else(|| panic!("{at}: {value}"));
    for (name, field) in fields {
        conforms(
            properties.get(name).unwrap_or_else(|| panic!("{at}.{name} is not described")),
            field,
            &format!("{at}.{name}"),
        );
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        assert!(fields.contains_key(name.as_str().unwrap()), "{at} has no {name}: {value}");
    }
}

#[test]
fn the_description_names_every_route_and_field() {
    let controller = Controller::start(&[PAIR]);
    let http = &controller.http;
    let served = http.request("GET /openapi.json", "", b"");
    assert_eq!((served.status, served.json()), (200, serde_json::from_str(DESCRIPTION).unwrap()));
    let description = served.json();
    let paths = description["paths"].as_object().unwrap();
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            let line = format!("{} {path}", method.to_uppercase());
            let open = operation["security"].as_array().is_some_and(Vec::is_empty);
            let answer = http.request(&line, "content-type: application/json\r\n", b"{}");
            assert_eq!(answer.status, if open { 200 } else { 401 }, "{line}");
            let mut other = http.request(&format!("PUT {path}"), &http.bearer(), b"");
            assert_eq!(other.status, 405, "{path}");
            other.head.make_ascii_lowercase();
            assert!(other.head.contains("allow: "), "{}", other.head);
            // An unknown field makes the type tell all it knows.
            let Some(body) =
                operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str()
            else {
                continue;
            };
            let schema = &description["components"]["schemas"][body.rsplit('/').next().unwrap()];
            let told = http.post(path, &json!({ "surprise": 1 })).error(422, "invalid");
            let told: BTreeSet<_> = told.split('`').skip(3).step_by(2).collect();
            let described: BTreeSet<_> =
                schema["properties"].as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(told, described, "{path}");
        }
    }
    let source = include_str!("../../../src/service/controller/routes.rs");
    let routes: BTreeSet<_> =
        source.split(".route(\"").skip(1).map(|r| r.split('"').next().unwrap()).collect();
    let described: BTreeSet<_> = paths.keys().map(String::as_str).filter(|p| *p != "/healthz").collect();
    assert_eq!(routes, described);

    let mut light = controller.light("a", 1, &MODELS);
    let doing = Doing {
        model_id: model("actor"),
        stage: "pulling".into(),
        version: Some(1),
        bytes: 1,
        of_bytes: 2,
        rate: 3.0,
        brought: vec![Brought { by: Some("b".into()), bytes: 1, rate: 2.0 }],
        engines: vec![EngineDoing {
            engine: "e".into(),
            condition: "away".into(),
            version: None,
            error: Some("x".into()),
            unplanned: 2,
            slow: Some("y".into()),
        }],
    };
    controller
        .client
        .poll(&Poll { peer: light.peer.clone(), after: 0, timeout_ms: 0, doing: vec![doing] }, &stop())
        .unwrap();
    let with_span =
        NotifyVersion { spans: vec![span(Lane::Agent, "seal", 2.0, 1.0, None)], ..notify(id("actor", 1, 1)) };
    controller.client.notify(&with_span, &stop()).unwrap();
    controller.notify(id("verifier", 1, 1));
    let (order, identity) = stages(&light.poll(&controller.client))[0].clone();
    light.say(&controller.client, order, &identity, failed(Phase::Staging, "no room")).unwrap();
    let status = http.get("/status").json();
    assert!(
        status["errors"][0].is_object() && status["sets"][0]["syncs"][0]["spans"][0].is_object(),
        "{status}"
    );
    let schema = |name: &str| json!({ "$ref": format!("#/components/schemas/{name}") });
    conforms(&schema("Status"), &status, "status");
    conforms(&schema("Service"), &http.get("/service_version").json(), "service");
}

// ---- the process ----------------------------------------------------------------------------------
