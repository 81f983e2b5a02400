//! An engine's side: an image that follows a publisher.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use windlass::service::control::HttpControl;
use windlass::service::nixl::{Nixl, When};
use windlass::service::store;
use windlass::service::store::fallback::{Fallback, FallbackStore, Turn};
use windlass_core::address::{StoreUrl, Token};
use windlass_core::error::Kind;
use windlass_core::identity::ModelId;
use windlass_core::slice::Selection;
use windlass_core::wire::control::RequestMode;
use windlass_data::history::Limits;
use windlass_data::image::{ImageSpec, ImageView, Known};
use windlass_data::nixl::Config as NixlConfig;
use windlass_data::receiver::{
    Control, ControlError, Fetched, Receiver as Inner, ReceiverConfig, RelayConfig, Relaying, Start,
    StatusHandle,
};
use windlass_data::region::Memfd;
use windlass_data::stop::Stop;
use windlass_data::tcp::PullConfig;
use windlass_data::tls::Trust;

use crate::enter::{Home, enter};
use crate::errors::Failure;
use crate::held::{self, Held};
use crate::layout::Layout;

/// Keeps an image at the newest version of one publisher.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Receiver {
    inner: Mutex<Slot>,
    /// There once the image is open.
    status: OnceLock<StatusHandle>,
    home: Home,
}

/// The image, or what it takes to open it.
enum Slot {
    /// The publisher, who knows the name of the model, has not answered yet.
    Away(Publisher, Open),
    Open(Box<Inner>),
    Closed,
}

/// Whom to follow.
enum Publisher {
    Agent(Arc<dyn Control>),
    Store { url: StoreUrl, version: Option<u64>, trust: Option<Trust>, dir: PathBuf },
}

impl Publisher {
    /// The conversation with it, and the name of its model.
    fn ask(&self, stop: &Stop) -> Result<(Arc<dyn Control>, ModelId), ControlError> {
        let control: Arc<dyn Control> = match self {
            Publisher::Agent(control) => Arc::clone(control),
            Publisher::Store { url, version, trust, dir } => {
                store::follow(url, *version, trust.as_ref(), dir, stop)?
            }
        };
        let model_id = control.version(None, stop)?.model_id;
        Ok((control, model_id))
    }
}

/// Opens the image of a publisher's model.
type Open = Box<dyn Fn(Arc<dyn Control>, ModelId, &Stop) -> Result<Inner, Failure> + Send>;

/// How long the publisher may take to answer while nobody waits for it.
const AT_ONCE: f64 = 5.0;

impl Receiver {
    fn inner(&self) -> Result<MutexGuard<'_, Slot>, Failure> {
        self.home.check("receiver")?;
        Ok(self.inner.lock())
    }

    /// Does something with the image, once the publisher has said which one it is.
    fn with<T>(
        &self,
        stop: &Stop,
        work: impl FnOnce(&mut Inner) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut slot = self.inner()?;
        if let Slot::Away(publisher, open) = &*slot {
            let (control, model_id) = first_contact(|| publisher.ask(stop), stop)?;
            let inner = open(control, model_id, stop)?;
            let _ = self.status.set(inner.status());
            *slot = Slot::Open(Box::new(inner));
        }
        match &mut *slot {
            Slot::Open(inner) => work(inner),
            Slot::Away(..) | Slot::Closed => Err(Failure::invalid("the receiver is closed")),
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // The threads that pass versions on are the parent's: there is nothing here to wait for.
            let slot = self.inner.get_mut();
            std::mem::forget(std::mem::replace(slot, Slot::Closed));
        }
    }
}

fn mode(mode: &str) -> Result<RequestMode, Failure> {
    match mode {
        "auto" => Ok(RequestMode::Auto),
        "full" => Ok(RequestMode::Full),
        "delta" => Ok(RequestMode::Delta),
        other => {
            Err(Failure::invalid(format!("mode {other:?} is not one of \"auto\", \"full\" and \"delta\"")))
        }
    }
}

