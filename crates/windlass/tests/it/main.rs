//! The integration tests of the command and its services, as one program: it is linked once.

#[macro_use]
mod command;

#[path = "../../../windlass-data/tests/it/authority/mod.rs"]
mod authority;
mod bench;
mod cli;
mod control;
mod controller;
mod controller_chaos;
mod delta;
mod demo;
mod doctor;
mod engine;
mod engines;
mod examples;
mod init;
mod nixl;
mod observe;
mod peers;
mod process;
mod receive_controller;
mod relay;
mod service;
mod soak;
mod store;
mod supervise;
mod tls;
