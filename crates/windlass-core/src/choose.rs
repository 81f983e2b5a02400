//! Which strategy, link and codec fit the facts, and why.
//!
//! Owns: the decision, and nothing of its execution. Called by the trainer side before sync info is made, by
//! `windlass doctor` and by the live page, which show [`Choice::why`] and [`Choice::considered`] as they are.
//! Must not: look for the facts itself. The caller asks the machine for GPUs, libraries and
//! peers; [`choose`] is a pure function of these facts and of the configuration.
//!
//! # How it decides
//!
//! The strategies have one order of preference ([`Strategy::ALL`]). For each, `choose` asks three questions:
//!
//! 1. *Does the configuration rule it out?* Every field of [`Overrides`] that is set narrows the list.
//! 2. *Is it impossible here?* IPC handles do not open on another GPU, NCCL refuses two ranks on one GPU, a
//!    collective group cannot gain members, a store needs an address, NIXL needs its library.
//! 3. *Does it suit?* Possible is not the same as sensible: a store between neighbours, RDMA within one host.
//!
//! The first strategy that passes all three is chosen. If overrides leave only strategies that do not suit,
//! the first possible one of those is chosen, because an override wins. If they leave no possible strategy,
//! the result is an error that gives the reason. So without overrides:
//!
//! | facts | strategy | link |
//! |---|---|---|
//! | an adapter is trained | `lora` | `file` with a shared path, else `shm` or `tcp` |
//! | engines on the trainers' GPUs, backend nccl | `packed_cuda_ipc` (`cuda_ipc` if `pack_weights` is false) | `cuda_ipc` |
//! | engines in another region, a store is given | `store` | `store`, or `file` for a local path |
//! | a fixed set of engines, backend nccl with GPUs, or gloo | `broadcast` | `collective` |
//! | engines come and go, RDMA between hosts | `nixl` | `nixl` |
//! | anything else | `tcp` | `shm` on one host, else `tcp` |
//!
//! The codec follows: collectives, IPC and adapters carry whole tensors; the pulling strategies carry deltas
//! if the peer can decode them and few enough elements change. Context mode saves about three bits a change
//! and costs the receiver one more pass over the old weights, so it is taken only on a link so slow that the
//! bits take longer than the pass.
//!
//! Last comes the encoder, and with it the offload mode of the trainers: *delta* (the GPU compares with a baseline that it
//! keeps, and only records cross the bus) if there is a usable GPU, records are plain, and comparing is expected to
//! take less time than a copy. The part of the baseline that does not fit on the GPU is on the host, and the GPU reads it
//! over the bus ([`baseline`]). *Copy* (the agent compares slots) otherwise.
//!
//! # GPU requirements
//!
//! | for | facts | without |
//! |---|---|---|
//! | either kind of IPC | engines on the trainers' very GPUs, none of them reached by HTTP only, nor, unless it is demanded, SGLang, a driver and GPUs of the least version on both sides ([`Cuda`]), memory handles, one IPC and pid namespace | `broadcast` by gloo, or `tcp` over shared memory |
//! | `packed_cuda_ipc` | `arena_bytes` free | `cuda_ipc` |
//! | `cuda_ipc` | memory that torch's allocator lets others open; the rest is gathered into an arena | as for either kind |
//! | offload by delta | so much of `baseline_bytes` in half of the free GPU memory (in more of it if delta mode is demanded) that comparing takes less time than a copy, or `gpu_baseline_fits` | offload by copy |
//!
//! # Strict
//!
//! An option that was not taken only because something is *missing* (a GPU, a library, a peer's
//! capability, the address of a store) is marked [`Considered::blocked`]. With `strict`, a choice that comes
//! after a blocked option is an error that names the option and the missing thing: a silent fallback
//! makes a sync ten times slower unnoticed. An option that the configuration itself ruled out is
//! not a fallback.
//!
//! # Invariants
//!
//! 1. The result is a function of the arguments: `choosing_is_deterministic_explained_and_possible`.
//! 2. No result is impossible under the facts: the same test.
//! 3. `why` is never empty, and every other strategy appears in `considered` once: the same test.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::Kind;
pub use crate::sync_info::Backend;
pub use cuda::{Cuda, NEEDS_CAPABILITY, NEEDS_DRIVER};

pub mod baseline;
mod cuda;
mod rules;
#[cfg(test)]
mod tests;

