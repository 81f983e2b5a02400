//! The memory of a baseline: on the device, on the host, or in both.
//!
//! A kernel finds every block by an address of its own, and takes one of page-locked host memory as it takes one of the device. So
//! blocks are given to the device in their order for as long as its share lasts, and those behind are on the host; nothing else
//! knows the difference.

use windlass_core::choose::baseline::{Ask, Have, Keep, Placed, place};

use crate::cuda::driver::Gpu;
use crate::cuda::error::{CudaError, size};
use crate::cuda::memory::{DeviceBuffer, MappedBuffer};
use crate::region;

/// How a baseline is to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// Bytes of records that a pass may make; by default a sixteenth of the weights.
    pub room: Option<u64>,
    pub keep: Keep,
    /// Whether deltas were demanded; if not, at most half of what is free on the device is taken.
    pub is_demanded: bool,
    /// Ranks of this host that keep one too: each may take so much of its free memory.
    pub ranks: u32,
}

/// All of it on the device, or an error.
impl Default for Keeping {
    fn default() -> Keeping {
        Keeping { room: None, keep: Keep::Device, is_demanded: true, ranks: 1 }
    }
}

/// Blocks and records.
#[derive(Debug)]
pub(super) struct Kept {
    /// Where each block is.
    pub(super) bases: Vec<u64>,
    pub(super) out: DeviceBuffer,
    device: Option<DeviceBuffer>,
    host: Option<MappedBuffer>,
}

impl Kept {
    /// Memory for blocks of so many bytes, each of which begins at a multiple of 16.
    pub(super) fn new(gpu: &Gpu, blocks: &[u64], how: &Keeping) -> Result<Kept, CudaError> {
        match Kept::placed(gpu, blocks, how) {
            // Another process was faster.
            Err(error @ CudaError::OutOfMemory { .. }) if how.keep == Keep::Auto => {
                tracing::warn!(%error, "the whole baseline is kept on the host");
                Kept::placed(gpu, blocks, &Keeping { keep: Keep::Host, ..*how })
            }
            made => made,
        }
    }

    fn placed(gpu: &Gpu, blocks: &[u64], how: &Keeping) -> Result<Kept, CudaError> {
        let weights = blocks.iter().map(|b| b.next_multiple_of(16)).sum();
        let Keeping { room: records, keep, is_demanded, ranks } = *how;
        let ask = Ask { weights, records, keep, is_demanded };
        let (free, total) = gpu.memory()?;
        let host = region::memory_room().map(|room| room.free / u64::from(ranks.max(1)));
        let placed = place(&ask, &Have { free, total: Some(total), host })?;
        let (on_device, offsets) = split(blocks, placed.device);
        let device =
            offsets[..on_device].last().map_or(0, |o| o + blocks[on_device - 1].next_multiple_of(16));
        let remedy = "let it be on the host (baseline=\"host\"), or publish by copy (offload_mode=\"copy\")";
        // What is made before something fails goes when this returns.
        let out =
            DeviceBuffer::new(gpu, placed.records.next_multiple_of(4), "the records of delta mode", remedy)?;
        let on_gpu = |bytes| DeviceBuffer::new(gpu, bytes, "the baseline of delta mode", remedy);
        let on_host = |bytes| MappedBuffer::new(gpu, bytes, "the baseline of delta mode");
        let device = (on_device > 0).then(|| on_gpu(device)).transpose()?;
        let host = (on_device < blocks.len())
            .then(|| on_host(weights - device.as_ref().map_or(0, DeviceBuffer::bytes)))
            .transpose()?;
        let first = device.as_ref().map_or(0, DeviceBuffer::address);
        let second = host.as_ref().map_or(0, MappedBuffer::address);
        let base = |(i, offset)| if i < on_device { first + offset } else { second + offset };
        let bases = offsets.into_iter().enumerate().map(base).collect();
        let kept = Kept { bases, out, device, host };
        kept.tell();
        Ok(kept)
    }

    /// Where the weights and the records are.
    pub(super) fn place(&self) -> Placed {
        Placed {
            device: self.device.as_ref().map_or(0, DeviceBuffer::bytes),
            host: self.host.as_ref().map_or(0, MappedBuffer::bytes),
            records: self.out.bytes(),
        }
    }

    fn tell(&self) {
        let placed = self.place();
        tracing::debug!(
            device = size(placed.device),
            host = size(placed.host),
            records = size(placed.records),
            "a baseline is kept"
        );
    }
}

/// How many of these blocks are within the first `device` bytes, and where each begins in its memory.
fn split(blocks: &[u64], device: u64) -> (usize, Vec<u64>) {
    let (mut on_device, mut at, mut offsets) = (0, 0, Vec::with_capacity(blocks.len()));
    let mut is_host = false;
    for block in blocks {
        let bytes = block.next_multiple_of(16);
        if !is_host && at + bytes > device {
            (is_host, at) = (true, 0);
        }
        on_device += usize::from(!is_host);
        offsets.push(at);
        at += bytes;
    }
    (on_device, offsets)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blocks_go_to_the_device_until_one_does_not_fit() {
        assert_eq!(split(&[100, 30, 16, 1], 160), (3, vec![0, 112, 144, 0]));
        assert_eq!(split(&[100, 30, 16, 1], 159), (2, vec![0, 112, 0, 16]));
        // One that would fit behind one that does not is on the host too: the tail is.
        assert_eq!(split(&[100, 300, 16], 128), (1, vec![0, 0, 304]));
        assert_eq!(split(&[16, 16], 0), (0, vec![0, 16]));
        assert_eq!(split(&[], 0), (0, vec![]));
    }

    proptest! {
        #[test]
        fn no_block_lies_over_another(
            blocks in prop::collection::vec(1u64..500, 0..40),
            device in 0u64..8000,
        ) {
            let (on_device, offsets) = split(&blocks, device);
            prop_assert_eq!(offsets.len(), blocks.len());
            for (i, offset) in offsets.iter().enumerate() {
                let begins = i == 0 || i == on_device;
                let end = if begins { 0 } else { offsets[i - 1] + blocks[i - 1].next_multiple_of(16) };
                prop_assert_eq!(*offset, end);
                prop_assert!(i >= on_device || offset + blocks[i].next_multiple_of(16) <= device);
            }
        }
    }
}
