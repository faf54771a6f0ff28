"""What is fixed for a run: tables and their widths, record sizes, cache capacities, quotas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from embroute.config.cluster import Cluster
from embroute.config.spec import AUTO_CACHE, LARGEST_WIDTH, Cache, Size, parse_int, shown
from embroute.cost.step_time import record_bytes
from embroute.data.schema import Schema
from embroute.kernels.array_types import F64, I64, U8
from embroute.kernels.codes import SLOT_MASK, VALUE_STATE

LARGEST_SHARE = 1e9
# An automatic cache holds a step's rows so many times: policies replicate rows in up to half of it.
STEP_ROOM = 2


@dataclass(frozen=True)
class Setup:
    """Tables, cluster, caches and quotas. Axes: W workers, A arenas (tables of one width)."""

    schema: Schema
    cluster: Cluster
    dim: int | tuple[int, ...] = 64  # one width, or one per table
    batch_size: int = 1024  # samples of a step, all workers together
    optimizer: str = "sgd"
    cache: Cache = field(default_factory=lambda: Size(0.1, "share"))
    shares: tuple[float, ...] = ()  # relative quotas of the workers; equal if empty
    seed: int = 0
    seeded: bool = True  # initial rows follow from the seed, so that any rank can compute them
    epoch_batches: int = 0  # 0: unknown
    step_rows: tuple[int, ...] = ()  # by arena; if empty, they follow from batch and schema

    def __post_init__(self) -> None:
        tables = self.schema.tables
        if len(self.widths) != len(tables):
            raise ValueError(
                f"--dim names {len(self.widths)} widths, the data has {len(tables)} tables"
            )
        for width in self.widths:
            if not 1 <= width <= LARGEST_WIDTH:
                raise ValueError(f"--dim must be between 1 and {LARGEST_WIDTH}, got {shown(width)}")
        if not self.cluster.workers or not self.cluster.shards:
            raise ValueError(
                f"the network has {self.cluster.num_workers} workers and "
                f"{self.cluster.num_shards} shards, a job needs at least one of each"
            )
        if self.schema.num_rows >= 2**31:
            raise ValueError(
                f"at most {2**31 - 1} rows in all, the data has {self.schema.num_rows}; "
                f"--hash-rows with fewer rows a field makes it smaller"
            )
        shares = self.shares
        positive = all(0 <= share <= LARGEST_SHARE for share in shares)  # also refuses nan
        if shares and (len(shares) != self.cluster.num_workers or not positive or not sum(shares)):
            raise ValueError(
                f"--quotas needs {self.cluster.num_workers} numbers of at least 0, got "
                f"{shown(shares)}"
            )
        record_bytes(self.arenas, self.optimizer)  # refuses an unknown optimizer
        largest = int(self.cache_rows_W.argmax())
        if self.cache_rows_W[largest] > SLOT_MASK - 1:
            size = self.cache_W[largest]
            raise ValueError(f"--cache {size}: at most {SLOT_MASK - 1} slots per worker")

    @property
    def num_workers(self) -> int:
        """Workers of the job."""
        return self.cluster.num_workers

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Width of each table."""
        if isinstance(self.dim, int):
            return (self.dim,) * len(self.schema.tables)
        return self.dim

    @cached_property
    def arenas(self) -> tuple[int, ...]:
        """The distinct widths; rows of one width share slots."""
        return tuple(sorted(set(self.widths)))

    @cached_property
    def record_bytes_XA(self) -> I64:
        """Bytes of each kind of record in each arena."""
        return record_bytes(self.arenas, self.optimizer)

    @cached_property
    def rows_A(self) -> I64:
        """Rows of each arena."""
        rows = dict.fromkeys(self.arenas, 0)
        for table, width in zip(self.schema.tables, self.widths, strict=True):
            rows[width] += table.num_rows
        return np.array(list(rows.values()), np.int64)

    @cached_property
    def capacity_WA(self) -> I64:
        """Slots of each worker and arena."""
        # A share such as 0.1 is not exact in binary, so that 0.29 * 100 is a hair below 29.
        slots_WA = np.floor([slots_by_arena(size, self) + 1e-9 for size in self.cache_W])
        if self.cache == AUTO_CACHE:
            slots_WA = np.maximum(slots_WA, STEP_ROOM * self.step_rows_A)
        whole_WA: I64 = np.minimum(slots_WA, self.rows_A).astype(np.int64)
        return whole_WA

    @property
    def cache_W(self) -> tuple[Size, ...]:
        """The size of each worker's cache."""
        return cache_sizes(self.cache, self.num_workers)

    @property
    def cache_rows_W(self) -> I64:
        """Slots of each worker, all widths together."""
        rows_W: I64 = self.capacity_WA.sum(1)
        return rows_W

    @cached_property
    def step_rows_A(self) -> I64:
        """Rows of each arena that a worker's samples of a step touch, at most."""
        if self.step_rows:
            return np.array(self.step_rows, np.int64)
        samples, lookups = int(self.quotas(self.batch_size).max()), [0] * len(self.widths)
        for entry in self.schema.fields:
            unknown = self.schema.tables[entry.table].num_rows  # no bag is worth more rows
            longest = 1 if not entry.bag else entry.longest_bag
            lookups[entry.table] += unknown if longest is None else longest
        rows = dict.fromkeys(self.arenas, 0)
        for table, width, count in zip(self.schema.tables, self.widths, lookups, strict=True):
            rows[width] += min(table.num_rows, samples * count)
        return np.array(list(rows.values()), np.int64)

    def arena_of(self, rows: I64) -> U8:
        """Arena of each row."""
        if len(self.arenas) == 1:
            return np.zeros(len(rows), np.uint8)
        return self._arena_of_table[self.table_of(rows)]

    def table_of(self, rows: I64) -> npt.NDArray[np.intp]:
        """Table of each row."""
        return np.searchsorted(self.schema.first_rows, rows, side="right") - 1

    @cached_property
    def _arena_of_table(self) -> U8:
        return np.array([self.arenas.index(width) for width in self.widths], np.uint8)

    @cached_property
    def row_seconds_AW(self) -> F64:
        """Seconds to move one row, value and state, between a worker and the shards."""
        cluster, crosses_W = self.cluster, self.cluster.crosses_WK.mean(1)
        byte_s_W = crosses_W / cluster.bytes_s_W + (1 - crosses_W) / cluster.inside_bytes_s_W
        return np.outer(self.record_bytes_XA[VALUE_STATE], byte_s_W)

    def quotas(self, num_samples: int) -> I64:
        """Samples of each worker: by shares, the remainder to the largest fractions."""
        if num_samples not in self._quotas:
            shares = self.shares or (1.0,) * self.num_workers
            self._quotas[num_samples] = split_quotas(shares, num_samples)
        return self._quotas[num_samples].copy()

    @cached_property
    def _quotas(self) -> dict[int, I64]:  # by number of samples: a run has two or three
        return {}


