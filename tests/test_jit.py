"""Compiled kernels on disk: found when present, and separate for each version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba

from embroute.kernels import jit
from embroute.kernels.jit import is_compiled

SOURCE = Path(jit.__file__).parent.parent


def test_plain_function_counts_as_not_compiled() -> None:
    assert not is_compiled(lambda: None)


def test_kernel_is_cached_on_disk_after_its_first_call(tmp_path: Path) -> None:
    module = tmp_path / "fresh.py"
    module.write_text(
        "from embroute.kernels.jit import is_compiled, kernel\n"
        "@kernel\n"
        "def twice(x: int) -> int:\n"
        "    return 2 * x\n"
        "print(is_compiled(twice), twice(2), is_compiled(twice))\n"
    )
    out = [subprocess.check_output([sys.executable, str(module)], text=True) for _ in range(2)]
    assert out == ["False 4 True\n", "True 4 True\n"]


PRINT_CACHE = "import embroute.kernels.rows as r; print(r.gather.stats.cache_path)"


def cache_of(package: Path, **environment: str) -> str:
    """The folder in which a copy of the package caches its kernels."""
    env = os.environ | {"PYTHONPATH": str(package.parent)} | environment
    command = [sys.executable, "-c", PRINT_CACHE]
    out = subprocess.check_output(command, text=True, env=env, cwd=package.parent)
    return Path(out.strip()).parent.name


def append(path: Path, line: str) -> None:
    path.write_text(f"{path.read_text()}{line}\n")


def test_changed_kernel_file_changes_the_cache_folder(tmp_path: Path) -> None:
    package = tmp_path / "embroute"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "retail"))
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    first = cache_of(package, **environment)
    append(package / "nn" / "session.py", "# it imports kernels and has none")
    assert cache_of(package, **environment) == first
    append(package / "kernels" / "codes.py", "# constants that kernels read")
    assert cache_of(package, **environment) != first


def test_kernel_cache_lies_in_the_user_cache_folder(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    out = subprocess.check_output([sys.executable, "-c", PRINT_CACHE], text=True, env=environment)
    assert Path(out.strip()).is_relative_to(tmp_path / "embroute")


def test_kernels_of_users_keep_the_numba_cache_folder() -> None:
    before = getattr(numba.config, "CACHE_DIR")  # noqa: B009
    jit.kernel(lambda x: x)
    assert before == getattr(numba.config, "CACHE_DIR")  # noqa: B009
