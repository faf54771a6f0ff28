"""This version beside earlier ones: the same numbers, and steps that take no longer.

`python -m benchmarks.versions --before CHECKOUT`: a folder with another version's files; the
option may be repeated. With `--shaped` (as root) also over emulated links of 0.1 and 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.ranks import run_ranks
from benchmarks.record import markdown, record
from benchmarks.testbed import SHARD_ADDRESS, inside, shaped_links
from benchmarks.workload import Case

HERE = Path(__file__).parent.parent
TIMED = ("decide", "decision")  # what a clock says differs from run to run
# Versions have other defaults: name all that matter.
MODEL = "--dim 64 --optimizer sgd --compute-ms-per-sample 0"
COMPARISONS = (
    f"--data online-retail --steps 64 --warmup 16 --cache 0.1 {MODEL}",
    "--data online-retail --network dc-4 --dim 16 --cache 5% --optimizer sgd "
    "--compute-ms-per-sample 0",
    "--data criteo-kaggle(samples=40000) --network edge-4 --steps 24 --warmup 8 --cache 0.1 "
    "--dim 64 --optimizer sgd --compute-ms-per-sample 0.05",
)
SIMULATIONS = ("vanilla", "het(10)", "herald", "esd(1)", "embroute", "fae", "scars", "bagpipe")
CASES = {
    "vanilla": Case("embroute", "vanilla", 0.1, steps=90, warmup=40),
    "esd(1)": Case("embroute", "esd(1)", 0.1, steps=90, warmup=40),
    "in-place": Case("embroute", "in-place", steps=90, warmup=40),
}
LINKS = ("loopback", "1gbit", "0.1gbit")


@contextmanager
def version(folder: Path) -> Iterator[None]:
    """Programs that are started within are those of a checkout."""
    before, path = Path.cwd(), os.environ.get("PYTHONPATH", "")
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ["PYTHONPATH"] = path


def untimed(value: object) -> object:
    """A result without what a clock measured."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(word in k for word in TIMED)}
        return {k: untimed(v) for k, v in kept.items()}
    return [untimed(entry) for entry in value] if isinstance(value, list) else value


def command(folder: Path, *words: str) -> None:
    """Run a command of a checkout's program."""
    with version(folder):
        run = [sys.executable, "-m", "embroute", *words]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compared(folder: Path, options: str) -> object:
    """All that `embroute compare` says of a job."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.json"
        command(folder, "compare", *options.split(), "--json", str(out))
        return untimed(json.loads(out.read_text()))


def simulated(folder: Path, policy: str) -> object:
    """All that `embroute simulate` says of every step."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.csv"
        words = ["--data", "online-retail", "--policy", policy, "--steps", "40", "--warmup", "10"]
        words += ["--cache", "0.1", *MODEL.split()]
        command(folder, "simulate", *words, "--csv", str(out))
        with out.open() as file:
            return untimed(list(csv.DictReader(file)))


def verdict(now: object, then: object) -> str:
    """Whether two versions print the same."""
    return "equal" if now == then else "DIFFERENT"


def numbers(before: Sequence[Path]) -> str:
    """Whether the versions print the same numbers, job by job."""
    rows = []
    for options in COMPARISONS:
        now = compared(HERE, options)
        verdicts = [verdict(now, compared(folder, options)) for folder in before]
        rows.append([f"`compare {options}`", *verdicts])
    for policy in SIMULATIONS:
        now = simulated(HERE, policy)
        verdicts = [verdict(now, simulated(folder, policy)) for folder in before]
        rows.append([f"`simulate --policy '{policy}'`, every step", *verdicts])
    return markdown(["numbers of", *map(commit_of, before)], rows)


def step_ms(folder: Path, case: Case, link: str) -> float:
    """Median milliseconds of a step, as the last worker sees it."""
    size = case.workers + 2
    with version(folder):
        if link == "loopback":
            ranks = run_ranks("benchmarks.contenders", asdict(case), size)
        else:
            with shaped_links([link] * case.workers):
                workers = [inside(f"w{i}") for i in range(case.workers)]
                prefixes = [inside("shard"), inside("shard"), *workers]
                ranks = run_ranks(
                    "benchmarks.contenders", asdict(case), size, prefixes, SHARD_ADDRESS
                )
    times = ranks[-1]["step_ms"]
    assert isinstance(times, list)
    return float(np.median(times))


def steps(before: Sequence[Path], rounds: int, links: Sequence[str]) -> str:
    """Milliseconds of a step of all versions, in turns."""
    rows = []
    for link in links:
        for name, case in CASES.items():
            if name == "in-place" and link != "loopback":
                continue  # for workers of one machine
            turns = np.array(
                [[step_ms(folder, case, link) for folder in (HERE, *before)] for _ in range(rounds)]
            )
            medians = [f"{ms:.1f}" for ms in np.median(turns, 0)]
            ratios = [f"{ratio:.3f}" for ratio in np.median(turns[:, :1] / turns[:, 1:], 0)]
            print(link, name, *medians, *ratios, flush=True)
            rows.append([link, name, *medians, *ratios])
    commits = [commit_of(folder) for folder in before]
    headings = [f"{commit}, ms" for commit in commits], [f"now / {commit}" for commit in commits]
    return markdown(["link", "policy", "now, ms", *headings[0], *headings[1]], rows)


def commit_of(folder: Path) -> str:
    """The commit of a checkout."""
    words = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--before", type=Path, required=True, action="append", help="another version's files"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shaped", action="store_true", help="also over emulated links (root)")
    args = parser.parse_args()
    before = [folder.resolve() for folder in args.before]
    equal = numbers(before)
    print(equal, flush=True)
    measured = steps(before, args.rounds, LINKS if args.shaped else LINKS[:1])
    note = (
        f"Numbers: everything that a version prints, except times that a clock measured. Steps: "
        f"DLRM, 26 tables, 1,000,000 rows in all, dim 32, 2 workers x 1024, caches of 10 %, a "
        f"shard and a coordinator beside them on two cores; medians of {args.rounds} rounds in "
        f"which the versions take turns; a ratio is the median of the rounds' ratios (limit 1.03)."
    )
    record("versions", "This version beside earlier ones", f"{note}\n\n{equal}\n\n{measured}")


if __name__ == "__main__":
    main()
