//! What services leave in directories: who may read it, how much there is room for, what `gc` removes.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::{home, publisher, receiver};
use crate::command;
use crate::process::{Agent, PATIENCE, Process, Trainer};

#[test]
fn gc_removes_what_the_dead_left_and_nothing_that_is_held() {
    let home = home();
    let dir = home.path().join("shm");
    fs::create_dir(&dir).unwrap();
    let empty = run!("gc", "--json", &dir).ok().json();
    assert_eq!((&empty["freed_bytes"], &empty["removed"]), (&json!(0), &json!([])));
    assert!(run!("gc", &dir).ok().stdout.contains("nothing was removed"));
    let absent = run!("gc", "--json", &home.path().join("absent"));
    assert_eq!((absent.code, absent.json()["error"]["kind"].as_str()), (3, Some("not_found")));
    fs::write(home.path().join("file"), "kept").unwrap();
    let file = run!("gc", "--json", &home.path().join("file"));
    assert!(file.code != 0 && file.stdout.contains("file"), "{}", file.stdout);

    let mut dead = Trainer::named(&dir.join("dead"), "dead");
    dead.process.kill();
    let mut orphan = Trainer::named(&dir.join("orphan"), "orphan");
    let agent = Agent::start(&orphan.region, &[]);
    orphan.process.kill();
    let mut alive = Trainer::named(&dir.join("alive"), "policy");
    let its = Agent::start(&alive.region, &[]);
    alive.publish(0);
    its.sealed(0);
    let mut receiver = receiver(&dir, &alive.region, &[]);
    receiver.event("synced");
    fs::create_dir(dir.join("foreign")).unwrap();
    fs::write(dir.join("foreign/header"), "not ours").unwrap();
    let removed = |told: &Value| -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> =
            told["removed"].as_array().unwrap().iter().map(|r| r["dir"].as_str().unwrap().into()).collect();
        all.sort();
        all
    };
    let dry = run!("gc", "--json", "--dry-run", &dir).ok().json();
    assert_eq!((removed(&dry), &dry["dry_run"]), (vec![dir.join("dead")], &json!(true)));
    assert!(run!("gc", "--dry-run", &dir).ok().stdout.contains("1 would be removed"));
    // Nothing goes that nobody has agreed to; what would go is listed.
    for args in [&["gc"][..], &["gc", "--json"]] {
        let all: Vec<&std::ffi::OsStr> =
            args.iter().map(std::ffi::OsStr::new).chain([dir.as_os_str()]).collect();
        let unasked = command::run(&all);
        let said = format!("{}{}", unasked.stdout, unasked.stderr);
        assert!(unasked.code == 2 && said.contains("--yes"), "{said}");
        assert!(args.len() > 1 || said.contains(dir.join("dead").to_str().unwrap()), "{said}");
    }
    assert!(dir.join("dead").exists());
    let told = run!("gc", "--json", "--yes", &dir).ok().json();
    assert_eq!((removed(&told), &told["freed_bytes"]), (vec![dir.join("dead")], &dry["freed_bytes"]));
    assert_eq!(told["removed"][0]["model_id"], "dead");
    assert!(told["freed_bytes"].as_u64().unwrap() > 4 << 20, "{told}");
    assert_eq!(command::names(&dir), ["alive", "foreign", "orphan", "policy"]);
    // All that was alive works on.
    alive.publish(1);
    assert_eq!(receiver.event("synced")["image"]["identity"]["version"], 1);
    assert_eq!(agent.get("/get_version").status, 200);
    receiver.kill();
    drop((agent, orphan, its, alive));
    let told = run!("gc", "--yes", &dir).ok().stdout;
    assert!(told.contains("2 removed") && told.contains("orphan") && told.contains("--images"), "{told}");
    assert_eq!(command::names(&dir), ["foreign", "policy"], "the next receiver goes on with the image");
    let told = run!("gc", "--json", "--yes", &dir).ok().json();
    assert_eq!((removed(&told).len(), &told["kept"][0]["what"]), (0, &json!("image")), "{told}");
    // The image itself, or all images.
    let named = run!("gc", "--json", "--dry-run", &dir.join("policy")).ok().json();
    assert_eq!(removed(&named), [dir.join("policy")]);
    run!("gc", "--yes", "--images", &dir).ok();
    assert_eq!(command::names(&dir), ["foreign"]);
}

