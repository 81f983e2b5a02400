//! What can go wrong with a device.

use windlass_core::choose::baseline::Refused;
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
        "no CUDA driver was found ({}): install the NVIDIA driver, or give the container access to the GPU (docker run \
         --gpus all)",
        if said.is_empty() { "libcuda.so.1" } else { said }
    )]
    NoDriver {
        /// What the loader said.
        said: String,
    },
    /// The driver lacks a function.
    #[error(
        "the CUDA driver (libcuda.so.1) has no {name}: it is older than CUDA {}.{}, or a stub for linking; install a \
         newer NVIDIA driver, and see that LD_LIBRARY_PATH names no folder of stubs",
        needs.0, needs.1
    )]
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
    #[error(
        "{what} needs {} of pinned host memory, which the driver refused: {text}; RLIMIT_MEMLOCK is {}, allow more \
         (ulimit -l unlimited, docker run --ulimit memlock=-1), or free host memory",
        size(*asked), limit.map_or("unlimited".into(), size)
    )]
    Pinned {
        /// What it is for.
        what: &'static str,
        /// Bytes asked for.
        asked: u64,
        /// How much this process may lock, in bytes; none is no limit.
        limit: Option<u64>,
        /// What the driver said.
        text: String,
    },
    /// Neither device nor host have room for a baseline.
    #[error(transparent)]
    NoRoom(#[from] Refused),
    /// A kernel could not be made ready or started.
    #[error(
        "kernel {kernel}: {stage} failed: {text} (CUDA error {code}); {}",
        if *code == OUT_OF_MEMORY { ROOM } else { FAULT }
    )]
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
        "{stage}: {call} failed: {text} (CUDA error {code}); {}",
        if *code == OUT_OF_MEMORY { ROOM } else { FAULT }
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
    #[error(
        "{what} {index} at {address:#x} is not aligned to {align} bytes: pass it as torch allocated it, or a copy \
         (tensor.clone())"
    )]
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
    #[error(
        "{expected} {what} are needed and {found} were given: pass what this object was made for, in its order"
    )]
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
    #[error(
        "memory at {address:#x} cannot be opened by other processes: {why}; use the packed strategy, whose arena is not \
         torch's, or TCP"
    )]
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
    #[error(
        "{needed} bytes of a range are {what}, and it has {bytes}: trainer and engine must have the same layout; sync \
         again from the beginning"
    )]
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
    /// Context records are for slow links, where a host decodes them.
    #[error(
        "block {block} of {tensor:?} has a context record, which only the host decodes: load from the image, or ask for plain deltas"
    )]
    Context {
        /// The block.
        block: u32,
        /// Its tensor.
        tensor: String,
    },
    /// A cast that the device does not do.
    #[error(
        "copy {index} of {bytes} bytes a run cannot be cast from fp32 to bf16: it is not of whole elements; publish \
         this tensor as it is (generator_dtype, dtypes)"
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

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;
/// What to do when the driver itself has no room, as for a context.
const ROOM: &str = "nvidia-smi shows who holds the GPU's memory; leave some to this process \
    (vLLM: gpu_memory_utilization, torch: torch.cuda.set_per_process_memory_fraction)";
/// What to do about failures that nobody expects. Errors of kernels show in any later call.
const FAULT: &str = "look for an earlier fault of the process (compute-sanitizer, CUDA_LAUNCH_BLOCKING=1) and of the \
    device (nvidia-smi -q, dmesg), and start the process anew: its context is lost";

