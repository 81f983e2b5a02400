//! The command line: what can be asked for, and how a question becomes a checked one.
//!
//! Owns: arguments and exit codes. Parsed arguments (`Parsed`) become checked ones ([`Command`]) before
//! anything is opened or written; commands take only the latter. Exit codes: 0 done, 1 the answer is no, and
//! otherwise that of the error's kind ([`windlass_core::error::Kind::row`]).

pub mod config;
mod controller;
mod gate;
mod service;
mod top;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, CommandFactory as _, Parser, Subcommand};

use self::controller::ParsedController;
use self::gate::ParsedGate;
use self::service::{ParsedAgent, ParsedGc, ParsedReceive, ParsedVerify};
use self::top::ParsedTop;
use crate::console::{Session, report};
use crate::error::Error;
use crate::lab::bench::{self, BenchConfig, PlaneConfig};
use crate::lab::demo;
use crate::lab::synth::SynthConfig;
use crate::service::agent;
use crate::service::engines;
use crate::service::receive;
use crate::tools::delta::apply::Apply;
use crate::tools::delta::make::{Make, Mode};
use crate::tools::delta::show::show;
use crate::tools::diff;
use crate::tools::doctor;
use crate::tools::gate::WaitAtGate;
use crate::tools::gc;
use crate::tools::inspect;
use crate::tools::outfile::refuse_inputs;
use crate::tools::verify;
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, ModelId};
use windlass_core::wire::{DEFAULT_STREAMS, MAX_STREAMS};
use windlass_data::seal::Names;

/// Weight sync for RL post-training: bit-exact, versioned, at hardware speed.
#[derive(Debug, Parser)]
#[command(name = "windlass", version, arg_required_else_help = true, after_help = exit_codes())]
struct Parsed {
    /// Print one JSON object as the last line of standard output, also on failure
    #[arg(long, global = true)]
    json: bool,
    /// The configuration to read; WINDLASS_CONFIG or ./windlass.toml if not given
    #[arg(long, global = true, value_name = "FILE")]
    config_file: Option<PathBuf>,
    #[command(subcommand)]
    command: ParsedCommand,
}

