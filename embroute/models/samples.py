"""Samples as tensors: what every model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embroute.data.batch import PADDING, Batch
from embroute.data.schema import Schema


@dataclass(frozen=True)
class Samples:
    """Samples of a (micro-)batch as tensors; N samples, F fields, D dense columns, L look-ups.

    `label` is empty where the data has none. `ids` are ids within their tables, or PADDING, and
    empty where rows are looked up elsewhere.
    """

    dense: Tensor  # (N, D)
    label: Tensor  # (N,)
    ids: Tensor  # (L,) int64, sample-major, then field
    offsets: Tensor  # (N*F+1,) int64; sample s, field f: ids[offsets[s*F+f] : offsets[s*F+f+1]]
    num_fields: int

    def __len__(self) -> int:
        return len(self.dense)


def samples_of(
    batch: Batch,
    schema: Schema,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Samples:
    """The samples of a batch, copied; global row ids become ids within tables."""
    first_F = schema.first_rows[[field.table for field in schema.fields]]
    first_L = np.repeat(np.tile(first_F, len(batch)), np.diff(batch.offsets))
    ids = np.where(batch.rows == PADDING, PADDING, batch.rows - first_L)
    return Samples(
        torch.tensor(batch.dense, dtype=dtype, device=device),
        torch.tensor(batch.label, dtype=dtype, device=device),
        torch.tensor(ids, device=device),
        torch.tensor(batch.offsets, device=device),
        batch.num_fields,
    )
