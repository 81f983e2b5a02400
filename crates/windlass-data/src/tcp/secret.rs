//! TLS on one connection: what was encrypted and not yet sent, what came and is not yet decrypted.
//!
//! Owns: [`Session`], which [`super::conn`] asks to read and write where the connection is inside TLS. It never waits
//! longer than the socket does. Must not: know frames, or treat the end of the connection as the end of a transfer: the
//! protocol above says when it is done, so that a connection cut short is an error with TLS as without.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Instant;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};
use rustls::Connection;

use crate::stop::Stop;

/// Bytes taken from the socket at a time.
const TAKE: usize = 64 << 10;
/// Bytes that are encrypted ahead of what the peer takes.
const AHEAD: usize = 256 << 10;

/// Why nothing came or went.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The peer closed the connection.
    Closed,
    Io(io::Error),
    Tls(rustls::Error),
}

/// One side of TLS.
pub(super) struct Session {
    tls: Connection,
    /// Bytes from the socket, and which of them are not yet looked at.
    came: Box<[u8]>,
    start: usize,
    end: usize,
    /// Decrypted bytes that nobody has read.
    plain: usize,
    /// Bytes that the socket has taken.
    pub(super) taken: u64,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("plain", &self.plain).finish_non_exhaustive()
    }
}

fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Writes to a socket without waiting.
struct Out<'a> {
    socket: &'a TcpStream,
    taken: &'a mut u64,
}

const SEND: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

impl io::Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = send(self.socket, bytes, SEND)?;
        *self.taken += sent as u64;
        Ok(sent)
    }

    fn write_vectored(&mut self, bytes: &[io::IoSlice<'_>]) -> io::Result<usize> {
        let sent = sendmsg(self.socket, bytes, &mut SendAncillaryBuffer::default(), SEND)?;
        *self.taken += sent as u64;
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Session {
    pub(super) fn new(tls: impl Into<Connection>) -> Session {
        let mut tls = tls.into();
        tls.set_buffer_limit(Some(AHEAD));
        Session { tls, came: vec![0; TAKE].into(), start: 0, end: 0, plain: 0, taken: 0 }
    }

    pub(super) fn is_handshaking(&self) -> bool {
        self.tls.is_handshaking()
    }

    /// The protocol that both sides named.
    pub(super) fn protocol(&self) -> Option<&[u8]> {
        self.tls.alpn_protocol()
    }

    /// Whether a read has something to look at before the socket does.
    pub(super) fn is_pending(&self) -> bool {
        self.plain > 0 || self.start < self.end
    }

    /// Reads decrypted bytes. `None`: none came, within the socket's timeout if `block`.
    pub(super) fn read(
        &mut self,
        socket: &TcpStream,
        into: &mut [u8],
        block: bool,
        heard: &mut Instant,
    ) -> Result<Option<usize>, Trouble> {
        if into.is_empty() {
            return Ok(None);
        }
        let began = Instant::now();
        loop {
            match self.tls.reader().read(into) {
                Ok(0) => return Err(Trouble::Closed),
                Ok(bytes) => {
                    self.plain = self.plain.saturating_sub(bytes);
                    return Ok(Some(bytes));
                }
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(Trouble::Closed),
                Err(e) if is_pause(&e) => {}
                Err(e) => return Err(Trouble::Io(e)),
            }
            // Whoever sends one byte of a record at a time must not keep the caller from looking around.
            if self.advance(socket, block, heard)?.is_none() || began.elapsed() > Stop::GLANCE {
                return Ok(None);
            }
        }
    }

    /// Takes bytes from the socket and decrypts them, also those of a handshake. `None`: nothing came.
    pub(super) fn advance(
        &mut self,
        socket: &TcpStream,
        block: bool,
        heard: &mut Instant,
    ) -> Result<Option<()>, Trouble> {
        if self.start == self.end {
            let flags = if block { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
            match recv(socket, &mut *self.came, flags) {
                Ok((_, 0)) => return Err(Trouble::Closed),
                Ok((_, bytes)) => (self.start, self.end) = (0, bytes),
                Err(e) if is_pause(&e.into()) => return Ok(None),
                Err(e) => return Err(Trouble::Io(e.into())),
            }
            *heard = Instant::now();
        }
        // A record at a time: what is decrypted is read before more is.
        while self.start < self.end && self.plain == 0 {
            let mut rest = &self.came[self.start..self.end];
            let taken = self.tls.read_tls(&mut rest).map_err(Trouble::Io)?;
            self.start += taken;
            match self.tls.process_new_packets() {
                Ok(state) => self.plain = state.plaintext_bytes_to_read(),
                Err(error) => {
                    // The alert that says so, if it goes out at once.
                    let _ = self.drain(socket);
                    return Err(Trouble::Tls(error));
                }
            }
            if taken == 0 {
                return Err(Trouble::Closed);
            }
        }
        self.drain(socket)?;
        Ok(Some(()))
    }

    /// Encrypts some of `bytes`, and sends what the peer takes; says how many were encrypted. None are while the peer
    /// has not taken what was encrypted before.
    pub(super) fn write(&mut self, socket: &TcpStream, bytes: &[u8]) -> Result<usize, Trouble> {
        if !self.drain(socket)? {
            return Ok(0);
        }
        let written = self.tls.writer().write(bytes).map_err(Trouble::Io)?;
        self.drain(socket)?;
        Ok(written)
    }

    /// Sends what is encrypted; whether the peer has taken all of it.
    pub(super) fn drain(&mut self, socket: &TcpStream) -> Result<bool, Trouble> {
        while self.tls.wants_write() {
            let mut out = Out { socket, taken: &mut self.taken };
            match self.tls.write_tls(&mut out) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if is_pause(&e) => return Ok(false),
                Err(e) => return Err(Trouble::Io(e)),
            }
        }
        Ok(true)
    }

    /// Says that nothing more will be sent.
    pub(super) fn close(&mut self, socket: &TcpStream) {
        self.tls.send_close_notify();
        let _ = self.drain(socket);
    }
}
