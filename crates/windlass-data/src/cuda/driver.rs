//! The driver, a device and its streams.
//!
//! Owns: loading the driver at first use, [`Gpu`] (a device and its primary context), streams and events, which are given
//! back when dropped; memory is in [`super::memory`]. Must not: know what is copied or why.

#![allow(unsafe_code)]

use std::error::Error as _;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUresult};
use libloading::Library;

use super::error::{CudaError, CudaVersion};
use super::kernels::Kernels;
use crate::stop::Stop;

/// The oldest CUDA that a driver must support: that of the PTX in this crate.
pub const NEEDS: CudaVersion = windlass_core::choose::NEEDS_DRIVER;
/// The oldest compute capability that the kernels run on.
const CAPABILITY: (u32, u32) = windlass_core::choose::NEEDS_CAPABILITY;
/// How long to look at an event without a pause.
const SPIN: Duration = Duration::from_millis(2);
/// Naps after that.
const NAP: Duration = Duration::from_micros(50);

/// Every function of the driver that is called in this crate: calling one that a library lacks would be a panic.
const FUNCTIONS: &[&str] = &[
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuInit",
    "cuIpcCloseMemHandle",
    "cuIpcGetEventHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenEventHandle",
    "cuIpcOpenMemHandle_v2",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemExportToShareableHandle",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAddressRange_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemRetainAllocationHandle",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyAsync",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleGetGlobal_v2",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuPointerGetAttribute",
    "cuPointerGetAttributes",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its number among those that are visible.
    pub ordinal: u32,
    pub name: String,
    /// `GPU-` and its UUID, as `nvidia-smi -L` writes it.
    pub uuid: String,
    pub capability: (u32, u32),
    /// What the driver supports.
    pub cuda: CudaVersion,
    pub memory: u64,
    pub processors: u32,
    /// Whether memory that is mapped for reading can be registered.
    pub registers_read_only: bool,
}

/// A caller's stream, as the driver knows it. Zero is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamHandle(pub u64);

impl StreamHandle {
    pub(super) fn raw(self) -> sys::CUstream {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }
}

/// What the driver says of a code.
pub(super) fn text_of(code: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, or there would be no code; it writes the address of a static string.
    unsafe {
        if sys::cuGetErrorString(code, &raw mut text) == CUresult::CUDA_SUCCESS && !text.is_null() {
            return CStr::from_ptr(text).to_string_lossy().into_owned();
        }
    }
    "an unknown error".to_owned()
}

/// The error of a call, unless it was a success.
pub(super) fn check(code: CUresult, call: &'static str, stage: &'static str) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CudaError::Call { call, stage, code: code as i32, text: text_of(code) }),
    }
}

/// As [`check`], for kernels.
pub(super) fn check_kernel(
    code: CUresult,
    kernel: &'static str,
    stage: &'static str,
) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CudaError::Kernel { kernel, stage, code: code as i32, text: text_of(code) }),
    }
}

/// Loads the driver and answers what it supports.
fn driver() -> Result<CudaVersion, CudaError> {
    // SAFETY: loading the driver runs its initialisers, which is what it is for.
    if !unsafe { sys::is_culib_present() } {
        // SAFETY: the same. What could not be loaded before is loaded again, for what the loader says.
        let said = unsafe { Library::new("libcuda.so.1") };
        return Err(CudaError::NoDriver {
            said: said.err().and_then(|e| Some(e.source()?.to_string())).unwrap_or_default(),
        });
    }
    for name in FUNCTIONS {
        // SAFETY: the library is there; the symbol is only looked for.
        if unsafe { sys::culib().get::<*const c_void>(name.as_bytes()) }.is_err() {
            return Err(CudaError::NoFunction { name, needs: NEEDS });
        }
    }
    let mut version = 0;
    // SAFETY: writes one integer; needs no initialisation.
    check(
        unsafe { sys::cuDriverGetVersion(&raw mut version) },
        "cuDriverGetVersion",
        "asking for its version",
    )?;
    let has = (version as u32 / 1000, version as u32 % 1000 / 10);
    if has < NEEDS {
        return Err(CudaError::OldDriver { has, needs: NEEDS });
    }
    // SAFETY: no arguments but a flag that must be zero; may be called often.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => Ok(has),
        CUresult::CUDA_ERROR_NOT_INITIALIZED => Err(CudaError::Forked),
        code => Err(CudaError::NoDevice { why: text_of(code) }),
    }
}

