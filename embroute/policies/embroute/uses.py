"""Which workers use which row in each batch of a window, and what one more sample there adds.

A *use* is a row in one batch of the window; the workers whose samples touch the row there are its
set. The cost of a use depends on its set and on the owner that the use before left behind:

    alone at w                      ALONE of w, or nothing if w owns the row
    shared                          SHARE of every worker of the set, less the PULL of the owner
    alone, next use not in sight    the use's tail less, as a share of ALONE: w owns the row

Everything known of a use lies in one record of whole numbers and floats, two cache lines for eight
workers: what other workers would add is kept there and made anew when the set, the owner or the
next set has changed. Inner loops get arrays, not tuples: each array of a call costs two counts.
Axes: S samples of the window, L look-ups (distinct rows of a sample), K uses, F fields of a use,
W workers, V workers padded to whole chunks, A arenas, P prices, N rows of the window's batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import F32, I32, I64, U8
from embroute.kernels.jit import inlined, kernel
from embroute.kernels.memory import index

# Fields of a use: workers in its set, the sum of their numbers, the owner before it, the uses of
# the row before and after, its arena, whether its costs are known, and the tail (a float). Then V
# floats of a use by one worker alone, V floats of what another worker adds, V counts of samples.
SIZE, SUM, OWNER, BEFORE, AFTER, ARENA, KNOWN, TAIL, COSTS = 0, 1, 2, 3, 4, 5, 6, 7, 8
NO_OWNER = -1
ALONE, SHARE, PULL = 0, 1, 2  # prices
CHUNK = 8
# A use's arena is a code: arenas, times kinds of use, times homes. Kinds: one more if the next step
# uses the row too, two more if the step before did; NEW_USE if nobody ever did.
USE_KINDS, NEW_USE = 6, 4
MOST_AFFINITY = 255  # of what is remembered of a row: all its recent uses


class Uses(NamedTuple):
    """The uses of a window and the samples that make them."""

    use_KF: I32
    cost_KF: F32  # the same memory as floats
    price_PAV: F32
    use_L: I32
    first_S: I32  # look-ups of sample s are use_L[first_S[s] : first_S[s + 1]]
    worker_S: I32
    linear_SV: F32  # cost of the rows that no other sample of the window touches


@inlined
def _splitting(use_KF: I32, cost_KF: F32, price_PAV: F32, k: int, sole: int) -> np.float32:
    """What a second worker adds to a use by one, beside its own share."""
    a, owned = index(use_KF[k, ARENA]), use_KF[k, OWNER] == np.int32(sole)
    base: np.float32 = price_PAV[SHARE, a, sole] - cost_KF[k, index(COSTS) + sole]
    spared: np.float32 = price_PAV[PULL, a, sole] if owned else np.float32(0)
    return base - spared


@kernel
def refresh_costs(use_KF: I32, cost_KF: F32, price_PAV: F32, k: int) -> None:
    """Make the costs of use k known."""
    padded = index(price_PAV.shape[2])
    joins, counts = index(COSTS) + padded, index(COSTS) + padded + padded
    a, owner, after = index(use_KF[k, ARENA]), use_KF[k, OWNER], use_KF[k, AFTER]
    for w in range(padded):
        cost_KF[k, index(COSTS) + w] = price_PAV[ALONE, a, w]
    if owner >= 0:
        cost_KF[k, index(COSTS) + index(owner)] = np.float32(0)
    if after < 0:
        for w in range(padded):
            cost_KF[k, index(COSTS) + w] -= cost_KF[k, TAIL] * price_PAV[ALONE, a, w]
    else:
        kind = index(ALONE if use_KF[index(after), SIZE] == 1 else PULL)
        later = index(use_KF[index(after), ARENA])
        for w in range(padded):
            there = use_KF[index(after), counts + w] > 0
            spared = price_PAV[kind, later, w] if there else np.float32(0)
            cost_KF[k, index(COSTS) + w] -= spared
    base = np.float32(0)
    if use_KF[k, SIZE] == 1:
        base = _splitting(use_KF, cost_KF, price_PAV, k, index(use_KF[k, SUM]))
    for w in range(padded):
        absent = use_KF[k, counts + w] == 0
        cost_KF[k, joins + w] = (price_PAV[SHARE, a, w] + base) if absent else np.float32(0)
    if owner >= 0 and use_KF[k, counts + index(owner)] == 0:
        cost_KF[k, joins + index(owner)] -= price_PAV[PULL, a, index(owner)]
    use_KF[k, KNOWN] = 1


@inlined
def add_use(cost_KF: F32, k: int, start: int, out_V: F32) -> None:
    """Add one of the two rows of costs of use k."""
    for chunk in range(index(len(out_V)) // index(CHUNK)):
        first = index(chunk) * index(CHUNK)
        for j in range(CHUNK):
            out_V[first + index(j)] += cost_KF[k, start + first + index(j)]


@inlined
def add_without(use_KF: I32, cost_KF: F32, price_PAV: F32, k: int, here: int, out_V: F32) -> None:
    """Add what joining use k costs each worker if `here` leaves it and others stay."""
    padded = index(len(out_V))
    a, owner = index(use_KF[k, ARENA]), use_KF[k, OWNER]
    if use_KF[k, SIZE] > 2:
        add_use(cost_KF, k, index(COSTS) + padded, out_V)
        spared = price_PAV[PULL, a, here] if owner == np.int32(here) else np.float32(0)
        out_V[here] += price_PAV[SHARE, a, here] - spared
    else:
        sole = index(use_KF[k, SUM] - np.int32(here))
        base = _splitting(use_KF, cost_KF, price_PAV, k, sole)
        for w in range(padded):
            out_V[w] += price_PAV[SHARE, a, w] + base
        out_V[sole] -= price_PAV[SHARE, a, sole] + base
        if owner >= 0 and owner != np.int32(sole):
            out_V[index(owner)] -= price_PAV[PULL, a, index(owner)]


@inlined
def add_joining_costs(
    use_KF: I32, cost_KF: F32, price_PAV: F32, use_L: I32, at: tuple[int, int, int, int], out_V: F32
) -> None:
    """Add what a sample costs at each worker, all others where they are.

    `at`: the first of its look-ups, the end of them, its worker, and how many workers there are:
    a row that all of them touch costs nobody more. 0 looks at such rows too.
    """
    first, last, worker, everyone = at
    here, padded = index(worker), index(len(out_V))
    for i in range(index(first), index(last)):
        k = index(use_L[index(i)])
        if use_KF[k, KNOWN] == 0:
            refresh_costs(use_KF, cost_KF, price_PAV, k)
        mine = use_KF[k, index(COSTS) + padded + padded + here] == 1
        if use_KF[k, SIZE] == everyone and not mine:
            continue
        if mine and use_KF[k, SIZE] > 1:
            add_without(use_KF, cost_KF, price_PAV, k, here, out_V)
        else:
            add_use(cost_KF, k, index(COSTS) if mine else index(COSTS) + padded, out_V)


@inlined
def _renew(use_KF: I32, k: int) -> None:
    """Tell the use after k who owns the row now; costs here and beside it are unknown."""
    use_KF[k, KNOWN] = 0
    after, before = use_KF[k, AFTER], use_KF[k, BEFORE]
    if after >= 0:
        use_KF[index(after), OWNER] = use_KF[k, SUM] if use_KF[k, SIZE] == 1 else NO_OWNER
        use_KF[index(after), KNOWN] = 0
    if before >= 0:
        use_KF[index(before), KNOWN] = 0


@inlined
def move_lookups(
    use_KF: I32, use_L: I32, counts: int, at: tuple[int, int, int, int], goes: int
) -> None:
    """Move a sample's look-ups to another worker; `counts`: where a record's counts begin."""
    first, last, worker, _ = at
    here, there = index(worker), index(goes)
    for i in range(index(first), index(last)):
        k = index(use_L[index(i)])
        use_KF[k, index(counts) + here] -= 1
        left = use_KF[k, index(counts) + here] == 0
        joined = use_KF[k, index(counts) + there] == 0
        use_KF[k, index(counts) + there] += 1
        if left or joined:
            use_KF[k, SIZE] += np.int32(joined) - np.int32(left)
            use_KF[k, SUM] += np.int32(joined) * np.int32(there) - np.int32(left) * np.int32(here)
            _renew(use_KF, k)


@kernel
def count_samples(uses: Uses) -> None:
    """Enter every sample at its worker into uses that are empty so far."""
    use_KF, use_L = uses.use_KF, uses.use_L
    counts = index(COSTS + 2 * uses.price_PAV.shape[2])
    for s in range(len(uses.worker_S)):
        w = index(uses.worker_S[s])
        for i in range(uses.first_S[s], uses.first_S[s + 1]):
            k = index(use_L[i])
            use_KF[k, counts + w] += 1
            if use_KF[k, counts + w] == 1:
                use_KF[k, SIZE] += 1
                use_KF[k, SUM] += np.int32(w)
    for k in range(len(use_KF)):
        _renew(use_KF, k)


class Nodes(NamedTuple):
    """Rows of the window's batches one after the other, before single ones are folded."""

    before_N: I32  # the use before in the window, or -1
    owner_N: I32  # who owns the row before its first use in the window
    arena_N: U8
    tail_N: F32


