//! `bench load`: an image into the parameters of an engine by a load plan, against copying the same bytes.
//!
//! Three loads, each the whole call with its checks. *Large*: a decoder as an engine of two workers holds it, with
//! queries, keys and values in one parameter, gates and ups in another, and the matrices that are cut by columns in
//! two halves; all of it in one process, so that every byte of the image is copied once. *Small*: at least 5,000
//! tensors of a few KiB, each to a parameter of its own, which is where an engine's loader spends its time on calls and
//! not on bytes; beside it a bare loop of copies between the same places. *Sparse*: what changed between two versions
//! of the decoder, by the positions of their delta.
//!
//! The limit copies the image with the same threads into memory that was touched before.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;
use windlass_core::Dtype;
use windlass_core::delta::{Delta, Encoder};
use windlass_core::identity::{Incarnation, ModelId};
use windlass_core::manifest::{Manifest, Tensor, TensorSpec};
use windlass_data::load::{LoadPlan, Loaded, PlanCopy, Target};
use windlass_data::seal::{self, Base, SealJob};

use super::rig::{BenchDir, failed};
use super::{
    Figure, Images, PlaneConfig, Probe, Timing, merge, reached, reached_cpu, rounds, timing_row, write_bars,
};
use crate::console::round;
use crate::console::{Session, Table, count};
use crate::error::Error;
use crate::lab::image;
use crate::tools::limits;

/// Elements of a small tensor at most, and how many of these there are at least and at most.
const SMALL: u64 = 2561;
const FEWEST: u64 = 5_000;
const MOST: u64 = 50_000;

