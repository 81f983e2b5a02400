//! Judges the CUDA driver, the GPUs and their memory.
//!
//! A host without a driver gets one line that says so: Windlass then publishes and loads through host memory. Findings are
//! advice, never problems.

use windlass_core::choose::{NEEDS_CAPABILITY, NEEDS_DRIVER};
use windlass_data::cuda::CudaError;
use windlass_data::cuda::probe::{Device, Memory, Survey};
use windlass_data::cuda::survey::{Gpus, memories};

use super::Check;
use crate::console::bytes;

/// All checks.
pub(super) fn checks(gpus: &Gpus) -> Vec<Check> {
    let mut checks = vec![driver(gpus)];
    let Ok(survey) = &gpus.survey else { return checks };
    checks.extend(survey.devices.iter().map(device));
    checks.extend([pinned(gpus, survey), peers(survey), ipc(survey), allocator(gpus, survey)]);
    checks
}

fn driver(gpus: &Gpus) -> Check {
    let name = "cuda driver";
    let module = gpus.module.as_deref().map_or(String::new(), |v| format!("{v}, "));
    let e = match &gpus.survey {
        Ok(survey) => {
            let (has, needs) = (dotted(survey.cuda), dotted(NEEDS_DRIVER));
            return Check::ok(name, format!("{module}CUDA {has} (needs {needs})"));
        }
        Err(e) => e,
    };
    let missing = matches!(e, CudaError::NoDriver { .. });
    match (&gpus.module, &gpus.library) {
        (module, _) if matches!(e, CudaError::Stopped { .. }) => {
            let value = module.as_deref().unwrap_or("a library");
            Check::ok(name, format!("{value}, does not answer")).advise(
                true,
                format!("{e}; nvidia-smi may hang too: look for Xid in dmesg, and reset the GPU or the machine"),
            )
        }
        (None, None) if missing => Check::ok(name, "none: weights go through host memory"),
        (Some(version), _) if missing => Check::ok(name, version.clone()).advise(
            true,
            "the kernel has it, but libcuda.so.1 is missing here; start the container with the NVIDIA runtime (--gpus all)",
        ),
        (None, Some(library)) if missing || matches!(e, CudaError::NoFunction { .. }) => {
            Check::ok(name, format!("{}, not usable", library.display())).advise(true, e.to_string())
        }
        (None, Some(library)) => Check::ok(name, library.display().to_string()).advise(
            true,
            format!(
                "the library is here, but the kernel has no driver; load it (`modprobe nvidia`), or give the \
                 container a GPU; the library says: {e}"
            ),
        ),
        (module, _) => {
            let value = module.as_deref().unwrap_or("a library");
            Check::ok(name, format!("{value}, not usable")).advise(true, e.to_string())
        }
    }
}

fn pinned(gpus: &Gpus, survey: &Survey) -> Check {
    let name = "gpu pinned memory";
    let limit = gpus.memlock.map_or("unlimited".into(), bytes);
    let refused = trial(survey, |m| m.pins.as_ref().err());
    let value = if refused.is_some() { "refused" } else { "possible" };
    Check::ok(name, format!("{value}, memlock {limit}")).advise(
        refused.is_some(),
        format!(
            "copies go through a small pinned buffer and take longer; allow it with `ulimit -l unlimited` or --ulimit \
             memlock=-1 ({})",
            refused.unwrap_or_default()
        ),
    )
}

fn allocator(gpus: &Gpus, survey: &Survey) -> Check {
    let name = "gpu allocator of torch";
    if !gpus.expandable {
        return Check::ok(name, "no expandable segments asked for");
    }
    let exported = memories(survey).all(|(_, m)| m.descriptors);
    let remedy =
        if exported { "set TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1" } else { "unset expandable_segments" };
    Check::ok(name, "expandable segments").advise(
        !exported || !gpus.shared_segments,
        format!(
            "other processes cannot open them, so that cuda_ipc copies parameters instead of lending them; {remedy}, or \
             use packed_cuda_ipc, whose arena is not torch's"
        ),
    )
}

