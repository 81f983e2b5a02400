use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::super::*;
use crate::digest::BlockSum;
use crate::error::Kind;
use crate::identity::{Identity, Incarnation, ModelId, StateDigest};

const STREAM: StreamId = StreamId { index: 5, epoch: 2 };

fn any_extent() -> impl Strategy<Value = Extent> {
    prop_oneof![
        any::<(u32, u32)>().prop_map(|(first, count)| Extent::Blocks { first, count }),
        any::<(u32, u64, u32)>().prop_map(|(payload, offset, len)| Extent::Bytes { payload, offset, len }),
    ]
}

fn any_kind() -> impl Strategy<Value = Kind> {
    proptest::sample::select(Kind::ALL.to_vec())
}

fn any_text() -> impl Strategy<Value = String> {
    proptest::collection::vec(any::<char>(), 0..200).prop_map(|c| c.into_iter().collect())
}

fn any_version() -> impl Strategy<Value = ProtocolVersion> {
    any::<(u8, u8)>().prop_map(|(major, minor)| ProtocolVersion { major, minor })
}

fn any_completion() -> impl Strategy<Value = Completion> {
    let model = proptest::collection::vec(proptest::sample::select(b"aZ0_-.".to_vec()), 1..=128)
        .prop_map(|b| String::from_utf8(b).unwrap())
        .prop_filter_map("no leading dot", |id| ModelId::new(id).ok());
    (any::<([u8; 16], [u8; 16], u64, u64)>(), model).prop_map(|((ticket, digest, inc, version), model_id)| {
        let identity = Identity { model_id, incarnation: Incarnation(inc), version };
        Completion { ticket: TicketId(ticket), identity, digest: StateDigest(digest) }
    })
}

fn any_message() -> impl Strategy<Value = Message> {
    let stage = proptest::sample::select(Stage::ALL.to_vec());
    let check = prop_oneof![
        any::<u64>().prop_map(Check::Xxh3),
        proptest::collection::vec(any::<[u8; 16]>().prop_map(BlockSum::from_bytes), 1..40)
            .prop_map(Check::BlockSums),
    ];
    let verdict =
        prop_oneof![Just(Verdict::Good), Just(Verdict::BadStripe), any::<u32>().prop_map(Verdict::BadBlock)];
    prop_oneof![
        any::<([u8; 16], u32, [u8; 32])>().prop_map(|(t, s, n)| {
            Message::Hello(Hello { ticket: TicketId(t), source: SourceId(s), nonce: Nonce(n) })
        }),
        any::<[u8; 32]>().prop_map(|n| Message::Challenge(Nonce(n))),
        any::<[u8; 32]>().prop_map(|m| Message::Proof(Mac(m))),
        any::<([u8; 32], u16)>().prop_map(|(m, window)| Message::Accept { proof: Mac(m), window }),
        (any_kind(), any_version(), any_version(), any_text()).prop_map(|(kind, ours, theirs, message)| {
            Message::Refuse(Refusal { kind, ours, theirs, message })
        }),
        (any::<(u32, u16, bool)>(), any_extent()).prop_map(|((stripe, attempt, read), extent)| {
            let carriage = if read { Carriage::Read } else { Carriage::Sent };
            Message::Claim(Claim { stripe, attempt, extent, carriage })
        }),
        (any::<u32>(), check).prop_map(|(stripe, check)| Message::StripeEnd { stripe, check }),
        (any::<u32>(), verdict).prop_map(|(stripe, verdict)| Message::Ack { stripe, verdict }),
        any_completion().prop_map(Message::Done),
        (any_kind(), stage, any::<Option<u32>>(), any_text()).prop_map(|(kind, stage, stripe, message)| {
            Message::Error(Fault { kind, stage, stripe, message })
        }),
        proptest::collection::vec(
            (any::<u16>(), 1u32..9).prop_map(|(s, n)| s.into()..u32::from(s) + n),
            1..40
        )
        .prop_map(Message::Holds),
        (any_text(), proptest::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(library, metadata)| Message::Reach(Reach::Able { library, metadata })),
        any_text().prop_map(|why| Message::Reach(Reach::Unable { why })),
        any::<(u64, u64)>().prop_map(|(address, bytes)| Message::Memory(Memory { address, bytes })),
        any::<u64>().prop_map(Message::Ping),
        any::<u64>().prop_map(Message::Pong),
    ]
}

/// Puts a right check on a header, so that what lies behind the check is reached.
fn with_check(frame: &mut [u8]) {
    if let Some((head, _)) = frame.split_first_chunk_mut::<HEADER_LEN>() {
        let check = xxh3_64(&head[..28]) as u32;
        head[28..].copy_from_slice(&check.to_le_bytes());
    }
}

