"""The first worker gathers tensors of any length from all workers."""

from __future__ import annotations

import pytest
import torch

from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.nn.prepare import prepare
from tests.jobs import batches, loss_of, new_model, optimizers_of, settings_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_gather_collects_tensors_in_worker_order(dtype: torch.dtype) -> None:
    def run_rank(rank: RankContext) -> torch.Tensor | None:
        model = new_model()
        optimizers = optimizers_of("sgd", model)
        ready = prepare(model, optimizers, batches(3, 4), rank, **settings_of("esd(1)", 3))
        found = None
        for batch in ready.loader:
            model.zero_grad()
            ready.backward(loss_of(model, batch))  # type: ignore[arg-type]
            # Two rows at worker 0, none at worker 1, two at worker 2: in the middle of training.
            rows = 0 if rank.index == 1 else 2
            own = torch.full((rows, 3), rank.index).to(dtype)
            found = ready.gather(own)
        return found

    results = run_in_process(3, 1, run_rank)
    expected = torch.tensor([[0] * 3, [0] * 3, [2] * 3, [2] * 3]).to(dtype)
    assert results["worker0"] is not None
    assert torch.equal(results["worker0"], expected)
    assert results["worker0"].dtype == dtype
    assert results["worker1"] is None


def test_gather_on_a_shard_is_refused() -> None:
    def run_rank(rank: RankContext) -> None:
        model = new_model()
        optimizers = optimizers_of("sgd", model)
        ready = prepare(model, optimizers, batches(3, 2), rank, **settings_of("esd(1)", 2))
        for batch in ready.loader:
            model.zero_grad()
            ready.backward(loss_of(model, batch))  # type: ignore[arg-type]
        if ready.session is None:
            with pytest.raises(RuntimeError, match="only workers train"):
                ready.gather(torch.zeros(1))

    run_in_process(2, 1, run_rank)
