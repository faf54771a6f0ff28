"""Sets the size of tests before they are collected."""

from __future__ import annotations

import pytest

from tests.sizes import choose_size


def pytest_configure(config: pytest.Config) -> None:
    """Small tests unless `-m` selects the full ones, as `make test-all` does."""
    choose_size(config.option.markexpr)
