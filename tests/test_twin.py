"""Plans carried out on real rows: exact policies equal plain single-process torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from embroute.cluster import Cluster, Host, Worker
from embroute.config import Size
from embroute.data.batch import Batch
from embroute.data.schema import Field, Schema, Table
from embroute.kernels.rows import Floats
from embroute.policy.catalog import make_policy
from embroute.policy.plan import Plan, traffic
from embroute.policy.plans import plans, start
from embroute.policy.setup import Setup
from embroute.runtime.optim import RowOptimizer, RowWiseAdagrad, row_optimizer
from embroute.runtime.twin import MicroBatch, Twin

torch.set_num_threads(1)  # the tests run side by side, and the tensors are tiny

SIZES, WIDTHS, BAGS = (40, 25, 30), (4, 8, 4), (False, True, False)
STEPS, BATCH = 60, 24


def schema() -> Schema:
    tables = tuple(Table(f"t{i}", size) for i, size in enumerate(SIZES))
    fields = tuple(Field(f"f{i}", i, bag) for i, bag in enumerate(BAGS))
    return Schema(tables, fields, labelled=True)


def setup_of(workers: int, shards: int, cache: float, optimizer: str) -> Setup:
    hosts = tuple(Host(f"h{i}", 1e9 / (1 + i % 2), 1e9) for i in range(workers + shards))
    cluster = Cluster(
        hosts,
        tuple(Worker(i) for i in range(workers)),
        tuple(range(workers, workers + shards)),
    )
    shares = tuple(1.0 + w for w in range(workers))
    return Setup(schema(), cluster, WIDTHS, BATCH, optimizer, Size(cache, "share"), shares=shares)


def batches(seed: int) -> Iterator[Batch]:
    """Skewed ids, bags of nought to three, a short last batch."""
    first = schema().first_rows
    for step in range(STEPS):
        rng = np.random.default_rng([seed, step])
        samples = BATCH if step < STEPS - 1 else 5
        rows: list[int] = []
        lengths = []
        for _ in range(samples):
            for table, bag in enumerate(BAGS):
                count = int(rng.integers(0, 4)) if bag else 1
                ids = (SIZES[table] * rng.random(count) ** 3).astype(int)
                rows += [int(first[table]) + int(i) for i in ids]
                lengths.append(count)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        label = (rng.random(samples) < 0.4).astype(np.float32)
        dense = np.zeros((samples, 0), np.float32)
        yield Batch(np.array(rows, np.int64), offsets, dense, label, len(BAGS))


class Scorer(nn.Module):
    """A small dense part over the pooled rows of each field."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(sum(WIDTHS), 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.layers(pooled).squeeze(1)  # type: ignore[no-any-return]


def field_lookups(batch: Batch, samples: npt.NDArray[np.int32], field: int) -> list[range]:
    bags = samples.astype(int) * batch.num_fields + field
    return [range(int(batch.offsets[b]), int(batch.offsets[b + 1])) for b in bags]


def optimizer_of(name: str, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.3)
    if name == "adagrad":
        return torch.optim.Adagrad(params, lr=0.2, initial_accumulator_value=0.1)
    if name == "adam":
        return torch.optim.SparseAdam(params, lr=0.05)
    return RowWiseAdagrad(params, lr=0.2)


