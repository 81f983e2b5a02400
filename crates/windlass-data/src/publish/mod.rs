//! One rank of a publisher, in copy mode or in delta mode.
//!
//! | module | what it owns |
//! |---|---|
//! | `publisher` | the state machine of a rank: idle, copying, staging or working in the background |
//! | `delta_mode` | what a rank in delta mode knows of the slots, and the background work of each version |
//! | `records` | the change that an encoder found, in host memory |
//! | `staging` | the encoder for tensors in host memory |
//! | `apply` | records into the slot that lags behind |
//! | `folder` | the region's `parts/`: names, contents, garbage |
//!
//! Owns: everything that a rank does to publish a version, and the directory `parts/` of a region. The agent's side of
//! delta mode is in [`crate::serve`]; [`windlass_core::delta_mode`] decides whether the deltas of all ranks are one.
//! Called by the binding, the roles, the demo and the benchmarks. Must not: change the protocol of the region's header,
//! or make any process wait for a part.
//!
//! # Copy mode
//!
//! [`Publisher::copy`], or [`Publisher::begin`], writes into [`Publisher::target`] and [`Publisher::commit`]. Calls in
//! another order are refused by name ([`PublishError::Turn`]).
//!
//! # Delta mode
//!
//! In copy mode a version is visible when its slot is written, committed and compared with the slot before. Where ranks
//! know what changed (a GPU that keeps a baseline compares in one pass), a version is decided the moment that the records
//! of all ranks are in host memory, and those are a hundredth of the image. So they go to receivers at once, and the slot
//! follows. [`Publisher::use_deltas`] turns delta mode on. A version is then [`Publisher::stage`]d and
//! [`Publisher::publish_staged`], or published from an encoder's records ([`Publisher::publish`]).
//!
//! # Files
//!
//! ```text
//! parts/<rank>.roster                 which blocks a rank answers for; written when it takes its place
//! parts/<version>-<rank>.wdelta       its delta from the version before; whole or not there
//! parts/<version>.doubt               written by the agent: what was handed out up to this version contradicts itself
//! ```
//!
//! Ranks have 5 decimal digits and versions 20. A roster and a rank's delta are specified in
//! [`windlass_core::delta_mode`]. All are written as drafts and renamed. A doubt holds the reason as text; only its name
//! counts.
//!
//! # One version
//!
//! A rank that has the records from `base`, the newest committed version, to `version`
//!
//! 1. puts its delta into `parts/` and rings the region's bell; engines are then given a moment to fetch it, unless a
//!    caller waits for the commit;
//! 2. begins an attempt for `version` with all other ranks, as in copy mode, and brings its blocks of the target slot to
//!    `version`: the slot holds the version before `base`, so the records of the last two versions are applied to it, and
//!    the sum of every block is checked on the way. Where it is not known what the slot holds (the version before came as
//!    a copy, an attempt was given up), the blocks are copied from the slot of `base` first, which is a copy from memory to
//!    memory;
//! 3. is done, and the version is committed.
//!
//! All of it happens in a thread of the rank's process while training goes on. The next version waits for it, and gets
//! its error. The agent, as soon as all ranks have done step 1 and if the version it serves is exactly `base` with the
//! sums that the deltas begin from, serves `version` by delta: what it says of the version, its digest included, is what
//! its slot will hold. Full images are those of the newest whole slot meanwhile. The seal of the slot then has nothing to
//! compute; every so many versions the agent sums its bytes all the same.
//!
//! A delta that is missing, late, torn or contradicts what is known costs nothing but time: the slot is committed and
//! sealed as always. Ranks may differ: one that copies and one that brings a delta fill the same slot in the same attempt,
//! and the version is served when its slot is sealed.
//!
//! # When a copy is needed
//!
//! [`Publisher::way`] says so: the first version; a rank that was restarted; a background failure of any kind, of this rank or
//! of another one in the same attempt; another rank's version in between; a doubt of the agent.
//!
//! # A number is given once
//!
//! From step 1 on a version may be in use somewhere. If its slot then fails to be committed, the same number must not be
//! given to other bytes. So a rank that has written its delta of a version takes part in writing it again only with the
//! bytes that its delta leads to; a later number is always fine. This also holds for
//! a successor of the rank, which finds the delta in `parts/`.
//!
//! # Garbage
//!
//! A rank removes its own deltas once their version is sealed or committed and two versions old, and all its leftovers
//! when it takes its place. The agent removes every part that is older than the version it has sealed.
//!
//! # Several hosts
//!
//! Where regions hold parts of an image, ranks bring no deltas to the agent: versions are served when their slots are
//! whole. Slots are still brought up to date from records, so that a trainer is not kept waiting either.
//!
//! # Invariants and their tests
//!
//! - DELTA-MODE-1 A slot that is committed holds exactly what the trainer had, whichever way each rank took:
//!   `slots_that_follow_by_records_hold_what_a_copy_would`, `ranks_that_copy_and_ranks_that_bring_deltas_fill_one_slot`.
//! - DELTA-MODE-2 What is served by delta is what the slot holds later: `a_version_is_served_by_delta_before_its_slot_is_whole`.
//! - DELTA-MODE-3 Death anywhere leaves the version before readable, and publishing goes on:
//!   `a_rank_killed_at_every_step_of_a_delta_leaves_nothing_wrong`, `an_agent_killed_while_it_joins_is_made_up_for`.
//! - DELTA-MODE-4 Torn and contradicting deltas are never served: `torn_and_contradicting_parts_are_sealed_the_ordinary_way`.
//! - DELTA-MODE-5 A number that was handed out is not given to other bytes: `a_number_that_was_handed_out_is_not_given_to_other_bytes`.
//! - DELTA-MODE-6 Nothing is left behind: `parts_of_the_dead_and_of_the_past_are_collected`.

mod apply;
mod delta_mode;
mod error;
mod folder;
mod publisher;
mod records;
mod staging;
#[cfg(test)]
pub(crate) mod tests;

pub use self::delta_mode::{Base, DeltaSource, Way};
pub use self::error::PublishError;
pub(crate) use self::folder::open;
pub use self::folder::{Folder, Part};
pub use self::publisher::{Publisher, wait_sealed};
pub use self::records::{Records, RecordsFault};
pub use self::staging::Staging;
