//! Proof that both ends of a connection have the ticket's key.
//!
//! Four frames, each a step from one type to the next, so that steps cannot be left out or swapped:
//!
//! ```text
//! receiver                                   sender
//! Dial::hello ──────────── Hello ─────────►  Greeted::read
//! HelloSent::challenge ◄── Challenge ──────  Greeted::challenge
//!              ─────────── Proof ─────────►  Challenged::proof
//! ProofSent::accept ◄───── Accept ─────────
//! Proved<Receiver>                           Proved<Sender>
//! ```
//!
//! A [`Proved`] cannot be made in any other way, and streams are made from it only. [The specification](super) lays out
//! the bytes that the proof covers. The nonces must come from a secure source of random bytes, fresh
//! for every connection.

use std::marker::PhantomData;

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;

use super::bytes::{Mac, Nonce, TicketId, TicketKey};
use super::frame::{FrameKind, Header, ProtocolVersion, StreamId};
use super::message::{Hello, Message, Refusal};
use super::ticket::SourceId;
use super::{MAX_WINDOW, WireError};
use crate::error::Kind;

/// The side that fetches.
#[derive(Debug)]
pub enum Receiver {}
/// The side that serves.
#[derive(Debug)]
pub enum Sender {}

/// A connection whose two ends have proved themselves to each other.
#[derive(Debug)]
pub struct Proved<Side> {
    ticket: TicketId,
    source: SourceId,
    stream: StreamId,
    window: u16,
    minor: u8,
    side: PhantomData<Side>,
}

impl<Side> Proved<Side> {
    /// The ticket that was proved.
    pub fn ticket(&self) -> TicketId {
        self.ticket
    }

    /// The source that serves this connection.
    pub fn source(&self) -> SourceId {
        self.source
    }

    /// The stream that was proved.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// How many claims may be open at a time.
    pub fn window(&self) -> u16 {
        self.window
    }

    /// The minor version to use: the lower of the two.
    pub fn minor(&self) -> u8 {
        self.minor
    }
}

/// All that a proof covers.
#[derive(Clone, Copy, Debug)]
struct Transcript {
    hello: Hello,
    stream: StreamId,
    receiver_minor: u8,
    sender_minor: u8,
    challenge: Nonce,
}

#[derive(Clone, Copy)]
enum Role {
    Receiver,
    Sender,
}

impl Role {
    const fn name(self) -> &'static str {
        match self {
            Role::Receiver => "receiver",
            Role::Sender => "sender",
        }
    }

    const fn label(self) -> &'static [u8; 24] {
        match self {
            Role::Receiver => b"windlass-wire-receiver\0\0",
            Role::Sender => b"windlass-wire-sender\0\0\0\0",
        }
    }
}

impl Transcript {
    fn hmac(&self, key: &TicketKey, role: Role) -> Hmac<Sha256> {
        // HMAC pads a short key with zeros to the block of its hash; doing it here leaves no error to handle.
        let mut block = [0; 64];
        block[..32].copy_from_slice(key.secret());
        let mut mac = Hmac::<Sha256>::new(&block.into());
        mac.update(role.label());
        mac.update(&[ProtocolVersion::CURRENT.major, self.receiver_minor, self.sender_minor, 0]);
        mac.update(&self.stream.index.to_le_bytes());
        mac.update(&self.stream.epoch.to_le_bytes());
        mac.update(&self.hello.source.0.to_le_bytes());
        mac.update(&self.hello.ticket.0);
        mac.update(&self.hello.nonce.0);
        mac.update(&self.challenge.0);
        mac
    }

    fn prove(&self, key: &TicketKey, role: Role) -> Mac {
        Mac(self.hmac(key, role).finalize().into_bytes().into())
    }

    /// In constant time.
    fn verify(&self, key: &TicketKey, role: Role, proof: &Mac) -> Result<(), WireError> {
        self.hmac(key, role).verify_slice(&proof.0).map_err(|_| WireError::Proof {
            role: role.name(),
            ticket: self.hello.ticket,
            stream: self.stream,
        })
    }

    fn proved<Side>(&self, window: u16) -> Proved<Side> {
        Proved {
            ticket: self.hello.ticket,
            source: self.hello.source,
            stream: self.stream,
            window,
            minor: self.receiver_minor.min(self.sender_minor),
            side: PhantomData,
        }
    }
}

/// Decodes a frame of a handshake. A refusal or a fault of the peer is always an error.
fn answer(
    stream: Option<StreamId>,
    header: &Header,
    body: &[u8],
    state: &'static str,
) -> Result<Message, WireError> {
    // `Data` may be long and carries no message; it is never decoded here.
    if header.kind == FrameKind::Data {
        return Err(WireError::Unexpected { frame: header.kind, state });
    }
    let message = Message::decode(header, body)?;
    // A refusal may be sent before the sender could read which stream it is, so its stream does not count.
    if let Message::Refuse(refusal) = message {
        return Err(WireError::Refused(refusal));
    }
    if let Message::Error(fault) = message {
        return Err(WireError::Peer(fault));
    }
    match stream {
        Some(ours) if ours != header.stream => Err(WireError::WrongStream { ours, theirs: header.stream }),
        Some(_) | None => Ok(message),
    }
}

/// Receiver: about to say hello.
#[derive(Debug)]
pub struct Dial {
    pub ticket: TicketId,
    pub key: TicketKey,
    /// The source that is dialled.
    pub source: SourceId,
    /// The stream, under an epoch not used before.
    pub stream: StreamId,
    /// A fresh random number.
    pub nonce: Nonce,
}

