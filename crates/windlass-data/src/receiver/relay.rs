//! Passing on what a receiver gets.
//!
//! Owns: [`Relaying`], the sender of a receiver and what it has put up: at most one image and one delta. Called by the
//! receiver before and after its transfers. Must not: serve bytes that are about to change. What is put up is served stripe by
//! stripe as it arrives and is found right, and to others that prove an offer of which the publisher has told them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::net::IpAddr;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use windlass_core::address::{Host, HostPort};
use windlass_core::digest::SumTable;
use windlass_core::wire::{Relay, RelayOffer, SourceId, Ticket, TicketFields, TicketId, TicketKey};

use super::Control;
use crate::stop::Stop;
use crate::tcp::{Board, Body, Crowd, Offer, OfferHandle, Relays, Sender, SenderConfig, TcpError};
use crate::tls::Certificate;

/// How long those who are being sent something get to take it before it changes.
const GRACE: Duration = Duration::from_millis(100);
/// Offers that were promised and not put up are forgotten beyond this number: their transfers failed early.
const MAX_PROMISED: usize = 16;
/// Senders do not look at the source that streams of a relay name.
const ANY_SOURCE: SourceId = SourceId(0);

/// How a receiver passes versions on.
#[derive(Clone, Debug, Default)]
pub struct RelayConfig {
    /// The address to listen on; by default that of this host on the way to the publisher.
    pub bind: Option<IpAddr>,
    /// The ports to try; zeros mean any.
    pub ports: (u16, u16),
    /// The host that others are told; by default the address.
    pub host: Option<Host>,
    /// Shown to others. Without it, nothing is passed on of publishers that have one.
    pub tls: Option<Certificate>,
}

#[derive(Default)]
struct State {
    /// There once it is known where to listen. The error if that failed.
    listening: Option<Result<Listening, ()>>,
    /// By the ticket that was granted for them.
    promised: BTreeMap<TicketId, RelayOffer>,
    image: Option<OfferHandle>,
    delta: Option<OfferHandle>,
    /// Bytes sent of what is not up any more.
    sent: u64,
}

#[derive(Clone)]
struct Listening {
    sender: Arc<Sender>,
    endpoint: HostPort,
}

/// See the module's documentation.
#[derive(Default)]
pub struct Relaying {
    config: RelayConfig,
    state: Mutex<State>,
}

impl fmt::Debug for Relaying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Relaying").field(&self.config).finish()
    }
}

/// What a transfer needs that others take part in.
pub(super) struct Shared {
    pub(super) board: Arc<Board>,
    /// What the blocks of an image must be.
    pub(super) proof: Arc<SumTable>,
}

impl Relaying {
    /// Listens for other receivers as soon as a publisher is asked for something.
    pub fn new(config: RelayConfig) -> Relaying {
        Relaying { config, ..Relaying::default() }
    }

