"""Choosing the rows that are replicated on every worker."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from embroute.config.spec import Size
from embroute.cost.hot_rows import Draws, best_hot
from embroute.kernels.array_types import I64
from embroute.kernels.codes import VALUE_STATE
from embroute.planner.setup import Setup

FAE_BUDGET_BYTES = 256_000_000
SMALL_TABLE_BYTES = 1_000_000
DEFAULT_SHARE = 0.5  # of the cache, where the user names no hot set; the rest serves cold batches


def hot_limits(setup: Setup, hot: Size | None) -> I64:
    """Most hot rows per arena: what the user asked for, or the default, within the cache."""
    capacity_A = setup.capacity_WA.min(0)
    sizes_A = setup.record_bytes_XA[VALUE_STATE]
    if hot is None:
        budget = FAE_BUDGET_BYTES / max(1, int((setup.rows_A * sizes_A).sum()))
        limits = np.minimum(budget * setup.rows_A, DEFAULT_SHARE * capacity_A)
    elif hot.unit == "share":
        limits = hot.amount * setup.rows_A
    elif hot.unit == "rows":
        limits = hot.amount * setup.rows_A / max(1, int(setup.rows_A.sum()))
    else:
        limits = hot.amount * setup.rows_A / max(1, int((setup.rows_A * sizes_A).sum()))
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
        accessed = np.flatnonzero(counts_R)
        pooled = accessed[np.argsort(-counts_R[accessed], kind="stable")]
        ordered = np.concatenate([*whole, pooled]).astype(np.int64)
        _, first_seen = np.unique(ordered, return_index=True)
        return _cut_to_limits(ordered[np.sort(first_seen)], setup, hot_limits(setup, hot))

    return choose


def by_theory(hot: Size | None) -> Callable[[I64, Setup], I64]:
    """SCARS: as many of the most accessed rows as make the expected step shortest."""

    def choose(counts_R: I64, setup: Setup) -> I64:
        limits_A = hot_limits(setup, hot)
        accessed = np.flatnonzero(counts_R)
        pooled = accessed[np.argsort(-counts_R[accessed], kind="stable")].astype(np.int64)
        if hot is None:
            row_bytes = float(setup.record_bytes_XA[VALUE_STATE].max())
            draws = _draws(counts_R, setup)
            pooled = pooled[: best_hot(draws, int(limits_A.sum()), setup.cluster, row_bytes).hot]
        return _cut_to_limits(pooled, setup, limits_A)

    return choose


def _draws(counts_R: I64, setup: Setup) -> Draws:
    """The access counts by table; look-ups of bags are counted in samples of the one-hot fields."""
    first, fields = setup.schema.first_rows, setup.schema.fields
    tables = range(len(setup.schema.tables))
    counts = tuple(counts_R[first[t] : first[t + 1]] for t in tables)
    lookups = np.array([table.sum() for table in counts], np.float64)
    per_sample = np.bincount([field.table for field in fields], minlength=len(counts))
    plain = [t for t in tables if not any(f.bag for f in fields if f.table == t)]
    samples = max((lookups[t] / max(1, per_sample[t]) for t in plain), default=0.0)
    mean = lookups / samples if samples else per_sample.astype(np.float64)
    return Draws(counts, mean, setup.batch_size / setup.num_workers)
