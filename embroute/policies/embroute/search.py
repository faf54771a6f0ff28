"""The search: anneal a window's dispatch, then bring the current batch to its quotas exactly.

Axes: S samples of the window, W workers, V workers padded, T batches of the window.
"""

from __future__ import annotations

import numpy as np

from embroute.kernels.array_types import F32, I32
from embroute.kernels.jit import kernel
from embroute.policies.embroute.anneal import (
    FORBIDDEN,
    GUMBEL,
    GroupSweep,
    Heat,
    Loads,
    reprice,
    set_sample_costs,
    sweep_groups,
    sweep_samples,
)
from embroute.policies.embroute.problem import (
    BUILD_EFFORT,
    GROUP_EFFORT,
    WindowProblem,
    lookups_to_read,
)
from embroute.policies.embroute.search_state import SearchOptions, SearchState
from embroute.policies.embroute.uses import COSTS, Uses, move_lookups, sample_lookups

# Noise, stiffness and rate are in units of the mean price of a row.
HOT_NOISE = 1.0  # noise on the costs of a batch that enters the window
COLD_NOISE = 0.02  # noise on the costs of a batch that is about to be trained
STIFFNESS = 0.03  # price of one sample above a quota
PRICE_RATE = 0.04  # growth of a price in a sweep, per sample above the quota
MAX_GROUP = 16  # samples of a group
COLD_SWEEPS, MAX_SWAP_ROUNDS = 2, 4  # of the current batch, after annealing
REFIT_ROUNDS = 6  # rounds in which a batch is brought to its quotas
MIN_SAVING = 1e-4  # of a swap, in prices: more than rounding errors


@kernel
def move_sample(uses: Uses, s: int, target: int) -> None:
    """Move one sample; loads are the caller's to correct."""
    sample = sample_lookups(uses.first_S, uses.worker_S, s, 0)
    move_lookups(uses.use_KF, uses.use_L, COSTS + 2 * uses.price_PCV.shape[2], sample, target)
    uses.worker_S[s] = target


@kernel
def _cheapest_move(uses: Uses, loads: Loads, t: int) -> tuple[int, int]:
    """The sample above a quota that costs least elsewhere, and its target; -1 if there is none."""
    load_W, quota_W, worker_S = loads.load_TW[t], loads.quota_TW[t], uses.worker_S
    cost_V = np.empty(uses.price_PCV.shape[2], np.float32)
    chosen, target, least = -1, -1, np.float32(np.inf)
    for s in range(loads.first_T[t], loads.first_T[t + 1]):
        source = worker_S[s]
        if load_W[source] <= quota_W[source]:
            continue
        set_sample_costs(uses, s, cost_V)
        for w in range(len(load_W)):
            if load_W[w] < quota_W[w] and cost_V[w] - cost_V[source] < least:
                chosen, target, least = s, w, cost_V[w] - cost_V[source]
    return chosen, target


@kernel
def repair(uses: Uses, loads: Loads, t: int) -> None:
    """Move samples from workers above their quotas to workers below, cheapest first."""
    s, target = _cheapest_move(uses, loads, t)
    while s >= 0:
        loads.load_TW[t, uses.worker_S[s]] -= 1
        loads.load_TW[t, target] += 1
        move_sample(uses, s, target)
        s, target = _cheapest_move(uses, loads, t)


@kernel
def _offers(uses: Uses, loads: Loads, t: int) -> tuple[F32, I32, I32]:
    """For each sample above a quota: what its best move costs, the sample, and the target."""
    load_W, quota_W, price_W = loads.load_TW[t], loads.quota_TW[t], loads.price_TW[t]
    first, end = loads.first_T[t], loads.first_T[t + 1]
    cost_V = np.empty(uses.price_PCV.shape[2], np.float32)
    extra_S = np.empty(end - first, np.float32)
    sample_S, target_S = np.empty(end - first, np.int32), np.empty(end - first, np.int32)
    count = 0
    for s in range(first, end):
        source = uses.worker_S[s]
        if load_W[source] <= quota_W[source]:
            continue
        set_sample_costs(uses, s, cost_V)
        least, target = np.float32(np.inf), -1
        for w in range(len(load_W)):
            if load_W[w] < quota_W[w] and cost_V[w] + price_W[w] < least:
                least, target = cost_V[w] + price_W[w], w
        if target >= 0:
            extra_S[count] = least - cost_V[source] - price_W[source]
            sample_S[count], target_S[count] = s, target
            count += 1
    return extra_S[:count], sample_S[:count], target_S[:count]


@kernel
def refit(uses: Uses, loads: Loads, t: int, rounds: int) -> None:
    """Bring a batch to its quotas quickly, in rounds of many moves.

    Each round makes the cheaper half of the missing moves; the last round makes all. A move's cost
    is not computed again within a round. A price falls by what the dearest move there has cost.
    """
    load_W, quota_W, price_W = loads.load_TW[t], loads.quota_TW[t], loads.price_TW[t]
    for turn in range(rounds):
        excess = 0
        for w in range(len(load_W)):
            excess += max(0, load_W[w] - quota_W[w])
        if excess == 0:
            return
        extra_S, sample_S, target_S = _offers(uses, loads, t)
        missing = excess if turn == rounds - 1 else (excess + 1) // 2
        paid_W = np.zeros(len(load_W), np.float32)
        for i in np.argsort(extra_S):
            source, target = uses.worker_S[sample_S[i]], target_S[i]
            # Earlier moves of this round may have filled the target or emptied the source.
            if (
                missing > 0
                and load_W[source] > quota_W[source]
                and load_W[target] < quota_W[target]
            ):
                move_sample(uses, sample_S[i], target)
                load_W[source] -= 1
                load_W[target] += 1
                paid_W[target] = max(paid_W[target], extra_S[i])
                missing -= 1
        price_W -= paid_W