/// How many devices are visible.
pub fn count() -> Result<u32, CudaError> {
    driver()?;
    let mut count = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceGetCount(&raw mut count) }, "cuDeviceGetCount", "counting devices")?;
    if count == 0 { Err(CudaError::NoDevice { why: "none is visible".to_owned() }) } else { Ok(count as u32) }
}

/// What every visible device is. Makes no context.
pub fn devices() -> Result<Vec<Facts>, CudaError> {
    (0..count()?).map(facts).collect()
}

fn device(ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let count = count()?;
    if ordinal >= count {
        return Err(CudaError::NoSuchDevice { ordinal, count });
    }
    let mut device = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceGet(&raw mut device, ordinal as c_int) }, "cuDeviceGet", "finding a device")?;
    Ok(device)
}

pub(super) fn attribute(device: sys::CUdevice, attribute: Attribute) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: writes one integer.
    let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
    check(code, "cuDeviceGetAttribute", "asking what a device is")?;
    Ok(value as u32)
}

fn facts(ordinal: u32) -> Result<Facts, CudaError> {
    let (cuda, device) = (driver()?, device(ordinal)?);
    let stage = "asking what a device is";
    let mut name = [0; 256];
    // SAFETY: writes at most so many bytes, the last of them zero.
    check(
        unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device) },
        "cuDeviceGetName",
        stage,
    )?;
    // SAFETY: as above: a string that ends.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: writes sixteen bytes.
    check(unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) }, "cuDeviceGetUuid_v2", stage)?;
    let mut memory = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory, device) }, "cuDeviceTotalMem_v2", stage)?;
    let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let read_only = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)?;
    Ok(Facts {
        ordinal,
        name,
        uuid: uuid_text(&uuid.bytes.map(|b| b as u8)),
        capability: (major, minor),
        cuda,
        memory: memory as u64,
        processors: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        registers_read_only: read_only != 0,
    })
}

