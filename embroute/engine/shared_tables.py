"""Tables in memory that all shards and workers of one machine share, and how they take turns.

Rows of one width lie side by side, one shard's after the other's. A shard sees its own part, a
worker all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from embroute.engine.sharding import RowSharding
from embroute.engine.store import RecordWidths
from embroute.kernels.rows import Floats
from embroute.transport.buffers import MessageTransport

_ALIGN = 64


def shared_tables(
    transport: MessageTransport, sharding: RowSharding, widths: RecordWidths
) -> list[Floats]:
    """All rows of each arena; every shard and every worker has to ask for them."""
    counts = sharding.counts_KA.sum(0).tolist()
    sizes = [
        count * whole * widths.dtype.itemsize
        for count, whole in zip(counts, widths.whole, strict=True)
    ]
    whole_lines = [-(-size // _ALIGN) * _ALIGN for size in sizes]
    memory = transport.common_memory(max(_ALIGN, sum(whole_lines)))
    if memory is None:
        raise ValueError(
            "policy in-place: shards and workers share no memory; they must be on one Linux "
            "machine, without EMBROUTE_EXCHANGE=gloo"
        )
    found, firsts = [], accumulate(whole_lines[:-1], initial=0)
    for first, size, count, whole in zip(firsts, sizes, counts, widths.whole, strict=True):
        rows = memory[first : first + size].view(widths.dtype)
        found.append(rows.reshape(count, whole))
    return found


def part_of(tables: Sequence[Floats], sharding: RowSharding, shard: int) -> list[Floats]:
    """A shard's own rows."""
    firsts, counts = sharding.first_KA[shard].tolist(), sharding.counts_KA[shard].tolist()
    return [
        rows[first : first + count]
        for rows, first, count in zip(tables, firsts, counts, strict=True)
    ]


def tell(transport: MessageTransport, peers: Sequence[str]) -> None:
    """Say that what this rank had to do is done."""
    transport.submit([transport.acquire(peer, 1) for peer in peers], []).wait()


def hear(transport: MessageTransport, peers: Sequence[str]) -> None:
    """Wait until all of them have said so."""
    said = transport.submit([], [(peer, 1) for peer in peers])
    said.wait()
    said.release()
