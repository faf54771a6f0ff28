"""The shipped real trace has the published contents, and its features do not reveal labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import embroute.data
from embroute.config.spec import parse_call
from embroute.data.batch import Batch, concat
from embroute.data.online_retail import NUM_LINES, SIZES, RetailSource, open_retail

pytestmark = pytest.mark.xdist_group("retail")

FOLDER = Path(embroute.data.__file__).parent / "retail"


@pytest.fixture(scope="module")
def trace() -> Batch:
    return concat(list(RetailSource().chunks()))


@pytest.fixture(scope="module")
def labelled() -> Batch:
    return concat(list(open_retail(parse_call("online-retail(negatives=2, seed=7)")).chunks()))


def ids(batch: Batch) -> npt.NDArray[np.int64]:
    """Ids within the tables, samples x fields."""
    return batch.rows.reshape(-1, 5) - RetailSource().schema.first_rows[:-1]


def test_retail_files_are_small_and_attributed() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000
    readme = (FOLDER / "README.md").read_text()
    assert "Daqing Chen" in readme
    assert "CC BY 4.0" in readme
    assert "10.24432/C5BW33" in readme


def test_retail_trace_has_the_published_counts(trace: Batch) -> None:
    source = open_retail(parse_call("online-retail"))
    assert len(trace) == NUM_LINES == source.num_samples == 541_909
    assert source.schema.num_rows == 38_605
    assert not source.schema.labelled
    assert [len(np.unique(column)) for column in ids(trace).T] == list(SIZES)


def test_retail_ids_are_numbered_by_first_appearance(trace: Batch) -> None:
    for column in ids(trace).T:
        seen = np.maximum.accumulate(column)
        assert seen[0] == 0
        assert np.diff(seen).max() == 1


def test_retail_dense_columns_are_signed_logs(trace: Batch) -> None:
    # The first line: six pieces at 2.55 pounds. The extremes are an order of 80,995 and its return.
    np.testing.assert_allclose(trace.dense[0], np.log1p([6, 2.55]), rtol=1e-6)
    np.testing.assert_allclose(trace.dense[:, 0].max(), np.log1p(80_995), rtol=1e-6)
    np.testing.assert_allclose(trace.dense[:, 0].min(), -np.log1p(80_995), rtol=1e-6)


def test_each_retail_line_comes_with_its_negatives(trace: Batch, labelled: Batch) -> None:
    assert len(labelled) == 3 * NUM_LINES
    assert (labelled.label.reshape(-1, 3).sum(1) == 1).all()
    rows = labelled.rows.reshape(-1, 3, 5)
    lines = trace.rows.reshape(-1, 5)
    np.testing.assert_array_equal(rows[labelled.label.reshape(-1, 3) == 1], lines)
    for same in (0, 2, 3):  # invoice, customer, country
        np.testing.assert_array_equal(rows[:, :, same], np.repeat(lines[:, same, None], 3, axis=1))


@pytest.mark.parametrize("negatives", [1, 2, 3])
def test_sample_number_does_not_reveal_the_label(negatives: int) -> None:
    """In round-robin over any number of workers, each worker has the same share of labels."""
    label = next(RetailSource(negatives).chunks()).label
    for workers in range(2, 9):
        shares = [float(label[w::workers].mean()) for w in range(workers)]
        np.testing.assert_allclose(shares, 1 / (1 + negatives), atol=0.03)


def test_retail_negatives_are_items_sold_before(trace: Batch, labelled: Batch) -> None:
    line_ids = ids(trace)
    item = line_ids[:, 1] * SIZES[4] + line_ids[:, 4]
    sold, first = np.unique(item, return_index=True)
    drawn_ids = ids(labelled)[labelled.label == 0].reshape(-1, 2, 5)
    drawn = drawn_ids[..., 1] * SIZES[4] + drawn_ids[..., 4]
    place = np.searchsorted(sold, drawn)
    np.testing.assert_array_equal(sold[place], drawn)
    late = np.arange(NUM_LINES) >= 2000
    assert (first[place][late] < np.arange(NUM_LINES)[late, None]).all()


def test_retail_dense_columns_do_not_reveal_the_label(labelled: Batch) -> None:
    assert labelled.dense.shape[1] == 1
    price = labelled.dense[:, 0]
    real, drawn = price[labelled.label == 1], price[labelled.label == 0]
    edges = np.quantile(real, np.linspace(0, 1, 21))
    shares = [np.histogram(prices, edges)[0] / len(prices) for prices in (real, drawn)]
    assert np.abs(shares[0] - shares[1]).sum() / 2 < 0.1


def test_seed_decides_the_retail_negatives(labelled: Batch) -> None:
    again, other = (next(RetailSource(2, seed).chunks()) for seed in (7, 8))
    np.testing.assert_array_equal(again.rows, labelled.rows[: len(again.rows)])
    assert (again.rows != other.rows).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("online-retail(negatives=-1)", "negatives must be between"),
        ("online-retail(negatives=1.5)", "negatives must be a whole number"),
        ("online-retail(size=3)", "has no option 'size'"),
    ],
)
def test_bad_retail_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_retail(parse_call(text))
