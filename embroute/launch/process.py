"""What a rank changes of its process: only where the process belongs to embroute.

`embroute train` owns its processes; a user's script allows it with `own_process=True`.
"""

from __future__ import annotations

import ctypes
import os

from embroute.launch.rank import COORDINATOR

COORDINATOR_NICENESS = 10  # plans are made ahead, so training ranks on the same cores come first
# Parameters of glibc's mallopt, and values in bytes: the size from which freed memory returns to
# the system at once (glibc accepts no larger one), and how much free memory the heap keeps.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES = 1 << 25, 1 << 28


def tune_process(name: str) -> None:
    """Set the priority and the allocator of a rank's process."""
    if name == COORDINATOR:
        os.nice(COORDINATOR_NICENESS)
    keep_memory()


def keep_memory() -> bool:
    """Keep the memory that a step frees for the next step; False if the allocator is not glibc's.

    Every step needs the same memory. By default the heap returns free memory at its end once it is
    twice as large as the largest piece freed so far. Then the next step would wait for new pages, a
    thousand of them for a few megabytes of activations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    return bool(kept and mallopt(TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
