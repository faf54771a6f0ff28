"""Workers initialise untrained rows locally, with the same result as pulled rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import save_file

from embroute.checkpoint.folders import latest_checkpoint
from embroute.kernels.codes import MISS_PULL
from embroute.launch.in_process import run_in_process
from embroute.nn.settings import Settings
from tests.jobs import (
    SIZES,
    Batch,
    Model,
    Result,
    batches,
    gathered,
    new_model,
    plain,
    seeded_model,
    settings_of,
    tables_of,
    train,
)
from tests.promises import assert_kept, promise
from tests.sizes import marked_full

STEPS, TOPOLOGY = 40, (3, 2)
POLICY = "embroute(effort=200)"


def growing() -> list[Batch]:
    """Batches with new ids every few steps."""
    found = batches(5, STEPS)
    for step, batch in enumerate(found):
        known = 0.1 + 0.9 * step / STEPS
        for name in SIZES:
            batch[name] = (batch[name] * known).long()
    return found


def run(
    settings: Settings,
    stream: Sequence[Batch],
    optimizer: str = "adagrad",
    made: Callable[[], Model] = seeded_model,
    topology: tuple[int, int] = TOPOLOGY,
) -> dict[str, Result]:
    return run_in_process(*topology, lambda rank: train(rank, stream, optimizer, settings, made))


def misses(results: dict[str, Result]) -> int:
    workers = [result for name, result in results.items() if name.startswith("worker")]
    return sum(int(result.meter.rows_by_kind[MISS_PULL]) for result in workers)


@pytest.mark.parametrize(
    "optimizer", marked_full(["sgd", "adagrad", "rowwise-adagrad", "adam"], ["adagrad", "adam"])
)
def test_rows_initialised_by_workers_train_like_plain_torch(optimizer: str) -> None:
    stream, settings = growing(), settings_of(POLICY, TOPOLOGY[0])
    settings["debug"] = "steps"
    results = run(settings, stream, optimizer)
    gathered(results, *TOPOLOGY).assert_equal(plain(optimizer, stream))
    promised = promise(stream, optimizer, TOPOLOGY, settings)
    assert_kept(promised, results)
    made = [len(plan.initialised_T) for plan in promised.plans]
    assert sum(made) >= sum(SIZES.values()) - 5
    assert sum(count > 0 for count in made) > STEPS // 2


def test_rows_not_drawn_from_the_seed_are_pulled() -> None:
    stream, settings = growing(), settings_of(POLICY, TOPOLOGY[0])
    seeded, given = run(settings, stream), run(settings, stream, made=new_model)
    gathered(given, *TOPOLOGY).assert_equal(plain("adagrad", stream))
    assert misses(given) > misses(seeded) + sum(SIZES.values()) // 2


def other_model() -> Model:
    model = new_model()
    for layer in tables_of(model):
        layer.weight.data += 0.01
    model.items.weight.data[0] = 0
    return model


def test_rows_loaded_from_a_file_are_pulled(tmp_path: Path) -> None:
    stream, settings = growing(), settings_of(POLICY, TOPOLOGY[0])
    model = other_model().state_dict()
    tensors = {name: model[f"{name}.weight"] for name in SIZES}
    save_file(tensors, tmp_path / "tables.safetensors")
    settings["tables"] = tmp_path / "tables.safetensors"
    results = run(settings, stream)
    gathered(results, *TOPOLOGY).assert_equal(plain("adagrad", stream, other_model))


@pytest.mark.parametrize(
    ("topology", "changes"),
    [
        pytest.param(TOPOLOGY, {}, marks=pytest.mark.full),
        pytest.param((2, 1), {}, marks=pytest.mark.full),
        pytest.param(TOPOLOGY, {"seed": 5}, marks=pytest.mark.full),
        ((2, 1), {"seed": 5}),
    ],
    ids=["same", "other shape", "other seed", "both"],
)
def test_rows_trained_before_a_resume_are_not_initialised_again(
    topology: tuple[int, int], changes: Settings, tmp_path: Path
) -> None:
    stream, settings = growing(), settings_of(POLICY, TOPOLOGY[0])
    settings.update({"checkpoint": tmp_path, "steps": 20})
    run(settings, stream)
    assert latest_checkpoint(tmp_path) is not None
    again = settings_of(POLICY, topology[0])
    again.update({"checkpoint": tmp_path, "resume": True})
    again.update(changes)
    # Twice, because the second checkpoint must still know what the first one did.
    run(Settings(**again, steps=30), stream, topology=topology)
    results = run(again, stream, topology=topology)
    assert len(results["worker0"].losses) == STEPS - 30
    gathered(results, *topology).assert_equal(plain("adagrad", stream))
