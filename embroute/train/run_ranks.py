"""The ranks of a run, the network between them, and what must fit together in a run file."""

from __future__ import annotations

from pathlib import Path

from embroute.config.cluster import Cluster
from embroute.config.cluster_file import is_file, open_network
from embroute.config.option_model import as_keys
from embroute.config.run_file import read_run_file
from embroute.config.run_options import RunConfig
from embroute.config.spec import parse_cache, shown
from embroute.launch.rank import RankTopology, on_one_node
from embroute.models.registry import ModelOptions
from embroute.nn.job import assumed_cluster, trainable_policy
from embroute.planner.row_store import row_store_of
from embroute.planner.setup import cache_sizes

USUAL_WORKERS = 4  # of a run without a network


def topology_of(run: RunConfig) -> RankTopology:
    """The ranks of each node; without `nodes`, all ranks on one node."""
    if run.nodes:
        return RankTopology(run.nodes)
    if run.network is None:
        return on_one_node(run.workers or USUAL_WORKERS, run.shards or 1)
    cluster = open_network(run.network, run.workers)
    return on_one_node(cluster.num_workers, run.shards or cluster.num_shards)


def network_of(run: RunConfig) -> Cluster:
    """The network as the policy knows it."""
    topology = topology_of(run)
    workers, shards = topology.num_workers, topology.num_shards
    if run.network is None:
        policy = trainable_policy(run.policy)
        return assumed_cluster(policy, workers, shards, topology.num_row_nodes)
    cluster = open_network(run.network, workers)
    if cluster.num_shards != shards:
        raise ValueError(
            f"--shards {shards}: --network {run.network} has {cluster.num_shards} shards"
        )
    return cluster


def check_run(run: RunConfig) -> None:
    """Refuse a run whose policy, network, quotas and tables do not fit together."""
    policy, cluster = trainable_policy(run.policy), network_of(run)
    row_store_of(policy).check_hosts(policy, cluster)
    if run.shares and len(run.shares) != cluster.num_workers:
        raise ValueError(
            f"--quotas needs {cluster.num_workers} shares, one a worker, got {shown(run.quotas)}"
        )
    cache_sizes(parse_cache("--cache", run.cache), cluster.num_workers)
    if run.tables and not is_file(run.tables):
        raise ValueError(f"--tables must be a file, got {shown(run.tables)}")


def open_run(path: Path) -> RunConfig:
    """Read and check a run file; errors name the file and the key."""
    run = read_run_file(path)
    try:
        check_run(run)
    except ValueError as error:
        raise ValueError(f"{path}: {as_keys(str(error))}") from None
    return run


def model_options(run: RunConfig) -> ModelOptions:
    """The model's options; its tables hold no rows, because the shards do."""
    hidden = tuple(int(width) for width in str(run.hidden).split(",") if width)
    return ModelOptions(hidden, mode=run.pooling, seed=run.seed, table_device="meta")
