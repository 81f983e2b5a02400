//! `windlass inspect`: the contents of a file.
//!
//! The kind follows from the content: a directory, a delta, a manifest in JSON, or else a safetensors file.

use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use windlass_core::delta::{Delta, Mode};
use windlass_core::manifest::Manifest;
use windlass_data::file::{INDEX, Layout, MappedFile, open_regular};
use windlass_data::seal::pass::mode_slot;

use crate::console::{Session, Table, bytes, count};
use crate::error::{Error, advised};
use crate::tools::delta::{bits_per_change, journal};

/// The longest manifest that is read into memory.
const MAX_MANIFEST: u64 = 1 << 30;

/// The checked arguments of `inspect`.
#[derive(Debug)]
pub(crate) struct Inspect {
    /// The file or directory.
    pub(crate) path: PathBuf,
    /// Rows of the table of tensors; 0 shows all.
    pub(crate) top: usize,
}

impl Inspect {
    /// Prints the contents.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        let path = &self.path;
        if path.is_dir() {
            return self.checkpoint(session);
        }
        let (mut file, _) = open_regular(path)?;
        let mut first = Vec::new();
        file.by_ref().take(8).read_to_end(&mut first).map_err(Error::io("read", path))?;
        if first.starts_with(b"WLDELTA") {
            return show_delta(path, session);
        }
        // A safetensors file begins with a length: an opening brace there would mean an absurd one.
        let json = first.first() == Some(&b'{') && first.get(7) != Some(&0);
        if json && path.file_name().is_none_or(|n| n != INDEX) {
            let mut json = first;
            file.take(MAX_MANIFEST).read_to_end(&mut json).map_err(Error::io("read", path))?;
            let manifest = Manifest::from_json(&json).map_err(Error::content(path))?;
            return self.show(session, "manifest", &manifest, &json!({}));
        }
        self.checkpoint(session)
    }

    fn checkpoint(&self, session: &Session) -> Result<(), Error> {
        let unfinished = journal::refuse_unfinished(&self.path).err();
        if let Some(e) = &unfinished {
            session.note(&format!("warning: {}", advised(&e.to_string(), &e.advice())));
        }
        let layout = Layout::read(&self.path)?;
        let shard = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned());
        let shards: Vec<Value> = layout
            .shards()
            .iter()
            .map(|s| {
                json!({
                    "file": shard(&s.path),
                    "bytes": s.bytes,
                    "tensors": s.header.tensors.len(),
                    "data_start": s.header.data_start,
                    "metadata": s.header.metadata,
                })
            })
            .collect();
        let kind = if layout.is_directory() { "shards" } else { "safetensors" };
        self.show(
            session,
            kind,
            layout.manifest(),
            &json!({ "shards": shards, "unfinished_update": unfinished.is_some() }),
        )
    }

    fn show(&self, session: &Session, kind: &str, manifest: &Manifest, more: &Value) -> Result<(), Error> {
        let mut by_dtype: Vec<(&str, u64, u64)> = Vec::new();
        for t in manifest.tensors() {
            match by_dtype.iter_mut().find(|d| d.0 == t.dtype.name()) {
                Some(d) => (d.1, d.2) = (d.1 + 1, d.2 + t.bytes),
                None => by_dtype.push((t.dtype.name(), 1, t.bytes)),
            }
        }
        let elements: u64 = manifest.tensors().iter().map(|t| t.shape.iter().product::<u64>()).sum();
        let mut object = json!({
            "path": self.path,
            "kind": kind,
            "tensors": manifest.tensors().len(),
            "aliases": manifest.aliases(),
            "elements": elements,
            "bytes": manifest.data_bytes(),
            "blocks": manifest.cuts().blocks(),
            "layout_hash": manifest.layout_hash(),
            "cuts_hash": manifest.cuts_hash(),
            "dtypes": by_dtype.iter().map(|d| json!({"dtype": d.0, "tensors": d.1, "bytes": d.2})).collect::<Vec<_>>(),
        });
        if let (Some(o), Some(m)) = (object.as_object_mut(), more.as_object()) {
            o.extend(m.clone());
        }
        session.finish(object, |out| {
            let _ = writeln!(out, "{}: {kind}", self.path.display());
            let (tensors, blocks) = (manifest.tensors().len() as u64, manifest.cuts().blocks().into());
            let _ = writeln!(
                out,
                "  {} tensors, {} elements, {}, {} blocks",
                count(tensors),
                count(elements),
                bytes(manifest.data_bytes()),
                count(blocks)
            );
            let _ = writeln!(out, "  layout {}\n  cuts   {}", manifest.layout_hash(), manifest.cuts_hash());
            for (alias, target) in manifest.aliases() {
                let _ = writeln!(out, "  {alias} = {target}");
            }
            for s in more["shards"].as_array().into_iter().flatten().filter(|_| kind == "shards") {
                let (file, size) = (s["file"].as_str().unwrap_or("?"), s["bytes"].as_u64().unwrap_or(0));
                let _ = writeln!(out, "  {file}: {} tensors, {}", s["tensors"], bytes(size));
            }
            out.push('\n');
            let mut t = Table::new(["dtype", "tensors", "size"]);
            for (dtype, n, size) in &by_dtype {
                t.row([(*dtype).into(), count(*n), bytes(*size)]);
            }
            t.write(out);
            out.push('\n');
            let mut t = Table::new(["tensor", "dtype", "shape", "size"]);
            let shown = if self.top == 0 { usize::MAX } else { self.top };
            for tensor in manifest.tensors().iter().take(shown) {
                let (name, shape) = (tensor.name.clone(), format!("{:?}", tensor.shape));
                t.row([name, tensor.dtype.name().into(), shape, bytes(tensor.bytes)]);
            }
            t.write(out);
            if manifest.tensors().len() > shown {
                let _ = writeln!(out, "  … {} more; --top 0 shows all", manifest.tensors().len() - shown);
            }
        })
    }
}

