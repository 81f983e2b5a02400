//! Arguments of `publish`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser as _};
use windlass_core::identity::ModelId;

use super::service::{ClientTls, SHM, TokenArgs, parse_marker};
use super::top::controller_client;
use super::{Parsed, Threads};
use crate::console::one_line;
use crate::error::Error;
use crate::service::disk::Pattern;
use crate::service::disk::follow::Publish;

#[derive(Debug, Args)]
pub(super) struct ParsedPublish {
    /// The checkpoints to publish, with %d where the version is: /dev/shm/w/weight_v%06d, /data/broadcasts/step_%d
    #[arg(long, value_name = "PATTERN")]
    follow: Pattern,
    /// File in a checkpoint that says that it is finished; `windlass.disk.published` writes the default
    #[arg(long, default_value = ".windlass-ready", value_parser = parse_marker, value_name = "NAME")]
    marker: String,
    /// The model's ID
    #[arg(long, value_name = "ID")]
    model: ModelId,
    /// The region to publish in [default: /dev/shm/windlass-ID]
    #[arg(long, value_name = "DIR")]
    region: Option<PathBuf>,
    /// The controller to notify of each version [default: WINDLASS_CONTROLLER]
    #[arg(long, value_name = "URL")]
    controller: Option<String>,
    /// File with the controller's token [default: the agent's token]
    #[arg(long, value_name = "FILE", requires = "controller")]
    controller_token_file: Option<PathBuf>,
    #[command(flatten)]
    token: TokenArgs,
    #[command(flatten)]
    tls: ClientTls,
    /// Timeout of a version, from its checkpoint to the agent serving it, in seconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "S")]
    timeout: u64,
    /// Exit when standard input closes, that is, when the parent process exits
    #[arg(long)]
    with_parent: bool,
    #[command(flatten)]
    threads: Threads,
    /// Options of the agent, such as -- --bind 10.0.0.5 --ports 7000; see `windlass agent --help`
    #[arg(last = true, value_name = "AGENT OPTIONS")]
    agent: Vec<OsString>,
}

impl ParsedPublish {
    pub(super) fn check(self) -> Result<Publish, Error> {
        let mut agent = self.agent;
        if let Some(file) = &self.token.token_file {
            agent.extend(["--token-file".into(), file.clone().into_os_string()]);
        }
        // Wrong ones are told now, not with the first checkpoint.
        let words = ["windlass", "agent", "--region", "."].map(OsString::from);
        Parsed::try_parse_from(words.into_iter().chain(agent.iter().cloned())).map_err(|e| {
            let said = one_line(&e.render().to_string());
            Error::Usage(format!("the options of the agent, after --, are not right: {said}"))
        })?;
        let token_file = self.controller_token_file.or_else(|| self.token.token_file.clone());
        let client = |url: String| controller_client(&url, &TokenArgs { token_file }, &self.tls);
        Ok(Publish {
            follow: self.follow,
            marker: self.marker,
            region: self.region.unwrap_or_else(|| Path::new(SHM).join(format!("windlass-{}", self.model))),
            model_id: self.model,
            agent,
            token: self.token.in_environment()?,
            controller: self.controller.map(client).transpose()?,
            trust: self.tls.trust()?,
            timeout: Duration::from_secs(self.timeout),
            threads: self.threads.count(),
            with_parent: self.with_parent,
        })
    }
}
