"""Options described once: a field has a type, a default, a range, a group and a help text.

Command lines, run files, Python, manuals and JSON schemas are made from these fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from embroute.config.spec import did_you_mean, shown

# An option in a message, and the blank between it and its value.
OPTION = re.compile(r"--([a-z][a-z-]*)(?: (?!(?:must|is|are|has|needs|and|or|takes|N)\b))?")
_KIND_NAMES: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
}


class Group(StrEnum):
    """Headings of the help, in order. Fields of the group NONE are no command-line options."""

    DATA = "Data"
    MODEL = "Model"
    POLICY = "Policy"
    NETWORK = "Network"
    OPTIMIZER = "Optimizer"
    STEPS = "Steps"
    CHECKPOINTS = "Checkpoints"
    RANKS = "Ranks"
    OUTPUT = "Output"
    READING = "How files are read"
    OTHER = "Other"
    NONE = ""


def option(default: Any, group: Group, text: str, metavar: str | None = None, **limits: Any) -> Any:
    """A field of `Options`."""
    extra: JsonDict = {"group": group.value}
    if metavar:
        extra["metavar"] = metavar
    return Field(default, description=text, json_schema_extra=extra, **limits)


def extra_of(field: FieldInfo, name: str) -> str | None:
    """The group or metavar of a field."""
    extra = field.json_schema_extra
    return str(extra[name]) if isinstance(extra, dict) and name in extra else None


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have beside None."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for kind in get_args(annotation) if kind is not type(None))
    return (annotation,)


def words_of(annotation: Any) -> tuple[str, ...]:
    """The words that a field of choices takes; empty for other fields."""
    kinds = kinds_of(annotation)
    return get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()


class Options(BaseModel):
    """Values that users set. A mistake is one line that names the option as `--name`."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True
    )

    def __init__(self, /, **values: Any) -> None:
        check_names(type(self), values)
        plain = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in values.items()
        }
        try:
            super().__init__(**plain)
        except ValidationError as error:
            raise ValueError(_fault(type(self), error)) from None

    def replace(self, **values: Any) -> Self:
        """The same options with other values for some; checked again."""
        return type(self)(**{**dict(self), **values})

    def changed(self) -> dict[str, Any]:
        """The values that differ from the defaults, by name."""
        fields = type(self).model_fields
        return {
            name: value
            for name, value in self
            if value != fields[name].get_default(call_default_factory=True)
        }


def check_names(kind: type[Options], names: Iterable[str], noun: str = "option") -> None:
    """Refuse an unknown name with the nearest known one."""
    known = list(kind.model_fields)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f" (there are {', '.join(known)})"
            raise TypeError(f"no {noun} {shown(name)}{hint}")


def option_name(name: str) -> str:
    """The command-line option of a key."""
    return f"--{name.replace('_', '-')}"


def as_python(message: str) -> str:
    """A message that names arguments as Python has them: `batch=`, not `--batch`."""
    return OPTION.sub(lambda match: match[1].replace("-", "_") + "=", message)


def as_keys(message: str) -> str:
    """A message that names options as a run file has them: `batch`, not `--batch`."""
    return re.sub(r"--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), message)


def _fault(kind: type[Options], error: ValidationError) -> str:
    """The first mistake in one line."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # of several options together
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"]).strip()
        return f"{option_name(name)}{'' if text.startswith(':') else ' '}{text}"
    field, value = kind.model_fields[name], shown(first["input"])
    words = words_of(field.annotation)
    if words:
        text = first["input"]
        hint = did_you_mean(text, words) if isinstance(text, str) else ""
        return f"{option_name(name)} must be one of {', '.join(words)}, got {value}{hint}"
    wanted = _KIND_NAMES.get(kinds_of(field.annotation)[0], "of another type")
    is_nan = first["input"] != first["input"]
    broken = _range(limits_of(field), "" if is_nan else first["type"])
    return f"{option_name(name)} must be {wanted}{broken}, got {value}"


def limits_of(field: FieldInfo) -> dict[str, float]:
    """The range of a number: `ge`, `gt`, `le` and `lt`, if set."""
    bounds = ("ge", "gt", "le", "lt")
    return {
        bound: getattr(part, bound)
        for part in field.metadata
        for bound in bounds
        if getattr(part, bound, None) is not None
    }


def _range(limits: Mapping[str, float], fault: str) -> str:
    """The side of a range that a value broke; the lower one if it has another type."""
    if fault == "less_than_equal":
        return f" of at most {limits['le']}"
    if fault == "less_than":
        return f" below {limits['lt']}"
    if "gt" in limits:
        return f" above {limits['gt']}"
    return f" of at least {limits['ge']}" if "ge" in limits else ""


def from_text(field: FieldInfo, text: str) -> object:
    """The value of a command-line text; what is no number stays a text, for `Options` to refuse."""
    kinds = kinds_of(field.annotation)
    for kind in (int, float):
        if kind in kinds or (kind is int and float in kinds and str not in kinds):
            try:
                return kind(text)
            except ValueError:
                continue
    return text
