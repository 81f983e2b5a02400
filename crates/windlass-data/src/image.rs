//! The receiver's image: one version of a model on the engine's host, as a safetensors file that engines read in
//! place.
//!
//! Owns: a [region](crate::region) of one slot, the recorded hash of every block, and which version each block is of: opening,
//! verifying and leasing it. [`crate::receiver`] is the only writer, and its `refresh` changes the blocks; engines take map leases on the region and see
//! whole versions only. Must not: talk to a publisher, or decide what to fetch.
//!
//! # States
//!
//! The image is **whole** (one version, its digest was found right, engines may lease it) or **open** (a
//! [`Refresh`] is under way or was broken off; no engine can lease it). Opening waits for the leases of engines to
//! end. While it is open every block is of a known version or of none:
//!
//! - bytes that [landed](Refresh::land) and were summed are of the version in their ticket;
//! - a delta lifts blocks of exactly its base ([`Refresh::apply`]); others are left alone, and a block whose sums
//!   show that it is not what it was thought to be is of no version from then on;
//! - [`Refresh::finish`] needs every block to be of one version and the digest of the sums to be that of the
//!   version. Then `state.json` is put in place, the slot is committed and sealed.
//!
//! # A slice
//!
//! An image may keep only some blocks (see [`windlass_core::slice`]): its region has that part, the rest of the file are
//! holes, and "every block" and "the digest" mean those that it keeps. Offsets are those of the whole image.
//!
//! # Another layout
//!
//! An image of another layout is another region. The old one is [set aside](Image::set_aside): hidden, taken out of its place
//! and removed, while processes that have it mapped keep it. Readers find the new one when they open the directory again, and
//! a reader that waits has nothing open.
//!
//! # After a crash
//!
//! `state.json` names the slot's commit, identity and digest; it counts only if it is about the commit that the
//! region has sealed. On [`Image::open`] all bytes are summed again. If they give the digest, the image is whole. If
//! not, or if it was open, the sums remain: blocks that equal those of the publisher's version are
//! [adopted](Refresh::adopt) and only the rest is fetched.
//!
//! | | invariant | test |
//! |---|---|---|
//! | IMAGE-1 | engines lease only whole versions whose digest was right | `an_image_cannot_be_leased_while_it_is_open` |
//! | IMAGE-2 | a refresh with a block of another version, or a wrong digest, does not finish | `a_refresh_with_a_missing_block_does_not_finish` |
//! | IMAGE-3 | an image broken off keeps the blocks that landed | `a_broken_refresh_keeps_what_landed` |
//! | IMAGE-4 | a reopened image is verified before it counts | `a_reopened_image_is_summed_before_it_counts` |

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use windlass_core::delta::DeltaError;
use windlass_core::digest::{BlockSum, SumTable};
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, ModelId, StateDigest, Version};
use windlass_core::manifest::{Manifest, ManifestError};
use windlass_core::ranges::BlockRanges;

use crate::region::{
    AgentSeat, Attempt, Lease, LeaseKind, Memfd, Region, RegionError, RegionSpec, Slots, Writer,
};
use crate::seal::draft::Draft;
use crate::seal::{self, SealError};
use crate::shm::{Access, LoanError, Mapping};
use crate::stop::{Stop, Stopped};

