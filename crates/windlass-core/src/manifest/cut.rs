//! The cut table: how tensors are divided into blocks.
//!
//! A block is a tile of one tensor of at most [`BLOCK_UNITS`] units: `count` runs of `run` units, `stride`
//! units apart, the first at `start`. It is the unit of encoding, checking and retrying. Blocks are
//! numbered through the whole manifest, tensor by tensor, and a block's geometry is computed from its
//! number on demand: a table for a trillion parameters takes as much memory as its list of tensors.
//!
//! By default a tensor is cut into contiguous blocks. Given the boundaries at which ranks, nodes or TP
//! slices divide it ([`DimCut`], any dimensions, any uneven boundaries), no block crosses one, so that each
//! owner owns whole blocks.
//!
//! How boundaries become tiles: the innermost cut dimension turns the tensor into a matrix whose rows are
//! everything before it and whose columns are it and everything after it. Cuts of outer dimensions become
//! breaks between rows, cuts of the innermost one breaks between columns. Each cell of that grid is cut into
//! tiles of as many whole rows as fit into a block, or, where one row is too long, into pieces of rows. With
//! no break between columns a cell is contiguous and is cut without regard to rows; the same goes for a
//! matrix of a single row. A tensor's blocks are numbered cell by cell, row of cells after row of cells, and
//! within a cell from its first unit on.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::{ManifestError, Tensor};
use crate::identity::CutsHash;

/// The most units in a block. Positions inside a block fit in 16 bits.
pub const BLOCK_UNITS: u64 = 1 << 16;
/// The most blocks in a manifest, and the most cells in a tensor's grid.
pub const MAX_BLOCKS: u64 = 1 << 31;
/// The most cells in the grids of all tensors together, which are held in memory.
const MAX_CELLS: u64 = 1 << 24;

/// The boundaries at which owners divide a tensor along one dimension.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DimCut {
    /// The dimension, counted from the outermost.
    pub dim: usize,
    /// Where one owner ends and the next begins; strictly growing, inside the dimension.
    pub bounds: Vec<u64>,
}

impl DimCut {
    /// Boundaries of an even division into `parts`, as torch chunks: every part but the last ones has
    /// `ceil(size / parts)` rows, the last ones are short or empty.
    pub fn chunked(dim: usize, size: u64, parts: u64) -> DimCut {
        let step = size.div_ceil(parts.max(1)).max(1);
        DimCut { dim, bounds: (1..parts).map(|i| i * step).take_while(|&b| b < size).collect() }
    }
}

/// A tile of a tensor, in units of its dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Index of the tensor in the manifest.
    pub tensor: u32,
    /// The tile's first unit within the tensor.
    pub start: u64,
    /// Units in one run.
    pub run: u64,
    /// Units from the start of one run to the start of the next.
    pub stride: u64,
    pub count: u64,
}

impl Block {
    /// How many units it has; at most [`BLOCK_UNITS`].
    pub fn units(&self) -> u64 {
        self.run * self.count
    }

    /// Whether its bytes are contiguous in the image.
    pub fn is_contiguous(&self) -> bool {
        self.count == 1
    }

    /// Where each run begins within the tensor, in units; each has `run` units.
    pub fn runs(&self) -> impl Iterator<Item = u64> + use<> {
        let Block { start, stride, .. } = *self;
        (0..self.count).map(move |i| start + i * stride)
    }

    /// The unit of the tensor that is the `local`-th of the block.
    pub fn tensor_unit(&self, local: u64) -> u64 {
        if self.count == 1 {
            self.start + local
        } else {
            self.start + local / self.run * self.stride + local % self.run
        }
    }
}

/// How the tensors of a manifest are cut into blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutTable {
    given: BTreeMap<String, Vec<DimCut>>,
    grids: Vec<Grid>,
    /// Number of the first block of each tensor, and the count of all at the end.
    first: Vec<u32>,
    hash: CutsHash,
}