@dataclass
class Reference:
    """Plain torch: EmbeddingBag tables, one process, the whole batch at once."""

    tables: list[nn.EmbeddingBag]
    scorer: Scorer

    @staticmethod
    def new(sparse: bool) -> Reference:
        torch.manual_seed(1)
        tables = [
            nn.EmbeddingBag(size, width, mode="sum", sparse=sparse)
            for size, width in zip(SIZES, WIDTHS, strict=True)
        ]
        return Reference([table.double() for table in tables], Scorer().double())

    def train(self, name: str, stream: list[Batch]) -> None:
        first = schema().first_rows
        weights = [table.weight for table in self.tables]
        rows = optimizer_of(name, list(weights))
        dense = torch.optim.SGD(self.scorer.parameters(), lr=0.1)
        for batch in stream:
            samples = np.arange(len(batch), dtype=np.int32)
            pooled = []
            for field, table in enumerate(self.tables):
                bags = field_lookups(batch, samples, field)
                ids = torch.tensor([int(batch.rows[i] - first[field]) for b in bags for i in b])
                starts = np.cumsum([0] + [len(b) for b in bags])[:-1]
                pooled.append(table(ids.long(), torch.tensor(starts)))
            score = self.scorer(torch.cat(pooled, 1))
            label = torch.from_numpy(batch.label).double()
            loss = nn.functional.binary_cross_entropy_with_logits(score, label)
            rows.zero_grad()
            dense.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            rows.step()
            dense.step()


@cache
def trained(optimizer: str, seed: int) -> Reference:
    """The reference after the whole stream of a seed."""
    reference = Reference.new(sparse=optimizer == "adam")
    reference.train(optimizer, list(batches(seed)))
    return reference


