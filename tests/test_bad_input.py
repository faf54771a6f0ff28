"""Mistakes and accidents of a run: a clear message, the right exit code, no harm to saved data.

Jobs run in one process, except for jobs that need a launcher or a disk (slow).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from embroute.checkpoint.folders import latest_checkpoint
from embroute.checkpoint.manifest import read_manifest, verify
from embroute.cli.main import main
from embroute.config.cluster import uniform_cluster
from embroute.config.run_file import keep_run_file, read_run_file, write_run_file
from embroute.config.run_options import RunConfig
from embroute.launch.in_process import InProcessChannel, run_in_process
from embroute.nn.settings import Settings
from embroute.train.run_ranks import check_run, network_of
from tests.jobs import Batch, Result, batches, gathered, plain_cached, settings_of, train
from tests.sizes import marked_full

ROOT = Path(__file__).parent.parent
STEPS, EVERY = 60, 20
FILES = ["shard0", "dense", "planner", "worker1"]
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("policy", "nonsense", "--policy 'nonsense': no policy 'nonsense' (there are nocache,"),
        ("policy", "dispatch=esd sync=hett(10)", "--policy 'dispatch=esd sync=hett(10)': "),
        ("data", "nowhere.csv", "--data nowhere.csv: no such file or directory, and no built-in"),
        ("data", "avazu(skew=x)", "skew must be a number, got 'x'"),
        ("label", "click", "is built-in data: of the data options it takes only --limit"),
        ("device", "abacus", "--device abacus: torch cannot use it here: "),
        ("seed", "1", "--out /dev/null/no: Not a directory"),
        ("policy", "esd(1, workers=fast)", "leave a worker out by a share of 0, e.g. --quotas"),
        ("policy", "dispatch=esd workers=0+1", "workers=0+1 is for compare and simulate"),
        ("model", "lstm", "--model must be one of wide-deep, deepfm,"),
        ("optimizer", "lion", "--optimizer must be one of sgd, adagrad,"),
        ("dense-optimizer", "lion", "--dense-optimizer must be one of adam,"),
        ("dim", "0", "--dim '0': a width must be a whole number from 1"),
        ("dim", "8,C1=0", "--dim '8,C1=0': a width must be"),
        ("hidden", "8,x", "--hidden '8,x': a width must be a whole number from 1"),
        ("quotas", "1,1", "--quotas needs 4 shares, one a worker, got '1,1'"),
        ("quotas", "0,0,0,0", "--quotas must have a share above 0, got '0,0,0,0'"),
        ("cache", "much", "--cache"),
        ("cache", "10%+5%", "--cache names 2 sizes for 4 workers: give one size for all, or one"),
        ("cache", "10%+auto+5%+5%", "--cache must look like 0.1, 10%, 5000rows or 256MB, got"),
        ("decay", "-0.1", "--decay must be a number of at least 0, got -0.1"),
        ("clip", "nan", "--clip must be a number of at least 0, got nan"),
        ("lr", "0", "--lr must be a number above 0, got 0"),
        ("lr", "inf", "--lr must be a number above 0, got inf"),
        ("held-out", "1", "--held-out must be a number below 1, got 1"),
        ("peer-timeout", "0.5", "--peer-timeout must be a number of at least 1, got 0.5"),
        ("batch", "0", "--batch must be a whole number of at least 1, got 0"),
        ("batch", "many", "--batch must be a whole number of at least 1, got 'many'"),
        ("workers", "0", "--workers must be a whole number of at least 1, got 0"),
        ("network", "edge-8 --workers 4", "--workers 4: --network edge-8 has 8 workers; use"),
    ],
)
def test_bad_train_option_is_refused_before_ranks_start(
    option: str, value: str, message: str, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rank starts: the message appears once, not once per rank."""
    given = value.split(" ") if " --" in value else [value]
    words = ["embroute", "train", f"--{option}", *given, "--out", "/dev/null/no"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert said.startswith("embroute: ")
    assert message in said
    assert said.count("\n") == 1


def test_train_refuses_the_folder_of_another_run(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "step-00000040").mkdir(parents=True)
    write_run_file(RunConfig(steps=40, out=str(tmp_path)), tmp_path / "run.yaml")
    before = (tmp_path / "run.yaml").read_text()
    words = ["embroute", "train", "--steps", "9", "--held-out", "0.5", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"embroute: --out {tmp_path}: ")
    assert "holds step-00000040, later than step 0" in said
    assert "--resume goes on from it" in said
    assert (tmp_path / "run.yaml").read_text() == before


def test_run_file_copy_keeps_an_equal_copy_unchanged(tmp_path: Path) -> None:
    run, path = RunConfig(steps=40, out=str(tmp_path)), tmp_path / "run.yaml"
    keep_run_file(run, tmp_path)
    assert read_run_file(path) == run
    commented = "# mine\n" + path.read_text()
    path.write_text(commented)
    keep_run_file(run.replace(resume=True), tmp_path)
    assert path.read_text() == commented
    keep_run_file(run.replace(steps=50), tmp_path)
    assert read_run_file(path).steps == 50
    keep_run_file(run.replace(steps=60, resume=True), tmp_path)  # which the next run has to ask for
    assert (read_run_file(path).steps, read_run_file(path).resume) == (60, False)


def test_run_file_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("polcy: vanilla\n")
    with pytest.raises(ValueError, match=r"run.yaml: no key 'polcy'; did you mean policy\?"):
        read_run_file(path)
    path.write_text("dim: 0\n")
    with pytest.raises(ValueError, match=r"run.yaml: dim '0': a width must be"):
        read_run_file(path)


class Broken(list[Batch]):
    """A loader that raises before a batch, the first time it is read."""

    def __init__(self, stream: Sequence[Batch], last: int) -> None:
        super().__init__(stream)
        self.last = last

    def __iter__(self) -> Iterator[Batch]:
        last, self.last = self.last, len(self)
        yield from self[:last]
        if last < len(self):
            raise OSError(5, "Input/output error", "clicks.csv")


def saving(folder: Path, policy: str = "esd(1)") -> Settings:
    settings = settings_of(policy, 2)
    settings.update({"checkpoint": folder, "checkpoint_every": EVERY, "resume": True})
    return settings


def run(
    settings: Settings, stream: Sequence[Batch], optimizer: str = "adagrad"
) -> dict[str, Result]:
    return run_in_process(2, 1, lambda rank: train(rank, stream, optimizer, settings))


def break_off(settings: Settings, stream: Sequence[Batch] | None = None) -> None:
    """Let the loader of a run fail before step 47."""
    with pytest.raises(OSError, match="clicks"):
        run(settings, Broken(stream or batches(2, STEPS), 47))


def assert_goes_on(settings: Settings, folder: Path, step: int) -> None:
    """Assert that the checkpoint before the accident is whole and leads to the end of the run."""
    last = latest_checkpoint(folder)
    assert last is not None
    assert last.name == f"step-{step:08d}"
    verify(last, read_manifest(last).files)
    results = run(settings, batches(2, STEPS))
    assert len(results["worker0"].losses) == STEPS - step
    gathered(results, 2, 1).assert_equal(plain_cached("adagrad", 2, STEPS))


def test_resume_after_a_loader_error_is_exact(tmp_path: Path) -> None:
    settings = saving(tmp_path)
    break_off(settings)
    assert_goes_on(settings, tmp_path, 40)


def assert_refused_once(settings: Settings, stream: Sequence[Batch], message: str) -> None:
    """Assert that a batch is refused, and that a run without it goes on from the checkpoint."""
    with pytest.raises(ValueError, match=message):
        run(settings, stream)
    assert_goes_on(settings, Path(settings["checkpoint"]), 40)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_loss_is_refused_and_resume_is_exact(value: float, tmp_path: Path) -> None:
    settings, stream = saving(tmp_path), batches(2, STEPS)
    ages = stream[47]["age"].clone()
    ages[3] = value
    stream[47] = {**stream[47], "age": ages}
    message = r"step 47: (the loss is nan|the gradients are not finite); lower the learning rate"
    assert_refused_once(settings, stream, message)


def test_too_small_cache_is_refused_and_resume_is_exact(tmp_path: Path) -> None:
    """The batch that does not fit comes late; the checkpoint before it stays."""
    settings, stream = saving(tmp_path, "vanilla"), batches(2, STEPS)
    stream[47] = {**stream[47], "tags": torch.arange(len(stream[47]["tags"])) % 25}
    needed = r"--cache 0.8: worker 1 needs 2\d rows of width 8 in step 47, its cache holds 20"
    assert_refused_once(settings, stream, needed)


def test_default_cache_holds_every_step_and_resume_is_exact(tmp_path: Path) -> None:
    """The stream that a cache of 0.8 is too small for, and fields of known and unknown length."""
    settings, stream = saving(tmp_path, "vanilla"), batches(2, STEPS)
    del settings["cache"]
    stream[47] = {**stream[47], "tags": torch.arange(len(stream[47]["tags"])) % 25}
    whole = run({**settings, "checkpoint": tmp_path / "whole"}, stream)
    break_off(settings, stream)
    resumed = run({**settings, "resume": True}, stream)
    assert resumed["worker0"].losses == whole["worker0"].losses[40:]


def test_resume_with_another_cache_size_is_exact(tmp_path: Path) -> None:
    settings = saving(tmp_path)
    break_off(settings)
    settings["cache"] = 1.0
    assert_goes_on(settings, tmp_path, 40)


def test_resume_with_unequal_caches_is_exact(tmp_path: Path) -> None:
    """With the same caches the losses are equal too; exchanged caches are other caches."""
    settings, stream = saving(tmp_path / "same") | {"cache": "80%+1"}, batches(2, STEPS)
    whole = run({**settings, "checkpoint": tmp_path / "whole"}, stream)
    break_off(settings)
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    resumed = run(settings, stream)
    assert resumed["worker0"].losses == whole["worker0"].losses[40:]
    settings |= {"cache": "1+80%", "checkpoint": tmp_path / "other"}
    assert_goes_on(settings, tmp_path / "other", 40)


@pytest.mark.parametrize("policy", ["het(4)", "esd(1)"])
def test_resume_with_another_cache_size_trains_the_remaining_steps(
    policy: str, tmp_path: Path
) -> None:
    settings = saving(tmp_path, policy)
    break_off(settings)
    settings["cache"] = 1.0
    assert len(run(settings, batches(2, STEPS))["worker1"].losses) == STEPS - 40


@pytest.mark.parametrize("name", marked_full(FILES, ["shard0"]))
def test_resume_refuses_a_truncated_checkpoint_and_keeps_it(name: str, tmp_path: Path) -> None:
    settings = saving(tmp_path)
    break_off(settings)
    file = tmp_path / "step-00000040" / f"{name}.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    way_out = "; move step-00000040 away to go on from step-00000020"
    with pytest.raises(ValueError, match=rf"step-00000040.*{name}.safetensors.*{way_out}"):
        run(settings, batches(2, STEPS))
    file.write_bytes(whole)
    assert_goes_on(settings, tmp_path, 40)


@pytest.mark.parametrize("name", marked_full(FILES, ["planner"]))
def test_resume_refuses_a_checkpoint_with_a_flipped_bit(name: str, tmp_path: Path) -> None:
    settings = saving(tmp_path)
    break_off(settings)
    file = tmp_path / "step-00000040" / f"{name}.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-9] ^= 4
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=rf"{name}.safetensors is damaged: .* go on from step-"):
        run(settings, batches(2, STEPS))
    whole[-9] ^= 4
    file.write_bytes(whole)
    assert_goes_on(settings, tmp_path, 40)


