"""`prepare` leaves a user's process alone, and a lost peer is an ordinary exception there."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from embroute.launch.in_process import InProcessNetwork, in_process_rank
from embroute.launch.rank import RankContext, rank_names
from embroute.nn import job
from embroute.nn.settings import Settings, check_settings
from embroute.transport.interface import LostPeerError
from embroute.transport.job_store import FOLDER
from embroute.transport.sockets import SocketChannel
from tests.test_example import ROUTED

NAMES = rank_names(2, 1)
LIMIT_S = 90.0  # to end by themselves, on a machine with other work


def begin_ranks(script: Path) -> dict[str, subprocess.Popen[str]]:
    """Start a script's ranks without a launcher, so that no launcher ends them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    size = str(len(NAMES))
    shared |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {
        name: subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, name in enumerate(NAMES)
    }


def ended(ranks: dict[str, subprocess.Popen[str]]) -> dict[str, tuple[int, str]]:
    """Exit code and output of every rank, all of which must end by themselves."""
    try:
        ends = {}
        for name, rank in ranks.items():
            output = rank.communicate(timeout=LIMIT_S)[0]
            ends[name] = rank.returncode, output
        return ends
    finally:
        for rank in ranks.values():
            rank.kill()


UNTOUCHED = """
import os, runpy, signal, sys
import torch, embroute
from embroute.launch import process

def mine(kind, error, trace):
    os._exit(99)

def state():
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    return os.nice(0), sys.excepthook, handlers

process.keep_memory = lambda: os._exit(98)
sys.excepthook = mine
sys.argv = [ROUTED, "--steps", "60"]
before = state()
runpy.run_path(sys.argv[0], run_name="__main__")
os._exit(97) if state() != before else sys.exit(7)
"""


@pytest.mark.full
def test_prepare_leaves_the_process_of_a_script_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNTOUCHED.replace("ROUTED", repr(str(ROUTED))))
    for name, (code, output) in ended(begin_ranks(script)).items():
        assert code == 7, (name, output)


TRAINS = """
import runpy, sys
import embroute

sys.argv = [SCRIPT, "--steps", "4000"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except CAUGHT as error:
    print("caught", error)
    sys.exit(9)
"""


def trains_for_long(folder: Path, caught: str = "()", options: str = "") -> Path:
    """The example as a script that trains for long; it may catch an error, and have options."""
    routed, script = folder / "routed.py", folder / "script.py"
    routed.write_text(ROUTED.read_text().replace("lookups=", f"{options}lookups="))
    script.write_text(TRAINS.replace("SCRIPT", repr(str(routed))).replace("CAUGHT", caught))
    return script


def wait_until_it_trains(ranks: dict[str, subprocess.Popen[str]]) -> None:
    output = ranks["worker0"].stdout
    assert output is not None
    assert any(line.startswith("step 50") for line in output)


@pytest.mark.full
@pytest.mark.parametrize("killed", ["coordinator", "shard0", "worker1"])
def test_killed_peer_raises_an_error_in_every_script(killed: str, tmp_path: Path) -> None:
    ranks = begin_ranks(trains_for_long(tmp_path))
    wait_until_it_trains(ranks)
    ranks[killed].kill()
    ends = ended(ranks)
    assert ends.pop(killed)[0] == -signal.SIGKILL
    for name, (code, output) in ends.items():
        assert code == 1, (name, output)
        # torch's store may log the loss of its server after the error.
        assert "\nembroute.transport.interface.LostPeerError: lost " in output, output


@pytest.mark.full
def test_script_may_catch_the_loss_of_a_silent_peer(tmp_path: Path) -> None:
    script = trains_for_long(tmp_path, "embroute.LostPeerError", "peer_timeout=5.0, ")
    ranks = begin_ranks(script)
    wait_until_it_trains(ranks)
    ranks["worker1"].send_signal(signal.SIGSTOP)
    ranks_alive = {name: rank for name, rank in ranks.items() if name != "worker1"}
    try:
        ends = ended(ranks_alive)
    finally:
        ranks["worker1"].kill()
        ranks["worker1"].communicate()
    assert {code for code, _ in ends.values()} == {9}, ends
    reasons = [output.strip().splitlines()[-1] for _, output in ends.values()]
    assert all(reason.startswith("caught ") for reason in reasons), ends
    assert any("no sign of life from worker1" in reason for reason in reasons), ends


def test_aborted_channel_wakes_its_owner_with_the_reason() -> None:
    left, right = socket.socketpair()
    with left, right:
        channel, errors = SocketChannel({"worker1": left}), list[str]()

        def wait() -> None:
            try:
                channel.exchange([], [("worker1", np.empty(8, np.uint8))])
            except LostPeerError as error:
                errors.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.1)
        channel.abort("no sign of life from worker1 for 5 s")
        waiting.join(20)
        assert errors == ["no sign of life from worker1 for 5 s"]


@pytest.mark.parametrize(
    ("settings", "by_launcher", "owned"),
    [
        (Settings(), False, False),
        (Settings(own_process=True), False, True),
        (Settings(), True, True),
        (Settings(own_process=False), True, False),
    ],
)
def test_only_an_own_process_is_changed(
    settings: Settings, by_launcher: bool, owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[str] = []

    @contextmanager
    def connected(*options: object) -> Iterator[RankContext]:
        assert options[-1] is owned
        yield in_process_rank(InProcessNetwork(), "worker0", 1, 1)

    monkeypatch.setattr(job, "connect", connected)
    monkeypatch.setattr(job, "tune_process", changes.append)
    monkeypatch.setattr(job, "install_exit_hooks", changes.append)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.delenv(FOLDER, raising=False)
    if by_launcher:
        monkeypatch.setenv(FOLDER, "somewhere")
    job.join_job(check_settings(settings))
    assert changes == ["worker0", "worker0"] * owned
