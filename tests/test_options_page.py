"""The page of all options is what the code says."""

from __future__ import annotations

from tests.options_page import PAGE, page


def test_page_of_options_equals_the_fields_of_the_code() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tests.options_page"
