//! One load of one engine by plain HTTP: pause, write, clear, resume, and what is done when a step fails.
//!
//! Owns: the order of the steps ([`run`]), and [`Journal`], the file that says how far they got. Called by the guard
//! ([`super::guard`]), which alone talks to an engine while a load is under way. Must not: know an engine's routes
//! ([`Plain`] has them).
//!
//! # The pause is a lease
//!
//! From the pause to the first write the lease runs, and whoever ordered the load must be alive. If either ends, the old
//! weights are let go on. From the first write on there is only one way, forward: the load is finished from the image,
//! which is held by a map lease, whoever lives. A write that fails is repeated once, dense. If that fails too, or the
//! cache cannot be cleared, the engine stays paused (**fenced**) and that is told; the next load that succeeds ends it.
//!
//! # The journal
//!
//! `journal.json` is put in place before each step that must not be forgotten, and removed when the engine serves again.
//! The lock beside it is held for as long as a guard lives.
//!
//! | phase | the engine | who finds it, with the lock free, |
//! |---|---|---|
//! | (no file) | serves | |
//! | `pausing` | may be paused, has its old weights | resumes it |
//! | `writing` | paused, weights of two versions | loads it, dense, before it is resumed |
//! | `fenced` | as `writing`, and it was told | the same |
//! | `loaded` | paused, has the new weights, caches cleared | resumes it |
//!
//! | | invariant | test |
//! |---|---|---|
//! | TRANSACTION-1 | a load that goes no further than the pause resumes the old weights | `a_receiver_killed_before_the_first_write_leaves_no_engine_paused`, `the_end_of_the_pause_lease_resumes_the_old_weights` |
//! | TRANSACTION-2 | after the first write an engine is resumed only with a whole version | `a_receiver_killed_after_the_first_write_leaves_the_load_to_its_guard`, `an_engine_that_cannot_be_written_stays_fenced_and_heals`, `an_image_taken_back_during_a_load_from_disk_leaves_the_engine_fenced` |
//! | TRANSACTION-3 | a failed write is repeated once before the engine is given up | `a_failed_update_is_repeated_once_while_the_engine_is_paused` |
//! | TRANSACTION-4 | a guard's death is found and made good | `a_killed_guard_is_found_and_the_engine_is_finished_by_the_next` |

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use windlass_core::error::Kind;
use windlass_data::image::ImageView;
use windlass_data::seal::draft::Draft;
use windlass_data::stop::Stop;

use super::error::{EngineError, Stage};
use super::order::{How, Order};

/// How long an engine may take for what it does at once.
pub const ANSWER: Duration = Duration::from_secs(20);
/// How often an engine is told to resume before that is a failure, and how long is waited in between.
const RESUMES: u32 = 5;
const RESUME_PAUSE: Duration = Duration::from_millis(200);

/// What a write did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    pub how: String,
    /// Tensors of the image that the engine did not take.
    pub extras: Vec<String>,
    /// Why the engine's own loader was used where a plan was expected.
    pub slow: Option<String>,
}

/// An engine that is driven step by step through its own routes. Every call ends with its [`Stop`].
pub trait Plain {
    /// What must be done once before the first pause.
    fn prepare(&self, order: &Order, stop: &Stop) -> Result<(), EngineError>;
    /// Pauses it; pausing a paused one is no error.
    fn pause(&self, stop: &Stop) -> Result<(), EngineError>;
    /// Writes a version and its name. After an error the engine is of no version, unless it
    /// [declined](EngineError::Declined).
    fn write(&self, order: &Order, stop: &Stop) -> Result<Written, EngineError>;
    /// Clears caches of old weights, as far as [`Plain::write`] has not.
    fn clear(&self, stop: &Stop) -> Result<(), EngineError>;
    /// Names the version that another process wrote.
    fn label(&self, label: &str, stop: &Stop) -> Result<(), EngineError>;
    /// Pauses it after a load that did not finish, also if the load itself needed no pause.
    fn fence(&self, stop: &Stop) -> Result<(), EngineError>;
    /// Whether [`Plain::pause`] does anything. If not, there is nothing to resume.
    fn pauses(&self) -> bool;
    /// Lets it go on; one that is not paused is left as it is.
    fn resume(&self, stop: &Stop) -> Result<(), EngineError>;
    /// The name of the version that it has.
    fn live(&self, stop: &Stop) -> Result<Option<String>, EngineError>;
    /// Whether [`Plain::pause`] may wait for requests to end: then the image is not held meanwhile.
    fn holds_requests(&self) -> bool;
}

/// How far a load got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The engine may be paused; nothing was written.
    Pausing,
    /// The first write may have begun.
    Writing,
    /// A write or what must follow it failed for good.
    Fenced,
    /// Everything is written; the engine is to be resumed.
    Loaded,
}

impl Phase {
    /// Whether the engine must not be resumed before a whole load.
    pub const fn is_dirty(self) -> bool {
        match self {
            Phase::Writing | Phase::Fenced => true,
            Phase::Pausing | Phase::Loaded => false,
        }
    }
}

