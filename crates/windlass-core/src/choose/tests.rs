use proptest::prelude::{Just, ProptestConfig, any, prop_assert, prop_assert_eq, proptest};
use proptest::strategy::Strategy as Generator;
use serde_json::json;

use super::*;

fn gpus(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| format!("GPU-{n}")).collect()
}

/// Two engines on the trainers' own two GPUs.
fn colocated() -> Facts {
    Facts {
        placement: Placement::SameGpu,
        trainer_gpus: gpus(&["0", "1"]),
        engine_gpus: gpus(&["1", "0"]),
        engines: vec![Engine::Vllm, Engine::Vllm],
        ..Facts::default()
    }
}

/// Engines on another host with GPUs of their own.
fn remote() -> Facts {
    Facts {
        trainer_gpus: gpus(&["0"]),
        engine_gpus: gpus(&["7"]),
        engines: vec![Engine::Sglang],
        peer: Peer { delta: true, context: false, codec_version: Some(1) },
        ..Facts::default()
    }
}

fn elastic() -> Facts {
    Facts { elastic: true, ..remote() }
}

fn adapter() -> Facts {
    Facts { lora: true, ..remote() }
}

fn pick(facts: &Facts) -> Choice {
    choose(facts, &Overrides::default()).expect("facts alone always have an answer")
}

fn with(facts: &Facts, overrides: serde_json::Value) -> Result<Choice, ChooseError> {
    choose(facts, &serde_json::from_value(overrides).expect("good overrides"))
}

fn path(choice: &Choice) -> (Strategy, Link, Codec) {
    (choice.strategy, choice.link, choice.codec)
}

fn why_not(choice: &Choice, option: Subject) -> &Considered {
    choice.considered.iter().find(|c| c.option == option).unwrap_or_else(|| panic!("{option} in {choice}"))
}

/// The reason of an `Impossible`, after checking what it is about.
fn impossible(result: Result<Choice, ChooseError>, about: Subject) -> String {
    match result {
        Err(ChooseError::Impossible { option, why, .. }) => {
            assert_eq!(option, about);
            why
        }
        other => panic!("expected {about} to be impossible, got {other:?}"),
    }
}

#[test]
fn colocated_with_nccl_packs_over_ipc_by_default() {
    let choice = pick(&colocated());
    assert_eq!(path(&choice), (Strategy::PackedCudaIpc, Link::CudaIpc, Codec::Full));
    assert_eq!(choice.encoder, None);
    assert!(
        why_not(&choice, Subject::Strategy(Strategy::Broadcast)).why_not.contains("two ranks on one GPU")
    );
}

#[test]
fn pack_weights_false_gives_one_handle_per_parameter() {
    for key in ["pack_weights", "generator.pack_weights"] {
        let choice = with(&colocated(), json!({ key: false })).unwrap();
        assert_eq!(path(&choice), (Strategy::CudaIpc, Link::CudaIpc, Codec::Full));
    }
}

#[test]
fn a_fixed_remote_set_is_broadcast_to_over_nccl() {
    let choice = pick(&remote());
    assert_eq!(path(&choice), (Strategy::Broadcast, Link::Collective, Codec::Full));
    assert!(choice.why.contains("nccl group"), "{}", choice.why);
    let same_host = Facts { placement: Placement::SameHost, ..remote() };
    assert_eq!(pick(&same_host).strategy, Strategy::Broadcast);
}

#[test]
fn gloo_is_broadcast_even_when_colocated_and_without_gpus() {
    let choice = pick(&Facts { backend: Backend::Gloo, ..colocated() });
    assert_eq!(choice.strategy, Strategy::Broadcast);
    assert!(choice.why.contains("gloo group"), "{}", choice.why);
    assert!(why_not(&choice, Subject::Strategy(Strategy::PackedCudaIpc)).blocked);

    let choice = with(&colocated(), json!({"generator.weight_sync_backend": "gloo"})).unwrap();
    assert_eq!(choice.strategy, Strategy::Broadcast);
    assert!(!why_not(&choice, Subject::Strategy(Strategy::PackedCudaIpc)).blocked, "asked for, not missing");

    let cpu = Facts { backend: Backend::Gloo, placement: Placement::SameHost, ..Facts::default() };
    assert_eq!(pick(&cpu).strategy, Strategy::Broadcast);
}

#[test]
fn nccl_without_gpus_is_pulled_over_tcp() {
    for gpuless in [
        Facts { trainer_gpus: vec![], ..remote() },
        Facts { engine_gpus: vec![], ..remote() },
        Facts { placement: Placement::SameGpu, ..Facts::default() },
    ] {
        let choice = pick(&gpuless);
        assert_eq!(choice.strategy, Strategy::Tcp);
        let broadcast = why_not(&choice, Subject::Strategy(Strategy::Broadcast));
        assert!(broadcast.why_not.contains("nccl needs a GPU"), "{}", broadcast.why_not);
    }
}

