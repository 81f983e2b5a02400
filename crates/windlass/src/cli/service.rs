//! Arguments of `agent`, `receive`, `verify` and `gc`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use windlass_core::address::{AddressError, Host, StoreUrl, Token};
use windlass_core::barrier::ReceiverId;
use windlass_core::identity::ModelId;
use windlass_core::slice::Selection;
use windlass_core::store::{AnchorPolicy, Retention};
use windlass_core::wire::MAX_STREAMS;
use windlass_core::wire::control::RequestMode;
use windlass_data::nixl;
use windlass_data::private::Readers;
use windlass_data::receiver::RelayConfig;
use windlass_data::tls::Trust;

use super::{Threads, Work, done, parse_count};
use crate::error::Error;
use crate::service::agent::Agent;
use crate::service::disk::Pattern;
use crate::service::disk::as_dir::AsDir;
use crate::service::engines::prove::Prove;
use crate::service::engines::{CachePolicy, EngineOptions, EngineSpec, Extras, ModelEngine, PauseMode};
use crate::service::nixl::{Nixl, When};
use crate::service::receive::{Controlled, Publisher, Receive};
use crate::service::store::fallback::{AWAY, FallbackStore};
use crate::service::store::publish::StoreOptions;
use crate::service::tls;
use crate::service::token;
use crate::tools::gc::Gc;
use crate::tools::store::Place;
use crate::tools::store::orphans::Orphans;
use crate::tools::verify::Verify;

/// The default directory for regions and images.
pub(super) const SHM: &str = "/dev/shm";

#[derive(Debug, Args)]
pub(super) struct ParsedAgent {
    /// The region to serve: the directory that the trainer created
    #[arg(long, value_name = "DIR")]
    region: PathBuf,
    /// The address to listen on
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), value_name = "IP")]
    bind: IpAddr,
    /// Port for requests, or a range such as 7000-7099 of which the agent takes the first free port; 0 takes any
    #[arg(long, value_parser = parse_ports, default_value = "0", value_name = "PORT or FIRST-LAST")]
    ports: (u16, u16),
    /// The same for data [default: the range of --ports, if it is a range; else any]
    #[arg(long, value_parser = parse_ports, value_name = "PORT or FIRST-LAST")]
    data_ports: Option<(u16, u16)>,
    /// Host name for receivers to connect to [default: the address of --bind]
    #[arg(long, value_name = "HOST")]
    advertise_host: Option<String>,
    #[command(flatten)]
    token: TokenArgs,
    /// How many deltas to keep for receivers that are behind
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096), value_name = "N")]
    history: u32,
    /// How many bytes of deltas to keep
    #[arg(long, default_value = "4Gi", value_parser = parse_count, value_name = "BYTES")]
    history_bytes: u64,
    /// Re-hash every Nth version published by delta (and the first); 0 disables
    #[arg(long, default_value_t = 16, value_name = "N")]
    check_every: u64,
    /// Receivers pass deltas on to each other once there are this many that can, and full images always; 0 disables relay
    #[arg(long, default_value_t = 3, value_name = "N")]
    relay_from: usize,
    /// TCP streams per transfer
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_STREAMS)), value_name = "N")]
    streams: u16,
    /// Timeout of a transfer, in seconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "S")]
    timeout: u64,
    /// URL of an agent that holds another part of the model; repeatable
    #[arg(long = "peer", value_name = "URL")]
    peers: Vec<String>,
    #[command(flatten)]
    server: ServerTls,
    #[command(flatten)]
    client: ClientTls,
    #[command(flatten)]
    store: ParsedStore,
    /// How long to wait for the trainer to create the region, in seconds
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(0..=86_400), value_name = "S")]
    wait: u64,
    /// Exit when standard input closes, that is, when the parent process exits
    #[arg(long)]
    with_parent: bool,
    /// Ports of an earlier agent, for requests and data, to try first
    #[arg(long, value_parser = parse_again, hide = true, value_name = "PORT,PORT")]
    again: Option<(u16, u16)>,
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    nixl: ParsedNixl,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Store: uploading versions to S3, GCS, Azure or a shared disk")]
struct ParsedStore {
    /// Where to upload each sealed version, below a folder named after the model: s3://BUCKET/RUN, gs://BUCKET/RUN,
    /// az://CONTAINER/RUN or file:///DIRECTORY. Credentials come from the environment
    #[arg(long, value_name = "URL")]
    store: Option<StoreUrl>,
    /// Upload a full image after this many versions at the latest; and whenever the deltas since the last one have more bytes
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=2048), value_name = "N", requires = "store")]
    store_anchor_every: u32,
    #[command(flatten)]
    keep: ParsedRetention,
    /// Upload at most this many bytes per second [default: as fast as possible]
    #[arg(long, value_parser = parse_count, value_name = "BYTES", requires = "store")]
    store_bandwidth: Option<u64>,
    /// Bytes of a part of a full image
    #[arg(long, default_value = "32Mi", value_parser = parse_part, value_name = "BYTES", requires = "store")]
    store_part_bytes: u64,
    /// How many parts to upload at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64), value_name = "N", requires = "store")]
    store_streams: u8,
}

