"""One stream of plans from a policy and data, for the simulator and for the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from embroute.config.spec import shown
from embroute.cost.step_time import step_time
from embroute.data.batch import Batch
from embroute.data.window import REMEMBERED, Horizon
from embroute.kernels.array_types import F64, I64
from embroute.planner.decide import advance, plan_step
from embroute.planner.interfaces import PartMemory, Policy, RunStart, WarmStart
from embroute.planner.plan import Plan, traffic
from embroute.planner.row_store import row_store_of
from embroute.planner.setup import Setup
from embroute.planner.state import Memory, PlanError, State, empty_state, naming_part, prefault

# What a checkpoint can save of a policy's memory.
_INTEGERS, _FLOATS = ("uint8", "int8", "int16", "int32", "int64"), ("float16", "float32", "float64")
MEMORY_DTYPES = ("bool", *_INTEGERS, *_FLOATS)
GIVE_UP = 1.25  # times the best step time: a candidate that will not catch up


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
    """The empty state of a run, with its first pages mapped.

    A policy with a hot set chooses it from access counts.
    """
    state = _empty(policy, setup, counts_R)
    prefault(state)
    return state


def _empty(policy: Policy, setup: Setup, counts_R: I64 | None = None) -> State:
    """The empty state without mapped pages: a warm start reaches few of them."""
    if setup.optimizer in policy.sync.refused_optimizers:
        raise ValueError(
            f"--optimizer {setup.optimizer}: {policy.name} merges deltas, and deltas of "
            f"{setup.optimizer} do not add up; use sgd, adagrad or rowwise-adagrad"
        )
    store = row_store_of(policy)
    store.check_hosts(policy, setup.cluster)
    setup = replace(setup, cache=store.cache_size(policy, setup.cache))
    if policy.regroup is not None and counts_R is None:
        raise ValueError(f"{policy.name} needs access counts to choose its hot rows")
    known = RunStart(setup, counts_R)
    kinds = {memory.kind: memory for memory in policy.memories}
    memories = [_first_memory(policy, memory, known) for memory in kinds.values()]
    return empty_state(setup, policy.evict.num_buckets, memories)


def _first_memory(policy: Policy, declared: PartMemory, known: RunStart) -> Memory:
    """A part's memory before the first step, in the form that a checkpoint can save."""
    name = declared.kind.__name__
    with naming_part(policy.name, f"init of {name}"):
        memory = declared.init(known)
    values = memory._asdict() if isinstance(memory, tuple) and hasattr(memory, "_asdict") else None
    if values is None or not isinstance(memory, declared.kind):
        raise PlanError(
            f"{policy.name}: the memory {name} must be a NamedTuple of arrays, its init returned "
            f"{shown(memory)}"
        )
    for field, value in values.items():
        kind = value.dtype.name if isinstance(value, np.ndarray) else None
        if kind not in MEMORY_DTYPES:
            raise PlanError(
                f"{policy.name}: {name}.{field} must be an array of numbers, which checkpoints can "
                f"save ({', '.join(MEMORY_DTYPES)}), got {kind or shown(value)}"
            )
    return memory


def plans(policy: Policy, batches: Iterator[Batch], state: State) -> Iterator[Step]:
    """Decide step after step; a step's times leave out the time to read data.

    `batches` are all batches, from the first; a state of a later step continues from its step. A
    policy with a warm start simulates its candidates on the first batches before the first step.
    """
    warm_start = policy.dispatch.warm_start
    if warm_start is not None and state.step == 0:
        first = list(islice(batches, warm_start.steps))
        batches = chain(first, batches)
        policy = pick_candidate(policy, warm_start, first, state.setup)
    yield from _decide_steps(policy, batches, state)


def pick_candidate(
    policy: Policy, warm_start: WarmStart, batches: list[Batch], setup: Setup
) -> Policy:
    """The policy with the candidate whose later steps are shortest."""
    best, shortest_T = policy, np.full(len(batches), np.inf)
    candidates = warm_start.candidates(setup, len(batches[0])) if batches else []
    if len(candidates) == 1:
        return replace(policy, dispatch=candidates[0].dispatch)
    for candidate in candidates:
        if candidate.least_s < _later_mean(shortest_T):
            trial = replace(policy, dispatch=candidate.trial)
            seconds_T = _trial_times(trial, batches, setup, shortest_T)
            if _later_mean(seconds_T) < _later_mean(shortest_T):
                best, shortest_T = replace(policy, dispatch=candidate.dispatch), seconds_T
    return best


def _later_mean(seconds_T: F64) -> float:
    """Mean of the second half: the first half fills caches."""
    return float(seconds_T[len(seconds_T) // 2 :].mean())


def _trial_times(policy: Policy, batches: list[Batch], setup: Setup, shortest_T: F64) -> F64:
    """The times of simulated steps; infinite after a trial is given up.

    A trial is given up if a cache is too small or the times are far above the best so far.
    """
    seconds_T = np.full(len(batches), np.inf)
    half, begin = len(batches) // 2, len(batches) // 3
    try:
        for t, step in enumerate(_decide_steps(policy, iter(batches), _empty(policy, setup))):
            seconds_T[t] = step_time(traffic(step.plan, setup), setup.cluster).total_s
            if t == half and seconds_T[begin:t].sum() > GIVE_UP * shortest_T[begin:t].sum():
                break
    except ValueError:  # the small cache
        pass
    return seconds_T


def _decide_steps(policy: Policy, batches: Iterator[Batch], state: State) -> Iterator[Step]:
    """Decide step after step."""
    if policy.regroup is not None:
        batches = policy.regroup.stream(batches, state)
    # A window knows when rows were used in recent steps, so their batches pass through it again.
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
