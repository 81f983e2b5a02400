//! The 32-byte header that precedes everything on a stream. Layout and limits: [the specification](super).

use std::fmt;
use std::ops::RangeInclusive;

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    MAX_BLOCKS_PER_STRIPE, MAX_HOLDS, MAX_MESSAGE, MAX_METADATA, MAX_STREAMS, MAX_STRIPE_BYTES, WireError,
};
use crate::identity::ModelId;

/// The first four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"WDLS";
/// Length of a header.
pub const HEADER_LEN: usize = 32;

const CHECKED: usize = 28;

/// A version of the protocol. Peers of different majors do not talk; of different minors, they use the lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ProtocolVersion {
    /// Changes when old peers would misread.
    pub major: u8,
    /// Changes when frames are added that older peers do not get.
    pub minor: u8,
}

impl ProtocolVersion {
    /// The version this code speaks.
    pub const CURRENT: ProtocolVersion = ProtocolVersion { major: 1, minor: 1 };
    /// The first minor with `Reach`, `Memory` and claims that are read ([`Carriage`](super::Carriage)).
    pub const ONE_SIDED: u8 = 1;
}

impl fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// One connection of one transfer. A stream that reconnects keeps its index and raises its epoch, so that
/// a frame of a lost connection is never mistaken for one of its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct StreamId {
    /// Which of the ticket's parallel streams, from 0.
    pub index: u16,
    /// Which connection of that stream, from 0.
    pub epoch: u16,
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.epoch)
    }
}

/// Frame kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum FrameKind {
    /// Receiver: which ticket, which stream, a nonce.
    Hello = 1,
    /// Sender: its nonce.
    Challenge = 2,
    /// Receiver: proof that it has the ticket's key.
    Proof = 3,
    /// Sender: its own proof; claims may begin.
    Accept = 4,
    /// Either: refusal with the reason. The only frame that peers of other majors understand.
    Refuse = 5,
    /// Receiver: request for a stripe.
    Claim = 16,
    /// Sender: bytes of a stripe follow.
    Data = 17,
    /// Sender: end of a stripe, with its hashes.
    StripeEnd = 18,
    /// Receiver: the stripe is checked, or bad.
    Ack = 19,
    /// Receiver, then sender: the transfer is complete.
    Done = 20,
    /// Either: end of the stream, with the reason.
    Error = 21,
    /// Sender: a relay's stripes that it has by now, an origin's that it has given to others.
    Holds = 22,
    /// Receiver: asks how the sender's memory can be read. Sender: the answer.
    Reach = 23,
    /// Sender: where in its memory the data of the image is.
    Memory = 24,
    /// Either: request for a sign of life.
    Ping = 32,
    /// Either: the answer to `Ping`.
    Pong = 33,
}

impl FrameKind {
    /// Every kind, in the order of their codes.
    pub const ALL: [FrameKind; 16] = [
        FrameKind::Hello,
        FrameKind::Challenge,
        FrameKind::Proof,
        FrameKind::Accept,
        FrameKind::Refuse,
        FrameKind::Claim,
        FrameKind::Data,
        FrameKind::StripeEnd,
        FrameKind::Ack,
        FrameKind::Done,
        FrameKind::Error,
        FrameKind::Holds,
        FrameKind::Reach,
        FrameKind::Memory,
        FrameKind::Ping,
        FrameKind::Pong,
    ];

    /// Its code on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    fn from_code(code: u8) -> Option<FrameKind> {
        Self::ALL.into_iter().find(|k| k.code() == code)
    }

    /// The lengths its body may have.
    pub const fn body_len(self) -> RangeInclusive<u32> {
        match self {
            FrameKind::Hello => 56..=56,
            FrameKind::Challenge | FrameKind::Proof => 32..=32,
            FrameKind::Accept => 40..=40,
            FrameKind::Refuse => 8..=8 + MAX_MESSAGE as u32,
            FrameKind::Claim => 24..=24,
            FrameKind::Data => 1..=MAX_STRIPE_BYTES,
            FrameKind::StripeEnd => 16..=8 + 16 * MAX_BLOCKS_PER_STRIPE,
            FrameKind::Ack | FrameKind::Ping | FrameKind::Pong => 8..=8,
            FrameKind::Done => 49..=48 + ModelId::MAX_LEN as u32,
            FrameKind::Error => 4..=4 + MAX_MESSAGE as u32,
            FrameKind::Holds => 8..=8 * MAX_HOLDS,
            FrameKind::Reach => 4..=4 + MAX_MESSAGE as u32 + MAX_METADATA,
            FrameKind::Memory => 16..=16,
        }
    }

    /// Whether the header's `stripe` field means something.
    const fn has_stripe(self) -> bool {
        match self {
            FrameKind::Claim | FrameKind::Data | FrameKind::StripeEnd | FrameKind::Ack | FrameKind::Error => {
                true
            }
            FrameKind::Hello
            | FrameKind::Challenge
            | FrameKind::Proof
            | FrameKind::Accept
            | FrameKind::Refuse
            | FrameKind::Done
            | FrameKind::Holds
            | FrameKind::Reach
            | FrameKind::Memory
            | FrameKind::Ping
            | FrameKind::Pong => false,
        }
    }
}