/// How many versions a store keeps.
#[derive(Debug, Args)]
struct ParsedRetention {
    /// Keep at most this many versions in the store [default: all]
    #[arg(long = "store-keep", value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
    count: Option<u64>,
    /// Remove versions from the store that are older than this many hours [default: never]
    #[arg(long = "store-keep-hours", value_parser = parse_hours, value_name = "H")]
    hours: Option<u64>,
    /// Remove the oldest versions from the store beyond this many bytes of all [default: never]
    #[arg(long = "store-keep-bytes", value_parser = parse_count, value_name = "BYTES")]
    bytes: Option<u64>,
}

impl ParsedRetention {
    fn limits(&self) -> Retention {
        Retention { count: self.count, age_ms: self.hours, bytes: self.bytes }
    }
}

impl ParsedStore {
    fn check(self) -> Result<Option<StoreOptions>, Error> {
        let keep = self.keep.limits();
        let Some(url) = self.store else {
            if keep != Retention::default() {
                return Err(Error::Usage(
                    "--store-keep, --store-keep-hours and --store-keep-bytes need --store".into(),
                ));
            }
            return Ok(None);
        };
        Ok(Some(StoreOptions {
            url,
            anchor: AnchorPolicy { every: self.store_anchor_every },
            keep,
            bandwidth: self.store_bandwidth,
            part_bytes: self.store_part_bytes,
            streams: self.store_streams.into(),
        }))
    }
}

/// The length of a part: the largest block must fit, and an answer that has it.
fn parse_part(text: &str) -> Result<u64, String> {
    let bytes = parse_count(text)?;
    let fits = (MIN_PART..=MAX_PART).contains(&bytes);
    if fits { Ok(bytes) } else { Err(format!("{bytes} is not between {MIN_PART} and {MAX_PART}")) }
}

/// The bounds of a part; S3 takes no smaller part of a multipart upload than 5 MiB.
const MIN_PART: u64 = 5 << 20;
const MAX_PART: u64 = 128 << 20;

/// A number of hours.
fn parse_age(text: &str) -> Result<f64, String> {
    let hours = text.parse::<f64>().ok().filter(|h| (0.0..1e6).contains(h));
    hours.ok_or_else(|| format!("{text:?} is not a number of hours"))
}

/// A positive number of hours, as milliseconds.
pub(super) fn parse_hours(text: &str) -> Result<u64, String> {
    let hours = text.parse::<f64>().ok().filter(|h| *h > 0.0 && *h < 1e6);
    hours.map(|h| (h * 3_600_000.0) as u64).ok_or_else(|| format!("{text:?} is not a number of hours"))
}

#[derive(Debug, Args)]
pub(super) struct TokenArgs {
    /// File with the token that both sides share; an agent or a controller makes it if it is missing [default: the token in
    /// WINDLASS_TOKEN, else the file of the service itself]
    #[arg(long, value_name = "FILE")]
    pub(super) token_file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ParsedWhen {
    Off,
    Auto,
    On,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "NIXL: images read from memory, for hosts with RDMA")]
pub(super) struct ParsedNixl {
    /// Whether receivers read full images from the agent's memory by NIXL, which does not encrypt. Both ends need it; `auto`
    /// takes it where this host has the library and an RDMA device
    #[arg(long, value_enum, default_value = "off", value_name = "WHEN")]
    nixl: ParsedWhen,
    #[command(flatten)]
    library: NixlLibrary,
}

