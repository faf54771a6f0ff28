"""Messages over sockets arrive whole and in order, and ranks find each other."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from embroute.engine.control import receive_order, send_all
from embroute.engine.protocol.messages import Save
from embroute.launch.rank import COORDINATOR
from embroute.transport import bootstrap
from embroute.transport.bootstrap import Links, Listener, _signature, dial, open_channels
from embroute.transport.headers import HEADER_BYTES, NO_STEP, header
from embroute.transport.interface import LostPeerError, Message
from embroute.transport.job_store import job_secret
from embroute.transport.sockets import MAX_PARTS, SocketChannel

NAMES = ("a", "b", "c")
LINKS: Links = {kind: list(itertools.combinations(NAMES, 2)) for kind in ("rows", "plans")}


@pytest.fixture(autouse=True)
def one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore("test", HashStore())


@pytest.fixture
def pair() -> Iterator[tuple[SocketChannel, SocketChannel]]:
    left, right = socket.socketpair()
    with left, right:
        yield SocketChannel({"right": left}), SocketChannel({"left": right})


def close(*opened: Listener | socket.socket) -> None:
    for each in opened:
        each.close()


def together(work: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run each function on its own thread; raise the first error."""
    with ThreadPoolExecutor(len(work)) as pool:
        tasks = {name: pool.submit(one) for name, one in work.items()}
        return {name: task.result(60) for name, task in tasks.items()}


def sent(source: str, goal: str, phase: int) -> npt.NDArray[np.uint8]:
    """The message from one rank to another in a phase: empty, small, or larger than a socket
    buffer."""
    random = np.random.default_rng([ord(source), ord(goal), phase])
    size = int(random.choice([0, 1, 3000, 700_000], p=[0.1, 0.3, 0.4, 0.2]))
    return random.integers(0, 256, size).astype(np.uint8)


