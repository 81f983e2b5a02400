//! What the machine can do, and what simple encodings would give.
//!
//! The limits (reading one image, reading two, copying one) use plain loops over each thread's share of the
//! image. The simple encodings are those that people use today: XOR with the old image and zstd, and a list of
//! 32-bit positions and new values.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Runs `work` on each thread's share of items that were divided evenly. Where the system gives no more threads,
/// those there are take more than one.
fn share<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync) {
    let (wanted, items) = (items.len(), Mutex::new(items.into_iter()));
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        while let Some(item) = next() {
            work(item);
        }
    };
    std::thread::scope(|scope| {
        let spawned = (1..wanted).map_while(|_| std::thread::Builder::new().spawn_scoped(scope, run).ok());
        // Threads run when they are made; those not joined here are when the scope ends.
        let _ = spawned.count();
        run();
    });
}

/// Each thread's share: whole units of 64 bytes but for the last.
fn share_len(len: usize, threads: usize) -> usize {
    len.div_ceil(threads.max(1)).next_multiple_of(64).max(64)
}

fn sum(bytes: &[u8]) -> u64 {
    let mut lanes = [0u64; 8];
    let (chunks, _) = bytes.as_chunks::<64>();
    for chunk in chunks {
        let (words, _) = chunk.as_chunks::<8>();
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = lane.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    lanes.iter().fold(0, |a, &b| a.wrapping_add(b))
}

fn sum_both(a: &[u8], b: &[u8]) -> u64 {
    let mut lanes = [0u64; 8];
    let (a, _) = a.as_chunks::<64>();
    let (b, _) = b.as_chunks::<64>();
    for (a, b) in a.iter().zip(b) {
        let ((a, _), (b, _)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane = lane.wrapping_add(u64::from_le_bytes(*a) ^ u64::from_le_bytes(*b));
        }
    }
    lanes.iter().fold(0, |a, &b| a.wrapping_add(b))
}

/// Reads one image.
pub fn read1(image: &[u8], threads: usize) {
    share(image.chunks(share_len(image.len(), threads)).collect(), |part| {
        black_box(sum(part));
    });
}

/// Reads two images in step.
pub fn read2(a: &[u8], b: &[u8], threads: usize) {
    let len = share_len(a.len(), threads);
    share(a.chunks(len).zip(b.chunks(len)).collect(), |(a, b)| {
        black_box(sum_both(a, b));
    });
}

/// Copies an image.
pub fn copy(from: &[u8], to: &mut [u8], threads: usize) {
    let len = share_len(from.len(), threads);
    share(from.chunks(len).zip(to.chunks_mut(len)).collect(), |(from, to)| {
        to.copy_from_slice(black_box(from));
    });
}

/// XOR of both images, in pieces of 1 MiB through zstd at level 1. Answers the size.
pub fn xor_zstd(a: &[u8], b: &[u8], threads: usize) -> u64 {
    encode(a, b, threads, |a, b| {
        let mut bytes = 0;
        let mut xor = Vec::new();
        for (a, b) in a.chunks(1 << 20).zip(b.chunks(1 << 20)) {
            xor.clear();
            xor.extend(a.iter().zip(b).map(|(a, b)| a ^ b));
            bytes += zstd::bulk::compress(&xor, 1).map_or(0, |z| z.len() as u64);
        }
        bytes
    })
}

/// A 32-bit position and the new value for each changed element, found by a plain loop. Answers the size.
pub fn index32(a: &[u8], b: &[u8], threads: usize) -> u64 {
    encode(a, b, threads, |a, b| {
        let (mut positions, mut values): (Vec<u32>, Vec<[u8; 2]>) = (Vec::new(), Vec::new());
        let ((a, _), (b, _)) = (a.as_chunks::<2>(), b.as_chunks::<2>());
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            if a != b {
                positions.push(i as u32);
                values.push(*b);
            }
        }
        (black_box(&positions).len() * 4 + black_box(&values).len() * 2) as u64
    })
}

fn encode(a: &[u8], b: &[u8], threads: usize, part: impl Fn(&[u8], &[u8]) -> u64 + Sync) -> u64 {
    let len = share_len(a.len(), threads);
    let total = AtomicU64::new(0);
    share(a.chunks(len).zip(b.chunks(len)).collect(), |(a, b)| {
        total.fetch_add(part(a, b), Ordering::Relaxed);
    });
    total.into_inner()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn baselines_see_every_byte_whatever_the_number_of_threads() {
        let a: Vec<u8> = (0..10_007u32).map(|i| (i * 7) as u8).collect();
        let mut b = a.clone();
        for i in [0, 5_000, 10_004] {
            b[i] ^= 1;
        }
        for threads in [1, 2, 7] {
            assert_eq!(index32(&a, &b, threads), 3 * 6);
            let mut c = vec![0; a.len()];
            copy(&a, &mut c, threads);
            assert!(c == a);
            assert!(xor_zstd(&a, &b, threads) > xor_zstd(&a, &a, threads));
        }
        for i in 0..128 {
            let mut one = [0; 128];
            one[i] = 1;
            assert_ne!(sum(&one), 0);
            assert_ne!(sum_both(&one, &[0; 128]), 0);
            assert_ne!(sum_both(&[0; 128], &one), 0);
        }
    }
}
