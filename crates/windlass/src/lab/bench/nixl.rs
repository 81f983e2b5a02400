//! `bench nixl`: a full image by one-sided reads, against a bare loop of NIXL's reads, and against our TCP.
//!
//! A round is one pull of one ticket ([`windlass_data::tcp::pull`]) from the slot of a served region into a receiver's image, with
//! the sums checked and without, and over TCP with the sums checked. The limit reads as many bytes of the same slot into the
//! same image in pieces of a stripe, as many at a time as the streams of a pull have under way, with nothing around it. Both
//! agents are in this process, and over which transport UCX goes between them is in its environment (`UCX_TLS`).

use std::sync::Arc;

use serde_json::json;
use windlass_core::wire::{DEFAULT_STRIPE_BYTES, DEFAULT_WINDOW};
use windlass_data::nixl::{Config, Exporter, Reader};

use super::rig::{BenchDir, failed};
use super::tcp::{Link, with_link};
use super::{Figure, Images, PlaneConfig, Spent, Timing, merge, reached, timing_row, write_bars};
use crate::console::round;
use crate::console::{Session, Table};
use crate::error::Error;

/// Runs the bench and prints the result.
pub(crate) fn run(config: &PlaneConfig, nixl: &Config, session: &Session) -> Result<(), Error> {
    let exporter = Arc::new(Exporter::start(nixl)?);
    let reader = Reader::start(nixl.clone())?;
    let images = Images::make(&config.bench, session)?;
    let place = BenchDir::new(&config.region_dir)?;
    let mut times: [Vec<Spent>; 4] = Default::default();
    let both = Some((Arc::clone(&exporter), &reader));
    with_link(config, session, &images, (&place, None, both), |link| {
        for turn in 0..=config.bench.repeats {
            session.cancel().check()?;
            let round = [
                bare(link, &exporter, &reader, config)?,
                link.pull_by(true, true)?,
                link.pull_by(true, false)?,
                link.pull_by(false, true)?,
            ];
            if turn > 0 {
                times.iter_mut().zip(round).for_each(|(times, spent)| times.push(spent));
            }
        }
        Ok(())
    })?;
    let len = images.base.len();
    let [limit, checked, unchecked, tcp] = &times;
    let bar = |name: &str, value, bar| Figure { name: name.into(), value, bar, at_least: true };
    let bars = [
        bar("checked / bare", reached(checked, limit), 0.75),
        bar("unchecked / bare", reached(unchecked, limit), 0.9),
    ];
    let beside_tcp = reached(checked, tcp);
    let [limit, checked, unchecked, tcp] = [limit, checked, unchecked, tcp].map(|t| Timing::from_rounds(t));
    let object = json!({
        "library": exporter.release(),
        "ucx_tls": std::env::var("UCX_TLS").ok(),
        "gbps": round(checked.gbps(len)),
        "unchecked_gbps": round(unchecked.gbps(len)),
        "limit_gbps": round(limit.gbps(len)),
        "tcp_gbps": round(tcp.gbps(len)),
        "ratio_to_tcp": round(beside_tcp),
        "spread": {
            "checked": round(checked.spread()),
            "unchecked": round(unchecked.spread()),
            "limit": round(limit.spread()),
            "tcp": round(tcp.spread()),
        },
        "bars": bars.iter().map(Figure::json).collect::<Vec<_>>(),
    });
    session.finish(merge(config.json("nixl", &images), object), |out| {
        config.title("nixl", &images, out);
        let mut t = Table::new(["", "GB/s", "ms", "best", "spread"]);
        t.row(timing_row("bare NIXL reads", len, &limit));
        t.row(timing_row("pull by NIXL, checked", len, &checked));
        t.row(timing_row("pull by NIXL, unchecked", len, &unchecked));
        t.row(timing_row("pull over TCP, checked", len, &tcp));
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}

/// Reads the slot into the image, stripe by stripe.
fn bare(link: &Link<'_>, exporter: &Exporter, reader: &Reader, config: &PlaneConfig) -> Result<Spent, Error> {
    link.with_landing(|land| {
        let agent = reader.agent()?;
        agent.register(land.mapping)?;
        let Some((metadata, memory)) = exporter.find(link.slot(), land.data_start)? else {
            return Err(Error::Bug("the slot is not exported".into()));
        };
        let ((), spent) = Spent::on(|| {
            let remote = agent.meet(&metadata)?;
            let (bytes, piece) = (land.manifest.data_bytes(), u64::from(DEFAULT_STRIPE_BYTES));
            let mut ahead = std::collections::VecDeque::new();
            let mut pieces = (0..bytes).step_by(piece as usize).map(|at| at..(at + piece).min(bytes));
            let depth = usize::from(config.streams) * usize::from(DEFAULT_WINDOW);
            loop {
                while ahead.len() < depth
                    && let Some(range) = pieces.next()
                {
                    let here = land.data_start + range.start..land.data_start + range.end;
                    let loan = land.mapping.lend(here).map_err(failed!("write the image"))?;
                    ahead.push_back(remote.read(vec![(loan, memory.address + range.start)])?);
                }
                let Some(oldest) = ahead.front_mut() else { return Ok(()) };
                if oldest.poll()? {
                    ahead.pop_front();
                } else {
                    std::thread::sleep(std::time::Duration::from_micros(50));
                }
            }
        })?;
        Ok(spent)
    })
}
