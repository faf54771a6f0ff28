"""The cost of a dispatch over a window of batches, kept per use of a row.

A *use* is a row in one batch of the window. Its *set* holds the workers whose samples touch the row
in that batch. The cost of a use depends on its set and on the owner that the previous use left
behind. The owner is the worker that touched the row alone and so holds the newest copy.

    alone at w                      ALONE of w, or nothing if w owns the row
    shared                          SHARE of every worker of the set, less the PULL of the owner
    alone, no next use in sight     `tail` times ALONE less: w owns the row from now on

All facts about a use lie in one record of integers and floats: two cache lines for eight workers.
The record caches what one more worker would add. It is computed again after the set, the owner or
the next set has changed. Inner loops take arrays instead of tuples of arrays, because numba counts
references to every array of a tuple at each call.

Axes: S samples of the window, L look-ups (distinct rows of a sample), K uses, F fields of a use,
W workers, V workers padded to whole chunks, C price classes, P prices, N nodes (the distinct rows
of all batches, one batch after the other).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import F32, I32, I64, U8
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import index

# A record starts with eight fields: workers in the set, the sum of their numbers, the owner, the
# previous and the next use of the row, the price class, whether the costs are valid, and the tail
# (a float). Three blocks of V numbers follow from COSTS on:
#   V floats: the cost if worker v alone uses the row;
#   V floats: what worker v adds to the others of the set;
#   V counts: the samples of worker v that use the row.
# The sum of numbers names the only worker of a set of one, without a search.
SIZE, SUM, OWNER, BEFORE, AFTER, PRICE_CLASS, VALID, TAIL, COSTS = 0, 1, 2, 3, 4, 5, 6, 7, 8
NO_OWNER = -1
ALONE, SHARE, PULL = 0, 1, 2  # prices
CHUNK = 8  # workers added at once: one vector instruction of 256 bits
# A price class encodes (shard group, kind of use, arena): the arena varies fastest. Bit 0 of the
# kind: the next step uses the row too. Bit 1: the step before used it. UNTRAINED_USE and the kind
# after it: no step has trained the row yet.
USE_KINDS, UNTRAINED_USE = 6, 4
MAX_AFFINITY = 255  # a row's affinity, all workers together: all of its recent uses
NO_PULL = -1  # the phase in which an untrained row is pulled


class UsePhases(NamedTuple):
    """The phases in which the pulls and pushes of a use move."""

    pull: int
    push: int


class Uses(NamedTuple):
    """The uses of a window and the samples that make them."""

    use_KF: I32
    cost_KF: F32  # the same memory as floats
    price_PCV: F32
    use_L: I32
    first_S: I32  # look-ups of sample s are use_L[first_S[s] : first_S[s + 1]]
    worker_S: I32
    linear_SV: F32  # cost of the rows that no other sample of the window touches


class SampleLookups(NamedTuple):
    """The look-ups of one sample, as a span of `use_L`, and the worker that has the sample.

    A row that `full_size` workers touch is touched by all of them, and no move changes its cost.
    0 skips no row.
    """

    first: int
    end: int
    worker: int
    full_size: int


@inlined
def sample_lookups(first_S: I32, worker_S: I32, s: int, full_size: int) -> SampleLookups:
    """The look-ups of sample s."""
    return SampleLookups(
        first=first_S[s], end=first_S[s + 1], worker=worker_S[s], full_size=full_size
    )


@inlined
def _split_cost(use_KF: I32, cost_KF: F32, price_PCV: F32, k: int, only_worker: int) -> np.float32:
    """What a second worker adds to use k of one worker, besides its own share."""
    c, owned = index(use_KF[k, PRICE_CLASS]), use_KF[k, OWNER] == np.int32(only_worker)
    base: np.float32 = price_PCV[SHARE, c, only_worker] - cost_KF[k, index(COSTS) + only_worker]
    spared: np.float32 = price_PCV[PULL, c, only_worker] if owned else np.float32(0)
    return base - spared


@kernel
def refresh_costs(use_KF: I32, cost_KF: F32, price_PCV: F32, k: int) -> None:
    """Compute the cached costs of use k."""
    padded = index(price_PCV.shape[2])
    joins, counts = index(COSTS) + padded, index(COSTS) + padded + padded
    c, owner, after = index(use_KF[k, PRICE_CLASS]), use_KF[k, OWNER], use_KF[k, AFTER]
    for w in range(padded):
        cost_KF[k, index(COSTS) + w] = price_PCV[ALONE, c, w]
    if owner >= 0:
        cost_KF[k, index(COSTS) + index(owner)] = np.float32(0)
    # A worker that is alone here owns the row at the next use, and saves the transfer there.
    if after < 0:
        for w in range(padded):
            cost_KF[k, index(COSTS) + w] -= cost_KF[k, TAIL] * price_PCV[ALONE, c, w]
    else:
        price = index(ALONE if use_KF[index(after), SIZE] == 1 else PULL)
        next_class = index(use_KF[index(after), PRICE_CLASS])
        for w in range(padded):
            touches_next = use_KF[index(after), counts + w] > 0
            spared = price_PCV[price, next_class, w] if touches_next else np.float32(0)
            cost_KF[k, index(COSTS) + w] -= spared
    base = np.float32(0)
    if use_KF[k, SIZE] == 1:
        base = _split_cost(use_KF, cost_KF, price_PCV, k, index(use_KF[k, SUM]))
    for w in range(padded):
        absent = use_KF[k, counts + w] == 0
        cost_KF[k, joins + w] = (price_PCV[SHARE, c, w] + base) if absent else np.float32(0)
    if owner >= 0 and use_KF[k, counts + index(owner)] == 0:
        cost_KF[k, joins + index(owner)] -= price_PCV[PULL, c, index(owner)]
    use_KF[k, VALID] = 1


@inlined
def add_costs(cost_KF: F32, k: int, start: int, out_V: F32) -> None:
    """Add one block of costs of use k, which starts at field `start`."""
    # The inner loop has a constant length, so that the compiler makes one vector addition of it.
    for chunk in range(index(len(out_V)) // index(CHUNK)):
        first = index(chunk) * index(CHUNK)
        for j in range(CHUNK):
            out_V[first + index(j)] += cost_KF[k, start + first + index(j)]


@inlined
def add_costs_without(
    use_KF: I32, cost_KF: F32, price_PCV: F32, k: int, leaver: int, out_V: F32
) -> None:
    """Add what use k costs at each worker after `leaver` has left its set. Others stay in it."""
    padded = index(len(out_V))
    c, owner = index(use_KF[k, PRICE_CLASS]), use_KF[k, OWNER]
    if use_KF[k, SIZE] > 2:
        # The row stays shared: only the leaver's own cost differs from the cached ones, where it
        # is zero because the leaver is still counted.
        add_costs(cost_KF, k, index(COSTS) + padded, out_V)
        spared = price_PCV[PULL, c, leaver] if owner == np.int32(leaver) else np.float32(0)
        out_V[leaver] += price_PCV[SHARE, c, leaver] - spared
    else:
        # One worker remains, so the sum of the set's numbers less the leaver's is its number.
        remaining = index(use_KF[k, SUM] - np.int32(leaver))
        base = _split_cost(use_KF, cost_KF, price_PCV, k, remaining)
        for w in range(padded):
            out_V[w] += price_PCV[SHARE, c, w] + base
        out_V[remaining] -= price_PCV[SHARE, c, remaining] + base
        if owner >= 0 and owner != np.int32(remaining):
            out_V[index(owner)] -= price_PCV[PULL, c, index(owner)]


@inlined
def add_joining_costs(
    use_KF: I32, cost_KF: F32, price_PCV: F32, use_L: I32, sample: SampleLookups, out_V: F32
) -> None:
    """Add what a sample costs at each worker while all other samples stay where they are."""
    worker, padded = index(sample.worker), index(len(out_V))
    for i in range(index(sample.first), index(sample.end)):
        k = index(use_L[index(i)])
        if use_KF[k, VALID] == 0:
            refresh_costs(use_KF, cost_KF, price_PCV, k)
        # The worker leaves the set with this sample if no other sample of it uses the row.
        leaves = use_KF[k, index(COSTS) + padded + padded + worker] == 1
        if use_KF[k, SIZE] == sample.full_size and not leaves:
            continue
        if leaves and use_KF[k, SIZE] > 1:
            add_costs_without(use_KF, cost_KF, price_PCV, k, worker, out_V)
        else:
            # A set that this sample alone makes costs what one worker alone costs.
            add_costs(cost_KF, k, index(COSTS) if leaves else index(COSTS) + padded, out_V)


@inlined
def _pass_on_owner(use_KF: I32, k: int) -> None:
    """Write who owns the row after use k into the next use; drop cached costs that depend on k."""
    use_KF[k, VALID] = 0
    after, before = use_KF[k, AFTER], use_KF[k, BEFORE]
    if after >= 0:
        use_KF[index(after), OWNER] = use_KF[k, SUM] if use_KF[k, SIZE] == 1 else NO_OWNER
        use_KF[index(after), VALID] = 0
    if before >= 0:
        use_KF[index(before), VALID] = 0


@inlined
def move_lookups(use_KF: I32, use_L: I32, counts: int, sample: SampleLookups, target: int) -> None:
    """Move a sample's look-ups to another worker; `counts`: the first field of the counts."""
    source, destination = index(sample.worker), index(target)
    for i in range(index(sample.first), index(sample.end)):
        k = index(use_L[index(i)])
        use_KF[k, index(counts) + source] -= 1
        left = use_KF[k, index(counts) + source] == 0
        joined = use_KF[k, index(counts) + destination] == 0
        use_KF[k, index(counts) + destination] += 1
        if left or joined:
            use_KF[k, SIZE] += np.int32(joined) - np.int32(left)
            use_KF[k, SUM] += np.int32(joined) * np.int32(destination)
            use_KF[k, SUM] -= np.int32(left) * np.int32(source)
            _pass_on_owner(use_KF, k)


