"""Memory freed by a step stays with the process: the next step causes no new page faults."""

import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource, sys
from embroute.launch.process import (keep_memory)

if sys.argv[1] == "kept":
    print("able" if keep_memory() else "unable")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [libc.malloc(1 << 20) for _ in range(16)]
    for piece in pieces:
        ctypes.memset(piece, 1, 1 << 20)
    for piece in reversed(pieces):
        libc.free(piece)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(how: str) -> tuple[list[str], int]:
    """The words a process prints, and the page faults of its last step."""
    command = [sys.executable, "-c", STEPS, how]
    *said, last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return said, int(last)


@pytest.mark.full
def test_freed_memory_is_kept_for_the_next_step() -> None:
    said, kept = pages("kept")
    if said == ["unable"]:
        pytest.skip("the allocator of this system cannot keep memory")
    _, given_back = pages("as it is")
    assert kept < 50
    assert given_back > 1000  # or the test would show nothing
