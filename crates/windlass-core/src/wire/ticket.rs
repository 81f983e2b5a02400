//! Permission for one transfer.
//!
//! The sender makes a [`Ticket`] when a receiver asks for a transfer and sends it as JSON over the
//! authenticated control connection. Both sides then plan from it. A `Ticket` has been checked as a
//! whole: [`TicketFields`] are unchecked, and [`Ticket::new`] is the only way from one to the other.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Deref;

use serde::{Deserialize, Serialize};

use super::Endpoint;
use super::bytes::{TicketId, TicketKey};
use super::frame::ProtocolVersion;
use super::message::Completion;
use super::versions::BlockVersions;
use super::{MAX_MESSAGE, MAX_STREAMS, MAX_STRIPE_BYTES, MAX_STRIPES, MIN_STRIPE_BYTES};
use crate::error::Kind;
use crate::identity::{CutsHash, Identity, LayoutHash, StateDigest, Version};
use crate::ranges::BlockRanges;

/// The longest JSON form of a ticket.
pub const MAX_TICKET_JSON: usize = 16 << 20;
/// The most sources of a ticket.
pub const MAX_SOURCES: usize = 256;
/// The most delta payloads of a ticket.
pub const MAX_PAYLOADS: usize = 256;
/// The longest a transfer may be given, in milliseconds: one day.
pub const MAX_TIMEOUT_MS: u64 = 24 * 60 * 60 * 1000;

/// A malformed ticket, or one that cannot be planned.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TicketError {
    #[error("a ticket of {len} bytes of JSON is longer than {max}: ask for fewer, wider block ranges")]
    TooLong { len: usize, max: usize },
    /// The JSON is malformed. The cause names the field where it can; it never quotes the key.
    #[error("the ticket is not valid JSON of a ticket: {0}")]
    Json(String),
    #[error("a {what} is {digits} hexadecimal digits")]
    Hex { what: &'static str, digits: usize },
    #[error(
        "the ticket is for wire protocol {theirs}, this side speaks {ours}: run the same Windlass release on both"
    )]
    Protocol { ours: u8, theirs: u8 },
    #[error("a ticket has 1 to {max} sources, this one {count}")]
    SourceCount { count: usize, max: usize },
    #[error("source {id} is listed twice")]
    SourceTwice { id: SourceId },
    #[error("the ticket has {count} block ranges in all, more than {max}: ask for fewer, wider ranges")]
    RangeCount { count: usize, max: usize },
    #[error("the ticket wants no blocks: there is nothing to transfer")]
    NothingWanted,
    #[error(
        "no source holds block {block}, which is wanted: register the agent that owns it, or ask for less"
    )]
    Uncovered { block: u32 },
    #[error("run {index} of block versions ({count} blocks from {first}) is empty, out of order or too long")]
    VersionRun { index: usize, first: u32, count: u32 },
    #[error("more than {max} runs of block versions")]
    TooManyVersionRuns { max: usize },
    #[error("block {block} is wanted, but the ticket does not say which version it has")]
    Unversioned { block: u32 },
    #[error(
        "block {block} is said to have version {version}, but the transfer is of version {target} ({mode})"
    )]
    BlockVersion {
        /// The first block of the run.
        block: u32,
        version: Version,
        target: Version,
        mode: &'static str,
    },
    /// A delta base that does not lead to the target.
    #[error(
        "{base} cannot be the base of a delta to {target}: expected another version of the same incarnation"
    )]
    Base { base: Box<Identity>, target: Box<Identity> },
    #[error("a delta ticket has 1 to {max} payloads, this one {count}")]
    PayloadCount { count: usize, max: usize },
    #[error("delta payload {payload} has no bytes")]
    PayloadEmpty { payload: usize },
    /// A delta payload whose sources are missing, unknown or repeated.
    #[error("delta payload {payload} needs sources that are in the ticket, each listed once")]
    PayloadSources { payload: usize },
    #[error("delta payload {payload} has {sums} sums for {stripes} stripes")]
    PayloadSums { payload: usize, sums: usize, stripes: u64 },
    #[error("a ticket has 1 to {max} streams, this one {count}")]
    Streams { count: u16, max: u16 },
    #[error("stripes of {bytes} bytes are outside the allowed {min} to {max}")]
    StripeBytes { bytes: u32, min: u32, max: u32 },
    #[error(
        "a transfer is given 1 to {max} ms that end after the Unix epoch; this one {timeout_ms} ms, ending at {expires_unix_ms}"
    )]
    Deadline { timeout_ms: u64, expires_unix_ms: u64, max: u64 },
    #[error("a delta payload is checked by xxh3: block sums belong to image bytes")]
    Checks,
    #[error("the reason of a ticket has {len} bytes, more than {max}")]
    Why { len: usize, max: usize },
    #[error(
        "block {block} is wanted, but the manifest has no such block: the ticket is of another cut table"
    )]
    UnknownBlock { block: u32 },
    #[error("block {block} has {bytes} bytes, more than the {max} of the largest stripe")]
    BlockTooLarge { block: u32, bytes: u64, max: u32 },
    #[error("the transfer would take more than {} stripes: raise the stripe size", MAX_STRIPES)]
    TooManyStripes,
}

