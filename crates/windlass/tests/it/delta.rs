//! `windlass delta` on real files: bit-exact, whole or absent, and sure of its base.

use crate::command;
use std::fs;
use std::path::Path;

use crate::command::{Dice, Made, changed, names, save, save_synthetic, zoo};
use windlass_core::Dtype;

fn same(a: &Path, b: &Path) -> bool {
    fs::read(a).unwrap() == fs::read(b).unwrap()
}

#[test]
fn every_dtype_round_trips_at_every_change_rate_in_every_mode() {
    let dir = tempfile::tempdir().unwrap();
    let [base, new, delta, out] = ["base", "new", "delta", "out"].map(|n| dir.path().join(n));
    for (long, share) in [(false, 0.0f64), (false, 0.5), (true, 0.003), (true, 0.5), (true, 1.0)] {
        let mut dice = Dice(share.to_bits());
        let before = zoo(&mut dice, long);
        let after = changed(&before, share, &mut dice);
        save(&base, &before);
        save(&new, &after);
        for mode in ["plain", "context", "auto"] {
            run!("delta", "make", &base, &new, "-o", &delta, "--mode", mode).ok();
            run!("delta", "apply", &base, &delta, "-o", &out).ok();
            assert!(same(&out, &new), "{mode} at {share}");
            let (size, image) = (fs::metadata(&delta).unwrap().len(), fs::metadata(&new).unwrap().len());
            assert!(share > 0.0 || size < 250, "an empty delta of {size} bytes");
            assert!(size < image + image / 100 + 2000, "{mode} at {share}: {size} of {image}");
        }
    }
}

#[test]
fn signed_zeros_and_nan_payloads_are_bits_like_any_others() {
    let dir = tempfile::tempdir().unwrap();
    let [base, new, delta, out] = ["base", "new", "delta", "out"].map(|n| dir.path().join(n));
    let f32s = |bits: &[u32]| bits.iter().flat_map(|b| b.to_le_bytes()).collect::<Vec<u8>>();
    let bf16 = |bits: &[u16]| bits.iter().flat_map(|b| b.to_le_bytes()).collect::<Vec<u8>>();
    let nan = 0x7fc0_0001;
    save(
        &base,
        &[
            Made::new("a", Dtype::F32, &[5], f32s(&[0, 0x8000_0000, nan, 0xffc0_0000, 0x7f80_0000])),
            Made::new("b", Dtype::BF16, &[4], bf16(&[0, 0x8000, 0x7fc1, 0x3f80])),
        ],
    );
    save(
        &new,
        &[
            Made::new("a", Dtype::F32, &[5], f32s(&[0x8000_0000, 0, nan + 1, 0xffc0_0000, 0xff80_0000])),
            Made::new("b", Dtype::BF16, &[4], bf16(&[0x8000, 0, 0xffc1, 0x3f80])),
        ],
    );
    let diff = run!("diff", &base, &new, "--json").ok().json();
    assert_eq!((&diff["elements"], &diff["changed"]), (&9.into(), &7.into()));
    for mode in ["plain", "context"] {
        run!("delta", "make", &base, &new, "-o", &delta, "--mode", mode).ok();
        run!("delta", "apply", &base, &delta, "-o", &out).ok();
        assert!(same(&out, &new));
    }
}

#[test]
fn a_delta_does_not_depend_on_the_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let (base, new) = save_synthetic(dir.path(), 3 << 20, 0.015);
    let delta = dir.path().join("delta");
    for mode in ["plain", "context"] {
        let mut first = None;
        for threads in ["1", "2", "7"] {
            run!("delta", "make", &base, &new, "-o", &delta, "--mode", mode, "--threads", threads).ok();
            let bytes = fs::read(&delta).unwrap();
            assert!(*first.get_or_insert_with(|| bytes.clone()) == bytes, "{mode} with {threads} threads");
        }
    }
}

