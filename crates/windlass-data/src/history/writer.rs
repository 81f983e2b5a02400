//! A delta on its way to its place among the history's files.

use std::io::Write;
use std::path::{Path, PathBuf};

use windlass_core::delta::{DeltaHeader, Encoded, PartBuilder};

use super::{HistoryError, io_error};
use crate::seal::draft::Draft;

/// Bytes that are written at a time.
const WRITE: usize = 256 << 10;

/// A container on its way to its place.
pub(super) struct Writer {
    path: PathBuf,
    draft: Draft,
    parts: PartBuilder,
    out: Vec<u8>,
    written: u64,
}

impl Writer {
    pub(super) fn create(path: &Path, header: &DeltaHeader) -> Result<Writer, HistoryError> {
        let draft = Draft::create(path).map_err(io_error("create", path))?;
        let (path, parts) = (path.to_owned(), PartBuilder::new());
        Ok(Writer { path, draft, parts, out: header.to_bytes(), written: 0 })
    }

    pub(super) fn push(&mut self, block: u32, encoded: &Encoded, payload: &[u8]) -> Result<(), HistoryError> {
        self.parts.push(block, encoded, payload, &mut self.out);
        self.flush(WRITE)
    }

    fn flush(&mut self, at_least: usize) -> Result<(), HistoryError> {
        if self.out.len() >= at_least {
            self.draft.file().write_all(&self.out).map_err(io_error("write", &self.path))?;
            self.written += self.out.len() as u64;
            self.out.clear();
        }
        Ok(())
    }

    /// Puts it in its place. Answers its length and its changes.
    pub(super) fn place(mut self) -> Result<(u64, u64), HistoryError> {
        let changes = self.parts.changes();
        std::mem::take(&mut self.parts).finish(&mut self.out);
        self.flush(0)?;
        self.draft.place().map_err(io_error("place", &self.path))?;
        Ok((self.written, changes))
    }
}
