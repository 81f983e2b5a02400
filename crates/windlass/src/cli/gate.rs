//! Arguments of `gate`.

use std::time::Duration;

use clap::Args;
use windlass_core::barrier::SetName;
use windlass_core::identity::{Incarnation, ModelId, Version};

use super::service::{ClientTls, TokenArgs, parse_seconds};
use super::top::controller_client;
use crate::error::Error;
use crate::service::controller::wire::Gate;
use crate::tools::gate::WaitAtGate;

#[derive(Debug, Args)]
pub(super) struct ParsedGate {
    /// The version to wait for; a newer one also opens the gate
    version: Version,
    /// The controller, such as http://10.0.0.1:7100 [default: WINDLASS_CONTROLLER]
    #[arg(long, value_name = "URL")]
    controller: String,
    /// The set; optional with --model, or if the controller has only one set
    #[arg(long, value_parser = parse_set_name, value_name = "NAME")]
    set: Option<SetName>,
    /// Wait for the set of this model
    #[arg(long, value_name = "ID")]
    model: Option<ModelId>,
    /// Incarnation of the model's trainer, in hexadecimal; versions of earlier incarnations never open the gate
    #[arg(long, requires = "model", value_name = "HEX")]
    incarnation: Option<Incarnation>,
    /// Timeout, in seconds
    #[arg(long, default_value_t = 600.0, value_parser = parse_seconds, value_name = "S")]
    timeout: f64,
    #[command(flatten)]
    token: TokenArgs,
    #[command(flatten)]
    tls: ClientTls,
}

impl ParsedGate {
    pub(super) fn check(self) -> Result<WaitAtGate, Error> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(WaitAtGate {
            controller: controller_client(&self.controller, &self.token, &self.tls)?,
            gate: Gate {
                set: self.set,
                at_least: Some(self.version),
                model_id: self.model,
                incarnation: self.incarnation,
                timeout_ms: None,
                who: Some(format!("{host}:{}", std::process::id())),
            },
            timeout: Duration::from_secs_f64(self.timeout),
        })
    }
}

fn parse_set_name(text: &str) -> Result<SetName, String> {
    SetName::new(text).map_err(|e| e.to_string())
}
