//! One engine, driven by a program that decides by itself when: a load at a time, with the guard, the lock and the journal
//! of `windlass receive --engine`.
//!
//! Owns: [`Driver`]. Called by the Python package, for its loaders. Must not: load anything by itself, or compare an image
//! with an engine, which its caller has done.
//!
//! Two programs may drive one engine: the lock in its directory lets them take turns, if both use the same directory. The
//! directory is removed when the engine serves and its driver ends. What killed programs have left is removed by the next
//! driver, also a journal whose engine has ended.

use std::fs;
use std::io;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use windlass_core::address::Token;
use windlass_data::image::ImageView;
use windlass_data::region::Region;
use windlass_data::stop::Stop;

use super::check;
use super::error::EngineError;
use super::guard::{self, GRACE, Guard, Job, Lock, Routes, Target};
use super::hold::{Holder, Word};
use super::order::How;
use super::transaction::{self, Done, Journal, Outcome};
use super::{CachePolicy, Dialect, Halt, Label, PauseMode};

/// How long an engine may take to accept a connection before its journal is kept.
const CONNECT: Duration = Duration::from_millis(500);

/// An engine and its directory.
#[derive(Debug)]
pub struct Driver {
    target: Target,
    holder: Mutex<Holder>,
}

/// One load of an image.
#[derive(Clone, Debug)]
pub struct ImageLoad {
    /// The directory of the image.
    pub image: PathBuf,
    /// The version that it must hold; any, if none is given.
    pub wanted: Option<Label>,
    /// The directory of links that the engine loads from.
    pub links: PathBuf,
    /// What an engine needs beside the weights.
    pub model_dir: Option<PathBuf>,
    /// From the pause to the first write.
    pub lease: Duration,
    /// From the first write to the end.
    pub timeout: Duration,
}

/// The directory of a user's engines, if a program names none: like the engines, it does not outlive the host's memory.
fn default_dir() -> PathBuf {
    let shared = Path::new("/dev/shm");
    let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    parent.join(format!("windlass-engines-{}", rustix::process::getuid().as_raw()))
}

/// Removes what killed programs have left of engines that serve, or that have ended.
fn sweep(engines: &Path) {
    for entry in fs::read_dir(engines).into_iter().flatten().flatten() {
        let dir = entry.path();
        let journal = Journal::of(&dir);
        if matches!(journal.read(), Ok(Some(_)))
            && has_ended(&entry.file_name().to_string_lossy())
            && let Ok(Some(_lock)) = Lock::take(&dir)
        {
            let _ = journal.clear();
        }
        guard::remove_idle(&dir);
    }
}

/// Whether nothing listens where the engine was whose directory has this name (`Dialect::dir_name`).
fn has_ended(name: &str) -> bool {
    let address = name.split_once('-').and_then(|(_, address)| address.rsplit_once('-'));
    let Some((host, Ok(port))) = address.map(|(host, port)| (host, port.parse::<u16>())) else {
        return false;
    };
    let Ok(mut found) = (host, port).to_socket_addrs() else { return false };
    found.all(|address| {
        let refused = TcpStream::connect_timeout(&address, CONNECT);
        refused.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
    })
}

impl Driver {
    /// Drives the engine at `url`. Its lock and its journal are in a directory of its own below `dir`.
    pub fn new(
        dialect: Dialect,
        url: &str,
        key: Option<&Token>,
        (mode, cache, halt): (PauseMode, CachePolicy, Option<Halt>),
        dir: Option<PathBuf>,
    ) -> Driver {
        let url = url.trim_end_matches('/').to_owned();
        let parent = dir.unwrap_or_else(|| {
            let dir = default_dir();
            sweep(&dir);
            dir
        });
        let dir = parent.join(dialect.dir_name(url.rsplit("://").next().unwrap_or_default()));
        let target = Target {
            engine: format!("{}={url}", dialect.as_str()),
            routes: match dialect {
                Dialect::Vllm => Routes::Vllm,
                Dialect::Sglang => Routes::Sglang,
            },
            url,
            key: key.map(|k| k.expose().to_owned()),
            model: PathBuf::new(),
            dir,
            mode,
            cache,
            halt,
        };
        Driver { holder: Mutex::new(Holder::new(target.clone())), target }
    }

