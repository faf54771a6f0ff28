"""Choose the active workers: the ones whose steps are shortest, judged on the window's batches.

On uneven links, or with little compute, fewer workers share fewer rows and can be faster. A run
starts with the workers that were best when the first batches were simulated. Later comparisons
dispatch the window to each of a few subsets, forecast its steps, and keep the best subset. The
first half of the window pays for rows that change their worker, so the second half counts.
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
from embroute.policies.embroute.forecast import Forecast, forecast_steps, mean_step_s
from embroute.policies.embroute.problem import (
    WindowProblem,
    build_problem,
    prices,
    second_weights,
)
from embroute.policies.embroute.quotas import balance_shares, clip_shares, samples_that_fit
from embroute.policies.embroute.row_allreduce import learn_pace
from embroute.policies.embroute.search import (
    COLD_NOISE,
    HOT_NOISE,
    REFIT_ROUNDS,
    anneal_window,
    next_state,
    refit,
)
from embroute.policies.embroute.search_state import SearchOptions, SearchState, first_shares

WARM_START_STEPS = 40  # on which subsets are simulated before the first step
TRIAL_EFFORT = 1400  # of each round of a trial, at most
TRIAL_ROUNDS = 4  # of dispatching the window and correcting shares; twice as many at first
# A change must promise this share of the present step time: a large subset takes longer to settle
# than a trial lasts.
CHANGE_LIMIT = 0.96
# A subset that leaves out only workers with less than this share of the samples may be a little
# slower: such workers hardly help, but the others wait for them.
SHRINK_LIMIT, SMALL_SHARE = 1.01, 0.06
MIN_SHARE = 0.2  # of an equal share, for every worker of a new subset; else a smaller one is meant
HASH_GROUPS = 251  # of rows, to let a part of them follow
ROUNDING = 1e-5  # of sums of shares


def is_comparison_due(context: DispatchContext, options: SearchOptions) -> bool:
    """Whether to compare subsets: after 1, 2, 4, ... half windows, but after the warm start."""
    changes = options.free_quotas and options.change_workers
    if not changes or context.window.step < WARM_START_STEPS:
        return False
    halves, rest = divmod(context.window.step, max(1, (options.ahead + 1) // 2))
    least_W, most_W = context.state.memory(SearchState).range_2W
    is_power_of_two = not halves & (halves - 1)
    return bool((least_W != most_W).any()) and not rest and is_power_of_two


def worker_subsets(setup: Setup) -> list[I64]:
    """All workers, and the fastest 1, 2, 3, 4, 8, ... of them."""
    order = setup.cluster.fastest_first
    count = setup.num_workers
    sizes = {count, count - count // 2, 3} | {2**i for i in range(count.bit_length())}
    return [order[:size] for size in sorted(sizes, reverse=True) if size <= count]


def _owners_after_change(
    context: DispatchContext, memory: SearchState
) -> Callable[[I32, I64], I32]:
    """Owners of rows after active workers have taken over, as far as their caches have room.

    The cost of moving these rows is paid once. In a short trial it would hide that a subset is
    faster.
    """
    active_W = memory.range_2W[1] > 0
    caches = context.state.caches
    used_W, room_W = caches.used_WA.sum(1), (caches.capacity_WA - caches.used_WA).sum(1)
    active, orphans = np.flatnonzero(active_W), max(1, int(used_W[~active_W].sum()))
    share = min(1.0, float(room_W[active_W].sum()) / orphans)

    def owners(owner_N: I32, rows_N: I64) -> I32:
        # The remainder chooses the heir. The quotient is independent of it, and chooses which rows
        # find room.
        heir_N = active[rows_N % len(active)]
        fits_N = rows_N // len(active) % HASH_GROUPS < share * HASH_GROUPS
        orphan_N = (owner_N >= 0) & ~active_W[owner_N]
        return np.where(orphan_N, np.where(fits_N, heir_N, -1), owner_N).astype(np.int32)

    return owners


def _is_hopeless(round_s: list[float], rounds_left: int, limit: float) -> bool:
    """Whether a trial will miss a limit if each round gains as much as the last one did."""
    if len(round_s) < 2 or not np.isfinite(limit):
        return False
    gain = max(0.0, round_s[-2] - round_s[-1])
    return min(round_s) - rounds_left * gain > limit


class Trial(NamedTuple):
    """The best step time of a subset, and the state that reached it."""

    time_s: float
    memory: SearchState


def _learning_copy(memory: SearchState) -> SearchState:
    """A state that a trial may change; step time and pace are learnt anew."""
    return memory._replace(
        share_W=memory.share_W.copy(),
        weight_PW=memory.weight_PW.copy(),
        took_1=np.zeros_like(memory.took_1),
        pace_2=np.zeros_like(memory.pace_2),
    )


def _try_workers(
    context: DispatchContext, memory: SearchState, options: SearchOptions, limit: float = np.inf
) -> Trial:
    """Dispatch the window and correct shares, several times.

    `limit`: a trial that will not reach this step time stops early.
    """
    setup, capacity_WA = context.state.setup, context.state.caches.capacity_WA
    options = replace(options, effort=min(options.effort, TRIAL_EFFORT))
    best = Trial(np.inf, memory)
    memory = _learning_copy(memory)
    rounds, round_s = TRIAL_ROUNDS if context.window.step else 2 * TRIAL_ROUNDS, list[float]()
    owners = _owners_after_change(context, memory)
    for turn in range(rounds):
        price_PCV = prices(setup, second_weights(memory, setup.num_workers))
        if not price_PCV.any():
            return Trial(0.0, memory)
        problem = build_problem(context, memory, options, price_PCV, owners)
        hot_noise = HOT_NOISE * (COLD_NOISE / HOT_NOISE) ** (turn / rounds)
        anneal_window(problem, options, context.window.step, hot_noise)
        _refit_all(problem)
        forecast = forecast_steps(problem, setup, capacity_WA)
        half = len(forecast.times) // 2
        memory = _same_window_again(problem, memory)
        round_s.append(mean_step_s(forecast.times))
        if round_s[-1] < best.time_s and (forecast.rows_TWA[half:] <= capacity_WA).all():
            learnt = ("share_W", "weight_PW", "pace_2")
            copies = {name: getattr(memory, name).copy() for name in learnt}
            best = Trial(round_s[-1], memory._replace(**copies))
        if _is_hopeless(round_s, rounds - 1 - turn, limit):
            break
        _learn_from_forecast(memory, problem, forecast, capacity_WA)
    return best


def _learn_from_forecast(
    memory: SearchState, problem: WindowProblem, forecast: Forecast, capacity_WA: I64
) -> None:
    """Correct shares, weights and pace by the second half of the window, as after real steps."""
    for t in range(len(forecast.times) // 2, len(forecast.times)):
        samples_W = problem.loads.load_TW[t].astype(np.int64)
        fits_W = samples_that_fit(forecast.rows_TWA[t], capacity_WA, samples_W)
        balance_shares(forecast.times[t], samples_W, memory, fits_W)
        learn_pace(memory, forecast.times[t], problem.reduced[t])


def _refit_all(problem: WindowProblem) -> None:
    """Bring all batches to their quotas; prices stay as the sweeps left them."""
    price_TW = problem.loads.price_TW.copy()
    for t in range(len(problem.entries)):
        refit(problem.uses, problem.loads, t, REFIT_ROUNDS)
    problem.loads.price_TW[:] = price_TW


def _same_window_again(problem: WindowProblem, memory: SearchState) -> SearchState:
    """A state from which the next round starts with this round's dispatch of the same window."""
    kept = next_state(problem, memory)
    # `next_state` begins with the next batch; the current one is put in front of it.
    now_1S = np.full((1, kept.ahead_TS.shape[1]), -1, np.int32)
    worker_S = problem.uses.worker_S[: problem.loads.first_T[1]]
    now_1S[0, : len(worker_S)] = worker_S[: now_1S.shape[1]]
    ahead_TS = np.concatenate([now_1S, kept.ahead_TS[:-1]])
    return memory._replace(ahead_TS=ahead_TS, price_TW=kept.price_TW)


