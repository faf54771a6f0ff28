"""Locks of a folder: a second job is refused, and the lock of a dead job is taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from embroute.checkpoint import locks
from embroute.checkpoint.locks import LOCK_FILE, FolderLock

HOLD = """
import sys, time
from pathlib import Path
from embroute.checkpoint.locks import FolderLock
with FolderLock("--out", Path(sys.argv[1]), "first"):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_locked_folder_refuses_a_second_job(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(ValueError, match=rf"--out .*: run first \(process {first.pid} on"):
            FolderLock("--out", tmp_path, "second").__enter__()
        first.kill()


def test_lock_of_a_killed_job_is_taken_over_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.kill()
    began = time.monotonic()
    with FolderLock("--out", tmp_path, "second") as lock:
        assert time.monotonic() - began < 1
        lock.check()
    assert not (tmp_path / LOCK_FILE).exists()


def elsewhere(path: Path, beat: int) -> None:
    """Write a lock as a job on another machine does."""
    record = {"host": "far", "machine": "another", "pid": 1, "run_id": "far-run", "beat": beat}
    path.write_text(json.dumps(record))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "RENEWAL_S", 0.1)
    monkeypatch.setattr(locks, "LEASE_S", 1.0)


def test_lease_of_another_machine_holds_while_it_beats(tmp_path: Path, quick: None) -> None:
    path, stop = tmp_path / LOCK_FILE, threading.Event()
    elsewhere(path, 0)

    def beat() -> None:
        count = 0
        while not stop.wait(0.1):
            count += 1
            elsewhere(path, count)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ValueError, match=r"run far-run \(process 1 on far\) uses this folder"):
            FolderLock("--out", tmp_path, "second").__enter__()
    finally:
        stop.set()
        thread.join()


def test_expired_lease_of_another_machine_is_taken_over(tmp_path: Path, quick: None) -> None:
    elsewhere(tmp_path / LOCK_FILE, 7)
    with FolderLock("--out", tmp_path, "second") as lock:
        lock.check()
        assert json.loads((tmp_path / LOCK_FILE).read_text())["run_id"] == "second"


def test_job_that_lost_its_lock_is_refused(tmp_path: Path, quick: None) -> None:
    with FolderLock("--out", tmp_path, "first") as lock:
        elsewhere(tmp_path / LOCK_FILE, 0)
        time.sleep(0.3)
        with pytest.raises(ValueError, match=r"run far-run .* holds this folder now"):
            lock.check()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["run_id"] == "far-run"


def test_lock_holder_renews_its_lease(tmp_path: Path, quick: None) -> None:
    with FolderLock("--out", tmp_path, "first"):
        time.sleep(0.5)
        assert json.loads((tmp_path / LOCK_FILE).read_text())["beat"] >= 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', "\x00" * 600])
def test_damaged_lock_file_is_taken_over(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    with FolderLock("--out", tmp_path, "second"):
        pass


def test_lock_without_flock_follows_the_living_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr("embroute.checkpoint.locks.fcntl.flock", refuse)
    first = FolderLock("--out", tmp_path, "first")
    with first:
        with pytest.raises(ValueError, match="run first"):
            FolderLock("--out", tmp_path, "second").__enter__()
        record = json.loads((tmp_path / LOCK_FILE).read_text())
        record["pid"] = 2**22 + 1  # no such process
        (tmp_path / LOCK_FILE).write_text(json.dumps(record))
        with FolderLock("--out", tmp_path, "second"):
            pass
    assert os.listdir(tmp_path) in ([], [LOCK_FILE])


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused_and_left_alone(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / LOCK_FILE, tmp_path / "other"
    other.write_text("kept")
    make = {"link": lambda: path.symlink_to(other), "pipe": lambda: os.mkfifo(path)}
    make.get(kind, path.mkdir)()
    with pytest.raises(ValueError, match=r"--out .*: embroute.lock in it must be a regular file"):
        FolderLock("--out", tmp_path, "second").__enter__()
    assert other.read_text() == "kept"