#[test]
fn gc_finds_what_is_deep_below_and_refuses_to_search_the_whole_system() {
    let home = home();
    let deep = home.path().join("runs/7/regions");
    fs::create_dir_all(&deep).unwrap();
    let mut dead = Trainer::named(&deep.join("dead"), "dead");
    dead.process.kill();
    let _alive = Trainer::named(&deep.join("alive"), "alive");
    let told = run!("gc", "--json", "--dry-run", home.path()).ok().json();
    assert_eq!(told["removed"][0]["dir"], json!(deep.join("dead")));
    assert_eq!((told["removed"].as_array().unwrap().len(), command::names(&deep).len()), (1, 2));
    run!("gc", "--yes", &deep.join("alive")).ok();
    assert_eq!(command::names(&deep), ["alive", "dead"], "it is in use");
    run!("gc", "--yes", &deep.join("dead")).ok();
    assert_eq!(command::names(&deep), ["alive"], "a region that is named itself");
    for wide in ["/", "/usr", "/dev/../etc", "/proc"] {
        let refused = run!("gc", "--json", "--dry-run", wide);
        let error = &refused.json()["error"];
        assert_eq!((refused.code, error["kind"].as_str()), (2, Some("invalid")), "{wide}");
        assert!(error["message"].as_str().unwrap().contains("holds much more than"), "{error}");
    }
}

/// The command, started by a shell that does something first.
fn after(shell: &str, args: &[&std::ffi::OsStr]) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{shell} && exec \"$@\"")).arg("sh").arg(env!("CARGO_BIN_EXE_windlass"));
    command.args(args).arg("--json").env_remove("WINDLASS_TOKEN");
    command
}

/// Every file and directory below one, with its mode.
fn modes(dir: &Path) -> Vec<(PathBuf, u32)> {
    let about = fs::symlink_metadata(dir).unwrap();
    let mut all = vec![(dir.to_owned(), about.permissions().mode() & 0o7777)];
    if about.is_dir() {
        all.extend(fs::read_dir(dir).unwrap().flat_map(|e| modes(&e.unwrap().path())));
    }
    all
}

