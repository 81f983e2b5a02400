//! The messages of the control connection: the JSON bodies of the agent's endpoints.
//!
//! Agents answer with these and receivers read them. The carrier (HTTP, a unix socket, a call within one
//! process) is chosen elsewhere. Field names are those of the documented endpoints, with ours added. Answers
//! may gain fields in later minor versions, so unknown ones are ignored when an answer is read; in a request an
//! unknown field is an error, except where a foreign client registers itself.
//!
//! | endpoint | request | answer |
//! |---|---|---|
//! | `GET /get_version?newer_than=&incarnation=&timeout_ms=` | – | [`VersionInfo`] |
//! | `GET /get_buffer_info` | – | [`BufferInfo`] |
//! | `GET /get_capabilities` | – | [`Capabilities`] |
//! | `GET /get_manifest` | – | the canonical JSON of the manifest |
//! | `GET /get_sums?version=` | – | 16 bytes per block, the table of a sealed version |
//! | `POST /register_receiver`, `/register_sglang_instance` | [`Registration`] | [`Registered`] |
//! | `POST /request_transfer` | [`TransferRequest`] | [`TransferAnswer`] |
//! | `GET /get_relays?ticket=&known=&timeout_ms=` | – | [`Relays`] |
//! | `GET /get_part?version=&base=&stripe_bytes=` | – | [`PartInfo`] |
//! | `POST /get_part?version=&base=&stripe_bytes=` | the blocks that the delta is to be of | [`PartInfo`] |
//! | `POST /share_ticket` | [`SharedTicket`] | – |
//! | `POST /transfer_done` | [`TransferDone`] | – |

use serde::{Deserialize, Serialize};

use super::Endpoint;
use super::message::Completion;
use super::ticket::{Relay, RelayOffer, SourceId, Ticket, TicketError, TicketFields};
use crate::error::{Kind, excerpt};
use crate::hex::hex_bytes;
use crate::identity::{
    CutsHash, Identity, IdentityError, Incarnation, LayoutHash, ModelId, StateDigest, Version,
};
use crate::manifest::Manifest;
use crate::ranges::BlockRanges;

/// The version that a publisher serves now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionInfo {
    /// The newest sealed version; none before the first.
    pub version: Option<Version>,
    pub model_id: ModelId,
    pub incarnation: Incarnation,
    /// The state digest of that version.
    pub digest: Option<StateDigest>,
    pub layout_hash: LayoutHash,
    pub cuts_hash: CutsHash,
}

impl VersionInfo {
    /// The identity of the newest sealed version.
    pub fn identity(&self) -> Option<Identity> {
        let VersionInfo { model_id, incarnation, .. } = self;
        self.version.map(|version| Identity {
            model_id: model_id.clone(),
            incarnation: *incarnation,
            version,
        })
    }

    /// Whether this is newer than `seen`: any version of a newer incarnation, or a newer version of the same
    /// incarnation.
    pub fn is_newer_than(&self, seen: Option<(Incarnation, Version)>) -> bool {
        match (self.version, seen) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(version), Some(seen)) => (self.incarnation, version) > seen,
        }
    }
}

/// The layout, in the shape that existing clients read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferInfo {
    /// Bytes of the data of one image.
    pub single_buffer_length: u64,
    /// Name, then shape and dtype, of each tensor in the order of the image.
    pub tensors_meta: Vec<(String, (Vec<u64>, String))>,
    /// Where each name's bytes start, in the same order.
    pub offsets: Vec<u64>,
    pub layout_hash: LayoutHash,
}

impl BufferInfo {
    /// The layout of `manifest`.
    pub fn of(manifest: &Manifest) -> BufferInfo {
        let tensors = manifest.tensors();
        BufferInfo {
            single_buffer_length: manifest.data_bytes(),
            tensors_meta: tensors
                .iter()
                .map(|t| (t.name.clone(), (t.shape.clone(), t.dtype.to_string())))
                .collect(),
            offsets: tensors.iter().map(|t| t.range().start).collect(),
            layout_hash: manifest.layout_hash(),
        }
    }
}

