"""Who holds a row: for most rows nobody or one worker, and then a look-up costs one step, not W.

Axes: U distinct rows, W workers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.jit import kernel

I32 = npt.NDArray[np.int32]

NO_HOLDER, SEVERAL = -1, -2


@kernel
def sole_holders(copies_UW: I32, bits_U: I32, bits: int) -> I32:
    """The only worker whose copy carries one of the bits, or NO_HOLDER, or SEVERAL."""
    out_U = np.full(len(bits_U), NO_HOLDER, np.int32)
    for u in range(len(bits_U)):
        if not bits_U[u] & bits:
            continue
        for w in range(copies_UW.shape[1]):
            if copies_UW[u, w] & bits:
                out_U[u] = w if out_U[u] == NO_HOLDER else SEVERAL
    return out_U
