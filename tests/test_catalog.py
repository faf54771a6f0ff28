"""Names of policies: every system, every option, mixed policies, and contradicting mixes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import signature

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embroute.config.cluster_file import open_cluster
from embroute.config.spec import AUTO_CACHE, Size
from embroute.cost.step_time import Traffic
from embroute.data.online_retail import RetailSource
from embroute.kernels.array_types import F64, I32, I64
from embroute.planner.interfaces import Policy
from embroute.planner.plan_stream import start
from embroute.planner.setup import Setup
from embroute.policies.catalog import DISPATCHES, EVICTS, SYNCS, SYSTEMS, Factory, make_policy
from embroute.policies.dispatch.esd import hybrid
from embroute.policies.dispatch.herald import Infrequency, tables_in_time
from embroute.simulator.simulation import Workload, measure_named, simulate_steps
from tests.sizes import sized
from tests.workloads import long_workload

# A value of every option, other than its default.
VALUES: Mapping[str, Mapping[str, str]] = {
    "het": {"bound": "7", "order": "light-lfu", "clocks": "release"},
    "ssp": {"bound": "7"},
    "herald": {"tables": "2", "ties": "first"},
    "esd": {"alpha": "0.25", "ties": "any"},
    "fae": {
        "hot": "100rows",
        "rate": "20",
        "buffer": "4",
        "sample": "0.2",
        "shuffle": "yes",
        "seed": "3",
    },
    "scars": {"hot": "100rows", "buffer": "4", "sample": "0.2", "shuffle": "yes", "seed": "3"},
    "bagpipe": {"lookahead": "6"},
    "embroute": {
        "effort": "200",
        "ahead": "1",
        "objective": "time",
        "quotas": "free",
        "floor": "0.1",
        "ceiling": "0.6",
        "init": "pull",
    },
    "pipelined": {"init": "local"},
    "unbounded": {"of": "herald"},
    "until-last-use": {"lookahead": "6"},
    "clairvoyant": {"lookahead": "6"},
}
KINDS = {"dispatch": DISPATCHES, "sync": SYNCS, "evict": EVICTS}


SOURCE = RetailSource()


def job_of(optimizer: str = "sgd") -> Workload:
    setup = Setup(SOURCE.schema, open_cluster("edge-4"), 8, 64, optimizer, cache=Size(400, "rows"))
    return Workload(SOURCE, setup, steps=6, warmup=2)


def with_room(job: Workload, policy: Policy) -> Workload:
    """The job with automatic caches for a policy that keeps all rows."""
    return replace(
        job,
        setup=replace(job.setup, cache=AUTO_CACHE if policy.sync.whole_tables else job.setup.cache),
    )


def texts_of(name: str, factory: Factory) -> list[str]:
    """The name alone, with each option by key, with all options by key, and by position."""
    values = VALUES.get(name, {})
    options = list(signature(factory).parameters)
    assert set(options) <= set(values), f"no test value for an option of {name}"
    by_key = [f"{key}={values[key]}" for key in options]
    texts = [name, *(f"{name}({option})" for option in by_key)]
    if by_key:
        texts += [
            f"{name}({', '.join(by_key)})",
            f"{name}({','.join(values[key] for key in options)})",
        ]
    return texts


SYSTEM_TEXTS = [text for name, factory in SYSTEMS.items() for text in texts_of(name, factory)]
PART_TEXTS = [
    f"{kind}={text}"
    for kind, entries in KINDS.items()
    for name, factory in entries.items()
    for text in texts_of(name, factory)
]


@pytest.mark.parametrize("text", SYSTEM_TEXTS)
def test_every_system_runs_with_every_option(text: str) -> None:
    policy = make_policy(text)
    assert policy.name == text
    assert policy.workers == "all"
    job = job_of()
    if policy.sync.shared_memory:
        job = replace(job, setup=replace(job.setup, cluster=job.setup.cluster.together()))
    measure_named(text, with_room(job, policy))


def test_simulation_of_in_place_refuses_several_hosts() -> None:
    fault = "policy in-place: rows are trained where the shards keep them, so all workers and "
    fault += "shards must be on one host, here and in --network (docs/cluster.md)"
    with pytest.raises(ValueError, match=re.escape(fault)):
        measure_named("in-place", job_of())


def test_in_place_moves_only_gradients_of_shared_rows() -> None:
    job = job_of("adagrad")
    job = replace(job, setup=replace(job.setup, cluster=job.setup.cluster.together()))
    for step in simulate_steps(make_policy("in-place"), job):
        rows_I = step.traffic.rows_WKIP.sum((0, 1, 3)).tolist()
        assert rows_I[:2] == [0, 0]
        assert rows_I[2] > 0
        assert rows_I[3] == 0
        assert step.time.total_s == 0


@pytest.mark.parametrize("text", PART_TEXTS)
def test_every_policy_part_runs_with_every_option(text: str) -> None:
    policy = make_policy(text)
    assert policy.name == text
    measure_named(text, with_room(job_of(), policy))


def test_mixed_policy_has_the_named_parts() -> None:
    policy = make_policy("  evict=clairvoyant(9)   dispatch=esd(0.5, ties=any) sync=het( 10 )  ")
    assert policy.dispatch.name == "esd"
    assert policy.sync.name == "het(10)"
    assert policy.evict.name == "clairvoyant"
    assert policy.lookahead >= 9
    assert policy.sync.bound == 10
    assert not policy.exact


def test_mixed_policy_fills_missing_parts_with_defaults() -> None:
    policy = make_policy("dispatch=esd")
    assert (policy.sync.name, policy.evict.name, policy.workers) == ("on-demand", "lru", "all")
    assert make_policy("sync=on-demand").dispatch.name == "block"


@pytest.mark.parametrize(
    "text", ["esd(1)", " esd( 1 ) ", "esd (alpha = 1)", "esd( alpha=1 ,ties=block)"]
)
def test_blanks_in_a_policy_name_change_nothing(text: str) -> None:
    plain, spaced = measure_named("esd(1)", job_of()), measure_named(text, job_of())
    assert spaced.transmission_cost_s == plain.transmission_cost_s
    assert np.array_equal(spaced.traffic.rows_WKIP, plain.traffic.rows_WKIP)


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("esd(1, workers=fast)", "fast"),
        ("vanilla(workers=0+2)", "0+2"),
        ("dispatch=esd workers=0+1", "0+1"),
        ("unbounded(herald, workers=fast)", "fast"),
    ],
)
def test_every_policy_accepts_a_workers_option(text: str, workers: str) -> None:
    assert make_policy(text).workers == workers


def test_catalog_states_the_properties_of_each_system() -> None:
    exact = {name: make_policy(name).exact for name in SYSTEMS}
    assert exact == dict.fromkeys(SYSTEMS, True) | dict.fromkeys(("het", "asp", "ssp"), False)
    assert make_policy("het(0)").exact
    changed = {name for name in SYSTEMS if make_policy(name).order_changed}
    assert changed == {"fae", "scars"}
    assert {name for name in SYSTEMS if make_policy(name).unbounded} == {"unbounded"}
    assert make_policy("bagpipe").lookahead == make_policy("bagpipe(200)").lookahead >= 200
    assert make_policy("bagpipe(7)").lookahead == make_policy("bagpipe").lookahead - 193
    assert make_policy("het").sync.bound == 100


NAMES = "nocache, vanilla, asp, ssp, allreduce, het, herald, esd, fae, scars, bagpipe, embroute, "
NAMES += "in-place, unbounded, lower-bound"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "--policy: expected a name, got an empty text"),
        ("   ", "--policy: expected a name, got an empty text"),
        ("lru", f"no policy 'lru' (there are {NAMES})"),
        ("ESD(1)", f"no policy 'ESD' (there are {NAMES})"),
        ("dispatch=best", "no dispatch 'best' (there are block, robin, herald, esd)"),
        ("sync=swapped", "no sync 'swapped' (there are none, write-through, on-demand, "),
        ("evict=fifo", "no evict 'fifo' (there are lru, lfu, light-lfu, clairvoyant, stale-first)"),
        ("esd(1.5)", "esd: alpha must be between 0 and 1, got 1.5"),
        ("esd(-0.1)", "esd: alpha must be between 0 and 1, got -0.1"),
        ("esd(much)", "esd: alpha must be a number, got 'much'"),
        ("esd(1, ties=first)", "esd: ties must be block or any, got 'first'"),
        ("herald(ties=any)", "herald: ties must be rotate or first, got 'any'"),
        ("herald(0)", "herald: tables, if not all or auto, must be between 1 and"),
        ("het(-1)", "het: bound must be between 0 and"),
        ("het(1.5)", "het: bound must be a whole number, got 1.5"),
        ("het(order=fifo)", "order must be one of lru, lfu, light-lfu, got 'fifo'"),
        ("bagpipe(0)", "lookahead must be between 1 and 10000, got 0"),
        ("fae(rate=0)", "fae: rate, if not auto, must be between 1 and 100, got 0"),
        ("fae(buffer=1)", "fae: buffer must be between 2 and"),
        ("fae(hot=lots)", "fae: hot must look like 0.1, 10%, 5000rows or 256MB, got 'lots'"),
        ("fae(shuffle=maybe)", "fae: shuffle must be yes or no, got 'maybe'"),
        (
            "scars(rate=50)",
            "scars has no option 'rate' (options: hot, buffer, sample, shuffle, seed)",
        ),
        ("vanilla(1)", "vanilla takes no arguments, got 'vanilla(1)'"),
        ("esd(1, block, 3)", "esd takes at most 2 arguments"),
        ("esd(1, alpha=0)", "esd: option 'alpha' is given twice"),
        ("esd(alpha=1, alpha=0)", "option 'alpha' is given twice"),
        ("vanilla(workers=0, workers=1)", "option 'workers' is given twice"),
        ("unbounded(in-place)", "unbounded: of=in-place has no caches that could fill"),
        ("unbounded(fast)", f"no policy 'fast' (there are {NAMES})"),
    ],
)
def test_bad_policy_names_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        make_policy(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("dispatch=herald sync=none", "dispatch=herald prefers workers by what they have cached, "),
        ("dispatch=esd sync=none", "and sync=none caches nothing; use dispatch=block"),
        ("sync=none evict=lfu", "sync=none caches nothing, so evict= has no meaning"),
        ("dispatch=esd dispatch=block", "dispatch is given twice"),
        ("dispatch=esd cache=3", "expected dispatch=, sync=, evict= or workers=, got 'cache=3'"),
        ("dispatch=esd herald", "expected dispatch=, sync=, evict= or workers=, got 'herald'"),
    ],
)
def test_contradicting_policy_parts_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)) as caught:
        make_policy(text)
    assert str(caught.value).startswith(f"--policy {text!r}: ")


@pytest.mark.parametrize("text", ["het(10)", "sync=het(1)"])
def test_het_refuses_adam(text: str) -> None:
    fault = f"--optimizer adam: {text} merges deltas, and deltas of adam do not add up; use sgd,"
    with pytest.raises(ValueError, match=re.escape(fault)):
        start(make_policy(text), job_of("adam").setup)


def test_het_0_accepts_adam() -> None:
    measure_named("het(0)", job_of("adam"))


def test_het_0_equals_vanilla_with_robin_dispatch() -> None:
    bounded = list(simulate_steps(make_policy("het(0)"), job_of("adagrad")))
    vanilla = make_policy("dispatch=robin sync=write-through evict=lru")
    for left, right in zip(bounded, simulate_steps(vanilla, job_of("adagrad")), strict=True):
        for field in fields(Traffic):
            name = field.name
            assert np.array_equal(getattr(left.traffic, name), getattr(right.traffic, name))
        assert left.time.total_s == right.time.total_s


def total(cost_SW: F64, worker_S: I32) -> float:
    return float(cost_SW[np.arange(len(worker_S)), worker_S].sum())


@st.composite
def dealings(draw: st.DrawFn) -> tuple[F64, I64]:
    """Sample costs, random or summed over rows as in ESD, and quotas."""
    samples, workers = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 9999)))
    quotas = np.bincount(random.integers(0, workers, samples), minlength=workers)
    if draw(st.booleans()):
        return random.random((samples, workers)), quotas
    # Few distinct rows, each up to date at few workers, on links of two speeds: many ties.
    seconds_W = np.where(np.arange(workers) % 2, 10.0, 1.0)
    stale_UW = random.random((12, workers)) < 0.7
    row_cost_UW = stale_UW * (seconds_W + random.choice([0.0, 1.0, 10.0], (12, 1)))
    rows_SF = random.integers(0, 12, (samples, 4))
    cost_SW: F64 = row_cost_UW[rows_SF].sum(1)
    return cost_SW, quotas


@settings(max_examples=sized(50, 200))
@given(dealings())
def test_esd_opt_never_costs_more_than_heu(dealing: tuple[F64, I64]) -> None:
    cost_SW, quotas_W = dealing
    best = hybrid(cost_SW, quotas_W, 1.0)
    for alpha in (0.0, 0.3, 0.5, 0.9):
        other = hybrid(cost_SW, quotas_W, alpha)
        assert (np.bincount(other, minlength=len(quotas_W)) == quotas_W).all()
        assert total(cost_SW, best) <= total(cost_SW, other) + 1e-9
    assert (np.bincount(best, minlength=len(quotas_W)) == quotas_W).all()


def test_esd_heu_serves_the_largest_saving_first() -> None:
    # All want worker 0; the third loses most elsewhere, so it goes first.
    cost_SW = np.array([[1.0, 2.0], [1.0, 5.0], [1.0, 9.0]])
    assert hybrid(cost_SW, np.array([1, 2]), 0.0).tolist() == [1, 1, 0]
    # Worker 2 may not take any: its costs decide nothing.
    closed_SW = np.array([[1.0, 2.0, -900.0], [1.0, 5.0, 0.0], [1.0, 9.0, 0.0]])
    assert hybrid(closed_SW, np.array([1, 2, 0]), 0.0).tolist() == [1, 1, 0]


@given(st.integers(0, 999))
def test_esd_heu_ignores_what_all_samples_cost_at_a_worker(seed: int) -> None:
    """Quotas are full in the end, so a surcharge of a worker for any sample changes no choice."""
    random = np.random.default_rng(seed)
    cost_SW = random.integers(0, 100, (16, 4)) + random.permutation(64).reshape(16, 4) / 64
    surcharge_W, quotas_W = random.integers(0, 1000, 4), np.array([8, 4, 3, 1])
    dealt_S = hybrid(cost_SW, quotas_W, 0.0)
    assert hybrid(cost_SW + surcharge_W, quotas_W, 0.0).tolist() == dealt_S.tolist()


def test_esd_alpha_splits_samples_between_heu_and_opt() -> None:
    # Heu takes the clearest preference of the three (sample 0); Opt deals the other two.
    cost_SW = np.array([[0.0, 9.0, 9.0], [5.0, 1.0, 2.0], [5.0, 1.0, 4.0]])
    assert hybrid(cost_SW, np.array([1, 1, 1]), 2 / 3).tolist() == [0, 2, 1]


def test_herald_scores_the_tables_that_a_step_has_time_for() -> None:
    lookups_K = np.array([900_000, 90_000, 10_000])  # the plan without scores takes 100 ms
    times_s = (0.0, 0.1, 0.1099, 0.1109, 0.1111, 0.1112, 9.0)
    found = [tables_in_time(lookups_K, step_s) for step_s in times_s]
    assert found == [1, 1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(("bytes_s", "tables"), [(1e6, "all"), (1e15, "1")])
def test_herald_auto_scores_all_tables_in_long_steps_and_one_in_short_steps(
    bytes_s: float, tables: str
) -> None:
    long = long_workload("sgd")
    cluster = long.setup.cluster
    hosts = [replace(host, up_bytes_s=bytes_s, down_bytes_s=bytes_s) for host in cluster.hosts]
    setup = replace(long.setup, cluster=replace(cluster, hosts=tuple(hosts)))
    work, dealt = replace(long, setup=setup), []
    for name in ("herald(tables=auto)", f"herald(tables={tables})"):
        policy = make_policy(name)
        state = work.start(policy)
        dealt.append([step.plan.worker_S.tolist() for step in work.plans(policy, state)])
        if "auto" in name:
            assert state.memory(Infrequency).step_s_1 > 0
    assert dealt[0] == dealt[1]
    other = make_policy("herald(tables=1)" if tables == "all" else "herald")
    others = [step.plan.worker_S.tolist() for step in work.plans(other, work.start(other))]
    assert dealt[0] != others
