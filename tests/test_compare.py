"""`embroute compare` and `simulate`: their tables, JSON and CSV agree."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from embroute.cli.main import cli
from embroute.config.run_options import DEFAULT_POLICY
from embroute.report.comparison_table import rough
from embroute.simulator.step_table import STEP_COLUMNS

pytestmark = pytest.mark.xdist_group("compare")

MANUAL = Path(__file__).parent.parent / "docs" / "compare-json.md"
SHORT = ("--steps", "14", "--warmup", "4")
# A job whose rows have 256 bytes, gradients too.
WIDE_SGD = ("--data", "online-retail", "--dim", "64", "--optimizer", "sgd", "--cache", "0.1")
MOVED = ("miss_pull", "stale_pull", "update_push", "evict_push", "drain", "allreduce")
ROWS = (*MOVED, "first_fill")
BYTES = (*MOVED, "samples", "plans", "checks", "dense", "first_fill")
NAMES = (
    "herald",
    "het(3)",
    "fae(hot=300rows)",
    "scars(hot=300rows)",
    "lower-bound",
    "unbounded",
    "esd(0.5, ties=any)",
    "esd(1,workers=fast)",
    "dispatch=robin sync=on-demand",
)

TOP = {
    "version": int,
    "data": str,
    "table_rows": int,
    "workers": int,
    "batch_size": int,
    "cache_rows": int,
    "worker_cache_rows": list,
    "widths": list,
    "optimizer": str,
    "steps": int,
    "warmup": int,
    "seed": int,
    "policies": dict,
}
POLICY = {
    "rows": dict,
    "bytes": dict,
    "workers": list,
    "measured_steps": int,
    "per_worker": list,
    "transmission_cost_s": float,
    "step_time_s": float,
    "hit_rate": float,
    "decision_ms": float,
    "exact": bool,
    "order_changed": bool,
    "hot_steps": int,
    "replicated_rows": int,
    "reference": bool,
}
WORKER = {
    "worker": int,
    "host": str,
    "samples": int,
    "rows": dict,
    "bytes": dict,
    "transmission_cost_s": float,
}
Found = dict[str, Any]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def compare(folder: Path, *arguments: str) -> Found:
    """The JSON of a comparison."""
    path = folder / "out.json"
    result = run("compare", *arguments, "--json", str(path))
    assert result.exit_code == 0, result.output
    found: Found = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("compare")
    options = ("--dense-bytes", "1KB", "--compute-ms-per-sample", "0.001", *WIDE_SGD)
    return compare(folder, "--policies", ",".join(NAMES), *SHORT, *options)


def check(value: Found, shape: dict[str, type], where: str) -> None:
    """Assert exactly these keys, in this order, with values of exactly these types."""
    assert list(value) == list(shape), where
    for key, kind in shape.items():
        assert type(value[key]) is kind, f"{where}: {key} is {value[key]!r}"


def check_counts(entry: Found, where: str) -> None:
    assert tuple(entry["rows"]) == ROWS, where
    assert tuple(entry["bytes"]) == BYTES, where
    for counts in (entry["rows"], entry["bytes"]):
        assert all(type(count) is int for count in counts.values()), where
        assert all(count >= 0 for kind, count in counts.items() if kind != "drain"), where


def test_compare_json_has_the_documented_shape(found: Found) -> None:
    check(found, TOP, "top")
    assert list(found["policies"]) == ["vanilla", *NAMES]
    for name, entry in found["policies"].items():
        nothing = dict.fromkeys(("measured_steps", "hit_rate", "decision_ms"), type(None))
        check(entry, POLICY | (nothing if name == "lower-bound" else {}), name)
        check_counts(entry, name)
        for worker in entry["per_worker"]:
            check(worker, WORKER, name)
            check_counts(worker, name)
        assert entry["workers"] == [worker["worker"] for worker in entry["per_worker"]]


def test_manual_names_every_json_field() -> None:
    text = MANUAL.read_text()
    for key in {*TOP, *POLICY, *WORKER, *BYTES}:
        assert f"`{key}`" in text, key


def test_compare_json_describes_the_run(found: Found) -> None:
    told = {key: found[key] for key in TOP if key not in ("policies", "version")}
    assert told == {
        "data": "online-retail",
        "table_rows": 38605,
        "workers": 8,
        "batch_size": 1024,
        "cache_rows": 3860,
        "worker_cache_rows": [3860] * 8,
        "widths": [64] * 5,
        "optimizer": "sgd",
        "steps": 14,
        "warmup": 4,
        "seed": 0,
    }
    flags = {
        name: (entry["exact"], entry["order_changed"], entry["reference"])
        for name, entry in found["policies"].items()
    }
    plain = dict.fromkeys(flags, (True, False, False))
    assert flags == plain | {
        "het(3)": (False, False, False),
        "fae(hot=300rows)": (True, True, False),
        "scars(hot=300rows)": (True, True, False),
        "unbounded": (True, False, True),
        "lower-bound": (True, False, True),
    }


def real(found: Found) -> list[tuple[str, Found]]:
    return [(name, entry) for name, entry in found["policies"].items() if entry["per_worker"]]


def test_values_of_workers_sum_to_the_total(found: Found) -> None:
    for name, entry in real(found):
        for kind in BYTES:
            total = sum(worker["bytes"][kind] for worker in entry["per_worker"])
            if kind == "plans":  # the shards' lists come on top: a number a row
                total += 4 * sum(entry["rows"][kind] for kind in MOVED[:4])
            assert entry["bytes"][kind] == total, (name, kind)
        for kind in MOVED[:-1]:
            total = sum(worker["rows"][kind] for worker in entry["per_worker"])
            assert entry["rows"][kind] == total, (name, kind)
        assert {w["rows"]["allreduce"] for w in entry["per_worker"]} == {entry["rows"]["allreduce"]}
        costs = [worker["transmission_cost_s"] for worker in entry["per_worker"]]
        assert sum(costs) == pytest.approx(entry["transmission_cost_s"]), name
        assert sum(w["samples"] for w in entry["per_worker"]) in (10240, 10240 + 1024)


def test_transmission_cost_is_bytes_over_bandwidth(found: Found) -> None:
    for name, entry in real(found):
        cost = 0.0
        for worker in entry["per_worker"]:
            rate = 625e6 if worker["worker"] < 4 else 62.5e6
            cost += sum(worker["bytes"][kind] for kind in MOVED) / rate
        assert cost == pytest.approx(entry["transmission_cost_s"], rel=1e-6), name


def test_bytes_equal_rows_times_256(found: Found) -> None:
    for name, entry in found["policies"].items():
        for kind in MOVED[:-1]:
            assert entry["bytes"][kind] == 256 * entry["rows"][kind], (name, kind)
        n = len(entry["workers"]) or 1
        # Each worker's part is rounded.
        reduced = 4 * (n - 1) / n * 256 * entry["rows"]["allreduce"] * n
        assert entry["bytes"]["allreduce"] == pytest.approx(reduced, abs=n), name
        if entry["measured_steps"]:
            ring = 4 * (n - 1) * 1000  # where gradients of rows go with them
            by_shard = 2 * n * 1000 if n > 1 else 0
            each = ring if entry["rows"]["allreduce"] else by_shard
            dense = each * entry["measured_steps"]
            assert entry["bytes"]["dense"] == pytest.approx(dense, abs=n), name


def test_lower_bound_is_below_all_exact_policies(found: Found) -> None:
    least = found["policies"]["lower-bound"]
    for name, entry in real(found):
        if entry["exact"] and not entry["order_changed"] and not entry["reference"]:
            assert least["transmission_cost_s"] <= entry["transmission_cost_s"], name
            assert least["step_time_s"] <= entry["step_time_s"], name


def test_workers_fast_reports_only_the_chosen_workers(found: Found) -> None:
    fast = found["policies"]["esd(1,workers=fast)"]
    assert 0 < len(fast["workers"]) < 8
    assert fast["workers"] == list(range(len(fast["workers"])))
    assert [worker["host"] for worker in fast["per_worker"]] == [f"w{i}" for i in fast["workers"]]


WIDE = "dispatch=esd(0.25, ties=any) sync=until-last-use(30) evict=clairvoyant(30)"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), marks=pytest.mark.full),
        ("--policies", f"{WIDE},esd(1,workers=fast),lower-bound"),
        ("--policies", WIDE, "--dim", "100000", "--compute-ms-per-sample", "1e9"),
        ("--policies", "herald", "--dim", "1"),
    ],
)
def test_compare_output_fits_80_columns_without_colours(arguments: tuple[str, ...]) -> None:
    result = run("compare", *arguments, *SHORT)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.output  # nothing is cut


def test_the_default_policy_of_train_stays_in_one_line_of_80_columns() -> None:
    result = run("compare", "--policies", DEFAULT_POLICY, "--steps", "12")
    assert any(line.split()[:1] == [DEFAULT_POLICY] for line in result.stdout.splitlines())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_compare_says_that_one_host_has_no_transfers(tmp_path: Path) -> None:
    network = tmp_path / "box.yaml"
    network.write_text("hosts: {box: {link: 1 gbit}}\nworkers: [box, box]\nshards: [box]\n")
    policies = "in-place,vanilla,lower-bound"
    result = run("compare", "--network", str(network), "--policies", policies, "--steps", "12")
    assert result.exit_code == 0, result.output
    assert "all workers and shards are on one host" in result.stdout


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0441, "0.044"), (4.41, "4.4"), (99.7, "100"), (130.4, "130"), (44100.0, "44k"), (0.0, "0")],
)
def test_rough_numbers_have_no_exponent(value: float, text: str) -> None:
    assert rough(value) == text


def cells(output: str, name: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.strip().startswith(name))
    return line.split()


def test_compare_table_shows_ratios_to_vanilla(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("--policies", "herald,het(5),fae,lower-bound", *SHORT, "--json", str(path))
    output = run("compare", *arguments).stdout
    policies = json.loads(path.read_text())["policies"]
    vanilla = policies["vanilla"]
    for name, mark in (("herald", ""), ("het(5)", "*"), ("fae", "~"), ("lower-bound", "")):
        row, entry = cells(output, name), policies[name]
        assert row[0] == name + mark
        cost = entry["transmission_cost_s"] / vanilla["transmission_cost_s"]
        assert row[5] == f"{cost:.2f}"
        assert row[7] == f"{entry['step_time_s'] / vanilla['step_time_s']:.2f}"
    assert cells(output, "vanilla")[5] == cells(output, "vanilla")[7] == "1.00"
    assert cells(output, "lower-bound")[8:] == ["-", "-"]


def test_compare_adds_vanilla_once(tmp_path: Path) -> None:
    assert list(compare(tmp_path, "--policies", "herald", *SHORT)["policies"]) == [
        "vanilla",
        "herald",
    ]
    kept = compare(tmp_path, "--policies", "herald, vanilla", *SHORT)["policies"]
    assert list(kept) == ["herald", "vanilla"]


def test_compare_lists_reference_policies_last() -> None:
    output = run("compare", "--policies", "lower-bound,unbounded,vanilla,herald", *SHORT).output
    order = [output.index(f" {name}") for name in ("vanilla", "herald", "lower-bound", "unbounded")]
    assert order == sorted(order)


@pytest.mark.full
def test_compare_omits_default_policies_that_refuse_adam() -> None:
    result = run("compare", *SHORT, "--optimizer", "adam")
    assert result.exit_code == 0
    assert "left out: het(100), which cannot train with adam" in result.stderr
    assert " het" not in result.stdout


def test_compare_reports_data_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("--policies", "fae", "--limit", "9000", "--warmup", "2", "--json", str(path))
    result = run("compare", *arguments)
    assert "the data ended after 9 of 90 steps" in result.stderr
    policies = json.loads(path.read_text())["policies"]
    assert policies["vanilla"]["measured_steps"] == 7


Write = Callable[..., tuple[list[str], list[dict[str, str]]]]


@pytest.fixture
def steps_of(tmp_path: Path) -> Write:
    """Columns and lines of `simulate`."""

    def steps(*arguments: str) -> tuple[list[str], list[dict[str, str]]]:
        path = tmp_path / "steps.csv"
        result = run("simulate", "--csv", str(path), *arguments)
        assert result.exit_code == 0, result.output
        assert f"written: {path}" in result.stderr
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            return list(reader.fieldnames or ()), list(reader)

    return steps


@pytest.mark.parametrize("name", ["herald", "fae(hot=300rows)", "esd(1,workers=fast)"])
def test_simulate_steps_sum_to_the_comparison(name: str, steps_of: Write, tmp_path: Path) -> None:
    columns, lines = steps_of("--policy", name, *SHORT)
    entry = compare(tmp_path, "--policies", name, *SHORT)["policies"][name]
    assert columns == list(STEP_COLUMNS)
    assert [int(line["step"]) for line in lines] == list(range(len(lines)))
    measured = lines[4:]
    assert len(measured) == entry["measured_steps"]
    for kind in MOVED[:4]:
        assert sum(int(line[f"{kind}_rows"]) for line in measured) == entry["rows"][kind]
        assert sum(int(line[f"{kind}_bytes"]) for line in measured) == entry["bytes"][kind]
    assert sum(int(line["allreduce_rows"]) for line in measured) == entry["rows"]["allreduce"]
    assert sum(int(line["sample_bytes"]) for line in measured) == entry["bytes"]["samples"]
    assert sum(int(line["plan_bytes"]) for line in measured) == entry["bytes"]["plans"]
    mean = sum(float(line["step_time_s"]) for line in measured) / len(measured)
    assert mean == pytest.approx(entry["step_time_s"], rel=1e-6)
    cost = sum(float(line["transmission_cost_s"]) for line in measured)
    drained = sum(
        worker["bytes"]["drain"] / (625e6 if worker["worker"] < 4 else 62.5e6)
        for worker in entry["per_worker"]
    )
    assert cost + drained == pytest.approx(entry["transmission_cost_s"], rel=1e-6)


def test_simulate_marks_hot_steps(steps_of: Write) -> None:
    _, lines = steps_of("--policy", "fae", "--steps", "40", "--warmup", "1", *WIDE_SGD)
    assert {line["hot"] for line in lines} == {"0", "1"}
    assert {int(line["samples"]) for line in lines} <= set(range(1, 1025))
    assert all(0 <= float(line["hit_rate"]) <= 1 for line in lines)
