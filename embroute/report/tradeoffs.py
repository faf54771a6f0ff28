"""Trade-offs that papers report, measured on the present job and shown beside their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from embroute.report.figures import Axes, Curve, from_zero, lines
from embroute.report.page import Section, Sheet
from embroute.simulator.recorder import TradeoffPoint
from embroute.simulator.sweeps import COMPUTE_S

HET = "HET, VLDB 2022"
HERALD = "Herald, NSDI 2024"
ESD = "ESD, arXiv 2512.21615"
HET_SETTING = "8 workers, 1 server, caches of 10 %, dim 128, batch 128 a worker, SGD"
HERALD_SETTING = (
    "8 workers, 1 server, caches of 10 %, dim 512, batch 128 a worker (simulated) or 256 "
    "(testbed), 100 GbE"
)
ESD_SETTING = "unequal links; its abstract gives no more"
UNKNOWN = "none known"

Point = tuple[str, float]  # policy, x
Points = Mapping[Point, TradeoffPoint]


@dataclass(frozen=True)
class Claim:
    """A paper's figure, and the same quantity measured here."""

    source: str
    figure: str
    setting: str
    ours: Callable[[Points], str]


def _less(setting: str, policy: Point, other: Point, value: str) -> Callable[[Points], str]:
    """How much less one policy needs than another."""

    def sentence(points: Points) -> str:
        if policy not in points or other not in points:
            return f"{setting}: not measured"
        share = getattr(points[policy], value) / max(1e-12, getattr(points[other], value))
        return f"{setting}: {policy[0]} {100 * (1 - share):.0f} % less than {other[0]}"

    return sentence


def _faster(setting: str, policy: Point, other: Point) -> Callable[[Points], str]:
    """How many times as fast one policy is as another."""

    def sentence(points: Points) -> str:
        if policy not in points or other not in points:
            return f"{setting}: not measured"
        ratio = points[other].step_time_s / points[policy].step_time_s
        return f"{setting}: {policy[0]} {ratio:.2f}x as fast as {other[0]}"

    return sentence


def _joined(*sentences: Callable[[Points], str]) -> Callable[[Points], str]:
    return lambda points: "; ".join(sentence(points) for sentence in sentences)


CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "cache": (
        Claim(
            HERALD,
            "59 % fewer transmissions than vanilla caching (Wide & Deep, Criteo); 48 to 89 % over "
            "its four data sets. It varies the cache from 4 to 10 %; by size: " + UNKNOWN,
            HERALD_SETTING,
            _joined(
                _less("rows, cache 10 %", ("herald", 10), ("vanilla", 10), "rows"),
                _less("rows, cache 4 %", ("herald", 4), ("vanilla", 4), "rows"),
            ),
        ),
        Claim(
            HET,
            "88 % less embedding communication, measured as time on 1 GbE; by size: " + UNKNOWN,
            HET_SETTING,
            _joined(
                _less("rows, cache 10 %", ("het(100)", 10), ("nocache", 10), "rows"),
                _less("rows, cache 4 %", ("het(100)", 4), ("nocache", 4), "rows"),
            ),
        ),
        Claim(
            ESD,
            "by size: " + UNKNOWN,
            ESD_SETTING,
            _less("rows, cache 10 %", ("esd(1)", 10), ("vanilla", 10), "rows"),
        ),
    ),
    "staleness": (
        Claim(
            HET,
            "AUC of Wide & Deep 79.64 (bound 0), 79.62 (100), 78.84 (10,000), 74.61 (infinite); "
            "traffic by bound: " + UNKNOWN,
            HET_SETTING,
            _joined(
                _less("rows", ("het(10)", 10), ("het(0)", 0), "rows"),
                _less("rows", ("het(100)", 100), ("het(0)", 0), "rows"),
            ),
        ),
    ),
    "bandwidth": (
        Claim(
            HET,
            "88 % less embedding communication, measured as time on 1 GbE; 20.68x over TF "
            "Parallax; on 10 GbE: " + UNKNOWN,
            HET_SETTING,
            _joined(
                _faster("1 Gbit/s", ("het(100)", 1), ("nocache", 1)),
                _faster("10 Gbit/s", ("het(100)", 10), ("nocache", 10)),
            ),
        ),
        Claim(
            HERALD,
            "2.11x over HET on TCP (Wide & Deep, Criteo); 1.50, 1.09 and 1.38x on its other three",
            HERALD_SETTING,
            _faster("100 Gbit/s", ("herald", 100), ("het(100)", 100)),
        ),
    ),
    "ratio": (
        Claim(
            ESD,
            "up to 36.76 % lower transmission cost and 1.74x faster training than the state of "
            "the art; by ratio: " + UNKNOWN,
            ESD_SETTING,
            _joined(
                _less("cost, 1:10", ("esd(1)", 10), ("herald", 10), "transmission_cost_s"),
                _faster("step, 1:10", ("esd(1)", 10), ("herald", 10)),
            ),
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
    base: str  # the policy whose value is 100 %


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
        [claim.source, claim.figure, claim.setting, claim.ours(by_setting)]
        for claim in CLAIMS[name]
    ]
    text = panel.text
    if name in ("bandwidth", "ratio"):
        text += f" Where the job has no compute, a sample takes {1e3 * COMPUTE_S:g} ms here."
    top = max((max(curve.y) for curve in panel_curves), default=100.0)
    return Section(panel.title, text, [from_zero(fig, top)], sheet=Sheet(HEADINGS, rows))


def tradeoff_sections(points: Sequence[TradeoffPoint]) -> list[Section]:
    """A section for each panel that was measured."""
    by_panel = {name: [point for point in points if point.panel == name] for name in PANELS}
    return [_section(name, measured) for name, measured in by_panel.items() if measured]
