//! A load plan on a device: an image, or what changed, into the live parameters of an engine.
//!
//! Owns: [`DevicePlan`], the tables of a [`LoadPlan`] for parameters at given addresses, and their replay. Called by a
//! worker of an engine. Must not: decide which version is loaded, or know how an image came to the host.
//!
//! | call | reads | does |
//! |---|---|---|
//! | [`DevicePlan::dense`] | an image on the device | all copies in one launch |
//! | [`DevicePlan::dense_from_host`] | an image on the host | the same, piece by piece, while the next piece is on its way |
//! | [`DevicePlan::stage`] | a delta on the host | brings it to the device; the engine goes on computing |
//! | [`DevicePlan::apply`] | a staged delta and the parameters | decodes and scatters it, in O(changes) |
//! | [`DevicePlan::digest`], or [`begin`](DevicePlan::begin_digest) and [`end`](DevicePlan::end_digest) | the parameters | their sums, as they would stand in the image ([`crate::load::Proof`]) |
//!
//! A delta leads from the weights in place to the next ones, so that applying it twice is wrong unless
//! sums are checked. With the sums of the image's blocks ([`DevicePlan::set_sums`]) every record is, as on a CPU: skipped
//! where the block has its sum already, refused where the units in place do not lead to it. Without, and for tensors of which
//! the worker holds only a part, whoever calls vouches for the base, and the digest shows whether that was right. Who has no
//! sums at hand takes those of the parameters themselves ([`DevicePlan::sum_blocks`]), which the digest proves.
//! Context records, which are for slow links, are refused when a delta is staged ([`CudaError::Context`]): the host decodes them
//! into the image, and the worker loads from that.
//!
//! | | must hold | test |
//! |---|---|---|
//! | GPU-LOAD-1 | The boxes of a dense load write what the plan writes, once each. | `boxes_of_a_plan_write_what_the_plan_does` |
//! | GPU-LOAD-2 | Every unit of a tensor is found in all its places, and no other. | `pieces_of_a_block_are_where_the_plan_puts_them` |
//! | GPU-LOAD-3 | The spans of a digest are the parameters at their places in the tensors. | `spans_of_a_digest_are_the_boxes_that_a_worker_holds` |
//! | GPU-LOAD-4 | The sums of blocks that parameters hold whole are those of the image. | `spans_of_blocks_give_the_sums_of_the_image` |
//! | GPU-LOAD-5 | Records go to the kernel of their unit, with sums where all of their block is held; context records are refused. | `records_go_to_the_kernel_of_their_unit`, `context_records_are_refused` |

#![allow(unsafe_code)]

mod tables;

use std::any::Any;
use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use windlass_core::delta::Delta;
use windlass_core::digest::BlockSum;

use self::tables::{Group, Places, Replay, Sorted, block_spans, chunks, replays, spans, table};
use super::driver::{Event, Gpu, Stream, StreamHandle};
use super::error::CudaError;
use super::kernels::{ApplyArgs, CopyArgs, CopyBox, Kernel, Patch, SumArgs, Tally};
use super::launch::tally;
use super::memory::{DeviceBuffer, HostBuffer, Registration, SMALL};
use super::nvtx::Named;
use crate::load::{HeldBox, LoadPlan, Loaded, Proof};
use crate::shm::{Mapping, copy_slice};
use crate::stop::{Stop, lap};

/// Bytes of an image that are on their way from the host at a time.
const CHUNK: u64 = 64 << 20;
/// Pieces of host memory that stay registered.
const PINNED: usize = 4;
/// Buffers of dropped deltas that are kept, three to a delta.
const KEPT: usize = 6;
/// Waste that is not worth another buffer.
const LITTLE: u64 = 1 << 20;

/// Device memory of deltas that were dropped. Giving it back waits for whatever the device computes, and the next delta
/// needs as much.
#[derive(Debug, Default)]
struct Spare(Mutex<Vec<DeviceBuffer>>);

