use serde_json::{Value, json};

use super::super::testing::{delta_fields, fields, full_ticket, identity, source};
use super::super::*;
use crate::error::Kind;
use crate::identity::{Incarnation, StateDigest};
use crate::ranges::BlockRanges;

fn set(ranges: &[(u32, u32)]) -> BlockRanges {
    BlockRanges::from_pairs(ranges.iter().copied()).unwrap()
}

fn good() -> TicketFields {
    fields(set(&[(0, 100)]), vec![source(0, set(&[(0, 60)])), source(1, set(&[(50, 50)]))])
}

/// The error for a ticket after `change`.
fn broken(mut fields: TicketFields, change: impl FnOnce(&mut TicketFields)) -> TicketError {
    change(&mut fields);
    Ticket::new(fields).unwrap_err()
}

#[test]
fn tickets_survive_json() {
    for ticket in [Ticket::new(good()).unwrap(), Ticket::new(delta_fields(&[5, 6])).unwrap()] {
        assert_eq!(Ticket::from_json(ticket.to_json().unwrap().as_bytes()), Ok(ticket));
    }
}

#[test]
fn a_source_inside_tls_says_so_and_one_without_says_nothing() {
    let mut fields = good();
    fields.sources[1].tls = true;
    let ticket = Ticket::new(fields).unwrap();
    let json = ticket.to_json().unwrap();
    assert_eq!(Ticket::from_json(json.as_bytes()), Ok(ticket));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json["sources"][0].get("tls"), &json["sources"][1]["tls"]), (None, &json!(true)));
}

#[test]
fn an_uncovered_block_is_named() {
    let error = broken(good(), |t| t.sources[1].blocks = set(&[(61, 10), (75, 25)]));
    assert_eq!(error, TicketError::Uncovered { block: 60 });
    assert!(error.to_string().contains("block 60"));
    let error = broken(good(), |t| t.sources[1].blocks = set(&[(50, 49)]));
    assert_eq!(error, TicketError::Uncovered { block: 99 });
    let error = broken(delta_fields(&[5]), |t| t.sources[0].blocks = set(&[(1, 9)]));
    assert_eq!(error, TicketError::Uncovered { block: 0 });
}

#[test]
fn every_bound_of_a_ticket_is_checked() {
    let streams = |count| TicketError::Streams { count, max: MAX_STREAMS };
    assert_eq!(broken(good(), |t| t.streams = 0), streams(0));
    assert_eq!(broken(good(), |t| t.streams = MAX_STREAMS + 1), streams(MAX_STREAMS + 1));
    for bytes in [0, MIN_STRIPE_BYTES - 1, MAX_STRIPE_BYTES + 1] {
        assert!(matches!(broken(good(), |t| t.stripe_bytes = bytes), TicketError::StripeBytes { .. }));
    }
    for deadline in [
        Deadline::starting(5, 0),
        Deadline::starting(5, MAX_TIMEOUT_MS + 1),
        Deadline { timeout_ms: 10, expires_unix_ms: 9 },
    ] {
        assert!(matches!(broken(good(), |t| t.deadline = deadline), TicketError::Deadline { .. }));
    }
    let error = broken(good(), |t| t.why = "x".repeat(MAX_MESSAGE + 1));
    assert_eq!(error, TicketError::Why { len: MAX_MESSAGE + 1, max: MAX_MESSAGE });
    assert_eq!(broken(good(), |t| t.wanted = BlockRanges::new()), TicketError::NothingWanted);
    assert_eq!(broken(good(), |t| t.protocol = 2), TicketError::Protocol { ours: 1, theirs: 2 });

    assert!(matches!(broken(good(), |t| t.sources.clear()), TicketError::SourceCount { count: 0, .. }));
    let many = |n: u32| (0..n).map(|i| source(i, set(&[(0, 100)]))).collect::<Vec<_>>();
    let error = broken(good(), |t| t.sources = many(MAX_SOURCES as u32 + 1));
    assert_eq!(error, TicketError::SourceCount { count: MAX_SOURCES + 1, max: MAX_SOURCES });
    let error = broken(good(), |t| t.sources[1].id = SourceId(0));
    assert_eq!(error, TicketError::SourceTwice { id: SourceId(0) });
    let half: BlockRanges = (0..=BlockRanges::MAX_RANGES as u32 / 2).map(|i| 2 * i..2 * i + 1).collect();
    let error = broken(good(), |t| t.sources.iter_mut().for_each(|s| s.blocks = half.clone()));
    assert_eq!(error.kind(), Kind::Exhausted);
}

#[test]
fn block_versions_of_a_ticket_must_make_sense() {
    let runs = |r: &[(u32, u32, u64)]| BlockVersions::from_runs(r.iter().copied()).unwrap();
    let fuzzy = TicketFields { block_versions: runs(&[(0, 30, 40), (30, 70, 42)]), ..good() };
    let ticket = Ticket::new(fuzzy).unwrap();
    assert_eq!(ticket.block_versions.lagging(42), set(&[(0, 30)]));
    let error = broken(good(), |t| t.block_versions = runs(&[(0, 30, 42), (31, 69, 42)]));
    assert_eq!(error, TicketError::Unversioned { block: 30 });
    let error = broken(good(), |t| t.block_versions = runs(&[(0, 30, 42), (30, 70, 43)]));
    assert!(matches!(error, TicketError::BlockVersion { block: 30, version: 43, target: 42, .. }));
    let error = broken(delta_fields(&[5]), |t| t.block_versions = runs(&[(0, 10, 41)]));
    assert!(matches!(error, TicketError::BlockVersion { block: 0, mode: "delta", .. }));
}

