//! The sender's end of one connection: handshake, then stripes as they are claimed.
//!
//! One thread runs it. Its socket does not block: while the peer takes no more bytes, the thread waits for room
//! *and* for frames of the peer, so that two ends with full buffers cannot wait for each other. What it keeps in
//! memory is bounded: the peer's frames by their limits, its claims by the window, answers to pings by
//! [`MAX_PONGS`]. Inside TLS, `sendfile` is replaced by reads into a buffer that is encrypted from there.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use windlass_core::error::Kind;
use windlass_core::manifest::Manifest;
use windlass_core::wire::{
    Carriage, Check, Checks, Extent, Fault, FrameKind, Greeted, MAX_HOLDS, Memory, Message, Next, Nonce,
    Proved, Reach, Sender as SenderSide, ServeEvent, ServeStream, Stage, StreamId, Stripe, StripePlan,
    Verdict, WireError, refuse,
};
use xxhash_rust::xxh3::Xxh3;

use super::TcpError;
use super::board::Bell;
use super::conn::{By, Conn};
use super::offer::{Content, Crowd, Open, Over, Served};
use super::sender::{Found, Peer, Shared, now_unix_ms};
use crate::stop::Stop;
use crate::tls::DATA_PROTOCOL;

/// Runs shorter than this are gathered into one write; longer ones go out by `sendfile`.
const SHORT_RUN: u64 = 16 << 10;
/// How much is gathered at a time, and read at a time for a sum.
const GATHER: usize = 256 << 10;
/// The most that one `sendfile` is asked for, so that frames of the peer are looked at in between.
const MAX_SENDFILE: u64 = 16 << 20;
/// Bytes of answers that the peer has not taken, at most.
const MAX_PONGS: usize = 16 << 10;
/// What a peer is told that takes this port for that of requests.
const MISDIRECTED: &str = "HTTP/1.1 421 Misdirected Request\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n\
    {\"ok\":false,\"error\":{\"kind\":\"unsupported\",\"message\":\"this is the data port of an agent, which only its tickets \
    lead to: give the address that the agent printed when it started, which is also in agent.json in the directory of its \
    region\",\"advice\":\"\"}}";
/// How long the peer gets to read the last word.
const LINGER: Duration = Duration::from_millis(500);

/// Runs a connection from its first byte to its last. `open` is left filled if the connection must be reset
/// before the memory is given back.
pub(super) fn converse(
    shared: &Shared,
    id: u64,
    peer: &Peer,
    open: &mut Option<Open>,
) -> Result<(), TcpError> {
    let mut conn = Conn::new(Arc::clone(&peer.socket), peer.address.to_string());
    let (served, proved) = match greet(shared, id, peer, &mut conn) {
        Ok(greeting) => greeting,
        Err((error, stream)) => {
            if let TcpError::Wire { source: WireError::Magic { found }, .. } = &error
                && matches!(found, b"GET " | b"POST" | b"HEAD" | b"PUT ")
            {
                conn.farewell(MISDIRECTED.as_bytes(), LINGER);
            } else if let TcpError::Wire { source, .. } = &error
                && !matches!(source, WireError::Refused(_) | WireError::Peer(_))
                && let Ok(word) = refuse(source, stream)
            {
                conn.farewell(&word, LINGER);
            }
            return Err(error);
        }
    };
    Serving::new(shared, &served, conn, proved, open)?.run()
}

type Greeting = (Arc<Served>, (Proved<SenderSide>, Vec<u8>));

