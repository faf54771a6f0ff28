"""Every command that reads a damaged part of a checkpoint refuses it in one line."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embroute.checkpoint import tensor_header
from embroute.checkpoint.folders import MANIFEST
from embroute.checkpoint.manifest import read_manifest
from embroute.checkpoint.tensor_file import TensorFile
from embroute.cli.main import main
from embroute.config.data_options import DataOptions
from embroute.config.run_file import CHECKPOINTS, RUN_FILE, write_run_file
from embroute.config.run_options import RunConfig
from embroute.launch.in_process import run_in_process
from embroute.train import loop
from tests.attack.damage import (
    DAMAGES,
    EXPORT,
    INSPECT,
    PREDICT,
    RESUME,
    VERIFY,
    file,
)
from tests.sizes import marked_full

pytestmark = pytest.mark.xdist_group("damage")

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
RUN = RunConfig(
    data_options=DataOptions(limit=700),
    policy="esd(1)",
    dim="2",
    hidden="4",
    batch=8,
    steps=20,
    held_out=0.1,
    checkpoint_every=10,
    workers=2,
    shards=2,
    cache="0.5",
)
NEWEST = "step-00000020"
# One of each kind.
SMALL = [
    "header of planner",
    "last byte of shard0",
    "a bit of the manifest",
    "truncated to half",
    "missing shard",
    "a link out of the folder",
    "a pipe",
    "manifest truncated",
    "manifest of version 5",
    "type of num_shards",
    "a name outside",
    "a huge header",
    "overlapping tensors",
    "a state that is no JSON",
]
# Found by the one function that reads manifests and headers for all commands.
SEEN_BY_ALL = [name for name, damage in DAMAGES.items() if not damage.unseen]


def train(run: RunConfig, folder: Path) -> None:
    run_in_process(2, 2, lambda rank: loop.train_rank(run, rank, folder, threading.Event()))


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, whose files have many blocks."""
    folder: Path = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_header, "CHECKSUM_BLOCK_BYTES", 512)
        train(RUN, folder)
    write_run_file(RUN, folder / RUN_FILE)
    return folder


@pytest.fixture
def damaged(run_folder: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run that a test may damage."""
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    yield folder
    shutil.rmtree(folder)


def command(*words: object) -> Callable[[Patch], int]:
    """A call that runs a command line and returns its exit code."""

    def call(patch: Patch) -> int:
        patch.setattr(sys, "argv", ["embroute", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return call


def resume(folder: Path, run: RunConfig) -> Callable[[Patch], int]:
    """A call that resumes a run; as `embroute.train.program`, it turns a ValueError into exit
    code 2."""

    def call(patch: Patch) -> int:
        patch.setattr(loop, "monitor_of", lambda *_: None)  # a run that fails leaves its file open
        try:
            train(run.replace(steps=21, resume=True), folder)
        except ValueError as error:
            print(f"embroute: {error}", file=sys.stderr)
            return 2
        return 0

    return call


STATUS = ("newest checkpoint: ", "ranks have started")  # lines that are no errors


def call_of(name: str, folder: Path) -> Callable[[Patch], int]:
    saved, out = folder / CHECKPOINTS, folder / "out"
    return {
        INSPECT: command("checkpoint", "inspect", saved),
        VERIFY: command("checkpoint", "inspect", saved, "--verify"),
        EXPORT: command("checkpoint", "export", saved, "--out", out),
        PREDICT: command("predict", folder, "--out", out),
        RESUME: resume(folder, RUN),
    }[name]


def check(name: str, damage: str, folder: Path, patch: Patch, capture: Capture) -> None:
    """Assert that the command ends as the table of damages says, with one line."""
    code = call_of(name, folder)(patch)
    lines = capture.readouterr().err.splitlines(keepends=True)
    said = "".join(line for line in lines if not line.startswith(STATUS))
    if name in DAMAGES[damage].unseen:
        assert code == 0, (name, said)
        (folder / "out").unlink(missing_ok=True)
        return
    assert code == 2, (name, said)
    assert said.count("\n") == 1, (name, said)
    assert "step-000000" in said
    assert not DAMAGES[damage].way_out or "to go on from step-00000010" in said, (name, said)
    assert not (folder / "out").exists(), name
    assert not (folder / "out.partial").exists(), name


@pytest.mark.parametrize("damage", marked_full(DAMAGES, SMALL))
def test_commands_refuse_a_damaged_checkpoint(
    damage: str, damaged: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    DAMAGES[damage].harm(damaged / CHECKPOINTS / NEWEST)
    models = () if damage in SEEN_BY_ALL else (PREDICT, RESUME)
    for name in (INSPECT, VERIFY, EXPORT, *models):
        check(name, damage, damaged, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("damage", SEEN_BY_ALL)
def test_predict_and_resume_refuse_a_damaged_checkpoint(
    damage: str, damaged: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    DAMAGES[damage].harm(damaged / CHECKPOINTS / NEWEST)
    for name in (PREDICT, RESUME):
        check(name, damage, damaged, monkeypatch, capsys)


@pytest.mark.parametrize("name", [INSPECT, VERIFY, EXPORT, PREDICT, RESUME])
def test_commands_accept_a_whole_checkpoint(name: str, damaged: Path, monkeypatch: Patch) -> None:
    assert call_of(name, damaged)(monkeypatch) == 0


def assert_every_byte_counts(path: Path, read: Callable[[], object]) -> None:
    """Assert that reading fails after a change of any byte; every seventh byte is tried."""
    read()
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        with pytest.raises(ValueError, match=r"is damaged|has version"):
            read()


def test_changed_byte_of_a_manifest_is_detected(damaged: Path) -> None:
    folder = damaged / CHECKPOINTS / NEWEST
    assert_every_byte_counts(folder / MANIFEST, lambda: read_manifest(folder))


def test_changed_byte_of_a_tensor_file_is_detected(damaged: Path) -> None:
    path = damaged / CHECKPOINTS / NEWEST / file("worker0")
    assert_every_byte_counts(path, lambda: TensorFile(path).verify())
