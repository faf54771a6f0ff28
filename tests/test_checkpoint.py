"""Checkpoints: saved state comes back bit for bit, and older checkpoints are never harmed."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from torch import nn

from embroute.checkpoint import rank_files, tensor_file, tensor_header
from embroute.checkpoint.folders import (
    claim_folder,
    find_checkpoint,
    latest_checkpoint,
    partial_folder,
)
from embroute.checkpoint.manifest import Manifest, commit, read_manifest, verify
from embroute.checkpoint.planner_state import save_planner
from embroute.checkpoint.rank_files import Stateful, Training, identity_of, load_shard, save_shard
from embroute.cli.main import cli
from embroute.config.cluster import uniform_cluster
from embroute.data.schema import Schema, Table
from embroute.engine.optim import RowOptimizer
from embroute.engine.sharding import RowSharding
from embroute.engine.store import CacheStore, RecordWidths, ShardStore
from embroute.planner.plan_stream import start
from embroute.planner.setup import Setup
from embroute.policies.catalog import make_policy

torch.set_num_threads(1)
Patch = pytest.MonkeyPatch

TABLES = (Table("a", 23), Table("b", 1), Table("c[x]", 40), Table("d", 9))
WIDTHS = (4, 8, 4, 8)
MODEL = {"top.weight": torch.ones(3, 2), "top.bias": torch.zeros(3)}
ADAGRAD = RowOptimizer("adagrad", 0.1, initial_state=0.5)
RANDOM = torch.arange(16, dtype=torch.uint8)


def places_of(num_shards: int, *tables: Table) -> RowSharding:
    return RowSharding(Setup(Schema(tables or TABLES, ()), uniform_cluster(2, num_shards), WIDTHS))


def stores_of(sharding: RowSharding, optimizer: RowOptimizer, dtype: str) -> list[ShardStore]:
    widths = RecordWidths(sharding, optimizer, dtype)
    return [ShardStore(k, sharding, widths, optimizer) for k in range(sharding.num_shards)]


def record(row: int, columns: int) -> npt.NDArray[np.float64]:
    """A record that no other row has; thirds differ in float64 and float32."""
    return np.asarray((1000 * row + np.arange(columns)) / 3)


def filled_stores(sharding: RowSharding, optimizer: RowOptimizer, dtype: str) -> list[ShardStore]:
    stores = stores_of(sharding, optimizer, dtype)
    for row in range(sharding.setup.schema.num_rows):
        arena = sharding.setup.arena_of(np.array([row]))[0]
        records = stores[row % len(stores)].records[arena]
        records[sharding.local(np.array([row]))[0]] = record(row, records.shape[1])
    return stores


def write_checkpoint(
    folder: Path, step: int, num_shards: int = 2, dtype: str = "float32", keep: int = 2
) -> Path:
    """A whole checkpoint, as the ranks of a job write it."""
    sharding, part = places_of(num_shards), partial_folder(folder, step, "run")
    stores = filled_stores(sharding, ADAGRAD, dtype)
    files = [save_shard(part, store, sharding, k) for k, store in enumerate(stores)]
    files += [rank_files.save_cache(part, worker, None, RANDOM) for worker in range(2)]
    files.append(rank_files.save_dense(part, Training(MODEL, [], {}), RANDOM))
    state = start(make_policy("esd(1)"), sharding.setup)
    state.step = step
    files.append(save_planner(part, state, {"epoch": 1, "batch": 4096, "random": [7]}))
    identity = identity_of(sharding, ADAGRAD, dtype, MODEL)
    manifest = Manifest(step, "esd(1)", 2, num_shards, identity, tuple(files), "run", time.time())
    return commit(folder, manifest, keep)


def assert_whole(path: Path, step: int) -> None:
    assert read_manifest(path).step == step
    verify(path, read_manifest(path).files)


@pytest.mark.parametrize("name", ["sgd", "rowwise-adagrad", "adam"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("old", "new"), [(1, 1), (3, 3), (1, 4), (4, 1), (2, 3), (4, 6), (5, 2)])
def test_saved_rows_load_into_another_number_of_shards(
    name: str, dtype: str, old: int, new: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(rank_files, "COPIED_BYTES", 300)
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 100)
    monkeypatch.setattr(tensor_header, "CHECKSUM_BLOCK_BYTES", 70)
    optimizer, before, after = RowOptimizer(name, 0.1), places_of(old), places_of(new)
    for shard, store in enumerate(filled_stores(before, optimizer, dtype)):
        save_shard(tmp_path, store, before, shard)
        read = load_file(tmp_path / f"shard{shard}.safetensors")
        for table, width in enumerate(WIDTHS):
            columns = width + optimizer.state_width(width)
            rows = [record(row, columns) for row in before.rows_of(shard, table)]
            expected = np.array(rows, dtype).reshape(-1, columns)
            np.testing.assert_array_equal(read[f"table{table}"], expected, strict=True)
    for shard, whole in enumerate(filled_stores(after, optimizer, dtype)):
        store = stores_of(after, optimizer, dtype)[shard]
        load_shard(tmp_path, store, after, shard)
        for mine, its in zip(store.records, whole.records, strict=True):
            np.testing.assert_array_equal(mine, its, strict=True)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        (partial_folder(tmp_path, step, "other") / "shard7.safetensors").write_text(
            "of a crashed run"
        )
        newest = write_checkpoint(tmp_path, step)
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000015"]
    files = {info.name for info in read_manifest(newest).files}
    assert {*files, "manifest.json"} == set(os.listdir(newest))
    partial_folder(tmp_path, 20, "run")
    assert latest_checkpoint(tmp_path) == find_checkpoint(tmp_path) == newest
    claim_folder(tmp_path, 15)
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000015"]
    with pytest.raises(ValueError, match="holds step-00000015, later than step 12"):
        claim_folder(tmp_path, 12)


@pytest.mark.parametrize("step", [10, 15])  # the same step again, and a later one
def test_crash_while_saving_leaves_a_whole_checkpoint(
    step: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    left = [0]  # calls until the crash

    def crashing(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt  # not an Exception: nothing handles it
            return function(*args, **options)

        return call

    ends = []
    for calls in range(30):
        folder = tmp_path / str(calls)
        write_checkpoint(folder, 10, num_shards=3)
        left[0] = calls
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for owner, name in ((Path, "rename"), (shutil, "rmtree"), (os, "fsync")):
                patch.setattr(owner, name, crashing(getattr(owner, name)))
            write_checkpoint(folder, step, keep=1)
        manifest = read_manifest(find_checkpoint(folder))
        assert_whole(find_checkpoint(folder), manifest.step)
        claim_folder(folder, step)
        assert read_manifest(find_checkpoint(folder)) == manifest
        assert not [name for name in os.listdir(folder) if name.endswith(("partial", "removed"))]
        ends.append((manifest.num_shards, left[0] > 0))
    assert list(dict.fromkeys(ends)) == [(3, False), (2, False), (2, True)]  # shards, whether done


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        ("shard1.safetensors", lambda data: data[:-1], r"has \d+ bytes, \d+ were written to it"),
        ("shard0.safetensors", lambda data: data[:-1] + b"x", "is damaged: bytes .* checksum"),
        ("planner.safetensors", lambda data: None, "is missing"),
        ("manifest.json", lambda data: None, "is missing"),
        ("manifest.json", lambda data: data[:-2], "is damaged: Expecting"),
        ("manifest.json", lambda data: data.replace(b"esd", b"esb"), "does not have its checksum"),
        ("manifest.json", lambda data: b'{"version": 1}', "has version 1, this program reads 4"),
    ],
)
def test_verify_refuses_a_damaged_checkpoint(
    file: str, harm: Callable[[bytes], bytes | None], message: str, tmp_path: Path
) -> None:
    old, path = write_checkpoint(tmp_path, 5), write_checkpoint(tmp_path, 10)
    data = harm((path / file).read_bytes())
    (path / file).unlink() if data is None else (path / file).write_bytes(data)
    with pytest.raises(ValueError, match=f"step-00000010.*{file}.*{message}"):
        assert_whole(find_checkpoint(tmp_path), 10)
    with pytest.raises(ValueError, match=message):
        command("inspect", tmp_path, "--verify")
    assert_whole(old, 5)


def test_identity_check_refuses_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 10)
    saved = read_manifest(path).identity
    mine = identity_of(places_of(5), replace(ADAGRAD, lr=0.7), "float32", MODEL)
    rank_files.check_identity(saved, mine, path)
    longer = places_of(2, *TABLES[:2], Table("c[x]", 41), Table("e", 9))
    wide = MODEL | {"top.weight": torch.ones(3, 4)}
    c, d = "table 'c[x]' has 40 rows in the checkpoint, 41 in the model", "has no table 'd'; "
    weight = "tensor 'top.weight' is float32 [3, 2] in the checkpoint, float32 [3, 4] in the model"
    adam = identity_of(places_of(2), RowOptimizer("adam", 0.1), "float64", {})
    for other, *messages in (
        (identity_of(longer, ADAGRAD, "float32", MODEL), c, d),
        (replace(mine, tables=mine.tables[::-1]), "a, b, c[x], d in the checkpoint, d, c[x], b, a"),
        (adam, "adagrad in the checkpoint, adam in", "float32 in", "and 1 more differences"),
        (replace(mine, settings={"eps": 1e-3, "decay": 0.0}), "the rows' eps is 1e-10 in the"),
        (identity_of(places_of(2), ADAGRAD, "float32", wide), weight),
    ):
        with pytest.raises(ValueError, match=r"^step-00000010: ") as refused:
            rank_files.check_identity(saved, other, path)
        assert all(message in str(refused.value) for message in messages), refused.value
    store = stores_of(places_of(2), ADAGRAD, "float64")[0]
    with pytest.raises(
        ValueError, match=r"shard0.safetensors: 'table0' is float32, expected float64"
    ):
        load_shard(path, store, places_of(2), 0)


@pytest.mark.parametrize("file", ["shard0.safetensors", "manifest.json"])
def test_full_disk_keeps_the_older_checkpoint(
    file: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    write_checkpoint(tmp_path, 10)
    opened = Path.open

    def full(path: Path, mode: str) -> object:
        return opened(Path("/dev/full") if path.name == file else path, mode)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="step-00000020 was not saved, step-00000010") as error:
        write_checkpoint(tmp_path, 20)
    monkeypatch.undo()
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(tmp_path / "step-00000020.run.partial" / file)
    assert_whole(find_checkpoint(tmp_path), 10)


OPTIMIZERS: dict[str, dict[str, object]]
OPTIMIZERS = {"SGD": {"momentum": 0.9}, "Adam": {"betas": (0.8, 0.95)}, "Adagrad": {}}


def dense_job(kind: str, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Training]:
    """A model with buffers and dropout; its optimizer, and schedules of different kinds."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)).to(dtype)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **OPTIMIZERS[kind])
    rates = torch.optim.lr_scheduler
    extras: dict[str, Stateful] = {"decay": rates.ExponentialLR(optimizer, 0.9)}
    if kind != "Adagrad":  # this one moves betas, or the momentum
        extras["cycle"] = rates.OneCycleLR(optimizer, 0.2, total_steps=20)
    extras["steps"] = rates.MultiStepLR(optimizer, [2, 5], 0.5)
    return model, Training(model.state_dict(), [optimizer], extras)


