"""A supervised run skips damaged checkpoints, and equal runs save equal bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embroute.checkpoint import tensor_header
from embroute.checkpoint.folders import (
    MANIFEST,
    candidates,
    latest_checkpoint,
    rename_damaged,
    saved_checkpoints,
)
from embroute.checkpoint.manifest import read_manifest, verify
from embroute.checkpoint.tensor_file import TensorFile, as_tensor, write_tensors
from embroute.cli.checkpoint import export_tables
from embroute.kernels.array_types import Array
from embroute.launch.in_process import run_in_process
from embroute.nn.settings import Settings
from tests.attack.damage import file, flip, put
from tests.jobs import Batch, Result, batches, gathered, plain_cached, settings_of, train
from tests.sizes import marked_full

STEPS, EVERY = 30, 10
FILES = ["planner", "dense", "shard0", "shard1", "worker0", "worker1"]
POLICIES = ["esd(1)", "het(4)", "embroute(effort=200)", "in-place"]
Capture = pytest.CaptureFixture[str]


def saving(folder: Path, policy: str = "esd(1)") -> Settings:
    settings = settings_of(policy, 2, 1.0 if policy.startswith("het") else 0.75)
    settings.update({"checkpoint": folder, "checkpoint_every": EVERY, "keep": 3, "steps": 20})
    return settings


def run(settings: Settings, stream: Sequence[Batch]) -> dict[str, Result]:
    return run_in_process(2, 2, lambda rank: train(rank, stream, "adagrad", settings))


def goes_on(folder: Path) -> Settings:
    """The settings of a run that a launcher starts again."""
    settings = saving(folder)
    settings.update({"resume": True, "fall_back": True})
    del settings["steps"]
    return settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 10 and 20."""
    run(saving(tmp_path), batches(2, STEPS))
    assert [path.name for path in saved_checkpoints(tmp_path)] == ["step-00000010", "step-00000020"]
    return tmp_path


@pytest.mark.parametrize("name", marked_full(FILES, ["planner", "shard0"]))
def test_fall_back_skips_a_damaged_checkpoint(name: str, folder: Path, capsys: Capture) -> None:
    flip(folder / "step-00000020" / file(name), -1)
    results = run(goes_on(folder), batches(2, STEPS))
    assert len(results["worker0"].losses) == STEPS - 10
    gathered(results, 2, 2).assert_equal(plain_cached("adagrad", 2, STEPS))
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name}.safetensors is damaged: bytes " in line
    assert "kept as step-00000020.damaged" in line
    assert "going on from step-00000010 instead, 10 steps are lost" in line
    assert "move" not in line
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "step-00000010",
        "step-00000020",
        "step-00000020.damaged",
        "step-00000030",
    ]
    for path in saved_checkpoints(folder):
        verify(path, read_manifest(path).files)


def test_fall_back_skips_a_damaged_manifest(folder: Path, capsys: Capture) -> None:
    flip(folder / "step-00000020" / MANIFEST, 400)
    assert len(run(goes_on(folder), batches(2, STEPS))["worker1"].losses) == STEPS - 10
    assert "manifest.json is damaged" in capsys.readouterr().err


def test_fall_back_keeps_a_whole_checkpoint(folder: Path, capsys: Capture) -> None:
    assert len(run(goes_on(folder), batches(2, STEPS))["worker1"].losses) == STEPS - 20
    assert not capsys.readouterr().err


def test_resume_without_fall_back_refuses_a_damaged_checkpoint(folder: Path) -> None:
    flip(folder / "step-00000020" / file("shard1"), -1)
    settings = goes_on(folder)
    settings["fall_back"] = False
    with pytest.raises(ValueError, match="move step-00000020 away to go on from step-00000010"):
        run(settings, batches(2, STEPS))
    assert len(saved_checkpoints(folder)) == 2


def test_fall_back_without_a_whole_checkpoint_is_refused(folder: Path) -> None:
    for step in ("step-00000010", "step-00000020"):
        flip(folder / step / file("shard1"), -1)
    named = r"no checkpoint is whole: .*00000020.*; .*00000010"
    with pytest.raises(ValueError, match=named) as error:
        run(goes_on(folder), batches(2, STEPS))
    assert "\n" not in str(error.value)
    assert len(saved_checkpoints(folder)) == 2


