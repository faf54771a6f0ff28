"""A small job for tests: a model with bags and mixed widths, skewed data, and plain torch beside.

Everything is float64, so results agree to the last few digits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from embroute.config.cluster import Cluster, uniform_cluster
from embroute.config.spec import Cache, Size, parse_cache
from embroute.data.schema import Schema, Table
from embroute.engine.observe.metrics import Meter
from embroute.engine.observe.row_versions import RowVersions
from embroute.engine.optim import RowWiseAdagrad
from embroute.engine.sharding import RowSharding
from embroute.launch.rank import RankContext
from embroute.models.initial_rows import initial_rows
from embroute.nn.prepare import prepare
from embroute.nn.prepared import Prepared
from embroute.nn.settings import Settings
from embroute.nn.tensor_batches import Lookup
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy

torch.set_num_threads(1)  # the tests run side by side, and the tensors are tiny

SIZES, WIDTHS = {"user": 40, "tags": 25, "items": 30}, (4, 8, 4)
BATCH = 24
CLIP = 0.05  # of the dense part's gradients: exceeded in most steps
Batch = dict[str, torch.Tensor]


class Model(nn.Module):
    """An Embedding, an EmbeddingBag with ragged bags, and an Embedding with two lookups per
    sample."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(40, 4)
        self.tags = nn.EmbeddingBag(25, 8, mode="mean")
        self.items = nn.Embedding(30, 4, padding_idx=0)
        self.top = nn.Sequential(nn.Linear(4 + 8 + 8 + 1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the samples."""
        tags = self.tags(batch["tags"], batch["offsets"])
        parts = [self.user(batch["user"]), tags, self.items(batch["items"]).flatten(1)]
        score: torch.Tensor = self.top(torch.cat([*parts, batch["age"][:, None]], 1))
        return score.squeeze(1)


def tables_of(model: Model) -> tuple[nn.Embedding, nn.EmbeddingBag, nn.Embedding]:
    """The layers that are routed."""
    return model.user, model.tags, model.items


@torch.no_grad()
def _first_model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Model().double()
    for table, layer in enumerate(tables_of(model)):
        size, width = list(SIZES.values())[table], WIDTHS[table]
        rows = initial_rows(0, np.full(size, table), np.arange(size), width)
        layer.weight.data = torch.from_numpy(rows)
    model.items.weight.data[0] = 0
    return model


_FIRST = _first_model()  # ranks are threads, and torch has one generator for all of them


def new_model() -> Model:
    """The same model at every call."""
    return copy.deepcopy(_FIRST)


def seeded_model() -> Model:
    """The same model without table rows: their values follow from the seed."""
    model = new_model()
    for layer in tables_of(model):
        layer.to("meta")
    return model


def lookups(batch: Batch) -> dict[str, Lookup | Sequence[Lookup]]:
    """The lookups of each layer."""
    return {
        "user": batch["user"],
        "tags": (batch["tags"], batch["offsets"]),
        "items": batch["items"],
    }


def batches(seed: int, steps: int) -> list[Batch]:
    """Skewed ids, bags of zero to three ids, and a short last batch."""
    found = []
    for step in range(steps):
        rng = np.random.default_rng([seed, step])
        size = BATCH if step < steps - 1 else 5
        lengths = rng.integers(0, 4, size)

        def ids(name: str, shape: Sequence[int], rng: np.random.Generator = rng) -> torch.Tensor:
            drawn = SIZES[name] * rng.random(shape) ** 3
            return torch.from_numpy(drawn.astype(np.int64))

        found.append(
            {
                "user": ids("user", (size,)),
                "tags": ids("tags", (int(lengths.sum()),)),
                "offsets": torch.from_numpy(np.cumsum(lengths) - lengths),
                "items": ids("items", (size, 2)),
                "age": torch.from_numpy(rng.random(size)),
                "label": torch.from_numpy((rng.random(size) < 0.4).astype(np.float64)),
            }
        )
    return found


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean log-loss."""
    return nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])


Optimizers = list[torch.optim.Optimizer]


