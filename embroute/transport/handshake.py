"""How two ranks prove to each other that they belong to one job, without I/O.

Both ends know the job's secret and never send it. Each end draws a nonce, and proves itself by an
HMAC over both nonces, the listener's identity and the caller's claim. Every message has a fixed
length, so a listener never keeps more than `HELLO_BYTES` bytes of an unknown caller.

    caller -> listener   hello: magic, nonce, claim (kind of channel and name)
    listener -> caller   reply: nonce, proof
    caller -> listener   proof
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

MAGIC = b"embrout2"
NONCE_BYTES, PROOF_BYTES, CLAIM_BYTES = 16, hashlib.sha256().digest_size, 64
HELLO_BYTES = len(MAGIC) + NONCE_BYTES + CLAIM_BYTES
REPLY_BYTES = NONCE_BYTES + PROOF_BYTES


class HandshakeError(ConnectionError):
    """The other end is no rank of this job."""


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class _Proofs:
    """The proofs of one connection. Each end has its own label, so no end can echo a proof."""

    secret: bytes
    listener: str
    hello: bytes
    listener_nonce: bytes

    def of(self, end: str) -> bytes:
        parts = [end.encode(), self.listener.encode(), self.hello, self.listener_nonce]
        text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self.secret, text, "sha256")

    def check(self, end: str, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self.of(end)):
            raise HandshakeError(None, "it does not know the job's secret")


@dataclass
class CallerHandshake:
    """The caller's end: send `hello`, give `answer` the reply, send the result."""

    secret: bytes
    listener: str  # identity, as the listener published it
    kind: str
    name: str
    nonce: bytes = field(default_factory=_nonce)

    @property
    def hello(self) -> bytes:
        """The first message."""
        claim = f"{self.kind} {self.name}".encode().ljust(CLAIM_BYTES)
        if len(claim) > CLAIM_BYTES:
            raise ValueError(f"{self.kind} {self.name}: longer than {CLAIM_BYTES} bytes")
        return MAGIC + self.nonce + claim

    def answer(self, reply: bytes) -> bytes:
        """Check the listener's proof; returns the caller's."""
        proofs = _Proofs(self.secret, self.listener, self.hello, reply[:NONCE_BYTES])
        proofs.check("listener", reply[NONCE_BYTES:])
        return proofs.of("caller")


class ListenerHandshake:
    """The listener's end of one connection, given bytes as they arrive."""

    def __init__(self, secret: bytes, listener: str) -> None:
        self._secret, self._listener = secret, listener
        self._proofs: _Proofs | None = None
        self._bytes = b""
        self.claim: tuple[str, str] | None = None  # kind and name of a caller that proved itself

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still missing from the message that is arriving."""
        whole = HELLO_BYTES if self._proofs is None else PROOF_BYTES
        return whole - len(self._bytes)

    def receive(self, data: bytes) -> bytes:
        """Take at most `missing_bytes` bytes in; returns the bytes to send."""
        self._bytes += data
        if self.missing_bytes:
            # A caller that does not begin like a rank is refused at once, not at the time-out.
            if not MAGIC.startswith(self._bytes[: len(MAGIC)]) and self._proofs is None:
                raise HandshakeError(None, "no rank of this version")
            return b""
        message, self._bytes = self._bytes, b""
        if self._proofs is None:
            return self._reply(message)
        self._proofs.check("caller", message)
        self.claim = _claim(self._proofs.hello)
        return b""

    def _reply(self, hello: bytes) -> bytes:
        if not hello.startswith(MAGIC):
            raise HandshakeError(None, "no rank of this version")
        self._proofs = _Proofs(self._secret, self._listener, hello, _nonce())
        return self._proofs.listener_nonce + self._proofs.of("listener")


def _claim(hello: bytes) -> tuple[str, str]:
    """Kind and name that a hello claims."""
    try:
        kind, name = hello[-CLAIM_BYTES:].decode("ascii").split()
    except ValueError:
        raise HandshakeError(None, "its claim is not a kind and a name") from None
    return kind, name
