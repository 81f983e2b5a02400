//! An agent, and the store that its versions are in as well, as one publisher.
//!
//! Owns: [`Fallback`], a [`Control`] that speaks to the agent, and to the store while the agent cannot be reached. Called by
//! `windlass receive` and by the Python receiver. Must not: decide what a receiver fetches. A version has the same identity and
//! the same digest at both, so a delta from one leads on from an image that the other brought.
//!
//! # Turning from one to the other
//!
//! - Only [`Control::version`] turns, so one sync speaks to one of them.
//! - The agent must have been away for the time that the caller gave, counted from the first request that failed, and
//!   the store must answer. An agent that refuses a request is not away.
//! - While versions come from the store, the agent is asked again after a growing pause, and also before a version of the
//!   store is announced: an agent that is back has deltas to its versions for receivers that are ahead of the store.
//! - An agent of an older incarnation than the store's newest version is returned to only if it began after it was lost.
//!   Versions of an older incarnation in the store are not followed: the agent had a newer one.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use windlass_core::address::StoreUrl;
use windlass_core::digest::BlockSum;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, ModelId, Version};
use windlass_core::manifest::Manifest;
use windlass_core::wire::TicketId;
use windlass_core::wire::control::{
    Age, Registered, Registration, Relays, TransferAnswer, TransferDone, TransferRequest, VersionInfo,
};
use windlass_data::receiver::{Carrier, Control, ControlError};
use windlass_data::stop::Stop;
use windlass_data::tls::{Privacy, Trust};

use super::bucket::Bucket;
use super::follow::{PAUSES, StoreControl, WAIT};
use super::model::{Pick, StoredModel};

/// How long an agent must be away by default until versions come from the store.
pub const AWAY: Duration = Duration::from_secs(30);
/// How long an agent that was away may take to answer.
const PROBE: Duration = Duration::from_secs(2);
/// The pause between two such requests: the first, and the longest.
const PROBES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Versions come from somewhere else now.
#[derive(Debug)]
pub struct Turn {
    /// From the store, or from the agent again.
    pub to_store: bool,
    /// Where they come from.
    pub publisher: String,
    pub reason: String,
}

/// Told about each turn, on the receiver's thread.
pub type TellTurn = Box<dyn Fn(&Turn) + Send + Sync>;

/// The store of a [`Fallback`].
#[derive(Clone, Debug)]
pub struct FallbackStore {
    /// Of the model, or of a store that has it among others.
    pub url: StoreUrl,
    /// How long the agent must be away.
    pub after: Duration,
    pub trust: Option<Trust>,
    /// Where what has been fetched of a version that is not whole is kept, next to the images.
    pub dir: PathBuf,
}

/// An agent that is away.
#[derive(Debug)]
struct Away {
    since: Instant,
    asked: Instant,
    pause: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// Since when requests to the agent fail, while versions still come from it.
    silent: Option<Instant>,
    /// There while versions come from the store.
    away: Option<Away>,
    /// The model, once the agent has named it.
    model_id: Option<ModelId>,
    /// The incarnation that the receiver follows, as far as is known.
    followed: Option<Incarnation>,
    /// What was announced last.
    announced: Option<(Incarnation, Version)>,
}

/// See the module's documentation.
pub struct Fallback {
    agent: Arc<dyn Control>,
    place: FallbackStore,
    tell: TellTurn,
    store: OnceLock<Arc<StoreControl>>,
    state: Mutex<State>,
}

