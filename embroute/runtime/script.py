"""A plan as messages: who sends which rows to whom, in which phase, in which order.

Both ends derive the same groups from the same plan, so that no message needs a request or a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import NUM_RECORDS
from embroute.kernels.transfers import Transfers

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Rows of one arena that travel as one block between a worker and a shard."""

    worker: int
    shard: int
    arena: int
    record: int
    rows: I64
    slots: I32


def groups(lists: Sequence[Transfers], phase: int, num_shards: int) -> list[Group]:
    """The blocks of a phase in the order they are sent: by worker, shard, arena, record."""
    worker, row, slot, arena, record = (
        np.concatenate([getattr(part, name)[part.phase == phase] for part in lists])
        for name in ("worker", "row", "slot", "arena", "record")
    )
    if not len(row):
        return []
    shard = row % num_shards
    key = worker.astype(np.int64) * num_shards + shard
    key = (key * 256 + arena) * NUM_RECORDS + record
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    parts = np.split(order, starts[1:])
    return [
        Group(
            int(worker[part[0]]),
            int(shard[part[0]]),
            int(arena[part[0]]),
            int(record[part[0]]),
            row[part],
            slot[part],
        )
        for part in parts
    ]
