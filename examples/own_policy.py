"""A policy of one's own, with a memory: a sample goes to the worker that last trained its user.

    embroute compare --policies vanilla,own_policy:sticky,'own_policy:sticky(field=1)'

A dispatch alone gets the usual other parts. `dispatch=own_policy:sticky sync=het(10)` names others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute import (
    Assignment,
    Batch,
    Dispatch,
    DispatchContext,
    PartMemory,
    Plan,
    RunStart,
    State,
)


class LastWorker(NamedTuple):
    """Who trained each row last; a checkpoint saves it."""

    worker_R: npt.NDArray[np.int32]  # -1: no worker yet


def sticky(field: int = 0) -> Dispatch:
    """Samples follow a row of one field, as far as quotas allow."""

    def rows_of(batch: Batch) -> npt.NDArray[np.int64]:
        return batch.rows[batch.offsets[field :: batch.num_fields][: len(batch)]]

    def init(start: RunStart) -> LastWorker:
        return LastWorker(np.full(start.setup.schema.num_rows, -1, np.int32))

    def choose(context: DispatchContext) -> Assignment:
        left_W = context.quotas_W.copy()
        worker_S = context.state.memory(LastWorker).worker_R[rows_of(context.window.now.batch)]
        for sample, wanted in enumerate(worker_S):
            if wanted < 0 or not left_W[wanted]:
                worker_S[sample] = left_W.argmax()
            left_W[worker_S[sample]] -= 1
        return Assignment(worker_S)

    def learn(state: State, plan: Plan) -> None:
        state.memory(LastWorker).worker_R[rows_of(plan.now.batch)] = plan.worker_S

    return Dispatch("sticky", choose, PartMemory(LastWorker, init, learn), looks_at_caches=False)
