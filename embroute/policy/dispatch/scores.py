"""From values of rows to values of samples: what score-based dispatches share.

Axes: U distinct rows, W workers, S samples, A arenas.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from embroute.data.window import Indexed
from embroute.kernels.jit import kernel

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


Values = TypeVar("Values", npt.NDArray[np.float32], npt.NDArray[np.float64])


@kernel
def _add(value_UW: Values, u: int, out_SW: Values, s: int) -> None:
    for w in range(value_UW.shape[1]):
        out_SW[s, w] += value_UW[u, w]


@kernel
def _sum_rows(value_UW: Values, unique_of_lookup: I32, sample_offsets: I64, out_SW: Values) -> None:
    for s in range(len(sample_offsets) - 1):
        for i in range(sample_offsets[s], sample_offsets[s + 1]):
            u = unique_of_lookup[i]
            if u >= 0:
                _add(value_UW, u, out_SW, s)


def per_sample(value_UW: Values, now: Indexed) -> Values:
    """Sum of a sample's rows' values, for each worker."""
    out_SW = np.zeros((len(now.batch), value_UW.shape[1]), value_UW.dtype)
    _sum_rows(value_UW, now.unique_of_lookup, now.batch.sample_offsets, out_SW)
    return out_SW
