"""The trade-offs that papers report, measured on the job at hand and shown beside their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embroute.report.figures import Axes, Curve, from_zero, lines
from embroute.report.page import Section, Sheet
from embroute.report.papers import CLAIMS
from embroute.simulate.recorder import TradeoffPoint
from embroute.simulate.sweeps import COMPUTE_S

HEADINGS = ("paper", "its figure", "its setting", "here")
RELATIVE_AXIS = "% of vanilla, same {}"


@dataclass(frozen=True)
class Panel:
    """One thing varied: what is drawn, and over what."""

    title: str
    text: str
    axes: Axes
    value: str  # field of a point
    base: str  # policy whose value is 100 %


PANELS = {
    "cache": Panel(
        "Trade-off: cache",
        "Rows moved, as a share of what vanilla moves with the same cache. In this and the next "
        "panels a cache is a share of the rows that occur in these steps: papers train whole data "
        "sets, in which caches are full.",
        Axes(
            "Rows moved against cache", "cache, % of rows that occur", RELATIVE_AXIS.format("cache")
        ),
        "rows",
        "vanilla",
    ),
    "staleness": Panel(
        "Trade-off: staleness",
        "Rows that HET moves with a bound, as a share of what it moves with bound 0, which is "
        "exact. What a bound does to AUC shows in training only.",
        Axes("Rows moved against HET's bound", "bound of staleness, clocks", "% of bound 0"),
        "rows",
        "het(0)",
    ),
    "bandwidth": Panel(
        "Trade-off: bandwidth",
        "Step time on links that are all equal, the server's too, as a share of vanilla's.",
        Axes("Step time against links", "Gbit/s", RELATIVE_AXIS.format("links"), log_x=True),
        "step_time_s",
        "vanilla",
    ),
    "ratio": Panel(
        "Trade-off: unequal links",
        "Half of the workers at 5 Gbit/s, half slower by the ratio, the server at 10: "
        "transmission cost as a share of vanilla's. A ratio of 10 is the preset edge-N.",
        Axes("Cost against unevenness", "fast link to slow link", RELATIVE_AXIS.format("links")),
        "transmission_cost_s",
        "vanilla",
    ),
}


def curves(panel: Panel, points: Sequence[TradeoffPoint]) -> list[Curve]:
    """A curve a policy, in per cent of the base; HET's bounds are one curve."""
    fixed = panel.base == "het(0)"
    base = {point.x: getattr(point, panel.value) for point in points if point.policy == panel.base}
    found: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        whole = base.get(0.0 if fixed else point.x)
        if whole:
            share = 100 * getattr(point, panel.value) / whole
            found.setdefault("het" if fixed else point.policy, []).append((point.x, share))
    return [
        Curve(name, [x for x, _ in pairs], [y for _, y in pairs]) for name, pairs in found.items()
    ]


def _section(name: str, points: Sequence[TradeoffPoint]) -> Section:
    panel = PANELS[name]
    drawn = curves(panel, points)
    fig = lines(panel.axes, drawn, points=True)
    by_place = {(point.policy, point.x): point for point in points}
    rows = [
        [claim.source, claim.figure, claim.setting, claim.ours(by_place)] for claim in CLAIMS[name]
    ]
    text = panel.text
    if name in ("bandwidth", "ratio"):
        text += f" Where the job has no compute, a sample takes {1e3 * COMPUTE_S:g} ms here."
    top = max((max(curve.y) for curve in drawn), default=100.0)
    return Section(panel.title, text, [from_zero(fig, top)], sheet=Sheet(HEADINGS, rows))


def tradeoff_sections(points: Sequence[TradeoffPoint]) -> list[Section]:
    """A section a panel that was measured."""
    measured = {name: [point for point in points if point.panel == name] for name in PANELS}
    return [_section(name, found) for name, found in measured.items() if found]