def test_prepare_refuses_bad_settings(tmp_path: Path) -> None:
    stream = batches(2, 3)
    for name, value, message in (
        ("polcy", "vanilla", "no setting of prepare 'polcy'; did you mean policy?"),
        ("policy", "esd(1, workers=fast)", "workers=fast is for compare and simulate"),
        ("decay", -1.0, "decay= must be a number of at least 0, got -1.0"),
        ("decay", float("nan"), "decay= must be a number of at least 0, got nan"),
        ("epochs", 0, "epochs= must be a whole number of at least 1, got 0"),
        ("epochs", 1.5, "epochs= must be a whole number of at least 1, got 1.5"),
        ("steps", -1, "steps= must be a whole number of at least 1, got -1"),
        ("evaluate_every", 5, "evaluate_every=5 has no meaning without held_out="),
        ("checkpoint_every", 5, "checkpoint_every=5 has no meaning without checkpoint="),
        ("resume", True, "resume=True has no meaning without checkpoint="),
        ("peer_timeout", "10", "peer_timeout= must be a number of at least 1, got '10'"),
        ("debug", "all", "debug= must be one of steps, versions, got 'all'"),
        ("cache", "x", "cache"),
    ):
        settings = settings_of("esd(1)", 2)
        settings[name] = value  # type: ignore[literal-required]
        with pytest.raises(ValueError, match=re.escape(message)):
            run(settings, stream)


