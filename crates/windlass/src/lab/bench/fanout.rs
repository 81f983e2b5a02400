//! `bench fanout`: one version to 1, 2, 4, 8 and 16 receivers at once, against the link's bandwidth.
//!
//! A round gives every receiver a thread, which asks for a ticket and pulls it; the clock runs from the first until
//! the last is done. It is done with the full image, checked, and with the delta from the version before. The
//! link's rate is that of bare `sendfile` and `recv` with the streams of one receiver, measured every round. All
//! receivers are on this machine, so they share its cores, and nothing here is about applying deltas.
//!
//! `ratio` is the time that the link needs for the bytes of all receivers, divided by what it took. As long as it
//! does not fall from one receiver to sixteen, time grows with bytes ÷ link. With a delta of a few megabytes most of
//! the time is handshakes and waits: there `ms_per_receiver` says what one receiver more costs, which must be less
//! than the first one takes, and `link_ms` what its bytes do.

use std::fs::File;
use std::sync::Barrier;
use std::time::Duration;

use serde_json::{Value, json};
use windlass_core::identity::{StateDigest, Version};
use windlass_data::shm::Mapping;
use windlass_data::tcp::{ImageLanding, PayloadLanding, PullConfig, Watch, pull};

use super::rig::{BenchDir, Publisher, failed};
use super::{Figure, Images, PlaneConfig, Spent, Timing, merge, reached, write_bars};
use crate::console::round;
use crate::console::{Session, Table, bytes};
use crate::error::Error;
use crate::tools::limits;

/// How many receivers.
const RECEIVERS: [usize; 5] = [1, 2, 4, 8, 16];
const MODES: [&str; 2] = ["full", "delta"];
/// A stream of the limit that stands still for so long is broken.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the bench and prints what came out.
pub(crate) fn run(config: &PlaneConfig, session: &Session) -> Result<(), Error> {
    let images = Images::make(&config.bench, session)?;
    let place = BenchDir::new(&config.region_dir)?;
    let mut publisher = Publisher::start(&place, &images, config, session.cancel())?;
    publisher.commit(1, &images.base)?;
    let base = (1, publisher.served(1)?);
    publisher.commit(2, &images.next)?;
    publisher.served(2)?;
    let delta = publisher.server.delta().map_or(0, |d| d.bytes);
    let most = RECEIVERS.into_iter().max().unwrap_or(1);
    let memory = |len: u64| {
        let mapping = Mapping::anonymous(len).map_err(Error::io("map", "memory".as_ref()))?;
        mapping.prepare();
        Ok(mapping)
    };
    let landed: Vec<Mapping> =
        (0..most).map(|_| memory(images.base.len() as u64)).collect::<Result<_, Error>>()?;
    let path = publisher.region.slot_path(publisher.region.state().active.map_or(0, |s| s.slot));
    let file = File::open(&path).map_err(Error::io("open", &path))?;

    let mut link = Vec::new();
    let mut times = vec![Vec::new(); RECEIVERS.len() * MODES.len()];
    for turn in 0..=config.bench.repeats.max(1) {
        session.cancel().check()?;
        let mut whole = landed[0].lend(0..landed[0].len()).map_err(failed!("write an image"))?;
        let (wall, bare) = Spent::on(|| {
            let bare = limits::loopback(config.streams.into(), &file, &mut whole, TIMEOUT);
            bare.map_err(Error::io("send", "the image".as_ref()))
        })?;
        let bare = Spent { wall: wall.as_secs_f64(), ..bare };
        drop(whole);
        if turn > 0 {
            link.push(bare);
        }
        for (case, times) in times.iter_mut().enumerate() {
            let (mode, receivers) = (case / RECEIVERS.len(), RECEIVERS[case % RECEIVERS.len()]);
            let have = (MODES[mode] == "delta").then_some(base);
            let took = all_pull(&publisher, &landed[..receivers], have)?;
            if turn > 0 {
                times.push(took);
            }
        }
    }
    for image in &landed {
        // The delta came last and lies over the beginning.
        let range = delta..image.len();
        if image.bytes(range.clone()) != &images.next[range.start as usize..] {
            return Err(Error::Bug("a receiver has another image".into()));
        }
    }
    let rows: Vec<Row> = times
        .iter()
        .enumerate()
        .map(|(case, times)| {
            let (mode, receivers) = (MODES[case / RECEIVERS.len()], RECEIVERS[case % RECEIVERS.len()]);
            let each = if mode == "full" { images.base.len() as f64 } else { delta as f64 };
            let share = each * receivers as f64 / images.base.len() as f64;
            let needed = &link_times(&link, share);
            Row { mode, receivers, each, ratio: reached(times, needed), timing: Timing::from_rounds(times) }
        })
        .collect();
    report(&rows, &link, &images, config, session)
}

/// What the link would have needed in each round for this many images.
fn link_times(link: &[Spent], share: f64) -> Vec<Spent> {
    link.iter().map(|t| Spent { wall: t.wall * share, cpu: t.cpu * share }).collect()
}

