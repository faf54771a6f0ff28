"""The referee and the library's own check detect plans that break a law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from embroute.kernels import codes
from embroute.planner.decide import advance, plan_step
from embroute.planner.interfaces import Policy
from embroute.planner.kernels.transfers import Transfers
from embroute.planner.laws import check
from embroute.planner.plan import Plan, drain_transfers
from embroute.planner.state import PlanError, State
from embroute.policies.catalog import make_policy
from tests.moves import LawBrokenError
from tests.referee import Referee
from tests.workloads import long_workload

Mutation = Callable[[Plan], Plan | None]


def part_of(plan: Plan, part: str) -> Transfers:
    moves = getattr(plan, part)
    assert isinstance(moves, Transfers)
    return moves


def with_part(plan: Plan, part: str, moves: Transfers) -> Plan:
    """The plan with one of its lists replaced."""
    lists = {name: part_of(plan, name) for name in ("returns", "evictions", "pulls", "updates")}
    lists[part] = moves
    home, evicted, pulled, sent = lists.values()
    return replace(plan, returns=home, evictions=evicted, pulls=pulled, updates=sent)


def cut(moves: Transfers, index: int = 0) -> Transfers:
    """The transfers without one of them."""
    kept = np.arange(len(moves.row)) != index
    worker, row, slot, arena, kind, record, phase = moves
    sizes = (arena[kept], kind[kept], record[kept], phase[kept])
    return Transfers(worker[kept], row[kept], slot[kept], *sizes)


def lose(part: str) -> Mutation:
    """Remove the first transfer of a part of the plan."""

    def mutate(plan: Plan) -> Plan | None:
        moves = part_of(plan, part)
        return with_part(plan, part, cut(moves)) if len(moves.row) else None

    return mutate


def relabel(part: str, column: str, old: int, new: int) -> Mutation:
    """Change the phase or record of the first transfer that has the old value."""

    def mutate(plan: Plan) -> Plan | None:
        moves = part_of(plan, part)
        values = (moves.phase if column == "phase" else moves.record).copy()
        if old not in values:
            return None
        values[np.argmax(values == old)] = new
        changed = moves._replace(phase=values) if column == "phase" else moves
        changed = moves._replace(record=values) if column == "record" else changed
        return with_part(plan, part, changed)

    return mutate


def stale_as_hit(plan: Plan) -> Plan | None:
    """Read a copy that should be pulled again."""
    stale = np.flatnonzero(plan.decision.need_T == codes.STALE)
    if not len(stale):
        return None
    need_T = plan.decision.need_T.copy()
    need_T[stale[0]] = codes.HIT
    pulled = np.flatnonzero(plan.pulls.kind == codes.STALE_PULL)[0]
    decision = plan.decision._replace(need_T=need_T)
    home = plan.returns if plan.decision.record != codes.DELTA else cut(plan.returns)
    return replace(plan, decision=decision, pulls=cut(plan.pulls, pulled), returns=home)


def no_stale_pulls(plan: Plan) -> Plan | None:
    """Read all copies as they are; some of them lack no update."""
    kept, need_T = plan.pulls.kind != codes.STALE_PULL, plan.decision.need_T
    pulls = Transfers(*(column[kept] for column in plan.pulls))
    need_T = np.where(need_T == codes.STALE, codes.HIT, need_T).astype(np.uint8)
    return replace(plan, decision=plan.decision._replace(need_T=need_T), pulls=pulls)


def slots(exchange: bool) -> Mutation:
    """Let two touches of one worker swap slots, or share a slot."""

    def mutate(plan: Plan) -> Plan | None:
        slot_T = plan.placement.slot_T.copy()
        slot_T[:2] = slot_T[:2][::-1] if exchange else slot_T[0]
        return replace(plan, placement=plan.placement._replace(slot_T=slot_T))

    return mutate


def alone(plan: Plan) -> Plan | None:
    """Let only one of several touchers update a row."""
    shared = np.flatnonzero(plan.decision.mode_T == codes.SHARED)
    if not len(shared):
        return None
    decision = plan.decision
    mode_T, push_T = decision.mode_T.copy(), decision.push_T.copy()
    mode_T[shared[0]], push_T[shared[0]] = codes.EXCLUSIVE, codes.NOTHING
    return replace(
        plan,
        decision=decision._replace(mode_T=mode_T, push_T=push_T),
        updates=cut(plan.updates),
    )


def other_worker(plan: Plan) -> Plan:
    """Assign the last worker's samples to the first worker."""
    return replace(plan, worker_S=np.where(plan.worker_S == 3, 0, plan.worker_S).astype(np.int32))


