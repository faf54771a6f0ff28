"""What the batches of a window will move if they are dealt as they are now.

Axes: N rows of the window's batches one after the other, L look-ups, S samples, T batches,
W workers, A arenas, D directions (pull, push), P phases, X kinds of record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import EARLY, GRADIENT, LATE, NUM_PHASES, URGENT, VALUE, VALUE_STATE
from embroute.kernels.jit import kernel
from embroute.kernels.memory import index
from embroute.kernels.uses import Nodes

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

PULL, PUSH = 0, 1
NOBODY = -1


class Foretold(NamedTuple):
    """Bytes and distinct rows of each batch at each worker."""

    bytes_TWDP: F64
    rows_TWA: I64


@kernel
def touched(node_L: I32, first_S: I64, worker_S: I32, num_nodes: int, num_workers: int) -> U8:
    """Which workers touch each row of each batch."""
    touched_NW = np.zeros((num_nodes, num_workers), np.uint8)
    for s in range(len(worker_S)):
        w = index(worker_S[s])
        for i in range(first_S[s], first_S[s + 1]):
            if node_L[i] >= 0:
                touched_NW[index(node_L[i]), w] = 1
    return touched_NW


@kernel
def _crowds(nodes: Nodes, touched_NW: U8, first_node_T: I64, num_arenas: int) -> tuple[I64, I64]:
    """Rows of each batch at each worker and arena, and how many rows came before it in the window.

    A row that the step before used as well came with that one.
    """
    num_batches, num_workers = len(first_node_T) - 1, touched_NW.shape[1]
    rows_TWA = np.zeros((num_batches, num_workers, num_arenas), np.int64)
    came_TWA = np.zeros((num_batches + 1, num_workers, num_arenas), np.int64)
    for t in range(num_batches):
        came_TWA[t + 1] = came_TWA[t]
        for n in range(first_node_T[t], first_node_T[t + 1]):
            kind, a = nodes.arena_N[n] // num_arenas, nodes.arena_N[n] % num_arenas
            for w in range(num_workers):
                rows_TWA[t, w, a] += touched_NW[n, w]
                came_TWA[t + 1, w, a] += touched_NW[n, w] * (kind < 2)
    return rows_TWA, came_TWA


@kernel
def foretell(
    nodes: Nodes, touched_NW: U8, first_node_T: I64, record_XA: F64, capacity_WA: I64
) -> Foretold:
    """Pulls and pushes of every batch: a row alone at its owner rests, all others move.

    What the step before used is pushed back urgently and pulled late; a sharer's gradient that the
    next step needs is urgent too. A row is gone from a cache that more rows have entered since
    than it holds.
    """
    num_batches, num_workers = len(first_node_T) - 1, touched_NW.shape[1]
    num_arenas = record_XA.shape[1]
    rows_TWA, came_TWA = _crowds(nodes, touched_NW, first_node_T, num_arenas)
    bytes_TWDP = np.zeros((num_batches, num_workers, 2, NUM_PHASES), np.float64)
    owner_N = nodes.owner_N.copy()
    batch_N = np.empty(len(owner_N), np.int32)
    for t in range(num_batches):
        for n in range(first_node_T[t], first_node_T[t + 1]):
            batch_N[n] = t
            kind, a = nodes.arena_N[n] // num_arenas, nodes.arena_N[n] % num_arenas
            pull_phase = LATE if kind >= 2 else EARLY
            push_phase = URGENT if kind % 2 == 1 else EARLY
            before = nodes.before_N[n]
            owner = owner_N[before] if before >= 0 else owner_N[n]
            since = batch_N[before] + 1 if before >= 0 else 0
            if owner >= 0:
                came = came_TWA[t, owner, a] - came_TWA[since, owner, a] + rows_TWA[t, owner, a]
                if came > capacity_WA[owner, a]:
                    bytes_TWDP[t, owner, PUSH, EARLY] += record_XA[VALUE_STATE, a]
                    owner = NOBODY
            size, sole = 0, NOBODY
            for w in range(num_workers):
                if touched_NW[n, w]:
                    size += 1
                    sole = w
            owner_N[n] = sole if size == 1 else (NOBODY if size > 1 else owner)
            if size == 0 or (size == 1 and sole == owner):
                continue
            if owner >= 0:
                back_phase = URGENT if kind >= 2 else EARLY
                bytes_TWDP[t, owner, PUSH, back_phase] += record_XA[VALUE_STATE, a]
            if size == 1:
                bytes_TWDP[t, sole, PULL, pull_phase] += record_XA[VALUE_STATE, a]
                continue
            for w in range(num_workers):
                if touched_NW[n, w]:
                    bytes_TWDP[t, w, PUSH, push_phase] += record_XA[GRADIENT, a]
                    if w != owner:
                        bytes_TWDP[t, w, PULL, pull_phase] += record_XA[VALUE, a]
    return Foretold(bytes_TWDP, rows_TWA)
