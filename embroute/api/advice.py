"""Advice from Python: which policy, batch, cache and workers to use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.console import RenderableType
from rich.text import Text

from embroute.api.frames import Dataset, checked_options, naming_arguments, open_data
from embroute.config.cluster import CLUSTER_PRESETS, Cluster
from embroute.config.cluster_file import open_cluster, write_cluster
from embroute.config.progress import progress_bar
from embroute.config.spec import LIMITS, one_line, parse_int, parse_size, shown
from embroute.data.batch import Source
from embroute.planner.setup import Setup, parse_dim
from embroute.policies.catalog import DEFAULT_POLICY
from embroute.report.advice_table import advice_table, has_cache, reasons, recommended, worker_bytes
from embroute.report.comparison_table import cell_html, recorded
from embroute.simulator.advisor import (
    EXACT_POLICIES,
    FULL_SPAN,
    ONE_HOST_POLICIES,
    REORDERING_POLICIES,
    STALE_POLICIES,
    Configuration,
    Constraints,
    Recommendation,
    first_samples,
    recommendations,
    stages,
)

if TYPE_CHECKING:
    from bokeh.plotting import figure

TRAINED_AS = {"embroute": DEFAULT_POLICY}  # the policy that `train` uses by default


@dataclass(frozen=True)
class AdviceOptions:
    """What may be chosen, and what is fixed."""

    network: str | Cluster = "edge-8"
    memory_per_worker: str = "8GB"
    dim: str | int = "64"
    model: str = "deepfm"
    workers: str | int | Sequence[int] | None = None  # numbers to try
    batch: str | int | Sequence[int] = "128,256"  # samples of a worker to try
    optimizer: str = "adagrad"
    compute_ms_per_sample: float = 0.05
    allow_stale: bool = False
    allow_reorder: bool = False

    def __post_init__(self) -> None:
        self.memory_bytes()

    def memory_bytes(self) -> float:
        """Memory of a worker."""
        memory = parse_size("--memory-per-worker", self.memory_per_worker)
        if memory.unit != "bytes":
            raise ValueError(
                f"--memory-per-worker must look like 8GB, got {shown(self.memory_per_worker)}"
            )
        return memory.amount

    def cluster(self) -> Cluster:
        """The network with all of its workers."""
        network = self.network
        if isinstance(network, Cluster):
            return network
        return open_cluster(f"{network}-8" if network in CLUSTER_PRESETS else network)

    def policies(self, cluster: Cluster) -> tuple[str, ...]:
        """Policies that the user allows, the network permits and the optimizer can train with."""
        one_host = len(cluster.used_hosts) == 1
        stale = self.allow_stale and self.optimizer != "adam"
        allowed = (
            (ONE_HOST_POLICIES if one_host else ())
            + EXACT_POLICIES
            + (STALE_POLICIES if stale else ())
        )
        return allowed + (REORDERING_POLICIES if self.allow_reorder else ())

    def constraints(self, source: Source) -> Constraints:
        """The limits within which the adviser searches."""
        from embroute.models.registry import table_widths

        dim = parse_dim(str(self.dim), source.schema)
        cluster = replace(
            self.cluster(),
            dense_bytes=dense_bytes(self.model, source, dim),
            compute_s_per_sample=self.compute_ms_per_sample / 1e3,
        )
        most = int(LIMITS["batch"].most)
        batches = [parse_int("--batch", part, 1, most) for part in _joined(self.batch).split(",")]
        workers = None if self.workers is None else _joined(self.workers)
        return Constraints(
            Setup(
                source.schema,
                cluster,
                table_widths(self.model, source.schema, dim),
                optimizer=self.optimizer,
            ),
            first_samples(source, sum(FULL_SPAN) * max(batches) * cluster.num_workers),
            self.memory_bytes(),
            tuple(batches),
            worker_counts(workers, cluster.num_workers),
            self.policies(cluster),
        )


def _joined(values: object) -> str:
    """A list of numbers as the command line has it: `4,8`."""
    return ",".join(map(str, values)) if isinstance(values, list | tuple) else str(values)


def worker_counts(text: str | None, most: int) -> tuple[int, ...]:
    """Numbers of workers to try, most first: `4`, `2,4,8` or `2..8`."""
    if text is None:
        return tuple(dict.fromkeys((most, *(n for n in range(most - 1, 0, -1) if most % n == 0))))
    span = re.fullmatch(r"([0-9]+)\.\.([0-9]+)", text)
    parts = span.groups() if span else text.split(",")
    try:
        counts = [parse_int("--workers", part, 1, most) for part in parts]
    except ValueError:
        fault = f"between 1 and {most}, the workers of --network"
        raise ValueError(f"--workers {one_line(text)}: {fault}") from None
    if span:
        counts = list(range(counts[0], counts[1] + 1))
    if not counts:
        raise ValueError(f"--workers {one_line(text)}: the second number must not be smaller")
    return tuple(sorted(set(counts), reverse=True))


def dense_bytes(model: str, source: Source, dim: int | tuple[int, ...]) -> float:
    """Bytes of the model's dense gradients."""
    from embroute.models.registry import ModelOptions, make_model

    network = make_model(model, source.schema, dim, ModelOptions(table_device="meta"))
    # The tables are on the meta device; every other parameter is dense, in float32.
    return float(sum(4 * p.numel() for p in network.parameters() if p.device.type != "meta"))


