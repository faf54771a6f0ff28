"""What all ranks know of a job before the first batch: tables, optimizer, caches, settings."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from embroute.checkpoint.manifest import Identity
from embroute.checkpoint.rank_files import identity_of
from embroute.checkpoint.saver import CheckpointSettings
from embroute.config.cluster import Cluster, uniform_cluster
from embroute.config.cluster_file import is_file, open_cluster
from embroute.config.spec import shown
from embroute.engine.batches import BatchAdapter, SampleAdapter
from embroute.engine.observe.metrics import Meter, StepLog
from embroute.engine.optim import Rate, RowOptimizer, row_optimizer
from embroute.engine.sharding import RowSharding
from embroute.engine.store import RecordWidths
from embroute.launch.exit import install_exit_hooks
from embroute.launch.rank import RankContext, RankTopology, on_one_node
from embroute.launch.rendezvous import connect
from embroute.nn.embedding import LookupContext, RoutedLayer
from embroute.nn.module_surgery import field_embeddings, find_layers, replace_fields, replace_layers
from embroute.nn.settings import Settings, cache_size
from embroute.nn.tensor_batches import TensorAdapter
from embroute.planner.interfaces import Policy
from embroute.planner.row_store import row_store_of
from embroute.planner.setup import Setup
from embroute.policies.catalog import DEFAULT_POLICY, policy_of
from embroute.transport.job_store import (
    SHARDS_VARIABLE,
)


@dataclass(frozen=True)
class TrainingJob:
    """What all ranks know of a job before the first batch."""

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
    run_id: str = ""  # known once all ranks have agreed on it

    @property
    def sharding(self) -> RowSharding:
        """Where rows lie."""
        return RowSharding(self.setup)

    @property
    def widths(self) -> RecordWidths:
        """Columns of records."""
        dtype = np.dtype(str(self.weights[0].dtype)[6:])
        stamped = self.settings.get("debug") == "versions"
        return RecordWidths(self.sharding, self.optimizer, dtype, stamped)

    def padding(self, table: int) -> int:
        """The id of a table that stands for no row at all; -1 if there is none."""
        found = (
            self.adapter.layers[table].padding if isinstance(self.adapter, TensorAdapter) else None
        )
        return -1 if found is None else found

    @property
    def meter(self) -> Meter:
        """A meter of this rank."""
        peers = "shard" if self.rank.role == "worker" else "worker"
        return Meter(peers, log=StepLog() if self.settings.get("debug") == "steps" else None)

    @property
    def epochs(self) -> int:
        """How often the loader is read."""
        return self.settings.get("epochs", 1)

    @property
    def saving(self) -> CheckpointSettings | None:
        """Where checkpoints go, if anywhere."""
        if "checkpoint" not in self.settings:
            return None
        keep = self.settings.get("keep", 2)
        return CheckpointSettings(Path(self.settings["checkpoint"]), keep, self.run_id)

    @property
    def identity(self) -> Identity:
        """What a checkpoint must share with the job."""
        dense = self.model.state_dict()
        return identity_of(self.sharding, self.optimizer, self.widths.dtype, dense)


def describe_job(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    rank: RankContext,
    settings: Settings,
) -> TrainingJob:
    """Find the tables, take them out of model and optimizer, and size the caches."""
    optimizers = _checked(model, optimizer)
    adapter, weights, widths = _tables(model, settings)
    rows, rate = _take_out(weights, optimizers, float(settings.get("decay", 0.0)))
    policy = trainable_policy(settings.get("policy", DEFAULT_POLICY), "policy=")
    cluster = _cluster(policy, rank, settings, _dense_bytes(model, weights))
    _check(cluster, rank, settings)
    setup = Setup(
        adapter.schema,
        cluster,
        widths,
        optimizer=rows.name,
        cache=row_store_of(policy).cache_size(policy, cache_size(settings)),
        shares=settings.get("quotas", ()) or _known_shares(policy, cluster),
        seed=settings.get("seed", 0),
        seeded="tables" not in settings and all(weight.is_meta for weight in weights),
    )
    row_store_of(policy).check_hosts(policy, cluster)
    if policy.sync.shared_memory and settings.get("debug") == "versions":
        raise ValueError(f"debug='versions': with policy {policy.name} no row travels with one")
    arena_of_table = tuple(setup.arenas.index(width) for width in widths)
    lookup_context = LookupContext(setup.arenas, arena_of_table, settings.get("device", "cpu"))
    own = field_embeddings(model)
    layers: list[RoutedLayer] = []
    if own is not None:
        replace_fields(model, own, lookup_context)
    else:
        layers = replace_layers(
            model, find_layers(model, settings.get("min_rows", 1000)), lookup_context
        )
    return TrainingJob(
        rank,
        settings,
        adapter,
        policy,
        setup,
        rows,
        rate,
        weights,
        lookup_context,
        layers,
        model,
        optimizers,
    )


def _checked(model: object, optimizer: object) -> list[Optimizer]:
    """The optimizers as a list; refuses a model or optimizer that is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if not given or not all(isinstance(one, Optimizer) for one in given):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or a list of some, got {shown(optimizer)}"
        )
    if len({id(one) for one in given}) < len(given):
        raise ValueError(f"optimizer: the list has one of its {len(given)} twice")
    return list(given)


