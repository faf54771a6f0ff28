"""Distinct rows of a batch, and how the uses of a row follow each other over batches.

Axes: U distinct rows of a batch, R all rows, G positions in the ring of recent distinct rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import I32, I64
from embroute.kernels.codes import NEVER
from embroute.kernels.jit import kernel
from embroute.kernels.memory import AHEAD, GOLDEN, index, prefetch


@kernel
def distinct(rows: I64, table: I32, rows_U: I64, unique_of_lookup: I32) -> int:
    """Number of distinct rows, in order of first look-up; padding look-ups get -1.

    `table` is zeroed scratch whose length is a power of two, above 5/4 of the look-ups.
    """
    # Multiplicative hashing: the top bits of row * GOLDEN, then linear probing. A place holds the
    # number of a distinct row + 1, so that zeros mean empty.
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


class UseRing(NamedTuple):
    """The distinct rows of the last batches in one ring; position g is at g & mask.

    Positions grow for ever; the ring's length is a power of two, so that a mask wraps them.
    """

    seen_R: I64  # position of the row's latest use, plus one
    step_G: I32
    later_G: I32  # step of the next use of the same row


@kernel
def number_distinct(seen_R: I64, rows: I64, base: int, unique_of_lookup: I32) -> tuple[I64, I64]:
    """Distinct rows of a batch in order of first look-up, and where each one was used before.

    They take the positions from `base` on: a row whose latest use lies there has its number.
    Padding look-ups get -1.
    """
    rows_U, last_U = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    count = 0
    for i in range(len(rows)):
        prefetch(seen_R, (rows[index(min(i + AHEAD, len(rows) - 1))],))
        if rows[index(i)] < 0:
            unique_of_lookup[index(i)] = -1
            continue
        row = index(rows[index(i)])
        # No branch, as no processor can predict it: the next new row overwrites a repeated one.
        seen = seen_R[row]
        rows_U[index(count)], last_U[index(count)] = row, seen - 1
        # Positions of this batch start at base; seen_R holds position + 1, at least base + 1.
        is_new = seen <= base
        here = base + count + 1 if is_new else seen
        seen_R[row] = here
        unique_of_lookup[index(i)] = here - 1 - base
        count += 1 if is_new else 0
    return rows_U[:count].copy(), last_U[:count].copy()


@kernel
def link_uses(ring: UseRing, last_U: I64, step: int, base: int, oldest: int) -> I32:
    """Append a batch at position `base`; returns the step of each row's use before, or -1.

    Positions before `oldest` have left the ring: `last_U` becomes -1 there.
    """
    mask = len(ring.step_G) - 1
    before_U = np.empty(len(last_U), np.int32)
    step_G, later_G = ring.step_G, ring.later_G
    for u in range(len(last_U)):
        soon = last_U[index(min(u + AHEAD, len(last_U) - 1))] & mask
        prefetch(step_G, (soon,))
        prefetch(later_G, (soon,))
        last, here = last_U[index(u)], index((base + u) & mask)
        # No branch here either: a row without an earlier use writes to its own place, and the last
        # two writes overwrite that.
        known = last >= oldest
        there = index(last & mask) if known else here
        before_U[index(u)] = step_G[there] if known else -1
        last_U[index(u)] = last if known else -1
        later_G[there] = step
        step_G[here], later_G[here] = step, NEVER
    return before_U
