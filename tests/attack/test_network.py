"""Attacks on the sockets of a job on one machine: no attacker gets in, and the result is the
same."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import choice

import pytest

from embroute.checkpoint.folders import latest_checkpoint
from tests.attack.sockets import Place, listening
from tests.attack.test_handshake import GARBAGE
from tests.processes import TORCHRUN, begin, finish, pid_of
from tests.test_failures import assert_same, start, wait_for_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("processes")]

LOOK_S = 0.005  # between two looks at what the job listens on
KEPT = 200  # connections
# The last worker connects only once the file exists: until then all other ranks listen.
LATE_RANK = """
import os, pathlib, socket, time

def connect(sock, address):
    deadline = time.monotonic() + 60
    while isinstance(address, str) and not GO.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return plain(sock, address)

plain, GO = socket.socket.connect, pathlib.Path(os.environ["LATE_RANK_GO"])
if os.environ.get("RANK") == "3":
    socket.socket.connect = connect
"""


class Stranger:
    """Finds every socket on which a job listens, and sends every kind of garbage to it."""

    def __init__(self, run: subprocess.Popen[str], runtime: Path | None = None) -> None:
        self._run, self._runtime, self._over = run, runtime, threading.Event()
        self.places: set[Place] = set()
        self.modes: dict[str, int] = {}  # of the folders of Unix sockets
        self.sent: dict[Place, set[str]] = {}  # kinds of garbage
        self._open: deque[socket.socket] = deque()
        self._threads = [threading.Thread(target=work) for work in (self._look, self._attack)]
        for thread in self._threads:
            thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            now = set(listening(self._run.pid))
            for folder in {os.path.dirname(place.address) for place in now if not place.port}:
                with suppress(OSError):  # removed meanwhile
                    self.modes[folder] = stat.S_IMODE(os.stat(folder).st_mode)
            self.places |= now

    def _attack(self) -> None:
        """Ranks listen for only some milliseconds, so the search has no pauses."""
        while not self._over.wait(0 if self._runtime else LOOK_S):
            for place in self._goals():
                sent = self.sent.setdefault(place, set())
                kind = next((kind for kind in GARBAGE if kind not in sent), choice(list(GARBAGE)))
                with suppress(OSError):
                    self._visit(place, GARBAGE[kind])
                    sent.add(kind)

    def _visit(self, place: Place, send: Callable[[socket.socket], object]) -> None:
        sock = place.connect()
        self._keep(sock)
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before its last byte
            send(sock)

    def _goals(self) -> set[Place]:
        paths = [] if self._runtime is None else self._runtime.glob("embroute-*/rank-*/socket")
        return {place for place in self.places if place.port} | {Place(str(p)) for p in paths}

    def _keep(self, sock: socket.socket) -> None:
        """Keep the newest connections open, as a real attacker would."""
        sock.settimeout(0.5)
        self._open.append(sock)
        if len(self._open) > KEPT:
            self._open.popleft().close()

    def wait_for_all_kinds(self, count: int) -> set[Place]:
        """Wait until so many places have got every kind of garbage; returns those places."""
        deadline = time.monotonic() + 60
        while True:
            full = {place for place, kinds in list(self.sent.items()) if len(kinds) == len(GARBAGE)}
            if len(full) >= count or time.monotonic() > deadline:
                return full
            time.sleep(0.02)

    def end(self) -> None:
        """Stop the attack and wait for its threads."""
        self._over.set()
        for thread in self._threads:
            thread.join(20)
        for sock in self._open:
            sock.close()


def test_the_scanner_sees_a_socket_on_all_addresses() -> None:
    code = (
        "import socket\n"
        "server = socket.create_server(('0.0.0.0', 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        place = Place("0.0.0.0", int(process.stdout.readline()))
        assert place in set(listening(process.pid))
        assert not place.is_loopback
        process.communicate("\n")


def test_job_listens_only_locally_and_garbage_changes_no_bit(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of garbage comes to every rank that listens, at the start and after a kill."""
    code, output = finish(start(tmp_path / "calm", steps=600))
    assert code == 0, output
    (tmp_path / "sitecustomize.py").write_text(LATE_RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("LATE_RANK_GO", str(tmp_path / "go"))
    run = start(tmp_path / "attacked", "--restarts", "1", steps=600)
    stranger = Stranger(run, runtime)
    first = stranger.wait_for_all_kinds(3)
    (tmp_path / "go").touch()
    wait_for_checkpoint(run, tmp_path / "attacked")
    (tmp_path / "go").unlink()
    os.kill(pid_of(run, "worker1"), signal.SIGKILL)
    second = stranger.wait_for_all_kinds(6) - first
    (tmp_path / "go").touch()
    code, output = finish(run)
    stranger.end()
    assert code == 0, output
    assert (len(first), len(second)) == (3, 3)  # the coordinator, the shard and a worker
    assert "restart 1 of 1" in output
    assert_same(tmp_path / "attacked", tmp_path / "calm")
    network = {place for place in stranger.places if place.port}
    assert all(place.is_loopback for place in network), network
    assert any(not place.port for place in stranger.places)  # the scanner sees the job
    assert set(stranger.modes.values()) == {0o700}, stranger.modes
    assert [path.name for path in runtime.rglob("*")] == [f"embroute-{os.getuid()}", "lock"]


@pytest.mark.slow
def test_garbage_changes_no_loss_of_a_torchrun_job(tmp_path: Path) -> None:
    """Torch's store listens on every address; embroute's sockets do not."""
    script = Path("examples/deepfm_routed.py")
    run = begin([*TORCHRUN, str(script), "--steps", "300"])
    stranger = Stranger(run)
    code, output = finish(run)
    stranger.end()
    assert code == 0, output
    stores = {place.port for place in stranger.places if place.port}
    assert len(stores) <= 2, stranger.places  # the launcher's
    calm_code, calm = finish(begin([*TORCHRUN, str(script), "--steps", "300"]))
    assert calm_code == 0, calm
    assert _losses(output) == _losses(calm)


def _losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step ")]


def test_second_job_in_one_folder_is_refused_and_names_the_first(tmp_path: Path) -> None:
    first = start(tmp_path, steps=100_000)
    wait_for_checkpoint(first, tmp_path)
    before = time.monotonic()
    code, output = finish(start(tmp_path, "--resume"))
    assert time.monotonic() - before < 20
    assert code == 2, output
    assert f"--out {tmp_path}: run " in output
    assert f"(process {first.pid} on" in output
    first.send_signal(signal.SIGTERM)
    code, output = finish(first, 60)
    assert code == 143, output
    assert latest_checkpoint(tmp_path / "checkpoints") is not None
    assert not list(tmp_path.rglob("*.lock"))
