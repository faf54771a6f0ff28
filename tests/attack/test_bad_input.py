"""Bad values at every input: one line that names the option or file, the value and the range."""

from __future__ import annotations

import gzip
import re
import shlex
import sys
from pathlib import Path

import pytest

from embroute.cli.main import main
from embroute.config.cluster_file import read_cluster
from embroute.config.data_options import DataOptions
from embroute.config.run_file import read_run_file
from embroute.config.run_options import RunConfig
from embroute.config.spec import LARGEST_SEED, MAX_MESSAGE, parse_int
from embroute.data.open import open_source
from embroute.policies.catalog import make_policy
from embroute.train.run_ranks import open_run
from tests.test_readers_errors import table_file

HUGE = 2**80
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


STATUS = re.compile(r"compiling for|.* \(\d+ s\)$")  # lines that a slow machine shows


def told(patch: Patch, captured: Captured, *words: str) -> str:
    """The error line of a command; click's own errors begin with the usage."""
    patch.setattr(sys, "argv", ["embroute", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = captured.readouterr()
    assert ended.value.code == 2, said
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if not STATUS.match(line)]
    assert len(lines) == 1 or lines[0].startswith("Usage: "), said.err
    return lines[-1]


SIMULATE = "simulate --csv steps.csv --steps 3 --warmup 1 --network edge-2 --policy vanilla"
COMPARE = "compare --steps 3 --warmup 1 --network edge-2 --policies vanilla"
COMMANDS = [
    (f"{SIMULATE} --batch 100000000000", "--batch must be a "),
    (f"{SIMULATE} --steps {HUGE}", "--steps must be a whole number of at most "),
    (f"{SIMULATE} --epochs {HUGE}", "--epochs must be a "),
    (f"{SIMULATE} --workers {HUGE}", "--workers must be a whole number of at most "),
    (f"{SIMULATE} --seed {HUGE}", "--seed must be a whole number of at most "),
    (f"{SIMULATE} --compute-ms-per-sample nan", "--compute-ms-per-sample must be a "),
    (f"{SIMULATE} --compute-ms-per-sample inf", "--compute-ms-per-sample must be a "),
    (f"{SIMULATE} --dim {HUGE}", "a width must be a whole number from 1 to 1000000"),
    (f"{SIMULATE} --dim ²", "--dim '²': a width must be a whole number from 1"),
    (f"{SIMULATE} --dim 8,Country={HUGE}", "a width must be a whole number from 1 to 1000000"),
    (f"{SIMULATE} --cache 1e30GB", "--cache must be between 0 and 1e+15, got 1e30"),
    (f"{SIMULATE} --network edge-{HUGE}", "workers must be between 1 and 1024, got 12089"),
    (f"{SIMULATE} --data ''", "--data must be a name or a path, got ''"),
    (f"{SIMULATE} --data nowhere.csv", "--data nowhere.csv: no such file or directory"),
    (f"{SIMULATE} --data {'a' * 5000}", "--data aaaa"),
    (f"{SIMULATE} --data ~nobody-at-all/x", "--data ~nobody-at-all/x: "),
    (f"{SIMULATE} --data 'x\ny'", "--data x\\ny: no such file or directory"),
    (f"{SIMULATE} --data 'online-retail(seed={HUGE})'", f"seed must be between 0 and {2**63 - 1}"),
    (f"{SIMULATE} --data 'online-retail(seed=nan)'", "--data online-retail(seed=nan): seed must"),
    (f"{SIMULATE} --data 'avazu(seed={HUGE})'", f"got {HUGE}"),
    (
        f"{SIMULATE} --label click",
        "--label: online-retail(negatives=1) is built-in data: of the data options",
    ),
    (f"{SIMULATE} --label ''", "--label must be a text that is not empty, got ''"),
    (f"{SIMULATE} --categorical a,,b", "--categorical 'a,,b' has an empty name"),
    (f"{SIMULATE} --positive-rating nan", "--positive-rating must be a number of at least"),
    (f"{SIMULATE} --limit {HUGE}", "--limit must be a whole number of at most 1000000000000000"),
    (f"{SIMULATE} --csv {'a' * 5000}", "--csv 'aaa"),
    (f"{SIMULATE} --csv ''", "--csv .: this is a folder, give a file in it"),
    (f"{SIMULATE} --csv /dev/null/x", "--csv '/dev/null/x': Not a directory"),
    (f"{SIMULATE} --policy 'fae(seed={HUGE})'", f"fae: seed must be between 0 and {LARGEST_SEED}"),
    (f"{SIMULATE} --policy '{'esd(' * 400}1{')' * 400}'", "parentheses deeper than 20 in 'esd("),
    (f"{SIMULATE} --policy '{'unbounded(' * 30}esd{')' * 30}'", "parentheses deeper than 20"),
    (f"{SIMULATE} --policy {'a' * 100_000}", "--policy 'aaa"),
    (f"{SIMULATE} --policy 'vanilla(workers=²)'", "numbers below 2 such as 0+1+2, got '²'"),
    (f"{COMPARE} --policies '(((('", "--policies: unbalanced parentheses in '(((('"),
    (f"{COMPARE} --quotas 1,,1", "--quotas must be a number, got ''"),
    ("advise --workers 1..100000000000", "--workers 1..100000000000: between 1 and 8, the"),
    ("advise --workers 5..2", "--workers 5..2: the second number must not be smaller"),
    ("advise --batch 100000000000", "--batch must be between 1 and 10000000, got 100000000000"),
    ("advise --compute-ms-per-sample nan", "--compute-ms-per-sample must be a "),
    ("advise --dim 100000000000", "--dim '100000000000': a width must be a whole number"),
    ("data describe online-retail --json /tmp", "--json /tmp: this is a folder"),
    ("data describe online-retail --batch 0", "'--batch': 0 is not in the range 1<=x<=10000000"),
    (f"train --workers {HUGE}", "--workers must be a whole number of at most 1024, got 12089"),
    (f"train --shards {HUGE}", "--shards must be a whole number of at most 1024, got 120892"),
    (f"train --seed {HUGE}", f"--seed must be a whole number of at most {LARGEST_SEED}, got 12"),
    ("train --seed -1", "--seed must be a whole number of at least 0, got -1"),
    ("train --batch 100000000000", "--batch must be a whole number of at most 10000000, got 100"),
    (f"train --keep {HUGE}", "--keep must be a whole number of at most 2147483647, got 1208"),
    (f"train --dim {HUGE}", f"--dim '{HUGE}': a width must be a whole number from 1 to 1000000"),
    (f"train --hidden 8,{HUGE}", "a width must be a whole number from 1 to 1000000"),
    ("train --peer-timeout 1e300", "--peer-timeout must be a number of at most 1000000, got 1e+"),
    ("train --tables nowhere", "--tables must be a file, got 'nowhere'"),
    ("train --out ''", "--out must be a path, got ''"),
    ("train --device meta", "--device meta: torch cannot use it here: it holds no numbers"),
    ("train /dev/null", "/dev/null: expected keys and values, got None"),
    ("train /dev/zero", "/dev/zero: not YAML: longer than 1000000 characters"),
]


TEN_MILLION = (f"{SIMULATE} --cache 10% --batch 10000000", "use a larger cache or a smaller batch")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *(pytest.param(*case, id=f"{i}-{case[0][:60]}") for i, case in enumerate(COMMANDS)),
        pytest.param(*TEN_MILLION, id="ten million samples", marks=pytest.mark.full),
    ],
)
def test_bad_option_is_named_in_one_line(
    command: str, message: str, monkeypatch: Patch, capsys: Captured, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    line = told(monkeypatch, capsys, *shlex.split(command))
    assert message in line
    assert len(line) <= MAX_MESSAGE + 100 or line.startswith("Error: ")


def test_full_disk_error_names_the_option(monkeypatch: Patch, capsys: Captured) -> None:
    words = f"{SIMULATE} --csv /dev/full".split()
    monkeypatch.setattr(sys, "argv", ["embroute", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "embroute: --csv /dev/full: No space left on device\n" in capsys.readouterr().err


def test_large_seeds_are_read_exactly() -> None:
    for seed in (0, 2**53 + 1, LARGEST_SEED):
        assert parse_int("seed", str(seed), 0, LARGEST_SEED) == seed
        assert RunConfig(seed=seed).seed == seed
        make_policy(f"fae(seed={seed}, shuffle=yes)")
        source = open_source(f"avazu(samples=10, seed={seed})")
        assert sum(len(chunk) for chunk in source.chunks()) == 10


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
# What data_options hold, and what is said of it.
DATA_OPTIONS = [
    ("limit: many", "limit must be a whole number of at least 1, got 'many'"),
    ("limit: 1.5", "limit must be a whole number of at least 1, got 1.5"),
    ("limit: true", "limit must be a whole number of at least 1, got True"),
    ("hash_rows: many", "hash_rows must be a whole number of at least 1, got 'many'"),
    ("format: [a]", "format must be one of criteo, avazu, movielens, table, got ['a']"),
    ("label: [a]", "label must be a text that is not empty, got ['a']"),
    ("time: {a: 1}", "time must be a text that is not empty, got {'a': 1}"),
    ("categorical: 3", "categorical must be names of columns, got 3"),
    ("dense: [[1]]", "dense must be names of columns, got [[1]]"),
    ("bag: null", "bag must be names of columns, got None"),
    ("bag_separator: null", "bag_separator must be a text that is not empty, got None"),
    ("ids: 3", "ids must be one of vocab, hash, got 3"),
    ("missing: null", "missing must be one of id, padding, got None"),
    ("positive_rating: good", "positive_rating must be a number of at least -1e+30, got 'good'"),
    ("skip_bad_rows: 1", "skip_bad_rows must be True or False, got 1"),
    ("1: 2", "no option '1' (there are format, label,"),
]
RUN_FILES = [
    (f"data_options: {{{text}}}\n", f"data_options: {said}") for text, said in DATA_OPTIONS
]
RUN_FILES += [
    ("data_options: [a]", "data_options must be a mapping, got ['a']"),
    (f"{BOMB}batch: *j\n", "no key 'a' (there are "),
    (f"batch: {BOMB[3:]}", "no key 'b' (there are "),
    (MERGES, "not YAML: more than 10000 keys"),
    (f"data: {'[' * 1500}", "not YAML: nested too deep"),
    (f"batch: {'9' * 5000}", "line 1: not YAML: '999"),
    (f"batch: {'9' * 500}", "batch must be a whole number of at most 10000000, got 99"),
    (f"held_out: {'9' * 500}", "held_out must be a number of at least 0, got 99"),
    ("out: 2020-99-99", "line 1: not YAML: '2020-99-99' is no timestamp"),
    ("out: !!timestamp x", "line 1: not YAML: 'x' is no timestamp"),
    ('out: "a\\0b"', "out must be a path, got 'a\\x00b'"),
    ('network: "a\\0b.yaml"', "network 'a\\x00b.yaml': neither a preset"),
    ("batch: 1\nbatch: 2\n", "line 2: not YAML: 'batch' is given twice"),
    ("nodes: {a: 3}", "nodes 'a' must be a list of ranks, got 3"),
]


@pytest.mark.parametrize(
    ("text", "message"), RUN_FILES, ids=[f"{i}-{t[:30]}" for i, (t, _) in enumerate(RUN_FILES)]
)
def test_bad_run_file_error_names_file_and_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.yaml") as caught:
        open_run(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < MAX_MESSAGE


def test_run_file_columns_may_be_text_or_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data_options: {label: 0, categorical: 'user,item', dense: [1, x]}\n")
    options = DataOptions(label="0", categorical=("user", "item"), dense=("1", "x"))
    assert read_run_file(path).data_options == options


@pytest.mark.parametrize(
    ("link", "worker", "message"),
    [
        (f"link: {'9' * 400}gbit", "a", "up must be between 0.001 and 1e+15 bytes a second"),
        ("link: 1gbit, latency: 9999s", "a", "latency must be between 0 and 3600 seconds, got"),
        (
            "link: 1gbit",
            f"{{host: a, slowness: {'9' * 400}}}",
            "slowness must be between 1e-06 and 1e+06",
        ),
        ("link: 1gbit", "a, " * 2000, "workers: expected a list of 1 to 1024 entries, got 2000"),
    ],
)
def test_impossible_network_is_refused(
    link: str, worker: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(f"hosts: {{a: {{{link}}}}}\nworkers: [{worker}]\nshards: [a]\n")
    with pytest.raises(ValueError, match=r"net\.yaml: ") as caught:
        read_cluster(path)
    assert message in str(caught.value)


ROWS = "y,a,x\n1,u,2\n0,v,3\n"
MAC = "a carriage return within 'y,a,x\\r1,u,2\\r0,v,3\\r'; lines must end in LF or CR LF"
FILES = [
    (ROWS.replace("\n", "\r").encode(), f"line 1: {MAC}"),
    (ROWS.replace("\n", "\r", 1).encode(), "line 1: a carriage return within 'y,a,x\\r1,u,2'"),
    (ROWS.encode("utf-16"), "is not UTF-8 text (UTF-16, perhaps)"),
    (ROWS.encode("utf-16-le"), "is not UTF-8 text (UTF-16, perhaps)"),
    (b"\0" * 1000, "is not UTF-8 text"),
    (b'y,"a,x\n1,u,2\n', "line 1: 'y,\"a,x': unexpected end of data"),
    (b'y,a,x\n1,u"w\rz,2\n', "line 2: a carriage return within '1,u\"w\\rz,2'"),
    (b"y,a,a\n1,u,2\n", "the header names column 'a' twice"),
    (b"y,b,x\n" + b"1,2,3\n", "--categorical: "),
    (gzip.compress(ROWS.encode(), mtime=0)[:20], "the gzip file is truncated"),
]


@pytest.mark.parametrize(("data", "message"), FILES)
def test_bad_data_file_error_names_file_and_line(data: bytes, message: str, tmp_path: Path) -> None:
    path = table_file(tmp_path, data)
    with pytest.raises(ValueError, match=r"clicks\.csv") as caught:
        list(open_source(path, DataOptions(label="y", categorical=("a",))).chunks())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_lists_only_some_of_many_columns(tmp_path: Path) -> None:
    header = ",".join(f"column{i}" for i in range(20_000))
    with pytest.raises(ValueError, match=r"has no column 'y'.* and 19950 more") as caught:
        open_source(table_file(tmp_path, f"{header}\n"), DataOptions(label="y"))
    assert len(str(caught.value)) < MAX_MESSAGE
