//! All of an image into the targets.

use std::ops::Range;

use parking_lot::Mutex;

use super::check::{Cut, Group};
use super::{LoadError, LoadPlan, Loaded};
use crate::copies::JOB;
use crate::shm::copy_slice;
use crate::stop::Stop;
use crate::work;

/// Some of the bytes of a group, in the hands of one thread.
struct Window<'t> {
    group: usize,
    /// Outermost indices of its pieces, or bytes of its only run.
    outer: Range<u64>,
    /// Where it begins in the target.
    start: u64,
    bytes: &'t mut [u8],
}

/// The windows of a job, and who takes them.
type Job<'t> = Mutex<Vec<Window<'t>>>;

impl LoadPlan {
    /// Copies every piece of the tensors in `only`, or of all, from `image` into `targets`.
    pub fn dense(
        &self,
        image: &[u8],
        targets: &mut [&mut [u8]],
        only: Option<&[String]>,
        threads: usize,
        stop: &Stop,
    ) -> Result<Loaded, LoadError> {
        self.check_image(image)?;
        self.check_targets(targets.iter().map(|t| t.len()))?;
        let chosen = self.chosen(only)?;
        let mut loaded = Loaded::default();
        for p in self.pieces.iter().filter(|p| chosen[p.tensor as usize]) {
            let (bytes, elements) = (p.bytes(), p.bytes() / p.item);
            loaded = loaded.plus(Loaded { bytes, elements, copies: 1 });
        }
        let jobs = self.jobs(targets, &chosen);
        let each = |(): &mut (), job: u64| {
            let mut windows = jobs[job as usize].lock();
            windows.iter_mut().for_each(|w| self.fill(w, image, &chosen));
            Ok::<(), LoadError>(())
        };
        work::each(threads.max(1), jobs.len() as u64, stop, || (), each)?;
        Ok(loaded)
    }

    fn fill(&self, window: &mut Window<'_>, image: &[u8], chosen: &[bool]) {
        let group = &self.groups[window.group];
        for p in self.pieces[group.pieces.clone()].iter().filter(|p| chosen[p.tensor as usize]) {
            match group.cut {
                Cut::Bytes => {
                    let from = (p.base + p.reads.at + window.outer.start) as usize;
                    copy_slice(&image[from..from + window.bytes.len()], window.bytes);
                }
                Cut::Rows { .. } => p.copy(window.outer.clone(), image, window.bytes, window.start),
                Cut::Not => p.copy(0..p.writes.outer(), image, window.bytes, window.start),
            }
        }
    }

    /// Divides the targets into windows and these into jobs of a few MiB.
    fn jobs<'t>(&self, targets: &'t mut [&mut [u8]], chosen: &[bool]) -> Vec<Job<'t>> {
        let mut rest: Vec<(u64, &mut [u8])> = targets.iter_mut().map(|t| (0, &mut **t)).collect();
        let (mut jobs, mut small, mut small_bytes) = (Vec::new(), Vec::new(), 0);
        for (g, group) in self.groups.iter().enumerate() {
            let pieces = self.pieces[group.pieces.clone()].iter().filter(|p| chosen[p.tensor as usize]);
            let bytes: u64 = pieces.map(super::piece::Piece::bytes).sum();
            if bytes == 0 {
                continue;
            }
            let mut take = |range: &Range<u64>| take(&mut rest[group.target], range);
            if bytes <= JOB || group.cut == Cut::Not {
                let (outer, start) = (outer(group), group.span.start);
                small.push(Window { group: g, outer, start, bytes: take(&group.span) });
                small_bytes += bytes;
            } else {
                let windows = windows(group, bytes);
                jobs.extend(windows.map(|(outer, range)| {
                    let window = Window { group: g, outer, start: range.start, bytes: take(&range) };
                    Mutex::new(vec![window])
                }));
            }
            if small_bytes >= JOB {
                jobs.push(Mutex::new(std::mem::take(&mut small)));
                small_bytes = 0;
            }
        }
        if !small.is_empty() {
            jobs.push(Mutex::new(small));
        }
        jobs
    }
}

/// Cuts a range, which begins at or after what is left, off a target's memory.
fn take<'t>((at, bytes): &mut (u64, &'t mut [u8]), range: &Range<u64>) -> &'t mut [u8] {
    let memory = std::mem::take(bytes);
    let (_, memory) = memory.split_at_mut((range.start - *at) as usize);
    let (taken, left) = memory.split_at_mut((range.end - range.start) as usize);
    (*at, *bytes) = (range.end, left);
    taken
}

/// All that a group's cut counts.
fn outer(group: &Group) -> Range<u64> {
    match group.cut {
        Cut::Bytes => 0..group.span.end - group.span.start,
        Cut::Rows { count, .. } => 0..count,
        Cut::Not => 0..0,
    }
}

/// What a group that moves `bytes` is cut into: outermost indices, and their bytes of the target.
fn windows(group: &Group, bytes: u64) -> impl Iterator<Item = (Range<u64>, Range<u64>)> + use<> {
    let (span, all) = (group.span.clone(), outer(group).end);
    let (stride, step) = match group.cut {
        Cut::Bytes => (1, JOB),
        Cut::Rows { stride, count } => (stride, (JOB / (bytes / count).max(1)).max(1)),
        Cut::Not => (1, all),
    };
    (0..all).step_by(step.max(1) as usize).map(move |first| {
        let last = all.min(first + step);
        let end = if last == all { span.end } else { span.start + last * stride };
        (first..last, span.start + first * stride..end)
    })
}
