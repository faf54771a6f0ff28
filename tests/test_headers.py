"""Damaged, cut, oversized and reordered messages are errors that name peer, kind and step."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embroute.launch.in_process import InProcessChannel, InProcessNetwork
from embroute.launch.rank import RankTopology, on_one_node
from embroute.launch.rendezvous import shares_memory
from embroute.transport import shm
from embroute.transport.headers import HEADER_BYTES, MESSAGE_KINDS, header
from embroute.transport.interface import Channel, LostPeerError, MessageError
from embroute.transport.sockets import SocketChannel
from tests.sizes import sized
from tests.test_worker_allreduce import network_pair

KIND, STEP, SIZES = "urgent", 7, (5, 300, 0, 40)
NAMED = rf"shard0.*\b{KIND}\b.*step {STEP}\b"
Damage = tuple[str, int, int]  # what happens, and two places
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux only")

damages = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "swap"]), st.integers(0, 10**6), st.integers(0, 10**6)
)


def stream(contents: Sequence[bytes]) -> list[bytes]:
    """Messages with the right headers."""
    heads = (header(KIND, STEP, i + 1, len(content)) for i, content in enumerate(contents))
    return [head + content for head, content in zip(heads, contents, strict=True)]


def damaged(messages: Sequence[bytes], damage: Damage, checked: int) -> bytes:
    """The bytes of a stream after damage; the first `checked` bytes of a message are checked."""
    what, first, second = damage
    which = first % len(messages)
    messages, whole = list(messages), b"".join(messages)
    if what == "cut":
        return whole[: first % len(whole)]
    if what == "insert":
        which %= len(messages) - 1  # the last message has nothing behind it
        messages[which] += b"\0" * (1 + second % 100)
    elif what == "flip":
        content = bytearray(messages[which])
        content[second % checked] ^= 1 << (second // checked) % 8
        messages[which] = bytes(content)
    else:
        other = (which + 1 + second % (len(messages) - 1)) % len(messages)
        messages[which], messages[other] = messages[other], messages[which]
    return b"".join(messages)


@contextmanager
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@given(damages)
@settings(max_examples=sized(100, 1000), deadline=None)
def test_damaged_socket_message_is_refused(damage: Damage) -> None:
    contents = [bytes(np.random.default_rng(size).bytes(size)) for size in SIZES]
    with ends() as (left, right):
        right.sendall(damaged(stream(contents), damage, HEADER_BYTES))
        right.shutdown(socket.SHUT_WR)
        channel = SocketChannel({"shard0": left})
        channel.begin(KIND, STEP)
        with pytest.raises((MessageError, LostPeerError), match=NAMED):
            channel.exchange([], [("shard0", size) for size in SIZES])


def receive_each(channel: Channel, sizes: Sequence[int]) -> None:
    for size in sizes:
        channel.exchange([], [("shard0", size)])


@on_linux
@given(damages)
@settings(max_examples=sized(60, 600), deadline=None)
def test_damaged_token_of_shared_memory_is_refused(damage: Damage) -> None:
    sizes = [size for size in SIZES if size]
    starts = [64 * i for i in range(len(sizes))]
    tokens = [bytes(shm._token(*pair, 0)) for pair in zip(starts, sizes, strict=True)]
    memory = np.zeros(1024, np.uint8)
    with ends() as (left, right):
        right.sendall(damaged(stream(tokens), damage, HEADER_BYTES + shm.TOKEN_BYTES))
        right.shutdown(socket.SHUT_WR)
        inner = SocketChannel({"shard0": left})
        channel = shm.SharedMemoryChannel("worker0", inner, {"shard0": memory}, {"shard0": memory})
        channel.begin(KIND, STEP)
        with pytest.raises((MessageError, LostPeerError), match=NAMED):
            receive_each(channel, sizes)


@on_linux
@pytest.mark.parametrize(
    "token", [(1020, 40, 0), (-64, 40, 0), (0, 41, 0), (0, 1 << 60, 0), (0, 40, 1), (0, 40, -1)]
)
def test_impossible_token_of_shared_memory_is_refused(token: tuple[int, int, int]) -> None:
    """The place, the size and the count of messages read are checked, each by itself."""
    memory = np.zeros(1024, np.uint8)
    with ends() as (left, right):
        right.sendall(b"".join(stream([bytes(shm._token(*token))])))
        inner = SocketChannel({"shard0": left})
        channel = shm.SharedMemoryChannel("worker0", inner, {"shard0": memory}, {"shard0": memory})
        channel.begin(KIND, STEP)
        with pytest.raises(MessageError, match=NAMED):
            channel.exchange([], [("shard0", 40)])


@given(damages.filter(lambda damage: damage[0] in ("flip", "swap")))
@settings(max_examples=sized(50, 500), deadline=None)
def test_damaged_message_within_a_process_is_refused(damage: Damage) -> None:
    network = InProcessNetwork()
    channel = InProcessChannel(network, "rows", "worker0")
    channel.begin(KIND, STEP)
    messages = network.queue_between("rows", "shard0", "worker0")
    heads = [message[:HEADER_BYTES] for message in stream([b"\0" * size for size in SIZES])]
    changed = damaged(heads, damage, HEADER_BYTES)
    for i, size in enumerate(SIZES):
        part = changed[HEADER_BYTES * i : HEADER_BYTES * (i + 1)]
        messages.put((part, np.zeros(size, np.uint8)))
    with pytest.raises(MessageError, match=NAMED):
        channel.exchange([], [("shard0", size) for size in SIZES])


@pytest.mark.parametrize(
    ("other", "got"),
    [
        (header("early", STEP, 1, 9), "kind early, step 7, message 1, 9 bytes"),
        (header(KIND, 8, 1, 9), "kind urgent, step 8, message 1, 9 bytes"),
        (header(KIND, STEP, 2, 9), "kind urgent, step 7, message 2, 9 bytes"),
        (header(KIND, STEP, 1, 1 << 60), f"kind urgent, step 7, message 1, {1 << 60} bytes"),
        (b"GET / HTTP/1.1\r\nHost: a.b\r\n\r\n  \r\n", "bytes that are no header"),
    ],
)
def test_error_names_both_headers(other: bytes, got: str) -> None:
    with ends() as (left, right):
        right.sendall(other[:HEADER_BYTES])
        channel = SocketChannel({"shard0": left})
        channel.begin(KIND, STEP)
        with pytest.raises(MessageError) as caught:
            channel.exchange([], [("shard0", 9)])
    expected = f"expected kind {KIND}, step {STEP}, message 1, 9 bytes"
    assert str(caught.value) == f"message of shard0: {expected}; got {got}"


def test_short_message_is_an_error_while_its_sender_stays_connected() -> None:
    """A wait for many bytes must not last for ever if the message has only few."""
    left, right = network_pair()
    with left, right:
        sender, receiver = SocketChannel({"worker0": left}), SocketChannel({"shard0": right})
        for channel in (sender, receiver):
            channel.begin(KIND, STEP)
        pending = receiver.submit([], [("shard0", 1 << 20)])
        sender.exchange([("worker0", np.zeros(10, np.uint8))], [])
        with pytest.raises(MessageError, match=NAMED):
            pending.wait()


class Scrambled:
    """A socket whose bytes are scrambled on the wire, as encryption would do it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.fileno, self.close = sock, sock.fileno, sock.close
        self.setblocking, self.setsockopt = sock.setblocking, sock.setsockopt

    def sendmsg(self, data: Sequence[memoryview], ancillary: tuple[()], flags: int) -> int:
        return self._sock.send(bytes(byte ^ 0x5A for part in data for byte in part), flags)

    def recvmsg_into(self, data: Sequence[memoryview]) -> tuple[int, object, int, object]:
        clear = bytes(byte ^ 0x5A for byte in self._sock.recv(sum(map(len, data))))
        left = clear
        for part in data:
            part[: len(left)] = left[: len(part)]
            left = left[len(part) :]
        return len(clear), [], 0, None


