"""Improving a dispatch by moves: heat baths over a window, loads held by prices.

Axes: S samples of the window, W workers, V workers padded, T batches of the window, K uses.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import F32, I32, I64, U64
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import index
from embroute.policies.embroute.uses import (
    COSTS,
    KNOWN,
    SIZE,
    Uses,
    add_joining_costs,
    add_use,
    add_without,
    move_lookups,
    refresh_costs,
)

FORBIDDEN = np.float32(1e9)  # price of a place at a worker that sits out
NOISES = 4096
_levels = (np.arange(NOISES) + 0.5) / NOISES
GUMBEL: F32 = (-np.log(-np.log(_levels))).astype(np.float32)
_BITS = np.uint64(12)
_NOISES_A_DRAW = 5


class Loads(NamedTuple):
    """Samples of each worker in each batch, what they should be, and the prices that see to it."""

    first_T: I64  # samples of batch t are first_T[t] to first_T[t + 1]
    load_TW: I32
    quota_TW: I32
    price_TW: F32


class Heat(NamedTuple):
    """How freely samples move: noise on costs, what a sample above a quota costs, randomness."""

    noise: float
    stiffness: float
    gumbel: F32
    random: U64  # state of the generator


@inlined
def _draw(random: U64) -> int:
    """xorshift64*."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return int(x * np.uint64(0x2545F4914F6CDD1D))


@inlined
def _choose(add_V: F32, price_W: F32, noise: float, gumbel: F32, random: U64) -> int:
    """The worker of least cost and price, less a noise: a draw from a heat bath."""
    best, least, bits = 0, np.float32(np.inf), int(np.uint64(0))
    for w in range(len(price_W)):
        value = add_V[index(w)] + price_W[index(w)]
        if w % _NOISES_A_DRAW == 0:
            bits = _draw(random)
        value -= np.float32(noise) * gumbel[index(int(bits & np.uint64(NOISES - 1)))]
        bits = int(bits >> _BITS)
        if value < least:
            best, least = w, value
    return best


@kernel
def sweep_samples(uses: Uses, loads: Loads, t: int, heat: Heat) -> int:
    """Offer every sample of a batch every worker once; how many moved."""
    use_KF, cost_KF, price_PAV, use_L, first_S, worker_S, linear_SV = uses
    add_V = np.empty(price_PAV.shape[2], np.float32)
    load_W, quota_W, price_W = loads.load_TW[t], loads.quota_TW[t], loads.price_TW[t]
    stiffness, noise, gumbel, random = heat.stiffness, heat.noise, heat.gumbel, heat.random
    counts, moved, everyone = COSTS + 2 * len(add_V), 0, 0
    for w in range(len(price_W)):
        everyone += price_W[w] < FORBIDDEN
    pay_W = price_W + np.float32(stiffness) * (load_W - quota_W).astype(np.float32)
    for s in range(loads.first_T[t], loads.first_T[t + 1]):
        here = index(worker_S[s])
        at = (first_S[s], first_S[s + 1], worker_S[s], everyone)
        for w in range(len(add_V)):
            add_V[index(w)] = linear_SV[s, index(w)]
        add_joining_costs(use_KF, cost_KF, price_PAV, use_L, at, add_V)
        pay_W[here] -= np.float32(stiffness)
        best = _choose(add_V, pay_W, noise, gumbel, random)
        pay_W[index(best)] += np.float32(stiffness)
        if best != worker_S[s]:
            move_lookups(use_KF, use_L, counts, at, best)
            load_W[here] -= 1
            load_W[index(best)] += 1
            worker_S[s] = best
            moved += 1
    return moved


@kernel
def reprice(loads: Loads, t: int, rate: float) -> None:
    """Raise the prices of overfull workers, lower those of others."""
    for w in range(loads.load_TW.shape[1]):
        excess = loads.load_TW[t, w] - loads.quota_TW[t, w]
        loads.price_TW[t, w] += np.float32(rate) * np.float32(excess)


