"""The generator: published sizes, options that change one property each, and labels of a known
model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embroute.config.spec import parse_call
from embroute.data.batch import Batch, concat
from embroute.data.synthetic.generator import (
    CHUNK_SAMPLES,
    LOG_PRESETS,
    SyntheticSource,
    _law,
    coprime,
    open_preset,
)
from embroute.data.synthetic.planted import expected_auc, fitted, planted_scores
from embroute.data.synthetic.presets import FieldLaw
from embroute.data.synthetic.sampling import (
    CONTEXT,
    power_law_rank,
    shuffled,
)
from embroute.kernels.array_types import F32, F64, I64
from embroute.kernels.memory import splitmix64


@cache
def first(text: str, samples: int = CHUNK_SAMPLES) -> Batch:
    """The first samples of a preset."""
    name, _, options = text.partition("(")
    source = open_preset(parse_call(f"{name}(samples={samples}, {options}" + ")" * (not options)))
    return concat(list(source.chunks()))


def column(batch: Batch, preset: str, name: str) -> I64:
    """The rows of one field."""
    names = [law.name for law in LOG_PRESETS[preset].fields]
    return batch.rows.reshape(len(batch), -1)[:, names.index(name)]


@pytest.mark.parametrize(
    ("name", "num_fields", "num_rows", "num_dense", "samples"),
    [
        ("criteo-kaggle", 26, 33_762_577, 13, 45_840_617),
        ("avazu", 22, 9_449_445, 0, 40_428_967),
        ("movielens-25m", 2, 162_541 + 59_047, 0, 25_000_095),
        ("criteo-search", 17, 16_205_514, 2, 15_995_634),
    ],
)
def test_presets_have_the_published_sizes(
    name: str, num_fields: int, num_rows: int, num_dense: int, samples: int
) -> None:
    source = open_preset(parse_call(name))
    schema = source.schema
    assert (schema.num_fields, schema.num_rows, len(schema.dense)) == (
        num_fields,
        num_rows,
        num_dense,
    )
    assert source.num_samples == samples


@pytest.mark.parametrize("name", LOG_PRESETS)
def test_synthetic_rows_lie_in_their_tables(name: str) -> None:
    batch = first(name)
    schema = open_preset(parse_call(name)).schema
    rows = batch.rows.reshape(len(batch), -1)
    assert (rows >= schema.first_rows[:-1]).all()
    assert (rows < schema.first_rows[1:]).all()
    assert batch.dense.shape == (len(batch), len(schema.dense))
    assert np.isfinite(batch.dense).all()
    assert set(np.unique(batch.label)) == {0.0, 1.0}


def test_synthetic_chunk_depends_on_seed_and_number_alone() -> None:
    source = open_preset(parse_call("avazu(samples=70000)"))
    chunks = list(source.chunks())
    assert [len(chunk) for chunk in chunks] == [CHUNK_SAMPLES, CHUNK_SAMPLES, 4464]
    alone = open_preset(parse_call("avazu(samples=69000)")).chunk(2)
    np.testing.assert_array_equal(alone.rows, chunks[2].rows[: len(alone.rows)])
    np.testing.assert_array_equal(alone.label, chunks[2].label[: len(alone)])
    assert (chunks[0].rows != chunks[1].rows).any()
    other = open_preset(parse_call("avazu(samples=70000, seed=1)")).chunk(2)
    assert (other.rows != chunks[2].rows).any()


def top_share(rows: I64, share: float = 0.01) -> float:
    counts = np.sort(np.unique(rows, return_counts=True)[1])[::-1]
    return float(counts[: max(1, int(share * len(counts)))].sum() / len(rows))


def test_skew_raises_the_share_of_popular_rows() -> None:
    shares = [top_share(first(f"criteo-kaggle(skew={skew})").rows) for skew in (0, 0.7, 1, 1.3)]
    assert shares == sorted(shares)
    flat = column(first("criteo-kaggle(skew=0)"), "criteo-kaggle", "C13")
    counts = np.bincount(flat - flat.min())
    assert counts.std() < 1.2 * np.sqrt(counts.mean())  # as an even draw has


def mutual_information(left: I64, right: I64) -> float:
    """In nats, of the empirical distribution."""
    _, left = np.unique(left, return_inverse=True)
    _, right = np.unique(right, return_inverse=True)
    joint = np.zeros((left.max() + 1, right.max() + 1))
    np.add.at(joint, (left, right), 1 / len(left))
    alone = joint.sum(axis=1)[:, None] * joint.sum(axis=0)
    some = joint > 0
    return float((joint[some] * np.log(joint[some] / alone[some])).sum())


def field_information(correlation: float, left: str, right: str) -> float:
    batch = first(f"avazu(correlation={correlation})")
    return mutual_information(column(batch, "avazu", left), column(batch, "avazu", right))


def test_correlation_ties_fields_of_one_side() -> None:
    items = ("C21", "C19")
    found = [field_information(correlation, *items) for correlation in (0.0, 0.5, 1.0)]
    assert found[0] < 0.05 < found[1] < found[2]
    assert field_information(1.0, "C19", "device_type") < 0.05
    assert field_information(1.0, "C19", "banner_pos") < 0.05


def test_correlation_keeps_the_skew() -> None:
    shares = [top_share(first(f"avazu(correlation={c}, sessions=0)").rows) for c in (0, 1)]
    assert abs(shares[0] - shares[1]) < 0.03


def reuse(batch: Batch, size: int = 512) -> float:
    """Share of a batch's distinct rows that the batch before had."""
    parts = [np.unique(batch.slice(s, s + size).rows) for s in range(0, len(batch), size)]
    return float(np.mean([np.isin(now, before).mean() for before, now in pairwise(parts)]))


