"""Options that several commands share: those of a run, of data files and of output files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TextIO, TypeVar

import click
from pydantic.fields import FieldInfo

from embroute.config.data_options import DataOptions
from embroute.config.option_model import (
    Group,
    Options,
    extra_of,
    from_text,
    kinds_of,
    limits_of,
    option_name,
    words_of,
)
from embroute.config.run_options import JobOptions, RunConfig
from embroute.config.spec import LARGEST_COUNT, parse_path, shown

_P = ParamSpec("_P")
_R = TypeVar("_R")
STDOUT, STDOUT_KEY = Path("-"), "embroute.stdout"  # the option whose file is `-`
_O = TypeVar("_O", bound=Options)
_C = TypeVar("_C", bound=Callable[..., Any])


class GroupedCommand(click.Command):
    """A command whose help lists options under headings, in the order of their first option."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group."""
        groups: dict[Group, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                groups.setdefault(getattr(param, "group", Group.OTHER), []).append(record)
        for group in sorted(groups, key=[*Group].index):
            with formatter.section(group):
                formatter.write_dl(groups[group])


class FieldOption(click.Option):
    """An option made from a field of `Options`, which checks the value and has the default."""

    def __init__(self, name: str, field: FieldInfo, default: object = None) -> None:
        kind = _click_type(field)
        super().__init__(
            [option_name(name)],
            type=kind,
            is_flag=kind is click.BOOL,
            default=default,
            help=field.description,
            metavar=extra_of(field, "metavar"),
        )
        self.field, self.group = field, Group(str(extra_of(field, "group")))

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The value of a text; its range is checked with the other options."""
        return from_text(self.field, value) if isinstance(value, str) else value

    def get_help_extra(self, ctx: click.Context) -> Any:
        """The default and the range, as the help shows them."""
        extra = super().get_help_extra(ctx)
        default = self.field.default
        if default not in (None, "", ()) and not isinstance(default, bool):
            extra["default"] = str(default)
        return extra


def _click_type(field: FieldInfo) -> click.ParamType[Any]:
    """The type of an option as the help shows it."""
    kind, limits = kinds_of(field.annotation)[0], limits_of(field)
    if words_of(field.annotation):
        return click.Choice(words_of(field.annotation))
    if kind is bool:
        return click.BOOL
    if kind not in (int, float):
        return click.STRING
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    high = None if high is not None and high >= LARGEST_COUNT else high
    low = None if low is not None and low <= -LARGEST_COUNT else low
    if low is None and high is None:
        return click.INT if kind is int else click.FLOAT
    if kind is int:
        low, high = (None if end is None else int(end) for end in (low, high))
        return click.IntRange(low, high)
    return click.FloatRange(low, high, min_open="gt" in limits, max_open="lt" in limits)


def field_option(kind: type[Options], name: str) -> Callable[[_C], _C]:
    """The option of one field; the command gets the default if the user gives no value."""
    field = kind.model_fields[name]
    return _adding(FieldOption(name, field, field.default))


def _adding(option: click.Option) -> Callable[[_C], _C]:
    def decorate(command: _C) -> _C:
        command.__dict__.setdefault("__click_params__", []).append(option)
        return command

    return decorate


Given = Callable[Concatenate[dict[str, object], _P], _R]  # a command that takes values first


def given(kind: type[Options]) -> Callable[[Given[_P, _R]], Callable[_P, _R]]:
    """Add an option for each field to a command; it gets the values that the user gave."""
    names = [name for name, field in kind.model_fields.items() if extra_of(field, "group")]

    def decorate(command: Given[_P, _R]) -> Callable[_P, _R]:
        @wraps(command)
        def with_options(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            values = {name: kwargs.pop(name) for name in names}
            set_ones = {name: value for name, value in values.items() if value is not None}
            return command(set_ones, *args, **kwargs)

        for name in reversed(names):
            with_options = _adding(FieldOption(name, kind.model_fields[name]))(with_options)
        return with_options

    return decorate


def built(
    kind: type[_O],
) -> Callable[[Callable[Concatenate[_O, _P], _R]], Callable[_P, _R]]:
    """Add an option for each field to a command; it gets them as its first argument, a `kind`."""

    def decorate(command: Callable[Concatenate[_O, _P], _R]) -> Callable[_P, _R]:
        @wraps(command)
        def with_object(values: dict[str, object], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            return command(kind(**values), *args, **kwargs)

        return given(kind)(with_object)

    return decorate


job_options, data_options = built(JobOptions), built(DataOptions)


def limited(name: str) -> click.ParamType[Any]:
    """The type of an option that a command takes beside those of a run."""
    return _click_type({**RunConfig.model_fields, **DataOptions.model_fields}[name])


def in_group(name: Group) -> type[click.Option]:
    """Options that the help lists under this heading."""
    return type("GroupOption", (click.Option,), {"group": name})


def output_file(option: str, path: Path) -> Path:
    """A file that results can be written to later, checked before the work starts; `-`: stdout."""
    parse_path(option, str(path))
    if path == STDOUT:
        taken = click.get_current_context().meta.setdefault(STDOUT_KEY, option)
        if taken != option:
            raise ValueError(f"{taken} - and {option} -: only one result fits standard output")
        return path
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:  # such as a name that is too long, or a parent that is a file
        raise ValueError(f"{option} {shown(str(path))}: {error.strerror}") from None
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{option} {path}: this is a folder, give a file in it")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"{option} {path}: it cannot be written to")
    return path


def report_file(option: str, path: Path) -> Path:
    """A file that a report can be written to later, checked before the work starts."""
    require_bokeh(option)
    return output_file(option, path)


def require_bokeh(wanted_by: str) -> None:
    """Refuse a report if bokeh, an optional dependency, is missing."""
    if find_spec("bokeh") is None:
        raise ValueError(
            f"{wanted_by} needs bokeh, which is not installed: pip install embroute[report]"
        )


@contextmanager
def naming_output(option: str, path: Path) -> Iterator[None]:
    """Let an error name the option: errors of an open file do not name the file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or f"{option} {path}") from None


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that replaces an older file after the last write.

    A link stays: its target is replaced. A device or a pipe is written directly, because renaming
    a file over it would remove it.
    """
    if path == STDOUT:
        yield sys.stdout
        return
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
