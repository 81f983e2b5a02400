//! TLS: what a server shows, whom a client trusts, and what can go wrong between them.
//!
//! Owns: [`Certificate`] and [`Trust`], made of PEM files, and the one way from an error of the library to a
//! [`TlsError`] that names the peer and the remedy. Used by the [TCP link](crate::tcp) for data, and by the `windlass`
//! crate for requests, so that both are secured alike. Must not: open a socket, or offer a way around a check.
//!
//! # What is checked
//!
//! A server shows the chain of its file. A client accepts a chain that leads to one of the certificates it was given, or
//! of the system if it was given none, that is valid now, and that is for the host the client was told to connect to:
//! the certificate's subject alternative names count, and nothing else. There is no other mode. Servers do not ask
//! clients for certificates: clients prove a token or a ticket inside.
//!
//! Versions are TLS 1.3 and 1.2, the cryptography is ring's. Requests and data offer different protocol names (ALPN),
//! so that a connection meant for one cannot be led to the other.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, InconsistentKeys, InvalidMessage, RootCertStore, ServerConfig};
use windlass_core::address::Host;
use windlass_core::error::Kind;

use crate::private::{self, PrivateError};

/// The protocol name of data connections.
pub const DATA_PROTOCOL: &[u8] = b"windlass/1";
/// The protocol name of requests.
pub const HTTP_PROTOCOL: &[u8] = b"http/1.1";

/// The longest PEM file that is read: the roots of a large system are a quarter of it.
const MAX_PEM: u64 = 1 << 20;

/// What can go wrong with certificates.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read the {what} in {}: {source}", path.display())]
    Read { what: &'static str, path: PathBuf, source: io::Error },
    #[error("there is no {what} in {}: {why}; expected PEM, which begins with -----BEGIN", path.display())]
    Empty { what: &'static str, path: PathBuf, why: String },
    #[error("the key of the certificate: {0}")]
    OpenKey(PrivateError),
    #[error(
        "the key in {} is not that of the first certificate in {}: give the two that were made together, \
         the server's own certificate first and then its chain",
        key.display(), certificate.display()
    )]
    Mismatch { certificate: PathBuf, key: PathBuf },
    #[error("{} cannot be used: {why}", path.display())]
    Unusable { path: PathBuf, why: String },
    #[error(
        "the certificate in {} is not for {host}, which others are told to connect to: make one with {host} among its \
         subject alternative names, or advertise a host that it is for",
        path.display()
    )]
    OtherHost { path: PathBuf, host: Host },
    #[error("this system has no certificates to trust ({why}): name a file with those that you trust")]
    NoRoots { why: String },
    #[error("the certificate of {peer} is not accepted: {why}")]
    Untrusted {
        /// The peer, by the name that was to be proved.
        peer: String,
        /// What is wrong, and what to do.
        why: String,
    },
    #[error(
        "{peer} does not speak TLS: if it is meant not to, address it with http://; nothing was sent to it"
    )]
    NotTls { peer: String },
    #[error("TLS with {peer} failed: {source}")]
    Broken { peer: String, source: rustls::Error },
}

impl TlsError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            TlsError::Read { source, .. } => crate::file::io_kind(source),
            TlsError::OpenKey(e) => e.kind(),
            TlsError::Empty { .. }
            | TlsError::Mismatch { .. }
            | TlsError::Unusable { .. }
            | TlsError::OtherHost { .. }
            | TlsError::NotTls { .. } => Kind::Invalid,
            TlsError::NoRoots { .. } => Kind::NotFound,
            TlsError::Untrusted { .. } => Kind::Denied,
            TlsError::Broken { .. } => Kind::PeerLost,
        }
    }

    /// What an error of the library means, with the peer as it was addressed.
    pub fn of(peer: &str, source: rustls::Error) -> TlsError {
        let peer = peer.to_owned();
        match source {
            rustls::Error::InvalidCertificate(error) => {
                TlsError::Untrusted { peer, why: certificate_error(&error) }
            }
            // What the first bytes of something else look like.
            rustls::Error::InvalidMessage(
                InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion,
            ) => TlsError::NotTls { peer },
            source => TlsError::Broken { peer, source },
        }
    }

    /// The same for an error that came through a reader or writer; none if TLS has nothing to do with it.
    pub fn of_io(peer: &str, error: &io::Error) -> Option<TlsError> {
        let inner = error.get_ref()?.downcast_ref::<rustls::Error>()?;
        Some(TlsError::of(peer, inner.clone()))
    }
}

/// What is wrong with a certificate, and what to do about it.
fn certificate_error(error: &CertificateError) -> String {
    let what = match error {
        // The second is what an authority that was made again under its old name comes to.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "it was not issued by anybody who is trusted here; if it is the right one, name the file with its issuer's \
             certificate as tls_ca"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "it is for other hosts; address the server by a host that is among the certificate's subject alternative names"
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "it has expired; renew it and restart the server, and see whether the clocks are right"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet; see whether the clocks are right"
        }
        _ => "it cannot be verified",
    };
    format!("{what} ({error})")
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The text of a PEM file, of at most a mebibyte.
fn read(what: &'static str, path: &Path, secret: bool) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read { what, path: path.to_owned(), source };
    let mut file = if secret {
        private::secret(path, private::Readers::Group).map_err(|e| match e {
            PrivateError::Io { source, .. } => failed(source),
            refused => TlsError::OpenKey(refused),
        })?
    } else {
        File::open(path).map_err(failed)?
    };
    let mut bytes = Vec::new();
    (&mut file).take(MAX_PEM + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_PEM {
        let why = format!("it is longer than {MAX_PEM} bytes");
        return Err(TlsError::Unusable { path: path.to_owned(), why });
    }
    Ok(bytes)
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bytes = read(what, path, false)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let empty = |why: String| TlsError::Empty { what, path: path.to_owned(), why };
    let all = all.map_err(|e| empty(e.to_string()))?;
    if all.is_empty() { Err(empty("no section of that name".to_owned())) } else { Ok(all) }
}

/// What a server shows: a certificate with its chain, and the key that proves it. Cheap to clone.
#[derive(Clone)]
pub struct Certificate {
    path: PathBuf,
    leaf: CertificateDer<'static>,
    http: Arc<ServerConfig>,
    data: Arc<ServerConfig>,
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Certificate").field(&self.path).finish()
    }
}

