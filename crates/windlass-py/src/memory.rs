//! Memory that crosses the border.
//!
//! Owns: the only `unsafe` of this crate, by which the memory of a Python tensor is read, and [`Memory`], by which a
//! slot is shown to Python. Tensors go in as addresses and come out as addresses; nothing is copied on the way.

#![expect(unsafe_code, reason = "the memory of tensors is only known by its address")]

use std::any::Any;
use std::sync::Arc;

use pyo3::prelude::*;

use crate::errors::Failure;

/// The bytes at `address`. Empty for an empty tensor, whose address is often null.
///
/// # Safety
/// `len` bytes at `address` must be readable, and stay so, and nobody may write them, while the slice lives.
unsafe fn bytes_at<'a>(address: usize, len: usize) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise; an address that is not null was checked.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len) }
}

/// Lends the memory of tensors to `work`: `len` bytes at each address.
///
/// The package keeps a reference to every tensor it passes for the duration of the call, and computes lengths from
/// the tensors' own shapes and strides. A trainer that changes weights while it publishes them gets a mixture; that
/// is a data race in the trainer, which the digest will not notice and the documentation of `offload` forbids.
pub(crate) fn lend<T>(
    addresses: &[usize],
    lens: &[u64],
    work: impl FnOnce(&[&[u8]]) -> Result<T, Failure>,
) -> Result<T, Failure> {
    if addresses.len() != lens.len() {
        let (found, expected) = (addresses.len(), lens.len());
        return Err(Failure::invalid(format!("{expected} addresses are needed and {found} were given")));
    }
    let mut slices = Vec::with_capacity(lens.len());
    for (index, (&address, &len)) in addresses.iter().zip(lens).enumerate() {
        if address == 0 && len > 0 {
            return Err(Failure::invalid(format!(
                "source {index} has no memory but should have {len} bytes"
            )));
        }
        // SAFETY: see above; the slices end with this call, before the package lets go of the tensors.
        slices.push(unsafe { bytes_at(address, len as usize) });
    }
    work(&slices)
}

/// Memory of Windlass that Python may look at: an address, a length, and a hold on it. The memory is mapped for as
/// long as this object lives; what it holds may change once the lease or the attempt that it came from has ended.
#[pyclass(frozen, module = "windlass._windlass")]
pub(crate) struct Memory {
    /// The address of the first byte.
    #[pyo3(get)]
    address: usize,
    /// How many bytes.
    #[pyo3(get)]
    length: usize,
    /// Whether it may be written.
    #[pyo3(get)]
    writable: bool,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl Memory {
    /// `bytes`, which live as long as `owner`.
    pub(crate) fn new(bytes: &[u8], writable: bool, owner: Arc<dyn Any + Send + Sync>) -> Memory {
        Memory { address: bytes.as_ptr().expose_provenance(), length: bytes.len(), writable, _owner: owner }
    }
}
