"""Ways to damage a checkpoint, and the commands that do not read the damaged part."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from embroute.checkpoint.folders import MANIFEST
from embroute.checkpoint.manifest import manifest_bytes
from embroute.checkpoint.tensor_header import LENGTH_BYTES, _with_checksum, checksum

Harm = Callable[[Path], object]
Fields = dict[str, Any]
INSPECT, VERIFY, EXPORT, PREDICT, RESUME = "inspect", "verify", "export", "predict", "resume"
KINDS = ("planner", "dense", "shard0", "worker1")
# Commands that do not read the tensors of a kind of file; headers are read by all of them.
UNREAD = {
    "planner": (INSPECT, EXPORT, PREDICT),
    "dense": (INSPECT, EXPORT),
    "shard0": (INSPECT,),
    "worker1": (INSPECT, EXPORT, PREDICT),
}


@dataclass(frozen=True)
class Damage:
    """A change of a checkpoint folder, the commands that do not see it, and whether errors offer
    a way out."""

    harm: Harm
    unseen: tuple[str, ...] = ()
    way_out: bool = True


def file(kind: str) -> str:
    """File name of a rank's tensors."""
    return f"{kind}.safetensors"


def header_bytes(path: Path) -> int:
    """Bytes before the tensors."""
    return LENGTH_BYTES + int.from_bytes(path.read_bytes()[:LENGTH_BYTES], "little")


def flip(path: Path, at: int) -> None:
    """Flip a bit; `at` counts from the end if it is negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def flip_name(name: str, at: int) -> Harm:
    return lambda folder: flip(folder / name, at)


def flip_header(kind: str) -> Harm:
    """Flip a bit in the middle of a header."""
    return lambda folder: flip(folder / file(kind), header_bytes(folder / file(kind)) // 2)


def flip_first(kind: str) -> Harm:
    """Flip a bit of the first tensor."""
    return lambda folder: flip(folder / file(kind), header_bytes(folder / file(kind)))


def flip_text(kind: str, text: bytes) -> Harm:
    """Flip a bit of a header's text behind a name."""

    def harm(folder: Path) -> None:
        path = folder / file(kind)
        flip(path, path.read_bytes().index(text) + len(text) + 8)

    return harm


def edit(name: str, change: Callable[[bytes], bytes]) -> Harm:
    """Replace the bytes of a file."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def reseal(change: Callable[[Fields], object]) -> Harm:
    """Edit a manifest and give it a valid checksum again."""

    def harm(folder: Path) -> None:
        fields = json.loads((folder / MANIFEST).read_text())
        del fields["checksum"]
        change(fields)
        (folder / MANIFEST).write_bytes(manifest_bytes(fields))

    return harm


def put(**values: object) -> Harm:
    """Replace fields of a manifest and reseal it."""
    return reseal(lambda fields: fields.update(values))


def put_identity(**values: object) -> Harm:
    return reseal(lambda fields: fields["identity"].update(values))


def put_file(at: int, value: object) -> Harm:
    """Replace a value of the first file entry in a manifest."""

    def change(fields: Fields) -> None:
        fields["files"][0][at] = value

    return reseal(change)


def rehead(kind: str, change: Callable[[Fields], object]) -> Harm:
    """Replace the header of a tensor file, with valid checksums."""

    def harm(folder: Path) -> None:
        path = folder / file(kind)
        raw, start = path.read_bytes(), header_bytes(path)
        header = json.loads(raw[LENGTH_BYTES:start])
        header["__metadata__"]["header_sum"] = "0" * 16
        change(header)
        text = json.dumps(header).encode()
        head = _with_checksum(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        path.write_bytes(head + raw[start:])
        reseal(partial(_listed, path, head))(folder)

    return harm


def _listed(path: Path, head: bytes, fields: Fields) -> None:
    """Update the manifest's entry of a changed file."""
    for entry in fields["files"]:
        if entry[0] == path.name:
            entry[1:] = [path.stat().st_size, checksum(head)]


def retell(kind: str, name: str, text: str | None) -> Harm:
    """Replace or remove a text in a file's header."""

    def change(header: Fields) -> None:
        header["__metadata__"][name] = text
        if text is None:
            del header["__metadata__"][name]

    return rehead(kind, change)


def change_tensor(kind: str, **values: object) -> Harm:
    """Change the type, shape or position of a file's first tensor."""

    def change(header: Fields) -> None:
        name = next(name for name in header if name != "__metadata__")
        header[name].update(values)

    return rehead(kind, change)


def swap(folder: Path) -> None:
    """Swap the files of two shards."""
    one, two = folder / file("shard0"), folder / file("shard1")
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)


def swap_and_list(folder: Path) -> None:
    """Swap the files of two shards and list them so in the manifest."""
    swap(folder)

    def change(fields: Fields) -> None:
        entries = {entry[0]: entry for entry in fields["files"]}
        one, two = entries[file("shard0")], entries[file("shard1")]
        one[1:], two[1:] = two[1:], one[1:]

    reseal(change)(folder)