fn uuid_text(bytes: &[u8; 16]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// A device and its primary context. Clones share it.
#[derive(Clone)]
pub struct Gpu(Arc<Open>);

struct Open {
    device: sys::CUdevice,
    context: sys::CUcontext,
    facts: Facts,
    kernels: Kernels,
}

// SAFETY: handles of the driver may be used from any thread; the context is made current for every call.
unsafe impl Send for Open {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Open {}

impl Drop for Open {
    fn drop(&mut self) {
        self.kernels.unload(self.context);
        // SAFETY: retained once in `open`; everything made in it held this object. At the end of a process the driver
        // may be gone already, and says so.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gpu").field(&self.0.facts).finish()
    }
}

impl Gpu {
    /// The device of this number among the visible ones, as torch counts them.
    pub fn open(ordinal: u32) -> Result<Gpu, CudaError> {
        let facts = facts(ordinal)?;
        if facts.capability < CAPABILITY {
            return Err(CudaError::OldDevice { name: facts.name, capability: facts.capability });
        }
        let device = device(ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle, which is released on drop.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check(code, "cuDevicePrimaryCtxRetain", "opening a device")?;
        Ok(Gpu(Arc::new(Open { device, context, facts, kernels: Kernels::default() })))
    }

    /// The device of this UUID, with or without `GPU-`.
    pub fn by_uuid(uuid: &str) -> Result<Gpu, CudaError> {
        let wanted = uuid.trim_start_matches("GPU-").to_ascii_lowercase();
        let found = devices()?.into_iter().find(|f| f.uuid.trim_start_matches("GPU-") == wanted);
        let facts = found.ok_or_else(|| CudaError::NoSuchUuid { uuid: uuid.to_owned() })?;
        Gpu::open(facts.ordinal)
    }

    /// What it is.
    pub fn facts(&self) -> &Facts {
        &self.0.facts
    }

    /// Bytes that are free, and all of them.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let _current = self.current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        let code = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        check(code, "cuMemGetInfo_v2", "asking for free memory")?;
        Ok((free as u64, total as u64))
    }

    /// Whether kernels of this device can reach memory of the other.
    pub fn can_reach(&self, other: &Gpu) -> Result<bool, CudaError> {
        if self.0.device == other.0.device {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: writes one integer.
        let code = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.0.device, other.0.device) };
        check(code, "cuDeviceCanAccessPeer", "asking for peer access")?;
        Ok(can != 0)
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.0.device
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.0.kernels
    }

    /// Makes the context current on this thread until dropped.
    pub(super) fn current(&self) -> Result<Current, CudaError> {
        // SAFETY: the context lives as long as `self`; `Current` takes it back on the same thread.
        check(unsafe { sys::cuCtxPushCurrent_v2(self.0.context) }, "cuCtxPushCurrent_v2", "using a device")?;
        Ok(Current(std::marker::PhantomData))
    }

    /// Waits until `stream` has come to where it is now.
    pub fn wait_for(&self, stream: StreamHandle, stop: &Stop) -> Result<(), CudaError> {
        let event = Event::new(self)?;
        event.record(stream.raw())?;
        event.wait("waiting for the stream of the caller", stop)
    }

    /// Whether every address is memory of this device.
    pub fn check_addresses(&self, what: &'static str, addresses: &[u64]) -> Result<(), CudaError> {
        let _current = self.current()?;
        for (index, &address) in addresses.iter().enumerate().filter(|(_, a)| **a != 0) {
            let is = match owner(address)? {
                Memory::Device(ordinal) if ordinal == self.0.device => continue,
                Memory::Device(ordinal) => format!("memory of GPU {ordinal}"),
                Memory::Managed => continue,
                Memory::Host => "pinned host memory".to_owned(),
                Memory::Unknown => "memory that CUDA does not know".to_owned(),
            };
            let ordinal = self.0.facts.ordinal;
            return Err(CudaError::NotOfDevice { what, index, address, is, ordinal });
        }
        Ok(())
    }

    /// Whether DMA can reach this host memory.
    pub(super) fn is_pinned(&self, address: u64) -> Result<bool, CudaError> {
        let _current = self.current()?;
        Ok(matches!(owner(address)?, Memory::Host | Memory::Managed))
    }
}

/// Asks whose memory an address is. The context must be current.
fn owner(address: u64) -> Result<Memory, CudaError> {
    use sys::CUpointer_attribute as Pointer;
    let (mut kind, mut managed, mut ordinal) = (0u32, 0u32, -1i32);
    let mut which = [
        Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Pointer::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Pointer::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    ];
    let mut into: [*mut c_void; 3] =
        [(&raw mut kind).cast(), (&raw mut managed).cast(), (&raw mut ordinal).cast()];
    // SAFETY: three attributes of four bytes each, and a place for each. Unknown addresses are no error.
    let code = unsafe { sys::cuPointerGetAttributes(3, which.as_mut_ptr(), into.as_mut_ptr(), address) };
    check(code, "cuPointerGetAttributes", "asking whose an address is")?;
    Ok(match kind {
        _ if managed != 0 => Memory::Managed,
        1 => Memory::Host,
        2 => Memory::Device(ordinal),
        _ => Memory::Unknown,
    })
}

/// Whose memory an address is.
enum Memory {
    Device(i32),
    Managed,
    Host,
    Unknown,
}

/// The context is current on this thread while this lives.
pub(super) struct Current(std::marker::PhantomData<*mut ()>);

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed by `Gpu::current` on this very thread, as it is not `Send`.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    }
}

/// A point in a stream.
pub(super) struct Event {
    gpu: Gpu,
    raw: sys::CUevent,
}