/// Runs the bench and prints what came out.
pub(crate) fn run(config: &PlaneConfig, session: &Session) -> Result<(), Error> {
    let images = Images::make(&config.bench, session)?;
    let (threads, cancel) = (config.bench.threads, session.cancel());
    let delta = delta(config, session, &images)?;
    let delta = [Delta::parse(&delta).map_err(failed!("read the delta"))?];
    let manifest = Arc::new(images.manifest.clone());
    let (targets, copies) = fused(&manifest);
    let large = LoadPlan::new(Arc::clone(&manifest), targets, &copies).map_err(failed!("make a plan"))?;
    let manifest = Arc::new(small(images.base.len() as u64)?);
    let (targets, copies) = each(&manifest);
    let small = LoadPlan::new(Arc::clone(&manifest), targets, &copies).map_err(failed!("make a plan"))?;
    let small_image = &images.base[..manifest.data_bytes() as usize];
    let mut copy = image::copy(&images.next)?;
    let mut memory = [memory(&large)?, self::memory(&small)?, self::memory(&large)?, self::memory(&small)?];
    let [on_large, on_small, on_sparse, on_loop] = &mut memory;
    let (mut loaded, mut changed) = (Loaded::default(), Loaded::default());
    let dense = |plan: &LoadPlan, image: &[u8], memory: &mut Memory| {
        plan.dense(image, &mut lent(memory), None, threads, cancel).map_err(failed!("load"))
    };
    let sparse_memory = std::cell::RefCell::new(on_sparse);
    let [limit, time, small_time, loop_time, sparse_time] = rounds(
        config.bench.repeats,
        [
            Probe::new(|| {
                limits::copy(&images.base, &mut copy, threads);
                Ok(())
            }),
            Probe::new(|| dense(&large, &images.base, on_large).map(|l| loaded = l)),
            Probe::new(|| dense(&small, small_image, on_small).map(drop)),
            Probe::new(|| {
                for (tensor, to) in manifest.tensors().iter().zip(on_loop.iter_mut()) {
                    let range = tensor.range();
                    to.copy_from_slice(&small_image[range.start as usize..range.end as usize]);
                }
                Ok(())
            }),
            Probe::after(
                || dense(&large, &images.base, &mut sparse_memory.borrow_mut()).map(drop),
                || {
                    let mut memory = sparse_memory.borrow_mut();
                    let done =
                        large.sparse(&delta, &images.next, &mut lent(&mut memory), None, threads, cancel);
                    changed = done.map_err(failed!("load what changed"))?;
                    Ok(())
                },
            ),
        ],
    )?;
    check(&large, &images.base, on_large)?;
    check(&small, small_image, on_small)?;
    check(&large, &images.next, sparse_memory.into_inner())?;
    if loaded.bytes != images.base.len() as u64 {
        return Err(Error::Bug(format!("{} of {} bytes were loaded", loaded.bytes, images.base.len())));
    }
    let (ratio, cpu_ratio) = (reached(&limit, &time), reached_cpu(&limit, &time));
    let small_ratio = reached(&loop_time, &small_time);
    let [limit, time, small_time, loop_time, sparse_time] =
        [&limit, &time, &small_time, &loop_time, &sparse_time].map(|t| Timing::from_rounds(t));
    let bars = [Figure { name: "load / copy, in time".into(), value: ratio, bar: 1.5, at_least: false }];
    let (len, small_len, tensors) = (images.base.len(), small_image.len(), manifest.tensors().len());
    let per_copy = small_time.median / tensors as f64;
    let object = json!({
        "gbps": round(time.gbps(len)),
        "limit_gbps": round(limit.gbps(len)),
        "ratio": round(ratio),
        "cpu_ratio": round(cpu_ratio),
        "copies": loaded.copies,
        "targets": large.targets().len(),
        "small": {
            "tensors": tensors,
            "bytes": small_len,
            "gbps": round(small_time.gbps(small_len)),
            "ns_per_copy": round(per_copy * 1e9),
            "copies_per_second": round(1.0 / per_copy),
            "loop_ns_per_copy": round(loop_time.median / tensors as f64 * 1e9),
            "ratio_to_loop": round(small_ratio),
        },
        "sparse": {
            "elements": changed.elements,
            "ms": round(sparse_time.median * 1e3),
            "ratio_to_dense": round(sparse_time.median / time.median),
        },
        "best_ms": {
            "load": round(time.min * 1e3),
            "small": round(small_time.min * 1e3),
            "sparse": round(sparse_time.min * 1e3),
            "limit": round(limit.min * 1e3),
        },
        "spread": { "load": round(time.spread()), "small": round(small_time.spread()), "limit": round(limit.spread()) },
        "bars": bars.iter().map(Figure::json).collect::<Vec<_>>(),
    });
    session.finish(merge(config.json("load", &images), object), |out| {
        config.title("load", &images, out);
        let mut t = Table::new(["", "GB/s of image", "ms", "best", "spread"]);
        t.row(timing_row("copy", len, &limit));
        t.row(timing_row(&format!("load of {} fused parameters", large.targets().len()), len, &time));
        t.row(timing_row(&format!("load of {} small ones", count(tensors as u64)), small_len, &small_time));
        t.row(timing_row("the same as a loop of copies", small_len, &loop_time));
        t.row(timing_row(&format!("load of {} changes", count(changed.elements)), len, &sparse_time));
        t.write(out);
        out.push('\n');
        write_bars(&bars, out);
    })
}

/// What the targets of a plan are in memory.
type Memory = Vec<Vec<u8>>;

fn memory(plan: &LoadPlan) -> Result<Memory, Error> {
    // Touched before anything is timed.
    let mut memory: Memory = plan.target_bytes().into_iter().map(image::zeros).collect::<Result<_, _>>()?;
    memory.iter_mut().for_each(|m| m.fill(1));
    Ok(memory)
}

fn lent(memory: &mut Memory) -> Vec<&mut [u8]> {
    memory.iter_mut().map(Vec::as_mut_slice).collect()
}

fn check(plan: &LoadPlan, image: &[u8], memory: &Memory) -> Result<(), Error> {
    let read: Vec<&[u8]> = memory.iter().map(Vec::as_slice).collect();
    let differ = plan.differs(image, &read, 100_000, 1).map_err(failed!("compare"))?;
    if differ.is_empty() { Ok(()) } else { Err(Error::Bug(format!("{differ:?} were not loaded"))) }
}