def check_device(name: str, option: str = "--device") -> None:
    """Refuse a device that this machine's torch cannot use."""
    try:
        if torch.device(name).type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{option} {name}: torch cannot use it here: {reason}") from None


def trainable_policy(name: str, option: str = "--policy") -> Policy:
    """A policy by name; every worker of a job takes part in it."""
    policy = policy_of(option, name)
    if policy.workers != "all":
        raise ValueError(
            f"{option} {name!r}: workers={policy.workers} is for compare and simulate; in training "
            f"leave a worker out by a share of 0, e.g. --quotas 1,1,0"
        )
    return policy


def assumed_cluster(
    policy: Policy, num_workers: int, num_shards: int, num_homes: int = 1
) -> Cluster:
    """What a policy is told of a network that nobody describes; `num_homes`: see `Layout`."""
    cluster = uniform_cluster(num_workers, num_shards)
    return cluster.together() if policy.sync.shared_memory and num_homes == 1 else cluster


def _cluster(policy: Policy, rank: RankContext, settings: Settings, dense_bytes: float) -> Cluster:
    """What the policy knows of the network, and of what a step does beside rows."""
    homes = RankTopology(settings["nodes"]).num_homes if "nodes" in settings else 1
    guess = assumed_cluster(policy, rank.num_workers, rank.num_shards, homes)
    network = settings.get("network", guess)
    cluster = open_cluster(network) if isinstance(network, str) else network
    compute_s = settings.get("compute_ms_per_sample", 0.0) / 1e3
    return replace(
        cluster,
        compute_s_per_sample=compute_s or cluster.compute_s_per_sample,
        dense_bytes=cluster.dense_bytes or dense_bytes,
    )


def _dense_bytes(model: nn.Module, weights: Sequence[torch.Tensor]) -> float:
    """Bytes of the gradients that are summed over workers: of all that is in no table."""
    tables = {id(weight) for weight in weights}
    dense = (p for p in model.parameters() if p.requires_grad and id(p) not in tables)
    return float(sum(p.numel() * p.element_size() for p in dense))


def _known_shares(policy: Policy, cluster: Cluster) -> tuple[float, ...]:
    """By speed, where quotas are free but nobody knows what a sample takes; else the policy's."""
    if not policy.dispatch.free or cluster.compute_s_per_sample:
        return ()
    return tuple(1 / worker.slowness for worker in cluster.workers)


