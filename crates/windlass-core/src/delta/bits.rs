//! Bit fields in byte strings, lowest bit first.

/// Appends bit fields to a byte string.
///
/// Functions that write many fields take it by value and give it back: behind a reference its state would
/// live in memory, and every field would wait for the one before.
#[derive(Debug)]
pub struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    word: u64,
    used: u32,
}

impl<'a> BitWriter<'a> {
    /// Begins a section at the end of `out`.
    pub fn new(out: &'a mut Vec<u8>) -> BitWriter<'a> {
        BitWriter { out, word: 0, used: 0 }
    }

    /// Appends the low `width` bits of `value`; the others must be zero, `width` at most 64.
    #[inline(always)]
    pub fn put(&mut self, value: u64, width: u32) {
        self.word |= value << self.used;
        let used = self.used + width;
        if used >= 64 {
            push_word(self.out, self.word);
            self.word = if self.used == 0 { 0 } else { value >> (64 - self.used) };
            self.used = used - 64;
        } else {
            self.used = used;
        }
    }

    /// Fills up the last byte with zeros and ends the section.
    pub fn finish(self) {
        let bytes = self.used.div_ceil(8) as usize;
        self.out.extend_from_slice(&self.word.to_le_bytes()[..bytes]);
    }
}

/// Appends unary numbers to a byte string: n zeros and a one.
///
/// As with [`BitWriter`], functions that write many take it by value and give it back.
#[derive(Debug)]
pub struct UnaryWriter<'a> {
    out: &'a mut Vec<u8>,
    word: u64,
    /// Which word of the section that is, and the bit after the last one.
    index: u64,
    at: u64,
}

impl<'a> UnaryWriter<'a> {
    /// Begins a section at the end of `out`.
    pub fn new(out: &'a mut Vec<u8>) -> UnaryWriter<'a> {
        UnaryWriter { out, word: 0, index: 0, at: 0 }
    }

    /// Appends `zeros` zeros and a one.
    #[inline(always)]
    pub fn put(&mut self, zeros: u64) {
        let one = self.at + zeros;
        while one / 64 != self.index {
            push_word(self.out, self.word);
            self.word = 0;
            self.index += 1;
        }
        self.word |= 1 << (one % 64);
        self.at = one + 1;
    }

    /// Fills up the last byte with zeros and ends the section.
    pub fn finish(self) {
        let bytes = (self.at - self.index * 64).div_ceil(8) as usize;
        self.out.extend_from_slice(&self.word.to_le_bytes()[..bytes]);
    }
}

/// Kept out of line: growing the vector would otherwise slow down every field.
#[inline(never)]
fn push_word(out: &mut Vec<u8>, word: u64) {
    out.extend_from_slice(&word.to_le_bytes());
}

/// Calls `each` with `count` fields of `width` bits in turn, the first at bit `at`; at most 57 bits each.
#[inline(always)]
pub fn each_field(bytes: &[u8], at: usize, width: u32, count: usize, mut each: impl FnMut(usize, u64)) {
    let mut rest = bytes.get(at / 8..).unwrap_or(&[]);
    let mut skip = (at % 8) as u32;
    let mask = (1u64 << width) - 1;
    let mut i = 0;
    // The number of whole fields that a word holds, at any first bit.
    if let Some(per_word) = 57u32.checked_div(width) {
        while let Some(word) = rest.first_chunk::<8>()
            && i + per_word as usize <= count
        {
            let mut word = u64::from_le_bytes(*word) >> skip;
            for _ in 0..per_word {
                each(i, word & mask);
                word >>= width;
                i += 1;
            }
            skip += per_word * width;
            rest = &rest[(skip / 8) as usize..];
            skip %= 8;
        }
    }
    let at = (bytes.len() - rest.len()) * 8 + skip as usize;
    for j in 0..count - i {
        each(i + j, bits_at(bytes, at + j * width as usize, width));
    }
}

/// The `width` bits at bit `at`; at most 57. Bits past the end are zero.
#[inline(always)]
pub fn bits_at(bytes: &[u8], at: usize, width: u32) -> u64 {
    let word = word_at(bytes, at / 8) >> (at % 8);
    word & ((1 << width) - 1)
}

/// As [`bits_at`], for up to 64 bits.
#[inline(always)]
pub fn wide_bits_at(bytes: &[u8], at: usize, width: u32) -> u64 {
    if width <= 57 {
        bits_at(bytes, at, width)
    } else {
        bits_at(bytes, at, 32) | bits_at(bytes, at + 32, width - 32) << 32
    }
}

/// The eight bytes at `at`, those past the end as zeros.
#[inline(always)]
fn word_at(bytes: &[u8], at: usize) -> u64 {
    match bytes.get(at..).and_then(|b| b.first_chunk::<8>()) {
        Some(word) => u64::from_le_bytes(*word),
        None => tail_word(bytes, at),
    }
}

#[cold]
fn tail_word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(tail) = bytes.get(at..) {
        let n = tail.len().min(8);
        word[..n].copy_from_slice(&tail[..n]);
    }
    u64::from_le_bytes(word)
}

