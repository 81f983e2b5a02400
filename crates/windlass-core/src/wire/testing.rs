//! Tickets for tests.

use super::{
    Base, BlockVersions, Checks, Deadline, Mode, Payload, Source, SourceId, Ticket, TicketFields, TicketId,
    TicketKey,
};
use crate::identity::{CutsHash, Identity, Incarnation, LayoutHash, ModelId, StateDigest};
use crate::ranges::BlockRanges;

pub(super) fn identity(version: u64) -> Identity {
    Identity { model_id: ModelId::new("actor").unwrap(), incarnation: Incarnation(0x1855_aabb), version }
}

pub(super) fn source(id: u32, blocks: BlockRanges) -> Source {
    let endpoint = format!("trainer-{id}.example:7071").parse().unwrap();
    Source { id: SourceId(id), endpoint, blocks, tls: false }
}

pub(super) fn fields(wanted: BlockRanges, sources: Vec<Source>) -> TicketFields {
    TicketFields {
        protocol: 1,
        id: TicketId([0xa5; 16]),
        identity: identity(42),
        layout_hash: LayoutHash([1; 16]),
        cuts_hash: CutsHash([2; 16]),
        digest: StateDigest([3; 16]),
        mode: Mode::Full,
        why: "no delta from version 7 is kept".to_owned(),
        block_versions: BlockVersions::uniform(&wanted, 42),
        wanted,
        sources,
        streams: 2,
        stripe_bytes: 64 << 10,
        checks: Checks::BlockSums,
        deadline: Deadline::starting(1_800_000_000_000, 30_000),
        key: TicketKey::new(std::array::from_fn(|i| i as u8)),
        swarm: None,
    }
}

pub(super) fn full_ticket(wanted: BlockRanges, sources: Vec<Source>) -> Ticket {
    Ticket::new(fields(wanted, sources)).unwrap()
}

pub(super) fn delta_fields(payload_bytes: &[u64]) -> TicketFields {
    let payloads = payload_bytes
        .iter()
        .map(|b| Payload { bytes: *b, sources: vec![SourceId(0)], sums: Vec::new() })
        .collect();
    let base = Base { identity: identity(40), digest: StateDigest([4; 16]) };
    TicketFields {
        mode: Mode::Delta { base, payloads },
        checks: Checks::Xxh3,
        ..fields((0..10).into(), vec![source(0, (0..10).into())])
    }
}

pub(super) fn delta_ticket(payload_bytes: &[u64]) -> Ticket {
    Ticket::new(delta_fields(payload_bytes)).unwrap()
}
