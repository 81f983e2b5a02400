//! The command line.
//!
//! Owns: arguments and exit codes. Parsed arguments (`Parsed`) are checked before a command opens or writes anything; the
//! result is the command's `Work`. Exit codes: 0 success, 1 a negative result, and otherwise that of the error's kind
//! ([`windlass_core::error::Kind::row`]).

mod config;
mod controller;
mod gate;
mod init;
#[cfg(feature = "lab")]
mod lab;
mod publish;
mod service;
mod store;
mod top;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use clap::{ArgGroup, Args, CommandFactory as _, Parser, Subcommand};

use self::controller::ParsedController;
use self::gate::ParsedGate;
use self::init::ParsedInit;
#[cfg(feature = "lab")]
use self::lab::{ParsedBench, ParsedDemo, ParsedRank};
use self::publish::ParsedPublish;
use self::service::{ParsedAgent, ParsedGc, ParsedReceive, ParsedVerify};
use self::store::ParsedStoreTool;
use self::top::ParsedTop;
use crate::console::{Session, report};
use crate::error::Error;
use crate::service::engines;
use crate::tools::delta::apply::Apply;
use crate::tools::delta::make::{Make, Mode};
use crate::tools::diff;
use crate::tools::doctor;
use crate::tools::inspect;
use crate::tools::outfile::refuse_inputs;
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, ModelId};
use windlass_data::seal::Names;

/// Weight sync for RL post-training: bit-exact, versioned, at hardware speed.
#[derive(Debug, Parser)]
#[command(name = "windlass", version, arg_required_else_help = true, after_help = exit_codes())]
struct Parsed {
    /// Print one JSON object as the last line of standard output, even on failure
    #[arg(long, global = true)]
    json: bool,
    /// Configuration file [default: WINDLASS_CONFIG, else ./windlass.toml]
    #[arg(long, global = true, value_name = "FILE")]
    config_file: Option<PathBuf>,
    #[command(subcommand)]
    command: ParsedCommand,
}

