"""What an installation needs: commands import late, bokeh is optional, the wheel is complete."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import ignore_patterns

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"bokeh", "numba", "polars", "torch"}
WITHOUT_BOKEH = """
import sys
sys.modules["bokeh"] = None
from embroute.cli.main import main
sys.argv[1:] = {arguments}
main()
"""


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_help_imports_no_heavy_package() -> None:
    code = "import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module('embroute')"
    listing = f"import atexit, sys; atexit.register(lambda: print({HEAVY!r} & set(sys.modules)))"
    result = python(f"{listing}; {code}")
    assert result.returncode == 0, result.stderr
    assert "Commands:" in result.stdout
    assert result.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("arguments", "wanted_by"),
    [
        (["compare", "--data", "online-retail", "--report", "page.html"], "--report"),
        (["report", ".", "--html", "page.html"], "--html"),
    ],
)
def test_a_report_without_bokeh_ends_in_one_line(
    arguments: list[str], wanted_by: str, tmp_path: Path
) -> None:
    result = python(WITHOUT_BOKEH.format(arguments=arguments), tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"embroute: {wanted_by} needs bokeh, which is not installed: pip install embroute[report]\n"
    )


def test_tables_need_no_bokeh(tmp_path: Path) -> None:
    arguments = ["compare", "--data", "online-retail", "--policies", "vanilla", "--steps", "12"]
    result = python(WITHOUT_BOKEH.format(arguments=arguments), tmp_path)
    assert result.returncode == 0, result.stderr
    assert "vanilla" in result.stdout


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="builds a wheel with the installed setuptools")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "embroute", tree / "embroute", ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path), str(tree)], check=True)
    (wheel,) = tmp_path.glob("embroute-*.whl")
    files = {str(p.relative_to(tree)) for p in (tree / "embroute").rglob("*") if p.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        assert files <= set(archive.namelist())
