"""What the scripts here and in `bench` cannot do without, and how they say so.

Owns: :func:`need` and :func:`need_device`, which end a script with one sentence, and the types of arguments that both
folders share. Called before anything heavy is imported. Must not: import torch by being imported.

| missing | a test | a benchmark |
|---|---|---|
| a module, or CUDA in torch where there is a GPU | 2 | 2 |
| a CUDA device | 0, and SKIPPED | 2 |

As a script it looks for all of it and tests nothing: 0 if the tests can run, 2, or 77 if there is no device.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

#: What the script returns where there is no device.
NO_DEVICE = 77
ADVICE = {
    "windlass": "build it (`make develop`; for figures as docs/gpu.md says) and set PYTHONPATH=python",
    "vllm": "`make engine-venvs` makes an environment that has it",
}


def end(line: str, code: int) -> NoReturn:
    """Ends the script with a sentence that nobody overlooks."""
    sys.stderr.write(f"*** {line}\n")
    sys.exit(code)


def need(*modules: str) -> None:
    """Ends the script if one of them cannot be imported."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as e:
            advice = ADVICE.get(name, f"{sys.executable} -m pip install {name}, or take another Python")
            end(f"{name} cannot be imported by {sys.executable} ({e}): {advice}", 2)


def need_device(tested: str | None = None, instead: str = "") -> None:
    """Ends the script if there is no CUDA device. ``tested`` is what a test would have tested; benchmarks have none.
    ``instead`` is what works without one."""
    need("torch")
    import torch

    if torch.cuda.is_available():
        return
    if torch.version.cuda is None and Path("/dev/nvidiactl").exists():
        end(f"torch {torch.__version__} has no CUDA, and there is a GPU: install a build that has it", 2)
    instead = f" ({instead})" if instead else ""
    if tested is None:
        end(f"no CUDA device: nothing was measured{instead}", 2)
    end(f"SKIPPED: no CUDA device; nothing of {tested} was tested{instead}", 0)


def run_tests(found: dict[str, Any], names: list[str], *given: Any, patience: float = 300.0) -> int:
    """Calls each ``test_`` function of ``found`` whose name has one of ``names`` in it, with ``given``. A test returns a note. One
    that fails does not stop the others; one that hangs for ``patience`` seconds shows where, and ends the script.
    Returns the script's exit code."""
    ran, failed = 0, []
    for name, test in [(n, f) for n, f in found.items() if n.startswith("test_")]:
        if names and not any(part in name for part in names):
            continue
        ran += 1
        faulthandler.dump_traceback_later(patience, exit=True)
        began = time.monotonic()
        try:
            note = test(*given)
            how = "ok  "
        except Exception as e:
            traceback.print_exc()
            failed.append(name)
            how, note = "FAIL", f"{type(e).__name__}: {e}"
        told = f": {note}" if note else ""
        sys.stdout.write(f"{how}  {time.monotonic() - began:6.1f} s  {name}{told}\n")
        sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"{ran - len(failed)} of {ran} passed" + (f"; failed: {failed}\n" if failed else "\n"))
    if not ran:
        end(f"no test has one of {names} in its name", 2)
    return 1 if failed else 0


def whole(least: int) -> Callable[[str], int]:
    """An argument: a whole number, at least so large."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return read


def share(text: str) -> float:
    """An argument: a part of everything, more than none of it."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def one_of(sizes: Iterable[str]) -> Callable[[str], str]:
    """An argument: one of these, in either case."""
    known = {size.lower(): size for size in sizes}

    def read(text: str) -> str:
        if text.lower() not in known:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a size: take one of {', '.join(known.values())}"
            )
        return known[text.lower()]

    return read


if __name__ == "__main__":
    need("torch", "numpy", "transformers")
    try:
        need_device("the GPU path")
    except SystemExit as e:
        sys.exit(NO_DEVICE if e.code == 0 else e.code)
