"""Fast access to memory from inner loops: indices without a sign, and prefetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from embroute.kernels.array_types import U32, Bools
from embroute.kernels.jit import inlined, kernel

# An index below 2**32 that is known not to be negative. For a signed index numba compiles a test
# whether it counts from the end of the array.
index = cast(Callable[[int], int], np.uint32)

AHEAD = 24  # iterations between the prefetch of a cache line and its use
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # times a number: the high bits are its hash

Untyped = Any  # numba's own objects have no types
_item_pointer: Untyped = cgutils.get_item_pointer


@kernel
def nonzero(chosen: Bools) -> U32:
    """Indices where an array is true, without a branch: a wrong guess costs more than a write."""
    # Each index is written; `count` moves on only if it stays. One place more for the last write.
    out, count = np.empty(len(chosen) + 1, np.uint32), index(0)
    for i in range(len(chosen)):
        out[count] = i
        count += index(chosen[i])
    return out[:count]


def _prefetch(typing_context: Untyped, array: Untyped, place: Untyped) -> Untyped:
    """Code that prefetches the cache line of one element."""

    def generate(
        context: Untyped, builder: Untyped, signature: Untyped, arguments: Untyped
    ) -> Untyped:
        array_type, place_type = signature.args
        view = context.make_array(array_type)(context, builder, arguments[0])
        indices = [
            context.cast(builder, builder.extract_value(arguments[1], axis), kind, types.intp)
            for axis, kind in enumerate(place_type)
        ]
        pointer = _item_pointer(context, builder, array_type, view, indices)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte] + 3 * [number])
        )
        for_reading, keep, data = number(0), number(3), number(1)
        builder.call(hint, [builder.bitcast(pointer, byte), for_reading, keep, data])
        return context.get_dummy_value()

    return types.void(array, place), generate


# `prefetch(array, (i, j))`: a hint that does not wait, so that many of them overlap. A hint about a
# place outside the array does nothing.
prefetch = cast(Callable[[Untyped, tuple[int, ...]], None], intrinsic(_prefetch))


@inlined
def prefetch_row(records_NX: Untyped, row: int, columns: int) -> None:
    """Prefetch the first columns of a row of floats, line by line."""
    # A cache line has 64 bytes.
    for x in range(0, columns, 64 // records_NX.itemsize):
        prefetch(records_NX, (index(row), index(x)))


@kernel
def splitmix64(key: np.uint64) -> np.uint64:
    """A 64-bit hash of a 64-bit number (the finaliser of splitmix64)."""
    key += np.uint64(0x9E3779B97F4A7C15)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))
