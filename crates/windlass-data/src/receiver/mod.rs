//! Keeps an [image](crate::image) at the newest version of a publisher.
//!
//! Owns: the conversation with one publisher about one model ([`Control`] carries it), what to fetch next, and what
//! is known about the transfer under way ([`TransferStatus`]). Called by `windlass receive`, by the roles of
//! [`crate::roles`] and by engines that embed it. Must not: know HTTP, pause an engine or load weights.
//!
//! # One sync
//!
//! 1. Ask which version is newest. A new incarnation makes every version number meaningless: the blocks' versions
//!    are forgotten, their sums are not. Another layout needs another image.
//!    What the publisher has of the same incarnation may be older than a whole image, as in a store whose upload is behind: then
//!    there is nothing to do.
//! 2. An image that is whole asks for a delta from what it has. The delta is fetched into memory of its own while
//!    engines go on reading the image, then the image is opened, changed and finished.
//! 3. Otherwise the image is open, and these are repeated until every block is of one version:
//!    - blocks of an older version than others are lifted to the newest one *held* by a delta; where none serves,
//!      they are forgotten;
//!    - blocks of no version, but with sums, are compared with the publisher's table and adopted where they agree;
//!    - blocks of no version are fetched as they are now. If the publisher laps the pull, what landed stays
//!      (**fuzzy pull**), so every round ends with more blocks than the one before.
//!    - where a store keeps older image bytes than the version that it announces, a delta leads on from them
//!      ([`Carrier`]).
//! 4. The digest of all sums must be that of the version; then engines may see it.
//! 5. If it was asked to, the receiver keeps the delta that it applied (`kept`), for workers that load only what
//!    changed.
//!
//! The version recorded is the one in the ticket, never one that was announced.
//!
//! # Which life is newer
//!
//! Lives are numbered by the clock of the publisher, and beyond the life before as long as its region is there. Where the region is
//! gone and the clock has gone back, the new life has the lower number. It is followed all the same if it began after this
//! receiver first followed the other one, which both sides measure as spans of time, by monotonic clocks. An old
//! publisher that lives on began earlier, so it is refused, and after such a change also if its number is the greater one.
//!
//! # To a named version
//!
//! [`Receiver::sync`] goes to the newest version, [`Receiver::sync_to`] to a named one, by a delta from the publisher's
//! history. Image bytes are always of the newest version: where that is newer than the named one, a delta leads back
//! before anything is shown. Where none does, the image is brought to the newest, and the result says so.
//!
//! A caller that stages now and shows later does it in two steps: [`Receiver::fetch`] begins a delta that is fetched into
//! memory of its own ([`Fetch::run`], which does not need the receiver), also from one that was fetched and not yet
//! shown; [`Receiver::show`] applies what was fetched. Until then the image is as it was. Where only image bytes serve,
//! [`Receiver::stage_to`] brings them into the image and leaves it hidden, until [`Receiver::reveal`] or
//! [`Receiver::show`]: there is no room for a second image.

mod control;
mod error;
mod fetch;
mod kept;
mod refresh;
mod relay;
mod shelf;
mod status;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use windlass_core::address::Host;
use windlass_core::error::Kind;
use windlass_core::identity::{Identity, Incarnation, StateDigest, Version};
use windlass_core::manifest::Manifest;
use windlass_core::ranges::BlockRanges;
use windlass_core::slice::Selection;
use windlass_core::wire::control::{
    Brought, Have, Refused, Registration, RequestMode, TransferAnswer, TransferRequest, VersionInfo,
};
use windlass_core::wire::{Mode, Ticket};

pub use self::control::{Carrier, Control, ControlError, EachTable};
pub use self::error::ReceiverError;
use self::fetch::Puller;
pub use self::fetch::{Fetch, Fetched, Start};
use self::kept::Kept;
use self::refresh::Progress;
pub use self::relay::{RelayConfig, Relaying};
use self::shelf::Shelf;
pub use self::shelf::{Handed, HandedError, MappedFiles, Share};
pub use self::status::{Event, Listener, Stage, StatusHandle, TransferStatus};
use crate::history::Limits;
use crate::image::{Image, ImageError, ImageSpec, Known};
use crate::nixl::Reader;
pub use crate::region::INCOMING;
use crate::region::RegionError;
use crate::stop::{Stop, Stopped};
use crate::tcp::PullConfig;
use crate::work;

