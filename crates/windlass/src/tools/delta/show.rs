//! `windlass delta show`.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Map, json};
use windlass_core::delta::{Delta, Mode};
use windlass_data::file::MappedFile;
use windlass_data::seal::pass::mode_slot;

use super::bits_per_change;
use crate::console::{Session, Table, bytes, count};
use crate::error::Error;

/// Prints what is in a delta, after checking all of its sums.
pub fn show(path: &Path, session: &Session) -> Result<(), Error> {
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
