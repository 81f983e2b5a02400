//! Facts about CUDA on one side, and the obstacles to using it.

use serde::{Deserialize, Serialize};

/// The oldest CUDA that a driver must support: that of the compiled kernels.
pub const NEEDS_DRIVER: (u32, u32) = (12, 0);
/// The oldest compute capability that the kernels run on (Ampere).
pub const NEEDS_CAPABILITY: (u32, u32) = (8, 0);

/// Facts about CUDA on one side: of several ranks or engines, the worst. A fact that was not measured is `None`
/// and is no obstacle.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cuda {
    /// Why CUDA cannot be used there at all: no driver library, a broken one, no device.
    pub unusable: Option<String>,
    /// The version of CUDA that the driver supports.
    pub driver: Option<(u32, u32)>,
    /// Compute capability of the oldest GPU.
    pub capability: Option<(u32, u32)>,
    /// Bytes that are free on the fullest GPU.
    pub free_bytes: Option<u64>,
    /// torch's allocator makes expandable segments, which have no legacy handles.
    pub expandable_segments: Option<bool>,
    /// Memory can be exported by a legacy handle (`cuIpcGetMemHandle`).
    pub exports_handles: Option<bool>,
    /// Expandable segments can be exported as descriptors: the driver can, and torch makes them so
    /// (`TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1`).
    pub exports_descriptors: Option<bool>,
    pub ipc_namespace: Option<String>,
    pub pid_namespace: Option<String>,
}

impl Cuda {
    /// Why the kernels cannot be used there, with the remedy.
    pub fn objection(&self) -> Option<String> {
        if let Some(why) = &self.unusable {
            return Some(why.clone());
        }
        if let Some(has) = self.driver
            && has < NEEDS_DRIVER
        {
            let (has, needs) = (dotted(has), dotted(NEEDS_DRIVER));
            return Some(format!(
                "the driver supports CUDA {has} and at least {needs} is needed; install a newer one"
            ));
        }
        if let Some(has) = self.capability
            && has < NEEDS_CAPABILITY
        {
            let (has, needs) = (dotted(has), dotted(NEEDS_CAPABILITY));
            return Some(format!(
                "a GPU has compute capability {has}, and the kernels need {needs} (Ampere) or newer"
            ));
        }
        None
    }

    /// The namespace that the processes of two sides do not share, though handles need it.
    pub(super) fn namespace_apart(&self, other: &Cuda) -> Option<&'static str> {
        let apart = |a: &Option<String>, b: &Option<String>| a.is_some() && b.is_some() && a != b;
        if apart(&self.ipc_namespace, &other.ipc_namespace) {
            Some("IPC namespace (docker: --ipc, Kubernetes: hostIPC)")
        } else if apart(&self.pid_namespace, &other.pid_namespace) {
            Some("pid namespace (docker: --pid, Kubernetes: shareProcessNamespace or hostPID)")
        } else {
            None
        }
    }
}

fn dotted((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}
