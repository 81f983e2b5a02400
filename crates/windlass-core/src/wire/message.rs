//! The bodies of all frames but `Data`. Layouts: [the specification](super).

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::bytes::{Mac, Nonce, TicketId};
use super::frame::{FrameKind, HEADER_LEN, Header, ProtocolVersion, StreamId, decode_header};
use super::{Extent, MAX_MESSAGE, MAX_METADATA, SourceId, WireError};
use crate::digest::BlockSum;
use crate::error::Kind;
use crate::identity::{Identity, Incarnation, ModelId, StateDigest};

/// A frame that is not `Data`, decoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    Hello(Hello),
    Challenge(Nonce),
    Proof(Mac),
    /// The sender's proof and how many claims may be open on this stream at a time.
    Accept {
        proof: Mac,
        /// Claims not yet acknowledged that the sender takes on this stream.
        window: u16,
    },
    Refuse(Refusal),
    Claim(Claim),
    /// The hashes that the bytes of a stripe must have.
    StripeEnd {
        stripe: u32,
        check: Check,
    },
    /// The receiver's verdict on a stripe.
    Ack {
        stripe: u32,
        verdict: Verdict,
    },
    Done(Completion),
    Error(Fault),
    /// Stripes that a relay has by now, or that an origin has given to others: at most [`MAX_HOLDS`](super::MAX_HOLDS) ranges, none of them empty.
    Holds(Vec<Range<u32>>),
    Reach(Reach),
    Memory(Memory),
    /// Asks for a sign of life. The answer repeats the number.
    Ping(u64),
    /// The answer to a ping.
    Pong(u64),
}

/// The first frame of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Hello {
    pub ticket: TicketId,
    /// Which of the ticket's sources the receiver believes it talks to.
    pub source: SourceId,
    pub nonce: Nonce,
}

/// A refused connection, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    pub kind: Kind,
    /// The protocol version of the refusing side.
    pub ours: ProtocolVersion,
    /// The version of the frame it refuses.
    pub theirs: ProtocolVersion,
    /// Text for people. At most [`MAX_MESSAGE`] bytes; a longer text is cut when encoded.
    pub message: String,
}

/// A request for one stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Claim {
    /// Which stripe of the plan.
    pub stripe: u32,
    /// How often it was claimed before.
    pub attempt: u16,
    /// Its extent in the receiver's plan; the sender compares it with its own.
    pub extent: Extent,
    pub carriage: Carriage,
}

/// How the bytes of a stripe come to the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Carriage {
    /// The sender sends them in `Data` frames.
    #[default]
    Sent,
    /// The receiver reads them from the sender's memory, after `StripeEnd` and before `Ack`.
    Read,
}

/// How memory can be read by a link of one-sided reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// This side can.
    Able {
        /// The name and release of its library. Both sides must have the same.
        library: String,
        /// What the library of the peer needs to reach this one; empty if it comes from a receiver. At most
        /// [`MAX_METADATA`](super::MAX_METADATA) bytes.
        metadata: Vec<u8>,
    },
    /// This side cannot.
    Unable {
        /// Text for people.
        why: String,
    },
}

/// Where in the sender's memory the data of an image is. The bytes of a tensor lie there as in a file of the manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    pub address: u64,
    pub bytes: u64,
}

/// The hashes that the bytes of a stripe must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Check {
    /// XXH3-64 of the stripe's bytes.
    Xxh3(u64),
    /// The sealed sum of each block of the stripe, in order.
    BlockSums(Vec<BlockSum>),
}

/// The receiver's verdict on a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every hash is right and the bytes are in place.
    Good,
    /// The sum of this block is wrong.
    BadBlock(u32),
    /// The XXH3 of the stripe is wrong.
    BadStripe,
}

/// A completed transfer, as both sides state it on the streams and, as JSON, on the control connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Completion {
    pub ticket: TicketId,
    /// The received version.
    pub identity: Identity,
    /// The state digest of that version.
    pub digest: StateDigest,
}

/// The stage of a transfer at which it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Stage {
    /// Before the proofs.
    Handshake = 1,
    /// Between a claim and its first byte.
    Claim = 2,
    /// While bytes flow.
    Data = 3,
    /// While hashes are compared.
    Verify = 4,
    /// While the end is agreed.
    Complete = 5,
}

