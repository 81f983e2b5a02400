//! stub
use crate::cli::Mode; use crate::error::Error; use crate::session::Session; use std::path::{Path,PathBuf};
/// x
#[derive(Debug)]
pub struct Make { /// a
 pub base: PathBuf, /// b
 pub new: PathBuf, /// c
 pub output: PathBuf, /// d
 pub mode: Mode, /// e
 pub threads: usize }
impl Make { /// x
 pub fn run(&self,_:&Session)->Result<(),Error>{Ok(())} }
/// x
#[derive(Debug)]
pub struct Apply { /// a
 pub base: PathBuf, /// b
 pub delta: PathBuf, /// c
 pub output: Option<PathBuf>, /// e
 pub threads: usize }
impl Apply { /// x
 pub fn run(&self,_:&Session)->Result<(),Error>{Ok(())} }
/// x
pub fn show(_:&Path,_:&Session)->Result<(),Error>{Ok(())}
