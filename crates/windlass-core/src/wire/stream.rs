//! The order of frames on a proved connection.
//!
//! [`PullStream`] is the receiver's end, [`ServeStream`] the sender's. Both work alike: pass every header that
//! arrives to `header`, follow the returned [`Next`] (take the payload into place, or collect the body and pass it to
//! `body`), and send the frames that the other methods return. A frame out of order is a named error, after
//! which the caller must close the connection. They move no bytes and keep none.
//!
//! Claims are served in the order in which they arrive and acknowledged in the same order. Up to `window` of
//! them may be open, so that the next stripe is under way while the last one is being checked.

use std::collections::VecDeque;
use std::ops::Range;

use super::frame::{FrameKind, HEADER_LEN, Header, ProtocolVersion, StreamId};
use super::handshake::{Proved, Receiver, Sender};
use super::message::{Carriage, Check, Claim, Completion, Fault, Memory, Message, Reach, Verdict};
use super::stripe::{Extent, Stripe, StripePlan};
use super::ticket::Checks;
use super::{WireError, message};

/// The caller's next step after a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Take `len` raw bytes into place at `offset` of the stripe, and report them by [`PullStream::taken`].
    Payload {
        stripe: Stripe,
        /// Where in the stripe.
        offset: u32,
        len: u32,
    },
    /// Collect this many bytes and pass them to `body`.
    Body(u32),
}

/// A message of the sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullEvent {
    /// All bytes of a stripe are here; compare, then answer by [`PullStream::ack`].
    StripeEnd {
        stripe: Stripe,
        /// The hashes that its bytes must have. They fit the stripe.
        check: Check,
    },
    /// The sender agrees that the transfer is complete. Nothing follows.
    Done,
    /// The sender gave up. Nothing follows.
    Fault(Fault),
    /// What the source says of stripes; see [`Claims::holds`](super::Claims::holds).
    Holds(Vec<Range<u32>>),
    /// Whether and how the sender's memory can be read.
    Reach(Reach),
    /// Where it is.
    Memory(Memory),
    /// Answer with [`Message::Pong`] of the same number.
    Ping(u64),
    /// The answer to a ping.
    Pong,
}

/// A message of the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServeEvent {
    /// Send this stripe once those before it are sent. It is in the plan, and this source holds it.
    Claim {
        stripe: Stripe,
        /// How often it was claimed before.
        attempt: u16,
        carriage: Carriage,
    },
    /// The receiver can read memory, and asks whether and how the sender's can be reached.
    Reach(Reach),
    /// The receiver is done with a stripe: its lease may end.
    Ack { stripe: u32, verdict: Verdict },
    /// The receiver has everything. Answer with [`ServeStream::done`].
    Done,
    /// The receiver gave up. Nothing follows.
    Fault(Fault),
    /// Answer with [`Message::Pong`] of the same number.
    Ping(u64),
    /// The answer to a ping.
    Pong,
}

fn unexpected(header: &Header, state: &'static str) -> WireError {
    WireError::Unexpected { frame: header.kind, state }
}

/// State of the frame under way, at both ends.
#[derive(Debug)]
struct Inbox {
    stream: StreamId,
    completion: Completion,
    pending: Pending,
    ping: Option<u64>,
    closed: bool,
}

#[derive(Clone, Copy, Debug)]
enum Pending {
    Nothing,
    Payload(u32),
    Body(Header),
}

impl Inbox {
    fn new(stream: StreamId, completion: Completion) -> Inbox {
        Inbox { stream, completion, pending: Pending::Nothing, ping: None, closed: false }
    }

    fn begin(&self, header: &Header) -> Result<(), WireError> {
        let stream = self.stream;
        let left = match self.pending {
            Pending::Nothing => 0,
            Pending::Payload(left) => left,
            Pending::Body(header) => header.body_len,
        };
        if left > 0 {
            return Err(WireError::BytesLeft { stream, left });
        }
        if self.closed {
            return Err(unexpected(header, "the end of the connection"));
        }
        if header.stream != stream {
            return Err(WireError::WrongStream { ours: stream, theirs: header.stream });
        }
        if header.kind == FrameKind::Pong && self.ping.is_none() {
            return Err(unexpected(header, "no Pong, as there was no Ping"));
        }
        Ok(())
    }

    fn expect_body(&mut self, header: &Header) -> Next {
        self.pending = Pending::Body(*header);
        Next::Body(header.body_len)
    }

