//! The suite for links and loaders, instantiated for TCP, TCP inside TLS and shared memory.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::authority::{Authority, store};
use windlass_core::address::Token;
use windlass_core::digest::BlockSum;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_core::manifest::Manifest;
use windlass_core::sync_info::{AgentWeightSyncInfo, WeightSyncInfo};
use windlass_core::wire::control::{
    Registered, Registration, TransferAnswer, TransferDone, TransferRequest, VersionInfo,
};
use windlass_data::conformance::{LinkUnderTest, MemoryEngine, region_dir};
use windlass_data::receiver::{Control, ControlError};
use windlass_data::roles::{
    ControlPlane, EngineConfig, NixlTransferStrategy, PublisherConfig, Reachable, RoleError,
    ShmTransferStrategy, TcpTransferStrategy, WeightTransferReceiver, WeightTransferSender,
    WeightTransferStrategy,
};
use windlass_data::serve::Server;
use windlass_data::stop::Stop;
use windlass_data::tls::{Certificate, Privacy, Trust};

windlass_data::link_conformance!(tcp, super::Tcp);
windlass_data::link_conformance!(tls, super::Tls::new());
windlass_data::link_conformance!(shm, super::Shm);
windlass_data::link_conformance!(nixl_over_tcp, super::Nixl::new(super::NIXL_TCP));
windlass_data::link_conformance!(nixl_over_shm, super::Nixl::new(super::NIXL_SHM));
windlass_data::loader_conformance!(memory_engine_over_tcp, super::Tcp, super::MemoryEngine::default());
windlass_data::loader_conformance!(memory_engine_over_shm, super::Shm, super::MemoryEngine::default());

struct Tcp;

impl LinkUnderTest for Tcp {
    fn strategy(&self, _: &Path) -> Arc<dyn WeightTransferStrategy> {
        Arc::new(TcpTransferStrategy::new(Arc::new(OneProcess::default())))
    }

    fn damaging(&self, _: &Path) -> Option<Arc<dyn WeightTransferStrategy>> {
        let plane = OneProcess { damage: Some((30_000, Arc::default())), ..OneProcess::default() };
        Some(Arc::new(TcpTransferStrategy::new(Arc::new(plane))))
    }
}

/// TCP with a certificate.
struct Tls {
    certificate: Certificate,
    privacy: Privacy,
    flipped: Arc<AtomicBool>,
}

impl Tls {
    fn new() -> Tls {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let authority = Authority::new();
        let (certificate, key) = store(dir.path(), "server", &authority.issue(&["127.0.0.1"]));
        let trust = Trust::of_file(&authority.file(dir.path(), "ca.pem")).unwrap();
        let certificate = Certificate::read(&certificate, &key).unwrap();
        let privacy = Privacy { trust: Some(trust), required: true };
        Tls { certificate, privacy, flipped: Arc::default() }
    }

    fn over(&self, damage: bool) -> Arc<dyn WeightTransferStrategy> {
        let damage = damage.then(|| (30_000, Arc::clone(&self.flipped)));
        let plane = OneProcess { damage, privacy: self.privacy.clone(), ..OneProcess::default() };
        let tcp = TcpTransferStrategy::new(Arc::new(plane));
        Arc::new(Certified { tcp, certificate: self.certificate.clone() })
    }
}

impl LinkUnderTest for Tls {
    fn strategy(&self, _: &Path) -> Arc<dyn WeightTransferStrategy> {
        self.over(false)
    }

    fn damaged(&self) -> Option<bool> {
        Some(self.flipped.load(Ordering::SeqCst))
    }

    fn damaging(&self, _: &Path) -> Option<Arc<dyn WeightTransferStrategy>> {
        Some(self.over(true))
    }
}

/// Gives publishers a certificate.
struct Certified {
    tcp: TcpTransferStrategy,
    certificate: Certificate,
}

impl WeightTransferStrategy for Certified {
    fn name(&self) -> &'static str {
        self.tcp.name()
    }

    fn request_type(&self) -> &'static str {
        self.tcp.request_type()
    }

    fn create_sender(&self, mut config: PublisherConfig) -> Result<Box<dyn WeightTransferSender>, RoleError> {
        config.server.tcp.tls = Some(self.certificate.clone());
        self.tcp.create_sender(config)
    }

    fn create_receiver(
        &self,
        info: &WeightSyncInfo,
        config: EngineConfig,
        stop: &Stop,
    ) -> Result<Box<dyn WeightTransferReceiver>, RoleError> {
        self.tcp.create_receiver(info, config, stop)
    }
}

/// UCX by its TCP alone.
const NIXL_TCP: &[(&str, &str)] = &[("engine_config", "TLS=tcp")];
/// UCX by shared memory alone, which cannot tell of a peer's death.
const NIXL_SHM: &[(&str, &str)] = &[("engine_config", "TLS=shm"), ("ucx_error_handling_mode", "none")];

/// NIXL with these parameters.
struct Nixl {
    params: &'static [(&'static str, &'static str)],
    flipped: Arc<AtomicBool>,
}

