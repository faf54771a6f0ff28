"""The simulator's counts of HET, Herald and FAE equal counts by the papers' rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from embroute.config.spec import Size
from embroute.data.schema import Field, Schema, Table
from embroute.planner.plan import traffic
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from tests.counters import (
    EVICT,
    MISS,
    STALE,
    UPDATE,
    Counts,
    Samples,
    count_fae,
    count_herald,
    count_het,
    count_hetu,
    hot_rows,
)
from tests.workloads import Workload, one_row_each, star

WORKERS, BATCH, STEPS, ROOM = 4, 24, 120, 60
TABLES = (Table("a", 150), Table("b", 60), Table("c", 9))
Count = Callable[[Sequence[Samples], int, int], Counts]


def het(bound: int, count: Callable[[Sequence[Samples], int, int, int], Counts]) -> Count:
    return lambda steps, workers, room: count(steps, workers, room, bound)


CASES: list[tuple[str, Count]] = [
    *((f"het({bound})", het(bound, count_het)) for bound in (1, 3, 10, 100)),
    *((f"het({bound}, clocks=release)", het(bound, count_hetu)) for bound in (1, 3, 10, 100)),
    ("herald", count_herald),
]


def draw(seed: int) -> Workload:
    """Skewed ids in four fields; two fields share a table, so that a sample may repeat a row."""
    fields = (Field("a", 0), Field("b", 1), Field("c", 2), Field("a2", 0))
    schema = Schema(TABLES, fields, ("sample",), labelled=True)
    cache = Size(ROOM / schema.num_rows, "share")
    setup = Setup(schema, star(WORKERS), 4, BATCH, "sgd", cache)
    rng = np.random.default_rng(seed)
    batches = []
    for step in range(STEPS):
        columns = [
            schema.first_rows[f.table]
            + (TABLES[f.table].num_rows * rng.random(BATCH) ** 3).astype(int)
            for f in fields
        ]
        batches.append(one_row_each(np.stack(columns, 1).tolist(), BATCH * step))
    return Workload(setup, tuple(batches))


def simulated(name: str, work: Workload) -> Counts:
    """Rows by worker and kind, as the simulator counts them."""
    policy = make_policy(name)
    state = work.start(policy)
    assert state.setup.capacity_WA.tolist() == [[ROOM]] * WORKERS
    moved = [traffic(step.plan, state.setup).rows_WKIP for step in work.plans(policy, state)]
    counts: Counts = np.sum(moved, axis=0).sum((1, 3))
    return counts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "count"), CASES, ids=[name for name, _ in CASES])
def test_simulator_equals_a_count_by_the_rules_of_the_paper(
    name: str, count: Count, seed: int
) -> None:
    work = draw(seed)
    steps = [batch.rows.reshape(BATCH, -1).tolist() for batch in work.batches]
    expected = count(steps, WORKERS, ROOM)
    assert simulated(name, work).tolist() == expected.tolist()
    assert expected[:, EVICT].min() > 100  # the caches are full
    if "100" not in name:
        assert expected[:, [STALE, UPDATE]].min() > 10


def test_released_clocks_pull_more_than_those_of_the_paper() -> None:
    steps = [batch.rows.reshape(BATCH, -1).tolist() for batch in draw(0).batches]
    paper, release = (
        count(steps, WORKERS, ROOM, 10)[:, :2].sum() for count in (count_het, count_hetu)
    )
    assert release > 1.1 * paper


@pytest.mark.parametrize("seed", range(5))
def test_simulator_equals_a_count_by_the_rules_of_fae(seed: int) -> None:
    work = draw(seed)
    steps = [batch.rows.reshape(BATCH, -1).tolist() for batch in work.batches]
    lookups = Counter(row for samples in steps for sample in samples for row in sample)
    first = work.setup.schema.first_rows.tolist()
    hot = hot_rows(lookups, [range(*bounds) for bounds in pairwise(first)], 30)
    expected = count_fae(steps, WORKERS, ROOM, hot, 30)
    assert simulated("fae(hot=30rows, rate=100, buffer=30, sample=1)", work).tolist() == (
        expected.tolist()
    )
    assert len(hot) == 30
    assert expected[:, [MISS, STALE, UPDATE]].min() > 100
