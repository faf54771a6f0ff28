"""The one way kernels are compiled: serial, without the GIL, cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core.caching import _CacheLocator

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PACKAGE = Path(__file__).parent.parent


def _cache_of(folder: Path) -> Path:
    """Where numba keeps the compiled kernels of a folder's files; NUMBA_CACHE_DIR moves them."""
    moved_to: str = getattr(numba.config, "CACHE_DIR", "")
    if not moved_to:
        return folder / "__pycache__"
    locator: Any = _CacheLocator
    return Path(moved_to) / str(locator.get_suitable_cache_subpath(str(folder / "any.py")))


def _drop_old_caches() -> None:
    """Remove kernels that another version of the package compiled in the same place.

    A cached kernel knows whether its own file changed, not whether a file it calls into did, and
    loading it may need types that are gone.
    """
    try:
        sources = sorted((_PACKAGE / "kernels").glob("*.py"))
        digest = sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        now = f"{version('embroute')} numba {numba.__version__} {digest}"
        stamp = _cache_of(_PACKAGE / "kernels") / "compiled-by"
        if stamp.exists() and stamp.read_text() == now:
            return
        for folder in _PACKAGE.glob("**/"):
            for index in _cache_of(folder).glob("*.nbi"):
                index.unlink(missing_ok=True)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(now)
    except (OSError, PackageNotFoundError):
        return  # a folder that cannot be written to holds no caches of ours either


_drop_old_caches()


def kernel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a free function over arrays; it keeps its annotated type."""
    return cast(Callable[_P, _R], numba.njit(nogil=True, cache=True)(function))


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile into its callers: for what an inner loop calls.

    A call that is not inlined counts references to every array it is given, each time.
    """
    return cast(Callable[_P, _R], numba.njit(nogil=True, cache=True, inline="always")(function))


def is_compiled(function: Callable[..., object]) -> bool:
    """Whether an earlier process left the compiled kernel on disk."""
    stats = getattr(function, "stats", None)
    if stats is None or not stats.cache_path:
        return False
    return any(Path(stats.cache_path).glob(f"*.{function.__name__}-*.nbi"))
