"""The brain's state: every worker's cache, eviction order and clocks. Only `advance` changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.array_types import F32, I32, I64, U8, Bools
from embroute.kernels.codes import DIRTY, NUM_SLOT_FIELDS, ROW, SHARD_LINK, SLOT_MASK
from embroute.planner.kernels.cache import Caches, Cells
from embroute.planner.kernels.eviction import empty_lists
from embroute.planner.setup import Setup

MAPPED_BYTES = 1 << 29  # of each large array, mapped before the first step


class SearchState(NamedTuple):
    """What a dispatch that looks ahead remembers of its last step. Axis T: batches ahead.

    Empty where the policy does not look ahead; workers of -1 are not chosen yet.
    """

    ahead_TS: I32  # workers meant for the samples of the next batches
    price_TW: F32  # of a place at each worker, in those batches
    affinity_NW: U8  # by number: share of a row's recent uses, of 255
    share_W: F32  # of a batch's samples; empty where quotas are fixed
    weight_PW: F32  # of a second in each phase, and at the shards; likewise
    range_2W: F32  # least and most that shares may be
    took_1: F32  # seconds of recent steps; 0 if none is known
    pace_2: F32  # of the shards' link and of the rest, were nothing all-reduced


@dataclass
class State:
    """What the coordinator knows of every copy. Arrays of zeros are empty caches."""

    setup: Setup
    caches: Caches
    hot_R: Bools  # replicated rows; empty where the policy has none
    access_R: I32  # look-ups so far; empty where no part of the policy asks
    memory: SearchState
    step: int = 0
    was_hot: bool = False  # whether the last batch was a hot one
    filled: bool = False  # whether the replicas were filled once
    ranking: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))  # of tables

    @property
    def hot_rows(self) -> I64:
        """Ids of the replicated rows."""
        return np.flatnonzero(self.hot_R).astype(np.int64)


@dataclass(frozen=True)
class Needs:
    """What a policy's parts want kept in the state."""

    num_buckets: int
    clocks: bool = False
    access: bool = False
    ahead: int = 0  # batches that a dispatch deals before their step
    timed: bool = False  # whether it learns what each worker waits for
    free: bool = False  # whether it chooses how many samples each worker gets


def empty_state(setup: Setup, needs: Needs, hot_rows: I64 | None = None) -> State:
    """All caches empty. Memory is committed by the system when it is reached."""
    num_rows, capacity_WA = setup.schema.num_rows, setup.capacity_WA
    workers = len(capacity_WA)
    slots = int(capacity_WA.sum(1).max())
    first_WA = np.cumsum(capacity_WA, 1) - capacity_WA

    number_R = np.zeros(num_rows, np.int32)
    cell_NW = _on_lines(num_rows + 1 if slots else 1, workers)  # without slots nobody has a copy
    slot_WCF = np.zeros((workers, slots, NUM_SLOT_FIELDS), np.int32)
    order = empty_lists(capacity_WA, needs.num_buckets)
    caches = Caches(
        Cells(number_R, cell_NW, np.zeros(1, np.int64)),
        slot_WCF,
        first_WA,
        capacity_WA,
        np.zeros_like(capacity_WA),
        order,
        np.zeros(1, np.int64),
        np.zeros((workers, slots if needs.clocks else 0, 2), np.int32),
        np.zeros(num_rows if needs.clocks else 0, np.int32),
    )
    hot_R = np.zeros(num_rows if hot_rows is not None else 0, np.bool_)
    if hot_rows is not None:
        hot_R[hot_rows] = True
    access_R = np.zeros(num_rows if needs.access else 0, np.int32)
    ranking = np.arange(len(setup.schema.tables))
    return State(setup, caches, hot_R, access_R, _empty_outlook(setup, needs), ranking=ranking)