def share_ranges(options: SearchOptions, active: I64, num_workers: int) -> F32:
    """Least and largest share of each worker; none for inactive workers."""
    range_2W = np.zeros((2, num_workers), np.float32)
    for i, limits in enumerate((options.floor, options.ceiling)):
        range_2W[i, active] = np.broadcast_to(np.array(limits, np.float32), (num_workers,))[active]
    return range_2W


def check_ranges(options: SearchOptions, num_workers: int) -> None:
    """Refuse floors and ceilings that no shares can keep."""
    for name, limits in (("floor", options.floor), ("ceiling", options.ceiling)):
        if len(limits) not in (1, num_workers):
            counts = f"{len(limits)} workers, the cluster has {num_workers}"
            raise ValueError(f"embroute: {name} names {counts}")
    least_W, most_W = share_ranges(options, np.arange(num_workers), num_workers)
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


def _with_active(
    memory: SearchState, active: I64, options: SearchOptions, setup: Setup
) -> SearchState:
    """A state in which only some workers are active; the present ones keep what was learnt."""
    range_2W = share_ranges(options, active, setup.num_workers)
    if ((memory.range_2W[1] > 0) == (range_2W[1] > 0)).all():
        return memory._replace(share_W=clip_shares(memory.share_W, range_2W), range_2W=range_2W)
    share_W = np.where(range_2W[1] > 0, first_shares(setup), 0)
    return memory._replace(
        ahead_TS=np.full_like(memory.ahead_TS, -1),
        price_TW=np.zeros_like(memory.price_TW),
        share_W=clip_shares((share_W / share_W.sum()).astype(np.float32), range_2W),
        range_2W=range_2W,
    )


