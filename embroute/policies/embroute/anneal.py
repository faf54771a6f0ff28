"""Simulated annealing of a dispatch: random moves of samples and of groups between workers.

A *sweep* offers every sample of a batch to all workers, or groups of samples that share a row.
Prices per worker keep the numbers of samples near their quotas; `search` makes them exact.

Axes: S samples of the window, W workers, V workers padded, T batches of the window, K uses,
M look-ups ordered by use.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import F32, I32, I64, U64
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import index
from embroute.policies.embroute.uses import (
    COSTS,
    SIZE,
    VALID,
    Uses,
    add_costs,
    add_costs_without,
    add_joining_costs,
    move_lookups,
    refresh_costs,
    sample_lookups,
)

FORBIDDEN = np.float32(1e9)  # price of a worker that gets no samples
# Gumbel noise from a table: the minimum of cost - noise * Gumbel is a draw of a worker with
# probability proportional to exp(-cost / noise), which is a heat bath without an exponential.
NOISE_LEVELS = 4096
_LEVELS = (np.arange(NOISE_LEVELS) + 0.5) / NOISE_LEVELS
GUMBEL: F32 = (-np.log(-np.log(_LEVELS))).astype(np.float32)
_NOISE_BITS = np.uint64(12)  # 2**12 levels
_NOISES_PER_DRAW = 5  # 5 * 12 of the 64 bits of a random number


class Loads(NamedTuple):
    """Samples of each worker in each batch, their quotas, and the prices that enforce these."""

    first_T: I64  # samples of batch t are first_T[t] to first_T[t + 1]
    load_TW: I32
    quota_TW: I32
    price_TW: F32


class Heat(NamedTuple):
    """How freely samples move."""

    noise: float  # on costs
    stiffness: float  # price of one sample above a quota
    gumbel: F32
    random: U64  # state of the generator


@inlined
def _draw(random: U64) -> int:
    """64 random bits (xorshift64*)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return int(x * np.uint64(0x2545F4914F6CDD1D))


@inlined
def _choose(cost_V: F32, price_W: F32, noise: float, gumbel: F32, random: U64) -> int:
    """The worker with the least cost, price and noise: a draw from a heat bath."""
    best, least, bits = 0, np.float32(np.inf), int(np.uint64(0))
    for w in range(len(price_W)):
        value = cost_V[index(w)] + price_W[index(w)]
        # One random number serves five workers, twelve bits each.
        if w % _NOISES_PER_DRAW == 0:
            bits = _draw(random)
        value -= np.float32(noise) * gumbel[index(int(bits & np.uint64(NOISE_LEVELS - 1)))]
        bits = int(bits >> _NOISE_BITS)
        if value < least:
            best, least = w, value
    return best


@kernel
def sweep_samples(uses: Uses, loads: Loads, t: int, heat: Heat) -> None:
    """Offer every sample of a batch to every worker once."""
    use_KF, cost_KF, price_PCV, use_L, first_S, worker_S, linear_SV = uses
    cost_V = np.empty(price_PCV.shape[2], np.float32)
    load_W, quota_W, price_W = loads.load_TW[t], loads.quota_TW[t], loads.price_TW[t]
    stiffness, noise, gumbel, random = heat.stiffness, heat.noise, heat.gumbel, heat.random
    counts, full_size = COSTS + 2 * len(cost_V), 0
    for w in range(len(price_W)):
        full_size += price_W[w] < FORBIDDEN
    # Invariant: excess_W is price + stiffness * (load - quota), with the sample in hand nowhere.
    excess_W = price_W + np.float32(stiffness) * (load_W - quota_W).astype(np.float32)
    for s in range(loads.first_T[t], loads.first_T[t + 1]):
        source = index(worker_S[s])
        sample = sample_lookups(first_S, worker_S, s, full_size)
        for w in range(len(cost_V)):
            cost_V[index(w)] = linear_SV[s, index(w)]
        add_joining_costs(use_KF, cost_KF, price_PCV, use_L, sample, cost_V)
        excess_W[source] -= np.float32(stiffness)
        target = _choose(cost_V, excess_W, noise, gumbel, random)
        excess_W[index(target)] += np.float32(stiffness)
        if target != worker_S[s]:
            move_lookups(use_KF, use_L, counts, sample, target)
            load_W[source] -= 1
            load_W[index(target)] += 1
            worker_S[s] = target


