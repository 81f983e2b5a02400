//! Arguments of `bench` and `demo`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use windlass_core::identity::ModelId;
use windlass_core::wire::{DEFAULT_STREAMS, MAX_STREAMS};

use super::service::{NixlLibrary, parse_seconds};
use super::{Threads, Work, done, parse_count, parse_percent};
use crate::console::Session;
use crate::error::Error;
use crate::lab::bench::{self, BenchConfig, PlaneConfig};
use crate::lab::demo::{self, engine::EngineDemo};
use crate::service::engines::Dialect;
use crate::tools::doctor;
use windlass_synth::SynthConfig;

#[derive(Debug, Subcommand)]
pub(super) enum ParsedBench {
    /// Encoding and applying deltas, against reading two images, copying one, XOR + zstd, and a list of positions
    Codec(ParsedModel),
    /// Block hashes and state digest, against reading the image once
    Digest(ParsedModel),
    /// Sealing: a delta file and a hash table from two images, against reading both
    Seal(ParsedPlane),
    /// Offloading tensors into a slot until the commit, against copying them
    Offload(ParsedPlane),
    /// Loading an image into an engine's parameters by a load plan, dense and sparse, against copying it
    Load(ParsedPlane),
    /// A full image over loopback, with and without verification, against bare sendfile and recv
    Tcp(ParsedTcp),
    /// A full image by one-sided reads of NIXL, against a bare loop of them and TCP
    Nixl(ParsedNixlBench),
    /// A sync by delta, from commit to the receiver's image, against encoding, sending and applying alone
    Sync(ParsedPlane),
    /// One version to 1, 2, 4, 8 and 16 receivers at once, against the link's bandwidth
    Fanout(ParsedPlane),
    /// Orders from the controller to 3, 30 and 300 receivers, against as many empty requests
    Controller {
        /// Numbers of receivers
        #[arg(long, default_value = "3,30,300", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=4096), value_name = "N,N…")]
        receivers: Vec<u16>,
        /// Models in the set
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256), value_name = "N")]
        models: u16,
        /// Rounds of each measurement; the result is the median
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
        repeats: u16,
    },
    /// Versions to up to thousands of hosts, over modelled links, by the code that decides who sends what to whom; moves no bytes
    Scale(ParsedScale),
}

#[derive(Debug, Args)]
pub(super) struct ParsedScale {
    /// Parameters of the bf16 models; accepts the suffixes k, M, G and T
    #[arg(long, default_value = "8G,70G,1T", value_delimiter = ',', value_parser = parse_count, value_name = "N,N…")]
    params: Vec<u64>,
    /// Bytes of one image, instead of --params
    #[arg(long, conflicts_with = "params", value_parser = parse_count, value_name = "BYTES")]
    bytes: Option<u64>,
    /// Percentage of elements that change
    #[arg(long, default_value = "1.0", value_parser = parse_percent, value_name = "P")]
    change: f64,
    /// Bytes of a delta, instead of an estimate from --change
    #[arg(long, value_parser = parse_count, value_name = "BYTES")]
    delta_bytes: Option<u64>,
    /// Numbers of receivers' hosts
    #[arg(long, default_value = "8,64,512", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096), value_name = "N,N…")]
    receivers: Vec<u32>,
    /// Trainers' hosts, which hold equal parts of the model
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=128), value_name = "N")]
    trainers: u32,
    /// Rate of every host's link in each direction, in Gbit/s
    #[arg(long, default_value = "25,100,400", value_delimiter = ',', value_parser = parse_positive, value_name = "G,G…")]
    gbit: Vec<f64>,
    /// Time for a message and its answer over free links, in milliseconds
    #[arg(long, default_value = "0.2", value_parser = parse_positive, value_name = "MS")]
    rtt_ms: f64,
    /// The longest that bytes wait in front of a link, in milliseconds
    #[arg(long, default_value = "5", value_parser = parse_positive, value_name = "MS")]
    queue_ms: f64,
    /// Time that an engine takes for a load, in milliseconds
    #[arg(long, default_value = "10", value_parser = parse_positive, value_name = "MS")]
    load_ms: f64,
    /// Receivers' hosts that die in the course of a transfer, in the runs with failures
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=64), value_name = "N")]
    deaths: u32,
    /// Seed of who dies, and when
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl ParsedScale {
    fn check(self) -> Result<bench::scale::ScaleConfig, Error> {
        let images =
            self.bytes.map_or_else(|| self.params.iter().map(|p| p.saturating_mul(2)).collect(), |b| vec![b]);
        if images.contains(&0) || self.delta_bytes == Some(0) {
            return Err(Error::Usage(
                "a model without bytes cannot be sent: give more than 0 to --params, --bytes and --delta-bytes".into(),
            ));
        }
        if !(self.change > 0.0 && self.change <= 1.0) {
            return Err(Error::Usage(format!(
                "--change {} is not a percentage above 0 and up to 100",
                self.change * 100.0
            )));
        }
        Ok(bench::scale::ScaleConfig {
            images,
            change: self.change,
            delta_bytes: self.delta_bytes,
            receivers: self.receivers,
            trainers: self.trainers,
            gbit: self.gbit,
            rtt: self.rtt_ms / 1e3,
            queue: self.queue_ms / 1e3,
            load: self.load_ms / 1e3,
            deaths: self.deaths,
            seed: self.seed,
        })
    }
}

