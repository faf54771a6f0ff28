"""Steps in which rows are read and trained where the shards keep them: no copies, no slots."""

from __future__ import annotations

import numpy as np

from embroute.kernels.array_types import I64
from embroute.kernels.codes import NO_HOLDER
from embroute.planner.interfaces import SyncContext
from embroute.planner.kernels.cache import CachedCopies, Cells, Placement, row_numbers
from embroute.planner.kernels.eviction import EvictionMoves
from embroute.planner.kernels.transfers import NO_TRANSFERS
from embroute.planner.plan import CacheMoves


def unheld(cells: Cells, rows_U: I64) -> CachedCopies:
    """What a step finds of its rows where nobody ever has a copy."""
    count = len(rows_U)
    copies_UW = np.zeros((count, cells.cell_NW.shape[1]), np.int32)
    return CachedCopies(row_numbers(cells, rows_U), copies_UW, np.full(count, NO_HOLDER, np.int32))


def nothing_moves(context: SyncContext) -> CacheMoves:
    """No touch has a slot; only gradients will leave, of rows that several workers touch."""
    nowhere, none = np.full(len(context.cell_T), -1, np.int32), np.empty(0, np.int32)
    placement = Placement(nowhere, nowhere.astype(np.int64), np.full(2, -1, np.int64))
    moves = EvictionMoves(none, none, none.astype(np.uint8), none, 0)
    return CacheMoves(placement, NO_TRANSFERS, NO_TRANSFERS, NO_TRANSFERS, moves)
