//! Whatever the facts and overrides are.

use proptest::prelude::{Just, ProptestConfig, any, prop_assert, prop_assert_eq, proptest};
use proptest::strategy::Strategy as Generator;

use super::*;

fn any_of<T: Copy + fmt::Debug + 'static>(all: &'static [T]) -> impl Generator<Value = T> {
    proptest::sample::select(all)
}

fn some_bytes() -> impl Generator<Value = Option<u64>> {
    proptest::option::weighted(0.4, any_of(&[0, 1 << 20, 16 << 30, u64::MAX]))
}

fn any_cuda() -> impl Generator<Value = Cuda> {
    fn seldom<T: Copy + fmt::Debug + 'static>(all: &'static [T]) -> impl Generator<Value = Option<T>> {
        proptest::option::weighted(0.3, any_of(all))
    }
    let versions = (seldom(&[(11, 8), (12, 0), (13, 0)]), seldom(&[(7, 5), (8, 0), (9, 0)]));
    let export = (seldom(&[true, false]), seldom(&[true, false]), seldom(&[true, false]));
    let namespaces = (seldom(&["ipc:[1]", "ipc:[2]"]), seldom(&["pid:[1]", "pid:[2]"]));
    let unusable = proptest::option::weighted(0.1, Just("no CUDA driver was found".to_owned()));
    (unusable, versions, some_bytes(), export, namespaces).prop_map(
        |(unusable, (driver, capability), free_bytes, export, (ipc, pid))| Cuda {
            unusable,
            driver,
            capability,
            free_bytes,
            expandable_segments: export.0,
            exports_handles: export.1,
            exports_descriptors: export.2,
            ipc_namespace: ipc.map(Into::into),
            pid_namespace: pid.map(Into::into),
        },
    )
}

fn any_facts() -> impl Generator<Value = Facts> {
    let uuids = || proptest::collection::vec(proptest::sample::select(gpus(&["0", "1", "2"])), 0..3);
    let url =
        proptest::option::of(proptest::sample::select(vec!["s3://b/x".to_owned(), "/mnt/x".to_owned()]));
    let who = (
        any_of(Placement::ALL),
        any_of(&[Backend::Nccl, Backend::Gloo]),
        uuids(),
        uuids(),
        proptest::collection::vec(any_of(Engine::ALL), 0..3),
    );
    let numbers = (
        proptest::option::of(any::<u64>()),
        proptest::option::of(0u64..2_000_000_000),
        proptest::option::of(0.0..=1.0f64),
        proptest::option::of(1u16..3),
    );
    let flags = any::<[bool; 9]>();
    let cuda = (any_cuda(), any_cuda(), proptest::option::of(any::<bool>()), some_bytes(), some_bytes());
    let lora_path = proptest::option::of(Just("/mnt/adapters".to_owned()));
    (who, numbers, flags, url, lora_path, cuda).prop_map(
        |(who, numbers, flags, store_url, lora_sync_path, cuda)| {
            let [elastic, cross_region, nixl_library, rdma_device, lora, delta, context, fits, several_hosts] =
                flags;
            Facts {
                placement: who.0,
                several_hosts,
                backend: who.1,
                trainer_gpus: who.2,
                engine_gpus: who.3,
                engines: who.4,
                elastic,
                cross_region,
                store_url,
                nixl_library,
                rdma_device,
                lora,
                lora_sync_path,
                model_bytes: numbers.0,
                link_bytes_per_second: numbers.1,
                change_rate: numbers.2,
                peer: Peer { delta, context, codec_version: numbers.3 },
                codec_version: 1,
                gpu_baseline_fits: fits,
                trainer_cuda: cuda.0,
                engine_cuda: cuda.1,
                peer_access: cuda.2,
                baseline_bytes: cuda.3,
                arena_bytes: cuda.4,
            }
        },
    )
}

fn any_overrides() -> impl Generator<Value = Overrides> {
    // Mostly unset, so that many combinations have an answer.
    fn seldom<T: Copy + fmt::Debug + 'static>(all: &'static [T]) -> impl Generator<Value = Option<T>> {
        proptest::option::weighted(0.2, any_of(all))
    }
    (
        seldom(&[Backend::Nccl, Backend::Gloo]),
        seldom(&[true, false]),
        seldom(&[true, false]),
        seldom(Strategy::ALL),
        seldom(Link::ALL),
        seldom(Codec::ALL),
        seldom(Encoder::ALL),
        seldom(Offload::ALL),
        any::<bool>(),
    )
        .prop_map(
            |(
                weight_sync_backend,
                pack_weights,
                use_cuda_ipc,
                strategy,
                link,
                codec,
                encoder,
                offload_mode,
                strict,
            )| {
                Overrides {
                    weight_sync_backend,
                    pack_weights,
                    use_cuda_ipc,
                    strategy,
                    link,
                    codec,
                    encoder,
                    offload_mode,
                    strict,
                }
            },
        )
}

fn assert_usable(cuda: &Cuda) {
    assert!(cuda.unusable.is_none());
    assert!(cuda.driver.is_none_or(|v| v >= (12, 0)) && cuda.capability.is_none_or(|v| v >= (8, 0)));
}

