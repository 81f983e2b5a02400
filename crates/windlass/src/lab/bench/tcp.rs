//! `bench tcp`: a full image from a server to a receiver's image over loopback, against bare `sendfile` and `recv`.
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
use windlass_data::nixl::{Exporter, Reader};
use windlass_data::tcp::{ImageLanding, PullConfig, Watch, pull};
use windlass_data::tls::{Certificate, PLAIN, Privacy};

use super::rig::{self, BenchDir, Publisher, failed};
use super::{
    Figure, Images, PlaneConfig, Spent, Timing, merge, reached, reached_cpu, timing_row, write_bars,
};
use crate::console::round;
use crate::console::{Session, Table};
use crate::error::Error;
use crate::tools::limits;

/// A stream of the limit that stands still for so long is broken.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the bench and prints what came out. With `tls`, pulls inside TLS are measured in the same rounds, from a second
/// publisher of the same bytes.
pub(crate) fn run(config: &PlaneConfig, tls: bool, session: &Session) -> Result<(), Error> {
    let images = Images::make(&config.bench, session)?;
    let place = BenchDir::new(&config.region_dir)?;
    let mut times = Times::default();
    with_link(config, session, &images, (&place, None, None), |link| {
        let mut measure = |inside: Option<&Link<'_>>| {
            for turn in 0..=config.bench.repeats {
                session.cancel().check()?;
                times.round(turn > 0, link, inside)?;
            }
            Ok(())
        };
        if !tls {
            return measure(None);
        }
        let place = BenchDir::new(&config.region_dir)?;
        let tls = rig::certificate(&place)?;
        with_link(config, session, &images, (&place, Some(&tls), None), |inside| measure(Some(inside)))
    })?;
    report(config, session, &images, &times)
}

/// What the rounds took.
#[derive(Default)]
struct Times {
    limit: Vec<Spent>,
    checked: Vec<Spent>,
    unchecked: Vec<Spent>,
    inside: Vec<Spent>,
}

impl Times {
    fn round(&mut self, counts: bool, link: &Link<'_>, inside: Option<&Link<'_>>) -> Result<(), Error> {
        let times = [link.bare()?, link.pull(true)?, link.pull(false)?];
        let inside = inside.map(|link| link.pull(true)).transpose()?;
        if counts {
            self.limit.push(times[0]);
            self.checked.push(times[1]);
            self.unchecked.push(times[2]);
            self.inside.extend(inside);
        }
        Ok(())
    }
}

/// The two ends of NIXL.
pub(super) type Nixl<'a> = (Arc<Exporter>, &'a Reader);

