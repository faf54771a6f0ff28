"""Checkpoint and resume: an interrupted run ends with the bits of an uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from embroute.checkpoint.folders import latest_checkpoint, saved_checkpoints
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.nn.prepare import prepare
from embroute.nn.settings import Settings
from tests.jobs import (
    Batch,
    Result,
    Trained,
    batches,
    crowded_settings,
    free_settings,
    gathered,
    loss_of,
    new_model,
    optimizers_of,
    plain_cached,
    settings_of,
    slow_settings,
    train,
)
from tests.sizes import marked_full

STEPS, EVERY = 60, 20


class PowerCutError(Exception):
    pass


class Failing(list[Batch]):
    """Batches that raise an error, the first time they are read."""

    def __init__(self, stream: Sequence[Batch], last: int) -> None:
        super().__init__(stream)
        self.last, self.passes = last, 0

    def __iter__(self) -> Iterator[Batch]:
        self.passes += 1
        return self._failing() if self.passes == 1 else super().__iter__()

    def _failing(self) -> Iterator[Batch]:
        yield from self[: self.last]
        raise PowerCutError


def run(
    settings: Settings, topology: tuple[int, int], stream: Sequence[Batch]
) -> dict[str, Result]:
    workers, shards = topology
    return run_in_process(workers, shards, lambda rank: train(rank, stream, "adagrad", settings))


def saving(policy: str, workers: int, folder: Path) -> Settings:
    share = 1.0 if policy.startswith(("fae", "scars", "het")) else 0.75
    settings = settings_of(policy, workers, share)
    settings.update({"checkpoint": folder, "checkpoint_every": EVERY, "resume": True})
    return settings


def same(first: Trained, second: Trained) -> None:
    for mine, its in zip(first.tables + first.dense, second.tables + second.dense, strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("cut", [pytest.param(45, marks=pytest.mark.full), 52])
@pytest.mark.parametrize(
    "policy",
    marked_full(
        [
            "vanilla",
            "herald(tables=auto)",
            "esd(1)",
            "bagpipe(3)",
            "embroute(effort=200)",
            "in-place",
            "het(4)",
            "het(4, clocks=release)",
            "ssp(3)",
            "asp",
            "fae(hot=0.5, buffer=8)",
            "scars(hot=0.3, buffer=8)",
        ],
        [
            "herald(tables=auto)",
            "esd(1)",
            "embroute(effort=200)",
            "in-place",
            "het(4)",
            "ssp(3)",
            "fae(hot=0.5, buffer=8)",
        ],
    ),
)
def test_resume_is_bit_identical(policy: str, cut: int, tmp_path: Path) -> None:
    workers, shards = topology = (3, 2)
    stream = batches(workers, STEPS)
    whole = run(saving(policy, workers, tmp_path / "whole"), topology, stream)
    settings = saving(policy, workers, tmp_path / "cut")
    with pytest.raises(PowerCutError):
        run(settings, topology, Failing(stream, cut))
    assert latest_checkpoint(tmp_path / "cut") is not None
    resumed = run(settings, topology, stream)
    same(gathered(resumed, workers, shards), gathered(whole, workers, shards))
    assert resumed["worker0"].losses == whole["worker0"].losses[-len(resumed["worker0"].losses) :]
    assert len(resumed["worker0"].losses) < STEPS
    assert resumed["worker0"].last_step == whole["worker0"].last_step == STEPS


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(free_settings("embroute(effort=auto, ahead=3)", 3, 2), marks=pytest.mark.full),
        crowded_settings("embroute(effort=200, quotas=equal)", 3, 2),
        pytest.param(slow_settings("embroute(effort=200)", 3, 2), marks=pytest.mark.full),
    ],
    ids=["free quotas", "rows all-reduced", "in chunks"],
)
def test_resume_is_bit_identical_with_learnt_state(settings: Settings, tmp_path: Path) -> None:
    workers, shards = topology = (3, 2)
    stream, settings = batches(workers, STEPS), settings.copy()
    settings.update({"checkpoint": tmp_path, "checkpoint_every": EVERY, "resume": True})
    whole = run(settings | {"checkpoint": tmp_path / "whole"}, topology, stream)
    with pytest.raises(PowerCutError):
        run(settings, topology, Failing(stream, 52))
    resumed = run(settings, topology, stream)
    same(gathered(resumed, workers, shards), gathered(whole, workers, shards))
    count = len(resumed["worker0"].samples)
    assert resumed["worker0"].samples == whole["worker0"].samples[-count:]


STOPPED = {
    policy: saving(policy, 3, Path())
    for policy in (
        "vanilla",
        "herald",
        "esd(1)",
        "bagpipe(3)",
        "embroute(effort=200)",
        "in-place",
        "fae(hot=0.5, buffer=8)",
        "scars(hot=0.3, buffer=8)",
    )
}
STOPPED["free quotas"] = free_settings("embroute(effort=auto, ahead=3)", 3, 2)
STOPPED["rows all-reduced"] = crowded_settings("embroute(effort=200, quotas=equal)", 3, 2)
STOPPED["in chunks"] = slow_settings("embroute(effort=200)", 3, 2)


@pytest.mark.parametrize("name", marked_full(STOPPED, ["esd(1)", "in chunks"]))
def test_stop_and_resume_is_bit_identical(name: str, tmp_path: Path) -> None:
    """The drain of an unscheduled stop leaves no trace in later steps."""
    workers, shards = topology = (3, 2)
    stream, settings = batches(workers, STEPS), STOPPED[name].copy()
    settings.update({"checkpoint": tmp_path / "cut", "checkpoint_every": 25, "resume": True})
    whole = run(settings | {"checkpoint": tmp_path / "whole"}, topology, stream)
    steps = 0
    for stop_after in (9, 21, 0):  # each counts from where the run goes on

        def part(rank: RankContext, stop_after: int = stop_after) -> Result:
            return train(rank, stream, "adagrad", settings, stop_after=stop_after)

        results = run_in_process(workers, shards, part)
        losses = results["worker0"].losses
        assert losses == whole["worker0"].losses[steps : steps + len(losses)]
        steps += len(losses)
    assert steps == STEPS
    same(gathered(results, workers, shards), gathered(whole, workers, shards))


@pytest.mark.parametrize("topology", [pytest.param((1, 1), marks=pytest.mark.full), (2, 3)])
def test_resume_on_another_topology_equals_plain_torch(
    topology: tuple[int, int], tmp_path: Path
) -> None:
    stream = batches(3, STEPS)
    with pytest.raises(PowerCutError):
        run(saving("esd(1)", 3, tmp_path), (3, 2), Failing(stream, 52))
    settings = saving("herald", topology[0], tmp_path)
    settings["cache"] = 1.0
    resumed = run(settings, topology, stream)
    gathered(resumed, *topology).assert_equal(plain_cached("adagrad", 3, STEPS))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("in-place", "embroute"),
        pytest.param("embroute", "in-place", marks=pytest.mark.full),
    ],
)
def test_resume_between_in_place_and_embroute_equals_plain_torch(
    first: str, second: str, tmp_path: Path
) -> None:
    """Rows trained in place count as trained, so embroute initialises none of them again."""
    stream = batches(3, STEPS)
    with pytest.raises(PowerCutError):
        run(saving(first, 3, tmp_path), (3, 2), Failing(stream, 52))
    resumed = run(saving(second, 2, tmp_path), (2, 1), stream)
    gathered(resumed, 2, 1).assert_equal(plain_cached("adagrad", 3, STEPS))


def test_saving_checkpoints_does_not_change_the_result(tmp_path: Path) -> None:
    stream = batches(2, STEPS)
    run(saving("herald", 2, tmp_path), (2, 1), stream)
    assert [path.name for path in saved_checkpoints(tmp_path)] == ["step-00000040", "step-00000060"]
    with_them = gathered(run(saving("herald", 2, tmp_path / "b"), (2, 1), stream), 2, 1)
    without = gathered(run(settings_of("herald", 2), (2, 1), stream), 2, 1)
    with_them.assert_equal(without)


def test_resume_refuses_a_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    stream = batches(2, STEPS)
    run(saving("herald", 2, tmp_path), (2, 1), stream)
    settings = saving("herald", 2, tmp_path)
    with pytest.raises(
        ValueError, match="optimizer is adagrad in the checkpoint, sgd in the model"
    ):
        run_in_process(2, 1, lambda rank: train(rank, stream, "sgd", settings))


def epochs(rank: RankContext, stream: Sequence[Batch], settings: Settings) -> list[int]:
    """The steps of two passes over the prepared loader."""
    model = new_model()
    optimizers = optimizers_of("adagrad", model)
    ready = prepare(model, optimizers, stream, rank, **settings)
    counts = []
    for _ in range(2):
        steps = 0
        for batch in ready.loader:
            model.zero_grad()
            ready.backward(loss_of(model, batch))  # type: ignore[arg-type]
            steps += 1
        counts.append(steps)
    return counts


def test_resumed_epochs_end_at_the_same_step(tmp_path: Path) -> None:
    stream, settings = batches(2, STEPS), saving("herald", 2, tmp_path)
    settings["epochs"], settings["steps"] = 2, 40
    assert run_in_process(2, 1, lambda rank: epochs(rank, stream, settings))["worker1"] == [40, 0]
    del settings["steps"]
    assert run_in_process(2, 1, lambda rank: epochs(rank, stream, settings))["worker1"] == [20, 60]


def test_epoch_beyond_the_declared_epochs_is_refused() -> None:
    settings = settings_of("herald", 2)
    with pytest.raises(ValueError, match=r"epoch 2 was started, but prepare .* epochs=1: "):
        run_in_process(2, 1, lambda rank: epochs(rank, batches(2, 5), settings))


@pytest.mark.parametrize("policy", ["esd(1)", pytest.param("het(3)", marks=pytest.mark.full)])
def test_row_bytes_after_a_resume_equal_those_of_the_whole_run(policy: str, tmp_path: Path) -> None:
    """The drain of the checkpoint counts, though it is told after it."""
    stream = batches(3, STEPS)

    def row_bytes(folder: Path, stream: Sequence[Batch]) -> tuple[int, int]:
        settings = saving(policy, 3, folder) | {"compare_with": "vanilla"}

        def main(rank: RankContext) -> tuple[int, int]:
            model = new_model()
            ready = prepare(model, optimizers_of("adagrad", model), stream, rank, **settings)
            steps = total = 0
            for batch in ready.loader:
                model.zero_grad()
                ready.backward(loss_of(model, batch))  # type: ignore[arg-type]
                if rank.name == "worker0" and ready.session and ready.session.current:
                    steps, total = steps + 1, total + int(ready.session.current.figures[-2])
            if ready.session is not None and ready.session.drain_figures is not None:
                total += int(ready.session.drain_figures[-2])
            return steps, total

        return run_in_process(3, 2, main)["worker0"]

    whole = row_bytes(tmp_path / "whole", stream)
    with pytest.raises(PowerCutError):
        row_bytes(tmp_path / "cut", Failing(stream, 52))
    resumed = row_bytes(tmp_path / "cut", stream)
    assert resumed[0] < whole[0] == STEPS
    assert resumed[1] == whole[1] > 0
