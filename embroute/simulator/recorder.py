"""Details of a policy for a report: steps, phases, links, a timeline.

Axes: W workers, H hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from embroute.cost.step_time import StepTime, link_bytes
from embroute.kernels.array_types import F64
from embroute.simulator.comparison import PolicyResult, to_json
from embroute.simulator.simulation import Outcome, StepReport, Workload

DETAIL_POINTS = 400  # of a curve
TIMELINE_STEPS = 3
PHASES = ("compute", "early", "urgent", "late", "allreduce", "wait")


@dataclass(frozen=True)
class LinkLoad:
    """A host's link over the measured steps: bytes, and the share of the time it is busy."""

    host: str
    up_gbit_s: float
    down_gbit_s: float
    up_bytes: float
    down_bytes: float
    up_busy: float
    down_busy: float


@dataclass(frozen=True)
class Detail:
    """A policy's measured steps."""

    workers: tuple[int, ...]
    step: list[int]  # the first step of each bin
    hit_rate: list[float]
    step_time_s: list[float]
    path_s: dict[str, float]  # mean step by phase, at the slowest worker
    worker_s: dict[str, list[float]]  # mean step by phase and worker; the phases sum to the step
    links: list[LinkLoad]
    timeline: list[StepTime]  # the last steps

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self) | {"timeline": [_plain(time) for time in self.timeline]}


@dataclass
class Recorder:
    """Watches a measurement and keeps the times and hits of its steps."""

    warmup: int
    tick: Callable[[], None] = lambda: None
    steps: list[int] = field(default_factory=list)
    hits: list[tuple[int, int]] = field(default_factory=list)
    times: list[StepTime] = field(default_factory=list)

    def watch(self, report: StepReport) -> None:
        """Keep a measured step's times and hits."""
        if report.step >= self.warmup:
            self.steps.append(report.step)
            self.hits.append((report.hits, report.touches))
            self.times.append(report.time)
        self.tick()

    def detail(self, outcome: Outcome) -> Detail:
        """Means over the measured steps, and curves over bins of them."""
        hits = np.array(self.hits, np.float64)
        total = np.array([time.total_s for time in self.times])
        # Bins of equally many steps, the last one shorter: `reduceat` sums from start to start.
        starts = np.arange(0, len(total), -(-len(total) // DETAIL_POINTS))
        counts = np.add.reduceat(np.ones(len(total)), starts)
        binned = np.add.reduceat(hits, starts)
        return Detail(
            workers=outcome.workers,
            step=[self.steps[i] for i in starts],
            hit_rate=(binned[:, 0] / np.maximum(1, binned[:, 1])).tolist(),
            step_time_s=(np.add.reduceat(total, starts) / counts).tolist(),
            path_s=_means([critical_path(time) for time in self.times]),
            worker_s=_worker_means(self.times),
            links=_links(outcome),
            timeline=self.times[-TIMELINE_STEPS:],
        )


def critical_path(time: StepTime) -> dict[str, float]:
    """The step's time by phase at the slowest worker; the phases sum to the step.

    Pulls that run beside pushes of others do not count.
    """
    w = int(np.argmax(time.turn_W))
    phase_s = {
        "compute": float(time.compute_W[w]),
        "early": max(0.0, float(time.early_W[w] - time.compute_W[w])),
        "urgent": float(time.pushing_W[w]),
        "late": float(time.pulling_W[w]),
        "allreduce": time.allreduce_s,
    }
    # The rest of a step that the shards' links determine.
    return phase_s | {"wait": max(0.0, time.total_s - sum(phase_s.values()))}


def _means(paths: list[dict[str, float]]) -> dict[str, float]:
    return {phase: float(np.mean([path[phase] for path in paths])) for phase in PHASES}


def _worker_means(times: list[StepTime]) -> dict[str, list[float]]:
    """Mean seconds of each worker by phase; early transfers count if compute does not hide them."""
    compute_W = np.mean([time.compute_W for time in times], axis=0)
    early_W = np.mean([np.maximum(0, time.early_W - time.compute_W) for time in times], axis=0)
    urgent_W = np.mean([time.urgent_W for time in times], axis=0)
    late_W = np.mean([time.pulling_W for time in times], axis=0)
    allreduce_W = np.full(len(late_W), np.mean([time.allreduce_s for time in times]))
    busy: list[F64] = [compute_W, early_W, urgent_W, late_W, allreduce_W]
    wait_W = np.maximum(0, np.mean([time.total_s for time in times]) - np.sum(busy, axis=0))
    return {phase: values.tolist() for phase, values in zip(PHASES, [*busy, wait_W], strict=True)}


def _links(outcome: Outcome) -> list[LinkLoad]:
    cluster = outcome.setup.cluster
    up_H, down_H = link_bytes(outcome.traffic, cluster, outcome.steps)
    total_s = outcome.step_time_s * outcome.steps or 1.0
    return [
        LinkLoad(
            host=host.name,
            up_gbit_s=host.up_bytes_s * 8e-9,
            down_gbit_s=host.down_bytes_s * 8e-9,
            up_bytes=float(up),
            down_bytes=float(down),
            up_busy=float(up / host.up_bytes_s / total_s),
            down_busy=float(down / host.down_bytes_s / total_s),
        )
        for host, up, down in zip(cluster.hosts, up_H, down_H, strict=True)
    ]


def _plain(time: StepTime) -> dict[str, object]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(time).items()
    }


@dataclass(frozen=True)
class SweepPoint:
    """One policy with one cache size."""

    policy: str
    cache: str  # as given
    cache_rows: int
    cache_share: float  # of all rows
    transmission_cost_s: float
    step_time_s: float
    hit_rate: float


@dataclass(frozen=True)
class TradeoffPoint:
    """One policy at one value of the quantity that a panel varies."""

    panel: str
    policy: str
    x: float
    rows: int  # moved in the measured steps
    transmission_cost_s: float
    step_time_s: float


@dataclass(frozen=True)
class ReportData:
    """All data of a report."""

    data: str
    network: str
    job: Workload
    results: Sequence[PolicyResult]
    details: Mapping[str, Detail]
    sweep: Sequence[SweepPoint] = ()
    tradeoffs: Sequence[TradeoffPoint] = ()

    def as_json(self) -> dict[str, object]:
        """The documented JSON, and the further data of the figures under `report`."""
        extra = {
            "network": self.network,
            "details": {name: detail.as_json() for name, detail in self.details.items()},
            "sweep": [asdict(point) for point in self.sweep],
            "tradeoffs": [asdict(point) for point in self.tradeoffs],
        }
        return to_json(self.results, self.job, self.data) | {"report": extra}
