"""Advice from Python: which policy, batch, cache and workers to use."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.console import RenderableType
from rich.text import Text

from embroute.api.frames import Dataset, naming_arguments, open_data
from embroute.config.cluster import Cluster
from embroute.config.cluster_file import open_network, write_cluster
from embroute.config.option_types import parse_bytes
from embroute.config.progress import progress_bar
from embroute.config.run_file import write_run_file
from embroute.config.run_options import (
    DEFAULT_DATA,
    DEFAULT_POLICY,
    MAX_BATCH,
    AdviceOptions,
    RunConfig,
)
from embroute.config.spec import one_line, parse_int
from embroute.data.batch import Source
from embroute.planner.setup import Setup, parse_dim
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


def cluster_of_advice(options: AdviceOptions) -> Cluster:
    """The network with all of its workers."""
    return open_network(options.network or "edge-8")


def allowed_policies(options: AdviceOptions, cluster: Cluster) -> tuple[str, ...]:
    """Policies that the user allows, the network permits and the optimizer can train with."""
    one_host = len(cluster.used_hosts) == 1
    stale = options.allow_stale and options.optimizer != "adam"
    allowed = (ONE_HOST_POLICIES if one_host else ()) + EXACT_POLICIES
    allowed += STALE_POLICIES if stale else ()
    return allowed + (REORDERING_POLICIES if options.allow_reorder else ())


def constraints_of(options: AdviceOptions, source: Source) -> Constraints:
    """The limits within which the adviser searches."""
    from embroute.models.registry import table_widths

    dim = parse_dim(str(options.dim), source.schema)
    cluster = replace(
        cluster_of_advice(options),
        dense_bytes=dense_bytes(options.model, source, dim),
        compute_s_per_sample=options.compute_ms_per_sample / 1e3,
    )
    batches = [parse_int("--batch", part, 1, MAX_BATCH) for part in str(options.batch).split(",")]
    widths = table_widths(options.model, source.schema, dim)
    return Constraints(
        Setup(source.schema, cluster, widths, optimizer=options.optimizer),
        first_samples(source, sum(FULL_SPAN) * max(batches) * cluster.num_workers),
        parse_bytes("--memory-per-worker", options.memory_per_worker),
        tuple(batches),
        worker_counts(options.workers, cluster.num_workers),
        allowed_policies(options, cluster),
    )


def worker_counts(wanted: object, most: int) -> tuple[int, ...]:
    """Numbers of workers to try, most first: `4`, `2,4,8` or `2..8`."""
    if wanted is None:
        return tuple(dict.fromkeys((most, *(n for n in range(most - 1, 0, -1) if most % n == 0))))
    text = str(wanted)
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
    def run(self) -> RunConfig:
        """The recommended run. Its network is a Cluster if it leaves some workers out."""
        choice, asked, cluster = self.best, self.options, cluster_of_advice(self.options)
        network = asked.network or "edge-8"
        if len(choice.workers) < cluster.num_workers:
            network = cluster.only(choice.workers)
        run = RunConfig(
            data=self.dataset.name,
            data_options=self.dataset.options,
            compute_ms_per_sample=asked.compute_ms_per_sample,
            model=asked.model,
            dim=asked.dim,
            policy=TRAINED_AS.get(choice.policy, choice.policy),
            batch=choice.batch // len(choice.workers),
            optimizer=asked.optimizer,
            workers=len(choice.workers),
            shards=cluster.num_shards,
            network=network,
        )
        return run.replace(cache=f"{choice.cache_rows}rows") if has_cache(choice) else run

    def require(self, samples_per_s: float) -> None:
        """Refuse a best configuration that is slower."""
        best = self.recommendations[0].samples_s
        if best < samples_per_s:
            raise ValueError(
                f"--target-samples-per-s {samples_per_s:,.0f}: the best found is {best:,.0f}; "
                f"more memory, faster links or more workers would be needed"
            )

    def write(self, path: str | Path) -> RunConfig:
        """Write the recommended run for `embroute train`, with its network in a file beside it."""
        path = Path(path)
        run = self.run.replace(out=path.stem)
        if isinstance(run.network, Cluster):
            beside = path.with_suffix(".network.yaml")
            write_cluster(run.network, beside)
            run = run.replace(network=str(beside))
        write_run_file(run, path)
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


def advise(data: object = DEFAULT_DATA, **options: Any) -> Advice:
    """Recommend a policy, a batch, a cache and which workers to use, before a machine is rented.

    `data`: a name, a path, a frame, or what `open_data` returns. `options`: those of
    `embroute advise` with underscores, such as `network="edge-8"`, `memory_per_worker="8GB"`,
    `workers=[4, 8]`, `batch=[128, 256]`. The model's dense part is measured, which needs torch.
    """
    with naming_arguments():
        asked = AdviceOptions(**options)
    dataset = open_data(data)
    with naming_arguments():
        return advice_on(dataset, asked)


def advice_on(dataset: Dataset, options: AdviceOptions) -> Advice:
    """Search all configurations that the options allow."""
    with progress_bar("reading", None, counted=True) as update:
        constraints = constraints_of(options, dataset.source)
        update(total=stages(constraints))
        found = recommendations(constraints, lambda stage: update(description=stage, advance=1))
    return Advice(dataset, options, constraints, tuple(found))
