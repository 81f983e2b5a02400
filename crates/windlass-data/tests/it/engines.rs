//! The image at a receiver, and the engines that read it in place.

use crate::plane;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plane::child::{self, Child, quick_server};
use crate::plane::{Publisher, digest, eventually, image_bytes, odd_manifest, receiver, shm, stop};
use windlass_core::error::Kind;
use windlass_core::identity::ModelId;
use windlass_core::wire::Ticket;
use windlass_data::image::{Image, ImageError, ImageSpec, ImageView, Known};
use windlass_data::local::{LocalServer, attach};
use windlass_data::receiver::{Control, Receiver};
use windlass_data::region::{Memfd, Region, RegionError};
use windlass_data::serve::Server;
use windlass_data::stop::Stop;
use windlass_data::tcp::{PullConfig, TcpError, Watch, pull};

fn spec(dir: &Path) -> ImageSpec {
    let model_id = ModelId::new("actor").unwrap();
    ImageSpec { dir: dir.join("image"), model_id, group: false, memfd: Memfd::Never, threads: 2 }
}

fn published() -> (Publisher, Known) {
    let mut publisher = Publisher::new(odd_manifest());
    plane::Noise(5).fill(&mut publisher.data);
    let digest = publisher.publish(1);
    let identity = publisher.server().version().identity().unwrap();
    (publisher, Known { identity, digest })
}

/// A full ticket, straight from the server.
fn ticket(server: &Server) -> Ticket {
    use windlass_core::wire::control::{Registration, RequestMode, TransferAnswer, TransferRequest};
    let instance_id = Control::register(server, &Registration::default(), &stop()).unwrap().instance_id;
    let request = TransferRequest {
        instance_id,
        mode: RequestMode::Full,
        have: None,
        version: None,
        layout_hash: None,
        wanted: None,
        keeps: None,
        streams: None,
        timeout_ms: None,
        relay: None,
    };
    let TransferAnswer::Granted(granted) = Server::request(server, &request, &stop()).unwrap() else {
        panic!("refused")
    };
    granted.ticket().unwrap()
}

fn pull_into(refresh: &windlass_data::image::Refresh<'_>, ticket: &Ticket) -> Result<(), TcpError> {
    let (config, watch) = (PullConfig::default(), Watch::default());
    refresh.land(ticket, None, |landing| pull(ticket, landing, &config, &stop(), &watch)).map(drop)
}

#[test]
fn an_image_cannot_be_leased_while_it_is_open() {
    let (publisher, known) = published();
    let dir = shm();
    let mut image =
        Image::create(spec(dir.path()), Arc::clone(publisher.region.manifest()), None, &Stop::never())
            .unwrap();
    let region = Arc::clone(image.region());
    let soon = || Stop::after(Duration::from_millis(20));
    let lease = |region| ImageView::take(region, Duration::from_secs(5), &soon());
    assert!(matches!(lease(&region), Err(ImageError::NotWhole { .. })), "an empty image is not whole");
    let refresh = image.refresh(&stop()).unwrap();
    pull_into(&refresh, &ticket(&publisher.server())).unwrap();
    assert!(matches!(lease(&region), Err(ImageError::NotWhole { .. })), "all is there, but not finished");
    refresh.finish(&known, &stop()).unwrap();
    let view = lease(&region).unwrap();
    assert_eq!((view.known(), view.data()), (&known, &publisher.data[..]));
    view.finish().unwrap();
    drop(image.refresh(&stop()).unwrap());
    assert!(matches!(lease(&region), Err(ImageError::NotWhole { .. })), "a broken refresh hides the image");
}

