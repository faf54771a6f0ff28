"""The laws hold for the whole catalog on random workloads, as an independent replay sees them."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embroute.config.spec import Size
from embroute.data.schema import Field, Schema, Table
from embroute.kernels import codes
from embroute.planner.decide import advance, plan_step
from embroute.planner.interfaces import Policy
from embroute.planner.plan import Plan, drain_transfers, traffic
from embroute.planner.plan_stream import pick_candidate
from embroute.planner.setup import Setup
from embroute.planner.state import State
from embroute.policies.catalog import SYSTEMS, make_policy
from tests.jobs import slow_shards
from tests.moves import demand
from tests.referee import Referee
from tests.sizes import marked_full, sized
from tests.workloads import (
    SETTINGS,
    Workload,
    draw_batches,
    long_workload,
    one_row_each,
    star,
    workloads,
)

Arrays = dict[str, npt.NDArray[np.float64]]  # of any type

# Beside every system with its defaults, which a new entry of the catalog joins by itself.
VARIANTS = [
    "het(0)",
    *SETTINGS,
    "het(4, clocks=release)",
    "ssp(0)",
    "ssp(2)",
    "unbounded(of=allreduce)",
    "fae(hot=0.2, rate=25)",
    "fae(hot=0.5, buffer=4, shuffle=yes)",
    "scars(hot=0.1)",
    "scars(hot=0.6, buffer=3, shuffle=yes)",
    "bagpipe(2)",
    "bagpipe(20)",
    "embroute(effort=50, ahead=1)",
    "embroute(effort=auto, ahead=6)",
    "embroute(objective=cost)",
    "embroute(init=pull)",
    "unbounded(of=esd(1))",
    "unbounded(of=fae)",
    "unbounded(of=het(2))",
    "dispatch=block sync=none",
    "dispatch=esd sync=het(10) evict=clairvoyant",
    "dispatch=herald sync=het(2) evict=lfu",
    "dispatch=herald sync=write-through evict=light-lfu",
    "dispatch=robin sync=on-demand evict=clairvoyant(3)",
    "dispatch=esd(0.5) sync=on-demand evict=lfu",
    "dispatch=robin sync=until-last-use(10) evict=clairvoyant(3)",
    "dispatch=esd sync=until-last-use(3) evict=lru",
    "dispatch=esd sync=on-demand evict=stale-first",
    "dispatch=esd sync=pipelined",
    "dispatch=esd sync=pipelined(init=local)",
    "dispatch=robin sync=het(4) evict=stale-first",
    "dispatch=esd sync=het(2,clocks=release) evict=lfu",
    "dispatch=herald sync=ssp(3) evict=clairvoyant",
]
POLICIES = [*SYSTEMS, *VARIANTS]

few = settings(max_examples=sized(3, 12), suppress_health_check=list(HealthCheck))
NEEDS = re.compile(r"worker (\d+) needs (\d+) rows of width (\d+).* in step (\d+)")


def arrays(value: object, name: str = "") -> Arrays:
    """Every array and number inside a plan or a state, by name."""
    found: Arrays = {}
    if isinstance(value, np.ndarray | int | float | bool):
        return {name: np.array(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        for key, item in value._asdict().items():
            found |= arrays(item, f"{name}.{key}")
    elif is_dataclass(value):
        for part in fields(value):
            found |= arrays(getattr(value, part.name), f"{name}.{part.name}")
    return found


def snapshot(state: State) -> Arrays:
    """Everything in a state except the planner's scratch marks."""
    found = arrays(state)
    found[".caches.slot_WCF"][..., codes.MARK] = 0
    found[".caches.planning"][:] = 0
    return found


