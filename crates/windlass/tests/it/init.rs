//! `windlass init`: what it finds, what it writes, what it leaves alone, and when it gives up.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{self, Ran, names};

const TRAINERS: [&str; 9] =
    ["trl", "verl", "skyrl", "openrlhf", "transformers", "lightning", "accelerate", "deepspeed", "torch"];
const ENGINES: [&str; 3] = ["vllm", "sglang", "python"];

/// Interpreters and packages of a test.
struct Home {
    dir: tempfile::TempDir,
    /// A real interpreter that has no packages but those of [`Home::install`].
    python: PathBuf,
}

impl Home {
    fn new() -> Home {
        let dir = tempfile::tempdir().unwrap();
        let python = dir.path().join("bare/bin/python");
        program(&python, "exec python3 -S \"$@\"");
        Home { dir, python }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn packages(&self) -> PathBuf {
        self.path("packages")
    }

    /// A package that must not be imported.
    fn install(&self, name: &str, version: Option<&str>) {
        let folder = self.packages().join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("__init__.py"), "raise SystemExit('it was imported')\n").unwrap();
        if let Some(version) = version {
            let info = self.packages().join(format!("{name}-{version}.dist-info"));
            fs::create_dir_all(&info).unwrap();
            let text = format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n");
            fs::write(info.join("METADATA"), text).unwrap();
        }
    }

    fn init(&self) -> Command {
        let mut init = command::windlass();
        init.arg("init").current_dir(self.dir.path()).env("PYTHONPATH", self.packages());
        for name in ["WINDLASS_CONFIG", "VIRTUAL_ENV", "PYTHONSAFEPATH"] {
            init.env_remove(name);
        }
        init
    }

    /// `windlass init --json DIR` with the bare interpreter.
    fn run(&self, dir: &str, more: &[&str]) -> Ran {
        ran(self.init().args(["--json", dir]).arg("--python").arg(&self.python).args(more))
    }
}

fn ran(command: &mut Command) -> Ran {
    let out = command.output().unwrap();
    let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
    Ran { code: out.status.code().unwrap_or(-1), stdout: text(out.stdout), stderr: text(out.stderr) }
}

fn program(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn texts(of: &Value) -> Vec<&str> {
    of.as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect()
}

/// A configuration whose examples in comments count too, `# key = value` as `key = value`, and how many there are.
fn with_examples(text: &str) -> (String, usize) {
    let example = |line: &str| {
        let line = line.strip_prefix("# ")?;
        let (key, _) = line.split_once(" = ")?;
        key.chars().all(|c| c.is_ascii_lowercase() || c == '-').then(|| line.to_owned())
    };
    let lines: Vec<_> = text.lines().map(|line| example(line).ok_or(line.to_owned())).collect();
    let count = lines.iter().filter(|line| line.is_ok()).count();
    (lines.into_iter().map(|line| line.unwrap_or_else(|line| line) + "\n").collect(), count)
}

fn is_shell(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "sh")
}