def test_in_place_refuses_several_machines() -> None:
    stream = batches(2, 3)
    fault = "policy in-place: rows are trained where the shards keep them, so all workers and"
    settings = settings_of("in-place", 2)
    with pytest.raises(ValueError, match=re.escape(f"{fault} shards must be on one host")):
        run(settings | {"network": uniform_cluster(2, 1)}, stream)
    with pytest.raises(ValueError, match="policy in-place sends no rows"):
        run(settings | {"debug": "versions"}, stream)
    nodes = {"a": ["coordinator", "shard0", "worker0"], "b": ["worker1"]}
    with pytest.raises(ValueError, match=re.escape(fault)):
        check_run(RunConfig(policy="in-place", nodes=nodes))
    with pytest.raises(ValueError, match=re.escape(fault)):
        check_run(RunConfig(policy="in-place", workers=2, network="edge-2"))
    apart = {"a": ["coordinator"], "b": ["shard0", "worker0"]}
    for one in (RunConfig(policy="in-place", workers=2), RunConfig(policy="in-place", nodes=apart)):
        assert len(network_of(one).used_hosts) == 1


def test_in_place_refuses_ranks_without_shared_memory(monkeypatch: Patch) -> None:
    monkeypatch.setattr(InProcessChannel, "common_memory", lambda channel, size: None)
    with pytest.raises(ValueError, match="policy in-place: shards and workers share no memory"):
        run(settings_of("in-place", 2), batches(2, 3))


