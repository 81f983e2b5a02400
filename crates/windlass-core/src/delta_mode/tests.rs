use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::Dtype;
use crate::delta::{Encoder, PartBuilder, Tile};
use crate::digest::{BlockSum, sum_block};
use crate::kernel::Portable;
use crate::manifest::{DimCut, TensorSpec};

fn manifest() -> Manifest {
    let specs = [
        TensorSpec::new("a", Dtype::BF16, [40, 30]),
        TensorSpec::new("b", Dtype::F32, [7]),
        TensorSpec::new("c", Dtype::U8, [900]),
    ];
    let cuts = BTreeMap::from([
        ("a".to_owned(), vec![DimCut { dim: 1, bounds: vec![3, 10, 29] }]),
        ("c".to_owned(), vec![DimCut { dim: 0, bounds: vec![100, 500] }]),
    ]);
    Manifest::new(specs, BTreeMap::new()).unwrap().with_cuts(&cuts).unwrap()
}

fn model() -> ModelId {
    ModelId::new("policy").unwrap()
}

fn block_bytes(manifest: &Manifest, data: &[u8], number: u32) -> (Tile, Vec<u8>) {
    let tile = Tile::of(manifest, number).unwrap();
    let runs = manifest.byte_runs(&tile.block);
    (tile, runs.flat_map(|r| data[r.start as usize..r.end as usize].to_vec()).collect())
}

fn sums(manifest: &Manifest, data: &[u8], of: impl Fn(u32) -> bool) -> SumTable {
    let sum = |n| {
        let (tile, bytes) = block_bytes(manifest, data, n);
        sum_block(&Portable, &tile.block, tile.unit, &bytes)
    };
    let all = (0..manifest.cuts().blocks()).map(|n| if of(n) { sum(n) } else { BlockSum::default() });
    SumTable::new(manifest, all.collect())
}

/// What a rank brings that has the blocks `of`.
fn brought(manifest: &Manifest, old: &[u8], new: &[u8], of: impl Fn(u32) -> bool + Copy) -> Vec<u8> {
    let (before, after) = (sums(manifest, old, of), sums(manifest, new, of));
    let header = crate::delta::DeltaHeader {
        model_id: model(),
        base: (Incarnation(9), 4),
        target: (Incarnation(9), 5),
        layout_hash: manifest.layout_hash(),
        cuts_hash: manifest.cuts_hash(),
        base_digest: before.digest(manifest),
        target_digest: after.digest(manifest),
        blocks: manifest.cuts().blocks(),
    };
    let (mut out, mut parts, mut encoder) = (header.to_bytes(), PartBuilder::new(), Encoder::plain());
    for n in (0..manifest.cuts().blocks()).filter(|n| of(*n)) {
        let ((tile, a), (_, b)) = (block_bytes(manifest, old, n), block_bytes(manifest, new, n));
        let mut payload = Vec::new();
        if let Some(e) = encoder.encode(&Portable, &tile, (&a, before.get(n)), &b, &mut payload) {
            parts.push(n, &e, &payload, &mut out);
        }
    }
    parts.finish(&mut out);
    out
}

fn roster(manifest: &Manifest, rank: u16, ranks: u16, of: impl Fn(u32) -> bool) -> Roster {
    Roster {
        rank,
        ranks,
        incarnation: Incarnation(9),
        layout_hash: manifest.layout_hash(),
        cuts_hash: manifest.cuts_hash(),
        blocks: (0..manifest.cuts().blocks()).filter(|n| of(*n)).map(|n| n..n + 1).collect(),
    }
}

