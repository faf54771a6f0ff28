"""Bytes through connected sockets: many messages at once, those of one peer in order.

Axes: M messages, P peers, D directions (in, out).
"""

from __future__ import annotations

import errno
import socket
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from embroute.kernels.jit import kernel

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_call = types.int64(types.int32, types.uintp, types.uintp, types.int32)
_send: Any = types.ExternalFunction("send", _call)
_recv: Any = types.ExternalFunction("recv", _call)
_option = types.int32(types.int32, types.int32, types.int32, types.uintp, types.uint32)
_setsockopt: Any = types.ExternalFunction("setsockopt", _option)
_poll: Any = types.ExternalFunction("poll", types.int32(types.uintp, types.uintp, types.int32))
_pointer: Any = types.CPointer
_errno: Any = types.ExternalFunction("__errno_location", _pointer(types.int32)())
_carray: Any = numba.carray  # type: ignore[attr-defined]

FLAGS = int(getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0))
READABLE, WRITABLE = 1, 4  # of poll
INTERRUPTED, FULL = errno.EINTR, errno.EAGAIN
CLOSED = 0  # instead of an error's number: the other end has closed the connection

LEVEL, LEAST = int(socket.SOL_SOCKET), int(socket.SO_RCVLOWAT)
FEW, MOST = 4096, 1 << 20  # bytes: of fewer any one wakes us, and more are not waited for together

IN, OUT = 0, 1
PEER, DIRECTION, ADDRESS, LEFT = range(4)  # of a message: the bytes that have not moved yet
DONE, LATER = -1, -2


@kernel
def _move(message_4: I64, fd: int) -> int:
    """Move as much of a message as goes; an error's number, DONE, or LATER."""
    while message_4[LEFT] > 0:
        address, left = np.uint64(message_4[ADDRESS]), np.uint64(message_4[LEFT])
        if message_4[DIRECTION] == OUT:
            moved = _send(fd, address, left, FLAGS)
        else:
            moved = _recv(fd, address, left, FLAGS)
        if moved > 0:
            message_4[ADDRESS] += moved
            message_4[LEFT] -= moved
            if message_4[LEFT] > 0:
                return LATER  # the system had no more, or no more room: asking again is in vain
        elif moved == 0:
            return CLOSED
        else:
            number = _carray(_errno(), 1)[0]
            if number == FULL:
                return LATER
            if number != INTERRUPTED:
                return int(number)
    return DONE


@kernel
def _push(message_M4: I64, first: int, fd_P: I32, blocked_DP: Bools) -> tuple[int, int]:
    """Move what can be moved without waiting; a peer that is lost and why, or DONE.

    Of what comes only the first messages, there is time for the others. `blocked_DP`: peers whose
    next message waits; those that are marked are not tried.
    """
    for m in range(len(message_M4)):
        p, direction = message_M4[m, PEER], message_M4[m, DIRECTION]
        tried = not blocked_DP[direction, p] and (m < first or direction == OUT)
        if tried and message_M4[m, LEFT] > 0:
            outcome = _move(message_M4[m], fd_P[p])
            if outcome >= 0:
                return p, outcome
            blocked_DP[direction, p] = outcome == LATER
    return DONE, 0


@kernel
def _wait(fd_P: I32, blocked_DP: Bools, timeout_ms: int) -> bool:
    """Wait until a blocked peer can go on, and unmark it; not if the time is over or a signal came.

    `asked_P2` is an array of struct pollfd: a file, what is asked, and above it what happened.
    """
    asked_P2 = np.zeros((len(fd_P), 2), np.int32)
    for p in range(len(fd_P)):
        events = READABLE * blocked_DP[IN, p] + WRITABLE * blocked_DP[OUT, p]
        asked_P2[p, 0] = fd_P[p] if events else -1  # which poll skips
        asked_P2[p, 1] = events
    if _poll(asked_P2.ctypes.data, np.uint64(len(fd_P)), timeout_ms) <= 0:
        return False
    for p in range(len(fd_P)):
        happened = asked_P2[p, 1] >> 16
        if happened & ~WRITABLE:  # an error too is met by trying
            blocked_DP[IN, p] = False
        if happened & ~READABLE:
            blocked_DP[OUT, p] = False
    return True


@kernel
def _expect(message_M4: I64, fd_P: I32, least_P: I32) -> None:
    """Let the system wake us when all that is awaited of a peer is there, not at every packet."""
    wanted_P = np.zeros(len(fd_P), np.int64)
    for m in range(len(message_M4)):
        if message_M4[m, DIRECTION] == IN:
            wanted_P[message_M4[m, PEER]] += message_M4[m, LEFT]
    value = np.empty(1, np.int32)
    for p in range(len(fd_P)):
        value[0] = min(wanted_P[p], MOST) if wanted_P[p] > FEW else 1
        if value[0] != least_P[p]:
            least_P[p] = value[0]
            _setsockopt(fd_P[p], LEVEL, LEAST, value.ctypes.data, np.uint32(4))


@kernel
def begin(message_M4: I64, fd_P: I32) -> tuple[int, int]:
    """Send what leaves without waiting; a peer that is lost and why, or DONE."""
    return _push(message_M4, 0, fd_P, np.zeros((2, len(fd_P)), np.bool_))


@kernel
def drive(message_M4: I64, first: int, fd_P: I32, least_P: I32, timeout_ms: int) -> tuple[int, int]:
    """Move messages until the first few are done; a peer that is lost and why, DONE, or LATER."""
    blocked_DP = np.zeros((2, len(fd_P)), np.bool_)
    while True:
        lost, why = _push(message_M4, first, fd_P, blocked_DP)
        if lost >= 0:
            return lost, why
        if not message_M4[:first, LEFT].any():
            return DONE, 0
        _expect(message_M4[:first], fd_P, least_P)
        if not _wait(fd_P, blocked_DP, timeout_ms):
            return LATER, 0  # signals are Python's business
