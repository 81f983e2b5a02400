"""The CUDA programs as PTX, in the files beside their sources that the crate takes in.

    scripts/ptx.py                writes crates/windlass-data/src/cuda/*.ptx
    scripts/ptx.py --check        fails if a file was not made of the sources as they are; needs nothing
    scripts/ptx.py --check-all    fails if a file is not what would be written

A file begins with the hash of what it was made of, by which `--check` tells. Compiling needs NVRTC and no GPU:
`pip install nvidia-cuda-nvrtc-cu12==VERSION`, in this interpreter's environment or under the folder that
WINDLASS_NVRTC names. The version decides which drivers understand the result, so it is the oldest of CUDA 12.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "crates/windlass-data/src/cuda"
#: Of NVRTC. Its PTX is of ISA 8.0, which drivers from CUDA 12.0 on understand (`driver.rs`).
VERSION = "12.0.140"
OPTIONS = ["--std=c++17", "--gpu-architecture=compute_80"]

#: Name of the file: sources, options.
PROGRAMS: dict[str, tuple[list[str], list[str]]] = {
    "sum": (["unit", "sum"], []),
    "copy": (["unit", "copy"], []),
    **{f"encode_{unit}": (["unit", "delta"], [f"-DUNIT={unit}"]) for unit in (1, 2, 4, 8)},
    "encode_cast": (["unit", "delta"], ["-DUNIT=2", "-DCAST=1"]),
    **{f"apply_{unit}": (["unit", "record", "apply"], [f"-DUNIT={unit}"]) for unit in (1, 2, 4, 8)},
}


def source(files: list[str]) -> str:
    """The text of a program."""
    return "".join((SOURCES / f"{f}.cu").read_text(encoding="utf-8") for f in files)


def first_line(program: str) -> str:
    """What the file of a program begins with."""
    files, options = PROGRAMS[program]
    made_of = "\n".join([VERSION, *OPTIONS, *options, source(files)])
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:32]
    return f"// {program} of {' and '.join(f'{f}.cu' for f in files)}, made by scripts/ptx.py: {digest}"


def nvrtc() -> ctypes.CDLL:
    """The compiler of the right version."""
    folders = [os.environ.get("WINDLASS_NVRTC", ""), *sys.path]
    for folder in filter(None, folders):
        path = pathlib.Path(folder) / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
        builtins = path.with_name(f"libnvrtc-builtins.so.{VERSION.rpartition('.')[0]}")
        if path.exists() and builtins.exists():
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    sys.exit(f"ptx: no NVRTC {VERSION}: pip install nvidia-cuda-nvrtc-cu12=={VERSION}")


def compile_program(library: ctypes.CDLL, program: str) -> str:
    """The PTX of a program."""
    files, options = PROGRAMS[program]
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(handle), source(files).encode(), b"windlass.cu", 0, None, None)
    given = [o.encode() for o in [*OPTIONS, *options]]
    code = library.nvrtcCompileProgram(handle, len(given), (ctypes.c_char_p * len(given))(*given))
    if code:
        library.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(handle, log)
        sys.exit(f"ptx: {program}: NVRTC error {code}:\n{log.value.decode()}")
    library.nvrtcGetPTXSize(handle, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(handle, text)
    library.nvrtcDestroyProgram(ctypes.byref(handle))
    # Its own comments and empty lines say nothing.
    lines = (line.rstrip() for line in text.value.decode().splitlines())
    kept = (line for line in lines if line and not line.startswith("//"))
    return "\n".join([first_line(program), *kept, ""])


def main() -> None:
    """Writes or compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare the hashes of sources")
    parser.add_argument("--check-all", action="store_true", help="compile and compare")
    args = parser.parse_args()
    library = None if args.check else nvrtc()
    wrong = []
    for program in PROGRAMS:
        path = SOURCES / f"{program}.ptx"
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if library is None:
            is_same = old.partition("\n")[0] == first_line(program)
        else:
            new = compile_program(library, program)
            is_same = old == new
            if not args.check_all:
                path.write_text(new, encoding="utf-8")
        if not is_same:
            wrong.append(path.name)
    left = sorted(p.name for p in SOURCES.glob("*.ptx") if p.stem not in PROGRAMS)
    if (args.check or args.check_all) and (wrong or left):
        sys.exit(
            f"ptx: {', '.join(wrong + left)} were not made of these sources; run `make ptx` and commit them"
        )
    sys.stdout.write(
        f"ptx: {len(PROGRAMS)} programs, {len(wrong)} written\n"
        if library and not args.check_all
        else "ptx: up to date\n"
    )


if __name__ == "__main__":
    main()
