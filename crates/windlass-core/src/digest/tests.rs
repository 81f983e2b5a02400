use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::dtype::Dtype;
use crate::kernel::Portable;
use crate::manifest::{DimCut, TensorSpec};

/// The formula of the module's documentation, byte by byte.
fn by_definition(offset: u64, bytes: &[u8]) -> BlockSum {
    let mut sum = [0u64; 2];
    for (i, &b) in bytes.iter().enumerate() {
        let at = offset + i as u64;
        let word = at / 4;
        for lane in 0..2 {
            let key = u64::from(LOW[lane][word as usize % 1024]).wrapping_mul(high(word / 1024)[lane]);
            let term = (u64::from(b) + 1).wrapping_mul(1 << (8 * (at % 4))).wrapping_mul(key);
            sum[lane] = sum[lane].wrapping_add(term);
        }
    }
    BlockSum(sum)
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    (0..len).map(|i| splitmix(seed.wrapping_add(i as u64)) as u8).collect()
}

fn digest_of(m: &Manifest, data: &[u8]) -> StateDigest {
    table_of(m, data).digest(m)
}

fn gather(m: &Manifest, block: &Block, data: &[u8]) -> Vec<u8> {
    m.byte_runs(block).flat_map(|r| &data[r.start as usize..r.end as usize]).copied().collect()
}

fn table_of(m: &Manifest, data: &[u8]) -> SumTable {
    let sum = |b| {
        let block = m.cuts().block(b).unwrap();
        let unit = m.tensors()[block.tensor as usize].dtype.unit();
        sum_block(&Portable, &block, unit, &gather(m, &block, data))
    };
    SumTable::new(m, (0..m.cuts().blocks()).map(sum).collect())
}

#[test]
fn low_keys_are_distinct_and_not_zero() {
    for lane in &LOW {
        assert_eq!(lane.iter().collect::<HashSet<_>>().len(), GROUP_WORDS);
        assert!(lane.iter().all(|&k| k != 0));
    }
    assert!(LOW[0].iter().zip(&LOW[1]).all(|(a, b)| a != b));
}

#[test]
fn golden_sums_and_digests() {
    // Made by testdata/digest.py, a second implementation from the definition.
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../../../testdata/digest.json")).unwrap();
    for case in golden["sums"].as_array().unwrap() {
        let (offset, len, seed) =
            (case["offset"].as_u64().unwrap(), case["len"].as_u64().unwrap(), case["seed"].as_u64().unwrap());
        let sum = sum_range(&Portable, offset, &noise(len as usize, seed));
        assert_eq!(sum.to_string(), case["sum"].as_str().unwrap(), "{case}");
        assert_eq!(BlockSum::deserialize(&case["sum"]).unwrap(), sum, "{case}");
    }
    let state = &golden["state"];
    let m = Manifest::from_json(state["manifest"].to_string().as_bytes()).unwrap();
    let data = noise(m.data_bytes() as usize, state["seed"].as_u64().unwrap());
    let table = table_of(&m, &data);
    assert_eq!(table.state().0.to_string(), state["raw"].as_str().unwrap());
    assert_eq!(table.digest(&m).to_string(), state["digest"].as_str().unwrap());
}

#[test]
fn trap_lanes_stay_in_one_ring() {
    // Sums near 2^64 must wrap the same way whether added early or late: split a range of maximal words.
    let bytes = vec![0xff; 64 * 1024];
    let whole = sum_range(&Portable, 0, &bytes);
    let parts: BlockSum =
        bytes.chunks(4).enumerate().map(|(i, b)| sum_range(&Portable, i as u64 * 4, b)).sum();
    assert_eq!(whole, parts);
    let mut a = StateSum::default();
    a.add(3, whole);
    let mut b = StateSum::default();
    bytes.chunks(7).enumerate().for_each(|(i, c)| b.add(3, sum_range(&Portable, i as u64 * 7, c)));
    assert_eq!(a, b);
}

#[test]
fn trap_pairs_of_sign_flips_are_seen() {
    let bytes = noise(64 * 1024, 7);
    let clean = sum_range(&Portable, 0, &bytes);
    for (unit, sign) in [(2, 1), (4, 3), (8, 7)] {
        let mut pairs = 0;
        for i in (0..8192).step_by(unit) {
            for j in [unit, 4096, 8 * unit, 24_576] {
                let mut flipped = bytes.clone();
                flipped[i + sign] ^= 0x80;
                flipped[i + j + sign] ^= 0x80;
                let sum = sum_range(&Portable, 0, &flipped);
                assert!(sum.0[0] != clean.0[0] && sum.0[1] != clean.0[1], "unit {unit}: {i} and {}", i + j);
                pairs += 1;
            }
        }
        assert!(pairs > 1000);
    }
}

#[test]
fn trap_zeros_count() {
    let zeros = |n| sum_range(&Portable, 0, &vec![0; n]);
    assert_ne!(zeros(4096), BlockSum::default());
    assert_ne!(zeros(4096), zeros(4097));
    let m = |shape: &[u64], name: &str| {
        Manifest::new([TensorSpec::new(name, Dtype::BF16, shape)], BTreeMap::new()).unwrap()
    };
    let digests: HashSet<_> = [m(&[8], "a"), m(&[9], "a"), m(&[2, 4], "a"), m(&[8], "b"), m(&[0], "a")]
        .iter()
        .map(|m| digest_of(m, &vec![0; m.data_bytes() as usize]))
        .collect();
    assert_eq!(digests.len(), 5);
}

