"""Simulator = runtime: every step moves the planned rows, kind by kind."""

from __future__ import annotations

from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch

from embroute.config.cluster import uniform_cluster
from embroute.config.data_options import DataOptions
from embroute.config.spec import Size
from embroute.data.open import open_source
from embroute.data.stream import batches as data_batches
from embroute.engine.batches import SampleAdapter
from embroute.engine.observe.metrics import ASIDE, DRAIN_PHASE, EARLY_PHASE, URGENT_PHASE, Meter
from embroute.engine.protocol.codec import encode
from embroute.engine.protocol.messages import ControlMessage
from embroute.engine.sharding import RowSharding
from embroute.engine.step_message import step_messages
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.nn.prepare import prepare
from embroute.nn.settings import Settings
from embroute.planner.plan import traffic
from embroute.planner.plan_stream import plans, start
from embroute.planner.setup import Setup
from embroute.policies.catalog import DISPATCHES, EVICTS, SYNCS, SYSTEMS, make_policy
from tests.jobs import (
    Result,
    batches,
    crowded_settings,
    free_settings,
    loss_of,
    optimizers_of,
    seeded_model,
    settings_of,
    train,
)
from tests.promises import Promise, adapter, assert_kept, promise
from tests.sizes import marked_full, sized

STEPS, TOPOLOGY = sized(25, 60), (3, 2)
POLICIES = [
    "nocache",
    "vanilla",
    "het(1)",
    "het(3)",
    "het(10, order=lfu)",
    "het(4, order=light-lfu)",
    "het(3, clocks=release)",
    "asp",
    "ssp(2)",
    "unbounded(of=allreduce)",
    "herald",
    "herald(tables=1)",
    "herald(ties=first)",
    "esd(0)",
    "esd(0.5)",
    "esd(1)",
    "embroute",
    "in-place",
    "fae(hot=0.4)",
    "fae(hot=0.4, rate=25, buffer=8)",
    "scars(hot=0.3)",
    "bagpipe(3)",
    "unbounded(of=esd(0.5))",
    "unbounded(of=het(4))",
    "dispatch=esd sync=on-demand evict=clairvoyant(3)",
    "dispatch=esd sync=het(10) evict=clairvoyant(3)",
    "dispatch=herald sync=write-through evict=lfu",
    "dispatch=robin sync=until-last-use(4) evict=light-lfu",
    "dispatch=block sync=none",
    "dispatch=block sync=on-demand evict=lru",
    "dispatch=esd sync=on-demand evict=stale-first",
    "dispatch=esd sync=pipelined evict=lru",
]
SMALL = [
    "nocache",
    "vanilla",
    "het(3, clocks=release)",
    "asp",
    "ssp(2)",
    "unbounded(of=allreduce)",
    "herald",
    "embroute",
    "in-place",
    "fae(hot=0.4, rate=25, buffer=8)",
    "scars(hot=0.3)",
    "bagpipe(3)",
    "unbounded(of=esd(0.5))",
    "dispatch=esd sync=het(10) evict=clairvoyant(3)",
    "dispatch=herald sync=write-through evict=lfu",
    "dispatch=robin sync=until-last-use(4) evict=light-lfu",
    "dispatch=block sync=none",
    "dispatch=esd sync=on-demand evict=stale-first",
    "dispatch=esd sync=pipelined evict=lru",
]


def run(settings: Settings) -> tuple[Promise, dict[str, Result]]:
    """A planned job, and the same job trained."""
    workers, shards = TOPOLOGY
    stream, settings = batches(workers, STEPS), settings | Settings(debug="steps")
    results = run_in_process(workers, shards, lambda rank: train(rank, stream, "adagrad", settings))
    return promise(stream, "adagrad", TOPOLOGY, settings), results


@pytest.mark.parametrize("policy", marked_full(POLICIES, SMALL))
def test_every_step_moves_the_rows_of_its_plan(policy: str) -> None:
    promised, results = run(settings_of(policy, TOPOLOGY[0]))
    assert len(promised.steps) >= STEPS
    assert_kept(promised, results)
    assert_notes_counted(promised, results)


CACHED = [name for name in POLICIES if name != "in-place"]