def optimizers_of(name: str, model: Model) -> Optimizers:
    """An optimizer for the tables and another for the dense part."""
    rows = [layer.weight for layer in tables_of(model)]
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(rows, lr=0.3),
        "adagrad": lambda: torch.optim.Adagrad(rows, lr=0.2, initial_accumulator_value=0.1),
        "adam": lambda: torch.optim.SparseAdam(rows, lr=0.05),
        "rowwise-adagrad": lambda: RowWiseAdagrad(rows, lr=0.2),
    }
    return [made[name](), torch.optim.Adam(model.top.parameters(), lr=0.01)]


def schedules_of(optimizers: Optimizers) -> list[torch.optim.lr_scheduler.LRScheduler]:
    """Schedules that change the learning rate at every step."""
    decay = torch.optim.lr_scheduler.ExponentialLR
    return [decay(optimizer, 0.995) for optimizer in optimizers]


@dataclass(frozen=True)
class Trained:
    """The result of a run: tables and dense part."""

    tables: list[npt.NDArray[np.float64]]
    dense: list[npt.NDArray[np.float64]]

    def assert_equal(self, other: Trained, rtol: float = 1e-10, atol: float = 1e-12) -> None:
        """Compare to the last few digits."""
        pairs = zip(self.tables + self.dense, other.tables + other.dense, strict=True)
        for mine, its in pairs:
            np.testing.assert_allclose(mine, its, rtol=rtol, atol=atol)


def plain(
    optimizer: str,
    stream: Sequence[Batch],
    made: Callable[[], Model] = new_model,
    after_backward: Callable[[Model, Batch], None] = lambda model, batch: None,
) -> Trained:
    """Train in single-process torch on the same batches."""
    model = made()
    if optimizer == "adam":
        for layer in tables_of(model):
            layer.sparse = True
    optimizers = optimizers_of(optimizer, model)
    schedules = schedules_of(optimizers)
    for batch in stream:
        for one in optimizers:
            one.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        after_backward(model, batch)
        nn.utils.clip_grad_norm_(model.top.parameters(), CLIP)
        for one in optimizers:
            one.step()
        for schedule in schedules:
            schedule.step()
    tables = [layer.weight.detach().numpy() for layer in tables_of(model)]
    return Trained(tables, dense_of(model))


@cache
def plain_cached(optimizer: str, seed: int, steps: int) -> Trained:
    """The plain result, computed once per process."""
    return plain(optimizer, batches(seed, steps))


def dense_of(model: Model) -> list[npt.NDArray[np.float64]]:
    """The values of the dense part."""
    return [p.detach().numpy() for p in model.top.parameters()]


@dataclass(frozen=True)
class Result:
    """The end of a job on one rank: its traffic and its tensors."""

    meter: Meter
    dense: list[npt.NDArray[np.float64]]
    tables: list[npt.NDArray[np.float64]]  # of a shard: its rows of each table
    losses: list[float]
    stamps: RowVersions | None = None
    samples: tuple[int, ...] = ()  # of each step, at a worker
    last_step: int = 0  # as a worker counts


def train(
    rank: RankContext,
    stream: Iterable[Batch],
    optimizer: str,
    settings: Settings,
    made: Callable[[], Model] = seeded_model,
    stop_after: int = 0,
) -> Result:
    """The user's loop on any rank; a worker may ask for the end after `stop_after` steps."""
    model = made()
    optimizers = optimizers_of(optimizer, model)
    schedules = schedules_of(optimizers)
    extras = {f"schedule{i}": schedule for i, schedule in enumerate(schedules)}
    own = settings.copy()
    own["extras"] = extras
    ready = prepare(model, optimizers, stream, rank, **own)
    losses, samples = [], []
    for batch in ready.loader:
        for one in optimizers:
            one.zero_grad()
        assert ready.session is not None
        ready.session.backward(loss_of(model, batch))  # type: ignore[arg-type]
        nn.utils.clip_grad_norm_(model.top.parameters(), CLIP)
        losses.append(ready.session.loss)
        samples.append(len(batch["label"]))  # type: ignore[index]
        for one in optimizers:
            one.step()
        for schedule in schedules:
            schedule.step()
        if len(losses) == stop_after:
            ready.stop()
    tables = _tables(ready, rank)
    last_step = 0 if ready.session is None else ready.step
    traffic = ready.meter, dense_of(model), tables, losses, ready.stamps
    return Result(*traffic, tuple(samples), last_step)


