"""The command line: commands, options, versions, and messages for mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import embroute
from embroute.cli.main import COMMANDS as MAIN_COMMANDS
from embroute.cli.main import cli, load_command
from embroute.config.option_model import option_name
from embroute.config.run_options import RunConfig
from embroute.data.open import built_in_names, open_source
from embroute.data.synthetic.generator import Knobs
from embroute.policies.catalog import SYSTEMS

PROGRAM = Path(sys.executable).parent / "embroute"
SHORT = ("--steps", "12", "--warmup", "2")

COMMANDS = {
    "advise",
    "checkpoint",
    "checkpoint export",
    "checkpoint inspect",
    "predict",
    "report",
    "run",
    "schema",
    "train",
    "compare",
    "data",
    "data describe",
    "simulate",
}
DATA_OPTIONS = {
    "--format",
    "--label",
    "--categorical",
    "--dense",
    "--bag",
    "--bag-separator",
    "--time",
    "--ids",
    "--hash-rows",
    "--missing",
    "--positive-rating",
    "--skip-bad-rows",
    "--limit",
}
JOB_OPTIONS = {
    "--network",
    "--workers",
    "--batch",
    "--cache",
    "--dim",
    "--optimizer",
    "--quotas",
    "--compute-ms-per-sample",
    "--dense-bytes",
    "--steps",
    "--warmup",
    "--epochs",
    "--shuffle",
    "--seed",
}
COMPARE_OPTIONS = {"--data", "--policies", "--json", "--report", "--report-caches", "--tradeoffs"}
OPTIONS = {
    "compare": DATA_OPTIONS | JOB_OPTIONS | COMPARE_OPTIONS,
    "simulate": DATA_OPTIONS | JOB_OPTIONS | {"--data", "--policy", "--csv"},
    "data describe": DATA_OPTIONS | {"--batch", "--json"},
    "data": set(),
    "advise": DATA_OPTIONS
    | {"--data", "--network", "--memory-per-worker", "--dim", "--model", "--workers", "--batch"}
    | {"--optimizer", "--compute-ms-per-sample", "--target-samples-per-s", "--out"}
    | {"--allow-stale", "--allow-reorder"},
    "checkpoint": set(),
    "predict": {"--out", "--data", "--part", "--batch", "--unlabelled"},
    "schema": set(),
    "run": {"--workers", "--shards", "--restarts", "--module"},
    "report": {"--html"},
    "checkpoint inspect": {"--verify"},
    "checkpoint export": {"--out", "--table"},
    "train": DATA_OPTIONS
    | {option_name(name) for name in RunConfig.model_fields} - {"--data-options", "--nodes"},
}


def walk(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, listed in group.commands.items():
        command = load_command(name) if group is cli else listed
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from walk(command, f"{path}{name} ")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed program, in a process of its own."""
    return subprocess.run(
        [str(PROGRAM), *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def notes(stderr: str) -> list[str]:
    """Lines without those of progress, such as `esd(1) 4 of 8 (3 s, 3 s left)`."""
    return [line for line in stderr.splitlines() if not re.search(r"\(\d+ s[^)]*\)$", line)]


def fault(*arguments: str) -> str:
    """The error of a command; `main` prints it behind `embroute:` and exits with 2."""
    result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, ValueError), result.output
    assert result.stdout == ""
    return str(result.exception)


def test_cli_has_exactly_the_documented_commands() -> None:
    assert {name for name, _ in walk(cli)} == COMMANDS
    documented = [command.help or command.short_help for _, command in walk(cli)]
    assert all(documented)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_each_command_lists_its_options(name: str) -> None:
    result = CliRunner().invoke(cli, [*name.split(), "--help"])
    assert result.exit_code == 0
    shown = set(re.findall(r"^  (?:-[hq], )?(--[a-z-]+)", result.output, re.MULTILINE))
    loud = name in ("data", "checkpoint")  # groups of commands
    assert shown == OPTIONS[name] | ({"--help"} if loud else {"--help", "--quiet"})
    command = dict(walk(cli))[name]
    options = {flag for p in command.params if isinstance(p, click.Option) for flag in p.opts}
    assert options - {"-q", "--quiet"} == OPTIONS[name]
    assert all(p.help for p in command.params if isinstance(p, click.Option))


def test_short_help_flag_lists_all_commands() -> None:
    result = CliRunner().invoke(cli, ["-h"])
    assert result.exit_code == 0
    assert all(re.search(rf"^  {name} ", result.output, re.MULTILINE) for name in cli.commands)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, _, text in MAIN_COMMANDS])
