//! Handing versions to an engine.

use std::path::Path;
use std::time::Instant;

use windlass_core::chunk::{ChunkConfig, Chunker, Item, WeightChunk};
use windlass_core::digest::BlockSum;
use windlass_core::dtype::Dtype;
use windlass_core::identity::{Identity, LayoutHash, StateDigest};
use windlass_core::manifest::Manifest;

use super::error::{BoxError, RoleError};
use super::{Arrived, WeightTransferReceiver};
use crate::image::Known;
use crate::receiver::{Synced, TransferStatus};
use crate::stop::Stop;

/// An engine that takes weights.
///
/// Any `FnMut(&Weights<'_>) -> Result<(), BoxError>` is one.
pub trait WeightLoader {
    /// Loads a whole version. The bytes are borrowed for the time of the call. After an error it is called again with
    /// the newest version, which may be the same.
    fn load(&mut self, weights: &Weights<'_>) -> Result<(), BoxError>;
}

impl<F: FnMut(&Weights<'_>) -> Result<(), BoxError>> WeightLoader for F {
    fn load(&mut self, weights: &Weights<'_>) -> Result<(), BoxError> {
        self(weights)
    }
}

impl WeightLoader for Box<dyn WeightLoader + '_> {
    fn load(&mut self, weights: &Weights<'_>) -> Result<(), BoxError> {
        (**self).load(weights)
    }
}

/// A tensor in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorView<'a> {
    /// The name it was asked for by.
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [u64],
    /// Its bytes, little-endian and row-major.
    pub bytes: &'a [u8],
}

/// A whole version whose digest was right, for the time of a load.
#[derive(Debug)]
pub struct Weights<'a> {
    arrived: &'a Arrived,
    /// By tensor; `None` if unknown.
    changed: Option<Vec<bool>>,
}

impl<'a> Weights<'a> {
    /// Which version.
    pub fn identity(&self) -> &'a Identity {
        self.arrived.identity()
    }

    /// Its state digest.
    pub fn digest(&self) -> StateDigest {
        self.arrived.digest()
    }

    /// Its tensors.
    pub fn manifest(&self) -> &'a Manifest {
        self.arrived.manifest()
    }

    /// All bytes, by the manifest.
    pub fn data(&self) -> &'a [u8] {
        self.arrived.data()
    }

    /// The safetensors file that holds them, for engines that load from a path, if there is one.
    pub fn path(&self) -> Option<&'a Path> {
        self.arrived.path()
    }

    /// How the version came.
    pub fn how(&self) -> &'a Synced {
        self.arrived.how()
    }

    fn view(&self, name: &'a str, tensor: usize) -> Option<TensorView<'a>> {
        let t = self.manifest().tensors().get(tensor)?;
        let bytes = self.data().get(t.offset as usize..t.range().end as usize)?;
        Some(TensorView { name, dtype: t.dtype, shape: &t.shape, bytes })
    }

    /// A tensor by its name or an alias.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'a>> {
        let manifest = self.manifest();
        let tensor = manifest.find(name)?;
        let name = match manifest.aliases().get_key_value(name) {
            Some((alias, _)) => alias,
            None => &manifest.tensors().get(tensor)?.name,
        };
        self.view(name, tensor)
    }

    /// Every name with its tensor: those of the manifest in order, then the aliases.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'a>> {
        let manifest = self.manifest();
        let own = manifest.tensors().iter().map(|t| t.name.as_str());
        own.chain(manifest.aliases().keys().map(String::as_str)).filter_map(|name| self.tensor(name))
    }

    /// Whether a tensor differs from what this loader loaded last. `None` if that is not known: it has loaded
    /// nothing, its last load failed, or the layout is another one. Then everything must be loaded.
    pub fn changed(&self, name: &str) -> Option<bool> {
        self.changed.as_ref()?.get(self.manifest().find(name)?).copied()
    }

    /// The tensors that must be loaded: those that changed, or all if that is not known. Aliases are not repeated.
    pub fn to_load(&self) -> impl Iterator<Item = TensorView<'a>> {
        let tensors = self.manifest().tensors().iter();
        let changed = |name: &str| self.changed(name).unwrap_or(true);
        tensors.filter(move |t| changed(&t.name)).filter_map(|t| self.tensor(&t.name))
    }

    /// All tensors grouped and batched, for engines that load chunk by chunk. Aliases are not repeated.
    pub fn chunks(&self, config: ChunkConfig) -> Result<Vec<WeightChunk<&'a [u8]>>, RoleError> {
        let mut chunker = Chunker::new(config);
        let mut chunks = Vec::new();
        for t in self.manifest().tensors() {
            let Some(view) = self.tensor(&t.name) else { continue };
            let item = Item::new(&t.name, t.dtype, t.shape.clone(), t.bytes, view.bytes)?;
            chunks.extend(chunker.push(item)?);
        }
        chunks.extend(chunker.finish());
        Ok(chunks)
    }
}

