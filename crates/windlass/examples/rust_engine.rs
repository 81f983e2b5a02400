//! An engine without Python: its loader is a callback that gets whole, verified versions.
//!
//! See `rust_trainer` for how the two are started together. Each version is a line on standard output: its number, its
//! digest, how it came (`full`, `delta` or `mapped`), how many tensors had changed, and a checksum of what the engine
//! now holds. Ends after version `--until`.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use windlass::service::plane::HttpPlane;
use windlass_core::sync_info::WeightSyncInfo;
use windlass_data::roles::{BoxError, EngineConfig, Feed, Strategies, WeightLoader, Weights};
use windlass_data::stop::Stop;

#[derive(Parser)]
struct Arguments {
    /// What the trainer wrote. Waited for.
    #[arg(long)]
    sync_info: PathBuf,
    /// Where this host keeps its image of the weights, over `tcp`.
    #[arg(long)]
    image: PathBuf,
    /// The trainer's region, over `shm`.
    #[arg(long, default_value = "")]
    region: PathBuf,
    /// `tcp` or `shm`, as the trainer's.
    #[arg(long, default_value = "tcp")]
    link: String,
    /// End after this version.
    #[arg(long)]
    until: u64,
}

/// Where a real engine has its device memory.
#[derive(Default)]
struct Engine {
    weights: BTreeMap<String, Vec<u8>>,
}

impl WeightLoader for Engine {
    /// The bytes are in place and verified; they are borrowed for the time of this call.
    fn load(&mut self, weights: &Weights<'_>) -> Result<(), BoxError> {
        for tensor in weights.to_load() {
            self.weights.insert(tensor.name.to_owned(), tensor.bytes.to_vec());
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let info = wait_for_info(&arguments.sync_info)?;
    let token = match &info {
        WeightSyncInfo::Agent(agent) => agent.token.clone(),
        // Shared memory needs none: the region's permissions decide.
        _ => windlass_core::address::Token::new("none")?,
    };
    let strategies = Strategies::ours(Arc::new(HttpPlane::loopback(token)), &arguments.region);
    let config = EngineConfig::new("rust_engine", &arguments.image);
    let patience = Stop::after(Duration::from_mins(1));
    let receiver = strategies.named(&arguments.link)?.create_receiver(&info, config, &patience)?;
    let mut feed = Feed::new(receiver, Engine::default());
    loop {
        let loaded = feed.step(&patience.with_timeout(Duration::from_secs(30)))?;
        let version = loaded.known.identity.version;
        let changed = loaded.changed.map_or("all".to_owned(), |n| n.to_string());
        let checksum = feed
            .loader()
            .weights
            .values()
            .flatten()
            .fold(0u64, |sum, b| sum.rotate_left(5).wrapping_add(u64::from(*b)));
        println!("{version} {} {} {changed} {checksum:016x}", loaded.known.digest, loaded.how.mode);
        std::io::stdout().flush()?;
        if version >= arguments.until {
            return Ok(());
        }
    }
}

fn wait_for_info(path: &std::path::Path) -> Result<WeightSyncInfo, Box<dyn Error>> {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        match std::fs::read(path) {
            Ok(text) => return Ok(WeightSyncInfo::from_json(&text)?),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(e) => return Err(format!("{}: {e}", path.display()).into()),
        }
    }
}
