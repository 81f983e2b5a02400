//! What the machine can do, and what simple encodings would give.
//!
//! The limits (reading one image, reading two, copying one) use plain loops over each thread's share of the
//! image. The limit of streams on one machine is `sendfile` into TCP sockets and `recv` out of them
//! ([`loopback`]). The simple encodings are those that people use today: XOR with the old image and zstd, and a list of
//! 32-bit positions and new values.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

/// Runs `work` on each thread's share of items that were divided evenly. Where the system gives no more threads,
/// those there are take more than one.
fn share<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync) {
    let (wanted, items) = (items.len(), Mutex::new(items.into_iter()));
    let next = || items.lock().next();
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
pub(crate) fn read1(image: &[u8], threads: usize) {
    share(image.chunks(share_len(image.len(), threads)).collect(), |part| {
        black_box(sum(part));
    });
}

/// Reads two images in step.
pub(crate) fn read2(a: &[u8], b: &[u8], threads: usize) {
    let len = share_len(a.len(), threads);
    share(a.chunks(len).zip(b.chunks(len)).collect(), |(a, b)| {
        black_box(sum_both(a, b));
    });
}

/// Copies an image.
pub(crate) fn copy(from: &[u8], to: &mut [u8], threads: usize) {
    let len = share_len(from.len(), threads);
    share(from.chunks(len).zip(to.chunks_mut(len)).collect(), |(from, to)| {
        to.copy_from_slice(black_box(from));
    });
}

/// The most bytes asked of one `sendfile`: enough that calls cost nothing, few enough that a stream that has lost
/// its peer notices soon.
const SEND_PIECE: u64 = 8 << 20;

/// Sends the first `into.len()` bytes of a file to this process over `streams` connections on 127.0.0.1, each
/// with a thread at either end and an equal share: `sendfile` out, `recv` straight into `into`. Answers the time
/// from the first byte to the last; connecting and starting threads are not in it. A stream that makes no progress
/// for `timeout` fails the whole with [`io::ErrorKind::WouldBlock`].
///
/// The limit is that of the path, not of the page cache, only if the file is in memory (tmpfs or a memfd) and `into`
/// has been written to before.
pub(crate) fn loopback(
    streams: usize,
    file: &File,
    into: &mut [u8],
    timeout: Duration,
) -> io::Result<Duration> {
    if file.metadata()?.len() < into.len() as u64 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let share = share_len(into.len(), streams);
    let parts: Vec<&mut [u8]> = into.chunks_mut(share).collect();
    let ends = connect(parts.len(), timeout)?;
    // Held while threads start, so that all of them begin together.
    let gate = RwLock::new(());
    std::thread::scope(|scope| {
        let closed = gate.write();
        let mut threads = Vec::with_capacity(2 * parts.len());
        let mut offset = 0;
        for (part, (out, back)) in parts.into_iter().zip(&ends) {
            let (from, len) = (offset, part.len() as u64);
            offset += len;
            let gate = &gate;
            let send = move || {
                drop(gate.read());
                let sent = send_range(out, file, from, len);
                // Whatever happened, the other end must not wait for more.
                let _ = out.shutdown(Shutdown::Write);
                sent
            };
            let receive = move || {
                drop(gate.read());
                let mut back: &TcpStream = back;
                let received = back.read_exact(part);
                let _ = back.shutdown(Shutdown::Both);
                received
            };
            let start = std::thread::Builder::new;
            threads.push(start().spawn_scoped(scope, send));
            threads.push(start().spawn_scoped(scope, receive));
        }
        if threads.iter().any(Result::is_err) {
            // Those that did start find their connections closed.
            for (out, back) in &ends {
                let _ = (out.shutdown(Shutdown::Both), back.shutdown(Shutdown::Both));
            }
        }
        let start = Instant::now();
        drop(closed);
        let mut ended = Ok(());
        for thread in threads {
            let of_thread = thread.and_then(|t| {
                t.join().unwrap_or_else(|_| Err(io::Error::other("a stream's thread panicked")))
            });
            ended = ended.and(of_thread);
        }
        ended.map(|()| start.elapsed())
    })
}

/// Connections of this process to itself; both ends give up after `timeout`.
fn connect(streams: usize, timeout: Duration) -> io::Result<Vec<(TcpStream, TcpStream)>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let mut ends = Vec::with_capacity(streams);
    while ends.len() < streams {
        let out = TcpStream::connect_timeout(&address, timeout)?;
        // A stranger may come first. The connection above waits in the queue, so there is always one to take.
        let back = loop {
            let (back, peer) = listener.accept()?;
            if peer == out.local_addr()? {
                break back;
            }
        };
        out.set_write_timeout(Some(timeout))?;
        back.set_read_timeout(Some(timeout))?;
        ends.push((out, back));
    }
    Ok(ends)
}

fn send_range(out: &TcpStream, file: &File, from: u64, len: u64) -> io::Result<()> {
    let (mut at, end) = (from, from + len);
    while at < end {
        let piece = (end - at).min(SEND_PIECE) as usize;
        match rustix::fs::sendfile(out, file, Some(&mut at), piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// XOR of both images, in pieces of 1 MiB through zstd at level 1. Answers the size.
#[cfg(feature = "zstd")]
pub(crate) fn xor_zstd(a: &[u8], b: &[u8], threads: usize) -> u64 {
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
pub(crate) fn index32(a: &[u8], b: &[u8], threads: usize) -> u64 {
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
            #[cfg(feature = "zstd")]
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
    fn in_memory(bytes: &[u8]) -> File {
        use std::io::Write as _;
        let fd = rustix::fs::memfd_create("loopback", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = File::from(fd);
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn loopback_delivers_every_byte_whatever_the_number_of_streams() {
        let bytes: Vec<u8> = (0..3_000_017u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        let file = in_memory(&bytes);
        for streams in [1, 3, 6] {
            let mut into = vec![0; bytes.len()];
            let took = loopback(streams, &file, &mut into, Duration::from_secs(20)).unwrap();
            assert!(into == bytes && took > Duration::ZERO, "{streams} streams");
        }
        let mut none: [u8; 0] = [];
        loopback(4, &file, &mut none, Duration::from_secs(20)).unwrap();
    }

    #[test]
    fn loopback_refuses_a_file_that_is_too_short() {
        let mut into = vec![0; 1000];
        let error = loopback(2, &in_memory(&[1; 999]), &mut into, Duration::from_secs(20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_stream_that_stalls_gives_up() {
        let (out, back) = connect(1, Duration::from_millis(50)).unwrap().remove(0);
        let file = in_memory(&vec![1; 64 << 20]);
        // No reader: the socket's buffers fill up.
        let error = send_range(&out, &file, 0, 64 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        // No writer: the read times out.
        let error = (&back).read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
