"""A run to price, as users describe it: one set of names and defaults for commands and Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from embroute.config.cluster import CLUSTER_PRESETS, Cluster
from embroute.config.cluster_file import open_cluster
from embroute.config.spec import LIMITS, Size, parse_cache, parse_quotas, parse_size, shown
from embroute.cost.step_time import OPTIMIZERS
from embroute.data.batch import Source
from embroute.planner.setup import Setup, parse_dim
from embroute.simulator.simulation import Workload


@dataclass(frozen=True)
class JobOptions:
    """The network, the model's tables, and the steps to price."""

    network: str | Cluster = "edge-8"
    workers: int | None = None  # None: as many as the network has
    batch: int = 128  # samples of a worker
    cache: str | float | Size = "auto"
    dim: str | int = "64"
    optimizer: str = "sgd"
    quotas: str | Sequence[float] | None = None
    compute_ms_per_sample: float = 0.0
    dense_bytes: str | float = "0"
    steps: int = 90
    warmup: int = 10
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in LIMITS and value is not None:
                LIMITS[entry.name].check(f"--{entry.name.replace('_', '-')}", value)
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise ValueError(f"--optimizer must be one of {known}, got {shown(self.optimizer)}")
        if self.warmup >= self.steps:
            raise ValueError(
                f"--warmup {self.warmup}: must be below --steps {self.steps}, which includes it"
            )

    @property
    def network_name(self) -> str:
        """The network as reports name it."""
        return self.network if isinstance(self.network, str) else "a cluster"


def cluster_of(options: JobOptions) -> Cluster:
    """The cluster of --network; --workers must agree with it."""
    network = options.network
    if isinstance(network, str) and network in CLUSTER_PRESETS:
        network = f"{network}-{options.workers or 8}"
    cluster = open_cluster(network) if isinstance(network, str) else network
    if options.workers not in (None, cluster.num_workers):
        preset, _, count = options.network_name.rpartition("-")
        is_preset = preset in CLUSTER_PRESETS and count.isdigit()
        hint = f"; use --network {preset}-{options.workers}" if is_preset else ""
        raise ValueError(
            f"--workers {options.workers}: --network {options.network_name} has "
            f"{cluster.num_workers} workers{hint}"
        )
    dense = str(options.dense_bytes)
    size = parse_size(
        "--dense-bytes", dense if not dense.replace(".", "").isdigit() else dense + "B"
    )
    if size.unit != "bytes":
        raise ValueError(f"--dense-bytes must look like 4000000 or 4MB, got {shown(dense)}")
    return replace(
        cluster,
        compute_s_per_sample=options.compute_ms_per_sample / 1e3,
        dense_bytes=size.amount,
    )


def workload_from(options: JobOptions, source: Source) -> Workload:
    """The run that the options describe, on the given data."""
    cluster, quotas = cluster_of(options), options.quotas or ""
    setup = Setup(
        source.schema,
        cluster,
        dim=parse_dim(str(options.dim), source.schema),
        batch_size=options.batch * cluster.num_workers,
        optimizer=options.optimizer,
        cache=parse_cache("--cache", options.cache),
        shares=parse_quotas(quotas if isinstance(quotas, str) else ",".join(map(str, quotas))),
        seed=options.seed,
    )
    return Workload(source, setup, options.steps, options.warmup, options.epochs, options.shuffle)
