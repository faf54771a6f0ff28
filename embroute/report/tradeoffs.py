"""Trade-offs that papers report, measured on the present job and shown beside their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from embroute.report import papers
from embroute.report.figures import Axes, Curve, from_zero, lines
from embroute.report.page import Section, Sheet
from embroute.simulator.recorder import TradeoffPoint
from embroute.simulator.sweeps import COMPUTE_S

ROWS, COST, STEP = "rows", "transmission_cost_s", "step_time_s"  # fields of a point
Point = tuple[str, float]  # policy, x


class PointRatio(NamedTuple):
    """A quantity of a point beside that of another."""

    setting: str
    value: str
    ours: Point
    base: Point

    def sentence(self, points: Mapping[Point, TradeoffPoint]) -> str:
        """The measured ratio in words."""
        ours, base = points.get(self.ours), points.get(self.base)
        if ours is None or base is None:
            return f"{self.setting}: not measured"
        ratio = getattr(ours, self.value) / max(1e-12, getattr(base, self.value))
        if self.value == STEP:
            return f"{self.setting}: {self.ours[0]} {1 / ratio:.2f}x as fast as {self.base[0]}"
        change = f"{100 * abs(1 - ratio):.0f} % {'less' if ratio <= 1 else 'more'}"
        return f"{self.setting}: {self.ours[0]} {change} than {self.base[0]}"


class Claim(NamedTuple):
    """A paper's figure, and the same quantity measured here."""

    source: str
    figure: str
    setting: str
    ratios: tuple[PointRatio, ...]


def _sizes(policy: str, base: str) -> tuple[PointRatio, ...]:
    """Rows moved with the largest and the smallest cache of the papers."""
    return tuple(PointRatio(f"rows, cache {x} %", ROWS, (policy, x), (base, x)) for x in (10, 4))


def _links(policy: str, base: str, *speeds: float) -> tuple[PointRatio, ...]:
    """Step times on links of some speeds."""
    return tuple(PointRatio(f"{x:g} Gbit/s", STEP, (policy, x), (base, x)) for x in speeds)


CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "cache": (
        Claim(
            papers.HERALD,
            "59 % fewer transmissions than vanilla caching (Wide & Deep, Criteo); 48 to 89 % over "
            f"its four data sets. It varies the cache from 4 to 10 %; by size: {papers.SEE}",
            papers.HERALD_SETTING,
            _sizes("herald", "vanilla"),
        ),
        Claim(
            papers.HET,
            "88 % less embedding communication, measured as time on 1 GbE",
            papers.HET_SETTING,
            _sizes("het(100)", "nocache"),
        ),
    ),
    "staleness": (
        Claim(
            papers.HET,
            "AUC of Wide & Deep 79.64 (bound 0), 79.62 (100), 78.84 (10,000), 74.61 (infinite); "
            f"bound 10 against 100: {papers.SEE}",
            papers.HET_SETTING,
            (
                PointRatio("rows", ROWS, ("het(100)", 100), ("het(0)", 0)),
                PointRatio("rows", ROWS, ("het(100)", 100), ("het(10)", 10)),
            ),
        ),
    ),
    "bandwidth": (
        Claim(
            papers.HET,
            "88 % less embedding communication, measured as time on 1 GbE; 20.68x over TF "
            f"Parallax; on 10 GbE: {papers.SEE}",
            papers.HET_SETTING,
            _links("het(100)", "nocache", 1, 10),
        ),
        Claim(
            papers.HERALD,
            "2.11x over HET on TCP (Wide & Deep, Criteo); 1.50, 1.09 and 1.38x on its other three. "
            "It ran HET in BSP, which is vanilla here",
            papers.HERALD_SETTING,
            _links("herald", "vanilla", 100),
        ),
    ),
    "ratio": (
        Claim(
            papers.ESD,
            "up to 36.76 % lower transmission cost and 1.74x faster training than the state of "
            "the art",
            papers.ESD_SETTING,
            (
                PointRatio("cost, 1:10", COST, ("esd(1)", 10), ("herald", 10)),
                PointRatio("step, 1:10", STEP, ("esd(1)", 10), ("herald", 10)),
            ),
        ),
    ),
    "box": (
        Claim(
            papers.FAE,
            "2.3x less training time than XDL on CPUs, 1.52x less than XDL on CPUs and GPUs",
            papers.FAE_SETTING,
            _links("fae", "nocache", 100, 10),
        ),
        Claim(
            papers.SCARS,
            "up to 6x training throughput (Criteo Terabyte)",
            papers.SCARS_SETTING,
            _links("scars", "nocache", 100, 10),
        ),
    ),
}


