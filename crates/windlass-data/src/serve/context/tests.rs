use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;

use windlass_core::address::Host;
use windlass_core::dtype::Dtype;
use windlass_core::identity::ModelId;
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_core::wire::control::RequestMode;

use super::super::{Server, ServerConfig};
use super::*;
use crate::image::{ImageSpec, ImageView};
use crate::receiver::{Receiver, ReceiverConfig};
use crate::region::{Memfd, Region, RegionSpec, Writer};
use crate::seal::draft;

const UNITS: u64 = 200_000;

fn stop() -> Stop {
    Stop::after(Duration::from_secs(30))
}

fn config() -> ServerConfig {
    ServerConfig { threads: 2, ..ServerConfig::new(Host::new("127.0.0.1").unwrap()) }
}

fn model() -> ModelId {
    ModelId::new("actor").unwrap()
}

fn region(home: &Path) -> Arc<Region> {
    let tensor = TensorSpec::new("w", Dtype::BF16, [UNITS]);
    let manifest = Arc::new(Manifest::new([tensor], BTreeMap::new()).unwrap());
    let spec = RegionSpec { memfd: Memfd::Never, ..RegionSpec::new(home.join("region"), model(), manifest) };
    Region::create(&spec).unwrap()
}

/// Weights of which only small ones change.
fn weights(version: Version) -> Vec<u8> {
    let unit = |i: u64| {
        let small = i.is_multiple_of(7);
        let bits = if small { 0x3800 } else { 0x3d00 } + (i % 61) as u16 * 2;
        let changed = small && (i / 7).wrapping_mul(2_654_435_761) % 97 < 3 * version;
        bits | u16::from(changed)
    };
    (0..UNITS).flat_map(|i| unit(i).to_le_bytes()).collect()
}

fn publish(writer: &mut Writer, server: &Server, version: Version) {
    let attempt = writer.begin(version, &stop()).unwrap();
    attempt.write(0, &weights(version)).unwrap();
    attempt.done(&stop()).unwrap();
    let info = server.wait_version(Some((writer.region().incarnation(), version - 1)), &stop());
    assert_eq!(info.version, Some(version), "{:?}", server.failure());
}

fn receiver(home: &Path, server: &Arc<Server>) -> Receiver {
    let config = ReceiverConfig {
        image: ImageSpec {
            dir: home.join("image"),
            model_id: model(),
            group: false,
            memfd: Memfd::Never,
            threads: 1,
        },
        name: "test".into(),
        mode: RequestMode::Auto,
        codec: CodecWanted::Context,
        streams: Some(1),
        transfer_timeout: Duration::from_secs(20),
        open_timeout: Duration::from_secs(5),
        pull: crate::tcp::PullConfig::default(),
        allow: None,
        keep: None,
        share: None,
    };
    Receiver::open(config, Arc::<Server>::clone(server), None, &stop()).unwrap()
}

/// The codec by which a receiver came to a version, whose image must be right.
fn sync(receiver: &mut Receiver, version: Version) -> (Option<Codec>, u32) {
    let synced = receiver.sync(&stop()).unwrap();
    let region = receiver.image().unwrap().region();
    let view = ImageView::take(region, Duration::from_secs(5), &stop()).unwrap();
    assert!(view.known().identity.version == version && view.data() == weights(version));
    (synced.codec, synced.transfers)
}

fn made(server: &Server) -> Vec<Arc<Segment>> {
    let state = server.inner.state();
    let made = |(_, form): &(DeltaHeader, Form)| match form {
        Form::Made(segment) => Some(Arc::clone(segment)),
        Form::Pending | Form::Failed(_) => None,
    };
    state.forms.known.iter().filter_map(made).collect()
}

