"""One stream of plans from a policy and data: the simulator prices it, the coordinator sends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from embroute.config import Size
from embroute.data.batch import Batch
from embroute.data.window import REMEMBERED, Horizon
from embroute.policy.decide import advance, plan_step
from embroute.policy.parts import Policy
from embroute.policy.plan import Plan
from embroute.policy.setup import Setup
from embroute.policy.state import State, empty_state


@dataclass(frozen=True)
class Step:
    """A plan, the state after it, and how long it took to make.

    `window_s`: finding distinct rows and their uses. `decision_s`: dispatch, plan, laws, state.
    """

    plan: Plan
    state: State
    decision_s: float
    window_s: float


def start(policy: Policy, setup: Setup, counts_R: npt.NDArray[np.int64] | None = None) -> State:
    """The empty state of a run; a policy with a hot set chooses it from access counts."""
    if setup.optimizer in policy.sync.refused_optimizers:
        raise ValueError(
            f"--optimizer {setup.optimizer}: {policy.name} merges deltas, and deltas of "
            f"{setup.optimizer} do not add up; use sgd, adagrad or rowwise-adagrad"
        )
    if policy.unbounded:
        setup = replace(setup, cache=Size(1.0, "share"))
    if policy.regroup is None:
        return empty_state(setup, policy.needs)
    if counts_R is None:
        raise ValueError(f"{policy.name} needs access counts to choose its hot rows")
    return empty_state(setup, policy.needs, policy.regroup.choose_hot(counts_R, setup))


def plans(policy: Policy, batches: Iterator[Batch], state: State) -> Iterator[Step]:
    """Decide step after step; the time to read data is not the decision's.

    A state of a later step goes on where it was: `batches` are all batches, from the first.
    """
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
        advance(state, plan)
        decided = time.perf_counter()
        yield Step(plan, state, decided - popped, window_s + popped - begin)
        window_s = 0.0