def cache_sizes(cache: Cache, num_workers: int) -> tuple[Size, ...]:
    """The size of each worker's cache."""
    if isinstance(cache, Size):
        return (cache,) * num_workers
    if len(cache) != num_workers:
        raise ValueError(
            f"--cache names {len(cache)} sizes for {num_workers} workers: give one size for all, "
            f"or one for each"
        )
    return cache


def slots_by_arena(size: Size, setup: Setup) -> F64:
    """Rows of each arena in some room: each arena has the same share of its rows there."""
    rows_A, whole = setup.rows_A, 1
    if size.unit in ("rows", "bytes"):
        row_bytes_A = setup.record_bytes_XA[VALUE_STATE] if size.unit == "bytes" else 1
        whole = max(1, int((rows_A * row_bytes_A).sum()))
    room: F64 = size.amount * rows_A / whole
    return room


def split_quotas(share_W: npt.ArrayLike, num_samples: int) -> I64:
    """Samples of each worker: by shares, the remainder to the largest fractions."""
    shares = np.asarray(share_W, np.float64)
    exact_W = num_samples * shares / shares.sum()
    quotas_W: I64 = np.floor(exact_W).astype(np.int64)
    order = np.argsort(quotas_W - exact_W, kind="stable")
    quotas_W[order[: num_samples - int(quotas_W.sum())]] += 1
    return quotas_W


def parse_dim(text: str, schema: Schema) -> int | tuple[int, ...]:
    """Read `64`, or `64,C1=16,C2=8` for tables with widths of their own."""
    default, *named = (item.strip() for item in text.split(","))
    if not default.isdecimal():
        raise ValueError(f"--dim must look like 64 or 64,C1=16, got {shown(text)}")
    usual = parse_int("--dim", default, 1, LARGEST_WIDTH)
    if not named:
        return usual
    widths: Mapping[str, int] = {table.name: usual for table in schema.tables}
    changed, seen = dict(widths), set[str]()
    for item in named:
        name, _, width = item.partition("=")
        if name not in widths or not width.isdecimal():
            known = ", ".join(widths)
            raise ValueError(f"--dim {shown(item)}: expected table=width with a table of {known}")
        if name in seen:
            raise ValueError(f"--dim: table {name!r} is given twice")
        seen.add(name)
        changed[name] = parse_int(f"--dim {shown(item)}: the width", width, 1, LARGEST_WIDTH)
    return tuple(changed.values())
