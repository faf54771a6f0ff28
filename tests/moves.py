"""The transfers of plans, one by one."""

from __future__ import annotations

from typing import NamedTuple

from embroute.kernels.transfers import Transfers


class Transfer(NamedTuple):
    """One transfer, unpacked."""

    worker: int
    row: int
    slot: int
    arena: int
    kind: int
    record: int
    phase: int


def unpack(transfers: Transfers) -> list[Transfer]:
    """Transfers one by one."""
    return [Transfer(*values) for values in zip(*(c.tolist() for c in transfers), strict=True)]