#[derive(Debug, Subcommand)]
enum ParsedCommand {
    /// Make, apply or show the difference between two versions of a model
    #[command(subcommand)]
    Delta(ParsedDelta),
    /// Compare two versions: change rate by tensor, sizes of steps, size of the delta by mode
    ///
    /// A and B are safetensors files or directories of shards with the same tensors.
    Diff {
        /// The older version
        a: PathBuf,
        /// The newer version
        b: PathBuf,
        #[command(flatten)]
        threads: Threads,
        /// Rows of the table of tensors; 0 shows all
        #[arg(long, default_value_t = 20, value_name = "N")]
        top: usize,
    },
    /// Show what is in a safetensors file, a directory of shards, a manifest or a delta
    Inspect {
        /// The file or directory
        path: PathBuf,
        /// Rows of the table of tensors; 0 shows all
        #[arg(long, default_value_t = 20, value_name = "N")]
        top: usize,
    },
    /// Compute the state digest of a safetensors file or a directory of shards, or compare an engine's live weights
    ///
    /// With --engine the live weights of a vLLM server with the plugin of Windlass are compared with an image, tensor by
    /// tensor. The exit code is 0 only if every tensor was found whole and equal.
    Verify(ParsedVerify),
    /// Measure a part of Windlass beside the machine's own limit
    #[command(subcommand)]
    Bench(ParsedBench),
    /// Say what this machine can do, and give advice on what is not as it should be
    Doctor {
        /// The directory that regions would be made in
        #[arg(long, default_value = doctor::place::DEFAULT, value_name = "DIR")]
        region_dir: PathBuf,
        /// Bytes of the model that is trained, by which ways are chosen; k, M, G and Ki, Mi, Gi are understood
        #[arg(long, value_parser = parse_count, value_name = "BYTES")]
        model_bytes: Option<u64>,
    },
    /// Serve the versions of a region to receivers
    ///
    /// Started by the trainer, which makes the region. Receivers need the token: it is made in the region's
    /// directory unless one is given.
    Agent(ParsedAgent),
    /// Say who loads which version when, for several models and many receivers, and show it
    ///
    /// Trainers tell it what they published, receivers ask it what to do, data loaders wait at its gate. There is a live page
    /// at its address. It keeps nothing on disk: after a restart it learns everything from receivers and trainers.
    Controller(ParsedController),
    /// Keep images of models on this host at the newest versions of their publishers
    ///
    /// An image is a safetensors file that engines read in place. Ends with Ctrl-C, or as --versions or --until say.
    Receive(Box<ParsedReceive>),
    /// Wait until a set of models serves a version, as `windlass.gate` does
    ///
    /// Returns with exit code 0 when every required receiver has loaded it. While the controller is away the wait goes on.
    /// The error of a gate that does not open in time says what is missing.
    Gate(ParsedGate),
    /// Show what a controller sees, as its live page does: models, receivers, what each is doing, errors
    ///
    /// On a terminal it is drawn in place until Ctrl-C; --once prints it once, --json as the document of GET /status.
    Top(ParsedTop),
    /// Print what a command would work with: every value and where it stands
    ///
    /// Values come from the command line, from WINDLASS_<COMMAND>_<FLAG> in the environment, from windlass.toml, or are
    /// built in, in this order. Without a command, what is set anywhere is printed.
    Config {
        /// A command, such as receive or bench codec, and flags of it
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
        words: Vec<OsString>,
    },
    /// Remove regions and images that dead processes left
    ///
    /// They are found at any depth below DIR, but not through links or in other file systems. A directory of one goes with
    /// all that is in it, unless a process of Windlass has it open; --dry-run only says so. Programs that merely mapped an
    /// image keep what they have mapped, and no longer find it by its path.
    Gc(ParsedGc),
    /// Train made-up models with several processes, and keep receivers in sync with them
    ///
    /// Starts real processes: two trainers whose ranks own and change the weights, an agent for each, a controller, whose
    /// live page can be watched, and receivers that serve both models. One receiver joins late, one is killed. In the end
    /// every image is compared with the ranks' own memory.
    ///
    /// With --no-controller there is one model, whose receivers follow its agent by themselves; one of them and the agent
    /// are killed on the way and come back.
    Demo(ParsedDemo),
    #[command(hide = true)]
    DemoRank(ParsedRank),
    /// Loads one engine for a receiver
    #[command(hide = true)]
    Guard,
}