// SAFETY: as for `Open`.
unsafe impl Send for Event {}
// SAFETY: as for `Open`.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(gpu: &Gpu) -> Result<Event, CudaError> {
        Event::with_flags(gpu, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint)
    }

    pub(super) fn with_flags(gpu: &Gpu, flags: c_uint) -> Result<Event, CudaError> {
        let _current = gpu.current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed on drop.
        check(unsafe { sys::cuEventCreate(&raw mut raw, flags) }, "cuEventCreate", "making an event")?;
        Ok(Event { gpu: gpu.clone(), raw })
    }

    /// One made elsewhere, destroyed with this object.
    pub(super) fn from_raw(gpu: &Gpu, raw: sys::CUevent) -> Event {
        Event { gpu: gpu.clone(), raw }
    }

    pub(super) fn raw(&self) -> sys::CUevent {
        self.raw
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(super) fn record(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        let _current = self.gpu.current()?;
        // SAFETY: an event of this context. The driver checks a caller's stream.
        check(unsafe { sys::cuEventRecord(self.raw, stream) }, "cuEventRecord", "marking a stream")
    }

    /// Whether the stream has passed it.
    pub(super) fn is_past(&self, stage: &'static str) -> Result<bool, CudaError> {
        // SAFETY: an event of our own.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, "cuEventQuery", stage).map(|()| true),
        }
    }

    pub(super) fn wait(&self, stage: &'static str, stop: &Stop) -> Result<(), CudaError> {
        let _current = self.gpu.current()?;
        let spin_until = Instant::now() + SPIN;
        while !self.is_past(stage)? {
            stop.check().map_err(|stopped| CudaError::Stopped { stage, stopped })?;
            if Instant::now() < spin_until {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(NAP.min(stop.nap()));
            }
        }
        Ok(())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.current() {
            // SAFETY: made by `new`; the driver keeps what a stream still needs of it.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// A stream of our own. Dropping it waits for what was started on it.
pub struct Stream {
    gpu: Gpu,
    raw: sys::CUstream,
    end: Event,
}

// SAFETY: as for `Open`.
unsafe impl Send for Stream {}
// SAFETY: as for `Open`.
unsafe impl Sync for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("gpu", &self.gpu.facts().ordinal).finish_non_exhaustive()
    }
}

impl Stream {
    /// A stream that waits for no other.
    pub fn new(gpu: &Gpu) -> Result<Stream, CudaError> {
        let end = Event::new(gpu)?;
        let _current = gpu.current()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: writes one handle, destroyed on drop.
        check(unsafe { sys::cuStreamCreate(&raw mut raw, flags) }, "cuStreamCreate", "making a stream")?;
        Ok(Stream { gpu: gpu.clone(), raw, end })
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// As others name it.
    pub fn handle(&self) -> StreamHandle {
        StreamHandle(self.raw.expose_provenance() as u64)
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Marks where the stream is.
    pub(super) fn mark(&self, event: &Event) -> Result<(), CudaError> {
        event.record(self.raw)
    }

    /// Goes on only when another stream of ours has passed `event`.
    pub(super) fn follow(&self, event: &Event) -> Result<(), CudaError> {
        let _current = self.gpu.current()?;
        // SAFETY: a stream and an event of one context.
        check(
            unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) },
            "cuStreamWaitEvent",
            "ordering two streams",
        )
    }

    /// Waits for all that was started. What runs here depends on nothing but the device, so there is no deadline, and
    /// memory that the work uses is free afterwards, whatever the answer.
    pub fn finish(&self, stage: &'static str) -> Result<(), CudaError> {
        let _current = self.gpu.current()?;
        let waited = self.mark(&self.end).and_then(|()| self.end.wait(stage, &Stop::never()));
        if waited.is_err() {
            // SAFETY: a stream of our own.
            let _ = unsafe { sys::cuStreamSynchronize(self.raw) };
        }
        waited
    }

