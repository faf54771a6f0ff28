"""The dense part of a model, which every worker holds whole: its gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from embroute.config.cluster import Cluster
from embroute.cost.step_time import reduces_at_shard
from embroute.launch.rank import RankContext
from embroute.transport.allreduce import CentralReduce, can_reduce


class Dense:
    """Parameters outside of the tables, and the sums of their gradients over the workers."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], rank: RankContext, cluster: Cluster
    ) -> None:
        self.optimizers = optimizers
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.rank, self.cluster, self.sent_bytes = rank, cluster, 0
        self._central = CentralReduce(rank.central, rank.shards[0])
        self.finite = True  # whether all sums of the last step were finite
        self._broadcast([p.data for p in model.parameters()] + list(model.buffers()))

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every worker the first worker's values, as a sum in which all others add zeros."""
        for tensor in tensors:
            flat = tensor.detach().reshape(-1).to(torch.float64, copy=True)
            if self.rank.index:
                flat.zero_()
            self.rank.allreduce.sum(flat)
            tensor.copy_(flat.reshape(tensor.shape))

    def take_gradients(self, step: int) -> dict[nn.Parameter, torch.Tensor]:
        """Remove gradients that exist before the backward pass: they are sums already.

        Refuses gradients that an optimizer would use, since rows are updated at every pass.
        """
        old = {p: p.grad for p in self.parameters if p.grad is not None and bool(p.grad.any())}
        if not old:
            return {}
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        if any(p in old for group in groups for p in group["params"]):
            raise RuntimeError(
                f"step {step}: parameters have gradients before ready.backward(loss): call "
                f"zero_grad() first in every step; to accumulate, sum losses or use larger batches"
            )
        for parameter in old:
            parameter.grad = None
        return old

    def restore_gradients(self, old: dict[nn.Parameter, torch.Tensor]) -> None:
        """Add the new gradients to the removed ones, as a backward pass does."""
        for parameter, grad in old.items():
            parameter.grad = grad if parameter.grad is None else grad + parameter.grad

    def close(self) -> None:
        """End the sums."""
        self._central.leave()

    def sum(
        self, extra: Sequence[torch.Tensor], loss: float, has_samples: bool
    ) -> tuple[list[torch.Tensor], float]:
        """Sum gradients over workers in one message; returns the sums of `extra` and `loss`.

        Without samples, this worker adds only zeros.
        """
        if self.rank.num_workers == 1:
            gradients = [*(p.grad for p in self.parameters if p.grad is not None), *extra]
            self.finite = all(bool(gradient.sum().isfinite()) for gradient in gradients)
            return [part.reshape(-1) for part in extra], loss
        has_grad = [p.grad is not None for p in self.parameters]
        grads = [
            torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1)
            for p in self.parameters
        ]
        dtype = grads[0].dtype if grads else torch.float64
        # The message: gradients, extra tensors, the loss, and for each parameter the number of
        # workers that have a gradient. Where it is zero, the gradient must stay None.
        tail = torch.tensor([loss, *has_grad], dtype=dtype)
        tensors = [*grads, *(tensor.reshape(-1) for tensor in extra), tail]
        flat = torch.cat([tensor.to(dtype) for tensor in tensors])
        self._sum(flat, has_samples, bool(extra))
        self.finite = bool(flat.sum().isfinite())  # one NaN or infinity spoils the sum
        sums = list(torch.split(flat, [len(tensor) for tensor in tensors]))
        counts = sums[-1][1:].tolist()
        for parameter, grad, count in zip(self.parameters, sums, counts, strict=False):
            parameter.grad = grad.reshape(parameter.shape).to(parameter.dtype) if count else None
        return sums[len(grads) : -1], float(sums[-1][0])

    def _sum(self, flat: torch.Tensor, has_samples: bool, with_rows: bool) -> None:
        """Sum in the memory of one host, at a shard, or around a ring."""
        workers = self.rank.num_workers
        at_shard = reduces_at_shard(self.cluster, with_rows) and can_reduce(flat)
        if at_shard and not self.rank.allreduce.in_memory:
            self._central.sum(flat, has_samples)
            self.sent_bytes += flat.nbytes if has_samples else 0
        else:
            self.rank.allreduce.sum(flat)
            # Around a ring, a worker sends every byte except those of its share, twice.
            self.sent_bytes += 2 * (workers - 1) * flat.nbytes // workers
