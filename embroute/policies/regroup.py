"""Samples regrouped into batches whose rows are all hot, and the rest; and which rows are hot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.config.spec import Size
from embroute.cost.hot_rows import Draws, best_hot
from embroute.data.batch import Batch, concat
from embroute.kernels.array_types import I64, Bools
from embroute.kernels.codes import VALUE_STATE
from embroute.planner.interfaces import PartMemory, RunStart
from embroute.planner.plan import Plan
from embroute.planner.setup import Setup, slots_by_arena
from embroute.planner.state import State

FAE_BUDGET_BYTES = 256_000_000
SMALL_TABLE_BYTES = 1_000_000
DEFAULT_SHARE = 0.5  # of the cache, where the user names no hot set; the rest serves cold batches


@dataclass(frozen=True)
class SwapSchedule:
    """How pools are emptied: `rate` percent of the cold batches, then of the hot ones, in turn.

    `buffer`: batches read before they are regrouped; a stream is never read whole. `shuffle`: the
    samples of a pool change places, by `seed`; otherwise they keep the order of the data.
    """

    rate: float
    buffer: int = 32
    shuffle: bool = False
    seed: int = 0


class HotRows(NamedTuple):
    """The replicated rows, and where the swaps between hot and cold batches stand."""

    hot_R: Bools
    was_hot: Bools  # one flag: whether the last batch was a hot one
    filled: Bools  # one flag: whether the replicas were filled once

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
        return HotRows(hot_R, np.zeros(1, np.bool_), np.zeros(1, np.bool_))

    return PartMemory(HotRows, init, _learn_swaps)


def _learn_swaps(state: State, plan: Plan) -> None:
    memory = state.memory(HotRows)
    memory.was_hot[0] = plan.now.batch.hot
    memory.filled[0] = True


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


def interleave(cold: list[Batch], hot: list[Batch], rate: float) -> Iterator[Batch]:
    """`rate` percent of the cold batches, the same of the hot ones, until none is left."""
    turns = max(1, int(np.ceil(100 / rate)))
    for turn in range(turns):
        for pool, is_hot in ((cold, False), (hot, True)):
            start, stop = (round(len(pool) * min(1.0, (turn + i) * rate / 100)) for i in (0, 1))
            yield from (replace(batch, hot=is_hot) for batch in pool[start:stop])


def regroup(batches: Iterator[Batch], state: State, schedule: SwapSchedule) -> Iterator[Batch]:
    """Pure hot and pure cold batches; every sample comes out exactly once."""
    cold: list[Batch] = []
    hot: list[Batch] = []
    round_number, last = 0, False
    batch_size = state.setup.batch_size
    while not last:
        read = [batch for _, batch in zip(range(schedule.buffer), batches, strict=False)]
        last = len(read) < schedule.buffer
        for batch in read:
            is_hot = hot_samples(batch, state.memory(HotRows).hot_R)
            cold.append(batch.take(np.flatnonzero(~is_hot)))
            hot.append(batch.take(np.flatnonzero(is_hot)))
        cold_batches, cold = _cut(_pooled(cold, schedule, round_number), batch_size, last)
        hot_batches, hot = _cut(_pooled(hot, schedule, round_number), batch_size, last)
        yield from interleave(cold_batches, hot_batches, schedule.rate)
        round_number += 1


def hot_limits(setup: Setup, hot: Size | None) -> I64:
    """Most hot rows per arena: the user's size or the default, within the cache."""
    capacity_A = setup.capacity_WA.min(0)
    if hot is None:
        row_bytes_A = setup.record_bytes_XA[VALUE_STATE]
        budget = FAE_BUDGET_BYTES / max(1, int((setup.rows_A * row_bytes_A).sum()))
        limits = np.minimum(budget * setup.rows_A, DEFAULT_SHARE * capacity_A)
    else:
        limits = slots_by_arena(hot, setup)
    whole: I64 = np.floor(limits + 1e-9).astype(np.int64)
    if (whole > capacity_A).any():
        raise ValueError(
            f"hot={hot}: {int(whole.sum())} replicated rows do not fit the cache of "
            f"{int(capacity_A.sum())} rows per worker"
        )
    return whole


def _cut_to_limits(ordered: I64, setup: Setup, limits_A: I64) -> I64:
    """The first rows of each arena, as many as its limit allows."""
    arena = setup.arena_of(ordered)
    kept = [ordered[arena == a][:limit] for a, limit in enumerate(limits_A)]
    return np.sort(np.concatenate(kept))


def _most_accessed(counts_R: I64) -> I64:
    """Rows that were accessed, the most accessed first."""
    accessed = np.flatnonzero(counts_R)
    return accessed[np.argsort(-counts_R[accessed], kind="stable")].astype(np.int64)


def _small_first(setup: Setup) -> npt.NDArray[np.intp]:
    """Tables below SMALL_TABLE_BYTES, the smallest first."""
    rows = np.array([table.num_rows for table in setup.schema.tables])
    sizes = setup.record_bytes_XA[VALUE_STATE][[setup.arenas.index(w) for w in setup.widths]]
    order = np.argsort(rows * sizes, kind="stable")
    small: npt.NDArray[np.intp] = order[(rows * sizes)[order] < SMALL_TABLE_BYTES]
    return small


def by_count(hot: Size | None) -> Callable[[I64, Setup], I64]:
    """FAE: small tables whole, then the most accessed rows pooled over tables, within a budget."""

    def choose(counts_R: I64, setup: Setup) -> I64:
        first = setup.schema.first_rows
        small = [np.arange(first[t], first[t + 1]) for t in _small_first(setup)]
        # A small table that does not fit whole keeps its most accessed rows.
        whole = [rows[np.argsort(-counts_R[rows], kind="stable")] for rows in small]
        ordered = np.concatenate([*whole, _most_accessed(counts_R)]).astype(np.int64)
        _, first_seen = np.unique(ordered, return_index=True)
        return _cut_to_limits(ordered[np.sort(first_seen)], setup, hot_limits(setup, hot))

    return choose


def by_theory(hot: Size | None) -> Callable[[I64, Setup], I64]:
    """SCARS: as many of the most accessed rows as make the expected step shortest."""

    def choose(counts_R: I64, setup: Setup) -> I64:
        limits_A, ordered = hot_limits(setup, hot), _most_accessed(counts_R)
        if hot is None:
            row_bytes = float(setup.record_bytes_XA[VALUE_STATE].max())
            draws = _draws(counts_R, setup)
            best = best_hot(draws, int(limits_A.sum()), setup.cluster, row_bytes)
            ordered = ordered[: best.hot]
        return _cut_to_limits(ordered, setup, limits_A)

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
