//! Who waits for the place of a region that its publisher left: a file in its directory that names the process.
//!
//! It counts as long as that process lives, so a process that was killed while it waited does not stop others from serving the region.
//! Making the next region clears it away with everything else.

use std::fs;
use std::path::{Path, PathBuf};

use super::owner::Owner;
use super::{Region, RegionSpec, Slots, WANTED, pid_namespace};
use crate::seal::draft::Draft;

/// The wish of this process. Dropping it takes it back.
pub(super) struct Wish {
    dir: PathBuf,
    /// What the file says; nothing for a receiver's image, which no agent serves.
    words: Option<String>,
}

impl Wish {
    pub(super) fn new(spec: &RegionSpec) -> Wish {
        let words = || Some(format!("{} {}", pid_namespace().ok()?, Owner::me().ok()?.0));
        let words = if spec.slots == Slots::Two { words() } else { None };
        Wish { dir: spec.dir.clone(), words }
    }

    /// Makes the wish known, or known again, if the publisher of what is there has left it.
    pub(super) fn keep_up(&mut self) {
        let Some(words) = &self.words else { return };
        if is_there(&self.dir) || !Region::is_left(&self.dir) {
            return;
        }
        if let Err(error) = Draft::write(&self.dir.join(WANTED), words.as_bytes()) {
            tracing::warn!(dir = %self.dir.display(), %error, "an agent that serves this region is not told to let go");
            self.words = None;
        }
    }
}

impl Drop for Wish {
    fn drop(&mut self) {
        let path = self.dir.join(WANTED);
        if self.words.is_some() && fs::read_to_string(&path).ok() == self.words {
            // Left behind, it counts until this process ends.
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether a process waits that lives, as far as can be told from here.
pub(super) fn is_there(dir: &Path) -> bool {
    let Ok(text) = fs::read_to_string(dir.join(WANTED)) else { return false };
    let mut words = text.split(' ').map(|w| w.parse::<u64>().ok());
    let (Some(Some(namespace)), Some(Some(owner))) = (words.next(), words.next()) else { return false };
    pid_namespace().is_ok_and(|here| here != namespace) || Owner(owner).is_alive()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::tests::spec;
    use super::*;

    #[test]
    fn only_a_living_creator_wants_what_a_dead_one_left() {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let spec = spec(home.path(), 1);
        let region = Region::create(&spec).unwrap();
        let writer = region.writer(0).unwrap();
        let mut wish = Wish::new(&spec);
        wish.keep_up();
        assert!(!is_there(&spec.dir), "its publisher lives");

        let here = pid_namespace().unwrap();
        let say = |text: String| fs::write(spec.dir.join(WANTED), text).unwrap();
        say(wish.words.clone().unwrap());
        assert!(is_there(&spec.dir) && !Region::is_wanted(&spec.dir), "wanted, but not left");
        let mut child = Command::new("true").spawn().unwrap();
        let dead = u64::from(child.id()) << 32;
        child.wait().unwrap();
        say(format!("{here} {dead}"));
        assert!(!is_there(&spec.dir), "who wanted it is dead");
        drop(wish);
        assert!(spec.dir.join(WANTED).exists(), "not this one's to take back");
        say(format!("{} {dead}", here + 1));
        assert!(is_there(&spec.dir), "of another namespace nothing can be told");
        for text in ["", "1", "one two", "\u{0}"] {
            say(text.into());
            assert!(!is_there(&spec.dir), "{text:?}");
        }
        drop((writer, region));
        drop(Region::create(&spec).unwrap());
        assert!(!spec.dir.join(WANTED).exists(), "the next region begins without it");
    }

    #[test]
    fn a_region_without_a_rank_is_left_though_its_creator_lives() {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let spec = spec(home.path(), 2);
        let region = Region::create(&spec).unwrap();
        let other = region.writer(1).unwrap();
        assert!(!Region::is_left(&spec.dir), "one rank is enough");
        drop(other);
        assert!(Region::is_left(&spec.dir));
        let mut wish = Wish::new(&spec);
        wish.keep_up();
        assert!(Region::is_wanted(&spec.dir), "the agent is asked to let go of it");
        let back = region.writer(0).unwrap();
        assert!(!Region::is_wanted(&spec.dir), "a rank came back");
        drop(back);
        drop(wish);
        assert!(!Region::is_wanted(&spec.dir), "the wish was taken back");
    }

    #[test]
    fn a_region_knows_that_another_was_made_in_its_place() {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let spec = spec(home.path(), 1);
        let region = Region::create(&spec).unwrap();
        assert!(!region.is_replaced());
        fs::remove_dir_all(&spec.dir).unwrap();
        assert!(!region.is_replaced(), "what was removed is served until another is there");
        let next = Region::create(&spec).unwrap();
        assert!(region.is_replaced() && !next.is_replaced());
    }
}
