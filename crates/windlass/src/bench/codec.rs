//! stub
use super::BenchConfig; use crate::error::Error; use crate::session::Session;
/// x
pub fn run(_:&BenchConfig,_:&Session)->Result<(),Error>{Ok(())}
