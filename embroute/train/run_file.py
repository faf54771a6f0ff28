"""A run as a YAML file: data, model, policy, optimizers, ranks and their nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

import yaml

from embroute.config.cluster import Cluster
from embroute.config.cluster_file import load_yaml, open_cluster
from embroute.config.spec import (
    LARGEST_WIDTH,
    LIMITS,
    parse_cache,
    parse_int,
    parse_path,
    parse_quotas,
    shown,
)
from embroute.cost.step_time import OPTIMIZERS
from embroute.data.open import DataOptions, option_name
from embroute.launch.rank import RankTopology, on_one_node
from embroute.models.registry import MODELS, ModelOptions
from embroute.nn.job import assumed_cluster, trainable_policy
from embroute.planner.row_store import row_store_of
from embroute.policies.catalog import DEFAULT_POLICY
from embroute.transport.interface import AUTO, TRANSPORTS

RUN_FILE, CHECKPOINTS = "run.yaml", "checkpoints"  # in the folder of a run
DENSE_OPTIMIZERS = ("adam", "adamw", "sgd", "adagrad")


@dataclass(frozen=True)
class RunFile:
    """All options of a run; the defaults are those of the command line."""

    data: str = "online-retail(negatives=1)"
    data_options: Mapping[str, object] = field(default_factory=dict)
    model: str = "deepfm"
    dim: str = "16"
    hidden: str = "256,128"
    pooling: str = "sum"
    policy: str = DEFAULT_POLICY
    cache: str = "auto"
    batch: int = 128
    quotas: str = ""
    compute_ms_per_sample: float = 0.0
    optimizer: str = "adagrad"
    lr: float = 0.02
    dense_optimizer: str = "adam"
    dense_lr: float = 0.001
    decay: float = 0.0
    clip: float = 0.0
    warmup_steps: int = 0
    epochs: int = 1
    steps: int = 0
    shuffle: bool = False
    seed: int = 0
    held_out: float = 0.1
    evaluate_every: int = 0
    workers: int = 4
    shards: int = 1
    nodes: Mapping[str, object] = field(default_factory=dict)
    network: str = ""
    tables: str = ""
    checkpoint_every: int = 0
    keep: int = 2
    resume: bool = False
    restarts: int = 0
    peer_timeout: float = 30.0
    transport: str = AUTO
    out: str = "run"
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _one_of("--optimizer", self.optimizer, tuple(OPTIMIZERS))
        _one_of("--dense-optimizer", self.dense_optimizer, DENSE_OPTIMIZERS)
        _one_of("--model", self.model, tuple(MODELS))
        _one_of("--pooling", self.pooling, ("sum", "mean"))
        _one_of("--transport", self.transport, TRANSPORTS)
        _one_of("--dtype", self.dtype, ("float32", "float64"))
        for entry in fields(self):
            if entry.name in LIMITS:
                LIMITS[entry.name].check(option_name(entry.name), getattr(self, entry.name))
        for name in ("lr", "dense_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{option_name(name)} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.held_out < 1:
            got = shown(self.held_out)
            raise ValueError(f"--held-out must be at least 0 and below 1, got {got}")
        parse_path("--out", self.out)
        self.data_settings()
        _widths("--hidden", self.hidden, self.hidden.split(",") if self.hidden else [])
        _widths("--dim", self.dim, [part.rpartition("=")[2] for part in self.dim.split(",")])
        parse_cache("--cache", self.cache)
        policy = trainable_policy(self.policy)
        row_store_of(policy).check_hosts(policy, self.cluster())
        workers = self.cluster().num_workers
        shares = self.shares()
        if shares and (len(shares) != workers or not sum(shares)):
            raise ValueError(
                f"--quotas needs {workers} shares, one a worker and not all 0, got {self.quotas!r}"
            )

    def topology(self) -> RankTopology:
        """The ranks of each node; without `nodes`, all ranks on one node."""
        if not self.nodes:
            return on_one_node(self.workers, self.shards)
        nodes = {}
        for node, ranks in self.nodes.items():
            if not isinstance(ranks, list):
                raise ValueError(f"nodes: {node}: expected a list of ranks, got {shown(ranks)}")
            nodes[str(node)] = [str(rank) for rank in ranks]
        return RankTopology(nodes)

    def cluster(self) -> Cluster:
        """The network as the policy knows it."""
        topology = self.topology()
        workers, shards = topology.num_workers, topology.num_shards
        if not self.network:
            policy = trainable_policy(self.policy)
            return assumed_cluster(policy, workers, shards, topology.num_row_nodes)
        cluster = open_cluster(self.network)
        if (cluster.num_workers, cluster.num_shards) != (workers, shards):
            raise ValueError(
                f"--network {self.network} has {cluster.num_workers} workers and "
                f"{cluster.num_shards} shards, the job {workers} and {shards}"
            )
        return cluster

    def shares(self) -> tuple[float, ...]:
        """Relative quotas of the workers."""
        return parse_quotas(self.quotas)

    def model_options(self) -> ModelOptions:
        """The model's options; its tables hold no rows, because the shards do."""
        hidden = tuple(int(width) for width in self.hidden.split(",") if width)
        return ModelOptions(hidden, mode=self.pooling, seed=self.seed, table_device="meta")

    def data_settings(self) -> DataOptions:
        """The options for reading data files."""
        known = DataOptions.__dataclass_fields__
        unknown = sorted(set(map(str, self.data_options)) - set(known))
        if unknown:
            raise ValueError(
                f"data_options: unknown key {shown(unknown[0])} (known: {', '.join(known)})"
            )
        values = {
            name: _as_option(value, str(known[name].type))
            for name, value in self.data_options.items()
        }
        try:
            return DataOptions(**values)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"data_options: {error}") from None

    def write(self, path: Path) -> None:
        """Write the options that differ from their defaults, as YAML."""
        values = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if getattr(self, entry.name) != _default(entry.name)
        }
        path.write_text(yaml.safe_dump(_plain(values), sort_keys=False))

    def write_copy(self, folder: Path) -> None:
        """Write the run file into the run's folder, unless an equal one is there already."""
        path = folder / RUN_FILE
        if path.is_file():
            try:
                known = read_run_file(path)
            except ValueError:
                known = None  # written by another version, for example
            if known is not None and replace(known, resume=self.resume, out=self.out) == self:
                return
        # The copy does not resume: a user must ask for that again.
        replace(self, resume=False).write(path)


