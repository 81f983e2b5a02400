//! Plain or context records for one delta, by the rate of the receiver's link.
//!
//! Context records are smaller. They cost the publisher a pass over the changed blocks, once for each delta, and each
//! receiver another one. So plain records are faster as soon as
//!
//! ```text
//! plain bytes / rate < context bytes / rate + encode + decode
//! ```
//!
//! with the time for encoding only while the context form is not there yet. The figures that this rests on:
//!
//! | constant | value | source |
//! |---|---|---|
//! | [`CONTEXT_SHARE`] | 0.753 | `bench/runs/2026-11-15-xeon-2core/codec-1.json`: 1,337,572 / 1,776,219 bytes at 1 % |
//! | [`ENCODE_BYTES_PER_SECOND`] | 3.38 GB/s | the same: `context.seal_gbps`, two threads, bytes of image |
//! | [`DECODE_BYTES_PER_SECOND`] | 3.13 GB/s | the same: `context.apply_gbps`, two threads, bytes of image |
//!
//! At 1 % of changes, links below about 3 MB/s are worth it. A host with more cores gains from somewhat faster ones
//! too; the figures of two cores err on the side of plain.

use crate::wire::Codec;
use crate::wire::control::CodecWanted;

/// Size of a delta with context records, as a share of the plain one.
pub const CONTEXT_SHARE: f64 = 0.753;
/// How fast a publisher makes context records, in bytes of image.
pub const ENCODE_BYTES_PER_SECOND: f64 = 3.38e9;
/// How fast a receiver decodes context records, in bytes of image.
pub const DECODE_BYTES_PER_SECOND: f64 = 3.13e9;

/// A delta that can be sent in either form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub image: u64,
    pub plain: u64,
    /// Size with context records, once these are made.
    pub context: Option<u64>,
}

impl Sizes {
    /// Seconds that context records save on a link of `rate` bytes per second; negative if plain ones are faster.
    pub fn saved_seconds(&self, rate: u64) -> f64 {
        let image = self.image as f64;
        let (context, encode) = match self.context {
            Some(bytes) => (bytes as f64, 0.0),
            None => (self.plain as f64 * CONTEXT_SHARE, image / ENCODE_BYTES_PER_SECOND),
        };
        let wire = (self.plain as f64 - context) / rate.max(1) as f64;
        wire - encode - image / DECODE_BYTES_PER_SECOND
    }
}

/// The form for a receiver that wants `wanted` and measured `rate` bytes per second, with the reason.
pub fn pick(wanted: CodecWanted, rate: Option<u64>, sizes: Sizes) -> (Codec, String) {
    match (wanted, rate) {
        (CodecWanted::Plain, _) => (Codec::Plain, "the receiver asked for plain records".into()),
        (CodecWanted::Context, _) => (Codec::Context, "the receiver asked for context records".into()),
        (CodecWanted::Auto, None) => (Codec::Plain, "the rate of the link is not known yet".into()),
        (CodecWanted::Auto, Some(rate)) => {
            let (saved, megabytes) = (sizes.saved_seconds(rate) * 1e3, rate as f64 / 1e6);
            if saved > 0.0 {
                (Codec::Context, format!("at {megabytes:.2} MB/s context records save {saved:.0} ms"))
            } else {
                (Codec::Plain, format!("at {megabytes:.2} MB/s context records would cost {:.0} ms", -saved))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The delta of the run that the figures are from.
    const RUN: Sizes = Sizes { image: 268_434_432, plain: 1_776_219, context: None };

    #[test]
    fn context_records_are_picked_by_the_time_they_save() {
        let auto = |rate, sizes| pick(CodecWanted::Auto, rate, sizes).0;
        assert_eq!(auto(Some(1_000_000), RUN), Codec::Context);
        assert_eq!(auto(Some(10_000_000), RUN), Codec::Plain);
        assert_eq!(auto(None, RUN), Codec::Plain);
        assert_eq!(auto(Some(0), RUN), Codec::Context);
        // Once they are made, faster links gain too, unless they turned out no smaller.
        let made = Sizes { context: Some(1_337_572), ..RUN };
        assert_eq!((auto(Some(4_000_000), RUN), auto(Some(4_000_000), made)), (Codec::Plain, Codec::Context));
        assert_eq!(auto(Some(1_000), Sizes { context: Some(RUN.plain), ..RUN }), Codec::Plain);
    }

    #[test]
    fn a_wish_for_a_codec_stands_above_the_rate() {
        for rate in [None, Some(1), Some(u64::MAX)] {
            assert_eq!(pick(CodecWanted::Plain, rate, RUN).0, Codec::Plain);
            assert_eq!(pick(CodecWanted::Context, rate, RUN).0, Codec::Context);
        }
    }
}
