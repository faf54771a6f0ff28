"""Unknown callers of a rank are refused, cost little memory, and never block the real peer."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from embroute.transport import bootstrap, job_store
from embroute.transport.bootstrap import Listener, dial
from embroute.transport.handshake import (
    CLAIM_BYTES,
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    REPLY_BYTES,
    CallerHandshake,
    HandshakeError,
    ListenerHandshake,
)
from embroute.transport.interface import LostPeerError

KEY = b"the secret of a job"
WANTED = ("rows", "b")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(job_store.SECRET, KEY.decode())
    monkeypatch.setenv("WORLD_SIZE", "2")


def on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks of this host connect as ranks of two hosts do."""
    monkeypatch.setattr(bootstrap, "host_id", secrets.token_hex)
    monkeypatch.setattr(bootstrap, "local_addresses", lambda: ["127.0.0.1"])


@pytest.fixture(params=["path", "network"])
def listener(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    if request.param == "network":
        on_other_hosts(monkeypatch)
    else:
        monkeypatch.setattr(bootstrap, "local_addresses", list)
    opened = Listener(STORE, "a")
    yield opened
    opened.close()


STORE = PrefixStore("job", HashStore())


def visit() -> socket.socket:
    """A connection of an unknown caller, on the peer's own route."""
    _, _, _, path, *endpoints = STORE.get("listens/a").decode().split()
    if endpoints:
        address, port = endpoints[0].split("|")
        return socket.create_connection((address, int(port)), 5)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.settimeout(5)
    return sock


def hello(kind: str = "rows", name: str = "b") -> bytes:
    return CallerHandshake(KEY, "unknown", kind, name).hello


def replay(sock: socket.socket) -> None:
    """Send a valid hello, then an invalid proof."""
    sock.sendall(hello())
    sock.recv(REPLY_BYTES, socket.MSG_WAITALL)
    sock.sendall(bytes(32))


def reflect(sock: socket.socket) -> None:
    """Send the listener's own proof back to it."""
    sock.sendall(hello())
    sock.sendall(sock.recv(REPLY_BYTES, socket.MSG_WAITALL)[NONCE_BYTES:])


def wrong_secret(sock: socket.socket) -> None:
    caller = CallerHandshake(b"another secret, also long", "unknown", *WANTED)
    sock.sendall(caller.hello)
    sock.recv(REPLY_BYTES, socket.MSG_WAITALL)
    sock.sendall(secrets.token_bytes(32))


GARBAGE: dict[str, Callable[[socket.socket], object]] = {
    "silence": lambda sock: None,
    "a byte": lambda sock: sock.sendall(b"e"),
    "zeros": lambda sock: sock.sendall(bytes(HELLO_BYTES)),
    "high bytes": lambda sock: sock.sendall(b"\xff" * HELLO_BYTES),
    "random": lambda sock: sock.sendall(os.urandom(HELLO_BYTES)),
    "a flood": lambda sock: sock.sendall(os.urandom(1 << 16)),
    "a web request": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(300)),
    "a pickle": lambda sock: sock.sendall(b"\x80\x04\x95" + bytes(200)),
    "half a hello": lambda sock: sock.sendall(hello()[: HELLO_BYTES // 2]),
    "a claim that is no text": lambda sock: sock.sendall(
        MAGIC + bytes(NONCE_BYTES) + b"\xff\xfe" * (CLAIM_BYTES // 2)
    ),
    "a proof of zeros": replay,
    "the listener's own proof": reflect,
    "another secret": wrong_secret,
    "a token of the first version": lambda sock: sock.sendall(b"\xc3\xa4 rows b".ljust(256)),
    "gone at once": lambda sock: sock.close(),
}


def meet(listener: Listener, seconds: float = 20) -> float:
    """Seconds until the real peer is connected."""
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(listener.accept, [WANTED], time.monotonic() + seconds)
        called = pool.submit(dial, STORE, "a", ["rows"], "b", seconds)
        sockets = [*accepted.result(seconds + 5).values(), *called.result(seconds + 5).values()]
    took = time.monotonic() - began
    left, right = sockets
    right.setblocking(True)
    right.sendall(b"rows")
    left.setblocking(True)
    assert left.recv(4) == b"rows"
    for sock in sockets:
        sock.close()
    return took


@pytest.mark.parametrize("kind", GARBAGE)
def test_listener_refuses_strangers_and_accepts_the_peer(kind: str, listener: Listener) -> None:
    with ThreadPoolExecutor(3) as pool:

        def come() -> None:
            with visit() as sock:
                try:
                    GARBAGE[kind](sock)
                    assert len(sock.recv(1 << 16)) in (0, REPLY_BYTES)
                except OSError:
                    return  # turned away while it spoke, or never answered

        strangers = [pool.submit(come) for _ in range(3)]
        time.sleep(0.05)
        assert meet(listener) < 3
        listener.close()
        for stranger in strangers:
            stranger.result(20)


def test_forty_silent_connections_do_not_block_the_peer(listener: Listener) -> None:
    silent = [visit() for _ in range(40)]
    assert meet(listener) < 3
    for sock in silent:
        sock.close()


def test_listener_accepts_the_peer_beside_too_many_connections(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "MAX_UNPROVEN", 8)
    silent = [visit() for _ in range(100)]
    assert meet(listener) < 3
    for sock in silent:
        sock.close()


def test_a_full_queue_of_connections_does_not_keep_the_peer_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers connect before the listener accepts anyone: the peer's first call is lost."""
    on_other_hosts(monkeypatch)
    monkeypatch.setattr(bootstrap, "MAX_UNPROVEN", 4)
    monkeypatch.setattr(bootstrap, "ATTEMPT_S", 0.2)
    listener = Listener(STORE, "a")
    address, port = STORE.get("listens/a").decode().split()[4].split("|")
    silent = [socket.socket() for _ in range(20)]
    for sock in silent:
        sock.setblocking(False)
        sock.connect_ex((address, int(port)))
    with pytest.raises(TimeoutError):
        socket.create_connection((address, int(port)), 0.2)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(dial, STORE, "a", ["rows"], "b", 20)
        time.sleep(0.5)
        accepted = listener.accept([WANTED], time.monotonic() + 20)
        sockets = called.result(20)
    assert (list(accepted), list(sockets)) == ([WANTED], ["rows"])
    for sock in (*silent, *accepted.values(), *sockets.values()):
        sock.close()
    listener.close()


def test_dial_goes_on_to_the_next_address_if_one_gives_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_other_hosts(monkeypatch)
    monkeypatch.setattr(bootstrap, "ATTEMPT_S", 0.2)
    with (
        closing(Listener(STORE, "a")) as listener,
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        socket.create_connection(silent.getsockname()),  # the only place in its queue
        ThreadPoolExecutor(1) as pool,
    ):
        _, *record, reachable = STORE.get("listens/a").decode().split()
        text = " ".join([*record, f"127.0.0.1|{silent.getsockname()[1]}", reachable])
        STORE.set("listens/a", f"{bootstrap._signature(KEY, 'a', text)} {text}")
        called = pool.submit(dial, STORE, "a", ["rows"], "b", 30)
        sockets = [*listener.accept([WANTED], time.monotonic() + 5).values()]
        sockets += called.result(5).values()
        for sock in sockets:
            sock.close()


def test_an_address_that_the_job_did_not_sign_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger writes its own address into the store, to relay the handshake of two ranks."""
    on_other_hosts(monkeypatch)
    with closing(Listener(STORE, "a")), socket.create_server(("127.0.0.1", 0)) as relay:
        relay.settimeout(0.2)
        *record, _ = STORE.get("listens/a").decode().split()
        port = relay.getsockname()[1]
        STORE.set("listens/a", " ".join([*record, f"127.0.0.1|{port}"]))
        with pytest.raises(LostPeerError, match="not signed with the job's secret"):
            dial(STORE, "a", ["rows"], "b", 1)
        with pytest.raises(TimeoutError):
            relay.accept()


def test_the_signature_of_one_listener_is_no_signature_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bootstrap, "local_addresses", list)
    with closing(Listener(STORE, "a")):
        STORE.set("listens/c", STORE.get("listens/a").decode())
        with pytest.raises(LostPeerError, match=r"lost c: .*not signed"):
            dial(STORE, "c", ["rows"], "b", 1)


def test_unexpected_caller_is_refused(listener: Listener) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept, [WANTED], time.monotonic() + 1)
        with pytest.raises(LostPeerError, match="lost a: cannot connect"):
            dial(STORE, "a", ["plans"], "z", 5)
        with pytest.raises(LostPeerError, match="lost b: it did not connect for rows"):
            waiting.result(5)


def test_caller_refuses_a_listener_without_the_secret() -> None:
    """An attacker that redirects peers to its own socket learns no secret and gets no rows."""
    caller = CallerHandshake(KEY, "a-1", *WANTED)
    other = ListenerHandshake(b"some other secret", "a-1")
    with pytest.raises(HandshakeError, match="does not know the job's secret"):
        caller.answer(other.receive(caller.hello))


def test_handshake_proof_cannot_be_replayed() -> None:
    caller = CallerHandshake(KEY, "a-1", *WANTED)
    first, again = ListenerHandshake(KEY, "a-1"), ListenerHandshake(KEY, "a-1")
    proof = caller.answer(first.receive(caller.hello))
    first.receive(proof)
    assert first.claim == WANTED
    again.receive(caller.hello)
    with pytest.raises(HandshakeError):
        again.receive(proof)
    with pytest.raises(HandshakeError):
        caller.answer(ListenerHandshake(KEY, "a-2").receive(caller.hello))


def test_handshake_reads_few_unauthenticated_bytes() -> None:
    assert HELLO_BYTES + REPLY_BYTES < 300
    welcome = ListenerHandshake(KEY, "a")
    greeting = hello()
    for at in range(len(greeting)):
        assert 0 < welcome.missing_bytes <= HELLO_BYTES - at
        welcome.receive(greeting[at : at + 1])


def test_bad_addresses_in_the_store_are_refused() -> None:
    for text in ("", "one", "a b c d|e", "a b c 127.0.0.1|99|9", "\x00", "ä ö ü ß"):
        STORE.set("listens/a", text)
        with pytest.raises(LostPeerError, match="lost a"):
            dial(STORE, "a", ["rows"], "b", 1)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("EMBROUTE_SECRET", "short", "has 5 bytes, it needs at least 16"),
        ("EMBROUTE_SECRET", "\udcff" * 32, "EMBROUTE_SECRET must be UTF-8 text"),
        ("EMBROUTE_SECRET_FILE", "/nowhere/secret", "EMBROUTE_SECRET_FILE=/nowhere/secret: .*No"),
        ("EMBROUTE_SECRET_FILE", "/dev/zero", "EMBROUTE_SECRET_FILE=/dev/zero: not a regular file"),
        ("", "", "EMBROUTE_SECRET is not set: ranks on several machines need a common secret"),
    ],
)
def test_bad_secrets_are_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMBROUTE_SECRET")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    if variable:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        job_store.job_secret()


def test_secret_file_that_others_can_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("EMBROUTE_SECRET")
    path = tmp_path / "secret"
    path.write_text("x" * 32)
    path.chmod(0o644)
    monkeypatch.setenv("EMBROUTE_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match="mode 644 lets others read it"):
        job_store.job_secret()
    path.chmod(0o600)
    assert job_store.job_secret() == b"x" * 32


def test_secret_of_one_machine_is_readable_only_by_its_user(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    monkeypatch.delenv("EMBROUTE_SECRET")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    first = job_store.job_secret()
    assert first == job_store.job_secret()
    path = runtime / f"embroute-{os.getuid()}" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600


def test_store_whose_folder_is_gone_names_the_launcher(tmp_path: Path) -> None:
    store = job_store.FolderStore(tmp_path / "job", 1)
    (tmp_path / "job").rmdir()
    with pytest.raises(LostPeerError, match="lost the launcher: its folder is gone"):
        store.set("rank/0", "worker0")