impl CutTable {
    pub(super) fn new(
        tensors: &[Tensor],
        given: &BTreeMap<String, Vec<DimCut>>,
    ) -> Result<CutTable, ManifestError> {
        let mut grids = Vec::with_capacity(tensors.len());
        let mut first = Vec::with_capacity(tensors.len() + 1);
        let (mut blocks, mut cells) = (0u64, 0u64);
        let mut unknown: BTreeSet<&String> = given.keys().collect();
        for t in tensors {
            unknown.remove(&t.name);
            let grid = Grid::new(t, given.get(&t.name).map_or(&[], Vec::as_slice))?;
            first.push(blocks as u32);
            blocks += grid.blocks();
            cells += grid.cells.len() as u64;
            if blocks > MAX_BLOCKS || cells > MAX_CELLS + tensors.len() as u64 * 2 {
                return Err(ManifestError::TooManyBlocks);
            }
            grids.push(grid);
        }
        first.push(blocks as u32);
        if let Some(name) = unknown.pop_first() {
            return Err(ManifestError::CutsUnknownTensor { name: name.clone() });
        }
        // Boundaries that cut nothing are the same table as none at all.
        let given: BTreeMap<_, _> =
            given.iter().filter(|(_, c)| c.iter().any(|c| !c.bounds.is_empty())).map(clone_pair).collect();
        let hash = hash(&given);
        Ok(CutTable { given, grids, first, hash })
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> u32 {
        self.first.last().copied().unwrap_or(0)
    }

    /// The geometry of a block.
    pub fn block(&self, block: u32) -> Result<Block, ManifestError> {
        if block >= self.blocks() {
            return Err(ManifestError::NoSuchBlock { block, count: self.blocks() });
        }
        // Empty tensors have no blocks, so several may share a first number: take the last.
        let tensor = self.first.partition_point(|&f| f <= block) - 1;
        Ok(self.grids[tensor].block(tensor as u32, u64::from(block - self.first[tensor])))
    }

    /// The tensor of a block. Cheaper than all of its geometry, and nearly free where blocks come in order: `near` is the
    /// previous result.
    pub fn tensor_of(&self, block: u32, near: u32) -> Result<u32, ManifestError> {
        let there = self.first.get(near as usize).zip(self.first.get(near as usize + 1));
        if there.is_some_and(|(first, next)| (*first..*next).contains(&block)) {
            return Ok(near);
        }
        if block >= self.blocks() {
            return Err(ManifestError::NoSuchBlock { block, count: self.blocks() });
        }
        Ok((self.first.partition_point(|&f| f <= block) - 1) as u32)
    }

    /// The numbers of a tensor's blocks.
    pub fn of_tensor(&self, tensor: usize) -> std::ops::Range<u32> {
        self.first[tensor]..self.first[tensor + 1]
    }

    /// The boundaries that the table was made from.
    pub fn given(&self) -> &BTreeMap<String, Vec<DimCut>> {
        &self.given
    }

    /// Names the table.
    pub fn hash(&self) -> CutsHash {
        self.hash
    }
}

fn clone_pair<K: Clone, V: Clone>((k, v): (&K, &V)) -> (K, V) {
    (k.clone(), v.clone())
}

fn hash(given: &BTreeMap<String, Vec<DimCut>>) -> CutsHash {
    let mut h = Xxh3::new();
    h.update(b"windlass cuts 1\0");
    h.update(&BLOCK_UNITS.to_le_bytes());
    for (name, cuts) in given {
        h.update(&(name.len() as u64).to_le_bytes());
        h.update(name.as_bytes());
        for cut in cuts.iter().filter(|c| !c.bounds.is_empty()) {
            h.update(&(cut.dim as u64).to_le_bytes());
            h.update(&(cut.bounds.len() as u64).to_le_bytes());
            cut.bounds.iter().for_each(|b| h.update(&b.to_le_bytes()));
        }
        h.update(&u64::MAX.to_le_bytes());
    }
    CutsHash(h.digest128().to_be_bytes())
}

/// One tensor as a matrix of units with breaks between rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Grid {
    /// Units in a row.
    row: u64,
    /// Row numbers at which cells begin, and the number of rows at the end.
    rows: Vec<u64>,
    /// Unit numbers within a row at which cells begin, and the row's length at the end.
    cols: Vec<u64>,
    /// Number of the first block of each cell, row-major, and the count of all at the end.
    cells: Vec<u32>,
}

impl Grid {
    fn new(t: &Tensor, cuts: &[DimCut]) -> Result<Grid, ManifestError> {
        check_cuts(t, cuts)?;
        let mut cuts = cuts.iter().filter(|c| !c.bounds.is_empty()).collect::<Vec<_>>();
        let units = t.units();
        let mut grid = Grid { row: units, rows: vec![0, 1], cols: vec![0, units], cells: Vec::new() };
        if let Some(inner) = cuts.pop().filter(|_| units > 0) {
            let outer: u64 = t.shape[..inner.dim].iter().product();
            grid.row = units / outer;
            grid.rows = row_breaks(t, inner.dim, &cuts)?;
            let dim = t.shape[inner.dim];
            // A row is the cut dimension and all inside it; bound * row / dim is exact, or not a whole unit.
            grid.cols = vec![0];
            for &bound in &inner.bounds {
                let at = bound as u128 * u128::from(grid.row);
                if !at.is_multiple_of(u128::from(dim)) {
                    let (name, dim, dtype) = (t.name.clone(), inner.dim, t.dtype);
                    return Err(ManifestError::CutsPartialByte { name, dim, bound, dtype });
                }
                grid.cols.push((at / u128::from(dim)) as u64);
            }
            grid.cols.push(grid.row);
            if outer == 1 {
                // Cuts of the outermost dimension: cells are contiguous, one after another.
                grid.rows = std::mem::take(&mut grid.cols);
                (grid.row, grid.cols) = (1, vec![0, 1]);
            }
        }
        grid.number()?;
        Ok(grid)
    }