def train_dense(model: nn.Module, training: Training, steps: range) -> None:
    for step in steps:
        inputs = torch.from_numpy(np.random.default_rng(step).random((16, 6)))
        training.optimizers[0].zero_grad()
        model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
        training.optimizers[0].step()
        for schedule in training.extras.values():
            schedule.step()  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_dense_training_resumes_bit_identically(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: Patch
) -> None:
    model, training = dense_job(kind, dtype, seed=1)
    train_dense(model, training, range(4))
    rank_files.save_dense(tmp_path, training, torch.get_rng_state())
    kept = str([x.state_dict() for x in (*training.optimizers, *training.extras.values())])
    train_dense(model, training, range(4, 8))
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.delattr(module, name)
    other, loaded = dense_job(kind, dtype, seed=2)
    torch.set_rng_state(rank_files.load_dense(tmp_path, loaded))
    assert kept == str([x.state_dict() for x in (*loaded.optimizers, *loaded.extras.values())])
    train_dense(other, loaded, range(4, 8))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_dense_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    training, adam = (dense_job(kind, torch.float32, 1)[1] for kind in ("SGD", "Adam"))
    rank_files.save_dense(tmp_path, training, RANDOM)
    for other, message in (
        (replace(training, optimizers=adam.optimizers), r"\['SGD'\] in the checkpoint, \['Adam'\]"),
        (replace(training, extras={}), r"holds \['cycle', 'decay', 'steps'\] beside .* has \[\]"),
        (replace(training, model=MODEL), "there is no tensor 'model.top.weight'"),
        (dense_job("SGD", torch.float64, 1)[1], "is float32, expected float64"),
    ):
        with pytest.raises(ValueError, match=message):
            rank_files.load_dense(tmp_path, other)
    odd = SimpleNamespace(state_dict=lambda: {"seen": [{1}]})
    with pytest.raises(ValueError, match=r"^extra.odd.seen.0 is a set: a checkpoint holds numbers"):
        rank_files.save_dense(tmp_path, replace(training, extras={"odd": odd}), RANDOM)


