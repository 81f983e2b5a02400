//! Arguments of the commands that run for long: `agent`, `receive`, and of `gc`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use windlass_core::address::{Host, Token};
use windlass_core::barrier::ReceiverId;
use windlass_core::identity::ModelId;
use windlass_core::wire::MAX_STREAMS;
use windlass_core::wire::control::RequestMode;
use windlass_data::private::Readers;
use windlass_data::tls::Trust;

use super::{Command, Threads, parse_count};
use crate::error::Error;
use crate::service::agent::Agent;
use crate::service::engines::prove::Prove;
use crate::service::engines::{CachePolicy, EngineOptions, EngineSpec, Extras, ModelEngine, PauseMode};
use crate::service::receive::{Controlled, Publisher, Receive};
use crate::service::tls;
use crate::service::token;
use crate::tools::gc::Gc;
use crate::tools::verify::Verify;

/// Where regions and images are kept unless said otherwise.
const SHM: &str = "/dev/shm";

#[derive(Debug, Args)]
pub(super) struct ParsedAgent {
    /// The region to serve: the directory that the trainer made
    #[arg(long, value_name = "DIR")]
    region: PathBuf,
    /// The address to listen on
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), value_name = "IP")]
    bind: IpAddr,
    /// The port for requests, or a range such as 7000-7099 whose first free one is taken; any if not given
    #[arg(long, value_parser = parse_ports, default_value = "0", value_name = "PORT or FIRST-LAST")]
    ports: (u16, u16),
    /// The same for data; the range of --ports if that is one, else any
    #[arg(long, value_parser = parse_ports, value_name = "PORT or FIRST-LAST")]
    data_ports: Option<(u16, u16)>,
    /// The host that receivers are told to connect to; the address of --bind if not given
    #[arg(long, value_name = "HOST")]
    advertise_host: Option<String>,
    #[command(flatten)]
    token: TokenArgs,
    /// Deltas to keep for receivers that are behind
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096), value_name = "N")]
    history: u32,
    /// Bytes of deltas to keep
    #[arg(long, default_value = "4Gi", value_parser = parse_count, value_name = "BYTES")]
    history_bytes: u64,
    /// Of the versions that trainers hand out by delta, sum the bytes of the first and of every Nth; 0 for none
    #[arg(long, default_value_t = 16, value_name = "N")]
    check_every: u64,
    /// TCP streams of a transfer
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_STREAMS)), value_name = "N")]
    streams: u16,
    /// How long a transfer may take, in seconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "S")]
    timeout: u64,
    /// An agent that holds another part of the model; may be given several times
    #[arg(long = "peer", value_name = "URL")]
    peers: Vec<String>,
    #[command(flatten)]
    server: ServerTls,
    #[command(flatten)]
    client: ClientTls,
    /// How long to wait for the trainer to make the region, in seconds
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(0..=86_400), value_name = "S")]
    wait: u64,
    /// End when standard input ends: whoever started this is gone
    #[arg(long)]
    with_parent: bool,
    /// The ports of an earlier agent, for requests and for data, which are tried first if they are in range
    #[arg(long, value_parser = parse_again, hide = true, value_name = "PORT,PORT")]
    again: Option<(u16, u16)>,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Debug, Args)]
pub(super) struct TokenArgs {
    /// The file with the token that both sides must know; WINDLASS_TOKEN holds the token itself
    #[arg(long, value_name = "FILE")]
    pub(super) token_file: Option<PathBuf>,
}

/// The certificate of a server.
#[derive(Debug, Args)]
pub(super) struct ServerTls {
    /// The certificate of this server in PEM, followed by those that lead to its issuer: requests and data are then
    /// inside TLS, and the address begins with https://
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert in PEM, readable by its owner only
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl ServerTls {
    pub(super) fn files(self) -> Option<(PathBuf, PathBuf)> {
        self.tls_cert.zip(self.tls_key)
    }
}

/// Whom a client trusts.
#[derive(Debug, Args)]
pub(super) struct ClientTls {
    /// Whom to trust where the other side is at https://: a file with certificates in PEM. If not given, the one that
    /// WINDLASS_TLS_CA names, or those of the system
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
}

impl ClientTls {
    pub(super) fn trust(&self) -> Result<Option<Trust>, Error> {
        tls::trust(self.tls_ca.as_deref())
    }
}

impl TokenArgs {
    /// The token of the environment, if no file is named.
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
            threads: self.threads.count(),
            streams: self.streams,
            timeout: Duration::from_secs(self.timeout),
            peers: self.peers,
            trust: self.client.trust()?,
            tls: self.server.files(),
            wait: Duration::from_secs(self.wait),
            with_parent: self.with_parent,
            again: self.again,
        })
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ParsedMode {
    /// A delta where one serves, the full image otherwise
    Auto,
    /// Always the full image
    Full,
    /// Deltas only, once there is a version to start from; waits where none serves
    Delta,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("publisher").required(true).multiple(true).args(["from", "region", "in_place", "controller"])))]
