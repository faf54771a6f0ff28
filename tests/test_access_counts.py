"""Samples of a data set from which hot rows are chosen: uniform, and the same for every reader."""

from __future__ import annotations

import numpy as np
import pytest

from embroute.data.access_counts import Calibration, count_lookups, count_source
from embroute.data.batch import ArraySource, Batch, one_hot
from embroute.data.open import open_source
from embroute.data.schema import Field, Schema, Table

SAMPLES = 40_000


def numbered_source(chunk_samples: int) -> ArraySource:
    """Sample s looks up row s and nothing else."""
    schema = Schema((Table("t", SAMPLES),), (Field("t", 0),))
    return ArraySource(schema, one_hot(np.arange(SAMPLES).reshape(-1, 1)), chunk_samples)


def test_sample_is_uniform_over_the_whole_data() -> None:
    counts_R = count_source(numbered_source(1000), Calibration(0.05, seed=3))
    assert set(counts_R) == {0, 1}
    by_tenth = counts_R.reshape(10, -1).sum(1)
    # 200 samples of each tenth, give or take four standard deviations.
    assert (np.abs(by_tenth - 200) < 4 * np.sqrt(200 * 0.95)).all()


def test_sample_does_not_depend_on_chunks() -> None:
    counts = [count_source(numbered_source(size), Calibration(0.1)) for size in (7, 1000, SAMPLES)]
    assert (counts[0] == counts[1]).all()
    assert (counts[0] == counts[2]).all()


def test_sample_follows_the_seed_and_the_share() -> None:
    source = numbered_source(1000)
    first = count_source(source, Calibration(0.05, seed=0))
    assert (first != count_source(source, Calibration(0.05, seed=1))).any()
    # A larger share only adds samples.
    assert (count_source(source, Calibration(0.2, seed=0)) >= first).all()
    assert (count_source(source, Calibration(1.0)) == 1).all()


def test_padding_is_not_counted() -> None:
    batch = one_hot(np.array([[0, -1], [-1, -1], [2, 2]]))
    assert count_lookups([batch], 3, Calibration(1.0)).tolist() == [1, 0, 2]


def test_large_synthetic_data_is_sampled_from_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = open_source("criteo-kaggle(samples=10000000)"), []

    def chunk(self: object, number: int) -> Batch:
        read.append(number)
        return one_hot(np.full((32_768, 26), number))

    monkeypatch.setattr(type(source), "chunk", chunk)
    counts_R = count_source(source, Calibration(0.05))
    assert len(set(read)) == len(read) == 64
    assert min(read) < 30
    assert max(read) > 275
    assert counts_R.sum() / 26 == pytest.approx(500_000, rel=0.02)


def test_few_chunks_of_synthetic_data_are_all_sampled() -> None:
    source = open_source("avazu(samples=70000)")
    whole = [count_source(source, Calibration(share)).sum() / 22 for share in (1.0, 0.05)]
    assert whole[0] == 70_000
    assert whole[1] == pytest.approx(3500, rel=0.1)