    /// Decodes a body. After `Done` and `Error` the connection is at its end.
    fn body(&mut self, body: &[u8]) -> Result<(Header, Message), WireError> {
        let Pending::Body(header) = self.pending else {
            return Err(WireError::BytesExcess { stream: self.stream, given: body.len(), left: 0 });
        };
        let message = Message::decode(&header, body)?;
        self.pending = Pending::Nothing;
        if let Message::Pong(number) = message
            && self.ping.take() != Some(number)
        {
            return Err(unexpected(&header, "a Pong with the number of the Ping"));
        }
        if let Message::Done(theirs) = &message
            && *theirs != self.completion
        {
            let (ours, theirs) = (Box::new(self.completion.clone()), Box::new(theirs.clone()));
            return Err(WireError::Completion { ours, theirs });
        }
        self.closed = matches!(header.kind, FrameKind::Done | FrameKind::Error);
        Ok((header, message))
    }

    fn done(&self) -> Result<Vec<u8>, WireError> {
        Message::Done(self.completion.clone()).encode(self.stream)
    }

    fn ping(&mut self, number: u64) -> Result<Vec<u8>, WireError> {
        self.open(FrameKind::Ping)?;
        if self.ping.is_some() {
            return Err(WireError::Unexpected { frame: FrameKind::Ping, state: "the Pong to the last Ping" });
        }
        self.ping = Some(number);
        Message::Ping(number).encode(self.stream)
    }

    fn open(&self, frame: FrameKind) -> Result<(), WireError> {
        if self.closed {
            Err(WireError::Unexpected { frame, state: "the end of the connection" })
        } else {
            Ok(())
        }
    }
}

/// A stripe under way, and how much of it has passed.
#[derive(Clone, Copy, Debug)]
struct Moving {
    stripe: Stripe,
    at: u32,
}

impl Moving {
    /// A stripe before its first byte. Of one that the receiver reads, none comes over the stream.
    const fn new(stripe: Stripe, carriage: Carriage) -> Moving {
        let at = match carriage {
            Carriage::Sent => 0,
            Carriage::Read => stripe.bytes,
        };
        Moving { stripe, at }
    }

    fn advance(&mut self, stream: StreamId, offset: u64, len: u32) -> Result<(), WireError> {
        let Moving { stripe: Stripe { id: stripe, bytes, .. }, at } = *self;
        if offset != u64::from(at) || len == 0 || len > bytes - at {
            return Err(WireError::DataRange { stream, stripe, offset, len, at, bytes });
        }
        self.at += len;
        Ok(())
    }

    fn check_whole(&self, stream: StreamId) -> Result<(), WireError> {
        let Moving { stripe: Stripe { id: stripe, bytes, .. }, at } = *self;
        if at == bytes { Ok(()) } else { Err(WireError::StripeShort { stream, stripe, at, bytes }) }
    }
}

/// The hashes of a stripe must be of the kind that the ticket names, one per block.
fn check_fits(stream: StreamId, stripe: &Stripe, checks: Checks, check: &Check) -> Result<(), WireError> {
    let name = |sums: Option<usize>| sums.map_or("xxh3".to_owned(), |n| format!("{n} block sums"));
    let ours = match (stripe.extent, checks) {
        (Extent::Blocks { count, .. }, Checks::BlockSums) => Some(count as usize),
        (Extent::Blocks { .. } | Extent::Bytes { .. }, Checks::Xxh3)
        | (Extent::Bytes { .. }, Checks::BlockSums) => None,
    };
    let theirs = match check {
        Check::Xxh3(_) => None,
        Check::BlockSums(sums) => Some(sums.len()),
    };
    if ours == theirs {
        return Ok(());
    }
    Err(WireError::CheckDiffers { stream, stripe: stripe.id, ours: name(ours), theirs: name(theirs) })
}

/// The receiver's end of a proved connection.
#[derive(Debug)]
pub struct PullStream {
    inbox: Inbox,
    window: u16,
    checks: Checks,
    claimed: VecDeque<Moving>,
    ended: VecDeque<Stripe>,
    done_sent: bool,
}

impl PullStream {
    /// Starts on a proved connection of the transfer that ends in `completion`.
    pub fn new(proved: Proved<Receiver>, completion: Completion, checks: Checks) -> PullStream {
        PullStream {
            inbox: Inbox::new(proved.stream(), completion),
            window: proved.window(),
            checks,
            claimed: VecDeque::new(),
            ended: VecDeque::new(),
            done_sent: false,
        }
    }

    /// How many more stripes may be claimed now.
    pub fn room(&self) -> usize {
        usize::from(self.window).saturating_sub(self.claimed.len() + self.ended.len())
    }

