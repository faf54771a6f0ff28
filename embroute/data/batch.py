"""A batch of samples as flat arrays, and the interface of a source of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from embroute.data.schema import Schema
from embroute.kernels.array_types import F32, I64

PADDING = -1  # a look-up with this row id touches no row


@dataclass(frozen=True)
class Batch:
    """Samples in order; the bag of sample s, field f is `rows[offsets[s*F+f] : offsets[s*F+f+1]]`.

    `rows` holds global row ids (`Schema.first_rows` plus the id in the table) or PADDING.
    `dense` is samples x dense columns. `label` is empty if the data has no labels. Regrouping sets
    `hot` if every row of every sample is in the hot set.
    """

    rows: I64
    offsets: I64
    dense: F32
    label: F32
    num_fields: int
    hot: bool = False

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.num_fields

    @property
    def sample_offsets(self) -> I64:
        """Look-ups of sample s are `rows[sample_offsets[s] : sample_offsets[s + 1]]`."""
        return self.offsets[:: self.num_fields]

    def take(self, samples: npt.NDArray[np.intp]) -> Batch:
        """The given samples, in the given order."""
        fields = self.num_fields
        bags = (samples[:, None] * fields + np.arange(fields)).ravel()
        lengths = np.diff(self.offsets)[bags]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        # Look-up i of the result comes from position i + shift of this batch.
        shift = np.repeat(self.offsets[bags] - offsets[:-1], lengths)
        rows = self.rows[np.arange(offsets[-1]) + shift]
        label = self.label[samples] if len(self.label) else self.label
        return Batch(rows, offsets, self.dense[samples], label, fields)

    def slice(self, start: int, stop: int) -> Batch:
        """Samples start..stop as views, without copying rows."""
        stop = min(stop, len(self))
        bags = self.offsets[start * self.num_fields : stop * self.num_fields + 1]
        rows = self.rows[bags[0] : bags[-1]]
        label = self.label[start:stop] if len(self.label) else self.label
        return Batch(rows, bags - bags[0], self.dense[start:stop], label, self.num_fields)


def one_hot(
    rows_SF: I64,
    dense: F32 | None = None,
    label: F32 | None = None,
) -> Batch:
    """A batch in which every field holds exactly one id; `rows_SF` has global row ids."""
    samples, fields = rows_SF.shape
    return Batch(
        np.ascontiguousarray(rows_SF).ravel(),
        np.arange(samples * fields + 1, dtype=np.int64),
        np.zeros((samples, 0), np.float32) if dense is None else dense,
        np.zeros(0, np.float32) if label is None else label,
        fields,
    )


def positions_of(starts: I64, lengths: I64) -> I64:
    """The positions start, start + 1 ... of every bag, bag after bag."""
    # The running number of an id within its bag: its number minus the number of its bag's first.
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions: I64 = np.repeat(starts, lengths) + within
    return positions


def with_bags(single: Batch, bags: Sequence[tuple[I64, I64]]) -> Batch:
    """Samples of one id a field, with bags as further fields.

    A bag field is the ids of all samples in a flat array, and the number of ids of each sample.
    """
    samples = len(single.dense)  # also where no field has one id
    lengths_SF = np.ones((samples, single.num_fields + len(bags)), np.int64)
    for field, (_, lengths) in enumerate(bags, single.num_fields):
        lengths_SF[:, field] = lengths
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_SF.ravel())])
    rows = np.empty(offsets[-1], np.int64)
    starts_SF = offsets[:-1].reshape(lengths_SF.shape)
    rows[starts_SF[:, : single.num_fields]] = single.rows.reshape(samples, single.num_fields)
    for field, (ids, lengths) in enumerate(bags, single.num_fields):
        rows[positions_of(starts_SF[:, field], lengths)] = ids
    return Batch(rows, offsets, single.dense, single.label, lengths_SF.shape[1])


def concat(batches: Sequence[Batch]) -> Batch:
    """All samples of the batches, in order."""
    if len(batches) == 1:
        return batches[0]
    sizes = np.array([0, *(len(batch.rows) for batch in batches)])
    starts = np.cumsum(sizes)
    offsets = [batch.offsets[1:] + start for batch, start in zip(batches, starts, strict=False)]
    return Batch(
        np.concatenate([batch.rows for batch in batches]),
        np.concatenate([np.zeros(1, np.int64), *offsets]),
        np.concatenate([batch.dense for batch in batches]),
        np.concatenate([batch.label for batch in batches]),
        batches[0].num_fields,
    )


class Source(Protocol):
    """A source of samples. Every call of `chunks()` starts over and gives the same samples."""

    @property
    def schema(self) -> Schema:
        """Tables, fields and dense columns of the samples."""
        ...

    @property
    def num_samples(self) -> int | None:
        """Samples in one pass, or None if only a full pass can tell."""
        ...

    def chunks(self) -> Iterator[Batch]:
        """One pass in order, in pieces that fit into memory."""
        ...


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
