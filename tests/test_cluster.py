"""Clusters: the links of presets, files as in the manual, and every error of a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embroute.config.cluster import CLUSTER_PRESETS, GIGABIT, Cluster, Host, Worker
from embroute.config.cluster_file import open_cluster, read_cluster, write_cluster

MANUAL = Path(__file__).parent.parent / "docs" / "cluster.md"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a cluster file."""

    def file(text: str) -> Path:
        path = tmp_path / "net.yaml"
        path.write_text(text)
        return path

    return file


def gigabits(cluster: Cluster) -> list[float]:
    return [float(rate) for rate in cluster.bytes_s_W / GIGABIT]


def test_edge_preset_has_fast_and_slow_links() -> None:
    cluster = open_cluster("edge-8")
    assert gigabits(cluster) == [5.0] * 4 + [0.5] * 4
    assert cluster.shards == (0,)
    assert cluster.hosts[0].up_bytes_s == cluster.hosts[0].down_bytes_s == 10 * GIGABIT
    assert len(set(cluster.host_W.tolist()) | {0}) == 9
    assert cluster.crosses_WK.all()
    assert GIGABIT == 1.25e8


def test_dc_preset_has_equal_links() -> None:
    cluster = open_cluster("dc-8")
    assert gigabits(cluster) == [100.0] * 8
    assert cluster.hosts[cluster.shards[0]].up_bytes_s == 100 * GIGABIT


def test_uneven_preset_is_edge_with_two_slow_machines() -> None:
    cluster = open_cluster("uneven-8")
    assert gigabits(cluster) == gigabits(open_cluster("edge-8"))
    assert [worker.slowness for worker in cluster.workers] == [1.0] * 6 + [2.0] * 2


def test_colo_preset_puts_one_shard_beside_each_worker() -> None:
    cluster = open_cluster("colo-4")
    assert cluster.num_shards == cluster.num_workers == 4
    assert gigabits(cluster) == [10.0] * 4
    assert (cluster.crosses_WK == ~np.eye(4, dtype=bool)).all()


@pytest.mark.parametrize("name", CLUSTER_PRESETS)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 1024])
def test_presets_accept_any_number_of_workers(name: str, count: int) -> None:
    cluster = open_cluster(f"{name}-{count}")
    assert cluster.num_workers == count
    assert len({host.name for host in cluster.hosts}) == len(cluster.hosts)


def test_edge_preset_gives_the_larger_half_fast_links() -> None:
    assert gigabits(open_cluster("edge-3")) == [5.0, 5.0, 0.5]
    assert gigabits(open_cluster("edge-1")) == [5.0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("edge-0", "--network 'edge-0': workers must be between 1 and 1024, got 0"),
        ("dc-1025", "--network 'dc-1025': workers must be between 1 and 1024, got 1025"),
        (
            "lan-8",
            "--network 'lan-8': neither a preset (edge-N, dc-N, uneven-N, colo-N, box-N) nor",
        ),
        ("edge", "--network 'edge': neither a preset"),
        ("missing.yaml", "--network 'missing.yaml': neither a preset (edge-N, dc-N, "),
    ],
)
def test_unknown_networks_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        open_cluster(text)


def test_only_selects_workers_in_order_and_keeps_the_cluster() -> None:
    cluster = open_cluster("uneven-8")
    before = repr(cluster)
    assert gigabits(cluster) == [5.0] * 4 + [0.5] * 4  # fills the cache of the property
    part = cluster.only([7, 0])
    assert gigabits(part) == [0.5, 5.0]
    assert [worker.slowness for worker in part.workers] == [2.0, 1.0]
    assert repr(cluster) == before
    assert cluster.num_workers == 8


def test_compute_time_follows_slowness() -> None:
    cluster = Cluster((Host("a", 1, 1),), (Worker(0), Worker(0, 2.5)), (0,), 0, 2e-3)
    assert cluster.compute_s_W.tolist() == [2e-3, 5e-3]


