"""Expected traffic agrees with the simulator within five per cent, on independent draws."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from benchmarks import expected_systems as systems
from benchmarks.expected_systems import HotSet
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import Size
from embroute.cost import expected
from embroute.cost.expected import Demand, Expected, Law
from embroute.data.batch import ArraySource, Batch
from embroute.data.schema import Field, Schema, Table
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.policies.regroup import HotRows
from embroute.simulator.simulation import Workload, measure, start_simulation

SIZES, EXPONENTS = (1500, 8000, 400, 3000), (1.05, 0.8, 0.0, 1.3)
WORKERS, SAMPLES, STEPS, WARMUP = 4, 64, 352, 160


@cache
def drawn() -> tuple[ArraySource, tuple[Law, ...]]:
    """Samples of four independent fields, and the law of every row."""
    rng, columns, laws, first = np.random.default_rng(5), [], [], 0
    count = WORKERS * SAMPLES * (STEPS + 40)
    for size, exponent in zip(SIZES, EXPONENTS, strict=True):
        p = rng.permutation(np.arange(1, size + 1.0) ** -exponent)
        p /= p.sum()
        columns.append(first + rng.choice(size, count, p=p))
        laws.append(Law(p, np.ones(size)))
        first += size
    rows = np.stack(columns, 1).reshape(-1).astype(np.int64)
    schema = Schema(
        tuple(Table(f"t{i}", size) for i, size in enumerate(SIZES)),
        tuple(Field(f"f{i}", i) for i in range(len(SIZES))),
    )
    none = np.zeros(0, np.float32)
    batch = Batch(rows, np.arange(len(rows) + 1), none.reshape(count, 0), none, len(SIZES))
    return ArraySource(schema, batch), tuple(laws)


def demand(num_workers: int = WORKERS) -> Demand:
    return Demand(drawn()[1], (1.0,) * len(SIZES), SAMPLES, num_workers)


def job(share: float) -> Workload:
    # Wide rows: FAE keeps every table below 1 MB on all workers.
    source = drawn()[0]
    setup = Setup(
        source.schema, open_cluster("dc-4"), 1024, WORKERS * SAMPLES, cache=Size(share, "share")
    )
    return Workload(source, setup, STEPS, WARMUP)


def simulated(policy: str, share: float) -> Expected:
    outcome = measure(make_policy(policy), job(share))
    rows = outcome.traffic.rows_WKIP.sum((0, 1, 3)) / (outcome.steps * WORKERS)
    miss, stale, update, evict = rows.tolist()
    return Expected(miss, stale, update, evict, outcome.traffic.hot_rows / outcome.steps)


def close(found: Expected, counted: Expected, kinds: tuple[str, ...]) -> None:
    for kind in (*kinds, "moved"):
        assert getattr(found, kind) == pytest.approx(getattr(counted, kind), rel=0.05), kind


def test_expected_traffic_of_nocache_is_near_the_simulator() -> None:
    close(systems.nocache(demand()), simulated("nocache", 0.2), ("miss", "update"))


@pytest.mark.parametrize("share", [pytest.param(0.05, marks=pytest.mark.full), 0.2])
def test_expected_traffic_of_vanilla_is_near_the_simulator(share: float) -> None:
    found = expected.vanilla(demand(), share * sum(SIZES))
    close(found, simulated("vanilla", share), ("miss", "stale", "update"))


@pytest.mark.parametrize("bound", [pytest.param(1, marks=pytest.mark.full), 10])
def test_expected_traffic_of_het_is_near_the_simulator(bound: int) -> None:
    found = systems.het(demand(), 0.1 * sum(SIZES), bound)
    close(found, simulated(f"het({bound})", 0.1), ("miss", "stale", "update", "evict"))


def test_expected_traffic_of_het_0_equals_vanilla() -> None:
    assert systems.het(demand(), 900, 0) == expected.vanilla(demand(), 900)


@pytest.mark.parametrize("policy", [pytest.param("fae", marks=pytest.mark.full), "scars"])
def test_expected_traffic_of_hot_sets_is_near_the_simulator(policy: str) -> None:
    text = f"{policy}(hot=1500rows, {'rate=100, ' if policy == 'fae' else ''}buffer=16)"
    hot_R = start_simulation(make_policy(text), job(0.2)).memory(HotRows).hot_R
    hot = HotSet(tuple(np.split(hot_R, np.cumsum(SIZES)[:-1])))
    share = systems.free_share(demand(), hot)
    assert 0.05 < share < 0.6
    found = systems.scars(demand(), hot)
    if policy == "fae":
        room = 0.2 * sum(SIZES) - hot_R.sum()
        found = systems.fae(demand(), hot, room, systems.Turn(16 * (1 - share), 16 * share))
    close(found, simulated(text, 0.2), ("reduced",))


def test_empirical_law_has_one_class_per_count() -> None:
    counts = np.array([5, 0, 5, 1])
    counted = expected.empirical(counts)
    assert dict(zip(counted.p_C, counted.rows_C, strict=True)) == {0: 1, 1 / 11: 1, 5 / 11: 2}


def test_expected_traffic_accepts_34_million_rows() -> None:
    rows_C = np.full(4096, 34_000_000 / 4096)
    p_C = np.arange(1, 4097.0) ** -1.1
    laws = (Law(p_C / (p_C * rows_C).sum(), rows_C), Law(np.array([0.1]), np.array([10.0])))
    demand = Demand(laws, (26.0, 1.0), 128, 8)
    assert 0 < expected.vanilla(demand, 3.4e6).moved < 2 * 27 * 128


def test_expected_misses_of_a_full_cache_are_zero() -> None:
    found = expected.vanilla(demand(), sum(SIZES))
    assert found.miss == 0
    # But before every row has come once, it does.
    young = expected.vanilla(demand(), sum(SIZES), age=20)
    assert young.miss > 0
    assert young.update == found.update
    alone = expected.vanilla(demand(1), sum(SIZES))
    assert alone.stale == pytest.approx(0, abs=1e-9)
    assert expected.residence(np.array([0.5]), np.array([10.0]), 10) == math.inf
