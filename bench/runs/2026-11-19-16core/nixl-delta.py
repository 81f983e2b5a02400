"""What NIXL takes for a piece of memory that is new each time, as a delta is: by its C interface alone, between two agents of
one process.

    python nixl-delta.py PATH/libnixl_capi.so
"""

import ctypes
import mmap
import statistics
import sys
import time
from ctypes import byref, c_size_t, c_uint64, c_void_p

NIXL = ctypes.CDLL(sys.argv[1])
#: A delta of 2.39 MiB, 25 MiB and 160 MiB.
SIZES = (2_506_000, 25 << 20, 160 << 20)
PARTS = "register there, register here, describe, meet, read, part"


class Config(ctypes.Structure):
    """``nixl_capi_agent_config_t``."""

    _fields_ = (
        ("enable_prog_thread", ctypes.c_bool),
        ("enable_listen_thread", ctypes.c_bool),
        ("listen_port", ctypes.c_uint16),
        ("thread_sync", ctypes.c_uint),
        ("num_workers", ctypes.c_uint),
        ("pthr_delay_us", c_uint64),
        ("lthr_delay_us", c_uint64),
        ("capture_telemetry", ctypes.c_bool),
    )


def call(name: str, *arguments: object) -> int:
    code: int = getattr(NIXL, f"nixl_capi_{name}")(*arguments)
    if code not in (0, 1):
        sys.exit(f"{name}: {code}")
    return code


def agent(name: bytes) -> c_void_p:
    made, params, backend = c_void_p(), c_void_p(), c_void_p()
    config = Config(True, False, 0, 1, 0, 1000, 0, False)
    call("create_configured_agent", name, byref(config), byref(made))
    call("create_params", byref(params))
    call("create_backend", made, b"UCX", params, byref(backend))
    return made


def register(owner: c_void_p, at: int, size: int) -> c_void_p:
    made = c_void_p()
    call("create_reg_dlist", 0, byref(made))
    call("reg_dlist_add_desc", made, c_size_t(at), c_size_t(size), c_uint64(0), None, c_size_t(0))
    call("register_mem", owner, made, None)
    return made


def piece(at: int, size: int) -> c_void_p:
    made = c_void_p()
    call("create_xfer_dlist", 0, byref(made))
    call("xfer_dlist_add_desc", made, c_size_t(at), c_size_t(size), c_uint64(0))
    return made


def fresh(size: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, size)
    memory.write(b"\7" * size)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def main() -> None:
    sender, reader, kept = agent(b"sender"), agent(b"reader"), []
    for size in SIZES:
        times = []
        for _ in range(11):
            (there, at), (here, to) = fresh(size), fresh(size)
            kept += [there, here]
            now = [time.perf_counter()]
            first = register(sender, at, size)
            now.append(time.perf_counter())
            second = register(reader, to, size)
            now.append(time.perf_counter())
            data, length = c_void_p(), c_size_t()
            call("get_local_md", sender, byref(data), byref(length))
            now.append(time.perf_counter())
            name = ctypes.c_char_p()
            call("load_remote_md", reader, data, length, byref(name))
            now.append(time.perf_counter())
            request = c_void_p()
            call("create_xfer_req", reader, 0, piece(to, size), piece(at, size), name, byref(request), None)
            call("post_xfer_req", reader, request, None)
            while call("get_xfer_status", reader, request):
                pass
            now.append(time.perf_counter())
            assert here[size - 1] == 7
            call("release_xfer_req", reader, request)
            call("invalidate_remote_md", reader, b"sender")
            call("deregister_mem", sender, first, None)
            call("deregister_mem", reader, second, None)
            now.append(time.perf_counter())
            times.append([(b - a) * 1e3 for a, b in zip(now, now[1:])])
        medians = [round(statistics.median(part), 2) for part in zip(*times)]
        sys.stdout.write(f"{size} bytes; {PARTS} (ms): {medians}\n")


if __name__ == "__main__":
    main()