@pytest.mark.parametrize("policy", marked_full(CACHED, ["esd(0.5)", "bagpipe(3)"]))
def test_every_step_moves_the_rows_of_its_plan_with_unequal_caches(policy: str) -> None:
    settings = settings_of(policy, TOPOLOGY[0]) | Settings(cache="70%+80%+1")
    promised, results = run(settings)
    capacity_WA = promised.setup.capacity_WA.tolist()
    assert make_policy(policy).unbounded or capacity_WA == [[49, 17], [56, 20], [70, 25]]
    assert_kept(promised, results)


def test_steps_with_free_quotas_move_the_rows_of_their_plans() -> None:
    promised, results = run(free_settings("embroute(effort=200)", *TOPOLOGY))
    assert_kept(promised, results)
    assert_notes_counted(promised, results)
    assert len({tuple(step.samples_W.tolist()) for step in promised.steps}) > 2


def test_steps_with_all_reduced_rows_move_the_rows_of_their_plans() -> None:
    promised, results = run(crowded_settings("embroute(effort=200, quotas=equal)", *TOPOLOGY))
    assert_kept(promised, results)
    assert_notes_counted(promised, results)
    assert any(step.hot_rows for step in promised.steps)


def assert_notes_counted(promised: Promise, results: dict[str, Result]) -> None:
    """Assert that every rank counts the bytes of its control messages as sent, step by step."""
    sharding, own, total = RowSharding(promised.setup), adapter(), 0
    own.infer_spec(batches(TOPOLOGY[0], STEPS)[0])
    names = [name for name in results if name != "coordinator"]
    for plan in promised.plans:
        shards, workers = step_messages(plan, sharding, own, 0)
        messages: dict[str, ControlMessage] = {
            f"shard{k}": message for k, message in enumerate(shards)
        }
        messages |= {f"worker{w}": message for w, message in enumerate(workers)}
        for name in names:
            log = results[name].meter.log
            assert log is not None
            size = sum(len(part) for part in encode(messages[name]))
            assert log.note_bytes[plan.step] == size, (plan.step, name)
            total += size
    # The coordinator also counts a greeting, a drain, and the end.
    assert 0 < results["coordinator"].meter.other_bytes["notes"] - total < 10_000


@pytest.mark.parametrize("policies", [SMALL, POLICIES], ids=["small", "full"])
def test_simulated_and_trained_policies_cover_the_catalog(policies: list[str]) -> None:
    text = " ".join(policies)
    for names in (SYSTEMS, DISPATCHES, SYNCS, EVICTS):
        assert [name for name in names if name not in text] == []


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        ("esd(1)", "vanilla"),
        pytest.param("vanilla", "in-place", marks=pytest.mark.full),
        pytest.param("in-place", "herald", marks=pytest.mark.full),
    ],
)
def test_compare_with_reports_the_bytes_of_the_other_policy(policy: str, other: str) -> None:
    stream, figures = batches(3, STEPS), []
    settings, its = settings_of(policy, 3), settings_of(other, 3)

    def main(rank: RankContext) -> None:
        model = seeded_model()
        optimizers = optimizers_of("sgd", model)
        told = settings | {"compare_with": other}
        ready = prepare(model, optimizers, stream, rank, **told)
        for batch in ready.loader:
            if ready.is_first_worker and ready.session and ready.session.current:
                figures.append(ready.session.current.figures[-2:].tolist())
            model.zero_grad()
            ready.backward(loss_of(model, batch))  # type: ignore[arg-type]

    run_in_process(*TOPOLOGY, main)
    planned = (promise(stream, "sgd", TOPOLOGY, one) for one in (settings, its))
    row_bytes = ([int(step.bytes_WKIP.sum()) for step in one.steps] for one in planned)
    assert figures == [list(both) for both in zip(*row_bytes, strict=True)]
    assert sum(own for own, _ in figures) != sum(others for _, others in figures)


