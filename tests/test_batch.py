"""Batch operations against lists of samples in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embroute.data.batch import PADDING, ArraySource, Batch, concat, one_hot
from embroute.data.schema import Field, Schema, Table

Sample = tuple[list[list[int]], list[float], float]  # bags by field, dense columns, label
FIELDS, DENSE = 3, 2

bags = st.lists(st.integers(PADDING, 50), max_size=4)
numbers = st.floats(-4, 4, width=32)
samples = st.lists(
    st.tuples(
        st.lists(bags, min_size=FIELDS, max_size=FIELDS),
        st.lists(numbers, min_size=DENSE, max_size=DENSE),
        st.sampled_from([0.0, 1.0]),
    ),
    max_size=8,
)


def to_batch(data: list[Sample], labelled: bool = True) -> Batch:
    """Samples as flat arrays."""
    flat = [bag for sample in data for bag in sample[0]]
    return Batch(
        np.array([row for bag in flat for row in bag], np.int64),
        np.cumsum([0, *map(len, flat)]),
        np.array([sample[1] for sample in data], np.float32).reshape(len(data), DENSE),
        np.array([sample[2] for sample in data] if labelled else [], np.float32),
        FIELDS,
    )


def to_samples(batch: Batch) -> list[Sample]:
    """Samples from flat arrays; the label of unlabelled samples is 0."""
    found = []
    for s in range(len(batch)):
        at = [batch.offsets[s * FIELDS + f : s * FIELDS + f + 2] for f in range(FIELDS)]
        label = float(batch.label[s]) if len(batch.label) else 0.0
        rows = [batch.rows[start:stop].tolist() for start, stop in at]
        found.append((rows, batch.dense[s].tolist(), label))
    return found


@given(samples)
def test_batch_holds_its_samples(data: list[Sample]) -> None:
    batch = to_batch(data)
    assert len(batch) == len(data)
    assert to_samples(batch) == data
    for s, sample in enumerate(data):
        start, stop = batch.sample_offsets[s : s + 2]
        assert batch.rows[start:stop].tolist() == [row for bag in sample[0] for row in bag]


@given(samples.filter(bool), st.data())
def test_take_selects_samples_in_order(data: list[Sample], draw: st.DataObject) -> None:
    order = draw.draw(st.lists(st.integers(0, len(data) - 1), max_size=10))
    taken = to_batch(data).take(np.array(order, np.intp))
    assert to_samples(taken) == [data[s] for s in order]


@given(samples, st.integers(0, 8), st.integers(0, 10))
def test_slice_selects_samples_without_copying_rows(
    data: list[Sample], start: int, length: int
) -> None:
    start = min(start, len(data))
    batch = to_batch(data)
    part = batch.slice(start, start + length)
    assert to_samples(part) == data[start : start + length]
    assert part.offsets[0] == 0
    assert not len(part.rows) or np.shares_memory(part.rows, batch.rows)


@given(st.lists(samples, min_size=1, max_size=4))
def test_concat_joins_samples_in_order(parts: list[list[Sample]]) -> None:
    joined = concat([to_batch(part) for part in parts])
    assert to_samples(joined) == [sample for part in parts for sample in part]


def test_unlabelled_batches_stay_unlabelled() -> None:
    batch = to_batch([([[1], [2, 3], []], [0.5, 1.0], 0.0)] * 4, labelled=False)
    for part in (batch.slice(1, 3), batch.take(np.array([2, 0])), concat([batch, batch])):
        assert len(part.label) == 0


def test_one_hot_makes_one_id_per_field() -> None:
    batch = one_hot(np.array([[1, 5], [PADDING, 6]]))
    assert len(batch) == 2
    assert batch.rows.tolist() == [1, 5, PADDING, 6]
    assert batch.offsets.tolist() == [0, 1, 2, 3, 4]
    assert batch.dense.shape == (2, 0)


@pytest.mark.parametrize("chunk_samples", [1, 3, 7, 100])
def test_array_source_starts_over_at_every_pass(chunk_samples: int) -> None:
    batch = one_hot(np.arange(14).reshape(7, 2))
    schema = Schema((Table("t", 14),), (Field("a", 0), Field("b", 0)))
    source = ArraySource(schema, batch, chunk_samples)
    assert source.num_samples == 7
    for _ in range(2):
        chunks = list(source.chunks())
        assert max(len(chunk) for chunk in chunks) <= chunk_samples
        assert concat(chunks).rows.tolist() == list(range(14))
