"""One-line descriptions: their meaning, and the errors of wrong descriptions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embroute.config.spec import (
    CallSpec,
    Size,
    bind,
    parse_call,
    parse_int,
    parse_number,
    parse_size,
    split_outside,
)

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,8}", fullmatch=True)
VALUES = st.from_regex(r"[A-Za-z0-9.%+]{1,6}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("vanilla", CallSpec("vanilla")),
        ("  esd(1) ", CallSpec("esd", ("1",))),
        ("esd ( 1 )", CallSpec("esd", ("1",))),
        ("het()", CallSpec("het")),
        ("het(10, order=lfu)", CallSpec("het", ("10",), {"order": "lfu"})),
        (
            "het( bound = 3 ,order= light-lfu )",
            CallSpec("het", (), {"bound": "3", "order": "light-lfu"}),
        ),
        ("unbounded(het(5, lfu))", CallSpec("unbounded", ("het(5, lfu)",))),
        ("unbounded(het(bound=5))", CallSpec("unbounded", ("het(bound=5)",))),
        ("unbounded(of=het(bound=5))", CallSpec("unbounded", (), {"of": "het(bound=5)"})),
        ("criteo-kaggle(samples=200)", CallSpec("criteo-kaggle", (), {"samples": "200"})),
    ],
)
def test_call_text_parses_into_name_and_arguments(text: str, call: CallSpec) -> None:
    assert parse_call(text) == call


@given(NAMES, st.lists(VALUES, max_size=3), st.dictionaries(NAMES, VALUES, max_size=3))
def test_printed_call_parses_to_the_same_call(
    name: str, args: list[str], options: dict[str, str]
) -> None:
    call = CallSpec(name, tuple(args), options)
    assert parse_call(str(call)) == call


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected a name like 'esd(1)', got ''"),
        ("(1)", "expected a name like 'esd(1)', got '(1)'"),
        ("1esd", "expected a name like 'esd(1)', got '1esd'"),
        ("esd 1", "expected 'name(argument, key=value)', got 'esd 1'"),
        ("esd(1", "expected 'name(argument, key=value)', got 'esd(1'"),
        ("esd(1))", "unbalanced parentheses in '1)'"),
        ("esd(1)(2)", "unbalanced parentheses in '1)(2'"),
        ("esd(alpha=1, 2)", "in 'esd(alpha=1, 2)': argument '2' follows a key=value argument"),
        ("esd(alpha=1, alpha=0)", "in 'esd(alpha=1, alpha=0)': option 'alpha' is given twice"),
        ("esd(alpha=1, alpha =0)", "option 'alpha' is given twice"),
    ],
)
def test_bad_call_texts_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        parse_call(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b", ["a", "b"]),
        (" a , b(c,d) ,e", ["a", "b(c,d)", "e"]),
        ("b(c(d,e),f)", ["b(c(d,e),f)"]),
        ("", [""]),
        ("a,,b", ["a", "", "b"]),
    ],
)
def test_split_keeps_text_in_parentheses_together(text: str, parts: list[str]) -> None:
    assert split_outside(text, ",") == parts


def test_split_at_several_separators() -> None:
    assert split_outside("a b;c(d e;f)", " ;") == ["a", "b", "c(d e;f)"]


@pytest.mark.parametrize("text", ["(", ")", "a(b", "a)b", ")(", "a(b))c("])
def test_split_refuses_unbalanced_parentheses(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unbalanced parentheses in {text!r}")):
        split_outside(text, ",")


def test_bind_gives_arguments_their_names() -> None:
    assert bind(parse_call("het(10, order=lfu)"), ("bound", "order")) == {
        "bound": "10",
        "order": "lfu",
    }
    assert bind(parse_call("het"), ("bound",)) == {}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("het(1, lfu, 3)", "het takes at most 2 arguments, got 'het(1, lfu, 3)'"),
        ("het(size=3)", "het has no option 'size' (options: bound, order)"),
        ("het(1, bound=2)", "het: option 'bound' is given twice in 'het(1, bound=2)'"),
    ],
)
def test_bind_refuses_wrong_arguments(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        bind(parse_call(text), ("bound", "order"))


def test_bind_refuses_options_of_a_name_without_options() -> None:
    with pytest.raises(ValueError, match=re.escape("nocache has no option 'a' (options: none)")):
        bind(parse_call("nocache(a=1)"), ())
    with pytest.raises(ValueError, match=re.escape("nocache takes no arguments, got 'nocache(1)'")):
        bind(parse_call("nocache(1)"), ())
    with pytest.raises(ValueError, match="het takes at most 1 argument, got"):
        bind(parse_call("het(1, 2)"), ("bound",))


@pytest.mark.parametrize("text", ["3", "3.0", "3e0", " 3 "])
def test_whole_numbers_are_parsed(text: str) -> None:
    value = parse_int("--steps", text, 1)
    assert value == 3
    assert isinstance(value, int)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x", "--steps must be a number, got 'x'"),
        ("", "--steps must be a number, got ''"),
        ("0", "--steps must be between 1 and 10, got 0"),
        ("11", "--steps must be between 1 and 10, got 11"),
        ("nan", "--steps must be between 1 and 10, got nan"),
        ("inf", "--steps must be between 1 and 10, got inf"),
        ("1.5", "--steps must be a whole number, got 1.5"),
    ],
)
def test_bad_whole_numbers_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        parse_int("--steps", text, 1, 10)


def test_number_outside_its_range_is_refused() -> None:
    assert parse_number("alpha", "0.25", 0, 1) == 0.25
    with pytest.raises(ValueError, match=r"alpha must be between 0 and 1, got 1\.01"):
        parse_number("alpha", "1.01", 0, 1)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0.1", Size(0.1, "share")),
        ("10%", Size(0.1, "share")),
        (" 10 % ", Size(0.1, "share")),
        ("100%", Size(1.0, "share")),
        ("1", Size(1.0, "share")),
        ("1e-3", Size(0.001, "share")),
        ("0", Size(0.0, "share")),
        ("2", Size(2.0, "rows")),
        ("1rows", Size(1.0, "rows")),
        ("5000", Size(5000.0, "rows")),
        ("5e3", Size(5000.0, "rows")),
        ("5000 rows", Size(5000.0, "rows")),
        ("7B", Size(7.0, "bytes")),
        ("256MB", Size(256e6, "bytes")),
        ("1.5KB", Size(1500.0, "bytes")),
        ("2GB", Size(2e9, "bytes")),
        ("1KiB", Size(1024.0, "bytes")),
        ("1MiB", Size(2.0**20, "bytes")),
        ("1GiB", Size(2.0**30, "bytes")),
    ],
)
def test_sizes_are_parsed(text: str, size: Size) -> None:
    assert parse_size("--cache", text) == size


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "--cache must look like 0.1, 10%, 5000rows or 256MB, got ''"),
        ("-1", "--cache must look like 0.1, 10%, 5000rows or 256MB, got '-1'"),
        ("10 apples", "--cache must look like 0.1, 10%, 5000rows or 256MB, got '10 apples'"),
        ("10mb", "--cache must look like 0.1, 10%, 5000rows or 256MB, got '10mb'"),
        ("MB", "--cache must look like 0.1, 10%, 5000rows or 256MB, got 'MB'"),
        ("1.2.3", "--cache must be a number, got '1.2.3'"),
        ("101%", "--cache must be at most 1 or 100% of all rows, got '101%'"),
        ("1e16", "--cache must be between 0 and 1e+15, got 1e16"),
    ],
)
def test_bad_sizes_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        parse_size("--cache", text)


def test_size_prints_its_amount_and_unit() -> None:
    shown = [str(parse_size("--cache", text)) for text in ("10%", "5000rows", "256MB")]
    assert shown == ["0.1", "5000 rows", "256000000 bytes"]
