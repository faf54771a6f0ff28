"""The job's store: short texts and the secret, in private folders or in torch's store.

On one machine `embroute train` and `embroute run` give the ranks a private folder, and nothing
listens on a network. A job of torchrun uses torch's store. Anyone who reaches its port can write to
it, so its texts are neither trusted nor unpickled.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from embroute.config.scratch import user_folder
from embroute.transport.interface import LostPeerError

# Set by our own launcher.
FOLDER, LAUNCHER, RUN_ID = "EMBROUTE_JOB_FOLDER", "EMBROUTE_LAUNCHER", "EMBROUTE_RUN_ID"
SHARDS_VARIABLE = "EMBROUTE_SHARDS"  # set by `embroute run`
SECRET, SECRET_FILE = "EMBROUTE_SECRET", "EMBROUTE_SECRET_FILE"
RESTART = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun and by our own launcher
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 4096  # bytes of a secret
STORE_POLL_S = 0.005
BACKLOG = 4096  # ranks that may connect to the store at the same time


class JobStore(Protocol):
    """Texts by key. `get` raises a RuntimeError after the store's time-out."""

    def set(self, key: str, value: str) -> None:
        """Publish a text."""

    def get(self, key: str) -> bytes:
        """Wait for a text."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are published."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The texts of several keys."""


class FolderStore:
    """Texts as files of a private folder."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder, self.timeout_s = folder, timeout_s
        folder.mkdir(mode=0o700, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "@")

    def set(self, key: str, value: str) -> None:
        """Publish a text. It is renamed into place, so that no reader finds half of it."""
        path = self._path(key)
        partial = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        try:
            partial.write_text(value)
            partial.replace(path)
        except OSError as error:
            # The launcher has ended, and another job's start has removed its folder.
            raise LostPeerError(
                f"lost the launcher: its folder is gone ({error.strerror})"
            ) from None

    def get(self, key: str) -> bytes:
        """Wait for a text."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > deadline or not self.folder.exists():
                    raise RuntimeError(f"{key} was not published in time") from None
            time.sleep(STORE_POLL_S)

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are published."""
        return all(self._path(key).exists() for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The texts of several keys."""
        return [self.get(key) for key in keys]


def new_run_id() -> str:
    """A unique name for this run: the launcher's, or a new one."""
    return os.environ.get(RUN_ID) or secrets.token_hex(4)


def attempt() -> int:
    """How often a launcher has restarted this job."""
    return int(os.environ.get(RESTART, 0))


def open_store(timeout_s: float, host_it: bool = False) -> JobStore:
    """A connection to the store that every rank of this attempt can reach.

    Launchers keep their store over restarts. So each attempt has its own keys in it; otherwise
    ranks would find the addresses of dead ranks.
    """
    if FOLDER in os.environ:
        return FolderStore(Path(os.environ[FOLDER]) / f"attempt{attempt()}", timeout_s)
    return torch_store(timeout_s, host_it)


def torch_store(timeout_s: float, host_it: bool = False) -> PrefixStore:
    """The store of a job of torchrun; `host_it`: this rank keeps it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    if host_it:
        file = _listening_socket(host, port)
        store = TCPStore(host, port, None, True, timeout, master_listen_fd=file)
    else:
        store = TCPStore(host, port, timeout=timeout)
    return PrefixStore(f"embroute/{attempt()}", store)


def _listening_socket(host: str, port: int) -> int:
    """A socket on the address of the store; torch itself would listen on all addresses."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        server = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR={host}, MASTER_PORT={port}: the first rank cannot listen there: "
            f"{error.strerror}"
        ) from None
    return server.detach()


def hosts_store() -> bool:
    """Whether this rank keeps torch's store: the first rank, unless the launcher does."""
    launcher_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return FOLDER not in os.environ and os.environ["RANK"] == "0" and not launcher_hosts


def on_one_machine() -> bool:
    """Whether the launcher started all ranks on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ["WORLD_SIZE"]


def job_secret() -> bytes:
    """The secret by which the ranks of a job know each other. No rank ever sends it."""
    text = os.environ.get(SECRET, "")
    if text or SECRET_FILE in os.environ:
        return _checked(text or _secret_in(Path(os.environ[SECRET_FILE])))
    if on_one_machine():
        return _secret_of_user()
    raise ValueError(
        f"{SECRET} is not set: ranks on several machines need a common secret, such as 32 random "
        f"hex digits; set it for every rank, or {SECRET_FILE} to a file of mode 0600 that has it"
    )


def _checked(text: str) -> bytes:
    try:
        secret = text.strip().encode()
    except UnicodeEncodeError:
        raise ValueError(f"{SECRET} must be UTF-8 text, got other bytes") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"{SECRET} has {len(secret)} bytes, it needs at least {MIN_SECRET_BYTES}")
    return secret


def _secret_in(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ValueError("not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_SECRET_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"{SECRET_FILE}={path}: {error}") from None
    if mode & 0o077:
        raise ValueError(f"{SECRET_FILE}={path}: mode {mode & 0o777:o} lets others read it: 600")
    return text


def _secret_of_user() -> bytes:
    """A secret that all processes of this user on this machine can read; made if it is missing."""
    path = user_folder() / "secret"
    partial = path.with_name(f"secret-{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(MIN_SECRET_BYTES))
    # A link appears with its whole text, and fails if another rank was first.
    with suppress(FileExistsError):
        os.link(partial, path)
    partial.unlink()
    return _checked(path.read_text())


def names_by_rank(store: JobStore, size: int) -> Sequence[str]:
    """The name that each rank has published."""
    return [store.get(f"rank/{rank}").decode(errors="replace") for rank in range(size)]
