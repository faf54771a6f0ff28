"""Sharing-aware dispatch: the cost of sets of rows per worker, over a window of batches.

ESD and Herald price each sample by itself. Here a transfer is paid once per worker and row, a row
that several workers touch in one step is paid by all of them, and the uses of a row in the next
batches count. Batches are dealt when they enter the window and improved in every step until their
own; so the effort of several steps goes into each (docs/policy.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.touches import Lookups, touches
from embroute.policy.dispatch.block import block
from embroute.policy.dispatch.crew import check_ranges, choose_crew, due
from embroute.policy.dispatch.esd import esd
from embroute.policy.dispatch.search import (
    Search,
    carried,
    improve,
    prices,
    settle,
    spread,
    weights,
)
from embroute.policy.parts import Dealing, Dispatch, View
from embroute.policy.plan import touched_rows

I32 = npt.NDArray[np.int32]


def _excess(view: View, worker_S: I32) -> int:
    """Rows by which a dispatch exceeds the caches, at the worker and arena where it is most."""
    now, state = view.window.now, view.state
    offsets = np.ascontiguousarray(now.batch.sample_offsets)
    lookups = Lookups(now.unique_of_lookup, offsets)
    num_rows, capacity_WA = len(view.rows.rows_U), state.caches.capacity_WA
    nothing = np.empty(0, np.int32)
    touched = touches(lookups, worker_S, state.setup.num_workers, num_rows, nothing)
    rows_WA = touched_rows(touched, view.rows.arena_U, capacity_WA.shape)
    return int((rows_WA - capacity_WA).max())


def sharing(search: Search) -> Dispatch:
    """Minimise the transfers of all batches of the window, what workers share counted once."""

    def choose(view: View) -> Dealing:
        outlook, setup = view.state.outlook, view.state.setup
        if setup.num_workers == 1 or not len(view.window.now.batch):
            return block().choose(view)
        if not view.window.step and search.free:
            check_ranges(search, setup.num_workers)
        if due(view, search):
            outlook = choose_crew(view, search)
        price_PAV = prices(setup, weights(outlook, search, setup.num_workers))
        if not price_PAV.any():
            return block().choose(view)
        dealt = spread(view, outlook, search, price_PAV)
        improve(dealt, search, view.window.step)
        settle(dealt)
        worker_S = dealt.uses.worker_S[: dealt.loads.first_T[1]].copy()
        if _excess(view, worker_S) > 0:
            # Rows gather where they are cheap, but a cache must hold those of a step.
            plain = (esd().choose(view).worker_S, block().choose(view).worker_S)
            worker_S = min(plain, key=lambda dealt_S: max(0, _excess(view, dealt_S)))
        return Dealing(worker_S, carried(dealt, outlook))

    return Dispatch("sharing", choose, ahead=search.ahead, timed=search.timed, free=search.free)
