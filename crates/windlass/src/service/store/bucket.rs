//! The objects below a URL: read, written, listed and removed, with deadlines and named errors.
//!
//! Owns: [`Bucket`], the only place that calls the `object_store` crate, and [`StoreFailure`]. Blocking; a few threads of a
//! runtime of its own send the requests. Must not: know what an object means.
//!
//! Credentials come from the environment and from instance roles, as `object_store` reads them. No message repeats one:
//! queries of URLs and the values of secret variables are removed from everything that a store or a library says.

use std::ffi::OsString;
use std::fmt;
use std::future::Future;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    BackoffConfig, Error as Cause, GetOptions, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload, RetryConfig, UpdateVersion,
};
use windlass_core::address::StoreUrl;
use windlass_core::error::Kind;
use windlass_data::receiver::ControlError;
use windlass_data::stop::Stop;
use windlass_data::tls::Trust;

use super::transport::Transport;
use crate::service::client::Client;

/// How often a request is repeated, and for how long, before the caller learns of it.
const RETRIES: usize = 4;
const RETRY_FOR: Duration = Duration::from_secs(45);
/// How long one operation may take with its repetitions.
const OPERATION: Duration = Duration::from_mins(4);
/// How long the first answer of a store may take before the log says so.
const QUIET: Duration = Duration::from_secs(10);
/// What a message has in it if the credentials themselves could not be got.
const TOKEN: &str = "token request";
/// The most objects of a listing.
const MAX_LISTED: usize = 10_000_000;

/// An operation on a store that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{store}: cannot {action} {object}: {why}")]
pub(crate) struct StoreFailure {
    pub(crate) store: String,
    pub(crate) action: &'static str,
    pub(crate) object: String,
    pub(crate) kind: Kind,
    pub(crate) why: String,
}

impl StoreFailure {
    /// The same as the failure of a conversation.
    pub(crate) fn control(self, what: &'static str) -> ControlError {
        let why = format!("cannot {} {}: {}", self.action, self.object, self.why);
        ControlError::Lost { peer: self.store, what, why, kind: self.kind }
    }
}

/// An object in a listing.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    /// Its name below the URL.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// When the store says that it was written, in milliseconds since the Unix epoch.
    pub(crate) unix_ms: u64,
}

/// The state of an object, on which a read or a write can be conditional. Google's writes are so by the generation, all else by
/// the etag.
#[derive(Clone, Debug)]
pub(crate) struct State {
    etag: String,
    generation: Option<String>,
}

impl State {
    fn new(etag: Option<String>, generation: Option<String>) -> Option<State> {
        etag.map(|etag| State { etag, generation })
    }
}

/// By the etag alone: not every answer that has one has a generation.
impl PartialEq for State {
    fn eq(&self, other: &State) -> bool {
        self.etag == other.etag
    }
}

impl Eq for State {}

/// An object that was read, and the state that it was in, if the store says so.
#[derive(Clone, Debug)]
pub(crate) struct Read {
    pub(crate) bytes: Bytes,
    pub(crate) state: Option<State>,
}

/// What a conditional read found.
#[derive(Clone, Debug)]
pub(crate) enum Found {
    Absent,
    /// It is as it was.
    Same,
    Read(Read),
}

/// What a conditional write did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// The object is written, and in this state, if the store says so.
    Done(Option<State>),
    /// The object is not as it was thought to be, and stays.
    Otherwise,
}

