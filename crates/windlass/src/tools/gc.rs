//! `windlass gc`: removes regions and images of dead processes, at any depth below a directory.
//!
//! Owns: what is said and asked about it, which directories are refused, what is kept, and the directories of killed demos.
//! What is dead is decided by [`windlass_data::region::sweep`] alone, by its lock. Must not: follow links, enter other file
//! systems, remove what it does not know, or remove anything that was not listed and agreed to.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, IsTerminal as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde_json::json;
use windlass_data::private;
use windlass_data::region::{self, Dead, Left, Sweep};

use crate::console::{Session, bytes, print};
use crate::error::Error;

/// What the directory of a demo is called, before the number of its process.
pub(crate) const HOME: &str = "windlass-demo-";

/// The file in that directory with the token of all processes of a demo.
pub(crate) const TOKEN: &str = "token";

/// The directories in `dir` of demos that were killed before they could remove them.
pub(crate) fn abandoned(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("read", dir))? {
        let entry = entry.map_err(Error::io("read", dir))?;
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix(HOME)?.parse::<u32>().ok());
        let dead = pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists());
        if dead && entry.metadata().is_ok_and(|m| private::is_own(&m)) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// System directories, which are surely a mistake.
const TOO_WIDE: [&str; 17] = [
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/mnt", "/opt", "/proc", "/root",
    "/sbin", "/srv", "/sys", "/usr", "/var",
];

/// The checked arguments of `gc`.
#[derive(Debug)]
pub(crate) struct Gc {
    /// Where regions and images are kept, or one of them.
    pub(crate) dir: PathBuf,
    /// Say what would go, and leave it.
    pub(crate) dry_run: bool,
    pub(crate) yes: bool,
    /// Images of stopped receivers go too.
    pub(crate) images: bool,
}

/// Something to remove.
struct Item {
    dir: PathBuf,
    what: &'static str,
    model: Option<String>,
    bytes: u64,
    dead: Option<Dead>,
}

impl Item {
    fn of(dead: Dead) -> Item {
        let model = dead.model_id.as_ref().map(|m| m.as_str().to_owned());
        Item { dir: dead.dir.clone(), what: dead.what.as_str(), model, bytes: dead.bytes, dead: Some(dead) }
    }

    fn remove(&self) -> Result<bool, Error> {
        match &self.dead {
            Some(dead) => Ok(dead.remove()?),
            None => clear(&self.dir),
        }
    }

    fn json(&self) -> serde_json::Value {
        json!({ "dir": self.dir, "what": self.what, "model_id": self.model, "bytes": self.bytes })
    }
}

impl Gc {
    /// Removes what no living process has open, once that is agreed to.
    pub(crate) fn run(&self, session: &Session) -> Result<(), Error> {
        // The library treats an absent directory as empty, but here it is surely a mistake.
        let dir = fs::canonicalize(&self.dir).map_err(Error::io("read", &self.dir))?;
        if TOO_WIDE.iter().any(|wide| dir == Path::new(wide)) {
            return Err(Error::TooWide { dir });
        }
        let homes = abandoned(&self.dir)?;
        // An image that is named itself is asked for, and one of a demo is of no use to the next.
        let goes = |d: &Dead| {
            d.what != Left::Image
                || self.images
                || d.dir == self.dir
                || homes.iter().any(|h| d.dir.starts_with(h))
        };
        let found = region::sweep(&self.dir, Sweep::DEEP)?;
        let (goes, kept): (Vec<Dead>, Vec<Dead>) = found.into_iter().partition(goes);
        let mut goes: Vec<Item> = goes.into_iter().map(Item::of).collect();
        for home in &homes {
            let bytes = leftovers(home)?.iter().map(|(_, bytes)| bytes).sum();
            goes.push(Item { dir: home.clone(), what: "demo", model: None, bytes, dead: None });
        }
        let agreed = !self.dry_run && !goes.is_empty() && (self.yes || ask(&goes, session)?);
        if agreed {
            let mut removed = Vec::new();
            for item in goes {
                // A region that a process has opened meanwhile stays.
                if item.remove()? {
                    removed.push(item);
                }
            }
            goes = removed;
        } else if !self.dry_run {
            goes.clear();
        }
        self.tell(session, &goes, &kept.into_iter().map(Item::of).collect::<Vec<_>>())
    }

    fn tell(&self, session: &Session, removed: &[Item], kept: &[Item]) -> Result<(), Error> {
        let sum = |items: &[Item]| items.iter().map(|i| i.bytes).sum::<u64>();
        let freed = sum(removed);
        let object = json!({
            "dir": self.dir,
            "dry_run": self.dry_run,
            "freed_bytes": freed,
            "removed": removed.iter().map(Item::json).collect::<Vec<_>>(),
            "kept": kept.iter().map(Item::json).collect::<Vec<_>>(),
        });
        session.finish(object, |out| {
            let (each, be) = if self.dry_run { ("would remove", "would be ") } else { ("removed", "") };
            list(out, each, removed);
            let _ = match removed.len() {
                0 => writeln!(out, "nothing was removed in {}", self.dir.display()),
                n => writeln!(out, "{n} {be}removed, {} {be}freed", bytes(freed)),
            };
            if !kept.is_empty() {
                list(out, "kept", kept);
                let all = bytes(sum(kept));
                let _ = writeln!(
                    out,
                    "receivers that are started again go on with images: --images removes them ({all})"
                );
            }
        })
    }
}

fn list(out: &mut String, each: &str, items: &[Item]) {
    for i in items {
        let model = i.model.as_deref().unwrap_or("(unfinished)");
        let model = if i.what == Left::Region.as_str() || i.model.is_some() { model } else { "" };
        let _ = writeln!(out, "{each} {}  {} {model}  {}", i.dir.display(), i.what, bytes(i.bytes));
    }
}

/// Asks for confirmation; fails if standard input is not a terminal.
fn ask(items: &[Item], session: &Session) -> Result<bool, Error> {
    let mut text = String::new();
    list(&mut text, "would remove", items);
    if session.json() || !io::stdin().is_terminal() {
        if !session.json() {
            print(&text)?;
        }
        let n = items.len();
        let how = "give --yes to remove what --dry-run lists";
        return Err(Error::Usage(format!(
            "nothing was removed: {n} would be, but there is no terminal for confirmation: {how}"
        )));
    }
    print(&text)?;
    session.note(&format!("Remove {}? [y/N]", if items.len() == 1 { "it" } else { "them" }));
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).map_err(Error::io("read", Path::new("standard input")))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// The logs and the token of a killed demo, and their bytes.
fn leftovers(home: &Path) -> Result<Vec<(PathBuf, u64)>, Error> {
    let entries = fs::read_dir(home).map_err(Error::io("read", home))?.flatten();
    let ours = entries.filter(|e| {
        let is_log = e.path().extension().is_some_and(|e| e == "log");
        e.file_type().is_ok_and(|t| t.is_file()) && (is_log || e.file_name() == TOKEN)
    });
    Ok(ours.map(|e| (e.path(), e.metadata().map_or(0, |m| m.blocks() * 512))).collect())
}

/// Removes them, and the demo's directories if nothing else is in them: its regions and images are gone. Whether all is gone.
fn clear(home: &Path) -> Result<bool, Error> {
    for (path, _) in leftovers(home)? {
        let _ = fs::remove_file(&path);
    }
    for entry in fs::read_dir(home).map_err(Error::io("read", home))?.flatten() {
        // What is not empty is still in use, or not ours.
        let _ = fs::remove_dir(entry.path());
    }
    Ok(fs::remove_dir(home).is_ok())
}
