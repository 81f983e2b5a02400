//! The connection data that trainers send to engines before the first sync.
//!
//! A strategy on training rank 0 creates one [`WeightSyncInfo`]; the orchestrator (a controller, a Ray
//! driver, a script) carries it to every engine as plain JSON; both sides then join concurrently. The
//! variant names the thing to join: a process group, nothing (CUDA IPC travels in the requests), an agent
//! to pull from, or a store. This module owns those records, their JSON, and the arithmetic of ranks. It
//! binds no port and resolves no name.
//!
//! # Plain form
//!
//! One JSON object with a `type`:
//!
//! | `type` | fields |
//! |---|---|
//! | `torch_distributed` | `master_addr`, `master_port`, `world_size`, `group_name`, `backend` (`nccl` or `gloo`) |
//! | `empty` | none |
//! | `agent` | `endpoints` (one per trainer node, the advertised ones), `token`, `model_id`, `incarnation` (optional) |
//! | `store` | `url` |
//!
//! Unknown fields are refused. The JSON of an `agent` info contains the token, because the engine needs it;
//! treat it like the token. `Debug` and every error message leave it out.
//!
//! # Ranks
//!
//! The update group consists of training rank 0 and every rank of every engine. An engine has
//! `tp · pp · dp` ranks, data parallelism counted once. Training is rank 0; the engines follow in order, so
//! engine 0 has offset 1 and each engine's offset is its predecessor's plus the predecessor's ranks. A rank
//! inside an engine is rank `local + offset` of the group.

pub use crate::address::{AddressError, Endpoint, Host, StoreUrl, Token};

use std::collections::HashSet;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Kind, excerpt};
use crate::identity::{IdentityError, Incarnation, ModelId};
use crate::request::{FieldError, Fields, tag};

/// The largest JSON text of a sync info.
pub const MAX_JSON_BYTES: usize = 1 << 20;

/// The most endpoints an agent info may list: one per trainer node.
pub const MAX_ENDPOINTS: usize = 4096;

/// A fault in a sync info.
#[derive(Debug, thiserror::Error)]
pub enum SyncInfoError {
    #[error("sync info of {bytes} bytes is too large: the limit is {MAX_JSON_BYTES}")]
    TooLarge { bytes: usize },
    #[error("sync info is not valid JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// A field is missing, unknown or of the wrong type.
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error("unknown sync info type {0:?}: expected torch_distributed, empty, agent or store")]
    UnknownType(String),
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("master_port is {0}: expected 1 to 65535; give the port that rank 0 has bound")]
    MasterPort(u64),
    /// A group without a receiver, or too large to count.
    #[error("world_size is {0}: expected 2 (rank 0 and one engine rank) to {max}", max = u32::MAX)]
    WorldSize(u64),
    #[error("group name {0:?} is not usable: expected 1 to 256 bytes without control characters")]
    GroupName(String),
    #[error("unknown process group backend {0:?}: expected nccl or gloo")]
    Backend(String),
    #[error("agent info lists {count} endpoints{}: expected 1 to {MAX_ENDPOINTS}, each once",
        twice.as_ref().map(|e| format!(", {e:?} twice")).unwrap_or_default())]
    Endpoints {
        count: usize,
        /// The one that is there twice.
        twice: Option<String>,
    },
    #[error("an engine has tp={}, pp={}, dp={}: each must be at least 1", .0.tp, .0.pp, .0.dp)]
    EngineShape(EngineShape),
    #[error("with the engine of tp={}, pp={}, dp={} the ranks do not fit 32 bits; check its shape", .0.tp, .0.pp, .0.dp)]
    RankOverflow(EngineShape),
    #[error("local rank {local_rank} is outside its engine of {size} ranks; check tp, pp and dp")]
    LocalRank { local_rank: u32, size: u32 },
    #[error("rank offset 0 is the trainer's; the first engine has offset 1")]
    RankOffset,
}