def test_sessions_raise_reuse_between_batches() -> None:
    found = [first(f"avazu(sessions={share})") for share in (0, 0.4, 0.8)]
    values = [reuse(batch) for batch in found]
    assert values[0] < values[1] < values[2]
    shuffled = found[0].take(np.random.default_rng(0).permutation(len(found[0])))
    assert abs(reuse(shuffled) - values[0]) < 0.01


def test_session_keeps_its_user_and_changes_its_item() -> None:
    batch = first("movielens-25m(sessions=0.9, gap=0)")
    user, item = batch.rows.reshape(-1, 2).T
    assert abs((user[1:] == user[:-1]).mean() - 0.9) < 0.01
    assert (item[1:] == item[:-1]).mean() < 0.05


def hot_overlap(drift: float) -> float:
    """Share of the early half's 100 most popular items that are popular in the late half."""
    batch = first(f"movielens-25m(drift={drift})", 2 * CHUNK_SAMPLES)
    halves = column(batch, "movielens-25m", "item").reshape(2, -1)
    early, late = (np.argsort(np.bincount(half))[-100:] for half in halves)
    return float(np.isin(early, late).mean())


def test_drift_replaces_hot_items() -> None:
    still, slow, fast = (hot_overlap(drift) for drift in (0, 5, 50))
    assert still > slow > fast
    assert still > 0.8


def auc(score: F64, label: F32) -> float:
    """Share of (1, 0) pairs that the score puts in order."""
    ranks = np.empty(len(score))
    ranks[np.argsort(score)] = np.arange(1, len(score) + 1)
    ones = label.sum()
    return float((ranks[label == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(label) - ones)))


@pytest.mark.parametrize("name", LOG_PRESETS)
def test_best_auc_equals_the_auc_of_the_true_probabilities(name: str) -> None:
    source = open_preset(parse_call(f"{name}(samples={CHUNK_SAMPLES})"))
    batch = source.chunk(0)
    probability = source.planted_probability(batch)
    assert abs(auc(probability, batch.label) - source.best_auc()) < 0.01
    assert abs(probability.mean() - batch.label.mean()) < 0.01
    assert 0.77 < source.best_auc() < 0.87
    assert abs(probability.mean() - source.knobs.click_rate) < 0.04


def test_signal_and_click_rate_options_change_the_labels() -> None:
    weak, strong = (open_preset(parse_call(f"avazu(samples=9999, signal={s})")) for s in (0, 3))
    assert weak.best_auc() == pytest.approx(0.5)
    assert strong.best_auc() > 0.85
    assert abs(first("avazu(click_rate=0.4)").label.mean() - 0.4) < 0.03


def test_field_interactions_carry_signal() -> None:
    source = open_preset(parse_call(f"avazu(samples={CHUNK_SAMPLES})"))
    batch, planted = source.chunk(0), source.planted
    additive = replace(planted, scale=planted.scale * [1, 0, 1])
    assert auc(additive.logit(batch), batch.label) < source.best_auc() - 0.03


def test_expected_auc_equals_a_count_of_all_pairs() -> None:
    p = np.random.default_rng(0).random(50)
    pairs = p[:, None] * (1 - p)
    order = (p[:, None] > p) + 0.5 * (p[:, None] == p)
    assert expected_auc(p) == pytest.approx((pairs * order).sum() / pairs.sum())


def test_fitted_label_model_reaches_its_targets() -> None:
    source = open_preset(parse_call("criteo-kaggle(samples=20000)"))
    batch = source.chunk(0)
    model = fitted(source.planted, batch, 2.0, 0.03)
    assert model.probability(batch).mean() == pytest.approx(0.03)
    assert abs(model.logit(batch).std() - 2.0) < 0.2


def shares(law: FieldLaw) -> F64:
    """Share of the look-ups of every rank, by summing the law's weights."""
    first = 1 if law.top else 0
    bounds = np.arange(law.num_rows - first + 1) + 1 + law.offset
    weight = np.diff(bounds ** (1 - law.exponent))
    power = (1 - law.top - law.tail) * weight / weight.sum()
    return np.append([law.top] * first, power) + law.tail / law.num_rows


