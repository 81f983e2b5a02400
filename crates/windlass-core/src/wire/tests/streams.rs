use super::super::testing::{fields, full_ticket, source};
use super::super::*;
use super::{dial, shake, split};
use crate::digest::BlockSum;
use crate::identity::StateDigest;
use crate::ranges::BlockRanges;

const STREAM: StreamId = StreamId { index: 1, epoch: 0 };

/// Three stripes: blocks 0 and 1 (source 0), block 2 (both sources), block 3 (source 1 only).
fn ticket() -> Ticket {
    full_ticket((0..4).into(), vec![source(0, (0..3).into()), source(1, (2..4).into())])
}

fn plan(ticket: &Ticket) -> StripePlan {
    StripePlan::new(ticket, |b| Some(if b == 1 { 0 } else { 60_000 })).unwrap()
}

fn stripes(plan: &StripePlan) -> Vec<Stripe> {
    plan.stripes().to_vec()
}

fn ends<'p>(ticket: &Ticket, plan: &'p StripePlan, window: u16) -> (PullStream, ServeStream<'p>) {
    let (receiver, sender) = shake(dial(STREAM), window);
    let pull = PullStream::new(receiver, ticket.completion(), ticket.checks);
    (pull, ServeStream::new(sender, ticket.completion(), plan).unwrap())
}

fn sums(n: usize) -> Check {
    Check::BlockSums(vec![BlockSum([1; 2]); n])
}

fn to_server(serve: &mut ServeStream<'_>, frame: &[u8]) -> Result<ServeEvent, WireError> {
    let (header, body) = split(frame);
    assert_eq!(serve.header(&header)?, Next::Body(body.len() as u32));
    serve.body(body)
}

fn to_client(pull: &mut PullStream, frame: &[u8]) -> Result<PullEvent, WireError> {
    let (header, body) = split(frame);
    assert_eq!(pull.header(&header)?, Next::Body(body.len() as u32));
    pull.body(body)
}

fn data(pull: &mut PullStream, header: &[u8]) -> Result<(), WireError> {
    let (header, _) = split(header);
    let Next::Payload { len, .. } = pull.header(&header)? else { panic!("no payload") };
    pull.taken(len as usize)
}

#[test]
fn stripes_are_claimed_served_acknowledged_and_done() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let [first, second, ..] = stripes(&plan)[..] else { panic!() };
    assert_eq!((first.bytes, second.bytes), (60_000, 60_000), "block 1 is empty and rides along");
    let (mut pull, mut serve) = ends(&ticket, &plan, 2);
    assert_eq!(pull.room(), 2);
    for stripe in [first, second] {
        let event = to_server(&mut serve, &pull.claim(stripe, 0).unwrap()).unwrap();
        assert_eq!(event, ServeEvent::Claim { stripe, attempt: 0, carriage: Carriage::Sent });
    }
    assert_eq!(pull.room(), 0);

    let header = serve.data(50_000).unwrap();
    let next = pull.header(&split(&header).0).unwrap();
    assert_eq!(next, Next::Payload { stripe: first, offset: 0, len: 50_000 });
    pull.taken(20_000).unwrap();
    pull.taken(30_000).unwrap();
    let ping = pull.ping(77).unwrap();
    assert_eq!(to_server(&mut serve, &ping), Ok(ServeEvent::Ping(77)));
    assert_eq!(to_client(&mut pull, &Message::Pong(77).encode(STREAM).unwrap()), Ok(PullEvent::Pong));
    assert_eq!(serve.sending(), Some((first, 50_000)));
    data(&mut pull, &serve.data(10_000).unwrap()).unwrap();
    let event = to_client(&mut pull, &serve.end(sums(2)).unwrap()).unwrap();
    assert_eq!(event, PullEvent::StripeEnd { stripe: first, check: sums(2) });

    assert_eq!(serve.unacknowledged().map(|s| s.id).collect::<Vec<_>>(), [0, 1]);
    let ack = pull.ack(0, Verdict::Good).unwrap();
    assert_eq!(to_server(&mut serve, &ack), Ok(ServeEvent::Ack { stripe: 0, verdict: Verdict::Good }));
    assert_eq!(serve.unacknowledged().map(|s| s.id).collect::<Vec<_>>(), [1]);

    // The second stripe is bad once, and comes again on the same stream.
    for (attempt, verdict) in [(0, Verdict::BadBlock(2)), (1, Verdict::Good)] {
        if attempt > 0 {
            to_server(&mut serve, &pull.claim(second, attempt).unwrap()).unwrap();
        }
        data(&mut pull, &serve.data(60_000).unwrap()).unwrap();
        to_client(&mut pull, &serve.end(sums(1)).unwrap()).unwrap();
        to_server(&mut serve, &pull.ack(1, verdict).unwrap()).unwrap();
    }

    let done = pull.done().unwrap();
    assert_eq!(to_server(&mut serve, &done), Ok(ServeEvent::Done));
    assert_eq!(to_client(&mut pull, &serve.done().unwrap()), Ok(PullEvent::Done));
    assert_eq!(serve.unacknowledged().count(), 0);
    let late = Message::Ping(1).encode(STREAM).unwrap();
    assert!(matches!(to_client(&mut pull, &late), Err(WireError::Unexpected { .. })));
    assert!(matches!(to_server(&mut serve, &late), Err(WireError::Unexpected { .. })));
    assert!(pull.claim(first, 0).is_err() && pull.done().is_err() && pull.ping(1).is_err());
}

