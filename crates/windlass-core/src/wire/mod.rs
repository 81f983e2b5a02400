//! The transfer protocol, without sockets.
//!
//! This page is the protocol's specification. The module owns the ticket, the frames, the handshake, the
//! cutting of a transfer into stripes, and the record of which stream fetches which stripe. The links of the data crate
//! call it with bytes they have read and send the bytes it returns; agents make tickets, receivers check them. It must
//! not read a clock, draw a random number, open anything or keep payload bytes.
//!
//! # Participants
//!
//! The **receiver** wants blocks of an image, or a delta to it. It dials, claims and acknowledges. A **sender**
//! is an agent (or a receiver that relays) which holds some blocks of sealed versions; a ticket lists one or
//! more of them as **sources**. One of them, asked over HTTP, issues the ticket and makes its key known to the
//! others.
//!
//! # Goals
//!
//! - Many streams at once, none of which delays another.
//! - Payload leaves by `sendfile` and arrives in its final place: its header is apart from it, and nothing in
//!   it is escaped, padded or framed further.
//! - Every byte is checked against hashes that were fixed before it was sent.
//! - A lost connection costs the stripes that were under way on it and nothing else.
//! - Completion is a statement about one ticket, one version and one digest.
//! - Without proof of the ticket's key, a peer neither sends nor gets a payload byte.
//!
//! # Non-goals
//!
//! - Secrecy, and integrity against an attacker who can rewrite TCP segments: frames after the handshake carry
//!   no MAC. If the network is not trusted, streams run inside TLS, as the ticket says for each source
//!   ([`Source::tls`]): the first byte of a frame then follows the last one of the TLS handshake.
//! - Choosing between full and delta, making deltas, applying them: the ticket only carries the choice.
//! - Discovery. Receivers contact the endpoints in their configuration and those in a ticket, no others.
//! - Multiplexing: one connection serves one stream of one ticket and is then closed.
//!
//! # The stages of a transfer
//!
//! 1. The receiver asks over the authenticated control connection (`POST /request_transfer`), naming the blocks it has
//!    and those it wants, and gets a [`Ticket`].
//! 2. Both sides compute the [`StripePlan`] of the ticket. A stripe is the unit of one claim.
//! 3. The receiver opens the streams of [`Ticket::lanes`]: as many as the ticket says, at least one per
//!    source. Stream `i` leads to source `i mod n`.
//! 4. Each connection does the handshake below within [`HANDSHAKE_TIMEOUT_MS`].
//! 5. Each stream takes stripes that its source holds from the receiver's [`Claims`] and sends `Claim`
//!    for each, keeping up to `window` of them open. The sender serves claims in order of arrival: one or more
//!    `Data` frames, in order and without gaps, that together are the stripe, then `StripeEnd` with the sums.
//!    Bytes of a stripe of blocks are the blocks' bytes in ascending order of id, each block's elements in
//!    their order in the tensor.
//! 6. The receiver compares and sends `Ack`, in the order of the stripes. *Good* means that the bytes are
//!    right and in place. A *bad* stripe goes back to the pool and is claimed again, by any stream, a bounded
//!    number of times. Until `Ack`, or until the connection is reset, the sender must not reuse the memory of
//!    the stripe: that the kernel took the bytes proves nothing.
//! 7. When every stripe is acknowledged and the receiver has found the digest right, it sends `Done` on every
//!    open stream, the sender answers with the same `Done`, and both close. The same [`Completion`] goes over
//!    the control connection as JSON. A `Done` about another ticket, identity or digest is an error. The
//!    version to record is the one in `Completion`, never one that was announced elsewhere.
//!
//! **Loss.** A stream that breaks returns its unacknowledged stripes to the pool. It may dial again under
//! the same index and a higher *epoch*. After the proof the sender ([`Admission`]) closes the connection of the
//! lower epoch before it accepts, and refuses an epoch that is not higher. Every frame carries index and epoch, so a late
//! frame is never mistaken for a new one. Streams with nothing to claim stay open until `Done`: they take over the stripes
//! of lost streams.
//!
//! **One-sided reads** (since 1.1). A receiver that can read the memory of other hosts sends `Reach` with the release of its
//! library as its first frame after the proof, if its peer has this minor and the ticket is of an image. The sender answers with `Reach`:
//! either why not, or its own release and the metadata by which its library is reached, and then with `Memory`, which
//! says where the image's data is. From then on the receiver may claim stripes to be *read*: the sender takes a hold of its
//! memory as for any claim and answers with `StripeEnd` alone. The receiver reads the bytes, compares them and sends
//! `Ack`, which says that the reads are done. What ends a hold otherwise is as for stripes that are sent. A receiver
//! that reads memory which was reused since finds other sums.
//!
//! **Silence.** Any byte is a sign of life. A side that has received nothing for [`PING_AFTER_MS`] sends `Ping`, one
//! at a time; after [`LOST_AFTER_MS`] of silence the stream is lost. `Pong` repeats the number and may come
//! between any two frames, but not inside one.
//!
//! **Deadline.** The ticket's deadline ends everything: the receiver counts a duration from the ticket's
//! arrival, the sender compares its own clock with the absolute time. After it nothing is claimed, served or
//! acknowledged. A stripe that takes longer than the receiver's stripe timeout makes its stream overdue: the
//! connection is reset and counts as lost.
//!
//! **Lapping.** A sender that has to reuse memory under an open ticket resets its connections or sends
//! `Error` of kind *stale*; the receiver keeps the acknowledged stripes and asks for a new ticket. Block versions
//! in a ticket give the version that each block will have, so an image may be gathered from several versions and
//! brought to one version by deltas afterwards.
//!
//! # Stripes
//!
//! A stripe is consecutive wanted blocks, whole, or a byte range of one delta payload. Both sides cut it the same way,
//! by this rule: walk the wanted blocks in ascending order; start a new stripe where the set of sources that
//! hold the block changes, where the stripe would exceed `stripe_bytes` (a stripe has at least one block), or
//! where it has [`MAX_BLOCKS_PER_STRIPE`] blocks. A stripe may step over blocks that are not wanted. Delta
//! payloads are cut in the order of the ticket, every `stripe_bytes`. Stripes are numbered from 0 in this
//! order. A claim repeats the stripe's extent, so that a disagreement is an error and not wrong bytes.
//!
//! # Handshake
//!
//! | step | from | frame | carries |
//! |---|---|---|---|
//! | 1 | receiver | `Hello` | ticket id, source, receiver's nonce |
//! | 2 | sender | `Challenge` | sender's nonce |
//! | 3 | receiver | `Proof` | HMAC with the receiver's label |
//! | 4 | sender | `Accept` | HMAC with the sender's label, window |
//!
//! Either side may send `Refuse` or `Error` and close instead. The proofs are HMAC-SHA256 under the
//! ticket's 32-byte key over these 116 bytes; neither the key nor the token of the control connection is sent:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 24 | `windlass-wire-receiver` or `windlass-wire-sender`, filled with zeros |
//! | 24 | 1 | major version |
//! | 25 | 1 | receiver's minor version, from the header of `Hello` |
//! | 26 | 1 | sender's minor version, from the header of `Challenge` |
//! | 27 | 1 | zero |
//! | 28 | 2 | stream index |
//! | 30 | 2 | stream epoch |
//! | 32 | 4 | source id |
//! | 36 | 16 | ticket id |
//! | 52 | 32 | receiver's nonce |
//! | 84 | 32 | sender's nonce |
//!
//! Nonces are random and used once. Proofs are compared in constant time. An unknown ticket and a wrong proof
//! are refused with the same message.
//!
//! # Versions
//!
//! The header's layout, `Refuse` and its code are the same in every version. A frame of another major gets a
//! `Refuse` of kind *unsupported* that names both versions, and both sides close. Within a major, both sides
//! use the lower of their minors (in `Hello` and `Challenge`, and covered by the proofs) and send only frames that
//! it has.
//!
//! # Frames
//!
//! Everything is little-endian. Reserved bytes are zero, and an error if they are not. A header is 32 bytes:
//!
//! | offset | size | field | |
//! |---|---|---|---|
//! | 0 | 4 | magic | `WDLS` |
//! | 4 | 1 | major | 1 |
//! | 5 | 1 | minor | 1 |
//! | 6 | 1 | kind | below |
//! | 7 | 1 | flags | none defined: zero |
//! | 8 | 2 | stream index | below [`MAX_STREAMS`] |
//! | 10 | 2 | stream epoch | |
//! | 12 | 4 | stripe | zero for kinds without a stripe |
//! | 16 | 8 | offset | `Data`: where in the stripe; otherwise zero |
//! | 24 | 4 | length | of the body that follows |
//! | 28 | 4 | check | low half of XXH3-64 of bytes 0 to 27: a stream out of step is noticed |
//!
//! | kind | code | sent by | body | bytes |
//! |---|---|---|---|---|
//! | `Hello` | 1 | receiver | ticket id 16, source 4, reserved 4, nonce 32 | 56 |
//! | `Challenge` | 2 | sender | nonce 32 | 32 |
//! | `Proof` | 3 | receiver | HMAC 32 | 32 |
//! | `Accept` | 4 | sender | HMAC 32, window 2, reserved 6 | 40 |
//! | `Refuse` | 5 | both | error kind 1, own version 2, peer's version 2, reserved 3, text | 8 to 1032 |
//! | `Claim` | 16 | receiver | attempt 2, extent 1 (0 blocks, 1 bytes), carriage 1 (0 sent, 1 read; since 1.1), payload 4 (0 for blocks), first block or offset 8, block count or length 8 | 24 |
//! | `Data` | 17 | sender | raw bytes | 1 to 64 MiB |
//! | `StripeEnd` | 18 | sender | check 1 (0 XXH3, 1 block sums), reserved 3, count 4 (0 for XXH3), then 8 or 16 × count | 16 to 8 + 16 × 16384 |
//! | `Ack` | 19 | receiver | verdict 1 (0 good, 1 bad block, 2 bad stripe), reserved 3, block 4 (0 unless bad block) | 8 |
//! | `Done` | 20 | both | ticket id 16, digest 16, incarnation 8, version 8, model id | 49 to 176 |
//! | `Error` | 21 | both | error kind 1, stage 1, is about a stripe 1 (0 or 1), reserved 1, text | 4 to 1028 |
//! | `Holds` | 22 | sender | per range: first stripe 4, count 4 | 8 to 8 × 1024 |
//! | `Reach` | 23, since 1.1 | both | answer 1 (0 able, 1 unable), reserved 1, length 2, text of that length: library or reason; then metadata | 4 to 66564 |
//! | `Memory` | 24, since 1.1 | sender | address 8, bytes 8 | 16 |
//! | `Ping`, `Pong` | 32, 33 | both | number 8 | 8 |
//!
//! Error kinds: 1 invalid, 2 not found, 3 stale, 4 corrupt, 5 timeout, 6 peer lost, 7 exhausted, 8 unsupported,
//! 9 denied, 10 cancelled, 11 bug. Of these, *corrupt*, *timeout*, *peer lost* and *exhausted* end the stream
//! and the others the ticket. Stages: 1 handshake, 2 claim, 3 data, 4 verify, 5 complete. Text is UTF-8 of at
//! most [`MAX_MESSAGE`] bytes.
//!
//! Block sums in `StripeEnd` are those of the sealed table. XXH3 (seed 0) of a delta stripe is computed from
//! the payload before any of it is sent: a hash of the bytes just sent would agree with any mistake.
//!
//! # Limits
//!
//! | what | limit |
//! |---|---|
//! | streams of a ticket | 1 to [`MAX_STREAMS`] |
//! | sources, delta payloads of a ticket | 1 to [`MAX_SOURCES`], [`MAX_PAYLOADS`] |
//! | block ranges in a ticket, all together | [`crate::ranges::BlockRanges::MAX_RANGES`] |
//! | JSON of a ticket | [`MAX_TICKET_JSON`] bytes |
//! | stripe size | [`MIN_STRIPE_BYTES`] to [`MAX_STRIPE_BYTES`] |
//! | blocks of a stripe | [`MAX_BLOCKS_PER_STRIPE`] |
//! | stripes of a ticket | [`MAX_STRIPES`] |
//! | open claims of a stream | 1 to [`MAX_WINDOW`] |
//! | texts | [`MAX_MESSAGE`] bytes |
//! | metadata of `Reach` | [`MAX_METADATA`] bytes |
//!
//! A header is refused before its body is read if the length is outside the limits of its kind, so a reader
//! never needs a buffer larger than the body of the largest kind but `Data`, and never for `Data`.
//!
//! # Errors
//!
//! [`WireError`] has one variant for each way in which a peer can break these rules, [`TicketError`] for
//! tickets and plans, [`Failure`] for the end of a transfer as a whole. After any `WireError` on a connection
//! it is closed, with `Refuse` before the proofs and `Error` after them where it can still be sent.
//!
//! # Invariants
//!
//! | | invariant | test |
//! |---|---|---|
//! | WIRE-1 | decoding any bytes ends in a value or a named error; a decoded value encodes to the same bytes | `any_bytes_decode_to_a_frame_or_an_error`, `every_message_survives_the_wire` |
//! | WIRE-2 | no length is used before it is checked against the limits of its kind | `a_header_is_refused_before_its_body_if_the_length_is_out_of_bounds` |
//! | WIRE-3 | a proof is good for one ticket, source, stream, epoch, role and pair of nonces | `a_proof_replayed_in_another_handshake_fails` |
//! | WIRE-4 | each stripe is acknowledged exactly once, and never held by two live streams | `every_stripe_is_acknowledged_exactly_once_whatever_is_lost` |
//! | WIRE-5 | after the deadline nothing is handed out or acknowledged | `after_the_deadline_nothing_is_handed_out_or_acknowledged` |
//! | WIRE-6 | frames out of order are named errors, and no gap, overlap or short stripe passes | `a_pull_stream_refuses_every_frame_out_of_order`, `stripe_bytes_with_gaps_repeats_or_too_few_are_refused` |
//! | WIRE-7 | completion is accepted for this ticket, identity and digest only | `completion_is_tied_to_ticket_version_and_digest` |
//! | WIRE-8 | peers of another major learn both versions | `a_peer_of_another_major_is_refused_with_both_versions_named` |

