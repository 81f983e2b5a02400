//! What must hold, whatever happens.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use windlass::service::controller::client::{ControllerClient, ControllerError};
use windlass::service::controller::status::Status;
use windlass::service::controller::wire::ServedVersion;
use windlass_core::identity::StateDigest;
use windlass_data::image::{ImageError, ImageView};
use windlass_data::region::RegionError;
use windlass_data::stop::Stop;

use crate::soak::trainer;

/// What a wait may take beyond its deadline on a machine that does a lot else, with a process that is stopped meanwhile.
pub(crate) const SLACK: Duration = Duration::from_secs(15);

/// A life of a model's trainer.
pub(crate) type Life = (String, u64);

/// What the controller said, and when it was asked and had answered.
pub(crate) struct Look {
    pub(crate) status: Status,
    pub(crate) asked: Instant,
    pub(crate) answered: Instant,
}

impl Look {
    pub(crate) fn at(client: &ControllerClient, stop: &Stop) -> Result<Box<Look>, ControllerError> {
        let asked = Instant::now();
        let status = client.status(stop)?;
        Ok(Box::new(Look { status, asked, answered: Instant::now() }))
    }
}

/// What a wait brought.
pub(crate) enum Outcome {
    /// A gate opened, and what the controller said right after.
    Opened(u64, ServedVersion, Option<Box<Look>>),
    /// The status that was asked for.
    Looked(Box<Look>),
    /// A version was announced.
    Announced,
    /// It did not get what it asked for.
    Refused(ControllerError),
}

/// Somebody waits, in a thread.
pub(crate) struct Wait {
    pub(crate) what: String,
    pub(crate) begun: Instant,
    pub(crate) most: Duration,
    /// The life on whose behalf it waits.
    pub(crate) life: Option<Life>,
    pub(crate) thread: JoinHandle<(Outcome, Duration)>,
}

/// What an image shows.
pub(crate) enum Shown {
    /// The version of a life.
    Version(u64, u64),
    /// Nothing whole at this moment.
    Nothing,
}

/// What was published and seen, and how often it was looked at.
#[derive(Default)]
pub(crate) struct Judge {
    published: BTreeMap<Life, BTreeMap<u64, StateDigest>>,
    /// The versions of these lives that were served, and when that was known at the latest.
    served: BTreeMap<Vec<Life>, BTreeMap<u64, Instant>>,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    /// The longest that a wait took beyond its deadline.
    pub(crate) late: Duration,
}

impl Judge {
    pub(crate) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// A version is about to be published.
    pub(crate) fn publishes(&mut self, life: &Life, version: u64, digest: StateDigest) {
        self.published.entry(life.clone()).or_default().insert(version, digest);
    }

    /// Reads an image as an engine does. What it shows is what was published.
    pub(crate) fn image(&mut self, dir: &Path) -> Result<Shown, String> {
        let view = match ImageView::open(dir, SLACK, &Stop::after(Duration::ZERO)) {
            Ok(view) => view,
            Err(ImageError::NotWhole { .. } | ImageError::Region(RegionError::Absent { .. })) => {
                self.count("images that showed nothing");
                return Ok(Shown::Nothing);
            }
            Err(e) => {
                // An image that is just being put in another's place.
                self.count("images that could not be opened");
                eprintln!("{}: {e}", dir.display());
                return Ok(Shown::Nothing);
            }
        };
        let (known, found) = (view.known().clone(), trainer::digest(view.manifest(), view.data()));
        if view.finish().is_err() {
            self.count("images taken back while they were read");
            return Ok(Shown::Nothing);
        }
        self.count("images compared");
        let identity = &known.identity;
        let life = (identity.model_id.to_string(), identity.incarnation.0);
        let expected = self.published.get(&life).and_then(|l| l.get(&identity.version));
        if expected != Some(&found) || known.digest != found {
            let published: Vec<_> = self
                .published
                .iter()
                .filter_map(|(l, v)| v.iter().find(|(_, d)| **d == found).map(|(v, _)| (l, v)))
                .collect();
            return Err(format!(
                "WRONG: {} shows {known:?}, its bytes are {found}, published as {published:?}; {identity} is {expected:?}",
                dir.display()
            ));
        }
        Ok(Shown::Version(life.1, identity.version))
    }

    /// What is served never goes back within a life.
    pub(crate) fn served(&mut self, served: &ServedVersion, look: &Look) -> Result<(), String> {
        let lives: Vec<Life> =
            served.identities.iter().map(|i| (i.model_id.to_string(), i.incarnation.0)).collect();
        for (life, identity) in lives.iter().zip(&served.identities) {
            if !self.published.get(life).is_some_and(|l| l.contains_key(&identity.version)) {
                return Err(format!("WRONG: {identity} is served and was never published"));
            }
        }
        self.count("looks at what is served");
        let seen = self.served.entry(lives).or_default();
        // Answers overlap: only one that was asked for after the other had come is later.
        if let Some((newer, _)) = seen.range(served.version + 1..).find(|(_, at)| **at < look.asked) {
            return Err(format!("WRONG: {served:?} is served after version {newer}"));
        }
        if let Entry::Vacant(entry) = seen.entry(served.version) {
            entry.insert(look.answered);
            self.count("versions served");
        }
        Ok(())
    }

    /// A wait that has ended, or should have.
    pub(crate) fn waited(&mut self, what: &str, took: Duration, most: Duration) -> Result<(), String> {
        self.count("waits");
        self.late = self.late.max(took.saturating_sub(most));
        if took > most + SLACK {
            return Err(format!("PAST ITS DEADLINE: {what} took {took:?} of {most:?}"));
        }
        Ok(())
    }
}
