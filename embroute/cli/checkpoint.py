"""`embroute checkpoint`: look into checkpoints, and take tables out of them."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from rich.markup import escape
from rich.table import Table

from embroute.cli.options import STDOUT, output_file
from embroute.cli.outputs import console, tell, tell_next, tell_written
from embroute.config.scratch import scratch_folder
from embroute.cost.step_time import OPTIMIZERS

# Functions import torch and xxhash, because the other commands do not need them.
if TYPE_CHECKING:
    from embroute.checkpoint.manifest import Identity, Manifest
    from embroute.checkpoint.tensor_file import FileInfo, TensorFile
    from embroute.kernels.rows import Floats

_AGES = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


@click.group("checkpoint")
def checkpoint_group() -> None:
    """Look into checkpoints, and take tables out of them."""


@checkpoint_group.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read every file and compare the checksums.")
def inspect_command(path: Path, verify: bool) -> None:
    """Show the contents of a checkpoint, and whether it is complete.

    PATH is the folder of a run or of checkpoints (the newest is shown), or of one step.
    """
    _need("torch", "xxhash")
    from embroute.checkpoint import manifest as manifests
    from embroute.checkpoint.folders import find_checkpoint
    from embroute.checkpoint.planner_state import read_position

    folder = find_checkpoint(path)
    manifest = manifests.read_manifest(folder)
    if verify:
        manifests.verify(folder, manifest.files)
    checked = "checksums right" if verify else "sizes and headers right"
    fields = read_position(folder).items()
    position = ", ".join(f"{k} {v}" for k, v in fields if not isinstance(v, list | dict))
    tables = console()
    tables.print(str(folder), markup=False, highlight=False, soft_wrap=True)
    tables.print(_facts(manifest, checked, position))
    tables.print(_tables(manifest.identity))
    tell_next("embroute", "checkpoint", "export", str(folder), "--out", "tables.safetensors")


@checkpoint_group.command("export")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Write tables here.")
@click.option(
    "--table", "names", multiple=True, metavar="NAME", help="Only this table; repeatable."
)
def export_command(path: Path, out: Path, names: tuple[str, ...]) -> None:
    """Write tables as one safetensors file: one tensor per table, without optimizer state.

    A tensor fits a plain nn.EmbeddingBag: bag.load_state_dict({"weight": tensors[NAME]}). PATH is
    the folder of a run or of checkpoints (the newest is exported), or of one step.
    """
    _need("torch", "xxhash")
    from embroute.checkpoint.folders import find_checkpoint

    source, target = find_checkpoint(path), output_file("--out", out)
    if source != path:
        tell(f"newest checkpoint: {source}")
    if target != STDOUT:
        info = export_tables(source, target, names)
        tell_written(out, f" ({_size(info.num_bytes)})")
        run = [str(path / "run.yaml")] if (path / "run.yaml").is_file() else []
        tell_next("embroute", "train", *run, "--tables", str(out), "--out", "run-from-tables")
        return
    with scratch_folder("export") as folder:
        export_tables(source, folder / "tables", names)
        with (folder / "tables").open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)


def _need(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ValueError(f"this needs {' and '.join(missing)}: pip install 'embroute[train]'")


def _facts(manifest: Manifest, checked: str, position: str) -> Table:
    identity = manifest.identity
    settings = ", ".join(f"{name}={value:g}" for name, value in identity.settings.items())
    parameters = sum(int(np.prod(tensor.shape)) for tensor in identity.dense)
    age_s = max(0.0, time.time() - manifest.saved_s)
    size, unit = next(((s, u) for s, u in _AGES if age_s >= 2 * s), _AGES[-1])
    rows = (
        ("step", f"{manifest.step:,}"),
        ("policy", manifest.policy),
        ("workers", f"{manifest.num_workers}"),
        ("shards", f"{manifest.num_shards}"),
        ("row optimizer", f"{identity.optimizer}({settings}), {identity.dtype}"),
        ("dense model", f"{parameters:,} numbers in {len(identity.dense)} tensors"),
        ("data position", position),
        ("age", f"{age_s / size:.0f} {unit}"),
        ("complete", f"yes: {len(manifest.files)} files, {_size(manifest.num_bytes)}, {checked}"),
    )
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _tables(identity: Identity) -> Table:
    table = Table(title="Tables, with the state of the row optimizer")
    table.add_column("table", overflow="fold")
    for heading in ("rows", "width", "state", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    item_bytes = np.dtype(identity.dtype).itemsize
    for name, rows, width in identity.tables:
        state = OPTIMIZERS[identity.optimizer](width)
        num_bytes = rows * (width + state) * item_bytes
        table.add_row(escape(name), f"{rows:,}", f"{width}", f"{state}", _size(num_bytes))
    return table


def _size(num_bytes: int) -> str:
    power = min(4, max(0, len(str(num_bytes)) - 1) // 3)
    unit = ("bytes", "KB", "MB", "GB", "TB")[power]
    return f"{num_bytes / 1000**power:.{min(power, 1)}f} {unit}"


def export_tables(path: Path, out: Path, names: Sequence[str] = ()) -> FileInfo:
    """Write tables of a checkpoint as one safetensors file; without `names`, every table.

    Memory holds one block of rows at a time. An older file stays until the new file is complete.
    """
    from embroute.checkpoint.folders import MANIFEST, sync_folder
    from embroute.checkpoint.manifest import read_manifest
    from embroute.checkpoint.tensor_file import Tensor, write_tensors

    manifest, out = read_manifest(path), out.resolve()
    tables, dtype = manifest.identity.tables, manifest.identity.dtype
    known = [table.name for table in tables]
    for name in names:
        if name not in known:
            raise ValueError(f"--table {name}: no such table (there are {', '.join(known)})")
    if (out.parent / MANIFEST).exists() or (out.exists() and not out.is_file()):
        raise ValueError(f"--out {out}: neither a new file nor one that may be replaced")
    firsts = accumulate((table.num_rows for table in tables), initial=0)
    shards = _shards(path, manifest)
    tensors = []
    for t, ((name, count, width), first) in enumerate(zip(tables, firsts, strict=False)):
        if not names or name in names:
            pieces = _values(shards, t, range(first, first + count), np.empty((1, width), dtype))
            tensors.append(Tensor(name, dtype, (count, width), pieces))
    part = out.with_name(f"{out.name}.partial")
    info = write_tensors(part, tensors, {"format": "pt", "step": str(manifest.step)})
    part.replace(out)
    sync_folder(out.parent)
    return info


def _shards(path: Path, manifest: Manifest) -> list[TensorFile]:
    """The shards' files, after a check that their tables match the manifest."""
    from embroute.checkpoint.manifest import open_shards
    from embroute.checkpoint.rank_files import rows_at

    identity, files = manifest.identity, open_shards(path, manifest.num_shards)
    firsts = accumulate((table.num_rows for table in identity.tables), initial=0)
    for t, (table, first) in enumerate(zip(identity.tables, firsts, strict=False)):
        columns = table.width + OPTIMIZERS[identity.optimizer](table.width)
        for shard, file in enumerate(files):
            rows = rows_at(first, first + table.num_rows, shard, len(files))
            file.expect(f"table{t}", (len(rows), columns), identity.dtype)
    return files


def _values(
    shards: Sequence[TensorFile], table: int, rows: range, like: Floats
) -> Iterator[memoryview]:
    """The values of a table in pieces, merged from its shards; `like` has the shape of one row."""
    from embroute.checkpoint.rank_files import copy_rows, rows_at
    from embroute.checkpoint.tensor_file import PIECE_BYTES

    count = max(1, PIECE_BYTES // like.nbytes)
    for start in range(0, len(rows), count):
        block = rows[start : start + count]
        out = np.empty((len(block), like.shape[1]), like.dtype)
        for shard, file in enumerate(shards):
            shard_rows = rows_at(rows.start, rows.stop, shard, len(shards))
            copy_rows(file, f"table{table}", shard_rows, block, out)
        yield out.reshape(-1).view(np.uint8).data
