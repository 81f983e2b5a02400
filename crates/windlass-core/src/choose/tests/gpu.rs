//! What follows from facts about GPUs.

use serde_json::json;

use super::*;

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

    // Nothing at all, not even for records.
    let mut full = Facts { baseline_bytes: Some(39_000_000_000), ..roomy() };
    full.trainer_cuda.free_bytes = Some(100_000_000);
    let choice = pick(&full);
    assert_eq!((choice.encoder, choice.offload), (Some(Encoder::Host), Some(Offload::Copy)));
    let gpu = why_not(&choice, Subject::Encoder(Encoder::Gpu));
    assert!(gpu.blocked && gpu.why_not.contains("needs 0.6 GiB of GPU memory"), "{}", gpu.why_not);
    assert!(choice.why.contains("found on the host: the baseline of delta mode"), "{}", choice.why);
    let why = impossible(with(&full, json!({"offload_mode": "delta"})), Subject::Offload(Offload::Delta));
    assert!(why.contains("0.1 GiB are free"), "{why}");
    // Measured bytes count more than a claim.
    assert_eq!(pick(&Facts { gpu_baseline_fits: true, ..full }).offload, Some(Offload::Copy));
}

#[test]
fn a_baseline_takes_at_most_half_of_what_is_free_unless_it_is_demanded() {
    let most = Facts { baseline_bytes: Some(30_000_000_000), ..roomy() };
    let choice = pick(&most);
    assert_eq!(choice.offload, Some(Offload::Delta));
    let told = "20.0 GB in 40.0 GB of free GPU memory and 11.9 GB on the host: comparing takes about 255 ms, a copy 566 ms";
    assert!(choice.why.contains(told), "{}", choice.why);
    let demanded = with(&most, json!({"offload_mode": "delta"})).unwrap();
    assert!(
        demanded.why.contains("a baseline of 31.9 GB in 40.0 GB of free GPU memory)"),
        "{}",
        demanded.why
    );
    // So little of it on the GPU that a copy is as good.
    let mut cramped = most;
    cramped.trainer_cuda.free_bytes = Some(2_000_000_000);
    let choice = pick(&cramped);
    assert_eq!(choice.offload, Some(Offload::Copy));
    let gpu = why_not(&choice, Subject::Encoder(Encoder::Gpu));
    assert!(
        !gpu.blocked && gpu.why_not.contains("29.5 GB that the GPU would compare with"),
        "{}",
        gpu.why_not
    );
    assert_eq!(with(&cramped, json!({"strict": true})).unwrap().offload, Some(Offload::Copy));
    assert_eq!(with(&cramped, json!({"offload_mode": "delta"})).unwrap().offload, Some(Offload::Delta));
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
    // With the encoder set to host there is no fallback.
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
        link_bytes_per_second: Some(2_000_000),
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
fn with_an_engine_on_the_gpu_a_baseline_takes_what_pays() {
    let tcp = |facts: &Facts| with(facts, json!({"strategy": "tcp"})).unwrap();
    let shared = Facts { placement: Placement::SameGpu, engine_gpus: roomy().trainer_gpus, ..roomy() };
    let choice = tcp(&shared);
    assert_eq!((choice.link, choice.offload), (Link::Shm, Some(Offload::Delta)));
    // Where the bytes are not known, the engines need the memory more.
    let unknown = Facts { baseline_bytes: None, gpu_baseline_fits: true, ..shared };
    let choice = tcp(&unknown);
    assert_eq!(choice.offload, Some(Offload::Copy));
    let gpu = why_not(&choice, Subject::Encoder(Encoder::Gpu));
    assert!(!gpu.blocked && gpu.why_not.contains("share the trainers' GPUs"), "{}", gpu.why_not);
    let demanded = with(&unknown, json!({"strategy": "tcp", "offload_mode": "delta"})).unwrap();
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
    // A fact that was not measured, or is the same on both sides, is no obstacle.
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
