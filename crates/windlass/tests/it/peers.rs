//! Tokens that change and peers that talk garbage: neither ends a service. Bits that flip on the way: see the soak.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::process::{Agent, PATIENCE, Process, Trainer};
use serde_json::{Value, json};
use windlass::service::controller::client::ControllerClient;
use windlass_core::address::Token;
use windlass_data::stop::Stop;

const SECRET: &str = "a-secret-of-this-test-0123456789";
const OTHER: &str = "another-secret-of-this-test-98765";
/// Recovering takes several attempts, some of which wait for an answer that never comes whole.
const LONG: Duration = Duration::from_mins(4);

/// The next of a row of random numbers.
fn random(state: &AtomicU64) -> u64 {
    let mut z = state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn write_token(path: &Path, secret: &str) {
    let new = path.with_extension("new");
    let mut file = File::options().create(true).truncate(true).write(true).mode(0o600).open(&new).unwrap();
    file.write_all(secret.as_bytes()).unwrap();
    fs::rename(&new, path).unwrap();
}

/// The first line with an event for which `wanted` holds. Whatever is said meanwhile, it does not end.
fn until(process: &Process, event: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + LONG;
    loop {
        assert!(Instant::now() < end, "{event} did not come");
        let Some(line) = process.line_within(Duration::from_secs(1)) else { continue };
        assert!(!line["error"].is_object(), "it ended: {line}");
        if line["event"] == event && wanted(&line) {
            return line;
        }
    }
}

fn synced_to(version: u64) -> impl Fn(&Value) -> bool {
    move |line| line["image"]["identity"]["version"].as_u64() >= Some(version)
}

#[test]
fn a_receiver_reads_a_token_again_that_was_changed() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let (token, theirs) = (home.path().join("token"), home.path().join("controller-token"));
    write_token(&token, SECRET);
    write_token(&theirs, SECRET);
    let token_arg = format!("--token-file={}", token.display());
    let mut trainer = Trainer::start(&home.path().join("region"));
    let mut agent = Agent::start(&trainer.region, &[&token_arg]);
    let args = ["controller".to_owned(), format!("--token-file={}", theirs.display())];
    let mut controller = Process::start(&args);
    let endpoint = controller.event("listening")["endpoint"].as_str().unwrap().to_owned();
    let images = |name: &str| format!("--dir={}", home.path().join(name).display());
    let from = format!("--from={}", agent.endpoint);
    let alone = Process::start(["receive", &from, &images("alone"), &token_arg]);
    let (to, its) =
        (format!("--controller={endpoint}"), format!("--controller-token-file={}", theirs.display()));
    let member = Process::start(["receive", &to, &its, &images("member"), &token_arg, "--model=demo"]);
    trainer.publish(1);
    until(&alone, "synced", synced_to(1));
    until(&member, "joined", |_| true);
    // Both services come back under their addresses, with other tokens in their files.
    let ports = format!("--again={},{}", agent.port(), agent.data_port);
    agent.process.kill();
    controller.kill();
    write_token(&token, OTHER);
    write_token(&theirs, OTHER);
    let agent = Agent::start(&trainer.region, &[&token_arg, &ports]);
    let ports = format!("--ports={}", endpoint.rsplit(':').next().unwrap());
    let controller = Process::start(args.iter().chain([&ports]));
    controller.event("listening");
    trainer.publish(2);
    agent.sealed(2);
    until(&alone, "synced", synced_to(2));
    until(&member, "joined", |_| true);
}

#[test]
fn no_garbage_ends_an_agent_or_a_controller() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let token = home.path().join("token");
    write_token(&token, SECRET);
    let token_arg = format!("--token-file={}", token.display());
    let mut trainer = Trainer::start(&home.path().join("region"));
    let agent = Agent::start(&trainer.region, &[&token_arg]);
    let controller = Process::start(["controller", &token_arg]);
    let endpoint = controller.event("listening")["endpoint"].as_str().unwrap().to_owned();
    let port: u16 = endpoint.rsplit(':').next().unwrap().parse().unwrap();
    trainer.publish(1);
    agent.sealed(1);
    let state = AtomicU64::new(3);
    let request = |path: &str, body: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer {SECRET}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let peer = json!({ "receiver": "r", "session": 7 });
    let join = json!({ "peer": peer, "models": ["demo"], "has": [] }).to_string();
    let notify =
        json!({ "model_id": "demo", "incarnation": 5, "version": 1, "sender_endpoint": agent.endpoint });
    let said = [
        request("/register_receiver", &join),
        request("/notify_version", &notify.to_string()),
        request("/poll_orders", &json!({ "peer": peer, "after": 0, "timeout_ms": 1 }).to_string()),
        request("/request_transfer", "{}"),
        request("/transfer_done", &json!({ "instance_id": "x" }).to_string()),
    ];
    for round in 0..200 {
        for port in [agent.port(), agent.data_port, port] {
            let mut bytes = said[round % said.len()].clone().into_bytes();
            for _ in 0..random(&state) % 8 {
                let at = random(&state) as usize % (bytes.len() * 8);
                bytes[at / 8] ^= 1 << (at % 8);
            }
            if round % 4 == 0 {
                bytes = (0..random(&state) % 3000).map(|_| random(&state) as u8).collect();
            }
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let _ = stream.write_all(&bytes);
            // Half of them wait for an answer, for a moment; the others are gone.
            if round % 2 == 0 {
                stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
                let _ = stream.read(&mut [0; 64]);
            }
        }
    }
    trainer.publish(2);
    assert_eq!(agent.sealed(2)["version"], 2);
    let client = ControllerClient::new(&endpoint, Token::new(SECRET).unwrap()).unwrap();
    client.status(&Stop::after(PATIENCE)).unwrap();
    // What was published is still received whole.
    let region = format!("--region={}", trainer.region.display());
    let dir = format!("--dir={}", home.path().join("images").display());
    let mut receiver = Process::start(["receive", &region, &dir, "--versions=1"]);
    assert_eq!(receiver.ends_within(PATIENCE), 0);
}