@kernel
def count_samples(uses: Uses) -> None:
    """Enter every sample at its worker into uses whose sets are empty so far."""
    use_KF, use_L = uses.use_KF, uses.use_L
    counts = index(COSTS + 2 * uses.price_PCV.shape[2])
    for s in range(len(uses.worker_S)):
        w = index(uses.worker_S[s])
        for i in range(uses.first_S[s], uses.first_S[s + 1]):
            k = index(use_L[i])
            use_KF[k, counts + w] += 1
            if use_KF[k, counts + w] == 1:
                use_KF[k, SIZE] += 1
                use_KF[k, SUM] += np.int32(w)
    for k in range(len(use_KF)):
        _pass_on_owner(use_KF, k)


class Nodes(NamedTuple):
    """The rows of the window's batches, one batch after the other."""

    before_N: I32  # the node of the row's previous use in the window, or -1
    owner_N: I32  # the row's owner before its first use in the window, or -1
    class_N: U8  # price class
    tail_N: F32  # share of a use's price that owning the row is worth after the window


class FoldedLookups(NamedTuple):
    """Look-ups of the uses that are kept, and the cost of the others."""

    use_L: I32
    first_S: I32
    linear_SV: F32


@kernel
def _distinct_lookups(node_L: I32, first_S: I64, num_nodes: int) -> tuple[I32, I32, I32]:
    """Samples of each node; look-ups without repetitions, and the first look-up of each sample."""
    samples_N, latest_N = np.zeros(num_nodes, np.int32), np.full(num_nodes, -1, np.int32)
    node_M = np.empty(len(node_L), np.int32)
    start_S = np.zeros(len(first_S), np.int32)
    count = 0
    for s in range(len(first_S) - 1):
        for i in range(first_S[s], first_S[s + 1]):
            if node_L[i] < 0:  # a row that costs nothing wherever the sample goes
                continue
            n = index(node_L[i])
            if latest_N[n] == s:
                continue
            latest_N[n] = s
            samples_N[n] += 1
            node_M[count] = n
            count += 1
        start_S[s + 1] = count
    return samples_N, node_M[:count], start_S


