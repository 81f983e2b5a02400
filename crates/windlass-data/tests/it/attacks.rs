//! Answers of a hostile or broken publisher: each is a named error, without a panic or an allocation of what it claims,
//! and the version that engines read stays.

use parking_lot::Mutex;

use crate::plane;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plane::child::quick_pull;
use crate::plane::{Noise, Publisher, image_bytes, odd_manifest, receiver_config, shm, stop};
use windlass_core::address::{Host, HostPort};
use windlass_core::digest::BlockSum;
use windlass_core::dtype::Dtype;
use windlass_core::error::Kind;
use windlass_core::identity::{CutsHash, Identity, Incarnation, LayoutHash, ModelId, StateDigest, Version};
use windlass_core::manifest::{Manifest, TensorSpec};
use windlass_core::ranges::BlockRanges;
use windlass_core::wire::control::{
    Age, Registered, Registration, RequestMode, TransferAnswer, TransferDone, TransferRequest, VersionInfo,
};
use windlass_core::wire::{BlockVersions, Mode, TicketFields};
use windlass_data::receiver::{Control, ControlError, Receiver, ReceiverError};
use windlass_data::serve::Server;
use windlass_data::stop::Stop;

type Twist<T> = Box<dyn Fn(&mut T) + Send + Sync>;

/// A publisher whose answers are changed on the way.
#[derive(Default)]
struct Liar {
    server: Option<Arc<Server>>,
    info: Mutex<Option<Twist<VersionInfo>>>,
    ticket: Mutex<Option<Twist<TicketFields>>>,
    manifest: Mutex<Option<Manifest>>,
    sums: Mutex<Option<Vec<BlockSum>>>,
    age: Mutex<Option<Age>>,
}

impl Liar {
    fn server(&self) -> &Arc<Server> {
        self.server.as_ref().unwrap()
    }

    fn honest(&self) {
        *self.info.lock() = None;
        *self.ticket.lock() = None;
        *self.manifest.lock() = None;
    }
}

impl Control for Liar {
    fn peer(&self) -> String {
        "a liar".into()
    }

    fn version(
        &self,
        seen: Option<(Incarnation, Version)>,
        stop: &Stop,
    ) -> Result<VersionInfo, ControlError> {
        let mut info = Control::version(&**self.server(), seen, stop)?;
        self.info.lock().iter().for_each(|twist| twist(&mut info));
        Ok(info)
    }

    fn age(&self, _: &Stop) -> Result<Option<Age>, ControlError> {
        Ok(*self.age.lock())
    }

    fn manifest(&self, stop: &Stop) -> Result<Manifest, ControlError> {
        let twisted = self.manifest.lock().clone();
        twisted.map_or_else(|| Control::manifest(&**self.server(), stop), Ok)
    }

    fn sums(&self, identity: &Identity, stop: &Stop) -> Result<Vec<BlockSum>, ControlError> {
        let twisted = self.sums.lock().clone();
        twisted.map_or_else(|| Control::sums(&**self.server(), identity, stop), Ok)
    }

    fn register(&self, registration: &Registration, stop: &Stop) -> Result<Registered, ControlError> {
        Control::register(&**self.server(), registration, stop)
    }

    fn request(&self, request: &TransferRequest, stop: &Stop) -> Result<TransferAnswer, ControlError> {
        let mut answer = Control::request(&**self.server(), request, stop)?;
        if let TransferAnswer::Granted(granted) = &mut answer {
            self.ticket.lock().iter().for_each(|twist| twist(&mut granted.ticket));
        }
        Ok(answer)
    }

    fn done(&self, done: &TransferDone, stop: &Stop) -> Result<(), ControlError> {
        Control::done(&**self.server(), done, stop)
    }
}

/// A receiver at version 1 of a publisher at version 2, with a liar in between.
struct Scene {
    publisher: Publisher,
    liar: Arc<Liar>,
    receiver: Receiver,
    old: Vec<u8>,
    _home: tempfile::TempDir,
}