impl SyncInfoError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        self.row().0
    }

    /// The stable name of the failure, the same in every language.
    pub fn name(&self) -> &'static str {
        self.row().1
    }

    fn row(&self) -> (Kind, &'static str) {
        match self {
            SyncInfoError::TooLarge { .. } => (Kind::Invalid, "too_large"),
            SyncInfoError::Json(_) => (Kind::Invalid, "not_json"),
            SyncInfoError::Field(e) => (e.kind(), e.name()),
            SyncInfoError::UnknownType(_) => (Kind::Invalid, "unknown_type"),
            SyncInfoError::Address(e) => (e.kind(), e.name()),
            SyncInfoError::Identity(e) => (e.kind(), "bad_identity"),
            SyncInfoError::MasterPort(_) => (Kind::Invalid, "bad_port"),
            SyncInfoError::WorldSize(_) => (Kind::Invalid, "bad_world_size"),
            SyncInfoError::GroupName(_) => (Kind::Invalid, "bad_group_name"),
            SyncInfoError::Backend(_) => (Kind::Invalid, "unknown_backend"),
            SyncInfoError::Endpoints { .. } => (Kind::Invalid, "bad_endpoints"),
            SyncInfoError::EngineShape(_) => (Kind::Invalid, "bad_engine_shape"),
            SyncInfoError::RankOverflow(_) => (Kind::Invalid, "rank_overflow"),
            SyncInfoError::LocalRank { .. } => (Kind::Invalid, "bad_local_rank"),
            SyncInfoError::RankOffset => (Kind::Invalid, "bad_rank_offset"),
        }
    }
}

/// The library that carries the collectives of an update group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    Nccl,
    Gloo,
}

impl Backend {
    /// The name that `torch.distributed` uses.
    pub const fn as_str(self) -> &'static str {
        match self {
            Backend::Nccl => "nccl",
            Backend::Gloo => "gloo",
        }
    }
}

impl FromStr for Backend {
    type Err = SyncInfoError;
    fn from_str(text: &str) -> Result<Backend, SyncInfoError> {
        match text {
            "nccl" => Ok(Backend::Nccl),
            "gloo" => Ok(Backend::Gloo),
            _ => Err(SyncInfoError::Backend(excerpt(text))),
        }
    }
}

/// How to join a `torch.distributed` update group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchDistributedWeightSyncInfo {
    master_addr: Host,
    master_port: u16,
    world_size: u32,
    group_name: String,
    backend: Backend,
}

impl TorchDistributedWeightSyncInfo {
    /// The group whose store is at `master_addr:master_port`, with rank 0 and all engine ranks.
    pub fn new(
        master_addr: &str,
        master_port: u16,
        world_size: u32,
        group_name: impl Into<String>,
        backend: Backend,
    ) -> Result<TorchDistributedWeightSyncInfo, SyncInfoError> {
        let group_name = group_name.into();
        if master_port == 0 {
            return Err(SyncInfoError::MasterPort(0));
        }
        if world_size < 2 {
            return Err(SyncInfoError::WorldSize(world_size.into()));
        }
        if !(1..=256).contains(&group_name.len()) || group_name.contains(char::is_control) {
            return Err(SyncInfoError::GroupName(excerpt(&group_name)));
        }
        let master_addr = Host::new(master_addr)?;
        Ok(TorchDistributedWeightSyncInfo { master_addr, master_port, world_size, group_name, backend })
    }

    /// Node address of training rank 0.
    pub fn master_addr(&self) -> &Host {
        &self.master_addr
    }

    /// The port that rank 0 has bound.
    pub fn master_port(&self) -> u16 {
        self.master_port
    }

    /// Ranks in the group, the trainer's included.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Name of the group.
    pub fn group_name(&self) -> &str {
        &self.group_name
    }

    pub fn backend(&self) -> Backend {
        self.backend
    }
}

/// Nothing to join: the requests carry everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmptyWeightSyncInfo;