/// How a receiver is run.
#[derive(Clone)]
pub struct ReceiverConfig {
    pub image: ImageSpec,
    /// The part of the model that is kept; all of it if not given.
    pub slice: Option<Arc<Selection>>,
    /// Name shown for this receiver.
    pub name: String,
    /// How it wants to be served.
    pub mode: RequestMode,
    /// Streams of a transfer; the publisher's default if not given.
    pub streams: Option<u16>,
    /// How long one transfer may take.
    pub transfer_timeout: Duration,
    /// How long to wait for engines to leave the image.
    pub open_timeout: Duration,
    pub pull: PullConfig<'static>,
    /// The hosts whose data connections are accepted; those in the ticket of an authenticated publisher if none are
    /// given.
    pub allow: Option<Vec<Host>>,
    /// How many of the deltas that were applied are kept beside the image, for workers that load only what changed;
    /// without it, none.
    pub keep: Option<Limits>,
    /// Where deltas land that other processes of this host may read before the image has them; without it, they land in
    /// memory of this process alone.
    pub share: Option<Share>,
    /// Reads images from publishers' memory, where they let it; without it, everything comes over TCP.
    pub nixl: Option<Arc<Reader>>,
    /// Passes on to other receivers what this one gets; without it, nothing is.
    pub relaying: Option<Arc<Relaying>>,
}

/// How long the parts of a sync took, and what it carried.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Synced {
    /// The version that is visible now; none if nothing was newer.
    pub image: Option<Known>,
    /// `full`, `delta`, `fuzzy` (several transfers) or `none`.
    pub mode: &'static str,
    /// Bytes of all transfers.
    pub wire_bytes: u64,
    /// Those of them that other receivers passed on.
    pub relayed_bytes: u64,
    /// Who brought how much, where other receivers took part.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub brought: Vec<Brought>,
    /// Those of them that were read from the publisher's memory.
    pub read_bytes: u64,
    /// Why nothing, or not everything, was read from there, where that was wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unread: Option<String>,
    /// Relays that could not be reached, failed or lied.
    pub relays_lost: u32,
    pub transfers: u32,
    /// Pulls that the publisher lapped.
    pub laps: u32,
    /// Blocks that a delta found to be wrong.
    pub refetched: u32,
    /// Asking for versions and tickets.
    pub ask_ms: f64,
    pub wire_ms: f64,
    pub open_ms: f64,
    pub apply_ms: f64,
    pub total_ms: f64,
}

impl Synced {
    /// What another part of the way took.
    fn add(&mut self, part: &Synced) {
        self.wire_bytes += part.wire_bytes;
        self.relayed_bytes += part.relayed_bytes;
        self.brought.extend(part.brought.iter().cloned());
        self.read_bytes += part.read_bytes;
        self.unread = self.unread.take().or_else(|| part.unread.clone());
        self.relays_lost += part.relays_lost;
        self.transfers += part.transfers;
        self.laps += part.laps;
        self.refetched += part.refetched;
        self.ask_ms += part.ask_ms;
        self.wire_ms += part.wire_ms;
        self.total_ms += part.total_ms;
    }
}

/// By how much a life must at least be younger than what is known of another one: ages are told in milliseconds.
const CLOCK_STEP: Duration = Duration::from_millis(10);
/// How many new lives of the publisher a sync follows before it gives up.
const LIVES: u32 = 3;
/// How often a request is repeated whose version was replaced while it was answered, and how long is waited before.
const STALE_TRIES: u32 = 20;
const STALE_PAUSE: Duration = Duration::from_millis(50);

