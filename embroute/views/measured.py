"""A run's last steps as its workers' own clocks had them: pulls, compute, pushes, idle."""

from __future__ import annotations

from bokeh.plotting import figure

from embroute.views.figures import BLUE, Axes, Columns, Look
from embroute.views.history import History
from embroute.views.phases import PHASE_LOOKS
from embroute.views.timeline import LINK, MOST_WORKERS, PROCESSOR, as_columns, draw

LAST_STEPS = 5
LANES = {
    "compute": PROCESSOR,
    "update": PROCESSOR,
    "allreduce": PROCESSOR,
    "wait": PROCESSOR,
    "early": LINK,
    "urgent": LINK,
}
LOOKS = {phase: PHASE_LOOKS[phase] for phase in LANES if phase in PHASE_LOOKS} | {
    "urgent": Look("urgent pushes, late pulls", PHASE_LOOKS["urgent"].color),
    "update": Look("own rows updated", BLUE),
}


def workers_of(run: History) -> list[str]:
    """Workers whose spans are known, in order."""
    known = [rank for rank, spans in run.spans.items() if rank.startswith("worker") and spans]
    return sorted(known, key=lambda rank: int(rank.removeprefix("worker") or 0))[:MOST_WORKERS]


def columns_of(run: History) -> dict[str, Columns]:
    """Bars of each phase, in milliseconds from the beginning of the first step shown."""
    workers = workers_of(run)
    waits = {
        rank: {s: b for phase, s, b, _ in run.spans[rank] if phase == "wait"} for rank in workers
    }
    shared = sorted(set.intersection(*(set(steps) for steps in waits.values())))[-LAST_STEPS:]
    bars: dict[str, list[tuple[object, ...]]] = {phase: [] for phase in LOOKS}
    if not shared:
        return {phase: as_columns(drawn) for phase, drawn in bars.items()}
    began = min(steps[shared[0]] for steps in waits.values())
    for rank in workers:
        for phase, step, start, spent in run.spans[rank]:
            if step in range(shared[0], shared[-1] + 1) and phase in bars and spent > 0:
                first, last = max(0.0, start - began), start - began + spent
                times = (1e3 * first, 1e3 * last, 1e3 * spent)
                bars[phase] += [((rank, LANES[phase]), *times)] if last > 0 else []
    return {phase: as_columns(drawn) for phase, drawn in bars.items()}


def measured_timeline(run: History, name: str) -> figure:
    """Two lanes a worker: above its processor, below its link."""
    workers = workers_of(run)
    title = f"{run.name}: the last steps, above processor, below link"
    axes = Axes(title, "ms", "", 190 + 45 * max(2, len(workers)), tuple(workers))
    return draw(axes, columns_of(run), LOOKS, name)