    /// Has an SGLang server load the version in an image, through a directory of links: a whole guarded load.
    pub fn load(&self, load: &ImageLoad, stop: &Stop) -> Result<Done, EngineError> {
        let engine = &self.target.engine;
        if self.target.routes == Routes::Vllm {
            let why = "a driver has SGLang servers load an image; use `windlass receive --engine`".into();
            return Err(EngineError::Unsupported { engine: engine.clone(), why });
        }
        let stop = stop.with_timeout(load.lease + load.timeout + GRACE);
        let region = Region::open(&load.image)?;
        let view = ImageView::take(&region, load.lease + load.timeout + GRACE, &stop)?;
        let label = Label::from(view.known());
        if let Some(wanted) = load.wanted.filter(|wanted| *wanted != label) {
            return Err(transaction::stale(engine, format!("the image holds {label}, not {wanted}")));
        }
        check::link(&load.links, &view.path(), load.model_dir.as_deref())?;
        let job = Job {
            target: Target { model: load.links.clone(), ..self.target.clone() },
            image: load.image.clone(),
            layout_hash: view.manifest().layout_hash(),
            incarnation: label.incarnation.0,
            version: label.version,
            lease: load.lease.as_secs_f64(),
            timeout: load.timeout.as_secs_f64(),
            prepare: false,
            exact: true,
            how: How::Auto,
        };
        match Guard::start(&job)?.wait(&stop, |_| ())? {
            Outcome::Loaded(done) => Ok(done),
            Outcome::Kept(e) | Outcome::Fenced(e) | Outcome::Lost(e) => Err(e),
        }
    }

    /// For weights that the program writes itself. Answers whether the engine needs a whole load.
    pub fn tell(&self, word: &Word, stop: &Stop) -> Result<bool, EngineError> {
        self.holder.lock().tell(word, stop)
    }

    /// Flushes the prefix cache, paused or not.
    pub fn clear(&self, stop: &Stop) -> Result<(), EngineError> {
        Target { cache: CachePolicy::Reset, ..self.target.clone() }.plain()?.clear(stop)
    }

    /// Names the version that the program has written.
    pub fn label(&self, label: &str, stop: &Stop) -> Result<(), EngineError> {
        self.target.plain()?.label(label, stop)
    }

    /// Whether a load began and did not end, by the journal: the engine needs a whole one.
    pub fn is_dirty(&self) -> Result<bool, EngineError> {
        Ok(Journal::of(&self.target.dir).read()?.is_some_and(|entry| entry.phase.is_dirty()))
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.target.engine
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.holder.get_mut().end();
        guard::remove_idle(&self.target.dir);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::service::engines::transaction::Phase;

    #[test]
    fn what_killed_drivers_left_goes_unless_the_engine_is_there_and_not_whole() {
        let home = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap().port();
        // Nothing listens on the first ports.
        let (gone, busy) = (1, 2);
        let dir = |dialect: &str, port: u16| home.path().join(format!("{dialect}-127.0.0.1-{port}"));
        let kept = [dir("sglang", here), home.path().join("vllm-of-another-kind")];
        let swept = [dir("vllm", here), dir("sglang", gone)];
        for dir in kept.iter().chain(&swept) {
            drop(Lock::take(dir).unwrap().unwrap());
        }
        for dir in [&kept[0], &kept[1], &swept[1]] {
            Journal::of(dir).put(Phase::Writing, "windlass:1:1", None).unwrap();
        }
        let busy = dir("sglang", busy);
        let lock = Lock::take(&busy).unwrap().unwrap();
        sweep(home.path());
        assert!(kept.iter().all(|dir| dir.is_dir()) && busy.is_dir(), "kept");
        assert!(!swept.iter().any(|dir| dir.exists()), "swept");
        drop(lock);
        sweep(home.path());
        assert!(!busy.exists());
    }
}