class Folded(NamedTuple):
    """Look-ups of the uses that are kept, and the cost of the others."""

    use_L: I32
    first_S: I32
    linear_SV: F32


@kernel
def _single(node_L: I32, first_S: I64, num_nodes: int) -> tuple[I32, I32, I32]:
    """Samples that touch each node; look-ups without repetitions, and the first of each sample."""
    samples_N, latest_N = np.zeros(num_nodes, np.int32), np.full(num_nodes, -1, np.int32)
    kept_L = np.empty(len(node_L), np.int32)
    start_S = np.zeros(len(first_S), np.int32)
    count = 0
    for s in range(len(first_S) - 1):
        for i in range(first_S[s], first_S[s + 1]):
            if node_L[i] < 0:
                continue
            n = index(node_L[i])
            if latest_N[n] == s:
                continue
            latest_N[n] = s
            samples_N[n] += 1
            kept_L[count] = n
            count += 1
        start_S[s + 1] = count
    return samples_N, kept_L[:count], start_S


@kernel
def _active(nodes: Nodes, samples_N: I32) -> tuple[I32, I32]:
    """Number of each node that is kept, -1 for folded ones; and the nodes that are kept."""
    before_N = nodes.before_N
    chained_N = before_N >= 0
    for n in range(len(before_N)):
        if before_N[n] >= 0:
            chained_N[before_N[n]] = True
    number_N = np.full(len(before_N), -1, np.int32)
    kept = np.empty(len(before_N), np.int32)
    count = 0
    for n in range(len(before_N)):
        if samples_N[n] > 1 or chained_N[n]:
            number_N[n] = count
            kept[count] = n
            count += 1
    return number_N, kept[:count]