#[derive(Debug, Args)]
pub(super) struct NixlLibrary {
    /// libnixl_capi.so, or the directory of Python packages with nixl-cu12 [default: that of the active Python environment]
    #[arg(long, value_name = "PATH")]
    nixl_library: Option<PathBuf>,
    /// Parameter of NIXL's UCX plugin, such as engine_config=TLS=tcp; repeatable
    #[arg(long = "nixl-param", value_name = "NAME=VALUE")]
    nixl_params: Vec<String>,
}

impl NixlLibrary {
    pub(super) fn check(self) -> Result<nixl::Config, Error> {
        let param = |text: String| match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
            Some(_) | None => Err(Error::Usage(format!("--nixl-param {text}: give it as NAME=VALUE"))),
        };
        let params = self.nixl_params.into_iter().map(param).collect::<Result<_, _>>()?;
        Ok(nixl::Config { library: self.nixl_library, params })
    }
}

impl ParsedNixl {
    fn check(self) -> Result<Nixl, Error> {
        let when = match self.nixl {
            ParsedWhen::Off => When::Off,
            ParsedWhen::Auto => When::Auto,
            ParsedWhen::On => When::On,
        };
        let config = self.library.check()?;
        if when == When::Off && !config.params.is_empty() {
            let text =
                "--nixl-param is of no use without --nixl auto or on: add that, or leave the parameters out";
            return Err(Error::Usage(text.into()));
        }
        Ok(Nixl { when, config })
    }
}