#[test]
fn the_base_and_payloads_of_a_delta_ticket_are_checked() {
    let base = |identity| Base { identity, digest: StateDigest([4; 16]) };
    let payload = |bytes, sources: &[u32]| Payload {
        bytes,
        sources: sources.iter().copied().map(SourceId).collect(),
        sums: Vec::new(),
    };
    let with = |identity, payloads| {
        broken(delta_fields(&[5]), |t| t.mode = Mode::Delta { base: base(identity), payloads })
    };
    let mut other_life = identity(40);
    other_life.incarnation = Incarnation(1);
    for bad in [identity(42), other_life] {
        assert_eq!(with(bad, vec![payload(5, &[0])]).kind(), Kind::Stale);
    }
    // A newer one is no fault: the delta leads back.
    let newer = Mode::Delta { base: base(identity(43)), payloads: vec![payload(5, &[0])] };
    assert!(Ticket::new(TicketFields { mode: newer, ..delta_fields(&[5]) }).is_ok());
    assert!(matches!(with(identity(40), vec![]), TicketError::PayloadCount { count: 0, .. }));
    let many = vec![payload(5, &[0]); MAX_PAYLOADS + 1];
    assert!(matches!(with(identity(40), many), TicketError::PayloadCount { .. }));
    let empty = vec![payload(5, &[0]), payload(0, &[0])];
    assert_eq!(with(identity(40), empty), TicketError::PayloadEmpty { payload: 1 });
    for sources in [&[][..], &[9], &[0, 0]] {
        let error = with(identity(40), vec![payload(5, sources)]);
        assert_eq!(error, TicketError::PayloadSources { payload: 0 });
    }
    assert_eq!(broken(delta_fields(&[5]), |t| t.checks = Checks::BlockSums), TicketError::Checks);
}

#[test]
fn every_source_has_a_stream_and_every_stream_a_source() {
    let lanes = |streams, sources: u32| {
        let sources = (0..sources).map(|i| source(i, set(&[(0, 100)]))).collect();
        let mut fields = good();
        (fields.streams, fields.sources) = (streams, sources);
        Ticket::new(fields).unwrap().lanes().map(|(i, s)| (i, s.id.0)).collect::<Vec<_>>()
    };
    assert_eq!(lanes(5, 2), [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]);
    assert_eq!(lanes(1, 3), [(0, 0), (1, 1), (2, 2)]);
}

/// Each field removed, and each field of the wrong type.
#[test]
fn json_of_a_ticket_is_checked_field_by_field() {
    let json: Value =
        serde_json::from_str(&Ticket::new(delta_fields(&[5])).unwrap().to_json().unwrap()).unwrap();
    let parse = |v: &Value| Ticket::from_json(&serde_json::to_vec(v).unwrap());
    parse(&json).unwrap();
    let names: Vec<String> = json.as_object().unwrap().keys().cloned().collect();
    assert_eq!(names.len(), 18);
    for name in names {
        let mut without = json.clone();
        without.as_object_mut().unwrap().remove(&name);
        assert!(matches!(parse(&without), Err(TicketError::Json(_))), "without {name}");
        for wrong in [json!(null), json!(-1), json!([[]]), json!("\u{0}"), json!({"a": 1})] {
            let mut changed = json.clone();
            changed[&name] = wrong.clone();
            let outcome = parse(&changed);
            assert_eq!(outcome.is_ok(), name == "why" && wrong.is_string(), "{name} = {wrong}");
        }
    }
    let mut later = json.clone();
    later["added_in_a_later_minor"] = json!(1);
    parse(&later).unwrap();

    let foreign = json!({"protocol": 2, "other": true});
    assert_eq!(parse(&foreign), Err(TicketError::Protocol { ours: 1, theirs: 2 }));
    let long = vec![b' '; MAX_TICKET_JSON + 1];
    assert!(matches!(Ticket::from_json(&long), Err(TicketError::TooLong { .. })));
}

#[test]
fn a_mistyped_key_is_not_quoted_in_the_error() {
    let ticket = full_ticket(set(&[(0, 1)]), vec![source(0, set(&[(0, 1)]))]);
    let secret = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
    let json = ticket.to_json().unwrap();
    assert!(json.contains(secret));
    let error = Ticket::from_json(json.replace(secret, &secret[1..]).as_bytes()).unwrap_err();
    assert!(!error.to_string().contains("10203"), "{error}");
    assert!(error.to_string().contains("ticket key is 64 hexadecimal digits"), "{error}");
}

proptest::proptest! {
    #[test]
    fn any_text_is_a_ticket_or_an_error(cut in 0usize..2000, at in 0usize..2000, byte: u8) {
        let mut json = Ticket::new(delta_fields(&[5])).unwrap().to_json().unwrap().into_bytes();
        let at = at % json.len();
        json[at] = byte;
        let _ = Ticket::from_json(&json);
        json.truncate(cut);
        let _ = Ticket::from_json(&json);
    }
}
