"""What moved and how long it took: counted as it moves, never as it was planned."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from embroute.cost import KIND_NAMES
from embroute.kernels.codes import NUM_KINDS
from embroute.runtime.script import Block

I64 = npt.NDArray[np.int64]


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

    def block(self, block: Block, nbytes: int) -> None:
        """Count the rows of a block."""
        kinds = np.array(block.kinds, np.int64)
        self.rows[block.peer] += kinds
        self.bytes[block.peer] += kinds * (nbytes // max(1, len(block.where)))

    @property
    def rows_by_kind(self) -> I64:
        """Rows of each kind, all peers together."""
        return sum(self.rows.values(), np.zeros(NUM_KINDS, np.int64))

    @property
    def bytes_by_kind(self) -> I64:
        """Row bytes of each kind, all peers together."""
        return sum(self.bytes.values(), np.zeros(NUM_KINDS, np.int64))

    def record(self) -> dict[str, object]:
        """As JSON: steps, rows and bytes by kind, other bytes, seconds by phase."""
        return {
            "steps": self.steps,
            "rows": dict(zip(KIND_NAMES, self.rows_by_kind.tolist(), strict=True)),
            "row_bytes": dict(zip(KIND_NAMES, self.bytes_by_kind.tolist(), strict=True)),
            "other_bytes": dict(self.other_bytes),
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
        }
