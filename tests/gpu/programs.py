"""The CUDA programs of Windlass, compiled and started from Python: on a GPU, or on the CPU where there is none.

`Device` compiles the sources with NVRTC and starts kernels through the driver, on torch's current stream. `Host`
compiles the same sources with the system's C++ compiler over `host.h`, which is slow and needs nothing else. Both take
tables as tensors and arguments by name, so that a test does not know where it runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(os.environ.get("WINDLASS_CUDA", ROOT / "crates/windlass-data/src/cuda"))
THREADS = 256

u4, u8 = np.uint32, np.uint64
BLOCK = np.dtype(
    [(n, u8) for n in ("fresh", "fresh_pitch", "base", "start", "pitch")]
    + [(n, u4) for n in ("run", "count", "number", "is_float")]
)
ENTRY = np.dtype(
    [("offset", u8), ("sum", u8, 2), ("number", u4), ("mode", u4), ("length", u4), ("changes", u4)]
)
SPAN = np.dtype(
    [(n, u8) for n in ("at", "pitch", "start", "stride")]
    + [(n, u4) for n in ("run", "count", "sum", "unused")]
)
COPY = np.dtype([(n, u8) for n in ("from", "to", "from_pitch", "to_pitch", "run", "count")])
PLACE = np.dtype(
    [("start", u8), ("pitch", u8)]
    + [(n, u4) for n in ("run", "count", "first", "pieces", "is_float", "mantissa")]
)
PIECE = np.dtype([(n, u8) for n in ("begin", "run", "pitch", "count", "target", "target_pitch")])
PATCH = np.dtype(
    [("offset", u8), ("sum", u8, 2), ("length", u4), ("mode", u4), ("place", u4), ("unused", u4)]
)
TALLY = np.dtype(
    [("cursor", u8), ("changes", u8), ("entries", u4), ("lost", u4), ("outcome", u4, 4), ("next", u4, 8)]
)
ENCODE = np.dtype(
    [(n, u8) for n in ("blocks", "sums", "out", "entries", "tally", "capacity")]
    + [(n, u4) for n in ("count", "entry_capacity", "work", "unused")]
)
SUM = np.dtype([(n, u8) for n in ("spans", "sums", "tally")] + [(n, u4) for n in ("count", "work")])
COPIES = np.dtype([(n, u8) for n in ("copies", "from", "to", "tally")] + [(n, u4) for n in ("count", "work")])
APPLY = np.dtype(
    [(n, u8) for n in ("places", "pieces", "patches", "payload", "sums", "outcomes", "tally")]
    + [(n, u4) for n in ("count", "work")]
)

#: Program: files, options, kernels with the type of their argument.
PROGRAMS: dict[str, tuple[list[str], list[str], dict[str, tuple[str, np.dtype[Any]]]]] = {
    "sum": (["unit", "sum"], [], {"windlass_sum": ("SumArgs", SUM)}),
    "copy": (
        ["unit", "copy"],
        [],
        {"windlass_copy": ("CopyArgs", COPIES), "windlass_cast": ("CopyArgs", COPIES)},
    ),
}
for unit in ("1", "2", "4", "8", "cast"):
    options = ["-DUNIT=2", "-DCAST=1"] if unit == "cast" else [f"-DUNIT={unit}"]
    kernels = {"windlass_encode": ("EncodeArgs", ENCODE), "windlass_fill": ("EncodeArgs", ENCODE)}
    PROGRAMS[f"encode_{unit}"] = (["unit", "delta"], options, kernels)
    if unit != "cast":
        PROGRAMS[f"apply_{unit}"] = (
            ["unit", "record", "apply"],
            options,
            {"windlass_apply": ("ApplyArgs", APPLY)},
        )


def text(files: list[str]) -> str:
    return "".join(f'#line 1 "{Path(f).name}.cu"\n' + (SOURCES / f"{f}.cu").read_text() for f in files)


def record(kind: np.dtype[Any], **fields: Any) -> np.ndarray[Any, Any]:
    it = np.zeros((), kind)
    for name, value in fields.items():
        it[name] = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return it


class Programs:
    """Where kernels run; tables and weights are tensors on `device`."""

    device: str

    def start(self, program: str, kernel: str, grid: int = 0, **fields: Any) -> None:
        """Starts a kernel; tensors among the fields stand for their address. Without a grid, the device's own."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for what was started."""

    def table(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return torch.from_numpy(raw.copy()).to(self.device)

    def zeros(self, count: int, kind: np.dtype[Any] | type = np.uint8) -> torch.Tensor:
        """Bytes, aligned to 256 as the device's own allocations are."""
        size = count * np.dtype(kind).itemsize
        if self.device != "cpu":
            return torch.zeros(max(size, 16), dtype=torch.uint8, device=self.device)[:size]
        raw = torch.zeros(size + 512, dtype=torch.uint8)
        return raw[(skip := -raw.data_ptr() % 256) : skip + size]

    def read(self, tensor: torch.Tensor, kind: np.dtype[Any] | type = np.uint8) -> np.ndarray[Any, Any]:
        self.finish()
        return np.asarray(tensor.cpu().numpy().copy().view(kind))


class Host(Programs):
    device = "cpu"

    def __init__(self) -> None:
        self.libraries: dict[str, ctypes.CDLL] = {}
        self.folder = Path(tempfile.gettempdir()) / f"windlass-host-{os.getuid()}"
        self.folder.mkdir(exist_ok=True)

    def library(self, program: str) -> ctypes.CDLL:
        if program not in self.libraries:
            files, options, kernels = PROGRAMS[program]
            header = (Path(__file__).parent / "host.h").read_text()
            starts = "".join(f"HOST_KERNEL({k}, {args})\n" for k, (args, _) in kernels.items())
            source = f"{header}\n{text(files)}\n{starts}".replace("#pragma once", "")
            name = hashlib.sha256((source + str(options)).encode()).hexdigest()[:16]
            built = self.folder / f"{name}.so"
            if not built.exists():
                path = self.folder / f"{name}.cpp"
                path.write_text(source)
                # Threads jump from stack to stack, which a fortified library takes for an error.
                flags = ["-O1", "-std=c++20", "-w", "-shared", "-fPIC", "-fno-strict-aliasing"]
                flags += ["-U_FORTIFY_SOURCE", "-fno-stack-protector"]
                fresh = built.with_suffix(f".{os.getpid()}")
                command = ["c++", *flags, *options, str(path), "-o", str(fresh)]
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=600)
                fresh.rename(built)
            self.libraries[program] = ctypes.CDLL(str(built))
        return self.libraries[program]

    def start(self, program: str, kernel: str, grid: int = 0, **fields: Any) -> None:
        args = record(PROGRAMS[program][2][kernel][1], **fields)
        start = getattr(self.library(program), f"host_{kernel}")
        start(ctypes.c_uint(grid or 2), ctypes.c_void_p(args.ctypes.data))


