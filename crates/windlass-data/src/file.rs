//! Safetensors files on disk: one file, or a directory of shards.
//!
//! Owns: where each tensor of a checkpoint lies, and read-only maps of its files. Called by the command line.
//! Must not: write, or look at the bytes of tensors.
//!
//! # What is a checkpoint
//!
//! - A file: all of its tensors.
//! - A directory with `model.safetensors.index.json`: the shards that its `weight_map` names, which must hold
//!   the tensors it says they hold. Other files are ignored.
//! - Any other directory: all `*.safetensors` in it.
//!
//! A tensor that two shards hold is an error, unless the index says which of them counts. An alias that stands
//! for different tensors in two shards is an error. What is neither a file nor a directory is refused before it
//! is opened, because opening a pipe waits for its other end. The tensors of all shards make one [`Manifest`], so a
//! checkpoint in one file and the same one in shards have the same layout.
//!
//! [`Layout`] reads headers only; [`Checkpoint`] also maps the files, so that what is larger than memory can be
//! read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap};
use windlass_core::error::Kind;
use windlass_core::manifest::{HeaderTensor, Manifest, ManifestError, SafetensorsHeader};

/// The name of the file that lists the shards of a directory.
pub const INDEX: &str = "model.safetensors.index.json";
/// How a delta begins. A safetensors file never does: it would be a header of exabytes.
const DELTA_MAGIC: &[u8; 8] = b"WLDELTA1";

/// A checkpoint that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{} is not a valid safetensors file: {source}", path.display())]
    Header { path: PathBuf, source: ManifestError },
    #[error("the shards in {} do not fit together: {source}", path.display())]
    Union { path: PathBuf, source: ManifestError },
    #[error("{} is a Windlass delta, not a safetensors file", path.display())]
    IsDelta { path: PathBuf },
    #[error("{} is an index of shards; give the directory it is in", path.display())]
    IsIndex { path: PathBuf },
    /// Two shards say that an alias stands for different tensors.
    #[error("alias {alias:?} stands for {first:?} in one shard and for {second:?} in {}", path.display())]
    AliasConflict {
        alias: String,
        /// What it stands for in an earlier shard.
        first: String,
        /// What it stands for in this one.
        second: String,
        path: PathBuf,
    },
    #[error("{} holds no *.safetensors files", path.display())]
    NoShards { path: PathBuf },
    #[error("tensor {name:?} is in both {} and {}; remove one of them or add {INDEX}", first.display(), second.display())]
    Duplicate { name: String, first: PathBuf, second: PathBuf },
    /// The index is not JSON, or has no `weight_map` of names to file names.
    #[error("{} is not a valid index of shards: {reason}", path.display())]
    Index { path: PathBuf, reason: String },
    #[error("{} says that tensor {name:?} is in {shard:?}, {found}", path.display())]
    IndexMismatch { path: PathBuf, name: String, shard: String, found: String },
}

impl FileError {
    /// The kind of failure (see [`windlass_core::error`]).
    pub fn kind(&self) -> Kind {
        match self {
            FileError::Io { source, .. } => io_kind(source),
            FileError::Header { source, .. } | FileError::Union { source, .. } => source.kind(),
            FileError::NoShards { .. } => Kind::NotFound,
            FileError::Duplicate { .. }
            | FileError::Index { .. }
            | FileError::IsDelta { .. }
            | FileError::IsIndex { .. }
            | FileError::AliasConflict { .. } => Kind::Invalid,
            FileError::IndexMismatch { .. } => Kind::Corrupt,
        }
    }
}