def _tables(
    model: nn.Module, settings: Settings
) -> tuple[BatchAdapter, list[torch.Tensor], tuple[int, ...]]:
    """The feed that suits the model, the weights of its tables, and their widths."""
    device = settings.get("device", "cpu")
    check_device(device, "device=")
    own = field_embeddings(model)
    if own is not None:
        weights = own.weights
        return SampleAdapter(own.schema, weights[0].dtype, device), weights, own.widths
    found = find_layers(model, settings.get("min_rows", 1000))
    if "lookups" not in settings:
        names = ", ".join(entry.layer.name for entry in found)
        raise ValueError(
            f"lookups=: say which ids of a batch each layer looks up, for the layers {names}"
        )
    adapter = TensorAdapter([entry.layer for entry in found], settings["lookups"], device)
    weights = [entry.weight for entry in found]
    return adapter, weights, tuple(entry.layer.width for entry in found)


def _take_out(
    weights: Sequence[torch.Tensor], optimizers: Sequence[Optimizer], decay: float
) -> tuple[RowOptimizer, Rate]:
    """Remove the tables from the optimizers; returns what will update their rows."""
    missing, found = list(weights), list[tuple[Optimizer, int]]()
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            own = [p for p in group["params"] if any(p is weight for weight in weights)]
            if any(all(p is not weight for weight in missing) for p in own):
                raise ValueError("optimizer: a table is in two optimizers, or in one twice")
            if own:
                found.append((optimizer, number))
            missing = [weight for weight in missing if all(weight is not p for p in own)]
            group["params"] = [p for p in group["params"] if all(p is not table for table in own)]
            for parameter in own:
                _forget(optimizer, parameter)
    if missing:
        raise ValueError(
            f"optimizer: {len(missing)} of {len(weights)} tables of the model are in none"
        )
    rows = [row_optimizer(optimizer, optimizer.param_groups[number]) for optimizer, number in found]
    if any(one != rows[0] for one in rows):
        raise ValueError("optimizer: all tables must have the same one with the same settings")
    return replace(rows[0], decay=decay), Rate(rows[0], found)


def _forget(optimizer: Optimizer, table: torch.Tensor) -> None:
    """Drop what an optimizer keeps of a table before its first step."""
    state = optimizer.state.pop(table, {})
    if float(state.get("step", bool(state))) > 0:
        raise ValueError(
            f"{type(optimizer).__name__} has taken steps already, and what it keeps of the tables "
            f"cannot be taken over; prepare comes before the first step"
        )


def _check(cluster: Cluster, rank: RankContext, settings: Settings) -> None:
    """Refuse what does not suit this rank's job."""
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
        layout = RankTopology(settings["nodes"])
    else:
        shards = _num_shards(settings)
        workers = int(os.environ.get("WORLD_SIZE", 0)) - 1 - shards
        if workers < 1:
            raise ValueError(
                f"a job needs a coordinator, {shards} shards and at least one worker: start it "
                f"with embroute run --workers 2 --shards {shards} SCRIPT, or with torchrun "
                f"--nproc-per-node {2 + shards} or more"
            )
        layout = on_one_node(workers, shards)
    stack = ExitStack()
    timeout_s = settings.get("peer_timeout", 30.0)
    rank = stack.enter_context(connect(layout, settings.get("node", ""), timeout_s))
    atexit.register(_leave, stack)
    install_exit_hooks(rank.name)
    return rank


def _num_shards(settings: Settings) -> int:
    """As the script says, or `embroute run`; they must agree."""
    started = os.environ.get(SHARDS_VARIABLE)
    asked = settings.get("shards", int(started or 1))
    if started and int(started) != asked:
        raise ValueError(f"shards={asked} in the script, embroute run --shards {started}")
    return asked


def _leave(stack: ExitStack) -> None:
    """Say good-bye at the end of the process; after an error, just end it."""
    if hasattr(sys, "last_value"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    stack.close()
