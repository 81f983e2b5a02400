//! Strided copies as boxes of two dimensions, which is what a kernel takes and what a DMA engine does at once.
//!
//! Owns: arithmetic. Called when tables are made, once for a plan. Must not: touch a device.

use crate::copies::Copy;

/// Runs at a pitch on either side. In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Box2 {
    /// Where the first run goes.
    pub(super) to: u64,
    /// Where it comes from.
    pub(super) from: u64,
    /// From one run to the next.
    pub(super) to_pitch: u64,
    /// From one run to the next.
    pub(super) from_pitch: u64,
    /// Bytes of a run, on the side of `to`.
    pub(super) run: u64,
    pub(super) count: u64,
}

impl Box2 {
    /// One run.
    pub(super) fn line(to: u64, from: u64, run: u64, scale: u64) -> Box2 {
        Box2 { to, from, to_pitch: run, from_pitch: run * scale, run, count: 1 }
    }

    /// Bytes that it moves, on the side of `to`.
    pub(super) fn bytes(&self) -> u64 {
        self.run * self.count
    }

    /// From the first byte to after the last on the side of `to`.
    pub(super) fn span(&self) -> std::ops::Range<u64> {
        self.to..self.to + (self.count - 1) * self.to_pitch + self.run
    }

    /// The same on the side of `from`.
    pub(super) fn source_span(&self, scale: u64) -> std::ops::Range<u64> {
        self.from..self.from + (self.count - 1) * self.from_pitch + self.run * scale
    }

    /// Its runs from `first` on, `count` of them.
    fn rows(&self, first: u64, count: u64) -> Box2 {
        Box2 {
            to: self.to + first * self.to_pitch,
            from: self.from + first * self.from_pitch,
            count,
            ..*self
        }
    }
}

/// Calls `each` for every box of a copy; `from` counts from the copy's source. A byte of `to` is `scale` bytes of
/// `from`: one, or two where fp32 becomes bf16.
pub(super) fn boxes(copy: &Copy, scale: u64, mut each: impl FnMut(Box2)) {
    if copy.is_empty() {
        return;
    }
    let mut dims: Vec<_> = copy.dims.iter().copied().filter(|d| d.count > 1).collect();
    let mut run = copy.run;
    while let Some(d) = dims.pop_if(|d| (d.to, d.from) == (run, run * scale)) {
        run *= d.count;
    }
    let last = dims.pop();
    let outer = Copy { at: copy.at, run, dims };
    super::each_run(&outer, |to, from| {
        each(match last {
            Some(d) => Box2 { to, from, to_pitch: d.to, from_pitch: d.from, run, count: d.count },
            None => Box2::line(to, from, run, scale),
        });
    });
}

/// How large a box may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes that it moves; a multiple of 16.
    pub(super) bytes: u64,
    /// Bytes from the first to after the last on the side of `from`.
    pub(super) span: u64,
    pub(super) scale: u64,
}

/// Cuts a box into boxes within the limits.
pub(super) fn cut(whole: &Box2, limits: Limits, mut each: impl FnMut(Box2)) {
    let Limits { bytes, span, scale } = limits;
    let most = bytes.min(span / scale / 16 * 16).max(16);
    if whole.run > most {
        for row in 0..whole.count {
            let row = whole.rows(row, 1);
            for at in (0..row.run).step_by(most as usize) {
                each(Box2::line(row.to + at, row.from + at * scale, most.min(row.run - at), scale));
            }
        }
        return;
    }
    let by_span = (span - whole.run * scale) / whole.from_pitch.max(1) + 1;
    let rows = (bytes / whole.run.max(1)).min(by_span).max(1);
    for first in (0..whole.count).step_by(rows as usize) {
        each(whole.rows(first, rows.min(whole.count - first)));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::copies::Dim;

    /// Every byte that is moved, with where it comes from, at the scale of one.
    fn bytes(b: &Box2) -> Vec<(u64, u64)> {
        let rows = (0..b.count).flat_map(|r| (0..b.run).map(move |i| (r, i)));
        rows.map(|(r, i)| (b.to + r * b.to_pitch + i, b.from + r * b.from_pitch + i)).collect()
    }

    fn dims() -> impl Strategy<Value = Vec<Dim>> {
        let dim = (1u64..5, 0u64..60, 0u64..60).prop_map(|(count, to, from)| Dim { count, to, from });
        prop::collection::vec(dim, 0..4)
    }

    proptest! {
        #[test]
        fn boxes_move_what_their_copy_moves(run in 1u64..40, dims in dims(), most in 1u64..5, span in 32u64..90) {
            let copy = Copy { at: 7, run, dims };
            let mut expected = Vec::new();
            super::super::each_run(&copy, |to, from| expected.extend((0..run).map(|i| (to + i, from + i))));
            let (mut whole, mut parts) = (Vec::new(), Vec::new());
            let limits = Limits { bytes: most * 16, span, scale: 1 };
            boxes(&copy, 1, |b| {
                whole.extend(bytes(&b));
                cut(&b, limits, |part| {
                    assert!(part.bytes() <= limits.bytes && part.count > 0, "{part:?}");
                    let span = part.source_span(1);
                    assert!(span.end - span.start <= limits.span.max(16), "{part:?}");
                    parts.extend(bytes(&part));
                });
            });
            for moved in [&mut expected, &mut whole, &mut parts] {
                moved.sort_unstable();
            }
            prop_assert_eq!(&whole, &expected);
            prop_assert_eq!(&parts, &expected);
        }
    }

    #[test]
    fn rows_that_continue_each_other_are_one_run() {
        let copy = Copy { at: 0, run: 64, dims: vec![Dim { count: 8, to: 64, from: 128 }] };
        let mut found = Vec::new();
        boxes(&copy, 2, |b| found.push(b));
        assert_eq!(found, [Box2::line(0, 0, 512, 2)], "fp32 rows without gaps");
        found.clear();
        boxes(&copy, 1, |b| found.push(b));
        assert_eq!((found[0].count, found[0].from_pitch), (8, 128), "rows with gaps");
    }
}
