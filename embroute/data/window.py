"""The window of a decision: the current batch, the next L batches, and the next uses of rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from embroute.data.batch import Batch
from embroute.kernels.array_types import I32, I64
from embroute.kernels.distinct import UseRing, link_uses, number_distinct

REMEMBERED = 2  # latest steps whose uses a window still knows, the current step included


@dataclass(frozen=True)
class Indexed:
    """A batch with its distinct rows. Axis U: distinct rows in order of first look-up.

    A use is a distinct row of a batch. Uses of all batches are numbered without gaps.
    """

    step: int
    batch: Batch
    rows_U: I64
    unique_of_lookup: I32
    before_U: I32  # step of the previous use, or -1 if unknown
    later_U: I32  # step of the next use within the window, or NEVER
    base: int  # number of the batch's first use
    last_U: I64  # number of the previous use, or -1 if unknown


@dataclass(frozen=True)
class Window:
    """The input of a step's decisions: the batch of the step and the batches after it."""

    step: int
    now: Indexed
    ahead: tuple[Indexed, ...]


class Horizon:
    """Turns a stream of batches into windows of the current batch and the next `lookahead`.

    The lookahead is at least 1, because the next step decides whether an update is urgent.
    """

    def __init__(self, num_rows: int, lookahead: int, first_step: int = 0) -> None:
        self.lookahead = max(1, lookahead)
        seen_R = np.zeros(num_rows, np.int64)
        # Write now, so that the system maps all pages at once; look-ups are random.
        seen_R.fill(0)
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
        """Whether no batch is left."""
        return not self._waiting

    def push(self, batch: Batch) -> None:
        """Add a batch at the far end of the window."""
        unique_of_lookup = np.empty(len(batch.rows), np.int32)
        rows_U, last_U = number_distinct(
            self._ring.seen_R, batch.rows, self._base, unique_of_lookup
        )
        count = len(rows_U)
        self._grow(count)
        before_U = link_uses(self._ring, last_U, self._next_step, self._base, self._oldest)
        entry = Indexed(
            step=self._next_step,
            batch=batch,
            rows_U=rows_U,
            unique_of_lookup=unique_of_lookup,
            before_U=before_U,
            later_U=np.empty(0, np.int32),  # known when the step is decided
            base=self._base,
            last_U=last_U,
        )
        self._waiting.append((entry, self._base))
        self._next_step += 1
        self._base += count

    def pop(self) -> Window:
        """The window of the next step; its batch leaves the horizon."""
        entry, base = self._waiting.popleft()
        later_U = self._slice(self._ring.later_G, base, len(entry.rows_U))
        ahead = tuple(waiting for waiting, _ in self._waiting)
        # The step stays in the ring for another step: the next decision reads its uses.
        self._kept.append(base)
        if len(self._kept) > REMEMBERED:
            self._kept.popleft()
        self._oldest = self._kept[0]
        return Window(entry.step, replace(entry, later_U=later_U), ahead)

    def _slice(self, values_G: I32, base: int, count: int) -> I32:
        # The ring's length is a power of 2: the mask is a remainder.
        positions = np.arange(base, base + count) & (len(values_G) - 1)
        return np.take(values_G, positions)

    def _grow(self, count: int) -> None:
        """Make room for `count` more uses; the uses in the ring keep their numbers."""
        needed = self._base + count - self._oldest
        if needed <= len(self._ring.step_G):
            return
        size = 1 << (2 * needed - 1).bit_length()  # a power of 2, at least twice the need
        used = np.arange(self._oldest, self._base)
        old_mask = len(self._ring.step_G) - 1
        step_G, later_G = np.zeros(size, np.int32), np.zeros(size, np.int32)
        step_G[used & (size - 1)] = self._ring.step_G[used & old_mask]
        later_G[used & (size - 1)] = self._ring.later_G[used & old_mask]
        self._ring = UseRing(self._ring.seen_R, step_G, later_G)
