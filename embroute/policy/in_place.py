"""The plan of a step in which rows are read and trained where the shards keep them."""

from __future__ import annotations

import numpy as np

from embroute.kernels.caches import Cells, Found, Placement, numbers
from embroute.kernels.codes import NO_HOLDER
from embroute.kernels.order import Moves
from embroute.kernels.transfers import NO_TRANSFERS, Decision, updates
from embroute.policy.parts import I64, Dealing, Scene
from embroute.policy.plan import Plan


def unheld(cells: Cells, rows_U: I64) -> Found:
    """What a step finds of its rows where nobody ever has a copy."""
    count = len(rows_U)
    copies_UW = np.zeros((count, cells.cell_NW.shape[1]), np.int32)
    return Found(numbers(cells, rows_U), copies_UW, np.full(count, NO_HOLDER, np.int32))


def plan_in_place(scene: Scene, dealing: Dealing, decision: Decision) -> Plan:
    """A step that moves nothing but gradients of rows that several workers touch."""
    rows, touched = scene.rows, scene.touches
    nowhere = np.full(len(touched.unique_T), -1, np.int32)
    placement = Placement(nowhere, nowhere.astype(np.int64), np.full(2, -1, np.int64))
    none = np.empty(0, np.int32)
    return Plan(
        step=scene.window.step,
        now=scene.window.now,
        worker_S=dealing.worker_S,
        rows=rows,
        touches=touched,
        found=scene.found,
        decision=decision,
        placement=placement,
        returns=NO_TRANSFERS,
        evictions=NO_TRANSFERS,
        pulls=NO_TRANSFERS,
        updates=updates(rows, touched, decision, placement),
        moves=Moves(none, none, none.astype(np.uint8), none, 0),
        replica_UW=np.empty((0, scene.copies_UW.shape[1]), np.int32),
        outlook=None,
        in_place=True,
    )