class Groups(NamedTuple):
    """Samples of each use, and scratch to gather the rows of several samples."""

    first_K: I32
    sample_M: I32
    times_K: I32  # zeros between calls
    list_K: I32
    group_S: I32


@kernel
def samples_by_use(uses: Uses) -> Groups:
    """Samples by use."""
    num_uses, use_L = len(uses.use_KF), uses.use_L
    first_K = np.zeros(num_uses + 1, np.int32)
    for i in range(len(use_L)):
        first_K[use_L[i] + 1] += 1
    for k in range(num_uses):
        first_K[k + 1] += first_K[k]
    fill_K = first_K.copy()
    sample_M = np.empty(len(use_L), np.int32)
    for s in range(len(uses.worker_S)):
        for i in range(uses.first_S[s], uses.first_S[s + 1]):
            k = use_L[i]
            sample_M[fill_K[k]] = s
            fill_K[k] += 1
    return Groups(
        first_K,
        sample_M,
        np.zeros(num_uses, np.int32),
        np.empty(num_uses + 1, np.int32),  # one more than there are: it is written without asking
        np.empty(len(uses.worker_S), np.int32),
    )


@kernel
def _together(uses: Uses, groups: Groups, n: int, here: int, out_V: F32) -> int:
    """What the first n of the group cost together at each worker; returns the look-ups seen."""
    use_KF, cost_KF, price_PAV, use_L, first_S, _, linear_SV = uses
    times_K, list_K, group_S = groups.times_K, groups.list_K, groups.group_S
    padded, count, work = index(len(out_V)), 0, 0
    out_V[:] = 0
    for j in range(n):
        s = index(group_S[j])
        for w in range(len(out_V)):
            out_V[index(w)] += linear_SV[s, index(w)]
        work += first_S[s + 1] - first_S[s]
        for i in range(first_S[s], first_S[s + 1]):
            k = index(use_L[index(i)])
            list_K[index(count)] = k
            count += times_K[k] == 0
            times_K[k] += 1
    for j in range(count):
        k = index(list_K[index(j)])
        if use_KF[k, KNOWN] == 0:
            refresh_costs(use_KF, cost_KF, price_PAV, k)
        mine = use_KF[k, index(COSTS) + padded + padded + index(here)] == times_K[k]
        times_K[k] = 0
        if mine and use_KF[k, SIZE] > 1:
            add_without(use_KF, cost_KF, price_PAV, k, index(here), out_V)
        else:
            add_use(cost_KF, k, index(COSTS) if mine else index(COSTS) + padded, out_V)
    return work


@kernel
def _collect(groups: Groups, worker_S: I32, k: int, here: int) -> int:
    """The samples of use k at a worker become the group; how many."""
    n = 0
    for i in range(groups.first_K[k], groups.first_K[k + 1]):
        s = groups.sample_M[i]
        groups.group_S[index(n)] = s
        n += worker_S[s] == here
    return n


@kernel
def sweep_groups(
    uses: Uses, loads: Loads, groups: Groups, at: tuple[int, int, int, int, int], heat: Heat
) -> int:
    """Offer samples that share a row at a worker to every worker together; how many groups moved.

    `at`: the batch, its first use and the end of them, the most samples of a group, look-ups to
    spend.
    """
    t, first, last, largest, budget = at
    use_KF, _, price_PAV, use_L, first_S, worker_S, _ = uses
    num_workers = loads.load_TW.shape[1]
    add_V = np.empty(price_PAV.shape[2], np.float32)
    load_W, quota_W, price_W = loads.load_TW[t], loads.quota_TW[t], loads.price_TW[t]
    stiffness, noise, gumbel, random = heat.stiffness, heat.noise, heat.gumbel, heat.random
    pay_W = np.empty(num_workers, np.float32)
    counts, moved, work = COSTS + 2 * len(add_V), 0, 0
    while work < budget and last > first:
        bits = _draw(random)
        k = first + int((bits >> np.uint64(32)) % np.uint64(last - first))
        work += 4
        if groups.first_K[k + 1] - groups.first_K[k] < 2:
            continue
        here = int((bits & np.uint64(0xFFFF)) % np.uint64(num_workers))
        for _ in range(num_workers):
            if use_KF[k, counts + here] >= 2:
                break
            here = int((here + np.uint64(1)) % np.uint64(num_workers))
        n = use_KF[k, counts + here]
        if n < 2 or n > largest:
            continue
        _collect(groups, worker_S, k, here)
        work += _together(uses, groups, n, here, add_V)
        load_W[here] -= n
        for w in range(num_workers):
            pay_W[w] = n * (price_W[w] + np.float32(stiffness) * np.float32(load_W[w] - quota_W[w]))
        best = _choose(add_V, pay_W, noise, gumbel, random)
        load_W[best] += n
        if best != np.int64(here):
            for i in range(n):
                s = groups.group_S[i]
                move_lookups(
                    use_KF, use_L, counts, (first_S[s], first_S[s + 1], worker_S[s], 0), best
                )
                worker_S[s] = best
            moved += 1
    return moved