@kernel
def _number_uses(before_N: I32, samples_N: I32) -> tuple[I32, I32]:
    """The use of each node, -1 if it is folded; and the node of each use.

    A row that one sample of the window looks up has a cost that depends on this sample alone.
    """
    chained_N = before_N >= 0
    for n in range(len(before_N)):
        if before_N[n] >= 0:
            chained_N[before_N[n]] = True
    use_N = np.full(len(before_N), -1, np.int32)
    node_K = np.empty(len(before_N), np.int32)
    count = 0
    for n in range(len(before_N)):
        if samples_N[n] > 1 or chained_N[n]:
            use_N[n] = count
            node_K[count] = n
            count += 1
    return use_N, node_K[:count]


@kernel
def _empty_records(nodes: Nodes, use_N: I32, node_K: I32, padded: int) -> I32:
    """Records of the uses, without samples so far."""
    use_KF = np.zeros((len(node_K), COSTS + 3 * padded), np.int32)
    for k in range(len(node_K)):
        use_KF[k, AFTER] = NO_OWNER
    for k in range(len(node_K)):
        n = node_K[k]
        before = nodes.before_N[n]
        use_KF[k, BEFORE] = use_N[before] if before >= 0 else NO_OWNER
        use_KF[k, OWNER] = nodes.owner_N[n] if before < 0 else NO_OWNER
        use_KF[k, PRICE_CLASS] = nodes.class_N[n]
        if before >= 0:
            use_KF[use_N[before], AFTER] = k
    return use_KF