/// How to pull from a trainer's agents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentWeightSyncInfo {
    endpoints: Vec<Endpoint>,
    /// The secret that the agents require.
    pub token: Token,
    /// Which policy they serve.
    pub model_id: ModelId,
    /// The publisher's incarnation at the time of writing, if it has started. A newer one may follow.
    pub incarnation: Option<Incarnation>,
}

impl AgentWeightSyncInfo {
    /// Agents at `endpoints`, one per trainer node.
    pub fn new(
        endpoints: Vec<Endpoint>,
        token: Token,
        model_id: ModelId,
        incarnation: Option<Incarnation>,
    ) -> Result<AgentWeightSyncInfo, SyncInfoError> {
        let count = endpoints.len();
        if !(1..=MAX_ENDPOINTS).contains(&count) {
            return Err(SyncInfoError::Endpoints { count, twice: None });
        }
        let mut seen = HashSet::with_capacity(count);
        if let Some(twice) = endpoints.iter().find(|e| !seen.insert(e.as_str())) {
            return Err(SyncInfoError::Endpoints { count, twice: Some(twice.to_string()) });
        }
        Ok(AgentWeightSyncInfo { endpoints, token, model_id, incarnation })
    }

    /// Where the agents are, the lead agent first. Never empty.
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }
}

/// Where versions are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreWeightSyncInfo {
    pub url: StoreUrl,
}

/// The connection data of a strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightSyncInfo {
    /// Join a process group.
    TorchDistributed(TorchDistributedWeightSyncInfo),
    Empty(EmptyWeightSyncInfo),
    Agent(AgentWeightSyncInfo),
    /// Read from a store.
    Store(StoreWeightSyncInfo),
}

impl WeightSyncInfo {
    /// The plain form. An `agent` info contains the token.
    pub fn to_value(&self) -> Value {
        match self {
            WeightSyncInfo::TorchDistributed(t) => json!({
                "type": "torch_distributed",
                "master_addr": t.master_addr.as_str(),
                "master_port": t.master_port,
                "world_size": t.world_size,
                "group_name": t.group_name,
                "backend": t.backend,
            }),
            WeightSyncInfo::Empty(EmptyWeightSyncInfo) => json!({ "type": "empty" }),
            WeightSyncInfo::Agent(a) => {
                let endpoints: Vec<_> = a.endpoints.iter().map(Endpoint::as_str).collect();
                json!({
                    "type": "agent",
                    "endpoints": endpoints,
                    "token": a.token.expose(),
                    "model_id": a.model_id,
                    "incarnation": a.incarnation,
                })
            }
            WeightSyncInfo::Store(s) => json!({ "type": "store", "url": s.url.as_str() }),
        }
    }

    /// The plain form as JSON text.
    pub fn to_json(&self) -> String {
        self.to_value().to_string()
    }

    /// Reads and checks the plain form.
    pub fn from_value(value: &Value) -> Result<WeightSyncInfo, SyncInfoError> {
        const AT: &str = "sync info";
        match tag(value, AT)? {
            Some("torch_distributed") => read_torch(value),
            Some("empty") => {
                Fields::open(value, AT, &["type"])?;
                Ok(WeightSyncInfo::Empty(EmptyWeightSyncInfo))
            }
            Some("agent") => read_agent(value),
            Some("store") => {
                let fields = Fields::open(value, AT, &["type", "url"])?;
                Ok(WeightSyncInfo::Store(StoreWeightSyncInfo { url: fields.text("url")?.parse()? }))
            }
            Some(other) => Err(SyncInfoError::UnknownType(excerpt(other))),
            None => Err(FieldError::Missing { at: AT.to_owned(), field: "type" }.into()),
        }
    }

    /// Reads and checks JSON text of at most [`MAX_JSON_BYTES`].
    pub fn from_json(text: &[u8]) -> Result<WeightSyncInfo, SyncInfoError> {
        if text.len() > MAX_JSON_BYTES {
            return Err(SyncInfoError::TooLarge { bytes: text.len() });
        }
        WeightSyncInfo::from_value(&serde_json::from_slice(text).map_err(SyncInfoError::Json)?)
    }
}

