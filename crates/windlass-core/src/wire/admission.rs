//! Which connections a sender accepts for one ticket.

use std::collections::BTreeMap;

use super::WireError;
use super::frame::StreamId;
use super::handshake::{Proved, Sender};
use super::ticket::{SourceId, Ticket};

/// The sender's record of the connections of one ticket. Ask it after the proof and before `Accept` is sent:
/// a connection without proof must not replace another one.
#[derive(Clone, Debug)]
pub struct Admission {
    source: SourceId,
    epochs: BTreeMap<u16, u16>,
}

impl Admission {
    pub fn new(source: SourceId) -> Admission {
        Admission { source, epochs: BTreeMap::new() }
    }

    /// Whether a proved connection may continue. Names the connection that it replaces, if any: the caller resets that one
    /// first.
    pub fn admit(
        &mut self,
        ticket: &Ticket,
        proved: &Proved<Sender>,
        now_unix_ms: u64,
    ) -> Result<Option<StreamId>, WireError> {
        let stream = proved.stream();
        if proved.ticket() != ticket.id {
            return Err(WireError::UnknownTicket { ticket: proved.ticket() });
        }
        if now_unix_ms >= ticket.deadline.expires_unix_ms {
            return Err(WireError::Expired { ticket: ticket.id });
        }
        if proved.source() != self.source {
            return Err(WireError::UnknownSource { source_id: proved.source().0 });
        }
        let lanes = ticket.lanes().len() as u16;
        if stream.index >= lanes {
            return Err(WireError::StreamIndex { index: stream.index, max: lanes - 1 });
        }
        match self.epochs.get(&stream.index).copied() {
            Some(current) if stream.epoch <= current => Err(WireError::OldEpoch { stream, current }),
            previous => {
                self.epochs.insert(stream.index, stream.epoch);
                Ok(previous.map(|epoch| StreamId { epoch, ..stream }))
            }
        }
    }
}
