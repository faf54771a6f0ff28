"""Another policy decided beside the one that trains, to say what it would have moved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from embroute.data.batch import Batch
from embroute.data.window import Horizon
from embroute.policy.catalog import make_policy
from embroute.policy.decide import advance, plan_step
from embroute.policy.plan import traffic
from embroute.policy.plans import start
from embroute.policy.setup import Setup


class Shadow:
    """Counts the row bytes of a policy without a hot set, step by step, on the same batches."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.policy = make_policy(name)
        self.state = start(self.policy, replace(setup))
        self.horizon = Horizon(setup.schema.num_rows, self.policy.lookahead)
        self.failed = False

    def step(self, batch: Batch) -> int:
        """Row bytes of the batch that has just become complete; 0 while the window fills."""
        if self.failed:
            return 0
        self.horizon.push(batch)
        return self._decide() if self.horizon.full else 0

    def rest(self) -> int:
        """Row bytes of the batches that are still in the window."""
        total = 0
        while not self.failed and not self.horizon.empty:
            total += self._decide()
        return total

    def _decide(self) -> int:
        try:
            plan = plan_step(self.policy, self.horizon.pop(), self.state)
        except ValueError:
            self.failed = True  # a cache that is enough for one policy may be too small for it
            return 0
        advance(self.state, plan)
        return int(np.sum(traffic(plan, self.state.setup).bytes_WKIP))
