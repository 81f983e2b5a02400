//! Regions where there is little room.

use std::process::Command;

use windlass_core::error::Kind;

use super::child::{Child, PATIENCE};
use super::create::{Limits, create};
use super::*;

fn room(free: u64) -> Room {
    Room { free, configured: 64 << 20, place: "/small".into() }
}

#[test]
fn too_little_room_is_said_before_anything_is_written() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let spec = RegionSpec { manifest: large(), extra_bytes: 1 << 20, ..spec(home.path(), 1) };
    let data = spec.manifest.data_bytes();
    let limits = Limits { filesystem: Some(room(2 * data)), ..Limits::default() };
    let e = create(&spec, &limits).unwrap_err();
    let RegionError::Space { shortage: Shortage::Filesystem { needed, .. }, .. } = &e else { panic!("{e}") };
    assert!(*needed > 2 * data + (1 << 20), "slots and history");
    let text = e.to_string();
    for part in ["needed", "free", "64.0 MiB", "--shm-size", "region_dir", "nothing was written"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(e.kind(), Kind::Exhausted);
    assert!(!spec.dir.exists());

    let limits = Limits { memory: Some(room(2 * data)), ..Limits::default() };
    let e = create(&RegionSpec { memfd: Memfd::Auto, ..spec.clone() }, &limits).unwrap_err();
    assert!(matches!(&e, RegionError::Space { shortage: Shortage::Memory { .. }, .. }), "{e}");
    assert!(!spec.dir.exists());

    let limits = Limits { file_size: Some(room(data)), ..Limits::default() };
    let e = create(&spec, &limits).unwrap_err();
    assert!(
        matches!(&e, RegionError::Space { shortage: Shortage::FileSize { needed, .. }, .. } if *needed > data),
        "{e}"
    );
    assert!(e.to_string().contains("ulimit -f") && e.kind() == Kind::Exhausted && !spec.dir.exists());

    // A dead region in the way counts as room, and stays when there is still too little.
    drop(create(&spec, &Limits::default()).unwrap());
    let limits = Limits { filesystem: Some(room(2 << 20)), memory: Some(room(2 << 20)), ..Limits::default() };
    drop(create(&spec, &limits).unwrap());
    let larger = RegionSpec { manifest: manifest(6 << 20), ..spec.clone() };
    assert!(matches!(create(&larger, &limits), Err(RegionError::Space { .. })));
    assert_eq!(Region::open(&spec.dir).unwrap().manifest(), &spec.manifest);
}

/// What must be true of a region whose filesystem is too small for its slots.
fn check_memfd(spec: &RegionSpec, limits: &Limits) {
    let e = create(&RegionSpec { memfd: Memfd::Never, ..spec.clone() }, limits).unwrap_err();
    assert!(matches!(e, RegionError::Space { shortage: Shortage::Filesystem { .. }, .. }), "{e}");
    assert!(!spec.dir.exists());

    let region = create(spec, limits).unwrap();
    assert!(region.is_memfd());
    assert!(gc::allocated(&spec.dir) < 1 << 20, "the slots take nothing of it");
    assert!(region.extra_bytes() <= 64 << 20, "the history is cut to what it can hold");
    let mut writer = region.writer(0).unwrap();
    for version in 1..=3 {
        write_share(&mut writer, version, Shape { seed: version, ranks: 1 }, &Stop::after(PATIENCE)).unwrap();
    }
    let active = region.state().active.unwrap();
    let file = std::fs::read(region.slot_path(active.slot)).unwrap();
    assert!(safetensors::SafeTensors::deserialize(&file).is_ok());
    // Another process opens it by its path.
    let mut child = Child::open(&spec.dir);
    child.ask(&format!("lease {} map 60000", active.id)).unwrap();
    child.ask("compare").unwrap();
    child.ask("finish").unwrap();
}

#[test]
fn a_small_tmpfs_gets_memfd_slots() {
    const INSIDE: &str = "WINDLASS_TEST_SMALL_TMPFS";
    let name = "region::tests::room::a_small_tmpfs_gets_memfd_slots";
    let small =
        RegionSpec { manifest: manifest(20 << 20), memfd: Memfd::Auto, ..spec(Path::new("/none"), 1) };
    let spec = |home: &Path| RegionSpec { dir: home.join("model"), extra_bytes: 1 << 40, ..small.clone() };
    if let Ok(home) = std::env::var(INSIDE) {
        let home = Path::new(&home);
        assert_eq!(space::filesystem(home).unwrap().configured, 64 << 20, "the tmpfs is in place");
        return check_memfd(&spec(home), &Limits::default());
    }
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let script = "mount -t tmpfs -o size=64m tmpfs \"$1\" || exit 77; exec \"$2\" --exact \"$3\" --nocapture";
    let ran = Command::new("unshare")
        .args(["-Urm", "sh", "-c", script, "sh"])
        .arg(home.path())
        .arg(std::env::current_exe().unwrap())
        .arg(name)
        .env(INSIDE, home.path())
        .output();
    match ran {
        Ok(ran) if ran.status.success() => {
            assert!(String::from_utf8_lossy(&ran.stdout).contains("1 passed"), "it ran inside");
        }
        Ok(ran) if ran.status.code() == Some(101) => {
            panic!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr))
        }
        refused => {
            eprintln!("SKIPPED the real 64 MiB tmpfs: no user and mount namespaces here ({refused:?})");
            check_memfd(
                &spec(home.path()),
                &Limits { filesystem: Some(room(60 << 20)), ..Limits::default() },
            );
        }
    }
}

#[test]
fn a_memfd_region_ends_with_its_creator() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let limits = Limits::default();
    let region = create(&RegionSpec { memfd: Memfd::Always, ..spec(home.path(), 1) }, &limits).unwrap();
    assert!(region.is_memfd());
    // As if another process had made it, which is dead since.
    let (creator, gone) = (region.facts.creator, 7 << 32 | 1u64);
    region.header_file.write_all_at(&gone.to_le_bytes(), 7 * 8).unwrap();
    let e = Region::open(region.dir()).unwrap_err();
    assert!(matches!(e, RegionError::HolderGone { pid: 7, .. }) && e.kind() == Kind::PeerLost, "{e}");
    region.header_file.write_all_at(&creator.to_le_bytes(), 7 * 8).unwrap();
    let dir = region.dir().to_owned();
    Region::open(&dir).unwrap();
    drop(region);
    assert_eq!(gc(home.path()).len(), 1);
    assert!(!dir.exists());
}
