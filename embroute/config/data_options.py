"""How files are read, as users describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from embroute.config.option_model import Group, Options, option
from embroute.config.spec import LARGEST_COUNT, shown

Format = Literal["criteo", "avazu", "movielens", "table"]


def _name(value: object) -> Any:
    """A text that is not empty; YAML reads some names as numbers."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value).strip()
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"must be a text that is not empty, got {shown(value)}")
    return value


def _separator(value: object) -> Any:
    if value is None:
        raise ValueError("must be a text that is not empty, got None")
    return _name(value)


def _columns(value: object) -> Any:
    """Names of columns: a list, or a text that separates them by commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and all(isinstance(one, str | int | float) for one in parts):
        names = tuple(str(one).strip() if isinstance(value, str) else str(one) for one in parts)
        if all(names):
            return names
        raise ValueError(f"{shown(value)} has an empty name; give columns such as a,b")
    raise ValueError(f"must be names of columns, got {shown(value)}")


Column = Annotated[str | None, PlainValidator(_name), WithJsonSchema({"type": "string"})]
Separator = Annotated[str, PlainValidator(_separator), WithJsonSchema({"type": "string"})]
ColumnNames = Annotated[
    tuple[str, ...],
    PlainValidator(_columns),
    PlainSerializer(list),
    WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}}),
]


class DataOptions(Options):
    """How files are read; built-in data takes only `limit`."""

    format: Format | None = option(
        None, Group.READING, "Format of the files. Without it, detected."
    )
    label: Column = option(
        None, Group.READING, "Column of labels, 0 or 1; may be left out.", "COLUMN"
    )
    categorical: ColumnNames = option(
        (),
        Group.READING,
        "Columns of ids, or `all`: every column without another use.",
        "COLUMNS",
    )
    dense: ColumnNames = option(
        (), Group.READING, "Columns of numbers; a missing number becomes 0.", "COLUMNS"
    )
    bag: ColumnNames = option((), Group.READING, "Columns with any number of ids each.", "COLUMNS")
    bag_separator: Separator = option("|", Group.READING, "Text between two ids.", "TEXT")
    time: Column = option(
        None, Group.READING, "Sort samples by this column of numbers or ISO dates.", "COLUMN"
    )
    ids: Literal["vocab", "hash"] = option(
        "vocab",
        Group.READING,
        "Number the values of a field in order of first appearance, or hash them.",
    )
    hash_rows: int | None = option(
        None, Group.READING, "Rows of a field with --ids hash.", ge=1, le=LARGEST_COUNT
    )
    missing: Literal["id", "padding"] = option(
        "id", Group.READING, "A missing value becomes a separate id, or touches no row."
    )
    positive_rating: float = option(
        4.0, Group.READING, "MovieLens: the smallest rating with label 1.", ge=-1e30, le=1e30
    )
    skip_bad_rows: bool = option(False, Group.READING, "Leave bad rows out and count them.")
    limit: int | None = option(None, Group.READING, "Use only the first samples.", ge=1, le=10**15)

    @model_validator(mode="after")
    def _check_hashing(self) -> DataOptions:
        if (self.ids == "hash") != (self.hash_rows is not None):
            raise ValueError(
                "--ids hash and --hash-rows N are given together or not at all, "
                f"got --ids {self.ids} and --hash-rows {self.hash_rows}"
            )
        return self


def data_options_of(value: object) -> Any:
    """Data options from a mapping such as that of a run file."""
    if isinstance(value, DataOptions):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping, got {shown(value)}")
    try:
        return DataOptions(**{str(name): entry for name, entry in value.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f": {error}") from None
