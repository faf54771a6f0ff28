"""Models equal slow formulas; lookups and the catalog of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from embroute.config.data_options import DataOptions
from embroute.data.batch import PADDING, Batch, Source, one_hot, with_bags
from embroute.data.open import open_source
from embroute.data.schema import Field, Schema, Table
from embroute.data.synthetic.generator import LOG_PRESETS, SyntheticSource
from embroute.kernels.array_types import F64
from embroute.models.initial_rows import NORM, fill
from embroute.models.layers import FieldEmbeddings, Samples
from embroute.models.registry import MODELS, ModelOptions, make_model, table_widths
from tests.model_formulas import REFERENCES, UNPOOLED, array
from tests.sizes import marked_full

torch.set_num_threads(1)  # the tests run side by side, and the tensors are tiny

TABLES = (Table("user", 7), Table("item", 11), Table("place", 5))
FIELDS = (Field("u", 0), Field("i", 1), Field("seen", 1, bag=True), Field("p", 2))
BAGGY = Schema(TABLES, FIELDS, ("a", "b", "c"), labelled=True)
SAMPLES = 9
SMALL = ModelOptions(hidden=(6, 4), seed=3)


def baggy_batch(schema: Schema = BAGGY, seed: int = 0) -> Batch:
    """Bags of zero to three ids with some padding, in single fields too."""
    rng = np.random.default_rng(seed)
    rows: list[int] = []
    lengths = []
    for number in range(SAMPLES * schema.num_fields):
        field = schema.fields[number % schema.num_fields]
        lengths.append(int(rng.integers(4)) if field.bag else 1)
        first, last = schema.first_rows[field.table : field.table + 2]
        drawn = rng.integers(first, last, lengths[-1])
        rows += [PADDING if rng.random() < 0.15 else int(row) for row in drawn]
    return Batch(
        np.array(rows, np.int64),
        np.cumsum([0, *lengths]).astype(np.int64),
        rng.standard_normal((SAMPLES, len(schema.dense))).astype(np.float32),
        (rng.random(SAMPLES) < 0.5).astype(np.float32),
        schema.num_fields,
    )


def samples_of(batch: Batch, schema: Schema, dtype: torch.dtype = torch.float32) -> Samples:
    """The samples of a batch; global row ids become ids within tables."""
    first_F = schema.first_rows[[field.table for field in schema.fields]]
    first_L = np.repeat(np.tile(first_F, len(batch)), np.diff(batch.offsets))
    ids = np.where(batch.rows == PADDING, PADDING, batch.rows - first_L)
    dense, label = (torch.tensor(part, dtype=dtype) for part in (batch.dense, batch.label))
    offsets = torch.tensor(batch.offsets)
    return Samples(dense, label, torch.tensor(ids), offsets, batch.num_fields)


def tables_of(model: nn.Module) -> FieldEmbeddings:
    return cast(FieldEmbeddings, model.embeddings)


def model_of(
    name: str, schema: Schema, dim: int | tuple[int, ...], options: ModelOptions = SMALL
) -> nn.Module:
    """A model in float64 whose rows are large enough for every term to matter."""
    model = make_model(name, schema, dim, options).double()
    with torch.no_grad():
        for weight in tables_of(model).parameters():
            weight.mul_(1 / NORM)
    return model


def rows_of(embeddings: FieldEmbeddings, batch: Batch, sample: int) -> list[F64]:
    """The rows of each field's bag, without padding."""
    out = []
    for number, field in enumerate(embeddings.schema.fields):
        bag = sample * batch.num_fields + number
        rows = batch.rows[batch.offsets[bag] : batch.offsets[bag + 1]]
        ids = [row - embeddings.schema.first_rows[field.table] for row in rows if row != PADDING]
        out.append(array(embeddings.tables[field.table].weight)[ids])
    return out


