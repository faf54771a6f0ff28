"""All options of a run, once: for every command, run files, Python, manuals and schemas."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from embroute.config.cluster import CLUSTER_PRESETS, Cluster
from embroute.config.data_options import DataOptions
from embroute.config.option_model import Group, Options, option
from embroute.config.option_types import (
    Bytes,
    CacheSize,
    Counts,
    Hidden,
    NetworkName,
    NodeRanks,
    PathText,
    Quotas,
    Reading,
    Text,
    Widths,
    quota_shares,
)
from embroute.config.spec import LARGEST_COUNT, LARGEST_SEED

RowOptimizerName = Literal["sgd", "adagrad", "rowwise-adagrad", "adam"]
ModelName = Literal[
    "wide-deep", "deepfm", "dcn", "dlrm", "ncf", "wide-deep-het", "din", "graphsage"
]
PRESETS = ", ".join(f"{name}-N" for name in CLUSTER_PRESETS)
DEFAULT_DATA = "online-retail(negatives=1)"
DEFAULT_POLICY = "embroute(effort=auto)"  # its decisions must not delay a step
MAX_BATCH = 10**7
REPORT_CACHES = ("2%", "4%", "6%", "10%", "20%", "30%")
PRICED_STEPS = 90  # by the simulator, if steps is None


class _Priced(Options):
    """What the price of a step depends on."""

    dim: Widths = option("16", Group.MODEL, "Width of an embedding: 16, or 16,C1=8.", "WIDTHS")
    network: NetworkName = option(
        None,
        Group.NETWORK,
        f"A preset ({PRESETS}) or a YAML file. Without one, compare, simulate and advise price "
        f"edge-8; training assumes equal links.",
        "NAME|FILE",
    )
    compute_ms_per_sample: float = option(
        0.05,
        Group.NETWORK,
        "Compute time of the reference worker, in milliseconds.",
        ge=0,
        le=10**9,
    )
    optimizer: RowOptimizerName = option(
        "adagrad", Group.OPTIMIZER, "Optimizer of the rows; its state travels with them."
    )


class _Modelled(_Priced):
    """A run whose model is known."""

    model: ModelName = option("deepfm", Group.MODEL, "Model to train.")


class _Run(_Priced):
    """What simulated and trained runs have in common."""

    cache: CacheSize = option(
        "auto",
        Group.POLICY,
        "Cache of a worker: auto, 0.1 or 10% of all rows, 5000rows, or 256MB. Or one size a "
        "worker: 10%+10%+5%.",
        "SIZE",
    )
    quotas: Quotas = option(
        None,
        Group.POLICY,
        "Relative shares of the samples, such as 2,2,1,1. Without them, the policy decides.",
        "SHARES",
    )
    batch: int = option(128, Group.STEPS, "Samples of a worker in a step.", ge=1, le=MAX_BATCH)
    steps: int | None = option(
        None,
        Group.STEPS,
        f"Steps, warm-up included. Without a number, training runs to the end of its epochs, and "
        f"compare and simulate price {PRICED_STEPS} steps.",
        ge=1,
        le=LARGEST_COUNT,
    )
    epochs: int = option(1, Group.STEPS, "Passes over the data, at most.", ge=1, le=LARGEST_COUNT)
    shuffle: bool = option(False, Group.STEPS, "Shuffle every epoch.")
    seed: int = option(
        0, Group.STEPS, "Seed of initial values and shuffling.", ge=0, le=LARGEST_SEED
    )
    workers: int | None = option(
        None,
        Group.RANKS,
        "Workers. Without a number, as many as --network has; training without a network has 4.",
        ge=1,
        le=1024,
    )


class JobOptions(_Run):
    """A run to price: the network, the model's tables, and the steps."""

    dense_bytes: Bytes = option(
        "0", Group.NETWORK, "Dense gradients of a step, such as 4MB.", "SIZE"
    )
    warmup: int = option(
        10, Group.STEPS, "First steps that are not priced.", ge=0, le=LARGEST_COUNT
    )

    @model_validator(mode="after")
    def _check_warmup(self) -> JobOptions:
        if self.warmup >= self.num_steps:
            fault = f"must be below --steps {self.num_steps}, which includes it"
            raise ValueError(f"--warmup {self.warmup}: {fault}")
        return self

    @property
    def num_steps(self) -> int:
        """Steps to price."""
        return self.steps or PRICED_STEPS

    @property
    def network_name(self) -> str:
        """The network as reports name it."""
        return "a cluster" if isinstance(self.network, Cluster) else self.network or "edge-8"


