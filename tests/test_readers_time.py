"""Samples in order of time: ordered files are streamed, other files are sorted on disk."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embroute.config.data_options import DataOptions
from embroute.data.batch import Batch, concat, one_hot
from embroute.data.open import open_source
from embroute.data.readers import file_source as reader
from embroute.data.readers.decode import Keyed
from embroute.data.readers.sorting import RunSizes, SortedSamples
from tests.sizes import sized


def pieces_of(times: list[int], size: int) -> Iterator[Keyed]:
    """Numbered samples with the given times."""
    for start in range(0, len(times), size):
        time = np.array(times[start : start + size], np.float64)
        keys = np.arange(start, start + len(time), dtype=np.int64)[:, None]
        yield Keyed(one_hot(keys), time)


@settings(max_examples=sized(20, 60))
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60),
    st.integers(1, 7),
    st.integers(1, 20),
    st.integers(1, 5),
)
def test_external_sort_is_stable(times: list[int], size: int, run: int, block: int) -> None:
    ordered = SortedSamples(pieces_of(times, size), Counter({"bad": 2}), RunSizes(run, block))
    counts: Counter[str] = Counter()
    for _ in range(2):
        found = list(ordered.pieces(counts))
        assert concat([piece.batch for piece in found]).rows.tolist() == sorted(
            range(len(times)), key=times.__getitem__
        )
        assert np.concatenate([piece.time for piece in found]).tolist() == sorted(times)
    assert counts == {"bad": 4}


def test_temporary_files_are_deleted_with_the_source() -> None:
    ordered = SortedSamples(pieces_of([3, 1, 2], 2), Counter(), RunSizes(2, 1))
    folder = ordered.folder
    assert folder.exists()
    del ordered
    gc.collect()
    assert not folder.exists()


def test_temporary_files_of_a_killed_process_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import os, signal\n"
        "from embroute.config.scratch import scratch_folder\n"
        "with scratch_folder('sort', large=True) as folder:\n"
        "    (folder / 'run-0').write_text('rows')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("run-0"))
    ordered = SortedSamples(pieces_of([3, 1, 2], 2), Counter(), RunSizes(2, 1))
    folders = [path for path in tmp_path.rglob("sort-*") if path.is_dir()]
    assert folders == [ordered.folder]


def whole(path: Path, time: str | None, skip: bool = False) -> Batch:
    options = DataOptions(
        label="y", categorical=("a",), bag=("tags",), dense=("x",), time=time, skip_bad_rows=skip
    )
    return concat(list(open_source(str(path), options).chunks()))


@pytest.mark.parametrize("kind", ["{}", "{}.5", "2024-01-{:02d}", "2024-01-{:02d}T10:00:00.25Z"])
def test_time_option_sorts_a_shuffled_file(tmp_path: Path, kind: str) -> None:
    lines = [(i % 20 + 1, f"{i % 2},w{i % 7},{'p|q|r'[: i % 4]},{i}") for i in range(100)]
    random.Random(1).shuffle(lines)
    ordered = sorted(lines, key=lambda line: line[0])
    for name, content in (("shuffled", lines), ("sorted", ordered)):
        text = "".join(f"{kind.format(time)},{rest}\n" for time, rest in content)
        (tmp_path / name).write_text("t,y,a,tags,x\n" + text)
    one, other = whole(tmp_path / "shuffled", "t"), whole(tmp_path / "sorted", None)
    for name in ("rows", "offsets", "dense", "label"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_ordered_file_is_not_sorted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(reader, "SortedSamples")
    (tmp_path / "t.csv").write_text("t,y,a,tags,x\n1,0,u,,1\n1,1,v,,2\n3,0,w,,3\n")
    assert whole(tmp_path / "t.csv", "t").dense.ravel().tolist() == [1, 2, 3]


def test_rows_with_bad_time_are_skipped_and_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t,y,a,tags,x\n5,0,u,,1\nlate,1,v,,2\n3,0,w,,3\n")
    with pytest.raises(ValueError, match="line 3, column t: 'late' is neither"):
        whole(path, "t")
    assert whole(path, "t", skip=True).dense.ravel().tolist() == [3, 1]
