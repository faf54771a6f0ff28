"""Messages over connections of our own: sockets driven by a kernel, without torch in between.

Gloo takes 0.15 ms and two changes of thread for a message however small; a step has several.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass

import numpy as np

from embroute.kernels.streams import CLOSED, DONE, IN, OUT, begin, drive
from embroute.runtime.exchange import Bytes, LostPeerError, Message

SLICE_MS = 200  # of waiting, after which Python sees to signals
ROOM = 64  # messages on their way for which there is room at first
_memory = (c_char * 0).from_buffer  # numpy's own way to tell an address takes four times as long


@dataclass(frozen=True)
class StreamPosted:
    """Messages on their way."""

    channel: StreamChannel
    end: int  # of all that were ever posted to the channel, up to these

    def wait(self) -> None:
        """Drive these, and whatever was posted before and after them."""
        self.channel.drive(self.end)


class StreamChannel:
    """Sockets to some other ranks. One thread only."""

    def __init__(self, sockets: dict[str, socket.socket]) -> None:
        self.names = list(sockets)
        self.sockets = list(sockets.values())
        self._index = {name: i for i, name in enumerate(self.names)}
        self._fd_P = np.array([sock.fileno() for sock in self.sockets], np.int32)
        self._least_P = np.ones(len(self.sockets), np.int32)  # bytes that wake a wait for a peer
        self._message_M4 = np.zeros((ROOM, 4), np.int64)
        self._kept: list[Bytes] = []  # what messages point to
        self._before = 0  # messages posted before the first of these

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> StreamPosted:
        """What fits the sockets leaves at once."""
        posted = self._add(sends, receives)
        if sends:
            self._check(*begin(self._message_M4[: len(self._kept)], self._fd_P))
        return posted

    def swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Post everything, and wait for it."""
        self._add(sends, receives).wait()

    def close(self) -> None:
        """Close every socket."""
        for sock in self.sockets:
            sock.close()

    def drive(self, end: int) -> None:
        """Move messages until all up to one have left or arrived."""
        while end > self._before and not self._drive(end - self._before):
            pass

    def _add(self, sends: Sequence[Message], receives: Sequence[Message]) -> StreamPosted:
        for messages, direction in ((sends, OUT), (receives, IN)):
            for peer, data in messages:
                i = len(self._kept)
                if i == len(self._message_M4):
                    self._message_M4 = np.concatenate([self._message_M4, self._message_M4])
                try:
                    address = addressof(_memory(data.data))
                except TypeError as error:
                    raise ValueError(f"a message for {peer}: {error}") from None
                self._kept.append(data)
                self._message_M4[i] = (self._index[peer], direction, address, data.nbytes)
        return StreamPosted(self, self._before + len(self._kept))

    def _drive(self, first: int) -> bool:
        """Whether the first messages have all left or arrived, after some waiting."""
        message_M4 = self._message_M4[: len(self._kept)]
        lost, why = drive(message_M4, first, self._fd_P, self._least_P, SLICE_MS)
        self._check(lost, why)
        if lost == DONE:
            self._forget(first)
        return lost == DONE

    def _check(self, lost: int, why: int) -> None:
        if lost >= 0:
            reason = "connection closed by the other end" if why == CLOSED else os.strerror(why)
            raise LostPeerError(f"lost {self.names[lost]}: {reason}")

    def _forget(self, first: int) -> None:
        """Messages that were waited for make room."""
        left = len(self._kept) - first
        if left:
            self._message_M4[:left] = self._message_M4[first : first + left].copy()
        del self._kept[:first]
        self._before += first
