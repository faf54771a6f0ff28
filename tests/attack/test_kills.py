"""Sixty kills of ranks at every moment of a run: each run ends with the bits of an undisturbed
run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from embroute.checkpoint.folders import latest_checkpoint, step_of
from embroute.launch.rank import rank_names
from tests.processes import finish, pid_of
from tests.test_failures import EVERY, STEPS, assert_same, start

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("processes")]

POLICIES = ["embroute(effort=auto)", "esd(1)", "herald", "in-place", "fae(hot=0.02)"]
KILLS = 12  # of each policy
LIMIT_S = 240.0


class Job:
    """A run in a folder, and the number of its killed ranks."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.folder, self.kills = folder, 0
        self._options = ["--policy", policy, "--held-out", "0.02", "--evaluate-every", str(EVERY)]
        self._options += ["--restarts", "20", "--peer-timeout", "15"]
        self.run = start(folder, *self._options)

    def resume(self) -> None:
        """Start the run again from its newest checkpoint."""
        self.run = start(self.folder, *self._options, "--resume")

    @property
    def newest(self) -> int:
        """Step of the newest checkpoint."""
        path = latest_checkpoint(self.folder / "checkpoints")
        return 0 if path is None else step_of(path) or 0

    @property
    def saving(self) -> bool:
        """Whether ranks write a checkpoint now."""
        return any((self.folder / "checkpoints").glob("*.partial"))

    def wait(self, event: Callable[[], bool]) -> None:
        """Wait for an event; the run must not end before it."""
        limit = time.monotonic() + LIMIT_S
        while not event():
            assert self.run.poll() is None, self.run.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.001)

    def kill(self, name: str) -> None:
        """Kill a rank if it is alive."""
        with suppress(ProcessLookupError):
            os.kill(pid_of(self.run, name), signal.SIGKILL)
            self.kills += 1


def at_start(job: Job, name: str, chance: random.Random) -> None:
    def begun() -> bool:
        try:
            return pid_of(job.run, name) > 0
        except (ProcessLookupError, FileNotFoundError):
            return False

    job.wait(begun)
    time.sleep(3 * chance.random())
    job.kill(name)


def in_a_step(job: Job, name: str, chance: random.Random) -> None:
    before = job.newest
    job.wait(lambda: job.newest > before)
    time.sleep(chance.random() / 3)
    job.kill(name)


def in_a_checkpoint(job: Job, name: str, chance: random.Random) -> None:
    job.wait(lambda: job.saving)
    job.kill(name)


def in_an_evaluation(job: Job, name: str, chance: random.Random) -> None:
    """The evaluation follows the checkpoint of the same step at once."""
    before = job.newest
    job.wait(lambda: job.newest > before)
    job.kill(name)


def in_the_drain_of_a_stop(job: Job, name: str, chance: random.Random) -> None:
    before = job.newest
    job.wait(lambda: job.newest > before)
    job.run.send_signal(signal.SIGTERM)
    time.sleep(chance.random() / 20)
    job.kill(name)
    code, output = finish(job.run)
    assert code != 0, output
    assert "Traceback" not in output
    job.resume()


def at_the_end(job: Job, name: str, chance: random.Random) -> None:
    job.wait(lambda: job.newest >= STEPS - EVERY)
    job.wait(lambda: job.saving or job.newest == STEPS)
    job.kill(name)


MOMENTS = [at_start, in_a_step, in_a_checkpoint, in_an_evaluation, in_the_drain_of_a_stop]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_twelve_kills_at_every_moment_change_no_bit(policy: str, tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", policy)
    code, output = finish(whole.run)
    assert code == 0, output
    job, chance = Job(tmp_path / "cut", policy), random.Random(policy)
    ranks = rank_names(2, 1)
    moments = [in_a_step, in_a_step, *MOMENTS, *MOMENTS, at_the_end, at_the_end]
    for number, moment in enumerate(moments):
        moment(job, ranks[(number + POLICIES.index(policy)) % len(ranks)], chance)
    code, output = finish(job.run)
    if code != 0:  # the last kill came when nothing was left to do
        job.resume()
        code, output = finish(job.run)
    assert code == 0, output
    assert "Traceback" not in output
    assert job.kills >= KILLS, job.kills  # of a fast run some come too late
    assert_same(tmp_path / "cut", tmp_path / "whole")
    leftovers = [path.name for path in (tmp_path / "cut").rglob("*") if "partial" in path.name]
    assert not leftovers


def test_killed_launcher_leaves_no_rank_and_no_folder(tmp_path: Path, runtime: Path) -> None:
    run = start(tmp_path, steps=100_000)
    limit = time.monotonic() + LIMIT_S
    while latest_checkpoint(tmp_path / "checkpoints") is None:
        assert time.monotonic() < limit
        time.sleep(0.05)
    ranks = [pid_of(run, name) for name in rank_names(2, 1)]
    run.kill()
    run.communicate()
    while any(_runs(pid) for pid in ranks):
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert list(runtime.glob("embroute-*/job-*"))  # nobody was there to remove it
    code, output = finish(start(tmp_path, "--resume", steps=_next_step(tmp_path)))
    assert code == 0, output
    assert [path.name for path in runtime.rglob("*")] == [f"embroute-{os.getuid()}", "lock"]


def _runs(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _next_step(folder: Path) -> int:
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    return (step_of(path) or 0) + 1


def test_full_disk_uses_no_restart_and_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    """The checkpoint folder is a small file system."""
    disk = tmp_path / "checkpoints"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small disk")
    try:
        code, output = finish(start(tmp_path, "--restarts", "3"))
        assert code == 73, output
        assert "No space left on device" in output
        assert "restart 1" not in output
        assert output.count("embroute: ") == 1
        assert not list(disk.glob("*.partial"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