fn nixl(when: &str, library: Option<PathBuf>, params: BTreeMap<String, String>) -> Result<Nixl, Failure> {
    let when = match when {
        "off" => When::Off,
        "auto" => When::Auto,
        "on" => When::On,
        other => {
            let text = format!("nixl {other:?} is not one of \"off\", \"auto\" and \"on\"");
            return Err(Failure::invalid(text));
        }
    };
    Ok(Nixl { when, config: NixlConfig { library, params: params.into_iter().collect() } })
}

#[pymethods]
impl Receiver {
    /// Follows the agent at `endpoint`, the agent of the region on this host that `region` names, or the store at `store`, of which it
    /// gets `version` if that is given. With an agent and a store, versions come from the store while the agent has been away for
    /// `store_after` seconds. They come into an image below `image_dir`: all of it, or the `slice` that a selection in JSON
    /// names. Keeps the last `keep_deltas` deltas beside it, in at most `keep_bytes`. Trusts those in `tls_ca`
    /// where the agent has a certificate. With `relay` it passes on what it gets to other receivers of the same version, at the
    /// first free port of `relay_ports`; zeros mean any. With `nixl` "auto" or "on" it reads images from the agent's memory where the agent lets it,
    /// by the library at `nixl_library` or that of the active environment, with `nixl_params` for its UCX plugin. With `timeout` the agent must answer within it; without, one that is away is
    /// waited for by whatever needs it first.
    #[new]
    #[pyo3(signature = (image_dir, *, endpoint = None, token = None, tls_ca = None, region = None, store = None, store_after = 30.0, version = None, slice = None, name = "receiver", mode = "auto",
        streams = None, threads = 1, transfer_timeout = 600.0, group = false, keep_deltas = 0,
        keep_bytes = 4_294_967_296, relay = true, relay_ports = (0, 0), nixl = "off", nixl_library = None, nixl_params = None, timeout = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        image_dir: PathBuf,
        endpoint: Option<String>,
        token: Option<String>,
        tls_ca: Option<PathBuf>,
        region: Option<PathBuf>,
        store: Option<&str>,
        store_after: f64,
        version: Option<u64>,
        slice: Option<&str>,
        name: &str,
        mode: &str,
        streams: Option<u16>,
        threads: usize,
        transfer_timeout: f64,
        group: bool,
        keep_deltas: usize,
        keep_bytes: u64,
        relay: bool,
        relay_ports: (u16, u16),
        nixl: &str,
        nixl_library: Option<PathBuf>,
        nixl_params: Option<BTreeMap<String, String>>,
        timeout: Option<f64>,
    ) -> PyResult<Receiver> {
        let token = token.map(|t| Token::new(t).map_err(|e| Failure::of(e.kind(), &e))).transpose()?;
        let transfer_timeout = held::seconds("transfer_timeout", transfer_timeout)?;
        let trust = windlass::service::tls::trust(tls_ca.as_deref()).map_err(Failure::from)?;
        let url = store.map(str::parse::<StoreUrl>).transpose();
        let url = url.map_err(|e| Failure::of(e.kind(), &e))?;
        if url.is_none() && version.is_some() {
            let text = "version is for a store: an agent has its newest versions only";
            return Err(Failure::invalid(text).into());
        }
        let nixl = self::nixl(nixl, nixl_library, nixl_params.unwrap_or_default())?;
        let agent = |control: HttpControl| {
            let agent = Arc::new(control.with_trust(trust.clone()).with_timeout(transfer_timeout));
            let Some(url) = url.clone() else { return Ok(Publisher::Agent(agent)) };
            if version.is_some() {
                return Err(Failure::invalid("version is for a store alone: leave out the agent"));
            }
            let after = held::seconds("store_after", store_after)?;
            let store = FallbackStore { url, after, trust: trust.clone(), dir: image_dir.clone() };
            let tell = |turn: &Turn| {
                tracing::warn!(
                    publisher = turn.publisher,
                    reason = turn.reason,
                    "versions come from elsewhere now"
                );
            };
            Ok(Publisher::Agent(Arc::new(Fallback::new(agent, store, Box::new(tell)))))
        };
        let publisher = match (endpoint, region, url.clone(), token) {
            (Some(endpoint), None, _, Some(token)) => {
                agent(HttpControl::new(&endpoint, token).map_err(Failure::from)?)?
            }
            (Some(_), None, _, None) => {
                let text =
                    "an endpoint needs its token; it is in the file that the agent names when it starts";
                return Err(Failure::invalid(text).into());
            }
            (None, Some(dir), _, token) => agent(HttpControl::of_region(&dir, token))?,
            (None, None, Some(url), None) => {
                if nixl.when != When::Off {
                    return Err(Failure::invalid("nixl is for agents: leave it out for a store").into());
                }
                Publisher::Store { url, version, trust, dir: image_dir.clone() }
            }
            (None, None, Some(_), Some(_)) => {
                let text = "a store takes no token: its credentials come from the environment";
                return Err(Failure::invalid(text).into());
            }
            (..) => {
                return Err(Failure::invalid(
                    "give one of an endpoint, a region on this host, or a store; or a store with one of the others",
                )
                .into());
            }
        };
        let slice = slice.map(|json| Selection::from_json(json.as_bytes())).transpose();
        let slice = slice.map_err(|e| Failure::of(e.kind(), &e))?.map(Arc::new);
        let (mode, name) = (self::mode(mode)?, name.to_owned());
        if relay_ports.0 > relay_ports.1 {
            let (first, last) = relay_ports;
            let text = format!("relay_ports are a first and a last port, not {first} and {last}");
            return Err(Failure::invalid(text).into());
        }
        let relaying = RelayConfig { ports: relay_ports, ..RelayConfig::default() };
        let open: Open = Box::new(move |control, model_id, stop| {
            let reader = nixl.reader().map_err(Failure::from)?;
            let config = ReceiverConfig {
                image: ImageSpec {
                    dir: image_dir.join(model_id.as_str()),
                    model_id,
                    group,
                    memfd: Memfd::Auto,
                    threads: threads.max(1),
                },
                slice: slice.clone(),
                name: name.clone(),
                mode,
                streams,
                transfer_timeout,
                open_timeout: transfer_timeout,
                pull: PullConfig::default(),
                allow: None,
                keep: (keep_deltas > 0).then_some(Limits { count: keep_deltas, bytes: keep_bytes }),
                share: None,
                nixl: reader,
                relaying: relay.then(|| Arc::new(Relaying::new(relaying.clone()))),
            };
            Ok(Inner::open(config, control, None, stop)?)
        });
        let slot = Mutex::new(Slot::Away(publisher, open));
        let receiver = Receiver { inner: slot, status: OnceLock::new(), home: Home::here() };
        enter(py, Some(timeout.unwrap_or(AT_ONCE)), |stop| {
            if timeout.is_none()
                && let Slot::Away(publisher, _) = &*receiver.inner()?
            {
                match publisher.ask(stop) {
                    Err(e) if is_away(&e) => return Ok(()),
                    Ok(_) | Err(_) => {}
                }
            }
            receiver.with(stop, |_| Ok(()))
        })?;
        Ok(receiver)
    }

    /// Waits until the publisher has something newer than the image: (incarnation, version), or `None` if nothing
    /// came within `timeout`.
    fn wait_newer(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<(String, u64)>> {
        enter(py, Some(timeout), |stop| {
            self.with(stop, |inner| {
                loop {
                    let had = inner.current().map(|k| (k.identity.incarnation, k.identity.version));
                    match inner.wait_newer(stop) {
                        // Of another life `sync` finds out whether it is newer, or says why not.
                        Ok(info)
                            if info.is_newer_than(had)
                                || info.version.is_some()
                                    && had.is_some_and(|(i, _)| i != info.incarnation) =>
                        {
                            return Ok(info.version.map(|v| (info.incarnation.to_string(), v)));
                        }
                        Ok(_) if !stop.is_set() => {}
                        Err(e) if !stop.is_set() => return Err(e.into()),
                        Ok(_) | Err(_) => return Ok(None),
                    }
                }
            })
        })
    }

    /// Brings the image to the newest version, and tells how, as JSON.
    fn sync(&self, py: Python<'_>, timeout: f64) -> PyResult<String> {
        enter(py, Some(timeout), |stop| {
            self.with(stop, |inner| {
                let synced = inner.sync(stop)?;
                serde_json::to_string(&synced).map_err(|e| Failure::new(Kind::Bug, e.to_string()))
            })
        })
    }

    /// Fetches the delta from what the image holds to `version` of an incarnation, which is waited for; the image is not
    /// touched. `None` if only a whole image serves: call `sync`.
    fn fetch(
        &self,
        py: Python<'_>,
        incarnation: &str,
        version: u64,
        timeout: f64,
    ) -> PyResult<Option<FetchedDelta>> {
        let incarnation = crate::core::parse_incarnation(incarnation)?;
        enter(py, Some(timeout), |stop| {
            let start = self.with(stop, |inner| Ok(inner.fetch(None, (incarnation, version), stop)?))?;
            match start {
                Start::Delta(fetch) => {
                    let fetched = fetch.run(stop)?;
                    let (known, synced) = (fetched.known(), fetched.synced());
                    let told =
                        serde_json::to_string(synced).map_err(|e| Failure::new(Kind::Bug, e.to_string()))?;
                    Ok(Some(FetchedDelta { known, told, inner: Mutex::new(Some(fetched)) }))
                }
                Start::Whole { why, newest } => {
                    tracing::info!(version, newest, why, "a whole image is needed");
                    Ok(None)
                }
            }
        })
    }

    /// Applies what was fetched to the image and makes it visible; tells how, as JSON.
    fn show(&self, py: Python<'_>, fetched: &FetchedDelta, timeout: f64) -> PyResult<String> {
        enter(py, Some(timeout), |stop| {
            let one = fetched.take()?;
            self.with(stop, |inner| {
                let synced = inner.show(vec![one], stop)?;
                serde_json::to_string(&synced).map_err(|e| Failure::new(Kind::Bug, e.to_string()))
            })
        })
    }

    /// The whole version in the image, held in place for at most `seconds`.
    #[pyo3(signature = (seconds, timeout = 60.0))]
    fn hold(&self, py: Python<'_>, seconds: f64, timeout: f64) -> PyResult<Held> {
        let load = held::seconds("a hold", seconds)?;
        enter(py, Some(timeout), |stop| {
            self.with(stop, |inner| {
                let none =
                    || Failure::new(Kind::NotFound, "there is no version in the image yet; call sync first");
                let view = ImageView::take(inner.image().ok_or_else(none)?.region(), load, stop)?;
                Ok(Held::of_view(view))
            })
        })
    }

    /// Where it stands, as JSON. Answers at once, also while a sync runs.
    fn status(&self) -> PyResult<String> {
        self.home.check("receiver")?;
        let status = self.status.get().map(StatusHandle::get).unwrap_or_default();
        let text = serde_json::to_string(&status);
        Ok(text.map_err(|e| Failure::new(Kind::Bug, e.to_string()))?)
    }

    /// Lets go of the image, which stays for the next receiver.
    fn close(&self) -> PyResult<()> {
        *self.inner()? = Slot::Closed;
        Ok(())
    }
}

