"""Killed ranks and stopped runs: all ranks end, no update is lost, and resume is exact."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from embroute.checkpoint.folders import latest_checkpoint
from embroute.config.run_file import RUN_FILE, write_run_file
from embroute.config.run_options import RunConfig
from embroute.launch.rank import rank_names
from tests.processes import TORCHRUN, begin, finish, pid_of

pytestmark = pytest.mark.xdist_group("processes")

OPTIONS = ["--workers", "2", "--batch", "64", "--dim", "8", "--hidden", "16", "--held-out", "0"]
OPTIONS += ["--dtype", "float64"]
STEPS, EVERY = 600, 40


def start(folder: Path, *more: str, steps: int = STEPS) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "embroute", "train", *OPTIONS, "--out", str(folder)]
    command += ["--steps", str(steps), "--checkpoint-every", str(EVERY), *more]
    return begin(command)


def wait_for_checkpoint(
    run: subprocess.Popen[str], folder: Path, after: Path | None = None, seconds: float = 180
) -> Path:
    """The newest checkpoint, as soon as it is newer than `after`."""
    limit = time.monotonic() + seconds
    while (found := latest_checkpoint(folder / "checkpoints")) is None or found == after:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < limit, "no new checkpoint yet"
        time.sleep(0.02)
    return found


def files(folder: Path) -> dict[str, bytes]:
    """The files of every rank in the last checkpoint: tables, dense part, planner, random state."""
    last = latest_checkpoint(folder / "checkpoints")
    assert last is not None
    assert last.name == f"step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = finish(start(folder))
    assert code == 0, output
    assert "rows moved" in output
    return folder


def assert_same(mine: Path, other: Path) -> None:
    ours, theirs = files(mine), files(other)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if ours[name] != theirs[name]]


def kill_and_resume(folder: Path, kills: Sequence[tuple[str, float]], *more: str) -> None:
    """Kill ranks of `embroute train`; see `kill`."""
    options = ["--restarts", str(len(kills)), "--peer-timeout", "15", *more]
    kill(start(folder, *options), folder, kills)


def kill(run: subprocess.Popen[str], folder: Path, kills: Sequence[tuple[str, float]]) -> None:
    """Kill ranks, each some time after a new checkpoint; the launcher starts all ranks again."""
    seen: Path | None = None
    for name, delay_s in kills:
        wait_for_checkpoint(run, folder, seen)
        time.sleep(delay_s)
        ranks = {rank: pid_of(run, rank) for rank in rank_names(2, 1)}
        os.kill(ranks[name], signal.SIGKILL)
        while any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
            time.sleep(0.02)
        seen = latest_checkpoint(folder / "checkpoints")  # from which all of them start again
    code, output = finish(run)
    assert code == 0, output
    for name, _ in kills:
        assert re.search(f"{name} ended first|lost {name}|no sign of life", output), output


def test_restart_after_a_killed_shard_changes_no_bit(whole: Path, tmp_path: Path) -> None:
    kill_and_resume(tmp_path, [("shard0", 0.1)])
    assert_same(tmp_path, whole)


@pytest.mark.full
def test_torchrun_restart_after_a_killed_worker_changes_no_bit(whole: Path, tmp_path: Path) -> None:
    run = RunConfig(
        workers=2,
        batch=64,
        dim="8",
        hidden="16",
        held_out=0,
        dtype="float64",
        steps=STEPS,
        checkpoint_every=EVERY,
        peer_timeout=15,
        out=str(tmp_path / "run"),
    )
    write_run_file(run, tmp_path / RUN_FILE)
    program = ["-m", "embroute.train", str(tmp_path / RUN_FILE)]
    job = begin([*TORCHRUN, "--max-restarts", "1", *program])
    kill(job, tmp_path / "run", [("worker0", 0.1)])
    assert_same(tmp_path / "run", whole)


@pytest.mark.full
def test_restart_of_in_place_after_a_killed_worker_changes_no_bit(tmp_path: Path) -> None:
    code, output = finish(start(tmp_path / "whole", "--policy", "in-place"))
    assert code == 0, output
    kill_and_resume(tmp_path / "cut", [("worker1", 0.05)], "--policy", "in-place")
    assert_same(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.full
def test_all_ranks_end_when_one_is_killed(tmp_path: Path) -> None:
    run = start(tmp_path, "--peer-timeout", "30", steps=100_000)
    wait_for_checkpoint(run, tmp_path)
    ranks = [pid_of(run, name) for name in rank_names(2, 1)]
    os.kill(ranks[3], signal.SIGKILL)
    began = time.monotonic()
    code, output = finish(run, 60)
    assert time.monotonic() - began < 30
    assert code == 128 + signal.SIGKILL, output
    assert "the run failed: worker1 ended first (signal 9)" in output
    assert output.count("embroute: ") == 1, output  # nobody tells whom it lost
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def send(run: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal the launcher; as in a terminal, SIGINT goes to all ranks too."""
    if number == signal.SIGINT:
        os.killpg(run.pid, number)
    else:
        run.send_signal(number)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_saves_and_resume_changes_no_bit(
    number: signal.Signals, whole: Path, tmp_path: Path
) -> None:
    run = start(tmp_path)
    wait_for_checkpoint(run, tmp_path)
    send(run, number)
    code, output = finish(run, 90)
    assert code == 128 + number, output
    saved = latest_checkpoint(tmp_path / "checkpoints")
    assert saved is not None
    assert f"embroute: stopped by {number.name}; --resume goes on from {saved.name}" in output
    assert "Traceback" not in output
    code, output = finish(start(tmp_path, "--resume"))
    assert code == 0, output
    assert_same(tmp_path, whole)


@pytest.mark.slow
def test_sigterm_waits_for_a_slow_checkpoint(tmp_path: Path) -> None:
    """A shard does not answer for longer than torch's launcher waits by default."""
    run = start(tmp_path, "--peer-timeout", "120", steps=1_000_000)
    wait_for_checkpoint(run, tmp_path)
    shard = pid_of(run, "shard0")
    os.kill(shard, signal.SIGSTOP)
    time.sleep(1)
    before = latest_checkpoint(tmp_path / "checkpoints")
    run.send_signal(signal.SIGTERM)
    time.sleep(35)
    assert run.poll() is None
    os.kill(shard, signal.SIGCONT)
    code, output = finish(run, 60)
    assert code == 128 + signal.SIGTERM, output
    after = latest_checkpoint(tmp_path / "checkpoints")
    assert before is not None
    assert after is not None
    assert after.name > before.name
    assert int(after.name[-8:]) % EVERY != 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_twenty_random_kills_change_no_bit(whole: Path, tmp_path: Path, seed: int) -> None:
    """Twenty kills in all, five in each run."""
    chance = random.Random(seed)
    kills = [(chance.choice(rank_names(2, 1)), chance.random() / 2) for _ in range(5)]
    kill_and_resume(tmp_path, kills)
    assert_same(tmp_path, whole)
