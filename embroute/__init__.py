"""embroute: route samples to embeddings, not embeddings to samples."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embroute.api.advice import Advice, advise
    from embroute.api.comparisons import Comparison, compare
    from embroute.api.frames import Dataset, open_data
    from embroute.api.simulations import Simulation, simulate
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
    from embroute.simulator.job_options import JobOptions
    from embroute.transport.interface import LostPeerError

__version__ = version("embroute")

__all__ = [
    "Advice",
    "Assignment",
    "Batch",
    "Cluster",
    "Comparison",
    "Dataset",
    "Decision",
    "Dispatch",
    "DispatchContext",
    "Evict",
    "JobOptions",
    "LostPeerError",
    "PartMemory",
    "Plan",
    "Policy",
    "Prepared",
    "RowWiseAdagrad",
    "RunStart",
    "Simulation",
    "State",
    "Sync",
    "SyncContext",
    "__version__",
    "advise",
    "compare",
    "make_decision",
    "make_policy",
    "open_data",
    "prepare",
    "register_policy",
    "route",
    "simulate",
]

_HOMES = {
    "Advice": "embroute.api.advice",
    "Assignment": "embroute.planner.interfaces",
    "Batch": "embroute.data.batch",
    "Cluster": "embroute.config.cluster",
    "Comparison": "embroute.api.comparisons",
    "Dataset": "embroute.api.frames",
    "Decision": "embroute.planner.kernels.transfers",
    "Dispatch": "embroute.planner.interfaces",
    "DispatchContext": "embroute.planner.interfaces",
    "Evict": "embroute.planner.interfaces",
    "JobOptions": "embroute.simulator.job_options",
    "LostPeerError": "embroute.transport.interface",
    "PartMemory": "embroute.planner.interfaces",
    "Plan": "embroute.planner.plan",
    "Policy": "embroute.planner.interfaces",
    "Prepared": "embroute.nn.prepared",
    "RowWiseAdagrad": "embroute.engine.optim",
    "RunStart": "embroute.planner.interfaces",
    "Simulation": "embroute.api.simulations",
    "State": "embroute.planner.state",
    "Sync": "embroute.planner.interfaces",
    "SyncContext": "embroute.planner.interfaces",
    "advise": "embroute.api.advice",
    "compare": "embroute.api.comparisons",
    "make_decision": "embroute.policies.sync.decision",
    "make_policy": "embroute.policies.catalog",
    "open_data": "embroute.api.frames",
    "prepare": "embroute.nn.prepare",
    "register_policy": "embroute.policies.catalog",
    "route": "embroute.nn.module_surgery",
    "simulate": "embroute.api.simulations",
}


def __getattr__(name: str) -> object:
    """Names are imported when they are asked for: only training needs torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'embroute' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