mod admission;
mod bytes;
mod claims;
pub mod control;
mod error;
mod frame;
mod handshake;
mod message;
mod pool;
mod stream;
mod stripe;
mod swarm;
mod ticket;
mod versions;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use crate::address::HostPort as Endpoint;
pub use admission::Admission;
pub use bytes::{Mac, Nonce, TicketId, TicketKey};
pub use claims::{ClaimPolicy, Claims, Failure, Grant, Outcome, Progress};
pub use error::WireError;
pub use frame::{FrameKind, HEADER_LEN, Header, MAGIC, ProtocolVersion, StreamId, decode_header};
pub use handshake::{Challenged, Dial, Greeted, HelloSent, ProofSent, Proved, Receiver, Sender, refuse};
pub use message::{
    Carriage, Check, Claim, Completion, Fault, Frame, Hello, Memory, Message, Reach, Refusal, Stage, Verdict,
    decode_frame,
};
pub use stream::{Next, PullEvent, PullStream, ServeEvent, ServeStream};
pub use stripe::{Extent, SourceSet, Stripe, StripePlan};
pub use swarm::{Place, RELAYS, neighbours, swarm_stripe_bytes};
pub use ticket::{
    Base, Checks, Deadline, MAX_PAYLOADS, MAX_SOURCES, MAX_TICKET_JSON, MAX_TIMEOUT_MS, Mode, Payload, Relay,
    RelayOffer, Source, SourceId, Swarm, Ticket, TicketError, TicketFields,
};
pub use versions::BlockVersions;

