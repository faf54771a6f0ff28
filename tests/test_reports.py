"""HTML reports: their numbers equal the JSON, and they need no network."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from embroute.cli.main import cli
from embroute.cli.report import write_report
from embroute.report.run_folder import read_history
from embroute.report.runs_page import runs_page
from embroute.report.timeline import columns_of, workers_of
from tests.pages import MOST_BYTES, block, compared, trained

pytestmark = pytest.mark.xdist_group("reports")

NAMES = ("vanilla", "het(100)", "esd(1)", "scars(hot=300rows)", "lower-bound")
OPTIONS: tuple[str, ...] = ("--policies", ",".join(NAMES), "--steps", "24", "--warmup", "4")
OPTIONS += ("--report-caches", "1rows,6%,20%", "--compute-ms-per-sample", "0.002")
OPTIONS += ("--dense-bytes", "10KB")
Made = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return compared(tmp_path_factory.mktemp("compare"), *OPTIONS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [trained(folder / name, name) for name in ("vanilla", "esd(1)")]


def files_of(page: Path) -> dict[str, str]:
    files: dict[str, str] = block(page, "files")
    return files


def test_report_page_is_small_and_needs_no_network(made: Made) -> None:
    text = made[0].read_text("utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert not re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=", text)
    assert re.findall(r"<link[^>]*href=\"([^\"]*)\"", text) == ["data:,"]
    assert "{{" not in text.split("<body>")[1].split("<main>")[0]


def test_report_page_embeds_the_json_of_compare(made: Made) -> None:
    embedded = json.loads(files_of(made[0])["comparison.json"])
    assert set(embedded.pop("report")) == {"network", "details", "sweep", "tradeoffs"}
    assert embedded == made[1]


def test_report_csv_equals_the_json(made: Made) -> None:
    rows = list(csv.DictReader(io.StringIO(files_of(made[0])["comparison.csv"])))
    assert [row["policy"] for row in rows] == list(made[1]["policies"])
    for row in rows:
        entry = made[1]["policies"][row["policy"]]
        assert float(row["transmission_cost_s"]) == entry["transmission_cost_s"]
        assert {k: int(row[f"bytes_{k}"]) for k in entry["bytes"]} == entry["bytes"]
        assert {k: int(row[f"rows_{k}"]) for k in entry["rows"]} == entry["rows"]


@pytest.mark.parametrize("unit", ["rows", "bytes"])
def test_traffic_bars_equal_the_json(made: Made, unit: str) -> None:
    columns = block(made[0], "controls")["unit"][unit]["traffic"]["data"]
    scale = 1e6 if unit == "bytes" else 1
    for i, name in enumerate(columns["label"]):
        for kind, size in made[1]["policies"][name][unit].items():
            if kind == "first_fill":  # not of the measured steps
                continue
            assert columns[kind][i] * scale == pytest.approx(size)
            drawn = columns[f"{kind}_to"][i] - columns[f"{kind}_from"][i]
            assert drawn * scale == pytest.approx(size, abs=1e-3)


def test_report_phases_sum_to_the_step_time(made: Made) -> None:
    details = json.loads(files_of(made[0])["comparison.json"])["report"]["details"]
    assert set(details) == set(NAMES) - {"lower-bound"}
    for name, detail in details.items():
        step_s = made[1]["policies"][name]["step_time_s"]
        assert sum(detail["path_s"].values()) == pytest.approx(step_s)
        for parts in zip(*detail["worker_s"].values(), strict=True):
            assert sum(parts) == pytest.approx(step_s)
        assert sum(detail["step_time_s"]) / len(detail["step_time_s"]) == pytest.approx(step_s)
        assert detail["timeline"][-1]["total_s"] == detail["step_time_s"][-1]


def test_report_links_carry_the_bytes_of_the_json(made: Made) -> None:
    """On a star, all bytes of a worker cross the link of its host."""
    details = json.loads(files_of(made[0])["comparison.json"])["report"]["details"]
    for name, detail in details.items():
        links = {link["host"]: link for link in detail["links"]}
        for worker in made[1]["policies"][name]["per_worker"]:
            link, sizes = links[worker["host"]], dict(worker["bytes"])
            del sizes["drain"], sizes["first_fill"]  # not part of the steps
            assert link["up_bytes"] + link["down_bytes"] == pytest.approx(sum(sizes.values()))
            assert 0 < link["up_busy"] <= 1
            assert 0 < link["down_busy"] <= 1


def test_cache_sweep_omits_caches_that_are_too_small(made: Made) -> None:
    sweep = json.loads(files_of(made[0])["comparison.json"])["report"]["sweep"]
    assert {(point["policy"], point["cache"]) for point in sweep} == {
        (name, cache) for name in NAMES if name != "lower-bound" for cache in ("6%", "20%")
    }
    costs = {(p["policy"], p["cache"]): p["transmission_cost_s"] for p in sweep}
    assert costs["het(100)", "20%"] < costs["het(100)", "6%"]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--report", "missing/out.html"), "--report missing/out.html: the folder"),
        (("--report", "out.html", "--report-caches", "4%,huge"), "--report-caches"),
    ],
)
def test_bad_report_options_are_refused_before_the_work(
    options: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        CliRunner().invoke(cli, ["compare", *options], catch_exceptions=False)


def test_report_page_escapes_file_names(tmp_path: Path) -> None:
    data = tmp_path / "<script>alert(1)</script>"
    data.mkdir(parents=True)
    path = data / "a.csv"
    path.write_text("x,y\n" + "\n".join(f"{i % 7},{i % 2}" for i in range(200)) + "\n")
    options: tuple[str, ...] = (
        "--data",
        str(path),
        "--categorical",
        "x",
        "--label",
        "y",
        "--policies",
        "vanilla",
    )
    options += ("--batch", "2", "--steps", "8", "--warmup", "1", "--cache", "100%")
    page, _ = compared(tmp_path, *options, "--report-caches", "none")
    assert "<script>alert" not in page.read_text("utf-8")
    assert json.loads(files_of(page)["comparison.json"])["data"] == str(path)


def test_run_report_shows_the_written_metrics(runs: list[Path]) -> None:
    for run in runs:
        page = run / "report.html"
        assert page.stat().st_size < MOST_BYTES
        (shown,) = json.loads(files_of(page)["runs.json"])
        assert shown["summary"] == json.loads((run / "summary.json").read_text())
        lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        assert shown["reports"] == [line for line in lines if "loss" in line]
        assert shown["evaluations"] == [line for line in lines if "auc" in line]
        assert len(shown["reports"]) == 40
        assert [line["step"] for line in shown["evaluations"]] == [10, 20, 30, 40]


def test_report_compares_two_runs(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    command = ["report", *map(str, runs), "--html", str(page)]
    assert CliRunner().invoke(cli, command, catch_exceptions=False).exit_code == 0
    shown = json.loads(files_of(page)["runs.json"])
    assert [entry["name"] for entry in shown] == ["vanilla", "esd(1)"]
    by_bytes = block(page, "controls")["against"]["bytes moved"]
    for i, entry in enumerate(shown):
        moved = [report["row_bytes"] / 1e6 for report in entry["reports"]]
        assert by_bytes[f"loss-{i}"]["data"]["x"] == moved


def test_run_resumed_with_fewer_workers_has_a_report(runs: list[Path], tmp_path: Path) -> None:
    lines = [json.loads(t) for t in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    for line in lines[-3:]:
        line["link_mb_per_s"] = line.get("link_mb_per_s", [])[:1]
        if "loss" not in line:
            del line["link_mb_per_s"]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "summary.json").write_text((runs[0] / "summary.json").read_text())
    write_report(tmp_path / "report.html", [tmp_path])
    assert "worker 1" in (tmp_path / "report.html").read_text()


def test_metrics_of_another_version_are_refused(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.7}\n')
    (tmp_path / "summary.json").write_text((runs[0] / "summary.json").read_text())
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: not metrics"):
        read_history(tmp_path, "run")


def test_cli_import_does_not_load_bokeh() -> None:
    load = "[embroute.cli.main.load_command(name) for name, *_ in embroute.cli.main.COMMANDS]"
    code = f"import sys, embroute.cli.main; {load}; sys.exit('bokeh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_timeline_shows_the_measured_phases_of_workers(runs: list[Path]) -> None:
    history = read_history(runs[1], "run")
    workers = workers_of(history)
    assert len(workers) == 2
    columns: dict[str, dict[str, Any]] = {p: dict(c) for p, c in columns_of(history).items()}
    assert {"compute", "wait", "early", "urgent", "update", "allreduce"} == set(columns)
    for phase, bars in columns.items():
        assert {lane[0] for lane in bars["y"]} <= set(workers)
        if phase not in ("early", "urgent"):  # nothing may move, but everyone computes
            assert {lane[0] for lane in bars["y"]} == set(workers)
        assert all(end > start >= 0 for start, end in zip(bars["from"], bars["to"], strict=True))
    # What a processor does in turn does not overlap, and leaves no gap to speak of.
    for worker in workers:
        own = sorted(
            (start, end)
            for phase in ("compute", "wait", "update", "allreduce")
            for lane, start, end in zip(
                *(columns[phase][k] for k in ("y", "from", "to")), strict=True
            )
            if lane[0] == worker
        )
        assert all(b[0] - a[1] > -0.01 for a, b in pairwise(own))
        spent = sum(end - start for start, end in own)
        assert spent == pytest.approx(own[-1][1] - own[0][0], rel=0.1)


def test_runs_without_spans_have_no_timeline(runs: list[Path], tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / name).write_text((runs[0] / name).read_text())
    history = read_history(tmp_path, "run")
    assert workers_of(history) == []
    assert "Worker by worker" not in runs_page([history])