/// Sorts what the operating system says into kinds. Its list is open, so there is a last resort.
pub fn io_kind(e: &io::Error) -> Kind {
    match e.kind() {
        io::ErrorKind::NotFound => Kind::NotFound,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Kind::Denied,
        io::ErrorKind::TimedOut => Kind::Timeout,
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => Kind::Corrupt,
        io::ErrorKind::Interrupted => Kind::Cancelled,
        io::ErrorKind::Unsupported => Kind::Unsupported,
        io::ErrorKind::StorageFull
        | io::ErrorKind::QuotaExceeded
        | io::ErrorKind::OutOfMemory
        | io::ErrorKind::FileTooLarge => Kind::Exhausted,
        _ => Kind::Invalid,
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError::Io { action, path, source }
}

/// One file of a checkpoint.
#[derive(Debug)]
pub struct Shard {
    pub path: PathBuf,
    pub header: SafetensorsHeader,
    /// How long it is.
    pub bytes: u64,
    /// Its tensors, by number in the header, that the index finds in another shard. They are not part of the
    /// checkpoint.
    pub unused: BTreeSet<usize>,
}

/// Opens a regular file for reading, and answers its length. The path is looked at first: opening a pipe would
/// wait for somebody to write to it.
pub fn open_regular(path: &Path) -> Result<(File, u64), FileError> {
    let meta = fs::metadata(path).map_err(io_error("open", path))?;
    if !meta.is_file() {
        let what = if meta.is_dir() { "it is a directory" } else { "it is not a regular file" };
        return Err(io_error("read", path)(io::Error::new(io::ErrorKind::InvalidInput, what)));
    }
    let file = File::open(path).map_err(io_error("open", path))?;
    let bytes = file.metadata().map_err(io_error("read", path))?.len();
    Ok((file, bytes))
}

impl Shard {
    /// The tensors that are part of the checkpoint.
    fn used(&self) -> impl Iterator<Item = &HeaderTensor> {
        self.header.tensors.iter().enumerate().filter(|(i, _)| !self.unused.contains(i)).map(|(_, t)| t)
    }

    fn read(path: PathBuf) -> Result<Shard, FileError> {
        let (mut file, bytes) = open_regular(&path)?;
        let bad = |source| FileError::Header { path: path.clone(), source };
        let mut prefix = Vec::new();
        if path.file_name().is_some_and(|n| n == INDEX) {
            return Err(FileError::IsIndex { path });
        }
        file.by_ref().take(8).read_to_end(&mut prefix).map_err(io_error("read", &path))?;
        if let Some(first) = prefix.first_chunk::<8>() {
            if first == DELTA_MAGIC {
                return Err(FileError::IsDelta { path });
            }
            // The declared length is checked against the format's limit and the file before it is allocated.
            let rest = SafetensorsHeader::prefix_len(*first).map_err(bad)?.min(bytes).saturating_sub(8);
            prefix.reserve_exact(rest as usize);
            file.take(rest).read_to_end(&mut prefix).map_err(io_error("read", &path))?;
        }
        let header = SafetensorsHeader::parse(&prefix, bytes).map_err(bad)?;
        Ok(Shard { path, header, bytes, unused: BTreeSet::new() })
    }
}

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of its shard.
    pub shard: usize,
    /// Where its bytes begin in that file.
    pub offset: u64,
}

/// The tensors of a checkpoint and their places, from headers alone.
#[derive(Debug)]
pub struct Layout {
    path: PathBuf,
    shards: Vec<Shard>,
    manifest: Manifest,
    places: Vec<Place>,
}

impl Layout {
    /// Reads the headers of a file or of a directory of shards.
    pub fn read(path: &Path) -> Result<Layout, FileError> {
        let meta = fs::metadata(path).map_err(io_error("open", path))?;
        let shards = if meta.is_dir() { read_directory(path)? } else { vec![Shard::read(path.to_owned())?] };
        let union = |source| FileError::Union { path: path.to_owned(), source };

        let mut owner: HashMap<&str, Place> = HashMap::new();
        let mut aliases = BTreeMap::new();
        for (s, shard) in shards.iter().enumerate() {
            merge_aliases(&mut aliases, shard)?;
            for t in shard.used() {
                let place = Place { shard: s, offset: shard.header.data_start + t.begin };
                if let Some(first) = owner.insert(&t.spec.name, place) {
                    return Err(FileError::Duplicate {
                        name: t.spec.name.clone(),
                        first: shards[first.shard].path.clone(),
                        second: shard.path.clone(),
                    });
                }
            }
        }
        let specs = shards.iter().flat_map(|s| s.used().map(|t| t.spec.clone()));
        let manifest = Manifest::new(specs, aliases).map_err(union)?;
        let places = manifest.tensors().iter().map(|t| owner[t.name.as_str()]).collect();
        Ok(Layout { path: path.to_owned(), shards, manifest, places })
    }

    /// The path it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its files.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Whether it is a directory of shards.
    pub fn is_directory(&self) -> bool {
        self.shards.first().is_none_or(|s| s.path != self.path)
    }

    /// Its tensors, in canonical order.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where the tensor of this index in the manifest lies.
    pub fn place(&self, tensor: usize) -> Place {
        self.places[tensor]
    }
}

