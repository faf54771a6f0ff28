"""Compiled kernels on disk: seen when they are there, dropped when another version made them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba
import pytest

from embroute.kernels import jit
from embroute.kernels.jit import is_compiled


def test_a_plain_function_is_not_compiled() -> None:
    assert not is_compiled(lambda: None)


def test_a_new_kernel_is_not_on_disk_and_a_used_one_is(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("moved", [False, True])
def test_caches_of_another_version_are_dropped(
    tmp_path: Path, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "moved") if moved else "")
    (tmp_path / "policy").mkdir()
    caches, stamp = (jit._cache_of(tmp_path / name) for name in ("policy", "kernels"))
    stamp = stamp / "compiled-by"
    assert caches.is_relative_to(tmp_path / "moved") == moved
    for folder in (caches, stamp.parent):
        folder.mkdir(parents=True)
    old = caches / "decide.f-1.py311.nbi"
    old.touch()
    stamp.write_text("another version")
    package, jit._PACKAGE = jit._PACKAGE, tmp_path
    try:
        jit._drop_old_caches()
        assert not old.exists()
        old.touch()
        jit._drop_old_caches()
        assert old.exists()
    finally:
        jit._PACKAGE = package
