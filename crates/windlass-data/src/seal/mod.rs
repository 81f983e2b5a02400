//! Sealing: one fused pass over a version and its base that gives sums, digest and delta.
//!
//! | module | what it owns |
//! |---|---|
//! | [`pass`] | the passes over images: diff, encode and sum, block by block |
//! | [`table`] | sum tables on disk |
//! | [`draft`] | files that are whole or absent |
//!
//! Owns: what happens between *committed* and *sealed*. Called by the agent at every commit, and by whoever needs
//! the sums of an image. Must not: know regions, leases or versions beyond their numbers; the caller holds both
//! images still while a pass runs. A write into either of them gives wrong sums and a delta that nobody can apply.
//!
//! # What a pass reads and what it believes
//!
//! The base's sums are given, from when it was sealed itself, and are believed: a block that did not change keeps
//! its sum, and a block that did gets the sum of its changes added. So sealing reads each image once and sums only
//! changes. Without a base, or where no delta is wanted, the new image is summed in full.
//!
//! # Parts
//!
//! A node that holds a part of the image seals the part's blocks. Sums of other blocks are those of nothing, so
//! that the [`StateSum`]s of the parts add up to that of the image. The digests in the header of a part's delta are
//! those of the part's sums; where the part is the whole image, they are the state digests.
//!
//! # Invariants
//!
//! | | must hold | test |
//! |---|---|---|
//! | SEAL-1 | The bytes of a delta do not depend on the number of threads. | `a_sealed_delta_leads_to_the_new_image_whatever_the_number_of_threads` |
//! | SEAL-2 | A delta file is in its place only when it is whole. | `a_draft_is_in_its_place_when_it_is_whole_and_not_before`, `a_sealer_that_is_killed_leaves_nothing_that_counts` |
//! | SEAL-3 | Applying the delta to the base gives the new image, and the table is that of the new image. | as SEAL-1 |
//! | SEAL-4 | State sums of disjoint parts add up to that of the whole. | `sealed_parts_add_up_to_the_whole` |
//! | SEAL-5 | A stop ends a pass with the blocks at hand and leaves no file. | `a_stopped_seal_ends_with_the_block_at_hand_and_leaves_no_file` |
//! | SEAL-6 | A base that is not what its table says is noticed, and no delta is made over it. | `a_base_that_changed_after_it_was_sealed_is_noticed` |

pub mod draft;
pub mod pass;
pub mod table;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use windlass_core::StateDigest;
use windlass_core::delta::{DeltaHeader, Encoder};
use windlass_core::digest::{BlockSum, StateSum, SumTable};
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, ModelId, Version};
use windlass_core::kernel::Kernels;
use windlass_core::manifest::{Manifest, ManifestError};
use windlass_core::ranges::BlockRanges;

use self::draft::Draft;
use self::pass::{Pair, Run, Visit};
use crate::file::io_kind;
use crate::stop::{Stop, Stopped};

/// Why a version cannot be sealed.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    #[error("cannot {action} the delta {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "the {which} image has {have} bytes of data and its layout needs {need}; attach to the region anew"
    )]
    ImageLength { which: &'static str, have: u64, need: u64 },
    #[error("tensor {tensor} has {have} bytes where a block ends at {need}; its image is not of this layout")]
    ShortTensor { tensor: u32, need: u64, have: u64 },
    #[error(
        "the part to seal ends at block {end} and the cut table has {have}; make the part from this manifest"
    )]
    BeyondBlocks { end: u32, have: u32 },
    /// The table of the base has another number of blocks.
    #[error("the base's sum table has {have} blocks and the cut table {need}; sum the base anew")]
    TableLength { have: usize, need: u32 },
    #[error(
        "version {version} cannot be sealed over version {base}: versions only grow within an incarnation"
    )]
    NotNewer { version: Version, base: Version },
    #[error(
        "block {block} of the base does not have the sum it was sealed with: its memory was changed since; the version \
         has to be sealed without a delta"
    )]
    BaseChanged { block: u32 },
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("sealing was given up: {0}")]
    Stopped(#[from] Stopped),
}

impl SealError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            SealError::Io { source, .. } => io_kind(source),
            SealError::ImageLength { .. }
            | SealError::ShortTensor { .. }
            | SealError::BeyondBlocks { .. }
            | SealError::TableLength { .. } => Kind::Invalid,
            SealError::NotNewer { .. } => Kind::Stale,
            SealError::BaseChanged { .. } => Kind::Corrupt,
            SealError::Manifest(e) => e.kind(),
            SealError::Stopped(s) => s.kind(),
        }
    }
}

/// What the versions of a delta are called.
#[derive(Clone, Debug)]
pub struct Names {
    pub model_id: ModelId,
    /// Which life of its publisher.
    pub incarnation: Incarnation,
    pub base: Version,
    pub target: Version,
}

