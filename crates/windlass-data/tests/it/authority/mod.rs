//! Certificates for tests: authorities, and what they vouch for.
#![allow(dead_code, unreachable_pub)]

use std::fs;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

/// Somebody who issues certificates.
pub struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, "an authority of a test");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { pem, issuer: Issuer::new(params, key) }
    }

    /// One that this one vouches for.
    pub fn subordinate(&self) -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, "a subordinate of a test");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        Authority { pem, issuer: Issuer::new(params, key) }
    }

    /// Its own certificate.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A file with its own certificate.
    pub fn file(&self, dir: &Path, name: &str) -> PathBuf {
        let path = dir.join(name);
        fs::write(&path, &self.pem).unwrap();
        path
    }

    /// A certificate for these hosts, and its key: in PEM.
    pub fn issue(&self, hosts: &[&str]) -> (String, String) {
        self.sign(CertificateParams::new(hosts.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap())
    }

    /// The same, but it ended long ago.
    pub fn issue_expired(&self, hosts: &[&str]) -> (String, String) {
        let mut params =
            CertificateParams::new(hosts.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        params.not_before = rcgen::date_time_ymd(2001, 1, 1);
        params.not_after = rcgen::date_time_ymd(2002, 1, 1);
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

/// Writes a certificate and its key; the key for the owner only.
pub fn store(dir: &Path, name: &str, (certificate, key): &(String, String)) -> (PathBuf, PathBuf) {
    let paths = (dir.join(format!("{name}.pem")), dir.join(format!("{name}.key")));
    fs::write(&paths.0, certificate).unwrap();
    let mut file =
        fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&paths.1).unwrap();
    std::io::Write::write_all(&mut file, key.as_bytes()).unwrap();
    paths
}
