//! The links of a chain on their way into a history.
//!
//! Owns: the ranges of several links that are fetched at once, and the proof of each link. Called by the follower. Must not: add a
//! link without its hash, or before the links that lead to it.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use windlass_core::delta::DeltaHeader;
use windlass_core::error::Kind;
use windlass_core::store::{DeltaRef, ObjectHash};
use windlass_core::wire::Ticket;
use windlass_data::history::History;
use windlass_data::receiver::ControlError;
use windlass_data::seal::DeltaFile;
use windlass_data::seal::draft::Draft;
use windlass_data::stop::Stop;

use super::{Anchored, STREAMS, STRIPE, StoreControl, Stored};
use crate::error::chain;

/// The most links of which ranges are fetched at once. Each has a file open.
pub(super) const AT_ONCE: usize = 16;
/// Ranges of links that are fetched at once while the ranges of an image are.
const BESIDE_IMAGE: usize = 2;
const WHAT: &str = "get a delta";

/// A link that is fetched.
struct Coming<'a> {
    link: &'a DeltaRef,
    draft: Draft,
    /// How many of its ranges are missing.
    missing: u64,
}

impl StoreControl {
    /// While a whole image of one version comes, fetches and composes the links that lead on from it. They will be asked for next; a
    /// failure is met again then, and told.
    pub(super) fn fetch_ahead(&self, anchored: &Anchored, ticket: &Ticket, stop: &Stop) {
        let Ok(stored) = self.stored() else { return };
        let (from, to) = (anchored.index.version(), stored.index.identity.version);
        let whole = ticket.wanted.len() == anchored.index.blocks;
        if !whole || from >= to || anchored.index.parts.iter().any(|part| part.version != from) {
            return;
        }
        match self.segment(&stored, (from, to), stop) {
            Ok(Some((_, fetched))) => _ = self.state().ahead.insert((from, to), fetched),
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%error, from, to, "deltas could not be fetched while the image came");
            }
        }
    }

    /// Fetches links, ranges of several at once, and adds each to the history as soon as it and those before it are there.
    pub(super) fn fetch_links(
        &self,
        stored: &Stored,
        history: &History,
        links: &[DeltaRef],
        stop: &Stop,
    ) -> Result<(), ControlError> {
        let (mut coming, mut stripes) = (VecDeque::new(), Vec::new());
        let mut files: Vec<(String, File)> = Vec::new();
        for (i, link) in links.iter().enumerate() {
            let place = history.path(link.base, link.target);
            let draft = Draft::create(&place).map_err(|e| self.unkept(&place, &e))?;
            let file = draft.file().try_clone().map_err(|e| self.unkept(&place, &e))?;
            files.push((self.model.name(&stored.index.delta_object(link)), file));
            coming.push_back(Coming { link, draft, missing: link.bytes.div_ceil(STRIPE.into()) });
            let starts = (0..link.bytes).step_by(STRIPE as usize);
            stripes.extend(starts.map(|from| (i, from..(from + u64::from(STRIPE)).min(link.bytes))));
        }
        let (next, give_up) = (AtomicUsize::new(0), AtomicBool::new(false));
        let fetch = |done: mpsc::Sender<Result<usize, ControlError>>| {
            while !give_up.load(Ordering::Relaxed) {
                let stripe = stripes.get(next.fetch_add(1, Ordering::Relaxed));
                let Some((i, range)) = stripe else { break };
                let Some((name, file)) = files.get(*i) else { break };
                let got = self.model.bucket().read_range(name, range.clone(), stop);
                let written = got.map_err(|e| self.lost(WHAT, &e)).and_then(|got| {
                    file.write_all_at(&got, range.start).map_err(|e| self.unkept(Path::new(name), &e))
                });
                if done.send(written.map(|()| *i)).is_err() {
                    break;
                }
            }
        };
        std::thread::scope(|scope| {
            let (done, ranges) = mpsc::channel();
            let streams = if self.state().filling { BESIDE_IMAGE } else { STREAMS.into() };
            for _ in 0..stripes.len().min(streams) {
                let (fetch, done) = (&fetch, done.clone());
                scope.spawn(move || fetch(done));
            }
            drop(done);
            let added = self.add_links(stored, history, coming, &ranges);
            give_up.store(true, Ordering::Relaxed);
            added
        })
    }

    /// Adds links to the history, in their order, as their ranges come.
    fn add_links(
        &self,
        stored: &Stored,
        history: &History,
        mut coming: VecDeque<Coming<'_>>,
        ranges: &mpsc::Receiver<Result<usize, ControlError>>,
    ) -> Result<(), ControlError> {
        let mut added = 0;
        loop {
            while let Some(whole) = coming.pop_front_if(|c| c.missing == 0) {
                self.add_link(stored, history, whole.link, whole.draft)?;
                added += 1;
            }
            let Ok(range) = ranges.recv() else { return Ok(()) };
            if let Some(its) = range?.checked_sub(added).and_then(|i| coming.get_mut(i)) {
                its.missing = its.missing.saturating_sub(1);
            }
        }
    }

    /// Proves the hash of a link and adds it to the history.
    fn add_link(
        &self,
        stored: &Stored,
        history: &History,
        link: &DeltaRef,
        draft: Draft,
    ) -> Result<(), ControlError> {
        let name = self.model.name(&stored.index.delta_object(link));
        let place = history.path(link.base, link.target);
        let unkept = |e: std::io::Error| self.unkept(&place, &e);
        let found = ObjectHash::of_file(|buffer, at| draft.file().read_exact_at(buffer, at), link.bytes);
        let found = found.map_err(unkept)?;
        let wrong = |why: String| self.odd(WHAT, Kind::Corrupt, format!("{name}: {why}"));
        if found != link.hash {
            let why =
                format!("it has hash {found}, not {}: it was damaged in the store or on the way", link.hash);
            return Err(wrong(why));
        }
        let mut front = vec![0; link.bytes.min(4096) as usize];
        draft.file().read_exact_at(&mut front, 0).map_err(unkept)?;
        let (header, _) = DeltaHeader::parse(&front).map_err(|e| wrong(e.to_string()))?;
        let incarnation = stored.index.identity.incarnation;
        let digests = (stored.chain.digest_of(link.base), Some(link.digest));
        let named = ((incarnation, link.base), (incarnation, link.target));
        if (header.base, header.target) != named
            || (Some(header.base_digest), Some(header.target_digest)) != digests
        {
            return Err(wrong("it leads between other versions than its index says".into()));
        }
        draft.place().map_err(unkept)?;
        let file =
            DeltaFile { path: place.clone(), header, bytes: link.bytes, changes: 0, context_records: 0 };
        history.add(file).map_err(|e| wrong(chain(&e)))
    }

    /// A link that cannot be kept on this host.
    fn unkept(&self, place: &Path, e: &std::io::Error) -> ControlError {
        self.odd(WHAT, Kind::Exhausted, format!("{}: {e}", place.display()))
    }
}
