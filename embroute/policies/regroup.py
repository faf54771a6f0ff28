"""Samples regrouped into batches whose rows are all hot, and the rest; and which rows are hot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Literal, NamedTuple

import numpy as np

from embroute.config.spec import Size
from embroute.cost.hot_rows import Draws, best_hot
from embroute.data.batch import Batch, concat
from embroute.kernels.array_types import F64, I64, Bools
from embroute.kernels.codes import VALUE_STATE
from embroute.planner.interfaces import PartMemory, RunStart
from embroute.planner.setup import Setup, slots_by_arena
from embroute.planner.state import State

FAE_BUDGET_BYTES = 256_000_000
SMALL_TABLE_BYTES = 1_000_000
FIRST_RATE, LOWEST_RATE = 50.0, 1.0  # percent of an epoch
FALLS_TO_DOUBLE = 4
MOST_ROUNDS = 4096  # of which the rates are recorded


@dataclass(frozen=True)
class SwapSchedule:
    """How an epoch is cut into rounds: of each, the cold batches are trained, then the hot ones.

    `rate`: percent of an epoch in a round; "auto" begins with FIRST_RATE and follows the held-out
    loss. `buffer`: batches of a round at most; they wait in memory. `shuffle`: the samples of a
    pool change places, by `seed`; otherwise they keep the order of the data.
    """

    rate: float | Literal["auto"]
    buffer: int = 1024
    shuffle: bool = False
    seed: int = 0


class HotRows(NamedTuple):
    """The replicated rows, and how the data is cut into rounds of cold and hot batches."""

    hot_R: Bools
    rate_N: F64  # of each round that has begun; 0 later. A resume cuts the same rounds
    next_rate: F64  # one number: of the next round
    last_loss: F64  # one number: of the last evaluation; infinite before the first
    falls: I64  # one number: evaluations in a row whose loss fell

    @property
    def rows(self) -> I64:
        """Ids of the replicated rows."""
        return np.flatnonzero(self.hot_R).astype(np.int64)


def hot_memory(choose: Callable[[I64, Setup], I64]) -> PartMemory:
    """The memory of a hot set that is chosen once, from look-ups of each row."""

    def init(start: RunStart) -> HotRows:
        assert start.counts_R is not None
        hot_R = np.zeros(start.setup.schema.num_rows, np.bool_)
        hot_R[choose(start.counts_R, start.setup)] = True
        return HotRows(
            hot_R=hot_R,
            rate_N=np.zeros(MOST_ROUNDS),
            next_rate=np.full(1, FIRST_RATE),
            last_loss=np.full(1, np.inf),
            falls=np.zeros(1, np.int64),
        )

    return PartMemory(HotRows, init)


def learn_loss(state: State, loss: float) -> None:
    """FAE's rule: swap twice as often when the held-out loss rises, half as often when it falls.

    The release halves the rate at a rise, and doubles it after four falls in a row.
    """
    memory = state.memory(HotRows)
    rises, falls = loss > memory.last_loss[0], loss < memory.last_loss[0]
    memory.last_loss[0] = loss
    memory.falls[0] = memory.falls[0] + 1 if falls else 0
    if rises:
        memory.next_rate[0] = max(LOWEST_RATE, memory.next_rate[0] / 2)
    elif memory.falls[0] == FALLS_TO_DOUBLE:
        memory.next_rate[0], memory.falls[0] = min(100.0, memory.next_rate[0] * 2), 0


def hot_samples(batch: Batch, hot_R: Bools) -> Bools:
    """Samples all of whose rows are hot; padding is no row."""
    cold = (batch.rows >= 0) & ~hot_R[batch.rows]
    # Cold look-ups before each look-up: a sample is hot if the count does not grow within it.
    counted = np.concatenate([np.zeros(1, np.int64), np.cumsum(cold)])
    bounds = batch.sample_offsets
    hot: Bools = counted[bounds[1:]] == counted[bounds[:-1]]
    return hot


def _pooled(pieces: list[Batch], schedule: SwapSchedule, round_number: int) -> list[Batch]:
    """The samples of a pool as one batch; an empty pool stays empty."""
    pieces = [piece for piece in pieces if len(piece)]
    if not pieces:
        return []
    pool = concat(pieces)
    if schedule.shuffle:
        rng = np.random.default_rng([schedule.seed, round_number])
        pool = pool.take(rng.permutation(len(pool)))
    return [pool]


def _cut(pool: list[Batch], batch_size: int, last: bool) -> tuple[list[Batch], list[Batch]]:
    """Full batches of a pool, and the remainder; at the end of the data nothing remains."""
    if not pool:
        return [], []
    samples = len(pool[0])
    full = samples // batch_size
    batches = [pool[0].slice(i * batch_size, (i + 1) * batch_size) for i in range(full)]
    rest = [pool[0].slice(full * batch_size, samples)] if samples % batch_size else []
    return (batches + rest, []) if last else (batches, rest)


def _rate_of_round(number: int, schedule: SwapSchedule, memory: HotRows) -> float:
    """Percent of an epoch; recorded, so that a resume cuts the rounds that its run has begun."""
    if schedule.rate != "auto":
        return schedule.rate
    if number >= MOST_ROUNDS:
        return float(memory.next_rate[0])
    if not memory.rate_N[number]:
        memory.rate_N[number] = memory.next_rate[0]
    return float(memory.rate_N[number])


class Round(NamedTuple):
    """Consecutive batches of an epoch, and whether the epoch ends with them."""

    batches: list[Batch]
    ends_epoch: bool


def rounds(batches: Iterator[Batch], state: State, schedule: SwapSchedule) -> Iterator[Round]:
    """The batches by rounds; rates of an epoch of unknown length are percents of the buffer."""
    known, memory = state.setup.epoch_batches > 0, state.memory(HotRows)
    epoch = state.setup.epoch_batches or schedule.buffer
    left, following = epoch, next(batches, None)
    for number in count():
        if following is None:
            return
        rate = _rate_of_round(number, schedule, memory)
        size = min(left, schedule.buffer, math.ceil(epoch * rate / 100))
        read = [following, *islice(batches, size - 1)]
        following, left = next(batches, None), left - len(read)
        yield Round(read, ends_epoch=(known and not left) or following is None)
        left = left or epoch


def regroup(batches: Iterator[Batch], state: State, schedule: SwapSchedule) -> Iterator[Batch]:
    """Pure hot and pure cold batches; every sample comes out exactly once, in its epoch."""
    pools: list[list[Batch]] = [[], []]  # of cold and of hot samples
    for number, (read, ends_epoch) in enumerate(rounds(batches, state, schedule)):
        for batch in read:
            hot_S = hot_samples(batch, state.memory(HotRows).hot_R)
            for pool, chosen_S in zip(pools, (~hot_S, hot_S), strict=True):
                pool.append(batch.take(np.flatnonzero(chosen_S)))
        for kind, pool in enumerate(pools):
            pooled = _pooled(pool, schedule, number)
            full, pools[kind] = _cut(pooled, state.setup.batch_size, ends_epoch)
            yield from (replace(batch, hot=bool(kind)) for batch in full)


class HotRoom(NamedTuple):
    """Room for hot rows: bytes in all, and slots of every worker's cache. Axis A: arenas."""

    budget_bytes: float
    slots_A: I64


