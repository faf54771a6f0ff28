"""The job as every rank describes it before the first batch: tables, optimizer, caches."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from embroute.checkpoint.job_checkpoints import CheckpointSettings
from embroute.checkpoint.manifest import Identity
from embroute.checkpoint.rank_files import identity_of
from embroute.config.cluster import Cluster, uniform_cluster
from embroute.config.cluster_file import is_file, open_cluster
from embroute.config.option_types import quota_shares
from embroute.config.spec import shown
from embroute.engine import optim
from embroute.engine.batches import BatchAdapter, SampleAdapter
from embroute.engine.observe.metrics import Meter, StepLog
from embroute.engine.optim import Rate, RowOptimizer
from embroute.engine.sharding import RowSharding
from embroute.engine.store import RecordWidths
from embroute.launch.process import install_exit_hooks, tune_process
from embroute.launch.rank import RankContext, RankTopology, on_one_node
from embroute.launch.rendezvous import connect
from embroute.nn.embedding import LookupContext, RoutedLayer
from embroute.nn.module_surgery import field_embeddings, find_layers, replace_fields, replace_layers
from embroute.nn.settings import Settings, cache_size
from embroute.nn.tensor_batches import TensorAdapter
from embroute.planner.interfaces import Policy
from embroute.planner.row_store import row_store_of
from embroute.planner.setup import Setup
from embroute.policies.catalog import PolicyLike, policy_of
from embroute.transport.interface import LostPeerError
from embroute.transport.job_store import FOLDER, SHARDS_VARIABLE


@dataclass(frozen=True)
class TrainingJob:
    """A job as every rank knows it before the first batch."""

    rank: RankContext
    settings: Settings
    adapter: BatchAdapter
    policy: Policy
    setup: Setup
    optimizer: RowOptimizer
    rate: Rate
    weights: list[torch.Tensor]
    lookup_context: LookupContext
    layers: list[RoutedLayer]
    model: nn.Module
    optimizers: list[Optimizer]
    run_id: str = ""  # empty until all ranks have agreed on it

    @property
    def sharding(self) -> RowSharding:
        """The shard and offset of each row."""
        return RowSharding(self.setup)

    @property
    def widths(self) -> RecordWidths:
        """The columns of records."""
        dtype = np.dtype(str(self.weights[0].dtype)[6:])
        stamped = self.settings.get("debug") == "versions"
        return RecordWidths(self.sharding, self.optimizer, dtype, stamped)

    def padding(self, table: int) -> int:
        """The id of a table that means no row; -1 if the table has no such id."""
        if not isinstance(self.adapter, TensorAdapter):
            return -1
        padding = self.adapter.layers[table].padding
        return -1 if padding is None else padding

    def new_meter(self) -> Meter:
        """A meter for this rank."""
        peers = "shard" if self.rank.role == "worker" else "worker"
        return Meter(peers, log=StepLog() if self.settings.get("debug") == "steps" else None)

    @property
    def epochs(self) -> int:
        """How many times the coordinator reads the loader."""
        return self.settings["epochs"]

    @property
    def checkpoints(self) -> CheckpointSettings | None:
        """The folder of checkpoints, and how many to keep; None if the job saves none."""
        if "checkpoint" not in self.settings:
            return None
        folder = Path(self.settings["checkpoint"])
        return CheckpointSettings(folder, self.settings["keep"], self.run_id)

    @property
    def identity(self) -> Identity:
        """What the job and a checkpoint must have in common."""
        dense = self.model.state_dict()
        return identity_of(self.sharding, self.optimizer, self.widths.dtype, dense)


def describe_job(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    rank: RankContext,
    settings: Settings,
) -> TrainingJob:
    """Find the tables, take them out of model and optimizer, and size the caches."""
    optimizers = _as_list(model, optimizer)
    adapter, weights, widths = _find_tables(model, settings)
    row_optimizer, rate = _take_tables(weights, optimizers, float(settings["decay"]))
    policy = trainable_policy(settings["policy"], "policy=")
    cluster = _cluster(policy, rank, settings, _dense_bytes(model, weights))
    _check(cluster, rank, settings)
    setup = Setup(
        adapter.schema,
        cluster,
        widths,
        optimizer=row_optimizer.name,
        cache=row_store_of(policy).cache_size(policy, cache_size(settings)),
        shares=quota_shares(settings.get("quotas")) or _shares_by_speed(policy, cluster),
        seed=settings["seed"],
        # Only rows on the meta device have their initial values from the seed.
        seeded="tables" not in settings and all(weight.is_meta for weight in weights),
    )
    row_store_of(policy).check_hosts(policy, cluster)
    if policy.sync.shared_memory and settings.get("debug") == "versions":
        raise ValueError(f"debug='versions': policy {policy.name} sends no rows with versions")
    arena_of_table = tuple(setup.arenas.index(width) for width in widths)
    lookup_context = LookupContext(setup.arenas, arena_of_table, settings["device"])
    return TrainingJob(
        rank=rank,
        settings=settings,
        adapter=adapter,
        policy=policy,
        setup=setup,
        optimizer=row_optimizer,
        rate=rate,
        weights=weights,
        lookup_context=lookup_context,
        layers=_route_layers(model, settings, lookup_context),
        model=model,
        optimizers=optimizers,
    )


def _route_layers(
    model: nn.Module, settings: Settings, lookup_context: LookupContext
) -> list[RoutedLayer]:
    """Replace the model's tables; returns the routed layers of a user's model."""
    plain = field_embeddings(model)
    if plain is None:
        modules = find_layers(model, settings["min_rows"])
        return replace_layers(model, modules, lookup_context)
    replace_fields(model, plain, lookup_context)
    return []


def _as_list(model: object, optimizer: object) -> list[Optimizer]:
    """The optimizers as a list, after checks of the types of model and optimizers."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if not optimizers or not all(isinstance(entry, Optimizer) for entry in optimizers):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or a list of some, got {shown(optimizer)}"
        )
    if len({id(entry) for entry in optimizers}) < len(optimizers):
        raise ValueError(f"optimizer: the list of {len(optimizers)} has an optimizer twice")
    return list(optimizers)


