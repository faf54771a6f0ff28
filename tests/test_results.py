"""Pages of benchmarks/results: a reader on another machine can repeat them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.record import command_line, portable

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "benchmarks" / "results").glob("*-????-??-??.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_a_module_that_exists_and_no_absolute_path(page: Path) -> None:
    text = page.read_text()
    modules = re.findall(r"`python -m benchmarks\.(\w+)", text)
    assert modules
    assert all((ROOT / "benchmarks" / f"{module}.py").exists() for module in modules)
    assert not re.findall(r"(?<![\w.])/(?:home|mnt|root|tmp|usr|var|work)\b", text)


def test_every_benchmark_has_one_page() -> None:
    names = Counter(page.stem[: -len("-2026-01-01")] for page in PAGES)
    assert not [name for name, count in names.items() if count > 1]


def test_arguments_of_a_page_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert portable(str(tmp_path.parent / "data")) == "../data"
    assert portable(f"--data={tmp_path / 'data'}") == "--data=data"
    assert portable("esd(1); TorchRec") == "esd(1); TorchRec"


def test_a_page_prints_the_module_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("benchmarks.training"))
    monkeypatch.setattr(sys, "argv", ["training.py", "--only", "esd(1)"])
    assert command_line() == "python -m benchmarks.training --only 'esd(1)'"
