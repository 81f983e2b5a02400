//! `windlass store prune`: removes old versions, and what only they need.
//!
//! Owns: the order of the command. Which versions go and which objects with them is decided by
//! [`windlass_core::store::retire`] and [`windlass_core::store::garbage`], as for an agent with limits. A publisher that runs
//! writes no index that leads on from a version before the newest, so the two do not get in each other's way.

use std::fmt::Write as _;

use serde_json::json;
use windlass_core::store::{Object, Retention, garbage, retire};

use super::{Place, told};
use crate::console::{Session, bytes, count};
use crate::error::Error;
use crate::service::store::kept::kept;
use crate::service::store::publish::now_ms;

/// The checked arguments of `store prune`.
#[derive(Debug)]
pub(crate) struct Prune {
    pub(crate) place: Place,
    /// How much of each model stays.
    pub(crate) keep: Retention,
    /// Say what would go, and leave it.
    pub(crate) dry_run: bool,
    pub(crate) yes: bool,
}

impl Prune {
    /// Removes versions, or lists them.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        if self.keep == Retention::default() {
            return Err(Error::Usage("say what stays: give --keep, --keep-hours or --keep-bytes".into()));
        }
        if !self.yes && !self.dry_run {
            let how = "give --yes to remove what --dry-run lists";
            return Err(Error::Usage(format!("nothing was removed from {}: {how}", self.place.url)));
        }
        let stop = session.cancel();
        let (mut gone, mut removed, mut freed, mut left) = (Vec::new(), 0, 0, 0);
        for model in self.place.models(stop)? {
            let (objects, _) = model.list(stop).map_err(told)?;
            // An index that cannot be read may need any object.
            let (versions, _) = kept(&model, &|_| false, stop).map_err(told)?;
            let newest = model.head(stop).map_err(told)?.identity;
            let (incarnation, version) = (newest.incarnation, newest.version);
            let head = Object::Version { incarnation, version };
            let (out, stay) = versions.split_at(retire(&versions, Some(head), now_ms(), &self.keep));
            let garbage: Vec<Object> = garbage(out, stay);
            freed += garbage.iter().filter_map(|o| objects.get(o)).map(|l| l.bytes).sum::<u64>();
            let names: Vec<String> = garbage.iter().map(|o| model.name(o)).collect();
            if !self.dry_run {
                model.bucket().remove(names.iter().map(String::as_str), stop).map_err(told)?;
            }
            removed += names.len();
            left += stay.len();
            gone.extend(out.iter().map(|v| model.name(&v.object)));
        }
        let object = json!({
            "url": self.place.url.as_str(),
            "dry_run": self.dry_run,
            "versions": gone,
            "objects": removed,
            "freed_bytes": freed,
            "left": left,
        });
        session.finish(object, |out| {
            let (each, be) = if self.dry_run { ("would remove", "would be ") } else { ("removed", "") };
            for name in &gone {
                let _ = writeln!(out, "{each} {name}");
            }
            let (objects, freed) = (count(removed as u64), bytes(freed));
            let _ = writeln!(
                out,
                "{} versions {be}removed with {objects} objects, {freed} {be}freed, {left} versions stay",
                gone.len()
            );
        })
    }
}
