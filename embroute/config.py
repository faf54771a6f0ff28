"""Descriptions a user writes on one line: `name(argument, key=value)`, sizes, and their errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Call:
    """A parsed `name(argument, key=value)`; arguments stay text until their owner reads them."""

    name: str
    args: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = [*self.args, *(f"{key}={value}" for key, value in self.options.items())]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


_NAME = re.compile(r"[A-Za-z][\w.-]*")


def split_outside(text: str, separators: str) -> list[str]:
    """Split at separators that stand outside parentheses; blanks around the parts are dropped."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if depth == 0 and char in separators:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if depth != 0:
        raise ValueError(f"unbalanced parentheses in {text!r}")
    parts.append(current.strip())
    return parts


def parse_call(text: str) -> Call:
    """Read `name`, `name(1)` or `name(1, key=value)`."""
    text = text.strip()
    match = _NAME.match(text)
    if not match:
        raise ValueError(f"expected a name like 'esd(1)', got {text!r}")
    name, rest = match.group(), text[match.end() :].strip()
    if not rest:
        return Call(name)
    if not (rest.startswith("(") and rest.endswith(")")):
        raise ValueError(f"expected 'name(argument, key=value)', got {text!r}")
    args, options = [], {}
    for part in split_outside(rest[1:-1], ","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if equals and "(" not in key:
            if key in options:
                raise ValueError(f"in {text!r}: option {key!r} is given twice")
            options[key] = value
        elif part and options:
            raise ValueError(f"in {text!r}: argument {part!r} follows a key=value argument")
        elif part:
            args.append(part)
    return Call(name, tuple(args), options)


def bind(call: Call, names: tuple[str, ...]) -> dict[str, str]:
    """Give every argument of a call its name; unknown and doubled ones are refused."""
    if len(call.args) > len(names):
        raise ValueError(f"{call.name} takes at most {len(names)} arguments, got {str(call)!r}")
    bound = dict(zip(names, call.args, strict=False))
    for key, value in call.options.items():
        if key not in names:
            known = ", ".join(names) or "none"
            raise ValueError(f"{call.name} has no option {key!r} (options: {known})")
        if key in bound:
            raise ValueError(f"{call.name}: option {key!r} is given twice in {str(call)!r}")
        bound[key] = value
    return bound


def parse_number(name: str, text: str, low: float, high: float) -> float:
    """A number within [low, high]; `name` is what the error calls it."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {text}")
    return value


def parse_int(name: str, text: str, low: int, high: int = 2**31 - 1) -> int:
    """A whole number within [low, high]; `name` is what the error calls it."""
    value = parse_number(name, text, low, high)
    if value != int(value):
        raise ValueError(f"{name} must be a whole number, got {text}")
    return int(value)


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Size:
    """A cache size as the user wrote it: a share of all rows, a number of rows, or bytes."""

    amount: float
    unit: str  # "share", "rows" or "bytes"

    def __str__(self) -> str:
        if self.unit == "share":
            return f"{self.amount:g}"
        return f"{self.amount:.0f} {self.unit}"


def parse_size(name: str, text: str) -> Size:
    """Read `0.1` or `10%` (share), `5000` or `5000rows` (rows), `256MB` (bytes)."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(%|rows|[KMG]i?B|B)?\s*", text)
    if not match:
        raise ValueError(f"{name} must look like 0.1, 10%, 5000rows or 256MB, got {text!r}")
    amount = parse_number(name, match.group(1), 0, 1e15)
    unit = match.group(2)
    if unit == "%" or (unit is None and amount <= 1):
        share = amount / 100 if unit == "%" else amount
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be at most 1 or 100% of all rows, got {text!r}")
        return Size(share, "share")
    if unit in _UNITS:
        return Size(amount * _UNITS[unit], "bytes")
    return Size(amount, "rows")