#[derive(Debug, Subcommand)]
enum ParsedCommand {
    /// Make or apply the difference between two versions of a model
    #[command(subcommand)]
    Delta(ParsedDelta),
    /// Compare two versions: change rate per tensor, step sizes, and delta size per mode
    ///
    /// A and B are safetensors files, or directories of shards, with the same tensors.
    Diff {
        /// The older version
        a: PathBuf,
        /// The newer version
        b: PathBuf,
        #[command(flatten)]
        threads: Threads,
        /// Rows in the tensor table; 0 shows all
        #[arg(long, default_value_t = 20, value_name = "N")]
        top: usize,
    },
    /// Show the contents of a safetensors file, a directory of shards, a manifest or a delta
    Inspect {
        /// The file or directory
        path: PathBuf,
        /// Rows in the tensor table; 0 shows all
        #[arg(long, default_value_t = 20, value_name = "N")]
        top: usize,
    },
    /// Compute a checkpoint's state digest, or compare an engine's live weights with an image
    ///
    /// A checkpoint is a safetensors file or a directory of shards. With --engine, the command compares the live weights of a
    /// vLLM server that has the Windlass plugin with an image, tensor by tensor. It exits with 0 only if every tensor is
    /// complete and equal.
    Verify(ParsedVerify),
    /// Measure a component of Windlass against the limits of this machine
    #[cfg(feature = "lab")]
    #[command(subcommand)]
    Bench(ParsedBench),
    /// Write a windlass.toml and minimal scripts of a trainer and an engine, for the frameworks that are installed
    ///
    /// Asks the Python interpreter which of TRL, verl, SkyRL, OpenRLHF, transformers, Lightning, Accelerate, DeepSpeed and torch,
    /// and which of vLLM and SGLang, it has, without importing them. If one of the files exists, nothing is written.
    Init(ParsedInit),
    /// Check this machine, recommend settings, and explain which transport would be chosen
    Doctor {
        /// Directory in which trainers will create regions
        #[arg(long, default_value = doctor::region_dir::DEFAULT, value_name = "DIR")]
        region_dir: PathBuf,
        /// Size of the trained model in bytes, for the choice of transport; accepts the suffixes k, M, G, Ki, Mi and Gi
        #[arg(long, value_parser = parse_count, value_name = "BYTES")]
        model_bytes: Option<u64>,
    },
    /// Serve a region's versions to receivers
    ///
    /// The trainer creates the region and starts the agent. Receivers need the agent's token. Unless a token is given, the
    /// agent writes one to the region's directory.
    Agent(ParsedAgent),
    /// Coordinate which receivers load which version, for several models, with a live page
    ///
    /// Trainers notify the controller of new versions, receivers poll it for orders, and data loaders wait at its gate. It
    /// serves a live page at its address. It stores nothing on disk: after a restart, receivers and trainers report their
    /// state again.
    Controller(ParsedController),
    /// Publish the checkpoints that another program writes, each as a version
    ///
    /// A checkpoint is a directory of safetensors files whose name holds a number, the version, and that holds the marker once
    /// it is finished. Runs an agent for receivers; options of `windlass agent` follow after --.
    Publish(Box<ParsedPublish>),
    /// Keep local copies of models up to date with their trainers
    ///
    /// A local copy is an image: a safetensors file that engines read in place. Runs until Ctrl-C, --versions or --until.
    Receive(Box<ParsedReceive>),
    /// Wait until a set of models serves a version, as `windlass.gate` does
    ///
    /// Exits with 0 when every required receiver has loaded the version. If the controller is unreachable, the command keeps
    /// waiting. On timeout, the error names the receivers and models that are missing.
    Gate(ParsedGate),
    /// Show a controller's status: models, receivers, their activity and errors
    ///
    /// On a terminal, the view is refreshed until Ctrl-C. --once prints it once; --json prints the document of GET /status.
    Top(ParsedTop),
    /// Print the effective configuration of a command, with the source of every value
    ///
    /// The precedence is: command line, environment (WINDLASS_<COMMAND>_<FLAG>), windlass.toml, default. Without a command,
    /// prints every value that is set.
    Config {
        /// A command, such as receive or bench codec, and its flags
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
        words: Vec<OsString>,
    },
    /// Remove regions and images that dead processes left behind, or objects that killed publishers left in a store
    ///
    /// Searches below DIR at any depth, but follows no links and enters no other file system. A directory is removed with all
    /// its contents, unless a Windlass process has it open. With --dry-run, the command only lists such directories. Programs
    /// that have mapped an image keep their mapping, but can no longer open its path.
    Gc(ParsedGc),
    /// Look at the versions in a store: S3, GCS, Azure or a shared disk
    #[command(subcommand)]
    Store(ParsedStoreTool),
    /// Train synthetic models in several processes and keep receivers in sync with them
    ///
    /// Starts two trainers with several ranks each, an agent per trainer, a controller with a live page, and receivers that
    /// serve both models. One receiver joins late, and another is killed. At the end, the demo re-hashes every image and
    /// compares it with the trainers' memory.
    ///
    /// With --engine, a trainer teaches a tiny model one sentence instead, a real vLLM or SGLang server follows, and the demo shows how
    /// its answers change. At the end, the server's answer must be that of the trainer's own model.
    #[cfg(feature = "lab")]
    Demo(ParsedDemo),
    #[cfg(feature = "lab")]
    #[command(hide = true)]
    DemoRank(ParsedRank),
    /// Loads one engine for a receiver
    #[command(hide = true)]
    Guard,
}

#[derive(Debug, Subcommand)]
enum ParsedDelta {
    /// Write the changes from BASE to NEW
    ///
    /// Both are safetensors files, or directories of shards, with the same tensors.
    Make(ParsedMake),
    /// Create the newer version from BASE and DELTA, verifying every block
    ///
    /// The result is a file or a directory of shards, as BASE is, and keeps BASE's headers with their `__metadata__`. A
    /// directory gets only the shards and their index: copy the configuration and the tokenizer yourself. Give either
    /// --output or --in-place.
    #[command(group(ArgGroup::new("place").required(true).args(["output", "in_place"])))]
    Apply {
        /// The older version
        base: PathBuf,
        /// The delta
        delta: PathBuf,
        /// Where to write the newer version
        #[arg(short, long, value_name = "OUT")]
        output: Option<PathBuf>,
        /// Modify BASE itself, and with it all hard links to its files; run the command again to finish an interrupted update
        #[arg(long)]
        in_place: bool,
        #[command(flatten)]
        threads: Threads,
    },
}