def hot_room(setup: Setup, hot: Size | None) -> HotRoom:
    """The user's size; else 256 MB, or the slots that a cold batch leaves free if they are less."""
    capacity_A = setup.capacity_WA.min(0)
    if hot is None:
        # The bound on a step's rows is loose for bags: half of the cache is always free.
        free_A = np.maximum(capacity_A - setup.step_rows_A, capacity_A // 2)
        return HotRoom(FAE_BUDGET_BYTES, free_A)
    slots_A: I64 = np.floor(slots_by_arena(hot, setup) + 1e-9).astype(np.int64)
    if (slots_A > capacity_A).any():
        raise ValueError(
            f"hot={hot}: {int(slots_A.sum())} replicated rows do not fit the cache of "
            f"{int(capacity_A.sum())} rows per worker"
        )
    return HotRoom(np.inf, slots_A)


def _most_accessed(counts_R: I64, setup: Setup, room: HotRoom) -> I64:
    """The most accessed rows that fit, in this order; of rows with equal counts the first."""
    accessed = np.flatnonzero(counts_R)
    ordered = accessed[np.argsort(-counts_R[accessed], kind="stable")].astype(np.int64)
    arena = setup.arena_of(ordered)
    fits = np.zeros(len(ordered), np.bool_)
    for a, slots in enumerate(room.slots_A):
        fits[np.flatnonzero(arena == a)[:slots]] = True
    ordered, arena = ordered[fits], arena[fits]
    row_bytes = np.cumsum(setup.record_bytes_XA[VALUE_STATE][arena])
    return ordered[: np.searchsorted(row_bytes, room.budget_bytes, side="right")]


def _small_tables(setup: Setup, room: HotRoom) -> tuple[I64, HotRoom]:
    """Rows of tables below SMALL_TABLE_BYTES that fit whole, the smallest first; the room left."""
    rows_T = np.diff(setup.schema.first_rows)
    arena_T = np.array([setup.arenas.index(width) for width in setup.widths])
    bytes_T = rows_T * setup.record_bytes_XA[VALUE_STATE][arena_T]
    budget, slots_A = room.budget_bytes, room.slots_A.copy()
    chosen = [np.empty(0, np.int64)]
    for t in np.argsort(bytes_T, kind="stable"):
        fits = bytes_T[t] <= budget and rows_T[t] <= slots_A[arena_T[t]]
        if bytes_T[t] < SMALL_TABLE_BYTES and fits:
            chosen.append(np.arange(rows_T[t]) + setup.schema.first_rows[t])
            budget -= bytes_T[t]
            slots_A[arena_T[t]] -= rows_T[t]
    return np.concatenate(chosen), HotRoom(budget, slots_A)


def by_count(hot: Size | None) -> Callable[[I64, Setup], I64]:
    """FAE: small tables whole, then the most accessed rows pooled over tables, within a budget.

    A small table that does not fit whole competes by its counts.
    """

    def choose(counts_R: I64, setup: Setup) -> I64:
        small, room = _small_tables(setup, hot_room(setup, hot))
        others_R = counts_R.copy()
        others_R[small] = 0
        return np.sort(np.concatenate([small, _most_accessed(others_R, setup, room)]))

    return choose


def by_theory(hot: Size | None) -> Callable[[I64, Setup], I64]:
    """SCARS: as many of the most accessed rows as make the expected step shortest."""

    def choose(counts_R: I64, setup: Setup) -> I64:
        rows = _most_accessed(counts_R, setup, hot_room(setup, hot))
        if hot is None:
            row_bytes = float(setup.record_bytes_XA[VALUE_STATE].max())
            best = best_hot(_draws(counts_R, setup), len(rows), setup.cluster, row_bytes)
            rows = rows[: best.hot]
        return np.sort(rows)

    return choose


def _draws(counts_R: I64, setup: Setup) -> Draws:
    """The access counts by table. Look-ups per sample of a bag follow from the one-hot fields."""
    first, fields = setup.schema.first_rows, setup.schema.fields
    tables = range(len(setup.schema.tables))
    counts = tuple(counts_R[first[t] : first[t + 1]] for t in tables)
    lookups = np.array([table.sum() for table in counts], np.float64)
    per_sample = np.bincount([field.table for field in fields], minlength=len(counts))
    one_hot = [t for t in tables if not any(f.bag for f in fields if f.table == t)]
    samples = max((lookups[t] / max(1, per_sample[t]) for t in one_hot), default=0.0)
    mean = lookups / samples if samples else per_sample.astype(np.float64)
    return Draws(counts, mean, setup.batch_size / setup.num_workers)