proptest! {
    #[test]
    fn every_message_survives_the_wire(
        message in any_message(),
        index in 0..MAX_STREAMS,
        epoch in any::<u16>(),
        tail in proptest::collection::vec(any::<u8>(), 0..9),
    ) {
        let stream = StreamId { index, epoch };
        let mut bytes = message.encode(stream).unwrap();
        let len = bytes.len();
        for cut in 0..len {
            prop_assert_eq!(decode_frame(&bytes[..cut]), Ok(None), "cut at {}", cut);
        }
        bytes.extend(tail);
        let Ok(Some((Frame::Message(header, decoded), used))) = decode_frame(&bytes) else {
            return Err(TestCaseError::fail("not decoded"));
        };
        prop_assert_eq!((header.stream, header.kind, used), (stream, message.kind(), len));
        prop_assert_eq!(decoded, message);
    }

    #[test]
    fn any_bytes_decode_to_a_frame_or_an_error(
        kind in proptest::sample::select(FrameKind::ALL.to_vec()),
        head in any::<[u8; 20]>(),
        quiet in any::<bool>(),
        body in proptest::collection::vec(prop_oneof![3 => Just(0u8), 1 => 0u8..12, 1 => any::<u8>()], 0..200),
        patch in any::<bool>(),
    ) {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, ProtocolVersion::CURRENT.minor, kind.code(), 0]);
        bytes.extend(if quiet { [0; 20] } else { head });
        if patch {
            bytes[24..28].copy_from_slice(&(body.len() as u32).to_le_bytes());
        }
        bytes.extend([0; 4]);
        bytes.extend(&body);
        with_check(&mut bytes);
        if let Ok(Some((frame, used))) = decode_frame(&bytes) {
            let again = match frame {
                Frame::Message(header, message) => message.encode(header.stream).unwrap(),
                Frame::Data(header, payload) => [&header.encode(), payload].concat(),
            };
            prop_assert_eq!(again, &bytes[..used]);
        }
    }

    #[test]
    fn raw_noise_never_panics_the_frame_decoder(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        let mut framed = MAGIC.to_vec();
        framed.extend(&bytes);
        for input in [&bytes, &framed] {
            let _ = decode_frame(input);
        }
        with_check(&mut framed);
        let _ = decode_frame(&framed);
    }

    #[test]
    fn a_changed_bit_in_a_header_is_noticed(message in any_message(), bit in 0usize..8 * HEADER_LEN) {
        let mut bytes = message.encode(STREAM).unwrap();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let expected = if bit < 32 { "Magic" } else { "HeaderCheck" };
        let error = format!("{:?}", decode_header(&bytes).unwrap_err());
        prop_assert!(error.starts_with(expected), "{}", error);
    }
}

fn header(kind: FrameKind, body_len: u32) -> Header {
    let (version, stream) = (ProtocolVersion::CURRENT, STREAM);
    Header { version, kind, stream, stripe: 0, offset: 0, body_len }
}

#[test]
fn a_header_is_refused_before_its_body_if_the_length_is_out_of_bounds() {
    for frame in FrameKind::ALL {
        let (min, max) = frame.body_len().into_inner();
        for len in [min, max] {
            assert!(decode_header(&header(frame, len).encode()).unwrap().is_some(), "{frame} {len}");
        }
        for len in [min.wrapping_sub(1), max + 1, u32::MAX] {
            let error = decode_header(&header(frame, len).encode()).unwrap_err();
            assert_eq!(error, WireError::BodyLength { frame, len, min, max });
        }
    }
}

#[test]
fn strangers_on_the_data_port_are_told_apart_at_the_first_byte() {
    for (bytes, found) in [(&b"G"[..], *b"G\0\0\0"), (b"GET / HTTP/1.1\r\n", *b"GET "), (b"WDLX", *b"WDLX")] {
        assert_eq!(decode_header(bytes), Err(WireError::Magic { found }));
    }
    for cut in 0..HEADER_LEN {
        assert_eq!(decode_header(&header(FrameKind::Ping, 8).encode()[..cut]), Ok(None));
    }
}

