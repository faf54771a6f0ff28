"""Liveness: every rank writes a heartbeat into the job's store and watches those of the others.

A transfer may take long, so transfers have no short time-out. A rank without heartbeats is dead or
cut off, and a transfer with it would never end. So this rank gives up, whatever it waits for.
A rank that is cut off itself may wait for the store for ever, in spite of the store's own time-out.
So a second thread watches the time since the store's last answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from embroute.transport.job_store import LAUNCHER, JobStore

LEFT_JOB = "left"


def interval(timeout_s: float) -> float:
    """Seconds between two heartbeats."""
    if not timeout_s >= 1:
        raise ValueError(f"--peer-timeout must be at least 1 second, got {timeout_s:g}")
    return min(1.0, timeout_s / 10)


def patience(timeout_s: float) -> float:
    """Seconds of silence after which a rank ends, early enough to end by the time-out itself."""
    return max(timeout_s - 3 * interval(timeout_s), timeout_s / 2)


class Heartbeat:
    """Heartbeats while the context is open. The store's own time-out should be `patience`."""

    def __init__(
        self,
        store: JobStore,
        name: str,
        everyone: Sequence[str],
        timeout_s: float,
        lose: Callable[[str], None],  # takes the reason why this rank cannot go on
    ) -> None:
        self._lose = lose
        self.store, self.name, self.hosts_store = store, name, False
        self.others = [other for other in everyone if other != name]
        self.interval_s, self.patience_s = interval(timeout_s), patience(timeout_s)
        self._launcher = os.environ.get(LAUNCHER)
        self._all_began = False
        self._answered = time.monotonic()  # when the store answered last
        self._stop, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self.store.set(self._key(self.name), "0")
        self._answered = time.monotonic()
        self._thread.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * self.interval_s)
        if kind is None:
            with suppress(RuntimeError):  # the store's host has left, so the job is over
                self.store.set(self._key(self.name), LEFT_JOB)
                if self.hosts_store:
                    self._outlive_others()
        self._left.set()

    def _outlive_others(self) -> None:
        """Wait until all others have left: the store ends with this process."""
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            self._answered = time.monotonic()
            if all(beat == LEFT_JOB.encode() for beat in self._read().values()):
                return
            time.sleep(0.05)

    def _key(self, name: str) -> str:
        return f"beat/{name}"

    def _run(self) -> None:
        # A change of a beat shows life. Beats are numbers, so clocks of hosts need not agree.
        beats = {other: (b"", time.monotonic()) for other in self.others}
        count = 0
        while not self._stop.wait(self.interval_s):
            count += 1
            try:
                self.store.set(self._key(self.name), str(count))
                latest = self._read()
            except RuntimeError:
                if self._stop.is_set():
                    return  # the store's host has left, so the job is over
                self._lose("lost contact with the host of the job's store")
                return
            now = self._answered = time.monotonic()
            for other, beat in latest.items():
                if beat != beats[other][0] or beat == LEFT_JOB.encode():
                    beats[other] = (beat, now)
            silent = [other for other, (_, seen) in beats.items() if now - seen > self.patience_s]
            if silent:
                names = ", ".join(silent)
                self._lose(f"no sign of life from {names} for {self.patience_s:.0f} s")
                return

    def _read(self) -> dict[str, bytes]:
        """The others' latest heartbeats, once all of them have begun."""
        keys = [self._key(other) for other in self.others]
        # `multi_get` would wait for a missing key, and this thread must not wait.
        self._all_began = self._all_began or self.store.check(keys)
        values = self.store.multi_get(keys) if self._all_began else [b""] * len(keys)
        return dict(zip(self.others, values, strict=True))

    def _watch(self) -> None:
        """Give up if the store does not answer, or if the launcher is dead.

        The store or this rank may be cut off. A suspended or crowded machine may not run this
        thread; that time does not count as silence.
        """
        previous = time.monotonic()
        while not self._left.wait(self.interval_s):
            now = time.monotonic()
            self._answered += max(0.0, now - previous - 2 * self.interval_s)
            previous = now
            if self._launcher not in (None, str(os.getppid())):
                self._lose("lost the launcher")
                return
            if time.monotonic() - self._answered > self.patience_s:
                seconds = f"{self.patience_s:.0f} s"
                self._lose(f"no answer from the host of the job's store for {seconds}")
                return