#[derive(Debug, Args)]
struct ParsedMake {
    /// The older version
    base: PathBuf,
    /// The newer version
    new: PathBuf,
    /// Where to write the delta
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// How to encode changes
    #[arg(long, value_enum, default_value_t = Mode::Auto)]
    mode: Mode,
    /// Model ID to record in the delta
    #[arg(long, default_value = "model", value_name = "ID")]
    model_id: ModelId,
    /// Version number of BASE to record in the delta
    #[arg(long, default_value_t = 0, value_name = "N")]
    base_version: u64,
    /// Version number of NEW to record in the delta [default: BASE's plus one]
    #[arg(long, value_name = "N")]
    version: Option<u64>,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Clone, Copy, Debug, Args)]
struct Threads {
    /// Threads [default: one per core]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), value_name = "T")]
    threads: Option<u16>,
}

impl Threads {
    fn count(self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads.map_or_else(cores, usize::from)
    }
}

/// A command whose arguments have been checked: runs it and returns the exit code.
type Work = Box<dyn FnOnce(&Session) -> Result<u8, Error>>;

/// Work whose exit code is 0 unless it fails.
fn done(run: impl FnOnce(&Session) -> Result<(), Error> + 'static) -> Work {
    Box::new(move |session| run(session).map(|()| 0))
}

impl ParsedCommand {
    /// Whether the command writes a log. The others report at their end.
    fn logs(&self) -> bool {
        match self {
            ParsedCommand::Agent(_)
            | ParsedCommand::Controller(_)
            | ParsedCommand::Publish(_)
            | ParsedCommand::Receive(_)
            | ParsedCommand::Guard => true,
            #[cfg(feature = "lab")]
            ParsedCommand::DemoRank(_) => true,
            #[cfg(feature = "lab")]
            ParsedCommand::Bench(_) | ParsedCommand::Demo(_) => false,
            ParsedCommand::Delta(_)
            | ParsedCommand::Diff { .. }
            | ParsedCommand::Inspect { .. }
            | ParsedCommand::Verify(_)
            | ParsedCommand::Init(_)
            | ParsedCommand::Doctor { .. }
            | ParsedCommand::Gate(_)
            | ParsedCommand::Top(_)
            | ParsedCommand::Config { .. }
            | ParsedCommand::Gc(_)
            | ParsedCommand::Store(_) => false,
        }
    }

    fn check(self, config_file: Option<PathBuf>) -> Result<Work, Error> {
        Ok(match self {
            ParsedCommand::Gate(gate) => {
                let gate = gate.check()?;
                done(move |s| gate.run(s))
            }
            ParsedCommand::Top(top) => {
                let top = top.check()?;
                done(move |s| top.run(s))
            }
            ParsedCommand::Config { words } => {
                let show = config::Show { words, file: config_file };
                done(move |s| show.run(&Parsed::command(), &config::Surroundings::here(), s))
            }
            ParsedCommand::Delta(ParsedDelta::Make(make)) => {
                let make = make.check()?;
                done(move |s| make.run(s))
            }
            ParsedCommand::Delta(ParsedDelta::Apply { base, delta, output, in_place: _, threads }) => {
                if let Some(output) = &output {
                    refuse_inputs(output, &[&base, &delta])?;
                }
                let apply = Apply { base, delta, output, threads: threads.count() };
                done(move |s| apply.run(s))
            }
            ParsedCommand::Diff { a, b, threads, top } => {
                let diff = diff::Diff { a, b, threads: threads.count(), top };
                done(move |s| diff.run(s))
            }
            ParsedCommand::Inspect { path, top } => {
                let inspect = inspect::Inspect { path, top };
                done(move |s| inspect.run(s))
            }
            ParsedCommand::Verify(verify) => verify.check()?,
            ParsedCommand::Init(init) => {
                let init = init.check();
                done(move |s| init.run(s))
            }
            ParsedCommand::Doctor { region_dir, model_bytes } => {
                let doctor = doctor::Doctor { region_dir, model_bytes };
                Box::new(move |s| doctor.run(s))
            }
            ParsedCommand::Agent(agent) => {
                let agent = agent.check()?;
                done(move |s| agent.run(s))
            }
            ParsedCommand::Controller(controller) => {
                let controller = controller.check()?;
                done(move |s| controller.run(s))
            }
            ParsedCommand::Publish(publish) => {
                let publish = publish.check()?;
                done(move |s| publish.run(s))
            }
            ParsedCommand::Receive(receive) => {
                let receive = receive.check()?;
                done(move |s| receive.run(s))
            }
            ParsedCommand::Gc(gc) => gc.check()?,
            ParsedCommand::Store(store) => store.check()?,
            ParsedCommand::Guard => done(engines::guard::child),
            #[cfg(feature = "lab")]
            ParsedCommand::Bench(bench) => bench.check()?,
            #[cfg(feature = "lab")]
            ParsedCommand::Demo(demo) => demo.check()?,
            #[cfg(feature = "lab")]
            ParsedCommand::DemoRank(rank) => rank.check()?,
        })
    }
}

