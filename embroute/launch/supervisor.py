"""Start all ranks of a job on this machine, watch them, pass signals on, restart after failures.

Ranks meet in a private folder, so no process of the job listens on a network. Each rank writes why
it ended into that folder. One rank's failure ends all others, and only the first is reported.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from embroute.config.progress import StatusLines
from embroute.config.scratch import scratch_folder
from embroute.launch.process import PERMANENT, TRY_AGAIN, reason_file
from embroute.launch.rank import rank_names
from embroute.transport.job_store import (
    FOLDER,
    LAUNCHER,
    RESTART,
    RUN_ID,
    SECRET,
    SHARDS_VARIABLE,
    new_run_id,
)

SAVING_S = 3600.0  # time for the checkpoint after a signal
ENDING_S = 60.0  # time for ranks to end by themselves after one has failed
WATCH_POLL_S = 0.05
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Exit codes of ranks that ended because another rank, or this launcher, ended them.
_FOLLOWERS = (TRY_AGAIN, -signal.SIGTERM, 128 + signal.SIGTERM)


class RunFailedError(RuntimeError):
    """A job that failed; no rank is left."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StoppedError(RunFailedError):
    """A job that a signal ended."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}", 128 + number)


@dataclass(frozen=True)
class Failure:
    """The first rank that ended by its own fault."""

    name: str
    code: int  # as in subprocess: negative for a signal
    reason: str  # the rank's report; may be empty

    @property
    def text(self) -> str:
        """One line."""
        if self.reason:
            return self.reason
        if self.code < 0:
            return f"the run failed: {self.name} ended first (signal {-self.code})"
        above = f"exit code {self.code}; its messages are above"
        return f"the run failed: {self.name} ended first ({above})"

    def by_signal(self, numbers: Sequence[int]) -> bool:
        """Whether signals to the launcher explain the end of this rank."""
        codes = {code for number in numbers for code in (-number, 128 + number)}
        return self.code in {*codes, *_FOLLOWERS}

    @property
    def exit_code(self) -> int:
        """The launcher's own exit code: 128 + n for signal n, as in a shell."""
        return self.code if self.code > 0 else 128 - self.code


@contextmanager
def _collected_signals() -> Iterator[list[signal.Signals]]:
    """Signals to the launcher while the context is open; then the previous handlers return."""
    received: list[signal.Signals] = []

    def receive(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))

    previous = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Program:
    """The command of every rank, and the names of the ranks in the order of their numbers."""

    command: Sequence[str]
    ranks: Sequence[str]
    restarts: int = 0
    run_id: str = field(default_factory=new_run_id)
    environment: Mapping[str, str] = field(default_factory=dict)
    starting: str = ""  # what to say until a rank says what goes on; empty: nothing


def begin_to_tell() -> None:
    """From now on this rank says what goes on, not its launcher."""
    if FOLDER in os.environ:
        _begun(os.environ).touch()


def _begun(environment: Mapping[str, str]) -> Path:
    return Path(environment[FOLDER]) / f"begun-{environment[RESTART]}"


def script_ranks(workers: int, shards: int) -> tuple[list[str], dict[str, str]]:
    """The ranks of a script, and the variable that tells `prepare` the number of shards."""
    return rank_names(workers, shards), {SHARDS_VARIABLE: str(shards)}


def supervise(program: Program, again: Callable[[], str] = str) -> None:
    """Run a program's ranks to their end; `again` describes where a restart continues.

    An error that a restart would meet again ends the job at once.
    """
    with scratch_folder("job") as folder, _collected_signals() as signals:
        secret = secrets.token_hex(32)
        for attempt in range(program.restarts + 1):
            shared = {FOLDER: str(folder), LAUNCHER: str(os.getpid()), RUN_ID: program.run_id}
            shared |= {SECRET: secret, RESTART: str(attempt)}
            failure = RankProcesses(program, shared, signals).run()
            if signals and (failure is None or failure.by_signal(signals)):
                raise StoppedError(signals[0])
            if failure is None:
                return
            final = attempt == program.restarts or failure.code in PERMANENT
            if final or signals:
                raise RunFailedError(failure.text, failure.exit_code)
            restart = f"restart {attempt + 1} of {program.restarts}{again()}"
            print(f"embroute: {failure.text}; {restart}", file=sys.stderr, flush=True)


class RankProcesses:
    """The processes of one attempt."""

    def __init__(
        self, program: Program, shared: Mapping[str, str], signals: Sequence[signal.Signals]
    ) -> None:
        self._names, self._signals = program.ranks, signals
        self._shared = {**program.environment, **shared}
        self._passed_on = len(signals)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: list[int] = []  # ranks in the order of their ends
        self._deadline = math.inf  # for all ranks to end
        self._lines, self._starting = StatusLines(sys.stderr), program.starting
        if self._starting:
            self._lines.begin(self._starting)
        try:
            for rank in range(len(program.ranks)):
                environment = os.environ | self._environment(rank)
                self._processes.append(subprocess.Popen(program.command, env=environment))
        except BaseException:
            self._kill()
            raise

    def _environment(self, rank: int) -> dict[str, str]:
        size = str(len(self._names))
        return {
            **self._shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            # One thread per rank: several ranks share the machine's cores.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def run(self) -> Failure | None:
        """Wait for all ranks; returns the failure, if one of them failed."""
        try:
            while len(self._ended) < len(self._processes):
                self._poll()
                self._pass_signals_on()
                self._enforce_deadline()
                if self._ended or not _begun(self._shared).exists():
                    self._lines.poll()
                time.sleep(WATCH_POLL_S)
        except BaseException:
            self._kill()
            raise
        finally:
            self._lines.clear()
        return self._failure()

    def _enforce_deadline(self) -> None:
        """Kill the ranks that have not ended in time after a signal or another rank's failure."""
        if self._signals:
            self._deadline = min(self._deadline, time.monotonic() + SAVING_S)
        if any(self._processes[rank].returncode for rank in self._ended):
            if self._deadline == math.inf:
                self._send(signal.SIGTERM)
            self._deadline = min(self._deadline, time.monotonic() + ENDING_S)
        if time.monotonic() > self._deadline:
            self._kill()

    def _poll(self) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and process.poll() is not None:
                if self._starting and not self._ended:
                    self._lines.begin("waiting for the other ranks to end")
                self._ended.append(rank)

    def _pass_signals_on(self) -> None:
        for number in self._signals[self._passed_on :]:
            self._send(number)
        self._passed_on = len(self._signals)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)  # does nothing to one that has ended

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _failure(self) -> Failure | None:
        """The first rank that failed by itself, else the first that lost another rank.

        A rank that says why it ended goes before one that does not, unless a signal killed that.
        """
        ended = [(rank, self._processes[rank].returncode) for rank in self._ended]
        failures = [
            Failure(self._names[rank], code, self._reason(rank)) for rank, code in ended if code
        ]
        causes = [failure for failure in failures if failure.code not in _FOLLOWERS] or failures
        if causes and not causes[0].reason and causes[0].code > 0:
            causes = [failure for failure in causes if failure.reason] or causes
        return causes[0] if causes else None

    def _reason(self, rank: int) -> str:
        """Why a rank ended, as it says itself; perhaps nothing."""
        path = reason_file(Path(self._shared[FOLDER]), int(self._shared[RESTART]), rank)
        return path.read_text() if path.exists() else ""