#[test]
fn a_stripe_that_is_read_has_no_data_frames() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let stripe = stripes(&plan)[0];
    let (mut pull, mut serve) = ends(&ticket, &plan, 2);
    let reach = Reach::Able { library: "nixl 1".into(), metadata: Vec::new() };
    let frame = Message::Reach(reach.clone()).encode(STREAM).unwrap();
    assert_eq!(to_server(&mut serve, &frame), Ok(ServeEvent::Reach(reach.clone())));
    assert_eq!(to_client(&mut pull, &frame), Ok(PullEvent::Reach(reach)));
    let memory = Memory { address: 4096, bytes: 240_000 };
    let frame = Message::Memory(memory).encode(STREAM).unwrap();
    assert_eq!(to_client(&mut pull, &frame), Ok(PullEvent::Memory(memory)));
    assert!(
        matches!(serve.header(&split(&frame).0), Err(WireError::Unexpected { .. })),
        "only senders say it"
    );

    let event = to_server(&mut serve, &pull.claim_to_read(stripe, 0).unwrap()).unwrap();
    assert_eq!(event, ServeEvent::Claim { stripe, attempt: 0, carriage: Carriage::Read });
    assert_eq!(serve.unacknowledged().map(|s| s.id).collect::<Vec<_>>(), [0], "its memory is held");
    assert!(matches!(serve.data(1), Err(WireError::DataRange { .. })));
    let event = to_client(&mut pull, &serve.end(sums(2)).unwrap()).unwrap();
    assert_eq!(event, PullEvent::StripeEnd { stripe, check: sums(2) });
    assert_eq!(serve.unacknowledged().map(|s| s.id).collect::<Vec<_>>(), [0], "until it is acknowledged");
    to_server(&mut serve, &pull.ack(0, Verdict::Good).unwrap()).unwrap();
    assert_eq!(serve.unacknowledged().count(), 0);
}

