//! `bench sync`: one step of training from its commit to the receiver's image, against the sum of its parts.
//!
//! A round writes a version into the region of a served publisher, and a receiver that waits for it brings its
//! image there: seal, ask, pull the delta, open, apply, finish, all of it real and in one process. The clock runs
//! from the commit, when the offload is over and the trainer goes on, until engines can read the version. What
//! encoding, sending and applying that very delta take *alone* is measured right after it, each with warm memory:
//! a seal over the two slots, a pull of the delta file, an apply to a scratch image with its table. The control
//! connection is a call: HTTP is not part of this.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use windlass_core::delta::{Delta, Encoder};
use windlass_core::digest::SumTable;
use windlass_core::identity::{StateDigest, Version};
use windlass_core::wire::Mode;
use windlass_data::receiver::{Receiver, Synced};
use windlass_data::region::LeaseKind;
use windlass_data::seal::{self, Base, SealJob};
use windlass_data::shm::{Access, Mapping};
use windlass_data::stop::Stop;
use windlass_data::tcp::{PayloadLanding, PullConfig, Watch, pull};

use super::rig::{BenchDir, Publisher, failed};
use super::{Figure, Images, PlaneConfig, Spent, Timing, merge, reached, write_bars};
use crate::console::round;
use crate::console::{Session, Table, bytes};
use crate::error::Error;
use crate::lab::image;

/// Runs the bench and prints what came out.
pub(crate) fn run(config: &PlaneConfig, session: &Session) -> Result<(), Error> {
    let images = Images::make(&config.bench, session)?;
    let place = BenchDir::new(&config.region_dir)?;
    let mut publisher = Publisher::start(&place, &images, config, session.cancel())?;
    let mut receiver = publisher.receiver(&place, "image")?;
    let mut bench = Bench::new(&images, &place, config)?;

    publisher.commit(1, &images.base)?;
    let mut before = (1, publisher.served(1)?);
    receiver.sync(&publisher.stop()).map_err(failed!("sync the first version"))?;
    receiver.image().map(|i| i.region().report());
    let mut found = Vec::new();
    for turn in 0..=config.bench.repeats.max(1) {
        session.cancel().check()?;
        let (round, digest) = bench.round(&mut publisher, &mut receiver, before)?;
        before = (before.0 + 1, digest);
        if turn > 0 {
            found.push(round);
        }
    }
    report(&found, &images, config, session)
}

/// What one round took, in milliseconds.
struct Round {
    offload: f64,
    total: f64,
    /// From the commit until the version is served.
    sealed: f64,
    synced: Synced,
    encode: f64,
    wire: f64,
    apply: f64,
}

impl Round {
    fn alone(&self) -> f64 {
        self.encode + self.wire + self.apply
    }
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// What the parts are measured with.
struct Bench<'a> {
    images: &'a Images,
    config: &'a PlaneConfig,
    /// The sums of both images, older first.
    sums: [SumTable; 2],
    /// A second image, to apply deltas to.
    scratch: Mapping,
    buffer: Mapping,
    delta: PathBuf,
}

