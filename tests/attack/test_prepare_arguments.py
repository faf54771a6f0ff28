"""Wrong arguments of `prepare`: one line names the argument, on the rank that finds it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from embroute.config.cluster import Cluster, uniform_cluster
from embroute.config.spec import LARGEST_SEED, shown
from embroute.launch.in_process import run_in_process
from embroute.launch.rank import RankContext
from embroute.nn.prepare import prepare
from embroute.nn.prepared import Prepared
from embroute.nn.settings import check_settings
from tests.user_models import STREAM, Batch, Model, adagrad, lookups, train

HUGE, NAN, INF = 2**80, math.nan, math.inf
WHOLE, NUMBER = "a whole number of at least", "a number of at least"


def job(
    settings: dict[str, Any],
    model: Callable[[], Any] = lambda: Model().double(),
    optimizer: Callable[[Any], Any] = adagrad,
    loader: object = STREAM,
    at_end: Callable[[Prepared], object] = lambda ready: None,
) -> None:
    """Run a job of two workers in this process; an error of any rank ends all ranks."""
    given = {"policy": "esd(1)", "cache": 1.0, "min_rows": 100, "lookups": lookups} | settings

    def main(rank: RankContext) -> None:
        own = model()
        used = optimizer(own)
        ready = prepare(own, used, loader, rank, **given)  # type: ignore[arg-type]
        train(own, used, ready.loader, ready.backward, [])
        at_end(ready)

    run_in_process(2, 1, main)


SETTINGS: list[tuple[str, object, str]] = [
    ("policy", None, "policy= must be a policy, its name or its function, got None"),
    ("policy", b"esd", "policy= must be a policy, its name or its function, got b'esd'"),
    ("policy", "zzz", "policy='zzz': no policy 'zzz' (there are nocache,"),
    ("policy", "((((", "policy='((((': unbalanced parentheses"),
    ("policy", "esd(alpha=1, alpha=1)", "option 'alpha' is given twice"),
    ("policy", f"fae(seed={HUGE})", f"fae: seed must be between 0 and {LARGEST_SEED}"),
    ("compare_with", "zzz", "compare_with='zzz': no policy 'zzz'"),
    ("compare_with", 3, "compare_with= must be a policy, its name or its function, got 3"),
    ("cache", True, "cache= must look like 'auto', 0.1, '10%' or '256MB', got True"),
    ("cache", None, "cache= must look like"),
    ("cache", NAN, "cache= must look like 0.1, 10%, 5000rows or 256MB, got 'nan'"),
    ("cache", "1e30GB", "cache= must be between 0 and 1e+15, got 1e30"),
    ("network", 3, "network= must be a Cluster, a preset or a YAML file, got 3"),
    ("shards", 1.5, f"shards= must be {WHOLE} 1, got 1.5"),
    ("shards", HUGE, f"shards= must be a whole number of at most 1024, got {HUGE}"),
    ("nodes", ["a"], "nodes= must be a mapping of nodes to lists of ranks, got ['a']"),
    ("nodes", {"a": "coordinator"}, "nodes='a' must be a list of ranks, got 'coordinator'"),
    ("nodes", {"a": [1]}, "nodes='a' must be a list of ranks, got [1]"),
    ("node", 3, "node= must be a text, got 3"),
    ("peer_timeout", NAN, f"peer_timeout= must be {NUMBER} 1, got nan"),
    ("peer_timeout", 1e300, "peer_timeout= must be a number of at most 1000000, got 1e+300"),
    ("peer_timeout", True, f"peer_timeout= must be {NUMBER} 1, got True"),
    ("own_process", 1, "own_process= must be True or False, got 1"),
    ("lookups", None, "lookups= must be a function of a batch, got None"),
    ("lookups", {"user": 3}, "lookups= must be a function of a batch, got {'user': 3}"),
    ("min_rows", "many", f"min_rows= must be {WHOLE} 1, got 'many'"),
    ("epochs", True, f"epochs= must be {WHOLE} 1, got True"),
    ("epochs", torch.tensor(3), f"epochs= must be {WHOLE} 1, got tensor(3)"),
    ("steps", HUGE, "steps= must be a whole number of at most 2147483647"),
    ("quotas", 3, "quotas= must be a list of numbers, one a worker, got 3"),
    ("quotas", "1;1", "quotas= must be a number, got '1;1'"),
    ("quotas", (0, 0), "quotas= must have a share above 0, got (0, 0)"),
    ("quotas", (1, NAN), f"quotas=(1, nan): a share must be {NUMBER} 0, got nan"),
    ("quotas", (1, -1), f"quotas=(1, -1): a share must be {NUMBER} 0, got -1"),
    ("quotas", (1, INF), "quotas=(1, inf): a share must be a number of at most 1000000000"),
    ("quotas", ("1", "1"), f"quotas=('1', '1'): a share must be {NUMBER} 0, got '1'"),
    ("compute_ms_per_sample", INF, "must be a number of at most 1000000000, got inf"),
    ("held_out", 3, "held_out= must be batches to iterate over, got 3"),
    ("decay", "0.1", f"decay= must be {NUMBER} 0, got '0.1'"),
    ("seed", "abc", f"seed= must be {WHOLE} 0, got 'abc'"),
    ("seed", -1, f"seed= must be {WHOLE} 0, got -1"),
    ("seed", NAN, f"seed= must be {WHOLE} 0, got nan"),
    ("seed", HUGE, f"seed= must be a whole number of at most {LARGEST_SEED}, got {HUGE}"),
    ("device", None, "device= must be a device of torch, got None"),
    ("checkpoint", None, "checkpoint= must be a path, got None"),
    ("checkpoint", "", "checkpoint= must be a path, got ''"),
    ("checkpoint", "a\0b", "checkpoint= must be a path, got 'a\\x00b'"),
    ("checkpoint", "/dev/null", "checkpoint='/dev/null': /dev/null is no folder"),
    ("checkpoint", "/dev/null/x", "checkpoint='/dev/null/x': /dev/null is no folder"),
    ("checkpoint", "/tmp/" + "a" * 5000, "File name too long"),
    ("keep", 0, f"keep= must be {WHOLE} 1, got 0"),
    ("resume", "yes", "resume= must be True or False, got 'yes'"),
    ("tables", 3, "tables= must be a path, got 3"),
    ("extras", [3], "extras= must be a mapping of names to objects with state_dict(), got [3]"),
    ("extras", {"a": 3}, "extras='a' must be an object with state_dict(), got 3"),
    ("extras", {3: nn.Linear(1, 1)}, "extras= must have texts as names, got 3"),
    ("stop", 3, "stop= must be a threading.Event, got 3"),
    ("debug", 3, "debug= must be one of steps, versions, got 3"),
    ("debug", np.array([1, 2]), "debug= must be one of steps, versions, got array([1, 2])"),
    ("cache", 10**5000, "cache= must be a whole number of at most 1000000000000000, got a huge"),
    ("cache", -1, f"cache= must be {WHOLE} 0, got -1"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), SETTINGS, ids=[f"{n}={shown(v):.30}" for n, v, _ in SETTINGS]
)
def test_bad_setting_is_refused_before_the_job(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        check_settings({name: value})  # type: ignore[misc]
    assert "\n" not in str(caught.value)


def test_every_setting_is_checked() -> None:
    """A plain object suits no setting, so a new setting must come with a check."""
    from embroute.nn.settings import Settings

    for name in Settings.__annotations__:
        with pytest.raises(ValueError, match=f"{name}="):
            check_settings({name: object()})  # type: ignore[misc]


def test_settings_accept_numpy_numbers_and_torch_devices() -> None:
    job({"seed": np.int64(3), "device": torch.device("cpu"), "decay": np.float32(0.5)})
    job({"seed": LARGEST_SEED, "quotas": [1, 2], "decay": 2})


JOBS: list[tuple[dict[str, Any], str]] = [
    ({"network": uniform_cluster(3, 1)}, "network= has 3 workers and 1 shards, the job 2 and 1"),
    ({"network": Cluster((), (), ())}, "network= has 0 workers and 0 shards, the job 2 and 1"),
    ({"network": "edge-3"}, "network= has 3 workers"),
    ({"quotas": (1, 2, 3)}, "--quotas needs 2 numbers of at least 0, got (1, 2, 3)"),
    ({"device": "meta"}, "device= meta: torch cannot use it here: it holds no numbers"),
    ({"tables": "/nowhere"}, "tables= must be a file, got '/nowhere'"),
    ({"tables": "/tmp"}, "tables= must be a file, got '/tmp'"),
    ({"cache": 1e-9}, "--cache 1e-09: worker 0 needs"),
    ({"lookups": lambda batch: None}, "lookups= must return a dict with the routed layers user"),
    ({"lookups": lambda batch: "user"}, "lookups= must return a dict with the routed layers"),
    ({"lookups": lambda batch: {3: batch["user"]}}, "layers user, tags, got [3]"),
    ({"lookups": lambda batch: lookups(batch) | {"user": []}}, "lookups: user: expected a tensor"),
    ({"held_out": [{"user": STREAM[0]["user"]}]}, "has another nest of tensors than the first"),
    ({"held_out": [3]}, "a batch of loader or held_out may hold tensors in dicts"),
]


@pytest.mark.parametrize(("settings", "message"), JOBS)
def test_setting_that_does_not_fit_the_job_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        job(settings)


class Changing:
    """A lookup function that returns other ids from the sixth batch on."""

    def __init__(self, later: Callable[[Batch], object]) -> None:
        self.calls, self.later = 0, later

    def __call__(self, batch: Batch) -> dict[str, object]:
        self.calls += 1
        return lookups(batch) | ({"user": self.later(batch)} if self.calls > 5 else {})


@pytest.mark.parametrize("later", [lambda b: [b["user"], b["user"]], lambda b: b["friend"]])
def test_lookups_that_change_are_refused(later: Callable[[Batch], object]) -> None:
    with pytest.raises(ValueError, match="lookups= must return the same look-ups for every batch"):
        job({"lookups": Changing(later)})


@pytest.mark.parametrize("model", ["no", 3, None, Model])
def test_object_that_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got "):
        job({}, lambda: model, lambda _: [])


@pytest.mark.parametrize(
    "optimizer", [3, None, [], [None], "adam", torch.optim.Adam, {"a": 1}, iter([])]
)
def test_object_that_is_no_optimizer_is_refused(optimizer: object) -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer or a list"):
        job({}, optimizer=lambda _: optimizer)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda model: adagrad(Model()),
            "2 of 2 tables of the model are in no optimizer",
        ),
        (lambda model: adagrad(model) * 2, "optimizer: the list of 2 has an optimizer twice"),
        (lambda model: adagrad(model) + adagrad(model), "optimizer: a table is in two"),
        (lambda model: [torch.optim.SGD(model.parameters(), NAN)], "SGD(lr=nan): lr must be at"),
        (lambda model: [torch.optim.SGD(model.parameters(), INF)], "SGD(lr=inf): lr must be at"),
    ],
)
def test_optimizer_that_does_not_fit_the_model_is_refused(
    optimizer: Callable[[nn.Module], object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        job({}, optimizer=optimizer)


@pytest.mark.parametrize("loader", [3, None, object(), "abc", {"a": 1}, list, lambda: STREAM])
def test_loader_without_batches_is_refused(loader: object) -> None:
    with pytest.raises(TypeError, match="loader must give batches when iterated over"):
        job({}, loader=loader)


@pytest.mark.parametrize("loader", [[], iter([])])
def test_empty_loader_is_refused(loader: object) -> None:
    with pytest.raises(ValueError, match="the loader is empty: it gave no batch at all"):
        job({}, loader=loader)


def test_loader_of_one_batch_trains() -> None:
    job({}, loader=STREAM[:1])


def raises_in_the_middle() -> Iterator[Batch]:
    yield from STREAM[:2]
    raise OSError(5, "Input/output error", "clicks.csv")


def test_loader_error_ends_every_rank() -> None:
    with pytest.raises(OSError, match=r"clicks\.csv"):
        job({}, loader=raises_in_the_middle())


def itself() -> Batch:
    batch = dict(STREAM[0])
    batch["self"] = batch  # type: ignore[assignment]
    return batch


def quantized(batch: Batch) -> torch.Tensor:
    return torch.quantize_per_tensor(batch["label"].float(), 0.1, 0, torch.qint8)


LATER: list[tuple[Callable[[Batch], object], str]] = [
    (lambda b: None, "may hold tensors in dicts, lists, tuples and namedtuples, got NoneType"),
    (lambda b: list(b.values()), "has another nest of tensors than the first one had: {'list'"),
    (lambda b: b | {3: b["label"]}, "has a dict with key 3; names of tensors must be text"),
    (lambda b: itself(), "is nested too deep, or in itself"),
    (lambda b: b | {"label": b["label"].to_sparse()}, "sparse, quantized or on the meta device"),
    (lambda b: b | {"label": quantized(b)}, "(16,) that is sparse, quantized or on the meta"),
    (lambda b: b | {"label": b["label"].to("meta")}, "sparse, quantized or on the meta device"),
    (lambda b: b | {"user": b["user"] * 1j}, "user: expected a tensor of whole numbers"),
    (lambda b: b | {"user": b["user"] * NAN}, "got torch.float32 of shape (16,)"),
    (lambda b: b | {"user": -b["user"] - 1}, "lookups: user: id -"),
    (lambda b: b | {"user": b["user"] + HUGE // 2**40}, "is not between 0 and 199"),
    (lambda b: b | {"user": b["user"][0]}, "got torch.int64 of shape ()"),
    (lambda b: b | {"label": b["label"].sum()}, "held_out has shape () and type torch.float64"),
    (lambda b: {k: v[:0] for k, v in b.items()}, "a batch of loader or held_out has no samples"),
]


CASES = [(3, *case) for case in LATER] + [(0, *case) for case in LATER[2:]]


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize(("at", "change", "message"), CASES)
def test_batch_that_cannot_be_sent_is_refused(
    at: int, change: Callable[[Batch], object], message: str
) -> None:
    stream = [*STREAM[:at], change(STREAM[at]), *STREAM[at + 1 :]]
    with pytest.raises(ValueError, match=re.escape(message)):
        job({}, loader=stream)


def test_held_out_call_without_data_raises() -> None:
    with pytest.raises(RuntimeError, match="called where no evaluation was due"):
        job({}, at_end=lambda ready: list(ready.held_out()))


def test_checkpoint_path_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"checkpoint=.*run.*is no folder"):
        job({"checkpoint": path})
    assert path.read_text() == "mine"