impl Stage {
    /// Every stage, in order.
    pub const ALL: [Stage; 5] = [Stage::Handshake, Stage::Claim, Stage::Data, Stage::Verify, Stage::Complete];
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Stage::Handshake => "handshake",
            Stage::Claim => "claim",
            Stage::Data => "data",
            Stage::Verify => "verify",
            Stage::Complete => "complete",
        })
    }
}

/// Why a stream ends early.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    pub kind: Kind,
    pub stage: Stage,
    /// The stripe it is about, if it is about one.
    pub stripe: Option<u32>,
    /// Text for people. At most [`MAX_MESSAGE`] bytes; a longer text is cut when encoded.
    pub message: String,
}

impl Fault {
    /// Whether the ticket is void. Otherwise the stream may reconnect.
    pub const fn ends_ticket(&self) -> bool {
        match self.kind {
            Kind::Corrupt | Kind::Timeout | Kind::PeerLost | Kind::Exhausted => false,
            Kind::Invalid
            | Kind::NotFound
            | Kind::Stale
            | Kind::Unsupported
            | Kind::Denied
            | Kind::Cancelled
            | Kind::Bug => true,
        }
    }
}

/// A whole frame in a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A frame with a decoded body.
    Message(Header, Message),
    /// Bytes of a stripe.
    Data(Header, &'a [u8]),
}

/// Reads the frame at the front of `bytes`, and returns how many bytes it took. `None` means that more are
/// needed. Links read the header alone and take payload straight into place; this is for tools and tests.
pub fn decode_frame(bytes: &[u8]) -> Result<Option<(Frame<'_>, usize)>, WireError> {
    let Some(header) = decode_header(bytes)? else { return Ok(None) };
    let end = HEADER_LEN + header.body_len as usize;
    let Some(body) = bytes.get(HEADER_LEN..end) else { return Ok(None) };
    let frame = if header.kind == FrameKind::Data {
        Frame::Data(header, body)
    } else {
        Frame::Message(header, Message::decode(&header, body)?)
    };
    Ok(Some((frame, end)))
}

impl Message {
    /// Which frame it travels in.
    pub const fn kind(&self) -> FrameKind {
        match self {
            Message::Hello(_) => FrameKind::Hello,
            Message::Challenge(_) => FrameKind::Challenge,
            Message::Proof(_) => FrameKind::Proof,
            Message::Accept { .. } => FrameKind::Accept,
            Message::Refuse(_) => FrameKind::Refuse,
            Message::Claim(_) => FrameKind::Claim,
            Message::StripeEnd { .. } => FrameKind::StripeEnd,
            Message::Ack { .. } => FrameKind::Ack,
            Message::Done(_) => FrameKind::Done,
            Message::Error(_) => FrameKind::Error,
            Message::Holds(_) => FrameKind::Holds,
            Message::Reach(_) => FrameKind::Reach,
            Message::Memory(_) => FrameKind::Memory,
            Message::Ping(_) => FrameKind::Ping,
            Message::Pong(_) => FrameKind::Pong,
        }
    }

    fn stripe(&self) -> u32 {
        match self {
            Message::Claim(Claim { stripe, .. })
            | Message::StripeEnd { stripe, .. }
            | Message::Ack { stripe, .. } => *stripe,
            Message::Error(fault) => fault.stripe.unwrap_or(0),
            Message::Hello(_)
            | Message::Challenge(_)
            | Message::Proof(_)
            | Message::Accept { .. }
            | Message::Refuse(_)
            | Message::Done(_)
            | Message::Holds(_)
            | Message::Reach(_)
            | Message::Memory(_)
            | Message::Ping(_)
            | Message::Pong(_) => 0,
        }
    }

    /// The frame, header and body. Fails only where a body would break the limits of its kind.
    pub fn encode(&self, stream: StreamId) -> Result<Vec<u8>, WireError> {
        let mut out = vec![0; HEADER_LEN];
        self.put_body(&mut out);
        let frame = self.kind();
        let body_len = u32::try_from(out.len() - HEADER_LEN).unwrap_or(u32::MAX);
        let header = Header {
            version: ProtocolVersion::CURRENT,
            kind: frame,
            stream,
            stripe: self.stripe(),
            offset: 0,
            body_len,
        };
        header.check()?;
        out[..HEADER_LEN].copy_from_slice(&header.encode());
        Ok(out)
    }

