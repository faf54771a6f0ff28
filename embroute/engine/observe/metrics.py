"""A rank's counters: rows and bytes that moved, and seconds. Plans play no part in them."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from embroute.cost.step_time import KIND_NAMES
from embroute.engine.schedule import TransferBlock
from embroute.kernels.array_types import I64
from embroute.kernels.codes import NUM_KINDS
from embroute.transport.interface import Channel

SPANS = 64  # kept at a time: about eight steps of a worker


class PhaseSpan(NamedTuple):
    """A phase of a step at a rank: when it began (seconds since 1970), and how long it took."""

    phase: str
    step: int
    began: float
    seconds: float


@dataclass
class StepLog:
    """Rows that moved by order of each step's plan; a drain counts for the next step."""

    rows: dict[tuple[int, int], I64] = field(default_factory=dict)  # by step and peer
    bytes: dict[tuple[int, int], I64] = field(default_factory=dict)
    note_bytes: dict[int, int] = field(default_factory=dict)

    def block(self, block: TransferBlock, kinds: I64, row_bytes: int) -> None:
        """Count the rows of a block."""
        key = (block.step, block.peer)
        self.rows[key] = self.rows.get(key, 0) + kinds
        self.bytes[key] = self.bytes.get(key, 0) + kinds * row_bytes


EARLY_PHASE, URGENT_PHASE, DRAIN_PHASE = "early", "urgent", "drain"
ASIDE = "aside"  # transfers that no plan orders: evaluations, refills
Place = tuple[str, str]  # a phase and a peer


@dataclass
class Meter:
    """One rank's counters. Rows and row bytes by phase, peer and kind; waits by phase and peer."""

    peer_role: str = ""  # the role of the ranks that this rank exchanges rows with
    rows: defaultdict[Place, I64] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros(NUM_KINDS, np.int64))
    )
    bytes: defaultdict[Place, I64] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros(NUM_KINDS, np.int64))
    )
    waited_s: defaultdict[Place, float] = field(default_factory=lambda: defaultdict(float))
    phase: str = ASIDE  # the phase that runs now
    other_bytes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    log: StepLog | None = None  # in debug runs only: it grows with every step
    spans: deque[PhaseSpan] = field(default_factory=lambda: deque(maxlen=SPANS))
    epoch_s: float = field(default_factory=lambda: time.time() - time.perf_counter())

    def block(self, block: TransferBlock, nbytes: int) -> None:
        """Count the rows of a block."""
        kinds, row_bytes = np.array(block.kinds, np.int64), nbytes // max(1, len(block.indices))
        place = (self.phase, f"{self.peer_role}{block.peer}")
        self.rows[place] += kinds
        self.bytes[place] += kinds * row_bytes
        if self.log is not None:
            self.log.block(block, kinds, row_bytes)

    @contextmanager
    def during(self, phase: str, step: int, transport: Channel) -> Iterator[None]:
        """Count rows, seconds and waits to this phase while the context is open; label messages."""
        began, before = time.perf_counter(), dict(transport.waited_s)
        self.phase = phase
        transport.begin(phase, step)
        yield
        self.phase = ASIDE
        for peer, waited in transport.waited_s.items():
            self.waited_s[phase, peer] += waited - before.get(peer, 0.0)
        self.seconds[phase] += time.perf_counter() - began

    def span(self, phase: str, step: int, began: float) -> float:
        """Record a span that began at `began` and ends now; returns now (`perf_counter`)."""
        now = time.perf_counter()
        self.spans.append(PhaseSpan(phase, step, self.epoch_s + began, now - began))
        return now

    def message(self, step: int, nbytes: int) -> None:
        """Count the bytes of the coordinator's message about a step."""
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
        """All counters as JSON: totals, counters by phase and peer, and the last spans."""
        return {
            "steps": self.steps,
            "rows": dict(zip(KIND_NAMES, self.rows_by_kind.tolist(), strict=True)),
            "row_bytes": dict(zip(KIND_NAMES, self.bytes_by_kind.tolist(), strict=True)),
            "other_bytes": dict(self.other_bytes),
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "peers": [self._with_peer(place) for place in sorted({*self.rows, *self.waited_s})],
            "spans": [
                (span.phase, span.step, round(span.began, 6), round(span.seconds, 6))
                for span in self.spans
            ],
        }

    def _with_peer(self, place: Place) -> dict[str, object]:
        """Counters of one phase and peer."""
        phase, peer = place
        rows, sizes = self.rows.get(place), self.bytes.get(place)
        return {
            "phase": phase,
            "peer": peer,
            "rows": {} if rows is None else _named(rows),
            "row_bytes": {} if sizes is None else _named(sizes),
            "waited_s": round(self.waited_s.get(place, 0.0), 4),
        }


def _named(by_kind: I64) -> dict[str, int]:
    """Counts that are not 0, by name of their kind."""
    pairs = zip(KIND_NAMES, by_kind.tolist(), strict=True)
    return {name: count for name, count in pairs if count}
