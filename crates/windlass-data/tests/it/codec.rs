//! Deltas in plain and in context records: which of them a receiver gets, and that both lead to the same image.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tempfile::TempDir;
use windlass_core::digest::BlockSum;
use windlass_core::dtype::Dtype;
use windlass_core::identity::{Identity, Incarnation, Version};
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_core::wire::Codec;
use windlass_core::wire::control::{
    CodecWanted, Have, Registered, Registration, RequestMode, TransferAnswer, TransferDone, TransferRequest,
    VersionInfo,
};
use windlass_data::history::Limits;
use windlass_data::receiver::{Control, ControlError, Event, Receiver, ReceiverConfig, Synced};
use windlass_data::stop::Stop;

use crate::plane::proxy::Via;
use crate::plane::{Noise, Publisher, eventually, image_bytes, receiver_config, shm, stop};

/// A model of one million weights in bf16, in a tensor and a bias that is not a float.
fn publisher() -> Publisher {
    let tensors =
        [TensorSpec::new("w", Dtype::BF16, [1024, 1024]), TensorSpec::new("steps", Dtype::I64, [33])];
    let mut publisher = Publisher::new(Manifest::new(tensors, BTreeMap::new()).unwrap());
    let (mut noise, weights) = (Noise(0x5eed), 1 << 20);
    let value = |noise: &mut Noise| (0..4).map(|_| noise.below(1000) as f32 / 1e3 - 0.5).sum::<f32>() * 0.02;
    for unit in publisher.data[..2 * weights].chunks_exact_mut(2) {
        unit.copy_from_slice(&((value(&mut noise).to_bits() >> 16) as u16).to_le_bytes());
    }
    publisher.publish(1);
    publisher
}

