"""Timelines of steps: as priced by the simulator, and as measured by a run's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from embroute.cost.step_time import StepTime
from embroute.report.figures import (
    BLUE,
    PHASE_STYLES,
    Axes,
    Columns,
    Style,
    add_legend,
    add_values,
    plot,
)
from embroute.report.run_folder import RunHistory
from embroute.simulator.recorder import PHASES, Detail

MAX_WORKERS = 16
MAX_STEPS = 5  # of a run
PROCESSOR, LINK, BAR_HEIGHT = 0.19, -0.19, 0.34  # vertical positions of a worker's two lanes
LANES = {
    "compute": PROCESSOR,
    "update": PROCESSOR,
    "allreduce": PROCESSOR,
    "wait": PROCESSOR,
    "early": LINK,
    "urgent": LINK,
}
RUN_STYLES = {phase: PHASE_STYLES[phase] for phase in LANES if phase in PHASE_STYLES} | {
    "urgent": Style("urgent pushes, late pulls", PHASE_STYLES["urgent"].color),
    "update": Style("own rows updated", BLUE),
}


class Activity(NamedTuple):
    """A bar of a worker's step; times from the start of the step."""

    phase: str
    lane: float
    start_s: float
    end_s: float


class TimelineBar(NamedTuple):
    """A drawn bar: the worker and lane, times from the first step shown, and the duration."""

    y: tuple[str, float]
    start_ms: float
    end_ms: float
    ms: float


def activities(time: StepTime, w: int) -> list[Activity]:
    """A worker's activities in a priced step.

    A step starts when all pushes of the previous step have arrived.
    """
    pulled, compute = float(time.pulling_W[w]), float(time.compute_W[w])
    # Late pulls come first, then compute beside early transfers, then urgent pushes.
    computed, urgent = pulled + compute, pulled + float(time.start_W[w])
    reduced = time.rest_s
    return [
        Activity("late", LINK, 0.0, pulled),
        Activity("wait", PROCESSOR, 0.0, pulled),
        Activity("compute", PROCESSOR, pulled, computed),
        Activity("wait", PROCESSOR, computed, time.total_s),
        Activity("early", LINK, pulled, pulled + float(time.early_W[w])),
        Activity("urgent", LINK, urgent, urgent + float(time.urgent_W[w])),
        Activity("allreduce", LINK, reduced - time.allreduce_s, reduced),
    ]


def timeline_columns(detail: Detail) -> dict[str, Columns]:
    """Bars of each phase, in milliseconds."""
    step_start_s = 0.0
    bars: dict[str, list[TimelineBar]] = {phase: [] for phase in PHASES}
    for time in detail.timeline:
        for w in range(min(len(detail.workers), MAX_WORKERS)):
            name = f"worker {detail.workers[w]}"
            for phase, lane, start_s, end_s in activities(time, w):
                start_ms, end_ms = 1e3 * (step_start_s + start_s), 1e3 * (step_start_s + end_s)
                bar = TimelineBar((name, lane), start_ms, end_ms, 1e3 * (end_s - start_s))
                bars[phase] += [bar] if end_s > start_s else []
        step_start_s += time.total_s
    return {phase: _columns(phase_bars) for phase, phase_bars in bars.items()}


def _columns(bars: Sequence[TimelineBar]) -> Columns:
    """Bars as the columns of a data source."""
    names = ("y", "from", "to", "ms")
    return {name: [bar[i] for bar in bars] for i, name in enumerate(names)}


def _workers(detail: Detail) -> tuple[str, ...]:
    return tuple(f"worker {w}" for w in detail.workers[:MAX_WORKERS])


def draw(
    axes: Axes, columns: Mapping[str, Columns], styles: Mapping[str, Style], name: str
) -> figure:
    """Bars of each phase in the lanes of their workers."""
    fig = plot(axes)
    fig.x_range.start = 0
    fig.y_range.name = f"{name}-range"
    items: list[tuple[str, list[object]]] = []
    for phase, phase_columns in columns.items():
        style = styles[phase]
        source = ColumnDataSource(dict(phase_columns), name=f"{name}-{phase}")
        bars = fig.hbar(
            y="y",
            left="from",
            right="to",
            height=BAR_HEIGHT,
            fill_color=style.color,
            line_color=None,
            fill_alpha=0.35 if phase == "wait" else 1,
            source=source,
        )
        tips = [("", style.name), ("ms", "@ms{0.0000}"), ("from", "@from{0.0000}")]
        add_values(fig, bars, tips)
        items.append((style.name, [bars]))
    add_legend(fig, items, "below")
    return fig


def timeline(detail: Detail) -> figure:
    """Two lanes a worker: compute above, transfers on its link below."""
    title = f"The last {len(detail.timeline)} steps: above processor, below link"
    axes = Axes(title, "ms", "", 460, _workers(detail))
    return draw(axes, timeline_columns(detail), PHASE_STYLES, "timeline")


def timeline_settings(detail: Detail) -> dict[str, dict[str, object]]:
    """Properties that the page sets when this policy is chosen."""
    sources: dict[str, dict[str, object]] = {
        f"timeline-{phase}": {"data": columns}
        for phase, columns in timeline_columns(detail).items()
    }
    return sources | {"timeline-range": {"factors": list(reversed(_workers(detail)))}}


def workers_of(run: RunHistory) -> list[str]:
    """Workers with recorded spans, in order."""
    known = [rank for rank, spans in run.spans.items() if rank.startswith("worker") and spans]
    return sorted(known, key=lambda rank: int(rank.removeprefix("worker") or 0))[:MAX_WORKERS]


def columns_of(run: RunHistory) -> dict[str, Columns]:
    """Bars of each phase, in milliseconds from the start of the first step shown."""
    workers = workers_of(run)
    wait_starts = {
        rank: {step: start for phase, step, start, _ in run.spans[rank] if phase == "wait"}
        for rank in workers
    }
    known_steps = (set(starts) for starts in wait_starts.values())
    steps = sorted(set.intersection(*known_steps))[-MAX_STEPS:]
    bars: dict[str, list[TimelineBar]] = {phase: [] for phase in RUN_STYLES}
    if not steps:
        return {phase: _columns(phase_bars) for phase, phase_bars in bars.items()}
    origin_s = min(starts[steps[0]] for starts in wait_starts.values())
    for rank in workers:
        for phase, step, start_s, spent_s in run.spans[rank]:
            if step in range(steps[0], steps[-1] + 1) and phase in bars and spent_s > 0:
                # A span that started before the first step shown is cut off at it.
                start_ms = 1e3 * max(0.0, start_s - origin_s)
                end_s = start_s - origin_s + spent_s
                bar = TimelineBar((rank, LANES[phase]), start_ms, 1e3 * end_s, 1e3 * spent_s)
                bars[phase] += [bar] if end_s > 0 else []
    return {phase: _columns(phase_bars) for phase, phase_bars in bars.items()}


def measured_timeline(run: RunHistory, name: str) -> figure:
    """Two lanes a worker: its processor above, its link below."""
    workers = workers_of(run)
    title = f"{run.name}: the last steps, above processor, below link"
    axes = Axes(title, "ms", "", 190 + 45 * max(2, len(workers)), tuple(workers))
    return draw(axes, columns_of(run), RUN_STYLES, name)
