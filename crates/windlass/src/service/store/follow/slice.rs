//! Slices of a model in a store, and the proof that they are right.
//!
//! Owns: the hashes of all blocks of the versions that a receiver of a slice has and goes to, and the digest of its slice, which
//! is computed from them. Called by [`StoreControl`]. Must not: fetch image bytes; a slice's are ranges of the same parts.
//!
//! # The proof
//!
//! A store holds digests of whole versions only. But it has the hash of every block: the anchor's table has those of its version,
//! and a delta those of the blocks that it changes. Both are fetched whole, also for a slice: 16 bytes a block, and the deltas.
//! The hashes of all blocks must give the digest in the index of the version; only then does the digest of the slice, from
//! the same hashes, count. So a slice is proved by the digest of the whole, as it is with an agent.
//!
//! The hashes of the version in the image are kept in a file next to it, so that a receiver that is started again needs no more
//! than the deltas to the newest version. Without the file they come from the anchor and the deltas after it.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;

use windlass_core::delta::Delta;
use windlass_core::digest::{BlockSum, SumTable};
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::BlockVersions;
use windlass_data::history::Segment;
use windlass_data::receiver::ControlError;
use windlass_data::seal::draft::Draft;
use windlass_data::shm::{Access, Mapping};
use windlass_data::stop::Stop;

use super::{Anchored, StoreControl, Stored};

const WHAT: &str = "prove a slice";
/// Of how many versions the hashes are kept: the one in the image, and the one that it is brought to.
const TABLES: usize = 2;
/// Of how many versions the digests are kept.
const DIGESTS: usize = 256;

/// What is known of a slice.
#[derive(Debug, Default)]
pub(super) struct Slice {
    /// Whose it is.
    of: Option<(Incarnation, BlockRanges)>,
    tables: BTreeMap<Version, Arc<SumTable>>,
    digests: BTreeMap<Version, StateDigest>,
    /// The version whose hashes are in the file.
    saved: Option<Version>,
    /// Bytes that were fetched for hashes alone.
    fetched: u64,
}

/// Puts the hashes of the blocks that a delta changes into a table, except of blocks that are newer than the version that it leads
/// to.
pub(super) fn overlay(sums: &mut [BlockSum], versions: &BlockVersions, delta: &Delta<'_>, target: Version) {
    for record in delta.records() {
        // A part may be of a later version than the delta leads to.
        let older = versions.version_of(record.block).is_some_and(|v| v < target);
        if let Some(sum) = sums.get_mut(record.block as usize).filter(|_| older) {
            *sum = record.sum;
        }
    }
}

impl StoreControl {
    /// What a receiver has of a slice, by the digest of the whole. None if it is not what the store has.
    pub(super) fn whole_of(
        &self,
        keeps: &BlockRanges,
        have: Option<(Version, StateDigest)>,
        to: Version,
        stop: &Stop,
    ) -> Result<Option<(Version, StateDigest)>, ControlError> {
        let Some((version, digest)) = have else { return Ok(None) };
        // Reads earlier indexes where they may lead on from it.
        let (stored, _) = self.way(have, to, stop)?;
        let Some(whole) = stored.chain.digest_of(version) else { return Ok(have) };
        let same = digest == whole || self.slice_digest(&stored, keeps, version, stop)? == Some(digest);
        Ok(same.then_some((version, whole)))
    }

    /// The digest of a slice of a version. None if the hashes of that version cannot be had.
    pub(super) fn slice_digest(
        &self,
        stored: &Stored,
        keeps: &BlockRanges,
        version: Version,
        stop: &Stop,
    ) -> Result<Option<StateDigest>, ControlError> {
        self.begin(stored, keeps, stop)?;
        if let Some(known) = self.state().slice.digests.get(&version) {
            return Ok(Some(*known));
        }
        let Some(table) = self.table(stored, version, stop)? else { return Ok(None) };
        self.keep(version, table, stop).map(Some)
    }

    /// The digests that are known of this slice.
    pub(super) fn slice_digests(&self, keeps: &BlockRanges) -> BTreeMap<Version, StateDigest> {
        let state = self.state();
        let ours = state.stored.as_ref().map(|s| s.index.identity.incarnation);
        let same = state.slice.of.as_ref().is_some_and(|(i, k)| Some(*i) == ours && k == keeps);
        if same { state.slice.digests.clone() } else { BTreeMap::new() }
    }

    /// Bytes that were fetched for hashes alone since this was asked last.
    pub(super) fn fetched_for_hashes(&self) -> u64 {
        std::mem::take(&mut self.state().slice.fetched)
    }