    /// The `Claim` frame for a granted stripe.
    pub fn claim(&mut self, stripe: Stripe, attempt: u16) -> Result<Vec<u8>, WireError> {
        self.claim_by(stripe, attempt, Carriage::Sent)
    }

    /// The same for a stripe that this side reads from the sender's memory when its `StripeEnd` is here.
    pub fn claim_to_read(&mut self, stripe: Stripe, attempt: u16) -> Result<Vec<u8>, WireError> {
        self.claim_by(stripe, attempt, Carriage::Read)
    }

    fn claim_by(&mut self, stripe: Stripe, attempt: u16, carriage: Carriage) -> Result<Vec<u8>, WireError> {
        self.inbox.open(FrameKind::Claim)?;
        if self.done_sent {
            return Err(WireError::Unexpected { frame: FrameKind::Claim, state: "the sender's Done" });
        }
        let stream = self.inbox.stream;
        if self.room() == 0 {
            return Err(WireError::WindowFull { stream, window: self.window });
        }
        self.claimed.push_back(Moving::new(stripe, carriage));
        Message::Claim(Claim { stripe: stripe.id, attempt, extent: stripe.extent, carriage }).encode(stream)
    }

    /// Takes a header.
    pub fn header(&mut self, header: &Header) -> Result<Next, WireError> {
        self.inbox.begin(header)?;
        match header.kind {
            FrameKind::Data => {
                let (stream, len) = (self.inbox.stream, header.body_len);
                let moving = self.next_stripe(header)?;
                let (stripe, offset) = (moving.stripe, moving.at);
                moving.advance(stream, header.offset, len)?;
                self.inbox.pending = Pending::Payload(len);
                return Ok(Next::Payload { stripe, offset, len });
            }
            FrameKind::StripeEnd => {
                let stream = self.inbox.stream;
                self.next_stripe(header)?.check_whole(stream)?;
            }
            FrameKind::Done if !self.done_sent => {
                return Err(unexpected(header, "stripes, as this side is not done"));
            }
            FrameKind::Done
            | FrameKind::Error
            | FrameKind::Holds
            | FrameKind::Reach
            | FrameKind::Memory
            | FrameKind::Ping
            | FrameKind::Pong => {}
            FrameKind::Hello
            | FrameKind::Challenge
            | FrameKind::Proof
            | FrameKind::Accept
            | FrameKind::Refuse
            | FrameKind::Claim
            | FrameKind::Ack => return Err(unexpected(header, "frames of a sender")),
        }
        Ok(self.inbox.expect_body(header))
    }

    /// `bytes` of the payload have been taken, perhaps not yet all.
    pub fn taken(&mut self, bytes: usize) -> Result<(), WireError> {
        let left = match self.inbox.pending {
            Pending::Payload(left) => left,
            Pending::Nothing | Pending::Body(_) => 0,
        };
        let excess = WireError::BytesExcess { stream: self.inbox.stream, given: bytes, left };
        let left = u32::try_from(bytes).ok().and_then(|n| left.checked_sub(n)).ok_or(excess)?;
        if let Pending::Payload(pending) = &mut self.inbox.pending {
            *pending = left;
        }
        Ok(())
    }

    /// Takes the body that [`Next::Body`] asked for.
    pub fn body(&mut self, body: &[u8]) -> Result<PullEvent, WireError> {
        let (header, message) = self.inbox.body(body)?;
        match message {
            Message::StripeEnd { check, .. } => {
                let stream = self.inbox.stream;
                let stripe = self.next_stripe(&header)?.stripe;
                check_fits(stream, &stripe, self.checks, &check)?;
                self.claimed.pop_front();
                self.ended.push_back(stripe);
                Ok(PullEvent::StripeEnd { stripe, check })
            }
            Message::Done(_) => Ok(PullEvent::Done),
            Message::Error(fault) => Ok(PullEvent::Fault(fault)),
            Message::Holds(stripes) => Ok(PullEvent::Holds(stripes)),
            Message::Reach(reach) => Ok(PullEvent::Reach(reach)),
            Message::Memory(memory) => Ok(PullEvent::Memory(memory)),
            Message::Ping(number) => Ok(PullEvent::Ping(number)),
            Message::Pong(_) => Ok(PullEvent::Pong),
            Message::Hello(_)
            | Message::Challenge(_)
            | Message::Proof(_)
            | Message::Accept { .. }
            | Message::Refuse(_)
            | Message::Claim(_)
            | Message::Ack { .. } => Err(unexpected(&header, "frames of a sender")),
        }
    }