#[derive(Debug, Args)]
pub(super) struct ParsedModel {
    /// Elements of the synthetic bf16 model; accepts the suffixes k, M, G, Ki, Mi and Gi
    #[arg(long, default_value = "256Mi", value_parser = parse_count, value_name = "N")]
    elements: u64,
    /// Percentage of elements that change
    #[arg(long, default_value = "1.5", value_parser = parse_percent, value_name = "P")]
    change: f64,
    #[command(flatten)]
    threads: Threads,
    /// Rounds of each measurement; the result is the median
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    repeats: u16,
    /// Seed of the synthetic model
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Debug, Args)]
pub(super) struct ParsedTcp {
    #[command(flatten)]
    plane: ParsedPlane,
    /// Also measure pulls with TLS
    #[arg(long)]
    tls: bool,
}

#[derive(Debug, Args)]
pub(super) struct ParsedNixlBench {
    #[command(flatten)]
    plane: ParsedPlane,
    #[command(flatten)]
    library: NixlLibrary,
}

#[derive(Debug, Args)]
pub(super) struct ParsedPlane {
    /// Elements of the synthetic bf16 model; accepts the suffixes k, M, G, Ki, Mi and Gi [default: 128Mi; fanout: 32Mi]
    #[arg(long, value_parser = parse_count, value_name = "N", conflicts_with = "model_bytes")]
    elements: Option<u64>,
    /// Size of the model in bytes, instead of --elements
    #[arg(long, value_parser = parse_count, value_name = "N")]
    model_bytes: Option<u64>,
    /// Percentage of elements that change
    #[arg(long, default_value = "1.5", value_parser = parse_percent, value_name = "P")]
    change: f64,
    /// TCP streams per transfer
    #[arg(long, default_value_t = DEFAULT_STREAMS, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_STREAMS)), value_name = "N")]
    streams: u16,
    #[command(flatten)]
    threads: Threads,
    /// Rounds of each measurement; the result is the median
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    repeats: u16,
    /// Seed of the synthetic model
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Directory for regions
    #[arg(long, default_value = doctor::region_dir::DEFAULT, value_name = "DIR")]
    region_dir: PathBuf,
}