#[derive(Debug, Subcommand)]
enum ParsedDelta {
    /// Write what changed from BASE to NEW
    ///
    /// Both are safetensors files or directories of shards with the same tensors.
    Make {
        /// The older version
        base: PathBuf,
        /// The newer version
        new: PathBuf,
        /// The delta to write
        #[arg(short, long, value_name = "OUT")]
        output: PathBuf,
        /// How changes are coded
        #[arg(long, value_enum, default_value_t = Mode::Auto)]
        mode: Mode,
        /// The name of the policy, noted in the delta
        #[arg(long, default_value = "model", value_name = "ID")]
        model_id: String,
        /// The version number of BASE, noted in the delta
        #[arg(long, default_value_t = 0, value_name = "N")]
        base_version: u64,
        /// The version number of NEW, noted in the delta; one more than BASE's if not given
        #[arg(long, value_name = "N")]
        version: Option<u64>,
        #[command(flatten)]
        threads: Threads,
    },
    /// Make the newer version from BASE and DELTA, checking every block
    ///
    /// The result has the form of BASE, a file or a directory of the same shards, and keeps BASE's headers with
    /// their `__metadata__`. A directory gets the shards and their index only: copy the configuration and the
    /// tokenizer yourself. Give either --output or --in-place.
    #[command(group(ArgGroup::new("place").required(true).args(["output", "in_place"])))]
    Apply {
        /// The older version
        base: PathBuf,
        /// The delta
        delta: PathBuf,
        /// The newer version to write
        #[arg(short, long, value_name = "OUT")]
        output: Option<PathBuf>,
        /// Change BASE itself, and with it all hard links to its files. An interrupted run is finished by running
        /// it again
        #[arg(long)]
        in_place: bool,
        #[command(flatten)]
        threads: Threads,
    },
    /// Show what is in a delta
    Show {
        /// The delta
        delta: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum ParsedBench {
    /// Encode and apply, beside reading two images, copying one, XOR + zstd and a list of positions
    Codec(ParsedModel),
    /// Block sums and state digest, beside reading the image once
    Digest(ParsedModel),
    /// A delta file and a table of sums from two images, beside reading both
    Seal(ParsedPlane),
    /// Tensors into a slot until it is committed, beside copying them
    Offload(ParsedPlane),
    /// An image into the parameters of an engine by a load plan, whole and what changed, beside copying it
    Load(ParsedPlane),
    /// A full image over loopback, with and without checks, beside bare sendfile and recv
    Tcp(ParsedTcp),
    /// A delta from commit to the receiver's image, beside encoding, sending and applying it alone
    Sync(ParsedPlane),
    /// The same version to 1, 2, 4, 8 and 16 receivers at once, beside what the link can carry
    Fanout(ParsedPlane),
    /// Orders from the controller to 3, 30 and 300 receivers, beside as many requests that do nothing
    Controller {
        /// Numbers of receivers
        #[arg(long, default_value = "3,30,300", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=4096), value_name = "N,N…")]
        receivers: Vec<u16>,
        /// Models of the set that every receiver serves
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256), value_name = "N")]
        models: u16,
        /// Rounds of each measurement; the median counts
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
        repeats: u16,
    },
}

#[derive(Debug, Args)]
struct ParsedModel {
    /// Elements of the made-up bf16 model; k, M, G and Ki, Mi, Gi are understood
    #[arg(long, default_value = "256Mi", value_parser = parse_count, value_name = "N")]
    elements: u64,
    /// Share of elements that change, in percent
    #[arg(long, default_value = "1.5", value_parser = parse_percent, value_name = "P")]
    change: f64,
    #[command(flatten)]
    threads: Threads,
    /// Rounds of each measurement; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    repeats: u16,
    /// Another seed makes another model
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Debug, Args)]
struct ParsedTcp {
    #[command(flatten)]
    plane: ParsedPlane,
    /// Measure pulls inside TLS, too
    #[arg(long)]
    tls: bool,
}

#[derive(Debug, Args)]
struct ParsedPlane {
    /// Elements of the made-up bf16 model; k, M, G and Ki, Mi, Gi are understood [default: 128Mi, fanout 32Mi]
    #[arg(long, value_parser = parse_count, value_name = "N", conflicts_with = "model_bytes")]
    elements: Option<u64>,
    /// The size of the model in bytes instead
    #[arg(long, value_parser = parse_count, value_name = "N")]
    model_bytes: Option<u64>,
    /// Share of elements that change, in percent
    #[arg(long, default_value = "1.5", value_parser = parse_percent, value_name = "P")]
    change: f64,
    /// Streams of a transfer
    #[arg(long, default_value_t = DEFAULT_STREAMS, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_STREAMS)), value_name = "N")]
    streams: u16,
    #[command(flatten)]
    threads: Threads,
    /// Rounds of each measurement; the median counts
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    repeats: u16,
    /// Another seed makes another model
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The directory that regions are made in
    #[arg(long, default_value = doctor::place::DEFAULT, value_name = "DIR")]
    region_dir: PathBuf,
}