#[test]
fn damaged_context_records_are_refused_by_name_and_plain_ones_fetched() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = region(home.path());
    let server = Arc::new(Server::start(Arc::clone(&region), config()).unwrap());
    let mut writer = region.writer(0).unwrap();
    publish(&mut writer, &server, 1);
    let mut receiver = receiver(home.path(), &server);
    assert_eq!(sync(&mut receiver, 1), (None, 1));
    publish(&mut writer, &server, 2);
    // Another receiver had it made, and something happened to it since.
    let plain = server.inner.history.segment(1, 2, &stop()).unwrap();
    let form = server.inner.wait_form(&plain, &stop()).unwrap();
    assert!(form.bytes < plain.bytes, "{} {}", form.bytes, plain.bytes);
    let mut byte = [0];
    form.file.read_exact_at(&mut byte, form.bytes / 2).unwrap();
    form.file.write_all_at(&[byte[0] ^ 4], form.bytes / 2).unwrap();
    let error = container::parse(&read(&form), 1).unwrap_err();
    assert!(matches!(error, DeltaError::Damaged { what: "part", .. }), "{error}");
    assert_eq!(sync(&mut receiver, 2), (Some(Codec::Plain), 2));
    // This publisher is not asked for context records any more.
    publish(&mut writer, &server, 3);
    assert_eq!(sync(&mut receiver, 3), (Some(Codec::Plain), 1));
    assert_eq!(made(&server).len(), 1);
}

fn read(segment: &Segment) -> Vec<u8> {
    let mut bytes = vec![0; segment.bytes as usize];
    segment.file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn requests_do_not_wait_for_a_recoder_that_has_ended() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = region(home.path());
    let server = Arc::new(Server::start(Arc::clone(&region), config()).unwrap());
    let mut writer = region.writer(0).unwrap();
    publish(&mut writer, &server, 1);
    let mut receiver = receiver(home.path(), &server);
    sync(&mut receiver, 1);
    // As at the end of its thread, also by a panic.
    drop(Ending(&server.inner));
    publish(&mut writer, &server, 2);
    assert_eq!(sync(&mut receiver, 2), (Some(Codec::Plain), 1));
    let plain = server.inner.history.segment(1, 2, &stop()).unwrap();
    assert!(server.inner.wait_form(&plain, &stop()).unwrap_err().contains("has ended"));
}

#[test]
fn a_recoder_that_is_killed_leaves_nothing_that_counts() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = region(home.path());
    let server = Arc::new(Server::start(Arc::clone(&region), config()).unwrap());
    let mut writer = region.writer(0).unwrap();
    publish(&mut writer, &server, 1);
    let mut before = receiver(home.path(), &server);
    sync(&mut before, 1);
    publish(&mut writer, &server, 2);
    let plain = server.inner.history.segment(1, 2, &stop()).unwrap();
    server.inner.wait_form(&plain, &stop()).unwrap();
    let folder = plain.path.parent().unwrap().to_owned();
    let files = || {
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<Vec<_>>()
    };
    assert_eq!(files(), [plain.path.file_name().unwrap()], "what is made has no name");
    // One in the middle of its work has a draft.
    let draft = Draft::create(&plain.path.with_extension("wcontext")).unwrap();
    draft.file().write_all(&plain.header.to_bytes()).unwrap();
    std::mem::forget(draft);
    assert!(files().iter().any(|name| draft::is_draft(name)));
    drop((before, plain));
    Arc::into_inner(server).unwrap().shutdown(Duration::ZERO);
    let server = Arc::new(Server::start(region, config()).unwrap());
    assert_eq!(files().len(), 1);
    assert_eq!(sync(&mut receiver(home.path(), &server), 2), (Some(Codec::Context), 1));
}

#[test]
fn without_a_slot_of_either_version_receivers_get_plain_records() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = region(home.path());
    let server = Arc::new(Server::start(Arc::clone(&region), config()).unwrap());
    let mut writer = region.writer(0).unwrap();
    for version in 1..5 {
        publish(&mut writer, &server, version);
    }
    let plain = server.inner.history.segment(1, 2, &stop()).unwrap();
    let why = server.inner.wait_form(&plain, &stop()).unwrap_err();
    assert_eq!(why, ContextError::NoSlot.to_string());
    // From the slot of either version.
    for (base, target) in [(3, 4), (1, 4), (1, 3), (2, 3)] {
        let plain = server.inner.history.segment(base, target, &stop()).unwrap();
        let form = server.inner.wait_form(&plain, &stop()).unwrap();
        assert!(form.bytes < plain.bytes && form.header == plain.header);
    }
    assert_eq!(made(&server).len(), KEPT, "older ones were dropped");
}
