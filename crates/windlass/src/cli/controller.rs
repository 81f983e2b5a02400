//! Arguments of `controller`.

use std::net::{IpAddr, Ipv4Addr};

use clap::Args;
use windlass_core::address::Host;
use windlass_core::barrier::{Config, Limits, Mode, Required, SetConfig, SetName};
use windlass_core::identity::ModelId;

use super::service::{ServerTls, TokenArgs, parse_ports, parse_seconds};
use crate::error::Error;
use crate::service::controller::{Controller, Settings};

/// The token file if none is given.
pub(super) const TOKEN_FILE: &str = "windlass-controller.token";

#[derive(Debug, Args)]
pub(super) struct ParsedController {
    /// Address to listen on
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), value_name = "IP")]
    bind: IpAddr,
    /// Port, or a range such as 7000-7099 of which the controller takes the first free port; 0 takes any. Give a fixed port if
    /// clients must find the controller again after a restart
    #[arg(long, value_parser = parse_ports, default_value = "0", value_name = "PORT or FIRST-LAST")]
    ports: (u16, u16),
    /// Host name for clients to connect to [default: the address of --bind]
    #[arg(long, value_name = "HOST")]
    advertise_host: Option<String>,
    #[command(flatten)]
    token: TokenArgs,
    #[command(flatten)]
    tls: ServerTls,
    /// Models served at the same version, such as main=actor,verifier; repeatable. Without --set, every model is its own set
    #[arg(long = "set", value_parser = parse_set, value_name = "NAME=MODEL[,MODEL]…")]
    sets: Vec<(SetName, Vec<ModelId>)>,
    /// Name of a set whose models may serve different versions; repeatable
    #[arg(long, value_parser = parse_name, value_name = "NAME")]
    relaxed: Vec<SetName>,
    /// Receivers that must have staged a version before it is loaded, and loaded it before it counts as served: all, a
    /// number, or a percentage
    #[arg(long, value_parser = parse_required, default_value = "all", value_name = "all, N or P%")]
    required: Required,
    /// Lower bound for --required, in receivers
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    floor: u32,
    /// Heartbeat timeout of a receiver, in seconds
    #[arg(long, default_value_t = 15.0, value_parser = parse_seconds, value_name = "S")]
    heartbeat: f64,
    /// How long a new controller waits for receivers of its predecessor, in seconds. Until then it orders no loads. Receivers
    /// try to join at least four times within this period. If the controller's address moves to another machine, use the
    /// value of --heartbeat
    #[arg(long, default_value_t = 2.0, value_parser = parse_seconds, value_name = "S")]
    settle: f64,
    /// Timeout for a receiver to stage a version, in seconds
    #[arg(long, default_value_t = 300.0, value_parser = parse_seconds, value_name = "S")]
    stage_timeout: f64,
    /// Timeout for a receiver's engines to load a version, in seconds
    #[arg(long, default_value_t = 120.0, value_parser = parse_seconds, value_name = "S")]
    load_timeout: f64,
    /// Initial backoff after a receiver's failure, in seconds; doubles with every further failure. A success or a newer
    /// version resets it
    #[arg(long, default_value_t = 2.0, value_parser = parse_seconds, value_name = "S")]
    retry: f64,
    /// Maximum backoff, in seconds
    #[arg(long, default_value_t = 60.0, value_parser = parse_seconds, value_name = "S")]
    retry_cap: f64,
    /// How long agents keep deltas for a receiver that has left the pool, in seconds
    #[arg(long, default_value_t = 600.0, value_parser = parse_seconds, value_name = "S")]
    history_timeout: f64,
    /// Maximum wait of a gate or a synchronous notify, in seconds
    #[arg(long, default_value_t = 3600.0, value_parser = parse_seconds, value_name = "S")]
    max_wait: f64,
    /// Timeout of an eval, in seconds
    #[arg(long, default_value_t = 3600.0, value_parser = parse_seconds, value_name = "S")]
    eval_timeout: f64,
    /// How many announced versions may be unserved before the controller has the trainer wait
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024), value_name = "N")]
    max_ahead: u32,
    /// Maximum number of receivers
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=65_536), value_name = "N")]
    max_receivers: u32,
    /// Exit when standard input closes, that is, when the parent process exits
    #[arg(long)]
    with_parent: bool,
}

