"""Blocks of rows packed into one message per peer and phase, the same way at both ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import GRADIENT, MOST_PARTS
from embroute.kernels.rows import Floats
from embroute.runtime.script import Block
from embroute.runtime.store import Widths

Bytes = npt.NDArray[np.uint8]
_RATE_BYTES = 8


class Item(NamedTuple):
    """A block, and the step whose plan orders it: that made the gradients it may hold."""

    step: int
    block: Block


OUTSIDE = -1  # the step of what no plan orders: evaluations, refills


def items(step: int, blocks: Iterable[Block]) -> list[Item]:
    """Blocks of one step."""
    return [Item(step, block) for block in blocks]


class Staged(NamedTuple):
    """A block with its rows, copied out of the cache because its slots may be taken over."""

    item: Item
    rows: Floats

    @property
    def block(self) -> Block:
        """Which rows."""
        return self.item.block


class Parcel(NamedTuple):
    """What a message held: its blocks, and the learning rate of each step with gradients."""

    blocks: list[Staged]
    rates: dict[int, float]


def _gradient_steps(items: Iterable[Item]) -> list[int]:
    """Steps whose gradients a message holds: each needs its learning rate."""
    return sorted({item.step for item in items if item.block.record == GRADIENT})


def parcel_bytes(items: Sequence[Item], widths: Widths) -> int:
    """Bytes of a message."""
    blocks = sum(widths.nbytes(item.block) for item in items)
    return blocks + _RATE_BYTES * len(_gradient_steps(items))


def wrap(staged: Sequence[Staged], rates: dict[int, float]) -> Bytes:
    """The blocks one after the other, then the learning rates."""
    parts = [entry.rows.reshape(-1).view(np.uint8) for entry in staged]
    steps = _gradient_steps(entry.item for entry in staged)
    parts.append(np.array([rates[step] for step in steps], np.float64).view(np.uint8))
    return np.concatenate(parts)


def unwrap(items: Sequence[Item], message: Bytes, widths: Widths) -> Parcel:
    """The blocks of a message, as views of it."""
    blocks, at = [], 0
    for item in items:
        size = widths.nbytes(item.block)
        rows = message[at : at + size].view(widths.dtype)
        blocks.append(Staged(item, rows.reshape(-1, widths.columns(item.block))))
        at += size
    rates = np.frombuffer(message[at:].tobytes(), np.float64).tolist()
    return Parcel(blocks, dict(zip(_gradient_steps(items), rates, strict=True)))


class Buffers:
    """Memory for messages, kept from phase to phase: new pages cost more than the copy into them.

    What a buffer held is gone when it is taken again.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Bytes] = {}

    def take(self, use: str, peer: int, size: int) -> Bytes:
        """Bytes for a message to or from a peer."""
        kept = self._kept.get((use, peer))
        if kept is None or len(kept) < size:
            kept = self._kept[use, peer] = np.empty(size + size // 4, np.uint8)
        return kept[:size]


T = TypeVar("T", Item, Staged)


def in_parts(entries: Iterable[T], parts: int) -> list[list[T]]:
    """What moves in each of some parts; a block is within one, whoever made fewer or more."""
    found: list[list[T]] = [[] for _ in range(parts)]
    for entry in entries:
        found[entry.block.part * parts // MOST_PARTS].append(entry)
    return found


class Pending(Generic[T]):
    """What waits for the early phase of a later step, in the order in which it will leave."""

    def __init__(self) -> None:
        self._by_step: defaultdict[int, list[T]] = defaultdict(list)

    def add(self, step: int, entries: Iterable[T]) -> None:
        """Let entries leave with the early phase of a step."""
        self._by_step[step].extend(entries)

    def take(self, step: int) -> list[T]:
        """What leaves with the early phase of a step."""
        return self._by_step.pop(step, [])

    def take_all(self) -> list[T]:
        """Everything, for a drain."""
        entries = [entry for step in sorted(self._by_step) for entry in self._by_step[step]]
        self._by_step.clear()
        return entries
