"""Samples regrouped into batches whose rows are all hot, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from embroute.data.batch import Batch, concat
from embroute.kernels.array_types import Bools
from embroute.planner.state import State


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


def hot_samples(batch: Batch, hot_R: Bools) -> Bools:
    """Samples all of whose rows are hot; padding is no row."""
    cold = (batch.rows >= 0) & ~hot_R[batch.rows]
    counted = np.concatenate([np.zeros(1, np.int64), np.cumsum(cold)])
    bounds = batch.sample_offsets
    hot: Bools = counted[bounds[1:]] == counted[bounds[:-1]]
    return hot


def _pooled(parts: list[Batch], schedule: SwapSchedule, round_number: int) -> list[Batch]:
    """The samples of a pool as one batch; an empty pool stays empty."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return []
    pool = concat(parts)
    if schedule.shuffle:
        rng = np.random.default_rng([schedule.seed, round_number])
        pool = pool.take(rng.permutation(len(pool)))
    return [pool]


def _cut(pool: list[Batch], batch_size: int, last: bool) -> tuple[list[Batch], list[Batch]]:
    """Full batches of a pool, and what is left; at the end of the data nothing is left."""
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
            is_hot = hot_samples(batch, state.hot_R)
            cold.append(batch.take(np.flatnonzero(~is_hot)))
            hot.append(batch.take(np.flatnonzero(is_hot)))
        cold_batches, cold = _cut(_pooled(cold, schedule, round_number), batch_size, last)
        hot_batches, hot = _cut(_pooled(hot, schedule, round_number), batch_size, last)
        yield from interleave(cold_batches, hot_batches, schedule.rate)
        round_number += 1
