//! What a publisher may remove.
//!
//! Owns: [`retire`], which versions go, and [`garbage`], which objects go with them. Must not: know a clock; the present is an
//! argument.

use std::collections::{BTreeMap, BTreeSet};

use super::Object;

/// A version, and what it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its index.
    pub object: Object,
    /// When it was written, in milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// Everything that it needs, with its length; the index itself is among it.
    pub needs: BTreeMap<Object, u64>,
}

/// How many versions are kept. A limit that is not given does not limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// The most versions.
    pub count: Option<u64>,
    /// The greatest age, in milliseconds.
    pub age_ms: Option<u64>,
    /// The most bytes of all versions together.
    pub bytes: Option<u64>,
}

/// How many of `versions`, oldest first, go. Whatever the limits are, the one that the head names stays, and all after it:
/// their publisher is about to move the head there. Without the head, only the last one is sure to stay.
pub fn retire(versions: &[Kept], head: Option<Object>, now_ms: u64, limits: &Retention) -> usize {
    let last = versions.len().saturating_sub(1);
    let most = versions.iter().position(|v| Some(v.object) == head).map_or(last, |at| at.min(last));
    let count = limits.count.map_or(0, |n| (versions.len() as u64).saturating_sub(n.max(1)) as usize);
    let old = |v: &&Kept| limits.age_ms.is_some_and(|age| now_ms.saturating_sub(v.unix_ms) > age);
    let aged = versions.iter().take_while(old).count();
    let mut gone = count.max(aged).min(most);
    let Some(limit) = limits.bytes else { return gone };
    // How many of the versions that stay need each object.
    let mut users: BTreeMap<Object, (u64, u64)> = BTreeMap::new();
    for (object, bytes) in versions[gone..].iter().flat_map(|v| &v.needs) {
        users.entry(*object).or_insert((0, *bytes)).0 += 1;
    }
    let mut total: u64 = users.values().map(|(_, bytes)| bytes).fold(0, |a, b| a.saturating_add(*b));
    while total > limit && gone < most {
        for object in versions[gone].needs.keys() {
            if let Some((count, bytes)) = users.get_mut(object) {
                *count -= 1;
                if *count == 0 {
                    total -= *bytes;
                }
            }
        }
        gone += 1;
    }
    gone
}

/// The objects that only the versions in `gone` need. Indexes come first: a version must not be visible when it is no longer
/// whole.
pub fn garbage(gone: &[Kept], stay: &[Kept]) -> Vec<Object> {
    let needed: BTreeSet<&Object> = stay.iter().flat_map(|v| v.needs.keys()).collect();
    let unneeded = |o: &&Object| !needed.contains(o);
    let indexes: BTreeSet<Object> = gone.iter().map(|v| &v.object).filter(unneeded).copied().collect();
    let others: BTreeSet<Object> = gone
        .iter()
        .flat_map(|v| v.needs.keys())
        .filter(unneeded)
        .copied()
        .filter(|o| !indexes.contains(o))
        .collect();
    indexes.into_iter().chain(others).collect()
}
