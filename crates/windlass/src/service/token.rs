//! The secret of the control connection: where it is kept, how it is checked.
//!
//! Owns: token files. There is always a token. One that is not given is made and written to a file that only its
//! owner can read; other processes read that file or get the token from the publisher's sync
//! info. Must not: print or log a token.

use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use subtle::ConstantTimeEq as _;
use windlass_core::address::Token;
use windlass_data::private::{self, PrivateError, Readers};
use windlass_data::seal::draft::Draft;

use crate::error::Error;

/// The environment variable that holds a token.
pub const VARIABLE: &str = "WINDLASS_TOKEN";

/// Reads the token in `path`, which must be a file of this user or of root that no other user can read.
pub fn read(path: &Path) -> Result<Token, Error> {
    read_for(path, Readers::Owner)
}

/// As [`read`], for the group as well if `readers` says so.
pub fn read_for(path: &Path, readers: Readers) -> Result<Token, Error> {
    let mut file = private::secret(path, readers).map_err(|e| match e {
        PrivateError::Io { source, .. } => {
            let folder = path.parent().filter(|f| !f.as_os_str().is_empty() && !f.exists());
            match folder.filter(|_| source.kind() == io::ErrorKind::NotFound) {
                Some(folder) => Error::NoFolder { path: path.to_owned(), folder: folder.to_owned() },
                None => Error::Io { action: "read the token file", path: path.to_owned(), source },
            }
        }
        refused => refused.into(),
    })?;
    let mut text = String::new();
    let limit = Token::MAX_LEN as u64 + 2;
    (&mut file).take(limit).read_to_string(&mut text).map_err(Error::io("read the token file", path))?;
    let token = Token::new(text.trim_end());
    let token = token.map_err(|e| Error::Usage(format!("the token file {}: {e}", path.display())))?;
    Ok(token.read_from(path))
}

/// The token in [`VARIABLE`], if it is set.
pub fn in_environment() -> Result<Option<Token>, Error> {
    let Ok(secret) = std::env::var(VARIABLE) else { return Ok(None) };
    let token = Token::new(secret).map_err(|e| Error::Usage(format!("{VARIABLE}: {e}")))?;
    Ok(Some(token.found_in(VARIABLE)))
}

/// The token of a service that may be given another one: when it is refused, its file is read again.
#[derive(Clone, Debug)]
pub struct Held(Arc<Mutex<Token>>);

impl Held {
    /// Begins with this one.
    pub fn new(token: Token) -> Held {
        Held(Arc::new(Mutex::new(token)))
    }

    /// The one that counts.
    pub fn get(&self) -> Token {
        self.0.lock().clone()
    }

    /// Whether there is another one than `refused` by now.
    pub fn renew(&self, refused: &Token) -> bool {
        let mut held = self.0.lock();
        if *held == *refused
            && let Some(Ok(now)) = refused.file().map(read)
        {
            *held = now;
        }
        *held != *refused
    }
}

/// What a service said that does not take a token, with where that was found and where the right one is.
pub fn refused(message: &str, token: &Token, right: &str) -> String {
    let used = token.origin().map_or_else(String::new, |o| format!("; the one that was sent is that of {o}"));
    format!("{message}{used}; {right}")
}

/// Where agents keep their tokens.
pub const OF_AGENTS: &str = "the agent's is in the file that it named when it started: `token` in the directory of its \
    region, unless it was given --token-file or WINDLASS_TOKEN";
/// Where controllers keep theirs.
pub const OF_CONTROLLERS: &str = "the controller's is in the file that it named when it started: its --token-file, or \
    windlass-controller.token in the directory in which it was started, unless it was given WINDLASS_TOKEN";

/// The token in `path`, which is made if it is not there. Two processes that do this at once get the same one.
pub fn read_or_make(path: &Path) -> Result<Token, Error> {
    match read(path) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).map_err(|e| Error::Bug(format!("no random bytes: {e}")))?;
    let text: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    let made = Draft::secret(path, text.as_bytes()).and_then(Draft::place_if_absent);
    made.map_err(Error::io("write the token to", path))?;
    read(path)
}

/// Puts `token` into `path`, in place of what is there.
pub fn write(path: &Path, token: &Token) -> Result<(), Error> {
    let written = Draft::secret(path, token.expose().as_bytes()).and_then(Draft::place);
    written.map_err(Error::io("write the token to", path))
}

/// Whether a header `Authorization: Bearer …` carries the token. Takes the same time wherever they differ.
pub fn accepts(token: &Token, header: Option<&str>) -> bool {
    let given = header.and_then(|h| h.strip_prefix("Bearer ")).unwrap_or_default().trim();
    bool::from(given.as_bytes().ct_eq(token.expose().as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_token_is_made_once_and_kept_from_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let made = read_or_make(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read_or_make(&path).unwrap().expose(), made.expose());
        assert_eq!(made.expose().len(), 64);
        assert!(accepts(&made, Some(&format!("Bearer {}", made.expose()))));
        for bad in [None, Some(""), Some("Bearer "), Some("Bearer x"), Some(made.expose())] {
            assert!(!accepts(&made, bad), "{bad:?}");
        }
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
    }

    #[test]
    fn a_token_that_is_refused_is_read_again_from_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let first = read_or_make(&path).unwrap();
        let held = Held::new(first.clone());
        assert!(!held.renew(&first), "there is no other");
        write(&path, &Token::new("another-one").unwrap()).unwrap();
        assert!(held.renew(&first) && held.get().expose() == "another-one");
        // A holder of the first token gets the same advice.
        assert!(held.renew(&first) && !held.renew(&held.get()));
        fs::remove_file(&path).unwrap();
        assert!(!held.renew(&held.get()), "what cannot be read changes nothing");
        let given = Token::new("given").unwrap();
        assert!(!Held::new(given.clone()).renew(&given));
    }

    #[test]
    fn a_token_file_in_a_folder_that_is_not_there_is_refused_with_how_to_make_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/windlass/token");
        for error in [read(&path).unwrap_err(), read_or_make(&path).unwrap_err()] {
            assert!(matches!(&error, Error::NoFolder { .. }), "{error:?}");
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
            assert!(
                error.advice().contains("mkdir -p") && error.advice().contains("run/windlass"),
                "{error}"
            );
        }
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        assert!(matches!(read(&path), Err(Error::Io { .. })));
        let made = read_or_make(&path).unwrap();
        assert_eq!(made.origin(), Some(&*format!("the file {}", path.display())));
    }
}