/// The objects below a URL.
pub(crate) struct Bucket {
    url: StoreUrl,
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    /// Whether it has answered, or the log says that it has not.
    heard: AtomicBool,
    runtime: Option<tokio::runtime::Runtime>,
    /// Set when it is dropped, which ends requests that are still under way.
    end: Stop,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucket").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        self.end.set();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Bucket {
    /// Opens the store at `url`. With `make`, the directory of a `file://` URL is made if it is missing.
    pub(crate) fn open(url: &StoreUrl, trust: Option<&Trust>, make: bool) -> Result<Bucket, StoreFailure> {
        let end = Stop::never();
        let failed = |kind, why: String| StoreFailure {
            store: url.to_string(),
            action: "open",
            object: "the store".into(),
            kind,
            why,
        };
        let transport = || Transport::new(Client::new(trust.cloned()), end.clone());
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(100),
                max_backoff: Duration::from_secs(5),
                ..BackoffConfig::default()
            },
            max_retries: RETRIES,
            retry_timeout: RETRY_FOR,
        };
        let refused = |e: Cause| failed(kind_of(&e), format!("{}: {}", redact(&e.to_string()), remedy(url)));
        let (scheme, rest) = url.as_str().split_once("://").unwrap_or_default();
        let path = |rest: &str| rest.split_once('/').map_or("", |(_, path)| path).to_owned();
        let (store, prefix): (Arc<dyn ObjectStore>, String) = match scheme {
            "file" => {
                let dir = PathBuf::from(rest);
                if make {
                    std::fs::create_dir_all(&dir).map_err(|e| failed(Kind::Denied, e.to_string()))?;
                }
                let local = LocalFileSystem::new_with_prefix(&dir).map_err(|_| {
                    let why =
                        "it does not exist, or is no directory: check the path and that the disk is mounted";
                    failed(Kind::NotFound, why.into())
                })?;
                (Arc::new(local.with_fsync(true)), String::new())
            }
            "s3" | "s3a" => {
                let builder = AmazonS3Builder::from_env()
                    .with_url(url.as_str())
                    .with_retry(retry)
                    .with_http_connector(transport());
                (Arc::new(builder.build().map_err(refused)?), path(rest))
            }
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env()
                    .with_url(url.as_str())
                    .with_retry(retry)
                    .with_http_connector(transport());
                (Arc::new(builder.build().map_err(refused)?), path(rest))
            }
            "az" | "abfs" | "abfss" => {
                let builder = MicrosoftAzureBuilder::from_env()
                    .with_url(url.as_str())
                    .with_retry(retry)
                    .with_http_connector(transport());
                (Arc::new(builder.build().map_err(refused)?), path(rest))
            }
            _ => {
                let why = "give a URL that begins with file://, s3://, gs:// or az://; where a compatible store listens is said \
                           by the environment, such as AWS_ENDPOINT_URL";
                return Err(failed(Kind::Unsupported, why.into()));
            }
        };
        let prefix = Path::parse(prefix.trim_end_matches('/'))
            .map_err(|e| failed(Kind::Invalid, format!("its path cannot be used: {e}")))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("windlass-store")
            .enable_all()
            .build()
            .map_err(|e| failed(Kind::Exhausted, e.to_string()))?;
        Ok(Bucket {
            url: url.clone(),
            store,
            prefix,
            heard: AtomicBool::new(false),
            runtime: Some(runtime),
            end,
        })
    }

    /// The URL, which holds no secret.
    pub(crate) fn url(&self) -> &StoreUrl {
        &self.url
    }

    /// Whether an object can be replaced on the condition that it is as it was.
    pub(crate) fn swaps(&self) -> bool {
        !self.url.as_str().starts_with("file:")
    }

    fn path(&self, name: &str) -> Path {
        let name = Path::from(name);
        self.prefix.parts().chain(name.parts()).collect()
    }

    fn name(&self, path: &Path) -> String {
        let mut rest = path.prefix_match(&self.prefix).into_iter().flatten();
        let first = rest.next().map(|p| p.as_ref().to_owned()).unwrap_or_default();
        rest.fold(first, |name, part| name + "/" + part.as_ref())
    }

    pub(crate) fn failure(
        &self,
        action: &'static str,
        object: &str,
        kind: Kind,
        why: impl Into<String>,
    ) -> StoreFailure {
        StoreFailure { store: self.url.to_string(), action, object: object.to_owned(), kind, why: why.into() }
    }

    /// Runs an operation until it ends, `stop` is set or its time is over.
    fn run<T>(
        &self,
        action: &'static str,
        object: &str,
        stop: &Stop,
        work: impl Future<Output = Result<T, Cause>>,
    ) -> Result<Result<T, Cause>, StoreFailure> {
        let Some(runtime) = &self.runtime else {
            return Err(self.failure(action, object, Kind::Bug, "the store is closed"));
        };
        let stop = stop.with_timeout(OPERATION);
        let began = Instant::now();
        runtime.block_on(async {
            tokio::pin!(work);
            loop {
                if began.elapsed() >= QUIET && !self.heard.swap(true, Ordering::Relaxed) {
                    // Without credentials in the environment, the service of the instance that gives them is asked, and there may be none.
                    tracing::warn!(
                        "{}: no answer for {} s, still trying to {action} {object}: if this stays so, {}",
                        self.url,
                        QUIET.as_secs(),
                        remedy(&self.url)
                    );
                }
                if let Err(stopped) = stop.check() {
                    let why = "the deadline passed, or the service was told to end";
                    return Err(self.failure(action, object, stopped.kind(), why));
                }
                if let Ok(done) = tokio::time::timeout(stop.nap(), &mut work).await {
                    self.heard.store(true, Ordering::Relaxed);
                    return Ok(done);
                }
            }
        })
    }

    fn told(&self, action: &'static str, object: &str, cause: &Cause) -> StoreFailure {
        let all = cause.to_string();
        let code = code_of(&all).unwrap_or("no reason is given");
        let said = redact(&all);
        let why = match cause {
            _ if matches!(code, "NoSuchBucket" | "ContainerNotFound") => {
                format!("there is no such bucket or container ({code}): make it, or check the URL")
            }
            Cause::NotFound { .. } => {
                "it does not exist: it was removed, or the URL is another one".to_owned()
            }
            _ if kind_of(cause) == Kind::Denied => {
                format!("the store denies access ({code}): {}", remedy(&self.url))
            }
            _ if said.contains(TOKEN) => format!("{said}: {}", remedy(&self.url)),
            _ => said,
        };
        self.failure(action, object, kind_of(cause), why)
    }

    /// Reads an object, unless it is still in the state that was seen.
    pub(crate) fn read_if_changed(
        &self,
        name: &str,
        seen: Option<&State>,
        most: u64,
        stop: &Stop,
    ) -> Result<Found, StoreFailure> {
        let path = self.path(name);
        let options = GetOptions { if_none_match: seen.map(|s| s.etag.clone()), ..GetOptions::default() };
        let work = async {
            let got = self.store.get_opts(&path, options).await?;
            if got.meta.size > most {
                return Ok(Err(got.meta.size));
            }
            let state = State::new(got.meta.e_tag.clone(), got.meta.version.clone());
            let size = got.meta.size;
            let bytes = got.bytes().await?;
            Ok(if bytes.len() as u64 == size { Ok(Read { bytes, state }) } else { Err(size) })
        };
        match self.run("read", name, stop, work)? {
            Ok(Ok(read)) => Ok(Found::Read(read)),
            Ok(Err(size)) => {
                let why =
                    format!("it has {size} bytes, at most {most} are expected, or not all of them came");
                Err(self.failure("read", name, Kind::Corrupt, why))
            }
            Err(Cause::NotFound { .. }) => Ok(Found::Absent),
            Err(Cause::NotModified { .. }) => Ok(Found::Same),
            Err(e) => Err(self.told("read", name, &e)),
        }
    }

    /// Reads an object that must be there.
    pub(crate) fn read(&self, name: &str, most: u64, stop: &Stop) -> Result<Bytes, StoreFailure> {
        match self.read_if_changed(name, None, most, stop)? {
            Found::Read(read) => Ok(read.bytes),
            Found::Absent | Found::Same => {
                Err(self.told("read", name, &Cause::NotFound { path: name.into(), source: "absent".into() }))
            }
        }
    }

    /// Reads exactly these bytes of an object.
    pub(crate) fn read_range(
        &self,
        name: &str,
        range: std::ops::Range<u64>,
        stop: &Stop,
    ) -> Result<Bytes, StoreFailure> {
        let path = self.path(name);
        let wanted = range.end - range.start;
        let got = self.run("read", name, stop, self.store.get_range(&path, range.clone()))?;
        let bytes = got.map_err(|e| self.told("read", name, &e))?;
        if bytes.len() as u64 != wanted {
            let why = format!(
                "{} bytes came of {wanted} from byte {} on: it is truncated",
                bytes.len(),
                range.start
            );
            return Err(self.failure("read", name, Kind::Corrupt, why));
        }
        Ok(bytes)
    }

    /// Writes an object whose name says what is in it, over what may be there.
    pub(crate) fn write(&self, name: &str, bytes: Bytes, stop: &Stop) -> Result<(), StoreFailure> {
        let path = self.path(name);
        let put = self.run("write", name, stop, self.store.put(&path, PutPayload::from_bytes(bytes)))?;
        put.map(drop).map_err(|e| self.told("write", name, &e))
    }

    /// Writes a file as an object, in parts of this length, so many at once, if it is longer than one.
    pub(crate) fn write_file(
        &self,
        name: &str,
        file: &std::fs::File,
        bytes: u64,
        (part, at_once): (u64, usize),
        stop: &Stop,
    ) -> Result<(), StoreFailure> {
        let path = self.path(name);
        let local = |e: std::io::Error| {
            self.failure("write", name, Kind::NotFound, format!("its file cannot be read: {e}"))
        };
        let read = |at: u64| {
            let mut piece = vec![0; part.min(bytes - at) as usize];
            file.read_exact_at(&mut piece, at).map(|()| Bytes::from(piece)).map_err(local)
        };
        if bytes <= part {
            return self.write(name, read(0)?, stop);
        }
        let begun = self.run("write", name, stop, self.store.put_multipart(&path))?;
        let mut upload = begun.map_err(|e| self.told("write", name, &e))?;
        let mut at = 0;
        while at < bytes {
            let mut puts = Vec::new();
            while at < bytes && puts.len() < at_once.max(1) {
                let piece = read(at)?;
                at += piece.len() as u64;
                puts.push(upload.put_part(PutPayload::from_bytes(piece)));
            }
            let put = self.run("write", name, stop, futures_util::future::try_join_all(puts))?;
            if let Err(e) = put {
                // What is left of it costs room until a lifecycle rule of the store removes it.
                let _ = self.run("write", name, stop, upload.abort())?;
                return Err(self.told("write", name, &e));
            }
        }
        let done = self.run("write", name, stop, upload.complete())?;
        done.map(drop).map_err(|e| self.told("write", name, &e))
    }

    /// Writes an object unless there is one, which stays.
    pub(crate) fn create(&self, name: &str, bytes: Bytes, stop: &Stop) -> Result<Written, StoreFailure> {
        self.put_if(name, bytes, PutMode::Create, stop)
    }

    /// Replaces an object that is still in the state that was seen.
    pub(crate) fn swap(
        &self,
        name: &str,
        bytes: Bytes,
        seen: &State,
        stop: &Stop,
    ) -> Result<Written, StoreFailure> {
        let swap = |etag: &str| {
            let seen = UpdateVersion { e_tag: Some(etag.to_owned()), version: seen.generation.clone() };
            self.put_if(name, bytes.clone(), PutMode::Update(seen), stop)
        };
        let swapped = swap(&seen.etag)?;
        // Some gateways of Ceph compare the etag with one without quotes, and refuse every write that has them.
        let bare = seen.etag.strip_prefix('"').and_then(|etag| etag.strip_suffix('"'));
        if let (Written::Otherwise, Some(bare)) = (&swapped, bare) {
            let path = self.path(name);
            let now = self.run("read", name, stop, self.store.head(&path))?;
            if now.is_ok_and(|meta| meta.e_tag.as_ref() == Some(&seen.etag)) {
                return swap(bare);
            }
        }
        Ok(swapped)
    }

    fn put_if(&self, name: &str, bytes: Bytes, mode: PutMode, stop: &Stop) -> Result<Written, StoreFailure> {
        let path = self.path(name);
        let options = PutOptions { mode, ..PutOptions::default() };
        let put = self.store.put_opts(&path, PutPayload::from_bytes(bytes), options);
        match self.run("write", name, stop, put)? {
            Ok(done) => Ok(Written::Done(State::new(done.e_tag, done.version))),
            Err(Cause::AlreadyExists { .. } | Cause::Precondition { .. }) => Ok(Written::Otherwise),
            Err(e) => Err(self.told("write", name, &e)),
        }
    }

    /// All objects below a name.
    pub(crate) fn list(&self, below: &str, stop: &Stop) -> Result<Vec<Listed>, StoreFailure> {
        use futures_util::TryStreamExt as _;
        let path = self.path(below);
        let work = self.store.list(Some(&path)).try_fold(Vec::new(), |mut all, meta| async move {
            if all.len() < MAX_LISTED {
                all.push(meta);
            }
            Ok(all)
        });
        let all = self.run("list", below, stop, work)?.map_err(|e| self.told("list", below, &e))?;
        if all.len() >= MAX_LISTED {
            let why = format!("there are {MAX_LISTED} objects or more: give a URL further down");
            return Err(self.failure("list", below, Kind::Exhausted, why));
        }
        let listed = all.into_iter().map(|meta| Listed {
            name: self.name(&meta.location),
            bytes: meta.size,
            unix_ms: meta.last_modified.timestamp_millis().max(0) as u64,
        });
        Ok(listed.collect())
    }

    /// The names of the folders directly below the URL.
    pub(crate) fn folders(&self, stop: &Stop) -> Result<Vec<String>, StoreFailure> {
        let work = self.store.list_with_delimiter(Some(&self.prefix));
        let found =
            self.run("list", "the models", stop, work)?.map_err(|e| self.told("list", "the models", &e))?;
        Ok(found.common_prefixes.iter().map(|p| self.name(p)).collect())
    }

    /// Removes objects; one that is gone already is as good.
    pub(crate) fn remove<'n>(
        &self,
        names: impl IntoIterator<Item = &'n str>,
        stop: &Stop,
    ) -> Result<(), StoreFailure> {
        for name in names {
            let path = self.path(name);
            match self.run("remove", name, stop, self.store.delete(&path))? {
                Ok(()) | Err(Cause::NotFound { .. }) => {}
                Err(e) => return Err(self.told("remove", name, &e)),
            }
        }
        Ok(())
    }
}

