//! `bench link`: syncs by delta over a line of limited rate, in plain records, in context records, and by choice.
//!
//! Each codec has a receiver of its own, which has the first version before the line is limited. A round writes a
//! version, waits until it is served, and measures the receiver's sync: ask (which has the publisher make context records),
//! wire, decode, apply. The first round is not counted: after it the receiver knows the rate of its line. The control
//! connection is a call and is not limited.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::json;
use windlass_core::address::{Host, HostPort};
use windlass_core::digest::BlockSum;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::Codec;
use windlass_core::wire::control::{
    CodecWanted, Registered, Registration, TransferAnswer, TransferDone, TransferRequest, VersionInfo,
};
use windlass_data::receiver::{Control, ControlError, Synced};
use windlass_data::serve::Server;
use windlass_data::stop::Stop;

use super::rig::{BenchDir, Publisher, failed};
use super::{Figure, Images, PlaneConfig, Spent, Timing, merge, write_bars};
use crate::console::round;
use crate::console::{Session, Table, bytes};
use crate::error::Error;

/// Runs the bench and prints what came out.
pub(crate) fn run(config: &PlaneConfig, rate: u64, session: &Session) -> Result<(), Error> {
    let images = Images::make(&config.bench, session)?;
    let place = BenchDir::new(&config.region_dir)?;
    let mut publisher = Publisher::start(&place, &images, config, session.cancel())?;
    let line = Line::open(publisher.server.data_endpoint())?;
    let control = Arc::new(Via { server: Arc::clone(&publisher.server), line: line.address });
    let mut version = 1;
    publisher.commit(version, &images.base)?;
    publisher.served(version)?;
    let mut found = Vec::new();
    for codec in CodecWanted::ALL {
        let over = Arc::clone(&control) as Arc<dyn Control>;
        let mut receiver = publisher.receiver_over(&place, codec.as_str(), codec, over)?;
        line.limit(None);
        receiver.sync(&publisher.stop()).map_err(failed!("sync the first version"))?;
        line.limit(Some(rate));
        let mut rounds = Vec::new();
        for turn in 0..=config.bench.repeats.max(1) {
            session.cancel().check()?;
            version += 1;
            let data = if version % 2 == 0 { &images.next } else { &images.base };
            publisher.commit(version, data)?;
            publisher.served(version)?;
            let synced = receiver.sync(&publisher.stop()).map_err(failed!("sync a version"))?;
            if synced.mode != "delta" {
                return Err(Error::Bug(format!("version {version} was not synced by a delta: {synced:?}")));
            }
            if turn > 0 {
                rounds.push(synced);
            }
        }
        found.push((codec, rounds));
    }
    report(&found, &images, (config, rate), session)
}

fn middle(rounds: &[Synced], f: impl Fn(&Synced) -> f64) -> f64 {
    let all: Vec<Spent> = rounds.iter().map(|s| Spent { wall: f(s), cpu: 0.0 }).collect();
    Timing::from_rounds(&all).median
}

