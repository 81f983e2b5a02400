//! An agent that is kept running for a trainer (see [`windlass::service::supervise`]).

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use serde_json::json;
use windlass::service::supervise::{Spec, Supervisor as Kept};

use crate::enter::{Home, enter};
use crate::errors::Failure;

/// Keeps one `windlass agent` running for a region until it is stopped or this process ends.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Supervisor {
    kept: Kept,
    home: Home,
}

#[pymethods]
impl Supervisor {
    /// Starts the agent and returns at once. `program` are the words that start the command, `options` further
    /// arguments of `windlass agent`, `environment` variables to set, or to leave out where the value is `None`.
    #[new]
    #[pyo3(signature = (region, *, program, options, environment = Vec::new(), log = None))]
    fn new(
        py: Python<'_>,
        region: PathBuf,
        program: Vec<OsString>,
        options: Vec<OsString>,
        environment: Vec<(OsString, Option<OsString>)>,
        log: Option<PathBuf>,
    ) -> PyResult<Supervisor> {
        if program.is_empty() {
            return Err(Failure::invalid("program is empty: give the words that start the command").into());
        }
        let spec = Spec { program, options, environment, log, ..Spec::new(region) };
        let kept = py.detach(|| Kept::start(spec)).map_err(Failure::from)?;
        Ok(Supervisor { kept, home: Home::here() })
    }

    /// Where the agent listens. Waits until it does, for `timeout` seconds.
    fn endpoint(&self, py: Python<'_>, timeout: f64) -> PyResult<String> {
        self.home.check("supervisor")?;
        enter(py, Some(timeout), |stop| Ok(self.kept.address(stop)?.endpoint))
    }

    /// How the agent is, as JSON: `running`, `pid`, `endpoint`, `data_port`, `token_file`, `restarts`, `last_error`,
    /// `log`.
    fn status(&self) -> PyResult<String> {
        self.home.check("supervisor")?;
        let status = self.kept.status().map_err(Failure::from)?;
        let here = status.address;
        let told = json!({
            "running": status.running,
            "pid": status.pid,
            "endpoint": here.as_ref().map(|h| &h.endpoint),
            "data_port": here.as_ref().map(|h| h.data_port),
            "token_file": here.as_ref().and_then(|h| h.token_file.as_ref()).map(|f| f.display().to_string()),
            "restarts": status.restarts,
            "last_error": status.last_error,
            "log": status.log.display().to_string(),
        });
        Ok(told.to_string())
    }

    /// Ends the agent, within `timeout` seconds by itself or then by signals. Again is nothing.
    fn stop(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.home.check("supervisor")?;
        let patience = Duration::try_from_secs_f64(timeout)
            .map_err(|_| Failure::invalid(format!("a timeout of {timeout} s makes no sense")))?;
        // Ctrl-C does not call it off, it hurries the agent.
        enter(py, None, |stop| Ok(self.kept.stop(patience, stop)?))
    }

    /// The descriptor whose last copy keeps the agent alive; `None` once it was told to end.
    fn pipe_fd(&self) -> Option<i32> {
        if self.home.is_here() { self.kept.pipe_fd() } else { None }
    }

    /// In a forked child: closes the child's copy of that descriptor. Elsewhere: nothing.
    fn close_in_child(&self) {
        self.kept.close_in_child();
    }
}
