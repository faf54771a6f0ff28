"""What a comparison writes beside its table: JSON, and a report as HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from embroute.commands.job_options import output_file
from embroute.comparison import to_json
from embroute.config import parse_size
from embroute.policy.catalog import make_policy
from embroute.simulate import Job, measure
from embroute.views.detail import Compared, Recorder, SweepPoint, sweep_point

P = ParamSpec("P")
R = TypeVar("R")

CACHES = "2%,4%,6%,10%,20%,30%"


@dataclass(frozen=True)
class Outputs:
    """Files to write, as given on the command line."""

    json_path: Path | None
    report: Path | None
    report_caches: str

    @property
    def caches(self) -> list[str]:
        """Caches of the report, as given."""
        given = [part.strip() for part in self.report_caches.split(",") if part.strip()]
        return [] if given == ["none"] else given

    def check(self) -> None:
        """Refuse now what could not be written later."""
        for option, path in (("--json", self.json_path), ("--report", self.report)):
            if path is not None:
                output_file(option, path)
        for cache in self.caches:
            parse_size("--report-caches", cache)

    def write(self, found: Compared) -> None:
        """Write what was asked for."""
        if self.json_path is not None:
            values = to_json(list(found.lines), found.job, found.data)
            _written(self.json_path, json.dumps(values, indent=2) + "\n")
        if self.report is not None:
            from embroute.views.comparison import comparison_page  # bokeh is slow to import

            names = [entry.name for entry in found.lines if not entry.reference]
            points = sweep(names, found.job, self.caches, Console(stderr=True))
            _written(self.report, comparison_page(replace(found, sweep=points)))


def _written(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    click.echo(f"written: {path}", err=True)


_OPTIONS = (
    click.option(
        "--json", "json_path", type=click.Path(path_type=Path), help="Write results here."
    ),
    click.option("--report", type=click.Path(path_type=Path), help="Write an HTML report here."),
    click.option(
        "--report-caches",
        default=CACHES,
        show_default=True,
        help="Caches of the report's sweep, or none.",
    ),
)


def output_options(command: Callable[Concatenate[Outputs, P], R]) -> Callable[P, R]:
    """Add the options of files to a command; it gets them as its first argument."""

    @wraps(command)
    def with_options(*args: P.args, **kwargs: P.kwargs) -> R:
        values = {name: kwargs.pop(name) for name in Outputs.__dataclass_fields__}
        return command(Outputs(**values), *args, **kwargs)  # type: ignore[arg-type]

    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options


@contextmanager
def steps_bar(console: Console, total: int) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """A bar; what is under way is named with the steps done before it, and gets its tick."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=total)

        def begin(name: str, done: int) -> Callable[[], None]:
            progress.update(task, description=f"{name:.30s}", completed=done)
            return lambda: progress.advance(task)

        yield begin


def sweep(names: list[str], job: Job, caches: list[str], console: Console) -> list[SweepPoint]:
    """Measure policies with other caches; a cache that cannot hold a step is left out."""
    points = []
    cases = [(name, cache) for name in names for cache in caches]
    with steps_bar(console, len(cases) * job.steps) as begin_one:
        for done, (name, cache) in enumerate(cases):
            tick = begin_one(f"{name}, cache {cache}", done * job.steps)
            setup = replace(job.setup, cache=parse_size("--report-caches", cache))
            recorder = Recorder(job.warmup, tick)
            try:
                outcome = measure(make_policy(name), replace(job, setup=setup), recorder.watch)
            except ValueError as error:
                click.echo(f"left out of the report: {name}, cache {cache}: {error}", err=True)
                continue
            points.append(sweep_point(name, cache, outcome))
    return points