def test_cluster_file_of_the_manual_reads_as_described(write: Write) -> None:
    match = re.search(r"```yaml[^\n]*\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    assert match is not None
    cluster = open_cluster(str(write(match.group(1))))
    assert [host.name for host in cluster.hosts] == ["store", "left", "right"]
    assert [host.up_bytes_s / GIGABIT for host in cluster.hosts] == pytest.approx([10, 5, 0.2])
    assert [host.down_bytes_s / GIGABIT for host in cluster.hosts] == pytest.approx([10, 5, 1])
    assert [host.latency_s for host in cluster.hosts] == pytest.approx([50e-6, 0, 2e-3])
    assert cluster.workers == (Worker(1), Worker(1), Worker(2, 1.5))
    assert cluster.shards == (0, 2)
    assert cluster.coordinator == 0


def test_manual_names_every_cluster_preset() -> None:
    text = MANUAL.read_text()
    assert all(f"`{name}-N`" in text for name in CLUSTER_PRESETS)


def test_up_and_down_rates_override_the_link_rate(write: Write) -> None:
    path = write(
        "hosts: {a: {link: 1gbit, up: 500 MBIT}, b: {link: 1Gbit}}\nworkers: [a]\nshards: [b]"
    )
    cluster = read_cluster(path)
    assert cluster.hosts[0] == Host("a", 0.5 * GIGABIT, GIGABIT)
    assert gigabits(cluster) == [0.5]
    assert cluster.coordinator == 1  # the first shard's host


@pytest.mark.parametrize(
    ("rate", "bytes_s"),
    [("8kbit", 1e3), ("8 kbit/s", 1e3), ("1.5Mbit", 187_500.0), (".5gbit", 62.5e6)],
)
def test_link_rates_accept_all_units(write: Write, rate: str, bytes_s: float) -> None:
    path = write(f"hosts: {{a: {{link: {rate}}}}}\nworkers: [a]\nshards: [a]")
    assert read_cluster(path).hosts[0].up_bytes_s == pytest.approx(bytes_s)


HOSTS = "hosts: {a: {link: 1gbit}, b: {link: 1gbit}}\n"
RANKS = "workers: [a]\nshards: [b]\n"


def refused(path: Path, fault: str) -> None:
    """Assert that the file is refused in one line that names it."""
    with pytest.raises(ValueError, match=re.escape(fault)) as caught:
        open_cluster(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- a\n- b", "net.yaml: expected a mapping, got ['a', 'b']"),
        ("", "net.yaml: expected a mapping, got None"),
        ("hosts: {a: [", "net.yaml, line 1: not YAML: "),
        (HOSTS + "hosts: {c: {link: 1gbit}}", "net.yaml, line 2: not YAML: 'hosts' is given twice"),
        ("hosts: {a: {link: 1gbit}, a: {link: 2gbit}}", "not YAML: 'a' is given twice"),
        (HOSTS + RANKS + "speed: 3", "net.yaml: unknown key 'speed' (known: coordinator, hosts,"),
        (RANKS, "net.yaml: hosts: expected a mapping, got None"),
        ("hosts: [a, b]\n" + RANKS, "net.yaml: hosts: expected a mapping, got ['a', 'b']"),
        (HOSTS + "shards: [b]", "workers: expected a list of 1 to 1024 entries, got None"),
        (
            HOSTS + "workers: []\nshards: [b]",
            "workers: expected a list of 1 to 1024 entries, got []",
        ),
        (
            HOSTS + "workers: a\nshards: [b]",
            "workers: expected a list of 1 to 1024 entries, got 'a'",
        ),
        (HOSTS + "workers: [a]", "shards: expected a list of 1 to 1024 entries, got None"),
        (HOSTS + "workers: [a, c]\nshards: [b]", "workers[1]: no host 'c' (hosts: a, b)"),
        (HOSTS + "workers: [a]\nshards: [c]", "shards[0]: no host 'c' (hosts: a, b)"),
        (HOSTS + RANKS + "coordinator: c", "coordinator: no host 'c' (hosts: a, b)"),
    ],
)
def test_bad_cluster_files_are_refused(write: Write, text: str, fault: str) -> None:
    refused(write(text), fault)


