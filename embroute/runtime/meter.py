"""What moved and how long it took: counted as it moves, never as it was planned."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embroute.cost import KIND_NAMES
from embroute.kernels.codes import NUM_KINDS
from embroute.runtime.parcels import Item

I64 = npt.NDArray[np.int64]
SPANS = 64  # that are kept: some eight steps of a worker


class Span(NamedTuple):
    """What a rank did, for which step, from when (seconds since 1970) and for how long."""

    phase: str
    step: int
    began: float
    seconds: float


@dataclass
class StepLog:
    """What moved by order of each step's plan, wherever its phases fell. Drains count by the step
    that follows them."""

    rows: dict[tuple[int, int], I64] = field(default_factory=dict)  # by step and peer
    bytes: dict[tuple[int, int], I64] = field(default_factory=dict)
    note_bytes: dict[int, int] = field(default_factory=dict)

    def block(self, item: Item, kinds: I64, row_bytes: int) -> None:
        """Count the rows of a block."""
        key = (item.step, item.block.peer)
        self.rows[key] = self.rows.get(key, 0) + kinds
        self.bytes[key] = self.bytes.get(key, 0) + kinds * row_bytes


@dataclass
class Meter:
    """One rank's counters. Rows and row bytes by peer and kind; other bytes and seconds by name."""

    rows: defaultdict[int, I64] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros(NUM_KINDS, np.int64))
    )
    bytes: defaultdict[int, I64] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros(NUM_KINDS, np.int64))
    )
    other_bytes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    log: StepLog | None = None  # grows with the run: only where somebody wants to know
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=SPANS))
    epoch_s: float = field(default_factory=lambda: time.time() - time.perf_counter())

    def block(self, item: Item, nbytes: int) -> None:
        """Count the rows of a block."""
        block = item.block
        kinds, row_bytes = np.array(block.kinds, np.int64), nbytes // max(1, len(block.where))
        self.rows[block.peer] += kinds
        self.bytes[block.peer] += kinds * row_bytes
        if self.log is not None:
            self.log.block(item, kinds, row_bytes)

    def span(self, phase: str, step: int, began: float) -> float:
        """Note what ends now and began at a reading of `perf_counter`; returns its reading now."""
        now = time.perf_counter()
        self.spans.append(Span(phase, step, self.epoch_s + began, now - began))
        return now

    def note(self, step: int, nbytes: int) -> None:
        """Count what the coordinator said of a step: samples, slots, lists of transfers."""
        self.other_bytes["notes"] += nbytes
        if self.log is not None:
            self.log.note_bytes[step] = self.log.note_bytes.get(step, 0) + nbytes

    @property
    def rows_by_kind(self) -> I64:
        """Rows of each kind, all peers together."""
        return sum(self.rows.values(), np.zeros(NUM_KINDS, np.int64))

    @property
    def bytes_by_kind(self) -> I64:
        """Row bytes of each kind, all peers together."""
        return sum(self.bytes.values(), np.zeros(NUM_KINDS, np.int64))

    def record(self) -> dict[str, object]:
        """As JSON: steps, rows and bytes by kind, other bytes, seconds by phase, the last spans."""
        return {
            "steps": self.steps,
            "rows": dict(zip(KIND_NAMES, self.rows_by_kind.tolist(), strict=True)),
            "row_bytes": dict(zip(KIND_NAMES, self.bytes_by_kind.tolist(), strict=True)),
            "other_bytes": dict(self.other_bytes),
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "spans": [
                (phase, step, round(began, 6), round(spent, 6))
                for phase, step, began, spent in self.spans
            ],
        }
