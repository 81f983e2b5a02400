//! Cases for loaders, and for what feeds them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use windlass_core::chunk::ChunkConfig;
use windlass_core::identity::Identity;

use super::{
    LinkUnderTest, LoaderUnderTest, World, is_pure, is_pure_tensor, ordinary, soon, while_publishing,
};
use crate::roles::{BoxError, Feed, RoleError, WeightLoader, Weights};

/// The engine must hold what was published, under every name.
fn check_engine<E: LoaderUnderTest>(world: &World, engine: &E) {
    let manifest = super::published_manifest(&world.weights);
    let names = manifest.tensors().iter().map(|t| &t.name).chain(manifest.aliases().keys());
    for name in names {
        let held = engine.holds(name).unwrap_or_else(|| panic!("the engine has no {name}"));
        assert!(Some(held.as_slice()) == world.weights.get(name), "the engine holds other bytes of {name}");
    }
}

/// Whole versions only.
pub fn whole<L: LinkUnderTest, E: LoaderUnderTest>(link: &L, engine: &E) {
    let mut world = World::new(link, ordinary());
    let receiver = world.receiver("engine");
    let mut inner = engine.loader();
    let loader = move |weights: &Weights<'_>| -> Result<(), BoxError> {
        let version = weights.identity().version;
        assert!(is_pure(version, weights.manifest(), weights.data()), "{} is mixed", weights.identity());
        inner.load(weights)?;
        assert!(
            is_pure(version, weights.manifest(), weights.data()),
            "{} changed during the load",
            weights.identity()
        );
        Ok(())
    };
    let mut feed = Feed::new(receiver, loader);
    while_publishing(&mut world, |_| {
        for _ in 0..6 {
            let loaded = feed.step(&soon()).unwrap();
            let name = "model.embed.weight";
            let held = engine.holds(name).unwrap();
            assert!(is_pure_tensor(loaded.known.identity.version, &held), "the engine holds a mixture");
        }
    });
}

/// In order, and never two at once.
pub fn order<L: LinkUnderTest, E: LoaderUnderTest>(link: &L, engine: &E) {
    let mut world = World::new(link, ordinary());
    let receiver = world.receiver("engine");
    let inside = Arc::new(AtomicUsize::new(0));
    let seen: Arc<Mutex<Vec<Identity>>> = Arc::default();
    let (counter, log, mut inner) = (Arc::clone(&inside), Arc::clone(&seen), engine.loader());
    let loader = move |weights: &Weights<'_>| -> Result<(), BoxError> {
        assert_eq!(counter.fetch_add(1, Ordering::SeqCst), 0, "two loads at once");
        log.lock().push(weights.identity().clone());
        let result = inner.load(weights);
        counter.fetch_sub(1, Ordering::SeqCst);
        result
    };
    let mut feed = Feed::new(receiver, loader);
    while_publishing(&mut world, |_| {
        for _ in 0..6 {
            let loaded = feed.step(&soon()).unwrap();
            assert_eq!(feed.engine(), Some(&loaded.known));
        }
    });
    let seen = seen.lock();
    assert!(seen.len() == 6 && seen.is_sorted_by(|a, b| a < b), "{seen:?}");
}

/// Every name, by itself and in chunks.
pub fn names<L: LinkUnderTest, E: LoaderUnderTest>(link: &L, engine: &E) {
    let mut world = World::new(link, ordinary());
    let receiver = world.receiver("engine");
    let known = world.publish();
    let mut inner = engine.loader();
    let expected = known.clone();
    let loader = move |weights: &Weights<'_>| -> Result<(), BoxError> {
        assert_eq!((weights.identity(), weights.digest()), (&expected.identity, expected.digest));
        let names: Vec<_> = weights.tensors().map(|t| t.name).collect();
        assert!(names.len() == 7 && names.contains(&"lm_head.weight"), "{names:?}");
        let (tied, embed) = (weights.tensor("lm_head.weight"), weights.tensor("model.embed.weight"));
        let (tied, embed) = (tied.unwrap(), embed.unwrap());
        assert!(tied.bytes.as_ptr() == embed.bytes.as_ptr() && tied.shape == [301, 997]);
        assert!(weights.tensor("no.such").is_none() && weights.changed("flag").is_none());
        let chunks = weights.chunks(ChunkConfig { group_by_module: true, batch_threshold_bytes: None })?;
        let bytes: u64 = chunks.iter().map(windlass_core::chunk::WeightChunk::total_size_bytes).sum();
        assert_eq!(bytes, weights.manifest().data_bytes());
        inner.load(weights)
    };
    let loaded = Feed::new(receiver, loader).step(&soon()).unwrap();
    assert_eq!((loaded.known, loaded.changed), (known, None));
    check_engine(&world, engine);
}