impl<'a> Bench<'a> {
    fn new(images: &'a Images, place: &BenchDir, config: &'a PlaneConfig) -> Result<Bench<'a>, Error> {
        let stop = Stop::never();
        let with = (config.bench.threads, &stop);
        let sum = |data: &[u8]| {
            windlass_data::seal::sums_of_all(windlass_data::simd::kernels(), &images.manifest, data, with)
        };
        let path = place.join("scratch");
        let len = images.base.len() as u64;
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path);
        let map = file.and_then(|f| f.set_len(len).and_then(|()| Mapping::map(&f, len, Access::Write)));
        let scratch = map.map_err(Error::io("map", &path))?;
        scratch.copy_in(0, &images.base);
        let buffer = Mapping::anonymous(len).map_err(Error::io("map", "memory".as_ref()))?;
        Ok(Bench {
            images,
            config,
            sums: [sum(&images.base)?, sum(&images.next)?],
            scratch,
            buffer,
            delta: place.join("delta"),
        })
    }

    /// One step from `before`, and its parts alone.
    fn round(
        &mut self,
        publisher: &mut Publisher<'_>,
        receiver: &mut Receiver,
        before: (Version, StateDigest),
    ) -> Result<(Round, StateDigest), Error> {
        let version = before.0 + 1;
        // Odd versions are the older image, even ones the newer.
        let (old, new) = if version.is_multiple_of(2) { (0, 1) } else { (1, 0) };
        let data = if new == 1 { &self.images.next } else { &self.images.base };
        let stop = publisher.stop();

        let start = Instant::now();
        publisher.commit(version, data)?;
        let offload = millis(start);
        let start = Instant::now();
        receiver.wait_newer(&stop).map_err(failed!("wait for a version"))?;
        let sealed = millis(start);
        let synced = receiver.sync(&stop).map_err(failed!("sync a version"))?;
        let total = millis(start);
        let digest = match &synced.image {
            Some(known) if known.identity.version == version && synced.mode == "delta" => known.digest,
            _ => return Err(Error::Bug(format!("version {version} was not synced by a delta: {synced:?}"))),
        };
        let encode = self.encode(publisher, &self.sums[old])?;
        let (wire, len) = self.wire(publisher, before)?;
        let apply = self.apply(len, old, data)?;
        Ok((Round { offload, total, sealed, synced, encode, wire, apply }, digest))
    }

    /// Seals the committed version once more.
    fn encode(&self, publisher: &Publisher<'_>, base_sums: &SumTable) -> Result<f64, Error> {
        let region = &publisher.region;
        let state = region.state();
        let (Some(active), Some(inactive)) = (state.active, state.inactive) else {
            return Err(Error::Bug("a slot is empty".into()));
        };
        let lease = |id| region.lease(id, LeaseKind::Map, Duration::from_mins(1));
        let (new, old) =
            lease(active.id).and_then(|n| Ok((n, lease(inactive.id)?))).map_err(failed!("read the slots"))?;
        let blocks = (0..region.manifest().cuts().blocks()).into();
        let start = Instant::now();
        seal::seal(SealJob {
            kernels: windlass_data::simd::kernels(),
            manifest: region.manifest(),
            blocks: &blocks,
            model_id: region.model_id(),
            incarnation: region.incarnation(),
            version: active.version,
            new: new.data(),
            base: Some(Base { data: old.data(), sums: base_sums, version: inactive.version }),
            out: Some(&self.delta),
            encoder: Encoder::plain,
            threads: self.config.bench.threads,
            stop: &publisher.stop(),
            progress: &|_| {},
        })?;
        Ok(millis(start))
    }

    /// Pulls the delta from `before` into a buffer; answers its length as well.
    fn wire(&self, publisher: &Publisher<'_>, before: (Version, StateDigest)) -> Result<(f64, u64), Error> {
        let ticket = publisher.ticket(Some(before))?;
        let Mode::Delta { payloads, .. } = &ticket.mode else {
            return Err(Error::Bug("a delta was asked for".into()));
        };
        let len = payloads.iter().map(|p| p.bytes).sum();
        let landing = PayloadLanding { buffers: std::slice::from_ref(&self.buffer) };
        let start = Instant::now();
        pull(&ticket, &landing, &PullConfig::default(), &publisher.stop(), &Watch::default())
            .map_err(failed!("pull a delta"))?;
        Ok((millis(start), len))
    }

    /// Applies the delta in the buffer to the scratch image, which is at the older version.
    fn apply(&self, len: u64, old: usize, wanted: &[u8]) -> Result<f64, Error> {
        let mut data = self.scratch.lend(0..self.scratch.len()).map_err(failed!("write an image"))?;
        let stop = Stop::never();
        let start = Instant::now();
        let delta = Delta::parse(self.buffer.bytes(0..len)).map_err(failed!("read a delta"))?;
        let with = (self.config.bench.threads, &stop);
        image::apply(
            windlass_data::simd::kernels(),
            &self.images.manifest,
            &delta,
            &self.sums[old],
            &mut data,
            with,
        )?;
        let took = millis(start);
        if *data == *wanted { Ok(took) } else { Err(Error::Bug("the delta gives another image".into())) }
    }
}

fn report(found: &[Round], images: &Images, config: &PlaneConfig, session: &Session) -> Result<(), Error> {
    let all = |f: &dyn Fn(&Round) -> f64| -> Vec<Spent> {
        found.iter().map(f).map(|ms| Spent { wall: ms, cpu: 0.0 }).collect()
    };
    let middle = |f: &dyn Fn(&Round) -> f64| Timing::from_rounds(&all(f)).median;
    let (total, alone) = (all(&|r| r.total), all(&Round::alone));
    let ratio = reached(&alone, &total);
    let len = images.base.len() as f64;
    let gbps = |ms: f64| round(len / ms / 1e6);
    let wire_bytes = found.last().map_or(0, |r| r.synced.wire_bytes);
    let bars =
        [Figure { name: "sync / (encode + wire + apply)".into(), value: ratio, bar: 1.2, at_least: false }];
    let (total_ms, alone_ms) = (middle(&|r| r.total), middle(&Round::alone));
    let inside: [(&str, f64); 6] = [
        ("sealed", middle(&|r| r.sealed)),
        ("ask", middle(&|r| r.synced.ask_ms)),
        ("wire", middle(&|r| r.synced.wire_ms)),
        ("open", middle(&|r| r.synced.open_ms)),
        ("apply", middle(&|r| r.synced.apply_ms)),
        ("sync", middle(&|r| r.synced.total_ms)),
    ];
    let parts =
        [("encode", middle(&|r| r.encode)), ("wire", middle(&|r| r.wire)), ("apply", middle(&|r| r.apply))];
    let object = json!({
        "encode_ms": round(parts[0].1),
        "wire_ms": round(parts[1].1),
        "apply_ms": round(parts[2].1),
        "total_ms": round(total_ms),
        "offload_ms": round(middle(&|r| r.offload)),
        "wire_bytes": wire_bytes,
        "gbps": gbps(total_ms),
        "limit_gbps": gbps(alone_ms),
        "ratio": round(ratio),
        "inside_ms": inside.iter().map(|(n, ms)| ((*n).to_owned(), round(*ms).into())).collect::<serde_json::Map<_, _>>(),
        "spread": {
            "total": round(Timing::from_rounds(&total).spread()),
            "alone": round(Timing::from_rounds(&alone).spread()),
        },
        "bars": bars.iter().map(Figure::json).collect::<Vec<_>>(),
    });
    session.finish(merge(config.json("sync", images), object), |out| {
        config.title("sync", images, out);
        let mut t = Table::new(["", "ms"]);
        let mut row = |name: String, ms: f64| t.row([name, format!("{ms:.2}")]);
        row("offload, before the clock starts".into(), middle(&|r| r.offload));
        row(format!("sync of {}", bytes(wire_bytes)), total_ms);
        for (name, ms) in inside {
            row(format!("  of it {name}"), ms);
        }
        for (name, ms) in parts {
            row(format!("{name} alone"), ms);
        }
        row("all three alone".into(), alone_ms);
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}
