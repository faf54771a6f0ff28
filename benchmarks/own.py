"""Our own policy beside the published ones: transmission cost, rows moved, step time.

Run `python -m benchmarks.own --data FOLDER`. FOLDER holds criteo_adkdd21 and globo.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.record import markdown, record
from benchmarks.sanity import opened_traces
from embroute.config.cluster_file import open_cluster
from embroute.cost.inside import PULLS, PUSHES
from embroute.cost.step_time import Traffic, step_time
from embroute.data.batch import Source
from embroute.data.open import open_source
from embroute.kernels.codes import EARLY, LATE, URGENT
from embroute.planner.interfaces import Policy
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.policies.embroute.dispatch import search_dispatch
from embroute.policies.embroute.row_allreduce import on_demand_with_allreduce
from embroute.policies.embroute.search_state import SearchOptions
from embroute.policies.evict import stale_first
from embroute.simulator.simulation import (
    Outcome,
    Workload,
    measure,
    measure_named,
    simulate_steps,
    with_workers,
)

RIVALS = ("esd(1)", "herald", "esd(1, workers=fast)", "herald(workers=fast)")
ALIKE = tuple(  # the same with the transfers of embroute: pulls beside pushes, new rows made
    f"dispatch={name} sync=pipelined(init=local){workers}"
    for name in ("esd(1)", "herald")
    for workers in ("", " workers=fast")
)
EFFORTS = (100, 350, 500, 700, 900, 1400, 2400, 4800)
WINDOWS = (0, 1, 5, 14, 20, 100)
A_BATCH = 140  # effort for each batch of a window
COMPUTE_S = 0.05e-3


def job(source: Source, network: str, dim: int = 64, compute_s: float = 0.0) -> Workload:
    """90 steps of 8 x 128 samples, 10 of them warm-up, caches of 10 %."""
    cluster = replace(open_cluster(network), compute_s_per_sample=compute_s)
    return Workload(source, Setup(source.schema, cluster, dim))


def rows_moved(outcome: Outcome) -> int:
    """Rows of all transfers, with the difference of drains."""
    return int(outcome.traffic.rows_WKIP.sum() + outcome.drain_rows_W.sum())


def figures(source: Source, costs: str, times: Sequence[str]) -> tuple[float, float, float]:
    """Transmission cost and moved rows of one policy, least step time of several."""
    timed = job(source, "edge-8", 512, COMPUTE_S)
    return (
        measure_named(costs, job(source, "edge-8")).transmission_cost_s,
        rows_moved(measure_named(costs, job(source, "dc-8"))),
        min(measure_named(name, timed).step_time_s for name in times),
    )


def nothing_hidden(moved: Traffic) -> Traffic:
    """The same traffic with pulls after pushes, and with pushes (but lazy ones) after compute."""
    bytes_WKIP = moved.bytes_WKIP.copy()
    for kinds, phase in ((PULLS, LATE), (PUSHES, URGENT)):
        bytes_WKIP[:, :, kinds, phase] += bytes_WKIP[:, :, kinds, EARLY]
        bytes_WKIP[:, :, kinds, EARLY] = 0
    return replace(moved, bytes_WKIP=bytes_WKIP)


def one_after_the_other(source: Source) -> float:
    """Least step time of esd(1) and herald on any number of workers, without overlap."""
    timed = job(source, "edge-8", 512, COMPUTE_S)
    cluster = timed.setup.cluster
    found = []
    for name in RIVALS[:2]:
        for count in range(1, cluster.num_workers + 1):
            fastest = sorted(int(w) for w in cluster.fastest_first[:count])
            some = with_workers(timed, tuple(fastest))
            try:
                reports = [
                    r for r in simulate_steps(make_policy(name), some) if r.step >= some.warmup
                ]
            except ValueError:
                continue  # the caches of so few workers do not hold a step
            links = some.setup.cluster
            times = [step_time(nothing_hidden(r.traffic), links).total_s for r in reports]
            found.append(float(np.mean(times)))
    return min(found)


def ratios(name: str, source: Source) -> list[list[str]]:
    """Cost, rows and step time over those of others, in several variants."""
    own = figures(source, "embroute(objective=cost)", ["embroute"])
    pulled = figures(source, "embroute(objective=cost, init=pull)", ["embroute(init=pull)"])
    published, alike = figures(source, RIVALS[0], RIVALS), figures(source, ALIKE[0], ALIKE)
    apart = (*published[:2], one_after_the_other(source))
    pairs = {
        "over the published": (own, published),
        "over the published that pull, compute and push in turn": (own, apart),
        "new rows pulled, over the published": (pulled, published),
        "over the published with its transfers": (own, alike),
    }
    return [
        [name, about, *(f"{mine / its:.3f}" for mine, its in zip(*pair, strict=True))]
        for about, pair in pairs.items()
    ]


def curve(name: str, source: Source) -> list[list[str]]:
    """Transmission cost over that of esd(1) and milliseconds per step, by effort."""
    edge = job(source, "edge-8")
    esd = measure_named("esd(1)", edge).transmission_cost_s
    rows = []
    for effort in EFFORTS:
        own = measure_named(f"embroute(objective=cost, effort={effort})", edge)
        ratio, spent = own.transmission_cost_s / esd, own.decision_ms
        rows.append([name, str(effort), f"{ratio:.3f}", f"{spent:.0f}"])
    return rows


def windows(name: str, source: Source) -> list[list[str]]:
    """The same by window: with an effort that grows with the window, and with the default one."""
    edge = job(source, "edge-8")
    esd = measure_named("esd(1)", edge).transmission_cost_s
    rows = []
    for ahead in WINDOWS:
        spent = []
        for effort in (A_BATCH * (ahead + 1), SearchOptions.effort):
            search = SearchOptions(
                effort, ahead, max_window=2**31, minimize_time=False, free_quotas=False
            )
            own = measure(
                Policy("own", search_dispatch(search), on_demand_with_allreduce(), stale_first()),
                edge,
            )
            spent += [f"{own.transmission_cost_s / esd:.3f}", f"{own.decision_ms:.0f}"]
        rows.append([name, str(ahead), *spent])
    return rows


def many(source: Source) -> str:
    """Milliseconds of a step with 32 workers of 128 samples each."""
    setup = Setup(source.schema, open_cluster("edge-32"), batch_size=32 * 128)
    outcome = measure_named("embroute(objective=cost)", Workload(source, setup, 30, 10))
    return f"{outcome.decision_ms:.0f}"


def main() -> None:
    with opened_traces(argparse.ArgumentParser(description=__doc__)) as (_, sources):
        sources["synthetic criteo-kaggle"] = open_source("criteo-kaggle")
        table = [row for name, source in sources.items() for row in ratios(name, source)]
        curves = [row for name, source in sources.items() for row in curve(name, source)]
        looks = [row for name, source in sources.items() for row in windows(name, source)]
        crowd = many(sources["synthetic criteo-kaggle"])
    message = (
        "8 workers x 128 samples, caches of 10 %, 90 steps of which 10 warm-up. Cost (edge-8, dim "
        "64, equal quotas) and rows (dc-8) over `esd(1)`; step time (edge-8, dim 512, 0.05 ms per "
        "sample, free quotas) over the best of `esd(1)`, `herald` and their `workers=fast`. "
        "`embroute` computes the initial values of new rows instead of pulling them. Second line: "
        "the engine overlaps transfers with compute for every policy; here rows of ESD and Herald "
        "move between computes only, as Herald pushes rows (on any number of workers). Third: "
        "`embroute` pulls new rows. Fourth: the other policies with the transfers of `embroute`, "
        "`sync=pipelined(init=local)`."
    )
    headings = ["trace", "embroute", "transmission cost", "rows moved", "step time"]
    by_effort = markdown(["trace", "effort", "cost over esd(1)", "ms per step"], curves)
    grown, fixed = f"effort {A_BATCH} a batch", f"effort {SearchOptions.effort}"
    looked = ["trace", "batches ahead", f"cost, {grown}", "ms", f"cost, {fixed}", "ms"]
    more = (
        f"By window. All of it is assigned at once if the effort suffices to read every batch:\n\n"
        f"{markdown(looked, looks)}\n\n32 workers x 128 samples x 26 look-ups: {crowd} ms a step."
    )
    record(
        "own",
        "Our own policy",
        f"{message}\n\n{markdown(headings, table)}\n\n{by_effort}\n\n{more}",
    )


if __name__ == "__main__":
    main()