def check_device(name: str, option: str = "--device") -> None:
    """Refuse a device that this machine's torch cannot use."""
    try:
        if torch.device(name).type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{option} {name}: torch cannot use it here: {reason}") from None


def trainable_policy(policy: PolicyLike, option: str = "--policy") -> Policy:
    """A policy, perhaps by name; refuses one that leaves workers out."""
    policy = policy_of(option, policy)
    if policy.workers != "all":
        raise ValueError(
            f"{option} {policy.name!r}: workers={policy.workers} is for compare and simulate; in "
            f"training leave a worker out by a share of 0, e.g. --quotas 1,1,0"
        )
    return policy


def assumed_cluster(
    policy: Policy, num_workers: int, num_shards: int, num_row_nodes: int = 1
) -> Cluster:
    """The cluster that a policy assumes without network=; `num_row_nodes`: see `RankTopology`."""
    cluster = uniform_cluster(num_workers, num_shards)
    return cluster.together() if policy.sync.shared_memory and num_row_nodes == 1 else cluster


def _cluster(policy: Policy, rank: RankContext, settings: Settings, dense_bytes: float) -> Cluster:
    """The network as the policy knows it, with the costs of compute and dense gradients."""
    num_row_nodes = RankTopology(settings["nodes"]).num_row_nodes if "nodes" in settings else 1
    assumed = assumed_cluster(policy, rank.num_workers, rank.num_shards, num_row_nodes)
    network = settings.get("network", assumed)
    cluster = open_cluster(network) if isinstance(network, str) else network
    compute_s = settings.get("compute_ms_per_sample", 0.0) / 1e3
    return replace(
        cluster,
        compute_s_per_sample=compute_s or cluster.compute_s_per_sample,
        dense_bytes=cluster.dense_bytes or dense_bytes,
    )


def _dense_bytes(model: nn.Module, weights: Sequence[torch.Tensor]) -> float:
    """Bytes of the dense gradients, which are summed over workers."""
    tables = {id(weight) for weight in weights}
    dense = (p for p in model.parameters() if p.requires_grad and id(p) not in tables)
    return float(sum(p.numel() * p.element_size() for p in dense))


def _shares_by_speed(policy: Policy, cluster: Cluster) -> tuple[float, ...]:
    """Shares by worker speed where quotas are free and the cost of a sample is unknown."""
    if not policy.dispatch.free_quotas or cluster.compute_s_per_sample:
        return ()
    return tuple(1 / worker.slowness for worker in cluster.workers)


class Tables(NamedTuple):
    """The tables of a model, and the adapter for the batches of their ids."""

    adapter: BatchAdapter
    weights: list[torch.Tensor]
    widths: tuple[int, ...]