macro_rules! names {
    ($(#[$meta:meta])* $enum:ident { $($(#[$vmeta:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $enum { $($(#[$vmeta])* $variant,)* }

        impl $enum {
            /// Every value; where one is preferred to another, it comes first.
            pub const ALL: &'static [$enum] = &[$($enum::$variant,)*];

            /// The name used in configuration, JSON and logs.
            pub const fn as_str(self) -> &'static str {
                match self { $($enum::$variant => $name,)* }
            }
        }

        impl fmt::Display for $enum {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

names! {
    /// How the two sides meet.
    Strategy {
        /// Adapters only: a PEFT directory on a shared path, or the adapter as an image of its own.
        Lora = "lora",
        /// Colocated: buckets packed into one arena whose handle lives as long as the run.
        PackedCudaIpc = "packed_cuda_ipc",
        /// Colocated: one handle per parameter.
        CudaIpc = "cuda_ipc",
        /// Anchors and deltas in a directory or an object store.
        Store = "store",
        /// A collective over a fixed group of trainer rank 0 and all engine ranks.
        Broadcast = "broadcast",
        /// Engines pull from an agent by RDMA.
        Nixl = "nixl",
        /// Engines pull from an agent over TCP, or map its slot on the same host.
        Tcp = "tcp",
    }
}

names! {
    /// The transport of the bytes.
    Link {
        /// Shared memory of one host.
        Shm = "shm",
        /// TCP streams.
        Tcp = "tcp",
        /// CUDA IPC handles.
        CudaIpc = "cuda_ipc",
        /// The process group's own transport.
        Collective = "collective",
        /// RDMA through NIXL.
        Nixl = "nixl",
        /// An object store.
        Store = "store",
        /// A file system that both sides see.
        File = "file",
    }
}

names! {
    /// The form of the bytes.
    Codec {
        /// Whole tensors.
        Full = "full",
        /// Changes, in the mode that decodes without the old weights and composes.
        DeltaPlain = "delta_plain",
        /// Changes, in the smaller mode that needs the old weights to decode.
        DeltaContext = "delta_context",
    }
}

names! {
    /// The process that finds the changes.
    Encoder {
        /// The agent's threads, from the two slots.
        Host = "host",
        /// The trainers' GPUs, against a baseline kept there; only the delta crosses the bus.
        Gpu = "gpu",
    }
}

names! {
    /// How trainers put a version into their region.
    Offload {
        /// The GPU finds the changes since its baseline, and only these cross the bus.
        Delta = "delta",
        /// All weights are copied.
        Copy = "copy",
    }
}

names! {
    /// Where the engines run, seen from the trainers.
    Placement {
        /// On the trainers' GPUs (`colocate_all`).
        SameGpu = "same_gpu",
        /// On the trainers' host, on GPUs of their own or on none.
        SameHost = "same_host",
        /// On another host.
        Remote = "remote",
    }
}

names! {
    /// The software that serves the model.
    Engine {
        /// vLLM with our worker extension.
        Vllm = "vllm",
        /// SGLang with our loader.
        Sglang = "sglang",
        /// Any engine that is reached by its HTTP interface only.
        Http = "http",
        /// A custom engine with our receiver inside.
        Custom = "custom",
    }
}

/// The engine side's decoders, from its registration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Peer {
    pub delta: bool,
    /// It decodes context mode too, and registered for it.
    pub context: bool,
    /// Its codec version; unknown before it registered.
    pub codec_version: Option<u16>,
}

/// Facts about the run and the machines. The default is the least: remote, nothing present.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "independent findings, not states of one thing")]
pub struct Facts {
    /// Where the engines run.
    pub placement: Placement,
    /// Trainers or engines are on more than one host, so that no engine finds all shares on its own.
    pub several_hosts: bool,
    /// The backend that the run uses for its collectives.
    pub backend: Backend,
    /// UUIDs of the trainers' GPUs; empty if they have none.
    pub trainer_gpus: Vec<String>,
    /// UUIDs of the engines' GPUs; empty if they have none.
    pub engine_gpus: Vec<String>,
    /// The kinds of engines.
    pub engines: Vec<Engine>,
    /// Engines may join and leave during the run.
    pub elastic: bool,
    /// The engines are in another region, or cannot reach the trainers' hosts.
    pub cross_region: bool,
    /// Address of a store: a URL, or a path on a shared file system.
    pub store_url: Option<String>,
    /// NIXL can be used on both sides. Not accepted in JSON: in Python it is no strategy but a setting of `tcp`, whose agent and
    /// receivers find out by themselves; services use it with `--nixl`.
    #[serde(skip)]
    pub nixl_library: bool,
    /// There is an RDMA device on both sides.
    pub rdma_device: bool,
    /// Only an adapter is trained and synced.
    pub lora: bool,
    /// A directory that trainers and engines see, for adapters.
    pub lora_sync_path: Option<String>,
    /// Bytes of one image.
    pub model_bytes: Option<u64>,
    /// Speed of the slowest link to an engine, in bytes per second.
    pub link_bytes_per_second: Option<u64>,
    /// Share of elements expected to change per step, 0 to 1.
    pub change_rate: Option<f64>,
    pub peer: Peer,
    pub codec_version: u16,
    /// The trainers' GPUs have room for a baseline; used only if the bytes are not known.
    pub gpu_baseline_fits: bool,
    /// Facts about CUDA at the trainers.
    pub trainer_cuda: Cuda,
    /// Facts about CUDA at the engines.
    pub engine_cuda: Cuda,
    /// The engines' GPUs reach the memory of the trainers'.
    pub peer_access: Option<bool>,
    /// Bytes of the weights that one rank publishes, in the image's dtypes: a baseline holds a copy of them.
    pub baseline_bytes: Option<u64>,
    /// Bytes of the arena of packed IPC, both halves.
    pub arena_bytes: Option<u64>,
}

impl Default for Facts {
    fn default() -> Facts {
        Facts {
            placement: Placement::Remote,
            several_hosts: false,
            backend: Backend::Nccl,
            trainer_gpus: Vec::new(),
            engine_gpus: Vec::new(),
            engines: Vec::new(),
            elastic: false,
            cross_region: false,
            store_url: None,
            nixl_library: false,
            rdma_device: false,
            lora: false,
            lora_sync_path: None,
            model_bytes: None,
            link_bytes_per_second: None,
            change_rate: None,
            peer: Peer::default(),
            codec_version: 1,
            gpu_baseline_fits: false,
            trainer_cuda: Cuda::default(),
            engine_cuda: Cuda::default(),
            peer_access: None,
            baseline_bytes: None,
            arena_bytes: None,
        }
    }
}

/// The demands of the configuration; `None` leaves the decision to [`choose`].
///
/// In JSON each key may carry the prefix `generator.`, `null` means unset, and an unknown key is an error
/// that suggests the nearest known one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
pub struct Overrides {
    /// The collective backend, instead of the one among the facts.
    pub weight_sync_backend: Option<Backend>,
    /// Whether IPC packs parameters into buckets. True also demands IPC.
    pub pack_weights: Option<bool>,
    /// Whether to use CUDA IPC.
    pub use_cuda_ipc: Option<bool>,
    pub strategy: Option<Strategy>,
    pub link: Option<Link>,
    pub codec: Option<Codec>,
    pub encoder: Option<Encoder>,
    /// How trainers offload; `auto` is unset.
    pub offload_mode: Option<Offload>,
    /// Make a slower fallback an error.
    pub strict: bool,
}

impl Overrides {
    /// The keys that JSON may hold.
    pub const KEYS: [&'static str; 9] = [
        "weight_sync_backend",
        "pack_weights",
        "use_cuda_ipc",
        "strategy",
        "link",
        "codec",
        "encoder",
        "offload_mode",
        "strict",
    ];
}

impl TryFrom<Map<String, Value>> for Overrides {
    type Error = ChooseError;

    fn try_from(map: Map<String, Value>) -> Result<Overrides, ChooseError> {
        fn read<T: serde::de::DeserializeOwned>(key: &str, value: Value) -> Result<Option<T>, ChooseError> {
            serde_json::from_value(value)
                .map_err(|cause| ChooseError::BadValue { key: key.to_owned(), cause: cause.to_string() })
        }
        let mut o = Overrides::default();
        for (key, value) in map {
            match key.strip_prefix("generator.").unwrap_or(&key) {
                "weight_sync_backend" => o.weight_sync_backend = read(&key, value)?,
                "pack_weights" => o.pack_weights = read(&key, value)?,
                "use_cuda_ipc" => o.use_cuda_ipc = read(&key, value)?,
                "strategy" => o.strategy = read(&key, value)?,
                "link" => o.link = read(&key, value)?,
                "codec" => o.codec = read(&key, value)?,
                "encoder" => o.encoder = read(&key, value)?,
                "offload_mode" if value == "auto" => o.offload_mode = None,
                "offload_mode" => {
                    o.offload_mode = read(&key, value).map_err(|e| match e {
                        ChooseError::BadValue { key, cause } => {
                            ChooseError::BadValue { key, cause: format!("{cause}, or `auto`") }
                        }
                        other => other,
                    })?;
                }
                "strict" => o.strict = read(&key, value)?.unwrap_or(false),
                _ => return Err(ChooseError::unknown_key(&key)),
            }
        }
        Ok(o)
    }
}

/// A question that [`choose`] decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    Strategy(Strategy),
    Link(Link),
    Codec(Codec),
    Encoder(Encoder),
    /// A way to offload.
    Offload(Offload),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::Strategy(s) => write!(f, "strategy {s}"),
            Subject::Link(l) => write!(f, "link {l}"),
            Subject::Codec(c) => write!(f, "codec {c}"),
            Subject::Encoder(e) => write!(f, "encoder {e}"),
            Subject::Offload(o) => write!(f, "offload by {o}"),
        }
    }
}

