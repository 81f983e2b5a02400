//! The report at the end of the demo.

use std::fmt::Write as _;

use serde_json::{Value, json};
use windlass_core::StateDigest;
use windlass_core::barrier::ReceiverId;
use windlass_core::manifest::Manifest;

use super::Demo;
use super::cluster::{Incident, MODELS};
use crate::console::{Session, Table, bytes, percent};
use crate::error::Error;
use crate::service::controller::status::{Status, Sync, SyncState};
use crate::tools::top::frame::took;

/// A finished demo.
pub(super) struct Summary<'a> {
    pub(super) demo: &'a Demo,
    pub(super) manifests: &'a [Manifest],
    pub(super) status: &'a Status,
    /// The digests of the images of each surviving receiver, from their bytes.
    pub(super) images: &'a [(ReceiverId, Vec<StateDigest>)],
    /// The last digest of each model in its ranks' memory.
    pub(super) last: &'a [Option<StateDigest>],
    pub(super) incidents: &'a [Incident],
    pub(super) fine: bool,
}

/// A sync in the summary for programs.
pub(super) fn sync_object(sync: &Sync) -> Value {
    json!({
        "version": sync.version, "state": sync.state, "latency_ms": sync.latency_ms, "pause_ms": sync.pause_ms,
        "bytes": sync.bytes, "full": sync.full, "delta": sync.delta, "staged": sync.staged, "loaded": sync.loaded,
        "failed": sync.failed, "delta_ratios": sync.models.iter().map(|m| m.delta_ratio).collect::<Vec<_>>(),
    })
}

fn state(sync: &Sync) -> &'static str {
    match sync.state {
        SyncState::Open => "open",
        SyncState::Served => "served",
        SyncState::Skipped => "skipped",
        SyncState::Superseded => "superseded",
    }
}

impl Summary<'_> {
    pub(super) fn print(&self, session: &Session, seconds: f64) -> Result<(), Error> {
        session.finish(self.object(seconds), |out| self.human(out, seconds))
    }

    fn syncs(&self) -> impl Iterator<Item = &Sync> {
        self.status.sets.first().into_iter().flat_map(|set| &set.syncs)
    }

    fn object(&self, seconds: f64) -> Value {
        let models: Vec<Value> = MODELS
            .iter()
            .zip(self.manifests)
            .zip(self.last)
            .map(|(((name, _), manifest), digest)| {
                json!({
                    "model_id": name, "bytes": manifest.data_bytes(), "tensors": manifest.tensors().len(),
                    "layout_hash": manifest.layout_hash(), "digest": digest,
                })
            })
            .collect();
        let syncs: Vec<Value> = self.syncs().map(sync_object).collect();
        let images: Vec<Value> =
            self.images.iter().map(|(r, d)| json!({ "receiver": r, "digests": d })).collect();
        let incidents: Vec<Value> =
            self.incidents.iter().map(|i| json!({ "version": i.version, "what": i.what })).collect();
        json!({
            "ok": self.fine,
            "models": models,
            "ranks": self.demo.ranks,
            "receivers": self.demo.receivers,
            "steps": self.demo.steps,
            "served": self.status.sets.first().and_then(|s| Some(s.served.as_ref()?.version)),
            "syncs": syncs,
            "incidents": incidents,
            "errors": self.status.errors,
            "images": images,
            "seconds": seconds,
        })
    }

    fn human(&self, out: &mut String, seconds: f64) {
        let names: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
        let size = self.manifests.iter().map(Manifest::data_bytes).sum();
        let _ = writeln!(
            out,
            "{} of {} and {}; 2 trainers with {} ranks each -> 2 agents -> {} receivers, one controller\n",
            bytes(size),
            names[0],
            names[1],
            self.demo.ranks,
            self.demo.receivers,
        );
        let mut table = Table::new([
            "version",
            "",
            "latency",
            "actor delta",
            "verifier delta",
            "on the wire",
            "loaded by",
            "",
        ]);
        for sync in self.syncs() {
            let ratio = |i: usize| sync.models.get(i).and_then(|m| m.delta_ratio).map_or("-".into(), percent);
            let incident = self.incidents.iter().find(|i| i.version == sync.version);
            table.row([
                sync.version.to_string(),
                state(sync).to_owned(),
                sync.latency_ms.map_or("-".into(), took),
                ratio(0),
                ratio(1),
                bytes(sync.bytes),
                (sync.loaded as usize / MODELS.len()).to_string(),
                incident.map_or(String::new(), |i| i.what.clone()),
            ]);
        }
        table.write(out);
        let ok = |(_, digests): &&(ReceiverId, Vec<StateDigest>)| {
            digests.iter().zip(self.last).all(|(d, l)| Some(*d) == *l)
        };
        let same = self.images.iter().filter(ok).count();
        let digests: Vec<String> = self.last.iter().flatten().map(ToString::to_string).collect();
        let _ = if self.fine {
            writeln!(
                out,
                "\nRe-hashed the images of the {same} surviving receivers: both match the trainers' memory.\n{}, {seconds:.1} s.",
                digests.join(" and ")
            )
        } else {
            writeln!(
                out,
                "\nMISMATCH: only {same} of {} receivers have images that match the trainers' memory.",
                self.images.len()
            )
        };
    }
}
