"""Markup, template marks and formulas in names stay plain text in reports and CSV files."""

from __future__ import annotations

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from embroute.config.spec import csv_cell
from embroute.report.page import Page, Sheet, render
from embroute.report.run_folder import (
    Evaluation,
    MetricsLine,
    RunHistory,
    Summary,
    read_history,
    read_summary,
    runs_table,
)
from embroute.report.runs_page import runs_page
from tests.pages import block, compared

EVIL = "<script>alert(1)</script>\"'&"
FORMULAS = ["=cmd", "+1", "-1", "@x", "\tx", "\rx"]


class Scripts(HTMLParser):
    """Collects the script texts and event handlers that a browser would run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kinds = dict(attrs)
        self._inside = tag == "script" and kinds.get("type") != "application/json"
        self.found += [value or "" for name, value in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found.append(data)
        self._inside = False


def assert_harmless(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "alert(1)" in text  # the name is there
    assert EVIL not in text
    assert "<script>alert" not in text
    scripts = Scripts()
    scripts.feed(text)
    assert not any(script.startswith("alert(1)") for script in scripts.found)


@pytest.fixture(scope="module")
def evil_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose name and columns are markup; a file name holds no slash."""
    path = tmp_path_factory.mktemp("data") / f"{EVIL.replace('/', '')}.csv"
    column = EVIL.replace('"', '""')
    lines = [f'"{column}",y', *(f"{i % 7},{i % 2}" for i in range(200))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_comparison_page_escapes_files_columns_hosts_and_policies(
    evil_data: Path, tmp_path: Path
) -> None:
    network = tmp_path / "net.yaml"
    name = json.dumps(EVIL)
    network.write_text(f"hosts: {{{name}: {{link: 1gbit}}}}\nworkers: [{name}]\nshards: [{name}]\n")
    policy = "dispatch=block  sync=on-demand(  )"  # a name of its own, blanks and all
    options: tuple[str, ...] = ("--data", str(evil_data), "--categorical", EVIL, "--label", "y")
    options += ("--policies", policy, "--network", str(network), "--batch", "2", "--steps", "8")
    page, values = compared(
        tmp_path, *options, "--warmup", "1", "--cache", "100%", "--report-caches", "none"
    )
    assert values["policies"][policy]["per_worker"][0]["host"] == EVIL
    assert_harmless(page)


def history(name: str) -> RunHistory:
    """A run of one report and one evaluation, with markup as policy and rank names."""
    summary = Summary(EVIL, 8, 256, 256.0, 0.7, {"auc": 0.5, "log_loss": 0.7}, 100, 200, {})
    report = MetricsLine(8, 1.0, 0.7, 256.0, 0.5, [1.0, 2.0], 100, 200)
    evaluation = Evaluation(8, 1.0, 100, 0.7, 0.5)
    return RunHistory(name, summary, [report], [evaluation], {EVIL: {"compute": 1.0}}, {})


def test_runs_page_escapes_folders_and_policies(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(runs_page([history(EVIL), history("=1+1")]), "utf-8")
    assert_harmless(page)
    rows = list(csv.reader(io.StringIO(block(page, "files")["runs.csv"])))
    assert [row[0] for row in rows] == ["run", EVIL, "'=1+1"]


@pytest.mark.parametrize("name", ["[/b]", "[bold]x", EVIL])
def test_runs_table_prints_markup_unchanged(name: str) -> None:
    console = Console(width=400, file=io.StringIO())
    console.print(runs_table({name: history(name).summary}))
    assert isinstance(console.file, io.StringIO)
    assert name in console.file.getvalue()
    assert EVIL in console.file.getvalue()


def test_every_text_of_a_page_is_escaped() -> None:
    sheet = Sheet((EVIL,), [(EVIL,)])
    text = render(Page(EVIL, EVIL, sheet, [], {EVIL: EVIL}))
    assert EVIL not in text
    assert "<script>alert" not in text


def test_template_placeholders_in_names_are_not_filled() -> None:
    text = render(Page("{{SCRIPT}}", "{{DATA}}", Sheet(("a",), [("{{BOKEH}}",)]), [], {}))
    body = text.split("<body>")[1]
    for name in ("{{SCRIPT}}", "{{DATA}}", "{{BOKEH}}"):
        assert name in body


@pytest.mark.parametrize("text", FORMULAS)
def test_csv_cell_quotes_formulas(text: str) -> None:
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["vanilla", "esd(1)", "a=1", "", "'=1", "1-2"])
def test_csv_cell_keeps_plain_text(text: str) -> None:
    assert csv_cell(text) == text


@pytest.mark.parametrize("text", ["", "{}", "[1]", "3", '{"policy": 1, "more": 2}'])
def test_damaged_run_record_error_names_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=r"summary\.json: not a summary as this version writes it"):
        read_summary(tmp_path)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "worker0.json").write_text(text)
    with pytest.raises(ValueError, match=r"worker0\.json: not what this version writes of a rank"):
        read_history(tmp_path, "run")
