"""A source cut in two: the samples to train on, and the last ones, held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from embroute.data.batch import Batch, Source
from embroute.data.schema import Schema


@dataclass(frozen=True)
class Span:
    """Samples first to last of another source, in order."""

    source: Source
    first: int
    last: int

    @property
    def schema(self) -> Schema:
        """Tables, fields and dense columns of the whole source."""
        return self.source.schema

    @property
    def num_samples(self) -> int:
        """Samples in one pass."""
        return self.last - self.first

    def chunks(self) -> Iterator[Batch]:
        """One pass in order."""
        at = 0
        for chunk in self.source.chunks():
            first, last = max(self.first - at, 0), min(self.last - at, len(chunk))
            if first < last:
                yield chunk.slice(first, last)
            at += len(chunk)
            if at >= self.last:
                return


def split(source: Source, held_out: float) -> tuple[Source, Source | None]:
    """The first samples, and the last `held_out` share of them, or None for a share of 0."""
    if not 0 <= held_out < 1:
        raise ValueError(f"--held-out must be at least 0 and below 1, got {held_out:g}")
    if held_out == 0:
        return source, None
    total = source.num_samples
    if total is None:
        total = sum(len(chunk) for chunk in source.chunks())
    kept = total - round(total * held_out)
    if not 0 < kept < total:
        raise ValueError(
            f"--held-out {held_out:g} of {total} samples leaves {kept} to train on and "
            f"{total - kept} to evaluate"
        )
    return Span(source, 0, kept), Span(source, kept, total)
