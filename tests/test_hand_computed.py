"""Every system on two workers and three rows, with the arithmetic written out.

A transfer is (worker, row, kind, record, phase). Workers are 0 and 1; `block` and `robin` give the
first sample to worker 0 and the second to worker 1.
"""

from __future__ import annotations

import numpy as np

from embroute.config.cluster import Cluster, Host, Worker
from embroute.config.spec import Size
from embroute.data.batch import PADDING
from embroute.data.schema import Field, Schema, Table
from embroute.data.window import Horizon
from embroute.kernels import codes
from embroute.planner.interfaces import DispatchContext
from embroute.planner.kernels.cache import find_copies
from embroute.planner.kernels.transfers import StepRows, Transfers
from embroute.planner.plan import Plan, drain_transfers, traffic
from embroute.planner.setup import Setup
from embroute.planner.state import State
from embroute.policies.catalog import make_policy
from embroute.policies.dispatch.esd import hybrid, unit_costs
from embroute.policies.regroup import HotRows
from tests.workloads import Workload, one_row_each, star

Told = list[tuple[int, int, str, str, str]]

KINDS = ("miss", "stale", "update", "evict")
RECORDS = ("value", "whole", "gradient", "delta")
PHASES = ("early", "urgent", "late", "lazy")


def told(moves: Transfers) -> Told:
    columns = (moves.worker, moves.row, moves.kind, moves.record, moves.phase)
    return [
        (w, row, KINDS[kind], RECORDS[record], PHASES[phase])
        for w, row, kind, record, phase in zip(*(c.tolist() for c in columns), strict=True)
    ]


def workload(steps: list[list[list[int]]], rows: int = 3, workers: int = 2) -> Workload:
    """One list of samples per step, one list of rows per sample; adagrad, width 4, three rows."""
    fields = tuple(Field(f"f{i}", 0) for i in range(len(steps[0][0])))
    schema = Schema((Table("t", 3),), fields, ("sample",), labelled=True)
    size = len(steps[0])
    setup = Setup(schema, star(workers), 4, size, "adagrad", Size(rows / 3, "share"))
    return Workload(setup, tuple(one_row_each(s, size * i) for i, s in enumerate(steps)))


def run(name: str, work: Workload) -> tuple[list[Plan], State]:
    policy = make_policy(name)
    state = work.start(policy)
    return [step.plan for step in work.plans(policy, state)], state


def row_sequence(name: str, rows: list[int], capacity: int) -> list[tuple[str, int]]:
    """One worker, one row a step: 'hit' or 'miss', and the row that left, or -1."""
    plans, _ = run(name, workload([[[row]] for row in rows], capacity, workers=1))
    missed = [bool((plan.decision.need_T == codes.MISS).any()) for plan in plans]
    victims = [int(plan.placement.victim_T.max()) for plan in plans]
    return [("miss" if miss else "hit", row) for miss, row in zip(missed, victims, strict=True)]


def test_nocache_transfers_by_hand() -> None:
    """Every touch pulls the value and pushes the gradient: two rows a step, both ways."""
    work = workload([[[0], [0]], [[0], [1]]])
    (first, second), state = run("nocache", work)
    assert told(first.pulls) == [(0, 0, "miss", "value", "early"), (1, 0, "miss", "value", "early")]
    # Row 0 was trained in step 0, so its pull waits; row 1 was not.
    assert told(second.pulls) == [(0, 0, "miss", "value", "late"), (1, 1, "miss", "value", "early")]
    assert [move[2:4] for move in told(second.updates)] == [("update", "gradient")] * 2
    # 4 floats of 4 bytes per value and per gradient.
    assert traffic(second, state.setup).bytes_WKIP.sum() == 4 * 16
    assert len(drain_transfers(state, 1).row) == 0


def test_vanilla_transfers_by_hand() -> None:
    (first, second, third), _ = run("vanilla", workload([[[0], [1]], [[0], [0]], [[0], [1]]]))
    # Sole touchers apply adagrad themselves, so value and state come.
    assert told(first.pulls) == [(0, 0, "miss", "whole", "early"), (1, 1, "miss", "whole", "early")]
    # Row 0 is needed in the next step, row 1 only after it.
    assert told(first.updates) == [
        (0, 0, "update", "gradient", "urgent"),
        (1, 1, "update", "gradient", "lazy"),
    ]
    # Worker 0 kept a fresh copy; worker 1 shares the row and needs no state.
    assert told(second.pulls) == [(1, 0, "miss", "value", "late")]
    assert [move[:2] for move in told(second.updates)] == [(0, 0), (1, 0)]
    # Shared in step 1: nobody's copy is up to date. Row 1 has been alone with worker 1.
    assert told(third.pulls) == [(0, 0, "stale", "whole", "late")]
    assert not len(third.returns.row)


