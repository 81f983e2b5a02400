use super::super::testing::{fields, full_ticket, source};
use super::super::*;
use super::{dial, half, key, shake, split};
use crate::error::Kind;

const STREAM: StreamId = StreamId { index: 1, epoch: 0 };

#[test]
fn a_handshake_proves_both_ends() {
    let (receiver, sender) = shake(dial(STREAM), 4);
    assert_eq!((receiver.stream(), receiver.window(), receiver.minor()), (STREAM, 4, 1));
    assert_eq!(
        (sender.stream(), sender.ticket(), sender.source()),
        (STREAM, TicketId([0xa5; 16]), SourceId(0))
    );
}

/// The proof of one handshake, given to another that differs in one thing.
#[test]
fn a_proof_replayed_in_another_handshake_fails() {
    let nonce = Nonce([9; 32]);
    let (_, _, proof) = half(dial(STREAM), nonce);
    let replay = |dial: Dial, nonce: Nonce, stream: StreamId| {
        let (_, challenged, _) = half(dial, nonce);
        let (header, body) = split(&proof);
        challenged.proof(&Header { stream, ..header }, body, 2).map(|_| ())
    };
    assert!(replay(dial(STREAM), nonce, STREAM).is_ok(), "the replay itself is sound");

    let other = StreamId { index: 2, epoch: 0 };
    let later = StreamId { index: 1, epoch: 1 };
    let attacks = [
        ("sender's nonce", replay(dial(STREAM), Nonce([8; 32]), STREAM)),
        ("receiver's nonce", replay(Dial { nonce: Nonce([6; 32]), ..dial(STREAM) }, nonce, STREAM)),
        ("ticket", replay(Dial { ticket: TicketId([1; 16]), ..dial(STREAM) }, nonce, STREAM)),
        ("source", replay(Dial { source: SourceId(1), ..dial(STREAM) }, nonce, STREAM)),
        ("stream", replay(dial(other), nonce, other)),
        ("epoch", replay(dial(later), nonce, later)),
    ];
    for (what, outcome) in attacks {
        let error = outcome.unwrap_err();
        assert!(matches!(error, WireError::Proof { role: "receiver", .. }), "{what}: {error}");
        assert_eq!(error.kind(), Kind::Denied, "{what}");
    }
}

#[test]
fn a_peer_without_the_key_is_turned_away_on_either_side() {
    let stranger = Dial { key: TicketKey::new([0; 32]), ..dial(STREAM) };
    let (_, challenged, proof) = half(stranger, Nonce([9; 32]));
    let (header, body) = split(&proof);
    assert!(matches!(challenged.proof(&header, body, 2), Err(WireError::Proof { role: "receiver", .. })));

    // A false sender that sends the receiver's own proof back.
    let (proof_sent, _, proof) = half(dial(STREAM), Nonce([9; 32]));
    let Ok(Some((Frame::Message(_, Message::Proof(mac)), _))) = decode_frame(&proof) else { panic!() };
    let accept = Message::Accept { proof: mac, window: 2 }.encode(STREAM).unwrap();
    let (header, body) = split(&accept);
    assert!(matches!(proof_sent.accept(&header, body), Err(WireError::Proof { role: "sender", .. })));
}

#[test]
fn minor_versions_are_covered_by_the_proof() {
    let (sent, hello) = dial(STREAM).hello().unwrap();
    let (mut header, body) = split(&hello);
    // An attacker between the two pretends that the receiver is newer than it is.
    header.version.minor = 3;
    let greeted = Greeted::read(&header, body).unwrap();
    let (challenged, challenge) = greeted.challenge(key(), Nonce([9; 32])).unwrap();
    let (header, body) = split(&challenge);
    let (_, proof) = sent.challenge(&header, body).unwrap();
    let (header, body) = split(&proof);
    assert!(matches!(challenged.proof(&header, body, 2), Err(WireError::Proof { .. })));
}

#[test]
fn handshake_frames_out_of_order_are_named() {
    let ping = Message::Ping(1).encode(STREAM).unwrap();
    let (header, body) = split(&ping);
    let unexpected = |state| WireError::Unexpected { frame: FrameKind::Ping, state };
    assert_eq!(Greeted::read(&header, body).unwrap_err(), unexpected("Hello"));
    let (sent, _) = dial(STREAM).hello().unwrap();
    assert_eq!(sent.challenge(&header, body).unwrap_err(), unexpected("Challenge"));
    let (proof_sent, challenged, _) = half(dial(STREAM), Nonce([9; 32]));
    assert_eq!(proof_sent.accept(&header, body).unwrap_err(), unexpected("Accept"));
    assert_eq!(challenged.proof(&header, body, 2).unwrap_err(), unexpected("Proof"));
    let data = Header { kind: FrameKind::Data, ..header };
    let error = Greeted::read(&data, &[]).unwrap_err();
    assert_eq!(error, WireError::Unexpected { frame: FrameKind::Data, state: "Hello" });
}