def test_listed_help_is_the_first_sentence_of_the_command(name: str, text: str) -> None:
    assert load_command(name).get_short_help_str(1000) == text


def test_help_of_compare_names_every_policy() -> None:
    output = " ".join(CliRunner().invoke(cli, ["compare", "--help"]).output.split())
    for name, factory in SYSTEMS.items():
        options = ", ".join(signature(factory).parameters)
        assert f"{name}({options}):".replace("()", "") in output
    assert "lower-bound:" in output.replace("lower- bound", "lower-bound")  # at the end of a line


def test_version_is_printed_by_program_and_module() -> None:
    expected = f"embroute, version {embroute.__version__}\n"
    assert CliRunner().invoke(cli, ["--version"]).output == expected
    module = [sys.executable, "-m", "embroute", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, check=True).stdout == expected


def test_user_mistake_prints_one_line_and_exits_with_2() -> None:
    result = run("compare", "--cache", "100rows", *SHORT)
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(
        r"embroute: --cache 100 rows: worker \d needs \d+ rows of width 16 in step \d+, "
        r"its cache holds 100; use a larger cache or a smaller batch",
        result.stderr.splitlines()[-1],
    )


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("compare --policies esd1", "did you mean esd(1)?"),
        ("compare --policies het100", "did you mean het(100)?"),
        ("compare --policies ESD(1)", "did you mean esd?"),
        ("compare --policies embrout", "did you mean embroute?"),
        ("compare --policies fea", "did you mean fae?"),
        ("compare --data Online-retial", "did you mean online-retail?"),
        ("compare --polices x", "'--policies'"),
        ("comapre", "Did you mean 'compare'?"),
        ("data descirbe", "Did you mean 'describe'?"),
    ],
)
def test_near_misses_are_answered_with_the_right_word(words: str, meant: str) -> None:
    result = CliRunner().invoke(cli, words.split())
    assert result.exit_code != 0
    assert meant in f"{result.exception} {result.output}"


def test_unknown_column_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,user,Item\n1,2,3\n")
    words = ("data", "describe", f"{tmp_path}/a.csv", "--label", "click", "--categorical", "item")
    assert fault(*words).endswith("the columns are click, user, Item; did you mean Item?")


def test_unknown_option_exits_with_2() -> None:
    result = CliRunner().invoke(cli, ["compare", "--polices", "esd"])
    assert result.exit_code == 2
    assert "No such option" in result.stderr


def test_closed_output_pipe_prints_no_error() -> None:
    script = f"{PROGRAM} compare --policies vanilla --steps 12 --warmup 2 | true"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert notes(result.stderr) == []


