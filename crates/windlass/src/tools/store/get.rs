//! `windlass store get`: one version as a checkpoint that other programs load.
//!
//! Owns: the directory that is made. The version comes as it comes to a receiver, by the cheapest chain and with every proof; the
//! image is the checkpoint's file. The directory appears when it is whole.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use windlass_core::identity::Identity;
use windlass_core::wire::control::RequestMode;
use windlass_data::image::{ImageSpec, ImageView};
use windlass_data::receiver::{Receiver, ReceiverConfig, ReceiverError};
use windlass_data::region::Memfd;
use windlass_data::tcp::PullConfig;

use super::{Place, find};
use crate::console::{Session, bytes};
use crate::error::Error;
use crate::service::engines::check::config_files;
use crate::service::store::follow::StoreControl;
use crate::service::store::model::Pick;
use crate::tools::outfile::OutDir;

/// The weights in the directory.
const WEIGHTS: &str = "model.safetensors";
/// How long a transfer may take.
const TRANSFER: Duration = Duration::from_hours(24);

/// The checked arguments of `store get`.
#[derive(Debug)]
pub(crate) struct Get {
    pub(crate) place: Place,
    pub(crate) pick: Pick,
    /// The directory to make.
    pub(crate) output: PathBuf,
    /// Where the configuration and the tokenizer are copied from.
    pub(crate) model_dir: Option<PathBuf>,
    pub(crate) threads: usize,
}

impl Get {
    /// Fetches the version and puts the directory up.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let (stop, began) = (session.cancel(), Instant::now());
        let configs = self.model_dir.as_deref().map(config_files).transpose()?.unwrap_or_default();
        let model = self.place.model(stop)?;
        let index = find(&model, &self.pick, stop)?;
        let out = OutDir::create(&self.output, None, &[])?;
        let scratch = out.path().join(".image");
        let Identity { incarnation, version, .. } = index.identity;
        let exactly = Pick { incarnation: Some(incarnation), version: Some(version) };
        let control = StoreControl::new(model.clone(), exactly, &scratch);
        let config = ReceiverConfig {
            image: ImageSpec {
                dir: scratch.join(model.model_id().as_str()),
                model_id: model.model_id().clone(),
                group: false,
                memfd: Memfd::Never,
                threads: self.threads,
            },
            slice: None,
            name: "windlass store get".into(),
            mode: RequestMode::Auto,
            streams: None,
            transfer_timeout: TRANSFER,
            open_timeout: TRANSFER,
            pull: PullConfig::default(),
            allow: None,
            keep: None,
            share: None,
            nixl: None,
            relaying: None,
        };
        fs::create_dir(&scratch).map_err(Error::io("create", &scratch))?;
        let mut receiver = Receiver::open(config, Arc::new(control), None, stop)?;
        let synced = receiver.sync(stop)?;
        let there = receiver.current().filter(|k| k.identity == index.identity && k.digest == index.digest);
        let (Some(known), Some(image)) = (there.cloned(), receiver.image()) else {
            return Err(Error::Bug(format!("the image does not hold {}", index.identity)));
        };
        let view = ImageView::take(image.region(), TRANSFER, stop).map_err(ReceiverError::from)?;
        let (file, weights) = (view.path(), out.path().join(WEIGHTS));
        fs::hard_link(&file, &weights).map_err(Error::io("link", &weights))?;
        view.finish().map_err(ReceiverError::from)?;
        drop(receiver);
        fs::remove_dir_all(&scratch).map_err(Error::io("remove", &scratch))?;
        durable(&weights)?;
        for (name, from) in configs {
            let to = out.path().join(name);
            fs::copy(&from, &to).map_err(Error::io("copy", &from))?;
            durable(&to)?;
        }
        out.commit()?;
        let object = json!({
            "path": self.output,
            "identity": known.identity,
            "digest": known.digest,
            "wire_bytes": synced.wire_bytes,
            "image_bytes": index.anchor.image_bytes,
            "seconds": began.elapsed().as_secs_f64(),
        });
        session.finish(object, |text| {
            let (fetched, seconds) = (bytes(synced.wire_bytes), began.elapsed().as_secs_f64());
            let _ = writeln!(text, "{}  {}", known.digest, self.output.display());
            let _ = writeln!(text, "  {}: {fetched} fetched in {seconds:.1} s", known.identity);
            if self.model_dir.is_none() {
                let _ =
                    writeln!(text, "  weights only: --model-dir adds the configuration and the tokenizer");
            }
        })
    }
}

/// Makes a file durable, and readable as files of commands are.
fn durable(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).map_err(Error::io("protect", path))?;
    let file = fs::File::open(path).map_err(Error::io("open", path))?;
    file.sync_all().map_err(Error::io("write", path))
}