def _find_tables(model: nn.Module, settings: Settings) -> Tables:
    device = settings["device"]
    check_device(device, "device=")
    plain = field_embeddings(model)
    if plain is not None:
        adapter = SampleAdapter(plain.schema, plain.weights[0].dtype, device)
        return Tables(adapter, plain.weights, plain.widths)
    modules = find_layers(model, settings["min_rows"])
    specs = [module.spec for module in modules]
    if "lookups" not in settings:
        names = ", ".join(spec.name for spec in specs)
        raise ValueError(
            f"lookups=: say which ids of a batch each layer looks up, for the layers {names}"
        )
    return Tables(
        adapter=TensorAdapter(specs, settings["lookups"], device),
        weights=[module.weight for module in modules],
        widths=tuple(spec.width for spec in specs),
    )


def _take_tables(
    weights: Sequence[torch.Tensor], optimizers: Sequence[Optimizer], decay: float
) -> tuple[RowOptimizer, Rate]:
    """Remove the tables from the user's optimizers; returns the row optimizer instead."""
    # By identity: == would compare the elements of tensors.
    known = {id(weight) for weight in weights}
    missing, groups = set(known), list[tuple[Optimizer, int]]()
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            tables = [p for p in group["params"] if id(p) in known]
            if any(id(table) not in missing for table in tables):
                raise ValueError("optimizer: a table is in two optimizers, or in one twice")
            if tables:
                groups.append((optimizer, number))
            missing -= {id(table) for table in tables}
            group["params"] = [p for p in group["params"] if id(p) not in known]
            for table in tables:
                _drop_state(optimizer, table)
    if missing:
        raise ValueError(
            f"optimizer: {len(missing)} of {len(weights)} tables of the model are in no optimizer"
        )
    forms = [optim.row_optimizer(owner, owner.param_groups[number]) for owner, number in groups]
    if any(form != forms[0] for form in forms):
        raise ValueError("optimizer: all tables must have the same one with the same settings")
    return replace(forms[0], decay=decay), Rate(forms[0], groups)


def _drop_state(optimizer: Optimizer, table: torch.Tensor) -> None:
    """Remove an optimizer's initial state of a table."""
    state = optimizer.state.pop(table, {})
    if float(state.get("step", bool(state))) > 0:
        raise ValueError(
            f"{type(optimizer).__name__} has taken steps already: call prepare before the first "
            f"step, because it cannot move the optimizer's state of the tables"
        )


def _check(cluster: Cluster, rank: RankContext, settings: Settings) -> None:
    """Refuse settings that contradict the job."""
    tables = str(settings.get("tables", ""))
    if tables and rank.role == "shard" and not is_file(tables):
        raise ValueError(f"tables= must be a file, got {shown(tables)}")
    if (cluster.num_workers, cluster.num_shards) != (rank.num_workers, rank.num_shards):
        raise ValueError(
            f"network= has {cluster.num_workers} workers and {cluster.num_shards} shards, the "
            f"job {rank.num_workers} and {rank.num_shards}"
        )


def join_job(settings: Settings) -> RankContext:
    """This process's rank until it ends: from `nodes`, or all ranks on one node."""
    if "nodes" in settings:
        topology = RankTopology(settings["nodes"])
    else:
        shards = _num_shards(settings)
        workers = int(os.environ.get("WORLD_SIZE", 0)) - 1 - shards
        if workers < 1:
            raise ValueError(
                f"a job needs a coordinator, {shards} shards and at least one worker: start it "
                f"with embroute run --workers 2 --shards {shards} SCRIPT, or with torchrun "
                f"--nproc-per-node {2 + shards} or more"
            )
        topology = on_one_node(workers, shards)
    owns_process = owns(settings)
    stack = ExitStack()
    timeout_s, transport = settings["peer_timeout"], settings["transport"]
    joined = connect(topology, settings["node"], timeout_s, transport, owns_process)
    rank = stack.enter_context(joined)
    if owns_process:
        tune_process(rank.name)
        install_exit_hooks(rank.name)
    atexit.register(_leave, stack, owns_process)
    return rank


def owns(settings: Settings) -> bool:
    """Whether the process is ours: by the user's word, or since `embroute run` has started it."""
    return settings.get("own_process", FOLDER in os.environ)


def _num_shards(settings: Settings) -> int:
    """The number of shards, from the script or `embroute run`; both must agree."""
    started = os.environ.get(SHARDS_VARIABLE)
    num_shards = settings.get("shards", int(started or 1))
    if started and int(started) != num_shards:
        raise ValueError(f"shards={num_shards} in the script, embroute run --shards {started}")
    return num_shards


def _leave(stack: ExitStack, owns_process: bool) -> None:
    """Close the channels at the end of the process; after an error, do not wait for any peer."""
    if not hasattr(sys, "last_value"):
        stack.close()
    elif owns_process:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    else:
        stack.__exit__(LostPeerError, LostPeerError("the script failed"), None)
