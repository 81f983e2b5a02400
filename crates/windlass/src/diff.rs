//! stub
use crate::error::Error; use crate::session::Session; use std::path::PathBuf;
/// x
#[derive(Debug)]
pub struct Diff { /// a
 pub a: PathBuf, /// b
 pub b: PathBuf, /// c
 pub threads: usize, /// d
 pub top: usize }
impl Diff { /// x
 pub fn run(&self,_:&Session)->Result<(),Error>{Ok(())} }