/// What the journal says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// How far the load got.
    pub phase: Phase,
    /// The name of the version.
    pub version: String,
    /// Why it was given up, if it was.
    #[serde(default)]
    pub error: Option<String>,
}

/// The journal of an engine.
#[derive(Clone, Debug)]
pub struct Journal {
    path: PathBuf,
}

impl Journal {
    /// The journal in an engine's directory.
    pub fn of(dir: &Path) -> Journal {
        Journal { path: dir.join("journal.json") }
    }

    /// What it says; `None` if the engine serves. A damaged file says the worst.
    pub fn read(&self) -> Result<Option<Entry>, EngineError> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(EngineError::io("read", &self.path)(e)),
        };
        Ok(Some(serde_json::from_slice(&text).unwrap_or_else(|e| Entry {
            phase: Phase::Writing,
            version: String::new(),
            error: Some(e.to_string()),
        })))
    }

    /// Notes how far the load got, before the next step.
    pub fn put(&self, phase: Phase, version: &str, error: Option<&EngineError>) -> Result<(), EngineError> {
        let error = error.map(|e| crate::error::chain(e));
        let entry = Entry { phase, version: version.to_owned(), error };
        let text = serde_json::to_vec(&entry).map_err(|e| EngineError::io("write", &self.path)(e.into()))?;
        Draft::write(&self.path, &text).map_err(EngineError::io("write", &self.path))
    }

    /// The engine serves.
    pub fn clear(&self) -> Result<(), EngineError> {
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(EngineError::io("remove", &self.path)(e)),
            _ => Ok(()),
        }
    }
}

/// How a load ended.
#[derive(Debug)]
pub enum Outcome {
    /// The engine serves the version.
    Loaded(Done),
    /// The engine serves what it had.
    Kept(EngineError),
    /// The engine is paused and must be loaded.
    Fenced(EngineError),
    /// The engine does not answer any more, or could not be resumed; the journal says what is left to do.
    Lost(EngineError),
}

/// What came of a load that succeeded.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Done {
    /// The name of the version.
    pub version: String,
    /// How it was written.
    pub how: String,
    /// From the pause to the end of it.
    pub pause_ms: f64,
    /// Writing alone, or all of it where the engine says only that.
    pub load_ms: f64,
    /// What came before the pause, where the engine says so: bringing what is needed to GPUs.
    #[serde(default)]
    pub stage_ms: Option<f64>,
    /// The steps that were under way, where the engine says so.
    #[serde(default)]
    pub drain_ms: Option<f64>,
    /// Tensors of the image that the engine did not take.
    pub extras: Vec<String>,
    /// Why it was written twice, if it was.
    pub retried: Option<String>,
    /// Why the engine's own loader was used where a plan was expected.
    #[serde(default)]
    pub slow: Option<String>,
}

/// Takes a map lease on the image until a [`Stop`], and says what is to be loaded from it.
pub type Take<'a> = dyn Fn(&Stop) -> Result<(ImageView, Order), EngineError> + 'a;

/// What a load needs to know.
#[derive(Clone, Copy)]
pub struct Load<'a> {
    pub engine: &'a dyn Plain,
    pub name: &'a str,
    pub journal: &'a Journal,
    /// Takes a map lease on the image, and says what is to be loaded from it.
    pub take: &'a Take<'a>,
    /// Whether the engine has to be prepared.
    pub prepare: bool,
    /// Whether it was left dirty.
    pub dirty: bool,
    /// How long from the pause to the first write.
    pub lease: Duration,
    /// How long from the first write to the end.
    pub timeout: Duration,
    /// Set when whoever ordered the load is gone.
    pub alone: &'a Stop,
    /// Told of each step.
    pub told: &'a dyn Fn(Phase),
}

/// Loads an engine.
pub fn run(load: &Load<'_>) -> Outcome {
    let Load { engine, journal, .. } = load;
    // Before the pause there is nothing to make good.
    let patience = load.alone.with_timeout(load.timeout);
    let held = (load.take)(&patience).and_then(|(view, order)| {
        if load.prepare {
            engine.prepare(&order, &patience)?;
        }
        Ok((view, order))
    });
    let (view, order) = match held {
        Ok(held) => held,
        Err(e) if load.dirty => return Outcome::Fenced(e),
        Err(e) => return Outcome::Kept(e),
    };
    let label = order.label().to_string();
    let first = if load.dirty { Phase::Writing } else { Phase::Pausing };
    if let Err(e) = journal.put(first, &label, None) {
        return if load.dirty { Outcome::Fenced(e) } else { Outcome::Kept(e) };
    }
    (load.told)(first);
    let paused = Instant::now();
    // What an engine waits for must not hold the image.
    let view = (!engine.holds_requests()).then_some(view);
    let lease = load.alone.with_timeout(load.lease);
    let ready = pause(load, view, order, &lease);
    let (view, order) = match ready {
        Ok(ready) => ready,
        Err(e) => return back(load, &label, e),
    };
    let label = order.label().to_string();
    if let Err(e) = journal.put(Phase::Writing, &label, None) {
        return back(load, &label, e);
    }
    (load.told)(Phase::Writing);
    finish(load, view, order, paused)
}