impl TicketError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            TicketError::Json(_)
            | TicketError::Hex { .. }
            | TicketError::SourceTwice { .. }
            | TicketError::NothingWanted
            | TicketError::VersionRun { .. }
            | TicketError::Unversioned { .. }
            | TicketError::BlockVersion { .. }
            | TicketError::PayloadCount { .. }
            | TicketError::PayloadEmpty { .. }
            | TicketError::PayloadSources { .. }
            | TicketError::PayloadSums { .. }
            | TicketError::Streams { .. }
            | TicketError::StripeBytes { .. }
            | TicketError::Deadline { .. }
            | TicketError::Checks
            | TicketError::Why { .. }
            | TicketError::BlockTooLarge { .. }
            | TicketError::SourceCount { .. } => Kind::Invalid,
            TicketError::Base { .. } | TicketError::UnknownBlock { .. } => Kind::Stale,
            TicketError::Protocol { .. } => Kind::Unsupported,
            TicketError::Uncovered { .. } => Kind::NotFound,
            TicketError::TooLong { .. }
            | TicketError::RangeCount { .. }
            | TicketError::TooManyVersionRuns { .. }
            | TicketError::TooManyStripes => Kind::Exhausted,
        }
    }
}

/// A source within one ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SourceId(pub u32);

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A sender, and the blocks it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Its name within the ticket.
    pub id: SourceId,
    pub endpoint: Endpoint,
    /// The image blocks it can serve.
    pub blocks: BlockRanges,
    /// Its streams are inside TLS, with a certificate for the endpoint's host. Absent means that they are not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls: bool,
}

/// How a receiver passes on what a transfer brings it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RelayOffer {
    /// Where others connect to.
    pub endpoint: Endpoint,
    /// Whether that is inside TLS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls: bool,
    /// What their streams are for, in place of the ticket's id.
    pub id: TicketId,
    /// The secret that they prove, in place of the ticket's.
    pub key: TicketKey,
}

/// A receiver of the same version that passes on what it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relay {
    /// Its name within the ticket; no source has it.
    pub id: SourceId,
    /// What people call it.
    pub name: String,
    pub offer: RelayOffer,
}

/// The receivers of one version that pass it on to each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Swarm {
    /// How many had asked before this one.
    pub rank: u32,
    /// How many there are, or will be.
    pub receivers: u32,
    /// Those to ask.
    pub relays: Vec<Relay>,
}

/// One part of a delta: a delta container of a known length that any of its sources can serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payload {
    pub bytes: u64,
    /// The sources that can serve it.
    pub sources: Vec<SourceId>,
    /// XXH3-64 of each of its stripes, where relays serve it too: what they send is compared with these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sums: Vec<u64>,
}

/// The base of a delta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    pub identity: Identity,
    pub digest: StateDigest,
}

/// Image bytes or a delta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "mode", rename_all = "snake_case")]
pub enum Mode {
    /// The wanted blocks themselves.
    Full,
    /// The changes since a base.
    Delta {
        base: Base,
        /// The parts of the delta; their union is the whole.
        payloads: Vec<Payload>,
    },
}

impl Mode {
    /// `full` or `delta`.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Mode::Full => "full",
            Mode::Delta { .. } => "delta",
        }
    }
}

/// How the bytes of a stripe are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checks {
    /// One XXH3-64 per stripe.
    Xxh3,
    /// The sealed sum of each block.
    BlockSums,
}

/// When a transfer must be over. The receiver counts `timeout_ms` from the arrival of the ticket by its own
/// monotonic clock; the sender ends it at `expires_unix_ms` by its own wall clock. Clocks are never compared
/// across hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// How long the transfer may take.
    pub timeout_ms: u64,
    /// When the sender ends it.
    pub expires_unix_ms: u64,
}

