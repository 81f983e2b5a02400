//! The receiver's end of one proved connection: claims stripes, lands them, acknowledges them.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use windlass_core::error::Kind;
use windlass_core::wire::{
    Check, Fault, FrameKind, Grant, HEADER_LEN, Message, Next, Outcome, PullEvent, PullStream, SourceId,
    Stage, StreamId, Stripe, Verdict, WireError,
};

use super::TcpError;
use super::conn::{By, Conn, wait};
use super::landing::Lander;
use super::pull::Transfer;
use super::reading::Source as Readable;
use crate::nixl::{NixlError, Read};
use crate::stop::Stop;

/// How long the other end gets to answer `Done`.
const GOODBYE: Duration = Duration::from_secs(1);
/// How often a stream without work looks at its socket.
const IDLE: Duration = Duration::from_millis(10);
/// How long a stream listens to its sender before it looks at its reads again.
const READ_NAP: Duration = Duration::from_micros(100);

/// A stripe that is being read.
struct Landing<'a> {
    stripe: Stripe,
    check: Check,
    read: Read<'a>,
}

/// One connection of a stream, proved.
pub(super) struct Lane<'a> {
    transfer: &'a Transfer<'a>,
    source: SourceId,
    /// The name of the relay that it leads to, if it does.
    relay: Option<&'a str>,
    stream: StreamId,
    conn: Conn,
    pull: PullStream,
    /// Frames to send before the next wait.
    outbox: Vec<u8>,
    /// Stripes claimed and not acknowledged.
    held: usize,
    /// When it last claimed its first stripe or got rid of one.
    since: Instant,
    /// When it last looked around.
    looked: Instant,
    pinged: bool,
    pings: u64,
    body: Vec<u8>,
    /// Where stripes are read from, if they are.
    readable: Option<Readable>,
    /// Stripes claimed to be read, in the order of their claims.
    to_read: VecDeque<u32>,
    /// Those being read.
    reads: VecDeque<Landing<'a>>,
    /// Set when a stripe is acknowledged as good.
    progress: &'a mut bool,
}

impl<'a> Lane<'a> {
    pub(super) fn new(
        transfer: &'a Transfer<'a>,
        (source, relay): (SourceId, Option<&'a str>),
        stream: StreamId,
        conn: Conn,
        pull: PullStream,
        progress: &'a mut bool,
    ) -> Lane<'a> {
        let now = Instant::now();
        Lane {
            transfer,
            source,
            relay,
            stream,
            conn,
            pull,
            outbox: Vec::new(),
            held: 0,
            since: now,
            looked: now,
            pinged: false,
            pings: 0,
            body: Vec::new(),
            readable: None,
            to_read: VecDeque::new(),
            reads: VecDeque::new(),
            progress,
        }
    }

    /// Stripes are read from there, as far as they can be.
    pub(super) fn read_from(&mut self, readable: Option<Readable>) {
        self.readable = readable;
    }

    pub(super) fn run(&mut self, mut lander: Box<dyn Lander + '_>) -> Result<(), TcpError> {
        self.conn.stage = Stage::Claim;
        loop {
            let finished = self.claim()?;
            self.flush()?;
            if finished {
                return self.goodbye();
            }
            if !self.reads.is_empty() {
                self.watch_reads(&mut *lander)?;
            } else if self.held > 0 || self.is_addressed()? {
                self.frame(&mut *lander)?;
            }
        }
    }

    /// Claims as much as the window and the book allow. If that is nothing and nothing is held, waits a little
    /// for the book to change. True when the transfer is finished.
    fn claim(&mut self) -> Result<bool, TcpError> {
        let transfer = self.transfer;
        while self.pull.room() > 0 {
            let mut claims = transfer.book();
            let mut grant = claims.claim(self.stream, transfer.now());
            let idle = self.held == 0 && self.outbox.is_empty();
            if grant == Ok(Grant::Wait) && idle && !self.is_told() {
                transfer.changed.wait_for(&mut claims, IDLE);
                grant = claims.claim(self.stream, transfer.now());
            }
            drop(claims);
            match grant.map_err(|e| self.conn.wire(e))? {
                Grant::Stripe { stripe, attempt } => {
                    let frame =
                        if self.readable.is_some() && transfer.reading.can_read(&transfer.plan, &stripe) {
                            self.to_read.push_back(stripe.id);
                            self.pull.claim_to_read(stripe, attempt)
                        } else {
                            self.pull.claim(stripe, attempt)
                        };
                    let frame = frame.map_err(|e| self.conn.wire(e))?;
                    self.outbox.extend(frame);
                    if self.held == 0 {
                        self.since = Instant::now();
                    }
                    self.held += 1;
                }
                Grant::Wait => return Ok(false),
                Grant::Finished => return Ok(true),
            }
        }
        Ok(false)
    }

