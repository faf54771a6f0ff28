"""Details of one policy, chosen on the page: workers' steps, links, the cluster, a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi, sin

from bokeh.core.properties import value
from bokeh.models import ColorBar, ColumnDataSource, LinearColorMapper
from bokeh.plotting import figure

from embroute.config.cluster import Cluster
from embroute.report.figures import (
    BLUE,
    FONT,
    GREEN,
    INK,
    PHASE_STYLES,
    VERMILION,
    Axes,
    Bars,
    Columns,
    Stack,
    Style,
    add_values,
    plot,
    stacked,
)
from embroute.report.page import Control, Section
from embroute.report.timeline import timeline, timeline_settings
from embroute.simulator.recorder import PHASES, Detail, LinkLoad

MAX_BARS = 32  # workers or hosts shown one by one
# From idle to full.
BUSY_COLORS = ("#8fb3cc", "#a3a9ae", "#b89d8b", "#c98f66", "#d27a38", "#d55e00")
DIRECTIONS = {"down": Style("into the host", BLUE), "up": Style("out of the host", VERMILION)}


def _height(count: int) -> int:
    return 110 + 28 * max(4, count)


def _breakdown(detail: Detail) -> Stack:
    workers = tuple(f"worker {w}" for w in detail.workers[:MAX_BARS])
    series = {p: [1e3 * s for s in detail.worker_s[p][:MAX_BARS]] for p in PHASES}
    return Stack(workers, series)


def _busiest(detail: Detail) -> list[LinkLoad]:
    """Hosts to show one by one: all in order, or the busiest of many."""
    if len(detail.links) <= MAX_BARS:
        return detail.links
    return sorted(detail.links, key=lambda link: -max(link.up_busy, link.down_busy))[:MAX_BARS]


def _loads(detail: Detail) -> Stack:
    links = _busiest(detail)
    series = {
        "down": [link.down_bytes / 1e6 for link in links],
        "up": [link.up_bytes / 1e6 for link in links],
    }
    return Stack(tuple(link.host for link in links), series)


def _circle(count: int) -> list[tuple[float, float]]:
    """Points on a circle, from the top clockwise."""
    turns = (i / count for i in range(count))
    return [(sin(2 * pi * turn), cos(2 * pi * turn)) for turn in turns]


def _ranks(cluster: Cluster, host: int) -> str:
    names = [f"shard {k}" for k, place in enumerate(cluster.shards) if place == host]
    names += [f"worker {w}" for w, worker in enumerate(cluster.workers) if worker.host == host]
    return ", ".join(names) or "nothing"


def _cluster_columns(cluster: Cluster, detail: Detail) -> Columns:
    """Each host's link as two lines side by side, one a direction, from the switch to the host."""
    points = _circle(len(detail.links))
    out: dict[str, list[object]] = {
        k: [] for k in ("x0", "y0", "x1", "y1", "side", "busy", "mb", "rate", "host", "width")
    }
    for link, (x, y) in zip(detail.links, points, strict=True):
        sides = (
            ("out of", link.up_busy, link.up_bytes, link.up_gbit_s, 0.018),
            ("into", link.down_busy, link.down_bytes, link.down_gbit_s, -0.018),
        )
        for side, busy, size, rate, shift in sides:
            # (y, -x) is at a right angle to the link: it moves the line of one direction aside.
            start = (0.12 * x + shift * y, 0.12 * y - shift * x)
            end = (0.95 * x + shift * y, 0.95 * y - shift * x)
            row = (*start, *end, side, 100 * busy, size / 1e6, rate, link.host, 4)
            for column, cell in zip(out.values(), row, strict=True):
                column.append(cell)
    return {name: list(values) for name, values in out.items()}


def _host_columns(cluster: Cluster, detail: Detail) -> Columns:
    points = _circle(len(detail.links))
    few = len(points) <= MAX_BARS
    busy = [100 * max(link.up_busy, link.down_busy) for link in detail.links]
    return {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "text_x": [1.13 * x for x, _ in points],
        "text_y": [1.13 * y for _, y in points],
        "align": ["left" if x > 0.1 else "right" if x < -0.1 else "center" for x, _ in points],
        "text": [
            f"{link.host}: {share:.0f} % of {min(link.up_gbit_s, link.down_gbit_s):g} Gbit/s"
            if few
            else ""
            for link, share in zip(detail.links, busy, strict=True)
        ],
        "color": [BLUE if h in cluster.shards else GREEN for h in range(len(points))],
        "ranks": [_ranks(cluster, h) for h in range(len(points))],
        "host": [link.host for link in detail.links],
    }


