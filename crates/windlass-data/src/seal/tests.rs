use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use windlass_core::Dtype;
use windlass_core::delta::{Delta, Mode};
use windlass_core::manifest::TensorSpec;

use super::testing::*;
use super::*;
use crate::simd::kernels;

fn job<'a>(
    manifest: &'a Manifest,
    blocks: &'a BlockRanges,
    model_id: &'a ModelId,
    new: &'a [u8],
    base: Option<Base<'a>>,
    stop: &'a Stop,
) -> SealJob<'a> {
    SealJob {
        kernels: kernels(),
        manifest,
        blocks,
        model_id,
        incarnation: INCARNATION,
        version: 2,
        new,
        base,
        out: None,
        encoder: Encoder::plain,
        threads: 3,
        stop,
        progress: &|_| (),
    }
}

/// Two images and the table of the first.
fn two(manifest: &Manifest, seed: u64) -> (Vec<u8>, Vec<u8>, SumTable) {
    let mut dice = Dice(seed);
    let old = image(manifest, &mut dice);
    let mut new = old.clone();
    change(manifest, &mut dice, &mut new, &vec![7; old.len()]);
    let sums = table(manifest, &old);
    (old, new, sums)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_sealed_delta_leads_to_the_new_image_whatever_the_number_of_threads(seed: u64, threads in 1usize..9) {
        let (manifest, dir, stop) = (odd_manifest(), tempfile::tempdir().unwrap(), Stop::never());
        let (old, new, sums) = two(&manifest, seed);
        let base = Base { data: &old, sums: &sums, version: 1 };
        let (plain, context) = (dir.path().join("plain"), dir.path().join("context"));
        let (blocks, model_id) = (all(&manifest), model());
        let one = SealJob {
            out: Some(&plain),
            threads: 1,
            ..job(&manifest, &blocks, &model_id, &new, Some(base), &stop)
        };
        let sealed = seal(one).unwrap();
        let expected = table(&manifest, &new);
        prop_assert_eq!(&sealed.sums, &expected);
        prop_assert_eq!((sealed.state, sealed.digest), (expected.state(), expected.digest(&manifest)));
        let other = SealJob { out: Some(&context), encoder: Encoder::with_context, ..one };
        let other = seal(other).unwrap();
        prop_assert_eq!((&other.sums, other.digest), (&sealed.sums, sealed.digest));
        for (path, file) in [(&plain, sealed.delta.unwrap()), (&context, other.delta.unwrap())] {
            let bytes = fs::read(path).unwrap();
            let delta = Delta::parse(&bytes).unwrap();
            prop_assert_eq!(&delta.header, &file.header);
            prop_assert_eq!((bytes.len() as u64, delta.changes), (file.bytes, file.changes));
            prop_assert_eq!(delta.header.base_digest, sums.digest(&manifest));
            prop_assert_eq!(delta.header.target_digest, sealed.digest);
            let with_context = delta.records().filter(|r| r.mode == Mode::Context).count() as u64;
            prop_assert_eq!(with_context, file.context_records);
            let mut got = old.clone();
            prop_assert_eq!(&apply(&manifest, &bytes, &mut got), &expected);
            prop_assert_eq!(&got, &new);
        }
        let again = dir.path().join("again");
        seal(SealJob { out: Some(&again), threads, ..one }).unwrap();
        prop_assert!(fs::read(&plain).unwrap() == fs::read(&again).unwrap());
    }

    #[test]
    fn sealed_parts_add_up_to_the_whole(seed: u64, owners in 2u64..5) {
        let (manifest, dir, stop) = (odd_manifest(), tempfile::tempdir().unwrap(), Stop::never());
        let (old, new, sums) = two(&manifest, seed);
        let (mut dice, model_id) = (Dice(seed), model());
        let mut parts = vec![Vec::new(); owners as usize];
        (0..manifest.cuts().blocks()).for_each(|b| parts[dice.below(owners) as usize].push(b..b + 1));
        let (mut state, mut records, mut got) = (StateSum::default(), 0, old.clone());
        for (i, part) in parts.into_iter().enumerate() {
            let (blocks, out): (BlockRanges, _) = (part.into_iter().collect(), dir.path().join(i.to_string()));
            // The table of the base may have more than the part, or nothing but the part.
            let own = restrict(&manifest, &sums, &blocks).unwrap();
            let base = Base { data: &old, sums: if i % 2 == 0 { &sums } else { &own }, version: 1 };
            let part = SealJob { out: Some(&out), ..job(&manifest, &blocks, &model_id, &new, Some(base), &stop) };
            let sealed = seal(part).unwrap();
            prop_assert_eq!(sealed.state, sealed.sums.state());
            prop_assert_eq!(sealed.state, part_state(&manifest, &table(&manifest, &new), &blocks).unwrap());
            let alone = seal(SealJob { base: None, ..part }).unwrap();
            prop_assert_eq!(&alone.sums, &sealed.sums);
            state = state.plus(sealed.state);
            let bytes = fs::read(&out).unwrap();
            let delta = Delta::parse(&bytes).unwrap();
            prop_assert!(delta.entries().iter().all(|e| blocks.contains(e.block)));
            prop_assert_eq!(delta.header.base_digest, own.digest(&manifest));
            records += delta.entries().len();
            apply(&manifest, &bytes, &mut got);
        }
        prop_assert_eq!(state.digest(manifest.layout_hash()), table(&manifest, &new).digest(&manifest));
        prop_assert!(got == new);
        let whole = dir.path().join("whole");
        seal_step(&manifest, (1, 2), (&old, &sums), &new, &whole).unwrap();
        prop_assert_eq!(Delta::parse(&fs::read(&whole).unwrap()).unwrap().entries().len(), records);
    }
}