#[test]
fn a_challenge_for_another_stream_is_refused() {
    let (sent, _) = dial(STREAM).hello().unwrap();
    let theirs = StreamId { index: 1, epoch: 7 };
    let challenge = Message::Challenge(Nonce([1; 32])).encode(theirs).unwrap();
    let (header, body) = split(&challenge);
    assert_eq!(sent.challenge(&header, body).unwrap_err(), WireError::WrongStream { ours: STREAM, theirs });
}

#[test]
fn a_window_of_nothing_or_too_much_is_refused() {
    for window in [0, MAX_WINDOW + 1] {
        let (_, challenged, proof) = half(dial(STREAM), Nonce([9; 32]));
        let (header, body) = split(&proof);
        let error = challenged.proof(&header, body, window).unwrap_err();
        assert_eq!(error, WireError::Window { window, max: MAX_WINDOW });
    }
}

#[test]
fn a_peer_of_another_major_is_refused_with_both_versions_named() {
    // A receiver of major 2 says hello.
    let (_, hello) = dial(STREAM).hello().unwrap();
    let (header, _) = split(&hello);
    let theirs = ProtocolVersion { major: 2, minor: 4 };
    let foreign = Header { version: theirs, ..header }.encode();
    let error = decode_header(&foreign).unwrap_err();
    assert_eq!(error, WireError::Version { ours: ProtocolVersion::CURRENT, theirs });
    let frame = refuse(&error, StreamId { index: 0, epoch: 0 }).unwrap();
    let Ok(Some((Frame::Message(_, Message::Refuse(refusal)), _))) = decode_frame(&frame) else { panic!() };
    assert_eq!(
        (refusal.kind, refusal.ours, refusal.theirs),
        (Kind::Unsupported, ProtocolVersion::CURRENT, theirs)
    );
    assert!(refusal.message.contains("2.4") && refusal.message.contains("1.1"), "{}", refusal.message);

    // A sender of major 2 refuses us; its frame has its own version in the header.
    let (sent, _) = dial(STREAM).hello().unwrap();
    let (header, body) = split(&frame);
    let foreign = [&Header { version: theirs, ..header }.encode(), body].concat();
    let (header, body) = split(&foreign);
    assert_eq!(sent.challenge(&header, body).unwrap_err(), WireError::Refused(refusal));
}

#[test]
fn an_unknown_ticket_and_a_wrong_proof_are_refused_in_the_same_words() {
    let ticket = TicketId([1; 16]);
    let unknown = refuse(&WireError::UnknownTicket { ticket }, STREAM).unwrap();
    let wrong = refuse(&WireError::Proof { role: "receiver", ticket, stream: STREAM }, STREAM).unwrap();
    assert_eq!(unknown, wrong);
}

#[test]
fn the_key_shows_up_in_no_debug_output() {
    let (sent, _) = dial(STREAM).hello().unwrap();
    let (proof_sent, challenged, _) = half(dial(STREAM), Nonce([9; 32]));
    let ticket = super::super::testing::delta_ticket(&[1]);
    for text in [
        format!("{:?}", dial(STREAM)),
        format!("{sent:?} {proof_sent:?} {challenged:?}"),
        format!("{ticket:?}"),
        format!("{ticket:#?}"),
    ] {
        assert!(text.contains("TicketKey(redacted)"), "{text}");
        assert!(!text.contains("000102") && !text.contains("0, 1, 2, 3"), "{text}");
    }
}

#[test]
fn a_sender_admits_each_stream_once_per_epoch_and_before_the_deadline() {
    let ticket = full_ticket((0..4).into(), vec![source(0, (0..4).into())]);
    let expires = ticket.deadline.expires_unix_ms;
    let proved = |index, epoch| shake(dial(StreamId { index, epoch }), 2).1;
    let mut door = Admission::new(SourceId(0));
    assert_eq!(door.admit(&ticket, &proved(1, 3), 0), Ok(None));
    for epoch in [2, 3] {
        let stream = StreamId { index: 1, epoch };
        let old = WireError::OldEpoch { stream, current: 3 };
        assert_eq!(door.admit(&ticket, &proved(1, epoch), 0), Err(old), "a replaced stream cannot come back");
    }
    let replaced = StreamId { index: 1, epoch: 3 };
    assert_eq!(door.admit(&ticket, &proved(1, 4), expires - 1), Ok(Some(replaced)));
    assert_eq!(door.admit(&ticket, &proved(0, 0), expires), Err(WireError::Expired { ticket: ticket.id }));
    let beyond = WireError::StreamIndex { index: 2, max: 1 };
    assert_eq!(door.admit(&ticket, &proved(2, 0), 0), Err(beyond));
    let elsewhere = Admission::new(SourceId(1)).admit(&ticket, &proved(0, 0), 0);
    assert_eq!(elsewhere, Err(WireError::UnknownSource { source_id: 0 }));
    let other = TicketFields { id: TicketId([1; 16]), ..fields((0..4).into(), ticket.sources.clone()) };
    let other = Ticket::new(other).unwrap();
    let unknown = WireError::UnknownTicket { ticket: ticket.id };
    assert_eq!(door.admit(&other, &proved(0, 0), 0), Err(unknown));
}
