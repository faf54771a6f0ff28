"""Cluster files: from a preset's name or a YAML file to a Cluster, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from embroute.config.cluster import CLUSTER_PRESETS, Cluster, Host, Worker
from embroute.config.spec import parse_int, shown

MOST_WORKERS = 1024
USUAL_SIZE = 8  # workers of a preset without a number


def open_cluster(text: str) -> Cluster:
    """A preset such as `edge-8` (any number of workers), or a YAML file (docs/cluster.md)."""
    match = re.fullmatch(r"([a-z]+)-([0-9]+)", text)
    if match and match.group(1) in CLUSTER_PRESETS:
        count = parse_int(f"--network {shown(text)}: workers", match.group(2), 1, MOST_WORKERS)
        return CLUSTER_PRESETS[match.group(1)](count)
    if text.endswith((".yaml", ".yml")) and is_file(text):
        return read_cluster(Path(text))
    names = ", ".join(f"{name}-N" for name in CLUSTER_PRESETS)
    raise ValueError(
        f"--network {shown(text)}: neither a preset ({names}) nor a YAML file that exists"
    )


def open_network(network: str | Cluster, workers: int | None = None) -> Cluster:
    """A cluster that must have this number of workers; a preset may leave its number out."""
    name = network if isinstance(network, str) else "a cluster"
    if name in CLUSTER_PRESETS:
        name = f"{name}-{workers or USUAL_SIZE}"
    cluster = open_cluster(name) if isinstance(network, str) else network
    if workers not in (None, cluster.num_workers):
        preset, _, count = name.rpartition("-")
        is_preset = preset in CLUSTER_PRESETS and count.isdigit()
        hint = f"; use --network {preset}-{workers}" if is_preset else ""
        raise ValueError(
            f"--workers {workers}: --network {name} has {cluster.num_workers} workers{hint}"
        )
    return cluster


def is_file(text: str) -> bool:
    """Whether a file has this path; False for a path that no file system allows."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # the path is too long, or has a NUL
        return False


_RATES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = (1e-3, 1e15)  # bytes per second
_LATENCY = (0.0, 3600.0)  # seconds
_SLOWNESS = (1e-6, 1e6)
_MAX_YAML = 10**6  # characters
_MAX_KEYS = 10**4  # of one mapping


def _quantity(where: str, value: object, units: Mapping[str, float]) -> float:
    pattern = r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-zA-Z]+)(/s)?\s*"
    match = re.fullmatch(pattern, value) if isinstance(value, str) else None
    if not match or match.group(2).lower() not in units:
        raise ValueError(
            f"{where}: expected a number with one of {', '.join(units)}, got {shown(value)}"
        )
    return float(match.group(1)) * units[match.group(2).lower()]


def _check_range(
    where: str, text: object, value: float, span: tuple[float, float], unit: str
) -> None:
    """Refuse an unreal host: simulated times would be infinite or zero."""
    if not span[0] <= value <= span[1]:
        bounds = f"between {span[0]:g} and {span[1]:g}{unit}"
        raise ValueError(f"{where} must be {bounds}, got {shown(text)}")


