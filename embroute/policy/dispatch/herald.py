"""Herald's location-aware allocation (NSDI 2024; the allocator is called LAIA)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import FRESH
from embroute.kernels.jit import kernel
from embroute.policy.dispatch.scores import per_sample
from embroute.policy.parts import Dispatch, View

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@kernel
def _greedy(score_SW: F32, quotas_W: I64, first: int) -> I32:
    """Each sample in order to the highest score with room; equal scores go in turn from `first`."""
    num_samples, num_workers = score_SW.shape
    left_W = quotas_W.copy()
    worker_S = np.empty(num_samples, np.int32)
    for s in range(num_samples):
        best = -1
        for turn in range(num_workers):
            w = (first + turn) % num_workers
            if left_W[w] > 0 and (best < 0 or score_SW[s, w] > score_SW[s, best]):
                best = w
        worker_S[s] = best
        left_W[best] -= 1
    return worker_S


@kernel
def _fresh(copies_UW: I32, num_rows: int) -> F32:
    out_UW = np.empty((num_rows, copies_UW.shape[1]), np.float32)
    for u in range(num_rows):
        for w in range(copies_UW.shape[1]):
            out_UW[u, w] = (copies_UW[u, w] // FRESH) & 1
    return out_UW


def herald(tables: int = 0, ties: str = "rotate") -> Dispatch:
    """Each sample to the worker that has most of its rows up to date.

    `tables`: score only that many tables, those with the highest degree of infrequency; 0 is all.
    `ties`: `rotate` starts at another worker each step (the paper's rule); `first` always prefers
    the lowest worker number, so that samples nobody knows keep meeting on the same workers.
    """

    def choose(view: View) -> I32:
        now, setup = view.window.now, view.state.setup
        fresh_UW = _fresh(view.copies_UW, len(now.rows_U))
        if 0 < tables < len(setup.schema.tables):
            scored = view.state.ranking[:tables]
            fresh_UW *= np.isin(setup.table_of(now.rows_U), scored)[:, None]
        first = view.window.step % len(view.quotas_W) if ties == "rotate" else 0
        return _greedy(per_sample(fresh_UW, now), view.quotas_W, first)

    return Dispatch("herald", choose, needs_access=tables > 0)