    /// What a delta has of these blocks, between these digests of them.
    pub(super) fn only(
        &self,
        stored: &Stored,
        segment: &Segment,
        keeps: &BlockRanges,
        digests: (StateDigest, StateDigest),
        stop: &Stop,
    ) -> Result<Arc<Segment>, ControlError> {
        let made = self.history(stored, stop)?.only(segment, keeps, digests, stop);
        made.map_err(|e| self.odd("get a delta", e.kind(), crate::error::chain(&e)))
    }

    /// Notes the hashes of a version that were read for another reason, if they give its digest.
    pub(super) fn note(
        &self,
        stored: &Stored,
        keeps: &BlockRanges,
        (version, sums): (Version, &[BlockSum]),
        stop: &Stop,
    ) -> Result<(), ControlError> {
        self.begin(stored, keeps, stop)?;
        let manifest = self.layout(stop)?;
        let table = SumTable::new(&manifest, sums.to_vec());
        if stored.chain.digest_of(version) == Some(table.digest(&manifest)) {
            self.keep(version, Arc::new(table), stop)?;
        }
        Ok(())
    }

    /// Writes the hashes of the version that the receiver has next to its image.
    pub(super) fn save(&self, (incarnation, version): (Incarnation, Version)) {
        let table = {
            let state = self.state();
            let ours = state.slice.of.as_ref().is_some_and(|(of, _)| *of == incarnation);
            let new = ours && state.slice.saved != Some(version);
            state.slice.tables.get(&version).filter(|_| new).cloned()
        };
        let Some(table) = table else { return };
        let write = || {
            let draft = Draft::create(&self.sums)?;
            let mut bytes = Vec::with_capacity(16 * (table.sums().len() + 1));
            bytes.extend_from_slice(&incarnation.0.to_le_bytes());
            bytes.extend_from_slice(&version.to_le_bytes());
            table.sums().iter().for_each(|sum| bytes.extend_from_slice(&sum.to_bytes()));
            draft.file().write_all(&bytes)?;
            draft.place()
        };
        match write() {
            Ok(()) => self.state().slice.saved = Some(version),
            Err(error) => {
                let path = self.sums.display();
                tracing::warn!(%error, %path, "the hashes of the slice's version are not kept: a restart reads them from the anchor on");
            }
        }
    }

    /// Begins anew for another slice or incarnation, with what an earlier receiver has left.
    fn begin(&self, stored: &Stored, keeps: &BlockRanges, stop: &Stop) -> Result<(), ControlError> {
        let ours = stored.index.identity.incarnation;
        if self.state().slice.of.as_ref().is_some_and(|(of, k)| *of == ours && k == keeps) {
            return Ok(());
        }
        let manifest = self.layout(stop)?;
        let left = std::fs::read(&self.sums).ok().and_then(|bytes| parse(&bytes, ours, &manifest));
        let saved = left.as_ref().map(|(version, _)| *version);
        let tables = left.into_iter().collect();
        let of = Some((ours, keeps.clone()));
        self.state().slice = Slice { of, tables, saved, ..Slice::default() };
        Ok(())
    }

    /// Keeps the hashes of a version, which were proved. The digest of the slice.
    fn keep(&self, version: Version, table: Arc<SumTable>, stop: &Stop) -> Result<StateDigest, ControlError> {
        let manifest = self.layout(stop)?;
        let mut state = self.state();
        let slice = &mut state.slice;
        let all = BlockRanges::from(0..manifest.cuts().blocks());
        let keeps = slice.of.as_ref().map_or(&all, |(_, keeps)| keeps);
        let digest = table.state_of(&manifest, keeps).digest(manifest.layout_hash());
        slice.digests.insert(version, digest);
        slice.tables.insert(version, table);
        while slice.tables.len() > TABLES {
            slice.tables.pop_first();
        }
        while slice.digests.len() > DIGESTS {
            slice.digests.pop_first();
        }
        Ok(digest)
    }

    /// The hashes of a version, proved by its digest: those that are kept, or from the nearest version whose hashes are, or from the
    /// anchor.
    fn table(
        &self,
        stored: &Stored,
        version: Version,
        stop: &Stop,
    ) -> Result<Option<Arc<SumTable>>, ControlError> {
        let manifest = self.layout(stop)?;
        let base = {
            let state = self.state();
            let before = state.slice.tables.range(..=version);
            // What was left by an earlier receiver was not proved yet.
            let mut proved =
                before.rev().filter(|(v, t)| stored.chain.digest_of(**v) == Some(t.digest(&manifest)));
            proved.next().map(|(v, t)| (*v, Arc::clone(t)))
        };
        if let Some(base) = base
            && let Some(table) = self.lead(stored, base, version, stop)?
        {
            return Ok(Some(table));
        }
        let anchored = self.anchored(stop)?;
        let first = anchored.index.version();
        if version < first || stored.chain.digest_of(first).is_none() {
            return Ok(None);
        }
        let table = self.table_of_anchor(stored, &anchored, stop)?;
        self.lead(stored, (first, table), version, stop)
    }