/// A delta in memory that no image shows yet.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct FetchedDelta {
    known: Known,
    told: String,
    inner: Mutex<Option<Fetched>>,
}

impl FetchedDelta {
    fn lock(&self) -> MutexGuard<'_, Option<Fetched>> {
        self.inner.lock()
    }

    pub(crate) fn with<T>(&self, work: impl FnOnce(&Fetched) -> Result<T, Failure>) -> Result<T, Failure> {
        let gone =
            || Failure::invalid(format!("the delta to {} is in the image already", self.known.identity));
        work(self.lock().as_ref().ok_or_else(gone)?)
    }

    fn take(&self) -> Result<Fetched, Failure> {
        let gone = || Failure::invalid(format!("the delta to {} was shown before", self.known.identity));
        self.lock().take().ok_or_else(gone)
    }
}

#[pymethods]
impl FetchedDelta {
    /// The model that it belongs to.
    #[getter]
    fn model_id(&self) -> String {
        self.known.identity.model_id.to_string()
    }

    /// The incarnation that it belongs to.
    #[getter]
    fn incarnation(&self) -> String {
        self.known.identity.incarnation.to_string()
    }

    /// The version that it leads to.
    #[getter]
    fn version(&self) -> u64 {
        self.known.identity.version
    }

    /// The digest of that version.
    #[getter]
    fn digest(&self) -> String {
        self.known.digest.to_string()
    }

