"""Initial values of embedding rows, the same however rows are spread over shards."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from embroute.models.embeddings import FieldEmbeddings

BLOCK_ROWS = 4096
# The expected norm of a row. At widths of 64 to 128 an entry then has the standard deviation of
# 0.01 common for click models; norms near 1 would start FM's and DLRM's many pairs far from 0.
NORM = 0.1


def initial_rows(
    seed: int, table: int, first: int, last: int, width: int
) -> npt.NDArray[np.float64]:
    """Rows first..last of a table: normal, with standard deviation NORM / sqrt(width).

    Block b of BLOCK_ROWS rows depends on (seed, table, b) and the width alone.
    """
    start = first // BLOCK_ROWS
    blocks = [
        np.random.default_rng([seed, table, block]).standard_normal((BLOCK_ROWS, width))
        for block in range(start, -(-last // BLOCK_ROWS))
    ]
    rows = np.concatenate(blocks or [np.empty((0, width))])
    before = start * BLOCK_ROWS
    return rows[first - before : last - before] * float(NORM / np.sqrt(width))


@torch.no_grad()
def fill(embeddings: FieldEmbeddings, seed: int) -> None:
    """Give every row of every table its initial value."""
    for number, (table, weight) in enumerate(
        zip(embeddings.schema.tables, embeddings.tables.parameters(), strict=True)
    ):
        if weight.is_meta:
            raise ValueError(f"table {table.name!r} is on the meta device and holds no rows")
        for first in range(0, table.num_rows, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, table.num_rows)
            rows = initial_rows(seed, number, first, last, weight.shape[1])
            weight[first:last] = torch.from_numpy(rows)
