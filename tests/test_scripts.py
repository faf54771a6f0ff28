"""Scripts that own their processes and end early: one clear line from every rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embroute.launch.process import NOTICE_S, OWN_ERROR, TRY_AGAIN
from embroute.launch.rank import rank_names
from tests.processes import TORCHRUN, begin, finish, pid_of
from tests.test_example import ROUTED

SECONDS = 30.0  # the default of peer_timeout


def start(script: Path, then: str = "") -> subprocess.Popen[str]:
    """Start the example's job in processes of its own, and wait until it trains."""
    text = ROUTED.read_text().replace("lookups=", "own_process=True, lookups=")
    script.write_text(text.replace("if step % REPORT", f"{then}if step % REPORT"))
    run = begin([*TORCHRUN, str(script), "--steps", "4000"])
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step 50"):
            return run
    raise AssertionError(finish(run)[1])


def said(output: str) -> dict[str, list[str]]:
    """The last words of each rank."""
    found: dict[str, list[str]] = {}
    for name, reason in re.findall(r"^embroute: (\w+): (.*)$", output, re.M):
        found.setdefault(name, []).append(reason)
    return found


def failed(script: Path, change: str) -> tuple[str, dict[str, list[str]]]:
    """The output of a script that fails with this change, and the last words of each rank."""
    code, output = finish(start(script, change), 60)
    assert code != 0
    return output, said(output)


@pytest.mark.full
@pytest.mark.parametrize("killed", ["coordinator", "shard0", "worker1"])
def test_every_rank_names_the_killed_rank(killed: str, tmp_path: Path) -> None:
    run = start(tmp_path / "script.py")
    os.kill(pid_of(run, killed), signal.SIGKILL)
    began = time.monotonic()
    code, output = finish(run, 60)
    assert time.monotonic() - began < SECONDS
    assert code != 0
    lines = said(output)
    assert sorted(lines) == sorted(set(rank_names(2, 1)) - {killed}), output
    assert [len(reasons) for reasons in lines.values()] == [1, 1, 1], output
    assert all(reason.startswith("lost ") for (reason,) in lines.values()), output
    assert f"lost {killed}" in output
    assert "LostPeerError" not in output  # no traceback but the launcher's own
    assert f"exitcode  : {TRY_AGAIN} " in output


@pytest.mark.full
def test_error_in_the_training_loop_keeps_its_traceback(tmp_path: Path) -> None:
    broken = 'if step == 60 and ready.session.rank.name == "worker1":\n            oops()\n        '
    output, lines = failed(tmp_path / "script.py", broken)
    assert lines.pop("worker1") == ["NameError: name 'oops' is not defined"]
    assert output.count("NameError: name 'oops' is not defined") == 2  # traceback, last line
    assert [len(reasons) for reasons in lines.values()] == [1, 1, 1], output
    assert "LostPeerError" not in output
    assert f"exitcode  : {OWN_ERROR} " in output


@pytest.mark.full
def test_early_exit_from_the_loop_names_ready_stop(tmp_path: Path) -> None:
    left = "if step == 60:\n            break\n        "
    output, lines = failed(tmp_path / "script.py", left)
    assert sorted(lines) == sorted(rank_names(2, 1)), output
    for worker in ("worker0", "worker1"):
        (reason,) = lines[worker]
        assert reason.startswith("the loop was left after 60 steps, with more to come; ")
        assert "ready.stop()" in reason
    assert f"exitcode  : {OWN_ERROR} " in output


def stopped(before: str, number: signal.Signals) -> tuple[int, str]:
    """Exit code and output of an idle process after a signal."""
    ours = "from embroute.launch.process import install_exit_hooks as hooks; hooks('worker0')"
    lines = ["import signal, time", before, ours, "print('here', flush=True)", "time.sleep(60)"]
    run = begin([sys.executable, "-c", "\n".join(lines)])
    assert run.stdout is not None
    assert run.stdout.readline() == "here\n"
    run.send_signal(number)
    return finish(run, NOTICE_S + 20)


def test_signal_ends_a_rank_with_one_line() -> None:
    assert stopped("", signal.SIGTERM) == (143, "embroute: worker0: stopped by SIGTERM\n")
    assert stopped("", signal.SIGINT) == (130, "embroute: worker0: interrupted\n")


def test_signal_handler_of_a_script_is_kept() -> None:
    own = "signal.signal(signal.SIGTERM, lambda *_: exit(7))"
    assert stopped(own, signal.SIGTERM) == (7, "")


@pytest.mark.full
def test_embroute_run_starts_a_script_and_prints_one_reason(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    broken = 'if step == 60 and ready.session.rank.name == "worker1":\n            oops()\n'
    script.write_text(
        ROUTED.read_text().replace("if step % REPORT", f"{broken}        if step % REPORT")
    )
    run = [sys.executable, "-m", "embroute", "run", "--workers", "2"]
    code, output = finish(begin([*run, str(script), "--steps", "50"]))
    assert code == 0, output
    assert output.count("step 50  log-loss") == 1
    code, output = finish(begin([*run, str(script), "--steps", "400"]))
    assert code == OWN_ERROR, output
    assert output.count("NameError: name 'oops' is not defined") == 2  # traceback, last line
    assert said(output) == {"worker1": ["NameError: name 'oops' is not defined"]}


@pytest.mark.parametrize("flag", ["", "--quiet"])
def test_options_behind_a_script_are_its_own_and_run_ends_with_a_next_command(
    flag: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; open(sys.argv[-1] + os.environ['RANK'], 'x')")
    ours = [sys.executable, "-m", "embroute", "run", "--shards", "1", *([flag] if flag else [])]
    code, output = finish(begin([*ours, str(script), "--workers", "3", "-q", str(tmp_path / "r")]))
    assert code == 0, output
    after = f"next: torchrun --nproc-per-node 4 {script} --workers 3 -q {tmp_path / 'r'}\n"
    assert output == ("" if flag else after)
    assert sorted(path.name for path in tmp_path.glob("r*")) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "SCRIPT nowhere.py: no such file"),
        pytest.param(
            ["--shards", "2", "{script}"],
            "shards=1 in the script, embroute run --shards 2",
            marks=pytest.mark.full,
        ),
    ],
)
def test_embroute_run_refuses_missing_scripts_and_wrong_shards(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ROUTED.read_text().replace("lookups=", "shards=1, lookups="))
    command = [sys.executable, "-m", "embroute", "run", *arguments]
    code, output = finish(begin([word.format(script=script) for word in command]))
    assert code != 0
    assert message in output
