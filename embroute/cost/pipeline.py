"""How often a step can be taken when every worker pulls, computes and pushes in its own time.

A worker begins to compute when its own late pulls are there, not when everybody's are; rows can be
pulled when everybody's pushes of them are there. Of several parts the first is there some time
before the last, the lead. A worker that keeps step pulls, computes and pushes within one step:

    late, of which the lead is won but not more than all parts except the last
    + start: compute, or early transfers that take longer
    + urgent, or the first part and the lead

The lead is the same for all. The shortest step is the smallest for which there is such a lead; it
is the largest mean of a cycle of workers that wait for each other, without looking for cycles.

Axes: W workers, N numbers of samples.
"""

from __future__ import annotations

from typing import NamedTuple

from embroute.kernels.array_types import F64
from embroute.kernels.jit import inlined, kernel

THIRDS = 60  # (2/3)^60: below rounding


class PhaseTimes(NamedTuple):
    """Seconds of each worker's phases: start, urgent and its first part, late and its last."""

    start_W: F64
    urgent_W: F64
    first_W: F64
    late_W: F64
    last_W: F64


@inlined
def pulls_s(late: float, last: float, lead: float) -> float:
    """What late pulls take that the lead does not cover."""
    return max(last, late - lead)


@inlined
def pushes_s(urgent: float, first: float, lead: float) -> float:
    """Until all urgent pushes, or the first part of them and the lead, are through."""
    return max(urgent, first + lead)


@kernel
def _longest(beat: PhaseTimes, lead: float) -> float:
    longest = 0.0
    for w in range(len(beat.start_W)):
        pulls = pulls_s(beat.late_W[w], beat.last_W[w], lead)
        pushes = pushes_s(beat.urgent_W[w], beat.first_W[w], lead)
        longest = max(longest, pulls + beat.start_W[w] + pushes)
    return longest


@kernel
def best_overlap(beat: PhaseTimes) -> float:
    """The lead with which the step is shortest. The longest turn is convex in it."""
    low, high = 0.0, beat.late_W.max()
    for _ in range(THIRDS):
        third = (high - low) / 3
        if _longest(beat, low + third) <= _longest(beat, high - third):
            high -= third
        else:
            low += third
    return float(low)
