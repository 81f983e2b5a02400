//! The versions that a store has, and what each needs.
//!
//! Owns: [`kept`] and [`add_kept`]. Called by the publisher before it removes anything, and by `windlass store prune` and
//! `windlass gc`. Must not: leave out what a version that cannot be read could need.

use std::collections::{BTreeMap, BTreeSet};

use windlass_core::error::Kind;
use windlass_core::store::{AnchorIndex, Kept, Object};
use windlass_data::stop::Stop;

use super::bucket::StoreFailure;
use super::model::StoredModel;

/// All versions of a model, oldest first, with what each needs; and those whose index or anchor cannot be read, if such a failure
/// may be passed over. One that cannot be read counts as one that needs all that it could need.
pub(crate) fn kept(
    model: &StoredModel,
    passes_over: &dyn Fn(Kind) -> bool,
    stop: &Stop,
) -> Result<(Vec<Kept>, BTreeSet<Object>), StoreFailure> {
    let (mut all, mut unread) = (Vec::new(), BTreeSet::new());
    add_kept(model, &mut all, &mut unread, passes_over, stop)?;
    Ok((all, unread))
}

/// Adds the versions that are there and not among `all`, and reads again those that could not be read.
pub(super) fn add_kept(
    model: &StoredModel,
    all: &mut Vec<Kept>,
    unread: &mut BTreeSet<Object>,
    passes_over: &dyn Fn(Kind) -> bool,
    stop: &Stop,
) -> Result<(), StoreFailure> {
    let (objects, _) = model.list(stop)?;
    let known: BTreeSet<Object> = all.iter().map(|k| k.object).filter(|o| !unread.contains(o)).collect();
    let mut anchors: BTreeMap<Object, AnchorIndex> = BTreeMap::new();
    let mut found = Vec::new();
    for (object, listed) in objects.iter().filter(|(o, _)| !known.contains(o)) {
        let Some((incarnation, version)) = object.as_version() else { continue };
        let read = model.version(incarnation, version, stop).and_then(|index| {
            let known = anchors.get(&index.anchor_object()).cloned();
            let anchor = known.map_or_else(|| model.anchor(&index, stop), Ok)?;
            Ok((index, anchor))
        });
        let (unix_ms, needs) = match read {
            Ok((index, anchor)) => {
                unread.remove(object);
                let anchor = anchors.entry(index.anchor_object()).or_insert(anchor);
                (index.unix_ms, index.needs(anchor))
            }
            Err(e) if passes_over(e.kind) => {
                tracing::warn!(error = %e, "a version cannot be read: all that it may need is kept with it");
                unread.insert(*object);
                let may_need = objects.iter().filter(|(o, _)| o.may_be_needed_by(incarnation, version));
                (listed.unix_ms, may_need.map(|(o, l)| (*o, l.bytes)).collect())
            }
            Err(e) => return Err(e),
        };
        found.push(Kept { object: *object, unix_ms, needs });
    }
    all.retain(|k| !found.iter().any(|f| f.object == k.object));
    all.extend(found);
    all.sort_by_key(|k| k.object);
    Ok(())
}