    /// Whether the sender has said something, though nothing is claimed.
    fn is_addressed(&mut self) -> Result<bool, TcpError> {
        self.look()?;
        let nap = if self.is_told() { Stop::GLANCE } else { Duration::ZERO };
        let ready = self.conn.wait(false, Some(self.transfer.ended.fd()), nap)?;
        Ok(ready.readable || !self.conn.ahead().is_empty())
    }

    /// Whether the sender tells when there is something to claim, as relays do. What a lost stream leaves is then found at the next
    /// glance. Without relays only that comes back, and the book tells at once.
    fn is_told(&self) -> bool {
        self.transfer.ticket.swarm.is_some()
    }

    fn flush(&mut self) -> Result<(), TcpError> {
        loop {
            if !self.outbox.is_empty() {
                let sent = self.conn.send_now(&self.outbox, false)?;
                self.outbox.drain(..sent);
            }
            if self.outbox.is_empty() && self.conn.drain()? {
                return Ok(());
            }
            // The sender always reads, so this is a full pipe on the way; it must not hold up a stop.
            wait(self.conn.fd(), true, None, Stop::GLANCE).map_err(|e| self.conn.io("wait", e))?;
            self.look()?;
        }
    }

    /// Looks whether to go on: stop, failure elsewhere, a stripe overdue, silence. Sends a ping when it is due.
    fn look(&mut self) -> Result<(), TcpError> {
        let (transfer, config) = (self.transfer, self.transfer.config);
        let now = Instant::now();
        self.looked = now;
        transfer.stop.check()?;
        if transfer.over.load(Ordering::Relaxed) {
            // The book has the failure; it is not this stream's.
            return match transfer.book().outcome(transfer.now()) {
                Outcome::Failed(failure) => Err(self.conn.wire(failure.into())),
                Outcome::Running | Outcome::Finished => Ok(()),
            };
        }
        if transfer.condemned.lock().contains(&self.source) {
            return Err(self.conn.wire(WireError::UnknownSource { source_id: self.source.0 }));
        }
        let (peer, stage) = (self.conn.peer(), self.conn.stage);
        let overdue = if self.held > 0 { transfer.book().overdue(self.stream, transfer.now()) } else { None };
        if let Some(after) = overdue {
            return Err(TcpError::TooSlow { peer, stage, what: "a stripe", after });
        }
        let silent = now.duration_since(self.conn.heard);
        if silent >= config.lost_after {
            return Err(TcpError::Silent { peer, stage, after: silent });
        }
        if silent >= config.ping_after && !self.pinged {
            (self.pinged, self.pings) = (true, self.pings + 1);
            let ping = self.pull.ping(self.pings).map_err(|e| self.conn.wire(e))?;
            self.outbox.extend(ping);
            let sent = self.conn.send_now(&self.outbox, false)?;
            self.outbox.drain(..sent);
        }
        Ok(())
    }

    /// Fills `into` from the connection.
    fn fill(&mut self, mut into: &mut [u8]) -> Result<(), TcpError> {
        while !into.is_empty() {
            let read = self.conn.read(into)?.unwrap_or(0);
            into = &mut into[read..];
            // Also when bytes keep trickling in.
            if read == 0 || self.looked.elapsed() > Stop::GLANCE {
                self.look()?;
            }
        }
        Ok(())
    }

    /// Takes one frame.
    fn frame(&mut self, lander: &mut dyn Lander) -> Result<(), TcpError> {
        let header = loop {
            if let Some(header) = self.conn.header()? {
                break header;
            }
            if self.conn.read_ahead(true)?.is_none() || self.looked.elapsed() > Stop::GLANCE {
                self.look()?;
            }
        };
        match self.pull.header(&header).map_err(|e| self.conn.wire(e))? {
            Next::Payload { stripe, offset, len } => {
                self.conn.stage = Stage::Data;
                self.transfer.watch.reach(Stage::Data);
                if offset == 0 {
                    self.end_reads(lander)?;
                    lander.begin(stripe)?;
                }
                lander.take(len, &mut |into| {
                    self.fill(into)?;
                    self.transfer.watch.received(into.len() as u64);
                    Ok(())
                })?;
                self.pull.taken(len as usize).map_err(|e| self.conn.wire(e))
            }
            Next::Body(len) => {
                let mut body = std::mem::take(&mut self.body);
                body.resize(len as usize, 0);
                self.fill(&mut body)?;
                let event = self.pull.body(&body).map_err(|e| self.conn.wire(e));
                self.body = body;
                self.take(event?, lander)
            }
        }
    }

