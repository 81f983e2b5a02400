//! What the driver and the GPUs of a machine can do, tried out.
//!
//! Owns: the questions and the small trials (a page pinned, an allocation exported), all undone before the answer. Called
//! by `windlass doctor` and by whoever gathers facts for [`windlass_core::choose`]. Must not: judge what it finds. A device
//! that cannot be opened is listed with the reason.

use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::driver::{self, Facts, Gpu};
use super::error::{CudaError, CudaVersion};
use super::ipc::SharedMemory;
use super::memory::Registration;

/// A page of any machine that has a GPU: 64 KiB on some ARM ones.
const PAGE: usize = 64 << 10;

/// What there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The version of CUDA that the driver supports.
    pub cuda: CudaVersion,
    /// The devices, in the driver's order.
    pub devices: Vec<Device>,
    /// `reach[a][b]`: device `a` can access memory of device `b`. Unknown where one of them cannot be opened.
    pub reach: Vec<Vec<Option<bool>>>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub facts: Facts,
    /// What its memory can do, or why it cannot be opened.
    pub memory: Result<Memory, String>,
}

/// What was tried with the memory of a device. Trials that failed say why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that are free.
    pub free: u64,
    /// Host memory can be pinned for it.
    pub pins: Result<(), String>,
    /// Its memory can be exported by a legacy handle.
    pub handles: Result<(), String>,
    /// Its memory can be exported as a descriptor.
    pub descriptors: bool,
}

/// Looks at every visible device. Opens each for a moment, which takes some hundred MiB of it where nobody in this
/// process has opened it before.
pub fn survey() -> Result<Survey, CudaError> {
    let facts = driver::devices()?;
    let cuda = facts.first().map_or(driver::NEEDS, |f| f.cuda);
    let opened: Vec<_> = facts.iter().map(|f| Gpu::open(f.ordinal)).collect();
    let reach = |a: &Result<Gpu, CudaError>| {
        let can = |b: &Result<Gpu, CudaError>| a.as_ref().ok()?.can_reach(b.as_ref().ok()?).ok();
        opened.iter().map(can).collect()
    };
    let reach = opened.iter().map(reach).collect();
    let look = |(facts, gpu): (Facts, &Result<Gpu, CudaError>)| {
        let memory = match gpu {
            Ok(gpu) => memory(gpu).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        Device { facts, memory }
    };
    let devices = facts.into_iter().zip(&opened).map(look).collect();
    Ok(Survey { cuda, devices, reach })
}

fn memory(gpu: &Gpu) -> Result<Memory, CudaError> {
    let (free, _) = gpu.memory()?;
    let exported = driver::attribute(
        gpu.device(),
        Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    );
    Ok(Memory {
        free,
        pins: pin_a_page(gpu).map_err(|e| e.to_string()),
        handles: SharedMemory::new(gpu, PAGE as u64).map(drop).map_err(|e| e.to_string()),
        descriptors: exported? != 0,
    })
}

fn pin_a_page(gpu: &Gpu) -> Result<(), CudaError> {
    // A whole page of our own lies somewhere in two.
    let owner: Arc<Vec<u8>> = Arc::new(vec![0; 2 * PAGE]);
    let start = owner.as_ptr().addr();
    let page = owner.as_ptr().wrapping_add(start.next_multiple_of(PAGE) - start).cast_mut();
    let made = Registration::new(gpu, (page, PAGE as u64), false, owner)?;
    drop(made);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_survey_lists_every_device_or_says_what_is_missing() {
        match survey() {
            Ok(survey) => {
                assert!(!survey.devices.is_empty());
                assert_eq!(survey.reach.len(), survey.devices.len());
                for (ordinal, device) in survey.devices.iter().enumerate() {
                    assert_eq!(device.facts.ordinal as usize, ordinal);
                    assert!(survey.reach[ordinal].len() == survey.devices.len());
                }
            }
            Err(e) => assert_eq!(e.kind(), windlass_core::error::Kind::Unsupported, "{e}"),
        }
    }
}
