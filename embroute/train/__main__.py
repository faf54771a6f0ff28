"""`torchrun ... -m embroute.train run.yaml`: one rank of a run."""

from __future__ import annotations

import signal


def _start() -> None:
    # The imports take seconds. Until they are done, Ctrl-C ends the rank without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from embroute.train.program import rank_main

    rank_main()


if __name__ == "__main__":
    _start()
