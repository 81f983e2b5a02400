"""The layer check: what each crate may not depend on, which rooms may use which, and where `unsafe` and `async` may stand.

    scripts/layers.py               check; exit status 1 and one line per breach
    scripts/layers.py --self-test   show that the check itself can fail

Dependencies are those that a build of the crate alone would have (normal edges, default features), for one
fixed target so that the answer is the same on every machine.
"""

import fnmatch
import os
import pathlib
import re
import subprocess
import sys
import tomllib

from rust_source import ROOT, files, strip

TARGET = "x86_64-unknown-linux-gnu"

# crate -> what it must not depend on, directly or not.
FORBIDDEN = {
    "windlass-core": """
        tokio async-std smol mio rustix libc nix socket2 cudarc pyo3 axum hyper reqwest memmap2 rand getrandom
        fastrand tempfile clap indicatif rayon crossbeam-channel tracing log chrono time
        windlass-data windlass windlass-py
    """.split(),
    "windlass-data": "tokio async-std smol axum hyper reqwest pyo3 clap indicatif windlass windlass-py".split(),
    "windlass": "pyo3 windlass-py".split(),
}
# crate -> what it must not name in its own manifest; what it uses may.
FORBIDDEN_DIRECTLY = {
    "windlass": "pyo3 cudarc".split(),
    "windlass-py": "tokio axum clap".split(),
}
# Where `unsafe` may stand. Patterns of paths; `*` also matches `/`.
UNSAFE_ALLOWED = [
    "crates/windlass-data/src/shm.rs",
    "crates/windlass-data/src/shm/*.rs",
    "crates/windlass-data/src/cuda.rs",
    "crates/windlass-data/src/cuda/*.rs",
    "crates/windlass-data/src/simd.rs",
    "crates/windlass-data/src/simd/*.rs",
    "crates/windlass-data/src/file.rs",
    "crates/windlass-py/src/memory.rs",
]
# Where `async` may stand.
ASYNC_ALLOWED = ["crates/windlass/*.rs"]

# The rooms of a crate -> the rooms that each may use. Every file of the crate is in a room; a file at the top is one of its own.
ROOMS = {
    "crates/windlass/src": {
        "main": [],
        "lib": [],
        "cli": ["lab", "tools", "service", "console", "log", "error"],
        "lab": ["tools", "service", "console", "error"],
        "tools": ["service", "console", "error"],
        "service": ["console", "error", "log"],
        "console": ["error"],
        "error": [],
        "log": [],
    },
}


def dependencies(crate: str, *options: str) -> set[str]:
    """Names of the crates that `crate` depends on."""
    command = ["cargo", "tree", "--locked", "-p", crate, "-e", "normal", "--target", TARGET]
    command += ["--prefix", "none", "--format", "{p}", *options]
    env = {**os.environ, "CARGO_TERM_COLOR": "never"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(f"layers: {' '.join(command)} failed:\n{done.stderr}")
    return {line.split()[0] for line in done.stdout.splitlines() if line.strip()} - {crate}


def check_dependencies(forbidden: dict[str, list[str]], *options: str) -> list[str]:
    how = "names" if options else "depends on"
    return [
        f"{crate} {how} {name}; `cargo tree -p {crate} -e normal -i {name}` shows by which way"
        for crate, names in forbidden.items()
        for name in sorted(dependencies(crate, *options) & set(names))
    ]


def check_word(word: str, allowed: list[str], name: str, text: str) -> list[str]:
    """Breaches in one file: `word` as a keyword outside the allowed paths."""
    if any(fnmatch.fnmatch(name, pattern) for pattern in allowed):
        return []
    return [
        f"{name}:{number}: `{word}` is allowed only in {', '.join(allowed)}"
        for number, line in enumerate(strip(text).splitlines(), 1)
        if re.search(rf"\b{word}\b", line)
    ]


def check_rooms(name: str, text: str) -> list[str]:
    """Breaches in one file: names of rooms that its own may not use."""
    crate = next((c for c in ROOMS if name.startswith(c + "/")), None)
    if crate is None:
        return []
    rooms = ROOMS[crate]
    room = name[len(crate) + 1 :].partition("/")[0].removesuffix(".rs")
    if room not in rooms:
        return [f"{name}: {room} is no room of {crate}: name it in scripts/layers.py, with the rooms that it may use"]
    breaches = []
    for number, line in enumerate(strip(text).splitlines(), 1):
        used = set(re.findall(r"\bcrate::(\w+)", line))
        for group in re.findall(r"\bcrate::\{([^}]*)", line):
            used |= set(re.findall(r"\b(\w+)", group))
        for other in sorted(used & rooms.keys() - {room, *rooms[room]}):
            breaches.append(f"{name}:{number}: {room} uses {other}, and may use {', '.join(rooms[room]) or 'no other'}")
    return breaches


def check_source() -> list[str]:
    breaches = []
    for path in files(".rs"):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        breaches += check_rooms(name, text)
        breaches += check_word("unsafe", UNSAFE_ALLOWED, name, text)
        breaches += check_word("async", ASYNC_ALLOWED, name, text)
    return breaches


def check_lints(root: pathlib.Path) -> list[str]:
    """The lints that hold the rest of the fence must be there."""
    breaches = []
    workspace = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]
    level = workspace.get("lints", {}).get("rust", {}).get("unsafe_code")
    if level not in ("deny", "forbid"):
        breaches.append(f"Cargo.toml: [workspace.lints.rust] unsafe_code is {level!r}, must be 'deny'")
    for member in workspace["members"]:
        manifest = tomllib.loads((root / member / "Cargo.toml").read_text())
        if manifest.get("lints", {}).get("workspace") is not True:
            breaches.append(f"{member}/Cargo.toml: [lints] workspace = true is missing")
    lib = "crates/windlass-core/src/lib.rs"
    if "#![forbid(unsafe_code)]" not in strip((root / lib).read_text()):
        breaches.append(f"{lib}: #![forbid(unsafe_code)] is missing")
    clippy = root / "crates/windlass-core/clippy.toml"
    banned = tomllib.loads(clippy.read_text()) if clippy.exists() else {}
    paths = {entry["path"] for key in ("disallowed-methods", "disallowed-types") for entry in banned.get(key, [])}
    for path in ["std::time::Instant::now", "std::fs::File", "std::net::TcpStream", "std::thread::spawn", "std::env::var"]:
        if path not in paths:
            breaches.append(f"crates/windlass-core/clippy.toml does not ban {path}")
    return breaches