    /// The `Ack` frame for the oldest stripe that has ended.
    pub fn ack(&mut self, stripe: u32, verdict: Verdict) -> Result<Vec<u8>, WireError> {
        let (stream, frame) = (self.inbox.stream, FrameKind::Ack);
        self.inbox.open(frame)?;
        let expected = self.ended.front().map(|s| s.id);
        if expected != Some(stripe) {
            return Err(WireError::WrongStripe { stream, frame, stripe, expected });
        }
        self.ended.pop_front();
        Message::Ack { stripe, verdict }.encode(stream)
    }

    /// The `Done` frame: every stripe of the transfer is acknowledged and the digest is right.
    pub fn done(&mut self) -> Result<Vec<u8>, WireError> {
        self.inbox.open(FrameKind::Done)?;
        if !self.claimed.is_empty() || !self.ended.is_empty() || self.done_sent {
            return Err(WireError::Unexpected { frame: FrameKind::Done, state: "the claimed stripes" });
        }
        self.done_sent = true;
        self.inbox.done()
    }

    /// A `Ping` frame; one may be open at a time. The answer must carry the same number.
    pub fn ping(&mut self, number: u64) -> Result<Vec<u8>, WireError> {
        self.inbox.ping(number)
    }

    fn next_stripe(&mut self, header: &Header) -> Result<&mut Moving, WireError> {
        let (stream, frame, stripe) = (self.inbox.stream, header.kind, header.stripe);
        match self.claimed.front_mut() {
            Some(moving) if moving.stripe.id == stripe => Ok(moving),
            other => {
                let expected = other.map(|m| m.stripe.id);
                Err(WireError::WrongStripe { stream, frame, stripe, expected })
            }
        }
    }
}

/// The sender's end of a proved connection.
#[derive(Debug)]
pub struct ServeStream<'p> {
    inbox: Inbox,
    window: u16,
    plan: &'p StripePlan,
    /// None at a relay: its caller knows what it holds.
    source: Option<usize>,
    claimed: VecDeque<Moving>,
    unacknowledged: VecDeque<Stripe>,
}

