//! Memory of a device that another process on the host reads.
//!
//! Owns: [`SharedMemory`] and [`Exported`] on the side of the owner, [`Opened`] on the side of the reader, [`Signal`],
//! by which each tells the other how far its stream has come, and [`CopyTable`], by which tensors are gathered into
//! shared memory and scattered out of it. Called by the IPC strategies of the package. Must not: know how handles
//! travel; whoever calls brings them to the other process.
//!
//! # Two kinds of memory
//!
//! *Legacy* memory comes of one call (`cuMemAlloc`, and torch's allocator by default). Its handle is 64 bytes of plain
//! data for the whole allocation; where a tensor lies in it is an offset. *Virtual* memory (torch's expandable segments) has
//! no such handle. It consists of granules, each of which can be exported as a file descriptor if it was made so that
//! it can, and is mapped by the reader one after another, so that a tensor which spans several is one range again.
//! What can be exported in neither way is [`CudaError::NotExported`], with the reason; its owner copies it
//! into memory of our own.
//!
//! # Signals
//!
//! A signal is an event of the device that two processes know. The owner records one on its stream behind the work that
//! fills memory and announces the memory without waiting for it; the reader records one behind its copies and
//! answers without waiting for them. Neither lets a stream wait for the other's signal: a process that is killed never
//! passes its signals, and a stream that waits for one is stuck for ever, with everything behind it. Instead the host
//! looks at a signal before it starts work that depends on it, with a deadline, and at the peer: the descriptor of a
//! socket to it, which ends when it does.
//!
//! # Life
//!
//! Physical memory lives until its owner has freed it and every reader has closed it, by itself or by its end. A
//! reader that outlives the owner still reads what was there.
//!
//! | | must hold | test |
//! |---|---|---|
//! | GPU-IPC-1 | A table copies within the memory that it is started on, or is refused. | `a_table_that_reaches_too_far_is_refused` |
//! | GPU-IPC-2 | A peer that is gone ends a wait, before its deadline. | `a_peer_that_hung_up_is_noticed_and_one_that_writes_is_not` |

#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use cudarc::driver::sys::CUresult;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::boxes::{Box2, Limits, boxes, cut};
use super::driver::{Event, Gpu, Stream, StreamHandle, check, text_of};
use super::error::CudaError;
use super::kernels::{CopyArgs, CopyBox, Kernel};
use super::launch::tally;
use super::memory::DeviceBuffer;
use super::nvtx::Named;
use crate::copies::{Copy, CopyError, MAX_DIMS};
use crate::stop::Stop;

/// Bytes of a handle.
pub const HANDLE: usize = 64;
/// A handle as it travels.
pub type Handle = [u8; HANDLE];
/// Bytes that a CTA copies at a time.
const PIECE: u64 = 256 << 10;
/// The most boxes of a table.
const MAX_BOXES: usize = 1 << 24;
/// The most granules of one range: as many descriptors as a message can carry, with some to spare.
pub const MAX_GRANULES: usize = 240;
/// How long to look at a signal without a pause.
const SPIN: Duration = Duration::from_millis(2);
/// Naps after that.
const NAP: Duration = Duration::from_micros(50);

/// A handle from outside.
pub fn handle_of(bytes: &[u8]) -> Result<Handle, CudaError> {
    bytes.try_into().map_err(|_| CudaError::Count {
        what: "bytes of a handle",
        expected: HANDLE,
        found: bytes.len(),
    })
}

/// Memory of our own that others can open.
#[derive(Debug)]
pub struct SharedMemory {
    buffer: DeviceBuffer,
    handle: Handle,
}

impl SharedMemory {
    /// So many bytes, of any content.
    pub fn new(gpu: &Gpu, bytes: u64) -> Result<SharedMemory, CudaError> {
        let remedy = "lower weight_transfer_threshold_cuda_ipc_GB: two buckets of it are needed";
        let buffer = DeviceBuffer::new(gpu, bytes, "the arena of the IPC strategy", remedy)?;
        let _current = gpu.current()?;
        let handle = memory_handle(buffer.address()).map_err(|code| {
            not_exported(buffer.address(), format!("cuIpcGetMemHandle: {}", text_of(code)))
        })?;
        Ok(SharedMemory { buffer, handle })
    }

