"""Strict JSON for files that may be damaged: pydantic checks types, and converts nothing."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
_T = TypeVar("_T")


def parse_json(text: bytes | str) -> Json:
    """Parse JSON; refuse NaN, duplicate names and nesting beyond Python's recursion limit."""
    try:
        if isinstance(text, bytes):
            text = text.decode()
        value: Json = json.loads(
            text, object_pairs_hook=_unique_names, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    return value


def _unique_names(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("one JSON object has the same name twice")
    return names


def _refuse_constant(text: str) -> Json:
    raise ValueError(f"JSON has no number {text}")


def validated(kind: TypeAdapter[_T], value: Json, name: str = "it") -> _T:
    """A value as its type says; no value is converted. `name` is that of the whole value."""
    try:
        return kind.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join([name, *map(str, first["loc"])])
        raise ValueError(f"{place}: {first['msg']}, got {brief(first['input'])}") from None


def list_of(value: object, name: str, length: int) -> list[Json]:
    """A list of this length."""
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{name} must be a list of {length}, got {brief(value)}")
    return value


def object_of(value: object, name: str) -> dict[str, Json]:
    """An object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {brief(value)}")
    return value


def brief(value: object) -> str:
    """A value for an error message: one short line."""
    shown = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
