//! `windlass verify --engine`: whether an engine's live weights are those of an image.
//!
//! Owns: the comparison. The workers of an engine with our plugin sum what their parameters hold, by tensor and box of the
//! checkpoint ([`windlass_data::load`]); the sums of all workers make up those of the tensors, which are compared with
//! those of the image's bytes, computed here. The answer is yes only if every tensor is held whole and equal.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use windlass_core::address::Token;
use windlass_core::error::Kind;
use windlass_data::image::ImageView;
use windlass_data::load::{Combined, Proof, combine};
use windlass_data::region::Region;

use super::error::{EngineError, Stage};
use super::http::Http;
use super::order::{Label, Live, Report};
use super::vllm::Plugin;
use super::{Dialect, EngineSpec};
use crate::console::{Session, count};
use crate::error::Error;

/// The checked arguments of `verify --engine`.
#[derive(Debug)]
pub struct Prove {
    pub engine: EngineSpec,
    /// The directory of the image that it was loaded from.
    pub image: PathBuf,
    /// The token of our plugin.
    pub token: Option<Token>,
    /// How long it may take.
    pub timeout: Duration,
    /// How many threads to use for the image.
    pub threads: usize,
}

/// What a worker answers.
#[derive(Debug, Deserialize)]
struct Part {
    report: Option<Report>,
    parts: Option<Proof>,
    /// Modules whose weights are not kept as they were loaded.
    #[serde(default)]
    unseen: Vec<String>,
    #[serde(default)]
    why: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Answer {
    workers: Vec<Part>,
}

/// Names that are shown to people.
const SHOWN: usize = 20;

impl Prove {
    /// Compares, and prints what came of it. Answers the exit code.
    pub(crate) fn run(&self, session: &Session) -> Result<u8, Error> {
        let name = self.engine.name();
        let unsupported = |why: &str| EngineError::Unsupported { engine: name.clone(), why: why.into() };
        match self.engine.dialect {
            Dialect::Vllm => {}
            Dialect::Sglang => {
                return Err(unsupported(
                    "SGLang sums its own fused and sharded parameters, which cannot be compared with the tensors of \
                     an image; ask the loader in its workers from Python (SGLangWeightLoader(URL).digests()), \
                     compare what it answers, or two SGLang servers by /weights_checker",
                )
                .into());
            }
        }
        let stop = session.cancel().with_timeout(self.timeout);
        let plugin = Plugin::new(Http::new(name.clone(), &self.engine.url(), self.token.clone()));
        if plugin.status(&stop)?.is_none() {
            return Err(unsupported(
                "its workers can be asked only through the endpoint plugin of Windlass: start it with \
                 VLLM_PLUGINS=windlass and a token in WINDLASS_TOKEN or WINDLASS_TOKEN_FILE",
            )
            .into());
        }
        let region = Region::open(&self.image)?;
        // Held, so that it stays the version that the engine is asked about.
        let view = ImageView::take(&region, self.timeout, &stop).map_err(EngineError::from)?;
        let answer = plugin.verify(&stop)?;
        let answer: Answer = serde_json::from_value(answer).map_err(|e| EngineError::Answer {
            engine: name.clone(),
            stage: Stage::Verify,
            path: "/windlass/v1/verify".into(),
            why: e.to_string(),
        })?;
        let label = Label::from(view.known());
        check_versions(&name, label, &answer.workers)?;
        let sums = windlass_data::seal::sums_of_all(
            windlass_data::simd::kernels(),
            view.manifest(),
            view.data(),
            (self.threads, &stop),
        )?;
        let (found, expected) = (sums.digest(view.manifest()), view.known().digest);
        if found != expected {
            return Err(Error::Digest { path: self.image.clone(), found, expected });
        }
        let mut proofs = Vec::new();
        for part in &answer.workers {
            match &part.parts {
                Some(proof) => proofs.push(proof.clone()),
                None => {
                    let why = part.why.as_deref().unwrap_or("a worker did not say why");
                    return Err(unsupported(&format!("its weights cannot be summed: {why}")).into());
                }
            }
        }
        let combined = combine(view.manifest(), &proofs).ok_or_else(|| EngineError::Version {
            engine: name.clone(),
            expected: view.manifest().layout_hash().to_string(),
            found: "weights of another layout".into(),
        })?;
        let tensors = view.manifest().tensors();
        let wanted = sums.tensors(view.manifest());
        let differ: Vec<&str> = tensors
            .iter()
            .zip(&wanted)
            .filter(|(t, sum)| combined.sums.get(&t.name).is_some_and(|held| held != *sum))
            .map(|(t, _)| t.name.as_str())
            .collect();
        self.tell(session, label, &combined, &differ, (tensors.len(), &answer.workers))
    }

    fn tell(
        &self,
        session: &Session,
        label: Label,
        combined: &Combined,
        differ: &[&str],
        (tensors, workers): (usize, &[Part]),
    ) -> Result<u8, Error> {
        let Combined { digest, sums, disagree, rest } = combined;
        let equal = differ.is_empty() && disagree.is_empty() && rest.is_empty();
        let mut unseen: Vec<&str> = workers.iter().flat_map(|w| &w.unseen).map(String::as_str).collect();
        unseen.sort_unstable();
        unseen.dedup();
        let object = json!({
            "engine": self.engine.name(),
            "version": label.version,
            "equal": equal,
            "state_digest": digest,
            "tensors": tensors,
            "equal_tensors": sums.len() - differ.len(),
            "differ": differ,
            "disagree": disagree,
            "uncovered": rest.iter().map(|(name, held)| json!({ "name": name, "elements": held })).collect::<Vec<_>>(),
            "unseen_modules": unseen,
        });
        session.finish(object, |out| {
            let (name, same) = (self.engine.name(), count((sums.len() - differ.len()) as u64));
            let _ =
                writeln!(out, "{name}: {same} of {tensors} tensors are those of version {}", label.version);
            let mut list = |what: &str, names: &mut dyn Iterator<Item = &str>| {
                for (i, tensor) in names.enumerate() {
                    match i {
                        SHOWN => writeln!(out, "  …"),
                        i if i > SHOWN => Ok(()),
                        _ => writeln!(out, "  {what}  {tensor}"),
                    }
                    .unwrap_or_default();
                }
            };
            list("differs", &mut differ.iter().copied());
            list("workers disagree", &mut disagree.iter().map(String::as_str));
            list("not covered", &mut rest.iter().map(|(name, _)| name.as_str()));
        })?;
        Ok(u8::from(!equal))
    }
}

/// All workers must have the version of the image, or there is nothing to compare.
fn check_versions(engine: &str, label: Label, workers: &[Part]) -> Result<(), EngineError> {
    let live = Live { incarnation: label.incarnation.0, version: label.version };
    for report in workers.iter().filter_map(|w| w.report.as_ref()) {
        if let Some(said) = &report.error {
            return Err(EngineError::Worker {
                engine: engine.to_owned(),
                stage: Stage::Verify,
                rank: report.rank,
                text: said.text.clone(),
                kind: said.kind,
            });
        }
        if report.live.as_ref() != Some(&live) {
            let found = report.live.as_ref().map_or_else(
                || "weights of its own".to_owned(),
                |l| {
                    Label {
                        incarnation: windlass_core::identity::Incarnation(l.incarnation),
                        version: l.version,
                    }
                    .to_string()
                },
            );
            return Err(EngineError::Guard {
                stage: Some(Stage::Verify),
                kind: Kind::Stale,
                text: format!("worker {} of {engine} has {found}, and the image holds {label}", report.rank),
                advice: String::new(),
            });
        }
    }
    Ok(())
}
