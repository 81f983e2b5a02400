//! Which sender goes with which receiver.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use windlass_core::choose::{Link, Strategy};
use windlass_core::sync_info::WeightSyncInfo;

use super::error::RoleError;
use super::image::ImageReceiver;
use super::plane::ControlPlane;
use super::publish::{PublisherConfig, RegionSender};
use super::shared::SharedReceiver;
use super::{EngineConfig, WeightTransferReceiver, WeightTransferSender};
use crate::nixl;
use crate::stop::Stop;

/// A light factory: it holds configuration and nothing else, and both sides build their own.
pub trait WeightTransferStrategy: Send + Sync {
    /// What it is called in configuration and in [`Strategies`].
    fn name(&self) -> &'static str;

    /// The `type` of the requests that announce its versions (see [`windlass_core::request`]).
    fn request_type(&self) -> &'static str;

    /// The trainer's end, ready for use.
    fn create_sender(&self, config: PublisherConfig) -> Result<Box<dyn WeightTransferSender>, RoleError>;

    /// The engine's end, ready for use. The publisher need not be there.
    fn create_receiver(
        &self,
        info: &WeightSyncInfo,
        config: EngineConfig,
        stop: &Stop,
    ) -> Result<Box<dyn WeightTransferReceiver>, RoleError>;
}

/// Engines pull from the publisher over TCP.
#[derive(Clone)]
pub struct TcpTransferStrategy {
    plane: Arc<dyn ControlPlane>,
}

impl TcpTransferStrategy {
    /// With control connections of this kind.
    pub fn new(plane: Arc<dyn ControlPlane>) -> TcpTransferStrategy {
        TcpTransferStrategy { plane }
    }
}

/// The same, and images are read from the publisher's memory.
#[derive(Clone)]
pub struct NixlTransferStrategy {
    tcp: TcpTransferStrategy,
    config: nixl::Config,
}

impl NixlTransferStrategy {
    /// With control connections of this kind. The library is opened when a side is made.
    pub fn new(plane: Arc<dyn ControlPlane>, config: nixl::Config) -> NixlTransferStrategy {
        NixlTransferStrategy { tcp: TcpTransferStrategy::new(plane), config }
    }
}

impl WeightTransferStrategy for NixlTransferStrategy {
    fn name(&self) -> &'static str {
        "nixl"
    }

    fn request_type(&self) -> &'static str {
        self.tcp.request_type()
    }

    fn create_sender(&self, mut config: PublisherConfig) -> Result<Box<dyn WeightTransferSender>, RoleError> {
        config.server.tcp.nixl = Some(Arc::new(nixl::Exporter::start(&self.config)?));
        self.tcp.create_sender(config)
    }

    fn create_receiver(
        &self,
        info: &WeightSyncInfo,
        mut config: EngineConfig,
        stop: &Stop,
    ) -> Result<Box<dyn WeightTransferReceiver>, RoleError> {
        config.nixl = Some(Arc::new(nixl::Reader::start(self.config.clone())?));
        self.tcp.create_receiver(info, config, stop)
    }
}

fn type_of(info: &WeightSyncInfo) -> &'static str {
    match info {
        WeightSyncInfo::TorchDistributed(_) => "torch_distributed",
        WeightSyncInfo::Empty(_) => "empty",
        WeightSyncInfo::Agent(_) => "agent",
        WeightSyncInfo::Store(_) => "store",
    }
}

impl WeightTransferStrategy for TcpTransferStrategy {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn request_type(&self) -> &'static str {
        "pull"
    }

    fn create_sender(&self, config: PublisherConfig) -> Result<Box<dyn WeightTransferSender>, RoleError> {
        Ok(Box::new(RegionSender::start(config, Some(&*self.plane))?))
    }

    fn create_receiver(
        &self,
        info: &WeightSyncInfo,
        config: EngineConfig,
        stop: &Stop,
    ) -> Result<Box<dyn WeightTransferReceiver>, RoleError> {
        let WeightSyncInfo::Agent(agent) = info else {
            let (strategy, found) = (self.name(), type_of(info));
            return Err(RoleError::OtherSyncInfo { strategy, expected: "agent", found });
        };
        let control = self.plane.connect(agent)?;
        Ok(Box::new(ImageReceiver::open(agent.model_id.clone(), config, control, stop)?))
    }
}