/// The delta between both images.
fn delta(config: &PlaneConfig, session: &Session, images: &Images) -> Result<Vec<u8>, Error> {
    let (threads, stop) = (config.bench.threads, session.cancel());
    let place = BenchDir::new(&config.region_dir)?;
    let (kernels, path) = (windlass_data::simd::kernels(), place.join("delta"));
    let sums = windlass_data::seal::sums_of_all(kernels, &images.manifest, &images.base, (threads, stop))?;
    seal::seal(SealJob {
        kernels,
        manifest: &images.manifest,
        blocks: &(0..images.manifest.cuts().blocks()).into(),
        model_id: &ModelId::new("bench").map_err(|e| Error::Bug(e.to_string()))?,
        incarnation: Incarnation(1),
        version: 1,
        new: &images.next,
        base: Some(Base { data: &images.base, sums: &sums, version: 0 }),
        out: Some(&path),
        encoder: Encoder::plain,
        threads,
        stop,
        progress: &|_| {},
    })?;
    std::fs::read(&path).map_err(|e| Error::Bug(format!("the delta cannot be read: {e}")))
}

/// Many small tensors with as many bytes as an image, or fewer.
fn small(bytes: u64) -> Result<Manifest, Error> {
    let elements = (bytes / 2 / FEWEST).clamp(1, SMALL);
    let tensors = (bytes / 2 / elements).clamp(1, MOST);
    let specs = (0..tensors).map(|i| TensorSpec::new(format!("small.{i}"), Dtype::BF16, [elements]));
    Manifest::new(specs, BTreeMap::new()).map_err(|e| Error::Bug(e.to_string()))
}

fn whole(tensor: &Tensor, target: usize, target_offset: u64) -> PlanCopy {
    PlanCopy {
        source: tensor.name.clone(),
        source_offset: 0,
        target,
        target_offset,
        sizes: vec![tensor.units()],
        source_strides: vec![1],
        target_strides: vec![1],
    }
}

/// A target for each tensor.
fn each(manifest: &Manifest) -> (Vec<Target>, Vec<PlanCopy>) {
    let target = |t: &Tensor| Target { name: t.name.clone(), numel: t.units(), dtype: t.dtype };
    let copies = manifest.tensors().iter().enumerate().map(|(i, t)| whole(t, i, 0));
    (manifest.tensors().iter().map(target).collect(), copies.collect())
}

/// Which parameter a tensor becomes a part of, and which part.
fn part(name: &str) -> Option<(String, usize)> {
    let parts = [
        ("q_proj", "qkv"),
        ("k_proj", "qkv"),
        ("v_proj", "qkv"),
        ("gate_proj", "gate_up"),
        ("up_proj", "gate_up"),
    ];
    let found = parts.iter().position(|(part, _)| name.ends_with(&format!(".{part}.weight")))?;
    Some((name.replace(parts[found].0, parts[found].1), found))
}

/// The parameters of an engine: fused by rows, cut by columns, or as they are.
fn fused(manifest: &Manifest) -> (Vec<Target>, Vec<PlanCopy>) {
    let (mut targets, mut copies) = (Vec::new(), Vec::new());
    let mut fused: BTreeMap<String, Vec<(usize, &Tensor)>> = BTreeMap::new();
    for tensor in manifest.tensors() {
        let target = |name: String, numel| Target { name, numel, dtype: tensor.dtype };
        if let Some((name, place)) = part(&tensor.name) {
            fused.entry(name).or_default().push((place, tensor));
        } else if let ([rows, columns], true) = (&tensor.shape[..], tensor.name.contains("_proj")) {
            for (half, from, n) in [(0, 0, columns / 2), (1, columns / 2, columns - columns / 2)] {
                copies.push(PlanCopy {
                    source_offset: from,
                    sizes: vec![*rows, n],
                    source_strides: vec![*columns, 1],
                    target_strides: vec![n, 1],
                    ..whole(tensor, targets.len(), 0)
                });
                targets.push(target(format!("{}.{half}", tensor.name), rows * n));
            }
        } else {
            copies.push(whole(tensor, targets.len(), 0));
            targets.push(target(tensor.name.clone(), tensor.units()));
        }
    }
    for (name, mut parts) in fused {
        parts.sort_by_key(|(place, _)| *place);
        let mut numel = 0;
        for (_, tensor) in &parts {
            copies.push(whole(tensor, targets.len(), numel));
            numel += tensor.units();
        }
        targets.push(Target { name, numel, dtype: parts[0].1.dtype });
    }
    (targets, copies)
}