impl<'p> ServeStream<'p> {
    /// Starts on a proved connection of the transfer that follows `plan` and ends in `completion`.
    pub fn new(
        proved: Proved<Sender>,
        completion: Completion,
        plan: &'p StripePlan,
    ) -> Result<ServeStream<'p>, WireError> {
        let id = proved.source();
        let source = plan.source_position(id).ok_or(WireError::UnknownSource { source_id: id.0 })?;
        Ok(ServeStream { source: Some(source), ..ServeStream::relay(proved, completion, plan) })
    }

    /// Starts on a proved connection to a relay, which is no source of the plan. Its caller refuses claims of stripes that it
    /// does not hold.
    pub fn relay(proved: Proved<Sender>, completion: Completion, plan: &'p StripePlan) -> ServeStream<'p> {
        ServeStream {
            inbox: Inbox::new(proved.stream(), completion),
            window: proved.window(),
            plan,
            source: None,
            claimed: VecDeque::new(),
            unacknowledged: VecDeque::new(),
        }
    }

    /// Takes a header. Never answers [`Next::Payload`]: receivers send none.
    pub fn header(&mut self, header: &Header) -> Result<Next, WireError> {
        self.inbox.begin(header)?;
        let (stream, frame, stripe) = (self.inbox.stream, header.kind, header.stripe);
        match frame {
            FrameKind::Claim => {
                if self.claimed.len() + self.unacknowledged.len() >= usize::from(self.window) {
                    return Err(WireError::WindowFull { stream, window: self.window });
                }
                if self.plan.get(stripe).is_none() {
                    return Err(WireError::PlanDiffers { stream, stripe, ours: None, theirs: None });
                }
            }
            FrameKind::Ack => {
                let expected = self.unacknowledged.front().map(|s| s.id);
                if expected != Some(stripe) {
                    return Err(WireError::WrongStripe { stream, frame, stripe, expected });
                }
            }
            FrameKind::Done if !self.claimed.is_empty() || !self.unacknowledged.is_empty() => {
                return Err(unexpected(header, "acknowledgements of what was claimed"));
            }
            FrameKind::Done | FrameKind::Error | FrameKind::Reach | FrameKind::Ping | FrameKind::Pong => {}
            FrameKind::Hello
            | FrameKind::Challenge
            | FrameKind::Proof
            | FrameKind::Accept
            | FrameKind::Refuse
            | FrameKind::Data
            | FrameKind::StripeEnd
            | FrameKind::Holds
            | FrameKind::Memory => return Err(unexpected(header, "frames of a receiver")),
        }
        Ok(self.inbox.expect_body(header))
    }

    /// Takes the body that [`Next::Body`] asked for.
    pub fn body(&mut self, body: &[u8]) -> Result<ServeEvent, WireError> {
        let (header, message) = self.inbox.body(body)?;
        match message {
            Message::Claim(claim) => self.claimed(claim),
            Message::Ack { stripe, verdict } => {
                self.unacknowledged.pop_front();
                Ok(ServeEvent::Ack { stripe, verdict })
            }
            Message::Done(_) => Ok(ServeEvent::Done),
            Message::Error(fault) => Ok(ServeEvent::Fault(fault)),
            Message::Reach(reach) => Ok(ServeEvent::Reach(reach)),
            Message::Ping(number) => Ok(ServeEvent::Ping(number)),
            Message::Pong(_) => Ok(ServeEvent::Pong),
            Message::Hello(_)
            | Message::Challenge(_)
            | Message::Proof(_)
            | Message::Accept { .. }
            | Message::Refuse(_)
            | Message::Holds(_)
            | Message::Memory(_)
            | Message::StripeEnd { .. } => Err(unexpected(&header, "frames of a receiver")),
        }
    }

    fn claimed(&mut self, claim: message::Claim) -> Result<ServeEvent, WireError> {
        let stream = self.inbox.stream;
        let Claim { stripe: id, attempt, extent, carriage } = claim;
        let ours = self.plan.get(id);
        let Some(stripe) = ours.filter(|s| s.extent == extent) else {
            let ours = ours.map(|s| s.extent);
            return Err(WireError::PlanDiffers { stream, stripe: id, ours, theirs: Some(extent) });
        };
        if self.source.is_some_and(|source| !self.plan.holders(&stripe).contains(source)) {
            return Err(WireError::NotHeld { stream, stripe: id });
        }
        self.claimed.push_back(Moving::new(stripe, carriage));
        Ok(ServeEvent::Claim { stripe, attempt, carriage })
    }

    /// The stripe to send now, and how many of its bytes have been announced.
    pub fn sending(&self) -> Option<(Stripe, u32)> {
        self.claimed.front().map(|m| (m.stripe, m.at))
    }

    /// The header for the next `len` bytes of the stripe to send now. The bytes follow it raw.
    pub fn data(&mut self, len: u32) -> Result<[u8; HEADER_LEN], WireError> {
        let (stream, kind) = (self.inbox.stream, FrameKind::Data);
        self.inbox.open(kind)?;
        let moving =
            self.claimed.front_mut().ok_or(WireError::Unexpected { frame: kind, state: "a claim" })?;
        let (stripe, offset) = (moving.stripe.id, u64::from(moving.at));
        moving.advance(stream, offset, len)?;
        let version = ProtocolVersion::CURRENT;
        Ok(Header { version, kind, stream, stripe, offset, body_len: len }.encode())
    }

    /// The `StripeEnd` frame of the stripe to send now; the next one is up.
    pub fn end(&mut self, check: Check) -> Result<Vec<u8>, WireError> {
        let (stream, frame) = (self.inbox.stream, FrameKind::StripeEnd);
        self.inbox.open(frame)?;
        let moving = self.claimed.front().ok_or(WireError::Unexpected { frame, state: "a claim" })?;
        moving.check_whole(stream)?;
        let stripe = moving.stripe;
        check_fits(stream, &stripe, self.plan.checks(), &check)?;
        let frame = Message::StripeEnd { stripe: stripe.id, check }.encode(stream)?;
        self.claimed.pop_front();
        self.unacknowledged.push_back(stripe);
        Ok(frame)
    }

    /// Stripes whose memory this connection may still read: claimed or sent, and not acknowledged. Until
    /// there are none, or the connection is reset, the memory must not be reused.
    pub fn unacknowledged(&self) -> impl Iterator<Item = Stripe> + '_ {
        self.unacknowledged.iter().copied().chain(self.claimed.iter().map(|m| m.stripe))
    }

    /// The `Done` frame that answers the receiver's.
    pub fn done(&self) -> Result<Vec<u8>, WireError> {
        self.inbox.done()
    }

    /// A `Ping` frame; one may be open at a time. The answer must carry the same number.
    pub fn ping(&mut self, number: u64) -> Result<Vec<u8>, WireError> {
        self.inbox.ping(number)
    }
}