def test_worker_cache_is_restored(tmp_path: Path) -> None:
    sharding, sgd = places_of(2), RowOptimizer("sgd", 1)
    kinds = [RecordWidths(sharding, optimizer, "float64") for optimizer in (ADAGRAD, ADAGRAD, sgd)]
    store, other, narrow = (CacheStore(1, sharding, kind, ADAGRAD, True) for kind in kinds)
    for i, array in enumerate([*store.records, *store.bases]):
        array[:] = np.random.default_rng(i).random(array.shape)
    rank_files.save_cache(tmp_path, 1, store, RANDOM)
    assert torch.equal(rank_files.load_cache(tmp_path, 1, other), RANDOM)
    pairs = zip([*store.records, *store.bases], [*other.records, *other.bases], strict=True)
    assert all(np.array_equal(mine, its) for mine, its in pairs)
    assert torch.equal(rank_files.load_cache(tmp_path, 1, None), RANDOM)
    with pytest.raises(ValueError, match="'records0' has the shape"):
        rank_files.load_cache(tmp_path, 1, narrow)


def command(*arguments: object) -> str:
    """The output of a command, or its error, which `main` prints in one line."""
    words = ["checkpoint", *map(str, arguments)]
    return CliRunner().invoke(cli, words, catch_exceptions=False).output