    /// Where it is in this process.
    pub fn address(&self) -> u64 {
        self.buffer.address()
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> u64 {
        self.buffer.bytes()
    }

    /// What another process opens.
    pub fn handle(&self) -> Handle {
        self.handle
    }
}

/// The handle of legacy memory. The context is current.
fn memory_handle(address: u64) -> Result<Handle, CUresult> {
    let mut handle = sys::CUipcMemHandle_st { reserved: [0; HANDLE] };
    // SAFETY: writes 64 bytes; the driver checks the address.
    match unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) } {
        CUresult::CUDA_SUCCESS => Ok(handle.reserved.map(|b| b as u8)),
        code => Err(code),
    }
}

fn not_exported(address: u64, why: String) -> CudaError {
    CudaError::NotExported { address, why }
}

/// How somebody's memory can be had by another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a handle to its allocation.
    Legacy(Handle),
    /// By descriptors of granules, each of so many bytes.
    Granules(Vec<u64>),
}

/// The allocation, or the granules, that a tensor lies in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// How it can be had.
    pub way: Way,
    /// Where it begins in this process.
    pub base: u64,
    /// How many bytes it has.
    pub bytes: u64,
    /// Numbers of the driver by which it is not mistaken for a later one at the same address.
    pub ids: Vec<u64>,
}

impl Exported {
    /// Finds out how `bytes` at `address` can be exported.
    pub fn find(gpu: &Gpu, address: u64, bytes: u64) -> Result<Exported, CudaError> {
        gpu.check_addresses("tensor", &[address])?;
        let _current = gpu.current()?;
        let (base, size) = range(address)?;
        let end = address.saturating_add(bytes);
        match memory_handle(base) {
            Ok(handle) if end <= base + size => {
                return Ok(Exported { way: Way::Legacy(handle), base, bytes: size, ids: vec![id(address)?] });
            }
            Ok(_) => return Err(not_exported(address, "it is longer than its allocation".to_owned())),
            Err(_) => {}
        }
        let (mut sizes, mut ids, mut at) = (Vec::new(), Vec::new(), base);
        while at < end {
            let (begin, size) = range(at)?;
            if begin != at || size == 0 {
                return Err(not_exported(address, "its granules do not follow one another".to_owned()));
            }
            if sizes.len() == MAX_GRANULES {
                return Err(not_exported(address, format!("it has more than {MAX_GRANULES} granules")));
            }
            if sizes.is_empty() {
                // All of a segment are made in the same way; the first one tells.
                drop(granule(at)?);
            }
            sizes.push(size);
            ids.push(id(at)?);
            at += size;
        }
        Ok(Exported { way: Way::Granules(sizes), base, bytes: at - base, ids })
    }

    /// Whether the same memory is still there.
    pub fn is_there(&self, gpu: &Gpu) -> Result<bool, CudaError> {
        let _current = gpu.current()?;
        Ok(range(self.base).is_ok() && id(self.base).is_ok_and(|id| self.ids.first() == Some(&id)))
    }

    /// Descriptors of the granules, in their order; none for legacy memory.
    pub fn descriptors(&self, gpu: &Gpu) -> Result<Vec<OwnedFd>, CudaError> {
        let Way::Granules(sizes) = &self.way else { return Ok(Vec::new()) };
        let _current = gpu.current()?;
        let mut at = self.base;
        sizes
            .iter()
            .map(|size| {
                let found = granule(at);
                at += size;
                found
            })
            .collect()
    }
}

/// The allocation or granule at an address. The context is current.
fn range(address: u64) -> Result<(u64, u64), CudaError> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: writes two integers; the driver checks the address.
    let code = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address) };
    check(code, "cuMemGetAddressRange_v2", "finding the allocation of a tensor")?;
    Ok((base, size as u64))
}

/// The number of the allocation at an address. The context is current.
fn id(address: u64) -> Result<u64, CudaError> {
    let mut id = 0u64;
    let which = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
    // SAFETY: writes one integer of eight bytes.
    let code = unsafe { sys::cuPointerGetAttribute((&raw mut id).cast(), which, address) };
    check(code, "cuPointerGetAttribute", "telling an allocation from a later one")?;
    Ok(id)
}