/// An image that cannot be opened, changed or read.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("the pass over the image was not finished: {0}")]
    Stopped(#[from] Stopped),
    #[error(transparent)]
    Seal(#[from] SealError),
    #[error("the delta cannot be applied to the image of {model}")]
    Delta { model: ModelId, source: DeltaError },
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Loan(#[from] LoanError),
    #[error(
        "{left} blocks of the image of {model}, the first of them {first}, are not at version {version}: \
         fetch them before the version is made visible"
    )]
    Incomplete {
        model: ModelId,
        /// The version that was to be finished.
        version: Version,
        left: u32,
        first: u32,
    },
    #[error(
        "the image is at digest {found}, but {identity} is {expected}: it stays hidden; fetch the version again"
    )]
    Digest { identity: Box<Identity>, found: StateDigest, expected: StateDigest },
    #[error("the image of {model} at {} holds no whole version yet: wait for the receiver to finish one", dir.display())]
    NotWhole { model: ModelId, dir: PathBuf },
    #[error(
        "{} is the region of a publisher of {model}, not the image of a receiver: give the directory that a receiver \
         keeps, which is <its image directory>/<model id>",
        dir.display()
    )]
    NotAnImage { model: ModelId, dir: PathBuf },
    #[error(
        "another receiver (pid {pid}) keeps the image of {model} at {}: one receiver serves all engines of a host; \
         stop it, or keep this image in another directory",
        dir.display()
    )]
    Taken { model: ModelId, dir: PathBuf, pid: u32 },
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl ImageError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            ImageError::Region(e) => e.kind(),
            ImageError::Stopped(e) => e.kind(),
            ImageError::Seal(e) => e.kind(),
            ImageError::Delta { source, .. } => source.kind(),
            ImageError::Manifest(e) => e.kind(),
            ImageError::Loan(_) | ImageError::Incomplete { .. } => Kind::Bug,
            ImageError::Digest { .. } => Kind::Corrupt,
            ImageError::NotWhole { .. } => Kind::NotFound,
            ImageError::NotAnImage { .. } => Kind::Invalid,
            ImageError::Taken { .. } => Kind::Denied,
            ImageError::Io { source, .. } => crate::file::io_kind(source),
        }
    }
}

impl ImageError {
    /// Whether the image on disk is unusable and may be replaced.
    pub fn is_ruined(&self) -> bool {
        let broken = |e: &io::Error| {
            use io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
            matches!(e.kind(), NotFound | UnexpectedEof | InvalidData)
        };
        match self {
            ImageError::Region(RegionError::Io { source, .. }) | ImageError::Io { source, .. } => {
                broken(source)
            }
            ImageError::Region(e) => matches!(
                e,
                RegionError::HolderGone { .. } | RegionError::Damaged { .. } | RegionError::Manifest { .. }
            ),
            ImageError::Stopped(_)
            | ImageError::Seal(_)
            | ImageError::Delta { .. }
            | ImageError::Manifest(_)
            | ImageError::Loan(_)
            | ImageError::Incomplete { .. }
            | ImageError::Digest { .. }
            | ImageError::NotWhole { .. }
            | ImageError::NotAnImage { .. }
            | ImageError::Taken { .. } => false,
        }
    }
}

/// What `state.json` says: which version the slot's commit is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StateFile {
    /// The region's commit that this is about.
    commit: u64,
    identity: Identity,
    digest: StateDigest,
}

const STATE: &str = "state.json";

/// A version with the proof of what it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Known {
    pub identity: Identity,
    pub digest: StateDigest,
}

/// Where and how an image is kept.
#[derive(Clone, Debug)]
pub struct ImageSpec {
    /// The directory of the image.
    pub dir: PathBuf,
    pub model_id: ModelId,
    /// Readable by the group.
    pub group: bool,
    /// What to do where the filesystem is too small.
    pub memfd: Memfd,
    /// Threads for sums and deltas.
    pub threads: usize,
}

/// What the receiver believes about the bytes.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) sums: SumTable,
    /// Whether the bytes of the block have its sum. Not so while it is being overwritten.
    pub(crate) summed: Vec<bool>,
    pub(crate) versions: Vec<Option<Version>>,
    /// The blocks that the image keeps. The others have no sum and no version.
    keeps: BlockRanges,
}

impl Book {
    /// Nothing is known of any block.
    fn new(manifest: &Manifest, keeps: BlockRanges) -> Book {
        let blocks = manifest.cuts().blocks() as usize;
        let sums = SumTable::new(manifest, vec![BlockSum::default(); blocks]);
        Book { sums, summed: vec![false; blocks], versions: vec![None; blocks], keeps }
    }

    pub(crate) fn put(&mut self, block: u32, tensor: u32, sum: BlockSum, version: Version) {
        self.sums.set(block, tensor, sum);
        self.summed[block as usize] = true;
        self.versions[block as usize] = Some(version);
    }