def test_het_validity_step_by_step() -> None:
    """Bound 1. (start, clock) of a copy of row 0, the shard's clock c; a read needs
    clock <= start + 1 and c <= clock + 1."""
    plans, state = run(
        "het(1)", workload([[[0], [0]], [[0], [1]], [[0], [1]], [[0], [2]], [[0], [0]]])
    )
    # Step 0: both pull at c = 0, start 0, and count their update: (0, 1) and (0, 1).
    assert [m[:3] for m in told(plans[0].pulls)] == [(0, 0, "miss"), (1, 0, "miss")]
    # Step 1: worker 0 reads: 1 <= 0 + 1, 0 <= 1 + 1: valid, now (0, 2).
    assert [m[:3] for m in told(plans[1].pulls)] == [(1, 1, "miss")]
    # Step 2: 2 > 0 + 1: push the two updates, c = 2, pull: (2, 2), train: (2, 3).
    assert told(plans[2].returns) == [(0, 0, "update", "delta", "urgent")]
    assert [m[:3] for m in told(plans[2].pulls)] == [(0, 0, "stale")]
    # Each worker asks about its copy, worker 0 in vain: 16 bytes each, and none for a miss.
    checked = [traffic(plan, state.setup).check_bytes_WK.tolist() for plan in plans[:3]]
    assert checked == [[[0], [0]], [[16], [0]], [[16], [16]]]
    # Step 3: 3 <= 2 + 1: valid, (2, 4).
    assert [m[:3] for m in told(plans[3].pulls)] == [(1, 2, "miss")]
    # Step 4: worker 0: 4 > 2 + 1, pushes, c = 4. Worker 1's (0, 1) was valid at c = 2, but now
    # 4 > 1 + 1: it pushes its one update of step 0 as well, and both pull.
    assert told(plans[4].returns) == [
        (0, 0, "update", "delta", "urgent"),
        (1, 0, "update", "delta", "early"),
    ]
    assert [m[:3] for m in told(plans[4].pulls)] == [(0, 0, "stale"), (1, 0, "stale")]
    # Unsent at the end: row 0 at both, and worker 1's rows 1 and 2.
    home = drain_transfers(state, 3)
    assert sorted(zip(home.worker.tolist(), home.row.tolist(), strict=True)) == [
        (0, 0),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def test_het_evicts_lazily() -> None:
    """One slot each: the workers swap rows; deltas leave, and each worker reads before they
    land."""
    (_, second), _ = run("het(5)", workload([[[0], [1]], [[1], [0]]], rows=1))
    assert told(second.evictions) == [
        (0, 0, "evict", "delta", "lazy"),
        (1, 1, "evict", "delta", "lazy"),
    ]
    assert not len(second.returns.row)


def test_het_by_released_clocks_pushes_and_pulls_apart() -> None:
    """Bound 2, and a sample looks up its row twice: each use adds 2 to the pending look-ups."""
    plans, state = run(
        "het(2, clocks=release)",
        workload([[[0, 0], [1, 1]], [[0, 0], [0, 0]], [[2, 2], [0, 0]], [[0, 0], [1, 1]]]),
    )
    # Step 1: worker 0 has 2 + 2 > 2 pending, pushes 4 and keeps its copy, whose version is 4 now.
    assert told(plans[1].updates) == [(0, 0, "update", "delta", "urgent")]
    # Step 2: worker 1's copy of version 0 is 4 behind. It pulls, and its 2 look-ups stay pending;
    # with 2 more it pushes 4, and the version at the shard is 8.
    assert told(plans[2].pulls)[1] == (1, 0, "stale", "whole", "late")
    assert not len(plans[2].returns.row)
    assert told(plans[2].updates) == [(1, 0, "update", "delta", "urgent")]
    # Step 3: worker 0's copy is 8 - 4 behind. It has nothing to push before it pulls.
    assert told(plans[3].pulls) == [(0, 0, "stale", "whole", "late")]
    assert sorted(drain_transfers(state, 3).row.tolist()) == [0, 2]


def test_ssp_reads_copies_for_as_many_steps_as_its_bound() -> None:
    plans, state = run("ssp(2)", workload([[[0], [1]]] * 5))
    assert [len(plan.pulls.row) for plan in plans] == [2, 0, 0, 2, 0]
    assert told(plans[3].pulls)[0] == (0, 0, "stale", "whole", "late")
    assert all(len(plan.updates.row) == 2 for plan in plans)
    assert not len(drain_transfers(state, 3).row)


def test_asp_waits_for_no_update() -> None:
    plans, _ = run("asp", workload([[[0], [1]]] * 4))
    assert all(told(plan.updates)[0] == (0, 0, "update", "gradient", "lazy") for plan in plans)
    # Three slots: the second step's rows find one free, the later ones wait for a slot.
    assert [told(plan.pulls)[0] for plan in plans[:2]] == [(0, 0, "miss", "value", "early")] * 2


def test_allreduce_moves_only_gradients() -> None:
    plans, state = run("allreduce", workload([[[0], [1]], [[0], [0]], [[1], [2]]]))
    moved = [traffic(plan, state.setup) for plan in plans]
    assert [(step.hot_rows, int(step.rows_WKIP.sum())) for step in moved] == [
        (2, 0),
        (1, 0),
        (2, 0),
    ]
    assert drain_transfers(state, 1).row.tolist() == [0, 2, 1]


def test_herald_allocates_and_pushes_on_demand() -> None:
    steps = [[[0], [1]], [[1], [0]], [[0], [0]], [[2], [1]]]
    plans, _ = run("herald", workload(steps))
    # Nobody has anything: ties start at worker step % 2 = 0.
    assert plans[0].worker_S.tolist() == [0, 1]
    # Worker 1 has row 1, worker 0 has row 0: nothing moves, and nothing is pushed.
    assert plans[1].worker_S.tolist() == [1, 0]
    assert not any(len(m.row) for m in (plans[1].pulls, plans[1].returns, plans[0].updates))
    # Two samples of row 0, one place each: worker 0's update of step 1 must come home first.
    assert plans[2].worker_S.tolist() == [0, 1]
    assert told(plans[2].returns) == [(0, 0, "update", "whole", "urgent")]
    assert told(plans[2].pulls) == [(1, 0, "miss", "value", "late")]
    assert [m[:4] for m in told(plans[2].updates)] == [
        (0, 0, "update", "gradient"),
        (1, 0, "update", "gradient"),
    ]
    # Row 2 is nobody's: the tie starts at worker 3 % 2 = 1, which is full for row 1 afterwards.
    assert plans[3].worker_S.tolist() == [1, 0]
    # Row 1 was trained last in step 1, so that its way home and here runs beside step 2.
    assert told(plans[3].returns) == [(1, 1, "update", "whole", "early")]
    assert told(plans[3].pulls) == [
        (0, 1, "miss", "whole", "early"),
        (1, 2, "miss", "whole", "early"),
    ]


def slow_and_fast() -> Cluster:
    """A row of 4 floats with adagrad's 4 (32 bytes) takes 1 s to worker 0 and 10 s to worker 1."""
    hosts = (Host("shard", 1e9, 1e9), Host("fast", 32.0, 32.0), Host("slow", 3.2, 3.2))
    return Cluster(hosts, (Worker(1), Worker(2)), (0,))


def test_esd_unit_costs_by_hand() -> None:
    """T = (1, 10). After step 0 worker 0 holds an unpushed update of row 0, worker 1 of row 1."""
    work = workload([[[0, PADDING], [1, PADDING]], [[0, 1], [2, PADDING]]])
    setup = Setup(work.setup.schema, slow_and_fast(), 4, 2, "adagrad", Size(1.0, "share"))
    policy = make_policy("esd")
    work = Workload(setup, work.batches)
    state = work.start(policy)
    plan = next(work.plans(policy, state)).plan
    # (1, 10) for either sample: both deals cost 11, and blocks decide.
    assert plan.worker_S.tolist() == [0, 1]
    horizon = Horizon(3, 1)
    for batch in work.batches:
        horizon.push(batch)
    horizon.pop()
    window = horizon.pop()
    now = window.now
    rows = StepRows(now.rows_U, now.before_U, now.later_U, setup.arena_of(now.rows_U), 1)
    found = find_copies(state.caches.cells, now.rows_U)
    units_SW, unit_s = unit_costs(
        DispatchContext(window, state, rows, found, np.array([1, 1]), np.empty(0, np.int32))
    )
    cost_SW = units_SW * unit_s
    # Sample (0, 1): at worker 0 row 0 is there; row 1 costs its pull 1 and worker 1's push 10.
    # At worker 1 row 1 is there; row 0 costs its pull 10 and worker 0's push 1.
    # Row 2: nobody has it.
    assert cost_SW.tolist() == [[11, 11], [1, 10]]


def test_esd_hybrid_splits_by_saving() -> None:
    cost_SW = np.array([[0.0, 5, 6], [0, 4, 20], [7, 0, 3]])
    one_each = np.ones(3, np.int64)
    # Less the means 7, 9, 29 (in thirds): -7 6 -11, -7 3 31, 14 -9 -20. Lowest less the mean of
    # the sample: -7, -16, -15. Heu: 1 to worker 0, 2 to worker 2, and 1 is left for 0: 5 + 0 + 3.
    assert hybrid(cost_SW, one_each, 0.0).tolist() == [1, 0, 2]
    # Opt: 6 + 0 + 0.
    assert hybrid(cost_SW, one_each, 1.0).tolist() == [2, 0, 1]
    # A third by Opt: Heu settles 1 and 2, Opt has one place left for 0.
    assert hybrid(cost_SW, one_each, 1 / 3).tolist() == [1, 0, 2]
    # Two thirds by Opt: Heu settles 1, Opt deals 6 + 0.
    assert hybrid(cost_SW, one_each, 2 / 3).tolist() == [2, 0, 1]
    # Less the means 0 and 5: 0 -4, 0 4. Sample 0 is Heu's and takes worker 1, Opt has the rest.
    assert hybrid(np.array([[0.0, 1], [0, 9]]), np.ones(2, np.int64), 0.5).tolist() == [1, 0]


COLD, HOT = [[0, 1], [0, 2]], [[0, 0], [0, 0]]


def test_fae_swaps_hot_and_cold_batches_by_hand() -> None:
    """Row 0 is hot. Rounds of two batches: a cold one, then a hot one."""
    plans, state = run("fae(hot=1rows, rate=50, buffer=4)", workload([COLD, HOT, COLD, HOT]))
    assert [plan.now.batch.hot for plan in plans] == [False, True, False, True]
    assert state.memory(HotRows).rows.tolist() == [0]
    # Cold, as vanilla: row 0 is shared, rows 1 and 2 are not.
    assert [m[:4] for m in told(plans[0].pulls)] == [
        (0, 0, "miss", "value"),
        (0, 1, "miss", "whole"),
        (1, 0, "miss", "value"),
        (1, 2, "miss", "whole"),
    ]
    assert len(plans[0].updates.row) == 4
    # To hot: both replicas are pulled anew; then row 0's gradient (4 floats) is all-reduced.
    assert [m[:4] for m in told(plans[1].pulls)] == [
        (0, 0, "stale", "whole"),
        (1, 0, "stale", "whole"),
    ]
    moved = traffic(plans[1], state.setup)
    assert (moved.hot_rows, moved.hot_bytes, moved.rows_WKIP.sum()) == (1, 16, 2)
    # To cold: the row comes home once, from worker 0 % 2; both replicas are still right.
    assert told(plans[2].returns) == [(0, 0, "update", "whole", "urgent")]
    assert not len(plans[2].pulls.row)
    assert len(plans[2].updates.row) == 4
    # The end, on a hot batch: one row is left to drain.
    assert drain_transfers(state, 1).row.tolist() == [0]


def test_scars_all_reduces_hot_rows_in_every_step() -> None:
    """Row 0 is looked up most and replicated; cold rows are pulled and pushed at every use."""
    plans, state = run("scars(hot=1rows)", workload([COLD, COLD, HOT]))
    assert state.memory(HotRows).rows.tolist() == [0]
    assert [m[:4] for m in told(plans[0].pulls)] == [
        (0, 0, "miss", "whole"),
        (0, 1, "miss", "value"),
        (1, 0, "miss", "whole"),
        (1, 2, "miss", "value"),
    ]
    assert [m[:4] for m in told(plans[1].pulls)] == [
        (0, 1, "miss", "value"),
        (1, 2, "miss", "value"),
    ]
    assert [m[:4] for m in told(plans[1].updates)] == [
        (0, 1, "update", "gradient"),
        (1, 2, "update", "gradient"),
    ]
    assert not any(len(moves.row) for moves in (plans[2].pulls, plans[2].updates))
    assert [traffic(plan, state.setup).hot_rows for plan in plans] == [1, 1, 1]
    assert drain_transfers(state, 1).row.tolist() == [0]


def test_bagpipe_keeps_rows_until_their_last_use_in_the_window() -> None:
    none = [PADDING]
    steps = [[[0], [1]], [[0], [2]], [[1], [1]], [none, none], [[0], none]]
    plans, state = run("bagpipe(2)", workload(steps))
    # Rows 0 and 1 come again within two steps: pulled whole, kept, nothing pushed.
    assert [m[:4] for m in told(plans[0].pulls)] == [
        (0, 0, "miss", "whole"),
        (1, 1, "miss", "whole"),
    ]
    assert not len(plans[0].updates.row)
    # Row 0's next use is step 4, out of sight: worker 0 writes it back. Row 2 is used once only:
    # pulled bare, its gradient goes home.
    assert [m[:4] for m in told(plans[1].pulls)] == [(1, 2, "miss", "value")]
    assert told(plans[1].updates) == [
        (0, 0, "evict", "whole", "lazy"),
        (1, 2, "update", "gradient", "lazy"),
    ]
    # Row 1 is shared: worker 1's update of step 0 comes home beside step 1.
    assert told(plans[2].returns) == [(1, 1, "update", "whole", "early")]
    assert told(plans[2].pulls) == [(0, 1, "miss", "value", "early")]
    # Row 0 again, for the last time.
    assert [m[:4] for m in told(plans[4].pulls)] == [(0, 0, "miss", "value")]
    assert len(drain_transfers(state, 1).row) == 0


def test_eviction_orders_choose_different_victims() -> None:
    """Two slots, one worker: the victim of the third row differs between the orders."""
    rows = [0, 0, 1, 2, 0, 1]
    mixed = "dispatch=block sync=on-demand evict="
    # Least recently used: 0 leaves for 2, 1 for 0, 2 for 1.
    assert row_sequence(mixed + "lru", rows, 2)[3:] == [("miss", 0), ("miss", 1), ("miss", 2)]
    # Least often: 1 (once) leaves for 2 while 0 (twice) stays; then 2 (once) leaves for 1.
    assert row_sequence(mixed + "lfu", rows, 2)[3:] == [("miss", 1), ("hit", -1), ("miss", 2)]
    # At step 3 row 0 is next used at 4, row 1 at 5: 1 leaves. At step 5 nothing is used again,
    # and row 2 was seen last at step 3, row 0 at step 4.
    sight = row_sequence(mixed + "clairvoyant(3)", rows, 2)
    assert sight[3:] == [("miss", 1), ("hit", -1), ("miss", 2)]


def test_unbounded_never_evicts() -> None:
    rows = [0, 1, 2, 0, 1, 2]
    assert [hit for hit, _ in row_sequence("unbounded", rows, 1)] == ["miss"] * 3 + ["hit"] * 3
    assert [hit for hit, _ in row_sequence("vanilla", rows, 1)] == ["miss"] * 6


def test_quotas_go_by_share_then_largest_fraction() -> None:
    schema = Schema((Table("t", 1),), (Field("f", 0),))
    setup = Setup(schema, star(3), shares=(4.0, 3.0, 1.0))
    assert setup.quotas(8).tolist() == [4, 3, 1]
    # 1.5, 1.125, 0.375: one each by the whole part, the third to the largest fraction.
    assert setup.quotas(3).tolist() == [2, 1, 0]
    # 2.5, 1.875, 0.625: 2 and 1, then the fractions 0.875 and 0.625 before 0.5.
    assert setup.quotas(5).tolist() == [2, 2, 1]
    idle = Setup(schema, star(3), shares=(1.0, 0.0, 1.0))
    assert idle.quotas(5).tolist() == [3, 0, 2]
