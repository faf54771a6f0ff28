"""Kernels equal the two NumPy lines that define them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from embroute.engine.transfer_kernels import (
    RowLocator,
    arena_index,
    locate,
    name_gradients,
    number_touches,
    renumber,
)
from embroute.kernels import codes
from embroute.kernels.array_types import I32, U8
from embroute.kernels.distinct import distinct, number_distinct
from embroute.kernels.memory import nonzero
from embroute.kernels.rows import Bags, merge, pool, pool_backward
from embroute.kernels.touches import Lookups, Touches, group, touches
from embroute.planner.kernels.cache import (
    Cells,
    Placement,
    classify_needs,
    find_copies,
    row_numbers,
    sole_holders,
    touch_cells,
    victim_cells,
)
from embroute.planner.kernels.transfers import Transfers, empty_counts, tally
from embroute.policies.sync.decision import touch_modes
from embroute.policies.sync.on_demand import copies_to_return
from tests.sizes import sized

few = settings(max_examples=sized(40, 150))
seeds = st.integers(0, 2**32 - 1)


def draw_touches(seed: int) -> tuple[Lookups, I32, Touches, int, list[int]]:
    """Random lookups on random workers: the input and the result of `touches`."""
    rng = np.random.default_rng(seed)
    workers, unique, samples = (int(rng.integers(1, high)) for high in (6, 15, 12))
    lengths = rng.integers(0, 5, samples)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    lookups = Lookups(rng.integers(-1, unique, offsets[-1]).astype(np.int32), offsets)
    worker_S = rng.integers(0, workers, samples).astype(np.int32)
    everywhere = rng.permutation(unique)[: rng.integers(0, 3)].astype(np.int32)
    made = touches(lookups, worker_S, workers, unique, everywhere)
    return lookups, worker_S, made, workers, everywhere.tolist()


def draw_cells(rng: np.random.Generator, rows: int, workers: int) -> I32:
    """Copies in slots of their own, some fresh, some dirty, some missing."""
    slots = rng.permutation(rows * workers).reshape(rows, workers) + 1
    bits = rng.choice([0, codes.FRESH, codes.DIRTY, codes.FRESH | codes.DIRTY], (rows, workers))
    held = rng.random((rows, workers)) < 0.7
    return np.where(held, slots | bits, 0).astype(np.int32)


@given(st.lists(st.integers(-1, 2**40), max_size=60) | st.lists(st.integers(-1, 9), max_size=60))
@few
def test_distinct_equals_its_numpy_twin(rows: list[int]) -> None:
    lookups = np.array(rows, np.int64)
    table = np.zeros(1 << max(4, (2 * len(rows)).bit_length()), np.int32)
    rows_U, unique = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32)
    count = distinct(lookups, table, rows_U, unique)
    expected = list(dict.fromkeys(row for row in rows if row >= 0))
    assert rows_U[:count].tolist() == expected
    assert unique.tolist() == [expected.index(row) if row >= 0 else -1 for row in rows]


@given(st.lists(st.lists(st.integers(-1, 9), max_size=30), max_size=4))
@few
def test_number_distinct_equals_its_numpy_twin(batches: list[list[int]]) -> None:
    seen, uses, base = np.zeros(10, np.int64), dict[int, int](), 0
    for rows in batches:
        unique = np.empty(len(rows), np.int32)
        rows_U, last_U = number_distinct(seen, np.array(rows, np.int64), base, unique)
        expected = list(dict.fromkeys(row for row in rows if row >= 0))
        assert rows_U.tolist() == expected
        assert unique.tolist() == [expected.index(row) if row >= 0 else -1 for row in rows]
        assert last_U.tolist() == [uses.get(row, -1) for row in expected]
        uses |= {row: base + u for u, row in enumerate(expected)}
        base += len(expected)


@given(st.lists(st.integers(0, 6), max_size=50))
@few
def test_group_equals_its_numpy_twin(keys: list[int]) -> None:
    key = np.array(keys, np.int32)
    first, order = group(key, 7)
    assert first.tolist() == [0, *np.cumsum(np.bincount(key, minlength=7)).tolist()]
    assert order.tolist() == np.argsort(key, kind="stable").tolist()


@given(seeds)
@few
def test_touches_equals_its_numpy_twin(seed: int) -> None:
    lookups, worker_S, made, workers, everywhere = draw_touches(seed)
    order = np.argsort(worker_S, kind="stable")
    assert made.sample_order_S.tolist() == order.tolist()
    expected: list[tuple[int, int]] = []
    of_lookup: list[int] = []
    for worker in range(workers):
        mine = [s for s in order if worker_S[s] == worker]
        bounds = lookups.sample_offsets
        used = [int(u) for s in mine for u in lookups.unique_of_lookup[bounds[s] : bounds[s + 1]]]
        rows = list(dict.fromkeys([u for u in used if u >= 0] + everywhere))
        of_lookup += [len(expected) + rows.index(u) if u >= 0 else -1 for u in used]
        expected += [(worker, u) for u in rows]
        assert made.first_W[worker + 1] == len(expected)
    pairs = zip(made.worker_T.tolist(), made.unique_T.tolist(), strict=True)
    assert list(pairs) == expected
    assert made.touch_of_lookup.tolist() == of_lookup
    by_row = np.argsort(made.unique_T, kind="stable")
    assert made.of_row_T.tolist() == by_row.tolist()
    assert made.first_U[0] == 0
    assert (
        np.diff(made.first_U).tolist()
        == np.bincount(made.unique_T, minlength=len(made.first_U) - 1).tolist()
    )


@given(seeds)
@few
def test_find_copies_equals_its_numpy_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cell_NW = draw_cells(rng, 21, int(rng.integers(1, 6)))
    cell_NW[0] = 0
    number_R = (rng.permutation(30) % 21).astype(np.int32)
    rows_U = rng.permutation(30)[: rng.integers(0, 30)]
    cells = Cells(number_R, cell_NW, np.array([20]))
    assert np.array_equal(row_numbers(cells, rows_U), number_R[rows_U])
    found = find_copies(cells, rows_U)
    assert np.array_equal(found.number_U, number_R[rows_U])
    assert np.array_equal(found.copies_UW, cell_NW[number_R[rows_U]])
    assert np.array_equal(found.only_U, sole_holders(found.copies_UW))


@given(seeds)
@few
def test_sole_holders_equals_its_numpy_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cell_UW = draw_cells(rng, 20, int(rng.integers(1, 6)))
    has_UW = (cell_UW & (codes.FRESH | codes.DIRTY)) != 0
    named = {0: lambda row: codes.NO_HOLDER, 1: lambda row: int(row.argmax())}
    expected = [named.get(row.sum(), lambda row: codes.SEVERAL)(row) for row in has_UW]
    assert sole_holders(cell_UW).tolist() == expected


@given(seeds, st.sampled_from([codes.FRESH, codes.DIRTY]))
@few
def test_classify_needs_equals_its_numpy_twin(seed: int, bit: int) -> None:
    _, _, made, workers, _ = draw_touches(seed)
    copies_UW = draw_cells(np.random.default_rng(seed), len(made.first_U) - 1, workers)
    cells_T = copies_UW[made.unique_T, made.worker_T]
    arena_U = np.arange(len(copies_UW), dtype=np.uint8)
    cell_T, arena_T = touch_cells(made, copies_UW, arena_U)
    assert cell_T.tolist() == cells_T.tolist()
    assert arena_T.tolist() == made.unique_T.tolist()
    held_T = np.where(cells_T == 0, codes.MISS, codes.STALE)
    expected = np.where(cells_T & bit, codes.HIT, held_T)
    assert classify_needs(cells_T, bit).tolist() == expected.tolist()


@given(st.lists(st.booleans(), max_size=40))
@few
def test_nonzero_equals_its_numpy_twin(chosen: list[bool]) -> None:
    assert nonzero(np.array(chosen, np.bool_)).tolist() == np.flatnonzero(chosen).tolist()


@given(seeds)
@few
def test_victim_cells_equals_its_numpy_twin(seed: int) -> None:
    _, _, made, workers, _ = draw_touches(seed)
    rng = np.random.default_rng(seed)
    cells = Cells(
        rng.integers(0, 9, 20).astype(np.int32), draw_cells(rng, 9, workers), np.array([8])
    )
    victim_T = rng.integers(-1, 20, len(made.unique_T))
    placement = Placement(np.zeros(len(victim_T), np.int32), victim_T, np.full(2, -1))
    chosen = nonzero(victim_T >= 0)
    expected = cells.cell_NW[cells.number_R[victim_T[chosen]], made.worker_T[chosen]]
    assert victim_cells(cells, made, placement, chosen).tolist() == expected.tolist()


@given(seeds)
@few
def test_touch_modes_equals_its_numpy_twin(seed: int) -> None:
    _, _, made, _, _ = draw_touches(seed)
    touchers_T = np.bincount(made.unique_T)[made.unique_T] if len(made.unique_T) else np.empty(0)
    expected = np.where(touchers_T == 1, codes.EXCLUSIVE, codes.SHARED)
    assert touch_modes(made).tolist() == expected.tolist()


@given(seeds)
@few
def test_copies_to_return_equals_its_numpy_twin(seed: int) -> None:
    _, _, made, workers, _ = draw_touches(seed)
    copies_UW = draw_cells(np.random.default_rng(seed), len(made.first_U) - 1, workers)
    pairs = set(zip(made.worker_T.tolist(), made.unique_T.tolist(), strict=True))
    expected = [
        (w, u)
        for u, w in np.argwhere(copies_UW & codes.DIRTY).tolist()
        if any(row == u and toucher != w for toucher, row in pairs)
    ]
    worker, unique = copies_to_return(made, copies_UW, sole_holders(copies_UW))
    assert list(zip(worker.tolist(), unique.tolist(), strict=True)) == expected


@given(seeds)
@few
def test_tally_equals_its_numpy_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workers, shards, count = (int(rng.integers(1, high)) for high in (5, 4, 40))

    def column(high: int) -> U8:
        return rng.integers(0, high, count).astype(np.uint8)

    sizes = rng.integers(1, 100, (codes.NUM_RECORDS, 3))
    moves = Transfers(
        rng.integers(0, workers, count).astype(np.int32),
        rng.integers(0, 50, count),
        rng.integers(0, 50, count).astype(np.int32),
        column(3),
        column(codes.NUM_KINDS),
        column(codes.NUM_RECORDS),
        column(codes.NUM_PHASES),
    )
    rows, sizes_moved = empty_counts(workers, shards), empty_counts(workers, shards)
    rows[0, 0, 0, 0] = 7  # counts are added to what is there
    tally(moves, sizes, rows, sizes_moved)
    at = (moves.worker, moves.row % shards, moves.kind, moves.phase)
    expected, expected_bytes = empty_counts(workers, shards), empty_counts(workers, shards)
    expected[0, 0, 0, 0] = 7
    np.add.at(expected, at, 1)
    np.add.at(expected_bytes, at, sizes[moves.record, moves.arena])
    assert np.array_equal(rows, expected)
    assert np.array_equal(sizes_moved, expected_bytes)


@few
@given(seeds)
def test_locate_equals_its_numpy_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards, sizes = int(rng.integers(1, 5)), rng.integers(1, 9, rng.integers(1, 6))
    first_T, rows = np.concatenate([[0], np.cumsum(sizes)]), np.arange(sizes.sum())
    rng.shuffle(rows)
    before_KT = rng.integers(0, 99, (shards, len(sizes)))
    table = np.searchsorted(first_T, rows, side="right") - 1
    expected = before_KT[rows % shards, table] + (rows - first_T[table]) // shards
    shift = int(rng.integers(0, 4))
    guess_G = np.searchsorted(first_T, np.arange(0, len(rows) + 1, 1 << shift), side="right") - 1
    spots = RowLocator(
        first_T, before_KT, guess_G.astype(np.int32), shift, np.zeros((1, 1), np.int64)
    )
    np.testing.assert_array_equal(locate(rows, spots), expected)
    arena_N, first_KA = rng.integers(0, 3, len(rows), np.uint8), rng.integers(0, 99, (shards, 3))
    expected += first_KA[rows % shards, arena_N]
    np.testing.assert_array_equal(arena_index(rows, arena_N, spots, first_KA), expected)


@few
@given(seeds)
def test_number_touches_equals_its_numpy_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workers, arenas, count = (int(rng.integers(1, high)) for high in (5, 4, 40))
    worker_T, slot_T = (rng.integers(0, n, count).astype(np.int32) for n in (workers, 99))
    arena_T, mode_T = (rng.integers(0, n, count).astype(np.uint8) for n in (arenas, 4))
    first_slot_WA = rng.integers(0, 50, (workers, arenas))
    first, number_T, slots = number_touches(worker_T, arena_T, mode_T, slot_T, first_slot_WA)
    box_T = (worker_T * arenas + arena_T) * 2 + ~np.isin(mode_T, (codes.EXCLUSIVE, codes.LOCAL))
    order = np.argsort(box_T, kind="stable")
    np.testing.assert_array_equal(first, np.searchsorted(box_T[order], range(len(first))))
    np.testing.assert_array_equal(number_T[order] + first[box_T[order] & ~1], np.arange(count))
    np.testing.assert_array_equal(slots, (slot_T - first_slot_WA[worker_T, arena_T])[order])


@few
@given(seeds, st.booleans())
def test_pool_and_pool_backward_equal_their_numpy_twins(seed: int, mean: bool) -> None:
    rng = np.random.default_rng(seed)
    samples, fields, rows, width = (int(rng.integers(1, high)) for high in (6, 4, 9, 5))
    touched = int(rng.integers(0, rows + 1))
    first, last = sorted(rng.choice(fields + 1, 2, replace=False).tolist())
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, samples * fields))])
    touch_L = rng.integers(-1, touched, offsets[-1]).astype(np.int32)
    bags = Bags(touch_L, offsets.astype(np.int64), fields, first, last, mean)
    records, slot_T = rng.standard_normal((rows, width + 2)), rng.permutation(rows)[:touched]
    chosen = [s * fields + f for s in range(samples) for f in range(first, last)]
    of_bag = [touch_L[offsets[b] : offsets[b + 1]] for b in chosen]
    real = [own[own >= 0] for own in of_bag]
    share = [1 / max(1, len(own)) if mean else 1.0 for own in real]
    pooled = np.empty((len(chosen), width))
    pool(records, slot_T.astype(np.int32), bags, pooled)
    expected = [records[slot_T[own], :width].sum(0) * s for own, s in zip(real, share, strict=True)]
    np.testing.assert_allclose(pooled, expected, rtol=1e-14, atol=1e-14)
    grad, found, summed = rng.standard_normal(pooled.shape), *np.zeros((2, touched, width))
    pool_backward(grad, bags, found)
    for own, row, s in zip(real, grad, share, strict=True):
        np.add.at(summed, own, row * s)
    np.testing.assert_allclose(found, summed, rtol=1e-14, atol=1e-14)


@given(seeds)
@few
def test_merge_equals_its_numpy_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = [rng.integers(0, 9, int(rng.integers(0, 6))).astype(np.int32) for _ in range(4)]
    rows = [rng.standard_normal((len(own), 3)) for own in blocks]
    place, count = np.full(9, -1, np.int32), 0
    distinct, sums = np.empty(20, np.int64), np.empty((20, 3))
    for own, values in zip(blocks, rows, strict=True):
        count = merge(own, values, place, distinct, sums, count)
    expected = np.zeros((9, 3))
    np.add.at(expected, np.concatenate(blocks), np.concatenate(rows))
    order = list(dict.fromkeys(np.concatenate(blocks).tolist()))
    assert distinct[:count].tolist() == order
    assert place[order].tolist() == list(range(count))
    assert (place >= 0).sum() == count
    np.testing.assert_allclose(sums[:count], expected[order], rtol=1e-14, atol=1e-14)


@given(seeds)
@few
def test_renumber_equals_its_numpy_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    number, touch = rng.permutation(9).astype(np.int32), rng.integers(-1, 9, 20).astype(np.int32)
    assert renumber(number, touch).tolist() == np.where(touch < 0, -1, number[touch]).tolist()


@given(seeds)
@few
def test_name_gradients_equals_its_numpy_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    push = rng.choice([codes.NOTHING, codes.GRADIENT, codes.DELTA], 12).astype(np.uint8)
    number, slot = rng.permutation(12).astype(np.int32), np.arange(100, 112, dtype=np.int32)
    pushed = push != codes.NOTHING
    out = np.concatenate([np.array([7, 7], np.int32), slot[pushed]])
    name_gradients(push, number, out)
    expected = np.where(push == codes.GRADIENT, number, slot)[pushed]
    assert out.tolist() == [7, 7, *expected.tolist()]
