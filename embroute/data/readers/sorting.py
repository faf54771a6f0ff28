"""Samples in order of time, in bounded memory: sorted runs on disk, merged block by block.

Samples of equal time keep their order in the files. The temporary files exist as long as the
object that reads them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embroute.config.scratch import scratch_folder
from embroute.data.batch import Batch, concat
from embroute.data.readers.decode import Keyed

RUN_SAMPLES = 2**18  # sorted in memory at once
BLOCK_SAMPLES = 2**12  # of every run, in memory during the merge


def is_in_order(pieces: Iterator[Keyed]) -> bool:
    """Whether time never goes back."""
    last = -np.inf
    for piece in pieces:
        time = piece.time
        if len(time) and (time[0] < last or bool((np.diff(time) < 0).any())):
            return False
        last = time[-1] if len(time) else last
    return True


@dataclass(frozen=True)
class RunSizes:
    """Samples per run, and samples per block of a run."""

    run: int = RUN_SAMPLES
    block: int = BLOCK_SAMPLES


class SortedSamples:
    """Samples sorted by time in temporary files, which are removed with this object."""

    def __init__(
        self, pieces: Iterator[Keyed], bad_rows: Counter[str], sizes: RunSizes | None = None
    ) -> None:
        sizes = sizes or RunSizes()
        stack = ExitStack()
        self.folder = stack.enter_context(scratch_folder("sort", large=True))
        weakref.finalize(self, stack.close)
        runs = [
            _store(run, self.folder / f"run-{number}", sizes.block)
            for number, run in enumerate(_runs(pieces, sizes.run))
        ]
        self._files = runs[0] if len(runs) == 1 else _merge(runs, self.folder / "sorted")
        self._bad_rows = bad_rows

    def pieces(self, counts: Counter[str]) -> Iterator[Keyed]:
        """One pass in order of time."""
        counts.update(self._bad_rows)
        for file in self._files:
            yield _load(file)


def _runs(pieces: Iterator[Keyed], run_samples: int) -> Iterator[Keyed]:
    """Runs of about `run_samples` samples, each sorted."""
    pending: list[Keyed] = []
    num_pending = 0
    for piece in pieces:
        pending.append(piece)
        num_pending += len(piece.batch)
        if num_pending >= run_samples:
            yield _sorted(pending)
            pending, num_pending = [], 0
    if num_pending:
        yield _sorted(pending)


def _sorted(pieces: Sequence[Keyed]) -> Keyed:
    """All samples by time; samples of equal time in the order of the pieces."""
    time = np.concatenate([piece.time for piece in pieces])
    joined = Keyed(concat([piece.batch for piece in pieces]), time)
    return joined.take(np.argsort(time, kind="stable"))


def _store(samples: Keyed, folder: Path, block_samples: int) -> list[Path]:
    """Write samples in blocks; returns the files in order."""
    folder.mkdir()
    starts = range(0, len(samples.batch), block_samples)
    files = [folder / f"{number}.npz" for number in range(len(starts))]
    for start, file in zip(starts, files, strict=True):
        _save(samples.slice(start, start + block_samples), file)
    return files


def _save(samples: Keyed, file: Path) -> None:
    batch = samples.batch
    np.savez(
        file,
        rows=batch.rows,
        offsets=batch.offsets,
        dense=batch.dense,
        label=batch.label,
        time=samples.time,
        num_fields=batch.num_fields,
    )


def _load(file: Path) -> Keyed:
    with np.load(file) as data:
        rows, offsets, dense, label = (data[k] for k in ("rows", "offsets", "dense", "label"))
        return Keyed(Batch(rows, offsets, dense, label, int(data["num_fields"])), data["time"])


@dataclass
class _Run:
    """A sorted run during the merge: the block in memory, and the files not yet read."""

    block: Keyed
    files: list[Path]

    def advance(self, num_samples: int) -> None:
        """Drop samples from the front of the block; load the next block when it is empty."""
        self.block = self.block.slice(num_samples, len(self.block.batch))
        if not len(self.block.batch) and self.files:
            self.block = _load(self.files[0])
            self.files.pop(0).unlink()


def _merge(runs: list[list[Path]], folder: Path) -> list[Path]:
    """Write the samples of all runs in order of time; returns the files."""
    folder.mkdir()
    open_runs = [_Run(_load(files[0]), files[1:]) for files in runs]
    merged: list[Path] = []
    while any(len(run.block.batch) for run in open_runs):
        takes = _safe_takes(open_runs)
        file = folder / f"{len(merged)}.npz"
        slices = [run.block.slice(0, n) for run, n in zip(open_runs, takes, strict=True) if n]
        _save(_sorted(slices), file)
        merged.append(file)
        for run, num_samples in zip(open_runs, takes, strict=True):
            run.advance(num_samples)
    return merged


def _safe_takes(runs: list[_Run]) -> list[int]:
    """The number of samples in each block that precede every sample on disk."""
    # A run's samples on disk are not earlier than its last sample in memory, and at equal times
    # the earlier run goes first. So the smallest (last time, run) bounds the samples to merge.
    ends = [(float(run.block.time[-1]), index) for index, run in enumerate(runs) if run.files]
    if not ends:
        return [len(run.block.batch) for run in runs]
    last_time, last_run = min(ends)
    return [
        int(np.searchsorted(run.block.time, last_time, "right" if index <= last_run else "left"))
        for index, run in enumerate(runs)
    ]