/// A driver holds the image while its workers come to it: if they were kept out, both would wait for the receiver, and it
/// for them.
#[test]
fn workers_are_let_in_while_their_driver_holds_an_image_that_is_to_be_refreshed() {
    let (publisher, known) = published();
    let dir = shm();
    receiver(&dir, publisher.server()).sync(&stop()).unwrap();
    let mut image = Image::open(spec(dir.path()), &stop()).unwrap();
    let region = Arc::clone(image.region());
    let driver = ImageView::take(&region, Duration::from_secs(60), &stop()).unwrap();
    let before = region.state().attempt;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| image.refresh(&stop()).map(drop));
        eventually("the receiver is at the door", || region.state().attempt > before);
        for _ in 0..5 {
            let soon = Stop::after(Duration::from_secs(10));
            let worker = ImageView::open(region.dir(), Duration::from_secs(60), &soon).unwrap();
            assert_eq!(worker.known(), &known);
            worker.finish().unwrap();
        }
        assert!(!waiting.is_finished());
        driver.finish().unwrap();
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_refresh_with_a_missing_block_does_not_finish() {
    let (publisher, known) = published();
    let dir = shm();
    let mut image =
        Image::create(spec(dir.path()), Arc::clone(publisher.region.manifest()), None, &Stop::never())
            .unwrap();
    let blocks = image.manifest().cuts().blocks();
    let refresh = image.refresh(&stop()).unwrap();
    let Err(ImageError::Incomplete { left, first, .. }) = refresh.finish(&known, &stop()) else {
        panic!("finished")
    };
    assert_eq!((left, first), (blocks, 0));
    let refresh = image.refresh(&stop()).unwrap();
    pull_into(&refresh, &ticket(&publisher.server())).unwrap();
    let wrong = Known { digest: windlass_core::identity::StateDigest([7; 16]), ..known.clone() };
    let error = refresh.finish(&wrong, &stop()).unwrap_err();
    assert!(matches!(error, ImageError::Digest { .. }), "{error}");
    assert_eq!(image.current(), None);
    image.refresh(&stop()).unwrap().finish(&known, &stop()).unwrap();
    assert_eq!(image.current(), Some(&known));
}

#[test]
fn a_broken_refresh_keeps_what_landed() {
    let (publisher, known) = published();
    let dir = shm();
    let mut image =
        Image::create(spec(dir.path()), Arc::clone(publisher.region.manifest()), None, &Stop::never())
            .unwrap();
    let refresh = image.refresh(&stop()).unwrap();
    let ticket = ticket(&publisher.server());
    pull_into(&refresh, &ticket).unwrap();
    drop(refresh);
    assert_eq!((image.current(), image.unknown().len()), (None, 0));
    assert_eq!(image.versions().into_iter().collect::<Vec<_>>(), [1]);
    drop(image);
    // The next process has only the bytes, and their sums tell what they are.
    let mut image = Image::open(spec(dir.path()), &stop()).unwrap();
    assert_eq!(image.current(), None);
    let sums = publisher.server().sums(Some(1), &stop()).unwrap();
    let refresh = image.refresh(&stop()).unwrap();
    assert_eq!(refresh.adopt(1, sums.sums()), refresh.manifest().cuts().blocks());
    refresh.finish(&known, &stop()).unwrap();
}