/// Every kind, in every state in which it may not come.
#[test]
fn a_pull_stream_refuses_every_frame_out_of_order() {
    use FrameKind::{Data, Done, Error, Holds, Memory, Ping, Pong, Reach, StripeEnd};
    let ticket = ticket();
    let plan = plan(&ticket);
    let stripe = stripes(&plan)[0];
    let frame = |kind| {
        let body_len = *FrameKind::body_len(kind).start();
        Header { version: ProtocolVersion::CURRENT, kind, stream: STREAM, stripe: 0, offset: 0, body_len }
    };
    let allowed = |prepare: &dyn Fn(&mut PullStream)| -> Vec<FrameKind> {
        let ok = |kind: &FrameKind| {
            let (mut pull, _) = ends(&ticket, &plan, 2);
            prepare(&mut pull);
            pull.header(&frame(*kind)).is_ok()
        };
        FrameKind::ALL.into_iter().filter(ok).collect()
    };
    assert_eq!(allowed(&|_| ()), [Error, Holds, Reach, Memory, Ping]);
    assert_eq!(allowed(&|p| drop(p.claim(stripe, 0).unwrap())), [Data, Error, Holds, Reach, Memory, Ping]);
    let whole = |p: &mut PullStream| {
        p.claim(stripe, 0).unwrap();
        p.header(&Header { body_len: stripe.bytes, ..frame(Data) }).unwrap();
        p.taken(stripe.bytes as usize).unwrap();
    };
    assert_eq!(allowed(&whole), [StripeEnd, Error, Holds, Reach, Memory, Ping]);
    assert_eq!(allowed(&|p| drop(p.done().unwrap())), [Done, Error, Holds, Reach, Memory, Ping]);
    assert_eq!(allowed(&|p| drop(p.ping(5).unwrap())), [Error, Holds, Reach, Memory, Ping, Pong]);
    let fault = Fault { kind: crate::Kind::Stale, stage: Stage::Data, stripe: None, message: String::new() };
    let failed = |p: &mut PullStream| {
        let frame = Message::Error(fault.clone()).encode(STREAM).unwrap();
        assert_eq!(to_client(p, &frame), Ok(PullEvent::Fault(fault.clone())));
    };
    assert_eq!(allowed(&failed), []);
}

#[test]
fn a_serve_stream_refuses_every_frame_out_of_order() {
    use FrameKind::{Ack, Claim, Done, Error, Ping, Reach};
    let ticket = ticket();
    let plan = plan(&ticket);
    let stripe = stripes(&plan)[0];
    let allowed = |prepare: &dyn Fn(&mut PullStream, &mut ServeStream<'_>)| -> Vec<FrameKind> {
        let ok = |kind: &FrameKind| {
            let (mut pull, mut serve) = ends(&ticket, &plan, 1);
            prepare(&mut pull, &mut serve);
            let (version, body_len) = (ProtocolVersion::CURRENT, *FrameKind::body_len(*kind).start());
            let header = Header { version, kind: *kind, stream: STREAM, stripe: 0, offset: 0, body_len };
            serve.header(&header).is_ok()
        };
        FrameKind::ALL.into_iter().filter(ok).collect()
    };
    assert_eq!(allowed(&|_, _| ()), [Claim, Done, Error, Reach, Ping]);
    let claimed = |pull: &mut PullStream, serve: &mut ServeStream<'_>| {
        to_server(serve, &pull.claim(stripe, 0).unwrap()).unwrap();
    };
    assert_eq!(allowed(&claimed), [Error, Reach, Ping], "a window of one is full");
    let sent = |pull: &mut PullStream, serve: &mut ServeStream<'_>| {
        claimed(pull, serve);
        serve.data(stripe.bytes).unwrap();
        serve.end(sums(2)).unwrap();
    };
    assert_eq!(allowed(&sent), [Ack, Error, Reach, Ping]);
}

