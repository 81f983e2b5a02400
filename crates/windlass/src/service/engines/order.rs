//! What an engine's workers are told, and what they say of themselves: plain JSON.
//!
//! Owns: [`Order`], [`Report`] and [`Label`], the name under which an engine keeps the version that it was given. The
//! label is the only memory of what an engine has: a restarted engine has another one, and is loaded again.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use windlass_core::error::Kind;
use windlass_core::identity::{Incarnation, StateDigest, Version};
use windlass_data::image::Known;

use super::error::{EngineError, Stage};

/// How a worker is to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// As it can: only what changed if it knows what it has, else everything.
    Auto,
    Dense,
}

/// A delta that this receiver has fetched and its image does not hold yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeltaFiles {
    /// The version that it begins from, of the order's incarnation.
    pub base: Version,
    /// Its parts: files of this host, and how many bytes of each.
    pub files: Vec<(PathBuf, u64)>,
}

/// Which version to load from which image.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Order {
    /// The directory of the image.
    pub image: PathBuf,
    pub model_id: String,
    /// Which life of the publisher.
    pub incarnation: u64,
    pub version: Version,
    /// What its bytes must give.
    pub digest: StateDigest,
    pub how: How,
    /// Where workers write what came of it.
    pub reports: Option<PathBuf>,
    /// Within how many seconds.
    pub timeout: f64,
    /// Load from this, before the image holds the version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<DeltaFiles>,
}

impl Order {
    /// The order to load `known` from the image in `dir`.
    pub fn new(dir: &Path, known: &Known, how: How, reports: Option<PathBuf>, timeout: f64) -> Order {
        Order {
            image: dir.to_owned(),
            model_id: known.identity.model_id.to_string(),
            incarnation: known.identity.incarnation.0,
            version: known.identity.version,
            digest: known.digest,
            how,
            reports,
            timeout,
            delta: None,
        }
    }

    /// What the engine is to call it.
    pub fn label(&self) -> Label {
        Label { incarnation: Incarnation(self.incarnation), version: self.version }
    }
}

/// The name of a version in an engine: `windlass:<incarnation as 16 hexadecimal digits>:<version>`. The order of labels
/// is that of versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label {
    /// Which life of the publisher.
    pub incarnation: Incarnation,
    pub version: Version,
}

impl From<&Known> for Label {
    fn from(known: &Known) -> Label {
        Label { incarnation: known.identity.incarnation, version: known.identity.version }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "windlass:{:016x}:{}", self.incarnation.0, self.version)
    }
}

/// A label that is none of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign;

impl FromStr for Label {
    type Err = Foreign;

    fn from_str(text: &str) -> Result<Label, Foreign> {
        let rest = text.strip_prefix("windlass:").ok_or(Foreign)?;
        let (incarnation, version) = rest.split_once(':').ok_or(Foreign)?;
        let incarnation = incarnation.parse().map_err(|_| Foreign)?;
        let label = Label { incarnation, version: version.parse().map_err(|_| Foreign)? };
        if label.to_string() == text { Ok(label) } else { Err(Foreign) }
    }
}

/// What a worker says of itself. What is not needed here is not looked at.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Report {
    #[serde(default)]
    pub rank: u64,
    #[serde(default)]
    pub live: Option<Live>,
    /// `clean`, or `dirty` if a write began and did not end.
    #[serde(default)]
    pub state: String,
    /// What of the model it writes directly.
    #[serde(default)]
    pub plan: Option<Plan>,
    /// What it did last.
    #[serde(default)]
    pub last: Option<Last>,
    /// Tensors of the image that the engine does not take.
    #[serde(default)]
    pub extras: Vec<String>,
    #[serde(default)]
    pub error: Option<Said>,
}

/// The version that a worker has.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Live {
    /// Which life of the publisher.
    pub incarnation: u64,
    pub version: Version,
}

/// What a worker did last.
#[derive(Clone, Debug, Deserialize)]
pub struct Last {
    /// `sparse`, `dense`, `session` or `skipped`.
    #[serde(default)]
    pub how: String,
    /// Why the engine's own loader wrote what a plan was expected to write; empty if nothing of the kind happened.
    #[serde(default)]
    pub why: String,
}

/// What of a worker's model is written directly.
#[derive(Clone, Debug, Deserialize)]
pub struct Plan {
    /// Whether a delta can be applied before the image holds it.
    #[serde(default)]
    pub ahead: bool,
}

/// An error as our parts in other processes tell it.
#[derive(Clone, Debug, Deserialize)]
pub struct Said {
    /// What sort of failure.
    pub kind: Kind,
    pub text: String,
}

