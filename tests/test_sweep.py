"""The sweep over settings goes on where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.sweep import OWN, Case, Result, cases, page, proceed, read, rivals
from embroute.data.open import open_source

NAMES = ["online-retail"]


def test_settings_come_in_one_order_and_once() -> None:
    grid = cases(NAMES)
    assert grid == cases(NAMES)
    assert len(set(grid)) == len(grid) == 4 * 3 * 4 * 3 * 4


def test_rivals_use_some_of_the_workers_too() -> None:
    assert "esd(1, workers=0+1)" in rivals(4)
    assert "herald(workers=0)" in rivals(2)
    assert not any("workers" in name for name in rivals(1))


def test_the_ratio_is_to_the_best_of_the_others(tmp_path: Path) -> None:
    case = cases(NAMES)[0]
    result = Result(case, {OWN: 3.0, "esd(1)": 2.0, "herald": 4.0})
    assert result.best == "esd(1)"
    assert result.ratio == 1.5
    assert "1.500" in page([result], 1)
    assert Result(case, {"esd(1)": 2.0}).ratio == float("inf")


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small = [case for case in cases(NAMES) if case.workers == 2]
    done = {case for case in cases(NAMES) if case != small[0]}
    out = tmp_path / "sweep.jsonl"
    lines = [f'{{"case": {list(case)}, "ms": {{}}}}'.replace("'", '"') for case in done]
    out.write_text("\n".join(lines) + '\n{"case": ["online-re\n')
    args = argparse.Namespace(out=out, most=None, steps=12)
    proceed(args, {"online-retail": open_source("online-retail")})
    found = {result.case: result for result in read(out)}
    assert set(found) == set(cases(NAMES))
    mine = found[Case(*small[0])]
    assert {OWN, "vanilla", "esd(1, workers=0)"} <= set(mine.ms)
    assert all(value > 0 for value in mine.ms.values())
