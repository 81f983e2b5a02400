//! Arguments of `top`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::controller::TOKEN_FILE;
use super::service::{ClientTls, TokenArgs, parse_seconds};
use crate::controller::client::ControllerClient;
use crate::error::Error;
use crate::token;
use crate::top::Top;

#[derive(Debug, Args)]
pub(super) struct ParsedTop {
    /// The controller, such as http://10.0.0.1:7100; WINDLASS_CONTROLLER if not given
    #[arg(long, value_name = "URL")]
    controller: String,
    #[command(flatten)]
    token: TokenArgs,
    #[command(flatten)]
    tls: ClientTls,
    /// Print it once and end
    #[arg(long)]
    once: bool,
    /// The time between two looks, in seconds
    #[arg(long, default_value_t = 1.0, value_parser = parse_seconds, value_name = "S")]
    interval: f64,
    /// Write the last syncs as a trace for timeline viewers (Perfetto, chrome://tracing) and end
    #[arg(long, value_name = "FILE", conflicts_with = "once")]
    trace: Option<PathBuf>,
}

impl ParsedTop {
    pub(super) fn check(self) -> Result<Top, Error> {
        let token = match (&self.token.token_file, self.token.in_environment()?) {
            (Some(file), _) => token::read(file)?,
            (None, Some(token)) => token,
            // Where the controller was started it has made one.
            (None, None) if Path::new(TOKEN_FILE).exists() => token::read(Path::new(TOKEN_FILE))?,
            (None, None) => {
                let why = "the controller needs a token: give its file with --token-file, or set";
                return Err(Error::Usage(format!("{why} {}", token::VARIABLE)));
            }
        };
        let controller = ControllerClient::new(&self.controller, token)?.with_trust(self.tls.trust()?);
        Ok(Top {
            controller,
            once: self.once,
            interval: Duration::from_secs_f64(self.interval),
            trace: self.trace,
        })
    }
}
