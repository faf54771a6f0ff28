"""Start the ranks of a measurement as processes, and read the result of each rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]

TIMEOUT_S = 240


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(rank: int, size: int, address: str, port: int) -> dict[str, str]:
    """The variables that torchrun sets, and one thread a rank: ranks share the machine's cores."""
    return os.environ | {
        "EMBROUTE_SECRET": "a secret of benchmarks",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def run_ranks(
    module: str,
    case: object,
    size: int,
    prefixes: Sequence[Sequence[str]] = (),
    address: str = "127.0.0.1",
) -> list[dict[str, object]]:
    """Run `python -m module CASE` as every rank. A rank prints a dict in its last line.

    `prefixes` has a command for each rank that starts the rank, such as `ip netns exec`.
    """
    port, processes = free_port(), []
    # Like torchrun: a store that outlives every rank. In namespaces the first rank holds it.
    store = None if prefixes else TCPStore(address, port, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": str(store is not None)}
    command = [sys.executable, "-m", module, json.dumps(case)]
    with tempfile.TemporaryFile("w+") as errors:
        for rank in range(size):
            process = subprocess.Popen(
                [*(prefixes[rank] if prefixes else ()), *command],
                env=environment(rank, size, address, port) | agent,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            processes.append(process)
        try:
            said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            errors.seek(0)
            codes = [process.returncode for process in processes]
            raise RuntimeError(f"{module} {case}: exit codes {codes}\n{errors.read()[-6000:]}")
    return [json.loads(text.splitlines()[-1]) for text in said]
