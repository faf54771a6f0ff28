"""Blocks of rows packed into one message per peer and phase, the same way at both ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from embroute.engine.schedule import TransferBlock
from embroute.engine.store import RecordWidths
from embroute.kernels.array_types import U8
from embroute.kernels.codes import GRADIENT, MAX_CHUNKS
from embroute.kernels.rows import Floats

_RATE_BYTES = 8


class PendingBlock(NamedTuple):
    """A block, and the step whose plan orders it: that made the gradients it may hold."""

    step: int
    block: TransferBlock


OUTSIDE = -1  # the step of what no plan orders: evaluations, refills


def blocks_of_step(step: int, blocks: Iterable[TransferBlock]) -> list[PendingBlock]:
    """Blocks of one step."""
    return [PendingBlock(step, block) for block in blocks]


class StagedBlock(NamedTuple):
    """A block with its rows, copied out of the cache where its slots may be taken over."""

    item: PendingBlock
    rows: Floats | None = None  # still in the cache

    @property
    def block(self) -> TransferBlock:
        """Which rows."""
        return self.item.block


class ArrivedBlock(NamedTuple):
    """A block and its rows, within a message."""

    item: PendingBlock
    rows: Floats


class RowMessage(NamedTuple):
    """What a message held: its blocks, and the learning rate of each step with gradients."""

    blocks: list[ArrivedBlock]
    rates: dict[int, float]


def _gradient_steps(items: Iterable[PendingBlock]) -> list[int]:
    """Steps whose gradients a message holds: each needs its learning rate."""
    return sorted({item.step for item in items if item.block.record == GRADIENT})


def message_bytes(items: Sequence[PendingBlock], widths: RecordWidths) -> int:
    """Bytes of a message."""
    blocks = sum(widths.nbytes(item.block) for item in items)
    return blocks + _RATE_BYTES * len(_gradient_steps(items))


def views_in(
    items: Sequence[PendingBlock], message: U8, widths: RecordWidths
) -> list[ArrivedBlock]:
    """Where the blocks of a message lie in it, one after the other."""
    blocks, at = [], 0
    for item in items:
        size = widths.nbytes(item.block)
        rows = message[at : at + size].view(widths.dtype)
        blocks.append(ArrivedBlock(item, rows.reshape(-1, widths.columns(item.block))))
        at += size
    return blocks


def pack_rates(items: Iterable[PendingBlock], rates: dict[int, float], message: U8) -> None:
    """Write the learning rates behind a message's blocks."""
    steps = _gradient_steps(items)
    if steps:
        found = np.array([rates[step] for step in steps], np.float64).view(np.uint8)
        message[-len(found) :] = found


def unpack_rows(items: Sequence[PendingBlock], message: U8, widths: RecordWidths) -> RowMessage:
    """The blocks of a message, as views of it."""
    steps = _gradient_steps(items)
    rates = np.frombuffer(message[len(message) - _RATE_BYTES * len(steps) :].tobytes(), np.float64)
    return RowMessage(
        views_in(items, message, widths), dict(zip(steps, rates.tolist(), strict=True))
    )


_T = TypeVar("_T", PendingBlock, StagedBlock)


def in_chunks(entries: Iterable[_T], parts: int) -> list[list[_T]]:
    """What moves in each of some parts; a block is within one, whoever made fewer or more."""
    found: list[list[_T]] = [[] for _ in range(parts)]
    for entry in entries:
        found[entry.block.chunk * parts // MAX_CHUNKS].append(entry)
    return found


class DeferredSends(Generic[_T]):
    """What waits for the early phase of a later step, in the order in which it will leave."""

    def __init__(self) -> None:
        self._by_step: defaultdict[int, list[_T]] = defaultdict(list)

    def add(self, step: int, entries: Iterable[_T]) -> None:
        """Let entries leave with the early phase of a step."""
        self._by_step[step].extend(entries)

    def take(self, step: int) -> list[_T]:
        """What leaves with the early phase of a step."""
        return self._by_step.pop(step, [])

    def take_all(self) -> list[_T]:
        """Everything, for a drain."""
        entries = [entry for step in sorted(self._by_step) for entry in self._by_step[step]]
        self._by_step.clear()
        return entries
