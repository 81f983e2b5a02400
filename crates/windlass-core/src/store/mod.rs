//! The format of a store, and the decisions about it: versions of a model as objects in S3, GCS, Azure or a directory.
//!
//! Owns: the names of objects ([`Object`]), the JSON documents ([`VersionIndex`], [`AnchorIndex`], [`Head`]), which objects a
//! receiver fetches ([`Chain`]), when a publisher writes a full image ([`AnchorPolicy`]), and what it may remove
//! ([`retire`]). Called by the publisher, the follower and the tools of the `windlass` crate, which do all I/O. Must not:
//! know a clock or a store's client; times are arguments.
//!
//! # Objects
//!
//! All names are below a URL, and below the model's id:
//!
//! | name | content | written |
//! |---|---|---|
//! | `INCARNATION/manifest-HASH.json` | the layout, as [`Manifest::to_json`](crate::manifest::Manifest::to_json) | once |
//! | `INCARNATION/deltas/BASE-TARGET-HASH.wdelta` | a delta container ([`crate::delta`]) | once |
//! | `INCARNATION/anchors/START/PART-HASH` | the bytes of consecutive whole blocks, one block after the other | once |
//! | `INCARNATION/anchors/START/sums-HASH` | the hash of every block, 16 bytes each | once |
//! | `INCARNATION/anchors/START/anchor-HASH.json` | an [`AnchorIndex`]: which blocks are in which part, of which version | once |
//! | `INCARNATION/versions/VERSION.json` | a [`VersionIndex`] | once, last, only if absent |
//! | `head.json` | a [`Head`]: the newest version | for each version, by compare-and-swap |
//! | `head/NUMBER.json` | the same, where a store has no compare-and-swap: the highest number counts | once, only if absent |
//! | `probe` | nothing; shows that the store refuses to write an object twice | once, only if absent |
//!
//! An incarnation is 16 hexadecimal digits, a version or a number 20 decimal ones, a part 6. `HASH` is the XXH3-128 of the
//! object's bytes. A name with a hash always has the same content, so writing it again changes nothing and a reader can
//! prove what it got. Heads and version indexes end with a line that has the `HASH` of what is before it.
//!
//! # When a version exists
//!
//! A version exists when its [`VersionIndex`] does. It is written after everything that it refers to, so a publisher that is
//! killed leaves objects without an index, and no version of which a part is missing. The head only saves readers a
//! listing; it is moved after the index is there.
//!
//! # Anchors
//!
//! An anchor is a full image. The trainer goes on while the publisher uploads it, so its parts may be of several versions, from
//! [`AnchorIndex::start`] to the newest, [`AnchorIndex::version`] (a *fuzzy* anchor). An index that uses it lists the
//! deltas from `start` to its own version. A reader lifts each block by the deltas after the version of its part. The hashes
//! of all blocks then give the digest of the version.
//!
//! # Composed deltas
//!
//! Of many versions the same elements change again and again, so one delta over sixteen versions has about a third of the bytes of
//! sixteen. A publisher adds such deltas between versions of the chain, under the same kind of name. An index lists them apart
//! ([`VersionIndex::composed`]), because a reader of an older release, and one that needs every version's hashes, goes by the
//! others.
//!
//! # Two publishers
//!
//! Every publisher moves the head from the state that it saw. If another publisher has moved it, the swap fails, and the
//! publisher reads why: a head of a later incarnation ends it. A head of its own is a repeated request, or the late one of an agent that
//! was killed, because a region has one agent at a time; a head of an earlier one is moved again.
//! A publisher does not begin if the head is of a later incarnation than its own.
//!
//! | | invariant | test |
//! |---|---|---|
//! | STORE-1 | a name says what is in an object, and is read back as it was written | `names_are_read_as_they_were_written` |
//! | STORE-2 | an index from outside has a chain without gaps, or is refused | `a_document_that_contradicts_itself_is_refused` |
//! | STORE-3 | a chain leads from what a receiver has to the version, by no more bytes than an anchor | `the_cheapest_chain_leads_to_the_version` |
//! | STORE-4 | retention keeps the newest version and every object that a kept version needs | `retention_keeps_what_kept_versions_need` |

mod chain;
mod document;
mod name;
mod retention;
#[cfg(test)]
mod tests;

pub use self::chain::{AnchorPolicy, Chain, Way};
pub use self::document::{
    AnchorIndex, AnchorRef, DeltaRef, Head, MAX_DELTAS, MAX_DOCUMENT, MAX_PARTS, PartRef, Stored,
    VersionIndex,
};
pub use self::name::Object;
pub use self::retention::{Kept, Retention, garbage, retire};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::error::{Kind, excerpt};
use crate::hex::hex_bytes;
use crate::identity::{IdentityError, Version};

hex_bytes!(
    ObjectHash,
    16,
    IdentityError,
    |text| IdentityError::Hash(excerpt(text)),
    "The XXH3-128 of an object's bytes."
);

impl ObjectHash {
    /// The hash of these bytes.
    pub fn of(bytes: &[u8]) -> ObjectHash {
        ObjectHash(xxh3_128(bytes).to_be_bytes())
    }

    /// The hash of so many bytes, which `read` gives piece by piece from an offset on.
    pub fn of_file<E>(
        mut read: impl FnMut(&mut [u8], u64) -> Result<(), E>,
        bytes: u64,
    ) -> Result<ObjectHash, E> {
        let (mut hash, mut buffer, mut at) = (Xxh3::new(), vec![0; 1 << 20], 0);
        while at < bytes {
            let piece = &mut buffer[..(bytes - at).min(1 << 20) as usize];
            read(piece, at)?;
            hash.update(piece);
            at += piece.len() as u64;
        }
        Ok(ObjectHash(hash.digest128().to_be_bytes()))
    }
}

/// A malformed or contradictory document of a store.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StoreError {
    #[error("{what} of {len} bytes is longer than {max}: it is not one that Windlass wrote")]
    TooLong { what: &'static str, len: usize, max: usize },
    #[error("the {what} does not end with its hash: it was damaged in the store or on the way")]
    Damaged { what: &'static str },
    #[error("the {what} is not valid JSON of one: {why}")]
    Json { what: &'static str, why: String },
    #[error(
        "the {what} has format {theirs}, this release reads {ours}: read it with the release that wrote it"
    )]
    Format { what: &'static str, theirs: u32, ours: u32 },
    #[error("the {what} contradicts itself: {why}")]
    Contradiction { what: &'static str, why: String },
    #[error("the older index ends at version {end}, but the deltas of the newer one begin at {start}")]
    Gap { end: Version, start: Version },
}

impl StoreError {
    /// The kind of failure (see [`crate::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            StoreError::TooLong { .. }
            | StoreError::Damaged { .. }
            | StoreError::Json { .. }
            | StoreError::Contradiction { .. }
            | StoreError::Gap { .. } => Kind::Corrupt,
            StoreError::Format { .. } => Kind::Unsupported,
        }
    }
}