    pub(crate) fn at(&self, wanted: impl Fn(Option<Version>) -> bool) -> BlockRanges {
        let matching = |b: u32| wanted(self.versions[b as usize]).then_some(b..b + 1);
        self.keeps.iter().filter_map(matching).collect()
    }
}

/// A model's image on this host. At most one receiver has it open.
#[derive(Debug)]
pub struct Image {
    spec: ImageSpec,
    region: Arc<Region>,
    writer: Writer,
    seat: AgentSeat,
    book: Mutex<Book>,
    current: Option<Known>,
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl Image {
    /// How many threads work on it from now on.
    pub(crate) fn set_threads(&mut self, threads: usize) {
        self.spec.threads = threads;
    }

    /// Makes an empty image, of all blocks or of the slice that is given. Waits until `stop` for those who look at what is
    /// in its place.
    pub fn create(
        spec: ImageSpec,
        manifest: Arc<Manifest>,
        slice: Option<BlockRanges>,
        stop: &Stop,
    ) -> Result<Image, ImageError> {
        let spec_of_region = RegionSpec {
            slots: Slots::One,
            part: slice,
            group: spec.group,
            memfd: spec.memfd,
            ..RegionSpec::new(spec.dir.clone(), spec.model_id.clone(), Arc::clone(&manifest))
        };
        let region = Region::create_when_free(&spec_of_region, stop)?;
        let book = Book::new(&manifest, region.blocks());
        let (writer, seat) = seats(&spec, &region)?;
        Ok(Image { spec, region, writer, seat, book: Mutex::new(book), current: None })
    }

    /// Opens an image that a receiver left, and sums all of it. It is whole if the sums give the digest that
    /// it was left with.
    pub fn open(spec: ImageSpec, stop: &Stop) -> Result<Image, ImageError> {
        let region = Region::open(&spec.dir)?;
        // First of all: a living receiver must not be looked at while it writes, and what a dead one left open is
        // ended by this.
        let (writer, seat) = seats(&spec, &region)?;
        let manifest = Arc::clone(region.manifest());
        // Not by a lease: what a broken refresh left cannot be leased, and no other process writes here.
        let path = region.slot_path(0);
        let range = region.data_start()..region.data_start() + manifest.data_bytes();
        let bytes = fs::File::open(&path)
            .and_then(|file| Mapping::map(&file, range.end, Access::Read))
            .map_err(|source| ImageError::Io { action: "map", path, source })?;
        let keeps = region.blocks();
        let data = bytes.bytes(range);
        let sums = seal::sums(crate::simd::kernels(), &manifest, &keeps, data, spec.threads, stop)?;
        let digest = sums.digest(&manifest);
        seal_left(&seat, digest)?;
        let current = whole_state(&region)?.filter(|known| known.digest == digest);
        let version = current.as_ref().map(|k| k.identity.version);
        let mut book = Book { sums, ..Book::new(&manifest, keeps.clone()) };
        for block in keeps.iter() {
            (book.summed[block as usize], book.versions[block as usize]) = (true, version);
        }
        Ok(Image { spec, region, writer, seat, book: Mutex::new(book), current })
    }

    /// The layout.
    pub fn manifest(&self) -> &Arc<Manifest> {
        self.region.manifest()
    }

    /// The blocks that it keeps, if these are not all.
    pub fn slice(&self) -> Option<&BlockRanges> {
        self.region.part()
    }

    /// The region, for engines in this process.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The whole version that is there.
    pub fn current(&self) -> Option<&Known> {
        self.current.as_ref()
    }

    /// The versions that blocks are of, oldest first.
    pub fn versions(&self) -> BTreeSet<Version> {
        locked(&self.book).versions.iter().flatten().copied().collect()
    }

    /// The blocks of no known version.
    pub fn unknown(&self) -> BlockRanges {
        locked(&self.book).at(|v| v.is_none())
    }

    /// The sum of each tensor, as its bytes are believed to be.
    pub fn tensor_sums(&self) -> Vec<BlockSum> {
        locked(&self.book).sums.tensors(self.region.manifest())
    }

    /// Forgets which versions the blocks are of; the sums stay. For a new incarnation, whose versions mean
    /// something else.
    pub fn forget(&mut self) {
        locked(&self.book).versions.fill(None);
        self.current = None;
    }

    /// Gives up the image and its place, for one of another layout. Waits until `stop` for the leases of engines to end;
    /// from then on it cannot be leased. Those who have it open keep what they have mapped, and find what takes its place
    /// when they open the directory again.
    pub fn set_aside(&mut self, stop: &Stop) -> Result<(), ImageError> {
        drop(self.refresh(stop)?);
        Ok(self.region.set_aside()?)
    }

    /// Opens the image for changes: waits for the leases of engines to end, and hides it until
    /// [`Refresh::finish`].
    pub fn refresh(&mut self, stop: &Stop) -> Result<Refresh<'_>, ImageError> {
        let digest = locked(&self.book).sums.digest(self.region.manifest());
        seal_left(&self.seat, digest)?;
        // The region numbers commits of its own: versions of the publisher may start over.
        let number = self.region.state().attempt + 1;
        // An engine's driver holds the image while its workers come to it.
        let attempt = self.writer.begin_gently(number, stop)?;
        self.current = None;
        Ok(Refresh {
            spec: &self.spec,
            region: &self.region,
            attempt,
            seat: &self.seat,
            book: &self.book,
            current: &mut self.current,
        })
    }
}

