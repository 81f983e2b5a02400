//! Whose a directory is, and who can read a secret.
//!
//! Owns: how directories of regions, images and engines are made and opened, and how files with tokens and keys are. A
//! directory of ours is made where another user could have been first (`/dev/shm`, `/tmp`). Taking over what that user put
//! there would give it the weights: the owner of a directory can change everything in it, whatever its mode. Called wherever
//! such a directory or file is named by its path. Must not: change what it refuses.
//!
//! Paths are walked component by component, by descriptor, without following links blindly:
//!
//! - A directory on the way must belong to root or to the effective user. If others can write to it, it must be sticky, so
//!   that they cannot replace what is below. Its owner's private group (the group with the owner's number) and that of root
//!   count as the owner.
//! - A link on the way must belong to root or to the effective user, and is followed.
//! - The last component of a directory of ours must be a directory, no link, and belong to the effective user.
//!
//! After the walk no other user can change what the path means, so the rest of the crate may use the path.
//!
//! A directory that is only read may also be that of a member of one of our groups, if it was made for the group
//! ([`open`]); root reads nothing but its own.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use windlass_core::error::Kind;

use crate::file::io_kind;

/// As many links as the kernel follows.
const MOST_LINKS: usize = 40;

/// A directory or a file that is not ours alone.
#[derive(Debug, thiserror::Error)]
pub enum PrivateError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "{} belongs to the user with id {owner}, and this process runs as {me}: that user could read and replace what is \
         kept there; run as that user, or choose another place",
        path.display()
    )]
    Owner { path: PathBuf, owner: u32, me: u32 },
    #[error(
        "other users can write to the directory {} (mode {mode:04o}) and replace what is in it: set its mode (chmod 755, or \
         chmod +t to keep it open), or choose another place",
        path.display()
    )]
    Writable { path: PathBuf, mode: u32 },
    #[error(
        "other users can read or write {} (mode {mode:04o}): run chmod 600 on it, and take another secret if they may have \
         read it",
        path.display()
    )]
    Readable { path: PathBuf, mode: u32 },
    #[error(
        "other users can read or write {} (mode {mode:04o}), which is mounted read-only: set its mode where it comes from, \
         for a Kubernetes Secret with {}",
        path.display(),
        if me() == 0 { "`defaultMode: 0400`" } else { "`fsGroup` and `defaultMode: 0440`" }
    )]
    ReadableMount { path: PathBuf, mode: u32 },
    #[error("{} is a symbolic link: give the directory itself", path.display())]
    Link { path: PathBuf },
    #[error("{} is not a {wanted}", path.display())]
    Not { path: PathBuf, wanted: &'static str },
}

