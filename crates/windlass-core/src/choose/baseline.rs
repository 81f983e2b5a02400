//! Where a trainer keeps its baseline: in GPU memory, in page-locked host memory that the GPU reads over the bus, or in both.
//!
//! Owns: [`place`], the decision, and the expected cost of a placement. Called by [`super::choose`] and by the rank that
//! allocates. Must not: ask a driver; free memory is an argument.
//!
//! The first part of the weights is in GPU memory, as much of it as fits, and the tail is on the host. Records of a pass are always in
//! GPU memory: a record that finds no room there is read from the baseline instead, so too little room costs bytes, not an error.

use std::fmt;
use std::str::FromStr;

use crate::error::Kind;

/// The share of the weights that records have room for, as a divisor.
const ROOM: u64 = 16;
/// The same where GPU memory is short: at 1 % of the elements changed, records take half of it.
const SMALL_ROOM: u64 = 64;
/// The least memory that stays free on the device for the trainer.
const RESERVE: u64 = 1 << 30;
/// The same as a share of the device's memory, as a divisor.
const RESERVE_SHARE: u64 = 20;
/// The share of free host memory that stays free, as a divisor.
const HOST_SHARE: u64 = 10;

/// Bytes a second at which a pass reads weights and baseline in GPU memory, by the weights' bytes (H200, bf16).
const PASS: f64 = 1.7e12;
/// Bytes a second at which a kernel reads page-locked host memory (PCIe 5, 16 lanes; PCIe 4 has half, here and for copies).
const BUS: f64 = 50e9;
/// Bytes a second at which all weights are copied to the host, over the same bus.
const COPY: f64 = 53e9;

/// Where the configuration wants the baseline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// As much on the device as leaves the reserve, the remainder on the host.
    #[default]
    Auto,
    /// All of it on the device.
    Device,
    /// All of it on the host.
    Host,
    /// At most this many bytes of device memory, records included.
    AtMost(u64),
}

impl FromStr for Keep {
    type Err = ();

    fn from_str(text: &str) -> Result<Keep, ()> {
        match text {
            "auto" => Ok(Keep::Auto),
            "device" => Ok(Keep::Device),
            "host" => Ok(Keep::Host),
            _ => Err(()),
        }
    }
}

/// The request for a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Bytes that the rank publishes.
    pub weights: u64,
    /// Bytes of records that a pass may make, if not a sixteenth of that.
    pub records: Option<u64>,
    pub keep: Keep,
    /// Whether the configuration demands deltas. If not, [`Keep::Auto`] takes at most half of the free device memory, because
    /// the later needs of training are unknown.
    pub is_demanded: bool,
}

/// The available memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Have {
    /// Bytes that are free on the device.
    pub free: u64,
    /// Bytes that it has, if known.
    pub total: Option<u64>,
    /// Bytes of host memory that this rank can have, if known.
    pub host: Option<u64>,
}

/// The placement of a baseline: the first part of the weights, the remainder, and the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Bytes of the weights on the device.
    pub device: u64,
    /// Bytes of the weights on the host.
    pub host: u64,
    /// Bytes for records, on the device.
    pub records: u64,
}

impl Placed {
    /// Seconds that a pass is expected to take.
    pub fn compare_seconds(&self) -> f64 {
        (self.device + self.host) as f64 / PASS + self.host as f64 / BUS
    }

    /// Seconds that copying the same weights is expected to take.
    pub fn copy_seconds(&self) -> f64 {
        (self.device + self.host) as f64 / COPY
    }

    /// Whether a pass is expected to keep the trainer for less time than a copy.
    pub fn is_cheaper(&self) -> bool {
        self.host == 0 || self.compare_seconds() < self.copy_seconds()
    }
}

/// Why a baseline cannot be placed as wanted. The text includes the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The device has no room.
    Device {
        /// Bytes that are needed there.
        needs: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The host has no room.
    Host {
        /// Bytes that are needed there.
        needs: u64,
        /// Bytes that this rank may take.
        may: u64,
        /// Bytes that are needed on the device for all of it.
        whole: u64,
        /// Bytes that are free on the device.
        free: u64,
    },
}

impl Refused {
    /// The kind of failure.
    pub fn kind(&self) -> Kind {
        Kind::Exhausted
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64);
        match *self {
            Refused::Device { needs, free } => write!(
                f,
                "the baseline of delta mode needs {} of GPU memory, and {} are free: let a part of it be on the host \
                 (baseline=\"auto\"), shard the weights over more GPUs, leave more memory to the trainer (vLLM: \
                 gpu_memory_utilization), or publish by copy (offload_mode=\"copy\")",
                gib(needs),
                gib(free)
            ),
            Refused::Host { needs, may, whole, free } => write!(
                f,
                "the baseline of delta mode needs {} of page-locked host memory, and this rank may take {}; all of it takes {} of GPU \
                 memory, of which {} are free: raise the container's memory limit (docker --memory, Kubernetes \
                 resources.limits.memory), leave more GPU memory to the trainer (vLLM: gpu_memory_utilization), or publish by copy \
                 (offload_mode=\"copy\")",
                gib(needs),
                gib(may),
                gib(whole),
                gib(free)
            ),
        }
    }
}