#[test]
fn sealing_without_a_base_or_a_place_sums_the_new_image() {
    let (manifest, stop, model_id) = (odd_manifest(), Stop::never(), model());
    let (old, new, sums) = two(&manifest, 5);
    let (blocks, expected) = (all(&manifest), table(&manifest, &new));
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let without_base = SealJob { out: Some(&out), ..job(&manifest, &blocks, &model_id, &new, None, &stop) };
    let base = Base { data: &old, sums: &sums, version: 1 };
    for job in [without_base, job(&manifest, &blocks, &model_id, &new, Some(base), &stop)] {
        let sealed = seal(job).unwrap();
        assert!(sealed.delta.is_none() && !out.exists());
        assert_eq!(sealed.sums, expected);
    }
}

#[test]
fn an_unchanged_version_keeps_its_sums_and_has_no_records() {
    let (manifest, dir) = (odd_manifest(), tempfile::tempdir().unwrap());
    let (old, _, sums) = two(&manifest, 8);
    let out = dir.path().join("out");
    let sealed = seal_step(&manifest, (4, 9), (&old, &sums), &old, &out).unwrap();
    assert_eq!(sealed.sums, sums);
    let bytes = fs::read(&out).unwrap();
    let delta = Delta::parse(&bytes).unwrap();
    assert_eq!((delta.entries().len(), delta.changes), (0, 0));
    assert_eq!((delta.header.base.1, delta.header.target.1), (4, 9));
}

#[test]
fn a_base_that_changed_after_it_was_sealed_is_noticed() {
    let (manifest, dir) = (odd_manifest(), tempfile::tempdir().unwrap());
    let (mut old, new, sums) = two(&manifest, 11);
    let at = old.len() / 2;
    old[at] ^= 4;
    let error = seal_step(&manifest, (1, 2), (&old, &sums), &new, &dir.path().join("out")).unwrap_err();
    let blocks = 0..manifest.cuts().blocks();
    let hit = |b: &u32| {
        let block = manifest.cuts().block(*b).unwrap();
        manifest.byte_runs(&block).any(|run| run.contains(&(at as u64)))
    };
    let expected = blocks.clone().find(hit).unwrap();
    assert!(matches!(error, SealError::BaseChanged { block } if block == expected), "{error}");
    assert_eq!(error.kind(), Kind::Corrupt);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "no delta is left");
}

