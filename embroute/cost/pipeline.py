"""The time of a pipelined step, in which each worker waits for its own pulls only.

A worker starts to compute when its own late pulls have arrived. A chunk can be pulled when all
workers have pushed it. The lead is the time between the arrival of all first chunks and of all
last chunks. It is the same for all workers. In each step a worker takes:

    late, less the lead, but at least its last chunk
    + start: compute, or early transfers if they take longer
    + urgent, or its first chunk and the lead if they take longer

The lead that makes the longest of these sums shortest gives the time of a step. That time is also
the largest mean over cycles of workers that wait for each other, without a search for cycles.

Axis W: workers.
"""

from __future__ import annotations

from typing import NamedTuple

from embroute.kernels.array_types import F64
from embroute.kernels.jit import inlined, kernel

SEARCH_STEPS = 60  # each leaves two thirds of the interval; (2/3)^60 is below rounding


class PhaseTimes(NamedTuple):
    """Seconds of each worker's phases."""

    start_W: F64
    urgent_W: F64
    first_W: F64  # the first chunk of urgent_W
    late_W: F64
    last_W: F64  # the last chunk of late_W


@inlined
def pulls_s(late: float, last: float, lead: float) -> float:
    """Time of late pulls that the lead does not cover."""
    return max(last, late - lead)


@inlined
def pushes_s(urgent: float, first: float, lead: float) -> float:
    """Time until all urgent pushes, or their first chunk and the lead, are over."""
    return max(urgent, first + lead)


@kernel
def _longest(phases: PhaseTimes, lead: float) -> float:
    longest = 0.0
    for w in range(len(phases.start_W)):
        pulls = pulls_s(phases.late_W[w], phases.last_W[w], lead)
        pushes = pushes_s(phases.urgent_W[w], phases.first_W[w], lead)
        longest = max(longest, pulls + phases.start_W[w] + pushes)
    return longest


@kernel
def best_overlap(phases: PhaseTimes) -> float:
    """The lead with which the step is shortest."""
    # Ternary search: a sum of a falling and a rising maximum is convex in the lead.
    low, high = 0.0, phases.late_W.max()
    for _ in range(SEARCH_STEPS):
        third = (high - low) / 3
        if _longest(phases, low + third) <= _longest(phases, high - third):
            high -= third
        else:
            low += third
    return float(low)