const BY_DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A descriptor of the granule at an address. The context is current.
fn granule(at: u64) -> Result<OwnedFd, CudaError> {
    let mut retained = 0;
    // SAFETY: writes one handle, released below.
    let code = unsafe {
        sys::cuMemRetainAllocationHandle(
            &raw mut retained,
            std::ptr::with_exposed_provenance_mut(at as usize),
        )
    };
    if code != CUresult::CUDA_SUCCESS {
        let why = format!("it has neither a handle nor granules: {}", text_of(code));
        return Err(not_exported(at, why));
    }
    let mut descriptor: c_int = -1;
    // SAFETY: writes one descriptor; the handle was retained above and is released once.
    let code = unsafe {
        let code =
            sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), retained, BY_DESCRIPTOR, 0);
        let _ = sys::cuMemRelease(retained);
        code
    };
    if code != CUresult::CUDA_SUCCESS || descriptor < 0 {
        let why = format!(
            "it is virtual memory that was not made to be shared ({}): set TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1 where \
             torch knows it, or turn expandable_segments off",
            text_of(code)
        );
        return Err(not_exported(at, why));
    }
    // SAFETY: a fresh descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Memory of another process.
pub struct Opened {
    gpu: Gpu,
    at: u64,
    bytes: u64,
    /// Of granules; none where it is legacy memory.
    granules: Option<Vec<u64>>,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Opened {
    /// The allocation of a handle.
    pub fn legacy(gpu: &Gpu, handle: &Handle) -> Result<Opened, CudaError> {
        let _current = gpu.current()?;
        let handle = sys::CUipcMemHandle_st { reserved: handle.map(|b| b as std::ffi::c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        let mut at = 0;
        // SAFETY: writes one address; the driver checks the handle, and the mapping is closed on drop.
        let code = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut at, handle, flags) };
        opened(code, "memory")?;
        let mut opened = Opened { gpu: gpu.clone(), at, bytes: 0, granules: None };
        opened.bytes = range(at)?.1;
        Ok(opened)
    }

    /// One range of granules, by their descriptors.
    pub fn granules(gpu: &Gpu, descriptors: &[RawFd], sizes: &[u64]) -> Result<Opened, CudaError> {
        let (expected, found) = (sizes.len(), descriptors.len());
        if expected != found || found == 0 || found > MAX_GRANULES {
            return Err(CudaError::Count { what: "descriptors", expected, found });
        }
        let total = sizes.iter().try_fold(0u64, |sum, s| sum.checked_add(*s)).filter(|t| *t < 1 << 48);
        let total = total.ok_or_else(|| CudaError::Opening {
            what: "memory",
            code: 0,
            text: "granules of more bytes than a device has".to_owned(),
        })?;
        let _current = gpu.current()?;
        let mut at = 0;
        // SAFETY: reserves addresses, given back on drop.
        let code = unsafe { sys::cuMemAddressReserve(&raw mut at, total as usize, 0, 0, 0) };
        check(code, "cuMemAddressReserve", "opening memory of another process")?;
        let mut opened = Opened { gpu: gpu.clone(), at, bytes: total, granules: Some(Vec::new()) };
        for (descriptor, size) in descriptors.iter().zip(sizes) {
            opened.map(*descriptor, *size)?;
        }
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: gpu.facts().ordinal as c_int,
        };
        let access = sys::CUmemAccessDesc {
            location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: a range that was mapped just now.
        let code = unsafe { sys::cuMemSetAccess(at, total as usize, &raw const access, 1) };
        check(code, "cuMemSetAccess", "opening memory of another process")?;
        Ok(opened)
    }

    /// Maps the next granule.
    fn map(&mut self, descriptor: RawFd, size: u64) -> Result<(), CudaError> {
        let Some(mapped) = &mut self.granules else { return Ok(()) };
        let at = self.at + mapped.iter().sum::<u64>();
        let mut handle = 0;
        // SAFETY: writes one handle; the driver takes the descriptor's number as a pointer, and checks it.
        let code = unsafe {
            let number: *mut c_void = std::ptr::without_provenance_mut(descriptor as usize);
            sys::cuMemImportFromShareableHandle(&raw mut handle, number, BY_DESCRIPTOR)
        };
        self::opened(code, "a granule")?;
        // SAFETY: within the reserved range; the mapping keeps the memory when the handle is released.
        let code = unsafe {
            let code = sys::cuMemMap(at, size as usize, 0, handle, 0);
            let _ = sys::cuMemRelease(handle);
            code
        };
        check(code, "cuMemMap", "opening memory of another process")?;
        mapped.push(size);
        Ok(())
    }

    /// Where it is in this process.
    pub fn address(&self) -> u64 {
        self.at
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.current() else { return };
        // SAFETY: opened or mapped by this object. Work of this process on it was finished by whoever started it; as
        // with memory of our own, the driver waits for what is still under way.
        unsafe {
            match &self.granules {
                None => {
                    let _ = sys::cuIpcCloseMemHandle(self.at);
                }
                Some(sizes) => {
                    let _ = sys::cuCtxSynchronize();
                    let mut at = self.at;
                    for size in sizes {
                        let _ = sys::cuMemUnmap(at, *size as usize);
                        at += size;
                    }
                    let _ = sys::cuMemAddressFree(self.at, self.bytes as usize);
                }
            }
        }
    }
}

/// The error of opening something of another process.
fn opened(code: CUresult, what: &'static str) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED => Err(CudaError::NoPeerAccess {
            from: "of this process".to_owned(),
            to: "that exported the memory".to_owned(),
        }),
        code => Err(CudaError::Opening { what, code: code as i32, text: text_of(code) }),
    }
}