#[test]
fn a_reopened_image_is_summed_before_it_counts() {
    let (publisher, known) = published();
    let dir = shm();
    receiver(&dir, publisher.server()).sync(&stop()).unwrap();
    assert_eq!(Image::open(spec(dir.path()), &stop()).unwrap().current(), Some(&known));
    let path = dir.path().join("image/a.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x80;
    fs::write(&path, &bytes).unwrap();
    let image = Image::open(spec(dir.path()), &stop()).unwrap();
    assert_eq!((image.current(), image.unknown().len()), (None, image.manifest().cuts().blocks()));
}

#[test]
fn an_image_is_opened_by_one_receiver_at_a_time() {
    let (publisher, _) = published();
    let dir = shm();
    let mut first = receiver(&dir, publisher.server());
    first.sync(&stop()).unwrap();
    let error = Image::open(spec(dir.path()), &stop()).unwrap_err();
    assert!(matches!(error, ImageError::Taken { pid, .. } if pid == std::process::id()), "{error}");
    // Another model beside it has a lock of its own.
    let beside = ImageSpec { dir: dir.path().join("verifier"), ..spec(dir.path()) };
    let made = Image::create(beside.clone(), Arc::clone(publisher.region.manifest()), None, &stop()).unwrap();
    assert!(matches!(Image::open(beside, &stop()).unwrap_err(), ImageError::Taken { .. }));
    drop(made);
    drop(first);
    Image::open(spec(dir.path()), &stop()).unwrap();
}

/// What a pull brings waits beside the image until it is whole: engines go on reading, however long that takes.
#[test]
fn an_image_is_read_while_the_next_version_is_stuck_on_the_wire() {
    let (mut publisher, known) = published();
    let dir = shm();
    let via = plane::proxy::Via::new(publisher.server());
    let mut receiver = receiver(&dir, Arc::clone(&via) as Arc<dyn Control>);
    receiver.sync(&stop()).unwrap();
    let old = publisher.data.clone();
    publisher.change(5);
    publisher.publish(2);
    // Nothing comes any more.
    via.line.allow(Some(via.line.passed()));
    let status = receiver.status();
    let region = Region::open(&dir.path().join("image")).unwrap();
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| receiver.sync(&stop()));
        eventually("the pull is stuck", || {
            let now = status.get();
            now.stage == windlass_data::receiver::Stage::Pulling && now.mode == Some("delta")
        });
        for _ in 0..20 {
            let view = ImageView::take(&region, Duration::from_secs(30), &stop()).unwrap();
            assert_eq!((view.known(), view.data()), (&known, &old[..]));
            view.finish().unwrap();
        }
        assert!(!syncing.is_finished());
        via.line.allow(None);
        assert_eq!(syncing.join().unwrap().unwrap().mode, "delta");
    });
    let view = ImageView::take(&region, Duration::from_secs(30), &stop()).unwrap();
    assert_eq!((view.known().identity.version, view.data()), (2, &publisher.data[..]));
    view.finish().unwrap();
}

/// Regression: a receiver killed between the commit and the seal of its image left a region in which every later
/// refresh waited for a seal that nobody made.
#[test]
fn an_image_committed_and_not_sealed_can_be_refreshed() {
    let (mut publisher, known) = published();
    let dir = shm();
    receiver(&dir, publisher.server()).sync(&stop()).unwrap();
    {
        // What finish does, up to the point where it was killed.
        let region = Region::open(&dir.path().join("image")).unwrap();
        let mut writer = region.writer(0).unwrap();
        let attempt = writer.begin(2, &stop()).unwrap();
        let state = dir.path().join("image/state.json");
        let text = fs::read_to_string(&state).unwrap().replace("\"commit\":1", "\"commit\":2");
        fs::write(state, text).unwrap();
        attempt.done(&stop()).unwrap();
    }
    let mut again = receiver(&dir, publisher.server());
    assert_eq!(again.current(), Some(&known), "the bytes were all there");
    publisher.change(5);
    publisher.publish(2);
    assert_eq!(again.sync(&stop()).unwrap().mode, "delta");
    assert_eq!(image_bytes(&again), publisher.data);
}

#[test]
fn a_refresh_waits_for_engines_and_names_the_one_that_does_not_leave() {
    let (mut publisher, known) = published();
    let dir = shm();
    let mut config =
        plane::receiver_config(dir.path().join("image"), windlass_core::wire::control::RequestMode::Auto);
    config.open_timeout = Duration::from_millis(150);
    let mut receiver = Receiver::open(config, publisher.server(), None, &stop()).unwrap();
    receiver.sync(&stop()).unwrap();
    let image = dir.path().join("image");
    let mut engines: Vec<Child> =
        (0..3).map(|_| Child::spawn("engine", &[image.to_str().unwrap()])).collect();
    for engine in &mut engines {
        assert_eq!(engine.ask("take"), format!("has {}", known.digest));
    }
    publisher.change(5);
    publisher.publish(2);
    let error = receiver.sync(&stop()).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout);
    for engine in &engines {
        assert!(error.to_string().contains(&engine.id().to_string()), "{error}");
    }
    assert_eq!(receiver.current(), Some(&known), "engines still read the old version");
    // Later deltas queue: the next sync takes all of them at once.
    publisher.change(5);
    publisher.publish(3);
    assert_eq!(engines[0].ask("leave"), "left");
    assert_eq!(receiver.sync(&stop()).unwrap_err().kind(), Kind::Timeout, "two are left");
    engines[1].kill();
    engines[2].kill();
    let synced = receiver.sync(&stop()).unwrap();
    assert_eq!((synced.mode, synced.transfers), ("delta", 1), "leases of killed engines are free");
    let found = engines[0].ask("take");
    assert_eq!(found, format!("has {}", digest(publisher.region.manifest(), &publisher.data)));
}

