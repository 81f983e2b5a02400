//! A receiver that keeps an image of its own, filled over the network.

use std::sync::Arc;
use std::time::Duration;

use windlass_core::identity::{Identity, Incarnation, ModelId, Version};

use super::error::RoleError;
use super::patience::Waiting;
use super::{Arrived, EngineConfig, WeightTransferReceiver};
use crate::image::{ImageSpec, ImageView};
use crate::receiver::{Control, Receiver, ReceiverConfig, Synced, TransferStatus};
use crate::stop::Stop;

/// The longest that one question for a newer version takes, so that a flag is noticed soon.
const POLL: Duration = Duration::from_secs(5);

/// Fetches versions over TCP into an image, and hands them out in place.
#[derive(Debug)]
pub struct ImageReceiver {
    receiver: Receiver,
    control: Box<ControlHandle>,
    load_timeout: Duration,
    waiting: Waiting,
}

struct ControlHandle(Arc<dyn Control>);

impl std::fmt::Debug for ControlHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.peer())
    }
}

impl ImageReceiver {
    /// Opens the image, and verifies what an earlier receiver left in it.
    pub fn open(
        model_id: ModelId,
        config: EngineConfig,
        control: Arc<dyn Control>,
        stop: &Stop,
    ) -> Result<ImageReceiver, RoleError> {
        let (load_timeout, waiting) = (config.load_timeout, Waiting::new(config.patience));
        let config = ReceiverConfig {
            image: ImageSpec {
                dir: config.image_dir,
                model_id,
                group: config.group,
                memfd: config.memfd,
                threads: config.threads,
            },
            slice: None,
            name: config.name,
            mode: config.mode,
            streams: config.streams,
            transfer_timeout: config.transfer_timeout,
            open_timeout: config.open_timeout,
            pull: config.pull,
            allow: config.allow,
            keep: None,
            share: None,
            nixl: config.nixl,
            relaying: None,
        };
        let receiver = Receiver::open(config, Arc::clone(&control), None, stop)?;
        Ok(ImageReceiver { receiver, control: Box::new(ControlHandle(control)), load_timeout, waiting })
    }

    /// Whether the image holds a whole version other than `loaded`.
    fn fresh(&self, loaded: Option<&Identity>) -> bool {
        self.receiver.current().is_some_and(|k| Some(&k.identity) != loaded)
    }

    /// One try to have something other than `loaded`. `None` if there was nothing within some seconds.
    fn advance(&mut self, loaded: Option<&Identity>, stop: &Stop) -> Result<Option<Synced>, RoleError> {
        if !self.fresh(loaded) {
            let seen = self.receiver.current().map(|k| (k.identity.incarnation, k.identity.version));
            // Anything is newer than this, so that the first version is waited for like any other.
            let seen: (Incarnation, Version) = seen.unwrap_or((Incarnation(0), 0));
            let info = self.control.0.version(Some(seen), &stop.with_timeout(POLL))?;
            if !info.is_newer_than(Some(seen)) {
                return Ok(None);
            }
        }
        let synced = self.receiver.sync(stop)?;
        Ok(self.fresh(loaded).then_some(synced))
    }

    fn view(&self, how: Synced, stop: &Stop) -> Result<Option<Arrived>, RoleError> {
        let Some(image) = self.receiver.image() else { return Ok(None) };
        let view = ImageView::take(image.region(), self.load_timeout, stop)?;
        let (known, manifest, path) = (view.known().clone(), Arc::clone(view.manifest()), view.path());
        let arrived = Arrived::new(known, manifest, Box::new(view.into_lease()))?;
        Ok(Some(arrived.with_sums(image.tensor_sums()).with_path(path).with_how(how)))
    }
}

impl WeightTransferReceiver for ImageReceiver {
    fn next(&mut self, loaded: Option<&Identity>, stop: &Stop) -> Result<Arrived, RoleError> {
        self.waiting.heard();
        loop {
            let how = match self.advance(loaded, stop) {
                Ok(how) => {
                    self.waiting.heard();
                    how
                }
                // What is there is better than nothing while the publisher is away.
                Err(error) if self.fresh(loaded) && !stop.is_set() => {
                    tracing::warn!(%error, "the newest version could not be fetched; an older one is there");
                    Some(Synced { mode: "none", ..Synced::default() })
                }
                Err(error) => {
                    self.waiting.again(error, stop)?;
                    None
                }
            };
            if let Some(how) = how
                && let Some(arrived) = self.view(how, stop)?
            {
                return Ok(arrived);
            }
            let peer = || format!("waiting for a new version from {}", self.control.0.peer());
            stop.check().map_err(|source| RoleError::stopped(peer())(source))?;
        }
    }

    fn status(&self) -> TransferStatus {
        self.receiver.status().get()
    }
}
