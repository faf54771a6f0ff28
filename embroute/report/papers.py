"""What papers report on trade-offs, each figure with its setting, and what is varied beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from embroute.simulate.recorder import TradeoffPoint

HET = "HET, VLDB 2022"
HERALD = "Herald, NSDI 2024"
ESD = "ESD, arXiv 2512.21615"
HET_SETTING = "8 workers, 1 server, caches of 10 %, dim 128, batch 128 a worker, SGD"
HERALD_SETTING = (
    "8 workers, 1 server, caches of 10 %, dim 512, batch 128 a worker (simulated) or 256 "
    "(testbed), 100 GbE"
)
ESD_SETTING = "unequal links; its abstract gives no more"
NONE = "none known"

Point = tuple[str, float]  # policy, x
Points = Mapping[Point, TradeoffPoint]


@dataclass(frozen=True)
class Claim:
    """A paper's figure, and what was found here."""

    source: str
    figure: str
    setting: str
    ours: Callable[[Points], str]


def _less(where: str, one: Point, other: Point, value: str) -> Callable[[Points], str]:
    """How much less one policy needs than another."""

    def told(points: Points) -> str:
        if one not in points or other not in points:
            return f"{where}: not measured"
        share = getattr(points[one], value) / max(1e-12, getattr(points[other], value))
        return f"{where}: {one[0]} {100 * (1 - share):.0f} % less than {other[0]}"

    return told


def _faster(where: str, one: Point, other: Point) -> Callable[[Points], str]:
    """How many times as fast one policy is as another."""

    def told(points: Points) -> str:
        if one not in points or other not in points:
            return f"{where}: not measured"
        times = points[other].step_time_s / points[one].step_time_s
        return f"{where}: {one[0]} {times:.2f}x as fast as {other[0]}"

    return told


def _both(*parts: Callable[[Points], str]) -> Callable[[Points], str]:
    return lambda points: "; ".join(part(points) for part in parts)


CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "cache": (
        Claim(
            HERALD,
            "59 % fewer transmissions than vanilla caching (Wide & Deep, Criteo); 48 to 89 % over "
            "its four data sets. It varies the cache from 4 to 10 %; by size: " + NONE,
            HERALD_SETTING,
            _both(
                _less("rows, cache 10 %", ("herald", 10), ("vanilla", 10), "rows"),
                _less("rows, cache 4 %", ("herald", 4), ("vanilla", 4), "rows"),
            ),
        ),
        Claim(
            HET,
            "88 % less embedding communication, measured as time on 1 GbE; by size: " + NONE,
            HET_SETTING,
            _both(
                _less("rows, cache 10 %", ("het(100)", 10), ("nocache", 10), "rows"),
                _less("rows, cache 4 %", ("het(100)", 4), ("nocache", 4), "rows"),
            ),
        ),
        Claim(
            ESD,
            "by size: " + NONE,
            ESD_SETTING,
            _less("rows, cache 10 %", ("esd(1)", 10), ("vanilla", 10), "rows"),
        ),
    ),
    "staleness": (
        Claim(
            HET,
            "AUC of Wide & Deep 79.64 (bound 0), 79.62 (100), 78.84 (10,000), 74.61 (infinite); "
            "traffic by bound: " + NONE,
            HET_SETTING,
            _both(
                _less("rows", ("het(10)", 10), ("het(0)", 0), "rows"),
                _less("rows", ("het(100)", 100), ("het(0)", 0), "rows"),
            ),
        ),
    ),
    "bandwidth": (
        Claim(
            HET,
            "88 % less embedding communication, measured as time on 1 GbE; 20.68x over TF "
            "Parallax; on 10 GbE: " + NONE,
            HET_SETTING,
            _both(
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
            "the art; by ratio: " + NONE,
            ESD_SETTING,
            _both(
                _less("cost, 1:10", ("esd(1)", 10), ("herald", 10), "transmission_cost_s"),
                _faster("step, 1:10", ("esd(1)", 10), ("herald", 10)),
            ),
        ),
    ),
}