#[derive(Debug, Args)]
struct ParsedDemo {
    #[command(flatten)]
    model: ParsedDemoModel,
    /// Trainer ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64), value_name = "N")]
    ranks: u16,
    /// Receivers kept in sync
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64), value_name = "N")]
    receivers: u16,
    /// Training steps [default: 12, without a controller 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(demo::MAX_STEPS)), value_name = "N")]
    steps: Option<u32>,
    /// TCP streams of a transfer
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=256), value_name = "N")]
    streams: u16,
    /// Where region and images are kept while it runs
    #[arg(long, default_value = "/dev/shm", value_name = "DIR")]
    dir: PathBuf,
    /// The least time of the actor's training step, in seconds; the verifier takes nearly twice as long
    #[arg(long, default_value_t = 0.5, value_parser = service::parse_seconds, value_name = "S", conflicts_with = "no_controller")]
    pace: f64,
    /// One model, and no controller
    #[arg(long)]
    no_controller: bool,
    /// Stay after the last step until Ctrl-C, so that the live page can be looked at
    #[arg(long, conflicts_with = "no_controller")]
    stay: bool,
}

#[derive(Debug, Args)]
struct ParsedDemoModel {
    /// Bytes of a made-up bf16 model; k, M, G and Ki, Mi, Gi are understood [default: 128Mi each, without a controller 1Gi]
    #[arg(long, value_parser = parse_count, value_name = "BYTES")]
    model_bytes: Option<u64>,
    /// Take the shapes from the config.json of a Llama or Qwen style model instead
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Share of elements that change in a step, in percent
    #[arg(long, default_value = "1.0", value_parser = parse_percent, value_name = "P")]
    change: f64,
    /// Another seed makes another model
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl ParsedDemoModel {
    fn check(self, bytes: u64) -> Result<demo::Model, Error> {
        let ParsedDemoModel { model_bytes, config, change, seed } = self;
        let bytes = model_bytes.unwrap_or(bytes);
        if config.is_none() {
            check_model(bytes / 2, change, seed)?;
        }
        Ok(demo::Model { bytes, config, change, seed })
    }
}

#[derive(Debug, Args)]
struct ParsedRank {
    #[command(flatten)]
    model: ParsedDemoModel,
    #[arg(long)]
    region: PathBuf,
    #[arg(long, default_value = "demo")]
    model_id: String,
    #[arg(long)]
    rank: u16,
    #[arg(long)]
    ranks: u16,
}

#[derive(Clone, Copy, Debug, Args)]
struct Threads {
    /// Threads to use; as many as there are cores if not given
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), value_name = "T")]
    threads: Option<u16>,
}

impl Threads {
    fn count(self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads.map_or_else(cores, usize::from)
    }
}

/// A command whose arguments have been checked.
#[derive(Debug)]
pub enum Command {
    /// `delta make`.
    DeltaMake(Make),
    /// `delta apply`.
    DeltaApply(Apply),
    /// `delta show`.
    DeltaShow(PathBuf),
    /// `diff`.
    Diff(diff::Diff),
    /// `inspect`.
    Inspect(inspect::Inspect),
    /// `verify`.
    Verify(verify::Verify),
    /// `verify --engine`.
    Prove(engines::prove::Prove),
    /// `bench codec`.
    BenchCodec(BenchConfig),
    /// `bench seal`.
    BenchSeal(PlaneConfig),
    /// `bench offload`.
    BenchOffload(PlaneConfig),
    /// `bench load`.
    BenchLoad(PlaneConfig),
    /// `bench tcp`.
    BenchTcp(PlaneConfig, bool),
    /// `bench sync`.
    BenchSync(PlaneConfig),
    /// `bench fanout`.
    BenchFanout(PlaneConfig),
    /// `bench controller`.
    BenchController(bench::controller::ControllerConfig),
    /// `bench digest`.
    BenchDigest(BenchConfig),
    /// `doctor`.
    Doctor(doctor::Doctor),
    /// `agent`.
    Agent(Box<agent::Agent>),
    /// `controller`.
    Controller(Box<crate::service::controller::Controller>),
    /// `receive`.
    Receive(Box<receive::Receive>),
    /// `top`.
    Top(crate::tools::top::Top),
    /// `config`.
    Config(config::Show),
    /// `gate`.
    Gate(WaitAtGate),
    /// `gc`.
    Gc(gc::Gc),
    /// `demo`.
    Demo(demo::Demo),
    /// A rank of the demo.
    DemoRank(demo::rank::Rank),
    /// A receiver's guard of an engine.
    Guard,
}

