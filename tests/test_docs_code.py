"""The code of the manual runs: Python, commands, and what they print.

The language of a fenced block says what it is for. `python` runs with the names of the page's
earlier blocks; a `text` block after it is what it prints. `console` has commands and what they
print. A block with a title becomes a file. `py`, `sh` and all others are only read.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from embroute.cli.main import cli
from tests.processes import begin, finish

DOCS = Path(__file__).parent.parent / "docs"
FENCE = re.compile(r'^```(\w*)(?: title="([\w.]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\$ embroute (.*?)\n((?:[^$].*\n)*)")
LANGUAGES = {"python", "console", "text", "py", "sh", "yaml", "toml", "csv"}
PROCESSES = ("train", "run")  # commands that start processes of their own


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*match) for match in FENCE.findall((DOCS / page).read_text())]


def is_slow(page: str) -> bool:
    commands = [command for one in blocks(page) for command, _ in COMMAND.findall(one.text)]
    return any(command.split()[0] in PROCESSES for command in commands)


def run_command(command: str, told: str) -> None:
    arguments = shlex.split(command)
    if arguments[0] in PROCESSES:
        code, output = finish(begin([sys.executable, "-m", "embroute", *arguments]))
    else:
        result = CliRunner().invoke(cli, arguments)
        if told.startswith("embroute: "):
            assert f"embroute: {result.exception}\n" == told
            return
        code, output = result.exit_code, result.output or repr(result.exception)
    assert code == 0, output
    assert [line for line in told.splitlines() if line not in output] == []


PAGES = [
    pytest.param(path.name, marks=pytest.mark.full) if is_slow(path.name) else path.name
    for path in sorted(DOCS.glob("*.md"))
    if any(one.language in ("python", "console") for one in blocks(path.name))
]


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs_and_prints_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    printed = ""
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
            monkeypatch.delitem(sys.modules, Path(block.title).stem, raising=False)
        elif block.language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(block.text, names)
            printed = output.getvalue()
        elif block.language == "text" and printed:
            assert printed == block.text
            printed = ""
        elif block.language == "console":
            for command, told in COMMAND.findall(block.text):
                run_command(command, told)


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_blocks_of_a_page_name_their_language(page: str) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES


def test_own_policy_of_the_manual_is_the_example() -> None:
    page = next(one.text for one in blocks("own-policy.md") if one.title == "own_policy.py")
    example = (DOCS.parent / "examples" / "own_policy.py").read_text()
    assert example.endswith(f'"""\n\n{page}')


def test_python_of_the_manual_parses() -> None:
    for path in DOCS.glob("*.md"):
        for block in blocks(path.name):
            if block.language in ("python", "py"):
                compile(block.text, str(path), "exec")