/// An agent's abilities, and its newest delta.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Capabilities {
    /// The modes of `/request_transfer`.
    pub strategies: Vec<RequestMode>,
    /// The newest sealed version.
    pub version: Option<Version>,
    /// Whether there is a delta to that version.
    pub delta_ready: bool,
    /// The base of the newest delta.
    pub delta_base_version: Option<Version>,
    /// Its target.
    pub delta_version: Option<Version>,
    /// The share of elements that it does not change.
    pub delta_sparsity: Option<f64>,
    /// How many elements it changes.
    pub delta_num_nonzero: Option<u64>,
    pub delta_size_bytes: Option<u64>,
    /// The oldest version that a delta can start from.
    pub delta_oldest_base: Option<Version>,
    /// The versions that deltas lead to from the newest one, forward or back, oldest first. Empty in an earlier release.
    #[serde(default)]
    pub versions: Vec<Version>,
    /// The release that answers.
    pub release: String,
    /// Age of the publisher's incarnation. Not given by an earlier release, or where it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age: Option<Age>,
}

/// The age of an incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Age {
    pub incarnation: Incarnation,
    pub ms: u64,
}

/// A receiver that registers. Fields of other clients are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Its display name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Where the engine behind it listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sglang_http_host: Option<String>,
    /// Where the engine behind it listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sglang_http_port: Option<u16>,
    /// Whether it can pass on to other receivers what it gets.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub relays: bool,
}

/// The receivers of what a ticket is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relays {
    /// How many there are.
    pub receivers: u32,
    /// Those to ask. Carries their keys.
    pub relays: Vec<Relay>,
}

/// The answer to a registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// The id to use in later requests.
    pub instance_id: String,
    pub model_id: ModelId,
    pub incarnation: Incarnation,
    /// The rank that supervises the agent.
    pub trainer_global_rank: u32,
    /// How many ranks publish.
    pub trainer_world_size: u32,
    /// Bytes of one image.
    pub trainer_buffer_length: u64,
    pub trainer_hostname: String,
    /// The advertised control port.
    pub trainer_rpc_port: u16,
    /// The advertised data port.
    pub data_port: u16,
    /// Whether the agent lets receivers pass on to each other what they get.
    #[serde(default)]
    pub relays: bool,
}

/// The mode a receiver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestMode {
    Full,
    /// A delta from its version, or a refusal with the reason.
    Delta,
    /// A delta where one serves, image bytes otherwise.
    Auto,
}

/// The version that a receiver has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Have {
    pub incarnation: Incarnation,
    pub version: Version,
    /// The state digest of that version.
    pub digest: StateDigest,
}

/// A request for one transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransferRequest {
    /// The receiver's id, from [`Registered`].
    pub instance_id: String,
    pub mode: RequestMode,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub have: Option<Have>,
    /// The version that a delta should lead to; the newest if not given. Image bytes are always the newest. A delta
    /// to a named version is served regardless of its size. The version may be older than the receiver's: a receiver that needs an
    /// older version fetches the newest image and then the delta that leads back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
    /// The layout that its block numbers are of; checked if given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout_hash: Option<LayoutHash>,
    /// The blocks it wants of an image; all that it keeps if not given. A delta is always of all that it keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<BlockRanges>,
    /// The blocks that it keeps (see [`crate::slice`]); all if not given. Digests, in the request and in the ticket, are
    /// then those of these blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeps: Option<BlockRanges>,
    /// How many streams; the agent's default if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streams: Option<u16>,
    /// How long the transfer may take; the agent's default, and at most its limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// How it will pass on what it gets, if it can and all of an image or a delta is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<RelayOffer>,
}

/// The answer to a request: a ticket, or a refusal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TransferAnswer {
    Granted(Box<Granted>),
    Refused(Refused),
}

/// A ticket, with the fields that existing clients read next to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Granted {
    pub ok: bool,
    /// Which version is transferred.
    pub version: Version,
    pub mode: RequestMode,
    /// Where the delta starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_base_version: Option<Version>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_size: Option<u64>,
    /// The share of elements that it does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sparsity: Option<f64>,
    /// How many elements it changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_nonzero: Option<u64>,
    /// Seconds that encoding it took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_time: Option<f64>,
    /// The permission itself. Carries a key.
    pub ticket: TicketFields,
}

impl Granted {
    /// The ticket, checked as a whole.
    pub fn ticket(self) -> Result<Ticket, TicketError> {
        Ticket::new(self.ticket)
    }
}

