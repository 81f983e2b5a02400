//! The way into a region on the same host: its descriptors over a unix socket.
//!
//! Owns: the socket `agent.sock` in the region's directory, and the one message on it. A process that connects and is
//! of an accepted user gets the descriptors of the header, the manifest and the slots, and nothing else is said. From
//! then on it is attached like any other ([`Region::attach`]): it sees commits by the header's bell, takes map leases
//! in its own name and reads the slots in place, without a copy and without the agent. Must not: hand out a
//! descriptor before the peer's credentials were looked at, or one by which a slot can be written.
//!
//! The message is one line of JSON, `{"windlass":1,"model_id":…}`, with the region's [descriptors](Region::descriptors)
//! as ancillary data on its first byte. A refusal is `{"windlass":1,"error":…}` without descriptors.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};
use windlass_core::error::Kind;

use crate::region::{Descriptors, Region, RegionError};
use crate::stop::Stop;

/// The name of the socket in the region's directory.
pub const SOCKET: &str = "agent.sock";
/// The longest message.
const MAX_MESSAGE: usize = 4096;
/// The most descriptors of a message: directory, header, manifest and two slots.
const MAX_DESCRIPTORS: usize = 5;
/// Those that come before the slots.
const BEFORE_SLOTS: usize = 3;
/// How long a peer may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The way in is closed.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is too long for the address of a unix socket ({len} of {max} bytes): choose a shorter region directory", path.display())]
    TooLong { path: PathBuf, len: usize, max: usize },
    #[error("the agent at {} refused: {why}", path.display())]
    Refused { path: PathBuf, why: String },
    #[error("what answers at {} is not a Windlass agent of this release: {why}", path.display())]
    Answer { path: PathBuf, why: String },
    #[error(transparent)]
    Region(#[from] RegionError),
}