impl ParsedMake {
    fn check(self) -> Result<Make, Error> {
        let ParsedMake { base, new, output, mode, model_id, base_version, version, threads } = self;
        refuse_inputs(&output, &[&base, &new])?;
        let target = version.or(base_version.checked_add(1)).unwrap_or(u64::MAX);
        if target <= base_version {
            return Err(Error::Usage(format!(
                "version {target} of NEW must be above version {base_version} of BASE"
            )));
        }
        let names = Names { model_id, incarnation: Incarnation(0), base: base_version, target };
        Ok(Make { base, new, output, mode, names, threads: threads.count() })
    }
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
        "T" => 1_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return Err(format!("unknown suffix {suffix:?}; expected k, M, G, T, Ki, Mi or Gi")),
    };
    let n: u64 = digits.replace('_', "").parse().map_err(|_| "not a whole number".to_owned())?;
    n.checked_mul(scale).ok_or_else(|| "too large".into())
}

/// A share in percent, with or without the sign.
fn parse_percent(s: &str) -> Result<f64, String> {
    let number = s.strip_suffix('%').unwrap_or(s).trim();
    number.parse::<f64>().map(|p| p / 100.0).map_err(|_| "not a number of percent, such as 1.5".into())
}

/// Runs the command line and returns the exit code.
pub fn main() -> u8 {
    main_from(std::env::args_os())
}

/// The same for the given arguments. The first is the name of the program.
pub fn main_from(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let json = wants_json(&arguments);
    let completed = match config::complete(&Parsed::command(), arguments, &config::Surroundings::here()) {
        Ok(completed) => completed,
        Err(e) => return report(&e.into(), json),
    };
    let parsed = match Parsed::try_parse_from(&completed.arguments) {
        Ok(parsed) => parsed,
        Err(e) => return explain(&e, completed.note.as_deref(), json),
    };
    let run = || -> Result<u8, Error> {
        if parsed.command.logs() {
            crate::log::start();
        }
        let work = parsed.command.check(parsed.config_file)?;
        work(&Session::start(json)?)
    };
    run().unwrap_or_else(|e| report(&e, json))
}

/// The exit codes, shown below the help.
fn exit_codes() -> String {
    let mut text = "Exit codes:\n    0  success\n    1  negative result".to_owned();
    for kind in Kind::ALL {
        let _ = write!(text, "\n  {:>3}  {:<11}  {}", kind.row().exit, kind.as_str(), kind.row().meaning);
    }
    text
}

/// Whether output is JSON. Decided before arguments are parsed, so that parse errors are JSON too.
fn wants_json(arguments: &[OsString]) -> bool {
    arguments.iter().skip(1).take_while(|a| *a != "--").any(|a| a == "--json")
}

/// Reports arguments that do not parse. Help and version are not failures.
fn explain(e: &clap::Error, note: Option<&str>, json: bool) -> u8 {
    if e.use_stderr() && json {
        let message = crate::console::one_line(&e.render().to_string());
        let message = note.map_or(message.clone(), |note| format!("{message} ({note})"));
        return report(&Error::Usage(message), true);
    }
    if e.use_stderr() {
        // If standard error is closed, the exit code is all that is left.
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