@pytest.fixture(params=["one host", "several"])
def hosts(request: pytest.FixtureRequest) -> str:
    """Ranks on one host, or ranks that share only a network."""
    if request.param == "several":
        request.getfixturevalue("apart")
    return str(request.param)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank believes that it is alone on its host."""
    monkeypatch.setattr(bootstrap, "host_id", secrets.token_hex)
    monkeypatch.setattr(bootstrap, "local_addresses", lambda: ["127.0.0.1"])


def test_sender_that_waits_keeps_receiving(
    pair: tuple[SocketChannel, SocketChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other end reads nothing before all that it sends has left.
    monkeypatch.setattr("embroute.transport.sockets.SLICE_MS", 10**6)  # nothing else wakes it
    channel, other = pair[0], pair[1].socket_of("left")
    big, arrived = np.full(1 << 23, 3, np.uint8), np.zeros(1 << 23, np.uint8)

    def own() -> None:
        sending, coming = (
            channel.submit([("right", big)], []),
            channel.submit([], [("right", arrived)]),
        )
        sending.wait()
        coming.wait()

    waiting = threading.Thread(target=own, daemon=True)
    waiting.start()
    time.sleep(0.2)  # until it waits for room
    other.setblocking(True)
    other.settimeout(20)
    other.sendall(header("rows", NO_STEP, 1, len(big)) + big.tobytes())
    left = HEADER_BYTES + len(big)
    while left:
        left -= len(other.recv(left))
    waiting.join(20)
    assert not waiting.is_alive()
    np.testing.assert_array_equal(arrived, big)


def test_ranks_of_one_host_use_unix_sockets(hosts: str, store: PrefixStore) -> None:
    own: dict[str, Callable[[], Any]] = {
        name: partial(open_channels, store, name, LINKS, 20) for name in NAMES
    }
    channels = [channel for kinds in together(own).values() for channel in kinds.values()]
    families = {channel.socket_of(peer).family for channel in channels for peer in channel.names}
    assert families == {socket.AF_UNIX if hosts == "one host" else socket.AF_INET}
    for channel in channels:
        channel.close()


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("ahead", [1, 3])
def test_socket_messages_arrive_whole_and_in_order(ahead: int, store: PrefixStore) -> None:
    phases = 40

    def rank(name: str) -> int:
        channels = open_channels(store, name, LINKS, 20)
        channel = channels["rows"]
        others = [other for other in NAMES if other != name]
        posted, right = [], 0
        for phase in range(phases):
            sends: list[Message] = [(other, sent(name, other, phase)) for other in others]
            expected = [sent(other, name, phase) for other in others]
            got = [np.full_like(data, 77) for data in expected]
            post = channel.submit(sends, list(zip(others, got, strict=True)))
            posted.append((post, expected, got))
            if len(posted) == ahead or phase == phases - 1:
                for post, expected, got in reversed(posted):  # in another order than they came
                    post.wait()
                    right += sum(map(np.array_equal, expected, got))
                posted.clear()
        for each in channels.values():
            each.close()
        return right

    found = together({name: partial(rank, name) for name in NAMES})
    assert found == dict.fromkeys(NAMES, 2 * phases)


def test_more_messages_than_a_call_moves_arrive_in_order(
    pair: tuple[SocketChannel, SocketChannel],
) -> None:
    left, right = pair
    count = 3 * MAX_PARTS
    posts = [left.submit([("right", np.array([i], np.uint8))], []) for i in range(count)]
    got = np.zeros((count, 1), np.uint8)
    coming = [right.submit([], [("left", got[i])]) for i in range(count)]
    for post in reversed([*posts, *coming]):
        post.wait()
    assert got[:, 0].tolist() == list(range(count))


def test_coordinator_waits_until_each_message_is_delivered() -> None:
    """The coordinator waits until a control message has reached its rank."""
    left, right = socket.socketpair()
    with left, right:
        teller, reader = SocketChannel({"worker0": left}), SocketChannel({COORDINATOR: right})
        told: list[int] = []

        def tell() -> None:
            for step in range(3):
                send_all(teller, [("worker0", Save(step))])
                told.append(step)

        thread = threading.Thread(target=tell)
        thread.start()
        time.sleep(0.3)
        assert not told
        for step in range(3):
            assert receive_order(reader).message == Save(step)
        thread.join(20)
        assert told == [0, 1, 2]


@pytest.mark.parametrize("sends", [True, False])
def test_exchange_with_a_closed_peer_names_it(
    sends: bool, pair: tuple[SocketChannel, SocketChannel]
) -> None:
    left, right = pair
    data: Message = ("right", np.zeros(10_000_000, np.uint8))
    closing = threading.Timer(0.2, right.socket_of("left").close)
    closing.start()
    with pytest.raises(LostPeerError, match="lost right: "):
        left.exchange([data] if sends else [], [] if sends else [data])
    closing.join()


def test_signal_ends_a_rank_that_waits_for_a_message() -> None:
    """A rank that waits for a message must still react to signals."""
    code = (
        "import socket, numpy as np\n"
        "from embroute.transport.sockets import SocketChannel\n"
        "ends = socket.socketpair()\n"
        "channel = SocketChannel({'other': ends[0]})\n"
        "print('waits', flush=True)\n"
        "channel.exchange([], [('other', np.zeros(1, np.uint8))])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"waits\n"
        time.sleep(0.5)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(20) == -signal.SIGINT


def test_dial_tries_the_next_address_of_a_peer(
    store: PrefixStore, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(store, "a")
    _, identity, host, path, place = store.get("listens/a").decode().split()
    port = place.partition("|")[2]
    with socket.create_server(("127.0.0.2", int(port))) as other:  # another program has the port

        def answer() -> None:
            with suppress(OSError):
                sock, _ = other.accept()
                sock.close()

        endpoints = " ".join(f"127.0.0.{last}|{port}" for last in (3, 2, 1))
        text = f"{identity} {host} {path} {endpoints}"
        store.set("listens/a", f"{_signature(job_secret(), 'a', text)} {text}")
        found = together(
            {
                "a": lambda: listener.accept([("rows", "b")], time.monotonic() + 20),
                "b": lambda: dial(store, "a", ["rows"], "b", 20),
                "other": answer,
            }
        )
    assert list(found["b"]) == ["rows"]
    close(listener, *found["a"].values(), *found["b"].values())


def test_listener_names_a_rank_that_never_connects(store: PrefixStore) -> None:
    listener = Listener(store, "a")
    with pytest.raises(LostPeerError, match="lost b: it did not connect for rows"):
        listener.accept([("rows", "b")], time.monotonic() + 0.1)
    listener.close()


def test_dial_names_a_peer_that_refuses_connections(store: PrefixStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    text = f"identity host /nowhere 127.0.0.1|{port}"
    store.set("listens/a", f"{_signature(job_secret(), 'a', text)} {text}")
    with pytest.raises(LostPeerError, match=r"lost a: cannot connect to 127.0.0.1 \(.*refused"):
        dial(store, "a", ["rows"], "b", 5)


def test_dial_names_a_peer_that_never_listens(store: PrefixStore) -> None:
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(LostPeerError, match="lost a: it does not listen"):
        dial(store, "a", ["rows"], "b", 5)


def test_strided_message_is_refused(pair: tuple[SocketChannel, SocketChannel]) -> None:
    with pytest.raises(ValueError, match=r"a message for right: .* C-contiguous"):
        pair[0].exchange([("right", np.zeros(10, np.uint8)[::2])], [])


def test_local_addresses_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bootstrap.local_addresses() == []  # all ranks are here
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert bootstrap.local_addresses()[-1] == "127.0.0.1"
    assert len(set(bootstrap.local_addresses())) == len(bootstrap.local_addresses())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert bootstrap.local_addresses() == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=nowhere0: no such interface"):
        bootstrap.local_addresses()


def test_ranks_connect_over_ipv6(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(bootstrap, "local_addresses", lambda: ["::1"])
    monkeypatch.setattr(bootstrap, "host_id", secrets.token_hex)

    def rank(name: str) -> int:
        channels = open_channels(store, name, LINKS, 20).values()
        for channel in channels:
            channel.close()
        return len(channels)

    found = together({name: partial(rank, name) for name in NAMES})
    assert found == dict.fromkeys(NAMES, len(LINKS))
