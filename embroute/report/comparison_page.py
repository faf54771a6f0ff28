"""The report of a comparison: what policies move and cost, and each of them closely."""

from __future__ import annotations

import csv
import io
import json

from bokeh.plotting import figure

from embroute.config.spec import csv_cell
from embroute.report.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PHASE_LOOKS,
    PINK,
    SKY,
    VERMILION,
    YELLOW,
    Axes,
    Bars,
    Curve,
    Stack,
    Style,
    from_zero,
    lines,
    stacked,
)
from embroute.report.page import Control, ControlSettings, Page, Section, Sheet, render
from embroute.report.policy_detail import policy_section
from embroute.report.tradeoffs import tradeoff_sections
from embroute.simulate.recorder import PHASES, ReportData

KIND_STYLES = {
    "miss_pull": Style("pulls: no copy", BLUE),
    "stale_pull": Style("pulls: copy is stale", SKY),
    "update_push": Style("pushes: updates", VERMILION),
    "evict_push": Style("pushes: evictions", ORANGE),
    "drain": Style("drain at the end", YELLOW),
    "allreduce": Style("all-reduced rows", GREEN),
    "samples": Style("samples", PINK),
    "plans": Style("plans", GREY),
    "dense": Style("dense gradients", PALE),
}


def _height(count: int) -> int:
    return 110 + 30 * max(4, count)


def _traffic(shown: ReportData) -> Section:
    names = tuple(line.name for line in shown.lines)
    megabytes = {k: [line.bytes[k] / 1e6 for line in shown.lines] for k in KIND_STYLES}
    rows = {k: [float(line.rows.get(k, 0)) for line in shown.lines] for k in KIND_STYLES}
    stacks = {"bytes": Stack(names, megabytes), "rows": Stack(names, rows)}
    labels = {"bytes": "MB moved in the measured steps", "rows": "rows moved in the measured steps"}
    axes = Axes("Traffic by kind", labels["bytes"], height=_height(len(names)), factors=names)
    fig = stacked(Bars("traffic", axes, KIND_STYLES, "moved"), stacks["bytes"])
    fig.xaxis.name = "traffic-axis"
    options: dict[str, ControlSettings] = {
        unit: {
            "traffic": {"data": stack.columns()},
            "traffic-axis": {"axis_label": labels[unit]},
        }
        for unit, stack in stacks.items()
    }
    return Section(
        "What moves",
        "Rows over workers' links by the reason they move; samples, plans and dense gradients "
        "have bytes only. A click on a kind hides it.",
        [fig],
        [Control("unit", "in", options)],
    )


def _cost(shown: ReportData) -> figure:
    names = tuple(line.name for line in shown.lines)
    looks = {"cost": Style("transmission cost", BLUE)}
    stack = Stack(names, {"cost": [1e3 * line.transmission_cost_s for line in shown.lines]})
    axes = Axes("Transmission cost", "ms, sum over workers' links and steps", "", 0, names)
    return stacked(Bars("cost", _tall(axes, len(names)), looks, "ms"), stack)


def _tall(axes: Axes, count: int) -> Axes:
    return Axes(axes.title, axes.x, axes.y, _height(count), axes.factors)


def _step_time(shown: ReportData) -> figure:
    names = tuple(line.name for line in shown.lines)
    whole = dict.fromkeys(PHASES, 0.0)
    paths = [
        shown.details[line.name].path_s
        if line.name in shown.details
        else whole | {"wait": line.step_time_s}
        for line in shown.lines
    ]
    looks = PHASE_LOOKS | {"wait": Style("shards' links, bound", PALE)}
    stack = Stack(names, {phase: [1e3 * path[phase] for path in paths] for phase in PHASES})
    axes = Axes("Step time, and what is waited for", "ms a step, mean", "", 0, names)
    return stacked(Bars("step-time", _tall(axes, len(names)), looks, "ms"), stack)


