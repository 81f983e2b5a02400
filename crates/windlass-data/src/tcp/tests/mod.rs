//! Tests of the link over loopback.

mod leases;
mod proxy;
mod transfers;
mod world;