/// Prints the contents of a delta, after verifying all of its hashes.
fn show_delta(path: &Path, session: &Session) -> Result<(), Error> {
    let file = MappedFile::open(path)?;
    let delta = Delta::parse(file.bytes()).map_err(Error::content(path))?;
    let mut modes = [(0u64, 0u64); 4];
    for e in delta.entries() {
        let slot = &mut modes[mode_slot(e.mode)];
        *slot = (slot.0 + 1, slot.1 + u64::from(e.len));
    }
    let header = &delta.header;
    let records = delta.entries().len();
    let by_mode: Map<_, _> = Mode::ALL
        .iter()
        .map(|m| {
            (m.to_string(), json!({ "records": modes[mode_slot(*m)].0, "bytes": modes[mode_slot(*m)].1 }))
        })
        .collect();
    let bits = bits_per_change(delta.size() as u64, delta.changes);
    let object = json!({
        "path": path,
        "kind": "delta",
        "bytes": delta.size(),
        "changed": delta.changes,
        "bits_per_change": bits,
        "blocks": header.blocks,
        "records": records,
        "parts": delta.parts,
        "modes": by_mode,
        "layout_hash": header.layout_hash,
        "cuts_hash": header.cuts_hash,
        "base": header.base_identity(),
        "base_digest": header.base_digest,
        "target": header.target_identity(),
        "target_digest": header.target_digest,
    });
    session.finish(object, |out| {
        let _ = writeln!(out, "{}: delta, {}", path.display(), bytes(delta.size() as u64));
        let _ = writeln!(out, "  from   {}  {}", header.base_digest, header.base_identity());
        let _ = writeln!(out, "  to     {}  {}", header.target_digest, header.target_identity());
        let _ = writeln!(out, "  layout {}\n  cuts   {}", header.layout_hash, header.cuts_hash);
        let _ = writeln!(out, "  {} changes, {bits:.2} bits each", count(delta.changes));
        let _ = writeln!(
            out,
            "  {} of {} blocks changed, {} parts\n",
            count(records as u64),
            count(header.blocks.into()),
            count(delta.parts.into())
        );
        let mut t = Table::new(["records", "blocks", "payload"]);
        for m in Mode::ALL {
            let (n, size) = modes[mode_slot(m)];
            t.row([m.to_string(), count(n), bytes(size)]);
        }
        t.write(out);
    })
}
