"""Streams of batches: exact sizes, every sample once an epoch, seeded orders, bounded reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embroute.data.batch import ArraySource, Batch, one_hot
from embroute.data.schema import Field, Schema, Table
from embroute.data.stream import batches


def source(samples: int, chunk: int = 5, bags: bool = False) -> ArraySource:
    """Sample s has label s, dense s and only row s: once a field, or in a bag of s % 3."""
    number = np.arange(samples, dtype=np.int64)
    schema = Schema(
        (Table("t", max(1, samples)),), (Field("a", 0), Field("b", 0, bags)), ("d",), labelled=True
    )
    label = number.astype(np.float32)
    if not bags:
        rows = np.stack([number, number], axis=1)
        return ArraySource(schema, one_hot(rows, label[:, None], label), chunk)
    lengths = np.stack([np.ones_like(number), number % 3], axis=1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.repeat(number, lengths.sum(axis=1))
    return ArraySource(schema, Batch(rows, offsets, label[:, None], label, 2), chunk)


def order(stream: Iterator[Batch]) -> list[int]:
    """The numbers of the samples in stream order; the parts of a sample must belong together."""
    found: list[int] = []
    for batch in stream:
        numbers = batch.label.astype(int).tolist()
        assert batch.dense[:, 0].tolist() == batch.label.tolist()
        for s, number in enumerate(numbers):
            start, stop = batch.sample_offsets[s : s + 2]
            assert set(batch.rows[start:stop].tolist()) == {number}
        found += numbers
    return found


sizes = st.integers(1, 40)
anything = st.tuples(sizes, sizes, sizes, st.booleans())  # samples, chunk, batch, bags


@given(anything, st.integers(1, 3))
def test_batches_come_in_order(shape: tuple[int, int, int, bool], epochs: int) -> None:
    samples, chunk, size, bags = shape
    stream = list(batches(source(samples, chunk, bags), size, epochs=epochs))
    assert order(iter(stream)) == list(range(samples)) * epochs
    last = samples % size or size
    of_an_epoch = [size] * ((samples - 1) // size) + [last]
    assert [len(batch) for batch in stream] == of_an_epoch * epochs


@given(anything, st.integers(2, 50), st.integers(0, 3))
def test_shuffled_epochs_hold_every_sample_once(
    shape: tuple[int, int, int, bool], buffer: int, seed: int
) -> None:
    samples, chunk, size, bags = shape
    data = source(samples, chunk, bags)
    found = order(batches(data, size, epochs=2, shuffle=buffer, seed=seed))
    assert sorted(found[:samples]) == sorted(found[samples:]) == list(range(samples))
    assert found == order(batches(data, size, epochs=2, shuffle=buffer, seed=seed))


def test_shuffled_order_differs_by_epoch_and_seed() -> None:
    data = source(200)
    first = order(batches(data, 8, epochs=2, shuffle=True, seed=1))
    assert first[:200] != first[200:]
    assert first[:200] != list(range(200))
    assert first != order(batches(data, 8, epochs=2, shuffle=True, seed=2))


def test_shuffle_buffer_of_the_source_size_permutes_all_samples() -> None:
    found = order(batches(source(300, chunk=7), 10, shuffle=300, seed=3))
    assert found == np.random.default_rng([3, 0]).permutation(300).tolist()


def test_shuffled_order_does_not_depend_on_the_batch_size() -> None:
    data = source(300)
    assert order(batches(data, 7, shuffle=50)) == order(batches(data, 64, shuffle=50))


def test_drop_last_drops_short_batches() -> None:
    stream = list(batches(source(10), 4, epochs=2, drop_last=True))
    assert [len(batch) for batch in stream] == [4, 4, 4, 4]


@pytest.mark.parametrize("epochs", [0, None])
def test_endless_epochs_repeat_the_data(epochs: int | None) -> None:
    assert order(islice(batches(source(3), 2, epochs=epochs), 6)) == [0, 1, 2] * 3


@dataclass
class Counting:
    """A source of a billion samples that counts the chunks read from it."""

    schema: Schema
    num_samples: int | None = None
    read: list[int] = field(default_factory=list)

    def chunks(self) -> Iterator[Batch]:
        for number in range(10**7):
            self.read.append(number)
            yield one_hot(np.zeros((100, 1), np.int64))


@pytest.mark.parametrize(("shuffle", "most"), [(False, 6), (2000, 26)])
def test_stream_bounds_reading_ahead(shuffle: bool | int, most: int) -> None:
    counting = Counting(Schema((Table("t", 1),), (Field("a", 0),)))
    assert len(list(islice(batches(counting, 50, shuffle=shuffle), 10))) == 10
    assert len(counting.read) <= most


def test_bad_stream_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        batches(source(3), 0)
    with pytest.raises(ValueError, match="epochs must be at least 0, got -1"):
        batches(source(3), 1, epochs=-1)
    with pytest.raises(ValueError, match="shuffle must be"):
        batches(source(3), 1, shuffle=-1)
    with pytest.raises(ValueError, match="endless epochs"):
        next(batches(source(3), 4, epochs=0, drop_last=True))