#[test]
fn directories_of_shards_are_checkpoints_like_files() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let mut dice = Dice(5);
    let before = zoo(&mut dice, true);
    let after = changed(&before, 0.01, &mut dice);
    for (name, tensors) in [("base", &before), ("new", &after)] {
        let shards = d.join(name);
        fs::create_dir(&shards).unwrap();
        let (one, two) = tensors.split_at(9);
        save(&shards.join("model-00001-of-00002.safetensors"), one);
        save(&shards.join("model-00002-of-00002.safetensors"), two);
        let map = one.iter().map(|t| (&t.name, "model-00001-of-00002.safetensors"));
        let map = map.chain(two.iter().map(|t| (&t.name, "model-00002-of-00002.safetensors")));
        let map: serde_json::Map<_, _> = map.map(|(n, s)| (n.clone(), s.into())).collect();
        let index = serde_json::json!({ "metadata": {}, "weight_map": map });
        fs::write(shards.join("model.safetensors.index.json"), index.to_string()).unwrap();
        save(&d.join(format!("{name}.safetensors")), tensors);
    }
    let [base, new, delta, out] = ["base", "new", "delta", "out"].map(|n| d.join(n));
    let (base_file, new_file) = (d.join("base.safetensors"), d.join("new.safetensors"));
    // Made from directories, applied to a directory and to the same checkpoint in one file.
    run!("delta", "make", &base, &new, "-o", &delta).ok();
    run!("delta", "apply", &base, &delta, "-o", &out).ok();
    assert_eq!(names(&out), names(&new));
    assert!(names(&new).iter().all(|n| same(&out.join(n), &new.join(n))));
    let digest = run!("verify", &out, "--json").ok().json()["state_digest"].clone();
    assert_eq!(digest, run!("verify", &new_file, "--json").ok().json()["state_digest"]);
    let single = d.join("single.safetensors");
    run!("delta", "apply", &base_file, &delta, "-o", &single).ok();
    assert!(same(&single, &new_file));
    // In place, and then again.
    run!("delta", "apply", &base, &delta, "--in-place").ok();
    assert!(names(&new).iter().all(|n| same(&base.join(n), &new.join(n))));
    run!("delta", "apply", &base, &delta, "--in-place").ok();
    let again = run!("delta", "apply", &base, &delta, "-o", &out);
    assert!(again.code == 2 && again.stderr.contains("already exists"), "{}", again.stderr);
}

#[test]
fn a_wrong_base_is_refused_by_name_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let mut dice = Dice(6);
    let before = zoo(&mut dice, true);
    let after = changed(&before, 0.01, &mut dice);
    let [base, new, wrong, delta, out] = ["base", "new", "wrong", "delta", "out"].map(|n| d.join(n));
    save(&base, &before);
    save(&new, &after);
    for mode in ["plain", "context"] {
        run!("delta", "make", &base, &new, "-o", &delta, "--mode", mode).ok();
        // One bit in a block that the delta changes, and one in a tensor that it does not.
        for (tensor, what) in [("zoo.bfloat16", "tensor \"zoo.bfloat16\""), ("zoo.scalar", "does not change")]
        {
            let mut tensors = before.clone();
            tensors.iter_mut().find(|t| t.name == tensor).unwrap().bytes[1] ^= 4;
            if tensor == "zoo.scalar" {
                // The scalar must be the same in both versions for its block to have no record.
                let old = before.iter().find(|t| t.name == tensor).unwrap().bytes.clone();
                let mut target = after.clone();
                target.iter_mut().find(|t| t.name == tensor).unwrap().bytes = old;
                save(&new, &target);
                run!("delta", "make", &base, &new, "-o", &delta, "--mode", mode).ok();
            }
            save(&wrong, &tensors);
            let untouched = fs::read(&wrong).unwrap();
            for args in [vec!["-o", out.to_str().unwrap()], vec!["--in-place"]] {
                let mut all =
                    vec!["delta", "apply", wrong.to_str().unwrap(), delta.to_str().unwrap(), "--json"];
                all.extend(args);
                let ran = command::run(&all);
                let error = &ran.json()["error"];
                assert_eq!((ran.code, error["kind"].as_str()), (4, Some("stale")), "{}", ran.stdout);
                assert!(error["message"].as_str().unwrap().contains(what), "{error}");
                assert!(fs::read(&wrong).unwrap() == untouched);
                assert_eq!(names(d), ["base", "delta", "new", "wrong"]);
            }
        }
    }
}