impl Names {
    /// The header of a delta between two states of these names.
    pub fn header(&self, manifest: &Manifest, base: StateDigest, target: StateDigest) -> DeltaHeader {
        DeltaHeader {
            model_id: self.model_id.clone(),
            base: (self.incarnation, self.base),
            target: (self.incarnation, self.target),
            layout_hash: manifest.layout_hash(),
            cuts_hash: manifest.cuts_hash(),
            base_digest: base,
            target_digest: target,
            blocks: manifest.cuts().blocks(),
        }
    }
}

/// The sealed version that a new one is compared with.
#[derive(Clone, Copy, Debug)]
pub struct Base<'a> {
    pub data: &'a [u8],
    /// Its sums, at least those of the part.
    pub sums: &'a SumTable,
    pub version: Version,
}

/// What to seal.
#[derive(Clone, Copy)]
pub struct SealJob<'a> {
    pub kernels: &'a dyn Kernels,
    /// The layout and cuts of both images.
    pub manifest: &'a Manifest,
    /// The part to seal; for one node, all blocks.
    pub blocks: &'a BlockRanges,
    pub model_id: &'a ModelId,
    /// Which life of its publisher.
    pub incarnation: Incarnation,
    /// The number of the new version.
    pub version: Version,
    pub new: &'a [u8],
    /// What to compare it with.
    pub base: Option<Base<'a>>,
    /// Where the plain delta goes, which composes (see [`crate::history`]).
    pub out: Option<&'a Path>,
    /// Where a delta with context records goes, for receivers that asked for it; such deltas do not compose.
    pub context_out: Option<&'a Path>,
    pub threads: usize,
    /// When to give up.
    pub stop: &'a Stop,
    /// Told how many bytes of image more are done.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

/// A delta on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaFile {
    pub path: PathBuf,
    /// From where to where it leads.
    pub header: DeltaHeader,
    /// How long it is.
    pub bytes: u64,
    pub changes: u64,
    /// How many of its records need the old image to decode, and so do not compose.
    pub context_records: u64,
}

/// A sealed version.
#[derive(Clone, Debug)]
pub struct Sealed {
    /// The sums of the part's blocks; others have the sum of nothing.
    pub sums: SumTable,
    /// The raw sum of the part.
    pub state: StateSum,
    /// The digest of that sum: the state digest, if the part is the whole image.
    pub digest: StateDigest,
    /// The plain delta, if there is a base and a place for it.
    pub delta: Option<DeltaFile>,
    /// The delta with context records, likewise.
    pub context: Option<DeltaFile>,
}

/// Sums these blocks of an image.
pub fn sums(
    kernels: &dyn Kernels,
    manifest: &Manifest,
    blocks: &BlockRanges,
    data: &[u8],
    threads: usize,
    stop: &Stop,
) -> Result<SumTable, SealError> {
    let run = Run { kernels, threads, stop, progress: &|_| () };
    let image = Image::of("new", manifest, data)?;
    pass::sum(run, manifest, blocks, |t| image.tensor(t))
}

/// Sums all blocks of an image.
pub fn sums_of_all(
    kernels: &dyn Kernels,
    manifest: &Manifest,
    data: &[u8],
    (threads, stop): (usize, &Stop),
) -> Result<SumTable, SealError> {
    sums(kernels, manifest, &(0..manifest.cuts().blocks()).into(), data, threads, stop)
}

/// The raw sum of these blocks, from a table that has theirs and perhaps others.
pub fn part_state(manifest: &Manifest, sums: &SumTable, blocks: &BlockRanges) -> Result<StateSum, SealError> {
    let mut state = StateSum::default();
    for number in blocks.iter() {
        let tensor = manifest.cuts().block(number)?.tensor;
        state.add(tensor, sums.get(number));
    }
    Ok(state)
}

