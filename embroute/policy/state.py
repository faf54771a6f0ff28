"""The brain's state: every worker's cache, eviction order and clocks. Only `advance` changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from embroute.kernels.caches import Caches
from embroute.kernels.codes import DIRTY, NUM_SLOT_FIELDS, ROW, SLOT_MASK
from embroute.kernels.order import empty_order
from embroute.policy.setup import Setup

I32 = npt.NDArray[np.int32]


@dataclass
class State:
    """What the coordinator knows of every copy. Arrays of zeros are empty caches."""

    setup: Setup
    caches: Caches
    hot_R: npt.NDArray[np.bool_]  # replicated rows; empty where the policy has none
    access_R: I32  # look-ups so far; empty where no part of the policy asks
    step: int = 0
    was_hot: bool = False  # whether the last batch was a hot one
    filled: bool = False  # whether the replicas were filled once
    ranking: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))  # of tables

    @property
    def hot_rows(self) -> npt.NDArray[np.int64]:
        """Ids of the replicated rows."""
        return np.flatnonzero(self.hot_R).astype(np.int64)


@dataclass(frozen=True)
class Needs:
    """What a policy's parts want kept in the state."""

    num_buckets: int
    clocks: bool = False
    access: bool = False


def empty_state(setup: Setup, needs: Needs, hot_rows: npt.NDArray[np.int64] | None = None) -> State:
    """All caches empty. Memory is committed by the system only where rows are touched."""
    num_rows, capacity_WA = setup.schema.num_rows, setup.capacity_WA
    workers = len(capacity_WA)
    slots = int(capacity_WA.sum(1).max())
    first_WA = np.cumsum(capacity_WA, 1) - capacity_WA

    cell_RW = np.zeros((num_rows, workers), np.int32)
    cell_RW.fill(0)  # rows are touched at random: have the system map the pages now, all at once
    caches = Caches(
        cell_RW,
        np.zeros((workers, slots, NUM_SLOT_FIELDS), np.int32),
        first_WA,
        capacity_WA,
        np.zeros_like(capacity_WA),
        empty_order(capacity_WA, needs.num_buckets),
        np.zeros(1, np.int64),
        np.zeros((workers, slots if needs.clocks else 0, 2), np.int32),
        np.zeros(num_rows if needs.clocks else 0, np.int32),
    )
    hot_R = np.zeros(num_rows if hot_rows is not None else 0, np.bool_)
    if hot_rows is not None:
        hot_R[hot_rows] = True
    access_R = np.zeros(num_rows if needs.access else 0, np.int32)
    ranking = np.arange(len(setup.schema.tables))
    return State(setup, caches, hot_R, access_R, ranking=ranking)


def held(state: State, worker: int) -> tuple[I32, I32]:
    """Slots of a worker that hold a copy, and their cells, in slot order."""
    caches = state.caches
    spans = [
        np.arange(first, first + used, dtype=np.int32)
        for first, used in zip(caches.first_WA[worker], caches.used_WA[worker], strict=True)
    ]
    slots = np.concatenate(spans)
    cells = caches.cell_RW[caches.slot_WCF[worker, slots, ROW], worker]
    kept = (cells & SLOT_MASK) == slots + 1
    return slots[kept], cells[kept]


def dirty_rows(state: State, worker: int) -> tuple[npt.NDArray[np.int64], I32]:
    """Rows and slots of a worker whose update the shard does not have."""
    slots, cells = held(state, worker)
    slots = slots[(cells & DIRTY) != 0]
    return state.caches.slot_WCF[worker, slots, ROW].astype(np.int64), slots