/// The certificate of a server.
#[derive(Debug, Args)]
pub(super) struct ServerTls {
    /// This server's certificate chain in PEM, leaf first. Requests and data then use TLS, and the address begins with
    /// https://
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert in PEM, readable only by its owner
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl ServerTls {
    pub(super) fn files(self) -> Option<(PathBuf, PathBuf)> {
        self.tls_cert.zip(self.tls_key)
    }
}

/// The certificate authorities that a client trusts.
#[derive(Debug, Args)]
pub(super) struct ClientTls {
    /// Certificate authorities to trust for https:// addresses: a file in PEM [default: the file in WINDLASS_TLS_CA, else
    /// those of the system]
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
}

impl ClientTls {
    pub(super) fn trust(&self) -> Result<Option<Trust>, Error> {
        tls::trust(self.tls_ca.as_deref())
    }
}

impl TokenArgs {
    /// The token from the environment, unless a file is given.
    pub(super) fn in_environment(&self) -> Result<Option<Token>, Error> {
        if self.token_file.is_some() {
            return Ok(None);
        }
        token::in_environment()
    }
}

impl ParsedAgent {
    pub(super) fn check(self) -> Result<Agent, Error> {
        let host = self.advertise_host.map(|h| Host::new(&h));
        Ok(Agent {
            region: self.region,
            bind: self.bind,
            ports: self.ports,
            data_ports: self.data_ports.unwrap_or(if self.ports.0 < self.ports.1 {
                self.ports
            } else {
                (0, 0)
            }),
            advertise_host: host.transpose().map_err(|e| Error::Usage(e.to_string()))?,
            token: self.token.in_environment()?,
            token_file: self.token.token_file,
            history: self.history as usize,
            history_bytes: self.history_bytes,
            check_every: self.check_every,
            relay_from: self.relay_from,
            nixl: self.nixl.check()?,
            threads: self.threads.count(),
            streams: self.streams,
            timeout: Duration::from_secs(self.timeout),
            peers: self.peers,
            trust: self.client.trust()?,
            tls: self.server.files(),
            store: self.store.check()?,
            wait: Duration::from_secs(self.wait),
            with_parent: self.with_parent,
            again: self.again,
        })
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ParsedMode {
    /// A delta if possible, otherwise the full image
    Auto,
    /// Always the full image
    Full,
    /// Only deltas after the first version; waits if no delta is available
    Delta,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("publisher").required(true).multiple(true).args(["from", "region", "in_place", "controller"])))]
pub(super) struct ParsedReceive {
    /// A publisher's agent, such as http://10.0.0.5:7000, or a store: s3://BUCKET/RUN[/MODEL], gs://, az:// or
    /// file:///DIRECTORY; repeatable, one per model
    #[arg(long, value_name = "URL")]
    from: Vec<String>,
    /// Get this version from the store instead of following the newest, and exit
    #[arg(long, value_name = "VERSION", requires = "from", conflicts_with_all = ["versions", "until", "controller", "region", "in_place"])]
    version: Option<u64>,
    /// While an agent cannot be reached, take versions from this store, to which the agent uploads them: s3://BUCKET/RUN and so on
    #[arg(long, value_name = "URL", conflicts_with_all = ["version", "in_place", "controller"])]
    store: Option<String>,
    /// How long an agent must be away until versions come from --store, in seconds
    #[arg(long, default_value_t = AWAY.as_secs_f64(), value_parser = parse_seconds, requires = "store", value_name = "S")]
    store_after: f64,
    /// Region of a publisher on this host, which has the agent's address and token
    #[arg(long, value_name = "DIR")]
    region: Vec<PathBuf>,
    /// Region of a publisher on this host, read in place instead of copied
    #[arg(long, value_name = "DIR")]
    in_place: Vec<PathBuf>,
    /// The controller that orders which versions to stage and when to load them [default: WINDLASS_CONTROLLER, unless an
    /// agent or a region is given]
    #[arg(long, value_name = "URL", requires = "model", conflicts_with_all = ["from", "region", "in_place"])]
    controller: Option<String>,
    /// File with the controller's token [default: the agents' token]
    #[arg(long, value_name = "FILE", requires = "controller")]
    controller_token_file: Option<PathBuf>,
    /// A model that this receiver serves; repeatable
    #[arg(long, value_name = "ID", requires = "controller")]
    model: Vec<ModelId>,
    #[command(flatten)]
    token: TokenArgs,
    #[command(flatten)]
    client: ClientTls,
    /// Directory for images; each model gets a subdirectory named after it
    #[arg(long, default_value = SHM, value_name = "DIR")]
    dir: PathBuf,
    /// File that names the part of the model to keep, in JSON: {"lm_head.weight": [[[0, 64000]]], "model.layers.0.*": [[]]}
    /// [default: all of it]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["in_place", "as_dir", "engines"])]
    slice: Option<PathBuf>,
    /// Name of this receiver. With a controller it is the receiver's identity and must survive restarts [default: the host's name
    /// and the process ID; with a controller, the host's name and --dir]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Transfer mode
    #[arg(long, value_enum, default_value_t = ParsedMode::Auto)]
    mode: ParsedMode,
    /// TCP streams per transfer [default: the publisher's]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_STREAMS)), value_name = "N")]
    streams: Option<u16>,
    /// Timeout of a transfer, in seconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "S")]
    timeout: u64,
    /// Exit after this many new versions
    #[arg(long, value_name = "N")]
    versions: Option<u64>,
    /// Exit once this version has arrived
    #[arg(long, value_name = "VERSION")]
    until: Option<u64>,
    /// Let the user's group read the image
    #[arg(long)]
    group: bool,
    /// Exit when standard input closes, that is, when the parent process exits
    #[arg(long)]
    with_parent: bool,
    #[command(flatten)]
    engines: ParsedEngines,
    #[command(flatten)]
    disk: ParsedAsDir,
    #[command(flatten)]
    relay: ParsedRelay,
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    nixl: ParsedNixl,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Relay: passing versions on to other receivers")]
struct ParsedRelay {
    /// Do not pass versions on, and take them from agents only
    #[arg(long)]
    no_relay: bool,
    /// The address to listen on for other receivers [default: the address from which this host reaches the agent]
    #[arg(long, value_name = "IP", conflicts_with = "no_relay")]
    relay_bind: Option<IpAddr>,
    /// Port to listen on, or a range such as 7100-7199; 0 takes any
    #[arg(long, value_parser = parse_ports, default_value = "0", value_name = "PORT or FIRST-LAST")]
    relay_ports: (u16, u16),
    /// Host name for other receivers to connect to [default: the address of --relay-bind]
    #[arg(long, value_name = "HOST", conflicts_with = "no_relay")]
    relay_host: Option<String>,
    /// This receiver's certificate chain in PEM, leaf first, for --relay-host. Without it, versions of agents that use TLS
    /// are not passed on
    #[arg(long, value_name = "FILE", requires = "tls_key", requires = "relay_host")]
    tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert in PEM, readable only by its owner
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl ParsedRelay {
    fn check(self) -> Result<Option<RelayConfig>, Error> {
        if self.no_relay {
            return Ok(None);
        }
        let host = self.relay_host.map(|h| Host::new(&h)).transpose();
        let host = host.map_err(|e| Error::Usage(e.to_string()))?;
        if let Some(bind) = self.relay_bind.filter(|bind| bind.is_unspecified() && host.is_none()) {
            return Err(Error::Usage(format!(
                "--relay-bind {bind} listens on every address: say with --relay-host which one other receivers should use"
            )));
        }
        let files = self.tls_cert.zip(self.tls_key);
        let tls = match &host {
            Some(host) => tls::certificate(files.as_ref(), host)?,
            None => None,
        };
        Ok(Some(RelayConfig { bind: self.relay_bind, ports: self.relay_ports, host, tls }))
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Directories for programs that load from a path")]
struct ParsedAsDir {
    /// Also put each version into a directory of its own, whole or not at all, with %d where the version is:
    /// /dev/shm/w/weight_v%06d. With --model-dir, links to the configuration and the tokenizer are next to the weights
    #[arg(long, value_name = "PATTERN")]
    as_dir: Option<Pattern>,
    /// File to write to the directory: with a controller, once every receiver has the version; otherwise at once
    #[arg(long, value_parser = parse_marker, value_name = "NAME", requires = "as_dir")]
    marker: Option<String>,
    /// How many versions to keep
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..), value_name = "N", requires = "as_dir")]
    keep_dirs: u16,
}

/// The longest timeout, in seconds.
const DAY: f64 = 86_400.0;

#[derive(Debug, Args)]
#[command(next_help_heading = "Engines")]
struct ParsedEngines {
    /// An engine on this host that loads received versions: vllm=http://HOST:PORT or sglang=http://HOST:PORT; repeatable.
    /// With several models, name the engine's model first: actor:vllm=http://…
    #[arg(long = "engine", value_name = "[MODEL:]KIND=URL")]
    engines: Vec<ModelEngine>,
    /// File with the token of the Windlass plugin in the engine [default: the agents' token]
    #[arg(long, value_name = "FILE", requires = "engines")]
    engine_token_file: Option<PathBuf>,
    /// File with the API key that engines require in the Authorization header
    #[arg(long, value_name = "FILE", requires = "engines")]
    api_key_file: Option<PathBuf>,
    /// What to do with requests in flight. With SGLang, keep means retract, or in_place if the prefix cache is kept; wait
    /// leaves the waiting to the update
    #[arg(long, value_enum, default_value_t = PauseMode::Keep, requires = "engines")]
    pause: PauseMode,
    /// What to do with cached prefixes, which the old weights computed
    #[arg(long, value_enum, default_value_t = CachePolicy::Reset, requires = "engines")]
    prefix_cache: CachePolicy,
    /// Maximum pause before the first write, in seconds; on expiry the engine resumes with its old weights
    #[arg(long, default_value_t = 30.0, value_parser = parse_seconds, value_name = "S", requires = "engines")]
    pause_lease: f64,
    /// Timeout of a load, from its first write, in seconds; on expiry the engine stays paused and the receiver reports it
    #[arg(long, default_value_t = 600.0, value_parser = parse_seconds, value_name = "S", requires = "engines")]
    load_timeout: f64,
    /// The model's directory. Its configuration and tokenizer are linked next to the image, for engines that load from a
    /// path. With --engine, if it has weights, every version must have the same names, shapes and dtypes
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// The former name of --model-dir
    #[arg(long, hide = true, value_name = "DIR")]
    config: Option<PathBuf>,
    /// What to do with tensors that an engine does not load, such as value heads
    #[arg(long, value_enum, default_value_t = Extras::Ignore, requires = "engines")]
    extras: Extras,
}

impl ParsedEngines {
    fn check(
        self,
        token: Option<&Token>,
        group: bool,
        models: &[ModelId],
    ) -> Result<Option<(Vec<ModelEngine>, EngineOptions)>, Error> {
        if let Some(dir) = self.model_dir.as_deref().filter(|dir| !dir.is_dir()) {
            return Err(Error::Usage(format!("--model-dir {} is not a directory", dir.display())));
        }
        if self.engines.is_empty() {
            return Ok(None);
        }
        for (i, engine) in self.engines.iter().enumerate() {
            let name = engine.spec.name();
            if self.engines.get(..i).is_some_and(|before| before.iter().any(|b| b.spec == engine.spec)) {
                return Err(Error::Usage(format!("{name} is given twice")));
            }
            match &engine.model_id {
                Some(id) if !models.contains(id) => {
                    return Err(Error::Usage(format!("{name} is for model {id}, but no --model names it")));
                }
                None if models.len() > 1 => {
                    let first = models.first().map_or("", ModelId::as_str);
                    let how = format!("name the engine's model: --engine {first}:{name}");
                    return Err(Error::Usage(format!("with {} models, {how}", models.len())));
                }
                Some(_) | None => {}
            }
        }
        let readers = readers(group);
        let read =
            |file: &Option<PathBuf>| file.as_deref().map(|file| token::read_for(file, readers)).transpose();
        let options = EngineOptions {
            token: read(&self.engine_token_file)?.or_else(|| token.cloned()),
            key: read(&self.api_key_file)?,
            mode: self.pause,
            cache: self.prefix_cache,
            lease: Duration::from_secs_f64(self.pause_lease),
            timeout: Duration::from_secs_f64(self.load_timeout),
            config: self.model_dir,
            extras: self.extras,
            group,
            exact: false,
        };
        Ok(Some((self.engines, options)))
    }
}

/// Who may read a receiver's secrets.
fn readers(group: bool) -> Readers {
    if group { Readers::Group } else { Readers::Owner }
}

impl ParsedReceive {
    pub(super) fn check(self) -> Result<Receive, Error> {
        if let Some(dir) = &self.engines.config {
            let (dir, other) = (dir.display(), "--config-file is the configuration of this command");
            return Err(Error::Usage(format!(
                "--config is now --model-dir: give --model-dir {dir}; {other}"
            )));
        }
        let mut token = self.token.in_environment()?;
        if let Some(file) = &self.token.token_file {
            token = Some(token::read_for(file, readers(self.group))?);
        }
        let stores = self.from.iter().filter(|url| is_store(url)).count();
        if let Some(url) = self.from.iter().find(|url| self.version.is_some() && !is_store(url)) {
            return Err(Error::Usage(format!(
                "--version is for a store, and {url} is an agent, which has its newest versions only: give --until, or a store"
            )));
        }
        if stores > 0 && self.store.is_some() {
            let why = "--store is for the time that an agent is away, and --from names a store: give --from an agent";
            return Err(Error::Usage(why.into()));
        }
        let trust = self.client.trust()?;
        let fallback = self.store.map(|url| {
            let url = url.parse().map_err(|e: AddressError| Error::Usage(format!("--store: {e}")))?;
            let after = Duration::from_secs_f64(self.store_after);
            Ok::<_, Error>(FallbackStore { url, after, trust: trust.clone(), dir: self.dir.clone() })
        });
        let fallback = fallback.transpose()?;
        let remote = self.from.into_iter().map(|url| match &token {
            _ if is_store(&url) => {
                let url = url.parse().map_err(|e: AddressError| Error::Usage(format!("--from: {e}")))?;
                Ok(Publisher::Store(url, self.version))
            }
            Some(token) => Ok(Publisher::Endpoint(url, token.clone())),
            None => Err(Error::Usage(format!(
                "{url} needs a token: give its file with --token-file, or set {}",
                token::VARIABLE
            ))),
        });
        let mut publishers: Vec<Publisher> = remote.collect::<Result<_, _>>()?;
        publishers.extend(self.region.into_iter().map(|dir| Publisher::Region(dir, token.clone())));
        let model_dir = self.engines.model_dir.clone();
        let engines = self.engines.check(token.as_ref(), self.group, &self.model)?;
        let controlled = self.controller.is_some();
        if model_dir.is_some() && engines.is_none() && self.disk.as_dir.is_none() {
            return Err(Error::Usage("--model-dir is for --engine or --as-dir: give one of them".into()));
        }
        let followed = if controlled { self.model.len() } else { publishers.len() };
        if self.disk.as_dir.is_some() && (followed != 1 || !self.in_place.is_empty()) {
            return Err(Error::Usage(format!(
                "--as-dir is for one model that is copied, and {followed} are: run a receiver for each"
            )));
        }
        if engines.is_some() && !controlled && (publishers.len() != 1 || !self.in_place.is_empty()) {
            let why = "engines load one model from an image of their own: give one --from or --region with --engine";
            return Err(Error::Usage(format!("{why}, and run a receiver for each model")));
        }
        let slice = self.slice.as_deref().map(read_slice).transpose()?;
        if slice.is_some() && followed != 1 {
            return Err(Error::Usage(format!(
                "--slice is for one model, and {followed} are: run a receiver for each"
            )));
        }
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let pid = std::process::id();
        let unnamed = || if controlled { receiver_id(&host, &self.dir) } else { format!("{host}:{pid}") };
        let name = self.name.unwrap_or_else(unnamed);
        let controller = self.controller.map(|url| {
            let own = self.controller_token_file.as_deref();
            let own = own.map(|file| token::read_for(file, readers(self.group))).transpose()?;
            controlled_by(url, &name, own, token, self.model)
        });
        Ok(Receive {
            publishers,
            fallback,
            in_place: self.in_place,
            dir: self.dir,
            slice,
            name,
            mode: match self.mode {
                ParsedMode::Auto => RequestMode::Auto,
                ParsedMode::Full => RequestMode::Full,
                ParsedMode::Delta => RequestMode::Delta,
            },
            streams: self.streams,
            threads: self.threads.count(),
            timeout: Duration::from_secs(self.timeout),
            versions: self.versions,
            until: self.until.or(self.version),
            group: self.group,
            with_parent: self.with_parent,
            engines,
            as_dir: self.disk.as_dir.map(|pattern| AsDir {
                pattern,
                model_dir,
                marker: self.disk.marker,
                keep: self.disk.keep_dirs.into(),
                group: self.group,
                timeout: Duration::from_secs(self.timeout),
            }),
            trust,
            controller: controller.transpose()?,
            relay: self.relay.check()?,
            nixl: self.nixl.check()?,
        })
    }
}

/// Whether a URL is that of a store. Agents have http:// and https://, or no scheme.
fn is_store(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| scheme != "http" && scheme != "https")
}

/// The part of a model that a file names.
fn read_slice(file: &Path) -> Result<Arc<Selection>, Error> {
    let json = std::fs::read(file).map_err(Error::io("read", file))?;
    let selection = Selection::from_json(&json);
    selection.map(Arc::new).map_err(|e| Error::Usage(format!("--slice {}: {e}", file.display())))
}

/// The name of a receiver that has none: its host, and where it keeps its images, which no other does.
fn receiver_id(host: &str, dir: &Path) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_') { c } else { '-' };
    let place: String = dir.display().to_string().trim_matches('/').chars().map(plain).collect();
    format!("{host}:{place}").chars().take(ReceiverId::MAX_LEN).collect()
}