/// The handshake up to, but without, sending `Accept`. With an error comes the stream to refuse.
fn greet(shared: &Shared, id: u64, peer: &Peer, conn: &mut Conn) -> Result<Greeting, (TcpError, StreamId)> {
    let limit = shared.config.handshake_timeout;
    let by = By { until: Instant::now() + limit, limit, what: "the handshake", stop: &shared.stop };
    let nobody = StreamId { index: 0, epoch: 0 };
    if let Some(certificate) = &shared.config.tls {
        let tls = rustls::ServerConnection::new(certificate.data());
        let tls = tls.map_err(|e| conn.tls(e)).map_err(|e| (e, nobody))?;
        conn.secure_by(tls, DATA_PROTOCOL, &by).map_err(|e| (e, nobody))?;
    }
    let (header, body) = conn.frame_by(&by).map_err(|e| (e, nobody))?;
    let greeted = Greeted::read(&header, &body).map_err(|e| (conn.wire(e), nobody))?;
    let stream = greeted.stream();
    let wire = |conn: &Conn, e| (conn.wire(e), stream);
    let ticket = greeted.ticket();
    let Some(found) = shared.find(ticket) else {
        return Err(wire(conn, WireError::UnknownTicket { ticket }));
    };
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce)
        .map_err(|e| (TcpError::Setup { what: "a nonce", source: std::io::Error::other(e) }, stream))?;
    let (challenged, frame) = greeted.challenge(found.key(), Nonce(nonce)).map_err(|e| wire(conn, e))?;
    conn.send_by(&frame, &by).map_err(|e| (e, stream))?;
    let (header, body) = conn.frame_by(&by).map_err(|e| (e, stream))?;
    let (proved, accept) =
        challenged.proof(&header, &body, shared.config.window).map_err(|e| wire(conn, e))?;
    // From here on the peer has the key: it may know why its ticket is of no more use.
    let served = match found {
        Found::Offer(served) => served,
        Found::Ended(_, fault) => {
            if let Ok(frame) = Message::Error(fault.clone()).encode(stream) {
                conn.farewell(&frame, LINGER);
            }
            return Err(wire(conn, WireError::Peer(fault)));
        }
    };
    let replaced = served.enter(&proved, id, now_unix_ms()).map_err(|e| wire(conn, e))?;
    peer.proved.store(true, Ordering::Relaxed);
    // Set once, here: a connection greets once.
    let _ = peer.serves.set(Arc::clone(&served));
    if let Some(old) = replaced {
        shared.put_out(old);
        served.wait_left(old, LINGER);
    }
    Ok((served, (proved, accept)))
}

/// What one attempt to write came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrote {
    Idle,
    /// The peer takes no more for now.
    Blocked,
    /// A stripe is out; there may be more.
    Stripe,
}

struct Serving<'a> {
    shared: &'a Shared,
    served: &'a Arc<Served>,
    conn: Conn,
    serve: ServeStream<'a>,
    stream: StreamId,
    open: &'a mut Option<Open>,
    /// Bytes to send before anything else, and how many of them are sent.
    out: Vec<u8>,
    sent: usize,
    /// Answers that wait for the end of the frame under way.
    pongs: Vec<u8>,
    /// What the board says, which waits as well.
    news: Vec<u8>,
    bell: Arc<Bell>,
    /// How much of the board the peer has been told of.
    told: usize,
    sending: Option<Sending<'a>>,
    /// The length of the body that is due.
    body: Option<u32>,
    /// Stripes begun and not acknowledged.
    unacknowledged: usize,
    /// When the peer last said or took something.
    alive: Instant,
    pinged: bool,
    pings: u64,
    /// Whether the peer was told how to read memory, once it has asked.
    reached: Option<bool>,
    ended: bool,
}

/// The stripe that is being sent.
struct Sending<'a> {
    check: Check,
    payload: u32,
    /// What `sendfile` is at, in the file.
    run: Range<u64>,
    runs: Runs<'a>,
}