fn merge_aliases(aliases: &mut BTreeMap<String, String>, shard: &Shard) -> Result<(), FileError> {
    let path = &shard.path;
    let more = shard.header.aliases();
    for (alias, target) in more.map_err(|source| FileError::Header { path: path.clone(), source })? {
        match aliases.get(&alias) {
            Some(first) if *first != target => {
                let first = first.clone();
                return Err(FileError::AliasConflict { alias, first, second: target, path: path.clone() });
            }
            _ => aliases.insert(alias, target),
        };
    }
    Ok(())
}

fn read_directory(dir: &Path) -> Result<Vec<Shard>, FileError> {
    let index = dir.join(INDEX);
    match open_regular(&index) {
        Ok((mut file, _)) => {
            let mut json = Vec::new();
            file.read_to_end(&mut json).map_err(io_error("read", &index))?;
            read_indexed(dir, &index, &json)
        }
        Err(FileError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            let mut names = Vec::new();
            for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
                let path = entry.map_err(io_error("list", dir))?.path();
                if path.extension().is_some_and(|e| e == "safetensors") {
                    names.push(path);
                }
            }
            names.sort();
            if names.is_empty() {
                return Err(FileError::NoShards { path: dir.to_owned() });
            }
            names.into_iter().map(Shard::read).collect()
        }
        Err(e) => Err(e),
    }
}

fn read_indexed(dir: &Path, index: &Path, json: &[u8]) -> Result<Vec<Shard>, FileError> {
    let bad = |reason: String| FileError::Index { path: index.to_owned(), reason };
    let value: serde_json::Value = serde_json::from_slice(json).map_err(|e| bad(e.to_string()))?;
    let Some(map) = value.get("weight_map").and_then(|m| m.as_object()) else {
        return Err(bad("it has no object \"weight_map\"".into()));
    };
    let mut names = BTreeSet::new();
    for (tensor, shard) in map {
        let Some(shard) = shard.as_str() else {
            return Err(bad(format!("the entry of {tensor:?} is not a file name")));
        };
        // Shards lie beside their index; a name that leads elsewhere is not one of ours.
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(bad(format!("{shard:?} is not the name of a file beside it")));
        }
        names.insert(shard);
    }
    if names.is_empty() {
        return Err(FileError::NoShards { path: dir.to_owned() });
    }
    let mut shards: Vec<Shard> = names.iter().map(|n| Shard::read(dir.join(n))).collect::<Result<_, _>>()?;
    for (shard, name) in shards.iter_mut().zip(&names) {
        let held: BTreeSet<&str> = shard.header.tensors.iter().map(|t| t.spec.name.as_str()).collect();
        let mismatch = |tensor: &str, found: &str| FileError::IndexMismatch {
            path: index.to_owned(),
            name: tensor.to_owned(),
            shard: (*name).to_owned(),
            found: found.to_owned(),
        };
        for (tensor, _) in map.iter().filter(|(_, s)| s.as_str() == Some(name)) {
            if !held.contains(tensor.as_str()) {
                return Err(mismatch(tensor, "which does not hold it"));
            }
        }
        let elsewhere = |t: &HeaderTensor| map.get(&t.spec.name).is_some_and(|s| s.as_str() != Some(name));
        let tensors = shard.header.tensors.iter().enumerate();
        shard.unused = tensors.filter(|(_, t)| elsewhere(t)).map(|(i, _)| i).collect();
    }
    Ok(shards)
}

