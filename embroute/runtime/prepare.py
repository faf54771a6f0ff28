"""`prepare`: a user's model, optimizer and loader come back ready for a distributed job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from embroute.cluster import Cluster, uniform
from embroute.config import Size
from embroute.kernels.codes import DELTA
from embroute.kernels.rows import scatter
from embroute.models.initial import initial_rows
from embroute.policy.catalog import make_policy
from embroute.policy.parts import Policy
from embroute.policy.plans import start
from embroute.policy.setup import Setup
from embroute.policy.state import State
from embroute.runtime.coordinator import Coordinator, Schedule
from embroute.runtime.feed import Feed, SampleFeed
from embroute.runtime.inbox import DRAIN, LOOK, STEP, STOP, listen
from embroute.runtime.meter import Meter
from embroute.runtime.optim import RowOptimizer, row_optimizer
from embroute.runtime.places import Places
from embroute.runtime.routed import Desk, RoutedLayer
from embroute.runtime.run import Courier, Dense, Rate, Run
from embroute.runtime.script import EARLY_PULL, Orders
from embroute.runtime.seat import Seat
from embroute.runtime.shadow import Shadow
from embroute.runtime.shard import Shard
from embroute.runtime.store import CacheStore, ShardStore, Widths
from embroute.runtime.tables import (
    field_embeddings,
    find_layers,
    replace_fields,
    replace_layers,
)
from embroute.runtime.tensor_feed import Lookups, TensorFeed
from embroute.runtime.worker import Rows

INITIAL_ROWS = 1 << 16  # filled at a time
COUNTED_BATCHES = 256  # looked through for the access counts that hot sets are chosen by


class Settings(TypedDict, total=False):
    """What a job may be told beside its model, optimizer and loader."""

    policy: str
    cache: Size
    network: Cluster
    lookups: Lookups
    min_rows: int
    epochs: int
    max_steps: int
    quotas: tuple[float, ...]
    held_out: Iterable[object]
    evaluate_every: int
    decay: float
    seed: int
    device: str
    compare_with: str


class Loader:
    """A worker's samples, epoch by epoch; empty on ranks that do not train."""

    def __init__(self, run: Run | None) -> None:
        self._run = run

    def __iter__(self) -> Iterator[object]:
        return iter(()) if self._run is None else self._run.samples()


@dataclass(frozen=True)
class Prepared:
    """What `prepare` gives back: `run` on workers, `shard` on shards, and what the rank moved."""

    model: nn.Module
    optimizer: Optimizer | Sequence[Optimizer]
    loader: Loader
    meter: Meter
    run: Run | None = None
    shard: Shard | None = None


@dataclass(frozen=True)
class _Job:
    """What all ranks know of a job before the first batch."""

    seat: Seat
    settings: Settings
    feed: Feed
    policy: Policy
    setup: Setup
    optimizer: RowOptimizer
    rate: Rate
    weights: list[torch.Tensor]
    desk: Desk
    layers: list[RoutedLayer]

    @property
    def places(self) -> Places:
        return Places(self.setup)

    @property
    def widths(self) -> Widths:
        dtype = np.dtype(str(self.weights[0].dtype)[6:])
        return Widths(self.places, self.optimizer, dtype)


def prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Iterable[object],
    seat: Seat,
    **settings: Unpack[Settings],
) -> Prepared:
    """Make a model, its optimizer (or several) and its loader part of a distributed job.

    On workers the loop stays the user's; on shards and the coordinator this call serves until
    training ends, and the loader that comes back is empty. Only the coordinator reads `loader`.
    """
    job = _describe(model, optimizer, seat, settings)
    if seat.role == "coordinator":
        meter = _coordinate(job, loader)
        return Prepared(model, optimizer, Loader(None), meter)
    if seat.role == "shard":
        shard = _serve(job)
        return Prepared(model, optimizer, Loader(None), shard.meter, shard=shard)
    run = _join(job, model)
    return Prepared(model, optimizer, Loader(run), run.meter, run)


def _describe(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    seat: Seat,
    settings: Settings,
) -> _Job:
    """Find the tables, take them out of model and optimizer, and size the caches."""
    feed, weights, widths = _tables(model, settings)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    rows, rate = _take_out(weights, optimizers, settings.get("decay", 0.0))
    policy = make_policy(settings.get("policy", "esd(1)"))
    setup = Setup(
        feed.schema,
        settings.get("network") or uniform(seat.num_workers, seat.num_shards),
        widths,
        optimizer=rows.name,
        cache=Size(1.0, "share") if policy.unbounded else settings.get("cache", Size(0.1, "share")),
        shares=settings.get("quotas", ()),
        seed=settings.get("seed", 0),
    )
    _check(setup, seat)
    arena_of_table = tuple(setup.arenas.index(width) for width in widths)
    desk = Desk(setup.arenas, arena_of_table, settings.get("device", "cpu"))
    own = field_embeddings(model)
    layers: list[RoutedLayer] = []
    if own is not None:
        replace_fields(model, own, desk)
    else:
        layers = replace_layers(model, find_layers(model, settings.get("min_rows", 1000)), desk)
    return _Job(seat, settings, feed, policy, setup, rows, rate, weights, desk, layers)


