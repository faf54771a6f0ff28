"""`embroute data`: look at data before training on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from embroute.cli.options import GroupedCommand, data_options, limited, output_file
from embroute.cli.outputs import console, data_words, tell, tell_next, write_output
from embroute.config.data_options import DataOptions
from embroute.config.progress import progress_bar
from embroute.config.run_options import JobOptions
from embroute.data.batch import Source
from embroute.data.describe import (
    RECENT_BATCHES,
    TOP_SHARES,
    Description,
    FieldDescription,
    describe,
)
from embroute.data.open import naming, open_source, proposed_uses
from embroute.data.proposal import ColumnProposal, as_options
from embroute.data.readers.file_source import FileSource
from embroute.data.readers.files import Progress
from embroute.simulator.workload import cluster_of


@click.group("data")
def data_group() -> None:
    """Look at data sets."""


@data_group.command("describe", cls=GroupedCommand)
@click.argument("data_name", metavar="PATH|NAME")
@data_options
@click.option(
    "--batch", type=limited("batch"), default=1024, show_default=True, help="Samples per batch."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the tables as JSON too."
)
def describe_command(
    options: DataOptions, data_name: str, batch: int, json_file: Path | None
) -> None:
    """Show samples, fields, distinct ids, skew, and reuse between batches, as tables.

    PATH is a file, a directory or a pattern; NAME is built-in data such as online-retail. If no
    option names a column, uses of the columns are proposed.
    """
    if json_file is not None:
        output_file("--json", json_file)
    proposals = proposed_uses(data_name, options)
    if proposals:
        console().print(_proposals(proposals))
        options = options.replace(**as_options(proposals))
        if not options.categorical and not options.bag:
            raise ValueError(f"{data_name}: no column looks like ids; name some with --categorical")
    with reading_progress() as report:
        source = open_source(data_name, options, report)

        def report_samples(num_samples: int) -> None:
            report("describing", num_samples / source.num_samples if source.num_samples else 0.0)

        description = describe(source, batch, report_samples)
    if json_file is not None:
        write_output("--json", json_file, json.dumps(asdict(description), indent=2) + "\n")
    _show(data_name, description)
    if not proposals:
        tell_note(source)
    tell_bad_rows(source)
    steps = _steps_that_fit(description.num_samples)
    tell_next("embroute", "compare", *data_words(data_name, options), *steps)


def _steps_that_fit(num_samples: int) -> list[str]:
    """Options of `compare` with which the data does not end before the first measured step."""
    job = JobOptions()
    workers = cluster_of(job).num_workers
    if num_samples > (job.warmup + 1) * job.batch * workers:
        return []
    batch = max(1, num_samples // (workers * 3 * job.warmup))
    warmup = ["--warmup", "0"] if num_samples <= (job.warmup + 1) * batch * workers else []
    return ["--batch", str(batch), *warmup]


def open_data_option(data: str, options: DataOptions) -> Source:
    """The data of --data, opened with a progress bar; notes about its columns go to stderr."""
    with reading_progress() as progress, naming("--data", data):
        source = open_source(data, options, progress)
    tell_note(source)
    return source


def tell_note(source: Source) -> None:
    """Print one line about columns that are probably used otherwise."""
    if isinstance(source, FileSource) and source.note:
        tell(source.note)


@contextmanager
def reading_progress() -> Iterator[Progress]:
    """A progress bar for opening and describing data."""
    with progress_bar("opening", 1.0, counted=False) as update:
        yield lambda activity, share: update(description=activity, completed=share)


def tell_bad_rows(source: Source) -> None:
    """Print one line on stderr about the rows that the latest pass left out."""
    if isinstance(source, FileSource) and source.bad_rows:
        tell(source.skipped)


def _show(name: str, description: Description) -> None:
    """Print a description; the tables fit 80 columns."""
    tables = console()
    reuse = description.reuse
    tables.print(name, markup=False, highlight=False, soft_wrap=True)
    tables.print(_facts(description))
    tables.print(_skew(description))
    if reuse.num_batches:
        tables.print(_reuse(description))


def _proposals(columns: Sequence[ColumnProposal]) -> Table:
    table = Table(title="Proposed uses of the columns")
    for heading in ("column", "use", "because of"):
        table.add_column(heading, overflow="fold")
    for column in columns:
        use = f"--{column.use}" if column.use else "not used"
        table.add_row(escape(column.name), use, escape(column.reason))
    return table


def _facts(description: Description) -> Table:
    table = Table(show_header=False)
    labels = description.positive_share
    rows = (
        ("samples", f"{description.num_samples:,}"),
        ("fields", f"{len(description.fields)}"),
        ("dense columns", f"{description.num_dense}"),
        ("distinct ids", f"{description.total.distinct:,}"),
        ("table rows", f"{description.num_rows:,}"),
        ("look-ups", f"{description.total.lookups:,}"),
        ("positive labels", "no labels" if labels is None else f"{labels:.2%}"),
    )
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _skew(description: Description) -> Table:
    table = Table(title="Share of look-ups that go to the top ids, at least one")
    table.add_column("field", overflow="fold")
    for heading in ("look-ups", "ids", *(f"top {100 * share:g}%" for share in TOP_SHARES)):
        table.add_column(heading, justify="right", no_wrap=True)
    for field in description.fields:
        table.add_row(*_skew_row(field))
    table.add_section()
    table.add_row(*_skew_row(description.total))
    return table


def _skew_row(field: FieldDescription) -> tuple[str, ...]:
    shares = (f"{share:.1%}" for share in field.top_shares)
    return escape(field.name), f"{field.lookups:,}", f"{field.distinct:,}", *shares


def _reuse(description: Description) -> Table:
    reuse = description.reuse
    table = Table(title=f"Reuse between batches of {reuse.batch_size}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("batches", f"{reuse.num_batches:,}")
    table.add_row("distinct rows a batch", f"{reuse.distinct_rows:,.1f}")
    table.add_row("look-ups a distinct row", f"{reuse.lookups_per_row:.2f}")
    table.add_row("rows also in the previous batch", _share(reuse.in_previous))
    table.add_row(f"rows also in the previous {RECENT_BATCHES} batches", _share(reuse.in_recent))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