impl<'a> Serving<'a> {
    fn new(
        shared: &'a Shared,
        served: &'a Arc<Served>,
        conn: Conn,
        (proved, accept): (Proved<SenderSide>, Vec<u8>),
        open: &'a mut Option<Open>,
    ) -> Result<Serving<'a>, TcpError> {
        let stream = proved.stream();
        let serve = if served.crowd.is_relay() {
            ServeStream::relay(proved, served.completion(), &served.plan)
        } else {
            ServeStream::new(proved, served.completion(), &served.plan).map_err(|e| conn.wire(e))?
        };
        let bell = served.bell()?;
        Ok(Serving {
            shared,
            served,
            conn,
            serve,
            stream,
            open,
            out: accept,
            sent: 0,
            pongs: Vec::new(),
            news: Vec::new(),
            bell,
            told: 0,
            sending: None,
            body: None,
            unacknowledged: 0,
            alive: Instant::now(),
            pinged: false,
            pings: 0,
            reached: None,
            ended: false,
        })
    }

    fn run(&mut self) -> Result<(), TcpError> {
        self.conn.stage = Stage::Claim;
        let result = self.serve_claims();
        if let Err(TcpError::Wire { source, stage, .. }) = &result
            && !matches!(source, WireError::Peer(_))
        {
            // A malformed frame is more likely damage than malice: it ends the stream, not the ticket. That the
            // plans differ will not mend itself.
            let damage = source.kind() == Kind::Invalid && !matches!(source, WireError::PlanDiffers { .. });
            let kind = if damage { Kind::Corrupt } else { source.kind() };
            let fault = Fault { kind, stage: *stage, stripe: None, message: source.to_string() };
            self.say(&Message::Error(fault));
        }
        result
    }

    fn serve_claims(&mut self) -> Result<(), TcpError> {
        loop {
            self.take_frames()?;
            if self.ended {
                return Ok(());
            }
            let over = self.served.over();
            if let Some(over) = &over
                && self.leave(over)?
            {
                return Ok(());
            }
            self.tell()?;
            let wrote = self.write(over.is_some())?;
            if wrote == Wrote::Stripe {
                self.hear()?;
                continue;
            }
            let timeout = self.patience(over.as_ref())?;
            let wake = over.is_none().then(|| self.bell.fd());
            let ready = self.conn.wait(wrote == Wrote::Blocked, wake, timeout)?;
            if ready.readable {
                self.hear()?;
            }
        }
    }

    /// Tells the peer what the board has that it does not know of.
    fn tell(&mut self) -> Result<(), TcpError> {
        self.bell.hush();
        let busy = self.unacknowledged > 0;
        for some in self.served.news(&mut self.told, busy).chunks(MAX_HOLDS as usize) {
            let frame = Message::Holds(some.to_vec()).encode(self.stream).map_err(|e| self.conn.wire(e))?;
            self.news.extend(frame);
        }
        Ok(())
    }

    fn hear(&mut self) -> Result<(), TcpError> {
        if self.conn.read_ahead(false)?.is_some() {
            self.alive();
        }
        Ok(())
    }

    fn alive(&mut self) {
        self.alive = Instant::now();
    }

    /// Takes every whole frame that was read. Any body that a receiver may send fits the buffer.
    fn take_frames(&mut self) -> Result<(), TcpError> {
        while !self.ended {
            let len = if let Some(len) = self.body {
                len
            } else {
                let Some(header) = self.conn.header()? else { return Ok(()) };
                match self.serve.header(&header).map_err(|e| self.conn.wire(e))? {
                    Next::Body(len) => *self.body.insert(len),
                    Next::Payload { .. } => 0,
                }
            };
            let Some(body) = self.conn.ahead().get(..len as usize) else { return Ok(()) };
            let event = self.serve.body(body).map_err(|e| self.conn.wire(e))?;
            self.conn.used(len as usize);
            self.body = None;
            self.take(event)?;
        }
        Ok(())
    }

    fn take(&mut self, event: ServeEvent) -> Result<(), TcpError> {
        match event {
            ServeEvent::Claim { carriage: Carriage::Read, .. } if self.reached != Some(true) => {
                let state = "claims of bytes to be sent";
                return Err(self.conn.wire(WireError::Unexpected { frame: FrameKind::Claim, state }));
            }
            // It is in the stream's book, and served in its turn.
            ServeEvent::Claim { stripe, .. } => match &self.served.crowd {
                Crowd::One => {}
                Crowd::Among(board) => board.add(stripe.id),
                Crowd::Any(board) if board.contains(stripe.id) => {}
                Crowd::Any(_) => {
                    let (stream, stripe) = (self.stream, stripe.id);
                    return Err(self.conn.wire(WireError::NotHeld { stream, stripe }));
                }
            },
            ServeEvent::Ack { stripe, verdict } => self.acknowledged(stripe, verdict),
            ServeEvent::Done => {
                self.conn.stage = Stage::Complete;
                if !self.served.crowd.is_relay() {
                    self.served.end(None, Instant::now() + self.shared.config.lost_after);
                }
                let done = self.serve.done().map_err(|e| self.conn.wire(e))?;
                self.close(&done);
            }
            ServeEvent::Fault(fault) => {
                self.ended = true;
                if fault.ends_ticket() && !self.served.crowd.is_relay() {
                    self.served.end(Some(fault.clone()), Instant::now());
                }
                return Err(self.conn.wire(WireError::Peer(fault)));
            }
            ServeEvent::Ping(number) => {
                if self.pongs.len() > MAX_PONGS {
                    let state = "a peer that takes the answers to its Pings";
                    return Err(self.conn.wire(WireError::Unexpected { frame: FrameKind::Ping, state }));
                }
                self.pongs.extend(Message::Pong(number).encode(self.stream).map_err(|e| self.conn.wire(e))?);
            }
            ServeEvent::Reach(reach) => self.reach(reach)?,
            ServeEvent::Pong => self.pinged = false,
        }
        Ok(())
    }

    /// Tells the peer how the image can be read, or why it cannot.
    fn reach(&mut self, theirs: Reach) -> Result<(), TcpError> {
        if self.reached.is_some() {
            let state = "no second Reach";
            return Err(self.conn.wire(WireError::Unexpected { frame: FrameKind::Reach, state }));
        }
        let (reach, memory) = match self.reachable(theirs) {
            Ok((library, metadata, memory)) => (Reach::Able { library, metadata }, Some(memory)),
            Err(why) => {
                tracing::debug!(peer = self.conn.peer(), why, "the receiver cannot read memory here");
                (Reach::Unable { why }, None)
            }
        };
        self.reached = Some(memory.is_some());
        for message in [Some(Message::Reach(reach)), memory.map(Message::Memory)].into_iter().flatten() {
            self.news.extend(message.encode(self.stream).map_err(|e| self.conn.wire(e))?);
        }
        Ok(())
    }

    fn reachable(&self, theirs: Reach) -> Result<(String, Vec<u8>, Memory), String> {
        let exporter = self.shared.config.nixl.as_ref();
        let exporter = exporter.ok_or("the sender runs without NIXL: start its agent with --nixl on")?;
        if self.conn.is_secret() {
            return Err("the connection is inside TLS, and NIXL does not encrypt".to_owned());
        }
        let ours = exporter.release();
        match theirs {
            Reach::Able { library, .. } if library == ours => {}
            Reach::Able { library, .. } => {
                return Err(format!(
                    "the sender has {ours} and the receiver {library}: install the same release"
                ));
            }
            Reach::Unable { why } => return Err(why),
        }
        let (Content::Image { data_start, .. }, Some(open)) = (&self.served.content, self.served.open())
        else {
            return Err("the ticket is of no image, or over".to_owned());
        };
        let found = open.file(0).map(|file| exporter.find(file, *data_start)).transpose();
        match found.map_err(|e| e.to_string())?.flatten() {
            Some((metadata, memory)) => Ok((ours.to_owned(), metadata, memory)),
            None => Err("the sender does not export this image".to_owned()),
        }
    }

    fn acknowledged(&mut self, stripe: u32, verdict: Verdict) {
        self.unacknowledged = self.unacknowledged.saturating_sub(1);
        match verdict {
            Verdict::Good => {
                let bytes = self.served.plan.get(stripe).map_or(0, |s| u64::from(s.bytes));
                self.served.acked.fetch_add(bytes, Ordering::Relaxed);
            }
            Verdict::BadBlock(_) | Verdict::BadStripe => {
                self.served.bad.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(peer = self.conn.peer(), stripe, ?verdict, "the receiver got a bad stripe");
            }
        }
        if self.unacknowledged == 0 {
            *self.open = None;
        }
    }

    /// Whether to leave because the offer is over.
    fn leave(&mut self, over: &Over) -> Result<bool, TcpError> {
        let late = Instant::now() >= over.until;
        if self.unacknowledged > 0 {
            // Its bytes may still be read by the kernel: only a reset ends that.
            let why = over.fault.as_ref().map_or("the transfer is complete", |f| &f.message);
            return if late { Err(self.reset(why)) } else { Ok(false) };
        }
        match &over.fault {
            Some(fault) => {
                self.say(&Message::Error(fault.clone()));
                Ok(true)
            }
            // Another stream said Done; this one's is on its way.
            None => Ok(late),
        }
    }

    fn reset(&self, why: &str) -> TcpError {
        TcpError::Reset { peer: self.conn.peer(), why: why.to_owned() }
    }

    /// Sends a last message if no frame is under way.
    fn say(&mut self, message: &Message) {
        if self.sending.is_none()
            && let Ok(frame) = message.encode(self.stream)
        {
            self.close(&frame);
        }
    }

    fn close(&mut self, frame: &[u8]) {
        self.out.drain(..self.sent);
        self.sent = 0;
        self.out.extend(frame);
        self.conn.farewell(&self.out, LINGER);
        self.ended = true;
    }

    /// How long to wait for the peer; sends a ping when it is due.
    fn patience(&mut self, over: Option<&Over>) -> Result<Duration, TcpError> {
        let config = &self.shared.config;
        let silent = self.alive.elapsed();
        if silent >= config.lost_after {
            let (peer, stage) = (self.conn.peer(), self.conn.stage);
            return Err(TcpError::Silent { peer, stage, after: silent });
        }
        // Inside a frame nothing can be asked; the bytes that the peer takes are its answer.
        let may_ping = !self.pinged && self.sending.is_none();
        if silent >= config.ping_after && may_ping {
            (self.pinged, self.pings) = (true, self.pings + 1);
            let ping = self.serve.ping(self.pings).map_err(|e| self.conn.wire(e))?;
            self.out.extend(ping);
            return Ok(Duration::ZERO);
        }
        let until = if may_ping { config.ping_after } else { config.lost_after };
        let mut nap = until.saturating_sub(silent).clamp(Duration::from_millis(1), Stop::GLANCE * 10);
        if let Some(over) = over {
            nap = nap.min(over.until.saturating_duration_since(Instant::now()));
        }
        Ok(nap)
    }

    /// Writes until a stripe is out or nothing more can be written.
    fn write(&mut self, over: bool) -> Result<Wrote, TcpError> {
        loop {
            // A record of its own for every header would cost more than the bytes in it.
            let gathering =
                self.conn.is_secret() && self.sending.is_some() && self.out.len() < SHORT_RUN as usize;
            if !gathering && !self.flush(over)? {
                return Ok(Wrote::Blocked);
            }
            let Some(sending) = &mut self.sending else {
                self.out.append(&mut self.pongs);
                self.out.append(&mut self.news);
                if !self.out.is_empty() {
                    continue;
                }
                if over || !self.begin()? {
                    return Ok(Wrote::Idle);
                }
                continue;
            };
            if !sending.run.is_empty() {
                if !self.send_run()? {
                    return Ok(Wrote::Blocked);
                }
                continue;
            }
            match sending.runs.next() {
                Some(run) if run.end - run.start < SHORT_RUN => self.gather(run)?,
                Some(run) => sending.run = run,
                None => {
                    self.finish()?;
                    return Ok(Wrote::Stripe);
                }
            }
        }
    }

    /// Sends what is in `out`; whether all of it went.
    fn flush(&mut self, over: bool) -> Result<bool, TcpError> {
        let taken = self.conn.taken();
        let all = self.flush_now(over);
        if self.conn.taken() > taken {
            self.alive();
        }
        all
    }

    fn flush_now(&mut self, over: bool) -> Result<bool, TcpError> {
        while self.sent < self.out.len() {
            let more = self.sending.is_some() || (!over && self.serve.sending().is_some());
            let sent = self.conn.send_now(&self.out[self.sent..], more)?;
            if sent == 0 {
                return Ok(false);
            }
            self.sent += sent;
        }
        self.out.clear();
        self.sent = 0;
        self.conn.drain()
    }

    /// Begins the next claimed stripe; false if there is none, or the memory is gone.
    fn begin(&mut self) -> Result<bool, TcpError> {
        let Some((stripe, passed)) = self.serve.sending() else { return Ok(false) };
        if self.open.is_none() {
            *self.open = self.served.open();
        }
        let Some(open) = self.open.as_ref() else { return Ok(false) };
        let runs = || runs(&self.served.content, &self.served.plan, stripe);
        let payload = match stripe.extent {
            Extent::Blocks { .. } => 0,
            Extent::Bytes { payload, .. } => payload,
        };
        let check = match (&self.served.content, self.served.plan.checks()) {
            (Content::Image { sums, .. }, Checks::BlockSums) => {
                Check::BlockSums(self.served.plan.blocks(&stripe).flatten().map(|b| sums.get(b)).collect())
            }
            (Content::Image { .. }, Checks::Xxh3) | (Content::Payloads, Checks::Xxh3 | Checks::BlockSums) => {
                Check::Xxh3(xxh3(open, payload, runs()).map_err(|e| self.unreadable(e))?)
            }
        };
        // Nothing is left to send of a stripe that the receiver reads.
        let sends = passed < stripe.bytes;
        let left = if sends { runs() } else { Runs { each: Box::new(std::iter::empty()), ahead: None } };
        self.sending = Some(Sending { check, payload, run: 0..0, runs: left });
        self.unacknowledged += 1;
        self.conn.stage = Stage::Data;
        if sends {
            self.out.extend(self.serve.data(stripe.bytes).map_err(|e| self.conn.wire(e))?);
        } else {
            self.served.read.fetch_add(stripe.bytes.into(), Ordering::Relaxed);
        }
        Ok(true)
    }

    fn unreadable(&self, source: std::io::Error) -> TcpError {
        TcpError::Read { ticket: self.served.ticket.id, source }
    }

    /// Sends of the current run by `sendfile`; false if the peer takes no more for now.
    fn send_run(&mut self) -> Result<bool, TcpError> {
        let Some(sending) = &mut self.sending else { return Ok(true) };
        let Some(file) = self.open.as_ref().and_then(|o| o.file(sending.payload)) else {
            return Err(self.unreadable(std::io::ErrorKind::NotFound.into()));
        };
        if self.conn.is_secret() {
            // The kernel cannot encrypt what it sends by itself: the bytes come up here once.
            let count = (sending.run.end - sending.run.start).min(GATHER as u64);
            let at = self.out.len();
            self.out.resize(at + count as usize, 0);
            let read = file.read_exact_at(&mut self.out[at..], sending.run.start);
            sending.run.start += count;
            read.map_err(|e| self.unreadable(e))?;
            self.served.sent.fetch_add(count, Ordering::Relaxed);
            return Ok(true);
        }
        let count = (sending.run.end - sending.run.start).min(MAX_SENDFILE);
        match rustix::fs::sendfile(self.conn.fd(), file, Some(&mut sending.run.start), count as usize) {
            Ok(0) => Err(self.unreadable(std::io::ErrorKind::UnexpectedEof.into())),
            Ok(bytes) => {
                self.served.sent.fetch_add(bytes as u64, Ordering::Relaxed);
                self.alive();
                // Less than asked for means that the buffer is full: waiting is cheaper than asking again.
                Ok(bytes as u64 == count)
            }
            Err(rustix::io::Errno::AGAIN) => Ok(false),
            Err(rustix::io::Errno::INTR) => Ok(true),
            Err(e) => Err(self.conn.io("send", e)),
        }
    }

    /// Copies short runs, `first` and those after it, into `out`.
    fn gather(&mut self, first: Range<u64>) -> Result<(), TcpError> {
        let (Some(sending), Some(open)) = (&mut self.sending, self.open.as_ref()) else { return Ok(()) };
        let (mut run, payload, before) = (first, sending.payload, self.out.len());
        loop {
            let at = self.out.len();
            self.out.resize(at + (run.end - run.start) as usize, 0);
            let read = match open.file(payload) {
                Some(file) => file.read_exact_at(&mut self.out[at..], run.start),
                None => Err(std::io::ErrorKind::NotFound.into()),
            };
            read.map_err(|e| TcpError::Read { ticket: self.served.ticket.id, source: e })?;
            match (self.out.len() < GATHER).then(|| sending.runs.next()).flatten() {
                Some(next) if next.end - next.start < SHORT_RUN => run = next,
                Some(long) => {
                    sending.run = long;
                    break;
                }
                None => break,
            }
        }
        self.served.sent.fetch_add((self.out.len() - before) as u64, Ordering::Relaxed);
        Ok(())
    }

    /// All bytes of the stripe are out: its sums follow.
    fn finish(&mut self) -> Result<(), TcpError> {
        let Some(sending) = self.sending.take() else { return Ok(()) };
        self.out.append(&mut self.pongs);
        self.out.append(&mut self.news);
        self.out.extend(self.serve.end(sending.check).map_err(|e| self.conn.wire(e))?);
        self.conn.stage = Stage::Verify;
        self.flush(false)?;
        Ok(())
    }
}

