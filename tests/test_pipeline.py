"""The formula of the step time equals steps simulated event by event."""

from __future__ import annotations

import numpy as np
import pytest

from embroute.cost.pipeline import PhaseTimes, best_overlap
from embroute.kernels.array_types import F64

STEPS = 400


def beat_of(seed: int, parts: int, workers: int) -> PhaseTimes:
    random = np.random.default_rng(seed)
    start, urgent, late = random.exponential(1.0, (3, workers))
    urgent[random.random(workers) < 0.2] = 0.0
    return PhaseTimes(start, urgent, urgent / parts, late, late / parts)


def turn(beat: PhaseTimes, lead: float) -> F64:
    pulls = np.maximum(beat.last_W, beat.late_W - lead)
    turns: F64 = pulls + beat.start_W + np.maximum(beat.urgent_W, beat.first_W + lead)
    return turns


def carried_out(beat: PhaseTimes, parts: int) -> float:
    """Mean time of steps. Each worker pushes chunk by chunk after its compute. A chunk is pulled
    after the chunk before it, when all workers have pushed it."""
    begin_W = np.zeros(len(beat.start_W))
    ends = []
    for _ in range(STEPS):
        pulled_W = np.zeros_like(begin_W)
        for part in range(1, parts + 1):
            there = (begin_W + beat.start_W + beat.urgent_W * part / parts).max()
            pulled_W = np.maximum(pulled_W, there) + beat.late_W / parts
        begin_W = pulled_W
        ends.append(there)
    half = STEPS // 2
    return float((ends[-1] - ends[half - 1]) / (STEPS - half))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_predicted_step_time_equals_an_event_simulation(
    seed: int, parts: int, workers: int
) -> None:
    beat = beat_of(seed, parts, workers)
    told = turn(beat, best_overlap(beat)).max()
    # Workers that wait for each other in a cycle take turns: over many steps the mean is met.
    assert carried_out(beat, parts) == pytest.approx(told, rel=2e-2)


def test_best_overlap_of_one_chunk_is_zero() -> None:
    beat = beat_of(1, 1, 5)
    assert best_overlap(beat) == pytest.approx(0, abs=1e-9)
    longest = (beat.late_W + beat.start_W + beat.urgent_W).max()
    assert turn(beat, 0.0).max() == pytest.approx(longest)


def test_best_overlap_balances_a_slow_link_and_long_compute() -> None:
    """Worker 0 pushes and pulls for 4 s each beside 4 s of compute; worker 1 computes for 8 s.
    Worker 0 would need 8 s if its pulls overlapped its pushes, but its pulls wait for worker 1."""
    nothing = np.zeros(2)
    beat = PhaseTimes(np.array([4.0, 8]), np.array([4.0, 0]), nothing, np.array([4.0, 0]), nothing)
    assert best_overlap(beat) == pytest.approx(2.0)
    assert turn(beat, 2.0).tolist() == pytest.approx([10.0, 10.0])
