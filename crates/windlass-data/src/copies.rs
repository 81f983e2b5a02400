//! Copies of a process' tensors into the slot that is being written.
//!
//! Owns: the plan of which bytes go where ([`CopyPlan`]), made once for a layout and a placement, and its execution
//! by several threads, once for each version. Called by the Python door, whose tensors are anywhere in memory and as
//! strided as their placement makes them. Must not: cast, or know what a tensor is.
//!
//! A [copy](struct@Copy) is a run of bytes, repeated along up to a few dimensions with one stride in the slot and another in the
//! source. Contiguous shards are one run. A shard of the columns of a matrix is a run for each row.
//!
//! # Work
//!
//! Copies are cut into jobs of a few MiB, so that threads share large tensors and do not fight over small
//! ones. Between two jobs a thread looks at the attempt and at the [`Stop`].

use std::ops::Range;

use windlass_core::error::Kind;

use crate::region::{Attempt, Region, RegionError};
use crate::stop::{Stop, Stopped};
use crate::work;

/// The bytes of a job, about.
pub(crate) const JOB: u64 = 4 << 20;
/// The most dimensions of a copy.
pub const MAX_DIMS: usize = 16;

/// What can be wrong with copies.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("copying into the slot: {0}")]
    Stopped(#[from] Stopped),
    #[error("copy {index} has {dims} dimensions, more than {MAX_DIMS}")]
    Dims { index: usize, dims: usize },
    #[error("copy {index} spans more than 64 bits can count")]
    Overflow { index: usize },
    #[error("{expected} sources are needed and {found} were given")]
    Sources {
        /// As many as there are copies.
        expected: usize,
        found: usize,
    },
    #[error("source {index} has {have} bytes and {need} are read")]
    Short { index: usize, have: u64, need: u64 },
}

impl CopyError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            CopyError::Region(e) => e.kind(),
            CopyError::Stopped(s) => s.kind(),
            CopyError::Dims { .. }
            | CopyError::Overflow { .. }
            | CopyError::Sources { .. }
            | CopyError::Short { .. } => Kind::Invalid,
        }
    }
}

/// A dimension along which a run is repeated. Strides are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim {
    pub count: u64,
    /// From one to the next in the slot.
    pub to: u64,
    /// From one to the next in the source.
    pub from: u64,
}

/// Bytes of one source and their places in the data area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Where the first run goes in the data area.
    pub at: u64,
    /// Bytes of a run.
    pub run: u64,
    pub dims: Vec<Dim>,
}

impl Copy {
    /// Whether it moves nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.run == 0 || self.dims.iter().any(|d| d.count == 0)
    }

    /// From the first byte to the last, by the stride that `of` picks.
    pub(crate) fn span(&self, of: impl Fn(&Dim) -> u64) -> Option<u64> {
        if self.is_empty() {
            return Some(0);
        }
        self.dims.iter().try_fold(self.run, |span, d| (d.count - 1).checked_mul(of(d))?.checked_add(span))
    }

    /// How many bytes it moves.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.dims.iter().try_fold(self.run, |bytes, d| bytes.checked_mul(d.count))
    }

    /// How many outermost indices it has; one if it has no dimensions.
    pub(crate) fn outer(&self) -> u64 {
        self.dims.first().map_or(1, |d| d.count)
    }

    /// Calls `each(in the slot, in the source)` for every run whose outermost index is in `outer`.
    #[inline]
    pub(crate) fn runs<E>(
        &self,
        outer: Range<u64>,
        mut each: impl FnMut(u64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some((first, inner)) = self.dims.split_first() else { return each(self.at, 0) };
        let mut index = [0u64; MAX_DIMS];
        let (mut to, mut from) = (self.at + outer.start * first.to, outer.start * first.from);
        for _ in outer {
            'rows: loop {
                each(to, from)?;
                // Counts up like an odometer, the innermost dimension first.
                for (i, d) in index.iter_mut().zip(inner).rev() {
                    *i += 1;
                    (to, from) = (to + d.to, from + d.from);
                    if *i < d.count {
                        continue 'rows;
                    }
                    (to, from) = (to - d.count * d.to, from - d.count * d.from);
                    *i = 0;
                }
                break;
            }
            (to, from) = (to + first.to, from + first.from);
        }
        Ok(())
    }
}

