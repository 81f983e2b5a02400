//! Where the library is, and of which release.
//!
//! The wheels of NIXL have their libraries in `.nixl_cu12.mesonpy.libs` or the like, next to the package, and the release in the
//! name of `nixl_cu12-RELEASE.dist-info`.

use std::path::{Path, PathBuf};

use super::error::NixlError;

/// The library's file.
const FILE: &str = "libnixl_capi.so";

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let mut found: Vec<_> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    found.sort();
    found.into_iter()
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|n| n.to_str()).unwrap_or_default()
}

/// The package whose libraries are in a directory of this name.
fn package(name: &str) -> Option<&str> {
    name.strip_prefix('.')?.strip_suffix(".mesonpy.libs").filter(|p| p.starts_with("nixl"))
}

/// In a directory of packages.
fn among_packages(dir: &Path) -> Option<PathBuf> {
    let library = |dir: PathBuf| package(name_of(&dir)).map(|_| dir.join(FILE)).filter(|p| p.exists());
    entries(dir).find_map(library)
}

/// In an environment of Python.
fn in_environment(prefix: &Path) -> Option<PathBuf> {
    let python = |dir: PathBuf| name_of(&dir).starts_with("python3").then(|| dir.join("site-packages"));
    entries(&prefix.join("lib")).filter_map(python).find_map(|dir| among_packages(&dir))
}

/// The library that is named (the file, its directory, or a directory of packages), or else that of the Python environment that
/// is active or that this program is of, or else that of the system.
pub(super) fn library(named: Option<&Path>) -> Result<PathBuf, NixlError> {
    if let Some(path) = named {
        let found = if path.is_dir() {
            Some(path.join(FILE)).filter(|p| p.exists()).or_else(|| among_packages(path))
        } else {
            Some(path.to_owned()).filter(|p| p.exists())
        };
        return found.ok_or_else(|| NixlError::Absent { sought: vec![path.to_owned()] });
    }
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let program = std::env::current_exe().ok().and_then(|p| Some(p.parent()?.parent()?.to_owned()));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).chain(program);
    let mut sought: Vec<PathBuf> = environments.collect();
    if let Some(found) = sought.iter().find_map(|prefix| in_environment(prefix)) {
        return Ok(found);
    }
    let debian = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let system = ["/opt/nvidia/nvda_nixl/lib64", "/usr/local/lib", debian.as_str(), "/usr/lib"];
    sought.extend(system.map(PathBuf::from));
    let found = system.iter().map(|dir| Path::new(dir).join(FILE)).find(|p| p.exists());
    found.ok_or(NixlError::Absent { sought })
}

/// The package and release of a library, as `nixl_cu12 1.5.1`; `nixl` where there is no package around it.
pub(super) fn release(library: &Path) -> Result<String, NixlError> {
    let of_package = || {
        let dir = library.parent()?;
        let package = package(name_of(dir))?;
        let info = |path: PathBuf| {
            let name = name_of(&path).strip_prefix(package)?.strip_prefix('-')?;
            Some(name.strip_suffix(".dist-info")?.to_owned())
        };
        Some((package, entries(dir.parent()?).find_map(info)?))
    };
    match of_package() {
        Some((_, release)) if !release.starts_with(super::MAJOR) => {
            Err(NixlError::Release { path: library.to_owned(), found: release })
        }
        Some((package, release)) => Ok(format!("{package} {release}")),
        None => Ok("nixl".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packages(release: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let packages = dir.path().join("lib/python3.11/site-packages");
        let libs = packages.join(".nixl_cu12.mesonpy.libs");
        std::fs::create_dir_all(&libs).unwrap();
        std::fs::create_dir_all(packages.join(format!("nixl_cu12-{release}.dist-info"))).unwrap();
        std::fs::write(libs.join(FILE), b"not a library").unwrap();
        (dir, packages)
    }

    #[test]
    fn a_library_is_found_by_file_directory_packages_and_environment() {
        let (dir, packages) = packages("1.5.1");
        let file = packages.join(".nixl_cu12.mesonpy.libs").join(FILE);
        for named in [file.clone(), packages.join(".nixl_cu12.mesonpy.libs"), packages.clone()] {
            assert_eq!(library(Some(&named)).unwrap(), file, "{}", named.display());
        }
        assert_eq!(in_environment(dir.path()), Some(file.clone()));
        assert_eq!(release(&file).unwrap(), "nixl_cu12 1.5.1");
        let elsewhere = dir.path().join("elsewhere");
        let error = library(Some(&elsewhere)).unwrap_err().to_string();
        assert!(error.contains("elsewhere") && error.contains("install"), "{error}");
        assert_eq!(release(&elsewhere.join(FILE)).unwrap(), "nixl");
    }

    #[test]
    fn another_major_version_of_nixl_and_a_file_that_is_no_library_are_named() {
        let (_dir, packages) = packages("2.0.0");
        let Err(error) = super::super::library::Nixl::open(Some(&packages)) else { panic!("opened") };
        let text = error.to_string();
        assert!(text.contains("2.0.0") && text.contains("libnixl_capi.so"), "{text}");
        let (_dir, packages) = self::packages("1.0.0");
        let Err(error) = super::super::library::Nixl::open(Some(&packages)) else { panic!("opened") };
        assert!(matches!(error, NixlError::Load { .. }), "{error}");
    }

    #[test]
    fn a_library_without_our_functions_is_of_another_version() {
        // Any shared library will do; the C library is there on every machine that runs this.
        let libc =
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/lib/aarch64-linux-gnu/libc.so.6"];
        let libc = libc.map(PathBuf::from).into_iter().find(|p| p.exists()).expect("a C library");
        let Err(error) = super::super::library::Nixl::open(Some(&libc)) else { panic!("opened") };
        let text = error.to_string();
        assert!(matches!(error, NixlError::Symbol { .. }) && text.contains("nixl_capi_"), "{text}");
    }
}