/// An option that was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Considered {
    pub option: Subject,
    /// Why it was not taken.
    pub why_not: String,
    /// Something is missing without which it would have been taken.
    pub blocked: bool,
}

/// The decision and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    pub strategy: Strategy,
    pub link: Link,
    pub codec: Codec,
    /// The encoder, if anything is encoded.
    pub encoder: Option<Encoder>,
    /// How trainers offload, if they publish an image (`WeightManager(offload_mode=…)`).
    pub offload: Option<Offload>,
    /// The reason, as text.
    pub why: String,
    /// The options that were not taken.
    pub considered: Vec<Considered>,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} over {}, {}: {}", self.strategy, self.link, self.codec, self.why)?;
        for c in &self.considered {
            let mark = if c.blocked { " (blocked)" } else { "" };
            write!(f, "\n  not {}{mark}: {}", c.option, c.why_not)?;
        }
        Ok(())
    }
}

/// Why there is no choice.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ChooseError {
    #[error("{option} was demanded by {by}, but cannot work here: {why}")]
    Impossible {
        option: Subject,
        /// The overrides that leave nothing else.
        by: String,
        /// The obstacle, and the remedy.
        why: String,
    },
    #[error("{by} contradict each other: no strategy satisfies all of them; remove one")]
    Contradiction { by: String },
    #[error("strict: {faster} would be faster than {chosen}, but {blocked_by}")]
    Fallback {
        faster: Subject,
        /// The fallback that `strict` refused.
        chosen: Subject,
        /// The missing thing, and the remedy.
        blocked_by: String,
    },
    #[error("fact {name} is {value}, expected {expected}")]
    BadFact { name: &'static str, value: String, expected: &'static str },
    #[error("unknown override {key:?}; did you mean {suggestion:?}? Known: {}", Overrides::KEYS.join(", "))]
    UnknownKey { key: String, suggestion: &'static str },
    /// A known key with a value of the wrong kind.
    #[error("override {key:?}: {cause}")]
    BadValue {
        key: String,
        /// The fault in its value.
        cause: String,
    },
}

