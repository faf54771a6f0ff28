"""One rank of a real job: `-m tests.torchrun_rank FOLDER WORKERS SHARDS TRANSPORT CASE...`.

A case is policy@optimizer. Each rank writes what it ended with.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from embroute.launch.rank import on_one_node
from embroute.launch.rendezvous import connect
from embroute.nn.settings import Settings
from embroute.policies.catalog import make_policy
from tests.jobs import batches, settings_of, slow_settings, train

STEPS = 200


def settings_for(policy: str, workers: int, shards: int) -> Settings:
    """Full caches for reference policies, and slow links for policies that send chunks."""
    if make_policy(policy).sync.pipelined:
        return slow_settings(policy, workers, shards)
    return settings_of(policy, workers, 1.0 if "unbounded" in policy else 0.8)


def main() -> None:
    folder, workers, shards = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    topology = on_one_node(workers, shards)
    with connect(topology, peer_timeout_s=60, transport=sys.argv[4]) as rank:
        for number, case in enumerate(sys.argv[5:]):
            policy, _, optimizer = case.partition("@")
            settings = settings_for(policy, workers, shards)
            settings["debug"] = "steps"
            result = train(rank, batches(workers, STEPS), optimizer, settings)
            # The meter's defaults are functions, which do not travel.
            result.meter.rows.default_factory = result.meter.bytes.default_factory = None
            (folder / f"{number}-{rank.name}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
