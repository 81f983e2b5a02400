use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::identity::{CutsHash, Identity, Incarnation, LayoutHash, ModelId, StateDigest};

fn digest(version: Version) -> StateDigest {
    let mut bytes = [7; 16];
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    StateDigest(bytes)
}

/// An index whose anchor begins at `start`, with deltas of these steps and lengths.
fn index(start: Version, steps: &[(u64, u64)], image_bytes: u64) -> VersionIndex {
    let mut at = start;
    let deltas: Vec<DeltaRef> = steps
        .iter()
        .map(|&(step, bytes)| {
            let base = at;
            at += step;
            DeltaRef { base, target: at, digest: digest(at), hash: ObjectHash([1; 16]), bytes }
        })
        .collect();
    let stored = Stored { hash: ObjectHash([2; 16]), bytes: 100 };
    VersionIndex {
        format: VersionIndex::FORMAT,
        identity: Identity { model_id: ModelId::new("m").unwrap(), incarnation: Incarnation(9), version: at },
        digest: digest(at),
        layout_hash: LayoutHash([3; 16]),
        cuts_hash: CutsHash([4; 16]),
        manifest: stored,
        anchor: AnchorRef { start, digest: digest(start), version: start, image_bytes, index: stored },
        deltas,
        composed: Vec::new(),
        earlier: None,
        unix_ms: 1,
    }
}

/// A delta that does what `count` of an index's deltas from a place on do.
fn composed(index: &VersionIndex, from: usize, count: usize, bytes: u64) -> Option<DeltaRef> {
    let (first, last) = (index.deltas.get(from)?, index.deltas.get(from + count - 1)?);
    Some(DeltaRef { base: first.base, bytes, ..*last })
}

fn anchor(parts: &[(u32, Version)]) -> AnchorIndex {
    let mut first = 0;
    let parts = parts.iter().map(|&(count, version)| {
        let part = PartRef { first, count, version, hash: ObjectHash([5; 16]), bytes: u64::from(count) * 10 };
        first += count;
        part
    });
    let parts: Vec<_> = parts.collect();
    AnchorIndex {
        format: AnchorIndex::FORMAT,
        model_id: ModelId::new("m").unwrap(),
        incarnation: Incarnation(9),
        start: parts.iter().map(|p| p.version).min().unwrap_or(0),
        layout_hash: LayoutHash([3; 16]),
        cuts_hash: CutsHash([4; 16]),
        blocks: first,
        sums: Stored { hash: ObjectHash([6; 16]), bytes: u64::from(first) * 16 },
        parts,
    }
}

fn object() -> impl Strategy<Value = Object> {
    let hash = any::<[u8; 16]>().prop_map(ObjectHash);
    let incarnation = any::<u64>().prop_map(Incarnation);
    let (i, h, n) = (incarnation, hash, any::<u64>());
    prop_oneof![
        Just(Object::Head),
        Just(Object::Probe),
        any::<u64>().prop_map(Object::NumberedHead),
        (i.clone(), h.clone()).prop_map(|(incarnation, hash)| Object::Manifest { incarnation, hash }),
        (i.clone(), n, n, h.clone()).prop_map(|(incarnation, base, target, hash)| Object::Delta {
            incarnation,
            base,
            target,
            hash
        }),
        (i.clone(), n, any::<u32>(), h.clone()).prop_map(|(incarnation, start, part, hash)| Object::Part {
            incarnation,
            start,
            part,
            hash
        }),
        (i.clone(), n, h.clone()).prop_map(|(incarnation, start, hash)| Object::Sums {
            incarnation,
            start,
            hash
        }),
        (i.clone(), n, h).prop_map(|(incarnation, start, hash)| Object::Anchor { incarnation, start, hash }),
        (i, n).prop_map(|(incarnation, version)| Object::Version { incarnation, version }),
    ]
}

