"""The header before every message, which both ends know in advance.

The sender writes it and the receiver compares it with its own. So a message that is lost, damaged
or out of order is an error at once, and its content is never read as rows.
"""

from __future__ import annotations

from collections import Counter
from struct import Struct

from embroute.transport.interface import MessageError

HEADER_MAGIC = b"emb3"  # with the version of this layout
# Of a channel as a whole, of the phases of rows, and of a file of memory.
MESSAGE_KINDS = (
    "plans",
    "answers",
    "star",
    "sums",
    "rows",
    "early",
    "urgent",
    "drain",
    "aside",
    "memory",
)
NO_STEP = -1  # the step of messages outside of steps
_layout = Struct("<4sI3q")  # magic, kind, step, number in its direction, bytes of the content
HEADER_BYTES = _layout.size


def header(kind: str, step: int, number: int, size: int) -> bytes:
    """The header of a message."""
    return _layout.pack(HEADER_MAGIC, MESSAGE_KINDS.index(kind), step, number, size)


def _described(data: bytes) -> str:
    """The content of a header, in words."""
    if len(data) != HEADER_BYTES:
        return f"{len(data)} of {HEADER_BYTES} bytes of a header"
    magic, kind, step, number, size = _layout.unpack(data)
    if magic != HEADER_MAGIC or kind >= len(MESSAGE_KINDS):
        return "bytes that are no header"
    return f"kind {MESSAGE_KINDS[kind]}, step {step}, message {number}, {size} bytes"


def check_header(peer: str, arrived: bytes | bytearray, expected: bytes) -> None:
    """Refuse a message with another header than the expected one."""
    if arrived != expected:
        raise MessageError(
            f"message of {peer}: expected {_described(expected)}; got {_described(bytes(arrived))}"
        )


class MessageCounter:
    """Labels and counts the messages of one rank's channel, and makes their headers."""

    def __init__(self, kind: str) -> None:
        self.label = kind, NO_STEP
        self._sent, self._expected = Counter[str](), Counter[str]()

    def begin(self, kind: str, step: int) -> None:
        """Label all messages from now on."""
        self.label = kind, step

    def sent(self, peer: str, size: int) -> bytes:
        """The header of the next message to a peer."""
        self._sent[peer] += 1
        return header(*self.label, self._sent[peer], size)

    def expected(self, peer: str, size: int) -> bytes:
        """The header that the next message of a peer must have."""
        self._expected[peer] += 1
        return header(*self.label, self._expected[peer], size)