def _tables(ready: Prepared, rank: RankContext) -> list[npt.NDArray[np.float64]]:
    if ready.shard is None:
        return []
    sharding = places_of(rank.num_workers, rank.num_shards)
    found = []
    for table, width in enumerate(WIDTHS):
        rows = sharding.rows_of(rank.index, table)
        records = ready.shard.store.records[sharding.setup.arenas.index(width)]
        found.append(records[sharding.local(rows), :width].astype(np.float64))
    return found


def places_of(num_workers: int, num_shards: int) -> RowSharding:
    """The sharding of the rows in a job of this size."""
    tables = tuple(Table(name, size) for name, size in SIZES.items())
    return RowSharding(Setup(Schema(tables, ()), uniform_cluster(num_workers, num_shards), WIDTHS))


def gathered(results: dict[str, Result], num_workers: int, num_shards: int) -> Trained:
    """The tables of all shards, and the dense part of the last worker."""
    sharding = places_of(num_workers, num_shards)
    tables = []
    for table, (size, width) in enumerate(zip(SIZES.values(), WIDTHS, strict=True)):
        whole = np.full((size, width), np.nan)
        for shard in range(num_shards):
            ids = sharding.rows_of(shard, table) - sharding.setup.schema.first_rows[table]
            whole[ids] = results[f"shard{shard}"].tables[table]
        tables.append(whole)
    return Trained(tables, results[f"worker{num_workers - 1}"].dense)


def size_of(settings: Settings) -> Cache:
    """The cache of a job; reference policies keep all rows."""
    if make_policy(settings["policy"]).unbounded:
        return Size(1.0, "share")
    return parse_cache("cache=", settings["cache"])


def settings_of(policy: str, num_workers: int, cache_share: float = 0.8) -> Settings:
    """Uneven quotas, the smallest caches that fit, and every layer routed."""
    shares = tuple(1.0 + worker for worker in range(num_workers))
    return Settings(
        policy=policy,
        cache=Size(cache_share, "share"),
        lookups=lookups,
        min_rows=1,
        quotas=shares,
        compute_ms_per_sample=0.0,
    )


def free_settings(policy: str, num_workers: int, num_shards: int) -> Settings:
    """The same with quotas that the policy chooses; the last worker's link is ten times slower."""
    settings = settings_of(policy, num_workers)
    del settings["quotas"]
    cluster = uniform_cluster(num_workers, num_shards)
    last = cluster.hosts[-1]
    slow = replace(last, up_bytes_s=last.up_bytes_s / 10, down_bytes_s=last.down_bytes_s / 10)
    settings["network"] = replace(cluster, hosts=(*cluster.hosts[:-1], slow))
    settings["compute_ms_per_sample"] = 1e-3
    return settings


def slow_settings(policy: str, num_workers: int, num_shards: int, rate: float = 0.2e6) -> Settings:
    """The same on links so slow that some steps use many chunks and others few."""
    settings, cluster = settings_of(policy, num_workers), uniform_cluster(num_workers, num_shards)
    hosts = tuple(replace(host, up_bytes_s=rate, down_bytes_s=rate) for host in cluster.hosts)
    settings["network"] = replace(cluster, hosts=hosts)
    return settings


def slow_shards(num_workers: int, num_shards: int) -> Cluster:
    """Equal workers, and shards that are the bottleneck."""
    cluster = uniform_cluster(num_workers, num_shards)
    slow = [
        replace(host, up_bytes_s=host.up_bytes_s / 20, down_bytes_s=host.down_bytes_s / 20)
        for host in cluster.hosts[:num_shards]
    ]
    hosts = (*slow, *cluster.hosts[num_shards:])
    return replace(cluster, hosts=hosts, coordinator=num_shards, compute_s_per_sample=1e-8)


def crowded_settings(policy: str, num_workers: int, num_shards: int) -> Settings:
    """The same with quotas that the policy chooses, and shards that are the bottleneck."""
    settings = settings_of(policy, num_workers)
    del settings["quotas"]
    settings["network"] = slow_shards(num_workers, num_shards)
    settings["compute_ms_per_sample"] = 1e-5
    return settings