/// A file of any kind, mapped for reading.
#[derive(Debug)]
pub struct MappedFile {
    // An empty file cannot be mapped, and needs no map.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps a file, which must not be written to while it is mapped.
    pub fn open(path: &Path) -> Result<MappedFile, FileError> {
        let (file, bytes) = open_regular(path)?;
        if bytes == 0 {
            return Ok(MappedFile { map: None });
        }
        let map = map_read_only(&file).map_err(io_error("map", path))?;
        // Commands read from front to back; the advice may be refused and costs nothing.
        let _ = map.advise(Advice::Sequential);
        Ok(MappedFile { map: Some(map) })
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

/// A checkpoint whose tensors can be read.
#[derive(Debug)]
pub struct Checkpoint {
    layout: Layout,
    maps: Vec<MappedFile>,
}

impl Checkpoint {
    /// Maps a file or a directory of shards. The files must not be written to while they are mapped.
    pub fn open(path: &Path) -> Result<Checkpoint, FileError> {
        let layout = Layout::read(path)?;
        let mut maps = Vec::with_capacity(layout.shards.len());
        for shard in &layout.shards {
            let map = MappedFile::open(&shard.path)?;
            if map.bytes().len() as u64 != shard.bytes {
                let changed = io::Error::new(io::ErrorKind::InvalidData, "its length changed meanwhile");
                return Err(io_error("map", &shard.path)(changed));
            }
            maps.push(map);
        }
        Ok(Checkpoint { layout, maps })
    }

    /// Its tensors and their places.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Its tensors, in canonical order.
    pub fn manifest(&self) -> &Manifest {
        &self.layout.manifest
    }

    /// The bytes of the tensor of this index in the manifest.
    pub fn tensor(&self, tensor: usize) -> &[u8] {
        let Place { shard, offset } = self.layout.places[tensor];
        let len = self.layout.manifest.tensors()[tensor].bytes;
        // The header was checked against the file's length, and the map has that length.
        &self.maps[shard].bytes()[offset as usize..(offset + len) as usize]
    }
}

/// Maps a whole file for reading.
#[allow(unsafe_code)]
fn map_read_only(file: &File) -> io::Result<Mmap> {
    // SAFETY: The map is read-only and handed out only as `&[u8]`, for which every bit pattern is valid, and it
    // lives as long as the slices taken from it. What remains is that nobody changes or shortens the file
    // meanwhile. Windlass itself never writes to a file that it maps: outputs go to new files, and updates in
    // place use positioned reads and writes on files of which only the header was read. Other processes must
    // keep to what `MappedFile::open` documents, as with every tool that maps its input; files of a live
    // region are protected by leases and are not opened through this function.
    unsafe { Mmap::map(file) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_core::Dtype;
    use windlass_core::manifest::TensorSpec;

    fn save(path: &Path, tensors: &[(&str, u8)]) {
        let specs = tensors.iter().map(|(n, _)| TensorSpec::new(*n, Dtype::U8, [3]));
        let manifest = Manifest::new(specs, BTreeMap::new()).unwrap();
        let mut bytes = manifest.to_safetensors_header();
        for t in manifest.tensors() {
            let fill = tensors.iter().find(|(n, _)| *n == t.name).unwrap().1;
            bytes.extend([fill; 3]);
        }
        fs::write(path, bytes).unwrap();
    }

    fn index(dir: &Path, map: &str) {
        fs::write(dir.join(INDEX), format!("{{\"weight_map\": {map}}}")).unwrap();
    }

    #[test]
    fn shards_and_a_single_file_have_the_same_layout() {
        let dir = tempfile::tempdir().unwrap();
        let single = dir.path().join("all.safetensors");
        save(&single, &[("a", 1), ("b", 2), ("c", 3)]);
        let shards = dir.path().join("shards");
        fs::create_dir(&shards).unwrap();
        save(&shards.join("1.safetensors"), &[("b", 2)]);
        save(&shards.join("2.safetensors"), &[("c", 3), ("a", 1)]);
        fs::write(shards.join("notes.txt"), "not a shard").unwrap();
        let (one, many) = (Checkpoint::open(&single).unwrap(), Checkpoint::open(&shards).unwrap());
        assert_eq!(one.manifest(), many.manifest());
        for t in 0..3 {
            assert_eq!(one.tensor(t), [t as u8 + 1; 3]);
            assert_eq!(many.tensor(t), one.tensor(t));
        }
        assert!(many.layout().is_directory() && !one.layout().is_directory());
    }

    #[test]
    fn an_index_chooses_its_shards_and_is_checked() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        save(&d.join("x.safetensors"), &[("a", 1)]);
        save(&d.join("consolidated.safetensors"), &[("a", 9)]);
        assert!(matches!(Checkpoint::open(d), Err(FileError::Duplicate { name, .. }) if name == "a"));
        index(d, r#"{"a": "x.safetensors"}"#);
        assert_eq!(Checkpoint::open(d).unwrap().tensor(0), [1; 3]);
        index(d, r#"{"a": "x.safetensors", "b": "x.safetensors"}"#);
        assert!(matches!(Checkpoint::open(d), Err(FileError::IndexMismatch { name, .. }) if name == "b"));
        index(d, r#"{"a": "gone.safetensors"}"#);
        assert_eq!(Checkpoint::open(d).unwrap_err().kind(), Kind::NotFound);
        for bad in [r#"{"a": "../x.safetensors"}"#, r#"{"a": 3}"#, "7", "{"] {
            index(d, bad);
            assert!(matches!(Checkpoint::open(d), Err(FileError::Index { .. })), "{bad}");
        }
        index(d, "{}");
        assert!(matches!(Checkpoint::open(d), Err(FileError::NoShards { .. })));
    }

    #[test]
    fn files_that_are_no_checkpoints_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        assert!(matches!(Checkpoint::open(d), Err(FileError::NoShards { .. })));
        assert_eq!(Checkpoint::open(&d.join("absent")).unwrap_err().kind(), Kind::NotFound);
        let f = d.join("f.safetensors");
        for bytes in
            [&b""[..], b"abc", &[0xff; 64], &[2, 0, 0, 0, 0, 0, 0, 0, b'{'], b"\x08\0\0\0\0\0\0\0notjson!"]
        {
            fs::write(&f, bytes).unwrap();
            let e = Checkpoint::open(&f).unwrap_err();
            assert!(matches!(&e, FileError::Header { .. }), "{e:?}");
            assert!(e.to_string().contains("f.safetensors"));
        }
        save(&f, &[("a", 1)]);
        let whole = fs::read(&f).unwrap();
        fs::write(&f, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(Checkpoint::open(&f).unwrap_err().kind(), Kind::Corrupt);
    }

    #[test]
    fn an_index_chooses_between_two_copies_of_a_tensor() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        save(&d.join("x.safetensors"), &[("a", 1), ("b", 2)]);
        save(&d.join("y.safetensors"), &[("a", 9), ("c", 3)]);
        index(d, r#"{"a": "y.safetensors", "b": "x.safetensors", "c": "y.safetensors"}"#);
        let open = Checkpoint::open(d).unwrap();
        assert_eq!(open.manifest().tensors().len(), 3);
        assert_eq!((open.tensor(0), open.tensor(1)), (&[9; 3][..], &[2; 3][..]));
        assert_eq!(open.layout().shards()[0].unused, BTreeSet::from([0]));
        index(d, r#"{"b": "x.safetensors", "c": "y.safetensors"}"#);
        assert!(matches!(Checkpoint::open(d), Err(FileError::Duplicate { name, .. }) if name == "a"));
    }

    #[test]
    fn aliases_that_disagree_between_shards_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let put = |file: &str, tensor: &str, target: &str| {
            let json = format!(
                r#"{{"__metadata__":{{"windlass.aliases":"{{\"head\":\"{target}\"}}"}},"{tensor}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#
            );
            let bytes = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[7]].concat();
            fs::write(dir.path().join(file), bytes).unwrap();
        };
        put("1.safetensors", "a", "a");
        put("2.safetensors", "b", "a");
        let agreed = Layout::read(dir.path()).unwrap();
        assert_eq!(agreed.manifest().aliases()["head"], "a");
        put("2.safetensors", "b", "b");
        let e = Layout::read(dir.path()).unwrap_err();
        assert!(
            matches!(&e, FileError::AliasConflict { alias, first, second, .. }
                if alias == "head" && first == "a" && second == "b"),
            "{e:?}"
        );
        assert!(e.to_string().contains("2.safetensors"));
    }

    #[test]
    fn an_index_or_a_delta_in_place_of_a_checkpoint_is_named() {
        let dir = tempfile::tempdir().unwrap();
        index(dir.path(), r#"{"a": "x.safetensors"}"#);
        let e = Layout::read(&dir.path().join(INDEX)).unwrap_err();
        assert!(matches!(e, FileError::IsIndex { .. }) && e.to_string().contains("directory"));
        let delta = dir.path().join("d");
        fs::write(&delta, b"WLDELTA1 and more").unwrap();
        assert!(matches!(Layout::read(&delta), Err(FileError::IsDelta { .. })));
    }

    #[test]
    fn a_file_without_tensors_opens() {
        let dir = tempfile::tempdir().unwrap();
        let f = dir.path().join("f.safetensors");
        fs::write(&f, b"\x02\0\0\0\0\0\0\0{}").unwrap();
        assert!(Checkpoint::open(&f).unwrap().manifest().tensors().is_empty());
    }
}
