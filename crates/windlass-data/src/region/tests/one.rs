//! Regions by one process.

use std::os::unix::fs::PermissionsExt;

use safetensors::SafeTensors;
use windlass_core::error::Kind;

use super::*;
use crate::private::PrivateError;
use crate::shm::{Granted, Prepared};

fn soon() -> Stop {
    Stop::after(Duration::from_secs(30))
}

fn publish(writer: &mut Writer, version: Version) -> Committed {
    write_share(writer, version, Shape { seed: version, ranks: 1 }, &soon()).unwrap()
}

#[test]
fn a_version_goes_through_commit_lease_and_seal() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let mut writer = region.writer(0).unwrap();
    let agent = region.agent().unwrap();
    assert_eq!(agent.seal().unwrap().map(|s| s.new.id()), None);
    for version in 1..=4u64 {
        assert_eq!(publish(&mut writer, version).version, version);
        let seal = agent.seal().unwrap().unwrap();
        assert!(seal.new.data() == expected(&region, version));
        assert_eq!(seal.base.as_ref().map(Lease::version), (version > 1).then_some(version - 1));
        seal.finish(StateDigest([version as u8; 16])).unwrap();
        assert!(agent.seal().unwrap().is_none());
        let state = region.state();
        assert_eq!(state.active.unwrap().sealed, Some(StateDigest([version as u8; 16])));
        assert_eq!((state.attempt, state.phase), (version, Phase::Quiet));
    }
}

#[test]
fn slots_open_with_the_safetensors_library_while_mapped() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let mut writer = region.writer(0).unwrap();
    for version in 1..=2 {
        let slot = publish(&mut writer, version).slot;
        let file = std::fs::read(region.slot_path(slot)).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let data = expected(&region, version);
        for t in region.manifest().tensors() {
            let view = tensors.tensor(&t.name).unwrap();
            assert_eq!(view.data(), &data[t.offset as usize..(t.offset + t.bytes) as usize], "{}", t.name);
        }
    }
    // Also in the middle of a write.
    let attempt = writer.begin(3, &soon()).unwrap();
    attempt.write(10, &[9; 1000]).unwrap();
    SafeTensors::deserialize(&std::fs::read(region.slot_path(attempt.slot())).unwrap()).unwrap();
}

#[test]
fn an_image_without_bytes_is_a_region_too() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let tensors = [TensorSpec::new("none", Dtype::F32, vec![3, 0])];
    let manifest = Arc::new(Manifest::new(tensors, BTreeMap::new()).unwrap());
    let region = Region::create(&RegionSpec { manifest, ..spec(home.path(), 1) }).unwrap();
    let mut writer = region.writer(0).unwrap();
    let attempt = writer.begin(1, &soon()).unwrap();
    attempt.write(0, &[]).unwrap();
    let e = attempt.write(0, &[1]).unwrap_err();
    assert!(matches!(e, RegionError::Beyond { offset: 0, end: 1, len: 0 }), "{e}");
    let committed = attempt.done(&soon()).unwrap();
    assert!(region.lease(committed.id, LeaseKind::Map, Duration::ZERO).unwrap().data().is_empty());
    assert_eq!(region.report().bytes, 0);
}

#[test]
fn a_dropped_attempt_leaves_the_version_before_it() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let mut writer = region.writer(0).unwrap();
    publish(&mut writer, 1);
    publish(&mut writer, 2);
    let before = region.state();
    let attempt = writer.begin(3, &soon()).unwrap();
    attempt.write(0, &[1; 100]).unwrap();
    assert_eq!(region.state().inactive, None, "what is being written is nobody's to read");
    let e = region.lease(before.inactive.unwrap().id, LeaseKind::Map, Duration::MAX).unwrap_err();
    assert!(matches!(e, RegionError::LeaseGone { id: 1 }) && e.kind() == Kind::Stale);
    drop(attempt);
    let state = region.state();
    assert_eq!((state.phase, state.active, state.inactive), (Phase::Aborted, before.active, None));
    publish(&mut writer, 3);
    assert_eq!(region.state().active.unwrap().id, 4, "ids are not used twice");
    let e = writer.begin(3, &soon()).unwrap_err();
    assert!(matches!(e, RegionError::VersionOrder { version: 3, current: 3 }), "{e}");
}