fn scene(mode: RequestMode, allow: Option<Vec<Host>>) -> Scene {
    let mut publisher = Publisher::new(odd_manifest());
    Noise(23).fill(&mut publisher.data);
    publisher.publish(1);
    let liar = Arc::new(Liar { server: Some(publisher.server()), ..Liar::default() });
    let home = shm();
    let mut config = receiver_config(home.path().join("image"), mode);
    (config.pull, config.allow) = (quick_pull(), allow);
    let mut receiver = Receiver::open(config, Arc::clone(&liar) as Arc<dyn Control>, None, &stop()).unwrap();
    receiver.sync(&stop()).unwrap();
    let old = publisher.data.clone();
    publisher.change(5);
    publisher.publish(2);
    Scene { publisher, liar, receiver, old, _home: home }
}

impl Scene {
    /// Syncs with a changed ticket. The old version must still be there.
    fn refuses(&mut self, twist: impl Fn(&mut TicketFields) + Send + Sync + 'static) -> ReceiverError {
        *self.liar.ticket.lock() = Some(Box::new(twist));
        let start = Instant::now();
        let error = self.receiver.sync(&Stop::after(Duration::from_secs(10))).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(9), "refused, not timed out: {error}");
        assert_ne!(error.kind(), Kind::Bug, "{error}");
        assert_eq!(image_bytes(&self.receiver), self.old, "after: {error}");
        error
    }

    fn recovers(mut self) {
        self.liar.honest();
        self.receiver.sync(&stop()).unwrap();
        assert_eq!(image_bytes(&self.receiver), self.publisher.data);
    }
}

fn says(error: &ReceiverError, what: &str) {
    let source = std::error::Error::source(error).map_or(String::new(), ToString::to_string);
    let text = format!("{error}: {source}");
    assert!(text.contains(what), "{text:?} should say {what:?}");
}

fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn a_ticket_about_something_else_is_refused() {
    let mut scene = scene(RequestMode::Auto, None);
    let error = scene.refuses(|t| t.identity.model_id = ModelId::new("critic").unwrap());
    says(&error, "cannot be used");
    let error = scene.refuses(|t| t.layout_hash = LayoutHash([9; 16]));
    says(&error, "of layout 0909");
    says(&scene.refuses(|t| t.cuts_hash = CutsHash([9; 16])), "was not asked for");
    says(&scene.refuses(|t| t.identity.incarnation.0 += 1), "cannot be used");
    says(
        &scene.refuses(|t| {
            let Mode::Delta { base, .. } = &mut t.mode else { panic!("a delta") };
            base.digest = StateDigest([1; 16]);
        }),
        "a delta from version 1 with digest 0101",
    );
    scene.recovers();
}

#[test]
fn absurd_sizes_in_a_ticket_are_refused_before_memory_is_taken() {
    let mut scene = scene(RequestMode::Auto, None);
    let before = memory();
    for bytes in [u64::MAX, 1 << 62, 1 << 45, 100 << 20] {
        let error = scene.refuses(move |t| {
            let Mode::Delta { payloads, .. } = &mut t.mode else { panic!("a delta") };
            payloads[0].bytes = bytes;
        });
        assert_eq!(
            error.kind(),
            if matches!(error, ReceiverError::Ticket { .. }) { Kind::Invalid } else { Kind::Corrupt },
            "{error}"
        );
    }
    says(&scene.refuses(|t| t.streams = u16::MAX), "cannot be used");
    says(&scene.refuses(|t| t.stripe_bytes = u32::MAX), "cannot be used");
    says(&scene.refuses(|t| t.deadline.timeout_ms = u64::MAX), "cannot be used");
    says(&scene.refuses(|t| t.wanted = BlockRanges::new()), "cannot be used");
    says(&scene.refuses(|t| t.sources.clear()), "cannot be used");
    says(&scene.refuses(|t| t.sources = vec![t.sources[0].clone(); 5000]), "cannot be used");
    says(&scene.refuses(|t| t.why = "x".repeat(10 << 20)), "cannot be used");
    says(&scene.refuses(|t| t.protocol = 99), "cannot be used");
    assert!(memory() < before + (48 << 20), "no memory was taken for what was claimed");
    scene.recovers();
}

#[test]
fn a_payload_of_another_length_than_claimed_is_refused() {
    let mut scene = scene(RequestMode::Auto, None);
    for change in [-1i64, 1, -1000] {
        scene.refuses(move |t| {
            let Mode::Delta { payloads, .. } = &mut t.mode else { panic!("a delta") };
            payloads[0].bytes = payloads[0].bytes.saturating_add_signed(change);
        });
    }
    scene.recovers();
}

