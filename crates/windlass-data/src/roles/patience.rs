//! What to do while the other side is away.

use std::time::{Duration, Instant};

use windlass_core::error::Kind;

use super::error::RoleError;
use crate::stop::Stop;

/// How long and how often something that may heal by itself is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// The first pause; each further one is twice as long.
    pub pause: Duration,
    pub max_pause: Duration,
    /// How long the other side may be away before that is an error.
    pub limit: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            pause: Duration::from_millis(50),
            max_pause: Duration::from_secs(2),
            limit: Duration::from_mins(5),
        }
    }
}

/// One stretch of waiting.
#[derive(Debug)]
pub(super) struct Waiting {
    patience: Patience,
    since: Option<Instant>,
    pause: Duration,
}

/// Whether a retry may succeed without intervention.
fn may_heal(kind: Kind) -> bool {
    match kind {
        Kind::NotFound | Kind::Stale | Kind::Corrupt | Kind::Timeout | Kind::PeerLost | Kind::Exhausted => {
            true
        }
        Kind::Invalid | Kind::Unsupported | Kind::Denied | Kind::Cancelled | Kind::Bug => false,
    }
}

impl Waiting {
    pub(super) fn new(patience: Patience) -> Waiting {
        Waiting { patience, since: None, pause: patience.pause }
    }

    /// The other side answered.
    pub(super) fn heard(&mut self) {
        *self = Waiting::new(self.patience);
    }

    /// Pauses before the next try, or gives the error back if there should be none.
    pub(super) fn again(&mut self, error: RoleError, stop: &Stop) -> Result<(), RoleError> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if stop.is_set() || !may_heal(error.kind()) || since.elapsed() >= self.patience.limit {
            return Err(error);
        }
        tracing::debug!(%error, "trying again");
        // Who was waited for in vain has made the pause already.
        if error.kind() != Kind::Timeout {
            let until = Instant::now() + self.pause;
            while let Some(left) = until.checked_duration_since(Instant::now()).filter(|l| !l.is_zero()) {
                if stop.is_set() {
                    break;
                }
                std::thread::sleep(left.min(stop.nap()).max(Duration::from_millis(1)));
            }
            self.pause = (self.pause * 2).min(self.patience.max_pause);
        }
        Ok(())
    }
}
