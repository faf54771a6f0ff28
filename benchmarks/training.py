"""A step of training beside TorchRec's: milliseconds beyond the dense part, and where they go.

Run `python -m benchmarks.training`; `--shaped` measures over shaped links, and needs root. Without
TorchRec in the environment, only the other contenders are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec

import numpy as np

from benchmarks import workload
from benchmarks.ranks import run_ranks
from benchmarks.record import markdown, record
from benchmarks.testbed import SHARD_ADDRESS, WORKER_ADDRESS, inside, shaped_links
from benchmarks.workload import Case

Found = list[dict[str, object]]  # what each rank found

CASES: Mapping[str, Case] = {
    "dense part alone": Case("dense"),
    "embroute esd(1), cache 100 %": Case("embroute", "esd(1)", 1.0),
    "embroute esd(1), cache 10 %": Case("embroute", "esd(1)", 0.1),
    "embroute in blocks, cache 100 %": Case("embroute", "dispatch=block sync=on-demand", 1.0),
    "embroute vanilla, cache 100 %": Case("embroute", "vanilla", 1.0),
    "embroute vanilla, cache 10 %": Case("embroute", "vanilla", 0.1),
    "embroute in-place": Case("embroute", "in-place"),
    "TorchRec table-wise": Case("torchrec", "table-wise"),
    "TorchRec row-wise": Case("torchrec", "row-wise"),
}
EIGHT = Case("embroute", "esd(1)", 0.1, workers=8, batch=128, steps=90, warmup=40)
DENSE = next(iter(CASES))
SHAPED = ("embroute esd(1), cache 100 %", "TorchRec table-wise", "TorchRec row-wise")
RATES = ("1gbit", "0.1gbit")
SHAPED_NOTE = (
    "The model of training.py, 2 workers x 1024, each behind its own link; embroute's shard and "
    "coordinator on a host at 10 Gbit/s. Whole steps, the dense part and its all-reduce included."
)
PHASE_NOTE = "Wall-clock ms per step over all steps, warm-up and waiting for other ranks included."
PHASES = {
    "coordinator": ("decide", "write", "tell"),
    "shard": ("early", "urgent"),
    "worker": ("early", "urgent", "update"),
}


def measure(case: Case) -> Found:
    """All ranks of a case; embroute has a coordinator and a shard beside its workers."""
    extra = 2 if case.contender == "embroute" else 0
    return run_ranks("benchmarks.contenders", asdict(case), case.workers + extra)


def measure_shaped(case: Case, rate: str) -> Found:
    """All ranks of a case, each worker behind its own link; shard and coordinator share a host."""
    prefixes = [inside(f"w{i}") for i in range(case.workers)]
    address = WORKER_ADDRESS
    if case.contender == "embroute":
        prefixes, address = [inside("shard"), inside("shard"), *prefixes], SHARD_ADDRESS
    with shaped_links([rate] * case.workers):
        return run_ranks("benchmarks.contenders", asdict(case), len(prefixes), prefixes, address)


def shaped(rounds: int, cases: Mapping[str, Case]) -> str:
    """Milliseconds of a step over shaped links, contenders in turns."""
    chosen = {
        name: replace(case, steps=70, warmup=30) for name, case in cases.items() if name in SHAPED
    }
    rows = []
    for rate in RATES:
        results: dict[str, list[Found]] = {name: [] for name in chosen}
        for turn in range(rounds):
            for name, case in chosen.items():
                results[name].append(measure_shaped(case, rate))
                print(rate, turn, name, f"{step_ms(results[name]):.1f} ms", flush=True)
        theirs = min(
            (step_ms(runs) for name, runs in results.items() if name.startswith("TorchRec")),
            default=float("nan"),
        )
        for name, runs in results.items():
            rows.append([rate, name, f"{step_ms(runs):.1f}", f"{step_ms(runs) / theirs:.2f}"])
    return markdown(["links", "contender", "ms/step", "of TorchRec's better"], rows)


def step_ms(runs: Sequence[Found]) -> float:
    """Median over the steps of all runs, measured by the last worker."""
    return float(np.median(np.concatenate([np.array(run[-1]["step_ms"]) for run in runs])))


def cpu_ms(runs: Sequence[Found]) -> float:
    """Processor time of a step, all ranks together."""
    return float(np.median([sum(float(str(rank["cpu_ms"])) for rank in run) for run in runs]))


Results = Mapping[str, Sequence[tuple[Found, Found]]]  # each run, and the dense part before it


def beyond(runs: Sequence[tuple[Found, Found]], price: Callable[[Sequence[Found]], float]) -> float:
    """The price of runs beyond the dense part that was measured just before each."""
    return float(np.median([price([run]) - price([dense]) for run, dense in runs]))


def table(results: Results) -> str:
    taken = {name: beyond(runs, step_ms) for name, runs in results.items()}
    theirs = [ms for name, ms in taken.items() if name.startswith("TorchRec")]
    dense = [run for runs in results.values() for _, run in runs]
    rows = [[DENSE, f"{step_ms(dense):.1f}", "", "", f"{cpu_ms(dense):.1f}", ""]]
    for name, pairs in results.items():
        runs = [run for run, _ in pairs]
        rows.append(
            [
                name,
                f"{step_ms(runs):.1f}",
                f"{taken[name]:.1f}",
                f"{taken[name] / min(theirs):.2f}" if theirs else "",
                f"{cpu_ms(runs):.1f}",
                f"{beyond(pairs, cpu_ms):.1f}",
            ]
        )
    ratio = "of TorchRec's better (target 0.5)"
    headings = ["contender", "ms/step", "beyond dense", ratio, "CPU ms/step", "CPU beyond dense"]
    return markdown(headings, rows)


def spent(runs: Sequence[Found], rank: int, phase: str) -> str:
    """Median milliseconds of a phase."""
    found = []
    for run in runs:
        own = run[rank]["spent_ms"]
        assert isinstance(own, dict)
        found.append(float(own[phase]))
    return f"{np.median(found):.1f}"


def phases(results: Results) -> str:
    """Wall-clock milliseconds of each phase and step, by role, with waiting for other ranks."""
    headings = ["embroute", *(f"{role} {p}" for role, own in PHASES.items() for p in own)]
    rows = []
    for name, pairs in results.items():
        runs = [run for run, _ in pairs]
        if "spent_ms" not in runs[-1][0]:
            continue
        cells = [
            spent(runs, rank, phase) for rank, own in enumerate(PHASES.values()) for phase in own
        ]
        moved = np.median([float(str(run[2]["rows"])) for run in runs])
        rows.append([name, *cells, f"{moved:,.0f}"])
    return markdown([*headings, "rows moved by a worker"], rows)


def coordinator(runs: Sequence[Found]) -> str:
    """Processor time of the coordinator at eight workers, beside a step of the workers."""
    cpu = np.median([float(str(run[0]["cpu_ms"])) for run in runs])
    name = "esd(1), 8 x 128 x 26, cache 10 %"
    row = [name, *(spent(runs, 0, phase) for phase in ("decide", "write")), f"{cpu:.1f}"]
    headings = ["coordinator", "decide ms", "write ms", "CPU ms/step", "workers' step ms"]
    return markdown(headings, [[*row, f"{step_ms(runs):.1f}"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders with one of these in their names; ;")
    parser.add_argument("--shaped", action="store_true", help="over shaped links; needs root")
    given = parser.parse_args()
    cases = {
        name: case
        for name, case in CASES.items()
        if case.contender != "torchrec" or find_spec("torchrec")
    }
    if given.shaped:
        found = shaped(given.rounds, cases)
        record("training-shaped", "Training over shaped links", f"{SHAPED_NOTE}\n\n{found}")
        return
    chosen = [word.strip() for word in given.only.split(";")]
    names = [n for n in cases if n != DENSE and any(word in n for word in chosen)]
    results: dict[str, list[tuple[Found, Found]]] = {name: [] for name in names}
    for turn in range(given.rounds):
        for name in names:
            dense, run = measure(cases[DENSE]), measure(cases[name])
            results[name].append((run, dense))
            print(turn, name, f"{step_ms([dense]):.1f} {step_ms([run]):.1f} ms", flush=True)
    eight = [measure(EIGHT)]
    message = (
        f"DLRM, {workload.NUM_TABLES} tables, {workload.NUM_ROWS:,} rows in all, dim "
        f"{workload.DIM}, MLPs {workload.HIDDEN}, SGD; 2 workers x 1024 on loopback, one thread a "
        f"rank; embroute with a shard and a coordinator beside them, on the same cores. Ids: "
        f"Criteo's laws on tables of equal size. TorchRec in a plain loop with its fused optimizer "
        f"and plans by hand; its pipeline was not tried. Medians over the steps after the warm-up "
        f"of {given.rounds} rounds. Contenders take turns, each right after the dense part alone; "
        f"beyond dense: the median difference over rounds. CPU: processor time of all ranks, "
        f"which other users of the machine disturb less."
    )
    parts = [message, table(results), "## Where embroute's time goes", PHASE_NOTE, phases(results)]
    parts += ["## The coordinator at eight workers", coordinator(eight)]
    record("training", "Training beside TorchRec", "\n\n".join(parts))


if __name__ == "__main__":
    main()
