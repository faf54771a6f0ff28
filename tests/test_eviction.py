"""Eviction orders agree with cachetools and with references of a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cachetools import Cache, LFUCache, LRUCache
from hypothesis import given, settings
from hypothesis import strategies as st

from embroute.config.spec import Size
from embroute.data.schema import Field, Schema, Table
from embroute.kernels.codes import NEVER
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from tests.sizes import sized
from tests.workloads import Workload, make_batch, star

ROWS = 12
Event = tuple[int, int]  # the missing row and the row that left for it, or -1
Steps = list[list[int]]

few = settings(max_examples=sized(15, 40))
# The low rows more often, so that counts differ.
rows = st.tuples(st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)).map(min)
traces = st.lists(rows, min_size=1, max_size=150)
batches = st.lists(st.lists(rows, min_size=1, max_size=4), min_size=1, max_size=40)


def events(name: str, steps: Steps, capacity: int) -> list[list[Event]]:
    """Misses of each step with their victims, one worker, `capacity` slots."""
    schema = Schema((Table("t", ROWS),), (Field("f", 0, bag=True),), ("sample",), labelled=True)
    setup = Setup(schema, star(1), 4, 1, cache=Size(capacity / ROWS, "share"))
    policy, work = make_policy(name), Workload(setup, tuple(make_batch([[s]]) for s in steps))
    found = []
    for step in work.plans(policy, work.start(policy)):
        plan = step.plan
        rows_T = plan.rows.rows_U[plan.touches.unique_T].tolist()
        missing = set(plan.pulls.row.tolist())
        pairs = zip(rows_T, plan.placement.victim_T.tolist(), strict=True)
        found.append([(row, victim) for row, victim in pairs if row in missing])
    return found


def mixed(order: str) -> str:
    return f"dispatch=block sync=on-demand evict={order}"


def in_cachetools(cache: Cache[int, bool], trace: list[int]) -> Iterator[list[Event]]:
    """The misses and victims of a cachetools cache with one row a step."""
    for row in trace:
        if row in cache:
            _ = cache[row]
            yield []
            continue
        held = set(cache)
        cache[row] = True
        gone = held - set(cache)
        yield [(row, gone.pop() if gone else -1)]


@pytest.mark.parametrize(("order", "cache"), [("lru", LRUCache), ("lfu", LFUCache)])
@given(trace=traces, capacity=st.integers(1, 6))
@few
def test_lru_and_lfu_equal_cachetools(
    order: str, cache: Callable[[int], Cache[int, bool]], trace: list[int], capacity: int
) -> None:
    """Hits and victims are equal; among equal counts both evict the row touched longest ago."""
    mine = events(mixed(order), [[row] for row in trace], capacity)
    assert mine == list(in_cachetools(cache(capacity), trace))


Rank = Callable[[int, int], tuple[int, ...]]  # row, step -> the lowest leaves first


def reference(steps: Steps, capacity: int, rank: Callable[[History], Rank]) -> list[list[Event]]:
    """Victims by rank among the cached rows that this step does not use."""
    history = History()
    found = []
    for step, wanted in enumerate(steps):
        distinct = list(dict.fromkeys(wanted))
        before = set(history.touched)
        out = []
        for row in distinct:
            if row in before:
                continue
            victim = -1
            if len(history.touched) == capacity:
                idle = [held for held in history.touched if held not in distinct]
                victim = min(idle, key=lambda held: rank(history)(held, step))
                history.leave(victim)
            history.touched[row] = (-1, 0)
            out.append((row, victim))
        for place, row in enumerate(distinct):
            history.touched[row] = (step, place)
            history.count[row] = history.count.get(row, 0) + 1
        found.append(out)
    return found


class History:
    """Cached rows with their last touch (step, place in it), and their touches since they came."""

    def __init__(self) -> None:
        self.touched: dict[int, tuple[int, int]] = {}
        self.count: dict[int, int] = {}

    def leave(self, row: int) -> None:
        del self.touched[row]
        del self.count[row]


def by_recency(history: History) -> Rank:
    return lambda row, step: history.touched[row]


def by_frequency(history: History) -> Rank:
    return lambda row, step: (history.count[row], *history.touched[row])


def by_ten_buckets(history: History) -> Rank:
    return lambda row, step: (min(history.count[row], 10), *history.touched[row])


@pytest.mark.parametrize(
    ("order", "rank"),
    [("lru", by_recency), ("lfu", by_frequency), ("light-lfu", by_ten_buckets)],
)
@given(steps=batches, spare=st.integers(0, 5))
@few
def test_eviction_orders_equal_a_reference_with_several_rows_a_step(
    order: str, rank: Callable[[History], Rank], steps: Steps, spare: int
) -> None:
    capacity = min(ROWS, max(len(set(step)) for step in steps) + spare)
    assert events(mixed(order), steps, capacity) == reference(steps, capacity, rank)


def test_light_lfu_stops_counting_at_ten() -> None:
    """Rows 0 and 1 reach ten. A newcomer below ten leaves first; of the rows at ten, the row
    touched longest ago."""
    steps = [[0]] * 30 + [[1]] * 10 + [[2]] * 9 + [[3], [0, 3], [4, 5]]
    found = events(mixed("light-lfu"), steps, 3)
    assert found[49] == [(3, 2)]  # row 2 had nine
    assert found[51] == [(4, 3), (5, 1)]  # row 3 had two; then row 1, though row 0 came earlier
    # Plain LFU tells thirty-one from ten.
    assert events(mixed("lfu"), steps, 3)[51] == [(4, 3), (5, 1)]


def next_use(steps: Steps, row: int, step: int, sight: int) -> int:
    """The first step from `step` on, within sight, that uses a row."""
    coming = range(step, min(len(steps), step + sight + 1))
    return next((later for later in coming if row in steps[later]), NEVER)


@given(
    trace=st.lists(rows, min_size=40, max_size=80),
    capacity=st.integers(1, 6),
    lookahead=st.integers(1, 12),
)
@few
def test_clairvoyant_is_belady_within_its_window(
    trace: list[int], capacity: int, lookahead: int
) -> None:
    """Rows without a use in sight leave first, oldest first; then the row with the farthest next
    use."""
    steps = [[row] for row in trace]

    def rank(history: History) -> Rank:
        return lambda row, step: (
            -next_use(steps, row, step, lookahead),
            *history.touched[row],
        )

    assert events(mixed(f"clairvoyant({lookahead})"), steps, capacity) == reference(
        steps, capacity, rank
    )


def test_clairvoyant_sees_the_next_step() -> None:
    """Row 0 is needed in step 3, row 1 never again: with a window of one batch, 1 leaves."""
    assert events(mixed("clairvoyant(1)"), [[0], [1], [2], [0]], 2)[2] == [(2, 1)]


def test_clairvoyant_ignores_a_longer_window_of_the_sync() -> None:
    """A sync that looks ten steps ahead does not change the victim: row 1, used in step 7."""
    steps = [[0], [1], [2], [0], [2], [2], [2], [1]]
    name = "dispatch=block sync=until-last-use(10) evict=clairvoyant(3)"
    assert events(name, steps, 2)[2] == [(2, 1)]


@given(steps=batches, spare=st.integers(0, 4), lookahead=st.integers(2, 12))
@few
def test_clairvoyant_evicts_the_rows_needed_latest(
    steps: Steps, spare: int, lookahead: int
) -> None:
    """With several rows a step, no kept idle row is needed later than an evicted row."""
    capacity = min(ROWS, max(len(set(step)) for step in steps) + spare)
    held: set[int] = set()
    for step, misses in enumerate(events(mixed(f"clairvoyant({lookahead})"), steps, capacity)):
        gone = {victim for _, victim in misses if victim >= 0}
        idle = held - gone - set(steps[step])
        needed = [next_use(steps, row, step, lookahead - 1) for row in idle]
        leaving = [next_use(steps, row, step, lookahead - 1) for row in gone]
        assert not needed or not leaving or min(leaving) >= max(needed)
        held = (held - gone) | set(steps[step])
