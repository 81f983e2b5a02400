//! The control connection between a publisher's server and its receivers.

use std::any::Any;
use std::sync::Arc;

use windlass_core::sync_info::AgentWeightSyncInfo;

use crate::receiver::{Control, ControlError};
use crate::serve::Server;

/// A server that others can ask.
pub struct Reachable {
    /// How they find it.
    pub info: AgentWeightSyncInfo,
    /// Dropping this makes it unreachable.
    pub hold: Box<dyn Any + Send>,
}

impl std::fmt::Debug for Reachable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.info.fmt(f)
    }
}

/// Both ends of the control connection. The `windlass` crate has one over HTTP.
pub trait ControlPlane: Send + Sync {
    /// Makes a server reachable.
    fn serve(&self, server: &Arc<Server>) -> Result<Reachable, ControlError>;
    /// Reaches a server. The server need not be there yet.
    fn connect(&self, info: &AgentWeightSyncInfo) -> Result<Arc<dyn Control>, ControlError>;
}
