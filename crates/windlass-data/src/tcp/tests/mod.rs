//! Tests of the link over loopback.

mod transfers;
mod world;