class AdviceOptions(_Modelled):
    """What may be chosen, and what is fixed."""

    memory_per_worker: Bytes = option(
        "8GB", Group.RANKS, "Memory of a worker, such as 500MB.", "SIZE"
    )
    workers: Counts = option(
        None,
        Group.RANKS,
        "Numbers to try: 2..8 or 4,8. Without it, all and the divisors of all.",
        "LIST",
    )
    batch: Counts = option("128,256", Group.STEPS, "Samples of a worker to try.", "LIST")
    allow_stale: bool = option(False, Group.POLICY, "Also policies that read old rows (HET).")
    allow_reorder: bool = option(False, Group.POLICY, "Also policies that change the order (FAE).")


class RunConfig(_Run, _Modelled):
    """A run to train, as a run file describes it."""

    data: Text = option(DEFAULT_DATA, Group.DATA, "A built-in name or a path.", "NAME|PATH")
    data_options: Reading = option(
        DataOptions(), Group.NONE, "How files are read: label, categorical ..."
    )
    held_out: float = option(
        0.1,
        Group.DATA,
        "Share of the samples to evaluate on, from the end of the data.",
        ge=0,
        lt=1,
    )
    hidden: Hidden = option("256,128", Group.MODEL, "Widths of the dense layers.", "WIDTHS")
    pooling: Literal["sum", "mean"] = option(
        "sum", Group.MODEL, "How a bag of rows becomes one row."
    )
    device: Text = option("cpu", Group.MODEL, "Device of the dense model: cpu or cuda.", "DEVICE")
    dtype: Literal["float32", "float64"] = option("float32", Group.MODEL, "Type of all numbers.")
    policy: Text = option(
        DEFAULT_POLICY,
        Group.POLICY,
        "Policy that assigns samples to workers and schedules transfers of rows.",
        "POLICY",
    )
    lr: float = option(
        0.02, Group.OPTIMIZER, "Learning rate of the rows.", gt=0, allow_inf_nan=False
    )
    decay: float = option(
        0.0, Group.OPTIMIZER, "Weight decay of a row at every touch.", ge=0, le=1e30
    )
    dense_optimizer: Literal["adam", "adamw", "sgd", "adagrad"] = option(
        "adam", Group.OPTIMIZER, "Optimizer of the dense parameters."
    )
    dense_lr: float = option(
        0.001, Group.OPTIMIZER, "Learning rate of the dense parameters.", gt=0, allow_inf_nan=False
    )
    clip: float = option(
        0.0, Group.OPTIMIZER, "Largest norm of the dense gradients; 0: no limit.", ge=0, le=1e30
    )
    warmup_steps: int = option(
        0, Group.OPTIMIZER, "Steps during which the learning rates grow.", ge=0, le=LARGEST_COUNT
    )
    evaluate_every: int = option(
        0, Group.STEPS, "Steps between evaluations; 0: at the end only.", ge=0, le=LARGEST_COUNT
    )
    tables: PathText | None = option(
        None, Group.CHECKPOINTS, "Initial tables: a file from `checkpoint export`.", "FILE"
    )
    checkpoint_every: int = option(
        0,
        Group.CHECKPOINTS,
        "Steps between checkpoints; 0: at the end and on SIGTERM only.",
        ge=0,
        le=LARGEST_COUNT,
    )
    keep: int = option(2, Group.CHECKPOINTS, "Checkpoints to keep.", ge=1, le=LARGEST_COUNT)
    resume: bool = option(
        False, Group.CHECKPOINTS, "Go on from the newest checkpoint, if there is one."
    )
    shards: int | None = option(
        None,
        Group.RANKS,
        "Parameter shards. Without it, as many as --network has; without a network 1.",
        ge=1,
        le=1024,
    )
    nodes: NodeRanks = option(
        None,
        Group.NONE,
        "The ranks on each machine (docs/training.md), in place of workers and shards.",
    )
    restarts: int = option(
        0, Group.RANKS, "Restarts of all ranks from the newest checkpoint, at most.", ge=0, le=10**6
    )
    peer_timeout: float = option(
        30.0,
        Group.RANKS,
        "Seconds without a heartbeat until a rank counts as lost.",
        ge=1,
        le=10**6,
    )
    transport: Literal["auto", "sockets", "shared-memory"] = option(
        "auto", Group.RANKS, "How ranks exchange rows and sums (docs/training.md)."
    )
    out: PathText = option(
        "run", Group.OUTPUT, "Folder of run file, metrics and checkpoints.", "DIR"
    )

    @property
    def shares(self) -> tuple[float, ...]:
        """Relative quotas of the workers; empty if the policy decides."""
        return quota_shares(self.quotas)
