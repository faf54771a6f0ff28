"""Figures in one style: bars and lines with hover values, legible in light and in dark."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl
from bokeh.models import (
    ColumnDataSource,
    FactorRange,
    HoverTool,
    Legend,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.plotting import figure

# Okabe and Ito's colours: readers with colour blindness can tell them apart.
BLUE, SKY, VERMILION, ORANGE = "#0072b2", "#56b4e9", "#d55e00", "#e69f00"
GREEN, PINK, YELLOW, GREY, PALE = "#009e73", "#cc79a7", "#e5d629", "#8a8f98", "#b9bec6"
INDIGO = "#332288"
SERIES = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, YELLOW, GREY)
DASHES = ("solid", "dashed", "dotted", "dotdash")
FONT = "system-ui, sans-serif"
INK = "ink"  # tag of texts that follow the page's colour (page.js)

Columns = dict[str, Sequence[object]]


@dataclass(frozen=True)
class Axes:
    """Labels and shape of a figure's axes."""

    title: str
    x: str
    y: str = ""
    height: int = 320
    factors: tuple[str, ...] | None = None  # of the vertical axis, from the top
    log_x: bool = False


def plot(axes: Axes) -> figure:
    """An empty figure."""
    vertical = {} if axes.factors is None else {"y_range": FactorRange(*reversed(axes.factors))}
    fig = figure(
        title=axes.title,
        height=axes.height,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
        x_axis_type="log" if axes.log_x else "auto",
        x_axis_label=axes.x,
        y_axis_label=axes.y or None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **vertical,
    )
    fig.title.text_font_size = "15px"
    for axis in (*fig.xaxis, *fig.yaxis):
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "13px"
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.minor_tick_line_color = None
    fig.title.text_font = FONT
    fig.xaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
    if axes.factors is not None:
        fig.ygrid.visible = False
    else:
        fig.yaxis.formatter = NumeralTickFormatter(format="0,0.[0000]")
    return fig


def add_legend(fig: figure, items: Sequence[tuple[str, list[object]]], place: str) -> None:
    """A legend outside the plot; a click on a series hides it."""
    legend = Legend(items=list(items), click_policy="hide", orientation="vertical")
    if place != "right":
        legend.orientation, legend.ncols = "horizontal", 3
    legend.label_text_font, legend.label_text_font_size = FONT, "13px"
    legend.background_fill_alpha = 0
    legend.border_line_color = None
    fig.add_layout(legend, place)


def add_values(fig: figure, glyphs: object, tips: Sequence[tuple[str, str]]) -> None:
    """Values under the mouse: a label and a text with column names, one pair a line.

    Bokeh's own table of values has a colour made for white pages.
    """
    rows = "".join(
        f'<div class="tip"><span style="color:var(--soft)">{html.escape(label)}</span> '
        f"<span>{html.escape(text)}</span></div>"
        for label, text in tips
    )
    fig.add_tools(HoverTool(renderers=[glyphs], tooltips=rows, visible=False))


@dataclass(frozen=True)
class Stack:
    """Stacked bars: for each label, the size of every series."""

    labels: tuple[str, ...]
    series: Mapping[str, Sequence[float]]  # one size a label

    def columns(self) -> Columns:
        """Start and end of each bar; negative sizes extend to the left of zero."""
        right = [0.0] * len(self.labels)
        left = [0.0] * len(self.labels)
        out: Columns = {"label": list(self.labels)}
        for name, sizes in self.series.items():
            begins = [right[i] if size >= 0 else left[i] for i, size in enumerate(sizes)]
            ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
            right = [max(a, b) for a, b in zip(right, ends, strict=True)]
            left = [min(a, b) for a, b in zip(left, ends, strict=True)]
            out |= {name: list(sizes), f"{name}_from": begins, f"{name}_to": ends}
        out["total"] = [sum(sizes) for sizes in zip(*self.series.values(), strict=True)]
        return out


@dataclass(frozen=True)
class Style:
    """The shown name of a series, and its colour."""

    name: str
    color: str


