//! TLS as the commands are told about it: which files, and what is taken where none is named.
//!
//! Owns: [`VARIABLE`], and which authorities a client trusts. What certificates are, and how they are checked, is in
//! [`windlass_data::tls`]. Called with arguments, before anything is opened.

use std::path::{Path, PathBuf};

use windlass_core::address::Host;
use windlass_data::tls::{Certificate, Trust};

use crate::error::Error;

/// The environment variable that names the file with the certificates to trust.
pub const VARIABLE: &str = "WINDLASS_TLS_CA";

/// The authorities in `file`, or in the file that [`VARIABLE`] names. None means the system's, which are looked
/// up when they are needed.
pub fn trust(file: Option<&Path>) -> Result<Option<Trust>, Error> {
    let named = std::env::var_os(VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from);
    let file = file.map(Path::to_owned).or(named);
    Ok(file.as_deref().map(Trust::of_file).transpose()?)
}

/// The certificate of a server that others are told to reach at `host`, if it has one.
pub fn certificate(files: Option<&(PathBuf, PathBuf)>, host: &Host) -> Result<Option<Certificate>, Error> {
    let Some((certificate, key)) = files else { return Ok(None) };
    let certificate = Certificate::read(certificate, key)?;
    certificate.check_host(host)?;
    Ok(Some(certificate))
}

/// How an address begins.
pub fn scheme(certificate: Option<&Certificate>) -> &'static str {
    if certificate.is_some() { "https" } else { "http" }
}
