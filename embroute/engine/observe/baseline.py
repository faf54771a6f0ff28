"""The traffic of another policy on the same batches, planned beside the policy that trains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from embroute.data.window import Indexed, Window
from embroute.planner.decide import advance, drain_state, plan_step
from embroute.planner.plan import row_bytes_W, traffic
from embroute.planner.plan_stream import start
from embroute.planner.setup import Setup
from embroute.policies.catalog import PolicyLike, make_policy


class BaselineTraffic:
    """Counts the row bytes of a policy without a window, on the batches of the run."""

    def __init__(self, policy: PolicyLike, setup: Setup) -> None:
        self.policy = make_policy(policy)
        if self.policy.lookahead > 1 or self.policy.regroup is not None:
            raise ValueError(
                f"compare_with={self.policy.name!r}: only policies without window and hot set"
            )
        if self.policy.sync.shared_memory:
            setup = replace(setup, cluster=setup.cluster.together())
        self.state = start(self.policy, setup)
        self.failed = False

    def step(self, now: Indexed) -> int:
        """Row bytes of a step whose batch is already indexed."""
        if self.failed:
            return 0
        try:
            plan = plan_step(self.policy, Window(now.step, now, ()), self.state)
        except ValueError:
            self.failed = True  # the cache may be too small for this policy
            return 0
        advance(self.policy, self.state, plan)
        return int(np.sum(traffic(plan, self.state.setup).bytes_WKIP))

    def drain(self) -> int:
        """Row bytes of pushing every update to its shard."""
        if self.failed:
            return 0
        transfers = drain_state(self.policy, self.state)
        return int(row_bytes_W(transfers, self.state.setup).sum())