def nobody(plan: Plan) -> Plan:
    """Assign a sample to a worker that does not exist."""
    return replace(plan, worker_S=np.where(plan.worker_S == 3, 4, plan.worker_S).astype(np.int32))


LATE, EARLY, URGENT, LAZY = codes.LATE, codes.EARLY, codes.URGENT, codes.LAZY
STATE, BARE = codes.VALUE_STATE, codes.VALUE
# A policy, what is done to one of its plans, what the referee says, and what the library's own
# check says where it looks at that.
FAULTS = [
    ("herald", lose("returns"), "law 3|old value", "updates home"),
    ("herald", stale_as_hit, "law 3", "exact reads"),
    ("het(1)", stale_as_hit, "law 4", "bounded"),
    ("het(1, clocks=release)", stale_as_hit, "law 4", "bounded"),
    ("ssp(1)", no_stale_pulls, "law 4", "bounded"),
    ("ssp(2)", lose("updates"), "law 2", ""),
    ("asp", lose("updates"), "law 2", ""),
    ("esd", lose("evictions"), "law 2", "no update lost"),
    ("het(3)", lose("evictions"), "law 2", "no update lost"),
    ("vanilla", lose("updates"), "law 2|lazy|law 3", ""),
    ("bagpipe(2)", lose("pulls"), "finds row", ""),
    ("vanilla", slots(exchange=True), "finds row", ""),
    ("vanilla", slots(exchange=False), "finds row", "capacity"),
    ("vanilla", other_worker, "look-ups without|grouped", ""),
    ("vanilla", nobody, "grouped|no such worker", "every sample once"),
    ("vanilla", relabel("pulls", "phase", LATE, EARLY), "early pull", ""),
    ("esd", relabel("returns", "phase", URGENT, EARLY), "trained in the step before", ""),
    ("vanilla", relabel("updates", "phase", URGENT, LAZY), "lazy but needed", ""),
    ("vanilla", relabel("updates", "phase", LAZY, URGENT), "urgent but not needed", ""),
    ("esd", relabel("pulls", "record", STATE, BARE), "record", ""),
    ("in-place", lose("updates"), "law 2", ""),
    ("in-place", alone, "has modes", "updates in place"),
    ("in-place", other_worker, "look-ups without|grouped", ""),
    ("in-place", nobody, "grouped|no such worker", "every sample once"),
    ("in-place", relabel("updates", "phase", URGENT, LAZY), "lazy but needed", ""),
    ("in-place", relabel("updates", "phase", LAZY, URGENT), "urgent but not needed", ""),
    ("fae(hot=0.2, rate=50, buffer=8)", lose("returns"), "law 2|law 3|old value", ""),
    ("scars(hot=0.1)", lose("pulls"), "lacks row|finds row", ""),
]


def checked(plan: Plan, state: State, policy: Policy) -> None:
    """Run the library's check on clean marks, as planning leaves them."""
    state.caches.slot_WCF[..., codes.MARK] = 0
    check(plan, state, policy)


def disturbed(policy: Policy, mutate: Mutation, law: str) -> None:
    """Replay a run with one changed plan; `law` is the message of the library's own check."""
    workload = long_workload("adagrad")
    state = workload.start(policy)
    referee, broken = Referee(policy, state.setup), False
    for window in workload.windows(policy, state):
        plan = plan_step(policy, window, state)
        bad = None if broken or plan.step < 3 else mutate(plan)
        if bad is not None and law:
            checked(plan, state, policy)
            with pytest.raises(PlanError, match=law):
                checked(bad, state, policy)
        broken = broken or bad is not None
        referee.watch(bad or plan)
        advance(policy, state, plan)
        if broken:
            referee.drained(drain_transfers(state, policy.sync.record))


@pytest.mark.parametrize(("name", "mutate", "complaint", "law"), FAULTS)
def test_referee_detects_a_broken_plan(
    name: str, mutate: Mutation, complaint: str, law: str
) -> None:
    with pytest.raises(LawBrokenError, match=complaint):
        disturbed(make_policy(name), mutate, law)


@pytest.mark.parametrize("name", ["esd", "het(3)", "scars(hot=0.1)"])
def test_referee_detects_a_drain_that_forgets_a_row(name: str) -> None:
    policy, workload = make_policy(name), long_workload("sgd")
    state = workload.start(policy)
    referee = Referee(policy, state.setup)
    for step in workload.plans(policy, state):
        referee.watch(step.plan)
    with pytest.raises(LawBrokenError, match="drain loses updates"):
        referee.drained(cut(drain_transfers(state, policy.sync.record)))