/// Where copies go.
pub trait CopyTarget: Sync {
    /// An error if nothing should be written any more.
    fn check(&self) -> Result<(), RegionError>;
    /// Copies `bytes` to `offset` of the data area.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), RegionError>;
}

impl CopyTarget for Attempt<'_> {
    fn check(&self) -> Result<(), RegionError> {
        Attempt::check(self)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        Attempt::write(self, offset, bytes)
    }
}

/// What a thread does at a time.
#[derive(Clone, Debug)]
enum Job {
    Copies(Range<usize>),
    /// Some of the outermost indices of a copy with dimensions.
    Rows(usize, Range<u64>),
    /// Some of the bytes of a copy without.
    Bytes(usize, Range<u64>),
}

/// Copies that were found to fit their region.
#[derive(Debug)]
pub struct CopyPlan {
    copies: Vec<Copy>,
    /// Bytes that each source must have.
    spans: Vec<u64>,
    jobs: Vec<Job>,
    bytes: u64,
}

impl CopyPlan {
    /// Checks that every run goes where `region` holds data.
    pub fn new(copies: Vec<Copy>, region: &Region) -> Result<CopyPlan, CopyError> {
        let mut spans = Vec::with_capacity(copies.len());
        let mut bytes = 0u64;
        for (index, copy) in copies.iter().enumerate() {
            let overflow = CopyError::Overflow { index };
            if copy.dims.len() > MAX_DIMS {
                return Err(CopyError::Dims { index, dims: copy.dims.len() });
            }
            let (Some(from), Some(to), Some(size)) =
                (copy.span(|d| d.from), copy.span(|d| d.to), copy.bytes())
            else {
                return Err(overflow);
            };
            spans.push(from);
            bytes = bytes.checked_add(size).ok_or(overflow)?;
            let end = copy.at.checked_add(to).ok_or(CopyError::Overflow { index })?;
            // Where the whole span is held nothing else needs to be asked.
            if size > 0
                && let Err(e) = region.check_range(&(copy.at..end))
            {
                if end > region.manifest().data_bytes() {
                    return Err(e.into());
                }
                let outer = copy.outer();
                copy.runs(0..outer, |to, _| region.check_range(&(to..to + copy.run)))?;
            }
        }
        let jobs = jobs(&copies);
        Ok(CopyPlan { copies, spans, jobs, bytes })
    }

    /// The copies, in the order of their sources.
    pub(crate) fn copies(&self) -> &[Copy] {
        &self.copies
    }

    /// How many bytes each source must have.
    pub fn spans(&self) -> &[u64] {
        &self.spans
    }

    /// How many bytes are copied.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies `sources`, one for each copy, into the slot of `attempt`, which must be one of the plan's region.
    pub fn run(
        &self,
        attempt: &Attempt<'_>,
        sources: &[&[u8]],
        threads: usize,
        stop: &Stop,
    ) -> Result<(), CopyError> {
        self.run_into(attempt, sources, threads, stop)
    }

    /// Copies `sources`, one for each copy, to where an image of the plan's region is made.
    pub fn run_into(
        &self,
        attempt: &dyn CopyTarget,
        sources: &[&[u8]],
        threads: usize,
        stop: &Stop,
    ) -> Result<(), CopyError> {
        if sources.len() != self.copies.len() {
            return Err(CopyError::Sources { expected: self.copies.len(), found: sources.len() });
        }
        for (index, (source, &need)) in sources.iter().zip(&self.spans).enumerate() {
            let have = source.len() as u64;
            if have < need {
                return Err(CopyError::Short { index, have, need });
            }
        }
        work::each(
            threads.max(1),
            self.jobs.len() as u64,
            stop,
            || (),
            |(), job| {
                attempt.check()?;
                match &self.jobs[job as usize] {
                    Job::Copies(range) => range.clone().try_for_each(|i| {
                        let outer = self.copies[i].outer();
                        self.rows(attempt, sources, i, 0..outer)
                    })?,
                    Job::Rows(i, outer) => self.rows(attempt, sources, *i, outer.clone())?,
                    Job::Bytes(i, range) => {
                        let bytes = &sources[*i][range.start as usize..range.end as usize];
                        attempt.write(self.copies[*i].at + range.start, bytes)?;
                    }
                }
                Ok(())
            },
        )
        .map(drop)
    }

