"""embroute: route samples to embeddings, not embeddings to samples."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embroute.api.advice import Advice, advise
    from embroute.api.comparisons import Comparison, compare
    from embroute.api.frames import Dataset, open_data
    from embroute.api.runs import TrainedRun, load_run
    from embroute.api.simulations import Simulation, simulate
    from embroute.config.cluster import Cluster, Host, Worker
    from embroute.config.cluster_file import open_cluster
    from embroute.config.run_options import JobOptions, RunConfig
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
    from embroute.planner.state import PlanError, State
    from embroute.policies.catalog import make_policy, register_policy
    from embroute.policies.sync.decision import make_decision
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
    "Host",
    "JobOptions",
    "LostPeerError",
    "PartMemory",
    "Plan",
    "PlanError",
    "Policy",
    "Prepared",
    "RowWiseAdagrad",
    "RunConfig",
    "RunStart",
    "Simulation",
    "State",
    "Sync",
    "SyncContext",
    "TrainedRun",
    "Worker",
    "__version__",
    "advise",
    "compare",
    "load_run",
    "make_decision",
    "make_policy",
    "open_cluster",
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
    "Host": "embroute.config.cluster",
    "JobOptions": "embroute.config.run_options",
    "LostPeerError": "embroute.transport.interface",
    "PartMemory": "embroute.planner.interfaces",
    "Plan": "embroute.planner.plan",
    "PlanError": "embroute.planner.state",
    "Policy": "embroute.planner.interfaces",
    "Prepared": "embroute.nn.prepared",
    "RowWiseAdagrad": "embroute.engine.optim",
    "RunConfig": "embroute.config.run_options",
    "RunStart": "embroute.planner.interfaces",
    "Simulation": "embroute.api.simulations",
    "State": "embroute.planner.state",
    "Sync": "embroute.planner.interfaces",
    "SyncContext": "embroute.planner.interfaces",
    "advise": "embroute.api.advice",
    "TrainedRun": "embroute.api.runs",
    "Worker": "embroute.config.cluster",
    "load_run": "embroute.api.runs",
    "open_cluster": "embroute.config.cluster_file",
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
