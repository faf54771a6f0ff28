"""ESD (arXiv 2512.21615): dispatch by expected transmission cost over unequal links."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import DIRTY, FRESH
from embroute.kernels.jit import kernel
from embroute.policy.assign import assign
from embroute.policy.dispatch.scores import per_sample
from embroute.policy.parts import Dispatch, View

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


@kernel
def _row_costs(copies_UW: I32, arena_U: U8, seconds_AW: F64, num_rows: int) -> F64:
    """Cost of using row u at worker w: its pull there, and the pushes that the pull forces."""
    num_workers = copies_UW.shape[1]
    cost_UW = np.zeros((num_rows, num_workers), np.float64)
    for u in range(num_rows):
        forced = 0.0
        for k in range(num_workers):
            if copies_UW[u, k] & DIRTY:
                forced += seconds_AW[arena_U[u], k]
        for w in range(num_workers):
            cell = copies_UW[u, w]
            if not cell & FRESH:
                own = seconds_AW[arena_U[u], w] if cell & DIRTY else 0.0
                cost_UW[u, w] = seconds_AW[arena_U[u], w] + forced - own
    return cost_UW


def cost_matrix(view: View) -> F64:
    """c(i, j) of SYSTEMS: seconds of transfers that sample i causes if trained by worker j."""
    now, seconds_AW = view.window.now, view.state.setup.row_seconds_AW
    cost_UW = _row_costs(view.copies_UW, view.rows.arena_U, seconds_AW, len(now.rows_U))
    return per_sample(cost_UW, now)


@kernel
def _cheapest_with_room(cost_SW: F64, order: I64, left_W: I64, worker_S: I32) -> None:
    """Heu: the samples of `order`, each to its cheapest worker with room; updates `left_W`."""
    for s in order:
        best = -1
        for w in range(cost_SW.shape[1]):
            if left_W[w] > 0 and (best < 0 or cost_SW[s, w] < cost_SW[s, best]):
                best = w
        worker_S[s] = best
        left_W[best] -= 1


def hybrid(cost_SW: F64, quotas_W: I64, alpha: float) -> I32:
    """HybridDis: the clearest preferences by Heu, a share `alpha` of the samples by Opt."""
    num_samples, num_workers = cost_SW.shape
    if alpha >= 1 or num_workers == 1:
        return assign(cost_SW, quotas_W)
    lowest = np.partition(cost_SW, 1, axis=1)
    by_regret = np.argsort(lowest[:, 0] - lowest[:, 1], kind="stable")
    split = num_samples - round(alpha * num_samples)
    worker_S = np.empty(num_samples, np.int32)
    left_W = quotas_W.copy()
    _cheapest_with_room(cost_SW, by_regret[:split], left_W, worker_S)
    rest = np.sort(by_regret[split:])
    worker_S[rest] = assign(cost_SW[rest], left_W)
    return worker_S


def prefer_blocks(cost_SW: F64, quotas_W: I64, unit: float) -> F64:
    """The same costs, a hair lower at the worker that dealing in blocks would choose.

    The hairs of all samples together are far below `unit`, the cost of the cheapest transfer, so
    that they decide between optima only.
    """
    block_S = np.repeat(np.arange(len(quotas_W)), quotas_W)
    preferred = cost_SW.copy()
    preferred[np.arange(len(block_S)), block_S] -= 1e-3 * unit / max(1, len(block_S))
    return preferred


def esd(alpha: float = 1.0, ties: str = "block") -> Dispatch:
    """Minimise the sum of expected transmission costs; `alpha` is the share decided optimally.

    The body of the paper could not be obtained: the cost and the split by regret (second lowest
    minus lowest cost) are a reconstruction from its abstract. Optima are rarely unique. `ties`:
    `block` prefers the one nearest to dealing in blocks, which keeps neighbours in time together
    (they share rows, which the cost does not see); `any` takes whichever is found.
    """

    def choose(view: View) -> I32:
        cost_SW = cost_matrix(view)
        if ties == "block":
            seconds_AW = view.state.setup.row_seconds_AW
            unit = float(seconds_AW[seconds_AW > 0].min(initial=1.0))
            cost_SW = prefer_blocks(cost_SW, view.quotas_W, unit)
        return hybrid(cost_SW, view.quotas_W, alpha)

    return Dispatch("esd", choose)