/// All receivers at once.
fn all_pull(
    publisher: &Publisher<'_>,
    memory: &[Mapping],
    have: Option<(Version, StateDigest)>,
) -> Result<Spent, Error> {
    let ready = Barrier::new(memory.len() + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = memory
            .iter()
            .map(|mapping| {
                let ready = &ready;
                scope.spawn(move || {
                    ready.wait();
                    one_pull(publisher, mapping, have)
                })
            })
            .collect();
        let ((), spent) = Spent::on(|| {
            ready.wait();
            threads.into_iter().try_for_each(|t| {
                t.join().unwrap_or_else(|_| Err(Error::Bug("a receiver's thread panicked".into())))
            })
        })?;
        Ok(spent)
    })
}

fn one_pull(
    publisher: &Publisher<'_>,
    mapping: &Mapping,
    have: Option<(Version, StateDigest)>,
) -> Result<(), Error> {
    let ticket = publisher.ticket(have)?;
    let (config, stop, watch) = (PullConfig::default(), publisher.stop(), Watch::default());
    let pulled = if have.is_some() {
        let buffers = std::slice::from_ref(mapping);
        pull(&ticket, &PayloadLanding { buffers }, &config, &stop, &watch)
    } else {
        let landing = ImageLanding {
            manifest: publisher.region.manifest(),
            mapping,
            data_start: 0,
            kernels: windlass_data::simd::kernels(),
            proof: None,
            landed: &|_, _| {},
            finish: &|| Ok(()),
        };
        pull(&ticket, &landing, &config, &stop, &watch)
    };
    pulled.map_err(failed!("pull a version"))?;
    Ok(())
}

struct Row {
    mode: &'static str,
    receivers: usize,
    /// Bytes for each receiver.
    each: f64,
    /// How much of the link was used.
    ratio: f64,
    timing: Timing,
}

impl Row {
    fn bytes(&self) -> f64 {
        self.each * self.receivers as f64
    }
}

fn report(
    rows: &[Row],
    link: &[Spent],
    images: &Images,
    config: &PlaneConfig,
    session: &Session,
) -> Result<(), Error> {
    let link = Timing::from_rounds(link);
    let limit = link.gbps(images.base.len());
    let alone = |row: &Row| rows.iter().find(|r| r.mode == row.mode && r.receivers == 1);
    let more = |row: &Row| {
        let one = alone(row)?;
        (row.receivers > 1)
            .then(|| (row.timing.median - one.timing.median) * 1e3 / (row.receivers - 1) as f64)
    };
    let most = RECEIVERS.into_iter().max().unwrap_or(1);
    let last = |mode| rows.iter().find(|r| r.mode == mode && r.receivers == most);
    let mut bars = Vec::new();
    if let Some(row) = last("full") {
        let name = format!("full: bytes / link / time, {most} receivers");
        bars.push(Figure { name, value: row.ratio, bar: 0.7, at_least: true });
    }
    if let Some((row, one)) = last("delta").and_then(|row| Some((row, alone(row)?))) {
        let name = "delta: time of one receiver more / of the first".into();
        let value = more(row).unwrap_or(0.0) / one.timing.median / 1e3;
        bars.push(Figure { name, value, bar: 0.8, at_least: false });
    }
    let object = |row: &Row| -> Value {
        json!({
            "mode": row.mode,
            "receivers": row.receivers,
            "bytes": row.bytes(),
            "ms": round(row.timing.median * 1e3),
            "gbps": round(row.timing.gbps(row.bytes() as usize)),
            "limit_gbps": round(limit),
            "ratio": round(row.ratio),
            "link_ms": round(row.each / limit / 1e6),
            "ms_per_receiver": more(row).map(round),
            "spread": round(row.timing.spread()),
        })
    };
    let last = last("full");
    let figures = json!({
        "gbps": last.map(|r| round(r.timing.gbps(r.bytes() as usize))),
        "limit_gbps": round(limit),
        "ratio": last.map(|r| round(r.ratio)),
        "rows": rows.iter().map(object).collect::<Vec<_>>(),
        "spread": { "limit": round(link.spread()) },
        "bars": bars.iter().map(Figure::json).collect::<Vec<_>>(),
    });
    session.finish(merge(config.json("fanout", images), figures), |out| {
        config.title("fanout", images, out);
        let mut t = Table::new(["", "receivers", "bytes", "ms", "GB/s", "of the link", "ms for one more"]);
        t.row([
            "sendfile to recv".into(),
            String::new(),
            bytes(images.base.len() as u64),
            format!("{:.2}", link.median * 1e3),
            format!("{limit:.2}"),
            String::new(),
            String::new(),
        ]);
        for row in rows {
            t.row([
                row.mode.into(),
                row.receivers.to_string(),
                bytes(row.bytes() as u64),
                format!("{:.2}", row.timing.median * 1e3),
                format!("{:.2}", row.timing.gbps(row.bytes() as usize)),
                format!("{:.2}", row.ratio),
                more(row).map_or(String::new(), |ms| format!("{ms:.2}")),
            ]);
        }
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}