impl std::error::Error for Refused {}

/// The memory that stays free on a device of this size.
pub fn reserve(total: Option<u64>) -> u64 {
    RESERVE.max(total.unwrap_or(0) / RESERVE_SHARE)
}

/// Places the baseline, or says why it cannot be placed.
pub fn place(ask: &Ask, have: &Have) -> Result<Placed, Refused> {
    let (weights, free) = (ask.weights, have.free);
    let room = ask.records.unwrap_or(weights.div_ceil(ROOM));
    let small = ask.records.unwrap_or(weights.div_ceil(SMALL_ROOM));
    let spare = reserve(have.total);
    let (most, budget) = match ask.keep {
        Keep::Device => {
            let needs = weights.saturating_add(room);
            let all = Placed { device: weights, host: 0, records: room };
            return if needs <= free { Ok(all) } else { Err(Refused::Device { needs, free }) };
        }
        Keep::Auto if ask.is_demanded => (weights, free.saturating_sub(spare)),
        Keep::Auto => (weights, free.saturating_sub(spare).min(free / 2)),
        Keep::Host => (0, free.saturating_sub(spare)),
        Keep::AtMost(bytes) => (weights, free.min(bytes)),
    };
    let records = if room <= budget { room } else { small };
    if records > free {
        return Err(Refused::Device { needs: records, free });
    }
    let device = most.min(budget.saturating_sub(records));
    let host = weights - device;
    let may = have.host.map_or(u64::MAX, |free| free - free / HOST_SHARE);
    if host <= may {
        return Ok(Placed { device, host, records });
    }
    let whole = weights.saturating_add(room);
    if ask.keep == Keep::Auto && ask.is_demanded && whole <= free {
        // The reserve is optional, and the configuration demands deltas.
        return Ok(Placed { device: weights, host: 0, records: room });
    }
    Err(Refused::Host { needs: host, may, whole, free })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const G: u64 = 1 << 30;

    fn ask(weights: u64, keep: Keep) -> Ask {
        Ask { weights, records: None, keep, is_demanded: true }
    }

    fn have(free: u64, host: u64) -> Have {
        Have { free, total: Some(140 * G), host: Some(host) }
    }

    #[test]
    fn a_baseline_that_fits_is_on_the_device_and_leaves_the_reserve() {
        let all = Placed { device: 16 * G, host: 0, records: G };
        assert_eq!(place(&ask(16 * G, Keep::Auto), &have(24 * G, 0)), Ok(all));
        // A twentieth of 140 GiB is 7; with one byte less than that, one byte is on the host.
        assert_eq!(
            place(&ask(16 * G, Keep::Auto), &have(24 * G - 1, 64 * G)),
            Ok(Placed { device: 16 * G - 1, host: 1, records: G })
        );
        assert_eq!((reserve(None), reserve(Some(10 * G)), reserve(Some(140 * G))), (G, G, 7 * G));
    }

    #[test]
    fn with_an_engine_on_the_device_the_tail_is_on_the_host() {
        // An 8B model on an H200, of which 11.6 GiB are free.
        let free = 116 * G / 10;
        let placed = place(&ask(153 * G / 10, Keep::Auto), &have(free, 64 * G)).unwrap();
        assert_eq!(placed.device + placed.records, free - 7 * G);
        assert_eq!(placed.device + placed.host, 153 * G / 10);
        assert!(placed.is_cheaper(), "{placed:?}");
        assert!((0.2..0.3).contains(&placed.compare_seconds()), "{}", placed.compare_seconds());
        // Half of what is free, where deltas are not demanded.
        let roomy = Ask { is_demanded: false, ..ask(16 * G, Keep::Auto) };
        let placed = place(&roomy, &have(30 * G, 64 * G)).unwrap();
        assert_eq!(placed, Placed { device: 14 * G, host: 2 * G, records: G });
    }

    #[test]
    fn a_device_without_room_for_records_gives_them_a_quarter() {
        let placed = place(&ask(64 * G, Keep::Auto), &have(8 * G, 128 * G)).unwrap();
        assert_eq!(placed, Placed { device: 0, host: 64 * G, records: G });
        assert!(!placed.is_cheaper(), "all of it over the bus is a copy");
        let e = place(&ask(64 * G, Keep::Auto), &have(G / 2, 128 * G)).unwrap_err();
        assert_eq!(e, Refused::Device { needs: G, free: G / 2 });
        // An explicit number of records is taken as it is.
        let counted = Ask { records: Some(2 * G), ..ask(64 * G, Keep::Host) };
        assert_eq!(place(&counted, &have(8 * G, 128 * G)).unwrap().records, 2 * G);
    }

    #[test]
    fn what_is_demanded_is_taken_or_refused_by_name() {
        let whole = |free| place(&ask(16 * G, Keep::Device), &have(free, 0));
        assert_eq!(whole(17 * G), Ok(Placed { device: 16 * G, host: 0, records: G }));
        let e = whole(17 * G - 1).unwrap_err();
        assert_eq!((e, e.kind()), (Refused::Device { needs: 17 * G, free: 17 * G - 1 }, Kind::Exhausted));
        for part in ["17.0 GiB", "baseline=\"auto\"", "gpu_memory_utilization", "offload_mode=\"copy\""] {
            assert!(e.to_string().contains(part), "{e}");
        }
        let host = place(&ask(16 * G, Keep::Host), &have(100 * G, 64 * G));
        assert_eq!(host, Ok(Placed { device: 0, host: 16 * G, records: G }));
        let some = place(&ask(16 * G, Keep::AtMost(5 * G)), &have(100 * G, 64 * G));
        assert_eq!(some, Ok(Placed { device: 4 * G, host: 12 * G, records: G }));
        let none = place(&ask(16 * G, Keep::AtMost(0)), &have(100 * G, 64 * G));
        assert_eq!(none, Ok(Placed { device: 0, host: 16 * G, records: G / 4 }));
        let e = place(&ask(16 * G, Keep::Host), &have(100 * G, 16 * G)).unwrap_err();
        for part in
            ["needs 16.0 GiB of page-locked", "may take 14.4 GiB", "100.0 GiB are free", "docker --memory"]
        {
            assert!(e.to_string().contains(part), "{e}");
        }
    }

    #[test]
    fn a_host_without_room_costs_the_reserve_where_deltas_are_demanded() {
        let all = Placed { device: 16 * G, host: 0, records: G };
        assert_eq!(place(&ask(16 * G, Keep::Auto), &have(18 * G, 0)), Ok(all));
        let modest = Ask { is_demanded: false, ..ask(16 * G, Keep::Auto) };
        assert!(matches!(place(&modest, &have(18 * G, 0)), Err(Refused::Host { .. })));
        assert!(matches!(place(&ask(16 * G, Keep::Auto), &have(16 * G, 0)), Err(Refused::Host { .. })));
    }

    #[test]
    fn names_of_places_are_few() {
        let of = |text: &str| text.parse::<Keep>();
        assert_eq!(
            (of("auto"), of("device"), of("host")),
            (Ok(Keep::Auto), Ok(Keep::Device), Ok(Keep::Host))
        );
        assert_eq!((of("gpu"), of("")), (Err(()), Err(())));
    }

    proptest! {
        #[test]
        fn a_placement_is_all_of_the_weights_and_within_what_there_is(
            weights in 0u64..1 << 40,
            records in prop::option::of(0u64..1 << 38),
            which in 0u8..4,
            most in 0u64..1 << 40,
            is_demanded: bool,
            free in 0u64..1 << 40,
            total in prop::option::of(1u64 << 30..1 << 41),
            host in prop::option::of(0u64..1 << 41),
        ) {
            let keep = [Keep::Auto, Keep::Device, Keep::Host, Keep::AtMost(most)][which as usize];
            let (ask, have) = (Ask { weights, records, keep, is_demanded }, Have { free, total, host });
            match place(&ask, &have) {
                Ok(placed) => {
                    prop_assert_eq!(placed.device + placed.host, weights);
                    prop_assert!(placed.device + placed.records <= free, "{:?}", placed);
                    prop_assert!(host.is_none_or(|host| placed.host <= host));
                    prop_assert!(records.is_none_or(|records| placed.records == records));
                    prop_assert!(keep != Keep::Device || placed.host == 0);
                    prop_assert!(keep != Keep::Host || placed.device == 0);
                    if let Keep::AtMost(most) = keep {
                        prop_assert!(placed.device == 0 || placed.device + placed.records <= most);
                    }
                    if placed.device > 0 && keep == Keep::Auto && !is_demanded {
                        prop_assert!(placed.device + placed.records <= free / 2);
                    }
                    if placed.device > 0 && placed.host > 0 && keep == Keep::Auto {
                        prop_assert!(free - placed.device - placed.records >= reserve(total));
                    }
                }
                Err(Refused::Device { needs, free: told }) => prop_assert!(needs > told && told == free),
                Err(Refused::Host { needs, may, .. }) => prop_assert!(needs > may && may <= host.unwrap_or(0)),
            }
        }
    }
}