def of_another_step(kind: str) -> Harm:
    def harm(folder: Path) -> None:
        shutil.copy(folder.with_name("step-00000010") / file(kind), folder / file(kind))

    return harm


def forget(kind: str, **values: object) -> Harm:
    """Remove a file from the folder and the manifest, which then names fewer ranks."""

    def change(fields: Fields) -> None:
        fields.update(values)
        fields["files"] = [entry for entry in fields["files"] if entry[0] != file(kind)]

    def harm(folder: Path) -> None:
        (folder / file(kind)).unlink()
        reseal(change)(folder)

    return harm


def elsewhere(name: str) -> Harm:
    """Move a file out of the folder and link to it."""

    def harm(folder: Path) -> None:
        outside = (folder / name).rename(folder.parent.parent / name)
        (folder / name).symlink_to(outside)

    return harm


def replaced(name: str, make: Callable[[Path], object]) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return harm


def renamed(folder: Path) -> None:
    """Folder and manifest say step 15, the planner state says 20."""
    put(step=15)(folder)
    folder.rename(folder.with_name("step-00000015"))


def duplicate(fields: Fields) -> None:
    fields["files"][1] = fields["files"][0]


def named(name: str) -> Harm:
    """Name a file outside the checkpoint first in the manifest."""

    def harm(folder: Path) -> None:
        target = Path(name) if name.startswith("/") else folder / name
        if not name.startswith("/proc"):
            shutil.copy(folder / file("planner"), target)
        put_file(0, name)(folder)

    return harm


def _flips() -> Mapping[str, Damage]:
    """Flip a bit in each part of each kind of file."""
    found: dict[str, Damage] = {}
    for kind in KINDS:
        found[f"header of {kind}"] = Damage(flip_header(kind))
        found[f"first tensor of {kind}"] = Damage(flip_first(kind), UNREAD[kind])
        found[f"last byte of {kind}"] = Damage(flip_name(file(kind), -1), UNREAD[kind])
    # The last tensor there is the random state, which a prediction does not read.
    last = (*UNREAD["dense"], PREDICT)
    found["last byte of dense"] = Damage(flip_name(file("dense"), -1), last)
    for text in (b'"header_sum": "', b'"block_bytes": "', b'"block_sums": "'):
        found[f"text of {text.decode()}"] = Damage(flip_text("shard1", text))
    found["length of a header"] = Damage(flip_name(file("shard0"), 1))
    found["a bit of the manifest"] = Damage(flip_name(MANIFEST, 300))
    found["a space of the manifest"] = Damage(edit(MANIFEST, lambda data: data + b" "))
    return found