#[test]
fn many_engines_read_one_image_at_a_time() {
    let (publisher, known) = published();
    let dir = shm();
    let mut receiver = receiver(&dir, publisher.server());
    receiver.sync(&stop()).unwrap();
    let region = Region::open(&dir.path().join("image")).unwrap();
    let take = || ImageView::take(&region, Duration::from_mins(1), &stop());
    let views: Vec<ImageView> = (0..256).map(|_| take().unwrap()).collect();
    assert!(views.iter().all(|v| v.known() == &known));
    let first = views[0].data().as_ptr();
    assert!(views.iter().all(|v| v.data().as_ptr() == first), "read in place, not copied");
    // One too many says so, instead of that there is no image.
    let error = take().unwrap_err();
    assert!(matches!(error, ImageError::Region(RegionError::LeasesFull { .. })), "{error}");
}

#[test]
fn an_engine_that_overstays_learns_that_its_image_was_taken_back() {
    let (mut publisher, _) = published();
    let dir = shm();
    let mut receiver = receiver(&dir, publisher.server());
    receiver.sync(&stop()).unwrap();
    let region = Region::open(&dir.path().join("image")).unwrap();
    let view = ImageView::take(&region, Duration::from_millis(1), &stop()).unwrap();
    publisher.change(5);
    publisher.publish(2);
    receiver.sync(&stop()).unwrap();
    assert!(view.renew(Duration::from_secs(1)).is_err());
    let error = view.finish().unwrap_err();
    assert_eq!(error.kind(), Kind::Stale, "{error}");
}

#[test]
fn a_local_process_attaches_by_descriptors_and_reads_in_place_after_the_agent_is_dead() {
    let (publisher, known) = published();
    let Publisher { dir, region, writer, server, .. } = publisher;
    // The rank is free: what keeps the reader from writing is its descriptors.
    drop((server, writer));
    let home = region.dir().to_owned();
    let mut agent = Child::spawn("agent", &[home.to_str().unwrap()]);
    let mut reader = Child::spawn("attach", &[home.to_str().unwrap()]);
    assert_eq!(reader.ask("read"), format!("has {} 1 false", known.digest), "and it cannot write");
    // The map lease of the reader is in its own name, on the region's own pages.
    let maps = fs::read_to_string(format!("/proc/{}/maps", reader.id())).unwrap();
    assert!(maps.contains("a.safetensors") && maps.contains("b.safetensors"), "{maps}");
    agent.kill();
    assert_eq!(reader.ask("read"), format!("has {} 1 false", known.digest));
    let again = Child::spawn("agent", &[home.to_str().unwrap()]);
    assert!(attach(&home).is_ok(), "the socket of the dead agent was replaced");
    drop((again, reader, region, dir));
}

#[test]
fn a_process_of_another_user_is_refused_by_its_credentials() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let (publisher, _) = published();
    let region = Arc::clone(&publisher.region);
    let local = LocalServer::start(Arc::clone(&region)).unwrap();
    // The directory would keep the stranger out already; let it reach the socket.
    for (path, mode) in [(publisher.dir.path(), 0o701), (region.dir(), 0o701), (&region.socket_path(), 0o666)]
    {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let exe = tempfile::tempdir().unwrap();
    fs::set_permissions(exe.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let copy = exe.path().join("stranger");
    fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let output = std::process::Command::new(&copy)
        .args(["--exact", "plane::child::child", "--ignored", "--nocapture"])
        .env("WINDLASS_TEST_ROLE", "attach")
        .env("WINDLASS_TEST_ARGS", region.dir())
        .current_dir("/")
        .stdin(Stdio::null())
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("@ready no Denied") && said.contains("user 65534 may not attach"), "{said}");
    drop(local);
    assert!(attach(region.dir()).is_err(), "the way in is closed");
}

