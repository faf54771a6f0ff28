"""The portable sockets beside the two transports that they replaced, by the step of training.

Run `python -m benchmarks.transports --before CHECKOUT` as root. CHECKOUT holds commit ab4c296,
which has sockets driven by a compiled kernel, and Gloo: `git worktree add CHECKOUT ab4c296`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.ranks import environment, free_port
from benchmarks.record import markdown, record
from benchmarks.testbed import SHARD_ADDRESS, inside, shaped_links
from benchmarks.versions import HERE, commit_of
from benchmarks.workload import Case

PORTABLE, COMPILED, GLOO = "portable", "compiled", "Gloo"
VARIABLE = "EMBROUTE_EXCHANGE"  # by which the earlier commit chooses; the portable version has none
TWO = Case("embroute", "vanilla", 0.1, steps=300, warmup=0, distinct_batches=16)
JOBS: Mapping[str, tuple[str, Case]] = {
    "2 workers x 1024, loopback": ("loopback", TWO),
    "2 workers x 1024, 1gbit": ("1gbit", TWO),
    "2 workers x 1024, 0.1gbit": ("0.1gbit", replace(TWO, steps=150)),
    "4 workers x 512, 1gbit": ("1gbit", replace(TWO, workers=4, batch=512)),
}
SLICE_S = 2.0  # that a contender runs while the others are stopped
START_S = 60.0  # for ranks to find each other; a stop before that would look like a lost rank
FEWEST = 4  # steps in a slice that counts
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Contender:
    """The running ranks of one transport, and the slices in which they ran."""

    name: str
    ranks: list[subprocess.Popen[str]]
    errors: TextIO
    slices: list[tuple[float, float, float]] = field(default_factory=list)  # begin, end, CPU s

    @property
    def runs(self) -> bool:
        """Whether a rank has not ended."""
        return any(rank.poll() is None for rank in self.ranks)

    def signal(self, number: int) -> None:
        """Send a signal to every rank that has not ended."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def run_slice(self) -> None:
        """Let the ranks run for a while; a job that has ended gives its time to the others."""
        if not self.runs:
            self.slices.append((0.0, 0.0, 0.0))
            return
        self.signal(signal.SIGCONT)
        began, cpu = time.perf_counter(), self._cpu_s()
        time.sleep(SLICE_S)
        self.signal(signal.SIGSTOP)
        self.slices.append((began, time.perf_counter(), self._cpu_s() - cpu))

    def _cpu_s(self) -> float:
        """Processor time of all ranks."""
        return sum(_cpu_s(rank.pid) for rank in self.ranks if rank.poll() is None)

    def prices(self) -> list[tuple[float, float]]:
        """Median milliseconds of a step in each slice, and processor time; NaN in other slices."""
        output = self.ranks[-1].communicate()[0]
        if not output:
            self.errors.seek(0)
            raise RuntimeError(f"{self.name}: {self.errors.read()[-3000:]}")
        said = json.loads(output.splitlines()[-1])
        # The first step counts from the clock's zero, so that the sums are times of that clock.
        end_N = 1e-3 * np.cumsum(said["step_ms"])
        found = []
        for began, ended, cpu_s in self.slices:
            inside_N = end_N[(began < end_N) & (end_N < ended)]
            if len(inside_N) < FEWEST:
                found.append((np.nan, np.nan))
            else:
                steps = (ended - began) / np.diff(inside_N).mean()
                found.append((1e3 * float(np.median(np.diff(inside_N))), 1e3 * cpu_s / steps))
        return found


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS_PER_S


