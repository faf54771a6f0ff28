"""Blocks of rows packed into one message per peer and phase, in the same way at both ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from embroute.engine.observe.metrics import Meter
from embroute.engine.schedule import TransferBlock
from embroute.engine.store import RecordWidths
from embroute.kernels.array_types import U8
from embroute.kernels.codes import GRADIENT, MAX_CHUNKS
from embroute.kernels.rows import Floats
from embroute.transport.interface import PendingMessages

_RATE_BYTES = 8


class StagedBlock(NamedTuple):
    """A block to send, with its rows if they were copied out before their slots were reused."""

    block: TransferBlock
    rows: Floats | None = None  # None: still in the cache


class InFlight(NamedTuple):
    """Messages on their way, and the blocks in the expected message of each peer."""

    messages: PendingMessages
    blocks: list[list[TransferBlock]]


def _gradient_steps(blocks: Iterable[TransferBlock]) -> list[int]:
    """Steps whose gradients a message holds: each needs its learning rate."""
    return sorted({block.step for block in blocks if block.record == GRADIENT})


def message_bytes(blocks: Sequence[TransferBlock], widths: RecordWidths) -> int:
    """Bytes of a message."""
    row_bytes = sum(widths.nbytes(block) for block in blocks)
    return row_bytes + _RATE_BYTES * len(_gradient_steps(blocks))


def rows_in(
    blocks: Iterable[TransferBlock], message: U8, widths: RecordWidths
) -> list[tuple[TransferBlock, Floats]]:
    """The blocks of a message, which lie one after the other, with views of their rows."""
    views, first = [], 0
    for block in blocks:
        size = widths.nbytes(block)
        rows = message[first : first + size].view(widths.dtype)
        views.append((block, rows.reshape(-1, widths.columns(block))))
        first += size
    return views


def wait_for_rows(
    in_flight: InFlight, widths: RecordWidths, meter: Meter
) -> tuple[list[tuple[TransferBlock, Floats]], list[U8]]:
    """The blocks that arrive, in the order of peers, with views of their rows; and the messages."""
    messages = in_flight.messages.wait()
    pairs = zip(in_flight.blocks, messages, strict=True)
    arrived = [entry for blocks, data in pairs for entry in rows_in(blocks, data, widths)]
    for block, rows in arrived:
        meter.block(block, rows.nbytes)
    return arrived, messages


def pack_rates(blocks: Iterable[TransferBlock], rates: dict[int, float], message: U8) -> None:
    """Write the learning rate of each step with gradients behind a message's blocks."""
    steps = _gradient_steps(blocks)
    if steps:
        tail = np.array([rates[step] for step in steps], np.float64).view(np.uint8)
        message[-len(tail) :] = tail


def rates_in(blocks: Iterable[TransferBlock], message: U8) -> dict[int, float]:
    """The learning rates behind a message's blocks, by step."""
    steps = _gradient_steps(blocks)
    tail = message[len(message) - _RATE_BYTES * len(steps) :].tobytes()  # a copy, for alignment
    return dict(zip(steps, np.frombuffer(tail, np.float64).tolist(), strict=True))


_T = TypeVar("_T", TransferBlock, StagedBlock)


def _block(entry: TransferBlock | StagedBlock) -> TransferBlock:
    return entry.block if isinstance(entry, StagedBlock) else entry


def by_peer(blocks: Iterable[_T], peers: Sequence[str]) -> list[tuple[str, list[_T]]]:
    """Blocks grouped by peer, without peers that have none: one message each."""
    groups: list[list[_T]] = [[] for _ in peers]
    for block in blocks:
        groups[_block(block).peer].append(block)
    return [(peer, group) for peer, group in zip(peers, groups, strict=True) if group]


def in_chunks(blocks: Iterable[_T], chunks: int) -> list[list[_T]]:
    """Blocks grouped by chunk. A plan with more chunks than these has several in one."""
    groups: list[list[_T]] = [[] for _ in range(chunks)]
    for block in blocks:
        groups[_block(block).chunk * chunks // MAX_CHUNKS].append(block)
    return groups


def take_all(waiting: defaultdict[int, list[_T]]) -> list[_T]:
    """Remove the blocks that wait for any step, in the order of steps."""
    return [block for step in sorted(waiting) for block in waiting.pop(step)]
