//! What the receivers of one version are to each other: who asks whom, how much of an origin, in pieces of what size.
//!
//! Pure functions of how many there are: receivers that know that number come to the same answer without asking each other.

use super::MIN_STRIPE_BYTES;

/// About how many stripes all receivers together ask an origin for at a time.
const OPEN_IN_ALL: usize = 12;
/// How many relays a receiver is told of at a time.
pub const RELAYS: usize = 8;
/// About how many stripes an image is cut into for a swarm: a stripe is passed on when all of it is there.
const STRIPES: u64 = 512;
/// Deltas are a hundredth of an image, and are cut as finely as is allowed for longer.
const DELTA_STRIPES: u64 = 32 * STRIPES;

/// The stripes of an image, or of a delta to it, for a swarm. All its members must cut alike, whatever they ask for.
pub fn swarm_stripe_bytes(image: u64, delta: bool, most: u32) -> u32 {
    let (parts, least) =
        if delta { (DELTA_STRIPES, MIN_STRIPE_BYTES) } else { (STRIPES, 16 * MIN_STRIPE_BYTES) };
    let bytes = u32::try_from(image / parts).unwrap_or(u32::MAX);
    bytes.max(least).min(most.max(MIN_STRIPE_BYTES))
}

/// A receiver's place among those that receive the same version at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// How many had begun before it.
    pub rank: u32,
    /// How many there are, as far as is known.
    pub receivers: u32,
}

impl Place {
    /// A receiver that knows of no other.
    pub const ALONE: Place = Place { rank: 0, receivers: 1 };

    /// How many stripes it may ask an origin for at a time.
    pub(super) fn open(self) -> usize {
        (OPEN_IN_ALL / self.receivers.max(1) as usize).max(1)
    }

    /// Whether it is one of those that ask for stripes which no receiver was given, where so many stripes have the same
    /// origins. No more receivers do than there are stripes, and of every group others.
    pub(super) fn asks(self, group: u32, stripes: u32) -> bool {
        let turn = u64::from(self.rank) + u64::from(group) * u64::from(stripes);
        turn % u64::from(self.receivers.max(1)) < u64::from(stripes)
    }

    /// How many streams to an origin are of use to it. One more than it needs: a lost one delays it less.
    pub fn streams(self) -> usize {
        if self.receivers > 1 { self.open() + 1 } else { usize::MAX }
    }

    /// The stripe that it begins with: each rank halves the widest gap that the earlier ones have left.
    pub(super) fn start(self, stripes: u32) -> u32 {
        ((u64::from(self.rank.reverse_bits()) * u64::from(stripes)) >> 32) as u32
    }
}

/// The relays that a receiver is told of: so many of the others, by rank, in both directions and at doubling distances. So
/// every stripe is few steps from every receiver, and none passes on to more than twice as many as it is told of.
pub fn neighbours(rank: u32, receivers: u32, most: usize) -> Vec<u32> {
    let mut found = Vec::new();
    let steps = (0..31).map(|i| 1u32 << i).take_while(|step| *step < receivers);
    let (rank, n) = (u64::from(rank), u64::from(receivers));
    for step in steps.map(u64::from) {
        for other in [(rank + step) % n, (rank + n - step) % n] {
            let other = other as u32;
            if other != rank as u32 && !found.contains(&other) && found.len() < most {
                found.push(other);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_of_a_swarm_are_small_but_allowed() {
        assert_eq!(swarm_stripe_bytes(64 << 20, false, 16 << 20), 128 << 10);
        assert_eq!(swarm_stripe_bytes(16 << 30, false, 16 << 20), 16 << 20);
        assert_eq!(swarm_stripe_bytes(64 << 20, true, 16 << 20), MIN_STRIPE_BYTES);
        assert_eq!(swarm_stripe_bytes(16 << 30, true, 16 << 20), 1 << 20);
        assert_eq!(swarm_stripe_bytes(0, true, 0), MIN_STRIPE_BYTES);
    }
}