@pytest.mark.parametrize(
    ("policy", "other"),
    [("esd(1)", "herald"), pytest.param("herald", "vanilla", marks=pytest.mark.full)],
)
def test_reported_bytes_cover_checkpoints_evaluations_and_the_drain(
    policy: str, other: str, tmp_path: Path
) -> None:
    """Pushes of checkpoints, evaluations and the end count; lookups of evaluations do not."""
    stream, said = batches(3, STEPS), np.zeros(2, np.int64)
    settings = settings_of(policy, 3) | {"held_out": batches(4, 2), "evaluate_every": sized(10, 25)}
    settings |= {"checkpoint_every": 10, "compare_with": other}

    def main(rank: RankContext, policy: str) -> Meter:
        own = settings | {"policy": policy, "checkpoint": tmp_path / policy}
        model = seeded_model()
        optimizers = optimizers_of("sgd", model)
        ready = prepare(model, optimizers, stream, rank, **own)
        for batch in ready.loader:
            session = ready.session
            if policy != other and ready.is_first_worker and session and session.current:
                said[:] += session.current.figures[-2:]
            model.zero_grad()
            ready.backward(loss_of(model, batch))  # type: ignore[arg-type]
        for _ in ready.held_out():
            pass
        if policy != other and ready.is_first_worker and ready.session:
            assert ready.session.drain_figures is not None
            said[:] += ready.session.drain_figures[-2:]
        return ready.meter

    counted = []
    for each in (policy, other):
        meters = run_in_process(*TOPOLOGY, partial(main, policy=each))
        own = [meter.bytes for name, meter in meters.items() if name.startswith("worker")]
        counted.append(sum(s.sum() for m in own for (p, _), s in m.items() if p != ASIDE))
        assert any(phase == ASIDE for sizes in own for phase, _ in sizes)
    assert counted == [2 * said[0], 2 * said[1]]  # which are in floats, and the job is in doubles


@pytest.mark.parametrize(
    "policy",
    marked_full(["vanilla", "esd(1)", "bagpipe(3)", "embroute", "het(3)"], ["esd(1)", "het(3)"]),
)
def test_workers_and_shards_count_the_same_traffic(policy: str) -> None:
    workers, shards = TOPOLOGY
    stream, settings = batches(3, STEPS), settings_of(policy, workers) | {"debug": "steps"}
    results = run_in_process(workers, shards, lambda rank: train(rank, stream, "sgd", settings))
    phases = set()
    for i, k in product(range(workers), range(shards)):
        mine, its = results[f"worker{i}"].meter, results[f"shard{k}"].meter
        assert mine.log is not None
        logged = sum(rows for (_, peer), rows in mine.log.rows.items() if peer == k)
        own = {phase: rows for (phase, peer), rows in mine.rows.items() if peer == f"shard{k}"}
        np.testing.assert_array_equal(sum(own.values()), logged)
        for phase, rows in own.items():
            np.testing.assert_array_equal(its.rows[phase, f"worker{i}"], rows)
            np.testing.assert_array_equal(
                its.bytes[phase, f"worker{i}"], mine.bytes[phase, f"shard{k}"]
            )
            phases.add(phase)
        assert sum(mine.waited_s[phase, f"shard{k}"] for phase in own) > 0
    assert {EARLY_PHASE, URGENT_PHASE} <= phases <= {EARLY_PHASE, URGENT_PHASE, DRAIN_PHASE}
    entries = results["worker0"].meter.record()["peers"]
    assert isinstance(entries, list)
    assert {entry["peer"] for entry in entries} == {"shard0", "shard1"}


NOTE_BYTES, BLOCK_BYTES = 420, 36  # of a note with no rows at all, and of each block's head


@pytest.mark.parametrize("policy", ["vanilla", "esd(1)", "het(10)", "fae(hot=300rows)"])
def test_priced_bytes_of_samples_and_plans_equal_the_bytes_sent(policy: str) -> None:
    """Lists are priced to the byte; the frame of a message and its block headers are not priced."""
    source, workers = open_source("online-retail(negatives=1)", DataOptions()), 4
    setup = Setup(source.schema, uniform_cluster(workers, 2), 16, 512, cache=Size(0.1, "share"))
    chosen, own = make_policy(policy), SampleAdapter(source.schema, torch.float32)
    stream = list(islice(data_batches(source, 512), 20))
    counts = np.bincount(np.concatenate([b.rows for b in stream]), minlength=setup.schema.num_rows)
    state, sharding = start(chosen, setup, counts), RowSharding(setup)
    for step in plans(chosen, iter(stream), state):
        moved = traffic(step.plan, setup)
        priced = [*moved.plan_bytes_K, *(moved.sample_bytes_W + moved.plan_bytes_W)]
        shards, told = step_messages(step.plan, sharding, own, 0)
        heads = [message.transfers.heads for message in shards]
        heads += [message.work.transfers.heads for message in told]
        messages: list[ControlMessage] = [*shards, *told]
        for message, head, price in zip(messages, heads, priced, strict=True):
            frame = sum(len(part) for part in encode(message)) - price - head.nbytes
            assert head.nbytes % BLOCK_BYTES == 0
            assert 0 <= frame <= NOTE_BYTES
