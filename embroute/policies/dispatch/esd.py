"""ESD (arXiv 2512.21615): dispatch by expected transmission cost over unequal links."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from embroute.config.signature import Ratio
from embroute.kernels.array_types import F64, I32, I64, U8
from embroute.kernels.codes import DIRTY, FRESH, SEVERAL
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import index
from embroute.planner.assignment import assign
from embroute.planner.interfaces import Assignment, Dispatch, DispatchContext


class RowCosts(NamedTuple):
    """Where a step's rows are, and the seconds to move a row over each worker's link."""

    copies_UW: I32
    only_U: I32
    arena_U: U8
    seconds_AW: F64


@inlined
def _forced_pushes(rows: RowCosts, u: int, arena: int) -> float:
    """Seconds of the pushes that a pull of a row forces: those of its dirty copies."""
    only = rows.only_U[u]
    if only >= 0:
        dirty = rows.copies_UW[u, index(only)] & DIRTY != 0
        return float(rows.seconds_AW[arena, index(only)] if dirty else 0.0)
    forced = 0.0
    if only == SEVERAL:
        for k in range(rows.copies_UW.shape[1]):
            if rows.copies_UW[u, index(k)] & DIRTY:
                forced += rows.seconds_AW[arena, index(k)]
    return forced


@kernel
def _row_costs(rows: RowCosts) -> F64:
    """Cost of each row at each worker: a pull and the pushes that it forces; nothing if fresh."""
    num_rows, num_workers = rows.copies_UW.shape
    copies_UW, seconds_AW, arena_U = rows.copies_UW, rows.seconds_AW, rows.arena_U
    cost_UW = np.empty((num_rows, num_workers))
    for u in range(num_rows):
        arena = index(arena_U[u])
        forced = _forced_pushes(rows, index(u), arena)
        for w in range(num_workers):
            cell = copies_UW[index(u), index(w)]
            pull = 0.0 if cell & DIRTY else seconds_AW[arena, index(w)]
            cost_UW[index(u), index(w)] = 0.0 if cell & FRESH else pull + forced
    return cost_UW


@kernel
def _costs(rows: RowCosts, unique_of_lookup: I32, sample_offsets: I64) -> F64:
    """c(i, j): the costs at j of all rows of sample i."""
    cost_UW = _row_costs(rows)
    num_rows, num_workers = cost_UW.shape
    cost_SW = np.zeros((len(sample_offsets) - 1, num_workers))
    counted_U = np.full(num_rows, -1, np.int32)  # a row that a bag holds twice counts once
    for s in range(len(cost_SW)):
        for i in range(sample_offsets[s], sample_offsets[s + 1]):
            if unique_of_lookup[i] < 0:
                continue
            u = index(unique_of_lookup[i])
            if counted_U[u] == s:
                continue
            counted_U[u] = s
            for w in range(num_workers):
                cost_SW[index(s), index(w)] += cost_UW[u, index(w)]
    return cost_SW


def _units(seconds_AW: F64) -> tuple[F64, float]:
    """Transfer times as whole numbers of a unit, so that equal sums are equal to the last bit."""
    unit = float(seconds_AW[seconds_AW > 0].min(initial=1.0)) / 2**20
    return np.round(seconds_AW / unit), unit


def unit_costs(context: DispatchContext) -> tuple[F64, float]:
    """c(i, j), the transfers of sample i at worker j, in units; and the unit in seconds."""
    now, copies = context.window.now, context.copies
    units_AW, unit = _units(context.state.setup.row_seconds_AW)
    rows = RowCosts(copies.copies_UW, copies.only_U, context.rows.arena_U, units_AW)
    return _costs(rows, now.unique_of_lookup, now.batch.sample_offsets), unit


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
    # Every worker gets its quota at any rate, so what all samples cost there tells nothing.
    relative_SW = cost_SW - cost_SW.mean(0)
    open_SW = relative_SW[:, quotas_W > 0]
    by_saving = np.argsort(open_SW.min(1) - open_SW.mean(1), kind="stable")
    split = num_samples - round(alpha * num_samples)
    worker_S = np.empty(num_samples, np.int32)
    left_W = quotas_W.copy()
    _cheapest_with_room(relative_SW, by_saving[:split], left_W, worker_S)
    rest = np.sort(by_saving[split:])
    worker_S[rest] = assign(cost_SW[rest], left_W)
    return worker_S


def prefer_blocks(cost_SW: F64, quotas_W: I64) -> F64:
    """Whole-numbered costs, a little lower at the worker that `block` would choose.

    The discounts of all samples together are below one, so they decide between optima only.
    """
    block_S = np.repeat(np.arange(len(quotas_W)), quotas_W)
    preferred = cost_SW.copy()
    preferred[np.arange(len(block_S)), block_S] -= 0.5 ** (len(block_S).bit_length() + 1)
    return preferred


AssignmentTies = Literal["block", "any"]


def esd(alpha: Ratio = 1.0, ties: AssignmentTies = "block") -> Dispatch:
    """Minimise the sum of expected transmission costs; `alpha` is the share decided optimally.

    The body of the paper could not be obtained: the cost is a reconstruction from its abstract, and
    the heuristic is a choice of ours, the best that we tried (docs/research-log.md). It takes costs
    relative to the worker's mean over the batch. Samples that save most go first: lowest cost
    against the mean over workers. Each goes to its cheapest worker with room, and what is left to
    the optimum. Optima are rarely unique. `ties`:
    `block` prefers the optimum nearest to blocks, which keeps neighbours in time together (they
    share rows, which the cost does not count); `any` takes the optimum that the solver finds.
    """

    def choose(context: DispatchContext) -> Assignment:
        cost_SW, _ = unit_costs(context)
        if ties == "block":
            cost_SW = prefer_blocks(cost_SW, context.quotas_W)
        return Assignment(hybrid(cost_SW, context.quotas_W, alpha))

    return Dispatch("esd", choose)
