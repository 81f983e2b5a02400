//! TLS between real processes: agents and controllers with certificates, receivers that trust some and not others.

use crate::command;
use crate::relay;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::authority::{Authority, store};
use crate::process::{Agent, PATIENCE, Process, Trainer};
use crate::relay::Relay;
use serde_json::Value;
use tempfile::TempDir;
use windlass::service::client::{Client, Request};
use windlass::service::control::HttpControl;
use windlass::service::controller::client::ControllerClient;
use windlass::service::controller::wire::{Gate, NotifyVersion};
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_core::identity::ModelId;
use windlass_data::image::{ImageError, ImageView};
use windlass_data::receiver::Control as _;
use windlass_data::stop::Stop;
use windlass_data::tls::Trust;

fn stop() -> Stop {
    Stop::after(PATIENCE)
}

fn agent_with(region: &Path, flags: &[String], more: &[&str]) -> Agent {
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
    Agent::start(region, &flags)
}

/// A place with an authority, and certificates of it.
struct World {
    home: TempDir,
    authority: Authority,
    ca: PathBuf,
    token: PathBuf,
}

const SECRET: &str = "a-secret-of-this-test-0123456789";

impl World {
    fn new() -> World {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let authority = Authority::new();
        let ca = authority.file(home.path(), "ca.pem");
        let token = home.path().join("token");
        fs::write(&token, SECRET).unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
        World { home, authority, ca, token }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// The flags of a server with this certificate.
    fn server(&self, name: &str, issued: &(String, String)) -> Vec<String> {
        let (certificate, key) = store(self.home.path(), name, issued);
        vec![
            format!("--tls-cert={}", certificate.display()),
            format!("--tls-key={}", key.display()),
            format!("--token-file={}", self.token.display()),
        ]
    }

    fn here(&self) -> Vec<String> {
        self.server("server", &self.authority.issue(&["127.0.0.1"]))
    }

    fn trust(&self) -> Trust {
        Trust::of_file(&self.ca).unwrap()
    }

    /// A trainer with an agent that has a certificate.
    fn publisher(&self, model: &str) -> (Trainer, Agent) {
        let trainer = Trainer::named(&self.path(&format!("region-{model}")), model);
        let agent = agent_with(&trainer.region, &self.here(), &[]);
        assert!(agent.endpoint.starts_with("https://127.0.0.1:"), "{}", agent.endpoint);
        (trainer, agent)
    }

    fn sealed(&self, agent: &Agent, version: u64) -> windlass_core::wire::control::VersionInfo {
        let token = Token::new(SECRET).unwrap();
        let control = HttpControl::new(&agent.endpoint, token).unwrap().with_trust(Some(self.trust()));
        let until = Instant::now() + PATIENCE;
        loop {
            let info = control.version(None, &stop()).unwrap();
            if info.version >= Some(version) {
                return info;
            }
            assert!(Instant::now() < until, "{info:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn receiver(&self, from: &str, ca: &Path, more: &[&str]) -> Process {
        let args = [
            "receive".to_owned(),
            format!("--from={from}"),
            format!("--tls-ca={}", ca.display()),
            format!("--token-file={}", self.token.display()),
            format!("--dir={}", self.path("images").display()),
        ];
        Process::start(args.into_iter().chain(more.iter().map(ToString::to_string)))
    }
}

fn synced(receiver: &Process) -> (String, u64) {
    let line = receiver.event("synced");
    (line["mode"].as_str().unwrap().to_owned(), line["image"]["identity"]["version"].as_u64().unwrap())
}

#[test]
fn a_receiver_follows_an_agent_over_tls_with_images_and_deltas() {
    let world = World::new();
    let (mut trainer, agent) = world.publisher("actor");
    trainer.publish(0);
    let receiver = world.receiver(&agent.endpoint, &world.ca, &[]);
    assert_eq!(synced(&receiver), ("full".into(), 0));
    for version in 1..4 {
        trainer.publish(version);
        assert_eq!(synced(&receiver), ("delta".into(), u64::from(version)));
    }
    // One on the same host finds agent and token in the region, and needs to be told whom to trust as well.
    let args = [
        "receive".to_owned(),
        format!("--region={}", trainer.region.display()),
        format!("--dir={}", world.path("others").display()),
        "--versions=1".to_owned(),
    ];
    let mut command = command::windlass();
    command.args(args).arg("--json").env_remove("WINDLASS_TOKEN").env("WINDLASS_TLS_CA", &world.ca);
    let mut beside = Process::spawn(command);
    assert_eq!(synced(&beside), ("full".into(), 3));
    assert_eq!(beside.ends_within(PATIENCE), 0);
}

/// A trainer with an agent whose data a relay holds up after the first mebibyte, and the agent's address.
fn held_up(world: &World) -> (Trainer, Agent, Relay, Vec<String>) {
    let mut trainer = Trainer::named(&world.path("region"), "actor");
    let issued = world.authority.issue(&["127.0.0.1", relay::HOST]);
    let mut flags = world.server("server", &issued);
    flags.push(format!("--advertise-host={}", relay::HOST));
    let mut agent = agent_with(&trainer.region, &flags, &[]);
    // Requests go to the agent itself; it is its tickets that lead to the relay.
    agent.endpoint = agent.endpoint.replace(relay::HOST, "127.0.0.1");
    trainer.publish(0);
    world.sealed(&agent, 0);
    let relay = Relay::start(agent.data_port, 1 << 20);
    (trainer, agent, relay, flags)
}

#[test]
fn a_receiver_that_is_killed_in_the_middle_of_a_transfer_inside_tls_is_made_up_for_by_the_next() {
    let world = World::new();
    let (mut trainer, mut agent, relay, _flags) = held_up(&world);
    let mut receiver = world.receiver(&agent.endpoint, &world.ca, &[]);
    relay.stalled();
    receiver.kill();
    assert_eq!(receiver.rest(), Vec::<Value>::new(), "it had not come so far");
    relay.open();
    // What it left is not taken for a version.
    let dir = world.path("images").join("actor");
    let left = ImageView::open(&dir, PATIENCE, &Stop::after(Duration::ZERO)).map(|_| ());
    assert!(matches!(left, Err(ImageError::NotWhole { .. })), "half an image is none: {left:?}");
    // The agent serves on, its trainer is not held up, and the next receiver in its place gets all of it.
    let next = world.receiver(&agent.endpoint, &world.ca, &[]);
    let line = next.event("synced");
    assert_eq!(line["image"]["digest"], serde_json::json!(world.sealed(&agent, 0).digest), "{line}");
    trainer.publish(1);
    let line = next.event("synced");
    assert_eq!(
        (&line["mode"], line["image"]["identity"]["version"].as_u64()),
        (&Value::from("delta"), Some(1))
    );
    assert_eq!(line["image"]["digest"], serde_json::json!(world.sealed(&agent, 1).digest), "{line}");
    agent.process.signal(rustix::process::Signal::TERM);
    assert_eq!(agent.process.ends_within(PATIENCE), 0, "nothing of the dead receiver holds it");
}

#[test]
fn an_agent_that_is_killed_in_the_middle_of_a_transfer_inside_tls_is_named_and_waited_for() {
    let world = World::new();
    let (_trainer, mut agent, relay, flags) = held_up(&world);
    let ports = (format!("--ports={}", agent.port()), format!("--data-ports={}", agent.data_port));
    let receiver = world.receiver(&agent.endpoint, &world.ca, &[]);
    relay.stalled();
    let digest = world.sealed(&agent, 0).digest;
    agent.process.kill();
    relay.cut();
    let lost = receiver.line();
    assert_eq!(lost["event"], "waiting", "{lost}");
    assert_eq!(lost["kind"], "peer_lost", "{lost}");
    let (message, at) = (lost["error"].as_str().unwrap(), format!(":{}", agent.data_port));
    assert!(message.contains(&at) || message.contains(&agent.endpoint), "nobody is named: {message}");
    // Its successor in the same place is found, and what had landed was not for nothing.
    let _next = agent_with(&world.path("region"), &flags, &[&ports.0, &ports.1]);
    let line = receiver.event("synced");
    assert_eq!(line["image"]["digest"], serde_json::json!(digest), "{line}");
}

#[test]
fn certificates_that_are_not_accepted_are_said_at_once_and_the_token_stays_here() {
    let world = World::new();
    let (mut trainer, agent) = world.publisher("actor");
    trainer.publish(0);
    world.sealed(&agent, 0);
    let refused = |from: &str, ca: &Path, why: &str| {
        let mut receiver = world.receiver(from, ca, &[]);
        let line = receiver.line();
        let message = line["error"]["message"].as_str().unwrap_or_else(|| panic!("{line}")).to_owned();
        assert!(message.contains(why), "{why:?} in {message}");
        assert_eq!((&line["error"]["kind"], receiver.ends_within(PATIENCE)), (&Value::from("denied"), 10));
        assert!(!world.path("images").exists(), "nothing was made");
    };
    let stranger = Authority::new().file(world.home.path(), "stranger.pem");
    refused(&agent.endpoint, &stranger, "tls_ca");
    refused(&agent.endpoint.replace("127.0.0.1", "localhost"), &world.ca, "it is for other hosts");
    let mut old = Trainer::named(&world.path("region-old"), "old");
    let flags = world.server("old", &world.authority.issue_expired(&["127.0.0.1"]));
    let expired = agent_with(&old.region, &flags, &[]);
    old.publish(0);
    refused(&expired.endpoint, &world.ca, "it has expired");
    // Nobody is trusted because nothing was said: the system knows others.
    let mut command = command::windlass();
    let from = format!("--from={}", agent.endpoint);
    command.args(["receive", "--json", &from]).arg(format!("--token-file={}", world.token.display()));
    command.env_remove("WINDLASS_TLS_CA").env("SSL_CERT_FILE", &stranger);
    let told = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert!(told.contains("\"denied\"") && told.contains("tls_ca"), "{told}");
}

#[test]
fn neither_side_falls_back_to_plain_http() {
    let world = World::new();
    let (mut trainer, agent) = world.publisher("actor");
    trainer.publish(0);
    world.sealed(&agent, 0);
    // Without TLS at the port with it: an answer that says so, with the token or without.
    for headers in [agent.bearer(), String::new()] {
        let message = agent.request("GET /get_version", &headers, b"").error(400, "invalid");
        assert!(message.contains("https://"), "{message}");
    }
    let mut receiver = world.receiver(&agent.endpoint.replace("https://", "http://"), &world.ca, &[]);
    let line = receiver.line();
    assert!(line["error"]["message"].as_str().is_some_and(|m| m.contains("speaks TLS")), "{line}");
    assert_eq!(receiver.ends_within(PATIENCE), 2);
    // And with TLS at a port without it.
    let other = Trainer::named(&world.path("region-plain"), "plain");
    let token = format!("--token-file={}", world.token.display());
    let plain = Agent::start(&other.region, &[&token]);
    let mut receiver = world.receiver(&plain.endpoint.replace("http://", "https://"), &world.ca, &[]);
    let line = receiver.line();
    assert!(line["error"]["message"].as_str().is_some_and(|m| m.contains("does not speak TLS")), "{line}");
    assert_eq!(receiver.ends_within(PATIENCE), 2);
}

#[test]
fn the_token_is_wanted_over_tls_as_without() {
    let world = World::new();
    let (_trainer, agent) = world.publisher("actor");
    let client = Client::new(Some(world.trust()));
    let url = format!("{}/get_version", agent.endpoint);
    let ask = |bearer| {
        let request = Request::<()> { url: &url, bearer, body: None, timeout: PATIENCE, most: 1 << 20 };
        client.send(request, &stop()).unwrap().0
    };
    assert_eq!([ask(None), ask(Some("wrong")), ask(Some(SECRET))], [401, 401, 200]);
}

#[test]
fn files_that_cannot_be_used_for_tls_are_named_with_the_remedy() {
    let world = World::new();
    let trainer = Trainer::named(&world.path("region"), "actor");
    let good = store(world.home.path(), "good", &world.authority.issue(&["127.0.0.1"]));
    let other = store(world.home.path(), "other", &world.authority.issue(&["elsewhere.example"]));
    let absent = world.path("absent.pem");
    let open = world.path("open.key");
    fs::copy(&good.1, &open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o644)).unwrap();
    let cases: [(&Path, &Path, &str, i32); 6] = [
        (&absent, &good.1, "absent.pem", 3),
        (&world.token, &good.1, "-----BEGIN", 2),
        (&good.0, &world.token, "no private key", 2),
        (&good.0, &other.1, "made together", 2),
        (&good.0, &open, "chmod 600", 10),
        (&other.0, &other.1, "subject alternative names", 2),
    ];
    for (certificate, key, word, code) in cases {
        let ran =
            run!("agent", "--json", "--region", &trainer.region, "--tls-cert", certificate, "--tls-key", key);
        let message = ran.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(word), "{word:?} in {message}");
        assert_eq!(ran.code, code, "{message}");
    }
    for alone in ["--tls-cert", "--tls-key"] {
        let ran = run!("controller", "--json", alone, &good.0);
        assert!(
            ran.code == 2 && format!("{}{}", ran.stdout, ran.stderr).contains("--tls-"),
            "{}",
            ran.stderr
        );
    }
    let plain = run!(
        "agent",
        "--json",
        "--region",
        &trainer.region,
        "--tls-cert",
        &good.0,
        "--tls-key",
        &good.1,
        "--peer",
        "http://10.0.0.9:7000"
    );
    let message = plain.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(plain.code == 2 && message.contains("10.0.0.9:7000"), "{message}");
    let ran =
        run!("top", "--controller", "https://127.0.0.1:9", "--token-file", &world.token, "--tls-ca", &absent);
    assert!(ran.stderr.contains("absent.pem"), "{}", ran.stderr);
}

#[test]
fn an_agent_killed_in_the_middle_of_a_transfer_over_tls_is_waited_for() {
    let world = World::new();
    let (mut trainer, mut agent) = world.publisher("actor");
    trainer.publish(0);
    world.sealed(&agent, 0);
    let mut receiver = world.receiver(&agent.endpoint, &world.ca, &["--until=6"]);
    synced(&receiver);
    for version in 1..=6 {
        trainer.publish(version);
        if version % 2 == 0 {
            // Whatever was under way ends in the middle, of requests and of data.
            let again = format!("{},{}", agent.port(), agent.data_port);
            agent.process.kill();
            agent = agent_with(&trainer.region, &world.here(), &["--again", &again]);
        }
    }
    let digest = world.sealed(&agent, 6).digest.unwrap().to_string();
    let last = receiver.rest().into_iter().rfind(|l| l["event"] == "synced").unwrap();
    assert_eq!(last["image"]["digest"], digest, "{last}");
    assert_eq!(receiver.ends_within(PATIENCE), 0);
}

#[test]
fn a_controller_its_receivers_and_their_agents_speak_tls() {
    let world = World::new();
    let mut args = vec!["controller".to_owned()];
    args.extend(world.here());
    let controller = Process::start(args);
    let endpoint = controller.event("listening")["endpoint"].as_str().unwrap().to_owned();
    assert!(endpoint.starts_with("https://127.0.0.1:"), "{endpoint}");
    let (mut trainer, agent) = world.publisher("actor");
    let receive = |ca: &Path| {
        Process::start([
            "receive".to_owned(),
            format!("--controller={endpoint}"),
            format!("--tls-ca={}", ca.display()),
            format!("--token-file={}", world.token.display()),
            format!("--dir={}", world.path("images").display()),
            "--model=actor".to_owned(),
        ])
    };
    let stranger = Authority::new().file(world.home.path(), "stranger.pem");
    let mut mistrustful = receive(&stranger);
    assert_eq!(mistrustful.ends_within(PATIENCE), 10, "{:?}", mistrustful.rest());
    let receiver = receive(&world.ca);
    let client = ControllerClient::new(&endpoint, Token::new(SECRET).unwrap()).unwrap();
    let client = client.with_trust(Some(world.trust()));
    for version in 0..3 {
        trainer.publish(version);
        let info = world.sealed(&agent, version.into());
        let notify = NotifyVersion {
            model_id: ModelId::new("actor").unwrap(),
            incarnation: info.incarnation,
            version: version.into(),
            sender_endpoint: agent.endpoint.clone(),
            sync: false,
            eval: None,
            timeout_ms: None,
            spans: Vec::new(),
            delta_sparsity: None,
            delta_ratio: None,
        };
        client.notify(&notify, &stop()).unwrap();
        let timeout_ms = Some(PATIENCE.as_millis() as u64);
        let gate = Gate { at_least: Some(version.into()), timeout_ms, ..Gate::default() };
        assert_eq!(client.gate(&gate, &stop()).unwrap().served.map(|s| s.version), Some(version.into()));
        receiver.event("loaded");
    }
    // The live page, and the same in a terminal.
    let url = format!("{endpoint}/");
    let request = Request::<()> { url: &url, bearer: None, body: None, timeout: PATIENCE, most: 1 << 24 };
    let (status, page) = Client::new(Some(world.trust())).send(request, &stop()).unwrap();
    assert!(status == 200 && String::from_utf8_lossy(&page).contains("<html"), "{status}");
    let top =
        run!("top", "--once", "--controller", &endpoint, "--token-file", &world.token, "--tls-ca", &world.ca);
    assert!(top.code == 0 && top.stdout.contains("actor"), "{} {}", top.stdout, top.stderr);
    let kind = run!(
        "top",
        "--json",
        "--once",
        "--controller",
        &endpoint,
        "--token-file",
        &world.token,
        "--tls-ca",
        &stranger
    );
    assert_eq!(kind.code, i32::from(Kind::Denied.row().exit), "{} {}", kind.stdout, kind.stderr);
}