#[test]
fn a_full_ticket_for_other_blocks_does_not_cost_the_image() {
    let mut scene = scene(RequestMode::Full, None);
    let error = scene.refuses(|t| {
        t.wanted = (0..1).into();
        t.block_versions = BlockVersions::uniform(&(0..1).into(), t.identity.version);
    });
    says(&error, "1 other blocks");
    let error = scene.refuses(|t| {
        let all: BlockRanges = (0..u32::MAX).into();
        t.sources[0].blocks = all.clone();
        t.block_versions = BlockVersions::uniform(&all, t.identity.version);
        t.wanted = all;
    });
    says(&error, "other blocks");
    scene.recovers();
}

#[test]
fn an_endpoint_that_is_not_allowed_is_not_contacted() {
    let ours = Host::new("127.0.0.1").unwrap();
    let mut scene = scene(RequestMode::Auto, Some(vec![ours]));
    let listener = TcpListener::bind("127.0.0.2:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = NonZeroU16::new(listener.local_addr().unwrap().port()).unwrap();
    let error =
        scene.refuses(move |t| t.sources[0].endpoint = HostPort::new(Host::new("127.0.0.2").unwrap(), port));
    assert_eq!(error.kind(), Kind::Denied);
    says(&error, "127.0.0.2");
    assert!(listener.accept().is_err(), "nobody came");
    scene.recovers();
}

#[test]
fn garbage_on_the_data_port_is_a_named_error() {
    let mut scene = scene(RequestMode::Auto, None);
    for answer in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b"", &[0xff; 4096], &vec![0; 64 << 10]] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = NonZeroU16::new(listener.local_addr().unwrap().port()).unwrap();
        listener.set_nonblocking(true).unwrap();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::SeqCst) {
                    match listener.accept() {
                        Ok((mut peer, _)) => drop(std::io::Write::write_all(&mut peer, answer)),
                        Err(_) => std::thread::yield_now(),
                    }
                }
            });
            let error = scene.refuses(move |t| {
                t.sources[0].endpoint = HostPort::new(Host::new("127.0.0.1").unwrap(), port);
            });
            over.store(true, std::sync::atomic::Ordering::SeqCst);
            assert!(matches!(error, ReceiverError::Tcp(_)), "{error}");
            says(&error, &port.to_string());
        });
    }
    scene.recovers();
}

#[test]
fn another_model_or_layout_than_announced_does_not_cost_the_image() {
    let mut scene = scene(RequestMode::Auto, None);
    let twist = |scene: &Scene, twist: Twist<VersionInfo>| *scene.liar.info.lock() = Some(twist);
    twist(&scene, Box::new(|i| i.model_id = ModelId::new("critic").unwrap()));
    let error = scene.refuses(|_| {});
    assert!(matches!(error, ReceiverError::OtherModel { .. }), "{error}");
    // The layout of the announcement is not that of the manifest.
    twist(&scene, Box::new(|i| i.layout_hash = LayoutHash([3; 16])));
    let error = scene.refuses(|_| {});
    assert!(matches!(error, ReceiverError::OtherLayout { .. }), "{error}");
    let huge = TensorSpec::new("w", Dtype::U8, [1 << 40]);
    *scene.liar.manifest.lock() = Some(Manifest::new([huge], BTreeMap::new()).unwrap());
    let error = scene.refuses(|_| {});
    says(&error, "announces 0303");
    twist(&scene, Box::new(|i| i.version = None));
    let error = scene.refuses(|_| {});
    assert!(matches!(error, ReceiverError::NothingYet { .. }), "{error}");
    twist(&scene, Box::new(|i| i.incarnation = Incarnation(1)));
    let error = scene.refuses(|_| {});
    assert!(matches!(error, ReceiverError::OldLife { .. }), "{error}");
    scene.recovers();
}

