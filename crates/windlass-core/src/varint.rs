//! Numbers below 2^32 in groups of seven bits, lowest first, in their shortest form.

/// A fault in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VarintFault {
    /// The bytes end within it.
    Truncated,
    /// It has more groups than it needs.
    Overlong,
    /// It has more than 32 bits.
    TooWide,
}

impl VarintFault {
    /// The fault as text.
    pub(crate) fn why(self) -> &'static str {
        match self {
            VarintFault::Truncated => "it ends within a varint",
            VarintFault::Overlong => "a varint is longer than it needs to be",
            VarintFault::TooWide => "a varint is larger than 32 bits",
        }
    }
}

/// Appends a number.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Takes a number off the front.
pub(crate) fn take_varint(bytes: &mut &[u8]) -> Result<u32, VarintFault> {
    let mut value = 0u64;
    for (i, &b) in bytes.iter().take(5).enumerate() {
        value |= u64::from(b & 0x7f) << (7 * i);
        if b < 0x80 {
            if b == 0 && i > 0 {
                return Err(VarintFault::Overlong);
            }
            *bytes = &bytes[i + 1..];
            return u32::try_from(value).map_err(|_| VarintFault::TooWide);
        }
    }
    Err(if bytes.len() < 5 { VarintFault::Truncated } else { VarintFault::TooWide })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn varints_round_trip(value: u32) {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            let mut rest = out.as_slice();
            prop_assert_eq!(take_varint(&mut rest), Ok(value));
            prop_assert!(rest.is_empty());
            prop_assert_eq!(take_varint(&mut &out[..out.len() - 1]), Err(VarintFault::Truncated));
        }
    }

    #[test]
    fn odd_varints_are_refused() {
        assert_eq!(take_varint(&mut [0x80, 0x00].as_slice()), Err(VarintFault::Overlong));
        assert_eq!(take_varint(&mut [0xff, 0xff, 0xff, 0xff, 0x1f].as_slice()), Err(VarintFault::TooWide));
        assert_eq!(take_varint(&mut [0xff; 9].as_slice()), Err(VarintFault::TooWide));
    }
}