/// One model's receiver on this host.
pub struct Receiver {
    config: ReceiverConfig,
    control: Arc<dyn Control>,
    image: Option<Image>,
    /// The image's, also while a refresh has the image.
    layout: Option<Arc<Manifest>>,
    /// The blocks that are kept of that layout, if these are not all.
    keeps: Option<BlockRanges>,
    instance: Option<String>,
    /// Whether the publisher lets receivers pass on what they get.
    relays: bool,
    incarnation: Option<Incarnation>,
    /// Since when that is followed, and the greatest number of all lives that were.
    since: Instant,
    greatest: Incarnation,
    /// Digests of versions of this incarnation, from tickets.
    digests: BTreeMap<Version, StateDigest>,
    /// What the image holds whole and hides.
    staged: Option<Known>,
    status: StatusHandle,
    listener: Option<Listener>,
    kept: Kept,
    shelf: Arc<Shelf>,
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver")
            .field("peer", &self.control.peer())
            .field("image", &self.image)
            .finish_non_exhaustive()
    }
}

impl Receiver {
    /// Opens the image that an earlier receiver left, if there is one, and verifies it.
    pub fn open(
        config: ReceiverConfig,
        control: Arc<dyn Control>,
        listener: Option<Listener>,
        stop: &Stop,
    ) -> Result<Receiver, ReceiverError> {
        let kept = Kept::new(config.keep);
        let shelf = Arc::new(Shelf::new(config.share.clone(), config.relaying.is_some()));
        let mut receiver = Receiver {
            config,
            control,
            image: None,
            layout: None,
            keeps: None,
            instance: None,
            relays: false,
            incarnation: None,
            since: Instant::now(),
            greatest: Incarnation(0),
            digests: BTreeMap::new(),
            staged: None,
            status: StatusHandle::default(),
            listener,
            kept,
            shelf,
        };
        match Image::open(receiver.config.image.clone(), stop) {
            Ok(image) if receiver.is_selected(&image) => {
                receiver.adopt_image(image);
            }
            Ok(image) => {
                let dir = image.region().dir().display();
                tracing::warn!(%dir, "the image that was left is of another slice; it will be fetched anew");
            }
            Err(ImageError::Region(RegionError::Absent { .. })) => {}
            Err(e) if e.is_ruined() => {
                // The publisher has the truth; what is here was only a copy, and is replaced by the first sync.
                tracing::warn!(error = %e, "the image that was left cannot be used; it will be fetched anew");
            }
            Err(e) => return Err(e.into()),
        }
        Ok(receiver)
    }

    fn adopt_image(&mut self, image: Image) {
        let known = image.current().cloned();
        if let Some(known) = &known {
            self.follow(known.identity.incarnation);
            self.digests.insert(known.identity.version, known.digest);
        }
        self.status.set(|s| s.image.clone_from(&known));
        self.staged = None;
        self.layout = Some(Arc::clone(image.manifest()));
        self.keeps = image.slice().cloned();
        self.image = Some(image);
        self.tell(&Event::Opened { image: known });
    }

    /// The blocks of a layout that are to be kept, if these are not all.
    fn selected(&self, manifest: &Manifest) -> Result<Option<BlockRanges>, ReceiverError> {
        let blocks = self.config.slice.as_ref().map(|slice| slice.blocks(manifest)).transpose()?;
        Ok(blocks.filter(|blocks| *blocks != BlockRanges::from(0..manifest.cuts().blocks())))
    }

    fn is_selected(&self, image: &Image) -> bool {
        self.selected(image.manifest()).is_ok_and(|slice| slice.as_ref() == image.slice())
    }

    /// The blocks that are kept.
    fn kept_blocks(&self) -> BlockRanges {
        let all = || BlockRanges::from(0..self.layout.as_ref().map_or(0, |m| m.cuts().blocks()));
        self.keeps.clone().unwrap_or_else(all)
    }

    fn follow(&mut self, incarnation: Incarnation) {
        if self.incarnation.replace(incarnation) != Some(incarnation) {
            self.since = Instant::now();
            self.greatest = self.greatest.max(incarnation);
        }
    }

    fn tell(&self, event: &Event) {
        if let Some(listener) = &self.listener {
            listener(event);
        }
    }