#[test]
fn stripe_bytes_with_gaps_repeats_or_too_few_are_refused() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let [first, second, ..] = stripes(&plan)[..] else { panic!() };
    let (mut pull, mut serve) = ends(&ticket, &plan, 2);
    for stripe in [first, second] {
        to_server(&mut serve, &pull.claim(stripe, 0).unwrap()).unwrap();
    }
    let header = |stripe, offset, body_len| Header {
        version: ProtocolVersion::CURRENT,
        kind: FrameKind::Data,
        stream: STREAM,
        stripe,
        offset,
        body_len,
    };
    let range =
        |offset, len| WireError::DataRange { stream: STREAM, stripe: 0, offset, len, at: 0, bytes: 60_000 };
    assert_eq!(pull.header(&header(0, 1, 5)), Err(range(1, 5)));
    assert_eq!(pull.header(&header(0, u64::MAX, 5)), Err(range(u64::MAX, 5)));
    assert_eq!(pull.header(&header(0, 0, 60_001)), Err(range(0, 60_001)));
    let wrong =
        WireError::WrongStripe { stream: STREAM, frame: FrameKind::Data, stripe: 1, expected: Some(0) };
    assert_eq!(pull.header(&header(1, 0, 5)), Err(wrong), "claims are served in order");
    data(&mut pull, &header(0, 0, 100).encode()).unwrap();
    assert!(matches!(pull.header(&header(0, 0, 100)), Err(WireError::DataRange { at: 100, .. })));
    let end = Message::StripeEnd { stripe: 0, check: sums(2) }.encode(STREAM).unwrap();
    let short = || WireError::StripeShort { stream: STREAM, stripe: 0, at: 100, bytes: 60_000 };
    assert_eq!(to_client(&mut pull, &end), Err(short()));

    // The sending end holds itself to the same rules.
    assert!(matches!(serve.data(60_001), Err(WireError::DataRange { .. })));
    assert!(matches!(serve.data(0), Err(WireError::DataRange { .. })));
    serve.data(100).unwrap();
    assert_eq!(serve.end(sums(2)), Err(short()));
}

#[test]
fn a_short_read_that_is_not_continued_is_noticed() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let (mut pull, mut serve) = ends(&ticket, &plan, 2);
    to_server(&mut serve, &pull.claim(stripes(&plan)[0], 0).unwrap()).unwrap();
    let (header, _) = split(&serve.data(60_000).unwrap()).to_owned();
    pull.header(&header).unwrap();
    pull.taken(59_999).unwrap();
    let ping = Message::Ping(1).encode(STREAM).unwrap();
    assert_eq!(to_client(&mut pull, &ping), Err(WireError::BytesLeft { stream: STREAM, left: 1 }));
    assert_eq!(pull.taken(2), Err(WireError::BytesExcess { stream: STREAM, given: 2, left: 1 }));
    pull.taken(1).unwrap();
    to_client(&mut pull, &ping).unwrap();
}

#[test]
fn sums_must_fit_the_stripe_and_the_ticket() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let (mut pull, mut serve) = ends(&ticket, &plan, 2);
    to_server(&mut serve, &pull.claim(stripes(&plan)[0], 0).unwrap()).unwrap();
    data(&mut pull, &serve.data(60_000).unwrap()).unwrap();
    for check in [sums(1), sums(3), Check::Xxh3(1)] {
        assert!(matches!(serve.end(check.clone()), Err(WireError::CheckDiffers { .. })));
        let frame = Message::StripeEnd { stripe: 0, check }.encode(STREAM).unwrap();
        assert!(matches!(to_client(&mut pull, &frame), Err(WireError::CheckDiffers { .. })));
    }
}

#[test]
fn claims_that_differ_from_the_plan_are_refused() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let all = stripes(&plan);
    let (mut pull, mut serve) = ends(&ticket, &plan, 8);
    // The receiver cut with another idea of block sizes.
    let other = StripePlan::new(&ticket, |_| Some(40_000)).unwrap();
    let error = to_server(&mut serve, &pull.claim(stripes(&other)[0], 0).unwrap()).unwrap_err();
    assert!(matches!(error, WireError::PlanDiffers { ours: Some(_), theirs: Some(_), .. }), "{error}");
    let beyond = Claim { stripe: 99, attempt: 0, extent: all[0].extent, carriage: Carriage::Sent };
    let frame = Message::Claim(beyond).encode(STREAM).unwrap();
    assert!(matches!(to_server(&mut serve, &frame), Err(WireError::PlanDiffers { ours: None, .. })));
    let last = *all.last().unwrap();
    assert!(!plan.holders(&last).contains(0));
    let error = to_server(&mut serve, &pull.claim(last, 0).unwrap()).unwrap_err();
    assert_eq!(error, WireError::NotHeld { stream: STREAM, stripe: last.id });
}

