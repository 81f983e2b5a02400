//! Images of odd shapes, from end to end.

use std::collections::BTreeMap;

use crate::plane::{Noise, Publisher, image_bytes, receiver, shm, stop};
use windlass_core::dtype::Dtype;
use windlass_core::manifest::{DimCut, Manifest, TensorSpec};

fn manifest(tensors: impl IntoIterator<Item = TensorSpec>) -> Manifest {
    Manifest::new(tensors, BTreeMap::new()).unwrap()
}

/// Full, delta, and again by a receiver that was restarted.
fn follow(manifest: Manifest) {
    let mut publisher = Publisher::new(manifest);
    Noise(41).fill_fast(&mut publisher.data);
    publisher.publish(1);
    let dir = shm();
    let mut first = receiver(&dir, publisher.server());
    first.sync(&stop()).unwrap();
    assert_eq!(image_bytes(&first), publisher.data);
    publisher.change(10);
    let digest = publisher.publish(2);
    let synced = first.sync(&stop()).unwrap();
    assert_eq!(synced.image.unwrap().digest, digest);
    assert_eq!(image_bytes(&first), publisher.data);
    drop(first);
    publisher.change(10);
    publisher.publish(3);
    let mut again = receiver(&dir, publisher.server());
    assert_eq!(again.current().unwrap().digest, digest);
    again.sync(&stop()).unwrap();
    assert_eq!(image_bytes(&again), publisher.data);
}

#[test]
fn tensors_of_one_byte_are_synced() {
    follow(manifest((0..300).map(|i| TensorSpec::new(format!("t{i}"), Dtype::U8, [1]))));
    follow(manifest([TensorSpec::new("only", Dtype::U8, [1])]));
}

#[test]
fn fifty_thousand_tensors_are_synced() {
    let dtypes = [Dtype::BF16, Dtype::F32, Dtype::U8, Dtype::F16];
    let tensor =
        |i: u64| TensorSpec::new(format!("model.layers.{i}.w"), dtypes[(i % 4) as usize], [i % 7, 3]);
    follow(manifest((0..50_000).map(tensor)));
}

#[test]
fn images_that_are_divisible_by_nothing_are_synced() {
    for primes in [[1_000_003u64, 7, 65_537], [65_535, 3, 1], [65_536, 65_537, 131_071]] {
        follow(manifest(primes.iter().enumerate().map(|(i, n)| {
            let dtype = [Dtype::U8, Dtype::F64, Dtype::BF16][i];
            TensorSpec::new(format!("p{i}"), dtype, [*n])
        })));
    }
    follow(manifest([
        TensorSpec::new("wide", Dtype::F32, [3, 100_003]),
        TensorSpec::new("x", Dtype::U8, [5]),
    ]));
}

#[test]
fn an_image_without_blocks_is_synced() {
    let empty = || manifest([TensorSpec::new("a", Dtype::F32, [0]), TensorSpec::new("b", Dtype::U8, [3, 0])]);
    let mut publisher = Publisher::new(empty());
    publisher.commit(1);
    publisher.wait(1);
    let dir = shm();
    let mut first = receiver(&dir, publisher.server());
    assert_eq!(first.sync(&stop()).unwrap().image.unwrap().identity.version, 1);
    publisher.commit(2);
    publisher.wait(2);
    assert_eq!(first.sync(&stop()).unwrap().image.unwrap().identity.version, 2);
    drop(first);
    publisher.commit(3);
    publisher.wait(3);
    let mut again = receiver(&dir, publisher.server());
    assert_eq!(again.current().unwrap().identity.version, 2);
    assert_eq!(again.sync(&stop()).unwrap().image.unwrap().identity.version, 3);
    assert!(image_bytes(&again).is_empty());
}

#[test]
fn tiles_that_are_not_contiguous_are_synced() {
    let tensors = [
        TensorSpec::new("columns", Dtype::BF16, [333, 777]),
        TensorSpec::new("single", Dtype::U8, [5, 3]),
        TensorSpec::new("long", Dtype::F32, [3, 70_001]),
    ];
    let cuts = BTreeMap::from([
        ("columns".to_owned(), vec![DimCut { dim: 1, bounds: vec![1, 200, 776] }]),
        ("single".to_owned(), vec![DimCut { dim: 1, bounds: vec![1, 2] }]),
        ("long".to_owned(), vec![DimCut { dim: 1, bounds: vec![10_000, 20_001] }]),
    ]);
    follow(manifest(tensors).with_cuts(&cuts).unwrap());
}

/// Nine gigabytes of shared memory: `make soak` runs it.
#[test]
#[ignore = "needs 9 GiB of shared memory and some seconds"]
fn one_tensor_of_three_gigabytes_is_synced() {
    let mut publisher = Publisher::new(manifest([TensorSpec::new("w", Dtype::U8, [(3 << 30) + 1])]));
    // Zeros but for some places; only those are written.
    publisher.data = Vec::new();
    let places: Vec<u64> = (0..40).map(|i| i * ((3u64 << 30) / 40)).chain([3 << 30]).collect();
    let write = |publisher: &mut Publisher, version: u64| {
        let attempt = publisher.writer.begin(version, &stop()).unwrap();
        places.iter().for_each(|at| attempt.write(*at, &[version as u8]).unwrap());
        attempt.done(&stop()).unwrap();
        publisher.wait(version);
    };
    write(&mut publisher, 1);
    let dir = shm();
    let mut receiver = receiver(&dir, publisher.server());
    assert_eq!(receiver.sync(&stop()).unwrap().mode, "full");
    write(&mut publisher, 2);
    let synced = receiver.sync(&stop()).unwrap();
    assert_eq!(synced.mode, "delta");
    assert_eq!(synced.image.unwrap().digest, publisher.server().version().digest.unwrap());
    let region = receiver.image().unwrap().region();
    let load = std::time::Duration::from_mins(1);
    let view = windlass_data::image::ImageView::take(region, load, &stop()).unwrap();
    assert!(places.iter().all(|at| view.data()[*at as usize] == 2));
}