/// The first failure of a trial, with the device's number.
fn trial(survey: &Survey, failed: impl Fn(&Memory) -> Option<&String>) -> Option<String> {
    memories(survey).find_map(|(d, m)| Some(format!("GPU {}: {}", d.facts.ordinal, failed(m)?)))
}

fn device(device: &Device) -> Check {
    let f = &device.facts;
    let free = device.memory.as_ref().map_or(String::new(), |m| format!("{} free of ", bytes(m.free)));
    let total = bytes(f.memory);
    let value = format!("{}, {}, {free}{total}, compute capability {}", f.name, f.uuid, dotted(f.capability));
    let old = f.capability < NEEDS_CAPABILITY;
    Check::ok(format!("gpu {}", f.ordinal), value)
        .advise(
            old,
            format!(
                "the kernels need compute capability {} (Ampere) or newer; weights go through the host",
                dotted(NEEDS_CAPABILITY)
            ),
        )
        .advise(device.memory.is_err(), device.memory.as_ref().err().map_or("", |e| e.as_str()))
}

/// Informational: Windlass does not need peer access.
fn peers(survey: &Survey) -> Check {
    let name = "gpu peer access";
    let count = survey.devices.len();
    if count < 2 {
        return Check::ok(name, "one device");
    }
    let pairs: Vec<(usize, usize, Option<bool>)> = survey
        .reach
        .iter()
        .enumerate()
        .flat_map(|(a, row)| {
            row.iter().enumerate().filter(move |(b, _)| *b != a).map(move |(b, r)| (a, b, *r))
        })
        .collect();
    let none: Vec<String> =
        pairs.iter().filter(|(.., reach)| *reach != Some(true)).map(|(a, b, _)| format!("{a}→{b}")).collect();
    let value = if none.is_empty() {
        format!("all {count} devices")
    } else if none.len() == pairs.len() {
        format!("none between {count} devices")
    } else {
        format!("all but {}", none.join(" "))
    };
    Check::ok(name, value)
}

fn ipc(survey: &Survey) -> Check {
    let name = "gpu ipc";
    let refused = trial(survey, |m| m.handles.as_ref().err());
    let handles = if refused.is_some() { "no handles" } else { "handles" };
    let descriptors =
        if memories(survey).all(|(_, m)| m.descriptors) { "descriptors" } else { "no descriptors" };
    if memories(survey).next().is_none() {
        return Check::unknown(name);
    }
    Check::ok(name, format!("{handles}, {descriptors}")).advise(
        refused.is_some(),
        format!(
            "engines on the trainers' GPUs cannot read their memory and pull over shared memory instead; virtual \
             machines and WSL may forbid it ({})",
            refused.unwrap_or_default()
        ),
    )
}

