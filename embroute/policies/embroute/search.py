"""The search of sharing-aware dispatch: sets of rows per worker, over a window of batches.

A transfer is paid once per worker and row, a row that several workers touch in one step is paid by
all of them, and the uses of a row in the next batches count (docs/policy.md).
Axes: S samples of the window, T its batches, W workers, V workers padded, U rows of one batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from embroute.cost.step_time import link_rates, shard_rate
from embroute.data.window import Indexed
from embroute.kernels.array_types import F32, I32, I64
from embroute.kernels.codes import EARLY, GRADIENT, LATE, SHARD_LINK, URGENT, VALUE, VALUE_STATE
from embroute.planner.interfaces import DispatchContext
from embroute.planner.kernels.cache import CachedCopies, find_copies
from embroute.planner.setup import Setup, divide
from embroute.planner.state import SearchState
from embroute.policies.embroute.anneal import (
    FORBIDDEN,
    GUMBEL,
    Groups,
    Heat,
    Loads,
    initial_prices,
    refit,
    repair,
    reprice,
    samples_by_use,
    swaps,
    sweep_groups,
    sweep_samples,
)
from embroute.policies.embroute.predicted_traffic import NO_PULL
from embroute.policies.embroute.row_allreduce import NO_REDUCTION, Reduction, choose_reduced_rows
from embroute.policies.embroute.uses import (
    ALONE,
    CHUNK,
    NEW_USE,
    USE_KINDS,
    Nodes,
    Uses,
    add_affinity,
    collect_uses,
    recall_affinity,
)


@dataclass(frozen=True)
class SearchOptions:
    """How to search. Heats, stiffness and rates are in units of the mean price of a row."""

    effort: int = 2400  # look-ups to read in a step, for each sample of its batch
    ahead: int = 14  # batches beside the current one that are dealt together
    paced: bool = False  # no more effort than a core has time for in a step
    largest_window: int = 110_000  # look-ups of them all, times chunks of workers: what caches hold
    grouping: float = 1.0  # look-ups read for groups for each one read for single samples
    hot: float = 1.0  # noise on the costs of a batch that enters the window
    cold: float = 0.02  # and of one that is about to be trained
    stiffness: float = 0.03  # price of one sample above a quota
    rate: float = 0.04  # growth of prices in a sweep per sample above a quota
    tail: float = 0.25  # worth of owning a row that was often used, of the price of a use
    affinity: float = 0.1  # worth of a worker where a row was always used before, likewise
    homing: float = 0.5  # and if nobody owns the row
    largest: int = 16  # samples of a group
    least: float = 0.1  # weight of a second that nobody waits for
    timed: bool = True  # whether step time is minimised, not the sum of all transfers
    free: bool = True  # quotas follow from the time workers take
    crew: tuple[int, ...] = ()  # workers with which a run begins; none: all
    changes: bool = True  # whether others may take over
    floor: tuple[float, ...] = (0.0,)  # least part of a batch for every worker, or for each
    ceiling: tuple[float, ...] = (1.0,)  # and most
    makes: bool = True  # rows that nobody has trained yet are not pulled


class WindowProblem(NamedTuple):
    """A window spread out for the search."""

    entries: tuple[Indexed, ...]
    reduced: tuple[Reduction, ...]  # rows that cost nothing wherever samples go
    depth: int  # batches ahead; fewer are there at the end of a stream
    uses: Uses
    loads: Loads
    groups: Groups
    first_use_T: I64
    nodes: Nodes
    node_L: I32  # of all look-ups
    first_S: I64  # look-ups of sample s are node_L[first_S[s] : first_S[s + 1]]
    first_node_T: I64
    unit: float  # mean price of a row


PACE = 25e6  # look-ups that one core reads in a second, about
LEAST_EFFORT = 200  # with less, other policies do as well
SPREADING = 1.5  # look-ups read that spreading out one of the window counts as
WIDE = (16, 2048)  # workers and samples of a step from which on effort does not grow with them
REFITS = 6  # rounds of bringing a batch to its quotas
USE_PHASES = (  # of uses: when their pulls and pushes move
    (EARLY, EARLY),
    (EARLY, URGENT),
    (LATE, EARLY),
    (LATE, URGENT),
    (NO_PULL, EARLY),
    (NO_PULL, URGENT),
)
BUSY_KIND = 3  # that of a row which is used all the time
CODES = 256  # of arena, kind and home


def num_homes(setup: Setup) -> int:
    """Shards told apart: all where some share a host with workers, else one stands for them."""
    crosses_WK = setup.cluster.crosses_WK
    mixed = bool(crosses_WK.any() and not crosses_WK.all())
    count = crosses_WK.shape[1]
    return count if mixed and USE_KINDS * len(setup.arenas) * count <= CODES else 1


def prices(setup: Setup, weight_PW: F32) -> F32:
    """Seconds of an exclusive use, of a share and of its pull, in units of the cheapest use.

    An exclusive use is a pull now and a push some time: postponing it is no saving. `weight_PW`:
    what a second counts early, urgent, late, and at the shards. For each home and arena there are
    six kinds of use: whether the step before uses the row too, so that its pull is late, or nobody
    has used it yet, so that there is none; and whether the step after uses it, so that its push is
    urgent.
    """
    cluster, record_XA = setup.cluster, setup.record_bytes_XA
    up, down = link_rates(cluster)
    shard_s_W = weight_PW[SHARD_LINK] / shard_rate(cluster)
    homes = num_homes(setup)
    parts_W = cluster.crosses_WK.T if homes > 1 else cluster.crosses_WK.mean(1)[None]
    classes = []
    for crosses, (late, urgent) in itertools.product(parts_W, USE_PHASES):
        pull_W = crosses * (weight_PW[late] / down + shard_s_W) * (late != NO_PULL)
        push_W = crosses * (weight_PW[urgent] / up + shard_s_W)
        alone = np.outer(record_XA[VALUE_STATE], pull_W + push_W)
        pull = np.outer(record_XA[VALUE], pull_W)
        share = pull + np.outer(record_XA[GRADIENT], push_W)
        classes.append(np.stack([alone, share, pull]))
    price_PAW = np.concatenate(classes, 1)
    plain = np.outer(record_XA[VALUE_STATE], cluster.crosses_WK.any(1) * (1 / down + 1 / up))
    unit = plain[plain > 0].min(initial=np.inf)
    padded = -(-setup.num_workers // CHUNK) * CHUNK
    price_PAV = np.zeros((*price_PAW.shape[:2], padded), np.float32)
    price_PAV[:, :, : setup.num_workers] = price_PAW / unit
    return price_PAV


def weights(memory: SearchState, search: SearchOptions, num_workers: int) -> F32:
    """What a second of each phase counts at each worker."""
    if len(memory.weight_PW):
        weight_PW = memory.weight_PW.copy()
        weight_PW[:SHARD_LINK] += np.float32(search.least)
        return weight_PW
    weight_PW = np.ones((SHARD_LINK + 1, num_workers), np.float32)
    weight_PW[SHARD_LINK] = 0
    return weight_PW


def _nodes(
    entries: tuple[Indexed, ...], founds: list[CachedCopies], setup: Setup, tail_N: F32, makes: bool
) -> Nodes:
    """The rows of all batches, each with its use before in the window or its owner."""
    base = entries[0].base
    last_N = np.concatenate([entry.last_U for entry in entries])
    before_N = np.where(last_N >= base, last_N - base, -1).astype(np.int32)
    owner_N = np.maximum(np.concatenate([found.only_U for found in founds]), -1)
    late_N = np.concatenate([entry.before_U == entry.step - 1 for entry in entries])
    urgent_N = np.zeros(len(late_N), np.bool_)
    urgent_N[before_N[late_N & (before_N >= 0)]] = True
    urgent_N[-len(entries[-1].rows_U) :] = late_N[-len(entries[-1].rows_U) :]
    arena_N = np.concatenate([setup.arena_of(entry.rows_U) for entry in entries])
    homes = num_homes(setup)
    home_N = np.concatenate([entry.rows_U % homes for entry in entries]) if homes > 1 else 0
    new_N = (before_N < 0) & (np.concatenate([found.number_U for found in founds]) == 0)
    new_N &= makes and setup.seeded
    kind_N = np.where(new_N, NEW_USE, 2 * late_N) + urgent_N + USE_KINDS * home_N
    arena_N = (arena_N + len(setup.arenas) * kind_N).astype(np.uint8)
    return Nodes(before_N, owner_N, arena_N, tail_N)


def _lookups(entries: tuple[Indexed, ...], reduced: tuple[Reduction, ...]) -> tuple[I32, I64, I64]:
    """Nodes of all look-ups, the first look-up of each sample, the first sample of each batch."""
    base, node_L, first_S = entries[0].base, [], [np.zeros(1, np.int64)]
    for entry, free in zip(entries, reduced, strict=True):
        unique = entry.unique_of_lookup
        if len(free.rows):
            costs_U = np.ones(len(entry.rows_U), np.bool_)
            costs_U[free.rows] = False
            unique = np.where((unique >= 0) & costs_U[unique], unique, -1)
        node_L.append(np.where(unique >= 0, unique + np.int32(entry.base - base), -1))
        first_S.append(first_S[-1][-1] + entry.batch.sample_offsets[1:])
    sizes = [len(entry.batch) for entry in entries]
    first_T = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return np.concatenate(node_L).astype(np.int32), np.concatenate(first_S), first_T


def _start(entries: tuple[Indexed, ...], memory: SearchState, quota_TW: I32) -> I32:
    """Workers chosen in earlier steps; what was never dealt starts in blocks."""
    parts = []
    for t, entry in enumerate(entries):
        worker_S = np.repeat(np.arange(len(quota_TW[t]), dtype=np.int32), quota_TW[t])
        known = memory.ahead_TS[t, : len(entry.batch)] if t < len(memory.ahead_TS) else worker_S
        worker_S[: len(known)] = np.where(known >= 0, known, worker_S[: len(known)])
        parts.append(worker_S)
    return np.concatenate(parts)


def _quotas(setup: Setup, memory: SearchState, entries: tuple[Indexed, ...]) -> I32:
    """Samples of each worker in each batch."""
    share_W = memory.share_W
    sizes = [len(entry.batch) for entry in entries]
    if len(share_W) and (memory.range_2W[0] != memory.range_2W[1]).any():
        return np.array([divide(share_W, size) for size in sizes], np.int32)
    return np.array([setup.quotas(size) for size in sizes], np.int32)


def paced(search: SearchOptions, memory: SearchState, samples: int) -> SearchOptions:
    """The search with an effort that keeps up with training: by the model's time, not the clock's.

    So it is the same whenever and wherever it is done.
    """
    if not search.paced:
        return search
    effort = int(PACE * float(memory.took_1[0]) / samples)
    return replace(search, effort=min(search.effort, max(LEAST_EFFORT, effort)))


def _work(search: SearchOptions, samples: int, num_workers: int) -> float:
    """Look-ups to read in a step."""
    return search.effort * samples * min(1, WIDE[0] / num_workers) * min(1, WIDE[1] / samples)


def _stays(owner_N: I32, rows_N: I64) -> I32:
    """Rows are where they are."""
    return owner_N


def _depth(now: Indexed, search: SearchOptions, setup: Setup) -> int:
    """Batches ahead that are dealt together: as many as the effort allows to read at all.

    Fewer where they are large and workers are many; one where that is asked for, whatever it takes.
    """
    lookups, chunks = len(now.unique_of_lookup), -(-setup.num_workers // CHUNK)
    whole = SPREADING + 1 + search.grouping
    batches = _work(search, len(now.batch), setup.num_workers) / max(1, whole * lookups)
    room = search.largest_window // max(1, chunks * lookups)
    return min(search.ahead, max(1, min(int(batches), room) - 1))


def _loads(worker_S: I32, first_T: I64, quota_TW: I32, memory: SearchState) -> Loads:
    """Samples of each worker as they are dealt, and what places cost so far."""
    count = quota_TW.shape[1]
    spans = itertools.pairwise(first_T)
    load_TW = np.array([np.bincount(worker_S[a:b], minlength=count) for a, b in spans], np.int32)
    price_TW = np.zeros(load_TW.shape, np.float32)
    known = memory.price_TW[: len(price_TW)]
    price_TW[: len(known)] = known
    price_TW[len(known) :] = known[-1]
    if len(memory.range_2W):
        price_TW[:, memory.range_2W[1] <= 0] = FORBIDDEN
    return Loads(first_T, load_TW, quota_TW, price_TW)


def build_problem(
    context: DispatchContext,
    memory: SearchState,
    search: SearchOptions,
    price_PAV: F32,
    moved: Callable[[I32, I64], I32] = _stays,
) -> WindowProblem:
    """The window's uses with every sample where earlier steps meant it to be.

    `moved`: who would own rows by now, of owners and rows.
    """
    state, window, setup = context.state, context.window, context.state.setup
    depth = _depth(window.now, search, setup)
    entries = (window.now, *window.ahead[:depth])
    cells = state.caches.cells
    founds = [context.copies, *(find_copies(cells, entry.rows_U) for entry in entries[1:])]
    quota_TW = _quotas(setup, memory, entries)
    reduced = (
        NO_REDUCTION._replace(rows=context.everywhere),
        *(choose_reduced_rows(entry, setup, memory) for entry in entries[1:]),
    )
    node_L, first_S, first_T = _lookups(entries, reduced)
    number_N = np.concatenate([found.number_U for found in founds])
    known_NW, again_N = recall_affinity(memory.affinity_NW, number_N)
    nodes = _nodes(entries, founds, setup, np.float32(search.tail) * again_N, search.makes)
    nodes = nodes._replace(
        owner_N=moved(nodes.owner_N, np.concatenate([e.rows_U for e in entries]))
    )
    worker_S = _start(entries, memory, quota_TW)
    uses, kept = collect_uses(nodes, node_L, first_S, worker_S, price_PAV)
    arenas = len(setup.arenas)
    busy = arenas * (USE_KINDS - BUSY_KIND)  # from the end: of the last home
    busy_AV = price_PAV[ALONE][-busy : arenas - busy]
    unit = float(busy_AV[:, : setup.num_workers].mean())
    worth_N = np.where(nodes.owner_N >= 0, search.affinity, search.homing) * (again_N > 0)
    worth_N = (unit * worth_N).astype(np.float32)
    add_affinity(uses.linear_SV, known_NW, worth_N, node_L, first_S)
    loads = _loads(worker_S, first_T, quota_TW, memory)
    if not memory.price_TW.any():
        initial_prices(uses, loads)
    bases = [entry.base - entries[0].base for entry in entries] + [len(nodes.before_N)]
    first_use_T = np.searchsorted(kept, bases)
    bases_T = np.array(bases, np.int64)
    groups = samples_by_use(uses)
    dealt = (uses, loads, groups, first_use_T, nodes, node_L, first_S, bases_T)
    return WindowProblem(entries, reduced, depth, *dealt, unit)


def improve(spread: WindowProblem, search: SearchOptions, step: int) -> None:
    """Heat baths over all batches, the nearer ones cooler."""
    uses, loads, unit = spread.uses, spread.loads, spread.unit
    seed = (step + 1) * 0x9E3779B97F4A7C15 % 2**64
    random = np.array([seed], np.uint64)
    cooling = search.cold / search.hot
    work = _work(search, int(loads.first_T[1]), len(loads.load_TW[0]))
    work -= SPREADING * len(spread.node_L)
    affordable = work / max(1, (1 + search.grouping) * len(uses.use_L))
    sweeps = max(1, round(affordable))
    grouping = search.grouping * min(1.0, max(0.0, 2 * affordable - 1))
    for i in range(sweeps):
        for t in range(len(spread.entries)):
            age = (spread.depth - t + (i + 0.5) / sweeps) / (spread.depth + 1)
            noise = search.hot * cooling**age * unit
            heat = Heat(noise, search.stiffness * unit, GUMBEL, random)
            sweep_samples(uses, loads, t, heat)
            first, last = spread.first_use_T[t : t + 2]
            ends = loads.first_T[t : t + 2]
            budget = int(grouping * (uses.first_S[ends[1]] - uses.first_S[ends[0]]))
            at = (t, int(first), int(last), search.largest, budget)
            sweep_groups(uses, loads, spread.groups, at, heat)
            reprice(loads, t, search.rate * unit)
    heat = Heat(0.0, search.stiffness * unit, GUMBEL, random)
    for _ in range(2):
        sweep_samples(uses, loads, 0, heat)


def enforce_quotas(spread: WindowProblem) -> None:
    """The current batch keeps its quotas exactly."""
    refit(spread.uses, spread.loads, 0, REFITS)
    repair(spread.uses, spread.loads, 0)
    for _ in range(4):
        if swaps(spread.uses, spread.loads, 0) == 0:
            break


def next_state(spread: WindowProblem, before: SearchState) -> SearchState:
    """What the next step starts from: its batch is the first of those ahead."""
    ahead_TS = np.full_like(before.ahead_TS, -1)
    price_TW = np.empty_like(before.price_TW)
    first_T, price_now_TW = spread.loads.first_T, spread.loads.price_TW
    for t in range(len(ahead_TS)):
        price_TW[t] = price_now_TW[min(t + 1, len(price_now_TW) - 1)]
        if t + 1 < len(spread.entries):
            worker_S = spread.uses.worker_S[first_T[t + 1] : first_T[t + 2]]
            fits = min(len(worker_S), ahead_TS.shape[1])
            ahead_TS[t, :fits] = worker_S[:fits]
    price_TW[price_TW >= FORBIDDEN / 2] = 0
    return before._replace(ahead_TS=ahead_TS, price_TW=price_TW)