fn controlled_by(
    url: String,
    id: &str,
    token: Option<Token>,
    agents: Option<Token>,
    models: Vec<ModelId>,
) -> Result<Controlled, Error> {
    let agents = agents.ok_or_else(|| {
        let how = format!("give its file with --token-file, or set {}", token::VARIABLE);
        Error::Usage(format!("the agents that the controller names need a token: {how}"))
    })?;
    let token = token.unwrap_or_else(|| agents.clone());
    let id = ReceiverId::new(id).map_err(|e| Error::Usage(format!("--name: {e}")))?;
    for (i, model) in models.iter().enumerate() {
        if models.get(..i).is_some_and(|before| before.contains(model)) {
            return Err(Error::Usage(format!("--model {model} is given twice")));
        }
    }
    Ok(Controlled { url, token, agents, id, models })
}

#[derive(Debug, Args)]
pub(super) struct ParsedVerify {
    /// The file or directory
    #[arg(required_unless_present = "engine", conflicts_with = "engine")]
    path: Option<PathBuf>,
    /// Fail unless the digest equals this one
    #[arg(long, value_name = "DIGEST", conflicts_with = "engine")]
    expect: Option<String>,
    /// Engine whose live weights to compare: vllm=http://HOST:PORT
    #[arg(long, value_name = "KIND=URL", requires = "image")]
    engine: Option<EngineSpec>,
    /// Directory of the image that the engine loaded
    #[arg(long, value_name = "DIR", requires = "engine")]
    image: Option<PathBuf>,
    /// File with the token of the Windlass plugin in the engine [default: the token in WINDLASS_TOKEN]
    #[arg(long, value_name = "FILE", requires = "engine")]
    engine_token_file: Option<PathBuf>,
    /// Timeout of the comparison, in seconds
    #[arg(long, default_value_t = 600.0, value_parser = parse_seconds, value_name = "S", requires = "engine")]
    timeout: f64,
    #[command(flatten)]
    threads: Threads,
}