PHASE_STYLES = {
    "compute": Style("compute", GREEN),
    "early": Style("pulls ahead, lazy pushes", SKY),
    "urgent": Style("urgent pushes", VERMILION),
    "late": Style("late pulls", BLUE),
    "allreduce": Style("all-reduce", ORANGE),
    "wait": Style("idle", PALE),
}


@dataclass(frozen=True)
class Bars:
    """A figure of stacked bars."""

    name: str  # of its data source
    axes: Axes
    styles: Mapping[str, Style]
    unit: str


def stacked(bars: Bars, stack: Stack) -> figure:
    """Horizontal stacked bars, one a label."""
    fig = plot(bars.axes)
    if min(min(sizes, default=0) for sizes in stack.series.values()) >= 0:
        fig.x_range.start = 0
    source = ColumnDataSource(data=stack.columns(), name=bars.name)
    items: list[tuple[str, list[object]]] = []
    for name in stack.series:
        style = bars.styles[name]
        glyphs = fig.hbar(
            y="label",
            left=f"{name}_from",
            right=f"{name}_to",
            height=0.7,
            color=style.color,
            source=source,
        )
        tips = [
            ("", f"@label: {style.name}"),
            (bars.unit, f"@{{{name}}}{{0,0.[000]}}"),
            ("in all", "@total{0,0.[000]}"),
        ]
        add_values(fig, glyphs, tips)
        items.append((style.name, [glyphs]))
    if len(items) > 1:
        add_legend(fig, items, "above" if len(items) <= 4 else "right")
    return fig


@dataclass(frozen=True)
class Curve:
    """A named line; points without a value are left out."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    source: str = ""  # name of the data source, if a control sets it


def lines(axes: Axes, curves: Sequence[Curve], points: bool = False) -> figure:
    """Lines with hover values; a click in the legend hides one."""
    fig = plot(axes)
    items: list[tuple[str, list[object]]] = []
    for i, curve in enumerate(curves):
        color = SERIES[i % len(SERIES)]
        source = ColumnDataSource(
            {"x": list(curve.x), "y": list(curve.y)}, name=curve.source or None
        )
        line = fig.line(
            "x",
            "y",
            source=source,
            color=color,
            line_width=2,
            line_dash=DASHES[i // len(SERIES) % len(DASHES)],
        )
        dots = fig.scatter("x", "y", source=source, color=color, size=8)
        dots.glyph.line_alpha = dots.glyph.fill_alpha = 1 if points else 0  # still hovers
        tips = [
            ("", curve.name),
            (axes.x, "@x{0,0.[000]}"),
            (axes.y, "@y{0,0.[0000]}"),
        ]
        add_values(fig, dots, tips)
        items.append((curve.name, [line, dots]))
    if len(items) > 1:
        add_legend(fig, items, "right")
    return fig


def result_bars(labels: Sequence[str], values: Sequence[float], quantity: str) -> figure:
    """One bar a label, in the order given."""
    height = 90 + 26 * len(labels)
    axes = Axes(quantity, quantity, height=height, factors=tuple(labels))
    bars = Bars("results", axes, {quantity: Style(quantity, BLUE)}, quantity)
    return stacked(bars, Stack(tuple(labels), {quantity: list(values)}))


def step_curve(frame: pl.DataFrame, quantity: str) -> figure:
    """One column of a frame over its column `step`."""
    known = [name for name in frame.columns if frame[name].dtype.is_numeric() and name != "step"]
    if quantity not in known:
        raise ValueError(f"quantity must be one of {', '.join(known)}, got {quantity!r}")
    steps, values = frame["step"].to_list(), frame[quantity].to_list()
    return lines(Axes(quantity, "step", quantity), [Curve(quantity, steps, values)])


def from_zero(fig: figure, top: float) -> figure:
    """Start the vertical axis at zero."""
    fig.y_range = Range1d(0, 1.05 * top or 1)
    return fig
