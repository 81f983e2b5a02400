//! An engine that is driven from Python (see [`windlass::service::engines::driver`]).

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::Value;
use windlass::service::engines::driver::{Driver, ImageLoad};
use windlass::service::engines::hold::Word;
use windlass::service::engines::transaction::Phase;
use windlass::service::engines::{
    CachePolicy, Dialect, EngineOptions, Extras, Halt, Label, Manual, PauseMode, check,
};
use windlass::service::program;
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_data::stop::Stop;

use crate::enter::{Home, enter};
use crate::errors::Failure;
use crate::held::seconds;

/// One engine, loaded with the lock, the journal and the guard process of `windlass receive --engine`.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct EngineDriver {
    driver: Mutex<Driver>,
    lease: f64,
    /// What messages call it.
    #[pyo3(get)]
    name: String,
    home: Home,
}

/// A value by its name.
fn named<T: DeserializeOwned>(what: &str, value: &str, expected: &str) -> Result<T, Failure> {
    serde_json::from_value(Value::String(value.to_owned()))
        .map_err(|_| Failure::invalid(format!("{what} is {value:?}: expected {expected}")))
}

fn json(value: &impl serde::Serialize) -> PyResult<String> {
    Ok(serde_json::to_string(value).map_err(|e| Failure::new(Kind::Bug, e.to_string()))?)
}

fn secret(what: &str, value: Option<String>) -> Result<Option<Token>, Failure> {
    let wrong = |e| Failure::invalid(format!("{what}: {e}"));
    value.map(Token::new).transpose().map_err(wrong)
}

impl EngineDriver {
    fn driver(&self) -> Result<MutexGuard<'_, Driver>, Failure> {
        self.home.check("engine driver")?;
        // One call at a time; the Python package has a lock with a deadline around them.
        self.driver.try_lock().map_or_else(
            |e| match e {
                std::sync::TryLockError::Poisoned(e) => Ok(PoisonError::into_inner(e)),
                std::sync::TryLockError::WouldBlock => Err(Failure::new(
                    Kind::Denied,
                    "another thread is driving this engine: one call at a time",
                )),
            },
            Ok,
        )
    }

    /// Work that may block, and ends on Ctrl-C.
    fn drive<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        work: impl FnOnce(&mut Driver, &Stop) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        enter(py, timeout, |stop| work(&mut *self.driver()?, stop))
    }

    fn tell(&self, py: Python<'_>, word: &Word) -> PyResult<bool> {
        self.drive(py, None, |driver, stop| Ok(driver.holder.tell(word, stop)?))
    }
}

#[pymethods]
impl EngineDriver {
    /// For the engine of `kind` (`vllm`, `sglang`) at `url`. `token` is that of the Windlass plugin, `key` the engine's own.
    /// `pause` is `keep`, `wait` or `abort`, or SGLang's `retract` or `in_place`; `cache` is `reset` or `keep`. `lease` are
    /// the seconds from a pause to the first write, `timeout` those of a load. With `disk`, an SGLang server loads from a
    /// path; with `unchecked`, the caller has compared the image with the engine. `dir` is where locks and journals are.
    /// `program` are the words that start the command, with the changes of its `environment`.
    #[new]
    #[pyo3(signature = (
        kind, url, *, program, environment = Vec::new(), token = None, key = None, pause = "keep", cache = "reset",
        lease = 60.0, timeout = 600.0, model_dir = None, extras = "ignore", disk = false, unchecked = false, dir = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn new(
        kind: &str,
        url: &str,
        program: Vec<OsString>,
        environment: program::Environment,
        token: Option<String>,
        key: Option<String>,
        pause: &str,
        cache: &str,
        lease: f64,
        timeout: f64,
        model_dir: Option<PathBuf>,
        extras: &str,
        disk: bool,
        unchecked: bool,
        dir: Option<PathBuf>,
    ) -> PyResult<EngineDriver> {
        let dialect = match kind {
            "vllm" => Dialect::Vllm,
            "sglang" => Dialect::Sglang,
            _ => return Err(Failure::invalid(format!("kind is {kind:?}: expected vllm or sglang")).into()),
        };
        let halt = match (dialect, pause) {
            (Dialect::Sglang, "retract") => Some(Halt::Retract),
            (Dialect::Sglang, "in_place") => Some(Halt::InPlace),
            (Dialect::Sglang | Dialect::Vllm, _) => None,
        };
        let mode = match halt {
            Some(_) => PauseMode::Keep,
            None => named("pause", pause, "keep, wait or abort, or SGLang's retract or in_place")?,
        };
        let options = EngineOptions {
            token: secret("token", token)?,
            key: secret("key", key)?,
            mode,
            cache: named::<CachePolicy>("cache", cache, "reset or keep")?,
            lease: seconds("a lease", lease)?,
            timeout: seconds("a timeout", timeout)?,
            config: model_dir,
            extras: match extras {
                "ignore" => Extras::Ignore,
                "error" => Extras::Error,
                _ => {
                    return Err(
                        Failure::invalid(format!("extras is {extras:?}: expected ignore or error")).into()
                    );
                }
            },
            group: false,
            exact: true,
            manual: Manual { halt, disk, unchecked, links: None },
        };
        program::set(program, environment);
        let driver = Driver::new(dialect, url, options, dir).map_err(Failure::from)?;
        let name = driver.name().to_owned();
        Ok(EngineDriver { driver: Mutex::new(driver), lease, name, home: Home::here() })
    }

