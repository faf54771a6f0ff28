"""Results of several policies on one job, also as JSON (schema: docs/compare-json.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from embroute.cost.step_time import KIND_NAMES, allreduce_cost_W, allreduce_sends_W, transfer_cost_W
from embroute.kernels.codes import UPDATE_PUSH
from embroute.planner.bounds import Bound
from embroute.policies.catalog import LOWER_BOUND
from embroute.simulator.simulation import Outcome, Workload

SCHEMA_VERSION = 1
MOVED_KINDS = (*KIND_NAMES, "drain", "allreduce")
FIRST_FILL = "first_fill"  # of replicas: a run has it once, so that no other figure counts it


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
    steps: int | None  # measured; None for a bound
    transmission_cost_s: float
    step_time_s: float
    hit_rate: float | None
    decision_ms: float | None
    exact: bool
    order_changed: bool
    hot_steps: int = 0  # of batches all of whose rows are hot
    replicated_rows: int = 0  # on every worker for the whole run
    reference: bool = False

    @property
    def moved_rows(self) -> int:
        """Rows over workers' links, all-reduced ones counted once."""
        return sum(self.rows[kind] for kind in MOVED_KINDS)

    @property
    def moved_bytes(self) -> int:
        """Bytes of rows over workers' links, all-reduced ones in both directions."""
        return sum(self.bytes[kind] for kind in MOVED_KINDS)


def _worker_results(outcome: Outcome) -> tuple[WorkerResult, ...]:
    traffic, cluster = outcome.traffic, outcome.setup.cluster
    rows_WI, bytes_WI = traffic.rows_WKIP.sum((1, 3)), traffic.bytes_WKIP.sum((1, 3))
    all_bytes_WKI = traffic.bytes_WKIP.sum(3)
    all_bytes_WKI[:, :, UPDATE_PUSH] += outcome.drain_bytes_WK
    cost_W = transfer_cost_W(all_bytes_WKI, cluster)
    cost_W = cost_W + allreduce_cost_W(traffic.hot_bytes, cluster)
    crossings_W = 2 * allreduce_sends_W(cluster, traffic.hot_bytes > 0)  # out of, and into, a link
    results = []
    for w, worker in enumerate(outcome.workers):
        rows = dict(zip(KIND_NAMES, map(int, rows_WI[w]), strict=True))
        sizes = dict(zip(KIND_NAMES, map(int, bytes_WI[w]), strict=True))
        rows |= {"drain": int(outcome.drain_rows_W[w]), "allreduce": traffic.hot_rows}
        sizes |= {
            "drain": int(outcome.drain_bytes_WK[w].sum()),
            "allreduce": round(crossings_W[w] * traffic.hot_bytes),
            "samples": int(traffic.sample_bytes_W[w]),
            "plans": int(traffic.plan_bytes_W[w]),
            "checks": int(traffic.check_bytes_WK[w].sum()),
            "dense": round(crossings_W[w] * cluster.dense_bytes * outcome.steps),
        }
        rows[FIRST_FILL], sizes[FIRST_FILL] = (int(count_W[w]) for count_W in outcome.fill)
        host = cluster.hosts[cluster.workers[w].host].name
        samples = int(traffic.samples_W[w])
        results.append(WorkerResult(worker, host, samples, rows, sizes, float(cost_W[w])))
    return tuple(results)


def policy_result(name: str, outcome: Outcome) -> PolicyResult:
    """The result of a measured policy."""
    workers = _worker_results(outcome)
    rows = {kind: sum(w.rows[kind] for w in workers) for kind in workers[0].rows}
    sizes = {kind: sum(w.bytes[kind] for w in workers) for kind in workers[0].bytes}
    rows["allreduce"] = outcome.traffic.hot_rows
    sizes["plans"] += int(outcome.traffic.plan_bytes_K.sum())
    return PolicyResult(
        name=name,
        rows=rows,
        bytes=sizes,
        per_worker=workers,
        steps=outcome.steps,
        transmission_cost_s=outcome.transmission_cost_s,
        step_time_s=outcome.step_time_s,
        hit_rate=outcome.hit_rate,
        decision_ms=outcome.decision_ms,
        exact=outcome.policy.exact,
        order_changed=outcome.policy.order_changed,
        hot_steps=outcome.hot_steps,
        replicated_rows=outcome.replicated_rows,
        reference=outcome.policy.unbounded,
    )


def bound_result(bound: Bound) -> PolicyResult:
    """The result of the lower bound; all its pulls count as misses, all its pushes as updates."""
    zero = dict.fromkeys(MOVED_KINDS, 0)
    rows = zero | {"miss_pull": int(bound.pulls_A.sum()), "update_push": int(bound.pushes_A.sum())}
    rows[FIRST_FILL] = 0
    sizes = zero | {"miss_pull": round(bound.pull_bytes), "update_push": round(bound.push_bytes)}
    # The bound is on rows.
    sizes |= dict.fromkeys(("samples", "plans", "checks", "dense", FIRST_FILL), 0)
    return PolicyResult(
        name=LOWER_BOUND,
        rows=rows,
        bytes=sizes,
        per_worker=(),
        steps=None,
        transmission_cost_s=bound.transmission_cost_s,
        step_time_s=bound.step_time_s,
        hit_rate=None,
        decision_ms=None,
        exact=True,
        order_changed=False,
        reference=True,
    )


def _as_json(result: PolicyResult) -> dict[str, object]:
    return {
        "rows": result.rows,
        "bytes": result.bytes,
        "workers": [worker.worker for worker in result.per_worker],
        "measured_steps": result.steps,
        "per_worker": [vars(worker) for worker in result.per_worker],
        "transmission_cost_s": result.transmission_cost_s,
        "step_time_s": result.step_time_s,
        "hit_rate": result.hit_rate,
        "decision_ms": result.decision_ms,
        "exact": result.exact,
        "order_changed": result.order_changed,
        "hot_steps": result.hot_steps,
        "replicated_rows": result.replicated_rows,
        "reference": result.reference,
    }


def to_json(results: Sequence[PolicyResult], job: Workload, data: str) -> dict[str, object]:
    """The documented JSON of a comparison."""
    setup = job.setup
    return {
        "version": SCHEMA_VERSION,
        "data": data,
        "table_rows": setup.schema.num_rows,
        "workers": setup.num_workers,
        "batch_size": setup.batch_size,
        "cache_rows": int(setup.cache_rows_W.max()),
        "worker_cache_rows": setup.cache_rows_W.tolist(),
        "widths": list(setup.widths),
        "optimizer": setup.optimizer,
        "steps": job.steps,
        "warmup": job.warmup,
        "seed": setup.seed,
        "policies": {result.name: _as_json(result) for result in results},
    }