def test_fall_back_refuses_a_checkpoint_of_another_version(folder: Path) -> None:
    put(version=5)(folder / "step-00000020")
    with pytest.raises(ValueError, match="has version 5, this program reads 4"):
        run(goes_on(folder), batches(2, STEPS))
    assert len(saved_checkpoints(folder)) == 2


def test_fall_back_without_checkpoints_starts_at_step_0(tmp_path: Path) -> None:
    assert len(run(goes_on(tmp_path), batches(2, 5))["worker0"].losses) == 5


def test_damaged_checkpoints_are_kept_under_new_names(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        (tmp_path / "step-00000020").mkdir()
        names.append(rename_damaged(tmp_path / "step-00000020").name)
    assert names == [f"step-00000020.damaged{end}" for end in ("", "-2", "-3")]
    assert not candidates(tmp_path)


@pytest.mark.parametrize("policy", marked_full(POLICIES, ["esd(1)", "in-place"]))
def test_equal_runs_save_equal_bytes(policy: str, tmp_path: Path) -> None:
    paths, told = [], []
    for name in ("a", "b"):
        torch.manual_seed(5)
        np.full(1 << 22, 0xAB, np.uint8)  # memory that is not all zeros
        run(saving(tmp_path / name, policy), batches(2, STEPS))
        path = latest_checkpoint(tmp_path / name)
        assert path is not None
        paths.append(path)
        told.append(json.loads((path / MANIFEST).read_text()))
    for fields in told:
        assert fields.pop("run_id")
        assert fields.pop("saved_s")
        assert fields.pop("checksum")
    assert told[0] == told[1]
    names = [name for name, *_ in told[0]["files"]]
    ranks = [f"{role}{i}.safetensors" for role in ("shard", "worker") for i in range(2)]
    assert names == ["planner.safetensors", "dense.safetensors", *ranks]
    for name in names:
        assert (paths[0] / name).read_bytes() == (paths[1] / name).read_bytes(), name


def test_exported_tables_are_verified_when_loaded(folder: Path, capsys: Capture) -> None:
    path, tables = folder / "step-00000020", folder / "tables.safetensors"
    export_tables(path, tables)
    settings = settings_of("esd(1)", 2)
    settings["tables"] = tables
    run(settings, batches(2, 3))
    assert not capsys.readouterr().err
    save_file(load_file(tables), folder / "others.safetensors")
    flip(tables, -1)
    with pytest.raises(ValueError, match=r"tables.safetensors is damaged: bytes .*; put a"):
        run(settings, batches(2, 3))
    settings["tables"] = folder / "others.safetensors"
    capsys.readouterr()
    run(settings, batches(2, 3))
    (line,) = capsys.readouterr().err.splitlines()
    assert "others.safetensors carries no checksums" in line


def test_tensor_files_are_compatible_with_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_header, "CHECKSUM_BLOCK_BYTES", 64)
    path, plain = tmp_path / "ours.safetensors", tmp_path / "plain.safetensors"
    arrays: dict[str, Array] = {"é": np.arange(70, dtype=np.float32).reshape(7, 10)}
    arrays["none"] = np.zeros((0, 3), np.int8)
    write_tensors(path, [as_tensor(name, array) for name, array in arrays.items()], {"a": "b"})
    save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, plain)
    read = load_file(path)
    for name, array in arrays.items():
        assert np.array_equal(read[name].numpy(), array)
        for each in (path, plain):
            rows = TensorFile(each, needs_sums=False).rows(name)
            assert np.array_equal(rows, array)
            assert rows.dtype == array.dtype
    with pytest.raises(ValueError, match="it has no checksums"):
        TensorFile(plain)


def test_sequential_reads_fetch_each_block_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_header, "CHECKSUM_BLOCK_BYTES", 100)
    array, counted = np.arange(300, dtype=np.int64).reshape(100, 3), list[int]()
    write_tensors(tmp_path / "x", [as_tensor("x", array)], {})
    tensors, read_block = TensorFile(tmp_path / "x"), TensorFile._read_block

    def counting(self: TensorFile, block: int, out: memoryview) -> None:
        counted.append(block)
        read_block(self, block, out)

    monkeypatch.setattr(TensorFile, "_read_block", counting)
    rows = [tensors.rows("x", at, at + 7) for at in range(0, 100, 7)]
    assert np.array_equal(np.concatenate(rows), array)
    assert counted == list(range(24))
