//! Arguments of `top`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use windlass_core::address::Token;

use super::controller::TOKEN_FILE;
use super::service::{ClientTls, TokenArgs, parse_seconds};
use crate::error::Error;
use crate::service::controller::client::ControllerClient;
use crate::service::token;
use crate::tools::top::Top;

#[derive(Debug, Args)]
pub(super) struct ParsedTop {
    /// Address of the controller's live page with its token, as the demo prints it: http://10.0.0.1:7100/#token=…
    #[arg(value_name = "PAGE")]
    page: Option<String>,
    /// The controller, such as http://10.0.0.1:7100 [default: WINDLASS_CONTROLLER]
    #[arg(long, value_name = "URL", required_unless_present = "page")]
    controller: Option<String>,
    #[command(flatten)]
    token: TokenArgs,
    #[command(flatten)]
    tls: ClientTls,
    /// Print the status once and exit
    #[arg(long)]
    once: bool,
    /// Refresh interval, in seconds
    #[arg(long, default_value_t = 1.0, value_parser = parse_seconds, value_name = "S")]
    interval: f64,
    /// Write the last syncs as a trace for Perfetto or chrome://tracing, and exit
    #[arg(long, value_name = "FILE", conflicts_with = "once")]
    trace: Option<PathBuf>,
}

impl ParsedTop {
    pub(super) fn check(self) -> Result<Top, Error> {
        let controller = self.page.or(self.controller).unwrap_or_default();
        Ok(Top {
            controller: controller_client(&controller, &self.token, &self.tls)?,
            once: self.once,
            interval: Duration::from_secs_f64(self.interval),
            trace: self.trace,
        })
    }
}

/// A client of the controller. Its token comes from --token-file, the page's address, the environment, or the file that the
/// controller wrote to this directory, in this order.
pub(super) fn controller_client(
    url: &str,
    token: &TokenArgs,
    tls: &ClientTls,
) -> Result<ControllerClient, Error> {
    let (url, of_page) = match url.split_once("#token=") {
        Some((page, token)) => {
            let token =
                Token::new(token).map_err(|e| Error::Usage(format!("the address {page}#token=…: {e}")))?;
            (page, Some(token.found_in("the page's address")))
        }
        None => (url, None),
    };
    let token = match (&token.token_file, of_page.or(token.in_environment()?)) {
        (Some(file), _) => token::read(file)?,
        (None, Some(token)) => token,
        (None, None) if Path::new(TOKEN_FILE).exists() => token::read(Path::new(TOKEN_FILE))?,
        (None, None) => {
            let why = "the controller needs a token: give its file with --token-file, or set";
            return Err(Error::Usage(format!("{why} {}", token::VARIABLE)));
        }
    };
    Ok(ControllerClient::new(url, token)?.with_trust(tls.trust()?))
}