@kernel
def reprice(loads: Loads, t: int, rate: float) -> None:
    """Raise the prices of workers above their quotas, lower those of others."""
    for w in range(loads.load_TW.shape[1]):
        excess = loads.load_TW[t, w] - loads.quota_TW[t, w]
        loads.price_TW[t, w] += np.float32(rate) * np.float32(excess)


class Groups(NamedTuple):
    """Samples of each use, and scratch memory to gather the rows of several samples."""

    first_K: I32  # samples of use k are sample_M[first_K[k] : first_K[k + 1]]
    sample_M: I32
    times_K: I32  # samples of the group that look a use up; zeros between calls
    list_K: I32  # distinct uses of the group
    group_S: I32  # samples of the group


@kernel
def samples_by_use(uses: Uses) -> Groups:
    """Samples ordered by use: a counting sort."""
    num_uses, use_L = len(uses.use_KF), uses.use_L
    first_K = np.zeros(num_uses + 1, np.int32)
    for i in range(len(use_L)):
        first_K[use_L[i] + 1] += 1
    for k in range(num_uses):
        first_K[k + 1] += first_K[k]
    next_K = first_K.copy()
    sample_M = np.empty(len(use_L), np.int32)
    for s in range(len(uses.worker_S)):
        for i in range(uses.first_S[s], uses.first_S[s + 1]):
            k = use_L[i]
            sample_M[next_K[k]] = s
            next_K[k] += 1
    return Groups(
        first_K,
        sample_M,
        np.zeros(num_uses, np.int32),
        np.empty(num_uses + 1, np.int32),  # `_group_costs` may write one element past the last use
        np.empty(len(uses.worker_S), np.int32),
    )


@kernel
def _group_costs(uses: Uses, groups: Groups, size: int, worker: int, out_V: F32) -> int:
    """What the first `size` samples of the group, all at one worker, cost together at each worker.

    Returns the look-ups read.
    """
    use_KF, cost_KF, price_PCV, use_L, first_S, _, linear_SV = uses
    times_K, list_K, group_S = groups.times_K, groups.list_K, groups.group_S
    padded, count, lookups = index(len(out_V)), 0, 0
    out_V[:] = 0
    for j in range(size):
        s = index(group_S[j])
        for w in range(len(out_V)):
            out_V[index(w)] += linear_SV[s, index(w)]
        lookups += first_S[s + 1] - first_S[s]
        for i in range(first_S[s], first_S[s + 1]):
            k = index(use_L[index(i)])
            # Write always, advance only at the first look-up: no branch that is hard to predict.
            list_K[index(count)] = k
            count += times_K[k] == 0
            times_K[k] += 1
    for j in range(count):
        k = index(list_K[index(j)])
        if use_KF[k, VALID] == 0:
            refresh_costs(use_KF, cost_KF, price_PCV, k)
        # The worker leaves the set with this group if no sample outside of it uses the row.
        leaves = use_KF[k, index(COSTS) + padded + padded + index(worker)] == times_K[k]
        times_K[k] = 0
        if leaves and use_KF[k, SIZE] > 1:
            add_costs_without(use_KF, cost_KF, price_PCV, k, index(worker), out_V)
        else:
            add_costs(cost_KF, k, index(COSTS) if leaves else index(COSTS) + padded, out_V)
    return lookups


