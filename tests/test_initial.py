"""Initial rows: their formula, and that any rank computes the same bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embroute.data.schema import Field, Schema, Table
from embroute.models.initial_rows import NORM, fill, initial_rows
from embroute.models.layers import FieldEmbeddings


def rows_of_table(seed: int, table: int, ids: npt.ArrayLike, width: int) -> npt.NDArray[np.float64]:
    numbers = np.asarray(ids, np.int64)
    return initial_rows(seed, np.full(len(numbers), table), numbers, width)


def splitmix(key: int) -> int:
    key = (key + 0x9E3779B97F4A7C15) % 2**64
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB % 2**64
    return key ^ (key >> 31)


@given(st.integers(0, 2**31), st.integers(0, 300), st.integers(0, 2**31), st.integers(1, 5))
def test_initial_row_is_a_sum_of_four_hash_pieces(seed: int, table: int, row: int, w: int) -> None:
    own = splitmix((splitmix((splitmix(seed) + table) % 2**64) + row) % 2**64)
    words = [splitmix((own + column) % 2**64) for column in range(w)]
    sums = np.array([sum(word >> 16 * i & 0xFFFF for i in range(4)) for word in words])
    deviation = 2 * np.sqrt((2**32 - 1) / 12)
    expected = (sums - 2 * (2**16 - 1)) * (NORM / np.sqrt(w) / deviation)
    found = rows_of_table(seed, table, [row], w)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_initial_row_does_not_depend_on_the_other_rows() -> None:
    whole = rows_of_table(5, 2, np.arange(5000), 6)
    some = np.array([4999, 0, 17, 17])
    np.testing.assert_array_equal(rows_of_table(5, 2, some, 6), whole[some])
    assert rows_of_table(5, 2, [], 6).shape == (0, 6)


def test_initial_rows_differ_by_seed_table_and_row() -> None:
    whole = rows_of_table(5, 2, np.arange(8000), 16)
    others = [rows_of_table(6, 2, np.arange(7999), 16), rows_of_table(5, 3, np.arange(7999), 16)]
    related = np.corrcoef(np.column_stack([whole[:-1], whole[1:], *others]).T) - np.eye(64)
    assert np.abs(related).max() < 0.06
    assert whole.std() == pytest.approx(NORM / 4, rel=0.02)
    assert abs(whole.mean()) < 0.001


def test_fill_gives_tables_their_initial_rows() -> None:
    schema = Schema((Table("a", 10), Table("b", 70_000)), (Field("f", 0), Field("g", 1)))
    embeddings = FieldEmbeddings(schema, (2, 3)).double()
    fill(embeddings, 7)
    for table, (rows, width) in enumerate([(10, 2), (70_000, 3)]):
        expected = rows_of_table(7, table, np.arange(rows), width)
        weight = embeddings.weights[table]
        np.testing.assert_array_equal(weight.detach().numpy(), expected)
