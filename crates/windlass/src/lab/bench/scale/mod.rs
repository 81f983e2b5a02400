//! `bench scale`: versions to as many hosts as one likes, over modelled links.
//!
//! No bytes move. What is asked of whom ([`swarm`]) and when a version is served ([`round`]) is decided by the code that real
//! receivers and the controller run; links, hosts and engines are modelled. [docs/scale.md](../../../../../../docs/scale.md) has
//! what it says, with the assumptions. `bench/relay.py` compares its predictions with hosts that are separate by namespaces.

mod round;
mod swarm;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use serde_json::json;
use windlass_core::wire::{DEFAULT_STRIPE_BYTES, swarm_stripe_bytes};

use self::round::{Costs, visible};
use self::swarm::{Broadcast, Model};
use crate::console::round as rounded;
use crate::console::{Session, Table, bytes, percent};
use crate::error::Error;

/// Bytes of a delta for each changed bf16 element: two of its value, and about one of its place.
const BYTES_PER_CHANGE: f64 = 3.04;
/// Transfers are modelled with at most so many stripes. Real ones of large models have more, and pass them on sooner.
const MAX_STRIPES: u64 = 1024;
/// What the controller takes for one order (`windlass bench controller`, 300 receivers).
const MESSAGE: f64 = 31e-6;

/// What to model.
#[derive(Clone, Debug)]
pub(crate) struct ScaleConfig {
    /// Bytes of each image.
    pub(crate) images: Vec<u64>,
    /// The share of elements that change.
    pub(crate) change: f64,
    /// Bytes of a delta, if they are known.
    pub(crate) delta_bytes: Option<u64>,
    pub(crate) receivers: Vec<u32>,
    /// Hosts that hold equal parts.
    pub(crate) trainers: u32,
    pub(crate) gbit: Vec<f64>,
    /// Seconds for a message and its answer.
    pub(crate) rtt: f64,
    /// Seconds that bytes wait in front of a link.
    pub(crate) queue: f64,
    /// Seconds of a load.
    pub(crate) load: f64,
    /// How many receivers die in the runs with failures.
    pub(crate) deaths: u32,
    pub(crate) seed: u64,
}

/// One case, and what it came to.
struct Row {
    image: u64,
    delta: bool,
    gbit: f64,
    model: Model,
    /// Seconds until the last receiver had everything, and until the gate opened.
    relay: f64,
    visible: f64,
    /// Versions that all trainers sent together.
    sent: f64,
    /// The same with deaths: until the last that lives had everything, and until the gate opened.
    deaths: Option<(f64, f64)>,
}

/// Runs the model for every case and prints what came out.
pub(crate) fn run(config: &ScaleConfig, session: &Session) -> Result<(), Error> {
    let cases = config.images.len() * config.gbit.len() * 2 * config.receivers.len();
    let progress = session.steps(cases as u64);
    let mut rows = Vec::new();
    for &image in &config.images {
        for &gbit in &config.gbit {
            for delta in [false, true] {
                for &receivers in &config.receivers {
                    session.cancel().check()?;
                    rows.push(config.case(image, gbit, delta, receivers)?);
                    progress.add(1);
                }
            }
        }
    }
    drop(progress);
    report(&rows, config, session)
}

impl ScaleConfig {
    fn case(&self, image: u64, gbit: f64, delta: bool, receivers: u32) -> Result<Row, Error> {
        let estimate = || ((image as f64 / 2.0) * self.change * BYTES_PER_CHANGE).max(1.0) as u64;
        let sent = if delta { self.delta_bytes.unwrap_or_else(estimate) } else { image };
        let stripe = u64::from(swarm_stripe_bytes(image, delta, DEFAULT_STRIPE_BYTES));
        let stripes = sent.div_ceil(stripe).clamp(self.trainers.into(), MAX_STRIPES) as u32;
        let model = Model {
            receivers,
            trainers: self.trainers,
            bytes: sent as f64,
            stripes,
            rate: gbit * 1e9 / 8.0,
            latency: self.rtt / 2.0,
            queue: self.queue,
        };
        let costs = Costs { latency: self.rtt / 2.0, message: MESSAGE, load: self.load };
        let mut broadcast = Broadcast::new(model)?;
        broadcast.run(f64::MAX);
        if broadcast.last().is_infinite() {
            return Err(Error::Bug(format!("the modelled transfer to {receivers} receivers does not end")));
        }
        let gate = visible(&broadcast.done(), costs)?;
        let deaths = if self.deaths > 0 && receivers > self.deaths {
            let mut broadcast = Broadcast::new(model)?;
            broadcast.run_with_deaths(self.deaths, self.seed);
            Some((broadcast.last(), visible(&broadcast.done(), costs)?))
        } else {
            None
        };
        let (relay, sent) = (broadcast.last(), broadcast.sent());
        Ok(Row { image, delta, gbit, model, relay, visible: gate, sent, deaths })
    }
}

fn report(rows: &[Row], config: &ScaleConfig, session: &Session) -> Result<(), Error> {
    let mode = |row: &Row| if row.delta { "delta" } else { "full" };
    let object = |row: &Row| {
        json!({
            "image_bytes": row.image,
            "mode": mode(row),
            "bytes": row.model.bytes,
            "gbit": row.gbit,
            "receivers": row.model.receivers,
            "stripes": row.model.stripes,
            "alone_s": rounded(row.model.alone()),
            "direct_s": rounded(row.model.direct()),
            "relay_s": rounded(row.relay),
            "visible_s": rounded(row.visible),
            "trainers_sent": rounded(row.sent),
            "relay_with_deaths_s": row.deaths.map(|d| rounded(d.0)),
            "visible_with_deaths_s": row.deaths.map(|d| rounded(d.1)),
        })
    };
    let figures = json!({
        "bench": "scale",
        "trainers": config.trainers,
        "change": config.change,
        "rtt_s": config.rtt,
        "queue_s": config.queue,
        "load_s": config.load,
        "deaths": config.deaths,
        "seed": config.seed,
        "rows": rows.iter().map(object).collect::<Vec<_>>(),
    });
    session.finish(figures, |out| {
        let _ = writeln!(
            out,
            "scale (modelled): {} trainers' hosts, {} changed, round trip {:.2} ms, load {:.0} ms\n",
            config.trainers,
            percent(config.change),
            config.rtt * 1e3,
            config.load * 1e3,
        );
        let dead = format!("{} die: relay s", config.deaths);
        let mut t = Table::new([
            "image",
            "version",
            "Gbit/s",
            "receivers",
            "one alone s",
            "direct s",
            "relay s",
            "of one",
            "sent",
            "served s",
            &dead,
            "served s",
        ]);
        let seconds = |s: f64| format!("{s:.3}");
        for row in rows {
            let (late, later) = row.deaths.map_or_else(
                || ("–".to_owned(), "–".to_owned()),
                |(relay, served)| (seconds(relay), seconds(served)),
            );
            t.row([
                bytes(row.image),
                format!("{} {}", mode(row), bytes(row.model.bytes as u64)),
                format!("{}", row.gbit),
                row.model.receivers.to_string(),
                seconds(row.model.alone()),
                seconds(row.model.direct()),
                seconds(row.relay),
                format!("{:.2}", row.relay / row.model.alone()),
                format!("{:.2}", row.sent),
                seconds(row.visible),
                late,
                later,
            ]);
        }
        t.write(out);
        let _ =
            writeln!(out, "\nsent: versions that all trainers' hosts sent together. served: the gate opens.");
    })
}
