//! `bench tcp`: a full image from a server to a receiver's image over loopback, beside bare `sendfile` and `recv`.
//!
//! A round is one pull of one ticket ([`windlass_data::tcp::pull`]), dialling and handshakes included, from the slot of
//! a served region into a receiver's image. It is run with the sums checked, as always outside of this bench, and
//! without. The limit moves as many bytes from the same file into the same memory over as many connections, which are
//! there before its clock starts. All of the memory has been written to before.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use windlass_data::image::{Image, Refresh};
use windlass_data::tcp::{PullConfig, Watch, pull};

use super::rig::{self, Place, Publisher, failed};
use super::{
    Bar, Images, PlaneConfig, Spent, Timing, baseline, merge, reached, reached_cpu, round, timing_row,
    write_bars,
};
use crate::error::Error;
use crate::session::{Session, Table};

/// A stream of the limit that stands still for so long is broken.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs the bench and prints what came out.
pub fn run(config: &PlaneConfig, session: &Session) -> Result<(), Error> {
    let images = Images::make(&config.bench, session)?;
    let place = Place::new(&config.region_dir)?;
    let mut publisher = Publisher::start(&place, &images, config, session.cancel())?;
    publisher.commit(1, &images.base)?;
    publisher.served(1)?;
    let spec = rig::image_spec(&place, "image", config.bench.threads)?;
    let manifest = Arc::clone(publisher.region.manifest());
    let mut image = Image::create(spec, manifest).map_err(failed!("make an image"))?;
    image.region().report();
    let refresh = image.refresh(&publisher.stop()).map_err(failed!("open the image"))?;
    let path = publisher.region.slot_path(publisher.region.state().active.map_or(0, |s| s.slot));
    let file = File::open(&path).map_err(Error::io("open", &path))?;
    let link = Link { publisher: &publisher, refresh: &refresh, file, streams: config.streams };

    let (mut limit, mut checked, mut unchecked) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..=config.bench.repeats {
        session.cancel().check()?;
        let times = [link.bare()?, link.pull(true)?, link.pull(false)?];
        if turn > 0 {
            limit.push(times[0]);
            checked.push(times[1]);
            unchecked.push(times[2]);
        }
    }
    link.check(&images.base)?;

    let (ratio, ratio_unchecked) = (reached(&checked, &limit), reached(&unchecked, &limit));
    let (cpu, cpu_unchecked) = (reached_cpu(&checked, &limit), reached_cpu(&unchecked, &limit));
    let len = images.base.len();
    let [limit, checked, unchecked] = [&limit, &checked, &unchecked].map(|t| Timing::from_rounds(t));
    let bar = |name: &str, value, bar| Bar { name: name.into(), value, bar, at_least: true };
    let bars = [bar("checked / bare", ratio, 0.7), bar("unchecked / bare", ratio_unchecked, 0.9)];
    let object = json!({
        "gbps": round(checked.gbps(len)),
        "unchecked_gbps": round(unchecked.gbps(len)),
        "limit_gbps": round(limit.gbps(len)),
        "ratio": round(ratio),
        "ratio_unchecked": round(ratio_unchecked),
        "cpu_ratio": round(cpu),
        "cpu_ratio_unchecked": round(cpu_unchecked),
        "best_ms": {
            "checked": round(checked.min * 1e3),
            "unchecked": round(unchecked.min * 1e3),
            "limit": round(limit.min * 1e3),
        },
        "spread": {
            "checked": round(checked.spread()),
            "unchecked": round(unchecked.spread()),
            "limit": round(limit.spread()),
        },
        "bars": bars.iter().map(Bar::json).collect::<Vec<_>>(),
    });
    session.finish(merge(config.json("tcp", &images), object), |out| {
        config.title("tcp", &images, out);
        let mut t = Table::new(["", "GB/s", "ms", "best", "spread"]);
        t.row(timing_row("sendfile to recv", len, &limit));
        t.row(timing_row("pull, checked", len, &checked));
        t.row(timing_row("pull, unchecked", len, &unchecked));
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}

/// Both ends.
struct Link<'a> {
    publisher: &'a Publisher<'a>,
    refresh: &'a Refresh<'a>,
    file: File,
    streams: u16,
}

impl Link<'_> {
    /// One pull.
    fn pull(&self, verify: bool) -> Result<Spent, Error> {
        let ticket = self.publisher.ticket(None)?;
        let config = PullConfig { verify, ..PullConfig::default() };
        let stop = self.publisher.stop();
        let ((), spent) = Spent::on(|| {
            let pulled =
                self.refresh.land(&ticket, |land| pull(&ticket, land, &config, &stop, &Watch::default()));
            pulled.map_err(failed!("pull the image"))?;
            Ok(())
        })?;
        Ok(spent)
    }

    /// The same bytes over bare connections.
    fn bare(&self) -> Result<Spent, Error> {
        self.with_data(|data| {
            let (wall, spent) = Spent::on(|| {
                let took = baseline::loopback(self.streams.into(), &self.file, data, PATIENCE);
                took.map_err(Error::io("send", "the image".as_ref()))
            })?;
            // Connecting and starting threads are not in it.
            Ok(Spent { wall: wall.as_secs_f64(), ..spent })
        })
    }

    /// Whether the image has these bytes.
    fn check(&self, bytes: &[u8]) -> Result<(), Error> {
        self.with_data(|data| {
            if data == bytes {
                Ok(())
            } else {
                Err(Error::Bug("the image is not the one that was sent".into()))
            }
        })
    }

    fn with_data<T>(&self, f: impl FnOnce(&mut [u8]) -> Result<T, Error>) -> Result<T, Error> {
        let ticket = self.publisher.ticket(None)?;
        self.refresh.land(&ticket, |land| {
            let end = land.data_start + land.manifest.data_bytes();
            let mut loan = land.mapping.lend(land.data_start..end).map_err(failed!("write the image"))?;
            f(&mut loan)
        })
    }
}