/// An event that two processes know. See the module.
pub struct Signal {
    event: Event,
    handle: Handle,
}

impl fmt::Debug for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signal").finish_non_exhaustive()
    }
}

impl Signal {
    /// One of our own, which counts as passed until it is recorded.
    pub fn new(gpu: &Gpu) -> Result<Signal, CudaError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint
            | sys::CUevent_flags::CU_EVENT_INTERPROCESS as c_uint;
        let event = Event::with_flags(gpu, flags)?;
        let _current = gpu.current()?;
        let mut handle = sys::CUipcEventHandle_st { reserved: [0; HANDLE] };
        // SAFETY: writes 64 bytes.
        let code = unsafe { sys::cuIpcGetEventHandle(&raw mut handle, event.raw()) };
        check(code, "cuIpcGetEventHandle", "exporting an event")?;
        Ok(Signal { event, handle: handle.reserved.map(|b| b as u8) })
    }

    /// One of another process.
    pub fn open(gpu: &Gpu, handle: &Handle) -> Result<Signal, CudaError> {
        let _current = gpu.current()?;
        let theirs = sys::CUipcEventHandle_st { reserved: handle.map(|b| b as std::ffi::c_char) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed on drop; the driver checks what it is given.
        opened(unsafe { sys::cuIpcOpenEventHandle(&raw mut raw, theirs) }, "an event")?;
        Ok(Signal { event: Event::from_raw(gpu, raw), handle: *handle })
    }

    /// What another process opens.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Behind all that was started on a stream so far.
    pub fn record(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.event.record(stream.raw())
    }

    /// Whether it is passed.
    pub fn is_past(&self) -> Result<bool, CudaError> {
        let _current = self.event.gpu().current()?;
        self.event.is_past("looking at a signal")
    }

    /// Waits until it is passed. With a socket to the peer, an end of that ends the wait: `PeerLost`.
    pub fn wait(&self, peer: Option<RawFd>, stage: &'static str, stop: &Stop) -> Result<(), CudaError> {
        let _named = Named::new("ipc wait");
        let _current = self.event.gpu().current()?;
        let spin_until = Instant::now() + SPIN;
        while !self.event.is_past(stage)? {
            stop.check().map_err(|stopped| CudaError::Stopped { stage, stopped })?;
            if Instant::now() < spin_until {
                std::hint::spin_loop();
                continue;
            }
            if peer.is_some_and(has_hung_up) {
                // What it did before it ended counts.
                return if self.event.is_past(stage)? { Ok(()) } else { Err(CudaError::PeerLost { stage }) };
            }
            std::thread::sleep(NAP.min(stop.nap()));
        }
        Ok(())
    }
}

