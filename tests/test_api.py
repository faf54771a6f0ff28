"""The simulator in Python: the same values as the commands, on names, files, frames and arrays."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from click.testing import CliRunner

import embroute
from embroute.cli.main import cli
from examples.own_policy import sticky

SHORT = ["--steps", "20", "--warmup", "5"]
ROWS = 3000


def columns() -> dict[str, npt.NDArray[np.int64]]:
    random = np.random.default_rng(0)
    return {
        "user": random.integers(0, 300, ROWS),
        "item": random.integers(0, 500, ROWS),
        "click": random.integers(0, 2, ROWS),
    }


def small_comparison(data: object) -> pl.DataFrame:
    source = embroute.open_data(data, label="click", categorical=["user", "item"])
    compared = embroute.compare(source, ["esd(1)"], batch=32, workers=4, network="dc", steps=15)
    return compared.to_dataframe().drop("decision_ms")


def untimed(value: object) -> object:
    if isinstance(value, dict):
        return {key: untimed(entry) for key, entry in value.items() if key != "decision_ms"}
    return value


def test_compare_gives_the_values_of_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--policies", "esd(1),lower-bound", *SHORT, "--json", str(out)]
    assert CliRunner().invoke(cli, ["compare", *arguments]).exit_code == 0
    compared = embroute.compare(policies=["esd(1)", "lower-bound"], steps=20, warmup=5)
    assert untimed(json.loads(out.read_text())) == untimed(compared.to_json())
    frame = compared.to_dataframe()
    assert frame["policy"].to_list() == ["vanilla", "esd(1)", "lower-bound"]
    assert frame["decision_ms"].null_count() == 1
    for result, line in zip(compared.results.values(), frame.iter_rows(named=True), strict=True):
        assert line["step_time_s"] == result.step_time_s
        assert line["miss_pull_rows"] == result.rows["miss_pull"]


def test_simulate_gives_the_values_of_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    arguments = ["--policy", "het(3)", *SHORT, "--csv", str(out)]
    assert CliRunner().invoke(cli, ["simulate", *arguments]).exit_code == 0
    simulated = embroute.simulate(policy="het(3)", steps=20, warmup=5)
    simulated.to_csv(tmp_path / "again.csv")
    texts = [path.read_text() for path in (out, tmp_path / "again.csv")]
    lines = [list(csv.DictReader(text.splitlines())) for text in texts]
    assert len(lines[0]) == len(simulated.to_dataframe()) == 20
    assert [untimed(line) for line in lines[0]] == [untimed(line) for line in lines[1]]


def test_a_function_is_a_policy() -> None:
    compared = embroute.compare(policies=["esd(1)", sticky], steps=15, warmup=5)
    assert list(compared.results) == ["vanilla", "esd(1)", "sticky"]
    assert list(embroute.compare(policies=sticky, steps=15).results) == ["vanilla", "sticky"]
    assert embroute.simulate(policy=sticky, steps=5, warmup=0).policy == "sticky"


def test_files_frames_and_arrays_give_the_same_rows(tmp_path: Path) -> None:
    frame = pl.DataFrame(columns())
    frame.write_csv(tmp_path / "clicks.csv")
    wanted = small_comparison(str(tmp_path / "clicks.csv"))
    for data in (frame, frame.lazy(), columns(), tmp_path / "clicks.csv", Arrow(frame)):
        assert small_comparison(data).equals(wanted)


class Arrow:
    """A table of another library, such as pyarrow's."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._frame.__arrow_c_stream__(requested_schema)


def test_results_show_themselves(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    compared = embroute.compare(policies="esd(1)", steps=15, warmup=5)
    assert "esd(1)" in str(compared)
    assert "esd(1)" in compared._repr_html_()
    page = compared.to_html(tmp_path / "page.html", caches=["10%"])
    assert (tmp_path / "page.html").read_text() == page
    assert compared.plot("step_time_s").renderers
    simulated = embroute.simulate(policy="vanilla", steps=8, warmup=0)
    assert simulated.plot("miss_pull_rows").renderers
    page = simulated.to_html(tmp_path / "steps.html")
    assert (tmp_path / "steps.html").read_text() == page
    assert "vanilla, step by step" in page
    for result in (compared, simulated):
        with pytest.raises(ValueError, match=r"quantity must be one of .*step_time_s"):
            result.plot("nonsense")


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda: embroute.compare(batch=0), "batch= must be a whole number of at least 1, got 0"),
        (lambda: embroute.compare(warmup=10, steps=5), "warmup=10: must be below steps=5, which"),
        (lambda: embroute.compare(steps=True), "steps= must be a whole number"),
        (lambda: embroute.compare(cache="lots"), "cache= must look like 0.1, 10%"),
        (lambda: embroute.compare(optimizer="lion"), "optimizer= must be one of sgd"),
        (lambda: embroute.compare(network="edge-8", workers=4), "workers=4: network=edge-8 has 8"),
        (lambda: embroute.compare(policies=["esd(2)"]), "policies='esd(2)': esd: alpha must be"),
        (lambda: embroute.compare(policies=["esd", "esd"]), "policies=: 'esd' is given twice"),
        (lambda: embroute.simulate(policy="esd1"), "; did you mean esd(1)?"),
        (lambda: embroute.open_data("nowhere.csv"), "nowhere.csv: no such file"),
        (lambda: embroute.open_data(columns(), label="x"), "label=: the frame has no column 'x'"),
        (lambda: embroute.open_data(columns()), "no categorical column is given"),
        (lambda: embroute.open_data(columns(), categorical=3), "categorical= must be names"),
    ],
)
def test_faults_name_the_argument(call: Callable[[], object], fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        call()


def test_unknown_arguments_name_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"no option 'warm_up'; did you mean warmup\?"):
        embroute.compare(warm_up=3)
    with pytest.raises(TypeError, match="no option 'labels'; did you mean label"):
        embroute.open_data(columns(), labels="click")
    with pytest.raises(TypeError, match="data must be a name, a path, a frame of polars"):
        embroute.open_data(3)


def test_the_simulator_needs_no_torch() -> None:
    program = "import sys, embroute; embroute.compare(policies='esd(1)', steps=12); "
    program += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