    fn put_body(&self, out: &mut Vec<u8>) {
        match self {
            Message::Hello(hello) => {
                out.extend(hello.ticket.0);
                out.extend(hello.source.0.to_le_bytes());
                out.extend([0; 4]);
                out.extend(hello.nonce.0);
            }
            Message::Challenge(nonce) => out.extend(nonce.0),
            Message::Proof(mac) => out.extend(mac.0),
            Message::Accept { proof, window } => {
                out.extend(proof.0);
                out.extend(window.to_le_bytes());
                out.extend([0; 6]);
            }
            Message::Refuse(r) => {
                out.extend([kind_code(r.kind), r.ours.major, r.ours.minor, r.theirs.major, r.theirs.minor]);
                out.extend([0; 3]);
                out.extend(capped(&r.message));
            }
            Message::Claim(claim) => {
                let (tag, payload, start, len) = match claim.extent {
                    Extent::Blocks { first, count } => (0, 0, first.into(), count.into()),
                    Extent::Bytes { payload, offset, len } => (1, payload, offset, len.into()),
                };
                out.extend(claim.attempt.to_le_bytes());
                let carriage = match claim.carriage {
                    Carriage::Sent => 0,
                    Carriage::Read => 1,
                };
                out.extend([tag, carriage]);
                out.extend(u32::to_le_bytes(payload));
                out.extend(u64::to_le_bytes(start));
                out.extend(u64::to_le_bytes(len));
            }
            Message::StripeEnd { check, .. } => match check {
                Check::Xxh3(sum) => {
                    out.extend([0; 8]);
                    out.extend(sum.to_le_bytes());
                }
                Check::BlockSums(sums) => {
                    out.extend([1, 0, 0, 0]);
                    out.extend((sums.len() as u32).to_le_bytes());
                    out.extend(sums.iter().flat_map(|sum| sum.to_bytes()));
                }
            },
            Message::Ack { verdict, .. } => {
                let (tag, block) = match verdict {
                    Verdict::Good => (0, 0),
                    Verdict::BadBlock(block) => (1, *block),
                    Verdict::BadStripe => (2, 0),
                };
                out.extend([tag, 0, 0, 0]);
                out.extend(u32::to_le_bytes(block));
            }
            Message::Done(done) => {
                out.extend(done.ticket.0);
                out.extend(done.digest.0);
                out.extend(done.identity.incarnation.0.to_le_bytes());
                out.extend(done.identity.version.to_le_bytes());
                out.extend(done.identity.model_id.as_str().bytes());
            }
            Message::Error(fault) => {
                out.extend([kind_code(fault.kind), fault.stage as u8, u8::from(fault.stripe.is_some()), 0]);
                out.extend(capped(&fault.message));
            }
            Message::Holds(ranges) => {
                for range in ranges {
                    out.extend(range.start.to_le_bytes());
                    out.extend(range.end.saturating_sub(range.start).to_le_bytes());
                }
            }
            Message::Reach(reach) => {
                let (tag, text, metadata) = match reach {
                    Reach::Able { library, metadata } => (0, library, &metadata[..]),
                    Reach::Unable { why } => (1, why, &[][..]),
                };
                let text: Vec<u8> = capped(text).collect();
                out.extend([tag, 0]);
                out.extend((text.len() as u16).to_le_bytes());
                out.extend(text);
                out.extend(metadata);
            }
            Message::Memory(memory) => {
                out.extend(memory.address.to_le_bytes());
                out.extend(memory.bytes.to_le_bytes());
            }
            Message::Ping(number) | Message::Pong(number) => out.extend(number.to_le_bytes()),
        }
    }

    /// Decodes the body that followed `header`. `Data` has no body in this sense and is an error here.
    pub fn decode(header: &Header, body: &[u8]) -> Result<Message, WireError> {
        if body.len() as u64 != u64::from(header.body_len) {
            return Err(WireError::BodySlice { frame: header.kind, len: header.body_len, given: body.len() });
        }
        header.check()?;
        let mut body = Body { frame: header.kind, rest: body };
        let message = body.message(header)?;
        body.end()?;
        Ok(message)
    }
}

/// A cursor over a body that never reads past its end.
struct Body<'a> {
    frame: FrameKind,
    rest: &'a [u8],
}

