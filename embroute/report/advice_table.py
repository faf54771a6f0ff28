"""Advice as a table for a terminal or a notebook, and the reasons for its first line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from embroute.cost.step_time import allreduce_share_W
from embroute.kernels.codes import VALUE_STATE
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.report.comparison_table import rough, scaled
from embroute.simulator.advisor import (
    EQUAL,
    Configuration,
    Constraints,
    Recommendation,
    fixed_bytes,
    hot_rows,
    only_fast,
)
from embroute.simulator.simulation import Outcome

MAX_SHOWN = 6


def advice_table(advices: Sequence[Recommendation], setup: Setup) -> Table:
    """The best configurations as a table of at most 80 columns."""
    out = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="n: workers; pred, sim: step predicted, simulated; MB of a step, of a worker",
        caption_justify="left",
    )
    out.add_column("policy", no_wrap=True, min_width=8)
    headings = ("n", "batch", "cache\nrows", "pred\nms", "sim\nms", "samples\n/s")
    for heading in (*headings, "rows\nMB", "other\nMB", "memory\nMB", "decide\nms"):
        out.add_column(heading, justify="right", no_wrap=True)
    for advice in advices[:MAX_SHOWN]:
        choice, outcome = advice.choice, advice.outcome
        workers = len(choice.workers)
        out.add_row(
            choice.policy,
            str(workers),
            str(choice.batch // workers),
            scaled(choice.cache_rows) if has_cache(choice) else "-",
            f"{1e3 * advice.predicted_s:.3g}",
            f"{1e3 * outcome.step_time_s:.3g}" if outcome else "-",
            scaled(advice.samples_s),
            *([f"{size:.3g}" for size in _megabytes(outcome)] if outcome else ["-", "-"]),
            scaled(worker_bytes(setup, choice) / 1e6),
            scaled(outcome.decision_ms) if outcome else "-",
        )
    return out


def _megabytes(outcome: Outcome) -> tuple[float, float]:
    """Megabytes per step: of rows, and of samples, plans and dense gradients."""
    traffic, cluster = outcome.traffic, outcome.setup.cluster
    shares = [allreduce_share_W(cluster, with_rows).sum() for with_rows in (True, False)]
    rows = traffic.bytes_WKIP.sum() + shares[0] * traffic.hot_bytes
    other = traffic.sample_bytes_W.sum() + traffic.plan_bytes_W.sum()
    dense = shares[1] * cluster.dense_bytes
    return float(rows / outcome.steps / 1e6), float((other / outcome.steps + dense) / 1e6)


def worker_bytes(setup: Setup, choice: Configuration) -> float:
    """Memory that a worker needs in this configuration."""
    cache = choice.cache_rows * float(setup.record_bytes_XA[VALUE_STATE].max())
    return cache + fixed_bytes(setup, choice.batch // len(choice.workers))


def against(first: Recommendation, rival: Recommendation) -> str:
    """How the first recommendation compares to a rival: by speed, or if equal by decision time."""
    gain = first.samples_s / rival.samples_s - 1
    same = first.choice.policy == rival.choice.policy
    name = _in_words(first.choice) if same else first.choice.policy
    if gain > EQUAL or not first.outcome or not rival.outcome:
        return f"{name} trains {gain:.0%} more samples/s than {_in_words(rival.choice)}"
    first_ms, rival_ms = first.outcome.decision_ms, rival.outcome.decision_ms
    faster = first_ms < 0.9 * rival_ms
    decides = f", and decides in {rough(first_ms)} ms, not {rough(rival_ms)}" if faster else ""
    return f"{name} trains as many samples/s as {_in_words(rival.choice)}{decides}"


def has_cache(choice: Configuration) -> bool:
    """Whether rows stay in a cache from step to step."""
    return choice.cache_rows > 0 and make_policy(choice.policy).sync.copies == "kept"


def _in_words(choice: Configuration) -> str:
    workers, samples = len(choice.workers), choice.batch // len(choice.workers)
    place = f"{workers} worker{'s' if workers > 1 else ''} with {samples} samples"
    cache = f" and caches of {choice.cache_rows:,} rows" if has_cache(choice) else ""
    return f"{choice.policy} on {place}{cache}"


def recommended(advice: Recommendation) -> str:
    """The recommendation in one line."""
    speed = f"{advice.samples_s:,.0f} samples/s, {rough(1e3 * advice.step_s)} ms a step"
    return f"Recommended: {_in_words(advice.choice)}: {speed}"


def reasons(constraints: Constraints, advices: Sequence[Recommendation]) -> Iterator[str]:
    """Why the first recommendation wins, and which facts speak against it."""
    first, rivals = advices[0], [advice for advice in advices[1:] if advice.outcome]
    others = [advice for advice in rivals if advice.choice.policy != first.choice.policy]
    if rivals:
        yield against(first, (others or rivals)[0])
    hot = hot_rows(constraints, first.choice)
    if hot:
        yield f"the hot set, which {first.choice.policy} keeps on every worker, is {hot:,} rows"
    deciding_s = first.outcome.decision_ms / 1e3 if first.outcome else 0.0
    if deciding_s > first.step_s:
        yield (
            f"a decision of {first.choice.policy} took {1e3 * deciding_s:.3g} ms here, longer than "
            "the step: on such a machine deciding sets the pace, unless a faster policy is chosen"
            + (", such as embroute(effort=auto)" if first.choice.policy == "embroute" else "")
        )
    left_out = only_fast(constraints, advices)
    if left_out:
        yield left_out
    setup = constraints.setup
    tables = setup.rows_A @ setup.record_bytes_XA[VALUE_STATE]
    yield f"each shard holds {tables / setup.cluster.num_shards / 1e6:,.0f} MB of tables"
