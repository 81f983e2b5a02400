//! Tests of the protocol, by part.

mod claims;
mod frames;
mod golden;
mod handshakes;
mod streams;
mod tickets;

use super::{Challenged, Dial, Greeted, Header, Nonce, Proved, Receiver, Sender, SourceId, StreamId};
use super::{HEADER_LEN, ProofSent, TicketId, TicketKey, decode_header};

/// Splits an encoded frame.
fn split(frame: &[u8]) -> (Header, &[u8]) {
    (decode_header(frame).unwrap().unwrap(), &frame[HEADER_LEN..])
}

fn key() -> TicketKey {
    TicketKey::new(std::array::from_fn(|i| i as u8))
}

fn dial(stream: StreamId) -> Dial {
    Dial { ticket: TicketId([0xa5; 16]), key: key(), source: SourceId(0), stream, nonce: Nonce([7; 32]) }
}

/// A handshake up to the receiver's proof; the last item is the `Proof` frame.
fn half(dial: Dial, sender_nonce: Nonce) -> (ProofSent, Challenged, Vec<u8>) {
    let (sent, hello) = dial.hello().unwrap();
    let (header, body) = split(&hello);
    let (challenged, challenge) =
        Greeted::read(&header, body).unwrap().challenge(key(), sender_nonce).unwrap();
    let (header, body) = split(&challenge);
    let (proof_sent, proof) = sent.challenge(&header, body).unwrap();
    (proof_sent, challenged, proof)
}

/// A whole handshake.
fn shake(dial: Dial, window: u16) -> (Proved<Receiver>, Proved<Sender>) {
    let (proof_sent, challenged, proof) = half(dial, Nonce([9; 32]));
    let (header, body) = split(&proof);
    let (sender, accept) = challenged.proof(&header, body, window).unwrap();
    let (header, body) = split(&accept);
    (proof_sent.accept(&header, body).unwrap(), sender)
}
