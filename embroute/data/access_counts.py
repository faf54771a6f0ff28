"""Look-ups of each row in a uniform sample of the samples of a data set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from embroute.data.batch import Batch, Source
from embroute.kernels.array_types import I64, Bools

LEAST_CHUNKS = 64  # of a source whose chunks can be read in any order


@dataclass(frozen=True)
class Calibration:
    """The sample from which hot rows are chosen: each sample has the chance `share`, by `seed`."""

    share: float = 0.05
    seed: int = 0


@runtime_checkable
class ChunkedSource(Source, Protocol):
    """A source whose chunks can be read in any order."""

    @property
    def num_chunks(self) -> int:
        """Chunks of one pass."""
        ...

    def chunk(self, number: int) -> Batch:
        """One chunk of the pass."""
        ...


def _mixed(seed: int, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A random number for each position (splitmix64)."""
    start = np.random.default_rng(seed).integers(2**64, dtype=np.uint64)
    mixed = positions * np.uint64(0x9E3779B97F4A7C15) + start
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _sampled(calibration: Calibration, first: int, samples: int) -> Bools:
    """Whether each sample, from position `first` on, belongs to the sample."""
    if calibration.share >= 1:
        return np.ones(samples, np.bool_)
    positions = np.arange(first, first + samples, dtype=np.uint64)
    below: Bools = _mixed(calibration.seed, positions) < np.uint64(calibration.share * 2.0**64)
    return below


def count_lookups(batches: Iterable[Batch], num_rows: int, calibration: Calibration) -> I64:
    """Look-ups of each row in the sample; how the samples are cut into batches has no effect."""
    counts_R, first = np.zeros(num_rows, np.int64), 0
    for batch in batches:
        chosen = batch.take(np.flatnonzero(_sampled(calibration, first, len(batch))))
        np.add.at(counts_R, chosen.rows[chosen.rows >= 0], 1)
        first += len(batch)
    return counts_R


def count_source(source: Source, calibration: Calibration) -> I64:
    """Look-ups of each row in a sample of a whole source.

    Of a source with chunks in any order, the sample is drawn from a part of the chunks.
    """
    num_rows, share = source.schema.num_rows, calibration.share
    if not isinstance(source, ChunkedSource):
        return count_lookups(source.chunks(), num_rows, calibration)
    chunks = source.num_chunks
    read = min(chunks, max(LEAST_CHUNKS, int(np.ceil(share * chunks))))
    random = np.random.default_rng([calibration.seed, chunks])
    numbers = np.sort(random.permutation(chunks)[:read])
    within = Calibration(min(1.0, share * chunks / read), calibration.seed)
    return count_lookups((source.chunk(int(n)) for n in numbers), num_rows, within)
