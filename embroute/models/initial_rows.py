"""Initial values of embedding rows: functions of seed, table and row (loop: `kernels/rows.py`)."""

from __future__ import annotations

import numpy as np
import torch

from embroute.kernels.array_types import F64, I64
from embroute.kernels.rows import init_rows
from embroute.models.layers import FieldEmbeddings

BLOCK_ROWS = 1 << 16  # filled at a time
# The expected norm of a row. At widths of 64 to 128 an entry then has a standard deviation of about
# 0.01, as is common for click models. With norms near 1, the many pair products of FM and DLRM
# would start far from 0.
NORM = 0.1


def initial_rows(seed: int, table_N: I64, id_N: I64, width: int) -> F64:
    """Rows by table and number in it: nearly normal, with standard deviation NORM / sqrt(width).

    So every rank computes the same bits, for one row or many. Apart from the factor, a narrow row
    is the beginning of a wide row.
    """
    out = np.empty((len(id_N), width))
    init_rows(seed, table_N, id_N, float(NORM / np.sqrt(width)), out)
    return out


@torch.no_grad()
def fill(embeddings: FieldEmbeddings, seed: int) -> None:
    """Give every row of every table its initial value."""
    for number, (table, weight) in enumerate(
        zip(embeddings.schema.tables, embeddings.tables.parameters(), strict=True)
    ):
        if weight.is_meta:
            raise ValueError(f"table {table.name!r} is on the meta device and holds no rows")
        for first in range(0, table.num_rows, BLOCK_ROWS):
            ids = np.arange(first, min(first + BLOCK_ROWS, table.num_rows))
            rows = initial_rows(seed, np.full(len(ids), number), ids, weight.shape[1])
            weight[first : first + len(ids)] = torch.from_numpy(rows)
