//! stub
use crate::error::Error; use crate::session::Session; use crate::synth::SynthConfig;
/// x
#[derive(Debug)]
pub struct Demo { /// a
 pub model: SynthConfig, /// b
 pub steps: u32, /// c
 pub receivers: usize, /// d
 pub threads: usize }
impl Demo { /// x
 pub fn run(&self,_:&Session)->Result<u8,Error>{Ok(0)} }