/// What to do about credentials that are missing, wrong or too weak.
fn remedy(url: &StoreUrl) -> &'static str {
    match url.as_str().split_once("://").unwrap_or_default().0 {
        "s3" | "s3a" => {
            "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of the instance, and what they allow (docs/store.md)"
        }
        "gs" => {
            "check GOOGLE_APPLICATION_CREDENTIALS, or the service account of the instance, and what they allow (docs/store.md)"
        }
        "az" | "abfs" | "abfss" => {
            "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or the identity of the \
             instance, and what they allow (docs/store.md)"
        }
        _ => "check the permissions of the directory",
    }
}

/// The code of an error in the answer of a store. That to a batch has one for each object.
fn code_of(said: &str) -> Option<&str> {
    let between = |from, to| Some(said.split_once(from)?.1.split_once(to)?.0);
    let code = between("<Code>", "</Code>").or_else(|| between("(code: ", ")"))?;
    (code.len() < 64 && code.bytes().all(|b| b.is_ascii_alphanumeric())).then_some(code)
}

fn kind_of(cause: &Cause) -> Kind {
    match cause {
        Cause::NotFound { .. } => Kind::NotFound,
        Cause::PermissionDenied { .. } | Cause::Unauthenticated { .. } => Kind::Denied,
        Cause::AlreadyExists { .. } | Cause::Precondition { .. } | Cause::NotModified { .. } => Kind::Stale,
        Cause::NotSupported { .. } | Cause::NotImplemented { .. } => Kind::Unsupported,
        Cause::InvalidPath { .. } | Cause::UnknownConfigurationKey { .. } => Kind::Invalid,
        Cause::JoinError { .. } => Kind::Bug,
        // What has no kind of its own there, such as a list that is denied.
        other if is_denied(other) => Kind::Denied,
        // All else is of the network or of the server.
        _ => Kind::PeerLost,
    }
}

