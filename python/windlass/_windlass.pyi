"""
The compiled half of the package. Everything public is re-exported by `windlass`.
"""

from _typeshed import SupportsGetItem
from typing import Any, Final, SupportsFloat, SupportsIndex, final

__all__ = ["__version__", "Chunker", "choose", "dtype_bits", "dtype_name", "dtype_safetensors", "dtypes", "engine_rank", "extent", "kinds", "legacy_request", "main", "module_of", "packed_layout", "parse_request", "parse_sync_info", "rank_offsets", "threshold_from_gb", "world_size"]

__version__: Final[str]
"""
The version of the package.
"""

@final
class Chunker:
    """
    Turns a stream of parameters into chunks: push one, take the chunks that are finished, and flush the rest with
    `finish`. Without arguments, every parameter is a chunk.
    """
    def __new__(cls, /, *, group_by_module: bool = False, threshold_bytes: SupportsIndex | None = None) -> Chunker: ...
    def finish(self, /) -> list[tuple[str | None, list[tuple[str, str, list[int], Any]]]]:
        """
        Ends the stream: what is still held becomes the last chunk. A second call gives nothing.
        """
    @property
    def pending_bytes(self, /) -> int:
        """
        Bytes held back until later pushes or `finish`.
        """
    def push(self, /, name: str, dtype: str, shape: SupportsGetItem[int, SupportsIndex], payload: Any) -> list[tuple[str | None, list[tuple[str, str, list[int], Any]]]]:
        """
        Takes the next parameter and gives back the chunks that it completes, in order: for each the module that it
        is, or `None`, and (name, dtype, shape, payload) of its parameters. Dtypes come back in their canonical
        spelling.
        """

def choose(facts: str, overrides: str) -> str:
    """
    Decides on strategy, link and codec: JSON text of the facts and of the overrides in, of the choice out.
    """

def dtype_bits(spelling: str) -> int:
    """
    Bits of one element of a dtype in any spelling; 4 and 6 for the packed micro-scaling types.
    """

def dtype_name(spelling: str) -> str:
    """
    The canonical name of a dtype (`bfloat16`) from any spelling: `torch.bfloat16`, `BF16`, `half`, …
    """

def dtype_safetensors(spelling: str) -> str:
    """
    The name of a dtype in a safetensors header (`BF16`), from any spelling.
    """

def dtypes() -> list[str]:
    """
    Every dtype by its canonical name.
    """

def engine_rank(local_rank: SupportsIndex, rank_offset: SupportsIndex, engine: tuple[SupportsIndex, SupportsIndex, SupportsIndex]) -> int:
    """
    The rank in the update group of a rank inside an engine of shape (tp, pp, dp) at `rank_offset`.
    """

def extent(dtype: str, shape: SupportsGetItem[int, SupportsIndex]) -> tuple[int, int]:
    """
    (elements, bytes) of a tensor. A scalar has one element.
    """

def kinds() -> list[tuple[str, str, str, str]]:
    """
    The table of kinds: (kind, name of the exception, name of the builtin it derives from, advice).
    """

def legacy_request(text: str, one: bool) -> str:
    """
    The legacy dictionaries of a request, as JSON text of a list. With `one`, a request that is several is refused.
    """

def main(argv: SupportsGetItem[int, str], program: SupportsGetItem[int, str]) -> int:
    """
    Runs the command line with `argv`, of which the first is the name of the program, and returns the exit code.
    `program` is how to start it again. Signals are the command's own from here on.
    """

def module_of(name: str) -> str | None:
    """
    The module of a parameter: its name without the last two dotted parts, or `None` where nothing remains.
    """

def packed_layout(names: SupportsGetItem[int, str], dtypes: SupportsGetItem[int, str], shapes: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]]) -> list[tuple[int, int, int]]:
    """
    Lays parameters out in one buffer: (offset, bytes, numel) of each, aligned to its elements.
    """

def parse_request(text: str) -> str:
    """
    Reads and checks JSON text of a request, plain or one of the four legacy dictionaries; gives the plain form.
    """

def parse_sync_info(text: str) -> str:
    """
    Reads and checks JSON text of a sync info; gives the plain form.
    """

def rank_offsets(engines: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex]]) -> list[int]:
    """
    Each engine's rank offset: 1 for the first, then advancing by the ranks of the engine before.
    """

def threshold_from_gb(gb: SupportsFloat | SupportsIndex) -> int:
    """
    Bytes of a threshold given as `weight_transfer_threshold_cuda_ipc_GB`, in units of 1024^3.
    """

def world_size(engines: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, SupportsIndex]]) -> int:
    """
    Ranks of the update group, given (tp, pp, dp) of each engine: the trainer's one and all of theirs.
    """