@contextmanager
def started(name: str, folder: Path, value: str, job: tuple[str, Case]) -> Iterator[Contender]:
    """The ranks of a contender."""
    (link, case), port = job, free_port()
    size, store, prefixes = case.workers + 2, None, list[list[str]]()
    address = SHARD_ADDRESS
    if link == "loopback":
        address = "127.0.0.1"
        store = TCPStore(address, port, is_master=True, wait_for_workers=False)
    else:
        prefixes = [
            inside(node) for node in ("shard", "shard", *map("w{}".format, range(case.workers)))
        ]
    changes = {VARIABLE: value, "PYTHONPATH": str(folder)}
    changes["TORCHELASTIC_USE_AGENT_STORE"] = str(store is not None)
    command = [sys.executable, "-m", "benchmarks.contenders", json.dumps(asdict(case))]
    with tempfile.TemporaryFile("w+") as errors:
        ranks = [
            subprocess.Popen(
                [*(prefixes[rank] if prefixes else ()), *command],
                cwd=folder,
                env=environment(rank, size, address, port) | changes,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            yield Contender(name, ranks, errors)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def measure(before: Path, job: tuple[str, Case]) -> list[str]:
    """Medians of each transport over the slices, and ratios of the portable one to the others."""
    ways = ((PORTABLE, HERE, ""), (COMPILED, before, "sockets"), (GLOO, before, "gloo"))
    with ExitStack() as stack:
        if job[0] != "loopback":
            stack.enter_context(shaped_links([job[0]] * job[1].workers))
        contenders = [stack.enter_context(started(*way, job)) for way in ways]
        time.sleep(START_S)
        for contender in contenders:
            contender.signal(signal.SIGSTOP)
        while any(contender.runs for contender in contenders):
            for contender in contenders:
                contender.run_slice()
        return summary([contender.prices() for contender in contenders])


def summary(prices: Sequence[Sequence[tuple[float, float]]]) -> list[str]:
    """The cells of a line: rounds in which all contenders ran, medians, and medians of ratios."""
    price_CR2 = np.array(prices)  # contenders x rounds x (step, processor time)
    price_CR2 = price_CR2[:, ~np.isnan(price_CR2).any((0, 2))]
    if not price_CR2.shape[1]:
        raise RuntimeError("the jobs never trained in the same round: let them take more steps")
    cells = [str(price_CR2.shape[1])]
    for kind in range(2):
        price_CR = price_CR2[:, :, kind]
        cells += [f"{ms:.1f}" for ms in np.median(price_CR, 1)]
        for other in (1, 2):
            low, middle, high = np.quantile(price_CR[0] / price_CR[other], [0.25, 0.5, 0.75])
            cells.append(f"{middle:.3f} ({low:.2f} to {high:.2f})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="files of commit ab4c296")
    parser.add_argument("--only", default="", help="jobs with this in their names")
    args = parser.parse_args()
    before, rows = args.before.resolve(), []
    for name, job in JOBS.items():
        if args.only in name:
            rows.append([name, *measure(before, job)])
            print(*rows[-1], sep=" | ", flush=True)
    ratios = [f"portable / {other}" for other in (COMPILED, GLOO)]
    headings = [*(f"{name}, ms" for name in (PORTABLE, COMPILED, GLOO)), *ratios]
    headings = ["job", "rounds", *headings, *(f"CPU {heading}" for heading in headings)]
    message = (
        "DLRM, 26 tables, 1,000,000 rows in all, dim 32, policy vanilla with caches of 10 %, a "
        "shard and a coordinator beside the workers on two cores. Portable: this version, sockets "
        "driven from Python, with a header on every message. Compiled: sockets driven by a numba "
        f"kernel, and Gloo, both of commit {commit_of(before)}, without headers. On loopback, "
        "portable and compiled move rows through shared memory, and their tokens through sockets. "
        f"The three jobs run in turns of {SLICE_S:g} s; the other two are stopped meanwhile. "
        "Medians over the rounds in which all three ran; a ratio is the median of the rounds' "
        "ratios, with their middle half in brackets. CPU: processor time of all ranks in a step."
    )
    record("transports", "Three transports in turns", f"{message}\n\n{markdown(headings, rows)}")


if __name__ == "__main__":
    main()