/// Written without looking at the rules: what nature forbids.
fn assert_possible(f: &Facts, o: &Overrides, c: &Choice) {
    use Strategy as S;
    let backend = o.weight_sync_backend.unwrap_or(f.backend);
    let shared = f.engine_gpus.iter().filter(|u| f.trainer_gpus.contains(u)).count();
    match c.link {
        Link::CudaIpc => {
            assert_eq!(f.placement, Placement::SameGpu);
            assert!(shared > 0 && shared == f.engine_gpus.len());
            assert!(!f.engines.contains(&Engine::Http));
            for cuda in [&f.trainer_cuda, &f.engine_cuda] {
                assert_usable(cuda);
            }
            let same = |a: &Option<String>, b: &Option<String>| a.is_none() || b.is_none() || a == b;
            assert!(same(&f.trainer_cuda.ipc_namespace, &f.engine_cuda.ipc_namespace));
            assert!(same(&f.trainer_cuda.pid_namespace, &f.engine_cuda.pid_namespace));
            assert_ne!(f.trainer_cuda.exports_handles, Some(false));
            assert!(matches!(c.strategy, S::CudaIpc | S::PackedCudaIpc));
        }
        Link::Shm => {
            assert!(f.placement != Placement::Remote && !f.several_hosts);
            assert!(matches!(c.strategy, S::Tcp | S::Lora));
        }
        Link::Tcp => assert!(matches!(c.strategy, S::Tcp | S::Lora)),
        Link::Collective => {
            assert_eq!(c.strategy, S::Broadcast);
            assert!(!f.elastic);
            let nccl_works = !f.trainer_gpus.is_empty() && !f.engine_gpus.is_empty() && shared == 0;
            assert!(backend == Backend::Gloo || nccl_works);
        }
        Link::Nixl => assert!(c.strategy == S::Nixl && f.nixl_library),
        Link::Store => {
            assert_eq!(c.strategy, S::Store);
            assert!(f.store_url.as_ref().unwrap().contains("://"));
        }
        Link::File => match c.strategy {
            S::Store => assert!(f.store_url.as_ref().unwrap().starts_with('/')),
            S::Lora => assert!(f.lora_sync_path.is_some()),
            other => panic!("{other} over files"),
        },
    }
    match c.codec {
        Codec::Full => assert_eq!(c.encoder, None),
        Codec::DeltaPlain | Codec::DeltaContext => {
            assert!(matches!(c.strategy, S::Tcp | S::Store | S::Nixl));
            assert!(f.peer.delta && f.peer.codec_version.is_none_or(|v| v == f.codec_version));
            assert!(c.codec == Codec::DeltaPlain || f.peer.context);
            assert!(c.encoder.is_some());
        }
    }
    if c.encoder == Some(Encoder::Gpu) {
        assert_eq!(c.codec, Codec::DeltaPlain);
        assert_eq!(c.offload, Some(Offload::Delta));
    }
    if c.offload == Some(Offload::Delta) {
        assert!(!f.trainer_gpus.is_empty());
        assert_usable(&f.trainer_cuda);
        match (f.baseline_bytes, f.trainer_cuda.free_bytes) {
            // Records are on the GPU in any case.
            (Some(weights), Some(free)) => assert!(weights / 64 <= free),
            _ => assert!(f.gpu_baseline_fits),
        }
    }
    assert_eq!(c.offload.is_some(), matches!(c.strategy, S::Tcp | S::Store | S::Nixl));
    assert!(c.strategy != S::Lora || f.lora);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn choosing_is_deterministic_explained_and_possible(f in any_facts(), o in any_overrides()) {
        let result = choose(&f, &o);
        prop_assert_eq!(&choose(&f, &o), &result);
        match result {
            Ok(c) => {
                prop_assert!(!c.why.is_empty());
                assert_possible(&f, &o, &c);
                for &other in Strategy::ALL.iter().filter(|s| **s != c.strategy) {
                    let times = c.considered.iter().filter(|n| n.option == Subject::Strategy(other)).count();
                    prop_assert_eq!(times, 1, "{}", other);
                }
                prop_assert!(c.considered.iter().all(|n| !n.why_not.is_empty()));
                prop_assert!(!o.strict || c.considered.iter().all(|n| !n.blocked));
                // What was demanded is what was chosen.
                prop_assert!(o.strategy.is_none_or(|s| s == c.strategy));
                prop_assert!(o.link.is_none_or(|l| l == c.link));
                prop_assert!(o.codec.is_none_or(|v| v == c.codec));
                prop_assert!(o.encoder.is_none_or(|e| Some(e) == c.encoder));
                prop_assert!(o.offload_mode.is_none_or(|m| Some(m) == c.offload));
                if c.strategy != Strategy::Lora {
                    prop_assert!(o.use_cuda_ipc.is_none_or(|v| v == (c.link == Link::CudaIpc)));
                    prop_assert!(o.pack_weights != Some(true) || c.strategy == Strategy::PackedCudaIpc);
                    prop_assert!(o.pack_weights != Some(false) || c.strategy != Strategy::PackedCudaIpc);
                }
            }
            Err(e) => prop_assert!(!e.to_string().ends_with(": "), "{}", e),
        }
    }

    #[test]
    fn facts_alone_always_have_an_answer(f in any_facts()) {
        let lenient = choose(&f, &Overrides::default());
        prop_assert!(lenient.is_ok(), "{:?}", lenient);
        // Strict changes nothing but the refusal of fallbacks.
        match choose(&f, &Overrides { strict: true, ..Overrides::default() }) {
            Ok(c) => prop_assert_eq!(Ok(c), lenient),
            Err(e) => {
                let fallback = matches!(e, ChooseError::Fallback { .. });
                prop_assert!(fallback, "{}", e);
                prop_assert!(lenient.unwrap().considered.iter().any(|c| c.blocked));
            }
        }
    }
}