impl<'a> Body<'a> {
    fn message(&mut self, header: &Header) -> Result<Message, WireError> {
        let stripe = header.stripe;
        Ok(match header.kind {
            FrameKind::Hello => Message::Hello(self.hello()?),
            FrameKind::Challenge => Message::Challenge(Nonce(self.take()?)),
            FrameKind::Proof => Message::Proof(Mac(self.take()?)),
            FrameKind::Accept => {
                let (proof, window) = (Mac(self.take()?), u16::from_le_bytes(self.take()?));
                self.zeros::<6>()?;
                Message::Accept { proof, window }
            }
            FrameKind::Refuse => Message::Refuse(self.refusal()?),
            FrameKind::Claim => Message::Claim(self.claim(stripe)?),
            FrameKind::Data => return Err(WireError::Unexpected { frame: FrameKind::Data, state: "a body" }),
            FrameKind::StripeEnd => Message::StripeEnd { stripe, check: self.check()? },
            FrameKind::Ack => Message::Ack { stripe, verdict: self.verdict()? },
            FrameKind::Done => Message::Done(self.completion()?),
            FrameKind::Error => Message::Error(self.fault(stripe)?),
            FrameKind::Holds => Message::Holds(self.holds()?),
            FrameKind::Reach => Message::Reach(self.reach()?),
            FrameKind::Memory => Message::Memory(Memory {
                address: u64::from_le_bytes(self.take()?),
                bytes: u64::from_le_bytes(self.take()?),
            }),
            FrameKind::Ping => Message::Ping(u64::from_le_bytes(self.take()?)),
            FrameKind::Pong => Message::Pong(u64::from_le_bytes(self.take()?)),
        })
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, rest) =
            self.rest.split_first_chunk::<N>().ok_or(WireError::BodyTruncated { frame: self.frame })?;
        self.rest = rest;
        Ok(*head)
    }

    fn zeros<const N: usize>(&mut self) -> Result<(), WireError> {
        if self.take::<N>()? == [0; N] {
            Ok(())
        } else {
            Err(WireError::NotZero { frame: self.frame, field: "reserved" })
        }
    }

    fn text(&mut self) -> Result<&'a str, WireError> {
        std::str::from_utf8(std::mem::take(&mut self.rest)).map_err(|_| WireError::Utf8 { frame: self.frame })
    }

    fn end(&self) -> Result<(), WireError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(WireError::BodyExcess { frame: self.frame, excess: self.rest.len() })
        }
    }

    fn code(&self, field: &'static str, code: u8) -> WireError {
        WireError::UnknownCode { frame: self.frame, field, code }
    }

    fn kind(&mut self) -> Result<Kind, WireError> {
        let [code] = self.take()?;
        Kind::ALL.into_iter().find(|k| kind_code(*k) == code).ok_or_else(|| self.code("error kind", code))
    }

    fn hello(&mut self) -> Result<Hello, WireError> {
        let (ticket, source) = (TicketId(self.take()?), SourceId(u32::from_le_bytes(self.take()?)));
        self.zeros::<4>()?;
        Ok(Hello { ticket, source, nonce: Nonce(self.take()?) })
    }

    fn refusal(&mut self) -> Result<Refusal, WireError> {
        let kind = self.kind()?;
        let [major, minor] = self.take()?;
        let ours = ProtocolVersion { major, minor };
        let [major, minor] = self.take()?;
        let theirs = ProtocolVersion { major, minor };
        self.zeros::<3>()?;
        Ok(Refusal { kind, ours, theirs, message: self.text()?.to_owned() })
    }

    fn claim(&mut self, stripe: u32) -> Result<Claim, WireError> {
        let attempt = u16::from_le_bytes(self.take()?);
        let [tag, carriage] = self.take()?;
        let carriage = match carriage {
            0 => Carriage::Sent,
            1 => Carriage::Read,
            other => return Err(self.code("carriage", other)),
        };
        let payload = u32::from_le_bytes(self.take()?);
        let start = u64::from_le_bytes(self.take()?);
        let len = u64::from_le_bytes(self.take()?);
        let narrow = |field, value: u64| {
            u32::try_from(value).map_err(|_| WireError::TooWide { frame: self.frame, field, value })
        };
        let extent = match tag {
            0 if payload != 0 => return Err(WireError::NotZero { frame: self.frame, field: "payload" }),
            0 => Extent::Blocks { first: narrow("first block", start)?, count: narrow("block count", len)? },
            1 => Extent::Bytes { payload, offset: start, len: narrow("length", len)? },
            tag => return Err(self.code("extent", tag)),
        };
        Ok(Claim { stripe, attempt, extent, carriage })
    }

    fn check(&mut self) -> Result<Check, WireError> {
        let [tag] = self.take()?;
        self.zeros::<3>()?;
        let count = u32::from_le_bytes(self.take()?);
        match tag {
            0 if count != 0 => Err(WireError::NotZero { frame: self.frame, field: "count" }),
            0 => Ok(Check::Xxh3(u64::from_le_bytes(self.take()?))),
            1 => {
                let (sums, odd) = self.rest.as_chunks::<16>();
                if sums.len() as u64 != u64::from(count) || !odd.is_empty() {
                    return Err(WireError::SumCount { count, bytes: self.rest.len() });
                }
                self.rest = odd;
                Ok(Check::BlockSums(sums.iter().map(|s| BlockSum::from_bytes(*s)).collect()))
            }
            tag => Err(self.code("check", tag)),
        }
    }

    fn verdict(&mut self) -> Result<Verdict, WireError> {
        let [tag] = self.take()?;
        self.zeros::<3>()?;
        let block = u32::from_le_bytes(self.take()?);
        match tag {
            1 => Ok(Verdict::BadBlock(block)),
            0 | 2 if block != 0 => Err(WireError::NotZero { frame: self.frame, field: "block" }),
            0 => Ok(Verdict::Good),
            2 => Ok(Verdict::BadStripe),
            tag => Err(self.code("verdict", tag)),
        }
    }

    fn completion(&mut self) -> Result<Completion, WireError> {
        let (ticket, digest) = (TicketId(self.take()?), StateDigest(self.take()?));
        let incarnation = Incarnation(u64::from_le_bytes(self.take()?));
        let version = u64::from_le_bytes(self.take()?);
        let model_id = ModelId::new(self.text()?)?;
        Ok(Completion { ticket, identity: Identity { model_id, incarnation, version }, digest })
    }

    fn holds(&mut self) -> Result<Vec<Range<u32>>, WireError> {
        let mut ranges = Vec::with_capacity(self.rest.len() / 8);
        while !self.rest.is_empty() {
            let (first, count) = (u32::from_le_bytes(self.take()?), u32::from_le_bytes(self.take()?));
            let end = first.checked_add(count).filter(|_| count > 0);
            ranges.push(first..end.ok_or(WireError::StripeRange { first, count })?);
        }
        Ok(ranges)
    }

    fn reach(&mut self) -> Result<Reach, WireError> {
        let [tag] = self.take()?;
        self.zeros::<1>()?;
        let len = usize::from(u16::from_le_bytes(self.take()?));
        let truncated = WireError::BodyTruncated { frame: self.frame };
        let (text, rest) = self.rest.split_at_checked(len).ok_or(truncated)?;
        let text = std::str::from_utf8(text).map_err(|_| WireError::Utf8 { frame: self.frame })?;
        if text.len() > MAX_MESSAGE || rest.len() > MAX_METADATA as usize {
            let (len, max) = (self.rest.len() as u32, MAX_MESSAGE as u32 + MAX_METADATA);
            return Err(WireError::BodyLength { frame: self.frame, len, min: 0, max });
        }
        match tag {
            0 => {
                self.rest = &[];
                Ok(Reach::Able { library: text.to_owned(), metadata: rest.to_vec() })
            }
            1 => {
                self.rest = rest;
                Ok(Reach::Unable { why: text.to_owned() })
            }
            tag => Err(self.code("reach", tag)),
        }
    }

    fn fault(&mut self, stripe: u32) -> Result<Fault, WireError> {
        let kind = self.kind()?;
        let [stage, has_stripe] = self.take()?;
        let stage =
            Stage::ALL.into_iter().find(|s| *s as u8 == stage).ok_or_else(|| self.code("stage", stage))?;
        self.zeros::<1>()?;
        let stripe = match has_stripe {
            0 if stripe != 0 => return Err(WireError::NotZero { frame: self.frame, field: "stripe" }),
            0 => None,
            1 => Some(stripe),
            other => return Err(self.code("has stripe", other)),
        };
        Ok(Fault { kind, stage, stripe, message: self.text()?.to_owned() })
    }
}

/// The longest prefix of `message` that fits the limit, cut between characters.
fn capped(message: &str) -> impl Iterator<Item = u8> + '_ {
    message[..message.floor_char_boundary(MAX_MESSAGE)].bytes()
}

/// Codes of error kinds. Part of the protocol: never renumber.
const fn kind_code(kind: Kind) -> u8 {
    match kind {
        Kind::Invalid => 1,
        Kind::NotFound => 2,
        Kind::Stale => 3,
        Kind::Corrupt => 4,
        Kind::Timeout => 5,
        Kind::PeerLost => 6,
        Kind::Exhausted => 7,
        Kind::Unsupported => 8,
        Kind::Denied => 9,
        Kind::Cancelled => 10,
        Kind::Bug => 11,
    }
}
