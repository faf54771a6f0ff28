"""Blocks of rows packed into one message per peer and phase, in the same way at both ends."""

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
OUTSIDE = -1  # the step of blocks that no plan orders: evaluations, refills


class PendingBlock(NamedTuple):
    """A block and its step: the step whose plan orders it and which makes its gradients, if any."""

    step: int
    block: TransferBlock


def blocks_of_step(step: int, blocks: Iterable[TransferBlock]) -> list[PendingBlock]:
    """Blocks of one step."""
    return [PendingBlock(step, block) for block in blocks]


class StagedBlock(NamedTuple):
    """A block to send, with its rows if they were copied out before their slots were reused."""

    pending: PendingBlock
    rows: Floats | None = None  # None: still in the cache

    @property
    def block(self) -> TransferBlock:
        """Which rows."""
        return self.pending.block


class ArrivedBlock(NamedTuple):
    """A block and its rows, within a message."""

    pending: PendingBlock
    rows: Floats


class RowMessage(NamedTuple):
    """The content of a message: its blocks, and the learning rate of each step with gradients."""

    blocks: list[ArrivedBlock]
    rates: dict[int, float]


def _gradient_steps(blocks: Iterable[PendingBlock]) -> list[int]:
    """Steps whose gradients a message holds: each needs its learning rate."""
    return sorted({step for step, block in blocks if block.record == GRADIENT})


def message_bytes(blocks: Sequence[PendingBlock], widths: RecordWidths) -> int:
    """Bytes of a message."""
    row_bytes = sum(widths.nbytes(block) for _, block in blocks)
    return row_bytes + _RATE_BYTES * len(_gradient_steps(blocks))


def views_in(
    blocks: Sequence[PendingBlock], message: U8, widths: RecordWidths
) -> list[ArrivedBlock]:
    """Views of a message's blocks, which lie one after the other."""
    views, first = [], 0
    for pending in blocks:
        size = widths.nbytes(pending.block)
        rows = message[first : first + size].view(widths.dtype)
        views.append(ArrivedBlock(pending, rows.reshape(-1, widths.columns(pending.block))))
        first += size
    return views


def pack_rates(blocks: Iterable[PendingBlock], rates: dict[int, float], message: U8) -> None:
    """Write the learning rates behind a message's blocks."""
    steps = _gradient_steps(blocks)
    if steps:
        tail = np.array([rates[step] for step in steps], np.float64).view(np.uint8)
        message[-len(tail) :] = tail


def unpack_rows(blocks: Sequence[PendingBlock], message: U8, widths: RecordWidths) -> RowMessage:
    """The blocks of a message, as views of it, and its learning rates."""
    steps = _gradient_steps(blocks)
    tail = message[len(message) - _RATE_BYTES * len(steps) :].tobytes()  # a copy, for alignment
    rates = dict(zip(steps, np.frombuffer(tail, np.float64).tolist(), strict=True))
    return RowMessage(views_in(blocks, message, widths), rates)


_T = TypeVar("_T", PendingBlock, StagedBlock)


def by_peer(blocks: Iterable[_T], peers: Sequence[str]) -> list[tuple[str, list[_T]]]:
    """Blocks grouped by peer, without peers that have none: one message each."""
    groups: list[list[_T]] = [[] for _ in peers]
    for block in blocks:
        groups[block.block.peer].append(block)
    return [(peer, group) for peer, group in zip(peers, groups, strict=True) if group]


def in_chunks(blocks: Iterable[_T], chunks: int) -> list[list[_T]]:
    """Blocks grouped by chunk. A plan with more chunks than these has several in one."""
    groups: list[list[_T]] = [[] for _ in range(chunks)]
    for block in blocks:
        groups[block.block.chunk * chunks // MAX_CHUNKS].append(block)
    return groups


class DeferredSends(Generic[_T]):
    """Blocks that wait for the early phase of a later step, in the order of leaving."""

    def __init__(self) -> None:
        self._by_step: defaultdict[int, list[_T]] = defaultdict(list)

    def add(self, step: int, blocks: Iterable[_T]) -> None:
        """Let blocks leave with the early phase of a step."""
        self._by_step[step].extend(blocks)

    def take(self, step: int) -> list[_T]:
        """Remove the blocks that leave with the early phase of a step."""
        return self._by_step.pop(step, [])

    def take_all(self) -> list[_T]:
        """Remove all blocks, for a drain."""
        blocks = [block for step in sorted(self._by_step) for block in self._by_step[step]]
        self._by_step.clear()
        return blocks
