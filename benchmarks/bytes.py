"""Row bytes that real training moves with `embroute` and with ESD, beside the simulator's ratio.

Run `python -m benchmarks.bytes`. It trains on built-in data; each rank is a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import markdown, record
from embroute.config.cluster_file import open_cluster
from embroute.data.open import open_source
from embroute.planner.setup import Setup
from embroute.simulator.simulation import Workload, measure_named

DATA = ("online-retail(negatives=1)", "avazu", "movielens-25m")
NETWORK, WORKERS, BATCH, DIM, STEPS = "edge-4", 4, 128, 16, 120
OWN, OTHER = "embroute(objective=cost)", "esd(1)"


def trained(data: str, policy: str, folder: Path) -> int:
    """Row bytes as the workers counted them."""
    out = folder / f"{data}-{policy}"
    options = {
        "data": data,
        "policy": policy,
        "workers": WORKERS,
        "network": NETWORK,
        "dim": DIM,
        "batch": BATCH,
        "steps": STEPS,
        "optimizer": "sgd",
        "cache": 0.1,
        "compute-ms-per-sample": 0,
        "held-out": 0,
        "out": out,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "embroute", "train", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ranks = [json.loads(path.read_text()) for path in out.glob("ranks/worker*.json")]
    return sum(size for rank in ranks for size in rank["row_bytes"].values())


def simulated(data: str, policy: str) -> int:
    """Row bytes of the same steps in the simulator."""
    source = open_source(data)
    setup = Setup(source.schema, open_cluster(NETWORK), DIM, BATCH * WORKERS)
    outcome = measure_named(policy, Workload(source, setup, STEPS, 0))
    return int(outcome.traffic.bytes_WKIP.sum() + outcome.drain_bytes_WK.sum())


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for data in DATA:
            real = [trained(data, policy, Path(scratch)) for policy in (OWN, OTHER)]
            told = [simulated(data, policy) for policy in (OWN, OTHER)]
            ratios = [f"{real[0] / real[1]:.4f}", f"{told[0] / told[1]:.4f}"]
            rows.append([data, *(f"{size / 1e6:.2f}" for size in real), *ratios])
    message = (
        f"{NETWORK}, {WORKERS} workers x {BATCH} samples, dim {DIM}, {STEPS} steps, SGD, caches of "
        "10 %. Megabytes of rows between workers and shards, counted by the workers as they move, "
        "with the final drain. Training also moves the linear part of the model, one float a row."
    )
    headings = ["data", f"{OWN}, MB", f"{OTHER}, MB", "ratio in training", "ratio simulated"]
    record("bytes", "Bytes of real training", f"{message}\n\n{markdown(headings, rows)}")


if __name__ == "__main__":
    main()