@inlined
def _weigh(uses: Uses, s: int, add_V: F32) -> None:
    """What a sample costs at each worker, all others where they are."""
    use_KF, cost_KF, price_PAV, use_L, first_S, worker_S, linear_SV = uses
    for w in range(len(add_V)):
        add_V[index(w)] = linear_SV[s, index(w)]
    at = (first_S[s], first_S[s + 1], worker_S[s], 0)
    add_joining_costs(use_KF, cost_KF, price_PAV, use_L, at, add_V)


@kernel
def weighed(uses: Uses, s: int) -> F32:
    """What a sample costs at each worker."""
    add_V = np.empty(uses.price_PAV.shape[2], np.float32)
    _weigh(uses, s, add_V)
    return add_V


@kernel
def initial_prices(uses: Uses, loads: Loads) -> None:
    """Lower each price by what a sample costs there on average, as batches are dealt at first.

    Without it all samples leave workers with slow links, where nobody then wants to be the first.
    """
    add_V = np.empty(uses.price_PAV.shape[2], np.float32)
    for t in range(len(loads.price_TW)):
        first, last = loads.first_T[t], loads.first_T[t + 1]
        for s in range(first, last):
            _weigh(uses, s, add_V)
            for w in range(loads.price_TW.shape[1]):
                loads.price_TW[t, w] -= add_V[w] / np.float32(last - first)


@kernel
def move_sample(uses: Uses, s: int, goes: int) -> None:
    """Move one sample."""
    at = (uses.first_S[s], uses.first_S[s + 1], uses.worker_S[s], 0)
    move_lookups(uses.use_KF, uses.use_L, COSTS + 2 * uses.price_PAV.shape[2], at, goes)
    uses.worker_S[s] = goes


@kernel
def _cheapest_move(uses: Uses, loads: Loads, t: int) -> tuple[int, int]:
    """The sample of an overfull worker that costs least elsewhere, and where; -1 if none is."""
    load_W, quota_W, worker_S = loads.load_TW[t], loads.quota_TW[t], uses.worker_S
    add_V = np.empty(uses.price_PAV.shape[2], np.float32)
    chosen, goes, least = -1, -1, np.float32(np.inf)
    for s in range(loads.first_T[t], loads.first_T[t + 1]):
        here = worker_S[s]
        if load_W[here] <= quota_W[here]:
            continue
        _weigh(uses, s, add_V)
        for w in range(len(load_W)):
            if load_W[w] < quota_W[w] and add_V[w] - add_V[here] < least:
                chosen, goes, least = s, w, add_V[w] - add_V[here]
    return chosen, goes


@kernel
def repair(uses: Uses, loads: Loads, t: int) -> None:
    """Move samples from overfull workers to those with room, cheapest first."""
    s, goes = _cheapest_move(uses, loads, t)
    while s >= 0:
        loads.load_TW[t, uses.worker_S[s]] -= 1
        loads.load_TW[t, goes] += 1
        move_sample(uses, s, goes)
        s, goes = _cheapest_move(uses, loads, t)