/// Whether the other end of a socket is gone. A descriptor that is none is gone as well.
pub fn has_hung_up(descriptor: RawFd) -> bool {
    if descriptor < 0 {
        return true;
    }
    // SAFETY: used for one call; a number that is no descriptor any more is answered with a flag.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let mut polled = [PollFd::new(&descriptor, PollFlags::RDHUP)];
    let told = rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    told.is_ok() && polled[0].revents().intersects(gone)
}

/// A strided copy between two ranges of device memory: offsets in bytes, from the beginning of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub from: u64,
    /// Where it writes, how long the runs are, and how they repeat.
    pub copy: Copy,
}

/// The boxes of rows, and how far they reach on the sides of `from` and `to`.
fn plan(rows: &[Row]) -> Result<(Vec<CopyBox>, u64, u64), CudaError> {
    let limits = Limits { bytes: PIECE, span: u64::MAX / 4, scale: 1 };
    let (mut all, mut reads, mut writes) = (Vec::new(), 0, 0);
    for (index, row) in rows.iter().enumerate() {
        let dims = row.copy.dims.len();
        if dims > MAX_DIMS {
            return Err(CopyError::Dims { index, dims }.into());
        }
        let far = |span: Option<u64>, at: u64| {
            let end = span.and_then(|s| s.checked_add(at)).filter(|e| *e < u64::MAX / 8);
            end.ok_or(CopyError::Overflow { index })
        };
        reads = far(row.copy.span(|d| d.from), row.from)?.max(reads);
        writes = far(row.copy.span(|d| d.to), row.copy.at)?.max(writes);
        boxes(&row.copy, 1, |b| {
            cut(
                &Box2 { from: row.from + b.from, ..b },
                limits,
                |Box2 { to, from, to_pitch, from_pitch, run, count }| {
                    all.push(CopyBox { from, to, from_pitch, to_pitch, run, count });
                },
            );
        });
        if all.len() > MAX_BOXES {
            return Err(CudaError::Count {
                what: "boxes of a table at the most",
                expected: MAX_BOXES,
                found: all.len(),
            });
        }
    }
    Ok((all, reads, writes))
}

/// Many copies that are started at once, between any two ranges.
pub struct CopyTable {
    gpu: Gpu,
    boxes: DeviceBuffer,
    tally: DeviceBuffer,
    count: usize,
    reads: u64,
    writes: u64,
    bytes: u64,
    /// Where it was started last, and the end of that: its counters serve one launch at a time.
    last: Option<StreamHandle>,
    end: Event,
}

impl fmt::Debug for CopyTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyTable")
            .field("boxes", &self.count)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// A range of device memory: its address and bytes. The range from 0 on is all of the memory, for rows that have
/// addresses in place of offsets.
pub type Range = (u64, u64);
/// All memory.
pub const ALL: Range = (0, u64::MAX);

impl CopyTable {
    /// The table of these rows, which must not write anything twice.
    pub fn new(gpu: &Gpu, rows: &[Row]) -> Result<CopyTable, CudaError> {
        let (boxes, reads, writes) = plan(rows)?;
        gpu.kernels().prepare(gpu, &[Kernel::Copy])?;
        let stream = Stream::new(gpu)?;
        Ok(CopyTable {
            boxes: DeviceBuffer::of(&stream, &boxes, "the table of copies")?,
            tally: tally(gpu)?,
            count: boxes.len(),
            reads,
            writes,
            bytes: boxes.iter().map(|b| b.run * b.count).sum(),
            last: None,
            end: Event::new(gpu)?,
            gpu: gpu.clone(),
        })
    }

    /// Bytes that it copies.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing is waited for before the copies are started on this stream.
    pub fn starts_at_once(&self, on: StreamHandle) -> bool {
        self.last.is_none_or(|last| last == on)
    }

