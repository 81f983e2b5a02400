mod any;
mod gpu;

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
fn colocated_sglang_gets_what_its_adapter_takes() {
    let sglang = Facts { engines: vec![Engine::Sglang], ..colocated() };
    let choice = pick(&sglang);
    assert_eq!((choice.strategy, choice.link), (Strategy::Tcp, Link::Shm));
    assert!(why_not(&choice, Subject::Strategy(Strategy::PackedCudaIpc)).blocked);
    assert!(
        why_not(&choice, Subject::Strategy(Strategy::PackedCudaIpc)).why_not.contains("use_cuda_ipc = true")
    );
    for demand in [json!({"use_cuda_ipc": true}), json!({"strategy": "packed_cuda_ipc"})] {
        assert_eq!(with(&sglang, demand).unwrap().strategy, Strategy::PackedCudaIpc);
    }
    let gloo = with(&sglang, json!({"weight_sync_backend": "gloo"})).unwrap();
    assert_eq!(gloo.strategy, Strategy::Broadcast);
    let adapter = Facts { lora: true, lora_sync_path: Some("/mnt/lora".into()), ..sglang };
    assert_eq!(pick(&adapter).strategy, Strategy::Lora);
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
        (remote(), strategy("nixl"), Subject::Strategy(Strategy::Nixl), "install nixl-cu12"),
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
fn strict_names_the_faster_path_and_what_blocks_it() {
    let strict = |facts: &Facts| with(facts, json!({"strict": true}));
    let cases = [
        (Facts { engine_gpus: gpus(&["5"]), ..colocated() }, "strategy packed_cuda_ipc", "GPU-5"),
        (Facts { backend: Backend::Gloo, ..colocated() }, "strategy packed_cuda_ipc", "weight_sync_backend"),
        (Facts { cross_region: true, ..elastic() }, "strategy store", "store_url"),
        (Facts { rdma_device: true, ..elastic() }, "strategy nixl", "install nixl-cu12"),
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
    assert!(serde_json::from_str::<Facts>(r#"{"store_url": "s3://b"}"#).is_ok());
    // A transport that the Python strategies do not have cannot be asked for.
    assert!(serde_json::from_str::<Facts>(r#"{"nixl_library": true}"#).is_err());
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
