"""The arithmetic of quantised weights, bit by bit that of the libraries that write such checkpoints.

Owns: :func:`largest`, :func:`scales` and :func:`quantised`, in torch operations on the device of the weight. Called by
:mod:`windlass.publish.derived`. Must not: know names, ranks or files.

================  ==================================================================================================
``fp8_block128``  transformers' fine-grained fp8: in float32, ``forward = 448 / amax``, the weight times ``forward``,
                  clamped; the scale is ``1 / forward``; a block of zeros has the scale 1
``fp8_channel``   compressed-tensors (``FP8_DYNAMIC``), in the weight's own dtype: the scale is ``amax / 448``, the
                  weight divided by it, clamped; a row of zeros has the dtype's epsilon as its scale
``int8_channel``  compressed-tensors (``W8A8``): the same with ``amax / 127.5``, rounded half to even
================  ==================================================================================================

Every operation here is correctly rounded or exact, on a CPU and on a GPU, so both give the same bits. (A division by a Python
number is not: on a GPU torch multiplies by its reciprocal. Divisors here are tensors.) A weight is worked on in chunks of whole
groups, so that what is needed besides the result is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from windlass.dtypes import torch_dtype
from windlass.names.quantised import Scheme
from windlass.publish.placement import Box

__all__ = ["group_box", "is_aligned", "largest", "quantised", "scale_dtype", "scales"]

#: Elements of a chunk, which float32 copies are made of: for a CPU's caches, and for few launches on a GPU.
CHUNK = 1 << 20
DEVICE_CHUNK = 1 << 26
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def scale_dtype(scheme: Scheme, base: torch.dtype) -> torch.dtype:
    """The dtype of the scales of a weight that is quantised from ``base``."""
    return base if scheme.scale_dtype is None else torch_dtype(scheme.scale_dtype)


def group_box(scheme: Scheme, shape: tuple[int, ...], box: Box) -> Box:
    """The scales that belong to a box of a weight."""
    return tuple((a // n, -(-b // n)) for (a, b), n in zip(box, scheme.group(shape), strict=True))


def is_aligned(scheme: Scheme, shape: tuple[int, ...], box: Box) -> bool:
    """Whether a box holds whole groups only."""
    return all(
        a % n == 0 and (b % n == 0 or b == size)
        for (a, b), n, size in zip(box, scheme.group(shape), shape, strict=True)
    )


def _chunks(rows: tuple[int, int], group: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Rows ``start..stop`` in runs that are whole groups of ``count`` rows each, or a part of one group."""
    start, stop = rows
    most = max(most // group, 1) * group
    while start < stop:
        if start % group or stop - start < group:
            end = min(stop, (start // group + 1) * group)
            yield start, end, end - start
        else:
            end = start + min(most, (stop - start) // group * group)
            yield start, end, group
        start = end


def _pieces(
    scheme: Scheme, shape: tuple[int, ...], box: Box, values: torch.Tensor
) -> Iterator[tuple[slice, slice, int]]:
    """Rows of ``values``, the rows of scales of the box that they belong to, and how many rows each has."""
    (top, bottom), (left, right) = box
    group, _ = scheme.group(shape)
    most = (CHUNK if values.device.type == "cpu" else DEVICE_CHUNK) // max(right - left, 1)
    first = top // group
    for start, stop, count in _chunks((top, bottom), group, most):
        yield slice(start - top, stop - top), slice(start // group - first, -(-stop // group) - first), count


def largest(
    scheme: Scheme, shape: tuple[int, ...], box: Box, values: torch.Tensor, base: torch.dtype
) -> torch.Tensor:
    """The largest magnitude in each group of a box, as far as it is in the box; float32, NaN if there is one."""
    (_, _), (left, right) = box
    _, width = scheme.group(shape)
    above, below = group_box(scheme, shape, box)
    before, after = left % width, -right % width
    out = torch.empty(above[1] - above[0], below[1] - below[0], dtype=torch.float32, device=values.device)
    for rows, groups, count in _pieces(scheme, shape, box, values):
        chunk = values[rows].to(base).abs()
        chunk = chunk.reshape(-1, count, chunk.shape[1]).amax(1)
        if before or after:
            # Zeros change no maximum.
            chunk = torch.nn.functional.pad(chunk, (before, after))
        out[groups] = chunk.reshape(chunk.shape[0], -1, width).amax(2)
    return out


def _forward(amax: torch.Tensor) -> torch.Tensor:
    """What a block is multiplied by."""
    ones = torch.ones_like(amax)
    return torch.where(amax > 0, FP8_MAX / torch.where(amax > 0, amax, ones), ones)


def scales(scheme: Scheme, amax: torch.Tensor, base: torch.dtype) -> torch.Tensor:
    """The scales of groups by their largest magnitudes, as checkpoints have them."""
    if scheme.name == "fp8_block128":
        return 1.0 / _forward(amax)
    top = FP8_MAX if scheme.dtype == "float8_e4m3fn" else 127.5
    found = amax.to(base) / torch.tensor(top, dtype=base, device=amax.device)
    return torch.where(found == 0, torch.tensor(torch.finfo(base).eps, dtype=base, device=amax.device), found)


def quantised(
    scheme: Scheme,
    shape: tuple[int, ...],
    box: Box,
    values: torch.Tensor,
    base: torch.dtype,
    amax: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes a box of a weight, quantised, into ``out``; ``amax`` are the magnitudes of its groups."""
    _, width = scheme.group(shape)
    left, right = box[1]
    column = (
        torch.arange(left, right, device=values.device).div_(width, rounding_mode="floor") - left // width
    )
    block = scheme.name == "fp8_block128"
    factors = _forward(amax) if block else scales(scheme, amax, base)
    for rows, groups, count in _pieces(scheme, shape, box, values):
        chunk = values[rows].to(base)
        if block:
            chunk = chunk.to(torch.float32).reshape(-1, count, right - left)
            chunk = (chunk * factors[groups][:, column].unsqueeze(1)).flatten(0, 1)
            out[rows] = chunk.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
            continue
        # The zero point of a symmetric scheme is added too, which makes -0.0 a 0.0.
        chunk = chunk / factors[groups]
        chunk += 0
        if scheme.dtype == "float8_e4m3fn":
            out[rows] = chunk.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        else:
            out[rows] = chunk.clamp_(-128, 127).round_().to(torch.int8)