impl PrivateError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            PrivateError::Io { source, .. } => io_kind(source),
            PrivateError::Owner { .. }
            | PrivateError::Writable { .. }
            | PrivateError::Readable { .. }
            | PrivateError::ReadableMount { .. }
            | PrivateError::Link { .. } => Kind::Denied,
            PrivateError::Not { .. } => Kind::Invalid,
        }
    }

    /// Whether it says that there is nothing of this name.
    pub fn is_absent(&self) -> bool {
        matches!(self, PrivateError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Who may read a secret besides its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    Owner,
    Group,
}

/// Makes and opens a directory that is this user's alone; missing directories on the way are made as well, with the same mode.
/// Answers whether it is new. The mode of one that was there is left alone.
pub fn own(dir: &Path, mode: u32) -> Result<(File, bool), PrivateError> {
    let (way, name) = Way::to(dir, Making::Missing(mode), Others::Refused)?;
    let path = way.here.join(&name);
    let is_new = match rustix::fs::mkdirat(&way.at, &name, Mode::from_raw_mode(mode)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(e) => return Err(io_error("make", &path)(e.into())),
    };
    let (file, about) = way.open(&name, OFlags::DIRECTORY)?;
    owned(about, &path, &[me()])?;
    if is_new {
        set_mode(&file, &path, mode)?;
    }
    Ok((file, is_new))
}

/// As [`own`], with that mode also where it was there already.
pub fn own_with(dir: &Path, mode: u32) -> Result<(), PrivateError> {
    let (file, is_new) = own(dir, mode)?;
    if is_new { Ok(()) } else { set_mode(&file, dir, mode) }
}

/// Opens a directory to read in it: one of this user or of root, or one that was made for a group of this user.
pub fn open(dir: &Path) -> Result<File, PrivateError> {
    let (way, name) = Way::to(dir, Making::Nothing, Others::Noted)?;
    let (file, about) = way.open(&name, OFlags::DIRECTORY)?;
    let path = way.here.join(&name);
    let owner = reader_of(about, &path)?;
    if let Some((path, other)) = way.others.iter().find(|(_, other)| *other != owner) {
        return Err(PrivateError::Owner { path: path.clone(), owner: *other, me: me() });
    }
    Ok(file)
}

/// As [`open`], for a directory that came as a descriptor.
pub(crate) fn check_reader(dir: &File, path: &Path) -> Result<(), PrivateError> {
    reader_of(stat(dir, path)?, path).map(|_| ())
}

/// Who may own, besides root and this user, what a directory to read in is below.
fn reader_of(about: About, path: &Path) -> Result<u32, PrivateError> {
    let for_group = about.mode & 0o050 == 0o050 && me() != 0 && is_member(about.gid);
    let owner = if for_group { about.uid } else { me() };
    owned(about, path, &[me(), 0, owner])?;
    // Sticky or not: what others put beside our files would be taken for ours.
    refuse_writers(About { mode: about.mode & !STICKY, ..about }, path)?;
    Ok(owner)
}

/// Looks at a directory below which directories of ours are: no other user may be able to replace them.
pub fn place(dir: &Path) -> Result<(), PrivateError> {
    let (mut way, name) = Way::to(dir, Making::Nothing, Others::Refused)?;
    way.enter(name, Making::Nothing)
}

/// As [`place`], and makes it, with this mode, where it is not there.
pub fn make_place(dir: &Path, mode: u32) -> Result<(), PrivateError> {
    let (mut way, name) = Way::to(dir, Making::Missing(mode), Others::Refused)?;
    way.enter(name, Making::Missing(mode))
}

/// Opens a file with a secret: a regular one, of this user or of root, that no others can read or write. Links to it are
/// followed if nobody else can have put them there. What is root's may be readable for the group that root gave it.
pub fn secret(path: &Path, readers: Readers) -> Result<File, PrivateError> {
    let (mut way, mut name) = Way::to(path, Making::Nothing, Others::Refused)?;
    while let Some(target) = way.link(&name)? {
        name = target.file_name().map_or_else(|| ".".into(), OsStr::to_owned);
        way.follow(target.parent().unwrap_or(Path::new("")), Making::Nothing)?;
    }
    let path = way.here.join(&name);
    // Not waiting: it may be a pipe.
    let (file, about) = way.open(&name, OFlags::NONBLOCK)?;
    if FileType::from_raw_mode(about.mode) != FileType::RegularFile {
        return Err(PrivateError::Not { path, wanted: "regular file" });
    }
    owned(about, &path, &[me(), 0])?;
    let for_group = readers == Readers::Group || about.uid != me();
    if about.mode & if for_group { 0o037 } else { 0o077 } != 0 {
        let mode = about.mode & 0o7777;
        let flags = rustix::fs::fstatvfs(&file).map(|mount| mount.f_flag);
        let read_only = flags.is_ok_and(|flags| flags.contains(StatVfsMountFlags::RDONLY));
        return Err(if read_only {
            PrivateError::ReadableMount { path, mode }
        } else {
            PrivateError::Readable { path, mode }
        });
    }
    Ok(file)
}

/// Whether a directory in a [`place`] is this user's own.
pub fn is_own(about: &Metadata) -> bool {
    about.is_dir() && about.uid() == me()
}

/// Whether a directory in a [`place`] is one itself.
pub(crate) fn is_place(about: &Metadata) -> bool {
    let it = About { mode: about.mode(), uid: about.uid(), gid: about.gid() };
    about.is_dir() && is_trusted(it.uid) && refuse_writers(it, Path::new("")).is_ok()
}

/// Refuses an open directory of another user.
pub(crate) fn check_own(dir: &File, path: &Path) -> Result<(), PrivateError> {
    owned(stat(dir, path)?, path, &[me()])
}

/// What is done about directories that are not there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Making {
    Nothing,
    Missing(u32),
}

/// What is done about directories and links of other users.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Others {
    Refused,
    Noted,
}

const STICKY: u32 = 0o1000;

/// How far a walk along a path got.
struct Way {
    at: OwnedFd,
    here: PathBuf,
    links: usize,
    on_others: Others,
    /// What belongs to others, and to whom.
    others: Vec<(PathBuf, u32)>,
}