@dataclass(frozen=True)
class Advice:
    """Configurations, best first: the first few simulated, the others predicted."""

    dataset: Dataset
    options: AdviceOptions
    constraints: Constraints
    recommendations: tuple[Recommendation, ...]

    @property
    def best(self) -> Configuration:
        """The recommended policy, workers, batch and cache."""
        return self.recommendations[0].choice

    @property
    def reasons(self) -> tuple[str, ...]:
        """The recommendation, why it wins, and which facts speak against it."""
        told = reasons(self.constraints, self.recommendations)
        return (recommended(self.recommendations[0]), *told)

    @property
    def run(self) -> dict[str, object]:
        """The recommended run by the keys of a run file.

        Its network is a Cluster where some workers of the given network are left out.
        """
        choice, asked, cluster = self.best, self.options, self.options.cluster()
        network: object = asked.network
        if len(choice.workers) < cluster.num_workers:
            network = cluster.only(choice.workers)
        elif network in CLUSTER_PRESETS:
            network = f"{network}-{cluster.num_workers}"
        cache = {"cache": f"{choice.cache_rows}rows"} if has_cache(choice) else {}
        return {
            "data": self.dataset.name,
            "data_options": self.dataset.options.changed(),
            "compute_ms_per_sample": asked.compute_ms_per_sample,
            "model": asked.model,
            "dim": str(asked.dim),
            "policy": TRAINED_AS.get(choice.policy, choice.policy),
            **cache,
            "batch": choice.batch // len(choice.workers),
            "optimizer": asked.optimizer,
            "workers": len(choice.workers),
            "shards": cluster.num_shards,
            "network": network,
        }

    def run_at(self, path: Path) -> dict[str, object]:
        """The recommended run for a run file; a network that has no name becomes a file beside."""
        run = {**self.run, "out": path.stem}
        if isinstance(run["network"], Cluster):
            beside = path.with_suffix(".network.yaml")
            write_cluster(run["network"], beside)
            run["network"] = str(beside)
        return run

    def to_dataframe(self) -> pl.DataFrame:
        """One line a configuration, best first."""
        setup = self.constraints.setup
        return pl.DataFrame([_line(advice, setup) for advice in self.recommendations])

    def plot(self, most: int = 20) -> figure:
        """Samples a second of the best configurations, as a bokeh figure."""
        from embroute.report.figures import result_bars

        shown_first = self.recommendations[:most]
        labels = [
            f"{number}. {advice.choice.policy}, {len(advice.choice.workers)} workers x "
            f"{advice.choice.batch // len(advice.choice.workers)}"
            for number, advice in enumerate(shown_first, 1)
        ]
        return result_bars(labels, [one.samples_s for one in shown_first], "samples_per_s")

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page with a figure and a table of all configurations."""
        from embroute.report.page import Page, Section, Sheet, csv_text, render

        frame = self.to_dataframe()
        rows = [[str(cell) for cell in row] for row in frame.iter_rows()]
        chart = Section("Samples a second", "The best configurations.", [self.plot()])
        text = render(
            Page(
                f"embroute advise: {self.dataset.name}",
                "; ".join(self.reasons),
                Sheet(frame.columns, rows),
                [chart],
                {"advice.csv": csv_text([frame.columns, *rows])},
            )
        )
        if path is not None:
            Path(path).write_text(text, "utf-8")
        return text

    def _parts(self) -> list[RenderableType]:
        table = advice_table(self.recommendations, self.constraints.setup)
        return [table, *(Text(reason) for reason in self.reasons)]

    def __str__(self) -> str:
        return recorded(*self._parts()).export_text()

    def __repr__(self) -> str:
        return f"Advice({self.dataset.name!r}, {len(self.recommendations)} configurations)"

    def _repr_html_(self) -> str:
        return cell_html(*self._parts())


def _line(advice: Recommendation, setup: Setup) -> dict[str, Any]:
    choice, outcome = advice.choice, advice.outcome
    return {
        "policy": choice.policy,
        "workers": len(choice.workers),
        "batch": choice.batch // len(choice.workers),
        "cache_rows": choice.cache_rows,
        "predicted_step_s": advice.predicted_s,
        "simulated_step_s": outcome.step_time_s if outcome else None,
        "samples_per_s": advice.samples_s,
        "worker_bytes": worker_bytes(setup, choice),
        "decision_ms": outcome.decision_ms if outcome else None,
    }


def advise(data: object = "online-retail(negatives=1)", **options: Any) -> Advice:
    """Recommend a policy, a batch, a cache and which workers to use, before a machine is rented.

    `data`: a name, a path, a frame, or what `open_data` returns. `options`: those of
    `embroute advise` with underscores, such as `network="edge-8"`, `memory_per_worker="8GB"`,
    `workers=[4, 8]`, `batch=[128, 256]`. The model's dense part is measured, which needs torch.
    """
    with naming_arguments():
        asked = checked_options(AdviceOptions, options)
    dataset = open_data(data)
    with naming_arguments():
        return advice_on(dataset, asked)


def advice_on(dataset: Dataset, options: AdviceOptions) -> Advice:
    """Search all configurations that the options allow."""
    with progress_bar("reading", None, counted=True) as update:
        constraints = options.constraints(dataset.source)
        update(total=stages(constraints))
        found = recommendations(constraints, lambda stage: update(description=stage, advance=1))
    return Advice(dataset, options, constraints, tuple(found))
