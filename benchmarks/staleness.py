"""AUC of bounded staleness beside the best possible AUC, on labels drawn from a known model.

Run `python -m benchmarks.staleness --seeds 3 --samples 160000,640000`. A bound is a number of
steps. HET's paper trains about 45,000 of them; in a short run the same bound costs more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from benchmarks.record import markdown, record
from embroute.data.batch import Batch
from embroute.data.stream import batches
from embroute.data.synthetic.generator import SyntheticSource
from embroute.data.synthetic.planted import expected_auc
from embroute.data.synthetic.presets import LOG_PRESETS
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.models.layers import Samples
from embroute.models.registry import ModelOptions, make_model
from embroute.nn.prepare import prepare
from embroute.train.loop import evaluate

BOUNDS = (0, 10, 100, 1000, 10_000)


@dataclass(frozen=True)
class Case:
    """A small click log, and a job that trains on it and holds out the end."""

    trained: int = 160_000
    held_out: int = 40_000
    rows: int = 2000  # of a table, at most
    workers: int = 4
    batch: int = 128  # of a worker
    dim: int = 8
    cache: float = 0.25
    seed: int = 0

    @property
    def source(self) -> SyntheticSource:
        """Criteo's fields, with smaller tables."""
        preset = LOG_PRESETS["criteo-kaggle"]
        laws = tuple(replace(law, num_rows=min(law.num_rows, self.rows)) for law in preset.fields)
        samples = self.trained + self.held_out
        knobs = replace(preset.knobs, samples=samples, seed=self.seed)
        return SyntheticSource(replace(preset, fields=laws), knobs)

    def split(self) -> tuple[list[Batch], list[Batch]]:
        """Batches to train on, and batches held out."""
        size = self.workers * self.batch
        found = list(batches(self.source, size))
        steps = self.trained // size
        return found[:steps], found[steps:]


@dataclass(frozen=True)
class Found:
    """Results of a run."""

    auc: float
    best_auc: float
    hits: int
    touches: int


def train(case: Case, bound: int) -> Found:
    """Train DeepFM in one process, every rank a thread."""
    source, (trained, held_out) = case.source, case.split()
    true = [source.planted_probability(batch) for batch in held_out]
    model = make_model("deepfm", source.schema, case.dim, ModelOptions((64, 32), seed=case.seed))
    first = model.state_dict()

    def run_rank(rank: RankContext) -> tuple[float, int, int]:
        own = make_model("deepfm", source.schema, case.dim, ModelOptions((64, 32)))
        own.load_state_dict(first)
        return _rank(case, f"het({bound})", rank, own, (trained, held_out))

    results = run_in_process(case.workers, 1, run_rank)
    auc, hits, touches = results["worker0"]
    return Found(auc, expected_auc(np.concatenate(true)), hits, touches)


def _rank(
    case: Case,
    policy: str,
    rank: RankContext,
    model: nn.Module,
    data: tuple[Sequence[Batch], Sequence[Batch]],
) -> tuple[float, int, int]:
    """Run one rank. The first worker returns the AUC, and hits and touches of all workers."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)
    settings = {"policy": policy, "cache": case.cache, "held_out": data[1]}
    ready = prepare(model, optimizer, data[0], rank, **settings)  # type: ignore[arg-type]
    hits = touches = 0
    for samples in ready.loader:
        assert isinstance(samples, Samples)
        assert ready.session is not None
        optimizer.zero_grad()
        scores = model(samples)
        ready.backward(nn.functional.binary_cross_entropy_with_logits(scores, samples.label))
        optimizer.step()
        assert ready.session.current is not None
        hits += ready.session.current.header.hits
        touches += ready.session.current.header.touches
    metrics = evaluate(model, ready.session) if ready.session is not None else {}
    return metrics.get("auc", float("nan")), hits, touches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", default="160000,640000", help="samples of each run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for trained in map(int, given.samples.split(",")):
        exact: list[float] = []
        for bound in BOUNDS:
            runs = [train(Case(trained, seed=seed), bound) for seed in range(given.seeds)]
            aucs, bests = [run.auc for run in runs], [run.best_auc for run in runs]
            exact = exact or aucs
            share = sum(run.hits for run in runs) / sum(run.touches for run in runs)
            losses = np.subtract(exact, aucs)
            cells = [f"{trained // (Case.workers * Case.batch):,}", f"het({bound})"]
            cells += [f"{np.mean(aucs):.4f}", f"{np.mean(bests):.4f}", f"{np.mean(losses):.4f}"]
            rows.append([*cells, f"{np.ptp(losses):.4f}", f"{100 * share:.1f} %"])
            print(rows[-1], flush=True)
    case = Case()
    message = (
        f"DeepFM, width {case.dim}, Adagrad; {case.workers} workers x {case.batch} samples in one "
        f"process, caches of {100 * case.cache:.0f} % of the rows; the fields of criteo-kaggle "
        f"with at most {case.rows:,} rows each, one pass over the samples, AUC of the "
        f"{case.held_out:,} that follow. The best possible AUC is that of the true probabilities "
        f"of the same samples. Means over {given.seeds} seeds. `het(0)` is write-through and "
        f"exact; lost: the AUC of `het(0)` less that of the line."
    )
    headings = ["steps", "policy", "AUC", "best possible", "lost", "spread of the loss", "hits"]
    record("staleness", "AUC of bounded staleness", f"{message}\n\n{markdown(headings, rows)}")


if __name__ == "__main__":
    main()
