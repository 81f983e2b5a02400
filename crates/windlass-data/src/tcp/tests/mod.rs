//! Tests of the link over loopback.

mod faults;
mod hostile;
mod leases;
mod proxy;
mod relays;
mod secret;
mod transfers;
mod world;

#[path = "../../../tests/it/authority/mod.rs"]
mod authority;
