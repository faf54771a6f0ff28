"""The two sizes of the suite: small for every change, full for `pytest -m ""`.

A test of the mark `full` or `slow` runs in the full suite only. Other tests run in both, some of
them with fewer steps or fewer generated examples in the small one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import TypeVar

import pytest
from hypothesis import settings

SMALL, FULL = "small", "full"
Value = TypeVar("Value")

# The same examples in every run, and no deadline: the machine may be busy.
settings.register_profile(SMALL, derandomize=True, deadline=None, max_examples=25)
settings.register_profile(FULL, derandomize=True, deadline=None, max_examples=100)
settings.load_profile(SMALL)


def choose_size(marks: str) -> None:
    """Follow pytest's `-m`: where it leaves out the mark `full`, tests are small."""
    settings.load_profile(SMALL if "not full" in marks else FULL)


def sized(small: Value, full: Value) -> Value:
    """The first in the small suite, the second in the full one."""
    return full if settings.get_current_profile_name() == FULL else small


def marked_full(cases: Iterable[str], small: Collection[str]) -> list[object]:
    """Parameters of a test, of which only `small` run in the small suite."""
    cases = list(cases)
    assert set(small) <= set(cases), set(small) - set(cases)
    full = pytest.mark.full
    return [case if case in small else pytest.param(case, marks=full) for case in cases]


def crossed(rows: list[str], columns: list[str], row: str, column: str) -> list[object]:
    """All pairs; only those of one row and those of one column run in the small suite."""
    return [
        (a, b) if row == a or column == b else pytest.param(a, b, marks=pytest.mark.full)
        for a, b in product(rows, columns)
    ]
