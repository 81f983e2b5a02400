//! Images, tickets, senders and receivers for tests.

use std::any::Any;
use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use windlass_core::digest::{BlockSum, SumTable, sum_block};
use windlass_core::dtype::Dtype;
use windlass_core::identity::{CutsHash, Identity, Incarnation, LayoutHash, ModelId, StateDigest};
use windlass_core::manifest::{DimCut, Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::{
    Base, BlockVersions, Checks, Deadline, MIN_STRIPE_BYTES, Mode, Payload, Source, SourceId, Ticket,
    TicketFields, TicketId, TicketKey,
};

use crate::shm::Mapping;
use crate::simd::kernels;
use crate::stop::Stop;
use crate::tcp::{
    Body, Crowd, ImageLanding, Offer, OfferHandle, PayloadLanding, PullConfig, Pulled, Sender, SenderConfig,
    TcpError, Watch, pull,
};

/// Where the data begins in the files of these tests: on no particular boundary.
pub(super) const DATA_START: u64 = 4096 + 24;

/// A small generator, so that a seed is all that a failure needs to be repeated.
#[derive(Clone, Debug)]
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend(self.next().to_le_bytes());
        }
        out.truncate(len);
        out
    }
}

pub(super) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).unwrap();
    bytes
}

/// Odd shapes: one byte, none at all, not divisible by anything, several blocks, and cuts that make strided
/// tiles with runs both shorter and longer than what is gathered.
pub(super) fn odd_manifest() -> Arc<Manifest> {
    let spec = |name: &str, dtype, shape: &[u64]| TensorSpec::new(name, dtype, shape);
    let tensors = [
        spec("byte", Dtype::U8, &[1]),
        spec("nothing", Dtype::F32, &[0, 7]),
        spec("scalar", Dtype::F64, &[]),
        spec("uneven", Dtype::BF16, &[333, 1013]),
        spec("short_runs", Dtype::BF16, &[600, 257]),
        spec("long_runs", Dtype::F32, &[9, 30_011]),
        spec("bytes", Dtype::U8, &[70_001]),
    ];
    let cuts = BTreeMap::from([
        ("short_runs".to_owned(), vec![DimCut { dim: 1, bounds: vec![64, 200] }]),
        ("long_runs".to_owned(), vec![DimCut { dim: 1, bounds: vec![10_000, 20_001] }]),
        ("uneven".to_owned(), vec![DimCut { dim: 0, bounds: vec![7, 100] }]),
    ]);
    Arc::new(Manifest::new(tensors, BTreeMap::new()).unwrap().with_cuts(&cuts).unwrap())
}

/// One tensor of so many bytes.
pub(super) fn plain_manifest(bytes: u64) -> Arc<Manifest> {
    let tensors = [TensorSpec::new("w", Dtype::BF16, [bytes / 2])];
    Arc::new(Manifest::new(tensors, BTreeMap::new()).unwrap())
}

/// An image in a file, and its sums.
#[derive(Clone)]
pub(super) struct Image {
    pub(super) manifest: Arc<Manifest>,
    pub(super) data: Vec<u8>,
    pub(super) file: Arc<File>,
    pub(super) sums: Arc<SumTable>,
}

impl Image {
    pub(super) fn new(manifest: Arc<Manifest>, seed: u64) -> Image {
        let data = Rng(seed).bytes(manifest.data_bytes() as usize);
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.write_all_at(&data, DATA_START).unwrap();
        let sums = Arc::new(SumTable::new(&manifest, sums(&manifest, &data)));
        Image { manifest, data, file: Arc::new(file), sums }
    }

    pub(super) fn blocks(&self) -> BlockRanges {
        (0..self.manifest.cuts().blocks()).into()
    }

    pub(super) fn digest(&self) -> StateDigest {
        self.sums.digest(&self.manifest)
    }

    pub(super) fn body(&self, hold: Arc<dyn Any + Send + Sync>) -> Body {
        Body::Image {
            manifest: Arc::clone(&self.manifest),
            file: Arc::clone(&self.file),
            data_start: DATA_START,
            sums: Arc::clone(&self.sums),
            hold,
        }
    }

    pub(super) fn ticket(&self, at: SocketAddr) -> TicketFields {
        self.ticket_of(vec![source(0, at, self.blocks())])
    }

    pub(super) fn ticket_of(&self, sources: Vec<Source>) -> TicketFields {
        TicketFields {
            layout_hash: self.manifest.layout_hash(),
            cuts_hash: self.manifest.cuts_hash(),
            digest: self.digest(),
            ..fields(self.blocks(), sources)
        }
    }
}

fn sums(manifest: &Manifest, data: &[u8]) -> Vec<BlockSum> {
    let sum = |id| {
        let block = manifest.cuts().block(id).unwrap();
        let unit = manifest.tensors()[block.tensor as usize].dtype.unit();
        let bytes: Vec<u8> = manifest
            .byte_runs(&block)
            .flat_map(|r| data[r.start as usize..r.end as usize].iter().copied())
            .collect();
        sum_block(kernels(), &block, unit, &bytes)
    };
    (0..manifest.cuts().blocks()).map(sum).collect()
}

pub(super) fn source(id: u32, at: SocketAddr, blocks: BlockRanges) -> Source {
    Source { id: SourceId(id), endpoint: at.to_string().parse().unwrap(), blocks, tls: false }
}