HEADINGS = ("paper", "its figure", "its setting", "here")
RELATIVE_AXIS = "% of vanilla, same {}"


@dataclass(frozen=True)
class Panel:
    """A figure of one varied quantity."""

    title: str
    text: str
    axes: Axes
    value: str  # field of a point
    base: str = "vanilla"  # the policy whose value is 100 %


PANELS = {
    "cache": Panel(
        "Trade-off: cache",
        "Rows moved, as a share of what vanilla moves with the same cache. In this and the next "
        "panels a cache is a share of the rows that occur in these steps: papers train whole data "
        "sets, in which caches are full.",
        Axes(
            "Rows moved against cache", "cache, % of rows that occur", RELATIVE_AXIS.format("cache")
        ),
        ROWS,
    ),
    "staleness": Panel(
        "Trade-off: staleness",
        "Rows that HET moves with a bound, as a share of what it moves with bound 0, which is "
        "exact. What a bound does to AUC shows in training only.",
        Axes("Rows moved against HET's bound", "bound of staleness, clocks", "% of bound 0"),
        ROWS,
        "het(0)",
    ),
    "bandwidth": Panel(
        "Trade-off: bandwidth",
        "Step time on links that are all equal, the server's too, as a share of vanilla's.",
        Axes("Step time against links", "Gbit/s", RELATIVE_AXIS.format("links"), log_x=True),
        STEP,
    ),
    "ratio": Panel(
        "Trade-off: unequal links",
        "Half of the workers at 5 Gbit/s, half slower by the ratio, the server at 10: "
        "transmission cost as a share of vanilla's. A ratio of 10 is the preset edge-N.",
        Axes("Cost against unevenness", "fast link to slow link", RELATIVE_AXIS.format("links")),
        COST,
    ),
    "box": Panel(
        "Trade-off: one host",
        "All workers on one host with NVLink (box-N), the server behind a network: step time as a "
        "share of vanilla's. FAE swaps its replicas once in about a thousand steps. Fewer steps "
        "overstate its swaps.",
        Axes("Step time against network", "Gbit/s", RELATIVE_AXIS.format("network"), log_x=True),
        STEP,
    ),
}


def curves(panel: Panel, points: Sequence[TradeoffPoint]) -> list[Curve]:
    """A curve a policy, in per cent of the base; HET's bounds are one curve."""
    by_bound = panel.base == "het(0)"
    base = {point.x: getattr(point, panel.value) for point in points if point.policy == panel.base}
    shares: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        whole = base.get(0.0 if by_bound else point.x)
        if whole:
            share = 100 * getattr(point, panel.value) / whole
            shares.setdefault("het" if by_bound else point.policy, []).append((point.x, share))
    return [
        Curve(name, [x for x, _ in pairs], [y for _, y in pairs]) for name, pairs in shares.items()
    ]


def _section(name: str, points: Sequence[TradeoffPoint]) -> Section:
    panel = PANELS[name]
    panel_curves = curves(panel, points)
    fig = lines(panel.axes, panel_curves, points=True)
    by_setting = {(point.policy, point.x): point for point in points}
    rows = [
        [*claim[:3], "; ".join(ratio.sentence(by_setting) for ratio in claim.ratios)]
        for claim in CLAIMS[name]
    ]
    text = panel.text
    if panel.value != ROWS:
        text += f" Where the job has no compute, a sample takes {1e3 * COMPUTE_S:g} ms here."
    top = max((max(curve.y) for curve in panel_curves), default=100.0)
    return Section(panel.title, text, [from_zero(fig, top)], sheet=Sheet(HEADINGS, rows))


def tradeoff_sections(points: Sequence[TradeoffPoint]) -> list[Section]:
    """A section for each panel that was measured."""
    by_panel = {name: [point for point in points if point.panel == name] for name in PANELS}
    return [_section(name, measured) for name, measured in by_panel.items() if measured]