fn read_torch(value: &Value) -> Result<WeightSyncInfo, SyncInfoError> {
    let known = &["type", "master_addr", "master_port", "world_size", "group_name", "backend"];
    let fields = Fields::open(value, "sync info", known)?;
    let port = fields.u64("master_port")?;
    let world = fields.u64("world_size")?;
    let info = TorchDistributedWeightSyncInfo::new(
        fields.text("master_addr")?,
        u16::try_from(port).map_err(|_| SyncInfoError::MasterPort(port))?,
        u32::try_from(world).map_err(|_| SyncInfoError::WorldSize(world))?,
        fields.text("group_name")?,
        fields.text("backend")?.parse()?,
    )?;
    Ok(WeightSyncInfo::TorchDistributed(info))
}

fn read_agent(value: &Value) -> Result<WeightSyncInfo, SyncInfoError> {
    let known = &["type", "endpoints", "token", "model_id", "incarnation"];
    let fields = Fields::open(value, "sync info", known)?;
    let endpoints = fields.list("endpoints")?;
    let count = endpoints.values.len();
    if count > MAX_ENDPOINTS {
        return Err(SyncInfoError::Endpoints { count, twice: None });
    }
    let endpoints = endpoints.texts()?.into_iter().map(str::parse).collect::<Result<_, AddressError>>()?;
    let incarnation = match fields.optional("incarnation") {
        Some(_) => Some(Incarnation(fields.u64("incarnation")?)),
        None => None,
    };
    let token = Token::new(fields.text("token")?)?;
    let model_id = ModelId::new(fields.text("model_id")?)?;
    Ok(WeightSyncInfo::Agent(AgentWeightSyncInfo::new(endpoints, token, model_id, incarnation)?))
}

/// How many ranks an engine has, by kind of parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineShape {
    pub tp: u32,
    pub pp: u32,
    /// Data parallelism: replicas inside this one engine, counted here and nowhere else.
    pub dp: u32,
}

impl EngineShape {
    /// Ranks of the engine: tp · pp · dp.
    pub fn ranks(self) -> Result<u32, SyncInfoError> {
        let EngineShape { tp, pp, dp } = self;
        if tp == 0 || pp == 0 || dp == 0 {
            return Err(SyncInfoError::EngineShape(self));
        }
        tp.checked_mul(pp).and_then(|n| n.checked_mul(dp)).ok_or(SyncInfoError::RankOverflow(self))
    }

    /// The first rank after this engine's, if its own begin at `offset`.
    fn end(self, offset: u32) -> Result<u32, SyncInfoError> {
        offset.checked_add(self.ranks()?).ok_or(SyncInfoError::RankOverflow(self))
    }
}

/// The size of the update group: rank 0 and every rank of every engine.
pub fn world_size(engines: &[EngineShape]) -> Result<u32, SyncInfoError> {
    engines.iter().try_fold(1, |offset, engine| engine.end(offset))
}

/// Each engine's rank offset: 1 for the first, then advancing by the ranks of the engine before.
pub fn rank_offsets(engines: &[EngineShape]) -> Result<Vec<u32>, SyncInfoError> {
    let mut next = 1;
    let mut offsets = Vec::with_capacity(engines.len());
    for engine in engines {
        offsets.push(next);
        next = engine.end(next)?;
    }
    Ok(offsets)
}