def self_test() -> None:
    """Each kind of breach must be reported when it is there."""
    # Pairs that exist, listed as forbidden.
    assert check_dependencies({"windlass": ["clap"]}) and check_dependencies({"windlass": ["clap"]}, "--depth", "1")
    assert check_dependencies({"windlass-data": ["windlass-core"]})
    assert check_dependencies({"windlass": ["serde_core"]}), "an indirect dependency counts"
    assert not check_dependencies({"windlass": ["serde_core"]}, "--depth", "1"), "but it is not a direct one"
    assert not check_dependencies({"windlass-core": ["proptest"]}), "development dependencies do not count"

    bad = 'fn f() { let s = "fine"; unsafe { g() } }'
    assert check_word("unsafe", UNSAFE_ALLOWED, "crates/windlass-core/src/x.rs", bad)
    assert check_word("unsafe", UNSAFE_ALLOWED, "crates/windlass-data/src/region.rs", "\n\nunsafe fn f() {}") == [
        f"crates/windlass-data/src/region.rs:3: `unsafe` is allowed only in {', '.join(UNSAFE_ALLOWED)}"
    ]
    assert check_word("async", ASYNC_ALLOWED, "crates/windlass-data/src/tcp.rs", "async fn f() {}")
    for good in [
        "// unsafe",
        "/* a /* nested */ unsafe */",
        '"unsafe" r#"unsafe "quoted" "# b"unsafe"',
        "#![deny(unsafe_code)] '\"' /* unsafe */ '\\'' // unsafe",
    ]:
        assert not check_word("unsafe", UNSAFE_ALLOWED, "crates/windlass-core/src/x.rs", good), good
    assert check_word("unsafe", UNSAFE_ALLOWED, "x.rs", "fn f<'a>(x: &'a u8) { unsafe {} } // '"), "a lifetime is no literal"
    assert not check_word("unsafe", UNSAFE_ALLOWED, "crates/windlass-data/src/simd/avx2.rs", bad)

    room = "crates/windlass/src/service/agent.rs"
    assert check_rooms(room, "use crate::lab::synth;\n") == [
        f"{room}:1: service uses lab, and may use console, error, log"
    ]
    assert check_rooms(room, "use crate::{error, tools};") and check_rooms("crates/windlass/src/new.rs", "")
    assert not check_rooms(room, "// crate::lab\nuse crate::error::Error;\nuse crate::service::token;\n")
    assert not check_rooms("crates/windlass-data/src/serve.rs", "use crate::lab;")

    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        for path in [*files("Cargo.toml"), ROOT / "crates/windlass-core/clippy.toml", *files("lib.rs")]:
            copy = root / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        assert not check_lints(root), check_lints(root)
        for name, old, new in [
            ("Cargo.toml", 'unsafe_code = "deny"', 'unsafe_code = "allow"'),
            ("crates/windlass-data/Cargo.toml", "[lints]\nworkspace = true", ""),
            ("crates/windlass-core/src/lib.rs", "#![forbid(unsafe_code)]", "// #![forbid(unsafe_code)]"),
            ("crates/windlass-core/clippy.toml", "std::time::Instant::now", "std::time::Instant::then"),
        ]:
            path = root / name
            before = path.read_text()
            assert old in before, f"{name} has no {old}"
            path.write_text(before.replace(old, new))
            assert len(check_lints(root)) == 1, f"{name}: {old} -> {new}: {check_lints(root)}"
            path.write_text(before)
    print("layers: self-test passed")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    breaches = check_dependencies(FORBIDDEN)
    breaches += check_dependencies(FORBIDDEN_DIRECTLY, "--depth", "1")
    breaches += check_source() + check_lints(ROOT)
    for breach in breaches:
        print(f"layers: {breach}", file=sys.stderr)
    if breaches:
        sys.exit(1)
    pairs = sum(map(len, FORBIDDEN.values())) + sum(map(len, FORBIDDEN_DIRECTLY.values()))
    print(f"layers: {pairs} forbidden pairs absent, unsafe, async and rooms as they should be, lints in force")


if __name__ == "__main__":
    main()