#[test]
fn every_pair_that_fits_is_written_and_accepted_and_any_other_is_refused_by_name() {
    let home = Home::new();
    let (mut scripts, mut examples) = (BTreeMap::new(), 0);
    for trainer in TRAINERS {
        for engine in ENGINES {
            let name = format!("{trainer}-{engine}");
            let told = home.run(&name, &["--trainer", trainer, "--engine", engine]);
            let fits = match trainer {
                "trl" | "skyrl" | "openrlhf" => engine == "vllm",
                "verl" => engine != "python",
                _ => true,
            };
            let dir = home.path(&name);
            if !fits {
                let error = &told.json()["error"];
                assert_eq!((told.code, error["kind"].as_str()), (2, Some("invalid")), "{name}");
                assert!(error["message"].as_str().unwrap().contains(trainer), "{error}");
                assert!(error["advice"].as_str().unwrap().contains("--engine"), "{error}");
                assert!(!dir.exists());
                continue;
            }
            let told = told.ok().json();
            assert_eq!((&told["trainer"], &told["engine"]), (&trainer.into(), &engine.into()));
            let files: BTreeSet<String> =
                texts(&told["files"]).into_iter().map(|f| f[name.len() + 1..].to_owned()).collect();
            assert_eq!(files.iter().cloned().collect::<Vec<_>>(), names(&dir));
            let own_engines = ["verl", "skyrl", "openrlhf"].contains(&trainer);
            let serves = if engine == "python" { "follow.py" } else { "serve.sh" };
            assert!(files.contains("windlass.toml") && files.contains(serves) != own_engines, "{files:?}");
            let next = texts(&told["next"]);
            assert_eq!(next.len(), files.len() - 1);
            assert!(next.iter().all(|command| command.starts_with(&format!("cd {name} && "))), "{next:?}");
            for file in &files {
                let path = dir.join(file);
                let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
                assert_eq!(mode, if is_shell(&path) { 0o755 } else { 0o644 }, "{file}");
                if file != "windlass.toml" {
                    assert!(next.iter().any(|command| command.contains(file.as_str())), "{next:?}");
                    scripts.insert(fs::read(&path).unwrap(), path);
                }
            }
            let config = dir.join("windlass.toml");
            let text = fs::read_to_string(&config).unwrap();
            let (more, count) = with_examples(&text);
            examples += count;
            for text in [text, more] {
                fs::write(&config, &text).unwrap();
                let shown = ran(command::windlass().args(["config", "--json"]).current_dir(&dir)).ok().json();
                assert_eq!(shown["file"], "windlass.toml");
            }
        }
    }
    assert!(scripts.len() > 15 && examples > 20, "{} {examples}", scripts.len());
    for path in scripts.values() {
        let mut check = Command::new(if is_shell(path) { "bash" } else { "python3" });
        if is_shell(path) {
            check.arg("-n");
        } else {
            check.args(["-m", "py_compile"]).env("PYTHONPYCACHEPREFIX", home.path("cache"));
        }
        let checked = ran(check.arg(path));
        assert_eq!(checked.code, 0, "{}: {}", path.display(), checked.stderr);
    }
}

#[test]
fn packages_are_found_with_their_versions_and_none_is_imported() {
    let home = Home::new();
    let told = home.run("nothing", &[]).ok().json();
    assert_eq!((&told["trainer"], &told["engine"]), (&"torch".into(), &"python".into()));
    assert!(told["found"].as_object().unwrap().is_empty());
    assert!(told["notes"].to_string().contains("for the trainer: windlass, torch"), "{told}");

    home.install("torch", Some("2.13.0"));
    home.install("vllm", None);
    // Checkouts of frameworks, on the path and in the current directory, are not installed.
    fs::create_dir_all(home.packages().join("verl/verl")).unwrap();
    fs::create_dir_all(home.path("trl")).unwrap();
    fs::write(home.path("trl/__init__.py"), "").unwrap();
    let told = home.run("one", &[]).ok().json();
    assert_eq!((&told["trainer"], &told["engine"]), (&"torch".into(), &"vllm".into()));
    assert_eq!(told["found"], serde_json::json!({ "torch": "2.13.0", "vllm": null }));
    assert!(told["notes"].to_string().contains("for the trainer: windlass, transformers"), "{told}");

    for name in ["transformers", "deepspeed", "sglang", "windlass"] {
        home.install(name, Some("1.0"));
    }
    let told = home.run("many", &[]).ok().json();
    assert_eq!((&told["trainer"], &told["engine"]), (&"transformers".into(), &"vllm".into()));
    assert_eq!(
        texts(&told["notes"]),
        ["--trainer could also be deepspeed, torch", "--engine could also be sglang"]
    );
    let told = home.run("asked", &["--trainer", "deepspeed", "--engine", "sglang"]).ok().json();
    assert_eq!((&told["trainer"], &told["engine"]), (&"deepspeed".into(), &"sglang".into()));
    // What a start-up file of the interpreter prints is not the answer.
    fs::write(home.packages().join("sitecustomize.py"), "print('hello')\n").unwrap();
    program(&home.path("loud"), "exec python3 -c 'print(1); import sys; exec(sys.argv[1])' \"$2\" torch");
    let told = ran(home.init().args(["--json", "loud-files", "--python", "./loud"])).ok().json();
    assert_eq!(told["found"], serde_json::json!({ "torch": "2.13.0" }));
}