/// The most streams of a ticket.
pub const MAX_STREAMS: u16 = 256;
/// How many streams a ticket has unless configured otherwise.
pub const DEFAULT_STREAMS: u16 = 6;
/// The smallest stripe size a ticket may ask for.
pub const MIN_STRIPE_BYTES: u32 = 8 << 10;
/// The largest stripe, and the largest `Data` frame.
pub const MAX_STRIPE_BYTES: u32 = 64 << 20;
/// The stripe size unless configured otherwise.
pub const DEFAULT_STRIPE_BYTES: u32 = 8 << 20;
/// The most blocks of a stripe: bounds the list of sums in `StripeEnd`.
pub const MAX_BLOCKS_PER_STRIPE: u32 = 16 << 10;
/// The most stripes of a ticket.
pub const MAX_STRIPES: u32 = 1 << 20;
/// The most ranges of one `Holds`.
pub const MAX_HOLDS: u32 = 1024;
/// The most bytes of metadata in a `Reach`.
pub const MAX_METADATA: u32 = 64 << 10;
/// The most claims that may be open on a stream.
pub const MAX_WINDOW: u16 = 64;
/// How many claims may be open on a stream unless configured otherwise.
pub const DEFAULT_WINDOW: u16 = 2;
/// The longest text in a frame or reason in a ticket, in bytes.
pub const MAX_MESSAGE: usize = 1024;
/// How long a handshake may take.
pub const HANDSHAKE_TIMEOUT_MS: u64 = 5_000;
/// How long a stream may be silent before it is pinged.
pub const PING_AFTER_MS: u64 = 5_000;
/// How long a stream may be silent before it is lost.
pub const LOST_AFTER_MS: u64 = 15_000;
