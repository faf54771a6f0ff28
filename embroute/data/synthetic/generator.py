"""Synthetic click logs with the field sizes of published ones: `criteo-kaggle(samples=200000)`.

A sample has a user and an item. Each is a place in [0, 1), which is cut into equal groups. A field
describes the user, the item, the context or the time. The rank of a field follows a power law,
fitted to facts about the published data (benchmarks/calibrate.py). For a share `correlation` of
the look-ups, the rank belongs to the place of the user or item, and every field orders the groups
in another way. So a popular brand has its categories, and two fields depend on each other as far
as groups do. A share `sessions` of the samples comes from a recent user, and `drift` turnovers of
the items' popular ids happen per million samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import gcd

import numpy as np

from embroute.config.spec import LARGEST_SEED, CallSpec, bind, parse_int, parse_number
from embroute.data.batch import Batch, one_hot
from embroute.data.schema import Field, Schema, Table
from embroute.data.synthetic.planted import Planted, expected_auc, fitted
from embroute.data.synthetic.presets import LOG_PRESETS, FieldLaw, Knobs, Preset
from embroute.data.synthetic.sampling import CONTEXT, ITEM, USER, FieldLaws, Mixing, sample_rows
from embroute.kernels.array_types import F32, F64, I64

__all__ = ["LOG_PRESETS", "Knobs", "Preset", "SyntheticSource", "open_preset"]

CHUNK_SAMPLES = 32_768
PILOT = 2**31  # the number of a chunk that no pass reaches


@dataclass(frozen=True)
class SyntheticSource:
    """Samples of a preset; chunk c depends on (seed, c) and the knobs alone."""

    preset: Preset
    knobs: Knobs

    @cached_property
    def schema(self) -> Schema:
        """One table per field."""
        laws = self.preset.fields
        return Schema(
            tuple(Table(law.name, law.num_rows) for law in laws),
            tuple(Field(law.name, table) for table, law in enumerate(laws)),
            self.preset.dense,
            labelled=True,
        )

    @property
    def num_samples(self) -> int:
        """The requested number of samples, by default that of the published data."""
        return self.knobs.samples

    @property
    def num_chunks(self) -> int:
        """Chunks of one pass."""
        return -(-self.num_samples // CHUNK_SAMPLES)

    def chunks(self) -> Iterator[Batch]:
        """One pass in time order."""
        for number in range(self.num_chunks):
            yield self.chunk(number)

    def chunk(self, number: int) -> Batch:
        """A chunk with labels."""
        random = np.random.default_rng([self.knobs.seed, number])
        # A whole chunk is drawn, so that a shorter trace is the beginning of a longer trace.
        batch = self._unlabelled(random, number * CHUNK_SAMPLES)
        label = random.random(len(batch)) < self.planted.probability(batch)
        labelled = replace(batch, label=label.astype(np.float32))
        return labelled.slice(0, self.num_samples - number * CHUNK_SAMPLES)

    @cached_property
    def planted(self) -> Planted:
        """The model that draws the labels."""
        random = np.random.default_rng([self.knobs.seed, PILOT])
        laws, num_dense = self.preset.fields, len(self.preset.dense)
        raw = Planted(
            side=np.array([min(law.side, CONTEXT) for law in laws], np.int64),
            # Large tables weigh less: a model cannot learn an effect that it sees once.
            weight=np.array([1 / (1 + np.log10(law.num_rows)) for law in laws]),
            dense_weight=random.standard_normal(num_dense, np.float32),
            key=int(random.integers(2**63)),
            scale=np.zeros(3),
        )
        return fitted(raw, self._unlabelled(random, 0), self.knobs.signal, self.knobs.click_rate)

    def planted_probability(self, batch: Batch) -> F64:
        """The true click probability of every sample of a batch of this source."""
        return self.planted.probability(batch)

    def best_auc(self, num_samples: int = 200_000) -> float:
        """The AUC of the true probabilities over the first samples: the limit of every model."""
        chunks = range(-(-min(num_samples, self.num_samples) // CHUNK_SAMPLES))
        parts = [self.planted.probability(self.chunk(number)) for number in chunks]
        return expected_auc(np.concatenate(parts)[:num_samples])

    def _unlabelled(self, random: np.random.Generator, start: int) -> Batch:
        """CHUNK_SAMPLES samples; `start` is the number of the first sample."""
        knobs, shape = self.knobs, (CHUNK_SAMPLES, len(self.preset.fields))
        bits = random.integers(2**64, size=shape, dtype=np.uint64)
        positions = random.random((CHUNK_SAMPLES, 2))
        parent = _parents(random, knobs.sessions, knobs.gap)
        mixing = Mixing(knobs.groups, knobs.correlation, start, knobs.drift / 1e6)
        rows = np.empty(shape, np.int64)
        sample_rows(bits, positions, parent, self._laws, mixing, rows)
        return one_hot(rows, self._dense(random, (positions * knobs.groups).astype(np.int64)))

    def _dense(self, random: np.random.Generator, groups: I64) -> F32:
        """Log1p of log-normal columns; the means depend on the group of the user or the item."""
        num_dense = len(self.preset.dense)
        means = np.random.default_rng([self.knobs.seed, PILOT + 1]).standard_normal(
            (self.knobs.groups, num_dense), np.float32
        )
        normal = random.standard_normal((CHUNK_SAMPLES, num_dense), np.float32)
        for column in range(num_dense):
            side = (USER, ITEM)[column % 2]
            normal[:, column] += 0.7 * means[groups[:, side], column]
        return np.logaddexp(np.float32(0), normal)

    @cached_property
    def _laws(self) -> FieldLaws:
        """Constants of every field, as `sample_rows` reads them."""
        first_rows = self.schema.first_rows
        laws, sizes = [], []
        for number, law in enumerate(self.preset.fields):
            multiplier, jump = coprime(law.num_rows, 0.618), coprime(law.num_rows, 0.382)
            laws.append(_law(law, self.knobs.skew))
            shuffle = coprime(self.knobs.groups, (number + 1) * 0.618 % 1)
            # A clock passes its rows once in as many samples as the published log has.
            period = max(1, -(-self.preset.knobs.samples // law.num_rows))
            # In the order of the columns NUM_ROWS to TURN_PERIOD.
            table = (law.num_rows, law.side, first_rows[number])
            sizes.append((*table, multiplier, jump, shuffle, period))
        return FieldLaws(np.array(laws, np.float64), np.array(sizes, np.int64))


def _law(law: FieldLaw, skew: float) -> tuple[float, ...]:
    """Constants of the inverse of a bounded Pareto distribution, as the kernel reads them.

    Rank r starts at r + 1 + offset. A top is a separate rank 0, and the other ranks follow it.
    """
    exponent = law.exponent * skew
    # At an exponent of 1 the formula is 0/0; this close to 1 the ranks are the same.
    flat = 1.0 - exponent if abs(exponent - 1.0) > 1e-6 else 1e-6
    top = law.top * min(skew, 1.0) if law.num_rows > 1 else 0.0
    first = 1.0 if top else 0.0
    start = (1.0 + law.offset) ** flat
    reach = (law.num_rows + 1.0 - first + law.offset) ** flat - start
    # `top` is a share of all look-ups; the kernel needs its share of those that are not even.
    top_share = top / (1.0 - law.tail) if top else 0.0
    return start, reach, 1.0 / flat, 1.0 + law.offset - first, top_share, law.tail


def coprime(number: int, share: float) -> int:
    """A number near `share` of `number` that has no common divisor with `number`."""
    near = max(1, int(share * number))
    while gcd(near, number) != 1:
        near += 1
    return near


def _parents(random: np.random.Generator, sessions: float, gap: float) -> I64:
    """For every sample an earlier sample of the same session, or -1."""
    sample = np.arange(CHUNK_SAMPLES)
    others = random.exponential(gap, CHUNK_SAMPLES).astype(np.int64)
    # Near the start, distances wrap; otherwise fewer sessions would continue there.
    parent = sample - 1 - others % np.maximum(sample, 1)
    continued = random.random(CHUNK_SAMPLES) < sessions
    return np.where(continued & (sample > 0), parent, -1)


def read_knobs(preset: Preset, options: Mapping[str, str]) -> Knobs:
    """The preset's knobs, with the options of the user in their place."""
    text = {key: repr(value) for key, value in asdict(preset.knobs).items()} | dict(options)

    def whole(key: str, low: int, high: int = 2**31 - 1) -> int:
        return parse_int(key, text[key], low, high)

    def real(key: str, low: float, high: float) -> float:
        return parse_number(key, text[key], low, high)

    return Knobs(
        samples=whole("samples", 1, 10**12),
        skew=real("skew", 0, 5),
        groups=whole("groups", 1, 10**6),
        correlation=real("correlation", 0, 1),
        sessions=real("sessions", 0, 1),
        gap=real("gap", 0, CHUNK_SAMPLES),
        drift=real("drift", 0, 1e6),
        signal=real("signal", 0, 20),
        click_rate=real("click_rate", 1e-6, 1 - 1e-6),
        seed=whole("seed", 0, LARGEST_SEED),
    )


def open_preset(call: CallSpec) -> SyntheticSource:
    """The source of `criteo-kaggle` or another preset; its knobs are options."""
    if call.name not in LOG_PRESETS:
        raise ValueError(f"no preset {call.name!r} (presets: {', '.join(LOG_PRESETS)})")
    preset = LOG_PRESETS[call.name]
    options = bind(call, tuple(knob.name for knob in fields(Knobs)))
    return SyntheticSource(preset, read_knobs(preset, options))
