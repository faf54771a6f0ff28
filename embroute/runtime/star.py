"""Sums over workers by way of the first shard: each sends what it has and gets the sum back.

A ring passes every slow link several times, one after the other, and each time behind whatever else
is on it. Here a worker's part leaves as soon as it is there, while others still compute, and the
sum goes to all of them at once. `cost.sums_by_shard` says for which sizes that is better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from embroute.runtime.exchange import Bytes, Channel, LostPeerError

DTYPES = (torch.float32, torch.float64)
I64 = npt.NDArray[np.int64]
# What a worker says before its part: how many numbers follow and are awaited, and of how many bytes
# each. A worker that has nothing to add sends no part; one that leaves says so.
SENT, AWAITED, WIDTH = range(3)
GONE = -1


def can_add_up(flat: torch.Tensor) -> bool:
    """Whether a tensor is one whose numbers the centre can add."""
    return flat.device.type == "cpu" and flat.dtype in DTYPES


class StarSums:
    """A worker's end. One thread only."""

    def __init__(self, channel: Channel, centre: str) -> None:
        self.channel, self.centre = channel, centre

    def sum(self, flat: torch.Tensor, adds: bool = True) -> None:
        """Replace by the sum over the workers that add something, taken in their order."""
        count = len(flat)
        head = np.array([count if adds else 0, count, flat.itemsize], np.int64)
        data: Bytes = flat.numpy().view(np.uint8)
        part = [(self.centre, data)] if adds else []
        self.channel.swap([(self.centre, head.view(np.uint8)), *part], [])
        self.channel.swap([], [(self.centre, data)])

    def leave(self) -> None:
        """No more sums."""
        self.channel.swap([(self.centre, np.array([GONE, 0, 0], np.int64).view(np.uint8))], [])


def add_up(channel: Channel, workers: Sequence[str]) -> None:
    """The centre's end: sums as they are asked for, until all workers have left."""
    head_W = np.zeros((len(workers), 3), np.int64)
    while True:
        try:
            heads = (head.view(np.uint8) for head in head_W)
            channel.swap([], list(zip(workers, heads, strict=True)))
            if (head_W[:, SENT] == GONE).all():
                return
            _reduce_once(channel, workers, head_W)
        except LostPeerError:
            return  # whoever is lost is missed elsewhere


def _reduce_once(channel: Channel, workers: Sequence[str], head_W: I64) -> None:
    """One sum."""
    asked = {tuple(head) for head in head_W[:, AWAITED:].tolist()}
    sent = set(head_W[:, SENT].tolist()) - {0}
    count, width = asked.pop()
    if asked or sent - {count}:
        raise RuntimeError(f"workers add up different things: {head_W.tolist()}")
    own = [w for w, head in zip(workers, head_W, strict=True) if head[SENT]]
    parts = [np.zeros(count, f"f{width}") for _ in own or workers[:1]]
    channel.swap([], [(w, part.view(np.uint8)) for w, part in zip(own, parts, strict=False)])
    total = parts[0]
    for part in parts[1:]:
        total += part
    channel.swap([(w, total.view(np.uint8)) for w in workers], [])
