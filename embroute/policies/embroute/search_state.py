"""What users choose about the search of `embroute`, and what it keeps from step to step.

Axes: T batches ahead, S samples, W workers, N numbered rows, P phases, U distinct rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from embroute.kernels.array_types import F32, I32, I64, U8
from embroute.kernels.codes import SHARD_LINK
from embroute.kernels.jit import kernel
from embroute.kernels.memory import index
from embroute.kernels.touches import Touches
from embroute.planner.setup import Setup


@dataclass(frozen=True)
class SearchOptions:
    """What users choose about the search, and what a run's start decides."""

    effort: int = 2400  # look-ups to read in a step, for each sample of its batch
    ahead: int = 14  # batches dispatched together besides the current one
    paced: bool = False  # no more effort than a core has time for in a step
    max_window: int = 110_000  # look-ups times chunks of workers of a window: what CPU caches hold
    minimize_time: bool = True  # step time; otherwise the sum of all transfers
    free_quotas: bool = True  # quotas follow from the time workers take
    initial_workers: tuple[int, ...] = ()  # active at the start; none: all
    change_workers: bool = True  # whether other workers may become active
    floor: tuple[float, ...] = (0.0,)  # least share of a batch, for every worker or for each
    ceiling: tuple[float, ...] = (1.0,)  # largest share, likewise
    local_init: bool = True  # workers compute untrained rows instead of pulling them


class SearchState(NamedTuple):
    """What the search keeps from step to step. Axis T: batches ahead."""

    ahead_TS: I32  # planned workers of the next batches' samples; -1 is not chosen yet
    price_TW: F32  # price of a place at each worker, in those batches
    affinity_NW: U8  # by row number: each worker's share of a row's recent uses, of 255
    share_W: F32  # each worker's share of a batch; empty where quotas are fixed
    weight_PW: F32  # weight of a second in each phase and at the shards; empty likewise
    range_2W: F32  # least and greatest share of each worker
    took_1: F32  # mean seconds of recent steps; 0 before the first
    pace_2: F32  # seconds at the shards' link and elsewhere, without all-reduced rows


def first_search(setup: Setup, options: SearchOptions) -> SearchState:
    """No batch assigned ahead, no prices, no affinity; first shares and weights, if learnt."""
    samples, workers = setup.batch_size, setup.num_workers
    ahead, timed = max(1, options.ahead), options.minimize_time
    share_W, range_2W = np.empty(0, np.float32), np.empty((0, workers), np.float32)
    weight_PW = np.ones((SHARD_LINK + 1 if timed else 0, workers), np.float32)
    weight_PW[SHARD_LINK:] = 0
    if timed and options.free_quotas and not setup.shares:
        share_W = first_shares(setup)
        range_2W = np.repeat(np.array([[0], [1]], np.float32), workers, 1)
    elif timed:
        # Shares that the user names, and equal shares, stay as they are.
        share_W = np.array(setup.shares or np.ones(workers), np.float32)
        share_W /= share_W.sum()
        range_2W = np.stack([share_W, share_W])
    return SearchState(
        ahead_TS=np.full((ahead, samples), -1, np.int32),
        price_TW=np.zeros((ahead, workers), np.float32),
        affinity_NW=np.zeros((setup.schema.num_rows + 1, workers), np.uint8),
        share_W=share_W,
        weight_PW=weight_PW,
        range_2W=range_2W,
        took_1=np.zeros(1, np.float32),
        pace_2=np.zeros(2 if timed else 0, np.float32),
    )


def first_shares(setup: Setup) -> F32:
    """Shares in proportion to speed, if each sample pulls and pushes a quarter of its rows."""
    lookups = max(1, setup.schema.num_fields)
    transfers_W = lookups / 4 * 2 * setup.row_seconds_AW.mean(0)
    seconds_W = np.maximum(setup.cluster.compute_s_W, 1e-12) + transfers_W
    share_W: F32 = (1 / seconds_W / (1 / seconds_W).sum()).astype(np.float32)
    return share_W


@kernel
def learn_affinity(affinity_NW: U8, number_R: I32, touches: Touches, rows_U: I64) -> None:
    """Move each row's affinity a quarter of the way towards the workers that used it.

    Shares sum to at most 255: three quarters of the old ones, and 63 over the workers of this step.
    """
    first_U, of_row_T, worker_T = touches.first_U, touches.of_row_T, touches.worker_T
    num_workers = affinity_NW.shape[1]
    for u in range(len(rows_U)):
        first, last = index(first_U[u]), index(first_U[u + 1])
        if first == last:
            continue
        n, share = index(number_R[index(rows_U[u])]), 63 // (last - first)
        for w in range(num_workers):
            old = np.int64(affinity_NW[n, index(w)])
            affinity_NW[n, index(w)] = (3 * old) >> 2
        for i in range(first, last):
            affinity_NW[n, index(worker_T[index(of_row_T[i])])] += share
