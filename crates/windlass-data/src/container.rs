//! The container of a delta, written and read by several threads.
//!
//! Owns: [`write`], which makes the same file as one [`PartBuilder`] would, and [`parse`], which finds what
//! [`Delta::parse`] finds. Called by ranks, the agent and receivers, for deltas of hundreds of megabytes that an engine
//! waits for. Must not: know what is in a record. The format is specified in [`windlass_core::delta`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};
use windlass_core::delta::container::{FULL_PAYLOAD, FULL_RECORDS, PART_HEAD, Piece, index_len, put_end};
use windlass_core::delta::{Delta, DeltaError, DeltaHeader, Encoded, PartBuilder, Record};

use crate::shm::{Access, Mapping};
use crate::stop::{Stop, Stopped};
use crate::work;

/// The first delta is expected to have this share of the weights, as a divisor: what 1 % of changes take, and some more. Memory
/// for it is taken ahead.
pub(crate) const LIKELY: u64 = 128;
/// Below this a second thread costs more than it saves.
const SMALL: usize = 4 << 20;

/// Why a container was not written.
#[derive(Debug)]
pub(crate) enum WriteFault {
    Io(io::Error),
    Stopped(Stopped),
}

impl From<Stopped> for WriteFault {
    fn from(s: Stopped) -> WriteFault {
        WriteFault::Stopped(s)
    }
}

impl WriteFault {
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            WriteFault::Io(e) => e,
            WriteFault::Stopped(s) => io::Error::other(s),
        }
    }
}

/// Writes the container of some records, which are given by ascending block, and answers how long it is. The same records
/// make the same file whatever the number of threads. `ready` is the file's memory, where somebody has reserved and mapped
/// it; what of the file is too long is cut off.
pub(crate) fn write<'a>(
    file: &File,
    header: &DeltaHeader,
    (count, changes): (usize, u64),
    record: impl Fn(usize) -> Record<'a> + Sync,
    threads: usize,
    ready: Option<&Mapping>,
    stop: &Stop,
) -> Result<u64, WriteFault> {
    let front = header.to_bytes();
    // Of each part, its first record and where it begins in the file; and of the end.
    let mut parts = vec![(0, front.len() as u64)];
    let mut one = Part::default();
    for i in 0..count {
        if one.payload >= FULL_PAYLOAD || one.records >= FULL_RECORDS {
            let (_, at) = parts[parts.len() - 1];
            parts.push((i, at + one.bytes()));
            one = Part::default();
        }
        one.add(&record(i));
    }
    if count > 0 {
        let (_, at) = parts[parts.len() - 1];
        parts.push((count, at + one.bytes()));
    }
    let (last, (_, at)) = (parts.len() - 1, parts[parts.len() - 1]);
    let mut end = Vec::new();
    put_end(&mut end, last as u32, count as u64, changes);
    let bytes = at + end.len() as u64;
    let threads = if bytes < SMALL as u64 { 1 } else { threads.max(1) };
    // Writes to a file take turns, stores to its memory do not. What is stored there must have been reserved: without
    // room, a write is an error and a store the end of the process.
    let ready = ready.filter(|memory| memory.len() >= bytes);
    let reserved =
        ready.is_none() && threads > 1 && fallocate(file, FallocateFlags::empty(), 0, bytes).is_ok();
    let mapped = reserved.then(|| Mapping::map(file, bytes, Access::Write)).transpose();
    let mapped = mapped.map_err(WriteFault::Io)?;
    let memory = ready.or(mapped.as_ref());
    let put = |at: u64, bytes: &[u8]| match memory {
        Some(memory) => {
            memory.copy_in(at, bytes);
            Ok(())
        }
        None => file.write_all_at(bytes, at).map_err(WriteFault::Io),
    };
    put(0, &front)?;
    let make = |(builder, out): &mut (PartBuilder, Vec<u8>), part: u64| {
        let part = part as usize;
        out.clear();
        for i in parts[part].0..parts[part + 1].0 {
            let Record { block, mode, sum, payload } = record(i);
            // Changes are counted for all at once.
            builder.push(block, &Encoded { mode, changes: 0, sum }, payload, out);
        }
        builder.close(out);
        let (at, end) = (parts[part].1, parts[part + 1].1);
        assert_eq!(out.len() as u64, end - at, "the length of part {part}");
        put(at, out)
    };
    work::each(threads, last as u64, stop, Default::default, make)?;
    put(at, &end)?;
    file.set_len(bytes).map_err(WriteFault::Io)?;
    Ok(bytes)
}

/// How long a part gets.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    records: usize,
    payload: usize,
    index: usize,
    next: u32,
}