@kernel
def _collect_group(groups: Groups, worker_S: I32, k: int, worker: int) -> None:
    """The samples of use k at a worker become the group."""
    size = 0
    for i in range(groups.first_K[k], groups.first_K[k + 1]):
        # Samples of other workers are overwritten by the next one.
        s = groups.sample_M[i]
        groups.group_S[index(size)] = s
        size += worker_S[s] == worker


class GroupSweep(NamedTuple):
    """Which groups of samples a sweep offers."""

    batch: int
    first_use: int
    end_use: int
    max_size: int  # samples of a group
    max_lookups: int  # look-ups to read in the sweep


@kernel
def sweep_groups(uses: Uses, loads: Loads, groups: Groups, sweep: GroupSweep, heat: Heat) -> None:
    """Offer samples that share a row and a worker to every worker together."""
    use_KF, _, price_PCV, use_L, first_S, worker_S, _ = uses
    t, first, num_uses = sweep.batch, sweep.first_use, sweep.end_use - sweep.first_use
    num_workers = loads.load_TW.shape[1]
    cost_V = np.empty(price_PCV.shape[2], np.float32)
    load_W, quota_W, price_W = loads.load_TW[t], loads.quota_TW[t], loads.price_TW[t]
    stiffness, noise, gumbel, random = heat.stiffness, heat.noise, heat.gumbel, heat.random
    excess_W = np.empty(num_workers, np.float32)
    counts, lookups = COSTS + 2 * len(cost_V), 0
    while lookups < sweep.max_lookups and num_uses > 0:
        # The upper half of the bits draws the use, the lower 16 the worker to start at.
        bits = _draw(random)
        k = first + int((bits >> np.uint64(32)) % np.uint64(num_uses))
        lookups += 4  # a draw counts as four look-ups
        if groups.first_K[k + 1] - groups.first_K[k] < 2:
            continue
        worker = int((bits & np.uint64(0xFFFF)) % np.uint64(num_workers))
        for _ in range(num_workers):
            if use_KF[k, counts + worker] >= 2:
                break
            worker = int((worker + np.uint64(1)) % np.uint64(num_workers))
        size = use_KF[k, counts + worker]
        if size < 2 or size > sweep.max_size:
            continue
        _collect_group(groups, worker_S, k, worker)
        lookups += _group_costs(uses, groups, size, worker, cost_V)
        load_W[worker] -= size
        for w in range(num_workers):
            above = np.float32(stiffness) * np.float32(load_W[w] - quota_W[w])
            excess_W[w] = size * (price_W[w] + above)
        target = _choose(cost_V, excess_W, noise, gumbel, random)
        load_W[target] += size
        if target != np.int64(worker):
            for i in range(size):
                s = groups.group_S[i]
                sample = sample_lookups(first_S, worker_S, s, 0)
                move_lookups(use_KF, use_L, counts, sample, target)
                worker_S[s] = target


@inlined
def set_sample_costs(uses: Uses, s: int, cost_V: F32) -> None:
    """What a sample costs at each worker while all others stay where they are."""
    use_KF, cost_KF, price_PCV, use_L, first_S, worker_S, linear_SV = uses
    for w in range(len(cost_V)):
        cost_V[index(w)] = linear_SV[s, index(w)]
    sample = sample_lookups(first_S, worker_S, s, 0)
    add_joining_costs(use_KF, cost_KF, price_PCV, use_L, sample, cost_V)


@kernel
def initial_prices(uses: Uses, loads: Loads) -> None:
    """Lower each price by what a sample costs there on average, before the first sweep.

    Otherwise all samples leave workers with slow links. No row is shared there afterwards, so no
    single move back pays off.
    """
    cost_V = np.empty(uses.price_PCV.shape[2], np.float32)
    for t in range(len(loads.price_TW)):
        first, end = loads.first_T[t], loads.first_T[t + 1]
        for s in range(first, end):
            set_sample_costs(uses, s, cost_V)
            for w in range(loads.price_TW.shape[1]):
                loads.price_TW[t, w] -= cost_V[w] / np.float32(end - first)