#[test]
fn a_garbled_greeting_of_a_local_agent_is_named() {
    let dir = shm();
    let listener = std::os::unix::net::UnixListener::bind(dir.path().join("agent.sock")).unwrap();
    for (answer, expected) in [
        (&b"{}\n"[..], "missing field"),
        (b"\xff\xfe\n", "not a Windlass agent"),
        (b"{\"windlass\":2}\n", "version 2"),
        (b"{\"windlass\":1,\"model_id\":\"a\"}\n", "descriptor"),
        (b"{\"windlass\":1,\"error\":\"go away\"}\n", "go away"),
        (b"{\"windlass\":1", "cannot read from"),
        (&[b'x'; 5000], "cannot read from"),
    ] {
        std::thread::scope(|scope| {
            scope.spawn(|| std::io::Write::write_all(&mut listener.accept().unwrap().0, answer));
            let error = attach(dir.path()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error} should say {expected}");
        });
    }
    let long = dir.path().join("x".repeat(120));
    assert!(attach(&long).unwrap_err().to_string().contains("too long"));
}

#[test]
fn a_receiver_that_fails_half_way_shows_that_its_image_is_hidden() {
    let (mut publisher, _) = published();
    let dir = shm();
    let via = plane::proxy::Via::new(publisher.server());
    let mut config =
        plane::receiver_config(dir.path().join("image"), windlass_core::wire::control::RequestMode::Full);
    config.pull = child::quick_pull();
    let mut receiver = Receiver::open(config, Arc::clone(&via) as Arc<dyn Control>, None, &stop()).unwrap();
    receiver.sync(&stop()).unwrap();
    let status = receiver.status();
    assert!(status.get().image.is_some());
    publisher.change(5);
    publisher.publish(2);
    via.line.allow(Some(via.line.passed() + 200_000));
    let error = receiver.sync(&Stop::after(Duration::from_millis(300))).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout, "{error}");
    assert!(status.get().image.is_none() && receiver.current().is_none());
    assert!(status.get().error.is_some());
    via.line.allow(None);
    receiver.sync(&stop()).unwrap();
    assert_eq!(image_bytes(&receiver), publisher.data);
    assert!(status.get().error.is_none() && status.get().image.is_some());
}

#[test]
fn the_status_of_a_transfer_can_be_read_at_any_time() {
    let (publisher, known) = published();
    let dir = shm();
    let via = plane::proxy::Via::new(publisher.server());
    via.line.allow(Some(300_000));
    let mut receiver = receiver(&dir, Arc::clone(&via) as Arc<dyn Control>);
    let status = receiver.status();
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| receiver.sync(&stop()).unwrap());
        eventually("a part has arrived", || {
            let now = status.get();
            now.stage == windlass_data::receiver::Stage::Pulling
                && now.mode == Some("full")
                && via.line.passed() > 200_000
        });
        let half = status.get();
        assert_eq!(half.target, Some(known.identity.clone()));
        assert!(half.bytes == publisher.data.len() as u64 && half.bytes_done < half.bytes, "{half:?}");
        via.line.allow(None);
        sync.join().unwrap();
    });
    let end = status.get();
    assert_eq!((end.image, end.synced, end.bytes_done), (Some(known), 1, end.bytes));
}

#[test]
fn a_server_takes_over_what_is_sealed_and_stops_at_once() {
    let (publisher, known) = published();
    let Publisher { dir, region, writer, server, data, .. } = publisher;
    drop(server);
    let start = Instant::now();
    let server = Server::start(Arc::clone(&region), quick_server()).unwrap();
    assert_eq!(server.version().digest, Some(known.digest), "taken over from the region");
    server.shutdown(Duration::from_secs(5));
    assert!(start.elapsed() < Duration::from_secs(4), "nothing to wait for");
    assert_eq!(region.state().active.unwrap().sealed, Some(digest(region.manifest(), &data)));
    drop((writer, dir));
}

#[test]
fn a_sync_that_is_called_off_says_so() {
    let (publisher, _) = published();
    let dir = shm();
    let mut receiver = receiver(&dir, publisher.server());
    let stop = Stop::never();
    stop.set();
    let error = receiver.sync(&stop).unwrap_err();
    assert_eq!(error.kind(), Kind::Cancelled, "{error}");
}
