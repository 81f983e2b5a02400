//! What a server does for receivers that keep only some blocks (see [`windlass_core::slice`]).
//!
//! Owns: the digests of slices, and what slices need of deltas. A receiver names the blocks that it keeps with every
//! request; nothing has to be announced, and a restarted server knows as much as before as long as a version is in a
//! slot. Called by [`super::tickets`] and for holders of parts. Must not: decide what serves a request.

use std::collections::BTreeMap;
use std::sync::Arc;

use windlass_core::identity::{StateDigest, Version};
use windlass_core::ranges::BlockRanges;

use super::swarm::slice_key;
use super::{Inner, ServeError};
use crate::history::Segment;
use crate::stop::Stop;

/// Slices whose digests are kept, versions of each, and deltas of slices.
const KEPT_SLICES: usize = 256;
const KEPT_VERSIONS: usize = 64;
const KEPT_DELTAS: usize = 64;

impl Inner {
    /// The digest of these blocks of a version: from the table of a version in a slot, or as it was when it was.
    pub(super) fn slice_digest(
        &self,
        keeps: &BlockRanges,
        version: Version,
        stop: &Stop,
    ) -> Option<StateDigest> {
        let key = slice_key(keeps);
        if let Some(known) = self.state().slices.get(&key).and_then(|s| s.get(&version)) {
            return Some(*known);
        }
        let manifest = self.region.manifest();
        let table = self.sums(Some(version), stop).ok()?;
        let digest = table.state_of(manifest, keeps).digest(manifest.layout_hash());
        let mut state = self.state();
        trim(&mut state.slices, KEPT_SLICES - 1, &key);
        let versions = state.slices.entry(key).or_default();
        versions.insert(version, digest);
        while versions.len() > KEPT_VERSIONS {
            versions.pop_first();
        }
        Some(digest)
    }

    /// What a delta has of these blocks. The digests in its header are of the same blocks where they are known here, and
    /// those of the whole delta otherwise.
    pub(super) fn sliced(
        &self,
        segment: &Arc<Segment>,
        keeps: &BlockRanges,
        stop: &Stop,
    ) -> Result<Arc<Segment>, ServeError> {
        let (base, target) = (segment.header.base.1, segment.header.target.1);
        let digest = |version, or| self.slice_digest(keeps, version, stop).unwrap_or(or);
        let digests =
            (digest(base, segment.header.base_digest), digest(target, segment.header.target_digest));
        let mut made = self.sliced.lock();
        let key = (target, base, slice_key(keeps));
        if let Some(found) = made.get(&key) {
            return Ok(Arc::clone(found));
        }
        let sliced = self.history.only(segment, keeps, digests, stop)?;
        while made.len() >= KEPT_DELTAS {
            made.pop_first();
        }
        made.insert(key, Arc::clone(&sliced));
        Ok(sliced)
    }
}

/// Leaves at most so many, and the one that is named.
fn trim<V>(map: &mut BTreeMap<u128, V>, most: usize, stays: &u128) {
    while map.len() > most {
        let Some(other) = map.keys().find(|key| *key != stays).copied() else { return };
        map.remove(&other);
    }
}
