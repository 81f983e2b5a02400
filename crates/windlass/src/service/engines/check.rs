//! What an engine can take, compared with an image before the engine is touched; and the directory that an engine loads
//! from.
//!
//! Owns: [`Baseline`], the tensors that an engine is known to have, and [`link`]. Engines end, or answer wrongly, when a
//! tensor is missing or does not fit, and have no way back, so nothing of this may be found out while one is paused.
//!
//! The tensors of an engine are, whichever is there first: those of the checkpoint in `--model-dir`; those of the checkpoint
//! that the engine itself was started from, if that is a directory on this host; those that it took before. Every one of
//! them must be in the image with its shape and dtype; where the engine itself was asked, in any dtype, because an engine
//! may be told to cast what it loads. Tensors of the image that the engine does not have (value heads)
//! are listed, and an error if that is wanted.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{self, Path, PathBuf};

use windlass_core::error::Kind;
use windlass_core::manifest::Manifest;
use windlass_data::file::{FileError, Layout};
use windlass_data::image::Known;
use windlass_data::seal::draft::{Draft, make_dir, place_link};

use super::error::{EngineError, Stage};

/// The tensors that an engine is known to have.
#[derive(Clone, Debug)]
pub struct Baseline {
    manifest: Manifest,
    /// Where that is known from.
    source: String,
    /// Whether a tensor must have its dtype too.
    strict: bool,
}