@kernel
def _fold(nodes: Nodes, use_N: I32, node_M: I32, start_S: I32, price_PCV: F32) -> FoldedLookups:
    """Look-ups of the uses, and the cost of all other rows per sample and worker."""
    padded = price_PCV.shape[2]
    linear_SV = np.zeros((len(start_S) - 1, padded), np.float32)
    use_L, first_S = np.empty(len(node_M), np.int32), np.zeros(len(start_S), np.int32)
    count = 0
    for s in range(len(linear_SV)):
        for i in range(start_S[s], start_S[s + 1]):
            n = index(node_M[i])
            if use_N[n] >= 0:
                use_L[count] = use_N[n]
                count += 1
                continue
            c, owner = index(nodes.class_N[n]), nodes.owner_N[n]
            for w in range(padded):
                linear_SV[s, w] += (np.float32(1) - nodes.tail_N[n]) * price_PCV[ALONE, c, w]
            if owner >= 0:
                linear_SV[s, owner] -= price_PCV[ALONE, c, owner]
        first_S[s + 1] = count
    return FoldedLookups(use_L[:count], first_S, linear_SV)


def collect_uses(
    nodes: Nodes, node_L: I32, first_S: I64, worker_S: I32, price_PCV: F32
) -> tuple[Uses, I32]:
    """The uses of a window and their nodes; rows that one sample touches once are folded."""
    samples_N, node_M, start_S = _distinct_lookups(node_L, first_S, len(nodes.before_N))
    use_N, node_K = _number_uses(nodes.before_N, samples_N)
    use_KF = _empty_records(nodes, use_N, node_K, price_PCV.shape[2])
    folded = _fold(nodes, use_N, node_M, start_S, price_PCV)
    cost_KF = use_KF.view(np.float32)  # integers and floats share the records' memory
    cost_KF[:, TAIL] = np.where(use_KF[:, AFTER] < 0, nodes.tail_N[node_K], 0)
    uses = Uses(
        use_KF=use_KF,
        cost_KF=cost_KF,
        price_PCV=price_PCV,
        use_L=folded.use_L,
        first_S=folded.first_S,
        worker_S=worker_S,
        linear_SV=folded.linear_SV,
    )
    count_samples(uses)
    return uses, node_K


@kernel
def recall_affinity(affinity_NW: U8, number_N: I32) -> tuple[U8, F32]:
    """The affinity of each node's row to every worker, and its sum as a share of MAX_AFFINITY."""
    known_NW = np.empty((len(number_N), affinity_NW.shape[1]), np.uint8)
    again_N = np.empty(len(number_N), np.float32)
    for n in range(len(number_N)):
        number, known = index(number_N[n]), 0
        for w in range(affinity_NW.shape[1]):
            known_NW[n, index(w)] = affinity_NW[number, index(w)]
            known += affinity_NW[number, index(w)]
        again_N[n] = np.float32(known) / np.float32(MAX_AFFINITY)
    return known_NW, again_N


@kernel
def add_affinity(linear_SV: F32, known_NW: U8, worth_N: F32, node_L: I32, first_S: I64) -> None:
    """Make workers cheaper for samples whose rows were used there before."""
    for s in range(len(linear_SV)):
        for i in range(first_S[s], first_S[s + 1]):
            if node_L[i] < 0 or worth_N[index(node_L[i])] == 0:
                continue
            n = index(node_L[i])
            worth = worth_N[n] / np.float32(MAX_AFFINITY)
            for w in range(known_NW.shape[1]):
                linear_SV[s, index(w)] -= worth * np.float32(known_NW[n, index(w)])