/// Where a region is gone and a clock has gone back, a new life has the lower number.
#[test]
fn a_life_with_a_lower_number_is_followed_only_if_it_began_later() {
    let mut scene = scene(RequestMode::Auto, None);
    let followed = Instant::now();
    let real = scene.publisher.server().region().incarnation();
    let lower = Incarnation(7);
    let say = |scene: &Scene, age| *scene.liar.age.lock() = age;
    let told = |scene: &mut Scene, age, wanted: &str| {
        say(scene, age);
        let error = scene.receiver.sync(&Stop::after(Duration::from_secs(10))).unwrap_err();
        // Its tickets are of the real life, so one that is followed fails there.
        let found = match error {
            ReceiverError::OldLife { theirs, .. } if theirs == lower => "old",
            ReceiverError::NewLife { was, now, .. } if (was, now) == (lower, real) => "followed",
            other => panic!("{other}"),
        };
        assert_eq!(found, wanted, "{age:?}");
    };
    *scene.liar.info.lock() = Some(Box::new(move |i| i.incarnation = lower));
    told(&mut scene, None, "old");
    told(&mut scene, Some(Age { incarnation: lower, ms: 60_000 }), "old");
    told(&mut scene, Some(Age { incarnation: lower, ms: u64::MAX }), "old");
    told(&mut scene, Some(Age { incarnation: real, ms: 0 }), "old");
    while followed.elapsed() < Duration::from_millis(50) {
        std::thread::yield_now();
    }
    told(&mut scene, Some(Age { incarnation: lower, ms: 0 }), "followed");
    // Now the number of the life before is the greater one, and still nobody goes back to it.
    *scene.liar.info.lock() = None;
    for age in [None, Some(Age { incarnation: real, ms: 60_000 })] {
        say(&scene, age);
        let error = scene.receiver.sync(&Stop::after(Duration::from_secs(10))).unwrap_err();
        assert!(matches!(error, ReceiverError::OldLife { theirs, .. } if theirs == real), "{error}");
    }
    // A greater number than all is a newer life, whatever is known of its age.
    *scene.liar.info.lock() = Some(Box::new(move |i| i.incarnation = Incarnation(real.0 + 1)));
    let error = scene.receiver.sync(&Stop::after(Duration::from_secs(10))).unwrap_err();
    assert!(matches!(error, ReceiverError::NewLife { now, .. } if now == real), "{error}");
}

#[test]
fn a_manifest_larger_than_memory_is_refused_for_want_of_room() {
    let huge = || Manifest::new([TensorSpec::new("w", Dtype::U8, [1 << 40])], BTreeMap::new()).unwrap();
    let mut publisher = Publisher::new(odd_manifest());
    publisher.publish(1);
    let liar = Arc::new(Liar { server: Some(publisher.server()), ..Liar::default() });
    let (layout, cuts) = (huge().layout_hash(), huge().cuts_hash());
    *liar.info.lock() = Some(Box::new(move |i| (i.layout_hash, i.cuts_hash) = (layout, cuts)));
    *liar.manifest.lock() = Some(huge());
    let home = shm();
    let config = receiver_config(home.path().join("image"), RequestMode::Auto);
    let mut receiver = Receiver::open(config, Arc::clone(&liar) as Arc<dyn Control>, None, &stop()).unwrap();
    let error = receiver.sync(&stop()).unwrap_err();
    assert_eq!(error.kind(), Kind::Exhausted, "{error}");
    liar.honest();
    receiver.sync(&stop()).unwrap();
    assert_eq!(image_bytes(&receiver), publisher.data);
}

#[test]
fn sums_that_are_lies_cost_a_fetch_and_nothing_else() {
    let mut publisher = Publisher::new(odd_manifest());
    Noise(23).fill(&mut publisher.data);
    publisher.publish(1);
    let home = shm();
    let image = home.path().join("image");
    plane::receiver_at(image.clone(), publisher.server(), RequestMode::Auto).sync(&stop()).unwrap();
    let path = image.join("a.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let blocks = publisher.region.manifest().cuts().blocks() as usize;
    for lie in [Vec::new(), vec![BlockSum([7, 7]); blocks], vec![BlockSum::default(); 3 * blocks]] {
        let liar = Liar { server: Some(publisher.server()), sums: Mutex::new(Some(lie)), ..Liar::default() };
        let mut receiver = plane::receiver_at(image.clone(), Arc::new(liar), RequestMode::Auto);
        receiver.sync(&stop()).unwrap();
        assert_eq!(image_bytes(&receiver), publisher.data);
    }
}

#[test]
fn a_wrong_digest_in_a_ticket_hides_the_image_until_it_is_right() {
    let mut scene = scene(RequestMode::Auto, None);
    *scene.liar.ticket.lock() = Some(Box::new(|t| t.digest = StateDigest([5; 16])));
    let error = scene.receiver.sync(&Stop::after(Duration::from_secs(10))).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt, "{error}");
    assert!(scene.receiver.current().is_none(), "nothing that is not proved is shown");
    scene.recovers();
}
