//! The receiver: whom it follows, and what it says where it cannot.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::{END, home, publisher, receiver};
use crate::command;
use crate::process::{Agent, PATIENCE, Process, Trainer};

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
