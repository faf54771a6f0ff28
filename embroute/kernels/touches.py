"""Touches: samples grouped by worker, and the distinct (worker, row) pairs of a step.

Axes: S samples, W workers, U distinct rows, T touches (worker-major, then first look-up).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import I32, I64
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import index


class Lookups(NamedTuple):
    """A batch as the planner sees it: look-ups of sample s are offsets[s] to offsets[s + 1]."""

    unique_of_lookup: I32
    sample_offsets: I64


class Touches(NamedTuple):
    """Distinct (worker, row) pairs, listed by worker and by row."""

    first_W: I64  # touches of worker w are first_W[w] to first_W[w + 1]
    worker_T: I32
    unique_T: I32
    first_U: I64  # touches of row u, in worker order, are of_row_T[first_U[u] : first_U[u + 1]]
    of_row_T: I32
    sample_order_S: I32  # samples by worker, each worker's in batch order
    touch_of_lookup: I32  # in sample_order_S; -1 for padding


@kernel
def group(key: I32, num_groups: int) -> tuple[I64, I32]:
    """Counting sort: first index of each group and the stable order."""
    # Counts one place to the right, so that their running sum is each group's first index.
    first = np.zeros(num_groups + 1, np.int64)
    for i in range(len(key)):
        first[index(key[i] + 1)] += 1
    for g in range(num_groups):
        first[g + 1] += first[g]
    order = np.empty(len(key), np.int32)
    filled = first.copy()
    for i in range(len(key)):
        g = index(key[i])
        order[index(filled[g])] = i
        filled[g] += 1
    return first, order


@inlined
def _touch_sample(
    unique: I32, latest_U: I32, first: int, count: int, unique_T: I32, out_lookup: I32
) -> int:
    """Append the touches of one sample's look-ups; returns the number of touches so far.

    `latest_U`: latest touch of each row; a touch before `first` belongs to an earlier worker.
    """
    for i in range(len(unique)):
        if unique[i] < 0:
            out_lookup[i] = -1
            continue
        u = index(unique[i])
        # No branch, as no processor can predict it: the next new touch overwrites a repeated one.
        is_new = latest_U[u] < first
        unique_T[index(count)] = u
        touch = count if is_new else np.int64(latest_U[u])
        latest_U[u] = touch
        out_lookup[i] = touch
        count += 1 if is_new else 0
    return count


@kernel
def touches(
    lookups: Lookups, worker_S: I32, num_workers: int, num_unique: int, everywhere: I32
) -> Touches:
    """Touches of a dispatch; the rows listed in `everywhere` are touched by all workers."""
    first_sample_W, order_S = group(worker_S, num_workers)
    capacity = len(lookups.unique_of_lookup) + len(everywhere) * num_workers
    worker_T = np.empty(capacity, np.int32)
    unique_T = np.empty(capacity, np.int32)
    of_lookup = np.empty(len(lookups.unique_of_lookup), np.int32)
    first_W = np.zeros(num_workers + 1, np.int64)
    latest_U = np.full(num_unique, -1, np.int32)
    count, done = 0, 0  # touches, and look-ups in the order of workers
    for w in range(num_workers):
        first = count
        for s in range(first_sample_W[w], first_sample_W[w + 1]):
            start, stop = lookups.sample_offsets[order_S[s]], lookups.sample_offsets[order_S[s] + 1]
            unique = lookups.unique_of_lookup[start:stop]
            count = _touch_sample(unique, latest_U, first, count, unique_T, of_lookup[done:])
            done += stop - start
        for u in everywhere:
            if latest_U[u] < first:
                unique_T[count] = u
                count += 1
        worker_T[first:count] = w
        first_W[w + 1] = count
    unique_T = unique_T[:count].copy()
    first_U, of_row_T = group(unique_T, num_unique)
    return Touches(
        first_W=first_W,
        worker_T=worker_T[:count].copy(),
        unique_T=unique_T,
        first_U=first_U,
        of_row_T=of_row_T,
        sample_order_S=order_S,
        touch_of_lookup=of_lookup,
    )
