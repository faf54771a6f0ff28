"""Models that read the rows of bags one by one: trained exactly, simulated, and their data."""

from __future__ import annotations

import itertools
import json
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from embroute.cli.main import cli
from embroute.config.cluster import uniform_cluster
from embroute.config.data_options import DataOptions
from embroute.config.run_options import ModelName, RunConfig
from embroute.config.spec import Size, parse_call
from embroute.data.batch import Batch, concat
from embroute.data.graph import GraphSource
from embroute.data.online_retail import RetailSource
from embroute.data.open import open_source
from embroute.data.schema import Schema
from embroute.data.stream import batches
from embroute.data.synthetic.communities import open_graph
from embroute.engine.sharding import RowSharding
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.models.layers import Samples
from embroute.models.registry import ModelOptions, make_model
from embroute.nn.module_surgery import field_embeddings
from embroute.nn.prepare import prepare
from embroute.planner.setup import Setup
from embroute.train.loop import train_rank
from tests.jobs import Trained
from tests.sizes import marked_full
from tests.test_models import samples_of

DATA: dict[ModelName, str] = {
    "din": "online-retail(negatives=1, history=8)",
    "graphsage": "graph(nodes=3000, degree=20, communities=10, fanout=5)",
}
DIM, BATCH, STEPS = 4, 24, 20
OPTIONS = ModelOptions(hidden=(8,), seed=5)
WORKERS, SHARDS = 3, 2
Floats = list[npt.NDArray[np.float64]]


def new_model(name: str, schema: Schema) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = make_model(name, schema, DIM, OPTIONS).double()
    plain = field_embeddings(model)
    assert plain is not None
    # Adagrad would turn the rounding of a gradient that is exactly 0 into an update.
    rows = torch.optim.SGD(plain.parameters(), lr=2.0)
    return model, [rows, torch.optim.SGD(dense_of(model), lr=0.3)]


def dense_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if not name.startswith("embeddings.")]


def loss_of(model: nn.Module, samples: Samples) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(samples), samples.label)


def train(rank: RankContext, name: str, schema: Schema, stream: list[Batch]) -> Floats:
    """The dense part of a worker; the rows of a shard."""
    model, optimizers = new_model(name, schema)
    ready = prepare(
        model, optimizers, stream, rank, policy="esd(1)", cache=Size(1.0, "share"), quotas=(1, 2, 3)
    )
    for samples in ready.loader:
        for one in optimizers:
            one.zero_grad()
        assert isinstance(samples, Samples)
        ready.backward(loss_of(model, samples))
        for one in optimizers:
            one.step()
    if ready.shard is not None:
        return [ready.shard.store.records[0][:, :DIM].astype(np.float64)]
    return [p.detach().numpy() for p in dense_of(model)]


def plain_torch(name: str, schema: Schema, stream: list[Batch]) -> Trained:
    model, optimizers = new_model(name, schema)
    for batch in stream:
        for one in optimizers:
            one.zero_grad()
        loss = loss_of(model, samples_of(batch, schema, torch.float64))
        loss.backward()  # type: ignore[no-untyped-call]
        for one in optimizers:
            one.step()
    plain = field_embeddings(model)
    assert plain is not None
    rows = torch.cat(plain.weights).detach().numpy()
    return Trained([rows], [p.detach().numpy() for p in dense_of(model)])


@pytest.mark.parametrize("name", DATA)
def test_bag_models_equal_plain_torch(name: ModelName) -> None:
    source = open_source(DATA[name])
    schema, stream = source.schema, list(islice(batches(source, BATCH), 300, 300 + STEPS))
    assert any(len(batch.rows) > BATCH * schema.num_fields for batch in stream)
    ranks = run_in_process(WORKERS, SHARDS, lambda rank: train(rank, name, schema, stream))
    setup = Setup(schema, uniform_cluster(WORKERS, SHARDS), DIM)
    sharding = RowSharding(setup)
    whole = np.full((schema.num_rows, DIM), np.nan)
    for shard in range(SHARDS):
        for table in range(len(schema.tables)):
            rows = sharding.rows_of(shard, table)
            whole[rows] = ranks[f"shard{shard}"][0][sharding.local(rows)]
    expected = plain_torch(name, schema, stream)
    Trained([whole], ranks["worker0"]).assert_equal(expected)
    assert np.abs(expected.tables[0] - plain_torch(name, schema, []).tables[0]).max() > 0.01


@pytest.mark.parametrize("name", marked_full(DATA, []))
def test_bag_models_train_by_their_name_and_learn(name: ModelName, tmp_path: Path) -> None:
    run = RunConfig(
        data=DATA[name],
        data_options=DataOptions(limit=60_000),
        model=name,
        dim="8",
        hidden="16",
        batch=128,
        held_out=0.1,
        epochs=4,
        lr=0.1,
        workers=2,
        shards=1,
    )
    run_in_process(2, 1, lambda rank: train_rank(run, rank, tmp_path, threading.Event()))
    assert json.loads((tmp_path / "summary.json").read_text())["metrics"]["auc"] > 0.6