pub(super) struct ParsedReceive {
    /// The agent of a publisher, such as http://10.0.0.5:7000; may be given several times, one for each model
    #[arg(long, value_name = "URL")]
    from: Vec<String>,
    /// The region of a publisher on this host: endpoint and token are found there
    #[arg(long, value_name = "DIR")]
    region: Vec<PathBuf>,
    /// The region of a publisher on this host, read where it is instead of copied
    #[arg(long, value_name = "DIR")]
    in_place: Vec<PathBuf>,
    /// The controller that says which versions to bring here from which agents, and when to load them;
    /// WINDLASS_CONTROLLER if neither this nor an agent or a region is given
    #[arg(long, value_name = "URL", requires = "model", conflicts_with_all = ["from", "region", "in_place"])]
    controller: Option<String>,
    /// The file with the controller's token; the agents' token if not given
    #[arg(long, value_name = "FILE", requires = "controller")]
    controller_token_file: Option<PathBuf>,
    /// A model that this receiver serves; may be given several times, with a controller
    #[arg(long, value_name = "ID", requires = "controller")]
    model: Vec<ModelId>,
    #[command(flatten)]
    token: TokenArgs,
    #[command(flatten)]
    client: ClientTls,
    /// Where images are kept, each in a directory named after its model
    #[arg(long, default_value = SHM, value_name = "DIR")]
    dir: PathBuf,
    /// What people call this receiver
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// What to ask for
    #[arg(long, value_enum, default_value_t = ParsedMode::Auto)]
    mode: ParsedMode,
    /// TCP streams of a transfer; the publisher's default if not given
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_STREAMS)), value_name = "N")]
    streams: Option<u16>,
    /// How long a transfer may take, in seconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "S")]
    timeout: u64,
    /// End after this many new versions
    #[arg(long, value_name = "N")]
    versions: Option<u64>,
    /// End once this version is there
    #[arg(long, value_name = "VERSION")]
    until: Option<u64>,
    /// Let the group read the image
    #[arg(long)]
    group: bool,
    /// End when standard input ends: whoever started this is gone
    #[arg(long)]
    with_parent: bool,
    #[command(flatten)]
    engines: ParsedEngines,
    #[command(flatten)]
    threads: Threads,
}

/// How long each step with an engine may take, at most.
const DAY: f64 = 86_400.0;

#[derive(Debug, Args)]
#[command(next_help_heading = "Engines")]
struct ParsedEngines {
    /// An engine on this host that loads what is received: vllm=http://HOST:PORT or sglang=http://HOST:PORT; may be
    /// given several times. Where several models are served, after the model that it is for: actor:vllm=http://…
    #[arg(long = "engine", value_name = "[MODEL:]KIND=URL")]
    engines: Vec<ModelEngine>,
    /// The file with the token of our plugin in the engines; WINDLASS_TOKEN if not given
    #[arg(long, value_name = "FILE", requires = "engines")]
    engine_token_file: Option<PathBuf>,
    /// The file with the key that engines want in the Authorization header of their own routes
    #[arg(long, value_name = "FILE", requires = "engines")]
    api_key_file: Option<PathBuf>,
    /// What becomes of requests in flight. SGLang: keep is retract, or in_place if the prefix cache is kept; wait leaves
    /// the waiting to the update
    #[arg(long, value_enum, default_value_t = PauseMode::Keep, requires = "engines")]
    pause: PauseMode,
    /// What becomes of cached prefixes, which old weights computed
    #[arg(long, value_enum, default_value_t = CachePolicy::Reset, requires = "engines")]
    prefix_cache: CachePolicy,
    /// How long an engine may be paused before the first write, in seconds; then its old weights go on
    #[arg(long, default_value_t = 30.0, value_parser = parse_seconds, value_name = "S", requires = "engines")]
    pause_lease: f64,
    /// How long a load may take from the first write on, in seconds; then the engine stays paused, and that is told
    #[arg(long, default_value_t = 600.0, value_parser = parse_seconds, value_name = "S", requires = "engines")]
    load_timeout: f64,
    /// The model's directory: its configuration and tokenizer are linked beside the image for engines that load from a
    /// path, and if there are weights, every version must have their names, shapes and dtypes
    #[arg(long, value_name = "DIR", requires = "engines")]
    config: Option<PathBuf>,
    /// What to do with tensors that an engine does not take, such as value heads
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
                    return Err(Error::Usage(format!("{name} is for model {id}, which no --model names")));
                }
                None if models.len() > 1 => {
                    let first = models.first().map_or("", ModelId::as_str);
                    let how = format!("say which it serves: --engine {first}:{name}");
                    return Err(Error::Usage(format!("there are {} models, {how}", models.len())));
                }
                Some(_) | None => {}
            }
        }
        if let Some(config) = self.config.as_deref().filter(|c| !c.is_dir()) {
            return Err(Error::Usage(format!("--config {} is not a directory", config.display())));
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
            config: self.config,
            extras: self.extras,
            group,
            exact: false,
        };
        Ok(Some((self.engines, options)))
    }
}