impl Way {
    /// Goes to the directory in which the last component of `path` is.
    fn to(path: &Path, making: Making, on_others: Others) -> Result<(Way, OsString), PrivateError> {
        let whole = std::path::absolute(path).map_err(io_error("find", path))?;
        let name = whole.file_name().map_or_else(|| ".".into(), OsStr::to_owned);
        // One that ends in `..` is a directory on the way itself.
        let parent = if whole.file_name().is_some() { whole.parent().unwrap_or(&whole) } else { &whole };
        let (at, here) = root()?;
        let mut way = Way { at, here, links: 0, on_others, others: Vec::new() };
        way.pass(stat(&way.at, &way.here)?, way.here.clone())?;
        way.follow(parent, making)?;
        Ok((way, name))
    }

    /// Goes along a path from here, or from the root.
    fn follow(&mut self, path: &Path, making: Making) -> Result<(), PrivateError> {
        for component in path.components() {
            match component {
                Component::RootDir => (self.at, self.here) = root()?,
                Component::Normal(name) => self.enter(name.to_owned(), making)?,
                Component::ParentDir => self.enter("..".into(), making)?,
                Component::CurDir | Component::Prefix(_) => {}
            }
        }
        Ok(())
    }

    /// Goes into a directory, also by a link.
    fn enter(&mut self, name: OsString, making: Making) -> Result<(), PrivateError> {
        if let Some(target) = self.link_or_make(&name, making)? {
            return self.follow(&target, making);
        }
        let path = self.here.join(&name);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = rustix::fs::openat(&self.at, &name, flags, Mode::empty())
            .map_err(|e| io_error("open", &path)(e.into()))?;
        self.pass(stat(&next, &path)?, path.clone())?;
        (self.at, self.here) = (next, path);
        Ok(())
    }

    fn link_or_make(&mut self, name: &OsStr, making: Making) -> Result<Option<PathBuf>, PrivateError> {
        match (self.link(name), making) {
            (Err(e), Making::Missing(mode)) if e.is_absent() => {
                let mode = Mode::from_raw_mode(mode);
                let made = match rustix::fs::mkdirat(&self.at, name, mode) {
                    // Whatever the umask is.
                    Ok(()) => rustix::fs::chmodat(&self.at, name, mode, AtFlags::empty()),
                    Err(Errno::EXIST) => Ok(()),
                    Err(e) => Err(e),
                };
                made.map_err(|e| io_error("make", &self.here.join(name))(e.into()))?;
                self.link(name)
            }
            (found, Making::Missing(_) | Making::Nothing) => found,
        }
    }

    /// Where a link leads; `None` for anything else.
    fn link(&mut self, name: &OsStr) -> Result<Option<PathBuf>, PrivateError> {
        let path = self.here.join(name);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let it = rustix::fs::openat(&self.at, name, flags, Mode::empty())
            .map_err(|e| io_error("open", &path)(e.into()))?;
        let about = stat(&it, &path)?;
        if FileType::from_raw_mode(about.mode) != FileType::Symlink {
            return Ok(None);
        }
        self.links += 1;
        if self.links > MOST_LINKS {
            return Err(io_error("open", &path)(Errno::LOOP.into()));
        }
        self.others_of(about, path.clone())?;
        let target = rustix::fs::readlinkat(&it, "", Vec::new());
        let target = target.map_err(|e| io_error("read", &path)(e.into()))?;
        Ok(Some(OsString::from_vec(target.into_bytes()).into()))
    }

    /// A directory on the way.
    fn pass(&mut self, about: About, path: PathBuf) -> Result<(), PrivateError> {
        refuse_writers(about, &path)?;
        self.others_of(about, path)
    }

    fn others_of(&mut self, about: About, path: PathBuf) -> Result<(), PrivateError> {
        if !is_trusted(about.uid) {
            match self.on_others {
                Others::Refused => return Err(PrivateError::Owner { path, owner: about.uid, me: me() }),
                Others::Noted => self.others.push((path, about.uid)),
            }
        }
        Ok(())
    }

    /// Opens what is here, and no link, for reading.
    fn open(&self, name: &OsStr, flags: OFlags) -> Result<(File, About), PrivateError> {
        let path = self.here.join(name);
        let about = rustix::fs::statat(&self.at, name, AtFlags::SYMLINK_NOFOLLOW);
        let about = about.map_err(|e| io_error("open", &path)(e.into()))?;
        match FileType::from_raw_mode(about.st_mode) {
            FileType::Symlink => return Err(PrivateError::Link { path }),
            FileType::Directory => {}
            _ if flags.contains(OFlags::DIRECTORY) => {
                return Err(PrivateError::Not { path, wanted: "directory" });
            }
            _ => {}
        }
        let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.at, name, flags, Mode::empty());
        let file = File::from(file.map_err(|e| io_error("open", &path)(e.into()))?);
        let about = stat(&file, &path)?;
        Ok((file, about))
    }
}