/// Seals a version: its sums, its digest, and what changed since its base.
pub fn seal(job: SealJob<'_>) -> Result<Sealed, SealError> {
    let (manifest, layout) = (job.manifest, job.manifest.layout_hash());
    let new = Image::of("new", manifest, job.new)?;
    let run = Run { kernels: job.kernels, threads: job.threads, stop: job.stop, progress: job.progress };
    let Some(base) = job.base.filter(|_| job.out.is_some() || job.context_out.is_some()) else {
        let sums = pass::sum::<SealError>(run, manifest, job.blocks, |t| new.tensor(t))?;
        let state = sums.state();
        return Ok(Sealed { sums, state, digest: state.digest(layout), delta: None, context: None });
    };
    let old = Image::of("base", manifest, base.data)?;
    check_base(&job, &base)?;
    let names = Names {
        model_id: job.model_id.clone(),
        incarnation: job.incarnation,
        base: base.version,
        target: job.version,
    };
    let plain = job.out.map(|path| Lane { path, encoder: Encoder::plain as fn() -> Encoder });
    let context = job.context_out.map(|path| Lane { path, encoder: Encoder::with_context });
    let lanes: Vec<Lane<'_>> = plain.into_iter().chain(context).collect();
    // The digests are known at the end; the header has the same length whatever they are.
    let unknown = StateDigest([0; 16]);
    let header = names.header(manifest, unknown, unknown).to_bytes();
    let drafts: Vec<Draft> = lanes.iter().map(|lane| lane.begin(&header)).collect::<Result<_, _>>()?;

    let sums = Mutex::new(restrict(manifest, base.sums, job.blocks)?);
    let (old, new) = (|t| old.tensor(t), |t| new.tensor(t));
    let pair = Pair { manifest, old: &old, new: &new, old_sums: Some(base.sums) };
    let encoders: Vec<fn() -> Encoder> = lanes.iter().map(|l| l.encoder).collect();
    // Once for each block that changed: the lock is held for nanoseconds in each dozen microseconds.
    let note = |(): &mut (), v: &Visit<'_>| {
        if v.new_sum != v.old_sum {
            let mut sums = sums.lock();
            sums.set(v.tile.number, v.tile.block.tensor, v.new_sum);
        }
    };
    let write = |i: usize, bytes: &[u8]| lanes[i].write(&drafts[i], bytes);
    let totals = pass::run(run, pair, job.blocks, &encoders, note, write)?;

    let header = names.header(manifest, totals.base.digest(layout), totals.target.digest(layout));
    let mut files = Vec::with_capacity(lanes.len());
    for ((lane, draft), total) in lanes.iter().zip(drafts).zip(&totals.lanes) {
        files.push(lane.finish(draft, &header, total)?);
    }
    let mut files = files.into_iter();
    Ok(Sealed {
        sums: sums.into_inner(),
        state: totals.target,
        digest: header.target_digest,
        delta: job.out.and_then(|_| files.next()),
        context: job.context_out.and_then(|_| files.next()),
    })
}

fn check_base(job: &SealJob<'_>, base: &Base<'_>) -> Result<(), SealError> {
    let need = job.manifest.cuts().blocks();
    if base.sums.sums().len() != need as usize {
        return Err(SealError::TableLength { have: base.sums.sums().len(), need });
    }
    if base.version >= job.version {
        return Err(SealError::NotNewer { version: job.version, base: base.version });
    }
    Ok(())
}

/// The same table with the sums of these blocks only.
fn restrict(manifest: &Manifest, sums: &SumTable, blocks: &BlockRanges) -> Result<SumTable, SealError> {
    let (end, have) = (blocks.end(), manifest.cuts().blocks());
    if end > have {
        return Err(SealError::BeyondBlocks { end, have });
    }
    if blocks.len() == have {
        return Ok(sums.clone());
    }
    let mut part = vec![BlockSum::default(); have as usize];
    for range in blocks.ranges() {
        let range = range.start as usize..range.end as usize;
        part[range.clone()].copy_from_slice(&sums.sums()[range]);
    }
    Ok(SumTable::new(manifest, part))
}

/// The data area of an image, as long as its layout.
#[derive(Clone, Copy)]
struct Image<'a> {
    manifest: &'a Manifest,
    data: &'a [u8],
}

impl<'a> Image<'a> {
    fn of(which: &'static str, manifest: &'a Manifest, data: &'a [u8]) -> Result<Image<'a>, SealError> {
        let (have, need) = (data.len() as u64, manifest.data_bytes());
        if have < need {
            Err(SealError::ImageLength { which, have, need })
        } else {
            Ok(Image { manifest, data })
        }
    }

    fn tensor(&self, t: usize) -> &'a [u8] {
        let range = self.manifest.tensors()[t].range();
        &self.data[range.start as usize..range.end as usize]
    }
}

/// One delta of a pass.
struct Lane<'a> {
    path: &'a Path,
    encoder: fn() -> Encoder,
}

impl Lane<'_> {
    fn io(&self, action: &'static str) -> impl FnOnce(io::Error) -> SealError {
        let path = self.path.to_owned();
        move |source| SealError::Io { action, path, source }
    }

    fn begin(&self, header: &[u8]) -> Result<Draft, SealError> {
        let draft = Draft::create(self.path).map_err(self.io("create"))?;
        self.write(&draft, header)?;
        Ok(draft)
    }

    fn write(&self, draft: &Draft, bytes: &[u8]) -> Result<(), SealError> {
        draft.file().write_all(bytes).map_err(self.io("write"))
    }

    fn finish(
        &self,
        draft: Draft,
        header: &DeltaHeader,
        totals: &pass::LaneTotals,
    ) -> Result<DeltaFile, SealError> {
        let front = header.to_bytes();
        draft.file().write_all_at(&front, 0).map_err(self.io("write"))?;
        draft.place().map_err(self.io("place"))?;
        Ok(DeltaFile {
            path: self.path.to_owned(),
            header: header.clone(),
            bytes: front.len() as u64 + totals.bytes,
            changes: totals.changes,
            context_records: totals.by_mode[pass::mode_slot(windlass_core::delta::Mode::Context)],
        })
    }
}