/// Replaces `out` by the numbers of the first `count` bits that are one, and takes the section that ends with
/// the last of them off the front.
pub fn take_ones(bytes: &mut &[u8], count: usize, out: &mut Vec<u32>) -> Result<(), &'static str> {
    out.clear();
    out.resize(count, 0);
    let (words, tail) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    let words = words.iter().chain(std::iter::once(&last));
    let mut slots = out.iter_mut();
    'words: for (i, word) in words.enumerate() {
        let mut word = u64::from_le_bytes(*word);
        while word != 0 {
            let Some(slot) = slots.next() else { break 'words };
            *slot = (i * 64) as u32 + word.trailing_zeros();
            word &= word - 1;
        }
    }
    if slots.next().is_some() {
        return Err("it has fewer changes than it says");
    }
    take_section(bytes, out.last().map_or(0, |&one| one as usize + 1))?;
    Ok(())
}

/// Bytes of a section of this many bits.
pub const fn section(bits: usize) -> usize {
    bits.div_ceil(8)
}

/// Takes a section of this many bits off the front, if it is complete and its padding is zero.
pub fn take_section<'a>(bytes: &mut &'a [u8], bits: usize) -> Result<&'a [u8], &'static str> {
    let Some((head, rest)) = bytes.split_at_checked(section(bits)) else {
        return Err("it ends within a section");
    };
    if !bits.is_multiple_of(8) && head.last().is_some_and(|b| b >> (bits % 8) != 0) {
        return Err("a section is not filled up with zeros");
    }
    *bytes = rest;
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bit_fields_round_trip(fields in prop::collection::vec((any::<u64>(), 0u32..=64), 0..200)) {
            let fields: Vec<_> = fields.into_iter().map(|(v, w)| (if w == 64 { v } else { v & ((1 << w) - 1) }, w)).collect();
            let mut out = vec![7];
            let mut writer = BitWriter::new(&mut out);
            fields.iter().for_each(|&(v, w)| writer.put(v, w));
            writer.finish();
            let total: u32 = fields.iter().map(|f| f.1).sum();
            prop_assert_eq!(out.len(), 1 + section(total as usize));
            let mut at = 0;
            for (v, w) in fields {
                prop_assert_eq!(wide_bits_at(&out[1..], at, w), v);
                at += w as usize;
            }
        }

        #[test]
        fn unary_round_trips(zeros in prop::collection::vec(prop_oneof![0u64..5, 0u64..300], 0..100)) {
            let mut out = Vec::new();
            let mut writer = UnaryWriter::new(&mut out);
            zeros.iter().for_each(|&z| writer.put(z));
            writer.finish();
            let mut ones = Vec::new();
            let mut rest = out.as_slice();
            prop_assert!(take_ones(&mut out.as_slice(), zeros.len() + 1, &mut ones).is_err());
            take_ones(&mut rest, zeros.len(), &mut ones).unwrap();
            prop_assert!(rest.is_empty());
            let mut before = 0;
            let read: Vec<u64> = ones.iter().map(|&one| {
                let z = one - before;
                before = one + 1;
                u64::from(z)
            }).collect();
            prop_assert_eq!(read, zeros);
        }
    }
}
