"""A comparison as a table for a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from embroute.planner.setup import Setup
from embroute.simulator.comparison import FIRST_FILL, PolicyResult
from embroute.simulator.simulation import StepReport, Workload

LONG_WINDOW = 1000  # measured steps in which swaps are about as rare as in a run
PULL_KINDS, PUSH_KINDS = ("miss_pull", "stale_pull"), ("update_push", "evict_push", "drain")


def _short(value: float) -> str:
    """Three digits or more, never an exponent: 0.0182, 1.74, 35.8, 1402."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def rough(value: float) -> str:
    """Two digits, never an exponent: 0.044, 4.4, 44, 440, 44k."""
    digits = float(f"{value:.2g}")
    return scaled(digits if digits >= 1000 or value < 100 else value)


def scaled(value: float) -> str:
    """A count in five characters: 950, 12.3k, 1.2M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return _short(value / size) + unit
    return _short(value)


def _milliseconds(seconds: float) -> str:
    """At most five digits; the times of very slow links get a unit such as k or M."""
    return _short(1e3 * seconds) if seconds < 99.9995 else scaled(1e3 * seconds)


def _ratio(value: float, yardstick: float) -> str:
    return f"{value / yardstick:.2f}" if yardstick else "-"


def _cells(entry: PolicyResult, yardstick: PolicyResult | None) -> list[str]:
    flags = ("" if entry.exact else "*") + ("~" if entry.order_changed else "")
    cells = [
        entry.name + flags,
        scaled(sum(entry.rows[kind] for kind in PULL_KINDS)),
        scaled(sum(entry.rows[kind] for kind in PUSH_KINDS)),
        scaled(entry.moved_bytes),
        _milliseconds(entry.transmission_cost_s),
        _milliseconds(entry.step_time_s),
        "-" if entry.hit_rate is None else f"{100 * entry.hit_rate:.0f}%",
        "-" if entry.decision_ms is None else rough(entry.decision_ms),
    ]
    if yardstick is not None:
        cells.insert(5, _ratio(entry.transmission_cost_s, yardstick.transmission_cost_s))
        cells.insert(7, _ratio(entry.step_time_s, yardstick.step_time_s))
    return cells


_COUNTS = ("pulls", "pushes", "bytes")
_NUMBERS = (*_COUNTS, "cost\nms", "ratio", "step\nms", "ratio", "hits", "decide\nms")
USUAL_NAME = 16  # characters of a policy that 80 columns have room for beside the numbers
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
_LOOK: dict[str, Any] = {
    "title_justify": "left",
    "caption_justify": "left",
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "pad_edge": False,
}


def remarks(results: Sequence[PolicyResult], job: Workload) -> list[str]:
    """Sentences about policies that leave workers out, check clocks, or replicate a hot set."""
    count = job.setup.num_workers
    checks = [
        f"{entry.name}: checks of clocks, {scaled(entry.bytes['checks'])} bytes, are in its step "
        f"time only"
        for entry in results
        if entry.bytes["checks"]
    ]
    subsets = [
        f"{entry.name} uses workers {', '.join(str(w.worker) for w in entry.per_worker)} of {count}"
        for entry in results
        if 0 < len(entry.per_worker) < count
    ]
    return checks + subsets + [_on_hot_set(entry) for entry in results if entry.order_changed]


def _on_hot_set(entry: PolicyResult) -> str:
    """How far the hot set reaches, and its first fill."""
    fill = entry.bytes[FIRST_FILL]
    words = (
        f"{entry.name}: {entry.hot_steps} hot batches of {entry.steps}, "
        f"{entry.replicated_rows:,} rows on every worker; "
        f"filling them once moves {scaled(fill)} bytes, which no figure includes"
    )
    if not entry.hot_steps:
        return f"{words}; no sample finds all its rows there"
    swaps = entry.rows["stale_pull"] > 0  # as in FAE; SCARS never swaps
    if swaps and (entry.steps or 0) < LONG_WINDOW:
        words += f"; a long run swaps more rarely: --steps {2 * LONG_WINDOW} shows how often"
    return words


def caches_text(setup: Setup) -> str:
    """The caches in a sentence: their rows, of how many."""
    least, most = int(setup.cache_rows_W.min()), int(setup.cache_rows_W.max())
    sizes = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"caches of {sizes} of {setup.schema.num_rows:,} rows"


def comparison_table(results: Sequence[PolicyResult], job: Workload, data: str) -> Table:
    """The comparison as a table; the best of a column is bold. It fits 80 columns."""
    yardstick = next((entry for entry in results if entry.name == "vanilla"), None)
    yardstick = yardstick if len(results) > 1 else None
    real = [entry for entry in results if not entry.reference]
    setup = job.setup
    title = (
        f"{escape(data)}: {setup.num_workers} workers x {setup.batch_size // setup.num_workers} "
        f"samples, {caches_text(setup)}"
    )
    ratio = "; ratio: to vanilla" if yardstick else ""
    caption = f"cost: busy time of all links{ratio}; * inexact; ~ order changed"
    out = Table(title=title, caption=caption, **_LOOK)
    if max((len(entry.name) for entry in results), default=0) > USUAL_NAME:
        out.padding = (0, 0, 0, 0)  # ten more characters for names
    out.add_column("policy", overflow="fold")
    for heading in _NUMBERS:
        if yardstick or heading != "ratio":
            out.add_column(heading, justify="right", no_wrap=True)
    best_cost = min((entry.transmission_cost_s for entry in real), default=0.0)
    best_time = min((entry.step_time_s for entry in real), default=0.0)
    for entry in sorted(results, key=lambda entry: entry.reference):
        cells = [Text(cell) for cell in _cells(entry, yardstick)]
        if yardstick is None:
            out.add_row(*cells)
            continue
        best = {4: entry.transmission_cost_s == best_cost, 6: entry.step_time_s == best_time}
        for column, is_best in best.items():
            if is_best and not entry.reference:
                cells[column].stylize("bold")
                cells[column + 1].stylize("bold")
        out.add_row(*cells, style="dim" if entry.reference else None)
    return out


def step_quantiles(reports: Sequence[StepReport]) -> Table:
    """How much the measured steps differ: quantiles of time, cost, hits and planning."""
    out = Table(title=f"{len(reports)} measured steps", **_LOOK)
    out.add_column("quantile of the steps")
    for quantile in _QUANTILES:
        names = {0.0: "least", 0.5: "median", 1.0: "most"}
        out.add_column(names.get(quantile, f"{quantile:.0%}"), justify="right", no_wrap=True)
    columns = {
        "step ms": [1e3 * report.time.total_s for report in reports],
        "cost ms": [1e3 * report.transmission_cost_s for report in reports],
        "hits %": [100 * report.hits / max(1, report.touches) for report in reports],
        "decide ms": [1e3 * report.decision_s for report in reports],
    }
    for name, values in columns.items():
        out.add_row(name, *(rough(float(v)) for v in np.quantile(values, _QUANTILES)))
    return out


def recorded(*parts: RenderableType) -> Console:
    """Parts as a terminal shows them, for export. Nothing is printed, not even in a notebook."""
    console = Console(file=StringIO(), width=100, record=True, force_jupyter=False)
    for part in parts:
        console.print(part)
    return console


def cell_html(*parts: RenderableType) -> str:
    """Parts as a cell of a notebook shows them."""
    frame = '<pre style="overflow-x: auto; line-height: 1.2">{code}</pre>'
    return recorded(*parts).export_html(inline_styles=True, code_format=frame)