/// A load that fails, before or after the engine wrote anything.
pub fn failing<L: LinkUnderTest, E: LoaderUnderTest>(link: &L, engine: &E) {
    let mut world = World::new(link, ordinary());
    let receiver = world.receiver("engine");
    let fault: Arc<Mutex<Option<bool>>> = Arc::default();
    let (due, mut inner) = (Arc::clone(&fault), engine.loader());
    let sure: Arc<Mutex<Vec<bool>>> = Arc::default();
    let told = Arc::clone(&sure);
    let loader = move |weights: &Weights<'_>| -> Result<(), BoxError> {
        told.lock().push(weights.changed("flag").is_some());
        let fault = due.lock().take();
        if fault == Some(false) {
            return Err("refused before anything was written".into());
        }
        inner.load(weights)?;
        if fault == Some(true) { Err("failed after everything was written".into()) } else { Ok(()) }
    };
    let mut feed = Feed::new(receiver, loader);
    let first = world.publish();
    feed.step(&soon()).unwrap();
    for late in [false, true] {
        let before = feed.engine().cloned();
        world.change(100);
        let next = world.publish();
        *fault.lock() = Some(late);
        let error = feed.step(&soon()).unwrap_err();
        let RoleError::Load { identity, still, .. } = &error else { panic!("{error}") };
        assert_eq!(**identity, next.identity);
        assert_eq!(still.as_deref(), before.as_ref().map(|k| &k.identity));
        assert_eq!((feed.engine(), feed.failures()), (before.as_ref(), 1));
        assert_eq!(feed.image().as_ref(), Some(&next), "the receiver has it all the same");
        let again = feed.step(&soon()).unwrap();
        assert_eq!((&again.known, again.changed), (&next, None));
        assert_eq!((feed.engine(), feed.failures()), (Some(&next), 0));
        check_engine(&world, engine);
    }
    assert!(feed.engine() != Some(&first));
    // The first load knows nothing; then one that fails knows, and the one after it does not.
    assert_eq!(*sure.lock(), [false, true, false, true, false]);
}

/// What changed is known, and loading only that gives the same engine.
pub fn partial<L: LinkUnderTest, E: LoaderUnderTest>(link: &L, engine: &E) {
    let mut world = World::new(link, ordinary());
    let receiver = world.receiver("engine");
    world.publish();
    let mut feed = Feed::new(receiver, engine.loader());
    feed.step(&soon()).unwrap();
    for name in ["flag", "model.norm.weight", "model.embed.weight"] {
        let bytes = world.weights.get_mut(name).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        world.publish();
        let loaded = feed.step(&soon()).unwrap();
        assert_eq!(loaded.changed, Some(1), "{name}");
        check_engine(&world, engine);
    }
}

/// Every case as a test, for one [`LoaderUnderTest`] at the end of one [`LinkUnderTest`].
#[macro_export]
macro_rules! loader_conformance {
    ($module:ident, $link:expr, $engine:expr) => {
        mod $module {
            use $crate::conformance::loaders;
            #[test]
            fn a_loader_gets_whole_versions_only() {
                loaders::whole(&$link, &$engine);
            }
            #[test]
            fn versions_are_loaded_in_order_and_one_at_a_time() {
                loaders::order(&$link, &$engine);
            }
            #[test]
            fn a_loader_sees_every_tensor_and_alias() {
                loaders::names(&$link, &$engine);
            }
            #[test]
            fn a_failed_load_leaves_the_old_version_and_is_tried_again() {
                loaders::failing(&$link, &$engine);
            }
            #[test]
            fn an_engine_that_loads_only_what_changed_holds_the_same_bytes() {
                loaders::partial(&$link, &$engine);
            }
        }
    };
}
