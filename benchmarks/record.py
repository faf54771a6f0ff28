"""Pages of results: dated, with the commit, the command and the machine."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The measured commit, with a plus if the working tree differs from it."""
    here = Path(__file__).parent
    head = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    changes = ["git", "-C", str(here), "status", "--porcelain", "--", "../embroute"]
    name, changed = (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        for command in (head, changes)
    )
    return (name or "unknown") + ("+" if changed else "")


def machine() -> str:
    """Processor, cores and Python of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; all columns but the first are aligned to the right."""
    lines = [
        "| " + " | ".join(headings) + " |",
        "| --- |" + " ---: |" * (len(headings) - 1),
        *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows),
    ]
    return "\n".join(lines)


def portable(argument: str) -> str:
    """An argument of the command line with relative paths only."""
    option, equals, value = argument.rpartition("=")
    return option + equals + (os.path.relpath(value) if os.path.isabs(value) else value)


def command_line() -> str:
    """The command that runs this benchmark; a page may have another name than its module."""
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "run a benchmark as python -m benchmarks.NAME"
    return shlex.join(["python", "-m", spec.name, *map(portable, sys.argv[1:])])


def record(name: str, title: str, body: str) -> Path:
    """Write a page of results, and print the page and its path."""
    date = datetime.date.today().isoformat()
    command = command_line()
    page = f"# {title}\n\n{date}, commit {commit()}, `{command}`  \n{machine()}\n\n{body}\n"
    path = RESULTS / f"{name}-{date}.md"
    path.write_text(page)
    print(page)
    print(f"written: {path}")
    return path
