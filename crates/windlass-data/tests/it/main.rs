//! The integration tests of the data plane, as one program: it is linked once.

mod attacks;
mod authority;
mod conformance;
mod delta_mode;
mod engines;
mod faults;
mod memory;
mod nixl;
mod odd;
mod plane;
mod relays;
mod roles;
mod several;
mod slices;
mod sync;