/// Joins what two ranks bring, of which `owner` says who has a block.
fn join_two(
    manifest: &Manifest,
    old: &[u8],
    rosters: &[Roster],
    files: &[Vec<u8>],
) -> Result<SumTable, DeltaModeError> {
    let held = BlockRanges::from(0..manifest.cuts().blocks());
    let table = sums(manifest, old, |_| true);
    let origin = Origin {
        manifest,
        model_id: &model(),
        incarnation: Incarnation(9),
        held: &held,
        version: 4,
        sums: &table,
    };
    cover(manifest, Incarnation(9), &held, rosters)?;
    let deltas: Vec<Delta<'_>> = files.iter().map(|f| Delta::parse(f).unwrap()).collect();
    join(origin, 5, rosters, &deltas)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn deltas_of_ranks_join_to_the_sums_of_the_new_image(
        owner in proptest::collection::vec(0..3u32, 16),
        changes in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..60),
    ) {
        let manifest = manifest();
        let len = manifest.data_bytes() as usize;
        let old: Vec<u8> = (0..len).map(|i| (i * 37) as u8).collect();
        let mut new = old.clone();
        changes.iter().for_each(|(at, x)| new[*at as usize % len] ^= x);
        let of = |rank: u32| { let owner = &owner; move |n: u32| owner[n as usize % 16] == rank };
        let files: Vec<_> = (0..3).map(|r| brought(&manifest, &old, &new, of(r))).collect();
        let rosters: Vec<_> = (0..3).map(|r| roster(&manifest, r as u16, 3, of(r))).collect();
        let joined = join_two(&manifest, &old, &rosters, &files).unwrap();
        prop_assert_eq!(&joined, &sums(&manifest, &new, |_| true));
        // From another base nothing is joined, unless it is the same in fact.
        let mut other = old.clone();
        other[len / 2] ^= 1;
        let refused = join_two(&manifest, &other, &rosters, &files).unwrap_err();
        prop_assert!(refused.is_contradiction(), "{}", refused);
        prop_assert_eq!(refused.kind(), Kind::Corrupt);
    }

    #[test]
    fn a_roster_is_read_back_and_any_damage_to_it_is_noticed(
        rank in 0..50u16,
        blocks in proptest::collection::btree_set(0..5000u32, 0..60),
        at in any::<proptest::sample::Index>(),
        bit in 0..8u8,
    ) {
        let blocks: BlockRanges = blocks.into_iter().map(|b| b..b + 1).collect();
        let roster = Roster { blocks, ..roster(&manifest(), rank, 50, |_| false) };
        let bytes = roster.to_bytes();
        prop_assert!(bytes.len() <= MAX_ROSTER);
        prop_assert_eq!(&Roster::parse(&bytes).unwrap(), &roster);
        for cut in 0..bytes.len() {
            prop_assert!(Roster::parse(&bytes[..cut]).is_err());
        }
        let mut bad = bytes.clone();
        bad[at.index(bytes.len())] ^= 1 << bit;
        prop_assert!(Roster::parse(&bad).is_err());
        bad.clone_from(&bytes);
        bad.push(0);
        prop_assert!(Roster::parse(&bad).is_err());
    }

    #[test]
    fn any_bytes_are_a_roster_or_an_error(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), mend: bool) {
        if mend && bytes.len() > 30 {
            bytes[..8].copy_from_slice(MAGIC);
            let len = bytes.len();
            bytes[8..12].copy_from_slice(&(len as u32).to_le_bytes());
            let sum = xxh3_64(&bytes[..len - 8]);
            bytes[len - 8..].copy_from_slice(&sum.to_le_bytes());
        }
        if let Ok(roster) = Roster::parse(&bytes) {
            prop_assert_eq!(roster.to_bytes(), bytes, "a roster has one form");
        }
    }
}

#[test]
fn what_does_not_fit_together_is_refused_by_name() {
    let manifest = manifest();
    let len = manifest.data_bytes() as usize;
    let old = vec![3; len];
    let mut new = old.clone();
    new[10] = 9;
    new[len - 1] = 9;
    let even = |n: u32| n.is_multiple_of(2);
    let odd = |n: u32| !n.is_multiple_of(2);
    let rosters = [roster(&manifest, 0, 2, even), roster(&manifest, 1, 2, odd)];
    let files = [brought(&manifest, &old, &new, even), brought(&manifest, &old, &new, odd)];
    assert!(join_two(&manifest, &old, &rosters, &files).is_ok());
    let fails =
        |rosters: &[Roster], files: &[Vec<u8>]| join_two(&manifest, &old, rosters, files).unwrap_err();

    let swapped = [rosters[1].clone(), rosters[0].clone()];
    assert!(matches!(fails(&swapped, &files), DeltaModeError::Rank { .. }));
    let twice = [rosters[0].clone(), Roster { blocks: rosters[0].blocks.clone(), ..rosters[1].clone() }];
    assert!(matches!(fails(&twice, &files), DeltaModeError::Cover { what: "two ranks", .. }));
    let none = [rosters[0].clone(), Roster { blocks: BlockRanges::new(), ..rosters[1].clone() }];
    assert!(matches!(fails(&none, &files), DeltaModeError::Cover { what: "no rank", block: 1 }));
    let older = [rosters[0].clone(), Roster { incarnation: Incarnation(8), ..rosters[1].clone() }];
    assert!(matches!(fails(&older, &files), DeltaModeError::Foreign { rank: 1, what: "incarnation", .. }));
    let more = [rosters[0].clone(), Roster { ranks: 3, ..rosters[1].clone() }];
    assert!(matches!(fails(&more, &files), DeltaModeError::Foreign { rank: 1, what: "ranks", .. }));

    assert!(matches!(fails(&rosters, &files[..1]), DeltaModeError::Count { expected: 2, found: 1 }));
    let exchanged = [files[1].clone(), files[0].clone()];
    assert!(matches!(fails(&rosters, &exchanged), DeltaModeError::Base { rank: 0, .. }));
    let all = [brought(&manifest, &old, &new, |_| true), files[1].clone()];
    assert!(matches!(fails(&rosters, &all), DeltaModeError::Base { rank: 0, .. }));
}