pub(super) fn identity(version: u64) -> Identity {
    Identity { model_id: ModelId::new("actor").unwrap(), incarnation: Incarnation(7), version }
}

pub(super) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

pub(super) fn fields(wanted: BlockRanges, sources: Vec<Source>) -> TicketFields {
    TicketFields {
        protocol: 1,
        id: TicketId(random()),
        identity: identity(42),
        layout_hash: LayoutHash([1; 16]),
        cuts_hash: CutsHash([2; 16]),
        digest: StateDigest([3; 16]),
        mode: Mode::Full,
        why: "a test".to_owned(),
        block_versions: BlockVersions::uniform(&wanted, 42),
        wanted,
        sources,
        streams: 3,
        stripe_bytes: 4 * MIN_STRIPE_BYTES,
        checks: Checks::BlockSums,
        deadline: Deadline::starting(unix_ms(), 20_000),
        key: TicketKey::new(random()),
        swarm: None,
    }
}

/// A delta of these payloads, all held by source 0.
pub(super) fn delta_fields(payloads: &[Vec<u8>], at: SocketAddr) -> TicketFields {
    let payloads = payloads
        .iter()
        .map(|p| Payload { bytes: p.len() as u64, sources: vec![SourceId(0)], sums: Vec::new() })
        .collect();
    let base = Base { identity: identity(40), digest: StateDigest([4; 16]) };
    TicketFields {
        mode: Mode::Delta { base, payloads },
        checks: Checks::Xxh3,
        ..fields((0..10).into(), vec![source(0, at, (0..10).into())])
    }
}

pub(super) fn payload_file(bytes: &[u8]) -> Arc<File> {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.write_all_at(bytes, 0).unwrap();
    Arc::new(file)
}

/// A sender that gives up soon.
pub(super) fn sender() -> Sender {
    Sender::start(quick()).unwrap()
}

pub(super) fn quick() -> SenderConfig {
    SenderConfig {
        ping_after: Duration::from_millis(500),
        lost_after: Duration::from_millis(1500),
        ..SenderConfig::default()
    }
}

pub(super) fn quick_pull<'a>() -> PullConfig<'a> {
    PullConfig {
        connect_timeout: Duration::from_secs(2),
        ping_after: Duration::from_millis(500),
        lost_after: Duration::from_millis(1500),
        stripe_timeout: Duration::from_secs(4),
        backoff: Duration::from_millis(5),
        max_backoff: Duration::from_millis(100),
        ..PullConfig::default()
    }
}

pub(super) fn offer(sender: &Sender, ticket: &Ticket, id: u32, body: Body) -> OfferHandle {
    sender.offer(Offer { ticket: ticket.clone(), source: SourceId(id), body, crowd: Crowd::One }).unwrap()
}

/// A receiver's image, and what it was told about blocks.
pub(super) struct Landed {
    pub(super) mapping: Mapping,
    pub(super) sums: Mutex<BTreeMap<u32, BlockSum>>,
    /// What blocks are compared with, beyond what their senders say.
    pub(super) proof: Option<Arc<SumTable>>,
    /// What a stream waits for after each block.
    pub(super) gate: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Landed {
    pub(super) fn new(manifest: &Manifest) -> Landed {
        let mapping = Mapping::anonymous(DATA_START + manifest.data_bytes()).unwrap();
        Landed { mapping, sums: Mutex::default(), proof: None, gate: None }
    }

    pub(super) fn pull(
        &self,
        manifest: &Manifest,
        ticket: &Ticket,
        config: &PullConfig<'_>,
        stop: &Stop,
    ) -> Result<Pulled, TcpError> {
        let landing = ImageLanding {
            manifest,
            mapping: &self.mapping,
            data_start: DATA_START,
            kernels: kernels(),
            proof: self.proof.as_deref(),
            landed: &|block, sum| {
                assert_eq!(self.sums.lock().insert(block, sum), None, "block {block} landed twice");
                self.gate.iter().for_each(|gate| gate());
            },
            finish: &|| Ok(()),
        };
        pull(ticket, &landing, config, stop, &Watch::default())
    }

    pub(super) fn data(&self) -> &[u8] {
        self.mapping.bytes(DATA_START..self.mapping.len())
    }

    /// Every block that was said to have landed has the bytes and the sum of the image.
    pub(super) fn check_against(&self, image: &Image) {
        for (id, sum) in self.sums.lock().iter() {
            assert_eq!(*sum, image.sums.get(*id), "sum of block {id}");
            for run in image.manifest.byte_runs(&image.manifest.cuts().block(*id).unwrap()) {
                let run = run.start as usize..run.end as usize;
                assert_eq!(self.data()[run.clone()], image.data[run], "block {id}");
            }
        }
    }

    pub(super) fn check_whole(&self, image: &Image) {
        assert!(self.data() == image.data, "the images differ");
        assert_eq!(self.sums.lock().len() as u32, image.manifest.cuts().blocks());
        self.check_against(image);
    }
}

pub(super) fn pull_payloads(
    ticket: &Ticket,
    buffers: &[Mapping],
    config: &PullConfig<'_>,
) -> Result<Pulled, TcpError> {
    pull(ticket, &PayloadLanding { buffers }, config, &Stop::never(), &Watch::default())
}

/// Waits until `done` holds; fails the test if it does not within ten seconds.
pub(super) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(10), "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