    /// What it took to fetch it, as JSON.
    #[getter]
    fn told(&self) -> &str {
        &self.told
    }
}

/// The layout that the agent at `endpoint` serves, and of which incarnation: for those who must know what they
/// need of it before there is an image. Waits for the agent, and for its first version, until `timeout`.
#[pyfunction]
#[pyo3(signature = (endpoint, token, tls_ca = None, timeout = 60.0))]
pub(crate) fn layout_of(
    py: Python<'_>,
    endpoint: &str,
    token: &str,
    tls_ca: Option<PathBuf>,
    timeout: f64,
) -> PyResult<(String, Layout)> {
    let token = Token::new(token).map_err(|e| Failure::of(e.kind(), &e))?;
    let control = HttpControl::new(endpoint, token).map_err(Failure::from)?;
    let trust = windlass::service::tls::trust(tls_ca.as_deref()).map_err(Failure::from)?;
    let control = control.with_trust(trust).with_timeout(held::seconds("timeout", timeout)?);
    enter(py, Some(timeout), |stop| {
        let model = first_contact(|| Ok(control.version(None, stop)?.model_id), stop)?;
        let failed = |e: ControlError| Failure::of(e.kind(), &e);
        loop {
            let before = control.version(None, stop).map_err(failed)?;
            if before.version.is_none() {
                if stop.is_set() {
                    let text = format!("the agent at {endpoint} has no version of {model} yet");
                    return Err(Failure::new(Kind::Timeout, text));
                }
                std::thread::sleep(stop.nap());
                continue;
            }
            let manifest = control.manifest(stop).map_err(failed)?;
            let after = control.version(None, stop).map_err(failed)?;
            // Another incarnation may have another layout.
            if before.incarnation == after.incarnation {
                return Ok((before.incarnation.to_string(), Layout(Arc::new(manifest))));
            }
        }
    })
}

/// Whether nobody answers there yet.
fn is_away(e: &ControlError) -> bool {
    matches!(e.kind(), Kind::PeerLost | Kind::Timeout | Kind::NotFound)
}

/// What a publisher answers, once it does.
fn first_contact<T>(ask: impl Fn() -> Result<T, ControlError>, stop: &Stop) -> Result<T, Failure> {
    let mut last = None;
    loop {
        match ask() {
            Ok(answer) => return Ok(answer),
            // What kept it from answering before says more than that the time is over.
            Err(e) if stop.is_set() => return Err(last.unwrap_or_else(|| Failure::of(e.kind(), &e))),
            Err(e) if !is_away(&e) => return Err(Failure::of(e.kind(), &e)),
            Err(e) => {
                last = Some(Failure::of(e.kind(), &e));
                std::thread::sleep(stop.nap());
            }
        }
    }
}