#[test]
fn engines_that_come_and_go_pull_over_tcp_or_map_on_one_host() {
    let choice = pick(&elastic());
    assert_eq!(path(&choice), (Strategy::Tcp, Link::Tcp, Codec::DeltaPlain));
    assert!(why_not(&choice, Subject::Strategy(Strategy::Broadcast)).why_not.contains("cannot change"));

    let choice = pick(&Facts { placement: Placement::SameHost, ..elastic() });
    assert_eq!(path(&choice), (Strategy::Tcp, Link::Shm, Codec::DeltaPlain));
    assert!(choice.why.contains("map the trainer's memory"), "{}", choice.why);
}

#[test]
fn rdma_between_hosts_is_used_by_engines_that_come_and_go() {
    let rdma = Facts { nixl_library: true, rdma_device: true, ..elastic() };
    assert_eq!(path(&pick(&rdma)), (Strategy::Nixl, Link::Nixl, Codec::DeltaPlain));

    let nixl = Subject::Strategy(Strategy::Nixl);
    let no_library = pick(&Facts { nixl_library: false, ..rdma.clone() });
    assert_eq!(no_library.strategy, Strategy::Tcp);
    assert!(why_not(&no_library, nixl).blocked, "an RDMA device lies idle");
    for facts in [
        Facts { rdma_device: false, ..rdma.clone() },
        Facts { placement: Placement::SameHost, ..rdma.clone() },
        Facts { cross_region: true, ..rdma.clone() },
        Facts { rdma_device: false, nixl_library: false, ..rdma.clone() },
    ] {
        let choice = pick(&facts);
        assert_eq!(choice.strategy, Strategy::Tcp);
        assert!(!why_not(&choice, nixl).blocked);
    }
}

#[test]
fn another_region_reads_from_the_store_if_there_is_one() {
    let far = Facts { cross_region: true, store_url: Some("s3://bucket/run".into()), ..remote() };
    assert_eq!(path(&pick(&far)), (Strategy::Store, Link::Store, Codec::DeltaPlain));
    for local in ["/mnt/run", "file:///mnt/run"] {
        let far = Facts { store_url: Some(local.into()), ..far.clone() };
        assert_eq!(pick(&far).link, Link::File);
    }
    let no_store = pick(&Facts { store_url: None, ..far.clone() });
    assert_eq!(path(&no_store), (Strategy::Tcp, Link::Tcp, Codec::DeltaPlain));
    assert!(why_not(&no_store, Subject::Strategy(Strategy::Store)).blocked);
    let near = pick(&Facts { cross_region: false, ..far });
    assert_eq!(near.strategy, Strategy::Broadcast);
    assert!(!why_not(&near, Subject::Strategy(Strategy::Store)).blocked);
}

#[test]
fn adapters_do_not_send_the_base_weights_unless_a_strategy_is_named() {
    let shared = Facts { lora_sync_path: Some("/mnt/adapters".into()), ..adapter() };
    assert_eq!(path(&pick(&shared)), (Strategy::Lora, Link::File, Codec::Full));
    assert_eq!(path(&pick(&adapter())), (Strategy::Lora, Link::Tcp, Codec::Full));
    let near = Facts { placement: Placement::SameHost, ..adapter() };
    assert_eq!(path(&pick(&near)), (Strategy::Lora, Link::Shm, Codec::Full));

    // Settings for the whole model do not turn an adapter into one.
    for setting in [json!({"use_cuda_ipc": true}), json!({"pack_weights": true}), json!({"strict": true})] {
        let colocated = Facts { lora: true, ..colocated() };
        assert_eq!(with(&colocated, setting).unwrap().strategy, Strategy::Lora);
    }
    let why =
        impossible(with(&adapter(), json!({"codec": "delta_plain"})), Subject::Codec(Codec::DeltaPlain));
    assert!(why.contains("travels whole"), "{why}");
    impossible(with(&adapter(), json!({"link": "cuda_ipc"})), Subject::Link(Link::CudaIpc));
    impossible(with(&adapter(), json!({"link": "file"})), Subject::Link(Link::File));
}

#[test]
fn named_strategy_wins_over_the_rule_for_adapters() {
    assert_eq!(with(&adapter(), json!({"strategy": "tcp"})).unwrap().strategy, Strategy::Tcp);
}

