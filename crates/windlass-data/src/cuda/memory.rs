//! Memory of a device, and memory of the host that a device reaches.
//!
//! Owns: what must be given back when dropped: device and pinned memory, registrations of host memory. Must not: know what is
//! in it.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys;
use cudarc::driver::sys::CUresult;

use super::driver::{Gpu, Stream, check, text_of};
use super::error::CudaError;

/// Types that are nothing but their bytes, without padding, on the host as on the device.
///
/// # Safety
/// `repr(C)` or an integer, no padding, valid for any bits.
pub(super) unsafe trait Plain: Copy {}

// SAFETY: integers.
unsafe impl Plain for u8 {}
// SAFETY: integers.
unsafe impl Plain for u32 {}
// SAFETY: integers.
unsafe impl Plain for u64 {}
// SAFETY: integers.
unsafe impl Plain for [u64; 2] {}

/// A table as bytes.
pub(super) fn bytes_of<T: Plain>(table: &[T]) -> &[u8] {
    // SAFETY: plain types have no padding.
    unsafe { std::slice::from_raw_parts(table.as_ptr().cast(), size_of_val(table)) }
}

/// Memory of the device. Given back when dropped, after whoever works on it has finished.
pub struct DeviceBuffer {
    gpu: Gpu,
    at: sys::CUdeviceptr,
    bytes: u64,
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl DeviceBuffer {
    /// So many bytes, of any content; aligned to 256. `what` and `remedy` are for the error.
    pub fn new(
        gpu: &Gpu,
        bytes: u64,
        what: &'static str,
        remedy: &'static str,
    ) -> Result<DeviceBuffer, CudaError> {
        let _current = gpu.current()?;
        let mut at = 0;
        // SAFETY: writes one address; zero bytes cannot be asked for.
        match unsafe { sys::cuMemAlloc_v2(&raw mut at, bytes.max(16) as usize) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = gpu.memory()?;
                Err(CudaError::OutOfMemory { what, asked: bytes, free, total, remedy })
            }
            code => {
                check(code, "cuMemAlloc_v2", what)?;
                Ok(DeviceBuffer { gpu: gpu.clone(), at, bytes })
            }
        }
    }

    /// A table on the device.
    pub(super) fn of<T: Plain>(
        stream: &Stream,
        table: &[T],
        what: &'static str,
    ) -> Result<DeviceBuffer, CudaError> {
        let buffer = DeviceBuffer::new(stream.gpu(), size_of_val(table) as u64, what, SMALL)?;
        stream.upload_table(table, &buffer)?;
        Ok(buffer)
    }

    /// Where it is.
    pub fn address(&self) -> u64 {
        self.at
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What to do when even a table does not fit.
pub(super) const SMALL: &str =
    "leave some memory to it (vLLM: gpu_memory_utilization), or use the host's copy of the weights";

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.current() {
            // SAFETY: allocated by `new`; freeing waits for what the device still does with it.
            let _ = unsafe { sys::cuMemFree_v2(self.at) };
        }
    }
}

/// Pinned memory of the host that kernels reach too, of any content.
pub struct MappedBuffer {
    gpu: Gpu,
    at: *mut u8,
    device: sys::CUdeviceptr,
    bytes: usize,
}

// SAFETY: memory of its own.
unsafe impl Send for MappedBuffer {}
// SAFETY: it is only an address.
unsafe impl Sync for MappedBuffer {}

impl fmt::Debug for MappedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedBuffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl MappedBuffer {
    /// So many bytes; they begin at a page.
    pub fn new(gpu: &Gpu, bytes: u64, what: &'static str) -> Result<MappedBuffer, CudaError> {
        let _current = gpu.current()?;
        let bytes = bytes.max(16) as usize;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut at = std::ptr::null_mut();
        // SAFETY: writes one address.
        match unsafe { sys::cuMemHostAlloc(&raw mut at, bytes, flags) } {
            CUresult::CUDA_SUCCESS => {}
            code => return Err(CudaError::pinned(what, bytes as u64, text_of(code))),
        }
        let mut buffer = MappedBuffer { gpu: gpu.clone(), at: at.cast(), device: 0, bytes };
        // SAFETY: writes one address, of memory that was allocated to be mapped.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut buffer.device, at, 0) };
        check(code, "cuMemHostGetDevicePointer_v2", what)?;
        Ok(buffer)
    }

    /// Where it is for the device.
    pub fn address(&self) -> u64 {
        self.device
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

impl Drop for MappedBuffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.current() {
            // SAFETY: allocated by `new`; work on it was finished.
            let _ = unsafe { sys::cuMemFreeHost(self.at.cast()) };
        }
    }
}

/// Pinned memory of the host, for the host to read and write.
pub struct HostBuffer(MappedBuffer);

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("bytes", &self.0.bytes).finish_non_exhaustive()
    }
}

impl HostBuffer {
    /// So many bytes, all zero.
    pub fn new(gpu: &Gpu, bytes: u64, what: &'static str) -> Result<HostBuffer, CudaError> {
        let buffer = MappedBuffer::new(gpu, bytes, what)?;
        // SAFETY: freshly allocated, so many bytes.
        unsafe { buffer.at.write_bytes(0, buffer.bytes) };
        Ok(HostBuffer(buffer))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes, which were set when they were allocated. Nobody writes them meanwhile: DMA into it is
        // started through `&mut` and finished before that ends.
        unsafe { std::slice::from_raw_parts(self.0.at, self.0.bytes) }
    }

    /// Its bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0.at, self.0.bytes) }
    }

    /// As many of a plain type as there is room for.
    pub(super) fn table<T: Plain>(&self) -> &[T] {
        // SAFETY: it begins at a page, as in `bytes`, and any bits will do.
        unsafe { std::slice::from_raw_parts(self.0.at.cast(), self.0.bytes / size_of::<T>()) }
    }

    /// The same, for writing.
    pub(super) fn table_mut<T: Plain>(&mut self) -> &mut [T] {
        // SAFETY: as above, exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0.at.cast(), self.0.bytes / size_of::<T>()) }
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.0.at
    }
}

/// Host memory that DMA may reach, until dropped.
pub struct Registration {
    gpu: Gpu,
    at: *mut u8,
    bytes: u64,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: it is only an address to give back.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Registration {
    /// Pins mapped memory, whole pages of it. It stays mapped for as long as `owner` lives. Refused by the driver where
    /// memory may not be locked, where part of it is registered already, or for memory that is mapped for reading
    /// on some devices.
    pub fn new(
        gpu: &Gpu,
        (at, bytes): (*mut u8, u64),
        read_only: bool,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Registration, CudaError> {
        let _current = gpu.current()?;
        let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        if read_only && gpu.facts().registers_read_only {
            flags |= sys::CU_MEMHOSTREGISTER_READ_ONLY;
        }
        // SAFETY: registering locks pages and changes no byte; the memory stays until `owner` goes.
        match unsafe { sys::cuMemHostRegister_v2(at.cast(), bytes as usize, flags) } {
            CUresult::CUDA_SUCCESS => Ok(Registration { gpu: gpu.clone(), at, bytes, _owner: owner }),
            code => Err(CudaError::pinned("host memory for DMA", bytes, text_of(code))),
        }
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.current() {
            // SAFETY: registered by `new`, and still mapped, as the owner goes after this.
            let _ = unsafe { sys::cuMemHostUnregister(self.at.cast()) };
        }
    }
}
