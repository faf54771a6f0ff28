"""The headlines of the published systems beside what embroute measures in the nearest setting.

Run `python -m benchmarks.headlines [--data FOLDER] [--quick]`. FOLDER holds criteo_adkdd21. All
figures but AUC are simulated in this run; AUC is read from the newest page of `staleness`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.het_headline import spans
from benchmarks.own import nothing_hidden, rows_moved
from benchmarks.record import RESULTS, markdown, record
from embroute.config.cluster import Cluster, star_cluster
from embroute.config.cluster_file import open_cluster
from embroute.config.data_options import DataOptions
from embroute.config.spec import Size
from embroute.cost.inside import PULLS, PUSHES
from embroute.cost.step_time import step_time
from embroute.data.access_counts import Calibration
from embroute.data.batch import Source
from embroute.data.open import open_source
from embroute.kernels.array_types import I64
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.report import papers
from embroute.simulator.simulation import (
    Outcome,
    Workload,
    measure_named,
    simulate_steps,
    workload_bound,
)
from embroute.simulator.sweeps import COMPUTE_S, PAPER_CACHES

PRESETS = ("criteo-kaggle", "avazu", "criteo-search", "movielens-25m")
ADKDD = "Criteo AdKDD'21"
BOX_SETS = ("criteo-kaggle", "avazu", ADKDD)
QUICK_SAMPLES = 60_000  # of a preset
GBIT = re.compile(r"([\d.]+) Gbit/s")
SAME = 0.005  # smaller differences have no direction
# Cuts of pulls, pushes and all transmissions on Criteo, in per cent, by part of Herald.
ABLATION = {
    "allocation only": ("dispatch=herald sync=write-through", (54, 17, 35)),
    "plan only": ("dispatch=block sync=on-demand", (0, 13, 7)),
    "both": ("herald", (54, 63, 59)),
}
HEADINGS = ("headline", "data", "paper", "here", "direction", "beside it")


class Scene(NamedTuple):
    """A setting in which policies are measured."""

    data: str
    network: str
    dim: int
    batch: int  # of all workers
    steps: int
    compute_s: float = 0.0  # of a sample
    occurring: int = 0  # per cent: caches as a share of the rows that occur; 0: 10 % of all rows


class Line(NamedTuple):
    """A line of a table: a paper's figure, and ours."""

    headline: str
    data: str
    paper: str
    ours: str
    direction: str
    beside: str = ""


class Lengths(NamedTuple):
    """Steps of the runs: of replicas, which swap rarely, and of all others."""

    long: int = 2100
    short: int = 300


def cluster_of(network: str) -> Cluster:
    """A preset, or eight workers and a server on equal links such as `1 Gbit/s`."""
    rate = GBIT.fullmatch(network)
    return star_cluster([float(rate[1])] * 8, float(rate[1])) if rate else open_cluster(network)


