"""Which workers take part: the crew whose steps are shortest, judged on the window's batches.

On uneven links, or where little is computed, fewer workers split fewer rows and can be faster.
A run begins with the crew that did best when its first batches were rehearsed. Later, from time
to time, the window is dealt to each of a few crews, what its batches would move is foretold, and
the best crew goes on. The first half of the window pays for rows that have to change
places, so the second half is what counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from embroute.cost.step_time import allreduce_seconds
from embroute.kernels.array_types import F32, I32, I64
from embroute.planner.interfaces import DispatchContext
from embroute.planner.setup import Setup
from embroute.planner.state import SearchState, first_shares
from embroute.policies.embroute.anneal import refit
from embroute.policies.embroute.forecast import forecast_steps, mean_step_s
from embroute.policies.embroute.quotas import balance_shares, clip_shares, samples_that_fit
from embroute.policies.embroute.row_allreduce import learn_pace
from embroute.policies.embroute.search import (
    REFITS,
    SearchOptions,
    WindowProblem,
    build_problem,
    improve,
    next_state,
    prices,
    weights,
)

REHEARSED = 40  # steps on which crews are tried before the first
EFFORT = 1400  # of each round in which a crew is tried, at most
ROUNDS = 4  # of dealing the window and correcting shares; twice as many before the first step
BETTER = 0.96  # what a change of crew must promise
NO_LOSS = 1.01  # and one that only leaves out workers with less than a
VESTIGE = 0.06  # part of the samples
FEWEST = 0.2  # of an equal share, for every worker of a new crew; with less it is a smaller one
HASH_GROUPS = 251  # in which rows are told apart
ROUNDING = 1e-5  # of sums of shares


def is_comparison_due(context: DispatchContext, search: SearchOptions) -> bool:
    """Whether crews are compared: after 1, 2, 4, ... half windows, beyond what was rehearsed."""
    if not (search.free and search.changes) or context.window.step < REHEARSED:
        return False
    halves, rest = divmod(context.window.step, max(1, (search.ahead + 1) // 2))
    least_W, most_W = context.state.memory.range_2W
    return bool((least_W != most_W).any()) and not rest and not halves & (halves - 1)


def worker_subsets(setup: Setup) -> list[I64]:
    """All workers, and the fastest 1, 2, 3, 4, 8, ... of them."""
    order = setup.cluster.fastest_first
    count = setup.num_workers
    sizes = {count, count - count // 2, 3} | {2**i for i in range(count.bit_length())}
    return [order[:size] for size in sorted(sizes, reverse=True) if size <= count]


def _moved(context: DispatchContext, memory: SearchState) -> Callable[[I32, I64], I32]:
    """Who would own rows once a crew has taken over: its members, as far as their caches have room.

    What it costs to bring them there is soon forgotten, and would hide that a crew is faster.
    """
    takes_W = memory.range_2W[1] > 0
    caches = context.state.caches
    used_W, room_W = caches.used_WA.sum(1), (caches.capacity_WA - caches.used_WA).sum(1)
    crew, left = np.flatnonzero(takes_W), max(1, int(used_W[~takes_W].sum()))
    fits = min(1.0, float(room_W[takes_W].sum()) / left)

    def moved(owner_N: I32, rows_N: I64) -> I32:
        heir_N = crew[rows_N % len(crew)]
        fits_N = rows_N // len(crew) % HASH_GROUPS < fits * HASH_GROUPS
        away_N = (owner_N >= 0) & ~takes_W[owner_N]
        return np.where(away_N, np.where(fits_N, heir_N, -1), owner_N).astype(np.int32)

    return moved


def _hopeless(found: list[float], left: int, limit: float) -> bool:
    """Whether a crew stays above a limit, should it go on to gain what its last round gained."""
    if len(found) < 2 or not np.isfinite(limit):
        return False
    gain = max(0.0, found[-2] - found[-1])
    return min(found) - left * gain > limit


class Trial(NamedTuple):
    """What a step of a crew takes at best, and how."""

    time_s: float
    memory: SearchState


def _try(
    context: DispatchContext, memory: SearchState, search: SearchOptions, limit: float = np.inf
) -> Trial:
    """Deal the window and correct shares, several times.

    `limit`: a crew that will not reach it is given up.
    """
    setup, capacity_WA = context.state.setup, context.state.caches.capacity_WA
    search = replace(search, effort=min(search.effort, EFFORT))
    best = Trial(np.inf, memory)
    memory = memory._replace(
        share_W=memory.share_W.copy(),
        weight_PW=memory.weight_PW.copy(),
        took_1=np.zeros_like(memory.took_1),
        pace_2=np.zeros_like(memory.pace_2),
    )
    rounds, seen = ROUNDS if context.window.step else 2 * ROUNDS, list[float]()
    moved = _moved(context, memory)
    for turn in range(rounds):
        price_PAV = prices(setup, weights(memory, search, setup.num_workers))
        if not price_PAV.any():
            return Trial(0.0, memory)
        dealt = build_problem(context, memory, search, price_PAV, moved)
        cooler = search.hot * (search.cold / search.hot) ** (turn / rounds)
        improve(dealt, replace(search, hot=cooler), context.window.step)
        price_TW = dealt.loads.price_TW.copy()
        for t in range(len(dealt.entries)):
            refit(dealt.uses, dealt.loads, t, REFITS)
        dealt.loads.price_TW[:] = price_TW  # as sweeps found them, not as the last sample paid
        told = forecast_steps(dealt, setup, capacity_WA)
        half = len(told.times) // 2
        memory = _again(dealt, memory)
        seen.append(mean_step_s(told.times))
        if seen[-1] < best.time_s and (told.rows_TWA[half:] <= capacity_WA).all():
            learnt = ("share_W", "weight_PW", "pace_2")
            copies = {name: getattr(memory, name).copy() for name in learnt}
            best = Trial(seen[-1], memory._replace(**copies))
        if _hopeless(seen, rounds - 1 - turn, limit):
            break
        for t in range(half, len(told.times)):
            samples_W = dealt.loads.load_TW[t].astype(np.int64)
            fits_W = samples_that_fit(told.rows_TWA[t], capacity_WA, samples_W)
            balance_shares(told.times[t], samples_W, memory, fits_W)
            learn_pace(memory, told.times[t], dealt.reduced[t])
    return best


def _again(dealt: WindowProblem, memory: SearchState) -> SearchState:
    """An outlook from which the same window is dealt again as it is dealt now."""
    kept = next_state(dealt, memory)
    ahead_TS = np.concatenate([_now(dealt, kept.ahead_TS), kept.ahead_TS[:-1]])
    return memory._replace(ahead_TS=ahead_TS, price_TW=kept.price_TW)


def _now(dealt: WindowProblem, ahead_TS: I32) -> I32:
    """The current batch as it is dealt, as one that is ahead."""
    now_1S = np.full((1, ahead_TS.shape[1]), -1, np.int32)
    worker_S = dealt.uses.worker_S[: dealt.loads.first_T[1]]
    now_1S[0, : len(worker_S)] = worker_S[: ahead_TS.shape[1]]
    return now_1S


def share_ranges(search: SearchOptions, crew: I64, num_workers: int) -> F32:
    """Least and most share of each worker; none for those outside a crew."""
    range_2W = np.zeros((2, num_workers), np.float32)
    for i, given in enumerate((search.floor, search.ceiling)):
        range_2W[i, crew] = np.broadcast_to(np.array(given, np.float32), (num_workers,))[crew]
    return range_2W


def check_ranges(search: SearchOptions, num_workers: int) -> None:
    """Whether floors and ceilings leave a choice."""
    for name, given in (("floor", search.floor), ("ceiling", search.ceiling)):
        if len(given) not in (1, num_workers):
            listed = f"{len(given)} workers, the cluster has {num_workers}"
            raise ValueError(f"embroute: {name} names {listed}")
    least_W, most_W = share_ranges(search, np.arange(num_workers), num_workers)
    if (least_W > most_W).any():
        w = int(np.argmax(least_W > most_W))
        raise ValueError(
            f"embroute: floor of worker {w} must be at most its ceiling {most_W[w]:g}, "
            f"got {least_W[w]:g}"
        )
    if least_W.sum() > 1 + ROUNDING or most_W.sum() < 1 - ROUNDING:
        raise ValueError(
            f"embroute: floors must sum to at most 1 and ceilings to at least 1, got "
            f"{least_W.sum():g} and {most_W.sum():g} for {num_workers} workers"
        )


def _joined(memory: SearchState, crew: I64, search: SearchOptions, setup: Setup) -> SearchState:
    """An outlook in which only a crew takes part; what is known of the present one stays."""
    range_2W = share_ranges(search, crew, setup.num_workers)
    if ((memory.range_2W[1] > 0) == (range_2W[1] > 0)).all():
        return memory._replace(share_W=clip_shares(memory.share_W, range_2W), range_2W=range_2W)
    share_W = np.where(range_2W[1] > 0, first_shares(setup), 0)
    return memory._replace(
        ahead_TS=np.full_like(memory.ahead_TS, -1),
        price_TW=np.zeros_like(memory.price_TW),
        share_W=clip_shares((share_W / share_W.sum()).astype(np.float32), range_2W),
        range_2W=range_2W,
    )


def is_possible(crew: I64, search: SearchOptions, setup: Setup) -> bool:
    """Whether a crew may take the whole batch, and no other worker has to take part."""
    everyone_2W = share_ranges(search, np.arange(setup.num_workers), setup.num_workers)
    range_2W = share_ranges(search, crew, setup.num_workers)
    return bool(range_2W[0].sum() == everyone_2W[0].sum() and range_2W[1].sum() >= 1 - ROUNDING)


def _needed(memory: SearchState, crew: I64) -> float:
    """What a crew must promise, of the present one's time.

    A large crew takes longer to settle than is tried here, so a change must be worth something;
    but workers that hardly get samples only make the others wait.
    """
    leaves = 1 - float(memory.share_W[crew].sum())
    if len(crew) < int((memory.range_2W[1] > 0).sum()) and leaves < VESTIGE:
        return NO_LOSS
    return BETTER


def least_step_s(crew: I64, batch: int, setup: Setup) -> float:
    """Seconds of a crew's step if no row moved: compute, and the dense gradients' all-reduce."""
    speed = float((1 / np.maximum(setup.cluster.compute_s_W[crew], 1e-12)).sum())
    return batch / speed + allreduce_seconds(setup.cluster.dense_bytes, setup.cluster, False)


def _rivals(context: DispatchContext, search: SearchOptions, present: I64) -> list[I64]:
    """Other crews that may take over, as far as what they compute does not forbid it."""
    setup, took = context.state.setup, float(context.state.memory.took_1[0]) or np.inf
    batch = len(context.window.now.batch)
    return [
        crew
        for crew in worker_subsets(setup)
        if len(crew) != len(present)
        and is_possible(crew, search, setup)
        and least_step_s(crew, batch, setup) < NO_LOSS * took
    ]


def choose_first_workers(context: DispatchContext, search: SearchOptions) -> SearchState:
    """The outlook of the crew with which a run begins, its window dealt."""
    memory, setup = context.state.memory, context.state.setup
    joined = _joined(memory, np.array(search.crew, np.int64), search, setup)
    if not search.changes:
        return joined
    return _try(context, joined, search).memory._replace(took_1=memory.took_1)


def choose_workers_again(context: DispatchContext, search: SearchOptions) -> SearchState:
    """The outlook of the best crew; the present one stays unless another is clearly better."""
    memory, setup = context.state.memory, context.state.setup
    present = np.flatnonzero(memory.range_2W[1] > 0)
    best = _joined(memory, present, search, setup)
    rivals = _rivals(context, search, present)
    if not rivals:
        return best
    trial = _try(context, best, search)
    took = float(memory.took_1[0]) or np.inf
    batch, least = len(context.window.now.batch), 1.0
    for crew in rivals:
        limit = min(took, trial.time_s) * _needed(trial.memory, crew)
        if least_step_s(crew, batch, setup) >= limit:
            continue
        found = _try(context, _joined(memory, crew, search, setup), search, limit)
        promise, share = found.time_s / limit, found.memory.share_W[crew].min()
        if promise < least and share >= FEWEST / setup.num_workers:
            taken = np.full(1, found.time_s, np.float32)
            least, best = promise, found.memory._replace(took_1=taken)
    return best
