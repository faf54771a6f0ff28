"""Leave an update where it was made until another worker needs the row. Exact.

The communication plan of Herald (NSDI 2024), which ESD and BagPipe build on too.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import numpy as np

from embroute.config.signature import Between
from embroute.kernels.array_types import I32, U8
from embroute.kernels.codes import (
    DIRTY,
    EXCLUSIVE,
    FRESH,
    GRADIENT,
    MISS,
    NEW,
    NO_HOLDER,
    NOTHING,
    SEVERAL,
    SHARED,
    VALUE_STATE,
)
from embroute.kernels.jit import kernel
from embroute.kernels.memory import index
from embroute.kernels.touches import Touches
from embroute.planner.interfaces import Sync, SyncContext
from embroute.planner.kernels.cache import classify_needs
from embroute.planner.kernels.transfers import Decision
from embroute.policies.sync.decision import make_decision, touch_modes


@kernel
def copies_to_return(touches: Touches, copies_UW: I32, only_U: I32) -> tuple[I32, I32]:
    """Dirty copies of rows that another worker than their holder touches: workers and rows."""
    first_U, of_row_T, worker_T = touches.first_U, touches.of_row_T, touches.worker_T
    num_workers = copies_UW.shape[1]
    capacity = len(only_U) + num_workers * int((only_U == SEVERAL).sum())
    worker, unique = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    count = 0
    for u in range(len(only_U)):
        first, last = first_U[u], first_U[u + 1]
        if first == last or only_U[u] == NO_HOLDER:
            continue
        sole = worker_T[of_row_T[first]] if last - first == 1 else -1
        # One holder to look at, or all workers if several hold the row.
        start = max(only_U[u], 0)
        for w in range(start, start + 1 if only_U[u] >= 0 else num_workers):
            if copies_UW[u, w] & DIRTY and w != sole:
                worker[count], unique[count] = w, u
                count += 1
    return worker[:count].copy(), unique[:count].copy()


@kernel
def _init_untouched(need_T: U8, touches: Touches, number_U: I32) -> None:
    """Rows without a number were never touched: their value is the initial value."""
    for t in range(len(need_T)):
        if number_U[index(touches.unique_T[t])] == 0:
            need_T[t] = NEW


def decide_on_demand(context: SyncContext, local_init: bool = False) -> Decision:
    """Sole touchers keep their update; gradients of shared rows go to the shard.

    `local_init`: untouched rows are not pulled if their initial values follow from the seed.
    """
    need_T = classify_needs(context.cell_T, FRESH)
    if local_init and context.state.setup.seeded:
        _init_untouched(need_T, context.touches, context.copies.number_U)
    mode_T = touch_modes(context.touches)
    push_T = np.where(mode_T == SHARED, GRADIENT, NOTHING).astype(np.uint8)
    returned = copies_to_return(context.touches, context.copies_UW, context.copies.only_U)
    return make_decision(need_T, mode_T, push_T, returned)


def on_demand() -> Sync:
    """Push a dirty row when, and only when, another worker's sample needs it or it is evicted."""
    return Sync("on-demand", decide_on_demand)


def pipelined_on_demand(local_init: bool = False) -> Sync:
    """On demand, with late pulls in chunks beside the urgent pushes."""
    decide = partial(decide_on_demand, local_init=local_init)
    return Sync("pipelined", decide, pipelined=True)


def until_last_use(lookahead: Annotated[int, Between(1, 10_000)] = 200) -> Sync:
    """BagPipe (SOSP 2023): a copy leaves the cache after its row's last use in the window.

    Rows without another use are not synchronised among workers: their gradient goes to the shard.
    Reconstruction: copies move through the shards; BagPipe's trainers exchange them directly.
    """

    def decide(context: SyncContext) -> Decision:
        decision = decide_on_demand(context)
        # The window may be longer than `lookahead`: another part of the policy may need more.
        last_T = context.rows.later_U[context.touches.unique_T] > context.rows.step + lookahead
        alone_T = decision.mode_T == EXCLUSIVE
        # A copy pulled for this step alone needs no optimizer state: the shard applies it.
        single_T = last_T & alone_T & (decision.need_T == MISS)
        mode_T = np.where(single_T, SHARED, decision.mode_T).astype(np.uint8)
        push_T = np.where(single_T, GRADIENT, decision.push_T)
        push_T = np.where(last_T & alone_T & ~single_T, VALUE_STATE, push_T).astype(np.uint8)
        return decision._replace(mode_T=mode_T, push_T=push_T, drop_T=last_T.astype(np.uint8))

    return Sync("until-last-use", decide, lookahead=lookahead)
