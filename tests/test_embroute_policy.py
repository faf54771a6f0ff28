"""The workers that embroute uses, and the samples that each worker gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from embroute.config.cluster_file import open_cluster
from embroute.config.spec import Size
from embroute.cost.step_time import step_time
from embroute.data.open import open_source
from embroute.kernels.array_types import F64, I32, I64
from embroute.kernels.codes import EARLY, GRADIENT, LATE, NUM_PHASES, URGENT, VALUE, VALUE_STATE
from embroute.planner.interfaces import Assignment, Candidate, DispatchContext, WarmStart
from embroute.planner.plan import traffic
from embroute.planner.plan_stream import pick_candidate, plans, start
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.policies.embroute import active_workers, dispatch
from embroute.policies.embroute.forecast import (
    PULL_BYTES,
    PUSH_BYTES,
    RowCounts,
    TouchedRows,
    predict_traffic,
    spill_overflow,
    touch_matrix,
)
from embroute.policies.embroute.problem import pace_effort
from embroute.policies.embroute.quotas import CostCurves, clip_shares, solve_quotas
from embroute.policies.embroute.search import move_sample, refit
from embroute.policies.embroute.search_state import SearchOptions, SearchState
from embroute.policies.embroute.uses import UNTRAINED_USE, USE_KINDS, Nodes
from embroute.simulator.simulation import Workload, measure_named, simulate_steps
from tests.sizes import marked_full, sized
from tests.test_anneal import BATCH, BATCHES, loads_of, total, window

STEPS = sized(24, 50)


def job(network: str, compute_ms: float, dim: int = 64, steps: int = 50) -> Workload:
    source = open_source("online-retail")
    cluster = replace(open_cluster(network), compute_s_per_sample=1e-3 * compute_ms)
    setup = Setup(source.schema, cluster, dim, batch_size=64 * cluster.num_workers)
    return Workload(source, setup, steps, 10)


def samples(policy: str, given: Workload) -> I64:
    """Samples of each worker in each measured step."""
    steps = [
        step for step in simulate_steps(make_policy(policy), given) if step.step >= given.warmup
    ]
    return np.array([step.traffic.samples_W for step in steps])


def told_by_hand(nodes: Nodes, sets: list[set[int]], batch: list[int], record: F64) -> F64:
    """The traffic by the rules of docs/policy.md, row by row."""
    workers = 3
    out = np.zeros((max(batch) + 1, workers, 2, NUM_PHASES))
    left: list[int] = []
    for n, (used, t) in enumerate(zip(sets, batch, strict=True)):
        before, kind = int(nodes.before_N[n]), int(nodes.class_N[n])
        owner = left[before] if before >= 0 else int(nodes.owner_N[n])
        pull, push = (LATE if kind >= 2 else EARLY), (URGENT if kind % 2 else EARLY)
        alone = len(used) == 1
        left.append(next(iter(used)) if alone else -1)
        if used == {owner}:
            continue
        if owner >= 0:
            out[t, owner, PUSH_BYTES, URGENT if kind >= 2 else EARLY] += record[VALUE_STATE, 0]
        for w in used:
            pulls = kind < UNTRAINED_USE and w != owner
            out[t, w, PULL_BYTES, pull] += pulls * record[VALUE_STATE if alone else VALUE, 0]
            out[t, w, PUSH_BYTES, push] += 0 if alone else record[GRADIENT, 0]
    return out


def told(
    nodes: Nodes, deal: TouchedRows, record: F64, room: I64, homes: int = 1
) -> tuple[F64, RowCounts]:
    """The bytes of all uses, with evictions of a cache of this room."""
    found = predict_traffic(nodes, deal, record, room, homes)
    spill_overflow(found.bytes_THWDP, found.counts, record[VALUE_STATE], room)
    return found.bytes_THWDP, found.counts


@pytest.mark.parametrize("seed", range(5))
def test_predicted_traffic_of_a_window_equals_the_rules(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, batches, workers = 7, 4, 3
    count = rows * batches
    before = np.arange(count, dtype=np.int32) - rows
    before[before < 0] = -1
    owner = random.integers(-1, workers, count).astype(np.int32)
    kind = random.integers(0, UNTRAINED_USE, count).astype(np.uint8)
    kind[:2], owner[:2] = [UNTRAINED_USE, UNTRAINED_USE + 1], -1  # nobody has used these before
    nodes = Nodes(before, owner, kind, np.zeros(count, np.float32))
    lookups = [random.choice(workers, random.integers(1, 4), replace=False) for _ in range(count)]
    node_L = np.repeat(np.arange(count), [len(used) for used in lookups]).astype(np.int32)
    worker_S = np.concatenate(lookups).astype(np.int32)
    touched_NW = touch_matrix(node_L, np.arange(len(node_L) + 1), worker_S, count, workers)
    record = np.array([[4.0], [12.0], [5.0], [12.0]])
    room = np.full((workers, 1), 10**6)
    deal = TouchedRows(touched_NW, np.arange(batches + 1) * rows)
    found, crowds = told(nodes, deal, record, room)
    sets = [set(used.tolist()) for used in lookups]
    batch = [n // rows for n in range(count)]
    assert found[:, 0].tolist() == told_by_hand(nodes, sets, batch, record).tolist()
    assert crowds.rows_TWA.sum() == len(node_L)


def test_predicted_traffic_counts_evictions_of_a_full_cache() -> None:
    before = np.array([-1, -1, -1, 0], np.int32)
    nodes = Nodes(before, np.full(4, -1, np.int32), np.zeros(4, np.uint8), np.zeros(4, np.float32))
    deal = TouchedRows(np.ones((4, 1), np.uint8), np.array([0, 1, 3, 4]))
    record = np.array([[4.0]] * 4)
    roomy, tight = (told(nodes, deal, record, np.array([[slots]]))[0][:, 0] for slots in (4, 2))
    assert roomy[2].sum() == 0
    assert tight[2, 0, PULL_BYTES].sum() == tight[2, 0, PUSH_BYTES].sum() == 4
    # Both slots are in use until the step before is done.
    assert tight[2, 0, PULL_BYTES, LATE] == tight[2, 0, PUSH_BYTES, URGENT] == 4


@pytest.mark.parametrize(("slots", "waiting"), [(8, 0), (7, 0), (6, 1), (5, 2), (4, 3)])
def test_predicted_pulls_wait_when_two_steps_do_not_fit(slots: int, waiting: int) -> None:
    """Four rows, then the last of them and three new rows, at one worker with two shards."""
    before = np.array([-1, -1, -1, -1, 3, -1, -1, -1], np.int32)
    home = np.array([0, 0, 0, 0, 0, 0, USE_KINDS, USE_KINDS], np.uint8)
    nodes = Nodes(before, np.full(8, -1, np.int32), home, np.zeros(8, np.float32))
    deal = TouchedRows(np.ones((8, 1), np.uint8), np.array([0, 4, 8]))
    found, _ = told(nodes, deal, np.full((4, 1), 8.0), np.array([[slots]]), 2)
    pulls_P = found[1, :, 0, PULL_BYTES].sum(0)
    assert pulls_P[LATE] == pytest.approx(8.0 * waiting)
    assert pulls_P.sum() == pytest.approx(8.0 * 3)


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("seed", range(8))
def test_solved_quotas_are_near_the_shortest_step(seed: int, parts: int) -> None:
    random = np.random.default_rng(seed)
    workers, batch = 3, 12
    start, urgent, late = np.cumsum(random.random((3, workers, batch + 1)), 2)
    start[:, 0] = urgent[:, 0] = late[:, 0] = 0
    late *= 0.7
    least, most = np.array([1, 0, 0]), np.array([12, 6, 12])
    grown = CostCurves(start, urgent, urgent / parts, late, late / parts)
    quota = solve_quotas(grown, least, most)
    everyone = np.arange(workers)
    assert quota.sum() >= batch
    assert (quota >= least).all()
    assert (quota <= most).all()

    def step(given: I64) -> float:
        begin, push, pull = (times[everyone, given] for times in (start, urgent, late))
        turns = (
            begin + np.maximum(pull / parts, pull - lead) + np.maximum(push, push / parts + lead)
            for lead in np.linspace(0, pull.max(), 200)
        )
        return float(min(turn.max() for turn in turns))

    best = min(
        step(np.array(given))
        for given in itertools.product(range(batch + 1), repeat=workers)
        if sum(given) == batch and given[0] >= 1 and given[1] <= 6
    )
    assert step(quota) <= 1.1 * best


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_refit_keeps_quotas_and_costs(workers: int) -> None:
    uses = window(4, workers)
    for s in range(BATCHES * BATCH):
        move_sample(uses, s, 0)
    loads = loads_of(uses, workers)
    refit(uses, loads, 1, 6)
    dealt = uses.worker_S.reshape(BATCHES, BATCH)
    assert np.bincount(dealt[1], minlength=workers).tolist() == loads.quota_TW[1].tolist()
    assert loads.load_TW[1].tolist() == loads.quota_TW[1].tolist()
    assert (dealt[[0, 2]] == 0).all()
    assert (loads.price_TW[1, 1:] <= 0).all()
    again = window(4, workers)
    for s in range(BATCHES * BATCH):
        move_sample(again, s, int(uses.worker_S[s]))
    assert total(uses) == pytest.approx(total(again), abs=1e-3)


def test_clipped_shares_keep_their_ranges() -> None:
    share = np.array([0.7, 0.3, 0.0], np.float32)
    ranges = np.array([[0.1, 0.1, 0.1], [0.4, 0.5, 0.5]], np.float32)
    kept = clip_shares(share, ranges)
    assert kept.sum() == pytest.approx(1)
    assert (kept >= ranges[0] - 1e-6).all()
    assert (kept <= ranges[1] + 1e-6).all()


def test_workers_with_slow_links_get_no_samples_without_compute() -> None:
    taken = samples("embroute", job("edge-4", 0.0, steps=STEPS))
    assert (taken[:, 2:] == 0).all()
    assert (taken.sum(1) == 256).all()


def test_all_workers_get_samples_with_long_compute() -> None:
    taken = samples("embroute", job("edge-4", 2.0, steps=STEPS))
    assert taken.min() > 50


def test_warm_start_chooses_the_fastest_candidate() -> None:
    """Each candidate plans the first batches; slow candidates stop early."""
    given = job("edge-4", 0.01)
    stream, tried = list(given.batches())[: active_workers.WARM_START_STEPS], []
    rehearsal = make_policy("embroute(effort=300)").dispatch.warm_start
    assert rehearsal is not None
    ways = rehearsal.candidates(given.setup, 256)
    assert [way.least_s for way in ways] == pytest.approx([6.4e-4, 2.56e-3 / 3, 1.28e-3, 2.56e-3])

    def watched(way: Candidate) -> Candidate:
        def choose(view: DispatchContext) -> Assignment:
            tried.append((ways.index(way), view.window.step))
            return way.trial.choose(view)

        return way._replace(trial=replace(way.trial, choose=choose))

    watching = WarmStart(
        active_workers.WARM_START_STEPS, lambda setup, samples: [watched(way) for way in ways]
    )
    policy = make_policy("embroute(effort=300)")
    chosen = pick_candidate(policy, watching, stream, given.setup).dispatch
    times = [
        np.mean(
            [
                step_time(traffic(step.plan, given.setup), given.setup.cluster).total_s
                for step in list(
                    plans(
                        replace(policy, dispatch=way.trial),
                        iter(stream),
                        start(policy, given.setup),
                    )
                )[20:]
            ]
        )
        for way in ways
    ]
    assert chosen is ways[int(np.argmin(times))].dispatch
    assert (0, 39) in tried
    assert (3, 0) not in tried  # one worker computes for longer than two take


def test_warm_start_skips_candidates_that_compute_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step, in which the chosen candidate plans its window."""
    steps, dealt = [], active_workers._try_workers

    def spied(view: DispatchContext, *given: object, **named: object) -> object:
        steps.append(view.window.step)
        return dealt(view, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(active_workers, "_try_workers", spied)
    samples("embroute", job("edge-4", 2.0, steps=STEPS))
    assert set(steps) == {0}


def test_warm_start_gives_up_slow_candidates() -> None:
    assert not active_workers._is_hopeless([20.0], 3, 10.0)  # shares were not corrected yet
    assert not active_workers._is_hopeless([30.0, 20.0], 2, 10.0)
    assert active_workers._is_hopeless([30.0, 20.0, 18.0], 1, 10.0)
    assert not active_workers._is_hopeless([20.0, 9.0, 12.0], 1, 10.0)
    assert not active_workers._is_hopeless([20.0, 20.0], 0, np.inf)


def test_slow_machines_get_fewer_samples() -> None:
    taken = samples("embroute", job("uneven-4", 2.0, steps=STEPS)).mean(0)
    assert taken[2:].max() < 0.7 * taken[:2].min()


def test_equal_and_given_quotas_stay_fixed() -> None:
    given = job("edge-4", 0.05, steps=STEPS)
    assert (samples("embroute(objective=cost)", given) == 64).all()
    assert (samples("embroute(quotas=equal)", given) == 64).all()
    named = replace(given, setup=replace(given.setup, shares=(3.0, 3.0, 1.0, 1.0)))
    assert (samples("embroute", named) == [96, 96, 32, 32]).all()


def test_floor_and_ceiling_bound_the_quotas() -> None:
    given = job("edge-4", 0.0, steps=STEPS)
    assert samples("embroute(floor=0.1)", given).min() >= 25
    taken = samples("embroute(ceiling=0.3+0.3+0.3+1)", given)
    assert taken[:, :3].max() <= 77


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("embroute(floor=0.4)", "sum to at most 1"),
        ("embroute(ceiling=0.1)", "ceilings to at least 1"),
        ("embroute(floor=0.1+0.1)", "floor names 2 workers, the cluster has 4"),
        ("embroute(floor=0.2+0+0+0, ceiling=0.1+1+1+1)", "floor of worker 0"),
        ("embroute(floor=2)", "floor must be between 0 and 1"),
        ("embroute(quotas=equal, floor=0.1)", "floor and ceiling are for quotas=free"),
        ("embroute(objective=cost, quotas=free)", "quotas must be equal with objective=cost"),
        ("embroute(objective=cost, effort=auto)", "effort=auto follows the time of a step"),
        ("embroute(effort=some)", "effort, if not auto, must be a number"),
    ],
)
def test_contradicting_embroute_options_are_refused(policy: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measure_named(policy, job("edge-4", 0.0))


def test_auto_effort_follows_the_step_time() -> None:
    """More effort in long steps, within bounds, and by the model's time alone."""
    memory = start(make_policy("embroute"), job("edge-4", 0.0).setup).memory(SearchState)
    given = SearchOptions(paced=True)
    for took, effort in ((0.0, 200), (0.001, 200), (0.01, 976), (1.0, SearchOptions.effort)):
        known = memory._replace(took_1=np.array([took], np.float32))
        assert pace_effort(given, known, 256).effort == effort
        assert pace_effort(SearchOptions(), known, 256).effort == SearchOptions.effort
    steps = [
        list(simulate_steps(make_policy("embroute(effort=auto)"), job("edge-4", 0.05, steps=STEPS)))
        for _ in "ab"
    ]
    first, again = ([step.transmission_cost_s for step in run] for run in steps)
    assert first == again


@pytest.mark.parametrize("compute_ms", [0.0, 0.2])
@pytest.mark.parametrize("network", marked_full(["edge-4", "uneven-4", "dc-4"], ["edge-4"]))
def test_embroute_is_never_much_slower_than_rivals(network: str, compute_ms: float) -> None:
    given = job(network, compute_ms, 512)
    names = ["esd(1)", "herald", "esd(1, workers=0)", "esd(1, workers=0+1)"]
    best = min(measure_named(name, given).step_time_s for name in names)
    assert measure_named("embroute", given).step_time_s <= 1.02 * best


@pytest.mark.parametrize("cache", [pytest.param(180, marks=pytest.mark.full), 200])
def test_small_caches_keep_quotas_within_their_ranges(
    cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that does not fit is planned again, within the same ranges."""
    asked, plain = [], dispatch._fallbacks

    def spied(view: DispatchContext, search: SearchOptions, quotas_W: I64) -> Iterator[I32]:
        asked.append(view.window.step)
        return plain(view, search, quotas_W)

    monkeypatch.setattr(dispatch, "_fallbacks", spied)
    given = job("edge-4", 0.0)
    given = replace(given, setup=replace(given.setup, cache=Size(cache, "rows")))
    steps = simulate_steps(make_policy("embroute(floor=0+0.3+0+0, ceiling=0.2+1+1+1)"), given)
    taken = np.array([step.traffic.samples_W for step in steps])
    assert asked
    assert taken[:, 0].max() <= 52
    assert taken[:, 1].min() >= 76
    asked.clear()
    named = replace(given, setup=replace(given.setup, shares=(3.0, 3.0, 2.0, 2.0)))
    named = replace(named, setup=replace(named.setup, cache=Size(cache - 30, "rows")))
    with suppress(ValueError):  # a cache too small for a step, in the end
        for step in simulate_steps(make_policy("embroute"), named):
            assert step.traffic.samples_W.tolist() == named.setup.quotas(256).tolist()
    assert asked


@pytest.mark.full
def test_embroute_uses_one_worker_where_one_is_fastest() -> None:
    """With empty caches two workers are hardly slower, because all pulled rows are new."""
    source = open_source("criteo-kaggle")
    setup = Setup(source.schema, open_cluster("colo-2"), 64, 256, cache=Size(0.02, "share"))
    given = Workload(source, setup, 30, 10)
    alone = measure_named("esd(1, workers=0)", given).step_time_s
    assert alone < 0.8 * measure_named("esd(1)", given).step_time_s
    assert measure_named("embroute", given).step_time_s < 1.01 * alone