impl LocalError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            LocalError::Io { source, .. } => crate::file::io_kind(source),
            LocalError::TooLong { .. } => Kind::Invalid,
            LocalError::Refused { .. } => Kind::Denied,
            LocalError::Answer { .. } => Kind::Unsupported,
            LocalError::Region(e) => e.kind(),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Greeting {
    windlass: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LocalError + use<> {
    let path = path.to_owned();
    move |source| LocalError::Io { action, path, source }
}

fn check_length(path: &Path) -> Result<(), LocalError> {
    // The kernel's address has 108 bytes and wants a zero at the end.
    const MAX: usize = 107;
    let len = path.as_os_str().len();
    if len > MAX { Err(LocalError::TooLong { path: path.to_owned(), len, max: MAX }) } else { Ok(()) }
}

/// Hands out the descriptors of a region. Dropping it closes the way in; who is attached stays so.
#[derive(Debug)]
pub struct LocalServer {
    region: Arc<Region>,
    path: PathBuf,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl LocalServer {
    /// Opens the socket in the region's directory. One that a dead agent left is replaced: the caller has the
    /// agent's seat.
    pub fn start(region: Arc<Region>) -> Result<LocalServer, LocalError> {
        let path = region.dir().join(SOCKET);
        check_length(&path)?;
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("replace", &path)(e)),
            Ok(()) | Err(_) => {}
        }
        let listener = UnixListener::bind(&path).map_err(io_error("listen on", &path))?;
        let mode = if for_group(&region) { 0o660 } else { 0o600 };
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
            .map_err(io_error("protect", &path))?;
        listener.set_nonblocking(true).map_err(io_error("listen on", &path))?;
        let slots = read_only(&region).map_err(io_error("open the slots for", &path))?;
        let stop = Stop::never();
        let (ended, served) = (stop.clone(), Arc::clone(&region));
        let serve = move || serve(&listener, &served, &slots, &ended);
        let thread = std::thread::Builder::new().name("windlass-local".into()).spawn(serve);
        let thread = thread.map_err(io_error("start a thread for", &path))?;
        Ok(LocalServer { region, path, stop, thread: Some(thread) })
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so already.
            let _ = thread.join();
        }
        // In a directory that was replaced, a socket of this name is another agent's.
        if !self.region.is_replaced() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Whether the region was made for its owner's group.
fn for_group(region: &Region) -> bool {
    std::fs::metadata(region.dir()).is_ok_and(|m| m.permissions().mode() & 0o070 != 0)
}

/// The slots again, for reading: whoever attaches has no business writing them, least of all a member of the group.
fn read_only(region: &Region) -> io::Result<Vec<File>> {
    let again = |fd: &BorrowedFd<'_>| File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    region.descriptors().iter().skip(BEFORE_SLOTS).map(again).collect()
}

fn serve(listener: &UnixListener, region: &Region, slots: &[File], stop: &Stop) {
    while !stop.is_set() {
        let mut fds = [rustix::event::PollFd::new(listener, rustix::event::PollFlags::IN)];
        let glance = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let _ = rustix::event::poll(&mut fds, Some(&glance));
        match listener.accept() {
            Ok((peer, _)) => {
                if let Err(error) = greet(&peer, region, slots) {
                    tracing::debug!(%error, "a local peer went away");
                }
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept local peers");
                // Most likely out of descriptors; some may be free soon.
                std::thread::park_timeout(Stop::GLANCE);
            }
        }
    }
}

fn greet(peer: &UnixStream, region: &Region, slots: &[File]) -> io::Result<()> {
    peer.set_nonblocking(false)?;
    peer.set_write_timeout(Some(PATIENCE))?;
    let theirs = rustix::net::sockopt::socket_peercred(peer)?;
    let ours = rustix::process::geteuid();
    // In group mode the socket's own permissions let the group in.
    if !(theirs.uid == ours || theirs.uid.is_root() || for_group(region)) {
        tracing::warn!(uid = theirs.uid.as_raw(), "a local peer of another user was refused");
        let why =
            format!("user {} may not attach to a region of user {}", theirs.uid.as_raw(), ours.as_raw());
        return send(peer, &Greeting { windlass: 1, model_id: None, error: Some(why) }, &[]);
    }
    let greeting = Greeting { windlass: 1, model_id: Some(region.model_id().to_string()), error: None };
    let mut fds = region.descriptors();
    fds.truncate(BEFORE_SLOTS);
    fds.extend(slots.iter().map(|f| f.as_fd()));
    send(peer, &greeting, &fds)
}

fn send(mut peer: &UnixStream, greeting: &Greeting, fds: &[rustix::fd::BorrowedFd<'_>]) -> io::Result<()> {
    let mut line = serde_json::to_vec(greeting)?;
    line.push(b'\n');
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors"));
    }
    let sent = rustix::net::sendmsg(peer, &[IoSlice::new(&line)], &mut control, SendFlags::NOSIGNAL)?;
    peer.write_all(line.get(sent..).unwrap_or_default())
}

/// Attaches to the region whose agent listens in `dir`.
pub fn attach(dir: &Path) -> Result<Arc<Region>, LocalError> {
    let path = dir.join(SOCKET);
    check_length(&path)?;
    let peer = connect(&path).map_err(io_error("connect to", &path))?;
    let (line, fds) = receive(&peer).map_err(io_error("read from", &path))?;
    let answer = |why: String| LocalError::Answer { path: path.clone(), why };
    let greeting: Greeting = serde_json::from_slice(&line).map_err(|e| answer(e.to_string()))?;
    if let Some(why) = greeting.error {
        return Err(LocalError::Refused { path, why });
    }
    if greeting.windlass != 1 {
        return Err(answer(format!("it speaks version {}", greeting.windlass)));
    }
    Ok(Region::attach(Descriptors::new(fds)?)?)
}

/// Connects with a deadline: an agent that is stopped may leave a full queue.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect(&socket2::SockAddr::unix(path)?)?;
    Ok(UnixStream::from(OwnedFd::from(socket)))
}

/// Reads one line and the descriptors that come with it.
fn receive(peer: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let (mut line, mut fds) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while !line.ends_with(b"\n") {
        if start.elapsed() > PATIENCE {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buffer = [0; 1024];
        let got = rustix::net::recvmsg(
            peer,
            &mut [IoSliceMut::new(&mut buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_DESCRIPTORS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "more descriptors than a region has"));
        }
        if got.bytes == 0 || line.len() + got.bytes > MAX_MESSAGE {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "no whole line of greeting"));
        }
        line.extend_from_slice(&buffer[..got.bytes]);
    }
    Ok((line, fds))
}
