"""Arrays as bytes: how plans and samples are written into one message, and read without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]

_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool")
_DTYPES = tuple(np.dtype(name) for name in _NAMES)
_ALIGN = 8


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def packed_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a message with arrays of these sizes in bytes."""
    return 8 * (1 + 2 * len(sizes)) + sum(_padded(size) for size in sizes)


def pack(arrays: Sequence[Array]) -> Bytes:
    """One message of flat arrays: their number, each one's type and length, their bytes."""
    out = np.zeros(packed_bytes([array.nbytes for array in arrays]), np.uint8)
    head = out[: 8 * (1 + 2 * len(arrays))].view(np.int64)
    head[0] = len(arrays)
    at = 8 * len(head)
    for i, array in enumerate(arrays):
        head[1 + 2 * i], head[2 + 2 * i] = _DTYPES.index(array.dtype), array.size
        out[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += _padded(array.nbytes)
    return out


def unpack(message: Bytes) -> list[Array]:
    """The arrays of a message, as views of it."""
    count = int(message[:8].view(np.int64)[0])
    at = 8 * (1 + 2 * count)
    head = message[8:at].view(np.int64)
    arrays = []
    for i in range(count):
        dtype = _DTYPES[head[2 * i]]
        size = int(head[2 * i + 1]) * dtype.itemsize
        arrays.append(message[at : at + size].view(dtype))
        at += _padded(size)
    return arrays
