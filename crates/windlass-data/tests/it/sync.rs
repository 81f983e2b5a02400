//! From a publisher's memory to a receiver's image, over real sockets.

use crate::plane;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::plane::{Publisher, image_bytes, odd_manifest, receiver, receiver_at, receiver_config, shm, stop};
use windlass_core::dtype::Dtype;
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_core::wire::control::RequestMode;
use windlass_data::receiver::{Receiver, ReceiverConfig, Share};

#[test]
fn a_receiver_follows_a_publisher_by_deltas() {
    let mut publisher = Publisher::new(odd_manifest());
    let mut noise = plane::Noise(7);
    noise.fill(&mut publisher.data);
    let first = publisher.publish(1);
    let dir = shm();
    let mut receiver = receiver(&dir, publisher.server());
    let synced = receiver.sync(&stop()).unwrap();
    assert_eq!((synced.mode, synced.image.unwrap().digest), ("full", first));
    assert_eq!(image_bytes(&receiver), publisher.data);
    for version in 2..6 {
        publisher.change(10);
        let digest = publisher.publish(version);
        let synced = receiver.sync(&stop()).unwrap();
        assert_eq!(synced.mode, "delta");
        assert!(synced.wire_bytes < publisher.data.len() as u64 / 4, "{synced:?}");
        let image = synced.image.unwrap();
        assert_eq!((image.identity.version, image.digest), (version, digest));
        assert_eq!(image_bytes(&receiver), publisher.data);
    }
    let idle = receiver.sync(&stop()).unwrap();
    assert_eq!((idle.mode, idle.transfers), ("none", 0));
}

#[test]
fn a_receiver_that_is_behind_gets_one_composed_delta() {
    let mut publisher = Publisher::new(odd_manifest());
    publisher.publish(1);
    let dir = shm();
    let mut receiver = receiver(&dir, publisher.server());
    receiver.sync(&stop()).unwrap();
    for version in 2..9 {
        publisher.change(5);
        publisher.publish(version);
    }
    let synced = receiver.sync(&stop()).unwrap();
    assert_eq!((synced.mode, synced.transfers), ("delta", 1));
    assert_eq!(image_bytes(&receiver), publisher.data);
}

#[test]
fn a_restarted_receiver_verifies_its_image_and_goes_on_with_a_delta() {
    let mut publisher = Publisher::new(odd_manifest());
    publisher.publish(1);
    let dir = shm();
    receiver(&dir, publisher.server()).sync(&stop()).unwrap();
    publisher.change(5);
    publisher.publish(2);
    let mut again = receiver(&dir, publisher.server());
    assert_eq!(again.current().unwrap().identity.version, 1);
    assert_eq!(again.sync(&stop()).unwrap().mode, "delta");
    assert_eq!(image_bytes(&again), publisher.data);
}