@kernel
def swap_round(uses: Uses, loads: Loads, t: int) -> int:
    """Swap samples of two workers where that saves cost; how many pairs were swapped.

    One pass over the batch keeps, for each pair of workers, the best candidate seen so far. A
    sample is compared with the candidate that would move the other way.
    """
    num_workers = loads.load_TW.shape[1]
    cost_V = np.empty(uses.price_PCV.shape[2], np.float32)
    best_WW = np.full((num_workers, num_workers), np.inf, np.float32)  # from worker, to worker
    sample_WW = np.full((num_workers, num_workers), -1, np.int32)
    swapped = 0
    for s in range(loads.first_T[t], loads.first_T[t + 1]):
        source = uses.worker_S[s]
        set_sample_costs(uses, s, cost_V)
        for w in range(num_workers):
            extra = cost_V[w] - cost_V[source]
            if w != source and extra < best_WW[source, w]:
                best_WW[source, w], sample_WW[source, w] = extra, s
            other = sample_WW[w, source]
            if w == source or other < 0 or extra + best_WW[w, source] >= -MIN_SAVING:
                continue
            # The candidate is used up: swapped, moved by an earlier swap, or not worth it.
            best_WW[w, source], sample_WW[w, source] = np.inf, -1
            if uses.worker_S[other] != w:
                continue
            # The sum of both costs is a guess: rows that both samples use are counted twice. Move
            # the first sample and compute the second one's cost again.
            move_sample(uses, s, w)
            set_sample_costs(uses, other, cost_V)
            if extra + cost_V[source] - cost_V[w] < -MIN_SAVING:
                move_sample(uses, other, source)
                swapped += 1
                break
            move_sample(uses, s, source)
            set_sample_costs(uses, s, cost_V)
    return swapped


def anneal_window(
    problem: WindowProblem, options: SearchOptions, step: int, hot_noise: float = HOT_NOISE
) -> None:
    """Sweep over all batches of a window, the nearer ones with less noise.

    A batch cools as it comes nearer, over all the steps that it spends in the window.
    """
    uses, loads, unit = problem.uses, problem.loads, problem.unit
    seed = (step + 1) * 0x9E3779B97F4A7C15 % 2**64
    random = np.array([seed], np.uint64)
    cooling = COLD_NOISE / hot_noise
    lookups = lookups_to_read(options, int(loads.first_T[1]), len(loads.load_TW[0]))
    lookups -= BUILD_EFFORT * len(problem.node_L)
    affordable = lookups / max(1, (1 + GROUP_EFFORT) * len(uses.use_L))
    sweeps = max(1, round(affordable))
    # Groups get less where the effort does not even suffice for one sweep with them.
    grouping = GROUP_EFFORT * min(1.0, max(0.0, 2 * affordable - 1))
    for i in range(sweeps):
        for t in range(len(problem.entries)):
            # From nearly 0 for the farthest batch in the first sweep, to nearly 1 for the current
            # one in the last.
            age = (problem.depth - t + (i + 0.5) / sweeps) / (problem.depth + 1)
            noise = hot_noise * cooling**age * unit
            heat = Heat(noise, STIFFNESS * unit, GUMBEL, random)
            sweep_samples(uses, loads, t, heat)
            sweep_groups(uses, loads, problem.groups, _group_sweep(problem, t, grouping), heat)
            reprice(loads, t, PRICE_RATE * unit)
    heat = Heat(0.0, STIFFNESS * unit, GUMBEL, random)
    for _ in range(COLD_SWEEPS):
        sweep_samples(uses, loads, 0, heat)


def _group_sweep(problem: WindowProblem, t: int, grouping: float) -> GroupSweep:
    """A sweep over groups of batch t that reads `grouping` times the batch's look-ups."""
    first_use, end_use = problem.first_use_T[t : t + 2]
    first_sample, end_sample = problem.loads.first_T[t : t + 2]
    lookups = problem.uses.first_S[end_sample] - problem.uses.first_S[first_sample]
    return GroupSweep(
        batch=t,
        first_use=int(first_use),
        end_use=int(end_use),
        max_size=MAX_GROUP,
        max_lookups=int(grouping * lookups),
    )


def enforce_quotas(problem: WindowProblem) -> None:
    """Make the current batch keep its quotas exactly."""
    refit(problem.uses, problem.loads, 0, REFIT_ROUNDS)
    repair(problem.uses, problem.loads, 0)
    for _ in range(MAX_SWAP_ROUNDS):
        if swap_round(problem.uses, problem.loads, 0) == 0:
            break


def next_state(problem: WindowProblem, before: SearchState) -> SearchState:
    """What the next step starts from: its batch is the first of those ahead."""
    ahead_TS = np.full_like(before.ahead_TS, -1)
    price_TW = np.empty_like(before.price_TW)
    first_T, price_now_TW = problem.loads.first_T, problem.loads.price_TW
    for t in range(len(ahead_TS)):
        price_TW[t] = price_now_TW[min(t + 1, len(price_now_TW) - 1)]
        if t + 1 < len(problem.entries):
            worker_S = problem.uses.worker_S[first_T[t + 1] : first_T[t + 2]]
            fits = min(len(worker_S), ahead_TS.shape[1])
            ahead_TS[t, :fits] = worker_S[:fits]
    # Prices may have moved a little from FORBIDDEN; the next step forbids its workers anew.
    price_TW[price_TW >= FORBIDDEN / 2] = 0
    return before._replace(ahead_TS=ahead_TS, price_TW=price_TW)