#[test]
fn a_lease_is_wanted_back_by_the_next_attempt_and_freed_by_dropping() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let mut writer = region.writer(0).unwrap();
    let first = publish(&mut writer, 1);
    let lease = region.lease(first.id, LeaseKind::Stream, Duration::from_mins(1)).unwrap();
    publish(&mut writer, 2);
    assert!(!lease.wanted_back() && lease.stands());
    std::thread::scope(|s| {
        let writing = s.spawn(|| publish(&mut writer, 3));
        while !lease.wanted_back() {
            region.wait(region.bell(), Duration::from_millis(10));
        }
        assert!(lease.data() == expected(&region, 1));
        lease.finish().unwrap();
        writing.join().unwrap();
    });
}

#[test]
fn an_expired_lease_is_broken_only_when_its_slot_is_needed() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let mut writer = region.writer(0).unwrap();
    let first = publish(&mut writer, 1);
    let lease = |id| region.lease(id, LeaseKind::Map, Duration::ZERO).unwrap();
    let (one, other) = (lease(first.id), lease(first.id));
    let second = publish(&mut writer, 2);
    let kept = lease(second.id);
    one.finish().unwrap();
    publish(&mut writer, 3);
    assert!(!other.stands() && other.wanted_back());
    assert!(matches!(other.renew(Duration::MAX), Err(RegionError::LeaseBroken { id: 1, .. })));
    assert!(other.finish().is_err());
    kept.renew(Duration::from_mins(1)).unwrap();
    let e = writer.begin(4, &Stop::after(Duration::from_millis(10))).unwrap_err();
    assert!(e.to_string().contains("taking back its slot"), "{e}");
    kept.finish().unwrap();
    publish(&mut writer, 4);
}

#[test]
fn leases_run_out_with_a_named_error_and_come_back() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let id = publish(&mut region.writer(0).unwrap(), 1).id;
    let take = || region.lease(id, LeaseKind::Stream, Duration::MAX);
    let mut leases: Vec<_> = (0..LEASES).map(|_| take().unwrap()).collect();
    let e = take().unwrap_err();
    assert!(matches!(e, RegionError::LeasesFull { max: LEASES, .. }) && e.kind() == Kind::Exhausted);
    leases.pop();
    take().unwrap();
}

#[test]
fn one_slot_is_written_in_place_when_nobody_reads() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&RegionSpec { slots: Slots::One, ..spec(home.path(), 1) }).unwrap();
    let mut writer = region.writer(0).unwrap();
    let id = publish(&mut writer, 7).id;
    let lease = region.lease(id, LeaseKind::Map, Duration::MAX).unwrap();
    let e = writer.begin(8, &Stop::after(Duration::from_millis(10))).unwrap_err();
    assert_eq!(e.kind(), Kind::Timeout);
    assert_eq!(region.state().active.unwrap().version, 7, "an attempt that never opened took nothing");
    drop(lease);
    drop(writer.begin(7, &soon()).unwrap());
    assert_eq!(region.state().active, None, "one slot, and it is not whole");
    publish(&mut writer, 7);
    assert_eq!(region.state().active.unwrap().version, 7);
}

#[test]
fn ranks_that_disagree_about_the_version_are_told() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 2)).unwrap();
    let (mut lead, mut other) = (region.writer(0).unwrap(), region.writer(1).unwrap());
    std::thread::scope(|s| {
        let leading = s.spawn(move || lead.begin(1, &soon()).map(|a| a.id()));
        let e = other.begin(2, &soon()).unwrap_err();
        assert!(matches!(e, RegionError::VersionMismatch { rank: 1, version: 2, opened: 1, .. }), "{e}");
        let e = leading.join().unwrap().unwrap_err();
        assert!(matches!(e, RegionError::Aborted { rank: 0, .. }), "{e}");
    });
}

