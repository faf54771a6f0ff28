"""The systems of the catalog, each a function of its options.

Signatures are what users type: `esd(0.5, ties=any)` calls `esd_policy(0.5, ties="any")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from embroute.config.signature import Between, Ratio, Seed
from embroute.config.spec import Size
from embroute.data.access_counts import Calibration
from embroute.data.batch import Batch
from embroute.planner.interfaces import Policy, Regroup, Sync
from embroute.planner.state import State
from embroute.policies.dispatch.block import block, round_robin
from embroute.policies.dispatch.esd import AssignmentTies, esd
from embroute.policies.dispatch.herald import ScoredTables, ScoreTies, herald
from embroute.policies.embroute.dispatch import search_dispatch
from embroute.policies.embroute.row_allreduce import on_demand_with_allreduce
from embroute.policies.embroute.search_state import SearchOptions
from embroute.policies.evict import Lookahead, clairvoyant, lfu, light_lfu, lru, stale_first
from embroute.policies.regroup import (
    SwapSchedule,
    by_count,
    by_theory,
    hot_memory,
    learn_loss,
    regroup,
)
from embroute.policies.sync.baselines import (
    StepBound,
    all_reduced,
    asynchronous,
    stale_synchronous,
)
from embroute.policies.sync.bounded import ClockRules, StalenessBound, bounded
from embroute.policies.sync.on_demand import on_demand, pipelined_on_demand, until_last_use
from embroute.policies.sync.replicated import always_replicated, swapped
from embroute.policies.sync.write_through import shared_memory, uncached, write_through

Effort = Annotated[int, Between(1, 10**6)]
Shares = tuple[Ratio, ...]  # of a batch: one for every worker, or one for each such as 0.2+0.1+0
RowInit = Literal["local", "pull"]  # a row that no step has trained: computed, or pulled
Rounds = Annotated[int, Between(2, 10**6)]
SampleShare = Annotated[float, Between(1e-6, 1)]  # of the samples, from which hot rows are chosen


def nocache_policy() -> Policy:
    """a plain parameter server"""
    return Policy("nocache", block(), uncached(), lru())


def vanilla_policy() -> Policy:
    """the yardstick"""
    return Policy("vanilla", block(), write_through(), lru())


def asp_policy() -> Policy:
    """an asynchronous parameter server (inexact)"""
    return Policy("asp", block(), asynchronous(), lru())


def ssp_policy(bound: StepBound = 10) -> Policy:
    """a stale-synchronous parameter server (inexact)"""
    return Policy("ssp", block(), stale_synchronous(bound), lru())


def allreduce_policy() -> Policy:
    """every table on every worker"""
    return Policy("allreduce", block(), all_reduced(), lru())


def het_policy(
    bound: StalenessBound = 100,
    order: Literal["lru", "lfu", "light-lfu"] = "lru",
    clocks: ClockRules = "paper",
) -> Policy:
    """HET: bounded staleness (inexact)"""
    orders = {"lru": lru, "lfu": lfu, "light-lfu": light_lfu}
    return Policy("het", round_robin(), bounded(bound, clocks), orders[order]())


def herald_policy(tables: ScoredTables = "all", ties: ScoreTies = "rotate") -> Policy:
    """Herald: samples to their rows"""
    return Policy("herald", herald(tables, ties), on_demand(), lru())


def esd_policy(alpha: Ratio = 1.0, ties: AssignmentTies = "block") -> Policy:
    """ESD: lowest expected cost on unequal links"""
    return Policy("esd", esd(alpha, ties), on_demand(), lru())


def _hot_and_cold(schedule: SwapSchedule, name: str, hot: Size | None, sample: float) -> Regroup:
    """Hot and cold batches, the hot set by counts (fae) or by theory (scars)."""

    def stream(batches: Iterator[Batch], state: State) -> Iterator[Batch]:
        return regroup(batches, state, schedule)

    choose = by_count(hot) if name == "fae" else by_theory(hot)
    calibration = Calibration(sample, schedule.seed)
    listener = learn_loss if schedule.rate == "auto" else None
    return Regroup(name, stream, hot_memory(choose), calibration, listener)


def fae_policy(
    hot: Size | None = None,
    rate: Annotated[float, Between(1, 100)] | Literal["auto"] = "auto",
    buffer: Rounds = SwapSchedule.buffer,
    sample: SampleShare = Calibration.share,
    shuffle: bool = False,
    seed: Seed = 0,
) -> Policy:
    """FAE: hot and cold batches"""
    stage = _hot_and_cold(SwapSchedule(rate, buffer, shuffle, seed), "fae", hot, sample)
    return Policy("fae", block(), swapped(), lru(), stage)


def scars_policy(
    hot: Size | None = None,
    buffer: Rounds = SwapSchedule.buffer,
    sample: SampleShare = Calibration.share,
    shuffle: bool = False,
    seed: Seed = 0,
) -> Policy:
    """SCARS: hot set chosen by theory"""
    stage = _hot_and_cold(SwapSchedule(100, buffer, shuffle, seed), "scars", hot, sample)
    return Policy("scars", block(), always_replicated(), lru(), stage)


def bagpipe_policy(lookahead: Lookahead = 200) -> Policy:
    """BagPipe: cache what the window needs"""
    return Policy("bagpipe", block(), until_last_use(lookahead), clairvoyant(lookahead))


def embroute_policy(  # noqa: PLR0913  # each is an option
    effort: Effort | Literal["auto"] = SearchOptions.effort,
    ahead: Annotated[int, Between(0, 100)] = SearchOptions.ahead,
    objective: Literal["time", "cost"] = "time",
    quotas: Literal["free", "equal"] | None = None,
    floor: Shares | None = None,
    ceiling: Shares | None = None,
    init: RowInit = "local",
) -> Policy:
    """our own: rows as workers share them"""
    if quotas is None:
        quotas = "free" if objective == "time" else "equal"
    if objective == "cost" and quotas == "free":
        raise ValueError(
            "embroute: quotas must be equal with objective=cost, got free: the fastest link alone "
            "would cost least"
        )
    if quotas == "equal" and not floor is ceiling is None:
        raise ValueError("embroute: floor and ceiling are for quotas=free, got quotas=equal")
    if objective == "cost" and effort == "auto":
        raise ValueError("embroute: effort=auto follows the time of a step, got objective=cost")
    local_init = init == "local"
    search = SearchOptions(
        effort=SearchOptions.effort if effort == "auto" else effort,
        ahead=ahead,
        paced=effort == "auto",
        minimize_time=objective == "time",
        free_quotas=quotas == "free",
        floor=floor or SearchOptions.floor,
        ceiling=ceiling or SearchOptions.ceiling,
        local_init=local_init,
    )
    return Policy(
        "embroute", search_dispatch(search), on_demand_with_allreduce(local_init), stale_first()
    )


def in_place_policy() -> Policy:
    """one machine: rows trained in memory that all workers share"""
    return Policy("in-place", block(), shared_memory(), lru())


def pipelined_sync(init: RowInit = "pull") -> Sync:
    """on demand, pulled in chunks beside the pushes"""
    return pipelined_on_demand(init == "local")
