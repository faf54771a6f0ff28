"""Whole jobs in one process: exact policies equal plain single-process torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from embroute.config.cluster import uniform_cluster
from embroute.config.spec import Size
from embroute.data.access_counts import count_lookups
from embroute.engine.batches import MicroBatch
from embroute.engine.optim import RowOptimizer, row_optimizer
from embroute.engine.step_message import WorkerStep
from embroute.launch.in_process import run_in_process
from embroute.nn.session import WorkerSession
from embroute.planner.plan_stream import plans, start
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from tests.jobs import (
    BATCH,
    CLIP,
    WIDTHS,
    Batch,
    Result,
    Trained,
    batches,
    crowded_settings,
    dense_of,
    free_settings,
    gathered,
    loss_of,
    new_model,
    optimizers_of,
    plain,
    plain_cached,
    schedules_of,
    settings_of,
    tables_of,
    train,
)
from tests.promises import adapter
from tests.sizes import crossed, marked_full, sized

STEPS = sized(60, 200)
OPTIMIZERS = ["sgd", "adagrad", "rowwise-adagrad", "adam"]
EXACT = [
    "nocache",
    "vanilla",
    "herald",
    "esd(1)",
    "bagpipe(3)",
    "embroute(effort=200)",
    "in-place",
    "dispatch=esd sync=on-demand evict=clairvoyant(3)",
    "dispatch=herald sync=write-through evict=lfu",
    "unbounded(of=esd(0.5))",
    "unbounded(of=allreduce)",
]
MORE = ["embroute(effort=auto)", "het(0)", "dispatch=esd sync=pipelined(init=local)"]
TOPOLOGIES = [(2, 1), (3, 2), (2, 2), (3, 1)]


def run(policy: str, optimizer: str, topology: tuple[int, int], steps: int) -> dict[str, Result]:
    workers, shards = topology
    stream, settings = batches(workers, steps), settings_of(policy, workers)
    return run_in_process(workers, shards, lambda rank: train(rank, stream, optimizer, settings))


@pytest.mark.parametrize(("policy", "optimizer"), crossed(EXACT, OPTIMIZERS, "esd(1)", "adagrad"))
def test_exact_policies_equal_plain_torch(policy: str, optimizer: str) -> None:
    number = EXACT.index(policy) + OPTIMIZERS.index(optimizer)
    assert_plain(policy, optimizer, TOPOLOGIES[number % len(TOPOLOGIES)])


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", [*EXACT, *MORE])
def test_exact_policies_equal_plain_torch_on_every_topology(
    policy: str, optimizer: str, topology: tuple[int, int]
) -> None:
    assert_plain(policy, optimizer, topology)


def assert_plain(policy: str, optimizer: str, topology: tuple[int, int]) -> None:
    workers, shards = topology
    results = run(policy, optimizer, (workers, shards), STEPS)
    mine = gathered(results, workers, shards)
    mine.assert_equal(plain_cached(optimizer, workers, STEPS))
    for worker in range(workers):
        for own, other in zip(results[f"worker{worker}"].dense, mine.dense, strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("optimizer", marked_full(OPTIMIZERS, ["adagrad"]))
def test_training_with_free_quotas_equals_plain_torch(optimizer: str) -> None:
    workers, shards = 3, 2
    stream, settings = (
        batches(workers, STEPS),
        free_settings("embroute(effort=200)", workers, shards),
    )
    results = run_in_process(workers, shards, lambda rank: train(rank, stream, optimizer, settings))
    gathered(results, workers, shards).assert_equal(plain_cached(optimizer, workers, STEPS))
    taken = [results[f"worker{worker}"].samples for worker in range(workers)]
    assert len(set(taken[0])) > 1  # shares move
    assert sum(taken[2]) < sum(taken[0])


@pytest.mark.parametrize("optimizer", marked_full(OPTIMIZERS, ["adagrad"]))
def test_training_with_all_reduced_rows_equals_plain_torch(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, shards = 3, 2
    policy, update, reduced = (
        "embroute(effort=200, quotas=equal)",
        WorkerSession._update_replicas,
        [],
    )

    def counted(run: WorkerSession, work: WorkerStep, sums: Sequence[torch.Tensor]) -> None:
        reduced.append(sum(len(slots) for slots in work.replica_slot_AU))
        update(run, work, sums)

    monkeypatch.setattr(WorkerSession, "_update_replicas", counted)
    stream, settings = batches(workers, STEPS), crowded_settings(policy, workers, shards)
    results = run_in_process(workers, shards, lambda rank: train(rank, stream, optimizer, settings))
    gathered(results, workers, shards).assert_equal(plain_cached(optimizer, workers, STEPS))
    assert workers < len(reduced) < workers * STEPS  # in some steps, and not in all
    assert max(reduced) > 1


@pytest.mark.parametrize("optimizer", marked_full(OPTIMIZERS, ["adagrad"]))
@pytest.mark.parametrize("policy", ["fae(hot=0.6, buffer=8)", "scars(hot=0.6, buffer=8)"])
def test_replicated_rows_equal_plain_torch_in_regrouped_order(policy: str, optimizer: str) -> None:
    """The plans give the order of samples; the reference trains in that order."""
    workers, shards, steps = 3, 2, 60
    stream = batches(7, steps)
    settings = settings_of(policy, workers, 1.0)
    results = run_in_process(workers, shards, lambda rank: train(rank, stream, optimizer, settings))
    mine = gathered(results, workers, shards)
    mine.assert_equal(plain(optimizer, regrouped(policy, stream, optimizer)))


def regrouped(policy_name: str, stream: Sequence[Batch], optimizer: str) -> list[Batch]:
    """The batches in the order in which a policy trains their samples."""
    own, policy = adapter(), make_policy(policy_name)
    own.infer_spec(stream[0])
    rows = [own.batch(item) for item in stream]
    setup = Setup(own.schema, uniform_cluster(3, 2), WIDTHS, BATCH, optimizer, Size(1.0, "share"))
    setup = replace(setup, epoch_batches=len(rows))
    assert policy.regroup is not None
    counts_R = count_lookups(rows, setup.schema.num_rows, policy.regroup.calibration)
    state = start(policy, setup, counts_R)
    found = [step.plan.now.batch for step in plans(policy, iter(rows), state)]
    assert any(batch.hot for batch in found)
    table_of = setup.schema.first_rows
    fields = [field.table for field in setup.schema.fields]
    back = []
    for batch in found:
        first = np.repeat(
            np.tile([table_of[t] for t in fields], len(batch)), np.diff(batch.offsets)
        )
        ids = np.where(batch.rows < 0, -1, batch.rows - first)
        back.append(
            own.to_user_batch(MicroBatch(len(batch), batch.dense, batch.label, batch.offsets, ids))
        )
    return back  # type: ignore[return-value]


@pytest.mark.parametrize("optimizer", marked_full(OPTIMIZERS[:3], ["adagrad"]))
@pytest.mark.parametrize("policy", ["het(4)", "het(4, clocks=release)", "ssp(4)"])
def test_deltas_of_one_worker_equal_plain_torch(policy: str, optimizer: str) -> None:
    """One worker misses no updates, so only the addition of deltas differs."""
    stream, settings = batches(1, STEPS), settings_of(policy, 1, 0.9)
    results = run_in_process(1, 2, lambda rank: train(rank, stream, optimizer, settings))
    mine = gathered(results, 1, 2)
    mine.assert_equal(plain_cached(optimizer, 1, STEPS), rtol=1e-9, atol=1e-11)


def one_step_late(stream: Sequence[Batch]) -> Trained:
    """Plain torch whose rows lack the updates of the step before."""
    model = new_model()
    optimizers = optimizers_of("sgd", model)
    schedules, tables = schedules_of(optimizers), [one.weight for one in tables_of(model)]
    current = [weight.detach().clone() for weight in tables]
    behind = [weight.clone() for weight in current]
    for batch in stream:
        for weight, old in zip(tables, behind, strict=True):
            weight.data = old.clone()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.top.parameters(), CLIP)
        behind = [value.clone() for value in current]
        for weight, value in zip(tables, current, strict=True):
            weight.data = value
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        current = [weight.detach().clone() for weight in tables]
    return Trained([value.numpy() for value in current], dense_of(model))


@pytest.mark.parametrize("share", [0.75, 1.0])
def test_asynchronous_reads_miss_exactly_the_step_before(share: float) -> None:
    """Also where small caches let some rows arrive late: their values are as old."""
    stream, settings = batches(3, STEPS), settings_of("asp", 3, share)
    results = run_in_process(3, 2, lambda rank: train(rank, stream, "sgd", settings))
    gathered(results, 3, 2).assert_equal(one_step_late(stream))


def test_equal_runs_give_equal_bits() -> None:
    first, second = (gathered(run("esd(1)", "adam", (3, 2), 60), 3, 2) for _ in range(2))
    for mine, its in zip(first.tables + first.dense, second.tables + second.dense, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_every_worker_reports_the_loss_of_the_whole_batch() -> None:
    results = run("herald", "sgd", (3, 1), 30)
    assert results["worker0"].losses == results["worker2"].losses
    first = float(loss_of(new_model(), batches(3, 30)[0]).detach())
    assert results["worker0"].losses[0] == pytest.approx(first, rel=1e-12)


def test_training_with_a_worker_without_samples_equals_plain_torch() -> None:
    stream, settings = batches(3, 40), settings_of("esd(1)", 3)
    settings["quotas"] = (1.0, 0.0, 1.0)
    results = run_in_process(3, 1, lambda rank: train(rank, stream, "adagrad", settings))
    gathered(results, 3, 1).assert_equal(plain_cached("adagrad", 3, 40))


def test_optimizers_without_a_row_form_are_refused() -> None:
    def refused(optimizer: torch.optim.Optimizer) -> None:
        row_optimizer(optimizer, optimizer.param_groups[0])

    weight = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(ValueError, match="momentum must be 0"):
        refused(torch.optim.SGD(weight, lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"weight_decay=0\.1"):
        refused(torch.optim.Adagrad(weight, weight_decay=0.1))
    with pytest.raises(ValueError, match="RMSprop has no row form"):
        refused(torch.optim.RMSprop(weight))
    with pytest.raises(ValueError, match="optimizer must be one of"):
        RowOptimizer("lion", 0.1)