impl Command {
    /// Whether it has anything to log. Others say what they have to say at their end.
    fn runs_for_long(&self) -> bool {
        matches!(
            self,
            Command::Agent(_)
                | Command::Controller(_)
                | Command::Receive(_)
                | Command::DemoRank(_)
                | Command::Guard
        )
    }
}

impl ParsedCommand {
    fn check(self, config_file: Option<PathBuf>) -> Result<Command, Error> {
        Ok(match self {
            ParsedCommand::Gate(gate) => Command::Gate(gate.check()?),
            ParsedCommand::Top(top) => Command::Top(top.check()?),
            ParsedCommand::Config { words } => Command::Config(config::Show { words, file: config_file }),
            ParsedCommand::Delta(ParsedDelta::Make {
                base,
                new,
                output,
                mode,
                model_id,
                base_version,
                version,
                threads,
            }) => {
                refuse_inputs(&output, &[&base, &new])?;
                let names = check_names(model_id, base_version, version)?;
                Command::DeltaMake(Make { base, new, output, mode, names, threads: threads.count() })
            }
            ParsedCommand::Delta(ParsedDelta::Apply { base, delta, output, in_place: _, threads }) => {
                if let Some(output) = &output {
                    refuse_inputs(output, &[&base, &delta])?;
                }
                Command::DeltaApply(Apply { base, delta, output, threads: threads.count() })
            }
            ParsedCommand::Delta(ParsedDelta::Show { delta }) => Command::DeltaShow(delta),
            ParsedCommand::Diff { a, b, threads, top } => {
                Command::Diff(diff::Diff { a, b, threads: threads.count(), top })
            }
            ParsedCommand::Inspect { path, top } => Command::Inspect(inspect::Inspect { path, top }),
            ParsedCommand::Verify(verify) => verify.check()?,
            ParsedCommand::Bench(ParsedBench::Codec(m)) => Command::BenchCodec(m.check()?),
            ParsedCommand::Bench(ParsedBench::Digest(m)) => Command::BenchDigest(m.check()?),
            ParsedCommand::Bench(ParsedBench::Seal(p)) => Command::BenchSeal(p.check(128 << 20)?),
            ParsedCommand::Bench(ParsedBench::Offload(p)) => Command::BenchOffload(p.check(128 << 20)?),
            ParsedCommand::Bench(ParsedBench::Load(p)) => Command::BenchLoad(p.check(128 << 20)?),
            ParsedCommand::Bench(ParsedBench::Tcp(p)) => Command::BenchTcp(p.plane.check(128 << 20)?, p.tls),
            ParsedCommand::Bench(ParsedBench::Sync(p)) => Command::BenchSync(p.check(128 << 20)?),
            // Every receiver has an image of its own.
            ParsedCommand::Bench(ParsedBench::Fanout(p)) => Command::BenchFanout(p.check(32 << 20)?),
            ParsedCommand::Bench(ParsedBench::Controller { receivers, models, repeats }) => {
                let receivers = receivers.into_iter().map(usize::from).collect();
                let (models, repeats) = (models.into(), repeats.into());
                Command::BenchController(bench::controller::ControllerConfig { receivers, models, repeats })
            }
            ParsedCommand::Doctor { region_dir, model_bytes } => {
                Command::Doctor(doctor::Doctor { region_dir, model_bytes })
            }
            ParsedCommand::Agent(agent) => Command::Agent(Box::new(agent.check()?)),
            ParsedCommand::Controller(controller) => Command::Controller(Box::new(controller.check()?)),
            ParsedCommand::Receive(receive) => Command::Receive(Box::new(receive.check()?)),
            ParsedCommand::Gc(gc) => Command::Gc(gc.check()),
            ParsedCommand::Guard => Command::Guard,
            ParsedCommand::Demo(d) => {
                let ParsedDemo { model, ranks, receivers, steps, streams, dir, pace, no_controller, stay } =
                    d;
                let (controller, pace) = (!no_controller, Duration::from_secs_f64(pace));
                let (bytes, default_steps) = if controller { (128 << 20, 12) } else { (1 << 30, 5) };
                let (model, steps) = (model.check(bytes)?, steps.unwrap_or(default_steps));
                let demo =
                    demo::Demo { model, ranks, receivers, steps, streams, dir, controller, pace, stay };
                Command::Demo(demo)
            }
            ParsedCommand::DemoRank(ParsedRank { model, model_id, region, rank, ranks }) => {
                let model_id = ModelId::new(model_id).map_err(|e| Error::Usage(e.to_string()))?;
                Command::DemoRank(demo::rank::Rank {
                    region,
                    model_id,
                    rank,
                    ranks,
                    model: model.check(1 << 30)?,
                })
            }
        })
    }
}

