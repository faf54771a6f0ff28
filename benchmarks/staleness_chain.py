"""One row under bounded staleness: the clocks of its copies and of the shard, use by use.

Axis W: workers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import F64, I64, U8, Bools
from embroute.kernels.codes import HIT, MISS, STALE
from embroute.kernels.jit import inlined, kernel


class StalenessChain(NamedTuple):
    """What the simulation of one row depends on."""

    workers: int
    bound: int
    stay: float  # steps that an untouched copy stays
    uses: int  # of the row, to simulate


class ChainCopies(NamedTuple):
    """The row at each worker: step of its last touch (-1: no copy), and its two clocks."""

    used_W: I64
    start_W: I64
    clock_W: I64


@inlined
def _expire(chain: StalenessChain, copies: ChainCopies, step: int, shard: int) -> tuple[int, int]:
    """Copies unused for too long leave with a push; returns the shard's clock and their number."""
    left = 0
    for w in range(chain.workers):
        if copies.used_W[w] >= 0 and step - copies.used_W[w] > chain.stay:
            shard = max(shard, copies.clock_W[w])
            copies.used_W[w] = -1
            left += 1
    return shard, left


@inlined
def _validate(
    chain: StalenessChain, copies: ChainCopies, touch_W: Bools, shard: int, need_W: U8
) -> int:
    """What each toucher needs; a push advances the shard's clock and may outdate another copy."""
    for w in range(chain.workers):
        need_W[w] = HIT if copies.used_W[w] >= 0 else MISS
    changed = True
    while changed:
        changed = False
        for w in range(chain.workers):
            if not touch_W[w] or need_W[w] != HIT:
                continue
            clock = copies.clock_W[w]
            if clock > copies.start_W[w] + chain.bound or shard > clock + chain.bound:
                need_W[w] = STALE
                shard = max(shard, clock)
                changed = True
    return shard


@kernel
def run_chain(chain: StalenessChain, touch: float, rng: np.random.Generator) -> F64:
    """Misses, stale pulls, update pushes and eviction pushes of one row, per worker and step.

    Every worker touches the row with probability `touch` in a step. The first tenth of the uses
    is not counted.
    """
    absent_W = np.full(chain.workers, -1, np.int64)
    copies = ChainCopies(absent_W, absent_W.copy(), absent_W.copy())
    touch_W, need_W = np.zeros(chain.workers, np.bool_), np.zeros(chain.workers, np.uint8)
    counts, step, began, shard = np.zeros(4), 0, 0, 0
    anyone = -np.expm1(chain.workers * np.log1p(-min(touch, 1 - 1e-12)))
    for use in range(chain.uses):
        if use == chain.uses // 10:
            counts[:], began = 0, step
        # Steps until any worker touches the row; then draw the touchers, given that there is one.
        step += rng.geometric(anyone)
        shard, left = _expire(chain, copies, step, shard)
        counts[3] += left
        touch_W[:] = False
        while not touch_W.any():
            for w in range(chain.workers):
                touch_W[w] = rng.random() < touch
            if anyone < 0.1:  # exactly one toucher, but for a negligible chance
                touch_W[rng.integers(0, chain.workers)] = True
        shard = _validate(chain, copies, touch_W, shard, need_W)
        for w in range(chain.workers):
            if touch_W[w]:
                _use(copies, w, step, shard, need_W[w], counts)
    return counts / (max(1, step - began) * chain.workers)


@inlined
def _use(copies: ChainCopies, w: int, step: int, shard: int, need: int, counts: F64) -> None:
    """One worker trains the row on its copy, after a pull if it needs one."""
    if need != HIT:
        counts[0 if need == MISS else 1] += 1
        counts[2] += need == STALE
        copies.start_W[w] = copies.clock_W[w] = shard
    copies.clock_W[w] += 1
    copies.used_W[w] = step
