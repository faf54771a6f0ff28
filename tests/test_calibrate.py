"""The closed forms of the calibration agree with drawn samples, and the presets with published
facts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.calibrate import chances, gini, given, now
from benchmarks.facts import FACTS, SOURCES, Gini, Ids, Top
from embroute.data.synthetic.generator import LOG_PRESETS, Preset, SyntheticSource
from embroute.data.synthetic.presets import FieldLaw, Knobs
from embroute.data.synthetic.sampling import ITEM, USER

pytestmark = pytest.mark.full

SAMPLES = 300_000
LAW = FieldLaw("id", 5000, USER, 1.4, tail=0.1, offset=3.0, top=0.2)
SOURCE_LAWS = (LAW, replace(LAW, name="item", side=ITEM))


def counts(knobs: Knobs, number: int) -> npt.NDArray[np.int64]:
    """The number of draws of every id of a field."""
    source = SyntheticSource(Preset("test", SOURCE_LAWS, (), knobs), knobs)
    rows = np.concatenate([chunk.rows.reshape(-1, 2)[:, number] for chunk in source.chunks()])
    return np.bincount(rows - number * LAW.num_rows, minlength=LAW.num_rows)


@pytest.mark.parametrize("times", [1, 10, 30])
@pytest.mark.parametrize(("number", "drift"), [(0, 0.0), (1, 0.0), (1, 5.0)])
def test_closed_form_of_distinct_ids_matches_draws(times: int, number: int, drift: float) -> None:
    knobs = Knobs(SAMPLES, sessions=0.3, drift=drift)
    found = (counts(knobs, number) >= times).sum()
    assert given(SOURCE_LAWS[number], knobs, Ids(SAMPLES, times)) == pytest.approx(found, rel=0.04)


@pytest.mark.parametrize("number", [0, 1])
def test_closed_form_of_top_shares_and_gini_matches_draws(number: int) -> None:
    knobs = Knobs(SAMPLES, sessions=0.3 * (number == 0), drift=3.0)
    found = np.sort(counts(knobs, number))[::-1]
    for ids in (1, 10):
        share = found[:ids].sum() / SAMPLES
        assert given(SOURCE_LAWS[number], knobs, Top(ids)) == pytest.approx(share, abs=0.02)
    between = np.abs(found[:, None] - found).mean() / 2 / found.mean()
    assert given(SOURCE_LAWS[number], knobs, Gini()) == pytest.approx(between, abs=0.03)


def test_gini_of_equal_and_of_single_ids() -> None:
    even = now(FieldLaw("even", 1000, ITEM, 0.0))
    assert gini(even, 10**6, 0.0) == pytest.approx(0.0, abs=1e-6)
    one = now(FieldLaw("one", 1000, ITEM, 0.0, top=1.0))
    assert gini(one, 10**6, 0.0) == pytest.approx(0.999, abs=1e-6)


def test_chances_without_sessions_are_poisson() -> None:
    found = chances(4, np.array([2.0]), 0.0)[0]
    np.testing.assert_allclose(found, np.exp(-2.0) * np.array([1, 2, 2, 8 / 6]))


@pytest.mark.parametrize("preset", FACTS)
def test_presets_are_near_the_published_facts(preset: str) -> None:
    knobs = LOG_PRESETS[preset].knobs
    laws = {law.name: law for law in LOG_PRESETS[preset].fields}
    for name, facts in FACTS[preset].items():
        for fact in facts:
            assert fact.source in SOURCES
            # Of the largest tables a third is never drawn, and small ones have no seldom ids.
            if fact.weight == 1.0 and fact.source != "cltv":
                ratio = given(laws[name], knobs, fact.of) / fact.value
                assert 0.85 < ratio < 1.15, (name, fact)
