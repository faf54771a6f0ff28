"""Arrays as bytes: how plans and samples are written into one message, and read without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embroute.kernels.array_types import U8, Array

_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool")
_DTYPES = tuple(np.dtype(name) for name in _NAMES)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ALIGN = 8


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def packed_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a message with arrays of these sizes in bytes."""
    return 8 * (1 + 2 * len(sizes)) + sum(_padded(size) for size in sizes)


def pack(arrays: Sequence[Array]) -> U8:
    """One message of flat arrays: their number, each one's type and length, their bytes."""
    out = np.empty(packed_bytes([array.nbytes for array in arrays]), np.uint8)
    figures, at = [len(arrays)], 8 * (1 + 2 * len(arrays))
    for array in arrays:
        figures += _CODES[array.dtype], array.size
        end, next_at = at + array.nbytes, at + _padded(array.nbytes)
        out[at:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out[end:next_at] = 0
        at = next_at
    out[: 8 * len(figures)].view(np.int64)[:] = figures
    return out


def unpack(message: U8) -> list[Array]:
    """The arrays of a message, as views of it."""
    count = int(message[:8].view(np.int64)[0])
    at = 8 * (1 + 2 * count)
    head = message[8:at].view(np.int64).tolist()
    arrays = []
    for i in range(count):
        dtype = _DTYPES[head[2 * i]]
        size = head[2 * i + 1] * dtype.itemsize
        arrays.append(message[at : at + size].view(dtype))
        at += _padded(size)
    return arrays
