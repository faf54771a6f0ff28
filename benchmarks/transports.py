"""The portable sockets beside the two transports that they replaced, by the step of training.

Run `python -m benchmarks.transports --before CHECKOUT` as root. CHECKOUT holds commit ab4c296,
which has sockets driven by a compiled kernel, and Gloo: `git worktree add CHECKOUT ab4c296`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from benchmarks.ranks import run_ranks
from benchmarks.record import markdown, record
from benchmarks.testbed import SHARD_ADDRESS, inside, shaped_links
from benchmarks.versions import HERE, commit_of, version
from benchmarks.workload import Case

PORTABLE, COMPILED, GLOO = "portable", "compiled", "Gloo"
VARIABLE = "EMBROUTE_EXCHANGE"  # by which the earlier commit chooses; the portable version has none
LINKS = ("loopback", "1gbit", "0.1gbit")
STEPS, WARMUP, DISTINCT = 50, 20, 16  # batches, of which so many are distinct


def cases() -> Mapping[str, tuple[str, Case]]:
    """The link and the job of each comparison."""
    two = Case("embroute", "vanilla", 0.1, 2, 1024, STEPS, WARMUP, DISTINCT)
    four = replace(two, workers=4, batch=512)
    jobs = {f"2 workers x 1024, {link}": (link, two) for link in LINKS}
    return {**jobs, "4 workers x 512, 1gbit": ("1gbit", four)}


def measure(folder: Path, case: Case, link: str) -> tuple[float, float]:
    """Milliseconds of a step: median at the last worker, and processor time of all ranks."""
    given, size = asdict(case), case.workers + 2
    with version(folder):
        if link == "loopback":
            ranks = run_ranks("benchmarks.contenders", given, size)
        else:
            with shaped_links([link] * case.workers):
                names = ["shard", "shard", *(f"w{i}" for i in range(case.workers))]
                prefixes = [inside(name) for name in names]
                ranks = run_ranks("benchmarks.contenders", given, size, prefixes, SHARD_ADDRESS)
    times = ranks[-1]["step_ms"]
    assert isinstance(times, list)
    return float(np.median(times)), sum(float(str(rank["cpu_ms"])) for rank in ranks)


def measure_all(before: Path, case: Case, link: str, first: int) -> list[tuple[float, float]]:
    """The three transports, one after the other, beginning with the first in this round."""
    ways = [(PORTABLE, HERE, ""), (COMPILED, before, "sockets"), (GLOO, before, "gloo")]
    found = dict[str, tuple[float, float]]()
    for turn in range(len(ways)):
        name, folder, os.environ[VARIABLE] = ways[(first + turn) % len(ways)]
        found[name] = measure(folder, case, link)
        print(link, case.workers, name, *(f"{ms:.1f}" for ms in found[name]), flush=True)
    return [found[name] for name, _, _ in ways]


def summary(rounds: list[list[tuple[float, float]]]) -> list[str]:
    """Medians of each transport, and ratios of the portable one to the others."""
    turn_RT2 = np.array(rounds)  # rounds x transports x (step, processor time)
    ratio_RT2 = turn_RT2[:, :1] / turn_RT2[:, 1:]
    cells = []
    for price in range(2):
        cells += [f"{ms:.1f}" for ms in np.median(turn_RT2[:, :, price], 0)]
        for other in range(2):
            ratio_R = ratio_RT2[:, other, price]
            cells.append(f"{np.median(ratio_R):.3f} ({ratio_R.min():.2f} to {ratio_R.max():.2f})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="files of commit ab4c296")
    parser.add_argument("--minutes", type=float, default=60, help="begin no further round then")
    args = parser.parse_args()
    before = args.before.resolve()
    until = time.monotonic() + 60 * args.minutes
    rounds: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in cases()}
    while time.monotonic() < until:
        for name, (link, case) in cases().items():
            if time.monotonic() < until:
                rounds[name].append(measure_all(before, case, link, len(rounds[name])))
    rows = [[name, len(each), *summary(each)] for name, each in rounds.items() if each]
    ratios = [f"portable / {other}" for other in (COMPILED, GLOO)]
    headings = ["job", "rounds", *(f"{name}, ms" for name in (PORTABLE, COMPILED, GLOO)), *ratios]
    headings += [f"CPU {heading}" for heading in headings[2:]]
    message = (
        "DLRM, 26 tables, 1,000,000 rows in all, dim 32, policy vanilla with caches of 10 %, a "
        "shard and a coordinator beside the workers on two cores. Portable: this version, sockets "
        "driven from Python, with a header on every message. Compiled: sockets driven by a numba "
        f"kernel, and Gloo, both of commit {commit_of(before)}, without headers. On loopback, "
        "portable and compiled move rows through shared memory, and their tokens through sockets. "
        "Medians of rounds in which the three take turns, each first in every third round; a ratio "
        "is the median of the rounds' ratios, with the lowest and the highest in brackets. CPU: "
        "processor time of all ranks in a step, which other users of the machine disturb less."
    )
    table = markdown(headings, rows)
    record("transports", "Three transports, step by step", f"{message}\n\n{table}")


if __name__ == "__main__":
    main()