#[test]
fn an_attempt_that_another_rank_gave_up_names_the_rank_that_did_not_come() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 3)).unwrap();
    let (mut lead, mut other) = (region.writer(0).unwrap(), region.writer(1).unwrap());
    let _absent = region.writer(2).unwrap();
    std::thread::scope(|s| {
        let waiting = s.spawn(move || other.begin(1, &soon()).map(|a| a.id()));
        let e = lead.begin(1, &Stop::after(Duration::from_millis(300))).unwrap_err();
        assert!(matches!(e, RegionError::Stopped { rank: 0, .. }), "{e}");
        let e = waiting.join().unwrap().unwrap_err();
        let RegionError::Aborted { rank: 1, missing, .. } = &e else { panic!("{e}") };
        assert_eq!(missing.iter().map(|m| m.rank).collect::<Vec<_>>(), [Some(2)]);
        assert!(e.to_string().contains("rank 2"), "{e}");
    });
}

#[test]
fn a_part_reserves_its_bytes_only_and_takes_no_others() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let manifest = large();
    let part = BlockRanges::from(3..5);
    let whole = spec(home.path(), 1);
    let region = Region::create(&RegionSpec { manifest, part: Some(part.clone()), ..whole.clone() }).unwrap();
    assert!(gc::allocated(region.dir()) < 1 << 20, "{}", gc::allocated(region.dir()));
    assert_eq!(Region::open(region.dir()).unwrap().part(), Some(&part));
    let block = region.manifest().cuts().block(3).unwrap();
    let run = region.manifest().byte_runs(&block).next().unwrap();
    let mut writer = region.writer(0).unwrap();
    let attempt = writer.begin(1, &soon()).unwrap();
    attempt.write(run.start, &bytes(run.clone(), 1)).unwrap();
    let e = attempt.write(0, &[1]).unwrap_err();
    assert!(matches!(e, RegionError::OutsidePart { offset: 0, end: 1 }), "{e}");
    assert!(attempt.write(run.end + (1 << 20), &[1]).is_err());
    region.report();
    attempt.done(&soon()).unwrap();
    assert!(gc::allocated(region.dir()) < 1 << 20, "reporting fills no holes");
    let bad = RegionSpec { part: Some(BlockRanges::from(0..9999)), dir: home.path().join("bad"), ..whole };
    assert!(matches!(Region::create(&bad), Err(RegionError::Manifest { .. })));
    assert!(!home.path().join("bad").exists());
}

#[test]
fn files_are_for_their_owner_or_for_the_group() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    for (group, name, modes) in
        [(false, "own", [0o700, 0o600, 0o600, 0o600]), (true, "group", [0o750, 0o660, 0o640, 0o640])]
    {
        let spec = RegionSpec { group, dir: home.path().join(name), ..spec(home.path(), 1) };
        let region = Region::create(&spec).unwrap();
        let mode = |path: PathBuf| path.metadata().unwrap().permissions().mode() & 0o7777;
        let files = [HEADER, MANIFEST, SLOT_NAMES[0]].map(|n| mode(region.dir().join(n)));
        assert_eq!([mode(spec.dir), files[0], files[1], files[2]], modes, "{name}");
    }
}

#[test]
fn a_region_is_passed_by_its_descriptors_with_its_lock() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let id = publish(&mut region.writer(0).unwrap(), 5).id;
    let fds: Vec<OwnedFd> = region.descriptors().iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
    drop(region);
    assert_eq!(gc(home.path()), [], "the lock came along");
    let attached = Region::attach(Descriptors::new(fds).unwrap()).unwrap();
    assert_eq!(attached.dir(), home.path().join("model"));
    let lease = attached.lease(id, LeaseKind::Map, Duration::MAX).unwrap();
    assert!(lease.data() == expected(&attached, 5));
    drop((lease, attached));
    assert_eq!(gc(home.path()).len(), 1);
    assert!(matches!(Descriptors::new(Vec::new()), Err(RegionError::Descriptors { found: 0, .. })));
}

