//! What can go wrong with a device.

use windlass_core::delta::DeltaError;
use windlass_core::error::Kind;
use windlass_core::manifest::ManifestError;

use crate::copies::CopyError;
use crate::load::LoadError;
use crate::region::RegionError;
use crate::stop::Stopped;

/// A version of CUDA: major and minor.
pub type CudaVersion = (u32, u32);

/// What can go wrong with a device.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "no CUDA driver was found (libcuda.so.1): install the NVIDIA driver, or give the container access to the GPU \
         (docker run --gpus all)"
    )]
    NoDriver,
    /// The driver lacks a function.
    #[error("the CUDA driver has no {name}: it is older than CUDA {}.{}; install a newer one", needs.0, needs.1)]
    NoFunction {
        /// The function.
        name: &'static str,
        /// What is needed.
        needs: CudaVersion,
    },
    /// The driver is too old.
    #[error(
        "the driver supports CUDA {}.{} and at least {}.{} is needed: install a newer NVIDIA driver",
        has.0, has.1, needs.0, needs.1
    )]
    OldDriver {
        /// What it supports.
        has: CudaVersion,
        /// What is needed.
        needs: CudaVersion,
    },
    /// There is a driver and no device.
    #[error("the CUDA driver sees no device: {why}; look at nvidia-smi and at CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// What it said.
        why: String,
    },
    /// Too high a number.
    #[error("there is no CUDA device {ordinal}: {count} are visible; look at CUDA_VISIBLE_DEVICES")]
    NoSuchDevice {
        /// The number.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// A device that is not here, or not visible.
    #[error(
        "no visible CUDA device has the UUID {uuid}: it is on another host, or hidden by CUDA_VISIBLE_DEVICES"
    )]
    NoSuchUuid {
        /// The UUID.
        uuid: String,
    },
    /// The device is too old.
    #[error(
        "{name} has compute capability {}.{}, and the kernels need 8.0 (Ampere) or newer: publish and load through the host",
        capability.0, capability.1
    )]
    OldDevice {
        /// The device.
        name: String,
        /// What it has.
        capability: (u32, u32),
    },
    /// The process was forked after CUDA had been used.
    #[error("CUDA cannot be used in a process that was forked from one that had used it: start it by spawn")]
    Forked,
    /// Not enough memory on the device.
    #[error(
        "{what} needs {} of GPU memory, and {} of {} are free: {remedy}",
        size(*asked), size(*free), size(*total)
    )]
    OutOfMemory {
        /// What it is for.
        what: &'static str,
        /// Bytes asked for.
        asked: u64,
        /// Bytes free.
        free: u64,
        /// Bytes that the device has.
        total: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// Not enough memory on the host that could be pinned.
    #[error("{what} needs {} of pinned host memory, which the driver refused ({text}): free some, or raise the limit (ulimit -l)", size(*asked))]
    Pinned {
        /// What it is for.
        what: &'static str,
        /// Bytes asked for.
        asked: u64,
        /// What the driver said.
        text: String,
    },
    /// A kernel could not be made ready or started.
    #[error("{kernel}: {stage} failed: {text} (CUDA error {code})")]
    Kernel {
        /// Which kernel.
        kernel: &'static str,
        /// At what.
        stage: &'static str,
        /// The driver's code.
        code: i32,
        /// What it means.
        text: String,
    },
    /// A call failed. Errors of kernels and copies may show in any later call.
    #[error(
        "{stage}: {call} failed: {text} (CUDA error {code}); if it repeats, look for an earlier fault of the process \
         (compute-sanitizer, CUDA_LAUNCH_BLOCKING=1) and of the device (nvidia-smi -q, dmesg)"
    )]
    Call {
        /// The function.
        call: &'static str,
        /// What it was called for.
        stage: &'static str,
        /// The driver's code.
        code: i32,
        /// What it means.
        text: String,
    },
    /// An address that is not of the device.
    #[error(
        "{what} {index} at {address:#x} is {is}, not memory of GPU {ordinal}: pass tensors of this device"
    )]
    NotOfDevice {
        /// What it is.
        what: &'static str,
        /// Which one.
        index: usize,
        /// Its address.
        address: u64,
        /// What is there.
        is: String,
        /// The device.
        ordinal: u32,
    },
    /// An address that is not a multiple of what it must be.
    #[error("{what} {index} at {address:#x} is not aligned to {align} bytes")]
    Unaligned {
        /// What it is.
        what: &'static str,
        /// Which one.
        index: usize,
        /// Its address.
        address: u64,
        /// To how many bytes.
        align: u64,
    },
    /// Not as many addresses as are needed.
    #[error("{expected} {what} are needed and {found} were given")]
    Count {
        /// What.
        what: &'static str,
        /// As many as are needed.
        expected: usize,
        /// As many as were given.
        found: usize,
    },
    /// One device cannot reach the memory of another.
    #[error(
        "GPU {from} cannot access the memory of GPU {to}: they share no PCIe switch or NVLink, or the system forbids it; use the TCP strategy between them"
    )]
    NoPeerAccess {
        /// Who would read.
        from: String,
        /// Whose memory.
        to: String,
    },
    /// Memory that another process cannot be given.
    #[error("memory at {address:#x} cannot be opened by other processes: {why}")]
    NotExported {
        /// Where it is.
        address: u64,
        /// Why not.
        why: String,
    },
    /// A handle that cannot be opened.
    #[error(
        "{what} of another process cannot be opened: {text} (CUDA error {code}); its owner has freed it or is gone, is \
         this very process, or is in a container that shares no IPC and PID namespace with this one (docker: --ipc, --pid)"
    )]
    Opening {
        /// What it is a handle of.
        what: &'static str,
        /// The driver's code.
        code: i32,
        /// What it means.
        text: String,
    },
    /// The other process ended.
    #[error("{stage}: the other process is gone; sync again when it is back")]
    PeerLost {
        /// What was being done.
        stage: &'static str,
    },
    /// Copies beyond the memory that they are for.
    #[error("{needed} bytes of a range are {what}, and it has {bytes}")]
    Range {
        /// Read or written.
        what: &'static str,
        /// How many there must be.
        needed: u64,
        /// How many there are.
        bytes: u64,
    },
    /// A block that this rank holds only in part, or strided as no block is.
    #[error(
        "block {block} of {tensor:?} is not one piece of this rank's memory: {why}; publish by copy, or with a cut \
         table that follows the shards"
    )]
    Cuts {
        /// The block.
        block: u32,
        /// Its tensor.
        tensor: String,
        /// What is wrong.
        why: &'static str,
    },
    /// The baseline is of another state.
    #[error("the baseline on the GPU is {is}, and the delta was to begin at {base}: publish a copy")]
    Baseline {
        /// What it is.
        is: String,
        /// What it should be.
        base: String,
    },
    /// Records that an engine's weights refused.
    #[error(
        "{refused} of {records} records did not fit the weights on the GPU, the first for block {block}: {why}; load the whole image"
    )]
    Refused {
        /// How many.
        refused: u64,
        /// Of how many.
        records: u64,
        /// The first.
        block: u32,
        /// Why.
        why: &'static str,
    },
    /// Positions of a context record cannot be found without all old weights of its block.
    #[error(
        "block {block} of {tensor:?} has a context record, which is decoded from all old weights of the block, and this worker holds a part of them: ask for plain deltas, or load the whole image"
    )]
    Context {
        /// The block.
        block: u32,
        /// Its tensor.
        tensor: String,
    },
    /// A cast that the device does not do.
    #[error(
        "copy {index} of {bytes} bytes a run cannot be cast from fp32 to bf16: it is not of whole elements"
    )]
    Cast {
        /// Which copy.
        index: usize,
        /// Bytes of a run.
        bytes: u64,
    },
    /// Wrong copies.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The region refused.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A plan or its memory is wrong.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A delta is wrong.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// A block is wrong.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Called off or too late.
    #[error("{stage}: {stopped}")]
    Stopped {
        /// What was being done.
        stage: &'static str,
        /// Why it was given up.
        stopped: Stopped,
    },
}