/// Seals what was committed and, by a crash or a failure in between, not sealed: the next refresh would wait for that.
/// It counts as whole only if `state.json` says the same digest.
fn seal_left(seat: &AgentSeat, digest: StateDigest) -> Result<(), ImageError> {
    if let Some(seal) = seat.seal()? {
        seal.finish(digest)?;
    }
    Ok(())
}

/// The right to write, which one receiver has.
fn seats(spec: &ImageSpec, region: &Arc<Region>) -> Result<(Writer, AgentSeat), ImageError> {
    let taken = |e| match e {
        RegionError::RankTaken { pid, .. } | RegionError::AgentTaken { pid, .. } => {
            let (model, dir) = (spec.model_id.clone(), spec.dir.clone());
            ImageError::Taken { model, dir, pid }
        }
        other => other.into(),
    };
    Ok((region.writer(0).map_err(taken)?, region.agent().map_err(taken)?))
}

/// The identity of the whole version in an image's region, if there is one.
fn whole_state(region: &Region) -> Result<Option<Known>, ImageError> {
    let Some(slot) = region.state().active.filter(|s| s.sealed.is_some()) else { return Ok(None) };
    let path = region.dir().join(STATE);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(ImageError::Io { action: "read", path, source }),
    };
    // A file of another time, or a damaged one, is as good as none: the bytes are fetched again.
    let Ok(state) = serde_json::from_slice::<StateFile>(&text) else { return Ok(None) };
    let same = state.commit == slot.id && Some(state.digest) == slot.sealed;
    Ok(same.then_some(Known { identity: state.identity, digest: state.digest }))
}

/// A whole version that an engine reads in place. It cannot be changed while this is alive and its time is not over;
/// after that a receiver that waits may take it back, and [`ImageView::finish`] says so.
#[derive(Debug)]
pub struct ImageView {
    lease: Lease,
    known: Known,
    region: Arc<Region>,
}