impl ParsedModel {
    fn check(self) -> Result<BenchConfig, Error> {
        let model = check_model(self.elements, self.change, self.seed)?;
        Ok(BenchConfig { model, threads: self.threads.count(), repeats: self.repeats.into() })
    }
}

impl ParsedPlane {
    fn check(self, elements: u64) -> Result<PlaneConfig, Error> {
        let elements = self.elements.or(self.model_bytes.map(|b| b / 2)).unwrap_or(elements);
        let model = check_model(elements, self.change, self.seed)?;
        let (threads, repeats) = (self.threads.count(), self.repeats.into());
        let bench = BenchConfig { model, threads, repeats };
        Ok(PlaneConfig { bench, streams: self.streams, region_dir: self.region_dir })
    }
}

fn check_names(model_id: String, base: u64, target: Option<u64>) -> Result<Names, Error> {
    let model_id = ModelId::new(model_id).map_err(|e| Error::Usage(e.to_string()))?;
    let target = target.or(base.checked_add(1)).unwrap_or(u64::MAX);
    if target <= base {
        return Err(Error::Usage(format!("version {target} of NEW must be above version {base} of BASE")));
    }
    Ok(Names { model_id, incarnation: Incarnation(0), base, target })
}

/// Refuses sizes and rates that cannot be made before memory is asked for.
fn check_model(elements: u64, change: f64, seed: u64) -> Result<SynthConfig, Error> {
    let model = SynthConfig { elements, seed, change };
    model.check()?;
    Ok(model)
}

/// A count with an optional suffix: `k`, `M`, `G`, or `Ki`, `Mi`, `Gi`.
fn parse_count(s: &str) -> Result<u64, String> {
    let at = s.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(s.len());
    let (digits, suffix) = s.split_at(at);
    let scale: u64 = match suffix {
        "" => 1,
        "k" | "K" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return Err(format!("unknown suffix {suffix:?}; expected k, M, G, Ki, Mi or Gi")),
    };
    let n: u64 = digits.replace('_', "").parse().map_err(|_| "not a whole number".to_owned())?;
    n.checked_mul(scale).ok_or_else(|| "too large".into())
}

/// A share in percent, with or without the sign.
fn parse_percent(s: &str) -> Result<f64, String> {
    let number = s.strip_suffix('%').unwrap_or(s).trim();
    number.parse::<f64>().map(|p| p / 100.0).map_err(|_| "not a number of percent, such as 1.5".into())
}

/// Runs the command line and gives the exit code.
pub fn main() -> u8 {
    main_from(std::env::args_os())
}

/// The same for other arguments than those of this process, of which the first is the name of the program.
pub fn main_from(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let json = wants_json(&arguments);
    let completed = match config::complete(&Parsed::command(), arguments, &config::Surroundings::here()) {
        Ok(completed) => completed,
        Err(e) => return report(&e.into(), json),
    };
    let parsed = match Parsed::try_parse_from(&completed.arguments) {
        Ok(parsed) => parsed,
        Err(e) => return explain(&e, completed.note().as_deref(), json),
    };
    let run = || -> Result<u8, Error> {
        let command = parsed.command.check(parsed.config_file)?;
        if command.runs_for_long() {
            crate::log::start();
        }
        let session = Session::start(json)?;
        dispatch(command, &session)
    };
    run().unwrap_or_else(|e| report(&e, json))
}

