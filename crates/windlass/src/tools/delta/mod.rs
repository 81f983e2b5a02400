//! `windlass delta`: the changes between two versions, as a file.
//!
//! | module | what it owns |
//! |---|---|
//! | [`make`] | `delta make` |
//! | [`apply`] | `delta apply`, to a new place or in place |
//! | [`journal`] | the journal with which an interrupted in-place update is finished |

pub(crate) mod apply;
pub(crate) mod journal;
pub(crate) mod make;

use std::path::Path;

use windlass_core::manifest::Manifest;

use crate::error::Error;

/// Fails unless both manifests have the same tensors, and names the first that differs.
pub(crate) fn same_layout(a: (&Path, &Manifest), b: (&Path, &Manifest)) -> Result<(), Error> {
    if a.1.layout_hash() == b.1.layout_hash() {
        return Ok(());
    }
    let differ = |name: &str, how: String| Error::LayoutDiffers {
        a: a.0.to_owned(),
        b: b.0.to_owned(),
        name: name.to_owned(),
        how,
    };
    let only = |in_path: &Path| format!("is only in {}", in_path.display());
    for t in a.1.tensors() {
        let Some(i) = b.1.find(&t.name) else { return Err(differ(&t.name, only(a.0))) };
        let u = &b.1.tensors()[i];
        if u.name != t.name {
            return Err(differ(&t.name, format!("is another name of {:?} in {}", u.name, b.0.display())));
        }
        if (u.dtype, &u.shape) != (t.dtype, &t.shape) {
            let how =
                format!("is {} {:?} in one and {} {:?} in the other", t.dtype, t.shape, u.dtype, u.shape);
            return Err(differ(&t.name, how));
        }
    }
    if let Some(u) = b.1.tensors().iter().find(|u| a.1.find(&u.name).is_none()) {
        return Err(differ(&u.name, only(b.0)));
    }
    let names = a.1.aliases().keys().chain(b.1.aliases().keys());
    let alias = names.into_iter().find(|n| a.1.aliases().get(*n) != b.1.aliases().get(*n));
    Err(differ(alias.map_or("", String::as_str), "does not stand for the same tensor in both".into()))
}

/// Bits for each changed unit.
pub(crate) fn bits_per_change(bytes: u64, changes: u64) -> f64 {
    if changes == 0 { 0.0 } else { bytes as f64 * 8.0 / changes as f64 }
}