impl Deadline {
    /// `timeout_ms` from `now_unix_ms`.
    pub const fn starting(now_unix_ms: u64, timeout_ms: u64) -> Deadline {
        Deadline { timeout_ms, expires_unix_ms: now_unix_ms.saturating_add(timeout_ms) }
    }
}

/// The fields of a ticket, not yet checked as a whole. Unknown JSON fields are ignored, so that a later minor
/// version may add some.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TicketFields {
    /// Major version of the wire protocol.
    pub protocol: u8,
    pub id: TicketId,
    /// Which version is transferred.
    pub identity: Identity,
    pub layout_hash: LayoutHash,
    /// Its cut table: gives the block ids their meaning.
    pub cuts_hash: CutsHash,
    /// Its state digest, which the receiver must reach.
    pub digest: StateDigest,
    /// Image bytes or a delta.
    #[serde(flatten)]
    pub mode: Mode,
    /// Why this mode was chosen, as text.
    pub why: String,
    /// The blocks that the receiver asked for.
    pub wanted: BlockRanges,
    /// Which version the blocks have once the transfer is over.
    pub block_versions: BlockVersions,
    pub sources: Vec<Source>,
    /// How many streams to open in parallel, over all sources.
    pub streams: u16,
    /// About how large a stripe is.
    pub stripe_bytes: u32,
    /// How stripes are checked.
    pub checks: Checks,
    /// When it must be over.
    pub deadline: Deadline,
    /// The secret that streams prove.
    pub key: TicketKey,
    /// Those that receive the same at the same time. Absent where every receiver gets everything from the sources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swarm: Option<Swarm>,
}

/// Permission for one transfer; checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket(TicketFields);

impl Ticket {
    /// Checks a ticket as a whole.
    pub fn new(fields: TicketFields) -> Result<Ticket, TicketError> {
        fields.check_limits()?;
        fields.check_sources()?;
        fields.check_blocks()?;
        fields.check_mode()?;
        Ok(Ticket(fields))
    }

    /// Reads and checks the JSON form.
    pub fn from_json(json: &[u8]) -> Result<Ticket, TicketError> {
        if json.len() > MAX_TICKET_JSON {
            return Err(TicketError::TooLong { len: json.len(), max: MAX_TICKET_JSON });
        }
        match serde_json::from_slice(json) {
            Ok(fields) => Ticket::new(fields),
            Err(e) => Err(Self::other_protocol(json).unwrap_or_else(|| TicketError::Json(e.to_string()))),
        }
    }

    /// A ticket of another protocol may lack any other field: the error names the protocol, not a missing field.
    fn other_protocol(json: &[u8]) -> Option<TicketError> {
        #[derive(Deserialize)]
        struct Probe {
            protocol: u8,
        }
        let Probe { protocol: theirs } = serde_json::from_slice(json).ok()?;
        let ours = ProtocolVersion::CURRENT.major;
        (theirs != ours).then_some(TicketError::Protocol { ours, theirs })
    }

    /// The JSON form. Carries the key: it may travel on the authenticated control connection only.
    pub fn to_json(&self) -> Result<String, TicketError> {
        serde_json::to_string(&self.0).map_err(|e| TicketError::Json(e.to_string()))
    }

    /// The same, from its sources alone.
    #[must_use]
    pub fn alone(self) -> Ticket {
        Ticket(TicketFields { swarm: None, ..self.0 })
    }

    /// The completion that both sides send.
    pub fn completion(&self) -> Completion {
        Completion { ticket: self.id, identity: self.identity.clone(), digest: self.digest }
    }

    /// The streams to open and where each leads: as many as the ticket says, and at least one per source.
    pub fn lanes(&self) -> impl ExactSizeIterator<Item = (u16, &Source)> {
        let lanes = self.streams.max(self.sources.len() as u16);
        (0..lanes).map(|i| (i, &self.sources[usize::from(i) % self.sources.len()]))
    }

    /// The position of `id` among the sources.
    pub fn source_position(&self, id: SourceId) -> Option<usize> {
        self.sources.iter().position(|s| s.id == id)
    }
}

impl Deref for Ticket {
    type Target = TicketFields;
    fn deref(&self) -> &TicketFields {
        &self.0
    }
}

