"""Work that yields: done elsewhere, with the same result, and not given up to starvation."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from embroute.runtime import prepare as preparing
from embroute.runtime import yielding
from embroute.runtime.local import run_local
from embroute.runtime.seat import Seat
from embroute.runtime.yielding import Ask, Starving, run_yielding
from tests.jobs import Result, batches, settings_of, train

STEPS = 12


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other classes")
def test_the_thread_yields_and_what_it_asks_for_does_not() -> None:
    classes: list[int] = []

    def work(ask: Ask) -> None:
        classes.append(os.sched_getscheduler(0))
        classes.append(ask(lambda: os.sched_getscheduler(0)))

    run_yielding(work)
    classes.append(os.sched_getscheduler(0))
    assert classes == [os.SCHED_IDLE, os.SCHED_OTHER, os.SCHED_OTHER]


@pytest.mark.parametrize("asked", [False, True])
def test_what_work_raises_is_raised(asked: bool) -> None:
    def fail() -> None:
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        run_yielding(lambda ask: ask(fail) if asked else fail())


def test_starving_is_long_work_on_little_processor_time() -> None:
    starving = Starving()
    starving.took(yielding.LONG_S / 2)
    assert not starving.found
    starving.took(60.0)
    assert starving.found
    starving.took(0.0)
    assert starving.found


@pytest.mark.parametrize("starves_after", [0, 1, 5, STEPS])
def test_a_job_whose_coordinator_starves_is_the_same(
    starves_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job() -> dict[str, Result]:
        def rank(seat: Seat) -> Result:
            return train(seat, batches(2, STEPS), "sgd", settings_of("esd(1)", 2, 0.8))

        return run_local(2, 1, rank)

    told: list[str] = []
    taken = Starving.took

    def took(starving: Starving, seconds: float) -> None:
        told.append(threading.current_thread().name)
        taken(starving, 60.0 if len(told) == starves_after else 0.0)

    expected = job()
    monkeypatch.setattr(Starving, "took", took)
    monkeypatch.setattr(preparing, "LocalChannel", type(None))  # as in a process of its own
    found = job()
    assert told == (starves_after or STEPS) * ["yielding"]
    assert found["worker0"].losses == expected["worker0"].losses
    assert all(
        (mine == its).all()
        for mine, its in zip(found["shard0"].tables, expected["shard0"].tables, strict=True)
    )
