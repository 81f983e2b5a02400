"""Runs the few tests of a group that failed once more, when every other group has ended: `again.py GROUP LOG`.

LOG is what the group printed. Exit status 0 if there were few and all of them pass now. They are named either way: a test
that passes only on a quiet machine has a defect. Groups that are no tests (lint, docs) get no second run, nor does a
group in which anything failed that is not a test.

    scripts/again.py --self-test    show that the check itself can fail
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys

#: More failures than these are no accident of a busy machine.
LIMIT = 3

_PYTEST = re.compile(r"^(?:FAILED|ERROR) (tests/\S+\.py::.+?)(?: - .*)?$", re.M)
_PYTEST_END = re.compile(r"^=* ?(?=.*\b(?:failed|error)).*\bin [\d.]+s\b", re.M)
_PYTEST_COUNT = re.compile(r"(\d+) (?:failed|error)")
_RUST = re.compile(r"^failures:\n((?:    \S+\n)+)\ntest result: FAILED", re.M)
_RUST_END = re.compile(r"^test result: FAILED\. \d+ passed; (\d+) failed", re.M)
_RUST_ERROR = re.compile(r"^error: (?:doc)?test failed, to rerun", re.M)


def failed(group: str, log: str) -> list[str]:
    """The tests of a group that failed; none if something failed that is not a test."""
    if group in ("pytest", "engines", "frameworks"):
        names = list(dict.fromkeys(_PYTEST.findall(log)))
        counted = sum(int(n) for end in _PYTEST_END.findall(log) for n in _PYTEST_COUNT.findall(end))
        return names if len(names) == counted else []
    if group == "rust":
        names = [name for block in _RUST.findall(log) for name in block.split()]
        ends = [int(n) for n in _RUST_END.findall(log)]
        return names if len(names) == sum(ends) and len(ends) == len(_RUST_ERROR.findall(log)) else []
    return []


def commands(group: str, names: list[str]) -> list[list[str]]:
    if group == "rust":
        cargo = shlex.split(os.environ.get("CARGO", "cargo"))
        options = ["--locked", "--features", "windlass-data/conformance", "--no-fail-fast"]
        return [[*cargo, "test", *options, "--", "--exact", "--test-threads=1", *names]]
    inside = [name for name in names if name.startswith("tests/engines/vllm/inside/")]
    others = [name for name in names if name not in inside]
    pythons = ((os.environ.get("PY", ".venv/bin/python"), others), (".venv-vllm/bin/python", inside))
    return [[python, "-m", "pytest", *some] for python, some in pythons if some]


def main(arguments: list[str]) -> int:
    if arguments == ["--self-test"]:
        return self_test()
    group, log = arguments
    names = failed(group, pathlib.Path(log).read_text(errors="replace"))
    if not 0 < len(names) <= LIMIT:
        return 1
    print(f"== {group}: once more, alone: {' '.join(names)}", flush=True)
    code = max(subprocess.run(command, check=False).returncode for command in commands(group, names))
    said = "FLAKY, which is a defect: failed while others ran, passed alone" if code == 0 else "failed twice"
    print(f"*** {group}: {said}: {' '.join(names)}", flush=True)
    return int(code != 0)


def self_test() -> int:
    end = "FAILED tests/python/test_a.py::test_b[x y] - assert 1 == 2\n1 failed, 7 passed, 2 skipped in 3.20s (0:00:03)\n"
    rust = (
        "failures:\n\n---- a::b stdout ----\nno\n\nfailures:\n    a::b\n\n"
        "test result: FAILED. 3 passed; 1 failed; 0 ignored\n\nerror: test failed, to rerun pass `--test it`\n"
    )
    killed = "error: test failed, to rerun pass `--lib`\n"
    wanted = {
        "a test with a parameter": (failed("pytest", end), ["tests/python/test_a.py::test_b[x y]"]),
        "two runs": (failed("engines", end + end.replace("a.py", "c.py")).__len__(), 2),
        "a count that is not that of the names": (failed("pytest", end.replace("1 failed", "2 failed")), []),
        "a Rust test": (failed("rust", rust), ["a::b"]),
        "a Rust test and a test binary that was killed": (failed("rust", rust + killed), []),
        "lint": (failed("lint", end), []),
        "a run that passes": (failed("pytest", "7 passed in 1.00s\n"), []),
    }
    wrong = [f"{what}: {found!r}, not {right!r}" for what, (found, right) in wanted.items() if found != right]
    print("\n".join(wrong) or "again: self-test passed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
