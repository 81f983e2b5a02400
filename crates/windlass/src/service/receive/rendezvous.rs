//! The models of one load order wait for each other before the first engine is touched.
//!
//! Owns: [`Rendezvous`]. Each model's loader updates its image, then waits here. Engines get their orders only when all
//! loaders have arrived. If one loader fails, none continues, so that the engines of a set stay at the same version.

use parking_lot::{Condvar, Mutex};
use windlass_data::stop::Stop;

/// A barrier for `count` loaders.
#[derive(Debug)]
pub(super) struct Rendezvous {
    count: usize,
    state: Mutex<Meeting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Meeting {
    arrived: usize,
    missing: Option<String>,
}

impl Rendezvous {
    pub(super) fn new(count: usize) -> Rendezvous {
        Rendezvous { count, state: Mutex::new(Meeting::default()), changed: Condvar::new() }
    }

    /// Reports that one model failed.
    pub(super) fn fail(&self, who: &str) {
        let mut state = self.state.lock();
        state.missing.get_or_insert_with(|| who.to_owned());
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for the others. Fails with the name of a model that failed.
    pub(super) fn meet(&self, stop: &Stop) -> Result<(), String> {
        let mut state = self.state.lock();
        state.arrived += 1;
        self.changed.notify_all();
        loop {
            if let Some(who) = &state.missing {
                return Err(format!("{who} of the same order could not be made ready; nothing was loaded"));
            }
            if state.arrived >= self.count {
                return Ok(());
            }
            if stop.is_set() {
                let left = self.count - state.arrived;
                state.missing = Some("a model".into());
                self.changed.notify_all();
                return Err(format!("{left} other models of the same order were not ready in time"));
            }
            let nap = stop.nap();
            self.changed.wait_for(&mut state, nap);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn loaders_of_one_order_go_on_together_or_not_at_all() {
        let stop = Stop::after(Duration::from_secs(20));
        let meeting = Arc::new(Rendezvous::new(3));
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (meeting, stop) = (Arc::clone(&meeting), stop.clone());
                std::thread::spawn(move || meeting.meet(&stop))
            })
            .collect();
        assert_eq!(meeting.meet(&stop), Ok(()));
        for other in others {
            assert_eq!(other.join().unwrap(), Ok(()));
        }
        let meeting = Arc::new(Rendezvous::new(2));
        let waiting = {
            let (meeting, stop) = (Arc::clone(&meeting), stop.clone());
            std::thread::spawn(move || meeting.meet(&stop))
        };
        meeting.fail("verifier");
        assert!(waiting.join().unwrap().unwrap_err().contains("verifier"));
        // A loader that times out fails the others.
        let meeting = Rendezvous::new(2);
        let why = meeting.meet(&Stop::after(Duration::from_millis(10))).unwrap_err();
        assert!(why.contains("1 other"), "{why}");
        assert!(meeting.meet(&stop).is_err());
        assert_eq!(Rendezvous::new(1).meet(&stop), Ok(()));
    }
}
