"""The adviser: its predictions agree with the simulator, and its errors explain what is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import embroute
from embroute.api.advice import Advice, worker_counts
from embroute.cli.main import cli
from embroute.config.cluster import GIGABIT, Cluster, Host, Worker
from embroute.config.cluster_file import open_cluster, read_cluster, write_cluster
from embroute.config.data_options import DataOptions
from embroute.config.run_file import read_run_file, write_run_file
from embroute.config.run_options import AdviceOptions, RunConfig
from embroute.data.open import open_source
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy
from embroute.report.advice_table import against, recommended
from embroute.simulator import advisor
from embroute.simulator.advisor import (
    FULL_SPAN,
    NUM_SIMULATED,
    Configuration,
    Constraints,
    Recommendation,
    configurations,
    first_samples,
    hot_rows,
    least_memory,
    only_fast,
    predict_vanilla,
    recommendations,
    trim_cache,
    workload_of,
)
from embroute.simulator.simulation import measure
from embroute.train.run_ranks import network_of

pytestmark = pytest.mark.xdist_group("advise")

POLICIES = ("vanilla", "herald", "esd(1)")


def wish(network: str = "edge-4", dim: int = 512, compute_ms: float = 0.05) -> Constraints:
    source = first_samples(open_source("online-retail", DataOptions()), 60_000)
    cluster = replace(open_cluster(network), compute_s_per_sample=compute_ms / 1e3)
    return Constraints(
        Setup(source.schema, cluster, dim), source, 40e6, (64, 128), (4, 2), POLICIES
    )


def quiet(text: str) -> None:
    assert text


@pytest.fixture(scope="module")
def advices() -> list[Recommendation]:
    return recommendations(wish(), quiet)


def test_advice_lists_simulated_configurations_first(advices: list[Recommendation]) -> None:
    assert [one.outcome is not None for one in advices[:4]] == [True, True, True, False]
    assert len(advices) == 2 * 2 * len(POLICIES)
    speeds = [one.samples_s for one in advices]
    assert speeds[0] >= 0.98 * max(speeds[:3])  # the first one's cache was trimmed
    assert speeds[3:] == sorted(speeds[3:], reverse=True)


def test_first_advice_is_near_the_best_of_all(advices: list[Recommendation]) -> None:
    given = wish()
    every = [
        choice.batch
        / measure(make_policy(choice.policy), workload_of(given, choice, FULL_SPAN)).step_time_s
        for choice in configurations(given)
    ]
    assert advices[0].samples_s >= 0.95 * max(every)


def test_advised_cache_is_smaller_and_nearly_as_fast(advices: list[Recommendation]) -> None:
    given, first = wish(), advices[0]
    most = max(choice.cache_rows for choice in configurations(given))
    assert first.choice.cache_rows < most
    whole = replace(first.choice, cache_rows=most)
    found = measure(make_policy(whole.policy), workload_of(given, whole, FULL_SPAN))
    assert first.step_s <= 1.021 * found.step_time_s


@pytest.mark.parametrize("network", ["edge-4", "dc-4"])
def test_theory_of_vanilla_is_near_the_simulator(network: str) -> None:
    given = wish(network, compute_ms=0.0)
    choice = Configuration("vanilla", (0, 1, 2, 3), 512, 4000)
    found = measure(make_policy("vanilla"), workload_of(given, choice, FULL_SPAN)).step_time_s
    assert predict_vanilla(given, choice) == pytest.approx(found, rel=0.1)


def test_too_little_memory_error_names_the_memory_needed() -> None:
    given = replace(wish(), memory_bytes=1e6)
    with pytest.raises(ValueError, match=r"--memory-per-worker 1MB: one step needs at least"):
        configurations(given)
    enough = least_memory(given, 4, 64 * 4)
    assert configurations(replace(given, memory_bytes=enough))


def test_advice_explains_left_out_workers(advices: list[Recommendation]) -> None:
    given = wish()
    few = [one for one in advices if len(one.choice.workers) == 2]
    many = [one for one in advices if len(one.choice.workers) == 4]
    assert only_fast(given, [*many, *few]) is None
    told = only_fast(given, [*few, *many])
    assert told is not None
    assert told.startswith("2 of 4 workers are left out")


def test_advice_explains_why_the_first_wins(advices: list[Recommendation]) -> None:
    first, rival = advices[:2]
    slow = replace(rival, predicted_s=2 * first.step_s, outcome=None)
    assert "more samples/s than" in against(first, slow)
    assert first.outcome is not None
    alike = replace(
        first, outcome=replace(first.outcome, decision_ms=10 * first.outcome.decision_ms)
    )
    assert "trains as many samples/s as" in against(first, alike)
    assert "and decides in" in against(first, alike)
    assert "decides" not in against(alike, first)
    slower = replace(alike, outcome=replace(first.outcome, decision_ms=432.1))
    assert against(first, slower).endswith(" ms, not 432")


def test_advice_against_the_same_policy_says_what_differs(advices: list[Recommendation]) -> None:
    first = advices[0]
    larger = replace(first.choice, batch=2 * first.choice.batch)
    slow = replace(first, choice=larger, predicted_s=4 * first.step_s, outcome=None)
    policy, workers = first.choice.policy, len(first.choice.workers)
    samples, cache = first.choice.batch // workers, f"caches of {first.choice.cache_rows:,} rows"
    told = against(first, slow)
    assert told.startswith(f"{policy} on {workers} workers with {samples} samples and {cache} ")
    assert f"than {policy} on {workers} workers with {2 * samples} samples and {cache}" in told


def test_recommendation_without_a_cache_names_none() -> None:
    choice = Configuration("nocache", (0, 1), 128, 4000)
    told = recommended(Recommendation(choice, 0.01))
    place = "nocache on 2 workers with 64 samples"
    assert told == f"Recommended: {place}: 12,800 samples/s, 10 ms a step"
    dataset = embroute.open_data("online-retail(negatives=1)", limit=100)
    options = AdviceOptions(network="dc-2", dim=64)
    run = Advice(dataset, options, wish(), (Recommendation(choice, 0.01),)).run
    assert "cache" not in run.changed()


def test_run_file_has_numbers_without_quotes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    columns = DataOptions(label="007", categorical=("1",))
    run = RunConfig(dim="64", hidden="32", data_options=columns)
    write_run_file(run, path)
    assert "dim: 64\n" in path.read_text()
    assert "hidden: 32\n" in path.read_text()
    assert "label: '007'\n" in path.read_text()
    again = read_run_file(path)
    assert (again.dim, again.hidden) == ("64", "32")
    assert again.data_options == columns


def test_trimmed_cache_holds_every_step_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the smallest cache were as good in the few steps that are simulated."""
    monkeypatch.setattr(advisor, "_simulate", lambda *_: None)
    monkeypatch.setattr(advisor, "_outcome_if_as_good", lambda *_: "as good")
    given = wish("dc-4", dim=16, compute_ms=1.0)
    choice = Configuration("vanilla", (0, 1, 2, 3), 512, 20_000)
    setup = workload_of(given, choice, FULL_SPAN).setup
    found = trim_cache(given, Recommendation(choice, 1.0), quiet).choice
    assert 2 * setup.step_rows_A.sum() <= found.cache_rows < 4 * setup.step_rows_A.sum()