impl Spare {
    /// A buffer of at least so many bytes.
    fn take(&self, gpu: &Gpu, bytes: u64, what: &'static str) -> Result<DeviceBuffer, CudaError> {
        {
            let mut free = self.0.lock();
            // The smallest that does, if that is not far too large.
            free.sort_by_key(DeviceBuffer::bytes);
            let fits = |b: &DeviceBuffer| b.bytes() >= bytes && b.bytes() <= bytes.saturating_mul(4) + LITTLE;
            if let Some(i) = free.iter().position(fits) {
                return Ok(free.swap_remove(i));
            }
        }
        let more = bytes + bytes / 4;
        DeviceBuffer::new(gpu, more, what, SMALL).or_else(|_| {
            // What is kept for later may be what is missing now.
            self.0.lock().clear();
            DeviceBuffer::new(gpu, bytes, what, SMALL)
        })
    }

    /// Keeps a buffer; the oldest beyond a few go.
    fn put(&self, buffer: DeviceBuffer) {
        let mut free = self.0.lock();
        free.push(buffer);
        if free.len() > KEPT {
            free.remove(0);
        }
    }
}

/// A delta on the device, for one plan. Its memory is kept for the next one; nothing may be under way in it when it is
/// dropped, and nothing is: [`DevicePlan::apply`] waits.
pub struct Staged {
    memory: Option<[DeviceBuffer; 3]>,
    spare: Arc<Spare>,
    groups: Vec<Group>,
    /// For each patch, its block.
    blocks: Vec<u32>,
    bytes: u64,
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.memory.take().into_iter().flatten().for_each(|buffer| self.spare.put(buffer));
    }
}

impl Staged {
    /// Addresses of the payloads, the index, and the outcomes.
    fn addresses(&self) -> [u64; 3] {
        self.memory.as_ref().map_or([0; 3], |m| m.each_ref().map(DeviceBuffer::address))
    }

    /// Records that reach this worker.
    pub fn records(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl std::fmt::Debug for Staged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Staged").field("records", &self.blocks.len()).finish_non_exhaustive()
    }
}

/// What applying a delta did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Records that changed their block.
    pub applied: u64,
    /// Records whose block had its sum already.
    pub skipped: u64,
}

/// A load plan for parameters on a device.
pub struct DevicePlan {
    // Finished before memory is given back.
    stream: Stream,
    link: Stream,
    gpu: Gpu,
    plan: Arc<LoadPlan>,
    addresses: Vec<u64>,
    replays: Vec<Replay>,
    boxes: DeviceBuffer,
    tally: DeviceBuffer,
    /// Made when they are first needed.
    sparse: Option<Sparse>,
    digest: Option<Digest>,
    way: Option<Way>,
    spare: Arc<Spare>,
    /// Host memory that deltas come in, where the device reads it itself.
    pinned: Vec<(usize, Registration)>,
    /// Host memory that deltas came in, and that is not registered yet.
    noted: Vec<Arc<Mapping>>,
    /// Whether the system has refused to pin memory.
    is_refused: bool,
    /// Memory for the index of the next delta.
    index: Option<HostBuffer>,
}

/// Tables that are made when they are first needed are not there.
const NO_TABLES: CudaError = CudaError::Count { what: "tables of blocks", expected: 1, found: 0 };

/// Finishes a stream when dropped.
struct Drain<'a>(&'a Stream);

impl Drop for Drain<'_> {
    fn drop(&mut self) {
        let _ = self.0.finish("copying a delta to the device");
    }
}

struct Sparse {
    places: Places,
    place_table: DeviceBuffer,
    piece_table: DeviceBuffer,
    sums: Option<DeviceBuffer>,
}

struct Digest {
    held: Vec<(u32, usize, HeldBox)>,
    spans: DeviceBuffer,
    count: usize,
    sums: DeviceBuffer,
}

/// From the host to the device, two pieces at a time.
struct Way {
    device: DeviceBuffer,
    arrived: [Event; 2],
    used: [Event; 2],
    host: Option<[HostBuffer; 2]>,
}

