"""Loaders that can be read again, and loaders that cannot."""

from __future__ import annotations

import pytest

from embroute.launch.in_process import run_in_process
from embroute.nn.settings import Settings
from tests.jobs import Result, Trained, batches, gathered, settings_of, train

STEPS, WORKERS, SHARDS = 40, 2, 1
AGAIN = "give something that can be iterated again, such as a DataLoader or a list"


def run(settings: Settings, once: bool) -> dict[str, Result]:
    stream = batches(5, STEPS)
    return run_in_process(
        WORKERS,
        SHARDS,
        lambda rank: train(rank, iter(stream) if once else stream, "sgd", settings),
    )


def trained(settings: Settings, once: bool) -> Trained:
    return gathered(run(settings, once), WORKERS, SHARDS)


@pytest.mark.parametrize(
    "policy",
    ["vanilla", "fae(hot=0.6, rate=100, buffer=8, sample=1)", "scars(hot=0.6, buffer=8, sample=1)"],
)
def test_generator_loader_trains_like_a_list(policy: str) -> None:
    settings = settings_of(policy, WORKERS, 1.0)
    trained(settings, once=True).assert_equal(trained(settings, once=False), 0, 0)


def test_generator_loader_refuses_a_second_epoch() -> None:
    with pytest.raises(ValueError, match=f"epochs=2: the loader can be read only once.*{AGAIN}"):
        run(settings_of("vanilla", WORKERS) | {"epochs": 2}, once=True)


def test_generator_as_held_out_data_is_refused() -> None:
    settings = settings_of("vanilla", WORKERS)
    settings["held_out"], settings["evaluate_every"] = iter(batches(6, 2)), 10
    with pytest.raises(ValueError, match=f"held_out can be read only once.*{AGAIN}"):
        run(settings, once=False)
