//! Tests of the link over loopback.

mod faults;
mod hostile;
mod leases;
mod proxy;
mod transfers;
mod world;