def test_advice_reports_the_hot_set_of_fae() -> None:
    given = wish()
    assert hot_rows(given, Configuration("esd(1)", (0, 1, 2, 3), 512, 4000)) == 0
    assert 0 < hot_rows(given, Configuration("fae", (0, 1, 2, 3), 512, 4000)) <= 4000


def test_trimmed_cache_moves_hardly_more_bytes() -> None:
    """Long compute hides transfers, so the step time alone would allow the smallest cache."""
    given = wish("dc-4", dim=16, compute_ms=1.0)
    choice = Configuration("esd(1)", (0, 1, 2, 3), 512, 8000)
    whole = measure(make_policy("esd(1)"), workload_of(given, choice, FULL_SPAN))
    found = trim_cache(given, Recommendation(choice, 1.0, whole), quiet).outcome
    assert found is not None
    assert found.traffic.bytes_WKIP.sum() <= 1.1 * whole.traffic.bytes_WKIP.sum()
    assert found.step_time_s <= 1.02 * whole.step_time_s


def test_workers_option_lists_worker_counts() -> None:
    assert worker_counts(None, 8) == (8, 4, 2, 1)
    assert worker_counts("2..4", 8) == (4, 3, 2)
    assert worker_counts("4,8", 8) == (8, 4)
    with pytest.raises(ValueError, match=r"--workers 9: between 1 and 8"):
        worker_counts("9", 8)


