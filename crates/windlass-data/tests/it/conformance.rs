//! The suite for links and loaders, instantiated for TCP, TCP inside TLS and shared memory.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

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
    ControlPlane, EngineConfig, PublisherConfig, Reachable, RoleError, ShmTransferStrategy,
    TcpTransferStrategy, WeightTransferReceiver, WeightTransferSender, WeightTransferStrategy,
};
use windlass_data::serve::Server;
use windlass_data::stop::Stop;
use windlass_data::tls::{Certificate, Privacy, Trust};

windlass_data::link_conformance!(tcp, super::Tcp);
windlass_data::link_conformance!(tls, super::Tls::new());
windlass_data::link_conformance!(shm, super::Shm);
windlass_data::loader_conformance!(memory_engine_over_tcp, super::Tcp, super::MemoryEngine::default());
windlass_data::loader_conformance!(memory_engine_over_shm, super::Shm, super::MemoryEngine::default());

struct Tcp;

impl LinkUnderTest for Tcp {
    fn strategy(&self, _: &Path) -> Arc<dyn WeightTransferStrategy> {
        Arc::new(TcpTransferStrategy::new(Arc::new(OneProcess::default())))
    }

    fn damaging(&self, _: &Path) -> Option<Arc<dyn WeightTransferStrategy>> {
        let plane = OneProcess { damage: Some(Arc::default()), ..OneProcess::default() };
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
        let damage = damage.then(|| Arc::clone(&self.flipped));
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
    /// Data goes through a wire that flips a bit, and says here when it has.
    damage: Option<Arc<AtomicBool>>,
    privacy: Privacy,
}

impl OneProcess {
    fn server(&self) -> Result<Arc<Server>, ControlError> {
        self.server.lock().unwrap().upgrade().ok_or_else(|| ControlError::Lost {
            peer: self.peer(),
            what: "ask",
            why: "it is gone".into(),
            kind: Kind::PeerLost,
        })
    }
}

impl ControlPlane for OneProcess {
    fn serve(&self, server: &Arc<Server>) -> Result<Reachable, ControlError> {
        *self.server.lock().unwrap() = Arc::downgrade(server);
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
        if let (Some(flipped), TransferAnswer::Granted(granted)) = (&self.damage, &mut answer) {
            for source in &mut granted.ticket.sources {
                let upstream = source.endpoint.to_string().parse().unwrap();
                source.endpoint = bad_wire(upstream, Arc::clone(flipped)).to_string().parse().unwrap();
            }
        }
        Ok(answer)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        self.server()?.done(done, stop)
    }
}

/// Forwards connections, and flips one bit well inside the first payload, once for all who share `flipped`.
fn bad_wire(upstream: SocketAddr, flipped: Arc<AtomicBool>) -> SocketAddr {
    const AT: usize = 30_000;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(client), Ok(server)) = (client, TcpStream::connect(upstream)) else { return };
            let (to_client, to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || forward(client, to_server, |_, _| {}));
            let flipped = Arc::clone(&flipped);
            let damage = move |seen: usize, bytes: &mut [u8]| {
                if let Some(byte) = AT.checked_sub(seen).and_then(|at| bytes.get_mut(at))
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