@given(
    st.floats(0, 1, exclude_max=True),
    st.integers(2, 10**5),
    st.floats(0.2, 5).filter(lambda exponent: abs(exponent - 1) > 1e-3),
    st.floats(-0.9, 1e4),
    st.sampled_from((0.0, 0.4)),
)
def test_power_law_rank_equals_its_numpy_twin(
    place: float, num_rows: int, exponent: float, offset: float, top: float
) -> None:
    law = FieldLaw("twin", num_rows, CONTEXT, exponent, 0.1, offset, top)
    constants = np.array(_law(law, 1.0))
    rank = power_law_rank(place, False, num_rows, constants)
    below = np.append(0.0, np.cumsum(shares(replace(law, tail=0.0, top=top / 0.9))))
    assert below[rank] - 1e-6 <= place <= below[rank + 1] + 1e-6
    assert power_law_rank(place, True, num_rows, constants) == int(place * num_rows)


@pytest.mark.parametrize("correlation", [0, 1])
@pytest.mark.parametrize("field", ["C3", "C7", "C10", "C12", "C19", "C26"])
def test_field_marginals_follow_their_law_with_any_correlation(
    field: str, correlation: int
) -> None:
    name = "criteo-kaggle"
    batch = first(f"{name}(correlation={correlation}, sessions=0)", 4 * CHUNK_SAMPLES)
    found = np.sort(np.unique(column(batch, name, field), return_counts=True)[1])[::-1]
    law = next(law for law in LOG_PRESETS[name].fields if law.name == field)
    expected = np.sort(shares(law))[::-1]
    distinct = -np.expm1(-expected * len(batch)).sum()
    assert abs(len(found) / distinct - 1) < 0.03
    for ids in (1, 10, 1000):
        assert abs(found[:ids].sum() / len(batch) - expected[:ids].sum()) < 0.02


def test_top_id_stays_while_items_drift() -> None:
    early, late = first("criteo-kaggle(drift=20)", 2 * CHUNK_SAMPLES).rows.reshape(2, -1, 26)
    for number, stays in ((18, True), (17, False)):  # C19 has a missing value, C18 none
        hot = [np.bincount(half[:, number]).argmax() for half in (early, late)]
        assert (hot[0] == hot[1]) == stays


def test_avazu_hours_come_in_order() -> None:
    source = open_preset(parse_call("avazu(samples=400000)"))
    hours = [source.chunk(number).rows.reshape(-1, 22)[:, 0] for number in range(12)]
    changes = np.diff(np.concatenate(hours)) != 0
    assert changes.sum() == 12 * CHUNK_SAMPLES * 240 // 40_428_967


@given(st.integers(1, 20), st.integers(0, 19))
def test_shuffled_permutes_whole_groups(num_groups: int, share: int) -> None:
    places = (np.arange(4 * num_groups) + 0.5) / (4 * num_groups)
    multiplier = coprime(num_groups, share / 20)
    found = np.array([shuffled(place, num_groups, multiplier) for place in places])
    # Every place is taken once, so a law keeps its shares; neighbours within a group stay so.
    np.testing.assert_allclose(np.sort(found), places)
    inside = np.diff(found.reshape(num_groups, 4), axis=1)
    np.testing.assert_allclose(inside, 0.25 / num_groups)


def test_shuffled_place_stays_below_one() -> None:
    assert shuffled(np.nextafter(1.0, 0.0), 7, 3) < 1.0


def test_planted_scores_equal_their_numpy_twin() -> None:
    rows = np.random.default_rng(0).integers(0, 99, (6, 3))
    side, weight, out = np.array([0, 1, 2]), np.array([1.0, 0.5, 2.0]), np.empty((6, 2))
    planted_scores(rows, side, weight, np.uint64(5), out)
    hashed = np.array(
        [[splitmix64(np.uint64(row ^ 5)) for row in line] for line in rows], np.uint64
    )
    again = np.array([[splitmix64(key) for key in line] for line in hashed], np.uint64)
    shifts = np.array([0, 16, 32, 48], np.uint64)
    parts = [(keys[..., None] >> shifts) & np.uint64(65535) for keys in (hashed, again)]
    first_SFK, second_SFK = ((p.astype(float) - 32767.5) / 65536 * weight[:, None] for p in parts)
    np.testing.assert_allclose(out[:, 0], first_SFK.sum(axis=(1, 2)))
    np.testing.assert_allclose(out[:, 1], (second_SFK[:, 0] * second_SFK[:, 1]).sum(axis=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("criteo-gaggle", "no preset 'criteo-gaggle'"),
        ("avazu(samples=0)", "samples must be between 1"),
        ("avazu(correlation=2)", "correlation must be between 0 and 1"),
        ("avazu(speed=2)", "has no option 'speed'"),
    ],
)
def test_bad_preset_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_preset(parse_call(text))


def test_preset_options_set_the_knobs() -> None:
    source = open_preset(parse_call("criteo-kaggle(500, skew=1.1)"))
    assert isinstance(source, SyntheticSource)
    assert source.knobs == replace(LOG_PRESETS["criteo-kaggle"].knobs, samples=500, skew=1.1)
