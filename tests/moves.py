"""The transfers of plans one by one, the memory of a replay, and its error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from embroute.planner.kernels.transfers import Transfers

Key = tuple[int, int]  # (worker, row)


class LawBrokenError(AssertionError):
    """A plan breaks a law."""


def demand(truth: bool, *message: object) -> None:
    """Raise unless the condition holds."""
    if not truth:
        raise LawBrokenError(" ".join(map(str, message)))


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


@dataclass
class Copy:
    """A worker's copy of a row: its updates, and the updates that no other copy has yet (HET)."""

    row: int
    value: int
    has_state: bool
    clock: int
    start: int
    unsent: int = 0


@dataclass
class Memory:
    """The step before: trained rows and their copies, and the rows that left lazily or urgently."""

    rows: set[int] = field(default_factory=set)
    copies: set[Key] = field(default_factory=set)  # (worker, row)
    slots: set[tuple[int, int]] = field(default_factory=set)  # (worker, slot)
    urgent: set[int] = field(default_factory=set)
    lazy: set[int] = field(default_factory=set)