/// Engines on the publisher's host map its slots. Both sides are configured with the region's directory, and nothing
/// else has to be said.
#[derive(Clone, Debug)]
pub struct ShmTransferStrategy {
    region_dir: PathBuf,
}

impl ShmTransferStrategy {
    /// With the region in this directory.
    pub fn new(region_dir: impl Into<PathBuf>) -> ShmTransferStrategy {
        ShmTransferStrategy { region_dir: region_dir.into() }
    }
}

impl WeightTransferStrategy for ShmTransferStrategy {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn request_type(&self) -> &'static str {
        "pull"
    }

    fn create_sender(&self, config: PublisherConfig) -> Result<Box<dyn WeightTransferSender>, RoleError> {
        let config = PublisherConfig { region_dir: self.region_dir.clone(), ..config };
        Ok(Box::new(RegionSender::start(config, None)?))
    }

    /// The sync info may also be that of a publisher which other hosts reach over TCP.
    fn create_receiver(
        &self,
        info: &WeightSyncInfo,
        config: EngineConfig,
        _: &Stop,
    ) -> Result<Box<dyn WeightTransferReceiver>, RoleError> {
        match info {
            WeightSyncInfo::Empty(_) | WeightSyncInfo::Agent(_) => {
                Ok(Box::new(SharedReceiver::new(self.region_dir.clone(), &config)))
            }
            WeightSyncInfo::TorchDistributed(_) | WeightSyncInfo::Store(_) => {
                let (strategy, found) = (self.name(), type_of(info));
                Err(RoleError::OtherSyncInfo { strategy, expected: "empty or agent", found })
            }
        }
    }
}

/// The strategies that a program has, by name: ours and its own.
#[derive(Clone, Default)]
pub struct Strategies {
    known: BTreeMap<&'static str, Arc<dyn WeightTransferStrategy>>,
}

impl std::fmt::Debug for Strategies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.known.keys()).finish()
    }
}

impl Strategies {
    /// None yet.
    pub fn new() -> Strategies {
        Strategies::default()
    }

    /// Ours: `tcp` and `shm`.
    pub fn ours(plane: Arc<dyn ControlPlane>, region_dir: impl Into<PathBuf>) -> Strategies {
        Strategies::new()
            .with(Arc::new(TcpTransferStrategy::new(plane)))
            .with(Arc::new(ShmTransferStrategy::new(region_dir)))
    }

    /// These and one more, in place of one of the same name.
    #[must_use]
    pub fn with(mut self, strategy: Arc<dyn WeightTransferStrategy>) -> Strategies {
        self.known.insert(strategy.name(), strategy);
        self
    }

    /// A strategy by its name.
    pub fn named(&self, name: &str) -> Result<Arc<dyn WeightTransferStrategy>, RoleError> {
        self.known.get(name).cloned().ok_or_else(|| RoleError::Unsupported {
            strategy: name.to_owned(),
            link: "any link".into(),
            remedy: "add it with Strategies::with, or use tcp or shm",
        })
    }

    /// The strategy that carries out a [choice](windlass_core::choose).
    pub fn chosen(
        &self,
        strategy: Strategy,
        link: Link,
    ) -> Result<Arc<dyn WeightTransferStrategy>, RoleError> {
        let (name, remedy) = match (strategy, link) {
            (Strategy::Tcp, Link::Shm) => ("shm", "add ShmTransferStrategy"),
            (Strategy::Tcp, _) => ("tcp", "add TcpTransferStrategy with a control plane"),
            (Strategy::Lora, _) => {
                ("lora", "adapters come with the Python package; use tcp for whole models")
            }
            (Strategy::PackedCudaIpc, _) => (
                "packed_cuda_ipc",
                "CUDA IPC comes with the Python package; use tcp over shm on the same host",
            ),
            (Strategy::CudaIpc, _) => {
                ("cuda_ipc", "CUDA IPC comes with the Python package; use tcp over shm on the same host")
            }
            (Strategy::Store, _) => {
                ("store", "stores are for `windlass agent` and `windlass receive`; use tcp")
            }
            (Strategy::Broadcast, _) => {
                ("broadcast", "collectives need torch and come with the Python package; use tcp")
            }
            (Strategy::Nixl, _) => ("nixl", "add NixlTransferStrategy with a control plane, or use tcp"),
        };
        self.known.get(name).cloned().ok_or_else(|| RoleError::Unsupported {
            strategy: strategy.to_string(),
            link: link.to_string(),
            remedy,
        })
    }
}
