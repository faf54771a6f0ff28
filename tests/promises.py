"""The simulated traffic of a small job, step by step, to compare with the counted traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from embroute.config.cluster import Cluster
from embroute.cost.step_time import Traffic
from embroute.data.access_counts import count_lookups
from embroute.kernels.array_types import I64
from embroute.nn.job import assumed_cluster
from embroute.nn.settings import Settings
from embroute.nn.tensor_batches import LayerSpec, TensorAdapter
from embroute.planner.kernels.transfers import empty_counts, tally
from embroute.planner.plan import Plan, drain_transfers, traffic
from embroute.planner.plan_stream import plans, start
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from tests.jobs import BATCH, SIZES, WIDTHS, Batch, Result, lookups, new_model, size_of

ITEM_BYTES = 8  # the jobs are in doubles, the simulator prices floats


def adapter() -> TensorAdapter:
    """The batch adapter of the job's coordinator."""
    bags = (False, True, False)
    layers = [
        LayerSpec(name, size, width, bag, bag, 0 if name == "items" else None)
        for (name, size), width, bag in zip(SIZES.items(), WIDTHS, bags, strict=True)
    ]
    return TensorAdapter(layers, lookups)


class Promise(NamedTuple):
    """The plans of a job, the traffic of each, and the drain at the end."""

    setup: Setup
    plans: list[Plan]
    steps: list[Traffic]
    drain_rows_WKI: I64
    drain_bytes_WKI: I64


def _cluster(settings: Settings, topology: tuple[int, int]) -> Cluster:
    """The network of a job, given or assumed, with the dense part of the model."""
    told = settings.get("network", assumed_cluster(make_policy(settings["policy"]), *topology))
    assert isinstance(told, Cluster)
    compute_s = settings.get("compute_ms_per_sample", 0.0) / 1e3 or told.compute_s_per_sample
    dense_bytes = sum(p.numel() * ITEM_BYTES for p in new_model().top.parameters())
    return replace(told, compute_s_per_sample=compute_s, dense_bytes=dense_bytes)


def promise(
    stream: Sequence[Batch], optimizer: str, topology: tuple[int, int], settings: Settings
) -> Promise:
    """Plan a whole job without running it."""
    policy, own = make_policy(settings["policy"]), adapter()
    own.infer_spec(stream[0])
    setup = Setup(
        own.schema,
        _cluster(settings, topology),
        WIDTHS,
        BATCH,
        optimizer,
        size_of(settings),
        settings.get("quotas", ()),
        epoch_batches=len(stream),
    )
    batches = [own.batch(item) for item in stream]
    regroup, num_rows = policy.regroup, setup.schema.num_rows
    counts_R = count_lookups(batches, num_rows, regroup.calibration) if regroup else None
    state = start(policy, setup, counts_R)
    found = [step.plan for step in plans(policy, iter(batches), state)]
    rows, size = empty_counts(*topology), empty_counts(*topology)
    tally(drain_transfers(state, policy.sync.record), state.setup.record_bytes_XA, rows, size)
    moved = [traffic(plan, state.setup) for plan in found]
    return Promise(state.setup, found, moved, rows.sum(3), size.sum(3))


def assert_kept(promised: Promise, results: Mapping[str, Result]) -> None:
    """Assert that both ends counted the planned rows and bytes of every step, worker, shard and
    kind."""
    rows_TWKI = [step.rows_WKIP.sum(3) for step in promised.steps] + [promised.drain_rows_WKI]
    bytes_TWKI = [step.bytes_WKIP.sum(3) for step in promised.steps] + [promised.drain_bytes_WKI]
    scale = ITEM_BYTES // 4
    num_workers, num_shards = rows_TWKI[0].shape[:2]
    for step, worker, shard in np.ndindex(len(rows_TWKI), num_workers, num_shards):
        rows, size = rows_TWKI[step][worker, shard], scale * bytes_TWKI[step][worker, shard]
        for owner, peer in ((f"worker{worker}", shard), (f"shard{shard}", worker)):
            where = f"step {step}, {owner}, peer {peer}"
            _assert_counted(results[owner], (step, peer), (rows, size), where)
    for name, result in results.items():
        log = result.meter.log
        if log is not None and name != "coordinator":
            assert max((step for step, _ in log.rows), default=0) <= len(promised.steps), name


def _assert_counted(
    result: Result, key: tuple[int, int], expected: tuple[I64, I64], where: str
) -> None:
    log = result.meter.log
    assert log is not None
    nothing = np.zeros_like(expected[0])
    np.testing.assert_array_equal(log.rows.get(key, nothing), expected[0], err_msg=where)
    np.testing.assert_array_equal(log.bytes.get(key, nothing), expected[1], err_msg=where)
