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
    """An assignment in the making, and for each pair of workers its cheapest movers.

    The shortlist of j to k is a truncated lazy heap: `value_WWB[j, k, :count_WW[j, k]]` falls
    towards its end and holds what moving `sample_WWB[j, k]` from j to k adds to the cost. Every
    sample at j whose move to k costs less than `bound_WW[j, k]` is listed, and nothing listed
    costs more than that, so the last entry is the cheapest of all. Entries of samples that have
    left j are dropped when they come last. `edge_WW` is the value of the last entry, or 0 if j
    holds a blank and that is less; infinity if there is nothing to move.
    """

    cost_SW: F64
    worker_S: I32
    room_W: I64
    blank_W: I64
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
def enlist(board: AssignmentState, i: int, j: int, k: int) -> None:
    """Put the move of sample i from j to k on its shortlist if it belongs there."""
    value = board.cost_SW[i, k] - board.cost_SW[i, j]
    if not value < board.bound_WW[j, k]:
        return
    values, samples, size = board.value_WWB[j, k], board.sample_WWB[j, k], board.count_WW[j, k]
    if size == values.size:
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
        board.count_WW[j, k] = size
    values[place], samples[place] = value, i
    if size == values.size:
        board.bound_WW[j, k] = values[0]


@kernel
def enlist_all(board: AssignmentState, i: int, j: int) -> None:
    """Offer every move of sample i, now at j, to the shortlists of j."""
    cost_W, bound_W = board.cost_SW[i], board.bound_WW[j]
    here = cost_W[j]
    for k in range(cost_W.size):
        if cost_W[k] - here < bound_W[k] and k != j:
            enlist(board, i, j, k)


@kernel
def refill_shortlist(board: AssignmentState, j: int, k: int) -> None:
    """Make an exhausted shortlist anew from all samples at j."""
    board.bound_WW[j, k] = np.inf
    for i in range(board.worker_S.size):
        if board.worker_S[i] == j:
            enlist(board, i, j, k)


@kernel
def refresh_shortlists(board: AssignmentState, j: int) -> None:
    """Drop departed samples from the ends of the shortlists of j and set its edges."""
    count_W, bound_W, edge_W = board.count_WW[j], board.bound_WW[j], board.edge_WW[j]
    dearest = 0.0 if board.blank_W[j] > 0 else np.inf
    for k in range(count_W.size):
        size = count_W[k]
        while size > 0 and board.worker_S[board.sample_WWB[j, k, size - 1]] != j:
            size -= 1
        count_W[k] = size
        if size == 0 and bound_W[k] < np.inf:
            refill_shortlist(board, j, k)
            size = count_W[k]
        edge_W[k] = min(dearest, board.value_WWB[j, k, size - 1]) if size > 0 else dearest


@kernel
def assign_cheapest(board: AssignmentState, price_W: F64) -> int:
    """Give every sample its cheapest worker at these prices; how many have none at all."""
    homeless = 0
    for i in range(board.worker_S.size):
        j = cheapest(board.cost_SW[i], price_W, board.room_W)
        board.worker_S[i] = j
        if j < 0:
            homeless += 1
            continue
        board.room_W[j] -= 1
        enlist_all(board, i, j)
    return homeless


@kernel
def assign_blanks(board: AssignmentState, price_W: F64, blanks: int) -> None:
    """Spread blanks over the room of the workers of least price, the rest to the first of them."""
    least = price_W.min()
    for k in range(price_W.size):
        if price_W[k] == least:
            taken = min(blanks, max(board.room_W[k], 0))
            board.blank_W[k] += taken
            board.room_W[k] -= taken
            blanks -= taken
    first = np.argmin(price_W)
    board.blank_W[first] += blanks
    board.room_W[first] -= blanks
    for j in range(price_W.size):
        refresh_shortlists(board, j)


@kernel
def nearest_room(board: AssignmentState, search: PathSearch) -> int:
    """Dijkstra from all overfull workers; the first worker with room it comes to, else -1."""
    price_W, distance_W, parent_W, settled_W = search
    here, distance = -1, np.inf
    for k in range(price_W.size):
        parent_W[k], settled_W[k] = -1, False
        distance_W[k] = 0.0 if board.room_W[k] < 0 else np.inf
        if distance_W[k] < distance:
            here, distance = k, 0.0
    while here >= 0 and board.room_W[here] <= 0:
        settled_W[here] = True
        edge_W, floor, start = board.edge_WW[here], distance, distance - price_W[here]
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
    """Make the path to the target free and keep every other move from being a gain."""
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
def path_cost(board: AssignmentState, path: I32) -> float:
    """What one more sample along the path adds to the cost."""
    total = 0.0
    for step in range(path.size - 1):
        total += board.edge_WW[path[step + 1], path[step]]
    return total


@kernel
def take_mover(board: AssignmentState, j: int, k: int) -> int:
    """The sample whose move from j to k is cheapest, or -1 and one blank less at j."""
    size = board.count_WW[j, k]
    if size > 0 and board.value_WWB[j, k, size - 1] == board.edge_WW[j, k]:
        return int(board.sample_WWB[j, k, size - 1])
    board.blank_W[j] -= 1
    return -1


@kernel
def move_along(board: AssignmentState, path: I32) -> None:
    """Move the cheapest sample or blank along every edge of a path, which runs target first."""
    moved = np.empty(path.size - 1, np.int32)
    for step in range(moved.size):
        moved[step] = take_mover(board, path[step + 1], path[step])
    for step in range(moved.size):
        if moved[step] < 0:
            board.blank_W[path[step]] += 1
        else:
            board.worker_S[moved[step]] = path[step]
            enlist_all(board, moved[step], path[step])
    for j in path:
        refresh_shortlists(board, j)
    board.room_W[path[0]] -= 1
    board.room_W[path[-1]] += 1


@kernel
def move_overflow(board: AssignmentState, search: PathSearch) -> int:
    """Move samples from overfull workers to those with room; how many could not be moved."""
    target = nearest_room(board, search)
    while target >= 0:
        raise_prices(search, target)
        path = path_to(target, search.parent_W)
        cost = path_cost(board, path)
        move_along(board, path)
        # No edge of the path can get cheaper, so an equal sum means equal edges and a path that
        # is still shortest: with many ties this saves most of the searches.
        while (
            board.room_W[path[0]] > 0
            and board.room_W[path[-1]] < 0
            and path_cost(board, path) <= cost
        ):
            move_along(board, path)
        target = nearest_room(board, search)
    return int(-np.minimum(board.room_W, 0).sum())
