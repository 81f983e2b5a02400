//! `windlass gc URL`: removes what killed publishers left in a store.
//!
//! Owns: which objects are orphans: those that no version needs and that were written long ago, because a publisher that runs has
//! written objects that no index names yet. If an index cannot be read, nothing is removed. Must not: remove a version, or an
//! object that has no name of ours.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::json;
use windlass_core::store::Object;

use super::{Place, told};
use crate::console::{Session, bytes};
use crate::error::Error;
use crate::service::store::bucket::Listed;
use crate::service::store::kept::kept;
use crate::service::store::model::StoredModel;
use crate::service::store::publish::now_ms;

/// The checked arguments of `gc` with a URL.
#[derive(Debug)]
pub(crate) struct Orphans {
    pub(crate) place: Place,
    /// Say what would go, and leave it.
    pub(crate) dry_run: bool,
    pub(crate) yes: bool,
    /// How long ago an orphan was written at the least.
    pub(crate) age: Duration,
}

impl Orphans {
    /// Removes orphans, or lists them.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        if !self.yes && !self.dry_run {
            let how = "give --yes to remove what --dry-run lists";
            return Err(Error::Usage(format!("nothing was removed from {}: {how}", self.place.url)));
        }
        let stop = session.cancel();
        let bucket = self.place.open()?;
        let (mut removed, mut freed, mut strange) = (Vec::new(), 0, 0);
        for model in StoredModel::find(&bucket, stop).map_err(told)? {
            // Listed before the indexes are read: what is written in between is not in the list.
            let (objects, others) = model.list(stop).map_err(told)?;
            strange += others.len();
            let (versions, _) = kept(&model, &|_| false, stop).map_err(told)?;
            let needed: BTreeSet<&Object> = versions.iter().flat_map(|v| v.needs.keys()).collect();
            let old = |l: &Listed| now_ms().saturating_sub(l.unix_ms) >= self.age.as_millis() as u64;
            let orphan = |(object, listed): &(&Object, &Listed)| match object {
                Object::Head | Object::NumberedHead(_) | Object::Probe | Object::Version { .. } => false,
                Object::Manifest { .. }
                | Object::Delta { .. }
                | Object::Part { .. }
                | Object::Sums { .. }
                | Object::Anchor { .. } => !needed.contains(object) && old(listed),
            };
            let orphans: Vec<&Listed> = objects.iter().filter(orphan).map(|(_, listed)| listed).collect();
            if !self.dry_run {
                bucket.remove(orphans.iter().map(|l| l.name.as_str()), stop).map_err(told)?;
            }
            freed += orphans.iter().map(|l| l.bytes).sum::<u64>();
            removed.extend(orphans.into_iter().map(|l| (l.name.clone(), l.bytes)));
        }
        let object = json!({
            "url": self.place.url.as_str(),
            "dry_run": self.dry_run,
            "freed_bytes": freed,
            "removed": removed.iter().map(|(name, bytes)| json!({ "object": name, "bytes": bytes })).collect::<Vec<_>>(),
            "unknown": strange,
        });
        session.finish(object, |out| {
            let (each, be) = if self.dry_run { ("would remove", "would be ") } else { ("removed", "") };
            for (name, len) in &removed {
                let _ = writeln!(out, "{each} {name}  {}", bytes(*len));
            }
            let _ = writeln!(
                out,
                "{} orphans {be}removed from {}, {} {be}freed",
                removed.len(),
                self.place.url,
                bytes(freed)
            );
            if strange > 0 {
                let _ = writeln!(out, "{strange} objects that windlass did not name are left alone");
            }
        })
    }
}
