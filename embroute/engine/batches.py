"""Batches of a user's loader as samples with look-ups, and a worker's samples as a user's batch.

The coordinator turns a user's batch into a `Batch`: row ids for the planner, and everything else as
opaque columns of each sample. A worker turns its samples back into the form of the user's loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from embroute.data.batch import Batch, positions_of
from embroute.data.schema import Schema
from embroute.kernels.array_types import F32, I64
from embroute.models.layers import Samples


@dataclass(frozen=True)
class LookupCall:
    """One look-up of a layer: its table, the fields it reads, and the shape of its result."""

    table: int
    first: int
    last: int
    tail: tuple[int, ...]  # between the sample and the width
    bag: bool


def lookups_of(call: LookupCall, offsets: I64, num_fields: int) -> tuple[I64, I64]:
    """Positions of a call's ids, sample by sample and field by field, and its bags' lengths."""
    starts, ends = (
        part.reshape(-1, num_fields)[:, call.first : call.last].ravel()
        for part in (offsets[:-1], offsets[1:])
    )
    return positions_of(starts, ends - starts), ends - starts


@dataclass(frozen=True)
class MicroBatch:
    """A worker's samples as they arrive. `ids`: within tables, sample by sample; -1 is padding."""

    num_samples: int
    dense: F32
    label: F32
    offsets: I64
    ids: I64


class BatchAdapter(Protocol):
    """Converts the batches of one kind of loader, in both directions."""

    sends_ids: bool  # whether workers need the ids too, not only their rows

    @property
    def num_columns(self) -> int:
        """Opaque columns of a sample."""
        ...

    def infer_spec(self, item: object) -> str:
        """Learn the shape of batches from the first; returns it as text for the other ranks."""
        ...

    def load_spec(self, spec: str) -> None:
        """Take over the text that `infer_spec` returned on another rank."""
        ...

    @property
    def schema(self) -> Schema:
        """Tables and fields; fields are known after `infer_spec` or `load_spec`."""
        ...

    def batch(self, item: object) -> Batch:
        """A batch of the loader in the form of planner and messages."""
        ...

    def to_user_batch(self, micro_batch: MicroBatch) -> object:
        """A worker's samples in the form of the user's loop."""
        ...

    def empty_sample(self) -> I64:
        """Ids per field of a sample that touches no row."""
        ...


@dataclass
class SampleAdapter:
    """Batches of embroute's own data; models take them as `Samples` without rows."""

    schema: Schema
    dtype: torch.dtype
    device: str = "cpu"
    sends_ids: bool = False

    @property
    def num_columns(self) -> int:
        """Dense columns."""
        return len(self.schema.dense)

    def infer_spec(self, item: object) -> str:
        """Empty: the schema is known."""
        return ""

    def load_spec(self, spec: str) -> None:
        """Nothing to load."""

    def batch(self, item: object) -> Batch:
        """Already a batch."""
        if not isinstance(item, Batch):
            raise ValueError(f"expected embroute's own batches, got {type(item).__name__}")
        return item

    def to_user_batch(self, micro_batch: MicroBatch) -> Samples:
        """Labels and dense features; the routed layers look rows up."""
        return Samples(
            torch.from_numpy(micro_batch.dense).to(self.device, self.dtype),
            torch.from_numpy(micro_batch.label).to(self.device, self.dtype),
            torch.empty(0, dtype=torch.int64),
            torch.from_numpy(micro_batch.offsets),
            self.schema.num_fields,
        )

    def empty_sample(self) -> I64:
        """No ids: empty bags."""
        return np.zeros(self.schema.num_fields, np.int64)
