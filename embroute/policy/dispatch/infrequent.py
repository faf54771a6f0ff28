"""Herald's degree of infrequency: which tables are worth scoring when time is short."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embroute.kernels.codes import ROW
from embroute.policy.state import State, held

PERIOD = 64  # steps between two rankings; a ranking reads every cached row


def degrees(state: State, samples_per_worker: int) -> npt.NDArray[np.float64]:
    """Per table, the share of cached rows looked up less often than one worker has samples.

    The paper counts look-ups per epoch; counts of the run so far stand in for them.
    """
    num_tables = len(state.setup.schema.tables)
    cached, rare = np.zeros(num_tables), np.zeros(num_tables)
    for worker in range(state.setup.num_workers):
        slots, _ = held(state, worker)
        rows = state.caches.slot_WCF[worker, slots, ROW].astype(np.int64)
        tables = state.setup.table_of(rows)
        cached += np.bincount(tables, minlength=num_tables)
        seldom = state.access_R[rows] < samples_per_worker
        rare += np.bincount(tables[seldom], minlength=num_tables)
    return np.where(cached > 0, rare / np.maximum(cached, 1), 1.0)


def ranked_tables(state: State, samples_per_worker: int) -> npt.NDArray[np.intp]:
    """Tables, the highest degree of infrequency first."""
    return np.argsort(-degrees(state, samples_per_worker), kind="stable")