def test_written_cluster_file_reads_back_equal(tmp_path: Path) -> None:
    cluster = open_cluster("uneven-4").only((0, 3))
    write_cluster(cluster, tmp_path / "net.yaml")
    assert read_cluster(tmp_path / "net.yaml") == cluster


@pytest.mark.full
def test_advise_command_writes_a_run_file(tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    arguments = ["--network", "edge-4", "--workers", "2,4", "--batch", "64", "--dim", "256"]
    arguments += ["--memory-per-worker", "60MB", "--compute-ms-per-sample", "0"]
    result = CliRunner().invoke(cli, ["advise", *arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    run = read_run_file(out)
    plain = ("nocache", "vanilla", "bagpipe", "herald", "esd(1)")
    assert run.policy in (*plain, "embroute(effort=auto)")
    assert run.workers in (2, 4)
    assert network_of(run).num_workers == run.workers


def test_advise_command_chooses_in_place_on_one_machine(tmp_path: Path) -> None:
    out, network = tmp_path / "run.yaml", tmp_path / "box.yaml"
    network.write_text("hosts: {box: {link: 1 gbit}}\nworkers: [box, box]\nshards: [box]\n")
    arguments = ["--network", str(network), "--batch", "64", "--memory-per-worker", "60MB"]
    arguments += ["--compute-ms-per-sample", "0.01", "--out", str(out)]
    result = CliRunner().invoke(cli, ["advise", *arguments])
    assert result.exit_code == 0, result.output
    assert "Recommended: in-place on 2 workers with " in result.stdout
    assert result.stderr.splitlines()[-1] == f"next: embroute train {out}"
    run = read_run_file(out)
    assert (run.policy, run.workers, run.cache) == ("in-place", 2, RunConfig().cache)


def test_advice_in_python_shows_itself_and_its_run(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    box = Cluster((Host("box", GIGABIT, GIGABIT),), (Worker(0), Worker(0)), (0,))
    options = {"network": box, "batch": 64, "memory_per_worker": "60MB"}
    advice = embroute.advise(compute_ms_per_sample=0.01, workers=[2], **options)
    frame = advice.to_dataframe()
    assert frame["policy"][0] == advice.best.policy == advice.run.policy == "in-place"
    assert frame["simulated_step_s"].null_count() == len(frame) - NUM_SIMULATED
    assert frame["samples_per_s"][0] == advice.recommendations[0].samples_s
    assert "in-place" in str(advice)
    assert "in-place" in advice._repr_html_()
    assert advice.to_html(tmp_path / "page.html") == (tmp_path / "page.html").read_text()
    assert advice.plot().renderers
    run = advice.write(tmp_path / "mine.yaml")
    assert read_run_file(tmp_path / "mine.yaml") == run
    assert (run.out, network_of(run).num_workers) == ("mine", 2)
    assert read_cluster(tmp_path / "mine.network.yaml") == box


def test_advice_names_the_wrong_argument() -> None:
    with pytest.raises(
        ValueError, match="memory_per_worker= must look like 4000000 or 4MB, got '3%'"
    ):
        embroute.advise(memory_per_worker="3%")
    with pytest.raises(TypeError, match="no option 'memory'"):
        embroute.advise(memory="8GB")


@pytest.mark.full
def test_unreachable_target_is_refused() -> None:
    arguments = ["advise", "--network", "edge-4", "--batch", "64", "--workers", "4"]
    result = CliRunner().invoke(cli, [*arguments, "--target-samples-per-s", "1e9"])
    assert isinstance(result.exception, ValueError)
    assert "the best found is" in str(result.exception)