def same(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        assert np.array_equal(array, other[name]), name


def enlarged(workload: Workload, message: str) -> Workload:
    """The workload with the cache size that a refusal asks for."""
    setup = workload.setup
    share_W = [size.amount for size in setup.cache_W]
    found = NEEDS.search(message)
    if found is None:
        assert "do not fit the cache" in message
        share_W = [share + 0.2 for share in share_W]
    else:
        worker, arena = int(found[1]), setup.arenas.index(int(found[3]))
        needed = int(found[2]) / int(setup.rows_A[arena])
        assert needed > share_W[worker], message
        share_W[worker] = needed
    if isinstance(setup.cache, Size):
        share_W = [max(share_W)] * len(share_W)
    sizes = tuple(Size(min(1.0, share), "share") for share in share_W)
    return workload.with_cache(sizes if isinstance(setup.cache, tuple) else sizes[0])


def play(policy: Policy, workload: Workload, compare_every: int = 1) -> Referee:
    """Replay a workload under the referee, with larger caches after each refusal."""
    try:
        state = workload.start(policy)
        referee = Referee(policy, state.setup)
        for step in workload.plans(policy, state):
            referee.watch(step.plan)
            counts_match(referee, step.plan)
            if step.plan.step % compare_every == 0:
                states_match(referee, state)
                referee.drained(drain_transfers(state, policy.sync.record))
    except ValueError as refusal:
        return play(policy, enlarged(workload, str(refusal)), compare_every)
    samples = sum(map(len, workload.batches))
    referee.finish(drain_transfers(state, policy.sync.record), list(range(samples)))
    if not policy.order_changed:
        assert len(referee.steps) == len(workload.batches)
        assert [sorted(numbers) for numbers in referee.steps] == [
            batch.dense[:, 0].astype(int).tolist() for batch in workload.batches
        ]
    return referee


def counts_match(referee: Referee, plan: Plan) -> None:
    """Assert that traffic equals the referee's counts, and lists have their lengths."""
    setup, moved, batch = referee.setup, traffic(plan, referee.setup), plan.now.batch
    assert np.array_equal(moved.rows_WKIP, referee.rows_WKIP)
    assert np.array_equal(moved.bytes_WKIP, referee.bytes_WKIP)
    hot = {row for (_, row), mode in referee.touched.items() if mode == codes.REPLICA}
    assert moved.hot_rows == len(hot)
    assert moved.hot_bytes == sum(4 * referee.width_R[row] for row in hot)
    lengths = 1 + batch.dense.shape[1] + (batch.num_fields if setup.schema.has_bags else 0)
    for worker in range(setup.num_workers):
        mine = np.flatnonzero(plan.worker_S == worker)
        lookups = sum(int(np.diff(batch.sample_offsets)[s]) for s in mine)
        assert moved.samples_W[worker] == len(mine)
        assert moved.sample_bytes_W[worker] == 4 * (lengths * len(mine) + lookups)
        touches = sum(toucher == worker for toucher, _ in referee.touched)
        begun = sum(maker == worker for maker, _ in referee.begun)
        entries = referee.rows_WKIP[worker].sum() + touches + 2 * len(hot) + 2 * begun
        assert moved.plan_bytes_W[worker] == 4 * entries
    assert moved.plan_bytes_K.tolist() == (4 * referee.rows_WKIP.sum((0, 2, 3))).tolist()


def states_match(referee: Referee, state: State) -> None:
    """Assert that the library's state equals the replay: held, slot, fresh, dirty."""
    if referee.policy.sync.shared_memory:
        touched = {row for row, updates in referee.made.items() if updates}
        assert set(np.flatnonzero(state.caches.cells.number_R).tolist()) == touched
        return
    cell_RW = state.caches.cells.cell_NW[state.caches.cells.number_R]
    cells = {
        (int(w), int(r)): int(cell_RW[r, w]) for r, w in zip(*np.nonzero(cell_RW), strict=True)
    }
    found = {(w, row): s for w, slots in enumerate(referee.slot_of) for row, s in slots.items()}
    assert {key: (cell & codes.SLOT_MASK) - 1 for key, cell in cells.items()} == found
    dirty = {key for key, cell in cells.items() if cell & codes.DIRTY}
    mine = referee.dirty()
    if referee.replicates:
        # Every replica has the update; exactly one of them is charged with bringing it home.
        assert dirty <= mine
        assert sorted(row for _, row in dirty) == sorted({row for _, row in mine})
    else:
        assert dirty == mine
    for (worker, row), cell in cells.items():
        value = referee.copies[worker][found[worker, row]].value
        right = bool(cell & codes.FRESH) == (value == referee.all_updates(row))
        demand(right or not referee.policy.exact, "fresh: worker", worker, "row", row)


def trainable(policy: Policy, workload: Workload) -> Workload:
    """The workload with an optimizer that the policy does not refuse."""
    if workload.setup.optimizer in policy.sync.refused_optimizers:
        return replace(workload, setup=replace(workload.setup, optimizer="adagrad"))
    return workload


@pytest.mark.parametrize("name", POLICIES)
@given(workload=workloads())
@few
def test_random_workloads_keep_the_laws(name: str, workload: Workload) -> None:
    policy = make_policy(name)
    play(policy, trainable(policy, workload))


@pytest.mark.parametrize("name", marked_full(POLICIES, SYSTEMS))
def test_long_runs_keep_the_laws(name: str) -> None:
    referee = play(make_policy(name), long_workload("rowwise-adagrad"), compare_every=25)
    assert sum(referee.made.values()) > 2000


def test_runs_with_all_reduced_rows_keep_the_laws() -> None:
    """In some steps some rows are all-reduced, enter full caches, and leave again."""
    long = long_workload("rowwise-adagrad")
    setup = replace(long.setup, cluster=slow_shards(3, 2), batch_size=24, shares=())
    batches = draw_batches(setup.schema, [24] * sized(49, 149) + [5], 7)
    policy, crowded = make_policy("embroute(quotas=equal)"), Workload(setup, batches)
    play(policy, crowded, compare_every=sized(10, 1))
    rows = [step.plan.replicated_U for step in crowded.plans(policy, crowded.start(policy))]
    assert 10 < sum(len(reduced) > 0 for reduced in rows) < len(rows)


@pytest.mark.parametrize("name", marked_full(POLICIES, SYSTEMS))
@given(workload=workloads())
@settings(few, max_examples=sized(2, 4))
def test_planning_changes_no_state_and_repeats(name: str, workload: Workload) -> None:
    """Law 6: only `advance` changes state."""
    policy = make_policy(name)
    workload = trainable(policy, workload).with_cache(Size(1.0, "share"))
    one, other = workload.start(policy), workload.start(policy)
    replayed = workload.plans(policy, other)
    if policy.dispatch.warm_start is not None:  # which `plans` does before the first step
        batches = list(workload.batches)
        policy = pick_candidate(policy, policy.dispatch.warm_start, batches, workload.setup)
    for window in workload.windows(policy, one):
        before = snapshot(one)
        plan = plan_step(policy, window, one)
        same(before, snapshot(one))
        advance(policy, one, plan)
        same(arrays(plan), arrays(next(replayed).plan))
    assert next(replayed, None) is None
    same(snapshot(one), snapshot(other))


@pytest.mark.parametrize("name", ["vanilla", "het(1)", "esd", "fae", "bagpipe(2)", "embroute"])
def test_planning_a_step_twice_gives_the_same_plan(name: str) -> None:
    policy, workload = make_policy(name), long_workload("sgd")
    state = workload.start(policy)
    for _, window in zip(range(20), workload.windows(policy, state), strict=False):
        plan = plan_step(policy, window, state)
        same(arrays(plan), arrays(plan_step(policy, window, state)))
        advance(policy, state, plan)


# Policies whose dispatch does not look at caches: what a step needs is the same in every run.
BLIND = [name for name in POLICIES if not make_policy(name).dispatch.looks_at_caches]


@pytest.mark.parametrize("name", [n for n in BLIND if not make_policy(n).regroup])
@given(workload=workloads())
@settings(few, max_examples=sized(2, 6))
def test_cache_refusal_names_exactly_the_rows_needed(name: str, workload: Workload) -> None:
    """The cache that a refusal asks for passes the worker's step; a smaller cache fails."""
    policy = make_policy(name)
    workload = trainable(policy, workload).with_cache(Size(0.0, "share"))
    for _ in range(8):
        message = refusal(policy, workload)
        if not message:
            return
        found = NEEDS.search(message)
        assert found is not None
        assert not policy.unbounded
        larger = enlarged(workload, message)
        again = NEEDS.search(refusal(policy, larger))
        assert again is None or again.groups() != found.groups()
        assert again is None or int(again[4]) >= int(found[4])
        arena = workload.setup.arenas.index(int(found[3]))
        rows = int(workload.setup.rows_A[arena])
        smaller = workload.with_cache(Size((int(found[2]) - 1) / rows, "share"))
        less = NEEDS.search(refusal(policy, smaller))
        assert less is not None
        assert int(less[4]) <= int(found[4])
        workload = larger


def refusal(policy: Policy, workload: Workload) -> str:
    """The planner's error about the cache, or an empty text."""
    try:
        for _ in workload.plans(policy, workload.start(policy)):
            pass
    except ValueError as error:
        return str(error)
    return ""


def two_widths(cache: float) -> Workload:
    """Five rows of width 2 and five of width 4; a sample looks up one of each."""
    schema = Schema((Table("a", 5), Table("b", 5)), (Field("a", 0), Field("b", 1)))
    setup = Setup(schema, star(1), (2, 4), 3, cache=Size(cache, "share"))
    samples = [[0, 5]] * 3, [[1, 6], [2, 7], [3, 8]]
    return Workload(setup, tuple(one_row_each(s, 3 * i) for i, s in enumerate(samples)))


@pytest.mark.parametrize("name", ["fae(hot=2rows)", "scars(hot=2rows)"])
def test_cache_refusal_counts_hot_rows_by_width(name: str) -> None:
    """One hot row of each width and three cold rows touched: four slots of that width."""
    message = refusal(make_policy(name), two_widths(0.4))
    found = NEEDS.search(message)
    assert found is not None
    assert int(found[2]) == 4, message
    assert refusal(make_policy(name), two_widths(0.8)) == ""


@pytest.mark.parametrize("name", ["fae(hot=2rows)", "scars(hot=2rows)", "allreduce"])
def test_replicated_rows_must_fit_the_smallest_cache(name: str) -> None:
    workload = long_workload("sgd")
    sizes = [Size(1.0, "share")] * 4
    assert refusal(make_policy(name), workload.with_cache(tuple(sizes))) == ""
    sizes[2] = Size(1, "rows")
    workload = workload.with_cache(tuple(sizes))
    with pytest.raises(ValueError, match=r"--cache 1 rows: worker 2 needs|of 0 rows per worker"):
        list(workload.plans(make_policy(name), workload.start(make_policy(name))))


@pytest.mark.parametrize("name", ["het(1)", "dispatch=esd sync=het(2)"])
def test_run_of_het_refuses_adam(name: str) -> None:
    with pytest.raises(ValueError, match=r"adam: .* merges deltas"):
        long_workload("adam").start(make_policy(name))
    long_workload("adam").start(make_policy("het(0)"))


@given(st.data())
@settings(few, max_examples=sized(10, 30))
def test_quotas_are_whole_and_fair(data: st.DataObject) -> None:
    """Quotas add up, stay within one of their share, and a zero share gets nothing."""
    workers = data.draw(st.integers(1, 5))
    shares = data.draw(
        st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=workers, max_size=workers).filter(
            sum
        )
    )
    schema = Schema((Table("t", 1),), (Field("f", 0),))
    setup = Setup(schema, star(workers), shares=tuple(shares))
    samples = data.draw(st.integers(0, 100))
    quotas = setup.quotas(samples)
    assert quotas.sum() == samples
    for quota, share in zip(quotas, shares, strict=True):
        assert abs(quota - samples * share / sum(shares)) < 1
        assert share or not quota