def _empty_outlook(setup: Setup, needs: Needs) -> SearchState:
    """Nothing dealt ahead, no prices, no row at home anywhere."""
    samples, workers = setup.batch_size if needs.ahead else 0, setup.num_workers
    numbers = setup.schema.num_rows + 1 if needs.ahead else 0
    return SearchState(
        np.full((needs.ahead, samples), -1, np.int32),
        np.zeros((needs.ahead, workers), np.float32),
        np.zeros((numbers, workers), np.uint8),
        *(_first_guess(setup, needs.free) if needs.timed else _no_guess(workers)),
        np.zeros(1, np.float32),
        np.zeros(2 if needs.timed else 0, np.float32),
    )


def _first_guess(setup: Setup, free: bool) -> tuple[F32, F32, F32]:
    """Shares, weights and ranges of shares; those that a user names, and equal ones, are kept."""
    workers = setup.num_workers
    weight_PW = np.ones((SHARD_LINK + 1, workers), np.float32)
    weight_PW[SHARD_LINK] = 0
    if free and not setup.shares:
        return (
            first_shares(setup),
            weight_PW,
            np.repeat(np.array([[0], [1]], np.float32), workers, 1),
        )
    share_W = np.array(setup.shares or np.ones(workers), np.float32)
    share_W /= share_W.sum()
    return share_W, weight_PW, np.stack([share_W, share_W])


def _no_guess(workers: int) -> tuple[F32, F32, F32]:
    """Nothing is learnt."""
    empty = np.empty((0, workers), np.float32)
    return np.empty(0, np.float32), empty, empty


def first_shares(setup: Setup) -> F32:
    """Samples go where they finish first if each moves a quarter of its rows, there and back."""
    lookups = max(1, setup.schema.num_fields)
    transfers_W = lookups / 4 * 2 * setup.row_seconds_AW.mean(0)
    seconds_W = np.maximum(setup.cluster.compute_s_W, 1e-12) + transfers_W
    share_W: F32 = (1 / seconds_W / (1 / seconds_W).sum()).astype(np.float32)
    return share_W


def _on_lines(num_rows: int, width: int) -> I32:
    """Zeros from the start of a cache line on, so that a short row does not lie across two."""
    line = 64 // np.dtype(np.int32).itemsize
    zeros = np.zeros(num_rows * width + line, np.int32)
    skipped = -(zeros.ctypes.data // zeros.itemsize) % line
    return zeros[skipped : skipped + num_rows * width].reshape(num_rows, width)


def map_first(empty: State) -> None:
    """Have the system map the pages that a run reaches first, at once, not in its steps."""
    caches = empty.caches
    caches.cells.number_R.fill(0)
    for zeros_XYZ in (
        caches.cells.cell_NW[np.newaxis],
        caches.slot_WCF,
        caches.eviction.ticket_WQ4,
    ):
        width = zeros_XYZ.shape[0] * zeros_XYZ.shape[2] * zeros_XYZ.itemsize
        zeros_XYZ[:, : MAPPED_BYTES // max(1, width)].fill(0)


def held(state: State, worker: int) -> tuple[I32, I32]:
    """Slots of a worker that hold a copy, and their cells, in slot order."""
    caches = state.caches
    spans = [
        np.arange(first, first + used, dtype=np.int32)
        for first, used in zip(caches.first_WA[worker], caches.used_WA[worker], strict=True)
    ]
    slots = np.concatenate(spans)
    number = caches.cells.number_R[caches.slot_WCF[worker, slots, ROW]]
    cells = caches.cells.cell_NW[number, worker]
    kept = (cells & SLOT_MASK) == slots + 1
    return slots[kept], cells[kept]


def dirty_rows(state: State, worker: int) -> tuple[I64, I32]:
    """Rows and slots of a worker whose update the shard does not have."""
    slots, cells = held(state, worker)
    slots = slots[(cells & DIRTY) != 0]
    return state.caches.slot_WCF[worker, slots, ROW].astype(np.int64), slots