impl Fallback {
    /// Speaks to `agent`, and to the store while that is away.
    pub fn new(agent: Arc<dyn Control>, place: FallbackStore, tell: TellTurn) -> Fallback {
        Fallback { agent, place, tell, store: OnceLock::new(), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The store, while versions come from it.
    fn turned(&self) -> Option<&Arc<StoreControl>> {
        let turned = self.state().away.is_some();
        self.store.get().filter(|_| turned)
    }

    fn now(&self) -> &dyn Control {
        self.turned().map_or(&*self.agent, |store| &**store)
    }

    /// The model in the store: that of the agent, or the only one if the agent has never answered.
    fn open(&self, stop: &Stop) -> Result<&Arc<StoreControl>, ControlError> {
        if let Some(store) = self.store.get() {
            return Ok(store);
        }
        let FallbackStore { url, trust, dir, .. } = &self.place;
        let model_id = self.state().model_id.clone();
        let found = Bucket::open(url, trust.as_ref(), false).map(Arc::new).and_then(|bucket| {
            let Some(model_id) = model_id else { return StoredModel::only(&bucket, stop) };
            let models = StoredModel::find(&bucket, stop)?;
            models.into_iter().find(|m| *m.model_id() == model_id).ok_or_else(|| {
                let why = format!("no version of {model_id} has been published there yet");
                bucket.failure("find", "the model", Kind::NotFound, why)
            })
        });
        let model = found.map_err(|e| e.control("find a model"))?;
        Ok(self.store.get_or_init(|| Arc::new(StoreControl::new(model, Pick::default(), dir))))
    }

    /// The newest version of the store, unless it is of an incarnation before the one that is followed.
    fn look(
        &self,
        store: &StoreControl,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        let info = store.glance(newer_than, stop)?;
        match self.state().followed.filter(|followed| info.incarnation < *followed) {
            None => Ok(info),
            Some(followed) => Err(ControlError::Lost {
                peer: store.peer(),
                what: "get the version",
                why: format!(
                    "its newest version is of incarnation {}, and the agent had {followed}, which is newer",
                    info.incarnation
                ),
                kind: Kind::NotFound,
            }),
        }
    }

    /// Versions come from the store from now on, if it answers.
    fn turn_to_store(&self, since: Instant, lost: &ControlError, stop: &Stop) -> Result<(), ControlError> {
        let store = self.open(stop)?;
        self.look(store, None, stop)?;
        let now = Instant::now();
        let mut state = self.state();
        state.away = Some(Away { since, asked: now, pause: PROBES.0 });
        drop(state);
        let publisher = store.peer();
        (self.tell)(&Turn { to_store: true, publisher, reason: lost.to_string() });
        Ok(())
    }

    /// Asks whether the agent is back, unless it was asked a moment ago. `news` shortens that moment.
    fn returned(&self, news: bool, stop: &Stop) -> Option<VersionInfo> {
        let since = {
            let mut state = self.state();
            let away = state.away.as_mut()?;
            if away.asked.elapsed() < if news { PROBES.0 } else { away.pause } {
                return None;
            }
            away.since
        };
        let info = self.agent.version(None, &stop.with_timeout(PROBE)).ok();
        let info = info.filter(|info| info.version.is_some() && self.may_return(info, since, stop));
        let mut state = self.state();
        let Some(info) = info else {
            if let Some(away) = &mut state.away {
                away.asked = Instant::now();
                away.pause = (away.pause * 2).min(PROBES.1);
            }
            return None;
        };
        (state.away, state.silent) = (None, None);
        drop(state);
        if let Some(store) = self.store.get() {
            store.clear_links();
        }
        let reason = format!("it answers again, after {:.0} s", since.elapsed().as_secs_f64());
        (self.tell)(&Turn { to_store: false, publisher: self.agent.peer(), reason });
        self.heard(&info);
        Some(info)
    }

    /// Whether an agent that answers again is not an old one whose successor publishes to the store.
    fn may_return(&self, info: &VersionInfo, since: Instant, stop: &Stop) -> bool {
        let followed = self.state().followed;
        if followed.is_none_or(|followed| info.incarnation >= followed) {
            return true;
        }
        let age = self.agent.age(&stop.with_timeout(PROBE)).ok().flatten();
        let age = age.filter(|age| age.incarnation == info.incarnation);
        age.is_some_and(|age| Duration::from_millis(age.ms) < since.elapsed())
    }

    fn heard(&self, info: &VersionInfo) {
        let mut state = self.state();
        state.silent = None;
        state.model_id = Some(info.model_id.clone());
        state.followed = Some(info.incarnation);
        state.announced = info.version.map(|version| (info.incarnation, version));
    }

    /// As [`Control::version`], from the store or from the agent that is back.
    fn version_of_store(
        &self,
        store: &StoreControl,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        let until = stop.with_timeout(WAIT);
        let mut pause = PAUSES.0;
        loop {
            if let Some(info) = self.returned(false, stop) {
                return Ok(info);
            }
            let seen = self.look(store, newer_than, stop);
            let waits = newer_than.is_some() && !until.is_set();
            match seen {
                Ok(info) if newer_than.is_none() || info.is_newer_than(newer_than) => {
                    let this = info.version.map(|version| (info.incarnation, version));
                    if self.state().announced != this
                        && let Some(info) = self.returned(true, stop)
                    {
                        return Ok(info);
                    }
                    let mut state = self.state();
                    (state.followed, state.announced) = (Some(info.incarnation), this);
                    return Ok(info);
                }
                Ok(info) if !waits => return Ok(info),
                Err(e) if !waits || e.kind() != Kind::NotFound => return Err(e),
                Ok(_) | Err(_) => {}
            }
            let again = until.with_timeout(pause);
            while !again.is_set() {
                std::thread::sleep(again.nap());
            }
            pause = (pause * 2).min(PAUSES.1);
        }
    }
}

/// Whether the agent did not answer, as opposed to one that says no.
fn is_away(error: &ControlError) -> bool {
    matches!(error.kind(), Kind::PeerLost | Kind::Timeout | Kind::Exhausted)
}

impl Control for Fallback {
    fn peer(&self) -> String {
        self.now().peer()
    }

    fn chosen(&self) -> Option<Arc<dyn Control>> {
        Some(match self.turned() {
            Some(store) => Arc::<StoreControl>::clone(store),
            None => Arc::clone(&self.agent),
        })
    }

    fn privacy(&self) -> Privacy {
        self.agent.privacy()
    }

    fn carrier(&self) -> Option<&dyn Carrier> {
        self.now().carrier()
    }

    fn local_address(&self) -> Option<IpAddr> {
        self.agent.local_address()
    }

    fn version(
        &self,
        newer_than: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        if let Some((incarnation, _)) = newer_than.filter(|(incarnation, _)| *incarnation > Incarnation(0)) {
            self.state().followed = Some(incarnation);
        }
        if let Some(store) = self.turned() {
            return self.version_of_store(store, newer_than, stop);
        }
        let began = Instant::now();
        let lost = match self.agent.version(newer_than, stop) {
            Err(lost) if is_away(&lost) => lost,
            answer => {
                self.state().silent = None;
                return answer.inspect(|info| self.heard(info));
            }
        };
        let since = *self.state().silent.get_or_insert(began);
        if since.elapsed() < self.place.after {
            return Err(lost);
        }
        self.turn_to_store(since, &lost, stop).map_err(|e| ControlError::Lost {
            peer: self.agent.peer(),
            what: "get the version",
            why: format!("{lost}; the store has nothing either: {e}"),
            kind: lost.kind(),
        })?;
        self.version(newer_than, stop)
    }

    fn age(&self, stop: &Stop) -> Result<Option<Age>, ControlError> {
        self.now().age(stop)
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        self.now().manifest(stop)
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        self.now().sums(identity, stop)
    }

    fn register(&self, registration: &Registration, stop: &Stop) -> Result<Registered, ControlError> {
        self.now().register(registration, stop)
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        self.now().request(request, stop)
    }

    fn relays(&self, ticket: TicketId, known: u32, stop: &Stop) -> Result<Relays, ControlError> {
        self.now().relays(ticket, known, stop)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        self.now().done(done, stop)
    }
}
