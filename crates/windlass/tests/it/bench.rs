//! `windlass bench` of the data plane: small runs, for what they print and what they leave behind.

use crate::command;
use serde_json::Value;

/// Runs one bench on a small model, in a directory of its own, and checks what all of them promise.
fn bench(name: &str, more: &[&str]) -> Value {
    let dir = tempfile::Builder::new().prefix("windlass-test-").tempdir_in("/dev/shm").unwrap();
    let place = dir.path().to_str().unwrap();
    let small = ["--elements", "2Mi", "--repeats", "1", "--threads", "2", "--streams", "3"];
    let mut args = vec!["bench", name, "--json", "--region-dir", place];
    args.extend(small.iter().chain(more));
    let json = command::run(&args).ok().json();
    assert_eq!(json["bench"], name);
    for key in ["gbps", "limit_gbps", "ratio"] {
        assert!(json[key].as_f64().is_some_and(|v| v > 0.0), "{key} of {json}");
    }
    assert!(json["bars"].as_array().is_some_and(|bars| bars.iter().all(|b| b["met"].is_boolean())), "{json}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{name} left something behind");
    json
}

#[test]
fn the_seal_and_offload_benches_print_the_figures_they_promise() {
    let seal = bench("seal", &["--change", "3"]);
    assert!(seal["delta_bytes"].as_u64() > Some(1000), "{seal}");
    let offload = bench("offload", &[]);
    assert!(offload["small"]["ratio"].as_f64() > Some(0.0), "{offload}");
}

#[test]
fn the_load_bench_replays_many_small_tensors_and_large_ones() {
    let load = bench("load", &[]);
    assert!(load["small"]["tensors"].as_u64() >= Some(5000), "{load}");
    assert!(load["small"]["ns_per_copy"].as_f64() > Some(0.0), "{load}");
    assert!(load["sparse"]["elements"].as_u64() > Some(0), "{load}");
}

#[test]
fn the_tcp_bench_pulls_with_and_without_checks() {
    let tcp = bench("tcp", &[]);
    assert!(tcp["ratio_unchecked"].as_f64() > Some(0.0), "{tcp}");
    assert!(tcp.get("tls").is_none(), "{tcp}");
}

#[test]
fn the_tcp_bench_measures_tls_beside_the_pull_without() {
    let tcp = bench("tcp", &["--tls"]);
    for key in ["gbps", "ratio_to_plain", "cpu_ratio_to_plain"] {
        assert!(tcp["tls"][key].as_f64() > Some(0.0), "{key} of {tcp}");
    }
}

#[test]
fn the_sync_bench_measures_every_part_alone() {
    let sync = bench("sync", &[]);
    for key in ["encode_ms", "wire_ms", "apply_ms", "total_ms", "wire_bytes"] {
        assert!(sync[key].as_f64() > Some(0.0), "{key} of {sync}");
    }
}

#[test]
fn the_link_bench_shows_both_codecs_and_the_choice() {
    let link = bench("link", &["--rate", "1M"]);
    let bytes = |codec: &str| link["codecs"][codec]["wire_bytes"].as_u64();
    assert!(bytes("context") > Some(0) && bytes("context") < bytes("plain"), "{link}");
    for codec in ["plain", "context", "auto"] {
        assert!(link["codecs"][codec]["total_ms"].as_f64() > Some(0.0), "{codec} of {link}");
    }
}

#[test]
fn the_fanout_bench_has_a_row_for_every_number_of_receivers() {
    let fanout = bench("fanout", &[]);
    let rows = fanout["rows"].as_array().unwrap();
    for mode in ["full", "delta"] {
        let of = |r: &&Value| r["mode"] == mode && r["ratio"].as_f64() > Some(0.0);
        let receivers: Vec<_> = rows.iter().filter(of).filter_map(|r| r["receivers"].as_u64()).collect();
        assert_eq!(receivers, [1, 2, 4, 8, 16], "{mode}");
    }
}

#[test]
fn a_size_in_bytes_and_one_in_elements_are_not_taken_together() {
    let both = command::run(&["bench", "tcp", "--elements", "2Mi", "--model-bytes", "4Mi"]);
    assert_eq!(both.code, i32::from(windlass_core::Kind::Invalid.row().exit), "{}", both.stderr);
}