#[test]
fn damaged_deltas_are_refused_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let mut dice = Dice(7);
    let before = zoo(&mut dice, false);
    let [base, new, delta, bad, out] = ["base", "new", "delta", "bad", "out"].map(|n| d.join(n));
    save(&base, &before);
    save(&new, &changed(&before, 0.2, &mut dice));
    run!("delta", "make", &base, &new, "-o", &delta).ok();
    let whole = fs::read(&delta).unwrap();
    let untouched = fs::read(&base).unwrap();
    let mut cases: Vec<Vec<u8>> =
        [0, 1, 8, 50, whole.len() / 2, whole.len() - 1].map(|n| whole[..n].to_vec()).to_vec();
    for at in [0, 9, 40, 100, whole.len() / 2, whole.len() - 20, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        cases.push(damaged);
    }
    cases.push([whole.as_slice(), b"more"].concat());
    cases.push(untouched.clone());
    for case in cases {
        fs::write(&bad, &case).unwrap();
        for args in [vec!["-o", out.to_str().unwrap()], vec!["--in-place"]] {
            let mut all = vec!["delta", "apply", base.to_str().unwrap(), bad.to_str().unwrap(), "--json"];
            all.extend(args);
            let ran = command::run(&all);
            let error = &ran.json()["error"];
            assert!([2, 5].contains(&ran.code), "{} bytes: {}", case.len(), ran.stdout);
            assert!(error["message"].as_str().unwrap().contains("bad"), "{error}");
        }
        assert!(run!("delta", "show", &bad).code != 0);
    }
    assert!(fs::read(&base).unwrap() == untouched);
    assert_eq!(names(d), ["bad", "base", "delta", "new"]);
}

#[test]
fn applying_in_place_twice_changes_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let (base, new) = save_synthetic(dir.path(), 1 << 20, 0.015);
    let delta = dir.path().join("delta");
    run!("delta", "make", &base, &new, "-o", &delta).ok();
    let first = run!("delta", "apply", &base, &delta, "--in-place", "--json").ok().json();
    assert!(same(&base, &new));
    assert!(first["applied"].as_u64() > Some(0) && first["applied"] == first["records"]);
    let second = run!("delta", "apply", &base, &delta, "--in-place", "--json").ok().json();
    assert_eq!((&second["applied"], &second["skipped"]), (&0.into(), &first["records"]));
    assert!(same(&base, &new));
    assert_eq!(names(dir.path()), ["base.safetensors", "delta", "new.safetensors"]);
}

/// The head of the journal of an update, given what `delta make` said of the delta.
fn journal_head(made: &serde_json::Value) -> Vec<u8> {
    let mut head = b"WLJRNL1\0".to_vec();
    for key in ["base_digest", "target_digest"] {
        let hex = made[key].as_str().unwrap();
        head.extend((0..16).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()));
    }
    head
}

