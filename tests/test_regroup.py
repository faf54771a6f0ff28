"""Hot and cold batches: every sample once, pure batches, the schedule, and bounded reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embroute.config.cluster_file import open_cluster
from embroute.config.spec import Size
from embroute.data.batch import PADDING, Batch, one_hot
from embroute.data.schema import Field, Schema, Table
from embroute.planner.plan_stream import start
from embroute.planner.setup import Setup
from embroute.planner.state import State
from embroute.policies.catalog import make_policy
from embroute.policies.regroup import (
    HotRows,
    SwapSchedule,
    by_count,
    by_theory,
    hot_room,
    hot_samples,
    learn_loss,
    regroup,
)

NUM_ROWS = 10


def schema_of(*rows: int) -> Schema:
    tables = tuple(Table(f"t{i}", count) for i, count in enumerate(rows))
    return Schema(tables, tuple(Field(table.name, i) for i, table in enumerate(tables)))


def state_with(hot: set[int], batch_size: int) -> State:
    """A state that replicates the given rows."""
    setup = Setup(schema_of(NUM_ROWS), open_cluster("dc-2"), 4, batch_size, cache=Size(1, "share"))
    state = start(make_policy("fae"), setup, np.ones(NUM_ROWS, np.int64))
    state.memory(HotRows).hot_R[:] = np.isin(np.arange(NUM_ROWS), list(hot))
    return state


def numbered(rows_SF: npt.NDArray[np.int64], first: int = 0) -> Batch:
    """A batch whose dense column numbers the samples."""
    numbers = np.arange(first, first + len(rows_SF), dtype=np.float32)
    return one_hot(rows_SF, numbers.reshape(-1, 1), numbers % 2)


def cut(rows_SF: npt.NDArray[np.int64], size: int) -> list[Batch]:
    return [numbered(rows_SF[i : i + size], i) for i in range(0, len(rows_SF), size)]


def numbers(batches: list[Batch]) -> list[int]:
    return [int(number) for batch in batches for number in batch.dense[:, 0]]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[npt.NDArray[np.int64], State, SwapSchedule]:
    samples, fields = draw(st.integers(0, 60)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    rows_SF = random.integers(-1, NUM_ROWS, (samples, fields))
    hot = draw(st.sampled_from([set(), {0}, set(range(5)), set(range(9)), set(range(NUM_ROWS))]))
    schedule = SwapSchedule(
        draw(st.sampled_from([1.0, 7.0, 100 / 3, 50.0, 60.0, 100.0])),
        draw(st.integers(2, 6)),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )
    return rows_SF, state_with(hot, draw(st.integers(1, 9))), schedule


@given(workloads())
def test_regrouping_keeps_every_sample_in_pure_batches(
    workload: tuple[npt.NDArray[np.int64], State, SwapSchedule],
) -> None:
    rows_SF, state, schedule = workload
    size = state.setup.batch_size
    out = list(regroup(iter(cut(rows_SF, size)), state, schedule))
    assert sorted(numbers(out)) == list(range(len(rows_SF)))
    hot_R = state.memory(HotRows).hot_R
    for batch in out:
        assert 0 < len(batch) <= size
        sample_rows = rows_SF[batch.dense[:, 0].astype(int)]
        assert (batch.rows.reshape(sample_rows.shape) == sample_rows).all()
        assert (batch.label == batch.dense[:, 0] % 2).all()
        hot_S = (hot_R[sample_rows] | (sample_rows == PADDING)).all(1)
        assert hot_S.all() if batch.hot else not hot_S.any()
    # Only the last batch of each kind may be short.
    for kind in (False, True):
        assert all(len(batch) == size for batch in [b for b in out if b.hot == kind][:-1])


@given(workloads())
def test_regrouping_keeps_the_order_of_each_kind(
    workload: tuple[npt.NDArray[np.int64], State, SwapSchedule],
) -> None:
    rows_SF, state, schedule = workload
    batches = cut(rows_SF, state.setup.batch_size)
    plain = list(regroup(iter(batches), state, replace(schedule, shuffle=False)))
    for kind in (False, True):
        order = numbers([batch for batch in plain if batch.hot == kind])
        assert order == sorted(order)


def test_shuffled_regrouping_follows_the_seed() -> None:
    rows_SF = np.random.default_rng(0).integers(0, NUM_ROWS, (64, 1))
    state = state_with(set(range(5)), 8)

    def order(seed: int) -> list[int]:
        return numbers(list(regroup(iter(cut(rows_SF, 8)), state, SwapSchedule(50, 8, True, seed))))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(64))


def marks(batches: Iterator[Batch]) -> str:
    return "".join("H" if batch.hot else "c" for batch in batches)


def order_of(samples: str, epoch: int, schedule: SwapSchedule) -> str:
    """Regrouped batches of one sample each; an epoch has `epoch` batches, 0: unknown."""
    rows_SF = np.array([[0 if letter == "H" else 9] for letter in samples])
    state = state_with({0}, 1)
    state.setup = replace(state.setup, epoch_batches=epoch)
    return marks(regroup(iter(cut(rows_SF, 1)), state, schedule))


@pytest.mark.parametrize(
    ("samples", "epoch", "rate", "expected"),
    [
        ("HcHcHcHc", 8, 100, "ccccHHHH"),
        ("HcHcHcHc", 8, 50, "ccHHccHH"),
        ("HcHcHcHc", 8, 25, "cHcHcHcH"),
        ("HccHccHc", 8, 50, "ccHHcccH"),
        ("HHHHHHHH", 8, 50, "HHHHHHHH"),
        ("", 8, 50, ""),
        ("HcHcHcHcHc", 10, 30, "cHHccHcHHc"),  # rounds of 3, 3, 3 and 1
        ("HcHcHcHc", 4, 100, "ccHHccHH"),  # two epochs
        ("HcHcHcHc", 0, 50, "ccccHHHH"),  # of unknown length: half a buffer of 16 batches
    ],
)
def test_epoch_is_trained_in_rounds_of_cold_and_hot_batches(
    samples: str, epoch: int, rate: float, expected: str
) -> None:
    assert order_of(samples, epoch, SwapSchedule(rate, 16)) == expected


def test_buffer_bounds_the_rounds_of_a_long_epoch() -> None:
    assert order_of("HcHcHcHc", 100, SwapSchedule(50, 4)) == "ccHHccHH"


def test_samples_stay_in_their_epoch() -> None:
    # Batches of 4, epochs of 2 batches with 5 cold and 3 hot samples.
    rows_SF = np.array([[9], [9], [0], [9], [9], [0], [9], [0]] * 2)
    state = state_with({0}, 4)
    state.setup = replace(state.setup, epoch_batches=2)
    out = list(regroup(iter(cut(rows_SF, 4)), state, SwapSchedule(100, 16)))
    assert marks(iter(out)) == "ccHccH"
    assert sorted(numbers(out[:3])) == list(range(8))


def losses_heard(*losses: float) -> list[float]:
    """The rate of the next round after each evaluation."""
    state, rates = state_with(set(), 1), []
    for loss in losses:
        learn_loss(state, loss)
        rates.append(float(state.memory(HotRows).next_rate[0]))
    return rates


def test_rate_halves_when_the_held_out_loss_rises() -> None:
    assert losses_heard(0.5, 0.6, 0.7, 0.7) == [50, 25, 12.5, 12.5]
    assert losses_heard(*range(1, 12))[-1] == 1


def test_rate_doubles_after_four_falls_in_a_row() -> None:
    # The first loss falls from infinity.
    assert losses_heard(9, 8, 7, 6, 5, 4, 3, 2, 1) == [50, 50, 50, 100, 100, 100, 100, 100, 100]
    assert losses_heard(9, 10, 8, 7, 6, 6, 5, 4, 3, 2)[-2:] == [25, 50]


def test_adaptive_rate_counts_from_the_next_round_and_is_recorded() -> None:
    schedule, state = SwapSchedule("auto", 100), state_with({0}, 1)
    state.setup = replace(state.setup, epoch_batches=16)
    rows_SF = np.tile([[0], [9]], (8, 1))
    stream = regroup(iter(cut(rows_SF, 1)), state, schedule)
    first = [next(stream) for _ in range(8)]
    learn_loss(state, 1.0)
    learn_loss(state, 2.0)
    rest = list(stream)
    assert marks(iter([*first, *rest])) == "ccccHHHH" + "ccHHccHH"
    assert state.memory(HotRows).rate_N[:4].tolist() == [50, 25, 25, 0]
    # A resumed run learns no old losses; it cuts the recorded rounds.
    state.memory(HotRows).next_rate[0] = 100
    again = list(regroup(iter(cut(rows_SF, 1)), state, schedule))
    assert numbers(again) == numbers([*first, *rest])


@pytest.mark.parametrize(("row", "expected"), [(0, "HHHHH"), (9, "ccccc")])
def test_regrouping_accepts_only_hot_or_only_cold_samples(row: int, expected: str) -> None:
    rows_SF = np.full((9, 1), row)
    out = list(regroup(iter(cut(rows_SF, 2)), state_with({0}, 2), SwapSchedule(50, 2)))
    assert marks(iter(out)) == expected
    assert [len(batch) for batch in out] == [2, 2, 2, 2, 1]


def test_regrouping_buffer_bounds_reading_ahead() -> None:
    consumed = 0
    rows_SF = np.tile([[9], [0]], (100, 1))

    def stream() -> Iterator[Batch]:
        nonlocal consumed
        for batch in cut(rows_SF, 4):
            consumed += 1
            yield batch

    produced = 0
    for batch in regroup(stream(), state_with({0}, 4), SwapSchedule(50, 5)):
        produced += len(batch)
        # A round and the batch after it are read; less than one batch of each kind is left over.
        assert 4 * consumed - produced <= 4 * (3 + 1) + 2 * 3
    assert produced == 200
    assert consumed == 50


def test_padding_does_not_make_a_sample_cold() -> None:
    rows_SF = np.array([[0, PADDING], [PADDING, PADDING], [0, 9], [9, 0]])
    hot_R = np.isin(np.arange(NUM_ROWS), [0])
    assert hot_samples(one_hot(rows_SF), hot_R).tolist() == [True, True, False, False]


def test_sample_is_hot_only_with_all_rows_of_its_bags() -> None:
    # Bags [0, 1], [], [0, 9], and one more field with one id each.
    batch = Batch(
        np.array([0, 1, 0, 0, 0, 9, 0]),
        np.array([0, 2, 3, 3, 4, 6, 7]),
        np.zeros((3, 0), np.float32),
        np.zeros(0, np.float32),
        2,
    )
    hot_R = np.isin(np.arange(NUM_ROWS), [0, 1])
    assert hot_samples(batch, hot_R).tolist() == [True, True, False]


def test_room_of_hot_rows_follows_the_option_and_the_cache() -> None:
    tables, cache = schema_of(1000, 3000), Size(0.5, "share")
    setup = Setup(tables, open_cluster("dc-2"), (4, 8), batch_size=400, cache=cache)
    assert hot_room(setup, Size(0.1, "share")).slots_A.tolist() == [100, 300]
    assert hot_room(setup, Size(40, "rows")).slots_A.tolist() == [10, 30]
    assert hot_room(setup, Size(1120, "bytes")).slots_A.tolist() == [10, 30]
    # Caches of 500 and 1500 rows, of which a cold batch needs 200; but half is always free.
    assert hot_room(setup, None).slots_A.tolist() == [300, 1300]
    assert hot_room(replace(setup, batch_size=800), None).slots_A.tolist() == [250, 1100]
    assert hot_room(setup, None).budget_bytes == 256e6
    fault = "hot=0.6: 2400 replicated rows do not fit the cache of 2000 rows per worker"
    with pytest.raises(ValueError, match=fault):
        hot_room(setup, Size(0.6, "share"))


def test_fae_budget_in_bytes_bounds_the_hot_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of 16 bytes; the one table is above 1 MB.
    monkeypatch.setattr("embroute.policies.regroup.FAE_BUDGET_BYTES", 5 * 16)
    setup = Setup(schema_of(300_000), open_cluster("dc-2"), 4, 8, cache=Size(1, "share"))
    counts_R = np.zeros(300_000, np.int64)
    counts_R[[7, 100, 9, 4]] = [8, 5, 5, 3]
    assert by_count(None)(counts_R, setup).tolist() == [4, 7, 9, 100]
    counts_R[[5, 6]] = [3, 4]
    assert by_count(None)(counts_R, setup).tolist() == [4, 6, 7, 9, 100]


def test_small_table_that_does_not_fit_whole_competes_by_counts() -> None:
    setup = Setup(schema_of(10, 100), open_cluster("dc-2"), 4, 8, cache=Size(20, "rows"))
    counts_R = np.zeros(110, np.int64)
    counts_R[[50, 60]] = [2, 1]
    assert by_count(Size(8, "rows"))(counts_R, setup).tolist() == [50, 60]


def test_fae_hot_set_takes_small_tables_then_the_most_used_rows() -> None:
    # The second table is 300,000 rows of 4 floats, above 1 MB.
    setup = Setup(schema_of(4, 300_000), open_cluster("dc-2"), 4, cache=Size(20, "rows"))
    counts_R = np.zeros(300_004, np.int64)
    counts_R[[100, 7, 50_000, 9]] = [3, 8, 5, 1]
    assert by_count(Size(6, "rows"))(counts_R, setup).tolist() == [0, 1, 2, 3, 7, 50_000]
    assert by_count(Size(20, "rows"))(counts_R, setup).tolist() == [0, 1, 2, 3, 7, 9, 100, 50_000]


def test_scars_hot_set_takes_the_most_used_rows() -> None:
    setup = Setup(schema_of(4, 96), open_cluster("dc-2"), 4, 8, cache=Size(50, "rows"))
    counts_R = np.zeros(100, np.int64)
    counts_R[[2, 70, 9]] = [5, 9, 7]
    assert by_theory(Size(2, "rows"))(counts_R, setup).tolist() == [9, 70]
    chosen = by_theory(None)(counts_R, setup)
    assert len(chosen) <= 25
    assert (counts_R[chosen] > 0).all()
