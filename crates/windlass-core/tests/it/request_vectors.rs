//! Walks every golden vector for requests, chunks and sync infos. Other implementations read the same files.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // The library does no I/O; its tests read files.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use windlass_core::chunk::{ChunkConfig, Chunker, Extent, Item, WeightChunk};
use windlass_core::request::{WeightUpdateRequest, parse_request, parse_request_json};
use windlass_core::sync_info::{EngineShape, WeightSyncInfo, rank_offsets, world_size};

/// Runs `check` on every case of every file in a directory of `testdata`; answers how many there were.
fn each_case(directory: &str, check: impl Fn(&Value)) -> usize {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata").join(directory);
    let mut files: Vec<PathBuf> = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut count = 0;
    for file in files {
        assert_eq!(file.extension().and_then(|e| e.to_str()), Some("json"), "{}", file.display());
        let vectors: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        for case in vectors["cases"].as_array().expect("cases") {
            eprintln!("{}: {}", file.display(), case["name"]);
            check(case);
            count += 1;
        }
    }
    count
}

/// The keys of a case, without its name.
fn keys(case: &Value) -> Vec<&str> {
    case.as_object().unwrap().keys().map(String::as_str).filter(|&k| k != "name").collect()
}

#[test]
fn golden_requests_parse_to_their_typed_form_and_back() {
    let count = each_case("requests", |case| {
        let text = case["input"].to_string();
        let parsed = parse_request_json(text.as_bytes());
        if let Some(name) = case.get("error") {
            assert_eq!(keys(case), ["input", "error"]);
            let error = parsed.expect_err("refused");
            assert_eq!(error.name(), name, "{error}");
            return;
        }
        let request = check_typed(&parsed.unwrap(), case.get("typed").unwrap_or(&case["input"]));
        match keys(case).last() {
            Some(&"legacy") => check_legacy(&request, &case["legacy"]),
            Some(&"legacy_error") => {
                let error = request.to_legacy_dict().unwrap_err();
                assert_eq!(error.name(), case["legacy_error"], "{error}");
            }
            other => panic!("unknown kind of case: {other:?}"),
        }
    });
    assert!(count >= 80, "only {count} cases");
}

/// The text is compared too: names and order of fields are part of the form.
fn check_typed(request: &WeightUpdateRequest, typed: &Value) -> WeightUpdateRequest {
    assert_eq!(request.to_json(), typed.to_string());
    let again = WeightUpdateRequest::from_value(typed).unwrap();
    assert_eq!(&again, request);
    again
}

/// The dictionaries are those expected, and together they are the request again.
fn check_legacy(request: &WeightUpdateRequest, expected: &Value) {
    let legacy = request.to_legacy_dicts().unwrap();
    assert_eq!(Value::from(legacy.clone()).to_string(), expected.to_string());
    let parsed: Vec<_> = legacy.iter().map(|dict| parse_request(dict).unwrap()).collect();
    if let [only] = parsed.as_slice() {
        assert_eq!(only, request);
        assert_eq!(request.to_legacy_dict().unwrap(), legacy[0]);
    }
    let names = |r: &WeightUpdateRequest| r.params().map(|p| p.names().to_vec()).unwrap_or_default();
    assert_eq!(parsed.iter().flat_map(names).collect::<Vec<_>>(), names(request));
}

#[test]
fn golden_chunks_end_where_the_vectors_say() {
    let count = each_case("chunks", |case| {
        assert_eq!(keys(case), ["config", "items", "chunks"]);
        let config: ChunkConfig = serde_json::from_value(case["config"].clone()).unwrap();
        let mut chunker = Chunker::new(config);
        let mut chunks: Vec<WeightChunk> = Vec::new();
        for item in case["items"].as_array().unwrap() {
            let dtype = item[1].as_str().unwrap().parse().unwrap();
            let shape: Vec<u64> = serde_json::from_value(item[2].clone()).unwrap();
            let bytes = Extent::of(dtype, &shape).unwrap().bytes;
            let item = Item::new(item[0].as_str().unwrap(), dtype, shape, bytes, ()).unwrap();
            chunks.extend(chunker.push(item).unwrap());
        }
        chunks.extend(chunker.finish());
        let plain = |chunk: &WeightChunk| {
            json!({
                "names": chunk.names().collect::<Vec<_>>(),
                "module_name": chunk.module_name(),
                "total_size_bytes": chunk.total_size_bytes(),
            })
        };
        assert_eq!(chunks.iter().map(plain).collect::<Value>(), case["chunks"]);
    });
    assert!(count >= 12, "only {count} cases");
}

#[test]
fn golden_sync_infos_and_ranks_are_as_the_vectors_say() {
    let count = each_case("sync_info", |case| match keys(case).as_slice() {
        ["input"] | ["input", "typed"] => {
            let typed = case.get("typed").unwrap_or(&case["input"]);
            let info = WeightSyncInfo::from_value(&case["input"]).unwrap();
            assert_eq!(info.to_json(), typed.to_string());
            assert_eq!(WeightSyncInfo::from_value(typed).unwrap(), info);
        }
        ["input", "error"] => {
            let error = WeightSyncInfo::from_value(&case["input"]).expect_err("refused");
            assert_eq!(error.name(), case["error"].as_str().unwrap(), "{error}");
        }
        ["engines", rest @ ..] => {
            let engines: Vec<EngineShape> = serde_json::from_value(case["engines"].clone()).unwrap();
            if rest == ["error"] {
                assert_eq!(world_size(&engines).unwrap_err().name(), case["error"]);
                assert_eq!(rank_offsets(&engines).unwrap_err().name(), case["error"]);
            } else {
                assert_eq!(json!(world_size(&engines).unwrap()), case["world_size"]);
                assert_eq!(json!(rank_offsets(&engines).unwrap()), case["rank_offsets"]);
            }
        }
        other => panic!("unknown kind of case: {other:?}"),
    });
    assert!(count >= 20, "only {count} cases");
}
