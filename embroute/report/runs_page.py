"""The report of one run, or of several side by side: loss, quality, traffic, time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from bokeh.plotting import figure

from embroute.config.spec import csv_cell
from embroute.report.figures import (
    BLUE,
    PALE,
    SERIES,
    Axes,
    Bars,
    Curve,
    Stack,
    Style,
    from_zero,
    lines,
    stacked,
)
from embroute.report.page import Control, Page, Section, Sheet, csv_text, render
from embroute.report.run_folder import Evaluation, MetricsLine, RunHistory
from embroute.report.timeline import measured_timeline, workers_of

LogEntry = MetricsLine | Evaluation
CURVE_POINTS = 400
MAX_POINTS = 40  # of a curve whose points are drawn
X_AXES: dict[str, tuple[str, Callable[[LogEntry], float]]] = {
    "steps": ("steps", lambda entry: entry.step),
    "time": ("seconds", lambda entry: entry.seconds),
    "bytes moved": ("MB of rows moved", lambda entry: entry.row_bytes / 1e6),
}


def _thin(entries: Sequence[MetricsLine]) -> Sequence[MetricsLine]:
    return entries[:: max(1, -(-len(entries) // CURVE_POINTS))]


class _Switched:
    """Figures with a control that chooses their horizontal axis."""

    def __init__(self) -> None:
        self.figures: list[figure] = []
        self.options: dict[str, dict[str, dict[str, object]]] = {name: {} for name in X_AXES}

    def add(
        self,
        key: str,
        axes: Axes,
        runs: Sequence[tuple[str, Sequence[LogEntry]]],
    ) -> None:
        """Add a figure of the metric `key`, with a curve for each run."""
        curves = [
            Curve(name, [e.step for e in entries], [getattr(e, key) for e in entries], f"{key}-{i}")
            for i, (name, entries) in enumerate(runs)
        ]
        are_few = max((len(curve.x) for curve in curves), default=0) <= MAX_POINTS
        fig = lines(axes, curves, points=are_few)
        fig.xaxis.name = f"{key}-axis"
        for option, (label, position) in X_AXES.items():
            properties = self.options[option]
            properties[f"{key}-axis"] = {"axis_label": label}
            for curve, (_, entries) in zip(curves, runs, strict=True):
                x = [position(entry) for entry in entries]
                properties[curve.source] = {"data": {"x": x, "y": list(curve.y)}}
        self.figures.append(fig)


def _quality(runs: Sequence[RunHistory]) -> Section:
    switched = _Switched()
    reports = [(run.name, _thin(run.reports)) for run in runs]
    switched.add("loss", Axes("Training loss", "steps", "log-loss"), reports)
    evaluations = [(run.name, run.evaluations) for run in runs]
    if any(run.evaluations for run in runs):
        switched.add("auc", Axes("AUC, held-out samples", "steps", "AUC"), evaluations)
        axes = Axes("Log-loss, held-out samples", "steps", "log-loss")
        switched.add("log_loss", axes, evaluations)
    text = "Training loss is the mean since the point before; held-out samples are never trained."
    control = Control("against", "against", switched.options)
    return Section("How well it learns", text, switched.figures, [control])


def _curves(runs: Sequence[RunHistory], value: Callable[[MetricsLine], float]) -> list[Curve]:
    out = []
    for run in runs:
        reports = _thin(run.reports)
        out.append(Curve(run.name, [r.step for r in reports], [value(r) for r in reports]))
    return out


def _links(runs: Sequence[RunHistory]) -> figure:
    """Traffic of each worker's link for one run; of all links together for several."""
    if len(runs) > 1:
        curves = _curves(runs, lambda report: sum(report.link_mb_per_s))
        return _zero("Traffic over all links", "MB/s", curves)
    count = max((len(report.link_mb_per_s) for report in runs[0].reports), default=0)
    reports = _thin(runs[0].reports)
    steps = [report.step for report in reports]
    curves = [
        Curve(f"worker {w}", steps, [_link(report, w) for report in reports]) for w in range(count)
    ]
    return _zero("Traffic over each worker's link", "MB/s", curves)


def _link(report: MetricsLine, worker: int) -> float:
    """MB/s of a worker's link; a resumed run may have had fewer workers."""
    links = report.link_mb_per_s
    return links[worker] if worker < len(links) else 0.0


def _zero(title: str, unit: str, curves: list[Curve]) -> figure:
    top = max((max(curve.y, default=0.0) for curve in curves), default=0.0)
    return from_zero(lines(Axes(title, "steps", unit), curves), top)