/// A dense record fits any block: only the digest of the whole shows that it is not the base.
#[test]
fn a_wrong_base_of_dense_records_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c, delta, out] = ["a", "b", "c", "delta", "out"].map(|n| dir.path().join(n));
    let mut dice = Dice(11);
    for path in [&a, &b, &c] {
        save(path, &[Made::random("w", Dtype::F32, &[100_000], &mut dice)]);
    }
    let made = run!("delta", "make", &a, &b, "-o", &delta, "--json").ok().json();
    let digest = run!("verify", &c, "--json").ok().json()["state_digest"].clone();
    let wrong = fs::read(&c).unwrap();
    for ran in
        [run!("delta", "apply", &c, &delta, "--in-place"), run!("delta", "apply", &c, &delta, "-o", &out)]
    {
        assert_eq!(ran.code, 4, "{}", ran.stderr);
        for named in [&digest, &made["base_digest"], &made["target_digest"]] {
            assert!(ran.stderr.contains(named.as_str().unwrap()), "{}", ran.stderr);
        }
    }
    assert!(fs::read(&c).unwrap() == wrong);
    assert_eq!(names(dir.path()), ["a", "b", "c", "delta"]);
    run!("delta", "apply", &a, &delta, "--in-place").ok();
    assert!(same(&a, &b));
    let again = run!("delta", "apply", &a, &delta, "--in-place", "--json").ok().json();
    assert_eq!((&again["applied"], &again["skipped"]), (&0.into(), &again["records"]));
    run!("delta", "apply", &a, &delta, "-o", &out).ok();
    assert!(same(&out, &b));
}

#[test]
fn a_base_with_an_unfinished_update_is_refused_until_it_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c, delta, other, out] = ["a", "b", "c", "delta", "other", "out"].map(|n| dir.path().join(n));
    let mut dice = Dice(12);
    for path in [&a, &b, &c] {
        save(path, &[Made::random("w", Dtype::F32, &[100_000], &mut dice)]);
    }
    let made = run!("delta", "make", &a, &b, "-o", &delta, "--json").ok().json();
    run!("delta", "make", &a, &c, "-o", &other).ok();
    // The first half is new already, and the update's journal is there.
    let (mut half, target) = (fs::read(&a).unwrap(), fs::read(&b).unwrap());
    let start = 8 + u64::from_le_bytes(*half.first_chunk().unwrap()) as usize;
    let block = start + (256 << 10);
    half[start..block].copy_from_slice(&target[start..block]);
    fs::write(&a, &half).unwrap();
    let journal = dir.path().join(".a.windlass-journal");
    fs::write(&journal, journal_head(&made)).unwrap();
    for ran in [
        run!("delta", "apply", &a, &delta, "-o", &out),
        run!("delta", "apply", &a, &other, "--in-place"),
        run!("delta", "make", &a, &b, "-o", &out),
        run!("delta", "make", &b, &a, "-o", &out),
        run!("diff", &a, &b),
        run!("verify", &a),
    ] {
        assert_eq!(ran.code, 4, "{}", ran.stderr);
        assert!(ran.stderr.contains("has an unfinished in-place update (journal "), "{}", ran.stderr);
        assert!(ran.stderr.contains("--in-place` again to finish it"), "{}", ran.stderr);
    }
    assert!(!out.exists() && fs::read(&a).unwrap() == half);
    assert!(run!("inspect", &a).ok().stderr.contains("warning: "));
    assert_eq!(run!("inspect", &a, "--json").ok().json()["unfinished_update"], true);
    run!("delta", "apply", &a, &delta, "--in-place").ok();
    assert!(same(&a, &b) && !journal.exists());
    run!("verify", &a).ok();
}