    fn rows(
        &self,
        attempt: &dyn CopyTarget,
        sources: &[&[u8]],
        index: usize,
        outer: Range<u64>,
    ) -> Result<(), CopyError> {
        let (copy, source) = (&self.copies[index], sources[index]);
        if copy.is_empty() {
            return Ok(());
        }
        copy.runs(outer, |to, from| {
            let from = from as usize;
            Ok(attempt.write(to, &source[from..from + copy.run as usize])?)
        })
    }
}

/// Cuts copies into jobs.
fn jobs(copies: &[Copy]) -> Vec<Job> {
    let mut jobs = Vec::new();
    let (mut first, mut small) = (0, 0);
    for (i, copy) in copies.iter().enumerate() {
        let bytes = copy.bytes().unwrap_or(0);
        if bytes <= JOB {
            small += bytes;
            if small >= JOB {
                jobs.push(Job::Copies(first..i + 1));
                (first, small) = (i + 1, 0);
            }
            continue;
        }
        if first < i {
            jobs.push(Job::Copies(first..i));
        }
        (first, small) = (i + 1, 0);
        match copy.dims.first() {
            Some(d) => {
                let step = (JOB / (bytes / d.count).max(1)).max(1);
                let starts = (0..d.count).step_by(step as usize);
                jobs.extend(starts.map(|s| Job::Rows(i, s..d.count.min(s + step))));
            }
            None => {
                let starts = (0..bytes).step_by(JOB as usize);
                jobs.extend(starts.map(|s| Job::Bytes(i, s..bytes.min(s + JOB))));
            }
        }
    }
    if first < copies.len() {
        jobs.push(Job::Copies(first..copies.len()));
    }
    jobs
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use proptest::prelude::*;
    use windlass_core::Dtype;
    use windlass_core::identity::ModelId;
    use windlass_core::manifest::{Manifest, TensorSpec};

    use super::*;
    use crate::region::{LeaseKind, Memfd, RegionSpec};

    fn region(dir: &Path, bytes: u64) -> Arc<Region> {
        let specs = [TensorSpec::new("t", Dtype::U8, [bytes])];
        Region::create(&RegionSpec {
            memfd: Memfd::Never,
            ..RegionSpec::new(
                dir.join("r"),
                ModelId::new("m").unwrap(),
                Arc::new(Manifest::new(specs, BTreeMap::new()).unwrap()),
            )
        })
        .unwrap()
    }

    /// What the copies should leave, one byte at a time.
    fn expected(copies: &[Copy], sources: &[Vec<u8>], bytes: u64) -> Vec<u8> {
        let mut image = vec![0; bytes as usize];
        for (copy, source) in copies.iter().zip(sources) {
            let count: u64 = copy.dims.iter().map(|d| d.count).product();
            for n in 0..count {
                let (mut rest, mut to, mut from) = (n, copy.at, 0);
                for d in copy.dims.iter().rev() {
                    let i = rest % d.count;
                    rest /= d.count;
                    (to, from) = (to + i * d.to, from + i * d.from);
                }
                for b in 0..copy.run {
                    image[(to + b) as usize] = source[(from + b) as usize];
                }
            }
        }
        image
    }

    /// Boxes of a three-dimensional tensor that tile it, each from a source with strides of its own.
    fn tiles() -> impl Strategy<Value = (u64, Vec<Copy>)> {
        let shape = prop::array::uniform3(1u64..9);
        let gaps = prop::collection::vec(0u64..3, 64);
        (shape, prop::array::uniform3(1u64..9), gaps).prop_map(|(shape, tile, gaps)| {
            let (row, plane) = (shape[2], shape[1] * shape[2]);
            let mut copies = Vec::new();
            for z in (0..shape[0]).step_by(tile[0] as usize) {
                for y in (0..shape[1]).step_by(tile[1] as usize) {
                    for x in (0..shape[2]).step_by(tile[2] as usize) {
                        let size =
                            [tile[0].min(shape[0] - z), tile[1].min(shape[1] - y), tile[2].min(shape[2] - x)];
                        let gap = gaps[copies.len() % gaps.len()];
                        let (inner, outer) = (size[2] + gap, size[1] * (size[2] + gap) + gap);
                        copies.push(Copy {
                            at: z * plane + y * row + x,
                            run: size[2],
                            dims: vec![
                                Dim { count: size[0], to: plane, from: outer },
                                Dim { count: size[1], to: row, from: inner },
                            ],
                        });
                    }
                }
            }
            (shape[0] * plane, copies)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

        #[test]
        fn strided_copies_fill_the_slot_as_a_loop_over_bytes_would((bytes, copies) in tiles(), threads in 1usize..4) {
            let home = tempfile::tempdir_in("/dev/shm").unwrap();
            let region = region(home.path(), bytes);
            let plan = CopyPlan::new(copies.clone(), &region).unwrap();
            prop_assert_eq!(plan.bytes(), bytes);
            let sources: Vec<Vec<u8>> = plan
                .spans()
                .iter()
                .enumerate()
                .map(|(i, &n)| (0..n).map(|b| (b as u8).wrapping_mul(7).wrapping_add((i as u8).wrapping_mul(31))).collect())
                .collect();
            let stop = Stop::after(Duration::from_secs(30));
            let attempt = region.writer(0).unwrap().into_attempt(1, &stop).unwrap();
            let slices: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
            plan.run(&attempt, &slices, threads, &stop).unwrap();
            let (_writer, committed) = attempt.done(&stop);
            let lease = region.lease(committed.unwrap().id, LeaseKind::Map, Duration::from_secs(9)).unwrap();
            prop_assert_eq!(lease.data(), expected(&copies, &sources, bytes));
        }
    }

    #[test]
    fn large_copies_are_shared_by_jobs_and_small_ones_share_one() {
        let run = |bytes| Copy { at: 0, run: bytes, dims: vec![] };
        let rows = Copy { at: 0, run: 1 << 20, dims: vec![Dim { count: 9, to: 1 << 20, from: 1 << 21 }] };
        let all = [run(10), run(20), run(2 * JOB + 1), rows, run(5)];
        let found = jobs(&all);
        let covered: u64 = found
            .iter()
            .map(|j| match j {
                Job::Copies(r) => all[r.clone()].iter().filter_map(Copy::bytes).sum(),
                Job::Rows(i, r) => (r.end - r.start) * all[*i].run,
                Job::Bytes(_, r) => r.end - r.start,
            })
            .sum();
        assert_eq!(covered, all.iter().filter_map(Copy::bytes).sum::<u64>());
        assert_eq!(found.len(), 1 + 3 + 3 + 1);
    }

    #[test]
    fn copies_that_do_not_fit_are_refused_before_anything_is_written() {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let region = region(home.path(), 100);
        let plan = |copy: Copy| CopyPlan::new(vec![copy], &region);
        let beyond = plan(Copy { at: 90, run: 11, dims: vec![] });
        assert!(matches!(beyond, Err(CopyError::Region(RegionError::Beyond { .. }))));
        let huge = Dim { count: u64::MAX, to: u64::MAX, from: 1 };
        assert!(matches!(
            plan(Copy { at: 0, run: 2, dims: vec![huge] }),
            Err(CopyError::Overflow { index: 0 })
        ));
        let many = vec![Dim { count: 1, to: 1, from: 1 }; MAX_DIMS + 1];
        assert!(matches!(plan(Copy { at: 0, run: 1, dims: many }), Err(CopyError::Dims { .. })));
        let good = plan(Copy { at: 0, run: 10, dims: vec![Dim { count: 2, to: 50, from: 20 }] }).unwrap();
        assert_eq!(good.spans(), [30]);
        let stop = Stop::after(Duration::from_secs(30));
        let attempt = region.writer(0).unwrap().into_attempt(1, &stop).unwrap();
        let short = good.run(&attempt, &[&[0; 29]], 1, &stop);
        assert!(matches!(short, Err(CopyError::Short { have: 29, need: 30, .. })));
        assert!(matches!(good.run(&attempt, &[], 1, &stop), Err(CopyError::Sources { .. })));
        // The writer lives on after an attempt that was given up.
        let writer = attempt.abort();
        let next = writer.into_attempt(1, &stop).unwrap();
        let (mut writer, committed) = next.done(&stop);
        assert_eq!(committed.unwrap().version, 1);
        assert!(writer.begin(1, &stop).is_err());
    }
}
