//! Commands that look at files, hosts and services, and end.
//!
//! | module | owns |
//! |---|---|
//! | [`delta`] | `windlass delta make`, `apply`, `show` |
//! | [`diff`] | `windlass diff` |
//! | [`inspect`] | `windlass inspect` |
//! | [`verify`] | `windlass verify` |
//! | [`gc`] | `windlass gc` |
//! | [`gate`] | `windlass gate` |
//! | [`top`] | `windlass top` |
//! | [`doctor`] | `windlass doctor` |
//! | [`limits`] | how fast this machine reads, copies and sends |
//! | [`outfile`] | output files that are whole or absent |

pub mod delta;
pub mod diff;
pub mod doctor;
pub mod gate;
pub mod gc;
pub mod inspect;
pub mod limits;
pub mod outfile;
pub mod top;
pub mod verify;