#[test]
fn the_interpreter_is_the_named_one_or_that_of_the_environment_or_the_one_on_the_path() {
    let home = Home::new();
    home.install("torch", Some("1"));
    let active = ran(home.init().args(["--json", "active"]).env("VIRTUAL_ENV", home.path("bare")));
    let told = active.ok().json();
    assert_eq!(told["python"], home.python.to_str().unwrap());
    assert_eq!(texts(&told["next"])[0], "cd active && python3 train.py");
    let human = ran(home.init().arg("here").arg("--python").arg(&home.python)).ok().stdout;
    assert!(human.contains(&format!("cd here && {} train.py", home.python.display())), "{human}");
    let on_path = ran(home.init().args(["--json", "path"])).ok().json();
    assert_eq!((&on_path["python"], &on_path["found"]["torch"]), (&"python3".into(), &"1".into()));
    // None was asked for and there is none: the plain files need none.
    let bare = ran(home.init().args(["--json", "bare-files"]).env("PATH", home.path("nowhere"))).ok().json();
    assert!(bare["python"].is_null() && bare["notes"].to_string().contains("no python3"), "{bare}");
    assert_eq!(names(&home.path("bare-files")), ["follow.py", "train.py", "windlass.toml"]);
}

#[test]
fn an_interpreter_that_is_missing_or_fails_or_hangs_is_an_error_that_names_it() {
    let home = Home::new();
    program(&home.path("broken"), "echo 'a library is missing' >&2; exit 3");
    program(&home.path("other"), "echo done");
    let pid = home.path("pid");
    program(&home.path("hangs"), &format!("sleep 600 & echo $! > {}; wait", pid.display()));
    let gone = home.path("gone/bin/python");
    let begun = Instant::now();
    for (python, code, kind, words) in [
        (gone.to_str().unwrap(), 3, "not_found", "cannot start"),
        ("no-such-python", 3, "not_found", "no-such-python"),
        ("./broken", 9, "unsupported", "a library is missing"),
        ("./other", 9, "unsupported", "did not say"),
        ("./hangs", 6, "timeout", "did not answer within 1 s"),
    ] {
        let told = ran(home.init().args(["--json", "new", "--timeout", "1", "--python", python]));
        let error = &told.json()["error"];
        assert_eq!((told.code, error["kind"].as_str()), (code, Some(kind)), "{python}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
        assert!(error["advice"].as_str().unwrap().contains("--python"), "{error}");
        assert!(!home.path("new").exists());
    }
    assert!(begun.elapsed() < Duration::from_secs(60));
    // What the interpreter had started has ended with it.
    let stat = format!("/proc/{}/stat", fs::read_to_string(&pid).unwrap().trim());
    let runs = || fs::read_to_string(&stat).is_ok_and(|s| !s.rsplit(')').next().unwrap().starts_with(" Z"));
    while runs() && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!runs());
    let stale = ran(home.init().args(["--json", "new"]).env("VIRTUAL_ENV", home.path("gone")));
    assert_eq!((stale.code, stale.json()["error"]["kind"].as_str()), (3, Some("not_found")));
}

#[test]
fn a_file_that_exists_is_kept_and_then_nothing_is_written() {
    let home = Home::new();
    let dir = home.path("mine");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("train.py"), "mine").unwrap();
    // A link counts as a file, wherever it leads.
    let outside = home.path("outside");
    symlink(&outside, dir.join("follow.py")).unwrap();
    let refused = home.run("mine", &[]);
    let error = &refused.json()["error"];
    assert_eq!((refused.code, error["kind"].as_str()), (2, Some("invalid")), "{error}");
    assert_eq!(error["message"], "files are already there: mine/train.py, mine/follow.py");
    assert!(error["advice"].as_str().unwrap().contains("--force"), "{error}");
    assert_eq!(names(&dir), ["follow.py", "train.py"]);
    assert_eq!((fs::read(dir.join("train.py")).unwrap(), outside.exists()), (b"mine".to_vec(), false));

    fs::write(&outside, "theirs").unwrap();
    home.run("mine", &["--force"]).ok();
    assert_eq!(names(&dir), ["follow.py", "train.py", "windlass.toml"]);
    assert!(fs::symlink_metadata(dir.join("follow.py")).unwrap().is_file());
    assert_eq!(fs::read(&outside).unwrap(), b"theirs", "a link was followed");
    assert!(fs::read_to_string(dir.join("train.py")).unwrap().contains("WeightManager"));

    fs::remove_file(dir.join("train.py")).unwrap();
    fs::create_dir(dir.join("train.py")).unwrap();
    fs::remove_file(dir.join("follow.py")).unwrap();
    let refused = home.run("mine", &["--force"]);
    assert_eq!(refused.code, 2, "{}", refused.stdout);
    assert_eq!(names(&dir), ["train.py", "windlass.toml"]);
}
