"""Timelines of steps: as the simulator prices them, and as a run's workers measured them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from embroute.cost.step_time import StepTime
from embroute.report.figures import (
    BLUE,
    PHASE_LOOKS,
    Axes,
    Columns,
    Style,
    add_legend,
    add_values,
    plot,
)
from embroute.report.run_folder import RunHistory
from embroute.simulate.recorder import PHASES, Detail

MOST_WORKERS = 16
PROCESSOR, LINK, BAR = 0.19, -0.19, 0.34  # a worker's two lanes
Piece = tuple[str, float, float, float]  # phase, lane, from, to


def pieces(time: StepTime, w: int) -> list[Piece]:
    """What a worker does in a step, as it is priced; times from the step's beginning.

    A step begins when everybody's pushes of the one before are there.
    """
    pulled, compute = float(time.pulling_W[w]), float(time.compute_W[w])
    computed, ahead = pulled + compute, pulled + float(time.start_W[w])
    reduced = time.rest_s
    return [
        ("late", LINK, 0.0, pulled),
        ("wait", PROCESSOR, 0.0, pulled),
        ("compute", PROCESSOR, pulled, computed),
        ("wait", PROCESSOR, computed, time.total_s),
        ("early", LINK, pulled, pulled + float(time.early_W[w])),
        ("urgent", LINK, ahead, ahead + float(time.urgent_W[w])),
        ("allreduce", LINK, reduced - time.allreduce_s, reduced),
    ]


def timeline_columns(detail: Detail) -> dict[str, Columns]:
    """Bars of each phase, in milliseconds."""
    began = 0.0
    rows: dict[str, list[tuple[object, ...]]] = {phase: [] for phase in PHASES}
    for time in detail.timeline:
        for w in range(min(len(detail.workers), MOST_WORKERS)):
            name = f"worker {detail.workers[w]}"
            for phase, lane, start, end in pieces(time, w):
                times = (1e3 * (began + start), 1e3 * (began + end), 1e3 * (end - start))
                rows[phase] += [((name, lane), *times)] if end > start else []
        began += time.total_s
    return {phase: as_columns(bars) for phase, bars in rows.items()}


def as_columns(bars: Sequence[tuple[object, ...]]) -> Columns:
    """Bars (lane, from, to, milliseconds) as columns."""
    names = ("y", "from", "to", "ms")
    return {name: [bar[i] for bar in bars] for i, name in enumerate(names)}


def _workers(detail: Detail) -> tuple[str, ...]:
    return tuple(f"worker {w}" for w in detail.workers[:MOST_WORKERS])


def draw(
    axes: Axes, columns: Mapping[str, Columns], looks: Mapping[str, Style], name: str
) -> figure:
    """Bars of each phase in the lanes of their worker."""
    fig = plot(axes)
    fig.x_range.start = 0
    fig.y_range.name = f"{name}-range"
    items: list[tuple[str, list[object]]] = []
    for phase, drawn in columns.items():
        look = looks[phase]
        source = ColumnDataSource(dict(drawn), name=f"{name}-{phase}")
        bars = fig.hbar(
            y="y",
            left="from",
            right="to",
            height=BAR,
            fill_color=look.color,
            line_color=None,
            fill_alpha=0.35 if phase == "wait" else 1,
            source=source,
        )
        tips = [("", look.name), ("ms", "@ms{0.0000}"), ("from", "@from{0.0000}")]
        add_values(fig, bars, tips)
        items.append((look.name, [bars]))
    add_legend(fig, items, "below")
    return fig


def timeline(detail: Detail) -> figure:
    """Two lanes a worker: above what it computes, below what its link carries."""
    title = f"The last {len(detail.timeline)} steps: above processor, below link"
    axes = Axes(title, "ms", "", 460, _workers(detail))
    return draw(axes, timeline_columns(detail), PHASE_LOOKS, "timeline")


def timeline_settings(detail: Detail) -> dict[str, dict[str, object]]:
    """What a choice of this policy sets."""
    sources: dict[str, dict[str, object]] = {
        f"timeline-{phase}": {"data": columns}
        for phase, columns in timeline_columns(detail).items()
    }
    return sources | {"timeline-range": {"factors": list(reversed(_workers(detail)))}}


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
    "urgent": Style("urgent pushes, late pulls", PHASE_LOOKS["urgent"].color),
    "update": Style("own rows updated", BLUE),
}


def workers_of(run: RunHistory) -> list[str]:
    """Workers whose spans are known, in order."""
    known = [rank for rank, spans in run.spans.items() if rank.startswith("worker") and spans]
    return sorted(known, key=lambda rank: int(rank.removeprefix("worker") or 0))[:MOST_WORKERS]


def columns_of(run: RunHistory) -> dict[str, Columns]:
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


def measured_timeline(run: RunHistory, name: str) -> figure:
    """Two lanes a worker: above its processor, below its link."""
    workers = workers_of(run)
    title = f"{run.name}: the last steps, above processor, below link"
    axes = Axes(title, "ms", "", 190 + 45 * max(2, len(workers)), tuple(workers))
    return draw(axes, columns_of(run), LOOKS, name)
