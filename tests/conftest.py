"""Sets the size of tests before they are collected."""

from __future__ import annotations

import signal

import pytest

from tests.sizes import choose_size

# A shell that starts the tests in the background lets them ignore Ctrl-C, and every process that a
# test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Small tests unless `-m` selects the full ones, as `make test-all` does."""
    choose_size(config.option.markexpr)