def _as_option(value: object, kind: str) -> object:
    """A YAML value as a data option: columns may be numbers, or names joined by commas."""
    if kind.startswith("tuple"):
        listed = value.split(",") if isinstance(value, str) else value
        if isinstance(listed, list | tuple):
            return tuple(_as_option(item, "str") for item in listed)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value).strip() if kind.startswith("str") and number else value


def _widths(option: str, text: str, parts: list[str]) -> None:
    for part in parts:
        try:
            parse_int(option, part, 1, LARGEST_WIDTH)
        except ValueError:
            raise ValueError(
                f"{option} {shown(text)}: a width must be a whole number from 1 to {LARGEST_WIDTH}"
            ) from None


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)}, got {shown(value)}")


def _default(name: str) -> object:
    entry = RunFile.__dataclass_fields__[name]
    return entry.default if entry.default is not MISSING else {}


def _plain(value: object) -> object:
    """A value of lists and dicts only, which YAML can write."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str) and value.isdecimal() and str(int(value)) == value:
        return int(value)  # 64, not '64'
    return value


_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str, int, float),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "Mapping[str, object]": (dict,),
}


def read_run_file(path: Path) -> RunFile:
    """Read a run file, and check every key and type."""
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys and values, got {shown(content)}")
    known = {entry.name: str(entry.type) for entry in fields(RunFile)}
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"{path}: unknown key {shown(key)} (known: {', '.join(known)})")
        kinds = _KINDS[known[name]]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{path}: {key}: expected {known[name]}, got {shown(value)}")
        values[name] = str(value) if known[name] == "str" else value
    try:
        return RunFile(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
