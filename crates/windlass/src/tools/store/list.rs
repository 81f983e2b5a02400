//! `windlass store ls` and `show`: models, versions, and the objects of one version.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};
use windlass_core::identity::{Incarnation, Version};
use windlass_core::store::{Object, VersionIndex};
use windlass_data::stop::Stop;

use super::{Place, as_json, fetched, find, told};
use crate::console::{Session, Table, bytes, count};
use crate::error::Error;
use crate::service::store::bucket::Listed;
use crate::service::store::model::{Pick, StoredModel};
use crate::service::store::publish::now_ms;

/// The checked arguments of `store ls`.
#[derive(Debug)]
pub(crate) struct List {
    pub(crate) place: Place,
    /// How many versions of each model are shown, the newest first; 0 shows all.
    pub(crate) top: usize,
}

/// What is known of a model.
struct Found {
    model: StoredModel,
    incarnations: usize,
    versions: usize,
    bytes: u64,
    /// Objects that have no name of ours.
    unknown: usize,
    /// The newest first; what kept an index from being read, if something did.
    rows: Vec<(Incarnation, Version, Result<VersionIndex, String>)>,
}

impl List {
    /// Prints the models and their newest versions.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let stop = session.cancel();
        let models = self.place.models(stop)?;
        let found = models.into_iter().map(|m| self.look(m, stop)).collect::<Result<Vec<_>, _>>()?;
        let object = json!({
            "url": self.place.url.as_str(),
            "models": found.iter().map(Found::json).collect::<Vec<_>>(),
        });
        session.finish(object, |out| found.iter().for_each(|f| f.write(out)))
    }

    fn look(&self, model: StoredModel, stop: &Stop) -> Result<Found, Error> {
        let (objects, strange) = model.list(stop).map_err(told)?;
        let all: Vec<(Incarnation, Version)> = objects.keys().filter_map(Object::as_version).collect();
        let most = if self.top == 0 { usize::MAX } else { self.top };
        let mut rows = Vec::new();
        for &(incarnation, version) in all.iter().rev().take(most) {
            let read = model.version(incarnation, version, stop);
            stop.check()?;
            rows.push((incarnation, version, read.map_err(|e| e.to_string())));
        }
        Ok(Found {
            model,
            incarnations: all.iter().map(|(i, _)| i).collect::<BTreeSet<_>>().len(),
            versions: all.len(),
            bytes: objects.values().chain(&strange).map(|l: &Listed| l.bytes).sum(),
            unknown: strange.len(),
            rows,
        })
    }
}

impl Found {
    fn json(&self) -> Value {
        let row = |(incarnation, version, read): &(Incarnation, Version, Result<VersionIndex, String>)| {
            match read {
                Ok(index) => as_json(index),
                Err(why) => json!({ "incarnation": incarnation, "version": version, "error": why }),
            }
        };
        json!({
            "model_id": self.model.model_id(),
            "incarnations": self.incarnations,
            "versions": self.versions,
            "bytes": self.bytes,
            "unknown": self.unknown,
            "newest": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }

    fn write(&self, out: &mut String) {
        let (versions, runs) = (count(self.versions as u64), self.incarnations);
        let runs = if runs == 1 { "1 incarnation".into() } else { format!("{runs} incarnations") };
        let _ = writeln!(out, "{}: {versions} versions of {runs}, {}", self.model.label(), bytes(self.bytes));
        let mut table = Table::new([
            "INCARNATION",
            "VERSION",
            "AGE",
            "DELTA",
            "ANCHOR",
            "DELTAS AFTER IT",
            "TO FETCH",
            "DIGEST",
        ]);
        for (incarnation, version, read) in &self.rows {
            let dash = || "-".to_owned();
            let [age, delta, anchor, deltas, fetch, digest] = match read {
                Ok(index) => [
                    age(index.unix_ms),
                    index.deltas.last().map_or_else(dash, |d| bytes(d.bytes)),
                    index.anchor.start.to_string(),
                    index.deltas.len().to_string(),
                    bytes(fetched(index)),
                    index.digest.to_string(),
                ],
                Err(_) => [dash(), dash(), dash(), dash(), dash(), "damaged".into()],
            };
            let of = incarnation.to_string();
            table.row([of, version.to_string(), age, delta, anchor, deltas, fetch, digest]);
        }
        table.write(out);
        for why in self.rows.iter().filter_map(|(.., read)| read.as_ref().err()) {
            let _ = writeln!(out, "  {why}");
        }
        if self.rows.len() < self.versions {
            let _ = writeln!(
                out,
                "  and {} older versions (--top 0 shows all)",
                count((self.versions - self.rows.len()) as u64)
            );
        }
        if self.unknown > 0 {
            let _ = writeln!(
                out,
                "  {} objects there have no name that windlass gives",
                count(self.unknown as u64)
            );
        }
    }
}

/// How long ago something was written, for people.
fn age(unix_ms: u64) -> String {
    let ago = Duration::from_millis(now_ms().saturating_sub(unix_ms));
    indicatif::HumanDuration(Duration::from_secs(ago.as_secs())).to_string()
}

/// The checked arguments of `store show`.
#[derive(Debug)]
pub(crate) struct Show {
    pub(crate) place: Place,
    pub(crate) pick: Pick,
}

impl Show {
    /// Prints one version and the objects that it needs.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let stop = session.cancel();
        let model = self.place.model(stop)?;
        let index = find(&model, &self.pick, stop)?;
        let anchor = model.anchor(&index, stop).map_err(told)?;
        let needs = index.needs(&anchor);
        let mut object = as_json(&index);
        if let Some(object) = object.as_object_mut() {
            let name = |(o, bytes): (&_, &u64)| json!({ "object": model.name(o), "bytes": bytes });
            object.insert("url".into(), self.place.url.as_str().into());
            object.insert("objects".into(), needs.iter().map(name).collect());
            object.insert("chain".into(), serde_json::to_value(&index.deltas).unwrap_or_default());
            object.insert("composed".into(), serde_json::to_value(&index.composed).unwrap_or_default());
        }
        session.finish(object, |out| {
            let _ = writeln!(out, "{}", index.identity);
            let _ = writeln!(out, "  digest   {}", index.digest);
            let _ = writeln!(out, "  layout   {}", index.layout_hash);
            let _ = writeln!(out, "  written  {} ago", age(index.unix_ms));
            let (parts, image) = (count(anchor.parts.len() as u64), bytes(index.anchor.image_bytes));
            let of = match (index.anchor.start, index.anchor.version) {
                (start, end) if start == end => format!("version {start}"),
                (start, end) => format!("versions {start} to {end}"),
            };
            let _ = writeln!(out, "  anchor   {parts} parts of {of}, {image}");
            for (what, deltas) in [("deltas  ", &index.deltas), ("composed", &index.composed)] {
                let total: u64 = deltas.iter().map(|d| d.bytes).sum();
                let _ = writeln!(out, "  {what} {}, {}", deltas.len(), bytes(total));
            }
            let _ = writeln!(out, "  to fetch {} without an earlier version", bytes(fetched(&index)));
            let mut table = Table::new(["OBJECT", "BYTES"]);
            for (object, len) in &needs {
                table.row([model.name(object), bytes(*len)]);
            }
            table.write(out);
        })
    }
}
