//! Loads the compiled programs and starts their kernels.
//!
//! Owns: the driver calls between a [`Kernel`] and its launch. Called by the modules beside it. Must not: check tables; its
//! callers do.

#![allow(unsafe_code)]

use std::ffi::{CString, c_uint, c_void};

use cudarc::driver::sys;
use cudarc::driver::sys::CUfunction_attribute;

use super::driver::{Gpu, Stream, check_kernel};
use super::error::CudaError;
use super::kernels::{Arguments, Kernel, Kernels, Ready, THREADS, Tally, Unit};
use super::memory::{DeviceBuffer, SMALL};

impl Gpu {
    /// Has the driver load the kernels that an engine's loads need, so that none of them waits for its compiler. What was
    /// compiled once is in the driver's cache.
    pub fn warm(&self) -> Result<(), CudaError> {
        let apply = [Unit::One, Unit::Two, Unit::Four, Unit::Eight].map(Kernel::Apply);
        self.kernels().prepare(self, &[&[Kernel::Copy, Kernel::Sum], &apply[..]].concat())
    }
}

impl Kernels {
    /// Loads these kernels, so that their first launch does not wait for the driver's compiler.
    pub(super) fn prepare(&self, gpu: &Gpu, kernels: &[Kernel]) -> Result<(), CudaError> {
        kernels.iter().try_for_each(|k| self.ready(gpu, *k).map(drop))
    }

    /// Starts a kernel for `work` pieces of work.
    ///
    /// # Safety
    /// The tables that `args` names must be there until the stream is finished, be as the kernel's source says, and
    /// name only memory that it may read and write.
    pub(super) unsafe fn launch<A: Arguments>(
        &self,
        stream: &Stream,
        kernel: Kernel,
        args: &A,
        work: u64,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_on(stream.gpu(), stream.raw(), kernel, args, work) }
    }

    /// As [`Kernels::launch`], on a caller's stream.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn launch_on<A: Arguments>(
        &self,
        gpu: &Gpu,
        stream: sys::CUstream,
        kernel: Kernel,
        args: &A,
        work: u64,
    ) -> Result<(), CudaError> {
        if work == 0 {
            return Ok(());
        }
        let ready = self.ready(gpu, kernel)?;
        let _current = gpu.current()?;
        let grid = u64::from(ready.fill).min(work) as c_uint;
        let mut parameters = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: one parameter of the type that the kernel takes, which the driver copies; the rest is the caller's
        // promise.
        let code = unsafe {
            sys::cuLaunchKernel(
                ready.function,
                grid,
                1,
                1,
                THREADS,
                1,
                1,
                ready.shared,
                stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check_kernel(code, kernel.name(), "starting it")
    }

    fn ready(&self, gpu: &Gpu, kernel: Kernel) -> Result<Ready, CudaError> {
        let mut ready = self.ready.lock();
        if let Some(found) = ready.get(&kernel) {
            return Ok(*found);
        }
        let _current = gpu.current()?;
        let module = self.module(kernel)?;
        let made = Ready::new(gpu, kernel, module)?;
        ready.insert(kernel, made);
        Ok(made)
    }

    fn module(&self, kernel: Kernel) -> Result<sys::CUmodule, CudaError> {
        let mut modules = self.modules.lock();
        let program = kernel.program();
        if let Some(module) = modules.get(&program) {
            return Ok(*module);
        }
        let text = CString::new(program.text()).unwrap_or_default();
        let mut module = std::ptr::null_mut();
        // SAFETY: a text that ends; writes one handle, unloaded with the context.
        let code = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut module,
                text.as_ptr().cast(),
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        check_kernel(code, kernel.name(), "translating its PTX for this device")?;
        modules.insert(program, module);
        Ok(module)
    }
}

impl Ready {
    fn new(gpu: &Gpu, kernel: Kernel, module: sys::CUmodule) -> Result<Ready, CudaError> {
        let name = kernel.name();
        let text = CString::new(name).unwrap_or_default();
        let mut function = std::ptr::null_mut();
        // SAFETY: a module of the current context and a string that ends.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut function, module, text.as_ptr()) };
        check_kernel(code, name, "finding it")?;
        let (mut at, mut bytes, mut shared) = (0, 0, 0u32);
        // SAFETY: as above; then four bytes of that global are copied to four bytes.
        unsafe {
            let code = sys::cuModuleGetGlobal_v2(
                &raw mut at,
                &raw mut bytes,
                module,
                c"windlass_shared_bytes".as_ptr(),
            );
            check_kernel(code, name, "finding out its shared memory")?;
            let code = sys::cuMemcpyDtoH_v2((&raw mut shared).cast(), at, size_of::<u32>());
            check_kernel(code, name, "finding out its shared memory")?;
        }
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function of the current context.
        let code = unsafe { sys::cuFuncSetAttribute(function, attribute, shared as i32) };
        check_kernel(code, name, "asking for shared memory")?;
        let mut fit = 0;
        // SAFETY: writes one integer.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut fit,
                function,
                THREADS as i32,
                shared as usize,
            )
        };
        check_kernel(code, name, "counting its CTAs")?;
        Ok(Ready { function, shared, fill: fit.max(1) as u32 * gpu.facts().processors })
    }
}

/// A tally on the device.
pub(super) fn tally(gpu: &Gpu) -> Result<DeviceBuffer, CudaError> {
    DeviceBuffer::new(gpu, size_of::<Tally>() as u64, "a tally", SMALL)
}
