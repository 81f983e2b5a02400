//! Deltas in context records, for receivers on slow links.
//!
//! Deltas are sealed, kept and composed in plain records. When a receiver is better off with context records
//! ([`windlass_core::choose::codec`]), the **recoder** makes that form of the delta, once for all receivers that ask. It needs
//! the plain delta and the slot of either of its two versions. It is a thread of its own with a lower priority, and lets go of
//! the slot as soon as a writer wants it, so that neither plain deltas nor trainers wait for it. A request waits for the
//! recoder no longer than context records save, then gets the plain delta.
//!
//! The forms that are made are files without a name: nothing is left of them when the process ends, however it ends. At
//! most [`KEPT`] of them are kept, and as many requests for others are queued. Memory: one batch of records.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use windlass_core::choose::codec::{self, ENCODE_BYTES_PER_SECOND, Sizes};
use windlass_core::delta::container::Entry;
use windlass_core::delta::{Delta, DeltaError, DeltaHeader, Encoded, PartBuilder, Recoder, Side, Tile};
use windlass_core::identity::Version;
use windlass_core::manifest::ManifestError;
use windlass_core::wire::Codec;
use windlass_core::wire::control::{CodecWanted, TransferRequest};

use super::{BACK_PATIENCE, Inner, SealedSlot, blocks_of, count};
use crate::history::Segment;
use crate::region::{Lease, LeaseKind, RegionError, step};
use crate::seal::draft::Draft;
use crate::shm::{Access, Mapping};
use crate::stop::{Stop, Stopped};
use crate::{container, work};

/// The most forms that are kept, and the most that are waited for.
const KEPT: usize = 4;
/// The longest that a request waits for context records.
const PATIENCE: Duration = Duration::from_secs(20);
/// Records that are recoded before they are written.
const BATCH: usize = 1024;

/// Why there are no context records of a delta.
#[derive(Debug, thiserror::Error)]
enum ContextError {
    #[error("neither of its two versions is in a slot")]
    NoSlot,
    #[error("the trainer writes the slot that it would be made from")]
    Overtaken,
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    Delta(#[from] DeltaError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("it cannot be written: {0}")]
    Io(#[from] io::Error),
    #[error("the agent ends: {0}")]
    Stopped(#[from] Stopped),
}

/// A delta in context records.
#[derive(Clone, Debug)]
enum Form {
    Pending,
    Made(Arc<Segment>),
    Failed(String),
}

/// The forms that are made or wanted, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Forms {
    wanted: VecDeque<Arc<Segment>>,
    known: VecDeque<(DeltaHeader, Form)>,
    /// The recoder has ended: nothing more will be made.
    ended: bool,
}

impl Forms {
    fn find(&self, plain: &Segment) -> Option<&Form> {
        self.known.iter().find(|(header, _)| *header == plain.header).map(|(_, form)| form)
    }

    fn put(&mut self, plain: &Segment, form: Form) {
        self.known.retain(|(header, _)| *header != plain.header);
        self.known.push_back((plain.header.clone(), form));
        while self.known.len() > KEPT {
            self.known.pop_front();
        }
    }

    /// Has `plain` recoded, unless it is or will be. Whether the recoder has more to do now.
    fn want(&mut self, plain: &Arc<Segment>) -> bool {
        let more = self.find(plain).is_none() && self.wanted.len() < KEPT;
        if more {
            self.put(plain, Form::Pending);
            self.wanted.push_back(Arc::clone(plain));
        }
        more
    }
}

fn versions(segment: &Segment) -> (Version, Version) {
    (segment.header.base.1, segment.header.target.1)
}

/// Says that the recoder has ended, also when it panics: requests do not wait for it any more.
struct Ending<'a>(&'a Inner);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.state().forms = Forms { ended: true, ..Forms::default() };
        self.0.changed.notify_all();
    }
}

impl Inner {
    /// The form of a delta that serves a request best, and why.
    pub(super) fn form_for(
        &self,
        request: &TransferRequest,
        plain: &Arc<Segment>,
        stop: &Stop,
    ) -> (Arc<Segment>, Codec, String) {
        let as_plain = |why: String| (Arc::clone(plain), Codec::Plain, why);
        let Some(wanted) = request.codec else { return as_plain(String::new()) };
        let (base, target) = versions(plain);
        if !self.config.peers.is_empty() {
            return as_plain("plain records, as several hosts hold the model".into());
        }
        if base > target {
            return as_plain("plain records, as the delta leads back".into());
        }
        let image = self.region.manifest().bytes_of(&blocks_of(&self.region));
        let made = match self.state().forms.find(plain) {
            Some(Form::Made(segment)) => Some(segment.bytes),
            Some(Form::Pending | Form::Failed(_)) | None => None,
        };
        let sizes = Sizes { image, plain: plain.bytes, context: made };
        let (codec, why) = codec::pick(wanted, request.link_bytes_per_second, sizes);
        if codec == Codec::Plain {
            return as_plain(format!("plain records: {why}"));
        }
        let patience = match (wanted, request.link_bytes_per_second) {
            (CodecWanted::Auto, Some(rate)) => {
                let most = sizes.saved_seconds(rate) + image as f64 / ENCODE_BYTES_PER_SECOND;
                Duration::from_secs_f64(most.clamp(0.0, PATIENCE.as_secs_f64()))
            }
            (CodecWanted::Auto | CodecWanted::Plain | CodecWanted::Context, _) => PATIENCE,
        };
        match self.wait_form(plain, &stop.with_timeout(patience)) {
            Ok(context) if context.bytes < plain.bytes => {
                (context, Codec::Context, format!("context records: {why}"))
            }
            Ok(_) => as_plain("plain records, as context records are no smaller".into()),
            Err(why) => as_plain(format!("plain records, as there are no context records: {why}")),
        }
    }