fn dotted((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use serde_json::json;
    use windlass_data::cuda::Facts;
    use windlass_data::stop::Stopped;

    use super::super::Verdict;
    use super::super::system::System;
    use super::super::system::tests::machine;
    use super::*;

    fn facts(ordinal: u32, capability: (u32, u32)) -> Facts {
        Facts {
            ordinal,
            name: "NVIDIA H200".into(),
            uuid: format!("GPU-{ordinal}"),
            capability,
            cuda: (12, 8),
            memory: 140 << 30,
            processors: 132,
            registers_read_only: true,
        }
    }

    fn memory() -> Memory {
        Memory { free: 130 << 30, pins: Ok(()), handles: Ok(()), descriptors: true }
    }

    #[expect(clippy::unnecessary_wraps, reason = "what a driver answers")]
    fn healthy() -> Result<Survey, CudaError> {
        let devices =
            (0..2).map(|n| Device { facts: facts(n, (9, 0)), memory: Ok(memory()) }).collect::<Vec<_>>();
        Ok(Survey { cuda: (12, 8), devices, reach: vec![vec![Some(true); 2]; 2] })
    }

    #[expect(clippy::unnecessary_wraps, reason = "what a driver answers")]
    fn troubled() -> Result<Survey, CudaError> {
        let refused = Memory {
            pins: Err("operation not permitted".into()),
            handles: Err("not supported".into()),
            descriptors: false,
            ..memory()
        };
        let devices = vec![
            Device { facts: facts(0, (9, 0)), memory: Ok(refused) },
            Device { facts: facts(1, (7, 5)), memory: Err("7.5 is too old".into()) },
            Device { facts: facts(2, (9, 0)), memory: Err("out of memory".into()) },
        ];
        let reach =
            vec![vec![Some(true), None, Some(true)], vec![None; 3], vec![Some(false), None, Some(true)]];
        Ok(Survey { cuda: (12, 8), devices, reach })
    }

    const MODULE: (&str, &str) = (
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 12\n",
    );
    const LIBRARY: (&str, &str) = ("/usr/lib64/libcuda.so.1", "");

    fn look(files: &[(&str, &str)], gpus: fn() -> Result<Survey, CudaError>) -> Gpus {
        let (_dir, system) = machine(files);
        system.with_gpus(gpus).gpus()
    }

    fn find(checks: &[Check], name: &str) -> Check {
        checks.iter().find(|c| c.name == name).unwrap_or_else(|| panic!("{name} in {checks:?}")).clone()
    }

    fn advice(check: &Check) -> &str {
        match &check.verdict {
            Verdict::Advice(text) => text,
            other => panic!("{}: {other:?}", check.name),
        }
    }

    #[test]
    fn a_machine_without_a_gpu_has_one_line_about_it_and_is_not_blamed() {
        let gpus = look(&[], || Err(CudaError::NoDriver { said: String::new() }));
        assert_eq!(checks(&gpus), [Check::ok("cuda driver", "none: weights go through host memory")]);
        let object = gpus.json();
        assert_eq!((&object["driver"]["present"], &object["devices"]), (&json!(false), &json!([])));
        assert!(object["driver"]["error"].as_str().unwrap().contains("libcuda.so.1"), "{object}");
    }

    #[test]
    fn healthy_gpus_are_listed_with_what_their_memory_can_do() {
        let gpus = look(&[MODULE, LIBRARY], healthy);
        let checks = checks(&gpus);
        assert!(checks.iter().all(|c| c.verdict == Verdict::Ok), "{checks:?}");
        assert_eq!(find(&checks, "cuda driver").value, "550.54.15, CUDA 12.8 (needs 12.0)");
        let gpu = find(&checks, "gpu 1").value;
        assert_eq!(gpu, "NVIDIA H200, GPU-1, 130.00 GiB free of 140.00 GiB, compute capability 9.0");
        assert_eq!(find(&checks, "gpu peer access").value, "all 2 devices");
        assert_eq!(find(&checks, "gpu ipc").value, "handles, descriptors");
        assert!(find(&checks, "gpu pinned memory").value.starts_with("possible, memlock "));
        let object = gpus.json();
        assert_eq!(object["driver"]["cuda"], json!([12, 8]));
        assert_eq!(object["devices"][0]["uuid"], "GPU-0");
        assert_eq!(object["devices"][0]["free"], 130u64 << 30);
        assert_eq!(object["reach"], json!([[true, true], [true, true]]));
    }

    #[test]
    fn gpus_that_cannot_be_used_or_shared_get_advice_and_no_problem() {
        let checks = checks(&look(&[MODULE, LIBRARY], troubled));
        assert!(checks.iter().all(|c| !matches!(c.verdict, Verdict::Problem(..))), "{checks:?}");
        assert!(advice(&find(&checks, "gpu 1")).contains("compute capability 8.0 (Ampere)"));
        assert_eq!(advice(&find(&checks, "gpu 2")), "out of memory");
        let pinned = find(&checks, "gpu pinned memory");
        assert!(pinned.value.starts_with("refused"), "{pinned:?}");
        assert!(advice(&pinned).contains("memlock=-1 (GPU 0: operation not permitted)"), "{pinned:?}");
        assert_eq!(find(&checks, "gpu peer access").value, "all but 0→1 1→0 1→2 2→0 2→1");
        let ipc = find(&checks, "gpu ipc");
        assert_eq!(ipc.value, "no handles, no descriptors");
        assert!(advice(&ipc).contains("GPU 0: not supported"), "{ipc:?}");
    }

    #[test]
    fn half_a_cuda_driver_gets_advice() {
        let missing = || Err(CudaError::NoDriver { said: String::new() });
        let driver = |files: &[(&str, &str)], gpus| driver(&look(files, gpus));
        assert!(advice(&driver(&[MODULE], missing)).contains("libcuda.so.1 is missing"));
        let no_device = || Err(CudaError::NoDevice { why: "no CUDA-capable device is detected".into() });
        let library_only = driver(&[LIBRARY], no_device);
        assert!(advice(&library_only).contains("modprobe nvidia"), "{library_only:?}");
        assert!(advice(&library_only).contains("no CUDA-capable device"), "{library_only:?}");
        // It is not the kernel's fault.
        let broken = || Err(CudaError::NoDriver { said: "libcuda.so.1: file too short".into() });
        let stub = || Err(CudaError::NoFunction { name: "cuInit", needs: NEEDS_DRIVER });
        for (gpus, why) in [(broken as fn() -> _, "file too short"), (stub, "a stub for linking")] {
            let check = driver(&[LIBRARY], gpus);
            assert!(check.value.ends_with("not usable"), "{check:?}");
            assert!(advice(&check).contains(why) && !advice(&check).contains("modprobe"), "{check:?}");
        }
    }

    #[test]
    fn a_driver_that_is_too_old_is_told_what_is_needed() {
        let old = || Err(CudaError::OldDriver { has: (11, 4), needs: NEEDS_DRIVER });
        let gpus = look(&[MODULE, LIBRARY], old);
        let [check] = checks(&gpus).try_into().unwrap();
        assert_eq!(check.value, "550.54.15, not usable");
        assert!(advice(&check).contains("CUDA 11.4 and at least 12.0"), "{check:?}");
        assert!(gpus.json()["driver"]["error"].as_str().unwrap().contains("11.4"));
        let hung = || Err(CudaError::Stopped { stage: "looking at the GPUs", stopped: Stopped::Deadline });
        let hung = driver(&look(&[MODULE, LIBRARY], hung));
        assert!(hung.value.ends_with("does not answer") && advice(&hung).contains("dmesg"), "{hung:?}");
        // The loader finds libraries in other directories too.
        let elsewhere =
            driver(&look(&[], || Err(CudaError::NoFunction { name: "cuInit", needs: NEEDS_DRIVER })));
        assert!(advice(&elsewhere).contains("cuInit"), "{elsewhere:?}");
    }

    #[test]
    fn expandable_segments_get_advice_where_they_cannot_be_shared() {
        fn asked(name: &str) -> Option<OsString> {
            (name == "PYTORCH_CUDA_ALLOC_CONF").then(|| "backend:native, expandable_segments:True".into())
        }
        fn shared(name: &str) -> Option<OsString> {
            asked(name).or_else(|| (name == "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC").then(|| "1".into()))
        }
        let name = "gpu allocator of torch";
        let (_dir, system) = machine(&[]);
        let check = |system: &System| find(&checks(&system.gpus()), name);
        let system = system.with_gpus(troubled).with_env(asked);
        assert!(advice(&check(&system)).contains("unset expandable_segments"));
        let system = system.with_gpus(healthy);
        assert!(advice(&check(&system)).contains("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1"));
        let system = system.with_env(shared);
        assert_eq!(check(&system), Check::ok(name, "expandable segments"));
        assert_eq!(system.gpus().json()["expandable_segments"], true);
    }
}