    /// Where it stands; can be kept and read from other threads.
    pub fn status(&self) -> StatusHandle {
        self.status.clone()
    }

    /// The image, once there is one.
    pub fn image(&self) -> Option<&Image> {
        self.image.as_ref()
    }

    /// The whole version in the image.
    pub fn current(&self) -> Option<&Known> {
        self.image.as_ref()?.current()
    }

    /// The whole version in the image, also if it is hidden.
    pub fn held(&self) -> Option<&Known> {
        self.staged.as_ref().or_else(|| self.current())
    }

    /// Waits until the publisher has something newer than the image, or some time has passed.
    pub fn wait_newer(&self, stop: &Stop) -> Result<VersionInfo, ReceiverError> {
        let seen = self.current().map(|k| (k.identity.incarnation, k.identity.version));
        // Without an image anything is newer; what matters is to wait while there is nothing.
        Ok(self.control.version(Some(seen.unwrap_or((Incarnation(0), 0))), stop)?)
    }

    /// Speaks to another publisher of the same model from now on: its agent moved, or another one took over.
    pub fn turn_to(&mut self, control: Arc<dyn Control>) {
        self.control = control;
        self.instance = None;
    }

    /// Brings the image to the newest version of the publisher.
    pub fn sync(&mut self, stop: &Stop) -> Result<Synced, ReceiverError> {
        let start = Instant::now();
        let mut result = self.sync_once(None, false, stop);
        for _ in 0..LIVES {
            match &result {
                Err(ReceiverError::NewLife { .. }) if !stop.is_set() => {
                    result = self.sync_once(None, false, stop);
                }
                Ok(_) | Err(_) => break,
            }
        }
        self.settle(result, start)
    }

    /// Brings the image to `version` of `incarnation`, and waits for the publisher to have it. Where no delta leads
    /// there, the image is brought to the newest version instead: the answer says which one it has. Nothing is done if
    /// it has that version, or a newer one of this incarnation.
    pub fn sync_to(&mut self, to: (Incarnation, Version), stop: &Stop) -> Result<Synced, ReceiverError> {
        self.bring_to(to, false, stop)
    }

    /// As [`Receiver::sync_to`], but what the image is brought to stays hidden until it is [revealed](Receiver::reveal) or
    /// a delta from it is [shown](Receiver::show). Whatever the image showed before is gone.
    pub fn stage_to(&mut self, to: (Incarnation, Version), stop: &Stop) -> Result<Synced, ReceiverError> {
        self.bring_to(to, true, stop)
    }

    /// Makes visible what [`Receiver::stage_to`] brought.
    pub fn reveal(&mut self, stop: &Stop) -> Result<(), ReceiverError> {
        let (Some(known), Some(image)) = (self.staged.clone(), self.image.as_mut()) else { return Ok(()) };
        image.refresh(&stop.with_timeout(self.config.open_timeout))?.finish(&known, stop)?;
        self.staged = None;
        self.status.set(|s| {
            s.image = Some(known.clone());
            s.synced += 1;
        });
        self.tell(&Event::Whole { image: known });
        Ok(())
    }

    fn bring_to(
        &mut self,
        (incarnation, version): (Incarnation, Version),
        hide: bool,
        stop: &Stop,
    ) -> Result<Synced, ReceiverError> {
        let start = Instant::now();
        let mut result = self.sync_once(Some((incarnation, version)), hide, stop);
        // While a version is served by delta only, image bytes are those of the one before it, and the delta leads on.
        let behind = |s: &Synced| s.image.as_ref().is_some_and(|k| k.identity.version < version);
        while let Some(before) = result.as_ref().ok().filter(|s| behind(s)).cloned() {
            result = self.sync_once(Some((incarnation, version)), hide, stop).map(|mut last| {
                last.add(&before);
                last.open_ms += before.open_ms;
                last.apply_ms += before.apply_ms;
                last.mode = "fuzzy";
                last
            });
        }
        self.settle(result, start)
    }

