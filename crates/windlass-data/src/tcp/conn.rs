//! One connection: a socket, the bytes read ahead of it, and waits that end.
//!
//! Both ends use it for handshakes and headers. Payload never passes through its buffer but for the few bytes
//! that a read for a header happened to bring along. Where the connection is inside TLS, a [`Session`] stands between it
//! and the socket: whoever waits for a socket asks the connection, which may have bytes that no socket tells of.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use windlass_core::wire::{FrameKind, HEADER_LEN, Header, Stage, WireError, decode_header};

use super::TcpError;
use super::secret::{Session, Trouble};
use crate::stop::Stop;
use crate::tls::TlsError;

/// Bytes read ahead at most. Holds any frame of a receiver, and what follows a stripe in the common case.
const READ_AHEAD: usize = 4096;

/// What a poll found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    pub(super) readable: bool,
    pub(super) writable: bool,
}

/// Waits until `fd` is ready or `wake` is readable, at most for `timeout`. Errors and hang-ups count as both,
/// so that the next call finds out.
pub(super) fn wait(
    fd: BorrowedFd<'_>,
    write: bool,
    wake: Option<BorrowedFd<'_>>,
    timeout: Duration,
) -> io::Result<Ready> {
    let events = if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    let mut fds = [
        PollFd::from_borrowed_fd(fd, events),
        PollFd::from_borrowed_fd(wake.unwrap_or(fd), if wake.is_some() { PollFlags::IN } else { events }),
    ];
    let fds = if wake.is_some() { &mut fds[..] } else { &mut fds[..1] };
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    match poll(fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    let got = fds[0].revents();
    let broken = got.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL);
    Ok(Ready {
        readable: broken || got.contains(PollFlags::IN),
        writable: broken || got.contains(PollFlags::OUT),
    })
}

fn is_pause(error: rustix::io::Errno) -> bool {
    error == rustix::io::Errno::AGAIN || error == rustix::io::Errno::INTR
}

/// A connection.
#[derive(Debug)]
pub(super) struct Conn {
    socket: Arc<TcpStream>,
    name: String,
    buffer: Box<[u8; READ_AHEAD]>,
    start: usize,
    end: usize,
    tls: Option<Box<Session>>,
    /// Bytes that the socket has taken, without TLS.
    taken: u64,
    /// When the last byte came.
    pub(super) heard: Instant,
    /// How far the transfer is, for errors.
    pub(super) stage: Stage,
}

impl Conn {
    /// `name` is how errors call the peer.
    pub(super) fn new(socket: Arc<TcpStream>, name: String) -> Conn {
        let buffer = Box::new([0; READ_AHEAD]);
        let stage = Stage::Handshake;
        Conn { socket, name, buffer, start: 0, end: 0, tls: None, taken: 0, heard: Instant::now(), stage }
    }

    /// Puts the connection inside TLS: from here on every byte is. Ends when both sides agree, before `by`.
    pub(super) fn secure_by(
        &mut self,
        tls: impl Into<rustls::Connection>,
        protocol: &[u8],
        by: &By<'_>,
    ) -> Result<(), TcpError> {
        self.tls = Some(Box::new(Session::new(tls)));
        while let Some(tls) = self.tls.as_mut().filter(|tls| tls.is_handshaking()) {
            let went = tls
                .drain(&self.socket)
                .and_then(|drained| Ok((drained, tls.advance(&self.socket, false, &mut self.heard)?)));
            if let (drained, None) = went.map_err(|e| self.trouble("shake hands", e))? {
                let nap = by.nap(self)?;
                self.wait(!drained, None, nap)?;
            }
        }
        let spoken = self.tls.as_ref().and_then(|tls| tls.protocol());
        if spoken != Some(protocol) {
            let source = rustls::Error::NoApplicationProtocol;
            return Err(self.trouble("shake hands", Trouble::Tls(source)));
        }
        self.send_by(&[], by)
    }

    /// Whether it is inside TLS.
    pub(super) fn is_secret(&self) -> bool {
        self.tls.is_some()
    }

    /// Bytes that the peer's host has taken, so far.
    pub(super) fn taken(&self) -> u64 {
        self.tls.as_ref().map_or(self.taken, |tls| tls.taken)
    }

