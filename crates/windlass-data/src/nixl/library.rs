//! The C interface of NIXL, which is opened at run time.
//!
//! Owns: the search for the library, the declarations of the functions that are called here, and [`Raw`], an agent whose calls
//! are safe. Called by [`super`]. Must not: know offers, stripes or images.
//!
//! # Why calling it is sound here
//!
//! 1. The declarations are those of the C interface of NIXL 1.x. A library that lacks one of the functions, or whose package
//!    says another major version, is not used.
//! 2. A library is never closed: its threads would run on in memory that is gone.
//! 3. Handles live in [`Raw`] and are given back by it, each once. The agent locks itself (`thread_sync`).
//! 4. A read writes memory that the caller has on [loan](crate::shm::Loan) until the read has *succeeded*, or until the agent is
//!    destroyed, which ends its threads and connections. NIXL can cancel a request, but not say when its last
//!    byte has landed.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use libloading::Library;
use parking_lot::Mutex;

use super::error::NixlError;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 1;
/// Host memory.
const DRAM: c_uint = 0;
const READ: c_uint = 0;
/// The agent serialises calls of several threads.
const SYNC_STRICT: c_uint = 1;
/// How long the progress thread sleeps when there is nothing to do. Without it, the thread keeps a core busy.
const PROGRESS_DELAY_US: u64 = 1000;

type Handle = *mut c_void;

/// The layout of `nixl_capi_agent_config_t`.
#[repr(C)]
struct AgentConfig {
    enable_prog_thread: bool,
    enable_listen_thread: bool,
    listen_port: u16,
    thread_sync: c_uint,
    num_workers: c_uint,
    pthr_delay_us: u64,
    lthr_delay_us: u64,
    capture_telemetry: bool,
}