#[test]
fn any_changed_bit_of_a_head_or_an_index_is_noticed() {
    let index = index(3, &[(1, 10), (2, 10)], 100);
    let head = Head::new(&index, "p");
    for bit in 0..index.to_object().len() * 8 {
        let mut bytes = index.to_object();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let read = VersionIndex::from_object(&bytes);
        // A digit of the hash may be of the other case.
        assert!(read.is_err() || read == Ok(index.clone()), "bit {bit}: {read:?}");
    }
    for len in 0..head.to_object().len() {
        assert!(Head::from_object(&head.to_object()[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn a_version_needs_nothing_that_names_do_not_allow() {
    let mut index = index(3, &[(1, 10), (2, 10), (1, 10)], 100);
    index.composed.extend(composed(&index, 0, 2, 15));
    let anchor = anchor(&[(2, 3), (1, 4), (5, 6)]);
    let (of, version) = (index.identity.incarnation, index.identity.version);
    assert!(index.needs(&anchor).keys().all(|o| o.may_be_needed_by(of, version)));
    assert!(!index.needs(&anchor).keys().any(|o| o.may_be_needed_by(Incarnation(8), version)));
    // The version before needs the same but for its own index and the last delta.
    let before = index.needs(&anchor).into_keys().filter(|o| o.may_be_needed_by(of, version - 1)).count();
    assert_eq!(before, index.needs(&anchor).len() - 2);
}

proptest! {
    #[test]
    fn names_are_read_as_they_were_written(object in object(), junk in "[a-z0-9/.-]{0,80}") {
        let name = object.to_string();
        prop_assert_eq!(Object::parse(&name), Some(object));
        prop_assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b"/.-".contains(&b)));
        prop_assert_eq!(Object::parse(&format!("{name}x")), None);
        // Whatever is read is written the same way.
        prop_assert!(Object::parse(&junk).is_none_or(|o| o.to_string() == junk));
    }

    #[test]
    fn documents_survive_json(
        start in 0..1000_u64,
        steps in prop::collection::vec((1..5_u64, 1..1000_u64), 0..20),
        parts in prop::collection::vec((1..9_u32, 0..9_u64), 1..9),
    ) {
        let mut index = index(start, &steps, 1 << 20);
        index.composed.extend(composed(&index, 1, 3, 77));
        prop_assert_eq!(VersionIndex::from_json(&index.to_json()), Ok(index.clone()));
        prop_assert_eq!(VersionIndex::from_object(&index.to_object()), Ok(index.clone()));
        let anchor = anchor(&parts);
        prop_assert_eq!(AnchorIndex::from_json(&anchor.to_json()), Ok(anchor.clone()));
        for (i, part) in anchor.parts.iter().enumerate() {
            for block in part.first..part.first + part.count {
                prop_assert_eq!(anchor.part_of(block), Some(i));
                prop_assert_eq!(anchor.block_versions().unwrap().version_of(block), Some(part.version));
            }
        }
        prop_assert_eq!(anchor.part_of(anchor.blocks), None);
        let head = Head::new(&index, "p");
        prop_assert_eq!(Head::from_object(&head.to_object()), Ok(head));
    }

    #[test]
    fn the_cheapest_chain_leads_to_the_version(
        old in prop::collection::vec((1..4_u64, 1..1000_u64), 1..12),
        new in prop::collection::vec((1..4_u64, 1..1000_u64), 1..12),
        skips in prop::collection::vec((0..12_usize, 2..8_usize, 1..1500_u64), 0..4),
        image in 1..5000_u64,
        have in 0..60_u64,
        lies in any::<bool>(),
    ) {
        let mut older = index(5, &old, image);
        let mut newest = index(older.identity.version, &new, image);
        for index in [&mut older, &mut newest] {
            index.composed = skips.iter().filter_map(|&(from, count, bytes)| composed(index, from, count, bytes)).collect();
        }
        newest.earlier = Some(older.identity.version);
        let to = newest.identity.version;
        let mut chain = Chain::new(&newest);
        let has = (have, if lies { digest(10_000) } else { digest(have) });
        let mut way = chain.way(Some(has), to).unwrap();
        if let Way::Earlier(version) = way {
            prop_assert!(have < newest.anchor.start);
            prop_assert_eq!(version, older.identity.version);
            chain.extend(&older).unwrap();
            way = chain.way(Some(has), to).unwrap();
        }
        let cost = |d: &[DeltaRef]| d.iter().map(|d| d.bytes).sum::<u64>();
        // By every way there is, the slow way.
        let cheapest = |from: Version, to: Version, index: &[&VersionIndex]| {
            let mut best = BTreeMap::from([(from, 0)]);
            for version in from + 1..=to {
                let all = index.iter().flat_map(|i| i.deltas.iter().chain(&i.composed));
                let here = all.filter(|d| d.target == version);
                if let Some(b) = here.filter_map(|d| Some(best.get(&d.base)? + d.bytes)).min() {
                    best.insert(version, b);
                }
            }
            best.get(&to).copied()
        };
        let whole = image + cheapest(newest.anchor.start, to, &[&newest]).unwrap();
        match way {
            Way::There => prop_assert_eq!(has, (to, digest(to))),
            Way::Deltas { count, bytes } => {
                let deltas = chain.between(have, to).unwrap();
                prop_assert_eq!((deltas.len(), cost(&deltas)), (count, bytes));
                prop_assert_eq!(cheapest(have, to, &[&older, &newest]), Some(bytes));
                prop_assert!(deltas.windows(2).all(|w| w[0].target == w[1].base));
                prop_assert!(!lies && bytes <= whole && deltas[0].base == have);
                prop_assert_eq!(chain.digest_of(have), Some(digest(have)));
            }
            Way::Anchor { bytes } => {
                prop_assert_eq!(bytes, whole);
                // Deltas would not lead there, or cost more.
                let deltas = chain.between(have, to);
                prop_assert!(lies || deltas.is_none_or(|d| cost(&d) > whole));
            }
            Way::Earlier(_) => prop_assert!(false, "there is nothing before the older index"),
        }
        prop_assert_eq!(chain.way(None, to), Some(Way::Anchor { bytes: whole }));
        prop_assert_eq!(chain.way(Some(has), to + 1), None);
    }

    #[test]
    fn retention_keeps_what_kept_versions_need(
        runs in prop::collection::vec(1..6_u64, 1..6),
        count in prop::option::of(0..20_u64),
        age in prop::option::of(0..30_u64),
        bytes in prop::option::of(0..400_u64),
        head in prop::option::of(0..30_usize),
    ) {
        // Runs of versions that share an anchor; each adds a delta.
        let mut versions = Vec::new();
        for (run, len) in runs.iter().enumerate() {
            let start = versions.len() as u64;
            let anchor = Object::Sums { incarnation: Incarnation(1), start: run as u64, hash: ObjectHash([0; 16]) };
            let mut needs = BTreeMap::from([(anchor, 100)]);
            for i in 0..*len {
                let version = start + i;
                let object = Object::Version { incarnation: Incarnation(1), version };
                let (base, target) = (version, version + 1);
                let hash = ObjectHash([1; 16]);
                if i > 0 {
                    needs.insert(Object::Delta { incarnation: Incarnation(1), base, target, hash }, 10);
                }
                let own = needs.iter().map(|(o, b)| (*o, *b)).chain([(object, 1)]).collect();
                versions.push(Kept { object, unix_ms: version, needs: own });
            }
        }
        let now = versions.len() as u64;
        let limits = Retention { count, age_ms: age, bytes };
        // Versions after the head may be there already.
        let head = head.and_then(|at| versions.get(at)).map(|v| v.object);
        let gone = retire(&versions, head, now, &limits);
        let (gone, stay) = versions.split_at(gone);
        prop_assert!(!stay.is_empty(), "the newest stays");
        prop_assert!(gone.iter().all(|v| Some(v.object) != head), "the head stays");
        let garbage = garbage(gone, stay);
        let needed: BTreeSet<_> = stay.iter().flat_map(|v| v.needs.keys()).collect();
        prop_assert!(garbage.iter().all(|o| !needed.contains(o)));
        let left: BTreeSet<_> =
            versions.iter().flat_map(|v| v.needs.keys()).filter(|o| !garbage.contains(o)).collect();
        prop_assert_eq!(&left, &needed, "nothing else is left");
        // The indexes go first.
        let first = garbage.iter().take(gone.len());
        prop_assert!(first.eq(gone.iter().map(|v| &v.object)));
        if stay.len() > 1 && Some(stay[0].object) != head {
            prop_assert!(count.is_none_or(|n| stay.len() as u64 <= n.max(1)));
            prop_assert!(age.is_none_or(|a| now - stay[0].unix_ms <= a));
            let total: u64 = stay.iter().flat_map(|v| &v.needs).collect::<BTreeMap<_, _>>().values().copied().sum();
            prop_assert!(bytes.is_none_or(|b| total <= b));
        }
    }
}

#[test]
fn a_document_that_contradicts_itself_is_refused() {
    type Change = fn(&mut VersionIndex);
    type ChangeAnchor = fn(&mut AnchorIndex);
    let mut good = index(5, &[(1, 10), (2, 20), (1, 30)], 1000);
    good.composed.extend(composed(&good, 0, 2, 25));
    assert!(good.check().is_ok());
    let changes: [(&str, Change); 16] = [
        ("a composed delta from nowhere", |i| i.composed[0].base = 4),
        ("a composed delta to nowhere", |i| i.composed[0].target = 7),
        ("a composed delta back", |i| i.composed[0] = DeltaRef { base: 9, target: 5, ..i.composed[0] }),
        ("a composed delta to another state", |i| i.composed[0].digest = digest(1)),
        ("more composed deltas than others", |i| i.composed = vec![i.composed[0]; 4]),
        ("a gap", |i| i.deltas[1].base += 1),
        ("a loop", |i| i.deltas[2].target = i.deltas[2].base),
        ("the last is missing", |i| drop(i.deltas.split_off(2))),
        ("the first is missing", |i| drop(i.deltas.drain(..1))),
        ("another digest", |i| i.digest = digest(1)),
        ("a later anchor", |i| i.anchor.version = 100),
        ("an anchor between versions", |i| i.anchor.version = 7),
        ("an empty delta", |i| i.deltas[0].bytes = 0),
        ("a delta beyond any image", |i| i.deltas[0].bytes = u64::MAX),
        ("an earlier version that is later", |i| i.earlier = Some(100)),
        ("a document beyond any length", |i| i.manifest.bytes = u64::MAX),
    ];
    for (what, change) in changes {
        let mut bad = good.clone();
        change(&mut bad);
        let error = VersionIndex::from_json(&bad.to_json()).unwrap_err();
        assert!(matches!(error, StoreError::Contradiction { .. }), "{what}: {error}");
    }
    let good = anchor(&[(3, 5), (2, 6)]);
    let changes: [(&str, ChangeAnchor); 8] = [
        ("a part before its start", |a| a.start = 6),
        ("a hole", |a| a.parts[1].first = 4),
        ("an empty part", |a| a.parts[1].count = 0),
        ("too many blocks", |a| a.parts[1].count = u32::MAX),
        ("a block too few", |a| a.blocks = 6),
        ("a part too long", |a| a.parts[0].bytes = 3 * (1 << 20) + 1),
        ("a table too short", |a| a.sums.bytes -= 16),
        ("no parts", |a| a.parts.clear()),
    ];
    for (what, change) in changes {
        let mut bad = good.clone();
        change(&mut bad);
        let error = AnchorIndex::from_json(&bad.to_json()).unwrap_err();
        assert!(matches!(error, StoreError::Contradiction { .. }), "{what}: {error}");
    }
    let mut later = index(5, &[], 1);
    later.format = 2;
    let error = VersionIndex::from_json(&later.to_json()).unwrap_err();
    assert_eq!(error, StoreError::Format { what: "version index", theirs: 2, ours: 1 });
    assert!(matches!(Head::from_json(b"{"), Err(StoreError::Json { .. })));
    let long = vec![b' '; MAX_DOCUMENT + 1];
    assert!(matches!(Head::from_json(&long), Err(StoreError::TooLong { .. })));
}

#[test]
fn a_file_has_the_hash_of_its_bytes() {
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
    let read = |piece: &mut [u8], at: u64| -> Result<(), ()> {
        piece.copy_from_slice(&bytes[at as usize..][..piece.len()]);
        Ok(())
    };
    assert_eq!(ObjectHash::of_file(read, bytes.len() as u64), Ok(ObjectHash::of(&bytes)));
}

#[test]
fn an_anchor_is_due_after_enough_versions_or_bytes() {
    let policy = AnchorPolicy { every: 4 };
    let deltas = |steps: &[(u64, u64)]| index(0, steps, 1).deltas;
    assert!(!policy.is_due(&deltas(&[(1, 10); 3]), &[], 100));
    assert!(policy.is_due(&deltas(&[(1, 10); 4]), &[], 100));
    assert!(policy.is_due(&deltas(&[(1, 60); 2]), &[], 100));
    // Together they have fewer bytes.
    let both = composed(&index(0, &[(1, 60); 2], 1), 0, 2, 90);
    assert!(!policy.is_due(&deltas(&[(1, 60); 2]), &both.into_iter().collect::<Vec<_>>(), 100));
    assert!(!policy.is_due(&[], &[], 100));
}

#[test]
fn the_names_of_a_store_are_these() {
    let (incarnation, hash) = (Incarnation(0xab), ObjectHash([0x1f; 16]));
    let h = "1f".repeat(16);
    let folder = "00000000000000ab";
    for (object, name) in [
        (Object::Manifest { incarnation, hash }, format!("{folder}/manifest-{h}.json")),
        (
            Object::Delta { incarnation, base: 3, target: 4, hash },
            format!("{folder}/deltas/00000000000000000003-00000000000000000004-{h}.wdelta"),
        ),
        (
            Object::Part { incarnation, start: 3, part: 2, hash },
            format!("{folder}/anchors/00000000000000000003/000002-{h}"),
        ),
        (Object::Version { incarnation, version: 4 }, format!("{folder}/versions/00000000000000000004.json")),
        (Object::NumberedHead(2), "head/00000000000000000002.json".into()),
    ] {
        assert_eq!(object.to_string(), name);
    }
    for other in
        ["", "head", "x/versions/1.json", "00000000000000ab/versions/4.json", "head/2.json", "a/b/c/d/e"]
    {
        assert_eq!(Object::parse(other), None, "{other}");
    }
}
