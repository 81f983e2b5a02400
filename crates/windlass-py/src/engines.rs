//! An engine that is driven from Python (see [`windlass::service::engines::driver`]).

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::Value;
use windlass::service::engines::driver::{Driver, ImageLoad};
use windlass::service::engines::hold::Word;
use windlass::service::engines::{CachePolicy, Dialect, Halt, Label, PauseMode, check};
use windlass::service::program;
use windlass_core::address::Token;
use windlass_data::stop::Stop;

use crate::enter::{Home, enter};
use crate::errors::Failure;
use crate::held::seconds;

/// One engine, loaded with the lock, the journal and the guard process of `windlass receive --engine`.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct EngineDriver {
    driver: Driver,
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

impl EngineDriver {
    /// Work that may block, and ends on Ctrl-C.
    fn drive<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        work: impl FnOnce(&Driver, &Stop) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        self.home.check("engine driver")?;
        enter(py, timeout, |stop| work(&self.driver, stop))
    }

    fn tell(&self, py: Python<'_>, word: &Word) -> PyResult<bool> {
        self.drive(py, None, |driver, stop| Ok(driver.tell(word, stop)?))
    }
}

#[pymethods]
impl EngineDriver {
    /// For the engine of `kind` (`vllm`, `sglang`) at `url`; `key` is its own API key. `pause` is `keep`, `wait` or `abort`, or
    /// SGLang's `retract` or `in_place`; `cache` is `reset` or `keep`. `dir` is where locks and journals are. `program` are
    /// the words that start the command, with the changes of its `environment`.
    #[new]
    #[pyo3(signature = (
        kind, url, *, program, environment = Vec::new(), key = None, pause = "keep", cache = "reset", dir = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn new(
        kind: &str,
        url: &str,
        program: Vec<OsString>,
        environment: program::Environment,
        key: Option<String>,
        pause: &str,
        cache: &str,
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
        let cache = named::<CachePolicy>("cache", cache, "reset or keep")?;
        let key = key.map(Token::new).transpose();
        let key = key.map_err(|e| Failure::invalid(format!("key: {e}")))?;
        program::set(program, environment);
        let driver = Driver::new(dialect, url, key.as_ref(), (mode, cache, halt), dir);
        let name = driver.name().to_owned();
        Ok(EngineDriver { driver, name, home: Home::here() })
    }

    /// Has an SGLang server load the version in the image at `image_dir`, which must be the one that is called `label` if that
    /// is given: pause, load, flush, name, resume. `links` is the directory of links that it loads from, beside what `model_dir`
    /// has. Answers for how many milliseconds it was paused, and how many of them the load took.
    #[pyo3(signature = (image_dir, links, *, lease, timeout, label = None, model_dir = None))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn load(
        &self,
        py: Python<'_>,
        image_dir: PathBuf,
        links: PathBuf,
        lease: f64,
        timeout: f64,
        label: Option<&str>,
        model_dir: Option<PathBuf>,
    ) -> PyResult<(f64, f64)> {
        let wanted = label.map(str::parse::<Label>).transpose();
        let wanted = wanted.map_err(|_| Failure::invalid(format!("{label:?} is not a label of Windlass")))?;
        let (lease, timeout) = (seconds("a lease", lease)?, seconds("a timeout", timeout)?);
        let load = ImageLoad { image: image_dir, wanted, links, model_dir, lease, timeout };
        let done = self.drive(py, None, |driver, stop| Ok(driver.load(&load, stop)?))?;
        Ok((done.pause_ms, done.load_ms))
    }

    /// Whether a load began and did not end, by the journal: the engine needs a whole one.
    fn is_dirty(&self) -> PyResult<bool> {
        Ok(self.driver.is_dirty().map_err(Failure::from)?)
    }

    /// Pauses the engine for weights that the caller writes, which will be called `label`. Until `touch`, the engine is
    /// resumed when the `lease` is over or this process ends. Answers whether an earlier load did not end.
    fn pause(&self, py: Python<'_>, label: Option<String>, lease: f64, timeout: f64) -> PyResult<bool> {
        self.tell(py, &Word::Pause { label, lease, timeout })
    }

    /// Says that a write is about to begin, or, with false, that the engine refused and nothing was written.
    fn touch(&self, py: Python<'_>, touched: bool) -> PyResult<()> {
        self.tell(py, &Word::Touch(touched)).map(drop)
    }

    /// Resumes the engine with its new weights, which are whole.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        self.tell(py, &Word::Resume).map(drop)
    }

    /// Resumes the engine with its old weights, or has it stay paused until a whole load is done, because of `error`, if
    /// something was written. Answers whether it stays paused.
    fn fail(&self, py: Python<'_>, error: String) -> PyResult<bool> {
        self.tell(py, &Word::Fail { error })
    }

    /// Flushes the prefix cache, paused or not.
    fn clear(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.drive(py, Some(timeout), |driver, stop| Ok(driver.clear(stop)?))
    }

    /// Names the version that the caller has written.
    fn label(&self, py: Python<'_>, label: &str, timeout: f64) -> PyResult<()> {
        self.drive(py, Some(timeout), |driver, stop| Ok(driver.label(label, stop)?))
    }
}

/// Makes `dir` a model that an engine can load: links to the file `weights` and to everything in `model_dir` but weights.
#[pyfunction]
#[pyo3(signature = (dir, weights, model_dir = None))]
pub(crate) fn link_model(dir: PathBuf, weights: PathBuf, model_dir: Option<PathBuf>) -> PyResult<()> {
    Ok(check::link(&dir, &weights, model_dir.as_deref()).map_err(Failure::from)?)
}