    /// Copies `bytes` to an address of the device.
    ///
    /// # Safety
    /// The device memory must be there and not used otherwise meanwhile; `from` must stay until the stream is finished if it
    /// is pinned (the driver copies other memory before it returns).
    pub(super) unsafe fn upload(&self, from: &[u8], to: u64) -> Result<(), CudaError> {
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.gpu.current()?;
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.raw) };
        check(code, "cuMemcpyHtoDAsync_v2", "copying to the device")
    }

    /// Copies memory of the device to the host.
    ///
    /// # Safety
    /// `bytes` must be readable at `from`, and writable at `to` and not used otherwise until the stream is finished.
    pub(super) unsafe fn download(&self, from: u64, to: *mut u8, bytes: u64) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.gpu.current()?;
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes as usize, self.raw) };
        check(code, "cuMemcpyDtoHAsync_v2", "copying to the host")
    }

    /// As [`Stream::download`], where `from` may be mapped memory of the host too.
    ///
    /// # Safety
    /// As there; `to` must be pinned.
    pub(super) unsafe fn collect(&self, from: u64, to: *mut u8, bytes: u64) -> Result<(), CudaError> {
        let _current = self.gpu.current()?;
        let to = to.expose_provenance() as u64;
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuMemcpyAsync(to, from, bytes as usize, self.raw) };
        check(code, "cuMemcpyAsync", "copying to the host")
    }

    /// As [`Stream::download`] for `count` runs, with a pitch on either side.
    ///
    /// # Safety
    /// As there, for every run.
    pub(super) unsafe fn download_runs(
        &self,
        (from, from_pitch): (u64, u64),
        (to, to_pitch): (*mut u8, u64),
        (run, count): (u64, u64),
    ) -> Result<(), CudaError> {
        let _current = self.gpu.current()?;
        if from_pitch.max(to_pitch) > i32::MAX as u64 {
            // More than a DMA engine counts.
            return (0..count).try_for_each(|row| {
                let to = to.wrapping_add((row * to_pitch) as usize);
                // SAFETY: the caller's promise.
                unsafe { self.download(from + row * from_pitch, to, run) }
            });
        }
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: from,
            srcArray: std::ptr::null_mut(),
            srcPitch: from_pitch as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            dstHost: to.cast(),
            dstDevice: 0,
            dstArray: std::ptr::null_mut(),
            dstPitch: to_pitch as usize,
            WidthInBytes: run as usize,
            Height: count as usize,
        };
        // SAFETY: the caller's promise.
        check(
            unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.raw) },
            "cuMemcpy2DAsync_v2",
            "copying to the host",
        )
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.current() {
            // SAFETY: a stream of our own, which is no longer used; what was started ends first.
            unsafe {
                let _ = sys::cuStreamSynchronize(self.raw);
                let _ = sys::cuStreamDestroy_v2(self.raw);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use windlass_core::error::Kind;

    use super::*;

    #[test]
    fn without_a_driver_or_a_device_opening_says_which_is_missing() {
        match Gpu::open(0) {
            // A machine with a GPU: the number of one that is not there.
            Ok(gpu) => {
                assert!(gpu.facts().cuda >= NEEDS);
                let e = Gpu::open(4096).unwrap_err();
                assert!(matches!(e, CudaError::NoSuchDevice { ordinal: 4096, .. }), "{e}");
            }
            Err(e) => {
                assert!(
                    matches!(
                        e,
                        CudaError::NoDriver { .. } | CudaError::OldDriver { .. } | CudaError::NoDevice { .. }
                    ),
                    "{e}"
                );
                assert_eq!(e.kind(), Kind::Unsupported);
                assert!(
                    e.to_string().contains("NVIDIA driver") || e.to_string().contains("nvidia-smi"),
                    "{e}"
                );
            }
        }
    }

    /// The names after `sys::` in the sources of this folder.
    fn called() -> std::collections::BTreeSet<String> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda");
        let (mut folders, mut names) =
            (vec![std::path::PathBuf::from(folder)], std::collections::BTreeSet::new());
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|e| e == "rs") {
                    let text = std::fs::read_to_string(path).unwrap();
                    let words = text.split("sys::cu").skip(1).filter(|w| w.starts_with(char::is_uppercase));
                    let name = |w: &str| {
                        w.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap().to_owned()
                    };
                    names.extend(words.map(name).map(|n| format!("cu{n}")));
                }
            }
        }
        names
    }

    #[test]
    fn every_function_of_the_driver_that_is_called_is_looked_for_first() {
        let listed = FUNCTIONS.iter().map(|&n| n.to_owned()).collect();
        assert_eq!(called(), listed, "FUNCTIONS of cuda/driver.rs and the calls in cuda/");
    }

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_does() {
        let bytes = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(&bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
