"""Steps in which rows are read and trained where the shards keep them: no copies, no slots."""

from __future__ import annotations

import numpy as np

from embroute.kernels.caches import Cells, Found, Placement, numbers
from embroute.kernels.codes import NO_HOLDER
from embroute.kernels.order import Moves
from embroute.kernels.transfers import NO_TRANSFERS
from embroute.policy.parts import I64, Scene
from embroute.policy.plan import Moving


def unheld(cells: Cells, rows_U: I64) -> Found:
    """What a step finds of its rows where nobody ever has a copy."""
    count = len(rows_U)
    copies_UW = np.zeros((count, cells.cell_NW.shape[1]), np.int32)
    return Found(numbers(cells, rows_U), copies_UW, np.full(count, NO_HOLDER, np.int32))


def nothing_moves(scene: Scene) -> Moving:
    """No touch has a slot; only gradients will leave, of rows that several workers touch."""
    nowhere, none = np.full(len(scene.cell_T), -1, np.int32), np.empty(0, np.int32)
    placement = Placement(nowhere, nowhere.astype(np.int64), np.full(2, -1, np.int64))
    moves = Moves(none, none, none.astype(np.uint8), none, 0)
    return Moving(placement, NO_TRANSFERS, NO_TRANSFERS, NO_TRANSFERS, moves)