@dataclass
class Routed:
    """The same model on the twin: every worker computes its share of the loss."""

    twin: Twin
    scorer: Scorer

    def compute(self, plan: Plan, micro: MicroBatch) -> tuple[Floats, ...]:
        batch = plan.now.batch
        values = [torch.from_numpy(block).requires_grad_() for block in micro.values]
        pooled, at = [], {}
        position = 0
        for sample in micro.samples:
            for field in range(batch.num_fields):
                count = len(field_lookups(batch, np.array([sample]), field)[0])
                at[int(sample), field] = range(position, position + count)
                position += count
        for field, width in enumerate(WIDTHS):
            arena = self.twin.setup.arenas.index(width)
            within = np.cumsum(micro.arena_T == arena) - 1
            ids = [micro.touch_of_lookup[i] for s in micro.samples for i in at[int(s), field]]
            starts = np.cumsum([0] + [len(at[int(s), field]) for s in micro.samples])[:-1]
            index = torch.from_numpy(within[np.array(ids, np.int64)])
            offsets = torch.tensor(starts, dtype=torch.int64)
            pooled.append(nn.functional.embedding_bag(index, values[arena], offsets, mode="sum"))
        if len(micro.samples):
            label = torch.from_numpy(batch.label[micro.samples]).double()
            score = self.scorer(torch.cat(pooled, 1))
            entropy = nn.functional.binary_cross_entropy_with_logits
            loss = entropy(score, label, reduction="sum") / len(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        return tuple(np.zeros(v.shape) if v.grad is None else v.grad.numpy() for v in values)


def run(name: str, setup: Setup, stream: list[Batch]) -> tuple[Twin, Scorer, int]:
    """Train on the twin; also the row bytes that the plans promised."""
    policy = make_policy(name)
    reference = Reference.new(sparse=False)
    weights = [table.weight for table in reference.tables]
    optimizer = row_optimizer(optimizer_of(setup.optimizer, list(weights)))
    twin = Twin(setup, policy, optimizer)
    first = schema().first_rows
    for table, weight in enumerate(weights):
        rows = np.arange(first[table], first[table + 1])
        arena = setup.arenas.index(WIDTHS[table])
        for k, shard in enumerate(twin.shards):
            mine = rows % len(twin.shards) == k
            shard.set_values(arena, rows[mine], weight.detach().numpy()[mine])
    dense = torch.optim.SGD(reference.scorer.parameters(), lr=0.1)
    routed = Routed(twin, reference.scorer)
    counts = np.bincount(np.concatenate([b.rows for b in stream]), minlength=schema().num_rows)
    state, promised = start(policy, setup, counts), 0
    for step in plans(policy, iter(stream), state):
        dense.zero_grad()
        twin.step(step.plan, routed.compute)
        dense.step()
        promised += int(traffic(step.plan, setup).bytes_WKIP.sum())
    twin.drain(state)
    return twin, reference.scorer, promised


def values(twin: Twin) -> list[Floats]:
    first = schema().first_rows
    tables: list[Floats] = []
    for table, width in enumerate(WIDTHS):
        rows = np.arange(first[table], first[table + 1])
        arena = twin.setup.arenas.index(width)
        out = np.empty((len(rows), width))
        for k, shard in enumerate(twin.shards):
            mine = rows % len(twin.shards) == k
            out[mine] = shard.values(arena, rows[mine])
        tables.append(out)
    return tables


EXACT = [
    "nocache",
    "vanilla",
    "herald",
    "esd(1)",
    "bagpipe(3)",
    "dispatch=esd sync=on-demand evict=clairvoyant(3)",
    "dispatch=herald sync=write-through evict=lfu",
    "unbounded(of=esd(0.5))",
]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise-adagrad", "adam"])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("workers", "shards"), [(2, 1), (3, 2)])
def test_exact_policies_equal_plain_torch(
    name: str, optimizer: str, workers: int, shards: int
) -> None:
    stream = list(batches(workers))
    setup = setup_of(workers, shards, 1.0 if "unbounded" in name else 0.75, optimizer)
    twin, scorer, _ = run(name, setup, stream)
    reference = trained(optimizer, workers)
    for mine, table in zip(values(twin), reference.tables, strict=True):
        np.testing.assert_allclose(mine, table.weight.detach().numpy(), rtol=1e-10, atol=1e-12)
    pairs = zip(scorer.parameters(), reference.scorer.parameters(), strict=True)
    for own, plain in pairs:
        torch.testing.assert_close(own, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise-adagrad", "adam"])
@pytest.mark.parametrize("name", ["fae(hot=0.6, buffer=8)", "scars(hot=0.6, buffer=8)"])
def test_replicated_rows_equal_plain_torch_in_the_changed_order(name: str, optimizer: str) -> None:
    stream = list(batches(7))
    setup = setup_of(3, 2, 1.0, optimizer)
    twin, _, _ = run(name, setup, stream)
    policy = make_policy(name)
    counts = np.bincount(np.concatenate([b.rows for b in stream]), minlength=schema().num_rows)
    order = [s.plan.now.batch for s in plans(policy, iter(stream), start(policy, setup, counts))]
    assert any(batch.hot for batch in order)
    reference = Reference.new(sparse=optimizer == "adam")
    reference.train(optimizer, order)
    for mine, table in zip(values(twin), reference.tables, strict=True):
        np.testing.assert_allclose(mine, table.weight.detach().numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [*EXACT, "het(3)", "het(10, order=lfu)", "fae(hot=0.4)", "scars"])
def test_bytes_moved_are_the_bytes_planned(name: str) -> None:
    stream = list(batches(3))
    setup = setup_of(3, 2, 1.0, "adagrad")
    twin, _, promised = run(name, setup, stream)
    # The twin holds doubles, the plan counts floats; the drain is not part of any step's plan.
    assert twin.moved_bytes - twin.drained_bytes == 2 * promised


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise-adagrad"])
def test_bounded_staleness_loses_no_update(optimizer: str) -> None:
    """With one worker nobody's updates are missed, so HET is exact up to adding deltas."""
    stream = list(batches(5))
    twin, _, _ = run("het(4)", setup_of(1, 2, 0.9, optimizer), stream)
    reference = trained(optimizer, 5)
    for mine, table in zip(values(twin), reference.tables, strict=True):
        np.testing.assert_allclose(mine, table.weight.detach().numpy(), rtol=1e-9, atol=1e-11)


def test_optimizers_without_a_row_form_are_refused() -> None:
    weight = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(ValueError, match="momentum must be 0"):
        row_optimizer(torch.optim.SGD(weight, lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"weight_decay=0\.1"):
        row_optimizer(torch.optim.Adagrad(weight, weight_decay=0.1))
    with pytest.raises(ValueError, match="RMSprop has no row form"):
        row_optimizer(torch.optim.RMSprop(weight))
    with pytest.raises(ValueError, match="optimizer must be one of"):
        RowOptimizer("lion", 0.1)