#[test]
fn jobs_that_do_not_fit_are_refused_by_name() {
    let (manifest, dir, stop) = (odd_manifest(), tempfile::tempdir().unwrap(), Stop::never());
    let (old, new, sums) = two(&manifest, 3);
    let (blocks, model_id, out) = (all(&manifest), model(), dir.path().join("out"));
    let base = Base { data: &old, sums: &sums, version: 1 };
    let good = SealJob { out: Some(&out), ..job(&manifest, &blocks, &model_id, &new, Some(base), &stop) };
    let refused = |job: SealJob<'_>| seal(job).unwrap_err();

    let e = refused(SealJob { new: &new[1..], ..good });
    assert!(matches!(e, SealError::ImageLength { which: "new", have, need } if have + 1 == need), "{e}");
    let short = Base { data: &old[1..], ..base };
    let e = refused(SealJob { base: Some(short), ..good });
    assert!(matches!(e, SealError::ImageLength { which: "base", .. }), "{e}");
    let e = refused(SealJob { version: 1, ..good });
    assert!(matches!(e, SealError::NotNewer { version: 1, base: 1 }) && e.kind() == Kind::Stale, "{e}");
    let beyond = (0..manifest.cuts().blocks() + 1).into();
    for base in [Some(base), None] {
        let e = refused(SealJob { blocks: &beyond, base, ..good });
        assert!(matches!(e, SealError::BeyondBlocks { end, have } if end == have + 1), "{e}");
    }
    let small = Manifest::new([TensorSpec::new("w", Dtype::U8, [1])], BTreeMap::new()).unwrap();
    let foreign = table(&small, &[0]);
    let e = refused(SealJob { base: Some(Base { sums: &foreign, ..base }), ..good });
    assert!(matches!(e, SealError::TableLength { have: 1, .. }), "{e}");
    let nowhere = dir.path().join("no/such/place");
    let e = refused(SealJob { out: Some(&nowhere), ..good });
    assert!(matches!(e, SealError::Io { .. }) && e.kind() == Kind::NotFound, "{e}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_stopped_seal_ends_with_the_block_at_hand_and_leaves_no_file() {
    let spec = TensorSpec::new("w", Dtype::U8, [200 << 16]);
    let (manifest, dir) = (Manifest::new([spec], BTreeMap::new()).unwrap(), tempfile::tempdir().unwrap());
    let (old, new) = (vec![1; 200 << 16], vec![2; 200 << 16]);
    let (sums, blocks, model_id) = (table(&manifest, &old), all(&manifest), model());
    let out = dir.path().join("out");
    let base = Base { data: &old, sums: &sums, version: 1 };
    for with_base in [true, false] {
        let (stop, done) = (Stop::never(), AtomicUsize::new(0));
        let progress = |_| {
            if done.fetch_add(1, Ordering::Relaxed) == 20 {
                stop.set();
            }
        };
        let (base, threads) = (with_base.then_some(base), 3);
        let plain = job(&manifest, &blocks, &model_id, &new, base, &stop);
        let e = seal(SealJob { out: Some(&out), threads, progress: &progress, ..plain }).unwrap_err();
        assert!(matches!(e, SealError::Stopped(Stopped::Cancelled)) && e.kind() == Kind::Cancelled, "{e}");
        assert!(done.into_inner() <= 21 + threads, "no thread begins another block");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
    let late = Stop::after(std::time::Duration::ZERO);
    let e = seal(job(&manifest, &blocks, &model_id, &new, None, &late)).unwrap_err();
    assert!(matches!(e, SealError::Stopped(Stopped::Deadline)) && e.kind() == Kind::Timeout, "{e}");
}

#[test]
fn fifty_thousand_tiny_tensors_are_sealed() {
    let specs = (0..50_000).map(|i| TensorSpec::new(format!("t{i:05}"), Dtype::BF16, [1 + i % 3]));
    let (manifest, dir) = (Manifest::new(specs, BTreeMap::new()).unwrap(), tempfile::tempdir().unwrap());
    let old = vec![3; manifest.data_bytes() as usize];
    let mut new = old.clone();
    new.iter_mut().step_by(64).for_each(|b| *b = 4);
    let (sums, out) = (table(&manifest, &old), dir.path().join("out"));
    let sealed = seal_step(&manifest, (1, 2), (&old, &sums), &new, &out).unwrap();
    assert_eq!(sealed.sums, table(&manifest, &new));
    let mut got = old;
    apply(&manifest, &fs::read(&out).unwrap(), &mut got);
    assert!(got == new);
}

#[test]
fn an_image_without_tensors_is_sealed() {
    let (manifest, dir) = (Manifest::new([], BTreeMap::new()).unwrap(), tempfile::tempdir().unwrap());
    let (sums, out) = (table(&manifest, &[]), dir.path().join("out"));
    let sealed = seal_step(&manifest, (0, 1), (&[], &sums), &[], &out).unwrap();
    assert_eq!(sealed.digest, sums.digest(&manifest));
    assert_eq!(sealed.delta.unwrap().bytes, fs::metadata(&out).unwrap().len());
}

mod tables {
    use super::super::table::{self, StoredTable, TableError, TableId};
    use super::*;

    const ID: TableId = TableId { incarnation: INCARNATION, version: 12, slot_id: 34 };

    fn stored(manifest: &Manifest, path: &Path) -> StoredTable {
        let sums = super::table(manifest, &image(manifest, &mut Dice(1)));
        let digest = sums.digest(manifest);
        table::write(path, manifest, ID, digest, &sums).unwrap();
        StoredTable { id: ID, digest, sums }
    }

    #[test]
    fn a_sum_table_on_disk_is_read_back_or_refused_by_name() {
        let (manifest, dir) = (odd_manifest(), tempfile::tempdir().unwrap());
        let path = dir.path().join("a.sums");
        let e = table::read(&path, &manifest).unwrap_err();
        assert!(matches!(e, TableError::Io { .. }) && e.kind() == Kind::NotFound, "{e}");
        let expected = stored(&manifest, &path);
        assert_eq!(table::read(&path, &manifest).unwrap(), expected);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

        let whole = fs::read(&path).unwrap();
        let longer = [whole.as_slice(), b"x"].concat();
        for (bytes, named) in [
            (&b""[..], "Magic"),
            (b"something else", "Magic"),
            (&whole[..20], "Length"),
            (&whole[..whole.len() - 1], "Length"),
            (&longer, "Length"),
        ] {
            fs::write(&path, bytes).unwrap();
            let e = table::read(&path, &manifest).unwrap_err();
            assert!(format!("{e:?}").starts_with(named), "{e:?}");
        }
        fs::write(&path, &whole).unwrap();
        let uncut = manifest.clone().with_cuts(&BTreeMap::new()).unwrap();
        let e = table::read(&path, &uncut).unwrap_err();
        assert!(matches!(e, TableError::Foreign { what: "cut table", .. }) && e.kind() == Kind::Stale, "{e}");
        let other = Manifest::new([TensorSpec::new("w", Dtype::U8, [1])], BTreeMap::new()).unwrap();
        let e = table::read(&path, &other).unwrap_err();
        assert!(matches!(e, TableError::Foreign { what: "layout", .. }), "{e}");
    }

    #[test]
    fn no_flipped_bit_of_a_sum_table_goes_unseen() {
        let (manifest, dir) = (odd_manifest(), tempfile::tempdir().unwrap());
        let path = dir.path().join("a.sums");
        stored(&manifest, &path);
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            fs::write(&path, bytes).unwrap();
            assert!(table::read(&path, &manifest).is_err(), "byte {at}");
        }
    }
}