WITHOUT_TORCH = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] == "torch"
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("torch is still there")
import embroute
from embroute.config.run_options import RunConfig
from embroute.cli.main import main
run = ["compare", "--policies", "esd(1)", "--steps", "4", "--warmup", "1", "--json", sys.argv[1]]
sys.argv = ["embroute", *run]
main()
"""


def test_compare_runs_without_torch_and_prints_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-c", WITHOUT_TORCH, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert notes(done.stderr)[0] == f"written: {path}"
    assert notes(done.stderr)[1].startswith("next: embroute advise ")
    assert "esd(1)" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--policies", "best"),
            "--policies 'best': no policy 'best' (there are nocache, vanilla,",
        ),
        (
            ("--policies", "esd(2)"),
            "--policies 'esd(2)': esd: alpha must be between 0 and 1, got 2",
        ),
        (("--policies", "esd(1"), "unbalanced parentheses in 'esd(1'"),
        (("--policies", "het,het"), "--policies: 'het' is given twice"),
        (
            ("--policies", "vanilla(workers=8)"),
            "workers must be all, fast, or numbers below 8 such",
        ),
        (("--policies", "vanilla(workers=some)"), "such as 0+1+2, got 'some'"),
        (
            ("--policies", "sync=none evict=lru"),
            "--policies 'sync=none evict=lru': sync=none caches",
        ),
        (("--policies", "het(5)", "--optimizer", "adam"), "--optimizer adam: het(5) merges deltas"),
        (("--warmup", "90"), "--warmup 90: must be below --steps 90, which includes it"),
        (("--steps", "5"), "--warmup 10: must be below --steps 5, which includes it"),
        (
            ("--network", "edge-8", "--workers", "4"),
            "--workers 4: --network edge-8 has 8 workers; use --network edge-4",
        ),
        (
            ("--network", "lan"),
            "--network 'lan': neither a preset (edge-N, dc-N, uneven-N, colo-N, box-N)",
        ),
        (("--data", "nowhere.csv"), "nowhere.csv: no such file or directory, and no built-in data"),
        (("--data", "avazu(skew=x)"), "skew must be a number, got 'x'"),
        (
            ("--label", "click"),
            "online-retail(negatives=1) is built-in data: of the data options it takes",
        ),
        (("--json", "missing/x.json"), "--json missing/x.json: the folder missing does not exist"),
        (("--json", "."), "--json .: this is a folder, give a file in it"),
        (("--cache", "much"), "--cache must look like 0.1, 10%, 5000rows or 256MB, got 'much'"),
        (("--cache", "200%"), "--cache must be at most 1 or 100% of all rows, got '200%'"),
        (("--dim", "x"), "--dim 'x': a width must be a whole number from 1"),
        (("--dim", "8,C1=4"), "--dim 'C1=4': expected table=width with a table of InvoiceNo,"),
        (("--quotas", "1,2"), "--quotas needs 8 numbers of at least 0, got (1.0, 2.0)"),
        (("--quotas", "1,x,1"), "--quotas must be a number, got 'x'"),
        (("--dense-bytes", "10%"), "--dense-bytes must look like 4000000 or 4MB, got '10%'"),
        (("--limit", "0"), "--limit must be a whole number of at least 1, got 0"),
    ],
)
def test_compare_names_the_wrong_option(arguments: tuple[str, ...], message: str) -> None:
    assert message in fault("compare", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "lower-bound"), "--policy 'lower-bound': a line to compare policies with,"),
        (("--policy", "dispatch=x"), "--policy 'dispatch=x': no dispatch 'x' (there are block,"),
        (("--policy", "esd(1, workers=9)"), "numbers below 8 such as 0+1+2, got '9'"),
        (("--csv", "missing/x.csv"), "--csv missing/x.csv: the folder missing does not exist"),
        (("--csv", "."), "--csv .: this is a folder, give a file in it"),
    ],
)
def test_simulate_names_the_wrong_option(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    assert message in fault("simulate", "--csv", str(tmp_path / "x.csv"), *arguments)


@pytest.mark.parametrize(
    "arguments", [("--batch", "0"), ("--steps", "x"), ("--optimizer", "lion"), ("--epochs", "0")]
)
def test_options_refuse_values_outside_their_range(arguments: tuple[str, ...]) -> None:
    assert fault("compare", *arguments).startswith(f"{arguments[0]} must be ")


def test_output_paths_are_checked_before_data_opens() -> None:
    # The data does not exist either; the folder is what is told.
    assert "missing" in fault("compare", "--data", "nowhere.csv", "--json", "missing/x.json")


def test_worker_count_must_match_the_network_file(tmp_path: Path) -> None:
    path = tmp_path / "edge-8.yaml"
    path.write_text("hosts: {a: {link: 1gbit}}\nworkers: [a, a]\nshards: [a]\n")
    message = fault("compare", "--network", str(path), "--workers", "3")
    assert message == f"--workers 3: --network {path} has 2 workers"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--network", "edge", "--workers", "4"),
        ("--network", "colo-2", "--workers", "2"),
        ("--quotas", "3,3,3,3,1,1,1,0", "--batch", "64"),
        ("--dim", "8,Country=4", "--optimizer", "rowwise-adagrad", "--cache", "2MB"),
        ("--dense-bytes", "4000000", "--compute-ms-per-sample", "0.5"),
        ("--data", "online-retail(negatives=1)", "--limit", "20000", "--epochs", "2", "--shuffle"),
        ("--data", "movielens-25m(samples=20000)", "--cache", "20%"),
    ],
)
def test_compare_accepts_combined_options(arguments: tuple[str, ...]) -> None:
    command = ["compare", "--policies", "esd(1),lower-bound", *SHORT, *arguments]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert "esd(1)" in result.output


DOCS = Path(__file__).parent.parent / "docs"


def test_manual_describes_every_data_option_and_name() -> None:
    text = (DOCS / "data.md").read_text()
    names = {*DATA_OPTIONS, *built_in_names(), *(knob.name for knob in fields(Knobs))}
    assert all(f"`{name}`" in text for name in names)
    built_in = text.partition("## Built-in data")[2].splitlines()
    for name in built_in_names():
        source = open_source(name)
        counts = (source.num_samples or 0, source.schema.num_fields, source.schema.num_rows)
        row = next(line for line in built_in if line.startswith(f"| `{name}` |"))
        assert row.endswith(" | ".join(f"{count:,}" for count in counts) + " |"), name