impl Report {
    /// Whether the worker has what was ordered; what is wrong if not.
    fn check(&self, engine: &str, order: &Order) -> Result<(), EngineError> {
        let worker = |text: String, kind| {
            Err(EngineError::Worker {
                engine: engine.to_owned(),
                stage: Stage::Load,
                rank: self.rank,
                text,
                kind,
            })
        };
        if let Some(said) = &self.error {
            return worker(said.text.clone(), said.kind);
        }
        let live = Some(Live { incarnation: order.incarnation, version: order.version });
        if self.state != "clean" || self.live != live {
            let (state, live) = (&self.state, &self.live);
            return worker(format!("it is {state} and has {live:?}, not {}", order.label()), Kind::Stale);
        }
        Ok(())
    }
}

/// Whether all workers have what was ordered. If none has, and all have the same version still, the order was declined
/// and nothing was written.
pub(super) fn check_reports(engine: &str, order: &Order, reports: &[Report]) -> Result<(), EngineError> {
    let Err(error) = reports.iter().try_for_each(|r| r.check(engine, order)) else { return Ok(()) };
    let first = reports.first().and_then(|r| r.live.as_ref());
    let ordered = Live { incarnation: order.incarnation, version: order.version };
    let same = |r: &Report| r.state == "clean" && r.live.as_ref() == first;
    match error {
        EngineError::Worker { engine, rank, text, kind, .. }
            if reports.iter().all(same) && first != Some(&ordered) =>
        {
            Err(EngineError::Declined { engine, rank, text, kind })
        }
        error => Err(error),
    }
}

/// Why the workers fell to the engine's own loader, if they did.
pub(super) fn slow(reports: &[Report]) -> Option<String> {
    let last = reports.iter().filter_map(|r| r.last.as_ref());
    last.map(|l| &l.why).find(|why| !why.is_empty()).cloned()
}

/// Whether every worker can apply a delta before the image holds it.
pub(super) fn can_lead(reports: &[Report]) -> bool {
    !reports.is_empty() && reports.iter().all(|r| r.plan.as_ref().is_some_and(|p| p.ahead))
}

/// Takes away what earlier loads left, so that nothing old is taken for new.
pub(super) fn clear_reports(dir: &Path) -> Result<(), EngineError> {
    for entry in fs::read_dir(dir).map_err(EngineError::io("read", dir))?.flatten() {
        let path = entry.path();
        fs::remove_file(&path).map_err(EngineError::io("remove", &path))?;
    }
    Ok(())
}

/// What all workers said. An error with `hint` if one is silent.
pub(super) fn read_reports(
    engine: &str,
    dir: &Path,
    workers: u64,
    hint: &str,
) -> Result<Vec<Report>, EngineError> {
    let read = |rank: u64| {
        let path = dir.join(format!("{rank}.json"));
        let answer = |why: String| EngineError::Answer {
            engine: engine.to_owned(),
            stage: Stage::Load,
            path: path.display().to_string(),
            why,
        };
        let text =
            fs::read(&path).map_err(|e| answer(format!("worker {rank} wrote no report ({e}); {hint}")))?;
        serde_json::from_slice::<Report>(&text).map_err(|e| answer(e.to_string()))
    };
    (0..workers).map(read).collect()
}

/// How the workers loaded, in a word.
pub(super) fn how(reports: &[Report]) -> String {
    let mut words: Vec<&str> = reports.iter().filter_map(|r| r.last.as_ref()).map(|l| &*l.how).collect();
    words.sort_unstable();
    words.dedup();
    words.join("+")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_survives_the_engine_and_foreign_ones_are_known_as_such() {
        let label = Label { incarnation: Incarnation(0x1234_5678_9abc_def0), version: 17 };
        assert_eq!(label.to_string(), "windlass:123456789abcdef0:17");
        assert_eq!(label.to_string().parse(), Ok(label));
        let small = Label { incarnation: Incarnation(1), version: 0 };
        assert_eq!(small.to_string().parse(), Ok(small));
        for foreign in [
            "default",
            "",
            "windlass:",
            "windlass:1:2",
            "windlass:000000000000000g:1",
            "windlass:0000000000000001:+1",
        ] {
            assert_eq!(foreign.parse::<Label>(), Err(Foreign), "{foreign:?}");
        }
        let newer = Label { incarnation: Incarnation(2), version: 0 };
        assert!(label > newer && newer > Label { incarnation: Incarnation(1), version: 99 });
    }
}