impl Baseline {
    /// The tensors of a checkpoint; `None` if there are no weights in the directory.
    pub fn of_checkpoint(path: &Path) -> Result<Option<Baseline>, EngineError> {
        match Layout::read(path) {
            Ok(layout) => Ok(Some(Baseline {
                manifest: layout.manifest().clone(),
                source: format!("compared with the checkpoint in {}", path.display()),
                strict: true,
            })),
            Err(FileError::NoShards { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// The tensors that an engine took before, as noted in `path`; `None` if nothing was noted.
    pub fn taken(path: &Path) -> Result<Option<Baseline>, EngineError> {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(EngineError::io("read", path)(e)),
        };
        // A damaged note is as good as none.
        let manifest = Manifest::from_json(&text).ok();
        let source = "compared with what it took before";
        Ok(manifest.map(|manifest| Baseline { manifest, source: source.into(), strict: true }))
    }

    /// The same tensors in any dtype: an engine casts what it is given.
    #[must_use]
    pub fn of_any_dtype(self) -> Baseline {
        Baseline { strict: false, ..self }
    }

    /// Notes what an engine took.
    pub fn note(path: &Path, manifest: &Manifest) -> Result<(), EngineError> {
        Draft::write(path, manifest.to_json().as_bytes()).map_err(EngineError::io("write", path))
    }

    /// Compares an image; answers the names of tensors that the engine does not have. `by_name` engines look for every
    /// name in the file, where a second name of a tensor is not.
    pub fn compare(
        &self,
        engine: &str,
        known: &Known,
        image: &Manifest,
        by_name: bool,
    ) -> Result<Vec<String>, EngineError> {
        let misfit = |tensor: &str, how: String| EngineError::Layout {
            engine: engine.to_owned(),
            image: known.identity.to_string(),
            tensor: tensor.to_owned(),
            how: format!("{how} ({})", self.source),
        };
        if image.layout_hash() == self.manifest.layout_hash() {
            return Ok(Vec::new());
        }
        for wanted in self.manifest.tensors() {
            let name = &*wanted.name;
            let Some(found) = image.find(name).and_then(|i| image.tensors().get(i)) else {
                return Err(misfit(name, "is missing".into()));
            };
            if by_name && found.name != *name {
                return Err(misfit(name, format!("is there only as another name of {:?}", found.name)));
            }
            if found.shape != wanted.shape {
                let how = format!("has the shape {:?}, not {:?}", found.shape, wanted.shape);
                return Err(misfit(name, how));
            }
            if self.strict && found.dtype != wanted.dtype {
                let how = format!("is {}, not {}", found.dtype, wanted.dtype);
                return Err(misfit(name, how));
            }
        }
        let extra = |name: &str| self.manifest.find(name).is_none();
        Ok(image.tensors().iter().map(|t| t.name.clone()).filter(|n| extra(n)).collect())
    }
}

/// Names that hold weights, which an engine must not find beside the image.
fn is_weights(name: &str) -> bool {
    let weights = [".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json"];
    weights.iter().any(|end| name.ends_with(end))
}

/// The files of a model's directory that are not weights, by name.
pub fn config_files(dir: &Path) -> Result<BTreeMap<OsString, PathBuf>, EngineError> {
    let dir = fs::canonicalize(dir).map_err(EngineError::io("read", dir))?;
    let files = list(&dir)?.into_iter().filter_map(|path| {
        let name = path.file_name()?.to_owned();
        let text = name.to_string_lossy();
        (!is_weights(&text) && !text.starts_with('.') && path.is_file()).then_some((name, path))
    });
    Ok(files.collect())
}

/// Makes `dir` a directory that an engine can load from: a link to `weights`, the image's file, and links to everything
/// in `config` that is not weights. Again brings it up to date. A directory with anything but links is refused.
pub fn link(dir: &Path, weights: &Path, config: Option<&Path>) -> Result<(), EngineError> {
    // Not canonical: the file of an image may be a link to the memory of another process.
    let weights = path::absolute(weights).map_err(EngineError::io("find", weights))?;
    let mut wanted = config.map(config_files).transpose()?.unwrap_or_default();
    wanted.insert("model.safetensors".into(), weights);
    make_dir(dir).map_err(EngineError::io("create", dir))?;
    let present = list(dir)?;
    if let Some(own) = present.iter().find(|path| !path.is_symlink()) {
        return Err(EngineError::Guard {
            stage: Some(Stage::Check),
            kind: Kind::Invalid,
            text: format!("{} has {}, which is not a link of ours", dir.display(), own.display()),
            advice: "name a directory of its own for the links".into(),
        });
    }
    for path in present.iter().filter(|p| p.file_name().is_none_or(|name| !wanted.contains_key(name))) {
        fs::remove_file(path).map_err(EngineError::io("remove", path))?;
    }
    wanted.iter().try_for_each(|(name, target)| place(&dir.join(name), target))
}

fn list(dir: &Path) -> Result<Vec<PathBuf>, EngineError> {
    let failed = || EngineError::io("read", dir);
    fs::read_dir(dir).map_err(failed())?.map(|entry| Ok(entry.map_err(failed())?.path())).collect()
}

/// Makes `link` lead to `target`.
fn place(link: &Path, target: &Path) -> Result<(), EngineError> {
    if fs::read_link(link).is_ok_and(|to| to == target) {
        return Ok(());
    }
    place_link(link, target).map_err(EngineError::io("link", link))
}

#[cfg(test)]
mod tests {
    use windlass_core::dtype::Dtype;
    use windlass_core::identity::{Identity, Incarnation, ModelId};
    use windlass_core::manifest::TensorSpec;

    use super::*;

    fn manifest(tensors: &[(&str, Dtype, &[u64])], aliases: &[(&str, &str)]) -> Manifest {
        let tensors = tensors.iter().map(|(n, d, s)| TensorSpec::new(*n, *d, *s));
        let aliases: BTreeMap<String, String> =
            aliases.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        Manifest::new(tensors, aliases).unwrap()
    }

    fn known() -> Known {
        let model_id = ModelId::new("m").unwrap();
        let identity = Identity { model_id, incarnation: Incarnation(1), version: 2 };
        Known { identity, digest: "0".repeat(32).parse().unwrap() }
    }

    #[test]
    fn an_image_that_does_not_fit_an_engine_is_named_by_its_first_tensor() {
        let had = manifest(&[("a", Dtype::BF16, &[2, 3]), ("head", Dtype::BF16, &[4])], &[]);
        let baseline = Baseline { manifest: had, source: "compared with x".into(), strict: true };
        let refused = |tensors: &[(&str, Dtype, &[u64])], aliases: &[(&str, &str)]| {
            let image = manifest(tensors, aliases);
            baseline.compare("sglang=u", &known(), &image, true).unwrap_err().to_string()
        };
        let error = refused(&[("a", Dtype::BF16, &[2, 3])], &[]);
        assert!(error.contains("\"head\" of m@1.2 is missing (compared with x)"), "{error}");
        let error = refused(&[("a", Dtype::BF16, &[3, 2]), ("head", Dtype::BF16, &[4])], &[]);
        assert!(error.contains("\"a\"") && error.contains("[3, 2], not [2, 3]"), "{error}");
        let error = refused(&[("a", Dtype::F32, &[2, 3]), ("head", Dtype::BF16, &[4])], &[]);
        assert!(error.contains("is float32, not bfloat16"), "{error}");
        let tied = [("a", Dtype::BF16, [4].as_slice())];
        let error = refused(&tied, &[("head", "a")]);
        assert!(error.contains("\"a\""), "{error}");
        let tied = manifest(&[("a", Dtype::BF16, &[2, 3]), ("tail", Dtype::BF16, &[4])], &[("head", "tail")]);
        let error = baseline.compare("e", &known(), &tied, true).unwrap_err().to_string();
        assert!(error.contains("only as another name of \"tail\""), "{error}");
        assert_eq!(baseline.compare("e", &known(), &tied, false).unwrap(), ["tail"]);
    }

    #[test]
    fn a_directory_to_load_from_has_the_image_and_no_other_weights() {
        let home = tempfile::tempdir().unwrap();
        let (config, dir, slot) =
            (home.path().join("config"), home.path().join("model"), home.path().join("a"));
        fs::create_dir(&config).unwrap();
        let weights = ["model-1.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "old.pt"];
        for name in ["config.json", "tokenizer.json"].iter().chain(&weights) {
            fs::write(config.join(name), name).unwrap();
        }
        fs::write(&slot, "image").unwrap();
        link(&dir, &slot, Some(&config)).unwrap();
        link(&dir, &slot, Some(&config)).unwrap();
        let mut names: Vec<String> =
            fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
        assert_eq!(fs::read_to_string(dir.join("model.safetensors")).unwrap(), "image");
        // Again, with another image and a file less.
        let other = home.path().join("b");
        fs::write(&other, "newer").unwrap();
        fs::remove_file(config.join("tokenizer.json")).unwrap();
        link(&dir, &other, Some(&config)).unwrap();
        let mut names: Vec<PathBuf> = list(&dir).unwrap();
        names.sort();
        assert_eq!(names, ["config.json", "model.safetensors"].map(|name| dir.join(name)));
        assert!(names.iter().all(|path| path.is_symlink()));
        assert_eq!(fs::read_to_string(dir.join("model.safetensors")).unwrap(), "newer");
    }

    #[test]
    fn a_directory_with_files_of_its_own_is_not_made_a_directory_of_links() {
        let home = tempfile::tempdir().unwrap();
        let (model, image) = (home.path().join("model"), home.path().join("image"));
        fs::create_dir(&model).unwrap();
        fs::write(model.join("model.safetensors"), "the user's").unwrap();
        fs::write(&image, "image").unwrap();
        let refused = link(&model, &image, Some(&model)).unwrap_err();
        assert!(refused.to_string().contains("which is not a link of ours"), "{refused}");
        assert!(refused.advice().contains("a directory of its own"));
        assert_eq!(fs::read_to_string(model.join("model.safetensors")).unwrap(), "the user's");
        assert!(!model.join("model.safetensors").is_symlink());
    }
}