#[test]
fn a_damaged_or_foreign_header_is_refused_by_name() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let spec = spec(home.path(), 1);
    assert!(matches!(Region::open(&spec.dir), Err(RegionError::Absent { .. })));
    let region = Region::create(&spec).unwrap();
    let put =
        |word: u64, value: u64| region.header_file.write_all_at(&value.to_le_bytes(), word * 8).unwrap();
    let get = |word: u64| {
        let mut bytes = [0; 8];
        region.header_file.read_exact_at(&mut bytes, word * 8).unwrap();
        u64::from_le_bytes(bytes)
    };
    // Magic, slots, ranks, leases, and the offset and length of the JSON.
    for (word, value) in
        [(0, 1), (2, 3), (3, 0), (3, 1 << 20), (4, 1 << 40), (8, 8), (8, u64::MAX), (9, u64::MAX), (9, 5)]
    {
        let was = get(word);
        put(word, value);
        let e = Region::open(&spec.dir).unwrap_err();
        assert!(matches!(e, RegionError::Damaged { .. }), "{word} {value}: {e}");
        put(word, was);
    }
    put(1, 2);
    assert!(matches!(Region::open(&spec.dir), Err(RegionError::Format { found: 2, supported: 1, .. })));
    put(1, 1);
    put(6, get(6) ^ 1);
    let e = Region::open(&spec.dir).unwrap_err();
    assert!(matches!(e, RegionError::OtherNamespace { .. }) && e.to_string().contains("--pid=host"), "{e}");
    put(6, get(6) ^ 1);
    Region::open(&spec.dir).unwrap();

    let other = manifest(1);
    std::fs::write(spec.dir.join(MANIFEST), other.to_json()).unwrap();
    assert!(matches!(Region::open(&spec.dir), Err(RegionError::Damaged { .. })));
    let taken = home.path().join("taken");
    std::fs::create_dir(&taken).unwrap();
    std::fs::write(taken.join("precious"), b"x").unwrap();
    let e = Region::create(&RegionSpec { dir: taken.clone(), ..spec }).unwrap_err();
    assert!(matches!(e, RegionError::Foreign { .. }) && taken.join("precious").exists(), "{e}");
}

/// What the kernel says of the mappings of a region's files in this process.
fn flags_of(dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut ours, mut found) = (false, Vec::new());
    for line in text.lines() {
        let is_head =
            line.split(' ').next().is_some_and(|range| range.contains('-') && !range.ends_with(':'));
        if is_head {
            ours = line.contains(&*dir.to_string_lossy());
        } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| ours) {
            found.push(flags.trim().to_owned());
        }
    }
    found
}

#[test]
fn what_was_granted_and_refused_for_the_memory_of_a_region_is_what_the_kernel_says() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let report = region.report();
    assert_eq!(report.bytes, 2 * region.manifest().data_bytes());
    assert!(report.shared);
    let flags = flags_of(region.dir());
    let any = |flag: &str| flags.iter().any(|f| f.split(' ').any(|f| f == flag));
    assert!(!flags.is_empty() && any("rd"), "{flags:?}");
    assert_eq!(report.locked == Granted::Yes, any("lo"), "{report}: {flags:?}");
    assert_eq!(report.huge_pages == Granted::Yes, any("hg"), "{report}: {flags:?}");
    let writer = region.writer(0).unwrap();
    assert_eq!(region.report().bytes, report.bytes);
    drop(writer);
}

#[test]
fn a_report_names_each_refusal_and_what_to_do() {
    let no = || Granted::No("operation not permitted".into());
    let all = Prepared {
        bytes: 1 << 20,
        shared: true,
        huge_pages: Granted::Yes,
        locked: Granted::Yes,
        resident: Granted::Yes,
    };
    let refused = Prepared { locked: no(), ..all.clone() };
    assert!(!all.to_string().contains("not permitted"), "{all}");
    assert!(all.to_string().contains("locked") && !all.to_string().contains("not locked"), "{all}");
    let text = refused.to_string();
    assert!(text.contains("not locked") && text.contains("operation not permitted"), "{text}");
}