fn dispatch(command: Command, session: &Session) -> Result<u8, Error> {
    let kernels = crate::kernels();
    match command {
        Command::DeltaMake(make) => make.run(session)?,
        Command::DeltaApply(apply) => apply.run(session)?,
        Command::DeltaShow(path) => show(&path, session)?,
        Command::Diff(diff) => diff.run(session)?,
        Command::Inspect(inspect) => inspect.run(session)?,
        Command::Verify(verify) => verify.run(session)?,
        Command::Prove(prove) => return prove.run(session),
        Command::BenchSeal(config) => bench::seal::run(&config, session)?,
        Command::BenchOffload(config) => bench::offload::run(&config, session)?,
        Command::BenchLoad(config) => bench::load::run(&config, session)?,
        Command::BenchTcp(config, tls) => bench::tcp::run(&config, tls, session)?,
        Command::BenchSync(config) => bench::sync::run(&config, session)?,
        Command::BenchFanout(config) => bench::fanout::run(&config, session)?,
        Command::BenchController(config) => bench::controller::run(&config, session)?,
        Command::BenchCodec(config) => bench::codec::run(&config, session)?,
        Command::BenchDigest(config) => bench::digest::run(&config, kernels, session)?,
        Command::Doctor(doctor) => return doctor.run(session),
        Command::Agent(agent) => agent.run(session)?,
        Command::Controller(controller) => controller.run(session)?,
        Command::Receive(receive) => receive.run(session)?,
        Command::Top(top) => top.run(session)?,
        Command::Config(show) => show.run(&Parsed::command(), &config::Surroundings::here(), session)?,
        Command::Gate(gate) => gate.run(session)?,
        Command::Gc(gc) => gc.run(session)?,
        Command::Demo(demo) => return demo.run(session),
        Command::DemoRank(rank) => rank.run(session)?,
        Command::Guard => engines::guard::child(session)?,
    }
    Ok(0)
}

/// The exit codes, for the end of the help.
fn exit_codes() -> String {
    let mut text = "Exit codes:\n    0  done\n    1  the answer is no".to_owned();
    for kind in Kind::ALL {
        let _ = write!(text, "\n  {:>3}  {:<11}  {}", kind.row().exit, kind.as_str(), kind.row().meaning);
    }
    text
}

/// Whether to speak JSON, asked before arguments are parsed: failures to parse are told in it too.
fn wants_json(arguments: &[OsString]) -> bool {
    arguments.iter().skip(1).take_while(|a| *a != "--").any(|a| a == "--json")
}

/// Arguments that do not parse. Help and version are not failures; in JSON mode a failure is JSON too.
fn explain(e: &clap::Error, note: Option<&str>, json: bool) -> u8 {
    if e.use_stderr() && json {
        let message = crate::console::one_line(&e.render().to_string());
        let message = note.map_or(message.clone(), |note| format!("{message} ({note})"));
        return report(&Error::Usage(message), true);
    }
    if e.use_stderr() {
        // Nobody to tell if even this cannot be printed.
        let _ = e.print();
        if let Some(note) = note {
            let _ = writeln!(std::io::stderr(), "\n{note}");
        }
        return Kind::Invalid.row().exit;
    }
    match e.print() {
        Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
            report(&Error::Io { action: "write to", path: "standard output".into(), source }, false)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_parser_is_consistent() {
        Parsed::command().debug_assert();
    }

    #[test]
    fn counts_take_suffixes_and_shares_are_percent() {
        assert_eq!(parse_count("512Mi"), Ok(512 << 20));
        assert_eq!(parse_count("1_000k"), Ok(1_000_000));
        assert!(parse_count("1Ti").is_err() && parse_count("-1").is_err() && parse_count("Mi").is_err());
        assert!(parse_count("99999999999Gi").is_err());
        assert_eq!(parse_percent("1.5"), Ok(0.015));
        assert_eq!(parse_percent("50 %"), Ok(0.5));
        assert!(parse_percent("much").is_err());
    }
}
