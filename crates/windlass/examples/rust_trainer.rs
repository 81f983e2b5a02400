//! A trainer without Python: it owns tensors, changes them, and publishes a version for each step.
//!
//! ```text
//! cargo run --example rust_trainer -- --region /dev/shm/demo --sync-info /tmp/sync.json --steps 5
//! cargo run --example rust_engine  -- --sync-info /tmp/sync.json --image /dev/shm/demo-image
//! ```
//!
//! The sync info is how engines find this process. It contains the token, so the file is readable by its owner alone.
//! With `--model FILE` the tensors are those of a safetensors file or a directory of them. Each version is a line on
//! standard output: its number and its digest. The trainer ends when standard input does, so that engines that come
//! late still find the last version.

use std::error::Error;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use windlass::service::plane::HttpPlane;
use windlass::service::token;
use windlass_core::dtype::Dtype;
use windlass_core::identity::ModelId;
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_data::file::Checkpoint;
use windlass_data::roles::{PublisherConfig, Strategies, Tensors, WeightTransferSender};
use windlass_data::seal::draft::Draft;
use windlass_data::stop::Stop;

#[derive(Parser)]
struct Arguments {
    /// The directory of shared memory to publish in.
    #[arg(long)]
    region: PathBuf,
    /// Where to write what engines need.
    #[arg(long)]
    sync_info: PathBuf,
    /// `tcp` (engines on any host) or `shm` (engines on this one).
    #[arg(long, default_value = "tcp")]
    link: String,
    /// Take the tensors from here.
    #[arg(long)]
    model: Option<PathBuf>,
    /// How many versions after the first.
    #[arg(long, default_value_t = 5)]
    steps: u64,
    /// What a step takes.
    #[arg(long, default_value_t = 100)]
    step_ms: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let mut weights = match &arguments.model {
        Some(path) => read(path)?,
        None => make_up()?,
    };
    let manifest = Arc::clone(windlass_data::roles::WeightExtractor::manifest(&weights));

    // The same strategies are built by the engine. Which one is a matter of configuration.
    let token = token::read_or_make(&arguments.sync_info.with_extension("token"))?;
    let strategies = Strategies::ours(Arc::new(HttpPlane::loopback(token)), &arguments.region);
    let config = PublisherConfig::new(&arguments.region, ModelId::new("example")?, manifest)?;
    let mut sender = strategies.named(&arguments.link)?.create_sender(config)?;
    hand_out(&arguments.sync_info, &*sender)?;

    // One version before training, then one for each step.
    for version in 0..=arguments.steps {
        if version > 0 {
            train(&mut weights, version);
            std::thread::sleep(Duration::from_millis(arguments.step_ms));
        }
        let stop = Stop::after(Duration::from_mins(1));
        sender.publish(&weights, version, &stop)?;
        // Training could go on here; this program waits only to know the digest.
        let sealed = sender.wait_sealed(version, &stop)?;
        println!("{version} {}", sealed.digest);
        std::io::stdout().flush()?;
    }
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// A few changed values for each step, as in RL.
fn train(weights: &mut Tensors, version: u64) {
    let mut random = version.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for tensor in weights.iter_mut().filter(|t| !t.is_empty()) {
        for _ in 0..=tensor.len() / 500 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = random as usize % tensor.len();
            tensor[at] ^= 1;
        }
    }
}

fn make_up() -> Result<Tensors, Box<dyn Error>> {
    let tensors = [
        TensorSpec::new("model.embed_tokens.weight", Dtype::BF16, [2000, 256]),
        TensorSpec::new("model.layers.0.mlp.up_proj.weight", Dtype::BF16, [704, 256]),
        TensorSpec::new("model.layers.0.mlp.down_proj.weight", Dtype::BF16, [256, 704]),
        TensorSpec::new("model.norm.weight", Dtype::F32, [256]),
    ];
    let tied = [("lm_head.weight".to_owned(), "model.embed_tokens.weight".to_owned())];
    let mut weights = Tensors::zeroed(Arc::new(Manifest::new(tensors, tied.into())?));
    train(&mut weights, 1 << 32);
    Ok(weights)
}

fn read(path: &Path) -> Result<Tensors, Box<dyn Error>> {
    let checkpoint = Checkpoint::open(path)?;
    let mut weights = Tensors::zeroed(Arc::new(checkpoint.manifest().clone()));
    for (i, tensor) in weights.iter_mut().enumerate() {
        tensor.copy_from_slice(checkpoint.tensor(i));
    }
    Ok(weights)
}

/// Whole or not at all, and for the owner's eyes only.
fn hand_out(path: &Path, sender: &dyn WeightTransferSender) -> Result<(), Box<dyn Error>> {
    Ok(Draft::secret(path, sender.sync_info().to_json().as_bytes())?.place()?)
}
