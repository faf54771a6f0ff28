"""Messages over connections of our own: sockets driven by a kernel, without torch in between.

Gloo takes 0.15 ms and two changes of thread for a message however small; a step has several.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_char
from dataclasses import dataclass
from struct import Struct
from typing import cast

import numpy as np

from embroute.kernels.array_types import U8
from embroute.transport.interface import LostPeerError, Message
from embroute.transport.socket_io import CLOSED, IN, LATER, OUT, WAITED, progress, try_send

SLICE_MS = 200  # of waiting, after which Python sees to signals
MESSAGES_AT_FIRST = 64  # messages on their way for which there is room at first
# Numpy's own way to tell an address takes four times as long.
_memory = cast(Callable[[U8], Array[c_char]], (c_char * 0).from_buffer)
_entry = Struct("4q")  # a message in the kernel's table


@dataclass(slots=True)
class SocketWork:
    """Messages on their way."""

    channel: SocketChannel
    end: int  # of all that were ever posted to the channel, up to these

    def wait(self) -> None:
        """Drive these, and whatever was posted before and after them."""
        self.channel.progress(self.end)


class SocketChannel:
    """Sockets to some other ranks. One thread only.

    Ranks that share cores find the caches cold at every phase, so that little is done in Python.
    """

    def __init__(self, sockets: dict[str, socket.socket]) -> None:
        self.names = list(sockets)
        self.sockets = list(sockets.values())
        self._index = {name: i for i, name in enumerate(self.names)}
        peers = [(sock.fileno(), 1, 0) for sock in self.sockets]
        self._peer_P3 = np.array(peers, np.int64).reshape(-1, 3)
        self._message_M4 = np.zeros((MESSAGES_AT_FIRST, 4), np.int64)
        self._table = self._message_M4.data.cast("B")
        self._start = 0  # of messages that were not waited for
        self._kept: list[U8] = []  # what they point to
        self._before = 0  # messages that were

    def submit(self, sends: Sequence[Message], receives: Sequence[Message]) -> SocketWork:
        """What fits the sockets leaves at once."""
        end = self._add(sends, receives)
        if sends:
            count = len(self._kept)
            lost, why = try_send(self._message_M4, self._start, count, self._peer_P3)
            if lost >= 0:
                self._fail(lost, why)
        return SocketWork(self, end)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Post everything, and wait for it."""
        self.progress(self._add(sends, receives))

    @property
    def waited_s(self) -> dict[str, float]:
        """Seconds spent waiting for each peer, while others may have been awaited too."""
        return dict(zip(self.names, (1e-9 * self._peer_P3[:, WAITED]).tolist(), strict=True))

    def close(self) -> None:
        """Close every socket."""
        for sock in self.sockets:
            sock.close()

    def progress(self, end: int) -> None:
        """Move messages until all up to one have left or arrived."""
        first = end - self._before
        if first <= 0:
            return
        lost, start, count = LATER, self._start, len(self._kept)
        while lost == LATER:
            lost, why = progress(self._message_M4, start, first, count, self._peer_P3, SLICE_MS)
        if lost >= 0:
            self._fail(lost, why)
        del self._kept[:first]
        self._before = end
        self._start = start + first if first < count else 0

    def _add(self, sends: Sequence[Message], receives: Sequence[Message]) -> int:
        """Put messages at the end of the table; the number of all that ever were in it."""
        kept, index, size = self._kept, self._index, _entry.size
        used = self._start + len(kept)
        if used + len(sends) + len(receives) > len(self._message_M4):
            used = self._make_room(len(sends) + len(receives))
        table, at = self._table, size * used
        for messages, direction in ((sends, OUT), (receives, IN)):
            for peer, data in messages:
                try:
                    address = addressof(_memory(data))
                except TypeError as error:
                    raise ValueError(f"a message for {peer}: {error}") from None
                _entry.pack_into(table, at, index[peer], direction, address, data.nbytes)
                at += size
                kept.append(data)
        return self._before + len(kept)

    def _make_room(self, more: int) -> int:
        """Move what is left to the beginning of a table with room for some more; its number."""
        count = len(self._kept)
        left_M4 = self._message_M4[self._start : self._start + count]
        self._message_M4 = np.zeros((max(MESSAGES_AT_FIRST, 2 * (count + more)), 4), np.int64)
        self._message_M4[:count] = left_M4
        self._table, self._start = self._message_M4.data.cast("B"), 0
        return count

    def _fail(self, lost: int, why: int) -> None:
        reason = "connection closed by the other end" if why == CLOSED else os.strerror(why)
        raise LostPeerError(f"lost {self.names[lost]}: {reason}")