@kernel
def _records(nodes: Nodes, number_N: I32, kept: I32, padded: int) -> I32:
    """Records of the kept uses, without samples so far."""
    use_KF = np.zeros((len(kept), COSTS + 3 * padded), np.int32)
    for k in range(len(kept)):
        use_KF[k, AFTER] = NO_OWNER
    for k in range(len(kept)):
        n = kept[k]
        before = nodes.before_N[n]
        use_KF[k, BEFORE] = number_N[before] if before >= 0 else NO_OWNER
        use_KF[k, OWNER] = nodes.owner_N[n] if before < 0 else NO_OWNER
        use_KF[k, ARENA] = nodes.arena_N[n]
        if before >= 0:
            use_KF[number_N[before], AFTER] = k
    return use_KF


@kernel
def _fold(nodes: Nodes, number_N: I32, kept_L: I32, start_S: I32, price_PAV: F32) -> Folded:
    """Look-ups of kept uses, and the cost of the others per sample and worker."""
    padded = price_PAV.shape[2]
    linear_SV = np.zeros((len(start_S) - 1, padded), np.float32)
    use_L, first_S = np.empty(len(kept_L), np.int32), np.zeros(len(start_S), np.int32)
    count = 0
    for s in range(len(linear_SV)):
        for i in range(start_S[s], start_S[s + 1]):
            n = index(kept_L[i])
            if number_N[n] >= 0:
                use_L[count] = number_N[n]
                count += 1
                continue
            a, owner = index(nodes.arena_N[n]), nodes.owner_N[n]
            for w in range(padded):
                linear_SV[s, w] += (np.float32(1) - nodes.tail_N[n]) * price_PAV[ALONE, a, w]
            if owner >= 0:
                linear_SV[s, owner] -= price_PAV[ALONE, a, owner]
        first_S[s + 1] = count
    return Folded(use_L[:count], first_S, linear_SV)