/// Up to the first write.
fn pause(
    load: &Load<'_>,
    view: Option<ImageView>,
    order: Order,
    lease: &Stop,
) -> Result<(ImageView, Order), EngineError> {
    load.engine.pause(lease)?;
    let ready = match view {
        Some(view) => (view, order),
        None => (load.take)(lease)?,
    };
    // The last moment at which the old weights can go on.
    lease.check().map_err(|s| EngineError::Lease {
        engine: load.name.to_owned(),
        why: match s.kind() {
            Kind::Cancelled => "the receiver is gone".into(),
            _ => format!("the lease of {:?} is over", load.lease),
        },
        kind: s.kind(),
    })?;
    Ok(ready)
}

/// Lets the old weights go on; if they are not whole, the engine stays paused.
fn back(load: &Load<'_>, label: &str, error: EngineError) -> Outcome {
    if load.dirty {
        return fence(load, label, error);
    }
    match resume_paused(load) {
        Ok(()) => match load.journal.clear() {
            Ok(()) => Outcome::Kept(error),
            Err(e) => Outcome::Kept(e),
        },
        Err(e) => Outcome::Lost(e),
    }
}

fn fence(load: &Load<'_>, label: &str, error: EngineError) -> Outcome {
    // The journal says `writing` already, which means the same to whoever finds it.
    let _ = load.journal.put(Phase::Fenced, label, Some(&error));
    (load.told)(Phase::Fenced);
    if error.is_away() {
        return Outcome::Lost(error);
    }
    if !load.engine.pauses()
        && let Err(e) = load.engine.fence(&Stop::after(ANSWER))
    {
        return Outcome::Lost(e);
    }
    Outcome::Fenced(error)
}

/// From the first write on, whoever lives.
fn finish(load: &Load<'_>, view: ImageView, order: Order, paused: Instant) -> Outcome {
    let Load { engine, journal, .. } = load;
    let label = order.label().to_string();
    let stop = Stop::after(load.timeout);
    let begun = Instant::now();
    let mut retried = None;
    let mut written = engine.write(&order, &stop);
    if let Err(e @ EngineError::Declined { .. }) = written {
        // The workers say that they are whole, and they know.
        return back(&Load { dirty: false, ..*load }, &label, e);
    }
    if let Err(e) = &written
        && !e.is_away()
    {
        retried = Some(crate::error::chain(e));
        written = engine.write(&Order { how: How::Dense, ..order }, &stop);
    }
    let load_ms = millis(begun);
    // An image that was taken back meanwhile may have been read as two versions.
    let held = view.finish().map_err(EngineError::from);
    let written = match written.and_then(|w| held.map(|()| w)) {
        Ok(written) => written,
        Err(e) => return fence(load, &label, e),
    };
    if let Err(e) = engine.clear(&stop) {
        return fence(load, &label, e);
    }
    // A journal that cannot be written must not keep a loaded engine from serving.
    let _ = journal.put(Phase::Loaded, &label, None);
    (load.told)(Phase::Loaded);
    if let Err(e) = resume_paused(load) {
        return Outcome::Lost(e);
    }
    let pause_ms = millis(paused);
    if let Err(e) = journal.clear() {
        return Outcome::Lost(e);
    }
    match engine.live(&Stop::after(ANSWER)) {
        Ok(found) if found.as_deref() == Some(&*label) => {}
        Ok(found) => {
            let (engine, found) = (load.name.to_owned(), found.unwrap_or_else(|| "nothing".into()));
            return Outcome::Kept(EngineError::Version { engine, expected: label, found });
        }
        Err(e) => return Outcome::Lost(e),
    }
    let Written { how, extras, slow } = written;
    let (stage_ms, drain_ms) = (None, None);
    Outcome::Loaded(Done {
        version: label,
        how,
        pause_ms,
        load_ms,
        stage_ms,
        drain_ms,
        extras,
        retried,
        slow,
    })
}

/// Lets an engine go on, whoever lives; several tries, because nothing else ends the pause.
pub(super) fn resume(engine: &dyn Plain) -> Result<(), EngineError> {
    let mut tries = 0;
    loop {
        match engine.resume(&Stop::after(ANSWER)) {
            Ok(()) => return Ok(()),
            Err(e) if tries == RESUMES => return Err(e),
            Err(_) => tries += 1,
        }
        std::thread::sleep(RESUME_PAUSE * tries);
    }
}

/// Lets an engine go on that this load has paused, or that an earlier one has left paused.
fn resume_paused(load: &Load<'_>) -> Result<(), EngineError> {
    if load.dirty || load.engine.pauses() { resume(load.engine) } else { Ok(()) }
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// For errors that are about the image rather than the engine.
pub(super) fn stale(engine: &str, why: String) -> EngineError {
    let (text, advice) = (format!("{engine}: {why}"), String::new());
    EngineError::Guard { stage: Some(Stage::Check), kind: Kind::Stale, text, advice }
}