#[test]
fn ipc_to_an_engine_that_cannot_open_the_handle_says_why() {
    let packed = Subject::Strategy(Strategy::PackedCudaIpc);
    let stranger = Facts { engine_gpus: gpus(&["1", "9"]), ..colocated() };
    let cases = [
        (remote(), "another host"),
        (Facts { placement: Placement::SameHost, ..remote() }, "colocate them"),
        (Facts { trainer_gpus: vec![], ..colocated() }, "no GPU was found at the trainers"),
        (Facts { engine_gpus: vec![], ..colocated() }, "no GPU was found at the engines"),
        (stranger, "GPU-9"),
        (Facts { engines: vec![Engine::Vllm, Engine::Http], ..colocated() }, "HTTP only"),
    ];
    for (facts, reason) in cases {
        let demands = [
            json!({"use_cuda_ipc": true}),
            json!({"pack_weights": true}),
            json!({"strategy": "packed_cuda_ipc"}),
        ];
        for demand in demands {
            let why = impossible(with(&facts, demand), packed);
            assert!(why.contains(reason), "{why}");
        }
        assert!(!pick(&facts).strategy.is_ipc());
    }
    let error = with(&remote(), json!({"strategy": "cuda_ipc"})).unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported);
    assert_eq!(
        error.to_string(),
        "strategy cuda_ipc was demanded by strategy = cuda_ipc, but cannot work here: cuda_ipc: the engines \
         run on another host, and IPC handles open only on their own GPU"
    );
}

#[test]
fn other_overrides_that_cannot_work_say_why() {
    let strategy = |name: &str| json!({ "strategy": name });
    let cases = [
        (remote(), strategy("nixl"), Subject::Strategy(Strategy::Nixl), "install the nixl package"),
        (remote(), strategy("store"), Subject::Strategy(Strategy::Store), "store_url"),
        (remote(), strategy("lora"), Subject::Strategy(Strategy::Lora), "no adapter is trained"),
        (
            elastic(),
            strategy("broadcast"),
            Subject::Strategy(Strategy::Broadcast),
            "cannot change its members",
        ),
        (colocated(), strategy("broadcast"), Subject::Strategy(Strategy::Broadcast), "two ranks on one GPU"),
        (remote(), json!({"link": "shm"}), Subject::Link(Link::Shm), "another host"),
        (remote(), json!({"link": "file"}), Subject::Link(Link::File), "store: no store_url"),
    ];
    for (facts, demand, about, reason) in cases {
        let why = impossible(with(&facts, demand), about);
        assert!(why.contains(reason), "{why}");
    }
    let bucket = Facts { store_url: Some("s3://b".into()), ..remote() };
    let path = Facts { store_url: Some("/mnt/x".into()), ..remote() };
    let store = |link: &str| json!({"strategy": "store", "link": link});
    assert!(impossible(with(&bucket, store("file")), Subject::Link(Link::File)).contains("use link = store"));
    assert!(impossible(with(&path, store("store")), Subject::Link(Link::Store)).contains("use link = file"));
}

#[test]
fn overrides_that_exclude_each_other_are_named() {
    for demand in [
        json!({"use_cuda_ipc": false, "pack_weights": true}),
        json!({"strategy": "packed_cuda_ipc", "use_cuda_ipc": false}),
        json!({"strategy": "packed_cuda_ipc", "pack_weights": false}),
        json!({"strategy": "broadcast", "codec": "delta_plain"}),
        json!({"strategy": "broadcast", "encoder": "gpu"}),
        json!({"strategy": "tcp", "link": "nixl"}),
    ] {
        let error = with(&colocated(), demand.clone()).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(matches!(error, ChooseError::Contradiction { .. }), "{error}");
        for key in demand.as_object().unwrap().keys() {
            assert!(error.to_string().contains(key), "{error}");
        }
    }
}

#[test]
fn every_override_wins_where_it_can() {
    let rich = Facts {
        nixl_library: true,
        store_url: Some("gs://b".into()),
        peer: Peer { delta: true, context: true, codec_version: None },
        gpu_baseline_fits: true,
        ..remote()
    };
    let cases = [
        (json!({"strategy": "tcp"}), (Strategy::Tcp, Link::Tcp, Codec::DeltaPlain)),
        (json!({"strategy": "nixl"}), (Strategy::Nixl, Link::Nixl, Codec::DeltaPlain)),
        (json!({"strategy": "store"}), (Strategy::Store, Link::Store, Codec::DeltaPlain)),
        (json!({"link": "nixl"}), (Strategy::Nixl, Link::Nixl, Codec::DeltaPlain)),
        (json!({"link": "store"}), (Strategy::Store, Link::Store, Codec::DeltaPlain)),
        (json!({"link": "tcp", "codec": "full"}), (Strategy::Tcp, Link::Tcp, Codec::Full)),
        (json!({"codec": "delta_context"}), (Strategy::Tcp, Link::Tcp, Codec::DeltaContext)),
        (json!({"codec": "full"}), (Strategy::Broadcast, Link::Collective, Codec::Full)),
        (json!({"encoder": "host"}), (Strategy::Tcp, Link::Tcp, Codec::DeltaPlain)),
    ];
    for (demand, expected) in cases {
        let choice = with(&rich, demand.clone()).unwrap();
        assert_eq!(path(&choice), expected, "{demand}");
        assert!(choice.why.contains("configured"), "{}", choice.why);
    }
    let local = Facts { placement: Placement::SameHost, ..rich };
    assert_eq!(with(&local, json!({"link": "tcp"})).unwrap().link, Link::Tcp);
    // IPC uses no update group, so a demand for it stands above the backend.
    let demand = json!({"weight_sync_backend": "gloo", "use_cuda_ipc": true});
    assert_eq!(with(&colocated(), demand).unwrap().strategy, Strategy::PackedCudaIpc);
    // Without IPC, colocated engines map the trainer's memory.
    let choice = with(&colocated(), json!({"use_cuda_ipc": false})).unwrap();
    assert_eq!((choice.strategy, choice.link), (Strategy::Tcp, Link::Shm));
}

