"""Strict JSON for files that may be damaged, with checks of types."""

from __future__ import annotations

import json
import math
import re

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_WORD = re.compile(r"\w{1,64}", re.ASCII)


def parse_json(text: bytes | str) -> Json:
    """Parse JSON; refuse NaN, duplicate names and nesting beyond Python's recursion limit."""
    try:
        if isinstance(text, bytes):
            text = text.decode()
        parsed: Json = json.loads(
            text, object_pairs_hook=_unique_names, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    return parsed


def _unique_names(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("one JSON object has the same name twice")
    return names


def _refuse_constant(text: str) -> Json:
    raise ValueError(f"JSON has no number {text}")


def whole_number(value: object, name: str, least: int = 0) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {brief(value)}")
    return value


def finite_number(value: object, name: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {brief(value)}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int larger than every float
        finite = False
    if not finite:
        raise ValueError(f"{name} must be a finite number, got {brief(value)}")
    return float(value)


def text_of(value: object, name: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {brief(value)}")
    return value


def word(value: object, name: str) -> str:
    """A text of letters and digits, fit for a file name."""
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise ValueError(f"{name} must be 1 to 64 letters and digits, got {brief(value)}")
    return value


def flag(value: object, name: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {brief(value)}")
    return value


def list_of(value: object, name: str, length: int | None = None) -> list[Json]:
    """A list, of this length if given."""
    if not isinstance(value, list) or length not in (None, len(value)):
        wanted = "a list" if length is None else f"a list of {length}"
        raise ValueError(f"{name} must be {wanted}, got {brief(value)}")
    return value


def object_of(value: object, name: str, names: tuple[str, ...] = ()) -> dict[str, Json]:
    """An object, with exactly these names if given."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {brief(value)}")
    for missing in (known for known in names if known not in value):
        raise ValueError(f"{name} lacks {missing!r}")
    for unknown in (other for other in value if names and other not in names):
        raise ValueError(f"{name} has {brief(unknown)}, which is unknown")
    return value


def brief(value: object) -> str:
    """A value for an error message: one short line."""
    shown = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
