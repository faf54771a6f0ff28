"""Speed of one worker with all rows cached, over that of a loop without ranks on the same model.

Run `python -m benchmarks.single`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.record import markdown, record
from benchmarks.training import Found, cpu_ms, measure, step_ms
from benchmarks.workload import Case

TARGET = 0.9
PLAIN = Case("plain", workers=1, distinct_batches=25, steps=110, warmup=50)
CASES = {
    "plain loop": PLAIN,
    "embroute vanilla": replace(PLAIN, contender="embroute", policy="vanilla"),
    "embroute esd(1)": replace(PLAIN, contender="embroute", policy="esd(1)"),
    "embroute in-place": replace(PLAIN, contender="embroute", policy="in-place"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    results: dict[str, list[Found]] = {name: [] for name in CASES}
    for turn in range(given.rounds):
        for name, case in CASES.items():
            results[name].append(measure(case))
            print(turn, name, f"{step_ms(results[name]):.1f} ms", flush=True)
    base = step_ms(results["plain loop"])
    rows = []
    for name, runs in results.items():
        worker = np.median([float(str(run[-1]["cpu_ms"])) for run in runs])
        ms, batch = step_ms(runs), CASES[name].batch
        cells = [f"{1e3 * batch / ms:,.0f}", f"{base / ms:.2f}", f"{worker:.1f}"]
        rows.append([name, *cells, f"{cpu_ms(runs):.1f}"])
    message = (
        "DLRM as in training.py, batch 1024, one thread a rank. The plain loop gathers rows and "
        "updates them in place with the same kernels, in one process. embroute: one worker, one "
        "shard, one coordinator; the stream repeats after 25 batches, so that every row is cached "
        f"when the clock starts. Medians over {given.rounds} rounds in turns."
    )
    share = f"share (target {TARGET:g})"
    headings = ["loop", "samples/s", share, "worker CPU ms/step", "CPU ms/step, all ranks"]
    record("single", "One worker, everything cached", f"{message}\n\n{markdown(headings, rows)}")


if __name__ == "__main__":
    main()
