"""The report of a comparison: traffic and cost of all policies, and details of each one."""

from __future__ import annotations

import json

from bokeh.plotting import figure

from embroute.config.spec import csv_cell
from embroute.report.comparison_table import caches_text
from embroute.report.figures import (
    BLUE,
    GREEN,
    GREY,
    INDIGO,
    ORANGE,
    PALE,
    PHASE_STYLES,
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
from embroute.report.page import Control, ControlSettings, Page, Section, Sheet, csv_text, render
from embroute.report.policy_detail import policy_section
from embroute.report.tradeoffs import tradeoff_sections
from embroute.simulator.comparison import FIRST_FILL
from embroute.simulator.recorder import PHASES, ReportData

KIND_STYLES = {
    "miss_pull": Style("pulls: no copy", BLUE),
    "stale_pull": Style("pulls: copy is stale", SKY),
    "update_push": Style("pushes: updates", VERMILION),
    "evict_push": Style("pushes: evictions", ORANGE),
    "drain": Style("drain at the end", YELLOW),
    "allreduce": Style("all-reduced rows", GREEN),
    "samples": Style("samples", PINK),
    "plans": Style("plans", GREY),
    "checks": Style("checks of clocks", INDIGO),
    "dense": Style("dense gradients", PALE),
}


def _height(count: int) -> int:
    return 110 + 30 * max(4, count)


def _traffic(report: ReportData) -> Section:
    names = tuple(result.name for result in report.results)
    megabytes = {k: [result.bytes[k] / 1e6 for result in report.results] for k in KIND_STYLES}
    rows = {k: [float(result.rows.get(k, 0)) for result in report.results] for k in KIND_STYLES}
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
        "Rows over workers' links by the reason they move; samples, plans, checks of clocks and "
        "dense gradients have bytes only. A click on a kind hides it.",
        [fig],
        [Control("unit", "in", options)],
    )


def _cost(report: ReportData) -> figure:
    names = tuple(result.name for result in report.results)
    styles = {"cost": Style("transmission cost", BLUE)}
    stack = Stack(names, {"cost": [1e3 * result.transmission_cost_s for result in report.results]})
    label = "ms, sum over workers' links and steps"
    axes = Axes("Transmission cost", label, height=_height(len(names)), factors=names)
    return stacked(Bars("cost", axes, styles, "ms"), stack)


def _step_time(report: ReportData) -> figure:
    names = tuple(result.name for result in report.results)
    no_phase = dict.fromkeys(PHASES, 0.0)
    paths = [
        report.details[result.name].path_s
        if result.name in report.details
        else no_phase | {"wait": result.step_time_s}
        for result in report.results
    ]
    styles = PHASE_STYLES | {"wait": Style("shards' links, bound", PALE)}
    stack = Stack(names, {phase: [1e3 * path[phase] for path in paths] for phase in PHASES})
    title = "Step time, and what is waited for"
    axes = Axes(title, "ms a step, mean", height=_height(len(names)), factors=names)
    return stacked(Bars("step-time", axes, styles, "ms"), stack)


def _sweep(report: ReportData) -> list[Section]:
    if not report.sweep:
        return []
    names = list(dict.fromkeys(point.policy for point in report.sweep))
    figures = []
    for title, label, field in (
        ("Transmission cost against cache", "ms", "transmission_cost_s"),
        ("Step time against cache", "ms a step", "step_time_s"),
    ):
        curves = []
        for name in names:
            points = [point for point in report.sweep if point.policy == name]
            x = [100 * point.cache_share for point in points]
            curves.append(Curve(name, x, [1e3 * float(getattr(p, field)) for p in points]))
        axes = Axes(title, "cache of a worker, % of all rows", label)
        figures.append(from_zero(lines(axes, curves, points=True), max(max(c.y) for c in curves)))
    text = "The same job with other caches. A size that cannot hold one step's rows is left out."
    return [Section("How much cache", text, figures)]


def _over_time(report: ReportData) -> Section:
    hits = [Curve(n, d.step, [100 * h for h in d.hit_rate]) for n, d in report.details.items()]
    times = [Curve(n, d.step, [1e3 * s for s in d.step_time_s]) for n, d in report.details.items()]
    first = from_zero(lines(Axes("Hit rate", "step", "% of touched rows"), hits), 100)
    second = lines(Axes("Step time", "step", "ms"), times)
    top = max((max(curve.y) for curve in times), default=1.0)
    return Section(
        "Step by step",
        "A hit is a row a worker touches and need not pull.",
        [first, from_zero(second, top)],
    )


def _sheet(report: ReportData) -> Sheet:
    base = next(result for result in report.results if result.name == "vanilla")
    rows = []
    for result in report.results:
        cost, time = result.transmission_cost_s, result.step_time_s
        marks = ("" if result.exact else " *") + (" ~" if result.order_changed else "")
        rows.append(
            [
                result.name + marks,
                f"{result.moved_rows:,}",
                f"{result.moved_bytes / 1e6:,.2f}",
                f"{1e3 * cost:,.2f}",
                f"{cost / base.transmission_cost_s:.2f}" if base.transmission_cost_s else "-",
                f"{1e3 * time:,.4f}",
                f"{time / base.step_time_s:.2f}" if base.step_time_s else "-",
                "-" if result.hit_rate is None else f"{100 * result.hit_rate:.1f}",
            ]
        )
    headings = ("policy", "rows", "MB", "cost ms", "to vanilla", "step ms", "to vanilla", "hits %")
    return Sheet(headings, rows)


def _csv(report: ReportData) -> str:
    kinds = [*KIND_STYLES, FIRST_FILL]
    row_kinds = [kind for kind in kinds if kind in report.results[0].rows]
    headings = ["policy", "transmission_cost_s", "step_time_s", "hit_rate"]
    headings += [f"rows_{kind}" for kind in row_kinds] + [f"bytes_{kind}" for kind in kinds]
    table: list[list[object]] = [[*headings]]
    for result in report.results:
        figures = [result.transmission_cost_s, result.step_time_s, result.hit_rate]
        rows = [result.rows[kind] for kind in row_kinds]
        sizes = [result.bytes[kind] for kind in kinds]
        table.append([csv_cell(result.name), *figures, *rows, *sizes])
    return csv_text(table)


def comparison_page(report: ReportData) -> str:
    """The report as the text of an HTML file."""
    setup = report.job.setup
    facts = (
        f"{setup.num_workers} workers of {report.network}, {setup.batch_size} samples a step, "
        f"{caches_text(setup)}, "
        f"{report.job.steps - report.job.warmup} steps after {report.job.warmup} of warm-up, "
        f"{setup.optimizer}. * inexact, ~ order changed."
    )
    cost_text = (
        "Cost is the busy time of all workers' links. Step time is that of the slowest worker, "
        "by what it waits for; early transfers count where compute does not hide them."
    )
    sections = [
        _traffic(report),
        Section("What it costs", cost_text, [_cost(report), _step_time(report)]),
        *_sweep(report),
        *tradeoff_sections(report.tradeoffs),
        _over_time(report),
        *policy_section(setup.cluster, report.details),
    ]
    files = {
        "comparison.json": json.dumps(report.as_json(), indent=1),
        "comparison.csv": _csv(report),
    }
    title = f"embroute compare: {report.data}"
    return render(Page(title, facts, _sheet(report), sections, files))