impl Nixl {
    fn new(params: &'static [(&'static str, &'static str)]) -> Nixl {
        Nixl { params, flipped: Arc::default() }
    }

    fn over(&self, plane: OneProcess) -> Arc<dyn WeightTransferStrategy> {
        let config = windlass_data::conformance::nixl(self.params).unwrap();
        Arc::new(NixlTransferStrategy::new(Arc::new(plane), config))
    }
}

impl LinkUnderTest for Nixl {
    fn strategy(&self, _: &Path) -> Arc<dyn WeightTransferStrategy> {
        self.over(OneProcess::default())
    }

    fn missing(&self) -> Option<String> {
        windlass_data::conformance::nixl(self.params).err()
    }

    fn damaged(&self) -> Option<bool> {
        Some(self.flipped.load(Ordering::SeqCst))
    }

    /// What a stream carries besides reads is hashes: a flipped bit among them makes right bytes look wrong.
    fn damaging(&self, _: &Path) -> Option<Arc<dyn WeightTransferStrategy>> {
        let damage = Some((800, Arc::clone(&self.flipped)));
        Some(self.over(OneProcess { damage, ..OneProcess::default() }))
    }
}

struct Shm;

impl LinkUnderTest for Shm {
    fn strategy(&self, home: &Path) -> Arc<dyn WeightTransferStrategy> {
        Arc::new(ShmTransferStrategy::new(region_dir(home)))
    }

    fn moves_bytes(&self) -> bool {
        false
    }

    fn keeps_image(&self) -> bool {
        false
    }
}

/// Control connections that are calls: both sides are in this process. The data goes over real sockets.
#[derive(Clone, Default)]
struct OneProcess {
    server: Arc<Mutex<Weak<Server>>>,
    /// Data goes through a wire that flips a bit of this byte of a stream, and says here when it has.
    damage: Option<(usize, Arc<AtomicBool>)>,
    privacy: Privacy,
}

impl OneProcess {
    fn server(&self) -> Result<Arc<Server>, ControlError> {
        self.server.lock().upgrade().ok_or_else(|| ControlError::Lost {
            peer: self.peer(),
            what: "ask",
            why: "it is gone".into(),
            kind: Kind::PeerLost,
        })
    }
}

impl ControlPlane for OneProcess {
    fn serve(&self, server: &Arc<Server>) -> Result<Reachable, ControlError> {
        *self.server.lock() = Arc::downgrade(server);
        let endpoint = format!("http://{}", server.data_endpoint()).parse().unwrap();
        let (token, model) =
            (Token::new("not-used-in-one-process").unwrap(), server.region().model_id().clone());
        let info = AgentWeightSyncInfo::new(vec![endpoint], token, model, None).unwrap();
        Ok(Reachable { info, hold: Box::new(()) })
    }

    fn connect(&self, _: &AgentWeightSyncInfo) -> Result<Arc<dyn Control>, ControlError> {
        Ok(Arc::new(self.clone()))
    }
}

impl Control for OneProcess {
    fn peer(&self) -> String {
        "the publisher in this process".into()
    }

    fn privacy(&self) -> Privacy {
        self.privacy.clone()
    }

    fn version(
        &self,
        seen: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        Control::version(&*self.server()?, seen, stop)
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        self.server()?.manifest(stop)
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        Control::sums(&*self.server()?, identity, stop)
    }

    fn register(&self, registration: &Registration, stop: &Stop) -> Result<Registered, ControlError> {
        Control::register(&*self.server()?, registration, stop)
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        let mut answer = Control::request(&*self.server()?, request, stop)?;
        if let (Some((at, flipped)), TransferAnswer::Granted(granted)) = (&self.damage, &mut answer) {
            for source in &mut granted.ticket.sources {
                let upstream = source.endpoint.to_string().parse().unwrap();
                source.endpoint = bad_wire(upstream, *at, Arc::clone(flipped)).to_string().parse().unwrap();
            }
        }
        Ok(answer)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        self.server()?.done(done, stop)
    }
}

/// Forwards connections, and flips one bit of byte `at` from a sender, once for all who share `flipped`.
fn bad_wire(upstream: SocketAddr, at: usize, flipped: Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(client), Ok(server)) = (client, TcpStream::connect(upstream)) else { return };
            let (to_client, to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || forward(client, to_server, |_, _| {}));
            let flipped = Arc::clone(&flipped);
            let damage = move |seen: usize, bytes: &mut [u8]| {
                if let Some(byte) = at.checked_sub(seen).and_then(|at| bytes.get_mut(at))
                    && !flipped.swap(true, Ordering::SeqCst)
                {
                    *byte ^= 1;
                }
            };
            std::thread::spawn(move || forward(server, to_client, damage));
        }
    });
    address
}

fn forward(mut from: TcpStream, mut to: TcpStream, damage: impl Fn(usize, &mut [u8])) {
    let (mut buffer, mut seen) = (vec![0; 64 << 10], 0);
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        damage(seen, &mut buffer[..n]);
        seen += n;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}
