"""`embroute advise`: which policy, batch, cache and workers to use, before a machine is rented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from embroute.cli.data import reading_progress
from embroute.cli.options import data_options, limited, output_file, tell_compiling
from embroute.config.cluster import CLUSTER_PRESETS, Cluster
from embroute.config.cluster_file import open_cluster, write_cluster
from embroute.config.progress import progress_bar
from embroute.config.spec import LIMITS, one_line, parse_int, parse_size, shown
from embroute.cost.step_time import OPTIMIZERS, allreduce_share_W
from embroute.data.batch import Source
from embroute.data.open import DataOptions, naming, open_source
from embroute.kernels.codes import VALUE_STATE
from embroute.planner.setup import Setup, parse_dim
from embroute.policies.catalog import DEFAULT_POLICY
from embroute.report.comparison_table import scaled
from embroute.simulator.advisor import (
    EQUAL,
    EXACT_POLICIES,
    FULL_SPAN,
    ONE_HOST_POLICIES,
    REORDERING_POLICIES,
    STALE_POLICIES,
    Configuration,
    Constraints,
    Recommendation,
    advise,
    first_samples,
    fixed_bytes,
    hot_rows,
    only_fast,
    stages,
)
from embroute.simulator.simulation import Outcome

MAX_SHOWN = 6
TRAINED_AS = {"embroute": DEFAULT_POLICY}  # the policy that `train` uses by default


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


def dense_bytes(model: str, source: Source, dim: str) -> float:
    """Bytes of the model's dense gradients."""
    from embroute.models.registry import ModelOptions, make_model

    options = ModelOptions(table_device="meta")
    network = make_model(model, source.schema, parse_dim(dim, source.schema), options)
    # The tables are on the meta device; every other parameter is dense, in float32.
    return float(sum(4 * p.numel() for p in network.parameters() if p.device.type != "meta"))