impl CudaError {
    /// The driver refused to pin host memory.
    pub(super) fn pinned(what: &'static str, asked: u64, text: String) -> CudaError {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        CudaError::Pinned { what, asked, limit, text }
    }

    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        use CudaError as E;
        match self {
            E::NoDriver { .. }
            | E::NoFunction { .. }
            | E::OldDriver { .. }
            | E::NoDevice { .. }
            | E::OldDevice { .. }
            | E::Forked
            | E::NoPeerAccess { .. }
            | E::NotExported { .. }
            | E::Context { .. }
            | E::Cuts { .. } => Kind::Unsupported,
            E::NoSuchDevice { .. } | E::NoSuchUuid { .. } | E::Opening { .. } => Kind::NotFound,
            E::OutOfMemory { .. } | E::Pinned { .. } => Kind::Exhausted,
            E::Kernel { code, .. } | E::Call { code, .. } if *code == OUT_OF_MEMORY => Kind::Exhausted,
            E::Kernel { .. } | E::Call { .. } => Kind::Bug,
            E::NotOfDevice { .. }
            | E::Unaligned { .. }
            | E::Count { .. }
            | E::Cast { .. }
            | E::Range { .. } => Kind::Invalid,
            E::PeerLost { .. } => Kind::PeerLost,
            E::Baseline { .. } => Kind::Stale,
            E::Refused { .. } => Kind::Corrupt,
            E::NoRoom(e) => e.kind(),
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

    /// A message must name the thing, the value and the remedy.
    #[track_caller]
    fn says(e: &CudaError, kind: Kind, parts: &[&str]) {
        let told = e.to_string();
        for part in parts {
            assert!(told.contains(part), "{part:?} in {told:?}");
        }
        assert!(!told.contains("  "), "{told:?}");
        assert_eq!(e.kind(), kind, "{told}");
    }

    #[test]
    fn what_is_missing_on_the_machine_is_named_with_its_remedy() {
        says(
            &CudaError::NoDriver { said: String::new() },
            Kind::Unsupported,
            &["libcuda.so.1", "install the NVIDIA driver", "--gpus all"],
        );
        let e = CudaError::NoFunction { name: "cuMemMap", needs: (12, 0) };
        says(&e, Kind::Unsupported, &["cuMemMap", "12.0", "stub", "LD_LIBRARY_PATH", "newer NVIDIA driver"]);
        let e = CudaError::NoDevice { why: "no CUDA-capable device is detected".into() };
        says(&e, Kind::Unsupported, &["no CUDA-capable device", "nvidia-smi", "CUDA_VISIBLE_DEVICES"]);
        let e = CudaError::NoSuchDevice { ordinal: 3, count: 2 };
        says(&e, Kind::NotFound, &["device 3", "2 are visible", "CUDA_VISIBLE_DEVICES"]);
        let e = CudaError::NoSuchUuid { uuid: "GPU-7".into() };
        says(&e, Kind::NotFound, &["GPU-7", "another host", "CUDA_VISIBLE_DEVICES"]);
        let e = CudaError::OldDevice { name: "Tesla T4".into(), capability: (7, 5) };
        says(&e, Kind::Unsupported, &["Tesla T4", "7.5", "8.0 (Ampere)", "through the host"]);
        let e = CudaError::NoPeerAccess { from: "0".into(), to: "1".into() };
        says(&e, Kind::Unsupported, &["GPU 0", "GPU 1", "NVLink", "TCP strategy"]);
        says(&CudaError::Forked, Kind::Unsupported, &["forked", "spawn"]);
    }

    #[test]
    fn host_memory_that_cannot_be_pinned_is_told_the_limit() {
        let refused = |limit| CudaError::Pinned {
            what: "host memory for DMA",
            asked: 4 << 30,
            limit,
            text: "operation not permitted".into(),
        };
        let parts = [
            "host memory for DMA",
            "4.0 GiB",
            "not permitted",
            "RLIMIT_MEMLOCK is 8.0 MiB",
            "ulimit -l",
            "memlock=-1",
        ];
        says(&refused(Some(8 << 20)), Kind::Exhausted, &parts);
        says(&refused(None), Kind::Exhausted, &["RLIMIT_MEMLOCK is unlimited", "free host memory"]);
    }

    #[test]
    fn a_failed_kernel_or_call_is_told_what_it_was_for() {
        let text = || "an illegal memory access was encountered".to_owned();
        let e = CudaError::Kernel { kernel: "encode_2", stage: "starting it", code: 700, text: text() };
        says(
            &e,
            Kind::Bug,
            &["kernel encode_2", "starting it", "illegal memory access", "700", "compute-sanitizer"],
        );
        let call = |code, text| CudaError::Call {
            call: "cuDevicePrimaryCtxRetain",
            stage: "opening a device",
            code,
            text,
        };
        says(
            &call(999, text()),
            Kind::Bug,
            &["opening a device", "cuDevicePrimaryCtxRetain", "999", "nvidia-smi -q"],
        );
        // A GPU that is full has no room for a context.
        let parts = ["opening a device", "out of memory", "who holds", "gpu_memory_utilization"];
        says(&call(2, "out of memory".into()), Kind::Exhausted, &parts);
    }

    #[test]
    fn a_wrong_address_is_told_what_is_there() {
        let (what, address) = ("the tensor of copy", 0x7f00_0000_1000);
        let is = "pinned host memory".to_owned();
        let e = CudaError::NotOfDevice { what, index: 4, address, is, ordinal: 1 };
        says(
            &e,
            Kind::Invalid,
            &["copy 4 at 0x7f0000001000", "pinned host memory", "GPU 1", "of this device"],
        );
        let e = CudaError::Unaligned { what, index: 4, address: address + 1, align: 2 };
        says(&e, Kind::Invalid, &["0x7f0000001001", "2 bytes", "clone"]);
        let e = CudaError::NotExported { address, why: "cuIpcGetMemHandle: invalid argument".into() };
        says(&e, Kind::Unsupported, &["0x7f0000001000", "invalid argument", "packed strategy"]);
    }

    #[test]
    fn an_old_driver_is_told_what_it_has_and_what_is_needed() {
        let e = CudaError::OldDriver { has: (11, 4), needs: (12, 0) };
        assert!(e.to_string().contains("CUDA 11.4 and at least 12.0"), "{e}");
        assert_eq!(e.kind(), Kind::Unsupported);
    }
}