    /// The hashes of the version to which the parts of an anchor are lifted.
    fn table_of_anchor(
        &self,
        stored: &Stored,
        anchored: &Anchored,
        stop: &Stop,
    ) -> Result<Arc<SumTable>, ControlError> {
        let (manifest, first) = (self.layout(stop)?, anchored.index.version());
        let mut sums = anchored.sums.clone();
        // Parts of several versions: a delta over more than one version may leave out what a part has of one in between.
        if let Some(links) = stored.chain.each_between(anchored.index.start, first) {
            let history = self.history(stored, stop)?;
            let fetched = self.fetch(stored, &history, links, stop)?;
            self.state().slice.fetched += fetched;
            for link in links {
                let segment = history.segment(link.base, link.target, stop);
                let segment = segment.map_err(|e| self.odd(WHAT, e.kind(), crate::error::chain(&e)))?;
                self.records(&segment, |delta| {
                    overlay(&mut sums, &anchored.versions, delta, link.target);
                    Ok(())
                })?;
            }
        }
        self.proved(stored, first, SumTable::new(&manifest, sums), &manifest)
    }

    /// The hashes of a version from those of an earlier one. None if no deltas lead there.
    fn lead(
        &self,
        stored: &Stored,
        (from, base): (Version, Arc<SumTable>),
        to: Version,
        stop: &Stop,
    ) -> Result<Option<Arc<SumTable>>, ControlError> {
        if from == to {
            return Ok(Some(base));
        }
        let Some((segment, fetched)) = self.segment(stored, (from, to), stop)? else { return Ok(None) };
        self.state().slice.fetched += fetched;
        let manifest = self.layout(stop)?;
        let mut table = SumTable::clone(&base);
        self.records(&segment, |delta| {
            for record in delta.records() {
                let block = manifest.cuts().block(record.block).map_err(|e| e.to_string())?;
                table.set(record.block, block.tensor, record.sum);
            }
            Ok(())
        })?;
        self.proved(stored, to, table, &manifest).map(Some)
    }

    /// Reads a delta that is on this host.
    fn records(
        &self,
        segment: &Segment,
        read: impl FnOnce(&Delta<'_>) -> Result<(), String>,
    ) -> Result<(), ControlError> {
        let local =
            |e: std::io::Error| self.odd(WHAT, Kind::Exhausted, format!("{}: {e}", segment.path.display()));
        let mapping = Mapping::map(&segment.file, segment.bytes, Access::Read).map_err(local)?;
        let delta = Delta::parse(mapping.bytes(0..segment.bytes)).map_err(|e| e.to_string());
        let wrong = |why: String| self.odd(WHAT, Kind::Corrupt, format!("{}: {why}", segment.path.display()));
        delta.and_then(|delta| read(&delta)).map_err(wrong)
    }

    /// The hashes, if they give the digest that the index has of the version.
    fn proved(
        &self,
        stored: &Stored,
        version: Version,
        table: SumTable,
        manifest: &Manifest,
    ) -> Result<Arc<SumTable>, ControlError> {
        let (found, expected) = (table.digest(manifest), stored.chain.digest_of(version));
        if expected == Some(found) {
            return Ok(Arc::new(table));
        }
        let expected = expected.map_or_else(|| "none".into(), |d| d.to_string());
        let why = format!(
            "the hashes of all blocks of version {version} give digest {found}, its index has {expected}: the store is damaged; \
             `windlass store verify` says where"
        );
        Err(self.odd(WHAT, Kind::Corrupt, why))
    }
}

/// The hashes in a file that [`StoreControl::save`] wrote, if they are of this incarnation and layout.
fn parse(bytes: &[u8], ours: Incarnation, manifest: &Manifest) -> Option<(Version, Arc<SumTable>)> {
    let (head, sums) = bytes.split_first_chunk::<16>()?;
    let (incarnation, version) = head.split_first_chunk::<8>()?;
    let version = u64::from_le_bytes(version.try_into().ok()?);
    let (sums, rest) = sums.as_chunks::<16>();
    let fits = u64::from_le_bytes(*incarnation) == ours.0
        && sums.len() == manifest.cuts().blocks() as usize
        && rest.is_empty();
    let sums = sums.iter().map(|sum| BlockSum::from_bytes(*sum)).collect();
    fits.then(|| (version, Arc::new(SumTable::new(manifest, sums))))
}