impl fmt::Display for FrameKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FrameKind::Hello => "Hello",
            FrameKind::Challenge => "Challenge",
            FrameKind::Proof => "Proof",
            FrameKind::Accept => "Accept",
            FrameKind::Refuse => "Refuse",
            FrameKind::Claim => "Claim",
            FrameKind::Data => "Data",
            FrameKind::StripeEnd => "StripeEnd",
            FrameKind::Ack => "Ack",
            FrameKind::Done => "Done",
            FrameKind::Error => "Error",
            FrameKind::Holds => "Holds",
            FrameKind::Reach => "Reach",
            FrameKind::Memory => "Memory",
            FrameKind::Ping => "Ping",
            FrameKind::Pong => "Pong",
        })
    }
}

/// A checked header: its kind is known and its length is within the limits of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Header {
    /// The protocol version of its writer.
    pub version: ProtocolVersion,
    pub kind: FrameKind,
    /// The connection it belongs to.
    pub stream: StreamId,
    /// The stripe it is about; 0 for kinds that are about none.
    pub stripe: u32,
    /// `Data`: where in the stripe its bytes belong. 0 for other kinds.
    pub offset: u64,
    /// Bytes that follow the header.
    pub body_len: u32,
}

impl Header {
    /// The bytes on the wire. A `Data` frame is this followed by the raw payload, so that the payload can go
    /// out by `sendfile`.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = self.version.major;
        out[5] = self.version.minor;
        out[6] = self.kind.code();
        out[8..10].copy_from_slice(&self.stream.index.to_le_bytes());
        out[10..12].copy_from_slice(&self.stream.epoch.to_le_bytes());
        out[12..16].copy_from_slice(&self.stripe.to_le_bytes());
        out[16..24].copy_from_slice(&self.offset.to_le_bytes());
        out[24..28].copy_from_slice(&self.body_len.to_le_bytes());
        let check = xxh3_64(&out[..CHECKED]) as u32;
        out[28..32].copy_from_slice(&check.to_le_bytes());
        out
    }
}

/// Reads the header at the front of `bytes`. `None` means that more bytes are needed; bytes that can never
/// become a frame are an error at once. The bytes after the header are not read.
pub fn decode_header(bytes: &[u8]) -> Result<Option<Header>, WireError> {
    if !bytes.iter().zip(MAGIC).all(|(b, m)| *b == m) {
        let mut found = [0; 4];
        found.iter_mut().zip(bytes).for_each(|(f, b)| *f = *b);
        return Err(WireError::Magic { found });
    }
    let Some(raw) = bytes.first_chunk::<HEADER_LEN>() else { return Ok(None) };
    let [_, _, _, _, major, minor, code, flags, i0, i1, e0, e1, s @ ..] = raw;
    let [s0, s1, s2, s3, o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, c0, c1, c2, c3] = s;
    if xxh3_64(&raw[..CHECKED]) as u32 != u32::from_le_bytes([*c0, *c1, *c2, *c3]) {
        return Err(WireError::HeaderCheck);
    }
    let version = ProtocolVersion { major: *major, minor: *minor };
    let kind = FrameKind::from_code(*code);
    if version.major != ProtocolVersion::CURRENT.major && kind != Some(FrameKind::Refuse) {
        return Err(WireError::Version { ours: ProtocolVersion::CURRENT, theirs: version });
    }
    let kind = kind.ok_or(WireError::UnknownKind { code: *code })?;
    if *flags != 0 {
        return Err(WireError::NotZero { frame: kind, field: "flags" });
    }
    let header = Header {
        version,
        kind,
        stream: StreamId { index: u16::from_le_bytes([*i0, *i1]), epoch: u16::from_le_bytes([*e0, *e1]) },
        stripe: u32::from_le_bytes([*s0, *s1, *s2, *s3]),
        offset: u64::from_le_bytes([*o0, *o1, *o2, *o3, *o4, *o5, *o6, *o7]),
        body_len: u32::from_le_bytes([*l0, *l1, *l2, *l3]),
    };
    header.check()?;
    Ok(Some(header))
}

impl Header {
    pub(super) fn check(&self) -> Result<(), WireError> {
        let frame = self.kind;
        if self.stream.index >= MAX_STREAMS {
            return Err(WireError::StreamIndex { index: self.stream.index, max: MAX_STREAMS - 1 });
        }
        if self.stripe != 0 && !frame.has_stripe() {
            return Err(WireError::NotZero { frame, field: "stripe" });
        }
        if self.offset != 0 && frame != FrameKind::Data {
            return Err(WireError::NotZero { frame, field: "offset" });
        }
        let (min, max) = frame.body_len().into_inner();
        if !(min..=max).contains(&self.body_len) {
            return Err(WireError::BodyLength { frame, len: self.body_len, min, max });
        }
        Ok(())
    }
}