#[derive(Debug, Args)]
pub(super) struct ParsedDemo {
    #[command(flatten)]
    model: ParsedDemoModel,
    /// Ranks of each trainer
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64), value_name = "N")]
    ranks: u16,
    /// Receivers
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64), value_name = "N")]
    receivers: u16,
    /// Training steps
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=i64::from(demo::MAX_STEPS)), value_name = "N")]
    steps: u32,
    /// TCP streams per transfer
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=256), value_name = "N")]
    streams: u16,
    /// Directory for regions and images; the demo removes its files at the end
    #[arg(long, default_value = "/dev/shm", value_name = "DIR")]
    dir: PathBuf,
    /// Minimum duration of an actor step, in seconds; a verifier step takes nearly twice as long
    #[arg(long, default_value_t = 0.5, value_parser = parse_seconds, value_name = "S")]
    pace: f64,
    /// Keep the live page up after the last step, until Ctrl-C
    #[arg(long)]
    stay: bool,
    /// Start a real server of this engine, and teach it a sentence: a tiny model learns, and the server's answers change
    #[arg(
        long, value_enum, value_name = "NAME",
        conflicts_with_all = ["model_bytes", "change", "seed", "ranks", "receivers", "streams"],
    )]
    engine: Option<Dialect>,
    /// The Python interpreter that has the engine, torch, transformers and windlass [default: the one that runs this command,
    /// else that of VIRTUAL_ENV, else python3]
    #[arg(long, value_name = "PATH", requires = "engine")]
    python: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct ParsedDemoModel {
    /// Size of each synthetic bf16 model in bytes; accepts the suffixes k, M, G, Ki, Mi and Gi
    #[arg(long, default_value = "128Mi", value_parser = parse_count, value_name = "BYTES")]
    model_bytes: u64,
    /// Percentage of elements that change per step
    #[arg(long, default_value = "1.0", value_parser = parse_percent, value_name = "P")]
    change: f64,
    /// Seed of the synthetic model
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl ParsedDemoModel {
    fn check(self) -> Result<SynthConfig, Error> {
        check_model(self.model_bytes / 2, self.change, self.seed)
    }
}

#[derive(Debug, Args)]
pub(super) struct ParsedRank {
    #[command(flatten)]
    model: ParsedDemoModel,
    #[arg(long)]
    region: PathBuf,
    #[arg(long, default_value = "demo")]
    model_id: ModelId,
    #[arg(long)]
    rank: u16,
    #[arg(long)]
    ranks: u16,
}

impl ParsedBench {
    pub(super) fn check(self) -> Result<Work, Error> {
        // What most of them take; every receiver of `fanout` has an image.
        const ELEMENTS: u64 = 128 << 20;
        Ok(match self {
            ParsedBench::Codec(model) => {
                let config = model.check()?;
                done(move |s| bench::codec::run(&config, s))
            }
            ParsedBench::Digest(model) => {
                let config = model.check()?;
                done(move |s| bench::digest::run(&config, s))
            }
            ParsedBench::Seal(plane) => plane.work(ELEMENTS, bench::seal::run)?,
            ParsedBench::Offload(plane) => plane.work(ELEMENTS, bench::offload::run)?,
            ParsedBench::Load(plane) => plane.work(ELEMENTS, bench::load::run)?,
            ParsedBench::Tcp(ParsedTcp { plane, tls }) => {
                plane.work(ELEMENTS, move |config, s| bench::tcp::run(config, tls, s))?
            }
            ParsedBench::Nixl(ParsedNixlBench { plane, library }) => {
                let nixl = library.check()?;
                plane.work(ELEMENTS, move |config, s| bench::nixl::run(config, &nixl, s))?
            }
            ParsedBench::Sync(plane) => plane.work(ELEMENTS, bench::sync::run)?,
            ParsedBench::Fanout(plane) => plane.work(ELEMENTS / 4, bench::fanout::run)?,
            ParsedBench::Controller { receivers, models, repeats } => {
                let receivers = receivers.into_iter().map(usize::from).collect();
                let (models, repeats) = (models.into(), repeats.into());
                let config = bench::controller::ControllerConfig { receivers, models, repeats };
                done(move |s| bench::controller::run(&config, s))
            }
            ParsedBench::Scale(scale) => {
                let config = scale.check()?;
                done(move |s| bench::scale::run(&config, s))
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
    fn work(
        self,
        elements: u64,
        run: impl FnOnce(&PlaneConfig, &Session) -> Result<(), Error> + 'static,
    ) -> Result<Work, Error> {
        let elements = self.elements.or(self.model_bytes.map(|b| b / 2)).unwrap_or(elements);
        let model = check_model(elements, self.change, self.seed)?;
        let (threads, repeats) = (self.threads.count(), self.repeats.into());
        let bench = BenchConfig { model, threads, repeats };
        let config = PlaneConfig { bench, streams: self.streams, region_dir: self.region_dir };
        Ok(done(move |s| run(&config, s)))
    }
}

impl ParsedDemo {
    pub(super) fn check(self) -> Result<Work, Error> {
        let ParsedDemo { model, ranks, receivers, steps, streams, dir, pace, stay, engine, python } = self;
        let (model, pace) = (model.check()?, Duration::from_secs_f64(pace));
        if let Some(engine) = engine {
            let demo = EngineDemo { engine, python, steps, dir, pace, stay };
            return Ok(Box::new(move |s| demo.run(s)));
        }
        let demo = demo::Demo { model, ranks, receivers, steps, streams, dir, pace, stay };
        Ok(Box::new(move |s| demo.run(s)))
    }
}

impl ParsedRank {
    pub(super) fn check(self) -> Result<Work, Error> {
        let ParsedRank { model, region, model_id, rank, ranks } = self;
        let rank = demo::rank::DemoRank { region, model_id, rank, ranks, model: model.check()? };
        Ok(done(move |s| rank.run(s)))
    }
}

/// Refuses impossible sizes and rates before memory is allocated.
/// A positive number.
fn parse_positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|n| *n > 0.0 && n.is_finite());
    number.ok_or_else(|| format!("{text:?} is not a number above 0"))
}

fn check_model(elements: u64, change: f64, seed: u64) -> Result<SynthConfig, Error> {
    let model = SynthConfig { elements, seed, change };
    model.check()?;
    Ok(model)
}