@dataclass
class Lab:
    """Runs of policies by setting, each measured once."""

    sources: Mapping[str, Source]
    lengths: Lengths
    lookups: dict[str, dict[Calibration, I64]] = field(default_factory=dict)
    outcomes: dict[tuple[Scene, str], Outcome] = field(default_factory=dict)
    rows_that_occur: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def job(self, scene: Scene) -> Workload:
        """The setting as a job; a third of the steps is warm-up."""
        source = self.sources[scene.data]
        cluster = replace(cluster_of(scene.network), compute_s_per_sample=scene.compute_s)
        setup = Setup(source.schema, cluster, scene.dim, scene.batch)
        lookups = self.lookups.setdefault(scene.data, {})
        job = Workload(source, setup, scene.steps, scene.steps // 3, None, lookups=lookups)
        if not scene.occurring:
            return job
        cache = Size(max(1, self.occurring(scene, job) * scene.occurring // 100), "rows")
        return replace(job, setup=replace(setup, cache=cache))

    def occurring(self, scene: Scene, job: Workload) -> int:
        """Distinct rows of the steps."""
        key = scene.data, scene.batch, scene.steps
        if key not in self.rows_that_occur:
            seen_R = np.zeros(job.setup.schema.num_rows, np.bool_)
            for batch in job.batches():
                seen_R[batch.rows[batch.rows >= 0]] = True
            self.rows_that_occur[key] = int(seen_R.sum())
        return self.rows_that_occur[key]

    def measure(self, scene: Scene, policy: str) -> Outcome:
        """The outcome of a policy."""
        if (scene, policy) not in self.outcomes:
            self.outcomes[scene, policy] = measure_named(policy, self.job(scene))
        return self.outcomes[scene, policy]

    def sets(self, *names: str) -> list[str]:
        """Those of the data sets that are here."""
        return [name for name in names if name in self.sources]


def verdict(gain: float) -> str:
    """Whether a gain, such as 0.1 for a tenth less or faster, has the sign of the paper's."""
    if abs(gain) < SAME:
        return "no difference"
    return "agrees" if gain > 0 else "opposite"


def cut(ours: float, base: float) -> tuple[str, str]:
    """How much less than a base, and its direction."""
    share = 1 - ours / base if base else 0.0
    return f"-{share:.1%}" if share >= 0 else f"+{-share:.1%}", verdict(share)


def speed_up(ours: Outcome, base: Outcome) -> tuple[str, str]:
    """How many times as fast as a base, and its direction."""
    ratio = base.step_time_s / ours.step_time_s
    return f"{ratio:.2f}x", verdict(ratio - 1)


def kinds(outcome: Outcome) -> tuple[int, int, int]:
    """Rows pulled, rows pushed (with the difference of drains), and both."""
    rows_I = outcome.traffic.rows_WKIP.sum((0, 1, 3))
    pulls, pushes = int(rows_I[list(PULLS)].sum()), int(rows_I[list(PUSHES)].sum())
    pushes += int(outcome.drain_rows_W.sum())
    return pulls, pushes, pulls + pushes


def het(lab: Lab) -> Iterator[Line]:
    """HET: embedding communication, step time by link, and the bound of 10 beside 100."""
    for data in lab.sets("criteo-kaggle", ADKDD):
        *_, last = spans("het(100)", lab.sources[data], lab.lengths.long)
        moved = last.moved + last.checks
        here = f"steps {last.steps.start:,} to {last.steps.stop:,}, caches {last.full:.0%} full"
        text = "embedding communication, bytes against `nocache`"
        yield Line(text, data, "-88 %, as time on 1 GbE", *cut(moved, last.plain), here)
    figures = {
        "1 Gbit/s": ("20.68x over TF Parallax", "`nocache` in place of Parallax"),
        "10 Gbit/s": (papers.SEE, ""),
    }
    for network, (paper, beside) in figures.items():
        scene = Scene("criteo-kaggle", network, 128, 1024, lab.lengths.short, COMPUTE_S)
        base = lab.measure(scene, "nocache")
        compute_s = COMPUTE_S * scene.batch / 8
        most = f"steps without any row: {base.step_time_s / compute_s:.2f}x"
        ours = speed_up(lab.measure(scene, "het(100)"), base)
        beside = f"{beside}; {most}" if beside else most
        yield Line(f"step time, {network}, against `nocache`", scene.data, paper, *ours, beside)
    scene = Scene("criteo-kaggle", "1 Gbit/s", 128, 1024, lab.lengths.short)
    ours = cut(
        rows_moved(lab.measure(scene, "het(100)")), rows_moved(lab.measure(scene, "het(10)"))
    )
    yield Line("rows, `het(100)` against `het(10)`", scene.data, papers.SEE, *ours)


def auc(page: Path | None) -> Iterator[Line]:
    """AUC by bound of staleness in the longest run on the page of a benchmark that trains."""
    text = page.read_text() if page else ""
    # Later lines replace earlier ones: longer runs come last.
    runs = re.findall(r"^\| ([\d,]+) \| het\((\d+)\) \| ([\d.]+) \|", text, re.MULTILINE)
    steps = runs[-1][0] if runs else ""
    ours = {bound: figure for _, bound, figure in runs}
    for bound, lost in (("100", "-0.0002"), ("10000", "-0.0080")):
        if {"0", bound} <= ours.keys() and page is not None:
            loss = float(ours["0"]) - float(ours[bound])
            yield Line(
                f"AUC, `het({bound})` against `het(0)`",
                "criteo-kaggle, small tables",
                f"{lost} (Wide & Deep)",
                f"{-loss:+.4f}",
                verdict(loss),
                f"{steps} steps, from [{page.stem}]({page.name}); DeepFM, Adagrad",
            )


def most_cut(lab: Lab, scene: Scene, base: int) -> str:
    """The largest cut of rows that any exact policy could reach, by the lower bound."""
    bound = workload_bound(lab.job(scene))
    least = int(bound.pulls_A.sum() + bound.pushes_A.sum())
    return f"at most {cut(least, base)[0]} (`lower-bound`)"


def herald(lab: Lab) -> Iterator[Line]:
    """Herald: transmissions, step time against HET in BSP, its parts, and its cache sizes."""
    short = lab.lengths.short
    for data in lab.sets(*PRESETS, ADKDD):
        scene = Scene(data, "dc-8", 512, 1024, short, occurring=10)
        base = rows_moved(lab.measure(scene, "vanilla"))
        ours = cut(rows_moved(lab.measure(scene, "herald")), base)
        paper = "-48 to -89 %" + (", -59 % on Criteo" if data == "criteo-kaggle" else "")
        optimal = cut(rows_moved(lab.measure(scene, "esd(1)")), base)[0]
        beside = f"`esd(1)`: {optimal}; {most_cut(lab, scene, base)}"
        yield Line("transmissions against `vanilla`", data, paper, *ours, beside)
    for data in lab.sets(*PRESETS, ADKDD):
        scene = Scene(data, "dc-8", 512, 2048, short, occurring=10)
        base_run = lab.measure(scene, "vanilla")
        ours = speed_up(lab.measure(scene, "herald"), base_run)
        paper = "2.11x" if data == "criteo-kaggle" else "1.50, 1.09 and 1.38x on its other data"
        relaxed = speed_up(lab.measure(scene, "herald"), lab.measure(scene, "het(100)"))[0]
        beside = f"against `het(100)`, which is inexact: {relaxed}"
        yield Line("step time against HET in BSP, `vanilla`", data, paper, *ours, beside)
    scene = Scene("criteo-kaggle", "dc-8", 512, 1024, short, occurring=10)
    base_kinds = kinds(lab.measure(scene, "vanilla"))
    for part, (policy, cuts) in ABLATION.items():
        rows = kinds(lab.measure(scene, policy))
        found = [cut(*pair) for pair in zip(rows, base_kinds, strict=True)]
        cells = ["/".join(text) for text in (map(str, cuts), (text for text, _ in found))]
        yield Line(
            f"cut of pulls/pushes/all, {part}", scene.data, f"{cells[0]} %", cells[1], found[2][1]
        )
    for share in PAPER_CACHES:
        sized = scene._replace(occurring=share)
        rows_base = rows_moved(lab.measure(sized, "vanilla"))
        ours = cut(rows_moved(lab.measure(sized, "herald")), rows_base)
        yield Line(f"transmissions, caches of {share} %", scene.data, papers.SEE, *ours)


def esd(lab: Lab) -> Iterator[Line]:
    """ESD: cost and step time on unequal links against Herald."""
    for data in lab.sets(*PRESETS, ADKDD):
        scene = Scene(data, "edge-8", 512, 1024, lab.lengths.short, occurring=10)
        ours, base = lab.measure(scene, "esd(1)"), lab.measure(scene, "herald")
        cost = cut(ours.transmission_cost_s, base.transmission_cost_s)
        yield Line("transmission cost against `herald`", data, "up to -36.76 %", *cost)
        yield Line("step time against `herald`", data, "up to 1.74x", *speed_up(ours, base))


def replicas(lab: Lab, policy: str, headlines: Mapping[str, tuple[str, str]]) -> Iterator[Line]:
    """A system with replicated hot rows, on workers of one host, in long runs."""
    for data in lab.sets(*BOX_SETS):
        scene = Scene(data, "box-4", 64, 1024, lab.lengths.long)
        ours = lab.measure(scene, policy)
        share = ours.hot_steps / ours.steps
        beside = f"{share:.0%} of the batches hot, {ours.replicated_rows:,} rows on every worker"
        for base, (text, paper) in headlines.items():
            gain = speed_up(ours, lab.measure(scene, base))
            yield Line(f"step time against {text}", data, paper, *gain, beside)


def serial_step_s(lab: Lab, scene: Scene, policy: str) -> float:
    """Mean step time of a policy whose rows move only between computes."""
    job = lab.job(scene)
    reports = simulate_steps(make_policy(policy), job)
    moved = [nothing_hidden(report.traffic) for report in reports if report.step >= job.warmup]
    return float(np.mean([step_time(one, job.setup.cluster).total_s for one in moved]))


def bagpipe(lab: Lab) -> Iterator[Line]:
    """BagPipe: step time beside a plain server that overlaps transfers too, or does not."""
    for data in lab.sets("criteo-kaggle", "avazu", ADKDD):
        scene = Scene(data, "1 Gbit/s", 64, 1024, lab.lengths.short, COMPUTE_S)
        ours, base = lab.measure(scene, "bagpipe"), lab.measure(scene, "nocache")
        least = COMPUTE_S * scene.batch / 8
        most = f"steps without any row: {base.step_time_s / least:.2f}x"
        yield Line("step time against `nocache`", data, "up to 5.6x", *speed_up(ours, base), most)
        slow = serial_step_s(lab, scene, "nocache")
        ratio = slow / ours.step_time_s
        yield Line(
            "the same, if rows of `nocache` move only between computes",
            data,
            "up to 5.6x",
            f"{ratio:.2f}x",
            verdict(ratio - 1),
            f"steps without any row: {slow / least:.2f}x",
        )


FAE_BASES = {
    "nocache": ("`nocache`", "2.3x (XDL, CPU only), 1.52x (XDL, CPU and GPU)"),
    "vanilla": ("`vanilla`", papers.SEE),
}
SCARS_BASES = {
    "nocache": ("`nocache`", "up to 6x throughput (Criteo Terabyte)"),
    "vanilla": ("`vanilla`", papers.SEE),
}


def sections(lab: Lab, auc_page: Path | None) -> dict[str, tuple[str, list[Line]]]:
    """The paper's setting and the lines of each system, by title."""
    box = "Here: `box-4` (four workers of one host with NVLink, the shard on another host at 100 "
    box += f"Gbit/s), 4 x 256 samples, width 64, caches of 10 % of all rows, {lab.lengths.long:,} "
    box += "steps, no compute."
    caches = "caches of 10 % of the rows that occur in the steps"
    return {
        papers.HET: (
            f"Paper: {papers.HET_SETTING}. Here: the same, all links equal; step times with "
            f"{1e3 * COMPUTE_S:g} ms of compute a sample.",
            [*het(lab), *auc(auc_page)],
        ),
        papers.HERALD: (
            f"Paper: {papers.HERALD_SETTING}. Here: `dc-8`, width 512, 8 x 128 samples (8 x 256 "
            f"for step times), {caches}, no compute. The paper ran HET in BSP, which is `vanilla`.",
            list(herald(lab)),
        ),
        papers.ESD: (
            f"Paper: {papers.ESD_SETTING}. Here: `edge-8`, width 512, 8 x 128 samples, "
            f"{caches}, no compute. `herald` stands for the state of the art.",
            list(esd(lab)),
        ),
        papers.FAE: (f"Paper: {papers.FAE_SETTING}. {box}", [*replicas(lab, "fae", FAE_BASES)]),
        papers.SCARS: (
            f"Paper: {papers.SCARS_SETTING}. {box}",
            [*replicas(lab, "scars", SCARS_BASES)],
        ),
        "BagPipe, SOSP 2023": (
            "Paper: its setting is not known here. Here: 8 workers on links of 1 Gbit/s (at 10 "
            "Gbit/s and on `dc-8` short trials showed no difference: 1.00x), width "
            f"64, 8 x 128 samples, caches of 10 % of all rows, {1e3 * COMPUTE_S:g} ms of compute a "
            "sample.",
            list(bagpipe(lab)),
        ),
    }


def body(lab: Lab, auc_page: Path | None) -> str:
    """A table for each system."""
    parts = [
        "Figures of papers are quoted where we know them. *Direction*: whether the sign of our "
        f"difference is the paper's; differences below {SAME:.1%} have none. *Beside it*: a "
        "measured quantity that bounds or explains the size. Rows count pulls, pushes and the "
        f"difference of drains. SGD. {lab.lengths.short} steps, if nothing else is said, a third "
        "of them warm-up. Without compute, ratios of step times are the largest possible."
    ]
    for title, (setting, lines) in sections(lab, auc_page).items():
        # Without a paper's figure there is nothing to agree with.
        known = [x._replace(direction="") if x.paper == papers.SEE else x for x in lines]
        parts.append(f"## {title}\n\n{setting}\n\n{markdown(HEADINGS, known)}")
    return "\n\n".join(parts)


def newest(benchmark: str) -> Path | None:
    """The newest page of a benchmark."""
    return max(RESULTS.glob(f"{benchmark}-????-??-??.md"), default=None)


def sources_of(names: tuple[str, ...], folder: Path | None, quick: bool) -> dict[str, Source]:
    """Presets, and the ads trace if its folder is given."""
    options = f"(samples={QUICK_SAMPLES})" if quick else ""
    sources: dict[str, Source] = {name: open_source(f"{name}{options}") for name in names}
    if folder:
        ads = DataOptions(categorical=("all",))
        sources[ADKDD] = open_source(str(folder / "criteo_adkdd21" / "X_train.csv.gz"), ads)
    return sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="Folder of the trace criteo_adkdd21.")
    parser.add_argument("--steps", type=int, default=Lengths().long, help="of the long runs")
    parser.add_argument("--quick", action="store_true", help="few steps of small logs")
    args = parser.parse_args()
    lengths = Lengths(60, 30) if args.quick else Lengths(args.steps)
    lab = Lab(sources_of(PRESETS, args.data, args.quick), lengths)
    record("headlines", "Headlines of the published systems", body(lab, newest("staleness")))


if __name__ == "__main__":
    main()