/// Who may read the secrets of a receiver.
fn readers(group: bool) -> Readers {
    if group { Readers::Group } else { Readers::Owner }
}

impl ParsedReceive {
    pub(super) fn check(self) -> Result<Receive, Error> {
        let mut token = self.token.in_environment()?;
        if let Some(file) = &self.token.token_file {
            token = Some(token::read_for(file, readers(self.group))?);
        }
        let remote = self.from.into_iter().map(|url| match &token {
            Some(token) => Ok(Publisher::Endpoint(url, token.clone())),
            None => Err(Error::Usage(format!(
                "{url} needs a token: give its file with --token-file, or set {}",
                token::VARIABLE
            ))),
        });
        let mut publishers: Vec<Publisher> = remote.collect::<Result<_, _>>()?;
        publishers.extend(self.region.into_iter().map(|dir| Publisher::Region(dir, token.clone())));
        let engines = self.engines.check(token.as_ref(), self.group, &self.model)?;
        let controlled = self.controller.is_some();
        if engines.is_some() && !controlled && (publishers.len() != 1 || !self.in_place.is_empty()) {
            let why = "engines load one model from an image of their own: give one --from or --region with --engine";
            return Err(Error::Usage(format!("{why}, and run a receiver for each model")));
        }
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let controller = self.controller.map(|url| {
            let id = self.name.clone().unwrap_or_else(|| receiver_id(&host, &self.dir));
            let own = self.controller_token_file.as_deref();
            let own = own.map(|file| token::read_for(file, readers(self.group))).transpose()?;
            controlled_by(url, &id, own, token, self.model)
        });
        Ok(Receive {
            publishers,
            in_place: self.in_place,
            dir: self.dir,
            name: self.name.unwrap_or_else(|| format!("{host}:{}", std::process::id())),
            mode: match self.mode {
                ParsedMode::Auto => RequestMode::Auto,
                ParsedMode::Full => RequestMode::Full,
                ParsedMode::Delta => RequestMode::Delta,
            },
            streams: self.streams,
            threads: self.threads.count(),
            timeout: Duration::from_secs(self.timeout),
            versions: self.versions,
            until: self.until,
            group: self.group,
            with_parent: self.with_parent,
            engines,
            trust: self.client.trust()?,
            controller: controller.transpose()?,
        })
    }
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
    /// Fail unless the digest is this one
    #[arg(long, value_name = "DIGEST", conflicts_with = "engine")]
    expect: Option<String>,
    /// An engine whose live weights are compared: vllm=http://HOST:PORT
    #[arg(long, value_name = "KIND=URL", requires = "image")]
    engine: Option<EngineSpec>,
    /// The directory of the image that the engine was loaded from
    #[arg(long, value_name = "DIR", requires = "engine")]
    image: Option<PathBuf>,
    /// The file with the token of our plugin in the engine; WINDLASS_TOKEN if not given
    #[arg(long, value_name = "FILE", requires = "engine")]
    engine_token_file: Option<PathBuf>,
    /// How long the engine may take, in seconds
    #[arg(long, default_value_t = 600.0, value_parser = parse_seconds, value_name = "S", requires = "engine")]
    timeout: f64,
    #[command(flatten)]
    threads: Threads,
}

impl ParsedVerify {
    pub(super) fn check(self) -> Result<Command, Error> {
        let threads = self.threads.count();
        if let (Some(engine), Some(image)) = (self.engine, self.image) {
            let token = TokenArgs { token_file: self.engine_token_file };
            let token = match &token.token_file {
                Some(file) => Some(token::read(file)?),
                None => token.in_environment()?,
            };
            let timeout = Duration::from_secs_f64(self.timeout);
            return Ok(Command::Prove(Prove { engine, image, token, timeout, threads }));
        }
        let expect = self.expect.map(|d| d.parse()).transpose();
        let expect =
            expect.map_err(|e: windlass_core::identity::IdentityError| Error::Usage(e.to_string()))?;
        let path = self.path.ok_or_else(|| Error::Usage("give a file or a directory".into()))?;
        Ok(Command::Verify(Verify { path, expect, threads }))
    }
}

#[derive(Debug, Args)]
pub(super) struct ParsedGc {
    /// Where regions and images are kept, at any depth; or one of them
    #[arg(default_value = SHM, value_name = "DIR")]
    dir: PathBuf,
    /// Print what would go and how many bytes, and leave it
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Remove it without asking
    #[arg(long)]
    yes: bool,
    /// Remove images of stopped receivers too, which would go on with them
    #[arg(long)]
    images: bool,
}

impl ParsedGc {
    pub(super) fn check(self) -> Gc {
        Gc { dir: self.dir, dry_run: self.dry_run, yes: self.yes, images: self.images }
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