@pytest.mark.parametrize(
    ("host", "fault"),
    [
        ("1gbit", "expected a mapping, got '1gbit'"),
        ("[1gbit]", "expected a mapping, got ['1gbit']"),
        ("{}", "needs 'link' or both 'up' and 'down'"),
        ("{up: 1gbit}", "needs 'link' or both 'up' and 'down'"),
        ("{link: 1gbit, rtt: 1ms}", "unknown key 'rtt' (known: down, inside, latency, link, up)"),
        ("{link: 5}", "up: expected a number with one of kbit, mbit, gbit, got 5"),
        ("{link: -1gbit}", "up: expected a number with one of kbit, mbit, gbit, got '-1gbit'"),
        (
            "{link: 1.2.3gbit}",
            "up: expected a number with one of kbit, mbit, gbit, got '1.2.3gbit'",
        ),
        ("{link: 1GB}", "up: expected a number with one of kbit, mbit, gbit, got '1GB'"),
        (
            "{up: 1gbit, down: 0gbit}",
            "down must be between 0.001 and 1e+15 bytes a",
        ),
        ("{link: 1gbit, latency: 5}", "latency: expected a number with one of us, ms, s, got 5"),
        ("{link: 1gbit, latency: -5ms}", "latency: expected a number with one of us, ms, s, got"),
    ],
)
def test_bad_hosts_of_a_cluster_file_are_refused(write: Write, host: str, fault: str) -> None:
    refused(write(f"hosts: {{b: {{link: 1gbit}}, a: {host}}}\n" + RANKS), f"hosts: a: {fault}")


@pytest.mark.parametrize(
    ("worker", "fault"),
    [
        ("{slowness: 2}", "no host None (hosts: a, b)"),
        ("{host: c}", "no host 'c' (hosts: a, b)"),
        ("{host: a, cpu: 2}", "unknown key 'cpu' (known: host, slowness)"),
        ("{host: a, slowness: 0}", "slowness must be between 1e-06 and 1e+06, got 0"),
        ("{host: a, slowness: -1}", "slowness must be between 1e-06 and 1e+06, got -1"),
        ("{host: a, slowness: .nan}", "slowness must be between 1e-06 and 1e+06, got nan"),
        ("{host: a, slowness: .inf}", "slowness must be between 1e-06 and 1e+06, got inf"),
        ("{host: a, slowness: fast}", "slowness must be a number, got 'fast'"),
        ("{host: a, slowness: true}", "slowness must be a number, got True"),
    ],
)
def test_bad_workers_of_a_cluster_file_are_refused(write: Write, worker: str, fault: str) -> None:
    refused(write(HOSTS + f"workers: [b, {worker}]\nshards: [b]"), f"workers[1]: {fault}")


def test_cluster_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.yml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        ValueError, match=re.escape(f"{path}: not YAML: 'utf-8' codec can't decode")
    ):
        open_cluster(str(path))


def test_cluster_file_with_forbidden_characters_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.yml"
    path.write_bytes(b"hosts: \x00")
    with pytest.raises(ValueError, match=re.escape(f"{path}: not YAML: unacceptable character")):
        open_cluster(str(path))


def test_links_inside_a_host_survive_a_cluster_file(tmp_path: Path) -> None:
    cluster = open_cluster("box-4")
    assert cluster.inside_bytes_s_W.tolist() == [150e9] * 4
    write_cluster(cluster, tmp_path / "box.yaml")
    assert open_cluster(str(tmp_path / "box.yaml")) == cluster