def pooled(embeddings: FieldEmbeddings, batch: Batch, sample: int) -> list[F64]:
    """The sum or mean of each field's rows, row by row."""
    bags = rows_of(embeddings, batch, sample)
    if embeddings.mode == "mean":
        return [bag.sum(0) / max(1, len(bag)) for bag in bags]
    return [bag.sum(0) for bag in bags]


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "no-dense"])
@pytest.mark.parametrize("dim", [4, (4, 2, 3)], ids=["equal", "mixed"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_its_formula(
    name: str, mode: str, dim: int | tuple[int, ...], dense: bool
) -> None:
    schema = BAGGY if dense else replace(BAGGY, dense=())
    batch = baggy_batch(schema)
    model = model_of(name, schema, dim, replace(SMALL, mode=mode))
    logits = model(samples_of(batch, schema, torch.float64))
    look_up = rows_of if name in UNPOOLED else pooled
    records = [look_up(tables_of(model), batch, s) for s in range(SAMPLES)]
    dense_SD = batch.dense.astype(float)
    expected = [REFERENCES[name](model, records[s], dense_SD[s]) for s in range(SAMPLES)]
    assert logits.shape == (SAMPLES,)
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-10, atol=1e-12)
    assert np.std(expected) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name: str) -> None:
    schema = Schema(TABLES[:2], FIELDS[:2], ("a",))
    rows = np.array([[s % 7, 7 + s % 11] for s in range(40)])
    rng = np.random.default_rng(1)
    batch = one_hot(rows, rng.random((40, 1), np.float32))
    if name in UNPOOLED:
        schema = replace(schema, fields=FIELDS[:3])
        batch = with_bags(batch, [(rng.integers(7, 18, 80), np.full(40, 2))])
    samples = samples_of(batch, schema, torch.float64)
    model = model_of(name, schema, (4, 3))
    model(samples).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key
    for weight in tables_of(model).parameters():
        assert weight.grad is not None
        assert (weight.grad.abs().sum(0) > 0).all(), "a column of the records is not used"


def test_ncf_reads_the_first_two_fields_only() -> None:
    samples = samples_of(baggy_batch(), BAGGY, torch.float64)
    model = model_of("ncf", BAGGY, 4)
    model(samples).sum().backward()
    used = [weight.grad is not None for weight in tables_of(model).parameters()]
    assert used == [True, True, False]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hidden", [(), (5,)])
def test_models_accept_empty_batches_and_few_layers(name: str, hidden: tuple[int, ...]) -> None:
    model = make_model(name, BAGGY, 4, ModelOptions(hidden=hidden))
    assert model(samples_of(baggy_batch(), BAGGY)).shape == (SAMPLES,)
    assert model(samples_of(baggy_batch().slice(0, 0), BAGGY)).shape == (0,)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"ncf", *UNPOOLED}))
def test_models_accept_one_field(name: str) -> None:
    schema = Schema(TABLES[:1], FIELDS[:1], ("a",))
    batch = one_hot(np.array([[3], [6]]), np.ones((2, 1), np.float32))
    assert make_model(name, schema, 4, SMALL)(samples_of(batch, schema)).shape == (2,)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("sum", [[[4, 40], [2, 20]], [[0, 0], [0, 0]]]), ("mean", [[[2, 20]] * 2, [[0, 0]] * 2])],
)
def test_padding_counts_in_no_pooled_embedding(mode: str, expected: list[list[list[int]]]) -> None:
    schema = Schema((Table("t", 3),), (Field("f", 0, bag=True), Field("g", 0, bag=True)))
    rows = np.array([0, PADDING, 2, 1, PADDING, PADDING])  # 0 - 2 | 1 || empty | - -
    none = np.zeros((2, 0), np.float32)
    samples = samples_of(Batch(rows, np.array([0, 3, 4, 4, 6]), none, none[0], 2), schema)
    embeddings = FieldEmbeddings(schema, (2,), mode)
    with torch.no_grad():
        next(embeddings.parameters())[:] = torch.tensor([[1.0, 10], [2, 20], [3, 30]])
    assert embeddings.stacked(samples).tolist() == expected


class Elsewhere(nn.Module):
    """Embeddings looked up before; it has only the three methods of the tables."""

    def __init__(self, plain: FieldEmbeddings, samples: Samples) -> None:
        super().__init__()
        self.records: list[Tensor] = plain(samples)
        self.bags = [plain.unpooled(samples, field) for field in range(samples.num_fields)]

    def forward(self, samples: Samples) -> list[Tensor]:
        return self.records

    def stacked(self, samples: Samples) -> Tensor:
        return torch.stack(self.records, 1)

    def unpooled(self, samples: Samples, field: int) -> tuple[Tensor, Tensor]:
        return self.bags[field]


