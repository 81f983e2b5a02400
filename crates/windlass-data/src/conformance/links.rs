//! Cases for links.

use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use windlass_core::error::Kind;

use super::{LinkUnderTest, World, is_pure, layouts, ordinary, soon, while_publishing};
use crate::roles::Arrived;
use crate::stop::Stop;

/// Runs a case, unless the link needs something that is not here.
pub fn run<L: LinkUnderTest>(link: &L, case: impl FnOnce(&L)) {
    match link.missing() {
        None => case(link),
        Some(what) => super::skipped(&what),
    }
}

/// Every layout arrives as it was published.
pub fn first<L: LinkUnderTest>(link: &L) {
    for (what, manifest) in layouts() {
        let mut world = World::new(link, manifest);
        let known = world.publish();
        let arrived = world.receiver("engine").next(None, &soon()).unwrap();
        world.check(&arrived, &known, what);
        arrived.finish().unwrap();
    }
}

/// A receiver may be there before anything is published.
pub fn early<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let mut receiver = world.receiver("engine");
    let (arrived, known) = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| receiver.next(None, &soon()));
        let known = world.publish();
        (waiting.join().unwrap().unwrap(), known)
    });
    world.check(&arrived, &known, "the first version");
}

/// Small changes cost little.
pub fn changes<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let mut receiver = world.receiver("engine");
    let mut loaded = None;
    for round in 0..5 {
        let known = world.publish();
        let arrived = receiver.next(loaded.as_ref(), &soon()).unwrap();
        world.check(&arrived, &known, "a later version");
        let (how, whole) = (arrived.how(), world.data().len() as u64);
        assert!(link.moves_bytes() || how.wire_bytes == 0, "{how:?}");
        assert!(round == 0 || how.wire_bytes < whole / 4, "{how:?}");
        loaded = Some(known.identity);
        world.change(200);
    }
    assert_eq!(receiver.status().image.map(|k| k.identity), loaded);
}

/// Versions that were missed are not loaded one by one.
pub fn behind<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let mut receiver = world.receiver("engine");
    let first = world.publish();
    let arrived = receiver.next(None, &soon()).unwrap();
    world.check(&arrived, &first, "the first version");
    drop(arrived);
    for _ in 0..6 {
        world.change(500);
        world.publish();
    }
    world.change(500);
    let newest = world.publish();
    let arrived = receiver.next(Some(&first.identity), &soon()).unwrap();
    world.check(&arrived, &newest, "after seven versions");
    assert!(arrived.how().transfers <= 1, "{:?}", arrived.how());
}

/// A receiver that is restarted goes on from what it has, and notices damage.
pub fn restarted<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let known = world.publish();
    drop(world.receiver("engine").next(None, &soon()).unwrap());
    let arrived = world.receiver("engine").next(None, &soon()).unwrap();
    world.check(&arrived, &known, "after a restart");
    assert_eq!(arrived.how().wire_bytes, 0, "it was all there: {:?}", arrived.how());
    let path = arrived.path().map(ToOwned::to_owned);
    drop(arrived);
    let Some(path) = path.filter(|_| link.keeps_image()) else { return };
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() - 10;
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let arrived = world.receiver("engine").next(None, &soon()).unwrap();
    world.check(&arrived, &known, "after damage");
    let fetched = arrived.how().wire_bytes;
    assert!(fetched > 0 && fetched < world.data().len() as u64 / 2, "only the damage: {:?}", arrived.how());
}

/// A bit that flips on the way is noticed, and what it was in is fetched again.
pub fn flipped<L: LinkUnderTest>(link: &L) {
    let home = tempfile::Builder::new().prefix("windlass-link-").tempdir_in("/dev/shm").unwrap();
    let Some(strategy) = link.damaging(home.path()) else {
        assert!(!link.moves_bytes(), "a link that moves bytes says how they can be damaged");
        return;
    };
    let mut world = World::with(home, strategy, ordinary());
    let known = world.publish();
    let arrived = world.receiver("engine").next(None, &soon()).unwrap();
    world.check(&arrived, &known, "over a wire that flips a bit");
    let (wire, whole) = (arrived.how().wire_bytes, world.data().len() as u64);
    // Where the link itself throws damaged bytes away, they are not among those that were received.
    let again = link.damaged().unwrap_or(wire > whole);
    assert!(again, "nothing was fetched again: {wire} of {whole} bytes");
}

/// Bytes that were changed after they were sealed never reach an engine.
pub fn scribbled<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let slots = ["a.safetensors", "b.safetensors"].map(|s| super::region_dir(world.home.path()).join(s));
    world.publish();
    let mut receiver = world.receiver("engine");
    for path in &slots {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let (mut byte, at) = ([0], file.metadata().unwrap().len() - 10);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
    let error = receiver.next(None, &Stop::after(Duration::from_secs(1))).unwrap_err();
    assert!(matches!(error.kind(), Kind::Corrupt | Kind::Timeout), "{error}");
    // What is sealed next would be based on it.
    world.start();
    let known = world.publish();
    world.check(&receiver.next(None, &soon()).unwrap(), &known, "after a damaged version");
}

/// A publisher that never rests laps its readers; what arrives is whole all the same.
pub fn restless<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let mut receiver = world.receiver("engine");
    while_publishing(&mut world, |_| {
        let mut loaded = None;
        for _ in 0..8 {
            let arrived = receiver.next(loaded.as_ref(), &soon()).unwrap();
            let identity = arrived.identity().clone();
            assert!(is_pure(identity.version, arrived.manifest(), arrived.data()), "{identity} is mixed");
            assert_eq!(super::digest_of(arrived.manifest(), arrived.data()), arrived.digest());
            assert!(loaded.as_ref() < Some(&identity), "{identity} after {loaded:?}");
            loaded = Some(identity);
        }
    });
}