#[test]
fn acknowledgements_keep_the_order_of_the_stripes() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let [first, second, ..] = stripes(&plan)[..] else { panic!() };
    let (mut pull, mut serve) = ends(&ticket, &plan, 2);
    for (stripe, n) in [(first, 2), (second, 1)] {
        to_server(&mut serve, &pull.claim(stripe, 0).unwrap()).unwrap();
        data(&mut pull, &serve.data(60_000).unwrap()).unwrap();
        to_client(&mut pull, &serve.end(sums(n)).unwrap()).unwrap();
    }
    let frame = FrameKind::Ack;
    let wrong = WireError::WrongStripe { stream: STREAM, frame, stripe: 1, expected: Some(0) };
    assert_eq!(pull.ack(1, Verdict::Good).unwrap_err(), wrong);
    let early = Message::Ack { stripe: 1, verdict: Verdict::Good }.encode(STREAM).unwrap();
    assert_eq!(to_server(&mut serve, &early), Err(wrong));
    assert!(matches!(pull.done(), Err(WireError::Unexpected { .. })), "not done before the last Ack");
}

#[test]
fn completion_is_tied_to_ticket_version_and_digest() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let right = ticket.completion();
    let mut version = right.clone();
    version.identity.version += 1;
    let mut incarnation = right.clone();
    incarnation.identity.incarnation.0 += 1;
    let wrong = [
        Completion { ticket: TicketId([1; 16]), ..right.clone() },
        Completion { digest: StateDigest([9; 16]), ..right.clone() },
        version,
        incarnation,
    ];
    for completion in wrong {
        let frame = Message::Done(completion).encode(STREAM).unwrap();
        let (mut pull, mut serve) = ends(&ticket, &plan, 2);
        assert!(matches!(to_server(&mut serve, &frame), Err(WireError::Completion { .. })));
        pull.done().unwrap();
        assert!(matches!(to_client(&mut pull, &frame), Err(WireError::Completion { .. })));
    }
    let json = serde_json::to_string(&right).unwrap();
    assert_eq!(serde_json::from_str::<Completion>(&json).unwrap(), right);
}

#[test]
fn frames_of_an_earlier_connection_are_refused() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let (mut pull, mut serve) = ends(&ticket, &plan, 2);
    let theirs = StreamId { index: 1, epoch: 9 };
    let late = Message::Ping(1).encode(theirs).unwrap();
    let wrong = || WireError::WrongStream { ours: STREAM, theirs };
    assert_eq!(to_client(&mut pull, &late), Err(wrong()));
    assert_eq!(to_server(&mut serve, &late), Err(wrong()));
}

#[test]
fn a_pong_must_answer_the_ping() {
    let ticket = ticket();
    let plan = plan(&ticket);
    let (mut pull, mut serve) = ends(&ticket, &plan, 2);
    pull.ping(4).unwrap();
    assert!(pull.ping(5).is_err(), "one at a time");
    // The refused ping was not sent, so the one before it is still the one to be answered.
    assert_eq!(to_client(&mut pull, &Message::Pong(4).encode(STREAM).unwrap()), Ok(PullEvent::Pong));
    serve.ping(4).unwrap();
    let pong = Message::Pong(6).encode(STREAM).unwrap();
    assert!(matches!(to_server(&mut serve, &pong), Err(WireError::Unexpected { .. })));
}

#[test]
fn a_stream_of_a_source_outside_the_plan_is_refused() {
    let other = Ticket::new(fields(BlockRanges::from(0..3), vec![source(8, (0..3).into())])).unwrap();
    let plan = plan(&other);
    let (_, sender) = shake(dial(STREAM), 2);
    let error = ServeStream::new(sender, other.completion(), &plan).unwrap_err();
    assert_eq!(error, WireError::UnknownSource { source_id: 0 });
}
