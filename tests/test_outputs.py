"""What commands print: results on stdout with `-`, nothing with --quiet, progress as lines."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from embroute.cli.main import cli, load_command
from embroute.config.progress import is_quiet
from embroute.simulator.step_table import STEP_COLUMNS

SHORT = ("--network", "edge-4", "--steps", "8", "--warmup", "2", "--batch", "16")


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.fixture
def clicks(tmp_path: Path) -> str:
    path = tmp_path / "clicks.csv"
    lines = [f"{i % 2},u{i % 17},i{i % 29}" for i in range(700)]
    path.write_text("\n".join(["click,user,item", *lines]) + "\n")
    return str(path)


def test_json_dash_is_the_only_text_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("compare", "--policies", "herald", "--json", "-", *SHORT)
    assert set(json.loads(result.stdout)["policies"]) == {"vanilla", "herald"}
    assert "herald" in result.stderr
    assert not list(tmp_path.iterdir())


def test_report_dash_is_a_page_on_stdout() -> None:
    arguments = ("--policies", "herald", "--report", "-", "--report-caches", "none")
    page = run("compare", *arguments, *SHORT).stdout
    assert page.startswith("<!DOCTYPE html>")
    assert page.rstrip().endswith("</html>")


def test_csv_dash_is_the_steps_on_stdout() -> None:
    result = run("simulate", "--policy", "herald", "--csv", "-", *SHORT)
    lines = list(csv.reader(io.StringIO(result.stdout)))
    assert lines[0] == list(STEP_COLUMNS)
    assert len(lines) == 9
    assert "6 measured steps" in result.stderr


def test_describe_json_dash_is_json(clicks: str) -> None:
    columns = ("--label", "click", "--categorical", "user,item")
    result = run("data", "describe", clicks, *columns, "--json", "-")
    assert json.loads(result.stdout)["num_samples"] == 700
    assert "next:" not in result.stderr


def test_two_results_do_not_fit_stdout() -> None:
    result = CliRunner().invoke(cli, ["compare", "--json", "-", "--report", "-", *SHORT])
    assert str(result.exception) == "--json - and --report -: only one result fits standard output"


def next_words(result: Result) -> list[str]:
    """The last line's command, which its own parser accepts."""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("next: embroute ")
    words = shlex.split(last.removeprefix("next: embroute "))
    load_command(words[0]).make_context(words[0], words[1:])
    return words


def test_every_command_ends_with_the_next_one(clicks: str) -> None:
    columns = ("--data", clicks, "--label", "click", "--categorical", "user,item")
    words = next_words(run("compare", "--policies", "herald", *columns, *SHORT))
    assert words == ["advise", *columns, "--network", "edge-4"]
    words = next_words(run("simulate", "--policy", "herald", "--shuffle", *columns, *SHORT))
    assert words[:9] == ["compare", *columns, "--policies", "vanilla,herald"]
    assert {"--shuffle", "--network", "--steps", "--warmup"} < set(words)
    words = next_words(run("data", "describe", clicks))
    assert words[:7] == ["compare", *columns]


def test_shell_completion_prints_a_script() -> None:
    for shell in ("bash", "zsh", "fish"):
        result = subprocess.run(
            [Path(sys.executable).parent / "embroute"],
            env=os.environ | {"_EMBROUTE_COMPLETE": f"{shell}_source"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "_EMBROUTE_COMPLETE" in result.stdout
        assert "embroute" in result.stdout
    manual = Path(__file__).parent.parent / "docs" / "index.md"
    assert "_EMBROUTE_COMPLETE=bash_source embroute" in manual.read_text()


@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet_prints_nothing_but_files_are_written(flag: str, clicks: str, tmp_path: Path) -> None:
    columns = ("--data", clicks, "--label", "click", "--categorical", "user,item")
    out = tmp_path / "out"
    for command in (
        ("compare", "--policies", "herald", "--json", str(out), *columns, *SHORT),
        ("simulate", "--policy", "herald", "--csv", str(out), *columns, *SHORT),
        ("data", "describe", "--json", str(out), "--limit", "300", clicks, *columns[2:]),
    ):
        assert run(*command, flag).output == ""
        assert out.stat().st_size > 100
        out.unlink()
    assert not is_quiet()


def test_quiet_still_prints_results_asked_for_on_stdout_and_errors() -> None:
    result = run("compare", "-q", "--policies", "herald", "--json", "-", *SHORT)
    assert json.loads(result.stdout)["workers"] == 4
    assert result.stderr == ""
    wrong = CliRunner().invoke(cli, ["compare", "-q", "--policies", "nothing", *SHORT])
    assert "no policy 'nothing'" in str(wrong.exception)


def test_simulate_prints_a_summary_without_a_csv(tmp_path: Path) -> None:
    result = run("simulate", "--policy", "esd(1)", *SHORT)
    json_path = tmp_path / "out.json"
    compared = run("compare", "--policies", "esd(1)", "--json", str(json_path), *SHORT).stdout
    line = next(line for line in result.stdout.splitlines() if "esd(1)" in line).split()
    other = next(line for line in compared.splitlines() if "esd(1)" in line).split()
    # The same columns but for the two ratios; planning takes another time in every run.
    assert line[:5] == other[:5]
    assert line[5:7] == [other[6], other[8]]
    quantiles = {row.split()[0]: row.split() for row in result.stdout.splitlines() if row.strip()}
    least, median, most = (float(quantiles["step"][i]) for i in (2, 4, 6))
    assert 0 < least <= median <= most
    step_ms = 1e3 * json.loads(json_path.read_text())["policies"]["esd(1)"]["step_time_s"]
    assert least <= step_ms * 1.01
    assert step_ms <= most * 1.01
