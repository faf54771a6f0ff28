"""A priced step as one line of a table."""

from __future__ import annotations

from collections.abc import Sequence

from embroute.cost.step_time import KIND_NAMES
from embroute.simulator.simulation import StepReport

STEP_COLUMNS = (
    "step",
    "samples",
    "hot",
    *(f"{kind}_rows" for kind in KIND_NAMES),
    *(f"{kind}_bytes" for kind in KIND_NAMES),
    "allreduce_rows",
    "allreduce_bytes",
    "first_fill_rows",
    "first_fill_bytes",
    "sample_bytes",
    "plan_bytes",
    "check_bytes",
    "hit_rate",
    "transmission_cost_s",
    "step_time_s",
    "compute_s",
    "early_s",
    "urgent_s",
    "late_s",
    "allreduce_s",
    "shard_s",
    "decision_ms",
)


def step_row(report: StepReport) -> list[int | float]:
    """The values of a step; a time of workers is the time of the slowest worker."""
    traffic, time = report.traffic, report.time
    return [
        report.step,
        int(traffic.samples_W.sum()),
        int(report.hot),
        *traffic.rows_WKIP.sum((0, 1, 3)).tolist(),
        *traffic.bytes_WKIP.sum((0, 1, 3)).tolist(),
        traffic.hot_rows,
        traffic.hot_bytes,
        *(int(count_W.sum()) for count_W in report.fill),
        int(traffic.sample_bytes_W.sum()),
        int(traffic.plan_bytes_W.sum() + traffic.plan_bytes_K.sum()),
        int(traffic.check_bytes_WK.sum()),
        report.hits / max(1, report.touches),
        report.transmission_cost_s,
        time.total_s,
        *(float(times.max()) for times in (time.compute_W, time.early_W, time.urgent_W)),
        float(time.late_W.max()),
        time.allreduce_s,
        time.shard_s,
        1e3 * report.decision_s,
    ]


def csv_cells(values: Sequence[int | float]) -> list[str]:
    """The values of a step as text of nine digits; hit rates and decision times need fewer."""
    formats = {"hit_rate": ".6f", "decision_ms": ".4f"}
    return [
        str(value) if isinstance(value, int) else format(value, formats.get(name, ".9g"))
        for name, value in zip(STEP_COLUMNS, values, strict=True)
    ]
