"""Arrays of all workers put together at the first: scores of an evaluation, say."""

from __future__ import annotations

import numpy as np

from embroute.kernels.array_types import Array
from embroute.launch.rank import RankContext


def gather_from_workers(rank: RankContext, own: Array) -> list[Array]:
    """All workers' arrays, at the first worker, by worker; nothing elsewhere.

    They may differ in length along their first axis, and in nothing else.
    """
    first, *others = rank.workers
    own = np.ascontiguousarray(own)
    if rank.index:
        size = np.array([len(own)], np.int64)
        rank.allreduce.exchange([(first, size.view(np.uint8))], [])
        rank.allreduce.exchange([(first, own.reshape(-1).view(np.uint8))] if own.size else [], [])
        return []
    sizes = [np.zeros(1, np.int64) for _ in others]
    rank.allreduce.exchange([], [(p, s.view(np.uint8)) for p, s in zip(others, sizes, strict=True)])
    found = [np.empty((int(size[0]), *own.shape[1:]), own.dtype) for size in sizes]
    pairs = [(peer, part) for peer, part in zip(others, found, strict=True) if part.size]
    rank.allreduce.exchange([], [(peer, part.reshape(-1).view(np.uint8)) for peer, part in pairs])
    return [own, *found]