def _mapping(where: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a mapping, got {shown(value)}")
    return {str(key): item for key, item in value.items()}


def _check_keys(where: str, mapping: Mapping[str, object], names: set[str]) -> None:
    unknown = sorted(set(mapping) - names)
    if unknown:
        raise ValueError(
            f"{where}: unknown key {shown(unknown[0])} (known: {', '.join(sorted(names))})"
        )


def _read_host(path: Path, name: str, value: object) -> Host:
    where = f"{path}: hosts: {name}"
    keys = _mapping(where, value)
    _check_keys(where, keys, {"link", "up", "down", "latency", "inside"})
    link = keys.get("link")
    rates = []
    for side in ("up", "down"):
        if side not in keys and link is None:
            raise ValueError(f"{where}: needs 'link' or both 'up' and 'down'")
        rates.append(_quantity(f"{where}: {side}", keys.get(side, link), _RATES))
        _check_range(f"{where}: {side}", keys.get(side, link), rates[-1], _RATE, " bytes a second")
    latency = _quantity(f"{where}: latency", keys.get("latency", "0s"), _TIMES)
    _check_range(f"{where}: latency", keys.get("latency"), latency, _LATENCY, " seconds")
    inside = math.inf
    if "inside" in keys:
        inside = _quantity(f"{where}: inside", keys["inside"], _RATES)
        _check_range(f"{where}: inside", keys["inside"], inside, _RATE, " bytes a second")
    return Host(name, rates[0], rates[1], latency, inside)


def _host_index(where: str, hosts: Sequence[Host], name: object) -> int:
    for index, host in enumerate(hosts):
        if host.name == str(name):
            return index
    raise ValueError(f"{where}: no host {shown(name)} (hosts: {', '.join(h.name for h in hosts)})")


def _read_worker(where: str, hosts: Sequence[Host], value: object) -> Worker:
    if not isinstance(value, dict):
        return Worker(_host_index(where, hosts, value))
    keys = _mapping(where, value)
    _check_keys(where, keys, {"host", "slowness"})
    slowness = keys.get("slowness", 1.0)
    if isinstance(slowness, bool) or not isinstance(slowness, int | float):
        raise ValueError(f"{where}: slowness must be a number, got {shown(slowness)}")
    _check_range(f"{where}: slowness", slowness, slowness, _SLOWNESS, "")
    return Worker(_host_index(where, hosts, keys.get("host")), float(slowness))


def _sequence(where: str, value: object) -> list[object]:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_WORKERS:
        got = f"{len(value)} entries" if isinstance(value, list) and value else shown(value)
        raise ValueError(f"{where}: expected a list of 1 to {MOST_WORKERS} entries, got {got}")
    return value


class _Loader(yaml.SafeLoader):
    """YAML that refuses a repeated key; PyYAML silently keeps the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = set[str]()
        for entry, _ in node.value:
            key = entry.value if isinstance(entry, yaml.ScalarNode) else ""
            if key and key in keys:
                problem = f"{shown(key)} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=entry.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError, OverflowError):  # such as a date of month 99
            kind = str(node.tag).rpartition(":")[2]
            problem = f"{shown(node.value)} is no {kind}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_KEYS:  # nested merges multiply keys
            problem = f"more than {_MAX_KEYS} keys"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def load_yaml(path: Path) -> object:
    """The value of a YAML file. An error is one sentence with the line in the file."""
    try:
        # _Loader is a SafeLoader: it creates plain values only.
        return yaml.load(_text(path), _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ValueError(f"{path}: not YAML: nested too deep") from None


def _text(path: Path) -> str:
    """The text of a file; reading stops early in an endless file such as /dev/zero."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_YAML + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if len(text) > _MAX_YAML:
        raise ValueError(f"{path}: not YAML: longer than {_MAX_YAML} characters")
    return text


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file: `hosts`, `workers`, `shards`, and optionally `coordinator`."""
    keys = _mapping(str(path), load_yaml(path))
    _check_keys(str(path), keys, {"hosts", "workers", "shards", "coordinator"})
    hosts_by_name = _mapping(f"{path}: hosts", keys.get("hosts"))
    hosts = [_read_host(path, name, value) for name, value in hosts_by_name.items()]
    workers = [
        _read_worker(f"{path}: workers[{i}]", hosts, value)
        for i, value in enumerate(_sequence(f"{path}: workers", keys.get("workers")))
    ]
    shards = [
        _host_index(f"{path}: shards[{i}]", hosts, value)
        for i, value in enumerate(_sequence(f"{path}: shards", keys.get("shards")))
    ]
    host_name = keys.get("coordinator", hosts[shards[0]].name)
    coordinator = _host_index(f"{path}: coordinator", hosts, host_name)
    return Cluster(tuple(hosts), tuple(workers), tuple(shards), coordinator)


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster file that `read_cluster` reads."""
    names = [host.name for host in cluster.hosts]
    hosts = {
        host.name: {
            "up": f"{8e-6 * host.up_bytes_s:.12g} mbit",
            "down": f"{8e-6 * host.down_bytes_s:.12g} mbit",
            "latency": f"{host.latency_s:.12f}s",
        }
        | (
            {}
            if math.isinf(host.inside_bytes_s)
            else {"inside": f"{8e-6 * host.inside_bytes_s:.12g} mbit"}
        )
        for host in cluster.hosts
    }
    workers = [{"host": names[w.host], "slowness": w.slowness} for w in cluster.workers]
    values = {
        "hosts": hosts,
        "workers": workers,
        "shards": [names[k] for k in cluster.shards],
        "coordinator": names[cluster.coordinator],
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False))
