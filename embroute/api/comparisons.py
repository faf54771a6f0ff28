"""Comparing policies from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.table import Table

from embroute.api.frames import Dataset, naming_arguments, open_data
from embroute.config.run_options import DEFAULT_DATA, REPORT_CACHES, JobOptions
from embroute.planner.interfaces import Policy
from embroute.policies.catalog import PolicyLike
from embroute.report.comparison_table import cell_html, comparison_table, recorded, remarks
from embroute.simulator.comparison import PolicyResult, to_json
from embroute.simulator.measurements import (
    check_policies,
    measure_all,
    named_policies,
    trainable_defaults,
)
from embroute.simulator.recorder import ReportData
from embroute.simulator.simulation import Workload
from embroute.simulator.sweeps import measure_tradeoffs, sweep_caches
from embroute.simulator.workload import workload_from

if TYPE_CHECKING:
    from bokeh.plotting import figure

NUMBERS = ("transmission_cost_s", "step_time_s", "hit_rate", "decision_ms", "exact", "reference")


@dataclass(frozen=True)
class Comparison:
    """Policies beside each other on one job."""

    report: ReportData
    policies: Mapping[str, Policy | None]

    @property
    def results(self) -> Mapping[str, PolicyResult]:
        """The result of each policy by name."""
        return {result.name: result for result in self.report.results}

    @property
    def job(self) -> Workload:
        """The data, the set-up and the steps that were priced."""
        return self.report.job

    @property
    def notes(self) -> list[str]:
        """Sentences about the network and the workers, if some of either stay unused."""
        free = self.job.setup.cluster.moves_for_free
        idle = ["all workers and shards are on one host: no link carries rows, at no cost"]
        return (idle if free else []) + remarks(self.report.results, self.job)

    @property
    def num_steps(self) -> int:
        """Steps that were trained, warm-up included: fewer than asked for if the data ended."""
        measured = (entry.steps for entry in self.report.results if entry.steps is not None)
        return self.job.warmup + max(measured)

    def to_dataframe(self) -> pl.DataFrame:
        """One line a policy: cost and step time, and rows and bytes by kind."""
        return pl.DataFrame([_line(result) for result in self.report.results])

    def to_json(self) -> dict[str, object]:
        """The values that `embroute compare --json` writes (docs/compare-json.md)."""
        return to_json(self.report.results, self.report.job, self.report.data)

    def to_html(
        self,
        path: str | Path | None = None,
        caches: Sequence[str] = REPORT_CACHES,
        tradeoffs: bool = False,
    ) -> str:
        """A self-contained page with figures.

        `caches`: sizes that the policies are priced with, too. `tradeoffs`: also those that
        papers report.
        """
        from embroute.report.comparison_page import comparison_page

        kept = [
            policy
            for name, policy in self.policies.items()
            if policy is not None and not self.results[name].reference
        ]
        report = replace(self.report, sweep=sweep_caches(kept, self.report.job, caches))
        if tradeoffs:
            report = replace(report, tradeoffs=measure_tradeoffs(self.report.job))
        text = comparison_page(report)
        if path is not None:
            Path(path).write_text(text, "utf-8")
        return text

    def plot(self, quantity: str = "transmission_cost_s") -> figure:
        """Bars of a column of the data frame, as a bokeh figure."""
        from embroute.report.figures import result_bars

        frame = self.to_dataframe()
        if quantity not in frame.columns or not frame[quantity].dtype.is_numeric():
            known = [name for name in frame.columns if frame[name].dtype.is_numeric()]
            raise ValueError(f"quantity must be one of {', '.join(known)}, got {quantity!r}")
        values = frame.drop_nulls(quantity)
        return result_bars(values["policy"].to_list(), values[quantity].to_list(), quantity)

    def _table(self) -> Table:
        return comparison_table(self.report.results, self.report.job, self.report.data)

    def __str__(self) -> str:
        return recorded(self._table()).export_text()

    def __repr__(self) -> str:
        return f"Comparison({self.report.data!r}, {len(self.results)} policies)"

    def _repr_html_(self) -> str:
        return cell_html(self._table())


def _line(result: PolicyResult) -> dict[str, Any]:
    return {
        "policy": result.name,
        **{name: getattr(result, name) for name in NUMBERS},
        **{f"{kind}_rows": count for kind, count in result.rows.items()},
        **{f"{kind}_bytes": size for kind, size in result.bytes.items()},
    }


def compare(
    data: object = DEFAULT_DATA,
    policies: Sequence[PolicyLike] | PolicyLike | None = None,
    **options: Any,
) -> Comparison:
    """Price policies on your data and network, without training.

    `data`: a name, a path, a frame, or what `open_data` returns. `policies`: names such as
    "esd(1)", policies, their parts, or functions that make them; by default all that can train
    with the optimizer. `options`: those of `embroute compare` with underscores, such as
    `network="edge-8"`, `batch=128`, `cache="10%"`, `steps=90` (`embroute.JobOptions`).
    """
    with naming_arguments():
        job_options = JobOptions(**options)
        several = isinstance(policies, Iterable) and not isinstance(policies, str)
        wanted = policies if several or policies is None else [policies]
        chosen, _ = choose_policies(wanted, job_options.optimizer)  # type: ignore[arg-type]
    dataset = open_data(data)
    with naming_arguments():
        return measure_comparison(chosen, dataset, job_options)


def choose_policies(
    wanted: Iterable[PolicyLike] | None, optimizer: str
) -> tuple[dict[str, Policy | None], list[str]]:
    """Policies to compare, by default all that can train with the optimizer; and those left out."""
    left_out: list[str] = []
    if wanted is None:
        wanted, left_out = trainable_defaults(optimizer)
    return named_policies(list(wanted)), left_out


def measure_comparison(
    policies: Mapping[str, Policy | None], dataset: Dataset, options: JobOptions
) -> Comparison:
    """Check that all policies can run the job, then measure each."""
    job = workload_from(options, dataset.source)
    check_policies(policies, job)
    measured = measure_all(policies, job)
    report = ReportData(dataset.name, options.network_name, job, *measured)
    return Comparison(report, policies)