    /// Loads the version in the image at `image_dir`, which must be the one that is called `label` if that is given: check,
    /// pause, load, flush, name, resume. `links` is the directory of links for an engine that loads from a path, beside
    /// what `model_dir` has. Answers as JSON: `version`, `how`, `pause_ms`, `load_ms`, `extras`, `retried`, `slow`, …
    #[pyo3(signature = (image_dir, *, label = None, links = None, model_dir = None, timeout = None))]
    fn load(
        &self,
        py: Python<'_>,
        image_dir: PathBuf,
        label: Option<&str>,
        links: Option<PathBuf>,
        model_dir: Option<PathBuf>,
        timeout: Option<f64>,
    ) -> PyResult<String> {
        let wanted = label.map(str::parse::<Label>).transpose();
        let wanted = wanted.map_err(|_| Failure::invalid(format!("{label:?} is not a label of Windlass")))?;
        let timeout = timeout.map(|t| seconds("a timeout", t)).transpose()?;
        let load = ImageLoad { image: image_dir, wanted, links, model_dir, timeout };
        let done = self.drive(py, None, |driver, stop| Ok(driver.load(load, stop)?))?;
        json(&done)
    }

    /// Asks the engine, and its journal, as JSON: `engine`, `live` (the version of ours that it has), `phase` (how far a load
    /// got that did not end).
    fn status(&self, py: Python<'_>, timeout: f64) -> PyResult<String> {
        let status = self.drive(py, Some(timeout), |driver, stop| Ok(driver.status(stop)?))?;
        json(&status)
    }

    /// Whether a load began and did not end, by the journal: the engine needs a whole one.
    fn is_dirty(&self) -> PyResult<bool> {
        let phase = self.driver()?.phase().map_err(Failure::from)?;
        Ok(phase.is_some_and(Phase::is_dirty))
    }

    /// Pauses the engine for weights that the caller writes, which will be called `label`. Until `touch`, the engine is
    /// resumed when the lease is over or this process ends. Answers whether an earlier load did not end.
    fn pause(&self, py: Python<'_>, label: Option<String>, timeout: f64) -> PyResult<bool> {
        self.tell(py, &Word::Pause { label, lease: self.lease.min(timeout), timeout })
    }

    /// Says that a write is about to begin, or, with false, that the engine refused and nothing was written.
    fn touch(&self, py: Python<'_>, touched: bool) -> PyResult<()> {
        self.tell(py, &Word::Touch(touched)).map(drop)
    }

    /// Flushes the prefix cache of a paused engine.
    fn clear(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.tell(py, &Word::Clear { timeout }).map(drop)
    }

    /// Ends a load: flushes the cache if `clear`, names the version `label` if it has a name, resumes the engine.
    fn finish(&self, py: Python<'_>, clear: bool, label: Option<String>, timeout: f64) -> PyResult<()> {
        self.tell(py, &Word::Finish { clear, label, timeout }).map(drop)
    }

    /// Resumes an engine to which nothing was written. If its weights are not whole, it stays paused.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        self.tell(py, &Word::Resume).map(drop)
    }

    /// Has the engine stay paused until a whole load is done, because of `error`.
    fn fence(&self, py: Python<'_>, error: String) -> PyResult<()> {
        self.tell(py, &Word::Fence { error }).map(drop)
    }
}

/// Makes `dir` a model that an engine can load: links to the file `weights` and to everything in `model_dir` but weights.
#[pyfunction]
#[pyo3(signature = (dir, weights, model_dir = None))]
pub(crate) fn link_model(dir: PathBuf, weights: PathBuf, model_dir: Option<PathBuf>) -> PyResult<()> {
    Ok(check::link(&dir, &weights, model_dir.as_deref()).map_err(Failure::from)?)
}