#[test]
fn swapped_tensors_of_one_shape_are_seen() {
    let specs = ["a", "b"].map(|n| TensorSpec::new(n, Dtype::F32, [16]));
    let m = Manifest::new(specs, BTreeMap::new()).unwrap();
    let data = noise(128, 1);
    let swapped = [&data[64..], &data[..64]].concat();
    assert_ne!(digest_of(&m, &data), digest_of(&m, &swapped));
}

#[test]
fn sums_survive_their_byte_form() {
    let sum = BlockSum([0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210]);
    assert_eq!(BlockSum::from_bytes(sum.to_bytes()), sum);
    assert_eq!(sum.to_bytes()[0], 0xef);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_sum_is_its_definition(offset in 0u64..20_000, len in 0usize..10_000, seed: u64) {
        let bytes = noise(len, seed);
        prop_assert_eq!(sum_range(&Portable, offset, &bytes), by_definition(offset, &bytes));
    }

    #[test]
    fn any_split_adds_up(offset in 0u64..(1 << 40), len in 0usize..20_000, seed: u64, cuts in prop::collection::vec(0usize..20_000, 0..6)) {
        let bytes = noise(len, seed);
        let mut at: Vec<usize> = cuts.into_iter().filter(|&c| c < len).chain([0, len]).collect();
        at.sort_unstable();
        let parts = at.windows(2).map(|w| sum_range(&Portable, offset + w[0] as u64, &bytes[w[0]..w[1]])).sum();
        prop_assert_eq!(sum_range(&Portable, offset, &bytes), parts);
    }

    #[test]
    fn the_digest_does_not_depend_on_cuts(rows in 1u64..600, cols in 1u64..600, r in 1u64..600, c in 1u64..600, seed: u64) {
        let spec = [TensorSpec::new("w", Dtype::BF16, [rows, cols]), TensorSpec::new("b", Dtype::F32, [rows])];
        let plain = Manifest::new(spec, BTreeMap::new()).unwrap();
        let cut = |dim, at: u64, size| DimCut { dim, bounds: if at < size { vec![at] } else { vec![] } };
        let cuts = BTreeMap::from([("w".to_owned(), vec![cut(0, r, rows), cut(1, c, cols)])]);
        let tiled = plain.clone().with_cuts(&cuts).unwrap();
        let data = noise(plain.data_bytes() as usize, seed);
        prop_assert_eq!(digest_of(&plain, &data), digest_of(&tiled, &data));
    }

    #[test]
    fn a_sum_follows_its_changes(start in 0u64..5000, seed: u64,
                                 changes in prop::collection::btree_map(0usize..3000, any::<u64>(), 0..50)) {
        fn check<const U: usize>(start: u64, seed: u64, changes: &BTreeMap<usize, u64>) -> Result<(), TestCaseError> {
            let block = Block { tensor: 0, start, run: 3000, stride: 3000, count: 1 };
            let mut bytes = noise(3000 * U, seed);
            let before = sum_block(&Portable, &block, U, &bytes);
            let changes: Vec<_> = changes.iter().map(|(&at, &value)| {
                let slot = &mut bytes[at * U..][..U];
                let old = crate::kernel::read_unit(slot);
                slot.copy_from_slice(&value.to_le_bytes()[..U]);
                (at, old, crate::kernel::read_unit(slot))
            }).collect();
            let offset = |i: usize| (start + changes[i].0 as u64) * U as u64;
            let step = sum_of_changes::<U>(changes.len(), offset, |i| (changes[i].1, changes[i].2));
            prop_assert_eq!(before.plus(step), sum_block(&Portable, &block, U, &bytes));
            Ok(())
        }
        check::<1>(start, seed, &changes)?;
        check::<2>(start, seed, &changes)?;
        check::<4>(start, seed, &changes)?;
        check::<8>(start, seed, &changes)?;
    }

    #[test]
    fn a_table_follows_its_blocks(seed: u64, which in 0u32..3) {
        let m = Manifest::new([TensorSpec::new("w", Dtype::U8, [150_000])], BTreeMap::new()).unwrap();
        let (a, b) = (noise(150_000, seed), noise(150_000, seed ^ 1));
        let mut mixed = a.clone();
        let range = (which as usize * 65536)..((which as usize + 1) * 65536).min(150_000);
        mixed[range.clone()].copy_from_slice(&b[range]);
        let mut table = table_of(&m, &a);
        table.set(which, 0, table_of(&m, &b).get(which));
        prop_assert_eq!(table.digest(&m), digest_of(&m, &mixed));
        prop_assert_eq!(table.tensors(&m), table_of(&m, &mixed).tensors(&m));
    }

    #[test]
    fn many_sums_at_once_are_as_one_after_the_other(
        changes in proptest::collection::vec((0u32..7, any::<[u64; 2]>()), 0..40),
    ) {
        let specs = [("a", 150_000), ("b", 10), ("c", 150_000)];
        let specs = specs.map(|(name, size)| TensorSpec::new(name, Dtype::U8, [size]));
        let m = Manifest::new(specs, BTreeMap::new()).unwrap();
        let of = |block: u32| m.cuts().tensor_of(block, 0).unwrap();
        let mut one = SumTable::new(&m, (0..7).map(|i| BlockSum([i, !i])).collect());
        let (mut all, before) = (one.clone(), one.state());
        for (block, sum) in &changes {
            one.set(*block, of(*block), BlockSum(*sum));
        }
        let given = changes.iter().map(|(block, sum)| Ok::<_, ()>((*block, of(*block), BlockSum(*sum))));
        let change = all.set_all(given).unwrap();
        prop_assert_eq!(&all, &one);
        prop_assert_eq!(before.plus(change), one.state());
        prop_assert!(all.set_all([Ok((0, 0, BlockSum::default())), Err("why")]) == Err("why"));
    }
}
