"""What policies came to on a job, side by side, and as JSON (schema: docs/compare-json.md)."""

from __future__ import annotations

from dataclasses import dataclass

from embroute.cost.step_time import KIND_NAMES, allreduce_cost_W, allreduce_share_W, transfer_cost_W
from embroute.kernels.codes import UPDATE_PUSH
from embroute.planner.bounds import Bound
from embroute.policies.catalog import LOWER_BOUND
from embroute.simulate.simulation import Outcome, Workload

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class WorkerResult:
    """One worker's share of the measured steps."""

    worker: int
    host: str
    samples: int
    rows: dict[str, int]
    bytes: dict[str, int]
    transmission_cost_s: float


@dataclass(frozen=True)
class PolicyResult:
    """One policy, or one reference line, of a comparison."""

    name: str
    rows: dict[str, int]
    bytes: dict[str, int]
    per_worker: tuple[WorkerResult, ...]
    steps: int | None  # measured; a bound has none of its own
    transmission_cost_s: float
    step_time_s: float
    hit_rate: float | None
    decision_ms: float | None
    exact: bool
    order_changed: bool
    reference: bool = False

    @property
    def moved_rows(self) -> int:
        """Rows over workers' links, all-reduced ones counted once."""
        return sum(self.rows.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes of rows over workers' links, all-reduced ones in both directions."""
        return sum(self.bytes[kind] for kind in (*KIND_NAMES, "drain", "allreduce"))


def _worker_lines(outcome: Outcome) -> tuple[WorkerResult, ...]:
    traffic, cluster = outcome.traffic, outcome.setup.cluster
    rows_WI, bytes_WI = traffic.rows_WKIP.sum((1, 3)), traffic.bytes_WKIP.sum((1, 3))
    all_bytes_WKI = traffic.bytes_WKIP.sum(3)
    all_bytes_WKI[:, :, UPDATE_PUSH] += outcome.drain_bytes_WK
    cost_W = transfer_cost_W(all_bytes_WKI, cluster)
    cost_W = cost_W + allreduce_cost_W(traffic.hot_bytes, cluster)
    crossed_W = 2 * allreduce_share_W(cluster, traffic.hot_bytes > 0)
    lines = []
    for w, worker in enumerate(outcome.workers):
        rows = dict(zip(KIND_NAMES, map(int, rows_WI[w]), strict=True))
        sizes = dict(zip(KIND_NAMES, map(int, bytes_WI[w]), strict=True))
        rows |= {"drain": int(outcome.drain_rows_W[w]), "allreduce": traffic.hot_rows}
        sizes |= {
            "drain": int(outcome.drain_bytes_WK[w].sum()),
            "allreduce": round(crossed_W[w] * traffic.hot_bytes),
            "samples": int(traffic.sample_bytes_W[w]),
            "plans": int(traffic.plan_bytes_W[w]),
            "dense": round(crossed_W[w] * cluster.dense_bytes * outcome.steps),
        }
        host = cluster.hosts[cluster.workers[w].host].name
        samples = int(traffic.samples_W[w])
        lines.append(WorkerResult(worker, host, samples, rows, sizes, float(cost_W[w])))
    return tuple(lines)


def policy_result(name: str, outcome: Outcome) -> PolicyResult:
    """The line of a measured policy."""
    workers = _worker_lines(outcome)
    rows = {kind: sum(w.rows[kind] for w in workers) for kind in workers[0].rows}
    sizes = {kind: sum(w.bytes[kind] for w in workers) for kind in workers[0].bytes}
    rows["allreduce"] = outcome.traffic.hot_rows
    sizes["plans"] += int(outcome.traffic.plan_bytes_K.sum())
    return PolicyResult(
        name,
        rows,
        sizes,
        workers,
        outcome.steps,
        outcome.transmission_cost_s,
        outcome.step_time_s,
        outcome.hit_rate,
        outcome.decision_ms,
        outcome.policy.exact,
        outcome.policy.order_changed,
        outcome.policy.unbounded,
    )


def bound_result(bound: Bound, job: Workload) -> PolicyResult:
    """The line of the lower bound; it says how much moves, not why."""
    zero = dict.fromkeys((*KIND_NAMES, "drain", "allreduce"), 0)
    rows = zero | {"miss_pull": int(bound.pulls_A.sum()), "update_push": int(bound.pushes_A.sum())}
    sizes = zero | {"miss_pull": round(bound.pull_bytes), "update_push": round(bound.push_bytes)}
    sizes |= {"samples": 0, "plans": 0, "dense": 0}
    return PolicyResult(
        LOWER_BOUND,
        rows,
        sizes,
        (),
        None,
        bound.transmission_cost_s,
        bound.step_time_s,
        None,
        None,
        exact=True,
        order_changed=False,
        reference=True,
    )


def _as_json(entry: PolicyResult) -> dict[str, object]:
    return {
        "rows": entry.rows,
        "bytes": entry.bytes,
        "workers": [worker.worker for worker in entry.per_worker],
        "measured_steps": entry.steps,
        "per_worker": [vars(worker) for worker in entry.per_worker],
        "transmission_cost_s": entry.transmission_cost_s,
        "step_time_s": entry.step_time_s,
        "hit_rate": entry.hit_rate,
        "decision_ms": entry.decision_ms,
        "exact": entry.exact,
        "order_changed": entry.order_changed,
        "reference": entry.reference,
    }


def to_json(lines: list[PolicyResult], job: Workload, data: str) -> dict[str, object]:
    """The documented JSON of a comparison."""
    setup = job.setup
    return {
        "version": SCHEMA_VERSION,
        "data": data,
        "table_rows": setup.schema.num_rows,
        "workers": setup.num_workers,
        "batch_size": setup.batch_size,
        "cache_rows": int(setup.capacity_WA[0].sum()),
        "widths": list(setup.widths),
        "optimizer": setup.optimizer,
        "steps": job.steps,
        "warmup": job.warmup,
        "seed": setup.seed,
        "policies": {entry.name: _as_json(entry) for entry in lines},
    }
