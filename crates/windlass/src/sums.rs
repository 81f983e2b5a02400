//! Sums of whole images.
//!
//! Owns: the pass over an image that gives its [`SumTable`]. Called by `verify`, `bench` and `demo`.

use windlass_core::digest::{BlockSum, SumTable, sum_block};
use windlass_core::kernel::Kernels;
use windlass_core::manifest::{Block, Manifest};

use crate::error::Error;
use crate::session::{Cancel, Progress};
use crate::work;

/// Sums every block of the tensors that `tensor` gives by index, with several threads.
pub fn table<'a>(
    kernels: &dyn Kernels,
    manifest: &Manifest,
    tensor: impl Fn(usize) -> &'a [u8] + Sync,
    threads: usize,
    cancel: &Cancel,
    progress: Option<&Progress>,
) -> Result<SumTable, Error> {
    let cuts = manifest.cuts();
    let parts = work::each(threads, u64::from(cuts.blocks()), cancel, Vec::new, |sums, i| {
        let (block, unit) = block_of(manifest, i as u32)?;
        let bytes = slice(tensor(block.tensor as usize), &block, unit)?;
        sums.push((i as u32, sum_block(kernels, &block, unit, bytes)));
        if let Some(p) = progress {
            p.add(bytes.len() as u64);
        }
        Ok(())
    })?;
    let mut all: Vec<(u32, BlockSum)> = parts.concat();
    all.sort_unstable_by_key(|&(i, _)| i);
    Ok(SumTable::new(manifest, all.into_iter().map(|(_, s)| s).collect()))
}

/// A block of a manifest and the size of its units.
pub fn block_of(manifest: &Manifest, i: u32) -> Result<(Block, usize), Error> {
    let block = manifest.cuts().block(i).map_err(|e| Error::Bug(e.to_string()))?;
    Ok((block, manifest.tensors()[block.tensor as usize].dtype.unit()))
}

/// The bytes of a block within those of its tensor. Manifests here have default cuts, which are contiguous.
pub fn slice<'a>(tensor: &'a [u8], block: &Block, unit: usize) -> Result<&'a [u8], Error> {
    let (start, len) = (block.start as usize * unit, block.units() as usize * unit);
    let bytes = if block.is_contiguous() { tensor.get(start..start + len) } else { None };
    bytes.ok_or_else(|| Error::Bug(format!("block {block:?} is not a range of its tensor")))
}