#[test]
fn header_fields_that_must_be_zero_are_checked() {
    let patched = |frame: FrameKind, len, at: usize, value: u8| {
        let mut bytes = header(frame, len).encode();
        bytes[at] = value;
        with_check(&mut bytes);
        decode_header(&bytes).unwrap_err()
    };
    let frame = FrameKind::Ping;
    assert_eq!(patched(frame, 8, 7, 1), WireError::NotZero { frame, field: "flags" });
    assert_eq!(patched(frame, 8, 12, 1), WireError::NotZero { frame, field: "stripe" });
    assert_eq!(patched(frame, 8, 16, 1), WireError::NotZero { frame, field: "offset" });
    let frame = FrameKind::Ack;
    assert_eq!(patched(frame, 8, 23, 1), WireError::NotZero { frame, field: "offset" });
    assert_eq!(patched(frame, 8, 9, 1), WireError::StreamIndex { index: 261, max: 255 });
    assert_eq!(patched(frame, 8, 6, 99), WireError::UnknownKind { code: 99 });
}

#[test]
fn bodies_that_lie_are_named() {
    let decode = |kind, stripe, body: &[u8]| {
        Message::decode(&Header { stripe, ..header(kind, body.len() as u32) }, body).unwrap_err()
    };
    let frame = FrameKind::StripeEnd;
    let mut sums = [0; 40];
    sums[0] = 1;
    sums[4] = 3;
    assert_eq!(decode(frame, 0, &sums), WireError::SumCount { count: 3, bytes: 32 });
    sums[4..8].fill(0xff);
    assert_eq!(decode(frame, 0, &sums), WireError::SumCount { count: u32::MAX, bytes: 32 });
    sums[0] = 2;
    assert_eq!(decode(frame, 0, &sums), WireError::UnknownCode { frame, field: "check", code: 2 });
    assert_eq!(decode(frame, 0, &[0; 17]), WireError::BodyExcess { frame, excess: 1 });

    let frame = FrameKind::Error;
    assert_eq!(decode(frame, 0, &[1, 1, 0, 0, 0xff]), WireError::Utf8 { frame });
    assert_eq!(
        decode(frame, 0, &[12, 1, 0, 0]),
        WireError::UnknownCode { frame, field: "error kind", code: 12 }
    );
    assert_eq!(decode(frame, 0, &[1, 6, 0, 0]), WireError::UnknownCode { frame, field: "stage", code: 6 });
    assert_eq!(decode(frame, 9, &[1, 1, 0, 0]), WireError::NotZero { frame, field: "stripe" });

    let frame = FrameKind::Claim;
    let mut claim = [0; 24];
    claim[12] = 1;
    let wide = WireError::TooWide { frame, field: "first block", value: 1 << 32 };
    assert_eq!(decode(frame, 0, &claim), wide);

    let mut done = [0; 49];
    done[48] = b'/';
    assert!(matches!(decode(FrameKind::Done, 0, &done), WireError::Identity(_)));
    assert!(matches!(decode(FrameKind::Data, 0, &[0; 9]), WireError::Unexpected { .. }));
    let short = Message::decode(&header(FrameKind::Ping, 8), &[0; 7]).unwrap_err();
    assert_eq!(short, WireError::BodySlice { frame: FrameKind::Ping, len: 8, given: 7 });
    assert_eq!(short.kind(), Kind::Bug);
}

#[test]
fn long_texts_are_cut_between_characters_and_long_lists_refused() {
    let message = format!("{}é", "x".repeat(MAX_MESSAGE - 1));
    let fault = Fault { kind: Kind::Bug, stage: Stage::Data, stripe: None, message };
    let bytes = Message::Error(fault).encode(STREAM).unwrap();
    let Ok(Some((Frame::Message(_, Message::Error(fault)), _))) = decode_frame(&bytes) else { panic!() };
    assert_eq!(fault.message, "x".repeat(MAX_MESSAGE - 1));

    let end = |n: u32| Message::StripeEnd {
        stripe: 0,
        check: Check::BlockSums(vec![BlockSum::default(); n as usize]),
    };
    assert!(end(MAX_BLOCKS_PER_STRIPE).encode(STREAM).is_ok());
    let error = end(MAX_BLOCKS_PER_STRIPE + 1).encode(STREAM).unwrap_err();
    assert!(matches!(error, WireError::BodyLength { frame: FrameKind::StripeEnd, .. }));
}

#[test]
fn a_fault_ends_the_stream_or_the_ticket_by_its_kind() {
    let retried: Vec<Kind> = Kind::ALL
        .into_iter()
        .filter(|kind| {
            !Fault { kind: *kind, stage: Stage::Data, stripe: None, message: String::new() }.ends_ticket()
        })
        .collect();
    assert_eq!(retried, [Kind::Corrupt, Kind::Timeout, Kind::PeerLost, Kind::Exhausted]);
}
