"""ESD (arXiv 2512.21615): dispatch by expected transmission cost over unequal links."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import DIRTY, FRESH, SEVERAL
from embroute.kernels.jit import inlined, kernel
from embroute.policy.assign import assign
from embroute.policy.parts import Dealing, Dispatch, View

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class Rows(NamedTuple):
    """What costs depend on: copies, the only holder of a row, its arena, seconds to move it."""

    copies_UW: I32
    only_U: I32
    arena_U: U8
    seconds_AW: F64


@inlined
def _add_known(rows: Rows, u: int, w: int, cost_W: F64) -> float:
    """A row that only worker w holds up to date or dirty: correct w, return what all others pay."""
    seconds = rows.seconds_AW[rows.arena_U[u], w]
    forced = seconds if rows.copies_UW[u, w] & DIRTY else 0.0
    if rows.copies_UW[u, w] & FRESH:
        cost_W[w] -= seconds + forced
    else:
        cost_W[w] -= forced
    return forced


@kernel
def _add_general(rows: Rows, u: int, cost_W: F64) -> float:
    """Any row: the pushes that a pull forces, less what single workers are spared."""
    forced, seconds_AW, arena = 0.0, rows.seconds_AW, rows.arena_U[u]
    for k in range(len(cost_W)):
        if rows.copies_UW[u, k] & DIRTY:
            forced += seconds_AW[arena, k]
    for w in range(len(cost_W)):
        if rows.copies_UW[u, w] & FRESH:
            cost_W[w] -= seconds_AW[arena, w] + forced
        elif rows.copies_UW[u, w] & DIRTY:
            cost_W[w] -= seconds_AW[arena, w]
    return forced


@kernel
def _costs(rows: Rows, unique_of_lookup: I32, sample_offsets: I64) -> F64:
    """c(i, j): a pull of every row at j, the pushes it forces, less what j has."""
    num_arenas, num_workers = rows.seconds_AW.shape
    only_U, arena_U, seconds_AW = rows.only_U, rows.arena_U, rows.seconds_AW
    cost_SW = np.zeros((len(sample_offsets) - 1, num_workers))
    pulls_A = np.zeros(num_arenas)
    counted_U = np.full(len(only_U), -1, np.int32)  # a row that a bag holds twice counts once
    for s in range(len(cost_SW)):
        pulls_A[:] = 0
        forced = 0.0
        for i in range(sample_offsets[s], sample_offsets[s + 1]):
            u = unique_of_lookup[i]
            if u < 0 or counted_U[u] == s:
                continue
            counted_U[u] = s
            pulls_A[arena_U[u]] += 1
            if only_U[u] >= 0:
                forced += _add_known(rows, u, only_U[u], cost_SW[s])
            elif only_U[u] == SEVERAL:
                forced += _add_general(rows, u, cost_SW[s])
        for w in range(num_workers):
            cost_SW[s, w] += forced + (pulls_A * seconds_AW[:, w]).sum()
    return cost_SW


def _units(seconds_AW: F64) -> tuple[F64, float]:
    """Transfer times as whole numbers of a unit, so that equal sums are equal to the last bit."""
    unit = float(seconds_AW[seconds_AW > 0].min(initial=1.0)) / 2**20
    return np.round(seconds_AW / unit), unit


def unit_costs(view: View) -> tuple[F64, float]:
    """c(i, j) of SYSTEMS in whole units, and the unit in seconds."""
    now, found = view.window.now, view.found
    units_AW, unit = _units(view.state.setup.row_seconds_AW)
    rows = Rows(found.copies_UW, found.only_U, view.rows.arena_U, units_AW)
    return _costs(rows, now.unique_of_lookup, now.batch.sample_offsets), unit


def cost_matrix(view: View) -> F64:
    """Seconds of transfers that sample i causes if trained by worker j."""
    costs, unit = unit_costs(view)
    return costs * unit


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


def prefer_blocks(cost_SW: F64, quotas_W: I64) -> F64:
    """Whole-numbered costs, a hair lower at the worker that dealing in blocks would choose.

    The hairs of all samples together are below one, so that they decide between optima only.
    """
    block_S = np.repeat(np.arange(len(quotas_W)), quotas_W)
    preferred = cost_SW.copy()
    preferred[np.arange(len(block_S)), block_S] -= 0.5 ** (len(block_S).bit_length() + 1)
    return preferred


def esd(alpha: float = 1.0, ties: str = "block") -> Dispatch:
    """Minimise the sum of expected transmission costs; `alpha` is the share decided optimally.

    The body of the paper could not be obtained: the cost and the split by regret (second lowest
    minus lowest cost) are a reconstruction from its abstract. Optima are rarely unique. `ties`:
    `block` prefers the one nearest to dealing in blocks, which keeps neighbours in time together
    (they share rows, which the cost does not see); `any` takes whichever is found.
    """

    def choose(view: View) -> Dealing:
        cost_SW, _ = unit_costs(view)
        if ties == "block":
            cost_SW = prefer_blocks(cost_SW, view.quotas_W)
        return Dealing(hybrid(cost_SW, view.quotas_W, alpha))

    return Dispatch("esd", choose)
