//! How much memory an agent and a receiver need.

use crate::plane;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::plane::child::Child;
use crate::plane::shm;
use windlass_core::dtype::Dtype;
use windlass_core::identity::ModelId;
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_data::region::{Memfd, Region, RegionSpec};

const MIB: u64 = 1 << 20;
/// Not divisible by anything.
const MODEL: u64 = 96 * MIB + 12_345;
/// The history cap of the agent child.
const HISTORY: u64 = 16 * MIB;

/// A line of `/proc/<pid>/status`, in bytes.
fn status(pid: u32, key: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|l| l.starts_with(key)).unwrap_or_else(|| panic!("no {key}"));
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// What the files below a directory take up.
fn size(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    entries
        .map(|p| if p.is_dir() { size(&p) } else { fs::symlink_metadata(&p).unwrap().blocks() * 512 })
        .sum()
}

/// The largest file below a directory.
fn largest(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    entries.map(|p| if p.is_dir() { largest(&p) } else { p.metadata().unwrap().len() }).max().unwrap_or(0)
}

#[test]
fn an_agent_needs_twice_the_model_and_a_receiver_once() {
    let home = shm();
    let path = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let manifest = Manifest::new([TensorSpec::new("w", Dtype::U8, [MODEL])], BTreeMap::new()).unwrap();
    let region = Region::create(&RegionSpec {
        memfd: Memfd::Never,
        extra_bytes: HISTORY,
        ..RegionSpec::new(home.path().join("region"), ModelId::new("actor").unwrap(), Arc::new(manifest))
    })
    .unwrap();
    let agent = Child::spawn("agent", &[&path("region")]);
    let mut rank = Child::spawn("rank", &[&path("region"), "77"]);
    let desk = path("region/desk.sock");
    let mut receiver = Child::spawn("receiver", &[&path("image"), &desk]);
    for version in 1..=6u64 {
        assert_eq!(rank.ask(&version.to_string()), format!("published {version}"));
        // The first transfer is of the whole image, the others are deltas.
        let end = if version == 1 { "full" } else { "delta" };
        plane::eventually("the new version is served", || {
            let said = receiver.ask("20000");
            // Sealing goes on after the commit.
            assert!(said.starts_with("synced") || said.starts_with("error NotFound"), "{said}");
            said.ends_with(end)
        });
    }
    let delta = largest(&home.path().join("region/deltas"));
    assert!(delta > 100_000 && delta < MODEL / 8, "{delta}");
    let peak = |pid| (status(pid, "VmHWM"), status(pid, "RssAnon"), status(pid, "RssShmem"));
    let (agent, receiver) = (peak(agent.id()), peak(receiver.id()));
    eprintln!("model {MODEL}, delta {delta}; peak, private, shared: agent {agent:?}, receiver {receiver:?}");
    assert!(agent.0 <= 2 * MODEL + HISTORY + 64 * MIB, "agent {agent:?}");
    assert!(receiver.0 <= MODEL + delta + 64 * MIB, "receiver {receiver:?}");
    // A measure that cannot fail proves nothing: both have looked at every page of what they hold.
    assert!(agent.0 > MODEL && receiver.0 > MODEL);
    assert!(agent.1 <= 64 * MIB && receiver.1 <= delta + 64 * MIB, "private memory: {agent:?} {receiver:?}");
    let (region_bytes, image_bytes) = (size(region.dir()), size(&home.path().join("image")));
    assert!(region_bytes <= 2 * MODEL + HISTORY + MIB, "{region_bytes}");
    assert!(image_bytes <= MODEL + MIB, "{image_bytes}");
}