@pytest.mark.parametrize(("dtype", "num_shards"), [("float32", 1), ("float64", 3)])
def test_export_writes_tables_that_load_again(
    dtype: str, num_shards: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 200)
    monkeypatch.setattr(tensor_header, "CHECKSUM_BLOCK_BYTES", 150)
    path, out = write_checkpoint(tmp_path, 10, num_shards, dtype), tmp_path / "tables.safetensors"
    command("export", tmp_path, "--out", out)
    tables, first = load_file(out), 0
    for table, width in zip(TABLES, WIDTHS, strict=True):
        rows = range(first, first + table.num_rows)
        expected = np.array([record(row, width) for row in rows], dtype)
        np.testing.assert_array_equal(tables[table.name], expected, strict=True)
        bag = nn.EmbeddingBag(table.num_rows, width, mode="sum", dtype=getattr(torch, dtype))
        bag.load_state_dict({"weight": torch.from_numpy(tables[table.name])})
        assert np.array_equal(bag(torch.tensor([[0]])).detach().numpy()[0], expected[0])
        first += table.num_rows
    sharding = places_of(2)
    store, whole = (made(sharding, ADAGRAD, dtype)[1] for made in (stores_of, filled_stores))
    assert rank_files.load_tables(out, store, sharding, 1) == [table.name for table in TABLES]
    for records, its, width in zip(store.records, whole.records, (4, 8), strict=True):
        assert np.array_equal(records[:, :width], its[:, :width])
        assert (records[:, width:] == ADAGRAD.initial_state).all()
    command("export", path, "--out", out, "--table", "d", "--table", "b")
    assert rank_files.load_tables(out, store, sharding, 1) == ["b", "d"]
    for word, file in (("--table", "z"), ("--out", path / "shard0.safetensors")):
        with pytest.raises(ValueError, match=f"^{word} .*{Path(file).name}"):
            command("export", path, "--out", out, word, file)
    for named, message in (("z", "'z' is no table of the model"), ("a", r"expected \[23, 4\]")):
        save_file({named: np.zeros((2, 4), dtype)}, out)
        with pytest.raises(ValueError, match=message):
            rank_files.load_tables(out, store, sharding, 0)
    assert_whole(path, 10)


def test_inspect_prints_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1200, num_shards=3)
    text = command("inspect", tmp_path, "--verify")
    assert max(map(len, text.splitlines()[1:-1])) <= 80  # the first and last name the folder
    for told in ("1,200", "esd(1)", "adagrad(eps=1e-10", "9 numbers in 2", "epoch 1, batch 4096"):
        assert told in text
    assert re.search(r"c\[x\] +\S +40 \S +4 \S +4 \S +1.3 KB", text)


def test_commands_find_the_newest_checkpoint_of_a_run(tmp_path: Path) -> None:
    for step in (7, 9):
        write_checkpoint(tmp_path / "run" / "checkpoints", step=step)
    newest = tmp_path / "run" / "checkpoints" / "step-00000009"
    assert command("inspect", tmp_path / "run").startswith(f"{newest}\n")
    out = tmp_path / "tables.safetensors"
    said = CliRunner().invoke(cli, ["checkpoint", "export", f"{tmp_path}/run", "--out", str(out)])
    assert said.stderr.startswith(f"newest checkpoint: {newest}\n")
    piped = CliRunner().invoke(cli, ["checkpoint", "export", f"{tmp_path}/run", "--out", "-"])
    assert piped.stdout_bytes == out.read_bytes()
    (tmp_path / "run" / "other").mkdir()
    write_checkpoint(tmp_path / "run" / "other", step=3)
    with pytest.raises(ValueError, match=r"no checkpoint in this folder \(but in .*other\)"):
        find_checkpoint(tmp_path / "run")


def test_cli_import_loads_neither_torch_nor_xxhash() -> None:
    unseen = "not {'torch', 'xxhash'}.isdisjoint(sys.modules)"
    load = "[embroute.cli.main.load_command(name) for name, *_ in embroute.cli.main.COMMANDS]"
    code = f"import sys, embroute.cli.main; {load}; sys.exit({unseen})"
    subprocess.run([sys.executable, "-c", code], check=True)
