//! `windlass store`: what a store holds, by hand; and `windlass gc URL`.
//!
//! | module | owns |
//! |---|---|
//! | [`list`] | `ls` and `show`: models, versions and the objects of one |
//! | [`verify`] | `verify`: reads and hashes everything again |
//! | [`get`] | `get`: one version as a checkpoint |
//! | [`prune`] | `prune`: removes old versions |
//! | [`orphans`] | `gc URL`: removes what killed publishers left |
//!
//! All of them work while a publisher and followers run.

pub(crate) mod get;
pub(crate) mod list;
pub(crate) mod orphans;
pub(crate) mod prune;
pub(crate) mod verify;

use std::sync::Arc;

use serde_json::{Value, json};
use windlass_core::address::StoreUrl;
use windlass_core::store::{Chain, VersionIndex, Way};
use windlass_data::stop::Stop;
use windlass_data::tls::Trust;

use crate::error::Error;
use crate::service::store::bucket::{Bucket, StoreFailure};
use crate::service::store::model::{Pick, StoredModel};

/// A store that is named on the command line.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) url: StoreUrl,
    /// Authorities to trust; by default the system's.
    pub(crate) trust: Option<Trust>,
}

impl Place {
    fn open(&self) -> Result<Arc<Bucket>, Error> {
        Bucket::open(&self.url, self.trust.as_ref(), false).map(Arc::new).map_err(told)
    }

    /// The models below the URL, at least one.
    fn models(&self, stop: &Stop) -> Result<Vec<StoredModel>, Error> {
        let bucket = self.open()?;
        let models = StoredModel::find(&bucket, stop).map_err(told)?;
        if models.is_empty() {
            // It says that there is none.
            return StoredModel::only(&bucket, stop).map(|model| vec![model]).map_err(told);
        }
        Ok(models)
    }

    /// The only model below the URL.
    fn model(&self, stop: &Stop) -> Result<StoredModel, Error> {
        StoredModel::only(&self.open()?, stop).map_err(told)
    }
}

/// The index of the version that is meant.
fn find(model: &StoredModel, pick: &Pick, stop: &Stop) -> Result<VersionIndex, Error> {
    let head = model.head(stop).map_err(told)?;
    model.pick(&head, pick, stop).map_err(told)
}

fn told(failure: StoreFailure) -> Error {
    Error::of_module(failure.kind, "", failure)
}

/// How many bytes a receiver that has nothing fetches for a version.
fn fetched(index: &VersionIndex) -> u64 {
    match Chain::new(index).way(None, index.identity.version) {
        Some(Way::Anchor { bytes } | Way::Deltas { bytes, .. }) => bytes,
        Some(Way::There | Way::Earlier(_)) | None => index.anchor.image_bytes,
    }
}

/// A version for programs.
fn as_json(index: &VersionIndex) -> Value {
    json!({
        "identity": index.identity,
        "digest": index.digest,
        "layout_hash": index.layout_hash,
        "unix_ms": index.unix_ms,
        "anchor": { "start": index.anchor.start, "version": index.anchor.version, "bytes": index.anchor.image_bytes },
        "deltas": index.deltas.len(),
        "delta_bytes": index.deltas.last().map(|d| d.bytes),
        "fetch_bytes": fetched(index),
    })
}
