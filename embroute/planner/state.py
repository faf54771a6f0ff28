"""The planner's state: every worker's cache, eviction order and clocks.

Only `advance` and `drain_state` change it. A checkpoint stores the arrays under their field names.
"""

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
    """The memory of a dispatch that looks ahead. Axis T: batches ahead.

    Empty arrays if the policy does not look ahead.
    """

    ahead_TS: I32  # planned workers of the next batches' samples; -1 is not chosen yet
    price_TW: F32  # price of a place at each worker, in those batches
    affinity_NW: U8  # by row number: each worker's share of a row's recent uses, of 255
    share_W: F32  # each worker's share of a batch; empty where quotas are fixed
    weight_PW: F32  # weight of a second in each phase and at the shards; empty likewise
    range_2W: F32  # least and greatest share of each worker
    took_1: F32  # mean seconds of recent steps; 0 before the first
    pace_2: F32  # seconds at the shards' link and elsewhere, without all-reduced rows


@dataclass
class State:
    """Every copy of every row, as the coordinator knows it. Arrays of zeros are empty caches."""

    setup: Setup
    caches: Caches
    hot_R: Bools  # replicated rows; empty where the policy has none
    access_R: I32  # look-ups so far; empty if the policy does not need them
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
    """What the parts of a policy need in the state."""

    num_buckets: int
    clocks: bool = False
    access: bool = False
    ahead: int = 0  # batches that the dispatch assigns before their step
    timed: bool = False  # whether the dispatch learns what each worker waits for
    free: bool = False  # whether the dispatch chooses how many samples each worker gets


def empty_state(setup: Setup, needs: Needs, hot_rows: I64 | None = None) -> State:
    """All caches empty. The system commits a page of zeros at its first write."""
    num_rows, capacity_WA = setup.schema.num_rows, setup.capacity_WA
    workers = len(capacity_WA)
    slots = int(capacity_WA.sum(1).max())
    first_WA = np.cumsum(capacity_WA, 1) - capacity_WA

    number_R = np.zeros(num_rows, np.int32)
    # Number 0 is for untouched rows. Without slots there are no copies: one row of cells is enough.
    cell_NW = _aligned_zeros(num_rows + 1 if slots else 1, workers)
    slot_WCF = np.zeros((workers, slots, NUM_SLOT_FIELDS), np.int32)
    caches = Caches(
        cells=Cells(number_R, cell_NW, numbered=np.zeros(1, np.int64)),
        slot_WCF=slot_WCF,
        first_WA=first_WA,
        capacity_WA=capacity_WA,
        used_WA=np.zeros_like(capacity_WA),
        eviction=empty_lists(capacity_WA, needs.num_buckets),
        planning=np.zeros(1, np.int64),
        clock_WC2=np.zeros((workers, slots if needs.clocks else 0, 2), np.int32),
        clock_R=np.zeros(num_rows if needs.clocks else 0, np.int32),
    )
    hot_R = np.zeros(num_rows if hot_rows is not None else 0, np.bool_)
    if hot_rows is not None:
        hot_R[hot_rows] = True
    access_R = np.zeros(num_rows if needs.access else 0, np.int32)
    ranking = np.arange(len(setup.schema.tables))
    memory = _first_memory(setup, needs)
    return State(setup, caches, hot_R, access_R, memory, ranking=ranking)


def _first_memory(setup: Setup, needs: Needs) -> SearchState:
    """No batch assigned ahead, no prices, no affinity; first shares and weights, if learnt."""
    samples, workers = setup.batch_size if needs.ahead else 0, setup.num_workers
    numbers = setup.schema.num_rows + 1 if needs.ahead else 0
    share_W, range_2W = np.empty(0, np.float32), np.empty((0, workers), np.float32)
    weight_PW = np.ones((SHARD_LINK + 1 if needs.timed else 0, workers), np.float32)
    weight_PW[SHARD_LINK:] = 0
    if needs.timed and needs.free and not setup.shares:
        share_W = first_shares(setup)
        range_2W = np.repeat(np.array([[0], [1]], np.float32), workers, 1)
    elif needs.timed:
        # Shares that the user names, and equal shares, stay as they are.
        share_W = np.array(setup.shares or np.ones(workers), np.float32)
        share_W /= share_W.sum()
        range_2W = np.stack([share_W, share_W])
    return SearchState(
        ahead_TS=np.full((needs.ahead, samples), -1, np.int32),
        price_TW=np.zeros((needs.ahead, workers), np.float32),
        affinity_NW=np.zeros((numbers, workers), np.uint8),
        share_W=share_W,
        weight_PW=weight_PW,
        range_2W=range_2W,
        took_1=np.zeros(1, np.float32),
        pace_2=np.zeros(2 if needs.timed else 0, np.float32),
    )


def first_shares(setup: Setup) -> F32:
    """Shares in proportion to speed, if each sample pulls and pushes a quarter of its rows."""
    lookups = max(1, setup.schema.num_fields)
    transfers_W = lookups / 4 * 2 * setup.row_seconds_AW.mean(0)
    seconds_W = np.maximum(setup.cluster.compute_s_W, 1e-12) + transfers_W
    share_W: F32 = (1 / seconds_W / (1 / seconds_W).sum()).astype(np.float32)
    return share_W


def _aligned_zeros(num_rows: int, width: int) -> I32:
    """Zeros from the start of a cache line on, so that few short rows lie across two lines."""
    # One line more than needed; then skip to the next multiple of a line's 16 entries.
    line = 64 // np.dtype(np.int32).itemsize
    zeros = np.zeros(num_rows * width + line, np.int32)
    skipped = -(zeros.ctypes.data // zeros.itemsize) % line
    return zeros[skipped : skipped + num_rows * width].reshape(num_rows, width)


def prefault(empty: State) -> None:
    """Let the system map the pages that a run reaches first now, not during its steps."""
    caches = empty.caches
    caches.cells.number_R.fill(0)
    for zeros_XYZ in (
        caches.cells.cell_NW[np.newaxis],
        caches.slot_WCF,
        caches.eviction.ticket_WQ4,
    ):
        width = zeros_XYZ.shape[0] * zeros_XYZ.shape[2] * zeros_XYZ.itemsize
        zeros_XYZ[:, : MAPPED_BYTES // max(1, width)].fill(0)


def held_slots(state: State, worker: int) -> tuple[I32, I32]:
    """Slots of a worker that hold a copy, and their cells, in slot order."""
    caches = state.caches
    spans = zip(caches.first_WA[worker], caches.used_WA[worker], strict=True)
    slots = np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in spans])
    # The row that a slot held last may have left it: its cell then names another slot or none.
    number = caches.cells.number_R[caches.slot_WCF[worker, slots, ROW]]
    cells = caches.cells.cell_NW[number, worker]
    kept = (cells & SLOT_MASK) == slots + 1
    return slots[kept], cells[kept]


def dirty_rows(state: State, worker: int) -> tuple[I64, I32]:
    """Rows and slots of a worker whose update the shard does not have."""
    slots, cells = held_slots(state, worker)
    slots = slots[(cells & DIRTY) != 0]
    return state.caches.slot_WCF[worker, slots, ROW].astype(np.int64), slots
