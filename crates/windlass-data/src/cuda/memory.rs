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
use super::kernels::{Plain, bytes_of};

/// Memory of the device. Given back when dropped, after the work on it has finished.
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

/// Tables between the host and buffers of the device.
impl Stream {
    /// Sets memory of the device to zero.
    pub(super) fn zero(&self, buffer: &DeviceBuffer, bytes: u64) -> Result<(), CudaError> {
        assert!(bytes <= buffer.bytes(), "{bytes} of {} bytes", buffer.bytes());
        let _current = self.gpu().current()?;
        // SAFETY: within a buffer of our own.
        let code = unsafe { sys::cuMemsetD8Async(buffer.address(), 0, bytes as usize, self.raw()) };
        check(code, "cuMemsetD8Async", "clearing memory")
    }

    /// Copies a table into a buffer and waits for it.
    pub(super) fn upload_table<T: Plain>(&self, table: &[T], to: &DeviceBuffer) -> Result<(), CudaError> {
        let bytes = bytes_of(table);
        assert!(bytes.len() as u64 <= to.bytes(), "{} of {} bytes", bytes.len(), to.bytes());
        // SAFETY: the buffer is long enough, and the stream is finished before `table` can go.
        unsafe { self.upload(bytes, to.address()) }?;
        self.finish("copying a table to the device")
    }

    /// Reads a table out of a buffer, and waits for it.
    pub(super) fn download_table<T: Plain>(
        &self,
        from: &DeviceBuffer,
        count: usize,
    ) -> Result<Vec<T>, CudaError> {
        let bytes = count * size_of::<T>();
        assert!(bytes as u64 <= from.bytes(), "{bytes} of {} bytes", from.bytes());
        let mut table = Vec::<T>::with_capacity(count);
        // SAFETY: room for so many; no other code has it until the stream is finished.
        let begun = unsafe { self.download(from.address(), table.as_mut_ptr().cast(), bytes as u64) };
        self.finish("copying a table to the host")?;
        begun?;
        // SAFETY: all of it was written, and any bytes are a value of a plain type.
        unsafe { table.set_len(count) };
        Ok(table)
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
        // SAFETY: so many bytes, which were set when they were allocated. They are not written meanwhile: DMA into it is
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