impl ParsedVerify {
    pub(super) fn check(self) -> Result<Work, Error> {
        let threads = self.threads.count();
        if let (Some(engine), Some(image)) = (self.engine, self.image) {
            let token = TokenArgs { token_file: self.engine_token_file };
            let token = match &token.token_file {
                Some(file) => Some(token::read(file)?),
                None => token.in_environment()?,
            };
            let timeout = Duration::from_secs_f64(self.timeout);
            let prove = Prove { engine, image, token, timeout, threads };
            return Ok(Box::new(move |s| prove.run(s)));
        }
        let expect = self.expect.map(|d| d.parse()).transpose();
        let expect =
            expect.map_err(|e: windlass_core::identity::IdentityError| Error::Usage(e.to_string()))?;
        let path = self.path.ok_or_else(|| Error::Usage("give a file or a directory".into()))?;
        let verify = Verify { path, expect, threads };
        Ok(done(move |s| verify.run(s)))
    }
}

#[derive(Debug, Args)]
pub(super) struct ParsedGc {
    /// Directory to search for regions and images, or one of them; or the URL of a store, of which objects that no version needs
    /// are removed
    #[arg(default_value = SHM, value_name = "DIR")]
    dir: PathBuf,
    /// List what would be removed, with sizes, and remove nothing
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Remove without confirmation
    #[arg(long)]
    yes: bool,
    /// Also remove images of stopped receivers; a restarted receiver then fetches the full image again
    #[arg(long)]
    images: bool,
    /// With a store: remove only objects written at least this many hours ago; a publisher that runs writes some before the
    /// index that names them
    #[arg(long, default_value_t = 24.0, value_parser = parse_age, value_name = "H")]
    older_than: f64,
    #[command(flatten)]
    client: ClientTls,
}

