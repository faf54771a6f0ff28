"""Real processes give the results of plain torch and the simulated bytes of every step."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embroute.launch.rank import rank_names
from embroute.transport.interface import AUTO, SOCKETS
from tests.jobs import Result, batches, gathered, plain_cached
from tests.promises import assert_kept, promise
from tests.torchrun_rank import STEPS, settings_for

ROOT = Path(__file__).parent.parent
# Every policy and every optimizer, and most pairs of them, over three topologies.
JOBS = {
    (2, 1): [
        "vanilla@sgd",
        "in-place@sgd",
        "esd(1)@adagrad",
        "in-place@adam",
        "herald@adam",
        "bagpipe(3)@rowwise-adagrad",
    ],
    (3, 2): [
        "esd(1)@rowwise-adagrad",
        "nocache@adam",
        "dispatch=esd sync=on-demand evict=clairvoyant(3)@sgd",
        "dispatch=herald sync=write-through evict=lfu@adagrad",
        "in-place@adagrad",
        "dispatch=esd sync=pipelined@adam",
    ],
    (2, 2): ["herald@sgd", "unbounded(of=esd(0.5))@adam", "vanilla@adagrad", "embroute@sgd"],
}

TRANSPORTS = {(2, 1): AUTO, (3, 2): AUTO, (2, 2): SOCKETS}


@pytest.mark.full
@pytest.mark.parametrize(("workers", "shards"), JOBS)
def test_torchrun_jobs_equal_plain_torch_and_the_simulator(
    workers: int, shards: int, tmp_path: Path
) -> None:
    cases, ranks = JOBS[workers, shards], rank_names(workers, shards)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(len(ranks)), "-m", "tests.torchrun_rank"]
    command += [str(tmp_path), str(workers), str(shards)]
    command += [TRANSPORTS[workers, shards], *cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for number, case in enumerate(cases):
        results: dict[str, Result] = {
            name: pickle.loads((tmp_path / f"{number}-{name}").read_bytes()) for name in ranks
        }
        mine = gathered(results, workers, shards)
        mine.assert_equal(plain_cached(case.rpartition("@")[2], workers, STEPS))
        for worker in range(workers):
            for own, other in zip(results[f"worker{worker}"].dense, mine.dense, strict=True):
                np.testing.assert_array_equal(own, other)
        policy, _, optimizer = case.rpartition("@")
        settings = settings_for(policy, workers, shards)
        stream = batches(workers, STEPS)
        assert_kept(promise(stream, optimizer, (workers, shards), settings), results)
