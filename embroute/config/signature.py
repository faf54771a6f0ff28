"""Functions called by a parsed text such as `esd(1, ties=any)`: annotations check its options."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as type_hints

from embroute.config.spec import (
    LARGEST_COUNT,
    LARGEST_SEED,
    CallSpec,
    bind,
    parse_int,
    parse_number,
    parse_size,
    shown,
)
from embroute.config.spec import Size as RowSize

T = TypeVar("T")


class Between(NamedTuple):
    """The range of an annotated number: `Annotated[int, Between(1, 100)]`."""

    low: float
    high: float = LARGEST_COUNT


Ratio = Annotated[float, Between(0, 1)]
Seed = Annotated[int, Between(0, LARGEST_SEED)]
ANY_NUMBER = Between(-1e300, 1e300)
PARSED_TYPES = "int, float, bool, str, Literal, Size, tuple[float, ...], or one of these or None"


@dataclass(frozen=True)
class Option:
    """A parameter of a function: its name, its type and its default."""

    name: str
    kind: Any
    required: bool

    def parse(self, owner: str, text: str) -> object:
        """The value of a text; errors name the function and the option."""
        return _parse(f"{owner}: {self.name}", text, self.kind)


def options_of(function: Callable[..., object]) -> Mapping[str, Option]:
    """The parameters of a function, in order."""
    hints = type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {
        one.name: Option(one.name, hints.get(one.name, str), one.default is one.empty)
        for one in parameters
    }


def call_with(function: Callable[..., T], call: CallSpec) -> T:
    """Call a function with the arguments of a text."""
    options = options_of(function)
    bound = bind(call, tuple(options))
    missing = [name for name, option in options.items() if option.required and name not in bound]
    if missing:
        raise ValueError(f"{call.name} needs {missing[0]}, as in {call.name}({missing[0]}=...)")
    return function(**{name: options[name].parse(call.name, text) for name, text in bound.items()})


def first_line(function: Callable[..., object]) -> str:
    """What a function's docstring says first, for a list."""
    return (inspect.getdoc(function) or "").split("\n")[0].rstrip(".")


def _parse(label: str, text: str, kind: Any, span: Between | None = None) -> object:
    """The value of a text."""
    if get_origin(kind) is Annotated:
        plain, *extras = get_args(kind)
        return _parse(label, text, plain, next(e for e in extras if isinstance(e, Between)))
    if get_origin(kind) in (Union, types.UnionType):
        return _parse_union(label, text, get_args(kind), span)
    if get_origin(kind) is Literal:
        return _choice(label, text, get_args(kind))
    if get_origin(kind) is tuple:
        return tuple(_parse(label, part, get_args(kind)[0], span) for part in text.split("+"))
    if kind is bool:
        return _choice(label, text, ("yes", "no")) == "yes"
    low, high = span or (-LARGEST_COUNT if kind is int else ANY_NUMBER.low, LARGEST_COUNT)
    if kind is int:
        return parse_int(label, text, int(low), int(high))
    if kind is float:
        return parse_number(label, text, low, high)
    if kind is RowSize:
        return parse_size(label, text)
    if kind is str:
        return text
    raise ValueError(f"{label} is of type {kind}, which no text can give ({PARSED_TYPES} can)")


def _parse_union(label: str, text: str, kinds: tuple[Any, ...], span: Between | None) -> object:
    """A fixed word, or a value of the other type; None is for defaults only."""
    others = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            if text in get_args(kind):
                return text
            label = f"{label}, if not {' or '.join(get_args(kind))},"
        elif kind is not types.NoneType:
            others.append(kind)
    if not others:
        words = [word for kind in kinds for word in get_args(kind)]
        return _choice(label.split(", if not")[0], text, tuple(words))
    return _parse(label, text, others[0], span)


def _choice(label: str, text: str, words: tuple[str, ...]) -> str:
    """One of some words."""
    if text not in words:
        several = f"one of {', '.join(words)}" if len(words) > 2 else " or ".join(words)
        raise ValueError(f"{label} must be {several}, got {shown(text)}")
    return text