class Device(Programs):
    device = "cuda"

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.modules: dict[str, ctypes.c_void_p] = {}
        self.kernels: dict[tuple[str, str], tuple[ctypes.c_void_p, int, int]] = {}
        self.cache = Path(os.environ.get("WINDLASS_CUBINS", tempfile.gettempdir()))

    def check(self, code: int, what: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{what}: CUDA error {code}: {(text.value or b'?').decode()}")

    def module(self, program: str) -> ctypes.c_void_p:
        if program not in self.modules:
            files, options, _ = PROGRAMS[program]
            major, minor = torch.cuda.get_device_capability()
            arch = f"sm_{major}{minor}"
            source = text(files)
            name = hashlib.sha256((source + str(options) + arch).encode()).hexdigest()[:16]
            built = self.cache / f"windlass-{name}.cubin"
            ptx = SOURCES / f"{program}.ptx"
            if "WINDLASS_PTX" in os.environ and ptx.exists():
                # As the extension does: the driver translates it.
                image = ptx.read_bytes() + b"\0"
            else:
                if not built.exists():
                    built.write_bytes(compile_cubin(source, [*options, f"--gpu-architecture={arch}"]))
                image = built.read_bytes()
            module = ctypes.c_void_p()
            self.check(self.driver.cuModuleLoadData(ctypes.byref(module), image), f"load {program}")
            self.modules[program] = module
        return self.modules[program]

    def kernel(self, program: str, name: str) -> tuple[ctypes.c_void_p, int, int]:
        """The function, its shared memory and how many CTAs fill the device."""
        if (program, name) not in self.kernels:
            module, function = self.module(program), ctypes.c_void_p()
            code = self.driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
            self.check(code, f"find {name} in {program}")
            at, size, value = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint32(16)
            found = (ctypes.byref(at), ctypes.byref(size), module, b"windlass_shared_bytes")
            if self.driver.cuModuleGetGlobal_v2(*found) == 0:
                code = self.driver.cuMemcpyDtoH_v2(ctypes.byref(value), at, ctypes.c_size_t(4))
                self.check(code, "read windlass_shared_bytes")
            shared = value.value
            self.check(
                self.driver.cuFuncSetAttribute(function, 8, shared), f"{shared} bytes of shared memory"
            )
            fit = ctypes.c_int()
            code = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(fit), function, THREADS, ctypes.c_size_t(shared)
            )
            self.check(code, "occupancy")
            grid = fit.value * torch.cuda.get_device_properties(0).multi_processor_count
            self.kernels[program, name] = (function, shared, grid)
        return self.kernels[program, name]

    def start(self, program: str, kernel: str, grid: int = 0, **fields: Any) -> None:
        args = record(PROGRAMS[program][2][kernel][1], **fields)
        function, shared, fill = self.kernel(program, kernel)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        params = (ctypes.c_void_p * 1)(args.ctypes.data)
        code = self.driver.cuLaunchKernel(
            function, grid or fill, 1, 1, THREADS, 1, 1, shared, stream, params, None
        )
        self.check(code, f"start {kernel}")

    def finish(self) -> None:
        torch.cuda.synchronize()


def nvrtc() -> ctypes.CDLL:
    """The library that torch brings, or the system's."""
    version = (torch.version.cuda or "13").split(".")[0]
    folders = [Path(p) / "nvidia" for p in sys.path if (Path(p) / "nvidia").is_dir()]
    found = [so for f in folders for so in f.glob(f"*/lib/libnvrtc.so.{version}")]
    for path in [*map(str, found), f"libnvrtc.so.{version}", f"/usr/local/cuda/lib64/libnvrtc.so.{version}"]:
        try:
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise RuntimeError(f"no libnvrtc.so.{version}: install the CUDA toolkit or nvidia-cuda-nvrtc")


def compile_cubin(source: str, options: list[str]) -> bytes:
    library, program = nvrtc(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"windlass.cu", 0, None, None)
    given = [o.encode() for o in ["--std=c++17", "-lineinfo", *options]]
    code = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    size = ctypes.c_size_t()
    if code:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC error {code}:\n{log.value.decode()}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    return cubin.raw
