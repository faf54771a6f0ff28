"""Urgent pushes and late pulls in chunks overlap, with the same result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from embroute.config.cluster import Cluster, Host, Worker
from embroute.config.cluster_file import open_cluster
from embroute.cost.step_time import MIN_CHUNK_S, Traffic, pipelined, step_time
from embroute.data.open import open_source
from embroute.engine.packing import InFlight
from embroute.engine.schedule import TransferBlock
from embroute.engine.shard import Shard
from embroute.kernels.codes import LATE, MAX_CHUNKS, MISS_PULL, UPDATE_PUSH, URGENT
from embroute.launch.in_process import run_in_process
from embroute.nn.settings import Settings
from embroute.planner.kernels.transfers import empty_counts
from embroute.planner.setup import Setup
from embroute.simulator.simulation import Workload, measure_named
from tests.jobs import Result, batches, gathered, plain_cached, slow_settings, train
from tests.promises import assert_kept, promise
from tests.sizes import crossed, marked_full
from tests.test_promises import assert_notes_counted

STEPS, TOPOLOGY = 60, (3, 2)
OPTIMIZERS = ["sgd", "adagrad", "rowwise-adagrad", "adam"]
POLICIES = ["dispatch=esd sync=pipelined", "embroute(effort=200, quotas=equal)"]


def run(settings: Settings, optimizer: str) -> dict[str, Result]:
    stream, settings = batches(TOPOLOGY[0], STEPS), settings | Settings(debug="steps")
    return run_in_process(*TOPOLOGY, lambda rank: train(rank, stream, optimizer, settings))


@pytest.mark.parametrize(("policy", "optimizer"), crossed(POLICIES, OPTIMIZERS, "", "adagrad"))
def test_pipelined_steps_equal_plain_torch_and_their_plans(policy: str, optimizer: str) -> None:
    settings = slow_settings(policy, *TOPOLOGY)
    results = run(settings, optimizer)
    gathered(results, *TOPOLOGY).assert_equal(plain_cached(optimizer, TOPOLOGY[0], STEPS))
    promised = promise(batches(TOPOLOGY[0], STEPS), optimizer, TOPOLOGY, settings)
    assert len({plan.chunks for plan in promised.plans}) > 2  # neighbours differ
    assert_kept(promised, results)
    assert_notes_counted(promised, results)


@pytest.mark.parametrize("optimizer", marked_full(OPTIMIZERS, ["adam"]))
def test_pipelined_sync_gives_the_bits_of_on_demand(optimizer: str) -> None:
    one, other = (
        gathered(run(slow_settings(f"dispatch=esd sync={sync}", *TOPOLOGY), optimizer), *TOPOLOGY)
        for sync in ("on-demand", "pipelined")
    )
    for mine, its in zip(one.tables + one.dense, other.tables + other.dense, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_shard_sends_a_chunk_before_it_receives_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard's receives and sends are recorded step by step."""
    steps: list[str] = []
    stream, take, post = Shard._stream, Shard._take, Shard._send

    def streaming(
        shard: Shard, pushes: Sequence[TransferBlock], pulls: Sequence[TransferBlock], parts: int
    ) -> None:
        steps.append("")
        stream(shard, pushes, pulls, parts)

    def taking(shard: Shard, coming: InFlight) -> None:
        take(shard, coming)
        steps[-1] += "i"

    def posting(shard: Shard, wanted: Sequence[TransferBlock]) -> object:
        steps[-1] += "o"
        return post(shard, wanted)

    monkeypatch.setattr(Shard, "_stream", streaming)
    monkeypatch.setattr(Shard, "_take", taking)
    monkeypatch.setattr(Shard, "_send", posting)
    steps.append("")
    stream_, settings = batches(2, 20), slow_settings("dispatch=esd sync=pipelined", 2, 1, 0.05e6)
    run_in_process(2, 1, lambda rank: train(rank, stream_, "sgd", settings))
    # After the parts of a step comes the early phase of the next: all of it in, then out.
    assert any(step.startswith("io" * MAX_CHUNKS) for step in steps)


def two_workers(urgent: Sequence[int], late: Sequence[int], samples: Sequence[int]) -> Traffic:
    """Bytes of two workers and one shard."""
    bytes_WKIP = empty_counts(2, 1)
    bytes_WKIP[:, 0, UPDATE_PUSH, URGENT] = urgent
    bytes_WKIP[:, 0, MISS_PULL, LATE] = late
    nothing = np.zeros(2, np.int64)
    return Traffic(bytes_WKIP, bytes_WKIP, np.array(samples), nothing, nothing, nothing[:1])


def cluster(rates: Sequence[float], latency_s: float = 0.0) -> Cluster:
    """A fast shard and two workers; a sample takes a millisecond."""
    links = [Host("shard", 1e9, 1e9), *(Host(f"w{r}", r, r, latency_s) for r in rates)]
    return Cluster(tuple(links), (Worker(1), Worker(2)), (0,), compute_s_per_sample=1e-3)


@pytest.mark.parametrize("latency_s", [0.0, 1e-4])
def test_step_time_of_chunks_by_hand(latency_s: float) -> None:
    """Worker 0 computes for 8 ms, worker 1 for 2 ms behind a slow link."""
    moved = two_workers([4000, 4000], [4000, 3000], [8, 2])
    network = cluster([1e7, 1e6], latency_s)
    whole = step_time(moved, network)
    # Worker 0: 0.4 + 8 + 0.4. Worker 1: 3 + 2 + 4.
    assert whole.turn_W.tolist() == pytest.approx([8.8e-3 + 2 * latency_s, 9e-3 + 2 * latency_s])
    assert whole.total_s == pytest.approx(9e-3 + 2 * latency_s)
    # What worker 1 wins by a lead, worker 0 loses. Without one worker 0 waits for a part of pulls
    # less, so that both meet at half of the difference.
    four = step_time(replace(moved, chunks=4), network)
    assert four.lead_s > 0
    assert four.turn_W[0] == pytest.approx(four.turn_W[1])
    assert four.total_s < whole.total_s


def test_chunk_count_follows_the_bytes_of_the_slower_link() -> None:
    network = cluster([1e7, 1e6])
    least = int(MIN_CHUNK_S * 1e6)  # bytes on the slower link
    for size, parts in ((0, 1), (least, 1), (2 * least, 2), (7 * least, 4), (99 * least, 8)):
        found = pipelined(two_workers([0, size], [0, 99 * least], [1, 1]), network)
        assert found.chunks == parts
        assert pipelined(two_workers([0, 99 * least], [0, size], [1, 1]), network).chunks == parts


def test_pipelined_sync_shortens_steps_and_moves_the_same_bytes() -> None:
    source = open_source("online-retail")
    setup = Setup(source.schema, open_cluster("edge-8"), 512)
    plain, parted = (
        measure_named(f"dispatch=herald sync={sync}", Workload(source, setup, 20, 5))
        for sync in ("on-demand", "pipelined")
    )
    assert (plain.traffic.bytes_WKIP == parted.traffic.bytes_WKIP).all()
    assert parted.step_time_s < 0.8 * plain.step_time_s