impl CudaError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        use CudaError as E;
        match self {
            E::NoDriver
            | E::NoFunction { .. }
            | E::OldDriver { .. }
            | E::NoDevice { .. }
            | E::OldDevice { .. }
            | E::Forked
            | E::NoPeerAccess { .. }
            | E::NotExported { .. }
            | E::Context { .. }
            | E::Cuts { .. } => Kind::Unsupported,
            E::NoSuchDevice { .. } | E::NoSuchUuid { .. } => Kind::NotFound,
            E::OutOfMemory { .. } | E::Pinned { .. } => Kind::Exhausted,
            E::Kernel { .. } | E::Call { .. } => Kind::Bug,
            E::NotOfDevice { .. }
            | E::Unaligned { .. }
            | E::Count { .. }
            | E::Cast { .. }
            | E::Range { .. } => Kind::Invalid,
            E::Opening { .. } => Kind::NotFound,
            E::PeerLost { .. } => Kind::PeerLost,
            E::Baseline { .. } => Kind::Stale,
            E::Refused { .. } => Kind::Corrupt,
            E::Copy(e) => e.kind(),
            E::Region(e) => e.kind(),
            E::Load(e) => e.kind(),
            E::Delta(e) => e.kind(),
            E::Manifest(e) => e.kind(),
            E::Stopped { stopped, .. } => stopped.kind(),
        }
    }
}

/// A number of bytes for people.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = "bytes";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "bytes" { format!("{bytes} bytes") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_out_of_gpu_memory_says_how_much_was_asked_for_and_what_is_free() {
        let (asked, free, total) = (16 << 30, 3 << 29, 80 << 30);
        let remedy = "publish by copy";
        let e = CudaError::OutOfMemory { what: "the baseline", asked, free, total, remedy };
        let told = e.to_string();
        for part in ["the baseline", "16.0 GiB", "1.5 GiB of 80.0 GiB", "publish by copy"] {
            assert!(told.contains(part), "{told}");
        }
        assert_eq!(e.kind(), Kind::Exhausted);
        assert_eq!(
            (size(0), size(1023), size(1024)),
            ("0 bytes".into(), "1023 bytes".into(), "1.0 KiB".into())
        );
    }

    #[test]
    fn an_old_driver_is_told_what_it_has_and_what_is_needed() {
        let e = CudaError::OldDriver { has: (11, 4), needs: (12, 0) };
        assert!(e.to_string().contains("CUDA 11.4 and at least 12.0"), "{e}");
        assert_eq!(e.kind(), Kind::Unsupported);
    }
}