#[test]
fn deltas_need_a_peer_that_decodes_them_and_few_changes() {
    let codec = |facts: &Facts| pick(facts).codec;
    let peer = |peer: Peer| Facts { peer, ..elastic() };
    assert_eq!(codec(&peer(Peer { delta: false, ..elastic().peer })), Codec::Full);
    assert_eq!(codec(&peer(Peer { codec_version: Some(2), ..elastic().peer })), Codec::Full);
    assert_eq!(codec(&peer(Peer { codec_version: None, ..elastic().peer })), Codec::DeltaPlain);
    assert_eq!(codec(&Facts { change_rate: Some(0.49), ..elastic() }), Codec::DeltaPlain);
    assert_eq!(codec(&Facts { change_rate: Some(0.5), ..elastic() }), Codec::Full);

    let old = peer(Peer { codec_version: Some(2), context: true, delta: true });
    let plain = Subject::Codec(Codec::DeltaPlain);
    let why = impossible(with(&old, json!({"codec": "delta_plain"})), plain);
    assert!(why.contains("version 2"), "{why}");
    let why = impossible(with(&peer(Peer::default()), json!({"codec": "delta_plain"})), plain);
    assert!(why.contains("does not decode deltas"), "{why}");
    let why =
        impossible(with(&elastic(), json!({"codec": "delta_context"})), Subject::Codec(Codec::DeltaContext));
    assert!(why.contains("did not register"), "{why}");
}

#[test]
fn context_mode_is_taken_only_where_the_link_is_slower_than_a_pass() {
    let slow = Facts {
        link_bytes_per_second: Some(10_000_000),
        change_rate: Some(0.015),
        peer: Peer { delta: true, context: true, codec_version: Some(1) },
        ..elastic()
    };
    assert_eq!(pick(&slow).codec, Codec::DeltaContext);
    let fast = Facts { link_bytes_per_second: Some(1_000_000_000), ..slow.clone() };
    assert_eq!(pick(&fast).codec, Codec::DeltaPlain);
    let unknown = Facts { link_bytes_per_second: None, ..slow.clone() };
    assert_eq!(pick(&unknown).codec, Codec::DeltaPlain);
    let mapped = Facts { placement: Placement::SameHost, ..slow.clone() };
    assert_eq!(path(&pick(&mapped)), (Strategy::Tcp, Link::Shm, Codec::DeltaPlain));
    let unregistered = pick(&Facts { peer: elastic().peer, ..slow });
    assert_eq!(unregistered.codec, Codec::DeltaPlain);
    assert!(why_not(&unregistered, Subject::Codec(Codec::DeltaContext)).blocked);
}

#[test]
fn the_gpu_finds_changes_if_a_baseline_fits() {
    let fits = Facts { gpu_baseline_fits: true, ..elastic() };
    assert_eq!(pick(&fits).encoder, Some(Encoder::Gpu));
    assert_eq!(with(&fits, json!({"encoder": "host"})).unwrap().encoder, Some(Encoder::Host));
    assert_eq!(with(&fits, json!({"encoder": "gpu"})).unwrap().encoder, Some(Encoder::Gpu));
    let gpu = Subject::Encoder(Encoder::Gpu);
    for (facts, reason) in [
        (elastic(), "no room"),
        (Facts { trainer_gpus: vec![], gpu_baseline_fits: true, ..elastic() }, "no GPU"),
    ] {
        assert_eq!(pick(&facts).encoder, Some(Encoder::Host));
        assert!(impossible(with(&facts, json!({"encoder": "gpu"})), gpu).contains(reason));
    }
    let why = impossible(with(&fits, json!({"encoder": "gpu", "codec": "full"})), gpu);
    assert!(why.contains("nothing is encoded"), "{why}");
}

/// A GPU with 40 GB free, and 16 GB of weights on each rank.
fn roomy() -> Facts {
    let trainer_cuda = Cuda {
        driver: Some((12, 8)),
        capability: Some((9, 0)),
        free_bytes: Some(40_000_000_000),
        ..Cuda::default()
    };
    Facts { trainer_cuda, baseline_bytes: Some(16_000_000_000), ..elastic() }
}