#[test]
fn a_damaged_image_is_noticed_at_restart_and_only_the_damage_is_fetched() {
    let mut publisher = Publisher::new(odd_manifest());
    let mut noise = plane::Noise(3);
    noise.fill(&mut publisher.data);
    publisher.publish(1);
    let dir = shm();
    receiver(&dir, publisher.server()).sync(&stop()).unwrap();
    let path = dir.path().join("image/a.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() - 10;
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let mut again = receiver(&dir, publisher.server());
    assert!(again.current().is_none(), "a damaged image is not whole");
    let synced = again.sync(&stop()).unwrap();
    assert!(synced.wire_bytes < publisher.data.len() as u64 / 2, "{synced:?}");
    assert_eq!(image_bytes(&again), publisher.data);
}

#[test]
fn a_killed_agent_is_replaced_and_serves_the_same_version_with_its_history() {
    let mut publisher = Publisher::new(odd_manifest());
    publisher.publish(1);
    let dir = shm();
    receiver(&dir, publisher.server()).sync(&stop()).unwrap();
    publisher.change(5);
    let digest = publisher.publish(2);
    publisher.server = None;
    let server = windlass_data::serve::Server::start(Arc::clone(&publisher.region), plane::config()).unwrap();
    publisher.server = Some(Arc::new(server));
    let mut receiver = receiver(&dir, publisher.server());
    let synced = receiver.sync(&stop()).unwrap();
    assert_eq!((synced.mode, synced.image.unwrap().digest), ("delta", digest));
}

#[test]
fn a_delta_that_cannot_serve_is_refused_with_a_reason_and_auto_falls_back() {
    let mut publisher = Publisher::new(odd_manifest());
    publisher.publish(1);
    let dir = shm();
    let image = dir.path().join("image");
    receiver_at(image.clone(), publisher.server(), RequestMode::Auto).sync(&stop()).unwrap();
    let mut noise = plane::Noise(11);
    noise.fill(&mut publisher.data);
    publisher.publish(2);
    {
        let mut strict = receiver_at(image.clone(), publisher.server(), RequestMode::Delta);
        let error = strict.sync(&stop()).unwrap_err();
        assert!(error.to_string().contains("too dense"), "{error}");
        assert_eq!(strict.current().unwrap().identity.version, 1, "the old version still stands");
    }
    let mut auto = receiver_at(image, publisher.server(), RequestMode::Auto);
    let synced = auto.sync(&stop()).unwrap();
    assert_eq!(synced.mode, "full");
    assert_eq!(image_bytes(&auto), publisher.data);
}

#[test]
fn a_new_incarnation_is_followed_whatever_its_versions() {
    let mut publisher = Publisher::new(odd_manifest());
    publisher.publish(105);
    let dir = shm();
    let image = dir.path().join("image");
    receiver_at(image.clone(), publisher.server(), RequestMode::Auto).sync(&stop()).unwrap();
    let Publisher { dir: home, region, writer, server, .. } = publisher;
    let before = region.incarnation();
    drop((server, writer, region));
    let mut resumed = Publisher::at(home, odd_manifest(), None, plane::config());
    assert!(resumed.region.incarnation() > before);
    resumed.change(20);
    let digest = resumed.publish(101);
    let mut receiver = receiver_at(image, resumed.server(), RequestMode::Auto);
    let image = receiver.sync(&stop()).unwrap().image.unwrap();
    assert_eq!((image.identity.version, image.digest), (101, digest));
    assert_eq!(image.identity.incarnation, resumed.region.incarnation());
    assert_eq!(image_bytes(&receiver), resumed.data);
}

#[test]
fn a_slot_that_changed_after_sealing_costs_a_delta_and_no_receiver_is_wrong() {
    let mut publisher = Publisher::new(odd_manifest());
    publisher.publish(1);
    let dir = shm();
    let mut receiver = receiver(&dir, publisher.server());
    receiver.sync(&stop()).unwrap();
    let slot = publisher.region.state().active.unwrap().slot;
    let path = publisher.region.slot_path(slot);
    let file = std::fs::File::options().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xA5], publisher.region.data_start() + 1000).unwrap();
    publisher.change(5);
    let digest = publisher.publish(2);
    let synced = receiver.sync(&stop()).unwrap();
    assert_eq!((synced.mode, synced.image.unwrap().digest), ("full", digest));
    assert_eq!(image_bytes(&receiver), publisher.data);
}

#[test]
fn an_image_that_is_ruined_is_fetched_anew() {
    type Ruin = fn(&std::path::Path);
    let ruins: [(&str, Ruin); 3] = [
        ("truncated", |dir| {
            let slot = std::fs::File::options().write(true).open(dir.join("a.safetensors")).unwrap();
            slot.set_len(4096).unwrap();
        }),
        ("without its slot", |dir| std::fs::remove_file(dir.join("a.safetensors")).unwrap()),
        ("without a manifest", |dir| std::fs::write(dir.join("manifest.json"), "{").unwrap()),
    ];
    let mut publisher = Publisher::new(odd_manifest());
    publisher.publish(1);
    for (how, ruin) in ruins {
        let dir = shm();
        receiver(&dir, publisher.server()).sync(&stop()).unwrap();
        ruin(&dir.path().join("image"));
        let mut again = receiver(&dir, publisher.server());
        assert!(again.current().is_none(), "{how}");
        assert_eq!(again.sync(&stop()).unwrap().mode, "full", "{how}");
        assert_eq!(image_bytes(&again), publisher.data, "{how}");
    }
}

#[test]
fn the_file_for_the_first_delta_is_ready_when_the_first_image_is() {
    let tensors = [TensorSpec::new("w", Dtype::BF16, [4 << 20])];
    let mut publisher = Publisher::new(Manifest::new(tensors, BTreeMap::new()).unwrap());
    publisher.publish(1);
    let dir = shm();
    let incoming = dir.path().join("incoming");
    let config = ReceiverConfig {
        share: Some(Share { dir: incoming.clone() }),
        ..receiver_config(dir.path().join("image"), RequestMode::Auto)
    };
    let mut receiver = Receiver::open(config, publisher.server(), None, &stop()).unwrap();
    let files = || -> Vec<_> {
        std::fs::read_dir(&incoming).into_iter().flatten().map(|e| e.unwrap().file_name()).collect()
    };
    assert_eq!(files(), Vec::<std::ffi::OsString>::new());
    receiver.sync(&stop()).unwrap();
    assert_eq!(files(), ["1.delta"]);
    publisher.change(1);
    publisher.publish(2);
    assert_eq!(receiver.sync(&stop()).unwrap().mode, "delta");
    assert_eq!(files(), ["1.delta"], "the delta came to the file that was there");
}
