//! Which objects lead to a version, and when a new anchor is due.
//!
//! Owns: [`Chain`], the deltas and the anchor that a reader can use, and [`AnchorPolicy`]. Called by the follower with the
//! indexes that it has read, and by the publisher.

use std::collections::BTreeMap;

use super::{DeltaRef, StoreError, VersionIndex};
use crate::identity::{StateDigest, Version};

/// The way from what a receiver has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It has the version.
    There,
    /// So many deltas lead to it.
    Deltas { count: usize, bytes: u64 },
    /// The anchor and the deltas after it, of so many bytes.
    Anchor { bytes: u64 },
    /// What the receiver has is older than the chain, but an earlier index may lead on from it.
    Earlier(Version),
}

/// The deltas that lead to a version, from the anchor's start or from further back.
#[derive(Clone, Debug)]
pub struct Chain {
    start: Version,
    digest: StateDigest,
    deltas: Vec<DeltaRef>,
    composed: Vec<DeltaRef>,
    /// Bytes of the image, and of what leads on from its start.
    anchor: u64,
    earlier: Option<Version>,
}

impl Chain {
    /// What this index says.
    pub fn new(index: &VersionIndex) -> Chain {
        let after = bytes(&cheapest(&index.deltas, &index.composed));
        Chain {
            start: index.anchor.start,
            digest: index.anchor.digest,
            deltas: index.deltas.clone(),
            composed: index.composed.clone(),
            anchor: index.anchor.image_bytes.saturating_add(after),
            earlier: index.earlier,
        }
    }

    /// Goes further back, by the index of [`Way::Earlier`].
    pub fn extend(&mut self, older: &VersionIndex) -> Result<(), StoreError> {
        let gap = StoreError::Gap { end: older.identity.version, start: self.start };
        // Both have the digest of the version where they meet.
        if older.digest_of(self.start) != Some(self.digest) || older.anchor.start >= self.start {
            return Err(gap);
        }
        let before = |d: &&DeltaRef| d.target <= self.start;
        self.deltas.splice(..0, older.deltas.iter().filter(before).copied());
        self.composed.splice(..0, older.composed.iter().filter(before).copied());
        (self.start, self.digest, self.earlier) = (older.anchor.start, older.anchor.digest, older.earlier);
        Ok(())
    }

    /// There is nothing further back.
    pub fn ends_here(&mut self) {
        self.earlier = None;
    }

    /// The cheapest way to `to`, which the chain passes, from a version with this digest. None if the chain does not pass `to`.
    pub fn way(&self, have: Option<(Version, StateDigest)>, to: Version) -> Option<Way> {
        let end = self.place(to)?;
        let anchor = self.anchor;
        let Some((have, digest)) = have else { return Some(Way::Anchor { bytes: anchor }) };
        if have < self.start {
            let worth = bytes(&self.over(0, end)) <= self.anchor;
            return Some(match self.earlier {
                Some(earlier) if worth => Way::Earlier(earlier),
                Some(_) | None => Way::Anchor { bytes: anchor },
            });
        }
        let known = self.place(have).filter(|_| self.digest_of(have) == Some(digest));
        Some(match known {
            Some(at) if at == end => Way::There,
            Some(at) if at < end => {
                let deltas = self.over(at, end);
                let bytes = bytes(&deltas);
                if bytes <= self.anchor {
                    Way::Deltas { count: deltas.len(), bytes }
                } else {
                    Way::Anchor { bytes: anchor }
                }
            }
            Some(_) | None => Way::Anchor { bytes: anchor },
        })
    }

    /// The cheapest deltas from one version of the chain to a later one.
    pub fn between(&self, base: Version, target: Version) -> Option<Vec<DeltaRef>> {
        let (from, to) = (self.place(base)?, self.place(target)?);
        (from < to).then(|| self.over(from, to))
    }

    /// Every version's delta from one version of the chain to a later one.
    pub fn each_between(&self, base: Version, target: Version) -> Option<&[DeltaRef]> {
        let (from, to) = (self.place(base)?, self.place(target)?);
        self.deltas.get(from..to).filter(|d| !d.is_empty())
    }

    fn over(&self, from: usize, to: usize) -> Vec<DeltaRef> {
        cheapest(&self.deltas[from..to], &self.composed)
    }

    /// The digest of a version of the chain.
    pub fn digest_of(&self, version: Version) -> Option<StateDigest> {
        match self.place(version)?.checked_sub(1) {
            None => Some(self.digest),
            Some(i) => self.deltas.get(i).map(|d| d.digest),
        }
    }

    /// All its deltas, oldest first.
    pub fn deltas(&self) -> &[DeltaRef] {
        &self.deltas
    }

    /// How many deltas lead from the start to a version.
    fn place(&self, version: Version) -> Option<usize> {
        if version == self.start {
            return Some(0);
        }
        self.deltas.iter().position(|d| d.target == version).map(|i| i + 1)
    }
}

/// What leads by the fewest bytes where these deltas lead one after another, if some of them may be replaced by composed ones.
fn cheapest(deltas: &[DeltaRef], composed: &[DeltaRef]) -> Vec<DeltaRef> {
    let Some(first) = deltas.first() else { return Vec::new() };
    let targets = deltas.iter().enumerate().map(|(i, d)| (d.target, i + 1));
    let places: BTreeMap<Version, usize> = std::iter::once((first.base, 0)).chain(targets).collect();
    // By place: the bytes of the cheapest way there, and its last step.
    let mut best = vec![(0_u64, 0, *first)];
    let mut steps: Vec<Vec<(usize, DeltaRef)>> =
        deltas.iter().enumerate().map(|(i, d)| vec![(i, *d)]).collect();
    for step in composed {
        if let (Some(&from), Some(&to)) = (places.get(&step.base), places.get(&step.target))
            && from < to
        {
            steps[to - 1].push((from, *step));
        }
    }
    for here in steps {
        let reached =
            here.into_iter().map(|(from, step)| (best[from].0.saturating_add(step.bytes), from, step));
        // There is at least the delta itself.
        best.extend(reached.min_by_key(|(bytes, ..)| *bytes));
    }
    let (mut way, mut at) = (Vec::new(), deltas.len());
    while at > 0 {
        let (_, from, step) = best[at];
        way.push(step);
        at = from;
    }
    way.reverse();
    way
}

fn bytes(deltas: &[DeltaRef]) -> u64 {
    deltas.iter().map(|d| d.bytes).fold(0, u64::saturating_add)
}

/// When a publisher writes a new full image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnchorPolicy {
    /// After so many versions at the latest.
    pub every: u32,
}

impl AnchorPolicy {
    /// Whether an anchor is due after these deltas, some of which may be composed. A chain that costs more than an image is of
    /// no use.
    pub fn is_due(&self, deltas: &[DeltaRef], composed: &[DeltaRef], image_bytes: u64) -> bool {
        deltas.len() >= (self.every as usize).min(super::MAX_DELTAS / 2)
            || bytes(&cheapest(deltas, composed)) > image_bytes
    }
}