/// Publishes the image in a place of its own, with a certificate or with exported memory, and lends both ends of the link.
pub(super) fn with_link(
    config: &PlaneConfig,
    session: &Session,
    images: &Images,
    (place, tls, nixl): (&BenchDir, Option<&(Certificate, Privacy)>, Option<Nixl<'_>>),
    work: impl FnOnce(&Link<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let certificate = tls.map(|(certificate, _)| certificate.clone());
    let (exporter, reader) = nixl.unzip();
    let data = (certificate, exporter);
    let mut publisher = Publisher::start_with(place, images, config, session.cancel(), data)?;
    publisher.commit(1, &images.base)?;
    publisher.served(1)?;
    let spec = rig::image_spec(place, "image", config.bench.threads)?;
    let manifest = Arc::clone(publisher.region.manifest());
    let mut image =
        Image::create(spec, manifest, None, &publisher.stop()).map_err(failed!("make an image"))?;
    image.region().report();
    let refresh = image.refresh(&publisher.stop()).map_err(failed!("open the image"))?;
    let path = publisher.region.slot_path(publisher.region.state().active.map_or(0, |s| s.slot));
    let file = File::open(&path).map_err(Error::io("open", &path))?;
    let privacy = tls.map_or(&PLAIN, |(_, privacy)| privacy);
    let link =
        Link { publisher: &publisher, refresh: &refresh, file, privacy, reader, streams: config.streams };
    work(&link)?;
    link.check(&images.base)
}

fn report(config: &PlaneConfig, session: &Session, images: &Images, times: &Times) -> Result<(), Error> {
    let Times { limit, checked, unchecked, inside } = times;
    let (ratio, ratio_unchecked) = (reached(checked, limit), reached(unchecked, limit));
    let (cpu, cpu_unchecked) = (reached_cpu(checked, limit), reached_cpu(unchecked, limit));
    let len = images.base.len();
    // Of a pull without TLS, not of the bare connections: what TLS costs.
    let tls = (!inside.is_empty())
        .then(|| (Timing::from_rounds(inside), reached(inside, checked), reached_cpu(inside, checked)));
    let [limit, checked, unchecked] = [limit, checked, unchecked].map(|t| Timing::from_rounds(t));
    let bar = |name: &str, value, bar| Figure { name: name.into(), value, bar, at_least: true };
    let bars = [bar("checked / bare", ratio, 0.7), bar("unchecked / bare", ratio_unchecked, 0.9)];
    let mut object = json!({
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
        "bars": bars.iter().map(Figure::json).collect::<Vec<_>>(),
    });
    if let Some((timing, ratio, cpu)) = &tls {
        object["tls"] = json!({
            "gbps": round(timing.gbps(len)),
            "ratio_to_plain": round(*ratio),
            "cpu_ratio_to_plain": round(*cpu),
            "best_ms": round(timing.min * 1e3),
            "spread": round(timing.spread()),
        });
    }
    session.finish(merge(config.json("tcp", images), object), |out| {
        config.title("tcp", images, out);
        let mut t = Table::new(["", "GB/s", "ms", "best", "spread"]);
        t.row(timing_row("sendfile to recv", len, &limit));
        t.row(timing_row("pull, checked", len, &checked));
        t.row(timing_row("pull, unchecked", len, &unchecked));
        if let Some((timing, _, _)) = &tls {
            t.row(timing_row("pull, checked, TLS", len, timing));
        }
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}

/// Both ends.
pub(super) struct Link<'a> {
    publisher: &'a Publisher<'a>,
    refresh: &'a Refresh<'a>,
    file: File,
    privacy: &'a Privacy,
    reader: Option<&'a Reader>,
    streams: u16,
}

impl Link<'_> {
    /// One pull, over TCP alone or by reading memory.
    pub(super) fn pull_by(&self, nixl: bool, verify: bool) -> Result<Spent, Error> {
        let ticket = self.publisher.ticket(None)?;
        let reader = self.reader.filter(|_| nixl);
        let config = PullConfig { verify, privacy: self.privacy, nixl: reader, ..PullConfig::default() };
        let (stop, watch) = (self.publisher.stop(), Watch::default());
        let ((), spent) = Spent::on(|| {
            let pulled = self.refresh.land(&ticket, None, |land| pull(&ticket, land, &config, &stop, &watch));
            pulled.map_err(failed!("pull the image"))?;
            Ok(())
        })?;
        match watch.unread() {
            Some(why) => Err(Error::Bug(format!("the image was not read by NIXL: {why}"))),
            None => Ok(spent),
        }
    }

    fn pull(&self, verify: bool) -> Result<Spent, Error> {
        self.pull_by(false, verify)
    }

    /// The slot that is served.
    pub(super) fn slot(&self) -> &File {
        &self.file
    }

    /// The same bytes over bare connections.
    fn bare(&self) -> Result<Spent, Error> {
        self.with_data(|data| {
            let (wall, spent) = Spent::on(|| {
                let took = limits::loopback(self.streams.into(), &self.file, data, TIMEOUT);
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
        self.with_landing(|land| {
            let end = land.data_start + land.manifest.data_bytes();
            let mut loan = land.mapping.lend(land.data_start..end).map_err(failed!("write the image"))?;
            f(&mut loan)
        })
    }

    /// Lends the image to be written.
    pub(super) fn with_landing<T>(
        &self,
        f: impl FnOnce(&ImageLanding<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let ticket = self.publisher.ticket(None)?;
        self.refresh.land(&ticket, None, f)
    }
}