    /// Bytes sent to other receivers.
    pub fn sent(&self) -> u64 {
        let state = self.lock();
        state.sent + state.image.iter().chain(&state.delta).map(|o| o.progress().bytes_sent).sum::<u64>()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Where others connect to. None if this receiver does not pass anything on; the log says why.
    fn listen(&self, control: &dyn Control) -> Option<Listening> {
        let mut state = self.lock();
        let listening = state.listening.get_or_insert_with(|| {
            self.start(control)
                .inspect_err(|why| tracing::warn!("versions are not passed on to other receivers: {why}"))
                .map_err(drop)
        });
        listening.clone().ok()
    }

    fn start(&self, control: &dyn Control) -> Result<Listening, String> {
        let RelayConfig { bind, ports, host, tls } = &self.config;
        if control.privacy().required && tls.is_none() {
            return Err(format!(
                "{} is reached through TLS, and this receiver has no certificate of its own: give it one with --tls-cert and --tls-key, or turn relaying off with --no-relay",
                control.peer()
            ));
        }
        let bind = bind.or_else(|| control.local_address());
        let bind = bind.ok_or(
            "no address of this host leads to the publisher: name one to listen on with --relay-bind",
        )?;
        let host = match host {
            Some(host) => host.clone(),
            None if bind.is_unspecified() => {
                return Err(format!("{bind} is every address: say with --relay-host what others connect to"));
            }
            None => Host::new(&bind.to_string()).map_err(|e| e.to_string())?,
        };
        let config =
            SenderConfig { bind, ports: ports.0..=ports.1, tls: tls.clone(), ..SenderConfig::default() };
        let sender = Sender::start(config).map_err(|e| e.to_string())?;
        let port = NonZeroU16::new(sender.local_addr().port()).unwrap_or(NonZeroU16::MIN);
        let endpoint = HostPort::new(host, port);
        tracing::info!(%endpoint, "versions are passed on to other receivers");
        Ok(Listening { sender: Arc::new(sender), endpoint })
    }

    /// An offer of what is about to be asked for; none if nothing is passed on.
    pub(super) fn offer(&self, control: &dyn Control) -> Option<RelayOffer> {
        let endpoint = self.listen(control)?.endpoint;
        let (mut id, mut key) = ([0; 16], [0; 32]);
        getrandom::fill(&mut id).ok()?;
        getrandom::fill(&mut key).ok()?;
        let tls = self.config.tls.is_some();
        Some(RelayOffer { endpoint, tls, id: TicketId(id), key: TicketKey::new(key) })
    }

    /// A ticket was granted for the request that `offer` went with.
    pub(super) fn promise(&self, ticket: TicketId, offer: RelayOffer) {
        let mut state = self.lock();
        if state.promised.len() >= MAX_PROMISED {
            state.promised.pop_first();
        }
        state.promised.insert(ticket, offer);
    }

    fn put_up(&self, ticket: &Ticket, body: Body) -> Result<Option<(OfferHandle, Arc<Board>)>, TcpError> {
        let mut state = self.lock();
        let (promised, listening) = (state.promised.remove(&ticket.id), state.listening.clone());
        drop(state);
        let (Some(RelayOffer { id, key, .. }), Some(Ok(Listening { sender, .. }))) = (promised, listening)
        else {
            return Ok(None);
        };
        let board = Arc::<Board>::default();
        let ticket = Ticket::new(TicketFields { id, key, swarm: None, ..(**ticket).clone() })?;
        let crowd = Crowd::Any(Arc::clone(&board));
        let handle = sender.offer(Offer { ticket, source: ANY_SOURCE, body, crowd })?;
        Ok(Some((handle, board)))
    }

    /// Puts up the image that a ticket brings.
    pub(super) fn put_up_image(&self, ticket: &Ticket, body: Body) -> Result<Option<Arc<Board>>, TcpError> {
        self.withdraw_image("another image takes its place");
        let Some((handle, board)) = self.put_up(ticket, body)? else { return Ok(None) };
        self.lock().image = Some(handle);
        Ok(Some(board))
    }

    /// Puts up the delta that a ticket brings, until the next one.
    pub(super) fn put_up_delta(
        &self,
        ticket: &Ticket,
        files: Vec<Option<Arc<File>>>,
        hold: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<Option<Arc<Board>>, TcpError> {
        let Some((handle, board)) = self.put_up(ticket, Body::Payloads { files, hold: Some(hold) })? else {
            return Ok(None);
        };
        let old = self.lock().delta.replace(handle);
        self.end(old, "a newer delta takes its place");
        Ok(Some(board))
    }

    /// The image is about to change: returns when it is not read here any more.
    pub(super) fn withdraw_image(&self, why: &str) {
        let image = self.lock().image.take();
        self.end(image, why);
    }

    fn end(&self, offer: Option<OfferHandle>, why: &str) {
        if let Some(offer) = offer {
            offer.revoke(why, GRACE);
            self.lock().sent += offer.progress().bytes_sent;
        }
    }
}

/// Asks the publisher who else receives what a ticket is for.
pub(super) struct Scout<'a> {
    pub(super) control: &'a dyn Control,
    pub(super) ticket: TicketId,
}

impl Relays for Scout<'_> {
    fn wait(&self, receivers: u32, stop: &Stop) -> Option<(u32, Vec<Relay>)> {
        match self.control.relays(self.ticket, receivers, stop) {
            Ok(found) => Some((found.receivers, found.relays)),
            Err(error) => {
                tracing::debug!(peer = self.control.peer(), %error, "no further relays are learned of");
                None
            }
        }
    }
}
