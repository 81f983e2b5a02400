//! Vectors in `testdata/wire`. Frames and handshake are made by `testdata/wire.py`, a second implementation of
//! the specification; the tickets are only read and written here.

use serde::Deserialize;
use serde_json::Value;

use super::super::*;
use super::split;
use crate::hex::unhex;

const FRAMES: &str = include_str!("../../../../../testdata/wire/frames.json");
const HANDSHAKE: &str = include_str!("../../../../../testdata/wire/handshake.json");
const TICKET_FULL: &str = include_str!("../../../../../testdata/wire/ticket_full.json");
const TICKET_DELTA: &str = include_str!("../../../../../testdata/wire/ticket_delta.json");
const TICKET_CONTEXT: &str = include_str!("../../../../../testdata/wire/ticket_context.json");

#[derive(Deserialize)]
struct Vector {
    name: String,
    hex: String,
    header: Value,
    message: Value,
}

#[test]
fn golden_frames_decode_and_encode() {
    let vectors: Vec<Vector> = serde_json::from_str(FRAMES).unwrap();
    let mut seen = Vec::new();
    for Vector { name, hex, header, message } in vectors {
        let bytes = unhex(&hex);
        for cut in 0..bytes.len() {
            assert_eq!(decode_frame(&bytes[..cut]), Ok(None), "{name} cut at {cut}");
        }
        let (frame, used) = decode_frame(&bytes).unwrap().unwrap();
        assert_eq!(used, bytes.len(), "{name}");
        let again = match frame {
            Frame::Data(h, payload) => {
                assert_eq!((serde_json::to_value(h).unwrap(), payload), (header, &b"sixteen bytes..."[..]));
                seen.push(h.kind);
                [&h.encode(), payload].concat()
            }
            Frame::Message(h, m) => {
                assert_eq!(serde_json::to_value(h).unwrap(), header, "{name}");
                assert_eq!(serde_json::to_value(&m).unwrap(), message, "{name}");
                seen.push(h.kind);
                let own = m.encode(h.stream).unwrap();
                [&h.encode(), &own[HEADER_LEN..]].concat()
            }
        };
        assert_eq!(again, bytes, "{name}");
    }
    assert!(FrameKind::ALL.iter().all(|kind| seen.contains(kind)), "a kind has no vector");
}

#[derive(Deserialize)]
struct Shake {
    key: TicketKey,
    ticket: TicketId,
    source: SourceId,
    stream: Stream,
    window: u16,
    receiver_nonce: Nonce,
    sender_nonce: Nonce,
    receiver_proof: Mac,
    sender_proof: Mac,
    frames: [String; 4],
}

#[derive(Deserialize)]
struct Stream {
    index: u16,
    epoch: u16,
}

#[test]
fn golden_handshake_gives_the_same_frames_and_proofs() {
    let v: Shake = serde_json::from_str(HANDSHAKE).unwrap();
    let frames = v.frames.each_ref().map(|f| unhex(f));
    let stream = StreamId { index: v.stream.index, epoch: v.stream.epoch };
    let dial =
        Dial { ticket: v.ticket, key: v.key.clone(), source: v.source, stream, nonce: v.receiver_nonce };
    let (sent, hello) = dial.hello().unwrap();
    assert_eq!(hello, frames[0]);
    let (header, body) = split(&hello);
    let (challenged, challenge) =
        Greeted::read(&header, body).unwrap().challenge(v.key, v.sender_nonce).unwrap();
    assert_eq!(challenge, frames[1]);
    let (header, body) = split(&challenge);
    let (proof_sent, proof) = sent.challenge(&header, body).unwrap();
    assert_eq!((&proof, &proof[HEADER_LEN..]), (&frames[2], &v.receiver_proof.0[..]));
    let (header, body) = split(&proof);
    let (_, accept) = challenged.proof(&header, body, v.window).unwrap();
    assert_eq!((&accept, &accept[HEADER_LEN..HEADER_LEN + 32]), (&frames[3], &v.sender_proof.0[..]));
    let (header, body) = split(&accept);
    proof_sent.accept(&header, body).unwrap();
}

#[test]
fn golden_tickets_read_and_write() {
    for text in [TICKET_FULL, TICKET_DELTA, TICKET_CONTEXT] {
        let ticket = Ticket::from_json(text.as_bytes()).unwrap();
        let written: Value = serde_json::from_str(&ticket.to_json().unwrap()).unwrap();
        assert_eq!(written, serde_json::from_str::<Value>(text).unwrap());
    }
    let full = Ticket::from_json(TICKET_FULL.as_bytes()).unwrap();
    assert_eq!(full.identity.to_string(), "actor@1855aabb.42");
    assert_eq!(full.mode, Mode::Full);
    assert_eq!(full.wanted, [0..100, 120..150].into_iter().collect());
    assert_eq!(
        (full.block_versions.version_of(63), full.block_versions.version_of(64)),
        (Some(41), Some(42))
    );
    assert_eq!(full.sources[1].endpoint.host().as_str(), "2001:db8::7");
    let delta = Ticket::from_json(TICKET_DELTA.as_bytes()).unwrap();
    let Mode::Delta { base, payloads, codec } = &delta.mode else { panic!("not a delta") };
    assert_eq!(*codec, Codec::Plain);
    let context = Ticket::from_json(TICKET_CONTEXT.as_bytes()).unwrap();
    assert_eq!(context.mode.codec(), Some(Codec::Context));
    assert_eq!((base.identity.version, payloads[1].bytes), (40, 77));
    assert_eq!(payloads[1].sources, [SourceId(3), SourceId(0)]);
}