    /// Notes what came of a sync, and tells it.
    fn settle(
        &mut self,
        result: Result<Synced, ReceiverError>,
        start: Instant,
    ) -> Result<Synced, ReceiverError> {
        let shown = self.current().cloned();
        self.status.set(|s| {
            s.stage = Stage::Idle;
            s.image.clone_from(&shown);
            s.error = result.as_ref().err().map(ToString::to_string);
        });
        let mut synced = result?;
        synced.total_ms += millis(start);
        if let Some(image) = synced.image.as_ref().filter(|image| shown.as_ref() == Some(image)) {
            self.status.set(|s| {
                s.image = Some(image.clone());
                s.synced += 1;
            });
            self.tell(&Event::Whole { image: image.clone() });
        }
        Ok(synced)
    }

    /// What the publisher has, once it has the version that is named.
    fn ask_version(
        &self,
        to: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ReceiverError> {
        let peer = || self.control.peer();
        self.status.set(|s| s.stage = Stage::Asking);
        let mut info = self.control.version(None, stop)?;
        self.status.set(|s| s.publisher = Some(peer()));
        if let Some((wanted, version)) = to {
            while info.incarnation == wanted && info.version.is_none_or(|v| v < version) {
                stop.check().map_err(|source| self.stopped(Stage::Asking, source))?;
                // Whatever is newer than the one before it, and there is none before the first.
                let before = version.checked_sub(1).map(|v| (wanted, v));
                let before = before.unwrap_or((Incarnation(wanted.0.saturating_sub(1)), Version::MAX));
                info = self.control.version(Some(before), stop)?;
            }
            if info.incarnation != wanted {
                return Err(ReceiverError::OtherLife { peer: peer(), theirs: info.incarnation, wanted });
            }
        }
        if info.identity().is_none() {
            return Err(ReceiverError::NothingYet { peer: peer() });
        }
        if info.model_id != self.config.image.model_id {
            return Err(ReceiverError::OtherModel {
                peer: peer(),
                theirs: info.model_id.to_string(),
                ours: self.config.image.model_id.to_string(),
            });
        }
        // A new life voids all that is known, so it is asked for twice: a flipped bit is not said twice.
        if self.incarnation.is_none_or(|ours| ours < info.incarnation) {
            let (was, now) = (info.incarnation, self.control.version(None, stop)?.incarnation);
            if was != now {
                return Err(ReceiverError::NewLife { peer: peer(), was, now });
            }
        }
        // Numbers up to the greatest say nothing if it is not the one that is followed.
        let other = |ours: &Incarnation| info.incarnation != *ours && info.incarnation <= self.greatest;
        if let Some(ours) = self.incarnation.filter(other) {
            if !self.began_since(info.incarnation, stop)? {
                return Err(ReceiverError::OldLife { peer: peer(), theirs: info.incarnation, ours });
            }
            tracing::warn!(
                peer = peer(), %ours, theirs = %info.incarnation,
                "this life of the publisher has a lower number than the one before: its clock has gone back"
            );
        }
        Ok(info)
    }

    /// Whether a life of the publisher began after the one that is followed was first heard of here.
    fn began_since(&self, life: Incarnation, stop: &Stop) -> Result<bool, ReceiverError> {
        // Twice, as with a greater number: a flipped bit is not said twice.
        for _ in 0..2 {
            // Taken before the answer is: the time in between makes the life look older.
            let known = self.since.elapsed();
            let age = self.control.age(stop)?.filter(|age| age.incarnation == life);
            let Some(age) = age.map(|age| Duration::from_millis(age.ms)) else { return Ok(false) };
            // Monotonic clocks still differ in their rate, by less than this.
            if age.saturating_add(age / 1000).saturating_add(CLOCK_STEP) >= known {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Makes sure that there is an image of the publisher's layout and incarnation.
    fn prepare(&mut self, info: &VersionInfo, stop: &Stop) -> Result<(), ReceiverError> {
        let fits = |i: &Image| {
            (i.manifest().layout_hash(), i.manifest().cuts_hash()) == (info.layout_hash, info.cuts_hash)
        };
        if !self.image.as_ref().is_some_and(fits) {
            let manifest = Arc::new(self.control.manifest(stop)?);
            if (manifest.layout_hash(), manifest.cuts_hash()) != (info.layout_hash, info.cuts_hash) {
                return Err(ReceiverError::OtherLayout {
                    peer: self.control.peer(),
                    found: manifest.layout_hash().to_string(),
                    announced: info.layout_hash.to_string(),
                });
            }
            let slice = self.selected(&manifest)?;
            let stop = &stop.with_timeout(self.config.open_timeout);
            self.withdraw("the layout is another one");
            if let Some(image) = &mut self.image {
                image.set_aside(stop)?;
            }
            self.image = None;
            self.adopt_image(Image::create(self.config.image.clone(), manifest, slice, stop)?);
        }
        if self.incarnation != Some(info.incarnation) {
            if self.incarnation.is_some() {
                self.tell(&Event::Incarnation { incarnation: info.incarnation });
            }
            self.follow(info.incarnation);
            self.staged = None;
            self.digests.clear();
            self.instance = None;
            if let Some(image) = &mut self.image {
                image.forget();
            }
        }
        Ok(())
    }

    /// Begins to fetch the delta to `version` of `incarnation` from `after`, which was fetched before, or else from what
    /// the image has. Waits for the publisher to have that version. The image is not touched; where only image bytes serve, that
    /// is the answer, and [`Receiver::stage_to`] or [`Receiver::sync_to`] fetches them.
    pub fn fetch(
        &mut self,
        after: Option<&Known>,
        (incarnation, version): (Incarnation, Version),
        stop: &Stop,
    ) -> Result<Start, ReceiverError> {
        let asked = Instant::now();
        let info = self.ask_version(Some((incarnation, version)), stop);
        self.status.set(|s| s.stage = Stage::Idle);
        let info = info?;
        let newest = info.version.unwrap_or_default();
        let whole = |why: &str| Ok(Start::Whole { why: why.to_owned(), newest });
        match self.config.mode {
            RequestMode::Full => return whole("the receiver asks for full images only"),
            RequestMode::Delta | RequestMode::Auto => {}
        }
        let base = after.or_else(|| self.held()).cloned();
        let Some(base) = base.filter(|b| b.identity.incarnation == incarnation) else {
            return whole("there is no version of this incarnation to start from");
        };
        let layout = self.layout.as_ref().map(|m| (m.layout_hash(), m.cuts_hash()));
        if layout != Some((info.layout_hash, info.cuts_hash)) {
            return whole("the publisher has another layout");
        }
        self.digests.insert(base.identity.version, base.digest);
        let mut synced = Synced::default();
        let ticket =
            self.ask(RequestMode::Delta, Some(&base.identity), Some(version), None, &mut synced, stop);
        self.status.set(|s| s.stage = Stage::Idle);
        match ticket {
            Ok(ticket) => {
                synced.ask_ms = millis(asked);
                Ok(Start::Delta(Box::new(Fetch::new(self.puller(), ticket, info, synced))))
            }
            Err(ReceiverError::Refused { reason, .. }) if self.config.mode == RequestMode::Auto => {
                Ok(Start::Whole { why: reason, newest })
            }
            Err(e) => Err(e),
        }
    }

    /// [`Receiver::show`] while engines of this host serve the version already: what they compute comes first. Half of the
    /// threads do it, and let others go first.
    pub fn show_aside(&mut self, fetched: Vec<Fetched>, stop: &Stop) -> Result<Synced, ReceiverError> {
        let threads = self.config.image.threads;
        self.set_threads(work::fewer(threads));
        let shown = work::aside(|| self.show(fetched, stop));
        self.set_threads(threads);
        shown
    }

    fn set_threads(&mut self, threads: usize) {
        self.config.image.threads = threads;
        if let Some(image) = &mut self.image {
            image.set_threads(threads);
        }
    }

    /// Applies what was fetched, each from where the one before leads, and makes the last of it visible.
    pub fn show(&mut self, fetched: Vec<Fetched>, stop: &Stop) -> Result<Synced, ReceiverError> {
        let start = Instant::now();
        let Some(info) = fetched.last().map(|f| f.info().clone()) else {
            return Ok(Synced { mode: "none", ..Synced::default() });
        };
        let mut held = self.held().map(|k| k.identity.clone());
        let mut synced = Synced { mode: "delta", ..Synced::default() };
        for fetched in &fetched {
            let base = fetched.base();
            if held.as_ref() != Some(&base) {
                let held = held.map_or_else(|| "nothing whole".into(), |h| h.to_string());
                return Err(ReceiverError::NotNext { base, held });
            }
            let known = fetched.known();
            self.digests.insert(known.identity.version, known.digest);
            held = Some(known.identity);
            synced.add(fetched.synced());
        }
        if let Some(image) = &self.image {
            self.kept.follow(image, &self.config.image.model_id, info.incarnation);
        }
        let result = self.bring(fetched, Progress::new(synced), &info, stop);
        self.settle(result, start)
    }

    fn puller(&self) -> Puller {
        Puller {
            control: self.control.chosen().unwrap_or_else(|| Arc::clone(&self.control)),
            status: self.status.clone(),
            listener: self.listener.clone(),
            allow: self.config.allow.clone(),
            pull: self.config.pull,
            image_bytes: self.layout.as_ref().map_or(0, |m| m.bytes_of(&self.kept_blocks())),
            instance: self.instance.clone().unwrap_or_default(),
            shelf: Arc::clone(&self.shelf),
            relaying: self.config.relaying.clone(),
            nixl: self.config.nixl.clone(),
            sliced: self.keeps.is_some(),
        }
    }

    /// The image is about to change, or to be another one.
    fn withdraw(&self, why: &str) {
        if let Some(relaying) = &self.config.relaying {
            relaying.withdraw_image(why);
        }
    }

    /// Asks for a ticket.
    fn ask(
        &mut self,
        mode: RequestMode,
        have: Option<&Identity>,
        to: Option<Version>,
        wanted: Option<BlockRanges>,
        synced: &mut Synced,
        stop: &Stop,
    ) -> Result<Ticket, ReceiverError> {
        let start = Instant::now();
        self.status.set(|s| s.stage = Stage::Asking);
        let digest = have.and_then(|h| self.digests.get(&h.version).copied());
        let have = have.zip(digest).map(|(h, digest)| Have {
            incarnation: h.incarnation,
            version: h.version,
            digest,
        });
        // Only a receiver of everything can pass everything on.
        let wanted = wanted.filter(|w| *w != self.kept_blocks());
        let (mut unknown, mut stale) = (0, 0);
        let answer = loop {
            let instance_id = self.instance(stop)?;
            let relaying = self.config.relaying.as_ref().filter(|_| wanted.is_none() && self.relays);
            let offer = relaying.and_then(|r| r.offer(&*self.control));
            let request = TransferRequest {
                instance_id,
                mode,
                have: have.clone(),
                version: to,
                layout_hash: self.layout.as_ref().map(|m| m.layout_hash()),
                wanted: wanted.clone(),
                keeps: self.keeps.clone(),
                streams: self.config.streams,
                timeout_ms: Some(self.config.transfer_timeout.as_millis() as u64),
                relay: offer.clone(),
            };
            match self.control.request(&request, stop).map(|answer| (answer, offer)) {
                // An agent that was restarted does not know anybody.
                Err(ControlError::Refused { kind: Kind::NotFound, .. }) if unknown == 0 => {
                    unknown += 1;
                    self.instance = None;
                }
                // The version was replaced while the answer was made.
                Err(ControlError::Refused { kind: Kind::Stale, .. })
                    if stale < STALE_TRIES && !stop.is_set() =>
                {
                    stale += 1;
                    std::thread::sleep(stop.nap().min(STALE_PAUSE));
                }
                other => break other?,
            }
        };
        let (answer, offer) = answer;
        let ticket = match answer {
            TransferAnswer::Granted(granted) => granted
                .ticket()
                .map_err(|source| ReceiverError::Ticket { peer: self.control.peer(), source })?,
            TransferAnswer::Refused(Refused { reason, kind, .. }) => {
                let mode = match mode {
                    RequestMode::Full => "full image",
                    RequestMode::Delta => "delta",
                    RequestMode::Auto => "version",
                };
                return Err(ReceiverError::Refused { peer: self.control.peer(), mode, reason, kind });
            }
        };
        self.check_ticket(&ticket)?;
        self.check_answer(&ticket, mode, have.as_ref(), to, wanted.as_ref())?;
        self.digests.insert(ticket.identity.version, ticket.digest);
        if let (Some(relaying), Some(offer), Some(_)) = (&self.config.relaying, offer, &ticket.swarm) {
            relaying.promise(ticket.id, offer);
        }
        synced.ask_ms += millis(start);
        Ok(ticket)
    }

    fn instance(&mut self, stop: &Stop) -> Result<String, ReceiverError> {
        if let Some(id) = &self.instance {
            return Ok(id.clone());
        }
        let registration = Registration {
            name: Some(self.config.name.clone()),
            relays: self.config.relaying.is_some(),
            ..Registration::default()
        };
        let registered = self.control.register(&registration, stop)?;
        self.relays = registered.relays;
        self.instance = Some(registered.instance_id.clone());
        Ok(registered.instance_id)
    }

    /// A ticket must be about this model, incarnation and layout.
    fn check_ticket(&self, ticket: &Ticket) -> Result<(), ReceiverError> {
        let same_layout = self
            .layout
            .as_ref()
            .is_some_and(|m| (m.layout_hash(), m.cuts_hash()) == (ticket.layout_hash, ticket.cuts_hash));
        let same_model = ticket.identity.model_id == self.config.image.model_id;
        if let Some(was) = self.incarnation.filter(|was| *was != ticket.identity.incarnation && same_model) {
            let (peer, now) = (self.control.peer(), ticket.identity.incarnation);
            return Err(ReceiverError::NewLife { peer, was, now });
        }
        if same_model && same_layout {
            return Ok(());
        }
        let what = if same_layout {
            ticket.identity.to_string()
        } else {
            format!("{} of layout {}", ticket.identity, ticket.layout_hash)
        };
        Err(ReceiverError::OtherTicket { peer: self.control.peer(), what })
    }

    /// A ticket must be what was asked for: else a sync may go round in circles, or forget what it has.
    fn check_answer(
        &self,
        ticket: &Ticket,
        mode: RequestMode,
        have: Option<&Have>,
        to: Option<Version>,
        wanted: Option<&BlockRanges>,
    ) -> Result<(), ReceiverError> {
        let other = |what: String| Err(ReceiverError::OtherTicket { peer: self.control.peer(), what });
        match (&ticket.mode, mode) {
            (Mode::Full, RequestMode::Delta) => other("a full image".into()),
            (Mode::Delta { .. }, RequestMode::Full) => other("a delta".into()),
            (Mode::Full, RequestMode::Full | RequestMode::Auto) => {
                if wanted.map_or_else(|| ticket.wanted != self.kept_blocks(), |w| ticket.wanted != *w) {
                    return other(format!("{} other blocks", ticket.wanted.len()));
                }
                Ok(())
            }
            (Mode::Delta { .. }, RequestMode::Delta | RequestMode::Auto)
                if ticket.wanted != self.kept_blocks() =>
            {
                other(format!("a delta of {} other blocks", ticket.wanted.len()))
            }
            (Mode::Delta { base, .. }, RequestMode::Delta | RequestMode::Auto) => {
                let version = base.identity.version;
                if have.is_none_or(|h| (h.version, h.digest) != (version, base.digest)) {
                    return other(format!("a delta from version {version} with digest {}", base.digest));
                }
                match to {
                    Some(to) if to != ticket.identity.version => {
                        other(format!("a delta to {}", ticket.identity))
                    }
                    Some(_) | None => Ok(()),
                }
            }
        }
    }

    fn stopped(&self, stage: Stage, source: Stopped) -> ReceiverError {
        ReceiverError::Stopped { peer: self.control.peer(), stage, source }
    }
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests;