impl ParsedController {
    pub(super) fn check(self) -> Result<Controller, Error> {
        let host = self.advertise_host.map(|h| Host::new(&h));
        let ms = |seconds: f64| ((seconds * 1e3) as u64).max(1);
        let limits = Limits {
            heartbeat_ms: ms(self.heartbeat),
            settle_ms: ms(self.settle),
            stage_ms: ms(self.stage_timeout),
            load_ms: ms(self.load_timeout),
            retry_ms: ms(self.retry),
            retry_cap_ms: ms(self.retry_cap),
            history_ms: ms(self.history_timeout),
            max_wait_ms: ms(self.max_wait),
            eval_ms: ms(self.eval_timeout),
            max_ahead: self.max_ahead as usize,
            max_receivers: self.max_receivers as usize,
            ..Limits::default()
        };
        if let Some(unknown) = self.relaxed.iter().find(|name| !self.sets.iter().any(|(n, _)| n == *name)) {
            return Err(Error::Usage(format!("--relaxed {unknown}: no --set has that name")));
        }
        let (required, floor) = (self.required, self.floor as usize);
        let set = |(name, models): (SetName, Vec<ModelId>)| {
            let mode = if self.relaxed.contains(&name) { Mode::Relaxed } else { Mode::Strict };
            SetConfig { name, models, mode, required, floor }
        };
        let sets: Vec<_> = self.sets.iter().cloned().map(set).collect();
        let template = parse_name("template").map_err(Error::Usage)?;
        let settings = Settings { sets, template: set((template, Vec::new())), limits };
        if !settings.sets.is_empty() {
            let config = Config { sets: settings.sets.clone(), limits: settings.limits.clone() };
            config.validate().map_err(|e| Error::Usage(e.to_string()))?;
        }
        Ok(Controller {
            bind: self.bind,
            ports: self.ports,
            advertise_host: host.transpose().map_err(|e| Error::Usage(e.to_string()))?,
            token: self.token.in_environment()?,
            token_file: self.token.token_file.unwrap_or_else(|| TOKEN_FILE.into()),
            settings,
            tls: self.tls.files(),
            with_parent: self.with_parent,
        })
    }
}

fn parse_name(text: &str) -> Result<SetName, String> {
    SetName::new(text).map_err(|e| e.to_string())
}

/// A name and its models.
fn parse_set(text: &str) -> Result<(SetName, Vec<ModelId>), String> {
    let (name, models) =
        text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=MODEL[,MODEL]…"))?;
    let models = models.split(',').map(|m| ModelId::new(m.trim()).map_err(|e| e.to_string()));
    Ok((parse_name(name)?, models.collect::<Result<_, _>>()?))
}

/// `all`, a number or a percentage.
fn parse_required(text: &str) -> Result<Required, String> {
    let bad = || format!("{text:?} is not all, a number from 1 on, or a percentage from 1% to 100%");
    match text.strip_suffix('%') {
        Some(percent) => {
            let percent = percent.trim().parse().ok().filter(|p| (1..=100).contains(p));
            percent.map(Required::Percent).ok_or_else(bad)
        }
        None if text == "all" => Ok(Required::All),
        None => text.parse().ok().filter(|n| *n > 0).map(Required::AtLeast).ok_or_else(bad),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_and_quorums_are_read_as_they_are_written() {
        let (name, models) = parse_set("main=actor, verifier").unwrap();
        let models: Vec<_> = models.iter().map(ModelId::as_str).collect();
        assert_eq!((name.as_str(), models), ("main", vec!["actor", "verifier"]));
        for bad in ["", "main", "main=", "=actor", "main=a,,b", "ma in=a", "main=a b"] {
            assert!(parse_set(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_required("all"), Ok(Required::All));
        assert_eq!(parse_required("3"), Ok(Required::AtLeast(3)));
        assert_eq!(parse_required("50%"), Ok(Required::Percent(50)));
        for bad in ["", "none", "0", "-1", "0%", "101%", "%"] {
            assert!(parse_required(bad).is_err(), "{bad}");
        }
    }
}