@pytest.mark.parametrize("name", DATA)
def test_data_of_bag_models_can_be_compared(name: ModelName) -> None:
    words = ["compare", "--data", DATA[name], "--policies", "nocache,herald", "--network", "dc-4"]
    result = CliRunner().invoke(cli, [*words, "--steps", "12", "--batch", "32", "--json", "-"])
    assert result.exit_code == 0, result.output
    moved = [sum(one["bytes"].values()) for one in json.loads(result.stdout)["policies"].values()]
    assert 0 < moved[1] < moved[0]


def test_retail_history_is_the_customers_last_items() -> None:
    """Counted line by line, in plain Python."""
    length, lines, missing = 6, 30_000, 32
    source = RetailSource(history=length)
    batch = concat(list(islice(source.chunks(), 1)))
    first = source.schema.first_rows
    assert source.schema.fields[-1].table == 1
    known: dict[tuple[str, int], list[int]] = {}
    longest = 0
    for sample in range(lines):
        invoice, item, customer, _, _, *history = batch.rows[
            batch.offsets[6 * sample] : batch.offsets[6 * sample + 6]
        ]
        unknown = customer - first[2] == missing
        before = known.setdefault(("", invoice) if unknown else ("of", customer), [])
        assert history == before[-length:]
        longest = max(longest, len(history))
        before.append(item)
    assert longest == length


def test_retail_history_changes_no_other_field() -> None:
    plain, more = (next(RetailSource(2, 7, history).chunks()) for history in (0, 3))
    columns = np.arange(5) + np.zeros((len(plain), 1), int)
    singles = more.rows[more.offsets[:-1].reshape(-1, 6)[:, :5]]
    np.testing.assert_array_equal(singles, plain.rows.reshape(columns.shape))
    np.testing.assert_array_equal(more.label, plain.label)
    np.testing.assert_array_equal(more.dense, plain.dense)


def test_missing_customers_of_the_retail_trace_have_the_number_that_histories_expect() -> None:
    source = RetailSource()
    customers = np.concatenate([c.rows.reshape(-1, 5)[:, 2] for c in source.chunks()])
    assert np.bincount(customers - source.schema.first_rows[2])[32] == 135_080  # as published


def open_small(text: str) -> GraphSource:
    return open_graph(parse_call(text))


def test_graph_has_communities_and_few_nodes_of_high_degree() -> None:
    graph = open_small("graph(nodes=5000, degree=20, communities=5, mixing=0)").graph
    edges = graph.edge_E2
    assert 8 < len(edges) / 5000 <= 10
    assert (edges[:, 0] != edges[:, 1]).all()
    assert len(np.unique(np.sort(edges, 1), axis=0)) == len(edges)
    group = np.arange(5000)  # connected components, by taking over the smaller label
    for _ in range(30):
        low = np.minimum(*group[edges.T])
        for end in edges.T:
            np.minimum.at(group, end, low)
    assert (np.bincount(group) > 100).sum() == 5
    degree = np.sort(np.bincount(edges.ravel(), minlength=5000))[::-1]
    assert degree[:50].sum() > 0.1 * degree.sum()
    assert degree[0] > 5 * degree.mean()


def test_neighbours_of_a_graph_come_from_earlier_edges() -> None:
    """Counted edge by edge, in plain Python."""
    fanout, negatives = 3, 2
    source = open_small(f"graph(nodes=60, degree=12, fanout={fanout}, negatives={negatives})")
    batch = concat(list(source.chunks()))
    known: dict[int, list[int]] = {}
    assert len(batch) == source.num_samples == 3 * len(source.graph.edge_E2)
    for edge, (u, v) in enumerate(source.graph.edge_E2.tolist()):
        samples = range(edge * 3, edge * 3 + 3)
        assert batch.label[edge * 3 : edge * 3 + 3].sum() == 1
        for s in samples:
            at = batch.offsets[4 * s : 4 * s + 5]
            a, b, of_a, of_b = (batch.rows[i:j].tolist() for i, j in itertools.pairwise(at))
            assert a == [u]
            assert batch.label[s] == 0 or b == [v]
            for (end,), bag in ((a, of_a), (b, of_b)):
                before = known.get(end, [])
                assert set(bag) <= set(before)
                assert len(bag) == min(fanout, len(before))
                assert len(before) > fanout or bag == before
        known.setdefault(u, []).append(v)
        known.setdefault(v, []).append(u)


def test_neighbours_and_drawn_edges_follow_the_seed() -> None:
    one, same, other = (
        concat(list(open_small(f"graph(nodes=300, seed={seed})").chunks())) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one.rows, same.rows)
    assert len(one.rows) != len(other.rows) or (one.rows != other.rows).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph(nodes=1)", "nodes must be between 2 and"),
        ("graph(fanout=0)", "fanout must be between 1 and"),
        ("graph(mixing=2)", "mixing must be between 0 and 1"),
        ("graph(degrees=2)", "has no option 'degrees'"),
        ("graph(nodes=2, degree=1, seed=1)", "graph: no edges"),
    ],
)
def test_bad_options_of_graphs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_small(text)
