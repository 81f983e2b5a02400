//! Commands on files, hosts and services that run to an end.
//!
//! | module | owns |
//! |---|---|
//! | [`delta`] | `windlass delta make`, `apply` |
//! | [`diff`] | `windlass diff` |
//! | [`inspect`] | `windlass inspect` |
//! | [`verify`] | `windlass verify` |
//! | [`gc`] | `windlass gc` |
//! | [`store`] | `windlass store`, `windlass gc URL` |
//! | [`gate`] | `windlass gate` |
//! | [`top`] | `windlass top` |
//! | [`doctor`] | `windlass doctor` |
//! | [`init`] | `windlass init` |
//! | [`limits`] | how fast this machine reads, copies and sends |
//! | [`outfile`] | atomic output files |

pub(crate) mod delta;
pub(crate) mod diff;
pub(crate) mod doctor;
pub(crate) mod gate;
pub(crate) mod gc;
pub(crate) mod init;
pub(crate) mod inspect;
pub(crate) mod limits;
pub(crate) mod outfile;
pub(crate) mod store;
pub(crate) mod top;
pub(crate) mod verify;