fn report(
    found: &[(CodecWanted, Vec<Synced>)],
    images: &Images,
    (config, rate): (&PlaneConfig, u64),
    session: &Session,
) -> Result<(), Error> {
    let total = |wanted| {
        let rounds = found.iter().find(|(codec, _)| *codec == wanted).map_or(&[][..], |(_, r)| r);
        middle(rounds, |s| s.total_ms)
    };
    let best = total(CodecWanted::Plain).min(total(CodecWanted::Context));
    let value = total(CodecWanted::Auto) / best;
    let bars = [Figure { name: "auto / the faster codec".into(), value, bar: 1.2, at_least: false }];
    let gbps = |ms: f64| images.base.len() as f64 / ms / 1e6;
    let context = |rounds: &[Synced]| rounds.iter().filter(|s| s.codec == Some(Codec::Context)).count();
    let codecs = found.iter().map(|(wanted, rounds)| {
        let object = json!({
            "wire_bytes": rounds.last().map_or(0, |s| s.wire_bytes),
            "ask_ms": round(middle(rounds, |s| s.ask_ms)),
            "wire_ms": round(middle(rounds, |s| s.wire_ms)),
            "decode_ms": round(middle(rounds, |s| s.decode_ms)),
            "apply_ms": round(middle(rounds, |s| s.apply_ms)),
            "total_ms": round(middle(rounds, |s| s.total_ms)),
            "context_rounds": context(rounds),
        });
        (wanted.as_str().to_owned(), object)
    });
    let object = json!({
        "link_bytes_per_second": rate,
        "gbps": gbps(total(CodecWanted::Auto)),
        "limit_gbps": gbps(best),
        "ratio": round(value),
        "codecs": codecs.collect::<serde_json::Map<_, _>>(),
        "bars": bars.iter().map(Figure::json).collect::<Vec<_>>(),
    });
    session.finish(merge(config.json("link", images), object), |out| {
        config.title("link", images, out);
        let mut t = Table::new([
            "codec",
            "delta",
            "ask ms",
            "wire ms",
            "decode ms",
            "apply ms",
            "sync ms",
            "in context",
        ]);
        for (wanted, rounds) in found {
            let ms = |f: &dyn Fn(&Synced) -> f64| format!("{:.1}", middle(rounds, f));
            t.row([
                wanted.as_str().to_owned(),
                bytes(rounds.last().map_or(0, |s| s.wire_bytes)),
                ms(&|s| s.ask_ms),
                ms(&|s| s.wire_ms),
                ms(&|s| s.decode_ms),
                ms(&|s| s.apply_ms),
                ms(&|s| s.total_ms),
                format!("{} of {}", context(rounds), rounds.len()),
            ]);
        }
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}

/// Bytes per second, and when the next ones may pass.
type Pace = Arc<Mutex<(Option<u64>, Instant)>>;

/// A relay in front of the publisher's data port.
struct Line {
    address: SocketAddr,
    pace: Pace,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Line {
    fn open(target: HostPort) -> Result<Line, Error> {
        let listening = Error::io("listen on", "127.0.0.1".as_ref());
        let listener = TcpListener::bind("127.0.0.1:0").map_err(listening)?;
        let address = listener.local_addr().map_err(Error::io("look at", "a socket".as_ref()))?;
        let (pace, over): (Pace, _) = (Arc::new(Mutex::new((None, Instant::now()))), Arc::default());
        let (own, ended): (_, Arc<AtomicBool>) = (Arc::clone(&pace), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(server) = TcpStream::connect(target.to_string()) else { continue };
                // Both end with the connection.
                if let (Ok(from), Ok(to)) = (client.try_clone(), server.try_clone()) {
                    std::thread::spawn(move || drop(relay(from, to, None)));
                    let pace = Arc::clone(&own);
                    std::thread::spawn(move || drop(relay(server, client, Some(&pace))));
                }
            }
        });
        Ok(Line { address, pace, over, thread: Some(thread) })
    }

    fn limit(&self, rate: Option<u64>) {
        *self.pace.lock().unwrap_or_else(PoisonError::into_inner) = (rate, Instant::now());
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let woken = TcpStream::connect(self.address).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
    }
}

fn relay(mut from: TcpStream, mut to: TcpStream, pace: Option<&Pace>) -> std::io::Result<()> {
    let mut buffer = [0; 16 << 10];
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            return to.shutdown(Shutdown::Write);
        }
        if let Some(pace) = pace {
            let mut pace = pace.lock().unwrap_or_else(PoisonError::into_inner);
            if let (Some(rate), due) = &mut *pace {
                *due = Instant::now().max(*due) + Duration::from_secs_f64(n as f64 / *rate as f64);
                let left = due.saturating_duration_since(Instant::now());
                drop(pace);
                std::thread::sleep(left);
            }
        }
        to.write_all(&buffer[..n])?;
    }
}

/// The publisher, with tickets that lead over the line.
struct Via {
    server: Arc<Server>,
    line: SocketAddr,
}

impl Control for Via {
    fn peer(&self) -> String {
        self.server.peer()
    }

    fn version(
        &self,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        Control::version(&*self.server, newer_than, stop)
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        self.server.manifest(stop)
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        Control::sums(&*self.server, identity, stop)
    }

    fn register(&self, registration: &Registration, stop: &Stop) -> Result<Registered, ControlError> {
        Control::register(&*self.server, registration, stop)
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        let mut answer = Control::request(&*self.server, request, stop)?;
        if let TransferAnswer::Granted(granted) = &mut answer
            && let (Ok(host), Some(port)) = (Host::new("127.0.0.1"), NonZeroU16::new(self.line.port()))
        {
            granted.ticket.sources.iter_mut().for_each(|s| s.endpoint = HostPort::new(host.clone(), port));
        }
        Ok(answer)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        Control::done(&*self.server, done, stop)
    }
}