/// Declares the functions that are called, and looks up each of them by its name.
macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Functions {
            fn find(library: &Library, path: &Path) -> Result<Functions, NixlError> {
                Ok(Functions { $($name: {
                    let symbol = concat!("nixl_capi_", stringify!($name));
                    let absent = || NixlError::Symbol { path: path.to_owned(), symbol };
                    // SAFETY: the type is the one that NIXL 1.x declares for this name.
                    let found = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>(symbol) };
                    *found.map_err(|_| absent())?
                },)* })
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent(Handle);
    get_available_plugins(Handle, *mut Handle);
    string_list_size(Handle, *mut usize);
    string_list_get(Handle, usize, *mut *const c_char);
    destroy_string_list(Handle);
    create_params(*mut Handle);
    params_add(Handle, *const c_char, *const c_char);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    create_reg_dlist(c_uint, *mut Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(Handle);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    create_xfer_dlist(c_uint, *mut Handle);
    xfer_dlist_desc_count(Handle, *mut usize);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    destroy_xfer_dlist(Handle);
    create_xfer_req(Handle, c_uint, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
}

unsafe extern "C" {
    fn free(memory: *mut c_void);
}

fn c_string(what: &'static str, text: &str) -> Result<CString, NixlError> {
    CString::new(text).map_err(|_| NixlError::Text { what, text: text.to_owned() })
}

fn check(doing: &'static str, code: c_int) -> Result<(), NixlError> {
    if code == SUCCESS { Ok(()) } else { Err(NixlError::Call { doing, code }) }
}

/// The library, opened.
pub(super) struct Nixl {
    pub(super) path: PathBuf,
    /// The name and release of its package; its name alone where no package is around it.
    pub(super) release: String,
    call: Functions,
}

impl Nixl {
    /// Opens the library that `named` names, or else the one of the Python environment or of the system.
    pub(super) fn open(named: Option<&Path>) -> Result<Nixl, NixlError> {
        let path = super::find::library(named)?;
        let release = super::find::release(&path)?;
        // SAFETY: NIXL's initialisers, and those of what it links, expect nothing of the program.
        let library = unsafe { Library::new(&path) };
        let library = library.map_err(|e| NixlError::Load { path: path.clone(), cause: e.to_string() })?;
        // Its threads may outlive every agent, and those of its initialisers a library without our functions.
        let library = ManuallyDrop::new(library);
        let call = Functions::find(&library, &path)?;
        Ok(Nixl { path, release, call })
    }
}

/// A request that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Request(usize);

/// One agent of NIXL with its UCX backend.
pub(super) struct Raw {
    nixl: Nixl,
    agent: Handle,
    backend: Handle,
    /// Requests that were not given back.
    requests: Mutex<BTreeSet<Request>>,
}

// SAFETY: the agent locks itself (`SYNC_STRICT`), and its handles are not tied to a thread.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

/// Gives an auxiliary object back at the end of a scope.
struct Scoped {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
}

impl Drop for Scoped {
    fn drop(&mut self) {
        // SAFETY: made by its constructor, given back here only.
        unsafe { (self.destroy)(self.handle) };
    }
}

impl Raw {
    /// Makes an agent of this name, with UCX and its parameters.
    pub(super) fn create(nixl: Nixl, name: &str, params: &[(String, String)]) -> Result<Raw, NixlError> {
        let name = c_string("the name of an agent", name)?;
        let config = AgentConfig {
            enable_prog_thread: true,
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: SYNC_STRICT,
            num_workers: 0,
            pthr_delay_us: PROGRESS_DELAY_US,
            lthr_delay_us: 0,
            capture_telemetry: false,
        };
        let mut agent = null_mut();
        // SAFETY: both arguments outlive the call, which copies them.
        let code =
            unsafe { (nixl.call.create_configured_agent)(name.as_ptr(), &raw const config, &raw mut agent) };
        check("make an agent", code)?;
        let mut raw = Raw { nixl, agent, backend: null_mut(), requests: Mutex::default() };
        let plugins = raw.plugins()?;
        if !plugins.iter().any(|p| p == super::PLUGIN) {
            let (path, plugin, found) = (raw.nixl.path.clone(), super::PLUGIN, plugins.join(", "));
            return Err(NixlError::Plugin { path, plugin, found });
        }
        let call = &raw.nixl.call;
        let list = Raw::made("make parameters", call.destroy_params, |made| {
            // SAFETY: writes a handle.
            unsafe { (call.create_params)(made) }
        })?;
        for (key, value) in params {
            let (key, value) = (c_string("the parameter", key)?, c_string("the value", value)?);
            // SAFETY: the strings outlive the call, which copies them.
            check("set a parameter", unsafe {
                (call.params_add)(list.handle, key.as_ptr(), value.as_ptr())
            })?;
        }
        let plugin = c_string("the plugin", super::PLUGIN)?;
        let mut backend = null_mut();
        // SAFETY: all handles are alive; the call writes a handle.
        let code =
            unsafe { (call.create_backend)(raw.agent, plugin.as_ptr(), list.handle, &raw mut backend) };
        check("start UCX: see UCX_TLS and UCX_NET_DEVICES", code)?;
        drop(list);
        raw.backend = backend;
        Ok(raw)
    }

    pub(super) fn release(&self) -> &str {
        &self.nixl.release
    }

    pub(super) fn path(&self) -> &Path {
        &self.nixl.path
    }

    fn made(
        doing: &'static str,
        destroy: unsafe extern "C" fn(Handle) -> c_int,
        make: impl FnOnce(*mut Handle) -> c_int,
    ) -> Result<Scoped, NixlError> {
        let mut handle = null_mut();
        check(doing, make(&raw mut handle))?;
        Ok(Scoped { handle, destroy })
    }

    /// The plugins that the library finds.
    pub(super) fn plugins(&self) -> Result<Vec<String>, NixlError> {
        let call = &self.nixl.call;
        let list = Raw::made("list its plugins", call.destroy_string_list, |made| {
            // SAFETY: the agent is alive; writes a handle.
            unsafe { (call.get_available_plugins)(self.agent, made) }
        })?;
        let mut count = 0;
        // SAFETY: the list is alive.
        check("list its plugins", unsafe { (call.string_list_size)(list.handle, &raw mut count) })?;
        let name = |i| {
            let mut text = null();
            // SAFETY: the list is alive; the text belongs to it and is copied before it goes.
            unsafe {
                check("list its plugins", (call.string_list_get)(list.handle, i, &raw mut text))?;
                Ok(CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        (0..count).map(name).collect()
    }

    fn memory(&self, address: usize, bytes: usize) -> Result<Scoped, NixlError> {
        let call = &self.nixl.call;
        let list = Raw::made("describe memory", call.destroy_reg_dlist, |made| {
            // SAFETY: writes a handle.
            unsafe { (call.create_reg_dlist)(DRAM, made) }
        })?;
        // SAFETY: only the numbers are kept.
        let code = unsafe { (call.reg_dlist_add_desc)(list.handle, address, bytes, 0, null(), 0) };
        check("describe memory", code)?;
        Ok(list)
    }

    /// Registers memory, which must stay mapped until it is deregistered or the agent is destroyed. Nothing is read or
    /// written by this.
    pub(super) fn register(&self, address: usize, bytes: usize) -> Result<(), NixlError> {
        let list = self.memory(address, bytes)?;
        // SAFETY: the caller keeps the memory mapped.
        check("register memory: see `ulimit -l`", unsafe {
            (self.nixl.call.register_mem)(self.agent, list.handle, null_mut())
        })
    }

    pub(super) fn deregister(&self, address: usize, bytes: usize) -> Result<(), NixlError> {
        let list = self.memory(address, bytes)?;
        // SAFETY: the agent is alive.
        check("deregister memory", unsafe {
            (self.nixl.call.deregister_mem)(self.agent, list.handle, null_mut())
        })
    }

    /// What others need to reach this agent and the memory that it has registered.
    pub(super) fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        let (mut data, mut len) = (null_mut(), 0);
        // SAFETY: the call writes an allocation of its length, which is copied and given back here.
        unsafe {
            check("describe itself", (self.nixl.call.get_local_md)(self.agent, &raw mut data, &raw mut len))?;
            let bytes = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
            free(data);
            Ok(bytes)
        }
    }

    /// Takes a peer's metadata. Answers the peer's name.
    pub(super) fn meet(&self, metadata: &[u8]) -> Result<String, NixlError> {
        let mut name = null_mut();
        // SAFETY: the metadata outlives the call; the name is an allocation that is copied and given back here.
        unsafe {
            let code = (self.nixl.call.load_remote_md)(
                self.agent,
                metadata.as_ptr().cast(),
                metadata.len(),
                &raw mut name,
            );
            check("reach the peer", code)?;
            let text = CStr::from_ptr(name).to_string_lossy().into_owned();
            free(name.cast());
            Ok(text)
        }
    }

    /// Forgets a peer and closes the connection to it.
    pub(super) fn part(&self, peer: &str) -> Result<(), NixlError> {
        let peer = c_string("the name of a peer", peer)?;
        // SAFETY: the name outlives the call.
        check("forget the peer", unsafe { (self.nixl.call.invalidate_remote_md)(self.agent, peer.as_ptr()) })
    }

    fn pieces(&self, pieces: impl ExactSizeIterator<Item = (usize, usize)>) -> Result<Scoped, NixlError> {
        let call = &self.nixl.call;
        let list = Raw::made("describe a read", call.destroy_xfer_dlist, |made| {
            // SAFETY: writes a handle.
            unsafe { (call.create_xfer_dlist)(DRAM, made) }
        })?;
        let (expected, mut count) = (pieces.len(), 0);
        for (address, bytes) in pieces {
            // SAFETY: only the numbers are kept.
            let code = unsafe { (call.xfer_dlist_add_desc)(list.handle, address, bytes, 0) };
            check("describe a read", code)?;
        }
        // SAFETY: the list is alive.
        check("describe a read", unsafe { (call.xfer_dlist_desc_count)(list.handle, &raw mut count) })?;
        // Versions before 1.0 have another list, and lack this function.
        if count == expected { Ok(list) } else { Err(NixlError::Call { doing: "describe a read", code: 0 }) }
    }

    /// Begins to read pieces of a peer's memory: (address here, address there, bytes). The pieces here are registered and on
    /// loan to the caller ([`super::Read`]), who keeps the loans until [`Raw::poll`] says that the request has succeeded, or
    /// this agent is dropped.
    pub(super) fn read_into_loans(
        &self,
        peer: &str,
        pieces: &[(usize, usize, usize)],
    ) -> Result<Request, NixlError> {
        let (call, peer) = (&self.nixl.call, c_string("the name of a peer", peer)?);
        let here = self.pieces(pieces.iter().map(|(here, _, bytes)| (*here, *bytes)))?;
        let there = self.pieces(pieces.iter().map(|(_, there, bytes)| (*there, *bytes)))?;
        let mut request = null_mut();
        // SAFETY: handles and name are alive; the lists are copied.
        let code = unsafe {
            (call.create_xfer_req)(
                self.agent,
                READ,
                here.handle,
                there.handle,
                peer.as_ptr(),
                &raw mut request,
                null_mut(),
            )
        };
        check("prepare a read", code)?;
        let number = Request(request.expose_provenance());
        self.requests.lock().insert(number);
        // SAFETY: the request is alive, and the caller keeps the memory.
        let code = unsafe { (call.post_xfer_req)(self.agent, request, null_mut()) };
        if code != SUCCESS && code != IN_PROGRESS {
            return Err(NixlError::Call { doing: "begin a read", code });
        }
        Ok(number)
    }

    /// Whether a request has succeeded; it is then given back. After an error, parts of it may still be under way.
    pub(super) fn poll(&self, request: Request) -> Result<bool, NixlError> {
        if !self.requests.lock().contains(&request) {
            return Err(NixlError::Closed);
        }
        let handle: Handle = std::ptr::with_exposed_provenance_mut(request.0);
        // SAFETY: it was not given back.
        match unsafe { (self.nixl.call.get_xfer_status)(self.agent, handle) } {
            SUCCESS => {
                self.give_back(request);
                Ok(true)
            }
            IN_PROGRESS => Ok(false),
            code => Err(NixlError::Call { doing: "read", code }),
        }
    }

    fn give_back(&self, request: Request) {
        if self.requests.lock().remove(&request) {
            let handle: Handle = std::ptr::with_exposed_provenance_mut(request.0);
            // SAFETY: removed from the set, so given back once; the second call frees what the first has emptied.
            unsafe {
                (self.nixl.call.release_xfer_req)(self.agent, handle);
                (self.nixl.call.destroy_xfer_req)(handle);
            }
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let left: Vec<Request> = self.requests.lock().iter().copied().collect();
        left.into_iter().for_each(|request| self.give_back(request));
        // SAFETY: each is alive and given back here only. The backend's handle is a wrapper, which the agent does not use.
        unsafe {
            if !self.backend.is_null() {
                (self.nixl.call.destroy_backend)(self.backend);
            }
            (self.nixl.call.destroy_agent)(self.agent);
        }
    }
}