    fn number(&mut self) -> Result<(), ManifestError> {
        let cells = (self.rows.len() as u64 - 1) * (self.cols.len() as u64 - 1);
        if cells > MAX_CELLS {
            return Err(ManifestError::TooManyBlocks);
        }
        let mut at = 0u64;
        for r in self.rows.windows(2) {
            for c in self.cols.windows(2) {
                self.cells.push(at as u32);
                at += self.cell_blocks(r[1] - r[0], c[1] - c[0]);
                if at > MAX_BLOCKS {
                    return Err(ManifestError::TooManyBlocks);
                }
            }
        }
        self.cells.push(at as u32);
        Ok(())
    }

    fn blocks(&self) -> u64 {
        self.cells.last().copied().unwrap_or(0).into()
    }

    fn is_contiguous(&self) -> bool {
        self.cols.len() == 2
    }

    fn cell_blocks(&self, rows: u64, width: u64) -> u64 {
        if width == 0 || rows == 0 {
            0
        } else if self.is_contiguous() {
            (rows * width).div_ceil(BLOCK_UNITS)
        } else if width > BLOCK_UNITS {
            rows * width.div_ceil(BLOCK_UNITS)
        } else {
            rows.div_ceil(BLOCK_UNITS / width)
        }
    }

    fn block(&self, tensor: u32, n: u64) -> Block {
        let cell = self.cells.partition_point(|&f| u64::from(f) <= n) - 1;
        let n = n - u64::from(self.cells[cell]);
        let columns = self.cols.len() - 1;
        let (r, c) = (cell / columns, cell % columns);
        let (r0, r1) = (self.rows[r], self.rows[r + 1]);
        let (c0, c1) = (self.cols[c], self.cols[c + 1]);
        let width = c1 - c0;
        let corner = r0 * self.row + c0;
        let (start, run, count) = if self.is_contiguous() {
            let len = (r1 - r0) * width;
            let begin = n * BLOCK_UNITS;
            (corner + begin, (len - begin).min(BLOCK_UNITS), 1)
        } else if width > BLOCK_UNITS {
            let pieces = width.div_ceil(BLOCK_UNITS);
            let (row, begin) = (n / pieces, n % pieces * BLOCK_UNITS);
            (corner + row * self.row + begin, (width - begin).min(BLOCK_UNITS), 1)
        } else {
            let per = BLOCK_UNITS / width;
            let row = n * per;
            (corner + row * self.row, width, (r1 - r0 - row).min(per))
        };
        Block { tensor, start, run, stride: if count == 1 { run } else { self.row }, count }
    }
}

fn check_cuts(t: &Tensor, cuts: &[DimCut]) -> Result<(), ManifestError> {
    let mut next_dim = 0;
    for cut in cuts {
        if cut.dim < next_dim || cut.dim >= t.shape.len() {
            return Err(ManifestError::CutsBadDim {
                name: t.name.clone(),
                dim: cut.dim,
                rank: t.shape.len(),
            });
        }
        next_dim = cut.dim + 1;
        let size = t.shape[cut.dim];
        let mut last = 0;
        for &bound in &cut.bounds {
            if bound <= last || bound >= size {
                return Err(ManifestError::CutsBadBound { name: t.name.clone(), dim: cut.dim, bound, size });
            }
            last = bound;
        }
    }
    Ok(())
}

/// Rows (indices over the dimensions before `inner`) at which a cut of an outer dimension falls.
fn row_breaks(t: &Tensor, inner: usize, cuts: &[&DimCut]) -> Result<Vec<u64>, ManifestError> {
    let rows: u64 = t.shape[..inner].iter().product();
    let mut breaks = vec![0, rows];
    for cut in cuts {
        let outer: u64 = t.shape[..cut.dim].iter().product();
        let below: u64 = t.shape[cut.dim + 1..inner].iter().product();
        if outer * (cut.bounds.len() as u64 + 1) > MAX_CELLS {
            return Err(ManifestError::TooManyBlocks);
        }
        for o in 0..outer {
            let base = o * t.shape[cut.dim];
            breaks.push(base * below);
            breaks.extend(cut.bounds.iter().map(|b| (base + b) * below));
        }
    }
    breaks.sort_unstable();
    breaks.dedup();
    Ok(breaks)
}