impl Part {
    fn add(&mut self, record: &Record<'_>) {
        let len = record.payload.len();
        self.index += index_len(record.block - self.next, len as u32);
        self.next = record.block + 1;
        self.records += 1;
        self.payload += len;
    }

    fn bytes(&self) -> u64 {
        (PART_HEAD + self.index + self.payload) as u64
    }
}

/// [`Delta::parse`] by several threads.
pub fn parse(bytes: &[u8], threads: usize) -> Result<Delta<'_>, DeltaError> {
    let many = threads > 1 && bytes.len() >= SMALL;
    let Some((header, pieces)) = many.then(|| Delta::pieces(bytes)).flatten() else {
        return Delta::parse(bytes);
    };
    let one = |found: &mut Vec<(usize, Piece)>, i: u64| {
        let at = &pieces[i as usize];
        found.push((at.start, Piece::parse(&bytes[at.clone()], header.blocks)?));
        Ok::<(), DeltaError>(())
    };
    let found = work::claim(threads, pieces.len() as u64, Vec::new, one)?;
    let mut found: Vec<_> = found.into_iter().flatten().collect();
    found.sort_unstable_by_key(|(at, _)| *at);
    Delta::assemble(bytes, header, found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use windlass_core::delta::Mode;
    use windlass_core::digest::BlockSum;
    use windlass_core::identity::{CutsHash, Incarnation, LayoutHash, ModelId, StateDigest};

    use super::*;

    fn header(blocks: u32) -> DeltaHeader {
        DeltaHeader {
            model_id: ModelId::new("m").unwrap(),
            base: (Incarnation(1), 1),
            target: (Incarnation(1), 2),
            layout_hash: LayoutHash([1; 16]),
            cuts_hash: CutsHash([2; 16]),
            base_digest: StateDigest([3; 16]),
            target_digest: StateDigest([4; 16]),
            blocks,
        }
    }

    /// A container of `lengths` payloads, as one hand writes it, and as `threads` do.
    fn both(lengths: &[usize], threads: usize) -> (Vec<u8>, Vec<u8>) {
        let payloads: Vec<Vec<u8>> = lengths.iter().enumerate().map(|(i, n)| vec![i as u8; *n]).collect();
        let record = |i: usize| Record {
            block: i as u32 * 3,
            mode: Mode::Sparse,
            sum: BlockSum([i as u64, 7]),
            payload: &payloads[i],
        };
        let header = header(lengths.len() as u32 * 3 + 1);
        let (mut one, mut builder) = (header.to_bytes(), PartBuilder::new());
        for i in 0..payloads.len() {
            let Record { block, mode, sum, payload } = record(i);
            builder.push(block, &Encoded { mode, changes: 0, sum }, payload, &mut one);
        }
        builder.finish(&mut one);
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let stop = Stop::never();
        let ready = threads.is_multiple_of(2).then(|| {
            file.set_len(one.len() as u64 + 4096).unwrap();
            Mapping::map(&file, one.len() as u64 + 4096, Access::Write).unwrap()
        });
        let bytes =
            write(&file, &header, (payloads.len(), 0), record, threads, ready.as_ref(), &stop).unwrap();
        let mut many = vec![0; bytes as usize];
        file.read_exact_at(&mut many, 0).unwrap();
        assert_eq!(file.metadata().unwrap().len(), bytes);
        (one, many)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        #[test]
        fn a_container_by_many_threads_is_that_of_one(
            lengths in proptest::collection::vec(1usize..200_000, 0..120),
            threads in 1usize..6,
        ) {
            let (one, many) = both(&lengths, threads);
            prop_assert!(one == many);
            let (a, b) = (Delta::parse(&one).unwrap(), parse(&one, threads).unwrap());
            prop_assert_eq!(a.entries(), b.entries());
            // Offsets count from the bytes that were given, which go to a device as they are.
            let given = one.as_slice();
            prop_assert!(std::ptr::eq(a.bytes(), given) && std::ptr::eq(b.bytes(), given));
            prop_assert_eq!((a.header, a.changes, a.parts), (b.header, b.changes, b.parts));
        }

        #[test]
        fn damage_is_found_by_many_threads_as_by_one(at: proptest::sample::Index, bit in 0u8..8, cut: bool) {
            let (mut bytes, _) = both(&[90_000; 80], 1);
            let at = at.index(bytes.len());
            if cut {
                bytes.truncate(at);
            } else {
                bytes[at] ^= 1 << bit;
            }
            prop_assert!(Delta::parse(&bytes).is_err());
            prop_assert!(parse(&bytes, 3).is_err());
        }
    }
}
