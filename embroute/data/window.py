"""What a decision may look at: the current batch, the next L, and when rows are used again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from embroute.data.batch import Batch
from embroute.kernels.array_types import I32, I64
from embroute.kernels.distinct import UseRing, link_uses, number_distinct

REMEMBERED = 2  # steps whose uses a window still knows, the one just decided among them


@dataclass(frozen=True)
class Indexed:
    """A batch with its distinct rows. Axis U: distinct rows in order of their first look-up."""

    step: int
    batch: Batch
    rows_U: I64
    unique_of_lookup: I32
    before_U: I32  # step of the use before this one, -1 if none is known
    later_U: I32  # step of the next use within the window, or NEVER
    base: int  # position of its first row among the distinct rows of all batches, one by one
    last_U: I64  # position of the use before this one, -1 if none is known


@dataclass(frozen=True)
class Window:
    """What a step's decisions see: the batch of the step and the batches after it."""

    step: int
    now: Indexed
    ahead: tuple[Indexed, ...]


class Horizon:
    """Turns a stream of batches into windows of the current batch and the next `lookahead`.

    At least one batch is looked ahead: whether an update is urgent depends on the next step.
    """

    def __init__(self, num_rows: int, lookahead: int, first_step: int = 0) -> None:
        self.lookahead = max(1, lookahead)
        seen_R = np.zeros(num_rows, np.int64)
        seen_R.fill(0)  # rows come at random: have the system map the pages now, all at once
        self._ring = UseRing(seen_R, np.zeros(1, np.int32), np.zeros(1, np.int32))
        self._waiting: deque[tuple[Indexed, int]] = deque()
        self._next_step = first_step
        self._base = 0
        self._oldest = 0
        self._kept: deque[int] = deque()

    @property
    def full(self) -> bool:
        """Whether the next window is complete without another batch."""
        return len(self._waiting) > self.lookahead

    @property
    def empty(self) -> bool:
        """Whether no batch is left to decide."""
        return not self._waiting

    def push(self, batch: Batch) -> None:
        """Let a batch enter the window at its far end."""
        unique_of_lookup = np.empty(len(batch.rows), np.int32)
        rows_U, last_U = number_distinct(
            self._ring.seen_R, batch.rows, self._base, unique_of_lookup
        )
        count = len(rows_U)
        self._grow(count)
        before_U = link_uses(self._ring, last_U, self._next_step, self._base, self._oldest)
        entry = Indexed(
            self._next_step,
            batch,
            rows_U,
            unique_of_lookup,
            before_U,
            np.empty(0, np.int32),
            self._base,
            last_U,
        )
        self._waiting.append((entry, self._base))
        self._next_step += 1
        self._base += count

    def pop(self) -> Window:
        """The window of the next step; its batch leaves the horizon."""
        entry, base = self._waiting.popleft()
        later_U = self._slice(self._ring.later_G, base, len(entry.rows_U))
        ahead = tuple(waiting for waiting, _ in self._waiting)
        # The step just popped stays in the ring for one more: the next step asks about it.
        self._kept.append(base)
        if len(self._kept) > REMEMBERED:
            self._kept.popleft()
        self._oldest = self._kept[0]
        return Window(entry.step, replace(entry, later_U=later_U), ahead)

    def _slice(self, values_G: I32, base: int, count: int) -> I32:
        positions = np.arange(base, base + count) & (len(values_G) - 1)
        return np.take(values_G, positions)

    def _grow(self, count: int) -> None:
        """Make room for `count` more positions; those in use keep their number."""
        needed = self._base + count - self._oldest
        if needed <= len(self._ring.step_G):
            return
        size = 1 << (2 * needed - 1).bit_length()
        used = np.arange(self._oldest, self._base)
        old = len(self._ring.step_G) - 1
        step_G, later_G = np.zeros(size, np.int32), np.zeros(size, np.int32)
        step_G[used & (size - 1)] = self._ring.step_G[used & old]
        later_G[used & (size - 1)] = self._ring.later_G[used & old]
        self._ring = UseRing(self._ring.seen_R, step_G, later_G)