impl Certificate {
    /// Reads the server's certificate and its chain from one PEM file, and the key from another.
    pub fn read(certificate: &Path, key: &Path) -> Result<Certificate, TlsError> {
        let chain = certificates("certificate", certificate)?;
        let leaf = chain.first().cloned().unwrap_or_else(|| CertificateDer::from(Vec::new()));
        let secret = read("private key", key, true)?;
        let secret = PrivateKeyDer::from_pem_slice(&secret).map_err(|e| TlsError::Empty {
            what: "private key",
            path: key.to_owned(),
            why: e.to_string(),
        })?;
        let unusable = |e: rustls::Error| match e {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                TlsError::Mismatch { certificate: certificate.to_owned(), key: key.to_owned() }
            }
            rustls::Error::InvalidCertificate(e) => {
                TlsError::Unusable { path: certificate.to_owned(), why: e.to_string() }
            }
            e => TlsError::Unusable { path: key.to_owned(), why: e.to_string() },
        };
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions().map_err(unusable)?;
        let config = builder.with_no_client_auth().with_single_cert(chain, secret).map_err(unusable)?;
        let with = |protocol: &[u8]| {
            let mut config = config.clone();
            config.alpn_protocols = vec![protocol.to_vec()];
            Arc::new(config)
        };
        Ok(Certificate {
            path: certificate.to_owned(),
            leaf,
            http: with(HTTP_PROTOCOL),
            data: with(DATA_PROTOCOL),
        })
    }

    /// Whether clients that connect to `host` will find it to be for that host.
    pub fn check_host(&self, host: &Host) -> Result<(), TlsError> {
        let unusable = |e: rustls::Error| TlsError::Unusable { path: self.path.clone(), why: e.to_string() };
        let leaf = ParsedCertificate::try_from(&self.leaf).map_err(unusable)?;
        let other = || TlsError::OtherHost { path: self.path.clone(), host: host.clone() };
        verify_server_name(&leaf, &server_name(host.as_str()).ok_or_else(other)?).map_err(|_| other())
    }

    /// For requests.
    pub fn http(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.http)
    }

    /// For data.
    pub fn data(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.data)
    }
}

/// Whom a client trusts. Cheap to clone.
#[derive(Clone)]
pub struct Trust {
    http: Arc<ClientConfig>,
    data: Arc<ClientConfig>,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust").finish_non_exhaustive()
    }
}

impl Trust {
    /// Those whose certificates are in a PEM file, and whom they vouch for; nobody else.
    pub fn of_file(path: &Path) -> Result<Trust, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates("certificate to trust", path)? {
            roots
                .add(certificate)
                .map_err(|e| TlsError::Unusable { path: path.to_owned(), why: e.to_string() })?;
        }
        Trust::new(roots)
    }

    /// Those whom the system trusts; `SSL_CERT_FILE` and `SSL_CERT_DIR` say where they are if not in the usual place.
    pub fn system() -> Result<Trust, TlsError> {
        let found = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        let (added, _) = roots.add_parsable_certificates(found.certs);
        if added == 0 {
            let why = found.errors.first().map_or_else(|| "none found".to_owned(), ToString::to_string);
            return Err(TlsError::NoRoots { why });
        }
        Trust::new(roots)
    }

    fn new(roots: RootCertStore) -> Result<Trust, TlsError> {
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder
            .with_safe_default_protocol_versions()
            .map_err(|e| TlsError::NoRoots { why: e.to_string() })?;
        let config = builder.with_root_certificates(roots).with_no_client_auth();
        let with = |protocol: &[u8]| {
            let mut config = config.clone();
            config.alpn_protocols = vec![protocol.to_vec()];
            Arc::new(config)
        };
        Ok(Trust { http: with(HTTP_PROTOCOL), data: with(DATA_PROTOCOL) })
    }

    /// For requests.
    pub fn http(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.http)
    }

    /// For data.
    pub fn data(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.data)
    }
}

/// A host as certificates name it: without the dot that may end a DNS name.
pub fn server_name(host: &str) -> Option<ServerName<'static>> {
    ServerName::try_from(host.strip_suffix('.').unwrap_or(host).to_owned()).ok()
}

/// How the data connections of a publisher must be.
#[derive(Clone, Debug, Default)]
pub struct Privacy {
    /// Whom to trust where a source is inside TLS; without it, such sources are refused.
    pub trust: Option<Trust>,
    /// Sources that are not are refused.
    pub required: bool,
}

/// No TLS: sources must be plain.
pub static PLAIN: Privacy = Privacy { trust: None, required: false };