def test_channel_works_over_a_wrapped_socket() -> None:
    with ends() as (left, right):
        wrapped = [cast(socket.socket, Scrambled(end)) for end in (left, right)]
        one, other = SocketChannel({"b": wrapped[0]}), SocketChannel({"a": wrapped[1]})
        one.exchange([("b", np.arange(100, dtype=np.uint8))], [])
        (arrived,) = other.exchange([], [("a", 100)])
        assert arrived.tolist() == list(range(100))


def test_every_kind_of_message_has_a_header_of_one_size() -> None:
    assert {len(header(kind, 1, 1, 1)) for kind in MESSAGE_KINDS} == {HEADER_BYTES}


APART = RankTopology({"store": ["coordinator", "shard0"], "left": ["worker0", "worker1"]})
SPREAD = RankTopology({"a": ["coordinator", "shard0", "worker0"], "b": ["worker1"]})
BESIDE = RankTopology({"a": ["coordinator"], "b": ["shard0", "worker0", "worker1"]})


@on_linux
def test_nodes_decide_what_passes_through_shared_memory() -> None:
    """Rows, then sums over workers."""
    assert shares_memory("auto", on_one_node(2, 1)) == (True, True)
    assert shares_memory("auto", BESIDE) == (True, True)
    assert shares_memory("auto", APART) == (False, True)
    assert shares_memory("auto", SPREAD) == (False, False)
    assert shares_memory("sockets", on_one_node(2, 1)) == (False, False)
    assert shares_memory("shared-memory", BESIDE) == (True, True)
    with pytest.raises(ValueError, match=r"transport=shared-memory: .* they are on 2 nodes"):
        shares_memory("shared-memory", SPREAD)
    with pytest.raises(ValueError, match=r"transport must be one of auto, .*, got 'pigeons'"):
        shares_memory("pigeons", SPREAD)


def test_a_system_without_memory_files_uses_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create", raising=False)
    assert shares_memory("auto", on_one_node(2, 1)) == (False, False)
    with pytest.raises(ValueError, match=r"transport=shared-memory: .* without memory files"):
        shares_memory("shared-memory", on_one_node(2, 1))


@on_linux
def test_memory_cannot_be_shared_over_a_network() -> None:
    with ExitStack() as opened:
        left, right = (opened.enter_context(sock) for sock in network_pair())
        with pytest.raises(ValueError, match=r"worker0 cannot share memory.*transport=sockets"):
            shm.share_rows("shard0", SocketChannel({"worker0": left}), 1.0)
        right.close()


@on_linux
def test_memory_of_another_size_is_refused() -> None:
    with ends() as (left, right):
        shm.share_memory(SocketChannel({"worker0": left}), 4096, "", ["worker0"], 5.0)
        with pytest.raises(MessageError, match=r"expected kind memory, .* 8192 bytes"):
            shm.receive_memory(SocketChannel({"shard0": right}), "shard0", 8192, 5.0)
