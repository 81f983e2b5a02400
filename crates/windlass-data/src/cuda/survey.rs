//! The CUDA driver and the GPUs of this machine, as facts.
//!
//! Owns: [`Gpus`], what files, the environment and the driver say. Called by `windlass doctor`, which judges it, and by
//! Python's `windlass.gpu_facts()`. A machine without a driver is no error: the survey records the reason.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};
use windlass_core::choose::{Cuda, NEEDS_CAPABILITY, NEEDS_DRIVER};

use super::error::CudaError;
use super::probe::{self, Device, Memory, Survey};
use crate::stop::Stopped;

/// Directories in which drivers and container runtimes install the library.
const LIBRARY_DIRS: [&str; 9] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];

/// Variables that configure torch's allocator, the newer one first.
const ALLOCATOR: [&str; 2] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];

/// How long the driver may take. It visits every GPU of the machine, and a broken one can block it forever.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(30);

/// What is known about the GPUs of a machine.
#[derive(Debug)]
pub struct Gpus {
    /// Version of the kernel module.
    pub module: Option<String>,
    /// Path at which the driver's library was found. The dynamic loader may find others.
    pub library: Option<PathBuf>,
    pub survey: Result<Survey, CudaError>,
    /// torch was asked for expandable segments.
    pub expandable: bool,
    /// torch allocates expandable segments that other processes can open.
    pub shared_segments: bool,
    /// Bytes that this process may lock.
    pub memlock: Option<u64>,
}

impl Gpus {
    /// Surveys this machine. Opens every visible device for a moment.
    pub fn here() -> Gpus {
        Gpus::look(Path::new("/"), |name| std::env::var_os(name), probe_with_timeout)
    }

    /// Surveys the machine whose `/proc` and libraries are below `root`.
    pub fn look(
        root: &Path,
        env: fn(&str) -> Option<OsString>,
        probe: fn() -> Result<Survey, CudaError>,
    ) -> Gpus {
        let at = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
        let paths = env("LD_LIBRARY_PATH").unwrap_or_default();
        let dirs = std::env::split_paths(&paths).chain(LIBRARY_DIRS.iter().map(PathBuf::from));
        let mut libraries = dirs.map(|d| d.join("libcuda.so.1"));
        let module = std::fs::read_to_string(at(Path::new("/proc/driver/nvidia/version")));
        Gpus {
            module: module.ok().as_deref().map(module_version),
            library: libraries.find(|path| path.is_absolute() && at(path).exists()),
            survey: probe(),
            expandable: ALLOCATOR.iter().find_map(|name| env(name)).is_some_and(is_expandable),
            shared_segments: env("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC").is_some_and(|v| v == "1"),
            memlock: getrlimit(Resource::Memlock).current,
        }
    }

    /// UUIDs of the devices, and the facts that `choose()` needs: the worst of all devices.
    pub fn side(&self) -> (Vec<String>, Cuda) {
        let survey = match &self.survey {
            Ok(survey) => survey,
            // A host without GPUs is not broken.
            Err(CudaError::NoDriver { .. }) if self.module.is_none() => return (Vec::new(), Cuda::default()),
            Err(e) => return (Vec::new(), Cuda { unusable: Some(e.to_string()), ..Cuda::default() }),
        };
        let devices = &survey.devices;
        let broken = devices.iter().find_map(|d| {
            let error = d.memory.as_ref().err()?;
            Some(format!("GPU {}: {error}", d.facts.ordinal))
        });
        let all = |can: fn(&Memory) -> bool| Some(memories(survey).all(|(_, m)| can(m)));
        let cuda = Cuda {
            unusable: broken,
            driver: Some(survey.cuda),
            capability: devices.iter().map(|d| d.facts.capability).min(),
            free_bytes: memories(survey).map(|(_, m)| m.free).min(),
            expandable_segments: Some(self.expandable),
            exports_handles: all(|m| m.handles.is_ok()),
            exports_descriptors: all(|m| m.descriptors).map(|can| can && self.shared_segments),
            ..Cuda::default()
        };
        (devices.iter().map(|d| d.facts.uuid.clone()).collect(), cuda)
    }

    /// The object `gpu` of `windlass doctor --json`.
    pub fn json(&self) -> Value {
        let survey = self.survey.as_ref().ok();
        json!({
            "driver": {
                "module": self.module,
                "library": self.library,
                "cuda": survey.map(|s| s.cuda),
                "needs": NEEDS_DRIVER,
                "present": !matches!(self.survey, Err(CudaError::NoDriver { .. })),
                "error": self.survey.as_ref().err().map(ToString::to_string),
            },
            "needs_capability": NEEDS_CAPABILITY,
            "devices": survey.map_or_else(Vec::new, |s| s.devices.iter().map(device_json).collect()),
            "reach": survey.map_or_else(Vec::new, |s| s.reach.clone()),
            "expandable_segments": self.expandable,
            "shared_segments": self.shared_segments,
            "memlock": self.memlock,
        })
    }
}

/// The devices that could be opened.
pub fn memories(survey: &Survey) -> impl Iterator<Item = (&Device, &Memory)> {
    survey.devices.iter().filter_map(|d| Some((d, d.memory.as_ref().ok()?)))
}

/// Asks the driver on a separate thread, so that a driver that never answers does not block the caller.
pub fn probe_with_timeout() -> Result<Survey, CudaError> {
    let stage = "looking at the GPUs";
    let late = |_| CudaError::Stopped { stage, stopped: Stopped::Deadline };
    let (answer, answered) = mpsc::sync_channel(1);
    let asked = std::thread::Builder::new().name("gpu-survey".into()).spawn(move || {
        let _ = answer.send(probe::survey());
    });
    match asked {
        Ok(_detached) => answered.recv_timeout(DRIVER_TIMEOUT).map_err(late)?,
        Err(_) => probe::survey(),
    }
}

fn device_json(device: &Device) -> Value {
    let f = &device.facts;
    let memory = device.memory.as_ref().ok();
    json!({
        "ordinal": f.ordinal,
        "name": f.name,
        "uuid": f.uuid,
        "capability": f.capability,
        "free": memory.map(|m| m.free),
        "total": f.memory,
        "error": device.memory.as_ref().err(),
        "pins": memory.map(|m| m.pins.is_ok()),
        "exports_handles": memory.map(|m| m.handles.is_ok()),
        "exports_descriptors": memory.map(|m| m.descriptors),
    })
}

/// `backend:native,expandable_segments:True` asks for expandable segments.
fn is_expandable(text: OsString) -> bool {
    let text = text.into_string().unwrap_or_default().to_ascii_lowercase();
    let setting = |s: &str| {
        s.split_once(':').is_some_and(|(k, v)| k.trim() == "expandable_segments" && v.trim() == "true")
    };
    text.split(',').any(setting)
}

/// `550.54.15` from a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …`.
fn module_version(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let version = |w: &&str| w.contains('.') && w.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(version).unwrap_or("of an unknown version").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_allocator_and_versions_of_the_module_are_read() {
        for (text, asked) in
            [("expandable_segments:False", false), ("x", false), ("expandable_segments:true", true)]
        {
            assert_eq!(is_expandable(text.into()), asked, "{text}");
        }
        assert_eq!(module_version("nonsense"), "of an unknown version");
    }
}
