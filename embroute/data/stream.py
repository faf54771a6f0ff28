"""Batches of an exact size from a source: epochs, seeded shuffling, held-out samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from embroute.data.batch import Batch, Source, concat, one_hot
from embroute.data.schema import Schema

SHUFFLE_BUFFER = 2**19  # samples; 26 look-ups each are about 110 MB of row ids


def batches(
    source: Source,
    batch_size: int,
    *,
    epochs: int | None = 1,
    shuffle: bool | int = False,
    seed: int = 0,
    drop_last: bool = False,
) -> Iterator[Batch]:
    """Batches of `batch_size` samples; the last batch of an epoch is shorter, or dropped.

    `epochs` None or 0 never ends. `shuffle` True mixes samples in a buffer of SHUFFLE_BUFFER, a
    number above 1 in a buffer of that size. A source that fits into the buffer is permuted as a
    whole. Otherwise a random half of a full buffer leaves, and the rest is mixed with new samples.
    Every sample comes exactly once per epoch, and epoch e depends on (seed, e) alone.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if epochs is not None and epochs < 0:
        raise ValueError(f"epochs must be at least 0, got {epochs}")
    if int(shuffle) < 0:
        raise ValueError(f"shuffle must be True, False or a number of samples, got {shuffle}")
    buffer = SHUFFLE_BUFFER if shuffle is True else int(shuffle)
    return _epochs(source, batch_size, epochs or None, buffer, seed, drop_last)


def _epochs(
    source: Source, size: int, epochs: int | None, buffer: int, seed: int, drop_last: bool
) -> Iterator[Batch]:
    """All epochs in order; a `buffer` of 0 or 1 does not shuffle."""
    for epoch in count() if epochs is None else range(epochs):
        empty = True
        chunks = source.chunks()
        if buffer > 1:
            chunks = _shuffled(source, buffer, np.random.default_rng([seed, epoch]))
        for batch in rebatch(chunks, size):
            if drop_last and len(batch) < size:
                continue
            empty = False
            yield batch
        if empty and epochs is None:
            raise ValueError(f"endless epochs over a source without a batch of {size} samples")


def rebatch(chunks: Iterator[Batch], size: int) -> Iterator[Batch]:
    """The same samples in batches of `size`; only a batch across two chunks is copied."""
    pending: list[Batch] = []
    missing = size
    for chunk in chunks:
        start = 0
        while len(chunk) - start >= missing:
            pending.append(chunk.slice(start, start + missing))
            start += missing
            yield concat(pending)
            pending, missing = [], size
        if start < len(chunk):
            pending.append(chunk.slice(start, len(chunk)))
            missing -= len(chunk) - start
    if pending:
        yield concat(pending)


def _shuffled(source: Source, buffer: int, random: np.random.Generator) -> Iterator[Batch]:
    """Every sample once, mixed in a buffer of `buffer` samples."""
    take = Batch.take if source.schema.has_bags else _take_one_hot
    buffered: list[Batch] = []
    num_buffered = 0
    for piece in _pieces(source.chunks(), buffer // 2):
        if num_buffered + len(piece) > buffer:
            samples, order = concat(buffered), random.permutation(num_buffered)
            leaving = num_buffered // 2
            yield take(samples, order[:leaving])
            buffered, num_buffered = [take(samples, order[leaving:])], num_buffered - leaving
        buffered.append(piece)
        num_buffered += len(piece)
    if buffered:
        yield take(concat(buffered), random.permutation(num_buffered))


def _pieces(chunks: Iterator[Batch], size: int) -> Iterator[Batch]:
    """The chunks in slices of at most `size` samples."""
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            yield chunk.slice(start, start + size)


def _take_one_hot(batch: Batch, samples: npt.NDArray[np.intp]) -> Batch:
    """`Batch.take` for samples with exactly one id per field; faster."""
    rows_SF = batch.rows.reshape(-1, batch.num_fields)[samples]
    label = batch.label[samples] if len(batch.label) else batch.label
    return one_hot(rows_SF, batch.dense[samples], label)


@dataclass(frozen=True)
class SourceSpan:
    """Samples `first` up to `last` (exclusive) of another source, in order."""

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
        position = 0  # of the chunk's first sample
        for chunk in self.source.chunks():
            first, last = max(self.first - position, 0), min(self.last - position, len(chunk))
            if first < last:
                yield chunk.slice(first, last)
            position += len(chunk)
            if position >= self.last:
                return


def split(source: Source, held_out: float) -> tuple[Source, Source | None]:
    """The samples to train on, and the last `held_out` share, or None for a share of 0."""
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
    return SourceSpan(source, 0, kept), SourceSpan(source, kept, total)
