"""Names and colours of the phases of a step."""

from __future__ import annotations

from embroute.views.figures import BLUE, GREEN, ORANGE, PALE, SKY, VERMILION, Look

PHASE_LOOKS = {
    "compute": Look("compute", GREEN),
    "early": Look("pulls ahead, lazy pushes", SKY),
    "urgent": Look("urgent pushes", VERMILION),
    "late": Look("late pulls", BLUE),
    "allreduce": Look("all-reduce", ORANGE),
    "wait": Look("idle", PALE),
}