def _moved(runs: Sequence[RunHistory]) -> figure:
    names = tuple(run.name for run in runs)
    series = {
        "moved": [run.summary.row_bytes / 1e6 for run in runs],
        "spared": [
            max(0, run.summary.vanilla_row_bytes - run.summary.row_bytes) / 1e6 for run in runs
        ],
    }
    styles = {"moved": Style("moved", BLUE), "spared": Style("spared, against vanilla", PALE)}
    axes = Axes("Rows moved", "MB in all", "", 130 + 34 * max(3, len(names)), names)
    return stacked(Bars("moved", axes, styles, "MB"), Stack(names, series))


def _with_rest(run: RunHistory, rank: str) -> dict[str, float]:
    """A rank's seconds by phase; the rest of a worker's time is compute and all-reduce."""
    seconds = run.seconds[rank]
    if not rank.startswith("worker"):
        return {phase: value for phase, value in seconds.items() if phase != "run"}
    total = run.summary.samples / max(1e-9, run.summary.samples_per_s)
    busy = sum(seconds.get(phase, 0.0) for phase in ("urgent", "update", "drain"))
    return {"compute, all-reduce, other": max(0.0, total - busy), **seconds}


def _phases(runs: Sequence[RunHistory]) -> figure:
    ranks = [
        (rank if len(runs) == 1 else f"{run.name}: {rank}", _with_rest(run, rank))
        for run in runs
        for rank in run.seconds
    ]
    phases = list(dict.fromkeys(phase for _, seconds in ranks for phase in seconds))
    styles = {phase: Style(phase, SERIES[i % len(SERIES)]) for i, phase in enumerate(phases)}
    names = tuple(name for name, _ in ranks)
    series = {phase: [seconds.get(phase, 0.0) for _, seconds in ranks] for phase in phases}
    axes = Axes("Where ranks' time went", "seconds", "", 130 + 26 * max(4, len(names)), names)
    return stacked(Bars("phases", axes, styles, "s"), Stack(names, series))


def _sheet(runs: Sequence[RunHistory]) -> Sheet:
    rows = []
    for run in runs:
        summary = run.summary
        quality = [summary.metrics.get(name) for name in ("log_loss", "auc")]
        vanilla_bytes = summary.vanilla_row_bytes
        rows.append(
            [
                run.name,
                summary.policy,
                f"{summary.steps:,}",
                f"{summary.samples_per_s:,.0f}",
                *("-" if value is None else f"{value:.4f}" for value in quality),
                f"{summary.row_bytes / 1e6:,.2f}",
                f"{summary.row_bytes / vanilla_bytes:.2f}" if vanilla_bytes else "-",
            ]
        )
    headings = ("run", "policy", "steps", "samples/s", "log-loss", "AUC", "rows MB", "of vanilla")
    return Sheet(headings, rows)


def _csv(runs: Sequence[RunHistory]) -> str:
    columns = ("step", "seconds", "loss", "samples_per_s", "hit_rate", "row_bytes")
    rows = [
        (csv_cell(run.name), *(getattr(report, column) for column in columns))
        for run in runs
        for report in run.reports
    ]
    return csv_text([("run", *columns), *rows])


def _timelines(runs: Sequence[RunHistory]) -> list[Section]:
    shown = [run for run in runs if workers_of(run)]
    if not shown:
        return []
    figures = [measured_timeline(run, f"measured-{i}") for i, run in enumerate(shown)]
    text = (
        "As each worker's clock had it. Pulls ahead and lazy pushes run beside the compute of the "
        "step before; idle is waiting for rows, plans or other workers. All-reduce includes "
        "waiting for the slowest."
    )
    return [Section("Worker by worker", text, figures, wide=True)]


def runs_page(runs: Sequence[RunHistory]) -> str:
    """The report of finished runs as the text of an HTML file."""
    hits = _zero("Hit rate", "% of touched rows", _curves(runs, lambda r: 100 * r.hit_rate))
    speed = _zero("Speed", "samples/s", _curves(runs, lambda r: r.samples_per_s))
    sections = [
        _quality(runs),
        Section(
            "What moves",
            "A hit is a row a worker touches and need not pull. Traffic: rows, samples, plans; "
            "it rests while held-out samples are evaluated.",
            [hits, _links(runs), _moved(runs), speed],
        ),
    ]
    if any(run.seconds for run in runs):
        text = "By each rank's clock. Early transfers run beside compute, so bars add up to more."
        sections.append(Section("Time", text, [_phases(runs)]))
    sections += _timelines(runs)
    files = {
        "runs.json": json.dumps([run.as_json() for run in runs], indent=1),
        "runs.csv": _csv(runs),
    }
    title = "embroute train: " + ", ".join(run.name for run in runs)
    facts = f"{len(runs)} run" + ("s" if len(runs) > 1 else "")
    return render(Page(title, facts, _sheet(runs), sections, files))
