"""Parse one-line descriptions by users: `name(argument, key=value)`, sizes, numbers."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LARGEST_COUNT = 2**31 - 1
LARGEST_SEED = 2**63 - 1
LARGEST_WIDTH = 10**6  # of a row or a layer
MAX_DEPTH = 20  # of nested parentheses
MAX_MESSAGE = 1000  # characters of an error message

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxdict = 3, 6, 6, 6
_REPR.maxstring, _REPR.maxlong, _REPR.maxother = 80, 40, 80


def shown(value: object) -> str:
    """A value as error messages quote it: one line, shortened if long or deep."""
    try:
        return one_line(_REPR.repr(value))
    except ValueError:  # Python refuses to print a number of more than 4300 digits
        return f"a huge {type(value).__name__}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest known name, if one is near."""
    by_lower = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def one_line(text: str) -> str:
    """A message in one line: control characters escaped, the middle of a long message left out."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    half = MAX_MESSAGE // 2
    return line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"


def csv_cell(text: str) -> str:
    """A text as a CSV cell, quoted if a spreadsheet would run it as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


@dataclass(frozen=True)
class CallSpec:
    """A parsed `name(argument, key=value)`; the caller converts the arguments from text."""

    name: str
    args: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = [*self.args, *(f"{key}={value}" for key, value in self.options.items())]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


_NAME = re.compile(r"[A-Za-z_][\w.:-]*")


def split_outside(text: str, separators: str) -> list[str]:
    """Split at separators outside parentheses, and strip blanks around the parts."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if depth > MAX_DEPTH:
            raise ValueError(f"parentheses deeper than {MAX_DEPTH} in {shown(text)}")
        if depth == 0 and char in separators:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if depth != 0:
        raise ValueError(f"unbalanced parentheses in {shown(text)}")
    parts.append(current.strip())
    return parts


def parse_call(text: str) -> CallSpec:
    """Read `name`, `name(1)` or `name(1, key=value)`."""
    text = text.strip()
    match = _NAME.match(text)
    if not match:
        raise ValueError(f"expected a name like 'esd(1)', got {shown(text)}")
    name, rest = match.group(), text[match.end() :].strip()
    if not rest:
        return CallSpec(name)
    if not (rest.startswith("(") and rest.endswith(")")):
        raise ValueError(f"expected 'name(argument, key=value)', got {shown(text)}")
    args, options = [], {}
    for part in split_outside(rest[1:-1], ","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if equals and "(" not in key:
            if key in options:
                raise ValueError(f"in {shown(text)}: option {shown(key)} is given twice")
            options[key] = value
        elif part and options:
            raise ValueError(
                f"in {shown(text)}: argument {shown(part)} follows a key=value argument"
            )
        elif part:
            args.append(part)
    return CallSpec(name, tuple(args), options)


def bind(call: CallSpec, names: tuple[str, ...]) -> dict[str, str]:
    """The arguments of a call by name; unknown and repeated arguments are refused."""
    if len(call.args) > len(names):
        most = ("no arguments", "at most 1 argument", f"at most {len(names)} arguments")
        raise ValueError(f"{call.name} takes {most[min(len(names), 2)]}, got {str(call)!r}")
    bound = dict(zip(names, call.args, strict=False))
    for key, value in call.options.items():
        if key not in names:
            known = ", ".join(names) or "none"
            raise ValueError(f"{call.name} has no option {shown(key)} (options: {known})")
        if key in bound:
            raise ValueError(f"{call.name}: option {key!r} is given twice in {str(call)!r}")
        bound[key] = value
    return bound


def parse_number(name: str, text: str, low: float, high: float) -> float:
    """A number within [low, high]; the error names it `name`."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {shown(text)}") from None
    _check_range(name, text, value, (low, high))
    return value


def parse_int(name: str, text: str, low: int, high: int = LARGEST_COUNT) -> int:
    """A whole number within [low, high]; the error names it `name`."""
    if re.fullmatch(r"\s*[+-]?[0-9]{1,100}\s*", text):
        number = int(text)  # a float would round large numbers
        _check_range(name, text, number, (low, high))
        return number
    value = parse_number(name, text, low, high)
    if value != int(value):
        raise ValueError(f"{name} must be a whole number, got {one_line(text)}")
    return int(value)


def _check_range(name: str, text: str, value: float, span: tuple[float, float]) -> None:
    """Refuse a number outside of the range, and nan."""
    if not span[0] <= value <= span[1]:
        low, high = (str(end) if isinstance(end, int) else f"{end:g}" for end in span)
        raise ValueError(f"{name} must be between {low} and {high}, got {one_line(text)}")


def parse_path(name: str, text: str) -> Path:
    """A path, refused if blank or with a NUL; the file need not exist."""
    if not text.strip() or "\0" in text:
        raise ValueError(f"{name} must be a path, got {shown(text)}")
    return Path(text)


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Size:
    """A size as the user wrote it: a share of all rows, a number of rows, or bytes."""

    amount: float
    unit: str  # "share", "rows", "bytes", or "auto": a share, or more where steps need more

    def __str__(self) -> str:
        if self.unit == "auto":
            return "auto"
        if self.unit == "share":
            return f"{self.amount:g}"
        return f"{self.amount:.0f} {self.unit}"


Cache = Size | tuple[Size, ...]  # of every worker, or one size for each
AUTO_CACHE = Size(0.1, "auto")


def parse_cache(name: str, size: Cache | str | float) -> Cache:
    """The size of all caches, such as `auto` or `10%`, or that of each, such as `10%+5%`."""
    if isinstance(size, Size | tuple):
        return size
    if size == "auto":
        return AUTO_CACHE
    parts = re.split(r"(?<![eE])\+", str(size))  # 1e+3 is one number
    sizes = tuple(parse_size(name, part) for part in parts)
    return sizes if len(sizes) > 1 else sizes[0]


def parse_size(name: str, text: str) -> Size:
    """Read `0.1` or `10%` (share), `5000` or `5000rows` (rows), `256MB` (bytes)."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(%|rows|[KMG]i?B|B)?\s*", text)
    if not match:
        raise ValueError(f"{name} must look like 0.1, 10%, 5000rows or 256MB, got {shown(text)}")
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
