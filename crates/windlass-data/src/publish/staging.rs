//! The encoder for tensors in host memory.
//!
//! Owns: memory as large as an image, of which only this rank's blocks are ever touched. The trainer's tensors are copied
//! there while it waits, as they would be into a slot in copy mode; comparing them with the slot of the base is done in
//! the background. It costs the memory of this rank's bytes. Where tensors are on a GPU its encoder is the better way;
//! this one is for hosts without, and for tests.

use std::sync::Arc;

use windlass_core::delta::container::Entry;
use windlass_core::delta::{Encoder, Tile};
use windlass_core::digest::sum_block;

use super::delta_mode::{Base, DeltaSource};
use super::{PublishError, Records};
use crate::copies::CopyTarget;
use crate::region::RegionError;
use crate::seal::SealError;
use crate::seal::pass::gather;
use crate::shm::Mapping;
use crate::stop::Stop;
use crate::work;

/// Where the tensors of the next version are put.
#[derive(Clone, Debug)]
pub struct Staging {
    memory: Arc<Mapping>,
}

impl Staging {
    /// Memory for images of so many bytes. It is taken when it is written.
    pub fn new(data_bytes: u64) -> Result<Staging, PublishError> {
        let what = "memory for the tensors of the next version";
        let memory =
            Mapping::anonymous(data_bytes).map_err(|source| PublishError::Exhausted { what, source })?;
        Ok(Staging { memory: Arc::new(memory) })
    }

    /// The memory: the data area of an image.
    pub fn memory(&self) -> &Arc<Mapping> {
        &self.memory
    }
}

impl CopyTarget for Staging {
    fn check(&self) -> Result<(), RegionError> {
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        let (end, len) = (offset.saturating_add(bytes.len() as u64), self.memory.len());
        if end > len {
            return Err(RegionError::Beyond { offset, end, len });
        }
        self.memory.copy_in(offset, bytes);
        Ok(())
    }
}

#[derive(Default)]
struct Hand {
    encoder: Encoder,
    old: Vec<u8>,
    new: Vec<u8>,
    entries: Vec<Entry>,
    payload: Vec<u8>,
    changes: u64,
}

impl DeltaSource for Staging {
    fn records(self: Box<Self>, base: Base<'_>, stop: &Stop) -> Result<Records, PublishError> {
        let kernels = crate::simd::kernels();
        let manifest = base.manifest;
        let data = self.memory.bytes(0..self.memory.len());
        let numbers: Vec<u32> = base.blocks.iter().collect();
        let hands = work::each(base.threads.max(1), numbers.len() as u64, stop, Hand::default, |hand, i| {
            let tile = Tile::of(manifest, numbers[i as usize])?;
            let range = manifest.tensors()[tile.block.tensor as usize].range();
            let range = range.start as usize..range.end as usize;
            let tensor = |image: &'_ [u8]| -> Result<std::ops::Range<usize>, SealError> {
                let (have, need) = (image.len() as u64, manifest.data_bytes());
                let which = "staged";
                if have < need {
                    Err(SealError::ImageLength { which, have, need })
                } else {
                    Ok(range.clone())
                }
            };
            let Hand { encoder, old, new, entries, payload, changes } = hand;
            let old = gather(&base.data[tensor(base.data)?], &tile, old)?;
            let new = gather(&data[tensor(data)?], &tile, new)?;
            let (at, sum) = (payload.len(), base.sums.get(tile.number));
            let Some(e) = encoder.encode(kernels, &tile, (old, sum), new, payload) else { return Ok(()) };
            // The sum of the base is a belief; summed from its own bytes, the new block shows whether it is right.
            if sum_block(kernels, &tile.block, tile.unit, new) != e.sum {
                return Err(SealError::BaseChanged { block: tile.number }.into());
            }
            let len = (payload.len() - at) as u32;
            entries.push(Entry { block: tile.number, mode: e.mode, sum: e.sum, offset: at, len });
            *changes += u64::from(e.changes);
            Ok::<(), PublishError>(())
        })?;
        let mut payload = Vec::with_capacity(hands.iter().map(|h| h.payload.len()).sum());
        let (mut entries, mut changes) = (Vec::new(), 0);
        for hand in hands {
            let before = payload.len();
            entries.extend(hand.entries.into_iter().map(|e| Entry { offset: before + e.offset, ..e }));
            payload.extend_from_slice(&hand.payload);
            changes += hand.changes;
        }
        entries.sort_unstable_by_key(|e| e.block);
        Records::new(entries, changes, Box::new(payload)).map_err(|source| PublishError::Records {
            rank: base.rank,
            version: base.version,
            source,
        })
    }
}