/// A user that this process is not, and to which root can give things.
const OTHER: u32 = 65_534;

/// Gives a path to another user; false, and said loudly, where only root can.
fn give_away(path: &Path) -> bool {
    let given = std::os::unix::fs::lchown(path, Some(OTHER), Some(OTHER));
    if given.is_err() {
        eprintln!(
            "SKIPPED what belongs to another user: this test must run as root to give {} away",
            path.display()
        );
    }
    given.is_ok()
}

#[test]
fn a_region_directory_that_another_user_made_first_is_refused() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let spec = spec(home.path(), 1);
    // With a token of its own in it, by which it would be let in.
    std::fs::create_dir(&spec.dir).unwrap();
    std::fs::write(spec.dir.join(TOKEN), "0123456789abcdef0123456789abcdef").unwrap();
    if !give_away(&spec.dir) || !give_away(&spec.dir.join(TOKEN)) {
        return;
    }
    let mode = || std::fs::metadata(&spec.dir).unwrap().permissions().mode();
    let before = mode();
    let refused = |e: RegionError, what: &Path| {
        assert!(
            matches!(&e, RegionError::Private(PrivateError::Owner { owner: OTHER, path, .. }) if path == what),
            "{e}"
        );
        assert_eq!(e.kind(), windlass_core::error::Kind::Denied);
    };
    refused(Region::create(&spec).unwrap_err(), &spec.dir);
    refused(Region::open(&spec.dir).unwrap_err(), &spec.dir);
    assert_eq!(mode(), before, "what is refused is not changed");
    // The same for the directory that it is in, and for a region that was ours once.
    let below = RegionSpec { dir: spec.dir.join("below"), ..spec.clone() };
    refused(Region::create(&below).unwrap_err(), &spec.dir);
    assert!(!below.dir.exists());
    let given = RegionSpec { dir: home.path().join("given"), ..spec };
    drop(Region::create(&given).unwrap());
    assert!(give_away(&given.dir));
    refused(Region::open(&given.dir).unwrap_err(), &given.dir);
    assert_eq!(gc(home.path()), [], "nor is it collected");
    assert!(given.dir.join(HEADER).exists());
}

#[test]
fn a_region_is_not_made_where_others_can_replace_it() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let open = home.path().join("open");
    std::fs::create_dir(&open).unwrap();
    let spec = spec(&open, 1);
    let mode = |mode| std::fs::set_permissions(&open, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o777);
    let e = Region::create(&spec).unwrap_err();
    assert!(matches!(&e, RegionError::Private(PrivateError::Writable { path, .. }) if *path == open), "{e}");
    assert!(e.to_string().contains("chmod +t"), "{e}");
    mode(0o1777);
    drop(Region::create(&spec).unwrap());
    // A link instead of the directory could be anybody's region.
    let link = RegionSpec { dir: open.join("link"), ..spec.clone() };
    std::os::unix::fs::symlink(&spec.dir, &link.dir).unwrap();
    for e in [Region::create(&link).unwrap_err(), Region::open(&link.dir).unwrap_err()] {
        assert!(matches!(&e, RegionError::Private(PrivateError::Link { path }) if *path == link.dir), "{e}");
    }
    // Links of ours on the way are as good as what they lead to.
    std::os::unix::fs::symlink(&open, home.path().join("by-link")).unwrap();
    Region::open(&home.path().join("by-link/model")).unwrap();
    assert!(
        !give_away(&home.path().join("by-link")) || {
            let e = Region::open(&home.path().join("by-link/model")).unwrap_err();
            matches!(e, RegionError::Private(PrivateError::Owner { owner: OTHER, .. }))
        }
    );
}
