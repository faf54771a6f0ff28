"""embroute: route samples to embeddings, not embeddings to samples."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embroute.engine.optim import RowWiseAdagrad
    from embroute.nn.module_surgery import route
    from embroute.nn.prepare import prepare
    from embroute.nn.prepared import Prepared

__version__ = version("embroute")
__all__ = ["Prepared", "RowWiseAdagrad", "__version__", "prepare", "route"]

_HOMES = {
    "Prepared": "embroute.nn.prepared",
    "RowWiseAdagrad": "embroute.engine.optim",
    "prepare": "embroute.nn.prepare",
    "route": "embroute.nn.module_surgery",
}


def __getattr__(name: str) -> object:
    """What needs torch is imported when it is asked for: the simulator works without."""
    if name not in _HOMES:
        raise AttributeError(f"module 'embroute' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