    /// Waits until there is something to read, or room to write if `write`, or `wake` is readable.
    pub(super) fn wait(
        &self,
        write: bool,
        wake: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<Ready, TcpError> {
        if self.tls.as_ref().is_some_and(|tls| tls.is_pending()) {
            return Ok(Ready { readable: true, writable: false });
        }
        wait(self.fd(), write, wake, timeout).map_err(|e| self.io("wait", e))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    pub(super) fn peer(&self) -> String {
        self.name.clone()
    }

    pub(super) fn io(&self, doing: &'static str, source: impl Into<io::Error>) -> TcpError {
        TcpError::Io { peer: self.peer(), stage: self.stage, doing, source: source.into() }
    }

    pub(super) fn wire(&self, source: WireError) -> TcpError {
        TcpError::Wire { peer: self.peer(), stage: self.stage, source }
    }

    fn closed(&self) -> TcpError {
        TcpError::Closed { peer: self.peer(), stage: self.stage }
    }

    fn trouble(&self, doing: &'static str, trouble: Trouble) -> TcpError {
        match trouble {
            Trouble::Closed => self.closed(),
            Trouble::Io(source) => self.io(doing, source),
            Trouble::Tls(source) => self.tls(source),
        }
    }

    pub(super) fn tls(&self, source: rustls::Error) -> TcpError {
        let source = Box::new(TlsError::of(&self.name, source));
        TcpError::Tls { peer: self.peer(), stage: self.stage, source }
    }

    /// Bytes that were read ahead.
    pub(super) fn ahead(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Drops bytes that were read ahead and have been used.
    pub(super) fn used(&mut self, bytes: usize) {
        self.start = (self.start + bytes).min(self.end);
    }

    /// Reads once into the buffer. `None`: nothing came, within the socket's timeout if `block`.
    pub(super) fn read_ahead(&mut self, block: bool) -> Result<Option<usize>, TcpError> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if let Some(tls) = &mut self.tls {
            let read = tls.read(&self.socket, &mut self.buffer[self.end..], block, &mut self.heard);
            let read = read.map_err(|e| self.trouble("receive", e))?;
            self.end += read.unwrap_or(0);
            return Ok(read);
        }
        let flags = if block { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        match recv(&self.socket, &mut self.buffer[self.end..], flags) {
            Ok((_, 0)) => Err(self.closed()),
            Ok((_, bytes)) => {
                self.end += bytes;
                self.heard = Instant::now();
                Ok(Some(bytes))
            }
            Err(e) if is_pause(e) => Ok(None),
            Err(e) => Err(self.io("receive", e)),
        }
    }

    /// Reads into `into`, first what was read ahead; says how many bytes. `None`: nothing came within the
    /// socket's timeout.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, TcpError> {
        let ahead = self.ahead();
        if !ahead.is_empty() {
            let bytes = ahead.len().min(into.len());
            into[..bytes].copy_from_slice(&ahead[..bytes]);
            self.used(bytes);
            return Ok(Some(bytes));
        }
        if let Some(tls) = &mut self.tls {
            let read = tls.read(&self.socket, into, true, &mut self.heard);
            return read.map_err(|e| self.trouble("receive", e));
        }
        match recv(&self.socket, &mut *into, RecvFlags::WAITALL) {
            Ok((_, 0)) => Err(self.closed()),
            Ok((_, bytes)) => {
                self.heard = Instant::now();
                Ok(Some(bytes))
            }
            Err(e) if is_pause(e) => Ok(None),
            Err(e) => Err(self.io("receive", e)),
        }
    }

    /// Takes the next header from what was read ahead; `None` if more bytes are needed.
    pub(super) fn header(&mut self) -> Result<Option<Header>, TcpError> {
        let header = decode_header(self.ahead()).map_err(|e| self.wire(e))?;
        if header.is_some() {
            self.used(HEADER_LEN);
        }
        Ok(header)
    }

    /// Sends without waiting; says how many bytes went. `more` keeps a small packet back for what follows. With TLS
    /// some of what went may still be here: see [`Conn::drain`].
    pub(super) fn send_now(&mut self, bytes: &[u8], more: bool) -> Result<usize, TcpError> {
        if let Some(tls) = &mut self.tls {
            return tls.write(&self.socket, bytes).map_err(|e| self.trouble("send", e));
        }
        let more = if more { SendFlags::MORE } else { SendFlags::empty() };
        match send(&self.socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT | more) {
            Ok(sent) => {
                self.taken += sent as u64;
                Ok(sent)
            }
            Err(e) if is_pause(e) => Ok(0),
            Err(e) => Err(self.io("send", e)),
        }
    }

    /// Sends what is encrypted and not yet gone, without waiting; whether all of it went. Without TLS there is none.
    pub(super) fn drain(&mut self) -> Result<bool, TcpError> {
        let Some(tls) = &mut self.tls else { return Ok(true) };
        tls.drain(&self.socket).map_err(|e| self.trouble("send", e))
    }

    /// Sends all of `bytes` before `until`, which is `limit` after the beginning of what is being done.
    pub(super) fn send_by(&mut self, mut bytes: &[u8], by: &By<'_>) -> Result<(), TcpError> {
        loop {
            if !bytes.is_empty() {
                bytes = &bytes[self.send_now(bytes, false)?..];
            }
            if bytes.is_empty() && self.drain()? {
                return Ok(());
            }
            let nap = by.nap(self)?;
            // Not `Conn::wait`: bytes that can be read make no room.
            wait(self.fd(), true, None, nap).map_err(|e| self.io("wait", e))?;
        }
    }

    /// Reads a frame of a handshake or of what follows it: any but `Data`. Only the body of `Reach` may be longer than what is
    /// read ahead.
    pub(super) fn frame_by(&mut self, by: &By<'_>) -> Result<(Header, Vec<u8>), TcpError> {
        let (mut header, mut body) = (None, Vec::new());
        loop {
            if header.is_none() {
                header = self.header()?;
            }
            if let Some(header) = header {
                let len = header.body_len as usize;
                if header.kind == FrameKind::Data || (len > READ_AHEAD && header.kind != FrameKind::Reach) {
                    let error = WireError::Unexpected { frame: header.kind, state: "a handshake" };
                    return Err(self.wire(error));
                }
                let some = self.ahead().len().min(len - body.len());
                body.extend(&self.ahead()[..some]);
                self.used(some);
                if body.len() == len {
                    return Ok((header, body));
                }
            }
            if self.read_ahead(false)?.is_none() {
                let nap = by.nap(self)?;
                self.wait(false, None, nap)?;
            }
        }
    }

    /// Says the last word: sends `frame` if it goes out at once, then waits a little for the peer to close, so
    /// that a reset for bytes still unread here does not overtake it.
    pub(super) fn farewell(&mut self, frame: &[u8], linger: Duration) {
        let (stop, until) = (Stop::never(), Instant::now() + linger);
        let by = By { until, limit: linger, what: "the last frame", stop: &stop };
        if self.send_by(frame, &by).is_err() {
            return;
        }
        if let Some(tls) = &mut self.tls {
            tls.close(&self.socket);
        }
        if self.socket.shutdown(std::net::Shutdown::Write).is_err() {
            return;
        }
        let mut scrap = 0;
        while scrap < 1 << 20 && Instant::now() < until {
            self.used(READ_AHEAD);
            match self.read_ahead(false) {
                Ok(Some(bytes)) => scrap += bytes,
                Ok(None) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if self.wait(false, None, left).is_err() {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }
}

/// When something must be over.
#[derive(Debug)]
pub(super) struct By<'a> {
    pub(super) until: Instant,
    /// The time that was given, for the error.
    pub(super) limit: Duration,
    pub(super) what: &'static str,
    pub(super) stop: &'a Stop,
}

impl By<'_> {
    /// How long to sleep before looking again.
    pub(super) fn nap(&self, conn: &Conn) -> Result<Duration, TcpError> {
        self.stop.check()?;
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(TcpError::TooSlow {
                peer: conn.peer(),
                stage: conn.stage,
                what: self.what,
                after: self.limit,
            });
        }
        Ok(left.min(Stop::GLANCE))
    }
}
