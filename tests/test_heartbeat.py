"""The rank that hosts the store leaves the job last."""

from __future__ import annotations

import threading
import time

from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from embroute.launch.heartbeat import Heartbeat

NAMES = ["coordinator", "worker0"]


def left_after(hosts_store: bool, stays_s: float) -> float:
    """Seconds until the coordinator has left, while a worker stays for `stays_s`."""
    store = PrefixStore("job", HashStore())
    coordinator, worker = (Heartbeat(store, name, NAMES, 5.0, print) for name in NAMES)
    coordinator.hosts_store = hosts_store
    inside = threading.Event()

    def stay() -> None:
        with worker:
            inside.set()
            time.sleep(stays_s)

    other = threading.Thread(target=stay)
    other.start()
    inside.wait()
    began = time.perf_counter()
    with coordinator:
        pass
    took = time.perf_counter() - began
    other.join()
    return took


def test_rank_that_hosts_the_store_leaves_last() -> None:
    assert left_after(True, 3.0) > 2.5
    assert left_after(False, 3.0) < 2.5
