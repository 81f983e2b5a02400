//! Arguments of `init`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::service::parse_seconds;
use crate::tools::init::{Engine, Init, Trainer};

#[derive(Debug, Args)]
pub(super) struct ParsedInit {
    /// Where to write; created if it does not exist
    #[arg(default_value = ".", value_name = "DIR")]
    dir: PathBuf,
    /// The framework that trains [default: the first of these that is installed and runs with the engine]
    #[arg(long, value_enum, value_name = "NAME")]
    trainer: Option<Trainer>,
    /// The engine that serves [default: vLLM or SGLang if it is installed, else a follower in Python]
    #[arg(long, value_enum, value_name = "NAME")]
    engine: Option<Engine>,
    /// The Python interpreter that will run the scripts [default: the one that runs this command, else that of VIRTUAL_ENV,
    /// else python3]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Replace files that exist
    #[arg(long)]
    force: bool,
    /// How long the interpreter may take to say which packages it has, in seconds
    #[arg(long, default_value_t = 30.0, value_parser = parse_seconds, value_name = "S")]
    timeout: f64,
}

impl ParsedInit {
    pub(super) fn check(self) -> Init {
        let ParsedInit { dir, trainer, engine, python, force, timeout } = self;
        Init { dir, trainer, engine, python, force, timeout: Duration::from_secs_f64(timeout) }
    }
}