impl std::fmt::Debug for DevicePlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DevicePlan")
            .field("targets", &self.addresses.len())
            .field("boxes", &self.replays.len())
            .finish_non_exhaustive()
    }
}

impl DevicePlan {
    /// Tables for the plan's targets at `addresses`.
    pub fn new(gpu: &Gpu, plan: &Arc<LoadPlan>, addresses: &[u64]) -> Result<DevicePlan, CudaError> {
        if addresses.len() != plan.targets().len() {
            let (expected, found) = (plan.targets().len(), addresses.len());
            return Err(CudaError::Count { what: "addresses", expected, found });
        }
        gpu.check_addresses("parameter", addresses)?;
        gpu.kernels().prepare(gpu, &[Kernel::Copy])?;
        let replays = replays(plan, addresses)?;
        let stream = Stream::new(gpu)?;
        Ok(DevicePlan {
            boxes: DeviceBuffer::of(&stream, &table(&replays), "the table of copies")?,
            tally: tally(gpu)?,
            link: Stream::new(gpu)?,
            stream,
            gpu: gpu.clone(),
            plan: Arc::clone(plan),
            addresses: addresses.to_vec(),
            replays,
            sparse: None,
            digest: None,
            way: None,
            spare: Arc::default(),
            pinned: Vec::new(),
            noted: Vec::new(),
            is_refused: false,
            index: None,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<LoadPlan> {
        &self.plan
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Copies all of the image whose data begins at `image` on this device, or of the tensors in `only`.
    pub fn dense(
        &mut self,
        image: u64,
        only: Option<&[String]>,
        after: StreamHandle,
        stop: &Stop,
    ) -> Result<Loaded, CudaError> {
        let _named = Named::new("dense load");
        self.gpu.check_addresses("image", &[image])?;
        let chosen = self.plan.chosen(only)?;
        let loaded = self.loaded(&chosen);
        self.gpu.wait_for(after, stop)?;
        let some;
        let (table, count) = if only.is_none() {
            (&self.boxes, self.replays.len())
        } else {
            let these: Vec<_> = self.replays.iter().copied().filter(|r| chosen[r.tensor as usize]).collect();
            some = DeviceBuffer::of(&self.stream, &self::table(&these), "the table of copies")?;
            (&some, these.len())
        };
        let started = self.stream.zero(&self.tally, self.tally.bytes()).and_then(|()| {
            let args = self.copy_args(table.address(), image, count, 0);
            // SAFETY: boxes of a plan that was checked against the layout of the image and the targets.
            unsafe { self.gpu.kernels().launch(&self.stream, Kernel::Copy, &args, count as u64) }
        });
        self.stream.finish("copying weights into the parameters")?;
        started?;
        Ok(loaded)
    }

    fn copy_args(&self, copies: u64, from: u64, count: usize, work: u32) -> CopyArgs {
        CopyArgs { copies, from, to: 0, tally: self.tally.address(), count: count as u32, work }
    }

    fn loaded(&self, chosen: &[bool]) -> Loaded {
        let mut loaded = Loaded::default();
        for p in self.plan.pieces().iter().filter(|p| chosen[p.tensor as usize]) {
            loaded.bytes += p.bytes();
            loaded.elements += p.bytes() / p.item;
            loaded.copies += 1;
        }
        loaded
    }

    /// Copies all of an image on the host, or of the tensors in `only`. Memory that is registered goes by itself;
    /// other memory is copied by `threads` on the way.
    pub fn dense_from_host(
        &mut self,
        image: &[u8],
        only: Option<&[String]>,
        after: StreamHandle,
        threads: usize,
        stop: &Stop,
    ) -> Result<Loaded, CudaError> {
        let _named = Named::new("dense load from host");
        self.plan.check_image(image)?;
        let chosen = self.plan.chosen(only)?;
        let loaded = self.loaded(&chosen);
        if loaded.bytes == 0 {
            return Ok(loaded);
        }
        let is_pinned = self.gpu.is_pinned(image.as_ptr().expose_provenance() as u64)?
            && self.gpu.is_pinned(image.as_ptr().expose_provenance() as u64 + image.len() as u64 - 1)?;
        let mut way = self.take_way(!is_pinned)?;
        let some;
        let (replays, boxes) = if only.is_none() {
            (&self.replays[..], &self.boxes)
        } else {
            let these: Vec<_> = self.replays.iter().copied().filter(|r| chosen[r.tensor as usize]).collect();
            some = (DeviceBuffer::of(&self.stream, &table(&these), "the table of copies")?, these);
            (&some.1[..], &some.0)
        };
        self.gpu.wait_for(after, stop)?;
        let started = self.pull(image, (replays, boxes), &mut way, threads, stop);
        let arrived = self.link.finish("copying the image to the device");
        let finished = self.stream.finish("copying weights into the parameters");
        self.way = Some(way);
        started.and(arrived).and(finished)?;
        Ok(loaded)
    }

    fn take_way(&mut self, by_host: bool) -> Result<Way, CudaError> {
        let gpu = &self.gpu;
        let mut way = match self.way.take() {
            Some(way) => way,
            None => Way {
                device: DeviceBuffer::new(gpu, 2 * CHUNK, "weights on their way from the host", SMALL)?,
                arrived: [Event::new(gpu)?, Event::new(gpu)?],
                used: [Event::new(gpu)?, Event::new(gpu)?],
                host: None,
            },
        };
        if by_host && way.host.is_none() {
            let buffer = || HostBuffer::new(gpu, CHUNK, "weights on their way to the device");
            way.host = Some([buffer()?, buffer()?]);
        }
        Ok(way)
    }

    fn pull(
        &self,
        image: &[u8],
        (replays, boxes): (&[Replay], &DeviceBuffer),
        way: &mut Way,
        threads: usize,
        stop: &Stop,
    ) -> Result<(), CudaError> {
        self.stream.zero(&self.tally, self.tally.bytes())?;
        for (n, chunk) in chunks(replays, CHUNK).into_iter().enumerate() {
            let half = n % 2;
            stop.check().map_err(|stopped| CudaError::Stopped {
                stage: "copying the image to the device, of which the parameters hold a part",
                stopped,
            })?;
            let device = way.device.address() + half as u64 * CHUNK;
            let source = &image[chunk.bytes.start as usize..chunk.bytes.end as usize];
            if n >= 2 {
                self.link.follow(&way.used[half])?;
            }
            if n > 0 && n % 8 == 0 {
                self.stream.zero(&self.tally, self.tally.bytes())?;
            }
            match &mut way.host {
                Some(buffers) => {
                    if n >= 2 {
                        way.arrived[half].wait("copying the image to the device", &Stop::never())?;
                    }
                    let buffer = &mut buffers[half].bytes_mut()[..source.len()];
                    copy_by(threads, source, buffer);
                    // SAFETY: the half on the device is free; the buffer is written again only after `arrived`.
                    unsafe { self.link.upload(buffer, device) }?;
                }
                // SAFETY: as above; the image is pinned and stays until the stream is finished.
                None => unsafe { self.link.upload(source, device) }?,
            }
            self.link.mark(&way.arrived[half])?;
            self.stream.follow(&way.arrived[half])?;
            let copies = boxes.address() + (chunk.boxes.start * size_of::<CopyBox>()) as u64;
            let from = device.wrapping_sub(chunk.bytes.start);
            let args = self.copy_args(copies, from, chunk.boxes.len(), (n % 8) as u32);
            // SAFETY: boxes that lie in the piece of the image that has arrived.
            unsafe {
                self.gpu.kernels().launch(&self.stream, Kernel::Copy, &args, chunk.boxes.len() as u64)
            }?;
            self.stream.mark(&way.used[half])?;
        }
        Ok(())
    }

    fn sparse(&mut self) -> Result<&Sparse, CudaError> {
        if self.sparse.is_none() {
            let places = Places::new(&self.plan, &self.addresses)?;
            self.sparse = Some(Sparse {
                place_table: DeviceBuffer::of(&self.stream, &places.blocks, "the table of blocks")?,
                piece_table: DeviceBuffer::of(&self.stream, &places.pieces, "the table of pieces")?,
                places,
                sums: None,
            });
        }
        self.sparse.as_ref().ok_or(NO_TABLES)
    }

    /// The sums of the blocks of the version that the parameters hold, all blocks of the layout in order, by which records
    /// are checked from now on. `None`: not any more.
    pub fn set_sums(&mut self, sums: Option<&[BlockSum]>) -> Result<(), CudaError> {
        let expected = self.sparse()?.places.blocks.len();
        let made = match sums {
            None => None,
            Some(sums) if sums.len() != expected => {
                return Err(CudaError::Count { what: "sums of blocks", expected, found: sums.len() });
            }
            Some(sums) => {
                let raw: Vec<[u64; 2]> = sums.iter().map(|s| s.0).collect();
                Some(DeviceBuffer::of(&self.stream, &raw, "the sums of blocks")?)
            }
        };
        if let Some(sparse) = &mut self.sparse {
            sparse.sums = made;
        }
        Ok(())
    }

    /// Takes the sums of what the parameters hold now for those of their blocks: the parameters must be a version whole,
    /// which [`DevicePlan::digest`] proves. They are only read.
    pub fn sum_blocks(&mut self, after: StreamHandle, stop: &Stop) -> Result<(), CudaError> {
        self.gpu.kernels().prepare(&self.gpu, &[Kernel::Sum])?;
        let manifest = Arc::clone(self.plan.manifest());
        let places = &self.sparse()?.places;
        let (spans, blocks) = (block_spans(&manifest, places)?, places.blocks.len());
        let table = DeviceBuffer::of(&self.stream, &spans, "the table of sums")?;
        let sums = DeviceBuffer::new(&self.gpu, blocks as u64 * 16, "the sums of blocks", SMALL)?;
        self.gpu.wait_for(after, stop)?;
        self.stream.zero(&self.tally, self.tally.bytes())?;
        self.stream.zero(&sums, sums.bytes())?;
        let args = SumArgs {
            spans: table.address(),
            sums: sums.address(),
            tally: self.tally.address(),
            count: spans.len() as u32,
            work: 0,
        };
        // SAFETY: spans of the targets, and a sum for each block; both tables stay until the stream is finished.
        let started =
            unsafe { self.gpu.kernels().launch(&self.stream, Kernel::Sum, &args, spans.len() as u64) };
        self.stream.finish("summing the blocks of the parameters")?;
        started?;
        if let Some(sparse) = &mut self.sparse {
            sparse.sums = Some(sums);
        }
        Ok(())
    }

    /// Takes the memory that deltas of up to so many bytes need, so that the first of them need not wait for it.
    pub fn reserve(&mut self, bytes: u64) -> Result<(), CudaError> {
        let blocks = self.sparse()?.places.blocks.len();
        let index = (blocks * size_of::<Patch>()) as u64;
        let spare = Arc::clone(&self.spare);
        let sizes = [
            (bytes + 16, "a delta"),
            (index, "the index of a delta"),
            (blocks as u64 * 4, "the outcomes of a delta"),
        ];
        let taken = sizes.map(|(bytes, what)| spare.take(&self.gpu, bytes, what));
        for buffer in taken {
            spare.put(buffer?);
        }
        if self.index.is_none() {
            self.index = Some(HostBuffer::new(&self.gpu, index + index / 4, "the index of a delta")?);
        }
        self.way = Some(self.take_way(true)?);
        Ok(())
    }

    /// Brings the records of a delta of this layout to the device, those of the tensors in `only` or all; the parameters are
    /// not touched.
    pub fn stage(
        &mut self,
        delta: &Delta<'_>,
        only: Option<&[String]>,
        stop: &Stop,
    ) -> Result<Staged, CudaError> {
        self.stage_unread(delta.bytes(), || Ok(delta), only, stop)
    }

    /// [`DevicePlan::stage`] of a container that nobody has read yet: `read` does while the bytes are on their way.
    ///
    /// # Panics
    /// If `read` gives the delta of other bytes.
    pub fn stage_unread<'a, D: Borrow<Delta<'a>>, E: From<CudaError>>(
        &mut self,
        bytes: &'a [u8],
        read: impl FnOnce() -> Result<D, E>,
        only: Option<&[String]>,
        stop: &Stop,
    ) -> Result<Staged, E> {
        let _named = Named::new("stage");
        let mut begun = Instant::now();
        let chosen = self.plan.chosen(only).map_err(CudaError::from)?;
        let spare = Arc::clone(&self.spare);
        let payload = spare.take(&self.gpu, bytes.len() as u64 + 16, "a delta")?;
        self.sparse()?;
        let kept = self.index.take();
        let sent = self.send(bytes, payload.address(), stop);
        // Whatever is wrong, the device may be reading `bytes` until the link is finished: also if this panics.
        let drain = Drain(&self.link);
        let made = read().and_then(|delta| {
            let (delta, read_ms) = (delta.borrow(), lap(&mut begun));
            assert!(std::ptr::eq(delta.bytes(), bytes), "the delta of other bytes than those that were sent");
            let (index, groups) = self.indexed(delta, &chosen, kept)?;
            Ok((index, groups, read_ms, lap(&mut begun)))
        });
        std::mem::forget(drain);
        self.link.finish("copying a delta to the device")?;
        sent?;
        let (index, groups, read_ms, index_ms) = made?;
        let wait_ms = lap(&mut begun);
        let kernels: Vec<_> = groups.iter().map(|g| g.kernel).collect();
        self.gpu.kernels().prepare(&self.gpu, &kernels)?;
        let count: usize = groups.iter().map(|g| g.count).sum();
        let table = spare.take(&self.gpu, (count * size_of::<Patch>()) as u64, "the index of a delta")?;
        let outcomes = spare.take(&self.gpu, count as u64 * 4, "the outcomes of a delta")?;
        let patches = &index.table::<Patch>()[..count];
        self.stream.upload_table(patches, &table)?;
        let blocks = patches.iter().map(|p| p.place).collect();
        self.index = Some(index);
        let table_ms = lap(&mut begun);
        let bytes = bytes.len();
        tracing::debug!(bytes, count, read_ms, index_ms, wait_ms, table_ms, "a delta is on the device");
        Ok(Staged {
            bytes: payload.bytes() + table.bytes() + outcomes.bytes(),
            memory: Some([payload, table, outcomes]),
            spare,
            groups,
            blocks,
        })
    }

    /// The records of a delta that reach this worker, in pinned memory: what is kept of the last one, if that is enough.
    fn indexed(
        &self,
        delta: &Delta<'_>,
        chosen: &[bool],
        kept: Option<HostBuffer>,
    ) -> Result<(HostBuffer, Vec<Group>), CudaError> {
        let manifest = self.plan.manifest();
        delta.header.check(manifest)?;
        let Some(sparse) = &self.sparse else { return Err(NO_TABLES) };
        let sorted = Sorted::new(delta, manifest, &sparse.places, sparse.sums.is_some(), chosen)?;
        let bytes = (sorted.count() * size_of::<Patch>()) as u64;
        let mut index = match kept.filter(|i| i.bytes().len() as u64 >= bytes) {
            Some(index) => index,
            None => HostBuffer::new(&self.gpu, bytes + bytes / 4, "the index of a delta")?,
        };
        sorted.fill(delta, &mut index.table_mut()[..sorted.count()]);
        Ok((index, sorted.groups))
    }

    /// Notes memory that deltas come in again and again, to be registered by [`DevicePlan::pin_noted`]. Until then
    /// [`DevicePlan::stage`] copies them first, which takes less time than registering would.
    pub fn note(&mut self, memory: &Arc<Mapping>) {
        let at = memory.address().addr();
        let is_known = self.pinned.iter().any(|(known, _)| *known == at)
            || self.noted.iter().any(|noted| noted.address().addr() == at);
        if !self.is_refused && !is_known {
            self.noted.push(Arc::clone(memory));
        }
    }

    /// Whether [`DevicePlan::pin_noted`] has anything to do.
    pub fn has_noted(&self) -> bool {
        !self.noted.is_empty()
    }

    /// Lets the device read the memory that was noted by itself. Where the system does not let it, deltas go on being copied.
    /// The plan is not locked meanwhile: a delta may be applied.
    pub fn pin_noted(plan: &Mutex<DevicePlan>) {
        let lock = || plan.lock();
        let (gpu, noted) = {
            let mut plan = lock();
            (plan.gpu.clone(), std::mem::take(&mut plan.noted))
        };
        for memory in noted {
            let at = memory.address();
            // Memory is mapped by pages, whatever was asked for.
            let bytes = memory.len().next_multiple_of(rustix::param::page_size() as u64);
            let owner: Arc<dyn Any + Send + Sync> = memory;
            let made = Registration::new(&gpu, (at, bytes), false, owner);
            let mut plan = lock();
            match made {
                Ok(made) => {
                    if plan.pinned.len() >= PINNED {
                        plan.pinned.remove(0);
                    }
                    plan.pinned.push((at.addr(), made));
                }
                Err(error) => {
                    plan.is_refused = true;
                    tracing::info!(%error, "deltas go to the device through a buffer");
                    return;
                }
            }
        }
    }

    /// Copies bytes of the host to the device; where it reads them itself, they are on their way until the link is finished.
    fn send(&mut self, bytes: &[u8], to: u64, stop: &Stop) -> Result<(), CudaError> {
        let is_pinned = !bytes.is_empty() && self.gpu.is_pinned(bytes.as_ptr().expose_provenance() as u64)?;
        if is_pinned {
            // SAFETY: the buffer is as long; the caller finishes the link before either goes.
            return unsafe { self.link.upload(bytes, to) };
        }
        let mut way = self.take_way(true)?;
        let started = way.host.as_mut().map_or(Ok(()), |buffers| {
            for (n, source) in bytes.chunks(CHUNK as usize / 4).enumerate() {
                let half = n % 2;
                let stopped =
                    |stopped| CudaError::Stopped { stage: "copying a delta to the device", stopped };
                stop.check().map_err(stopped)?;
                if n >= 2 {
                    way.arrived[half].wait("copying a delta to the device", &Stop::never())?;
                }
                let buffer = &mut buffers[half].bytes_mut()[..source.len()];
                copy_by(4, source, buffer);
                // SAFETY: the buffer on the device is as long; that on the host is written again after `arrived`.
                unsafe { self.link.upload(buffer, to + n as u64 * (CHUNK / 4)) }?;
                self.link.mark(&way.arrived[half])?;
            }
            Ok(())
        });
        let finished = self.link.finish("copying a delta to the device");
        self.way = Some(way);
        started.and(finished)
    }

    /// Applies a delta that was staged for this plan to the parameters. A refused record is an error, and the parameters
    /// are a mixture until they are loaded whole.
    pub fn apply(&mut self, staged: &Staged, after: StreamHandle, stop: &Stop) -> Result<Applied, CudaError> {
        let _named = Named::new("apply");
        self.gpu.wait_for(after, stop)?;
        let started = self.start(staged);
        self.stream.finish("applying a delta to the parameters")?;
        started?;
        let told = self.stream.download_table::<Tally>(&self.tally, 1)?;
        let told = told.first().copied().unwrap_or_default();
        let [skipped, applied, refetch, malformed] = told.outcome.map(u64::from);
        if refetch + malformed == 0 {
            return Ok(Applied { applied, skipped });
        }
        let outcomes = match &staged.memory {
            Some([.., outcomes]) => self.stream.download_table::<u32>(outcomes, staged.blocks.len())?,
            None => Vec::new(),
        };
        let first = outcomes.iter().position(|o| *o >= 2).unwrap_or(0);
        Err(CudaError::Refused {
            refused: refetch + malformed,
            records: staged.blocks.len() as u64,
            block: staged.blocks.get(first).copied().unwrap_or(0),
            why: if outcomes.get(first) == Some(&2) {
                "the weights in place are not those that the delta begins from"
            } else {
                "it is malformed"
            },
        })
    }

    fn start(&self, staged: &Staged) -> Result<(), CudaError> {
        let Some(sparse) = &self.sparse else { return Ok(()) };
        self.stream.zero(&self.tally, self.tally.bytes())?;
        let [payload, patches, outcomes] = staged.addresses();
        for (work, group) in staged.groups.iter().enumerate() {
            let sums = sparse.sums.as_ref().filter(|_| group.is_checked);
            let args = ApplyArgs {
                places: sparse.place_table.address(),
                pieces: sparse.piece_table.address(),
                patches: patches + (group.first * size_of::<Patch>()) as u64,
                payload,
                sums: sums.map_or(0, DeviceBuffer::address),
                outcomes: outcomes + group.first as u64 * 4,
                tally: self.tally.address(),
                count: group.count as u32,
                work: work as u32,
            };
            // A warp takes a record, and a CTA has eight.
            let work = group.count.div_ceil(8) as u64;
            // SAFETY: tables of this plan; the kernel checks records before it writes, and writes only where pieces are.
            unsafe { self.gpu.kernels().launch(&self.stream, group.kernel, &args, work) }?;
        }
        Ok(())
    }

    /// The sums of what the parameters hold; see [`crate::load::combine`].
    pub fn digest(&mut self, after: StreamHandle, stop: &Stop) -> Result<Proof, CudaError> {
        self.begin_digest(after, stop)?;
        self.end_digest()
    }

    /// Begins to sum what the parameters hold. [`DevicePlan::end_digest`] waits for that; a delta may be staged meanwhile.
    pub fn begin_digest(&mut self, after: StreamHandle, stop: &Stop) -> Result<(), CudaError> {
        let _named = Named::new("digest");
        if self.digest.is_none() {
            self.gpu.kernels().prepare(&self.gpu, &[Kernel::Sum])?;
            let held = self.plan.held_boxes();
            let spans = spans(&held, &self.addresses)?;
            self.digest = Some(Digest {
                sums: DeviceBuffer::new(&self.gpu, held.len() as u64 * 16, "the sums of weights", SMALL)?,
                count: spans.len(),
                spans: DeviceBuffer::of(&self.stream, &spans, "the table of sums")?,
                held,
            });
        }
        let Some(d) = &self.digest else { return Ok(()) };
        self.gpu.wait_for(after, stop)?;
        self.stream.zero(&self.tally, self.tally.bytes())?;
        self.stream.zero(&d.sums, d.sums.bytes())?;
        let args = SumArgs {
            spans: d.spans.address(),
            sums: d.sums.address(),
            tally: self.tally.address(),
            count: d.count as u32,
            work: 0,
        };
        // SAFETY: spans of the targets, and a sum for each box.
        unsafe { self.gpu.kernels().launch(&self.stream, Kernel::Sum, &args, d.count as u64) }
    }

    /// Waits for the sums that [`DevicePlan::begin_digest`] began to make.
    pub fn end_digest(&mut self) -> Result<Proof, CudaError> {
        let Some(d) = &self.digest else { return Ok(self.plan.proof(std::iter::empty())) };
        let sums = self.stream.download_table::<[u64; 2]>(&d.sums, d.held.len())?;
        let boxes =
            d.held.iter().zip(sums).map(|((tensor, _, held), sum)| (*tensor, held.with(BlockSum(sum))));
        Ok(self.plan.proof(boxes))
    }
}

/// Copies with several threads.
fn copy_by(threads: usize, from: &[u8], to: &mut [u8]) {
    let each = from.len().div_ceil(threads.max(1)).next_multiple_of(4096).max(4096);
    std::thread::scope(|scope| {
        let mut parts = from.chunks(each).zip(to.chunks_mut(each));
        let mine = parts.next();
        for (from, to) in parts {
            scope.spawn(move || copy_slice(from, to));
        }
        if let Some((from, to)) = mine {
            copy_slice(from, to);
        }
    });
}

#[cfg(test)]
mod tests;