/// The rank in the update group of rank `local_rank` of an engine at `rank_offset`.
pub fn engine_rank(local_rank: u32, rank_offset: u32, engine: EngineShape) -> Result<u32, SyncInfoError> {
    let size = engine.ranks()?;
    if rank_offset == 0 {
        return Err(SyncInfoError::RankOffset);
    }
    if local_rank >= size {
        return Err(SyncInfoError::LocalRank { local_rank, size });
    }
    local_rank.checked_add(rank_offset).ok_or(SyncInfoError::RankOverflow(engine))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn agent() -> WeightSyncInfo {
        let endpoints = vec!["http://10.0.0.7:9000".parse().unwrap(), "[fe80::1]:9001".parse().unwrap()];
        let token = Token::new("hunter2").unwrap();
        let model = ModelId::new("actor").unwrap();
        let info = AgentWeightSyncInfo::new(endpoints, token, model, Some(Incarnation(u64::MAX))).unwrap();
        WeightSyncInfo::Agent(info)
    }

    fn torch(backend: Backend) -> WeightSyncInfo {
        let info = TorchDistributedWeightSyncInfo::new("10.0.0.7", 29500, 9, "weight_update_group", backend);
        WeightSyncInfo::TorchDistributed(info.unwrap())
    }

    fn error(value: Value) -> &'static str {
        WeightSyncInfo::from_value(&value).unwrap_err().name()
    }

    #[test]
    fn sync_infos_round_trip_through_json() {
        let store = StoreWeightSyncInfo { url: "s3://bucket/run".parse().unwrap() };
        let infos: [WeightSyncInfo; 5] = [
            torch(Backend::Nccl),
            torch(Backend::Gloo),
            WeightSyncInfo::Empty(EmptyWeightSyncInfo {}),
            agent(),
            WeightSyncInfo::Store(store),
        ];
        for info in infos {
            assert_eq!(WeightSyncInfo::from_value(&info.to_value()).unwrap(), info);
            assert_eq!(WeightSyncInfo::from_json(info.to_json().as_bytes()).unwrap(), info);
        }
    }

    #[test]
    fn the_token_of_an_agent_info_is_carried_but_never_printed() {
        assert_eq!(agent().to_value()["token"], "hunter2");
        assert!(!format!("{:?}", agent()).contains("hunter2"));
        // Nor by an error about the very field.
        let mut value = agent().to_value();
        value["token"] = "hunter2 with a space".into();
        let error = WeightSyncInfo::from_value(&value).unwrap_err();
        assert_eq!(error.name(), "bad_token");
        assert!(!format!("{error} {error:?}").contains("hunter2"));
    }

    #[test]
    fn only_nccl_and_gloo_are_backends() {
        assert_eq!(Backend::Nccl.as_str().parse::<Backend>().unwrap(), Backend::Nccl);
        assert_eq!(Backend::Gloo.as_str().parse::<Backend>().unwrap(), Backend::Gloo);
        for bad in ["", "mpi", "NCCL", "nccl "] {
            assert_eq!(bad.parse::<Backend>().unwrap_err().name(), "unknown_backend", "{bad:?}");
        }
    }

    #[test]
    fn malformed_sync_infos_are_named() {
        let with = |mut value: Value, field: &str, new: Value| {
            value[field] = new;
            error(value)
        };
        let t = || torch(Backend::Nccl).to_value();
        let a = || agent().to_value();
        assert_eq!(with(t(), "master_port", 0.into()), "bad_port");
        assert_eq!(with(t(), "master_port", 65536.into()), "bad_port");
        assert_eq!(with(t(), "master_port", "29500".into()), "wrong_type");
        assert_eq!(with(t(), "world_size", 1.into()), "bad_world_size");
        assert_eq!(with(t(), "world_size", (1u64 << 32).into()), "bad_world_size");
        assert_eq!(with(t(), "master_addr", "0.0.0.0".into()), "wildcard_host");
        assert_eq!(with(t(), "group_name", "".into()), "bad_group_name");
        assert_eq!(with(t(), "group_name", "a\nb".into()), "bad_group_name");
        assert_eq!(with(t(), "rank", 0.into()), "unknown_field");
        assert_eq!(with(t(), "backend", Value::Null), "missing_field");
        assert_eq!(with(a(), "endpoints", json!([])), "bad_endpoints");
        assert_eq!(with(a(), "endpoints", json!(["a:1", "a:1"])), "bad_endpoints");
        assert_eq!(with(a(), "endpoints", vec!["a:1"; MAX_ENDPOINTS + 1].into()), "bad_endpoints");
        assert_eq!(with(a(), "endpoints", json!(["a"])), "bad_endpoint");
        assert_eq!(with(a(), "model_id", "a/b".into()), "bad_identity");
        assert_eq!(with(a(), "incarnation", (-1).into()), "wrong_type");
        assert_eq!(with(a(), "type", "telepathy".into()), "unknown_type");
        assert_eq!(with(a(), "type", 7.into()), "wrong_type");
        assert_eq!(error(json!({ "type": "empty", "x": 1 })), "unknown_field");
        assert_eq!(error(json!({})), "missing_field");
        assert_eq!(error(json!([])), "wrong_type");
        assert_eq!(WeightSyncInfo::from_json(b"{").unwrap_err().name(), "not_json");
        let long = vec![b' '; MAX_JSON_BYTES + 1];
        assert_eq!(WeightSyncInfo::from_json(&long).unwrap_err().name(), "too_large");
    }

    #[test]
    fn the_world_is_one_trainer_and_all_engine_ranks_with_dp_counted_once() {
        let shape = |tp, pp, dp| EngineShape { tp, pp, dp };
        assert_eq!(world_size(&[]).unwrap(), 1);
        assert_eq!(world_size(&[shape(2, 3, 4); 2]).unwrap(), 1 + 2 * 24);
        assert_eq!(world_size(&[shape(2, 1, 1), shape(1, 1, 8), shape(4, 2, 1)]).unwrap(), 1 + 2 + 8 + 8);
    }

    #[test]
    fn rank_offsets_start_at_one_and_advance_by_the_ranks_of_each_engine() {
        let shape = |tp, pp, dp| EngineShape { tp, pp, dp };
        assert_eq!(rank_offsets(&[shape(2, 1, 1), shape(1, 2, 8), shape(1, 1, 1)]).unwrap(), [1, 3, 19]);
        assert_eq!(rank_offsets(&[]).unwrap(), [0u32; 0]);
        assert_eq!(engine_rank(15, 3, shape(1, 2, 8)).unwrap(), 18);
        assert_eq!(engine_rank(16, 3, shape(1, 2, 8)).unwrap_err().name(), "bad_local_rank");
        assert_eq!(engine_rank(0, 0, shape(1, 1, 1)).unwrap_err().name(), "bad_rank_offset");
        assert_eq!(engine_rank(1, u32::MAX, shape(2, 1, 1)).unwrap_err().name(), "rank_overflow");
    }

    #[test]
    fn rank_arithmetic_is_checked() {
        let shape = |tp, pp, dp| EngineShape { tp, pp, dp };
        for zero in [shape(0, 1, 1), shape(1, 0, 1), shape(1, 1, 0)] {
            assert_eq!(world_size(&[zero]).unwrap_err().name(), "bad_engine_shape");
            assert_eq!(rank_offsets(&[zero]).unwrap_err().name(), "bad_engine_shape");
        }
        for engines in [&[shape(1 << 16, 1 << 16, 1)][..], &[shape(1 << 31, 1, 1), shape(1 << 31, 1, 1)]] {
            assert_eq!(world_size(engines).unwrap_err().name(), "rank_overflow");
            assert_eq!(rank_offsets(engines).unwrap_err().name(), "rank_overflow");
        }
    }

    proptest! {
        #[test]
        fn every_engine_rank_is_a_rank_of_its_own(
            shapes in prop::collection::vec((1..4u32, 1..4u32, 1..4u32), 0..8)
        ) {
            let engines: Vec<_> = shapes.into_iter().map(|(tp, pp, dp)| EngineShape { tp, pp, dp }).collect();
            let offsets = rank_offsets(&engines).unwrap();
            let ranks: Vec<u32> = engines.iter().zip(offsets).flat_map(|(&engine, offset)| {
                (0..engine.ranks().unwrap()).map(move |local| engine_rank(local, offset, engine).unwrap())
            }).collect();
            prop_assert_eq!(ranks, (1..world_size(&engines).unwrap()).collect::<Vec<_>>());
        }
    }
}
