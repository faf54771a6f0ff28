"""From values of rows to values of samples: what score-based dispatches share.

Axes: U distinct rows, W workers, S samples, A arenas.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.data.window import Indexed
from embroute.kernels.jit import kernel

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@kernel
def _sum_rows(value_UW: F32, unique_of_lookup: I32, sample_offsets: I64, out_SW: F32) -> None:
    for s in range(len(sample_offsets) - 1):
        for i in range(sample_offsets[s], sample_offsets[s + 1]):
            u = unique_of_lookup[i]
            if u >= 0:
                out_SW[s] += value_UW[u]


def per_sample(value_UW: F32, now: Indexed) -> F32:
    """Sum of a sample's rows' values, for each worker."""
    out_SW = np.zeros((len(now.batch), value_UW.shape[1]), np.float32)
    _sum_rows(value_UW, now.unique_of_lookup, now.batch.sample_offsets, out_SW)
    return out_SW