impl Dial {
    /// The `Hello` frame to send.
    pub fn hello(self) -> Result<(HelloSent, Vec<u8>), WireError> {
        let hello = Hello { ticket: self.ticket, source: self.source, nonce: self.nonce };
        let frame = Message::Hello(hello).encode(self.stream)?;
        Ok((HelloSent { hello, key: self.key, stream: self.stream }, frame))
    }
}

/// Receiver: waits for `Challenge`.
#[derive(Debug)]
pub struct HelloSent {
    hello: Hello,
    key: TicketKey,
    stream: StreamId,
}

impl HelloSent {
    /// Takes the answer to `Hello`; gives the `Proof` frame to send.
    pub fn challenge(self, header: &Header, body: &[u8]) -> Result<(ProofSent, Vec<u8>), WireError> {
        let state = "Challenge";
        let Message::Challenge(challenge) = answer(Some(self.stream), header, body, state)? else {
            return Err(WireError::Unexpected { frame: header.kind, state });
        };
        let transcript = Transcript {
            hello: self.hello,
            stream: self.stream,
            receiver_minor: ProtocolVersion::CURRENT.minor,
            sender_minor: header.version.minor,
            challenge,
        };
        let proof = transcript.prove(&self.key, Role::Receiver);
        let frame = Message::Proof(proof).encode(self.stream)?;
        Ok((ProofSent { transcript, key: self.key }, frame))
    }
}

/// Receiver: waits for `Accept`.
#[derive(Debug)]
pub struct ProofSent {
    transcript: Transcript,
    key: TicketKey,
}

impl ProofSent {
    /// Takes the answer to `Proof` and checks the sender's own.
    pub fn accept(self, header: &Header, body: &[u8]) -> Result<Proved<Receiver>, WireError> {
        let state = "Accept";
        let stream = self.transcript.stream;
        let Message::Accept { proof, window } = answer(Some(stream), header, body, state)? else {
            return Err(WireError::Unexpected { frame: header.kind, state });
        };
        self.transcript.verify(&self.key, Role::Sender, &proof)?;
        check_window(window)?;
        Ok(self.transcript.proved(window))
    }
}

/// Sender: has read `Hello` and looks for the ticket.
#[derive(Debug)]
pub struct Greeted {
    hello: Hello,
    stream: StreamId,
    receiver_minor: u8,
}

impl Greeted {
    /// Takes the first frame of a connection.
    pub fn read(header: &Header, body: &[u8]) -> Result<Greeted, WireError> {
        let state = "Hello";
        let Message::Hello(hello) = answer(None, header, body, state)? else {
            return Err(WireError::Unexpected { frame: header.kind, state });
        };
        Ok(Greeted { hello, stream: header.stream, receiver_minor: header.version.minor })
    }

    /// The ticket that the peer names. If it is unknown, refuse with [`WireError::UnknownTicket`].
    pub fn ticket(&self) -> TicketId {
        self.hello.ticket
    }

    /// The source that the peer believes it talks to. Refuse the connection if this process is another.
    pub fn source(&self) -> SourceId {
        self.hello.source
    }

    /// The stream that the peer names.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// The `Challenge` frame to send, given the key of the ticket.
    pub fn challenge(self, key: TicketKey, nonce: Nonce) -> Result<(Challenged, Vec<u8>), WireError> {
        let transcript = Transcript {
            hello: self.hello,
            stream: self.stream,
            receiver_minor: self.receiver_minor,
            sender_minor: ProtocolVersion::CURRENT.minor,
            challenge: nonce,
        };
        let frame = Message::Challenge(nonce).encode(self.stream)?;
        Ok((Challenged { transcript, key }, frame))
    }
}

/// Sender: waits for `Proof`.
#[derive(Debug)]
pub struct Challenged {
    transcript: Transcript,
    key: TicketKey,
}

impl Challenged {
    /// Takes the answer to `Challenge` and checks it; gives the `Accept` frame to send.
    pub fn proof(
        self,
        header: &Header,
        body: &[u8],
        window: u16,
    ) -> Result<(Proved<Sender>, Vec<u8>), WireError> {
        check_window(window)?;
        let state = "Proof";
        let stream = self.transcript.stream;
        let Message::Proof(proof) = answer(Some(stream), header, body, state)? else {
            return Err(WireError::Unexpected { frame: header.kind, state });
        };
        self.transcript.verify(&self.key, Role::Receiver, &proof)?;
        let proof = self.transcript.prove(&self.key, Role::Sender);
        let frame = Message::Accept { proof, window }.encode(stream)?;
        Ok((self.transcript.proved(window), frame))
    }
}

fn check_window(window: u16) -> Result<(), WireError> {
    if (1..=MAX_WINDOW).contains(&window) {
        Ok(())
    } else {
        Err(WireError::Window { window, max: MAX_WINDOW })
    }
}

/// The `Refuse` frame for a handshake that failed with `error`. Names both versions if they are the reason.
/// A wrong proof and an unknown ticket get the same message, so that a peer cannot tell them apart.
pub fn refuse(error: &WireError, stream: StreamId) -> Result<Vec<u8>, WireError> {
    let ours = ProtocolVersion::CURRENT;
    let theirs = if let WireError::Version { theirs, .. } = error { *theirs } else { ours };
    let refusal = if matches!(error.kind(), Kind::Denied | Kind::NotFound) {
        let message = "the ticket is unknown here, or its key was not proved".to_owned();
        Refusal { kind: Kind::Denied, ours, theirs, message }
    } else {
        Refusal { kind: error.kind(), ours, theirs, message: error.to_string() }
    };
    Message::Refuse(refusal).encode(stream)
}
