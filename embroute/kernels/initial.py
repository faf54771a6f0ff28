"""Initial values of rows as a function of seed, table, row and column: whoever needs one makes it.

Hashes are added up, nothing else, so that every machine gets the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.jit import kernel
from embroute.kernels.memory import index
from embroute.kernels.sampling import mixed

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

# The sum of four even draws from 0 to 2**16 - 1 is nearly normal.
PIECES, BITS, MASK = 4, np.uint64(16), np.uint64(2**16 - 1)
MEAN, DEVIATION = PIECES * (2**16 - 1) / 2, float(np.sqrt(PIECES * (2**32 - 1) / 12))


@kernel
def draw_rows(seed: int, table_N: I64, id_N: I64, scale: float, out: F64) -> None:
    """Fill `out` with rows, each entry of standard deviation `scale`."""
    factor = scale / DEVIATION
    for n in range(len(id_N)):
        own = mixed(mixed(np.uint64(seed)) + np.uint64(table_N[n]))
        own = mixed(own + np.uint64(id_N[n]))
        for column in range(out.shape[1]):
            bits, total = mixed(own + np.uint64(column)), np.uint64(0)
            for _ in range(PIECES):
                total += bits & MASK
                bits >>= BITS
            out[index(n), index(column)] = (np.float64(total) - MEAN) * factor