def _sweep(shown: ReportData) -> list[Section]:
    if not shown.sweep:
        return []
    names = list(dict.fromkeys(point.policy for point in shown.sweep))
    figures = []
    for title, label, field in (
        ("Transmission cost against cache", "ms", "transmission_cost_s"),
        ("Step time against cache", "ms a step", "step_time_s"),
    ):
        curves = []
        for name in names:
            points = [point for point in shown.sweep if point.policy == name]
            x = [100 * point.cache_share for point in points]
            curves.append(Curve(name, x, [1e3 * float(getattr(p, field)) for p in points]))
        axes = Axes(title, "cache of a worker, % of all rows", label)
        figures.append(from_zero(lines(axes, curves, points=True), max(max(c.y) for c in curves)))
    text = "The same job with other caches. A size that cannot hold one step's rows is left out."
    return [Section("How much cache", text, figures)]


def _over_time(shown: ReportData) -> Section:
    hits = [Curve(n, d.step, [100 * h for h in d.hit_rate]) for n, d in shown.details.items()]
    times = [Curve(n, d.step, [1e3 * s for s in d.step_time_s]) for n, d in shown.details.items()]
    first = from_zero(lines(Axes("Hit rate", "step", "% of touched rows"), hits), 100)
    second = lines(Axes("Step time", "step", "ms"), times)
    top = max((max(curve.y) for curve in times), default=1.0)
    return Section(
        "Step by step",
        "A hit is a row a worker touches and need not pull.",
        [first, from_zero(second, top)],
    )


def _sheet(shown: ReportData) -> Sheet:
    base = next(line for line in shown.lines if line.name == "vanilla")
    rows = []
    for line in shown.lines:
        cost, time = line.transmission_cost_s, line.step_time_s
        rows.append(
            [
                line.name + ("" if line.exact else " *") + (" ~" if line.order_changed else ""),
                f"{line.moved_rows:,}",
                f"{line.moved_bytes / 1e6:,.2f}",
                f"{1e3 * cost:,.2f}",
                f"{cost / base.transmission_cost_s:.2f}" if base.transmission_cost_s else "-",
                f"{1e3 * time:,.4f}",
                f"{time / base.step_time_s:.2f}" if base.step_time_s else "-",
                "-" if line.hit_rate is None else f"{100 * line.hit_rate:.1f}",
            ]
        )
    headings = ("policy", "rows", "MB", "cost ms", "to vanilla", "step ms", "to vanilla", "hits %")
    return Sheet(headings, rows)


def _csv(shown: ReportData) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    kinds = list(KIND_STYLES)
    rows = [kind for kind in kinds if kind in shown.lines[0].rows]
    writer.writerow(
        ["policy", "transmission_cost_s", "step_time_s", "hit_rate"]
        + [f"rows_{kind}" for kind in rows]
        + [f"bytes_{kind}" for kind in kinds]
    )
    for line in shown.lines:
        figures = [line.transmission_cost_s, line.step_time_s, line.hit_rate]
        counts = [line.rows[k] for k in rows] + [line.bytes[k] for k in kinds]
        writer.writerow([csv_cell(line.name), *figures, *counts])
    return out.getvalue()


def comparison_page(shown: ReportData) -> str:
    """The report as the text of an HTML file."""
    setup = shown.job.setup
    facts = (
        f"{setup.num_workers} workers of {shown.network}, {setup.batch_size} samples a step, "
        f"caches of {int(setup.capacity_WA[0].sum()):,} of {setup.schema.num_rows:,} rows, "
        f"{shown.job.steps - shown.job.warmup} steps after {shown.job.warmup} of warm-up, "
        f"{setup.optimizer}. * inexact, ~ order changed."
    )
    waited = (
        "Cost is the busy time of all workers' links. Step time is that of the slowest worker, "
        "by what it waits for; early transfers count where compute does not hide them."
    )
    sections = [
        _traffic(shown),
        Section("What it costs", waited, [_cost(shown), _step_time(shown)]),
        *_sweep(shown),
        *tradeoff_sections(shown.tradeoffs),
        _over_time(shown),
        *policy_section(setup.cluster, shown.details),
    ]
    files = {
        "comparison.json": json.dumps(shown.as_json(), indent=1),
        "comparison.csv": _csv(shown),
    }
    title = f"embroute compare: {shown.data}"
    return render(Page(title, facts, _sheet(shown), sections, files))