def collect_uses(
    nodes: Nodes, node_L: I32, first_S: I64, worker_S: I32, price_PAV: F32
) -> tuple[Uses, I32]:
    """The uses of a window and their nodes; rows touched once, by one sample, are folded."""
    samples_N, kept_L, start_S = _single(node_L, first_S, len(nodes.before_N))
    number_N, kept = _active(nodes, samples_N)
    use_KF = _records(nodes, number_N, kept, price_PAV.shape[2])
    folded = _fold(nodes, number_N, kept_L, start_S, price_PAV)
    cost_KF = use_KF.view(np.float32)
    cost_KF[:, TAIL] = np.where(use_KF[:, AFTER] < 0, nodes.tail_N[kept], 0)
    use_L, kept_S, linear_SV = folded
    uses = Uses(use_KF, cost_KF, price_PAV, use_L, kept_S, worker_S, linear_SV)
    count_samples(uses)
    return uses, kept


@kernel
def recall_affinity(affinity_NW: U8, number_N: I32) -> tuple[U8, F32]:
    """What is remembered of each row, by worker, and at all workers together as a part of MOST."""
    known_NW = np.empty((len(number_N), affinity_NW.shape[1]), np.uint8)
    again_N = np.empty(len(number_N), np.float32)
    for n in range(len(number_N)):
        number, known = index(number_N[n]), 0
        for w in range(affinity_NW.shape[1]):
            known_NW[n, index(w)] = affinity_NW[number, index(w)]
            known += affinity_NW[number, index(w)]
        again_N[n] = np.float32(known) / np.float32(MOST_AFFINITY)
    return known_NW, again_N


@kernel
def add_affinity(linear_SV: F32, known_NW: U8, worth_N: F32, node_L: I32, first_S: I64) -> None:
    """Make workers cheaper for samples whose rows were used there before."""
    for s in range(len(linear_SV)):
        for i in range(first_S[s], first_S[s + 1]):
            if node_L[i] < 0 or worth_N[index(node_L[i])] == 0:
                continue
            n = index(node_L[i])
            worth = worth_N[n] / np.float32(MOST_AFFINITY)
            for w in range(known_NW.shape[1]):
                linear_SV[s, index(w)] -= worth * np.float32(known_NW[n, index(w)])


@kernel
def total(uses: Uses) -> float:
    """Cost of the window as it is dealt."""
    use_KF, price_PAV = uses.use_KF, uses.price_PAV
    counts = COSTS + 2 * price_PAV.shape[2]
    cost = 0.0
    for s in range(len(uses.worker_S)):
        cost += uses.linear_SV[s, uses.worker_S[s]]
    for k in range(len(use_KF)):
        size, a, owner = use_KF[k, SIZE], use_KF[k, ARENA], use_KF[k, OWNER]
        kind = ALONE if size == 1 else SHARE
        for w in range(price_PAV.shape[2]):
            if use_KF[k, counts + w] > 0:
                cost += price_PAV[kind, a, w]
        if owner >= 0 and use_KF[k, counts + owner] > 0:
            cost -= price_PAV[ALONE if size == 1 else PULL, a, owner]
        if size == 1 and use_KF[k, AFTER] < 0:
            cost -= uses.cost_KF[k, TAIL] * price_PAV[ALONE, a, use_KF[k, SUM]]
    return cost
