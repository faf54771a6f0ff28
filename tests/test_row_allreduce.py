"""All-reduced rows: chosen where they relieve bottleneck links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from embroute.config.cluster import star_cluster
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import Size
from embroute.cost.step_time import MIN_CHUNK_S
from embroute.data.open import open_source
from embroute.data.window import Horizon
from embroute.planner.plan_stream import start
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.policies.embroute import row_allreduce as module
from embroute.policies.embroute.row_allreduce import choose_reduced_rows, learn_pace
from embroute.policies.embroute.search_state import SearchState
from embroute.simulator.simulation import StepReport, Workload, simulate_steps
from tests.sizes import sized


def steps(network: str, compute_ms: float) -> list[StepReport]:
    cluster = replace(open_cluster(network), compute_s_per_sample=1e-3 * compute_ms)
    source = open_source("avazu")
    given = Workload(source, Setup(source.schema, cluster, 512), sized(20, 30), 10)
    found = simulate_steps(make_policy("embroute(effort=300)"), given)
    return [step for step in found if step.step >= given.warmup]


def test_all_reduced_rows_shorten_steps_with_busy_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = steps("dc-8", 0.002)
    monkeypatch.setattr(module, "WORTHWHILE", 0.0)
    plain = steps("dc-8", 0.002)
    assert min(step.traffic.hot_rows for step in reduced) > 20
    assert max(step.traffic.hot_rows for step in plain) == 0
    taken, before = (np.mean([step.time.total_s for step in run]) for run in (reduced, plain))
    assert taken < 0.96 * before


@pytest.mark.parametrize(("network", "compute_ms"), [("edge-8", 0.002), ("dc-8", 0.2)])
def test_no_row_is_all_reduced_over_slow_links_or_long_compute(
    network: str, compute_ms: float
) -> None:
    assert max(step.traffic.hot_rows for step in steps(network, compute_ms)) == 0


def outlook_of(setup: Setup, shard_ms: float, rest_ms: float) -> SearchState:
    memory = start(make_policy("embroute"), setup).memory(SearchState)
    memory.pace_2[:] = (1e-3 * shard_ms, 1e-3 * rest_ms)
    return memory


@pytest.mark.parametrize("shard_ms", [0.3, 1.0, 1.5, 3.0, 10.0])
@pytest.mark.parametrize("links", [[10.0] * 4, [10.0, 10.0, 10.0, 1.0]])
def test_all_reduced_rows_equal_a_search_through_all_counts(
    links: list[float], shard_ms: float
) -> None:
    """The reference searches all numbers of rows, from the most used row on."""
    source = open_source("avazu")
    setup = Setup(source.schema, star_cluster(links, 10.0), 512, 512, cache=Size(0.2, "share"))
    horizon = Horizon(setup.schema.num_rows, 1)
    batches = Workload(source, setup, 2, 0).batches()
    first, now = (next(batches) for _ in range(2))
    horizon.push(first)
    horizon.push(now)
    horizon.pop()
    batch = horizon.pop().now
    chosen = choose_reduced_rows(batch, setup, outlook_of(setup, shard_ms, 1.0))
    count = np.bincount(batch.unique_of_lookup, minlength=len(batch.rows_U))
    hot = [u for u in np.argsort(-count, kind="stable") if count[u] >= 8 and batch.before_U[u] == 0]
    size, gigabit = 4 * 512, 125e6
    one_way = sum(1 - (3 / 4) ** count[u] for u in hot) * size / (min(links) * gigabit)
    ways = 1 if one_way >= 2 * MIN_CHUNK_S else 2  # pulls beside pushes, or after them
    shard, rest, best = 1e-3 * shard_ms, 1e-3, (max(1e-3 * shard_ms, 1e-3), 0)
    worthwhile = 0.97 * best[0]
    for taken, u in enumerate(hot, 1):
        sharers = 4 * (1 - (3 / 4) ** count[u])
        shard -= sharers * size / (10 * gigabit)
        rest += 1.5 * size / (min(links) * gigabit) - sharers / 4 * ways * size / (10 * gigabit)
        if max(shard, rest) < best[0]:
            best = (max(shard, rest), taken)
    expected = best[1] if best[0] <= worthwhile else 0
    assert chosen.rows.tolist() == hot[:expected]
    assert (expected > 0) == (min(links) == 10.0 or shard_ms > 1.2)
    assert ways == (2 if min(links) == 10.0 else 1)


def test_no_row_is_all_reduced_in_chunked_steps() -> None:
    cluster = replace(star_cluster([1.0] * 4, 10.0), compute_s_per_sample=5e-5)
    source = open_source("avazu")
    setup = Setup(source.schema, cluster, 512, 512, cache=Size(0.1, "share"))
    given = Workload(source, setup, 20, 5)
    reports = list(simulate_steps(make_policy("embroute(effort=300)"), given))
    assert max(step.traffic.hot_rows for step in reports) == 0
    assert max(step.traffic.chunks for step in reports) > 2


def test_learnt_pace_does_not_depend_on_all_reduced_rows() -> None:
    """A relieved step teaches the same pace as an unrelieved step."""
    setup = Setup(open_source("avazu").schema, star_cluster([10.0] * 4, 10.0), 512, 512)
    time = steps("dc-8", 0.2)[0].time
    memory = outlook_of(setup, 0.0, 0.0)
    learn_pace(memory, time, module.NO_REDUCTION)
    plain = memory.pace_2.copy()
    saved = replace(time, shard_s=time.shard_s - 2e-5, allreduce_s=time.allreduce_s + 1e-5)
    memory.pace_2[:] = 0
    learn_pace(memory, saved, module.Reduction(np.arange(3, dtype=np.int32), 2e-5, 1e-5))
    np.testing.assert_allclose(memory.pace_2, plain, rtol=1e-6)
