//! What the benches of the data plane run on: a publisher and its receivers, in this process, with real regions and
//! real sockets on 127.0.0.1.
//!
//! Owns: the directory in which they live, which goes when it is dropped, and how their errors become the
//! command's. Must not: measure anything.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use windlass_core::address::Host;
use windlass_core::error::Kind;
use windlass_core::identity::{ModelId, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::Ticket;
use windlass_core::wire::control::{Have, Registration, RequestMode, TransferAnswer, TransferRequest};
use windlass_data::image::ImageSpec;
use windlass_data::nixl::Exporter;
use windlass_data::publish::{self, PublishError};
use windlass_data::receiver::{Control, Receiver, ReceiverConfig};
use windlass_data::region::{Attempt, Memfd, Region, RegionSpec};
use windlass_data::serve::{Server, ServerConfig};
use windlass_data::stop::Stop;
use windlass_data::tcp::PullConfig;
use windlass_data::tls::{Certificate, Privacy, Trust};

use super::{Images, PlaneConfig};
use crate::error::Error;

/// Nothing that a bench waits for takes so long unless something is broken.
const TIMEOUT: Duration = Duration::from_mins(2);

/// For `map_err` on what the data plane says.
macro_rules! failed {
    ($doing:literal) => {
        |e| $crate::error::Error::Plane { doing: $doing, kind: e.kind(), source: Box::new(e) }
    };
}
pub(super) use failed;

pub(super) fn publish_failed(e: PublishError) -> Error {
    Error::Plane { doing: "publish a version", kind: e.kind(), source: Box::new(e) }
}

/// A directory of the bench's own, gone when it is dropped.
#[derive(Debug)]
pub(crate) struct BenchDir(PathBuf);

impl BenchDir {
    /// Makes one in `parent`.
    pub(crate) fn new(parent: &Path) -> Result<BenchDir, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("windlass-bench-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).map_err(Error::io("create", &path))?;
        Ok(BenchDir(path))
    }

    /// Something in it.
    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for BenchDir {
    fn drop(&mut self) {
        // A leftover is harmless, and a benchmark has no error to report.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn model_id() -> Result<ModelId, Error> {
    ModelId::new("bench").map_err(|e| Error::Bug(e.to_string()))
}

/// Makes a region of two slots for `ranks` writers, all of its pages touched.
pub(crate) fn region(place: &BenchDir, manifest: &Arc<Manifest>, ranks: u16) -> Result<Arc<Region>, Error> {
    let spec =
        RegionSpec { ranks, ..RegionSpec::new(place.join("region"), model_id()?, Arc::clone(manifest)) };
    Region::create(&spec).map_err(failed!("make a region"))
}

/// A region with one rank, being served.
pub(crate) struct Publisher<'a> {
    config: &'a PlaneConfig,
    cancel: &'a Stop,
    pub(crate) region: Arc<Region>,
    pub(crate) server: Arc<Server>,
    writer: publish::Publisher,
    instance: String,
}

impl<'a> Publisher<'a> {
    /// Makes a region and serves it.
    pub(crate) fn start(
        place: &BenchDir,
        images: &Images,
        config: &'a PlaneConfig,
        cancel: &'a Stop,
    ) -> Result<Publisher<'a>, Error> {
        Publisher::start_with(place, images, config, cancel, (None, None))
    }

    /// The same with a certificate, or with exported memory.
    pub(crate) fn start_with(
        place: &BenchDir,
        images: &Images,
        config: &'a PlaneConfig,
        cancel: &'a Stop,
        (tls, nixl): (Option<Certificate>, Option<Arc<Exporter>>),
    ) -> Result<Publisher<'a>, Error> {
        let region = region(place, &Arc::new(images.manifest.clone()), 1)?;
        let writer = publish::Publisher::new(Arc::clone(&region), 0);
        let writer = writer.map_err(failed!("write the region"))?;
        region.report();
        let host = Host::new("127.0.0.1").map_err(|e| Error::Bug(e.to_string()))?;
        let mut serving = ServerConfig {
            threads: config.bench.threads,
            streams: config.streams,
            ..ServerConfig::new(host)
        };
        serving.tcp.max_handshakes_per_peer = serving.tcp.max_handshakes;
        serving.tcp.tls = tls;
        serving.tcp.nixl = nixl;
        let server = Server::start(Arc::clone(&region), serving).map_err(failed!("serve the region"))?;
        let registered = server.register(&Registration::default(), 0).map_err(failed!("register"))?;
        let instance = registered.instance_id;
        Ok(Publisher { config, cancel, region, server: Arc::new(server), writer, instance })
    }

    /// A deadline that no healthy bench reaches.
    pub(crate) fn stop(&self) -> Stop {
        self.cancel.with_timeout(TIMEOUT)
    }

    /// Writes a version with all threads and commits it.
    pub(crate) fn commit(&mut self, version: Version, data: &[u8]) -> Result<(), Error> {
        let stop = self.stop();
        let share = data.len().div_ceil(self.config.bench.threads).max(1);
        let write = |attempt: &Attempt<'_>| {
            std::thread::scope(|scope| {
                let writes: Vec<_> = (0u64..)
                    .zip(data.chunks(share))
                    .map(|(i, part)| scope.spawn(move || attempt.write(i * share as u64, part)))
                    .collect();
                writes.into_iter().try_for_each(|w| match w.join() {
                    Ok(written) => Ok(written?),
                    Err(panic) => std::panic::resume_unwind(panic),
                })
            })
        };
        self.writer.copy(version, &stop, write).map_err(publish_failed)
    }

    /// Waits until a version is sealed and served; answers its digest.
    pub(crate) fn served(&self, version: Version) -> Result<StateDigest, Error> {
        let seen = version.checked_sub(1).map(|v| (self.region.incarnation(), v));
        let info = self.server.wait_version(seen, &self.stop());
        let digest = info.digest.filter(|_| info.version == Some(version));
        digest.ok_or_else(|| Error::Plane {
            doing: "seal a version",
            kind: Kind::Timeout,
            source: self
                .server
                .failure()
                .unwrap_or_else(|| format!("version {version} is not served"))
                .into(),
        })
    }

    /// A ticket for the newest version: a delta from `have`, or all of it.
    pub(crate) fn ticket(&self, have: Option<(Version, StateDigest)>) -> Result<Ticket, Error> {
        let incarnation = self.region.incarnation();
        let request = TransferRequest {
            instance_id: self.instance.clone(),
            mode: if have.is_some() { RequestMode::Delta } else { RequestMode::Full },
            have: have.map(|(version, digest)| Have { incarnation, version, digest }),
            version: None,
            layout_hash: None,
            wanted: None,
            keeps: None,
            streams: Some(self.config.streams),
            timeout_ms: Some(TIMEOUT.as_millis() as u64),
            relay: None,
        };
        match self.server.request(&request, &self.stop()).map_err(failed!("ask for a ticket"))? {
            TransferAnswer::Granted(granted) => granted.ticket().map_err(failed!("read a ticket")),
            TransferAnswer::Refused(refused) => {
                Err(Error::Plane { doing: "get a ticket", kind: refused.kind, source: refused.reason.into() })
            }
        }
    }

    /// A receiver with an image of its own.
    pub(crate) fn receiver(&self, place: &BenchDir, name: &str) -> Result<Receiver, Error> {
        let config = ReceiverConfig {
            slice: None,
            image: image_spec(place, name, self.config.bench.threads)?,
            name: name.to_owned(),
            mode: RequestMode::Auto,
            streams: Some(self.config.streams),
            transfer_timeout: TIMEOUT,
            open_timeout: TIMEOUT,
            pull: PullConfig::default(),
            allow: None,
            keep: None,
            share: None,
            nixl: None,
            relaying: None,
        };
        let control = Arc::clone(&self.server) as Arc<dyn Control>;
        Receiver::open(config, control, None, &self.stop()).map_err(failed!("open an image"))
    }
}

/// A certificate for 127.0.0.1 whose key is public, and its authority: for measurements only.
pub(crate) fn certificate(place: &BenchDir) -> Result<(Certificate, Privacy), Error> {
    let write = |name: &str, pem: &str| {
        let path = place.join(name);
        let mut file = std::fs::OpenOptions::new();
        let file = file.create_new(true).write(true).mode(0o600).open(&path);
        file.and_then(|mut f| f.write_all(pem.as_bytes())).map_err(Error::io("write", &path))?;
        Ok::<_, Error>(path)
    };
    let certificate = write("server.pem", include_str!("tls/server.pem"))?;
    let key = write("server.key", include_str!("tls/server.key"))?;
    let trust = Trust::of_file(&write("ca.pem", include_str!("tls/ca.pem"))?)?;
    Ok((Certificate::read(&certificate, &key)?, Privacy { trust: Some(trust), required: true }))
}

/// Where an image of the bench lies.
pub(crate) fn image_spec(place: &BenchDir, name: &str, threads: usize) -> Result<ImageSpec, Error> {
    let dir = place.join(name);
    Ok(ImageSpec { dir, model_id: model_id()?, group: false, memfd: Memfd::Auto, threads })
}
