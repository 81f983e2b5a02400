//! Checks of NIXL: the library, its plugins, RDMA devices, GPUDirect.

use std::sync::mpsc;
use std::time::Duration;

use windlass_data::nixl::{self, Library, NixlError};

use super::Check;
use super::system::System;

/// How long the library may take to start UCX. A thread that takes longer is abandoned.
const TIMEOUT: Duration = Duration::from_secs(20);

/// What was found.
pub(crate) struct Found {
    library: Result<Library, String>,
    /// Whether it was found and cannot be used.
    broken: bool,
    rdma: Vec<String>,
    gpudirect: bool,
}

impl Found {
    /// Looks for RDMA devices, and opens the library if it is there.
    pub(crate) fn look(system: &System) -> Found {
        let (answer, told) = mpsc::channel();
        let asked = std::thread::Builder::new().name("windlass-nixl".into()).spawn(move || {
            let _ = answer.send(nixl::survey(&nixl::Config::default()));
        });
        let late = || (format!("NIXL did not start within {} s", TIMEOUT.as_secs()), true);
        let library = match asked.map(|_| told.recv_timeout(TIMEOUT)) {
            Ok(Ok(library)) => library.map_err(|e| (e.to_string(), !matches!(e, NixlError::Absent { .. }))),
            Ok(Err(_)) => Err(late()),
            Err(error) => Err((error.to_string(), true)),
        };
        let modules = system.read("/proc/modules").unwrap_or_default();
        let broken = matches!(&library, Err((_, true)));
        Found {
            library: library.map_err(|(why, _)| why),
            broken,
            rdma: nixl::rdma_devices(),
            gpudirect: modules.lines().any(|m| m.starts_with("nvidia_peermem ")),
        }
    }

    /// Whether the library works here.
    pub(crate) fn usable(&self) -> bool {
        self.library.is_ok()
    }

    pub(crate) fn has_rdma(&self) -> bool {
        !self.rdma.is_empty()
    }

    pub(crate) fn checks(&self) -> Vec<Check> {
        let library = match &self.library {
            Ok(library) => Check::ok(
                "NIXL library",
                format!("{}, plugins {}", library.release, library.plugins.join(" ")),
            ),
            Err(why) if self.broken => Check::ok("NIXL library", "cannot be used").advise(true, why.clone()),
            Err(why) => Check::ok("NIXL library", "not installed").advise(self.has_rdma(), why.clone()),
        };
        let rdma = if self.rdma.is_empty() { "none".to_owned() } else { self.rdma.join(" ") };
        let rdma = Check::ok("RDMA devices", rdma).advise(
            self.has_rdma() && self.usable(),
            "images can be read over RDMA: start agents and receivers with --nixl auto (docs/nixl.md)",
        );
        let gpudirect =
            if self.gpudirect { "nvidia_peermem is loaded" } else { "nvidia_peermem is not loaded" };
        vec![library, rdma, Check::ok("GPUDirect RDMA", gpudirect)]
    }
}
