//! Arguments of `windlass store`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use windlass_core::address::StoreUrl;
use windlass_core::identity::Incarnation;
use windlass_core::store::Retention;

use super::service::{ClientTls, parse_hours};
use super::{Threads, Work, done, parse_count};
use crate::error::Error;
use crate::service::store::model::Pick;
use crate::tools::store::Place;
use crate::tools::store::get::Get;
use crate::tools::store::list::{List, Show};
use crate::tools::store::prune::Prune;
use crate::tools::store::verify::Verify;

#[derive(Debug, Subcommand)]
pub(super) enum ParsedStoreTool {
    /// List the models of a store and their newest versions
    Ls {
        #[command(flatten)]
        place: ParsedPlace,
        /// Versions of each model, the newest first; 0 shows all
        #[arg(long, default_value_t = 20, value_name = "N")]
        top: usize,
    },
    /// Show one version: its digest, its chain and its objects
    Show {
        #[command(flatten)]
        place: ParsedPlace,
        #[command(flatten)]
        pick: ParsedPick,
    },
    /// Read everything again and compare every hash
    ///
    /// Reads each object that a version needs, compares it with its hash, each block of an anchor with the anchor's table, and the
    /// digest of each version with the hashes that its deltas lead to. Names what is damaged or missing, and exits with 1 if
    /// anything is.
    Verify {
        #[command(flatten)]
        place: ParsedPlace,
        #[command(flatten)]
        pick: ParsedPick,
    },
    /// Write one version as a checkpoint
    ///
    /// Makes a directory with model.safetensors, and with the other files of --model-dir if it is given, so that `transformers`
    /// and engines load it. The directory appears when the version is whole and its digest is right.
    Get {
        #[command(flatten)]
        place: ParsedPlace,
        #[command(flatten)]
        pick: ParsedPick,
        /// The directory to make
        #[arg(short, long, value_name = "DIR")]
        output: PathBuf,
        /// The model's directory, whose configuration and tokenizer are copied
        #[arg(long, value_name = "DIR")]
        model_dir: Option<PathBuf>,
        #[command(flatten)]
        threads: Threads,
    },
    /// Remove the oldest versions, and the objects that only they need
    ///
    /// The newest version of each model stays. A publisher and receivers may run meanwhile.
    Prune {
        #[command(flatten)]
        place: ParsedPlace,
        /// Keep at most this many versions of each model
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "N")]
        keep: Option<u64>,
        /// Remove versions that are older than this many hours
        #[arg(long, value_parser = parse_hours, value_name = "H")]
        keep_hours: Option<u64>,
        /// Remove the oldest versions of each model beyond this many bytes
        #[arg(long, value_parser = parse_count, value_name = "BYTES")]
        keep_bytes: Option<u64>,
        /// List what would be removed, and remove nothing
        #[arg(long, conflicts_with = "yes")]
        dry_run: bool,
        /// Remove without confirmation
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Args)]
pub(super) struct ParsedPlace {
    /// The store: s3://BUCKET/RUN[/MODEL], gs://BUCKET/RUN, az://CONTAINER/RUN or file:///DIRECTORY. Credentials come from the
    /// environment
    #[arg(value_name = "URL")]
    url: StoreUrl,
    #[command(flatten)]
    client: ClientTls,
}

impl ParsedPlace {
    fn check(self) -> Result<Place, Error> {
        Ok(Place { url: self.url, trust: self.client.trust()? })
    }
}

#[derive(Debug, Args)]
pub(super) struct ParsedPick {
    /// The version [default: the newest; for verify, all]
    #[arg(long, value_name = "N")]
    version: Option<u64>,
    /// The run of the trainer that published it, as `windlass store ls` shows it [default: the newest that has the version]
    #[arg(long, value_name = "HEX")]
    incarnation: Option<Incarnation>,
}

impl ParsedPick {
    fn check(self) -> Pick {
        Pick { incarnation: self.incarnation, version: self.version }
    }
}

impl ParsedStoreTool {
    pub(super) fn check(self) -> Result<Work, Error> {
        Ok(match self {
            ParsedStoreTool::Ls { place, top } => {
                let list = List { place: place.check()?, top };
                done(move |s| list.run(s))
            }
            ParsedStoreTool::Show { place, pick } => {
                let show = Show { place: place.check()?, pick: pick.check() };
                done(move |s| show.run(s))
            }
            ParsedStoreTool::Verify { place, pick } => {
                let verify = Verify { place: place.check()?, pick: pick.check() };
                Box::new(move |s| verify.run(s))
            }
            ParsedStoreTool::Get { place, pick, output, model_dir, threads } => {
                if let Some(dir) = model_dir.as_deref().filter(|dir| !dir.is_dir()) {
                    return Err(Error::Usage(format!("--model-dir {} is not a directory", dir.display())));
                }
                let (place, pick) = (place.check()?, pick.check());
                let get = Get { place, pick, output, model_dir, threads: threads.count() };
                done(move |s| get.run(s))
            }
            ParsedStoreTool::Prune { place, keep, keep_hours, keep_bytes, dry_run, yes } => {
                let keep = Retention { count: keep, age_ms: keep_hours, bytes: keep_bytes };
                let prune = Prune { place: place.check()?, keep, dry_run, yes };
                done(move |s| prune.run(s))
            }
        })
    }
}