/// A refusal, and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    pub ok: bool,
    /// The mode that would serve, if one would.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<RequestMode>,
    pub reason: String,
    pub kind: Kind,
}

hex_bytes!(
    PartSum,
    16,
    IdentityError,
    |text| IdentityError::Hash(excerpt(text)),
    "A [`StateSum`](crate::digest::StateSum) as text."
);

/// What the leading agent asks of another: its share of a version, once that is sealed there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartRequest {
    pub version: Version,
    /// Where a delta would start.
    pub base: Option<Version>,
    /// How many bytes of the delta each sum is to be of. No sums if not given.
    pub stripe_bytes: Option<u32>,
    /// The blocks that the delta is to be of; all if not given.
    pub keeps: Option<BlockRanges>,
}

impl PartRequest {
    /// Its share of the image.
    pub fn image(version: Version) -> PartRequest {
        PartRequest { version, base: None, stripe_bytes: None, keeps: None }
    }
}

/// An agent's report to the leading agent: its part of a sealed version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartInfo {
    pub identity: Identity,
    /// The layout that the block numbers are of.
    pub layout_hash: LayoutHash,
    /// The cut table that they are of.
    pub cuts_hash: CutsHash,
    /// The blocks it holds.
    pub blocks: BlockRanges,
    /// The state sum of those blocks; parts add up. Zero where a delta leads to a version that no slot holds any more.
    pub sum: PartSum,
    /// Where its data connections go.
    pub data: Endpoint,
    /// Whether they are inside TLS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls: bool,
    /// The size of its delta from the requested base, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_bytes: Option<u64>,
    /// XXH3-64 of each stripe of that delta, if stripes were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub delta_sums: Vec<u64>,
}

/// A ticket of another agent, of which this agent should serve its part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedTicket {
    /// Which source of the ticket the addressee is.
    pub source: SourceId,
    /// The ticket. Carries its key.
    pub ticket: TicketFields,
}

/// A transfer is complete at the receiver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransferDone {
    pub instance_id: String,
    pub completion: Completion,
    /// Who brought how much of it, where other receivers took part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub brought: Vec<Brought>,
}

/// What came from one source of a transfer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Brought {
    /// The name of the receiver that passed it on; none for the publisher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    pub bytes: u64,
    /// Bytes per second, from its first stripe to its last.
    pub rate: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_means_a_newer_incarnation_or_a_newer_version_of_the_same() {
        let info = |incarnation, version| VersionInfo {
            version,
            model_id: ModelId::new("m").unwrap(),
            incarnation: Incarnation(incarnation),
            digest: None,
            layout_hash: LayoutHash([0; 16]),
            cuts_hash: CutsHash([0; 16]),
        };
        let seen = Some((Incarnation(5), 105));
        assert!(info(5, Some(106)).is_newer_than(seen));
        assert!(!info(5, Some(105)).is_newer_than(seen));
        assert!(info(6, Some(101)).is_newer_than(seen), "a resumed publisher supersedes its dead self");
        assert!(!info(4, Some(200)).is_newer_than(seen), "nothing of a dead lineage is new");
        assert!(!info(6, None).is_newer_than(None));
        assert!(info(1, Some(0)).is_newer_than(None));
    }

    #[test]
    fn an_unknown_field_of_a_transfer_request_is_named() {
        let json = r#"{"instance_id":"a","mode":"auto","have_version":3}"#;
        let error = serde_json::from_str::<TransferRequest>(json).unwrap_err().to_string();
        assert!(error.contains("have_version"), "{error}");
        let json = r#"{"sglang_http_host":"h","sglang_http_port":1,"session_ids":["x"],"buffer_ptr":7}"#;
        assert_eq!(serde_json::from_str::<Registration>(json).unwrap().sglang_http_port, Some(1));
    }

    #[test]
    fn a_refusal_is_told_from_a_grant() {
        let json = r#"{"ok":false,"fallback":"full","reason":"too old","kind":"stale"}"#;
        let answer: TransferAnswer = serde_json::from_str(json).unwrap();
        let TransferAnswer::Refused(refused) = answer else { panic!("{answer:?}") };
        assert_eq!((refused.fallback, refused.kind), (Some(RequestMode::Full), Kind::Stale));
    }
}
