"""One rank of one contender. `benchmarks.ranks` starts `python -m benchmarks.contenders CASE`.

All contenders train the same dense part on the same samples. They keep rows in different places.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import workload
from benchmarks.workload import Case, Clock, dense_model, dense_samples, loss_of, sum_gradients
from embroute.config.cluster import Cluster, uniform_cluster
from embroute.data.batch import Batch
from embroute.engine.protocol.messages import ShardStep
from embroute.engine.shard import Shard
from embroute.kernels.rows import Floats, Hyper, gather, sgd
from embroute.models.layers import Samples

Result = dict[str, object]


def _share(case: Case) -> list[tuple[Samples, torch.Tensor]]:
    """This rank's block of every batch: inputs of the dense part, and ids, samples x fields."""
    first = source_rows()
    found = []
    for batch in workload.stream(case):
        start = dist.get_rank() * case.batch
        own = batch.slice(start, start + case.batch)
        ids = own.rows.reshape(-1, own.num_fields) - first
        found.append((dense_samples(own), torch.from_numpy(ids)))
    return found


def source_rows() -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """First global row of each table."""
    return workload.source().schema.first_rows[:-1]


def _step(
    model: nn.Module, loss: torch.Tensor, optimizer: torch.optim.Optimizer, clock: Clock
) -> None:
    """The end of a step of data-parallel ranks."""
    loss.backward()  # type: ignore[no-untyped-call]
    sum_gradients(model)
    optimizer.step()
    clock.tick()


def _left(clock: Clock) -> Result:
    """The result of a rank that leaves its group."""
    dist.barrier()
    dist.destroy_process_group()
    return clock.result()


def dense(case: Case) -> Result:
    """The dense part alone, over one leaf tensor that every step reuses."""
    dist.init_process_group("gloo")
    model, given = dense_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LR)
    leaf = 0.01 * torch.randn(case.batch, workload.NUM_TABLES, workload.DIM)
    given.vectors = leaf.requires_grad_()
    clock = Clock(case.warmup)
    for samples, _ in _share(case):
        optimizer.zero_grad()
        leaf.grad = None
        _step(model, loss_of(model, samples), optimizer, clock)
    return _left(clock)


def plain(case: Case) -> Result:
    """One process without ranks: numba gathers rows and updates them in place."""
    model, given = dense_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LR)
    records: Floats = np.zeros((workload.NUM_ROWS, workload.DIM), np.float32)
    hyper = Hyper(workload.LR, 0.0, 0.0, 0.0, 0.0, 1)
    clock = Clock(case.warmup)
    for batch in workload.stream(case):
        samples = dense_samples(batch)
        optimizer.zero_grad()
        out = np.empty((len(batch.rows), workload.DIM), np.float32)
        gather(records, batch.rows, out)
        leaf = torch.from_numpy(out).reshape(len(batch), -1, workload.DIM).requires_grad_()
        given.vectors = leaf
        loss_of(model, samples).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        sgd(records, batch.rows, leaf.grad.reshape(-1, workload.DIM).numpy(), hyper)
        optimizer.step()
        clock.tick()
    return clock.result()


def embroute(case: Case) -> Result:
    """A rank of embroute (coordinator, shard or worker) and the counts of its meter."""
    import embroute

    model = workload.new_model(case.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LR)
    clock = Clock(case.warmup)
    items: Iterable[Batch] = Drawn(case, clock) if os.environ["RANK"] == "0" else []
    _tick_at_steps(clock)
    ready = embroute.prepare(
        model,
        optimizer,
        items,
        policy=case.policy,
        cache=case.cache,
        network=_links(case),
        # In namespaces with links of their own, ranks are on one node only by name.
        transport="auto" if os.environ["MASTER_ADDR"] == "127.0.0.1" else "sockets",
        own_process=True,
    )
    for samples in ready.loader:
        assert isinstance(samples, Samples)
        optimizer.zero_grad()
        ready.backward(loss_of(model, samples))
        optimizer.step()
        clock.tick()
    steps = max(1, ready.meter.steps)
    spent = {name: 1e3 * seconds / steps for name, seconds in ready.meter.seconds.items()}
    rows = int(ready.meter.rows_by_kind.sum()) / steps
    return clock.result() | {"spent_ms": spent, "rows": rows}


def _links(case: Case) -> Cluster:
    """The network as embroute is told: a shard behind a fast link, workers behind equal links."""
    cluster, rate = uniform_cluster(case.workers, 1), case.mbit * 1e6 / 8
    if not rate:
        return cluster.together() if case.policy == "in-place" else cluster
    slow = (replace(host, up_bytes_s=rate, down_bytes_s=rate) for host in cluster.hosts[1:])
    return replace(cluster, hosts=(cluster.hosts[0], *slow))


class Drawn:
    """The coordinator's loader: in memory before the first step, like the samples of the others."""

    def __init__(self, case: Case, clock: Clock) -> None:
        self._items, self._clock = list(workload.stream(case)), clock

    def __iter__(self) -> Iterator[Batch]:
        for item in self._items:
            self._clock.tick()
            yield item


def _tick_at_steps(clock: Clock) -> None:
    """Count the steps of a shard: a shard runs inside `prepare`, without a loop of its own."""
    step = Shard.step

    def ticking(shard: Shard, message: ShardStep) -> None:
        step(shard, message)
        clock.tick()

    setattr(Shard, "step", ticking)  # noqa: B010


class Sharded(nn.Module):
    """TorchRec's collection of all tables, under the name that the plan uses."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables


def torchrec(case: Case) -> Result:
    """TorchRec on Gloo: sharded by row or by table, the row optimizer fused into backward."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    dist.init_process_group("gloo")
    collection, plan, sharder = _collection(case.policy)
    world = dist.group.WORLD
    tables = DistributedModelParallel(
        Sharded(collection),
        env=ShardingEnv.from_process_group(world),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    ).module.tables
    model, given = dense_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LR)
    keys = [f"f{i}" for i in range(workload.NUM_TABLES)]
    lengths = torch.ones(workload.NUM_TABLES * case.batch, dtype=torch.int32)
    share = [(samples, ids.T.contiguous().reshape(-1)) for samples, ids in _share(case)]
    clock = Clock(case.warmup)
    for samples, values in share:
        optimizer.zero_grad()
        pooled = tables(KeyedJaggedTensor(keys, values, lengths=lengths)).values()
        given.vectors = pooled.reshape(case.batch, -1, workload.DIM)
        _step(model, loss_of(model, samples), optimizer, clock)
    return _left(clock)


def _collection(sharding: str) -> tuple[nn.Module, object, object]:
    """Tables, a plan written by hand, and the sharder."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=workload.DIM,
            num_embeddings=table.num_rows,
            feature_names=[f"f{i}"],
        )
        for i, table in enumerate(workload.source().schema.tables)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": workload.LR})
    size, sharder = dist.get_world_size(), EmbeddingBagCollectionSharder()
    placing = {
        table.name: row_wise() if sharding == "row-wise" else table_wise(rank=i % size)
        for i, table in enumerate(tables)
    }
    plan = construct_module_sharding_plan(
        collection, placing, sharder, local_size=size, world_size=size, device_type="cpu"
    )
    return collection, plan, sharder


CONTENDERS: Mapping[str, Callable[[Case], Result]] = {
    "dense": dense,
    "plain": plain,
    "embroute": embroute,
    "torchrec": torchrec,
}


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    torch.manual_seed(0)
    print(json.dumps(CONTENDERS[case.contender](case)))


if __name__ == "__main__":
    main()
