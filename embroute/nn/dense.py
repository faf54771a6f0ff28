"""The part of a model that every worker has whole: its gradients are summed over the workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from embroute.config.cluster import Cluster
from embroute.cost.step_time import reduces_at_shard
from embroute.launch.rank import RankContext
from embroute.transport.allreduce import CentralAllReduce, can_reduce


class Dense:
    """The part of the model that every worker has whole: its gradients are summed."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], rank: RankContext, cluster: Cluster
    ) -> None:
        self.optimizers = optimizers
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.rank, self.cluster, self.sent_bytes = rank, cluster, 0
        self._star = CentralAllReduce(rank.central, rank.shards[0])
        self.finite = True  # whether all sums of the last step were
        state = [p.data for p in model.parameters()] + list(model.buffers())
        self._share(state)

    def _share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let every worker start from the first worker's values."""
        for tensor in tensors:
            flat = tensor.detach().reshape(-1).to(torch.float64, copy=True)
            if self.rank.index:
                flat.zero_()
            self.rank.allreduce.sum(flat)
            tensor.copy_(flat.reshape(tensor.shape))

    def set_aside(self, step: int) -> dict[nn.Parameter, torch.Tensor]:
        """Take away gradients that are there before the backward pass: they are sums already.

        Those that an optimizer would use are refused, since rows are updated at every pass.
        """
        old = {p: p.grad for p in self.parameters if p.grad is not None and bool(p.grad.any())}
        if not old:
            return {}
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        if any(p in old for group in groups for p in group["params"]):
            raise RuntimeError(
                f"step {step}: gradients are there before ready.backward(loss): zero_grad() comes "
                f"before it in every step; accumulate in the loss, or by a larger batch"
            )
        for parameter in old:
            parameter.grad = None
        return old

    def bring_back(self, old: dict[nn.Parameter, torch.Tensor]) -> None:
        """Add new gradients to those that were set aside, as a backward pass does."""
        for parameter, grad in old.items():
            parameter.grad = grad if parameter.grad is None else grad + parameter.grad

    def leave(self) -> None:
        """There are no more sums."""
        self._star.leave()

    def sum(
        self, extra: Sequence[torch.Tensor], loss: float, adds: bool
    ) -> tuple[list[torch.Tensor], float]:
        """Sum gradients over workers in one message; returns the sums of `extra` and `loss`.

        `adds`: whether this worker has anything but zeros.
        """
        if self.rank.num_workers == 1:
            found = [*(p.grad for p in self.parameters if p.grad is not None), *extra]
            self.finite = all(bool(part.sum().isfinite()) for part in found)
            return [part.reshape(-1) for part in extra], loss
        own = [p.grad is not None for p in self.parameters]
        grads = [
            torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1)
            for p in self.parameters
        ]
        dtype = grads[0].dtype if grads else torch.float64
        tail = torch.tensor([loss, *own], dtype=dtype)
        parts = [*grads, *(part.reshape(-1) for part in extra), tail]
        flat = torch.cat([part.to(dtype) for part in parts])
        self._sum(flat, adds, bool(extra))
        self.finite = bool(flat.sum().isfinite())  # one that is not spoils the sum
        sums = list(torch.split(flat, [len(part) for part in parts]))
        used = sums[-1][1:]
        for parameter, grad, count in zip(self.parameters, sums, used.tolist(), strict=False):
            parameter.grad = grad.reshape(parameter.shape).to(parameter.dtype) if count else None
        return sums[len(grads) : -1], float(sums[-1][0])

    def _sum(self, flat: torch.Tensor, adds: bool, with_rows: bool) -> None:
        """Through memory of one host, by way of a shard, or round a ring.

        A ring sends every byte but those of its own share twice.
        """
        workers = self.rank.num_workers
        by_shard = reduces_at_shard(self.cluster, with_rows) and can_reduce(flat)
        if by_shard and not self.rank.allreduce.in_memory:
            self._star.sum(flat, adds)
            self.sent_bytes += flat.nbytes if adds else 0
        else:
            self.rank.allreduce.sum(flat)
            self.sent_bytes += 2 * (workers - 1) * flat.nbytes // workers
