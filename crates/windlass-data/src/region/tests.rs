//! Regions by one process.

use std::collections::BTreeMap;

use windlass_core::dtype::Dtype;
use windlass_core::manifest::TensorSpec;

use super::*;

pub(super) fn step(_name: &'static str) {}

fn spec(dir: &Path, ranks: u16) -> RegionSpec {
    let tensors = [
        TensorSpec::new("w", Dtype::BF16, vec![100, 333]),
        TensorSpec::new("b", Dtype::U8, vec![1]),
        TensorSpec::new("none", Dtype::F32, vec![0, 7]),
        TensorSpec::new("odd", Dtype::U8, vec![70_001]),
    ];
    RegionSpec {
        dir: dir.join("model"),
        model_id: ModelId::new("model").unwrap(),
        manifest: Arc::new(Manifest::new(tensors, BTreeMap::new()).unwrap()),
        slots: Slots::Two,
        ranks,
        part: None,
        group: false,
        memfd: Memfd::Never,
        extra_bytes: 0,
        incarnation: None,
    }
}

#[test]
fn a_version_goes_through_commit_lease_and_seal() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Region::create(&spec(home.path(), 1)).unwrap();
    let len = region.manifest().data_bytes();
    let stop = Stop::after(Duration::from_secs(10));
    let mut writer = region.writer(0).unwrap();
    let agent = region.agent().unwrap();
    for version in 1..=4u64 {
        let attempt = writer.begin(version, &stop).unwrap();
        attempt.write(0, &vec![version as u8; len as usize]).unwrap();
        let committed = attempt.done(&stop).unwrap();
        assert_eq!(committed.version, version);
        let seal = agent.seal().unwrap().unwrap();
        assert_eq!(seal.new.data(), vec![version as u8; len as usize]);
        assert_eq!(seal.base.as_ref().map(Lease::version), (version > 1).then_some(version - 1));
        seal.finish(StateDigest([version as u8; 16]));
        assert!(agent.seal().unwrap().is_none());
        assert_eq!(region.state().active.unwrap().sealed, Some(StateDigest([version as u8; 16])));
    }
}
