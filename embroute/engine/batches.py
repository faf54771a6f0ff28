"""Batches of any shape as samples with look-ups, and back: what a user's loader gives, dealt out.

The coordinator turns a batch into a `Batch`: row ids for the brain, everything else as opaque
columns of each sample. A worker turns its samples back into what the user's loop expects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from embroute.data.batch import Batch
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


@dataclass(frozen=True)
class MicroBatch:
    """A worker's samples as they arrive. `ids`: within tables, sample by sample; -1 is padding."""

    num_samples: int
    dense: F32
    label: F32
    offsets: I64
    ids: I64


class BatchAdapter(Protocol):
    """Both directions of one kind of loader."""

    sends_ids: bool  # whether workers need the ids themselves, not only their rows

    @property
    def num_columns(self) -> int:
        """Opaque columns of a sample."""
        ...

    def infer_spec(self, item: object) -> str:
        """Look at the first batch; returns what the other ranks must know of its shape."""
        ...

    def load_spec(self, shape: str) -> None:
        """Know what `learn` learned on another rank."""
        ...

    @property
    def schema(self) -> Schema:
        """Tables and fields; fields are known after `learn` or `recall`."""
        ...

    def batch(self, item: object) -> Batch:
        """A batch of the loader as the brain and the wire see it."""
        ...

    def to_user_batch(self, dealt: MicroBatch) -> object:
        """A worker's samples as the user's loop expects them."""
        ...

    def empty_sample(self) -> I64:
        """Ids per field of a sample that touches no row."""
        ...


@dataclass
class SampleAdapter:
    """Batches of embroute's own data; models take them as `Samples`, whose rows are elsewhere."""

    schema: Schema
    dtype: torch.dtype
    device: str = "cpu"
    sends_ids: bool = False

    @property
    def num_columns(self) -> int:
        """Dense columns."""
        return len(self.schema.dense)

    def infer_spec(self, item: object) -> str:
        """Nothing: the schema says it all."""
        return ""

    def load_spec(self, shape: str) -> None:
        """Nothing either."""

    def batch(self, item: object) -> Batch:
        """Already a batch."""
        if not isinstance(item, Batch):
            raise ValueError(f"expected embroute's own batches, got {type(item).__name__}")
        return item

    def to_user_batch(self, dealt: MicroBatch) -> Samples:
        """Labels and dense features; rows are looked up by the routed layers."""
        return Samples(
            torch.from_numpy(dealt.dense).to(self.device, self.dtype),
            torch.from_numpy(dealt.label).to(self.device, self.dtype),
            torch.empty(0, dtype=torch.int64),
            torch.from_numpy(dealt.offsets),
            self.schema.num_fields,
        )

    def empty_sample(self) -> I64:
        """No ids: empty bags."""
        return np.zeros(self.schema.num_fields, np.int64)