#[test]
fn an_interrupted_update_in_place_says_that_the_base_is_half_new() {
    let dir = tempfile::tempdir().unwrap();
    let (base, new) = save_synthetic(dir.path(), 24 << 20, 0.015);
    let delta = dir.path().join("delta");
    run!("delta", "make", &base, &new, "-o", &delta, "--mode", "context").ok();
    let original = fs::read(&base).unwrap();
    let journal = dir.path().join(".base.safetensors.windlass-journal");
    let mut interrupted = 0;
    for _ in 0..20 {
        fs::write(&base, &original).unwrap();
        let mut child = command::windlass()
            .args(["delta", "apply", "--in-place", "--threads", "1"])
            .args([&base, &delta])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        while child.try_wait().unwrap().is_none() && fs::metadata(&journal).map_or(0, |m| m.len()) <= 40 {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        command::interrupt(&mut child);
        let ended = child.wait_with_output().unwrap();
        if ended.status.code() == Some(130) {
            let said = String::from_utf8(ended.stderr).unwrap();
            assert!(said.contains("is part old, part new"), "{said}");
            assert!(said.contains("run the same command again to finish"), "{said}");
            assert!(!said.contains("no partial output"), "{said}");
            assert_eq!(run!("verify", &base).code, 4);
            interrupted += 1;
        }
        run!("delta", "apply", &base, &delta, "--in-place").ok();
        assert!(same(&base, &new) && !journal.exists());
        if interrupted == 2 {
            break;
        }
    }
    assert!(interrupted > 0, "every attempt was over before it could be interrupted");
}

#[test]
fn results_have_the_mode_of_the_base() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |p: &Path| fs::metadata(p).unwrap().permissions().mode() & 0o777;
    let set = |p: &Path, mode| fs::set_permissions(p, fs::Permissions::from_mode(mode)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (base, new) = save_synthetic(dir.path(), 1 << 14, 0.01);
    let [delta, out, shards, outdir] = ["delta", "out", "shards", "outdir"].map(|n| dir.path().join(n));
    run!("delta", "make", &base, &new, "-o", &delta).ok();
    fs::create_dir(&shards).unwrap();
    let shard = shards.join("model.safetensors");
    fs::copy(&base, &shard).unwrap();
    for (file, folder) in [(0o600, 0o700), (0o664, 0o775)] {
        set(&base, file);
        set(&shard, file);
        set(&shards, folder);
        run!("delta", "apply", &base, &delta, "-o", &out).ok();
        run!("delta", "apply", &shards, &delta, "-o", &outdir).ok();
        let made = [mode(&out), mode(&outdir.join("model.safetensors")), mode(&outdir)];
        assert_eq!(made, [file, file, folder]);
        fs::remove_dir_all(&outdir).unwrap();
    }
}

/// A process killed within a write leaves a block that is neither old nor new.
#[test]
fn a_torn_block_is_mended_from_the_journal_and_only_from_there() {
    let dir = tempfile::tempdir().unwrap();
    let (base, new) = save_synthetic(dir.path(), 1 << 20, 0.015);
    let delta = dir.path().join("delta");
    let made = run!("delta", "make", &base, &new, "-o", &delta, "--mode", "context", "--json").ok().json();
    let (mut torn, target) = (fs::read(&base).unwrap(), fs::read(&new).unwrap());
    // The first block of the first tensor begins where the header ends.
    let start = 8 + u64::from_le_bytes(*torn.first_chunk().unwrap()) as usize;
    let block = start..start + (128 << 10);
    torn[start..start + (64 << 10)].copy_from_slice(&target[start..start + (64 << 10)]);
    fs::write(&base, &torn).unwrap();
    let ran = run!("delta", "apply", &base, &delta, "--in-place");
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(fs::read(&base).unwrap() == torn);
    // What the killed process had noted: the update, block 0, its length, its new bytes.
    let journal = dir.path().join(".base.safetensors.windlass-journal");
    let head = (u64::from(0u32) | (128 << 10) << 32).to_le_bytes();
    let mut slot = [&journal_head(&made)[..], &head, &target[block]].concat();
    slot[60] ^= 1;
    fs::write(&journal, &slot).unwrap();
    assert_eq!(run!("delta", "apply", &base, &delta, "--in-place").code, 4, "a damaged slot mends nothing");
    slot[60] ^= 1;
    fs::write(&journal, &slot).unwrap();
    run!("delta", "apply", &base, &delta, "--in-place").ok();
    assert!(same(&base, &new));
    assert!(!journal.exists());
}

#[test]
fn an_update_in_place_that_is_killed_is_finished_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let (base, new) = save_synthetic(dir.path(), 24 << 20, 0.015);
    let delta = dir.path().join("delta");
    run!("delta", "make", &base, &new, "-o", &delta, "--mode", "context").ok();
    let original = fs::read(&base).unwrap();
    let mut interrupted = 0;
    for attempt in 0..12 {
        fs::write(&base, &original).unwrap();
        let mut child = command::windlass()
            .args(["delta", "apply", "--in-place", "--threads", "3"])
            .args([&base, &delta])
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // Writing has begun when the journal has bytes.
        let journal = dir.path().join(".base.safetensors.windlass-journal");
        while child.try_wait().unwrap().is_none() && fs::metadata(&journal).map_or(0, |m| m.len()) == 0 {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        std::thread::sleep(std::time::Duration::from_millis(attempt * 2));
        let _ = child.kill();
        interrupted += u32::from(!child.wait().unwrap().success());
        run!("delta", "apply", &base, &delta, "--in-place").ok();
        assert!(same(&base, &new), "after attempt {attempt}");
        assert!(!journal.exists());
    }
    assert!(interrupted > 0, "every attempt was over before it could be killed");
}

#[test]
fn layouts_that_differ_are_refused_by_the_name_of_a_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let mut dice = Dice(8);
    let tensors = zoo(&mut dice, false);
    let [base, new, out] = ["base", "new", "out"].map(|n| d.join(n));
    save(&base, &tensors);
    let mut renamed = tensors.clone();
    renamed[3].name = "zoo.renamed".into();
    let mut reshaped = tensors.clone();
    let shape = reshaped[14].shape.clone();
    reshaped[14].shape = vec![shape[1], shape[0]];
    let mut retyped = tensors.clone();
    let at = retyped.iter().position(|t| t.dtype == Dtype::F16).unwrap();
    retyped[at].dtype = Dtype::BF16;
    let mut more = tensors.clone();
    more.push(Made::random("zoo.more", Dtype::U8, &[3], &mut dice));
    let cases = [
        (&renamed, tensors[3].name.as_str()),
        (&reshaped, tensors[14].name.as_str()),
        (&retyped, "zoo.float16"),
        (&more, "zoo.more"),
    ];
    for (other, name) in cases {
        save(&new, other);
        for args in [vec!["delta", "make", "-o", out.to_str().unwrap()], vec!["diff"]] {
            let mut all = args;
            all.extend([base.to_str().unwrap(), new.to_str().unwrap()]);
            let ran = command::run(&all);
            assert!(ran.code == 2 && ran.stderr.contains(&format!("{name:?}")), "{}", ran.stderr);
            assert!(!out.exists());
        }
    }
    // A delta for one layout and an image of another.
    save(&new, &tensors);
    run!("delta", "make", &base, &new, "-o", &out).ok();
    save(&new, &more);
    let ran = run!("delta", "apply", &new, &out, "--in-place");
    assert!(ran.code == 4 && ran.stderr.contains("layout"), "{}", ran.stderr);
}

#[test]
fn outputs_never_overwrite_inputs() {
    let dir = tempfile::tempdir().unwrap();
    let (base, new) = save_synthetic(dir.path(), 1 << 14, 0.01);
    let delta = dir.path().join("delta");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&base, &link).unwrap();
    run!("delta", "make", &base, &new, "-o", &delta).ok();
    let before = [&base, &new, &delta].map(|p| fs::read(p).unwrap());
    for out in [&base, &new, &link] {
        let ran = run!("delta", "make", &base, &new, "-o", out);
        assert!(ran.code == 2 && ran.stderr.contains("would change the input"), "{}", ran.stderr);
    }
    for out in [&base, &delta, &link] {
        assert_eq!(run!("delta", "apply", &base, &delta, "-o", out).code, 2);
    }
    assert!(before == [&base, &new, &delta].map(|p| fs::read(p).unwrap()));
}