/// Whether a store has answered that these credentials may not, where that has no kind of its own: to a list, or to a batch. The type
/// of the cause is private to `object_store`.
fn is_denied(cause: &Cause) -> bool {
    let said = cause.to_string();
    let words = ["status code: 401 ", "status code: 403 ", "(code: AccessDenied)"];
    let denied = words.iter().any(|words| said.contains(words));
    // Not by the service that gives credentials to an instance.
    denied && !said.contains(TOKEN)
}

/// A message without the queries of URLs, without what stands before an @ in them, and without the value of any variable
/// that may be a secret.
fn redact(text: &str) -> String {
    let text_of =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    let secrets = std::env::vars_os().filter_map(text_of).filter(|(name, value)| {
        let cloud = ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|p| name.starts_with(p));
        let secret =
            ["KEY", "SECRET", "TOKEN", "SAS", "CREDENTIAL", "PASSWORD"].iter().any(|w| name.contains(w));
        cloud && secret && value.len() >= 4
    });
    redact_values(text, secrets.map(|(_, value)| value))
}

fn redact_values(text: &str, secrets: impl Iterator<Item = String>) -> String {
    let mut text = secrets.fold(text.to_owned(), |text, secret| text.replace(&secret, "[redacted]"));
    // From the first query on in every word.
    let mut clean = String::with_capacity(text.len());
    for word in text.split_inclusive(char::is_whitespace) {
        let end = word.trim_end().len();
        let (word, space) = word.split_at(end);
        match word.split_once('?') {
            Some((before, _)) if before.contains("://") => {
                clean.push_str(before);
                clean.push_str("?[redacted]");
            }
            _ => clean.push_str(word),
        }
        clean.push_str(space);
    }
    text = clean;
    while let Some(at) = text.find("://") {
        let rest = &text[at + 3..];
        let authority = rest.find(['/', ' ']).unwrap_or(rest.len());
        let Some(user) = rest[..authority].rfind('@') else {
            // Marks what was looked at.
            text.replace_range(at..at + 3, "\u{1}");
            continue;
        };
        text.replace_range(at..=at + 3 + user, "\u{1}[redacted]@");
    }
    let text = text.replace('\u{1}', "://");
    text.chars().take(600).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_message_of_a_store_repeats_a_secret() {
        let said = "Error performing GET https://u:hunter2@a.blob.core.windows.net/c/x?sig=abc%3D&sv=1 in 3s, after 2 retries: \
                    <AWSAccessKeyId>AKIA1234</AWSAccessKeyId> http://b/y?z";
        let told = redact_values(said, ["AKIA1234".to_owned()].into_iter());
        for secret in ["hunter2", "sig=", "abc", "AKIA1234", "?z"] {
            assert!(!told.contains(secret), "{told}");
        }
        assert!(told.starts_with(
            "Error performing GET https://[redacted]@a.blob.core.windows.net/c/x?[redacted] in 3s"
        ));
        assert!(told.ends_with("http://b/y?[redacted]"), "{told}");
    }

    #[test]
    fn an_object_of_a_batch_that_may_not_be_removed_is_denied() {
        let home = tempfile::tempdir().unwrap();
        let url: StoreUrl = format!("file://{}", home.path().display()).parse().unwrap();
        let source = "DeleteObjects request failed for key m/a: Access Denied (code: AccessDenied)";
        let cause = Cause::Generic { store: "S3", source: source.into() };
        let told = Bucket::open(&url, None, false).unwrap().told("remove", "m/a", &cause);
        assert_eq!(told.kind, Kind::Denied, "{told}");
        assert!(told.why.contains("denies access (AccessDenied)"), "{told}");
    }

    #[test]
    fn an_object_of_a_directory_is_created_once_and_listed_by_its_name() {
        let home = tempfile::tempdir().unwrap();
        let url: StoreUrl = format!("file://{}/run", home.path().display()).parse().unwrap();
        let stop = Stop::after(Duration::from_secs(20));
        let absent = Bucket::open(&url, None, false).unwrap_err();
        assert_eq!(absent.kind, Kind::NotFound, "{absent}");
        let bucket = Bucket::open(&url, None, true).unwrap();
        assert!(bucket.create("m/a", Bytes::from_static(b"one"), &stop).unwrap() != Written::Otherwise);
        assert!(bucket.create("m/a", Bytes::from_static(b"two"), &stop).unwrap() == Written::Otherwise);
        assert_eq!(&bucket.read("m/a", 10, &stop).unwrap()[..], b"one");
        assert_eq!(&bucket.read_range("m/a", 1..3, &stop).unwrap()[..], b"ne");
        let short = bucket.read_range("m/a", 1..9, &stop).unwrap_err();
        assert!(matches!(short.kind, Kind::Corrupt | Kind::PeerLost), "{short}");
        assert_eq!(bucket.read("m/a", 2, &stop).unwrap_err().kind, Kind::Corrupt);
        assert_eq!(bucket.read("m/b", 2, &stop).unwrap_err().kind, Kind::NotFound);
        assert_eq!(bucket.list("m", &stop).unwrap()[0].name, "m/a");
        assert_eq!(bucket.folders(&stop).unwrap(), ["m"]);
        bucket.remove(["m/a", "m/a"], &stop).unwrap();
        assert!(bucket.list("m", &stop).unwrap().is_empty());
        stop.set();
        assert_eq!(bucket.read("m/a", 10, &stop).unwrap_err().kind, Kind::Cancelled);
    }
}