    fn take(&mut self, event: PullEvent, lander: &mut dyn Lander) -> Result<(), TcpError> {
        match event {
            PullEvent::StripeEnd { stripe, check } => {
                if self.to_read.front() == Some(&stripe.id) {
                    self.to_read.pop_front();
                    return self.begin_read(stripe, check);
                }
                self.end_reads(lander)?;
                self.conn.stage = Stage::Verify;
                if stripe.bytes == 0 {
                    lander.begin(stripe)?;
                }
                let verdict = lander.verdict(&check);
                self.settle(stripe, verdict, lander)
            }
            PullEvent::Done => {
                let frame = FrameKind::Done;
                Err(self.conn.wire(WireError::Unexpected { frame, state: "stripes" }))
            }
            PullEvent::Reach(_) | PullEvent::Memory(_) => {
                let frame = FrameKind::Reach;
                Err(self.conn.wire(WireError::Unexpected { frame, state: "stripes" }))
            }
            PullEvent::Fault(fault) => Err(self.conn.wire(WireError::Peer(fault))),
            PullEvent::Holds(stripes) => {
                let stream = self.stream;
                let told = self.transfer.update(|claims, _| {
                    stripes.into_iter().try_for_each(|range| claims.holds(stream, range))
                });
                told.map_err(|e| self.conn.wire(e))
            }
            PullEvent::Ping(number) => {
                let pong = Message::Pong(number).encode(self.stream).map_err(|e| self.conn.wire(e))?;
                self.outbox.extend(pong);
                self.flush()
            }
            PullEvent::Pong => {
                self.pinged = false;
                Ok(())
            }
        }
    }

    /// The sender holds its memory: reads a stripe from there.
    fn begin_read(&mut self, stripe: Stripe, check: Check) -> Result<(), TcpError> {
        self.conn.stage = Stage::Data;
        self.transfer.watch.reach(Stage::Data);
        let reading = &self.transfer.reading;
        let read = match &self.readable {
            Some(readable) => reading.read(&self.transfer.plan, &stripe, readable),
            None => Err(NixlError::Closed),
        };
        let read = read.map_err(|source| self.unread(source))?;
        self.reads.push_back(Landing { stripe, check, read });
        Ok(())
    }

    fn unread(&self, source: NixlError) -> TcpError {
        let (peer, stage) = (self.conn.peer(), self.conn.stage);
        self.transfer.reading.fail(&peer, &source);
        TcpError::Nixl { peer, stage, source: Box::new(source) }
    }

    /// Looks whether the oldest read has ended, and whether the sender has said something.
    fn watch_reads(&mut self, lander: &mut dyn Lander) -> Result<(), TcpError> {
        if self.end_read(lander)? {
            return Ok(());
        }
        if self.conn.wait(false, None, READ_NAP)?.readable || self.conn.ahead().len() >= HEADER_LEN {
            self.frame(lander)?;
        }
        Ok(())
    }

    /// Waits for all reads: stripes are acknowledged in their order, and one that is sent comes after them.
    fn end_reads(&mut self, lander: &mut dyn Lander) -> Result<(), TcpError> {
        while !self.reads.is_empty() {
            if !self.end_read(lander)? {
                std::thread::sleep(READ_NAP);
            }
        }
        Ok(())
    }

    /// Whether the oldest read has ended; it is then checked and acknowledged.
    fn end_read(&mut self, lander: &mut dyn Lander) -> Result<bool, TcpError> {
        let Some(oldest) = self.reads.front_mut() else { return Ok(false) };
        match oldest.read.poll() {
            Ok(false) => {}
            Ok(true) => {
                let Some(Landing { stripe, check, read }) = self.reads.pop_front() else { return Ok(false) };
                // The loans end; the lander takes its own.
                drop(read);
                self.conn.stage = Stage::Verify;
                lander.begin(stripe)?;
                // The bytes are in their place already.
                lander.take(stripe.bytes, &mut |_| Ok(()))?;
                self.transfer.watch.read(stripe.bytes.into());
                let verdict = lander.verdict(&check);
                self.settle(stripe, verdict, lander)?;
                return Ok(true);
            }
            Err(source) => return Err(self.unread(source)),
        }
        if self.looked.elapsed() > Stop::GLANCE {
            self.look()?;
            if self.transfer.reading.is_over() {
                return Err(self.unread(NixlError::Closed));
            }
        }
        Ok(false)
    }