#[test]
fn disaggregated_trainers_offload_by_delta_where_the_baseline_fits() {
    let choice = pick(&roomy());
    assert_eq!(path(&choice), (Strategy::Tcp, Link::Tcp, Codec::DeltaPlain));
    assert_eq!((choice.encoder, choice.offload), (Some(Encoder::Gpu), Some(Offload::Delta)));
    assert!(choice.why.contains("a baseline of 17.0 GB in 40.0 GB of free GPU memory"), "{}", choice.why);

    // Room for the weights and not for the records beside them.
    let cramped = Facts { baseline_bytes: Some(39_000_000_000), ..roomy() };
    let choice = pick(&cramped);
    assert_eq!((choice.encoder, choice.offload), (Some(Encoder::Host), Some(Offload::Copy)));
    let gpu = why_not(&choice, Subject::Encoder(Encoder::Gpu));
    assert!(gpu.blocked && gpu.why_not.contains("needs 41.4 GB"), "{}", gpu.why_not);
    assert!(choice.why.contains("found on the host: the trainers' GPUs have no room"), "{}", choice.why);
    let why = impossible(with(&cramped, json!({"offload_mode": "delta"})), Subject::Offload(Offload::Delta));
    assert!(why.contains("40.0 GB are free"), "{why}");
    // What is known in bytes counts more than somebody's word.
    assert_eq!(pick(&Facts { gpu_baseline_fits: true, ..cramped }).offload, Some(Offload::Copy));
}

#[test]
fn a_baseline_takes_at_most_half_of_what_is_free_unless_it_is_demanded() {
    let most = Facts { baseline_bytes: Some(20_000_000_000), ..roomy() };
    let choice = pick(&most);
    assert_eq!(choice.offload, Some(Offload::Copy));
    let gpu = why_not(&choice, Subject::Encoder(Encoder::Gpu));
    assert!(!gpu.blocked && gpu.why_not.contains("more than half of the 40.0 GB"), "{}", gpu.why_not);
    assert_eq!(with(&most, json!({"strict": true})).unwrap().offload, Some(Offload::Copy));
    assert_eq!(with(&most, json!({"offload_mode": "delta"})).unwrap().offload, Some(Offload::Delta));
}

#[test]
fn a_driver_that_is_missing_at_the_trainers_is_a_fallback() {
    let why = "no CUDA driver was found (libcuda.so.1)";
    let trainer_cuda = Cuda { unusable: Some(why.into()), ..Cuda::default() };
    let without = Facts { trainer_gpus: vec![], trainer_cuda, ..elastic() };
    let choice = pick(&without);
    let gpu = why_not(&choice, Subject::Encoder(Encoder::Gpu));
    assert!(gpu.blocked && gpu.why_not.contains(why), "{}", gpu.why_not);
    let error = with(&without, json!({"strict": true})).unwrap_err().to_string();
    assert!(error.contains(why) && error.contains("encoder = host"), "{error}");
    // Whoever has none says so.
    assert!(with(&without, json!({"strict": true, "encoder": "host"})).is_ok());
    let ipc = Facts { trainer_gpus: vec![], trainer_cuda: without.trainer_cuda, ..colocated() };
    let demanded = with(&ipc, json!({"use_cuda_ipc": true}));
    assert!(impossible(demanded, Subject::Strategy(Strategy::PackedCudaIpc)).contains(why));
}

#[test]
fn engines_on_the_trainers_gpus_of_several_hosts_share_memory_on_each() {
    let several = Facts { several_hosts: true, ..colocated() };
    assert_eq!(pick(&several).strategy, Strategy::PackedCudaIpc);
    // An image comes from all hosts.
    let tcp = json!({"strategy": "tcp"});
    assert_eq!(with(&several, tcp.clone()).unwrap().link, Link::Tcp);
    assert_eq!(with(&colocated(), tcp).unwrap().link, Link::Shm);
    // Some of the engines elsewhere.
    let partly = Facts { placement: Placement::SameHost, engine_gpus: gpus(&["0", "9"]), ..colocated() };
    let choice = pick(&partly);
    let packed = why_not(&choice, Subject::Strategy(Strategy::PackedCudaIpc));
    assert!(packed.why_not.contains("only 1 of the engines' 2 GPUs"), "{}", packed.why_not);
}