/// A step of training: the chance of a weight to change halves with each octave.
fn step(publisher: &mut Publisher, version: Version) {
    let mut noise = Noise(version.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    for unit in publisher.data[..2 << 20].chunks_exact_mut(2) {
        let bits = u16::from_le_bytes([unit[0], unit[1]]);
        let size = f32::from_bits(u32::from(bits) << 16).abs();
        if (noise.below(1 << 20) as f32) < (40.0 / size).min(1e5) {
            unit.copy_from_slice(&(bits ^ 1).to_le_bytes());
        }
    }
    publisher.publish(version);
}

fn config(dir: &TempDir, name: &str, codec: CodecWanted) -> ReceiverConfig {
    ReceiverConfig { codec, ..receiver_config(dir.path().join(name), RequestMode::Auto) }
}

fn receiver(dir: &TempDir, name: &str, codec: CodecWanted, control: &Arc<dyn Control>) -> Receiver {
    Receiver::open(config(dir, name, codec), Arc::clone(control), None, &stop()).unwrap()
}

fn sync(receiver: &mut Receiver, publisher: &Publisher) -> Synced {
    let synced = receiver.sync(&stop()).unwrap();
    assert!(image_bytes(receiver) == publisher.data, "{synced:?}");
    synced
}

#[test]
fn a_receiver_on_a_slow_line_picks_context_records_and_one_on_a_fast_line_plain_ones() {
    let mut publisher = publisher();
    let (dir, fast) = (shm(), publisher.server() as Arc<dyn Control>);
    let slow = Via::new(publisher.server());
    slow.line.limit(1_000_000);
    let slow = slow as Arc<dyn Control>;
    let mut first = receiver(&dir, "first", CodecWanted::Auto, &slow);
    let mut near = receiver(&dir, "near", CodecWanted::Auto, &fast);
    let mut second = receiver(&dir, "second", CodecWanted::Auto, &slow);
    let mut plain = receiver(&dir, "plain", CodecWanted::Plain, &slow);
    for one in [&mut first, &mut near, &mut second, &mut plain] {
        assert_eq!(sync(one, &publisher).codec, None, "a full image has no codec");
    }
    let rate = |one: &Receiver| one.status().get().link_bytes_per_second.unwrap();
    assert!(rate(&first) < 1_100_000 && rate(&near) > 3_000_000, "{} {}", rate(&first), rate(&near));
    step(&mut publisher, 2);
    let server = publisher.server();
    let near = sync(&mut near, &publisher);
    assert_eq!(server.counters().recoded.load(Ordering::Relaxed), 0, "no receiver needs it yet");
    // This one has the delta recoded. If that takes longer than it saves, it gets the plain one.
    sync(&mut first, &publisher);
    eventually("the delta is recoded", || server.counters().recoded.load(Ordering::Relaxed) == 1);
    let (second, plain) = (sync(&mut second, &publisher), sync(&mut plain, &publisher));
    let codecs = [near.codec, second.codec, plain.codec];
    assert_eq!(codecs, [Some(Codec::Plain), Some(Codec::Context), Some(Codec::Plain)]);
    assert!(second.wire_bytes < plain.wire_bytes * 9 / 10, "{} {}", second.wire_bytes, plain.wire_bytes);
    assert_eq!(server.counters().recoded.load(Ordering::Relaxed), 1, "once for all receivers");
    let codecs: Vec<_> = server.instances().into_iter().filter_map(|i| i.codec).collect();
    assert!(codecs.contains(&Codec::Plain) && codecs.contains(&Codec::Context));
}

#[test]
fn context_records_that_are_asked_for_lead_to_the_same_image_and_are_kept_in_plain_ones() {
    let mut publisher = publisher();
    let (dir, control) = (shm(), publisher.server() as Arc<dyn Control>);
    let told = Arc::new(std::sync::Mutex::new(Vec::new()));
    let heard = Arc::clone(&told);
    let listener = move |event: &Event| {
        if let Event::Transfer { codec: Some(codec), why, .. } = event {
            heard.lock().unwrap().push((*codec, why.clone()));
        }
    };
    let keep = Some(Limits { count: 8, bytes: 1 << 30 });
    let config = ReceiverConfig { keep, ..config(&dir, "context", CodecWanted::Context) };
    let mut one = Receiver::open(config, Arc::clone(&control), Some(Arc::new(listener)), &stop()).unwrap();
    sync(&mut one, &publisher);
    step(&mut publisher, 2);
    let synced = sync(&mut one, &publisher);
    assert_eq!((synced.mode, synced.codec, synced.refetched), ("delta", Some(Codec::Context), 0));
    // The delta beside the image is the publisher's own.
    let life = format!("{:016x}", publisher.region.incarnation().0);
    let name = format!("{life}/{:020}-{:020}.wdelta", 1, 2);
    let own = std::fs::read(publisher.region.deltas_dir().join(&name)).unwrap();
    let kept = std::fs::read(dir.path().join("context/deltas").join(&name)).unwrap();
    assert!(kept == own, "{} {}", kept.len(), own.len());
    assert!(synced.wire_bytes < own.len() as u64);
    // One that is behind gets a composed one.
    for version in 3..6 {
        step(&mut publisher, version);
    }
    let synced = sync(&mut one, &publisher);
    assert_eq!((synced.mode, synced.codec, synced.transfers), ("delta", Some(Codec::Context), 1));
    let told = told.lock().unwrap();
    let context = |(codec, why): &(Codec, String)| *codec == Codec::Context && why.contains("asked for");
    assert!(told.len() == 2 && told.iter().all(context), "{told:?}");
}

#[test]
fn a_delta_that_is_fetched_before_it_is_shown_may_come_in_context_records() {
    let mut publisher = publisher();
    let (dir, control) = (shm(), publisher.server() as Arc<dyn Control>);
    let mut one = receiver(&dir, "image", CodecWanted::Context, &control);
    sync(&mut one, &publisher);
    let life = publisher.region.incarnation();
    let mut fetch = |one: &mut Receiver, after: Option<&windlass_data::image::Known>, version| {
        step(&mut publisher, version);
        match one.fetch(after, (life, version), &stop()).unwrap() {
            windlass_data::receiver::Start::Delta(fetch) => fetch.run(&stop()).unwrap(),
            whole @ windlass_data::receiver::Start::Whole { .. } => panic!("{whole:?}"),
        }
    };
    let first = fetch(&mut one, None, 2);
    // The image is not at its base yet, over which context records would be decoded.
    let second = fetch(&mut one, Some(&first.known()), 3);
    let codecs = [first.synced().codec, second.synced().codec];
    assert_eq!(codecs, [Some(Codec::Context), Some(Codec::Plain)]);
    one.show(vec![first, second], &stop()).unwrap();
    assert!(image_bytes(&one) == publisher.data);
}

/// An agent of an earlier release.
struct Earlier(Arc<dyn Control>);

impl Control for Earlier {
    fn peer(&self) -> String {
        self.0.peer()
    }

    fn version(
        &self,
        seen: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        self.0.version(seen, stop)
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        self.0.manifest(stop)
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        self.0.sums(identity, stop)
    }

    fn register(&self, registration: &Registration, stop: &Stop) -> Result<Registered, ControlError> {
        Ok(Registered { codecs: Vec::new(), ..self.0.register(registration, stop)? })
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        // It refuses a request with fields that it does not know.
        assert_eq!((request.codec, request.link_bytes_per_second), (None, None));
        self.0.request(request, stop)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        self.0.done(done, stop)
    }
}

#[test]
fn peers_of_an_earlier_release_get_plain_records() {
    let mut publisher = publisher();
    let dir = shm();
    let earlier = Arc::new(Earlier(publisher.server())) as Arc<dyn Control>;
    let mut one = receiver(&dir, "image", CodecWanted::Context, &earlier);
    sync(&mut one, &publisher);
    let have = one.current().unwrap().clone();
    step(&mut publisher, 2);
    assert_eq!(sync(&mut one, &publisher).codec, Some(Codec::Plain));
    // And a receiver of an earlier release, which does not name a codec.
    let server = publisher.server();
    let instance_id = Control::register(&*server, &Registration::default(), &stop()).unwrap().instance_id;
    let (incarnation, version) = (have.identity.incarnation, have.identity.version);
    let request = TransferRequest {
        instance_id,
        mode: RequestMode::Delta,
        have: Some(Have { incarnation, version, digest: have.digest }),
        version: None,
        layout_hash: None,
        wanted: None,
        streams: None,
        timeout_ms: None,
        codec: None,
        link_bytes_per_second: Some(1),
    };
    let TransferAnswer::Granted(granted) = Control::request(&*server, &request, &stop()).unwrap() else {
        panic!("a refusal");
    };
    assert_eq!(granted.ticket.mode.codec(), Some(Codec::Plain));
    assert_eq!(server.counters().recoded.load(Ordering::Relaxed), 0);
}