def _table(advices: list[Recommendation], setup: Setup) -> Table:
    """At most 80 columns."""
    out = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="n: workers; pred, sim: step predicted, simulated; MB of a step, of a worker",
        caption_justify="left",
    )
    out.add_column("policy", no_wrap=True, min_width=8)
    headings = ("n", "batch", "cache\nrows", "pred\nms", "sim\nms", "samples\n/s")
    for heading in (*headings, "rows\nMB", "other\nMB", "memory\nMB", "decide\nms"):
        out.add_column(heading, justify="right", no_wrap=True)
    for advice in advices:
        choice, outcome = advice.choice, advice.outcome
        workers = len(choice.workers)
        out.add_row(
            choice.policy,
            str(workers),
            str(choice.batch // workers),
            scaled(choice.cache_rows),
            f"{1e3 * advice.predicted_s:.3g}",
            f"{1e3 * outcome.step_time_s:.3g}" if outcome else "-",
            scaled(advice.samples_s),
            *([f"{size:.3g}" for size in _megabytes(outcome)] if outcome else ["-", "-"]),
            scaled(worker_bytes(setup, choice) / 1e6),
            scaled(outcome.decision_ms) if outcome else "-",
        )
    return out


def _megabytes(outcome: Outcome) -> tuple[float, float]:
    """Megabytes per step: of rows, and of samples, plans and dense gradients."""
    traffic, cluster = outcome.traffic, outcome.setup.cluster
    shares = [allreduce_share_W(cluster, with_rows).sum() for with_rows in (True, False)]
    rows = traffic.bytes_WKIP.sum() + shares[0] * traffic.hot_bytes
    other = traffic.sample_bytes_W.sum() + traffic.plan_bytes_W.sum()
    dense = shares[1] * cluster.dense_bytes
    return float(rows / outcome.steps / 1e6), float((other / outcome.steps + dense) / 1e6)


def worker_bytes(setup: Setup, choice: Configuration) -> float:
    """Memory that a worker needs in this configuration."""
    cache = choice.cache_rows * float(setup.record_bytes_XA[VALUE_STATE].max())
    return cache + fixed_bytes(setup, choice.batch // len(choice.workers))


def against(first: Recommendation, rival: Recommendation) -> str:
    """How the first recommendation compares to a rival: by speed, or if equal by decision time."""
    gain = first.samples_s / rival.samples_s - 1
    rival_text = (
        f"{rival.choice.policy} on {len(rival.choice.workers)} workers with a cache of "
        f"{rival.choice.cache_rows:,} rows"
    )
    if gain > EQUAL or not first.outcome or not rival.outcome:
        return f"{first.choice.policy} trains {gain:.0%} more samples/s than {rival_text}"
    first_ms, rival_ms = first.outcome.decision_ms, rival.outcome.decision_ms
    faster = first_ms < 0.9 * rival_ms
    decides = f", and decides in {first_ms:.2g} ms, not {rival_ms:.2g}" if faster else ""
    return f"{first.choice.policy} trains as many samples/s as {rival_text}{decides}"


def _reasons(constraints: Constraints, advices: list[Recommendation]) -> Iterator[str]:
    """Why the first recommendation wins, and which facts speak against it."""
    first, rivals = advices[0], [advice for advice in advices[1:] if advice.outcome]
    if rivals:
        yield against(first, rivals[0])
    hot = hot_rows(constraints, first.choice)
    if hot:
        yield f"the hot set, which {first.choice.policy} keeps on every worker, is {hot:,} rows"
    deciding_s = first.outcome.decision_ms / 1e3 if first.outcome else 0.0
    if deciding_s > first.step_s:
        yield (
            f"a decision of {first.choice.policy} took {1e3 * deciding_s:.3g} ms here, longer than "
            "the step: on such a machine deciding sets the pace, unless a faster policy is chosen"
            + (", such as embroute(effort=auto)" if first.choice.policy == "embroute" else "")
        )
    left_out = only_fast(constraints, advices)
    if left_out:
        yield left_out
    setup = constraints.setup
    tables = setup.rows_A @ setup.record_bytes_XA[VALUE_STATE]
    yield f"each shard holds {tables / setup.cluster.num_shards / 1e6:,.0f} MB of tables"


@dataclass(frozen=True)
class AdviseArgs:
    """The arguments of `embroute advise`."""

    data_options: DataOptions
    data: str
    network: str
    memory_per_worker: str
    dim: str
    model: str
    workers: str | None
    batch: str
    optimizer: str
    compute_ms_per_sample: float
    target_samples_per_s: float | None
    allow_stale: bool
    allow_reorder: bool
    out: Path | None

    def memory_bytes(self) -> float:
        """Memory of a worker."""
        memory = parse_size("--memory-per-worker", self.memory_per_worker)
        if memory.unit != "bytes":
            raise ValueError(
                f"--memory-per-worker must look like 8GB, got {shown(self.memory_per_worker)}"
            )
        return memory.amount

    def network_name(self) -> str:
        """A preset with its number of workers, or a file."""
        return f"{self.network}-8" if self.network in CLUSTER_PRESETS else self.network

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

        cluster = replace(
            open_cluster(self.network_name()),
            dense_bytes=dense_bytes(self.model, source, self.dim),
            compute_s_per_sample=self.compute_ms_per_sample / 1e3,
        )
        batches = tuple(
            parse_int("--batch", part, 1, int(LIMITS["batch"].most))
            for part in self.batch.split(",")
        )
        widths = table_widths(self.model, source.schema, parse_dim(self.dim, source.schema))
        return Constraints(
            Setup(source.schema, cluster, widths, optimizer=self.optimizer),
            first_samples(source, sum(FULL_SPAN) * max(batches) * cluster.num_workers),
            self.memory_bytes(),
            batches,
            worker_counts(self.workers, cluster.num_workers),
            self.policies(cluster),
        )


def write_run(path: Path, choice: Configuration, args: AdviseArgs) -> None:
    """Write a run file for `embroute train`, and a cluster file if workers are left out."""
    from embroute.train.run_file import RunFile

    network, cluster = args.network_name(), open_cluster(args.network_name())
    if len(choice.workers) < cluster.num_workers:
        network = str(path.with_suffix(".network.yaml"))
        write_cluster(cluster.only(choice.workers), Path(network))
    run = RunFile(
        data=args.data,
        compute_ms_per_sample=args.compute_ms_per_sample,
        data_options=args.data_options.changed(),
        model=args.model,
        dim=args.dim,
        policy=TRAINED_AS.get(choice.policy, choice.policy),
        cache=f"{choice.cache_rows}rows" if choice.cache_rows else RunFile.cache,
        batch=choice.batch // len(choice.workers),
        optimizer=args.optimizer,
        workers=len(choice.workers),
        shards=cluster.num_shards,
        network=network,
        out=path.stem,
    )
    run.write(path)


@click.command("advise")
@click.option(
    "--data",
    default="online-retail(negatives=1)",
    show_default=True,
    help="A built-in name or a path.",
)
@click.option("--network", default="edge-8", show_default=True, help="A preset or a YAML file.")
@click.option("--memory-per-worker", default="8GB", show_default=True, help="E.g. 500MB.")
@click.option("--dim", default="64", show_default=True, help="Width of an embedding.")
@click.option("--model", default="deepfm", show_default=True, help="Model to train.")
@click.option("--workers", help="Numbers to try, e.g. 2..8 or 4,8 [all, and the divisors of all].")
@click.option("--batch", default="128,256", show_default=True, help="Samples per worker to try.")
@click.option(
    "--optimizer",
    type=click.Choice(list(OPTIMIZERS)),
    default="adagrad",
    show_default=True,
    help="Optimizer of the rows.",
)
@click.option(
    "--compute-ms-per-sample",
    type=limited("compute_ms_per_sample"),
    default=0.05,
    show_default=True,
    help="Compute time of the reference worker, in milliseconds.",
)
@click.option(
    "--target-samples-per-s", type=click.FloatRange(0, 1e15), help="Fail if the best is slower."
)
@click.option("--allow-stale", is_flag=True, help="Also policies that read old rows (HET).")
@click.option("--allow-reorder", is_flag=True, help="Also policies that change the order (FAE).")
@click.option("--out", type=click.Path(path_type=Path), help="Write a run file for `train`.")
@data_options
def advise_command(data_options: DataOptions, /, **values: object) -> None:
    """Recommend a policy, a batch, a cache and which workers to use.

    Everything is predicted from the head of the data; the best three are simulated.
    """
    args = AdviseArgs(data_options, **values)  # type: ignore[arg-type]
    if args.out is not None:
        output_file("--out", args.out)
    args.memory_bytes()
    with reading_progress() as progress, naming("--data", args.data):
        source = open_source(args.data, data_options, progress)
    tell_compiling()
    with progress_bar("reading", None, counted=True) as update:
        constraints = args.constraints(source)
        update(total=stages(constraints))
        advices = advise(constraints, lambda stage: update(description=stage, advance=1))
    console = Console()
    console.print(_table(advices[:MAX_SHOWN], constraints.setup))
    for reason in _reasons(constraints, advices):
        console.print(reason, highlight=False, markup=False)
    if args.out is not None:
        write_run(args.out, advices[0].choice, args)
        click.echo(f"written: {args.out}", err=True)
    best, target = advices[0].samples_s, args.target_samples_per_s
    if target and best < target:
        raise ValueError(
            f"--target-samples-per-s {target:,.0f}: the best found is {best:,.0f}; "
            f"more memory, faster links or more workers would be needed"
        )