/// A wait that is called off ends soon, and the receiver can be used again.
pub fn cancelled<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let mut receiver = world.receiver("engine");
    let known = world.publish();
    drop(receiver.next(None, &soon()).unwrap());
    let stop = soon();
    let error = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| receiver.next(Some(&known.identity), &stop));
        stop.set();
        let since = Instant::now();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(since.elapsed() < Duration::from_secs(8), "it took {:?}", since.elapsed());
        error
    });
    assert_eq!(error.kind(), Kind::Cancelled, "{error}");
    world.change(100);
    let newest = world.publish();
    let arrived = receiver.next(Some(&known.identity), &soon()).unwrap();
    world.check(&arrived, &newest, "after a cancelled wait");
}

/// A wait ends at its deadline.
pub fn deadline<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let mut receiver = world.receiver("engine");
    let since = Instant::now();
    let error = receiver.next(None, &Stop::after(Duration::from_millis(300))).unwrap_err();
    assert_eq!(error.kind(), Kind::Timeout, "{error}");
    assert!(since.elapsed() < Duration::from_secs(5), "it took {:?}", since.elapsed());
    let known = world.publish();
    world.check(&receiver.next(None, &soon()).unwrap(), &known, "after a deadline");
}

/// Many receivers at once.
pub fn many<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let known = world.publish();
    let receivers: Vec<_> = (0..6).map(|i| world.receiver(&format!("engine-{i}"))).collect();
    let data = world.data();
    std::thread::scope(|scope| {
        for mut receiver in receivers {
            let (known, data) = (&known, &data);
            scope.spawn(move || {
                let arrived = receiver.next(None, &soon()).unwrap();
                assert!(arrived.known() == known && arrived.data() == data, "{arrived:?}");
            });
        }
    });
}

/// What an engine holds stands still, whatever the publisher does.
pub fn held<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let mut receiver = world.receiver("engine");
    let known = world.publish();
    let arrived: Arrived = receiver.next(None, &soon()).unwrap();
    let before = world.data();
    for _ in 0..3 {
        world.change(50);
        let World { sender, weights, version, .. } = &mut world;
        // A publisher whose slot is mapped waits, and says so at its deadline.
        let stop = Stop::after(Duration::from_millis(300));
        match sender.as_mut().unwrap().publish(weights, *version + 1, &stop) {
            Ok(_) => *version += 1,
            Err(e) => assert_eq!(e.kind(), Kind::Timeout, "{e}"),
        }
        assert!(arrived.data() == before, "the bytes of a held version changed");
    }
    arrived.finish().unwrap();
    let newest = world.publish();
    let arrived = receiver.next(Some(&known.identity), &soon()).unwrap();
    world.check(&arrived, &newest, "after letting go");
}

/// A publisher that comes back is followed into its new life.
pub fn reborn<L: LinkUnderTest>(link: &L) {
    let mut world = World::new(link, ordinary());
    let mut receiver = world.receiver("engine");
    world.version = 100;
    let old = world.publish();
    drop(receiver.next(None, &soon()).unwrap());
    world.start();
    world.version = 50;
    world.change(100);
    let new = world.publish();
    assert!(new.identity.incarnation > old.identity.incarnation);
    let arrived = receiver.next(Some(&old.identity), &soon()).unwrap();
    world.check(&arrived, &new, "of a new life");
}

/// Every case as a test, for one [`LinkUnderTest`].
#[macro_export]
macro_rules! link_conformance {
    ($module:ident, $link:expr) => {
        mod $module {
            use $crate::conformance::links;
            #[test]
            fn a_first_version_of_any_layout_arrives_bit_for_bit() {
                links::run(&$link, links::first);
            }
            #[test]
            fn a_receiver_may_be_there_before_the_first_version() {
                links::run(&$link, links::early);
            }
            #[test]
            fn small_changes_cost_little_on_the_wire() {
                links::run(&$link, links::changes);
            }
            #[test]
            fn a_receiver_that_is_behind_gets_the_newest_at_once() {
                links::run(&$link, links::behind);
            }
            #[test]
            fn a_restarted_receiver_goes_on_from_what_it_has() {
                links::run(&$link, links::restarted);
            }
            #[test]
            fn a_bit_that_flips_on_the_way_is_fetched_again() {
                links::run(&$link, links::flipped);
            }
            #[test]
            fn bytes_changed_after_sealing_never_reach_an_engine() {
                links::run(&$link, links::scribbled);
            }
            #[test]
            fn a_publisher_that_never_rests_is_followed_with_whole_versions() {
                links::run(&$link, links::restless);
            }
            #[test]
            fn a_wait_that_is_called_off_ends_soon_and_harms_nothing() {
                links::run(&$link, links::cancelled);
            }
            #[test]
            fn a_wait_for_a_version_ends_at_its_deadline() {
                links::run(&$link, links::deadline);
            }
            #[test]
            fn many_receivers_are_served_at_once() {
                links::run(&$link, links::many);
            }
            #[test]
            fn a_held_version_stands_still_whatever_the_publisher_does() {
                links::run(&$link, links::held);
            }
            #[test]
            fn a_publisher_that_comes_back_is_followed_into_its_new_life() {
                links::run(&$link, links::reborn);
            }
        }
    };
}