    /// A stripe is here and checked.
    fn settle(
        &mut self,
        Stripe { id: stripe, bytes, .. }: Stripe,
        verdict: Verdict,
        lander: &mut dyn Lander,
    ) -> Result<(), TcpError> {
        let (stream, since) = (self.stream, self.since);
        let entered = match verdict {
            Verdict::Good => {
                self.transfer.update(|claims, now| claims.complete(stream, stripe, now)).map(|()| false)
            }
            Verdict::BadBlock(_) | Verdict::BadStripe => {
                tracing::warn!(peer = self.conn.peer(), stripe, ?verdict, "a stripe came with wrong sums");
                self.transfer.update(|claims, now| claims.bad(stream, stripe, verdict, now))
            }
        };
        // Acknowledged even if it was the one too many: the sender's memory is free either way.
        let ack = self.pull.ack(stripe, verdict).map_err(|e| self.conn.wire(e))?;
        self.outbox.extend(ack);
        self.held = self.held.saturating_sub(1);
        self.since = Instant::now();
        if entered.map_err(|e| self.conn.wire(e))? {
            return Err(TcpError::Liar { peer: self.conn.peer(), stripe });
        }
        if verdict == Verdict::Good {
            *self.progress = true;
            lander.keep();
            self.transfer.watch.supplied(self.relay, bytes.into(), since);
            if let Some(board) = self.transfer.config.board {
                board.add(stripe);
            }
        }
        Ok(())
    }

    /// Every stripe is acknowledged: says so, and waits a little for the sender to agree.
    fn goodbye(&mut self) -> Result<(), TcpError> {
        self.conn.stage = Stage::Complete;
        if let Err(fault) = self.transfer.accept() {
            if let Ok(frame) = Message::Error(fault).encode(self.stream) {
                self.conn.farewell(&frame, GOODBYE);
            }
            return Ok(());
        }
        let done = self.pull.done().map_err(|e| self.conn.wire(e))?;
        let stop = self.transfer.stop;
        if self.relay.is_some() {
            // It keeps no account of who has everything.
            self.outbox.extend(done);
            let _ = self.conn.send_now(&self.outbox, false);
            return Ok(());
        }
        let by = By { until: Instant::now() + GOODBYE, limit: GOODBYE, what: "the end", stop };
        // The transfer is complete whether or not the sender hears of it here: it is told over the control
        // connection as well.
        if let Err(error) = self.conn.send_by(&done, &by).and_then(|()| self.await_done(&by)) {
            tracing::debug!(%error, "the sender did not confirm the end");
        }
        Ok(())
    }

    fn await_done(&mut self, by: &By<'_>) -> Result<(), TcpError> {
        loop {
            let (header, body) = self.conn.frame_by(by)?;
            self.pull.header(&header).map_err(|e| self.conn.wire(e))?;
            if self.pull.body(&body).map_err(|e| self.conn.wire(e))? == PullEvent::Done {
                return Ok(());
            }
        }
    }

    /// Tells the sender why this side ends the stream, if it can be told at once.
    pub(super) fn give_up(&mut self, error: &TcpError) {
        let unheard = matches!(
            error,
            TcpError::Io { .. }
                | TcpError::Closed { .. }
                | TcpError::Wire { source: WireError::Peer(_) | WireError::Refused(_), .. }
        );
        if unheard {
            return;
        }
        // Where the ticket is of no more use to this side, the sender need not wait for its streams.
        let ends_ticket = matches!(
            error,
            TcpError::Wire { source: WireError::Transfer(_), .. }
                | TcpError::Stopped(_)
                | TcpError::Ground { .. }
        );
        let kind = if ends_ticket { Kind::Cancelled } else { Kind::PeerLost };
        let fault = Fault { kind, stage: self.conn.stage, stripe: None, message: error.to_string() };
        if let Ok(frame) = Message::Error(fault).encode(self.stream) {
            self.outbox.extend(frame);
            let _ = self.conn.send_now(&self.outbox, false);
        }
    }
}