/// How long a reader that waits for a whole version waits before it looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl ImageView {
    /// Takes a map lease on the whole version in the image at `dir`, for at most `load`. Needs no receiver: an image
    /// stays when its receiver is gone. Waits until `stop` for an image and for a whole version in it.
    pub fn open(dir: &Path, load: Duration, stop: &Stop) -> Result<ImageView, ImageError> {
        loop {
            // Nothing is open while it waits: a receiver that makes a new image must find its place unused.
            let found = Region::open(dir).map_err(ImageError::from).and_then(|region| {
                if region.slot_count() != 1 {
                    let (model, dir) = (region.model_id().clone(), dir.to_owned());
                    return Err(ImageError::NotAnImage { model, dir });
                }
                ImageView::take(&region, load, &Stop::after(Duration::ZERO))
            });
            match found {
                Err(ImageError::NotWhole { .. } | ImageError::Region(RegionError::Absent { .. }))
                    if !stop.is_set() =>
                {
                    std::thread::sleep(stop.nap().min(LOOK_AGAIN));
                }
                other => return other,
            }
        }
    }

    /// Takes a map lease on the whole version in `region`, for at most `load`. Waits for one until `stop`.
    pub fn take(region: &Arc<Region>, load: Duration, stop: &Stop) -> Result<ImageView, ImageError> {
        loop {
            let seen = region.bell();
            if let Some(known) = whole_state(region)?
                && let Some(slot) = region.state().active
            {
                match region.lease(slot.id, LeaseKind::Map, load) {
                    // The file may have been read before the commit and the slot after it.
                    Ok(lease) if whole_state(region)?.as_ref() == Some(&known) => {
                        return Ok(ImageView { lease, known, region: Arc::clone(region) });
                    }
                    Ok(_) | Err(RegionError::LeaseGone { .. }) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            if stop.is_set() {
                let (model, dir) = (region.model_id().clone(), region.dir().to_owned());
                return Err(ImageError::NotWhole { model, dir });
            }
            region.wait(seen, stop.nap());
        }
    }

    /// Which version.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// Its layout.
    pub fn manifest(&self) -> &Arc<Manifest> {
        self.region.manifest()
    }

    /// The blocks that the image keeps, if these are not all. The bytes of others are zeros.
    pub fn slice(&self) -> Option<&BlockRanges> {
        self.region.part()
    }

    /// Its bytes, by the manifest.
    pub fn data(&self) -> &[u8] {
        self.lease.data()
    }

    /// The safetensors file, for engines that load from a path. Valid while this is alive.
    pub fn path(&self) -> PathBuf {
        self.region.slot_path(self.lease.slot())
    }

    /// Gives it `load` from now. An error if it was taken back before.
    pub fn renew(&self, load: Duration) -> Result<(), ImageError> {
        Ok(self.lease.renew(load)?)
    }

    /// Ends the reading. An error if the image was taken back meanwhile: what was read may be of two versions.
    pub fn finish(self) -> Result<(), ImageError> {
        Ok(self.lease.finish()?)
    }

    /// The lease alone, which goes on holding the bytes.
    pub fn into_lease(self) -> Lease {
        self.lease
    }
}

/// An image that is open for changes. Dropping it leaves the image hidden, with what was done so far.
#[derive(Debug)]
pub struct Refresh<'a> {
    pub(crate) spec: &'a ImageSpec,
    pub(crate) region: &'a Arc<Region>,
    pub(crate) attempt: Attempt<'a>,
    seat: &'a AgentSeat,
    pub(crate) book: &'a Mutex<Book>,
    current: &'a mut Option<Known>,
}

impl Refresh<'_> {
    /// Whether every block is of the version, and the digest is right.
    pub fn check(&self, known: &Known) -> Result<(), ImageError> {
        let version = known.identity.version;
        let book = locked(self.book);
        let missing = book.at(|v| v != Some(version));
        if let Some(first) = missing.first() {
            let model = self.spec.model_id.clone();
            return Err(ImageError::Incomplete { model, version, left: missing.len(), first });
        }
        let found = book.sums.digest(self.region.manifest());
        if found != known.digest {
            let identity = Box::new(known.identity.clone());
            return Err(ImageError::Digest { identity, found, expected: known.digest });
        }
        Ok(())
    }

    /// Makes the version visible to engines. Every block must be of it, and the digest must be right.
    pub fn finish(self, known: &Known, stop: &Stop) -> Result<(), ImageError> {
        self.check(known)?;
        let state =
            StateFile { commit: self.attempt.id(), identity: known.identity.clone(), digest: known.digest };
        write_state(self.region.dir(), &state)?;
        self.attempt.done(stop)?;
        if let Some(seal) = self.seat.seal()? {
            seal.finish(known.digest)?;
        }
        *self.current = Some(known.clone());
        Ok(())
    }
}

fn write_state(dir: &Path, state: &StateFile) -> Result<(), ImageError> {
    let path = dir.join(STATE);
    let text = serde_json::to_vec(state).map_err(io::Error::from);
    let written = text.and_then(|text| Draft::write(&path, &text));
    written.map_err(|source| ImageError::Io { action: "write", path, source })
}
