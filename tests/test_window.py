"""Windows equal a plain computation over lists of batches."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from embroute.data.batch import PADDING
from embroute.data.window import Horizon, Window
from embroute.kernels.codes import NEVER
from tests.sizes import sized
from tests.workloads import make_batch

ROWS = 30
Steps = list[list[int]]  # look-ups of each batch

lookups = st.lists(st.integers(PADDING, ROWS - 1), max_size=25)
steps = st.lists(lookups, min_size=1, max_size=30)
few = settings(max_examples=sized(25, 100))


def windows(data: Steps, lookahead: int) -> Iterator[Window]:
    """Windows as the planner uses them: filled before every step."""
    horizon = Horizon(ROWS, lookahead)
    for batch in data:
        if horizon.full:
            yield horizon.pop()
        horizon.push(make_batch([[batch]]))
    while not horizon.empty:
        yield horizon.pop()


def distinct(batch: list[int]) -> list[int]:
    return list(dict.fromkeys(row for row in batch if row >= 0))


def uses(data: Steps, row: int) -> list[int]:
    return [step for step, batch in enumerate(data) if row in batch]


@given(steps, st.integers(1, 8))
@few
def test_window_lists_distinct_rows_in_lookup_order(data: Steps, lookahead: int) -> None:
    for step, window in enumerate(windows(data, lookahead)):
        now = window.now
        assert window.step == now.step == step
        assert now.rows_U.tolist() == distinct(data[step])
        found = [int(now.rows_U[u]) if u >= 0 else PADDING for u in now.unique_of_lookup]
        assert found == data[step]


@given(steps, st.integers(1, 8))
@few
def test_window_holds_the_next_batches(data: Steps, lookahead: int) -> None:
    seen = list(windows(data, lookahead))
    assert len(seen) == len(data)
    for step, window in enumerate(seen):
        coming = range(step + 1, min(len(data), step + 1 + lookahead))
        assert [ahead.step for ahead in window.ahead] == list(coming)
        for ahead in window.ahead:
            assert ahead.rows_U.tolist() == distinct(data[ahead.step])


@given(steps, st.integers(1, 8))
@few
def test_window_later_is_the_next_use_in_sight(data: Steps, lookahead: int) -> None:
    for step, window in enumerate(windows(data, lookahead)):
        for row, later in zip(window.now.rows_U, window.now.later_U, strict=True):
            coming = [use for use in uses(data, row) if step < use <= step + lookahead]
            assert later == (coming[0] if coming else NEVER)


@given(steps, st.integers(1, 8))
@few
def test_window_before_is_the_last_use_the_horizon_remembers(data: Steps, lookahead: int) -> None:
    """A batch enters after the window of the step `lookahead + 1` before it. The horizon
    remembers two popped steps, so the step before is always known."""
    for step, window in enumerate(windows(data, lookahead)):
        oldest = step - lookahead - 2
        for row, before in zip(window.now.rows_U, window.now.before_U, strict=True):
            earlier = [use for use in uses(data, row) if oldest <= use < step]
            assert before == (earlier[-1] if earlier else -1)
            assert (before == step - 1) == (step > 0 and row in data[step - 1]) or step == 0


@given(st.integers(1, 6), st.integers(1, 5))
@few
def test_horizon_ring_grows_without_losing_uses(lookahead: int, growth: int) -> None:
    """Each batch is larger and repeats all rows of the batch before: every use is linked."""
    data = [list(range(min(ROWS, 1 + growth * step))) for step in range(30)]
    for step, window in enumerate(windows(data, lookahead)):
        before = [step - 1 if step and row in data[step - 1] else -1 for row in data[step]]
        later = [step + 1 if step + 1 < len(data) else NEVER for _ in data[step]]
        assert window.now.before_U.tolist() == before
        assert window.now.later_U.tolist() == later


@given(st.lists(lookups, min_size=200, max_size=220), st.integers(1, 4))
@settings(few, max_examples=5)
def test_horizon_ring_wraps_around_many_times(data: Steps, lookahead: int) -> None:
    for step, window in enumerate(windows(data, lookahead)):
        for row, later in zip(window.now.rows_U, window.now.later_U, strict=True):
            coming = (use for use in range(step + 1, min(len(data), step + lookahead + 1)))
            assert later == next((use for use in coming if row in data[use]), NEVER)
