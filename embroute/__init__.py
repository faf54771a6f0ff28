"""embroute: route samples to embeddings, not embeddings to samples."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embroute.config.cluster import Cluster
    from embroute.data.batch import Batch
    from embroute.engine.optim import RowWiseAdagrad
    from embroute.nn.module_surgery import route
    from embroute.nn.prepare import prepare
    from embroute.nn.prepared import Prepared
    from embroute.planner.interfaces import (
        Assignment,
        Dispatch,
        DispatchContext,
        Evict,
        PartMemory,
        Policy,
        RunStart,
        Sync,
        SyncContext,
    )
    from embroute.planner.kernels.transfers import Decision
    from embroute.planner.plan import Plan
    from embroute.planner.state import State
    from embroute.policies.catalog import make_policy, register_policy
    from embroute.policies.sync.decision import make_decision

__version__ = version("embroute")

__all__ = [
    "Assignment",
    "Batch",
    "Cluster",
    "Decision",
    "Dispatch",
    "DispatchContext",
    "Evict",
    "PartMemory",
    "Plan",
    "Policy",
    "Prepared",
    "RowWiseAdagrad",
    "RunStart",
    "State",
    "Sync",
    "SyncContext",
    "__version__",
    "make_decision",
    "make_policy",
    "prepare",
    "register_policy",
    "route",
]

_HOMES = {
    "Assignment": "embroute.planner.interfaces",
    "Batch": "embroute.data.batch",
    "Cluster": "embroute.config.cluster",
    "Decision": "embroute.planner.kernels.transfers",
    "Dispatch": "embroute.planner.interfaces",
    "DispatchContext": "embroute.planner.interfaces",
    "Evict": "embroute.planner.interfaces",
    "PartMemory": "embroute.planner.interfaces",
    "Plan": "embroute.planner.plan",
    "Policy": "embroute.planner.interfaces",
    "Prepared": "embroute.nn.prepared",
    "RowWiseAdagrad": "embroute.engine.optim",
    "RunStart": "embroute.planner.interfaces",
    "State": "embroute.planner.state",
    "Sync": "embroute.planner.interfaces",
    "SyncContext": "embroute.planner.interfaces",
    "make_decision": "embroute.policies.sync.decision",
    "make_policy": "embroute.policies.catalog",
    "prepare": "embroute.nn.prepare",
    "register_policy": "embroute.policies.catalog",
    "route": "embroute.nn.module_surgery",
}


def __getattr__(name: str) -> object:
    """Names are imported when they are asked for: only training needs torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'embroute' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
