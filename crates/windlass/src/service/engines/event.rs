//! What is told about engines, to machines and to people.

use serde_json::{Value, json};
use windlass_core::error::Kind;

use super::error::{EngineError, Stage};
use super::order::Label;
use crate::error::advised;

/// Something that happened to an engine.
#[derive(Clone, Debug)]
pub enum EngineEvent {
    /// It serves a version.
    Loaded {
        engine: String,
        label: Label,
        /// How it was written.
        how: String,
        /// How long it was paused, where that is known.
        pause_ms: Option<f64>,
        /// How long the writing took.
        load_ms: f64,
        /// What came before the pause, where it is known: staging, and steps that were under way.
        before_ms: (Option<f64>, Option<f64>),
        /// Why it was written twice, if it was.
        retried: Option<String>,
        /// Why not faster, where there is a faster way: the engine's own loader was used where a plan was expected.
        slow: Option<String>,
        /// It was loaded before the image held it.
        ahead: bool,
    },
    /// A load failed; it serves what it had.
    Failed {
        engine: String,
        /// Which version, if it was about one.
        label: Option<Label>,
        failure: Failure,
        /// It is not tried again before there is another version or the engine is restarted.
        given_up: bool,
    },
    /// It is paused, and stays so until a load succeeds.
    Fenced {
        engine: String,
        /// Which version was to be written.
        label: Option<Label>,
        failure: Failure,
        /// It is not tried again before there is another version or the engine is restarted.
        given_up: bool,
    },
    /// It does not answer and is waited for.
    Waiting { engine: String, failure: Failure },
    /// The image has tensors that it does not take.
    Extras { engine: String, names: Vec<String> },
}

/// A failure, as it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What was being done.
    pub stage: Stage,
    /// What sort of failure.
    pub kind: Kind,
    pub text: String,
    /// What to do next.
    pub advice: String,
}

impl From<&EngineError> for Failure {
    fn from(e: &EngineError) -> Failure {
        Failure {
            stage: e.stage(),
            kind: e.kind(),
            text: crate::error::chain(e),
            advice: e.advice().to_owned(),
        }
    }
}

/// Names that are shown to people.
const SHOWN: usize = 5;

impl EngineEvent {
    /// As a line of JSON.
    pub fn json(&self) -> Value {
        let failed = |event: &str, engine: &str, label: Option<&Label>, f: &Failure, given_up: bool| {
            json!({
                "event": event, "engine": engine, "version": label.map(|l| l.version), "stage": f.stage,
                "kind": f.kind, "error": f.text, "advice": f.advice, "given_up": given_up,
            })
        };
        match self {
            EngineEvent::Loaded {
                engine,
                label,
                how,
                pause_ms,
                load_ms,
                before_ms,
                retried,
                slow,
                ahead,
            } => json!({
                "event": "loaded", "engine": engine, "incarnation": label.incarnation, "version": label.version,
                "how": how, "pause_ms": pause_ms, "load_ms": load_ms, "retried": retried,
                "stage_ms": before_ms.0, "drain_ms": before_ms.1, "why": slow, "ahead": ahead,
            }),
            EngineEvent::Failed { engine, label, failure, given_up } => {
                failed("engine_failed", engine, label.as_ref(), failure, *given_up)
            }
            EngineEvent::Fenced { engine, label, failure, given_up } => {
                failed("fenced", engine, label.as_ref(), failure, *given_up)
            }
            EngineEvent::Waiting { engine, failure } => json!({
                "event": "engine_waiting", "engine": engine, "kind": failure.kind, "error": failure.text,
            }),
            EngineEvent::Extras { engine, names } => {
                json!({ "event": "extras", "engine": engine, "names": names })
            }
        }
    }

    /// As a line for people.
    pub fn line(&self) -> String {
        let again =
            |given_up: bool| if given_up { "; not tried again with this version" } else { "; trying again" };
        match self {
            EngineEvent::Loaded { engine, label, how, pause_ms, load_ms, retried, slow, .. } => {
                let paused = pause_ms.map_or_else(String::new, |ms| format!(", paused for {ms:.1} ms"));
                let twice =
                    retried.as_ref().map_or_else(String::new, |why| format!(", at the second try: {why}"));
                let slow = slow.as_ref().map_or_else(String::new, |why| {
                    format!("\n  warning: the engine's own loader was used, which is slow: {why}")
                });
                format!(
                    "{engine}: loaded version {} ({how}) in {load_ms:.1} ms{paused}{twice}{slow}",
                    label.version
                )
            }
            EngineEvent::Failed { failure, given_up, .. } => {
                advised(&format!("{}{}", failure.text, again(*given_up)), &failure.advice)
            }
            EngineEvent::Fenced { engine, failure, given_up, .. } => {
                let text = format!("{engine} stays paused: {}{}", failure.text, again(*given_up));
                advised(&text, &failure.advice)
            }
            EngineEvent::Waiting { failure, .. } => format!("{}; waiting for it", failure.text),
            EngineEvent::Extras { engine, names } => {
                let more = names.len().saturating_sub(SHOWN);
                let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                format!("{engine} does not take {} of the image's tensors: {shown}{more}", names.len())
            }
        }
    }
}
