"""The run that options describe, on given data, for the simulator."""

from __future__ import annotations

from dataclasses import replace

from embroute.config.cluster import Cluster
from embroute.config.cluster_file import open_network
from embroute.config.option_types import parse_bytes, quota_shares
from embroute.config.run_options import JobOptions
from embroute.config.spec import parse_cache
from embroute.data.batch import Source
from embroute.planner.setup import Setup, parse_dim
from embroute.simulator.simulation import Workload


def cluster_of(options: JobOptions) -> Cluster:
    """The cluster of --network with the costs of compute and of dense gradients."""
    return replace(
        open_network(options.network or f"edge-{options.workers or 8}", options.workers),
        compute_s_per_sample=options.compute_ms_per_sample / 1e3,
        dense_bytes=parse_bytes("--dense-bytes", options.dense_bytes),
    )


def workload_from(options: JobOptions, source: Source) -> Workload:
    """The run that the options describe, on the given data."""
    cluster = cluster_of(options)
    setup = Setup(
        source.schema,
        cluster,
        dim=parse_dim(str(options.dim), source.schema),
        batch_size=options.batch * cluster.num_workers,
        optimizer=options.optimizer,
        cache=parse_cache("--cache", options.cache),
        shares=quota_shares(options.quotas),
        seed=options.seed,
    )
    return Workload(
        source, setup, options.num_steps, options.warmup, options.epochs, options.shuffle
    )
