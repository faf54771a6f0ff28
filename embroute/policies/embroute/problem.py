"""The window of batches as an optimisation problem for sharing-aware dispatch.

A transfer is paid once per worker and row. A row that several workers touch in one step is paid by
all of them. Uses of a row in the next batches count (docs/policy.md).

Axes: S samples of the window, T its batches, W workers, V workers padded, U distinct rows of one
batch, N nodes (the rows of all batches), C price classes, P phases or prices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from embroute.cost.step_time import link_rates, shard_rate
from embroute.data.window import Indexed
from embroute.kernels.array_types import F32, I32, I64
from embroute.kernels.codes import EARLY, GRADIENT, LATE, SHARD_LINK, URGENT, VALUE, VALUE_STATE
from embroute.planner.interfaces import DispatchContext
from embroute.planner.kernels.cache import CachedCopies, find_copies
from embroute.planner.setup import Setup, split_quotas
from embroute.policies.embroute.anneal import (
    FORBIDDEN,
    Groups,
    Loads,
    initial_prices,
    samples_by_use,
)
from embroute.policies.embroute.row_allreduce import NO_REDUCTION, Reduction, choose_reduced_rows
from embroute.policies.embroute.search_state import SearchOptions, SearchState
from embroute.policies.embroute.uses import (
    ALONE,
    CHUNK,
    NO_PULL,
    UNTRAINED_USE,
    USE_KINDS,
    Nodes,
    UsePhases,
    Uses,
    add_affinity,
    collect_uses,
    recall_affinity,
)

# Values beyond the window, as shares of the price of a use.
TAIL_WORTH = 0.25  # owning a row that was often used
OWNED_AFFINITY = 0.1  # a worker that has always used a row, if the row has an owner
UNOWNED_AFFINITY = 0.5  # and if it has none
MIN_WEIGHT = 0.1  # weight of a second that no worker waits for

# Effort, in look-ups read.
LOOKUPS_PER_S = 25e6  # that one core reads, about
LEAST_EFFORT = 200  # per sample; with less, other policies do as well
BUILD_EFFORT = 1.5  # cost of building the problem, per look-up of the window
GROUP_EFFORT = 1.0  # look-ups read for groups of samples, for each one read for single samples
# Effort grows with workers and samples of a step up to here.
FULL_EFFORT_WORKERS, FULL_EFFORT_SAMPLES = 16, 2048

USE_PHASES = (  # by kind of use
    UsePhases(EARLY, EARLY),
    UsePhases(EARLY, URGENT),
    UsePhases(LATE, EARLY),
    UsePhases(LATE, URGENT),
    UsePhases(NO_PULL, EARLY),
    UsePhases(NO_PULL, URGENT),
)
BUSY_KIND = 3  # the kind of use of a row that every step uses
MAX_PRICE_CLASSES = 256  # a price class is one byte


class WindowProblem(NamedTuple):
    """A window of batches, laid out for the search."""

    entries: tuple[Indexed, ...]
    reduced: tuple[Reduction, ...]  # rows that cost nothing wherever samples go
    depth: int  # batches ahead that the search asks for; a stream's end may have fewer
    uses: Uses
    loads: Loads
    groups: Groups
    first_use_T: I64
    nodes: Nodes
    node_L: I32  # of all look-ups
    first_S: I64  # look-ups of sample s are node_L[first_S[s] : first_S[s + 1]]
    first_node_T: I64  # and the number of nodes at the end
    unit: float  # mean price of a row


def num_shard_groups(setup: Setup) -> int:
    """Groups of shards with prices of their own.

    All shards where some share a host with workers; otherwise one group stands for all.
    """
    crosses_WK = setup.cluster.crosses_WK
    mixed = bool(crosses_WK.any() and not crosses_WK.all())
    shards = crosses_WK.shape[1]
    return shards if mixed and USE_KINDS * len(setup.arenas) * shards <= MAX_PRICE_CLASSES else 1


def prices(setup: Setup, weight_PW: F32) -> F32:
    """Prices of an exclusive use, of a share and of its pull, in units of the cheapest use.

    An exclusive use costs a pull now and a push later: postponing the push saves nothing.
    `weight_PW`: what a second counts early, urgent, late, and at the shards. The kind of a use
    decides the phases of its pull and push (`USE_PHASES`).
    """
    cluster, record_XA = setup.cluster, setup.record_bytes_XA
    up, down = link_rates(cluster)
    shard_s_W = weight_PW[SHARD_LINK] / shard_rate(cluster)
    many_groups = num_shard_groups(setup) > 1
    crosses_HW = cluster.crosses_WK.T if many_groups else cluster.crosses_WK.mean(1)[None]
    classes = []
    for crosses_W, phases in itertools.product(crosses_HW, USE_PHASES):
        is_pulled = phases.pull != NO_PULL
        pull_W = crosses_W * (weight_PW[phases.pull] / down + shard_s_W) * is_pulled
        push_W = crosses_W * (weight_PW[phases.push] / up + shard_s_W)
        alone_AW = np.outer(record_XA[VALUE_STATE], pull_W + push_W)
        pull_AW = np.outer(record_XA[VALUE], pull_W)
        share_AW = pull_AW + np.outer(record_XA[GRADIENT], push_W)
        classes.append(np.stack([alone_AW, share_AW, pull_AW]))
    price_PCW = np.concatenate(classes, 1)
    plain = np.outer(record_XA[VALUE_STATE], cluster.crosses_WK.any(1) * (1 / down + 1 / up))
    unit = plain[plain > 0].min(initial=np.inf)
    padded = -(-setup.num_workers // CHUNK) * CHUNK
    price_PCV = np.zeros((*price_PCW.shape[:2], padded), np.float32)
    price_PCV[:, :, : setup.num_workers] = price_PCW / unit
    return price_PCV


def second_weights(memory: SearchState, num_workers: int) -> F32:
    """What a second of each phase counts at each worker, and at the shards."""
    if len(memory.weight_PW):
        weight_PW = memory.weight_PW.copy()
        weight_PW[:SHARD_LINK] += np.float32(MIN_WEIGHT)
        return weight_PW
    weight_PW = np.ones((SHARD_LINK + 1, num_workers), np.float32)
    weight_PW[SHARD_LINK] = 0
    return weight_PW


def _nodes(
    entries: tuple[Indexed, ...],
    copies: list[CachedCopies],
    setup: Setup,
    tail_N: F32,
    local_init: bool,
) -> Nodes:
    """The rows of all batches, each with its previous use in the window or its owner."""
    # Uses are numbered over the whole run: `base` is the first number of a batch.
    base = entries[0].base
    last_N = np.concatenate([entry.last_U for entry in entries])
    before_N = np.where(last_N >= base, last_N - base, -1).astype(np.int32)
    owner_N = np.maximum(np.concatenate([batch_copies.only_U for batch_copies in copies]), -1)
    late_N = np.concatenate([entry.before_U == entry.step - 1 for entry in entries])
    # If a use is late, the row's previous use is urgent. Nothing is known of the batch after the
    # last one: its rows are taken to be used again if they were used in the step before.
    urgent_N = np.zeros(len(late_N), np.bool_)
    urgent_N[before_N[late_N & (before_N >= 0)]] = True
    urgent_N[-len(entries[-1].rows_U) :] = late_N[-len(entries[-1].rows_U) :]
    arena_N = np.concatenate([setup.arena_of(entry.rows_U) for entry in entries])
    groups = num_shard_groups(setup)
    group_N = np.concatenate([entry.rows_U % groups for entry in entries]) if groups > 1 else 0
    number_N = np.concatenate([batch_copies.number_U for batch_copies in copies])
    untrained_N = (before_N < 0) & (number_N == 0)
    untrained_N &= local_init and setup.seeded
    kind_N = np.where(untrained_N, UNTRAINED_USE, 2 * late_N) + urgent_N + USE_KINDS * group_N
    class_N = (arena_N + len(setup.arenas) * kind_N).astype(np.uint8)
    return Nodes(before_N=before_N, owner_N=owner_N, class_N=class_N, tail_N=tail_N)


def _lookups(entries: tuple[Indexed, ...], reduced: tuple[Reduction, ...]) -> tuple[I32, I64, I64]:
    """Nodes of all look-ups, the first look-up of each sample, the first sample of each batch.

    The node of a row that costs nothing is -1.
    """
    base, node_L, first_S = entries[0].base, [], [np.zeros(1, np.int64)]
    for entry, reduction in zip(entries, reduced, strict=True):
        unique = entry.unique_of_lookup
        if len(reduction.rows):
            costs_U = np.ones(len(entry.rows_U), np.bool_)
            costs_U[reduction.rows] = False
            unique = np.where((unique >= 0) & costs_U[unique], unique, -1)
        node_L.append(np.where(unique >= 0, unique + np.int32(entry.base - base), -1))
        first_S.append(first_S[-1][-1] + entry.batch.sample_offsets[1:])
    sizes = [len(entry.batch) for entry in entries]
    first_T = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return np.concatenate(node_L).astype(np.int32), np.concatenate(first_S), first_T


def _starting_workers(entries: tuple[Indexed, ...], memory: SearchState, quota_TW: I32) -> I32:
    """Workers chosen in earlier steps; samples without one start in blocks."""
    batches = []
    for t, entry in enumerate(entries):
        worker_S = np.repeat(np.arange(len(quota_TW[t]), dtype=np.int32), quota_TW[t])
        known_S = memory.ahead_TS[t, : len(entry.batch)] if t < len(memory.ahead_TS) else worker_S
        worker_S[: len(known_S)] = np.where(known_S >= 0, known_S, worker_S[: len(known_S)])
        batches.append(worker_S)
    return np.concatenate(batches)


def _quotas(setup: Setup, memory: SearchState, entries: tuple[Indexed, ...]) -> I32:
    """Samples of each worker in each batch."""
    share_W = memory.share_W
    sizes = [len(entry.batch) for entry in entries]
    if len(share_W) and (memory.range_2W[0] != memory.range_2W[1]).any():
        return np.array([split_quotas(share_W, size) for size in sizes], np.int32)
    return np.array([setup.quotas(size) for size in sizes], np.int32)


def pace_effort(options: SearchOptions, memory: SearchState, samples: int) -> SearchOptions:
    """The options with an effort that keeps up with training.

    Time is the cost model's, not a clock's, so that plans are the same in every run.
    """
    if not options.paced:
        return options
    effort = int(LOOKUPS_PER_S * float(memory.took_1[0]) / samples)
    return replace(options, effort=min(options.effort, max(LEAST_EFFORT, effort)))


def lookups_to_read(options: SearchOptions, samples: int, num_workers: int) -> float:
    """Look-ups to read in a step."""
    lookups = options.effort * samples * min(1, FULL_EFFORT_WORKERS / num_workers)
    return lookups * min(1, FULL_EFFORT_SAMPLES / samples)


def keep_owners(owner_N: I32, rows_N: I64) -> I32:
    """Rows stay where they are."""
    return owner_N


def _depth(now: Indexed, options: SearchOptions, setup: Setup) -> int:
    """Batches ahead in the problem: as many as the effort allows to read once.

    Fewer where batches are large and workers are many, but at least one if any is asked for.
    """
    lookups, chunks = len(now.unique_of_lookup), -(-setup.num_workers // CHUNK)
    per_lookup = BUILD_EFFORT + 1 + GROUP_EFFORT
    budget = lookups_to_read(options, len(now.batch), setup.num_workers)
    batches = int(budget / max(1, per_lookup * lookups))
    room = options.max_window // max(1, chunks * lookups)
    return min(options.ahead, max(1, min(batches, room) - 1))


def _loads(worker_S: I32, first_T: I64, quota_TW: I32, memory: SearchState) -> Loads:
    """Samples of each worker in each batch, and the prices of earlier steps."""
    count = quota_TW.shape[1]
    spans = itertools.pairwise(first_T)
    load_TW = np.array([np.bincount(worker_S[a:b], minlength=count) for a, b in spans], np.int32)
    price_TW = np.zeros(load_TW.shape, np.float32)
    known_TW = memory.price_TW[: len(price_TW)]
    price_TW[: len(known_TW)] = known_TW
    price_TW[len(known_TW) :] = known_TW[-1]
    if len(memory.range_2W):
        price_TW[:, memory.range_2W[1] <= 0] = FORBIDDEN
    return Loads(first_T=first_T, load_TW=load_TW, quota_TW=quota_TW, price_TW=price_TW)


def _mean_price(price_PCV: F32, setup: Setup) -> float:
    """The mean price of a row that every step uses, over arenas and workers."""
    # Classes end with the kinds of the last shard group: skip back to its BUSY_KIND.
    arenas = len(setup.arenas)
    first = arenas * (USE_KINDS - BUSY_KIND)
    busy_AV = price_PCV[ALONE][-first : arenas - first]
    return float(busy_AV[:, : setup.num_workers].mean())


def _affinity_worth(nodes: Nodes, again_N: F32, unit: float) -> F32:
    """What a worker that has always used a row is worth, in prices; 0 for rows without a past."""
    worth_N = np.where(nodes.owner_N >= 0, OWNED_AFFINITY, UNOWNED_AFFINITY) * (again_N > 0)
    return (unit * worth_N).astype(np.float32)


def build_problem(
    context: DispatchContext,
    memory: SearchState,
    options: SearchOptions,
    price_PCV: F32,
    owners: Callable[[I32, I64], I32] = keep_owners,
) -> WindowProblem:
    """The window's uses, with every sample where earlier steps placed it.

    `owners`: the owners to assume, given the present owners and the rows.
    """
    setup = context.state.setup
    depth = _depth(context.window.now, options, setup)
    entries = (context.window.now, *context.window.ahead[:depth])
    reduced = (
        NO_REDUCTION._replace(rows=context.everywhere),
        *(choose_reduced_rows(entry, setup, memory) for entry in entries[1:]),
    )
    node_L, first_S, first_T = _lookups(entries, reduced)
    cells = context.state.caches.cells
    copies = [context.copies, *(find_copies(cells, entry.rows_U) for entry in entries[1:])]
    number_N = np.concatenate([batch_copies.number_U for batch_copies in copies])
    known_NW, again_N = recall_affinity(memory.affinity_NW, number_N)
    nodes = _nodes(entries, copies, setup, np.float32(TAIL_WORTH) * again_N, options.local_init)
    rows_N = np.concatenate([entry.rows_U for entry in entries])
    nodes = nodes._replace(owner_N=owners(nodes.owner_N, rows_N))
    quota_TW = _quotas(setup, memory, entries)
    worker_S = _starting_workers(entries, memory, quota_TW)
    uses, node_K = collect_uses(nodes, node_L, first_S, worker_S, price_PCV)
    unit = _mean_price(price_PCV, setup)
    worth_N = _affinity_worth(nodes, again_N, unit)
    add_affinity(uses.linear_SV, known_NW, worth_N, node_L, first_S)
    loads = _loads(worker_S, first_T, quota_TW, memory)
    if not memory.price_TW.any():
        initial_prices(uses, loads)
    bases = [entry.base - entries[0].base for entry in entries] + [len(nodes.before_N)]
    return WindowProblem(
        entries=entries,
        reduced=reduced,
        depth=depth,
        uses=uses,
        loads=loads,
        groups=samples_by_use(uses),
        first_use_T=np.searchsorted(node_K, bases),  # uses are in the order of their nodes
        nodes=nodes,
        node_L=node_L,
        first_S=first_S,
        first_node_T=np.array(bases, np.int64),
        unit=unit,
    )