    /// Waits for the recoder.
    fn wait_form(&self, plain: &Arc<Segment>, stop: &Stop) -> Result<Arc<Segment>, String> {
        let mut state = self.state();
        loop {
            if state.forms.ended {
                return Err("the recoder has ended".into());
            }
            if state.forms.want(plain) {
                self.changed.notify_all();
            }
            match state.forms.find(plain) {
                Some(Form::Made(segment)) => return Ok(Arc::clone(segment)),
                Some(Form::Failed(why)) => return Err(why.clone()),
                Some(Form::Pending) | None if stop.is_set() => return Err("they are not ready".into()),
                Some(Form::Pending) | None => {}
            }
            let woken = self.changed.wait_timeout(state, stop.nap());
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn recode_loop(&self) {
        let _ending = Ending(self);
        work::step_back();
        while !self.stop.is_set() {
            let mut state = self.state();
            let Some(plain) = state.forms.wanted.pop_front() else {
                drop(self.changed.wait_timeout(state, Stop::GLANCE));
                continue;
            };
            drop(state);
            let (start, (base, target)) = (Instant::now(), versions(&plain));
            let form = match self.recode(&plain) {
                Ok(made) => {
                    count(&self.counters.recoded);
                    let ms = start.elapsed().as_millis() as u64;
                    tracing::debug!(
                        base,
                        target,
                        plain = plain.bytes,
                        context = made.bytes,
                        ms,
                        "recoded a delta"
                    );
                    Form::Made(Arc::new(made))
                }
                Err(error) => {
                    count(&self.counters.recode_failures);
                    tracing::warn!(base, target, %error, "no context records of this delta; receivers get plain ones");
                    Form::Failed(error.to_string())
                }
            };
            self.state().forms.put(&plain, form);
            self.changed.notify_all();
        }
    }

    /// A slot that holds one of the versions of a delta.
    fn slot_of(&self, (base, target): (Version, Version)) -> Option<(SealedSlot, Side)> {
        let state = self.state();
        let slot = |version| state.slots.iter().flatten().find(|s| s.version == version).cloned();
        // A writer wants the older one first.
        slot(target).map(|s| (s, Side::Target)).or_else(|| slot(base).map(|s| (s, Side::Base)))
    }

    /// The same delta in context records.
    fn recode(&self, plain: &Segment) -> Result<Segment, ContextError> {
        let (slot, side) = self.slot_of(versions(plain)).ok_or(ContextError::NoSlot)?;
        let lease = self.region.lease(slot.id, LeaseKind::Stream, BACK_PATIENCE)?;
        let threads = work::fewer(self.config.threads);
        let mapping = Mapping::map(&plain.file, plain.bytes, Access::Read)?;
        let delta = container::parse(mapping.bytes(0..plain.bytes), threads)?;
        let path = plain.path.with_extension("wcontext");
        let draft = Draft::create(&path)?;
        let (mut out, mut parts, mut bytes) = (plain.header.to_bytes(), PartBuilder::new(), 0);
        step("recode");
        for batch in delta.entries().chunks(BATCH) {
            if lease.wanted_back() {
                return Err(ContextError::Overtaken);
            }
            for (block, encoded, payload) in self.recode_batch((&delta, batch), (side, &lease), threads)? {
                parts.push(block, &encoded, &payload, &mut out);
            }
            draft.file().write_all(&out)?;
            bytes += out.len() as u64;
            out.clear();
        }
        let changes = parts.changes();
        parts.finish(&mut out);
        draft.file().write_all(&out)?;
        bytes += out.len() as u64;
        // What was read from a slot that was taken back meanwhile is of two versions.
        lease.finish()?;
        let file = Arc::new(draft.file().try_clone()?);
        Ok(Segment { file, path, header: plain.header.clone(), bytes, changes })
    }

    /// Recodes some records; they come back in the order of their blocks.
    fn recode_batch(
        &self,
        (delta, batch): (&Delta<'_>, &[Entry]),
        (side, lease): (Side, &Lease),
        threads: usize,
    ) -> Result<Vec<(u32, Encoded, Vec<u8>)>, ContextError> {
        let (manifest, kernels) = (self.region.manifest(), crate::simd::kernels());
        let state = || (Recoder::new(), Vec::new(), Vec::new());
        let done =
            work::each(threads, batch.len() as u64, &self.stop, state, |(recoder, block, made), i| {
                let record = delta.record(&batch[i as usize]);
                let tile = Tile::of(manifest, record.block)?;
                container::gather(manifest, &tile, lease.data(), block)?;
                let mut payload = Vec::new();
                let encoded = recoder.to_context(kernels, &tile, &record, (side, block), &mut payload)?;
                made.push((record.block, encoded, payload));
                Ok::<(), ContextError>(())
            })?;
        let mut made: Vec<_> = done.into_iter().flat_map(|(.., made)| made).collect();
        made.sort_unstable_by_key(|(block, ..)| *block);
        Ok(made)
    }
}

#[cfg(test)]
mod tests;
