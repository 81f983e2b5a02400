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

/// Lends the memory of an engine's parameters to `work` for writing: `len` bytes at each address, in the order given.
/// Refuses memory that overlaps other memory of the list or `apart`, which `work` reads.
///
/// The package keeps a reference to every parameter for the duration of the call, and lengths are those of the plan,
/// which it made from the parameters' own shapes. An engine that computes with the parameters meanwhile sees a mixture,
/// as it does when its own loader writes; whoever loads has paused it.
pub(crate) fn lend_mut<T>(
    addresses: &[usize],
    lens: &[u64],
    apart: &[u8],
    work: impl FnOnce(&mut [&mut [u8]]) -> Result<T, Failure>,
) -> Result<T, Failure> {
    check_addresses(addresses, lens, apart)?;
    let slice = |(&address, &len): (&usize, &u64)| -> &mut [u8] {
        if len == 0 {
            return &mut [];
        }
        // SAFETY: as in `lend`; no two of them overlap and none overlaps what is read, which was checked.
        unsafe {
            std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), len as usize)
        }
    };
    let mut slices: Vec<&mut [u8]> = addresses.iter().zip(lens).map(slice).collect();
    work(&mut slices)
}

/// Whether there is memory at every address and none of it is there twice.
fn check_addresses(addresses: &[usize], lens: &[u64], apart: &[u8]) -> Result<(), Failure> {
    if addresses.len() != lens.len() {
        let (found, expected) = (addresses.len(), lens.len());
        return Err(Failure::invalid(format!("{expected} addresses are needed and {found} were given")));
    }
    let mut taken = Vec::with_capacity(lens.len() + 1);
    if !apart.is_empty() {
        let start = apart.as_ptr().expose_provenance();
        taken.push((start, start + apart.len(), None));
    }
    for (index, (&address, &len)) in addresses.iter().zip(lens).enumerate().filter(|(_, (_, len))| **len > 0)
    {
        let end = usize::try_from(len).ok().and_then(|len| address.checked_add(len));
        let Some(end) = end.filter(|_| address != 0) else {
            return Err(Failure::invalid(format!(
                "target {index} has no memory at {address:#x} but should have {len} bytes"
            )));
        };
        taken.push((address, end, Some(index)));
    }
    taken.sort_unstable();
    if let Some(pair) = taken.windows(2).find(|w| w[0].1 > w[1].0) {
        let name = |index: Option<usize>| index.map_or("the image".to_owned(), |i| format!("target {i}"));
        return Err(Failure::invalid(format!(
            "{} and {} share memory: give each parameter once, and parameters that are tied as one target",
            name(pair[0].2),
            name(pair[1].2)
        )));
    }
    Ok(())
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
    /// Where it is, how many bytes it has, and whether it may be written.
    pub(crate) fn place(&self) -> (usize, u64, bool) {
        (self.address, self.length as u64, self.writable)
    }

    /// What keeps it mapped.
    pub(crate) fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self._owner)
    }

    /// `bytes`, which live as long as `owner`.
    pub(crate) fn new(bytes: &[u8], writable: bool, owner: Arc<dyn Any + Send + Sync>) -> Memory {
        Memory { address: bytes.as_ptr().expose_provenance(), length: bytes.len(), writable, _owner: owner }
    }
}
