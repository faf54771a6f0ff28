"""Samples that are already in memory, as a source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embroute.data.batch import Batch
from embroute.data.schema import Schema


@dataclass(frozen=True)
class ArraySource:
    """A batch in memory, read in views of `chunk_samples` samples."""

    schema: Schema
    batch: Batch
    chunk_samples: int = 65536

    @property
    def num_samples(self) -> int:
        """Samples in one pass."""
        return len(self.batch)

    def chunks(self) -> Iterator[Batch]:
        """One pass in order, without copying rows."""
        for start in range(0, len(self.batch), self.chunk_samples):
            yield self.batch.slice(start, start + self.chunk_samples)