def is_possible(active: I64, options: SearchOptions, setup: Setup) -> bool:
    """Whether a subset may take the whole batch, and no floor demands another worker."""
    all_2W = share_ranges(options, np.arange(setup.num_workers), setup.num_workers)
    range_2W = share_ranges(options, active, setup.num_workers)
    return bool(range_2W[0].sum() == all_2W[0].sum() and range_2W[1].sum() >= 1 - ROUNDING)


def _change_limit(memory: SearchState, active: I64) -> float:
    """The share of the present step time that a subset must promise."""
    share_left_out = 1 - float(memory.share_W[active].sum())
    if len(active) < int((memory.range_2W[1] > 0).sum()) and share_left_out < SMALL_SHARE:
        return SHRINK_LIMIT
    return CHANGE_LIMIT


def least_step_s(active: I64, batch: int, setup: Setup) -> float:
    """Seconds of a step if no row moved: compute, and the dense gradients' all-reduce."""
    speed = float((1 / np.maximum(setup.cluster.compute_s_W[active], 1e-12)).sum())
    return batch / speed + allreduce_seconds(setup.cluster.dense_bytes, setup.cluster, False)


def _rivals(context: DispatchContext, options: SearchOptions, present: I64) -> list[I64]:
    """Other subsets that may take over, if their compute alone is not too long."""
    setup, memory = context.state.setup, context.state.memory(SearchState)
    step_s = float(memory.took_1[0]) or np.inf
    batch = len(context.window.now.batch)
    return [
        active
        for active in worker_subsets(setup)
        if len(active) != len(present)
        and is_possible(active, options, setup)
        and least_step_s(active, batch, setup) < SHRINK_LIMIT * step_s
    ]


def choose_first_workers(context: DispatchContext, options: SearchOptions) -> SearchState:
    """The state with which a run starts: its active workers, with the window dispatched."""
    memory, setup = context.state.memory(SearchState), context.state.setup
    start = _with_active(memory, np.array(options.initial_workers, np.int64), options, setup)
    if not options.change_workers:
        return start
    return _try_workers(context, start, options).memory._replace(took_1=memory.took_1)


def choose_workers_again(context: DispatchContext, options: SearchOptions) -> SearchState:
    """The state of the best subset; the present one stays unless another is clearly better."""
    memory, setup = context.state.memory(SearchState), context.state.setup
    present = np.flatnonzero(memory.range_2W[1] > 0)
    best = _with_active(memory, present, options, setup)
    rivals = _rivals(context, options, present)
    if not rivals:
        return best
    present_trial = _try_workers(context, best, options)
    step_s = float(memory.took_1[0]) or np.inf
    batch, least = len(context.window.now.batch), 1.0
    for active in rivals:
        limit = min(step_s, present_trial.time_s) * _change_limit(present_trial.memory, active)
        if least_step_s(active, batch, setup) >= limit:
            continue
        trial = _try_workers(context, _with_active(memory, active, options, setup), options, limit)
        promise, share = trial.time_s / limit, trial.memory.share_W[active].min()
        if promise < least and share >= MIN_SHARE / setup.num_workers:
            time_1 = np.full(1, trial.time_s, np.float32)
            least, best = promise, trial.memory._replace(took_1=time_1)
    return best
