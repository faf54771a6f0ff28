"""A worker's cache keeps updates that it has not pushed when it pulls the row anew."""

from __future__ import annotations

import numpy as np

from embroute.config.cluster import uniform_cluster
from embroute.config.spec import Size
from embroute.data.schema import Field, Schema, Table
from embroute.engine.optim import RowOptimizer
from embroute.engine.schedule import TransferBlock, TransferTime
from embroute.engine.sharding import RowSharding
from embroute.engine.store import CacheStore, RecordWidths
from embroute.kernels.codes import DELTA, VALUE_STATE
from embroute.planner.setup import Setup


def block(time: TransferTime, record: int) -> TransferBlock:
    """A block of slots 0 and 2."""
    return TransferBlock(0, time, 0, 0, 0, record, (2, 0, 0, 0), np.array([0, 2], np.int32))


def test_pull_onto_unpushed_updates_keeps_them() -> None:
    schema = Schema((Table("t", 4),), (Field("f", 0),))
    sharding = RowSharding(Setup(schema, uniform_cluster(1, 1), 2, 4, cache=Size(1.0, "share")))
    sgd = RowOptimizer("sgd", 0.5)
    store = CacheStore(0, sharding, RecordWidths(sharding, sgd, np.float64), sgd, deltas=True)
    pulled, pushed = block(TransferTime.LATE_PULL, VALUE_STATE), block(TransferTime.URGENT_PUSH, 3)
    store.write(pulled, np.array([[1.0, 2.0], [3.0, 4.0]]))
    store.apply(0, np.array([0], np.int32), np.array([[2.0, 4.0]]), 0)
    store.write(pulled, np.array([[10.0, 20.0], [30.0, 40.0]]))
    # Slot 0 has its update of -1 and -2 on the new value, slot 2 only the new value.
    assert store.records[0][[0, 2]].tolist() == [[9.0, 18.0], [30.0, 40.0]]
    assert pushed.record == DELTA
    assert store.read(pushed, ()).tolist() == [[-1.0, -2.0], [0.0, 0.0]]
    assert store.read(pushed, ()).tolist() == [[0.0, 0.0], [0.0, 0.0]]
