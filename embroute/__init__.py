"""embroute: route samples to embeddings, not embeddings to samples."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embroute.api.advice import Advice as Advice
    from embroute.api.advice import advise as advise
    from embroute.api.comparisons import Comparison as Comparison
    from embroute.api.comparisons import compare as compare
    from embroute.api.frames import Dataset as Dataset
    from embroute.api.frames import open_data as open_data
    from embroute.api.runs import TrainedRun as TrainedRun
    from embroute.api.runs import load_run as load_run
    from embroute.api.simulations import Simulation as Simulation
    from embroute.api.simulations import simulate as simulate
    from embroute.config.cluster import Cluster as Cluster
    from embroute.config.cluster import Host as Host
    from embroute.config.cluster import Worker as Worker
    from embroute.config.cluster_file import open_cluster as open_cluster
    from embroute.config.run_options import JobOptions as JobOptions
    from embroute.config.run_options import RunConfig as RunConfig
    from embroute.data.batch import Batch as Batch
    from embroute.engine.optim import RowWiseAdagrad as RowWiseAdagrad
    from embroute.nn.module_surgery import route as route
    from embroute.nn.prepare import prepare as prepare
    from embroute.nn.prepared import Prepared as Prepared
    from embroute.planner.interfaces import Assignment as Assignment
    from embroute.planner.interfaces import Dispatch as Dispatch
    from embroute.planner.interfaces import DispatchContext as DispatchContext
    from embroute.planner.interfaces import Evict as Evict
    from embroute.planner.interfaces import PartMemory as PartMemory
    from embroute.planner.interfaces import Policy as Policy
    from embroute.planner.interfaces import RunStart as RunStart
    from embroute.planner.interfaces import Sync as Sync
    from embroute.planner.interfaces import SyncContext as SyncContext
    from embroute.planner.kernels.transfers import Decision as Decision
    from embroute.planner.plan import Plan as Plan
    from embroute.planner.state import PlanError as PlanError
    from embroute.planner.state import State as State
    from embroute.policies.catalog import make_policy as make_policy
    from embroute.policies.catalog import register_policy as register_policy
    from embroute.policies.sync.decision import make_decision as make_decision
    from embroute.transport.interface import LostPeerError as LostPeerError

__version__ = version("embroute")

# The public names by module. They are imported when they are asked for: only training needs torch.
_NAMES = {
    "api.advice": "Advice advise",
    "api.comparisons": "Comparison compare",
    "api.frames": "Dataset open_data",
    "api.runs": "TrainedRun load_run",
    "api.simulations": "Simulation simulate",
    "config.cluster": "Cluster Host Worker",
    "config.cluster_file": "open_cluster",
    "config.run_options": "JobOptions RunConfig",
    "data.batch": "Batch",
    "engine.optim": "RowWiseAdagrad",
    "nn.module_surgery": "route",
    "nn.prepare": "prepare",
    "nn.prepared": "Prepared",
    "planner.interfaces": "Assignment Dispatch DispatchContext Evict PartMemory Policy RunStart "
    "Sync SyncContext",
    "planner.kernels.transfers": "Decision",
    "planner.plan": "Plan",
    "planner.state": "PlanError State",
    "policies.catalog": "make_policy register_policy",
    "policies.sync.decision": "make_decision",
    "transport.interface": "LostPeerError",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(["__version__", *_HOMES])


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'embroute' has no attribute {name!r}")
    return getattr(import_module(f"embroute.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
