"""The cost of sets of workers over a window: predicted changes equal the real changes."""

from __future__ import annotations

import numpy as np
import pytest

from embroute.policies.embroute.anneal import (
    GUMBEL,
    GroupSweep,
    Heat,
    Loads,
    samples_by_use,
    set_sample_costs,
    sweep_groups,
    sweep_samples,
)
from embroute.policies.embroute.search import move_sample, repair, swap_round
from embroute.policies.embroute.uses import (
    AFTER,
    ALONE,
    CHUNK,
    COSTS,
    OWNER,
    PRICE_CLASS,
    PULL,
    SHARE,
    SIZE,
    SUM,
    TAIL,
    Nodes,
    Uses,
    collect_uses,
)

ROWS, BATCH, BATCHES, FIELDS = 12, 10, 3, 4


def window(seed: int, workers: int) -> Uses:
    """Three batches of ten samples over twelve rows, most of them used in every batch."""
    random = np.random.default_rng(seed)
    node = random.integers(0, ROWS, (BATCHES * BATCH, FIELDS)).astype(np.int32)
    node += np.repeat(np.arange(BATCHES), BATCH)[:, None] * ROWS
    used = np.bincount(node.ravel(), minlength=BATCHES * ROWS) > 0
    before = np.arange(BATCHES * ROWS) - ROWS
    before[(before < 0) | ~used | ~used[before] | (random.random(len(before)) < 0.2)] = -1
    owner = random.integers(-1, workers, len(before)).astype(np.int32)
    arena = random.integers(0, 2, len(before)).astype(np.uint8)
    tail = random.random(len(before)).astype(np.float32)
    price = np.zeros((3, 2, -(-workers // CHUNK) * CHUNK), np.float32)
    price[ALONE, :, :workers] = random.integers(2, 30, (2, workers))
    price[SHARE, :, :workers] = random.integers(2, 30, (2, workers))
    price[PULL] = price[SHARE] / 2
    dealt = random.integers(0, workers, len(node)).astype(np.int32)
    nodes = Nodes(before.astype(np.int32), owner, arena, tail)
    first = np.arange(len(node) + 1) * FIELDS
    return collect_uses(nodes, node.ravel(), first, dealt, price)[0]


def loads_of(uses: Uses, workers: int) -> Loads:
    loads = uses.worker_S.reshape(BATCHES, BATCH)
    counts = np.array([np.bincount(row, minlength=workers) for row in loads], np.int32)
    quota = np.diff(np.arange(workers + 1) * BATCH // workers).astype(np.int32)
    first = np.arange(BATCHES + 1) * BATCH
    return Loads(first, counts, np.tile(quota, (BATCHES, 1)), np.zeros(counts.shape, np.float32))


def total(uses: Uses) -> float:
    """Cost of the window with every sample where it is, by the table in `uses`."""
    use_KF, price_PCV = uses.use_KF, uses.price_PCV
    uses_K = np.arange(len(use_KF))
    touched_KV = use_KF[:, COSTS + 2 * price_PCV.shape[2] :] > 0
    alone_K, class_K, owner_K = use_KF[:, SIZE] == 1, use_KF[:, PRICE_CLASS], use_KF[:, OWNER]
    price_KV = np.where(alone_K[:, None], price_PCV[ALONE, class_K], price_PCV[SHARE, class_K])
    spared_KV = np.where(alone_K[:, None], price_PCV[ALONE, class_K], price_PCV[PULL, class_K])
    owned_K = (owner_K >= 0) & touched_KV[uses_K, owner_K]
    kept_K = alone_K & (use_KF[:, AFTER] < 0)
    only_K = np.where(alone_K, use_KF[:, SUM], 0)
    tail_K = uses.cost_KF[:, TAIL] * price_PCV[ALONE, class_K, only_K]
    linear = uses.linear_SV[np.arange(len(uses.worker_S)), uses.worker_S].sum()
    spared = spared_KV[uses_K, owner_K][owned_K].sum() + tail_K[kept_K].sum()
    return float(linear + price_KV[touched_KV].sum() - spared)


@pytest.mark.parametrize("workers", [2, 3, 8, 9])
@pytest.mark.parametrize("seed", range(5))
def test_predicted_cost_of_a_move_is_exact(seed: int, workers: int) -> None:
    uses, random = window(seed, workers), np.random.default_rng(seed)
    for _ in range(100):
        s, goes = int(random.integers(len(uses.worker_S))), int(random.integers(workers))
        here, before = uses.worker_S[s], total(uses)
        added = np.empty(uses.price_PCV.shape[2], np.float32)
        set_sample_costs(uses, s, added)
        move_sample(uses, s, goes)
        assert total(uses) - before == pytest.approx(float(added[goes] - added[here]), abs=1e-3)


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_cold_search_never_raises_the_cost_and_meets_quotas(workers: int) -> None:
    uses = window(3, workers)
    loads, groups = loads_of(uses, workers), samples_by_use(uses)
    heat = Heat(0.0, 0.0, GUMBEL, np.array([5], np.uint64))
    before = total(uses)
    for t in range(BATCHES):
        sweep_samples(uses, loads, t, heat)
    after = total(uses)
    assert after <= before + 1e-3
    sweep = GroupSweep(0, 0, len(uses.use_KF) // BATCHES, max_size=16, max_lookups=500)
    sweep_groups(uses, loads, groups, sweep, heat)
    assert total(uses) <= after + 1e-3
    dealt = uses.worker_S.reshape(BATCHES, BATCH)
    assert loads.load_TW[0].tolist() == np.bincount(dealt[0], minlength=workers).tolist()
    repair(uses, loads, 0)
    assert loads.load_TW[0].tolist() == loads.quota_TW[0].tolist()
    repaired = total(uses)
    swap_round(uses, loads, 0)
    assert total(uses) <= repaired + 1e-3
    assert np.bincount(dealt[0], minlength=workers).tolist() == loads.quota_TW[0].tolist()


def test_cost_of_one_row_by_hand() -> None:
    """One row and two workers, with the costs of the module's table."""
    price = np.zeros((3, 1, CHUNK), np.float32)
    price[ALONE, 0, :2], price[SHARE, 0, :2], price[PULL, 0, :2] = (2, 20), (3, 30), (1, 10)
    node, first = np.zeros(2, np.int32), np.arange(3)

    def cost(owner: int, *workers: int) -> float:
        nodes = Nodes(
            np.full(1, -1, np.int32),
            np.array([owner], np.int32),
            np.zeros(1, np.uint8),
            np.zeros(1, np.float32),
        )
        return total(collect_uses(nodes, node, first, np.array(workers, np.int32), price)[0])

    assert cost(-1, 0, 0) == 2
    assert cost(0, 0, 0) == 0
    assert cost(1, 0, 0) == 2
    assert cost(-1, 0, 1) == 33
    assert cost(1, 0, 1) == 23