#[test]
fn modes_do_not_depend_on_the_umask() {
    for umask in ["umask 000", "umask 077"] {
        let home = home();
        let mut trainer = Trainer::start(&home.path().join("region"));
        // As one that was made for the group.
        for (path, mode) in modes(&trainer.region) {
            let mode = mode | if path.is_dir() { 0o050 } else { 0o040 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let region = format!("--region={}", trainer.region.display());
        let process = Process::spawn(after(umask, &["agent".as_ref(), region.as_ref()]));
        let endpoint = process.event("listening")["endpoint"].as_str().unwrap().to_owned();
        let token = fs::read_to_string(trainer.region.join("token")).unwrap();
        let agent = Agent { process, endpoint, data_port: 0, token };
        for version in 0..2 {
            trainer.publish(version);
            agent.sealed(version.into());
        }
        let images = home.path().join("images");
        let dir = format!("--dir={}", images.display());
        let receiver = after(umask, &["receive".as_ref(), region.as_ref(), dir.as_ref(), "--group".as_ref()]);
        let receiver = Process::spawn(receiver);
        receiver.event("synced");
        let all: Vec<_> = [modes(&trainer.region), modes(&images)].concat();
        let names = |name: &str| all.iter().filter(|(path, _)| path.ends_with(name)).count();
        assert!(names("agent.json") == 1 && names("state.json") == 1 && names("deltas") > 0, "{all:?}");
        for (path, mode) in &all {
            // To read is to take a lease, and to be let in by the socket is to write to it.
            let is_open = ["header", "agent.sock"].iter().any(|name| path.ends_with(name));
            let expected = match path.file_name().unwrap().to_str().unwrap() {
                "token" => 0o600,
                _ if path.is_dir() => 0o750,
                _ if is_open && !path.starts_with(&trainer.region) => 0o660,
                "header" | "agent.sock" => *mode & 0o660,
                _ => 0o640,
            };
            assert_eq!(*mode, expected, "{umask}: {}: {mode:o}", path.display());
        }
    }
}

#[test]
fn a_file_beyond_the_limit_on_sizes_is_a_full_disk_and_not_the_end() {
    let home = home();
    let (_trainer, _agent) = publisher(home.path());
    let region = format!("--region={}", home.path().join("region").display());
    let dir = format!("--dir={}", home.path().join("images").display());
    // In units of 512 bytes.
    let limit = "ulimit -f 1024";
    let mut receiver = Process::spawn(after(limit, &["receive".as_ref(), region.as_ref(), dir.as_ref()]));
    let told = receiver.rest();
    let error = told.iter().find_map(|line| line.get("error").filter(|e| e.is_object()));
    let error = error.unwrap_or_else(|| panic!("{told:?}"));
    assert_eq!((error["kind"].as_str(), receiver.ends_within(PATIENCE)), (Some("exhausted"), 8), "{error}");
    assert!(error["message"].as_str().unwrap().contains("ulimit -f"), "{error}");
    // Found only while it is written.
    let (base, new, out) = (home.path().join("base"), home.path().join("new"), home.path().join("delta"));
    let mut dice = command::Dice(7);
    for path in [&base, &new] {
        let made = command::Made::new("w", windlass_core::Dtype::U8, &[4 << 20], dice.bytes(4 << 20));
        command::save(path, &[made]);
    }
    let args = [
        "delta".as_ref(),
        "make".as_ref(),
        base.as_os_str(),
        new.as_os_str(),
        "-o".as_ref(),
        out.as_os_str(),
    ];
    let done = after(limit, &args).output().unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    assert_eq!(done.status.code(), Some(8), "{said}");
    assert!(said.contains("ulimit -f") && !out.exists(), "{said}");
}

/// A user that this process is not, and to which root can give things.
const OTHER: u32 = 65_534;

#[test]
fn tokens_and_images_that_others_can_read_or_own_are_refused() {
    let home = home();
    let (_trainer, agent) = publisher(home.path());
    let (images, token) = (home.path().join("images"), home.path().join("secret"));
    fs::write(&token, &agent.token).unwrap();
    let receive = |more: &[&str]| -> (i32, Value) {
        let from = [format!("--from={}", agent.endpoint), format!("--token-file={}", token.display())];
        let args = ["receive".to_owned(), format!("--dir={}", images.display()), "--until=0".into()];
        let more = more.iter().map(ToString::to_string);
        let mut process = Process::start(args.into_iter().chain(from).chain(more));
        let last = process.rest().pop().unwrap();
        (process.ends_within(PATIENCE), last)
    };
    let mode = |mode| fs::set_permissions(&token, fs::Permissions::from_mode(mode)).unwrap();
    let refused = |(code, told): (i32, Value), what: &str| {
        let message = told["error"]["message"].as_str().unwrap_or_else(|| panic!("{told}"));
        assert!(code == 10 && message.contains(what), "{code} {told}");
    };
    for open in [0o644, 0o640, 0o606] {
        mode(open);
        refused(receive(&[]), "chmod 600");
    }
    mode(0o640);
    assert_eq!(receive(&["--group"]).0, 0, "the group is asked for");
    mode(0o600);
    if std::os::unix::fs::chown(&token, Some(OTHER), Some(OTHER)).is_err() {
        eprintln!("SKIPPED what belongs to another user: this test must run as root to give files away");
        return;
    }
    refused(receive(&[]), "belongs to the user with id 65534");
    std::os::unix::fs::chown(&token, Some(0), Some(0)).unwrap();
    assert_eq!(receive(&[]).0, 0);
    fs::remove_dir_all(&images).unwrap();
    // Somebody was first: with the image, and with the directory of all images.
    for first in [images.join("demo"), images.clone()] {
        fs::create_dir_all(&first).unwrap();
        std::os::unix::fs::chown(&first, Some(OTHER), Some(OTHER)).unwrap();
        refused(receive(&[]), "belongs to the user with id 65534");
        assert!(!first.join("header").exists());
    }
    // Root reads no token and follows no agent that another user's region names.
    let region = home.path().join("region");
    std::os::unix::fs::chown(&region, Some(OTHER), Some(OTHER)).unwrap();
    let other = home.path().join("other");
    let mut process = receiver(&other, &region, &["--until=0"]);
    let last = process.rest().pop().unwrap();
    refused((process.ends_within(PATIENCE), last), "belongs to the user with id 65534");
}