@pytest.mark.parametrize("dim", [4, (4, 2, 3)], ids=["equal", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_models_accept_records_looked_up_elsewhere(name: str, dim: int | tuple[int, ...]) -> None:
    samples = samples_of(baggy_batch(), BAGGY)
    model = make_model(name, BAGGY, dim, SMALL)
    expected = model(samples)
    model.embeddings = Elsewhere(tables_of(model), samples)
    assert torch.equal(model(replace(samples, ids=samples.ids[:0])), expected)


def test_field_embeddings_have_the_width_of_their_table() -> None:
    embeddings = FieldEmbeddings(BAGGY, (4, 2, 3))
    shapes = [tuple(field.shape) for field in embeddings(samples_of(baggy_batch(), BAGGY))]
    assert shapes == [(SAMPLES, width) for width in (4, 2, 2, 3)]
    assert embeddings.field_widths == (4, 2, 2, 3)


def test_samples_hold_ids_within_their_table() -> None:
    schema = Schema(TABLES, (Field("p", 2), Field("u", 0)), ("a",))
    batch = one_hot(np.array([[18, 3], [PADDING, 0]]), np.ones((2, 1), np.float32))
    batch.rows.flags.writeable = False
    samples = samples_of(batch, schema)
    assert samples.ids.tolist() == [0, 3, PADDING, 0]
    assert samples.offsets.tolist() == [0, 1, 2, 3, 4]
    assert (len(samples), len(samples.label), samples.dense.dtype) == (2, 0, torch.float32)


def dense_layers(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {key: value for key, value in state.items() if not key.startswith("embeddings.")}


@pytest.mark.parametrize("name", MODELS)
def test_seed_fixes_the_model_and_keeps_the_torch_generator(name: str) -> None:
    before = torch.random.get_rng_state()
    one = make_model(name, BAGGY, (4, 2, 3), SMALL).state_dict()
    torch.rand(5)
    two = make_model(name, BAGGY, (4, 2, 3), SMALL).state_dict()
    torch.random.set_rng_state(before)
    other = make_model(name, BAGGY, (4, 2, 3), replace(SMALL, seed=4)).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", MODELS)
def test_meta_tables_take_no_memory_and_change_no_dense_layer(name: str) -> None:
    huge = replace(BAGGY, tables=tuple(replace(table, num_rows=2**40) for table in TABLES))
    model = make_model(name, huge, 4, replace(SMALL, table_device="meta"))
    assert all(weight.is_meta for weight in tables_of(model).parameters())
    layers, same = dense_layers(model), dense_layers(make_model(name, BAGGY, 4, SMALL))
    assert all(torch.equal(layers[key], same.pop(key)) for key in layers)
    assert not same


def test_models_state_the_record_width_of_each_table() -> None:
    widths = {name: table_widths(name, BAGGY, (8, 4, 2)) for name in MODELS}
    assert widths == {
        "wide-deep": (9, 5, 3),
        "deepfm": (9, 5, 3),
        "dcn": (8, 4, 2),
        "dlrm": (8, 4, 2),
        "ncf": (16, 8, 4),
        "wide-deep-het": (8, 4, 2),
        "din": (8, 4, 2),
        "graphsage": (8, 4, 2),
    }
    assert table_widths("deepfm", BAGGY, 8) == (9, 9, 9)


@pytest.mark.parametrize("name", marked_full(MODELS, ["deepfm", "dlrm"]))
def test_training_lowers_the_loss_of_every_model(name: str) -> None:
    preset = LOG_PRESETS["criteo-kaggle"]
    laws = tuple(replace(law, num_rows=min(law.num_rows, 200)) for law in preset.fields[:8])
    knobs = replace(preset.knobs, samples=2048, click_rate=0.5)
    source: Source = SyntheticSource(replace(preset, fields=laws), knobs)
    if name in UNPOOLED:
        source = open_source("online-retail(negatives=1, history=5)", DataOptions(limit=2048))
    samples = samples_of(next(source.chunks()), source.schema)
    model = make_model(name, source.schema, 4, SMALL)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        loss = nn.functional.binary_cross_entropy_with_logits(model(samples), samples.label)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.03


ONE = Schema(TABLES[:1], FIELDS[:1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: table_widths("lstm", BAGGY, 4), "--model must be one of wide-deep, deepfm, dcn, "),
        (lambda: make_model("lstm", BAGGY, 4, SMALL), "got 'lstm'"),
        (lambda: make_model("dcn", BAGGY, 0, SMALL), "--dim must be at least 1, got 0"),
        (lambda: make_model("dcn", BAGGY, (4, 0, 2), SMALL), "--dim must be at least 1, got 0"),
        (lambda: make_model("dcn", BAGGY, (4, 2), SMALL), "--dim names 2 widths, .* 3 tables"),
        (lambda: make_model("ncf", ONE, 4, SMALL), "ncf needs two fields, .* has 1"),
        (lambda: make_model("dlrm", ONE, 4, SMALL), "dlrm needs two fields, or dense columns"),
        (lambda: make_model("din", ONE, 4, SMALL), "din needs a bag of ids.* --bag"),
        (lambda: make_model("graphsage", ONE, 4, SMALL), "graphsage needs two fields .* edges"),
        (lambda: make_model("dcn", BAGGY, 4, ModelOptions(mode="max")), "mode .* got 'max'"),
        (lambda: ModelOptions(hidden=(8, 0)), r"hidden .* got \(8, 0\)"),
        (lambda: FieldEmbeddings(BAGGY, (4, 4)), "2 widths for 3 tables"),
        (lambda: fill(FieldEmbeddings(ONE, (4,), device="meta"), 0), "table 'user' .* meta"),
    ],
)
def test_models_refuse_bad_options(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
