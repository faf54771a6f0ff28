"""One stream of plans from a policy and data: the simulator prices it, the coordinator sends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from embroute.cost.step_time import step_time
from embroute.data.batch import Batch
from embroute.data.window import REMEMBERED, Horizon
from embroute.kernels.array_types import F64, I64
from embroute.planner.decide import advance, plan_step
from embroute.planner.interfaces import Policy, WarmStart
from embroute.planner.plan import Plan, traffic
from embroute.planner.row_store import row_store_of
from embroute.planner.setup import Setup
from embroute.planner.state import State, empty_state, map_first

FAR = 1.25  # times the best: a way to begin that will not catch up


@dataclass(frozen=True)
class Step:
    """A plan, the state after it, and how long it took to make.

    `window_s`: finding distinct rows and their uses. `decision_s`: dispatch, plan, laws, state.
    """

    plan: Plan
    state: State
    decision_s: float
    window_s: float


def start(policy: Policy, setup: Setup, counts_R: I64 | None = None) -> State:
    """The empty state of a run, its memory at hand.

    A policy with a hot set chooses it from access counts.
    """
    state = _empty(policy, setup, counts_R)
    map_first(state)
    return state


def _empty(policy: Policy, setup: Setup, counts_R: I64 | None = None) -> State:
    """The same, its memory still the system's: for a rehearsal, which reaches little of it."""
    if setup.optimizer in policy.sync.refused_optimizers:
        raise ValueError(
            f"--optimizer {setup.optimizer}: {policy.name} merges deltas, and deltas of "
            f"{setup.optimizer} do not add up; use sgd, adagrad or rowwise-adagrad"
        )
    store = row_store_of(policy)
    store.check_hosts(policy, setup.cluster)
    setup = replace(setup, cache=store.cache_size(policy, setup.cache))
    if policy.regroup is None:
        return empty_state(setup, policy.needs)
    if counts_R is None:
        raise ValueError(f"{policy.name} needs access counts to choose its hot rows")
    return empty_state(setup, policy.needs, policy.regroup.choose_hot(counts_R, setup))


def plans(policy: Policy, batches: Iterator[Batch], state: State) -> Iterator[Step]:
    """Decide step after step; the time to read data is not the decision's.

    A state of a later step goes on where it was: `batches` are all batches, from the first. A
    policy that rehearses reads some before the first step and tries ways to begin on them.
    """
    rehearsal = policy.dispatch.warm_start
    if rehearsal is not None and state.step == 0:
        first = list(islice(batches, rehearsal.steps))
        batches = chain(first, batches)
        policy = pick_candidate(policy, rehearsal, first, state.setup)
    yield from _decided(policy, batches, state)


def pick_candidate(
    policy: Policy, rehearsal: WarmStart, batches: list[Batch], setup: Setup
) -> Policy:
    """The policy with the way to begin whose steps are shortest once it has settled."""
    best, shortest = policy, np.full(len(batches), np.inf)
    ways = rehearsal.candidates(setup, len(batches[0])) if batches else []
    if len(ways) == 1:
        return replace(policy, dispatch=ways[0].dispatch)
    for way in ways:
        if way.least_s < _later(shortest):
            taken = _tried(replace(policy, dispatch=way.trial), batches, setup, shortest)
            if _later(taken) < _later(shortest):
                best, shortest = replace(policy, dispatch=way.dispatch), taken
    return best


def _later(taken: F64) -> float:
    """Mean of the second half: the first fills caches."""
    return float(taken[len(taken) // 2 :].mean())


def _tried(policy: Policy, batches: list[Batch], setup: Setup, shortest: F64) -> F64:
    """What steps take; those that are not worth a trial take for ever.

    Given up is what its caches do not hold, and what is far behind the best so far.
    """
    taken = np.full(len(batches), np.inf)
    half, begin = len(batches) // 2, len(batches) // 3
    try:
        for t, step in enumerate(_decided(policy, iter(batches), _empty(policy, setup))):
            taken[t] = step_time(traffic(step.plan, setup), setup.cluster).total_s
            if t == half and taken[begin:t].sum() > FAR * shortest[begin:t].sum():
                break
    except ValueError:
        pass
    return taken


def _decided(policy: Policy, batches: Iterator[Batch], state: State) -> Iterator[Step]:
    """Decide step after step."""
    if policy.regroup is not None:
        batches = policy.regroup.stream(batches, state)
    # A window knows when rows were used in the last steps, so those pass through it again.
    first = max(0, state.step - REMEMBERED)
    batches = islice(batches, first, None)
    horizon = Horizon(state.setup.schema.num_rows, policy.lookahead, first)
    window_s = 0.0
    exhausted = False
    while True:
        while not exhausted and not horizon.full:
            batch = next(batches, None)
            exhausted = batch is None
            if batch is not None:
                begin = time.perf_counter()
                horizon.push(batch)
                window_s += time.perf_counter() - begin
        if horizon.empty:
            return
        begin = time.perf_counter()
        window = horizon.pop()
        if window.step < state.step:
            continue
        popped = time.perf_counter()
        plan = plan_step(policy, window, state)
        advance(policy, state, plan)
        decided = time.perf_counter()
        yield Step(plan, state, decided - popped, window_s + popped - begin)
        window_s = 0.0
