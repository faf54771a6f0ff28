"""embroute: route samples to embeddings, not embeddings to samples."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embroute.runtime.optim import RowWiseAdagrad
    from embroute.runtime.prepare import prepare
    from embroute.runtime.prepared import Prepared
    from embroute.runtime.tables import route

__version__ = version("embroute")
__all__ = ["Prepared", "RowWiseAdagrad", "__version__", "prepare", "route"]

_HOMES = {
    "Prepared": "embroute.runtime.prepared",
    "RowWiseAdagrad": "embroute.runtime.optim",
    "prepare": "embroute.runtime.prepare",
    "route": "embroute.runtime.tables",
}


def __getattr__(name: str) -> object:
    """What needs torch is imported when it is asked for: the simulator works without."""
    if name not in _HOMES:
        raise AttributeError(f"module 'embroute' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
