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
    #[error(
        "no CUDA driver was found ({}): install the NVIDIA driver, or give the container access to the GPU (docker run \
         --gpus all)",
        if said.is_empty() { "libcuda.so.1" } else { said }
    )]
    NoDriver { said: String },
    #[error(
        "the CUDA driver (libcuda.so.1) has no {name}: it is older than CUDA {}.{}, or a stub for linking; install a \
         newer NVIDIA driver, and see that LD_LIBRARY_PATH names no folder of stubs",
        needs.0, needs.1
    )]
    NoFunction { name: &'static str, needs: CudaVersion },
    #[error(
        "the driver supports CUDA {}.{} and at least {}.{} is needed: install a newer NVIDIA driver",
        has.0, has.1, needs.0, needs.1
    )]
    OldDriver { has: CudaVersion, needs: CudaVersion },
    #[error("the CUDA driver sees no device: {why}; look at nvidia-smi and at CUDA_VISIBLE_DEVICES")]
    NoDevice { why: String },
    #[error("there is no CUDA device {ordinal}: {count} are visible; look at CUDA_VISIBLE_DEVICES")]
    NoSuchDevice { ordinal: u32, count: u32 },
    #[error(
        "no visible CUDA device has the UUID {uuid}: it is on another host, or hidden by CUDA_VISIBLE_DEVICES"
    )]
    NoSuchUuid { uuid: String },
    #[error(
        "{name} has compute capability {}.{}, and the kernels need 8.0 (Ampere) or newer: publish and load through the host",
        capability.0, capability.1
    )]
    OldDevice { name: String, capability: (u32, u32) },
    #[error("CUDA cannot be used in a process that was forked from one that had used it: start it by spawn")]
    Forked,
    #[error(
        "{what} needs {} of GPU memory, and {} of {} are free: {remedy}",
        size(*asked), size(*free), size(*total)
    )]
    OutOfMemory { what: &'static str, asked: u64, free: u64, total: u64, remedy: &'static str },
    /// Not enough memory on the host that could be pinned.
    #[error(
        "{what} needs {} of pinned host memory, which the driver refused: {text}; RLIMIT_MEMLOCK is {}, allow more \
         (ulimit -l unlimited, docker run --ulimit memlock=-1), or free host memory",
        size(*asked), limit.map_or("unlimited".into(), size)
    )]
    Pinned {
        what: &'static str,
        asked: u64,
        /// How much this process may lock, in bytes; none is no limit.
        limit: Option<u64>,
        text: String,
    },
    #[error(transparent)]
    NoRoom(#[from] Refused),
    #[error(
        "kernel {kernel}: {stage} failed: {text} (CUDA error {code}); {}",
        if *code == OUT_OF_MEMORY { ROOM } else { FAULT }
    )]
    Kernel { kernel: &'static str, stage: &'static str, code: i32, text: String },
    /// A call failed. Errors of kernels and copies may show in any later call.
    #[error(
        "{stage}: {call} failed: {text} (CUDA error {code}); {}",
        if *code == OUT_OF_MEMORY { ROOM } else { FAULT }
    )]
    Call { call: &'static str, stage: &'static str, code: i32, text: String },
    #[error(
        "{what} {index} at {address:#x} is {is}, not memory of GPU {ordinal}: pass tensors of this device"
    )]
    NotOfDevice { what: &'static str, index: usize, address: u64, is: String, ordinal: u32 },
    /// An address that is not a multiple of what it must be.
    #[error(
        "{what} {index} at {address:#x} is not aligned to {align} bytes: pass it as torch allocated it, or a copy \
         (tensor.clone())"
    )]
    Unaligned { what: &'static str, index: usize, address: u64, align: u64 },
    #[error(
        "{expected} {what} are needed and {found} were given: pass what this object was made for, in its order"
    )]
    Count { what: &'static str, expected: usize, found: usize },
    #[error(
        "GPU {from} cannot access the memory of GPU {to}: they share no PCIe switch or NVLink, or the system forbids it; use the TCP strategy between them"
    )]
    NoPeerAccess { from: String, to: String },
    #[error(
        "memory at {address:#x} cannot be opened by other processes: {why}; use the packed strategy, whose arena is not \
         torch's, or TCP"
    )]
    NotExported { address: u64, why: String },
    #[error(
        "{what} of another process cannot be opened: {text} (CUDA error {code}); its owner has freed it or is gone, is \
         this very process, or is in a container that shares no IPC and PID namespace with this one (docker: --ipc, --pid)"
    )]
    Opening {
        /// What it is a handle of.
        what: &'static str,
        code: i32,
        text: String,
    },
    #[error("{stage}: the other process is gone; sync again when it is back")]
    PeerLost { stage: &'static str },
    #[error(
        "{needed} bytes of a range are {what}, and it has {bytes}: trainer and engine must have the same layout; sync \
         again from the beginning"
    )]
    Range { what: &'static str, needed: u64, bytes: u64 },
    /// A block that this rank holds only in part, or strided as no block is.
    #[error(
        "block {block} of {tensor:?} is not one piece of this rank's memory: {why}; publish by copy, or with a cut \
         table that follows the shards"
    )]
    Cuts { block: u32, tensor: String, why: &'static str },
    #[error("the baseline on the GPU is {is}, and the delta was to begin at {base}: publish a copy")]
    Baseline { is: String, base: String },
    #[error(
        "{refused} of {records} records did not fit the weights on the GPU, the first for block {block}: {why}; load the whole image"
    )]
    Refused { refused: u64, records: u64, block: u32, why: &'static str },
    /// Context records are for slow links, where a host decodes them.
    #[error(
        "block {block} of {tensor:?} has a context record, which only the host decodes: load from the image, or ask for plain deltas"
    )]
    Context { block: u32, tensor: String },
    #[error(
        "copy {index} of {bytes} bytes a run cannot be cast from fp32 to bf16: it is not of whole elements; publish \
         this tensor as it is (generator_dtype, dtypes)"
    )]
    Cast { index: usize, bytes: u64 },
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Delta(#[from] DeltaError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("{stage}: {stopped}")]
    Stopped { stage: &'static str, stopped: Stopped },
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