def _cluster_figure(cluster: Cluster, detail: Detail) -> figure:
    fig = plot(Axes("The cluster, and how busy its links are", "", height=460))
    fig.axis.visible = False
    fig.grid.visible = False
    fig.x_range.start, fig.x_range.end = -2.3, 2.3
    fig.y_range.start, fig.y_range.end = -1.3, 1.3
    links = ColumnDataSource(_cluster_columns(cluster, detail), name="cluster-links")
    hosts = ColumnDataSource(_host_columns(cluster, detail), name="cluster-hosts")
    mapper = LinearColorMapper(list(BUSY_COLORS), low=0, high=100)
    lines = fig.segment(
        "x0",
        "y0",
        "x1",
        "y1",
        source=links,
        line_width="width",
        line_color={"field": "busy", "transform": mapper},
    )
    dots = fig.scatter("x", "y", source=hosts, size=16, color="color")
    fig.scatter([0], [0], size=22, marker="square", color="#8a8f98")
    text = fig.text("text_x", "text_y", "text", source=hosts, text_align="align")
    text.glyph.tags = [INK]
    text.glyph.text_baseline, text.glyph.text_font_size = "middle", "13px"
    text.glyph.text_font = value(FONT)  # a plain string would be the name of a column
    tips = [("", "@side @host"), ("busy", "@busy{0.0} %"), ("MB", "@mb{0,0.00}")]
    tips.append(("Gbit/s", "@rate{0.[00]}"))
    add_values(fig, lines, tips)
    host_tips = [("", "@host"), ("ranks", "@ranks")]
    add_values(fig, dots, host_tips)
    bar = ColorBar(color_mapper=mapper, title="busy %", height=10, width=240)
    bar.background_fill_alpha = 0
    bar.title_text_font = bar.major_label_text_font = FONT
    bar.title_text_font_style = "normal"
    fig.add_layout(bar, "below")
    return fig


def _settings(cluster: Cluster, detail: Detail) -> dict[str, dict[str, object]]:
    breakdown, loads = _breakdown(detail), _loads(detail)
    return {
        "breakdown": {"data": breakdown.columns()},
        "breakdown-range": {"factors": list(reversed(breakdown.labels))},
        "loads": {"data": loads.columns()},
        "loads-range": {"factors": list(reversed(loads.labels))},
        "cluster-links": {"data": _cluster_columns(cluster, detail)},
        "cluster-hosts": {"data": _host_columns(cluster, detail)},
        **timeline_settings(detail),
    }


def policy_section(cluster: Cluster, details: Mapping[str, Detail]) -> list[Section]:
    """The section of one policy, with a control to choose it."""
    ordered = dict(sorted(details.items(), key=lambda item: sum(item[1].path_s.values())))
    first = next(iter(ordered.values()))
    breakdown, loads = _breakdown(first), _loads(first)
    height = _height(len(breakdown.labels))
    axes = Axes("A step at each worker", "ms a step, mean", "", height, breakdown.labels)
    steps = stacked(Bars("breakdown", axes, PHASE_STYLES, "ms"), breakdown)
    axes = Axes("Load of each link", "MB in the measured steps", "", height, loads.labels)
    load = stacked(Bars("loads", axes, DIRECTIONS, "MB"), loads)
    steps.y_range.name, load.y_range.name = "breakdown-range", "loads-range"
    options = {name: _settings(cluster, detail) for name, detail in ordered.items()}
    figures = [steps, load, _cluster_figure(cluster, first), timeline(first)]
    text = (
        "Workers, links and the last steps of the policy chosen here. A link's share counts rows, "
        "samples, plans and all-reduce, against the time of the steps."
    )
    return [Section("One policy closely", text, figures, [Control("policy", "policy", options)])]
