"""Random workloads: tables, clusters, quotas, caches and batches, small enough to shrink."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from embroute.config.cluster import Cluster, Host, Worker
from embroute.config.spec import Cache, Size
from embroute.cost.step_time import OPTIMIZERS
from embroute.data.batch import PADDING, Batch
from embroute.data.schema import Field, Schema, Table
from embroute.data.window import Horizon, Window
from embroute.planner.interfaces import Policy
from embroute.planner.plan_stream import Step, plans, start
from embroute.planner.setup import Setup
from embroute.planner.state import State

# Options of published systems, beside their defaults.
SETTINGS = (
    "het(1)",
    "het(10, order=lfu)",
    "het(3, order=light-lfu)",
    "herald(tables=1)",
    "herald(tables=auto)",
    "herald(ties=first)",
    "esd(0)",
    "esd(0.5)",
)


@dataclass(frozen=True)
class Samples:
    """Samples in memory as a source."""

    schema: Schema
    batches: tuple[Batch, ...]

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.batches))

    def chunks(self) -> Iterator[Batch]:
        yield from self.batches


@dataclass(frozen=True)
class Workload:
    """A setup and the batches it trains; the first dense column numbers the samples."""

    setup: Setup
    batches: tuple[Batch, ...]

    @property
    def counts_R(self) -> npt.NDArray[np.int64]:
        """Lookups per row, for policies with a hot set."""
        rows = np.concatenate([batch.rows for batch in self.batches])
        return np.bincount(rows[rows >= 0], minlength=self.setup.schema.num_rows)

    def with_cache(self, cache: Cache) -> Workload:
        """The same workload with other caches."""
        return replace(self, setup=replace(self.setup, cache=cache))

    def start(self, policy: Policy) -> State:
        """The empty state of a run of this workload, on one host if the policy needs it."""
        setup = self.setup
        if policy.sync.shared_memory:
            setup = replace(setup, cluster=setup.cluster.together())
        if policy.regroup is None:
            return start(policy, setup)
        return start(policy, replace(setup, epoch_batches=len(self.batches)), self.counts_R)

    def plans(self, policy: Policy, state: State) -> Iterator[Step]:
        """The plans of this workload, one per step."""
        return plans(policy, iter(self.batches), state)

    def windows(self, policy: Policy, state: State) -> Iterator[Window]:
        """The windows of the planner; the caller plans and advances."""
        batches = iter(self.batches)
        if policy.regroup:
            batches = policy.regroup.stream(batches, state)
        horizon = Horizon(self.setup.schema.num_rows, policy.lookahead)
        for batch in batches:
            horizon.push(batch)
            if horizon.full:
                yield horizon.pop()
        while not horizon.empty:
            yield horizon.pop()


def star(num_workers: int, num_shards: int = 1, colocated: int = 0) -> Cluster:
    """Workers with links 1:2:3:.., and shards on their own host or beside workers."""
    hosts = [Host("shard", 1e9, 1e9), *(Host(f"w{i}", 1e8 / (i + 1), 1e8) for i in range(5))]
    homes = tuple(1 + k % num_workers if k < colocated else 0 for k in range(num_shards))
    return Cluster(tuple(hosts), tuple(Worker(i + 1) for i in range(num_workers)), homes)


def make_batch(bags: list[list[list[int]]], first_sample: int = 0) -> Batch:
    """A batch of samples given as bags of global row ids by field."""
    flat = [bag for sample in bags for bag in sample]
    numbers = np.arange(first_sample, first_sample + len(bags), dtype=np.float32)
    return Batch(
        np.array([row for bag in flat for row in bag], np.int64),
        np.cumsum([0, *map(len, flat)]),
        numbers.reshape(-1, 1),
        np.zeros(len(bags), np.float32),
        len(bags[0]) if bags else 1,
    )


def one_row_each(samples: list[list[int]], first_sample: int = 0) -> Batch:
    """A batch in which sample s looks up one row per field."""
    return make_batch([[[row] for row in sample] for sample in samples], first_sample)


def _bag(rng: np.random.Generator, first: int, rows: int, is_bag: bool) -> list[int]:
    """Ids of one bag, low ids more often; sometimes padding, a repeat, or nothing."""
    length = int(rng.integers(0, 4)) if is_bag else 1
    ids = first + np.floor(rows * rng.random(length) ** 2).astype(int)
    padded = rng.random(length) < 0.1
    return [PADDING if pad else int(row) for row, pad in zip(ids, padded, strict=True)]


def draw_batches(schema: Schema, sizes: list[int], seed: int) -> tuple[Batch, ...]:
    """Batches of the given sizes with skewed ids."""
    rng = np.random.default_rng(seed)
    batches, trained = [], 0
    for size in sizes:
        bags = []
        for _ in range(size):
            fields = [(f, schema.tables[f.table].num_rows) for f in schema.fields]
            bags.append(
                [_bag(rng, int(schema.first_rows[f.table]), rows, f.bag) for f, rows in fields]
            )
        batches.append(make_batch(bags, trained))
        trained += size
    return tuple(batches)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """One to four tables of different sizes, one to four fields over them."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    tables = tuple(Table(f"t{i}", size) for i, size in enumerate(sizes))
    field = st.tuples(st.integers(0, len(sizes) - 1), st.booleans())
    fields = draw(st.lists(field, min_size=1, max_size=4))
    named = tuple(Field(f"f{i}", table, bag) for i, (table, bag) in enumerate(fields))
    return Schema(tables, named, ("sample",), labelled=True)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Any schema on any small cluster: uneven links, quotas, widths and caches."""
    schema = draw(schemas())
    workers = draw(st.integers(1, 5))
    shards = draw(st.integers(1, 3))
    cluster = star(workers, shards, draw(st.integers(0, shards)))
    widths = st.lists(
        st.sampled_from([2, 4, 7]), min_size=len(schema.tables), max_size=len(schema.tables)
    )
    share = st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0])
    cache = st.sampled_from([0.1, 0.25, 0.5, 0.8, 1.0]).map(lambda part: Size(part, "share"))
    shares = draw(st.lists(share, min_size=workers, max_size=workers).filter(sum) | st.just([]))
    return Setup(
        schema,
        cluster,
        draw(st.just(4) | widths.map(tuple)),
        batch_size=draw(st.integers(1, 9)),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        cache=draw(cache | st.lists(cache, min_size=workers, max_size=workers).map(tuple)),
        shares=tuple(shares),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """A setup with up to 40 batches: equal ones and a short last one, or all sizes mixed."""
    setup = draw(setups())
    batch_size = setup.batch_size
    steps = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**16))
    if draw(st.booleans()):
        sizes = [batch_size] * (steps - 1) + [1 + seed % batch_size]
    else:
        sizes = [int(size) for size in np.random.default_rng(seed).integers(1, 10, steps)]
    return Workload(setup, draw_batches(setup.schema, sizes, seed))


def long_workload(optimizer: str, seed: int = 7) -> Workload:
    """A few hundred steps with two widths, bags, uneven links and quotas."""
    tables = (Table("a", 120), Table("b", 40), Table("c", 7))
    fields = (Field("a", 0), Field("b", 1, bag=True), Field("c", 2), Field("a2", 0))
    schema = Schema(tables, fields, ("sample",), labelled=True)
    setup = Setup(
        schema,
        star(4, 2, 1),
        (4, 8, 4),
        12,
        optimizer,
        Size(0.45, "share"),
        (2.0, 1.0, 1.0, 0.5),
    )
    return Workload(setup, draw_batches(schema, [12] * 249 + [5], seed))