#[test]
fn how_to_offload_can_be_demanded() {
    let offload = |facts: &Facts, mode: &str| with(facts, json!({ "offload_mode": mode })).map(|c| c.offload);
    assert_eq!(offload(&roomy(), "copy"), Ok(Some(Offload::Copy)));
    assert_eq!(offload(&roomy(), "delta"), Ok(Some(Offload::Delta)));
    assert_eq!(offload(&roomy(), "auto"), Ok(Some(Offload::Delta)));
    // It takes a strategy that publishes an image.
    let fixed = Facts { elastic: false, ..roomy() };
    assert_eq!(pick(&fixed).strategy, Strategy::Broadcast);
    assert_eq!(with(&fixed, json!({"offload_mode": "delta"})).unwrap().strategy, Strategy::Tcp);
    // Whole tensors may be wanted, and only what changed may still leave the GPU.
    let full = with(&roomy(), json!({"offload_mode": "delta", "codec": "full"})).unwrap();
    assert_eq!((full.codec, full.encoder, full.offload), (Codec::Full, None, Some(Offload::Delta)));
    for demand in [
        json!({"offload_mode": "delta", "encoder": "host"}),
        json!({"offload_mode": "copy", "encoder": "gpu"}),
        json!({"offload_mode": "copy", "strategy": "broadcast"}),
    ] {
        let error = with(&roomy(), demand).unwrap_err();
        assert!(
            matches!(&error, ChooseError::Contradiction { by } if by.contains("offload_mode")),
            "{error}"
        );
    }
    let lora = with(&adapter(), json!({"offload_mode": "copy"}));
    assert!(impossible(lora, Subject::Offload(Offload::Copy)).contains("adapter"));
    let error = serde_json::from_value::<Overrides>(json!({"offload_mode": "fast"})).unwrap_err().to_string();
    assert!(error.contains("fast") && error.contains("auto"), "{error}");
}

#[test]
fn context_records_are_made_on_the_host() {
    let slow = Facts {
        link_bytes_per_second: Some(10_000_000),
        peer: Peer { delta: true, context: true, codec_version: Some(1) },
        ..roomy()
    };
    let choice = pick(&slow);
    assert_eq!((choice.codec, choice.offload), (Codec::DeltaContext, Some(Offload::Copy)));
    let choice = with(&slow, json!({"offload_mode": "delta"})).unwrap();
    assert_eq!((choice.codec, choice.offload), (Codec::DeltaPlain, Some(Offload::Delta)));
    let both = json!({"encoder": "gpu", "codec": "delta_context"});
    assert!(impossible(with(&slow, both), Subject::Encoder(Encoder::Gpu)).contains("plain records"));
}

#[test]
fn a_baseline_is_not_kept_on_gpus_that_engines_need_unless_demanded() {
    let shared = Facts {
        placement: Placement::SameGpu,
        engine_gpus: roomy().trainer_gpus,
        gpu_baseline_fits: true,
        ..roomy()
    };
    let tcp = with(&shared, json!({"strategy": "tcp"})).unwrap();
    assert_eq!((tcp.link, tcp.offload), (Link::Shm, Some(Offload::Copy)));
    let gpu = why_not(&tcp, Subject::Encoder(Encoder::Gpu));
    assert!(!gpu.blocked && gpu.why_not.contains("share the trainers' GPUs"), "{}", gpu.why_not);
    let demanded = with(&shared, json!({"strategy": "tcp", "offload_mode": "delta"})).unwrap();
    assert_eq!(demanded.offload, Some(Offload::Delta));
}

/// Facts about CUDA that forbid something, where everything else is there: facts, what is lost, why.
fn cuda_troubles() -> Vec<(Facts, Subject, &'static str)> {
    let trainer = |facts: Facts, cuda: Cuda| Facts { trainer_cuda: cuda, ..facts };
    let engine = |facts: Facts, cuda: Cuda| Facts { engine_cuda: cuda, ..facts };
    let (packed, gpu) = (Subject::Strategy(Strategy::PackedCudaIpc), Subject::Encoder(Encoder::Gpu));
    let no_driver = || Cuda { unusable: Some("no CUDA driver was found".into()), ..Cuda::default() };
    let old_driver = || Cuda { driver: Some((11, 8)), ..Cuda::default() };
    let old_gpu = || Cuda { capability: Some((7, 5)), ..Cuda::default() };
    let no_handles = || Cuda { exports_handles: Some(false), ..Cuda::default() };
    let within = |ipc: &str, pid: &str| Cuda {
        ipc_namespace: Some(ipc.into()),
        pid_namespace: Some(pid.into()),
        ..Cuda::default()
    };
    let apart = |ipc, pid| trainer(engine(colocated(), within("ipc:[1]", "pid:[1]")), within(ipc, pid));
    let little = Cuda { free_bytes: Some(1_000_000_000), ..Cuda::default() };
    let arena = Facts { arena_bytes: Some(2 << 30), ..trainer(colocated(), little) };
    let fits = || Facts { gpu_baseline_fits: true, ..elastic() };
    vec![
        (trainer(colocated(), no_driver()), packed, "at the trainers: no CUDA driver was found"),
        (engine(colocated(), no_driver()), packed, "at the engines: no CUDA driver was found"),
        (trainer(colocated(), old_driver()), packed, "supports CUDA 11.8 and at least 12.0"),
        (engine(colocated(), old_gpu()), packed, "compute capability 7.5"),
        (trainer(colocated(), no_handles()), packed, "exports no memory"),
        (apart("ipc:[2]", "pid:[1]"), packed, "--ipc"),
        (apart("ipc:[1]", "pid:[2]"), packed, "--pid"),
        (arena, packed, "needs 2147 MB of GPU memory, and 1000 MB are free"),
        (trainer(fits(), no_driver()), gpu, "at the trainers: no CUDA driver was found"),
        (trainer(fits(), old_driver()), gpu, "install a newer one"),
        (trainer(fits(), old_gpu()), gpu, "Ampere"),
    ]
}

