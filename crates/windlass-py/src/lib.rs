//! The door from Python to Windlass.
//!
//! Owns: the conversion of Python objects to Rust values and back, the release of the interpreter lock
//! around blocking calls ([`enter`]), and the table that turns error kinds into exceptions ([`errors`]). Called by
//! the Python package, which is the only one to import `windlass._windlass`. Must not: hold any logic that a Rust
//! program would also want, start a thread that calls into Python, or do anything at import.

mod cli;
mod copies;
mod core;
mod engines;
mod enter;
mod errors;
mod facts;
mod gpu;
mod held;
mod ipc;
mod layout;
mod load;
mod memory;
mod publish;
mod receive;
mod supervise;

/// The compiled half of the package. Everything public is re-exported by `windlass`.
#[pyo3::pymodule]
mod _windlass {
    #[pymodule_export]
    use crate::cli::main;
    #[pymodule_export]
    use crate::copies::Copies;
    #[pymodule_export]
    use crate::core::{
        Backoff, Chunker, check_endpoint, check_host, check_model_id, check_store_url, choose, dtype_bits,
        dtype_name, dtype_safetensors, dtypes, engine_rank, extent, legacy_request, make_place, module_of,
        packed_layout, parse_request, parse_sync_info, rank_offsets, read_token, threshold_from_gb,
        world_size,
    };
    #[pymodule_export]
    use crate::engines::{EngineDriver, link_model};
    #[pymodule_export]
    use crate::errors::kinds;
    #[pymodule_export]
    use crate::facts::gpu_survey;
    #[pymodule_export]
    use crate::gpu::{
        Baseline, DeltaOnItsWay, DeltaRecords, DevicePlan, Gpu, Registered, StagedDelta, host_memory,
        place_baseline,
    };
    #[pymodule_export]
    use crate::held::{Held, open_image};
    #[pymodule_export]
    use crate::ipc::{CopyTable, Exported, Opened, SharedMemory, Signal};
    #[pymodule_export]
    use crate::layout::Layout;
    #[pymodule_export]
    use crate::load::{LoadPlan, combine_digests};
    #[pymodule_export]
    use crate::memory::Memory;
    #[pymodule_export]
    use crate::publish::Publisher;
    #[pymodule_export]
    use crate::receive::{FetchedDelta, Receiver, layout_of};
    #[pymodule_export]
    use crate::supervise::Supervisor;

    /// The version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
