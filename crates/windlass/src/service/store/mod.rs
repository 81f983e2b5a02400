//! Versions in a store: S3, GCS, Azure or a directory.
//!
//! | module | owns |
//! |---|---|
//! | [`bucket`] | objects below a URL, through the `object_store` crate; no message repeats a secret |
//! | [`model`] | one model: its head, its versions and its documents |
//! | [`kept`] | the versions that are there, and what each needs |
//! | [`publish`] | the task of an agent that uploads what it seals |
//! | [`follow`] | the receiver's end; its module `slice` has the proof of a part of a model |
//! | [`fallback`] | an agent, and its store while that is away |
//! | [`transport`] | the requests, sent by the client of all services |
//!
//! The format, and every decision about what is fetched, written and removed, is [`windlass_core::store`].

pub(crate) mod bucket;
pub mod fallback;
pub(crate) mod follow;
pub(crate) mod kept;
pub(crate) mod model;
pub(crate) mod publish;
mod transport;

use std::path::Path;
use std::sync::Arc;

use windlass_core::address::StoreUrl;
use windlass_core::identity::Version;
use windlass_data::receiver::{Control, ControlError};
use windlass_data::stop::Stop;
use windlass_data::tls::Trust;

use self::bucket::Bucket;
use self::follow::StoreControl;
use self::model::{Pick, StoredModel};

/// The only model of a store, for a receiver: its newest version, or the one that is given. What has been fetched of a version
/// that is not whole is kept below `dir`, where the image is.
pub fn follow(
    url: &StoreUrl,
    version: Option<Version>,
    trust: Option<&Trust>,
    dir: &Path,
    stop: &Stop,
) -> Result<Arc<dyn Control>, ControlError> {
    let bucket = Bucket::open(url, trust, false).map(Arc::new);
    let model = bucket.and_then(|bucket| StoredModel::only(&bucket, stop));
    let model = model.map_err(|e| e.control("find a model"))?;
    Ok(Arc::new(StoreControl::new(model, Pick { incarnation: None, version }, dir)))
}