def launch(*command: str, folder: Path, shell: str = "") -> tuple[int, str]:
    """A real run, its output in one piece."""
    options = ["--workers", "1", "--batch", "64", "--hidden", "8", "--held-out", "0", "--dim", "8"]
    words = [sys.executable, "-m", "embroute", "train", *options, "--peer-timeout", "15", *command]
    if shell:
        words = ["bash", "-c", f'{shell}; exec "$@"', "bash", *words]
    done = subprocess.run(
        [*words, "--out", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_full_disk_ends_a_job_and_a_larger_disk_resumes_it(tmp_path: Path) -> None:
    """The first checkpoint fits, the second does not; the run resumes from the first."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5200k", "tmpfs", str(disk)]
    subprocess.run(mount, check=True)
    try:
        code, output = launch("--steps", "90", "--checkpoint-every", "30", folder=disk / "run")
        assert code == 73, output  # EX_CANTCREAT: a restart would fail again
        said = [line for line in output.splitlines() if "No space left on device" in line]
        assert said, output
        assert all("step-00000030" in line and ".safetensors" in line for line in said), output
        last = latest_checkpoint(disk / "run" / "checkpoints")
        assert last is not None
        assert last.name == "step-00000030"
        verify(last, read_manifest(last).files)
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        code, output = launch("--steps", "90", "--resume", folder=disk / "run")
        assert code == 0, output
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_real_run_refuses_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    code, output = launch("--steps", "5", folder=tmp_path / "run")
    assert code == 0, output
    code, output = launch("--steps", "9", "--dim", "4", "--resume", folder=tmp_path / "run")
    assert code == 2, output
    assert "is 9 wide in the checkpoint, 5 in the model" in output
    code, output = launch("--steps", "9", "--resume", folder=tmp_path / "run")
    assert code == 0, output


@pytest.mark.slow
def test_launcher_that_starts_too_few_ranks_is_refused(tmp_path: Path) -> None:
    write_run_file(RunConfig(workers=3, steps=5, out=str(tmp_path / "out")), tmp_path / "run.yaml")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", "-m", "embroute.train", str(tmp_path / "run.yaml")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode != 0
    assert "the launcher started 3 ranks, the job has 5: a coordinator, 1 shards" in done.stderr
    assert "exitcode  : 2" in done.stderr
