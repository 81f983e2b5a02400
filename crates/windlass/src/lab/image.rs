//! Images of synthetic models, in memory.
//!
//! Owns: making one from a [`Synth`] and applying a delta to one, with several threads. Called by `bench` and
//! `demo`.

use std::collections::{BTreeMap, HashMap};

use parking_lot::Mutex;
use windlass_core::Dtype;
use windlass_core::delta::{Applier, Delta, Outcome, Tile};
use windlass_core::digest::SumTable;
use windlass_core::kernel::Kernels;
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_data::stop::Stop;
use windlass_data::work;

use crate::console::Progress;
use crate::error::Error;
use windlass_synth::{Synth, SynthError};

/// The layout of a synthetic model.
pub(crate) fn manifest_of(synth: &Synth) -> Result<Manifest, Error> {
    let specs = synth.tensors().iter().map(|t| TensorSpec::new(&*t.name, Dtype::BF16, t.shape.clone()));
    Manifest::new(specs, BTreeMap::new()).map_err(|e| Error::Bug(e.to_string()))
}

/// Memory for an image, all zero.
pub(crate) fn blank(manifest: &Manifest) -> Result<Vec<u8>, Error> {
    zeros(manifest.data_bytes())
}

/// So many zero bytes, or an error where there is no memory for them.
pub(crate) fn zeros(bytes: u64) -> Result<Vec<u8>, Error> {
    let mut image = reserve(bytes)?;
    image.resize(bytes as usize, 0);
    Ok(image)
}

/// An image like another.
pub(crate) fn copy(image: &[u8]) -> Result<Vec<u8>, Error> {
    let mut copy = reserve(image.len() as u64)?;
    copy.extend_from_slice(image);
    Ok(copy)
}

fn reserve(bytes: u64) -> Result<Vec<u8>, Error> {
    let mut image = Vec::new();
    match usize::try_from(bytes).map(|len| image.try_reserve_exact(len)) {
        Ok(Ok(())) => Ok(image),
        _ => Err(SynthError::Memory { bytes }.into()),
    }
}

/// The bytes of a tensor of an image.
pub(crate) fn tensor<'a>(manifest: &Manifest, image: &'a [u8], tensor: usize) -> &'a [u8] {
    let range = manifest.tensors()[tensor].range();
    &image[range.start as usize..range.end as usize]
}

/// A block of a manifest, by its number.
pub(crate) fn tile(manifest: &Manifest, number: u32) -> Result<Tile, Error> {
    Tile::of(manifest, number).map_err(|e| Error::Bug(e.to_string()))
}

/// Writes the state of a model after `step` steps into `image`.
pub(crate) fn fill(
    synth: &Synth,
    manifest: &Manifest,
    step: u32,
    image: &mut [u8],
    threads: usize,
    (cancel, progress): (&Stop, &Progress),
) -> Result<(), Error> {
    let by_name: HashMap<&str, usize> =
        synth.tensors().iter().enumerate().map(|(i, t)| (&*t.name, i)).collect();
    let mut sources = Vec::with_capacity(manifest.tensors().len());
    for t in manifest.tensors() {
        let source = by_name.get(&*t.name).copied();
        sources.push(source.ok_or_else(|| Error::Bug(format!("no source for {}", t.name)))?);
    }
    let blocks = split(manifest, image)?;
    work::each(
        threads,
        blocks.len() as u64,
        cancel,
        || (),
        |(), i| {
            let block = tile(manifest, i as u32)?.block;
            let mut bytes = blocks[i as usize].lock();
            synth.fill(sources[block.tensor as usize], block.start, step, &mut bytes);
            progress.add(bytes.len() as u64);
            Ok::<(), Error>(())
        },
    )?;
    Ok(())
}

/// How many blocks of a delta had which outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcomes {
    /// Blocks that were changed.
    pub(crate) applied: u64,
    /// Blocks that had been changed already.
    pub(crate) skipped: u64,
    /// Blocks that were not the delta's base.
    pub(crate) refetch: u64,
}

/// Applies a delta to an image whose sums are in `table`. The caller brings the table up to date.
pub(crate) fn apply(
    kernels: &dyn Kernels,
    manifest: &Manifest,
    delta: &Delta<'_>,
    table: &SumTable,
    image: &mut [u8],
    (threads, cancel): (usize, &Stop),
) -> Result<Outcomes, Error> {
    let blocks = split(manifest, image)?;
    let entries = delta.entries();
    let state = || (Applier::new(), Outcomes::default());
    let states = work::each(threads, entries.len() as u64, cancel, state, |(applier, outcomes), i| {
        let record = delta.record(&entries[i as usize]);
        let tile = tile(manifest, record.block)?;
        let mut bytes = blocks[record.block as usize].lock();
        let outcome = applier.apply(kernels, &tile, &record, table.get(record.block), &mut bytes);
        match outcome.map_err(|e| Error::Bug(format!("a delta made here: {e}")))? {
            Outcome::Applied => outcomes.applied += 1,
            Outcome::Skipped => outcomes.skipped += 1,
            Outcome::Refetch => outcomes.refetch += 1,
        }
        Ok::<(), Error>(())
    })?;
    Ok(states.iter().fold(Outcomes::default(), |a, (_, b)| Outcomes {
        applied: a.applied + b.applied,
        skipped: a.skipped + b.skipped,
        refetch: a.refetch + b.refetch,
    }))
}

/// The blocks of an image, each to be written by one thread. Default cuts are contiguous and in order.
fn split<'a>(manifest: &Manifest, image: &'a mut [u8]) -> Result<Vec<Mutex<&'a mut [u8]>>, Error> {
    let mut blocks = Vec::with_capacity(manifest.cuts().blocks() as usize);
    let mut rest = image;
    for i in 0..manifest.cuts().blocks() {
        let (bytes, after) = rest.split_at_mut(tile(manifest, i)?.bytes());
        rest = after;
        blocks.push(Mutex::new(bytes));
    }
    Ok(blocks)
}
