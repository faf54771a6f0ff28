"""Successive shortest paths over workers: the compiled part of `embroute.planner.assignment`.

Axes: S samples, W workers, B places on a shortlist.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embroute.kernels.array_types import F64, I32, I64
from embroute.kernels.jit import kernel


class AssignmentState(NamedTuple):
    """A partial assignment, and for each pair of workers the cheapest samples to move.

    The shortlist of j to k is a truncated lazy heap: `value_WWB[j, k, :count_WW[j, k]]` falls
    towards its end and holds what moving `sample_WWB[j, k]` from j to k adds to the cost. Every
    sample at j whose move to k costs less than `bound_WW[j, k]` is listed, and nothing listed
    costs more than that, so the last entry is the cheapest of all. Entries of samples that have
    left j are dropped when they come last. `edge_WW` is the value of the last entry, or 0 if j
    holds a dummy and 0 is less; infinity if there is nothing to move.
    """

    cost_SW: F64
    worker_S: I32
    room_W: I64
    dummies_W: I64
    value_WWB: F64
    sample_WWB: I32
    count_WW: I32
    bound_WW: F64
    edge_WW: F64


class PathSearch(NamedTuple):
    """Prices, and the shortest-path tree from the overfull workers under them."""

    price_W: F64
    distance_W: F64
    parent_W: I32
    settled_W: NDArray[np.bool_]


@kernel
def has_fault(cost_SW: F64, limit: float) -> bool:
    """Whether a cost is NaN, or beyond the limit without being +infinity."""
    faults = 0
    for cost in cost_SW.ravel():
        if not (cost >= -limit) or (cost > limit and cost != np.inf):
            faults += 1
    return faults > 0


@kernel
def cheapest(cost_W: F64, price_W: F64, room_W: I64) -> int:
    """The worker of least cost + price, of equals that with most room, then the first; or -1."""
    best = np.inf
    for k in range(cost_W.size):
        best = min(best, cost_W[k] + price_W[k])
    chosen = -1
    for k in range(cost_W.size):
        if cost_W[k] + price_W[k] == best and (chosen < 0 or room_W[k] > room_W[chosen]):
            chosen = k
    return chosen if best < np.inf else -1


@kernel
def enlist(state: AssignmentState, i: int, j: int, k: int) -> None:
    """Put the move of sample i from j to k on its shortlist if it belongs there.

    Values fall along the list, so that the cheapest move is at its end.
    """
    value = state.cost_SW[i, k] - state.cost_SW[i, j]
    if not value < state.bound_WW[j, k]:
        return
    values, samples, size = state.value_WWB[j, k], state.sample_WWB[j, k], state.count_WW[j, k]
    if size == values.size:
        # Full: the dearest move, at the front, makes room.
        place = 0
        while place + 1 < size and values[place + 1] > value:
            values[place], samples[place] = values[place + 1], samples[place + 1]
            place += 1
    else:
        place = size
        while place > 0 and values[place - 1] <= value:
            values[place], samples[place] = values[place - 1], samples[place - 1]
            place -= 1
        size += 1
        state.count_WW[j, k] = size
    values[place], samples[place] = value, i
    # A full list says nothing about moves dearer than its front.
    if size == values.size:
        state.bound_WW[j, k] = values[0]


@kernel
def enlist_all(state: AssignmentState, i: int, j: int) -> None:
    """Offer every move of sample i, now at j, to the shortlists of j."""
    cost_W, bound_W = state.cost_SW[i], state.bound_WW[j]
    here = cost_W[j]
    for k in range(cost_W.size):
        if cost_W[k] - here < bound_W[k] and k != j:
            enlist(state, i, j, k)


@kernel
def refill_shortlist(state: AssignmentState, j: int, k: int) -> None:
    """Fill an exhausted shortlist again from all samples at j."""
    state.bound_WW[j, k] = np.inf
    for i in range(state.worker_S.size):
        if state.worker_S[i] == j:
            enlist(state, i, j, k)


@kernel
def refresh_shortlists(state: AssignmentState, j: int) -> None:
    """Drop departed samples from the ends of the shortlists of j and set its edges."""
    count_W, bound_W, edge_W = state.count_WW[j], state.bound_WW[j], state.edge_WW[j]
    dearest = 0.0 if state.dummies_W[j] > 0 else np.inf
    for k in range(count_W.size):
        size = count_W[k]
        while size > 0 and state.worker_S[state.sample_WWB[j, k, size - 1]] != j:
            size -= 1
        count_W[k] = size
        if size == 0 and bound_W[k] < np.inf:
            refill_shortlist(state, j, k)
            size = count_W[k]
        edge_W[k] = min(dearest, state.value_WWB[j, k, size - 1]) if size > 0 else dearest


@kernel
def assign_cheapest(state: AssignmentState, price_W: F64) -> int:
    """Give every sample its cheapest worker at these prices; returns how many have none."""
    unassigned = 0
    for i in range(state.worker_S.size):
        j = cheapest(state.cost_SW[i], price_W, state.room_W)
        state.worker_S[i] = j
        if j < 0:
            unassigned += 1
            continue
        state.room_W[j] -= 1
        enlist_all(state, i, j)
    return unassigned


@kernel
def assign_dummies(state: AssignmentState, price_W: F64, dummies: int) -> None:
    """Fill the room of the workers of least price with dummies, the rest at the first of them."""
    least = price_W.min()
    for k in range(price_W.size):
        if price_W[k] == least:
            taken = min(dummies, max(state.room_W[k], 0))
            state.dummies_W[k] += taken
            state.room_W[k] -= taken
            dummies -= taken
    first = np.argmin(price_W)
    state.dummies_W[first] += dummies
    state.room_W[first] -= dummies
    for j in range(price_W.size):
        refresh_shortlists(state, j)


@kernel
def nearest_room(state: AssignmentState, search: PathSearch) -> int:
    """Dijkstra from all overfull workers to the nearest worker with room, else -1."""
    price_W, distance_W, parent_W, settled_W = search
    here, distance = -1, np.inf
    for k in range(price_W.size):
        parent_W[k], settled_W[k] = -1, False
        distance_W[k] = 0.0 if state.room_W[k] < 0 else np.inf
        if distance_W[k] < distance:
            here, distance = k, 0.0
    while here >= 0 and state.room_W[here] <= 0:
        settled_W[here] = True
        edge_W, floor, start = state.edge_WW[here], distance, distance - price_W[here]
        parent, here, distance = here, -1, np.inf
        for k in range(price_W.size):
            if settled_W[k]:
                continue
            # Rounding can make a free move slightly negative; distances must not fall.
            reach = max(floor, start + (edge_W[k] + price_W[k]))
            if reach < distance_W[k]:
                distance_W[k], parent_W[k] = reach, parent
            if distance_W[k] < distance:
                here, distance = k, distance_W[k]
    return here


@kernel
def raise_prices(search: PathSearch, target: int) -> None:
    """Make the path to the target free and keep every other move from being a gain.

    Workers that Dijkstra settled are nearer than the target: their prices rise by the difference.
    """
    reach = search.distance_W[target]
    for k in range(search.price_W.size):
        if search.settled_W[k]:
            search.price_W[k] += reach - search.distance_W[k]


@kernel
def path_to(target: int, parent_W: I32) -> I32:
    """Workers from the target back to the overfull one where its path starts."""
    path = np.empty(parent_W.size, np.int32)
    size, k = 0, target
    while k >= 0:
        path[size] = k
        size += 1
        k = parent_W[k]
    return path[:size]


@kernel
def path_cost(state: AssignmentState, path: I32) -> float:
    """What one more sample along the path adds to the cost."""
    total = 0.0
    for step in range(path.size - 1):
        total += state.edge_WW[path[step + 1], path[step]]
    return total


@kernel
def take_mover(state: AssignmentState, j: int, k: int) -> int:
    """The sample whose move from j to k is cheapest, or -1 for a dummy, which leaves j."""
    size = state.count_WW[j, k]
    if size > 0 and state.value_WWB[j, k, size - 1] == state.edge_WW[j, k]:
        return int(state.sample_WWB[j, k, size - 1])
    state.dummies_W[j] -= 1
    return -1


@kernel
def move_along(state: AssignmentState, path: I32) -> None:
    """Move the cheapest sample or dummy along every edge of a path, which runs target first."""
    # Movers are chosen before any moves: a move changes the shortlists of the next worker.
    moved = np.empty(path.size - 1, np.int32)
    for step in range(moved.size):
        moved[step] = take_mover(state, path[step + 1], path[step])
    for step in range(moved.size):
        if moved[step] < 0:
            state.dummies_W[path[step]] += 1
        else:
            state.worker_S[moved[step]] = path[step]
            enlist_all(state, moved[step], path[step])
    for j in path:
        refresh_shortlists(state, j)
    state.room_W[path[0]] -= 1
    state.room_W[path[-1]] += 1


@kernel
def move_overflow(state: AssignmentState, search: PathSearch) -> int:
    """Move samples from overfull workers to workers with room; returns how many have no place."""
    target = nearest_room(state, search)
    while target >= 0:
        raise_prices(search, target)
        path = path_to(target, search.parent_W)
        cost = path_cost(state, path)
        move_along(state, path)
        # No edge of the path can get cheaper, so an equal sum means equal edges and a path that
        # is still shortest: with many ties this saves most of the searches.
        while (
            state.room_W[path[0]] > 0
            and state.room_W[path[-1]] < 0
            and path_cost(state, path) <= cost
        ):
            move_along(state, path)
        target = nearest_room(state, search)
    return int(-np.minimum(state.room_W, 0).sum())
