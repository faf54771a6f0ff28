"""Weight decay of touched rows: the reference adds it only to gradients of looked-up rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embroute.launch.in_process import run_in_process
from tests.jobs import (
    CLIP,
    Batch,
    Model,
    batches,
    gathered,
    loss_of,
    new_model,
    plain,
    settings_of,
    train,
)
from tests.sizes import crossed, sized

DECAY, STEPS = 0.05, sized(30, 80)
POLICIES = ["vanilla", "esd(1)", "nocache", "embroute", "in-place"]
OPTIMIZERS = ["sgd", "adagrad", "rowwise-adagrad", "adam"]


def add_decay(table: nn.Embedding | nn.EmbeddingBag, ids: torch.Tensor) -> None:
    """Add decay * value to the gradient of each row that a batch looks up, once."""
    weight, rows = table.weight, torch.unique(ids)
    rows = rows[rows != table.padding_idx] if table.padding_idx is not None else rows
    assert weight.grad is not None
    with torch.no_grad():
        if weight.grad.is_sparse:
            values = DECAY * weight[rows]
            more = torch.sparse_coo_tensor(rows[None], values, weight.shape, check_invariants=False)
            weight.grad = (weight.grad + more).coalesce()
        else:
            weight.grad[rows] += DECAY * weight[rows]


def decayed(model: Model, batch: Batch) -> None:
    """Add decay to the gradients of the rows that a batch looks up."""
    for name, layer in (("user", model.user), ("tags", model.tags), ("items", model.items)):
        add_decay(layer, batch[name])


@pytest.mark.parametrize(
    ("policy", "optimizer"), crossed(POLICIES, OPTIMIZERS, "esd(1)", "adagrad")
)
def test_decay_of_touched_rows_equals_plain_torch(optimizer: str, policy: str) -> None:
    settings, stream = settings_of(policy, 3), batches(3, STEPS)
    settings["decay"] = DECAY
    results = run_in_process(3, 2, lambda rank: train(rank, stream, optimizer, settings))
    gathered(results, 3, 2).assert_equal(plain(optimizer, stream, after_backward=decayed))


def test_gradient_clipping_takes_effect_in_the_test_job() -> None:
    """Without clipped steps, the agreement of clipped jobs would prove nothing."""
    model, stream = new_model(), batches(3, STEPS)
    norms = []
    for batch in stream[:10]:
        model.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.top.parameters(), CLIP)))
    assert sum(norm > CLIP for norm in norms) > 5