impl TicketFields {
    fn check_limits(&self) -> Result<(), TicketError> {
        let ours = ProtocolVersion::CURRENT.major;
        if self.protocol != ours {
            return Err(TicketError::Protocol { ours, theirs: self.protocol });
        }
        if !(1..=MAX_STREAMS).contains(&self.streams) {
            return Err(TicketError::Streams { count: self.streams, max: MAX_STREAMS });
        }
        let (min, max) = (MIN_STRIPE_BYTES, MAX_STRIPE_BYTES);
        if !(min..=max).contains(&self.stripe_bytes) {
            return Err(TicketError::StripeBytes { bytes: self.stripe_bytes, min, max });
        }
        let Deadline { timeout_ms, expires_unix_ms } = self.deadline;
        if !(1..=MAX_TIMEOUT_MS).contains(&timeout_ms) || expires_unix_ms < timeout_ms {
            return Err(TicketError::Deadline { timeout_ms, expires_unix_ms, max: MAX_TIMEOUT_MS });
        }
        if self.why.len() > MAX_MESSAGE {
            return Err(TicketError::Why { len: self.why.len(), max: MAX_MESSAGE });
        }
        Ok(())
    }

    fn check_sources(&self) -> Result<(), TicketError> {
        if !(1..=MAX_SOURCES).contains(&self.sources.len()) {
            return Err(TicketError::SourceCount { count: self.sources.len(), max: MAX_SOURCES });
        }
        let mut seen = BTreeSet::new();
        let relays = self.swarm.iter().flat_map(|s| &s.relays).map(|r| r.id);
        if let Some(id) = self.sources.iter().map(|s| s.id).chain(relays).find(|id| !seen.insert(*id)) {
            return Err(TicketError::SourceTwice { id });
        }
        if seen.len() > MAX_SOURCES {
            return Err(TicketError::SourceCount { count: seen.len(), max: MAX_SOURCES });
        }
        let held: usize = self.sources.iter().map(|s| s.blocks.ranges().len()).sum();
        let (count, max) = (held + self.wanted.ranges().len(), BlockRanges::MAX_RANGES);
        if count > max {
            return Err(TicketError::RangeCount { count, max });
        }
        Ok(())
    }

    fn check_blocks(&self) -> Result<(), TicketError> {
        if self.wanted.is_empty() {
            return Err(TicketError::NothingWanted);
        }
        let held: BlockRanges = self.sources.iter().flat_map(|s| s.blocks.ranges()).collect();
        if let Some(block) = self.wanted.difference(&held).first() {
            return Err(TicketError::Uncovered { block });
        }
        if let Some(block) = self.wanted.difference(&self.block_versions.covered()).first() {
            return Err(TicketError::Unversioned { block });
        }
        let target = self.identity.version;
        // A delta brings every block to its target; only image bytes may be of older versions.
        let wrong = self.block_versions.runs().find(|(.., version)| match self.mode {
            Mode::Full => *version > target,
            Mode::Delta { .. } => *version != target,
        });
        match wrong {
            Some((block, _, version)) => {
                Err(TicketError::BlockVersion { block, version, target, mode: self.mode.as_str() })
            }
            None => Ok(()),
        }
    }

    fn check_mode(&self) -> Result<(), TicketError> {
        let Mode::Delta { base, payloads } = &self.mode else { return Ok(()) };
        let (from, to) = (&base.identity, &self.identity);
        // An older one, or a newer one where the delta leads back.
        let fits = (&from.model_id, from.incarnation) == (&to.model_id, to.incarnation)
            && from.version != to.version;
        if !fits {
            return Err(TicketError::Base { base: Box::new(from.clone()), target: Box::new(to.clone()) });
        }
        if self.checks != Checks::Xxh3 {
            return Err(TicketError::Checks);
        }
        if !(1..=MAX_PAYLOADS).contains(&payloads.len()) {
            return Err(TicketError::PayloadCount { count: payloads.len(), max: MAX_PAYLOADS });
        }
        let known: BTreeSet<_> = self.sources.iter().map(|s| s.id).collect();
        for (payload, Payload { bytes, sources, sums }) in payloads.iter().enumerate() {
            if *bytes == 0 {
                return Err(TicketError::PayloadEmpty { payload });
            }
            let stripes = bytes.div_ceil(u64::from(self.stripe_bytes.max(1)));
            if !sums.is_empty() && sums.len() as u64 != stripes {
                return Err(TicketError::PayloadSums { payload, sums: sums.len(), stripes });
            }
            let mut seen = BTreeSet::new();
            if sources.is_empty() || !sources.iter().all(|id| known.contains(id) && seen.insert(*id)) {
                return Err(TicketError::PayloadSources { payload });
            }
        }
        Ok(())
    }
}
