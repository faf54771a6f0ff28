"""Types of options that have a form of their own: sizes, widths, shares, paths, networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from os import PathLike
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from embroute.config.cluster import Cluster
from embroute.config.data_options import DataOptions, data_options_of
from embroute.config.spec import (
    LARGEST_WIDTH,
    Size,
    parse_cache,
    parse_int,
    parse_number,
    parse_path,
    parse_size,
    shown,
)


def check_cache(value: object) -> Any:
    """The size of all caches, or the sizes, as the user wrote them."""
    if isinstance(value, bool) or not isinstance(value, Size | str | int | float):
        raise ValueError(f"must look like 'auto', 0.1, '10%' or '256MB', got {shown(value)}")
    if isinstance(value, int) and not 0 <= value <= 10**15:
        bound = "at most 1000000000000000" if value > 0 else "at least 0"
        raise ValueError(f"must be a whole number of {bound}, got {shown(value)}")
    parse_cache("", value)
    return value


def quota_shares(value: str | Sequence[float] | None) -> tuple[float, ...]:
    """Relative shares of the workers, such as `2,2,1,1`; none by default."""
    if isinstance(value, str):
        return tuple(parse_number("--quotas", part, 0, 1e9) for part in value.split(",") if value)
    return tuple(value or ())


def _check_quotas(value: object) -> Any:
    if value is None or value == "":
        return None
    shares = value
    if isinstance(value, str):
        shares = [parse_number("", part, 0, 1e9) for part in value.split(",")]
    if not isinstance(shares, list | tuple):
        raise ValueError(f"must be a list of numbers, one a worker, got {shown(value)}")
    for share in shares:
        number = isinstance(share, Real) and not isinstance(share, bool)
        if not number or not share >= 0:
            fault = f"a share must be a number of at least 0, got {shown(share)}"
            raise ValueError(f"{shown(value)}: {fault}")
        if share > 10**9:
            fault = f"a share must be a number of at most {10**9}, got {shown(share)}"
            raise ValueError(f"{shown(value)}: {fault}")
    if shares and not sum(shares):
        raise ValueError(f"must have a share above 0, got {shown(value)}")
    return value


def _check_widths(value: object, parts: list[str]) -> None:
    for part in parts:
        try:
            parse_int("", part, 1, LARGEST_WIDTH)
        except ValueError:
            fault = f"a width must be a whole number from 1 to {LARGEST_WIDTH}"
            raise ValueError(f"{shown(value)}: {fault}") from None


def _check_dim(value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"must look like 64 or 64,C1=16, got {shown(value)}")
    text = str(value)
    _check_widths(text, [part.rpartition("=")[2] for part in text.split(",")])
    return text


def _check_hidden(value: object) -> Any:
    """Widths of layers as text: from a text, a number or a list."""
    if isinstance(value, bool) or not isinstance(value, str | int | list | tuple):
        raise ValueError(f"must look like 256,128, got {shown(value)}")
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    _check_widths(text, text.split(",") if text else [])
    return text


def _check_counts(value: object) -> Any:
    """Some numbers as text: from a text, a number or a list."""
    if value is None or isinstance(value, str):
        return value
    numbers = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in numbers):
        raise ValueError(f"must be one or several whole numbers, got {shown(value)}")
    return ",".join(map(str, numbers))


def parse_bytes(name: str, value: str | float) -> float:
    """A number of bytes: `4000000` or `4MB`."""
    text = str(value)
    size = parse_size(name, text + "B" if text.replace(".", "").isdigit() else text)
    if size.unit != "bytes":
        raise ValueError(f"{name} must look like 4000000 or 4MB, got {shown(text)}")
    return size.amount


def _check_bytes(value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must look like 4000000 or 4MB, got {shown(value)}")
    parse_bytes("", value)
    return value


def _check_network(value: object) -> Any:
    if value is not None and not isinstance(value, Cluster | str):
        raise ValueError(f"must be a Cluster, a preset or a YAML file, got {shown(value)}")
    return value or None


def _check_nodes(value: object) -> Any:
    if value is None:
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping of nodes to lists of ranks, got {shown(value)}")
    for node, ranks in value.items():
        listed = isinstance(ranks, list | tuple) and all(isinstance(rank, str) for rank in ranks)
        if not isinstance(node, str) or not listed:
            raise ValueError(f"{shown(node)} must be a list of ranks, got {shown(ranks)}")
    return value or None


def check_path(value: object) -> Any:
    """A path as text."""
    text = str(value) if isinstance(value, str | PathLike) else ""
    try:
        parse_path("", text)
    except ValueError:
        raise ValueError(f"must be a path, got {shown(value)}") from None
    return text


def _check_text(value: object) -> Any:
    """A text; YAML reads some texts as numbers."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be a text, got {shown(value)}")
    return str(value)


_TEXT = WithJsonSchema({"type": "string"})
_TEXT_OR_NUMBER = WithJsonSchema({"type": ["string", "number"]})
Text = Annotated[str, PlainValidator(_check_text), _TEXT]
PathText = Annotated[str, PlainValidator(check_path), _TEXT]
CacheSize = Annotated[Size | float | str, PlainValidator(check_cache), _TEXT_OR_NUMBER]
Widths = Annotated[str | int, PlainValidator(_check_dim), _TEXT_OR_NUMBER]
Hidden = Annotated[str | Sequence[int], PlainValidator(_check_hidden), _TEXT_OR_NUMBER]
Bytes = Annotated[str | float, PlainValidator(_check_bytes), _TEXT_OR_NUMBER]
Counts = Annotated[str | int | Sequence[int] | None, PlainValidator(_check_counts), _TEXT_OR_NUMBER]
Reading = Annotated[
    DataOptions, PlainValidator(data_options_of), WithJsonSchema(DataOptions.model_json_schema())
]
NodeRanks = Annotated[
    Mapping[str, Sequence[str]] | None,
    PlainValidator(_check_nodes),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "array"}}),
]
NetworkName = Annotated[Cluster | str | None, PlainValidator(_check_network), _TEXT]
Quotas = Annotated[
    str | Sequence[float] | None,
    PlainValidator(_check_quotas),
    WithJsonSchema({"type": ["string", "array", "null"], "items": {"type": "number"}}),
]
