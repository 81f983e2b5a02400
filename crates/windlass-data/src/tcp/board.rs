//! What a sender tells its connections of, while they are open: stripes that are there by now.
//!
//! A relay's board has the stripes that it holds, an origin's those that it has given to somebody. Connections hear of every
//! addition once, in order, and are woken for it.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use super::TcpError;

/// Wakes one connection out of its wait.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> Result<Arc<Bell>, TcpError> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| TcpError::Setup { what: "a connection's event descriptor", source: e.into() })?;
        Ok(Arc::new(Bell(fd)))
    }

    pub(super) fn ring(&self) {
        // It can only fail when it has been rung already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Until it is rung again, it does not wake anybody.
    pub(super) fn hush(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Stripes, in the order in which they were added. See the module's documentation.
#[derive(Debug, Default)]
pub struct Board {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    there: Vec<bool>,
    order: Vec<u32>,
    bells: Vec<Weak<Bell>>,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Adds a stripe and wakes every connection, unless it is there already.
    pub fn add(&self, stripe: u32) {
        let mut state = self.lock();
        let at = stripe as usize;
        if state.there.len() <= at {
            state.there.resize(at + 1, false);
        }
        if !std::mem::replace(&mut state.there[at], true) {
            state.order.push(stripe);
            state.bells.retain(|bell| bell.upgrade().inspect(|b| b.ring()).is_some());
        }
    }

    /// Whether a stripe is there.
    pub fn contains(&self, stripe: u32) -> bool {
        self.lock().there.get(stripe as usize).copied().unwrap_or(false)
    }

    /// How many stripes are there.
    pub fn len(&self) -> usize {
        self.lock().order.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rings at every addition from now on.
    pub(super) fn subscribe(&self, bell: &Arc<Bell>) {
        self.lock().bells.push(Arc::downgrade(bell));
    }

    /// What was added after the first `seen`, as ranges; counts it as seen.
    pub(super) fn news(&self, seen: &mut usize) -> Vec<Range<u32>> {
        let state = self.lock();
        let mut stripes = state.order.get(*seen..).unwrap_or_default().to_vec();
        *seen = state.order.len();
        drop(state);
        stripes.sort_unstable();
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for stripe in stripes {
            match ranges.last_mut() {
                Some(last) if last.end == stripe => last.end += 1,
                _ => ranges.push(stripe..stripe + 1),
            }
        }
        ranges
    }
}
