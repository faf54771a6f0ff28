"""The one way kernels are compiled: serial, without the GIL, cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a free function over arrays; it keeps its annotated type."""
    return cast(Callable[P, R], numba.njit(nogil=True, cache=True)(function))


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile into its callers: for what an inner loop calls.

    A call that is not inlined counts references to every array it is given, each time.
    """
    return cast(Callable[P, R], numba.njit(nogil=True, cache=True, inline="always")(function))