fn root() -> Result<(OwnedFd, PathBuf), PrivateError> {
    let path = PathBuf::from("/");
    let at =
        rustix::fs::openat(CWD, &path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    Ok((at.map_err(|e| io_error("open", &path)(e.into()))?, path))
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PrivateError + use<> {
    let path = path.to_owned();
    move |source| PrivateError::Io { action, path, source }
}

/// What is asked of a directory or a file.
#[derive(Clone, Copy)]
struct About {
    mode: u32,
    uid: u32,
    gid: u32,
}

fn stat(it: &impl AsFd, path: &Path) -> Result<About, PrivateError> {
    let it = rustix::fs::fstat(it).map_err(|e| io_error("read", path)(e.into()))?;
    Ok(About { mode: it.st_mode, uid: it.st_uid, gid: it.st_gid })
}

fn set_mode(file: &File, path: &Path, mode: u32) -> Result<(), PrivateError> {
    file.set_permissions(Permissions::from_mode(mode)).map_err(io_error("set permissions of", path))
}

fn me() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn is_member(group: u32) -> bool {
    rustix::process::getegid().as_raw() == group
        || rustix::process::getgroups().is_ok_and(|all| all.iter().any(|g| g.as_raw() == group))
}

/// Root, this user, or a user outside this user namespace, as which the owner of a container's file systems is seen.
fn is_trusted(user: u32) -> bool {
    user == me() || user == 0 || is_outside(user)
}

/// Whether an owner has no number in this user namespace.
fn is_outside(user: u32) -> bool {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    read("/proc/sys/kernel/overflowuid").trim().parse() == Ok(user)
        && !is_mapped(user, &read("/proc/self/uid_map"))
}

/// Whether a map of users has this one. Lines are: first inside, first outside, how many.
fn is_mapped(user: u32, map: &str) -> bool {
    let mut lines = map.lines().map(|line| line.split_whitespace().map(|n| n.parse::<u64>().unwrap_or(0)));
    map.is_empty()
        || lines.any(|mut n| {
            let (first, _, count) = (n.next().unwrap_or(0), n.next(), n.next().unwrap_or(0));
            (first..first.saturating_add(count)).contains(&user.into())
        })
}

fn owned(about: About, path: &Path, owners: &[u32]) -> Result<(), PrivateError> {
    // Root's may be that of the root outside.
    let outside = owners.contains(&0) && is_outside(about.uid);
    if owners.contains(&about.uid) || outside {
        return Ok(());
    }
    Err(PrivateError::Owner { path: path.to_owned(), owner: about.uid, me: me() })
}

/// Refuses a directory in which others than its owner can replace things.
fn refuse_writers(about: About, path: &Path) -> Result<(), PrivateError> {
    let private_group = about.gid == about.uid || about.gid == 0;
    let writers = if private_group { 0o002 } else { 0o022 };
    if about.mode & STICKY == 0 && about.mode & writers != 0 {
        return Err(PrivateError::Writable { path: path.to_owned(), mode: about.mode & 0o7777 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{lchown, symlink};

    use super::*;

    const OTHER: u32 = 65_534;

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_secret_that_others_can_read_or_write_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        fs::write(&file, "x").unwrap();
        for (bits, readers, good) in [
            (0o600, Readers::Owner, true),
            (0o400, Readers::Owner, true),
            (0o640, Readers::Owner, false),
            (0o640, Readers::Group, true),
            (0o660, Readers::Group, false),
            (0o644, Readers::Group, false),
            (0o602, Readers::Group, false),
        ] {
            mode(&file, bits);
            let opened = secret(&file, readers);
            match &opened {
                Ok(_) => assert!(good, "{bits:o} {readers:?}"),
                Err(e) => assert!(!good && e.to_string().contains("chmod 600"), "{bits:o} {readers:?}: {e}"),
            }
        }
        mode(&file, 0o600);
        // As secrets are mounted in containers: by links, which somebody else must not have made.
        let link = dir.path().join("link");
        symlink("secret", &link).unwrap();
        secret(&link, Readers::Owner).unwrap();
        symlink(&link, dir.path().join("again")).unwrap();
        secret(&dir.path().join("again"), Readers::Owner).unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        assert!(matches!(secret(&dir.path().join("loop"), Readers::Owner), Err(PrivateError::Io { .. })));
        assert!(secret(&dir.path().join("absent"), Readers::Owner).unwrap_err().is_absent());
        assert!(matches!(secret(dir.path(), Readers::Owner), Err(PrivateError::Not { .. })));
        if lchown(&link, Some(OTHER), Some(OTHER)).is_err() {
            eprintln!("SKIPPED secrets of another user: this test must run as root to give files away");
            return;
        }
        assert!(matches!(secret(&link, Readers::Owner), Err(PrivateError::Owner { owner: OTHER, .. })));
        lchown(&file, Some(OTHER), Some(OTHER)).unwrap();
        assert!(matches!(secret(&file, Readers::Owner), Err(PrivateError::Owner { owner: OTHER, .. })));
        lchown(&file, Some(0), Some(0)).unwrap();
        lchown(dir.path(), Some(OTHER), Some(OTHER)).unwrap();
        let e = secret(&file, Readers::Owner).unwrap_err();
        assert!(matches!(&e, PrivateError::Owner { path, .. } if path == dir.path()), "{e}");
        lchown(dir.path(), Some(0), Some(0)).unwrap();
    }

    #[test]
    fn a_secret_on_a_read_only_mount_is_refused_with_the_mode_to_mount_it_with() {
        const INSIDE: &str = "WINDLASS_TEST_READ_ONLY_SECRET";
        let name = "private::tests::a_secret_on_a_read_only_mount_is_refused_with_the_mode_to_mount_it_with";
        if let Ok(dir) = std::env::var(INSIDE) {
            let e = secret(&Path::new(&dir).join("token"), Readers::Owner).unwrap_err();
            let text = e.to_string();
            assert!(matches!(e, PrivateError::ReadableMount { mode: 0o444, .. }), "{text}");
            assert!(text.contains("defaultMode: 0400") && !text.contains("chmod"), "{text}");
            return;
        }
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let script = "mount -t tmpfs tmpfs \"$1\" && echo secret > \"$1/token\" && chmod 444 \"$1/token\" \
                      && mount -o remount,ro \"$1\" || exit 77; exec \"$2\" --exact \"$3\"";
        let ran = std::process::Command::new("unshare")
            .args(["-Urm", "sh", "-c", script, "sh"])
            .arg(dir.path())
            .arg(std::env::current_exe().unwrap())
            .arg(name)
            .env(INSIDE, dir.path())
            .output();
        match ran {
            Ok(ran) if ran.status.success() => {
                assert!(String::from_utf8_lossy(&ran.stdout).contains("1 passed"), "it ran inside");
            }
            Ok(ran) if ran.status.code() == Some(101) => panic!("{}", String::from_utf8_lossy(&ran.stdout)),
            refused => {
                eprintln!("SKIPPED a read-only mount: no user and mount namespaces here ({refused:?})");
            }
        }
    }

    #[test]
    fn directories_of_ours_are_made_with_exact_modes_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b/../c");
        let (_, is_new) = own(&deep, 0o750).unwrap();
        let bits = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert!(is_new && bits(&deep) == 0o750 && bits(&dir.path().join("a")) == 0o750);
        mode(&deep, 0o755);
        assert!(!own(&deep, 0o750).unwrap().1);
        assert_eq!(bits(&deep), 0o755, "the mode of one that was there is the caller's business");
        own_with(&deep, 0o770).unwrap();
        assert_eq!(bits(&deep), 0o770);
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(matches!(own(&dir.path().join("file"), 0o700), Err(PrivateError::Not { .. })));
        make_place(&dir.path().join("place/below"), 0o700).unwrap();
        place(&dir.path().join("place/below")).unwrap();
        assert!(place(&dir.path().join("nowhere")).unwrap_err().is_absent());
        place(Path::new("/")).unwrap();
        place(Path::new("/dev/shm")).unwrap();
    }

    #[test]
    fn owners_outside_a_user_namespace_are_known_by_its_map() {
        let all = "         0          0 4294967295\n";
        assert!(is_mapped(65_534, all) && is_mapped(0, all));
        let one = "      1000       1000          1\n";
        assert!(is_mapped(1000, one) && !is_mapped(65_534, one) && !is_mapped(1001, one));
        assert!(is_mapped(65_534, "0 100000 65536\n"), "it is a user of this namespace");
        assert!(is_mapped(7, ""), "without a map nobody is outside");
    }
}
