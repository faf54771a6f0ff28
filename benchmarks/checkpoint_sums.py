"""Checksums of checkpoints: time they add to reading and writing a shard's file, in page cache.

`load_shard` reads the file with and without comparing sums, in turns. The page cache is the
hardest case: a disk is slower, and the sums cost the same.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np

from benchmarks.record import markdown, record
from embroute.checkpoint.rank_files import load_shard, save_shard
from embroute.checkpoint.tensor_file import TensorFile
from embroute.checkpoint.tensor_header import CHECKSUM_BLOCK_BYTES, Header, parse_header
from embroute.config.cluster import uniform_cluster
from embroute.data.schema import Schema, Table
from embroute.engine.optim import RowOptimizer
from embroute.engine.sharding import RowSharding
from embroute.engine.store import RecordWidths, ShardStore
from embroute.planner.setup import Setup

TARGET = 0.10  # of the time of a reading without sums
WIDTH = 32
ADAGRAD = RowOptimizer("adagrad", 0.1)
TABLES = 4


class NoSum:
    """A hash that does nothing."""

    def update(self, _: memoryview) -> None:
        """Ignore the data."""

    def hexdigest(self) -> str:
        """Zeros."""
        return "0" * 16


def places_of(num_shards: int, num_rows: int) -> RowSharding:
    tables = tuple(Table(f"t{t}", num_rows // TABLES) for t in range(TABLES))
    return RowSharding(Setup(Schema(tables, ()), uniform_cluster(1, num_shards), (WIDTH,) * TABLES))


def stores_of(sharding: RowSharding, filled: bool = False) -> list[ShardStore]:
    widths, rng = RecordWidths(sharding, ADAGRAD, "float32"), np.random.default_rng(0)
    stores = [ShardStore(k, sharding, widths, ADAGRAD) for k in range(sharding.num_shards)]
    for records in (records for store in stores for records in store.records if filled):
        records[:] = rng.random(records.shape, np.float32)
    return stores


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def unsummed() -> Iterator[None]:
    """Read tensor files as if they had no sums, until the block ends."""

    def parsed(raw: bytes, data_bytes: int) -> Header:
        return replace(parse_header(raw, data_bytes), sums=None)

    unchecked = partial(TensorFile, needs_sums=False)
    with (
        patch("embroute.checkpoint.tensor_file.parse_header", parsed),
        patch("embroute.checkpoint.rank_files.TensorFile", unchecked),
        patch("embroute.checkpoint.manifest.TensorFile", unchecked),
    ):
        yield


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def reading(
    folder: Path, old: int, new: int, given: argparse.Namespace, cold: bool = False
) -> list[object]:
    """Read the first of `new` shards from files of `old` shards, into memory that is reused."""
    num_rows = given.megabytes * 1_000_000 // (2 * WIDTH * 4) * old
    sharding, path = places_of(old, num_rows), folder / f"of{old}"
    if not path.exists():
        path.mkdir()
        for shard, store in enumerate(stores_of(sharding, filled=True)):
            save_shard(path, store, sharding, shard)
    target = places_of(new, num_rows)
    store = stores_of(target, filled=True)[0]
    ways: list[Callable[[], AbstractContextManager[None]]] = [unsummed, nullcontext]
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(given.rounds):
        for way, taken in zip(ways, times, strict=True):
            for file in path.iterdir() if cold else ():
                forget(file)
            with way():
                taken.append(seconds(lambda: load_shard(path, store, target, 0)))
    size = sum(file.stat().st_size for file in path.iterdir())
    if old == new:
        size //= old
    where = ", from disk" if cold else ""
    return _row(f"read: {old} shards as the first of {new}{where}", size, times)


def writing(folder: Path, given: argparse.Namespace) -> list[object]:
    """Write a shard's file, without waiting for a disk."""
    num_rows = given.megabytes * 1_000_000 // (2 * WIDTH * 4)
    sharding, path = places_of(1, num_rows), folder / "written"
    path.mkdir()
    (store,) = stores_of(sharding, filled=True)
    checked, plain = [], []
    with patch("os.fsync"):
        for _ in range(given.rounds):
            checked.append(seconds(lambda: save_shard(path, store, sharding, 0)))
            with patch("xxhash.xxh3_64", NoSum):
                plain.append(seconds(lambda: save_shard(path, store, sharding, 0)))
    size = sum(file.stat().st_size for file in path.iterdir())
    return _row("write, without fsync", size, [plain, checked])


def _row(name: str, size: int, times: list[list[float]]) -> list[object]:
    """Rates without and with sums, and the extra time with sums."""
    plain, checked = times
    more = median(a / b - 1 for a, b in zip(checked, plain, strict=True))
    rates = [f"{size / median(taken) / 1e9:.2f}" for taken in times]
    print(name, *rates, f"{more:+.1%}", flush=True)
    return [name, f"{size / 1e6:,.0f}", *rates, f"{more:+.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="of a shard's file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where the files go [the system's]")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with TemporaryDirectory(dir=given.folder) as scratch:
        folder = Path(scratch)
        rows = [
            reading(folder, 1, 1, given),
            reading(folder, 2, 2, given),
            reading(folder, 1, 2, given),
            reading(folder, 2, 3, given),
            reading(folder, 1, 1, given, cold=True),
            writing(folder, given),
        ]
    message = (
        f"A shard's records of {WIDTH} values and {WIDTH} numbers of Adagrad, float32, "
        f"{given.megabytes} MB a shard, in page cache unless a row says otherwise; blocks of "
        f"{CHECKSUM_BLOCK_BYTES >> 10} KiB, XXH3. Without and with sums in turns, "
        f"{given.rounds} times; rates are medians, the last column is the median over turns. "
        f"Load of the machine before: {load:.1f}, after: {os.getloadavg()[0]:.1f}."
    )
    headings = ["work", "MB", "GB/s without", "GB/s with sums", f"more (target {TARGET:.0%})"]
    record(
        "checkpoint_sums", "Checksums of checkpoints", f"{message}\n\n{markdown(headings, rows)}"
    )


if __name__ == "__main__":
    main()