    /// Starts the copies on a stream and does not wait for them.
    ///
    /// Addresses are the promise of the caller, as in [`Gpu::check_addresses`]; that both ranges are memory of the device and
    /// long enough for the table is checked here.
    pub fn start(&mut self, from: Range, to: Range, on: StreamHandle, stop: &Stop) -> Result<(), CudaError> {
        let _named = Named::new("ipc copies");
        within("read", self.reads, from)?;
        within("written", self.writes, to)?;
        self.gpu.check_addresses("range", &[from.0, to.0])?;
        if !self.starts_at_once(on) {
            self.end.wait("waiting for the same copies on another stream", stop)?;
        }
        let args = CopyArgs {
            copies: self.boxes.address(),
            from: from.0,
            to: to.0,
            tally: self.tally.address(),
            count: self.count as u32,
            work: 0,
        };
        self.last = Some(on);
        let _current = self.gpu.current()?;
        // SAFETY: a buffer of our own.
        let code =
            unsafe { sys::cuMemsetD8Async(self.tally.address(), 0, self.tally.bytes() as usize, on.raw()) };
        check(code, "cuMemsetD8Async", "clearing memory")?;
        // SAFETY: boxes that end within both ranges; the table is given back only when the device is done with it.
        unsafe { self.gpu.kernels().launch_on(&self.gpu, on.raw(), Kernel::Copy, &args, self.count as u64)? };
        self.end.record(on.raw())
    }
}

fn within(what: &'static str, needed: u64, (_, bytes): Range) -> Result<(), CudaError> {
    if needed <= bytes { Ok(()) } else { Err(CudaError::Range { what, needed, bytes }) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixStream;

    use windlass_core::error::Kind;

    use super::*;
    use crate::copies::Dim;

    #[test]
    fn a_table_that_reaches_too_far_is_refused() {
        let line = Row { from: 8, copy: Copy { at: 64, run: 100, dims: vec![] } };
        let rows =
            Row { from: 0, copy: Copy { at: 0, run: 2, dims: vec![Dim { count: 10, to: 2, from: 50 }] } };
        let (boxes, reads, writes) = plan(&[line, rows]).unwrap();
        assert_eq!((reads, writes), (452, 164));
        assert_eq!(boxes.iter().map(|b| b.run * b.count).sum::<u64>(), 120);
        within("read", reads, (4096, 452)).unwrap();
        let e = within("read", reads, (4096, 451)).unwrap_err();
        assert_eq!(e.kind(), Kind::Invalid);
        assert!(e.to_string().contains("452") && e.to_string().contains("451"), "{e}");
    }

    #[test]
    fn rows_beyond_all_memory_are_refused_and_empty_ones_are_nothing() {
        let far = Row { from: u64::MAX - 4, copy: Copy { at: 0, run: 100, dims: vec![] } };
        assert!(matches!(plan(&[far]), Err(CudaError::Copy(CopyError::Overflow { index: 0 }))));
        let dims = vec![Dim { count: 1, to: 1, from: 1 }; MAX_DIMS + 1];
        let deep = Row { from: 0, copy: Copy { at: 0, run: 1, dims } };
        assert!(matches!(plan(&[deep]), Err(CudaError::Copy(CopyError::Dims { .. }))));
        let none = Row { from: 4, copy: Copy { at: 9, run: 0, dims: vec![] } };
        assert_eq!(plan(&[none]).unwrap(), (vec![], 4, 9));
    }

    #[test]
    fn a_peer_that_hung_up_is_noticed_and_one_that_writes_is_not() {
        use std::io::Write as _;

        let (ours, mut theirs) = UnixStream::pair().unwrap();
        assert!(!has_hung_up(ours.as_raw_fd()));
        theirs.write_all(b"words").unwrap();
        assert!(!has_hung_up(ours.as_raw_fd()));
        drop(theirs);
        assert!(has_hung_up(ours.as_raw_fd()));
        assert!(has_hung_up(-1));
    }

    #[test]
    fn a_handle_has_sixty_four_bytes() {
        assert_eq!(handle_of(&[7; 64]).unwrap(), [7; 64]);
        for bad in [0, 63, 65] {
            assert_eq!(handle_of(&vec![0; bad]).unwrap_err().kind(), Kind::Invalid);
        }
    }
}
