"""Distinct rows of a batch, and how the uses of a row follow each other over batches.

Axes: U distinct rows of a batch, R all rows, G positions in the ring of recent distinct rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import NEVER
from embroute.kernels.jit import kernel
from embroute.kernels.memory import AHEAD, GOLDEN, index, prefetch

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@kernel
def distinct(rows: I64, table: I32, rows_U: I64, unique_of_lookup: I32) -> int:
    """Number of distinct rows, in order of first look-up; padding look-ups get -1.

    `table` is zeroed scratch whose length is a power of two, above 5/4 of the look-ups.
    """
    mask = len(table) - 1
    bits = 0
    while (1 << bits) < len(table):
        bits += 1
    shift = np.uint64(64 - bits)
    count = 0
    for i in range(len(rows)):
        row = rows[i]
        if row < 0:
            unique_of_lookup[i] = -1
            continue
        place = np.int64((np.uint64(row) * GOLDEN) >> shift)
        while table[place] != 0 and rows_U[table[place] - 1] != row:
            place = (place + 1) & mask
        if table[place] == 0:
            rows_U[count] = row
            count += 1
            table[place] = count
        unique_of_lookup[i] = table[place] - 1
    return count


class Ring(NamedTuple):
    """The distinct rows of the last batches, one after the other; position g is at g & mask."""

    seen_R: I64  # position of the row's latest use, plus one
    step_G: I32
    later_G: I32  # step of the next use of the same row


@kernel
def link(ring: Ring, rows_U: I64, step: int, base: int, oldest: int) -> tuple[I32, I64]:
    """Append a batch at position `base`; returns step and position of each row's use before, or -1.

    Positions before `oldest` have left the ring.
    """
    mask = len(ring.step_G) - 1
    before_U = np.empty(len(rows_U), np.int32)
    last_U = np.empty(len(rows_U), np.int64)
    seen_R, step_G, later_G = ring.seen_R, ring.step_G, ring.later_G
    for u in range(len(rows_U)):
        prefetch(seen_R, (rows_U[index(min(u + AHEAD, len(rows_U) - 1))],))
        row, here = index(rows_U[index(u)]), base + u
        last_U[index(u)] = seen_R[row] - 1
        seen_R[row] = here + 1
    for u in range(len(rows_U)):
        last, here = last_U[index(u)], index((base + u) & mask)
        step_G[here], later_G[here] = step, NEVER
        before_U[index(u)] = -1
        if last >= oldest:
            before_U[index(u)] = step_G[index(last & mask)]
            later_G[index(last & mask)] = step
        else:
            last_U[index(u)] = -1
    return before_U, last_U