def _tables(
    model: nn.Module, settings: Settings
) -> tuple[Feed, list[torch.Tensor], tuple[int, ...]]:
    """The feed that suits the model, the weights of its tables, and their widths."""
    device = settings.get("device", "cpu")
    own = field_embeddings(model)
    if own is not None:
        weights = own.weights
        return SampleFeed(own.schema, weights[0].dtype, device), weights, own.widths
    found = find_layers(model, settings.get("min_rows", 1000))
    if "lookups" not in settings:
        names = ", ".join(entry.layer.name for entry in found)
        raise ValueError(
            f"lookups=: say which ids of a batch each layer looks up, for the layers {names}"
        )
    feed = TensorFeed([entry.layer for entry in found], settings["lookups"], device)
    weights = [entry.weight for entry in found]
    return feed, weights, tuple(entry.layer.width for entry in found)


def _take_out(
    weights: Sequence[torch.Tensor], optimizers: Sequence[Optimizer], decay: float
) -> tuple[RowOptimizer, Rate]:
    """Remove the tables from the optimizers; returns what will update their rows."""
    routed = {id(weight) for weight in weights}
    found: list[tuple[RowOptimizer, Rate]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kept = [p for p in group["params"] if id(p) not in routed]
            if len(kept) < len(group["params"]):
                found.append((row_optimizer(optimizer, group), Rate(group)))
                routed -= {id(p) for p in group["params"]}
                group["params"] = kept
    if routed:
        raise ValueError(f"{len(routed)} of {len(weights)} tables are in no optimizer")
    if any(rows != found[0][0] for rows, _ in found):
        raise ValueError("all tables must have the same optimizer with the same settings")
    return replace(found[0][0], decay=decay), found[0][1]


def _check(setup: Setup, seat: Seat) -> None:
    cluster = setup.cluster
    if (cluster.num_workers, cluster.num_shards) != (seat.num_workers, seat.num_shards):
        raise ValueError(
            f"the network has {cluster.num_workers} workers and {cluster.num_shards} shards, the "
            f"job {seat.num_workers} and {seat.num_shards}"
        )


def _coordinate(job: _Job, loader: Iterable[object]) -> Meter:
    items = iter(loader)
    first = next(items, None)
    if first is None:
        raise ValueError("the loader is empty: it gave no batch at all")
    shape = job.feed.learn(first)
    batch = job.feed.batch(first)
    setup = replace(job.setup, schema=job.feed.schema, batch_size=len(batch))
    schedule = Schedule(
        job.settings.get("epochs", 1),
        job.settings.get("max_steps", 0),
        job.settings.get("evaluate_every", 0),
    )
    coordinator = Coordinator(
        job.seat,
        job.policy,
        _first_state(job, setup, loader),
        job.feed,
        schedule,
        job.settings.get("held_out"),
        Shadow(job.settings["compare_with"], setup) if "compare_with" in job.settings else None,
    )
    coordinator.greet(shape)
    coordinator.run(loader, chain([first], items))
    return coordinator.meter


def _first_state(job: _Job, setup: Setup, loader: Iterable[object]) -> State:
    """Empty caches; a hot set is chosen by the counts of the first batches."""
    if job.policy.regroup is None:
        return start(job.policy, setup)
    counts = np.zeros(setup.schema.num_rows, np.int64)
    for item in islice(loader, COUNTED_BATCHES):
        rows = job.feed.batch(item).rows
        counts += np.bincount(rows[rows >= 0], minlength=len(counts))
    return start(job.policy, setup, counts)


def _serve(job: _Job) -> Shard:
    """A shard's life."""
    seat, places, widths = job.seat, job.places, job.widths
    store = ShardStore(seat.index, places, widths, job.optimizer)
    for table, weight in enumerate(job.weights):
        _fill(store, job, table, weight)
    shard = Shard(store, widths, seat.rows, seat.workers)
    notes = listen(seat.plans)
    while (note := notes.get()).verb != STOP:
        if note.verb == STEP:
            shard.step(note)
        elif note.verb == DRAIN:
            shard.drain(note)
        elif note.verb == LOOK:
            _, heads, index = note.arrays
            orders = Orders.read(heads, index)
            shard.serve(orders.at(EARLY_PULL))
    return shard


def _fill(store: ShardStore, job: _Job, table: int, weight: torch.Tensor) -> None:
    """Initial values of a table's rows at this shard."""
    places, first_rows = job.places, job.setup.schema.first_rows
    rows = places.rows_of(job.seat.index, table)
    ids = rows - first_rows[table]
    if not len(ids):
        return
    records = store.records[job.desk.arena_of_table[table]]
    for span in np.array_split(ids, -(-len(ids) // INITIAL_ROWS)):
        if weight.is_meta:
            first, last = int(span[0]), int(span[-1]) + 1
            seed, width = job.settings.get("seed", 0), weight.shape[1]
            values = initial_rows(seed, table, first, last, width)[span - first]
        else:
            values = weight.detach().cpu().numpy()[span]
        local = places.local(span + first_rows[table])
        scatter(records, local, values.astype(records.dtype))


def _join(job: _Job, model: nn.Module) -> Run:
    """A worker's part: from here the loop is the user's."""
    seat = job.seat
    deltas = job.policy.sync.record == DELTA
    store = CacheStore(seat.index, job.places, job.widths, job.optimizer, deltas)
    rows = Rows(store, job.widths, seat.rows, seat.shards)
    courier = Courier(seat, rows, job.feed, job.layers)
    run = Run(courier, job.desk, Dense(model, seat), job.rate)
    courier.start()
    return run