_FILES = {
    "truncated by a byte": Damage(edit(file("shard1"), lambda data: data[:-1])),
    "truncated to half": Damage(edit(file("dense"), lambda data: data[: len(data) // 2])),
    "truncated to 5 bytes": Damage(edit(file("worker0"), lambda data: data[:5])),
    "extended": Damage(edit(file("planner"), lambda data: data + b"\0")),
    "emptied": Damage(edit(file("shard0"), lambda data: b"")),
    "zeros of the same length": Damage(edit(file("worker1"), lambda data: bytes(len(data)))),
    "two shards swapped": Damage(swap),
    "two shards swapped, in the manifest too": Damage(swap_and_list),
    "a shard of another step": Damage(of_another_step("shard1")),
    "a planner of another step": Damage(of_another_step("planner")),
    "dense of another step": Damage(of_another_step("dense")),
    "missing worker": Damage(lambda folder: (folder / file("worker0")).unlink()),
    "missing shard": Damage(lambda folder: (folder / file("shard1")).unlink()),
    "a file too many": Damage(lambda f: shutil.copy(f / file("shard0"), f / file("shard2"))),
    "a link out of the folder": Damage(elsewhere(file("shard0"))),
    "a link to itself": Damage(replaced(file("dense"), lambda path: path.symlink_to(path))),
    "a pipe": Damage(replaced(file("planner"), os.mkfifo)),
    "a folder": Damage(replaced(file("shard1"), os.mkdir)),
    "the folder renamed": Damage(lambda folder: folder.rename(folder.with_name("step-00000025"))),
    "a shard forgotten": Damage(forget("shard1", num_shards=1)),
    "a worker forgotten": Damage(forget("worker1", num_workers=1)),
}


def _without(name: str, fields: Fields) -> None:
    del fields[name]


_WRONG: Mapping[str, object] = {
    "step": "20",
    "policy": 7,
    "num_workers": 2.5,
    "num_shards": True,
    "identity": [],
    "files": {},
    "run_id": "../run",
    "saved_s": "now",
}

_MANIFEST = {
    "manifest missing": Damage(lambda folder: (folder / MANIFEST).unlink()),
    "manifest truncated": Damage(edit(MANIFEST, lambda data: data[:-40])),
    "manifest empty": Damage(edit(MANIFEST, lambda data: b"")),
    "manifest no UTF-8": Damage(edit(MANIFEST, lambda data: data.replace(b"esd", b"\xff\xfed"))),
    "manifest a list": Damage(edit(MANIFEST, lambda data: b"[]")),
    "manifest too deep": Damage(edit(MANIFEST, lambda data: b'{"a":' * 100_000)),
    "manifest a pipe": Damage(replaced(MANIFEST, os.mkfifo)),
    "manifest a link": Damage(elsewhere(MANIFEST)),
    "manifest of version 1": Damage(put(version=1), way_out=False),
    "manifest of version 5": Damage(put(version=5), way_out=False),
    "a name twice": Damage(
        edit(MANIFEST, lambda d: d.replace(b'"version"', b'"step":9,"version"'))
    ),
    "NaN": Damage(put(saved_s=float("nan"))),
    "infinity": Damage(
        edit(MANIFEST, lambda data: data.replace(b'"saved_s": ', b'"saved_s": 1e999'))
    ),
    **{f"type of {name}": Damage(put(**{name: value})) for name, value in _WRONG.items()},
    **{f"no {name}": Damage(reseal(partial(_without, name))) for name in _WRONG},
    "an unknown field": Damage(put(more=1)),
    "step changed": Damage(edit(MANIFEST, lambda d: d.replace(b'"step": 20', b'"step": 10'))),
    "step changed and resealed": Damage(put(step=10)),
    "step changed, folder renamed": Damage(renamed),
    "no files": Damage(put(files=[])),
    "a file twice": Damage(reseal(duplicate)),
    "an absolute name": Damage(named("/proc/self/status")),
    "a name outside": Damage(named("../planner.safetensors")),
    "a name in a folder": Damage(put_file(0, "./planner.safetensors")),
    "bytes of a file": Damage(put_file(1, -1)),
    "checksum of a header": Damage(put_file(2, "0" * 16)),
    "a million shards": Damage(put(num_shards=10**12)),
    "tables of a wrong type": Damage(put_identity(tables=[["a", "2", 3]])),
    "an unknown optimizer": Damage(put_identity(optimizer="adamax")),
    "an unknown type of rows": Damage(put_identity(dtype="object")),
    "a shape of a wrong type": Damage(put_identity(dense=[["a", "float32", [2.5]]])),
    "settings of a wrong type": Damage(put_identity(settings={"eps": None})),
}

_HUGE = (1 << 62).to_bytes(8, "little")
_HEADERS = {
    "a huge header": Damage(edit(file("shard0"), lambda data: _HUGE + data[8:])),
    "a header that is no JSON": Damage(edit(file("dense"), lambda d: d[:8] + b"}" + d[9:])),
    "overlapping tensors": Damage(change_tensor("shard0", data_offsets=[0, 8])),
    "a tensor before the start": Damage(change_tensor("shard0", data_offsets=[-8, 8])),
    "an unknown type": Damage(change_tensor("dense", dtype="F4")),
    "a negative shape": Damage(change_tensor("planner", shape=[-1, -1])),
    "a shape that is too large": Damage(change_tensor("worker0", shape=[1 << 70])),
    "a tensor that is a number": Damage(rehead("dense", lambda header: header.update(more=3))),
    "a text that is a number": Damage(
        rehead("planner", lambda h: h["__metadata__"].update(more=3))
    ),
    "no sums of blocks": Damage(retell("shard0", "block_sums", "")),
    "blocks of no bytes": Damage(retell("shard0", "block_bytes", "0")),
    "no state": Damage(retell("planner", "state", None)),
    "a state without a step": Damage(retell("planner", "state", "{}")),
    "a state that is no JSON": Damage(retell("planner", "state", "{")),
    "no position": Damage(retell("planner", "position", None), (EXPORT, PREDICT)),
    "a position that is a list": Damage(retell("planner", "position", "[1]"), (EXPORT, PREDICT)),
    "a position without samples": Damage(
        retell("planner", "position", "{}"), (INSPECT, VERIFY, EXPORT, PREDICT)
    ),
    "optimizers that are a number": Damage(
        retell("dense", "optimizers", "3"), (INSPECT, VERIFY, EXPORT, PREDICT)
    ),
    "optimizers of no tensors": Damage(
        retell("dense", "optimizers", '[{"tensor": "x"}, {"dict": []}]'),
        (INSPECT, VERIFY, EXPORT, PREDICT),
    ),
    "optimizers without groups": Damage(
        retell("dense", "optimizers", '[{"dict": []}, {"dict": []}]'),
        (INSPECT, VERIFY, EXPORT, PREDICT),
    ),
    "extras too deep": Damage(
        retell("dense", "extras", "[" * 100_000), (INSPECT, VERIFY, EXPORT, PREDICT)
    ),
    "a number of shards that is none": Damage(retell("shard0", "shards", "two")),
}

DAMAGES: Mapping[str, Damage] = {**_flips(), **_FILES, **_MANIFEST, **_HEADERS}