/// The byte runs of a stripe in its file, neighbours merged.
struct Runs<'a> {
    each: Box<dyn Iterator<Item = Range<u64>> + 'a>,
    ahead: Option<Range<u64>>,
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let mut run = self.ahead.take().or_else(|| self.each.next())?;
        for next in self.each.by_ref() {
            if next.start != run.end {
                self.ahead = Some(next);
                break;
            }
            run.end = next.end;
        }
        Some(run)
    }
}

fn runs<'a>(content: &'a Content, plan: &'a StripePlan, stripe: Stripe) -> Runs<'a> {
    let each: Box<dyn Iterator<Item = Range<u64>> + 'a> = match (content, stripe.extent) {
        (Content::Image { manifest, data_start, .. }, Extent::Blocks { .. }) => {
            Box::new(block_runs(manifest, *data_start, plan, stripe))
        }
        (Content::Payloads, Extent::Bytes { offset, len, .. }) => {
            Box::new(std::iter::once(offset..offset + u64::from(len)))
        }
        // The plan is of the ticket, and the ticket's mode fits the content.
        (Content::Image { .. }, Extent::Bytes { .. }) | (Content::Payloads, Extent::Blocks { .. }) => {
            Box::new(std::iter::empty())
        }
    };
    Runs { each, ahead: None }
}

fn block_runs<'a>(
    manifest: &'a Manifest,
    data_start: u64,
    plan: &'a StripePlan,
    stripe: Stripe,
) -> impl Iterator<Item = Range<u64>> + 'a {
    let blocks = plan.blocks(&stripe).flatten().filter_map(|b| manifest.cuts().block(b).ok());
    blocks.flat_map(|b| manifest.byte_runs(&b)).map(move |r| data_start + r.start..data_start + r.end)
}

/// XXH3 of what is about to be sent.
fn xxh3(open: &Open, payload: u32, runs: Runs<'_>) -> std::io::Result<u64> {
    let file = open.file(payload).ok_or(std::io::ErrorKind::NotFound)?;
    let (mut hash, mut buffer) = (Xxh3::new(), vec![0; GATHER]);
    for mut run in runs {
        while !run.is_empty() {
            let bytes = (run.end - run.start).min(GATHER as u64);
            let piece = &mut buffer[..bytes as usize];
            file.read_exact_at(piece, run.start)?;
            hash.update(piece);
            run.start += bytes;
        }
    }
    Ok(hash.digest())
}