impl ChooseError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ChooseError::Impossible { .. } | ChooseError::Fallback { .. } => Kind::Unsupported,
            ChooseError::Contradiction { .. }
            | ChooseError::BadFact { .. }
            | ChooseError::UnknownKey { .. }
            | ChooseError::BadValue { .. } => Kind::Invalid,
        }
    }

    fn unknown_key(key: &str) -> ChooseError {
        // A key from outside may be of any length; enough of it is compared and shown.
        let key: String = key.chars().take(64).collect();
        let bare = key.strip_prefix("generator.").unwrap_or(&key);
        let distance = |known: &&&str| strsim::osa_distance(bare, known);
        let suggestion = Overrides::KEYS.iter().min_by_key(distance).copied().unwrap_or_default();
        ChooseError::UnknownKey { key, suggestion }
    }
}

/// Decides. See the module's documentation for the rules.
pub fn choose(facts: &Facts, overrides: &Overrides) -> Result<Choice, ChooseError> {
    if let Some(rate) = facts.change_rate
        && !(0.0..=1.0).contains(&rate)
    {
        let value = rate.to_string();
        return Err(ChooseError::BadFact { name: "change_rate", value, expected: "a share from 0 to 1" });
    }
    rules::decide(facts, overrides)
}

impl Strategy {
    /// The links that can serve it.
    pub const fn links(self) -> &'static [Link] {
        match self {
            Strategy::Lora => &[Link::File, Link::Shm, Link::Tcp],
            Strategy::PackedCudaIpc | Strategy::CudaIpc => &[Link::CudaIpc],
            Strategy::Store => &[Link::Store, Link::File],
            Strategy::Broadcast => &[Link::Collective],
            Strategy::Nixl => &[Link::Nixl],
            Strategy::Tcp => &[Link::Shm, Link::Tcp],
        }
    }

    /// Whether it can carry deltas.
    pub const fn carries_deltas(self) -> bool {
        match self {
            Strategy::Store | Strategy::Nixl | Strategy::Tcp => true,
            Strategy::Lora | Strategy::PackedCudaIpc | Strategy::CudaIpc | Strategy::Broadcast => false,
        }
    }

    /// Whether trainers publish an image of the model for it.
    const fn publishes(self) -> bool {
        match self {
            Strategy::Store | Strategy::Nixl | Strategy::Tcp => true,
            Strategy::Lora | Strategy::PackedCudaIpc | Strategy::CudaIpc | Strategy::Broadcast => false,
        }
    }

    const fn is_ipc(self) -> bool {
        match self {
            Strategy::PackedCudaIpc | Strategy::CudaIpc => true,
            Strategy::Lora | Strategy::Store | Strategy::Broadcast | Strategy::Nixl | Strategy::Tcp => false,
        }
    }
}