@kernel
def _offers(uses: Uses, loads: Loads, t: int) -> tuple[F32, I32, I32]:
    """For every sample of an overfull worker: what it pays at the best worker with room, which."""
    load_W, quota_W, price_W = loads.load_TW[t], loads.quota_TW[t], loads.price_TW[t]
    first, last = loads.first_T[t], loads.first_T[t + 1]
    add_V = np.empty(uses.price_PAV.shape[2], np.float32)
    pays_S = np.empty(last - first, np.float32)
    who_S, goes_S = np.empty(last - first, np.int32), np.empty(last - first, np.int32)
    count = 0
    for s in range(first, last):
        here = uses.worker_S[s]
        if load_W[here] <= quota_W[here]:
            continue
        _weigh(uses, s, add_V)
        pays, goes = np.float32(np.inf), -1
        for w in range(len(load_W)):
            if load_W[w] < quota_W[w] and add_V[w] + price_W[w] < pays:
                pays, goes = add_V[w] + price_W[w], w
        if goes >= 0:
            pays_S[count] = pays - add_V[here] - price_W[here]
            who_S[count], goes_S[count] = s, goes
            count += 1
    return pays_S[:count], who_S[:count], goes_S[:count]


@kernel
def refit(uses: Uses, loads: Loads, t: int, rounds: int) -> None:
    """Bring a batch to its quotas quickly; a place costs then what its last sample would pay.

    In every round the cheaper half of the moves that are needed is made without looking again.
    """
    load_W, quota_W, price_W = loads.load_TW[t], loads.quota_TW[t], loads.price_TW[t]
    for turn in range(rounds):
        excess = 0
        for w in range(len(load_W)):
            excess += max(0, load_W[w] - quota_W[w])
        if excess == 0:
            return
        pays_S, who_S, goes_S = _offers(uses, loads, t)
        wanted = excess if turn == rounds - 1 else (excess + 1) // 2
        paid_W = np.zeros(len(load_W), np.float32)
        for i in np.argsort(pays_S):
            here, goes = uses.worker_S[who_S[i]], goes_S[i]
            if wanted > 0 and load_W[here] > quota_W[here] and load_W[goes] < quota_W[goes]:
                move_sample(uses, who_S[i], goes)
                load_W[here] -= 1
                load_W[goes] += 1
                paid_W[goes] = max(paid_W[goes], pays_S[i])
                wanted -= 1
        price_W -= paid_W


@kernel
def swaps(uses: Uses, loads: Loads, t: int) -> int:
    """One round of swaps: the best movers of each pair of workers change places if it pays."""
    num_workers = loads.load_TW.shape[1]
    add_V = np.empty(uses.price_PAV.shape[2], np.float32)
    first, last = loads.first_T[t], loads.first_T[t + 1]
    best_WW = np.full((num_workers, num_workers), np.inf, np.float32)
    who_WW = np.full((num_workers, num_workers), -1, np.int32)
    done = 0
    for s in range(first, last):
        here = uses.worker_S[s]
        _weigh(uses, s, add_V)
        for w in range(num_workers):
            gain = add_V[w] - add_V[here]
            if w != here and gain < best_WW[here, w]:
                best_WW[here, w], who_WW[here, w] = gain, s
            if w == here or who_WW[w, here] < 0 or gain + best_WW[w, here] >= -1e-4:
                continue
            other = who_WW[w, here]
            if uses.worker_S[other] != w:
                best_WW[w, here], who_WW[w, here] = np.inf, -1
                continue
            move_sample(uses, s, w)
            _weigh(uses, other, add_V)
            if gain + add_V[here] - add_V[w] < -1e-4:
                move_sample(uses, other, here)
                best_WW[w, here], who_WW[w, here] = np.inf, -1
                done += 1
                break
            move_sample(uses, s, here)
            best_WW[w, here], who_WW[w, here] = np.inf, -1
            _weigh(uses, s, add_V)
    return done