#[test]
fn what_cuda_lacks_is_named_and_strict_makes_it_an_error() {
    for (facts, lost, reason) in cuda_troubles() {
        let choice = pick(&facts);
        let not = why_not(&choice, lost);
        assert!(not.blocked && not.why_not.contains(reason), "{lost}: {}", not.why_not);
        let error = with(&facts, json!({"strict": true})).unwrap_err();
        assert!(matches!(&error, ChooseError::Fallback { faster, .. } if *faster == lost), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        let demand = match lost {
            Subject::Encoder(_) => json!({"encoder": "gpu"}),
            _ => json!({"strategy": "packed_cuda_ipc"}),
        };
        assert!(impossible(with(&facts, demand), lost).contains(reason));
    }
    // What nobody looked at, and what is the same on both sides, is held against nobody.
    let same = Cuda { ipc_namespace: Some("ipc:[9]".into()), ..Cuda::default() };
    let known = Facts { trainer_cuda: same.clone(), engine_cuda: same, ..colocated() };
    assert_eq!(pick(&known).strategy, Strategy::PackedCudaIpc);
}

#[test]
fn without_room_for_an_arena_each_parameter_has_a_handle() {
    let little = Cuda { free_bytes: Some(1 << 20), ..Cuda::default() };
    let facts = Facts { trainer_cuda: little, arena_bytes: Some(2 << 30), ..colocated() };
    let choice = pick(&facts);
    assert_eq!(path(&choice), (Strategy::CudaIpc, Link::CudaIpc, Codec::Full));
    assert!(why_not(&choice, Subject::Strategy(Strategy::PackedCudaIpc)).why_not.contains("smaller"));
}

#[test]
fn expandable_segments_concern_single_handles_only() {
    let expandable = |descriptors| {
        let cuda = Cuda {
            expandable_segments: Some(true),
            exports_descriptors: descriptors,
            exports_handles: Some(true),
            ..Cuda::default()
        };
        Facts { trainer_cuda: cuda, ..colocated() }
    };
    let packed = pick(&expandable(Some(false)));
    assert_eq!(packed.strategy, Strategy::PackedCudaIpc);
    assert!(packed.why.contains("expandable segments of torch do not matter"), "{}", packed.why);
    let single = json!({"pack_weights": false, "use_cuda_ipc": true});
    let choice = with(&expandable(Some(true)), single.clone()).unwrap();
    assert_eq!(choice.strategy, Strategy::CudaIpc);
    assert!(choice.why.contains("GPU-1 and 1 more") && choice.why.contains("descriptors"), "{}", choice.why);
    let gathered = with(&expandable(Some(false)), single.clone()).unwrap();
    assert!(gathered.why.contains("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1"), "{}", gathered.why);
    // Gathering takes an arena too.
    let mut full = Facts { arena_bytes: Some(2 << 30), ..expandable(Some(false)) };
    full.trainer_cuda.free_bytes = Some(1 << 20);
    let why = impossible(with(&full, single), Subject::Strategy(Strategy::CudaIpc));
    assert!(why.contains("the arena needs"), "{why}");
    assert_eq!(pick(&full).strategy, Strategy::Tcp);
}

#[test]
fn engines_on_other_gpus_of_the_host_are_told_about_peer_access() {
    for (access, reason) in
        [(Some(true), "could reach it"), (Some(false), "no peer access"), (None, "colocate")]
    {
        let near = Facts { placement: Placement::SameHost, peer_access: access, ..elastic() };
        let choice = pick(&near);
        assert_eq!(choice.link, Link::Shm);
        let not = why_not(&choice, Subject::Strategy(Strategy::PackedCudaIpc));
        assert!(!not.blocked && not.why_not.contains(reason), "{}", not.why_not);
    }
}

#[test]
fn strict_names_the_faster_path_and_what_blocks_it() {
    let strict = |facts: &Facts| with(facts, json!({"strict": true}));
    let cases = [
        (Facts { engine_gpus: gpus(&["5"]), ..colocated() }, "strategy packed_cuda_ipc", "GPU-5"),
        (Facts { backend: Backend::Gloo, ..colocated() }, "strategy packed_cuda_ipc", "weight_sync_backend"),
        (Facts { cross_region: true, ..elastic() }, "strategy store", "store_url"),
        (Facts { rdma_device: true, ..elastic() }, "strategy nixl", "install the nixl package"),
        (Facts { peer: Peer::default(), ..elastic() }, "codec delta_plain", "does not decode deltas"),
        (
            Facts { link_bytes_per_second: Some(1_000_000), ..elastic() },
            "codec delta_context",
            "did not register",
        ),
    ];
    for (facts, faster, reason) in cases {
        pick(&facts);
        let error = strict(&facts).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        let text = error.to_string();
        assert!(text.contains(faster) && text.contains(reason), "{text}");
    }
    for facts in [colocated(), remote(), elastic(), adapter()] {
        assert_eq!(strict(&facts), Ok(pick(&facts)), "nothing is missing");
    }
    // What the configuration asked for is not a fallback.
    let asked = json!({"strict": true, "weight_sync_backend": "gloo"});
    assert_eq!(with(&colocated(), asked).unwrap().strategy, Strategy::Broadcast);
    // A blocked option that stands behind the choice does not matter.
    assert_eq!(strict(&Facts { rdma_device: true, ..remote() }).unwrap().strategy, Strategy::Broadcast);
}

#[test]
fn unknown_override_keys_get_a_suggestion() {
    let parse = |v: serde_json::Value| serde_json::from_value::<Overrides>(v).unwrap_err().to_string();
    for (key, nearest) in [
        ("use_cuda_icp", "use_cuda_ipc"),
        ("generator.pack_weight", "pack_weights"),
        ("Strategy", "strategy"),
        ("weight_sync_backned", "weight_sync_backend"),
    ] {
        let text = parse(json!({ key: true }));
        assert!(text.contains(key) && text.contains(&format!("did you mean {nearest:?}")), "{text}");
    }
    assert!(parse(json!({ "x".repeat(100_000): 1 })).len() < 400);
    let text = parse(json!({"generator.weight_sync_backend": "mpi"}));
    assert!(text.contains("generator.weight_sync_backend") && text.contains("`nccl`"), "{text}");
    assert!(serde_json::from_str::<Facts>(r#"{"colocated": true}"#).is_err());
}

#[test]
fn facts_overrides_and_choices_round_trip_through_json() {
    let facts: Facts = serde_json::from_value(json!({
        "placement": "same_gpu", "trainer_gpus": ["GPU-0"], "engine_gpus": ["GPU-0"], "engines": ["vllm"],
    }))
    .unwrap();
    assert_eq!(pick(&facts).strategy, Strategy::PackedCudaIpc);
    let overrides: Overrides =
        serde_json::from_value(json!({"strict": null, "link": null, "generator.use_cuda_ipc": true}))
            .unwrap();
    assert_eq!(overrides, Overrides { use_cuda_ipc: Some(true), ..Overrides::default() });
    let again: Overrides = serde_json::from_value(serde_json::to_value(&overrides).unwrap()).unwrap();
    assert_eq!(again, overrides);
    let choice = pick(&facts);
    let text = serde_json::to_string(&choice).unwrap();
    assert_eq!(serde_json::from_str::<Choice>(&text).unwrap(), choice);
    assert!(text.contains(r#""strategy":"packed_cuda_ipc","link":"cuda_ipc","codec":"full""#), "{text}");
    // Names in messages are the names in JSON.
    for &s in Strategy::ALL {
        assert_eq!(serde_json::to_value(s).unwrap(), s.as_str());
    }
    for &l in Link::ALL {
        assert_eq!(serde_json::to_value(l).unwrap(), l.as_str());
    }
    for &c in Codec::ALL {
        assert_eq!(serde_json::to_value(c).unwrap(), c.as_str());
    }
}

#[test]
fn a_change_rate_outside_0_to_1_is_refused() {
    for rate in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        let error =
            choose(&Facts { change_rate: Some(rate), ..remote() }, &Overrides::default()).unwrap_err();
        assert!(matches!(error, ChooseError::BadFact { name: "change_rate", .. }), "{error}");
        assert_eq!(error.kind(), Kind::Invalid);
    }
}

#[test]
fn the_expected_size_is_part_of_the_reason() {
    let choice = pick(&Facts { model_bytes: Some(16_000_000_000), change_rate: Some(0.01), ..elastic() });
    assert!(choice.why.contains("about 110 MB of 16000 MB"), "{}", choice.why);
    let shown = choice.to_string();
    assert!(shown.starts_with("tcp over tcp, delta_plain: "), "{shown}");
    assert!(shown.contains("\n  not strategy broadcast: "), "{shown}");
}

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
            (Some(weights), Some(free)) => assert!(weights <= free),
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