impl ParsedGc {
    pub(super) fn check(self) -> Result<Work, Error> {
        let (dry_run, yes) = (self.dry_run, self.yes);
        if let Some(url) = self.dir.to_str().filter(|dir| dir.contains("://")) {
            let url = url.parse().map_err(|e: AddressError| Error::Usage(e.to_string()))?;
            let age = Duration::from_secs_f64(self.older_than * 3600.0);
            let place = Place { url, trust: self.client.trust()? };
            let orphans = Orphans { place, dry_run, yes, age };
            return Ok(done(move |s| orphans.run(s)));
        }
        let gc = Gc { dir: self.dir, dry_run, yes, images: self.images };
        Ok(done(move |s| gc.run(s)))
    }
}

/// A port, or a first and a last one.
pub(super) fn parse_ports(text: &str) -> Result<(u16, u16), String> {
    let port = |t: &str| t.trim().parse::<u16>().map_err(|_| format!("{t:?} is not a port"));
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (port(first)?, port(last)?),
        None => (port(text)?, port(text)?),
    };
    if first > last || (first == 0) != (last == 0) {
        return Err(format!("{text:?} is not a range of ports: expected FIRST-LAST"));
    }
    Ok((first, last))
}

/// The name of a file in a directory.
pub(super) fn parse_marker(text: &str) -> Result<String, String> {
    let is_name = Path::new(text).file_name() == Some(text.as_ref());
    if is_name { Ok(text.into()) } else { Err(format!("{text:?} is not the name of a file")) }
}

/// A positive number of seconds.
pub(super) fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| *s > 0.0 && *s <= DAY);
    seconds.ok_or_else(|| format!("{text:?} is not a number of seconds up to {DAY}"))
}

/// Two ports.
fn parse_again(text: &str) -> Result<(u16, u16), String> {
    let ports = text.split_once(',').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    ports.ok_or_else(|| format!("{text:?} is not two ports"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_one_or_a_range() {
        assert_eq!(parse_ports("0"), Ok((0, 0)));
        assert_eq!(parse_ports("7000-7099"), Ok((7000, 7099)));
        for bad in ["", "x", "7099-7000", "0-7000", "1-99999", "7000-"] {
            assert!(parse_ports(bad).is_err(), "{bad}");
        }
    }
}
