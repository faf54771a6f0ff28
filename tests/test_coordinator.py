"""The coordinator plans some steps ahead of the workers, and ends when a worker asks for the
end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from embroute.checkpoint.folders import latest_checkpoint, step_of
from embroute.engine import coordinator
from embroute.engine.control import DEPTH, Delivery, send_all
from embroute.engine.protocol.messages import ControlMessage, ShardStep
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.nn.prepare import prepare
from embroute.transport.interface import Channel
from tests.jobs import (
    Result,
    batches,
    gathered,
    loss_of,
    new_model,
    optimizers_of,
    plain,
    settings_of,
    train,
)

WORKERS, SHARDS = 2, 1
FURTHEST = 1 + DEPTH + 1  # one is being carried out, and one more than there is room for has come
SECONDS = 20.0  # for what takes milliseconds


class Plans:
    """Counts the plans that all ranks have received."""

    def __init__(self) -> None:
        self.there, self.changed = 0, threading.Condition()

    def post(self, channel: Channel, messages: Sequence[tuple[str, ControlMessage]]) -> Delivery:
        told = send_all(channel, messages)
        with self.changed:
            self.there += isinstance(messages[0][1], ShardStep)
            self.changed.notify_all()
        return told

    def reach(self, count: int, seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.there >= count, seconds)


@pytest.mark.parametrize("policy", ["vanilla", "esd(1)", "in-place"])
def test_coordinator_plans_ahead_up_to_the_queue_depth(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, at = Plans(), 10
    monkeypatch.setattr(coordinator, "send_all", plans.post)
    found: list[bool] = []

    def main(rank: RankContext) -> None:
        model = new_model()
        optimizers = optimizers_of("sgd", model)
        settings = settings_of(policy, WORKERS)
        ready = prepare(model, optimizers, batches(1, 30), rank, **settings)
        for step, batch in enumerate(ready.loader):
            if step == at and ready.is_first_worker:
                # Plans 0 to `at` have been used.
                found.append(plans.reach(at + 1 + DEPTH, SECONDS))
                found.append(plans.reach(at + 1 + FURTHEST + 1, 0.5))
            ready.backward(loss_of(model, batch))  # type: ignore[arg-type]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_in_process(WORKERS, SHARDS, main)
    assert found == [True, False]


@pytest.mark.parametrize("policy", ["vanilla", "embroute(effort=200)", "in-place"])
def test_worker_stop_ends_all_ranks_at_the_same_step(policy: str, tmp_path: Path) -> None:
    asked, steps = 20, 400
    stream, settings = batches(3, steps), settings_of(policy, WORKERS)
    settings["checkpoint"] = str(tmp_path)

    def main(rank: RankContext) -> Result:
        stop_after = asked if rank.name == "worker1" else 0
        return train(rank, stream, "adagrad", settings, stop_after=stop_after)

    results = run_in_process(WORKERS, SHARDS, main)
    trained = len(results["worker0"].losses)
    assert asked <= trained <= asked + FURTHEST + 2  # an answer may have left just before
    assert len(results["worker1"].losses) == trained
    gathered(results, WORKERS, SHARDS).assert_equal(plain("adagrad", stream[:trained]))
    saved = latest_checkpoint(tmp_path)
    assert saved is not None
    assert step_of(saved) == trained


def test_shard_that_asks_for_the_end_is_refused() -> None:
    def main(rank: RankContext) -> None:
        model = new_model()
        optimizers = optimizers_of("sgd", model)
        ready = prepare(model, optimizers, batches(1, 2), rank, **settings_of("vanilla", WORKERS))
        for batch in ready.loader:
            model.zero_grad()
            ready.backward(loss_of(model, batch))  # type: ignore[arg-type]
        if rank.role == "shard":
            ready.stop()

    with pytest.raises(RuntimeError, match="only workers train"):
        run_in_process(WORKERS, SHARDS, main)
