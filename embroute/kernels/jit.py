"""The one way kernels are compiled: serial, without the GIL, cached on disk.

numba compiles again when a kernel's own file has changed, but not when the file of a kernel that it
calls has. So a digest of every file with kernels, and of the modules that such a file imports
(kernels may read their constants), names the cache folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PACKAGE = Path(__file__).parent.parent
_KERNEL = re.compile(r"^@(kernel|inlined)\b", re.MULTILINE)
_IMPORT = re.compile(r"^from embroute\.([\w.]+) import", re.MULTILINE)


@cache
def cache_folder() -> str:
    """The folder of this version's compiled kernels, in NUMBA_CACHE_DIR or the user's cache."""
    parent = os.environ.get("NUMBA_CACHE_DIR") or _user_cache()
    digest = sha256(numba.__version__.encode())
    for source in _sources_of_kernels():
        digest.update(source.encode())
    return str(Path(parent) / f"kernels-{digest.hexdigest()[:16]}")


def _sources_of_kernels() -> Iterator[str]:
    """The text of every file that can change a compiled kernel."""
    modules = sorted(_PACKAGE.rglob("*.py"))
    text_of = {path.relative_to(_PACKAGE): path.read_text("utf-8") for path in modules}
    needed = {path for path, text in text_of.items() if _KERNEL.search(text)}
    imported = {name for path in needed for name in _IMPORT.findall(text_of[path])}
    needed |= {Path(*name.split(".")).with_suffix(".py") for name in imported}
    return (text for path, text in text_of.items() if path in needed)


def _user_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(root or Path.home() / ".cache") / "embroute"
    except RuntimeError:  # a user without a home
        return _PACKAGE / "__pycache__"


@contextmanager
def _cached_apart() -> Iterator[None]:
    """Let numba cache these kernels in our folder; kernels of the user stay where they were."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = cache_folder()
    try:
        yield
    finally:
        config.CACHE_DIR = before


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a free function over arrays; it keeps its annotated type."""
    with _cached_apart():
        return cast(Callable[_P, _R], numba.njit(nogil=True, cache=True)(function))


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile into the callers: for functions that an inner loop calls.

    A call that is not inlined counts references to each array argument, every time.
    """
    with _cached_apart():
        return cast(Callable[_P, _R], numba.njit(nogil=True, cache=True, inline="always")(function))


def is_compiled(function: Callable[..., object]) -> bool:
    """Whether an earlier process left the compiled kernel on disk."""
    stats = getattr(function, "stats", None)
    if stats is None or not stats.cache_path:
        return False
    return any(Path(stats.cache_path).glob(f"*.{function.__name__}-*.nbi"))