/// A version that an engine has.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub known: Known,
    pub how: Synced,
    /// How long the loader took.
    pub load_ms: f64,
    /// How many tensors had changed, if that was known.
    pub changed: Option<usize>,
}

/// Feeds one engine's loader from a receiver, and knows what the engine holds.
#[derive(Debug)]
pub struct Feed<L> {
    receiver: Box<dyn WeightTransferReceiver>,
    loader: L,
    engine: Option<Known>,
    /// The sums of what the engine holds, while that is certain.
    held: Option<(LayoutHash, Vec<BlockSum>)>,
    failures: u64,
}

impl std::fmt::Debug for dyn WeightTransferReceiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.status())
    }
}

impl<L: WeightLoader> Feed<L> {
    /// An engine that has nothing yet.
    pub fn new(receiver: Box<dyn WeightTransferReceiver>, loader: L) -> Feed<L> {
        Feed { receiver, loader, engine: None, held: None, failures: 0 }
    }

    /// The version that the engine holds: the last one that its loader loaded.
    pub fn engine(&self) -> Option<&Known> {
        self.engine.as_ref()
    }

    /// The version at the receiver.
    pub fn image(&self) -> Option<Known> {
        self.receiver.status().image
    }

    /// Where the receiver stands.
    pub fn status(&self) -> TransferStatus {
        self.receiver.status()
    }

    /// How often the loader failed since it last did not.
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// The loader.
    pub fn loader(&mut self) -> &mut L {
        &mut self.loader
    }

    /// Waits for a version that the engine does not hold, and loads it. After an error it can be called again.
    pub fn step(&mut self, stop: &Stop) -> Result<Loaded, RoleError> {
        let arrived = self.receiver.next(self.engine.as_ref().map(|k| &k.identity), stop)?;
        let layout = arrived.manifest().layout_hash();
        // Until the load is over it is unknown what the engine holds.
        let held = self.held.take().filter(|(l, _)| *l == layout);
        let changed = held
            .zip(arrived.sums.as_ref())
            .map(|((_, old), new)| old.iter().zip(new).map(|(a, b)| a != b).collect::<Vec<_>>());
        let count = changed.as_ref().map(|c| c.iter().filter(|c| **c).count());
        let start = Instant::now();
        let result = self.loader.load(&Weights { arrived: &arrived, changed });
        let load_ms = start.elapsed().as_secs_f64() * 1e3;
        let Arrived { known, held: memory, sums, how, .. } = arrived;
        let finished = memory.finish();
        let failed = |source| RoleError::Load {
            identity: Box::new(known.identity.clone()),
            still: self.engine.as_ref().map(|k| Box::new(k.identity.clone())),
            source,
        };
        // A load that outlived its lease may have read two versions: it failed, whatever it says.
        if let Err(error) = result.map_err(failed).and(finished) {
            self.failures += 1;
            return Err(error);
        }
        self.failures = 0;
        self.held = sums.map(|s| (layout, s));
        self.engine = Some(known.clone());
        Ok(Loaded { known, how, load_ms, changed: count })
    }
}
