"""The launcher of ranks: its last line names the cause of a failure, its exit code is honest."""

from __future__ import annotations

import sys

import pytest

from embroute.launch.process import TRY_AGAIN, error_line
from embroute.launch.supervisor import Program, RunFailedError, supervise

# Each rank waits for the end of the rank before it, the first for the start of all; then it ends as
# told: a reason or -, and an exit code.
RANK = """
import os, signal, sys, time
rank, folder = int(os.environ["RANK"]), os.environ["EMBROUTE_JOB_FOLDER"]
reason, code = sys.argv[1 + 2 * rank], int(sys.argv[2 + 2 * rank])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{folder}/ready{rank}", "w").close()
before = [f"over{rank - 1}"] if rank else [f"ready{r}" for r in range(len(sys.argv) // 2)]
while not all(os.path.exists(f"{folder}/{name}") for name in before):
    time.sleep(0.01)
if reason != "-":
    open(f"{folder}/ending-0-{rank}", "w").write(reason)
open(f"{folder}/over{rank}", "w").close()
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@pytest.mark.parametrize(
    ("ends", "message", "code"),
    [
        (
            [("-", 1), ("worker0: lost coordinator", TRY_AGAIN), ("worker1: no disk", 74)],
            "worker1: no disk",
            74,
        ),
        (
            [("worker0: lost shard0", TRY_AGAIN), ("coordinator: --cache 0.1: too small", 2)],
            "coordinator: --cache 0.1: too small",
            2,
        ),
        ([("-", -9), ("shard0: no disk", 74)], "the run failed: a ended first (signal 9)", 137),
        (
            [("-", 3), ("-", TRY_AGAIN)],
            "the run failed: a ended first (exit code 3; its messages are above)",
            3,
        ),
    ],
)
def test_last_line_of_a_failure_is_its_cause(
    ends: list[tuple[str, int]], message: str, code: int
) -> None:
    words = [str(word) for end in ends for word in end]
    program = Program([sys.executable, "-S", "-c", RANK, *words], ["a", "b", "c"][: len(ends)])
    with pytest.raises(RunFailedError) as failed:
        supervise(program)
    assert str(failed.value) == message
    assert failed.value.exit_code == code


def test_error_line_is_one_line_with_the_kind_of_error() -> None:
    assert error_line(ValueError("two\nlines")) == r"ValueError: two\nlines"
    assert error_line(KeyError("x")) == "KeyError: 'x'"
    assert error_line(AssertionError()) == "AssertionError"
