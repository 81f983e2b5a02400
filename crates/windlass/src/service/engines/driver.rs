//! One engine, driven by a program that decides by itself when: a load at a time, with the guard, the lock and the journal
//! of `windlass receive --engine`.
//!
//! Owns: [`Driver`]. Called by the Python package, for its loaders. Must not: load anything by itself.
//!
//! Two programs may drive one engine: the lock in its directory lets them take turns, if both use the same directory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use serde::Serialize;
use windlass_core::address::{AddressError, Endpoint};
use windlass_data::private;
use windlass_data::stop::Stop;

use super::check::Baseline;
use super::error::EngineError;
use super::follow::Follower;
use super::guard::{self, GRACE, Routes, Target};
use super::hold::Holder;
use super::http::Http;
use super::transaction::{Done, Journal, Phase};
use super::{Dialect, EngineOptions, EngineSpec, EngineStatus, Label, Place, Shared, State};
use crate::error::Error;

/// An engine, its directory and its options.
pub struct Driver {
    follower: Follower,
    /// For weights that the program writes itself.
    pub holder: Holder,
    journal: Journal,
    options: EngineOptions,
}

/// One load of an image.
#[derive(Clone, Debug)]
pub struct ImageLoad {
    /// The directory of the image.
    pub image: PathBuf,
    /// The version that it must hold; any, if none is given.
    pub wanted: Option<Label>,
    /// The directory of links, for engines that load from a path.
    pub links: Option<PathBuf>,
    /// What an engine needs beside the weights, in place of the option.
    pub model_dir: Option<PathBuf>,
    /// From the first write to the end, in place of the option.
    pub timeout: Option<Duration>,
}

/// An engine as it is now.
#[derive(Clone, Debug, Serialize)]
pub struct DriverStatus {
    /// Its name in messages.
    pub engine: String,
    /// The name of the version that it says it has, if that is one of ours.
    pub live: Option<String>,
    /// How far a load got that did not end; `None` if the engine serves.
    pub phase: Option<Phase>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("holder", &self.holder).finish_non_exhaustive()
    }
}

/// The directory of a user's engines, if a program names none: like the engines, it does not outlive the host's memory.
fn default_dir() -> PathBuf {
    let shared = Path::new("/dev/shm");
    let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    parent.join(format!("windlass-engines-{}", rustix::process::getuid().as_raw()))
}

/// The host and port of a URL, which may have neither a port nor an end.
fn endpoint_of(url: &str) -> Result<Endpoint, AddressError> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let authority = rest.split('/').next().unwrap_or_default();
    let has_port = authority.rsplit(']').next().is_some_and(|end| end.contains(':'));
    let port = match (has_port, scheme) {
        (true, _) => "",
        (false, "https") => ":443",
        (false, _) => ":80",
    };
    format!("{scheme}://{authority}{port}").parse()
}

impl Driver {
    /// Drives the engine at `url`. Its lock, journal and reports are in a directory of its own below `dir`.
    pub fn new(
        dialect: Dialect,
        url: &str,
        options: EngineOptions,
        dir: Option<PathBuf>,
    ) -> Result<Driver, Error> {
        let url = url.trim_end_matches('/');
        let endpoint = endpoint_of(url).map_err(|e| Error::Usage(e.to_string()))?;
        let spec = EngineSpec { dialect, endpoint };
        let parent = dir.unwrap_or_else(default_dir);
        let dir = parent.join(spec.dir_name());
        private::own_with(&parent, 0o700)?;
        private::own_with(&dir, 0o700)?;
        private::own_with(&guard::reports(&dir), 0o700)?;
        let name = format!("{}={url}", dialect.as_str());
        let target = Target {
            engine: name.clone(),
            routes: match dialect {
                Dialect::Vllm => Routes::Vllm,
                Dialect::Sglang => Routes::Sglang,
            },
            url: url.to_owned(),
            key: options.key.as_ref().map(|k| k.expose().to_owned()),
            dir: dir.clone(),
            model: dir.join("model"),
            mode: options.mode,
            cache: options.cache,
            halt: options.manual.halt,
        };
        let state = State::new(EngineStatus::new(name.clone()));
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let place = Place { image: PathBuf::new(), engines: dir.clone() };
        let told = (shared, Arc::new(|_: &_| ()) as super::Teller, Stop::never());
        let mut follower = Follower::new(&spec, options.clone(), place, dir.clone(), None, told);
        follower.http = Http::new(name, url, options.key.clone());
        Ok(Driver { follower, holder: Holder::new(target), journal: Journal::of(&dir), options })
    }

    /// Loads the version in an image: a whole guarded load.
    pub fn load(&mut self, load: ImageLoad, stop: &Stop) -> Result<Done, EngineError> {
        let follower = &mut self.follower;
        let config = load.model_dir.or_else(|| self.options.config.clone());
        let checks = !self.options.manual.unchecked;
        follower.baseline = match config.as_deref().filter(|_| checks) {
            Some(dir) => Baseline::of_checkpoint(dir)?,
            None => None,
        };
        follower.options.config = config;
        follower.options.manual.links = load.links;
        follower.options.timeout = load.timeout.unwrap_or(self.options.timeout);
        follower.options.lease = self.options.lease.min(follower.options.timeout);
        follower.place.image = load.image;
        follower.stop = stop.with_timeout(follower.options.lease + follower.options.timeout + GRACE);
        follower.once(load.wanted)
    }

    /// What the engine says of itself, and what its journal says.
    pub fn status(&mut self, stop: &Stop) -> Result<DriverStatus, EngineError> {
        self.follower.stop = stop.clone();
        let live = self.follower.live()?.map(|label| label.to_string());
        Ok(DriverStatus { engine: self.follower.name.clone(), live, phase: self.phase()? })
    }

    /// How far a load got that did not end; `None` if the engine serves.
    pub fn phase(&self) -> Result<Option<Phase>, EngineError> {
        Ok(self.journal.read()?.map(|entry| entry.phase))
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.follower.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_without_a_port_or_with_a_path_names_its_server() {
        for (url, expected) in [
            ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
            ("http://host", "http://host:80"),
            ("https://host/engine/1", "https://host:443"),
            ("http://[::1]:8000/x", "http://[::1]:8000"),
            ("http://[::1]", "http://[::1]:80"),
        ] {
            assert_eq!(endpoint_of(url).unwrap().as_str(), expected);
        }
        assert!(endpoint_of("http://").is_err());
    }
}
